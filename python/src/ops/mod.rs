//! The operations, a function each: tensors in, tensors out, everything else by value.

pub mod collective;
pub mod overlap;
