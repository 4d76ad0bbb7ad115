//! Handles: the routing of one microbatch, in device memory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaMemory};
use tilewire_device::{Buffer, Device, Tensor};

use super::routing::Routing;
use super::{EpDesc, Overflow};
use crate::common::cuda::workspace;

/// The records that arrived, for each source rank in order.
pub(super) type Arrived = Vec<Vec<Record>>;

/// A token that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Its number at its source.
    pub token: usize,
    /// `(choice, row)` of each copy in the record.
    pub copies: Vec<(usize, usize)>,
}

pub(super) struct State {
    pub routing: Routing,
    /// Filled by dispatch.
    pub arrived: Arrived,
}

pub(super) struct Inner {
    pub state: Mutex<State>,
    pub m_splits: Tensor,
    pub total: Tensor,
    pub dropped: Tensor,
    pub row_index: Tensor,
    desc: EpDesc,
    /// On a CUDA device.
    device: Option<DeviceHandle>,
    /// Tokens of the routing, in program order.
    tokens: AtomicUsize,
    /// Rows that the last routing in program order was for.
    capacity: AtomicUsize,
    /// Sequence number of the launch that routes it, 0 before the first: equal on all ranks.
    routed: AtomicU64,
    /// Multiprocessors that its phases may take; 0 is the plan's number.
    num_sms: AtomicUsize,
}

/// Routing of one microbatch. Clones are the same handle; make one for each microbatch in flight.
///
/// The tensors are filled in stream order by `route` and `dispatch`, and may be read by work
/// queued behind them: no host synchronisation is needed.
#[derive(Clone)]
pub struct EpHandle(pub(super) Arc<Inner>);

/// True numbers of a routing, for reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpTotals {
    /// Copies for each local expert, dropped ones included.
    pub counts: Vec<usize>,
    /// Rows needed to drop nothing, padding included.
    pub rows: usize,
    /// Copies dropped at each rank.
    pub dropped: Vec<usize>,
}

impl EpHandle {
    pub(super) fn new(desc: &EpDesc, me: usize, on: &Device) -> Result<Self> {
        let local = desc.experts_per_rank[me];
        let zeros = |dtype, n| Tensor::zeros_on(on, dtype, Shape::d1(n));
        let device = match on {
            Device::Host => None,
            Device::Cuda(ctx) => Some(DeviceHandle::new(ctx, desc, me)?),
        };
        Ok(Self(Arc::new(Inner {
            state: Mutex::new(State { routing: Routing::default(), arrived: Vec::new() }),
            m_splits: zeros(DType::I64, local)?,
            total: zeros(DType::I64, 1)?,
            dropped: zeros(DType::I64, 1)?,
            row_index: zeros(DType::I32, desc.capacity)?,
            desc: desc.clone(),
            device,
            tokens: AtomicUsize::new(0),
            capacity: AtomicUsize::new(0),
            routed: AtomicU64::new(0),
            num_sms: AtomicUsize::new(0),
        })))
    }

    /// Sets the multiprocessors that phases of this microbatch may take from now on, at least one;
    /// `None` means the plan's number. Ranks may differ, as in
    /// [`EpPlan::with_num_sms`](super::EpPlan::with_num_sms).
    pub fn set_num_sms(&self, num: Option<usize>) {
        self.0.num_sms.store(num.map_or(0, |n| n.max(1)), Ordering::Relaxed);
    }

    /// Returns the number of [`EpHandle::set_num_sms`], or else the plan's.
    pub(super) fn num_sms(&self, plan: usize) -> usize {
        match self.0.num_sms.load(Ordering::Relaxed) {
            0 => plan,
            num => num,
        }
    }

    pub(super) fn desc(&self) -> &EpDesc {
        &self.0.desc
    }

    pub(super) fn device(&self) -> Option<&DeviceHandle> {
        self.0.device.as_ref()
    }

    /// Notes tokens and capacity of a routing, in program order.
    pub(super) fn set_tokens(&self, tokens: usize, capacity: usize) {
        self.0.tokens.store(tokens, Ordering::Release);
        self.0.capacity.store(capacity, Ordering::Release);
    }

    /// Fails unless `rows` tokens were routed.
    pub(super) fn check_tokens(&self, rows: usize) -> Result<()> {
        let routed = self.0.tokens.load(Ordering::Acquire);
        if routed == rows {
            return Ok(());
        }
        Err(Error::invalid("the number of tokens differs from that of the routing")
            .expected(format_args!("{routed} tokens"))
            .seen(format_args!("{rows} tokens")))
    }

    /// Records the launch whose routing the handle holds from now on, in program order.
    pub(super) fn set_routing(&self, seq: u64) {
        self.0.routed.store(seq, Ordering::Release);
    }

    /// Returns the number of the routing that the handle holds, for the comparison between ranks;
    /// fails for the handle of another layer.
    pub(super) fn routing(&self, desc: &EpDesc) -> Result<u64> {
        self.check_layer(desc)?;
        match self.0.routed.load(Ordering::Acquire) {
            0 => Err(Error::new(ErrorKind::NotPrepared, "the handle has no routing")
                .hint("call `plan.route(..)` with it first, on all ranks")),
            seq => Ok(seq),
        }
    }

    pub(super) fn check_layer(&self, desc: &EpDesc) -> Result<()> {
        if self.0.desc == *desc {
            return Ok(());
        }
        Err(Error::invalid("the handle belongs to another layer")
            .expected(desc)
            .seen(&self.0.desc)
            .hint("make handles with `plan.handle()` of this plan"))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rows of each local expert, padding included, clamped to the capacity: `[local
    /// experts]` i64, the `m_splits` of the grouped GEMM.
    pub fn m_splits(&self) -> &Tensor {
        &self.0.m_splits
    }

    /// Returns the true number of rows that this rank needs, padding included: `[1]` i64.
    pub fn total(&self) -> &Tensor {
        &self.0.total
    }

    /// Copies dropped at this rank: `[1]` i64.
    pub fn dropped(&self) -> &Tensor {
        &self.0.dropped
    }

    /// Returns, for rank-major and flat layouts, the received row that feeds each expert-major row,
    /// -1 in padding. `[capacity]` i32, filled by dispatch.
    pub fn row_index(&self) -> &Tensor {
        &self.0.row_index
    }

    /// Returns the true numbers of the last routing that has run.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn totals(&self) -> Result<EpTotals> {
        if let Some(d) = &self.0.device {
            return d.totals(&self.0.total);
        }
        let s = self.state();
        Ok(EpTotals {
            counts: s.routing.counts.clone(),
            rows: s.routing.offsets.last().copied().unwrap_or(0),
            dropped: s.routing.dropped.clone(),
        })
    }

    /// Fails, with [`Overflow::Error`], if the last routing dropped copies on any rank. The answer
    /// is the same on every rank.
    ///
    /// # Errors
    /// `Exhausted` with the capacity and the true counts.
    pub fn check(&self) -> Result<()> {
        let t = self.totals()?;
        if self.0.desc.overflow == Overflow::Drop || t.dropped.iter().all(|&d| d == 0) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Exhausted, "the routing has more rows than the capacity holds")
            .op("ep_route")
            .expected(format_args!("at most {} rows", self.0.capacity.load(Ordering::Acquire)))
            .seen(format_args!(
                "{} copies too many, by rank {:?}",
                t.dropped.iter().sum::<usize>(),
                t.dropped
            ))
            .hint("raise the capacity, or choose Overflow::Drop"))
    }
}

/// The memory of a handle on a device.
pub(super) struct DeviceHandle {
    pub rows: CudaMemory,
    pub ranks: CudaMemory,
    pub num: CudaMemory,
    pub copies: CudaMemory,
    pub source: CudaMemory,
    pub place: CudaMemory,
    pub counts: CudaMemory,
    pub lost: CudaMemory,
}

impl DeviceHandle {
    pub fn new(ctx: &CudaContext, d: &EpDesc, me: usize) -> Result<Self> {
        let (size, choices) = (d.experts_per_rank.len(), d.max_tokens * d.top_k);
        let ints = |n: usize| workspace(ctx, 4 * n);
        Ok(Self {
            rows: ints(choices)?,
            ranks: ints(choices)?,
            num: ints(size * d.max_tokens)?,
            copies: ints(4 * size * choices)?,
            source: ints(d.capacity)?,
            place: ints(size * d.max_tokens)?,
            counts: ints(2 * d.experts_per_rank[me])?,
            lost: ints(2 * size)?,
        })
    }

    /// Returns the true numbers of the last routing that has run.
    pub fn totals(&self, total: &Tensor) -> Result<EpTotals> {
        let read = |m: &CudaMemory| -> Result<Vec<usize>> {
            let bytes = m.download()?;
            let words = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<i64>);
            Ok(words.map(|v| v as usize).collect())
        };
        Ok(EpTotals {
            counts: read(&self.counts)?,
            rows: total.to_vec::<i64>()?[0] as usize,
            dropped: read(&self.lost)?,
        })
    }
}
