//! Parts that all operations share: shards, plan bookkeeping, tile configuration, cost model.

pub(crate) mod backend;
mod bias;
mod check;
mod choice;
mod core;
pub(crate) mod counters;
pub(crate) mod cuda;
mod handoff;
pub(crate) mod kernel;
pub(crate) mod lanes;
mod machine;
mod mat;
pub(crate) mod moves;
pub(crate) mod nccl;
pub(crate) mod operand;
mod overlap;
mod provider;
pub(crate) mod reduce;
pub(crate) mod ring;
mod shards;
pub(crate) mod workspaces;

pub(crate) use self::choice::{Choice, fastest};
pub(crate) use self::core::only_meets;
pub(crate) use self::core::{Launch, LaunchAt, PlanCore};
pub(crate) use backend::CollectiveBackend;
pub(crate) use bias::{Bias, bias_type};
pub use check::expect_tensor;
pub(crate) use check::{Named, apart, each_apart, narrow_into, not_prepared, wide};
pub(crate) use handoff::Handoff;
pub use machine::Machine;
pub(crate) use mat::Mat;
pub(crate) use operand::Operand;
pub use overlap::{Algo, Candidate, Explain, OverlapConfig, Via};
pub(crate) use provider::Provider;
pub use shards::Shards;
pub(crate) use shards::{chunk_rows, part, range_of};
