//! NCCL as a plan uses it: connected at `prepare`, queued behind the meeting of a launch. Also the
//! helpers of plans that choose between NCCL and puts.

use std::sync::{Arc, OnceLock};

use tilewire_core::{DType, Error, ErrorKind, Result};
use tilewire_device::cuda::{CudaContext, CudaEvent, CudaStream, NcclOp, NcclSum};
use tilewire_device::{Queue, Stream};
use tilewire_symm::{Heap, LiveTeam, NcclTeam};

use super::CollectiveBackend;
use super::backend::at_first;
use super::choice::fastest;
use super::core::PlanCore;

/// The NCCL communicator of a plan, made at its first `prepare`. Clones belong to one plan.
#[derive(Default)]
pub(crate) struct ByNccl(OnceLock<Arc<NcclTeam>>);

impl ByNccl {
    /// Collective, behind the agreement of `prepare`: makes NCCL of the plan's heap, and runs `ops`
    /// of type `dtype` once, so that no launch connects. The first time only.
    ///
    /// # Safety
    /// As [`NcclTeam::queue`], until this returns.
    ///
    /// # Errors
    /// As [`tilewire_symm::Heap::nccl`]; the fault of the team.
    pub unsafe fn prepare(
        &self,
        core: &PlanCore,
        stream: &Stream,
        (dtype, ops): (DType, &[NcclOp]),
    ) -> Result<()> {
        if self.0.get().is_some() {
            return Ok(());
        }
        let nccl = core.heap().nccl()?;
        // SAFETY: the caller's contract; all ranks have met to make the communicator.
        let run = unsafe { nccl.queue(stream.cuda()?, (dtype, NcclSum::Sum), ops) };
        let run = run.and_then(|()| stream.cuda()?.synchronize_until(None));
        // Only this rank knows that it failed, and its peers wait for it.
        run.map_err(|e| core.team().fail(e))?;
        core.team().check()?;
        self.0.get_or_init(|| nccl);
        Ok(())
    }

    /// Queues sums (or mere transfers) of `dtype` as one group.
    ///
    /// # Safety
    /// As [`NcclTeam::queue`].
    ///
    /// # Errors
    /// As [`NcclTeam::queue`].
    pub unsafe fn queue(&self, main: &CudaStream, dtype: DType, ops: &[NcclOp]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.get()?.queue(main, (dtype, NcclSum::Sum), ops) }
    }

    /// Queues a phase of bytes as one group: the sends and receives of this rank, which for each
    /// pair of ranks are in the same order on both. It replaces the puts, flags and waits of a
    /// phase: work behind it on the stream may read the received bytes.
    ///
    /// # Safety
    /// As [`NcclTeam::queue`].
    ///
    /// # Errors
    /// As [`NcclTeam::queue`].
    pub unsafe fn exchange(&self, main: &CudaStream, pieces: &[NcclOp]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.queue(main, DType::U8, pieces) }
    }

    fn get(&self) -> Result<&Arc<NcclTeam>> {
        self.0.get().ok_or_else(|| Error::internal("a prepared plan lacks its NCCL communicator"))
    }

    /// Returns a text for the plan's `explain`, once prepared.
    pub fn explain(&self) -> Option<&str> {
        self.0.get().map(|n| n.library())
    }
}

/// Collective: opens NCCL for `heap`. Returns `Ok(Err(text))` with the reason if a plan that is
/// free to choose uses puts without measuring.
///
/// # Errors
/// As [`tilewire_symm::Heap::nccl`], where puts are no way out.
pub(crate) fn open(
    heap: &Heap,
    backend: CollectiveBackend,
) -> Result<std::result::Result<Arc<NcclTeam>, String>> {
    let free =
        backend == CollectiveBackend::Fastest && at_first(heap, backend) == CollectiveBackend::Put;
    match heap.nccl() {
        Err(e) if free && (e.is_unavailable() || e.is_unsupported()) => Ok(Err(no_nccl(&e))),
        r => r.map(Ok),
    }
}

/// Returns the text which says that puts are used because of `e`.
pub(crate) fn no_nccl(e: &Error) -> String {
    format!("puts, because NCCL cannot be used: {e}")
}

/// Settles the scratch memory of a measurement. Collective: every rank gets `Ok(Err(e))`, and uses
/// puts, if one rank lacks memory or NCCL.
///
/// # Errors
/// An error of another kind than a lack of memory or of a library; the fault of the team.
pub(crate) fn alloc_for_tuning<T>(team: &LiveTeam, mine: Result<T>) -> Result<Result<T>> {
    match team.settle("memory to measure in", mine) {
        Err(e) => {
            team.check()?;
            let lacks =
                e.kind() == ErrorKind::Exhausted || e.is_unavailable() || e.is_unsupported();
            if lacks { Ok(Err(e)) } else { Err(e) }
        }
        mine => Ok(mine),
    }
}

/// Returns the text which says that puts are used because `e` prevented measuring.
pub(crate) fn unmeasured(e: &Error) -> String {
    format!("puts, because NCCL cannot be measured: {e}")
}

/// Launches before and in a measurement.
const WARM: usize = 3;
const TIMED: usize = 10;

/// Times launches of a plan.
pub(crate) struct Clock {
    start: CudaEvent,
    end: CudaEvent,
}

impl Clock {
    pub fn new(ctx: &CudaContext) -> Result<Self> {
        Ok(Self { start: CudaEvent::new(ctx, true)?, end: CudaEvent::new(ctx, true)? })
    }

    /// Collective: measures the work that `launch` queues on `stream`, in microseconds on this
    /// rank. All of it has ended on return.
    ///
    /// # Errors
    /// The errors of `launch`; the fault of the team.
    pub fn time(
        &self,
        team: &LiveTeam,
        stream: &Stream,
        launch: impl Fn() -> Result<()>,
    ) -> Result<f64> {
        let s = stream.cuda()?;
        for i in 0..WARM + TIMED {
            if i == WARM {
                s.record(&self.start)?;
            }
            launch()?;
        }
        s.record(&self.end)?;
        stream.synchronize()?;
        team.check()?;
        Ok(self.end.us_since(&self.start)? / TIMED as f64)
    }
}

/// Collective: returns whether NCCL is faster than puts for the slowest rank, equal on all ranks,
/// and a text with the times of both on this rank.
///
/// # Errors
/// The fault of the team.
pub(crate) fn faster(
    team: &LiveTeam,
    nccl: &NcclTeam,
    (by_nccl, by_puts): (f64, f64),
) -> Result<(bool, String)> {
    let first = fastest(team, &[(false, by_puts), (true, by_nccl)])?;
    let name = if first { nccl.library() } else { "puts" };
    let why =
        format!("{name}, the faster: on this rank NCCL took {by_nccl:.1} us, puts {by_puts:.1} us");
    Ok((first, why))
}
