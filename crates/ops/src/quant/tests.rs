//! Codes and scales against the oracle, to the bit; the collective scale; what is refused.

use std::time::Duration;

use tilewire_core::{DType, ErrorKind, Rank, Result, Rng, ScaleLayout, Shape};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_oracle::Mat;
use tilewire_oracle::quant as oracle;
use tilewire_symm::{Heap, HeapCfg, HookAction, StepKind, World, WorldCfg};

use super::*;

const LAYOUTS: [ScaleLayout; 5] = [
    ScaleLayout::Tensor,
    ScaleLayout::Block1x128,
    ScaleLayout::Block128x128,
    ScaleLayout::Mx1x32,
    ScaleLayout::Mx1x32Swizzled,
];
const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];
const SIZES: [(usize, usize); 9] =
    [(1, 1), (0, 7), (7, 0), (0, 0), (3, 33), (5, 129), (33, 5), (130, 31), (2, 256)];

/// Magnitudes from 2^-20 to 2^20, so that blocks differ; rounded to `dtype`.
fn data(seed: u64, rows: usize, cols: usize, dtype: DType) -> Mat {
    let x = Mat::random(&mut Rng::new(seed), rows, cols);
    let scale = |i: usize, j: usize| 2f64.powi(((i / 3 * 7 + j / 16 * 5) % 25) as i32 - 12);
    Mat::from_fn(rows, cols, |i, j| x.at(i, j) * scale(i, j)).rounded(dtype)
}

fn tensor(m: &Mat, dtype: DType) -> Tensor {
    Tensor::from_f32(&m.to_f32(), dtype, Shape::d2(m.rows, m.cols)).unwrap()
}

fn same(what: &str, got: &Quantized, want: &tilewire_core::QTensor) {
    assert_eq!(got.data.shape(), want.shape, "{what}");
    got.data.read(|b| assert_eq!(b, want.data, "{what}: codes")).unwrap();
    got.scales.read(|b| assert_eq!(b, want.scales, "{what}: scales")).unwrap();
}

fn quantized(desc: QuantDesc, x: &Mat) -> QuantInputs {
    let stream = Stream::new("q").unwrap();
    let plan = QuantPlan::new(desc, None).unwrap();
    plan.prepare(&stream).unwrap();
    let t = QuantInputs::new(&desc, &tensor(x, desc.src)).unwrap();
    plan.launch(&stream, t).unwrap().wait().unwrap()
}

/// Both sides of `x` under every recipe of a layout.
fn sweep(layout: ScaleLayout, src: DType, x: &Mat) {
    for dst in FP8 {
        for pow2_scales in [false, true] {
            let desc = QuantDesc {
                pow2_scales,
                sides: Sides::Both,
                ..QuantDesc::new(x.rows + 2, x.cols, src, dst, layout)
            };
            let spec = oracle::QuantSpec { dtype: dst, layout, pow2_scales };
            let got = quantized(desc, x);
            let what = format!("{desc} {}x{}", x.rows, x.cols);
            same(&what, got.row.as_ref().unwrap(), &oracle::quantize(x, spec));
            same(&what, got.column.as_ref().unwrap(), &oracle::quantize_transposed(x, spec));
        }
    }
}

#[test]
fn codes_and_scales_are_the_oracles_for_every_layout_dtype_and_odd_size() {
    for (i, (rows, cols)) in SIZES.into_iter().enumerate() {
        for (j, layout) in LAYOUTS.into_iter().enumerate() {
            let src = [DType::F32, DType::BF16, DType::F16][(i + j) % 3];
            sweep(layout, src, &data((10 * i + j) as u64, rows, cols, src));
        }
    }
}

#[test]
fn nan_infinity_zero_and_subnormal_magnitudes() {
    let tiny = f64::from(f32::from_bits(1));
    let rows: [Vec<f64>; 6] = [
        vec![f64::NAN, 1.0, -2.0, 0.0],
        vec![f64::INFINITY, 3.0, f64::NEG_INFINITY, -0.0],
        vec![0.0, -0.0, 0.0, 0.0],
        vec![f64::NAN; 4],
        vec![tiny, -tiny, 3.0 * tiny, 0.0],
        vec![f64::from(f32::MAX), -1.0, f64::from(f32::MIN_POSITIVE), 1e-30],
    ];
    for layout in LAYOUTS {
        for row in &rows {
            sweep(layout, DType::F32, &Mat::new(1, 4, row.clone()));
        }
        sweep(layout, DType::F32, &Mat::new(6, 4, rows.concat()));
    }
}

#[test]
fn scales_are_the_oracles_for_every_exponent() {
    for dtype in FP8 {
        for layout in [ScaleLayout::Tensor, ScaleLayout::Mx1x32] {
            for pow2_scales in [false, true] {
                let desc =
                    QuantDesc { pow2_scales, ..QuantDesc::new(1, 1, DType::F32, dtype, layout) };
                let spec = oracle::QuantSpec { dtype, layout, pow2_scales };
                for exp in 0..255u32 {
                    for frac in [0, 1, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x7f_ffff] {
                        let amax = f32::from_bits(exp << 23 | frac);
                        let want = spec.scale(f64::from(amax));
                        let got = desc.recipe().scale(amax);
                        assert_eq!(f64::from(got), want, "{spec:?} {amax:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn dequantised_values_are_the_oracles() {
    let stream = Stream::new("d").unwrap();
    for layout in LAYOUTS {
        for src in FP8 {
            let x = data(5, 37, 70, DType::F32);
            let q = oracle::quantize(&x, oracle::QuantSpec::new(src, layout));
            let got = quantized(QuantDesc::new(37, 70, DType::F32, src, layout), &x).row.unwrap();
            for out in [DType::F32, DType::BF16, DType::F16] {
                let plan =
                    DequantPlan::new(DequantDesc { rows: 40, cols: 70, src, layout, out }).unwrap();
                let y = Tensor::poisoned(out, Shape::d2(37, 70));
                let early = plan.launch(&stream, &got, &y).err().unwrap();
                assert_eq!(early.kind(), ErrorKind::NotPrepared);
                plan.prepare(&stream).unwrap();
                let y = plan.launch(&stream, &got, &y).unwrap().wait().unwrap();
                let want = oracle::dequantize(&q).to_bytes(out);
                y.read(|b| assert_eq!(b, want, "{layout:?} {src} {out}")).unwrap();
            }
        }
    }
}

#[test]
fn delayed_scaling_follows_the_oracle_eager_and_replayed() {
    for dst in FP8 {
        for (window, margin) in [(1, 0), (3, 1), (4, -2)] {
            let stream = Stream::new("delayed").unwrap();
            let desc = QuantDesc {
                scaling: Scaling::Delayed { window, margin },
                ..QuantDesc::new(4, 9, DType::F32, dst, ScaleLayout::Tensor)
            };
            let plans = [QuantPlan::new(desc, None).unwrap(), QuantPlan::new(desc, None).unwrap()];
            let x = Tensor::zeros(DType::F32, Shape::d2(4, 9));
            let outs = [0, 1].map(|_| QuantInputs::new(&desc, &x).unwrap());
            plans.iter().for_each(|p| p.prepare(&stream).unwrap());
            stream.begin_capture().unwrap();
            let _captured = plans[1].launch(&stream, outs[1].clone()).unwrap();
            let graph = stream.end_capture().unwrap().instantiate().unwrap();
            let mut want = oracle::DelayedScaling::new(dst, window, margin);
            for step in 0..12 {
                let m = match step {
                    3 | 4 => Mat::zeros(4, 9),
                    7 => Mat::zeros(4, 9).map(|_| f64::INFINITY),
                    _ => data(step, 4, 9, DType::F32),
                };
                x.write(|b| b.copy_from_slice(&m.to_bytes(DType::F32))).unwrap();
                let q = want.step(&m);
                plans[0].launch(&stream, outs[0].clone()).unwrap().wait().unwrap();
                stream.replay(&graph).unwrap();
                stream.synchronize().unwrap();
                for (plan, out) in plans.iter().zip(&outs) {
                    same(&format!("{desc} step {step}"), out.row.as_ref().unwrap(), &q);
                    assert_eq!(plan.scale().unwrap().to_vec::<f32>().unwrap(), [want.scale]);
                }
            }
        }
    }
}

/// Finite magnitudes make finite scales, whatever the margin.
#[test]
fn a_delayed_scale_is_never_infinite() {
    for dst in FP8 {
        let recipe = QuantDesc::new(1, 1, DType::F32, dst, ScaleLayout::Tensor).recipe();
        for (top, margin) in [(f32::MAX, 64), (1e38, 20), (1e30, 64)] {
            let mut want = oracle::DelayedScaling::new(dst, 1, margin);
            want.record(f64::from(top));
            let scale = recipe.delayed(top, margin, 1.0);
            assert!(scale.is_finite() && scale == want.scale, "{dst} {top} {margin}: {scale}");
        }
    }
}

fn shared(world: &World, desc: &QuantDesc) -> Result<(Heap, Stream, QuantPlan)> {
    let heap = world.everyone("q")?.heap(tilewire_core::BackendKind::Host, HeapCfg::new(4096))?;
    let plan = QuantPlan::new(*desc, Some(&heap))?;
    Ok((heap, Stream::new("s")?, plan))
}

#[test]
fn the_scale_of_a_team_is_that_of_all_its_rows() {
    for size in [1, 2, 3, 5] {
        World::run_threads(size, WorldCfg::for_tests(), |w| {
            let desc = QuantDesc {
                scope: Scope::Team,
                scaling: Scaling::Delayed { window: 2, margin: 1 },
                ..QuantDesc::new(8, 6, DType::BF16, DType::F8E4M3, ScaleLayout::Tensor)
            };
            let (heap, stream, delayed) = shared(&w, &desc)?;
            let current = QuantDesc { scaling: Scaling::Current, sides: Sides::Both, ..desc };
            let now = QuantPlan::new(current, Some(&heap))?;
            delayed.prepare(&stream)?;
            now.prepare(&stream)?;
            let me = heap.team().rank().idx();
            let mut want = oracle::DelayedScaling::new(desc.dst, 2, 1);
            for step in 0..6 {
                // Different numbers of rows, none on one rank; the largest element moves about.
                let parts: Vec<Mat> = (0..size)
                    .map(|r| data(31 * step + r as u64, (r + 2) % 5, 6, DType::BF16))
                    .collect();
                let all = Mat::vstack(&parts);
                let x = tensor(&parts[me], DType::BF16);
                let before = heap.team().traffic();
                let got = now.launch(&stream, QuantInputs::new(&current, &x)?)?.wait()?;
                let moved = heap.team().traffic();
                for (p, t) in now.predict().iter().enumerate() {
                    assert_eq!(moved[p].put_bytes - before[p].put_bytes, t.put_bytes);
                    assert_eq!(moved[p].puts - before[p].puts, t.puts);
                    assert_eq!(moved[p].signals - before[p].signals, t.signals);
                }
                let spec = oracle::QuantSpec::new(desc.dst, desc.layout);
                let scale = spec.scale(oracle::amax(&all)) as f32;
                let q = |m: &Mat| oracle::quantize_with_scale(m, desc.dst, scale);
                same("row", got.row.as_ref().unwrap(), &q(&parts[me]));
                same("column", got.column.as_ref().unwrap(), &q(&parts[me].transpose()));
                let got = delayed.launch(&stream, QuantInputs::new(&desc, &x)?)?.wait()?;
                let q = oracle::quantize_with_scale(&parts[me], desc.dst, want.scale);
                want.record(oracle::amax(&all));
                same("delayed", got.row.as_ref().unwrap(), &q);
            }
            heap.team().agree(true)?;
            heap.team().check_counters()
        })
        .unwrap();
    }
}

/// A rank that dies: the others' results are poison, and the state of delayed scaling stands.
#[test]
fn a_death_poisons_the_results_and_leaves_the_state() {
    let e = World::run_threads(3, WorldCfg::default(), |w| {
        let desc = QuantDesc {
            scope: Scope::Team,
            scaling: Scaling::Delayed { window: 2, margin: 0 },
            ..QuantDesc::new(2, 2, DType::F32, DType::F8E4M3, ScaleLayout::Tensor)
        };
        let (heap, stream, plan) = shared(&w, &desc)?;
        plan.prepare(&stream)?;
        if w.rank().get() == 2 {
            panic!("victim");
        }
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], Shape::d2(2, 2))?;
        let t = QuantInputs::new(&desc, &x)?;
        let out = t.row.clone().unwrap();
        let e = plan.launch(&stream, t)?.wait().err().unwrap();
        assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(2)), "{e}");
        assert!(e.get_op() == Some("quant") && e.get_phase().is_some(), "{e}");
        Pending::new((), &stream, None)?.wait()?;
        assert!(out.data.to_f32()?.iter().chain(&out.scales.to_f32()?).all(|v| v.is_nan()));
        assert_eq!(plan.scale().unwrap().to_vec::<f32>()?, [1.0]);
        assert_eq!(plan.history().unwrap().to_vec::<f32>()?, [0.0, 0.0]);
        drop(heap);
        Ok(())
    })
    .unwrap_err();
    assert_eq!(e.message(), "a rank panicked: victim", "{e}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let good = QuantDesc::new(4, 8, DType::F32, DType::F8E4M3, ScaleLayout::Tensor);
    let delayed =
        |window, margin| QuantDesc { scaling: Scaling::Delayed { window, margin }, ..good };
    for (bad, needle) in [
        (QuantDesc { src: DType::I32, ..good }, "f32, bf16 or f16"),
        (QuantDesc { dst: DType::BF16, ..good }, "f8e4m3 or f8e5m2"),
        (QuantDesc { scope: Scope::Team, layout: ScaleLayout::Mx1x32, ..good }, "per tensor"),
        (QuantDesc { layout: ScaleLayout::Block1x128, ..delayed(2, 0) }, "per tensor"),
        (delayed(0, 0), "window"),
        (delayed(1, 99), "margin"),
        (QuantDesc { pow2_scales: true, ..delayed(2, 0) }, "powers of two"),
        (QuantDesc { scope: Scope::Team, ..good }, "heap"),
    ] {
        let e = QuantPlan::new(bad, None).err().unwrap();
        assert!(e.to_string().contains(needle) && e.get_op() == Some("quant"), "{bad}: {e}");
    }
    let stream = Stream::new("r").unwrap();
    let plan = QuantPlan::new(good, None).unwrap();
    let x = Tensor::zeros(DType::F32, Shape::d2(4, 8));
    let t = QuantInputs::new(&good, &x).unwrap();
    assert_eq!(plan.launch(&stream, t.clone()).err().unwrap().kind(), ErrorKind::NotPrepared);
    stream.begin_capture().unwrap();
    assert!(plan.prepare(&stream).unwrap_err().to_string().contains("captured"));
    stream.end_capture().unwrap();
    plan.prepare(&stream).unwrap();
    let refused = |t: QuantInputs| plan.launch(&stream, t).err().unwrap().to_string();
    let other = |rows, cols, dtype| Tensor::zeros(dtype, Shape::d2(rows, cols));
    assert!(refused(QuantInputs { x: other(5, 8, DType::F32), ..t.clone() }).contains("at most 4"));
    assert!(refused(QuantInputs { x: other(3, 8, DType::F32), ..t.clone() }).contains("`row`"));
    assert!(refused(QuantInputs { x: other(4, 8, DType::F16), ..t.clone() }).contains("`x`"));
    assert!(refused(QuantInputs { row: None, ..t.clone() }).contains("expected a result"));
    assert!(refused(QuantInputs { column: t.row.clone(), ..t.clone() }).contains("expected none"));
    let mx = Quantized::poisoned(DType::F8E4M3, ScaleLayout::Mx1x32, 4, 8);
    assert!(refused(QuantInputs { row: Some(mx), ..t.clone() }).contains("another layout"));
    // Both results in one tensor.
    let both = QuantDesc { rows: 8, sides: Sides::Both, ..good };
    let plan8 = QuantPlan::new(both, None).unwrap();
    plan8.prepare(&stream).unwrap();
    let square = QuantInputs::new(&both, &other(8, 8, DType::F32)).unwrap();
    let e = plan8.launch(&stream, QuantInputs { column: square.row.clone(), ..square }).err();
    assert!(e.unwrap().to_string().contains("must not overlap"));
    assert!(plan.explain().contains("local") && plan.predict().is_empty());
    assert_eq!(QuantPlan::memory(&good, 8), 0);
    assert_eq!(QuantPlan::memory(&QuantDesc { scope: Scope::Team, ..good }, 8), 32);
}

/// Three launches with different data; scales and codes of each.
fn three_launches(
    world: &World,
    hook: Option<(StepKind, u64, HookAction)>,
) -> Result<Vec<Vec<u8>>> {
    let desc = QuantDesc {
        scope: Scope::Team,
        ..QuantDesc::new(2, 3, DType::F32, DType::F8E4M3, ScaleLayout::Tensor)
    };
    let (heap, stream, plan) = shared(world, &desc)?;
    plan.prepare(&stream)?;
    let team = heap.team().clone();
    if let Some((kind, nth, action)) = hook {
        team.set_hook(move |p| {
            let hit = p.rank == Rank::new(0) && p.kind == kind && p.nth == nth;
            if hit { action } else { HookAction::Proceed }
        });
    }
    let mut outs = Vec::new();
    for round in 0..3u32 {
        // The magnitude that decides is rank 0's, and grows: an old one gives another scale.
        let v = if team.rank() == Rank::new(0) { 10.0 * (round + 1) as f32 } else { 1.0 };
        let x = Tensor::from_slice(&[v; 6], Shape::d2(2, 3))?;
        let got = plan.launch(&stream, QuantInputs::new(&desc, &x)?)?.wait()?.row;
        outs.push(got.unwrap().scales.read(<[u8]>::to_vec)?);
    }
    team.agree(true)?;
    team.check_counters()?;
    Ok(outs)
}

#[test]
fn any_one_signal_of_the_exchange_lost_or_repeated_is_noticed() {
    let short = || WorldCfg { timeout: Duration::from_millis(400), ..WorldCfg::default() };
    let good = World::run_threads(2, short(), |w| three_launches(&w, None)).unwrap();
    for (kind, action, steps) in [
        (StepKind::Signal, HookAction::Skip, 6),
        (StepKind::Signal, HookAction::Twice, 6),
        (StepKind::Put, HookAction::Skip, 3),
        (StepKind::Put, HookAction::AfterSignal, 3),
    ] {
        for nth in 0..steps {
            let hook = Some((kind, nth, action));
            let got = World::run_threads(2, short(), |w| three_launches(&w, hook));
            let noticed = got.as_ref().map_or(true, |outs| *outs != good);
            assert!(noticed, "{action:?} of {kind:?} {nth} went unnoticed");
        }
    }
}
