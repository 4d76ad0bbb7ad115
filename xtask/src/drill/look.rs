//! Observations of a job from outside: processes, files, ports, curves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// In the environment of every process of a case.
pub const MARK: &str = "_DRILL_CASE";

fn environ(pid: u32) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default()
}

fn has(vars: &[u8], word: &str) -> bool {
    vars.split(|b| *b == 0).any(|v| v == word.as_bytes())
}

fn pids() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten();
    all.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Processes of a case that live: numbers and names.
pub fn alive(mark: &str) -> Vec<String> {
    let word = format!("{MARK}={mark}");
    let one = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = stat.rsplit_once(')')?;
        let is_zombie = rest.trim_start().starts_with(['Z', 'X']);
        (has(&environ(pid), &word) && !is_zombie).then(|| name.replace('(', ""))
    };
    pids().into_iter().filter_map(one).collect()
}

/// Waits, at most a second, until no process of a case lives. Returns those that still do.
pub fn left(mark: &str) -> (Vec<String>, f64) {
    let start = Instant::now();
    loop {
        let all = alive(mark);
        if all.is_empty() || start.elapsed() > Duration::from_secs(1) {
            return (all, start.elapsed().as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The ranks of a launcher, by number, that run the program (not what comes before its `exec`).
pub fn ranks(launcher: u32) -> BTreeMap<u64, u32> {
    // Whichever thread has started them.
    let tasks = std::fs::read_dir(format!("/proc/{launcher}/task")).into_iter().flatten();
    let list = |t: std::fs::DirEntry| std::fs::read_to_string(t.path().join("children")).ok();
    let children: String = tasks.filter_map(|t| list(t.ok()?)).collect();
    let rank = |pid: &str| {
        let pid = pid.parse().ok()?;
        let vars = environ(pid);
        let rank = vars.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"RANK="))?;
        Some((String::from_utf8_lossy(rank).parse().ok()?, pid))
    };
    children.split_whitespace().filter_map(rank).collect()
}

/// TCP ports that a process listens at.
pub fn ports(pid: u32) -> Vec<u16> {
    let inodes = sockets_of(pid);
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let f: Vec<&str> = line.split_whitespace().collect();
        let listens = f.get(3) == Some(&"0A") && f.get(9).is_some_and(|i| inodes.contains(*i));
        let (_, port) = f.get(1)?.split_once(':')?;
        listens.then(|| u16::from_str_radix(port, 16).ok()).flatten()
    };
    table.lines().filter_map(port).collect()
}

/// Descriptors that a process has open: the fewest that were seen in a while, as connections and
/// files come and go.
pub fn descriptors(pid: u32) -> usize {
    let count = |_| {
        std::thread::sleep(Duration::from_millis(5));
        std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
    };
    (0..20).map(count).min().unwrap_or(0)
}

/// Abstract Unix sockets with a name of ours that no process holds, by their inodes. A process that
/// is ending has no descriptors to be seen before the kernel has closed them, which takes a while
/// where it used a GPU: what is gone within [`CLOSING`] was such a one's.
pub fn orphans() -> BTreeSet<String> {
    let look = || {
        let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let held: BTreeSet<String> = pids().into_iter().flat_map(sockets_of).collect();
        let ours = |line: &str| {
            let f: Vec<&str> = line.split_whitespace().collect();
            let (inode, name) = (*f.get(6)?, *f.get(7)?);
            let lost = name.starts_with("@tilewire") && !held.contains(inode);
            lost.then(|| format!("{name} ({inode})"))
        };
        table.lines().filter_map(ours).collect::<BTreeSet<String>>()
    };
    let (mut found, start) = (look(), Instant::now());
    while !found.is_empty() && start.elapsed() < CLOSING {
        std::thread::sleep(Duration::from_millis(100));
        found = found.intersection(&look()).cloned().collect();
    }
    found
}

/// Longest time in which the kernel closes what a process had open.
pub const CLOSING: Duration = Duration::from_secs(2);

/// Inodes of the sockets that a process holds.
fn sockets_of(pid: u32) -> BTreeSet<String> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
    fds.filter_map(|e| std::fs::read_link(e.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .filter_map(|l| Some(l.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect()
}

/// Names in a folder.
pub fn names(dir: &Path) -> BTreeSet<String> {
    let all = std::fs::read_dir(dir).into_iter().flatten();
    all.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect()
}

/// Losses by step, as the text of the numbers; a step that ran again must have the same.
pub fn curve(file: &Path) -> Result<BTreeMap<u64, String>, String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let mut all = BTreeMap::new();
    // A line that is cut off is a process that was killed within its write.
    for line in text.lines().filter(|l| l.ends_with('}')) {
        let row: serde_json::Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let (step, loss) = (row["step"].as_u64().unwrap_or(0), row["loss"].to_string());
        if let Some(before) = all.insert(step, loss.clone())
            && before != loss
        {
            return Err(format!("step {step} was {before}, and {loss} when it ran again"));
        }
    }
    Ok(all)
}

/// The first difference between a curve and the one of an uninterrupted run.
pub fn difference(got: &Path, whole: &Path) -> Option<String> {
    let (got, whole) = match (curve(got), curve(whole)) {
        (Ok(got), Ok(whole)) => (got, whole),
        (Err(why), _) | (_, Err(why)) => return Some(why),
    };
    let last = got.keys().last().copied()?;
    (0..=last).find_map(|step| match (got.get(&step), whole.get(&step)) {
        (Some(a), Some(b)) if a == b => None,
        (a, b) => Some(format!("step {step} is {a:?}, and {b:?} without harm")),
    })
}
