use std::sync::{Arc, Mutex};

use rustix::process::Signal;

use super::*;

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(b);
        Ok(b.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn lines(&self) -> Vec<String> {
        let mut l: Vec<_> = self.text().lines().map(str::to_owned).collect();
        l.sort();
        l
    }
}

fn sh(n: usize, script: &str) -> Launch {
    Launch {
        args: vec!["-c".into(), script.into()],
        grace: Duration::from_millis(500),
        timeout: Some(Duration::from_secs(30)),
        forward_signals: false,
        ..Launch::new(n, "sh")
    }
}

fn run(l: &Launch) -> (ExitReport, Screen, Screen) {
    let (out, err) = (Screen::default(), Screen::default());
    let r = l.run_to(Box::new(out.clone()), Box::new(err.clone())).unwrap();
    (r, out, err)
}

/// True if a process with this number lives. Only for numbers that a child has just printed.
fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|s| !s.contains(") Z "))
}

#[test]
fn success_and_lines_with_prefix() {
    let (r, out, err) = run(&sh(3, "echo one $RANK; echo two >&2; printf rest"));
    assert_eq!((r.code, r.stragglers), (0, 0));
    assert!(r.first_failure.is_none() && r.ranks.iter().all(|s| s.success()));
    let want = ["[r0] one 0", "[r0] rest", "[r1] one 1", "[r1] rest", "[r2] one 2", "[r2] rest"];
    assert_eq!(out.lines(), want);
    assert_eq!(err.lines(), ["[r0] two", "[r1] two", "[r2] two"]);
    let bare = Launch { no_prefix: true, ..sh(1, "echo x") };
    assert_eq!(run(&bare).1.text(), "x\n");
}

#[test]
fn variables_of_every_rank() {
    let names = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR \
                 $NCCL_NVLS_ENABLE$NVSHMEM_DISABLE_NVLS$TORCH_SYMM_MEM_DISABLE_MULTICAST\
                 $CUBLASMP_DISABLE_MULTICAST$NCCL_GRAPH_REGISTER ${#TILEWIRE_SECRET}${_TILEWIRE_SECRET_FD:+fd} $MORE \
                 ${TILEWIRE_RANK%:*} $((${TILEWIRE_RANK##*:} != MASTER_PORT))";
    let l = Launch {
        env: vec![("MORE".into(), "yes".into()), ("NCCL_NVLS_ENABLE".into(), "1".into())],
        ..sh(2, &format!("echo {names}"))
    };
    let (r, out, _) = run(&l);
    assert_eq!(r.code, 0);
    let want = |i| format!("[r{i}] {i}/2 {i}/2 0 127.0.0.1 01110 0fd yes {i}/2@127.0.0.1 1");
    assert_eq!(out.lines(), [want(0), want(1)]);
}

/// Wrappers hand the descriptor on; a secret that the user has chosen goes as it came.
#[test]
fn the_secret_is_in_no_environment_unless_the_user_has_put_it_there() {
    let look = "fd=${_TILEWIRE_SECRET_FD%:*}; echo ${#TILEWIRE_SECRET} $(sh -c \"wc -c </proc/self/fd/$fd\")";
    let (_, out, err) = run(&sh(1, look));
    assert_eq!(out.text(), "[r0] 0 64\n", "{}", err.text());
    let chosen = "0123456789abcdef0123456789abcdef";
    let l = Launch {
        env: vec![("TILEWIRE_SECRET".into(), chosen.into())],
        ..sh(1, "echo $TILEWIRE_SECRET${_TILEWIRE_SECRET_FD:+fd}")
    };
    assert_eq!(run(&l).1.text(), format!("[r0] {chosen}\n"));
    let l = Launch { env: vec![("TILEWIRE_SECRET".into(), "short".into())], ..sh(1, "true") };
    assert_eq!(l.run().unwrap_err().kind(), tilewire_core::ErrorKind::Config);
}

#[test]
fn ranks_find_their_place_and_reach_the_launchers_store() {
    // What a rank sees is what `detect` and `join_processes` read.
    let (_, out, _) = run(&sh(1, "echo $TILEWIRE_RANK $RANK $TORCHELASTIC_USE_AGENT_STORE"));
    let text = out.text();
    let place = text.split_whitespace().nth(1).unwrap();
    let vars = [("TILEWIRE_RANK".to_owned(), place.to_owned())].into();
    let p = crate::detect(&crate::Flags::default(), &vars).unwrap();
    assert_eq!((p.rank.get(), p.size, p.launcher), (0, 1, crate::Launcher::Tilewire));
}

#[test]
fn the_first_failure_ends_all_and_is_reported_with_its_last_lines() {
    let start = Instant::now();
    let (r, ..) = run(&sh(3, "if [ $RANK = 1 ]; then seq 30 >&2; exit 7; fi; exec sleep 60"));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(r.code, 7);
    let f = r.first_failure.unwrap();
    assert_eq!((f.rank, f.status), (Rank::new(1), RankStatus::Exited(7)));
    let want: Vec<String> = (11..=30).map(|i: u32| i.to_string()).collect();
    assert_eq!(f.last_stderr, want);
    assert_eq!(r.ranks[0], RankStatus::Signaled(15));
}

/// The victim's end is seen up to 100 ms behind those of the others: a busy machine tries again.
#[test]
fn of_failures_together_the_one_that_caused_the_others_is_named() {
    let (died, failed) = ("rank 1 has died (team all)", "r1 failed: no memory (team all)");
    for (victim, status, peers) in [
        ("kill -KILL $$", RankStatus::Signaled(9), died),
        ("echo 'error: no such file' >&2; exit 2", RankStatus::Exited(2), died),
        ("echo 'error: no memory' >&2; exit 2", RankStatus::Exited(2), failed),
    ] {
        let peers = format!("echo 'error: {peers}' >&2; exit 2");
        let script = format!("if [ $RANK = 1 ]; then sleep 0.01; {victim}; fi; {peers}");
        assert!((0..5).any(|_| {
            let (r, ..) = run(&sh(3, &script));
            let f = r.first_failure.unwrap();
            (f.rank, f.status, r.code) == (Rank::new(1), status, status.code())
        }));
    }
    let (r, ..) =
        run(&sh(2, &format!("[ $RANK = 1 ] && sleep 9; echo 'error: {failed}' >&2; exit 2")));
    assert_eq!(r.findings(), ["rank 0 failed because of rank 1"], "it was ended before it failed");
    // Of equals the first; and nobody waits for more than the time of a verdict.
    let start = Instant::now();
    let (r, ..) = run(&sh(2, "if [ $RANK = 1 ]; then exit 7; fi; sleep 0.05; exit 6"));
    assert_eq!((r.code, r.first_failure.unwrap().rank), (7, Rank::new(1)));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn the_rank_that_the_others_waited_for_is_named() {
    let wait = "echo 'error: rank 2 is alive but did not signal (rank 1, culprit 2)' >&2; exit 2";
    let abort = "echo 'error: rank 1 aborted the team (culprit 2, after 1 s)' >&2; exit 2";
    let script = format!(
        "case $RANK in 0) {abort};; 1) {wait};; *) trap '' TERM; while :; do sleep 0.1; done;; esac"
    );
    let (r, ..) = run(&Launch { grace: Duration::from_millis(300), ..sh(3, &script) });
    let f = r.first_failure.as_ref().unwrap();
    assert_eq!((f.rank, f.culprit), (Rank::new(1), Some(Rank::new(2))));
    assert_eq!(r.stuck, [Rank::new(2)]);
    let want =
        ["rank 1 failed because of rank 2", "rank 2 did not end when asked to, and was killed"];
    assert_eq!(r.findings(), want);
}

#[test]
fn a_rank_with_an_error_of_its_own_is_named_before_those_that_it_left() {
    let left = "echo 'error: rank 1 has left the job and will not signal (culprit 1)' >&2; exit 2";
    let own = "sleep 0.05; echo 'error: no memory' >&2; exit 2";
    let (r, ..) = run(&sh(3, &format!("if [ $RANK = 1 ]; then {own}; fi; {left}")));
    let f = r.first_failure.as_ref().unwrap();
    assert_eq!((f.rank, f.culprit, r.findings().len()), (Rank::new(1), None, 0));
}

#[test]
fn the_limit_that_ended_a_rank_is_named() {
    for (script, want) in [
        ("echo 'memory allocation of 30 bytes failed' >&2; kill -ABRT $$", "ulimit -v"),
        ("kill -XFSZ $$", "ulimit -f"),
    ] {
        let findings = run(&sh(1, script)).0.findings();
        assert!(findings.len() == 1 && findings[0].contains(want), "{findings:?}");
    }
}

/// A stream that takes a line each so often, or, with none, nothing after its first line.
struct Slow(Screen, Option<Duration>);

impl Write for Slow {
    fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
        let n = self.0.write(b)?;
        std::thread::sleep(self.1.unwrap_or(Duration::from_secs(60)));
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_stream_that_nobody_reads_does_not_hold_up_the_end() {
    for script in ["exec yes", "yes >&2 & exec yes"] {
        let l = Launch { timeout: Some(Duration::from_millis(300)), ..sh(2, script) };
        let stuck = || Box::new(Slow(Screen::default(), None));
        let start = Instant::now();
        let r = l.run_to(stuck(), stuck()).unwrap();
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "{script}: {took:?}");
        assert_eq!(r.code, 124, "{script}");
        // What is kept is bounded: ranks wait, as they would without a launcher.
        assert!(r.lost_output > 64 << 10, "{script}: {}", r.lost_output);
        assert!(r.lost_output < 64 << 20, "{script}: {}", r.lost_output);
    }
}

#[test]
fn a_slow_reader_gets_all_lines_and_holds_up_nobody_elses() {
    let (out, err) = (Screen::default(), Screen::default());
    let l = sh(1, "seq 60; seq 3 >&2");
    let start = Instant::now();
    let slow = Slow(out.clone(), Some(Duration::from_millis(30)));
    let r = l.run_to(Box::new(slow), Box::new(err.clone())).unwrap();
    assert!(start.elapsed() > Duration::from_millis(1500));
    assert_eq!((r.code, r.lost_output), (0, 0));
    assert_eq!((out.lines().len(), err.lines().len()), (60, 3));
}

#[test]
fn a_rank_that_ignores_term_is_killed_after_the_grace_time() {
    let script =
        "if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; trap '' TERM; while :; do sleep 1; done";
    let start = Instant::now();
    let (r, ..) = run(&sh(2, script));
    let took = start.elapsed();
    assert!(took > Duration::from_millis(500) && took < Duration::from_secs(5), "{took:?}");
    assert_eq!((r.code, r.ranks[1]), (3, RankStatus::Signaled(9)));
}

#[test]
fn a_signal_is_128_plus() {
    let (r, ..) = run(&sh(1, "kill -SEGV $$"));
    assert_eq!((r.code, r.ranks[0]), (139, RankStatus::Signaled(11)));
}

#[test]
fn the_time_limit_ends_the_job() {
    let l = Launch { timeout: Some(Duration::from_millis(200)), ..sh(2, "exec sleep 60") };
    let (r, ..) = run(&l);
    assert!(r.timed_out && r.first_failure.is_none());
    assert_eq!(r.code, 124);
}

#[test]
fn no_orphans_neither_after_success_nor_after_failure() {
    for (tail, code) in [("exit 0", 0), ("exit 5", 5)] {
        // In the background: one child that ignores TERM, one in a process group of its own.
        let script = format!(
            "(trap '' TERM; exec sleep 60) >/dev/null 2>&1 & echo $!; \
             set -m; sleep 60 & echo $!; sleep 0.5; {tail}"
        );
        let (r, out, _) = run(&sh(2, &script));
        assert_eq!(r.code, code);
        let pids: Vec<_> = out.lines();
        assert_eq!(pids.len(), 4, "{pids:?}");
        for line in pids {
            let pid = line.split_whitespace().nth(1).unwrap();
            assert!(!alive(pid), "{pid} lives");
        }
        assert!(r.stragglers >= 2, "{}", r.stragglers);
    }
}

#[test]
fn a_process_that_left_its_session_does_not_hold_up_the_launcher() {
    let start = Instant::now();
    let (r, out, _) = run(&sh(1, "setsid sleep 12 & echo done"));
    assert_eq!(r.code, 0);
    assert!(out.text().contains("done"));
    assert!(start.elapsed() < Duration::from_secs(8));
}

#[test]
fn a_program_that_cannot_be_started_is_an_error() {
    let e = Launch::new(2, "/nonexistent/program").run().unwrap_err();
    assert_eq!(e.kind(), tilewire_core::ErrorKind::Unavailable);
    assert!(e.to_string().contains("/nonexistent/program"), "{e}");
    for n in [0, 65] {
        assert!(Launch::new(n, "true").run().is_err());
    }
}

/// The launcher itself, in a process of its own, for the tests that signal it.
#[test]
#[ignore = "run by the tests below"]
fn launcher_child() {
    let traps = std::env::var("TW_TEST_TRAPS").unwrap();
    let script = format!("{traps}; echo pid $$; while :; do sleep 0.05; done");
    let warden = ["launch::tests::warden_child", "--exact", "--ignored"].map(OsString::from);
    let warden = std::iter::once(std::env::current_exe().unwrap().into()).chain(warden).collect();
    let r = Launch { forward_signals: true, warden, ..sh(2, &script) }.run().unwrap();
    std::process::exit(r.code);
}

/// Its warden.
#[test]
#[ignore = "run by launchers of the tests below"]
fn warden_child() {
    watch_launcher().unwrap();
}

fn launcher() -> (std::process::Child, Vec<String>, std::io::Lines<impl std::io::BufRead>) {
    launcher_of("trap 'echo got; exit 0' INT", 2)
}

/// The launcher of two shells that begin with `traps`; the `num` numbers that they print as theirs
/// or their children's, and what is printed besides.
fn launcher_of(
    traps: &str,
    num: usize,
) -> (std::process::Child, Vec<String>, std::io::Lines<impl std::io::BufRead + use<>>) {
    use std::io::BufRead;
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["launch::tests::launcher_child", "--exact", "--ignored", "--nocapture"])
        .env("TW_TEST_TRAPS", traps)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let mut pids = Vec::new();
    while pids.len() < num {
        let line = lines.next().unwrap().unwrap();
        if let Some((_, pid)) = line.split_once("pid ") {
            pids.push(pid.to_owned());
        }
    }
    (child, pids, lines)
}

#[test]
fn an_interrupt_is_passed_on_and_is_the_exit_code() {
    let (mut child, pids, lines) = launcher();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let got = lines.map_while(|l| l.ok()).filter(|l| l.ends_with("got")).count();
    assert_eq!(got, 2);
    assert!(!pids.iter().any(|p| alive(p)));
}

/// As a service manager does, or a shell that ends and its terminal: ranks have their time, until
/// the same signal comes again.
#[test]
fn two_signals_at_once_are_one_wish_and_one_later_kills() {
    let (mut child, pids, lines) =
        launcher_of("trap '' HUP; trap 'sleep 0.3; echo got; exit 0' INT", 2);
    for signal in [Signal::INT, Signal::HUP, Signal::INT] {
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let said: Vec<String> = lines.map_while(|l| l.ok()).collect();
    assert_eq!(said.iter().filter(|l| l.ends_with("got")).count(), 2, "{said:?}");
    assert!(!pids.iter().any(|p| alive(p)));

    // The same again, or another one.
    for second in [Signal::INT, Signal::TERM] {
        let (mut child, pids, _lines) = launcher_of("trap '' INT", 2);
        let (pid, start) = (rustix::process::Pid::from_child(&child), Instant::now());
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        std::thread::sleep(Duration::from_millis(700));
        rustix::process::kill_process(pid, second).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        // Before the grace time is over, which is three seconds.
        assert!(start.elapsed() < Duration::from_millis(2900), "{:?}", start.elapsed());
        assert!(!pids.iter().any(|p| alive(p)));
    }
}

/// The same where ranks have written more than anybody reads: the launcher's own output stands
/// still.
#[test]
fn a_second_signal_ends_a_launcher_whose_output_nobody_reads() {
    let text = "yes & trap '' INT TERM";
    let (mut child, pids, lines) = launcher_of(text, 2);
    let pid = rustix::process::Pid::from_child(&child);
    // The pipe is full.
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let start = Instant::now();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // A second is what the launcher gives a reader; the grace time is three.
    assert!(start.elapsed() < Duration::from_millis(1900), "{:?}", start.elapsed());
    assert!(!pids.iter().any(|p| alive(p)));
    drop(lines);
}

#[test]
fn the_death_of_the_launcher_ends_the_ranks() {
    let (mut child, pids, _lines) = launcher();
    child.kill().unwrap();
    child.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    while pids.iter().any(|p| alive(p)) {
        assert!(Instant::now() < end, "ranks live on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kills the launcher of ranks that start `children`, `num` processes in all: they end in a second.
fn end_with_the_launcher(children: &str, num: usize) {
    let (mut child, pids, _lines) = launcher_of(children, num);
    assert!(pids.iter().all(|p| alive(p)), "{pids:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let dead = Instant::now();
    while pids.iter().any(|p| alive(p)) {
        assert!(dead.elapsed() < Duration::from_secs(1), "some of {pids:?} live on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Children behind a wrapper, in a session of their own, and with both parents gone.
#[test]
fn the_death_of_the_launcher_ends_what_ranks_have_started() {
    let children = "sh -c 'echo pid $$; sleep 60; true' & \
                    setsid sh -c 'echo pid $$; sleep 60; true' & \
                    (setsid sh -c '(sh -c \"echo pid \\$\\$; sleep 60; true\" &)')";
    end_with_the_launcher(children, 8);
}

/// A process that clears its environment, alone or in a session of its own, with both parents gone.
#[test]
fn the_death_of_the_launcher_ends_what_has_cleared_its_environment() {
    let children = "env -i sh -c 'echo pid $$; sleep 60; true' & \
                    (env -i setsid sh -c '(env -i sh -c \"echo pid \\$\\$; sleep 60; true\" &)')";
    end_with_the_launcher(children, 6);
}

/// Processes that a lost rank has left, in a session of their own and without environment, too, end
/// before it is started anew.
#[test]
fn a_restart_ends_what_the_lost_rank_has_left_behind() {
    let script = "[ $_TILEWIRE_RESTARTS = 1 ] && exit 0; \
                  setsid sh -c 'echo left $$; exec sleep 60' >&2 & \
                  env -i setsid sh -c 'echo left $$; exec sleep 60' >&2 & sleep 1; exit 3";
    let (r, _, err) = run(&Launch { max_restarts: 1, ..sh(1, script) });
    assert_eq!((r.code, r.restarts), (0, 1), "{}", err.text());
    let text = err.text();
    let pids: Vec<_> = text.lines().filter_map(|l| Some(l.split_once("left ")?.1)).collect();
    assert_eq!(pids.len(), 2, "{text}");
    assert!(!pids.iter().any(|p| alive(p)), "{text}");
    assert_eq!(r.stragglers, 2);
}

/// A job that has ended leaves nothing to its warden: a process that left its session lives on. The
/// rank ends after that process has left.
#[test]
fn a_warden_ends_with_its_job() {
    let warden = ["launch::tests::warden_child", "--exact", "--ignored"].map(OsString::from);
    let warden = std::iter::once(std::env::current_exe().unwrap().into()).chain(warden).collect();
    // The rank ends once the other is in a session of its own, not before.
    let script = "echo $(setsid sh -c 'sleep 3 >/dev/null 2>&1 & echo $!')";
    let l = Launch { warden, ..sh(1, script) };
    let (r, out, _) = run(&l);
    assert_eq!(r.code, 0);
    let text = out.text();
    let pid = text.split_whitespace().nth(1).unwrap();
    assert!(alive(pid), "{text}");
}

/// Rank 1 fails before the first restart and rank 0 does not notice: it is killed, and both are
/// started anew.
#[test]
fn ranks_of_any_program_are_started_anew() {
    let script = "echo $_TILEWIRE_RESTARTS; \
                  [ $_TILEWIRE_RESTARTS = 2 ] && exit 0; [ $RANK = 1 ] && exit 3; exec sleep 60";
    let restarted = |most| {
        let regroup = Duration::from_millis(300);
        run(&Launch { max_restarts: most, regroup, ..sh(2, script) })
    };
    let (r, out, err) = restarted(2);
    assert_eq!((r.code, r.restarts), (0, 2), "{}", err.text());
    assert!(r.first_failure.is_none() && r.elapsed < Duration::from_secs(10), "{r:?}");
    let lines = ["0", "0", "1", "1", "2", "2"];
    let mut got: Vec<_> = out.lines().iter().map(|l| l[5..].to_owned()).collect();
    got.sort();
    assert_eq!(got, lines);
    let note = "tilewire run: rank 0 did not come back and was killed; restart 2 of 2: 2 of 2 ranks \
                are started anew: 0, 1";
    assert_eq!(err.lines().last().map(String::as_str), Some(note), "{}", err.text());
    // One too few: the last failure is that of the job.
    let (r, _, _) = restarted(1);
    let failure = r.first_failure.unwrap();
    assert_eq!((r.code, r.restarts, failure.rank.get()), (3, 1, 1));
}

/// Status 2 before a rank has met the others is that of a program that was started wrongly; behind
/// a restart, too. Rank 0 does not end by itself: it is ended.
#[test]
fn an_error_that_would_come_again_is_not_restarted() {
    for (at, status, restarts) in [(0, 2, 0), (1, 2, 1), (0, 3, 3)] {
        let script = format!(
            "[ $RANK = 0 ] && exec sleep 60; [ $_TILEWIRE_RESTARTS -ge {at} ] && exit {status}; exit 4"
        );
        let regroup = Duration::from_millis(300);
        let (r, _, err) = run(&Launch { max_restarts: 3, regroup, ..sh(2, &script) });
        let failure = r.first_failure.unwrap();
        assert_eq!((r.code, failure.rank.get()), (status, 1), "{}", err.text());
        assert_eq!(r.restarts, restarts, "{}", err.text());
        assert!(r.elapsed < Duration::from_secs(5), "{:?}", r.elapsed);
    }
}

/// A rank that gives up, and one that has met before it ends with status 2.
#[test]
#[ignore = "run by launchers of the tests below"]
fn rank_that_gives_up() {
    if std::env::var("RANK").unwrap() == "0" {
        return std::thread::sleep(Duration::from_secs(60));
    }
    if std::env::var_os("TW_TEST_MEETS").is_none() {
        crate::Rejoin::from_env().unwrap().unwrap().give_up(Rank::new(1));
        std::process::exit(7);
    }
    let place = crate::detect(&crate::Flags::of_process(), &std::env::vars().collect());
    let (cfg, soon) = (Default::default(), tilewire_core::Deadline::after_s(0.3));
    // It comes to the meeting, and the other rank does not.
    crate::join_processes(&place.unwrap(), &cfg, soon).map(drop).unwrap_err();
    std::process::exit(2);
}

#[test]
fn a_rank_may_say_that_its_error_would_come_again() {
    let words = ["launch::tests::rank_that_gives_up", "--exact", "--ignored", "--nocapture"];
    let l = Launch {
        args: words.map(OsString::from).to_vec(),
        max_restarts: 2,
        regroup: Duration::from_millis(300),
        ..Launch { program: std::env::current_exe().unwrap().into(), ..sh(2, "") }
    };
    let (r, out, err) = run(&l);
    assert_eq!((r.code, r.restarts), (7, 0), "{}{}", out.text(), err.text());
    // Who has met is started anew, whatever its status.
    let (r, out, err) = run(&Launch { env: vec![("TW_TEST_MEETS".into(), "1".into())], ..l });
    assert_eq!((r.code, r.restarts), (2, 2), "{}{}", out.text(), err.text());
}

/// A rank comes back by the socket of the launcher, which refuses strangers.
#[test]
#[ignore = "run by launchers of the tests below"]
fn rank_that_comes_back() {
    let me: u32 = std::env::var("RANK").unwrap().parse().unwrap();
    let mut rejoin = crate::Rejoin::from_env().unwrap().unwrap();
    let before = rejoin.restarts();
    let place = |p: &crate::Place| format!("{:?}", p.rendezvous);
    let first = crate::detect(&crate::Flags::of_process(), &std::env::vars().collect()).unwrap();
    if me == 1 && before == 0 {
        std::process::exit(5);
    }
    if me == 0 {
        use std::os::linux::net::SocketAddrExt;
        let name = std::env::var("_TILEWIRE_REJOIN").unwrap();
        let addr =
            std::os::unix::net::SocketAddr::from_abstract_name(name.split_once(':').unwrap().0);
        for words in ["", "x", "wrong 1 0\n", "wrong 0 0\n"] {
            let s = std::os::unix::net::UnixStream::connect_addr(addr.as_ref().unwrap());
            std::io::Write::write_all(&mut s.unwrap(), words.as_bytes()).unwrap();
        }
        let again = rejoin.again(Rank::new(0)).unwrap();
        assert_eq!((again.rank.get(), again.size, rejoin.restarts()), (0, 2, 1));
        assert_ne!(place(&again), place(&first), "a store where nobody has met");
        writeln!(std::io::stdout(), "back at {}", place(&again)).unwrap();
        // No restart is left.
        let e = rejoin.again(Rank::new(0)).unwrap_err();
        assert_eq!(e.kind(), tilewire_core::ErrorKind::Unavailable);
    } else {
        writeln!(std::io::stdout(), "back at {}", place(&first)).unwrap();
    }
}

#[test]
fn a_rank_that_comes_back_stays_and_meets_the_new_ones() {
    let words = ["launch::tests::rank_that_comes_back", "--exact", "--ignored", "--nocapture"];
    let l = Launch {
        args: words.map(OsString::from).to_vec(),
        max_restarts: 1,
        ..Launch { program: std::env::current_exe().unwrap().into(), ..sh(2, "") }
    };
    let (r, out, err) = run(&l);
    assert_eq!((r.code, r.restarts), (0, 1), "{}{}", out.text(), err.text());
    assert!(err.text().contains("1 of 2 ranks are started anew: 1"), "{}", err.text());
    let places: Vec<_> = out
        .lines()
        .into_iter()
        .filter_map(|l| Some(l.split_once("back at ")?.1.to_owned()))
        .collect();
    assert!(places.len() == 2 && places[0] == places[1], "{}", out.text());
}
