//! The steady drill: one job under `--max-restarts`, of which a rank is killed every so many
//! seconds.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::act::{Act, Io, send};
use super::look;

/// Steps that no job makes.
pub const ENDLESS: &str = "1000000";

/// The time between two checkpoints that is aimed at.
const CHECKPOINT: Duration = Duration::from_secs(2);

/// The time for which steps are counted before, so that `--every` is that time.
const CALIBRATION: Duration = Duration::from_secs(4);

impl Act<'_> {
    /// Kills a rank each time that the period is over, exactly, then asks the job to end.
    pub(super) fn steady(&mut self) -> Io<()> {
        let every = self.calibrated()?.to_string();
        let mut job = self.job(&self.words(&[("EVERY", &every)], &[]))?;
        let (id, harm) = (job.id(), self.case.harm.clone());
        let number = |name: &str| harm[name].as_u64().unwrap_or(0);
        if !self.until(&mut job, || self.steps() > 0)? {
            return self.end(&mut job, Instant::now());
        }
        let (begin, mut lag) = (Instant::now(), Vec::new());
        let (mut late, num) = (Duration::ZERO, number("ranks"));
        for k in 1..=number("kills") {
            let due = Duration::from_secs(k * number("period"));
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
            let rank = self.random.below(num);
            // Of a rank that is not back from the last kill the harm would be none.
            self.until(&mut job, || look::ranks(id).len() as u64 == num)?;
            let Some(pid) = look::ranks(id).get(&rank).copied() else { continue };
            late = late.max(begin.elapsed() - due);
            let killed = Instant::now();
            send(pid, "KILL");
            self.until(&mut job, || look::ranks(id).get(&rank).is_some_and(|now| *now != pid))?;
            let lines = self.lines();
            self.until(&mut job, || self.lines() > lines)?;
            lag.push(killed.elapsed().as_secs_f64());
        }
        let (before, took) = (self.steps(), begin.elapsed());
        self.until(&mut job, || self.steps() > before + 2)?;
        send(id, "USR1");
        self.end(&mut job, Instant::now())?;
        let (steps, lines) = (self.steps(), self.lines());
        lag.sort_by(f64::total_cmp);
        println!(
            "{} kills in {:.1} s, at most {:.2} s late; {steps} steps, {} of them made twice; a \
             checkpoint every {every} steps ({:.2} s); from a kill to the next step {:.2} s \
             (median), {:.2} s (most)",
            lag.len(),
            took.as_secs_f64(),
            late.as_secs_f64(),
            lines.saturating_sub(steps),
            took.as_secs_f64() * every.parse().unwrap_or(0.0) / lines.max(1) as f64,
            lag.get(lag.len() / 2).copied().unwrap_or(0.0),
            lag.last().copied().unwrap_or(0.0)
        );
        self.seen["kills"] = json!(lag.len());
        self.compare(&[(ENDLESS, &steps.max(1).to_string()), ("EVERY", &every)])
    }

    /// The steps of the job, without checkpoints, in the time of one.
    fn calibrated(&mut self) -> Io<u64> {
        let never = ENDLESS;
        let mut job = self.job(&self.words(&[("EVERY", never), ("m", "before")], &[]))?;
        let id = job.id();
        let count = || lines_of(&self.dir.join("before"));
        self.until(&mut job, || count() > 5)?;
        let (first, start) = (count(), Instant::now());
        std::thread::sleep(CALIBRATION);
        let steps = (count() - first) as f64;
        let rate = steps / start.elapsed().as_secs_f64();
        send(id, "INT");
        job.wait()?;
        std::fs::remove_file(self.dir.join("err"))?;
        Ok(((CHECKPOINT.as_secs_f64() * rate) as u64).max(1))
    }

    fn lines(&self) -> usize {
        lines_of(&self.dir.join("m"))
    }
}

/// Whole lines of a file.
fn lines_of(file: &Path) -> usize {
    std::fs::read(file).map_or(0, |all| all.iter().filter(|b| **b == b'\n').count())
}
