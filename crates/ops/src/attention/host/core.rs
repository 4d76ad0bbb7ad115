//! The arithmetic of attention on the host: blocks of queries against blocks of keys, f32.
//!
//! The running state of the forward pass (maximum, sum, accumulator) is kept by the caller, so that
//! keys may come in any number of parts: nothing is ever merged from rounded partial results.

use tilewire_core::memory::filled_or_unwind;
use tilewire_core::{Result, Rng, convert_from_f32};
use tilewire_device::Tensor;

use crate::attention::desc::{Visible, bound};
use crate::attention::{AttentionDesc, AttnConfig, AttnMask, BiasShape, Slice};
use crate::common::Mat;
use crate::gemm::host::matmul;

/// Heads and head dimensions that this call works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dims {
    pub hq: usize,
    pub hkv: usize,
    pub dqk: usize,
    pub dv: usize,
}

/// Everything but the operands.
pub(crate) struct Core {
    pub dims: Dims,
    /// Global number of the first query head.
    pub first_head: usize,
    pub mask: AttnMask,
    pub blocks: AttnConfig,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Generator, probability of a drop, factor of what is kept.
    dropout: Option<(Rng, f64, f32)>,
    pub bias: Option<(BiasShape, Vec<f32>)>,
}

/// f32 operands, `[rows, heads, d]`.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
}

/// Running state of the forward pass, head by head: `acc [hq, rows, dv]`, `max` and `sum`
/// `[hq, rows]`.
pub(crate) struct State {
    rows: usize,
    acc: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl State {
    pub fn new(dims: &Dims, rows: usize) -> Self {
        Self {
            rows,
            acc: filled_or_unwind(0.0, dims.hq * rows * dims.dv),
            max: filled_or_unwind(f32::NEG_INFINITY, dims.hq * rows),
            sum: filled_or_unwind(0.0, dims.hq * rows),
        }
    }
}

impl Core {
    /// For query heads `first_head..first_head + dims.hq` of `desc`.
    pub fn new(
        d: &AttentionDesc,
        blocks: AttnConfig,
        dims: Dims,
        first_head: usize,
        bias: Vec<f32>,
    ) -> Self {
        Self {
            dims,
            first_head,
            mask: d.mask,
            blocks,
            scale: d.scale as f32,
            softcap: d.softcap.map(|c| c as f32),
            dropout: d.dropout.map(|x| (Rng::new(x.seed), x.p, (1.0 / (1.0 - x.p)) as f32)),
            bias: d.bias.map(|b| (b, bias)),
        }
    }

    /// Local key head of a local query head.
    pub fn kv_head(&self, h: usize) -> usize {
        h / (self.dims.hq / self.dims.hkv)
    }

    /// Calls `f` for each tile that the mask does not empty.
    pub fn tiles(&self, slices: &[Slice], mut f: impl FnMut(&Slice, Visible)) {
        let (bq, bkv) = (self.blocks.block_q, self.blocks.block_kv);
        for s in slices {
            for q in (0..s.num_q).step_by(bq) {
                for kv in (0..s.num_kv).step_by(bkv) {
                    let t = s.tile(q, kv, bq, bkv);
                    match t.visible(&self.mask) {
                        Visible::None => {}
                        v => f(&t, v),
                    }
                }
            }
        }
    }

    /// Rows of `x` (`[rows, heads, d]`) from `row` on, of one head.
    pub fn head<'a>(x: &'a [f32], row: usize, head: usize, heads: usize, d: usize) -> Mat<'a> {
        Mat { data: &x[(row * heads + head) * d..], row: heads * d, col: 1 }
    }

    /// Scores of a tile, -inf where the mask hides a pair. With a softcap, `slope` gets the
    /// derivative by the product of query and key (without one it is `scale` everywhere).
    pub fn scores(
        &self,
        h: usize,
        t: &Slice,
        vis: Visible,
        x: &Operands<'_>,
        s: &mut [f32],
        slope: &mut [f32],
    ) {
        let (d, n) = (&self.dims, t.num_kv);
        let q = Self::head(x.q, t.q, h, d.hq, d.dqk);
        let k = Self::head(x.k, t.kv, self.kv_head(h), d.hkv, d.dqk);
        matmul((t.num_q, n, d.dqk), q, k.t(), s, false);
        match self.softcap {
            None => s.iter_mut().for_each(|z| *z *= self.scale),
            Some(cap) => {
                for (at, z) in s.iter_mut().enumerate() {
                    let th = (*z * self.scale / cap).tanh();
                    *z = cap * th;
                    if let Some(slope) = slope.get_mut(at) {
                        *slope = self.scale * (1.0 - th * th);
                    }
                }
            }
        }
        if let Some((shape, bias)) = &self.bias {
            for (r, row) in s.chunks_exact_mut(n).enumerate() {
                let at = self.bias_at(shape, h, t.i + r) + t.j;
                row.iter_mut().zip(&bias[at..at + n]).for_each(|(z, b)| *z += b);
            }
        }
        if vis == Visible::Some {
            for (r, row) in s.chunks_exact_mut(n).enumerate() {
                let own = (t.i + r) as i64 + t.shift - t.j as i64;
                let first = self.mask.left.map_or(0, |l| (own - bound(l)).clamp(0, n as i64));
                let end =
                    self.mask.right.map_or(n as i64, |r| (own + bound(r) + 1).clamp(0, n as i64));
                row[..first as usize].fill(f32::NEG_INFINITY);
                row[end as usize..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// First element of the bias's row for query `i` of local head `h`.
    pub fn bias_at(&self, b: &BiasShape, h: usize, i: usize) -> usize {
        let head = if b.heads == 1 { 0 } else { self.first_head + h };
        (head * b.sq + i) * b.skv
    }

    /// Multiplies row `r` of a tile by the dropout factors.
    pub fn drop_row(&self, h: usize, t: &Slice, r: usize, p: &mut [f32]) {
        let Some((rng, drop, factor)) = &self.dropout else { return };
        let row = ((self.first_head + h) as u64) << 48 | ((t.q_pos + r) as u64) << 24;
        for (j, p) in p.iter_mut().enumerate() {
            let kept = rng.f64_at(row | (t.kv_pos + j) as u64) >= *drop;
            *p = if kept { *p * factor } else { 0.0 };
        }
    }

    /// Takes the keys of `slices` into the running state.
    pub fn forward(&self, x: &Operands<'_>, slices: &[Slice], st: &mut State) {
        let mut scratch = filled_or_unwind(0.0f32, self.blocks.block_q * self.blocks.block_kv);
        for h in 0..self.dims.hq {
            self.tiles(slices, |t, vis| {
                let s = &mut scratch[..t.num_q * t.num_kv];
                self.scores(h, t, vis, x, s, &mut []);
                self.softmax_step(h, t, s, st);
                let d = &self.dims;
                let v = Self::head(x.v, t.kv, self.kv_head(h), d.hkv, d.dv);
                let acc = (h * st.rows + t.q) * d.dv;
                let acc = &mut st.acc[acc..acc + t.num_q * d.dv];
                matmul((t.num_q, d.dv, t.num_kv), Mat::rows(s, t.num_kv), v, acc, true);
            });
        }
    }

    /// Turns scores into unnormalised probabilities, and rescales the state to the new maximum.
    fn softmax_step(&self, h: usize, t: &Slice, s: &mut [f32], st: &mut State) {
        let dv = self.dims.dv;
        for (r, row) in s.chunks_exact_mut(t.num_kv).enumerate() {
            let at = h * st.rows + t.q + r;
            let max = row.iter().fold(st.max[at], |m, &z| m.max(z));
            if row.iter().any(|z| z.is_nan()) {
                // `f32::max` passes NaN over; it must reach the result.
                st.max[at] = st.max[at].max(0.0);
                st.sum[at] = f32::NAN;
                st.acc[at * dv..(at + 1) * dv].fill(f32::NAN);
                row.fill(0.0);
                continue;
            }
            if max == f32::NEG_INFINITY {
                // Nothing visible so far: -inf less -inf would be NaN.
                row.fill(0.0);
                continue;
            }
            if max > st.max[at] {
                let shrink = (st.max[at] - max).exp();
                st.sum[at] *= shrink;
                st.acc[at * dv..(at + 1) * dv].iter_mut().for_each(|a| *a *= shrink);
                st.max[at] = max;
            }
            row.iter_mut().for_each(|z| *z = (*z - max).exp());
            st.sum[at] += row.iter().fold(0.0, |a, p| a + p);
            self.drop_row(h, t, r, row);
        }
    }

    /// Normalises: `out [rows, hq, dv]` and `lse [hq, rows]`. `in_sequence[row]` is false for
    /// padding; `sink` holds the logits of all query heads.
    pub fn finish(
        &self,
        st: &State,
        sink: Option<&[f32]>,
        in_sequence: &[bool],
    ) -> (Vec<f32>, Vec<f32>) {
        let (hq, dv, rows) = (self.dims.hq, self.dims.dv, st.rows);
        let mut out = filled_or_unwind(0.0, rows * hq * dv);
        let mut lse = filled_or_unwind(f32::NEG_INFINITY, hq * rows);
        for h in 0..hq {
            let sink = sink.map(|s| s[self.first_head + h]);
            for row in 0..rows {
                let at = h * rows + row;
                let (own, sum) = (st.max[at], st.sum[at]);
                let max = sink.map_or(own, |s| own.max(s));
                if !in_sequence[row] || max == f32::NEG_INFINITY {
                    continue;
                }
                let part = (own - max).exp();
                let total = sum * part + sink.map_or(0.0, |s| (s - max).exp());
                lse[at] = max + total.ln();
                let factor = part / total;
                let o = &mut out[(row * hq + h) * dv..][..dv];
                let acc = &st.acc[at * dv..(at + 1) * dv];
                o.iter_mut().zip(acc).for_each(|(o, a)| *o = a * factor);
            }
        }
        (out, lse)
    }
}

/// Rounds `values` to the tensor.
pub(crate) fn store(t: &Tensor, values: &[f32]) -> Result<()> {
    t.write(|b| convert_from_f32(t.dtype(), values, b))
}
