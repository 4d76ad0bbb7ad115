//! Operations of one rank on CUDA device 0, against the oracle or the host plan: every element.
//!
//! Where there is no CUDA, each test checks that this is said with a hint, and that it did not run.

#[path = "gpu/attention.rs"]
mod attention;
#[path = "gpu/attention_fp8.rs"]
mod attention_fp8;
#[path = "gpu/attention_fused.rs"]
mod attention_fused;
#[path = "gpu/attention_hopper.rs"]
mod attention_hopper;
#[path = "gpu/attention_split.rs"]
mod attention_split;
#[path = "gpu/attention_streams.rs"]
mod attention_streams;
#[path = "gpu/calls.rs"]
mod calls;
#[path = "gpu/common.rs"]
mod common;
#[path = "gpu/driver.rs"]
mod driver;
#[path = "gpu/gemm.rs"]
mod gemm;
#[path = "gpu/grouped_gemm.rs"]
mod grouped_gemm;
#[path = "gpu/hopper.rs"]
mod hopper;
#[path = "gpu/layers.rs"]
mod layers;
#[path = "gpu/maps.rs"]
mod maps;
#[path = "gpu/parts.rs"]
mod parts;
#[path = "gpu/permute.rs"]
mod permute;
#[path = "gpu/plans.rs"]
mod plans;
#[path = "gpu/quant.rs"]
mod quant;
#[path = "gpu/streams.rs"]
mod streams;
