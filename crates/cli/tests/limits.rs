//! Jobs under limits of the operating system: each either works or says what to raise.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

const TILEWIRE: &str = env!("CARGO_BIN_EXE_tilewire");

#[test]
fn few_open_files_are_enough_or_the_remedy_is_told() {
    let mut done = Vec::new();
    // Whoever runs the test may leave some open, so that the last limit is ample.
    for limit in (5..=17).chain([100]) {
        let few = format!("ulimit -n {limit}; exec \"$0\" verify --op all_gather --quiet");
        let out = Command::new(TILEWIRE)
            .args(["run", "-n", "3", "--", "sh", "-c", &few, TILEWIRE])
            .output()
            .unwrap();
        let said = format!("{out:?}");
        let told = ["ulimit -n", "error while loading shared libraries"];
        let ok = out.status.success();
        assert!(ok || told.iter().any(|t| said.contains(t)), "{limit} open files: {said}");
        done.push(ok);
    }
    // Both were met: with few there is none, with more there is all.
    assert!(!done[0] && done[done.len() - 1], "{done:?}");
}

/// Runs a command under limits, which `sh` sets.
fn under(limits: &str, words: &[&str]) -> Output {
    let script = format!("{limits}; exec \"$0\" \"$@\"");
    Command::new("sh")
        .args(["-c", &script, TILEWIRE])
        .args(words)
        .env_remove("RANK")
        .output()
        .unwrap()
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn memory_that_lacks_for_a_few_bytes_is_an_error_and_no_abort() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    std::fs::write(&file, format!("[{}{{}}]", "{\"a\":{\"b\":\"c\"}},".repeat(300_000))).unwrap();
    let out = under("ulimit -v 200000", &["trace", file.to_str().unwrap()]);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(2), "{text}");
    assert!(text.contains("error: memory ran out") && text.contains("ulimit -v"), "{text}");
}

/// An allocation of a few bytes took a page and six system calls in threads that can have no arena
/// of their own: what needs 20 MB had no memory then, and jobs ended late.
#[test]
fn a_few_bytes_take_a_few_bytes_under_every_limit() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    let event = r#"{"name":"a","ph":"X","ts":1,"dur":2,"pid":0,"tid":0,"args":{"b":"c"}}"#;
    std::fs::write(
        &file,
        format!(r#"{{"traceEvents":[{}{event}]}}"#, format!("{event},").repeat(6000)),
    )
    .unwrap();
    // Too little for an arena of 64 MiB beside the program and its stacks.
    let html = dir.path().join("html");
    let words = ["trace", file.to_str().unwrap(), "--html", html.to_str().unwrap()];
    let out = under("ulimit -v 81920", &words);
    assert!(out.status.success(), "{}", said(&out));
    assert!(String::from_utf8_lossy(&out.stdout).contains("6001 events"), "{out:?}");
}

/// A thread that has its stack and lacks the rest ended by an abort. The limits are in steps of a
/// page, from the highest under which the first thread does not start.
#[test]
fn a_thread_that_begins_without_memory_is_an_error_and_no_abort() {
    let env = |limit: u64| under(&format!("ulimit -c 0; ulimit -v {limit}"), &["env"]);
    let unstarted = |o: &Output| said(o).contains("starting the thread of the program");
    let (mut too_little, mut enough) = (8 << 10, 1 << 20);
    while enough - too_little > 4 {
        let limit = (too_little + enough) / 2;
        let out = env(limit);
        // Before there is a thread the kernel or the dynamic loader ends it, in their ways.
        let early = out.status.code() == Some(127)
            || (out.status.code().is_none() && out.stderr.is_empty());
        match early || unstarted(&out) {
            true => too_little = limit,
            false => enough = limit,
        }
        // Between the loader and the thread a few limits are too low for an allocation.
        if enough - too_little <= 4 && enough < 1 << 16 && !unstarted(&env(too_little)) {
            (too_little, enough) = (enough + 1024, 1 << 20);
        }
    }
    let mut lacked = 0;
    for limit in (too_little..too_little + 64).step_by(4) {
        let out = env(limit);
        let text = said(&out);
        let error = out.status.code() == Some(2) && text.contains("error: ");
        assert!(out.status.success() || error, "{limit}: {}: {text}", out.status);
        assert!(!text.contains("panicked"), "{limit}: {text}");
        lacked += usize::from(text.contains("no stack for its signals"));
    }
    assert!(lacked > 0, "no limit was met under which a thread lacks but this stack");
}

/// The launcher under a limit: the job ends when a rank fails, with the code of that rank, or the
/// launcher says what it lacks. It has threads, and none of them is needed to end.
#[test]
fn a_launcher_that_lacks_memory_ends_as_its_job_does() {
    let script = "[ $RANK = 0 ] && exit 3; exec sleep 9";
    let mut codes = Vec::new();
    for limit in (24_000..44_000).step_by(500) {
        let start = Instant::now();
        let words = ["run", "-n", "2", "--", "sh", "-c", script];
        let out = under(&format!("ulimit -v {limit}"), &words);
        let (text, took) = (said(&out), start.elapsed());
        let good = match out.status.code() {
            Some(3) => text.contains("rank 0 failed first"),
            Some(2) => text.contains("error: "),
            // The dynamic loader comes before us.
            Some(127) => true,
            _ => false,
        };
        assert!(good, "{limit}: {:?}: {text}", out.status);
        // A tenth of it on an idle machine.
        assert!(took < Duration::from_secs(3), "{limit}: {took:?}: {text}");
        codes.push(out.status.code());
    }
    assert!(codes.contains(&Some(2)) && codes.contains(&Some(3)), "{codes:?}");
}

/// Whichever rank lacks memory first, and for what: the error is that rank's own.
#[test]
fn memory_that_one_of_four_ranks_lacks_is_the_verdict() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text"), "tiles over wires. ".repeat(400)).unwrap();
    let file = dir.path().join("text");
    // Short sequences: what takes memory is the same, and a step takes no time.
    let train = "train --ranks 4 --steps 1 --seq 32 --data".split(' ');
    let train: Vec<&str> = train.chain(file.to_str()).collect();
    let mut failed = 0;
    for limit in (100_000..=500_000).step_by(25_000) {
        let out = under(&format!("ulimit -v {limit}"), &train);
        let text = said(&out);
        if out.status.success() {
            continue;
        }
        failed += 1;
        assert_eq!(out.status.code(), Some(2), "{limit}: {text}");
        for consequence in ["has left", "has died", "aborted the team"] {
            assert!(!text.contains(consequence), "{limit}: {text}");
        }
        let own = [
            "cannot be reserved",
            "cannot allocate",
            "cannot be started",
            "ran out",
            "os error 12",
        ];
        assert!(own.iter().any(|o| text.contains(o)), "{limit}: {text}");
    }
    assert!(failed > 0, "memory was enough under every limit");
}

/// In processes, too, the launcher names the rank with the limit.
#[test]
fn the_process_that_lacks_memory_is_the_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    std::fs::write(&file, "tiles over wires. ".repeat(400)).unwrap();
    let train = format!("exec \"$0\" train --steps 1 --seq 33 --data {}", file.display());
    let mut failed = 0;
    for limit in (60_000..=180_000).step_by(10_000) {
        let script = format!("[ $RANK = 1 ] && ulimit -v {limit}; {train}");
        let out = Command::new(TILEWIRE)
            .args(["run", "-n", "3", "--", "sh", "-c", &script, TILEWIRE])
            .output()
            .unwrap();
        let text = said(&out);
        assert!(out.status.success() || text.contains("rank 1 failed first"), "{limit}: {text}");
        failed += usize::from(!out.status.success());
    }
    assert!(failed > 0, "memory was enough under every limit");
}

/// The peers of a rank that ends with an error of its own name it with that error. Its shell ends
/// later, so that they have the time to say so.
#[test]
fn peers_of_a_rank_that_leaves_name_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    std::fs::write(&file, "tiles over wires. ".repeat(400)).unwrap();
    let train = format!("\"$0\" train --metrics /none/m --data {}", file.display());
    let script = format!("if [ $RANK = 0 ]; then {train}; sleep 5; else exec {train}; fi");
    let out = Command::new(TILEWIRE)
        .args(["run", "-n", "2", "--", "sh", "-c", &script, TILEWIRE])
        .output()
        .unwrap();
    let text = said(&out);
    assert!(text.contains("[r1] error"), "{text}");
    assert!(text.contains("rank 0 has left the job (io: /none/m: No such file"), "{text}");
    assert!(text.contains("rank 1 failed because of rank 0"), "{text}");
}

#[test]
fn the_limits_of_stack_and_files_end_nothing_without_a_word() {
    let verify = ["verify", "--op", "all_gather", "--quiet"];
    let out = under("ulimit -s 64", &verify);
    assert!(out.status.success(), "{out:?}");
    let out = under("ulimit -f 0", &verify);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(2), "{text}");
    assert!(text.contains("File too large") && text.contains("ulimit -f"), "{text}");
}
