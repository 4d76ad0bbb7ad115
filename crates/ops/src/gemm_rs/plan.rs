//! The plan of GEMM+RS.

use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, Result};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::{Heap, LinkTraffic, Signals, SymBuf, Traffic};

use super::GemmRsDesc;
use super::copies::num_signals;
use super::device::{self, Prepared};
use super::host::Run;
use super::launch::{GemmRsInputs, slot_rows};
use super::schedule::schedule;
use crate::common::lanes::Lane;
use crate::common::{
    Algo, Choice, Explain, Handoff, Machine, OverlapConfig, PlanCore, Via, only_meets,
};

/// GEMM+RS with its slots.
pub struct GemmRsPlan {
    desc: GemmRsDesc,
    core: PlanCore,
    slots: SymBuf,
    signals: Arc<Signals>,
    choice: Choice,
    /// The most bytes of one product of all rows, in f32.
    most_whole: usize,
    machine: Machine,
    /// On a heap in device memory, made by `prepare`.
    device: OnceLock<Prepared>,
}

impl GemmRsPlan {
    /// Bytes of symmetric memory that a plan takes on each of `size` ranks.
    pub fn memory(desc: &GemmRsDesc, size: usize) -> usize {
        size * slot_rows(desc, size) * desc.n * desc.wire.size()
    }

    /// A plan on `heap`; `config` of `None` leaves the choice to `prepare`: what is predicted to be
    /// fastest for the slowest rank.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported`, `Unavailable` for the description or the algorithm;
    /// `Exhausted` if the heap is too small.
    pub fn new(desc: GemmRsDesc, heap: &Heap, config: Option<OverlapConfig>) -> Result<Self> {
        Self::with_whole(desc, heap, config, device::MOST_WHOLE_BYTES)
    }

    /// Makes a plan as [`GemmRsPlan::new`], for tests: on a device `sequential` by puts is one
    /// product of all rows up to so many bytes of them in f32.
    ///
    /// # Errors
    /// As [`GemmRsPlan::new`].
    #[doc(hidden)]
    pub fn with_whole(
        desc: GemmRsDesc,
        heap: &Heap,
        config: Option<OverlapConfig>,
        most_whole: usize,
    ) -> Result<Self> {
        let size = heap.team().size();
        desc.check(size).map_err(|e| e.op("gemm_rs"))?;
        let choice = Choice::new(config, heap).map_err(|e| e.op("gemm_rs"))?;
        let slots = heap.alloc(Self::memory(&desc, size), "gemm_rs")?;
        let signals =
            Arc::new(heap.team().signals(num_signals(choice.max_chunks(), 1), "gemm_rs")?);
        let core =
            PlanCore::new("gemm_rs", heap, format_args!("{} {}", desc.common(), choice.text()))?
                .using([&slots], [&signals])
                .lanes_in_turn();
        let (machine, device) = (Machine::of(&heap.device(), desc.x)?, OnceLock::new());
        Ok(Self { desc, core, slots, signals, choice, most_whole, machine, device })
    }

    /// Collective: must be called by all ranks before the first launch.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let how = (&self.choice, self.most_whole);
        let make = |lane: &Lane| Prepared::new(lane, &self.desc, self.core.team().size(), how);
        let team = self.core.team();
        self.core.prepare_made(stream, (&self.device, make), || {
            self.core
                .choose(&self.choice, || explain(&self.desc, team.size(), 1.0, &self.machine))?;
            let Some(p) = self.device.get() else { return Ok(()) };
            p.agree(team)?;
            match self.config()?.via {
                Via::Nccl => p.connect(&self.core, stream, &self.desc, false),
                Via::Puts => Ok(()),
            }
        })
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
        let mut e = explain(&self.desc, self.core.team().size(), 1.0, &self.machine);
        e.chosen = self.choice.get().unwrap_or(e.chosen);
        if let Some(p) = self.device.get() {
            e.what = format!("{}\n{}", e.what, p.explain(&e.chosen));
        }
        e
    }

    /// Returns what one launch with `m` rows moves from this rank to each peer.
    ///
    /// # Errors
    /// `InvalidArgument` if `m` does not fit the shards; `NotPrepared`.
    pub fn predict(&self, m: usize) -> Result<Traffic> {
        predict(&self.desc, self.core.team(), m, &self.choice.get()?)
    }

    /// Queues the operation for `m` rows in all (at most the plan's).
    ///
    /// # Errors
    /// `NotPrepared`, `InvalidArgument` for tensors that do not fit, the fault of the team.
    pub fn launch(&self, stream: &Stream, m: usize, t: GemmRsInputs) -> Result<Pending<Tensor>> {
        let team = self.core.team();
        let (me, size) = (team.rank(), team.size());
        if m > self.desc.m {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .op("gemm_rs")
                .expected(format_args!("at most {}", self.desc.m))
                .seen(m));
        }
        let rows = self.desc.shards.rows(m, size).map_err(|e| e.op("gemm_rs"))?;
        t.check(&self.desc, m, rows[me.idx()]).map_err(|e| e.op("gemm_rs"))?;
        let config = self.choice.get().map_err(|e| e.op("gemm_rs"))?;
        if let Some(lane) = self.core.lane() {
            let tasks = schedule(me, &rows, self.desc.n, &config);
            let job = device::Job {
                desc: &self.desc,
                prepared: self.device.get(),
                slots: &self.slots,
                signals: &self.signals,
                shape: device::Shape { m, rows: &rows, tasks: &tasks, config },
                gather: None,
            };
            let launch = || device::launch(&self.core, lane, stream, &job, t);
            return stream.in_launch(launch).map_err(|e| e.op("gemm_rs"));
        }
        let launch = self.core.begin(stream, format_args!("m={m}"))?;
        let (seq, out) = (launch.ctx.seq(), t.out.clone());
        let run = Arc::new(Run {
            launch,
            tasks: schedule(me, &rows, self.desc.n, &config),
            handoff: (config.algo != Algo::Fused && size > 1).then(Handoff::new),
            sequential: config.algo == Algo::Sequential,
            desc: self.desc.clone(),
            chunks: config.sub_chunks,
            slot_rows: slot_rows(&self.desc, size),
            rows,
            slots: self.slots.clone(),
            signals: self.signals.clone(),
            gather: None,
            t,
        });
        let (copies, compute, poison) = (run.clone(), run.clone(), out.clone());
        self.core.run(
            stream,
            move || copies.push_all(),
            move || compute.compute(|_, _, _| Ok(())).map(drop),
            move || drop(poison.poison()),
            seq,
        )?;
        Pending::new(out, stream, Some(team.fault().clone()))
    }
}

/// `wire_factor`: 1 for the scatter alone, 2 with the gather of an all-reduce. `Sequential` counts
/// as one product; where it is one for each owner, its rows are so many that weights do not count.
pub(crate) fn explain(d: &GemmRsDesc, size: usize, wire_factor: f64, machine: &Machine) -> Explain {
    let wire = wire_factor * (d.m * d.n * d.wire.size() * (size - 1)) as f64 / size as f64;
    let product = ([d.m, d.n, d.k], d.n * d.k * d.w.size());
    Explain::predict(d.to_string(), product, wire, size, machine)
}

/// Puts, bytes and signals of the scatter, from its definition.
pub(crate) fn predict(
    d: &GemmRsDesc,
    team: &tilewire_core::Team,
    m: usize,
    cfg: &OverlapConfig,
) -> Result<Traffic> {
    let (me, size) = (team.rank().idx(), team.size());
    let rows = d.shards.rows(m, size)?;
    if cfg.via == Via::Nccl {
        return Ok(only_meets(team));
    }
    let s = cfg.sub_chunks;
    let mut t = vec![LinkTraffic::default(); size];
    for (p, link) in t.iter_mut().enumerate().filter(|(p, _)| *p != me) {
        let (whole, longer) = (rows[p] / s, rows[p] % s);
        let row_tiles = |r: usize| r.div_ceil(cfg.block_m);
        let per_column = longer * row_tiles(whole + 1) + (s - longer) * row_tiles(whole);
        link.puts = (per_column * d.n.div_ceil(cfg.block_n)) as u64;
        link.put_bytes = (rows[p] * d.n * d.wire.size()) as u64;
        link.signals = 1 + s as u64;
    }
    Ok(t)
}
