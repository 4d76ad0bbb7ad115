//! What makes the products of a team's operation is the caller's choice, beside schedule and
//! transport.

use std::sync::PoisonError;

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::common::{Algo, OverlapConfig};
use tilewire_ops::gemm::{Activation, Epilogue, GemmBackend};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_symm::{Heap, World};

use crate::DEVICES;
use crate::checks::cfg;
use crate::team_ops::{heap, ranks};

const M: usize = 16;
const N: usize = 32;
const K: usize = 24;

/// Small integers, of which every sum is exact: any kernel gives the same bits.
fn integers(heap: &Heap, seed: u64, rows: usize) -> Result<Tensor> {
    let mut rng = Rng::new(seed);
    let values: Vec<f32> = (0..rows * K).map(|_| rng.below(5) as f32 - 2.0).collect();
    Tensor::from_f32(&values, DType::BF16, Shape::d2(rows, K))?.to(&heap.device())
}

fn poisoned(heap: &Heap, rows: usize) -> Result<Tensor> {
    Tensor::poisoned_on(&heap.device(), DType::BF16, Shape::d2(rows, N))
}

/// What `explain` says and the results of each operation, by `kernel`.
fn made_by(kernel: GemmBackend, heap: &Heap, s: &Stream) -> Result<Vec<(String, Vec<f32>)>> {
    let config = || Some(OverlapConfig { kernel, ..OverlapConfig::of(Algo::Pipelined, 2) });
    let (me, mine) = (heap.team().rank().idx() as u64, M / heap.team().size());
    let (part, x, w) = (integers(heap, me, mine)?, integers(heap, me, M)?, integers(heap, 9, N)?);
    let [gathered, scattered, reduced] = [M, mine, M].map(|rows| poisoned(heap, rows));
    let (gathered, scattered, reduced) = (gathered?, scattered?, reduced?);
    let rs = GemmRsDesc::new(M, N, K, DType::BF16);
    let ag = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::BF16), heap, config())?;
    let (ar, rs) = (
        GemmArPlan::new(GemmArDesc(rs.clone()), heap, config())?,
        GemmRsPlan::new(rs, heap, config())?,
    );
    ag.prepare(s)?;
    rs.prepare(s)?;
    ar.prepare(s)?;
    ag.launch(s, M, AgGemmInputs::new(part, w.clone(), gathered.clone()))?.wait()?;
    rs.launch(s, M, GemmRsInputs::new(x.clone(), w.clone(), scattered.clone()))?.wait()?;
    ar.launch(s, M, GemmRsInputs::new(x, w, reduced.clone()))?.wait()?;
    let done = [(ag.explain(), gathered), (rs.explain(), scattered), (ar.explain(), reduced)];
    done.into_iter().map(|(why, t)| Ok((why.to_string(), t.to_f32()?))).collect()
}

#[test]
fn the_kernel_of_a_team_is_the_callers_choice() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n.min(2), cfg(), |world| {
        let (heap, s) = heap(&world, "kernels")?;
        let own = made_by(GemmBackend::Auto, &heap, &s)?;
        for ((why, values), (_, want)) in
            made_by(GemmBackend::Portable, &heap, &s)?.iter().zip(&own)
        {
            assert!(why.contains("the portable kernel, because it was asked for"), "{why}");
            assert!(why.contains(" portable"), "the configuration names it: {why}");
            assert!(values == want && values.iter().any(|v| *v != 0.0), "{why}");
        }
        // A choice that cannot be is refused, with a way out, and not replaced by another.
        let activation = Activation::Gelu;
        let epilogue = Epilogue { activation, ..Epilogue::NONE };
        let desc = AgGemmDesc { epilogue, ..AgGemmDesc::new(M, N, K, DType::BF16) };
        let kernel = GemmBackend::CublasLt;
        let config = OverlapConfig { kernel, ..OverlapConfig::of(Algo::Sequential, 1) };
        let e = AgGemmPlan::new(desc, &heap, Some(config))?.prepare(&s).unwrap_err();
        assert!(e.is_unsupported() && e.to_string().contains("activations"), "{e}");
        assert!(e.get_hint().is_some(), "{e}");
        Ok(())
    })
    .unwrap();
}
