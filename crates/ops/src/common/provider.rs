//! Libraries that carry out an operation as a whole, in place of a schedule, a transport and
//! kernels of ours.

use std::sync::Arc;

use tilewire_symm::NcclTeam;

/// Who carries out a whole operation. Nothing of it is ours but the meeting of the ranks in front:
/// it knows no deadline, so all of them must have come.
#[derive(Clone)]
pub(crate) enum Provider {
    /// NVIDIA NCCL: collectives.
    Nccl(Arc<NcclTeam>),
}
