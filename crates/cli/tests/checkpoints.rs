//! Checkpoints of a job that is killed again and again.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tilewire_testing::{Lack, did_not_run};

const TILEWIRE: &str = env!("CARGO_BIN_EXE_tilewire");

/// A model so small that a good part of the time goes into checkpoints.
const TRAIN: [&str; 13] = [
    "train",
    "--task",
    "copy",
    "--seq",
    "16",
    "--batch",
    "2",
    "--d-model",
    "64",
    "--head-dim",
    "16",
    "--d-ff",
    "64",
];

fn losses(file: &Path) -> BTreeMap<u64, u64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let row: serde_json::Value = serde_json::from_str(line).expect("whole lines");
        let (step, loss) = (row["step"].as_u64().unwrap(), row["loss"].as_f64().unwrap());
        if let Some(before) = all.insert(step, loss.to_bits()) {
            assert_eq!(before, loss.to_bits(), "step {step} was another before it was run again");
        }
    }
    all
}

/// Kills at random moments, each job going on from the one before it: every checkpoint that is
/// there is whole, and every step is the uninterrupted run's, bit for bit, also if it ran twice.
#[test]
fn a_job_that_is_killed_while_it_writes_goes_on_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let run = |more: &[&str]| {
        let mut c = Command::new(TILEWIRE);
        c.args(TRAIN)
            .args(["--ranks", "2", "--tp", "2"])
            .args(more)
            .current_dir(d)
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        c
    };
    let kills = std::env::var("KILLS").map_or(12, |n| n.parse().unwrap());
    let mut random = tilewire::core::Rng::new(5);
    let saves = ["--steps", "1000000", "--every", "1", "--checkpoint", "c", "--metrics", "m"];
    // On a machine that is slow for a while more of them, until five steps are there.
    let steps = || losses(&d.join("m")).keys().last().copied();
    for kill in 0..10 * kills {
        if kill >= kills && steps() >= Some(5) {
            break;
        }
        let resume: &[&str] = if d.join("c").exists() { &["--resume", "c"] } else { &[] };
        let mut job = run(&[&saves, resume].concat()).spawn().unwrap();
        // The first kills come before there is a checkpoint, too.
        std::thread::sleep(Duration::from_millis(60 + random.below(300)));
        let ended = job.try_wait().unwrap();
        if ended.is_some() {
            let said = std::io::read_to_string(job.stderr.take().unwrap()).unwrap();
            assert!(said.contains("there is none in this folder"), "kill {kill}: {said}");
            std::fs::remove_dir_all(d.join("c")).unwrap();
            std::fs::remove_file(d.join("m")).ok();
            continue;
        }
        job.kill().unwrap();
        job.wait().unwrap();
        let mut verify = Command::new(TILEWIRE);
        let seen = verify.args(["checkpoint", "verify", "c"]).current_dir(d).output().unwrap();
        let none = String::from_utf8_lossy(&seen.stderr).contains("there is none")
            || !d.join("c").exists();
        assert!(seen.status.success() || none, "kill {kill}: {seen:?}");
    }
    let got = losses(&d.join("m"));
    let last = got.keys().last().copied().unwrap();
    assert!(last >= 5, "only {last} steps: nothing was tried");
    let steps = (last + 1).to_string();
    let whole = run(&["--steps", &steps, "--metrics", "whole"]).status().unwrap();
    assert!(whole.success());
    let whole = losses(&d.join("whole"));
    assert!(got.iter().all(|(step, loss)| whole[step] == *loss), "the curves differ");
    // No step is missing: the next job goes on where the last checkpoint is.
    assert_eq!(got.len() as u64, last + 1);
}

/// Asked by a signal, a job writes a checkpoint of the step it is at and ends with 0: threads and
/// processes, by SIGUSR1 and, with a grace time, by SIGTERM.
#[test]
fn a_job_that_is_asked_to_end_writes_a_checkpoint() {
    let launcher = ["run", "-n", "2", "--grace-s", "20", "--", TILEWIRE];
    let grace = ["--grace-s", "20"];
    for (head, more, signal, code) in [
        (&[][..], &[][..], "USR1", Some(0)),
        (&[], &grace, "TERM", Some(0)),
        (&[], &[], "TERM", None),
        (&launcher, &[], "USR1", Some(0)),
        (&launcher, &grace, "TERM", Some(0)),
        (&launcher, &[], "TERM", Some(143)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let saves = ["--steps", "1000000", "--checkpoint", "c", "--metrics", "m"];
        let mut job = Command::new(TILEWIRE)
            .args(head)
            .args(TRAIN)
            .args(["--ranks", "2", "--tp", "2"])
            .args(saves)
            .args(more)
            .current_dir(d)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while losses(&d.join("m")).len() < 3 && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let pid = rustix::process::Pid::from_child(&job);
        let number = match signal {
            "USR1" => rustix::process::Signal::USR1,
            _ => rustix::process::Signal::TERM,
        };
        rustix::process::kill_process(pid, number).unwrap();
        let asked = Instant::now();
        while job.try_wait().unwrap().is_none() && asked.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        job.kill().ok();
        let o = job.wait_with_output().unwrap();
        let case = format!("{head:?} {more:?} {signal}: {o:?}");
        assert_eq!(o.status.code(), code, "{case}");
        let list = Command::new(TILEWIRE)
            .args(["checkpoint", "list", "c", "--json"])
            .current_dir(d)
            .output()
            .unwrap();
        let text = String::from_utf8(list.stdout).unwrap();
        if code != Some(0) {
            assert_eq!(text, "", "{case}");
            continue;
        }
        let row: serde_json::Value = serde_json::from_str(text.trim()).expect(&case);
        let steps = losses(&d.join("m")).len() as u64;
        assert!(row["step"] == steps && steps >= 3, "{case}: {row}");
        assert!(String::from_utf8_lossy(&o.stdout).contains("asked by"), "{case}");
    }
}

/// The ranks of a launcher: their numbers and processes.
fn ranks_of(launcher: u32) -> Vec<(usize, rustix::process::Pid)> {
    // Whichever thread has started them.
    let tasks = std::fs::read_dir(format!("/proc/{launcher}/task")).into_iter().flatten();
    let list = |t: std::fs::DirEntry| std::fs::read_to_string(t.path().join("children")).ok();
    let children: String = tasks.filter_map(|t| list(t.ok()?)).collect();
    let rank = |pid: &str| {
        let vars = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let rank = vars.split(|b| *b == 0).find_map(|v| v.strip_prefix(b"RANK="))?;
        let pid = rustix::process::Pid::from_raw(pid.parse().ok()?)?;
        Some((String::from_utf8_lossy(rank).parse().ok()?, pid))
    };
    children.split_whitespace().filter_map(rank).collect()
}

/// Ranks are killed, and one is stopped, while a job trains: it goes on with the others, which
/// stay, and every step, run once or again, is the uninterrupted run's, bit for bit.
#[test]
fn a_job_goes_on_after_its_ranks_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let kills: u64 = std::env::var("KILLS").map_or(4, |n| n.parse().unwrap());
    let pause: u64 = std::env::var("PAUSE_MS").map_or(700, |n| n.parse().unwrap());
    let saves = ["--steps", "1000000", "--every", "3", "--checkpoint", "c", "--metrics", "m"];
    let (restarts, grid) = ((kills + 1).to_string(), ["--cp", "2", "--tp", "2"]);
    let mut job = Command::new(TILEWIRE)
        .args(["run", "-n", "4", "--grace-s", "20", "--max-restarts", &restarts, "--", TILEWIRE])
        .args(TRAIN)
        .args(grid)
        .args(["--timeout-s", "4"])
        .args(saves)
        .current_dir(d)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = job.id();
    let wait = |what: &str, job: &mut std::process::Child, enough: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !enough() {
            let ended = job.try_wait().unwrap();
            if ended.is_some() || start.elapsed() > Duration::from_secs(30) {
                job.kill().ok();
                let said = std::io::read_to_string(job.stderr.take().unwrap()).unwrap();
                panic!("{what}: {ended:?}\n{said}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let done = || losses(&d.join("m")).len();
    wait("start", &mut job, &|| done() > 3);
    let mut random = tilewire::core::Rng::new(9);
    let mut survivors = 0;
    for kill in 0..=kills {
        let ranks = ranks_of(job.id());
        assert_eq!(ranks.len(), 4, "kill {kill}");
        let (victim, pid) = ranks[random.below(4) as usize];
        // The last one falls silent instead: its peers meet their deadline of four seconds.
        let silent = kill == kills;
        let signal = match silent {
            true => rustix::process::Signal::STOP,
            false => rustix::process::Signal::KILL,
        };
        rustix::process::kill_process(pid, signal).unwrap();
        wait("restart", &mut job, &|| {
            let now = ranks_of(id);
            now.len() == 4 && !now.contains(&(victim, pid))
        });
        let now = ranks_of(job.id());
        survivors += now.iter().filter(|r| ranks.contains(r)).count();
        let before = done();
        wait("progress", &mut job, &|| done() > before);
        std::thread::sleep(Duration::from_millis(random.below(pause)));
    }
    assert_eq!(survivors as u64, 3 * (kills + 1), "ranks that live are not started anew");
    let launcher = rustix::process::Pid::from_child(&job);
    rustix::process::kill_process(launcher, rustix::process::Signal::USR1).unwrap();
    let o = job.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&o.stderr);
    assert!(o.status.success(), "{said}");
    let notes = said.lines().filter(|l| l.contains(" of 4 ranks are started anew: ")).count();
    assert_eq!(notes as u64, kills + 1, "{said}");
    let got = losses(&d.join("m"));
    let last = got.keys().last().copied().unwrap();
    assert_eq!(got.len() as u64, last + 1);
    let steps = (last + 1).to_string();
    let whole = Command::new(TILEWIRE)
        .args(TRAIN)
        .args(grid)
        .args(["--ranks", "4", "--steps", &steps, "--metrics", "whole"])
        .current_dir(d)
        .output()
        .unwrap();
    assert!(whole.status.success(), "{whole:?}");
    let whole = losses(&d.join("whole"));
    assert!(got.iter().all(|(step, loss)| whole[step] == *loss), "the curves differ");
}

/// Writes down each flush: the path, and whether the checkpoint has its name by then.
const FLUSHES: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int fsync(int fd) {
    char link[64], path[4096], line[4200];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    const int code = ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
    const int there = access(getenv("TW_TEST_FINAL"), F_OK) == 0;
    const int len = snprintf(line, sizeof line, "%d %s\n", there, path);
    FILE* f = fopen(getenv("TW_TEST_FLUSHES"), "a");
    if (f && len > 0) fwrite(line, 1, (size_t)len, f), fclose(f);
    return code;
}
"#;

/// What survives a crash of the machine: every file, the manifest behind them, and their folder are
/// on disk before the checkpoint gets its name, and the name behind it.
#[test]
fn all_of_a_checkpoint_is_flushed_before_it_has_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    std::fs::write(d.join("flushes.c"), FLUSHES).unwrap();
    let gcc = ["-shared", "-fPIC", "-o", "flushes.so", "flushes.c", "-ldl"];
    match Command::new("gcc").args(gcc).current_dir(d).status() {
        Ok(made) => assert!(made.success()),
        Err(_) => return did_not_run(Lack::Compiler, "it needs gcc"),
    }
    let done = Command::new(TILEWIRE)
        .args(TRAIN)
        .args(["--ranks", "2", "--tp", "2", "--steps", "1", "--checkpoint", "c"])
        .env("LD_PRELOAD", d.join("flushes.so"))
        .env("TW_TEST_FLUSHES", d.join("log"))
        .env("TW_TEST_FINAL", d.join("c/step-0000000001"))
        .current_dir(d)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let log = std::fs::read_to_string(d.join("log")).unwrap();
    let all: Vec<(bool, &Path)> = log
        .lines()
        .map(|l| (l.starts_with('1'), Path::new(l.split_once(' ').expect("two words").1)))
        .collect();
    let is_work = |p: &Path| p.file_name().is_some_and(|n| n.to_string_lossy().contains(".work-"));
    let place = |what: &str, is: &dyn Fn(&Path) -> bool| {
        let found: Vec<_> = (0..all.len()).filter(|&i| is(all[i].1)).collect();
        assert_eq!(found.len(), 1, "{what}: {log}");
        found[0]
    };
    let ends =
        |name: &'static str| move |p: &Path| p.ends_with(name) && p.parent().is_some_and(is_work);
    let files = ["rank-00000.safetensors", "rank-00001.safetensors"].map(|n| place(n, &ends(n)));
    let manifest = place("the manifest", &ends("manifest.json"));
    let folder = place("its folder", &is_work);
    let name = place("the folder of checkpoints", &|p| p.ends_with("c"));
    assert!(files.iter().all(|&f| f < manifest), "the manifest is the last file: {log}");
    assert!(manifest < folder && folder < name, "{log}");
    assert!(all[..=folder].iter().all(|(there, _)| !there) && all[name].0, "{log}");
}
