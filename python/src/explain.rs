//! What plans say of themselves, for `tilewire.torch.explain`.

use std::cell::RefCell;
use std::fmt::Display;

use pyo3::prelude::*;

thread_local! {
    /// Texts of the plans that calls of this thread use, while somebody asks.
    static HEARD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Called where a plan of `op` is found or made.
pub fn note<T: Display>(op: &str, text: impl FnOnce() -> T) {
    HEARD.with_borrow_mut(|heard| {
        if let Some(all) = heard {
            let text = format!("{op}: {}", text());
            if !all.contains(&text) {
                all.push(text);
            }
        }
    });
}

/// From now on, calls of this thread note the plans that they use.
#[pyfunction]
pub fn explain_begin() {
    HEARD.set(Some(Vec::new()));
}

/// Ends [`explain_begin`]: what was noted.
#[pyfunction]
pub fn explain_end() -> Vec<String> {
    HEARD.take().unwrap_or_default()
}
