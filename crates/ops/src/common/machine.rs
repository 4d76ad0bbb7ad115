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
    /// Tiles that are multiplied at once: a product takes as long as one whose tiles are a multiple
    /// of this. 0: its last tiles cost what the others do.
    pub num_sms: usize,
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
            num_sms: 0,
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
    /// An H200, as docs/lab/gemm.md measured it.
    #[cfg(test)]
    pub(crate) const H200: Self = Self {
        gemm_flop_per_us: 690e6,
        weight_bytes_per_us: 4.2e6,
        tile_rows: 128,
        num_sms: 132,
        link_bytes_per_us: 300e3,
        latency_us: 20.0,
    };

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
            num_sms: ctx.num_sms()? as usize,
            link_bytes_per_us: LINK_BYTES_PER_US,
            latency_us: CHUNK_US,
        })
    }

    /// Time in microseconds of a product of so many rows, columns and steps, with weights of
    /// `weight_bytes`.
    pub(crate) fn gemm_us(&self, [m, n, k]: [usize; 3], weight_bytes: usize) -> f64 {
        let rows = m.next_multiple_of(self.tile_rows);
        let cols = match self.num_sms {
            0 => n as f64,
            sms => self.filled_cols(rows / self.tile_rows, n, sms),
        };
        let flop = 2.0 * rows as f64 * cols * k as f64;
        (flop / self.gemm_flop_per_us).max(weight_bytes as f64 / self.weight_bytes_per_us)
    }

    /// Columns of a product that takes as long and whose tiles fill each wave of multiprocessors:
    /// at least `n`, by the width of tiles that wastes least.
    fn filled_cols(&self, tiles_down: usize, n: usize, sms: usize) -> f64 {
        let of = |(width, share): (usize, f64)| {
            let waves = (tiles_down * n.div_ceil(width)).div_ceil(sms);
            (waves * sms * width) as f64 / (share * tiles_down.max(1) as f64)
        };
        TILES.map(of).into_iter().fold(f64::INFINITY, f64::min).max(n as f64)
    }
}

/// Columns of a tile of 128 rows, and the rate of products that it cuts evenly, as a part of the
/// best one's (docs/lab/gemm.md).
const TILES: [(usize, f64); 4] = [(320, 0.98), (256, 1.0), (192, 0.97), (128, 0.85)];

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of products beside the whole one, measured on four H200 and four H100
    /// (docs/lab/gemm.md): 512 rows of gate_up fill 1.7 waves, 2048 rows of qkv one.
    #[test]
    fn the_last_wave_of_a_product_costs_a_whole_one() {
        let of = |m, n, k| Machine::H200.gemm_us([m, n, k], 2 * n * k);
        let parts = |rows: usize, n, k| 4.0 * of(rows / 4, n, k) / of(rows, n, k);
        let gate_up = parts(2048, 14336, 8192);
        assert!((1.1..1.2).contains(&gate_up), "{gate_up}");
        for (rows, n, k) in [(8192, 2560, 8192), (8192, 8192, 7168), (8192, 14336, 8192)] {
            let x = parts(rows, n, k);
            assert!((0.95..1.06).contains(&x), "{rows} {n} {k}: {x}");
        }
        // Nothing is faster than the rate.
        for (m, n, k) in [(1, 1, 1), (128, 320, 64), (16896, 256, 64), (8192, 8192, 8192)] {
            assert!(of(m, n, k) >= 2.0 * (m * n * k) as f64 / Machine::H200.gemm_flop_per_us);
        }
        let even = of(128 * 132, 256, 8192) / (2.0 * (128.0 * 132.0 * 256.0 * 8192.0) / 690e6);
        assert!((even - 1.0).abs() < 1e-9, "{even}");
    }
}
