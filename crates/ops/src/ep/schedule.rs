//! The schedule of expert parallelism: the layout of a layer's symmetric memory and the order in
//! which records arrive there, for the host and for devices.
//!
//! The data of token t of rank s is at record `s * max_tokens + t` of an area, on every rank and
//! whatever the routing, so that neither numbers nor places travel. Every word that a peer waits
//! for carries the number of its launch, so that nothing is cleared between launches. Kernels have
//! the addresses and strides of `device/areas.rs` and the index arithmetic of
//! `kernels/src/ep/layer.cuh`; `both_executors_leave_the_same_bytes` of `tests/gpu/layouts.rs`
//! compares their results with the bytes that the host writes by the functions below.

use std::ops::Range;

use tilewire_kernels::portable::{EP_MOVERS, EP_RETURN_TOKENS};

use super::EpDesc;

/// Chunks of a rank's rows that a dispatch sends, about.
const SEND_CHUNKS: usize = 1024;
/// Pairs of chunk and rank that a combine returns, about: several for each warp.
const RETURN_CHUNKS: usize = 1024;

/// The cut of a rank's rows: a chunk of tokens arrives as a whole, and warps share its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub chunk: usize,
    pub slices: usize,
    pub chunks: usize,
}

impl Cut {
    fn of(d: &EpDesc, chunk: usize, slices: usize) -> Self {
        // Parts of a kilobyte or more.
        let most = (d.hidden * d.out.size() / 1024).clamp(1, 8);
        let chunks = d.max_tokens.div_ceil(chunk).max(1);
        Self { chunk, slices: slices.clamp(1, most), chunks }
    }

    /// Returns the cut of a dispatch. One warp sends a chunk, and warps lay it out. With few tokens
    /// a chunk is one token, and several warps share a row.
    pub fn push(d: &EpDesc) -> Self {
        let chunk = d.max_tokens.div_ceil(SEND_CHUNKS).max(1);
        let warps = 116 * EP_MOVERS as usize / 32;
        let parts = d.max_tokens.div_ceil(chunk).max(1) * d.experts_per_rank.len();
        Self::of(d, chunk, warps / parts)
    }

    /// Returns the cut of a combine: small chunks, so that they return in order and are added while
    /// later ones travel. In the portable kernel a block returns one chunk, and its warps share
    /// rows if there are few.
    pub fn returns(d: &EpDesc) -> Self {
        let pairs = d.max_tokens * d.experts_per_rank.len();
        let chunk = pairs.div_ceil(RETURN_CHUNKS).clamp(1, EP_RETURN_TOKENS as usize);
        Self::of(d, chunk, 32usize.div_ceil(chunk))
    }

    /// Returns the cut of the host, one chunk for all tokens of a rank: its one worker sends
    /// everything before it waits for records.
    pub fn whole(d: &EpDesc) -> Self {
        Self { chunk: d.max_tokens.max(1), slices: 1, chunks: 1 }
    }

    /// Returns the tokens of chunk `c`, of `tokens` in all.
    pub fn tokens(&self, c: usize, tokens: usize) -> Range<usize> {
        let at = |c: usize| (c * self.chunk).min(tokens);
        at(c)..at(c + 1)
    }
}

/// Areas whose records arrive chunk by chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Area {
    Tokens,
    Returns,
}

/// A copy of a token, as it is in the metadata. The copies of a record are its first ones, as many
/// as carry the number of this launch; the ones behind them are of earlier launches.
#[derive(Clone, Copy, PartialEq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Copy16 {
    pub choice: i32,
    pub row: i32,
    pub weight: f32,
    /// Number of the launch, its lower half.
    pub stamp: u32,
}

const COPY: usize = size_of::<Copy16>();
const _: () = assert!(COPY == 16, "as `TwCopy` of the kernels");

/// Bytes from record to record: of the metadata (copies and scales), of the rows, and of the
/// returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Strides {
    pub meta: usize,
    pub row: usize,
    pub returns: usize,
}

/// Returns the strides: multiples of 16, so that rows are copied in units of 16 bytes.
pub(super) fn strides(d: &EpDesc) -> Strides {
    let up = |bytes: usize| bytes.next_multiple_of(16);
    Strides {
        meta: up(COPY * d.top_k + 4 * d.num_scales),
        row: up(d.hidden * d.dtype.size().max(d.out.size())),
        returns: up(up(d.hidden * d.out.size()) + 4 * d.top_k),
    }
}

/// Places in the buffers of a layer, in bytes from the beginning of each, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    size: usize,
    max_tokens: usize,
    experts: usize,
    top_k: usize,
    strides: Strides,
    flags: usize,
}

impl Schedule {
    pub fn new(d: &EpDesc) -> Self {
        let size = d.experts_per_rank.len();
        // Arrivals of the finest cut; the host's has fewer.
        let chunks = Cut::push(d).chunks.max(Cut::returns(d).chunks);
        Self {
            size,
            max_tokens: d.max_tokens,
            experts: d.num_experts(),
            top_k: d.top_k,
            strides: strides(d),
            flags: size * (2 + chunks) * 8,
        }
    }

    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    /// Returns the number of records of an area.
    pub fn records(&self) -> usize {
        self.size * self.max_tokens
    }

    /// Returns the number of the record of token `token` of rank `src`.
    pub fn record(&self, src: usize, token: usize) -> usize {
        src * self.max_tokens + token
    }

    /// Returns the place of the counts of `writer` in launch `launch`, a word for each expert: two
    /// buffers in turn. A rank that writes the counts of the next launch has those of all ranks of
    /// this one, so all ranks have read the counts of the launch before.
    pub fn counts(&self, launch: u64, writer: usize) -> usize {
        ((launch & 1) as usize * self.size + writer) * self.count_bytes()
    }

    /// Returns the bytes of one rank's counts.
    pub fn count_bytes(&self) -> usize {
        8 * self.experts
    }

    /// Returns the bytes of the buffer of counts.
    pub fn counts_len(&self) -> usize {
        2 * self.size * self.count_bytes()
    }

    /// Returns the place of a record's row in the buffer of tokens.
    pub fn row(&self, record: usize) -> usize {
        record * self.strides.row
    }

    /// Returns the place of a record's copies, behind the rows of all records.
    pub fn meta(&self, record: usize) -> usize {
        self.row(self.records()) + record * self.strides.meta
    }

    /// Returns the place of a record's scales, behind its copies.
    pub fn scales(&self, record: usize) -> usize {
        self.meta(record) + COPY * self.top_k
    }

    /// Returns the bytes of the buffer of tokens.
    pub fn tokens_len(&self) -> usize {
        self.meta(self.records())
    }

    /// Returns the place of the row that answers a record, in the buffer of returns of the rank
    /// that sent the record.
    pub fn returned(&self, record: usize) -> usize {
        record * self.strides.returns
    }

    /// Returns the place of the gradients of weights, at the end of a record that returns.
    pub fn grads(&self, record: usize) -> usize {
        self.returned(record + 1) - 4 * self.top_k
    }

    /// Returns the bytes of the buffer of returns.
    pub fn returns_len(&self) -> usize {
        self.returned(self.records())
    }

    /// Returns the bytes of the flags of one area.
    pub fn flags_of_area(&self) -> usize {
        self.flags
    }

    /// Returns the bytes of all flags.
    pub fn flags_len(&self) -> usize {
        2 * self.flags
    }

    fn flag(&self, area: Area, word: usize) -> usize {
        usize::from(area == Area::Returns) * self.flags + 8 * word
    }

    /// Returns the place of the credit of `writer`: the last launch whose records it has read.
    /// Behind the credits are the numbers of launch and receive buffer of each rank, which devices
    /// use; on the host the fingerprint of the launch covers both.
    pub fn credit(&self, area: Area, writer: usize) -> usize {
        self.flag(area, writer)
    }

    /// Returns the place of the arrival of chunk `c` of `writer`.
    pub fn arrival(&self, area: Area, cut: &Cut, writer: usize, c: usize) -> usize {
        self.flag(area, 2 * self.size + writer * cut.chunks + c)
    }

    /// Returns all ranks from the next one on, `me` last: the order in which writers visit them.
    pub fn ranks(&self, me: usize) -> impl Iterator<Item = usize> + use<> {
        let size = self.size;
        (1..=size).map(move |i| (me + i) % size)
    }

    /// Returns `(chunk, rank)` in the order in which a rank returns and receives them.
    pub fn visits(&self, me: usize, cut: &Cut) -> impl Iterator<Item = (usize, usize)> + use<> {
        let this = *self;
        (0..cut.chunks).flat_map(move |c| this.ranks(me).map(move |r| (c, r)))
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::Team;

    use super::*;
    use crate::ep::EpLayout;

    /// Checks that every token is in a chunk, that no chunk is larger than the kernels can hold,
    /// and that its flags are within their area, for up to the most ranks of a team.
    #[test]
    fn cuts_hold_every_token_and_have_flags() {
        for size in [1, 2, 3, 5, 8, 16, 33, Team::MAX_SIZE] {
            for tokens in [0, 1, 7, 128, 1023, 4096, 65_536, 1 << 20] {
                for hidden in [1, 512, 7168] {
                    let d = EpDesc::new(size, 2 * size, tokens, hidden, 8);
                    let (s, back) = (Schedule::new(&d), Cut::returns(&d));
                    for c in [Cut::push(&d), back, Cut::whole(&d)] {
                        assert!(c.chunk >= 1 && c.slices >= 1 && c.chunks >= 1, "{d}");
                        assert!((c.chunks - 1) * c.chunk <= tokens && tokens <= c.chunks * c.chunk);
                        let ends = [c.tokens(0, tokens).start, c.tokens(c.chunks - 1, tokens).end];
                        assert_eq!(ends, [0, tokens], "{d}");
                        let last = s.arrival(Area::Tokens, &c, size - 1, c.chunks - 1) + 8;
                        assert!(last <= s.flags_of_area(), "{d}: flags");
                    }
                    assert!(back.chunk <= EP_RETURN_TOKENS as usize, "{d}: a list of a chunk");
                }
            }
        }
    }

    /// Checks that no two places of a layer overlap, that none is outside of its buffer, and that
    /// all are aligned.
    #[test]
    fn places_are_apart() {
        for (k, num_scales, hidden) in [(1, 0, 5), (2, 1, 12), (8, 56, 7), (32, 0, 3)] {
            let mut d = EpDesc::new(3, 7, 4, hidden, k);
            (d.num_scales, d.layout) = (num_scales, EpLayout::RankMajor { align: 128 });
            let s = Schedule::new(&d);
            let records = || (0..3).flat_map(|r| (0..4).map(move |t| s.record(r, t)));
            let apart = |mut places: Vec<(usize, usize)>, len: usize, align: usize| {
                places.sort_unstable();
                assert!(places.iter().all(|p| p.0 % align == 0), "{d}");
                assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{d}");
                assert!(places.last().is_some_and(|p| p.0 + p.1 <= len), "{d}");
            };
            let rows = records().map(|r| (s.row(r), 4 * hidden));
            let metas = records().map(|r| (s.meta(r), 16 * k));
            apart(rows.chain(metas).collect(), s.tokens_len(), 16);
            let scales = records().map(|r| (s.scales(r), 4 * num_scales));
            let metas = records().map(|r| (s.meta(r), 16 * k));
            apart(scales.chain(metas).collect(), s.tokens_len(), 4);
            let back = records().map(|r| (s.returned(r), 4 * hidden));
            let grads = records().map(|r| (s.grads(r), 4 * k));
            apart(back.chain(grads).collect(), s.returns_len(), 4);
            let counts = (0..2).flat_map(|n| (0..3).map(move |w| (s.counts(n, w), 8 * 7)));
            apart(counts.collect(), s.counts_len(), 8);
            let cut = Cut::push(&d);
            let mut flags = Vec::new();
            for area in [Area::Tokens, Area::Returns] {
                for w in 0..3 {
                    flags.push((s.credit(area, w), 8));
                    flags.extend((0..4).map(|c| (s.arrival(area, &cut, w, c), 8)));
                }
            }
            apart(flags, s.flags_len(), 8);
        }
    }

    #[test]
    fn each_chunk_of_each_rank_is_visited_once_and_mine_last() {
        let d = EpDesc::new(5, 5, 6, 4, 1);
        let s = Schedule::new(&d);
        for me in 0..5 {
            let visits: Vec<_> = s.visits(me, &Cut::push(&d)).collect();
            assert_eq!(visits[0], (0, (me + 1) % 5));
            assert_eq!(visits[4], (0, me));
            let mut all = visits;
            all.sort_unstable();
            let want: Vec<_> = (0..6).flat_map(|c| (0..5).map(move |r| (c, r))).collect();
            assert_eq!(all, want);
        }
    }
}
