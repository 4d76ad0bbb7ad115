//! Slots from counts: the pure heart of expert parallelism.

use super::EpDesc;

/// A token that is sent to a rank, and its copies there: `(choice, expert-major row)`.
pub type Record = (usize, Vec<(usize, usize)>);

/// Routing of one rank: the tokens that it sends, and the rows that it will receive.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Routing {
    /// Tokens of this rank.
    pub num_tokens: usize,
    /// For each destination rank the tokens that are sent to it, once each, in order, with their
    /// copies: `(choice, expert-major row)`. It leaves out copies beyond the capacity, and tokens
    /// without any other copy.
    pub sends: Vec<Vec<Record>>,
    /// True number of copies for each of my experts, dropped ones included.
    pub counts: Vec<usize>,
    /// First row of each of my experts and the end, before clamping to the capacity.
    pub offsets: Vec<usize>,
    /// Rows in use for each of my experts, padding included, after clamping.
    pub m_splits: Vec<usize>,
    /// Copies dropped at each rank, in rank order.
    pub dropped: Vec<usize>,
}

/// Counts copies per expert. `idx[t * k + j]` is an expert, or -1.
pub fn count(desc: &EpDesc, idx: &[i64]) -> Vec<u32> {
    let mut c = vec![0; desc.num_experts()];
    for &e in idx.iter().filter(|&&e| e >= 0) {
        c[e as usize] += 1;
    }
    c
}

/// Returns the rows of `len` copies with padding.
fn aligned(len: usize, align: usize) -> usize {
    len.next_multiple_of(align)
}

/// Computes the routing of rank `me` from its own choices and the counts of all ranks
/// (`counts[rank][expert]`), for a capacity of `capacity` rows on every rank.
///
/// Expert-major: the experts of a rank in order, each starting at the aligned end of the one
/// before; inside an expert by source rank, token and choice.
pub fn route(
    desc: &EpDesc,
    me: usize,
    idx: &[i64],
    counts: &[Vec<u32>],
    capacity: usize,
) -> Routing {
    let (size, k, align) = (desc.experts_per_rank.len(), desc.top_k, desc.layout.align());
    let total = |e: usize| counts.iter().map(|c| c[e] as usize).sum::<usize>();
    // The first row of my copies of each expert, and the rank that owns the expert.
    let mut next = Vec::with_capacity(desc.num_experts());
    let mut owner = Vec::with_capacity(desc.num_experts());
    let mut r = Routing { num_tokens: idx.len() / k, ..Routing::default() };
    for rank in 0..size {
        let first = desc.first_expert(rank);
        let (mut row, mut lost) = (0, 0);
        let mut offsets = vec![0];
        for e in first..first + desc.experts_per_rank[rank] {
            let before: usize = counts[..me].iter().map(|c| c[e] as usize).sum();
            next.push(row + before);
            owner.push(rank);
            lost += (row + total(e)).saturating_sub(capacity.max(row));
            row += aligned(total(e), align);
            offsets.push(row);
        }
        r.dropped.push(lost);
        if rank == me {
            r.counts = (first..first + desc.experts_per_rank[rank]).map(total).collect();
            let clamp = |o: usize| o.min(capacity);
            r.m_splits = offsets.windows(2).map(|w| clamp(w[1]) - clamp(w[0])).collect();
            r.offsets = offsets;
        }
    }
    r.sends = vec![Vec::new(); size];
    for (t, choices) in idx.chunks_exact(k).enumerate() {
        for (j, &e) in choices.iter().enumerate().filter(|(_, e)| **e >= 0) {
            let row = next[e as usize];
            next[e as usize] += 1;
            if row >= capacity {
                continue;
            }
            let list = &mut r.sends[owner[e as usize]];
            match list.last_mut().filter(|(last, _)| *last == t) {
                Some((_, copies)) => copies.push((j, row)),
                None => list.push((t, vec![(j, row)])),
            }
        }
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::EpLayout;
    use proptest::prelude::*;
    use tilewire_oracle::ep as oracle;
    use tilewire_oracle::permute::TopK;

    proptest! {
        /// Checks that rows, counts, splits and drops are those of the oracle's layout.
        #[test]
        fn routing_is_the_oracles(
            experts in prop::collection::vec(0usize..4, 1..5),
            k in 1usize..4,
            align in 1usize..9,
            capacity in prop::option::of(0usize..30),
            seed in any::<u64>(),
        ) {
            prop_assume!(experts.iter().sum::<usize>() >= k);
            let size = experts.len();
            let mut rng = tilewire_core::Rng::new(seed);
            let tokens: Vec<usize> = (0..size).map(|_| rng.below(9) as usize).collect();
            let total = experts.iter().sum();
            let topks: Vec<TopK> =
                tokens.iter().map(|&t| TopK::random(&mut rng, (t, k), total, 0.2)).collect();
            let mut desc = EpDesc::new(size, total, 9, 4, k);
            desc.experts_per_rank = experts.clone();
            desc.layout = EpLayout::ExpertMajor { align };
            let cap = capacity.unwrap_or(desc.worst_case());
            let spec = oracle::EpSpec { experts_per_rank: experts, align, capacity: Some(cap) };
            let want = oracle::EpLayout::new(&spec, &topks);
            let counts: Vec<Vec<u32>> = topks.iter().map(|t| count(&desc, &t.idx)).collect();
            for me in 0..size {
                let got = route(&desc, me, &topks[me].idx, &counts, cap);
                prop_assert_eq!(&got.counts, &want.ranks[me].counts);
                prop_assert_eq!(&got.offsets, &want.ranks[me].offsets);
                prop_assert_eq!(got.m_splits, want.ranks[me].m_splits());
                let lost: Vec<usize> = want.ranks.iter().map(|r| r.overflow.iter().sum()).collect();
                prop_assert_eq!(&got.dropped, &lost);
                let mut slots = vec![None; tokens[me] * k];
                for (rank, list) in got.sends.iter().enumerate() {
                    for (t, copies) in list {
                        for &(j, row) in copies {
                            slots[t * k + j] = Some(oracle::Slot { rank, row });
                        }
                    }
                }
                prop_assert_eq!(&slots, &want.slots[me]);
            }
        }
    }
}
