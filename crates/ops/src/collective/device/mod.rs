//! Collectives on CUDA devices, by one of three ways.
//!
//! - **Meeting** (`meeting.rs`): one kernel that writes to all peers by bulk copies, meets them
//!   inside, and takes in what comes as it comes. From sm_90 on, for rows of whole 16 bytes.
//! - **Kernels**: enter, one kernel that writes to all peers, enter again (everybody has written),
//!   one kernel that takes in or adds. Few launches, so it is the way of small vectors.
//! - **Copy engines**: pushes with a flag behind each, taken in one by one as they arrive. The way
//!   of large vectors: no SM, and what came is copied while the next comes.

mod decide;
mod meeting;
mod nccl;
mod queue;

pub(super) use decide::{Used, launch};
pub(super) use meeting::{flag_bytes, is_possible, most_whole_rows};
pub(crate) use nccl::{gather, scatter};
pub(super) use queue::{OnDevice, Prepared};
