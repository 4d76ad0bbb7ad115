//! Code that expects an allocation to fail, and memory that grows with what the caller asks for.

use std::any::Any;
use std::cell::Cell;

use crate::{Error, ErrorKind, Result};

thread_local! {
    // Without initializer or destructor: an allocator may read it at any time.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, which returns an error where memory lacks (`try_reserve`). An allocator that ends the
/// process where memory lacks returns null to this thread meanwhile.
pub fn expect_failure<R>(f: impl FnOnce() -> R) -> R {
    let before = EXPECTED.replace(true);
    let done = f();
    EXPECTED.set(before);
    done
}

/// Returns whether this thread is inside [`expect_failure`]. Allocates nothing.
pub fn failure_is_expected() -> bool {
    EXPECTED.get()
}

/// Returns `len` copies of `value`.
///
/// # Errors
/// `Exhausted` if memory lacks.
pub fn filled<T: Copy>(value: T, len: usize) -> Result<Vec<T>> {
    // A block that fits into the cache next to its copy.
    let block = (16384 / size_of::<T>().max(1)).clamp(1, len.max(1));
    let mut all = Vec::new();
    reserve(&mut all, len)?;
    all.resize(block.min(len), value);
    // Copies of the block: a loop over bytes is slow where it is not vectorised, as in tests.
    while all.len() < len {
        all.extend_from_within(..block.min(len - all.len()));
    }
    Ok(all)
}

/// Takes memory for `more` elements behind those that `all` has, and for some beyond them where it
/// grows in steps.
///
/// # Errors
/// `Exhausted` if memory lacks.
pub fn reserve<T>(all: &mut Vec<T>, more: usize) -> Result<()> {
    expect_failure(|| all.try_reserve(more)).map_err(|e| {
        let bytes = all.len().saturating_add(more).saturating_mul(size_of::<T>());
        let text = format!("the host cannot allocate {bytes} bytes");
        Error::new(ErrorKind::Exhausted, text)
            .cause(e)
            .hint("use fewer ranks, smaller sizes, or raise the address space limit (ulimit -v)")
    })
}

/// As [`filled`], for functions that return no error: they unwind with it, without a word of the
/// hook of panics. Whoever catches the panic finds the error by [`error_of_panic`].
///
/// # Panics
/// If memory lacks, with the [`Error`].
pub fn filled_or_unwind<T: Copy>(value: T, len: usize) -> Vec<T> {
    filled(value, len).unwrap_or_else(|e| std::panic::resume_unwind(Box::new(e)))
}

/// Returns the error of a panic of `what`: the one that it unwound with, else `Internal` with its
/// text.
pub fn error_of_panic(what: &str, panic: Box<dyn Any + Send>) -> Error {
    let panic = match panic.downcast::<Error>() {
        Ok(e) => return *e,
        Err(other) => other,
    };
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::internal(format!("{what} panicked: {}", text.unwrap_or("panic without text")))
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    /// More than any machine has.
    const TOO_MUCH: usize = isize::MAX as usize / 8;

    #[test]
    fn memory_that_lacks_is_an_error() {
        assert_eq!(filled(7u8, 3).unwrap(), [7; 3]);
        let e = filled(0.0f32, TOO_MUCH).unwrap_err();
        assert!(e.kind() == ErrorKind::Exhausted && e.get_hint().is_some(), "{e}");
        assert!(e.message().contains(&(4 * TOO_MUCH).to_string()), "{e}");
        let mut some = vec![1u64];
        assert_eq!(reserve(&mut some, usize::MAX).unwrap_err().kind(), ErrorKind::Exhausted);
        assert_eq!(some, [1]);
    }

    #[test]
    fn the_error_of_a_panic_is_the_one_that_it_unwound_with() {
        let e = catch_unwind(|| filled_or_unwind(0u64, TOO_MUCH)).unwrap_err();
        assert_eq!(error_of_panic("`work`", e).kind(), ErrorKind::Exhausted);
        for panic in [catch_unwind(|| panic!("on purpose")), catch_unwind(|| panic!("{}", 1))] {
            let e = error_of_panic("`work`", panic.unwrap_err());
            assert!(e.kind() == ErrorKind::Internal && e.message().contains("panicked: "), "{e}");
        }
    }

    #[test]
    fn it_is_expected_inside_of_the_call_and_on_its_thread_only() {
        assert!(!failure_is_expected());
        expect_failure(|| {
            expect_failure(|| assert!(failure_is_expected()));
            assert!(failure_is_expected());
            assert!(!std::thread::spawn(failure_is_expected).join().unwrap());
        });
        assert!(!failure_is_expected());
    }
}
