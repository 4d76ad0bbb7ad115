//! Device memory, reference counted.

use std::any::Any;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use tilewire_core::memory::filled;
use tilewire_core::{DType, Error, Result};

use crate::loan::{Access, Loan};

/// One 64-byte line; buffers are made of whole lines so that every dtype is aligned.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer on the host device. Clones share it; it is freed with the last one, so that work in
/// flight keeps its inputs alive.
///
/// Access is guarded as by a `RefCell`: many readers or one writer. A conflict is not waited out
/// but reported, because streams and events must already have ordered the accesses. Loans of
/// memory that belongs to others are guarded by their addresses: two loans that overlap conflict
/// as two clones of one buffer do.
#[derive(Clone)]
pub struct Memory {
    bytes: Arc<Bytes>,
    start: usize,
    len_bytes: usize,
}

enum Bytes {
    Owned(RwLock<Vec<Line>>),
    Lent(Loan),
}

/// Read access to a [`Memory`].
pub struct MemoryRead<'a>(ReadOf<'a>, usize);

enum ReadOf<'a> {
    Owned(RwLockReadGuard<'a, Vec<Line>>),
    Lent(Access<'a>),
}

/// Write access to a [`Memory`].
pub struct MemoryWrite<'a>(WriteOf<'a>, usize);

enum WriteOf<'a> {
    Owned(RwLockWriteGuard<'a, Vec<Line>>),
    Lent(Access<'a>),
}

impl Memory {
    fn filled(len_bytes: usize, byte: u8) -> Self {
        Self::of(vec![Line([byte; 64]); len_bytes.div_ceil(64)], len_bytes)
    }

    fn of(lines: Vec<Line>, len_bytes: usize) -> Self {
        // The vector never changes its length, so the address is good for its life.
        let start = lines.as_ptr().addr();
        Self { bytes: Arc::new(Bytes::Owned(RwLock::new(lines))), start, len_bytes }
    }

    /// `len_bytes` at `ptr` that belong to `lender`, which is kept as long as the last clone. They
    /// are not freed here. A null `ptr` is good for no bytes.
    ///
    /// Work that is queued with a tensor over the loan keeps the lender until that work has run, a
    /// graph as long as it lives, and any thread may drop it then: a lender whose end needs a
    /// certain thread or lock must not be passed.
    ///
    /// # Safety
    /// The bytes must be there, for reading and writing, as long as `lender` lives, and as long as
    /// work that uses them is queued. Nobody else may use them while such work runs.
    pub unsafe fn lent(ptr: *mut u8, len_bytes: usize, lender: Arc<dyn Any + Send + Sync>) -> Self {
        // SAFETY: the caller's contract.
        let loan = unsafe { Loan::new(ptr, len_bytes, lender) };
        Self { bytes: Arc::new(Bytes::Lent(loan)), start: ptr.addr(), len_bytes }
    }

    /// As `zeroed` and `poisoned`; an error where they would end the process.
    pub(crate) fn try_filled(len_bytes: usize, byte: u8) -> Result<Self> {
        let lines = filled(Line([byte; 64]), len_bytes.div_ceil(64))?;
        Ok(Self::of(lines, len_bytes))
    }

    /// `len_bytes` of zeros.
    pub fn zeroed(len_bytes: usize) -> Self {
        Self::filled(len_bytes, 0)
    }

    /// `len_bytes` of [`DType::POISON`]: NaN in every floating type, so that an element that
    /// nobody wrote cannot pass for a result.
    pub fn poisoned(len_bytes: usize) -> Self {
        Self::filled(len_bytes, DType::POISON)
    }

    /// A copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self::zeroed(bytes.len()).holding(bytes)
    }

    /// As `from_bytes`; an error where it would end the process.
    pub(crate) fn try_from_bytes(bytes: &[u8]) -> Result<Self> {
        Ok(Self::try_filled(bytes.len(), 0)?.holding(bytes))
    }

    /// Puts as many bytes into memory that is just made.
    fn holding(self, bytes: &[u8]) -> Self {
        if let Ok(mut w) = self.write("new buffer") {
            w.bytes_mut().copy_from_slice(bytes);
        }
        self
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Read access; `what` names the buffer in the error.
    ///
    /// # Errors
    /// `InvalidArgument` if a node is writing it at this moment: a stream or event edge is missing.
    pub fn read(&self, what: &str) -> Result<MemoryRead<'_>> {
        let of = match &*self.bytes {
            Bytes::Lent(loan) => loan.access(false).map(ReadOf::Lent),
            Bytes::Owned(lines) => match lines.try_read() {
                Ok(g) => Some(ReadOf::Owned(g)),
                Err(TryLockError::Poisoned(p)) => Some(ReadOf::Owned(p.into_inner())),
                Err(TryLockError::WouldBlock) => None,
            },
        };
        of.map(|of| MemoryRead(of, self.len_bytes)).ok_or_else(|| race(what, "read", "writes"))
    }

    /// Write access; `what` names the buffer in the error.
    ///
    /// # Errors
    /// `InvalidArgument` if a node is reading or writing it at this moment.
    pub fn write(&self, what: &str) -> Result<MemoryWrite<'_>> {
        let of = match &*self.bytes {
            Bytes::Lent(loan) => loan.access(true).map(WriteOf::Lent),
            Bytes::Owned(lines) => match lines.try_write() {
                Ok(g) => Some(WriteOf::Owned(g)),
                Err(TryLockError::Poisoned(p)) => Some(WriteOf::Owned(p.into_inner())),
                Err(TryLockError::WouldBlock) => None,
            },
        };
        of.map(|of| MemoryWrite(of, self.len_bytes)).ok_or_else(|| race(what, "written", "uses"))
    }

    /// True if both are the same buffer.
    pub fn same(&self, other: &Memory) -> bool {
        Arc::ptr_eq(&self.bytes, &other.bytes)
    }

    /// Address of the first byte. No two buffers that are alive share one, unless one of them is a
    /// loan of the other's bytes.
    pub(crate) fn addr(&self) -> usize {
        self.start
    }
}

fn race(what: &str, wanted: &str, busy: &str) -> Error {
    Error::invalid(format!("`{what}` cannot be {wanted} while work in flight {busy} it"))
        .hint("wait for the Pending, or join it to the stream, before touching the buffer")
}

impl MemoryRead<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            ReadOf::Owned(lines) => &bytemuck::cast_slice(lines)[..self.1],
            ReadOf::Lent(loan) => loan.bytes(),
        }
    }
}

impl MemoryWrite<'_> {
    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            WriteOf::Owned(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.1],
            WriteOf::Lent(loan) => loan.bytes_mut(),
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_are_errors_not_waits() {
        let m = Memory::poisoned(100);
        let r = m.read("x").unwrap();
        assert!(r.bytes().iter().all(|&b| b == 0xFF) && r.bytes().len() == 100);
        assert!(m.read("x").is_ok());
        assert!(m.write("x").is_err_and(|e| e.to_string().contains("`x`")));
        drop(r);
        let w = m.write("x").unwrap();
        assert!(m.read("x").is_err());
        drop(w);
    }

    /// Loans of `len` bytes at `at` of `buf`, which outlives them.
    fn lend(buf: &mut [u64], at: usize, len: usize) -> Memory {
        let ptr = buf.as_mut_ptr().cast::<u8>();
        // SAFETY: the callers' ranges lie in their buffers, which they neither use nor drop before
        // the loan is gone.
        unsafe { Memory::lent(ptr.add(at), len, Arc::new(())) }
    }

    #[test]
    fn loans_that_overlap_conflict_as_one_buffer_does() {
        let mut buf = vec![0u64; 8];
        let (low, high) = (lend(&mut buf, 0, 40), lend(&mut buf, 24, 40));
        let (apart, again) = (lend(&mut buf, 40, 8), lend(&mut buf, 0, 40));
        let w = low.write("low").unwrap();
        for (name, m) in [("high", &high), ("again", &again), ("low", &low)] {
            let e = m.read(name).err().unwrap();
            assert!(e.to_string().contains(&format!("`{name}`")), "{e}");
        }
        assert!(apart.write("apart").is_ok());
        drop(w);
        let r = (high.read("high").unwrap(), low.read("low").unwrap());
        assert!(again.read("again").is_ok() && again.write("again").is_err());
        drop(r);
        again.write("again").unwrap().bytes_mut().fill(7);
        assert_eq!(high.read("high").unwrap().bytes()[..17], [[7; 16], [0; 16]].concat()[..17]);
        drop((low, high, apart, again));
        assert_eq!(buf[4].to_ne_bytes(), [7; 8]);
    }

    #[test]
    fn a_loan_of_nothing_may_be_null_and_a_lender_goes_with_the_last_clone() {
        let lender: Arc<dyn Any + Send + Sync> = Arc::new(5u8);
        // SAFETY: no bytes.
        let m = unsafe { Memory::lent(std::ptr::null_mut(), 0, lender.clone()) };
        let clone = m.clone();
        assert!(clone.write("none").unwrap().bytes_mut().is_empty());
        assert!(m.read("none").unwrap().bytes().is_empty());
        drop(m);
        assert_eq!(Arc::strong_count(&lender), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&lender), 1);
    }
}
