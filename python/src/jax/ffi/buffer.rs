//! Buffers of XLA as tensors.

use std::ffi::{c_int, c_void};

use tilewire::device::cuda::CudaMemory;
use tilewire::device::{Device, Memory};
use tilewire::prelude::*;

use super::Extension;
use crate::dlpack::nobody;

/// `XLA_FFI_Buffer`.
#[repr(C)]
pub struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// # Safety
/// The buffer's memory is there as long as it is used.
pub unsafe fn lend(b: &Buffer, device: &Device) -> Result<Tensor> {
    let dims: Vec<usize> = (0..b.rank.max(0) as usize)
        // SAFETY: there are `rank` extents.
        .map(|i| usize::try_from(unsafe { *b.dims.add(i) }).unwrap_or(0))
        .collect();
    let (shape, dtype) = (Shape::new(&dims)?, dtype_of(b.dtype)?);
    let len = shape.num_elems() * dtype.size();
    match device {
        Device::Host => {
            // SAFETY: the bytes are there as the caller says.
            let memory = unsafe { Memory::lent(b.data.cast(), len, nobody()) };
            Tensor::over(memory, 0, dtype, shape)
        }
        Device::Cuda(ctx) => {
            // SAFETY: as above.
            let memory = unsafe { CudaMemory::lent(ctx, b.data.addr() as u64, len, nobody()) };
            Tensor::over_cuda(memory, dtype, shape)
        }
    }
}

/// Element types by their number in XLA; booleans are bytes.
fn dtype_of(number: c_int) -> Result<DType> {
    Ok(match number {
        12 => DType::F64,
        11 => DType::F32,
        10 => DType::F16,
        16 => DType::BF16,
        20 => DType::F8E4M3,
        19 => DType::F8E5M2,
        33 => DType::E8M0,
        4 => DType::I32,
        5 => DType::I64,
        1 | 6 => DType::U8,
        other => {
            return Err(Error::invalid("tilewire does not know this element type")
                .expected(DType::ALL.map(|d| d.to_string()).join(", "))
                .seen(format_args!("XLA's type {other}")));
        }
    })
}
