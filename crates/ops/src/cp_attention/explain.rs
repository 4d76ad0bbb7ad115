//! The predicted cost of each strategy, and the choice of one.

use std::fmt;

use tilewire_core::{DType, Rank};
use tilewire_symm::LinkTraffic;

use super::config::{CpConfig, Strategy};
use super::desc::CpAttentionDesc;
use super::launch::Pass;
use super::pieces::{Pieces, Sizes};
use super::schedule::{Schedule, num_rows};
use super::work::Work;
use crate::attention::Sequences;
use crate::common::Machine;

/// A configuration with its predicted time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CpCandidate {
    /// The configuration.
    pub config: CpConfig,
    /// Bytes that the busiest rank moves in the forward pass.
    pub fwd_bytes: u64,
    /// Predicted time of the forward pass in microseconds.
    pub predicted_us: f64,
    /// Symmetric memory on each rank in bytes.
    pub memory: usize,
}

/// The reasons for a plan's choices.
#[derive(Clone, PartialEq, Debug)]
pub struct CpExplain {
    /// The description.
    pub what: String,
    /// All candidates that the heads allow, fastest first.
    pub candidates: Vec<CpCandidate>,
    /// The configuration in use.
    pub chosen: CpConfig,
}

impl fmt::Display for CpExplain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        for c in &self.candidates {
            let mark = if c.config == self.chosen { '*' } else { ' ' };
            writeln!(
                f,
                "{mark} {:<20} predicted {:>10.1} us  moves {:>10} B  memory {:>10} B",
                c.config.to_string(),
                c.predicted_us,
                c.fwd_bytes,
                c.memory
            )?;
        }
        Ok(())
    }
}

/// Returns the strategies that the heads allow.
fn legal(d: &CpAttentionDesc, size: usize) -> Vec<Strategy> {
    let hybrid = d.a2a_size > 1 && d.a2a_size < size;
    Strategy::NAMES
        .map(|(_, s)| s)
        .into_iter()
        .filter(|s| s.check(d, size).is_ok() && (*s != Strategy::Hybrid || hybrid))
        .collect()
}

pub(super) fn buffer_bytes(
    d: &CpAttentionDesc,
    size: usize,
    config: Option<CpConfig>,
) -> [usize; 4] {
    let strategies = config.map_or_else(|| legal(d, size), |c| vec![c.strategy]);
    let mut most = [0; 4];
    for s in strategies {
        for (most, bytes) in most.iter_mut().zip(Sizes::new(d, s, size).buffers(d.backward)) {
            *most = (*most).max(bytes);
        }
    }
    most
}

/// Predicts the forward pass: arithmetic of the busiest rank beside its transfers. Transfers that
/// precede the arithmetic are exposed: none for one-sided gets and pushes, one hop at a time for
/// the ring, all where heads are traded. With `gates`, on devices, there is `all_gather` by one
/// kernel, too, which has no results over parts of the keys; gets and pushes write, read and merge
/// two of them.
pub(super) fn explain(d: &CpAttentionDesc, size: usize, m: &Machine, gates: bool) -> CpExplain {
    let a = &d.attn;
    let pairs = rank_pairs(d, &a.sequences, size);
    let compute = |inner: usize| {
        // Ranks that trade heads share the pairs of their group.
        let most = pairs.chunks(inner).map(|g| g.iter().sum::<i128>()).max().unwrap_or(0);
        let flop = 2.0 * most as f64 * (a.heads_q * (a.dqk + a.dv)) as f64;
        flop / inner as f64 / m.gemm_flop_per_us
    };
    let queries = Rank::all(size).map(|r| num_rows(&d.rows_q(&a.sequences, r, size))).max();
    let parts = 2 * queries.unwrap_or(0) * a.heads_q * a.dv * DType::F32.size();
    let merge = if gates { 2.0 * parts as f64 / m.weight_bytes_per_us } else { 0.0 };
    let mut candidates = Vec::new();
    for strategy in legal(d, size) {
        let config = CpConfig::of(strategy);
        let sizes = &Sizes::new(d, strategy, size);
        let of = |me| {
            let sched = &Schedule::new(d, &a.sequences, strategy, me, size);
            Pieces { sizes, sched, me }.traffic(Pass::Forward)
        };
        let moved = |l: &LinkTraffic| l.put_bytes + l.get_bytes;
        let bytes = |r| of(r).iter().map(moved).sum::<u64>();
        let fwd_bytes = Rank::all(size).map(bytes).max().unwrap_or(0);
        let wire = fwd_bytes as f64 / m.link_bytes_per_us;
        let (inner, latency) = (strategy.inner(d, size), m.latency_us);
        let (groups, compute) = (size / inner, compute(inner));
        let predicted_us = match strategy {
            _ if size == 1 => compute,
            Strategy::AllToAll | Strategy::Hybrid => compute + wire + 2.0 * latency,
            Strategy::Ring => compute.max(wire) + groups as f64 * latency,
            _ => compute.max(wire) + 2.0 * latency,
        };
        let memory = buffer_bytes(d, size, Some(config)).iter().sum();
        let merge = if sizes.begins_at_once() && fwd_bytes > 0 { merge } else { 0.0 };
        let of = |config, predicted_us| CpCandidate { config, fwd_bytes, predicted_us, memory };
        candidates.push(of(config, predicted_us + merge));
        if gates && strategy == Strategy::AllGather {
            candidates.push(of(CpConfig { gated: true, ..config }, predicted_us));
        }
    }
    candidates.sort_by(|x, y| x.predicted_us.total_cmp(&y.predicted_us));
    // Get, ring and all_gather are always legal.
    let chosen = candidates.first().map_or(CpConfig::of(Strategy::Get), |c| c.config);
    CpExplain { what: format!("cp_attention {d}"), candidates, chosen }
}

/// Returns the visible (query, key) pairs of the queries of each rank.
pub(super) fn rank_pairs(d: &CpAttentionDesc, s: &Sequences, size: usize) -> Vec<i128> {
    let work = Work::new(s, &d.attn.mask);
    let of = |r| d.rows_q(s, r, size).iter().map(|rows| work.of(rows)).sum();
    Rank::all(size).map(of).collect()
}
