//! Times of products of shapes that nobody has tuned for, on CUDA device 0, bf16, random inputs:
//! drawn from a seed, or of few rows whose weights are not in L2, or of few tiles, with the
//! contraction cut into so many parts. One JSON object a line.
//!
//! A graph of many launches is replayed: many of these products take less time than a host needs to
//! launch them.
//!
//! `cargo run --release -p tilewire-ops --example rates drawn [SEED [NUMBER [ROWS]]]`, of which
//! those of at most so many rows are run, `rates cold [parts] [M,N,K ...]`, `rates parts [M,N,K
//! ...]`.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::gemm::{GemmBackend, GemmDesc, GemmInputs, GemmPlan};

use crate::decode::reads;
use crate::gemm::{fastest, prepared, shape};
use crate::{Launch, Turn, normal, take_turns};

/// A backend, and the parts that contractions are cut into, if they are asked for.
type Way = (GemmBackend, Option<usize>);
const WAYS: [Way; 3] =
    [(GemmBackend::Auto, None), (GemmBackend::CublasLt, None), (GemmBackend::Hopper, None)];
const SEED: u64 = 20_261_128;
const NUMBER: usize = 60;
/// The most rows, and the most elements of A and D, of a drawn shape.
const ROWS: f64 = 65536.0;
const ELEMENTS: usize = 1 << 29;
/// Weights of few rows: columns and contraction.
const WEIGHTS: [[usize; 2]; 6] =
    [[4096, 4096], [7168, 8192], [8192, 28672], [16384, 2048], [28672, 8192], [2048, 7168]];
/// Products of few tiles, and the parts that their contractions are cut into.
const FEW_TILES: [[usize; 3]; 12] = [
    [1, 4096, 4096],
    [64, 4096, 4096],
    [64, 7168, 8192],
    [64, 8192, 28672],
    [16, 16384, 2048],
    [1, 4992, 1024],
    [150, 2240, 3072],
    [300, 1024, 8192],
    [675, 2048, 7808],
    [1024, 1024, 16384],
    [2048, 512, 4096],
    [512, 512, 65536],
];
const PARTS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
const FEW: [usize; 5] = [1, 4, 16, 32, 64];
/// Parts of the contraction that the kernel of few rows has.
const FEW_PARTS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
/// Bytes of weights that launches go through in turn: four times the L2 of an H200 and more.
const COLD_BYTES: usize = 256 << 20;
/// The fewest launches of a graph.
const LAUNCHES: usize = 10;

/// M from 1 to 65536 in equal parts of its logarithm, N and K multiples of 64 from 512 to 16384.
fn draw(rng: &mut Rng) -> [usize; 3] {
    loop {
        let m = ROWS.powf(rng.next_f64()).round() as usize;
        let mut side = || 64 * (8.0 * 32f64.powf(rng.next_f64())).round() as usize;
        let (n, k) = (side(), side());
        if m * n.max(k) <= ELEMENTS {
            return [m, n, k];
        }
    }
}

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let mut given = std::env::args().skip(2).map_while(|a| a.parse::<u64>().ok());
    let (seed, number) =
        (given.next().unwrap_or(SEED), given.next().map_or(NUMBER, |n| n as usize));
    let most = given.next().map_or(usize::MAX, |n| n as usize);
    let mut rng = Rng::new(seed);
    let shapes: Vec<_> = (0..number).map(|_| draw(&mut rng)).filter(|s| s[0] <= most).collect();
    shapes.into_iter().try_for_each(|shape| bench(&ctx, "drawn", shape, 1, &WAYS, true))
}

/// Few rows: what their time is made of is the reading of the weights. With `parts` also with each
/// number of them.
pub(crate) fn cold() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let given: Vec<[usize; 3]> = std::env::args().skip(2).filter_map(shape).collect();
    let all = WEIGHTS.into_iter().flat_map(|[n, k]| FEW.map(|m| [m, n, k])).collect();
    let in_parts = std::env::args().any(|a| a == "parts").then_some(FEW_PARTS);
    let parts = in_parts.into_iter().flatten().map(|n| (GemmBackend::Hopper, Some(n)));
    let ways: Vec<Way> = WAYS.into_iter().chain(parts).collect();
    let shapes = if given.is_empty() { all } else { given };
    shapes.into_iter().try_for_each(|[m, n, k]| {
        let copies = COLD_BYTES.div_ceil(2 * n * k) + 1;
        bench(&ctx, "cold", [m, n, k], copies, &ways, false)
    })
}

/// Few tiles: the core with each number of parts beside what it chooses, and cuBLASLt's fastest.
pub(crate) fn parts() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let given: Vec<[usize; 3]> = std::env::args().skip(2).filter_map(shape).collect();
    let shapes = if given.is_empty() { &FEW_TILES[..] } else { &given };
    let parts = PARTS.map(|n| (GemmBackend::Hopper, Some(n)));
    let ways: Vec<Way> = WAYS.into_iter().chain(parts).collect();
    shapes.iter().try_for_each(|s| bench(&ctx, "parts", *s, 1, &ways, true))
}

/// A graph of `num` launches, which take the weights in turn.
pub(crate) fn replays<'a, T>(
    stream: &'a Stream,
    weights: &[T],
    num: usize,
    launch: impl Fn(&T) -> Result<()>,
) -> Result<Launch<'a>> {
    launch(&weights[0])?;
    stream.begin_capture()?;
    weights.iter().cycle().take(num).try_for_each(launch)?;
    let graph = stream.end_capture()?.instantiate()?;
    Ok(Box::new(move || stream.replay(&graph)))
}

/// One product, by launches that take `copies` of the weights in turn.
fn bench(
    ctx: &CudaContext,
    work: &str,
    [m, n, k]: [usize; 3],
    copies: usize,
    ways: &[Way],
    best: bool,
) -> Result<()> {
    let stream = Stream::on(ctx)?;
    let (a, all) = (normal(ctx, &stream, m, k)?, normal(ctx, &stream, copies * n, k)?);
    let weights = (0..copies).map(|i| all.rows(i * n, n)).collect::<Result<Vec<_>>>()?;
    let device = Device::Cuda(ctx.clone());
    let out = Tensor::zeros_on(&device, DType::BF16, Shape::d2(m, n))?;
    let desc = GemmDesc::nt(m, n, k, DType::BF16);
    let (mut turns, num) = (Vec::new(), LAUNCHES.next_multiple_of(copies));
    if copies > 1 {
        let halves = [all.rows(0, copies / 2 * n)?, all.rows(copies / 2 * n, copies / 2 * n)?];
        turns.push(Turn::new("reads", "", reads(ctx, &stream, halves)?));
    }
    for (backend, parts) in ways {
        let plan = GemmPlan::with_backend(desc, *backend)?;
        let plan = parts.iter().fold(plan, |plan, n| plan.with_parts(*n));
        let Some(explain) = prepared(&stream, &plan)? else { continue };
        let launch = |w: &Tensor| {
            let inputs = GemmInputs::new(a.clone(), w.clone(), out.clone());
            plan.launch(&stream, inputs).map(drop)
        };
        let by = parts.map_or(backend.to_string(), |n| format!("{backend} {n}"));
        turns.push(Turn::new(by, explain, replays(&stream, &weights, num, launch)?));
    }
    if best {
        let best = fastest(ctx, &stream, &desc, [&a, &weights[0], &out])?;
        let launch = replays(&stream, &weights, num, |_| (best.launch)())?;
        turns.push(Turn::new(&best.by, &best.explain, launch));
    }
    take_turns(ctx, &stream, &mut turns)?;
    // The rate at which a kernel reads all copies at once.
    let mut read = String::new();
    if copies > 1 {
        let us = turns.remove(0).median();
        read = format!(",\"read_gbs\":{:.0}", (2 * (copies / 2 * 2) * n * k) as f64 / us / 1e3);
    }
    for t in turns {
        let (us, by, explain) = (t.median() / num as f64, &t.by, &t.explain);
        let tflops = 2.0 * (m * n) as f64 * k as f64 / us / 1e6;
        let gbs = (2 * n * k) as f64 / us / 1e3;
        println!(
            "{{\"device\":\"{}\",\"work\":\"{work}\",\"m\":{m},\"n\":{n},\"k\":{k},\
             \"backend\":\"{by}\",\"us\":{us:.1},\"tflops\":{tflops:.1},\
             \"weights_gbs\":{gbs:.0}{read},\"explain\":\"{explain}\"}}",
            ctx.name()?
        );
    }
    Ok(())
}
