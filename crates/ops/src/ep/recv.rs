//! The destinations of a dispatch: tensors of the caller, or buffers that peers write to.

use std::sync::PoisonError;

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::{Memory, Tensor};
use tilewire_symm::{Fingerprint, SymBuf};

use super::direct::Direct;
use super::host::Straight;
use super::{EpLayout, EpPlan, device};
use crate::common::CollectiveBackend;

impl EpPlan {
    /// Makes a receive buffer for [`EpDispatch::x`](super::EpDispatch::x), `[recv_rows, hidden]`,
    /// in symmetric memory: peers put rows to their final place (zero copy) instead of an area from
    /// which the receiver copies them. Collective in program order: all ranks make the same
    /// buffers, and dispatch into the same one at a time. Make one for each microbatch in flight;
    /// they live as long as the plan. Peers may write to the buffer as soon as the dispatch begins
    /// on its stream, so work that uses its rows must be queued before.
    ///
    /// After a fault peers may still write to the buffer, over its poison, until their launches
    /// have ended. The poison in weights and row index, and the error, show that its rows are no
    /// result.
    ///
    /// # Errors
    /// `Exhausted` if the heap is too small; `Mismatch` if the ranks have not allocated alike;
    /// `Unsupported` for the flat layout, and through NCCL; `NotPrepared` if `prepare` has yet to
    /// choose the transport.
    pub fn zero_copy_recv(&self) -> Result<Tensor> {
        let d = &self.base.desc;
        // A sender of flat rows does not know how many rows of other ranks precede them.
        let knows = !matches!(d.layout, EpLayout::Flat { .. });
        let expected = "expert-major or rank-major rows, by puts";
        self.direct(knows, (d.dtype, d.recv_rows()), expected, None)
    }

    /// Makes a receive buffer as [`EpPlan::zero_copy_recv`], in symmetric memory of the caller's:
    /// `[recv_rows, hidden]` from byte `at` of `buf` on, a multiple of 16. `buf` must be of the
    /// plan's heap, and the same on all ranks.
    ///
    /// # Errors
    /// As there; `InvalidArgument` if the rows do not fit there, or memory that begins there
    /// receives rows already; `Unsupported` on the host, where other operations may use
    /// `buf` while this rank reads its rows: see [`EpPlan::host_zero_copy_recv_in`].
    pub fn zero_copy_recv_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        self.on_devices()?;
        self.recv_in(buf, at)
    }

    /// [`EpPlan::zero_copy_recv_in`] on a heap of the host.
    ///
    /// # Errors
    /// As there; `Unsupported` on devices.
    ///
    /// # Safety
    /// As long as the plan lives, nothing else writes these bytes of `buf` on any rank while
    /// a guard of the tensor or a dispatch into it uses them, and nothing reads them through `buf`
    /// while this writes: barriers or signals order what other operations do there.
    pub unsafe fn host_zero_copy_recv_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        self.on_the_host()?;
        self.recv_in(buf, at)
    }

    fn recv_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        let d = &self.base.desc;
        self.fits(buf, at, (d.dtype, d.recv_rows()))?;
        let knows = !matches!(d.layout, EpLayout::Flat { .. });
        let expected = "expert-major or rank-major rows, by puts";
        self.direct(knows, (d.dtype, d.recv_rows()), expected, Some((buf, at)))
    }

    /// Makes a receive buffer as [`EpPlan::zero_copy_recv`], for `dy` of [`EpPlan::combine_bwd`]
    /// without weights: `[capacity, hidden]` of type `out`. With weights it is a tensor like any
    /// other.
    ///
    /// # Errors
    /// As there; `Unsupported` for all layouts but the expert-major one, and through NCCL.
    pub fn zero_copy_grad(&self) -> Result<Tensor> {
        let d = &self.base.desc;
        let knows = matches!(d.layout, EpLayout::ExpertMajor { .. });
        self.direct(knows, (d.out, d.capacity), "expert-major rows, by puts", None)
    }

    /// Makes a receive buffer as [`EpPlan::zero_copy_grad`], in symmetric memory of the caller's
    /// with the conditions of [`EpPlan::zero_copy_recv_in`]: `[capacity, hidden]` of type `out`.
    ///
    /// # Errors
    /// As there, and as [`EpPlan::zero_copy_grad`].
    pub fn zero_copy_grad_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        self.on_devices()?;
        self.grad_in(buf, at)
    }

    /// [`EpPlan::zero_copy_grad_in`] on a heap of the host.
    ///
    /// # Errors
    /// As there; `Unsupported` on devices.
    ///
    /// # Safety
    /// As [`EpPlan::host_zero_copy_recv_in`].
    pub unsafe fn host_zero_copy_grad_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        self.on_the_host()?;
        self.grad_in(buf, at)
    }

    fn grad_in(&self, buf: &SymBuf, at: usize) -> Result<Tensor> {
        let d = &self.base.desc;
        self.fits(buf, at, (d.out, d.capacity))?;
        let knows = matches!(d.layout, EpLayout::ExpertMajor { .. });
        self.direct(knows, (d.out, d.capacity), "expert-major rows, by puts", Some((buf, at)))
    }

    fn on_devices(&self) -> Result<()> {
        if self.base.cores[0].lane().is_some() {
            return Ok(());
        }
        let text = "rows cannot be received in symmetric memory of the host by safe calls";
        Err(Error::new(ErrorKind::Unsupported, text)
            .op("ep")
            .hint("use `host_zero_copy_recv_in` or `host_zero_copy_grad_in`, which are unsafe"))
    }

    fn on_the_host(&self) -> Result<()> {
        if self.base.cores[0].lane().is_none() {
            return Ok(());
        }
        let text = "the symmetric memory of a device is not the host's";
        Err(Error::new(ErrorKind::Unsupported, text)
            .op("ep")
            .hint("use `zero_copy_recv_in` or `zero_copy_grad_in`"))
    }

    /// Fails unless `rows` fit at byte `at` of `buf`, which is of this heap.
    fn fits(&self, buf: &SymBuf, at: usize, (dtype, rows): (DType, usize)) -> Result<()> {
        buf.check_heap(self.base.cores[0].heap()).map_err(|e| e.op("ep"))?;
        let need = rows * self.base.desc.hidden * dtype.size();
        if at.is_multiple_of(16) && at.checked_add(need).is_some_and(|end| end <= buf.len_bytes()) {
            return Ok(());
        }
        Err(Error::invalid("the rows of the layer do not fit this place in the symmetric buffer")
            .op("ep")
            .expected(format_args!("{need} bytes at a multiple of 16 within {}", buf.len_bytes()))
            .seen(at))
    }

    /// Makes a receive buffer of `rows`, if a sender `knows` the final place of its rows: in new
    /// memory, or in the memory `given` by the caller.
    fn direct(
        &self,
        knows: bool,
        (dtype, rows): (DType, usize),
        expected: &str,
        given: Option<(&SymBuf, usize)>,
    ) -> Result<Tensor> {
        let (d, heap) = (&self.base.desc, self.base.cores[0].heap());
        let shape = Shape::d2(rows, d.hidden);
        let way = match self.base.cores[0].lane() {
            Some(_) => self.way()?,
            None => CollectiveBackend::Put,
        };
        if !knows || way == CollectiveBackend::Nccl {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this layer cannot receive rows by zero copy",
            )
            .op("ep")
            .expected(expected)
            .seen(format_args!("{:?} by {way}", d.layout))
            .hint("dispatch into a tensor of your own"));
        }
        let mut direct = self.direct.lock().unwrap_or_else(PoisonError::into_inner);
        if direct.len() >= usize::from(u16::MAX) {
            return Err(Error::new(ErrorKind::Exhausted, "the plan has too many receive buffers")
                .op("ep")
                .hint("use the existing ones in turn: each serves one microbatch at a time"));
        }
        let len = rows * d.hidden * dtype.size();
        let (buf, at) = match given {
            Some((buf, at)) => (buf.clone(), at),
            None => (heap.alloc(len, "ep rows").map_err(|e| e.op("ep"))?, 0),
        };
        // Peers find the buffer by its offset alone.
        let (num, offset) = (direct.len(), buf.range(at, len));
        let place = format_args!("{d} {dtype} {rows} {num} {offset} {}", heap.digest());
        let fp = Fingerprint::new("ep_receive", place);
        heap.team().prepare_agree(&fp).map_err(|e| e.op("ep"))?;
        let known = |addr: u64| match direct.iter().any(|b| b.addr == addr) {
            true => Err(Error::invalid("this memory is a receive buffer already").op("ep")),
            false => Ok(addr),
        };
        if let Some(lane) = self.base.cores[0].lane() {
            let memory = device::whole(lane, &buf)?.slice(at, len)?;
            let addr = known(memory.addr())?;
            direct.push(Direct { addr, host: None, _buf: buf });
            return Tensor::over_cuda(memory, dtype, shape);
        }
        let addr = known(buf.address(heap.team().rank())?.0 + at as u64)?;
        let ptr = std::ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: mapped for reading and writing as long as the buffer lives, which is of this plan
        // alone, or used elsewhere by the contract of `host_zero_copy_recv_in`. Peers write there
        // from the announcement of a launch up to their arrivals, while the launch holds the guard
        // of the memory for writing.
        let memory = unsafe { Memory::lent(ptr, len, std::sync::Arc::new(buf.clone())) };
        let host = Some(Straight { memory: memory.clone(), at: offset });
        direct.push(Direct { addr, host, _buf: buf });
        Tensor::over(memory, 0, dtype, shape)
    }

    /// Returns the number of the plan's receive buffer that `x` is, from 1 on; 0 if it is another
    /// tensor.
    pub(super) fn buffer_of(&self, x: &Tensor) -> Result<u32> {
        let addr = match self.base.cores[0].lane() {
            Some(_) => x.cuda()?.addr(),
            None => x.span().1.start,
        };
        let direct = self.direct.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(direct.iter().position(|b| b.addr == addr).map_or(0, |i| i as u32 + 1))
    }

    /// Returns receive buffer number `buffer` on the host; `None` for 0.
    pub(super) fn straight(&self, buffer: u32) -> Option<Straight> {
        let direct = self.direct.lock().unwrap_or_else(PoisonError::into_inner);
        direct.get((buffer as usize).checked_sub(1)?)?.host.clone()
    }
}
