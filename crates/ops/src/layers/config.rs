//! How works are divided on a device: nothing here depends on the device, so that results do not either.

use tilewire_core::DType;
use tilewire_kernels::portable::LAYERS_THREADS;

use super::desc::{LayersDesc, SQUARES};

/// Threads and warps of a block.
pub(super) const THREADS: usize = LAYERS_THREADS as usize;
pub(super) const WARPS: usize = THREADS / 32;
/// Blocks whose parts of a norm's gradient are summed.
pub(super) const NORM_BLOCKS: usize = 528;
/// Those of the router's sums.
pub(super) const STATS_BLOCKS: usize = 128;
/// Those of a sum of squares.
pub(super) const SQUARE_BLOCKS: usize = 1024;
/// Parts of the rows whose sums by token are summed.
pub(super) const EMBED_SPLITS: usize = 16;
/// Dynamic shared memory that a kernel has without asking: 48 KiB less what it has of its own.
pub(super) const SHARED: usize = 40 << 10;
/// `TW_CLASSES` of the kernels: the most columns of a row that a warp keeps.
pub(super) const CLASSES: usize = 512;

/// Shared memory of `tw_norm_bwd` in bytes.
pub(super) fn norm_bwd_shared(dtype: DType, cols: usize) -> usize {
    cols * (8 + dtype.size())
}

/// Workspace of a plan in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Room {
    /// Parts of sums over rows, f32.
    pub partial: usize,
    /// Losses of rows, f32.
    pub row_loss: usize,
    /// Parts of sums of squares, f64.
    pub squares: usize,
}

impl Room {
    pub fn new(d: &LayersDesc) -> Self {
        let of_rows = NORM_BLOCKS.max(EMBED_SPLITS * 256) * d.cols;
        let partial = of_rows.max(STATS_BLOCKS * 2 * d.experts);
        let squares = SQUARES * SQUARE_BLOCKS;
        Self { partial: 4 * partial, row_loss: 4 * d.rows, squares: 8 * squares }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_holds_every_part() {
        let d = |cols, experts| LayersDesc { dtype: DType::BF16, rows: 10, cols, experts };
        let room = Room::new(&d(4096, 64));
        assert_eq!(room.partial, 4 * 16 * 256 * 4096);
        assert_eq!((room.row_loss, room.squares), (40, 8 * 4 * 1024));
        // Many experts, few columns.
        assert_eq!(Room::new(&d(1, 8)).partial, 4 * 4096);
        assert_eq!(Room::new(&d(1, 512)).partial, 4 * 128 * 1024);
        assert_eq!(norm_bwd_shared(DType::BF16, 4096), 40960);
    }
}
