//! The user whose process holds the other end of a TCP connection from this host, as the kernel
//! has it. A connection from another host has no user here.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrAny, SocketFlags, SocketType, netlink,
};

/// `SOCK_DIAG_BY_FAMILY` of `linux/sock_diag.h`: type of the request and of its answer.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` of `linux/netlink.h`.
const REQUEST: u16 = 1;
const HEADER: usize = 16;
/// `struct inet_diag_req_v2`: the question.
const QUESTION: usize = 8 + ID;
/// `struct inet_diag_sockid`.
const ID: usize = 48;
/// Place of `idiag_uid` in an answer, and behind it of `idiag_inode`: `struct inet_diag_msg`.
const UID: usize = HEADER + 4 + ID + 12;

/// Asks the kernel for sockets by their addresses (`sock_diag(7)`): some microseconds a question,
/// however many sockets the system has. A table of them would take longer the more a flood opens.
#[derive(Default)]
pub(super) struct Users {
    kernel: Option<OwnedFd>,
    asked: u32,
}

impl Users {
    /// The user of a connection over loopback. None for others, for one that its process has
    /// closed, and where the system does not answer such questions.
    pub fn of(&mut self, sock: &OwnedFd) -> Option<u32> {
        let (theirs, ours) = ends(sock)?;
        if self.kernel.is_none() {
            let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
            let kind = (SocketType::DGRAM, Some(netlink::SOCK_DIAG));
            self.kernel = rustix::net::socket_with(family, kind.0, flags, kind.1).ok();
        }
        self.asked = self.asked.wrapping_add(1);
        let socket = self.kernel.as_ref()?;
        let text = question(theirs, ours, self.asked);
        rustix::net::send(socket, &text, SendFlags::empty()).ok()?;
        // The kernel has answered before `send` returns. What is left of an earlier question, which
        // a signal can have cut, comes first.
        let mut answer = [0u8; 1024];
        loop {
            match rustix::net::recv(socket, &mut answer[..], RecvFlags::DONTWAIT) {
                Ok((_, n)) if word(&answer, 8) == Some(self.asked) => {
                    return user_of(answer.get(..n)?);
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// As [`Users::of`], by the system's table of connections, where nothing else answers: the text
/// that it reads is as long as the system has sockets.
pub(super) fn in_system_table(sock: &OwnedFd) -> Option<u32> {
    let (theirs, ours) = ends(sock)?;
    let file = if theirs.is_ipv4() { "/proc/self/net/tcp" } else { "/proc/self/net/tcp6" };
    user_in(&std::fs::read_to_string(file).ok()?, theirs, ours)
}

/// The other end of a connection and ours, if both are of this host.
fn ends(sock: &OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    let of = |a: SocketAddrAny| {
        // An address of IPv4, also where the socket is one of IPv6.
        let a = SocketAddr::try_from(a).ok()?;
        let plain = SocketAddr::new(a.ip().to_canonical(), a.port());
        plain.ip().is_loopback().then_some(plain)
    };
    let theirs = of(rustix::net::getpeername(sock).ok()??)?;
    Some((theirs, of(rustix::net::getsockname(sock).ok()?)?))
}

/// A message that asks for the socket at `local` that is connected to `remote`.
fn question(local: SocketAddr, remote: SocketAddr, number: u32) -> Vec<u8> {
    let ip = |a: SocketAddr| match a.ip() {
        IpAddr::V4(ip) => [&ip.octets()[..], &[0; 12]].concat(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut m = ((HEADER + QUESTION) as u32).to_ne_bytes().to_vec();
    m.extend([BY_FAMILY, REQUEST].into_iter().flat_map(u16::to_ne_bytes));
    // The port 0 of a sender is the kernel's to fill in.
    m.extend([number, 0].into_iter().flat_map(u32::to_ne_bytes));
    // Family, protocol, no extensions, padding; then all states.
    m.extend([family.as_raw() as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    m.extend(u32::MAX.to_ne_bytes());
    m.extend([local, remote].into_iter().flat_map(|a| a.port().to_be_bytes()));
    m.extend([ip(local), ip(remote)].concat());
    // Any interface, and a cookie that says: any socket with these addresses.
    m.extend([0, u32::MAX, u32::MAX].into_iter().flat_map(u32::to_ne_bytes));
    m
}

/// The user in an answer. A socket without an inode belongs to no process any more: the kernel
/// then gives user 0, which means nothing.
fn user_of(answer: &[u8]) -> Option<u32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let (uid, inode) = (word(answer, UID)?, word(answer, UID + 4)?);
    (kind == BY_FAMILY && inode != 0).then_some(uid)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The user of the connection from `local` to `remote`, in the text of `/proc/net/tcp`.
fn user_in(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let (local, remote) = (in_table(local), in_table(remote));
    table.lines().find_map(|l| {
        let mut fields = l.split_whitespace().skip(1);
        let both = fields.next()? == local && fields.next()? == remote;
        both.then(|| fields.nth(4)?.parse().ok()).flatten()
    })
}

/// An address as the table has it: words of 32 bits as this machine reads them, and the port.
fn in_table(a: SocketAddr) -> String {
    let bytes = match a.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = bytes.as_chunks::<4>().0.iter().map(|w| format!("{:08X}", u32::from_ne_bytes(*w)));
    format!("{}:{:04X}", words.collect::<String>(), a.port())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_system_names_the_user_of_a_connection() {
        let mut users = Users::default();
        let us = rustix::process::geteuid().as_raw();
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let served = OwnedFd::from(listener.accept().unwrap().0);
            assert_eq!(in_system_table(&served), Some(us), "{host}");
            assert_eq!(users.of(&served), Some(us), "{host}: does the kernel have inet_diag?");
            drop(client);
            assert_eq!(users.of(&served), None, "{host}: nobody's");
        }
    }

    #[test]
    fn answers_of_the_kernel_are_read() {
        let mut answer = vec![0u8; UID + 8];
        answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        answer[UID..].copy_from_slice(&[12345u32.to_ne_bytes(), 77u32.to_ne_bytes()].concat());
        assert_eq!(user_of(&answer), Some(12345));
        assert_eq!(user_of(&answer[..UID + 7]), None, "cut");
        answer[UID + 4..].fill(0);
        assert_eq!(user_of(&answer), None, "no inode");
        answer[UID + 4..].fill(1);
        // NLMSG_ERROR
        answer[4..6].copy_from_slice(&2u16.to_ne_bytes());
        assert_eq!(user_of(&answer), None, "an error");
    }

    #[test]
    fn the_table_of_connections_is_read() {
        let line = "   3: 0100007F:D431 0100007F:1F90 01 00000000:00000000 00:00000000 00000000 \
                    12345        0 4711 1 0000000000000000 20 4 30 10 -1";
        let [a, b] = [54321, 8080].map(|p| SocketAddr::from(([127, 0, 0, 1], p)));
        assert_eq!(user_in(line, a, b), Some(12345));
        assert_eq!(user_in(line, b, a), None, "the other end");
        assert_eq!(user_in("  sl  local_address rem_address", a, b), None);
    }
}
