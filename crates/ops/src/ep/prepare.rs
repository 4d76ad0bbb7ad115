//! `prepare` of an expert-parallel layer, and its results for a launch.

use tilewire_core::Result;
use tilewire_device::Stream;
use tilewire_symm::OpCtx;

use super::device::{self, OnDevice, Phase};
use super::{EpHandle, EpPlan};
use crate::common::backend::at_first;
use crate::common::lanes::Lane;
use crate::common::{CollectiveBackend, not_prepared};

impl EpPlan {
    /// Collective: must be called by all ranks before anything else.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' layers differ; `Unavailable` if NCCL was asked for and a rank has
    /// none.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let (core, rest) = self.base.cores.split_first().ok_or_else(not_prepared)?;
        let by_nccl = at_first(core.heap(), self.base.backend) == CollectiveBackend::Nccl;
        let base = &self.base;
        let make = |lane: &Lane| device::make(OnDevice { base, lane, stream }, by_nccl);
        let make = || {
            self.clear_on_host();
            core.make_once(&self.device, make)
        };
        core.prepare_with(stream, make, |first| {
            self.cleared.get_or_init(|| ());
            rest.iter().try_for_each(|c| c.prepare(stream))?;
            if let (Some(lane), Some(first)) = (core.lane(), first) {
                let used = device::settle(OnDevice { base, lane, stream }, first)?;
                self.device.get_or_init(|| used);
            }
            Ok(())
        })
    }

    /// Clears the words that carry launch numbers: no launch has written one yet, but the memory
    /// may have been used before. Peers launch only once all ranks have reached this point.
    fn clear_on_host(&self) {
        let core = &self.base.cores[0];
        if core.lane().is_some() || self.cleared.get().is_some() {
            return;
        }
        let ctx = OpCtx::new(core.heap(), core.op(), 0);
        for (b, at, len) in self.base.areas().words(&self.base.desc) {
            // SAFETY: the ranks meet in `prepare` before any of them launches.
            unsafe { ctx.clear_local(b.range(at, len), len) };
        }
    }

    /// Returns the transport of a launch's rows on a device: puts or NCCL.
    ///
    /// # Errors
    /// `NotPrepared` if `prepare` is to decide.
    pub(super) fn way(&self) -> Result<CollectiveBackend> {
        match (self.base.backend, self.device.get()) {
            (CollectiveBackend::Fastest, None) => Err(not_prepared().op("ep")),
            (CollectiveBackend::Fastest, Some(used)) => Ok(match used.by.explain() {
                Some(_) => CollectiveBackend::Nccl,
                None => CollectiveBackend::Put,
            }),
            (why, _) => Ok(why),
        }
    }

    /// Returns the phase of one launch on a heap in device memory; `None` on the host.
    pub(super) fn phase<'a>(
        &'a self,
        which: usize,
        handle: &'a EpHandle,
    ) -> Result<Option<Phase<'a>>> {
        let core = &self.base.cores[which];
        let Some(lane) = core.lane() else { return Ok(None) };
        let used = self.device.get().ok_or_else(|| not_prepared().op(core.op()))?;
        Ok(Some(device::phase_by(&self.base, &used.by, lane, which, handle)))
    }
}
