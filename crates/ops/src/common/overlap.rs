//! The configuration of a comm+GEMM operation: its cut into tiles, and the predicted cost.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, Result};

use super::check::unsupported;
use super::kernel::GemmBackend;
use super::machine::Machine;

/// The schedule of a comm+GEMM operation: in which order it communicates and multiplies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Algo {
    /// One kernel whose tiles wait for, or publish, their own flags.
    Fused,
    /// One GEMM per arriving (or leaving) chunk.
    Pipelined,
    /// As `Pipelined`, with the exchange of TransformerEngine's Userbuffers. Gathered rows travel
    /// from neighbour to neighbour, with a GEMM behind each arrival. Rows to reduce are sent owner
    /// by owner and added at the end. On devices its waits are on the copy stream, so all ranks
    /// must launch plans of this kind in one order.
    Ring,
    /// All communication before (or after) one GEMM: the baseline.
    Sequential,
}

impl Algo {
    /// All values with their names.
    pub const NAMES: [(&'static str, Algo); 4] = [
        ("fused", Algo::Fused),
        ("pipelined", Algo::Pipelined),
        ("ring", Algo::Ring),
        ("sequential", Algo::Sequential),
    ];

    /// Returns the name used in options and JSON.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, a)| *a == self).map_or("?", |(n, _)| n)
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algo {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, a)| *a).ok_or_else(|| {
            let names: Vec<_> = Self::NAMES.iter().map(|(n, _)| *n).collect();
            Error::invalid(format!("unknown algorithm `{s}`; one of {}", names.join(", ")))
        })
    }
}

/// The transport of a comm+GEMM operation, which moves rows between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Via {
    /// Puts of the heap's own transport, with a flag behind each. Any schedule.
    #[default]
    Puts,
    /// A collective of NVIDIA NCCL, opened at run time. On devices only, with the schedule
    /// `sequential`, and only where it is asked for or GPUs do not reach each other: its sums are
    /// rounded on their way, in an order of its choice.
    Nccl,
}

/// The configuration of a comm+GEMM operation: a schedule, a transport, a kernel, and the sizes of
/// tiles and chunks. Pure data; equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct OverlapConfig {
    /// The schedule.
    pub algo: Algo,
    /// The transport.
    pub via: Via,
    /// The implementation of the products on CUDA devices; the host has one.
    pub kernel: GemmBackend,
    /// Rows of a tile.
    pub block_m: usize,
    /// Columns of a tile.
    pub block_n: usize,
    /// Chunks per shard: each has its own flag.
    pub sub_chunks: usize,
}

impl fmt::Display for OverlapConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = |b: usize| if b == usize::MAX { "all".to_owned() } else { b.to_string() };
        let (m, n) = (block(self.block_m), block(self.block_n));
        write!(f, "{} {m}x{n} s{}", self.name(), self.sub_chunks)?;
        match self.kernel {
            GemmBackend::Auto => Ok(()),
            kernel => write!(f, " {kernel}"),
        }
    }
}

/// By the name of a schedule, or `sequential_nccl`: with one chunk.
impl FromStr for OverlapConfig {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        if s == BY_NCCL {
            return Ok(Self::by_nccl());
        }
        s.parse().map(|algo| Self::of(algo, 1)).map_err(|_| {
            let names: Vec<_> = Algo::NAMES.iter().map(|(n, _)| *n).chain([BY_NCCL]).collect();
            Error::invalid(format!("unknown algorithm `{s}`; one of {}", names.join(", ")))
        })
    }
}

/// The name of the schedule `sequential` through NCCL.
const BY_NCCL: &str = "sequential_nccl";

impl OverlapConfig {
    /// Returns the usual tiles of a schedule, by puts.
    pub fn of(algo: Algo, sub_chunks: usize) -> Self {
        let (block_m, block_n) = match algo {
            Algo::Fused => (64, 128),
            // One GEMM per chunk: the tile is the whole chunk.
            _ => (usize::MAX, usize::MAX),
        };
        Self { algo, via: Via::Puts, kernel: GemmBackend::Auto, block_m, block_n, sub_chunks }
    }

    /// Returns the configuration of one collective of NCCL before (or after) one GEMM.
    pub fn by_nccl() -> Self {
        Self { via: Via::Nccl, ..Self::of(Algo::Sequential, 1) }
    }

    /// Returns the name of schedule and transport used in options: that of the schedule, or
    /// `sequential_nccl`.
    pub fn name(&self) -> &'static str {
        match self.via {
            Via::Puts => self.algo.name(),
            Via::Nccl => BY_NCCL,
        }
    }

    /// Checks that every size is positive, and that the transport carries the schedule.
    ///
    /// # Errors
    /// `InvalidArgument`; `Unsupported` for another schedule than `sequential` through NCCL.
    pub fn check(&self) -> Result<()> {
        if self.block_m == 0 || self.block_n == 0 || !(1..=64).contains(&self.sub_chunks) {
            return Err(Error::invalid(format!("the tile configuration `{self}` is not valid"))
                .hint("tile sizes must be positive, sub_chunks 1 to 64"));
        }
        if self.via == Via::Nccl && self.algo != Algo::Sequential {
            let what = format!("the algorithm `{}` does not run through NCCL", self.algo);
            return Err(unsupported(what, "use `sequential`: NCCL has no flags to wait for"));
        }
        Ok(())
    }
}

/// The most chunks of a shard that a candidate has.
pub(crate) const MOST_CANDIDATE_CHUNKS: usize = 4;

/// A configuration with its predicted time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// The configuration.
    pub config: OverlapConfig,
    /// Predicted time in microseconds.
    pub predicted_us: f64,
}

/// The reasons for a plan's choices.
#[derive(Clone, PartialEq, Debug)]
pub struct Explain {
    /// The operation and its description.
    pub what: String,
    /// All candidates, fastest first.
    pub candidates: Vec<Candidate>,
    /// The one that is used.
    pub chosen: OverlapConfig,
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        for c in &self.candidates {
            let mark = if c.config == self.chosen { '*' } else { ' ' };
            let config = c.config.to_string();
            writeln!(f, "{mark} {config:<28} predicted {:>10.1} us", c.predicted_us)?;
        }
        Ok(())
    }
}

impl Explain {
    /// Predicts all candidates for a product of (m, n, k) per rank, whose weights have
    /// `weight_bytes`, beside `wire_bytes` over the link.
    ///
    /// Sequential: sum of both. Chunked: the larger, plus one chunk of the smaller, plus a flag
    /// for each chunk (`docs/protocols/ag_gemm.md`); each chunk's product reads all weights.
    pub fn predict(
        what: String,
        (shape, weight_bytes): ([usize; 3], usize),
        wire_bytes: f64,
        size: usize,
        m: &Machine,
    ) -> Self {
        let [rows, n, k] = shape;
        let wire = wire_bytes / m.link_bytes_per_us;
        let mut candidates = Vec::new();
        let mut add = |config: OverlapConfig, predicted_us: f64| {
            candidates.push(Candidate { config, predicted_us });
        };
        let whole = m.gemm_us(shape, weight_bytes);
        add(OverlapConfig::of(Algo::Sequential, 1), whole + wire + m.latency_us);
        for sub_chunks in [1, 2, MOST_CANDIDATE_CHUNKS] {
            let num = size * sub_chunks;
            let chunks = num as f64;
            let gemm = chunks * m.gemm_us([rows.div_ceil(num), n, k], weight_bytes);
            let overlapped = gemm.max(wire) + gemm.min(wire) / chunks + chunks * m.latency_us;
            add(OverlapConfig::of(Algo::Pipelined, sub_chunks), overlapped);
            // Tiles cost a little arithmetic efficiency on the host and win nothing there.
            add(OverlapConfig::of(Algo::Fused, sub_chunks), overlapped + 0.02 * gemm);
            // The same bytes through every rank, one flag behind the other.
            let hops = chunks * m.latency_us;
            add(OverlapConfig::of(Algo::Ring, sub_chunks), overlapped + hops);
        }
        candidates.sort_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us));
        let chosen = candidates[0].config;
        Self { what, candidates, chosen }
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::ErrorKind;

    use super::*;

    #[test]
    fn names_parse_and_unknown_ones_list_the_legal() {
        for (n, a) in Algo::NAMES {
            assert_eq!(n.parse::<Algo>().unwrap(), a);
            assert_eq!(n.parse::<OverlapConfig>().unwrap(), OverlapConfig::of(a, 1));
            assert_eq!(OverlapConfig::of(a, 3).name(), n);
        }
        let nccl: OverlapConfig = "sequential_nccl".parse().unwrap();
        assert_eq!((nccl, nccl.name()), (OverlapConfig::by_nccl(), "sequential_nccl"));
        let e = "nccl".parse::<OverlapConfig>().unwrap_err().to_string();
        assert!(e.contains("fused, pipelined, ring, sequential, sequential_nccl"), "{e}");
        assert!("sequential_nccl".parse::<Algo>().is_err(), "a schedule has no transport");
    }

    #[test]
    fn the_three_choices_are_checked_together_and_shown() {
        for (_, algo) in Algo::NAMES {
            let by_nccl = OverlapConfig { via: Via::Nccl, ..OverlapConfig::of(algo, 2) };
            let refused = by_nccl.check().err();
            assert_eq!(refused.is_none(), algo == Algo::Sequential, "{algo}");
            assert!(refused.is_none_or(|e| e.is_unsupported() && e.get_hint().is_some()));
            let bad = OverlapConfig { sub_chunks: 0, ..OverlapConfig::of(algo, 1) };
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(OverlapConfig::by_nccl().to_string(), "sequential_nccl allxall s1");
        let kernel = GemmBackend::Portable;
        let c = OverlapConfig { kernel, ..OverlapConfig::of(Algo::Ring, 2) };
        assert_eq!(c.to_string(), "ring allxall s2 portable");
    }

    #[test]
    fn tiny_problems_are_sequential_and_large_ones_overlap() {
        let m = Machine::default();
        let of = |shape, wire| Explain::predict("t".into(), (shape, 1), wire, 8, &m);
        let tiny = of([8, 8, 8], 1e2);
        assert_eq!(tiny.chosen.algo, Algo::Sequential);
        let large = of([1 << 10, 1 << 10, 1 << 9], 1e8);
        assert_ne!(large.chosen.algo, Algo::Sequential);
        assert!(large.to_string().lines().count() > 5 && large.to_string().contains('*'));
    }

    /// Times of two H200 (docs/lab/gemm.md): AG+GEMM of 8192 x 28672 with 256, 2048 and 8192 rows.
    #[test]
    fn each_chunk_reads_all_weights() {
        let m = Machine::H200;
        let (n, k) = (28672, 8192);
        let of = |rows: usize| {
            let wire = (rows * k) as f64;
            Explain::predict("t".into(), ([rows, n, k], 2 * n * k), wire, 2, &m)
        };
        let took = |e: &Explain, algo, sub_chunks| {
            let c = OverlapConfig::of(algo, sub_chunks);
            e.candidates.iter().find(|x| x.config == c).map(|x| x.predicted_us).unwrap()
        };
        // Rows; sequential, and pipelined with 1, 2 and 4 chunks of a shard, in microseconds.
        for (rows, seq, pipelined) in [
            (256, 203.0, [262.0, 478.0, 894.0]),
            (2048, 1444.0, [1442.0, 1436.0, 1643.0]),
            (8192, 5755.0, [5635.0, 5710.0, 5775.0]),
        ] {
            let e = of(rows);
            let near = |x: f64, seen: f64| assert!((x / seen - 1.0).abs() < 0.2, "{x} {seen}");
            near(took(&e, Algo::Sequential, 1), seq);
            for (i, seen) in pipelined.into_iter().enumerate() {
                near(took(&e, Algo::Pipelined, 1 << i), seen);
            }
            assert_eq!(e.chosen.algo == Algo::Sequential, rows == 256, "{rows}: {e}");
        }
        // Four ranks, 2048 rows: four products take a wave more than one, and hide no more than
        // that (761 and 778 us on H200, 735 and 787 on H100). With 8192 rows they take as many.
        let four = |rows: usize, n: usize| {
            let wire = (rows * k) as f64 * 1.5;
            Explain::predict("t".into(), ([rows, n, k], 2 * n * k), wire, 4, &m).chosen.algo
        };
        assert_eq!(four(2048, 14336), Algo::Sequential);
        assert!(four(8192, 14336) == Algo::Pipelined && four(8192, 2560) == Algo::Pipelined);
    }
}
