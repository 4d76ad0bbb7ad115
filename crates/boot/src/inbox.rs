//! The inbox of a mesh: parcels wait here for the exchange that takes them, and exits of peers are
//! recorded.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::mesh::{Parcel, PeerExit};

/// Bounds on what may wait for exchanges that have not begun on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub entries: usize,
    pub bytes: usize,
    pub fds: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 16 << 10, bytes: 256 << 20, fds: 4096 }
    }
}

/// Tags remembered per source as lost, or in all as given up, before the oldest rule is dropped.
const MAX_NOTES: usize = 1024;

/// Interval at which a wait checks whether it should stop.
pub(crate) const SLICE: Duration = Duration::from_millis(20);

pub(crate) type ExitFn = dyn Fn(Rank, PeerExit) + Send + Sync;

struct Watcher {
    f: Arc<ExitFn>,
    called: u64,
}

#[derive(Default)]
struct Source {
    parcels: HashMap<String, Parcel>,
    /// Parcels that came and could not be kept, with the reason.
    lost: HashMap<String, Error>,
    /// The whole connection is unusable.
    fault: Option<Error>,
    exit: Option<PeerExit>,
    /// The reason that came with the goodbye.
    why: Option<String>,
}

#[derive(Default)]
struct State {
    sources: Vec<Source>,
    entries: usize,
    bytes: usize,
    fds: usize,
    /// Tags that an exchange gave up on, with the ranks whose parts may still come: those are
    /// dropped on arrival instead of filling the inbox for ever.
    given_up: HashMap<String, u64>,
    watchers: Vec<Watcher>,
    closed: bool,
}

/// The receiving side of one rank.
pub(crate) struct Inbox {
    me: Rank,
    limits: Limits,
    state: Mutex<State>,
    bell: Condvar,
}

fn bit(r: Rank) -> u64 {
    1u64.checked_shl(r.get()).unwrap_or(0)
}

impl Inbox {
    pub fn new(me: Rank, size: usize, limits: Limits) -> Self {
        let sources = (0..size).map(|_| Source::default()).collect();
        let state = State { sources, ..State::default() };
        Self { me, limits, state: Mutex::new(state), bell: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Files what `src` gave for `tag`. What cannot be kept becomes the error of the exchange that
    /// asks for it.
    pub fn deliver(&self, src: Rank, tag: &str, parcel: Parcel) {
        let mut s = self.lock();
        if s.take_given_up(src, tag) {
            return;
        }
        let reason = if s.sources[src.idx()].parcels.contains_key(tag) {
            Some(
                Error::new(ErrorKind::Protocol, format!("{src} used the tag `{tag}` twice"))
                    .hint("a tag names one exchange"),
            )
        } else if s.entries >= self.limits.entries
            || s.bytes + parcel.payload.len() > self.limits.bytes
            || s.fds + parcel.fds.len() > self.limits.fds
        {
            Some(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "the inbox is full, so that the early message of {src} in `{tag}` is refused: \
                     {} messages, {} bytes, {} descriptors are waiting; the limits are {}, {}, {}",
                    s.entries,
                    s.bytes,
                    s.fds,
                    self.limits.entries,
                    self.limits.bytes,
                    self.limits.fds
                ),
            ))
        } else {
            None
        };
        match reason {
            Some(e) => {
                let e = e.op("exchange").rank(self.me).peer(src);
                let source = &mut s.sources[src.idx()];
                if source.lost.len() >= MAX_NOTES {
                    source.fault.get_or_insert(e);
                } else {
                    source.lost.insert(tag.to_owned(), e);
                }
            }
            None => {
                s.entries += 1;
                s.bytes += parcel.payload.len();
                s.fds += parcel.fds.len();
                s.sources[src.idx()].parcels.insert(tag.to_owned(), parcel);
            }
        }
        drop(s);
        self.bell.notify_all();
    }

    /// Notes that the connection to `src` broke, and why: for us it has died.
    pub fn fail(&self, src: Rank, e: Error) {
        // The thread that learns of a death first may know nothing else, and the cause can be here.
        log::warn!("rank {}: the connection to {src} is closed: {e}", self.me.get());
        let mut s = self.lock();
        let source = &mut s.sources[src.idx()];
        source.fault.get_or_insert(e);
        source.exit.get_or_insert(PeerExit::Died);
        drop(s);
        self.bell.notify_all();
    }

    /// Notes how `src` went; the first word counts.
    pub fn exit(&self, src: Rank, how: PeerExit) {
        self.lock().sources[src.idx()].exit.get_or_insert(how);
        self.bell.notify_all();
    }

    /// Notes why `src` leaves. Before its exit is noted: who sees the exit asks for the reason.
    pub fn reason(&self, src: Rank, why: &str) {
        if !why.is_empty() {
            self.lock().sources[src.idx()].why.get_or_insert_with(|| why.to_owned());
        }
    }

    pub fn reason_of(&self, src: Rank) -> Option<String> {
        self.lock().sources[src.idx()].why.clone()
    }

    pub fn exit_of(&self, src: Rank) -> Option<PeerExit> {
        self.lock().sources[src.idx()].exit
    }

    pub fn gone(&self) -> u64 {
        self.lock().gone()
    }

    /// `PeerDead` if one of `members` has died.
    pub fn check_alive(&self, tag: &str, members: &[Rank]) -> Result<()> {
        let s = self.lock();
        for &m in members {
            let source = &s.sources[m.idx()];
            if source.exit == Some(PeerExit::Died) {
                return Err(self.gone_error(tag, m, source));
            }
        }
        Ok(())
    }

    fn gone_error(&self, tag: &str, peer: Rank, source: &Source) -> Error {
        let how = match source.exit {
            Some(PeerExit::Left) => "has left",
            _ => "has died",
        };
        let why = source.why.as_ref().map_or(String::new(), |w| format!(" ({w})"));
        let e = Error::new(ErrorKind::PeerDead, format!("`{tag}`: {peer} {how}{why}"));
        let e = match &source.fault {
            Some(f) => {
                let remedy = f.get_hint().map(|h| format!("; {h}")).unwrap_or_default();
                let why = format!("its connection failed: {}{remedy}", f.message());
                e.cause(f.clone()).hint(why)
            }
            None => e,
        };
        e.op("exchange").rank(self.me).peer(peer)
    }

    /// Waits for the parts of all `members` but me, and puts `own` in my place. `stop` can end it.
    pub fn collect(
        &self,
        tag: &str,
        members: &[Rank],
        own: Parcel,
        deadline: Deadline,
        stop: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<Parcel>> {
        let mut stopped = None;
        let mut s = self.lock();
        loop {
            let missing: Vec<Rank> = members
                .iter()
                .copied()
                .filter(|m| *m != self.me && !s.sources[m.idx()].parcels.contains_key(tag))
                .collect();
            if missing.is_empty() {
                return Ok(s.take_all(tag, members, self.me, own));
            }
            if let Some(e) = self.hopeless(&mut s, tag, members, &missing).or(stopped.take()) {
                s.give_up(tag, members, &missing, self.me);
                return Err(e);
            }
            let left = deadline.remaining();
            if left.is_zero() {
                s.give_up(tag, members, &missing, self.me);
                let list: Vec<_> = missing.iter().map(Rank::to_string).collect();
                let msg = format!("`{tag}`: no message has arrived from {}", list.join(", "));
                return Err(Error::new(ErrorKind::Timeout, msg)
                    .op("exchange")
                    .rank(self.me)
                    .peer(missing[0])
                    .elapsed(deadline.elapsed()));
            }
            let slice = left.min(SLICE);
            s = self.bell.wait_timeout(s, slice).unwrap_or_else(PoisonError::into_inner).0;
            // Asked without the lock: it may look at whatever it likes.
            drop(s);
            stopped = stop().err();
            s = self.lock();
        }
    }

    /// Returns the reason if waiting for `missing` cannot succeed.
    fn hopeless(
        &self,
        s: &mut State,
        tag: &str,
        members: &[Rank],
        missing: &[Rank],
    ) -> Option<Error> {
        for &m in missing {
            let source = &mut s.sources[m.idx()];
            if let Some(e) = source.lost.remove(tag) {
                return Some(e);
            }
            if source.exit.is_some() {
                return Some(self.gone_error(tag, m, source));
            }
            if let Some(e) = &source.fault {
                return Some(e.clone());
            }
        }
        // One that died behind its part: a rank that comes to this exchange now gets that error,
        // and gives no part.
        let dead = |m: &&Rank| s.sources[m.idx()].exit == Some(PeerExit::Died);
        let m = members.iter().find(dead)?;
        Some(self.gone_error(tag, *m, &s.sources[m.idx()]))
    }

    /// Adds a watcher of exits. It is called by [`Inbox::announce`].
    pub fn watch(&self, f: Box<ExitFn>) {
        self.lock().watchers.push(Watcher { f: Arc::from(f), called: 0 });
        self.bell.notify_all();
    }

    /// Calls the watchers for exits that they were not called for yet. For one thread, the monitor.
    pub fn announce(&self) {
        let due = self.lock().due();
        tell(due);
    }

    /// As [`Inbox::announce`], but first waits for something to tell. False once closed.
    pub fn announce_next(&self) -> bool {
        let mut s = self.lock();
        let due = loop {
            if s.closed {
                return false;
            }
            let due = s.due();
            if !due.is_empty() {
                break due;
            }
            s = self.bell.wait(s).unwrap_or_else(PoisonError::into_inner);
        };
        drop(s);
        tell(due);
        true
    }

    /// Checks the accounts, for tests: that they hold, and that they are within the limits. Returns
    /// the number of parcels that wait.
    #[cfg(test)]
    pub fn check(&self, limits: Limits) -> usize {
        let s = self.lock();
        let all = || s.sources.iter().flat_map(|s| s.parcels.values());
        let bytes: usize = all().map(|p| p.payload.len()).sum();
        let fds: usize = all().map(|p| p.fds.len()).sum();
        assert_eq!((s.entries, s.bytes, s.fds), (all().count(), bytes, fds));
        assert!(s.entries <= limits.entries && bytes <= limits.bytes && fds <= limits.fds);
        assert!(s.given_up.len() <= MAX_NOTES);
        assert!(s.sources.iter().all(|s| s.lost.len() <= MAX_NOTES));
        s.entries
    }

    /// Ends [`Inbox::announce_next`].
    pub fn close(&self) {
        self.lock().closed = true;
        self.bell.notify_all();
    }
}

fn tell(due: Vec<(Arc<ExitFn>, Rank, PeerExit)>) {
    for (f, rank, how) in due {
        // A panic of a callback must not end the watch over the peers; the panic hook has shown it.
        catch_unwind(AssertUnwindSafe(|| f(rank, how))).ok();
    }
}

impl State {
    fn gone(&self) -> u64 {
        let bits = self.sources.iter().enumerate().filter(|(_, s)| s.exit.is_some());
        bits.fold(0, |m, (i, _)| m | bit(Rank::new(i as u32)))
    }

    fn due(&mut self) -> Vec<(Arc<ExitFn>, Rank, PeerExit)> {
        let mut out = Vec::new();
        for (i, source) in self.sources.iter().enumerate() {
            let (rank, Some(how)) = (Rank::new(i as u32), source.exit) else { continue };
            for w in self.watchers.iter_mut().filter(|w| w.called & bit(rank) == 0) {
                w.called |= bit(rank);
                out.push((w.f.clone(), rank, how));
            }
        }
        out
    }

    fn take(&mut self, src: Rank, tag: &str) -> Option<Parcel> {
        let p = self.sources[src.idx()].parcels.remove(tag)?;
        self.entries -= 1;
        self.bytes -= p.payload.len();
        self.fds -= p.fds.len();
        Some(p)
    }

    fn take_all(&mut self, tag: &str, members: &[Rank], me: Rank, own: Parcel) -> Vec<Parcel> {
        let mut own = Some(own);
        let mut part = |m: &Rank| if *m == me { own.take() } else { self.take(*m, tag) };
        members.iter().map(|m| part(m).unwrap_or_default()).collect()
    }

    fn give_up(&mut self, tag: &str, members: &[Rank], missing: &[Rank], me: Rank) {
        for &m in members.iter().filter(|m| **m != me) {
            self.take(m, tag);
        }
        let alive = missing.iter().filter(|m| self.sources[m.idx()].exit.is_none());
        let mask = alive.fold(0, |acc, m| acc | bit(*m));
        if mask != 0 && self.given_up.len() < MAX_NOTES {
            self.given_up.insert(tag.to_owned(), mask);
        }
    }

    fn take_given_up(&mut self, src: Rank, tag: &str) -> bool {
        let Some(mask) = self.given_up.get_mut(tag) else { return false };
        let hit = *mask & bit(src) != 0;
        *mask &= !bit(src);
        if *mask == 0 {
            self.given_up.remove(tag);
        }
        hit
    }
}

#[cfg(test)]
#[path = "inbox_tests.rs"]
mod tests;
