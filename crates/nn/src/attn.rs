//! Attention of the model: packed equal-length sequences, divided over the cp team.

use std::sync::Arc;

use tilewire_core::{Rank, Result};
use tilewire_device::{Stream, Tensor, Tracer};
use tilewire_ops::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, Layout};
use tilewire_symm::{HeapCfg, LiveTeam};

use crate::config::{Coord, Grid, ModelCfg};
use crate::place::{Place, Target};

const LAYOUT: Layout = Layout::Zigzag;
const MASK: AttnMask = AttnMask::CAUSAL;

/// The sequences of a dp part.
fn sequences(m: &ModelCfg, grid: &Grid) -> Sequences {
    Sequences::batched(m.batch / grid.dp, m.seq, m.seq)
}

/// Tokens (numbered within the dp part) whose attention a rank computes, in its row order.
///
/// # Errors
/// Never for a grid that fits the model.
pub fn token_order(m: &ModelCfg, grid: &Grid, c: Coord) -> Result<Vec<usize>> {
    let s = sequences(m, grid);
    let spans = LAYOUT.rows_q(&s, &MASK, Rank::new(c.cp as u32), grid.cp);
    Ok(spans.into_iter().flatten().collect())
}

/// Queries, keys and values of one layer, or their gradients.
#[derive(Clone)]
pub struct Qkv {
    /// `[rows, heads * dim]`.
    pub q: Tensor,
    /// `[rows, kv_heads * dim]`.
    pub k: Tensor,
    /// `[rows, kv_heads * dim]`.
    pub v: Tensor,
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
    pub fn new(
        cp: &LiveTeam,
        m: &ModelCfg,
        grid: &Grid,
        (target, stream, tracer): (&Target, &Stream, Option<Arc<Tracer>>),
    ) -> Result<Self> {
        let (heads, kv_heads) = (m.heads / grid.tp, m.kv_heads / grid.tp);
        let dtype = target.dtype;
        let mut desc = AttentionDesc::new(m.seq, (heads, kv_heads), m.head_dim, dtype, MASK);
        desc.sequences = sequences(m, grid);
        let desc = CpAttentionDesc { layout: LAYOUT, ..CpAttentionDesc::new(desc) };
        let bytes = CpAttentionPlan::memory(&desc, cp.size(), None) + (1 << 16);
        let heap = cp.heap(target.backend_of(cp), HeapCfg::new(bytes))?;
        heap.copy_stream_traced(tracer)?;
        let plan = CpAttentionPlan::new(desc, &heap, None)?;
        plan.prepare(stream)?;
        let rows = plan.rows_q(None).iter().map(|r| r.len()).sum();
        Ok(Self { plan, heads, kv_heads, dim: m.head_dim, rows })
    }

    /// The plan, to time it.
    pub(crate) fn plan(&self) -> &CpAttentionPlan {
        &self.plan
    }

    /// Memory for queries, keys and values.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn qkv(&self, place: &Place) -> Result<Qkv> {
        let of = |heads| place.narrow(self.rows, heads * self.dim);
        Ok(Qkv { q: of(self.heads)?, k: of(self.kv_heads)?, v: of(self.kv_heads)? })
    }

    /// Memory for the output and the log-sum-exp.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn out(&self, place: &Place) -> Result<AttnOut> {
        let out = place.narrow(self.rows, self.heads * self.dim)?;
        Ok(AttnOut { out, lse: place.wide(self.heads, self.rows)? })
    }

    /// Queues the output `[rows, heads * dim]` and log-sum-exp.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn forward(&self, stream: &Stream, x: &Qkv, y: &AttnOut) -> Result<()> {
        let inputs = AttnInputs::new(&x.q, &x.k, &x.v);
        self.plan.launch_fwd(stream, &inputs, y.clone())?.join(stream).map(|_| ())
    }

    /// Queues the gradients of queries, keys and values.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn backward(
        &self,
        stream: &Stream,
        (x, y): (&Qkv, &AttnOut),
        d_out: &Tensor,
        d: &Qkv,
    ) -> Result<()> {
        let saved = AttnSaved { out: y.out.clone(), lse: y.lse.clone(), d_out: d_out.clone() };
        let grads = AttnGrads::new(d.q.clone(), d.k.clone(), d.v.clone());
        let inputs = AttnInputs::new(&x.q, &x.k, &x.v);
        self.plan.launch_bwd(stream, &inputs, saved, grads)?.join(stream).map(|_| ())
    }
}
