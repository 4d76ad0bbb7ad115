//! The bytes that the phases of a layer move on the host.

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_symm::{LinkTraffic, Traffic};

use super::EpPlan;
use super::handle::EpHandle;
use super::schedule::{Copy16, Schedule};

/// Traffic of one launch of each phase from this rank to each peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpTraffic {
    /// A routing.
    pub route: Traffic,
    /// A dispatch.
    pub dispatch: Traffic,
    /// A combine, and a dispatch backward without gradients of weights.
    pub combine: Traffic,
    /// A dispatch backward with gradients of weights.
    pub dispatch_bwd: Traffic,
    /// A combine backward.
    pub combine_bwd: Traffic,
}

/// Returns the traffic of `records` records, of `pieces` puts each and `bytes` in all, in `chunks`
/// chunks.
fn link(records: usize, pieces: usize, bytes: usize, chunks: usize) -> LinkTraffic {
    LinkTraffic {
        puts: (records * pieces) as u64,
        put_bytes: bytes as u64,
        // The announcement, an arrival for each chunk, the credit.
        signals: 2 + chunks as u64,
        ..LinkTraffic::default()
    }
}

impl EpPlan {
    /// Returns the traffic of one launch of each phase from this rank to each peer, under the
    /// routing that `handle` holds. A receive buffer does not change it. The traffic of combine and
    /// dispatch backward is known once a dispatch has run.
    ///
    /// # Errors
    /// `NotPrepared` if the handle has no routing yet; `Unsupported` on devices.
    pub fn predict(&self, handle: &EpHandle) -> Result<EpTraffic> {
        if self.base.cores[0].lane().is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the rows are moved by kernels, which do not count them",
            )
            .op("ep")
            .hint("count the records from the routing instead"));
        }
        let (d, me) = (&self.base.desc, self.base.cores[0].team().rank().idx());
        let (size, at) = (d.experts_per_rank.len(), Schedule::new(d));
        let s = handle.state();
        if s.routing.sends.len() != size {
            return Err(Error::new(ErrorKind::NotPrepared, "the handle has no routing").op("ep"));
        }
        let none = || vec![LinkTraffic::default(); size];
        let mut t = EpTraffic {
            route: none(),
            dispatch: none(),
            combine: none(),
            dispatch_bwd: none(),
            combine_bwd: none(),
        };
        let [out, back] = self.part.cuts.map(|c| c.chunks);
        let (row, grad_row) = (d.hidden * d.dtype.size(), d.hidden * d.out.size());
        for p in (0..size).filter(|&p| p != me) {
            // Each word of the counts is a flag: they are one step.
            t.route[p] = link(1, 1, at.count_bytes(), 0);
            let sends = &s.routing.sends[p];
            let (n, copies) = (sends.len(), sends.iter().map(|r| r.1.len()).sum::<usize>());
            let metas = copies * size_of::<Copy16>();
            let scales = 4 * d.num_scales;
            let pieces = 2 + usize::from(scales > 0);
            t.dispatch[p] = link(n, pieces, metas + n * (scales + row), out);
            t.combine_bwd[p] = link(n, 2, metas + n * grad_row, out);
            let came = s.arrived.get(p).map_or(&[][..], Vec::as_slice);
            let copies = came.iter().map(|r| r.copies.len()).sum::<usize>();
            t.combine[p] = link(came.len(), 1, came.len() * grad_row, back);
            let bytes = came.len() * grad_row + 4 * copies;
            t.dispatch_bwd[p] = link(came.len(), 2, bytes, back);
        }
        Ok(t)
    }
}
