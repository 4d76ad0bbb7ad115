//! `tilewire bench` of attention: forward and backward, on one rank and divided over several.
//!
//! Before anything is timed, both passes run with weights that are equal, whose results
//! `uniform.rs` knows in closed form: every element of the output, of lse and of the three
//! gradients is compared, at the size that is timed. What is timed has random data; all ways to
//! attend, and the transfers alone, are sampled in turn.

use std::ops::Range;
use std::rc::Rc;
use std::thread;

use tilewire::core::memory::error_of_panic;
use tilewire::ops::attention::{
    AttentionDesc, AttentionPlan, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};
use tilewire::ops::collective::{
    CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan,
};
use tilewire::ops::cp_attention::{
    CpAttentionDesc, CpAttentionPlan, CpConfig, Pass as Direction, Strategy,
};
use tilewire::prelude::*;

use super::device::{Bench, Heads};
use super::products::{Queued, tflops};
use super::uniform::{Judged, Of, Results, Uniform, Zero};
use crate::rows::{Row, Spreads, Time};

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

/// A plan of a way to attend.
enum Plan {
    Local(Box<AttentionPlan>),
    Divided(Box<CpAttentionPlan>),
}

impl Plan {
    fn fwd(&self, s: &Stream, p: &Pass) -> Result<()> {
        match self {
            Plan::Local(plan) => plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ()),
            Plan::Divided(plan) => plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ()),
        }
    }

    fn bwd(&self, s: &Stream, p: &Pass) -> Result<()> {
        let grads = p.grads.clone();
        match self {
            Plan::Local(plan) => plan.launch_bwd(s, &p.x, p.saved(), grads)?.join(s).map(|_| ()),
            Plan::Divided(plan) => plan.launch_bwd(s, &p.x, p.saved(), grads)?.join(s).map(|_| ()),
        }
    }

    /// The most bytes that a launch of this rank moves over one link, and none of a local one.
    fn bytes(&self, pass: Direction) -> Result<u64> {
        let Plan::Divided(plan) = self else { return Ok(0) };
        let links = plan.predict(None, pass)?;
        Ok(links.iter().map(|l| l.put_bytes + l.get_bytes).fold(0, u64::max))
    }
}

/// A way to attend, whose results were compared.
struct Way {
    name: String,
    plan: Plan,
    /// Floating-point operations of the forward pass.
    flop: f64,
    judged: [Judged; 2],
    /// The most bytes that a launch of each pass moves over one link, of all ranks.
    bytes: [u64; 2],
    shared: Rc<Shared>,
}

/// Times of the ways, in their order, and of the transfers of one pass alone.
struct Sampled {
    ways: Vec<Time>,
    /// By the bytes of a link.
    transfers: Vec<(u64, Time)>,
}

/// Both passes, with the floating-point operations of each in those of the forward one.
const PASSES: [(&str, Direction, f64); 2] =
    [("fwd", Direction::Forward, 1.0), ("bwd", Direction::Backward, 2.5)];

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
    fn compared(&self, known: &[(Uniform, Inputs)], plan: &Plan) -> Result<[Judged; 2]> {
        let mut all = [Judged::default(); 2];
        for (u, inputs) in known {
            let p = Pass::new(self, inputs)?;
            plan.fwd(&self.stream, &p)?;
            plan.bwd(&self.stream, &p)?;
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

    /// Times of both passes of all ways.
    fn sampled_in_turn(&self, ways: &[Way]) -> Result<[Sampled; 2]> {
        let noise = ways.iter().map(|way| Pass::new(self, &way.shared.noise));
        let noise = noise.collect::<Result<Vec<_>>>()?;
        let with: Vec<_> = ways.iter().zip(&noise).collect();
        // The backward pass reads what the forward pass of the same inputs has left.
        let of_pass = |at: usize| -> Result<Sampled> {
            let mut bytes: Vec<_> = ways.iter().map(|w| w.bytes[at]).filter(|b| *b > 0).collect();
            bytes.sort_unstable();
            bytes.dedup();
            let transfers = bytes.iter().map(|b| self.transfer(*b)).collect::<Result<Vec<_>>>()?;
            let launches: Vec<_> = (with.iter())
                .map(|(way, p)| {
                    || match PASSES[at].1 {
                        Direction::Forward => way.plan.fwd(&self.stream, p),
                        Direction::Backward => way.plan.bwd(&self.stream, p),
                    }
                })
                .collect();
            let transfers = transfers.iter().map(|t| t as &dyn Fn() -> Result<()>);
            let queued: Vec<_> = launches.iter().map(|l| l as _).chain(transfers).collect();
            let mut all = self.in_turn(&queued, || Ok(()))?;
            let transfers = bytes.into_iter().zip(all.split_off(ways.len())).collect();
            Ok(Sampled { ways: all, transfers })
        };
        Ok([of_pass(0)?, of_pass(1)?])
    }

    /// A transfer of so many bytes from each rank to each other one, and nothing else.
    fn transfer(&self, bytes: u64) -> Result<Queued<'_>> {
        const COLS: usize = 8;
        let rows = (bytes as usize).div_ceil(COLS * self.o.dtype.size());
        let (kind, m) = (CollectiveKind::AllGather(Shards::Even), rows * self.team.size());
        let desc = CollectiveDesc { kind, m, cols: COLS, dtype: self.o.dtype };
        let plan = CollectivePlan::new(desc, &self.heap)?;
        plan.prepare(&self.stream)?;
        let x = self.noise(rows, COLS)?;
        let out = self.poisoned(self.o.dtype, Shape::d2(m, COLS))?;
        Ok(Box::new(move || plan.launch(&self.stream, m, &x, &out)?.join(&self.stream).map(|_| ())))
    }

    /// Rows of both passes of each way, in the order of `ways`.
    fn rows_of(&self, ways: &[Way], times: &[Sampled; 2]) -> Result<Vec<Row>> {
        let h = Heads::of(self.o.backend);
        let packed = match self.o.documents {
            1 => String::new(),
            num => format!(" documents={num}"),
        };
        let shape = format!("m={} heads={}/{} d={}{packed}", self.sizes().0, h.q, h.kv, h.width);
        let mut rows = Vec::new();
        for (i, way) in ways.iter().enumerate() {
            for (at, (pass, _, flops)) in PASSES.into_iter().enumerate() {
                let (sampled, bytes, j) = (&times[at], way.bytes[at], way.judged[at]);
                let t = *sampled.ways.get(i).ok_or_else(|| Error::internal("a way has no time"))?;
                let name = format!("{}/{pass}", way.name);
                let rate = tflops(flops * way.flop, t.us);
                let r = self.row(&name, shape.clone(), t, j.wrong, rate)?;
                let comm = sampled.transfers.iter().find(|(b, _)| *b == bytes).map(|(_, t)| *t);
                let spread_us = Spreads { comm: comm.map(|t| t.spread), ..r.spread_us };
                let max_err = r.max_err.map(|_| j.worst);
                rows.push(Row { max_err, t_comm_us: comm.map(|t| t.us), spread_us, ..r });
            }
        }
        Ok(rows)
    }

    /// Two products of 2 m^2 d for each document of m rows, half of them visible.
    fn attention_flop(&self) -> f64 {
        let (m, h) = (self.sizes().0, Heads::of(self.o.backend));
        2.0 * (m * m / self.o.documents) as f64 * (h.width * h.q) as f64
    }

    /// All rows on every GPU.
    fn local_way(&self) -> Result<Way> {
        let plan = AttentionPlan::new(self.attention_desc(), None)?;
        plan.prepare(&self.stream)?;
        let all = std::iter::once(0..self.sizes().0).collect();
        let shared = Rc::new(self.shared(all)?);
        let (plan, flop) = (Plan::Local(Box::new(plan)), self.attention_flop());
        let judged = self.compared(&shared.known, &plan)?;
        Ok(Way { name: "attention".to_owned(), plan, flop, judged, bytes: [0; 2], shared })
    }

    /// Both passes over all rows, on every GPU.
    pub(super) fn attention_rows(&self) -> Result<Vec<Row>> {
        let ways = [self.local_way()?];
        self.rows_of(&ways, &self.sampled_in_turn(&ways)?)
    }

    /// Inputs are made where `ways` has none for the rows of this plan.
    fn cp_way(&self, config: CpConfig, backend: CollectiveBackend, ways: &[Way]) -> Result<Way> {
        let desc = CpAttentionDesc::new(self.attention_desc());
        let plan = CpAttentionPlan::with_backend(desc, &self.heap, Some(config), backend)?;
        plan.prepare(&self.stream)?;
        let by = if backend == CollectiveBackend::Nccl { "nccl" } else { "put" };
        let way = if config.gated { "gated" } else { config.strategy.name() };
        let name = format!("cp_attention/{way}/{by}");
        let flop = self.attention_flop() / self.team.size() as f64;
        let spans = plan.rows_q(None);
        let shared = match ways.iter().find(|w| w.shared.spans == spans) {
            Some(way) => way.shared.clone(),
            None => Rc::new(self.shared(spans)?),
        };
        let plan = Plan::Divided(Box::new(plan));
        let judged = self.compared(&shared.known, &plan)?;
        let mut bytes = [0; 2];
        for (most, (_, pass, _)) in bytes.iter_mut().zip(PASSES) {
            // All ranks time the same transfers.
            *most = self.worst(plan.bytes(pass)? as f64)? as u64;
        }
        Ok(Way { name, plan, flop, judged, bytes, shared })
    }

    /// Each strategy by puts and gets and by NCCL, and `all_gather` with gates where there is a
    /// kernel with them. `t_gemm` is the rank's part of local attention over all rows, `t_comm` an
    /// all-gather of as many bytes of each rank as the way takes from a peer, `t_seq` the fastest
    /// through NCCL. All of them are sampled in turn.
    pub(super) fn cp_rows(&self) -> Result<Vec<Row>> {
        let size = self.team.size();
        let mut ways = vec![self.local_way()?];
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
            let by = [(plain, CollectiveBackend::Put), (plain, CollectiveBackend::Nccl)];
            for (config, backend) in by.into_iter().chain(gates.then_some((gated, by[0].1))) {
                match self.cp_way(config, backend, &ways) {
                    Err(e) if e.is_unavailable() || e.is_unsupported() => {}
                    way => ways.push(way?),
                }
            }
        }
        let mut rows = self.rows_of(&ways, &self.sampled_in_turn(&ways)?)?;
        drop(ways);
        self.heap.collect()?;
        let local: Vec<_> = rows.drain(..PASSES.len()).collect();
        let of = |pass: &str| {
            let by_nccl = rows.iter().filter(|r| r.op.ends_with(&format!("nccl/{pass}")));
            by_nccl.filter_map(|r| r.t_ours_us).min_by(f64::total_cmp)
        };
        let best = PASSES.map(|(pass, ..)| of(pass));
        let part = |us: Option<f64>| us.map(|us| us / size as f64);
        let with = |r: Row| {
            let i = PASSES.iter().position(|(pass, ..)| r.op.ends_with(pass)).unwrap_or(0);
            let (whole, t_seq_us) = (&local[i], best[i]);
            let spread_us = Spreads { gemm: part(whole.spread_us.ours), ..r.spread_us };
            Row { t_gemm_us: part(whole.t_ours_us), t_seq_us, spread_us, ..r }
        };
        Ok(rows.into_iter().map(with).collect())
    }
}
