//! Faults between device and host.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::Probe;

use super::store::{PINNED_CODE, PINNED_LEFT, PINNED_REPORT, VmmStore};
use crate::control::OFF_ABORT;
use crate::protocol::AbortCode;
use crate::sink::AbortSink;

/// Reasons in a report, as in `comm/signal.cu`.
const TIMEOUT: u64 = 1;
const GONE: u64 = 2;
const ABORTED: u64 = 3;
const OTHER: u64 = 5;

/// An error that a kernel finds in an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadInput {
    /// An index of an expert that does not exist.
    Expert = 1,
    /// Receive buffers of a dispatch that are not the same on all ranks.
    Buffer = 2,
}

impl BadInput {
    fn text(what: u64) -> &'static str {
        match what {
            1 => "`topk_idx` names an expert that does not exist",
            2 => "the ranks dispatch into different receive buffers",
            _ => "an input that cannot be",
        }
    }
}

impl VmmStore {
    /// Returns the first failure on this device, if the host does not know of it.
    fn report(&self) -> Option<Error> {
        let word = |i: usize| self.pinned.word(PINNED_REPORT + i);
        // Acquire: the other words were written before this one was released.
        let head = word(0).load(Ordering::Acquire);
        let get = |i: usize| word(i).load(Ordering::Relaxed);
        if head == 0 || get(7) as u32 != self.team.generation() as u32 {
            return None;
        }
        let op = if head >> 8 & 0xff == 2 { "barrier" } else { "wait" };
        let peer = Rank::new(get(2) as u32);
        let error = |kind, text: String, peer: Rank| {
            Error::new(kind, text)
                .op(op)
                .phase(op)
                .of_team(&self.team)
                .rank(self.team.rank())
                .peer(peer)
                .expected(get(3))
                .seen(get(4))
                .elapsed(Duration::from_nanos(get(5)))
        };
        match head & 0xff {
            TIMEOUT => {
                let (text, culprit) = self.verdict(peer);
                Some(error(ErrorKind::Timeout, text, peer).culprit(culprit).hint(
                    "is that rank stuck, or does it make fewer calls? --timeout-s, TILEWIRE_TIMEOUT_S \
                     or `WorldCfg` raise the limit",
                ))
            }
            GONE => {
                let how = self.team.how_gone(peer).unwrap_or_else(|| "has left the job".to_owned());
                let text = format!("{} {how} and will not signal", self.team.named(peer));
                Some(error(ErrorKind::PeerDead, text, peer))
            }
            OTHER => Some(
                Error::new(ErrorKind::InvalidArgument, BadInput::text(get(1)))
                    .of_team(&self.team)
                    .rank(self.team.rank())
                    .peer(self.team.rank()),
            ),
            ABORTED => {
                // The abort of a peer, unchanged: a wait of the host would return the same error.
                let code = AbortCode::unpack(get(6))?;
                self.team.note_heard(code);
                let src = Rank::new(u32::from(code.from));
                let e = self.team.abort_error(src, code).op(op).phase(op);
                Some(e.expected(get(3)).seen(get(4)).elapsed(Duration::from_nanos(get(5))))
            }
            // The host wrote this word for the device, so it has the error itself, or a report of
            // it.
            _ => None,
        }
    }

    /// Returns the text about a deadline of a wait for `peer`, and the world rank that is to blame:
    /// of all members that which has made the fewest calls, if these are fewer than mine.
    fn verdict(&self, peer: Rank) -> (String, Rank) {
        let team = &self.team;
        let silent = format!("{} is alive but did not signal", team.named(peer));
        match team.fewest_calls() {
            Some((r, calls)) if r == peer => (format!("{silent}: it {calls}"), team.world_rank(r)),
            Some((r, calls)) => {
                (format!("{} {calls}; {silent}", team.named(r)), team.world_rank(r))
            }
            None => (silent, team.world_rank(peer)),
        }
    }

    fn carry(&self, code: AbortCode) -> Result<()> {
        let me = self.team.rank();
        self.pinned.word(PINNED_CODE).store(code.pack(), Ordering::Release);
        let src = self.pinned.addr() + 8 * PINNED_CODE as u64;
        // SAFETY: 8 bytes of pinned memory, and the fault word; both live as long as `self`,
        // whose `Drop` waits for the device. Kernels read the fault word as one 64-bit load.
        unsafe { self.abort_stream.copy(self.param.fault, src, 8)? };
        for p in self.team.peers() {
            let slot = self.control.addr(p, OFF_ABORT + 8 * me.idx(), 8)?;
            // SAFETY: as above; only this rank writes this slot.
            unsafe { self.abort_stream.copy(slot, src, 8)? };
        }
        Ok(())
    }
}

impl Probe for VmmStore {
    fn poll(&self) {
        // A death that the monitor has reported ends the kernels, but is the fault of no wait yet.
        if let Some(e) = self.report().or_else(|| self.team.news()) {
            self.team.fail(e);
        }
    }

    fn waiting(&self, from: Duration, to: Duration) {
        self.poll();
        if self.team.size() == 1 || self.team.fault().is_set() {
            return;
        }
        let limit = self.team.0.cfg.late_warning;
        if let Some(text) = (from..to).contains(&limit).then(|| self.team.lateness(to)).flatten() {
            log::warn!("{text}");
        }
    }
}

impl AbortSink for VmmStore {
    fn raise(&self, code: AbortCode) {
        // Release: a kernel that sees the word may act on everything before it.
        self.pinned.word(0).store(code.pack(), Ordering::Release);
        if let Err(e) = self.carry(code) {
            // The pinned word is enough for this device; peers still have their deadlines.
            log::warn!("abort of team {} did not reach the peers' GPUs: {e}", self.team.name());
        }
    }

    fn left(&self, members: u64) {
        // Acquire and release: a kernel that sees the bit sees all writes before the goodbye.
        self.pinned.word(PINNED_LEFT).fetch_or(members, Ordering::AcqRel);
    }
}
