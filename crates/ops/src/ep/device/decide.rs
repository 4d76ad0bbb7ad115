//! The choice between puts and NCCL for a plan's rows, measured if the caller leaves it open.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_symm::NcclTeam;

use super::queue::{Phase, Prepared};
use crate::common::CollectiveBackend;
use crate::common::lanes::Lane;
use crate::common::nccl::{Clock, alloc_for_tuning, faster, open, unmeasured};
use crate::ep::launch::{Base, COMBINE, DISPATCH, Push, ROUTE, Return};
use crate::ep::{EpDispatch, EpHandle};

/// The transport that a prepared plan uses, and the reason if it was free to choose.
pub(crate) struct Used {
    pub by: Prepared,
    why: Option<String>,
}

impl Used {
    /// Returns more lines for the plan's `explain`.
    pub fn explain(&self) -> String {
        let by = self.by.explain().map_or(String::new(), |n| {
            format!("\nby {n}, max_tokens records between each two ranks")
        });
        by + &self.why.as_ref().map_or(String::new(), |why| format!("\nused: {why}"))
    }
}

/// The plan that `prepare` decides for, and the lane and stream on which its kernels are made and
/// run.
#[derive(Clone, Copy)]
pub(crate) struct OnDevice<'a> {
    pub base: &'a Base,
    pub lane: &'a Lane,
    pub stream: &'a Stream,
}

/// Makes kernels and workspace, for puts or for NCCL.
pub(crate) fn make(on: OnDevice<'_>, by_nccl: bool) -> Result<Prepared> {
    Prepared::new(on.lane, on.stream, (&on.base.desc, by_nccl), &on.base.areas())
}

/// Collective, behind the agreement: connects, and chooses the transport if the caller left it
/// open.
pub(crate) fn settle(on: OnDevice<'_>, first: Prepared) -> Result<Used> {
    let (core, backend) = (&on.base.cores[0], on.base.backend);
    first.connect(core, on.stream, &on.base.desc)?;
    let open_choice = backend == CollectiveBackend::Fastest
        && first.explain().is_none()
        && core.team().size() > 1;
    if !open_choice {
        return Ok(Used { by: first, why: None });
    }
    match open(core.heap(), backend)? {
        Ok(nccl) => measure(on, first, &nccl),
        Err(why) => Ok(Used { by: first, why: Some(why) }),
    }
}

/// Collective: returns the faster of both transports.
fn measure(on: OnDevice<'_>, puts: Prepared, nccl: &NcclTeam) -> Result<Used> {
    let both = || Ok((Scratch::new(on.base, on.lane)?, make(on, true)?));
    let team = on.base.cores[0].team();
    match alloc_for_tuning(team, both())? {
        // Only this rank knows of a failure here, and its peers are about to meet it: it must fail
        // the team.
        Ok(with) => run_both(on, puts, with, nccl).map_err(|e| team.fail(e)),
        Err(e) => Ok(Used { by: puts, why: Some(unmeasured(&e)) }),
    }
}

fn run_both(
    on: OnDevice<'_>,
    puts: Prepared,
    (scratch, other): (Scratch, Prepared),
    nccl: &NcclTeam,
) -> Result<Used> {
    let OnDevice { base, lane, stream } = on;
    let core = &base.cores[0];
    other.connect(core, stream, &base.desc)?;
    let by_nccl = scratch.time(on, &other)?;
    // Each transport counts its launches from one on, and words in the areas have the number of
    // their launch. So all ranks must clear the words of launches by NCCL before they wait for
    // words of the same number.
    base.areas().clear(lane, stream.cuda()?, &base.desc)?;
    core.team().exchange("ep areas", &[])?;
    let by_puts = scratch.time(on, &puts)?;
    // Nothing is cleared before launches by NCCL: they write all words anew, and have flags of
    // their own.
    let (is_nccl, why) = faster(core.team(), nccl, (by_nccl, by_puts))?;
    Ok(Used { by: if is_nccl { other } else { puts }, why: Some(why) })
}

/// Returns the phase of one launch.
pub(crate) fn phase_by<'a>(
    base: &'a Base,
    p: &'a Prepared,
    lane: &'a Lane,
    which: usize,
    handle: &'a EpHandle,
) -> Phase<'a> {
    let (core, desc, signals) = (&base.cores[which], &base.desc, &*base.signals);
    let sms = handle.num_sms(base.num_sms);
    let sms = u32::try_from(sms).unwrap_or(u32::MAX).min(p.num_sms);
    Phase { core, lane, desc, signals, p, handle, sms }
}

/// A microbatch of the most tokens, whose choices are spread over all experts.
struct Scratch {
    handle: EpHandle,
    idx: Tensor,
    send: Push,
    recv: EpDispatch,
    back: Return,
    clock: Clock,
}

impl Scratch {
    fn new(base: &Base, lane: &Lane) -> Result<Self> {
        let (d, ctx, me) = (&base.desc, lane.context(), base.cores[0].team().rank().idx());
        let device = base.cores[0].heap().device();
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
        let back = Return {
            y: rows(d.out, d.capacity, d.hidden)?,
            weights: recv.weights.clone(),
            expert_major: true,
            dw: None,
            out: rows(d.out, d.max_tokens, d.hidden)?,
            dw_out: None,
        };
        Ok(Self {
            handle: EpHandle::new(d, me, &device)?,
            idx: Tensor::from_slice(&experts, Shape::d2(d.max_tokens, d.top_k))?.to(&device)?,
            send: Push {
                x: rows(d.dtype, d.max_tokens, d.hidden)?,
                weights: Some(rows(DType::F32, d.max_tokens, d.top_k)?),
                scales: scales(d.max_tokens)?,
            },
            recv,
            back,
            clock: Clock::new(ctx)?,
        })
    }

    /// Collective: measures routing, dispatch and combine, in microseconds on this rank.
    fn time(&self, OnDevice { base, lane, stream }: OnDevice<'_>, p: &Prepared) -> Result<f64> {
        let (d, h) = (&base.desc, &self.handle);
        let begin = |which: usize| base.cores[which].begin_on(stream, "measured");
        h.set_tokens(d.max_tokens, d.capacity);
        self.clock.time(base.cores[0].team(), stream, || {
            let at = begin(ROUTE)?;
            h.set_routing(at.seq);
            let phase = |which| phase_by(base, p, lane, which, h);
            phase(ROUTE).route(at, &self.idx, d.capacity)?;
            let at = begin(DISPATCH)?;
            phase(DISPATCH).dispatch(at, &self.send, &self.recv, 0)?;
            let at = begin(COMBINE)?;
            phase(COMBINE).return_rows(at, &self.back)
        })
    }
}
