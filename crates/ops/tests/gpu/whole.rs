//! GEMM+RS and GEMM+AR by `sequential` and puts are one product of all rows, up to a size; with the
//! bits that the definition gives, above it, too. GEMM+AR of few rows without more is that and one
//! all-reduce of terms that are all rounded to the wire's type.

use std::sync::PoisonError;

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::Shards;
use tilewire_ops::common::{Algo, OverlapConfig};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_symm::{Heap, World};
use tilewire_testing::{Lack, did_not_run};

use crate::checks::cfg;
use crate::team_ops::{heap, ranks, ranks_watched};
use crate::{DEVICES, calls};

const M: usize = 23;
const N: usize = 40;
const K: usize = 24;

/// Bytes of all rows in f32.
const ALL: usize = M * N * 4;

/// A plan of either operation.
enum Plan {
    Scatter(GemmRsPlan),
    Reduce(GemmArPlan),
}

impl Plan {
    fn new(
        (scatter, desc): (bool, &GemmRsDesc),
        heap: &Heap,
        config: Option<OverlapConfig>,
        most: Option<usize>,
    ) -> Result<Self> {
        let desc = desc.clone();
        Ok(match (scatter, most) {
            (true, None) => Self::Scatter(GemmRsPlan::new(desc, heap, config)?),
            (true, Some(n)) => Self::Scatter(GemmRsPlan::with_whole(desc, heap, config, n)?),
            (false, None) => Self::Reduce(GemmArPlan::new(GemmArDesc(desc), heap, config)?),
            (false, Some(n)) => {
                Self::Reduce(GemmArPlan::with_whole(GemmArDesc(desc), heap, config, n)?)
            }
        })
    }

    fn prepare(&self, s: &Stream) -> Result<()> {
        match self {
            Self::Scatter(p) => p.prepare(s),
            Self::Reduce(p) => p.prepare(s),
        }
    }

    fn launch(&self, s: &Stream, m: usize, t: &GemmRsInputs) -> Result<()> {
        match self {
            Self::Scatter(p) => p.launch(s, m, t.clone())?.join(s).map(drop),
            Self::Reduce(p) => p.launch(s, m, t.clone())?.join(s).map(drop),
        }
    }

    fn explain(&self) -> String {
        match self {
            Self::Scatter(p) => p.explain().to_string(),
            Self::Reduce(p) => p.explain().to_string(),
        }
    }
}

/// Integers whose products have more bits than 16-bit types, and are exact in f32.
fn integers((seed, dtype): (u64, DType), rows: usize, cols: usize) -> Vec<f32> {
    let most = if dtype.is_fp8() { 15 } else { 40 };
    let mut rng = Rng::new(seed);
    (0..rows * cols).map(|_| rng.below(2 * most + 1) as f32 - most as f32).collect()
}

fn rounded(v: &[f32], dtype: DType) -> Result<Vec<f32>> {
    Tensor::from_f32(v, dtype, Shape::d1(v.len()))?.to_f32()
}

/// X and W of a rank, and the scale of its product: 1 but for FP8.
fn operands(d: &GemmRsDesc, rank: usize, m: usize) -> (Vec<f32>, Vec<f32>, f32) {
    let of = |seed, t, rows| integers((10 * rank as u64 + seed, t), rows, d.k);
    let scale = if d.x.is_fp8() { (2 + rank) as f32 } else { 1.0 };
    (of(1, d.x, m), of(2, d.w, d.n), scale)
}

/// Results of `m` rows by definition, and how many of them would differ if an owner rounded its own
/// part; where that is what the plan does, how many would if it did not.
fn expected(d: &GemmRsDesc, rows: &[usize], rounds_own: bool) -> Result<(Vec<f32>, usize)> {
    let m: usize = rows.iter().sum();
    let mut parts = Vec::new();
    for rank in 0..rows.len() {
        let (x, w, scale) = operands(d, rank, m);
        let dot = |i: usize, j: usize| -> f32 {
            (0..d.k).map(|k| x[i * d.k + k] * w[j * d.k + k]).sum::<f32>() * scale
        };
        let whole: Vec<f32> = (0..m * d.n).map(|e| dot(e / d.n, e % d.n)).collect();
        let wire = rounded(&whole, d.wire)?;
        parts.push((whole, wire));
    }
    let owners: Vec<usize> = rows.iter().enumerate().flat_map(|(r, n)| vec![r; *n]).collect();
    let sum = |e: usize, own: Option<usize>| {
        let of = |r: usize| if Some(r) == own { parts[r].0[e] } else { parts[r].1[e] };
        let first = of(0);
        let sum = (1..rows.len()).fold(first, |sum, r| sum + of(r));
        if d.bias { sum + bias(e % d.n) } else { sum }
    };
    let all = |own: bool| -> Vec<f32> {
        (0..m * d.n).map(|e| sum(e, own.then(|| owners[e / d.n]))).collect()
    };
    let (want, other) = (rounded(&all(!rounds_own), d.out)?, rounded(&all(rounds_own), d.out)?);
    let differ = want.iter().zip(&other).filter(|(a, b)| a != b).count();
    Ok((want, differ))
}

fn bias(col: usize) -> f32 {
    col as f32 - 7.5
}

fn tensors(d: &GemmRsDesc, heap: &Heap, m: usize, out_rows: usize) -> Result<GemmRsInputs> {
    let (x, w, scale) = operands(d, heap.team().rank().idx(), m);
    let place = |v: &[f32], t, shape| Tensor::from_f32(v, t, shape)?.to(&heap.device());
    let out = Tensor::poisoned_on(&heap.device(), d.out, Shape::d2(out_rows, d.n))?;
    let x = place(&x, d.x, Shape::d2(m, d.k))?;
    let mut t = GemmRsInputs::new(x, place(&w, d.w, Shape::d2(d.n, d.k))?, out);
    if d.bias {
        let values: Vec<f32> = (0..d.n).map(bias).collect();
        t.bias = Some(place(&values, DType::F32, Shape::d1(d.n))?);
    }
    if d.x.is_fp8() {
        t.scale = Some(place(&[scale], DType::F32, Shape::d1(1))?);
    }
    Ok(t)
}

/// Eager launches and replays of `m` rows give what the definition does, to the bit.
fn computes(
    (scatter, d): (bool, &GemmRsDesc),
    (config, most): (Option<OverlapConfig>, usize),
    m: usize,
    (heap, s): (&Heap, &Stream),
) -> Result<()> {
    let (size, me) = (heap.team().size(), heap.team().rank().idx());
    let rows = d.shards.rows(m, size)?;
    let first: usize = rows[..me].iter().sum();
    let mine = if scatter { first..first + rows[me] } else { 0..m };
    let is_whole = most >= d.m * d.n * 4;
    let is_sum = is_whole && !scatter && d.wire == d.out && !d.bias;
    let (want, differ) = expected(d, &rows, is_sum)?;
    // Products of FP8 fit f16, and two roundings to 16 bits hide one of an own part.
    let blind = d.wire == DType::F32 || (d.out != DType::F32 && !(is_sum && d.x == DType::BF16));
    assert!(differ > 0 || blind, "own parts are 16 bits");
    let want = &want[mine.start * d.n..mine.end * d.n];
    let plan = Plan::new((scatter, d), heap, config, Some(most))?;
    plan.prepare(s)?;
    let why = plan.explain();
    assert_eq!(why.contains("one product of all rows"), is_whole, "{why}");
    assert_eq!(why.contains("one product of all rows, and its sum: gemm_ar"), is_sum, "{why}");
    let t = tensors(d, heap, m, mine.len())?;
    s.begin_capture()?;
    plan.launch(s, m, &t)?;
    let graph = s.end_capture()?.instantiate()?;
    for replay in [false, true, false, true] {
        t.out.poison()?;
        heap.team().agree(true)?;
        if replay {
            s.replay(&graph)?
        } else {
            plan.launch(s, m, &t)?
        }
        s.synchronize()?;
        heap.team().check()?;
        let got = t.out.to_f32()?;
        let wrong = got.iter().zip(want).position(|(a, b)| a != b);
        assert_eq!(got.len(), want.len());
        assert_eq!(
            wrong.map(|i| (i, got[i], want[i])),
            None,
            "{d} scatter={scatter} most={most} m={m} rank {me}, replay {replay}"
        );
    }
    Ok(())
}

/// Types of operands, on the wire and of the output; bias, chunks of a shard.
type Types = ([DType; 3], bool, usize);

#[test]
fn one_product_of_all_rows_has_the_bits_of_the_definition() {
    use DType::{BF16, F8E4M3, F16, F32};
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cases: [Types; 9] = [
        ([BF16, BF16, F32], false, 1),
        ([BF16, BF16, BF16], true, 2),
        ([F16, F16, F32], true, 1),
        ([BF16, F32, BF16], false, 3),
        ([F32, F32, F32], true, 1),
        ([F8E4M3, BF16, F32], true, 1),
        ([BF16, BF16, BF16], false, 1),
        ([F8E4M3, F16, F16], false, 2),
        ([F32, F32, F32], false, 1),
    ];
    World::run_threads(n.min(3), cfg(), |world| {
        let (heap, s) = heap(&world, "whole")?;
        let size = heap.team().size();
        let explicit = |empty: usize| {
            let mut rows = vec![0; size];
            (0..M).for_each(|i| rows[(empty + 1 + i % (size - 1)) % size] += 1);
            Shards::Explicit(rows)
        };
        // Whose rows are none: each rank in turn.
        for (i, ([x, wire, out], bias, chunks)) in cases.into_iter().enumerate() {
            let config = Some(OverlapConfig::of(Algo::Sequential, chunks));
            let d = GemmRsDesc { wire, out, bias, ..GemmRsDesc::new(M, N, K, x) };
            let uneven = GemmRsDesc { shards: explicit(i % size), ..d.clone() };
            for scatter in [true, false] {
                // One byte less is a product for each owner.
                for most in [ALL, ALL - 1] {
                    computes((scatter, &d), (config, most), M - 5, (&heap, &s))?;
                    computes((scatter, &uneven), (config, most), M, (&heap, &s))?;
                }
            }
        }
        // What `prepare` chooses for so few rows.
        let d = GemmRsDesc { out: F32, ..GemmRsDesc::new(M, N, K, BF16) };
        computes((true, &d), (None, ALL), M, (&heap, &s))?;
        computes((false, &GemmRsDesc::new(M, N, K, BF16)), (None, ALL), M, (&heap, &s))
    })
    .unwrap();
}

/// Kernels of one launch whose names have this word.
fn kernels(list: &[String], word: &str) -> usize {
    list.iter().filter(|k| k.contains(word)).count()
}

/// On the idle driver, which notes the kernels that are launched.
#[test]
fn sequential_by_puts_is_one_product() {
    let Some(n) = ranks_watched() else { return };
    if std::env::var_os("TW_COUNTS").is_none() {
        return did_not_run(Lack::Watch, "it needs the idle driver, which notes all kernels");
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    // 8 rows more than 64 MiB of f32.
    let (small, large) = ((256, 64), (2056, 8192));
    World::run_threads(n, cfg(), |world| {
        let (heap, s) = heap(&world, "products")?;
        for ((m, cols), wire, products, [sums, all]) in [
            // One kernel rounds, one adds; all terms are summed by one that also meets the ranks.
            (small, DType::BF16, 1, [2, 0]),
            (small, DType::F32, 1, [1, 1]),
            (large, DType::BF16, n, [1, 1]),
        ] {
            for (scatter, sums) in [(true, sums), (false, all)] {
                let d = GemmRsDesc { wire, ..GemmRsDesc::new(m, cols, 16, DType::BF16) };
                let config = Some(OverlapConfig::of(Algo::Sequential, 1));
                let plan = Plan::new((scatter, &d), &heap, config, None)?;
                plan.prepare(&s)?;
                let rows = d.shards.rows(m, n)?[heap.team().rank().idx()];
                let t = tensors(&d, &heap, m, if scatter { rows } else { m })?;
                let mut done = Ok(());
                let seen = calls::noted(".kernels", || done = plan.launch(&s, m, &t));
                done.and_then(|()| s.synchronize())?;
                let found = (kernels(&seen, "gemm"), kernels(&seen, "tw_reduce"));
                assert_eq!(found, (products, sums), "{d} scatter={scatter}: {seen:?}");
                if heap.team().rank().get() == 0 {
                    println!("{d} scatter={scatter}: {} kernels", seen.len());
                }
            }
        }
        Ok(())
    })
    .unwrap();
}
