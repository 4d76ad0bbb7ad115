//! Handles: the routing of one microbatch, in device memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::Tensor;

use super::config::Routing;
use super::{EpDesc, Overflow};

/// What arrived: for each source rank its records in order.
pub(super) type Arrived = Vec<Vec<Record>>;

/// A token that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Its number at its source.
    pub token: usize,
    /// `(choice, row)` of each copy that it stands for.
    pub copies: Vec<(usize, usize)>,
}

pub(super) struct State {
    pub routing: Routing,
    pub capacity: usize,
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
    /// Sequence number of the launch that routes it, 0 before the first: equal on all ranks.
    routed: AtomicU64,
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
    pub(super) fn new(desc: &EpDesc, me: usize) -> Self {
        let local = desc.experts_per_rank[me];
        Self(Arc::new(Inner {
            state: Mutex::new(State {
                routing: Routing::default(),
                capacity: 0,
                arrived: Vec::new(),
            }),
            m_splits: Tensor::zeros(DType::I64, Shape::d1(local)),
            total: Tensor::zeros(DType::I64, Shape::d1(1)),
            dropped: Tensor::zeros(DType::I64, Shape::d1(1)),
            row_index: Tensor::zeros(DType::I32, Shape::d1(desc.capacity)),
            desc: desc.clone(),
            routed: AtomicU64::new(0),
        }))
    }

    /// Notes the launch whose routing the handle holds from now on, in program order.
    pub(super) fn set_routing(&self, seq: u64) {
        self.0.routed.store(seq, Ordering::Release);
    }

    /// Which routing the handle holds, for the comparison between ranks; fails for the handle of
    /// another layer.
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

    /// Rows of each local expert, padding included, clamped to the capacity: `[local experts]`
    /// i64, the `m_splits` of the grouped GEMM.
    pub fn m_splits(&self) -> &Tensor {
        &self.0.m_splits
    }

    /// True number of rows that this rank needs, padding included: `[1]` i64.
    pub fn total(&self) -> &Tensor {
        &self.0.total
    }

    /// Copies dropped at this rank: `[1]` i64.
    pub fn dropped(&self) -> &Tensor {
        &self.0.dropped
    }

    /// For rank-major and flat layouts: the received row that feeds each expert-major row, -1 in
    /// padding. `[capacity]` i32, filled by dispatch.
    pub fn row_index(&self) -> &Tensor {
        &self.0.row_index
    }

    /// True numbers of the last routing that has run.
    pub fn totals(&self) -> EpTotals {
        let s = self.state();
        EpTotals {
            counts: s.routing.counts.clone(),
            rows: s.routing.offsets.last().copied().unwrap_or(0),
            dropped: s.routing.dropped.clone(),
        }
    }

    /// With [`Overflow::Error`]: fails if the last routing dropped copies anywhere. The answer
    /// is the same on every rank.
    ///
    /// # Errors
    /// `Exhausted` with the capacity and the true counts.
    pub fn check(&self) -> Result<()> {
        let t = self.totals();
        if self.0.desc.overflow == Overflow::Drop || t.dropped.iter().all(|&d| d == 0) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Exhausted, "more tokens than the capacity holds")
            .op("ep_prepare")
            .expected(format_args!("at most {} rows", self.state().capacity))
            .seen(format_args!(
                "{} copies too many, by rank {:?}",
                t.dropped.iter().sum::<usize>(),
                t.dropped
            ))
            .hint("raise the capacity, or choose Overflow::Drop"))
    }
}
