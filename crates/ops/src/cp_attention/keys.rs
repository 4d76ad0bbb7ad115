//! How keys and values of all ranks reach this one, on devices.

use tilewire_core::{Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::CudaMemory;

use super::config::Strategy;
use super::cuda::{KEYS, MEET_KEYS, RING_CREDIT, Run};
use super::pieces::{AREA, Hop, hops};

impl Run<'_> {
    /// My keys to my own chunk, for whoever gets them.
    pub(super) fn publish_keys(&self) -> Result<()> {
        let (buffer, at) = self.s.published();
        let own = self.own_keys()?;
        own.iter().zip(at).try_for_each(|(t, at)| self.publish(buffer, at, t))
    }

    /// Gets what was published to memory of mine, on the copy stream.
    pub(super) fn get_keys(&self, buffer: usize) -> Result<()> {
        let lists = self.pieces().keys();
        let to = &self.op.p.memory.keys;
        lists.iter().zip(to).try_for_each(|(p, to)| self.get_on(self.l.side, buffer, p, to))
    }

    /// Begins to bring the keys of others, on the copy stream.
    pub(super) fn begin_keys(&self, backward: bool) -> Result<()> {
        match self.s.strategy {
            Strategy::AllGather => self.push_keys(backward),
            Strategy::Ring => self.pass_keys(backward),
            _ => {
                self.publish_keys()?;
                self.meet(MEET_KEYS)?;
                self.l.fork()?;
                self.get_keys(AREA)
            }
        }
    }

    /// My keys to everybody, and in the backward pass to their place among all.
    fn push_keys(&self, backward: bool) -> Result<()> {
        let (s, op, l) = (self.s, self.op, self.l);
        let first = self.pieces().first_key(self.me().idx()) * s.all_kv;
        let (own, places) = (self.own_keys()?, s.published().1);
        let to = |i: usize| places[i] + first * s.wire[i];
        let last = own.len() - 1;
        for p in op.core.team().peers() {
            for (i, t) in own.iter().enumerate() {
                let at = op.buffers[AREA].range(to(i), t.len_bytes());
                if i == last {
                    let slot = op.signals.slot(KEYS);
                    l.net.put_flag(l.side, &l.permit, (p, at), t, slot, "keys")?;
                } else if t.len_bytes() > 0 {
                    l.net.put(l.side, &l.permit, (p, at), t, "keys")?;
                }
            }
        }
        if !backward {
            return Ok(());
        }
        own.iter().enumerate().try_for_each(|(i, t)| self.publish(AREA, to(i), t))
    }

    /// Keys from neighbour to neighbour, store and forward: message `t` to me is the keys of the rank
    /// `t + 1` before me. It comes to a slot of my chunk, from where it is copied to its place among
    /// all, and sent on from there: the slot is free as soon as it is copied.
    fn pass_keys(&self, backward: bool) -> Result<()> {
        let (l, op, size) = (self.l, self.op, self.s.size);
        let rank = |i: usize| Rank::new((i % size) as u32);
        let (next, before) = (rank(self.me().idx() + 1), rank(self.me().idx() + size - 1));
        let (data, credit) = (op.signals.slot(KEYS), op.signals.slot(RING_CREDIT));
        let own = self.own_keys()?;
        let at = |t: usize| -> Result<Vec<CudaMemory>> { self.dense(self.pieces().ring_rows(t)) };
        for hop in hops(size) {
            match hop {
                Hop::Send { t, acquires } => {
                    if acquires {
                        // The permit of the launch covers the rank; this credit frees the slot.
                        let _slot = l.net.acquire(l.side, next, credit, 0, "slot credit")?;
                    }
                    let from = if t == 0 { own.clone() } else { at(t - 1)? };
                    for (i, (m, to)) in from.iter().zip(self.s.ring_slot(t)).enumerate() {
                        let to = (next, op.buffers[AREA].range(to, m.len_bytes()));
                        if i + 1 == from.len() {
                            l.net.put_signal(l.side, &l.permit, to, m, data, "hop")?;
                        } else if m.len_bytes() > 0 {
                            l.net.put(l.side, &l.permit, to, m, "hop")?;
                        }
                    }
                }
                Hop::Take { t, grants } => {
                    l.net.wait(l.side, before, data, 1, "hop")?;
                    for (m, from) in at(t)?.iter_mut().zip(self.s.ring_slot(t)) {
                        if m.len_bytes() > 0 {
                            let from = op.buffers[AREA].range(from, m.len_bytes());
                            // SAFETY: the message has come, and its slot is granted behind this
                            // copy.
                            unsafe { l.net.get(l.side, (self.me(), from), m, "hop")? };
                        }
                    }
                    if grants {
                        l.net.grant(l.side, before, credit, 0, "slot credit")?;
                    }
                }
            }
        }
        if !backward {
            return Ok(());
        }
        let first = self.pieces().first_key(self.me().idx());
        let place = self.dense(first..first + op.rows.kv)?;
        place.iter().zip(&own).try_for_each(|(to, from)| l.side.copy_memory(to, from))
    }

    /// Those rows of the keys of all ranks.
    fn dense(&self, rows: std::ops::Range<usize>) -> Result<Vec<CudaMemory>> {
        let row = |bytes: &usize| self.s.hkv * bytes;
        let part =
            |(m, b): (&CudaMemory, &usize)| m.slice(rows.start * row(b), rows.len() * row(b));
        self.op.p.memory.keys.iter().zip(&self.s.wire).map(part).collect()
    }

    /// What comes from here on finds the keys of all ranks at the addresses that it returns,
    /// as the kernels read them.
    pub(super) fn end_keys(&self) -> Result<(u64, u64)> {
        let (s, m) = (self.s, &self.op.p.memory);
        if s.strategy != Strategy::AllGather {
            self.l.join()?;
            let at: Vec<u64> = m.keys.iter().map(CudaMemory::addr).collect();
            return self.wide_keys(&at);
        }
        self.l.net.wait_peers(self.main(), self.op.signals.slot(KEYS), "keys")?;
        let (places, keys) = (s.published().1, s.all_keys() * s.all_kv);
        let addr = |(at, bytes): (usize, &usize)| self.own(AREA, at, keys * bytes);
        let at = places.into_iter().zip(&s.wire).map(addr).collect::<Result<Vec<_>>>()?;
        self.wide_keys(&at)
    }
}
