//! NCCL as a plan uses it: connected at `prepare`, queued behind the meeting of a launch.

use std::sync::{Arc, OnceLock};

use tilewire_core::{BackendKind, DType, Error, Result};
use tilewire_device::cuda::{CudaStream, NcclOp, NcclSum};
use tilewire_device::{Queue, Stream};
use tilewire_symm::{Heap, NcclTeam};

use super::PlanCore;
use super::cuda::no_kernel;
use crate::collective::CollectiveBackend;

/// What a plan says to NCCL. Copies of it are of one plan.
#[derive(Default)]
pub(crate) struct ByNccl(OnceLock<Arc<NcclTeam>>);

impl ByNccl {
    /// Collective, behind the agreement of `prepare`: makes NCCL of the plan's heap, and runs `ops` of
    /// type `dtype` once, so that no launch connects. The first time only.
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
        // Only this rank knows that it failed, and the others wait for it.
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

    fn get(&self) -> Result<&Arc<NcclTeam>> {
        self.0.get().ok_or_else(|| Error::internal("a prepared plan without NCCL"))
    }

    /// In words, once prepared.
    pub fn explain(&self) -> Option<&str> {
        self.0.get().map(|n| n.library())
    }
}

/// For operations that go through puts or NCCL as they are told.
///
/// # Errors
/// `Unsupported` for NCCL on the host, and for a choice by the clock.
pub(crate) fn put_or_nccl(heap: &Heap, backend: CollectiveBackend) -> Result<()> {
    match backend {
        CollectiveBackend::Put => Ok(()),
        CollectiveBackend::Nccl if heap.backend() != BackendKind::Host => Ok(()),
        CollectiveBackend::Nccl => {
            Err(no_kernel("NCCL on the host", "make the heap on the `vmm` backend"))
        }
        CollectiveBackend::Fastest => {
            Err(no_kernel("a choice between puts and NCCL here", "say `put` or `nccl`"))
        }
    }
}
