//! The two ways that data moves between ranks: puts of the heap's transport, or NCCL.

use std::fmt;
use std::str::FromStr;

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::Device;
use tilewire_symm::Heap;

/// The transport of a collective on CUDA devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum CollectiveBackend {
    /// Puts into symmetric memory. Sums are formed in f32 in the order of the ranks: the same bits
    /// on all ranks, with any number of rows.
    #[default]
    Put,
    /// NVIDIA NCCL, opened at run time. Its sums are rounded on their way, in an order of its
    /// choice.
    Nccl,
    /// The faster of the two for the slowest rank, measured at `prepare` with the plan's most rows.
    /// Not measured where only one can be used: puts where NCCL is not there, NCCL where GPUs do
    /// not reach each other. Bits of sums may differ from run to run.
    Fastest,
}

impl CollectiveBackend {
    /// All values with their names.
    pub const NAMES: [(&'static str, CollectiveBackend); 3] = [
        ("put", CollectiveBackend::Put),
        ("nccl", CollectiveBackend::Nccl),
        ("fastest", CollectiveBackend::Fastest),
    ];
}

impl fmt::Display for CollectiveBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES.iter().find(|(_, b)| b == self).map_or("?", |(n, _)| n))
    }
}

impl FromStr for CollectiveBackend {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, b)| *b).ok_or_else(|| {
            Error::invalid(format!(
                "unknown backend of collectives `{s}`; one of put, nccl, fastest"
            ))
        })
    }
}

/// Returns whether launches on a heap are queued on a device.
pub(crate) fn is_on_device(heap: &Heap) -> bool {
    !matches!(heap.device(), Device::Host)
}

/// Returns the default transport of a plan: puts, but NCCL where GPUs do not reach each other.
pub(crate) fn usual(heap: &Heap) -> CollectiveBackend {
    if heap.reaches_peers() || heap.team().size() == 1 {
        CollectiveBackend::Put
    } else {
        CollectiveBackend::Nccl
    }
}

/// Returns the transport of a plan before it has measured; it stays that one where there is nothing
/// to choose.
pub(crate) fn at_first(heap: &Heap, backend: CollectiveBackend) -> CollectiveBackend {
    if backend == CollectiveBackend::Fastest { usual(heap) } else { backend }
}

/// Returns an `Unsupported` error: the backend of `heap` does not have `what`; `instead` is its
/// hint.
pub(crate) fn not_on(heap: &Heap, what: &str, instead: &'static str) -> Error {
    let text = format!("the heap's backend, `{}`, has no {what}", heap.backend());
    Error::new(ErrorKind::Unsupported, text).hint(instead)
}

/// Refuses a transport that this heap cannot use. `Fastest` is always accepted: it chooses among
/// the usable ones.
///
/// # Errors
/// `Unsupported` for NCCL on the host, and for puts between GPUs that do not reach each other.
pub(crate) fn put_or_nccl(heap: &Heap, backend: CollectiveBackend) -> Result<()> {
    match backend {
        CollectiveBackend::Put if heap.reaches_peers() || heap.team().size() == 1 => Ok(()),
        CollectiveBackend::Put => {
            Err(not_on(heap, "puts between GPUs that do not reach each other", "say `nccl`"))
        }
        CollectiveBackend::Nccl if is_on_device(heap) => Ok(()),
        CollectiveBackend::Nccl => Err(not_on(heap, "NCCL", "make the heap on the `vmm` backend")),
        CollectiveBackend::Fastest => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_unknown_ones_list_the_legal() {
        for (n, b) in CollectiveBackend::NAMES {
            assert_eq!((n.parse::<CollectiveBackend>().unwrap(), b.to_string()), (b, n.to_owned()));
        }
        let e = "mpi".parse::<CollectiveBackend>().unwrap_err().to_string();
        assert!(e.contains("put, nccl, fastest"), "{e}");
    }
}
