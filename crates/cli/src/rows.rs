//! Result rows of `verify` and `bench`: documented and versioned.

use serde::{Deserialize, Serialize};

/// Version of the row format; grows when a field changes meaning or disappears.
pub const ROW_VERSION: u32 = 1;

/// One result. Times are microseconds, the maximum over ranks; `null` where not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Operation and variant, e.g. `ag_gemm/fused`.
    pub op: String,
    /// Backend of the symmetric memory.
    pub backend: String,
    /// Device the arithmetic ran on.
    pub device: String,
    /// Element type of the inputs.
    pub dtype: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Problem size in words.
    pub shape: String,
    /// The arithmetic alone.
    pub t_gemm_us: Option<f64>,
    /// The communication alone.
    pub t_comm_us: Option<f64>,
    /// One after the other: the baseline.
    pub t_seq_us: Option<f64>,
    /// The operation.
    pub t_ours_us: Option<f64>,
    /// The spread of the samples of these times.
    #[serde(default, skip_serializing_if = "Spreads::is_none")]
    pub spread_us: Spreads,
    /// Of a collective, as nccl-tests has it: GB of the whole vector in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algbw_gbs: Option<f64>,
    /// The same times the share that crosses a link, so that numbers of ranks compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busbw_gbs: Option<f64>,
    /// Of what is bound by memory: bytes of its tensors on a rank, read or written once, in place
    /// twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_bytes: Option<u64>,
    /// These bytes in a second, in GB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_gbs: Option<f64>,
    /// Largest absolute error over all ranks; `null` if something is not finite.
    pub max_err: Option<f64>,
    /// Elements (or other checks) that are wrong, over all ranks.
    pub wrong: u64,
    /// The backend has no such operation, and said so before anything ran.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsupported: bool,
    /// The first failure, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A time in microseconds, and how far its samples lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Time {
    /// Median.
    pub us: f64,
    /// From the first quartile to the third.
    pub spread: f64,
}

impl Time {
    /// Of at least one sample.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |quarter: usize| samples.get(samples.len() * quarter / 4).copied();
        let us = at(2).unwrap_or(f64::NAN);
        Self { us, spread: at(3).zip(at(1)).map_or(f64::NAN, |(high, low)| high - low) }
    }
}

/// Interquartile ranges of the times of a row, microseconds; `null` where not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spreads {
    /// Of `t_gemm_us`.
    pub gemm: Option<f64>,
    /// Of `t_comm_us`.
    pub comm: Option<f64>,
    /// Of `t_seq_us`.
    pub seq: Option<f64>,
    /// Of `t_ours_us`.
    pub ours: Option<f64>,
}

impl Spreads {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// `algbw` and `busbw` of nccl-tests in GB/s for a collective over a vector of `bytes` on `size`
/// ranks: a rank sends and receives `(size - 1) / size` of it, for all_reduce twice.
pub(crate) fn bandwidth(op: &str, bytes: usize, size: usize, us: f64) -> (f64, f64) {
    let alg = bytes as f64 / us / 1e3;
    let times = if op == "all_reduce" { 2.0 } else { 1.0 };
    (alg, alg * times * (size as f64 - 1.0) / size as f64)
}

impl Row {
    /// Returns what samples say that lie `spread` apart: nothing if they lie further apart than it
    /// is large.
    fn certain(value: f64, spreads: &[Option<f64>]) -> Option<f64> {
        let noise: f64 = spreads.iter().flatten().map(|s| s / 2.0).sum();
        (value.abs() > noise).then_some(value)
    }

    /// Baseline time over ours; none where the two differ by less than their samples do.
    pub fn speedup(&self) -> Option<f64> {
        let (seq, ours) = (self.t_seq_us?, self.t_ours_us?);
        Self::certain(seq - ours, &[self.spread_us.seq, self.spread_us.ours])?;
        Some(seq / ours)
    }

    /// Share of the shorter of arithmetic and communication that was hidden, in per cent: of at
    /// most all of it. None where it is less than what samples differ by, or where more seems
    /// hidden than there is, by more than that: then the parts alone took longer than they do
    /// within the whole.
    pub fn hidden(&self) -> Option<f64> {
        let (g, c, ours) = (self.t_gemm_us?, self.t_comm_us?, self.t_ours_us?);
        let s = &self.spread_us;
        let spreads = [s.gemm, s.comm, s.ours];
        let gain = Self::certain(g + c - ours, &spreads)?;
        let shorter = g.min(c);
        let beyond = Self::certain((gain - shorter).max(0.0), &spreads);
        // What is hidden of a part that is lost in the noise is noise.
        Self::certain(shorter, &spreads)?;
        beyond.is_none().then(|| 100.0 * (gain / shorter).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_below_the_noise_are_not_told() {
        let row = |gemm: f64, comm: f64, ours: f64, spread: f64| Row {
            t_gemm_us: Some(gemm),
            t_comm_us: Some(comm),
            t_seq_us: Some(gemm + comm),
            t_ours_us: Some(ours),
            spread_us: Spreads {
                gemm: Some(spread),
                comm: Some(spread),
                seq: Some(spread),
                ours: Some(spread),
            },
            ..Row::default()
        };
        let quiet = row(100.0, 40.0, 120.0, 2.0);
        assert_eq!((quiet.hidden(), quiet.speedup()), (Some(50.0), Some(140.0 / 120.0)));
        // Gains and losses that samples differ by, too.
        let noisy = row(100.0, 40.0, 120.0, 30.0);
        assert_eq!((noisy.hidden(), noisy.speedup()), (None, None));
        // A collective of 10 us cannot hide 38.4; within the noise all of it is hidden.
        assert_eq!(row(200.0, 10.0, 171.6, 2.0).hidden(), None);
        assert_eq!(row(200.0, 40.0, 198.0, 2.0).hidden(), Some(100.0));
        // 100 times this over this is more than 100.
        assert_eq!(row(25.707, 58.097, 46.4, 12.0).hidden(), Some(100.0));
        // Slower than one after the other.
        assert_eq!(row(100.0, 40.0, 160.0, 2.0).hidden(), Some(-50.0));
        let equal = row(100.0, 40.0, 140.0, 0.0);
        assert_eq!((equal.hidden(), equal.speedup()), (None, None));
    }

    #[test]
    fn times_are_medians_and_quartiles() {
        let t = Time::of(vec![9.0, 1.0, 3.0, 2.0, 4.0, 100.0, 5.0, 8.0]);
        assert_eq!((t.us, t.spread), (5.0, 6.0));
        assert_eq!(Time::of(vec![7.0]), Time { us: 7.0, spread: 0.0 });
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        assert_eq!(bandwidth("all_gather", 8_000_000, 8, 1000.0), (8.0, 7.0));
        assert_eq!(bandwidth("reduce_scatter", 8_000_000, 4, 1000.0), (8.0, 6.0));
        assert_eq!(bandwidth("all_to_all", 8_000_000, 2, 1000.0), (8.0, 4.0));
        assert_eq!(bandwidth("all_reduce", 8_000_000, 8, 1000.0), (8.0, 14.0));
        assert_eq!(bandwidth("all_reduce", 8_000_000, 1, 1000.0), (8.0, 0.0));
    }
}
