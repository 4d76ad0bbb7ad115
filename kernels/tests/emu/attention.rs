//! What the tests of attention share: cases, an f64 reference, and the forward pass.

use std::ops::Range;

use bytemuck::Zeroable;
use tilewire_core::Rng;
use tilewire_kernels::abi::{TwAttn, TwSeg};
use tilewire_kernels::attention::hopper_fp8::FP8_KEYS;

pub use crate::attention_builds::*;
use crate::gemm::{Type, number};
use crate::host::Launch;
use crate::memory::{ANY, Memory};
use crate::run::Run;

const GAP: i32 = i32::MIN;

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
    /// A row of queries that is NaN.
    pub nan: Option<usize>,
}

/// A query and a key that see each other.
pub struct Pair {
    /// Score, and its derivative by the product.
    pub z: f64,
    pub slope: f64,
    /// Factor of dropout.
    pub keep: f64,
    /// Local row of the key; positions of both in their sequence.
    pub l: usize,
    pub i: usize,
    pub j: usize,
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
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
        nan: None,
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
    #[expect(clippy::single_range_in_vec_init, reason = "spans that happen to be one")]
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

    pub fn rows(spans: &[Range<usize>]) -> usize {
        spans.iter().map(Range::len).sum()
    }

    /// The segments of the rows here, and the sequence of each (none for rows between them).
    pub fn segs(&self, of_q: bool) -> Vec<(TwSeg, Option<usize>)> {
        let spans = if of_q { &self.q } else { &self.kv };
        let (mut out, mut row) = (Vec::<(TwSeg, Option<usize>)>::new(), 0);
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
                        let s = TwSeg {
                            row,
                            len: 1,
                            pos,
                            global,
                            tile: 0,
                            first: 0,
                            end: 0,
                            shift: GAP,
                        };
                        out.push((s, seq));
                    }
                }
                row += 1;
            }
        }
        out
    }

    /// Own and other segments, and the tiles of the own ones.
    pub fn tables(&self, of_q: bool, tile: u64) -> (Vec<TwSeg>, Vec<TwSeg>, u32) {
        let (mut own, other) = (self.segs(of_q), self.segs(!of_q));
        let mut tiles = 0;
        for (s, seq) in &mut own {
            s.tile = tiles;
            tiles += s.len.div_ceil(tile as u32);
            let Some(seq) = *seq else { continue };
            let (q, kv) = &self.seqs[seq];
            s.shift = kv.len() as i32 - q.len() as i32;
            let of = |(_, o): &(TwSeg, Option<usize>)| *o == Some(seq);
            s.first = other.iter().position(of).unwrap_or(0) as u32;
            s.end = s.first + other.iter().filter(|o| of(o)).count() as u32;
        }
        let only = |v: Vec<(TwSeg, Option<usize>)>| v.into_iter().map(|(s, _)| s).collect();
        (only(own), only(other), tiles)
    }

    pub fn narrow(on: &Build) -> Type {
        on.input
    }

    /// Tensor `t`, `[rows, heads, d]`, of global rows `spans`.
    pub fn tensor(on: &Build, t: u64, spans: &[Range<usize>], width: usize) -> Vec<f32> {
        let ty = Self::narrow(on);
        let at = |g: usize, c: usize| ty.round(number(false, t, g * width + c));
        spans.iter().cloned().flatten().flat_map(|g| (0..width).map(move |c| at(g, c))).collect()
    }

    pub fn sink_of(head: usize) -> f32 {
        1.5 - head as f32
    }

    pub fn bias_of(&self, head: usize, i: usize, j: usize) -> f32 {
        let head = if self.bias == 1 { 0 } else { head };
        number(false, 7, head << 16 | i << 8 | j)
    }

    pub fn longest(&self) -> (usize, usize) {
        let most = |f: fn(&(Range<usize>, Range<usize>)) -> usize| self.seqs.iter().map(f).max();
        (most(|s| s.0.len()).unwrap_or(0), most(|s| s.1.len()).unwrap_or(0))
    }

    /// What query row `r`, head `h`, sees of the keys that are here; none for rows of no sequence.
    pub fn pairs(&self, on: &Build, x: &[Vec<f32>; 3], h: usize, r: usize) -> Option<Vec<Pair>> {
        let (hq, hkv) = self.heads;
        let g = self.q.iter().cloned().flatten().nth(r).unwrap();
        let (sq, skv) = self.seqs.iter().find(|(q, _)| q.contains(&g))?;
        let (i, kvh, rng) = (g - sq.start, h / (hq / hkv), Rng::new(77));
        let pair = |(l, gk): (usize, usize)| {
            let j = gk - skv.start;
            let behind = j as i64 - (i as i64 + skv.len() as i64 - sq.len() as i64);
            let hidden = self.left.is_some_and(|b| behind < -(b as i64))
                || self.right.is_some_and(|b| behind > b as i64);
            if hidden {
                return None;
            }
            let (qr, kr) = (&x[0][(r * hq + h) * on.dqk..], &x[1][(l * hkv + kvh) * on.dqk..]);
            let mut z = dot(&qr[..on.dqk], kr) * f64::from(self.scale);
            let mut slope = f64::from(self.scale);
            if self.softcap > 0.0 {
                let t = (z / f64::from(self.softcap)).tanh();
                (z, slope) = (f64::from(self.softcap) * t, slope * (1.0 - t * t));
            }
            if self.bias > 0 {
                z += f64::from(self.bias_of(h, i, j));
            }
            let keep = rng.f64_at((h as u64) << 48 | (g as u64) << 24 | gk as u64) >= self.drop;
            let keep = if self.drop == 0.0 { 1.0 } else { f64::from(keep) / (1.0 - self.drop) };
            Some(Pair { z, slope, keep, l, i, j })
        };
        let keys = self.kv.iter().cloned().flatten().enumerate();
        Some(keys.filter(|(_, gk)| skv.contains(gk)).filter_map(pair).collect())
    }

    /// Natural logarithm of the sum of the exponentials of what row `r` sees.
    pub fn lse(&self, h: usize, pairs: Option<&[Pair]>) -> f64 {
        let Some(pairs) = pairs else { return f64::NEG_INFINITY };
        let sink = self.sink.then(|| f64::from(Self::sink_of(h)));
        let all = pairs.iter().map(|t| t.z).chain(sink);
        let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
        if all.clone().any(f64::is_nan) {
            f64::NAN
        } else if max == f64::NEG_INFINITY {
            max
        } else {
            max + all.map(|z| (z - max).exp()).sum::<f64>().ln()
        }
    }

    /// q, k and v.
    pub fn inputs(&self, on: &Build) -> [Vec<f32>; 3] {
        let mut x = self.stored(on);
        if on.input == Type::E4m3 {
            let (hq, hkv) = self.heads;
            let of = [(1, hq, on.dqk), (2, hkv, on.dqk), (3, hkv, on.dv)];
            for (x, (t, heads, d)) in x.iter_mut().zip(of) {
                for (i, x) in x.iter_mut().enumerate() {
                    let (block, head) = (i / (heads * d) / FP8_KEYS, i / d % heads);
                    // Kernels take zero as next to nothing.
                    let scale = Self::scale_of(t, heads, block, head);
                    *x *= if scale == 0.0 { 2f32.powi(-60) } else { scale };
                }
            }
        }
        x
    }

    /// The scale of a block of rows of tensor `t` and a head; some of keys and of values are zero.
    fn scale_of(t: u64, heads: usize, block: usize, head: usize) -> f32 {
        if head.is_multiple_of(2) && ((t == 2 && block % 8 == 5) || (t == 3 && block % 8 == 4)) {
            return 0.0;
        }
        2f32.powf(number(false, t + 10, block * heads + head))
    }

    /// Scales of e4m3, `[blocks of FP8_KEYS rows, heads]`.
    pub fn scales(t: u64, rows: usize, heads: usize) -> Vec<f32> {
        let all = 0..rows.div_ceil(FP8_KEYS) * heads;
        all.map(|i| Self::scale_of(t, heads, i / heads, i % heads)).collect()
    }

    /// q, k and v as they lie in memory: without their scales.
    fn stored(&self, on: &Build) -> [Vec<f32>; 3] {
        let (hq, hkv) = self.heads;
        let (qk, v) = (on.dqk, on.dv);
        let mut x = [(1, &self.q, hq * qk), (2, &self.kv, hkv * qk), (3, &self.kv, hkv * v)]
            .map(|(t, spans, width)| Self::tensor(on, t, spans, width));
        if let Some(row) = self.nan {
            x[0][row * hq * qk..][..hq * qk].fill(f32::NAN);
        }
        x
    }

    /// Fills rows that belong to no sequence with NaN, which must not come into any sum.
    pub fn poison(&self, of_q: bool, values: &mut [f32], width: usize) {
        for (seg, seq) in self.segs(of_q) {
            if seq.is_none() {
                values[seg.row as usize * width..][..seg.len as usize * width].fill(f32::NAN);
            }
        }
    }

    /// lse and the output of row `r`, each element with its bound.
    pub fn reference(
        &self,
        on: &Build,
        x: &[Vec<f32>; 3],
        h: usize,
        r: usize,
    ) -> (f64, Vec<(f64, f64)>) {
        let (hq, hkv) = self.heads;
        let ((u, tiny), (out_u, out_tiny)) = (Self::narrow(on).roundoff(), self.out.roundoff());
        let pairs = self.pairs(on, x, h, r);
        let lse = self.lse(h, pairs.as_deref());
        let (pairs, kvh) = (pairs.unwrap_or_default(), h / (hq / hkv));
        let element = |d: usize| {
            let (mut y, mut sum) = (0.0, 0.0);
            for p in &pairs {
                let t = (p.z - lse).exp() * p.keep * f64::from(x[2][(p.l * hkv + kvh) * on.dv + d]);
                (y, sum) = (y + t, sum + t.abs());
            }
            // Probabilities are rounded before the product; the rest is f32. Those of e4m3 are
            // 256 times as large then, with a sum of at least 1.
            let least = match on.input {
                Type::E4m3 => {
                    let of = |p: &Pair| f64::from(x[2][(p.l * hkv + kvh) * on.dv + d].abs());
                    tiny / 256.0 * pairs.iter().map(of).sum::<f64>()
                }
                _ => 64.0 * tiny,
            };
            let e = (u + 1e-5) * sum + least;
            (y, e * (1.0 + out_u) + out_u * y.abs() + out_tiny)
        };
        (lse, (0..on.dv).map(element).collect())
    }

    /// How far products of e4m3, whose sums are cut, may have moved the scores of each row of each
    /// query head.
    fn score_errors(&self, on: &Build, x: &[Vec<f32>; 3]) -> Vec<Vec<f64>> {
        let (hq, hkv) = self.heads;
        let abs = |v: &[f32]| v.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let errors = |h: usize| {
            let mut most = vec![0.0f32; on.dqk];
            for k in x[1].chunks_exact(on.dqk).skip(h / (hq / hkv)).step_by(hkv) {
                most.iter_mut().zip(k).for_each(|(m, k)| *m = m.max(k.abs()));
            }
            let rows = x[0].chunks_exact(on.dqk).skip(h).step_by(hq);
            let off = 8.0 * 2f64.powi(-13) * f64::from(self.scale);
            rows.map(|q| if on.input == Type::E4m3 { off * dot(&abs(q), &most) } else { 0.0 })
                .collect()
        };
        (0..hq).map(errors).collect()
    }

    /// A tensor in memory: NaN between rows.
    pub fn memory(name: &str, t: Type, values: &[f32], width: usize, pad: usize) -> Memory {
        let row = |r: &[f32]| [r, &vec![f32::NAN; pad]].concat();
        let bytes = t.bytes(&values.chunks(width.max(1)).flat_map(row).collect::<Vec<_>>());
        let m = Memory::new(name, ANY, bytes.len());
        m.write(&bytes);
        m
    }

    pub fn bias_memory(&self) -> Memory {
        let (sq, skv) = self.longest();
        let at = |x: usize| self.bias_of(x / (sq * skv), x / skv % sq, x % skv);
        let all: Vec<_> = (0..self.bias * sq * skv).map(at).collect();
        Self::memory("bias", Type::F32, &all, 1, 0)
    }

    pub fn table(name: &str, s: &[TwSeg]) -> Memory {
        let m = Memory::new(name, ANY, size_of_val(s));
        m.write(s);
        m
    }

    pub fn param(&self, on: &Build) -> TwAttn {
        let [left, right] = [self.left, self.right].map(|b| b.map_or(1 << 30, |b| b as i32));
        let (sq, skv) = self.longest();
        let (hq, hkv) = self.heads;
        let ld = |width: usize| (width + self.pad) as i64;
        TwAttn {
            ld_q: ld(hq * on.dqk),
            ld_k: ld(hkv * on.dqk),
            ld_v: ld(hkv * on.dv),
            ld_o: ld(hq * on.dv),
            drop_seed: 77,
            drop_below: (self.drop * 2f64.powi(53)).ceil() as u64,
            tokens_q: Self::rows(&self.q) as u32,
            heads_q: hq as u32,
            heads_kv: hkv as u32,
            bias_heads: self.bias as u32,
            bias_sq: sq as u32,
            bias_skv: skv as u32,
            left,
            right,
            scale: self.scale,
            softcap: self.softcap,
            keep: (1.0 / (1.0 - self.drop)) as f32,
            out_type: self.out as u32,
            ..TwAttn::zeroed()
        }
    }

    /// Runs the forward pass; the bytes of the output and lse. Panics if an element is wrong.
    pub fn check(&self, on: &Build, seed: u64) -> (Vec<u8>, Vec<f32>) {
        let kernel = on.kernel("tw_attn_fwd");
        self.check_by(on, seed, |p, _, _| {
            let block = [32 * on.tiles.fwd.warps as u32, 1, 1];
            kernel.grid([p.tiles * p.heads_q, 1, 1], block).smem(on.fwd_smem() as u32).arg(p)
        })
    }

    /// The same by the launch that is made of the parameters and a word that is zero, and must be
    /// zero at the end.
    pub fn check_by<'a>(
        &self,
        on: &Build,
        seed: u64,
        launch: impl FnOnce(&TwAttn, [&[TwSeg]; 2], u64) -> Launch<'a>,
    ) -> (Vec<u8>, Vec<f32>) {
        let (own, other, tiles) = self.tables(true, on.tiles.fwd.m);
        let segs = [&own[..], &other[..]];
        self.check_tables(on, seed, (&own, &other, tiles), &[], |p, counter| {
            vec![launch(p, segs, counter)]
        })
    }

    /// The same by several launches, with tables as they are and `more` memory.
    pub fn check_tables<'a>(
        &self,
        on: &Build,
        seed: u64,
        (own, other, tiles): (&[TwSeg], &[TwSeg], u32),
        more: &[&Memory],
        launches: impl FnOnce(&TwAttn, u64) -> Vec<Launch<'a>>,
    ) -> (Vec<u8>, Vec<f32>) {
        let (ty, (hq, hkv)) = (Self::narrow(on), self.heads);
        let [q, k, v] = self.stored(on);
        let tensor = |name, of_q, mut x: Vec<f32>, width| {
            self.poison(of_q, &mut x, width);
            Self::memory(name, ty, &x, width, self.pad)
        };
        let q = tensor("q", true, q, hq * on.dqk);
        let k = tensor("k", false, k, hkv * on.dqk);
        let v = tensor("v", false, v, hkv * on.dv);
        let rows = Self::rows(&self.q);
        let poison = vec![f32::NAN; rows * hq * on.dv];
        let out = Self::memory("out", self.out, &poison, hq * on.dv, self.pad);
        let lse = Self::memory("lse", Type::F32, &vec![f32::NAN; rows * hq], 1, 0);
        let bias = self.bias_memory();
        let sinks: Vec<f32> = (0..hq).map(Self::sink_of).collect();
        let sink = Self::memory("sink", Type::F32, &sinks, 1, 0);
        let (own_m, other_m) = (Self::table("own", own), Self::table("other", other));
        let p = TwAttn {
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
        let counter = Memory::new("counter", ANY, 4);
        let launches = launches(&p, counter.addr());
        let memory = [&q, &k, &v, &out, &lse, &bias, &sink, &own_m, &other_m, &counter];
        let memory = memory.into_iter().chain(more.iter().copied());
        let mut run = Run::new(seed).memory(memory).stream(0, launches);
        run.warp_pauses = seed % 4 > 1;
        run.yield_permille = if seed.is_multiple_of(2) { 200 } else { 5 };
        run.go().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        assert_eq!(counter.read::<u32>(), [0], "{self:?}: the counter of tiles");
        let (bytes, lse) = (out.read::<u8>(), lse.read::<f32>());
        self.compare(on, &bytes, &lse);
        (bytes, lse)
    }

    /// Panics if an element of the output or lse is wrong.
    pub fn compare(&self, on: &Build, out: &[u8], lse: &[f32]) {
        let (got, hq, x) = (self.out.values(out), self.heads.0, self.inputs(on));
        let (rows, ld) = (Self::rows(&self.q), hq * on.dv + self.pad);
        let moved = self.score_errors(on, &x);
        for (h, r) in (0..hq).flat_map(|h| (0..rows).map(move |r| (h, r))) {
            let (l, y) = self.reference(on, &x, h, r);
            let (seen, moved) = (f64::from(lse[h * rows + r]), moved[h][r]);
            let good = seen == l
                || seen.is_nan() && l.is_nan()
                || l.is_finite() && (seen - l).abs() <= 2e-6 * (4.0 + l.abs()) + moved;
            assert!(good, "{self:?}: lse {seen}, not {l}, at head {h} row {r}");
            for (d, (y, e)) in y.iter().enumerate() {
                let g = f64::from(got[r * ld + h * on.dv + d]);
                let at = format_args!("head {h} row {r} column {d}");
                let good = (g - y).abs() <= e * (1.0 + 32.0 * moved) || g.is_nan() && y.is_nan();
                assert!(good, "{self:?}: {g}, not {y} +- {e} at {at}");
            }
        }
        for row in got.chunks(ld) {
            assert!(row[hq * on.dv..].iter().all(|x| x.is_nan()), "{self:?}: written between rows");
        }
    }
}
