//! The rule by which a result counts as right. Used by tests, `verify` and `bench` alike.
//!
//! Every element must be finite and satisfy
//! `|err| <= u_out |ref| + (P u_wire + 4 u_acc sqrt(K)) (|A||B|)`,
//! with `u` the unit roundoffs of output, wire and accumulator, `P` the ranks whose partials are
//! added, `K` the length of the contraction and `|A||B|` the product of the absolute values.

use crate::DType;

/// Parameters of the elementwise bound.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Type in which the output is stored.
    pub out: DType,
    /// Type in which partial results travel between ranks.
    pub wire: DType,
    /// Type in which products are accumulated.
    pub acc: DType,
    /// Number of ranks whose partials are added (0: nothing travels).
    pub num_partials: usize,
    /// Length of the contraction.
    pub k: usize,
}

impl Bound {
    /// Bound for a single-rank contraction of length `k` with f32 accumulation.
    pub fn local(out: DType, k: usize) -> Self {
        Self { out, wire: DType::F32, acc: DType::F32, num_partials: 0, k }
    }

    /// The largest error allowed where the reference is `reference` and `|A||B|` is `mag`.
    pub fn allowed(&self, reference: f64, mag: f64) -> f64 {
        let u_out = self.out.unit_roundoff();
        let u_wire = self.wire.unit_roundoff();
        let u_acc = self.acc.unit_roundoff();
        u_out * reference.abs()
            + (self.num_partials as f64 * u_wire + 4.0 * u_acc * (self.k.max(1) as f64).sqrt()) * mag
            // Results below the subnormal range of the output type round to zero.
            + smallest_subnormal(self.out)
    }
}

fn smallest_subnormal(d: DType) -> f64 {
    match d {
        DType::BF16 => 2f64.powi(-133),
        DType::F16 => 2f64.powi(-24),
        DType::F8E4M3 => 2f64.powi(-9),
        DType::F8E5M2 => 2f64.powi(-16),
        _ => 2f64.powi(-149),
    }
}

/// Outcome of comparing a tensor with its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Largest absolute error; NaN if any element is not finite.
    pub max_err: f64,
    /// Root of the mean squared error.
    pub rms_err: f64,
    /// Elements outside the bound or not finite.
    pub num_wrong: usize,
    /// Elements compared.
    pub num_elems: usize,
    /// Index of the first wrong element.
    pub first_wrong: Option<usize>,
}

impl Comparison {
    /// True if nothing is wrong (and something was compared, or there was nothing to compare).
    pub fn ok(&self) -> bool {
        self.num_wrong == 0
    }

    /// Adds the outcome of another part of the same tensor set.
    pub fn merge(&mut self, other: &Comparison) {
        let n = (self.num_elems + other.num_elems).max(1) as f64;
        let sq = self.rms_err.powi(2) * self.num_elems as f64
            + other.rms_err.powi(2) * other.num_elems as f64;
        self.rms_err = (sq / n).sqrt();
        // A NaN in either must stay visible, so no f64::max here.
        if other.max_err.is_nan() || other.max_err > self.max_err {
            self.max_err = other.max_err;
        }
        if self.first_wrong.is_none() {
            self.first_wrong = other.first_wrong.map(|i| i + self.num_elems);
        }
        self.num_wrong += other.num_wrong;
        self.num_elems += other.num_elems;
    }
}

/// Compares every element; `allowed(i)` is the largest error permitted at element `i`.
///
/// # Panics
/// If the lengths differ.
pub fn compare(got: &[f32], want: &[f64], allowed: impl Fn(usize) -> f64) -> Comparison {
    assert_eq!(got.len(), want.len(), "result and reference have different lengths");
    let mut c = Comparison { num_elems: got.len(), ..Default::default() };
    let mut sum_sq = 0.0;
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let err = (f64::from(g) - w).abs();
        // NaN must count as wrong: the comparison is written so that NaN fails it.
        let fine = g.is_finite() && err <= allowed(i);
        if !fine {
            c.num_wrong += 1;
            c.first_wrong.get_or_insert(i);
        }
        sum_sq += err * err;
        if err.is_nan() || err > c.max_err {
            c.max_err = err;
        }
    }
    c.rms_err = (sum_sq / got.len().max(1) as f64).sqrt();
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_inf_and_large_errors_are_wrong() {
        let c = compare(&[1.0, f32::NAN, f32::INFINITY, 4.1], &[1.0, 2.0, 3.0, 4.0], |_| 0.01);
        assert_eq!((c.num_wrong, c.first_wrong), (3, Some(1)));
        assert!(!c.ok());
        let mut d = compare(&[1.0], &[1.0], |_| 0.0);
        assert!(d.ok());
        d.merge(&c);
        assert_eq!((d.num_wrong, d.first_wrong, d.num_elems), (3, Some(2), 5));
        assert!(d.max_err.is_nan() || d.max_err.is_infinite());
    }

    #[test]
    fn bound_grows_with_ranks_and_k() {
        let b =
            Bound { out: DType::BF16, wire: DType::BF16, acc: DType::F32, num_partials: 8, k: 64 };
        let one = Bound { num_partials: 1, ..b };
        assert!(b.allowed(1.0, 1.0) > one.allowed(1.0, 1.0));
        assert!(b.allowed(1.0, 1.0) > 8.0 / 256.0);
    }
}
