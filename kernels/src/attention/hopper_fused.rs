//! The kernel for sm_90a that makes all gradients (`attention/hopper_fused.cuh`): variants of the
//! unit.

use super::hopper::TILE_M;
use crate::Source;

/// The backward pass by five products.
pub const SM90_ATTENTION_GRADS: Source = Source {
    name: "attention/sm90_attention_grads.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_hopper_attn_grads", "tw_attn_dq_of_sums"],
};

/// Queries of a tile.
pub const FUSED_ROWS: usize = 64;
/// Threads of a block of `tw_attn_dq_of_sums`.
pub const SUMS_THREADS: u32 = 256;
/// The only head dimension.
const DIM: usize = 128;
/// Tiles of queries that shared memory holds at once.
const STAGES: usize = 2;
/// Barriers, and what the loader tells the others, in bytes.
const STATE_BYTES: usize = 1024;

/// A variant of [`SM90_ATTENTION_GRADS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HopperFused {
    /// f16 in place of bf16.
    pub f16: bool,
    /// Tiles of queries that shared memory holds at once.
    pub stages: usize,
    /// dq is added in any order.
    pub unordered: bool,
}

impl HopperFused {
    /// Returns the variant of a type, which adds dq in order.
    pub const fn of(f16: bool) -> HopperFused {
        HopperFused { f16, stages: STAGES, unordered: false }
    }

    /// The same in any order.
    #[must_use]
    pub const fn unordered(self) -> HopperFused {
        HopperFused { unordered: true, ..self }
    }

    /// Every variant that a plan may load.
    pub fn all() -> Vec<HopperFused> {
        let ordered = [false, true].map(Self::of);
        [ordered, ordered.map(Self::unordered)].concat()
    }

    /// Returns true for heads that there is a variant for: of q and k, and of v. Registers hold dk,
    /// dv and a half of dq of these.
    pub fn fits(dqk: usize, dv: usize) -> bool {
        (dqk, dv) == (DIM, DIM)
    }

    /// Dynamic shared memory of the kernel that makes the gradients, in bytes: a tile of k and v,
    /// stages of q and d_out with their lse and delta, two tiles of ds and of dq, barriers.
    pub fn shared_bytes(&self) -> u32 {
        let rows = TILE_M + self.stages * FUSED_ROWS;
        let sums = 2 * TILE_M * FUSED_ROWS * 2 + 2 * FUSED_ROWS * DIM * 4;
        (rows * 2 * DIM * 2 + self.stages * FUSED_ROWS * 8 + sums + STATE_BYTES) as u32
    }

    /// Returns how many words deal out tiles and count turns, of `tiles` own tiles of queries.
    pub const fn words(tiles: usize, heads_q: usize) -> usize {
        1 + tiles * (TILE_M / FUSED_ROWS) * heads_q
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let pairs = [
            ("TW_ATTN_TYPE", u64::from(self.f16)),
            ("TW_ATTN_DQK", DIM as u64),
            ("TW_ATTN_DV", DIM as u64),
            ("TW_HB_FUSED_STAGES", self.stages as u64),
            ("TW_ATTN_EXTRA", 0),
            ("TW_HB_UNORDERED", u64::from(self.unordered)),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_into_shared_memory() {
        for v in HopperFused::all() {
            assert!(v.shared_bytes() <= 232_448, "{v:?}: {}", v.shared_bytes());
        }
    }
}
