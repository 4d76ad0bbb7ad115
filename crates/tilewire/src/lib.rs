//! Tiles over wires: communication hidden behind arithmetic.
//!
//! The facade: the only crate that users depend on. It re-exports the vocabulary, the host
//! device, symmetric memory and the operations.
//!
//! # One operation on four ranks
//! ```
//! use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
//! use tilewire::prelude::*;
//!
//! // Ranks are threads here; `tilewire run` or `torchrun` starts them as processes.
//! World::run_threads(4, WorldCfg::default(), |world| {
//!     let team = world.everyone("tp")?;
//!     let desc = AgGemmDesc::new(64, 32, 48, DType::F32); // m and k global, n per rank
//!     let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
//!     let plan = AgGemmPlan::new(desc, &heap, None)?;
//!     let stream = Stream::new("main")?;
//!     plan.prepare(&stream)?;
//!
//!     let x = Tensor::from_slice(&[1.0f32; 16 * 48], Shape::d2(16, 48))?; // my rows
//!     let w = Tensor::from_slice(&[0.5f32; 32 * 48], Shape::d2(32, 48))?;
//!     let out = Tensor::zeros(DType::F32, Shape::d2(64, 32));
//!     let y = plan.launch(&stream, 64, AgGemmInputs::new(x, w, out))?.wait()?;
//!     assert!(y.out.to_vec::<f32>()?.iter().all(|&v| v == 24.0));
//!     Ok(())
//! })?;
//! # Ok::<(), tilewire::core::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod plans;

pub use tilewire_boot as boot;
pub use tilewire_core as core;
pub use tilewire_device as device;
pub use tilewire_nn as nn;
pub use tilewire_ops as ops;
pub use tilewire_symm as symm;

/// The items that most programs use.
pub mod prelude {
    pub use tilewire_core::{
        BackendKind, Config, DType, Deadline, Error, ErrorKind, Rank, Result, Shape, Team,
    };
    pub use tilewire_device::{Pending, Stream, Tensor};
    pub use tilewire_ops::{Algo, Shards};
    pub use tilewire_symm::{Heap, HeapCfg, LiveTeam, World, WorldCfg};
}
