//! The device, tensors on it, comparisons, and replays.

use tilewire_core::numerics::{Bound, compare};
use tilewire_core::{DType, Rng, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_oracle::Mat;
use tilewire_testing::{Lack, did_not_run};

use crate::calls;

pub const WIDE: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Device 0 and a stream of it.
pub struct Gpu {
    pub device: Device,
    pub stream: Stream,
}

/// Device 0, or none: then it is said why, and what to do.
#[track_caller]
pub fn gpu() -> Option<Gpu> {
    match CudaContext::new(0) {
        Ok(ctx) => {
            let stream = Stream::on(&ctx).unwrap();
            Some(Gpu { device: Device::Cuda(ctx), stream })
        }
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            did_not_run(Lack::Gpu, e);
            None
        }
    }
}

impl Gpu {
    /// `m` rounded to `dtype`, on the device.
    pub fn put(&self, m: &Mat, dtype: DType) -> Tensor {
        let t = Tensor::from_f32(&m.to_f32(), dtype, Shape::d2(m.rows, m.cols)).unwrap();
        t.to(&self.device).unwrap()
    }

    /// The same, one row behind the start of an allocation: rows need not be aligned.
    pub fn put_shifted(&self, m: &Mat, dtype: DType) -> Tensor {
        let first = Mat::from_fn(1, m.cols, |_, _| f64::NAN);
        let whole = self.put(&Mat::vstack(&[first, m.clone()]), dtype);
        whole.rows(1, m.rows).unwrap()
    }

    pub fn put_f32(&self, values: &[f64]) -> Tensor {
        let m = Mat::new(1, values.len(), values.to_vec());
        self.put(&m, DType::F32).reshape(Shape::d1(values.len())).unwrap()
    }

    pub fn move_here(&self, t: &Tensor) -> Tensor {
        t.to(&self.device).unwrap()
    }

    /// A result with poison in it, in front of it, and behind it.
    pub fn out(&self, dtype: DType, rows: usize, cols: usize) -> Out {
        let whole = Tensor::poisoned(dtype, Shape::d2(rows + 2, cols)).to(&self.device).unwrap();
        Out { t: whole.rows(1, rows).unwrap(), whole }
    }

    /// Captures `launch`, and replays it 20 times: each time after `change` of the inputs in place,
    /// and each time `outs` must be as after an eager launch, which may not allocate or wait.
    /// `reset` is what they are before.
    pub fn replays(
        &self,
        outs: &[&Tensor],
        mut change: impl FnMut(u64),
        reset: impl Fn(),
        launch: impl Fn(),
    ) {
        change(0);
        reset();
        self.stream.begin_capture().unwrap();
        launch();
        let graph = self.stream.end_capture().unwrap().instantiate().unwrap();
        let bytes = || outs.iter().map(|t| t.download().unwrap()).collect::<Vec<_>>();
        for round in 1..=20 {
            change(round);
            reset();
            let calls = calls::of(&launch);
            assert!(round == 1 || calls.is_empty(), "a launch calls {calls:?}");
            self.stream.synchronize().unwrap();
            let eager = bytes();
            reset();
            assert!(outs.iter().all(|t| t.len_bytes() == 0) || bytes() != eager, "nothing ran");
            self.stream.replay(&graph).unwrap();
            self.stream.synchronize().unwrap();
            assert!(bytes() == eager, "replay {round} is not as eager");
        }
    }
}

/// A result between two rows of poison.
pub struct Out {
    pub t: Tensor,
    whole: Tensor,
}

impl Out {
    /// The rows around it must be poison.
    pub fn alone(&self, what: &str) {
        let rows = self.t.shape().dim(0);
        for at in [0, rows + 1] {
            let b = self.whole.rows(at, 1).unwrap().download().unwrap();
            assert!(b.iter().all(|&b| b == DType::POISON), "{what}: bytes around the result");
        }
    }

    /// Compares every element with the reference.
    pub fn check(&self, what: &str, want: &Mat, mag: &Mat, bound: &Bound) {
        self.alone(what);
        check(what, &self.t, want, mag, bound);
    }
}

/// Compares every element with the reference; `mag` is |A||B|.
pub fn check(what: &str, got: &Tensor, want: &Mat, mag: &Mat, bound: &Bound) {
    let got = got.to_f32().unwrap();
    let c = compare(&got, &want.data, |i| bound.allowed(want.data[i], mag.data[i]));
    let at = c.first_wrong.unwrap_or(0);
    assert!(
        c.ok(),
        "{what}: {} of {} wrong, first at {at}: {} instead of {}",
        c.num_wrong,
        c.num_elems,
        got[at],
        want.data[at]
    );
}

/// The bytes of both must be equal.
pub fn same(what: &str, got: &Tensor, want: &Tensor) {
    let (got, want) = (got.download().unwrap(), want.download().unwrap());
    assert_eq!(got.len(), want.len(), "{what}");
    let bad = got.iter().zip(&want).position(|(a, b)| a != b);
    assert_eq!(bad, None, "{what}: bytes that differ");
}

/// Standard normal numbers, rounded to `dtype`.
pub fn random(rng: &mut Rng, rows: usize, cols: usize, dtype: DType) -> Mat {
    Mat::random(rng, rows, cols).rounded(dtype)
}

/// Puts new numbers into `t`.
pub fn refill(t: &Tensor, rng: &mut Rng) {
    let n = t.shape().num_elems();
    t.upload(&Mat::random(rng, 1, n).to_bytes(t.dtype())).unwrap();
}
