//! A small counter-based generator: the same numbers on every rank, thread and backend.

/// Random numbers as a pure function of (seed, counter): SplitMix64 finaliser over the counter.
///
/// Counter-based, so that element `i` of a tensor has the same value whichever rank makes it, and
/// dropout masks do not depend on the number of ranks.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    counter: u64,
}

/// SplitMix64 finaliser (Steele, Lea and Flood, 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// A generator; equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed ^ 0x9e37_79b9_7f4a_7c15), counter: 0 }
    }

    /// Returns what the numbers depend on beside the position: for code elsewhere that computes
    /// [`Rng::at`].
    pub fn key(&self) -> u64 {
        self.seed
    }

    /// 64 random bits for position `i`, independent of the sequence.
    pub fn at(&self, i: u64) -> u64 {
        mix(self.seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(1))
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.counter += 1;
        self.at(self.counter)
    }

    /// Passes over `n` numbers of the sequence, so that a part of it can be made without what is
    /// before.
    pub fn skip(&mut self, n: u64) {
        self.counter = self.counter.wrapping_add(n);
    }

    /// Uniform in `[0, 1)`.
    pub fn next_f64(&mut self) -> f64 {
        to_unit(self.next_u64())
    }

    /// Uniform in `[0, 1)` for position `i`.
    pub fn f64_at(&self, i: u64) -> f64 {
        to_unit(self.at(i))
    }

    /// Uniform in `[lo, hi)`.
    pub fn uniform(&mut self, lo: f32, hi: f32) -> f32 {
        lo + (hi - lo) * self.next_f64() as f32
    }

    /// Standard normal (Box-Muller, one of the pair).
    pub fn normal(&mut self) -> f32 {
        let u = 1.0 - self.next_f64();
        let v = self.next_f64();
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// Uniform integer in `0..n`.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "below(0)");
        // Multiply-shift; the bias is below 2^-32 for every n used here.
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

fn to_unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_repeat_and_look_uniform() {
        let (mut a, mut b, mut c) = (Rng::new(1), Rng::new(1), Rng::new(2));
        assert_eq!(a.next_u64(), b.next_u64());
        assert_ne!(a.next_u64(), c.next_u64());
        let mut ahead = b.clone();
        b.skip(3);
        (0..3).for_each(|_| _ = ahead.next_u64());
        assert_eq!(ahead.next_u64(), b.next_u64());
        let n = 20_000;
        let mean = (0..n).map(|_| a.next_f64()).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let (m, v) =
            (0..n).map(|_| f64::from(a.normal())).fold((0.0, 0.0), |(m, v), x| (m + x, v + x * x));
        assert!((m / n as f64).abs() < 0.03 && (v / n as f64 - 1.0).abs() < 0.05);
        let mut seen = [0; 7];
        (0..7000).for_each(|_| seen[a.below(7) as usize] += 1);
        assert!(seen.iter().all(|&s| (800..1200).contains(&s)), "{seen:?}");
    }
}
