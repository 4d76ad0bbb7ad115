//! Virtual memory: physical chunks that travel as descriptors, and flat ranges they are mapped to.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tilewire_core::{Error, ErrorKind, Rank, Result};

use super::context::CudaContext;
use super::error::check;
use super::memory::settle;
use super::probe::try_share;

/// The way in which physical memory travels to other processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShareBy {
    /// As 64 bytes that any process of the NVLink domain can import, also on other hosts. Needs an
    /// IMEX channel: see [`fabric_handles`].
    Fabric,
    /// As a file descriptor, on one host.
    Fd,
}

impl ShareBy {
    fn raw(self) -> CUmemAllocationHandleType {
        match self {
            ShareBy::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
            ShareBy::Fd => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        }
    }
}

/// The bytes of a fabric handle.
pub type FabricHandle = [u8; 64];

/// The folder in which the driver shows the IMEX channels that this process may use.
const CHANNELS: &str = "/dev/nvidia-caps-imex-channels";

/// Fails, with the reason, where memory of `ctx`'s device cannot travel as fabric handles. Done
/// once for a device, by exporting memory and importing it again.
///
/// # Errors
/// `Unsupported` if the device has none; `Unavailable` without an IMEX channel; the step that
/// failed.
pub fn fabric_handles(ctx: &CudaContext) -> Result<()> {
    static KNOWN: Mutex<Vec<(u32, Result<()>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, found)) = known.iter().find(|k| k.0 == ctx.ordinal()) {
        return found.clone();
    }
    let found = has_fabric(ctx.info()?.fabric, Path::new(CHANNELS))
        .and_then(|()| try_share(ctx, ctx, ShareBy::Fabric));
    known.push((ctx.ordinal(), found.clone()));
    found
}

/// Returns what can be known without trying.
fn has_fabric(supported: bool, channels: &Path) -> Result<()> {
    if !supported {
        let text = "the device does not support fabric handles";
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let is_channel = |name: OsString| name.to_string_lossy().starts_with("channel");
    let mut names = std::fs::read_dir(channels).into_iter().flatten().flatten();
    if names.any(|e| is_channel(e.file_name())) {
        return Ok(());
    }
    let text = format!("there is no IMEX channel in {}", channels.display());
    Err(Error::new(ErrorKind::Unavailable, text)
        .hint("start nvidia-imex and make a channel (`nvidia-modprobe -i 0`); one host needs none"))
}

/// Fewer free descriptors than this may be too few: a context takes several, and gives them back
/// when it fails.
const FEW: u64 = 32;

fn most_descriptors() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns how many descriptors this process could open now; why not one.
pub(super) fn free_descriptors() -> rustix::io::Result<u64> {
    rustix::fs::memfd_create("probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    // One of those listed is the list's own.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |list| list.count().saturating_sub(1));
    Ok(most_descriptors().saturating_sub(open as u64))
}

/// Returns what the driver says of a descriptor that it could not open is one of its general
/// errors: the real reason, where counting those that are free shows it.
pub(super) fn explain(e: Error, free: rustix::io::Result<u64>) -> Error {
    let limit = most_descriptors();
    // Each rank of a heap sends one, and the most ranks are 64.
    let more = format!("`ulimit -n {}`", limit.saturating_add(64).max(4096));
    let (what, seen, hint) = match free {
        Err(Errno::MFILE) => {
            ("no file descriptor is", format!("all of this process (limit {limit}) are open"), more)
        }
        Ok(n) if n < FEW && e.kind() == ErrorKind::Internal => (
            "few file descriptors are",
            format!("{n} of this process (limit {limit}) are left"),
            more,
        ),
        Err(Errno::NFILE) => (
            "no file descriptor is",
            "all of this machine are open".to_owned(),
            "raise `sysctl fs.file-max`".to_owned(),
        ),
        _ => return e,
    };
    Error::new(ErrorKind::Exhausted, format!("{what} free: {}", e.message()))
        .expected("more open files")
        .seen(seen)
        .hint(format!("{hint}: the driver takes some for each device, and a heap one for each rank while it is made"))
        .cause(e)
}

fn location(ctx: &CudaContext) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ctx.device(),
    }
}

fn properties(ctx: &CudaContext, by: ShareBy) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: by.raw(),
        location: location(ctx),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Returns what chunk lengths and strides must be multiples of, in bytes.
///
/// # Errors
/// What the driver reports.
pub fn granularity(ctx: &CudaContext) -> Result<usize> {
    let _current = ctx.bind()?;
    let mut g = 0;
    let how = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: valid output and properties.
    let code =
        unsafe { sys::cuMemGetAllocationGranularity(&mut g, &properties(ctx, ShareBy::Fd), how) };
    check(code, "cuMemGetAllocationGranularity")?;
    Ok(g.max(1))
}

/// Physical memory of one device; its contents are undefined at first.
///
/// The memory lives as long as any chunk or range of any process refers to it.
pub struct VmmChunk {
    pub(super) ctx: CudaContext,
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    pub(super) len: usize,
}

impl VmmChunk {
    /// `len_bytes` (a multiple of [`granularity`]) on `ctx`'s device, to be shared in one way.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory; `Unsupported` if it cannot be shared.
    pub fn create(ctx: &CudaContext, len_bytes: usize, by: ShareBy) -> Result<Self> {
        // First: without it there may not be enough memory.
        ctx.free_retired();
        let _current = ctx.bind()?;
        let mut handle = 0;
        // SAFETY: valid output and properties.
        let mut create =
            || unsafe { sys::cuMemCreate(&mut handle, len_bytes, &properties(ctx, by), 0) };
        check(create(), "cuMemCreate")
            .or_else(|e| if ctx.free_kept() { check(create(), "cuMemCreate") } else { Err(e) })?;
        Ok(Self { ctx: ctx.clone(), handle, len: len_bytes })
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// A descriptor by which another process, or rank, can import the chunk.
    ///
    /// # Errors
    /// `Exhausted` if no descriptor is free.
    pub fn export(&self) -> Result<OwnedFd> {
        let _current = self.ctx.bind()?;
        let mut fd: i32 = -1;
        // SAFETY: for this handle type the output is an `int`.
        let code = unsafe {
            sys::cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                self.handle,
                ShareBy::Fd.raw(),
                0,
            )
        };
        check(code, "cuMemExportToShareableHandle").map_err(|e| {
            let e = explain(e, free_descriptors());
            if e.kind() == ErrorKind::Exhausted {
                return e;
            }
            e.hint(
                "this process may not share device memory: start the container with `--gpus all` and the whole GPU \
                 (no vGPU), see `tilewire doctor`, or use the `host` backend",
            )
        })?;
        // SAFETY: the driver has just opened it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Programs that this one starts have no business with it.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| Error::io("marking the descriptor of device memory", e))?;
        Ok(fd)
    }

    /// The chunk behind a peer's descriptor.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not one of ours; `Permission` if the driver refuses; `Exhausted`
    /// if no descriptor is free.
    pub fn import(ctx: &CudaContext, fd: &OwnedFd, len_bytes: usize) -> Result<Self> {
        let _current = ctx.bind()?;
        let mut handle = 0;
        // For this handle type the "pointer" is the descriptor itself.
        let os = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: valid output; the driver duplicates what it keeps of the descriptor.
        let code =
            unsafe { sys::cuMemImportFromShareableHandle(&mut handle, os, ShareBy::Fd.raw()) };
        check(code, "cuMemImportFromShareableHandle").map_err(|e| {
            let e = explain(e, free_descriptors());
            if e.kind() == ErrorKind::Exhausted {
                return e;
            }
            e.hint(
                "is the peer's GPU visible in this container, and may this process share memory with it? Start all \
                 ranks in one container with `--gpus all`; `nvidia-smi topo -p2p rw` shows the GPUs that reach \
                 each other, CUDA_VISIBLE_DEVICES chooses them",
            )
        })?;
        Ok(Self { ctx: ctx.clone(), handle, len: len_bytes })
    }

    /// Bytes by which a process of the NVLink domain can import the chunk: of one made for
    /// [`ShareBy::Fabric`].
    ///
    /// # Errors
    /// What the driver reports.
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        let _current = self.ctx.bind()?;
        let mut out = sys::CUmemFabricHandle { data: [0; 64] };
        let kind = ShareBy::Fabric.raw();
        // SAFETY: for this handle type the output is the 64 bytes.
        let code = unsafe {
            sys::cuMemExportToShareableHandle((&raw mut out).cast(), self.handle, kind, 0)
        };
        check(code, "cuMemExportToShareableHandle")?;
        Ok(out.data)
    }

    /// The chunk behind a peer's fabric handle.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not one; what the driver reports.
    pub fn import_fabric(
        ctx: &CudaContext,
        handle: &FabricHandle,
        len_bytes: usize,
    ) -> Result<Self> {
        let _current = ctx.bind()?;
        let (mut data, mut out) = (sys::CUmemFabricHandle { data: *handle }, 0);
        let os = (&raw mut data).cast();
        // SAFETY: valid output; for this handle type the pointer is to the 64 bytes.
        let code =
            unsafe { sys::cuMemImportFromShareableHandle(&mut out, os, ShareBy::Fabric.raw()) };
        check(code, "cuMemImportFromShareableHandle")
            .map_err(|e| e.hint("the ranks must be of one NVLink domain and IMEX channel"))?;
        Ok(Self { ctx: ctx.clone(), handle: out, len: len_bytes })
    }
}

impl Drop for VmmChunk {
    fn drop(&mut self) {
        if let Ok(_current) = self.ctx.bind() {
            // SAFETY: created or imported by us, released once; mappings keep the memory.
            unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

/// One reserved range with memory of each rank: address = base + rank * stride + offset.
pub struct VmmRange {
    ctx: CudaContext,
    base: CUdeviceptr,
    stride: usize,
    num: usize,
    /// The one rank that has memory here, where the others' cannot be reached.
    only: Option<usize>,
    /// Lengths of the chunks of each rank, one behind the other.
    parts: Mutex<Vec<usize>>,
    /// Their sum.
    len: AtomicUsize,
}

impl VmmRange {
    /// Maps `chunks`, equally long, side by side, readable and writable by `ctx`'s device. The
    /// range keeps the memory alive; the chunks may be dropped. It can be extended up to `stride`.
    ///
    /// # Errors
    /// `InvalidArgument` for unequal chunks or a stride that is too small; `Exhausted` if there is
    /// no address range.
    pub fn map(ctx: &CudaContext, chunks: &[&VmmChunk], stride: usize) -> Result<Self> {
        Self::map_some(ctx, chunks, stride, None)
    }

    /// As [`VmmRange::map`] of `num` equal chunks, of which only that of rank `me` is there: the
    /// others' addresses are refused.
    ///
    /// # Errors
    /// As [`VmmRange::map`].
    pub fn map_own(
        ctx: &CudaContext,
        (me, num): (Rank, usize),
        own: &VmmChunk,
        stride: usize,
    ) -> Result<Self> {
        Self::map_some(ctx, &vec![own; num], stride, Some(me.idx()))
    }

    fn map_some(
        ctx: &CudaContext,
        chunks: &[&VmmChunk],
        stride: usize,
        only: Option<usize>,
    ) -> Result<Self> {
        let total = chunks.len().checked_mul(stride).filter(|t| *t > 0).ok_or_else(|| {
            let text = "a virtual address range of this length cannot be represented";
            Error::new(ErrorKind::Exhausted, text)
                .seen(format_args!("{} chunks, {stride} bytes apart", chunks.len()))
                .hint("reserve fewer bytes for each chunk")
        })?;
        let _current = ctx.bind()?;
        let mut base = 0;
        // SAFETY: valid output; no wish for an address.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, total, 0, 0, 0) };
        check(code, "cuMemAddressReserve")?;
        let (parts, len) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
        let me = Self { ctx: ctx.clone(), base, stride, num: chunks.len(), only, parts, len };
        me.extend(chunks)?;
        Ok(me)
    }

    /// Maps `chunks`, equally long, one behind what is mapped of each rank. Addresses do not
    /// change. All of them, or none.
    ///
    /// # Errors
    /// As [`VmmRange::map`].
    pub fn extend(&self, chunks: &[&VmmChunk]) -> Result<()> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let (old, more) = (self.len_bytes(), chunks.first().map_or(0, |c| c.len));
        let fits = more > 0 && old.checked_add(more).is_some_and(|len| len <= self.stride);
        if !fits || chunks.len() != self.num || chunks.iter().any(|c| c.len != more) {
            return Err(Error::invalid(
                "chunks must be one for each rank, equally long, and fit into the stride",
            ));
        }
        let _current = self.ctx.bind()?;
        for (i, chunk) in chunks.iter().enumerate().filter(|c| self.has(c.0)) {
            if let Err(e) = self.map_one(chunk, i * self.stride + old) {
                self.unmap(i, (old, more));
                return Err(e.peer(Rank::new(i as u32)));
            }
        }
        parts.push(more);
        self.len.store(old + more, Ordering::Release);
        Ok(())
    }

    /// Undoes the last [`VmmRange::extend`], whose memory nobody may use.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn take_back(&self) -> Result<()> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let _current = self.ctx.bind()?;
        if let Some(len) = parts.pop() {
            let old = self.len_bytes() - len;
            self.len.store(old, Ordering::Release);
            self.unmap(self.num, (old, len));
        }
        Ok(())
    }

    /// Returns whether there is memory of rank `i`.
    fn has(&self, i: usize) -> bool {
        self.only.is_none_or(|only| only == i)
    }

    fn map_one(&self, chunk: &VmmChunk, offset: usize) -> Result<()> {
        let at = self.base + offset as u64;
        // SAFETY: inside our own reservation, where nothing is mapped yet.
        check(unsafe { sys::cuMemMap(at, chunk.len, 0, chunk.handle, 0) }, "cuMemMap")?;
        let access = sys::CUmemAccessDesc {
            location: location(&self.ctx),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: mapped just now; one valid descriptor.
        let code = unsafe { sys::cuMemSetAccess(at, chunk.len, &access, 1) };
        check(code, "cuMemSetAccess").map_err(|e| {
            // SAFETY: mapped just now, and nobody knows of it.
            unsafe { sys::cuMemUnmap(at, chunk.len) };
            match e.kind() {
                ErrorKind::Exhausted => e,
                _ => e.hint(
                    "can these GPUs reach each other? `nvidia-smi topo -p2p rw` shows it: choose others with \
                     CUDA_VISIBLE_DEVICES, or switch off the IOMMU or ACS for GPUs on PCIe",
                ),
            }
        })
    }

    /// Bytes `[offset, offset + len)` of the first `num` ranks; a context must be current.
    fn unmap(&self, num: usize, (offset, len): (usize, usize)) {
        for i in (0..num).filter(|i| self.has(*i)) {
            // SAFETY: mapped by us as one, unmapped once, and no work of this device is left that
            // knows of it.
            unsafe { sys::cuMemUnmap(self.base + (i * self.stride + offset) as u64, len) };
        }
    }

    /// Bytes of each rank that are mapped.
    pub fn len_bytes(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Device address of rank 0's chunk.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes from one rank's chunk to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Device address of `len` bytes at `offset` of `rank`'s chunk.
    ///
    /// # Errors
    /// `InvalidArgument` if they lie outside of it; `Unsupported` if it cannot be reached from
    /// here.
    pub fn addr(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        if rank.idx() >= self.num || offset.checked_add(len).is_none_or(|e| e > self.len_bytes()) {
            return Err(Error::invalid("the access reaches beyond the symmetric memory")
                .peer(rank)
                .expected(format_args!("{} ranks of {} bytes", self.num, self.len_bytes()))
                .seen(format_args!("{offset}+{len}")));
        }
        if !self.has(rank.idx()) {
            // Whose team it is names the rank: here only its place in the range is known.
            let text = "this GPU does not reach the peer's memory";
            return Err(Error::new(ErrorKind::Unsupported, text).peer(rank).hint(
                "operations through NCCL need no such access (`sequential_nccl`, `CollectiveBackend::Nccl`); \
                 `tilewire topo` shows which GPUs reach each other",
            ));
        }
        Ok(self.base + (rank.idx() * self.stride + offset) as u64)
    }

    /// Fills `rank`'s chunk with zeros, at once.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn zero(&self, rank: Rank) -> Result<()> {
        let len = self.len_bytes();
        let at = self.addr(rank, 0, len)?;
        let _current = self.ctx.bind()?;
        // SAFETY: `len` mapped bytes.
        check(unsafe { sys::cuMemsetD8_v2(at, 0, len) }, "cuMemsetD8")?;
        settle()
    }

    /// Copies bytes at `offset` of `rank`'s chunk out, at once.
    ///
    /// # Errors
    /// `InvalidArgument` if they lie outside of it.
    pub fn read(&self, rank: Rank, offset: usize, out: &mut [u8]) -> Result<()> {
        let at = self.addr(rank, offset, out.len())?;
        let _current = self.ctx.bind()?;
        // SAFETY: `out.len()` mapped bytes on one side, `out` on the other.
        let code = unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), at, out.len()) };
        check(code, "cuMemcpyDtoH")
    }

    /// Copies `bytes` to `offset` of `rank`'s chunk, at once.
    ///
    /// # Errors
    /// `InvalidArgument` if they lie outside of it.
    pub fn write(&self, rank: Rank, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = self.addr(rank, offset, bytes.len())?;
        let _current = self.ctx.bind()?;
        // SAFETY: as for `read`.
        let code = unsafe { sys::cuMemcpyHtoD_v2(at, bytes.as_ptr().cast(), bytes.len()) };
        check(code, "cuMemcpyHtoD")?;
        settle()
    }
}

impl Drop for VmmRange {
    fn drop(&mut self) {
        // Kernels of this device may still poll; every wait ends by itself.
        if let Err(e) = self.ctx.synchronize() {
            // A lost device frees its memory with the process, and one that cannot be waited for
            // may still use it.
            if e.kind() != ErrorKind::DeviceLost {
                log::warn!("symmetric memory is leaked: its device cannot be waited for: {e}");
            }
            return;
        }
        let _current = self.ctx.bind();
        let mut offset = 0;
        for len in self.parts.get_mut().unwrap_or_else(PoisonError::into_inner).split_off(0) {
            self.unmap(self.num, (offset, len));
            offset += len;
        }
        // SAFETY: reserved by us, nothing is mapped in it any more.
        unsafe { sys::cuMemAddressFree(self.base, self.num * self.stride) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fabric_handles_need_a_device_and_a_channel() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |supported, path: &Path| has_fabric(supported, path).map_err(|e| e.kind());
        assert_eq!(kind(false, dir.path()), Err(ErrorKind::Unsupported));
        assert_eq!(kind(true, &dir.path().join("none")), Err(ErrorKind::Unavailable));
        std::fs::write(dir.path().join("other"), "").unwrap();
        let e = has_fabric(true, dir.path()).unwrap_err();
        assert!(e.kind() == ErrorKind::Unavailable && e.get_hint().is_some(), "{e}");
        std::fs::write(dir.path().join("channel0"), "").unwrap();
        kind(true, dir.path()).unwrap();
    }

    #[test]
    fn a_driver_without_a_descriptor_is_told_from_other_errors() {
        let driver = || Error::internal("cuMemExportToShareableHandle: OS call failed");
        for other in [Ok(FEW), Err(Errno::NOMEM)] {
            assert_eq!(explain(driver(), other).kind(), ErrorKind::Internal);
        }
        // A context gives back what it opened when it fails; what has a reason of its own keeps
        // that.
        let e = explain(driver(), Ok(16));
        assert!(e.kind() == ErrorKind::Exhausted && e.to_string().contains("16 of this"), "{e}");
        assert!(e.get_hint().is_some_and(|h| h.contains("ulimit -n")), "{e}");
        let old = Error::new(ErrorKind::Unavailable, "the driver is too old");
        assert_eq!(explain(old, Ok(16)).kind(), ErrorKind::Unavailable);
        for (errno, hint) in [(Errno::MFILE, "ulimit -n"), (Errno::NFILE, "fs.file-max")] {
            let e = explain(driver(), Err(errno));
            assert_eq!(e.kind(), ErrorKind::Exhausted, "{e}");
            assert!(e.message().contains("OS call failed"), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains(hint)), "{e}");
        }
    }

    /// In a process of its own, as the limit is one of the process.
    #[test]
    fn a_limit_that_is_reached_is_seen() {
        const NAME: &str = "cuda::vmm::tests::a_limit_that_is_reached_is_seen";
        if std::env::var_os("FEW_DESCRIPTORS").is_none() {
            free_descriptors().unwrap();
            let mut sh = std::process::Command::new("sh");
            sh.args(["-c", "ulimit -n 32; exec \"$0\" --exact \"$1\""]);
            sh.arg(std::env::current_exe().unwrap()).arg(NAME).env("FEW_DESCRIPTORS", "1");
            let out = sh.output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let all: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert!(!all.is_empty() && all.len() < 32);
        let (tried, e) = (free_descriptors(), explain(Error::internal("x"), free_descriptors()));
        drop(all);
        assert_eq!(tried, Err(Errno::MFILE));
        let said = e.to_string();
        assert!(said.contains("limit 32") && said.contains("ulimit -n 4096"), "{said}");
        assert!(free_descriptors().unwrap() < 32);
    }
}
