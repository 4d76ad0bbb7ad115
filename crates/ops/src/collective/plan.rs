//! The plan of a collective: staging, signals, launch.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, Result};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::{Heap, LinkTraffic, LiveTeam, Traffic};

use super::device::{self, OnDevice, Prepared, Used};
use super::host::Run;
use super::launch::{Base, Before, Given, io_rows};
use super::schedule;
use super::way::Way;
use super::{CollectiveBackend, CollectiveDesc, CollectiveKind};
use crate::common::backend::{put_or_nccl, usual};
use crate::common::cuda::together_on;
use crate::common::lanes::Lane;
use crate::common::{PlanCore, Shards, expect_tensor, only_meets};

/// A collective with its staging area.
pub struct CollectivePlan {
    base: Base,
    /// On a heap in device memory, made by `prepare`.
    device: OnceLock<Prepared>,
    backend: CollectiveBackend,
    /// Decided by `prepare`, unless `backend` is puts.
    used: Used,
}

impl CollectivePlan {
    pub(crate) fn team(&self) -> &LiveTeam {
        self.base.core.team()
    }

    /// Returns the bytes of symmetric memory that a plan takes on each of `size` ranks.
    pub fn memory(desc: &CollectiveDesc, size: usize) -> usize {
        let (first, second) = staging_rows(desc, size);
        (first + second) * desc.cols * desc.dtype.size() + device::flag_bytes(desc, size)
    }

    /// Makes a plan on `heap`. It takes staging and signals; not collective, but all ranks must
    /// make the same plans in the same order.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad description, `Exhausted` if the heap is too small.
    pub fn new(desc: CollectiveDesc, heap: &Heap) -> Result<Self> {
        Self::with_backend(desc, heap, usual(heap))
    }

    /// Makes a plan as [`CollectivePlan::new`], with transport `backend` on CUDA devices: the host
    /// has puts only.
    ///
    /// # Errors
    /// As [`CollectivePlan::new`]; `Unsupported` for NCCL on a heap of the host.
    pub fn with_backend(
        desc: CollectiveDesc,
        heap: &Heap,
        backend: CollectiveBackend,
    ) -> Result<Self> {
        let name = desc.kind.name();
        Self::make(desc, heap, (backend, false), (name, ""))
    }

    /// Makes a plan as [`CollectivePlan::new`], in which copy engines move vectors of any size on
    /// CUDA devices, and take no multiprocessor from kernels beside them (a kernel still adds the
    /// terms of sums). Small vectors take longer that way. The host has one way only.
    ///
    /// # Errors
    /// As [`CollectivePlan::new`].
    pub fn by_copy_engines(desc: CollectiveDesc, heap: &Heap) -> Result<Self> {
        let name = desc.kind.name();
        Self::make(desc, heap, (CollectiveBackend::Put, true), (name, ""))
    }

    /// Makes a plan as [`CollectivePlan::new`] of puts, of which each launch is one of operation
    /// `op`, described by `text`, and begins with more work: see
    /// [`CollectivePlan::launch_behind`].
    pub(crate) fn behind(
        desc: CollectiveDesc,
        heap: &Heap,
        of: (&'static str, &str),
    ) -> Result<Self> {
        Self::make(desc, heap, (CollectiveBackend::Put, false), of)
    }

    fn make(
        desc: CollectiveDesc,
        heap: &Heap,
        (backend, engines): (CollectiveBackend, bool),
        (name, text): (&'static str, &str),
    ) -> Result<Self> {
        let size = heap.team().size();
        desc.check(size).map_err(|e| e.op(name))?;
        let row_bytes = desc.cols * desc.dtype.size();
        let (first, second) = staging_rows(&desc, size);
        let staging = heap.alloc(first * row_bytes, name)?;
        let two = matches!(desc.kind, CollectiveKind::AllReduce(_));
        let staging2 = if two { Some(heap.alloc(second * row_bytes, name)?) } else { None };
        let signals = Arc::new(heap.team().signals(2, name)?);
        let signals2 = if two { Some(Arc::new(heap.team().signals(2, name)?)) } else { None };
        let slot_rows = match &desc.kind {
            CollectiveKind::ReduceScatter(s, _) => s.max_rows(desc.m, size),
            _ => Shards::Even.max_rows(desc.m, size),
        };
        let how = if engines { " by copy engines" } else { "" };
        let core = PlanCore::new(name, heap, format_args!("{text}{desc} {backend}{how}"))?;
        let possible = |lane: &Lane| device::is_possible(&desc, lane, size);
        let flags = match core.lane().map(possible).transpose()? {
            Some(true) if !engines => {
                let len = device::flag_bytes(&desc, size);
                Some((heap.alloc(len, name)?, len))
            }
            _ => None,
        };
        let bufs = std::iter::once(&staging).chain(&staging2).chain(flags.as_ref().map(|f| &f.0));
        let slots = std::iter::once(&signals).chain(&signals2);
        let core = core.using(bufs, slots);
        put_or_nccl(heap, backend).map_err(|e| e.op(name))?;
        let num_sms = None;
        let base = Base {
            desc,
            core,
            staging,
            staging2,
            signals,
            signals2,
            slot_rows,
            flags,
            num_sms,
            engines,
        };
        Ok(Self { base, device: OnceLock::new(), backend, used: Used::default() })
    }

    /// Sets the most multiprocessors of a launch on GPUs, at least 1: 32 by default, 64 for sums of
    /// more than 32 MiB. It applies where one kernel carries out the launch
    /// ([`CollectivePlan::explain`] says so); copy engines take none. Fewer make a launch slower.
    /// Results do not depend on the number, and ranks need not agree on it. The kernel's blocks
    /// wait for other ranks, and a multiprocessor holds one of them, so plans that may wait for
    /// different ranks at once must fit on the device together.
    #[must_use]
    pub fn with_num_sms(mut self, num: usize) -> Self {
        self.base.num_sms = Some(u32::try_from(num.max(1)).unwrap_or(u32::MAX));
        self
    }

    /// Returns the description.
    pub fn desc(&self) -> &CollectiveDesc {
        &self.base.desc
    }

    /// Collective: must be called by all ranks before the first launch.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ; `Unavailable` if NCCL was asked for and a rank has
    /// none.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        self.prepare_after(stream, || Ok(()))
    }

    /// Prepares as [`CollectivePlan::prepare`], behind a step that each rank makes alone.
    pub(crate) fn prepare_after(
        &self,
        stream: &Stream,
        mine: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let make = |lane: &Lane| Prepared::new(&self.base, lane, stream);
        let mine = || mine().and_then(|()| self.base.core.make_once(&self.device, make));
        self.base.core.prepare_with(stream, mine, |new| {
            if let Some(new) = new {
                self.device.get_or_init(|| new);
            }
            match self.base.core.lane() {
                Some(lane) if self.backend != CollectiveBackend::Put => {
                    self.used.decide(&self.on(lane), stream, self.backend)
                }
                _ => Ok(()),
            }
        })
    }

    fn on<'a>(&'a self, lane: &'a Lane) -> OnDevice<'a> {
        OnDevice { base: &self.base, lane, prepared: &self.device }
    }

    /// Describes a launch as text.
    pub fn explain(&self) -> String {
        let size = self.base.core.team().size();
        let mut s = format!("{} {}\n", self.base.core.op(), self.base.desc);
        let _infallible = write!(
            s,
            "push, one copy stream, peers in rotated order; staging {} bytes on each of {size} ranks",
            Self::memory(&self.base.desc, size)
        );
        if self.base.core.lane().is_some() {
            let _infallible = write!(s, "\nall rows: {}", self.base.way(self.base.desc.m).words());
        }
        if let Some(used) = self.used.text() {
            let _infallible = write!(s, "\nused: {used}");
        }
        s
    }

    /// Returns the traffic of one launch with `m` rows from this rank to each peer.
    ///
    /// # Errors
    /// `InvalidArgument` if `m` does not fit the shards.
    pub fn predict(&self, m: usize) -> Result<Traffic> {
        let team = self.base.core.team();
        let (me, size) = (team.rank().idx(), team.size());
        if self.used.provider().is_some() {
            return Ok(only_meets(team));
        }
        let row_bytes = (self.base.desc.cols * self.base.desc.dtype.size()) as u64;
        let rows = schedule::shard_rows(&self.base.desc, m, size)?;
        let mut t = vec![LinkTraffic::default(); size];
        for (p, link) in t.iter_mut().enumerate().filter(|(p, _)| *p != me) {
            // Rows that go to `p`: written from the definitions, not from the schedule.
            let sent: Vec<usize> = match &self.base.desc.kind {
                CollectiveKind::AllGather(_) => vec![rows[me]],
                CollectiveKind::ReduceScatter(..) => vec![rows[p]],
                CollectiveKind::AllReduce(_) if self.base.way(m) == Way::Whole => vec![m],
                CollectiveKind::AllReduce(_) => vec![rows[p], rows[me]],
                CollectiveKind::AllToAll(splits) => vec![splits[me][p]],
            };
            link.puts = sent.iter().filter(|&&r| r > 0 && row_bytes > 0).count() as u64;
            link.put_bytes = sent.iter().sum::<usize>() as u64 * row_bytes;
            // A credit and an arrival for each phase; on devices one credit is for both phases.
            let one_credit = self.base.core.lane().is_some() && sent.len() == 2;
            link.signals = 2 * sent.len() as u64 - u64::from(one_credit);
        }
        Ok(t)
    }

    /// Fails where a launch with these arguments would.
    pub(crate) fn check(&self, m: usize, x: &Tensor, out: &Tensor) -> Result<()> {
        let name = self.base.core.op();
        let all_to_all = matches!(self.base.desc.kind, CollectiveKind::AllToAll(_));
        if m > self.base.desc.m && !all_to_all {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .op(name)
                .expected(format_args!("at most {}", self.base.desc.m))
                .seen(m));
        }
        let (first, _) = self.base.phases(m).map_err(|e| e.op(name))?;
        let (x_rows, out_rows) = io_rows(&self.base.desc.kind, &first, m);
        let check = |what, t: &Tensor, rows| {
            expect_tensor(what, t, self.base.desc.dtype, &[rows, self.base.desc.cols])
                .map_err(|e| e.op(name))
        };
        check("x", x, x_rows)?;
        check("out", out, out_rows)?;
        // Both are locked at once: disjoint parts of one buffer would not do either.
        if x.shares_memory(out) {
            return Err(Error::invalid("`out` must not share memory with `x`").op(name));
        }
        Ok(())
    }

    /// Returns whether a launch on `stream` would begin.
    pub(crate) fn check_launch(&self, stream: &Stream, (x, out): (&Tensor, &Tensor)) -> Result<()> {
        if self.base.core.lane().is_some() {
            let tensors = [("x", Some(x)), ("out", Some(out))];
            together_on(stream, &tensors).map_err(|e| e.op(self.base.core.op()))?;
        }
        self.base.core.check_launch(stream)
    }

    /// Queues the collective of `m` rows in all, at most the plan's. The kind gives the shapes.
    ///
    /// # Errors
    /// `NotPrepared`, `InvalidArgument` for tensors that do not fit, the fault of the team.
    pub fn launch(
        &self,
        stream: &Stream,
        m: usize,
        x: &Tensor,
        out: &Tensor,
    ) -> Result<Pending<Tensor>> {
        self.check(m, x, out)?;
        if let Some(lane) = self.base.core.lane() {
            let given = Given { stream, m, x, out, before: None };
            return device::launch(&self.on(lane), self.used.provider(), given);
        }
        let (first, second) = self.base.phases(m).map_err(|e| e.op(self.base.core.op()))?;
        let launch = self.base.core.begin(stream, format_args!("m={m}"))?;
        let seq = launch.ctx.seq();
        let run = Arc::new(Run {
            launch,
            desc: self.base.desc.clone(),
            first,
            second,
            staging: self.base.staging.clone(),
            staging2: self.base.staging2.clone(),
            signals: self.base.signals.clone(),
            signals2: self.base.signals2.clone(),
            x: x.clone(),
            out: out.clone(),
        });
        let (copies, compute, poison) = (run.clone(), run.clone(), out.clone());
        self.base.core.run(
            stream,
            move || copies.copies(),
            move || compute.compute(),
            move || drop(poison.poison()),
            seq,
        )?;
        Pending::new(out.clone(), stream, Some(self.base.core.team().fault().clone()))
    }

    /// Queues a launch as [`CollectivePlan::launch`] on a device, behind `before`, which makes `x`
    /// and is ordered like the launch itself.
    pub(crate) fn launch_behind(
        &self,
        (stream, m): (&Stream, usize),
        (x, out): (&Tensor, &Tensor),
        before: Before<'_>,
    ) -> Result<Pending<Tensor>> {
        self.check(m, x, out)?;
        let lane = self.base.core.lane();
        let lane = lane.ok_or_else(|| Error::internal("a launch of a device runs on the host"))?;
        let given = Given { stream, m, x, out, before: Some(before) };
        device::launch(&self.on(lane), self.used.provider(), given)
    }
}

/// Returns the rows of the two staging areas, which are equal on all ranks, as symmetric memory
/// must be.
fn staging_rows(desc: &CollectiveDesc, size: usize) -> (usize, usize) {
    match &desc.kind {
        CollectiveKind::AllGather(_) => (desc.m, 0),
        CollectiveKind::ReduceScatter(s, _) => (size * s.max_rows(desc.m, size), 0),
        CollectiveKind::AllReduce(_) => {
            let slot = Shards::Even.max_rows(desc.m, size).max(device::most_whole_rows(desc, size));
            (size * slot, desc.m)
        }
        CollectiveKind::AllToAll(splits) => {
            let most =
                (0..size).map(|d| splits.iter().map(|s| s.get(d).copied().unwrap_or(0)).sum());
            (most.max().unwrap_or(0), 0)
        }
    }
}
