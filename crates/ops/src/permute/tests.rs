//! Rows against the oracle; gradients; capacity; what is refused.

use proptest::prelude::*;
use tilewire_core::{DType, ErrorKind, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_oracle::Mat;
use tilewire_oracle::permute as oracle;

use super::*;

/// The oracle's layout, cut or filled up to the capacity.
fn layout(d: &PermuteDesc, topk: &oracle::TopK) -> oracle::Permutation {
    let mut p = oracle::Permutation::new(topk, d.num_experts, d.align);
    p.sources.resize(d.capacity, None);
    p.slots.iter_mut().for_each(|s| *s = s.filter(|&r| r < d.capacity));
    p
}

fn tensor(m: &Mat, dtype: DType) -> Tensor {
    Tensor::from_f32(&m.to_f32(), dtype, Shape::d2(m.rows, m.cols)).unwrap()
}

fn routed(plan: &PermutePlan, s: &Stream, topk: &oracle::TopK) -> PermuteMap {
    let map = plan.map(topk.num_tokens).unwrap();
    let idx = Tensor::from_slice(&topk.idx, Shape::d2(topk.num_tokens, topk.k)).unwrap();
    plan.route(s, &idx, &map).unwrap().wait().unwrap();
    map.check().unwrap();
    map
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    /// Slots, sources, splits, totals, drops and moved bytes are the oracle's.
    #[test]
    fn rows_and_map_are_the_oracles(
        seed: u64, tokens in 0usize..20, experts in 1usize..9, k in 1usize..5,
        align in 1usize..9, cut in prop::option::of(0usize..40), masked in 0.0..0.5f64,
    ) {
        let k = k.min(experts);
        let mut rng = Rng::new(seed);
        let topk = oracle::TopK::random(&mut rng, (tokens, k), experts, masked);
        let mut d = PermuteDesc { align, ..PermuteDesc::new(20, 3, experts, k, DType::BF16) };
        d.capacity = cut.unwrap_or(d.worst_case());
        let s = Stream::new("p").unwrap();
        let plan = PermutePlan::new(d).unwrap();
        plan.prepare(&s).unwrap();
        let map = routed(&plan, &s, &topk);
        let full = oracle::Permutation::new(&topk, experts, align);
        let p = layout(&d, &topk);
        let slots: Vec<i32> = p.slots.iter().map(|s| s.map_or(-1, |r| r as i32)).collect();
        prop_assert_eq!(map.slots().to_vec::<i32>().unwrap(), slots);
        let sources: Vec<i32> =
            p.sources.iter().map(|s| s.map_or(-1, |(t, j)| (t * k + j) as i32)).collect();
        prop_assert_eq!(map.sources().to_vec::<i32>().unwrap(), sources);
        let clamp = |o: usize| o.min(d.capacity) as i64;
        let splits: Vec<i64> = full.offsets.windows(2).map(|w| clamp(w[1]) - clamp(w[0])).collect();
        prop_assert_eq!(map.m_splits().to_vec::<i64>().unwrap(), splits);
        prop_assert_eq!(map.total().to_vec::<i64>().unwrap(), [full.sources.len() as i64]);
        let lost = full.slots.iter().flatten().filter(|&&r| r >= d.capacity).count() as i64;
        prop_assert_eq!(map.dropped().to_vec::<i64>().unwrap(), [lost]);

        let (x, w) = (Mat::random(&mut rng, tokens, 3).rounded(DType::BF16), Mat::random(&mut rng, tokens, k));
        let t = Tokens { x: tensor(&x, DType::BF16), weights: Some(tensor(&w, DType::F32)), scales: None };
        let out = Permuted {
            x: Tensor::poisoned(DType::BF16, Shape::d2(d.capacity, 3)),
            weights: Some(Tensor::poisoned(DType::F32, Shape::d1(d.capacity))),
            scales: None,
        };
        let out = plan.permute(&s, &map, &t, &out).unwrap().wait().unwrap();
        prop_assert_eq!(out.x.to_f32().unwrap(), oracle::permute(&x, &p).to_f32());
        let want: Vec<f32> = oracle::permute_weights(&w, &p).iter().map(|&v| v as f32).collect();
        prop_assert_eq!(out.weights.unwrap().to_f32().unwrap(), want);
    }
}

#[test]
fn worst_case_holds_every_routing() {
    let d = PermuteDesc { align: 8, ..PermuteDesc::new(6, 1, 5, 2, DType::F32) };
    let capacity = d.worst_case();
    let d = PermuteDesc { capacity, ..d };
    // Every expert has one row more than a multiple of the alignment allows for, or none.
    for seed in 0..50 {
        let topk = oracle::TopK::random(&mut Rng::new(seed), (6, 2), 5, 0.1);
        assert!(oracle::Permutation::new(&topk, 5, 8).sources.len() <= d.capacity);
    }
}

#[test]
fn an_index_that_is_no_expert_poisons_everything_made_from_the_map() {
    let s = Stream::new("bad").unwrap();
    let d = PermuteDesc::new(2, 2, 3, 2, DType::F32);
    let plan = PermutePlan::new(d).unwrap();
    plan.prepare(&s).unwrap();
    let map = plan.map(2).unwrap();
    assert_eq!(map.check().unwrap_err().kind(), ErrorKind::NotPrepared);
    let (x, w) =
        (Tensor::zeros(DType::F32, Shape::d2(2, 2)), Tensor::zeros(DType::F32, Shape::d2(2, 2)));
    let rows = Tensor::zeros(DType::F32, Shape::d2(d.capacity, 2));
    let good = Tensor::from_slice(&[0i64, 1, 2, -1], Shape::d2(2, 2)).unwrap();
    for bad in [3i64, -2, i64::MAX, i64::MIN] {
        let idx = Tensor::from_slice(&[0, 1, bad, -1], Shape::d2(2, 2)).unwrap();
        plan.route(&s, &idx, &map).unwrap().wait().unwrap();
        let e = map.check().unwrap_err();
        assert!(e.to_string().contains("-1 or 0 to 2"), "{e}");
        assert_eq!(map.m_splits().to_vec::<i64>().unwrap(), [0; 3]);
        assert_eq!(map.slots().to_vec::<i32>().unwrap(), [-1; 4]);
        let all_nan = |t: &Tensor| t.to_f32().unwrap().iter().all(|v| v.is_nan());
        let zeros = |r, c| Tensor::zeros(DType::F32, Shape::d2(r, c));
        let t = Tokens { x: x.clone(), weights: Some(w.clone()), scales: None };
        let out = Permuted {
            x: zeros(d.capacity, 2),
            weights: Some(Tensor::zeros(DType::F32, Shape::d1(d.capacity))),
            scales: None,
        };
        let out = plan.permute(&s, &map, &t, &out).unwrap().wait().unwrap();
        assert!(all_nan(&out.x) && all_nan(out.weights.as_ref().unwrap()));
        let y = plan.unpermute(&s, &map, (&rows, Some(&w)), &zeros(2, 2)).unwrap().wait().unwrap();
        assert!(all_nan(&y));
        let g = Tokens { x: zeros(2, 2), weights: Some(zeros(2, 2)), scales: None };
        let d_rows = Permuted { x: rows.clone(), weights: out.weights.clone(), scales: None };
        let g = plan.permute_bwd(&s, &map, &d_rows, &g).unwrap().wait().unwrap();
        assert!(all_nan(&g.x) && all_nan(g.weights.as_ref().unwrap()));
        let weighted =
            WeightedGrads { weights: w.clone(), rows: rows.clone(), d_weights: zeros(2, 2) };
        let g = UnpermuteGrads {
            d_out: x.clone(),
            d_rows: zeros(d.capacity, 2),
            weighted: Some(weighted),
        };
        let g = plan.unpermute_bwd(&s, &map, &g).unwrap().wait().unwrap();
        assert!(all_nan(&g.d_rows) && all_nan(&g.weighted.unwrap().d_weights));
        // The map is good again with the next routing.
        plan.route(&s, &good, &map).unwrap().wait().unwrap();
        map.check().unwrap();
    }
}

#[test]
fn captured_replays_follow_the_indices() {
    let s = Stream::new("graph").unwrap();
    let d = PermuteDesc { align: 4, ..PermuteDesc::new(5, 4, 6, 2, DType::F32) };
    let d = PermuteDesc { capacity: d.worst_case(), ..d };
    let plan = PermutePlan::new(d).unwrap();
    plan.prepare(&s).unwrap();
    let map = plan.map(5).unwrap();
    let idx = Tensor::zeros(DType::I64, Shape::d2(5, 2));
    let t = Tokens { x: Tensor::zeros(DType::F32, Shape::d2(5, 4)), weights: None, scales: None };
    let out = Permuted {
        x: Tensor::poisoned(DType::F32, Shape::d2(d.capacity, 4)),
        weights: None,
        scales: None,
    };
    let y = Tensor::poisoned(DType::F32, Shape::d2(5, 4));
    s.begin_capture().unwrap();
    let _map = plan.route(&s, &idx, &map).unwrap();
    let _out = plan.permute(&s, &map, &t, &out).unwrap();
    let _y = plan.unpermute(&s, &map, (&out.x, None), &y).unwrap();
    let graph = s.end_capture().unwrap().instantiate().unwrap();
    for round in 0..20 {
        let mut rng = Rng::new(round);
        let topk = oracle::TopK::random(&mut rng, (5, 2), 6, if round == 3 { 1.0 } else { 0.3 });
        let x = Mat::random(&mut rng, 5, 4);
        idx.write(|b| b.copy_from_slice(bytemuck::cast_slice(&topk.idx))).unwrap();
        t.x.write(|b| b.copy_from_slice(&x.to_bytes(DType::F32))).unwrap();
        s.replay(&graph).unwrap();
        s.synchronize().unwrap();
        let p = layout(&d, &topk);
        assert_eq!(out.x.to_f32().unwrap(), oracle::permute(&x, &p).to_f32(), "round {round}");
        let want = oracle::unpermute(&oracle::permute(&x, &p), None, &p);
        assert_eq!(y.to_f32().unwrap(), want.to_f32(), "round {round}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let good = PermuteDesc::new(4, 8, 3, 2, DType::F32);
    for (bad, needle) in [
        (PermuteDesc { num_experts: 0, ..good }, "at least one expert"),
        (PermuteDesc { top_k: 33, ..good }, "top_k must be 1 to 32"),
        (PermuteDesc { align: 0, ..good }, "the alignment must be positive"),
        (PermuteDesc { capacity: 1 << 40, ..good }, "32-bit"),
        (PermuteDesc { dtype: DType::I32, ..good }, "f32, bf16, f16 or FP8"),
        (PermuteDesc { out: DType::F8E4M3, ..good }, "results f32, bf16 or f16"),
        (PermuteDesc { num_scales: 1, ..good }, "have no scales"),
    ] {
        let e = PermutePlan::new(bad).err().unwrap();
        assert!(e.to_string().contains(needle), "{bad}: {e}");
    }
    let s = Stream::new("r").unwrap();
    let plan = PermutePlan::new(good).unwrap();
    let (map, other) =
        (plan.map(4).unwrap(), PermutePlan::new(PermuteDesc { align: 2, ..good }).unwrap());
    assert!(plan.map(5).unwrap_err().to_string().contains("at most 4"));
    let idx = |r, c, d| Tensor::zeros(d, Shape::d2(r, c));
    let e = plan.route(&s, &idx(4, 2, DType::I64), &map).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::NotPrepared);
    plan.prepare(&s).unwrap();
    let refused = |m: &PermuteMap, t: Tensor| plan.route(&s, &t, m).err().unwrap().to_string();
    assert!(refused(&map, idx(3, 2, DType::I64)).contains("i64 [4, 2]"));
    assert!(refused(&map, idx(4, 2, DType::F32)).contains("i32 or i64"));
    assert!(refused(&other.map(4).unwrap(), idx(4, 2, DType::I32)).contains("another plan"));
    let f = |r, c| Tensor::zeros(DType::F32, Shape::d2(r, c));
    let t = Tokens { x: f(4, 8), weights: None, scales: None };
    let out = Permuted { x: f(good.capacity, 8), weights: None, scales: None };
    let refused =
        |t: &Tokens, o: &Permuted| plan.permute(&s, &map, t, o).err().unwrap().to_string();
    assert!(refused(&Tokens { x: f(3, 8), ..t.clone() }, &out).contains("`x`"));
    assert!(refused(&Tokens { weights: Some(f(4, 2)), ..t.clone() }, &out).contains("both sides"));
    assert!(refused(&Tokens { scales: Some(f(4, 0)), ..t.clone() }, &out).contains("both sides"));
    assert!(refused(&t, &Permuted { x: f(1, 8), ..out.clone() }).contains("permuted x"));
    let e = plan.unpermute(&s, &map, (&out.x, Some(&f(4, 3))), &f(4, 8)).err().unwrap();
    assert!(e.to_string().contains("topk_weights") && e.get_op() == Some("unpermute"), "{e}");
    let with = Tokens { scales: Some(f(4, 0)), ..t.clone() };
    let e = plan.permute_bwd(&s, &map, &out, &with).err().unwrap();
    assert!(e.to_string().contains("no gradient"), "{e}");
}

/// Results may not overlap what is read or each other: the bytes would depend on the order of the
/// threads.
#[test]
fn results_that_overlap_what_is_read_are_refused() {
    let d = PermuteDesc::new(4, 8, 3, 2, DType::F32);
    let (s, plan) = (Stream::new("r").unwrap(), PermutePlan::new(d).unwrap());
    plan.prepare(&s).unwrap();
    let map = plan.map(4).unwrap();
    let f = |r, c| Tensor::zeros(DType::F32, Shape::d2(r, c));
    let (rows, w) = (f(d.capacity, 8), f(4, 2));
    let permuted = |x: &Tensor| Permuted { x: x.clone(), weights: None, scales: None };
    let tokens = |x: &Tensor| Tokens { x: x.clone(), weights: None, scales: None };
    let front = rows.rows(0, 4).unwrap();
    let grads = |d_out: &Tensor, d_weights: &Tensor| UnpermuteGrads {
        d_out: d_out.clone(),
        d_rows: rows.clone(),
        weighted: Some(WeightedGrads {
            weights: w.clone(),
            rows: f(d.capacity, 8),
            d_weights: d_weights.clone(),
        }),
    };
    let mut on_rows = grads(&f(4, 8), &f(4, 2));
    on_rows.weighted.as_mut().unwrap().rows = rows.clone();
    let plain = UnpermuteGrads { weighted: None, ..grads(&front, &w) };
    let refused = [
        plan.permute(&s, &map, &tokens(&front), &permuted(&rows)).err(),
        plan.permute_bwd(&s, &map, &permuted(&rows), &tokens(&front)).err(),
        plan.unpermute(&s, &map, (&rows, None), &front).err(),
        plan.unpermute_bwd(&s, &map, &on_rows).err(),
        plan.unpermute_bwd(&s, &map, &grads(&f(4, 8), &w)).err(),
        plan.unpermute_bwd(&s, &map, &plain).err(),
    ];
    for e in refused.into_iter().map(Option::unwrap) {
        assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
        assert!(e.to_string().contains("must not overlap"), "{e}");
    }
    plan.unpermute_bwd(&s, &map, &grads(&f(4, 8), &f(4, 2))).unwrap().wait().unwrap();
}
