//! The choice between puts and NCCL for a plan's launches, measured if the caller leaves it open.

use std::sync::OnceLock;

use tilewire_core::{Result, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Pending, Stream, Tensor};

use super::nccl;
use super::queue::{self, OnDevice};
use crate::collective::CollectiveBackend;
use crate::collective::launch::{Base, Given};
use crate::common::Provider;
use crate::common::backend::at_first;
use crate::common::cuda::workspace;
use crate::common::nccl::{Clock, alloc_for_tuning, faster, open, unmeasured};

/// Queues a launch of tensors that were checked: by a provider, or by the schedule.
pub(crate) fn launch(
    on: &OnDevice<'_>,
    provider: Option<&Provider>,
    t: Given<'_>,
) -> Result<Pending<Tensor>> {
    t.stream.in_launch(|| match provider {
        Some(Provider::Nccl(n)) => nccl::launch(on, n, t),
        None => queue::launch(on, t),
    })
}

/// The provider that a plan uses, decided at `prepare`, and the reason.
#[derive(Default)]
pub(crate) struct Used(OnceLock<(Option<Provider>, String)>);

impl Used {
    /// Returns the provider that carries out whole launches; `None` if the schedule does.
    pub fn provider(&self) -> Option<&Provider> {
        self.0.get().and_then(|(p, _)| p.as_ref())
    }

    /// Returns the choice and its reason as text.
    pub fn text(&self) -> Option<&str> {
        self.0.get().map(|(_, text)| text.as_str())
    }

    /// Collective: chooses between puts and NCCL for a prepared plan. A chosen provider has run
    /// once, so that no launch connects or loads.
    pub fn decide(
        &self,
        on: &OnDevice<'_>,
        stream: &Stream,
        backend: CollectiveBackend,
    ) -> Result<()> {
        if self.0.get().is_some() {
            return Ok(());
        }
        let core = &on.base.core;
        let set = |provider, text: String| {
            self.0.get_or_init(|| (provider, text));
        };
        let nccl = match open(core.heap(), backend)? {
            Ok(nccl) => nccl,
            Err(why) => {
                set(None, why);
                return Ok(());
            }
        };
        let usual = at_first(core.heap(), backend);
        let scratch = match alloc_for_tuning(core.team(), Scratch::new(on.base, on.lane.context()))?
        {
            Ok(scratch) => scratch,
            Err(e) if usual == CollectiveBackend::Nccl => return Err(e),
            Err(e) => {
                set(None, unmeasured(&e));
                return Ok(());
            }
        };
        // Only this rank knows of a failure here, and its peers are about to meet it: it must fail
        // the team.
        let provider = Provider::Nccl(nccl.clone());
        let time = |by| scratch.time(on, stream, by).map_err(|e| core.team().fail(e));
        let by_nccl = time(Some(&provider))?;
        if usual == CollectiveBackend::Nccl {
            set(Some(provider), nccl.library().to_owned());
            return Ok(());
        }
        let by_puts = time(None)?;
        let (first, why) = faster(core.team(), &nccl, (by_nccl, by_puts))?;
        set(first.then_some(provider), why);
        Ok(())
    }
}

/// Tensors of the plan's most rows.
struct Scratch {
    x: Tensor,
    out: Tensor,
    clock: Clock,
}

impl Scratch {
    fn new(base: &Base, ctx: &CudaContext) -> Result<Self> {
        let (rows_in, rows_out) = base.io_rows(base.desc.m)?;
        let (t, cols) = (base.desc.dtype, base.desc.cols);
        let tensor = |rows: usize| {
            let memory = workspace(ctx, rows * cols * t.size())?;
            Tensor::over_cuda(memory, t, Shape::d2(rows, cols))
        };
        Ok(Self { x: tensor(rows_in)?, out: tensor(rows_out)?, clock: Clock::new(ctx)? })
    }

    /// Collective: measures a launch, in microseconds on this rank.
    fn time(&self, on: &OnDevice<'_>, stream: &Stream, provider: Option<&Provider>) -> Result<f64> {
        let m = on.base.desc.m;
        let given = Given { stream, m, x: &self.x, out: &self.out, before: None };
        self.clock.time(on.base.core.team(), stream, || launch(on, provider, given).map(drop))
    }
}
