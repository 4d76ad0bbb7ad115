//! The mesh between real processes: exchange, death, stopping, and joining by the environment.
//!
//! A test starts this very binary again with `--exact child_role`; `BOOT_TEST_ROLE` says what the
//! child does. Children report on standard output, one word per line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use tilewire_boot::{
    Flags, LinkMesh, Mesh, PeerExit, Secret, StoreAddr, StoreClient, StoreServer, detect,
    join_processes,
};
use tilewire_core::{Config, Deadline, Rank, inject};
use tilewire_testing::free_port;

fn soon() -> Deadline {
    Deadline::after_s(20.0)
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn say(text: &str) {
    let mut out = std::io::stdout();
    // The test harness may have written the beginning of a line.
    out.write_all(format!("\n>{text}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

fn wait_for_line() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
#[ignore = "run by the tests below"]
fn child_role() {
    match &*var("BOOT_TEST_ROLE") {
        "exchange" => exchange_then_wait(&connect()),
        "victim" => {
            let mesh = connect();
            exchange_then_wait(&mesh);
        }
        "forker" => {
            let mesh = connect();
            // A child of the victim that keeps copies of all its descriptors, the sockets included.
            for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
                let n: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
                if n > 2 {
                    let path = format!("/proc/self/fd/{n}");
                    let is_socket = std::fs::read_link(&path)
                        .is_ok_and(|l| l.to_string_lossy().starts_with("socket:"));
                    if is_socket {
                        inherit(n);
                    }
                }
            }
            let mut sleeper =
                Command::new("sleep").arg("30").stdout(Stdio::null()).spawn().unwrap();
            let held = std::fs::read_dir(format!("/proc/{}/fd", sleeper.id())).unwrap();
            let sockets = held.filter_map(|e| std::fs::read_link(e.unwrap().path()).ok());
            let n = sockets.filter(|l| l.to_string_lossy().starts_with("socket:")).count();
            say(&format!("sleeper {} holds {n}", sleeper.id()));
            exchange_then_wait(&mesh);
            sleeper.wait().unwrap();
        }
        "flood" => {
            let mesh = connect();
            say("ready");
            wait_for_line();
            let all: Vec<Rank> = Rank::all(mesh.size()).collect();
            let limit = Deadline::after_s(1.0);
            let e = mesh.exchange("big", &all, &vec![0; 1 << 20], &[], limit).unwrap_err();
            say(&format!("error {}", e.message()));
            mesh.leave();
        }
        "env" => {
            let vars: BTreeMap<String, String> = std::env::vars().collect();
            let place = detect(&Flags::of_process(), &vars).unwrap();
            let cfg = Config::from_env().unwrap();
            for round in 0..2 {
                let mesh = join_processes(&place, &cfg, soon()).unwrap();
                let all: Vec<Rank> = Rank::all(place.size).collect();
                let got = mesh.exchange("hi", &all, &[round], &[], soon()).unwrap();
                assert!(got.iter().all(|p| p.payload == [round]));
                mesh.leave();
            }
            say(&format!("joined {}/{}", place.rank.get(), place.size));
        }
        "guarded" => {
            let vars: BTreeMap<String, String> = std::env::vars().collect();
            let place = detect(&Flags::of_process(), &vars).unwrap();
            let number = vars["_TILEWIRE_SECRET_FD"].split(':').next().unwrap().to_owned();
            let path = format!("/proc/self/fd/{number}");
            let secret = std::fs::read_to_string(&path).unwrap();
            assert!(secret.len() >= 32);
            // What a program of this rank finds.
            let look = format!("env; ls -l /proc/self/fd; cat /proc/self/fd/{number}");
            let seen = || {
                let out = Command::new("bash").args(["-c", &look]).output().unwrap();
                String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
            };
            let before = seen();
            assert!(before.contains(&secret) && before.contains("tilewire-secret"), "{before}");
            let mesh = join_processes(&place, &Config::from_env().unwrap(), soon()).unwrap();
            let after = seen();
            assert!(!after.contains(&secret) && !after.contains("tilewire-secret"), "{after}");
            assert!(after.contains("No such file or directory"), "{after}");
            mesh.leave();
        }
        "retry" => fail_at_every_step_and_retry(),
        other => panic!("no role of a child: {other}"),
    }
}

/// One step of the chosen rank's start-up fails, each in turn: all ranks try again, and meet.
fn fail_at_every_step_and_retry() {
    let vars: BTreeMap<String, String> = std::env::vars().collect();
    let place = detect(&Flags::of_process(), &vars).unwrap();
    let cfg = Config::from_env().unwrap();
    let all: Vec<Rank> = Rank::all(place.size).collect();
    let chosen = place.rank.get().to_string() == var("BOOT_TEST_FAULTY");
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut baseline = None;
    for nth in 0.. {
        if chosen {
            inject::arm(nth);
        }
        // The others wait for the rank that failed: not long.
        let first = join_processes(&place, &cfg, Deadline::after_s(0.25));
        let met = chosen && inject::disarm();
        assert!(!met || first.is_err(), "step {nth}: the fault was swallowed");
        drop(first);
        let mesh = join_processes(&place, &cfg, soon()).unwrap();
        let parts = mesh.exchange("met", &all, &[u8::from(met)], &[], soon()).unwrap();
        mesh.leave();
        drop(mesh);
        let now = open();
        // The store that rank 0 serves keeps a connection until its client is seen to be gone.
        let most = *baseline.get_or_insert(now) + all.len();
        assert!(now <= most, "step {nth}: {now} descriptors, {most} were enough before");
        if parts.iter().all(|p| p.payload == [0]) {
            say(&format!("steps {nth}"));
            return;
        }
    }
}

/// Makes a copy of descriptor `n` that children inherit.
fn inherit(n: i32) {
    // SAFETY: `n` was just listed as open in this process, whose only other threads are the mesh's
    // monitor and the test harness; neither closes a socket of the mesh while it is alive.
    #[allow(unsafe_code)]
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(n) };
    // The duplicate is meant to stay open in this process and in its child.
    std::mem::forget(rustix::io::dup(fd).unwrap());
}

fn connect() -> Arc<LinkMesh> {
    let addr = StoreAddr::Abstract(var("BOOT_TEST_STORE"));
    let secret = Secret::from_hex(&var("BOOT_TEST_SECRET")).unwrap();
    let store = StoreClient::connect(&addr, &secret, soon()).unwrap();
    let rank = Rank::new(var("BOOT_TEST_RANK").parse().unwrap());
    let size = var("BOOT_TEST_SIZE").parse().unwrap();
    LinkMesh::connect(&store, "job", rank, size, &secret, soon()).unwrap()
}

/// Exchanges a memfd with everybody, then waits in an exchange that nobody else ever joins.
fn exchange_then_wait(mesh: &Arc<LinkMesh>) {
    let all: Vec<Rank> = Rank::all(mesh.size()).collect();
    check_exchange(&**mesh, &all, "first");
    mesh.on_exit(Box::new(|r, how| say(&format!("exit {} {how:?}", r.get()))));
    say("ready");
    wait_for_line();
    let start = Instant::now();
    match mesh.exchange("second", &all, b"", &[], soon()) {
        Ok(_) => say("second ok"),
        Err(e) => say(&format!(
            "error {:?} of {:?} after {}",
            e.kind(),
            e.get_peer().map(Rank::get),
            start.elapsed().as_secs()
        )),
    }
    wait_for_line();
    mesh.leave();
}

fn check_exchange(mesh: &dyn Mesh, all: &[Rank], tag: &str) {
    let me = mesh.rank().get();
    let mut file = File::from(memfd_create("t", MemfdFlags::CLOEXEC).unwrap());
    write!(file, "file of {me}").unwrap();
    let payload = vec![me as u8; 200_000];
    let got = mesh.exchange(tag, all, &payload, &[file.as_fd()], soon()).unwrap();
    for (m, p) in all.iter().zip(got) {
        assert_eq!(p.payload, vec![m.get() as u8; 200_000]);
        let f = File::from(p.fds.into_iter().next().unwrap());
        // All duplicates share one file position: reading must not move it.
        let mut text = vec![0; f.metadata().unwrap().len() as usize];
        f.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(text, format!("file of {}", m.get()).as_bytes());
    }
}

struct Role {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Role {
    fn start(role: &str, vars: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_role", "--exact", "--ignored", "--nocapture"])
            .env("BOOT_TEST_ROLE", role)
            .envs(vars.iter().map(|(k, v)| (*k, v)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The next word that begins with `what`.
    fn hear(&mut self, what: &str) -> String {
        loop {
            let line =
                self.lines.next().unwrap_or_else(|| panic!("ended before `{what}`")).unwrap();
            if let Some(text) = line.strip_prefix('>').filter(|t| t.starts_with(what)) {
                return text.to_owned();
            }
        }
    }

    fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // Only our own child, which we have not reaped unless it has ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn world(roles: &[&str]) -> (StoreServer, Vec<Role>) {
    let secret = Secret::random().unwrap();
    let name = format!("tilewire-test-{}", &Secret::random().unwrap().reveal()[..16]);
    let server = StoreServer::bind(&StoreAddr::Abstract(name.clone()), &secret).unwrap();
    let start = |(i, role): (usize, &&str)| {
        let vars = [
            ("BOOT_TEST_STORE", name.clone()),
            ("BOOT_TEST_SECRET", secret.reveal().to_owned()),
            ("BOOT_TEST_RANK", i.to_string()),
            ("BOOT_TEST_SIZE", roles.len().to_string()),
        ];
        Role::start(role, &vars)
    };
    let roles = roles.iter().enumerate().map(start).collect();
    (server, roles)
}

/// Two ranks wait for a third one, which is killed.
fn kill_third(third: &str) {
    let (_server, mut ranks) = world(&["exchange", "exchange", third]);
    let sleeper = (third == "forker").then(|| ranks[2].hear("sleeper"));
    if let Some(s) = &sleeper {
        let held: u32 = s.rsplit(' ').next().unwrap().parse().unwrap();
        assert!(held >= 2, "the sleeper must hold the victim's sockets: {s}");
    }
    for r in &mut ranks {
        r.hear("ready");
    }
    let (victim, rest) = ranks.split_last_mut().unwrap();
    rest.iter_mut().for_each(Role::go);
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    kill_process(victim.pid(), Signal::KILL).unwrap();
    for r in rest.iter_mut() {
        // Both come from different threads, in any order.
        let mut seen = [r.hear("e"), r.hear("e")];
        seen.sort();
        assert_eq!(seen[0], "error PeerDead of Some(2) after 0");
        assert_eq!(seen[1], format!("exit 2 {:?}", PeerExit::Died));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
    rest.iter_mut().for_each(Role::go);
    for r in rest {
        assert!(r.child.wait().unwrap().success());
    }
    if let Some(s) = sleeper {
        let pid = s.split(' ').nth(1).unwrap().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
}

#[test]
fn a_killed_rank_is_seen_within_a_second() {
    kill_third("victim");
}

#[test]
fn a_forked_child_that_holds_the_sockets_does_not_hide_the_death() {
    kill_third("forker");
}

#[test]
fn a_stopped_rank_only_delays() {
    let (_server, mut ranks) = world(&["exchange", "exchange", "exchange"]);
    ranks.iter_mut().for_each(|r| drop(r.hear("ready")));
    kill_process(ranks[1].pid(), Signal::STOP).unwrap();
    ranks.iter_mut().for_each(Role::go);
    std::thread::sleep(Duration::from_millis(500));
    kill_process(ranks[1].pid(), Signal::CONT).unwrap();
    for r in &mut ranks {
        assert_eq!(r.hear("second"), "second ok");
    }
    ranks.iter_mut().for_each(Role::go);
    for r in &mut ranks {
        assert!(r.child.wait().unwrap().success());
    }
}

#[test]
fn a_rank_that_does_not_read_is_the_only_one_that_is_missing() {
    let (_server, mut ranks) = world(&["flood", "flood", "flood", "flood"]);
    ranks.iter_mut().for_each(|r| drop(r.hear("ready")));
    kill_process(ranks[1].pid(), Signal::STOP).unwrap();
    for i in [0, 2, 3] {
        ranks[i].go();
    }
    for i in [0, 2, 3] {
        assert_eq!(ranks[i].hear("error"), "error `big`: no message has arrived from r1");
    }
}

#[test]
fn a_rank_that_is_stopped_during_the_rendezvous_only_delays() {
    let (_server, mut ranks) = world(&["exchange", "exchange", "exchange"]);
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(5));
        kill_process(ranks[0].pid(), Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(700));
        kill_process(ranks[0].pid(), Signal::CONT).unwrap();
    }
    ranks.iter_mut().for_each(|r| drop(r.hear("ready")));
}

fn joins(vars: impl Fn(usize) -> Vec<(&'static str, String)>) {
    let mut ranks: Vec<_> = (0..3).map(|i| Role::start("env", &vars(i))).collect();
    for (i, r) in ranks.iter_mut().enumerate() {
        assert_eq!(r.hear("joined"), format!("joined {i}/3"));
    }
    for r in &mut ranks {
        assert!(r.child.wait().unwrap().success());
    }
}

#[test]
fn joining_as_under_open_mpi_without_a_secret() {
    let job = Secret::random().unwrap().reveal()[..16].to_owned();
    joins(|i| {
        vec![
            ("OMPI_COMM_WORLD_RANK", i.to_string()),
            ("OMPI_COMM_WORLD_SIZE", "3".into()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", i.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "3".into()),
            ("PMIX_NAMESPACE", job.clone()),
        ]
    });
}

#[test]
fn joining_by_our_own_variable_with_the_store_served_by_rank_0() {
    let port = free_port();
    let secret = Secret::random().unwrap().reveal().to_owned();
    joins(|i| {
        vec![
            ("TILEWIRE_RANK", format!("{i}/3@127.0.0.1:{port}")),
            ("TILEWIRE_SECRET", secret.clone()),
        ]
    });
}

#[test]
#[cfg_attr(
    not(debug_assertions),
    ignore = "faults are injected only in builds with debug assertions"
)]
fn start_up_that_failed_at_any_step_can_be_tried_again() {
    for faulty in 0..2 {
        let port = free_port();
        let secret = Secret::random().unwrap().reveal().to_owned();
        let start = |i| {
            let vars = [
                ("TILEWIRE_RANK", format!("{i}/2@127.0.0.1:{port}")),
                ("TILEWIRE_SECRET", secret.clone()),
                ("BOOT_TEST_FAULTY", faulty.to_string()),
            ];
            Role::start("retry", &vars)
        };
        let mut ranks: Vec<_> = (0..2).map(start).collect();
        let steps: Vec<_> = ranks.iter_mut().map(|r| r.hear("steps")).collect();
        let num: usize = steps[0].trim_start_matches("steps ").parse().unwrap();
        assert!(steps[0] == steps[1] && num >= 6, "rank {faulty}: {steps:?}");
        ranks.iter_mut().for_each(|r| assert!(r.child.wait().unwrap().success()));
    }
}

/// Runs three ranks that the launcher starts, each of which plays `role`.
fn launched(role: &str) {
    let mut l = tilewire_boot::Launch::new(3, std::env::current_exe().unwrap());
    l.args = ["child_role", "--exact", "--ignored", "--nocapture"].map(Into::into).to_vec();
    l.env = vec![("BOOT_TEST_ROLE".into(), role.into())];
    l.forward_signals = false;
    l.timeout = Some(Duration::from_secs(30));
    let report = l.run().unwrap();
    assert_eq!(report.code, 0, "{report:?}");
    assert_eq!(report.stragglers, 0);
}

#[test]
fn ranks_of_the_launcher_join() {
    launched("env");
}

/// A rank that has joined keeps the secret from the programs that it starts; one that has not
/// cannot.
#[test]
fn a_child_of_a_joined_rank_cannot_read_the_secret() {
    launched("guarded");
}

#[test]
fn an_unreachable_store_is_named() {
    let vars = [("TILEWIRE_RANK".to_owned(), "1/2@127.0.0.1:1".to_owned())].into();
    let place = detect(&Flags::of_process(), &vars).unwrap();
    let e = join_processes(&place, &Config::default(), Deadline::after_s(0.2)).err().unwrap();
    assert!(e.is_timeout(), "{e}");
    assert!(e.to_string().contains("127.0.0.1:1, tried for 0.2 s"), "{e}");
}

#[test]
fn one_rank_needs_nobody_and_several_hosts_are_unsupported() {
    let mut place = detect(&Flags::of_process(), &BTreeMap::new()).unwrap();
    let mesh = join_processes(&place, &Config::default(), soon()).unwrap();
    let me = [Rank::new(0)];
    assert_eq!(mesh.exchange("t", &me, b"x", &[], soon()).unwrap()[0].payload, b"x");
    (place.size, place.local_size) = (4, 2);
    let e = join_processes(&place, &Config::default(), soon()).err().unwrap();
    assert!(e.is_unsupported(), "{e}");
}
