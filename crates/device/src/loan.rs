//! Host memory that belongs to others, and who is using it.
//!
//! Owners of lent memory (a tensor library, a caller's slice) may lend one storage many times, in
//! pieces that overlap. A guard in each loan would not see the others, so the accesses that are
//! under way are kept in one table by their addresses: many readers or one writer of each byte.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of somebody else.
pub(crate) struct Loan {
    ptr: *mut u8,
    len: usize,
    /// Kept, so that the bytes are.
    _lender: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the bytes are reached through `Access` only, which the table of accesses guards; the
// caller of `new` vouches that they are there and that nobody else uses them meanwhile.
unsafe impl Send for Loan {}
// SAFETY: as above.
unsafe impl Sync for Loan {}

/// An access under way: `start..end`, and whether it writes.
struct Used {
    start: usize,
    end: usize,
    writes: bool,
}

/// Accesses under way of all loans of the process: as many as threads use lent memory at this
/// moment, times the tensors of an operation, so a scan is short.
static USED: Mutex<Vec<Used>> = Mutex::new(Vec::new());

fn used() -> MutexGuard<'static, Vec<Used>> {
    USED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to use the bytes of a loan.
pub(crate) struct Access<'a> {
    loan: &'a Loan,
    writes: bool,
}

impl Loan {
    /// # Safety
    /// As [`Memory::lent`](crate::Memory::lent).
    pub unsafe fn new(ptr: *mut u8, len: usize, lender: Arc<dyn Any + Send + Sync>) -> Self {
        Self { ptr, len: if ptr.is_null() { 0 } else { len }, _lender: lender }
    }

    /// Access to the bytes, unless somebody writes some of them, or if it `writes`, uses some.
    pub fn access(&self, writes: bool) -> Option<Access<'_>> {
        if self.len > 0 {
            let (start, end) = (self.ptr.addr(), self.ptr.addr() + self.len);
            let mut used = used();
            let conflicts = |u: &Used| u.start < end && start < u.end && (u.writes || writes);
            if used.iter().any(conflicts) {
                return None;
            }
            used.push(Used { start, end, writes });
        }
        Some(Access { loan: self, writes })
    }
}

impl Access<'_> {
    pub fn bytes(&self) -> &[u8] {
        if self.loan.len == 0 {
            return &[];
        }
        // SAFETY: the loan's bytes are there (contract of `new`), and the table has this access, so
        // nothing of tilewire writes them.
        unsafe { std::slice::from_raw_parts(self.loan.ptr, self.loan.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.writes, "an access that only reads");
        if self.loan.len == 0 {
            return &mut [];
        }
        // SAFETY: as `bytes`; the table has this access as a writing one, so nothing else of
        // tilewire uses them.
        unsafe { std::slice::from_raw_parts_mut(self.loan.ptr, self.loan.len) }
    }
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        if self.loan.len == 0 {
            return;
        }
        let (start, writes) = (self.loan.ptr.addr(), self.writes);
        let end = start + self.loan.len;
        let mut used = used();
        let same = |u: &Used| u.start == start && u.end == end && u.writes == writes;
        if let Some(i) = used.iter().position(same) {
            used.swap_remove(i);
        }
    }
}
