//! `tilewire run` where its output is not read, or it is killed; several programs in one rank; and
//! values that are refused, once.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TILEWIRE: &str = env!("CARGO_BIN_EXE_tilewire");

/// A paused pager: the pipe is full, and stays full. If both streams are stuck, no message can be
/// shown.
#[test]
fn output_that_nobody_reads_does_not_hold_up_the_launcher() {
    for both in [false, true] {
        let script = if both { "yes >&2 & exec yes" } else { "exec yes" };
        let start = Instant::now();
        let mut job = Command::new(TILEWIRE)
            .args(["run", "-n", "2", "--timeout-s", "1", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let ended = loop {
            match job.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if start.elapsed() > Duration::from_secs(10) => break None,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        if ended.is_none() {
            job.kill().unwrap();
        }
        assert_eq!(ended.and_then(|s| s.code()), Some(124), "both: {both}");
        if !both {
            let mut text = String::new();
            job.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            assert!(text.contains("bytes of output were dropped: nobody read them"), "{text}");
        }
    }
}

/// Whether a process runs whose number a child has just printed.
fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|s| !s.contains(") Z "))
}

/// Kills the launcher of `tilewire run WORDS` once `num` processes have printed their numbers; all
/// of them are gone within a second.
fn killed_leaves_nothing(words: &[&str], num: usize) {
    let mut job =
        Command::new(TILEWIRE).arg("run").args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines();
    let mut pids = Vec::new();
    while pids.len() < num {
        let line = lines.next().unwrap().unwrap();
        pids.extend(line.split_once("pid ").map(|(_, pid)| pid.to_owned()));
    }
    assert!(pids.iter().all(|p| alive(p)), "{pids:?}");
    job.kill().unwrap();
    job.wait().unwrap();
    let dead = Instant::now();
    while pids.iter().any(|p| alive(p)) {
        assert!(dead.elapsed() < Duration::from_secs(1), "{words:?}: some of {pids:?} live on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing_behind_a_wrapper() {
    let script =
        "setsid sh -c 'echo pid $$; sleep 60; true' & sh -c 'echo pid $$; sleep 60; true'; true";
    killed_leaves_nothing(&["-n", "3", "--", "sh", "-c", script], 6);
    // A launcher in a job: its ranks have another job's name.
    let inner = ["-n", "1", "--", TILEWIRE, "run", "-n", "2", "--", "sh", "-c", script];
    killed_leaves_nothing(&inner, 4);
}

#[test]
fn values_that_make_no_sense_are_refused() {
    for (args, words) in [
        (vec!["verify", "--atol", "nan"], "must be a finite number"),
        (vec!["verify", "--atol=-1"], "must be a finite number"),
        (vec!["verify", "--rtol", "inf"], "must be a finite number"),
        (vec!["train", "--generate", "a", "--generate-len", "1000000000000"], "from 1 to 1048576"),
        (vec!["train", "--generate", "a", "--generate-len", "0"], "from 1 to 1048576"),
    ] {
        let out = Command::new(TILEWIRE).args(&args).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains(words), "{args:?}: {text}");
    }
}

/// One rank runs two programs, one after the other, and the second meets the others' second: where
/// the first has met, and where its meeting has failed.
#[test]
fn programs_of_a_rank_one_after_the_other_meet() {
    let verify = format!("{TILEWIRE} verify --op gemm --timeout-s 20");
    let late = format!("{TILEWIRE} verify --op gemm --timeout-s 1");
    let twice = format!("{verify} && {verify} && {verify}");
    // Rank 1 is too late for the first meeting: it finds that the others have given it up.
    let failed = format!("[ $RANK = 1 ] && sleep 2; {late}; {verify}");
    for (script, right) in [(twice, 3), (failed, 1)] {
        let start = Instant::now();
        let out = Command::new(TILEWIRE)
            .args(["run", "-n", "2", "--timeout-s", "60", "--", "sh", "-c", &script])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&[&out.stdout[..], &out.stderr].concat()).into_owned();
        assert!(out.status.success(), "{script}: {text}");
        assert_eq!(text.matches("cases right in").count(), right, "{script}: {text}");
        assert!(start.elapsed() < Duration::from_secs(25), "{:?}: {text}", start.elapsed());
    }
}

/// Arguments that are wrong stay wrong: those that are refused before the ranks meet, and those of
/// which only the model knows.
#[test]
fn wrong_arguments_are_not_restarted() {
    for (words, why) in [
        ("train --no-such-flag", "unexpected argument"),
        ("train --task copy --steps 2 --lr nan", "must be a positive number"),
        ("train --task copy --steps 2 --dp 3", "rank"),
    ] {
        let start = Instant::now();
        let out = Command::new(TILEWIRE)
            .args(["run", "-n", "2", "--max-restarts", "5", "--", TILEWIRE])
            .args(words.split(' '))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&[&out.stdout[..], &out.stderr].concat()).into_owned();
        assert_eq!(out.status.code(), Some(2), "{words}: {text}");
        assert!(text.contains(why) && !text.contains("restart 1 of 5"), "{words}: {text}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}: {text}", start.elapsed());
    }
}
