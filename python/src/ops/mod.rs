//! The operations, a function each: tensors in, tensors out, everything else by value.

pub mod attention;
pub mod collective;
pub mod ep;
pub mod grouped;
pub mod overlap;
