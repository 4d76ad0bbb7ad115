//! Attention of few queries over many keys (`attention/sm80_attention_split.cu`): variants of the
//! unit.

use crate::Source;

/// The forward pass of packed query heads, over pieces of the keys.
pub const SM80_ATTENTION_SPLIT: Source = Source {
    name: "attention/sm80_attention_split.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_attn_split", "tw_attn_split_merge"],
};

/// Segments of each side that a launch contains.
pub const SPLIT_FEW: usize = 48;
/// Keys of a tile: pieces are whole tiles.
pub const SPLIT_KEYS: usize = 64;
/// Threads of a block.
pub const SPLIT_THREADS: u32 = 128;

/// A variant of [`SM80_ATTENTION_SPLIT`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    /// f16 in place of bf16.
    pub f16: bool,
    /// Head dimension of q and k, a multiple of 8 up to 256.
    pub dqk: usize,
    /// Head dimension of v and out, a multiple of 8 up to 256.
    pub dv: usize,
    /// Rows of a tile, of packed queries: 16, 32 with values of at most 128 elements, or 64, of
    /// which each warp has 16.
    pub rows: usize,
    /// Tiles of keys and values in shared memory.
    pub stages: usize,
}

impl Split {
    /// The usual variant, for tiles of up to `rows` packed queries.
    pub fn new(f16: bool, (dqk, dv): (usize, usize), rows: usize) -> Split {
        // Two blocks to a multiprocessor of sm_90 where that leaves each two tiles under way.
        let stages = match dqk.max(dv) {
            0..=64 | 129..=192 => 4,
            _ => 3,
        };
        // Sums of all rows are in the registers of each warp, unless it has rows of its own.
        let rows = match rows {
            0..=16 => 16,
            17..=32 if dv <= 128 => 32,
            _ => 64,
        };
        Split { f16, dqk, dv, rows, stages }
    }

    /// Variants that are compiled ahead and tested: the usual head dimensions, of f16 one.
    pub fn all() -> Vec<Split> {
        let bf16 = [(128, 128), (64, 64), (256, 256), (192, 128)].map(|d| (false, d));
        let each = bf16.into_iter().chain([(true, (128, 128))]);
        let mut all: Vec<_> =
            each.flat_map(|(f16, d)| [16, 32, 64].map(|rows| Split::new(f16, d, rows))).collect();
        all.dedup();
        all
    }

    /// Dynamic shared memory in bytes: queries, then stages of keys and values.
    pub fn shared_bytes(&self) -> u32 {
        let (qk, v) = (self.dqk.next_multiple_of(64), self.dv.next_multiple_of(64));
        2 * (self.rows * qk + self.stages * SPLIT_KEYS * (qk + v)) as u32
    }

    /// Returns whether the sums of all warps fit in the place of keys and values.
    pub fn sums_fit(&self) -> bool {
        let (qk, v) = (self.dqk.next_multiple_of(64), self.dv.next_multiple_of(64));
        let slices = if self.rows == 64 { 1 } else { 4 };
        4 * slices * self.rows * self.dv <= self.stages * 2 * SPLIT_KEYS * (qk + v)
    }

    /// Static shared memory in bytes, at most.
    pub fn static_bytes(&self) -> u32 {
        128 + 8 * self.rows as u32 * if self.rows == 64 { 1 } else { 4 }
    }

    /// Bytes of the results of a tile: sums of values, and two numbers of each row.
    pub fn part_bytes(&self) -> (usize, usize) {
        (4 * self.rows * self.dv, 8 * self.rows)
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let all = [
            ("TW_ATTN_TYPE", usize::from(self.f16)),
            ("TW_ATTN_DQK", self.dqk),
            ("TW_ATTN_DV", self.dv),
            ("TW_SPLIT_ROWS", self.rows),
            ("TW_SPLIT_STAGES", self.stages),
        ];
        all.iter().map(|(n, v)| ((*n).to_owned(), *v as u64)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_into_shared_memory() {
        assert_eq!(Split::all().len(), 14);
        for v in Split::all() {
            assert!(v.sums_fit(), "{v:?}");
            let bytes = v.shared_bytes() + v.static_bytes();
            assert!(bytes <= 227 << 10, "{v:?}: {bytes}");
            // A block of a multiprocessor reserves 1 KiB more.
            let blocks = (228 << 10) / (bytes + 1024);
            assert_eq!(blocks, if v.dqk <= 64 { 3 } else { 2 - u32::from(v.dqk > 128) }, "{v:?}");
        }
        // Of one stage less than any device asks for.
        let few = Split { stages: 2, ..Split::new(false, (64, 128), 32) };
        assert!(!few.sums_fit() && Split { stages: 3, ..few }.sums_fit());
    }
}
