//! Code that expects an allocation to fail.

use std::cell::Cell;

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

#[cfg(test)]
mod tests {
    use super::*;

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
