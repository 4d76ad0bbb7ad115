use proptest::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::permute::{
    Permutation, TopK, permute, permute_bwd, permute_weights, unpermute, unpermute_bwd,
};

use crate::{assert_close, assert_grad, rng};

#[test]
fn layout_by_hand() {
    // Token 1 names expert 2 twice; token 2 is masked; expert 1 is empty.
    let topk = TopK::new(3, 2, vec![2, 0, 2, 2, -1, -1]);
    let p = Permutation::new(&topk, 3, 2);
    assert_eq!(p.counts, [1, 0, 3]);
    assert_eq!(p.offsets, [0, 2, 2, 6]);
    assert_eq!(p.padded(), [2, 0, 4]);
    assert_eq!(p.sources, [Some((0, 1)), None, Some((0, 0)), Some((1, 0)), Some((1, 1)), None]);
    assert_eq!(p.slots, [Some(2), Some(0), Some(3), Some(4), None, None]);
    let x = Mat::new(3, 1, vec![10.0, 20.0, 30.0]);
    assert_eq!(permute(&x, &p).data, [10.0, 0.0, 10.0, 20.0, 20.0, 0.0]);
    let w = Mat::new(3, 2, vec![0.25, 0.75, 0.5, 2.0, 9.0, 9.0]);
    assert_eq!(permute_weights(&w, &p), [0.75, 0.0, 0.25, 0.5, 2.0, 0.0]);
    let rows = Mat::new(6, 1, vec![1.0, f64::NAN, 2.0, 3.0, 4.0, f64::NAN]);
    assert_eq!(unpermute(&rows, Some(&w), &p).data, [1.25, 9.5, 0.0], "padding is not read");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn slots_and_rows_are_inverse(
        seed: u64, tokens in 0usize..30, experts in 1usize..9, k in 1usize..5,
        align in prop::sample::select(vec![1usize, 2, 8, 16]), masked in 0.0..0.6f64,
    ) {
        let k = k.min(experts);
        let topk = TopK::random(&mut rng(seed), (tokens, k), experts, masked);
        let p = Permutation::new(&topk, experts, align);
        // Every unmasked choice has one row, in its expert's range; every other row is empty.
        let mut used = 0;
        for t in 0..tokens {
            for j in 0..k {
                let slot = p.slot(t, j);
                prop_assert_eq!(slot.is_some(), topk.expert(t, j).is_some());
                if let (Some(row), Some(e)) = (slot, topk.expert(t, j)) {
                    prop_assert_eq!(p.sources[row], Some((t, j)));
                    prop_assert!((p.offsets[e]..p.offsets[e] + p.counts[e]).contains(&row));
                    used += 1;
                }
            }
        }
        prop_assert_eq!(used, p.sources.iter().flatten().count());
        prop_assert_eq!(used, p.counts.iter().sum::<usize>());
        // Order inside an expert, and alignment.
        for e in 0..experts {
            let rows = &p.sources[p.offsets[e]..p.offsets[e] + p.counts[e]];
            prop_assert!(rows.windows(2).all(|w| w[0] < w[1]));
            prop_assert_eq!(p.offsets[e] % align, 0);
            prop_assert!(p.padded()[e] < p.counts[e] + align);
        }
        // There and back: averaging the copies gives the token.
        let x = Mat::random(&mut rng(seed ^ 1), tokens, 3);
        let copies = |t: usize| (0..k).filter(|&j| topk.expert(t, j).is_some()).count();
        let mean = Mat::from_fn(tokens, k, |t, _| 1.0 / copies(t).max(1) as f64);
        let want = Mat::from_fn(tokens, 3, |t, c| if copies(t) > 0 { x.at(t, c) } else { 0.0 });
        assert_close("round trip", &unpermute(&permute(&x, &p), Some(&mean), &p), &want);
    }
}

#[test]
fn gradients() {
    for (seed, (t, k, e, align)) in [(1, (1, 1, 1, 1)), (2, (6, 2, 4, 4)), (3, (5, 3, 3, 1))] {
        let mut r = rng(seed);
        let topk = TopK::random(&mut r, (t, k), e, 0.2);
        let p = Permutation::new(&topk, e, align);
        let (x, w) = (Mat::random(&mut r, t, 3), Mat::random(&mut r, t, k));
        let rows = Mat::random(&mut r, p.sources.len(), 3);
        let d_rows = Mat::random(&mut r, p.sources.len(), 3);
        let dy = Mat::random(&mut r, t, 3);
        assert_grad("dx", &permute_bwd(&d_rows, &p), &x, |x| permute(x, &p).dot(&d_rows));
        let (got_rows, got_w) = unpermute_bwd(&rows, Some(&w), &dy, &p);
        assert_grad("d_rows", &got_rows, &rows, |y| unpermute(y, Some(&w), &p).dot(&dy));
        assert_grad("dw", &got_w.unwrap(), &w, |w| unpermute(&rows, Some(w), &p).dot(&dy));
        let (plain, none) = unpermute_bwd(&rows, None, &dy, &p);
        assert_grad("unweighted", &plain, &rows, |y| unpermute(y, None, &p).dot(&dy));
        assert!(none.is_none());
    }
}

#[test]
#[should_panic(expected = "expert 4 of 4")]
fn experts_out_of_range_panic() {
    Permutation::new(&TopK::new(1, 1, vec![4]), 4, 1);
}
