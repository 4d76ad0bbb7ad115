//! The choice of the kernels on a CUDA device.

use std::fmt;
use std::str::FromStr;

use tilewire_core::{Error, Result};

/// The implementation on CUDA devices. The host has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum AttnBackend {
    /// The kernels for sm_90a where they support the description, on whole GPUs, and the documents
    /// are not shorter than 96 rows on average; else the portable kernels. Forward, where all
    /// sequences of the plan and of the launch have at most 16 queries, kernels that cut the keys
    /// into pieces: bf16 or f16, head dimensions that are multiples of 8 up to 256, a positive
    /// scale, no softcap, bias or dropout, and sequences that the host knows. Other forward passes
    /// of f8e4m3 with scales of 128 tokens and bf16 results as [`Hopper`](AttnBackend::Hopper)
    /// multiplies them; widened where it does not support the description, where a launch has
    /// offsets or more sequences than the plan and than 512, and where q, k, v or out do not begin
    /// at multiples of 16 bytes.
    #[default]
    Auto,
    /// tilewire's kernels for sm_80 and newer: every type, head dimension and option.
    Portable,
    /// tilewire's kernels for sm_90a, by wgmma and TMA: bf16 and f16, head dimensions of 64, 128,
    /// 256, and 192 with 128; masks, packed rows and every option. An error if the forward pass
    /// does not support the description. The backward pass is by them too, except for gradients of
    /// another type than the inputs', which the portable kernels make: `AttentionPlan::explain`
    /// says which. With f8e4m3 and scales of 128 tokens (`HeadScales::Block128`) the forward pass
    /// multiplies the codes: heads of 128, masks, packed rows, sinks; probabilities are rounded to
    /// e4m3. The backward pass, launches by offsets, and f8e4m3 with a scale for each token are
    /// widened (`AttentionDesc::widened`).
    Hopper,
}

/// Queries of a sequence, on average, from which on one kernel makes all gradients on sm_90a where
/// it can: it is faster than two there (docs/lab/attention.md).
pub const LONG_QUERIES: usize = 4096;

/// The kernels of sm_90a that make the gradients of local attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fusion {
    /// Two, of seven products.
    None,
    /// One, of five; dq is added in a fixed order.
    Ordered,
    /// One; dq is added in any order.
    Unordered,
    /// One for launches that it is faster for, and two for the others; dq is added in a fixed
    /// order.
    OrderedIfFaster,
    /// The same; dq is added in any order.
    UnorderedIfFaster,
}

impl AttnBackend {
    /// All values with their names.
    pub const NAMES: [(&'static str, AttnBackend); 3] = [
        ("auto", AttnBackend::Auto),
        ("portable", AttnBackend::Portable),
        ("hopper", AttnBackend::Hopper),
    ];
}

impl fmt::Display for AttnBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES.iter().find(|(_, b)| b == self).map_or("?", |(n, _)| n))
    }
}

impl FromStr for AttnBackend {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, b)| *b).ok_or_else(|| {
            let names = Self::NAMES.map(|(n, _)| n).join(", ");
            Error::invalid(format!("unknown attention backend `{s}`; one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_unknown_ones_list_the_legal() {
        for (n, b) in AttnBackend::NAMES {
            assert_eq!((n.parse::<AttnBackend>().unwrap(), b.to_string()), (b, n.to_owned()));
        }
        let e = "cudnn".parse::<AttnBackend>().unwrap_err().to_string();
        assert!(e.contains("auto, portable, hopper"), "{e}");
    }
}
