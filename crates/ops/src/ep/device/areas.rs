//! The areas of an expert-parallel layer in symmetric memory, as kernels take them.

use tilewire_core::{Error, ErrorKind, Rank, Result, Team};
use tilewire_device::Queue;
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_kernels::portable::{EP_MOVERS, EP_THREADS};
use tilewire_symm::SymBuf;

use crate::common::lanes::Lane;
use crate::ep::EpDesc;
use crate::ep::launch::Areas;
use crate::ep::schedule::Schedule;
use tilewire_kernels::abi::TwEp;

/// Most bytes of shared memory of the routing.
const ROUTER_BYTES: usize = 160 << 10;
// Kernels keep a word for each rank of a routing in shared memory, and the ranks of a token in a
// mask.
const _: () = assert!(Team::MAX_SIZE <= 64, "as `tw_route_scan` has words, and a mask bits");

/// Returns the threads of a block of the routing, and its bytes of shared memory, which `tw_table`
/// of the kernel uses.
pub(crate) fn router(d: &EpDesc) -> Result<(u32, u32)> {
    let experts = d.num_experts();
    // 512 are faster than 256 and 1024: fewer warps to sum over, and enough to read with.
    let threads = if experts <= 1024 { EP_MOVERS / 2 } else { EP_THREADS } as u32;
    let bytes = experts * (8 + 12 + 4 * threads as usize / 32);
    if bytes > ROUTER_BYTES {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the layer has too many experts for the routing kernel",
        )
        .expected("at most 3150")
        .seen(experts)
        .hint("run it on the host"));
    }
    Ok((threads, bytes as u32))
}

/// The distance of each rank's memory from that of rank 0, as this device sees it. Addresses wrap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Steps {
    /// From each rank to the next one; of uneven steps, the bits of all of them: kernels look at
    /// how they are aligned.
    pub stride: u64,
    /// Of each rank, where they are not even: memory of NVSHMEM's.
    pub table: Option<Vec<u64>>,
    /// Of this rank.
    mine: u64,
}

impl Steps {
    fn even(stride: u64, me: usize) -> Self {
        Self { stride, table: None, mine: stride.wrapping_mul(me as u64) }
    }

    fn uneven(places: &[u64], me: usize) -> Self {
        let table: Vec<u64> = places.iter().map(|p| p.wrapping_sub(places[0])).collect();
        let stride = table.iter().fold(0, |all, s| all | s);
        Self { stride, mine: table[me], table: Some(table) }
    }
}

impl Areas<'_> {
    /// Returns the steps between the ranks' areas, for kernels that write to peers, or with `nccl`
    /// to this rank alone.
    pub(super) fn steps(&self, lane: &Lane, nccl: bool) -> Result<Steps> {
        let (team, place) = (lane.here().heap().team(), self.flags.range(0, 8));
        let me = team.rank().idx();
        match lane.stride() {
            Err(e) if e.is_unsupported() && nccl => Ok(Steps::even(0, me)),
            Err(e) if e.is_unsupported() => {
                let there = lane.team()?;
                let places: Result<Vec<u64>> =
                    Rank::all(team.size()).map(|r| there.addr(r, place, 8)).collect();
                Ok(Steps::uneven(&places?, me))
            }
            stride => Ok(Steps::even(stride?, me)),
        }
    }

    /// Returns the address that rank 0's bytes `(at, len)` of a buffer have in the order of the
    /// ranks, computed from this rank's: it may reach no other's.
    pub(super) fn first_addr(
        lane: &Lane,
        steps: &Steps,
        b: &SymBuf,
        (at, len): (usize, usize),
    ) -> Result<u64> {
        lane.here().addr(b.range(at, len), len).map(|mine| mine.wrapping_sub(steps.mine))
    }

    /// Returns the layer's parameters; `first` (the first expert of each rank) and the table of
    /// steps are in this device's memory.
    pub(super) fn layer(
        &self,
        lane: &Lane,
        d: &EpDesc,
        steps: &Steps,
        (first, table): (&CudaMemory, Option<&CudaMemory>),
    ) -> Result<TwEp> {
        let (size, me) = (d.experts_per_rank.len(), lane.here().heap().team().rank());
        let at = Schedule::new(d);
        let (s, rows) = (at.strides(), at.meta(0));
        let rank0 = |b: &SymBuf, at: usize, len: usize| Self::first_addr(lane, steps, b, (at, len));
        Ok(TwEp {
            counts: rank0(self.counts, 0, at.counts_len())?,
            meta: rank0(self.tokens, rows, at.tokens_len() - rows)?,
            tokens: rank0(self.tokens, 0, rows)?,
            returns: rank0(self.returns, 0, at.returns_len())?,
            stride: steps.stride,
            first: first.addr(),
            steps: table.map_or(0, CudaMemory::addr),
            meta_stride: s.meta as u64,
            row_stride: s.row as u64,
            return_stride: s.returns as u64,
            size: size as u32,
            me: me.get(),
            max_tokens: d.max_tokens as u32,
            top_k: d.top_k as u32,
            experts: d.num_experts() as u32,
            capacity: d.capacity as u32,
            align: d.layout.align() as u32,
            scales: d.num_scales as u32,
        })
    }

    /// Clears the words that carry launch numbers: no launch has written one yet, but the memory
    /// may have been used before.
    pub fn clear(&self, lane: &Lane, stream: &CudaStream, d: &EpDesc) -> Result<()> {
        for (b, at, len) in self.words(d) {
            lane.here().clear(stream, b.range(at, len), len)?;
        }
        stream.synchronize_until(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_lead_from_rank_0_to_every_rank() {
        let even = Steps::even(4096, 3);
        assert_eq!((even.stride, even.mine, even.table), (4096, 3 * 4096, None));
        // As rank 1 of four sees memory that begins with its own; the last rank's is below it.
        let places = [0x7000, 0x4000, 0x5000, 0x1008];
        let s = Steps::uneven(&places, 2);
        assert_eq!(s.mine, 0x2000u64.wrapping_neg());
        for (r, step) in s.table.unwrap().iter().enumerate() {
            assert_eq!(places[0].wrapping_add(*step), places[r]);
        }
        // One that is aligned to 8 bytes makes rows that are, at most.
        assert_eq!(s.stride % 16, 8);
    }

    /// Checks that the routing refuses more experts than its shared memory holds: `tw_table` takes
    /// of each expert an i64, three u32, and one u32 of each warp.
    #[test]
    fn more_experts_than_the_routing_has_memory_for_are_refused() {
        let of = |experts: usize| router(&EpDesc::new(8, experts, 4, 16, 2));
        for experts in [8, 1024, 1025, 3150] {
            let (threads, bytes) = of(experts).unwrap();
            assert_eq!(bytes as usize, experts * (8 + 3 * 4 + threads as usize / 32 * 4));
            assert!(bytes as usize <= ROUTER_BYTES && threads >= 64, "{experts}");
        }
        let why = of(3151).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::Unsupported);
        assert!(why.to_string().contains("at most 3150"), "{why}");
    }
}
