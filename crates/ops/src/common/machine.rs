//! The rates by which plans choose among their schedules.

use tilewire_core::{DType, Result};
use tilewire_device::Device;
use tilewire_device::cuda::CudaContext;

use super::cuda::too_few_sms;

/// The rates that predictions assume.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine {
    /// GEMM rate in flop per microsecond.
    pub gemm_flop_per_us: f64,
    /// Rate at which a product of few rows reads its weights, in bytes per microsecond.
    pub weight_bytes_per_us: f64,
    /// A product takes as long as one whose rows are a multiple of this.
    pub tile_rows: usize,
    /// Rate of one link in bytes per microsecond.
    pub link_bytes_per_us: f64,
    /// One flag from a peer, or one launch, in microseconds.
    pub latency_us: f64,
}

/// One core of a laptop.
impl Default for Machine {
    fn default() -> Self {
        Self {
            gemm_flop_per_us: 20_000.0,
            weight_bytes_per_us: f64::INFINITY,
            tile_rows: 1,
            link_bytes_per_us: 5_000.0,
            latency_us: 5.0,
        }
    }
}

/// Of what tensor cores could do, what products of some size do: 690 TFLOP/s of an H200 that
/// multiplies for long (docs/lab/gemm.md).
const GEMM_SHARE: f64 = 0.70;
/// Of the rate of memory that clock and width of its bus give: 4.2 of 4.8 TB/s.
const MEMORY_SHARE: f64 = 0.87;
/// NVLink 4 between two GPUs, in bytes per microsecond; what a chunk costs beside its product and
/// its bytes: launches, flags, the wait for the slower rank.
const LINK_BYTES_PER_US: f64 = 300e3;
const CHUNK_US: f64 = 20.0;

impl Machine {
    /// The rates of `device` for products of `dtype`: on a GPU from what its driver says, where the
    /// shares that products reach were measured on two H200. Emulated GPUs, of a few
    /// multiprocessors, count as a laptop.
    ///
    /// # Errors
    /// What the driver reports.
    pub(crate) fn of(device: &Device, dtype: DType) -> Result<Self> {
        match device {
            Device::Cuda(ctx) if too_few_sms(ctx)?.is_none() => Self::of_gpu(ctx, dtype),
            _ => Ok(Self::default()),
        }
    }

    fn of_gpu(ctx: &CudaContext, dtype: DType) -> Result<Self> {
        let rates = ctx.rates();
        // Multiplications and additions of a multiprocessor in a clock; others than 16-bit types
        // are multiplied as f32.
        let (flop, share) = match (dtype, ctx.arch()?.as_str()) {
            (DType::BF16 | DType::F16, "sm_80") => (2048.0, GEMM_SHARE),
            (DType::BF16 | DType::F16, "sm_90a") => (4096.0, GEMM_SHARE),
            (DType::BF16 | DType::F16, "sm_100a") => (8192.0, GEMM_SHARE),
            // GPUs of workstations: sums of f32 at half of the rate or less.
            (DType::BF16 | DType::F16, _) => (1024.0, GEMM_SHARE),
            _ => (256.0, 0.6),
        };
        let clocks_per_us = f64::from(ctx.num_sms()?) * f64::from(rates.clock_khz) / 1e3;
        Ok(Self {
            gemm_flop_per_us: share * flop * clocks_per_us,
            weight_bytes_per_us: MEMORY_SHARE * rates.memory_bytes_per_us(),
            tile_rows: 128,
            link_bytes_per_us: LINK_BYTES_PER_US,
            latency_us: CHUNK_US,
        })
    }

    /// Time in microseconds of a product of so many rows, columns and steps, with weights of
    /// `weight_bytes`.
    pub(crate) fn gemm_us(&self, [m, n, k]: [usize; 3], weight_bytes: usize) -> f64 {
        let rows = m.next_multiple_of(self.tile_rows);
        let flop = 2.0 * rows as f64 * n as f64 * k as f64;
        (flop / self.gemm_flop_per_us).max(weight_bytes as f64 / self.weight_bytes_per_us)
    }
}
