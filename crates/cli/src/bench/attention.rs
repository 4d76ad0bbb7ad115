//! `tilewire bench` of attention: forward and backward, on one rank and divided over several.
//!
//! Before anything is timed, both passes run with weights that are equal, whose results
//! `uniform.rs` knows in closed form: every element of the output, of lse and of the three
//! gradients is compared, at the size that is timed. What is timed has random data.

use std::ops::Range;

use tilewire::ops::attention::{
    AttentionDesc, AttentionPlan, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};
use tilewire::ops::collective::CollectiveBackend;
use tilewire::ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Strategy};
use tilewire::prelude::*;

use super::device::{Bench, Heads};
use super::products::tflops;
use super::uniform::{Judged, Of, Results, Uniform, Zero};
use crate::rows::{Row, Time};

/// Tensors of a forward and a backward pass over some rows.
struct Pass {
    x: AttnInputs,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    grads: AttnGrads,
}

impl Pass {
    fn new(b: &Bench<'_>, rows: usize, x: AttnInputs, d_out: Tensor) -> Result<Self> {
        let h = Heads::of(b.o.backend);
        let like = |heads| b.poisoned(b.o.dtype, Shape::d2(rows, heads * h.width));
        let grads = AttnGrads::new(like(h.q)?, like(h.kv)?, like(h.kv)?);
        let lse = b.poisoned(DType::F32, Shape::d2(h.q, rows))?;
        Ok(Self { x, out: like(h.q)?, lse, d_out, grads })
    }

    /// Random inputs.
    fn noise(b: &Bench<'_>, rows: usize) -> Result<Self> {
        let h = Heads::of(b.o.backend);
        let (q, kv) = (h.q * h.width, h.kv * h.width);
        let x = AttnInputs::new(b.noise(rows, q)?, b.noise(rows, kv)?, b.noise(rows, kv)?);
        Self::new(b, rows, x, b.noise(rows, q)?)
    }

    /// Inputs whose results are known.
    fn uniform(b: &Bench<'_>, u: &Uniform) -> Result<Self> {
        let (h, rows) = (u.heads, u.mine.len());
        let put = |of, heads| b.place(&u.input(of), Shape::d2(rows, heads * h.width));
        let x = AttnInputs::new(put(Of::Q, h.q)?, put(Of::K, h.kv)?, put(Of::V, h.kv)?);
        Self::new(b, rows, x, put(Of::DOut, h.q)?)
    }

    fn outputs(&self) -> AttnOut {
        AttnOut { out: self.out.clone(), lse: self.lse.clone() }
    }

    fn saved(&self) -> AttnSaved {
        let (out, lse, d_out) = (self.out.clone(), self.lse.clone(), self.d_out.clone());
        AttnSaved { out, lse, d_out }
    }

    fn results(&self) -> Result<Results> {
        let (out, lse) = (self.out.to_f32()?, self.lse.to_f32()?);
        let (dq, dk, dv) =
            (self.grads.dq.to_f32()?, self.grads.dk.to_f32()?, self.grads.dv.to_f32()?);
        Ok(Results { out, lse, dq, dk, dv })
    }
}

/// A way to attend: its name, the global rows of this rank, the floating-point operations of its
/// forward pass.
struct Way<'a> {
    name: &'a str,
    spans: Vec<Range<usize>>,
    flop: f64,
}

impl Bench<'_> {
    fn attention_desc(&self) -> AttentionDesc {
        let h = Heads::of(self.o.backend);
        let (m, num) = (self.sizes().0, self.o.documents);
        let d = AttentionDesc::new(m, (h.q, h.kv), h.width, self.o.dtype, AttnMask::CAUSAL);
        AttentionDesc { sequences: Sequences::batched(num, m / num, m / num), ..d }
    }

    /// Runs both passes on inputs whose results are known, and compares them.
    fn compared(
        &self,
        way: &Way<'_>,
        fwd: &impl Fn(&Pass) -> Result<()>,
        bwd: &impl Fn(&Pass) -> Result<()>,
    ) -> Result<[Judged; 2]> {
        let (desc, mut all) = (self.attention_desc(), [Judged::default(); 2]);
        for zero in [Zero::Queries, Zero::Keys] {
            let u = Uniform {
                heads: Heads::of(self.o.backend),
                rows: self.sizes().0,
                doc: self.sizes().0 / self.o.documents,
                scale: desc.scale as f32,
                zero,
                mine: way.spans.iter().cloned().flatten().collect(),
            };
            let p = Pass::uniform(self, &u)?;
            fwd(&p)?;
            bwd(&p)?;
            self.stream.synchronize()?;
            self.team.check()?;
            let judged = u.judge(&p.results()?);
            all.iter_mut().zip(judged).for_each(|(a, j)| a.add(j));
        }
        for j in &mut all {
            (j.wrong, j.worst) = (self.wrong(j.wrong)?, self.worst(j.worst)?);
        }
        Ok(all)
    }

    /// Rows of both passes of an operation.
    fn passes(
        &self,
        way: &Way<'_>,
        fwd: impl Fn(&Pass) -> Result<()>,
        bwd: impl Fn(&Pass) -> Result<()>,
    ) -> Result<Vec<Row>> {
        let judged = self.compared(way, &fwd, &bwd)?;
        let p = Pass::noise(self, way.spans.iter().map(Range::len).sum())?;
        // The backward pass reads what the forward pass of the same inputs has left.
        let times = [("fwd", self.time(|| fwd(&p))?, 1.0), ("bwd", self.time(|| bwd(&p))?, 2.5)];
        let h = Heads::of(self.o.backend);
        let packed = match self.o.documents {
            1 => String::new(),
            num => format!(" documents={num}"),
        };
        let shape = format!("m={} heads={}/{} d={}{packed}", self.sizes().0, h.q, h.kv, h.width);
        let row = |((pass, t, times), j): ((&str, Time, f64), Judged)| {
            let name = format!("{}/{pass}", way.name);
            let rate = tflops(times * way.flop, t.us);
            let r = self.row(&name, shape.clone(), t, j.wrong, rate)?;
            Ok(Row { max_err: r.max_err.map(|_| j.worst), ..r })
        };
        times.into_iter().zip(judged).map(row).collect()
    }

    /// Two products of 2 m^2 d for each document of m rows, half of them visible.
    fn attention_flop(&self) -> f64 {
        let (m, h) = (self.sizes().0, Heads::of(self.o.backend));
        2.0 * (m * m / self.o.documents) as f64 * (h.width * h.q) as f64
    }

    /// All rows on every GPU.
    pub(super) fn attention_rows(&self) -> Result<Vec<Row>> {
        let plan = AttentionPlan::new(self.attention_desc(), None)?;
        plan.prepare(&self.stream)?;
        let s = &self.stream;
        let fwd = |p: &Pass| plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ());
        let bwd =
            |p: &Pass| plan.launch_bwd(s, &p.x, p.saved(), p.grads.clone())?.join(s).map(|_| ());
        let (all, flop) = (0..self.sizes().0, self.attention_flop());
        self.passes(&Way { name: "attention", spans: vec![all], flop }, fwd, bwd)
    }

    fn cp_way(&self, strategy: Strategy, backend: CollectiveBackend) -> Result<Vec<Row>> {
        let (desc, config) = (CpAttentionDesc::new(self.attention_desc()), CpConfig::of(strategy));
        let plan = CpAttentionPlan::with_backend(desc, &self.heap, Some(config), backend)?;
        plan.prepare(&self.stream)?;
        let s = &self.stream;
        let fwd = |p: &Pass| plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ());
        let bwd =
            |p: &Pass| plan.launch_bwd(s, &p.x, p.saved(), p.grads.clone())?.join(s).map(|_| ());
        let by = if backend == CollectiveBackend::Nccl { "nccl" } else { "put" };
        let name = format!("cp_attention/{strategy}/{by}");
        let flop = self.attention_flop() / self.team.size() as f64;
        let done = self.passes(&Way { name: &name, spans: plan.rows_q(None), flop }, fwd, bwd)?;
        drop(plan);
        self.heap.collect()?;
        Ok(done)
    }

    /// Each strategy by puts and gets and by NCCL. `t_gemm` is the rank's part of local attention
    /// over all rows, `t_seq` the fastest through NCCL.
    pub(super) fn cp_rows(&self) -> Result<Vec<Row>> {
        let size = self.team.size();
        let local: Vec<_> = self.attention_rows()?.iter().map(|r| r.t_ours_us).collect();
        let mut rows = Vec::new();
        let h = Heads::of(self.o.backend);
        let trades = h.q.is_multiple_of(size) && h.kv.is_multiple_of(size);
        for strategy in [Strategy::Get, Strategy::AllGather, Strategy::AllToAll] {
            if strategy == Strategy::AllToAll && !trades {
                continue;
            }
            for backend in [CollectiveBackend::Put, CollectiveBackend::Nccl] {
                match self.cp_way(strategy, backend) {
                    Err(e) if e.is_unavailable() || e.is_unsupported() => {}
                    r => rows.extend(r?),
                }
            }
        }
        let of = |pass: &str| {
            let by_nccl = rows.iter().filter(|r| r.op.ends_with(&format!("nccl/{pass}")));
            by_nccl.filter_map(|r| r.t_ours_us).min_by(f64::total_cmp)
        };
        let best = [of("fwd"), of("bwd")];
        let with = |r: Row| {
            let i = usize::from(r.op.ends_with("bwd"));
            let t_gemm_us = local.get(i).copied().flatten().map(|us| us / size as f64);
            Row { t_gemm_us, t_seq_us: best[i], ..r }
        };
        Ok(rows.into_iter().map(with).collect())
    }
}
