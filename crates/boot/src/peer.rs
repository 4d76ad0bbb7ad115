//! The process and the user at the other end of a Unix socket, as the kernel knows them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use tilewire_core::{Error, ErrorKind, Result};

/// `SO_PEERPIDFD`, of Linux 6.5 and later: `asm-generic/socket.h`. Not every libc names it.
const SO_PEERPIDFD: i32 = 77;

/// The map of a user namespace that knows every user of the machine.
const WHOLE_MAP: [&str; 3] = ["0", "0", "4294967295"];

/// Process and user of a peer, in the numbers of our namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credentials {
    /// 0 if our PID namespace does not show the process.
    pub pid: i32,
    /// The overflow user if our user namespace does not map the user.
    pub uid: u32,
}

/// Reads `SO_PEERCRED` into plain integers.
///
/// `rustix::net::sockopt::socket_peercred` (1.1.6) reads it into a `UCred`, whose `Pid` is nonzero.
/// The kernel gives 0 for a peer in a PID namespace that we do not see, so that function then makes
/// a value that its type does not have: undefined behaviour without unsafe code of ours. The test
/// `a_peer_in_an_invisible_namespace_has_no_number` meets such a peer.
pub(crate) fn credentials(sock: &OwnedFd) -> Result<Credentials> {
    let none = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let c =
        option(sock, libc::SO_PEERCRED, none).map_err(|e| Error::io("reading SO_PEERCRED", e))?;
    Ok(Credentials { pid: c.pid, uid: c.uid })
}

/// Values of socket options: integers, for which every pattern of bits is a value.
trait Integers: Copy {}
impl Integers for libc::ucred {}
impl Integers for i32 {}

/// Reads a socket option over `value`.
#[allow(unsafe_code)]
fn option<T: Integers>(sock: &OwnedFd, name: i32, mut value: T) -> rustix::io::Result<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `sock` is open during the call. The kernel writes at most `len` bytes, the size of
    // `value`, which consists of integers only and is borrowed by nobody else.
    let rc = unsafe {
        libc::getsockopt(
            sock.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    match (rc, len as usize == size_of::<T>()) {
        (0, true) => Ok(value),
        (0, false) => Err(Errno::INVAL),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Checks that the other end runs as our user: the kernel's word, equal numbers, nothing else.
///
/// # Errors
/// `Permission` for another user, and for one that our user namespace does not map.
pub(crate) fn check_user(sock: &OwnedFd) -> Result<()> {
    let ours = rustix::process::geteuid().as_raw();
    let theirs = credentials(sock)?.uid;
    judge(ours, theirs, overflow_user())
}

/// True for our user, by the numbers of our user namespace.
pub(crate) fn is_our_user(theirs: u32) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    // Most others are known without a look at the map of users.
    ours == theirs && judge(ours, theirs, overflow_user()).is_ok()
}

/// `overflow` is the user that stands for all users that our user namespace does not map.
fn judge(ours: u32, theirs: u32, overflow: Option<u32>) -> Result<()> {
    let refuse = |text: String| Error::new(ErrorKind::Permission, text);
    if overflow == Some(theirs) {
        let text = format!(
            "the user at the other end of a connection is not mapped into our user namespace \
             (it shows as {theirs}, like every such user)"
        );
        return Err(refuse(text).hint(
            "map the user: `unshare --map-root-user`, `podman run --userns=keep-id`; or run all \
             ranks in one user namespace",
        ));
    }
    if ours != theirs {
        return Err(refuse(format!(
            "the other end of a connection runs as another user ({theirs}, we are {ours})"
        ))
        .hint("all ranks of a job run as one user"));
    }
    Ok(())
}

/// None where every user of the machine is mapped: the number then means one user.
fn overflow_user() -> Option<u32> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let map = read("/proc/self/uid_map");
    if map.split_whitespace().eq(WHOLE_MAP) {
        return None;
    }
    Some(read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(65534))
}

/// A descriptor of the peer's process. None where it cannot be had, or the process has just ended:
/// then its end is seen by that of the socket alone.
///
/// # Errors
/// `Exhausted` if no descriptor is free.
pub(crate) fn pidfd(sock: &OwnedFd) -> Result<Option<OwnedFd>> {
    match option(sock, SO_PEERPIDFD, -1) {
        Ok(fd) if fd >= 0 => return Ok(Some(own(fd))),
        Err(e @ (Errno::MFILE | Errno::NFILE)) => return Err(Error::io("SO_PEERPIDFD", e)),
        // An older kernel, a filter of system calls, or a process that has ended.
        Ok(_) | Err(_) => {}
    }
    pidfd_by_number(credentials(sock)?.pid)
}

/// As [`pidfd`], on kernels that give no descriptor for a socket.
fn pidfd_by_number(pid: i32) -> Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(e @ (Errno::MFILE | Errno::NFILE)) => Err(Error::io("pidfd_open", e)),
        Err(_) => Ok(None),
    }
}

#[allow(unsafe_code)]
fn own(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows its number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
#[path = "peer_tests.rs"]
mod tests;
