//! Collectives on CUDA devices, by one of three ways.
//!
//! - **Meeting** (`meeting.rs`): one kernel that writes to all peers by bulk copies, meets them
//!   itself, and copies or adds pieces as they arrive. From sm_90 on, for rows of a multiple of 16
//!   bytes.
//! - **Kernels**: enter, one kernel that writes to all peers, enter again (all ranks have written),
//!   one kernel that copies out or adds. It queues little work, so it is the way of small vectors.
//! - **Copy engines**: pushes with a flag behind each; shards are copied out one by one as they
//!   arrive. The way of large vectors: it takes no multiprocessor, and one shard is copied out
//!   while the next travels.

mod decide;
mod meeting;
mod nccl;
mod queue;

pub(super) use decide::{Used, launch};
pub(super) use meeting::{flag_bytes, is_possible, most_whole_rows};
pub(crate) use nccl::{gather, scatter};
pub(super) use queue::{OnDevice, Prepared};
