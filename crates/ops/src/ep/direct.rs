//! Receive buffers that peers write to.

use tilewire_symm::SymBuf;

use super::host::Straight;

/// A receive buffer that peers write to.
pub(super) struct Direct {
    /// Of this rank's part.
    pub addr: u64,
    /// On the host.
    pub host: Option<Straight>,
    /// Kept as long as peers may write.
    pub _buf: SymBuf,
}
