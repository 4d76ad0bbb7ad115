//! Which plan a call needs.

use tilewire::ops::Algo;
use tilewire::ops::ag_gemm::AgGemmDesc;
use tilewire::ops::collective::CollectiveDesc;
use tilewire::ops::gemm_ar::GemmArDesc;
use tilewire::ops::gemm_rs::GemmRsDesc;

/// Everything that plans of one world differ in. Rows are those that the plan was made for: a power
/// of two for each rank, unless the rows of each rank are given.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Key {
    AgGemm(AgGemmDesc, Option<Algo>),
    GemmRs(GemmRsDesc, Option<Algo>),
    GemmAr(GemmArDesc, Option<Algo>),
    Collective(CollectiveDesc),
}

/// Rows that a plan is made for so that calls with up to as many use it.
pub fn rounded(rows: usize) -> usize {
    rows.max(1).checked_next_power_of_two().unwrap_or(rows)
}
