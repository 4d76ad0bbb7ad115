//! The plan of a bulk overlap: a GEMM plan and a collective plan, launched side by side.

use tilewire_core::Result;
use tilewire_device::{Device, Event, Pending, Stream, Tensor};
use tilewire_symm::{Heap, Traffic};

use crate::collective::{CollectiveDesc, CollectivePlan};
use crate::gemm::{GemmDesc, GemmInputs, GemmPlan};

/// Tensors of one launch.
#[derive(Clone, Debug)]
pub struct BulkInputs {
    /// Tensors of the GEMM.
    pub gemm: GemmInputs,
    /// Rows of the collective, input and output.
    pub m: usize,
    /// Input of the collective.
    pub x: Tensor,
    /// Output of the collective.
    pub y: Tensor,
}

/// Results of one launch.
#[derive(Clone, Debug)]
pub struct BulkOut {
    /// Output of the GEMM.
    pub gemm: Tensor,
    /// Output of the collective.
    pub collective: Tensor,
}

/// A GEMM and a collective side by side.
pub struct BulkPlan {
    gemm: GemmPlan,
    collective: CollectivePlan,
    side: Stream,
}

impl BulkPlan {
    /// Bytes of symmetric memory that a plan takes on each of `size` ranks.
    pub fn memory(collective: &CollectiveDesc, size: usize) -> usize {
        CollectivePlan::memory(collective, size)
    }

    /// A plan on `heap`.
    ///
    /// # Errors
    /// As [`GemmPlan::new`] and [`CollectivePlan::new`].
    pub fn new(gemm: GemmDesc, collective: CollectiveDesc, heap: &Heap) -> Result<Self> {
        Ok(Self {
            gemm: GemmPlan::new(gemm)?,
            collective: CollectivePlan::new(collective, heap)?,
            side: match heap.device() {
                Device::Host => Stream::new("bulk")?,
                Device::Cuda(ctx) => Stream::on(&ctx)?,
            },
        })
    }

    /// Collective: must be called by all ranks before the first launch.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        self.collective.prepare_after(stream, || self.gemm.prepare(stream))
    }

    /// In words, what a launch does.
    pub fn explain(&self) -> String {
        format!("bulk: gemm {} beside\n{}", self.gemm.desc(), self.collective.explain())
    }

    /// Returns what one launch moves from this rank to each peer: that of the collective.
    ///
    /// # Errors
    /// As [`CollectivePlan::predict`].
    pub fn predict(&self, m: usize) -> Result<Traffic> {
        self.collective.predict(m)
    }

    /// Queues both side by side, joined to `stream`. Launches on different streams order their
    /// collectives, which share receive areas, but not their GEMMs: each needs a result of its own.
    ///
    /// # Errors
    /// As the two parts. Both are checked before the first is queued: if one is refused, nothing
    /// runs.
    pub fn launch(&self, stream: &Stream, t: BulkInputs) -> Result<Pending<BulkOut>> {
        self.collective.check(t.m, &t.x, &t.y)?;
        self.collective.check_launch(stream, (&t.x, &t.y))?;
        self.gemm.check(stream, &t.gemm)?;
        stream.in_launch(|| self.launch_both(stream, t))
    }

    fn launch_both(&self, stream: &Stream, t: BulkInputs) -> Result<Pending<BulkOut>> {
        let (fork, join) = (Event::new(), Event::new());
        stream.record(&fork)?;
        self.side.wait(&fork)?;
        // The GEMM must be queued before `stream` waits for the collective, or it would run
        // behind it.
        let collective = self.collective.launch(&self.side, t.m, &t.x, &t.y);
        let gemm = self.gemm.launch(stream, t.gemm);
        // Joined whatever happened: a capture would not be whole otherwise.
        self.side.record(&join)?;
        stream.wait(&join)?;
        if let (Stream::Cuda(main), Stream::Cuda(side)) = (stream, &self.side) {
            // Nobody waits for the side stream alone: it would keep the tensors of its latest
            // launches.
            main.take_over(side);
        }
        let (collective, on_end) = collective?.join_with_callback(stream)?;
        let out = BulkOut { gemm: gemm?.join(stream)?, collective };
        let pending = Pending::new(out, stream, Some(self.collective.team().fault().clone()))?;
        Ok(pending.on_end(on_end))
    }
}
