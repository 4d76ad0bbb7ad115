//! `attention/sm80_attention.cu` against an f64 reference: masks, packed rows, groups, extras.

use std::ops::Range;
use std::sync::LazyLock;

use bytemuck::{Pod, Zeroable};
use tilewire_core::Rng;
use tilewire_kernels::attention::{SM80_ATTENTION, Variant};

use crate::compile::Unit;
use crate::gemm::{Type, number};
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    attention_masks_and_lengths,
    attention_packed_rows_and_groups,
    attention_extras,
    attention_of_usual_tiles,
    attention_parts_are_exact,
];

/// What a text was compiled for.
#[derive(Clone, Copy)]
pub struct Build {
    pub lib: &'static Lib,
    pub f16: bool,
    pub dqk: usize,
    pub dv: usize,
    /// Queries, keys and warps of a forward block, and its shared memory.
    pub m: usize,
    pub n: usize,
    pub warps: usize,
    pub smem: u32,
}

/// dqk, dv, m, n, warps, f16, extra.
pub type Sizes = (usize, usize, usize, usize, usize, bool, bool);
pub const PLAIN: Sizes = (64, 64, 64, 32, 2, false, false);
/// Neither dimension is a multiple of 16, and they differ.
pub const EXTRA: Sizes = (40, 24, 32, 16, 2, true, true);

pub fn load(text: String, (dqk, dv, m, n, warps, f16, extra): Sizes) -> Build {
    let pad = |d: usize| d.next_multiple_of(64);
    let smem = 2 * (m * pad(dqk).max(pad(dv)) + 2 * n * (pad(dqk) + pad(dv)));
    let lib = RUNTIME.load(&Unit {
        name: SM80_ATTENTION.name,
        text,
        defines: vec![
            ("TW_ATTN_TYPE", u64::from(f16)),
            ("TW_ATTN_DQK", dqk as u64),
            ("TW_ATTN_DV", dv as u64),
            ("TW_ATTN_EXTRA", u64::from(extra)),
            ("TW_ATTN_M", m as u64),
            ("TW_ATTN_N", n as u64),
            ("TW_ATTN_WARPS", warps as u64),
        ],
        kernels: SM80_ATTENTION.kernels.to_vec(),
        smem,
    });
    Build { lib, f16, dqk, dv, m, n, warps, smem: smem as u32 }
}

pub static SMALL: LazyLock<Build> = LazyLock::new(|| load(SM80_ATTENTION.emu_text(), PLAIN));
pub static ODD: LazyLock<Build> = LazyLock::new(|| load(SM80_ATTENTION.emu_text(), EXTRA));

/// `TwSeg` in `attention/common.cuh`.
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq)]
#[repr(C)]
struct Seg {
    row: u32,
    len: u32,
    pos: u32,
    global: u32,
    tile: u32,
    first: u32,
    end: u32,
    shift: i32,
}
const GAP: i32 = i32::MIN;

/// `TwAttn` in `attention/common.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Param {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    lse: u64,
    bias: u64,
    sink: u64,
    own: u64,
    other: u64,
    d_out: u64,
    delta: u64,
    grads: [u64; 3],
    dbias: u64,
    dsink: u64,
    ld: [u64; 4],
    drop_seed: u64,
    drop_below: u64,
    num_own: u32,
    tiles: u32,
    tokens_q: u32,
    heads_q: u32,
    heads_kv: u32,
    first_head: u32,
    bias_dims: [u32; 3],
    window: [i32; 2],
    scale: f32,
    softcap: f32,
    keep: f32,
    out_type: u32,
    plain: [u32; 3],
}

/// An attention.
#[derive(Clone, Debug)]
pub struct Case {
    pub heads: (usize, usize),
    /// Rows of queries and keys of each sequence, in the global tensors.
    pub seqs: Vec<(Range<usize>, Range<usize>)>,
    /// Global rows that are here.
    pub q: Vec<Range<usize>>,
    pub kv: Vec<Range<usize>>,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub scale: f32,
    pub softcap: f32,
    pub drop: f64,
    /// Heads of the bias.
    pub bias: usize,
    pub sink: bool,
    pub out: Type,
    /// Elements between rows.
    pub pad: usize,
}

/// One sequence, scores of some magnitude.
#[expect(clippy::single_range_in_vec_init, reason = "spans that happen to be one")]
pub fn case(sq: usize, skv: usize) -> Case {
    Case {
        heads: (2, 1),
        seqs: vec![(0..sq, 0..skv)],
        q: vec![0..sq],
        kv: vec![0..skv],
        left: None,
        right: None,
        scale: 0.8,
        softcap: 0.0,
        drop: 0.0,
        bias: 0,
        sink: false,
        out: Type::F32,
        pad: 0,
    }
}

impl Case {
    pub fn causal(self) -> Self {
        Self { right: Some(0), ..self }
    }

    pub fn window(self, left: usize, right: usize) -> Self {
        Self { left: Some(left), right: Some(right), ..self }
    }

    /// Sequences one after the other, with one row between them.
    pub fn packed(lens: &[(usize, usize)]) -> Self {
        let (mut q, mut kv) = (1, 0);
        let mut c = case(0, 0);
        c.seqs.clear();
        for &(sq, skv) in lens {
            c.seqs.push((q..q + sq, kv..kv + skv));
            q += sq + 1;
            kv += skv + 1;
        }
        (c.q, c.kv) = (vec![0..q], vec![0..kv]);
        c
    }

    fn rows(spans: &[Range<usize>]) -> usize {
        spans.iter().map(Range::len).sum()
    }

    /// The segments of the rows here, and the sequence of each (none for rows between them).
    fn segs(&self, of_q: bool) -> Vec<(Seg, Option<usize>)> {
        let spans = if of_q { &self.q } else { &self.kv };
        let (mut out, mut row) = (Vec::<(Seg, Option<usize>)>::new(), 0);
        let owner =
            |g: usize| self.seqs.iter().position(|(q, kv)| if of_q { q } else { kv }.contains(&g));
        for span in spans {
            for g in span.clone() {
                let seq = owner(g);
                let begin = seq
                    .map_or(0, |s| if of_q { self.seqs[s].0.start } else { self.seqs[s].1.start });
                match out.last_mut() {
                    Some((last, old)) if *old == seq && g > span.start => last.len += 1,
                    _ => {
                        let pos = if seq.is_some() { g - begin } else { 0 };
                        let (row, pos, global) = (row as u32, pos as u32, g as u32);
                        let s =
                            Seg { row, len: 1, pos, global, tile: 0, first: 0, end: 0, shift: GAP };
                        out.push((s, seq));
                    }
                }
                row += 1;
            }
        }
        out
    }

    /// Own and other segments, and the tiles of the own ones.
    fn tables(&self, of_q: bool, tile: usize) -> (Vec<Seg>, Vec<Seg>, u32) {
        let (mut own, other) = (self.segs(of_q), self.segs(!of_q));
        let mut tiles = 0;
        for (s, seq) in &mut own {
            s.tile = tiles;
            tiles += s.len.div_ceil(tile as u32);
            let Some(seq) = *seq else { continue };
            let (q, kv) = &self.seqs[seq];
            s.shift = kv.len() as i32 - q.len() as i32;
            let of = |(_, o): &(Seg, Option<usize>)| *o == Some(seq);
            s.first = other.iter().position(of).unwrap_or(0) as u32;
            s.end = s.first + other.iter().filter(|o| of(o)).count() as u32;
        }
        let only = |v: Vec<(Seg, Option<usize>)>| v.into_iter().map(|(s, _)| s).collect();
        (only(own), only(other), tiles)
    }

    fn narrow(on: &Build) -> Type {
        if on.f16 { Type::F16 } else { Type::Bf16 }
    }

    /// Tensor `t`, `[rows, heads, d]`, of global rows `spans`.
    fn tensor(on: &Build, t: u64, spans: &[Range<usize>], width: usize) -> Vec<f32> {
        let ty = Self::narrow(on);
        let at = |g: usize, c: usize| ty.round(number(false, t, g * width + c));
        spans.iter().cloned().flatten().flat_map(|g| (0..width).map(move |c| at(g, c))).collect()
    }

    fn sink_of(head: usize) -> f32 {
        1.5 - head as f32
    }

    fn bias_of(&self, head: usize, i: usize, j: usize) -> f32 {
        let head = if self.bias == 1 { 0 } else { head };
        number(false, 7, head << 16 | i << 8 | j)
    }

    fn longest(&self) -> (usize, usize) {
        let most = |f: fn(&(Range<usize>, Range<usize>)) -> usize| self.seqs.iter().map(f).max();
        (most(|s| s.0.len()).unwrap_or(0), most(|s| s.1.len()).unwrap_or(0))
    }

    /// For each local row, head by head: lse, and each element of the output with its bound.
    fn reference(&self, on: &Build) -> Vec<Vec<(f64, Vec<(f64, f64)>)>> {
        let (hq, hkv) = self.heads;
        let q = Self::tensor(on, 1, &self.q, hq * on.dqk);
        let k = Self::tensor(on, 2, &self.kv, hkv * on.dqk);
        let v = Self::tensor(on, 3, &self.kv, hkv * on.dv);
        let (u, tiny) = Self::narrow(on).roundoff();
        let (out_u, out_tiny) = self.out.roundoff();
        let kv_rows: Vec<usize> = self.kv.iter().cloned().flatten().collect();
        let rng = Rng::new(77);
        let row = |h: usize, r: usize, g: usize| {
            let Some((sq, skv)) = self.seqs.iter().find(|(q, _)| q.contains(&g)) else {
                return (f64::NEG_INFINITY, vec![(0.0, 0.0); on.dv]);
            };
            let (i, kvh) = (g - sq.start, h / (hq / hkv));
            let mut terms = Vec::new();
            for (l, gk) in kv_rows.iter().enumerate().filter(|(_, gk)| skv.contains(gk)) {
                let j = gk - skv.start;
                let behind = j as i64 - (i as i64 + skv.len() as i64 - sq.len() as i64);
                if self.left.is_some_and(|b| behind < -(b as i64))
                    || self.right.is_some_and(|b| behind > b as i64)
                {
                    continue;
                }
                let dot = |d: usize| {
                    f64::from(q[(r * hq + h) * on.dqk + d])
                        * f64::from(k[(l * hkv + kvh) * on.dqk + d])
                };
                let mut z = (0..on.dqk).map(dot).sum::<f64>() * f64::from(self.scale);
                if self.softcap > 0.0 {
                    z = f64::from(self.softcap) * (z / f64::from(self.softcap)).tanh();
                }
                if self.bias > 0 {
                    z += f64::from(self.bias_of(h, i, j));
                }
                let key = (h as u64) << 48 | (g as u64) << 24 | *gk as u64;
                let keep = if self.drop == 0.0 {
                    1.0
                } else {
                    f64::from(rng.f64_at(key) >= self.drop) / (1.0 - self.drop)
                };
                terms.push((z, keep, l));
            }
            let sink = self.sink.then(|| f64::from(Self::sink_of(h)));
            let all = terms.iter().map(|t| t.0).chain(sink);
            let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                return (max, vec![(0.0, 0.0); on.dv]);
            }
            let lse = max + all.map(|z| (z - max).exp()).sum::<f64>().ln();
            let element = |d: usize| {
                let (mut y, mut sum) = (0.0, 0.0);
                for (z, keep, l) in &terms {
                    let t = (z - lse).exp() * keep * f64::from(v[(l * hkv + kvh) * on.dv + d]);
                    (y, sum) = (y + t, sum + t.abs());
                }
                // Probabilities are rounded before the product; the rest is f32.
                let e = (u + 1e-5) * sum + 64.0 * tiny;
                (y, e * (1.0 + out_u) + out_u * y.abs() + out_tiny)
            };
            (lse, (0..on.dv).map(element).collect())
        };
        let q_rows: Vec<usize> = self.q.iter().cloned().flatten().collect();
        (0..hq).map(|h| q_rows.iter().enumerate().map(|(r, g)| row(h, r, *g)).collect()).collect()
    }

    /// A tensor in memory: NaN between rows.
    fn memory(name: &str, t: Type, values: &[f32], width: usize, pad: usize) -> Memory {
        let row = |r: &[f32]| [r, &vec![f32::NAN; pad]].concat();
        let bytes = t.bytes(&values.chunks(width.max(1)).flat_map(row).collect::<Vec<_>>());
        let m = Memory::new(name, ANY, bytes.len());
        m.write(&bytes);
        m
    }

    fn param(&self, on: &Build) -> Param {
        let window = [self.left, self.right].map(|b| b.map_or(1 << 30, |b| b as i32));
        let (sq, skv) = self.longest();
        let (hq, hkv) = self.heads;
        let ld =
            [hq * on.dqk, hkv * on.dqk, hkv * on.dv, hq * on.dv].map(|w| (w + self.pad) as u64);
        Param {
            ld,
            drop_seed: 77,
            drop_below: (self.drop * 2f64.powi(53)).ceil() as u64,
            tokens_q: Self::rows(&self.q) as u32,
            heads_q: hq as u32,
            heads_kv: hkv as u32,
            bias_dims: [self.bias, sq, skv].map(|x| x as u32),
            window,
            scale: self.scale,
            softcap: self.softcap,
            keep: (1.0 / (1.0 - self.drop)) as f32,
            out_type: self.out as u32,
            ..Param::zeroed()
        }
    }

    /// Runs the forward pass; the bytes of the output and lse. Panics if an element is wrong.
    pub fn check(&self, on: &Build, seed: u64) -> (Vec<u8>, Vec<f32>) {
        let (ty, (hq, hkv)) = (Self::narrow(on), self.heads);
        let tensor = |name, t, spans: &[Range<usize>], width| {
            Self::memory(name, ty, &Self::tensor(on, t, spans, width), width, self.pad)
        };
        let q = tensor("q", 1, &self.q, hq * on.dqk);
        let k = tensor("k", 2, &self.kv, hkv * on.dqk);
        let v = tensor("v", 3, &self.kv, hkv * on.dv);
        let rows = Self::rows(&self.q);
        let poison = vec![f32::NAN; rows * hq * on.dv];
        let out = Self::memory("out", self.out, &poison, hq * on.dv, self.pad);
        let lse = Self::memory("lse", Type::F32, &vec![f32::NAN; rows * hq], 1, 0);
        let (sq, skv) = self.longest();
        let all =
            (0..self.bias * sq * skv).map(|x| self.bias_of(x / (sq * skv), x / skv % sq, x % skv));
        let bias = Self::memory("bias", Type::F32, &all.collect::<Vec<_>>(), 1, 0);
        let sinks: Vec<f32> = (0..hq).map(Self::sink_of).collect();
        let sink = Self::memory("sink", Type::F32, &sinks, 1, 0);
        let (own, other, tiles) = self.tables(true, on.m);
        let table = |name, s: &[Seg]| {
            let m = Memory::new(name, ANY, size_of_val(s));
            m.write(s);
            m
        };
        let (own_m, other_m) = (table("own", &own), table("other", &other));
        let p = Param {
            q: q.addr(),
            k: k.addr(),
            v: v.addr(),
            out: out.addr(),
            lse: lse.addr(),
            bias: if self.bias > 0 { bias.addr() } else { 0 },
            sink: if self.sink { sink.addr() } else { 0 },
            own: own_m.addr(),
            other: other_m.addr(),
            num_own: own.len() as u32,
            tiles,
            ..self.param(on)
        };
        let kernel = on.lib.kernel("tw_attn_fwd");
        let grid = [tiles * hq as u32, 1, 1];
        let launch = kernel.grid(grid, [32 * on.warps as u32, 1, 1]).smem(on.smem).arg(&p);
        let memory = [&q, &k, &v, &out, &lse, &bias, &sink, &own_m, &other_m];
        let mut run = Run::new(seed).memory(memory).stream(0, vec![launch]);
        run.yield_permille = if seed.is_multiple_of(2) { 200 } else { 5 };
        run.go().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let (bytes, lse) = (out.read::<u8>(), lse.read::<f32>());
        self.compare(on, &bytes, &lse);
        (bytes, lse)
    }

    fn compare(&self, on: &Build, out: &[u8], lse: &[f32]) {
        let (got, want, hq) = (self.out.values(out), self.reference(on), self.heads.0);
        let (rows, ld) = (Self::rows(&self.q), hq * on.dv + self.pad);
        for h in 0..hq {
            for r in 0..rows {
                let (l, y) = &want[h][r];
                let seen = f64::from(lse[h * rows + r]);
                let good = seen == *l || (seen - l).abs() <= 2e-6 * (4.0 + l.abs());
                assert!(good, "{self:?}: lse {seen}, not {l}, at head {h} row {r}");
                for (d, (y, e)) in y.iter().enumerate() {
                    let g = f64::from(got[r * ld + h * on.dv + d]);
                    let at = format_args!("head {h} row {r} column {d}");
                    assert!((g - y).abs() <= *e, "{self:?}: {g}, not {y} +- {e} at {at}");
                }
            }
        }
        for r in 0..rows {
            let between = &got[r * ld + hq * on.dv..(r + 1) * ld];
            assert!(between.iter().all(|x| x.is_nan()), "{self:?}: written between rows, at {r}");
        }
    }
}

fn attention_masks_and_lengths() {
    for (i, (sq, skv)) in [(1, 1), (63, 65), (65, 200), (200, 63), (64, 64)].into_iter().enumerate()
    {
        let out = [Type::F32, Type::Bf16, Type::F16][i % 3];
        let c = Case { out, pad: [0, 8][i % 2], ..case(sq, skv) };
        let c = Case { heads: [(2, 1), (1, 1), (2, 2)][i % 3], ..c };
        c.clone().check(&SMALL, 1);
        c.clone().causal().check(&SMALL, 2);
        c.clone().window(40, 0).check(&SMALL, 1);
        c.window(3, 17).check(&SMALL, 2);
    }
}

fn attention_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (70, 5), (3, 90), (10, 0), (65, 65)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    c.clone().check(&SMALL, 1);
    c.clone().causal().check(&SMALL, 2);
    c.clone().window(20, 5).check(&SMALL, 3);
    Case { sink: true, out: Type::Bf16, ..c.causal() }.check(&SMALL, 4);
}

fn attention_extras() {
    for (i, c) in
        [case(33, 50).causal(), Case::packed(&[(20, 30), (17, 9)]), case(40, 40).window(9, 3)]
            .into_iter()
            .enumerate()
    {
        let c = Case { out: [Type::F16, Type::F32, Type::Bf16][i], pad: 8, ..c };
        Case { softcap: 3.0, ..c.clone() }.check(&ODD, 1);
        Case { bias: 1, ..c.clone() }.check(&ODD, 2);
        Case { drop: 0.3, ..c.clone() }.check(&ODD, 1);
        Case { sink: true, scale: -0.7, ..c.clone() }.check(&ODD, 1);
        Case { softcap: 2.0, bias: 2, sink: true, drop: 0.2, ..c }.check(&ODD, 1);
    }
}

/// The tiles that are used on GPUs.
fn attention_of_usual_tiles() {
    let v = Variant { f16: false, dqk: 128, dv: 128, extra: false };
    let t = v.forward();
    let sizes = (128, 128, t.m as usize, t.n as usize, t.warps as usize, false, false);
    let b = load(SM80_ATTENTION.emu_text(), sizes);
    assert_eq!(u64::from(b.smem), v.forward_shared_bytes());
    Case { out: Type::Bf16, heads: (1, 1), ..case(150, 170) }.causal().check(&b, 1);
}

/// The rows of a rank of context parallelism: chunks of sequences, at their global positions.
fn attention_parts_are_exact() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(100, 100), (44, 60)]) }.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let mut c = Case { q: zigzag(rows_q), ..whole.clone() };
    // All keys, in another split.
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    c.check(&SMALL, 1);
    c.drop = 0.25;
    c.heads = (2, 2);
    c.check(&ODD, 2);
    // Some of the keys only: a part that is merged with others.
    c.kv = zigzag(rows_kv);
    c.check(&ODD, 1);
}
