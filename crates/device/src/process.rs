//! The process that made something.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tilewire_core::{Error, ErrorKind, Result};

/// The forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that made something with threads or connections, which a forked child does not have.
///
/// Every launch asks several times, so it is known without a call of the system: the C library
/// counts the forks in the child. One that goes around the C library (`clone(2)` by its number) is
/// not seen.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Default for Process {
    fn default() -> Self {
        Self(this())
    }
}

/// The number of forks; of a process that has no memory for the handler, its own number.
fn this() -> u32 {
    static COUNTS: OnceLock<bool> = OnceLock::new();
    let counts = COUNTS.get_or_init(|| {
        // SAFETY: `forked` may be called in the child of a process with threads: it adds to an
        // atomic number. It stays: a library that is closed takes its handlers along.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 }
    });
    if *counts { FORKS.load(Ordering::Relaxed) } else { std::process::id() }
}

impl Process {
    /// True in a child that was forked from the maker: what it sees are copies, without threads.
    pub fn is_foreign(self) -> bool {
        self.0 != this()
    }

    /// Fails in a child that was forked from the maker.
    ///
    /// # Errors
    /// `Stale`.
    pub fn check(self) -> Result<()> {
        if self.is_foreign() {
            return Err(Error::new(ErrorKind::Stale, "this process was forked from a rank")
                .hint("only the process that made worlds, teams and streams can use them"));
        }
        Ok(())
    }
}
