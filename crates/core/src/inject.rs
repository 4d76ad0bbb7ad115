//! Faults on demand: a test makes the n-th step of its thread that asks the system for something
//! fail, for every n, and looks at what is left behind.
//!
//! Every call that can run out of memory, descriptors, threads or slots while an object is made
//! stands behind [`step`]. In builds without debug assertions there is nothing to arm.

use std::cell::Cell;

use crate::{Error, ErrorKind, Result};

thread_local! {
    /// Steps that still succeed, if armed; and steps made since.
    static STATE: Cell<(Option<u64>, u64)> = const { Cell::new((None, 0)) };
}

/// Lets `nth` more steps of this thread succeed and the one after them fail, once.
pub fn arm(nth: u64) {
    STATE.set((Some(nth), 0));
}

/// Ends the injection; true if the fault was met.
pub fn disarm() -> bool {
    let (left, steps) = STATE.replace((None, 0));
    left.is_none() && steps > 0
}

/// A step that can fail. `what` is what the system is asked for.
///
/// # Errors
/// `Exhausted` if a test wants it.
pub fn step(what: &str) -> Result<()> {
    if cfg!(debug_assertions) {
        let (left, steps) = STATE.get();
        match left {
            Some(0) => {
                STATE.set((None, steps + 1));
                return Err(Error::new(ErrorKind::Exhausted, format!("{what}: injected fault")));
            }
            Some(n) => STATE.set((Some(n - 1), steps + 1)),
            None => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(
        not(debug_assertions),
        ignore = "faults are injected only in builds with debug assertions"
    )]
    fn the_nth_step_fails_once() {
        step("x").unwrap();
        arm(2);
        assert!(step("a").is_ok() && step("b").is_ok());
        let e = step("c").unwrap_err();
        assert!(e.kind() == ErrorKind::Exhausted && e.message().contains('c'));
        assert!(step("d").is_ok() && disarm() && !disarm());
        arm(1);
        assert!(step("a").is_ok() && !disarm());
    }
}
