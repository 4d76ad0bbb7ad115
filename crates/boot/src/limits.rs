//! Limits of the operating system that would end a program without a word: each becomes an error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;
use tilewire_core::memory::failure_is_expected;
use tilewire_core::{Error, Result};

/// Exit code of a program whose memory has run out: that of any other error.
const OUT_OF_MEMORY_CODE: i32 = 2;

/// Bytes of the stack on which [`with_stack`] runs a program: that of a main thread with the usual
/// limit. Only what is used takes memory.
const STACK: usize = 8 << 20;

/// The file of Rust's library whose only panics are those for lack of memory.
const SIGNAL_STACKS: &str = "sys/pal/unix/stack_overflow.rs";

/// The system's allocator for a program's `#[global_allocator]`. Where memory lacks, it ends the
/// process with an error and code 2, instead of an abort, unless the caller expects that
/// ([`expect_failure`](tilewire_core::memory::expect_failure)).
#[derive(Clone, Copy, Debug, Default)]
pub struct Alloc;

/// Returns `ptr`, unless it shows that memory lacks and nobody expects that.
fn checked(ptr: *mut u8, size: usize) -> *mut u8 {
    if ptr.is_null() && !failure_is_expected() {
        out_of_memory(size);
    }
    ptr
}

/// Ends the process for an allocation of `size` bytes. Allocates nothing.
#[cold]
fn out_of_memory(size: usize) -> ! {
    let mut digits = [0; 20];
    let (mut at, mut rest) = (digits.len(), size);
    while rest > 0 || at == digits.len() {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    end_without_memory(&[b"an allocation of ", &digits[at..], b" bytes failed"])
}

/// Ends the process, and says what had no memory. Allocates nothing. Where several threads lack
/// memory at once, the first one speaks.
#[cold]
fn end_without_memory(what: &[&[u8]]) -> ! {
    static SPOKEN: AtomicBool = AtomicBool::new(false);
    while SPOKEN.swap(true, Ordering::Relaxed) {
        // The process ends meanwhile.
        std::thread::sleep(Duration::from_millis(10));
    }
    let hint =
        b"\n  hint: raise the limit of the address space (`ulimit -v`), or use fewer ranks or \
        smaller sizes\n";
    // One write, which words of another thread do not divide.
    let (mut text, mut len) = ([0; 256], 0);
    let begin: &[&[u8]] = &[b"error: memory ran out: "];
    for byte in begin.iter().chain(what).chain(&[&hint[..]]).flat_map(|part| part.iter()) {
        text[len] = *byte;
        len += 1;
    }
    // Nobody is left to learn that standard error is closed.
    rustix::io::write(std::io::stderr(), &text[..len]).ok();
    signal_hook::low_level::exit(OUT_OF_MEMORY_CODE)
}

// SAFETY: every call is passed on to the system's allocator, whose contract it keeps; `checked`
// returns the pointer unchanged, or does not return. It neither allocates nor unwinds.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Alloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of `System`.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        checked(unsafe { System.realloc(ptr, layout, size) }, size)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Makes writes beyond the limit of file sizes (`ulimit -f`) fail with an error; by default they
/// end the process. Programs that this one starts get the default again.
///
/// # Errors
/// `Io` if the signal cannot be handled.
pub fn expect_file_limit() -> Result<()> {
    // The handler is what counts: with it the write returns EFBIG.
    let unread = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGXFSZ, unread)
        .map(drop)
        .map_err(|e| Error::io("handling the signal of the limit of file sizes", e))
}

/// Prepares for a limit of the address space (`ulimit -v`): all threads allocate from one arena if
/// there is one, and a thread that begins without memory is an error.
///
/// Rust gives each thread a stack for its signals, and panics where there is no memory for it,
/// which ends the process by an abort, before the thread has run anything of the program's.
///
/// glibc reserves 64 MiB of addresses for an arena of each thread. Where it cannot have them, it
/// tries again at each allocation: every one of a few bytes then costs six system calls and a page
/// of its own, so that memory runs out early, and a program on a busy machine ends seconds late.
pub fn expect_address_limit() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|l| l.file().ends_with(SIGNAL_STACKS)) {
            end_without_memory(&[b"a thread has no stack for its signals"]);
        }
        usual(panic);
    }));
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if getrlimit(Resource::As).current.is_some() {
        // SAFETY: it sets a parameter of the allocator, under that one's lock.
        #[allow(unsafe_code)]
        let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
        if set != 1 {
            log::warn!("the allocator does not take a limit of its arenas");
        }
    }
}

/// Runs `f` on a thread whose stack does not depend on the limit of the main thread's
/// (`ulimit -s`), and returns what it returns. The caller waits meanwhile.
///
/// # Errors
/// `Io` or `Exhausted` if the thread cannot be started; then `f` has not run.
///
/// # Panics
/// If `f` panics.
pub fn with_stack<R: Send>(f: impl FnOnce() -> R + Send) -> Result<R> {
    std::thread::scope(|s| {
        let thread = std::thread::Builder::new()
            .name("main".to_owned())
            .stack_size(STACK)
            .spawn_scoped(s, f)
            .map_err(|e| {
                Error::io("starting the thread of the program", e).hint(
                    "raise the limits of processes (`ulimit -u`) and of the address space \
                     (`ulimit -v`)",
                )
            })?;
        thread.join().map_or_else(|panic| std::panic::resume_unwind(panic), Ok)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_expects_a_failure_gets_it() {
        let null = || checked(std::ptr::null_mut(), 8);
        assert!(tilewire_core::memory::expect_failure(null).is_null());
        let mut byte = 0;
        assert_eq!(checked(&raw mut byte, 1), &raw mut byte);
    }

    #[test]
    fn a_program_has_its_stack_and_its_panic() {
        let deep = || std::hint::black_box([1u8; 4 << 20]).iter().map(|b| u64::from(*b)).sum();
        assert_eq!(with_stack::<u64>(deep).unwrap(), 4 << 20);
        let panic = || with_stack::<()>(|| panic!("on purpose"));
        assert!(std::panic::catch_unwind(panic).is_err());
    }
}
