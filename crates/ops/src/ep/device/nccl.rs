//! The exchange of records by NCCL: the kernels write the records for each rank to a block in this
//! rank's own memory instead of to the peer, and one group of sends and receives moves the blocks.
//!
//! The exchange has a fixed size, `max_tokens` records from each rank to each: only the device
//! knows how many there are, and a captured call cannot change its sizes. So it moves as many bytes
//! as the receive areas hold, whatever the routing. Records end where kernels of peers would have
//! put them, so that results have the same bits.

use tilewire_core::{DType, Result};
use tilewire_device::Stream;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, NcclOp};

use crate::common::PlanCore;
use crate::common::cuda::{hold, workspace};
use crate::common::nccl::ByNccl;
use crate::ep::EpDesc;
use crate::ep::schedule::{Schedule, strides};
use tilewire_kernels::abi::TwEp;

/// The content of an exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    Counts,
    Tokens,
    Returns,
}

/// A part of a block for one rank: its first byte in the block, and its bytes. At the receiver the
/// same parts of all ranks are one behind the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    at: usize,
    len: usize,
}

/// The blocks that this rank sends.
pub(super) struct Staging {
    counts: CudaMemory,
    tokens: CudaMemory,
    returns: CudaMemory,
    /// Credits and arrivals that count as given before every launch: the ranks have met, and NCCL
    /// has waited.
    flags: CudaMemory,
    nccl: ByNccl,
}

/// Returns the parts of a block, in order: the two buffers of counts, which launches use in turn;
/// or rows, then their metadata or gradients.
fn parts(d: &EpDesc, what: What) -> Vec<Part> {
    let (s, t) = (strides(d), d.max_tokens);
    let lens = match what {
        What::Counts => {
            let len = 8 * d.num_experts();
            return vec![Part { at: 0, len }, Part { at: d.experts_per_rank.len() * len, len }];
        }
        What::Tokens => vec![t * s.row, t * s.meta],
        What::Returns => vec![t * s.returns],
    };
    let mut at = 0;
    let part = |len| {
        at += len;
        Part { at: at - len, len }
    };
    lens.into_iter().map(part).collect()
}

fn block(d: &EpDesc, what: What) -> usize {
    parts(d, what).last().map_or(0, |p| p.at + p.len)
}

/// Sends of the blocks at `from` and receives to my own areas `to`, one for each part, on `size`
/// ranks.
fn calls(d: &EpDesc, what: What, from: u64, to: &[u64], size: usize) -> Vec<NcclOp> {
    let (parts, block) = (parts(d, what), block(d, what));
    let mut ops = Vec::with_capacity(2 * size * parts.len());
    for peer in 0..size {
        for (part, to) in parts.iter().zip(to) {
            let src = from + (peer * block + part.at) as u64;
            let dst = to + (peer * part.len) as u64;
            ops.push(NcclOp::Send { src, count: part.len, peer: peer as u32 });
            ops.push(NcclOp::Recv { dst, count: part.len, peer: peer as u32 });
        }
    }
    ops
}

impl Staging {
    pub fn new(ctx: &CudaContext, d: &EpDesc) -> Result<Self> {
        let size = d.experts_per_rank.len();
        let blocks = |what| workspace(ctx, size * block(d, what));
        // A number that no launch reaches.
        let up = vec![1u64 << 62; Schedule::new(d).flags_len() / 8];
        Ok(Self {
            flags: CudaMemory::from_bytes(ctx, bytemuck::cast_slice(&up))?,
            counts: blocks(What::Counts)?,
            tokens: blocks(What::Tokens)?,
            returns: blocks(What::Returns)?,
            nccl: ByNccl::default(),
        })
    }

    fn of(&self, what: What) -> &CudaMemory {
        match what {
            What::Counts => &self.counts,
            What::Tokens => &self.tokens,
            What::Returns => &self.returns,
        }
    }

    /// Collective, behind the agreement of `prepare`. Records of zeros are none.
    pub fn connect(
        &self,
        core: &PlanCore,
        stream: &Stream,
        d: &EpDesc,
        layer: &TwEp,
    ) -> Result<()> {
        let ops = calls(
            d,
            What::Tokens,
            self.tokens.addr(),
            &own(layer, What::Tokens),
            layer.size as usize,
        );
        // SAFETY: zeros of this plan's own workspace to its own areas, before anything is launched.
        unsafe { self.nccl.prepare(core, stream, (DType::U8, &ops)) }
    }

    /// Returns the layer for kernels that write to peers: rank `r`'s areas are block `r`, with this
    /// rank's records at their beginning.
    pub fn writer(&self, d: &EpDesc, layer: &TwEp, what: What) -> TwEp {
        let parts = parts(d, what);
        let base = |i: usize| {
            let p: &Part = &parts[i];
            // Kernels add this rank's place among all.
            let mine = (layer.me as usize * p.len) as u64;
            (self.of(what).addr() + p.at as u64).wrapping_sub(mine)
        };
        let stride = block(d, what) as u64;
        match what {
            What::Counts => TwEp { counts: base(0), stride, ..*layer },
            What::Tokens => TwEp { tokens: base(0), meta: base(1), stride, ..*layer },
            What::Returns => TwEp { returns: base(0), stride, ..*layer },
        }
    }

    /// Address of the flags.
    pub fn flags(&self) -> u64 {
        self.flags.addr()
    }

    /// Exchanges the blocks: mine go to their ranks, and the peers' into my areas.
    pub fn exchange(
        &self,
        main: &CudaStream,
        core: &PlanCore,
        d: &EpDesc,
        (layer, what): (&TwEp, What),
    ) -> Result<()> {
        let from = self.of(what);
        let ops = calls(d, what, from.addr(), &own(layer, what), layer.size as usize);
        hold(main, (from.clone(), self.flags.clone(), core.heap().clone()));
        // SAFETY: blocks and areas hold the records of all ranks, and are held. Only this
        // stream uses them: the ranks have met, and launches of a plan follow each other.
        unsafe { self.nccl.exchange(main, &ops) }
    }

    pub fn explain(&self) -> Option<&str> {
        self.nccl.explain()
    }
}

/// Returns the addresses of my own receive areas, in the order of the parts.
fn own(l: &TwEp, what: What) -> Vec<u64> {
    let areas = match what {
        What::Counts => vec![l.counts, l.counts + 8 * u64::from(l.size) * u64::from(l.experts)],
        What::Tokens => vec![l.tokens, l.meta],
        What::Returns => vec![l.returns],
    };
    areas.into_iter().map(|a| a + u64::from(l.me) * l.stride).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that an exchange delivers, once each, the bytes that a kernel would have written to
    /// the peer's area.
    #[test]
    fn blocks_arrive_where_peers_would_have_written() {
        let d = EpDesc::new(3, 7, 5, 12, 2);
        for what in [What::Counts, What::Tokens, What::Returns] {
            let (size, parts) = (3, parts(&d, what));
            // Addresses are offsets: blocks of a rank from 0 on, its areas far behind, one after
            // the other.
            let far = 1u64 << 32;
            let area =
                |i: usize| far + parts[..i].iter().map(|p| (size * p.len) as u64).sum::<u64>();
            let to: Vec<u64> = (0..parts.len()).map(area).collect();
            let calls = calls(&d, what, 0, &to, size);
            for me in 0..size {
                for src in 0..size {
                    let of = |r: usize, send: bool| -> Vec<(u64, usize)> {
                        calls
                            .iter()
                            .filter_map(|op| match *op {
                                NcclOp::Send { src, count, peer } if send && peer as usize == r => {
                                    Some((src, count))
                                }
                                NcclOp::Recv { dst, count, peer }
                                    if !send && peer as usize == r =>
                                {
                                    Some((dst, count))
                                }
                                _ => None,
                            })
                            .collect()
                    };
                    // The calls of both ends match: the sends of `src` to me, and my receives from
                    // it.
                    let (sent, received) = (of(me, true), of(src, false));
                    assert_eq!(sent.len(), parts.len());
                    for (i, (s, r)) in sent.iter().zip(&received).enumerate() {
                        assert_eq!((s.1, r.1), (parts[i].len, parts[i].len));
                        assert_eq!(s.0, (me * block(&d, what) + parts[i].at) as u64);
                        assert_eq!(r.0, to[i] + (src * parts[i].len) as u64);
                    }
                }
            }
        }
        let s = strides(&d);
        assert_eq!(block(&d, What::Tokens), 5 * (s.row + s.meta));
    }
}
