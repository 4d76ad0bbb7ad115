//! Times of attention of few queries over many keys on CUDA device 0, bf16, random inputs, heads of
//! 128: by the usual choice and by the backends that do not cut keys. One JSON object a line, with
//! the rate at which keys and values are read, and its ratio to the rate at which a kernel reads
//! that does nothing else, measured beside it. Replays of graphs whose launches take copies of keys
//! and values in turn, so that these come from memory.
//!
//! `cargo run --release -p tilewire-ops --example rates decode`

use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{CudaContext, Grid, LaunchArgs};
use tilewire_device::jit::KernelSpec;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnInputs, AttnMask, AttnOut, Sequences,
};

use crate::drawn::replays;
use crate::{Launch, Turn, normal, take_turns};

const DIM: usize = 128;
/// Bytes of keys and values that launches go through in turn: several times the L2 of an H200.
const COLD_BYTES: usize = 400 << 20;
/// The fewest launches of a graph.
const LAUNCHES: usize = 8;

/// Sums what it reads, 64 bytes of a thread at a time.
const READ: &str = r#"
extern "C" __global__ void read(const uint4* x, unsigned long long num, unsigned* out) {
    uint4 sum = make_uint4(0, 0, 0, 0);
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < num; i += 4 * step) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 y = x[i + j * step];
            sum.x ^= y.x, sum.y ^= y.y, sum.z ^= y.z, sum.w ^= y.w;
        }
    }
    for (; i < num; i += step) {
        const uint4 y = x[i];
        sum.x ^= y.x, sum.y ^= y.y, sum.z ^= y.z, sum.w ^= y.w;
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678) *out = 1;
}
"#;

/// Sequences of `queries` over `keys` each.
struct Case {
    heads: (usize, usize),
    queries: usize,
    keys: Vec<usize>,
}

fn cases() -> Vec<Case> {
    let of = |heads, queries, num, keys| Case { heads, queries, keys: vec![keys; num] };
    let mut all = Vec::new();
    for keys in [1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10] {
        all.extend([1, 4, 16].map(|queries| of((32, 8), queries, 1, keys)));
    }
    all.extend([1, 4].map(|queries| of((64, 8), queries, 1, 128 << 10)));
    all.extend([of((32, 32), 1, 8, 4 << 10), of((8, 1), 1, 16, 32 << 10)]);
    all.extend([of((32, 8), 1, 16, 8 << 10), of((32, 8), 1, 64, 4 << 10)]);
    // From 100 to 8000 keys.
    let keys = (0..64).map(|i| 100 + i * 37 % 64 * 7900 / 63).collect();
    all.push(Case { heads: (32, 8), queries: 1, keys });
    all
}

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    cases().iter().try_for_each(|c| bench(&ctx, c))
}

fn desc(case: &Case) -> Result<AttentionDesc> {
    let mut ends = [vec![0], vec![0]];
    for keys in &case.keys {
        let last = ends.each_ref().map(|e| e[e.len() - 1]);
        ends[0].push(last[0] + case.queries);
        ends[1].push(last[1] + keys);
    }
    let mask = AttnMask::CAUSAL;
    Ok(AttentionDesc {
        sequences: Sequences::packed(&ends[0], &ends[1])?,
        ..AttentionDesc::new(1, case.heads, DIM, DType::BF16, mask)
    })
}

/// A graph of kernels that read each tensor.
pub(crate) fn reads<'a>(
    ctx: &CudaContext,
    stream: &'a Stream,
    tensors: [Tensor; 2],
) -> Result<Launch<'a>> {
    let (text, arch) = (READ.to_owned(), ctx.arch()?);
    let spec = KernelSpec { name: "read.cu".to_owned(), text, defines: Vec::new(), arch };
    let (kernel, blocks) = (ctx.module(&spec)?.kernel("read")?, 8 * ctx.num_sms()?);
    let out = Tensor::zeros_on(&Device::Cuda(ctx.clone()), DType::I32, Shape::d1(1))?;
    let all = replays(stream, &tensors, 2, |t| {
        let (x, len, to) = (t.cuda()?.addr(), t.len_bytes() as u64 / 16, out.cuda()?.addr());
        let args = LaunchArgs::new().arg(&x).arg(&len).arg(&to);
        // SAFETY: the kernel takes an address, the number of 16 bytes there, and the address of a
        // word; both tensors live until the graph has run.
        unsafe { kernel.launch(stream.cuda()?, Grid::new(blocks, 256), args) }
    })?;
    Ok(Box::new(move || {
        let _held = (&tensors, &out);
        all()
    }))
}

fn bench(ctx: &CudaContext, case: &Case) -> Result<()> {
    let (stream, device) = (Stream::on(ctx)?, Device::Cuda(ctx.clone()));
    let (desc, (hq, hkv)) = (desc(case)?, case.heads);
    let Sequences { tokens_q, tokens_kv, .. } = desc.sequences;
    let bytes = 4 * tokens_kv * hkv * DIM;
    let num = COLD_BYTES.div_ceil(bytes) + 1;
    let q = normal(ctx, &stream, tokens_q, hq * DIM)?;
    let [k, v] = [(); 2].map(|()| normal(ctx, &stream, num * tokens_kv, hkv * DIM));
    let (k, v) = (k?, v?);
    let copies = (0..num)
        .map(|i| {
            let of = |t: &Tensor| t.rows(i * tokens_kv, tokens_kv);
            Ok(AttnInputs::new(q.clone(), of(&k)?, of(&v)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let launches = LAUNCHES.next_multiple_of(num);
    let out = Tensor::zeros_on(&device, DType::BF16, Shape::d2(tokens_q, hq * DIM))?;
    let lse = Tensor::zeros_on(&device, DType::F32, Shape::d2(hq, tokens_q))?;
    let mut turns = vec![Turn::new("reads", "", reads(ctx, &stream, [k.clone(), v.clone()])?)];
    for by in [AttnBackend::Auto, AttnBackend::Hopper, AttnBackend::Portable] {
        let plan = AttentionPlan::with_backend(desc.clone(), None, by)?;
        match plan.prepare(&stream) {
            Err(e) if e.is_unsupported() => continue,
            r => r?,
        }
        let launch = replays(&stream, &copies, launches, |x| {
            let out = AttnOut { out: out.clone(), lse: lse.clone() };
            plan.launch_fwd(&stream, x, out).map(drop)
        })?;
        turns.push(Turn::new(by, plan.explain(), launch));
    }
    take_turns(ctx, &stream, &mut turns)?;
    let read = (bytes * num) as f64 / turns[0].median() / 1e6;
    for t in &turns[1..] {
        let us = t.median() / launches as f64;
        let tbs = bytes as f64 / us / 1e6;
        println!(
            "{{\"device\":\"{}\",\"work\":\"decode\",\"sequences\":{},\"queries\":{},\"keys\":{},\
             \"heads\":\"{hq}/{hkv}\",\"dim\":{DIM},\"backend\":\"{}\",\"us\":{us:.2},\
             \"tb_per_s\":{tbs:.3},\"read_tb_per_s\":{read:.3},\"of_read_rate\":{:.3}}}",
            ctx.name()?,
            case.keys.len(),
            case.queries,
            tokens_kv,
            t.by,
            tbs / read,
        );
    }
    Ok(())
}
