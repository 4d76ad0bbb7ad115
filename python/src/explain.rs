//! The texts in which plans explain themselves, for `tilewire.torch.explain`.

use std::cell::RefCell;
use std::fmt::Display;

use pyo3::prelude::*;

thread_local! {
    /// Texts of the plans that calls of this thread use, while somebody asks.
    static LINES: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Called where a plan of `op` is found or made.
pub fn note<T: Display>(op: &str, text: impl FnOnce() -> T) {
    LINES.with_borrow_mut(|lines| {
        if let Some(all) = lines {
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
    LINES.set(Some(Vec::new()));
}

/// Ends [`explain_begin`]: what was noted.
#[pyfunction]
pub fn explain_end() -> Vec<String> {
    LINES.take().unwrap_or_default()
}
