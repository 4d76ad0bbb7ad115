//! `prepare` of an expert-parallel layer: what its rows go through, by the clock if the caller has left it open.

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_symm::{NcclTeam, OpCtx};

use super::areas::Areas;
use super::cuda::{Phase, Prepared};
use super::host::Back;
use super::plan::{COMBINE, DISPATCH, EpPlan, PREPARE};
use super::{EpDispatch, EpHandle};
use crate::common::CollectiveBackend;
use crate::common::backend::at_first;
use crate::common::lanes::Lane;
use crate::common::nccl::{Clock, faster, open, room, unmeasured};

/// What a prepared plan goes through, and why if it was free to choose.
pub(super) struct Used {
    by: Prepared,
    why: Option<String>,
}

impl Used {
    /// More lines of what the plan does.
    pub fn explain(&self) -> String {
        let by = self.by.explain().map_or(String::new(), |n| {
            format!("\nby {n}, max_tokens records between each two ranks")
        });
        by + &self.why.as_ref().map_or(String::new(), |why| format!("\nused: {why}"))
    }
}

impl EpPlan {
    /// Collective: must be called by all ranks before anything else.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' layers differ; `Unavailable` if NCCL was asked for and a rank has none.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let (core, rest) = self.cores.split_first().ok_or_else(not_prepared)?;
        let by_nccl = at_first(core.heap(), self.backend) == CollectiveBackend::Nccl;
        let make = |lane: &Lane| self.make(lane, stream, by_nccl);
        let make = || {
            self.clear_on_host();
            core.make_once(&self.cuda, make)
        };
        core.prepare_with(stream, make, |first| {
            self.cleared.get_or_init(|| ());
            rest.iter().try_for_each(|c| c.prepare(stream))?;
            if let (Some(lane), Some(first)) = (core.lane(), first) {
                let used = self.settle((lane, stream), first)?;
                self.cuda.get_or_init(|| used);
            }
            Ok(())
        })
    }

    /// No launch has written a word yet, whatever the memory was used for before. Peers launch
    /// once all ranks have come this far.
    fn clear_on_host(&self) {
        let core = &self.cores[0];
        if core.lane().is_some() || self.cleared.get().is_some() {
            return;
        }
        let ctx = OpCtx::new(core.heap(), core.op(), 0);
        for (b, at, len) in self.areas().words(&self.desc) {
            // SAFETY: the ranks meet in `prepare` before any of them launches.
            unsafe { ctx.clear_local(b.range(at, len), len) };
        }
    }

    fn make(&self, lane: &Lane, stream: &Stream, by_nccl: bool) -> Result<Prepared> {
        Prepared::new(lane, stream, (&self.desc, by_nccl), &self.areas())
    }

    fn areas(&self) -> Areas<'_> {
        Areas {
            counts: &self.counts,
            tokens: &self.tokens,
            returns: &self.returns,
            flags: &self.flags,
        }
    }

    /// Collective, behind the agreement: connects, and chooses if there is a choice.
    fn settle(&self, at: (&Lane, &Stream), first: Prepared) -> Result<Used> {
        let (core, d) = (&self.cores[0], &self.desc);
        first.connect(core, at.1, d)?;
        let open_choice = self.backend == CollectiveBackend::Fastest
            && first.explain().is_none()
            && core.team().size() > 1;
        if !open_choice {
            return Ok(Used { by: first, why: None });
        }
        match open(core.heap(), self.backend)? {
            Ok(nccl) => self.measure(at, first, &nccl),
            Err(why) => Ok(Used { by: first, why: Some(why) }),
        }
    }

    /// Collective: the faster of both ways.
    fn measure(&self, at: (&Lane, &Stream), puts: Prepared, nccl: &NcclTeam) -> Result<Used> {
        let both = || Ok((Scratch::new(self, at.0)?, self.make(at.0, at.1, true)?));
        let team = self.cores[0].team();
        match room(team, both())? {
            // Only this rank knows that something failed here, and the others are about to meet it.
            Ok(with) => self.run_both(at, puts, with, nccl).map_err(|e| team.fail(e)),
            Err(e) => Ok(Used { by: puts, why: Some(unmeasured(&e)) }),
        }
    }

    fn run_both(
        &self,
        at: (&Lane, &Stream),
        puts: Prepared,
        (scratch, other): (Scratch, Prepared),
        nccl: &NcclTeam,
    ) -> Result<Used> {
        let ((lane, stream), core) = (at, &self.cores[0]);
        other.connect(core, stream, &self.desc)?;
        let by_nccl = scratch.time(self, &other, at)?;
        // Each way counts its launches from one on, and words in the areas have the number of their launch: those that
        // came by NCCL must be gone, on all ranks, before one of the same number is waited for.
        self.areas().clear(lane, stream.cuda()?, &self.desc)?;
        core.team().exchange("ep areas", &[])?;
        let by_puts = scratch.time(self, &puts, at)?;
        // The other way round nothing is cleared: NCCL brings all words anew, and has its own flags.
        let (is_nccl, why) = faster(core.team(), nccl, (by_nccl, by_puts))?;
        Ok(Used { by: if is_nccl { other } else { puts }, why: Some(why) })
    }

    /// What rows of a launch on a device go through.
    ///
    /// # Errors
    /// `NotPrepared` if `prepare` is to decide.
    pub(super) fn way(&self) -> Result<CollectiveBackend> {
        match (self.backend, self.cuda.get()) {
            (CollectiveBackend::Fastest, None) => Err(not_prepared().op("ep")),
            (CollectiveBackend::Fastest, Some(used)) => Ok(match used.by.explain() {
                Some(_) => CollectiveBackend::Nccl,
                None => CollectiveBackend::Put,
            }),
            (told, _) => Ok(told),
        }
    }

    /// One launch on a heap in device memory; `None` on the host.
    pub(super) fn phase<'a>(
        &'a self,
        which: usize,
        handle: &'a EpHandle,
    ) -> Result<Option<Phase<'a>>> {
        let core = &self.cores[which];
        let Some(lane) = core.lane() else { return Ok(None) };
        let used = self.cuda.get().ok_or_else(|| not_prepared().op(core.op()))?;
        Ok(Some(self.phase_by(&used.by, lane, which, handle)))
    }

    fn phase_by<'a>(
        &'a self,
        p: &'a Prepared,
        lane: &'a Lane,
        which: usize,
        handle: &'a EpHandle,
    ) -> Phase<'a> {
        let (core, desc, signals) = (&self.cores[which], &self.desc, &*self.signals);
        let sms = handle.num_sms(self.num_sms);
        let sms = u32::try_from(sms).unwrap_or(u32::MAX).min(p.num_sms);
        Phase { core, lane, desc, signals, p, handle, sms }
    }
}

fn not_prepared() -> Error {
    Error::new(ErrorKind::NotPrepared, "the plan is not prepared")
        .hint("call `plan.prepare(&stream)` on all ranks first")
}

/// A microbatch of the most tokens, whose choices are spread over all experts.
struct Scratch {
    handle: EpHandle,
    idx: Tensor,
    x: Tensor,
    weights: Tensor,
    scales: Option<Tensor>,
    recv: EpDispatch,
    back: Back,
    clock: Clock,
}

impl Scratch {
    fn new(plan: &EpPlan, lane: &Lane) -> Result<Self> {
        let (d, ctx, me) = (&plan.desc, lane.context(), plan.cores[0].team().rank().idx());
        let device = plan.cores[0].heap().device();
        let rows = |t, rows, cols| Tensor::zeros_on(&device, t, Shape::d2(rows, cols));
        let scales =
            |num| (d.num_scales > 0).then(|| rows(DType::F32, num, d.num_scales)).transpose();
        let choices = d.max_tokens * d.top_k;
        let experts: Vec<i64> = (0..choices).map(|i| ((i + me) % d.num_experts()) as i64).collect();
        let recv = EpDispatch {
            x: rows(d.dtype, d.recv_rows(), d.hidden)?,
            scales: scales(d.recv_rows())?,
            weights: Some(Tensor::zeros_on(&device, DType::F32, Shape::d1(d.capacity))?),
        };
        let back = Back {
            y: rows(d.out, d.capacity, d.hidden)?,
            weights: recv.weights.clone(),
            expert_major: true,
            dw: None,
            out: rows(d.out, d.max_tokens, d.hidden)?,
            dw_out: None,
        };
        Ok(Self {
            handle: plan.handle()?,
            idx: Tensor::from_slice(&experts, Shape::d2(d.max_tokens, d.top_k))?.to(&device)?,
            x: rows(d.dtype, d.max_tokens, d.hidden)?,
            weights: rows(DType::F32, d.max_tokens, d.top_k)?,
            scales: scales(d.max_tokens)?,
            recv,
            back,
            clock: Clock::new(ctx)?,
        })
    }

    /// Collective: microseconds of routing, dispatch and combine on this rank.
    fn time(&self, plan: &EpPlan, p: &Prepared, (lane, stream): (&Lane, &Stream)) -> Result<f64> {
        let (d, h) = (&plan.desc, &self.handle);
        let begin = |which: usize| plan.cores[which].begin_on(stream, "measured");
        h.set_tokens(d.max_tokens, d.capacity);
        self.clock.time(plan.cores[0].team(), stream, || {
            let seq = begin(PREPARE)?;
            h.set_routing(seq);
            let phase = |which| plan.phase_by(p, lane, which, h);
            phase(PREPARE).route((stream, seq), &self.idx, d.capacity)?;
            let given = (Some(&self.weights), self.scales.as_ref());
            let seq = begin(DISPATCH)?;
            phase(DISPATCH).dispatch((stream, seq), &self.x, given, (&self.recv, 0))?;
            let seq = begin(COMBINE)?;
            phase(COMBINE).back((stream, seq), &self.back)
        })
    }
}
