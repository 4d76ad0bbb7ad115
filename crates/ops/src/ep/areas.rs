//! Where an expert-parallel layer lies in symmetric memory on devices, and how its rows are cut.

use tilewire_core::{Error, ErrorKind, Rank, Result, Team};
use tilewire_device::Queue;
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_kernels::portable::{EP_BACK_TOKENS, EP_MOVERS, EP_THREADS};
use tilewire_symm::{OneSided, SymBuf};

use super::EpDesc;
use super::host::{record_bytes, return_bytes};
use crate::common::lanes::Lane;
use tilewire_kernels::abi::TwEp;

/// Chunks of a rank's rows that a dispatch sends, about.
const SEND_CHUNKS: usize = 1024;
/// Pairs of chunk and rank that a combine returns, about: several for each warp.
const BACK_CHUNKS: usize = 1024;

/// Most bytes of shared memory of the routing.
const ROUTER_BYTES: usize = 160 << 10;
// Kernels keep a word for each rank of a routing in shared memory, and the ranks of a token in a mask.
const _: () = assert!(Team::MAX_SIZE <= 64, "as `tw_route_scan` has words, and a mask bits");

/// How the rows of a rank are cut: a chunk of tokens arrives as a whole, and warps share its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub chunk: usize,
    pub slices: usize,
    pub chunks: usize,
}

impl Cut {
    fn of(d: &EpDesc, chunk: usize, slices: usize) -> Self {
        // Parts of a kilobyte or more.
        let most = (d.hidden * d.out.size() / 1024).clamp(1, 8);
        let chunks = d.max_tokens.div_ceil(chunk).max(1);
        Self { chunk, slices: slices.clamp(1, most), chunks }
    }

    /// A warp sends a chunk, and warps lay it out: few tokens go alone, and several share a row.
    pub fn send(d: &EpDesc) -> Self {
        let chunk = d.max_tokens.div_ceil(SEND_CHUNKS).max(1);
        let warps = 116 * EP_MOVERS as usize / 32;
        let parts = d.max_tokens.div_ceil(chunk).max(1) * d.experts_per_rank.len();
        Self::of(d, chunk, warps / parts)
    }

    /// Small chunks, so that they come back in order and are added while others travel. In the portable
    /// kernel a block returns one, and its warps share rows if there are few.
    pub fn back(d: &EpDesc) -> Self {
        let pairs = d.max_tokens * d.experts_per_rank.len();
        let chunk = pairs.div_ceil(BACK_CHUNKS).clamp(1, EP_BACK_TOKENS as usize);
        Self::of(d, chunk, 32usize.div_ceil(chunk))
    }
}

/// Threads of a block of the routing, and its shared memory: what `tw_table` of the kernel takes.
pub(super) fn router(d: &EpDesc) -> Result<(u32, u32)> {
    let experts = d.num_experts();
    // 512 are faster than 256 and 1024: fewer warps to sum over, and enough to read with.
    let threads = if experts <= 1024 { EP_MOVERS / 2 } else { EP_THREADS } as u32;
    let bytes = experts * (8 + 12 + 4 * threads as usize / 32);
    if bytes > ROUTER_BYTES {
        return Err(Error::new(ErrorKind::Unsupported, "too many experts for the routing kernel")
            .expected("at most 3150")
            .seen(experts)
            .hint("run it on the host"));
    }
    Ok((threads, bytes as u32))
}

/// Bytes of a rank's credits, receive buffers and arrivals of one area.
pub(super) fn flags_of_area(d: &EpDesc) -> usize {
    d.experts_per_rank.len() * (2 + Cut::send(d).chunks.max(Cut::back(d).chunks)) * 8
}

/// Bytes of a rank's flags: of tokens, and of what comes back.
pub(super) fn flag_area(d: &EpDesc) -> usize {
    2 * flags_of_area(d)
}

/// Bytes from record to record: copies and scales, payload, and what comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Strides {
    pub meta: usize,
    pub row: usize,
    pub back: usize,
}

/// Pieces of 16 bytes, so that whole rows are copied in such.
pub(super) fn strides(d: &EpDesc) -> Strides {
    let up = |bytes: usize| bytes.next_multiple_of(16);
    Strides {
        meta: up(16 * d.top_k + 4 * d.num_scales),
        row: up(d.hidden * d.dtype.size().max(d.out.size())),
        back: up(up(d.hidden * d.out.size()) + 4 * d.top_k),
    }
}

/// Bytes of symmetric memory for a record: the same on every backend.
pub(super) fn token_area(d: &EpDesc) -> usize {
    let s = strides(d);
    record_bytes(d).max(s.row + s.meta)
}

/// Bytes that one rank's counts take: on devices a word has the number of its launch, in two buffers.
pub(super) fn count_area(d: &EpDesc) -> usize {
    d.experts_per_rank.len() * d.num_experts() * 2 * 8
}

/// Those for what comes back.
pub(super) fn return_area(d: &EpDesc) -> usize {
    return_bytes(d).max(strides(d).back)
}

/// How far the memory of each rank is behind that of rank 0, as this device sees it. Addresses wrap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Steps {
    /// From each rank to the next one; of uneven steps, the bits of all of them: kernels look at how they are aligned.
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

/// The areas of a plan in symmetric memory.
pub(super) struct Areas<'a> {
    pub counts: &'a SymBuf,
    pub tokens: &'a SymBuf,
    pub returns: &'a SymBuf,
    pub flags: &'a SymBuf,
}

impl Areas<'_> {
    /// For kernels that write to peers, or with `nccl` to this rank alone.
    pub fn steps(&self, lane: &Lane, nccl: bool) -> Result<Steps> {
        let os = lane.one_sided();
        let (team, place) = (os.heap().team(), self.flags.range(0, 8));
        let me = team.rank().idx();
        match lane.stride() {
            Err(e) if e.is_unsupported() && nccl => Ok(Steps::even(0, me)),
            Err(e) if e.is_unsupported() => {
                let places: Result<Vec<u64>> =
                    Rank::all(team.size()).map(|r| os.addr(r, place, 8)).collect();
                Ok(Steps::uneven(&places?, me))
            }
            stride => Ok(Steps::even(stride?, me)),
        }
    }

    /// Where rank 0's bytes `(at, len)` of a buffer are in the order of the ranks: by mine, as a rank may reach no
    /// other's.
    pub fn first_addr(
        lane: &Lane,
        steps: &Steps,
        b: &SymBuf,
        (at, len): (usize, usize),
    ) -> Result<u64> {
        let (os, me) = (lane.one_sided(), lane.one_sided().heap().team().rank());
        os.addr(me, b.range(at, len), len).map(|mine| mine.wrapping_sub(steps.mine))
    }

    /// With the first expert of each rank, and the table of `steps`, in this device's memory.
    pub fn layer(
        &self,
        lane: &Lane,
        d: &EpDesc,
        steps: &Steps,
        (first, table): (&CudaMemory, Option<&CudaMemory>),
    ) -> Result<TwEp> {
        let os = lane.one_sided();
        let (size, me) = (d.experts_per_rank.len(), os.heap().team().rank());
        let (s, records) = (strides(d), size * d.max_tokens);
        let rank0 = |b: &SymBuf, at: usize, len: usize| Self::first_addr(lane, steps, b, (at, len));
        Ok(TwEp {
            counts: rank0(self.counts, 0, 16 * size * d.num_experts())?,
            meta: rank0(self.tokens, records * s.row, records * s.meta)?,
            tokens: rank0(self.tokens, 0, records * s.row)?,
            back: rank0(self.returns, 0, records * s.back)?,
            stride: steps.stride,
            first: first.addr(),
            steps: table.map_or(0, CudaMemory::addr),
            meta_stride: s.meta as u64,
            row_stride: s.row as u64,
            back_stride: s.back as u64,
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

    /// No launch has written a word yet, whatever the memory was used for before.
    pub fn clear(&self, lane: &Lane, stream: &CudaStream, d: &EpDesc) -> Result<()> {
        let (s, records) = (strides(d), d.experts_per_rank.len() * d.max_tokens);
        let words = [
            (self.counts, 0, 16 * d.experts_per_rank.len() * d.num_experts()),
            (self.tokens, records * s.row, records * s.meta),
            (self.flags, 0, flag_area(d)),
        ];
        for (b, at, len) in words {
            lane.one_sided().clear(stream, b.range(at, len), len)?;
        }
        stream.synchronize_until(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::EpLayout;

    /// Every token is in a chunk, no chunk is larger than the kernels have room for, and its flags are within their area;
    /// for as many ranks as there may be.
    #[test]
    fn cuts_hold_every_token_and_have_flags() {
        for size in [1, 2, 3, 5, 8, 16, 33, Team::MAX_SIZE] {
            for tokens in [0, 1, 7, 128, 1023, 4096, 65_536, 1 << 20] {
                for hidden in [1, 512, 7168] {
                    let d = EpDesc::new(size, 2 * size, tokens, hidden, 8);
                    let (send, back) = (Cut::send(&d), Cut::back(&d));
                    for c in [send, back] {
                        assert!(c.chunk >= 1 && c.slices >= 1 && c.chunks >= 1, "{d}");
                        assert!((c.chunks - 1) * c.chunk <= tokens && tokens <= c.chunks * c.chunk);
                        assert!(8 * size * (2 + c.chunks) <= flags_of_area(&d), "{d}: flags");
                    }
                    assert!(back.chunk <= EP_BACK_TOKENS as usize, "{d}: a list of a chunk");
                }
            }
        }
    }

    #[test]
    fn steps_lead_from_rank_0_to_every_rank() {
        let even = Steps::even(4096, 3);
        assert_eq!((even.stride, even.mine, even.table), (4096, 3 * 4096, None));
        // As rank 1 of four sees memory that begins with its own; the last rank's lies below.
        let places = [0x7000, 0x4000, 0x5000, 0x1008];
        let s = Steps::uneven(&places, 2);
        assert_eq!(s.mine, 0x2000u64.wrapping_neg());
        for (r, step) in s.table.unwrap().iter().enumerate() {
            assert_eq!(places[0].wrapping_add(*step), places[r]);
        }
        // One that is aligned to 8 bytes makes rows that are, at most.
        assert_eq!(s.stride % 16, 8);
    }

    /// The areas of host and devices are one allocation: either's records have room.
    #[test]
    fn records_have_room() {
        for k in [1, 2, 8, 32] {
            for num_scales in [0, 1, 56] {
                let mut d = EpDesc::new(8, 64, 4, 7168, k);
                (d.num_scales, d.layout) = (num_scales, EpLayout::RankMajor { align: 128 });
                let s = strides(&d);
                assert!(s.meta >= 16 * k + 4 * num_scales && s.row >= d.hidden * 4);
                assert!(s.back >= d.hidden * 4 + 4 * k);
                assert!([s.meta, s.row, s.back].iter().all(|s| s.is_multiple_of(16)));
                assert!(token_area(&d) >= s.meta + s.row && return_area(&d) >= s.back);
            }
        }
    }

    /// What `tw_table` takes of each expert: an i64, three u32, and one of each warp.
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
