//! A rank that stops in training: the verdict names it, whichever wait meets it, after one
//! deadline.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Of every wait.
const DEADLINE: Duration = Duration::from_secs(3);
/// Of the launcher, for the rank that is stopped.
const GRACE: Duration = Duration::from_secs(3);

/// Whatever happens to the test, its job ends.
struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        // After a test that passed it has ended already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Returns the process of a rank that `launcher` has started.
fn process_of(launcher: u32, rank: usize) -> Option<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{launcher}/task")).ok()?;
    let lists = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("children")).ok());
    let children: Vec<u32> = lists
        .flat_map(|l| l.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
        .collect();
    let want = format!("RANK={rank}");
    let is_rank = |pid: &u32| {
        let vars = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        vars.split(|b| *b == 0).any(|v| v == want.as_bytes())
    };
    children.into_iter().find(is_rank)
}

fn numbers_behind(text: &str, words: &str) -> Vec<usize> {
    let digits = |s: &str| s.chars().take_while(char::is_ascii_digit).collect::<String>();
    text.split(words).skip(1).filter_map(|rest| digits(rest).parse().ok()).collect()
}

/// Starts a job, stops `victim` after a step, and checks who is blamed.
fn stop(dir: &Path, grid: &[&str], victim: usize) {
    let metrics = dir.join(format!("{}-{victim}", grid.len()));
    let timeout = DEADLINE.as_secs().to_string();
    let small = "--seq 32 --d-model 64 --head-dim 16 --d-ff 64 --batch 24 --steps 1000000";
    let mut job = Job(Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(["train", "--processes", "--data", "text", "--timeout-s", &timeout])
        .args(small.split(' '))
        .args(grid)
        .arg("--metrics")
        .arg(&metrics)
        .current_dir(dir)
        .env_remove("RANK")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap());
    let start = Instant::now();
    while std::fs::metadata(&metrics).map_or(0, |m| m.len()) == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "no step was taken");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Each victim somewhere else in a step.
    std::thread::sleep(Duration::from_millis(37 * victim as u64));
    let pid = process_of(job.0.id(), victim).expect("the rank runs").to_string();
    assert!(Command::new("kill").args(["-STOP", &pid]).status().unwrap().success());
    let stopped = Instant::now();
    let mut text = String::new();
    job.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let took = stopped.elapsed();
    assert_eq!(job.0.wait().unwrap().code(), Some(2), "{text}");
    let blamed = numbers_behind(&text, "culprit ");
    assert!(!blamed.is_empty() && blamed.iter().all(|r| *r == victim), "{victim}: {text}");
    assert_eq!(numbers_behind(&text, "failed because of rank "), [victim], "{text}");
    let killed = format!("rank {victim} did not end when asked to, and was killed");
    assert!(text.contains(&killed), "{text}");
    // One deadline: another one would make it 9 s.
    assert!(took >= DEADLINE && took < DEADLINE + GRACE + 3 * DEADLINE / 4, "{took:?}: {text}");
}

#[test]
fn a_rank_that_is_stopped_in_training_is_named_after_one_deadline() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text"), "tiles over wires, wires under tiles. ".repeat(40))
        .unwrap();
    // In a grid a rank shares some of its teams with the victim, or only that of all ranks.
    let grids = [&["--ranks", "4", "--tp", "2", "--cp", "2"][..], &["--ranks", "3"]];
    for (grid, num) in grids.into_iter().zip([4, 3]) {
        std::thread::scope(|s| {
            (0..num).for_each(|victim| {
                s.spawn({
                    let dir = dir.path();
                    move || stop(dir, grid, victim)
                });
            });
        });
    }
}
