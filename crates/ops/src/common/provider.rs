//! Libraries that carry out an operation as a whole, in place of a schedule, a transport and
//! kernels of ours.

use std::sync::Arc;

use tilewire_symm::NcclTeam;

/// A library that carries out a whole operation. tilewire adds only the meeting of the ranks in
/// front: the library knows no deadline, so all ranks must have arrived.
#[derive(Clone)]
pub(crate) enum Provider {
    /// NVIDIA NCCL: collectives.
    Nccl(Arc<NcclTeam>),
}
