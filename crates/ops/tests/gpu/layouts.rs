//! One protocol: kernels and the host leave the same bytes in the areas of an expert-parallel
//! layer.

use std::sync::PoisonError;

use tilewire_core::{BackendKind, DType, Result, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::ep::{EpDesc, EpDispatch, EpLayout, EpLeft, EpPlan};
use tilewire_symm::{Heap, HeapCfg, World, WorldCfg};

use crate::DEVICES;
use crate::team_ops::{heap, ranks};

const TOKENS: usize = 13;
const HIDDEN: usize = 24;
const SCALES: usize = 3;
const K: usize = 3;

/// Experts of each choice in round `round`, some masked: ranks differ in tokens.
fn choices(d: &EpDesc, me: usize, round: u64) -> Vec<i64> {
    let mut rng = Rng::new(100 * round + me as u64);
    let tokens = TOKENS - (me + round as usize) % 3;
    let experts = d.num_experts() as u64;
    let one = |e: u64| if e < experts { e as i64 } else { -1 };
    (0..tokens * K).map(|_| one(rng.below(experts + 2))).collect()
}

/// Two rounds of all phases; what is left, but for words that only one executor has.
fn rounds(d: &EpDesc, (heap, s): (&Heap, &Stream), straight: bool) -> Result<Vec<EpLeft>> {
    let (on, me) = (heap.device(), heap.team().rank().idx());
    let plan = EpPlan::with_fine_chunks(d.clone(), heap)?;
    plan.prepare(s)?;
    let x_recv = match straight {
        true => plan.zero_copy_recv()?,
        false => Tensor::poisoned_on(&on, d.dtype, Shape::d2(d.recv_rows(), HIDDEN))?,
    };
    let rows = |t, rows, cols| Tensor::poisoned_on(&on, t, Shape::d2(rows, cols));
    for round in 0..2 {
        let mut rng = Rng::new(7 + 10 * round + me as u64);
        let mut random = |t: DType, rows: usize, cols: usize| -> Result<Tensor> {
            let v: Vec<f32> = (0..rows * cols).map(|_| rng.uniform(-1.0, 1.0)).collect();
            Tensor::from_f32(&v, t, Shape::d2(rows, cols))?.to(&on)
        };
        let idx = choices(d, me, round);
        let tokens = idx.len() / K;
        let idx = Tensor::from_slice(&idx, Shape::d2(tokens, K))?.to(&on)?;
        let handle = plan.handle()?;
        let (x, w) = (random(d.dtype, tokens, HIDDEN)?, random(DType::F32, tokens, K)?);
        let scales = random(DType::F32, tokens, SCALES)?;
        let vector = || Tensor::poisoned_on(&on, DType::F32, Shape::d1(d.capacity));
        let recv = EpDispatch {
            x: x_recv.clone(),
            scales: Some(rows(DType::F32, d.recv_rows(), SCALES)?),
            weights: Some(vector()?),
        };
        let (y, g) = (random(d.out, d.capacity, HIDDEN)?, random(d.out, tokens, HIDDEN)?);
        let d_recv = random(d.out, d.recv_rows(), HIDDEN)?;
        let dw = random(DType::F32, d.capacity, 1)?.reshape(Shape::d1(d.capacity))?;
        let (out, dx) = (rows(d.out, tokens, HIDDEN)?, rows(d.out, tokens, HIDDEN)?);
        let (dy, dw_home) = (rows(d.out, d.capacity, HIDDEN)?, rows(DType::F32, tokens, K)?);
        plan.route(s, &idx, None, &handle)?.join(s)?;
        plan.dispatch(s, &handle, &x, (Some(&w), Some(&scales)), &recv)?.join(s)?;
        plan.combine(s, &handle, &y, recv.weights.as_ref(), &out)?.join(s)?;
        if !straight {
            plan.combine_bwd(s, &handle, &g, None, &dy)?.join(s)?;
        }
        plan.dispatch_bwd(s, &handle, (&d_recv, Some(&dw)), (&dx, Some(&dw_home)))?.join(s)?;
        s.synchronize()?;
        heap.team().check()?;
    }
    // The others have written all that they write here.
    heap.team().agree(true)?;
    let left = plan.left()?;
    heap.team().agree(true)?;
    // The host needs no flags of its own.
    Ok(left
        .into_iter()
        .filter(|p| p.writer != me || !(p.what.starts_with("credit") || p.what.starts_with("arr")))
        .collect())
}

/// Whether a rank sent token `token` to `to` in the last round, and in how many copies.
fn copies(d: &EpDesc, from: usize, token: usize, to: usize) -> usize {
    let theirs = d.first_expert(to)..d.first_expert(to) + d.experts_per_rank[to];
    let idx = choices(d, from, 1);
    let mine = idx.chunks_exact(K).nth(token).unwrap_or_default();
    mine.iter().filter(|&&e| e >= 0 && theirs.contains(&(e as usize))).count()
}

/// Bytes of a place that the last round has written.
fn written(d: &EpDesc, me: usize, straight: bool, p: &EpLeft) -> usize {
    let (came, sent) = (copies(d, p.writer, p.token, me), copies(d, me, p.token, p.writer));
    match p.what {
        // Kernels by bulk copies lay a rank's own rows from where they are.
        "row" if straight || came == 0 || p.writer == me => 0,
        "scales" if came == 0 => 0,
        "return" if sent == 0 => 0,
        "gradients" => 4 * sent,
        _ => p.bytes.len(),
    }
}

#[test]
fn both_executors_leave_the_same_bytes() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, WorldCfg::default(), |world| {
        let me = world.rank().idx();
        for (layout, straight) in [
            (EpLayout::ExpertMajor { align: 4 }, false),
            (EpLayout::ExpertMajor { align: 4 }, true),
            (EpLayout::RankMajor { align: 2 }, true),
            (EpLayout::Flat { align: 1 }, false),
        ] {
            let mut d = EpDesc::new(n, 2 * n + 1, TOKENS, HIDDEN, K);
            (d.dtype, d.out, d.num_scales, d.layout) = (DType::F8E4M3, DType::BF16, SCALES, layout);
            d.capacity = d.worst_case();
            let (device, stream) = heap(&world, "device")?;
            let host = world.everyone("host")?.heap(BackendKind::Host, HeapCfg::new(4 << 20))?;
            let by_kernels = rounds(&d, (&device, &stream), straight)?;
            let by_host = rounds(&d, (&host, &Stream::new("host")?), straight)?;
            assert_eq!(by_kernels.len(), by_host.len());
            let mut compared = 0;
            for (k, h) in by_kernels.iter().zip(&by_host) {
                let len = written(&d, me, straight, h);
                assert_eq!((k.what, k.writer, k.token), (h.what, h.writer, h.token));
                let place = format!("{} {} {} of rank {me}: {d}", h.what, h.writer, h.token);
                assert_eq!(k.bytes[..len], h.bytes[..len], "{place}");
                compared += usize::from(len > 0);
            }
            assert!(compared > n * TOKENS, "{compared} places");
        }
        Ok(())
    })
    .unwrap();
}
