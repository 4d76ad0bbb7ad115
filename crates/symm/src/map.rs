//! Shared mappings: one file per rank, side by side in one reserved range.
//!
//! This is the only file of the host backend with raw pointers. Peer address =
//! `base + rank * stride + offset`.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use tilewire_core::{Error, ErrorKind, Rank, Result, inject};

/// Pages and files are multiples of this.
pub(crate) const PAGE: usize = 4096;

/// Makes an anonymous shared file of `len` bytes (zeros) that can grow but never shrink.
pub(crate) fn shared_file(name: &str, len: usize) -> Result<OwnedFd> {
    let err = |what: &str, e: rustix::io::Errno| {
        let kind = match e {
            rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM => {
                ErrorKind::Exhausted
            }
            _ => ErrorKind::Io,
        };
        let new = Error::new(kind, format!("{what} of {len} bytes of shared memory failed: {e}"))
            .cause(e);
        match e {
            rustix::io::Errno::MFILE => new.hint("`ulimit -n 4096` allows more descriptors"),
            rustix::io::Errno::NFILE => new.hint("raise fs.file-max: the machine is out of files"),
            rustix::io::Errno::FBIG => new.hint(
                "the limit of file sizes counts for shared memory: raise it with `ulimit -f`",
            ),
            _ => new,
        }
    };
    inject::step("creating shared memory")?;
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|e| err("creation", e))?;
    inject::step("sizing shared memory")?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|e| err("sizing", e))?;
    // A peer that shrank its file would turn our reads into SIGBUS.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).map_err(|e| err("sealing", e))?;
    Ok(fd)
}

/// `num` files of `stride` reserved bytes each, mapped side by side.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    stride: usize,
    num: usize,
    /// Bytes mapped so far in each file; grows only.
    len: AtomicUsize,
}

// SAFETY: the mapping is plain shared memory; every access goes through the methods below, which
// are atomic, or copies whose ordering the signal protocol provides.
unsafe impl Send for Mapping {}
// SAFETY: as above; the only field that changes is atomic.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `fds.len() * stride` bytes and maps `len` bytes of each file.
    pub fn new(fds: &[OwnedFd], len: usize, stride: usize) -> Result<Self> {
        assert!(len <= stride && len.is_multiple_of(PAGE) && stride.is_multiple_of(PAGE));
        inject::step("reserving addresses")?;
        let whole = fds.len().checked_mul(stride).ok_or_else(|| {
            let text = format!(
                "a virtual address range of {} x {stride} bytes cannot be represented",
                fds.len()
            );
            Error::new(ErrorKind::Exhausted, text).hint("lower the heap's reserve")
        })?;
        // SAFETY: a fresh anonymous reservation at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                whole.max(PAGE),
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|e| {
            Error::new(
                ErrorKind::Exhausted,
                format!(
                    "a virtual address range of {} x {stride} bytes cannot be reserved: {e}",
                    fds.len()
                ),
            )
            .hint("lower the heap's reserve, or raise the address space limit (ulimit -v)")
        })?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| Error::internal("mmap returned null"))?;
        let map = Self { base, stride, num: fds.len(), len: AtomicUsize::new(0) };
        map.extend(fds, len)?;
        Ok(map)
    }

    /// Maps the files up to `len` bytes. Addresses of bytes that were mapped before do not change.
    pub fn extend(&self, fds: &[OwnedFd], len: usize) -> Result<()> {
        let old = self.len.load(Ordering::Acquire);
        for (i, fd) in fds.iter().enumerate() {
            let stat = rustix::fs::fstat(fd.as_fd())
                .map_err(|e| Error::io("reading the size of a peer's memory", e))?;
            if (stat.st_size as u64) < len as u64 {
                return Err(Error::new(ErrorKind::Protocol, "a peer's shared memory is too small")
                    .peer(Rank::new(i as u32))
                    .expected(len)
                    .seen(stat.st_size));
            }
            if len <= old {
                continue;
            }
            // The length that was just read stays only if nobody can shorten the file: else an
            // access behind its end would be a SIGBUS. `EINVAL` is a file that knows no seals.
            let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
            if !seals.contains(SealFlags::SHRINK) {
                let text = "a peer's shared memory is not sealed against shrinking";
                return Err(Error::new(ErrorKind::Protocol, text).peer(Rank::new(i as u32)));
            }
            inject::step("mapping a peer's memory")?;
            // SAFETY: [base + i*stride + old, + len - old) is inside our own reservation and no one
            // refers to it yet; the file is at least `len` long and sealed against shrinking, as
            // was just checked.
            unsafe {
                rustix::mm::mmap(
                    self.base.as_ptr().add(i * self.stride + old).cast(),
                    len - old,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    fd,
                    old as u64,
                )
            }
            .map_err(|e| Error::io("mapping a peer's memory", e))?;
        }
        self.len.fetch_max(len, Ordering::Release);
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Returns the address at which `rank`'s file is mapped, for registration with a device.
    ///
    /// # Safety
    /// Whoever reads or writes through it keeps to the rules of [`Mapping::write`] and
    /// [`Mapping::read`], and does so only while `self` lives.
    pub unsafe fn ptr(&self, rank: usize) -> *mut u8 {
        self.at(rank, 0, self.len()).as_ptr()
    }

    /// Address in this process of `len` bytes at `offset` of the file of `rank`.
    pub fn address(&self, rank: usize, offset: usize, len: usize) -> u64 {
        self.at(rank, offset, len).as_ptr() as u64
    }

    fn at(&self, rank: usize, offset: usize, len: usize) -> NonNull<u8> {
        let end = offset.checked_add(len);
        assert!(
            rank < self.num && end.is_some_and(|e| e <= self.len()),
            "symmetric access out of range: rank {rank} of {}, bytes {offset}+{len} of {}",
            self.num,
            self.len()
        );
        // SAFETY: within the reservation, as just checked.
        unsafe { self.base.add(rank * self.stride + offset) }
    }

    /// Returns the 64-bit word at `offset` of `rank`'s file.
    pub fn word(&self, rank: usize, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "word at odd offset {offset}");
        // SAFETY: in range, aligned, lives as long as `self`; all accesses to it are atomic.
        unsafe { AtomicU64::from_ptr(self.at(rank, offset, 8).as_ptr().cast()) }
    }

    /// Returns the 32-bit word at `offset` of `rank`'s file.
    pub fn word32(&self, rank: usize, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "word at odd offset {offset}");
        // SAFETY: in range, aligned, lives as long as `self`; all accesses to it are atomic.
        unsafe { AtomicU32::from_ptr(self.at(rank, offset, 4).as_ptr().cast()) }
    }

    /// Copies `src` to `offset` of `rank`'s file.
    pub fn write(&self, rank: usize, offset: usize, src: &[u8]) {
        let dst = self.at(rank, offset, src.len());
        // SAFETY: `dst` is valid for `src.len()` bytes; `src` may be symmetric memory as well, so
        // that this is a copy which allows overlap. No rank reads the bytes until the signal that
        // follows (invariant 3), and no other rank writes them (one writer per region,
        // credit-gated).
        unsafe { std::ptr::copy(src.as_ptr(), dst.as_ptr(), src.len()) }
    }

    /// Copies from `offset` of `rank`'s file.
    pub fn read(&self, rank: usize, offset: usize, dst: &mut [u8]) {
        let src = self.at(rank, offset, dst.len());
        // SAFETY: valid for `dst.len()` bytes; `dst` may be symmetric memory as well. The writer
        // released a signal after its last write and gets no credit before we are done (invariant
        // 3).
        unsafe { std::ptr::copy(src.as_ptr(), dst.as_mut_ptr(), dst.len()) }
    }

    /// Returns the bytes at `offset` of `rank`'s file, in place.
    ///
    /// # Safety
    /// No rank may write them while the slice lives: their writers have signalled, and have no
    /// credit to write again.
    pub unsafe fn slice(&self, rank: usize, offset: usize, len: usize) -> &[u8] {
        // SAFETY: in range and initialised (files start as zeros); no writer, by contract.
        unsafe { std::slice::from_raw_parts(self.at(rank, offset, len).as_ptr(), len) }
    }

    /// Takes away every right to the files of ranks other than `me`: an access is a SIGSEGV.
    pub fn forbid_peers(&self, me: usize) -> Result<()> {
        for rank in (0..self.num).filter(|&r| r != me) {
            // SAFETY: a range of our own reservation, which nothing borrows: peers' bytes are only
            // copied. An access that would follow is the error that this is to show.
            unsafe {
                rustix::mm::mprotect(
                    self.base.as_ptr().add(rank * self.stride).cast(),
                    self.len(),
                    rustix::mm::MprotectFlags::empty(),
                )
            }
            .map_err(|e| Error::io("revoking access to a peer's memory", e))?;
        }
        Ok(())
    }

    /// Fills `len` bytes at `offset` of `rank`'s file.
    pub fn fill(&self, rank: usize, offset: usize, len: usize, byte: u8) {
        // SAFETY: in range; as for `write`.
        unsafe { std::ptr::write_bytes(self.at(rank, offset, len).as_ptr(), byte, len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own reservation; no reference to it outlives `self`.
        let unmapped = unsafe {
            rustix::mm::munmap(self.base.as_ptr().cast(), (self.num * self.stride).max(PAGE))
        };
        debug_assert!(unmapped.is_ok(), "munmap of our own range failed: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_share_bytes_and_grow() {
        let (a, b) = (shared_file("a", PAGE).unwrap(), shared_file("b", PAGE).unwrap());
        let dup = |f: &OwnedFd| f.try_clone().unwrap();
        let x = Mapping::new(&[dup(&a), dup(&b)], PAGE, 4 * PAGE).unwrap();
        let y = Mapping::new(&[dup(&a), dup(&b)], PAGE, 4 * PAGE).unwrap();
        x.write(1, 100, b"tiles");
        let mut got = [0; 5];
        y.read(1, 100, &mut got);
        assert_eq!(&got, b"tiles");
        x.word(0, 8).store(7, Ordering::Relaxed);
        assert_eq!(y.word(0, 8).load(Ordering::Relaxed), 7);

        assert!(x.extend(&[dup(&a), dup(&b)], 2 * PAGE).is_err(), "files were not grown yet");
        for f in [&a, &b] {
            rustix::fs::ftruncate(f, 2 * PAGE as u64).unwrap();
        }
        x.extend(&[dup(&a), dup(&b)], 2 * PAGE).unwrap();
        x.fill(1, PAGE, PAGE, 3);
        y.read(1, 100, &mut got);
        assert_eq!(&got, b"tiles");
        assert!(rustix::fs::ftruncate(&a, 0).is_err(), "sealed against shrinking");
    }

    /// A file that its owner could shorten after its length was read.
    #[test]
    fn a_file_that_is_not_sealed_is_refused() {
        let good = shared_file("good", PAGE).unwrap();
        let open =
            rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let open = open.unwrap();
        rustix::fs::ftruncate(&open, PAGE as u64).unwrap();
        let plain = OwnedFd::from(tempfile::tempfile().unwrap());
        rustix::fs::ftruncate(&plain, PAGE as u64).unwrap();
        for bad in [open, plain] {
            let files = [good.try_clone().unwrap(), bad];
            let e = Mapping::new(&files, PAGE, PAGE).err().unwrap();
            assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Protocol, Some(Rank::new(1))), "{e}");
        }
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn access_past_the_end_panics() {
        let f = shared_file("a", PAGE).unwrap();
        Mapping::new(&[f], PAGE, PAGE).unwrap().fill(0, PAGE - 4, 8, 0);
    }
}
