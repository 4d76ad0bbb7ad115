//! The four projections of a layer over the tp team.

use tilewire_core::Result;
use tilewire_device::Tensor;
use tilewire_ops::Shards;
use tilewire_ops::ag_gemm::{AgGemmInputs, AgGemmPlan};
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_ops::gemm::{BOrder, GemmDesc, GemmInputs, GemmPlan};
use tilewire_ops::gemm_rs::{GemmRsInputs, GemmRsPlan};
use tilewire_symm::HeapCfg;

use super::{Clock, Times};
use crate::comm::Comm;
use crate::model::Model;
use crate::params;

/// One projection: its weight, and the columns into and out of the product.
struct Projection<'a> {
    clock: &'a Clock<'a>,
    comm: &'a Comm,
    w: &'a Tensor,
    order: BOrder,
    k: usize,
    n: usize,
}

/// Collective. Both passes of both projections; without attention there is no backward pass.
pub(super) fn measure(clock: &Clock<'_>, m: &Model) -> Result<Vec<Times>> {
    let (comm, i) = (&m.comm, params::layer(0));
    let (qkv, out) = (&m.params[i.qkv].w, &m.params[i.out].w);
    let (cols, d, q) = (qkv.shape().dim(0), qkv.shape().dim(1), out.shape().dim(1));
    let of = |w, order, k, n| Projection { clock, comm, w, order, k, n };
    let mut times = vec![
        of(qkv, BOrder::Nk, d, cols).gather(&comm.proj.qkv)?,
        of(out, BOrder::Nk, q, d).scatter(&comm.proj.out)?,
    ];
    if !m.cfg.no_attention {
        times.push(of(out, BOrder::Kn, d, q).gather(&comm.proj.out_bwd)?);
        times.push(of(qkv, BOrder::Kn, cols, d).scatter(&comm.proj.qkv_bwd)?);
    }
    Ok(times)
}

impl Projection<'_> {
    fn tensor(&self, rows: usize, cols: usize) -> Result<Tensor> {
        self.comm.place.zeros(self.comm.place.dtype, rows, cols)
    }

    fn rows(&self) -> (usize, usize) {
        (self.comm.rows.attn.len(), self.comm.rows.own.len())
    }

    fn gemm(&self) -> Result<GemmPlan> {
        let desc = GemmDesc {
            b_order: self.order,
            ..GemmDesc::nt(self.rows().0, self.n, self.k, self.comm.place.dtype)
        };
        let plan = GemmPlan::new(desc)?;
        plan.prepare(&self.comm.stream)?;
        Ok(plan)
    }

    fn collective(&self, kind: CollectiveKind, cols: usize) -> Result<CollectivePlan> {
        let desc = CollectiveDesc { kind, m: self.rows().0, cols, dtype: self.comm.place.dtype };
        let bytes = CollectivePlan::memory(&desc, self.comm.tp.size()) + (1 << 14);
        let heap =
            self.comm.tp.heap(self.comm.target.backend_of(&self.comm.tp), HeapCfg::new(bytes))?;
        let plan = CollectivePlan::new(desc, &heap)?;
        plan.prepare(&self.comm.stream)?;
        Ok(plan)
    }

    /// `all_gather(x) W^T`, which keeps the gathered rows for the gradient of `W`.
    fn gather(&self, plan: &AgGemmPlan) -> Result<Times> {
        let (s, (m, own)) = (&self.comm.stream, self.rows());
        let gemm = self.gemm()?;
        let wire = self.collective(CollectiveKind::AllGather(Shards::Even), self.k)?;
        let (x, all, out) =
            (self.tensor(own, self.k)?, self.tensor(m, self.k)?, self.tensor(m, self.n)?);
        self.clock.measure(
            &|| {
                let t = AgGemmInputs {
                    gathered: Some(all.clone()),
                    ..AgGemmInputs::new(x.clone(), self.w.clone(), out.clone())
                };
                plan.launch(s, m, t)?.wait().map(|_| ())
            },
            &|| gemm.launch(s, GemmInputs::new(&all, self.w, out.clone()))?.wait().map(|_| ()),
            &|| wire.launch(s, m, &x, &all)?.wait().map(|_| ()),
        )
    }

    /// `reduce_scatter(x W^T)`.
    fn scatter(&self, plan: &GemmRsPlan) -> Result<Times> {
        let (s, (m, own)) = (&self.comm.stream, self.rows());
        let gemm = self.gemm()?;
        let sum = CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum);
        let wire = self.collective(sum, self.n)?;
        let (x, all, out) =
            (self.tensor(m, self.k)?, self.tensor(m, self.n)?, self.tensor(own, self.n)?);
        self.clock.measure(
            &|| {
                let t = GemmRsInputs::new(x.clone(), self.w.clone(), out.clone());
                plan.launch(s, m, t)?.wait().map(|_| ())
            },
            &|| gemm.launch(s, GemmInputs::new(&x, self.w, all.clone()))?.wait().map(|_| ()),
            &|| wire.launch(s, m, &all, &out)?.wait().map(|_| ()),
        )
    }
}
