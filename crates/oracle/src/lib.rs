//! Slow, obvious f64 references.
#![forbid(unsafe_code)]
