//! The rows of keys that are put to peers: by `all_gather` to each rank that needs them, by `ring`
//! to the next rank, which passes on what the ranks behind it need.

use super::pieces::{Piece, Pieces, RING_SLOTS, Span, piece};

/// One step of a rank in a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hop {
    /// Send message `t` to the next rank: of my keys, or of the keys of message `t - 1`. With
    /// `acquires` it first waits until the next rank has emptied the slot.
    Send { t: usize, acquires: bool },
    /// Wait for message `t` of the rank before me and take it out of its slot. With `grants` it
    /// then frees the slot, for which another message waits.
    Take { t: usize, grants: bool },
}

/// Returns the steps of each rank of a ring of `size`, in their order. Messages `0..size - 1`; the
/// first ones find their slots free when a launch begins. A message without rows is a step, too.
pub(super) fn hops(size: usize) -> Vec<Hop> {
    let num = size.saturating_sub(1);
    let send = |t| Hop::Send { t, acquires: t >= RING_SLOTS };
    let mut out = Vec::with_capacity(2 * num);
    out.extend((num > 0).then(|| send(0)));
    for t in 0..num {
        out.push(Hop::Take { t, grants: t + RING_SLOTS < num });
        out.extend((t + 1 < num).then(|| send(t + 1)));
    }
    out
}

impl Pieces<'_> {
    /// Returns the pieces of my keys that `all_gather` puts to the area of rank `p`, from my own
    /// tensors: the rows that its queries see.
    pub fn pushed(&self, p: usize) -> Vec<Vec<Piece>> {
        let at = self.sizes.published().1;
        let runs = self.runs(self.me.idx(), &self.sched.asked[p], p);
        self.whole_rows(&runs, |i, row, r| (r.at * row, at[i] + r.dense * row))
    }

    /// Returns the pieces of message `t` that I send in a ring: from my own tensors (`t` of 0) or
    /// from dense rows to the slot of the next rank. They are the rows of the rank `t` before me
    /// that the next rank needs, or one of those behind it that the message has yet to reach.
    pub fn sent(&self, t: usize) -> Vec<Vec<Piece>> {
        let slot = self.sizes.ring_slot(t);
        self.whole_rows(&self.passed(t, self.before_me(self.sizes.size - 1)), |i, row, r| {
            (if t == 0 { r.at } else { r.dense } * row, slot[i] + r.at * row)
        })
    }

    /// Returns the pieces of message `t` to me of a ring: from its slot, which is mine, to dense
    /// rows. They are what the rank before me sends.
    pub fn taken(&self, t: usize) -> Vec<Vec<Piece>> {
        let slot = self.sizes.ring_slot(t);
        self.whole_rows(&self.passed(t + 1, self.me.idx()), |i, row, r| {
            (slot[i] + r.at * row, r.dense * row)
        })
    }

    /// Returns the rank that is `n` before me in a ring.
    fn before_me(&self, n: usize) -> usize {
        (self.me.idx() + self.sizes.size - n) % self.sizes.size
    }

    /// Returns the rows of the rank `n` before me that travel to rank `to` of a ring.
    fn passed(&self, n: usize, to: usize) -> Vec<Span> {
        let owner = self.before_me(n);
        self.runs(owner, &self.sched.passed(owner, to), to)
    }

    /// Returns, for each tensor of keys, pieces of whole rows for `runs`; `ends(i, row, run)` says
    /// where a run of tensor `i`, whose rows have `row` bytes, comes from and goes to.
    fn whole_rows(
        &self,
        runs: &[Span],
        ends: impl Fn(usize, usize, &Span) -> (usize, usize),
    ) -> Vec<Vec<Piece>> {
        let tensor = |(i, bytes): (usize, &usize)| {
            let row = self.sizes.all_kv * bytes;
            let one = |r: &Span| {
                let (src, dst) = ends(i, row, r);
                piece(r, (src, row, 0), (dst, row, 0)).wide(row)
            };
            runs.iter().map(one).collect()
        };
        self.sizes.wire.iter().enumerate().map(tensor).collect()
    }
}

#[cfg(test)]
#[path = "puts_tests.rs"]
mod tests;
