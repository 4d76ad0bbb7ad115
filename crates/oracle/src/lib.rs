//! Slow, obvious f64 references on global tensors.
//!
//! Every function is the mathematics written down: loops over whole tensors, no ranks, no streams,
//! no overlap. Products and attention run in blocks and on all processors, with the bits of the
//! plain loops (tests keep those), so that large shapes can be verified. Tests and `tilewire
//! verify` compare against it; nothing that runs in production depends on it. Where a function
//! takes one matrix for each rank, "rank" only names a block of the global tensor.
//!
//! | module | what |
//! |---|---|
//! | [`mat`] | the matrix type, the magnitude `|A||B|` of the error bound |
//! | [`product`] | products in blocks |
//! | [`par`] | work on all processors, the same at every number of them |
//! | [`gemm`] | GEMM with epilogues, linear layer backward |
//! | [`collective`] | all-gather, reduce-scatter, all-reduce, all-to-all, and their fusions with GEMM |
//! | [`fp8`], [`quant`] | FP8 codes by exhaustive search; scaling recipes |
//! | [`permute`] | token permutation of a mixture of experts on one rank |
//! | [`grouped_gemm`] | fprop, dgrad, wgrad with an accumulation mask |
//! | [`ep`] | expert-parallel layouts, dispatch, combine and their backward |
//! | [`attention`] | attention forward and backward |
//! | [`nn`] | norms, rotary embedding, losses, router, optimizer |
//! | [`finite_diff`] | numeric gradients that the backward passes are tested with |
//!
//! Shapes are checked with `assert!`: a wrong shape handed to a reference is a bug of the test.
#![forbid(unsafe_code)]

pub mod attention;
pub mod collective;
pub mod ep;
pub mod finite_diff;
pub mod fp8;
pub mod gemm;
pub mod grouped_gemm;
pub mod mat;
pub mod nn;
pub mod par;
pub mod permute;
pub mod product;
pub mod quant;

pub use mat::{Mat, matmul, matmul_abs};
