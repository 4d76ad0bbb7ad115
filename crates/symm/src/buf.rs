//! Buffers of a heap.

use std::sync::{Arc, Mutex};

use tilewire_core::{DType, Error, ErrorKind, Rank, Result, Shape};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Device, Memory, Tensor};

use crate::heap::Heap;
use crate::team::lock;

/// Returns true once the work that uses dropped space has ended.
pub(crate) type Ended = Arc<dyn Fn() -> bool + Send + Sync>;

/// Space that its owner has dropped. `ended` says whether work still uses it; without `ended` it is
/// unused at once.
#[derive(Clone)]
pub(crate) struct Dropped {
    pub at: usize,
    pub len: usize,
    pub ended: Option<Ended>,
}

/// Returns the dropped spaces that are not in use any more, in order. The caller must not hold the
/// lock of the list: this asks the driver, which may at the same time drop a graph's resources
/// under a lock of its own, and so want the list.
pub(crate) fn unused(dropped: Vec<Dropped>) -> Vec<(usize, usize)> {
    let ended = |d: &&Dropped| d.ended.as_ref().is_none_or(|f| f());
    let mut found: Vec<_> = dropped.iter().filter(ended).map(|d| (d.at, d.len)).collect();
    found.sort_unstable();
    found
}

/// Removes the spaces from the list that all ranks agree on. The caller drops the result after it
/// has released its lock, for the same reason.
pub(crate) fn take(dropped: &mut Vec<Dropped>, agreed: &[(usize, usize)]) -> Vec<Dropped> {
    let is_agreed = |d: &Dropped| agreed.contains(&(d.at, d.len));
    let (gone, kept) = std::mem::take(dropped).into_iter().partition(is_agreed);
    *dropped = kept;
    gone
}

struct BufInner {
    heap: Heap,
    offset: usize,
    len_bytes: usize,
    ended: Mutex<Option<Ended>>,
}

/// A buffer at the same offset of every rank's chunk. Dropping it only marks the space: it
/// returns at the collective [`Heap::collect`].
#[derive(Clone)]
pub struct SymBuf(Arc<BufInner>);

impl SymBuf {
    pub(crate) fn new(heap: &Heap, offset: usize, len_bytes: usize) -> Self {
        let ended = Mutex::default();
        Self(Arc::new(BufInner { heap: heap.clone(), offset, len_bytes, ended }))
    }

    /// Keeps the buffer for work that refers to it by address alone: once the buffer is dropped,
    /// [`Heap::collect`] leaves it until `ended` returns true. The last call replaces earlier ones.
    pub fn keep_until(&self, ended: impl Fn() -> bool + Send + Sync + 'static) {
        *lock(&self.0.ended) = Some(Arc::new(ended));
    }

    /// Returns the offset in the heap, in bytes.
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// Returns the offset in the heap of byte `at` of the buffer.
    ///
    /// # Panics
    /// If `at + len` reaches past the buffer: the schedule is wrong.
    pub fn range(&self, at: usize, len: usize) -> usize {
        assert!(
            at.checked_add(len).is_some_and(|e| e <= self.0.len_bytes),
            "bytes {at}+{len} of a symmetric buffer of {}",
            self.0.len_bytes
        );
        self.0.offset + at
    }

    /// Returns address and length in bytes of `rank`'s part: on this rank's device, or in this
    /// process for a heap of the host. The address is valid as long as a clone of the buffer lives.
    /// Programs may load and store there by plain instructions, ordered between ranks by signals or
    /// a barrier. A part of the host is no `Tensor`, so nothing guards it against operations that
    /// use the buffer at the same time.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that the team does not have; `Unsupported` for a peer's part on
    /// GPUs that do not reach each other.
    pub fn address(&self, rank: Rank) -> Result<(u64, usize)> {
        let (heap, len) = (&self.0.heap, self.0.len_bytes);
        heap.address(rank, self.0.offset, len).map(|at| (at, len)).map_err(|e| e.op("symbuf"))
    }

    /// Returns the bytes from each rank's part to the next rank's; addresses wrap.
    ///
    /// # Errors
    /// `Unsupported` if GPUs do not reach each other, or parts are not in even steps (more than two
    /// ranks of the backend `nvshmem`).
    pub fn stride(&self) -> Result<u64> {
        self.0.heap.stride().map_err(|e| e.op("symbuf"))
    }

    /// Returns the first bytes of this rank's own part as a tensor on this rank's device, which
    /// keeps the buffer's memory.
    ///
    /// # Errors
    /// As [`SymBuf::peer_tensor`].
    pub fn tensor(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        self.peer_tensor(self.0.heap.team().rank(), dtype, shape)
    }

    /// Returns the first bytes of `rank`'s part as a tensor on this rank's device, which keeps the
    /// buffer's memory. Order its use with that of other ranks by signals or a barrier. Plans do
    /// not take it as an argument that they share.
    ///
    /// # Errors
    /// `InvalidArgument` if it does not fit the buffer; `Unsupported` on heaps of the host, whose
    /// memory other processes write; otherwise as [`SymBuf::address`].
    pub fn peer_tensor(&self, rank: Rank, dtype: DType, shape: Shape) -> Result<Tensor> {
        let Device::Cuda(ctx) = self.0.heap.device() else {
            let text = "symmetric memory of the host cannot back a tensor";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .op("symbuf")
                .hint("use a `Transport`, or `SymBuf::host_tensor`, which is unsafe"));
        };
        let (addr, len) = self.address(rank)?;
        // SAFETY: the heap has mapped these bytes of the rank's part on the device of `ctx`, for
        // reading and writing; the buffer, which is the lender, keeps the heap.
        let memory = unsafe { CudaMemory::lent(&ctx, addr, len, Arc::new(self.clone())) };
        Tensor::over_cuda(memory, dtype, shape).map_err(|e| e.op("symbuf"))
    }

    /// Returns the first bytes of `rank`'s part as a tensor of the host, which keeps the buffer's
    /// memory: [`SymBuf::peer_tensor`] of heaps of the host.
    ///
    /// # Errors
    /// `InvalidArgument` if it does not fit the buffer; `Unsupported` on heaps of devices;
    /// otherwise as [`SymBuf::address`].
    ///
    /// # Safety
    /// While a guard or queued work uses the tensor, no other rank and no transport writes these
    /// bytes, and none reads what this use writes: signals or a barrier order them.
    pub unsafe fn host_tensor(&self, rank: Rank, dtype: DType, shape: Shape) -> Result<Tensor> {
        if !matches!(self.0.heap.device(), Device::Host) {
            let text = "symmetric memory of a device cannot back a tensor of the host";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .op("symbuf")
                .hint("use `SymBuf::tensor` or `SymBuf::peer_tensor`"));
        }
        let (addr, len) = self.address(rank)?;
        let ptr = std::ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: the heap has mapped these bytes in this process, for reading and writing; the
        // buffer, which is the lender, keeps the heap. The rest is the caller's contract.
        let memory = unsafe { Memory::lent(ptr, len, Arc::new(self.clone())) };
        Tensor::over(memory, 0, dtype, shape).map_err(|e| e.op("symbuf"))
    }

    /// Returns the first bytes of all ranks' parts as one strided array `[ranks, shape...]`.
    ///
    /// # Errors
    /// As [`SymBuf::address`] and [`SymBuf::stride`]; `InvalidArgument` if a part does not fit the
    /// buffer.
    pub fn all_ranks(&self, dtype: DType, shape: Shape) -> Result<AllRanks> {
        let need = shape.num_elems().saturating_mul(dtype.size());
        if need > self.0.len_bytes {
            return Err(Error::invalid(format!(
                "a {dtype} tensor of shape {shape} does not fit the symmetric buffer"
            ))
            .op("symbuf")
            .expected(format_args!("at most {} bytes", self.0.len_bytes))
            .seen(need));
        }
        let (stride_bytes, (address, _)) = (self.stride()?, self.address(Rank::new(0))?);
        let num_ranks = self.0.heap.team().size();
        Ok(AllRanks { address, stride_bytes, num_ranks, dtype, shape, buf: self.clone() })
    }

    /// Returns the heap of the buffer.
    pub fn heap(&self) -> &Heap {
        &self.0.heap
    }

    /// Checks that the buffer belongs to `heap` and not to that of an earlier team.
    ///
    /// # Errors
    /// `Stale` otherwise.
    pub fn check_heap(&self, heap: &Heap) -> Result<()> {
        if self.0.heap.same(heap) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Stale, "a symmetric buffer of another heap was given")
            .expected(format_args!(
                "team {} generation {}",
                heap.team().name(),
                heap.team().generation()
            ))
            .seen(format_args!(
                "team {} generation {}",
                self.0.heap.team().name(),
                self.0.heap.team().generation()
            ))
            .hint("buffers do not outlive their team: allocate again after re-forming it"))
    }
}

/// The parts of all ranks as one strided array: the part of rank `r` is at `address + r *
/// stride_bytes`, which wraps. It keeps the buffer.
#[derive(Clone, Debug)]
pub struct AllRanks {
    /// Address of rank 0's part: on this rank's device, or in this process for a heap of the host.
    pub address: u64,
    /// Bytes from each rank's part to the next one's.
    pub stride_bytes: u64,
    /// Ranks of the team.
    pub num_ranks: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// Shape of one rank's part.
    pub shape: Shape,
    buf: SymBuf,
}

impl AllRanks {
    /// Returns the buffer of the array.
    pub fn buf(&self) -> &SymBuf {
        &self.buf
    }
}

impl std::fmt::Debug for SymBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SymBuf({}+{})", self.0.offset, self.0.len_bytes)
    }
}

impl Drop for BufInner {
    fn drop(&mut self) {
        let ended = lock(&self.ended).take();
        self.heap.note_dropped(Dropped { at: self.offset, len: self.len_bytes, ended });
    }
}
