//! Attention of one rank: each stream, and each captured graph, has a workspace of its own.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::{ErrorKind, Result};
use tilewire_device::Tensor;
use tilewire_device::cuda::{CudaContext, CudaStream};
use tilewire_kernels::abi::TwAttn;
use tilewire_kernels::attention::hopper::TILE_M;

use super::hopper_fp8::count_blocks;
use super::offsets::{Segments, Shard, reset};
use super::queue::{Kernels, Prepared, inputs, inputs_bwd, param, param_bwd};
use super::space::{Space, Sums};
use crate::attention::backend::{Fusion, LONG_QUERIES};
use crate::attention::launch::Given;
use crate::attention::table::whole;
use crate::attention::{AttentionDesc, AttnBackend, AttnGrads, AttnOut, AttnSaved, Sequences};
use crate::common::cuda::{addr, holding};
use crate::common::workspaces::Workspaces;

/// Kernels and workspaces of a plan. Launches on different streams may overlap.
pub(crate) struct Local {
    kernels: Arc<Kernels>,
    spaces: Workspaces<Space>,
    /// Sums of dq, if one kernel makes all gradients: shared with other plans.
    sums: Option<Arc<Workspaces<Sums>>>,
    /// It makes those of long sequences alone, on so many multiprocessors.
    if_long: Option<u32>,
}

/// Returns whether the sequences of a launch are [long](LONG_QUERIES), and their keys tiles for all
/// multiprocessors nearly twice: a block of the one kernel has a tile with all its queries, which
/// it is slower for than two kernels where there are few. Sequences that nobody knows yet are not.
fn are_long(s: &Sequences, heads_kv: usize, num_sms: u32) -> bool {
    let lens = s.q.iter().map(Range::len).filter(|n| *n > 0);
    let (num, rows) = lens.fold((0, 0), |(num, rows), n| (num + 1, rows + n));
    let tiles: usize = s.kv.iter().map(|kv| kv.len().div_ceil(TILE_M)).sum();
    num > 0 && rows >= LONG_QUERIES * num && fill(tiles * heads_kv, num_sms)
}

/// Returns the rows that meet: all are here.
fn segments(Given { x, seqs, rows }: &Given<'_>) -> Segments {
    let shards = [rows.q, rows.kv].map(Shard::whole);
    x.offsets
        .clone()
        .map_or_else(|| Segments::Known(whole(seqs)), |o| Segments::ByOffsets(Box::new(o), shards))
}

/// Returns whether so many tiles are nearly two for each multiprocessor.
fn fill(tiles: usize, num_sms: u32) -> bool {
    10 * tiles >= 19 * num_sms as usize
}

/// Returns whether a plan may have launches that one kernel is faster for.
fn may_be_long(d: &AttentionDesc, num_sms: u32) -> bool {
    let tiles = d.sequences.tokens_kv.div_ceil(TILE_M) * d.heads_kv;
    d.sequences.tokens_q >= LONG_QUERIES && d.mask.left.is_none() && fill(tiles, num_sms)
}

impl Local {
    /// By the kernels of a backend, and as many of gradients as said.
    pub fn new(
        ctx: &CudaContext,
        d: &AttentionDesc,
        (backend, fusion): (AttnBackend, Fusion),
    ) -> Result<Self> {
        let mut kernels = Kernels::new(ctx, d, backend)?;
        let unordered = matches!(fusion, Fusion::Unordered | Fusion::UnorderedIfFaster);
        let if_long = match fusion {
            Fusion::OrderedIfFaster | Fusion::UnorderedIfFaster => Some(ctx.num_sms()?),
            _ => None,
        };
        match if_long {
            _ if fusion == Fusion::None => {}
            Some(sms) if !may_be_long(d, sms) => {}
            Some(_) => match kernels.fuse(ctx, d, unordered) {
                Err(e) if e.is_unsupported() => {}
                r => {
                    r?;
                    kernels.backward.name += &format!(", of {LONG_QUERIES} queries and more");
                }
            },
            None => kernels.fuse(ctx, d, unordered)?,
        }
        let kernels = Arc::new(kernels);
        let k = kernels.clone();
        let spaces = Workspaces::new(ctx, move |ctx| {
            Space::new(ctx, &k.sizes, (k.split.as_ref(), k.fp8.as_ref()))
        });
        let sums = kernels.sizes.sums.map(|sizes| Sums::shared(ctx, sizes));
        Ok(Self { kernels, spaces, sums, if_long })
    }

    /// Gives `stream` a workspace of its own.
    pub fn prepare(&self, stream: &CudaStream) -> Result<()> {
        self.spaces.prepare(stream)?;
        let made = self.sums.as_ref().map_or(Ok(()), |s| s.prepare(stream));
        made.map_err(|e| match e.kind() {
            ErrorKind::Exhausted => e.hint("`without_fused_backward` needs no sums of dq"),
            _ => e,
        })
    }

    /// Returns how it is computed, in words.
    pub fn explain(&self) -> String {
        self.kernels.explain()
    }

    /// Returns `[1]` i32, not 0 if offsets of any launch cannot be used.
    pub fn status(&self) -> &Tensor {
        &self.kernels.by_offsets.any
    }

    /// Queues the clearing of the status.
    pub fn reset(&self, stream: &CudaStream) -> Result<()> {
        reset(stream, self.status())
    }

    fn with(&self, stream: &CudaStream, queue: impl FnOnce(&Prepared) -> Result<()>) -> Result<()> {
        self.spaces.with(stream, |space| {
            queue(&Prepared { kernels: self.kernels.clone(), space: space.clone() })
        })
    }

    /// Queues the forward pass of tensors that were checked.
    pub fn launch_fwd(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        given: Given<'_>,
        out: &AttnOut,
    ) -> Result<()> {
        let Given { x, seqs, rows } = given;
        let p = TwAttn { out: addr(&out.out)?, lse: addr(&out.lse)?, ..param(d, x, rows)? };
        let held = [inputs(x), vec![out.out.clone(), out.lse.clone()]].concat();
        let tables = x.offsets.is_none().then(|| whole(seqs));
        let split = self.kernels.split.as_ref().filter(|s| tables.is_some() && s.takes(seqs));
        let tables_few = |t: &_| !d.dtype.is_fp8() && self.kernels.takes_few(t);
        if let (None, Some(few)) = (split, tables.as_ref().filter(|t| tables_few(*t))) {
            return holding(stream, held, || self.kernels.attend_few(stream, d, &p, few.clone()));
        }
        self.with(stream, |by| {
            holding(stream, by.held(held), || {
                let wide = &self.kernels.desc;
                if let (Some(s), Some(pieces), Some((q, kv))) = (split, &by.space.pieces, &tables) {
                    let p = by.widened(stream, d, (x, rows), p)?;
                    return by.split(stream, wide, &p, (s, pieces), (q, kv));
                }
                let fp8 = (&self.kernels.fp8, &by.space.turned, &tables);
                if let (Some(f), Some(values), Some(tables)) = fp8
                    && (!f.optional || f.takes(&p, count_blocks(&tables.1)).is_ok())
                {
                    return by.fp8(stream, (d, &given, &p), (f, values), tables.clone());
                }
                let p = by.widened(stream, d, (x, rows), p)?;
                let rows = tables.map_or_else(|| segments(&given), Segments::Known);
                by.forward(stream, wide, &p, rows)?;
                if x.offsets.is_some() { by.refuse(stream, [&out.out, &out.lse]) } else { Ok(()) }
            })
        })
    }

    /// Queues the backward pass of tensors that were checked.
    pub fn launch_bwd(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        given: Given<'_>,
        (saved, grads): (&AttnSaved, &AttnGrads),
    ) -> Result<()> {
        let Given { x, seqs, rows } = given;
        let p = param_bwd(d, x, rows, (saved, grads))?;
        let wide = &self.kernels.desc;
        self.with(stream, |by| {
            let p = TwAttn { delta: by.delta_memory().addr(), ..p };
            holding(stream, by.held(inputs_bwd(x, saved, grads)), || {
                by.delta(stream, wide, &p)?;
                let p = by.widened(stream, d, (x, rows), p)?;
                let tables = by.tables(stream, wide, segments(&given))?;
                let one = self.if_long.is_none_or(|num_sms| {
                    x.offsets.is_none() && are_long(seqs, d.heads_kv, num_sms)
                });
                match &self.sums {
                    Some(all) if one => {
                        all.with(stream, |sums| by.all(stream, wide, (&p, sums), &tables))?;
                    }
                    _ => {
                        by.keys(stream, wide, &p, &tables)?;
                        by.queries(stream, wide, &p, &tables)?;
                    }
                }
                let outs = grads.named().into_iter().filter_map(|(_, t)| t);
                if x.offsets.is_some() { by.refuse(stream, outs) } else { Ok(()) }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::DType;

    use super::*;
    use crate::attention::AttnMask;

    /// On average: what lies behind the last sequence, and sequences of no rows, are none.
    #[test]
    fn long_are_sequences_of_4096_queries_on_average() {
        let of = |cu: &[usize]| are_long(&Sequences::packed(cu, cu).unwrap(), 8, 132);
        assert!(of(&[0, 4096]) && of(&[0, 8192, 8192]) && of(&[0, 8100, 8200]));
        assert!(!of(&[0, 4095]) && !of(&[0, 4096, 8191]) && !of(&[0, 0]) && !of(&[0]));
        // Two key heads: 64, 128 and 256 tiles.
        let two = |n| are_long(&Sequences::one(n, n), 2, 132);
        assert!(!two(4096) && !two(8192) && two(16384));
        let plan = |n, heads, mask| {
            may_be_long(&AttentionDesc::new(n, heads, 128, DType::BF16, mask), 132)
        };
        assert!(plan(4096, (8, 8), AttnMask::CAUSAL) && plan(9000, (8, 4), AttnMask::FULL));
        assert!(!plan(4095, (8, 8), AttnMask::CAUSAL) && !plan(4096, (8, 4), AttnMask::CAUSAL));
        assert!(!plan(9000, (8, 8), AttnMask::window(100, 0)));
    }
}
