//! The share of communication that the projections hide, measured on this machine.

use std::time::Instant;

use tilewire_core::{BackendKind, DType, Result, Shape};
use tilewire_device::Tensor;
use tilewire_ops::Shards;
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_ops::gemm::{BOrder, GemmDesc, GemmInputs, GemmPlan};
use tilewire_symm::{HeapCfg, LiveTeam};

use crate::comm::Comm;
use crate::params::{self, Param};

/// Timed repetitions of each part; the median counts.
const ROUNDS: usize = 5;

/// Median of the slowest rank, microseconds.
fn time(team: &LiveTeam, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(ROUNDS);
    // The first round warms up and does not count.
    for _ in 0..=ROUNDS {
        team.exchange("align", &[])?;
        let start = Instant::now();
        f()?;
        let mine = start.elapsed().as_secs_f64() * 1e6;
        let all = team.exchange("time", &mine.to_le_bytes())?;
        let one = |b: &Vec<u8>| b.as_slice().try_into().map_or(0.0, f64::from_le_bytes);
        times.push(all.iter().map(one).fold(0.0, f64::max));
    }
    let mut times = times.split_off(1);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// One projection: how it runs, and its two parts alone.
struct Parts<'a> {
    comm: &'a Comm,
    w: &'a Tensor,
    order: BOrder,
    /// Columns in and out of the product.
    k: usize,
    n: usize,
}

impl Parts<'_> {
    fn gemm(&self) -> Result<f64> {
        let rows = self.comm.rows.attn.len();
        let desc =
            GemmDesc { b_order: self.order, ..GemmDesc::nt(rows, self.n, self.k, DType::F32) };
        let plan = GemmPlan::new(desc)?;
        plan.prepare(&self.comm.stream)?;
        let x = Tensor::zeros(DType::F32, Shape::d2(rows, self.k));
        let out = Tensor::zeros(DType::F32, Shape::d2(rows, self.n));
        time(&self.comm.tp, || {
            let t = GemmInputs::new(&x, self.w, out.clone());
            plan.launch(&self.comm.stream, t)?.wait().map(|_| ())
        })
    }

    /// The collective alone, of rows of `cols` elements.
    fn wire(&self, kind: CollectiveKind, cols: usize) -> Result<f64> {
        let (m, own) = (self.comm.rows.attn.len(), self.comm.rows.own.len());
        let gathers = matches!(kind, CollectiveKind::AllGather(_));
        let desc = CollectiveDesc { kind, m, cols, dtype: DType::F32 };
        let size = self.comm.tp.size();
        let bytes = CollectivePlan::memory(&desc, size) + (1 << 14);
        let heap = self.comm.tp.heap(BackendKind::Host, HeapCfg::new(bytes))?;
        let plan = CollectivePlan::new(desc, &heap)?;
        plan.prepare(&self.comm.stream)?;
        let (rows_in, rows_out) = if gathers { (own, m) } else { (m, own) };
        let x = Tensor::zeros(DType::F32, Shape::d2(rows_in, cols));
        let out = Tensor::zeros(DType::F32, Shape::d2(rows_out, cols));
        time(&self.comm.tp, || plan.launch(&self.comm.stream, m, &x, &out)?.wait().map(|_| ()))
    }
}

/// Collective over the tp team: the share of the shorter of arithmetic and communication that the
/// four projections of a layer hide, `sum(t_gemm + t_comm - t_ours) / sum(min(t_gemm, t_comm))`.
/// `None` where nothing is communicated (tp 1). Negative if overlapping costs more than it hides, as
/// on a host with fewer cores than lanes.
///
/// # Errors
/// The fault of the team.
pub fn hidden_share(comm: &Comm, p: &[Param]) -> Result<Option<f64>> {
    if comm.tp.size() == 1 {
        return Ok(None);
    }
    let i = params::layer(0);
    let (w_qkv, w_out) = (&p[i.qkv].w, &p[i.out].w);
    let (cols, d, q) = (w_qkv.shape().dim(0), w_qkv.shape().dim(1), w_out.shape().dim(1));
    let (rows, own) = (comm.rows.attn.len(), comm.rows.own.len());
    let parts = |w, order, k, n| Parts { comm, w, order, k, n };
    let (small, wide) = (vec![0.5f32; own * d], |n: usize| vec![0.5f32; rows * n]);
    let ag = || CollectiveKind::AllGather(Shards::Even);
    let rs = || CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum);
    let (o, dqkv) = (wide(q), wide(cols));
    let ours = [
        time(&comm.tp, || comm.gather_gemm(&comm.qkv, &small, w_qkv, cols).map(|_| ()))?,
        time(&comm.tp, || comm.gemm_scatter(&comm.out, &o, w_out, d).map(|_| ()))?,
        time(&comm.tp, || comm.gather_gemm(&comm.out_bwd, &small, w_out, q).map(|_| ()))?,
        time(&comm.tp, || comm.gemm_scatter(&comm.qkv_bwd, &dqkv, w_qkv, d).map(|_| ()))?,
    ];
    let all = [
        (parts(w_qkv, BOrder::Nk, d, cols), ag()),
        (parts(w_out, BOrder::Nk, q, d), rs()),
        (parts(w_out, BOrder::Kn, d, q), ag()),
        (parts(w_qkv, BOrder::Kn, cols, d), rs()),
    ];
    let (mut saved, mut shorter) = (0.0, 0.0);
    for ((part, kind), t_ours) in all.into_iter().zip(ours) {
        let (t_gemm, t_comm) = (part.gemm()?, part.wire(kind, d)?);
        saved += t_gemm + t_comm - t_ours;
        shorter += t_gemm.min(t_comm);
    }
    Ok((shorter > 0.0).then(|| saved / shorter))
}
