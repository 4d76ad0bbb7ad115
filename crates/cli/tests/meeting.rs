//! Ranks that meet, or cannot: in namespaces of their own, with wrong arguments, and in time.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tilewire_testing::{Lack, did_not_run};

const TILEWIRE: &str = env!("CARGO_BIN_EXE_tilewire");

/// The words of `unshare` for a container of each kind.
const CONTAINERS: [&[&str]; 2] =
    [&["--pid", "--mount", "--fork"], &["--user", "--map-user=1000", "--pid", "--fork"]];

fn may_unshare(words: &[&str]) -> bool {
    let may = Command::new("unshare").args(words).arg("true").stderr(Stdio::null()).status();
    may.is_ok_and(|s| s.success())
}

/// `tilewire run -n 2` where rank `r` runs `words` in namespaces of its own.
fn apart(r: u32, unshare: &[&str], words: &str) -> Command {
    let unshare = unshare.join(" ");
    let script = format!("[ $RANK = {r} ] && exec unshare {unshare} {words} || exec {words}");
    let mut cmd = Command::new(TILEWIRE);
    cmd.args(["run", "-n", "2", "--timeout-s", "60", "--", "sh", "-c", &script]);
    cmd.stdout(Stdio::piped()).stderr(Stdio::piped());
    cmd
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&[&out.stdout[..], &out.stderr].concat()).into_owned()
}

/// Waits for the first step of a training that shows these lines.
fn trains(lines: &mut impl Iterator<Item = std::io::Result<String>>) {
    assert!(lines.any(|l| l.unwrap().contains("step")), "the training did not begin");
}

#[test]
fn ranks_in_namespaces_of_their_own_meet() {
    for unshare in CONTAINERS {
        if !may_unshare(unshare) {
            return did_not_run(Lack::Namespaces, format!("unshare {}", unshare.join(" ")));
        }
        for r in 0..2 {
            let start = Instant::now();
            let verify = format!("{TILEWIRE} verify --op gemm --timeout-s 20");
            let out = apart(r, unshare, &verify).output().unwrap();
            let text = text(&out);
            assert!(out.status.success(), "rank {r} by {unshare:?}: {text}");
            assert!(text.contains("cases right in"), "{text}");
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        }
    }
}

/// The kernel's boot id says which host this is; ranks of others have no memory in common.
#[test]
fn a_rank_of_another_host_is_refused() {
    if !may_unshare(&["--mount"]) {
        return did_not_run(Lack::Namespaces, "unshare --mount");
    }
    let dir = tempfile::tempdir().unwrap();
    let id = dir.path().join("boot_id");
    std::fs::write(&id, "11111111-2222-3333-4444-555555555555\n").unwrap();
    let verify = format!("{TILEWIRE} verify --op gemm --timeout-s 20");
    let mount = format!("mount --bind {} /proc/sys/kernel/random/boot_id", id.display());
    let script = format!(
        "[ $RANK = 1 ] && exec unshare --mount sh -c '{mount} && exec {verify}' || exec {verify}"
    );
    let mut cmd = Command::new(TILEWIRE);
    let start = Instant::now();
    let out = cmd.args(["run", "-n", "2", "--timeout-s", "60", "--", "sh", "-c", &script]).output();
    let (out, took) = (out.unwrap(), start.elapsed());
    assert_eq!(out.status.code(), Some(2), "{}", text(&out));
    assert!(text(&out).contains("runs with another host (boot id)"), "{}", text(&out));
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn a_killed_rank_in_namespaces_of_its_own_is_named() {
    let unshare = CONTAINERS[0];
    if !may_unshare(unshare) {
        return did_not_run(Lack::Namespaces, format!("unshare {}", unshare.join(" ")));
    }
    for r in 0..2 {
        let place = |r: u32, port| format!("{r}/2@127.0.0.1:{port}");
        let port = free_port();
        let words = ["train", "--task", "copy", "--steps", "1000000"];
        let mut survivor = Command::new(TILEWIRE)
            .args(words)
            .env("TILEWIRE_RANK", place(1 - r, port))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // `/proc` is still that of the outer namespace: the shell reads its number there.
        let script = "read n rest </proc/self/stat; echo pid $n; exec \"$@\"";
        let mut victim = Command::new("unshare")
            .args(unshare)
            .args(["sh", "-c", script, "sh", TILEWIRE])
            .args(words)
            .env("TILEWIRE_RANK", place(r, port))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let pid = first.strip_prefix("pid ").unwrap();
        // Both train. Only rank 0 shows it.
        let mut others = BufReader::new(survivor.stdout.take().unwrap()).lines();
        match r {
            0 => trains(&mut lines),
            _ => trains(&mut others),
        }
        let rest = std::thread::spawn(move || others.map_while(Result::ok).count());
        let killed = Instant::now();
        assert!(Command::new("kill").args(["-KILL", pid]).status().unwrap().success());
        let mut err = String::new();
        survivor.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        assert!(!survivor.wait().unwrap().success());
        rest.join().unwrap();
        victim.wait().unwrap();
        assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
        assert!(err.contains(&format!("rank {r} has died")), "{err}");
    }
}

/// The overflow user is the same number for everybody: it is nobody's equal.
#[test]
fn a_rank_whose_user_is_not_mapped_is_refused_with_the_remedy() {
    if !may_unshare(&["--user"]) {
        return did_not_run(Lack::Namespaces, "unshare --user");
    }
    for r in 0..2 {
        let start = Instant::now();
        let verify = format!("{TILEWIRE} verify --op gemm --timeout-s 20");
        let out = apart(r, &["--user"], &verify).output().unwrap();
        let text = text(&out);
        assert!(!out.status.success() && start.elapsed() < Duration::from_secs(5), "{text}");
        assert!(text.contains("not mapped into our user namespace"), "{text}");
        assert!(text.contains("--map-root-user"), "{text}");
    }
}

/// A rank that is started by hand, with the store at `port` of this host.
fn rank(place: (u32, u32), port: u16, secret: &str, more: &[&str]) -> Child {
    let store = format!("127.0.0.1:{port}");
    let (r, n) = (place.0.to_string(), place.1.to_string());
    Command::new(TILEWIRE)
        .args(["verify", "--op", "gemm", "--rank", &r, "--size", &n, "--store", &store])
        .args(more)
        .env("TILEWIRE_SECRET", secret.repeat(32))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A free port that the system gives nobody who asks for any: one of those (Linux has them from
/// 32768 on) may be taken before the rank binds it.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let next = std::process::id() * 64 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (next % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The end of a rank that fails within `s` seconds, and its words.
fn fails_within(child: Child, s: f64) -> String {
    let start = Instant::now();
    let out = child.wait_with_output().unwrap();
    let text = text(&out);
    assert!(!out.status.success(), "{text}");
    assert!(start.elapsed() < Duration::from_secs_f64(s), "{:?}: {text}", start.elapsed());
    text
}

/// Each side says why, whichever has the wrong one, and a third rank says what rank 0 has found.
#[test]
fn a_rank_with_another_secret_ends_the_meeting_at_once() {
    for (wrong, secrets) in [(1, ["a", "b", "a"]), (2, ["a", "a", "b"])] {
        let port = free_port();
        let zero = rank((0, 3), port, secrets[0], &[]);
        let others = [1, 2].map(|r| rank((r, 3), port, secrets[r as usize], &[]));
        let zero = fails_within(zero, 2.0);
        assert!(zero.contains(&format!("r{wrong} has another secret")), "{zero}");
        for (r, child) in (1..).zip(others) {
            let text = fails_within(child, 2.0);
            let want = if r == wrong { "does not know our secret" } else { "has another secret" };
            // The store ends with rank 0.
            assert!(text.contains(want) || text.contains("rank 0, which serves it"), "{r}: {text}");
        }
    }
}

/// A word alone ends nothing: neither that of a rank which comes with the right secret then, nor
/// that of another world at this address.
#[test]
fn a_wrong_secret_does_not_end_the_meeting_of_others() {
    for stranger in [(1, 2), (1, 3)] {
        let port = free_port();
        let zero = rank((0, 2), port, "a", &["--timeout-s", "20"]);
        let other = fails_within(rank(stranger, port, "b", &[]), 2.0);
        assert!(other.contains("does not know our secret"), "{other}");
        if stranger == (1, 3) {
            // Longer than rank 0 would wait for the right one.
            std::thread::sleep(Duration::from_millis(2500));
        }
        let one = rank((1, 2), port, "a", &["--timeout-s", "20"]);
        for child in [zero, one] {
            let out = child.wait_with_output().unwrap();
            assert!(out.status.success(), "{stranger:?}: {}", text(&out));
        }
    }
}

#[test]
fn a_rank_that_is_taken_says_so_at_once() {
    let port = free_port();
    let first = [0, 1].map(|r| rank((r, 3), port, "a", &["--timeout-s", "4"]));
    // The first two must have come: nobody knows otherwise which of two was first.
    std::thread::sleep(Duration::from_millis(1000));
    let second = fails_within(rank((1, 3), port, "a", &[]), 2.0);
    assert!(second.contains("r1 is taken: the process"), "{second}");
    let [zero, one] = first.map(|child| fails_within(child, 6.0));
    let why = "did not arrive: r2; r1 was started 2 times";
    assert!(zero.contains(why), "{zero}");
    // The store ends with rank 0, which may have given up just before.
    assert!(one.contains(why) || one.contains("rank 0, which serves it"), "{one}");
}

#[test]
fn a_rank_of_a_world_that_runs_already_is_taken() {
    let port = free_port();
    let train = |r: &str| {
        Command::new(TILEWIRE)
            .args(["train", "--task", "copy", "--steps", "1000000"])
            .env("TILEWIRE_RANK", format!("{r}/2@127.0.0.1:{port}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut first = [train("0"), train("1")];
    let mut lines = BufReader::new(first[0].stdout.take().unwrap()).lines();
    trains(&mut lines);
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    let second = fails_within(train("1"), 2.0);
    assert!(second.contains("r1 is taken: the process"), "{second}");
    for child in &mut first {
        assert!(child.try_wait().unwrap().is_none(), "the second rank 1 disturbs the first");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    rest.join().unwrap();
}

#[test]
fn another_size_is_named_on_both_sides_while_a_third_rank_is_missing() {
    let port = free_port();
    // Rank 1 never comes: a look at rank 2 says enough.
    let zero = rank((0, 4), port, "a", &[]);
    let two = fails_within(rank((2, 3), port, "a", &[]), 2.0);
    assert!(two.contains("another world size; expected 3, got 4"), "{two}");
    let zero = fails_within(zero, 2.0);
    assert!(zero.contains("another world size; expected 4, got 3"), "{zero}");
}

/// A stopped rank ends the meeting at the limit of the command, not after a minute.
#[test]
fn the_meeting_ends_at_the_limit_of_the_command() {
    for stopped in 0..2u32 {
        let port = free_port();
        let one = rank((1 - stopped, 2), port, "a", &["--timeout-s", "2"]);
        let mut other = rank((stopped, 2), port, "a", &[]);
        let signal = |s: &str| {
            let id = other.id().to_string();
            assert!(Command::new("kill").args([s, &id]).status().unwrap().success());
        };
        // Before it can do anything, in the middle of the meeting, or, on a busy machine, behind
        // it, before the first message of the team: each error names the stopped rank or the store.
        signal("-STOP");
        let text = fails_within(one, 6.0);
        let named = [
            format!("did not arrive: r{stopped}"),
            format!("(rank {}, peer {stopped}", 1 - stopped),
            format!("no message has arrived from r{stopped} ("),
            format!("the store at 127.0.0.1:{port}"),
            "the store does not answer".to_owned(),
        ];
        assert!(named.iter().any(|n| text.contains(n)), "{text}");
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

/// The secret reaches a rank behind wrappers; one that closes its descriptor is named as the cause.
#[test]
fn a_wrapper_that_closes_the_secret_is_named() {
    let run = |script: &str, secret: Option<&str>| {
        let mut cmd = Command::new(TILEWIRE);
        cmd.args(["run", "-n", "2", "--timeout-s", "30", "--", "sh", "-c", script]);
        if let Some(secret) = secret {
            cmd.env("TILEWIRE_SECRET", secret);
        }
        cmd.output().unwrap()
    };
    let verify = format!("{TILEWIRE} verify --op gemm --timeout-s 20");
    let pass = run(&format!("env -u TILEWIRE_SECRET sh -c 'true; {verify}'"), None);
    assert!(pass.status.success(), "{}", text(&pass));
    // bash closes descriptors with numbers of any length.
    let close =
        format!("exec bash -c 'eval \"exec ${{_TILEWIRE_SECRET_FD%:*}}<&-\"; exec {verify}'");
    let lost = run(&close, None);
    assert!(!lost.status.success());
    let lost = text(&lost);
    assert!(lost.contains("the launcher's secret does not reach this process"), "{lost}");
    assert!(lost.contains("set TILEWIRE_SECRET"), "{lost}");
    let chosen = run(&close, Some(&"c".repeat(32)));
    assert!(chosen.status.success(), "{}", text(&chosen));
}
