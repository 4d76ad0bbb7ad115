//! The choice of the code that makes the products on a CUDA device.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, ErrorKind, Result};

/// The implementation of the products of a GEMM on CUDA devices. The host has one only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmBackend {
    /// The core for sm_90a in plans of up to 32 rows whose columns fill no more tiles than there
    /// are multiprocessors, with A as `[m, k]`; else cuBLASLt where the library is present and
    /// supports the product, else the core where that does, else the portable kernel. The plan's
    /// `explain` says which of them, and why.
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

/// The choice of what may make the products of a plan on a CUDA device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct GemmChoice {
    pub backend: GemmBackend,
    /// The most multiprocessors of a launch, if it may not take all.
    pub num_sms: Option<u32>,
    /// Parts into which the core for sm_90a cuts contractions; without it plans choose.
    pub parts: Option<usize>,
}

impl GemmChoice {
    pub fn with_num_sms(self, num: usize) -> Self {
        Self { num_sms: Some(u32::try_from(num.max(1)).unwrap_or(u32::MAX)), ..self }
    }

    /// # Errors
    /// `Unsupported` for a limit that the backend which was asked for does not keep.
    pub fn check(self) -> Result<()> {
        match (self.num_sms, self.backend) {
            (Some(_), GemmBackend::Portable | GemmBackend::CublasLt) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("the backend `{}` takes all multiprocessors", self.backend),
            )
            .hint("use `hopper` or `auto`, or no limit of multiprocessors")),
            _ => Ok(()),
        }
    }

    /// The clusters of `size` blocks that a launch has on a device of `all` multiprocessors: one at
    /// least.
    pub fn clusters(self, all: u32, size: u32) -> u32 {
        (self.num_sms.unwrap_or(all).min(all) / size).max(1)
    }

    /// Words for `explain` where kernels make the products that do not keep the limit.
    pub fn not_kept(self) -> &'static str {
        if self.num_sms.is_some() { "; it takes all multiprocessors" } else { "" }
    }
}

impl From<GemmBackend> for GemmChoice {
    fn from(backend: GemmBackend) -> Self {
        Self { backend, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_multiprocessors_is_that_of_whole_clusters() {
        let choice = GemmChoice::default();
        assert_eq!((choice.clusters(132, 2), choice.not_kept()), (66, ""));
        for (num, want) in [(0, 1), (1, 1), (3, 1), (4, 2), (131, 65), (132, 66), (1 << 40, 66)] {
            assert_eq!(choice.with_num_sms(num).clusters(132, 2), want, "{num}");
        }
        for by in GemmBackend::NAMES.map(|(_, by)| by) {
            let keeps = matches!(by, GemmBackend::Auto | GemmBackend::Hopper);
            assert!(GemmChoice::from(by).check().is_ok());
            assert_eq!(GemmChoice::from(by).with_num_sms(2).check().is_ok(), keeps, "{by}");
        }
    }

    #[test]
    fn names_parse_and_unknown_ones_list_the_legal() {
        for (n, b) in GemmBackend::NAMES {
            assert_eq!((n.parse::<GemmBackend>().unwrap(), b.to_string()), (b, n.to_owned()));
        }
        let e = "cublas".parse::<GemmBackend>().unwrap_err().to_string();
        assert!(e.contains("auto, portable, cublaslt, hopper"), "{e}");
    }
}
