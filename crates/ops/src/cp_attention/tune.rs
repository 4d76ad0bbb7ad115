//! The choice between puts and NCCL for the rows of a context-parallel attention on devices,
//! measured if the caller leaves it open.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_symm::NcclTeam;

use super::config::CpConfig;
use super::desc::CpAttentionDesc;
use super::device::{Prepared, check_nccl};
use super::launch::Work;
use super::schedule::num_rows;
use crate::attention::{AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows};
use crate::common::lanes::Lane;
use crate::common::nccl::{Clock, alloc_for_tuning, faster, no_nccl, open, unmeasured};
use crate::common::{CollectiveBackend, PlanCore};

/// The transport that a prepared plan uses, and the reason if it was free to choose.
pub(super) struct Used {
    pub by: Prepared,
    why: Option<String>,
}

impl Used {
    /// Returns more lines for the plan's `explain`.
    pub fn explain(&self) -> String {
        let by = self.by.explain().map_or(String::new(), |n| format!("\nby {n}"));
        by + &self.why.as_ref().map_or(String::new(), |why| format!("\nused: {why}"))
    }
}

/// Queues a launch of the description's sequences.
type Queue<'a> = dyn Fn(&Prepared, (&AttnInputs, LocalRows), &Work) -> Result<()> + 'a;

/// A plan that is being prepared, as the choice sees it.
pub(super) struct Tuner<'a> {
    pub desc: &'a CpAttentionDesc,
    pub core: &'a PlanCore,
    pub backend: CollectiveBackend,
    /// True if the caller asked for gates.
    pub asked: bool,
    pub at: (&'a Lane, &'a Stream),
    pub launch: &'a Queue<'a>,
}

impl Tuner<'_> {
    /// Makes kernels and workspace for NCCL, by which all keys come before the arithmetic.
    fn by_nccl(&self, config: CpConfig) -> Result<Prepared> {
        let config = CpConfig { gated: false, ..config };
        Prepared::new(self.at.0, self.desc, (config, true), self.core.team().size())
    }

    /// Collective, behind the agreement: connects, and chooses the transport if the caller left it
    /// open.
    pub fn settle(&self, first: Prepared) -> Result<Used> {
        let core = self.core;
        first.connect(core, self.at.1)?;
        let open_choice = self.backend == CollectiveBackend::Fastest
            && !first.by_nccl()
            && !self.asked
            && core.team().size() > 1;
        if !open_choice {
            return Ok(Used { by: first, why: None });
        }
        // Equal on all ranks, which agree on the description.
        if let Err(e) = check_nccl(self.desc, Some(first.sizes.strategy)) {
            return Ok(Used { by: first, why: Some(no_nccl(&e)) });
        }
        match open(core.heap(), self.backend)? {
            Ok(nccl) => self.measure(first, &nccl),
            Err(why) => Ok(Used { by: first, why: Some(why) }),
        }
    }

    /// Collective: returns the faster of both transports.
    fn measure(&self, puts: Prepared, nccl: &NcclTeam) -> Result<Used> {
        let both = || Ok((Scratch::new(self)?, self.by_nccl(puts.config)?));
        let team = self.core.team();
        match alloc_for_tuning(team, both())? {
            // Only this rank knows of a failure here, and its peers are about to meet it: it must
            // fail the team.
            Ok(with) => self.run_both(puts, with, nccl).map_err(|e| team.fail(e)),
            Err(e) => Ok(Used { by: puts, why: Some(unmeasured(&e)) }),
        }
    }

    fn run_both(
        &self,
        puts: Prepared,
        (scratch, other): (Scratch, Prepared),
        nccl: &NcclTeam,
    ) -> Result<Used> {
        other.connect(self.core, self.at.1)?;
        let by_nccl = scratch.time(self, &other)?;
        let by_puts = scratch.time(self, &puts)?;
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
    /// Makes the tensors of a plan that NCCL carries out: none of them has scales.
    fn new(t: &Tuner<'_>) -> Result<Self> {
        let (d, team) = (&t.desc.attn, t.core.team());
        let (seqs, me, size) = (&d.sequences, team.rank(), team.size());
        let rows = LocalRows {
            q: num_rows(&t.desc.rows_q(seqs, me, size)),
            kv: num_rows(&t.desc.rows_kv(seqs, me, size)),
        };
        let device = t.core.heap().device();
        let zeros = |t, rows, cols| Tensor::zeros_on(&device, t, Shape::d2(rows, cols));
        let (q, kv) = ((rows.q, d.heads_q), (rows.kv, d.heads_kv));
        let of = |t, (rows, heads): (usize, usize), dim: usize| zeros(t, rows, heads * dim);
        let bias = d.bias.map(|b| zeros(DType::F32, b.heads * b.sq, b.skv)).transpose()?;
        let sink = d.sink.then(|| zeros(DType::F32, 1, d.heads_q)).transpose()?;
        let of_input = |rows, dim| of(d.dtype, rows, dim);
        let x = AttnInputs::new(of_input(q, d.dqk)?, of_input(kv, d.dqk)?, of_input(kv, d.dv)?);
        let out = of(d.out, q, d.dv)?;
        let lse = zeros(DType::F32, d.heads_q, rows.q)?;
        let backward = || -> Result<Work> {
            let d_out = of(d.out, q, d.dv)?;
            let saved = AttnSaved { out: out.clone(), lse: lse.clone(), d_out };
            let dq = of(d.out, q, d.dqk)?;
            let grads = AttnGrads::new(dq, of(d.out, kv, d.dqk)?, of(d.out, kv, d.dv)?);
            Ok(Work::Backward(Box::new((saved, grads))))
        };
        let backward = t.desc.backward.then(backward).transpose()?;
        let forward = Work::Forward(AttnOut { out, lse });
        let clock = Clock::new(t.at.0.context())?;
        Ok(Self { x: AttnInputs { bias, sink, ..x }, rows, forward, backward, clock })
    }

    /// Collective: measures the passes, in microseconds on this rank.
    fn time(&self, t: &Tuner<'_>, p: &Prepared) -> Result<f64> {
        self.clock.time(t.core.team(), t.at.1, || {
            let passes = [Some(&self.forward), self.backward.as_ref()];
            let queue = |work| (t.launch)(p, (&self.x, self.rows), work);
            passes.into_iter().flatten().try_for_each(queue)
        })
    }
}
