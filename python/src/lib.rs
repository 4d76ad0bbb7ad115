//! `tilewire._native`: what tilewire for Python needs of Rust.
//!
//! Operations take tensors of PyTorch through the DLPack exchange interface, or buffers of XLA
//! through its foreign function interface, use them where they lie, and run plans that a world
//! keeps by their description. Nothing of torch or XLA is linked. The Python package is the
//! interface; what is here is private to it.
//!
//! # Rules
//! - Tensors are lent without an owner: calls on the CPU wait for their work before they return,
//!   and work on a GPU joins the caller's stream, whose order the caller's allocator follows.
//! - The GIL is released wherever a call can block.
//! - No panic crosses into Python; no Python is called from a thread of tilewire's, but for that of
//!   a store while ranks meet.

#![allow(missing_docs)]

mod bench;
mod call;
mod dlpack;
mod errors;
mod explain;
mod export;
mod jax;
mod keys;
mod local;
mod node;
mod ops;
mod quick;
mod store;
mod symm;
mod world;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::bench::launch_us;
    #[pymodule_export]
    use super::dlpack::use_exchange_api;
    #[pymodule_export]
    use super::explain::{explain_begin, explain_end};
    #[pymodule_export]
    use super::jax::world::{jax_check, jax_finalize, jax_init, jax_leave_all, jax_used_bytes};
    #[pymodule_export]
    use super::jax::{jax_check_call, jax_handlers, jax_layer};
    #[pymodule_export]
    use super::node::{node_type, use_nodes};
    #[pymodule_export]
    use super::ops::attention::{
        attention_bwd, attention_fwd, cp_attention_bwd, cp_attention_fwd, cp_rows,
    };
    #[pymodule_export]
    use super::ops::collective::{all_gather, all_reduce, all_to_all, reduce_scatter};
    #[pymodule_export]
    use super::ops::ep::{EpBuffer, EpGroup};
    #[pymodule_export]
    use super::ops::grouped::{grouped_dgrad, grouped_fprop, grouped_wgrad};
    #[pymodule_export]
    use super::ops::overlap::{ag_gemm, gemm_ar, gemm_rs, prepare_gemm_ar};
    #[pymodule_export]
    use super::ops::permute::RowMap;
    #[pymodule_export]
    use super::ops::quant::{dequantize, quantize};
    #[pymodule_export]
    use super::quick::{
        quick_ag_gemm, quick_ag_gemm_node, quick_gemm_ar, quick_gemm_ar_node, quick_gemm_rs,
        quick_gemm_rs_node, use_torch,
    };
    #[pymodule_export]
    use super::symm::SymmBuffer;
    #[pymodule_export]
    use super::world::{
        World, backends, forked, leave_all, use_cubins, world_of_environment, world_of_store,
    };

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
