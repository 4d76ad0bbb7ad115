use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType};
use tilewire_core::{Deadline, ErrorKind};
use tilewire_testing::{Lack, did_not_run};

use super::*;
use crate::secret::{Secret, hex, random_bytes};
use crate::sock;
use crate::store::Store;

fn soon() -> Deadline {
    Deadline::after_s(10.0)
}

fn loopback() -> StoreAddr {
    StoreAddr::Tcp("127.0.0.1".to_owned(), 0)
}

fn fresh_name() -> StoreAddr {
    StoreAddr::Abstract(format!("tilewire-test-{}", hex(&random_bytes().unwrap()[..8])))
}

fn port(s: &StoreServer) -> u16 {
    let StoreAddr::Tcp(_, port) = s.addr() else { panic!("not TCP") };
    *port
}

#[test]
fn set_get_add_over_both_transports() {
    let secret = Secret::random().unwrap();
    for addr in [loopback(), fresh_name()] {
        let server = StoreServer::bind(&addr, &secret).unwrap();
        let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        let d = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        c.set("a", b"1").unwrap();
        assert_eq!(d.get("a", soon()).unwrap(), b"1");
        assert_eq!((c.add("n", 5).unwrap(), d.add("n", -7).unwrap()), (5, -2));
        assert_eq!(c.get("n", soon()).unwrap(), b"-2");
        c.set("t", b"text").unwrap();
        assert_eq!(c.add("t", 1).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let big = vec![7u8; 1 << 19];
        c.set("big", &big).unwrap();
        assert_eq!(d.get("big", soon()).unwrap(), big);
        let e = c.set("big", &vec![0; (1 << 20) + 1]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        std::thread::scope(|t| {
            // One client, two threads: the waiting one does not block the other.
            let waiting = t.spawn(|| c.get("late", soon()).unwrap());
            std::thread::sleep(Duration::from_millis(30));
            c.set("late", b"here").unwrap();
            assert_eq!(waiting.join().unwrap(), b"here");
        });
        let e = c.get("never", Deadline::after_s(0.05)).unwrap_err();
        assert!(e.is_timeout() && e.to_string().contains("`never`"), "{e}");
        assert_eq!(c.get("a", Deadline::after_s(0.0)).unwrap(), b"1");
        assert_eq!(server.refused(), 0);
    }
}

#[test]
fn wrong_secret_is_refused_at_once_and_service_continues() {
    let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let start = Instant::now();
    let e = StoreClient::connect(server.addr(), &other, soon()).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    assert!(start.elapsed() < Duration::from_secs(2));
    let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
    c.set("k", b"v").unwrap();
    assert_eq!(server.refused(), 1);
}

#[test]
fn a_wrong_proof_opens_nothing() {
    let secret = Secret::random().unwrap();
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let mut s = TcpStream::connect(("127.0.0.1", port(&server))).unwrap();
    s.write_all(&wire::frame(&wire::greeting(&[1; 32], None))).unwrap();
    let mut challenge = [0; 4 + 4 + 2 + 32 + 32];
    s.read_exact(&mut challenge).unwrap();
    let add = wire::Request::Add { key: "n".into(), n: 1 }.encode();
    s.write_all(&[wire::frame(&[0; 32]), wire::frame(&add)].concat()).unwrap();
    assert!(!matches!(s.read(&mut [0; 64]), Ok(n) if n > 0));
    let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
    assert_eq!(c.add("n", 1).unwrap(), 1);
    assert_eq!(server.refused(), 1);
}

#[test]
fn port_scan_garbage_and_silence_do_not_stop_service() {
    let secret = Secret::random().unwrap();
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let knock = || TcpStream::connect(("127.0.0.1", port(&server))).unwrap();
    (0..50).for_each(|_| drop(knock()));
    let mut talkers: Vec<_> = (0..40).map(|_| knock()).collect();
    for (i, t) in talkers.iter_mut().enumerate() {
        let bytes = match i % 3 {
            0 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            1 => vec![0xFF; 5000],
            _ => wire::frame(&wire::Request::Add { key: "n".into(), n: 1 }.encode()),
        };
        t.write_all(&bytes).ok();
    }
    let silent: Vec<_> = (0..64).map(|_| knock()).collect();
    let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
    assert_eq!(c.add("n", 1).unwrap(), 1, "an unauthenticated request must do nothing");
    assert!(server.refused() >= 90, "{}", server.refused());
    // All of them are closed from the other side in the end.
    for mut s in talkers.into_iter().chain(silent) {
        s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let closed = match s.read(&mut [0; 64]) {
            Ok(0) => true,
            Ok(_) => false,
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        };
        assert!(closed);
    }
}

#[test]
fn unreachable_names_the_address_and_the_time() {
    let gone = StoreServer::bind(&loopback(), &Secret::from_job("j")).unwrap().addr().clone();
    for addr in [gone, fresh_name()] {
        let e = StoreClient::connect(&addr, &Secret::from_job("j"), Deadline::after_s(0.3));
        let e = e.err().unwrap();
        assert!(e.is_timeout(), "{e}");
        let text = e.to_string();
        assert!(text.contains(&addr.to_string()), "{text}");
        // A loaded machine wakes the client late.
        let tried = text.split("tried for ").nth(1).and_then(|t| t.split(' ').next()).unwrap();
        let tried: f64 = tried.parse().unwrap();
        assert!((0.3..5.0).contains(&tried), "{text}");
    }
}

#[test]
fn a_client_may_come_before_the_server() {
    let (addr, secret) = (fresh_name(), Secret::from_job("j"));
    std::thread::scope(|t| {
        let early =
            t.spawn(|| StoreClient::connect(&addr, &secret, soon()).map(|c| c.set("k", b"")));
        std::thread::sleep(Duration::from_millis(100));
        let _server = StoreServer::bind(&addr, &secret).unwrap();
        early.join().unwrap().unwrap().unwrap();
    });
}

#[test]
fn an_open_address_needs_a_configured_secret() {
    let open = StoreAddr::Tcp("0.0.0.0".to_owned(), 0);
    let e = StoreServer::bind(&open, &Secret::from_job("j")).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Permission);
    assert!(e.get_hint().unwrap().contains("TILEWIRE_SECRET"));
    assert!(StoreServer::bind(&open, &Secret::random().unwrap()).is_ok());
}

#[test]
fn an_address_in_use_is_told() {
    let s = Secret::from_job("j");
    for addr in [loopback(), fresh_name()] {
        let first = StoreServer::bind(&addr, &s).unwrap();
        assert_eq!(
            StoreServer::bind(first.addr(), &s).err().unwrap().kind(),
            ErrorKind::Unavailable
        );
        assert!(StoreServer::try_bind(first.addr(), &s).unwrap().is_none());
    }
}

#[test]
fn something_else_at_the_address_is_told() {
    let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = StoreAddr::Tcp("127.0.0.1".to_owned(), l.local_addr().unwrap().port());
    let t = std::thread::spawn(move || {
        let (mut s, _) = l.accept().unwrap();
        s.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Until the client has gone.
        while s.read(&mut [0; 100]).is_ok_and(|n| n > 0) {}
    });
    let e = StoreClient::connect(&addr, &Secret::from_job("j"), soon()).err().unwrap();
    assert!(e.to_string().contains("is not a tilewire store"), "{e}");
    t.join().unwrap();
}

#[test]
fn dropping_the_server_ends_waits_of_clients() {
    let secret = Secret::from_job("j");
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
    std::thread::scope(|t| {
        let waiting = t.spawn(|| c.get("never", Deadline::after_s(30.0)).unwrap_err());
        std::thread::sleep(Duration::from_millis(50));
        drop(server);
        assert_eq!(waiting.join().unwrap().kind(), ErrorKind::Io);
    });
}

/// In the environment of the part of a test that runs as another user: the address of the store,
/// and behind a space the secret of a rank.
const FLOOD: &str = "BOOT_TEST_FLOOD";

/// Opens connections and says nothing, until its input ends.
fn flood(addr: &str) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = |family| rustix::net::socket_with(family, SocketType::STREAM, flags, None);
    let open = || {
        // The port of a TCP store, or the name of a Unix socket.
        if let Ok(port) = addr.parse::<u16>() {
            let s = socket(rustix::net::AddressFamily::INET).unwrap();
            let to = std::net::SocketAddr::from(([127, 0, 0, 1], port));
            return (rustix::net::connect(&s, &to), s);
        }
        let s = socket(rustix::net::AddressFamily::UNIX).unwrap();
        (rustix::net::connect(&s, &sock::unix_addr(addr).unwrap()), s)
    };
    let kept: Vec<_> = (0..600).map(|_| open()).collect();
    // Whether they are under way or refused is the store's affair.
    assert!(kept.iter().any(|(r, _)| matches!(r, Ok(()) | Err(Errno::INPROGRESS))));
    let text = format!("\n>flooded by {}\n", rustix::process::geteuid().as_raw());
    std::io::stdout().write_all(text.as_bytes()).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// This program as another user, in the part of a test that `what` says. By that path it may be
/// started wherever it lies.
fn as_user(uid: u32, what: &str) -> Command {
    let mut c = Command::new("/proc/self/exe");
    c.args(["tcp_store::tests::a_flood_of_another_user_hardly_delays", "--exact", "--nocapture"])
        .env(FLOOD, what)
        .uid(uid)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    c
}

#[test]
fn a_flood_of_another_user_hardly_delays() {
    if let Ok(what) = std::env::var(FLOOD) {
        let Some((port, secret)) = what.split_once(' ') else { return flood(&what) };
        let addr = StoreAddr::Tcp("127.0.0.1".to_owned(), port.parse().unwrap());
        let c = StoreClient::connect(&addr, &Secret::from_hex(secret).unwrap(), soon()).unwrap();
        assert!(c.add("n", 1).unwrap() > 1);
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return did_not_run(Lack::Root, "this user cannot start a process of another one");
    }
    let secret = Secret::random().unwrap();
    for addr in [loopback(), fresh_name()] {
        let server = StoreServer::bind(&addr, &secret).unwrap();
        let to = match server.addr() {
            StoreAddr::Tcp(_, port) => port.to_string(),
            StoreAddr::Abstract(name) => format!("@{name}"),
        };
        let mut child = as_user(12345, &to).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.unwrap() == ">flooded by 12345"), "the flood did not begin");
        let start = Instant::now();
        let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        assert_eq!(c.add("n", 1).unwrap(), 1);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{addr}: {took:?}");
        let tcp = addr == loopback();
        let why = server.reasons().unwrap();
        let want = if tcp { "beyond the limit of a user" } else { "of another user" };
        assert!(why.contains(want), "{why}");
        // A rank of a third user, and one of the user whose flood goes on.
        for uid in [12346, 12345].into_iter().filter(|_| tcp) {
            let start = Instant::now();
            let rank = as_user(uid, &format!("{to} {}", secret.reveal())).output().unwrap();
            assert!(rank.status.success(), "{uid}: {}", String::from_utf8_lossy(&rank.stdout));
            assert!(start.elapsed() < Duration::from_secs(1), "{uid}: {:?}", start.elapsed());
        }
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}

/// One user has a small part of the connections in their hello, and all others half of them.
#[test]
fn each_other_user_has_a_limit_and_so_have_all() {
    if !rustix::process::geteuid().is_root() {
        return did_not_run(Lack::Root, "this user cannot start a process of another one");
    }
    let secret = Secret::random().unwrap();
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let mut children = Vec::new();
    for k in 1..=5 {
        let mut child = as_user(20000 + k, &port(&server).to_string()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.unwrap().starts_with(">flooded by")), "{k}");
        children.push((child, lines));
        // Served behind all that the flood has opened.
        StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        let open = 600 * u64::from(k) - server.refused();
        assert!((1..=MOST_OPEN[k as usize - 1]).contains(&open), "{k} users have {open}");
    }
    for (mut c, _) in children {
        drop(c.stdin.take());
        c.wait().unwrap();
    }
}

/// Connections that one to five users may have open together.
const MOST_OPEN: [u64; 5] = [16, 32, 48, 64, 64];

#[test]
fn the_server_knows_why_it_refused() {
    let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    assert_eq!(server.reasons(), None);
    StoreClient::connect(server.addr(), &other, soon()).err().unwrap();
    let mut garbage = TcpStream::connect(("127.0.0.1", port(&server))).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Until it is closed, by whichever way.
    garbage.read_to_end(&mut Vec::new()).ok();
    let soon = Instant::now() + Duration::from_secs(5);
    while server.refused() < 2 && Instant::now() < soon {
        std::thread::sleep(Duration::from_millis(5));
    }
    let why = server.reasons().unwrap();
    let want = "2 connections were refused: 1 with another secret, 1 with a bad hello";
    assert_eq!(why, want);
}

/// In the environment of a test that runs with another resolver.
const UNKNOWN: &str = "BOOT_TEST_UNKNOWN";

#[test]
fn a_host_that_is_not_known_is_no_reason_to_wait() {
    if std::env::var_os(UNKNOWN).is_none() {
        // A name service that loses packets answers here in a second, in place of five.
        let status = Command::new("/proc/self/exe")
            .args(["tcp_store::tests::a_host_that_is_not_known_is_no_reason_to_wait", "--exact"])
            .env(UNKNOWN, "")
            .env("RES_OPTIONS", "timeout:1 attempts:1")
            .stdout(Stdio::null())
            .status();
        return assert!(status.unwrap().success());
    }
    let addr = StoreAddr::Tcp("no-such-host.invalid".to_owned(), 7000);
    let limit = Deadline::after_s(60.0);
    let e = StoreClient::connect(&addr, &Secret::from_job("j"), limit).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(e.message().contains("the host `no-such-host.invalid` was not found"), "{e}");
    assert!(limit.elapsed() < Duration::from_secs(2), "{:?}", limit.elapsed());
    let e = StoreServer::bind(&addr, &Secret::random().unwrap()).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
}

const CLAIM: &str = "BOOT_TEST_CLAIM";

/// Comes to a store as rank 1 of 2, with another secret.
fn claim(port: u16) {
    let addr = StoreAddr::Tcp("127.0.0.1".to_owned(), port);
    let who = Some(Who::new(1, 2, "job"));
    let other = Secret::random().unwrap();
    let e = StoreClient::connect_as(who, &addr, &other, soon()).err().unwrap();
    assert!(e.message().contains("does not know our secret"), "{e}");
}

/// The word of another user's process does not count, whatever it says.
#[test]
fn another_user_with_another_secret_ends_no_meeting() {
    if let Ok(port) = std::env::var(CLAIM) {
        return claim(port.parse().unwrap());
    }
    if !rustix::process::geteuid().is_root() {
        return did_not_run(Lack::Root, "this user cannot start a process of another one");
    }
    let secret = Secret::random().unwrap();
    let server = std::sync::Arc::new(StoreServer::bind(&loopback(), &secret).unwrap());
    let watched = |begin| {
        let client = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        Watched::new(Box::new(client), server.clone(), Who::new(0, 2, "job"), begin)
    };
    let begun = watched(Instant::now());
    let status = Command::new("/proc/self/exe")
        .args(["tcp_store::tests::another_user_with_another_secret_ends_no_meeting", "--exact"])
        .env(CLAIM, port(&server).to_string())
        .uid(12345)
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let e = begun.get("k", Deadline::after_s(2.5)).unwrap_err();
    assert!(e.is_timeout(), "{e}");
    assert_eq!(server.reasons().unwrap(), "1 connection was refused: 1 with another secret");
    // It came before we were through with our own connection.
    let begin = Instant::now();
    claim(port(&server));
    let begun = watched(begin);
    let e = begun.get("k", Deadline::after_s(10.0)).unwrap_err();
    assert!(e.kind() == ErrorKind::Protocol && e.message().starts_with("r1 has another"), "{e}");
}

/// A last word for the store of a rank 0 that has ended takes no time.
#[test]
fn a_server_that_has_ended_is_not_waited_for() {
    let secret = Secret::from_job("j");
    for addr in [loopback(), fresh_name()] {
        let server = StoreServer::bind(&addr, &secret).unwrap();
        let c = StoreClient::connect(server.addr(), &secret, soon()).unwrap();
        c.set("k", b"v").unwrap();
        drop(server);
        let start = Instant::now();
        for _ in 0..3 {
            c.set("k", b"v").unwrap_err();
        }
        assert!(start.elapsed() < Duration::from_secs(3), "{addr}: {:?}", start.elapsed());
    }
}

/// A stopped server: `set` and `add` end with the meeting, not after half a minute.
#[test]
fn requests_of_a_meeting_end_with_it() {
    // It takes the connection of the client, and no more.
    let secret = Secret::from_job("j");
    let server = StoreServer::bind(&loopback(), &secret).unwrap();
    let end = Deadline::after_s(0.5);
    let c = StoreClient::connect(server.addr(), &secret, end).unwrap().ending(end);
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to_mute = mute.local_addr().unwrap();
    let stream = TcpStream::connect(to_mute).unwrap();
    stream.set_nonblocking(true).unwrap();
    c.put_idle(crate::stream::Stream(stream.into()));
    let e = c.set("k", b"v").unwrap_err();
    assert!(e.is_timeout() && end.elapsed() < Duration::from_secs(4), "{e}");
}
