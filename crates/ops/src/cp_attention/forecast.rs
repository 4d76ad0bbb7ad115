//! The share of each rank in a pass: rows, work, and bytes, before there is a team.

use std::ops::Range;

use tilewire_core::{Rank, Result};
use tilewire_symm::Traffic;

use super::config::Strategy;
use super::desc::CpAttentionDesc;
use super::explain::rank_pairs;
use super::launch::Pass;
use super::pieces::{Pieces, Sizes};
use super::schedule::Schedule;

/// The share of one rank in one pass of a context-parallel attention.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpShare {
    /// Global rows of its queries, in the order of its tensor.
    pub rows_q: Vec<Range<usize>>,
    /// Global rows of its keys and values, in the order of its tensors.
    pub rows_kv: Vec<Range<usize>>,
    /// Visible (query, key) pairs of its own queries, of each query head. Where heads are traded
    /// the ranks of a group share the pairs of all of them.
    pub pairs: u128,
    /// Puts, gets and signals of the pass between this rank and each peer, as
    /// [`CpAttentionPlan::predict`](super::CpAttentionPlan::predict) says but for the canonical
    /// order, in which whole tiles travel.
    pub traffic: Traffic,
}

impl CpShare {
    /// Returns the share of each of `size` ranks in a pass over the description's sequences, by
    /// puts and gets.
    ///
    /// # Errors
    /// `InvalidArgument` for the description, or heads that the strategy cannot scatter.
    pub fn of_all(
        desc: &CpAttentionDesc,
        strategy: Strategy,
        size: usize,
        pass: Pass,
    ) -> Result<Vec<Self>> {
        desc.check(size).and_then(|()| strategy.check(desc, size))?;
        let (s, sizes) = (&desc.attn.sequences, Sizes::new(desc, strategy, size));
        let pairs = rank_pairs(desc, s, size);
        let of = |(me, pairs): (Rank, i128)| {
            let sched = Schedule::new(desc, s, strategy, me, size);
            Self {
                rows_q: desc.rows_q(s, me, size),
                rows_kv: desc.rows_kv(s, me, size),
                pairs: pairs.unsigned_abs(),
                traffic: Pieces { sizes: &sizes, sched: &sched, me }.traffic(pass),
            }
        };
        Ok(Rank::all(size).zip(pairs).map(of).collect())
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::{BackendKind, DType, ErrorKind};
    use tilewire_device::Stream;
    use tilewire_symm::{HeapCfg, World, WorldCfg};

    use super::*;
    use crate::attention::{AttentionDesc, AttnMask, Sequences};
    use crate::cp_attention::{CpAttentionPlan, CpConfig, Layout};

    fn described(layout: Layout) -> CpAttentionDesc {
        let mut attn = AttentionDesc::new(1, (8, 4), 16, DType::BF16, AttnMask::CAUSAL);
        attn.sequences = Sequences::packed(&[0, 40, 48, 96], &[0, 40, 48, 96]).unwrap();
        CpAttentionDesc { layout, a2a_size: 2, ..CpAttentionDesc::new(attn) }
    }

    /// Shares without a team are those of the plan of each rank, which are what is counted.
    #[test]
    fn shares_are_those_of_the_plans() {
        for (_, layout) in Layout::NAMES {
            for (_, strategy) in Strategy::NAMES {
                let d = described(layout);
                let [fwd, bwd] = [Pass::Forward, Pass::Backward]
                    .map(|pass| CpShare::of_all(&d, strategy, 4, pass).unwrap());
                let pairs: u128 = fwd.iter().map(|s| s.pairs).sum();
                assert_eq!(pairs, [40, 8, 48].map(|n| n * (n + 1) / 2).iter().sum());
                World::run_threads(4, WorldCfg::for_tests(), |w| {
                    let team = w.everyone("shares")?;
                    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
                    let config = Some(CpConfig::of(strategy));
                    let plan = CpAttentionPlan::new(d.clone(), &heap, config)?;
                    plan.prepare(&Stream::new("s")?)?;
                    let me = team.rank().idx();
                    for (shares, pass) in [(&fwd, Pass::Forward), (&bwd, Pass::Backward)] {
                        assert_eq!(shares[me].traffic, plan.predict(None, pass)?);
                        assert_eq!(shares[me].rows_q, plan.rows_q(None));
                        assert_eq!(shares[me].rows_kv, plan.rows_kv(None));
                    }
                    team.agree(true).map(|_| ())
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn what_no_plan_would_take_is_refused() {
        let odd = described(Layout::ZigzagPerSequence);
        let odd = CpShare::of_all(&odd, Strategy::Get, 6, Pass::Forward).unwrap_err();
        let heads = described(Layout::Balanced);
        let heads = CpShare::of_all(&heads, Strategy::AllToAll, 6, Pass::Forward).unwrap_err();
        assert!(odd.to_string().contains("sequence 0 of `q`"), "{odd}");
        assert!(heads.to_string().contains("Hq 8"), "{heads}");
        for e in [odd, heads] {
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        }
    }
}
