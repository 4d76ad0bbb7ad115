//! Rates of a device, as its driver gives them.

use cudarc::driver::sys::CUdevice_attribute as A;

use super::context::CudaContext;

/// Clocks of a device, and the width of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRates {
    /// Highest clock of the multiprocessors in kHz.
    pub clock_khz: u32,
    /// Highest clock of the memory in kHz: it moves a bit on each line twice in a clock.
    pub memory_clock_khz: u32,
    /// Lines to the memory.
    pub memory_bits: u32,
}

impl DeviceRates {
    /// The most bytes of memory that can be read in a microsecond.
    pub fn memory_bytes_per_us(&self) -> f64 {
        2.0 * f64::from(self.memory_clock_khz) / 1e3 * f64::from(self.memory_bits) / 8.0
    }
}

impl CudaContext {
    /// The device's rates. Numbers that the driver does not know are those of an H100.
    pub fn rates(&self) -> DeviceRates {
        let of = |which, or: u32| match self.attribute(which) {
            Ok(v) if v > 0 => v as u32,
            _ => or,
        };
        DeviceRates {
            clock_khz: of(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_830_000),
            memory_clock_khz: of(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2_619_000),
            memory_bits: of(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_moves_two_bits_a_clock_on_each_line() {
        let h200 =
            DeviceRates { clock_khz: 1_980_000, memory_clock_khz: 3_201_000, memory_bits: 6144 };
        let tb_per_s = h200.memory_bytes_per_us() / 1e6;
        assert!((tb_per_s - 4.9).abs() < 0.05, "{tb_per_s}");
    }
}
