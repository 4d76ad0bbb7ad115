//! The thread of a mesh that receives, and that sees peers go.

use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tilewire_core::{Error, Rank, Result};

use crate::frame::MAX_FRAME;
use crate::links::Shared;
use crate::mesh::PeerExit;
use crate::parcels::Messages;
use crate::rendezvous::Link;
use crate::sock;

/// Messages read from one peer before the others get their turn.
const TURN: usize = 64;

/// A peer that has not gone.
struct Peer<'a> {
    rank: Rank,
    link: &'a Link,
    messages: Messages,
}

/// The result of one turn of reading.
enum Turn {
    /// Nothing more to read now.
    Empty,
    /// There may be more.
    More,
    /// The peer has gone.
    Gone(PeerExit),
}

/// Runs until it is asked to stop. Sleeps in `poll` all the time that nothing happens.
pub(crate) fn run(shared: &Shared) {
    let mut peers: Vec<Peer<'_>> = Rank::all(shared.links.len())
        .zip(&shared.links)
        .filter_map(|(rank, l)| {
            Some(Peer { rank, link: l.as_ref()?, messages: Messages::new(rank) })
        })
        .collect();
    let mut buf = vec![0u8; MAX_FRAME];
    while !shared.stop.load(Ordering::Acquire) {
        let ready = match wait(shared, &peers) {
            Ok(ready) => ready,
            Err(e) => return give_up(shared, &peers, e),
        };
        let mut ready = ready.into_iter();
        peers.retain_mut(|p| match ready.next() {
            Some((sock, process)) if sock || process => p.turn(shared, &mut buf, process),
            _ => true,
        });
        shared.inbox.announce();
    }
}

/// Waits for something to happen: per peer, whether its socket and its process are ready.
fn wait(shared: &Shared, peers: &[Peer<'_>]) -> Result<Vec<(bool, bool)>> {
    let mut fds = vec![PollFd::new(shared.bell.fd(), PollFlags::IN)];
    for p in peers {
        fds.push(PollFd::new(&p.link.sock, PollFlags::IN));
        fds.extend(p.link.pidfd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
    }
    sock::wait_any(&mut fds, None)?;
    if !fds[0].revents().is_empty() {
        shared.bell.hush();
    }
    let mut next = fds[1..].iter().map(|f| !f.revents().is_empty());
    let mut ready = || next.next().unwrap_or(false);
    Ok(peers.iter().map(|p| (ready(), p.link.pidfd.is_some() && ready())).collect())
}

/// Without a working `poll` no death would be seen any more: better to call everybody dead.
fn give_up(shared: &Shared, peers: &[Peer<'_>], e: Error) {
    for p in peers {
        shared.inbox.fail(p.rank, e.clone());
    }
    shared.inbox.announce();
}

impl Peer<'_> {
    /// Reads what has arrived. False if the peer has gone.
    fn turn(&mut self, shared: &Shared, buf: &mut [u8], process_ended: bool) -> bool {
        let gone = loop {
            match self.read(shared, buf) {
                // What a process sent before it ended is still worth reading, to the last frame.
                Ok(Turn::More) if process_ended => {}
                Ok(Turn::Empty) if process_ended => break PeerExit::Died,
                Ok(Turn::Empty | Turn::More) => return true,
                Ok(Turn::Gone(how)) => break how,
                Err(e) => {
                    shared.inbox.fail(self.rank, e.rank(shared.me).peer(self.rank));
                    break PeerExit::Died;
                }
            }
        };
        // Behind my own goodbye a closed connection says nothing: a peer that has read it closes
        // its end.
        if gone == PeerExit::Died && shared.left.load(Ordering::Acquire) {
            return false;
        }
        shared.inbox.exit(self.rank, gone);
        // Wakes a thread that waits for space in this socket, also if a child of the peer holds it
        // open.
        rustix::net::shutdown(&self.link.sock, rustix::net::Shutdown::Both).ok();
        false
    }

    fn read(&mut self, shared: &Shared, buf: &mut [u8]) -> Result<Turn> {
        for _ in 0..TURN {
            match sock::recv(&self.link.sock, buf) {
                // Something that we sent was never read. What the peer sent comes after this.
                Err(Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Ok(Turn::Empty),
                Err(e) => return Err(Error::io("receiving", e)),
                Ok(got) if got.len == 0 => return Ok(Turn::Gone(PeerExit::Died)),
                Ok(got) => {
                    let bytes = &buf[..got.len];
                    if self.messages.take(&shared.inbox, bytes, got)? {
                        return Ok(Turn::Gone(PeerExit::Left));
                    }
                }
            }
        }
        Ok(Turn::More)
    }
}
