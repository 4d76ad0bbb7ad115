use proptest::prelude::*;
use tilewire_oracle::ep::{EpLayout, EpSpec, Origin, Slot, flat, rank_major};
use tilewire_oracle::permute::{Permutation, TopK};

use crate::rng;

/// A random problem: uneven experts and tokens, both possibly 0 on a rank.
pub fn problem(
    seed: u64,
    num_ranks: usize,
    align: usize,
    capacity: Option<usize>,
) -> (EpSpec, Vec<TopK>) {
    let mut r = rng(seed);
    let mut experts_per_rank: Vec<usize> = (0..num_ranks).map(|_| r.below(4) as usize).collect();
    experts_per_rank[seed as usize % num_ranks] += 2;
    let spec = EpSpec { experts_per_rank, align, capacity };
    let k = 1 + r.below(2 + spec.num_experts() as u64 / 2) as usize;
    let k = k.min(spec.num_experts());
    let topks = (0..num_ranks)
        .map(|_| {
            let tokens = r.below(8) as usize * r.below(2) as usize;
            TopK::random(&mut r, (tokens, k), spec.num_experts(), 0.15)
        })
        .collect();
    (spec, topks)
}

#[test]
fn layout_by_hand() {
    // Rank 0 owns expert 0, rank 1 none, rank 2 experts 1 and 2. Ranks have 2, 1 and 0 tokens.
    let spec = EpSpec { experts_per_rank: vec![1, 0, 2], align: 2, capacity: Some(4) };
    assert_eq!([0, 1, 2].map(|e| spec.owner(e)), [0, 2, 2]);
    let topks =
        [TopK::new(2, 2, vec![2, 0, 1, 2]), TopK::new(1, 2, vec![2, -1]), TopK::new(0, 2, vec![])];
    let layout = EpLayout::new(&spec, &topks);
    assert_eq!(layout.counts, [vec![1, 1, 2], vec![0, 0, 1], vec![0, 0, 0]]);
    let o = |src, token, choice| Some(Origin { src, token, choice });
    assert_eq!(layout.ranks[0].rows, [o(0, 0, 1), None, None, None]);
    assert_eq!(layout.ranks[1].rows, [None; 4]);
    // Expert 1 takes rows 0..2, expert 2 needs rows 2..6 but only 2 and 3 exist.
    assert_eq!(layout.ranks[2].rows, [o(0, 1, 0), None, o(0, 0, 0), o(0, 1, 1)]);
    let last = &layout.ranks[2];
    assert_eq!((&last.counts[..], &last.offsets[..]), (&[1, 3][..], &[0, 2, 6][..]));
    assert_eq!((&last.overflow[..], &last.m_splits()[..]), (&[0, 1][..], &[2, 2][..]));
    assert_eq!((last.total_true(), last.total_padded(), layout.total_dropped()), (4, 6, 1));
    assert_eq!(layout.slots[1], [None, None], "dropped, and masked");
    assert_eq!(layout.slots[0][2], Some(Slot { rank: 2, row: 0 }));
}

/// The slot formula of the count exchange, step by step (research notes, EP §5.2 (c), (d)).
fn slot_by_counts(spec: &EpSpec, topks: &[TopK], layout: &EpLayout, o: Origin) -> Option<Slot> {
    let e = topks[o.src].expert(o.token, o.choice)?;
    let rank = spec.owner(e);
    let column = |e: usize| layout.counts.iter().map(|row| row[e]).sum::<usize>();
    let mut off = 0;
    for before in spec.experts_of(rank).start..e {
        off += column(before).next_multiple_of(spec.align);
    }
    let base = off + layout.counts[..o.src].iter().map(|row| row[e]).sum::<usize>();
    let mut position = 0;
    for t in 0..=o.token {
        let choices = if t == o.token { o.choice } else { layout.k };
        position += (0..choices).filter(|&j| topks[o.src].expert(t, j) == Some(e)).count();
    }
    let row = base + position;
    (spec.capacity.is_none_or(|cap| row < cap)).then_some(Slot { rank, row })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    #[test]
    fn slots_follow_from_the_counts(
        seed: u64, num_ranks in 1usize..6, align in prop::sample::select(vec![1usize, 2, 8]),
        capacity in prop::option::of(0usize..24),
    ) {
        let (spec, topks) = problem(seed, num_ranks, align, capacity);
        let layout = EpLayout::new(&spec, &topks);
        let (mut placed, mut dropped) = (0, vec![0; spec.num_experts()]);
        for (src, topk) in topks.iter().enumerate() {
            for token in 0..topk.num_tokens {
                for choice in 0..topk.k {
                    let o = Origin { src, token, choice };
                    let slot = layout.slot(o);
                    prop_assert_eq!(slot, slot_by_counts(&spec, &topks, &layout, o));
                    match (slot, topk.expert(token, choice)) {
                        (Some(s), Some(_)) => {
                            prop_assert_eq!(layout.ranks[s.rank].rows[s.row], Some(o));
                            placed += 1;
                        }
                        (None, Some(e)) => dropped[e] += 1,
                        (slot, None) => prop_assert_eq!(slot, None),
                    }
                }
            }
        }
        // A bijection: as many rows are taken as copies were placed.
        let taken: usize = layout.ranks.iter().map(|r| r.rows.iter().flatten().count()).sum();
        prop_assert_eq!(placed, taken);
        let overflow: Vec<usize> = layout.ranks.iter().flat_map(|r| r.overflow.clone()).collect();
        prop_assert_eq!(&overflow, &dropped);
        if capacity.is_none() {
            prop_assert_eq!(layout.total_dropped(), 0);
        }
        for rank in &layout.ranks {
            prop_assert_eq!(rank.rows.len(), capacity.unwrap_or(rank.total_padded()));
            prop_assert!(rank.offsets.iter().all(|o| o % align == 0));
            let in_buffer = rank.total_padded().min(rank.rows.len());
            prop_assert_eq!(rank.m_splits().iter().sum::<usize>(), in_buffer);
        }
    }

    #[test]
    fn one_rank_is_the_local_permutation(seed: u64, align in 1usize..9) {
        let (spec, topks) = problem(seed, 1, align, None);
        let layout = EpLayout::new(&spec, &topks);
        let p = Permutation::new(&topks[0], spec.num_experts(), align);
        let rows: Vec<_> =
            layout.ranks[0].rows.iter().map(|r| r.map(|o| (o.token, o.choice))).collect();
        prop_assert_eq!(rows, p.sources.clone());
        prop_assert_eq!(layout.ranks[0].m_splits(), p.padded());
        let slots: Vec<_> = layout.slots[0].iter().map(|s| s.map(|s| s.row)).collect();
        prop_assert_eq!(slots, p.slots);
    }

    #[test]
    fn flat_and_rank_major_hold_each_token_once(
        seed: u64, num_ranks in 1usize..6, capacity in prop::option::of(4usize..24),
    ) {
        let (spec, topks) = problem(seed, num_ranks, 4, capacity);
        let layout = EpLayout::new(&spec, &topks);
        for (rank, (f, dest)) in flat(&layout).iter().zip(&layout.ranks).enumerate() {
            prop_assert_eq!(f.row_index.len(), dest.rows.len());
            let mut choices = 0;
            for (index, row) in f.row_index.iter().zip(&dest.rows) {
                prop_assert_eq!(index.is_some(), row.is_some());
                if let (Some(i), Some(o)) = (index, row) {
                    let copies = f.rows[*i].as_ref().unwrap();
                    prop_assert_eq!((copies.src, copies.token), (o.src, o.token));
                    prop_assert!(copies.choices.contains(&o.choice), "rank {}", rank);
                    choices += 1;
                }
            }
            let listed: usize = f.rows.iter().flatten().map(|c| c.choices.len()).sum();
            prop_assert_eq!(choices, listed);
            let keys: Vec<_> = f.rows.iter().flatten().map(|c| (c.src, c.token)).collect();
            prop_assert!(keys.windows(2).all(|w| w[0] < w[1]), "sorted and distinct");
        }
        let t_max = 8;
        let whole = EpLayout::new(&EpSpec { capacity: None, ..spec.clone() }, &topks);
        for (rank, (rows, f)) in rank_major(&spec, &topks, t_max).iter().zip(flat(&whole)).enumerate() {
            prop_assert_eq!(rows.len(), num_ranks * t_max);
            for (i, copies) in rows.iter().enumerate() {
                if let Some(c) = copies {
                    prop_assert_eq!(i, c.src * t_max + c.token, "rank {}", rank);
                }
            }
            // Without drops the occupied slots are the flat rows.
            let occupied: Vec<_> = rows.iter().flatten().cloned().map(Some).collect();
            prop_assert_eq!(occupied, f.rows);
        }
    }
}

#[test]
fn problems_cover_the_hard_cases() {
    let (mut no_tokens, mut no_experts, mut drops, mut shared) = (0, 0, 0, 0);
    for seed in 0..100 {
        let (spec, topks) = problem(seed, 4, 2, Some(10));
        let layout = EpLayout::new(&spec, &topks);
        no_tokens += topks.iter().filter(|t| t.num_tokens == 0).count();
        no_experts += spec.experts_per_rank.iter().filter(|&&n| n == 0).count();
        drops += layout.total_dropped();
        shared += flat(&layout)
            .iter()
            .flat_map(|f| f.rows.iter().flatten())
            .filter(|c| c.choices.len() > 1)
            .count();
    }
    assert!(no_tokens > 10 && no_experts > 10 && drops > 10 && shared > 10);
}
