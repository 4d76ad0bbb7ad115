use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Instant;

use super::*;
use crate::store::LocalStore;
use crate::threads::ThreadMesh;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

fn links(n: usize) -> Vec<Arc<LinkMesh>> {
    let (store, secret) = (LocalStore::new(), Secret::random().unwrap());
    std::thread::scope(|t| {
        let (store, secret) = (&store, &secret);
        let connect =
            move |r| LinkMesh::connect(store, "j", r, n, secret, Deadline::after_s(20.0)).unwrap();
        let all: Vec<_> = Rank::all(n).map(|r| t.spawn(move || connect(r))).collect();
        all.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Both kinds of mesh, so that every test of behaviour runs on both.
fn kinds(n: usize) -> [Vec<Arc<dyn Mesh>>; 2] {
    let threads = ThreadMesh::group(n).unwrap();
    [
        threads.into_iter().map(|m| m as Arc<dyn Mesh>).collect(),
        links(n).into_iter().map(|m| m as Arc<dyn Mesh>).collect(),
    ]
}

fn memfd(text: &str) -> std::fs::File {
    let mut f = std::fs::File::from(memfd_create("t", MemfdFlags::CLOEXEC).unwrap());
    f.write_all(text.as_bytes()).unwrap();
    f
}

fn text_of(fd: OwnedFd) -> String {
    let f = std::fs::File::from(fd);
    // All duplicates share one file position: reading must not move it.
    let mut text = vec![0; f.metadata().unwrap().len() as usize];
    f.read_exact_at(&mut text, 0).unwrap();
    String::from_utf8(text).unwrap()
}

fn soon() -> Deadline {
    Deadline::after_s(20.0)
}

#[test]
fn everybody_gets_everything_in_member_order() {
    for world in kinds(4) {
        std::thread::scope(|t| {
            for mesh in &world {
                t.spawn(move || {
                    let me = mesh.rank().get();
                    let file = memfd(&format!("file of {me}"));
                    // Several fragments, and a team in which I have another rank than in the world.
                    let members: Vec<Rank> = Rank::all(4).rev().collect();
                    let payload = vec![me as u8; 300_000];
                    let got =
                        mesh.exchange("big", &members, &payload, &[file.as_fd()], soon()).unwrap();
                    for (m, p) in members.iter().zip(got) {
                        assert_eq!(p.payload, vec![m.get() as u8; 300_000]);
                        let fd = p.fds.into_iter().next().unwrap();
                        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
                        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
                        assert_eq!(text_of(fd), format!("file of {}", m.get()));
                    }
                });
            }
        });
    }
}

#[test]
fn teams_interleave_in_different_orders_and_early_parts_wait() {
    for world in kinds(3) {
        std::thread::scope(|t| {
            for mesh in &world {
                t.spawn(move || {
                    let all: Vec<Rank> = Rank::all(3).collect();
                    // Each rank runs its exchanges at once, in a different order of begin.
                    std::thread::scope(|inner| {
                        for k in 0..24u32 {
                            let tag = format!("x/{}", (k * 7 + mesh.rank().get() * 5) % 24);
                            let all = &all;
                            inner.spawn(move || {
                                let got = mesh.exchange(&tag, all, tag.as_bytes(), &[], soon());
                                assert!(got.unwrap().iter().all(|p| p.payload == tag.as_bytes()));
                            });
                        }
                    });
                    // A sub-team, while the third rank is already elsewhere.
                    if mesh.rank() != Rank::new(1) {
                        let pair = [Rank::new(2), Rank::new(0)];
                        let me = [mesh.rank().get() as u8];
                        let got = mesh.exchange("pair", &pair, &me, &[], soon()).unwrap();
                        assert_eq!((got[0].payload[0], got[1].payload[0]), (2, 0));
                    }
                    mesh.exchange("end", &all, b"", &[], soon()).unwrap();
                });
            }
        });
    }
}

#[test]
fn timeout_lists_the_missing_and_stray_parts_do_no_harm() {
    for world in kinds(4) {
        let all: Vec<Rank> = Rank::all(4).collect();
        std::thread::scope(|t| {
            let (a, b) = (&world[0], &world[2]);
            let run = |m: &Arc<dyn Mesh>| {
                m.exchange("t", &all, b"", &[], Deadline::after_s(0.3)).unwrap_err()
            };
            let other = t.spawn(move || run(b));
            let e = run(a);
            assert!(
                e.is_timeout() && e.to_string().contains("no message has arrived from r1, r3"),
                "{e}"
            );
            assert_eq!((e.get_peer(), e.get_rank()), (Some(Rank::new(1)), Some(Rank::new(0))));
            assert!(other.join().unwrap().is_timeout());
        });
    }
}

#[test]
fn death_is_told_at_once_and_leaving_is_not_death() {
    for mut world in kinds(3) {
        let (tx, rx) = mpsc::channel();
        world[0].on_exit(Box::new(move |r, how| tx.send((r, how)).unwrap()));
        let (dead, left) = (world.remove(2), world.remove(1));
        left.leave_because("exhausted: no memory");
        left.leave();
        assert_eq!(
            left.exchange("z", &[left.rank()], b"", &[], soon()).unwrap_err().kind(),
            ErrorKind::Stale
        );
        drop(left);
        assert_eq!(
            rx.recv_timeout(Duration::from_secs(5)).unwrap(),
            (Rank::new(1), PeerExit::Left)
        );
        assert_eq!(world[0].farewell(Rank::new(1)).as_deref(), Some("exhausted: no memory"));
        let start = Instant::now();
        let all: Vec<Rank> = [0, 2].map(Rank::new).to_vec();
        std::thread::scope(|t| {
            let waiting = t.spawn(|| world[0].exchange("t", &all, b"", &[], soon()).unwrap_err());
            std::thread::sleep(Duration::from_millis(50));
            drop(dead);
            let e = waiting.join().unwrap();
            assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(2)), "{e}");
            let all = [0, 1].map(Rank::new);
            let e = world[0].exchange("u", &all, b"", &[], soon()).unwrap_err();
            assert!(e.message().ends_with("r1 has left (exhausted: no memory)"), "{e}");
        });
        assert_eq!(world[0].farewell(Rank::new(2)), None);
        assert!(start.elapsed() < Duration::from_secs(2));
        assert_eq!(
            rx.recv_timeout(Duration::from_secs(5)).unwrap(),
            (Rank::new(2), PeerExit::Died)
        );
        assert!(world[0].exchange("u", &all, b"", &[], soon()).unwrap_err().is_peer_dead());
        assert_eq!(world[0].gone(), 0b110);
        let (tx, late) = mpsc::channel();
        world[0].on_exit(Box::new(move |r, _| tx.send(r.get()).unwrap()));
        let mut seen = [(); 2].map(|()| late.recv_timeout(Duration::from_secs(5)).unwrap());
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
        assert!(rx.recv_timeout(Duration::from_millis(20)).is_err(), "reported twice");
    }
}

/// A peer that has said goodbye does not die by what it then does with its end of the connection.
#[test]
fn who_has_left_takes_no_living_peer_for_dead() {
    for world in kinds(2) {
        let (tx, rx) = mpsc::channel();
        world[0].on_exit(Box::new(move |r, how| tx.send((r, how)).unwrap()));
        world[0].leave();
        while world[1].gone() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(rx.recv_timeout(Duration::from_millis(200)).is_err(), "rank 1 is there");
        assert_eq!(world[0].gone(), 0);
        world[1].leave();
    }
}

/// Rank 1 comes behind the death, and does not begin: rank 0, which has the dead rank's part, must
/// not wait for it.
#[test]
fn a_death_between_two_that_meet_is_told_to_both_at_once() {
    for mut world in kinds(3) {
        let all = [0, 1, 2].map(Rank::new);
        let (dead, late) = (world.remove(2), world.remove(1));
        let now = Deadline::after_s(0.0);
        assert!(dead.exchange("t", &all, b"", &[], now).unwrap_err().is_timeout());
        let start = Instant::now();
        std::thread::scope(|t| {
            let early = t.spawn(|| world[0].exchange("t", &all, b"", &[], soon()).unwrap_err());
            std::thread::sleep(Duration::from_millis(50));
            drop(dead);
            while late.gone() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            for e in
                [late.exchange("t", &all, b"", &[], soon()).unwrap_err(), early.join().unwrap()]
            {
                assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(2)), "{e}");
            }
        });
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}

#[test]
fn what_was_given_before_leaving_still_counts() {
    for world in kinds(2) {
        let all = [Rank::new(0), Rank::new(1)];
        std::thread::scope(|t| {
            t.spawn(|| {
                // Gives its part, does not wait for the other's, leaves.
                let now = Deadline::after_s(0.0);
                assert!(world[1].exchange("t", &all, b"bye", &[], now).unwrap_err().is_timeout());
                world[1].leave();
            });
        });
        std::thread::sleep(Duration::from_millis(50));
        let got = world[0].exchange("t", &all, b"", &[], soon()).unwrap();
        assert_eq!(got[1].payload, b"bye");
    }
}

#[test]
fn a_goodbye_behind_unread_data_is_still_a_goodbye() {
    let mut world = links(3);
    // Rank 1 reads nothing any more, and rank 0 is busy with the death of rank 2 for a while.
    world[1].shared.stop.store(true, Ordering::Release);
    world[1].shared.bell.ring();
    let (tx, rx) = mpsc::channel();
    world[0].on_exit(Box::new(move |r, how| {
        tx.send((r, how)).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }));
    drop(world.remove(2));
    assert_eq!(rx.recv_timeout(Duration::from_secs(5)).unwrap().0, Rank::new(2));
    let all = [Rank::new(0), Rank::new(1)];
    let now = Deadline::after_s(0.0);
    assert!(world[0].exchange("t", &all, b"unread", &[], now).unwrap_err().is_timeout());
    let quiet = world.remove(1);
    quiet.leave();
    drop(quiet);
    assert_eq!(rx.recv_timeout(Duration::from_secs(5)).unwrap(), (all[1], PeerExit::Left));
}

/// A rank that is stopped leaves its socket full; what another one sends meanwhile must be seen
/// all the same.
#[test]
fn a_peer_that_does_not_read_keeps_nobody_from_stopping() {
    let world = links(3);
    world[1].shared.stop.store(true, Ordering::Release);
    world[1].shared.bell.ring();
    let (start, all) = (Instant::now(), [0, 1, 2].map(Rank::new));
    let over = || match start.elapsed() > Duration::from_millis(100) {
        true => Err(Error::new(ErrorKind::Aborted, "rank 2 aborted the team")),
        false => Ok(()),
    };
    let big = vec![0; crate::mesh::MAX_PAYLOAD];
    let e = world[0].exchange_unless(&over, "t", &all, &big, &[], soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn bad_arguments_are_refused() {
    for world in kinds(2) {
        let m = &world[0];
        let (a, b) = (Rank::new(0), Rank::new(1));
        let fd = memfd("x");
        let fds = vec![fd.as_fd(); 254];
        let big = vec![0; crate::mesh::MAX_PAYLOAD + 1];
        let long = "x".repeat(257);
        for (tag, members, payload, n) in [
            ("", &[a][..], &b""[..], 0),
            (&long, &[a], b"", 0),
            ("t", &[], b"", 0),
            ("t", &[b], b"", 0),
            ("t", &[a, a], b"", 0),
            ("t", &[a, Rank::new(2)], b"", 0),
            ("t", &[a], &big, 0),
            ("t", &[a], b"", 254),
        ] {
            let e = m.exchange(tag, members, payload, &fds[..n], soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        }
        let got = m.exchange("solo", &[a], b"me", &[fd.as_fd()], soon()).unwrap();
        assert_eq!((got.len(), &got[0].payload[..], got[0].fds.len()), (1, &b"me"[..], 1));
    }
}

#[test]
fn the_most_descriptors_at_once() {
    for world in kinds(2) {
        let all = [Rank::new(0), Rank::new(1)];
        std::thread::scope(|t| {
            for m in &world {
                t.spawn(|| {
                    let f = memfd("x");
                    let fds = vec![f.as_fd(); crate::mesh::MAX_FDS];
                    let got = m.exchange("t", &all, b"", &fds, soon()).unwrap();
                    assert!(got.iter().all(|p| p.fds.len() == 253));
                });
            }
        });
    }
}

/// In a process of its own, as the limit is one of the process. Whoever may raise limits has none
/// here.
#[test]
fn descriptors_of_others_under_way_are_waited_for() {
    const NAME: &str = "links::tests::descriptors_of_others_under_way_are_waited_for";
    const LIMIT: usize = 64;
    if std::env::var_os("FEW_UNDER_WAY").is_none() {
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", &format!("ulimit -n {LIMIT}; exec \"$0\" --exact \"$1\"")]);
        sh.arg(std::env::current_exe().unwrap()).arg(NAME).env("FEW_UNDER_WAY", "1");
        let out = sh.output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let (flags, fd) = (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, memfd("x"));
    let (from, to) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    sock::send(&from, b"x", &vec![fd.as_fd(); LIMIT + 1]).unwrap();
    let (world, all) = (links(2), [0, 1].map(Rank::new));
    let give = |m: &LinkMesh| m.exchange("t", &all, b"", &[fd.as_fd()], soon()).map(drop);
    std::thread::scope(|t| {
        let two = world.iter().map(|m| t.spawn(|| give(m))).collect::<Vec<_>>();
        std::thread::sleep(Duration::from_millis(100));
        drop((from, to));
        two.into_iter().for_each(|m| m.join().unwrap().unwrap());
    });
}

#[test]
fn a_peer_that_sends_garbage_after_the_hello_is_cut_off() {
    let world = links(2);
    let fd = world[1].shared.links[0].as_ref().unwrap();
    sock::send(&fd.sock, b"not a frame", &[]).unwrap();
    let all = [Rank::new(0), Rank::new(1)];
    let e = world[0].exchange("t", &all, b"", &[], soon()).unwrap_err();
    assert!(e.is_peer_dead() && e.to_string().contains("magic number"), "{e}");
}

/// The end of the socket tells of it, as on kernels and in namespaces that give no descriptor.
#[test]
fn a_death_is_seen_without_a_descriptor_of_the_process() {
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    let family = rustix::net::AddressFamily::UNIX;
    let (mine, theirs) =
        rustix::net::socketpair(family, SocketType::SEQPACKET, flags, None).unwrap();
    let links = vec![None, Some(Link { sock: mine, pidfd: None })];
    let me = Rank::new(0);
    let shared = Shared {
        me,
        inbox: Inbox::new(me, 2, Limits::default()),
        links,
        bell: Bell::new().unwrap(),
        stop: AtomicBool::new(false),
        left: AtomicBool::new(false),
    };
    std::thread::scope(|t| {
        t.spawn(|| monitor::run(&shared));
        let gone = |expected| {
            let start = Instant::now();
            while shared.inbox.exit_of(Rank::new(1)) != expected {
                assert!(start.elapsed() < Duration::from_secs(5), "the exit is not seen");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        std::thread::sleep(Duration::from_millis(20));
        gone(None);
        drop(theirs);
        gone(Some(PeerExit::Died));
        shared.stop.store(true, Ordering::Release);
        shared.bell.ring();
    });
}

#[test]
fn strangers_at_the_listener_do_not_stop_the_rendezvous() {
    let (store, secret) = (LocalStore::new(), Secret::random().unwrap());
    std::thread::scope(|t| {
        let (store, secret) = (&store, &secret);
        let connect = move |r| {
            LinkMesh::connect(store, "j", Rank::new(r), 2, secret, Deadline::after_s(20.0)).unwrap()
        };
        let high = t.spawn(move || connect(1));
        let card = store.get("link/j/1", soon()).unwrap();
        let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
        let addr = card["addr"].as_str().unwrap();
        let knock = || loop {
            if let Ok(Some(s)) = sock::connect(SocketType::SEQPACKET, addr) {
                break s;
            }
        };
        // A port scan, silence, garbage, a frame over the limit, and an honest hello for another.
        (0..100).for_each(|_| drop(knock()));
        let _silent: Vec<_> = (0..70).map(|_| knock()).collect();
        let _talkers: Vec<_> = (0..30)
            .map(|i| {
                let s = knock();
                let bytes = match i % 3 {
                    0 => vec![0xAB; 1 + i * 40],
                    1 => vec![0; frame::MAX_FRAME + 1000],
                    _ => frame::encode_small(Kind::Hello, Rank::new(0), &[9; 40]),
                };
                sock::send(&s, &bytes, &[]).unwrap();
                s
            })
            .collect();
        let low = connect(0);
        let high = high.join().unwrap();
        assert!(high.refused() >= 100, "{}", high.refused());
        low.leave();
        high.leave();
    });
}

#[test]
fn another_secret_is_refused_on_all_ranks_at_once() {
    let store = LocalStore::new();
    let start = Instant::now();
    std::thread::scope(|t| {
        for r in Rank::all(3) {
            let store = &store;
            t.spawn(move || {
                let secret = Secret::from_job(if r.get() == 1 { "other" } else { "same" });
                let e = LinkMesh::connect(store, "j", r, 3, &secret, soon()).err().unwrap();
                assert_eq!(e.kind(), ErrorKind::Protocol, "{r}: {e}");
            });
        }
    });
    assert!(start.elapsed() < Duration::from_secs(10));
}

fn count(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Runs alone in its process: other tests open descriptors and threads at the same time.
#[test]
#[ignore = "run by the test below"]
fn leak_child() {
    let cycle = || {
        let world = links(3);
        for m in &world {
            m.on_exit(Box::new(|_, _| {}));
        }
        world[0].leave();
        drop(world);
        let group = ThreadMesh::group(3).unwrap();
        group[0].on_exit(Box::new(|_, _| {}));
    };
    cycle();
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    (0..100).for_each(|_| cycle());
    // A thread that was joined may take a moment to leave the table.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((count("/proc/self/fd"), count("/proc/self/task")), before);
}

#[test]
fn no_leak_after_100_cycles() {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["links::tests::leak_child", "--exact", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// The late rank only accepts: without a word from the one that gave up it would wait for it.
#[test]
fn ranks_that_came_too_late_for_each_other_meet_at_a_later_try() {
    let (store, secret) = (LocalStore::new(), Secret::random().unwrap());
    let meet = |r: u32| {
        if r == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        for n in 1..20 {
            // Each is willing to wait as long as the other: the late one cannot catch up by that.
            let limit = Deadline::after_s(0.2);
            let job = format!("j.{n}");
            match LinkMesh::connect(&store, &job, Rank::new(r), 2, &secret, limit) {
                Ok(mesh) => return (n, mesh),
                Err(e) => {
                    assert!([ErrorKind::Timeout, ErrorKind::Aborted].contains(&e.kind()), "{e}")
                }
            }
        }
        panic!("they never met");
    };
    let (a, b) = std::thread::scope(|t| {
        let other = t.spawn(|| meet(1));
        (meet(0), other.join().unwrap())
    });
    assert!(a.0 == b.0 && (3..8).contains(&a.0), "{} {}", a.0, b.0);
}

/// A store that hangs is what is blamed, soon.
#[test]
fn a_store_that_hangs_is_not_taken_for_missing_ranks() {
    struct Hangs;
    impl Store for Hangs {
        fn set(&self, _: &str, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn get(&self, _: &str, deadline: Deadline) -> Result<Vec<u8>> {
            std::thread::sleep(deadline.remaining() + Duration::from_millis(600));
            Err(Error::new(ErrorKind::Timeout, "the store does not answer"))
        }
        fn add(&self, _: &str, _: i64) -> Result<i64> {
            Ok(0)
        }
    }
    let (secret, start) = (Secret::random().unwrap(), Instant::now());
    let limit = Deadline::after_s(0.1);
    let e = LinkMesh::connect(&Hangs, "j", Rank::new(0), 16, &secret, limit).err().unwrap();
    assert!(e.is_timeout() && e.message().contains("does not answer"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}
