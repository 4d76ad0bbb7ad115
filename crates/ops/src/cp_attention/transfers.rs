//! The transfers of a launch, which both executors carry out: on the host the worker of a lane, on
//! devices a stream.
//!
//! | step | by | lane |
//! |---|---|---|
//! | enter: everybody's buffers are free | executor | main |
//! | `publish` what peers get, `meet` them | all but `push_keys`, `pass_keys` | main |
//! | `push_keys`, `pass_keys` or `get_keys` | keys of other ranks | side |
//! | `get` queries of my group | where heads are traded | main |
//! | `publish` results, `meet`, `get` what is mine | where heads are traded, and backward | both |

use std::ops::Range;

use tilewire_core::{Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::CudaMemory;
use tilewire_symm::{Enter, Permit, Rows, Signals, SymBuf, Transport};

use super::config::Strategy;
use super::launch::{KEYS, RING_CREDIT};
use super::pieces::{AREA, Piece, Pieces, SCATTER, Sizes};
use super::puts::{Hop, hops};
use super::schedule::Schedule;

/// Memory of which transports read and write parts.
pub(super) trait Parts<M: ?Sized> {
    /// Returns the number of bytes.
    fn num_bytes(&self) -> usize;

    /// Calls `f` with the bytes `at`, which are in range.
    fn part(&self, at: Range<usize>, f: &mut dyn FnMut(&M) -> Result<()>) -> Result<()>;

    /// Calls `f` with the same bytes, to write.
    fn part_mut(&mut self, at: Range<usize>, f: &mut dyn FnMut(&mut M) -> Result<()>)
    -> Result<()>;
}

impl Parts<[u8]> for [u8] {
    fn num_bytes(&self) -> usize {
        self.len()
    }

    fn part(&self, at: Range<usize>, f: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        f(&self[at])
    }

    fn part_mut(
        &mut self,
        at: Range<usize>,
        f: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        f(&mut self[at])
    }
}

impl<M: ?Sized, P: Parts<M> + ?Sized> Parts<M> for Box<P> {
    fn num_bytes(&self) -> usize {
        (**self).num_bytes()
    }

    fn part(&self, at: Range<usize>, f: &mut dyn FnMut(&M) -> Result<()>) -> Result<()> {
        (**self).part(at, f)
    }

    fn part_mut(
        &mut self,
        at: Range<usize>,
        f: &mut dyn FnMut(&mut M) -> Result<()>,
    ) -> Result<()> {
        (**self).part_mut(at, f)
    }
}

impl Parts<CudaMemory> for CudaMemory {
    fn num_bytes(&self) -> usize {
        self.len_bytes()
    }

    fn part(&self, at: Range<usize>, f: &mut dyn FnMut(&CudaMemory) -> Result<()>) -> Result<()> {
        f(&self.slice(at.start, at.len())?)
    }

    fn part_mut(
        &mut self,
        at: Range<usize>,
        f: &mut dyn FnMut(&mut CudaMemory) -> Result<()>,
    ) -> Result<()> {
        f(&mut self.slice(at.start, at.len())?)
    }
}

/// Returns the slots whose flags a launch publishes once to every peer: the slot of pushed keys.
/// Each message of a ring is for one peer and needs no total in advance.
pub(super) fn flags(s: &Sizes) -> Range<usize> {
    let pushes = !s.sequential && s.strategy == Strategy::AllGather && s.size > 1;
    KEYS..KEYS + usize::from(pushes)
}

/// Puts memory to a place in the chunk of a rank.
type PutTo<'a, M> = dyn Fn((Rank, usize), &M) -> Result<()> + 'a;

/// The context of all transfers of one launch of one rank.
pub(super) struct Transfers<'a, T: Transport + ?Sized> {
    pub net: &'a T,
    pub permit: &'a Permit,
    /// Fingerprint of the launch, which credits carry on the host.
    pub tag: u64,
    pub sizes: &'a Sizes,
    pub sched: &'a Schedule,
    pub buffers: &'a [SymBuf; 4],
    pub signals: &'a Signals,
}

impl<T: Transport + ?Sized> Transfers<'_, T> {
    pub fn me(&self) -> Rank {
        self.net.heap().team().rank()
    }

    pub fn pieces(&self) -> Pieces<'_> {
        Pieces { sizes: self.sizes, sched: self.sched, me: self.me() }
    }

    /// Copies `from` to my own chunk, where peers get it behind the next meeting.
    pub fn publish<P: Parts<T::Memory> + ?Sized>(
        &self,
        lane: &T::Lane,
        buffer: usize,
        at: usize,
        from: &P,
    ) -> Result<()> {
        let len = from.num_bytes();
        if len == 0 {
            return Ok(());
        }
        let to = (self.me(), self.buffers[buffer].range(at, len));
        from.part(0..len, &mut |m| self.net.put(lane, self.permit, to, m, "own rows"))
    }

    /// Meets the peers: each rank signals every peer that it has published, and waits for the
    /// signals of all.
    pub fn meet(&self, lane: &T::Lane, slot: usize) -> Result<()> {
        let slot = self.signals.slot(slot);
        let meeting = Enter { credit: slot, tag: self.tag, first: slot, num: 0 };
        // No put uses this permit.
        self.net.enter(lane, &meeting).map(|_permit| ())
    }

    /// Gets `pieces` from a buffer of their ranks.
    pub fn get<P: Parts<T::Memory> + ?Sized>(
        &self,
        lane: &T::Lane,
        buffer: usize,
        pieces: &[Piece],
        to: &mut P,
    ) -> Result<()> {
        for p in pieces.iter().filter(|p| p.width * p.rows > 0) {
            let rows = Rows {
                width: p.width,
                num: p.rows,
                from_pitch: p.src_pitch,
                out_pitch: p.dst_pitch,
            };
            let from = self.buffers[buffer].range(p.src, rows.reach(p.src_pitch));
            to.part_mut(p.dst..p.dst + rows.reach(p.dst_pitch), &mut |m| {
                // SAFETY: every rank has published and met its peers (`meet`), and writes its area
                // again behind the meeting at the head of the next launch.
                unsafe { self.net.get_rows(lane, (p.peer, from), m, rows, "rows") }
            })?;
        }
        Ok(())
    }

    /// Publishes my keys in my own chunk, tensor by tensor, for the ranks that get them.
    pub fn publish_keys<P: Parts<T::Memory>>(&self, lane: &T::Lane, own: &[P]) -> Result<()> {
        let (buffer, at) = self.sizes.published();
        own.iter().zip(at).try_for_each(|(t, at)| self.publish(lane, buffer, at, t))
    }

    /// Gets the published keys that my group's queries see to `keys`, in dense rows; `with_own`
    /// includes my own keys.
    pub fn get_keys<P: Parts<T::Memory>>(
        &self,
        lane: &T::Lane,
        keys: &mut [P],
        with_own: bool,
    ) -> Result<()> {
        let buffer = if self.sizes.inner > 1 { SCATTER } else { AREA };
        let mut lists = self.pieces().keys();
        for (list, to) in lists.iter_mut().zip(keys) {
            list.retain(|p| with_own || p.peer != self.me());
            self.get(lane, buffer, list, to)?;
        }
        Ok(())
    }

    /// Puts the rows of my keys that a peer needs to their places in its area, a flag behind them.
    /// A peer that needs none gets the flag alone.
    pub fn push_keys<P: Parts<T::Memory>>(&self, lane: &T::Lane, own: &[P]) -> Result<()> {
        let slot = self.signals.slot(KEYS);
        for p in self.net.heap().team().peers() {
            let rows: Vec<_> = own.iter().zip(self.pieces().pushed(p.idx())).collect();
            self.put_rows(lane, (p, "keys"), &rows, &|to, m| {
                self.net.put_flag(lane, self.permit, to, m, slot, "keys")
            })?;
        }
        Ok(())
    }

    /// Puts pieces of tensors to the area of `peer`, the last one by `last`, which signals behind
    /// it. Without pieces `last` puts no bytes.
    fn put_rows<P: Parts<T::Memory>>(
        &self,
        lane: &T::Lane,
        (peer, phase): (Rank, &str),
        rows: &[(&P, Vec<Piece>)],
        last: &PutTo<'_, T::Memory>,
    ) -> Result<()> {
        let mut left: usize = rows.iter().map(|(_, pieces)| pieces.len()).sum();
        if left == 0 {
            let to = (peer, self.buffers[AREA].range(0, 0));
            return rows[0].0.part(0..0, &mut |m| last(to, m));
        }
        for (from, p) in rows.iter().flat_map(|(t, pieces)| pieces.iter().map(move |p| (t, p))) {
            let len = p.width * p.rows;
            let to = (peer, self.buffers[AREA].range(p.dst, len));
            left -= 1;
            from.part(p.src..p.src + len, &mut |m| match left {
                0 => last(to, m),
                _ => self.net.put(lane, self.permit, to, m, phase),
            })?;
        }
        Ok(())
    }

    /// Returns the places of the tensors of my keys in the area of pushed keys.
    pub fn own_places(&self) -> Vec<usize> {
        let s = self.sizes;
        let first = self.pieces().first_key(self.me().idx()) * s.all_kv;
        s.published().1.into_iter().zip(&s.wire).map(|(at, bytes)| at + first * bytes).collect()
    }

    /// Passes keys from neighbour to neighbour, store and forward. Message `t` to me has rows of
    /// the rank `t + 1` before me: those that I need, or a rank behind me that it has yet to reach.
    /// It arrives in a slot of my chunk; I copy it to its places in `keys` and send on from there,
    /// so that the slot is free as soon as the copies are made. A message without rows is a signal
    /// alone.
    pub fn pass_keys<P: Parts<T::Memory>>(
        &self,
        lane: &T::Lane,
        own: &[P],
        keys: &mut [P],
    ) -> Result<()> {
        let size = self.sizes.size;
        let rank = |i: usize| Rank::new((i % size) as u32);
        let (next, before) = (rank(self.me().idx() + 1), rank(self.me().idx() + size - 1));
        let (data, credit) = (self.signals.slot(KEYS), self.signals.slot(RING_CREDIT));
        for hop in hops(size) {
            match hop {
                Hop::Send { t, acquires } => {
                    if acquires {
                        // The permit of the launch covers the rank; this credit frees the slot.
                        let _slot =
                            self.net.acquire(lane, next, credit, self.tag, "slot credit")?;
                    }
                    let from = if t == 0 { own } else { &*keys };
                    let rows: Vec<_> = from.iter().zip(self.pieces().sent(t)).collect();
                    self.put_rows(lane, (next, "hop"), &rows, &|to, m| {
                        self.net.put_signal(lane, self.permit, to, m, data, "hop")
                    })?;
                }
                Hop::Take { t, grants } => {
                    match t + 2 == size {
                        true => self.net.wait_last(lane, before, data, 1, "hop")?,
                        false => self.net.wait(lane, before, data, 1, "hop")?,
                    }
                    for (to, pieces) in keys.iter_mut().zip(self.pieces().taken(t)) {
                        self.take(lane, &pieces, to)?;
                    }
                    if grants {
                        self.net.grant(lane, before, credit, self.tag, "slot credit")?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the pieces of a message out of its slot.
    fn take<P: Parts<T::Memory>>(
        &self,
        lane: &T::Lane,
        pieces: &[Piece],
        to: &mut P,
    ) -> Result<()> {
        pieces.iter().try_for_each(|p| {
            let len = p.width * p.rows;
            let from = (self.me(), self.buffers[AREA].range(p.src, len));
            // SAFETY: the message has arrived, and its slot is granted behind this copy.
            to.part_mut(p.dst..p.dst + len, &mut |m| unsafe { self.net.get(lane, from, m, "hop") })
        })
    }
}
