//! Expert parallelism: who sends which token where, and what arrives.
//!
//! The tokens of the global batch come in blocks, one for each rank (of any size, 0 too), and the
//! experts come in blocks, one for each rank (uneven, 0 too). The layout follows from the counts of
//! all source ranks alone (research notes, EP §5.2); nothing depends on timing.

mod copies;
mod data;

use std::ops::Range;

pub use copies::{
    FlatRank, TokenCopies, combine_copies, combine_copies_at, flat, gather_copies, rank_major,
};
pub use data::{
    CombineGrads, DispatchGrads, combine, combine_at, combine_bwd, combine_bwd_at, dispatch,
    dispatch_bwd, dispatch_to, dispatch_weights,
};

use crate::permute::{TopK, align_up};

/// The layout of experts and buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpSpec {
    /// Experts of each rank; global expert numbers run over the ranks in order.
    pub experts_per_rank: Vec<usize>,
    /// Rows of each expert are padded to a multiple of this.
    pub align: usize,
    /// Rows of each receive buffer; none sizes each buffer exactly.
    pub capacity: Option<usize>,
}

impl EpSpec {
    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.experts_per_rank.len()
    }

    /// Number of experts of all ranks.
    pub fn num_experts(&self) -> usize {
        self.experts_per_rank.iter().sum()
    }

    /// Global experts of rank `rank`.
    ///
    /// # Panics
    /// If `rank` is not a rank.
    pub fn experts_of(&self, rank: usize) -> Range<usize> {
        let first = self.experts_per_rank[..rank].iter().sum();
        first..first + self.experts_per_rank[rank]
    }

    /// Rank that owns `expert`.
    ///
    /// # Panics
    /// If `expert` is not an expert.
    pub fn owner(&self, expert: usize) -> usize {
        assert!(expert < self.num_experts(), "expert {expert} of {}", self.num_experts());
        // As many ranks come before it as have all their experts before it.
        (0..self.num_ranks()).take_while(|&r| self.experts_of(r).end <= expert).count()
    }
}

/// One copy of a token: choice `choice` of token `token` of source rank `src`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// Source rank.
    pub src: usize,
    /// Token, counted within the source rank.
    pub token: usize,
    /// Position among the token's choices.
    pub choice: usize,
}

/// Place of a copy: row `row` of the receive buffer of rank `rank`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// Destination rank.
    pub rank: usize,
    /// Row of its expert-major buffer.
    pub row: usize,
}

/// Expert-major receive buffer of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpRank {
    /// Global experts of the rank; "local expert" counts from its start.
    pub experts: Range<usize>,
    /// True number of copies routed to each local expert, dropped ones included.
    pub counts: Vec<usize>,
    /// First row of each local expert and the end, before clamping to the capacity, `[L + 1]`.
    pub offsets: Vec<usize>,
    /// Copies of each local expert that were dropped.
    pub overflow: Vec<usize>,
    /// The origin of each row of the buffer; none in padding and unused rows.
    pub rows: Vec<Option<Origin>>,
}

impl EpRank {
    /// Rows of each local expert that lie in the buffer, padding included: the `m_splits` of the
    /// grouped GEMM.
    pub fn m_splits(&self) -> Vec<usize> {
        let cap = self.rows.len();
        self.offsets.windows(2).map(|w| w[1].min(cap) - w[0].min(cap)).collect()
    }

    /// Copies routed to the rank, dropped ones included.
    pub fn total_true(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Rows needed to drop nothing, padding included.
    pub fn total_padded(&self) -> usize {
        self.offsets.iter().fold(0, |_, &end| end)
    }
}

/// The destination of every copy of every token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpLayout {
    /// Choices of each token.
    pub k: usize,
    /// Tokens of each source rank.
    pub tokens: Vec<usize>,
    /// `counts[src][expert]`: the count exchange, with global expert numbers.
    pub counts: Vec<Vec<usize>>,
    /// Receive buffer of each rank.
    pub ranks: Vec<EpRank>,
    /// `slots[src][token * k + choice]`; none if masked or dropped.
    pub slots: Vec<Vec<Option<Slot>>>,
}

impl EpLayout {
    /// Lays out the copies; `topks[s]` are the choices of the tokens of rank `s`.
    ///
    /// Expert-major: local experts in order, each starting at the aligned end of the one before.
    /// Inside an expert the order is source rank, token, choice. A copy whose row would be at or
    /// beyond the capacity is dropped: it has no slot, and is counted in `overflow`.
    ///
    /// # Panics
    /// If there is not one [`TopK`] for each rank, `k` differs, an index is not an expert, or the
    /// alignment is 0.
    pub fn new(spec: &EpSpec, topks: &[TopK]) -> Self {
        assert_eq!(topks.len(), spec.num_ranks(), "one set of choices for each rank");
        let k = topks.first().map_or(0, |t| t.k);
        assert!(topks.iter().all(|t| t.k == k), "the ranks choose different numbers of experts");
        let mut slots: Vec<_> = topks.iter().map(|t| vec![None; t.num_tokens * k]).collect();
        let ranks: Vec<_> =
            (0..spec.num_ranks()).map(|rank| lay_out_rank(spec, topks, rank)).collect();
        for (rank, dest) in ranks.iter().enumerate() {
            for (row, origin) in dest.rows.iter().enumerate() {
                if let Some(o) = origin {
                    slots[o.src][o.token * k + o.choice] = Some(Slot { rank, row });
                }
            }
        }
        Self {
            k,
            tokens: topks.iter().map(|t| t.num_tokens).collect(),
            counts: topks.iter().map(|t| t.counts(spec.num_experts())).collect(),
            ranks,
            slots,
        }
    }

    /// Place of a copy; none if masked or dropped.
    ///
    /// # Panics
    /// If out of range.
    pub fn slot(&self, o: Origin) -> Option<Slot> {
        assert!(o.token < self.tokens[o.src] && o.choice < self.k, "{o:?}");
        self.slots[o.src][o.token * self.k + o.choice]
    }

    /// Copies dropped on all ranks.
    pub fn total_dropped(&self) -> usize {
        self.ranks.iter().flat_map(|r| &r.overflow).sum()
    }
}

fn lay_out_rank(spec: &EpSpec, topks: &[TopK], rank: usize) -> EpRank {
    let experts = spec.experts_of(rank);
    let (mut counts, mut offsets, mut overflow) = (Vec::new(), vec![0], Vec::new());
    let mut rows: Vec<Option<Origin>> = Vec::new();
    for (local, e) in experts.clone().enumerate() {
        let copies = copies_of(topks, e);
        let end = offsets[local] + align_up(copies.len(), spec.align);
        let capacity = spec.capacity.map_or(copies.len(), |cap| cap.saturating_sub(offsets[local]));
        counts.push(copies.len());
        overflow.push(copies.len().saturating_sub(capacity));
        rows.extend(copies.into_iter().map(Some));
        rows.resize(end, None);
        offsets.push(end);
    }
    if let Some(cap) = spec.capacity {
        rows.resize(cap, None);
    }
    EpRank { experts, counts, offsets, overflow, rows }
}

/// The copies that choose `expert`, by source rank, token and choice.
fn copies_of(topks: &[TopK], expert: usize) -> Vec<Origin> {
    let mut copies = Vec::new();
    for (src, topk) in topks.iter().enumerate() {
        for token in 0..topk.num_tokens {
            for choice in 0..topk.k {
                if topk.expert(token, choice) == Some(expert) {
                    copies.push(Origin { src, token, choice });
                }
            }
        }
    }
    copies
}
