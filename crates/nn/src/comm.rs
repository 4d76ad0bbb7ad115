//! Teams, heaps and plans of one rank: everything that moves data.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result};
use tilewire_device::{Device, Stream, Tensor, Tracer};
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_ops::ep::{EpDesc, EpPlan};
use tilewire_ops::gemm::BOrder;
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_ops::{Shards, compile_ahead};
use tilewire_symm::{Heap, HeapCfg, LiveTeam, World};

use crate::attn::{Attn, token_order};
use crate::config::{Coord, Grid, ModelCfg};
use crate::place::{Place, Target};

/// A sum over a team of vectors of one length.
pub struct Sum {
    plan: CollectivePlan,
    len: usize,
}

fn sum_desc(len: usize) -> CollectiveDesc {
    let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
    CollectiveDesc { kind, m: len, cols: 1, dtype: DType::F32 }
}

impl Sum {
    fn new(len: usize, heap: &Heap, stream: &Stream) -> Result<Self> {
        let plan = CollectivePlan::new(sum_desc(len), heap)?;
        plan.prepare(stream)?;
        Ok(Self { plan, len })
    }

    /// Symmetric memory of one, on a team of `size`.
    fn bytes(len: usize, size: usize) -> usize {
        CollectivePlan::memory(&sum_desc(len), size) + (1 << 14)
    }

    /// Queues `out` = the sum of `x` over the team, both `[len, 1]` f32; the same bits on every
    /// rank.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn run(&self, stream: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        self.plan.launch(stream, self.len, x, out)?.join(stream).map(|_| ())
    }
}

/// Row numbers that a rank works on.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Global token (within the dp part) of each row that attention sees here.
    pub attn: Vec<usize>,
    /// The part of them that belongs to this rank between attention blocks.
    pub own: std::ops::Range<usize>,
}

impl Rows {
    fn new(m: &ModelCfg, grid: &Grid, c: Coord) -> Result<Self> {
        let attn = token_order(m, grid, c)?;
        let own = Shards::Even.rows(attn.len(), grid.tp)?;
        let start: usize = own[..c.tp].iter().sum();
        Ok(Self { attn, own: start..start + own[c.tp] })
    }
}

/// The projections over a tp team.
pub struct Projections {
    /// `all_gather(x) W^T` for queries, keys and values.
    pub qkv: AgGemmPlan,
    /// `reduce_scatter(o W^T)` for the projection back.
    pub out: GemmRsPlan,
    /// Backward of `out`: `all_gather(dy) W`.
    pub out_bwd: AgGemmPlan,
    /// Backward of `qkv`: `reduce_scatter(dqkv W)`.
    pub qkv_bwd: GemmRsPlan,
}

impl Projections {
    /// For `n` rows in all.
    fn new(
        (tp, target, tracer): (&LiveTeam, &Target, Option<Arc<Tracer>>),
        (m, n): (&ModelCfg, usize),
        stream: &Stream,
    ) -> Result<(Self, Heap)> {
        let (d, size, t) = (m.d_model, tp.size(), target.dtype);
        let q = m.heads / size * m.head_dim;
        let cols = q + 2 * (m.kv_heads / size * m.head_dim);
        let kn = BOrder::Kn;
        let gather = |n_out| AgGemmDesc::new(n, n_out, d, t);
        let scatter = |k| GemmRsDesc::new(n, d, k, t);
        let (qkv, out_bwd) = (gather(cols), AgGemmDesc { w_order: kn, ..gather(q) });
        let (out, qkv_bwd) = (scatter(q), GemmRsDesc { w_order: kn, ..scatter(cols) });
        let bytes = [&qkv, &out_bwd].map(AgGemmPlan::memory).iter().sum::<usize>()
            + [&out, &qkv_bwd].map(|d| GemmRsPlan::memory(d, size)).iter().sum::<usize>();
        let heap = tp.heap(target.backend_of(tp), HeapCfg::new(bytes + (1 << 16)))?;
        heap.copy_stream_traced(tracer)?;
        let all = Self {
            qkv: AgGemmPlan::new(qkv, &heap, None)?,
            out: GemmRsPlan::new(out, &heap, None)?,
            out_bwd: AgGemmPlan::new(out_bwd, &heap, None)?,
            qkv_bwd: GemmRsPlan::new(qkv_bwd, &heap, None)?,
        };
        all.qkv.prepare(stream)?;
        all.out.prepare(stream)?;
        all.out_bwd.prepare(stream)?;
        all.qkv_bwd.prepare(stream)?;
        Ok((all, heap))
    }
}

/// All communication of one rank.
pub struct Comm {
    /// Everybody.
    pub world: LiveTeam,
    /// Ranks that divide heads and projections.
    pub tp: LiveTeam,
    /// Ranks that divide the tokens of a part of the batch.
    pub cp: LiveTeam,
    /// Ranks that share a tp coordinate: they hold the same shards.
    pub shard: LiveTeam,
    /// Rows of this rank.
    pub rows: Rows,
    /// Products over the tp team.
    pub proj: Projections,
    /// Attention over the cp team.
    pub attn: Attn,
    /// Experts over everybody.
    pub ep: EpPlan,
    /// Sum of gradients of replicated parameters.
    pub sum_all: Sum,
    /// Sum of gradients of sharded parameters.
    pub sum_shard: Sum,
    /// Sum of how often experts were chosen, and of their probabilities.
    pub sum_stats: Sum,
    /// Sum of [`SMALL`] scalars.
    pub sum_small: Sum,
    /// The stream that everything runs on.
    pub stream: Stream,
    /// Device and type of the tensors.
    pub place: Place,
    /// Backend of the heaps, and type.
    pub target: Target,
    heaps: Vec<Heap>,
}

/// Scalars that are summed over all ranks: loss, the square of the gradient's norm in two parts,
/// and two that are finite if a rank has its sums of gradients. The rest is zero: rows of 16 bytes
/// travel best.
pub const SMALL: usize = 8;

fn teams(world: &World, grid: &Grid) -> Result<[LiveTeam; 4]> {
    let c = grid.coord(world.rank());
    let everyone = world.everyone("world")?;
    let one = |members: Vec<_>, name: &str| {
        world
            .team(&members, name)?
            .ok_or_else(|| Error::internal("this rank is not in its own team"))
    };
    let tp = one(grid.ranks(|o| (o.dp, o.cp) == (c.dp, c.cp)), &format!("tp{}.{}", c.dp, c.cp))?;
    let cp = one(grid.ranks(|o| (o.dp, o.tp) == (c.dp, c.tp)), &format!("cp{}.{}", c.dp, c.tp))?;
    let shard = one(grid.ranks(|o| o.tp == c.tp), &format!("shard{}", c.tp))?;
    Ok([everyone, tp, cp, shard])
}

impl Comm {
    /// Collective over the world: forms teams, allocates, prepares every plan. `lens` are the
    /// elements of replicated and of sharded parameters on this rank.
    ///
    /// # Errors
    /// Whatever forming teams and making plans gives.
    pub fn new(
        world: &World,
        (m, grid): (&ModelCfg, &Grid),
        target: Target,
        lens: (usize, usize),
        tracer: Option<Arc<Tracer>>,
    ) -> Result<Self> {
        target.check()?;
        let [everyone, tp, cp, shard] = teams(world, grid)?;
        let rows = Rows::new(m, grid, grid.coord(world.rank()))?;
        let (n, size) = (rows.attn.len(), everyone.size());
        // The most that any rank of the world has: zigzag parts differ by the rest of a division.
        let most = (m.seq * (m.batch / grid.dp)).div_ceil(grid.cp) + 2 * grid.cp;
        let mut ep_desc = EpDesc::new(size, m.experts, most.div_ceil(grid.tp), m.d_model, m.top_k);
        (ep_desc.dtype, ep_desc.out) = (target.dtype, target.dtype);
        let stats = 2 * m.experts;
        let bytes = EpPlan::memory(&ep_desc).symmetric
            + [lens.0, stats, SMALL].map(|len| Sum::bytes(len, size)).iter().sum::<usize>();
        let heap = everyone.heap(target.backend, HeapCfg::new(bytes + (1 << 16)))?;
        heap.copy_stream_traced(tracer.clone())?;
        let place = Place { device: heap.device(), dtype: target.dtype };
        compile_ahead(&place.device, target.dtype, &[(m.head_dim, m.head_dim)])?;
        let stream = match &place.device {
            Device::Host => Stream::with_tracer("main", tracer.clone())?,
            Device::Cuda(ctx) => Stream::on_with_tracer(ctx, "main", tracer.clone())?,
        };
        let (proj, tp_heap) = Projections::new((&tp, &target, tracer.clone()), (m, n), &stream)?;
        let attn = Attn::new(&cp, m, grid, (&target, &stream, tracer.clone()))?;
        let ep = EpPlan::new(ep_desc, &heap)?;
        ep.prepare(&stream)?;
        let shard_bytes = Sum::bytes(lens.1, shard.size()) + (1 << 16);
        let shard_heap = shard.heap(target.backend_of(&shard), HeapCfg::new(shard_bytes))?;
        shard_heap.copy_stream_traced(tracer)?;
        Ok(Self {
            sum_all: Sum::new(lens.0, &heap, &stream)?,
            sum_stats: Sum::new(stats, &heap, &stream)?,
            sum_small: Sum::new(SMALL, &heap, &stream)?,
            sum_shard: Sum::new(lens.1, &shard_heap, &stream)?,
            heaps: vec![tp_heap, heap, shard_heap],
            world: everyone,
            tp,
            cp,
            shard,
            rows,
            proj,
            attn,
            ep,
            stream,
            place,
            target,
        })
    }

    /// All teams of this rank.
    pub fn teams(&self) -> [&LiveTeam; 4] {
        [&self.world, &self.tp, &self.cp, &self.shard]
    }

    /// Symmetric memory of this rank in bytes.
    pub fn symmetric_bytes(&self) -> usize {
        self.heaps.iter().map(|h| h.usage().1).sum()
    }

    /// Queues an AG+GEMM of this rank's rows, which also stores the gathered rows.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn gather_gemm(
        &self,
        plan: &AgGemmPlan,
        (x, w): (&Tensor, &Tensor),
        (out, gathered): (&Tensor, &Tensor),
    ) -> Result<()> {
        let inputs = AgGemmInputs {
            gathered: Some(gathered.clone()),
            ..AgGemmInputs::new(x.clone(), w.clone(), out.clone())
        };
        plan.launch(&self.stream, self.rows.attn.len(), inputs)?.join(&self.stream).map(|_| ())
    }

    /// Queues a GEMM+RS to this rank's rows.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn gemm_scatter(
        &self,
        plan: &GemmRsPlan,
        (x, w): (&Tensor, &Tensor),
        out: &Tensor,
    ) -> Result<()> {
        let inputs = GemmRsInputs::new(x.clone(), w.clone(), out.clone());
        plan.launch(&self.stream, self.rows.attn.len(), inputs)?.join(&self.stream).map(|_| ())
    }
}
