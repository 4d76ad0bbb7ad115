//! The backward pass of `attention/sm80_attention.cu` against an f64 reference.

use tilewire_kernels::abi::{TwAttn, TwDqSums};
use tilewire_kernels::attention::delta_rows;
use tilewire_kernels::attention::hopper_fused::HopperFused;

use crate::attention::{Build, Case, F32, ODD, PAIRED, Pair, SMALL, case, dot};
use crate::gemm::{Type, number};
use crate::host::Launch;
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    attention_grads_masks_and_lengths,
    attention_grads_packed_rows_and_groups,
    attention_grads_by_pairs,
    attention_grads_extras,
    attention_grads_of_parts,
    attention_grads_plain,
    attention_grads_of_bias_and_sink,
];

/// Tensors of the backward pass: with what the forward pass left.
struct Saved {
    x: [Vec<f32>; 3],
    out: Vec<f32>,
    d_out: Vec<f32>,
    lse: Vec<f32>,
    pairs: Vec<Vec<Pair>>,
}

/// Type of the output that is read, and of its gradient.
fn saved_type(c: &Case, on: &Build) -> Type {
    if on.plain { c.out } else { on.input }
}

/// Elements with their bounds.
type Bounded = Vec<(f64, f64)>;

impl Saved {
    fn new(c: &Case, on: &Build) -> Self {
        let (x, hq, rows, t) = (c.inputs(on), c.heads.0, Case::rows(&c.q), saved_type(c, on));
        let width = hq * on.dv;
        let (mut out, mut lse, mut pairs) = (vec![0.0; rows * width], Vec::new(), Vec::new());
        for (h, r) in (0..hq).flat_map(|h| (0..rows).map(move |r| (h, r))) {
            let (l, y) = c.reference(on, &x, h, r);
            for (d, (y, _)) in y.iter().enumerate() {
                out[r * width + h * on.dv + d] = t.round(*y as f32);
            }
            lse.push(l as f32);
            pairs.push(c.pairs(on, &x, h, r).unwrap_or_default());
        }
        let d_out = (0..rows * width).map(|i| t.round(number(false, 5, i))).collect();
        Self { x, out, d_out, lse, pairs }
    }

    /// dq, dk, dv, and how far each element may be off.
    fn reference(&self, c: &Case, on: &Build) -> [Bounded; 3] {
        let ((hq, hkv), rows, (u, _)) = (c.heads, Case::rows(&c.q), Case::narrow(on).roundoff());
        let mut g = self.x.each_ref().map(|x| vec![(0.0, 0.0); x.len()]);
        for (h, r) in (0..hq).flat_map(|h| (0..rows).map(move |r| (h, r))) {
            let (at, kvh) = (r * hq + h, h / (hq / hkv));
            let d_out = &self.d_out[at * on.dv..][..on.dv];
            let delta = dot(d_out, &self.out[at * on.dv..]);
            let lse = f64::from(self.lse[h * rows + r]);
            for pair in &self.pairs[h * rows + r] {
                let (p, kv) = ((pair.z - lse).exp(), pair.l * hkv + kvh);
                let v = &self.x[2][kv * on.dv..][..on.dv];
                let dp = dot(d_out, v) * pair.keep;
                let magnitude: f64 =
                    d_out.iter().zip(v).map(|(a, b)| f64::from((a * b).abs())).sum();
                let ds = p * (dp - delta) * pair.slope;
                // ds and p are rounded before the products; the rest is f32.
                let e = u * ds.abs()
                    + 2e-5 * p * (magnitude * pair.keep + delta.abs() + 0.1) * pair.slope.abs();
                let mut add = |which: usize, at: usize, x: f32, y: f64, e: f64| {
                    let (sum, bound): &mut (f64, f64) = &mut g[which][at];
                    *sum += y * f64::from(x);
                    *bound += e * f64::from(x.abs()) * 1.1;
                };
                for d in 0..on.dqk {
                    let (q, k) = (at * on.dqk + d, kv * on.dqk + d);
                    add(0, q, self.x[1][k], ds, e);
                    add(1, k, self.x[0][q], ds, e);
                }
                for (d, x) in d_out.iter().enumerate() {
                    add(2, kv * on.dv + d, *x, p * pair.keep, (u + 1e-5) * p * pair.keep);
                }
            }
        }
        let (out_u, out_tiny) = c.out.roundoff();
        let tiny = 64.0 * Case::narrow(on).roundoff().1 + out_tiny;
        g.map(|v| {
            v.into_iter().map(|(y, e)| (y, e * (1.0 + out_u) + out_u * y.abs() + tiny)).collect()
        })
    }
}

/// Runs the backward pass; the bytes of dq, dk and dv. Panics if an element is wrong.
pub fn check(c: &Case, on: &Build, seed: u64) -> [Vec<u8>; 3] {
    let (hq, hkv) = (c.heads.0 as u32, c.heads.1 as u32);
    let names = if on.tiles.split { vec!["tw_attn_dk", "tw_attn_dv"] } else { vec!["tw_attn_dkv"] };
    let kernels: Vec<_> =
        ["tw_attn_delta", "tw_attn_dq"].into_iter().chain(names).map(|n| on.kernel(n)).collect();
    // Of the plain unit a warp to a row.
    let of_block = if on.plain { 8 } else { delta_rows(on.dv) as u32 };
    let [dq_threads, dkv_threads] = [on.tiles.dq, on.tiles.dkv].map(|t| 32 * t.warps as u32);
    check_by(c, on, (seed, f32::NAN), |[of_q, of_kv], _, _| {
        let launch = |i: usize| match i {
            0 => kernels[0]
                .grid([(of_q.tokens_q * hq).div_ceil(of_block), 1, 1], [256, 1, 1])
                .arg(of_q),
            1 => kernels[1]
                .grid([of_q.tiles * hq, 1, 1], [dq_threads, 1, 1])
                .smem(on.dq_smem() as u32)
                .arg(of_q),
            _ => kernels[i]
                .grid([of_kv.tiles * hkv, 1, 1], [dkv_threads, 1, 1])
                .smem(on.dkv_smem() as u32)
                .arg(of_kv),
        };
        (0..kernels.len()).map(launch).collect()
    })
}

/// The same by the launches that are made of the parameters, over queries and over keys, a word
/// that is zero, and must be zero at the end, and where dq is summed, whose words must be, too;
/// `sums`: what these are in the beginning.
pub fn check_by<'a>(
    c: &Case,
    on: &Build,
    (seed, sums): (u64, f32),
    launches: impl FnOnce(&[TwAttn; 2], u64, &TwDqSums) -> Vec<Launch<'a>>,
) -> [Vec<u8>; 3] {
    let (saved, t, (hq, hkv)) = (Saved::new(c, on), Case::narrow(on), c.heads);
    let widths = [hq * on.dqk, hkv * on.dqk, hkv * on.dv];
    // Rows that belong to no sequence must not come into any sum.
    let tensor = |name, of_q, t, mut v: Vec<f32>, width| {
        c.poison(of_q, &mut v, width);
        Case::memory(name, t, &v, width, c.pad)
    };
    let inputs = [0, 1, 2].map(|i| {
        let of_q = i == 0;
        tensor(["q", "k", "v"][i], of_q, t, saved.x[i].clone(), widths[i])
    });
    let [out, d_out] = [("out", &saved.out), ("d_out", &saved.d_out)]
        .map(|(n, v)| tensor(n, true, saved_type(c, on), v.clone(), hq * on.dv));
    let lse = Case::memory("lse", Type::F32, &saved.lse, 1, 0);
    let delta = Case::memory("delta", Type::F32, &vec![f32::NAN; saved.lse.len()], 1, 0);
    let grads = [0, 1, 2].map(|i| {
        let poison = vec![f32::NAN; saved.x[i].len()];
        Case::memory(["dq", "dk", "dv"][i], c.out, &poison, widths[i], c.pad)
    });
    let bias = c.bias_memory();
    let tables = [(true, on.tiles.dq.m), (false, on.tiles.dkv.n)].map(|(of_q, m)| {
        let (own, other, tiles) = c.tables(of_q, m);
        (Case::table("own", &own), Case::table("other", &other), own.len() as u32, tiles)
    });
    let params = [0, 1].map(|i: usize| TwAttn {
        q: inputs[0].addr(),
        k: inputs[1].addr(),
        v: inputs[2].addr(),
        out: out.addr(),
        lse: lse.addr(),
        bias: if c.bias > 0 { bias.addr() } else { 0 },
        own: tables[i].0.addr(),
        other: tables[i].1.addr(),
        num_own: tables[i].2,
        tiles: tables[i].3,
        d_out: d_out.addr(),
        delta: delta.addr(),
        dq: grads[0].addr(),
        dk: grads[1].addr(),
        dv: grads[2].addr(),
        ..c.param(on)
    });
    let counter = Memory::new("counter", ANY, 4);
    let sums = Case::memory("sums", Type::F32, &vec![sums; saved.x[0].len()], 1, 0);
    let num = HopperFused::words(params[0].tiles as usize, hq);
    let words = Memory::new("words", ANY, 4 * num);
    let to = TwDqSums { sums: sums.addr(), words: words.addr() };
    let launches = launches(&params, counter.addr(), &to);
    let memory = inputs.iter().chain(&grads).chain([&out, &d_out, &lse, &delta, &bias, &counter]);
    let memory = memory.chain([&sums, &words]);
    let memory = memory.chain(tables.iter().flat_map(|t| [&t.0, &t.1]));
    let mut run = Run::new(seed).memory(memory).stream(0, launches);
    run.yield_permille = if seed.is_multiple_of(2) { 200 } else { 5 };
    run.max_steps = 20_000_000;
    run.warp_pauses = seed % 4 > 1;
    run.go().unwrap_or_else(|e| panic!("{c:?}: {e}"));
    assert_eq!(counter.read::<u32>(), [0], "{c:?}: the counter of tiles");
    assert!(words.read::<u32>().iter().all(|w| *w == 0), "{c:?}: turns are left");
    let bytes = grads.each_ref().map(Memory::read::<u8>);
    compare(c, &saved.reference(c, on), &bytes, widths);
    bytes
}

/// Panics if an element of dq, dk or dv is wrong, or something between their rows was written.
fn compare(c: &Case, want: &[Vec<(f64, f64)>; 3], bytes: &[Vec<u8>; 3], widths: [usize; 3]) {
    for i in 0..3 {
        let (got, ld) = (c.out.values(&bytes[i]), widths[i] + c.pad);
        for (at, g) in got.iter().enumerate() {
            let (row, col, name) = (at / ld, at % ld, ["dq", "dk", "dv"][i]);
            if col >= widths[i] {
                assert!(g.is_nan(), "{c:?}: written between rows");
                continue;
            }
            let ((y, e), g) = (want[i][row * widths[i] + col], f64::from(*g));
            assert!((g - y).abs() <= e, "{c:?}: {name} is {g}, not {y} +- {e} at {row} {col}");
        }
    }
}

fn attention_grads_masks_and_lengths() {
    for (i, (sq, skv)) in [(1, 1), (63, 65), (65, 130), (130, 63)].into_iter().enumerate() {
        let out = [Type::F32, Type::Bf16, Type::F16][i % 3];
        let c = Case { out, pad: [0, 8][i % 2], ..case(sq, skv) };
        let c = Case { heads: [(2, 1), (1, 1), (2, 2)][i % 3], ..c };
        check(&c, &SMALL, 1);
        check(&c.clone().causal(), &SMALL, 2);
        check(&c.window(30, 5), &SMALL, 1);
    }
}

fn attention_grads_packed_rows_and_groups() {
    let lens = [(20, 20), (0, 10), (40, 5), (3, 50), (10, 0), (35, 35)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    check(&c, &SMALL, 1);
    check(&Case { sink: true, out: Type::Bf16, ..c.clone().causal() }, &SMALL, 2);
    let first = check(&c.clone().window(10, 5), &SMALL, 3);
    assert!(first == check(&c.window(10, 5), &SMALL, 4), "two runs differ");
}

/// Pairs of warps make the bits of single ones.
fn attention_grads_by_pairs() {
    let lens = [(20, 20), (0, 10), (40, 5), (3, 50), (10, 0), (35, 35)];
    let packed = Case { heads: (4, 2), ..Case::packed(&lens) };
    let long = Case { out: Type::Bf16, pad: 8, heads: (2, 1), ..case(130, 150) };
    for (seed, c) in (1..).zip([case(1, 1), case(16, 64), packed, long]) {
        for c in [c.clone(), c.clone().causal(), c.window(30, 5)] {
            let bits = check(&c, &PAIRED, seed);
            assert!(bits == check(&c, &SMALL, seed + 1), "{c:?}: other bits than by single warps");
        }
    }
    let whole = Case { heads: (2, 1), ..Case::packed(&[(60, 60), (30, 40)]) }.causal();
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let (q, kv) = (zigzag(whole.q[0].end), zigzag(whole.kv[0].end));
    check(&Case { q, kv, ..whole }, &PAIRED, 1);
}

fn attention_grads_extras() {
    let all =
        [case(33, 50).causal(), Case::packed(&[(20, 30), (17, 9)]), case(40, 40).window(9, 3)];
    for (i, c) in all.into_iter().enumerate() {
        let c = Case { out: [Type::F16, Type::F32, Type::Bf16][i], pad: 8, ..c };
        check(&Case { softcap: 3.0, ..c.clone() }, &ODD, 1);
        check(&Case { bias: 1, ..c.clone() }, &ODD, 2);
        check(&Case { drop: 0.3, ..c.clone() }, &ODD, 1);
        check(&Case { sink: true, scale: -0.7, ..c.clone() }, &ODD, 1);
        check(&Case { softcap: 2.0, bias: 2, sink: true, drop: 0.2, ..c }, &ODD, 1);
    }
}

/// A rank of context parallelism: its queries against some of the keys, with the lse of these.
fn attention_grads_of_parts() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(60, 60), (30, 40)]) }.causal();
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let (q, kv) = (zigzag(whole.q[0].end), zigzag(whole.kv[0].end));
    check(&Case { q: q.clone(), kv: kv.clone(), ..whole.clone() }, &SMALL, 1);
    check(&Case { q, kv, drop: 0.25, ..whole }, &ODD, 2);
}

fn attention_grads_plain() {
    check(&Case { pad: 3, ..case(33, 50) }, &F32, 1);
    let c = Case { heads: (4, 2), ..Case::packed(&[(20, 30), (0, 3), (17, 9)]) };
    check(&c.clone().causal(), &F32, 2);
    check(&Case { softcap: 2.0, bias: 1, sink: true, drop: 0.2, ..c }.window(9, 2), &F32, 1);
}

/// Local rows of some global ones, of sequences that share the bias.
fn attention_grads_of_bias_and_sink() {
    for (heads, drop) in [(1, 0.0), (2, 0.25)] {
        let c = Case { bias: heads, sink: true, drop, ..Case::packed(&[(9, 12), (14, 10)]) };
        let c = Case { q: vec![0..13, 15..c.q[0].end], softcap: 2.0, ..c }.window(8, 3);
        let on = &*F32;
        let (saved, (hq, _), rows) = (Saved::new(&c, on), c.heads, Case::rows(&c.q));
        let (sq, skv) = c.longest();
        let mut dbias = vec![0.0; heads * sq * skv];
        let mut dsink = vec![0.0; hq];
        let mut deltas = vec![0.0f32; hq * rows];
        for (h, r) in (0..hq).flat_map(|h| (0..rows).map(move |r| (h, r))) {
            let at = r * hq + h;
            let d_out = &saved.d_out[at * on.dv..][..on.dv];
            let delta = dot(d_out, &saved.out[at * on.dv..]);
            let lse = f64::from(saved.lse[h * rows + r]);
            deltas[h * rows + r] = delta as f32;
            if lse > f64::NEG_INFINITY {
                dsink[h] -= (f64::from(Case::sink_of(h)) - lse).exp() * delta;
            }
            for p in &saved.pairs[h * rows + r] {
                let dp = dot(d_out, &saved.x[2][p.l * on.dv..][..on.dv]) * p.keep;
                let of = if heads == 1 { 0 } else { h };
                dbias[(of * sq + p.i) * skv + p.j] += (p.z - lse).exp() * (dp - delta);
            }
        }
        let f32s = |name, v: &[f32]| Case::memory(name, Type::F32, v, 1, 0);
        let [q, k, v] = [0, 1, 2].map(|i| f32s(["q", "k", "v"][i], &saved.x[i]));
        let (d_out, lse, delta) =
            (f32s("d_out", &saved.d_out), f32s("lse", &saved.lse), f32s("delta", &deltas));
        let (bias, sinks) = (c.bias_memory(), (0..hq).map(Case::sink_of).collect::<Vec<_>>());
        let sink = f32s("sink", &sinks);
        let got = [f32s("dbias", &vec![f32::NAN; dbias.len()]), f32s("dsink", &vec![f32::NAN; hq])];
        let (own, other, tiles) = c.tables(true, 4);
        let (own_m, other_m) = (Case::table("own", &own), Case::table("other", &other));
        let p = TwAttn {
            q: q.addr(),
            k: k.addr(),
            v: v.addr(),
            d_out: d_out.addr(),
            lse: lse.addr(),
            delta: delta.addr(),
            bias: bias.addr(),
            sink: sink.addr(),
            dbias: got[0].addr(),
            dsink: got[1].addr(),
            own: own_m.addr(),
            other: other_m.addr(),
            num_own: own.len() as u32,
            tiles,
            ..c.param(on)
        };
        let kernels = [on.kernel("tw_attn_dbias"), on.kernel("tw_attn_dsink")];
        let grids = [(dbias.len() as u32).div_ceil(256), hq as u32];
        let launches = [0, 1].map(|i| kernels[i].grid([grids[i], 1, 1], [256, 1, 1]).arg(&p));
        let memory = [&q, &k, &v, &d_out, &lse, &delta, &bias, &sink, &own_m, &other_m];
        let run = Run::new(1).memory(memory.into_iter().chain(&got));
        run.stream(0, launches.to_vec()).go().unwrap_or_else(|e| panic!("{c:?}: {e}"));
        for (got, want) in got.iter().zip([dbias, dsink]) {
            for (i, (g, y)) in got.read::<f32>().iter().zip(&want).enumerate() {
                assert!((f64::from(*g) - y).abs() <= 1e-4, "{c:?}: {g}, not {y}, at {i}");
            }
        }
    }
}
