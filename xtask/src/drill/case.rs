//! The cases of a drill: each follows from its seed and number.

use serde_json::{Value, json};

use super::steady::ENDLESS;

/// A job and the harm that is done to it.
pub struct Case {
    pub seed: u64,
    pub number: u64,
    /// The harm: all that the judge will know of the case.
    pub harm: Value,
    /// The command line behind the program.
    pub words: Vec<String>,
    /// Milliseconds from the first step of the job to the harm.
    pub delay_ms: u64,
    /// Steps of the job, if it is to end by itself.
    pub steps: u64,
    pub devices: Devices,
    pub random: Random,
}

/// The devices that the ranks of a case compute on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// The host.
    None,
    Emulated,
    /// One GPU that all ranks share, as processes: threads of one process share its queues.
    Gpu,
}

impl Devices {
    /// The flag of `drill` that asks for them.
    pub fn flag(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Emulated => " --emulated",
            Self::Gpu => " --gpu",
        }
    }
}

/// SplitMix64.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// A model whose steps take milliseconds, and one whose steps take a second on emulated devices.
const MODEL: &str = "--task copy --seq 16 --batch 24 --d-model 32 --head-dim 16 --d-ff 32";
const EMULATED_MODEL: &str =
    "--task copy --layers 1 --seq 16 --batch 12 --d-model 32 --head-dim 16 --d-ff 32";

/// Steps of jobs that are to end by themselves; of those on emulated devices.
const STEPS: u64 = 40;
const EMULATED_STEPS: u64 = 6;

/// Kinds of harm, the frequent ones more than once.
const KINDS: [&str; 16] = [
    "kill", "kill", "kill", "stop", "pause", "meeting", "launcher", "stalled", "full", "fds",
    "memory", "files", "stranger", "damage", "restart", "restart",
];

/// Of which those that a GPU meets: it needs memory, files and descriptors of its own, which limits
/// of the process do not leave it. A job whose output nobody reads computes nothing.
const ON_A_GPU: [&str; 9] =
    ["kill", "stop", "pause", "meeting", "launcher", "full", "stranger", "damage", "restart"];

/// Seconds that a job takes which ends by itself, on a busy machine.
const TAKES: [(Devices, f64); 3] =
    [(Devices::None, 12.0), (Devices::Emulated, 120.0), (Devices::Gpu, 40.0)];

impl Case {
    pub fn new(seed: u64, number: u64, devices: Devices) -> Self {
        let slow = devices != Devices::None;
        let mut r = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let ranks = if slow { r.of(&[2, 2, 3, 4]) } else { r.of(&[2, 2, 3, 4, 4, 6, 8]) };
        let grid = match (ranks, r.below(3)) {
            (2 | 4 | 6 | 8, 0) => "--cp 2",
            (2 | 4 | 6 | 8, 1) => "--tp 2",
            (4 | 8, _) => "--cp 2 --tp 2",
            _ => "",
        };
        let kind = if devices == Devices::Gpu { r.of(&ON_A_GPU) } else { r.of(&KINDS) };
        let deadline = if slow { 5 } else { 1 };
        let rank = r.below(ranks);
        let endless = "--steps 1000000";
        let steps = if devices == Devices::Emulated { EMULATED_STEPS } else { STEPS };
        let bounded = format!("--steps {steps}");
        let (harm, job) = match kind {
            "kill" => {
                let (name, signal) = r.of(&[("KILL", 9), ("TERM", 15), ("SEGV", 11), ("ABRT", 6)]);
                let harm = json!({ "rank": rank, "name": name, "signal": signal });
                // A third of the jobs are others: one operation after the other.
                let verify = format!("run -n {ranks} -- SELF verify --quiet");
                (harm, if r.below(3) == 0 { verify } else { process(ranks, endless) })
            }
            "pause" => {
                let more = format!("{endless} --timeout-s {} --checkpoint c", 5 * deadline);
                (json!({ "rank": rank, "ms": 50 + r.below(700) }), process(ranks, &more))
            }
            "stop" => {
                let more = format!("{endless} --timeout-s {deadline}");
                // A deadline of a device is one of its kernels, which is met late where ranks share
                // it, or where it is emulated.
                let by = if slow { 3 * deadline } else { deadline };
                (json!({ "rank": rank, "deadline": by }), process(ranks, &more))
            }
            "meeting" => {
                let more = format!("{bounded} --timeout-s {deadline}");
                (json!({ "rank": rank, "deadline": deadline }), process(ranks, &more))
            }
            "launcher" => (json!({}), process(ranks, endless)),
            "stalled" => (json!({ "limit": 1 }), format!("run -n {ranks} --timeout-s 1 -- yes")),
            "full" | "fds" | "memory" | "files" => exhausted(kind, &mut r, ranks, devices),
            "stranger" => (json!({}), process(ranks, &bounded)),
            "damage" if devices == Devices::Gpu => (json!({}), process(ranks, &bounded)),
            "damage" => (json!({}), threads(ranks, &bounded)),
            _ => (json!({ "kills": 1 + r.below(3) }), restarted(ranks, &bounded)),
        };
        let mut harm = harm;
        (harm["kind"], harm["ranks"]) = (json!(kind), json!(ranks));
        (harm["devices"], harm["takes"]) = (json!(slow), json!(takes(kind, devices)));
        let mut words: Vec<String> = job.split_whitespace().map(str::to_owned).collect();
        if job.contains(" train ") || job.starts_with("train ") {
            let model = if devices == Devices::Emulated { EMULATED_MODEL } else { MODEL };
            words.extend(format!("{model} {grid}").split_whitespace().map(str::to_owned));
        }
        if kind == "meeting" {
            // The rank stops before it becomes the program.
            let script = format!("[ $RANK = {rank} ] && kill -STOP $$; exec \"$0\" \"$@\"");
            let at = words.iter().position(|w| w == "SELF").unwrap_or(0);
            words.splice(at..at, ["sh".to_owned(), "-c".to_owned(), script]);
        }
        if slow && kind != "stalled" {
            words.extend(["--backend".to_owned(), "vmm".to_owned()]);
        }
        // The start of a job, a good part of its life, is reached by cases that do not wait for the
        // first step.
        let delay_ms = r.below(400);
        Self { seed, number, harm, words, delay_ms, steps, devices, random: r }
    }

    /// One job of four ranks for so many seconds, of which a rank is killed every `period` seconds.
    pub fn steady(seed: u64, seconds: u64, period: u64) -> Self {
        let kills = seconds / period.max(1);
        let harm = json!({ "kind": "steady", "ranks": 4, "kills": kills, "period": period });
        let words = format!(
            "run -n 4 --max-restarts {kills} -- SELF train --steps {ENDLESS} --metrics m --every EVERY \
             --checkpoint c {MODEL} --cp 2 --tp 2"
        );
        let words = words.split_whitespace().map(str::to_owned).collect();
        let (devices, random) = (Devices::None, Random(seed));
        Self { seed, number: 0, harm, words, delay_ms: 0, steps: STEPS, devices, random }
    }

    /// The flags that run this case again, beside the seed.
    pub fn again(&self) -> String {
        match self.harm["period"].as_u64() {
            Some(p) => {
                let kills = self.harm["kills"].as_u64().unwrap_or(0);
                format!("--seconds {} --every {p}", kills * p)
            }
            None => format!("--case {}{}", self.number, self.devices.flag()),
        }
    }

    /// True if ranks are killed that may be writing.
    pub fn kills_writers(&self) -> bool {
        matches!(&*self.harm(), "restart" | "steady")
    }

    /// The kind of harm.
    pub fn harm(&self) -> String {
        self.harm["kind"].as_str().unwrap_or_default().to_owned()
    }
}

/// Seconds that a job takes which ends by itself. Others are asked to, and end behind the step that
/// they are in.
fn takes(kind: &str, devices: Devices) -> Option<f64> {
    let ends_by_itself = ["fds", "memory", "files", "stranger", "damage"].contains(&kind);
    let is_slow = devices != Devices::None;
    TAKES.iter().find(|(on, _)| *on == devices && (ends_by_itself || is_slow)).map(|(_, s)| *s)
}

fn threads(ranks: u64, more: &str) -> String {
    format!("train --ranks {ranks} {more} --metrics m")
}

fn process(ranks: u64, more: &str) -> String {
    format!("run -n {ranks} -- SELF train {more} --metrics m")
}

fn restarted(ranks: u64, more: &str) -> String {
    format!(
        "run -n {ranks} --max-restarts 9 -- SELF train {more} --metrics m --every 2 --checkpoint c"
    )
}

/// A job that lacks space, descriptors, memory or files. In half of the cases it writes
/// checkpoints, by threads of their own.
fn exhausted(kind: &str, r: &mut Random, ranks: u64, devices: Devices) -> (Value, String) {
    let is_emulated = devices == Devices::Emulated;
    let (every, steps) = if is_emulated { (2, EMULATED_STEPS) } else { (10, STEPS) };
    let save = format!(" --checkpoint c --every {every}");
    let more = if kind == "files" || r.below(2) == 1 { save } else { String::new() };
    if kind == "full" {
        let endless = format!("--steps {ENDLESS}{more}");
        // Devices come to their first step, and to their second, in seconds.
        let begin = if devices == Devices::None { 0 } else { 25 };
        let harm = json!({ "begin": begin });
        let by_threads = r.below(2) == 0 && devices != Devices::Gpu;
        let job = if by_threads { threads(ranks, &endless) } else { process(ranks, &endless) };
        return (harm, job);
    }
    let limit = match kind {
        "fds" => 8 + r.below(120),
        "files" => 1 + r.below(40),
        // An emulated device has its memory in its process.
        _ if is_emulated => (60 + r.below(4000)) << 10,
        _ => (60 + r.below(900)) << 10,
    };
    (json!({ "limit": limit }), threads(ranks, &format!("--steps {steps}{more}")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A failure prints what repeats it: nothing of a case comes from elsewhere.
    #[test]
    fn seed_and_number_say_the_whole_case() {
        for devices in [Devices::None, Devices::Emulated, Devices::Gpu] {
            let text = |seed, number| {
                let c = Case::new(seed, number, devices);
                format!("{} {:?} {} {}", c.harm, c.words, c.delay_ms, c.random.clone().next())
            };
            let all: Vec<String> = (0..200).map(|n| text(7, n)).collect();
            assert!((0..200).all(|n| text(7, n) == all[n as usize]));
            assert!(all.iter().collect::<BTreeSet<_>>().len() > 190, "cases that are alike");
            assert_ne!(text(8, 0), all[0]);
            let again = Case::new(7, 3, devices).again();
            assert_eq!(again, format!("--case 3{}", devices.flag()));
        }
    }

    #[test]
    fn every_kind_of_harm_comes() {
        for devices in [Devices::None, Devices::Emulated] {
            let kinds: BTreeSet<_> = (0..400).map(|n| Case::new(1, n, devices).harm()).collect();
            assert_eq!(kinds.len(), 13, "{kinds:?}");
        }
        let kinds: BTreeSet<_> = (0..400).map(|n| Case::new(1, n, Devices::Gpu).harm()).collect();
        assert_eq!(kinds, ON_A_GPU.map(str::to_owned).into());
        let verifies = |n: &u64| Case::new(1, *n, Devices::None).words.contains(&"verify".into());
        assert!((0..400).any(|n| verifies(&n)));
    }
}
