//! Maps: the routing of one batch, in device memory.

use std::sync::Arc;

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Tensor};

use super::PermuteDesc;
use super::device::Scratch;
use super::schedule::Layout;
use crate::common::Named;

/// Status words.
pub(super) const GOOD: i32 = 0;
pub(super) const BAD_INDEX: i32 = 1;
pub(super) const NOT_ROUTED: i32 = 2;

struct Inner {
    desc: PermuteDesc,
    tokens: usize,
    slots: Tensor,
    sources: Tensor,
    m_splits: Tensor,
    total: Tensor,
    dropped: Tensor,
    status: Tensor,
    /// On a CUDA device only.
    scratch: Option<Scratch>,
}

/// Routing of one batch. Clones are the same map; make one for each batch in flight.
///
/// The tensors are filled in stream order by `route`, and may be read by work queued behind it:
/// no host synchronisation is needed.
#[derive(Clone)]
pub struct PermuteMap(Arc<Inner>);

impl PermuteMap {
    pub(super) fn new(desc: &PermuteDesc, tokens: usize, on: Option<&CudaContext>) -> Result<Self> {
        if tokens > desc.max_tokens {
            return Err(Error::invalid("the launch has more tokens than the plan was made for")
                .op("permute")
                .expected(format_args!("at most {}", desc.max_tokens))
                .seen(tokens));
        }
        let device = on.map_or(Device::Host, |ctx| Device::Cuda(ctx.clone()));
        let put = |t: Tensor| if on.is_some() { t.to(&device) } else { Ok(t) };
        let poison = |shape| Tensor::poisoned_on(&device, DType::I32, shape);
        let zeros = |n| Tensor::zeros_on(&device, DType::I64, Shape::d1(n));
        Ok(Self(Arc::new(Inner {
            desc: *desc,
            tokens,
            slots: poison(Shape::d2(tokens, desc.top_k))?,
            sources: poison(Shape::d1(desc.capacity))?,
            m_splits: zeros(desc.num_experts)?,
            total: zeros(1)?,
            dropped: zeros(1)?,
            status: put(Tensor::from_slice(&[NOT_ROUTED], Shape::d1(1))?)?,
            scratch: on.map(|ctx| Scratch::new(ctx, desc, tokens)).transpose()?,
        })))
    }

    /// Returns what `route` works in on a CUDA device.
    pub(super) fn scratch(&self) -> Result<&Scratch> {
        self.0
            .scratch
            .as_ref()
            .ok_or_else(|| Error::internal("a map of the host was used on a device"))
    }

    /// A tensor for all of them: they lie on one device.
    pub(super) fn named(&self) -> Named<'_> {
        ("map", Some(&self.0.status))
    }

    /// Number of tokens it is for.
    pub fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// Row of each (token, choice), -1 if masked or dropped: `[tokens, top_k]` i32.
    pub fn slots(&self) -> &Tensor {
        &self.0.slots
    }

    /// The row map: `token * top_k + choice` in each row, -1 in padding: `[capacity]` i32.
    pub fn sources(&self) -> &Tensor {
        &self.0.sources
    }

    /// Rows of each expert, padding included, clamped to the capacity: `[num_experts]` i64, the
    /// `m_splits` of the grouped GEMM.
    pub fn m_splits(&self) -> &Tensor {
        &self.0.m_splits
    }

    /// Rows needed to drop nothing, padding included: `[1]` i64.
    pub fn total(&self) -> &Tensor {
        &self.0.total
    }

    /// Copies dropped for want of capacity: `[1]` i64.
    pub fn dropped(&self) -> &Tensor {
        &self.0.dropped
    }

    /// Status on the device, `[1]` i32: 0 good, 1 an index that is no expert, 2 not routed.
    pub fn status(&self) -> &Tensor {
        &self.0.status
    }

    /// Raises what the work has found in the indices; call after waiting for it.
    ///
    /// # Errors
    /// `InvalidArgument` if an index was neither an expert nor -1; `NotPrepared` if nothing was
    /// routed.
    pub fn check(&self) -> Result<()> {
        match self.0.status.to_vec::<i32>()?[0] {
            GOOD => Ok(()),
            BAD_INDEX => Err(Error::invalid("`topk_idx` names an expert that does not exist")
                .op("permute")
                .expected(format_args!("-1 or 0 to {}", self.0.desc.num_experts - 1))
                .seen("another index")),
            _ => Err(Error::new(ErrorKind::NotPrepared, "the map has no routing")
                .op("permute")
                .hint("call `plan.route` with it first")),
        }
    }

    /// True once it holds a good routing. For nodes, in stream order.
    pub(super) fn good(&self) -> Result<bool> {
        Ok(self.0.status.to_vec::<i32>()?[0] == GOOD)
    }

    /// Fails unless it was made by a plan of `desc`.
    pub(super) fn check_desc(&self, desc: &PermuteDesc) -> Result<()> {
        if self.0.desc == *desc {
            return Ok(());
        }
        Err(Error::invalid("a map of another plan was given").expected(desc).seen(self.0.desc))
    }

    pub(super) fn store(&self, l: &Layout, status: i32) -> Result<()> {
        let set = |t: &Tensor, bytes: &[u8]| t.write(|b| b.copy_from_slice(bytes));
        set(&self.0.slots, bytemuck::cast_slice(&l.slots))?;
        set(&self.0.sources, bytemuck::cast_slice(&l.sources))?;
        set(&self.0.m_splits, bytemuck::cast_slice(&l.m_splits))?;
        set(&self.0.total, &l.total.to_ne_bytes())?;
        set(&self.0.dropped, &l.dropped.to_ne_bytes())?;
        set(&self.0.status, &status.to_ne_bytes())
    }
}

impl std::fmt::Debug for PermuteMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PermuteMap({} tokens, {})", self.0.tokens, self.0.desc)
    }
}
