//! What the rows of a context-parallel attention go through on devices, by the clock if the caller has left it open.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_symm::NcclTeam;

use super::config::Strategy;
use super::cuda::Prepared;
use super::plan::{CpAttentionPlan, Work};
use crate::attention::{AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows};
use crate::collective::CollectiveBackend;
use crate::common::lanes::Lane;
use crate::common::nccl::{Clock, faster, no_nccl, open, room, unmeasured};

/// What a prepared plan goes through, and why if it was free to choose.
pub(super) struct Used {
    pub by: Prepared,
    why: Option<String>,
}

impl Used {
    /// More lines of what the plan does.
    pub fn explain(&self) -> String {
        let by = self.by.explain().map_or(String::new(), |n| format!("\nby {n}"));
        by + &self.why.as_ref().map_or(String::new(), |why| format!("\nused: {why}"))
    }
}

impl CpAttentionPlan {
    /// Kernels and workspace of one way.
    pub(super) fn make(&self, lane: &Lane, strategy: Strategy, by_nccl: bool) -> Result<Prepared> {
        Prepared::new(lane, &self.desc, (strategy, by_nccl), self.core.team().size())
    }

    /// Collective, behind the agreement: connects, and chooses if there is a choice.
    pub(super) fn settle(&self, at: (&Lane, &Stream), first: Prepared) -> Result<Used> {
        let core = &self.core;
        first.connect(core, at.1)?;
        let open_choice = self.backend == CollectiveBackend::Fastest
            && first.nccl.is_none()
            && core.team().size() > 1;
        if !open_choice {
            return Ok(Used { by: first, why: None });
        }
        // The same on all ranks, who agree on the description.
        if let Err(e) = super::nccl::check(&self.desc, Some(first.sizes.strategy)) {
            return Ok(Used { by: first, why: Some(no_nccl(&e)) });
        }
        match open(core.heap(), self.backend)? {
            Ok(nccl) => self.measure(at, first, &nccl),
            Err(why) => Ok(Used { by: first, why: Some(why) }),
        }
    }

    /// Collective: the faster of both ways.
    fn measure(&self, at: (&Lane, &Stream), puts: Prepared, nccl: &NcclTeam) -> Result<Used> {
        let both = || Ok((Scratch::new(self, at.0)?, self.make(at.0, puts.sizes.strategy, true)?));
        let team = self.core.team();
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
        other.connect(&self.core, at.1)?;
        let by_nccl = scratch.time(self, &other, at)?;
        let by_puts = scratch.time(self, &puts, at)?;
        let (is_nccl, why) = faster(self.core.team(), nccl, (by_nccl, by_puts))?;
        Ok(Used { by: if is_nccl { other } else { puts }, why: Some(why) })
    }
}

/// Tensors of the description's sequences.
struct Scratch {
    x: AttnInputs,
    rows: LocalRows,
    forward: Work,
    backward: Option<Work>,
    clock: Clock,
}

impl Scratch {
    /// Of what NCCL carries: nothing has scales.
    fn new(plan: &CpAttentionPlan, lane: &Lane) -> Result<Self> {
        let (d, rows) = (&plan.desc.attn, plan.local_rows(&plan.desc.attn.sequences));
        let device = plan.core.heap().device();
        let zeros = |t, rows, cols| Tensor::zeros_on(&device, t, Shape::d2(rows, cols));
        let (q, kv) = ((rows.q, d.heads_q), (rows.kv, d.heads_kv));
        let of = |t, (rows, heads): (usize, usize), dim: usize| zeros(t, rows, heads * dim);
        let bias = d.bias.map(|b| zeros(DType::F32, b.heads * b.sq, b.skv)).transpose()?;
        let sink = d.sink.then(|| zeros(DType::F32, 1, d.heads_q)).transpose()?;
        let t = d.dtype;
        let x = AttnInputs::new(of(t, q, d.dqk)?, of(t, kv, d.dqk)?, of(t, kv, d.dv)?);
        let out = of(d.out, q, d.dv)?;
        let lse = zeros(DType::F32, d.heads_q, rows.q)?;
        let backward = || -> Result<Work> {
            let d_out = of(d.out, q, d.dv)?;
            let saved = AttnSaved { out: out.clone(), lse: lse.clone(), d_out };
            let dq = of(d.out, q, d.dqk)?;
            let grads = AttnGrads::new(dq, of(d.out, kv, d.dqk)?, of(d.out, kv, d.dv)?);
            Ok(Work::Backward(Box::new((saved, grads))))
        };
        let backward = plan.desc.backward.then(backward).transpose()?;
        let forward = Work::Forward(AttnOut { out, lse });
        let clock = Clock::new(lane.context())?;
        Ok(Self { x: AttnInputs { bias, sink, ..x }, rows, forward, backward, clock })
    }

    /// Collective: microseconds of the passes on this rank.
    fn time(
        &self,
        plan: &CpAttentionPlan,
        p: &Prepared,
        (lane, stream): (&Lane, &Stream),
    ) -> Result<f64> {
        let x = (&self.x, &plan.desc.attn.sequences, self.rows);
        self.clock.time(plan.core.team(), stream, || {
            let passes = [Some(&self.forward), self.backward.as_ref()];
            let queue = |work| plan.launch_by((p, lane), stream, x, work).map(drop);
            passes.into_iter().flatten().try_for_each(queue)
        })
    }
}
