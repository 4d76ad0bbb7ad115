//! `tilewire bench`: times of operations, each result checked in the same run.
//!
//! | file | times |
//! |---|---|
//! | `parts.rs` | on the host, what has parts: comm+GEMM and the collectives, beside their parts |
//! | `device.rs` | collectives on devices; how an operation is sampled, on the host, too |
//! | `products.rs` | products, comm+GEMM on devices |
//! | `grouped.rs` | grouped products |
//! | `attention.rs`, `uniform.rs` | attention; its results where all weights are equal |
//! | `bulk.rs` | a product beside a collective |
//! | `ep.rs` | expert parallelism |
//! | `memory.rs` | how operations are timed and judged that are bound by memory |
//! | `quant.rs`, `permute.rs`, `layers.rs`, `router.rs` | those operations |
//! | `shared.rs` | two programs in turn, on ranks that share a device |
//!
//! `cmd.rs` runs, prints and compares; `flags.rs` says which operations read which flags.

mod attention;
mod bulk;
pub mod cmd;
mod device;
mod ep;
pub mod flags;
mod grouped;
mod layers;
mod memory;
mod parts;
mod permute;
mod products;
mod quant;
mod router;
pub mod shared;
mod uniform;
