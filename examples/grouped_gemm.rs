//! Tensors of another framework: grouped products read and write candle's memory where it lies, on
//! a GPU in the order of candle's stream.
//!
//! `cargo run --release --package tilewire --example grouped_gemm --features candle`, or
//! `--features candle-cuda` where CUDA's toolkit is; that program uses the CPU if there is no GPU.

use std::cell::Cell;
use std::io::Write;
use std::sync::Arc;

use candle_core::{self as candle, CpuStorage, InplaceOp1, Layout};
use tilewire::core::Rng;
use tilewire::device::cuda::{CudaMemory, usable};
use tilewire::device::{Device, Memory};
use tilewire::ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};
use tilewire::prelude::*;

const COUNTS: [i64; 4] = [37, 0, 101, 54]; // tokens of each expert
const E: usize = COUNTS.len();
const T: usize = 192; // tokens of all experts
const N: usize = 96; // output features
const K: usize = 64;

/// Asks candle for the address of a tensor's storage, as an operation that may write there.
struct Address(Cell<(*mut u8, DType)>);

impl InplaceOp1 for Address {
    fn name(&self) -> &'static str {
        "address"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle::Result<()> {
        self.0.set(match storage {
            CpuStorage::BF16(v) => (v.as_mut_ptr().cast(), DType::BF16),
            CpuStorage::I64(v) => (v.as_mut_ptr().cast(), DType::I64),
            _ => candle::bail!("the tensor is neither bf16 nor i64"),
        });
        Ok(())
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(&self, storage: &mut candle::CudaStorage, _: &Layout) -> candle::Result<()> {
        use candle::cuda_backend::CudaStorageSlice as Slice;
        use candle::cuda_backend::cudarc::driver::DevicePtrMut;
        let stream = storage.device.cuda_stream();
        // Candle notes a use by `stream` for its other streams, of which there are none here.
        let (address, dtype) = match &mut storage.slice {
            Slice::BF16(v) => (v.device_ptr_mut(&stream).0, DType::BF16),
            Slice::I64(v) => (v.device_ptr_mut(&stream).0, DType::I64),
            _ => candle::bail!("the tensor is neither bf16 nor i64"),
        };
        self.0.set((std::ptr::without_provenance_mut(address as usize), dtype));
        Ok(())
    }
}

/// A tensor of tilewire over the memory of one of candle, which lives as long as the result.
///
/// # Safety
/// Candle must not use the tensor while work that uses the result runs.
unsafe fn lent(t: &candle::Tensor, device: &Device) -> candle::Result<Tensor> {
    let address = Address(Cell::new((std::ptr::null_mut(), DType::BF16)));
    t.inplace_op1(&address)?;
    let ((ptr, dtype), Some((first, end))) = (address.0.get(), t.layout().contiguous_offsets())
    else {
        candle::bail!("the tensor is not contiguous");
    };
    let (len, lender) = ((end - first) * dtype.size(), Arc::new(t.clone()));
    let ptr = ptr.wrapping_add(first * dtype.size());
    let over = |shape| match device {
        // SAFETY: the elements of the tensor, which is kept; the rest is the caller's contract.
        Device::Host => Tensor::over(unsafe { Memory::lent(ptr, len, lender) }, 0, dtype, shape),
        Device::Cuda(ctx) => {
            // SAFETY: as above.
            let memory = unsafe { CudaMemory::lent(ctx, ptr.addr() as u64, len, lender) };
            Tensor::over_cuda(memory, dtype, shape)
        }
    };
    Shape::new(t.dims()).and_then(over).map_err(candle::Error::wrap)
}

/// The device and the stream of tilewire for a device of candle, which outlives them.
fn place(on: &candle::Device) -> Result<(Device, Stream)> {
    match on {
        #[cfg(feature = "candle-cuda")]
        candle::Device::Cuda(on) => {
            use tilewire::device::cuda::{CudaContext, CudaStream};
            let theirs = on.cuda_stream();
            let ctx = CudaContext::new(theirs.context().ordinal() as u32)?;
            // SAFETY: the device keeps its stream.
            let stream = unsafe { CudaStream::borrow(&ctx, theirs.cu_stream().cast()) }?;
            Ok((Device::Cuda(ctx), Stream::Cuda(stream)))
        }
        _ => Ok((Device::Host, Stream::new("main")?)),
    }
}

/// Compares `got` with candle's product of `a` and `b` in f64, and returns the largest error.
fn compare(got: &candle::Tensor, a: &candle::Tensor, b: &candle::Tensor) -> candle::Result<f64> {
    let values = |t: &candle::Tensor| t.flatten_all()?.to_vec1::<f64>();
    let (got, want) = (values(got)?, values(&a.matmul(b)?)?);
    let sizes = values(&a.abs()?.matmul(&b.abs()?)?)?;
    let unit = a.dim(1)? as f64 * f64::from(f32::EPSILON);
    let mut largest = 0.0f64;
    for ((got, want), size) in got.iter().zip(&want).zip(&sizes) {
        // Sums in f32 are rounded to the 8 bits of bf16. What was not written is NaN.
        let (error, bound) = ((got - want).abs(), want.abs() / 256.0 + unit * size);
        if error.is_nan() || error > bound {
            candle::bail!("an element is {got} and should be {want}");
        }
        largest = largest.max(error);
    }
    Ok(largest)
}

/// Queues the three products of a layer of experts; `w` and `dw` are `[E * N, K]`.
fn launch(
    s: &Stream,
    counts: &Tensor,
    [x, w, dy, y, dx, dw]: [Tensor; 6],
) -> Result<GroupedGemmPlan> {
    let desc = GroupedDesc { grad: DType::BF16, ..GroupedDesc::new(E, T, N, K, DType::BF16) };
    let plan = GroupedGemmPlan::new(desc)?;
    plan.prepare(s)?;
    let splits = || Splits::counts(counts);
    let (a, b) = ((&x).into(), (&w).into());
    let t = GroupedFprop { x: a, w: b, bias: None, splits: splits(), out: y, aux_out: None };
    plan.fprop(s, t)?.join(s)?;
    let t = GroupedDgrad { dy: (&dy).into(), w: (&w).into(), splits: splits(), dx };
    plan.dgrad(s, t)?.join(s)?;
    let (x, dy, dw) = (x.into(), dy.into(), (&dw).into());
    plan.wgrad(s, GroupedWgrad { x, dy, splits: splits(), dw, mask: None, dbias: None })?
        .join(s)?;
    Ok(plan)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let gpu = cfg!(feature = "candle-cuda") && usable().is_ok();
    // Candle's usual stream is another one on each thread, and cannot be borrowed.
    let on = if gpu { candle::Device::new_cuda_with_stream(0)? } else { candle::Device::Cpu };
    let mut rng = Rng::new(7);
    let mut random = |rows: usize, cols: usize| {
        let values = (0..rows * cols).map(|_| rng.uniform(-1.0, 1.0)).collect();
        candle::Tensor::from_vec(values, (rows, cols), &on)?.to_dtype(candle::DType::BF16)
    };
    let (x, w, dy) = (random(T, K)?, random(E * N, K)?, random(T, N)?);
    let unwritten = |t: &candle::Tensor| t.ones_like()? * f64::NAN;
    let (y, dx, dw) = (unwritten(&dy)?, unwritten(&x)?, unwritten(&w)?);
    let counts = candle::Tensor::new(&COUNTS, &on)?;

    let (device, stream) = place(&on)?;
    // SAFETY: on a GPU candle queues its own work behind this; on a CPU it waits for the stream.
    let lent = |t: &candle::Tensor| unsafe { lent(t, &device) };
    let all = [lent(&x)?, lent(&w)?, lent(&dy)?, lent(&y)?, lent(&dx)?, lent(&dw)?];
    let plan = launch(&stream, &lent(&counts)?, all)?;
    if !gpu {
        stream.synchronize()?;
    }

    let host = |t: candle::Tensor| t.to_device(&candle::Device::Cpu)?.to_dtype(candle::DType::F64);
    let (x, w, dy, y, dx, dw) = (host(x)?, host(w)?, host(dy)?, host(y)?, host(dx)?, host(dw)?);
    plan.check()?;
    let (mut first, mut worst) = (0, [0.0f64; 3]);
    for (e, rows) in COUNTS.iter().map(|&rows| rows as usize).enumerate() {
        let of = |t: &candle::Tensor| t.narrow(0, first, rows);
        let (x, dy, w) = (of(&x)?, of(&dy)?, w.narrow(0, e * N, N)?);
        let errors = [
            compare(&of(&y)?, &x, &w.t()?)?,
            compare(&of(&dx)?, &dy, &w)?,
            compare(&dw.narrow(0, e * N, N)?, &dy.t()?, &x)?,
        ];
        worst = std::array::from_fn(|i| errors[i].max(worst[i]));
        first += rows;
    }
    writeln!(
        std::io::stdout(),
        "{:?}: {E} experts, {T} tokens, {K} to {N} features in bf16; largest errors {worst:.4?}",
        on.location()
    )?;
    Ok(())
}
