//! The division of the layer works on a device: nothing here depends on the device, so that results
//! do not either.

use tilewire_core::DType;
use tilewire_kernels::portable::{LAYERS_CHUNK, LAYERS_KEPT, LAYERS_THREADS, LAYERS_TOKENS};

use crate::layers::desc::{LayersDesc, SQUARES};

/// Threads and warps of a block.
pub(super) const THREADS: usize = LAYERS_THREADS as usize;
pub(super) const WARPS: usize = THREADS / 32;
/// Blocks whose parts of a norm's gradient are summed.
pub(super) const NORM_BLOCKS: usize = 528;
/// The most blocks of the router: as many as an H200 runs at once, each with several rows
/// in turn.
pub(super) const ROUTER_BLOCKS: usize = 264;
// A sum over blocks counts them in 11 bits.
const _: () = assert!(ROUTER_BLOCKS < 2048);
/// Those of its gradient and of the loss.
pub(super) const CLASS_BLOCKS: usize = 396;
/// Those of a sum of squares.
pub(super) const SQUARE_BLOCKS: usize = 1024;
/// Values of a token.
pub(super) const TOKENS: usize = 256;
/// Dynamic shared memory that a kernel has without asking: 48 KiB less what it has of its own.
pub(super) const SHARED: usize = 40 << 10;
/// The most columns of a row that a warp keeps.
pub(super) const CLASSES: usize = 32 * LAYERS_KEPT as usize;

/// Lanes that take a row of so many classes, at most [`CLASSES`].
pub(super) fn lanes(classes: usize) -> usize {
    classes.div_ceil(LAYERS_KEPT as usize).next_power_of_two().max(4)
}

/// Blocks for `n` rows of so many classes, at most `most`.
pub(super) fn class_blocks(n: usize, classes: usize, most: usize) -> usize {
    n.div_ceil(THREADS / lanes(classes)).clamp(1, most)
}

/// Blocks that sort the tokens of `n` rows.
pub(super) fn token_blocks(n: usize) -> usize {
    n.div_ceil(LAYERS_TOKENS as usize).max(1)
}

/// The most chunks of the rows of all tokens: each token has one that is not full, and may have no
/// row.
pub(super) fn token_chunks(n: usize) -> usize {
    n / LAYERS_CHUNK as usize + TOKENS
}

/// Blocks that take the columns of one chunk.
pub(super) fn token_parts(cols: usize) -> usize {
    cols.div_ceil(4 * THREADS)
}

/// Shared memory of `tw_norm_bwd` in bytes.
pub(super) fn norm_bwd_shared(dtype: DType, cols: usize) -> usize {
    cols * (8 + dtype.size())
}

/// Workspace of a plan in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WorkspaceBytes {
    /// Parts of sums over rows, f32.
    pub partial: usize,
    /// Parts of losses, f64.
    pub losses: usize,
    /// Parts of sums of squares, f64.
    pub squares: usize,
    /// Counts of tokens by block, u32.
    pub counts: usize,
    /// Sums of a router over its blocks, u64.
    pub stats: usize,
    /// Rows by token, u32.
    pub order: usize,
    /// Rows and chunks of the tokens before, u64.
    pub starts: usize,
    /// Of the loss, and of each token and part of its columns, u32.
    pub tickets: usize,
}

impl WorkspaceBytes {
    pub fn new(d: &LayersDesc) -> Self {
        let of_rows = NORM_BLOCKS.max(token_chunks(d.rows)) * d.cols;
        Self {
            partial: 4 * of_rows,
            stats: 8 * 2 * d.experts,
            losses: 8 * CLASS_BLOCKS,
            squares: 8 * SQUARES * SQUARE_BLOCKS,
            counts: 4 * TOKENS * token_blocks(d.rows),
            order: 4 * d.rows,
            starts: 8 * (TOKENS + 1),
            tickets: 4 * (1 + TOKENS * token_parts(d.cols)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_holds_every_part() {
        let d = |rows, cols, experts| LayersDesc { dtype: DType::BF16, rows, cols, experts };
        let bytes = WorkspaceBytes::new(&d(10, 4096, 64));
        assert_eq!(bytes.partial, 4 * 528 * 4096);
        assert_eq!((bytes.losses, bytes.squares), (8 * 396, 8 * 4 * 1024));
        assert_eq!((bytes.counts, bytes.order, bytes.tickets), (1024, 40, 4 * (1 + 4 * 256)));
        // Many rows: a chunk each 64, and one more for each token.
        let bytes = WorkspaceBytes::new(&d(32768, 4096, 64));
        assert_eq!((bytes.partial, bytes.counts), (4 * 768 * 4096, 16 * 1024));
        assert_eq!(WorkspaceBytes::new(&d(10, 1, 511)).stats, 8 * 1022);
        assert_eq!(norm_bwd_shared(DType::BF16, 4096), 40960);
    }

    /// Chunks of any distribution of tokens fit, as the kernels divide them.
    #[test]
    fn chunks_of_tokens_fit() {
        let chunk = LAYERS_CHUNK as usize;
        for (n, counts) in
            [(0, vec![]), (1, vec![1]), (4096, vec![16; 256]), (16640, vec![65; 256])]
        {
            let counts = counts.into_iter().chain(std::iter::repeat(0)).take(TOKENS);
            let chunks: usize = counts.map(|c: usize| c.div_ceil(chunk).max(1)).sum();
            assert!(chunks <= token_chunks(n), "{n}: {chunks}");
        }
    }

    #[test]
    fn lanes_of_a_row_keep_all_of_it() {
        for classes in 1..=CLASSES {
            let lanes = lanes(classes);
            assert!([4, 8, 16, 32].contains(&lanes) && lanes * LAYERS_KEPT as usize >= classes);
            assert!(lanes == 4 || lanes / 2 * (LAYERS_KEPT as usize) < classes);
        }
        let blocks = |n| class_blocks(n, 64, ROUTER_BLOCKS);
        assert_eq!((blocks(0), blocks(65), blocks(1 << 20)), (1, 2, 264));
    }
}
