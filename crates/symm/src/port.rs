//! What a running operation does: puts, gets, signals, waits, credits. On a GPU this is the
//! kernel's business; on the host it runs on the stream's worker thread.

use std::sync::Mutex;

use tilewire_core::{DType, Error, Rank, Result};

use crate::heap::Heap;
use crate::hook::{HookAction, StepKind};
use crate::onesided::SignalSlot;
use crate::protocol;
use crate::team::{LiveTeam, lock};
use crate::wait::WaitCtx;

/// One launch of one operation on one rank. Names itself in every error.
///
/// Offsets are bytes in the heap ([`SymBuf::range`](crate::SymBuf::range)).
pub struct OpCtx {
    heap: Heap,
    op: &'static str,
    seq: u64,
    /// A put that a test hook holds back until after the next signal to its peer.
    held: Mutex<Option<(Rank, usize, Vec<u8>)>>,
}

impl OpCtx {
    /// The context of launch `seq` of `op`.
    pub fn new(heap: &Heap, op: &'static str, seq: u64) -> Self {
        Self { heap: heap.clone(), op, seq, held: Mutex::new(None) }
    }

    /// The team.
    pub fn team(&self) -> &LiveTeam {
        self.heap.team()
    }

    /// My team rank.
    pub fn rank(&self) -> Rank {
        self.team().rank()
    }

    /// Sequence number of the launch.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    fn hook(&self, kind: StepKind, peer: Option<Rank>, phase: &str) -> HookAction {
        self.team().hook((self.op, phase), kind, peer)
    }

    /// Marks the beginning of a piece of arithmetic.
    ///
    /// # Errors
    /// The fault of the team: there is no point in computing on.
    pub fn compute(&self, phase: &str) -> Result<()> {
        self.hook(StepKind::Compute, None, phase);
        self.team().fault().check()
    }

    /// Writes `bytes` into `dst`'s chunk. Visible to `dst` after a later signal to it.
    pub fn put(&self, dst: Rank, offset: usize, bytes: &[u8], phase: &str) {
        let action = self.hook(StepKind::Put, Some(dst), phase);
        self.team().0.traffic.put(dst, bytes.len());
        match action {
            HookAction::Skip => {}
            HookAction::AfterSignal => *lock(&self.held) = Some((dst, offset, bytes.to_vec())),
            _ => self.heap.0.map.write(dst.idx(), offset, bytes),
        }
    }

    /// Reads from `src`'s chunk. What is there was published by a signal waited for before.
    pub fn get(&self, src: Rank, offset: usize, out: &mut [u8], phase: &str) {
        let action = self.hook(StepKind::Get, Some(src), phase);
        self.team().0.traffic.get(src, out.len());
        if action != HookAction::Skip {
            self.heap.0.map.read(src.idx(), offset, out);
        }
    }

    /// Adds `n` to `dst`'s counter `slot` in my column.
    pub fn signal(&self, dst: Rank, slot: SignalSlot, n: u64, phase: &str) {
        let action = self.hook(StepKind::Signal, Some(dst), phase);
        self.raise(dst, action, || {
            protocol::signal(self.team().0.ctl.count(dst, slot.0, self.rank()), n);
        });
    }

    /// Grants `dst` one more use of my receive buffer, for the launch with fingerprint `tag`.
    pub fn grant(&self, dst: Rank, slot: SignalSlot, tag: u64, phase: &str) {
        let action = self.hook(StepKind::Signal, Some(dst), phase);
        let (ctl, me) = (&self.team().0.ctl, self.rank());
        self.raise(dst, action, || {
            protocol::grant(ctl.count(dst, slot.0, me), ctl.tag(dst, slot.0, me), tag);
        });
    }

    /// Stores `value` in the word at `offset` of `dst`'s chunk: a flag, which has one writer, and
    /// whose values grow from launch to launch.
    pub fn store_flag(&self, dst: Rank, offset: usize, value: u64, phase: &str) {
        self.store_flags(dst, offset, &[value], phase);
    }

    /// Puts `words` at `offset` of `dst`'s chunk. Each is a flag as well, so nothing need follow.
    pub fn put_flagged(&self, dst: Rank, offset: usize, words: &[u64], phase: &str) {
        self.team().0.traffic.put(dst, 8 * words.len());
        self.store_flags(dst, offset, words, phase);
    }

    fn store_flags(&self, dst: Rank, offset: usize, values: &[u64], phase: &str) {
        let action = self.hook(StepKind::Flag, Some(dst), phase);
        self.raise(dst, action, || {
            for (i, &value) in values.iter().enumerate() {
                let word = self.heap.0.map.word(dst.idx(), offset + 8 * i);
                let stale = || word.load(std::sync::atomic::Ordering::Relaxed);
                let value = if action == HookAction::Stale { stale() } else { value };
                protocol::flag(word, value);
            }
        });
    }

    fn raise(&self, dst: Rank, action: HookAction, mut f: impl FnMut()) {
        self.team().0.traffic.signal(dst);
        if action != HookAction::Skip {
            f();
        }
        if action == HookAction::Twice {
            f();
        }
        self.team().0.ctl.ring(dst);
        let held = lock(&self.held).take_if(|h| h.0 == dst);
        if let Some((dst, offset, bytes)) = held {
            // Late enough for the consumer to have acted on the early signal, and without holding
            // up this rank: that would hide the disorder.
            let heap = self.heap.clone();
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(30));
                heap.0.map.write(dst.idx(), offset, &bytes);
            });
        }
    }

    fn ctx<'a>(&'a self, peer: Rank, expected: u64, phase: &'a str) -> WaitCtx<'a> {
        WaitCtx { op: self.op, phase, seq: self.seq, peer, expected }
    }

    /// As [`OpCtx::wait`] for the last signal that `src` raises on this slot in this launch.
    ///
    /// # Errors
    /// As [`OpCtx::wait`], and `Protocol` if `src` has signalled more often than it may.
    pub fn wait_last(&self, src: Rank, slot: SignalSlot, n: u64, phase: &str) -> Result<()> {
        let (expected, seen) = self.wait_seen(src, slot, n, phase)?;
        // Credit-gated producers cannot run ahead, so a larger count is a signal too many.
        if seen != expected {
            return Err(self.team().fail(
                Error::new(tilewire_core::ErrorKind::Protocol, "a peer signalled too often")
                    .op(self.op)
                    .phase(phase.to_owned())
                    .seq(self.seq)
                    .rank(self.rank())
                    .peer(src)
                    .expected(expected)
                    .seen(seen),
            ));
        }
        Ok(())
    }

    /// Waits for `n` more signals of `src` on my counter `slot`.
    ///
    /// # Errors
    /// `Timeout`, `PeerDead`, `Aborted` or `Mismatch`; the team is faulted then.
    pub fn wait(&self, src: Rank, slot: SignalSlot, n: u64, phase: &str) -> Result<()> {
        self.wait_seen(src, slot, n, phase).map(|_| ())
    }

    fn wait_seen(&self, src: Rank, slot: SignalSlot, n: u64, phase: &str) -> Result<(u64, u64)> {
        self.hook(StepKind::Wait, Some(src), phase);
        let expected = self.team().expect(slot.0, src, n);
        let count = self.team().0.ctl.count(self.rank(), slot.0, src);
        self.team()
            .wait_until(
                &self.ctx(src, expected, phase),
                || protocol::reached(count, expected),
                || count.load(std::sync::atomic::Ordering::Relaxed),
            )
            .map(|seen| (expected, seen))
            .map_err(|e| self.team().fail(e))
    }

    /// Waits until `src` has stored `value`, or that of a later launch, in the word at `offset` of
    /// my own chunk.
    ///
    /// # Errors
    /// As [`OpCtx::wait`].
    pub fn wait_flag(&self, src: Rank, offset: usize, value: u64, phase: &str) -> Result<()> {
        self.wait_flagged(src, offset, value, &mut [0], phase)
    }

    /// Waits until `src` has stored `least` or more in each of the words at `offset` of my own
    /// chunk, and copies them to `out`.
    ///
    /// # Errors
    /// As [`OpCtx::wait`].
    pub fn wait_flagged(
        &self,
        src: Rank,
        offset: usize,
        least: u64,
        out: &mut [u64],
        phase: &str,
    ) -> Result<()> {
        self.hook(StepKind::Wait, Some(src), phase);
        let (team, me) = (self.team(), self.rank().idx());
        for (i, out) in out.iter_mut().enumerate() {
            let word = self.heap.0.map.word(me, offset + 8 * i);
            *out = team
                .wait_until(
                    &self.ctx(src, least, phase),
                    || protocol::flagged(word, least),
                    || word.load(std::sync::atomic::Ordering::Relaxed),
                )
                .map_err(|e| team.fail(e))?;
        }
        Ok(())
    }

    /// Waits for `src`'s grant, and checks that it was made for the launch with fingerprint `tag`.
    ///
    /// # Errors
    /// As [`OpCtx::wait`]; `Mismatch` with both ranks' words if the launches differ.
    pub fn acquire(&self, src: Rank, slot: SignalSlot, tag: u64, phase: &str) -> Result<()> {
        self.hook(StepKind::Wait, Some(src), phase);
        let expected = self.team().expect(slot.0, src, 1);
        let ctl = &self.team().0.ctl;
        let (count, word) =
            (ctl.count(self.rank(), slot.0, src), ctl.tag(self.rank(), slot.0, src));
        let ctx = self.ctx(src, expected, phase);
        let got = self
            .team()
            .wait_until(
                &ctx,
                || protocol::granted(count, word, expected),
                || count.load(std::sync::atomic::Ordering::Relaxed),
            )
            .map_err(|e| self.team().fail(e))?;
        if got != tag {
            return Err(self.team().fail(self.team().tag_mismatch(&ctx, tag, got)));
        }
        Ok(())
    }

    /// Raises the last signal of this launch on `slot`, with a word for the receiver.
    pub fn signal_word(&self, dst: Rank, slot: SignalSlot, word: u64, phase: &str) {
        self.grant(dst, slot, word, phase);
    }

    /// Waits for `src`'s [`OpCtx::signal_word`] and returns the word.
    ///
    /// # Errors
    /// As [`OpCtx::wait_last`].
    pub fn wait_word(&self, src: Rank, slot: SignalSlot, phase: &str) -> Result<u64> {
        self.wait_last(src, slot, 1, phase)?;
        let word = self.team().0.ctl.tag(self.rank(), slot.0, src);
        Ok(word.load(std::sync::atomic::Ordering::Relaxed))
    }

    /// Everybody waits for everybody on `channel`.
    ///
    /// # Errors
    /// As [`OpCtx::wait`].
    pub fn barrier(&self, channel: usize, phase: &str) -> Result<()> {
        let (team, me) = (self.team(), self.rank());
        let epoch = team.next_epoch(channel);
        for p in team.peers() {
            let action = self.hook(StepKind::Signal, Some(p), phase);
            self.raise(p, action, || protocol::arrive(team.0.ctl.inbox(p, channel, me), epoch));
        }
        for p in team.peers() {
            self.hook(StepKind::Wait, Some(p), phase);
            let inbox = team.0.ctl.inbox(me, channel, p);
            team.wait_until(
                &self.ctx(p, epoch, phase),
                || protocol::arrived(inbox, epoch).then_some(()),
                || inbox.load(std::sync::atomic::Ordering::Relaxed),
            )
            .map_err(|e| team.fail(e))?;
        }
        Ok(())
    }

    /// Copies out of my own chunk.
    pub fn read_local(&self, offset: usize, out: &mut [u8]) {
        self.heap.0.map.read(self.rank().idx(), offset, out);
    }

    /// Copies into my own chunk, for peers to get.
    pub fn write_local(&self, offset: usize, bytes: &[u8]) {
        self.heap.0.map.write(self.rank().idx(), offset, bytes);
    }

    /// Fills a range of my own chunk with zeros: flags that nobody has stored yet. No peer may use
    /// the range before it has met this rank.
    pub fn clear_local(&self, offset: usize, len: usize) {
        self.heap.0.map.fill(self.rank().idx(), offset, len, 0);
    }

    /// My own chunk, in place.
    ///
    /// # Safety
    /// All writers of the range have signalled (and were waited for), and have no credit to
    /// write again while the slice lives.
    pub unsafe fn local(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: the caller's contract is that of `Mapping::slice`.
        unsafe { self.heap.0.map.slice(self.rank().idx(), offset, len) }
    }

    /// Fills a range of my own chunk with poison, so that bytes nobody sent cannot pass for data.
    pub fn poison_local(&self, offset: usize, len: usize) {
        self.heap.0.map.fill(self.rank().idx(), offset, len, DType::POISON);
    }
}
