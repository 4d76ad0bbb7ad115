//! Who moves the data of a collective on CUDA devices.

use std::fmt;
use std::str::FromStr;

use tilewire_core::{Error, Result};

/// What a collective on CUDA devices goes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum CollectiveBackend {
    /// Puts into symmetric memory. Sums are formed in f32 in the order of the ranks: the same bits on
    /// all ranks, with any number of rows.
    #[default]
    Put,
    /// NVIDIA NCCL, opened at run time. Its sums are rounded on their way, in an order of its choice.
    Nccl,
    /// The one that is faster for the slowest rank with the plan's most rows, measured at `prepare`;
    /// puts where there is no NCCL, NCCL where GPUs do not reach each other. Sums may then have other bits from run to run.
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
