//! Tables of offsets in device memory (`attention/sequences.cu`).

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Device, Tensor};
use tilewire_kernels::abi::{TwOffsets, TwRefuse, TwSeg, TwSequences, TwShard};
use tilewire_kernels::attention::{PARTS, REFUSED, SEQUENCES, SEQUENCES_THREADS};

use crate::attention::{AttentionDesc, AttnOffsets};
use crate::common::cuda::{addr, hold, load};

/// Blocks that fill results which were refused.
const BLOCKS: u32 = 64;

/// The kernels, and whether offsets were refused.
pub(crate) struct ByOffsets {
    sequences: Kernel,
    refuse: Kernel,
    /// `[1]` i32: not 0 if offsets of any launch could not be used.
    pub any: Tensor,
}

/// The rows of one side of a launch among those of the global tensors.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// Rows of the global tensors.
    pub tokens: usize,
    /// Parts that are apart from each other, in the order in which sums take them.
    pub parts: Vec<TwShard>,
}

/// The segments of queries and of keys that meet in a launch.
pub(crate) enum Segments {
    /// Segments of queries and of keys.
    Known((Vec<TwSeg>, Vec<TwSeg>)),
    /// Those of sequences whose offsets the launch reads, of queries and of keys.
    ByOffsets(Box<AttnOffsets>, [Shard; 2]),
}

impl Shard {
    /// All rows, on one rank.
    pub fn whole(tokens: usize) -> Self {
        Self { tokens, parts: vec![TwShard { global: 0, row: 0, len: tokens as u32 }] }
    }

    fn rows(&self) -> usize {
        self.parts.iter().map(|p| p.len as usize).sum()
    }
}

/// One table of a launch.
pub(super) struct Side {
    pub at: u64,
    pub num: u32,
    pub tiles: u32,
    /// Of all segments.
    pub rows: usize,
}

/// A table to write: where it is, how many segments fit, and the rows of a tile.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub at: u64,
    pub capacity: usize,
    pub tile: u64,
}

impl ByOffsets {
    pub fn new(ctx: &CudaContext) -> Result<Self> {
        let m = load(ctx, &SEQUENCES, Vec::new())?;
        let (sequences, refuse) = (m.kernel("tw_attn_sequences")?, m.kernel("tw_attn_refuse")?);
        let any = Tensor::zeros(DType::I32, Shape::d1(1)).to(&Device::Cuda(ctx.clone()))?;
        Ok(Self { sequences, refuse, any })
    }

    /// Queues the tables of queries and of keys, and the word at `refused`: whether the offsets
    /// cannot be used. They are held.
    pub fn tables(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (o, shards): (&AttnOffsets, &[Shard; 2]),
        (places, refused): ([Place; 2], u64),
    ) -> Result<[Side; 2]> {
        let num = o.num();
        let runs = if o.padded.is_some() { 2 * num } else { num + 1 };
        let longest = d.bias.map_or([u32::MAX; 2], |b| [b.sq as u32, b.skv as u32]);
        let mut sides = Vec::new();
        let mut given = [TwOffsets::zeroed(); 2];
        for (i, (place, shard)) in places.into_iter().zip(shards).enumerate() {
            let (tokens, parts, rows) = (shard.tokens, &shard.parts, shard.rows());
            // Sequences, the rows between them, and parts: each segment begins where one of these
            // does. Each ends with a part of a tile, so that there are as many more tiles, and
            // segments without rows for them.
            let most = runs + parts.len().saturating_sub(1);
            let segs = 2 * most;
            if parts.len() > PARTS {
                return Err(Error::internal(format!("{} parts, not {PARTS}", parts.len())));
            }
            if segs > place.capacity {
                // As checked when the launch was made.
                return Err(Error::internal(format!("{num} sequences in {} parts", parts.len())));
            }
            given[i] = TwOffsets {
                cu: addr(&o.cu[i])?,
                at: addr(o.padded.as_ref().map_or(&o.cu[i], |p| &p[i]))?,
                table: place.at,
                tokens: tokens as u32,
                tile: place.tile as u32,
                segs: segs as u32,
                longest: longest[i],
                num_parts: parts.len() as u32,
                ..TwOffsets::zeroed()
            };
            given[i].parts[..parts.len()].copy_from_slice(parts);
            let tiles = if rows == 0 { 0 } else { rows as u64 / place.tile + most as u64 };
            sides.push(Side { at: place.at, num: segs as u32, tiles: tiles as u32, rows });
        }
        let [q, kv] = given;
        let any = addr(&self.any)?;
        let p = TwSequences { q, kv, refused, any, num: num as u32, pad: 0 };
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: the argument is the kernel's `TwSequences`. It reads `num + 1` offsets each
        // (`AttnOffsets::check`), and writes `segs` segments of each table and two words, which are
        // held until the kernel has run.
        unsafe { self.sequences.launch(stream, Grid::new(1, SEQUENCES_THREADS), args)? };
        let [q, kv] =
            <[Side; 2]>::try_from(sides).map_err(|_| Error::internal("there are two sides"))?;
        Ok([q, kv])
    }

    /// Queues what makes the results NaN if the offsets of [`ByOffsets::tables`] were refused, as
    /// the word there says.
    pub fn results<'a>(
        &self,
        stream: &CudaStream,
        refused: u64,
        outs: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<()> {
        let mut p = TwRefuse { refused, ..TwRefuse::zeroed() };
        for (i, t) in outs.into_iter().take(REFUSED).enumerate() {
            (p.to[i], p.num[i]) = (addr(t)?, t.len_bytes() as u64 / 2);
        }
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: the argument is the kernel's `TwRefuse`: results of the launch, of types of 16
        // bits and more, with their lengths; they are held until the kernel has run.
        unsafe { self.refuse.launch(stream, Grid::new(BLOCKS, 256), args) }
    }
}

/// Queues the clearing of [`ByOffsets::any`].
pub(crate) fn reset(stream: &CudaStream, any: &Tensor) -> Result<()> {
    hold(stream, any.clone());
    // SAFETY: the word lies at this address, and is held until it is cleared.
    unsafe { stream.fill(addr(any)?, 0, any.len_bytes()) }
}

/// Bytes of a table of `segs` segments.
pub(super) fn table_bytes(segs: usize) -> usize {
    segs * size_of::<TwSeg>()
}
