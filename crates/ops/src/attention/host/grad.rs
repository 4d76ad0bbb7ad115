//! The backward pass on the host, block by block.
//!
//! ```text
//! p_ij = exp(s_ij - lse_i)                   dv_j += p_ij keep'_ij do_i
//! ds_ij = p_ij (keep'_ij <do_i, v_j> - delta_i)     dbias_ij += ds_ij
//! dz_ij = ds_ij slope_ij                     dq_i += dz_ij k_j      dk_j += dz_ij q_i
//! dsink -= exp(sink - lse_i) delta_i
//! ```

use tilewire_core::memory::filled_or_unwind;

use super::core::{Core, Operands};
use crate::attention::desc::Visible;
use crate::attention::{BiasShape, Slice};
use crate::common::Mat;
use crate::gemm::host::matmul;

/// The gradients and softmax numbers of a part's queries for the backward pass: `d_out [rows, hq,
/// dv]`, `lse` and `delta` `[hq, rows]`.
pub(crate) struct Upstream {
    pub rows: usize,
    pub d_out: Vec<f32>,
    pub lse: Vec<f32>,
    pub delta: Vec<f32>,
}

/// f32 accumulators, head by head: `dq [hq, rows, dqk]`; `dk`, `dv` `[hkv, kv_rows, d]` of one part
/// of the keys; `dbias` of the bias's shape (empty where not asked for).
pub(crate) struct Grads {
    pub dq: Vec<f32>,
    pub kv_rows: usize,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    pub dbias: Vec<f32>,
}

impl Grads {
    pub fn new(core: &Core, rows: usize, with_bias: bool) -> Self {
        let len = |(b, _): &(BiasShape, Vec<f32>)| b.heads * b.sq * b.skv;
        let dbias = core.bias.as_ref().filter(|_| with_bias).map_or(0, len);
        Self {
            dq: filled_or_unwind(0.0, core.dims.hq * rows * core.dims.dqk),
            kv_rows: 0,
            dk: Vec::new(),
            dv: Vec::new(),
            dbias: filled_or_unwind(0.0, dbias),
        }
    }

    /// Begins a part of `kv_rows` keys: `dk` and `dv` are zeros.
    pub fn begin(&mut self, core: &Core, kv_rows: usize) {
        let d = &core.dims;
        self.kv_rows = kv_rows;
        for (x, dim) in [(&mut self.dk, d.dqk), (&mut self.dv, d.dv)] {
            let len = d.hkv * kv_rows * dim;
            match len > x.capacity() {
                true => *x = filled_or_unwind(0.0, len),
                false => {
                    x.clear();
                    x.resize(len, 0.0);
                }
            }
        }
    }
}

struct Scratch {
    p: Vec<f32>,
    dp: Vec<f32>,
    slope: Vec<f32>,
    kept: Vec<f32>,
}

/// A tile of one query head.
struct Tile<'a> {
    h: usize,
    t: &'a Slice,
    vis: Visible,
}

impl Core {
    /// Adds what `slices` contribute to all gradients.
    pub fn backward(&self, x: &Operands<'_>, up: &Upstream, slices: &[Slice], g: &mut Grads) {
        let tile = self.blocks.block_q * self.blocks.block_kv;
        let slope = if self.softcap.is_some() { tile } else { 0 };
        let buf = || filled_or_unwind(0.0f32, tile);
        let mut scratch =
            Scratch { p: buf(), dp: buf(), slope: filled_or_unwind(0.0, slope), kept: buf() };
        for h in 0..self.dims.hq {
            self.tiles(slices, |t, vis| {
                self.backward_tile(&Tile { h, t, vis }, (x, up), &mut scratch, g);
            });
        }
    }

    fn backward_tile(
        &self,
        &Tile { h, t, vis }: &Tile<'_>,
        (x, up): (&Operands<'_>, &Upstream),
        scratch: &mut Scratch,
        g: &mut Grads,
    ) {
        let (d, m, n, kvh) = (&self.dims, t.num_q, t.num_kv, self.kv_head(h));
        let (p, dp) = (&mut scratch.p[..m * n], &mut scratch.dp[..m * n]);
        let (kept, slopes) = (&mut scratch.kept[..m * n], &mut scratch.slope);
        self.scores(h, t, vis, x, p, slopes);
        for (r, row) in p.chunks_exact_mut(n).enumerate() {
            let lse = up.lse[h * up.rows + t.q + r];
            match lse == f32::NEG_INFINITY {
                true => row.fill(0.0),
                false => row.iter_mut().for_each(|s| *s = (*s - lse).exp()),
            }
        }
        kept.copy_from_slice(p);
        let d_out = Self::head(&up.d_out, t.q, h, d.hq, d.dv);
        let v = Self::head(x.v, t.kv, kvh, d.hkv, d.dv);
        matmul((m, n, d.dv), d_out, v.t(), dp, false);
        for r in 0..m {
            self.drop_row(h, t, r, &mut kept[r * n..(r + 1) * n]);
            self.drop_row(h, t, r, &mut dp[r * n..(r + 1) * n]);
        }
        let at = (kvh * g.kv_rows + t.kv) * d.dv;
        matmul((n, d.dv, m), Mat::rows(kept, n).t(), d_out, &mut g.dv[at..at + n * d.dv], true);
        for (r, row) in dp.chunks_exact_mut(n).enumerate() {
            let delta = up.delta[h * up.rows + t.q + r];
            let p = &p[r * n..(r + 1) * n];
            // Hidden pairs have p = 0; a product with an infinite dp would not.
            let ds =
                |(dp, p): (&mut f32, &f32)| *dp = if *p == 0.0 { 0.0 } else { p * (*dp - delta) };
            row.iter_mut().zip(p).for_each(ds);
        }
        self.add_score_grads(h, t, (dp, slopes), x, g);
    }

    /// Given the gradient of the scores of a tile.
    fn add_score_grads(
        &self,
        h: usize,
        t: &Slice,
        (ds, slopes): (&mut [f32], &[f32]),
        x: &Operands<'_>,
        g: &mut Grads,
    ) {
        let (d, m, n, kvh) = (&self.dims, t.num_q, t.num_kv, self.kv_head(h));
        if let (Some((shape, _)), false) = (&self.bias, g.dbias.is_empty()) {
            for (r, row) in ds.chunks_exact(n).enumerate() {
                let at = self.bias_at(shape, h, t.i + r) + t.j;
                g.dbias[at..at + n].iter_mut().zip(row).for_each(|(b, ds)| *b += ds);
            }
        }
        match self.softcap {
            Some(_) => ds.iter_mut().zip(slopes).for_each(|(z, s)| *z *= s),
            None => ds.iter_mut().for_each(|z| *z *= self.scale),
        }
        let q = Self::head(x.q, t.q, h, d.hq, d.dqk);
        let k = Self::head(x.k, t.kv, kvh, d.hkv, d.dqk);
        let at = (h * (g.dq.len() / (d.hq * d.dqk)) + t.q) * d.dqk;
        matmul((m, d.dqk, n), Mat::rows(ds, n), k, &mut g.dq[at..at + m * d.dqk], true);
        let at = (kvh * g.kv_rows + t.kv) * d.dqk;
        matmul((n, d.dqk, m), Mat::rows(ds, n).t(), q, &mut g.dk[at..at + n * d.dqk], true);
    }

    /// Returns what my queries contribute to the gradient of the sink, of all query heads.
    pub fn sink_grad(&self, up: &Upstream, sink: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; sink.len()];
        for h in 0..self.dims.hq {
            let head = self.first_head + h;
            for at in h * up.rows..(h + 1) * up.rows {
                if up.lse[at] > f32::NEG_INFINITY {
                    out[head] -= (sink[head] - up.lse[at]).exp() * up.delta[at];
                }
            }
        }
        out
    }
}

/// `[heads, rows, d]` to `[rows, heads, d]`.
pub(crate) fn rows_first(x: &[f32], heads: usize, rows: usize, d: usize) -> Vec<f32> {
    let mut out = filled_or_unwind(0.0, x.len());
    for (at, src) in x.chunks_exact(d).enumerate() {
        let (h, row) = (at / rows, at % rows);
        out[(row * heads + h) * d..][..d].copy_from_slice(src);
    }
    out
}
