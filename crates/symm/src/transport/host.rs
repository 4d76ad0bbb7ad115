//! [`Transport`] of the host: the worker thread of the launch acts at once.
//!
//! A rank waits for words of its own control page and chunk, whichever peer writes them. Only
//! writes to peers depend on how these are reached ([`Peers`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use super::permit::Permit;
use super::{
    Caps, Enter, HostTransport, OpCtx, Rows, SignalSlot, Transport, check_channel, check_slots,
};
use crate::heap::Heap;
use crate::hook::{HookAction, StepKind};
use crate::map::Mapping;
use crate::protocol;
use crate::team::lock;

/// The access of a rank to the chunks and the control pages of its peers.
///
/// Calls for one peer take effect there in the order in which one thread made them.
pub(crate) trait Peers: Send + Sync {
    /// Writes `bytes` at `at` of `dst`'s chunk.
    fn write(&self, heap: &Heap, dst: Rank, at: usize, bytes: &[u8]);
    /// Reads from `at` of `src`'s chunk.
    fn read(&self, heap: &Heap, src: Rank, at: usize, out: &mut [u8]);
    /// Adds `n` to my count of `dst`'s `slot`; with a tag as [`protocol::grant`] does.
    fn raise(&self, heap: &Heap, dst: Rank, slot: usize, n: u64, tag: Option<u64>);
    /// Stores `words` at `at` of `dst`'s chunk, each by [`protocol::flag`].
    fn store(&self, heap: &Heap, dst: Rank, at: usize, words: &[u64]);
    /// Announces to `dst` that I have entered round `epoch` of a barrier.
    fn arrive(&self, heap: &Heap, dst: Rank, channel: usize, epoch: u64);
    /// Returns whether peers' memory has addresses here.
    fn has_addresses(&self) -> bool;
}

/// Peers whose memory is mapped here.
pub(crate) struct Mapped;

impl Peers for Mapped {
    fn write(&self, heap: &Heap, dst: Rank, at: usize, bytes: &[u8]) {
        heap.0.map.write(dst.idx(), at, bytes);
    }

    fn read(&self, heap: &Heap, src: Rank, at: usize, out: &mut [u8]) {
        heap.0.map.read(src.idx(), at, out);
    }

    fn raise(&self, heap: &Heap, dst: Rank, slot: usize, n: u64, tag: Option<u64>) {
        let (ctl, me) = (&heap.team().0.ctl, heap.team().rank());
        match tag {
            None => protocol::signal(ctl.count(dst, slot, me), n),
            Some(tag) => protocol::grant(ctl.count(dst, slot, me), ctl.tag(dst, slot, me), tag),
        }
        ctl.ring(dst);
    }

    fn store(&self, heap: &Heap, dst: Rank, at: usize, words: &[u64]) {
        store(&heap.0.map, dst, at, words);
        heap.team().0.ctl.ring(dst);
    }

    fn arrive(&self, heap: &Heap, dst: Rank, channel: usize, epoch: u64) {
        let ctl = &heap.team().0.ctl;
        protocol::arrive(ctl.inbox(dst, channel, heap.team().rank()), epoch);
        ctl.ring(dst);
    }

    fn has_addresses(&self) -> bool {
        true
    }
}

/// Stores flags in the mapped chunk of `rank`.
pub(super) fn store(map: &Mapping, rank: Rank, at: usize, words: &[u64]) {
    for (i, &word) in words.iter().enumerate() {
        protocol::flag(map.word(rank.idx(), at + 8 * i), word);
    }
}

/// The transport of a host heap.
struct Host {
    heap: Heap,
    peers: Arc<dyn Peers>,
}

/// Returns the transport of `heap` over `peers`.
pub(crate) fn over(heap: &Heap, peers: Arc<dyn Peers>) -> Arc<HostTransport> {
    Arc::new(Host { heap: heap.clone(), peers })
}

impl Host {
    fn me(&self) -> Rank {
        self.heap.team().rank()
    }

    /// Fails unless `peer` is of the team and `len` bytes at `at` are in the heap. Without a lock:
    /// the heap's list of buffers has one.
    fn check(&self, peer: Rank, at: usize, len: usize) -> Result<()> {
        let (size, total) = (self.heap.team().size(), self.heap.0.map.len());
        if peer.idx() < size && at.checked_add(len).is_some_and(|end| end <= total) {
            return Ok(());
        }
        self.heap.check_range(peer, at, len)?;
        Err(Error::internal("a heap that is larger than its mapping"))
    }

    /// Counts a signal to `dst` and raises it by `f`, unless the hook changes that.
    fn raise(&self, lane: &OpCtx, dst: Rank, phase: &str, f: impl Fn()) -> Result<()> {
        self.check(dst, 0, 0)?;
        let action = lane.hook(StepKind::Signal, Some(dst), phase);
        self.act(lane, dst, action, f);
        Ok(())
    }

    fn act(&self, lane: &OpCtx, dst: Rank, action: HookAction, f: impl Fn()) {
        self.heap.team().0.traffic.signal(dst);
        // A stale flag keeps its value, that of an earlier launch.
        if !matches!(action, HookAction::Skip | HookAction::Stale) {
            f();
        }
        if action == HookAction::Twice {
            f();
        }
        // Bytes that a rank publishes in its own chunk are for all peers: a signal to any of them
        // may announce the bytes.
        let me = self.me();
        let held = lock(&lane.held).take_if(|h| h.0 == dst || h.0 == me);
        if let Some((dst, offset, bytes)) = held {
            // Late enough for the consumer to have acted on the early signal, and without holding
            // up this rank: that would hide the disorder.
            let (heap, peers) = (self.heap.clone(), self.peers.clone());
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(30));
                match dst == me {
                    true => heap.0.map.write(dst.idx(), offset, &bytes),
                    false => peers.write(&heap, dst, offset, &bytes),
                }
            });
        }
    }

    fn store_words(
        &self,
        lane: &OpCtx,
        (dst, at): (Rank, usize),
        words: &[u64],
        phase: &str,
    ) -> Result<()> {
        self.check(dst, at, 8 * words.len())?;
        let action = lane.hook(StepKind::Flag, Some(dst), phase);
        self.act(lane, dst, action, || match dst == self.me() {
            true => store(&self.heap.0.map, dst, at, words),
            false => self.peers.store(&self.heap, dst, at, words),
        });
        Ok(())
    }

    /// Writes to `to`, unless the hook changes that.
    fn write(&self, lane: &OpCtx, to: (Rank, usize), bytes: &[u8], phase: &str) -> Result<()> {
        let (dst, mut at) = to;
        self.check(dst, at, bytes.len())?;
        let action = lane.hook(StepKind::Put, Some(dst), phase);
        if dst != self.me() {
            self.heap.team().0.traffic.put(dst, bytes.len());
        }
        if action == HookAction::Shift {
            let fits = at + 64 + bytes.len() <= self.heap.0.map.len();
            at = if fits { at + 64 } else { at - 64 };
        }
        match action {
            HookAction::Skip => {}
            HookAction::AfterSignal => *lock(&lane.held) = Some((dst, at, bytes.to_vec())),
            _ if dst == self.me() => self.heap.0.map.write(dst.idx(), at, bytes),
            _ => self.peers.write(&self.heap, dst, at, bytes),
        }
        Ok(())
    }

    /// Counts a get from `src`; false if the hook leaves it out.
    fn reads(&self, lane: &OpCtx, src: Rank, len: usize, phase: &str) -> bool {
        let action = lane.hook(StepKind::Get, Some(src), phase);
        if src != self.me() {
            self.heap.team().0.traffic.get(src, len);
        }
        action != HookAction::Skip
    }

    /// Reads a range that was checked.
    fn read(&self, (src, at): (Rank, usize), out: &mut [u8]) {
        match src == self.me() {
            true => self.heap.0.map.read(src.idx(), at, out),
            false => self.peers.read(&self.heap, src, at, out),
        }
    }

    /// Returns the expected and the seen count of a wait.
    fn seen(
        &self,
        lane: &OpCtx,
        (src, slot): (Rank, SignalSlot),
        n: u64,
        phase: &str,
    ) -> Result<(u64, u64)> {
        self.check(src, 0, 0)?;
        lane.hook(StepKind::Wait, Some(src), phase);
        let team = self.heap.team();
        let expected = team.expect(slot.0, src, n);
        let count = team.0.ctl.count(self.me(), slot.0, src);
        team.wait_until(
            &lane.wait_ctx(src, expected, phase),
            || protocol::reached(count, expected),
            || count.load(Ordering::Relaxed),
        )
        .map(|seen| (expected, seen))
        .map_err(|e| team.fail(e))
    }
}

impl Transport for Host {
    type Lane = OpCtx;
    type Memory = [u8];

    fn heap(&self) -> &Heap {
        &self.heap
    }

    fn caps(&self) -> Caps {
        let direct_peer = self.peers.has_addresses();
        Caps { direct_peer, get: true, graph: true, recoverable: true }
    }

    fn enter(&self, lane: &OpCtx, e: &Enter) -> Result<Permit> {
        let team = self.heap.team();
        for p in team.peers() {
            self.grant(lane, p, e.credit, e.tag, "credit")?;
        }
        let acquire = |all: Permit, p| {
            self.acquire(lane, p, e.credit, e.tag, "credit").map(|one| all.and(one))
        };
        let permit = team.peers().try_fold(Permit::none(), acquire)?;
        self.advance(lane, e.first, e.num)?;
        Ok(permit)
    }

    fn grant(
        &self,
        lane: &OpCtx,
        dst: Rank,
        slot: SignalSlot,
        tag: u64,
        phase: &str,
    ) -> Result<()> {
        let grant = || self.peers.raise(&self.heap, dst, slot.0, 1, Some(tag));
        self.raise(lane, dst, phase, grant)
    }

    fn acquire(
        &self,
        lane: &OpCtx,
        src: Rank,
        slot: SignalSlot,
        tag: u64,
        phase: &str,
    ) -> Result<Permit> {
        self.check(src, 0, 0)?;
        lane.hook(StepKind::Wait, Some(src), phase);
        let (team, me) = (self.heap.team(), self.me());
        let expected = team.expect(slot.0, src, 1);
        let ctl = &team.0.ctl;
        let (count, word) = (ctl.count(me, slot.0, src), ctl.tag(me, slot.0, src));
        let ctx = lane.wait_ctx(src, expected, phase);
        let got = team
            .wait_until(
                &ctx,
                || protocol::granted(count, word, expected),
                || count.load(Ordering::Relaxed),
            )
            .map_err(|e| team.fail(e))?;
        if got != tag {
            return Err(team.fail(team.tag_mismatch(&ctx, tag, got)));
        }
        Ok(Permit::of(src))
    }

    fn put(
        &self,
        lane: &OpCtx,
        permit: &Permit,
        to: (Rank, usize),
        src: &[u8],
        phase: &str,
    ) -> Result<()> {
        permit.check(self.heap().team(), to.0)?;
        self.write(lane, to, src, phase)
    }

    unsafe fn pass(
        &self,
        lane: &OpCtx,
        permit: &Permit,
        to: (Rank, usize),
        (from, len): (usize, usize),
        phase: &str,
    ) -> Result<()> {
        permit.check(self.heap().team(), to.0)?;
        self.check(self.me(), from, len)?;
        // SAFETY: the caller's contract is that of `OpCtx::local`.
        self.write(lane, to, unsafe { lane.local(from, len) }, phase)
    }

    unsafe fn get(
        &self,
        lane: &OpCtx,
        (src, at): (Rank, usize),
        out: &mut [u8],
        phase: &str,
    ) -> Result<()> {
        self.check(src, at, out.len())?;
        if self.reads(lane, src, out.len(), phase) {
            self.read((src, at), out);
        }
        Ok(())
    }

    unsafe fn get_rows(
        &self,
        lane: &OpCtx,
        (src, at): (Rank, usize),
        out: &mut [u8],
        rows: Rows,
        phase: &str,
    ) -> Result<()> {
        if rows.bytes() == 0 {
            return Ok(());
        }
        self.check(src, at, rows.reach(rows.from_pitch))?;
        if rows.reach(rows.out_pitch) > out.len() {
            return Err(Error::invalid("the rows that are read do not fit the destination")
                .expected(format_args!("at least {} bytes", rows.reach(rows.out_pitch)))
                .seen(format_args!("{} bytes", out.len())));
        }
        if !self.reads(lane, src, rows.bytes(), phase) {
            return Ok(());
        }
        if rows.from_pitch == rows.width && rows.out_pitch == rows.width {
            self.read((src, at), &mut out[..rows.bytes()]);
            return Ok(());
        }
        for row in 0..rows.num {
            let (from, to) = (at + row * rows.from_pitch, row * rows.out_pitch);
            self.read((src, from), &mut out[to..to + rows.width]);
        }
        Ok(())
    }

    fn signal(&self, lane: &OpCtx, dst: Rank, slot: SignalSlot, n: u64, phase: &str) -> Result<()> {
        let signal = || self.peers.raise(&self.heap, dst, slot.0, n, None);
        self.raise(lane, dst, phase, signal)
    }

    /// A signal of the host adds to the count: it needs no total in advance.
    fn advance(&self, _lane: &OpCtx, first: SignalSlot, num: usize) -> Result<()> {
        check_slots(first, num)
    }

    fn flag(&self, lane: &OpCtx, dst: Rank, slot: SignalSlot, phase: &str) -> Result<()> {
        self.signal(lane, dst, slot, 1, phase)
    }

    fn wait(&self, lane: &OpCtx, src: Rank, slot: SignalSlot, n: u64, phase: &str) -> Result<()> {
        self.seen(lane, (src, slot), n, phase).map(|_| ())
    }

    fn wait_last(
        &self,
        lane: &OpCtx,
        src: Rank,
        slot: SignalSlot,
        n: u64,
        phase: &str,
    ) -> Result<()> {
        let (expected, seen) = self.seen(lane, (src, slot), n, phase)?;
        if seen == expected {
            return Ok(());
        }
        Err(self.heap.team().fail(
            Error::new(ErrorKind::Protocol, "a peer has signalled more often than agreed")
                .op(lane.op)
                .phase(phase.to_owned())
                .seq(lane.seq())
                .of_team(self.heap.team())
                .rank(self.me())
                .peer(src)
                .expected(expected)
                .seen(seen),
        ))
    }

    fn store_flag(&self, lane: &OpCtx, to: (Rank, usize), value: u64, phase: &str) -> Result<()> {
        self.store_words(lane, to, &[value], phase)
    }

    fn put_flags(&self, lane: &OpCtx, to: (Rank, usize), words: &[u64], phase: &str) -> Result<()> {
        self.heap.team().0.traffic.put(to.0, 8 * words.len());
        self.store_words(lane, to, words, phase)
    }

    fn wait_flags(
        &self,
        lane: &OpCtx,
        (src, at): (Rank, usize),
        least: u64,
        out: &mut [u64],
        phase: &str,
    ) -> Result<()> {
        self.check(src, at, 8 * out.len())?;
        lane.hook(StepKind::Wait, Some(src), phase);
        let (team, me) = (self.heap.team(), self.me().idx());
        for (i, out) in out.iter_mut().enumerate() {
            let word = self.heap.0.map.word(me, at + 8 * i);
            *out = team
                .wait_until(
                    &lane.wait_ctx(src, least, phase),
                    || protocol::flagged(word, least),
                    || word.load(Ordering::Relaxed),
                )
                .map_err(|e| team.fail(e))?;
        }
        Ok(())
    }

    fn barrier(&self, lane: &OpCtx, channel: usize, phase: &str) -> Result<()> {
        check_channel(channel)?;
        let (team, me) = (self.heap.team(), self.me());
        let epoch = team.next_epoch(channel);
        for p in team.peers() {
            let arrive = || self.peers.arrive(&self.heap, p, channel, epoch);
            self.raise(lane, p, phase, arrive)?;
        }
        for p in team.peers() {
            lane.hook(StepKind::Wait, Some(p), phase);
            let inbox = team.0.ctl.inbox(me, channel, p);
            team.wait_until(
                &lane.wait_ctx(p, epoch, phase),
                || protocol::arrived(inbox, epoch).then_some(()),
                || inbox.load(Ordering::Relaxed),
            )
            .map_err(|e| team.fail(e))?;
        }
        Ok(())
    }

    unsafe fn pass_signal(
        &self,
        lane: &OpCtx,
        permit: &Permit,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        if from.1 > 0 {
            // SAFETY: the caller's contract.
            unsafe { self.pass(lane, permit, to, from, phase)? };
        }
        self.signal(lane, to.0, slot, 1, phase)
    }

    fn put_signal(
        &self,
        lane: &OpCtx,
        permit: &Permit,
        to: (Rank, usize),
        src: &[u8],
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        if !src.is_empty() {
            self.put(lane, permit, to, src, phase)?;
        }
        self.signal(lane, to.0, slot, 1, phase)
    }

    fn put_flag(
        &self,
        lane: &OpCtx,
        permit: &Permit,
        to: (Rank, usize),
        src: &[u8],
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        if !src.is_empty() {
            self.put(lane, permit, to, src, phase)?;
        }
        self.flag(lane, to.0, slot, phase)
    }

    fn fence(&self, _lane: &OpCtx) -> Result<()> {
        std::sync::atomic::fence(Ordering::Release);
        self.heap.team().fault().check()
    }

    /// Does nothing: a put of the host is complete when the call returns. A put by a message is in
    /// order with the signal that publishes it, and nothing else can see it.
    fn quiet(&self, lane: &OpCtx) -> Result<()> {
        self.fence(lane)
    }

    fn check_counters(&self) -> Result<()> {
        self.heap.team().check_counters()
    }
}
