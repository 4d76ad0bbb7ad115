//! The choice of the code that makes the products on a CUDA device.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, Result};

/// The implementation of the products of a GEMM on CUDA devices. The host has one only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmBackend {
    /// cuBLASLt where the library is present and supports the product, else the core for sm_90a
    /// where that does, else the portable kernel. The plan's `explain` says which of them, and why.
    #[default]
    Auto,
    /// tilewire's kernel for sm_80 and newer: every order, type, shape and epilogue.
    Portable,
    /// NVIDIA cuBLASLt, opened at run time; an error if it does not support the product.
    CublasLt,
    /// tilewire's core for sm_90a, by wgmma and TMA: bf16 and f16, every epilogue; an error if it
    /// does not support the product.
    Hopper,
}

impl GemmBackend {
    /// All values with their names.
    pub const NAMES: [(&'static str, GemmBackend); 4] = [
        ("auto", GemmBackend::Auto),
        ("portable", GemmBackend::Portable),
        ("cublaslt", GemmBackend::CublasLt),
        ("hopper", GemmBackend::Hopper),
    ];
}

impl fmt::Display for GemmBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES.iter().find(|(_, b)| b == self).map_or("?", |(n, _)| n))
    }
}

impl FromStr for GemmBackend {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, b)| *b).ok_or_else(|| {
            let names = Self::NAMES.map(|(n, _)| n).join(", ");
            Error::invalid(format!("unknown GEMM backend `{s}`; one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_unknown_ones_list_the_legal() {
        for (n, b) in GemmBackend::NAMES {
            assert_eq!((n.parse::<GemmBackend>().unwrap(), b.to_string()), (b, n.to_owned()));
        }
        let e = "cublas".parse::<GemmBackend>().unwrap_err().to_string();
        assert!(e.contains("auto, portable, cublaslt, hopper"), "{e}");
    }
}
