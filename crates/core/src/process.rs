//! The process that made something.

use crate::{Error, ErrorKind, Result};

/// The process that made something with threads or connections, which a forked child does not have.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Default for Process {
    fn default() -> Self {
        Self(std::process::id())
    }
}

impl Process {
    /// True in a child that was forked from the maker: what it sees are copies, without threads.
    pub fn is_foreign(self) -> bool {
        self.0 != std::process::id()
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
