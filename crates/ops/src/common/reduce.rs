//! The kernel that adds the parts which ranks have sent.

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::TwReduce;
use tilewire_kernels::portable::{REDUCE, REDUCE_MANTISSAS, REDUCE_THREADS, reduce_defines};

use super::Bias;
use super::cuda::{load, mantissa, no_kernel};
use super::lanes::Lanes;

/// Sums of parts in the order of the ranks: `collective/sm80_reduce.cu`.
pub(crate) struct Reducer {
    kernel: Kernel,
    num_sms: u32,
}

/// One sum: addresses on the device, `stride` in bytes from rank to rank.
pub(crate) struct Sum {
    pub slots: u64,
    pub stride: u64,
    pub own: u64,
    pub out: u64,
    pub bias: Bias,
    pub rows: usize,
    pub cols: usize,
    pub scale: f32,
}

impl Reducer {
    /// Makes the kernel for parts of type `wire`, an own part of type `own`, and results of type
    /// `out`.
    ///
    /// # Errors
    /// `Unsupported` for types without a kernel.
    pub fn new(ctx: &CudaContext, [wire, own, out]: [DType; 3]) -> Result<Self> {
        let types = [wire, own, out].map(mantissa);
        let floats = [wire, own, out].iter().all(|d| d.is_float());
        if !floats || !REDUCE_MANTISSAS.contains(&types) {
            return Err(no_kernel(
                format!("a sum of {wire} parts of peers with this rank's {own} to {out}"),
                "use f32, bf16 or f16 for all of them",
            ));
        }
        let kernel = load(ctx, &REDUCE, reduce_defines(types))?.kernel("tw_reduce")?;
        Ok(Self { kernel, num_sms: ctx.num_sms()? })
    }

    /// Queues the sum. The addresses must stay valid until the launch has ended: they are of
    /// symmetric memory, or of tensors that the caller has given to `stream.hold`.
    pub fn launch(&self, l: &Lanes<'_>, sum: &Sum) -> Result<()> {
        let team = l.here.heap().team();
        self.launch_parts(l, sum, (Some(team.rank().idx()), team.size()))
    }

    /// Queues the sum as [`Reducer::launch`], of any number of parts, of which one may be `own`.
    pub fn launch_parts(
        &self,
        l: &Lanes<'_>,
        sum: &Sum,
        (own, parts): (Option<usize>, usize),
    ) -> Result<()> {
        let num = (sum.rows * sum.cols) as u64;
        if num == 0 {
            return Ok(());
        }
        let param = TwReduce {
            slots: sum.slots,
            stride: sum.stride,
            own: sum.own,
            out: sum.out,
            bias: sum.bias.addr,
            num,
            cols: sum.cols as u32,
            me: own.map_or(u32::MAX, |own| own as u32),
            size: parts as u32,
            scale: sum.scale,
            bias_out: u32::from(sum.bias.of_out),
            pad: 0,
        };
        let threads = REDUCE_THREADS as u32;
        let blocks = num.div_ceil(4 * REDUCE_THREADS).min(u64::from(self.num_sms) * 8) as u32;
        // SAFETY: the kernel takes one TwReduce, as `abi` declares it; the ranges are
        // those of a checked launch, held by it.
        unsafe {
            self.kernel.launch(l.main, Grid::new(blocks, threads), LaunchArgs::new().arg(&param))
        }
    }
}
