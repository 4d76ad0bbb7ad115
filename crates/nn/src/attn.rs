//! Attention of the model: packed equal-length sequences, divided over the cp team.

use tilewire_core::{BackendKind, DType, Rank, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, Layout};
use tilewire_symm::{HeapCfg, LiveTeam};

use crate::config::{Coord, Grid, ModelCfg};
use crate::math::RopeLayout;

const LAYOUT: Layout = Layout::Zigzag;

/// Tokens (numbered within the dp part) whose attention a rank computes, in its row order.
///
/// # Errors
/// Never for a grid that fits the model.
pub fn token_order(m: &ModelCfg, grid: &Grid, c: Coord) -> Result<Vec<usize>> {
    let tokens = m.seq * (m.batch / grid.dp);
    Ok(LAYOUT.spans(tokens, Rank::new(c.cp as u32), grid.cp).into_iter().flatten().collect())
}

/// Queries, keys and values of one layer, as attention wants them.
pub struct Qkv {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

/// The attention of all layers: one plan, used by each in turn.
pub struct Attn {
    plan: CpAttentionPlan,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rows: usize,
}

impl Attn {
    /// Collective over the cp team.
    ///
    /// # Errors
    /// What making the heap and the plan gives.
    pub fn new(cp: &LiveTeam, m: &ModelCfg, grid: &Grid, stream: &Stream) -> Result<Self> {
        let (heads, kv_heads) = (m.heads / grid.tp, m.kv_heads / grid.tp);
        let batch = m.batch / grid.dp;
        let mut desc =
            AttentionDesc::new(m.seq, (heads, kv_heads), m.head_dim, DType::F32, AttnMask::CAUSAL);
        desc.sequences = Sequences::batched(batch, m.seq, m.seq);
        let desc = CpAttentionDesc { layout: LAYOUT, ..CpAttentionDesc::new(desc) };
        let bytes = CpAttentionPlan::memory(&desc, cp.size(), None) + (1 << 16);
        let heap = cp.heap(BackendKind::Host, HeapCfg::new(bytes))?;
        let plan = CpAttentionPlan::new(desc, &heap, None)?;
        plan.prepare(stream)?;
        let rows = LAYOUT.spans(m.seq * batch, cp.rank(), cp.size()).iter().map(|r| r.len()).sum();
        Ok(Self { plan, heads, kv_heads, dim: m.head_dim, rows })
    }

    /// The plan, to time it.
    pub(crate) fn plan(&self) -> &CpAttentionPlan {
        &self.plan
    }

    /// Where the heads that turn with their position lie in a row `[q | k | v]` of this rank.
    pub(crate) fn rope_layout(&self) -> RopeLayout {
        let (q, kv) = self.widths();
        RopeLayout { width: q + 2 * kv, at: 0, heads: self.heads + self.kv_heads, dim: self.dim }
    }

    fn widths(&self) -> (usize, usize) {
        (self.heads * self.dim, self.kv_heads * self.dim)
    }

    /// Cuts rows `[q | k | v]` into three tensors.
    ///
    /// # Errors
    /// Never for rows of the right width.
    pub fn split(&self, rows: &[f32]) -> Result<Qkv> {
        let (q, kv) = self.widths();
        let cut = |at: usize, n: usize| {
            let part: Vec<f32> =
                rows.chunks_exact(q + 2 * kv).flat_map(|r| r[at..at + n].iter().copied()).collect();
            Tensor::from_slice(&part, Shape::d2(self.rows, n))
        };
        Ok(Qkv { q: cut(0, q)?, k: cut(q, kv)?, v: cut(q + kv, kv)? })
    }

    /// Output `[rows, heads * dim]` and log-sum-exp.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn forward(&self, stream: &Stream, x: &Qkv) -> Result<AttnOut> {
        let out = AttnOut {
            out: Tensor::poisoned(DType::F32, Shape::d2(self.rows, self.heads * self.dim)),
            lse: Tensor::poisoned(DType::F32, Shape::d2(self.heads, self.rows)),
        };
        self.plan.launch_fwd(stream, &AttnInputs::new(&x.q, &x.k, &x.v), out)?.wait()
    }

    /// Gradient of the rows `[q | k | v]`.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn backward(
        &self,
        stream: &Stream,
        x: &Qkv,
        y: &AttnOut,
        d_out: &[f32],
    ) -> Result<Vec<f32>> {
        let (q, kv) = self.widths();
        let tensor = |n: usize| Tensor::poisoned(DType::F32, Shape::d2(self.rows, n));
        let saved = AttnSaved {
            out: y.out.clone(),
            lse: y.lse.clone(),
            d_out: Tensor::from_slice(d_out, Shape::d2(self.rows, q))?,
        };
        let grads = AttnGrads::new(tensor(q), tensor(kv), tensor(kv));
        let inputs = AttnInputs::new(&x.q, &x.k, &x.v);
        let g = self.plan.launch_bwd(stream, &inputs, saved, grads)?.wait()?;
        let (dq, dk, dv) = (g.dq.to_f32()?, g.dk.to_f32()?, g.dv.to_f32()?);
        let mut rows = Vec::with_capacity(self.rows * (q + 2 * kv));
        for r in 0..self.rows {
            rows.extend_from_slice(&dq[r * q..][..q]);
            rows.extend_from_slice(&dk[r * kv..][..kv]);
            rows.extend_from_slice(&dv[r * kv..][..kv]);
        }
        Ok(rows)
    }
}
