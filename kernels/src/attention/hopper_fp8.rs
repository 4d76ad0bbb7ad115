//! The forward pass of e4m3 for sm_90a (`attention/hopper_fp8.cuh`): the unit and its sizes.

use super::hopper::{GROUP_ROWS, threads};
use crate::Source;

/// The forward pass by FP8 products, and what transposes values for it.
pub const SM90_ATTENTION_FP8: Source = Source {
    name: "attention/sm90_attention_fp8.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_attn_fp8_values", "tw_hopper_attn_fp8_fwd"],
};

/// The only head dimension.
pub const FP8_DIM: usize = 128;
/// Warpgroups that multiply.
const GROUPS: usize = 3;
/// Queries of a tile.
pub const FP8_ROWS: usize = GROUP_ROWS * GROUPS;
/// Threads of a block of `tw_hopper_attn_fp8_fwd`.
pub const FP8_THREADS: u32 = threads(GROUPS);
/// Keys of a tile: rows of a scale.
pub const FP8_KEYS: usize = 128;
/// Threads of a block of `tw_attn_fp8_values`.
pub const TURN_THREADS: u32 = 256;
/// Tiles of keys, and of values, that shared memory holds at once.
const STAGES: usize = 4;
/// Barriers, and what the loader tells the others, in bytes.
const STATE_BYTES: usize = 1024;

/// Returns the dynamic shared memory of `tw_hopper_attn_fp8_fwd` in bytes: two slots for queries,
/// or an output of twice their bytes, stages of keys and values, barriers.
pub const fn shared_bytes() -> u32 {
    (2 * FP8_ROWS * FP8_DIM * 2 + STAGES * FP8_KEYS * 2 * FP8_DIM + STATE_BYTES) as u32
}

/// Definitions for the compiler.
pub fn defines() -> Vec<(String, u64)> {
    let pairs = [("TW_ATTN_DQK", FP8_DIM), ("TW_ATTN_DV", FP8_DIM), ("TW_H8_STAGES", STAGES)];
    pairs.map(|(name, value)| (name.to_owned(), value as u64)).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_into_shared_memory() {
        assert!(shared_bytes() <= 232_448, "{}", shared_bytes());
        assert_eq!(TURN_THREADS as usize, FP8_KEYS / 16 * 32, "16 keys to a warp");
    }
}
