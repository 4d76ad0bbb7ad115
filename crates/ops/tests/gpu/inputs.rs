//! Inputs of operations: functions of a seed and of the place among the inputs, so that a rank can
//! make those of another.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::Tensor;

/// Numbers after which those of a large tensor repeat: no multiple of a row, a shard or a piece.
const PERIOD: usize = 1_000_003;

#[derive(Clone, Copy)]
pub enum Fill {
    Normal,
    /// Experts of tokens: different ones in a row of so many, sometimes none.
    Experts(usize, usize),
}

/// Input `i` of a launch with `seed`, on the host. One with fewer elements is the beginning of one
/// with more.
///
/// # Errors
/// Those of [`Tensor::from_f32`].
pub fn filled(fill: Fill, (seed, i): (u64, usize), dtype: DType, shape: Shape) -> Result<Tensor> {
    let mut rng = Rng::new(seed * 100 + i as u64);
    let n = shape.num_elems();
    match fill {
        Fill::Normal => {
            // Large ones repeat: random numbers take long, and ranks would drift apart.
            let some: Vec<f32> = (0..n.min(PERIOD)).map(|_| rng.normal()).collect();
            let v: Vec<f32> = some.iter().copied().cycle().take(n).collect();
            Tensor::from_f32(&v, dtype, shape)
        }
        Fill::Experts(experts, k) => {
            let mut v = Vec::with_capacity(n);
            for i in 0..n {
                let base = (i / k * 3 + seed as usize) % experts;
                let e = ((base + i % k) % experts) as i64;
                v.push(if rng.below(6) == 0 { -1 } else { e });
            }
            Tensor::from_slice(&v, shape)
        }
    }
}
