//! Memory: on the device, and pinned on the host.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use cudarc::driver::sys::{self, CUdeviceptr};
use tilewire_core::{Error, Result};

use super::context::CudaContext;
use super::error::check;
use crate::Buffer;
use crate::queue::check_len;

/// A piece of device memory. Clones and slices share it; it is freed with the last one.
///
/// Freeing may wait for the device's pending work, so a buffer is best kept for many launches.
#[derive(Clone)]
pub struct CudaMemory {
    owner: Arc<Owner>,
    offset: usize,
    len: usize,
}

struct Owner {
    ctx: CudaContext,
    ptr: CUdeviceptr,
    /// The owner of the memory, if it is lent.
    lender: Option<Arc<dyn Any + Send + Sync>>,
}

impl CudaMemory {
    /// `len_bytes` of zeros on `ctx`'s device.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn zeroed(ctx: &CudaContext, len_bytes: usize) -> Result<Self> {
        Self::filled(ctx, len_bytes, 0)
    }

    /// `len_bytes` times `byte` on `ctx`'s device.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn filled(ctx: &CudaContext, len_bytes: usize, byte: u8) -> Result<Self> {
        // First: without it there may not be enough memory.
        ctx.free_retired();
        let _current = ctx.bind()?;
        let (mut ptr, len) = (0, len_bytes.max(1));
        // SAFETY: a context is current and the output is valid.
        let mut alloc = || check(unsafe { sys::cuMemAlloc_v2(&mut ptr, len) }, "cuMemAlloc");
        alloc()
            .or_else(|e| if ctx.free_kept() { alloc() } else { Err(e) })
            .map_err(|e| e.expected(format_args!("{len} bytes")).seen("not enough free memory"))?;
        let owner = Arc::new(Owner { ctx: ctx.clone(), ptr, lender: None });
        let me = Self { owner, offset: 0, len: len_bytes };
        // SAFETY: just allocated, nobody else knows it.
        check(unsafe { sys::cuMemsetD8_v2(ptr, byte, len) }, "cuMemsetD8")?;
        settle()?;
        Ok(me)
    }

    /// A copy of `bytes` on `ctx`'s device.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn from_bytes(ctx: &CudaContext, bytes: &[u8]) -> Result<Self> {
        let me = Self::zeroed(ctx, bytes.len())?;
        me.upload(bytes)?;
        Ok(me)
    }

    /// `len_bytes` at `addr` that belong to `lender`, which is kept as long as the last clone or
    /// slice. They are not freed here.
    ///
    /// # Safety
    /// The bytes must be mapped on `ctx`'s device, for reading and writing, as long as `lender`
    /// lives.
    pub unsafe fn lent(
        ctx: &CudaContext,
        addr: u64,
        len_bytes: usize,
        lender: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let owner = Owner { ctx: ctx.clone(), ptr: addr, lender: Some(lender) };
        Self { owner: Arc::new(owner), offset: 0, len: len_bytes }
    }

    /// Bytes `offset..offset + len` of this piece.
    ///
    /// # Errors
    /// `InvalidArgument` if they reach past its end.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|e| e > self.len) {
            return Err(Error::invalid("the slice reaches beyond the device memory")
                .expected(format_args!("at most {} bytes", self.len))
                .seen(format_args!("{offset}+{len}")));
        }
        Ok(Self { owner: self.owner.clone(), offset: self.offset + offset, len })
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &CudaContext {
        &self.owner.ctx
    }

    /// True if both are pieces of one allocation.
    pub fn same(&self, other: &CudaMemory) -> bool {
        Arc::ptr_eq(&self.owner, &other.owner)
    }

    /// The device address.
    pub fn addr(&self) -> u64 {
        self.owner.ptr + self.offset as u64
    }
}

/// Waits for what the synchronous calls leave to the legacy stream: a memset and a small upload
/// return before they are complete.
pub(super) fn settle() -> Result<()> {
    // SAFETY: a context is current; null is the legacy stream.
    check(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) }, "cuStreamSynchronize")
}

impl Buffer for CudaMemory {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn upload(&self, bytes: &[u8]) -> Result<()> {
        check_len(self.len, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.owner.ctx.bind()?;
        // SAFETY: both sides are `len` bytes long.
        let code = unsafe { sys::cuMemcpyHtoD_v2(self.addr(), bytes.as_ptr().cast(), self.len) };
        check(code, "cuMemcpyHtoD")?;
        settle()
    }

    fn download_into(&self, out: &mut [u8]) -> Result<()> {
        check_len(self.len, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let _current = self.owner.ctx.bind()?;
        // SAFETY: both sides are `len` bytes long.
        let code = unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), self.addr(), self.len) };
        check(code, "cuMemcpyDtoH")
    }
}

impl std::fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMemory({} bytes on device {})", self.len, self.owner.ctx.ordinal())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.lender.is_none()
            && !self.ctx.keeps(self.ptr)
            && let Ok(_current) = self.ctx.bind()
        {
            // SAFETY: allocated by us, freed once; the driver finishes pending work first.
            unsafe { sys::cuMemFree_v2(self.ptr) };
        }
    }
}

/// 64-bit words in pinned host memory that kernels and the host both read and write.
pub struct Pinned {
    ctx: CudaContext,
    host: *mut AtomicU64,
    device: CUdeviceptr,
    num: usize,
}

// SAFETY: the words are only reached as atomics; the pointer never changes.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `num` words of zero.
    ///
    /// # Errors
    /// `Exhausted` if no memory can be pinned.
    pub fn zeroed(ctx: &CudaContext, num: usize) -> Result<Self> {
        let _current = ctx.bind()?;
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: valid output.
        check(unsafe { sys::cuMemHostAlloc(&mut host, num * 8, flags) }, "cuMemHostAlloc")?;
        // SAFETY: `num * 8` bytes were just given to us (page-aligned); nobody else knows them.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, num * 8) };
        // SAFETY: `host` is what the allocation returned.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        let me = Self { ctx: ctx.clone(), host: host.cast(), device, num };
        check(code, "cuMemHostGetDevicePointer")?;
        Ok(me)
    }

    /// Word `i`.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.num, "word {i} of {}", self.num);
        // SAFETY: in range, aligned, alive as long as `self`.
        unsafe { &*self.host.add(i) }
    }

    /// Device address of word 0.
    pub fn addr(&self) -> u64 {
        self.device
    }
}

/// Memory of the host that a device reaches, of somebody else's allocation.
pub struct HostRegistered {
    ctx: CudaContext,
    host: usize,
    device: CUdeviceptr,
}

impl HostRegistered {
    /// Makes `len_bytes` at `host`, whole pages, reachable by the device of `ctx`.
    ///
    /// # Safety
    /// They must stay mapped as long as this value, and nobody may use them as ordinary memory
    /// while the device does: what both use must be atomic, or ordered by what is.
    ///
    /// # Errors
    /// `Exhausted` if no memory can be pinned; what the driver reports.
    pub unsafe fn new(ctx: &CudaContext, host: *mut u8, len_bytes: usize) -> Result<Self> {
        let _current = ctx.bind()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's contract.
        let code = unsafe { sys::cuMemHostRegister_v2(host.cast(), len_bytes, flags) };
        check(code, "cuMemHostRegister")?;
        let mut me = Self { ctx: ctx.clone(), host: host as usize, device: 0 };
        // SAFETY: registered just now; valid output.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut me.device, host.cast(), 0) };
        check(code, "cuMemHostGetDevicePointer")?;
        Ok(me)
    }

    /// Its address on the device.
    pub fn addr(&self) -> u64 {
        self.device
    }
}

impl Drop for HostRegistered {
    /// Waits for the device, whose kernels may still poll there. If that cannot be done it stays
    /// registered.
    fn drop(&mut self) {
        if self.ctx.synchronize().is_err() {
            return;
        }
        if let Ok(_current) = self.ctx.bind() {
            // SAFETY: registered by us, unregistered once.
            unsafe { sys::cuMemHostUnregister(self.host as *mut _) };
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_current) = self.ctx.bind() {
            // SAFETY: allocated by us, freed once; the driver finishes pending work first.
            unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}
