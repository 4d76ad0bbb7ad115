//! The plan of GEMM+AR.

use std::sync::{Arc, OnceLock};

use tilewire_core::{DType, Error, Result};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::{Heap, Signals, SymBuf, Traffic};

use super::GemmArDesc;
use super::host::Run;
use super::schedule::arrivals;
use crate::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use crate::common::backend::is_on_device;
use crate::common::lanes::{Lane, Lanes};
use crate::common::{Algo, Choice, Explain, Handoff, Machine, OverlapConfig, PlanCore, Via, ring};
use crate::gemm_rs::copies::num_signals;
use crate::gemm_rs::device::{self, Prepared};
use crate::gemm_rs::host::Run as Scatter;
use crate::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan, schedule};

/// The most bytes of all rows, in the type of the wire, of which `sequential` by puts is one
/// product and one collective: its kernels take less time than copy engines with a flag behind each
/// of their copies. It needs as much memory three times.
const MOST_SUM_BYTES: usize = 16 << 20;

/// GEMM+AR with its slots and the buffer that reduced rows return to.
pub struct GemmArPlan {
    desc: GemmArDesc,
    core: PlanCore,
    slots: SymBuf,
    gather: SymBuf,
    signals: Arc<Signals>,
    choice: Choice,
    /// The most bytes of one product of all rows, in f32.
    most_whole: usize,
    /// On a device, the sum of few rows where `sequential` by puts may be chosen.
    sum: Option<Box<CollectivePlan>>,
    machine: Machine,
    /// On a heap in device memory, made by `prepare`.
    device: OnceLock<Prepared>,
}

impl GemmArPlan {
    /// Returns the most bytes of symmetric memory that a plan takes on each of `size` ranks, on any
    /// device and by any algorithm.
    pub fn memory(desc: &GemmArDesc, size: usize) -> usize {
        let sum = sum_of(&desc.0, size).map_or(0, |sum| CollectivePlan::memory(&sum, size));
        Self::host_memory(desc, size) + sum
    }

    /// Returns the bytes of symmetric memory that a plan takes on each of `size` ranks on the host.
    pub fn host_memory(desc: &GemmArDesc, size: usize) -> usize {
        GemmRsPlan::memory(&desc.0, size) + desc.0.m * desc.0.n * desc.0.out.size()
    }

    /// A plan on `heap`; `config` of `None` leaves the choice to `prepare`: what is predicted to be
    /// fastest for the slowest rank.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported`, `Unavailable` for the description or the algorithm;
    /// `Exhausted` if the heap is too small.
    pub fn new(desc: GemmArDesc, heap: &Heap, config: Option<OverlapConfig>) -> Result<Self> {
        Self::with_whole(desc, heap, config, device::MOST_WHOLE_BYTES)
    }

    /// Makes a plan as [`GemmArPlan::new`], for tests: on a device `sequential` by puts is one
    /// product of all rows up to so many bytes of them in f32, by one collective or not.
    ///
    /// # Errors
    /// As [`GemmArPlan::new`].
    #[doc(hidden)]
    pub fn with_whole(
        desc: GemmArDesc,
        heap: &Heap,
        config: Option<OverlapConfig>,
        most_whole: usize,
    ) -> Result<Self> {
        let size = heap.team().size();
        desc.check(size).map_err(|e| e.op("gemm_ar"))?;
        let choice = Choice::new(config, heap).map_err(|e| e.op("gemm_ar"))?;
        let d = &desc.0;
        let slots = heap.alloc(GemmRsPlan::memory(d, size), "gemm_ar slots")?;
        let gather = heap.alloc(d.m * d.n * d.out.size(), "gemm_ar gather")?;
        let num = num_signals(choice.max_chunks(), 2);
        let signals = Arc::new(heap.team().signals(num, "gemm_ar")?);
        let text = format!("{} {} {}", d.common(), d.out, choice.text());
        let core = PlanCore::new("gemm_ar", heap, &text)?
            .using([&slots, &gather], [&signals])
            .lanes_in_turn();
        let (machine, device) = (Machine::of(&heap.device(), desc.0.x)?, OnceLock::new());
        let may_sum = is_on_device(heap) && heap.reaches_peers() && choice.may_be(device::is_whole);
        let few = desc.0.m * desc.0.n * DType::F32.size() <= most_whole;
        let sum = sum_of(&desc.0, size).filter(|_| may_sum && few);
        let sum = sum
            .map(|sum| CollectivePlan::behind(sum, heap, ("gemm_ar", &text)).map(Box::new))
            .transpose()?;
        Ok(Self { desc, core, slots, gather, signals, choice, most_whole, sum, machine, device })
    }

    /// Collective: must be called by all ranks before the first launch.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let most_whole = if self.sum.is_some() { 0 } else { self.most_whole };
        let how = (&self.choice, most_whole);
        let make = |lane: &Lane| Prepared::new(lane, &self.desc.0, self.core.team().size(), how);
        self.core.prepare_made(stream, (&self.device, make), || {
            self.core.choose(&self.choice, || self.candidates())?;
            let Some(p) = self.device.get() else { return Ok(()) };
            p.agree(self.core.team())?;
            match self.config()?.via {
                Via::Nccl => p.connect(&self.core, stream, &self.desc.0, true),
                Via::Puts => self.sum().map_or(Ok(()), |sum| sum.prepare(stream)),
            }
        })
    }

    /// The collective that launches are made of, behind one product.
    fn sum(&self) -> Option<&CollectivePlan> {
        self.sum.as_deref().filter(|_| self.choice.get().is_ok_and(|c| device::is_whole(&c)))
    }

    fn candidates(&self) -> Explain {
        crate::gemm_rs::explain(&self.desc.0, self.core.team().size(), 2.0, &self.machine)
    }

    /// The configuration in use.
    ///
    /// # Errors
    /// `NotPrepared` if the choice was left to `prepare`.
    pub fn config(&self) -> Result<OverlapConfig> {
        self.choice.get()
    }

    /// Candidates with their predicted times; on a device, once prepared, what makes the products.
    pub fn explain(&self) -> Explain {
        let mut e = self.candidates();
        e.chosen = self.choice.get().unwrap_or(e.chosen);
        if let Some(p) = self.device.get() {
            let how = match self.sum() {
                Some(sum) => format!(
                    "{}\none product of all rows, and its sum: {}",
                    p.explain_product(),
                    sum.explain()
                ),
                None => p.explain(&e.chosen),
            };
            e.what = format!("{}\n{how}", e.what);
        }
        e
    }

    /// Returns what one launch with `m` rows moves from this rank to each peer.
    ///
    /// # Errors
    /// `InvalidArgument` if `m` does not fit the shards; `NotPrepared`.
    pub fn predict(&self, m: usize) -> Result<Traffic> {
        let (d, team, cfg) = (&self.desc.0, self.core.team(), self.choice.get()?);
        if let Some(sum) = self.sum() {
            d.shards.rows(m, team.size())?;
            return sum.predict(m);
        }
        let mut t = crate::gemm_rs::predict(d, team, m, &cfg)?;
        if cfg.via == Via::Nccl {
            return Ok(t);
        }
        let rows = d.shards.rows(m, team.size())?;
        let mine = rows[team.rank().idx()];
        let next = ring::neighbours(team.rank(), team.size()).1;
        for (p, link) in t.iter_mut().enumerate().filter(|(p, _)| *p != team.rank().idx()) {
            if cfg.algo == Algo::Ring {
                if p == next.idx() {
                    let all = ring::sent(team.rank(), &rows, d.n * d.out.size(), cfg.sub_chunks);
                    link.puts += all.puts;
                    link.put_bytes += all.put_bytes;
                    link.signals += all.signals;
                }
                continue;
            }
            link.puts += if d.n == 0 { 0 } else { mine.min(cfg.sub_chunks) as u64 };
            link.put_bytes += (mine * d.n * d.out.size()) as u64;
            link.signals += cfg.sub_chunks as u64;
        }
        Ok(t)
    }

    /// Queues the operation for `m` rows (at most the plan's); `out` is `[m, n]`.
    ///
    /// All ranks get the same bits. An owner adds its own rows in f32, but for the few rows that
    /// devices sum by one collective: all terms of these are of the wire's type.
    ///
    /// # Errors
    /// `NotPrepared`, `InvalidArgument` for tensors that do not fit, the fault of the team.
    pub fn launch(&self, stream: &Stream, m: usize, t: GemmRsInputs) -> Result<Pending<Tensor>> {
        let (team, d) = (self.core.team(), &self.desc.0);
        let (me, size) = (team.rank(), team.size());
        if m > d.m {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .op("gemm_ar")
                .expected(format_args!("at most {}", d.m))
                .seen(m));
        }
        let rows = d.shards.rows(m, size).map_err(|e| e.op("gemm_ar"))?;
        t.check(d, m, m).map_err(|e| e.op("gemm_ar"))?;
        let config = self.choice.get().map_err(|e| e.op("gemm_ar"))?;
        if let Some(lane) = self.core.lane() {
            let tasks = schedule(me, &rows, d.n, &config);
            let arrivals = arrivals(me, &rows, &config);
            let job = device::Job {
                desc: d,
                prepared: self.device.get(),
                slots: &self.slots,
                signals: &self.signals,
                shape: device::Shape { m, rows: &rows, tasks: &tasks, config },
                gather: Some((&self.gather, &arrivals)),
            };
            let launch = || match self.sum() {
                Some(sum) => {
                    let p = device::ready(stream, &job, &t)?;
                    let multiply = |l: &Lanes<'_>| job.multiply(l, p, &t);
                    sum.launch_behind((stream, m), (&job.terms(p)?, &t.out), &multiply)
                }
                None => device::launch(&self.core, lane, stream, &job, t),
            };
            return stream.in_launch(launch).map_err(|e| e.op("gemm_ar"));
        }
        let launch = self.core.begin(stream, format_args!("m={m}"))?;
        let (seq, out) = (launch.ctx.seq(), t.out.clone());
        let arrivals = arrivals(me, &rows, &config);
        let run = Arc::new(Run {
            scatter: Scatter {
                launch,
                tasks: schedule(me, &rows, d.n, &config),
                handoff: (config.algo != Algo::Fused && size > 1).then(Handoff::new),
                sequential: config.algo == Algo::Sequential,
                chunks: config.sub_chunks,
                desc: d.clone(),
                slot_rows: crate::gemm_rs::slot_rows(d, size),
                rows,
                slots: self.slots.clone(),
                signals: self.signals.clone(),
                gather: Some((self.gather.clone(), config.algo == Algo::Ring)),
                t,
            },
            arrivals,
        });
        let (copies, compute, poison) = (run.clone(), run.clone(), out.clone());
        self.core.run(
            stream,
            move || copies.scatter.push_all(),
            move || compute.compute(),
            move || drop(poison.poison()),
            seq,
        )?;
        Pending::new(out, stream, Some(team.fault().clone()))
    }
}

/// The sum of the products over the ranks, where they are few and need nothing else.
fn sum_of(d: &GemmRsDesc, size: usize) -> Option<CollectiveDesc> {
    let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
    let sum = CollectiveDesc { kind, m: d.m, cols: d.n, dtype: d.wire };
    let few = d.m * d.n * d.wire.size() <= MOST_SUM_BYTES;
    (few && size > 1 && d.wire == d.out && !d.bias).then_some(sum)
}
