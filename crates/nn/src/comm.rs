//! Teams, heaps and plans of one rank: everything that moves data.

use std::sync::Arc;

use tilewire_core::{BackendKind, DType, Result, Shape};
use tilewire_device::{Stream, Tensor, Tracer};
use tilewire_ops::Shards;
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_ops::ep::{EpDesc, EpPlan};
use tilewire_ops::gemm::BOrder;
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_symm::{Heap, HeapCfg, LiveTeam, World};

use crate::attn::{Attn, token_order};
use crate::config::{Coord, Grid, ModelCfg};

/// A sum over a team of vectors of one length.
pub struct Sum {
    plan: CollectivePlan,
    len: usize,
}

impl Sum {
    fn new(len: usize, heap: &Heap, stream: &Stream) -> Result<Self> {
        let desc = CollectiveDesc {
            kind: CollectiveKind::AllReduce(ReduceOp::Sum),
            m: len,
            cols: 1,
            dtype: DType::F32,
        };
        let plan = CollectivePlan::new(desc, heap)?;
        plan.prepare(stream)?;
        Ok(Self { plan, len })
    }

    fn bytes(len: usize, size: usize) -> usize {
        (len.div_ceil(size) * size + len) * 4 + 1024
    }

    /// Replaces `v` by its sum over the team; the same bits on every rank.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn run(&self, stream: &Stream, v: &mut [f32]) -> Result<()> {
        let shape = Shape::d2(self.len, 1);
        let x = Tensor::from_slice(v, shape)?;
        let out = Tensor::poisoned(DType::F32, shape);
        let out = self.plan.launch(stream, self.len, &x, &out)?.wait()?;
        out.read(|b| v.copy_from_slice(bytemuck::cast_slice(b)))
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
    /// `all_gather(x) W^T` for queries, keys and values.
    pub qkv: AgGemmPlan,
    /// `reduce_scatter(o W^T)` for the projection back.
    pub out: GemmRsPlan,
    /// Backward of `out`: `all_gather(dy) W`.
    pub out_bwd: AgGemmPlan,
    /// Backward of `qkv`: `reduce_scatter(dqkv W)`.
    pub qkv_bwd: GemmRsPlan,
    /// Attention over the cp team.
    pub attn: Attn,
    /// Experts over everybody.
    pub ep: EpPlan,
    /// Sum of gradients of replicated parameters.
    pub sum_all: Sum,
    /// Sum of gradients of sharded parameters.
    pub sum_shard: Sum,
    /// Sum of expert counts and a few scalars.
    pub sum_small: Sum,
    /// The stream that everything runs on.
    pub stream: Stream,
    heaps: Vec<Heap>,
}

/// Numbers that ride with the expert counts: loss, squares of gradients.
pub const SMALL_EXTRA: usize = 4;

impl Comm {
    /// Collective over the world: forms teams, allocates, prepares every plan. `lens` are the
    /// elements of replicated and of sharded parameters on this rank.
    ///
    /// # Errors
    /// Whatever forming teams and making plans gives.
    pub fn new(
        world: &World,
        m: &ModelCfg,
        grid: &Grid,
        lens: (usize, usize),
        tracer: Option<Arc<Tracer>>,
    ) -> Result<Self> {
        let c = grid.coord(world.rank());
        let everyone = world.everyone("world")?;
        let one = |members: Vec<_>, name: &str| {
            world
                .team(&members, name)?
                .ok_or_else(|| tilewire_core::Error::internal("not in my own team"))
        };
        let tp =
            one(grid.ranks(|o| (o.dp, o.cp) == (c.dp, c.cp)), &format!("tp{}.{}", c.dp, c.cp))?;
        let cp =
            one(grid.ranks(|o| (o.dp, o.tp) == (c.dp, c.tp)), &format!("cp{}.{}", c.dp, c.tp))?;
        let shard = one(grid.ranks(|o| o.tp == c.tp), &format!("shard{}", c.tp))?;

        let stream = Stream::with_tracer("main", tracer.clone())?;
        let part = m.seq * (m.batch / grid.dp);
        let attn_rows = token_order(m, grid, c)?;
        let n = attn_rows.len();
        let most = part.div_ceil(grid.cp) + 2 * grid.cp;
        let own_rows = Shards::Even.rows(n, grid.tp)?;
        let start: usize = own_rows[..c.tp].iter().sum();
        let rows = Rows { attn: attn_rows, own: start..start + own_rows[c.tp] };

        let (d, tp_size) = (m.d_model, grid.tp);
        let q = m.heads / tp_size * m.head_dim;
        let qkv_cols = q + 2 * (m.kv_heads / tp_size * m.head_dim);
        let f32s = |x: usize| x * 4;
        let tp_bytes = f32s(2 * n * d) + 2 * f32s((n + tp_size) * d) + (1 << 16);
        let tp_heap = tp.heap(BackendKind::Host, HeapCfg::new(tp_bytes))?;
        tp_heap.copy_stream_traced(tracer.clone())?;
        let qkv = AgGemmPlan::new(AgGemmDesc::new(n, qkv_cols, d, DType::F32), &tp_heap, None)?;
        let out = GemmRsPlan::new(GemmRsDesc::new(n, d, q, DType::F32), &tp_heap, None)?;
        let out_bwd = AgGemmPlan::new(
            AgGemmDesc { w_order: BOrder::Kn, ..AgGemmDesc::new(n, q, d, DType::F32) },
            &tp_heap,
            None,
        )?;
        let qkv_bwd = GemmRsPlan::new(
            GemmRsDesc { w_order: BOrder::Kn, ..GemmRsDesc::new(n, d, qkv_cols, DType::F32) },
            &tp_heap,
            None,
        )?;
        qkv.prepare(&stream)?;
        out.prepare(&stream)?;
        out_bwd.prepare(&stream)?;
        qkv_bwd.prepare(&stream)?;

        let attn = Attn::new(&cp, m, grid, &stream)?;

        let size = everyone.size();
        let max_tokens = most.div_ceil(tp_size);
        let ep_desc = EpDesc::new(size, m.experts, max_tokens, d, m.top_k);
        let small = m.experts + SMALL_EXTRA;
        let world_bytes = EpPlan::memory(&ep_desc).symmetric
            + Sum::bytes(lens.0, size)
            + Sum::bytes(small, size)
            + (1 << 16);
        let world_heap = everyone.heap(BackendKind::Host, HeapCfg::new(world_bytes))?;
        let ep = EpPlan::new(ep_desc, &world_heap)?;
        ep.prepare(&stream)?;
        let sum_all = Sum::new(lens.0, &world_heap, &stream)?;
        let sum_small = Sum::new(small, &world_heap, &stream)?;
        let shard_bytes = Sum::bytes(lens.1, shard.size()) + (1 << 16);
        let shard_heap = shard.heap(BackendKind::Host, HeapCfg::new(shard_bytes))?;
        let sum_shard = Sum::new(lens.1, &shard_heap, &stream)?;
        Ok(Self {
            world: everyone,
            tp,
            cp,
            shard,
            rows,
            qkv,
            out,
            out_bwd,
            qkv_bwd,
            attn,
            ep,
            sum_all,
            sum_shard,
            sum_small,
            stream,
            heaps: vec![tp_heap, world_heap, shard_heap],
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

    /// Runs an AG+GEMM on rows of `k` elements and returns its output, rows of `cols`, and the
    /// gathered rows. Neither number follows from `x`, which may have no rows.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn gather_gemm(
        &self,
        plan: &AgGemmPlan,
        x: &[f32],
        w: &Tensor,
        (cols, k): (usize, usize),
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let n = self.rows.attn.len();
        let gathered = Tensor::poisoned(DType::F32, Shape::d2(n, k));
        let inputs = AgGemmInputs {
            gathered: Some(gathered.clone()),
            ..AgGemmInputs::new(
                Tensor::from_slice(x, Shape::d2(self.rows.own.len(), k))?,
                w.clone(),
                Tensor::poisoned(DType::F32, Shape::d2(n, cols)),
            )
        };
        let done = plan.launch(&self.stream, n, inputs)?.wait()?;
        Ok((done.out.to_vec()?, gathered.to_vec()?))
    }

    /// Runs a GEMM+RS on rows of `k` elements and returns the rows of this rank, of `cols`.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn gemm_scatter(
        &self,
        plan: &GemmRsPlan,
        x: &[f32],
        w: &Tensor,
        (cols, k): (usize, usize),
    ) -> Result<Vec<f32>> {
        let n = self.rows.attn.len();
        let out = Tensor::poisoned(DType::F32, Shape::d2(self.rows.own.len(), cols));
        let x = Tensor::from_slice(x, Shape::d2(n, k))?;
        plan.launch(&self.stream, n, GemmRsInputs::new(x, w.clone(), out))?.wait()?.to_vec()
    }

    /// Coordinates of this rank.
    pub fn coord(&self, grid: &Grid) -> Coord {
        grid.coord(self.world.rank())
    }
}
