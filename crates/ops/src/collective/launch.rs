//! The inputs of a collective's executors: its areas, slots and phases.

use std::sync::Arc;

use tilewire_core::Result;
use tilewire_device::{Stream, Tensor};
use tilewire_symm::{Signals, SymBuf};

use super::schedule::{self, Phase};
use super::way::Way;
use super::{CollectiveDesc, CollectiveKind};
use crate::common::PlanCore;
use crate::common::lanes::Lanes;

/// Signal slots of a plan.
pub(super) const CREDIT: usize = 0;
pub(super) const DATA: usize = 1;

/// The plan's part of the heap, which its executors use.
pub(super) struct Base {
    pub desc: CollectiveDesc,
    pub core: PlanCore,
    /// Rows that peers push to me: gathered rows, or one slot per source.
    pub staging: SymBuf,
    /// All-reduce: the reduced rows of the other owners.
    pub staging2: Option<SymBuf>,
    pub signals: Arc<Signals>,
    pub signals2: Option<Arc<Signals>>,
    pub slot_rows: usize,
    /// Credits and arrivals of the one kernel, if it can carry out this plan, and their bytes.
    pub flags: Option<(SymBuf, usize)>,
    /// Multiprocessors that one kernel may take, if the caller gave a number.
    pub num_sms: Option<u32>,
    /// Copy engines move vectors of any size on devices.
    pub engines: bool,
}

/// The work that a launch on a device begins with, in the caller's stream.
pub(super) type Before<'a> = &'a dyn Fn(&Lanes<'_>) -> Result<()>;

/// One launch: of `m` rows in all, on a stream.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub stream: &'a Stream,
    pub m: usize,
    pub x: &'a Tensor,
    pub out: &'a Tensor,
    /// Makes `x`.
    pub before: Option<Before<'a>>,
}

impl Base {
    /// Returns the phases of a launch with `m` rows on this rank.
    pub fn phases(&self, m: usize) -> Result<(Phase, Option<Phase>)> {
        let team = self.core.team();
        let (me, size) = (team.rank(), team.size());
        let rows = schedule::shard_rows(&self.desc, m, size)?;
        Ok(match &self.desc.kind {
            CollectiveKind::AllGather(_) => (schedule::gather(me, &rows), None),
            CollectiveKind::ReduceScatter(..) => {
                (schedule::scatter(me, &rows, self.slot_rows), None)
            }
            CollectiveKind::AllReduce(_) => {
                (schedule::scatter(me, &rows, self.slot_rows), Some(schedule::gather(me, &rows)))
            }
            CollectiveKind::AllToAll(splits) => (schedule::exchange(me, splits), None),
        })
    }

    /// Returns the way in which a device moves `m` rows.
    pub fn way(&self, m: usize) -> Way {
        if self.engines {
            return Way::Engines;
        }
        let rows = self.moved_rows(m);
        let bytes = rows * self.desc.cols * self.desc.dtype.size();
        Way::of(&self.desc.kind, self.flags.is_some(), self.core.team().size(), (rows, bytes))
    }

    /// Returns the rows of the whole vector, by whose size a device chooses its way.
    fn moved_rows(&self, m: usize) -> usize {
        match &self.desc.kind {
            CollectiveKind::AllToAll(splits) => {
                splits.iter().flatten().sum::<usize>() / splits.len().max(1)
            }
            _ => m,
        }
    }

    /// Returns the rows of the input and of the output on this rank.
    pub fn io_rows(&self, m: usize) -> Result<(usize, usize)> {
        Ok(io_rows(&self.desc.kind, &self.phases(m)?.0, m))
    }
}

/// Returns the rows of the input and of the output on this rank.
pub(super) fn io_rows(kind: &CollectiveKind, first: &Phase, m: usize) -> (usize, usize) {
    match kind {
        CollectiveKind::AllGather(_) => (first.own.0.len(), m),
        CollectiveKind::ReduceScatter(..) => (m, first.own.1.len()),
        CollectiveKind::AllReduce(_) => (m, m),
        CollectiveKind::AllToAll(_) => {
            let sent: usize = first.sends.iter().map(|s| s.rows.len()).sum();
            let received: usize = first.recvs.iter().map(|r| r.out.len()).sum();
            (sent + first.own.0.len(), received + first.own.1.len())
        }
    }
}
