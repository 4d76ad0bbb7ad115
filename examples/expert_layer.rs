//! Tokens travel to their experts and back: route, dispatch, expert products, combine.
//!
//! `cargo run --release --package tilewire --example expert_layer`

use std::io::Write;

use tilewire::core::Rng;
use tilewire::ops::ep::{EpDesc, EpDispatch, EpPlan};
use tilewire::ops::grouped_gemm::{GroupedDesc, GroupedFprop, GroupedGemmPlan, Splits};
use tilewire::prelude::*;

const T: usize = 64; // tokens of a rank
const H: usize = 32;
const E: usize = 8;
const K: usize = 2;

fn main() -> Result<()> {
    let counts = World::run_threads(4, WorldCfg::default(), |world| {
        let team = world.everyone("ep")?;
        let desc = EpDesc::new(team.size(), E, T, H, K);
        let memory = EpPlan::memory(&desc);
        let heap = team.heap(BackendKind::Host, HeapCfg::new(memory.symmetric + 4096))?;
        let (ep, stream) = (EpPlan::new(desc.clone(), &heap)?, Stream::new("main")?);
        ep.prepare(&stream)?;
        let experts =
            GroupedGemmPlan::new(GroupedDesc::new(E / 4, desc.capacity, H, H, DType::F32))?;
        experts.prepare(&stream)?;

        let mut rng = Rng::new(u64::from(team.rank().get()));
        let idx: Vec<i64> = (0..T)
            .flat_map(|_| {
                let first = rng.below(E as u64) as i64;
                [first, (first + 1) % E as i64]
            })
            .collect();
        let handle = ep
            .route(&stream, &Tensor::from_slice(&idx, Shape::d2(T, K))?, None, &ep.handle()?)?
            .join(&stream)?;
        let recv = EpDispatch {
            x: Tensor::poisoned(DType::F32, Shape::d2(desc.capacity, H)),
            scales: None,
            weights: None,
        };
        let x = Tensor::from_slice(&vec![1.0f32; T * H], Shape::d2(T, H))?;
        let recv = ep.dispatch(&stream, &handle, &x, (None, None), &recv)?.join(&stream)?;
        // Identity experts: what comes back is each token once for each of its experts.
        let eye: Vec<f32> =
            (0..E / 4 * H * H).map(|i| f32::from(u8::from(i / H % H == i % H))).collect();
        let y = experts
            .fprop(
                &stream,
                GroupedFprop {
                    x: (&recv.x).into(),
                    w: (&Tensor::from_slice(&eye, Shape::d2(E / 4 * H, H))?).into(),
                    bias: None,
                    splits: Splits::counts(handle.m_splits()),
                    out: Tensor::zeros(DType::F32, Shape::d2(desc.capacity, H)),
                    aux_out: None,
                },
            )?
            .join(&stream)?;
        let out = Tensor::poisoned(DType::F32, Shape::d2(T, H));
        let out = ep.combine(&stream, &handle, &y, None, &out)?.wait()?;
        assert!(out.to_vec::<f32>()?.iter().all(|&v| v == K as f32));
        Ok(handle.totals()?.counts)
    })?;
    writeln!(std::io::stdout(), "tokens per expert: {counts:?}").map_err(|e| Error::io("stdout", e))
}
