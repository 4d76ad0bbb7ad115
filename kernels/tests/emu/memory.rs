//! Memory that kernels may touch: pieces between pages that nobody can touch.
//!
//! Rust looks at it only through atomic words, because kernels may be writing it.

use std::ffi::{CString, c_int};
use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bytemuck::{NoUninit, Pod};

use crate::host::{RUNTIME, RawRegion, Runtime};

/// Memory of all ranks.
pub const ANY: u32 = u32::MAX;
const PAGE: usize = 4096;

/// Memory of `num` equal pieces, each before a page that cannot be touched.
pub struct Memory {
    runtime: &'static Runtime,
    base: *mut u8,
    names: Vec<CString>,
    rank: u32,
    /// Bytes from the first page to the first byte in use.
    skip: usize,
    len: usize,
    stride: usize,
}

// SAFETY: the memory is shared by nature; Rust touches it only through atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `Memory::make` with these numbers. No run uses it: a run borrows it.
        unsafe { (self.runtime.unmap)(self.base, self.names.len() as u32, self.stride as u64) };
    }
}

impl Memory {
    /// `len` zeroed bytes for `rank`, or for [`ANY`]. Their end, rounded up to 16, is the guard.
    pub fn new(name: &str, rank: u32, len: usize) -> Self {
        let whole = len.max(1).next_multiple_of(PAGE);
        let names = vec![CString::new(name).unwrap()];
        Self::make(names, rank, None, (whole, whole + PAGE), ((whole - len) & !15, len))
    }

    fn make(
        names: Vec<CString>,
        rank: u32,
        fds: Option<&[c_int]>,
        (whole, stride): (usize, usize),
        (skip, len): (usize, usize),
    ) -> Self {
        let runtime = &*RUNTIME;
        let fds = fds.map_or(null(), <[c_int]>::as_ptr);
        // SAFETY: `fds` is null or has as many entries as there are names; lengths are whole pages.
        let base = unsafe { (runtime.map)(fds, names.len() as u32, whole as u64, stride as u64) };
        assert!(!base.is_null(), "no memory for {names:?}");
        Self { runtime, base, names, rank, skip, len, stride }
    }

    /// Address of piece `i`, for kernels.
    pub fn addr_of(&self, i: usize) -> u64 {
        assert!(i < self.names.len());
        self.base as u64 + (i * self.stride + self.skip) as u64
    }

    pub fn addr(&self) -> u64 {
        self.addr_of(0)
    }

    pub fn stride(&self) -> u64 {
        self.stride as u64
    }

    pub fn len_bytes(&self) -> usize {
        self.len
    }

    /// The word at byte `off` of piece `i`.
    pub fn word(&self, i: usize, off: usize) -> &AtomicU64 {
        assert!(
            off.is_multiple_of(8) && off + 8 <= self.len,
            "no such word in {:?}",
            self.names[0]
        );
        // SAFETY: in the mapping, aligned, and nobody holds a reference that is not atomic.
        unsafe { AtomicU64::from_ptr(self.addr_of(i).wrapping_add(off as u64) as *mut u64) }
    }

    pub fn get(&self, i: usize, off: usize) -> u64 {
        self.word(i, off).load(Ordering::Acquire)
    }

    pub fn set(&self, i: usize, off: usize, value: u64) {
        self.word(i, off).store(value, Ordering::Release);
    }

    fn byte(&self, off: usize) -> &AtomicU8 {
        assert!(off < self.len);
        // SAFETY: in the mapping, and nobody holds a reference that is not atomic.
        unsafe { AtomicU8::from_ptr((self.addr() + off as u64) as *mut u8) }
    }

    /// The first piece as numbers.
    pub fn read<T: Pod>(&self) -> Vec<T> {
        let bytes: Vec<u8> = (0..self.len).map(|i| self.byte(i).load(Ordering::Acquire)).collect();
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Overwrites the first piece from its beginning.
    pub fn write<T: NoUninit>(&self, values: &[T]) {
        for (i, b) in bytemuck::cast_slice::<T, u8>(values).iter().enumerate() {
            self.byte(i).store(*b, Ordering::Release);
        }
    }

    /// Which piece `addr` lies in, and where in it.
    pub fn find(&self, addr: u64) -> Option<(usize, usize)> {
        let piece = |i: usize| Some((i, addr.checked_sub(self.addr_of(i))? as usize));
        (0..self.names.len()).filter_map(piece).find(|(_, off)| *off < self.len)
    }
}

/// Pages that several ranks map, each at addresses of its own.
pub struct Pages {
    fds: Vec<c_int>,
    len: usize,
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: opened by `Pages::new`, closed only here; mappings do not need them.
        self.fds.iter().for_each(|fd| unsafe { (RUNTIME.close)(*fd) });
    }
}

impl Pages {
    /// `num` pages of `len` bytes, zeroed.
    pub fn new(num: usize, len: usize) -> Self {
        let len = len.next_multiple_of(PAGE);
        // SAFETY: no pointers are passed.
        let fds: Vec<c_int> = (0..num).map(|_| unsafe { (RUNTIME.memory)(len as u64) }).collect();
        assert!(fds.iter().all(|fd| *fd >= 0), "no memory for {num} pages");
        Self { fds, len }
    }

    /// All pages as `rank` sees them.
    pub fn map(&self, name: &str, rank: u32) -> Memory {
        let names = (0..self.fds.len()).map(|i| CString::new(format!("{name}[{i}]")).unwrap());
        let stride = self.len + PAGE;
        Memory::make(names.collect(), rank, Some(&self.fds), (self.len, stride), (0, self.len))
    }
}

/// More ranks than these share one mapping of all pages: a process may not have so many.
const APART: usize = 16;

impl Pages {
    /// All pages as each rank sees them.
    pub fn views(&self, name: &str) -> Vec<Arc<Memory>> {
        let ranks = 0..self.fds.len() as u32;
        if self.fds.len() <= APART {
            return ranks.map(|r| Arc::new(self.map(name, r))).collect();
        }
        let all = Arc::new(self.map(name, ANY));
        ranks.map(|_| all.clone()).collect()
    }
}

impl Memory {
    pub fn regions(&self) -> impl Iterator<Item = RawRegion> + '_ {
        self.names.iter().enumerate().map(|(i, name)| RawRegion {
            name: name.as_ptr(),
            base: self.addr_of(i),
            len: self.len as u64,
            rank: self.rank,
            pad: 0,
        })
    }
}
