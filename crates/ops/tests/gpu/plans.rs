//! What plans beside each other and tensors that begin anywhere mean to kernels that all of them
//! share.

use tilewire_core::{DType, ErrorKind, Rng, Shape};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::layers::{AddNorm, LayersDesc, LayersPlan, NormBwd, SquareSum};

use crate::common::{Gpu, gpu};

fn random(gpu: &Gpu, rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> Tensor {
    let v: Vec<f32> = (0..rows * cols).map(|_| rng.normal()).collect();
    gpu.move_here(&Tensor::from_f32(&v, dtype, Shape::d2(rows, cols)).unwrap())
}

fn prepared(stream: &Stream, cols: usize) -> LayersPlan {
    let desc = LayersDesc { dtype: DType::BF16, rows: 8, cols, experts: 8 };
    let plan = LayersPlan::new(desc).unwrap();
    plan.prepare(stream).unwrap();
    plan
}

/// Rows of 8192 take 80 KiB of a block's shared memory, those of 5120 take 50: the kernel is the
/// same.
#[test]
fn a_plan_goes_on_when_a_smaller_one_was_prepared() {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(31);
    let cols = 8192;
    let (x, dy) =
        (random(&gpu, &mut rng, DType::F32, 8, cols), random(&gpu, &mut rng, DType::BF16, 8, cols));
    let w = random(&gpu, &mut rng, DType::BF16, 1, cols);
    let work = || {
        let room = |rows| gpu.move_here(&Tensor::poisoned(DType::F32, Shape::d2(rows, cols)));
        let (dx, dw) = (room(8), room(1));
        let (x, w, dy) = (x.clone(), w.clone(), dy.clone());
        NormBwd { x, w, dy, residual: None, dx, narrow: None, dw }
    };
    let large = prepared(&gpu.stream, cols);
    let before = work();
    large.run(&gpu.stream, &before).unwrap();
    let small = prepared(&gpu.stream, 5120);
    let after = work();
    large.run(&gpu.stream, &after).unwrap();
    gpu.stream.synchronize().unwrap();
    for (a, b) in [(&before.dx, &after.dx), (&before.dw, &after.dw)] {
        let values = a.to_f32().unwrap();
        assert!(values.iter().all(|v| v.is_finite()), "poison stayed");
        assert_eq!(a.download().unwrap(), b.download().unwrap());
    }
    drop(small);
}

/// A kernel that reads 16 bytes where none begin ends the context; so it is said before.
#[test]
fn tensors_that_begin_anywhere_are_refused_or_read() {
    let Some(gpu) = gpu() else { return };
    let Device::Cuda(ctx) = &gpu.device else { unreachable!("a GPU") };
    let mut rng = Rng::new(32);
    let plan = prepared(&gpu.stream, 64);
    let flat = random(&gpu, &mut rng, DType::F32, 1 + 2 * 64, 1);
    let x = flat.rows(1, 2 * 64).unwrap().reshape(Shape::d2(2, 64)).unwrap();
    let out = gpu.move_here(&Tensor::poisoned(DType::BF16, Shape::d2(2, 64)));
    let w = random(&gpu, &mut rng, DType::BF16, 1, 64);
    let e = plan.run(&gpu.stream, &AddNorm { x, add: None, w, out }).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
    assert!(e.to_string().contains("`x`"), "{e}");
    let total = gpu.move_here(&Tensor::poisoned(DType::F32, Shape::d1(2)));
    let of = |first| SquareSum { of: vec![flat.rows(first, 64).unwrap()], out: total.clone() };
    let e = plan.run(&gpu.stream, &of(3)).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("16 bytes"), "{e}");
    // Two bytes into an allocation no f32 begins.
    let memory = CudaMemory::zeroed(ctx, 64).unwrap().slice(2, 32).unwrap();
    let e = Tensor::over_cuda(memory, DType::F32, Shape::d1(8)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    // The context goes on, and where 16 bytes begin it is computed.
    plan.run(&gpu.stream, &of(4)).unwrap();
    gpu.stream.synchronize().unwrap();
    let want: f64 = flat.to_f32().unwrap()[4..68].iter().map(|v| f64::from(*v).powi(2)).sum();
    let got = total.to_f32().unwrap();
    let got = f64::from(got[0]) + f64::from(got[1]);
    assert!((got - want).abs() <= 1e-12 * want, "{got} for {want}");
}
