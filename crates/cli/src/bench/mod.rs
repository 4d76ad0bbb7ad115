//! `tilewire bench`: times of operations, each result checked in the same run.
//!
//! | file | times |
//! |---|---|
//! | `parts.rs` | on the host, what has parts: comm+GEMM and the collectives, beside their parts |
//! | `device.rs` | collectives on devices; how an operation is sampled, on the host, too |
//! | `products.rs` | products, comm+GEMM on devices, attention |
//! | `ep.rs` | expert parallelism |
//! | `shared.rs` | two programs in turn, on ranks that share a device |
//!
//! `cmd.rs` runs, prints and compares; `flags.rs` says which operations read which flags.

pub mod cmd;
mod device;
mod ep;
pub mod flags;
mod parts;
mod products;
pub mod shared;
