//! The plan of a context-parallel attention: buffers, signals, choice, launch.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::{Node, Pending, Stream};
use tilewire_symm::{Heap, Signals, SymBuf, Traffic};

use super::config::{CpConfig, KeyOrder, Strategy, no_offsets};
use super::desc::CpAttentionDesc;
use super::device::{self, Prepared};
use super::explain::{CpExplain, buffer_bytes, explain};
use super::host::HostRun;
use super::launch::{NUM_SLOTS, Pass, Work};
use super::pieces::{Pieces, Sizes};
use super::schedule::{Schedule, cuts_tiles, num_rows};
use super::schedules::{Made, Schedules};
use super::tune::{Tuner, Used};
use crate::attention::{
    AttnGrads, AttnInputs, AttnOffsets, AttnOut, AttnSaved, LocalRows, Refused, Sequences,
    read_status,
};
use crate::common::CollectiveBackend;
use crate::common::backend::{at_first, is_on_device, put_or_nccl, usual};
use crate::common::lanes::Lane;
use crate::common::{Handoff, LaunchAt, Machine, PlanCore, fastest, only_meets};

const OP: &str = "cp_attention";

/// Rows of a tile in the canonical order: those of `tilewire_kernels::attention::hopper_gates`.
const WHOLE: usize = tilewire_kernels::attention::hopper_gates::WHOLE;

fn not_prepared() -> Error {
    Error::new(ErrorKind::NotPrepared, "the plan is not prepared")
        .op(OP)
        .hint("call `plan.prepare(&stream)` on all ranks first")
}

/// Returns the sequences of a launch as ranks compare them.
fn said(x: &AttnInputs, seqs: &Sequences) -> String {
    x.offsets.as_ref().map_or_else(|| seqs.to_string(), |o| format!("{seqs} by {o}"))
}

/// Context-parallel attention with its buffers.
pub struct CpAttentionPlan {
    desc: CpAttentionDesc,
    core: PlanCore,
    /// Scatter, area, dkv, gather: large enough for every strategy if the choice is open.
    buffers: [SymBuf; 4],
    signals: Arc<Signals>,
    used: OnceLock<CpConfig>,
    /// True if gates were a candidate, as all ranks agreed.
    gates: OnceLock<bool>,
    /// On a heap in device memory, made by `prepare`.
    cuda: OnceLock<Used>,
    backend: CollectiveBackend,
    schedules: Schedules,
    /// That of launches by offsets.
    of_any: OnceLock<Arc<Made>>,
    /// On the host: why a launch by offsets was refused.
    refused: Refused,
}

impl CpAttentionPlan {
    /// Returns the bytes of symmetric memory that a plan takes on each of `size` ranks; with
    /// `config` of `None` enough for any strategy that the heads allow.
    pub fn memory(desc: &CpAttentionDesc, size: usize, config: Option<CpConfig>) -> usize {
        buffer_bytes(desc, size, config).iter().sum()
    }

    /// Makes a plan on `heap`; `config` of `None` leaves the choice to `prepare`: the fastest for
    /// the slowest rank.
    ///
    /// # Errors
    /// `InvalidArgument` for the description, heads that the strategy cannot scatter, or gates of
    /// another strategy than `all_gather`; `Exhausted` if the heap is too small; `Unsupported` on a
    /// heap in device memory for heads above 128 that would be quantised.
    pub fn new(desc: CpAttentionDesc, heap: &Heap, config: Option<CpConfig>) -> Result<Self> {
        Self::with_backend(desc, heap, config, usual(heap))
    }

    /// Makes a plan as [`CpAttentionPlan::new`], with transport `backend` on CUDA devices. By NCCL
    /// all keys arrive before the arithmetic begins, by sends and receives; `all_gather` uses
    /// NCCL's collective where every rank needs the keys of all. Partial dk and dv are added in
    /// rank order as without NCCL.
    ///
    /// With `fastest`, `prepare` runs the plan's passes by puts and by NCCL, on zeros with the
    /// description's sequences, and takes the one that is faster for the slowest rank. Meanwhile it
    /// takes the memory of both, and that of the tensors. It uses puts on the host, where NCCL is
    /// not there, and for plans that NCCL cannot carry out. Bits of results may then differ from
    /// run to run: by puts without gates the results over own keys and over the other keys that are
    /// needed are merged, by NCCL there is one part, and no gates.
    ///
    /// # Errors
    /// As [`CpAttentionPlan::new`]; `Unsupported` for NCCL on a heap of the host or for a plan that
    /// it cannot carry out, one with gates among them, and for puts between GPUs that do not reach
    /// each other.
    pub fn with_backend(
        desc: CpAttentionDesc,
        heap: &Heap,
        config: Option<CpConfig>,
        backend: CollectiveBackend,
    ) -> Result<Self> {
        let size = heap.team().size();
        desc.check(size).map_err(|e| e.op(OP))?;
        put_or_nccl(heap, backend).map_err(|e| e.op(OP))?;
        if is_on_device(heap) {
            device::check(&desc).map_err(|e| e.op(OP))?;
        }
        if at_first(heap, backend) == CollectiveBackend::Nccl {
            let strategy = config.map(|c| c.strategy);
            device::check_nccl(&desc, strategy).map_err(|e| e.op(OP))?;
            if config.is_some_and(|c| c.gated) {
                let by = "gates are of keys that are put, and NCCL puts none";
                return Err(Error::new(ErrorKind::Unsupported, by).op(OP));
            }
        }
        let used = OnceLock::new();
        if let Some(c) = config {
            c.check(&desc, size).map_err(|e| e.op(OP))?;
            if c.order == KeyOrder::Canonical && !is_on_device(heap) {
                let text = "the host takes a rank's own keys first, in no canonical order";
                return Err(Error::new(ErrorKind::Unsupported, text).op(OP));
            }
            used.get_or_init(|| c);
        }
        let [a, b, c, d] = buffer_bytes(&desc, size, config);
        let take = |len| heap.alloc(len, OP);
        let buffers = [take(a)?, take(b)?, take(c)?, take(d)?];
        let signals = Arc::new(heap.team().signals(NUM_SLOTS, OP)?);
        let choice = config.map_or("auto".to_owned(), |c| c.to_string());
        let core = PlanCore::new(OP, heap, format_args!("{choice} {desc} {backend}"))?
            .using(&buffers, [&signals]);
        let (gates, cuda, schedules, of_any, refused) = Default::default();
        Ok(Self {
            desc,
            core,
            buffers,
            signals,
            used,
            gates,
            cuda,
            backend,
            schedules,
            of_any,
            refused,
        })
    }

    /// Returns the description.
    pub fn desc(&self) -> &CpAttentionDesc {
        &self.desc
    }

    /// Collective: must be called by all ranks before the first launch. On a heap in device memory
    /// it also loads kernels and takes workspace.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ; on devices `Unavailable` without a compiler and
    /// `Unsupported` for head dimensions above 256 and where no kernel has the gates that were
    /// asked for; `Unavailable` if NCCL was asked for and a rank has none.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        self.core.prepare_with(
            stream,
            || self.make_first(self.used.get()),
            |first| {
                let (mut config, first) = match self.used.get() {
                    Some(given) => (*given, first),
                    None => self.choose()?,
                };
                if let (Some(lane), Some(first)) = (self.core.lane(), first) {
                    let used = self.settle((lane, stream), first)?;
                    config = used.by.config;
                    self.cuda.get_or_init(|| used);
                }
                self.used.get_or_init(|| config);
                Ok(())
            },
        )
    }

    /// Collective: chooses the strategy, and makes its kernels and workspace.
    fn choose(&self) -> Result<(CpConfig, Option<Prepared>)> {
        let team = self.core.team();
        // A candidate of all ranks or of none.
        let gates = team.agree(self.may_gate()).map_err(|e| e.op(OP))?;
        self.gates.get_or_init(|| gates);
        let list = self.candidates(gates).candidates;
        let costs: Vec<_> = list.iter().map(|c| (c.config, c.predicted_us)).collect();
        let chosen = fastest(team, &costs).map_err(|e| e.op(OP))?;
        let first = team.settle(OP, self.make_first(Some(&chosen)))?;
        Ok((chosen, first))
    }

    /// Returns whether `prepare` may choose tiles that wait for their keys, as far as this rank
    /// knows. A driver that cannot say so now says why when kernels are made.
    fn may_gate(&self) -> bool {
        let (heap, team) = (self.core.heap(), self.core.team());
        let puts = at_first(heap, self.backend) == CollectiveBackend::Put;
        let lane = self.core.lane().filter(|_| puts);
        let ranks = (team.size(), team.world_size());
        lane.is_some_and(|l| device::may_gate(l, &self.desc, ranks).unwrap_or(false))
    }

    /// Returns the candidates that this heap has.
    fn candidates(&self, gates: bool) -> CpExplain {
        let (heap, size) = (self.core.heap(), self.core.team().size());
        let rates = Machine::of(&heap.device(), self.desc.attn.widened()).unwrap_or_default();
        let mut e = explain(&self.desc, size, &rates, gates);
        if self.core.lane().is_some() {
            e.candidates.retain(|c| device::may_choose(c.config.strategy));
            e.chosen = e.candidates.first().map_or(e.chosen, |c| c.config);
        }
        e
    }

    /// Makes kernels and workspace on a device, once, for the transport that a plan has before it
    /// measures.
    fn make_first(&self, config: Option<&CpConfig>) -> Result<Option<Prepared>> {
        let (Some(lane), Some(c), None) = (self.core.lane(), config, self.cuda.get()) else {
            return Ok(None);
        };
        let by_nccl = at_first(self.core.heap(), self.backend) == CollectiveBackend::Nccl;
        let size = self.core.team().size();
        let made = Prepared::new(lane, &self.desc, (*c, by_nccl), size);
        made.map(Some).map_err(|e| e.op(OP))
    }

    /// Collective: settles the transport of the plan on devices.
    fn settle(&self, at: (&Lane, &Stream), first: Prepared) -> Result<Used> {
        let launch = |p: &Prepared, (x, rows): (&AttnInputs, LocalRows), work: &Work| {
            let seqs = &self.desc.attn.sequences;
            self.launch_by((p, at.0), at.1, (x, seqs, rows), work).map(drop)
        };
        let (desc, core, backend) = (&self.desc, &self.core, self.backend);
        let asked = self.used.get().is_some_and(|c| c.gated);
        Tuner { desc, core, backend, asked, at, launch: &launch }.settle(first)
    }

    /// Returns the configuration in use.
    ///
    /// # Errors
    /// `NotPrepared` if the choice was left to `prepare`.
    pub fn config(&self) -> Result<CpConfig> {
        self.used.get().copied().ok_or_else(not_prepared)
    }

    /// Returns candidates with their predicted times.
    pub fn explain(&self) -> CpExplain {
        let used = self.used.get();
        let gates = self.gates.get().copied().unwrap_or_else(|| self.may_gate());
        let mut e = self.candidates(gates);
        e.chosen = used.copied().unwrap_or(e.chosen);
        e.what += &self.cuda.get().map_or(String::new(), Used::explain);
        e
    }

    /// Returns the global rows of q (and out) of this rank, in the order of its tensors.
    /// `sequences` of `None` means the description's.
    pub fn rows_q(&self, sequences: Option<&Sequences>) -> Vec<Range<usize>> {
        let (s, team) = (sequences.unwrap_or(&self.desc.attn.sequences), self.core.team());
        self.desc.rows_q(s, team.rank(), team.size())
    }

    /// Returns the global rows of k and v of this rank, in the order of its tensors.
    pub fn rows_kv(&self, sequences: Option<&Sequences>) -> Vec<Range<usize>> {
        let (s, team) = (sequences.unwrap_or(&self.desc.attn.sequences), self.core.team());
        self.desc.rows_kv(s, team.rank(), team.size())
    }

    /// Returns the traffic of one launch from this rank to each peer.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequences do not fit the plan; `NotPrepared`.
    pub fn predict(&self, sequences: Option<&Sequences>, pass: Pass) -> Result<Traffic> {
        let s = sequences.unwrap_or(&self.desc.attn.sequences);
        let team = self.core.team();
        let fits = self.desc.check_launch(s, team.size()).and_then(|()| self.check_tiles(s));
        fits.map_err(|e| e.op(OP))?;
        let (strategy, me, size) = (self.config()?.strategy, team.rank(), team.size());
        let by_nccl = self.cuda.get().is_some_and(|used| used.by.by_nccl());
        if by_nccl || self.backend == CollectiveBackend::Nccl {
            return Ok(only_meets(team));
        }
        let sched = Schedule::in_tiles(&self.desc, s, strategy, (me, size), self.tile());
        let sizes = Sizes::new(&self.desc, strategy, size);
        Ok(Pieces { sizes: &sizes, sched: &sched, me }.traffic(pass))
    }

    /// Returns the traffic of one launch by offsets from this rank to each peer: of all rows,
    /// whatever the offsets are.
    ///
    /// # Errors
    /// As [`CpAttentionPlan::takes_offsets`].
    pub fn predict_by_offsets(&self, pass: Pass) -> Result<Traffic> {
        self.takes_offsets()?;
        let (strategy, team) = (self.config()?.strategy, self.core.team());
        let sizes = Sizes::new(&self.desc, strategy, team.size());
        let (sched, me) = (&*self.of_any(strategy), team.rank());
        Ok(Pieces { sizes: &sizes, sched, me }.traffic(pass))
    }

    /// Queues the forward pass on this rank's rows.
    ///
    /// # Errors
    /// `NotPrepared`, `InvalidArgument` for tensors that do not fit, on devices also for those of
    /// 16 bits that kernels use in place and that do not begin at multiples of 16 bytes;
    /// `Unsupported` for offsets that the plan does not take; the fault of the team.
    pub fn launch_fwd(
        &self,
        stream: &Stream,
        inputs: &AttnInputs,
        out: AttnOut,
    ) -> Result<Pending<AttnOut>> {
        let (seqs, rows) = self.check_inputs(inputs).map_err(|e| e.op(OP))?;
        out.check(&self.desc.attn, rows, inputs).map_err(|e| e.op(OP))?;
        stream.in_launch(|| {
            let seq = self.launch(stream, (inputs, seqs, rows), Work::Forward(out.clone()))?;
            self.core.pending(out, LaunchAt { stream, seq })
        })
    }

    /// Queues the backward pass on this rank's rows.
    ///
    /// # Errors
    /// As [`CpAttentionPlan::launch_fwd`]; `InvalidArgument` for a plan without backward.
    pub fn launch_bwd(
        &self,
        stream: &Stream,
        inputs: &AttnInputs,
        saved: AttnSaved,
        grads: AttnGrads,
    ) -> Result<Pending<AttnGrads>> {
        if !self.desc.backward {
            return Err(Error::invalid("the plan was made without backward").op(OP));
        }
        let (seqs, rows) = self.check_inputs(inputs).map_err(|e| e.op(OP))?;
        grads.check(&self.desc.attn, rows, inputs, &saved).map_err(|e| e.op(OP))?;
        let work = Work::Backward(Box::new((saved, grads.clone())));
        stream.in_launch(|| {
            let seq = self.launch(stream, (inputs, seqs, rows), work)?;
            self.core.pending(grads, LaunchAt { stream, seq })
        })
    }

    fn local_rows(&self, s: &Sequences) -> LocalRows {
        LocalRows { q: num_rows(&self.rows_q(Some(s))), kv: num_rows(&self.rows_kv(Some(s))) }
    }

    /// Returns the rows of a sequence at whose multiples spans of keys may begin.
    fn tile(&self) -> usize {
        let canonical = self.used.get().is_some_and(|c| c.order == KeyOrder::Canonical);
        if canonical { WHOLE } else { 1 }
    }

    /// Checks, alike on all ranks, that tiles are whole where their order is canonical.
    fn check_tiles(&self, s: &Sequences) -> Result<()> {
        if self.config()?.order != KeyOrder::Canonical {
            return Ok(());
        }
        match cuts_tiles(&self.desc, s, self.core.team().size(), WHOLE) {
            Some(why) => {
                Err(Error::invalid(format!("the canonical order needs whole tiles: {why}"))
                    .hint("pad sequences, so that every chunk begins at a multiple of 128 rows"))
            }
            None => Ok(()),
        }
    }

    /// Returns the sequences of a launch and my rows.
    fn check_inputs(&self, x: &AttnInputs) -> Result<(Sequences, LocalRows)> {
        if let Some(o) = &x.offsets {
            return self.check_offsets(o, x);
        }
        let s = x.sequences.clone().unwrap_or_else(|| self.desc.attn.sequences.clone());
        self.desc.check_launch(&s, self.core.team().size())?;
        let rows = match self.schedules.rows(&s) {
            Some(rows) => rows,
            None => {
                self.check_tiles(&s)?;
                self.local_rows(&s)
            }
        };
        x.check(&self.desc.attn, rows)?;
        Ok((s, rows))
    }

    /// Checks that launches may bring the offsets of their sequences in tensors
    /// ([`AttnInputs::offsets`]).
    ///
    /// # Errors
    /// `NotPrepared`; `Unsupported`, with the reason: keys have to travel by puts of `all_gather`,
    /// in the order of arrival, to at most 32 ranks whose rows do not depend on the sequences
    /// (`zigzag` or `contiguous`).
    pub fn takes_offsets(&self) -> Result<()> {
        let (config, size) = (self.config()?, self.core.team().size());
        config.takes_offsets(&self.desc, size).map_err(|e| e.op(OP))?;
        let by_nccl = at_first(self.core.heap(), self.backend) == CollectiveBackend::Nccl
            || self.cuda.get().is_some_and(|used| used.by.by_nccl());
        if by_nccl { Err(no_offsets("keys travel through NCCL").op(OP)) } else { Ok(()) }
    }

    /// Returns no sequences, with the rows of all ranks, and my rows, for a launch that reads its
    /// sequences.
    fn check_offsets(&self, o: &AttnOffsets, x: &AttnInputs) -> Result<(Sequences, LocalRows)> {
        if x.sequences.is_some() {
            return Err(Error::invalid("a launch has sequences or offsets, not both"));
        }
        o.check(&self.desc.attn)?;
        self.takes_offsets()?;
        let all = &self.desc.attn.sequences;
        let s = Sequences { q: Vec::new(), kv: Vec::new(), ..all.clone() };
        let rows = self.of_any(self.config()?.strategy).rows;
        x.check(&self.desc.attn, rows)?;
        Ok((s, rows))
    }

    /// Returns the schedule of launches by offsets.
    fn of_any(&self, strategy: Strategy) -> Arc<Made> {
        let at = (self.core.team().rank(), self.core.team().size());
        let made = || Arc::new(Made::of_any(&self.desc, strategy, at));
        self.of_any.get_or_init(made).clone()
    }

    /// Returns the schedule of a launch.
    fn schedule(
        &self,
        strategy: Strategy,
        (x, seqs, rows): (&AttnInputs, &Sequences, LocalRows),
    ) -> Arc<Made> {
        let at = (self.core.team().rank(), self.core.team().size());
        match x.offsets {
            Some(_) => self.of_any(strategy),
            None => self.schedules.get((&self.desc, strategy, self.tile()), (seqs, rows), at),
        }
    }

    /// Raises what launches by offsets have found in these; call after waiting for them.
    ///
    /// # Errors
    /// `InvalidArgument` if offsets of a launch could not be used since
    /// [`CpAttentionPlan::reset`]; its results are NaN.
    pub fn check(&self) -> Result<()> {
        let checked = match self.cuda.get() {
            Some(used) => read_status(used.by.status()),
            None => self.refused.check(),
        };
        checked.map_err(|e| e.op(OP))
    }

    /// Forgets what [`CpAttentionPlan::check`] would raise, in stream order.
    ///
    /// # Errors
    /// As [`Stream::launch`].
    pub fn reset(&self, stream: &Stream) -> Result<()> {
        if let Some(used) = self.cuda.get() {
            return device::reset(stream.cuda()?, used.by.status());
        }
        let refused = self.refused.clone();
        stream.launch(Node::new(OP, move || {
            refused.forget();
            Ok(())
        }))
    }

    /// Queues a launch; returns its number.
    fn launch(
        &self,
        stream: &Stream,
        (x, seqs, rows): (&AttnInputs, Sequences, LocalRows),
        work: Work,
    ) -> Result<u64> {
        let (config, team) = (self.config()?, self.core.team());
        if let Some(lane) = self.core.lane() {
            let used = self.cuda.get().ok_or_else(not_prepared)?;
            return self.launch_by((&used.by, lane), stream, (x, &seqs, rows), &work);
        }
        let size = team.size();
        let launch = self.core.begin(stream, format_args!("{} {}", work.name(), said(x, &seqs)))?;
        let seq = launch.ctx.seq();
        let run = Arc::new(HostRun {
            launch,
            sched: self.schedule(config.strategy, (x, &seqs, rows)),
            sizes: Sizes::new(&self.desc, config.strategy, size),
            desc: self.desc.clone(),
            tiles: config.tiles,
            seqs,
            rows,
            buffers: self.buffers.clone(),
            signals: self.signals.clone(),
            x: x.clone(),
            work,
            refused: self.refused.clone(),
            to_copies: Handoff::new(),
            to_compute: Handoff::new(),
        });
        let (copies, compute, poison) = (run.clone(), run.clone(), run);
        self.core.run(
            stream,
            move || copies.copies(),
            move || compute.compute(),
            move || poison.work.poison(),
            seq,
        )?;
        Ok(seq)
    }

    /// Queues a launch on a device; returns its number.
    fn launch_by(
        &self,
        (p, lane): (&Prepared, &Lane),
        stream: &Stream,
        (x, seqs, rows): (&AttnInputs, &Sequences, LocalRows),
        work: &Work,
    ) -> Result<u64> {
        let (core, desc, signals) = (&self.core, &self.desc, &*self.signals);
        device::together(stream, x, work).map_err(|e| e.op(OP))?;
        device::check_aligned(p, x, work).map_err(|e| e.op(OP))?;
        let sched = &*self.schedule(p.sizes.strategy, (x, seqs, rows));
        let at = core.begin_on(stream, format_args!("{} {}", work.name(), said(x, seqs)))?;
        let buffers = &self.buffers;
        let op = device::Op { core, lane, desc, signals, buffers, p, sched, seqs, rows };
        device::launch(&op, at, x, work).map(|()| at.seq)
    }
}
