use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::SocketType;
use tilewire_core::Deadline;
use tilewire_testing::{Lack, did_not_run};

use super::*;
use crate::secret::{hex, random_bytes};
use crate::sock::{self, Accepted, Listener};

/// In the environment of the part of a test that runs in a namespace: the socket to connect to.
const SOCKET: &str = "BOOT_TEST_SOCKET";

/// The calling test again, in namespaces made by `unshare WORDS`.
fn again(test: &str, words: &[&str], name: &str) -> Option<std::process::Child> {
    let may = Command::new("unshare").args(words).arg("true").stderr(Stdio::null()).status();
    if !may.is_ok_and(|s| s.success()) {
        return None;
    }
    let mut cmd = Command::new("unshare");
    cmd.args(words).arg(std::env::current_exe().unwrap());
    cmd.args([&format!("peer::tests::{test}"), "--exact", "--nocapture"]);
    Some(cmd.env(SOCKET, name).stdout(Stdio::piped()).spawn().unwrap())
}

/// For the part of the test outside.
fn say(text: &str) {
    std::io::stdout().write_all(format!("\n>{text}\n").as_bytes()).unwrap();
}

fn listener() -> Listener {
    let name = format!("tilewire-test-{}", hex(&random_bytes().unwrap()[..8]));
    Listener::open_abstract(SocketType::STREAM, &name).unwrap()
}

fn connect(name: &str) -> OwnedFd {
    sock::connect(SocketType::STREAM, name).ok().flatten().unwrap()
}

/// `UCred` of rustix would be undefined behaviour here: see [`credentials`].
#[test]
fn a_peer_in_an_invisible_namespace_has_no_number() {
    if let Ok(name) = std::env::var(SOCKET) {
        let s = connect(&name);
        let (c, process) = (credentials(&s).unwrap(), pidfd(&s).unwrap());
        assert!(check_user(&s).is_ok());
        assert!(pidfd_by_number(c.pid).unwrap().is_none());
        // Linux 6.5 gives a descriptor all the same; it is that of a process that lives.
        if let Some(process) = process {
            let soon = Deadline::after(Duration::from_millis(10));
            assert!(!sock::wait_one(process.as_fd(), PollFlags::IN, soon).unwrap());
        }
        return say(&format!("{c:?}"));
    }
    let l = listener();
    let test = "a_peer_in_an_invisible_namespace_has_no_number";
    let Some(child) = again(test, &["--pid", "--fork"], &l.name) else {
        return did_not_run(Lack::Namespaces, "unshare --pid");
    };
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains(">Credentials { pid: 0, uid: "), "{text}");
}

#[test]
fn a_user_that_is_not_mapped_is_nobodys_equal() {
    if let Ok(name) = std::env::var(SOCKET) {
        let e = check_user(&connect(&name)).unwrap_err();
        assert_eq!(rustix::process::geteuid().as_raw(), 65534);
        return say(&format!("{:?} {} {}", e.kind(), e.message(), e.get_hint().unwrap()));
    }
    let l = listener();
    let test = "a_user_that_is_not_mapped_is_nobodys_equal";
    let Some(child) = again(test, &["--user"], &l.name) else {
        return did_not_run(Lack::Namespaces, "unshare --user");
    };
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains(">Permission the user at the other end"), "{text}");
    assert!(text.contains("--map-root-user"), "{text}");
    // From outside its user is ours, by the kernel's word.
    let Accepted::Connection(_) = l.accept().unwrap() else { panic!("the child was refused") };
}

#[test]
fn equal_users_alone_are_ours_and_the_overflow_user_never() {
    assert!(judge(1000, 1000, Some(65534)).is_ok());
    assert!(judge(0, 0, None).is_ok());
    // Where all users are mapped, `nobody` is a user like others.
    assert!(judge(65534, 65534, None).is_ok());
    for (ours, theirs, overflow) in
        [(1000, 0, None), (0, 1000, None), (65534, 65534, Some(65534)), (0, 65534, Some(65534))]
    {
        let e = judge(ours, theirs, overflow).unwrap_err();
        assert!(e.kind() == ErrorKind::Permission && e.get_hint().is_some(), "{e}");
    }
}

#[test]
fn the_end_of_a_process_is_seen_by_its_descriptor() {
    let l = listener();
    let s = connect(&l.name);
    let Accepted::Connection(other) = l.accept().unwrap() else { panic!("nobody came") };
    let c = credentials(&other).unwrap();
    assert_eq!(c.pid as u32, std::process::id());
    for fd in [pidfd(&s).unwrap(), pidfd_by_number(c.pid).unwrap()] {
        let fd = fd.expect("this process lives");
        let soon = Deadline::after(Duration::from_millis(10));
        assert!(!sock::wait_one(fd.as_fd(), PollFlags::IN, soon).unwrap());
    }
    assert!(pidfd_by_number(0).unwrap().is_none());
}
