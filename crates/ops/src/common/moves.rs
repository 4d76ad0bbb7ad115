//! Copies to peers and from areas, by a kernel.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::TwMoves;
use tilewire_kernels::portable::{MOVE, MOVE_SEGMENTS, MOVE_THREADS, move_defines};

use super::cuda::load;
use super::lanes::Lanes;

/// Copies by a kernel, many at once: `collective/sm80_move.cu`.
pub(crate) struct Mover {
    kernel: Kernel,
    num_sms: u32,
}

/// Bytes that are worth a block of their own.
const BLOCK_BYTES: u64 = 8192;

impl Mover {
    pub fn new(ctx: &CudaContext) -> Result<Self> {
        let kernel = load(ctx, &MOVE, move_defines())?.kernel("tw_move")?;
        Ok(Self { kernel, num_sms: ctx.num_sms()? })
    }

    /// Queues copies of `(source, destination, bytes)` on `main`, except those of no bytes. The
    /// addresses must stay valid until the launch has ended: they are of symmetric memory, or of
    /// tensors that the caller has given to `stream.hold`.
    pub fn launch(&self, l: &Lanes<'_>, copies: &[(u64, u64, usize)]) -> Result<()> {
        let copies: Vec<_> = copies.iter().filter(|c| c.2 > 0).collect();
        for some in copies.chunks(MOVE_SEGMENTS) {
            let mut m: TwMoves = bytemuck::Zeroable::zeroed();
            for (i, (src, dst, len)) in some.iter().enumerate() {
                (m.src[i], m.dst[i], m.len[i]) = (*src, *dst, *len as u64);
            }
            let largest = m.len.iter().copied().max().unwrap_or(0);
            let most = u64::from(2 * self.num_sms).div_ceil(some.len() as u64);
            let blocks = largest.div_ceil(BLOCK_BYTES).clamp(1, most) as u32;
            let grid = Grid {
                blocks: [blocks, some.len() as u32, 1],
                ..Grid::new(1, MOVE_THREADS as u32)
            };
            // SAFETY: the kernel takes one TwMoves, as `abi` declares it; the ranges are
            // those of a checked launch, held by it.
            unsafe { self.kernel.launch(l.main, grid, LaunchArgs::new().arg(&m))? };
        }
        Ok(())
    }
}
