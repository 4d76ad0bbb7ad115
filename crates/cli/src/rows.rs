//! Result rows of `verify` and `bench`: documented and versioned.

use serde::{Deserialize, Serialize};

/// Version of the row format; grows when a field changes meaning or disappears.
pub const ROW_VERSION: u32 = 1;

/// One result. Times are microseconds, the maximum over ranks; `null` where not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Operation and variant, e.g. `ag_gemm/fused`.
    pub op: String,
    /// Backend of the symmetric memory.
    pub backend: String,
    /// Device the arithmetic ran on.
    pub device: String,
    /// Element type of the inputs.
    pub dtype: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Problem size in words.
    pub shape: String,
    /// The arithmetic alone.
    pub t_gemm_us: Option<f64>,
    /// The communication alone.
    pub t_comm_us: Option<f64>,
    /// One after the other: the baseline.
    pub t_seq_us: Option<f64>,
    /// The operation.
    pub t_ours_us: Option<f64>,
    /// Largest absolute error over all ranks; `null` if something is not finite.
    pub max_err: Option<f64>,
    /// Elements (or other checks) that are wrong, over all ranks.
    pub wrong: u64,
    /// The backend has no such operation, and said so before anything ran.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsupported: bool,
    /// What went wrong first, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Row {
    /// Baseline time over ours.
    pub fn speedup(&self) -> Option<f64> {
        Some(self.t_seq_us? / self.t_ours_us?)
    }

    /// Share of the shorter of arithmetic and communication that was hidden, in per cent.
    pub fn hidden(&self) -> Option<f64> {
        let (g, c) = (self.t_gemm_us?, self.t_comm_us?);
        let shorter = g.min(c);
        (shorter > 0.0).then(|| 100.0 * (g + c - self.t_ours_us.unwrap_or(g + c)) / shorter)
    }
}
