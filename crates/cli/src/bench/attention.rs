//! `tilewire bench` of attention: forward and backward, on one rank and divided over several.
//!
//! Before anything is timed, both passes run with weights that are equal, whose results
//! `uniform.rs` knows in closed form: every element of the output, of lse and of the three
//! gradients is compared, at the size that is timed. What is timed has random data.

use std::ops::Range;
use std::thread;

use tilewire::core::memory::error_of_panic;
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

/// The inputs of a forward and a backward pass over some rows.
struct Inputs {
    rows: usize,
    x: AttnInputs,
    d_out: Tensor,
}

impl Inputs {
    /// Random ones.
    fn noise(b: &Bench<'_>, rows: usize) -> Result<Self> {
        let h = Heads::of(b.o.backend);
        let (q, kv) = (h.q * h.width, h.kv * h.width);
        let x = AttnInputs::new(b.noise(rows, q)?, b.noise(rows, kv)?, b.noise(rows, kv)?);
        Ok(Self { rows, x, d_out: b.noise(rows, q)? })
    }

    /// Those whose results are known.
    fn uniform(b: &Bench<'_>, u: &Uniform) -> Result<Self> {
        let (h, rows, dtype) = (u.heads, u.mine.len(), b.o.dtype);
        let made = |(of, heads)| {
            move || Tensor::from_f32(&u.input(of), dtype, Shape::d2(rows, heads * h.width))
        };
        let all = [(Of::Q, h.q), (Of::K, h.kv), (Of::V, h.kv), (Of::DOut, h.q)];
        let [q, k, v, d_out] = side_by_side(all.map(made))?;
        let put = |t: Tensor| t.to(&b.device);
        Ok(Self { rows, x: AttnInputs::new(put(q)?, put(k)?, put(v)?), d_out: put(d_out)? })
    }
}

/// The inputs that all ways to attend to the same rows share.
struct Shared {
    spans: Vec<Range<usize>>,
    known: Vec<(Uniform, Inputs)>,
    noise: Inputs,
}

/// The results of `jobs`, which run on threads of their own: they convert millions of elements.
fn side_by_side<T: Send, const N: usize>(
    jobs: [impl FnOnce() -> Result<T> + Send; N],
) -> Result<[T; N]> {
    let done = thread::scope(|s| {
        let threads = jobs.map(|job| s.spawn(job));
        threads.map(|t| t.join().unwrap_or_else(|p| Err(error_of_panic("a conversion", p))))
    });
    let all = done.into_iter().collect::<Result<Vec<T>>>()?;
    all.try_into().map_err(|_| Error::internal("as many results as jobs"))
}

/// Tensors of a forward and a backward pass.
struct Pass {
    x: AttnInputs,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    grads: AttnGrads,
}

impl Pass {
    /// A pass over `i`, whose results are poisoned.
    fn new(b: &Bench<'_>, i: &Inputs) -> Result<Self> {
        let (h, rows) = (Heads::of(b.o.backend), i.rows);
        let like = |heads| b.poisoned(b.o.dtype, Shape::d2(rows, heads * h.width));
        let grads = AttnGrads::new(like(h.q)?, like(h.kv)?, like(h.kv)?);
        let lse = b.poisoned(DType::F32, Shape::d2(h.q, rows))?;
        let (x, d_out) = (i.x.clone(), i.d_out.clone());
        Ok(Self { x, out: like(h.q)?, lse, d_out, grads })
    }

    fn outputs(&self) -> AttnOut {
        AttnOut { out: self.out.clone(), lse: self.lse.clone() }
    }

    fn saved(&self) -> AttnSaved {
        let (out, lse, d_out) = (self.out.clone(), self.lse.clone(), self.d_out.clone());
        AttnSaved { out, lse, d_out }
    }

    fn results(&self) -> Result<Results> {
        let g = &self.grads;
        let all = [&self.out, &self.lse, &g.dq, &g.dk, &g.dv];
        let [out, lse, dq, dk, dv] = side_by_side(all.map(|t| || t.to_f32()))?;
        Ok(Results { out, lse, dq, dk, dv })
    }
}

/// A way to attend: its name, and the floating-point operations of its forward pass.
struct Way<'a> {
    name: &'a str,
    flop: f64,
}

impl Bench<'_> {
    fn attention_desc(&self) -> AttentionDesc {
        let h = Heads::of(self.o.backend);
        let (m, num) = (self.sizes().0, self.o.documents);
        let d = AttentionDesc::new(m, (h.q, h.kv), h.width, self.o.dtype, AttnMask::CAUSAL);
        AttentionDesc { sequences: Sequences::batched(num, m / num, m / num), ..d }
    }

    /// Makes the inputs of ways that attend to the rows `spans`.
    fn shared(&self, spans: Vec<Range<usize>>) -> Result<Shared> {
        let known = |zero| -> Result<_> {
            let u = Uniform {
                heads: Heads::of(self.o.backend),
                rows: self.sizes().0,
                doc: self.sizes().0 / self.o.documents,
                scale: self.attention_desc().scale as f32,
                zero,
                mine: spans.iter().cloned().flatten().collect(),
            };
            let inputs = Inputs::uniform(self, &u)?;
            Ok((u, inputs))
        };
        let known = [Zero::Queries, Zero::Keys].into_iter().map(known).collect::<Result<_>>()?;
        let noise = Inputs::noise(self, spans.iter().map(Range::len).sum())?;
        Ok(Shared { spans, known, noise })
    }

    /// Runs both passes on inputs whose results are known, and compares them.
    fn compared(
        &self,
        known: &[(Uniform, Inputs)],
        fwd: &impl Fn(&Pass) -> Result<()>,
        bwd: &impl Fn(&Pass) -> Result<()>,
    ) -> Result<[Judged; 2]> {
        let mut all = [Judged::default(); 2];
        for (u, inputs) in known {
            let p = Pass::new(self, inputs)?;
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
        shared: &Shared,
        fwd: impl Fn(&Pass) -> Result<()>,
        bwd: impl Fn(&Pass) -> Result<()>,
    ) -> Result<Vec<Row>> {
        let judged = self.compared(&shared.known, &fwd, &bwd)?;
        let p = Pass::new(self, &shared.noise)?;
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
        let shared = self.shared(vec![all])?;
        let way = Way { name: "attention", flop };
        self.passes(&way, &shared, fwd, bwd)
    }

    /// Inputs are made where `shared` has none for these rows.
    fn cp_way(
        &self,
        config: CpConfig,
        backend: CollectiveBackend,
        shared: &mut Option<Shared>,
    ) -> Result<Vec<Row>> {
        let desc = CpAttentionDesc::new(self.attention_desc());
        let plan = CpAttentionPlan::with_backend(desc, &self.heap, Some(config), backend)?;
        plan.prepare(&self.stream)?;
        let s = &self.stream;
        let fwd = |p: &Pass| plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ());
        let bwd =
            |p: &Pass| plan.launch_bwd(s, &p.x, p.saved(), p.grads.clone())?.join(s).map(|_| ());
        let by = if backend == CollectiveBackend::Nccl { "nccl" } else { "put" };
        let way = if config.gated { "gated" } else { config.strategy.name() };
        let name = format!("cp_attention/{way}/{by}");
        let flop = self.attention_flop() / self.team.size() as f64;
        let spans = plan.rows_q(None);
        let shared = match shared {
            Some(s) if s.spans == spans => s,
            other => other.insert(self.shared(spans)?),
        };
        let done = self.passes(&Way { name: &name, flop }, shared, fwd, bwd)?;
        drop(plan);
        self.heap.collect()?;
        Ok(done)
    }

    /// Each strategy by puts and gets and by NCCL, and `all_gather` with gates where there is a
    /// kernel with them. `t_gemm` is the rank's part of local attention
    /// over all rows, `t_seq` the fastest through NCCL.
    pub(super) fn cp_rows(&self) -> Result<Vec<Row>> {
        let size = self.team.size();
        let local: Vec<_> = self.attention_rows()?.iter().map(|r| r.t_ours_us).collect();
        let (mut rows, mut shared) = (Vec::new(), None);
        let h = Heads::of(self.o.backend);
        let trades = h.q.is_multiple_of(size) && h.kv.is_multiple_of(size);
        for strategy in [Strategy::Get, Strategy::Ring, Strategy::AllGather, Strategy::AllToAll] {
            if strategy == Strategy::AllToAll && !trades {
                continue;
            }
            let plain = CpConfig::of(strategy);
            let gated = CpConfig { gated: true, ..plain };
            // The host has one algorithm.
            let gates = strategy == Strategy::AllGather && self.o.backend != BackendKind::Host;
            let ways = [(plain, CollectiveBackend::Put), (plain, CollectiveBackend::Nccl)];
            for (config, by) in ways.into_iter().chain(gates.then_some((gated, ways[0].1))) {
                match self.cp_way(config, by, &mut shared) {
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
