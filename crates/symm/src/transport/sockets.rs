//! Peers without addresses in this process: puts and signals to them are messages over Unix
//! sockets.
//!
//! No product runs on it. It shows that host schedules need nothing but [`Transport`]: while a heap
//! is connected so, the pages of the peers' chunks cannot be touched at all, and a message takes
//! effect when the thread that receives it gets to it. Faults and the flight recorder stay in the
//! shared control pages.
//!
//! Each ordered pair of ranks has two connections: requests (puts, signals, arrivals, gets) and
//! replies (bytes that were got). They are apart so that a thread that receives requests never
//! waits for one that sends some.
//!
//! [`Transport`]: super::Transport

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use super::host::{Peers, store};
use crate::heap::Heap;
use crate::map::Mapping;
use crate::protocol;
use crate::team::{LiveTeam, TeamInner, lock};

const PUT: u64 = 1;
const GET: u64 = 2;
const SIGNAL: u64 = 3;
const GRANT: u64 = 4;
const ARRIVE: u64 = 5;
const STORE: u64 = 6;
const BYE: u64 = 7;

/// The longest that the end of a heap waits until a peer has received all messages: its thread may
/// get no processor for a while.
const LINGER: Duration = Duration::from_secs(5);

/// The kind of a message, then its arguments: see `serve`.
type Header = [u64; 4];

/// My ends of the connections to one peer.
struct Link {
    requests: Mutex<UnixStream>,
    replies: Mutex<UnixStream>,
}

/// The connections of one rank.
pub(crate) struct Sockets(Vec<Option<Link>>);

impl Drop for Sockets {
    fn drop(&mut self) {
        // All messages must arrive before this rank says goodbye: a peer that waits for a rank that
        // has left takes missing messages for lost. A peer that has ended answers with an end of
        // file.
        for (rank, link) in Rank::all(self.0.len()).zip(&self.0) {
            let Some(link) = link else { continue };
            self.send(rank, [BYE, 0, 0, 0], &[]);
            let mut replies = lock(&link.replies);
            let _limit = replies.set_read_timeout(Some(LINGER));
            let _taken = replies.read_exact(&mut [0]);
        }
        // The receivers of both sides wake up and end.
        for link in self.0.iter().flatten() {
            for end in [&link.requests, &link.replies] {
                // A connection that is down already is all that is wanted.
                let _down = lock(end).shutdown(Shutdown::Both);
            }
        }
    }
}

impl Sockets {
    /// Sends one message. A peer that has ended is no error here: waits report it.
    fn send(&self, dst: Rank, header: Header, bytes: &[u8]) {
        let Some(link) = &self.0[dst.idx()] else { return };
        let mut to = lock(&link.requests);
        let sent = to.write_all(bytemuck::bytes_of(&header)).and_then(|()| to.write_all(bytes));
        if let Err(e) = sent {
            log::debug!("a message to rank {} is lost: {e}", dst.get());
        }
    }
}

impl Peers for Sockets {
    fn write(&self, _heap: &Heap, dst: Rank, at: usize, bytes: &[u8]) {
        self.send(dst, [PUT, at as u64, bytes.len() as u64, 0], bytes);
    }

    fn read(&self, _heap: &Heap, src: Rank, at: usize, out: &mut [u8]) {
        let Some(link) = &self.0[src.idx()] else { return };
        // One get at a time: the replies have no numbers.
        let mut replies = lock(&link.replies);
        self.send(src, [GET, at as u64, out.len() as u64, 0], &[]);
        if let Err(e) = replies.read_exact(out) {
            log::debug!("rank {} does not answer: {e}", src.get());
        }
    }

    fn raise(&self, _heap: &Heap, dst: Rank, slot: usize, n: u64, tag: Option<u64>) {
        let header = match tag {
            None => [SIGNAL, slot as u64, n, 0],
            Some(tag) => [GRANT, slot as u64, n, tag],
        };
        self.send(dst, header, &[]);
    }

    fn store(&self, _heap: &Heap, dst: Rank, at: usize, words: &[u64]) {
        let len = 8 * words.len() as u64;
        self.send(dst, [STORE, at as u64, len, 0], bytemuck::cast_slice(words));
    }

    fn arrive(&self, _heap: &Heap, dst: Rank, channel: usize, epoch: u64) {
        self.send(dst, [ARRIVE, channel as u64, epoch, 0], &[]);
    }

    fn has_addresses(&self) -> bool {
        false
    }
}

/// Carries out the messages of `src` until it hangs up or the heap ends.
///
/// It never holds the heap: what it does may end the rank's last wait, and the rank then drops its
/// heap, whose messages must have arrived before it says goodbye.
fn serve(
    (map, team): &(Weak<Mapping>, Weak<TeamInner>),
    src: Rank,
    mut requests: UnixStream,
    mut replies: UnixStream,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let mut header: Header = [0; 4];
        requests.read_exact(bytemuck::bytes_of_mut(&mut header))?;
        let [kind, a, b, c] = header;
        bytes.resize(if matches!(kind, PUT | GET | STORE) { b as usize } else { 0 }, 0);
        if matches!(kind, PUT | STORE) {
            requests.read_exact(&mut bytes)?;
        }
        if kind == BYE {
            replies.write_all(&[1])?;
            continue;
        }
        let (Some(map), Some(team)) = (map.upgrade(), team.upgrade().map(LiveTeam)) else {
            return Ok(());
        };
        let (ctl, me) = (&team.0.ctl, team.rank());
        match kind {
            PUT => map.write(me.idx(), a as usize, &bytes),
            GET => {
                map.read(me.idx(), a as usize, &mut bytes);
                replies.write_all(&bytes)?;
            }
            STORE => {
                let words: Vec<u64> =
                    bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
                store(&map, me, a as usize, &words);
            }
            SIGNAL => protocol::signal(ctl.count(me, a as usize, src), b),
            GRANT => {
                let (count, tag) = (ctl.count(me, a as usize, src), ctl.tag(me, a as usize, src));
                protocol::grant(count, tag, c);
            }
            _ => protocol::arrive(ctl.inbox(me, a as usize, src), b),
        }
        ctl.ring(me);
    }
}

fn io(e: std::io::Error) -> Error {
    Error::io("connecting ranks by sockets", e).op("heap")
}

/// Length of the first message of a connection: the rank that connects, and the connection's use.
const HELLO_BYTES: usize = 8;

fn connect(name: &[u8], me: Rank, what: u32) -> std::io::Result<UnixStream> {
    let mut s = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    s.write_all(&[me.get().to_le_bytes(), what.to_le_bytes()].concat())?;
    Ok(s)
}

fn accept(listener: &UnixListener) -> std::io::Result<(Rank, u32, UnixStream)> {
    let (mut s, _) = listener.accept()?;
    let mut hello = [0; HELLO_BYTES];
    s.read_exact(&mut hello)?;
    let [rank, what] = bytemuck::cast::<_, [u32; 2]>(hello);
    Ok((Rank::new(rank), what, s))
}

impl Heap {
    /// Collective, before the first plan: peers are reached by messages over sockets from now on,
    /// and their memory has no addresses here. A transport for tests.
    ///
    /// # Errors
    /// `Unsupported` except for heaps of the host; the errors of the system; the fault of the team.
    #[doc(hidden)]
    pub fn connect_by_sockets(&self) -> Result<()> {
        if self.0.vmm.is_some() {
            let text = "sockets connect heaps of the host";
            return Err(Error::new(ErrorKind::Unsupported, text).op("heap"));
        }
        let (team, me) = (self.team(), self.team().rank());
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let nth = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("tilewire-{}-{nth}", std::process::id());
        let listener = SocketAddr::from_abstract_name(name.as_bytes())
            .and_then(|a| UnixListener::bind_addr(&a))
            .map_err(io)?;
        let names = team.exchange("sockets", name.as_bytes())?;
        let mut links: Vec<_> = names.iter().map(|_| None).collect();
        for p in team.peers() {
            let end = |what| connect(&names[p.idx()], me, what).map(Mutex::new).map_err(io);
            links[p.idx()] = Some(Link { requests: end(0)?, replies: end(1)? });
        }
        let mut accepted: Vec<[Option<UnixStream>; 2]> =
            names.iter().map(|_| [None, None]).collect();
        for _ in 0..2 * (names.len() - 1) {
            let (rank, what, s) = accept(&listener).map_err(io)?;
            accepted[rank.idx()][what as usize] = Some(s);
        }
        for (src, ends) in Rank::all(names.len()).zip(accepted) {
            let [Some(requests), Some(replies)] = ends else { continue };
            let here = (Arc::downgrade(&self.0.map), Arc::downgrade(&team.0));
            std::thread::spawn(move || {
                if let Err(e) = serve(&here, src, requests, replies) {
                    log::debug!("rank {} has hung up: {e}", src.get());
                }
            });
        }
        self.0.map.forbid_peers(me.idx())?;
        let set = self.0.peers.set(Arc::new(Sockets(links)));
        assert!(set.is_ok(), "a heap is connected once");
        team.agree(true).map(|_| ())
    }
}
