//! An allocator that counts what a thread asks for while a limit is set for it.
//!
//! A decoder that believes a length which a stranger has written asks for memory that its input
//! does not justify. What it asks for counts, not what it uses: pages that nobody has touched cost
//! nothing here, and the machine of a user may have none left.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

/// Beyond its limit a thread gets so much more, so that the excess is a failed test that names its
/// input; beyond that it gets nothing, and the process ends.
const EXCESS: usize = 256 << 20;

/// The state of a thread under a limit.
#[derive(Clone, Copy)]
struct Count {
    /// Bytes that were asked for.
    bytes: usize,
    /// The most that it gets.
    most: usize,
    /// The input that is being decoded, to be named as the process ends.
    input: (*const u8, usize),
}

thread_local! {
    // No destructor and no first use: valid whenever the allocator is called.
    static COUNT: Cell<Option<Count>> = const { Cell::new(None) };
}

/// Runs `f` on `input`; returns its result and the bytes that it asked for.
///
/// The process ends where `f` asks for far more than `most` bytes, with the input on standard
/// error.
pub(crate) fn counted<T>(input: &[u8], most: usize, f: impl FnOnce(&[u8]) -> T) -> (T, usize) {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            COUNT.set(None);
        }
    }
    let most = most.saturating_add(EXCESS);
    COUNT.set(Some(Count { bytes: 0, most, input: (input.as_ptr(), input.len()) }));
    // Also where `f` panics.
    let reset = Reset;
    let done = f(input);
    let bytes = COUNT.get().map_or(0, |c| c.bytes);
    drop(reset);
    (done, bytes)
}

/// True if the thread may have `bytes` more.
fn grant(bytes: usize) -> bool {
    let Some(count) = COUNT.get() else { return true };
    let sum = count.bytes.saturating_add(bytes);
    if sum <= count.most {
        COUNT.set(Some(Count { bytes: sum, ..count }));
        return true;
    }
    // What follows must not count, and not come here again.
    COUNT.set(None);
    // SAFETY: `counted` borrows the input as long as this count is set.
    let input = unsafe { std::slice::from_raw_parts(count.input.0, count.input.1) };
    let escaped = input.escape_ascii();
    // The process ends in any case, and has no other place to say this.
    writeln!(std::io::stderr(), "{sum} bytes of memory for the input b\"{escaped}\"").ok();
    false
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the allocator of the system with its own arguments, or returns null,
// which says that there is no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !grant(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of this very method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !grant(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of this very method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !grant(size.saturating_sub(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of this very method; `at` is the system's, as all
        // that this allocator returns.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of this very method; `at` is the system's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_counts_once() {
        let (v, bytes) = counted(b"", 0, |_| {
            let mut v = Vec::<u8>::with_capacity(100);
            v.reserve_exact(1000);
            drop(vec![0u64; 10]);
            v
        });
        assert_eq!((v.capacity(), bytes), (1000, 1080));
        let (refused, _) = counted(b"x", 0, |_| Vec::<u8>::new().try_reserve(EXCESS + 1).is_err());
        assert!(refused);
        assert!(Vec::<u8>::new().try_reserve(EXCESS + 1).is_ok(), "only under a limit");
    }
}
