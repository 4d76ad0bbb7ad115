//! The kernels of attention, and what queues them.

use std::any::Any;
use std::sync::Arc;

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::{TwAttn, TwSeg, TwTable};
use tilewire_kernels::attention::{
    PLAIN_ATTENTION, PLAIN_ROWS, SM80_ATTENTION, TABLE, Variant, delta_rows,
};

use super::forward::{
    Attend, Forward, Needs, ROWS, Tiled, code, core_lacks, fitting, plain, results, variant,
};
use super::fp8::kernel_desc;
use super::hopper_fp8::HopperFp8;
use super::hopper_fused::Fused;
use super::hopper_grad::{self, Gradients};
use super::offsets::{ByOffsets, Place, Segments, Side, table_bytes};
use super::space::{Sizes, Space};
use super::split::SplitKeys;
use crate::attention::desc::bound;
use crate::attention::offsets::SEQUENCES;
use crate::attention::table::number_tiles;
use crate::attention::{AttentionDesc, AttnBackend, AttnGrads, AttnInputs, AttnSaved, LocalRows};
use crate::common::cuda::{addr, fit_32_bits, load, no_kernel};

/// `p` with another place for its result over some of the keys, which is f32.
pub(crate) fn part(p: TwAttn, out: u64, lse: u64) -> TwAttn {
    TwAttn { out, lse, out_type: code(DType::F32), ..p }
}

/// The kernels of the gradients of q, k and v.
pub(super) enum Make {
    /// Of dq, and of dk and dv, together or one after the other.
    Portable(Tiled, Vec<Tiled>),
    Hopper(Gradients),
}

/// The kernel that makes delta.
struct Delta {
    kernel: Kernel,
    /// Rows of heads of one of its blocks.
    rows: usize,
}

pub(super) struct Backward {
    delta: Delta,
    pub make: Make,
    /// Beside [`Make::Hopper`].
    pub fused: Option<Fused>,
    /// The kernels, for people.
    pub name: String,
    /// Type of dk and dv.
    dkv_type: u32,
    bias_and_sink: Option<(Kernel, Kernel)>,
}

/// The kernels of a plan.
pub(super) struct Kernels {
    /// The description that they are for: of a wider type, if FP8 is widened.
    pub desc: AttentionDesc,
    pub forward: Forward,
    pub backward: Backward,
    pub by_offsets: ByOffsets,
    /// Those of launches whose sequences have few queries.
    pub split: Option<SplitKeys>,
    /// That of FP8 products, if it was asked for or is chosen.
    pub fp8: Option<HopperFp8>,
    pub sizes: Sizes,
}

/// Kernels and the workspace of one launch at a time: launches by it must not overlap.
#[derive(Clone)]
pub(crate) struct Prepared {
    pub(super) kernels: Arc<Kernels>,
    pub(super) space: Arc<Space>,
}

/// The most segments of a table; fails for what no kernel does. Pure.
fn fitting_segs(d: &AttentionDesc, pieces: (usize, usize)) -> Result<usize> {
    if d.dqk.max(d.dv) > 256 {
        return Err(no_kernel(
            format!("attention with head dimensions {} and {}", d.dqk, d.dv),
            "head dimensions go to 256 on CUDA devices; the host has no bound",
        ));
    }
    let s = &d.sequences;
    // Positions, and positions beyond a window, are 32-bit numbers.
    if s.tokens_q.max(s.tokens_kv) >= 1 << 29 {
        return Err(Error::invalid("the launch has too many rows for the kernels")
            .expected("less than 2^29")
            .seen(s.tokens_q.max(s.tokens_kv)));
    }
    // Before the first sequence may lie rows of none. Launches may have more sequences.
    let segs = pieces.0 * s.q.len().max(SEQUENCES) + 1 + pieces.1;
    let tiles = s.tokens_q.max(s.tokens_kv) / PLAIN_ROWS as usize + segs;
    fit_32_bits("attention", &[tiles * d.heads_q])?;
    // A bias may be wider than any sequence. A thread makes an element of its gradient.
    let bias = d.bias.map_or([0; 3], |b| [b.sq, b.skv, (b.heads * b.sq * b.skv).div_ceil(256)]);
    fit_32_bits("a bias of attention", &bias).map(|()| segs)
}

impl Backward {
    fn new(
        ctx: &CudaContext,
        d: &AttentionDesc,
        needs: &Needs,
        backend: AttnBackend,
    ) -> Result<Self> {
        let core = match core_lacks(ctx, (backend, hopper_grad::unfit(d)))? {
            Some(why) => Err(why),
            None => match Gradients::new(ctx, d) {
                // Nothing to compile them with, and not shipped either.
                Err(e) if e.is_unavailable() && backend == AttnBackend::Auto => Err(e.to_string()),
                r => Ok(r?),
            },
        };
        let (delta, make, name) = match core {
            Ok(g) => {
                let name = g.name();
                let delta = Delta { kernel: g.delta.clone(), rows: delta_rows(d.dv) };
                (delta, Make::Hopper(g), name)
            }
            Err(why) => {
                let (delta, make) = Self::portable(ctx, d, needs)?;
                (delta, make, format!("the portable kernels (not those for sm_90a: {why})"))
            }
        };
        let bias_and_sink = match d.bias.is_some() || d.sink {
            false => None,
            true => {
                let m = load(ctx, &PLAIN_ATTENTION, plain(d).defines())?;
                Some((m.kernel("tw_attn_dbias")?, m.kernel("tw_attn_dsink")?))
            }
        };
        let dkv_type = code(needs.dkv);
        Ok(Self { delta, make, fused: None, name, dkv_type, bias_and_sink })
    }

    fn portable(ctx: &CudaContext, d: &AttentionDesc, needs: &Needs) -> Result<(Delta, Make)> {
        // The matrix kernels read an output and its gradient of the inputs' type.
        let v = variant(d, d.has_extras()).filter(|_| d.out == d.dtype);
        if let Some(v) = fitting(ctx, v, Variant::backward_bytes)? {
            return Self::tiled(ctx, v);
        }
        let m = load(ctx, &PLAIN_ATTENTION, results(d, needs.dkv))?;
        let rows = |name| Tiled::new(m.kernel(name)?, PLAIN_ROWS, ROWS, 0);
        let make = Make::Portable(rows("tw_attn_dq")?, vec![rows("tw_attn_dkv")?]);
        // A warp to a row.
        Ok((Delta { kernel: m.kernel("tw_attn_delta")?, rows: 8 }, make))
    }

    /// Returns the rows of a tile of queries, and of keys.
    pub(super) fn rows(&self) -> (u64, u64) {
        match &self.make {
            Make::Portable(dq, dkv) => (dq.rows, dkv.first().map_or(1, |k| k.rows)),
            Make::Hopper(g) => (g.rows(), g.rows()),
        }
    }

    fn tiled(ctx: &CudaContext, v: Variant) -> Result<(Delta, Make)> {
        let m = load(ctx, &SM80_ATTENTION, v.defines())?;
        let (q, kv) = (v.dq(), v.dkv());
        let names: &[_] = if v.split() { &["tw_attn_dk", "tw_attn_dv"] } else { &["tw_attn_dkv"] };
        let make = |n: &&'static str| Tiled::new(m.kernel(n)?, kv.n, kv, v.dkv_shared_bytes());
        let dkv = names.iter().map(make).collect::<Result<Vec<_>>>()?;
        let dq = Tiled::new(m.kernel("tw_attn_dq")?, q.m, q, v.dq_shared_bytes())?;
        let delta = Delta { kernel: m.kernel("tw_attn_delta")?, rows: delta_rows(v.dv as usize) };
        Ok((delta, Make::Portable(dq, dkv)))
    }
}

/// The tables of a backward pass.
pub(crate) struct Sides {
    pub(super) queries: Side,
    pub(super) keys: Side,
}

impl Kernels {
    /// For all rows of the description on one rank.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc, backend: AttnBackend) -> Result<Self> {
        let queries = d.heads_q * d.sequences.tokens_q;
        // Tables of offsets have up to four segments a sequence.
        let needs = Needs { queries, pieces: (4, 1), dkv: d.out, out: d.out };
        if !d.dtype.is_fp8() {
            let split = SplitKeys::new(ctx, d, backend)?;
            return Ok(Self { split, ..Self::sized(ctx, d, &needs, backend)? });
        }
        let wide = kernel_desc(d);
        let few = SplitKeys::new(ctx, &wide, backend)?;
        let fp8 = if few.is_none() { HopperFp8::of(ctx, d, backend)? } else { None };
        let others = match (&fp8, wide.dtype) {
            // Beside FP8 products: there are none of f32 for sm_90a.
            (Some(_), DType::F32) => AttnBackend::Auto,
            _ => backend,
        };
        let mut new = Self::sized(ctx, &wide, &needs, others)?;
        let rows = (queries, d.heads_kv * d.sequences.tokens_kv);
        new.sizes.wide = Some((d.clone(), rows));
        Ok(Self { fp8, split: few, ..new })
    }

    fn sized(
        ctx: &CudaContext,
        d: &AttentionDesc,
        needs: &Needs,
        backend: AttnBackend,
    ) -> Result<Self> {
        let segs = fitting_segs(d, needs.pieces)?;
        Ok(Self {
            desc: d.clone(),
            forward: Forward::new(ctx, d, needs, backend)?,
            backward: Backward::new(ctx, d, needs, backend)?,
            by_offsets: ByOffsets::new(ctx)?,
            split: None,
            fp8: None,
            sizes: Sizes { segs, queries: needs.queries, wide: None, sums: None },
        })
    }

    pub fn explain(&self) -> String {
        let wide = self.sizes.wide.is_some().then_some(self.desc.dtype);
        let fp8 = wide.map_or_else(String::new, |t| format!(", FP8 widened to {t}"));
        let split = self.split.as_ref().map(|s| format!("{}, others by ", s.name()));
        let split = self.fp8.as_ref().map(HopperFp8::name).or(split).unwrap_or_default();
        format!("CUDA, {split}{}{fp8}; backward {}", self.forward.name, self.backward.name)
    }
}

impl Prepared {
    /// For a description of wide types.
    pub fn sized(
        ctx: &CudaContext,
        d: &AttentionDesc,
        needs: &Needs,
        backend: AttnBackend,
    ) -> Result<Self> {
        let kernels = Arc::new(Kernels::sized(ctx, d, needs, backend)?);
        let space = Arc::new(Space::new(ctx, &kernels.sizes, (None, None))?);
        Ok(Self { kernels, space })
    }

    /// Queues the writing of table `which`.
    pub(super) fn write(
        &self,
        stream: &CudaStream,
        which: usize,
        mut segs: Vec<TwSeg>,
        rows: u64,
    ) -> Result<Side> {
        let tiles = number_tiles(&mut segs, rows);
        let at = self.write_numbered(stream, which, &segs)?;
        let rows = segs.iter().map(|s| s.len as usize).sum();
        Ok(Side { at, num: segs.len() as u32, tiles, rows })
    }

    /// Queues the writing of table `which` as it is; its address.
    pub(super) fn write_numbered(
        &self,
        stream: &CudaStream,
        which: usize,
        segs: &[TwSeg],
    ) -> Result<u64> {
        if segs.len() > self.kernels.sizes.segs {
            return Err(Error::invalid("the launch has more sequences than the plan was made for")
                .expected(format_args!("at most {} pieces of them", self.kernels.sizes.segs))
                .seen(segs.len()));
        }
        let at = self.place(which, 1).at;
        for (i, part) in segs.chunks(TABLE).enumerate() {
            let to = at + (i * TABLE * size_of::<TwSeg>()) as u64;
            let mut t =
                TwTable { to, num: part.len() as u32, pad: 0, segs: [TwSeg::zeroed(); TABLE] };
            t.segs[..part.len()].copy_from_slice(part);
            let args = LaunchArgs::new().arg(&t);
            // SAFETY: the argument is the kernel's `TwTable`; it writes `num` segments at `to`,
            // inside of the tables (checked above), which are `held` until the kernel has run.
            unsafe { self.kernels.forward.table.launch(stream, Grid::new(1, TABLE as u32), args)? };
        }
        Ok(at)
    }

    /// Returns table `which`, for tiles of `tile` rows.
    pub(super) fn place(&self, which: usize, tile: u64) -> Place {
        let capacity = self.kernels.sizes.segs;
        let at = self.space.tables.addr() + (which * table_bytes(capacity)) as u64;
        Place { at, capacity, tile }
    }

    /// Returns the tables of queries and of keys of a backward pass.
    pub(super) fn places(&self) -> [Place; 2] {
        let (of_q, of_kv) = self.kernels.backward.rows();
        [self.place(1, of_q), self.place(2, of_kv)]
    }

    /// Returns what queued kernels refer to.
    pub fn held(&self, tensors: Vec<Tensor>) -> impl Any + Clone + Send + Sync + use<> {
        (tensors, self.space.clone(), self.kernels.by_offsets.any.clone())
    }

    /// Returns the memory that [`Prepared::delta`] writes to.
    pub fn delta_memory(&self) -> &CudaMemory {
        &self.space.delta
    }

    /// Returns what makes tables of offsets, and where a launch keeps that it was refused.
    pub(super) fn by_offsets(&self) -> (&ByOffsets, u64) {
        (&self.kernels.by_offsets, self.space.refused.addr())
    }

    /// With FP8, queues q, k and v in a wider type. The inputs are held.
    pub(super) fn widened(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        x: (&AttnInputs, LocalRows),
        p: TwAttn,
    ) -> Result<TwAttn> {
        self.space.wide.as_ref().map_or(Ok(p), |w| w.inputs(stream, d, x, p))
    }

    /// Queues the forward pass of tensors that are held, with the rows that meet.
    pub fn forward(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        rows: Segments,
    ) -> Result<()> {
        if let Segments::Known(tables) = &rows
            && self.kernels.takes_few(tables)
        {
            return self.kernels.attend_few(stream, d, p, tables.clone());
        }
        let [own, other] = self.forward_tables(stream, d, rows, self.kernels.forward.rows())?;
        self.attend(stream, d, p, (&own, &other))
    }

    /// Queues the forward pass of tables in device memory.
    pub(super) fn attend(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        (own, other): (&Side, &Side),
    ) -> Result<()> {
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("out", p.out)])?;
        match &self.kernels.forward.attend {
            Attend::Portable(f) => {
                let f = self.kernels.forward.portable_for(f, (d, p.out_type));
                launch(stream, f, p.heads_q, p, (own, other))
            }
            Attend::Hopper(_) if own.tiles == 0 || p.heads_q == 0 => Ok(()),
            Attend::Hopper(h) => {
                let p = with_tables(p, (own, other));
                // SAFETY: what `p` points to was checked against the description (shapes, types,
                // the same device), begins at multiples of 16 bytes (`aligned`), and is held by
                // the stream (`held`); tables are made of the launch's own rows.
                unsafe { h.launch(stream, d, (&p, other.rows), None) }
            }
        }
    }

    /// Queues `delta = <d_out, out>`.
    pub fn delta(&self, stream: &CudaStream, d: &AttentionDesc, p: &TwAttn) -> Result<()> {
        aligned(d, &[("out", p.out), ("d_out", p.d_out)])?;
        let Delta { kernel, rows } = &self.kernels.backward.delta;
        let blocks = (u64::from(p.tokens_q) * u64::from(p.heads_q)).div_ceil(*rows as u64);
        run(stream, kernel, Grid::new(blocks as u32, 256), p)
    }

    /// Queues dk and dv of every row of keys of the tables, from tensors that are held; `delta` is
    /// there.
    pub fn keys(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        t: &Sides,
    ) -> Result<()> {
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("d_out", p.d_out)])?;
        aligned(d, &[("dk", p.dk), ("dv", p.dv)])?;
        let p = TwAttn { out_type: self.kernels.backward.dkv_type, ..*p };
        match &self.kernels.backward.make {
            Make::Portable(_, dkv) => dkv
                .iter()
                .try_for_each(|k| launch(stream, k, p.heads_kv, &p, (&t.keys, &t.queries))),
            Make::Hopper(_) if t.keys.tiles == 0 => Ok(()),
            Make::Hopper(g) => {
                let p = with_tables(&p, (&t.keys, &t.queries));
                // SAFETY: what `p` points to was checked against the description (shapes, types,
                // the same device), begins at multiples of 16 bytes (`aligned`), and is held by
                // the stream (`held`); tables are made of the launch's own rows.
                unsafe { g.launch_dkv(stream, d, (&p, t.queries.rows)) }
            }
        }
    }

    /// Queues dq of every row of queries, and what these contribute to the gradients of bias and
    /// sink.
    pub fn queries(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        t: &Sides,
    ) -> Result<()> {
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("d_out", p.d_out), ("dq", p.dq)])?;
        match &self.kernels.backward.make {
            Make::Portable(dq, _) => launch(stream, dq, p.heads_q, p, (&t.queries, &t.keys))?,
            Make::Hopper(_) if t.queries.tiles == 0 => (),
            Make::Hopper(g) => {
                let p = with_tables(p, (&t.queries, &t.keys));
                // SAFETY: as of the kernel in `keys`.
                unsafe { g.launch_dq(stream, d, (&p, t.keys.rows))? }
            }
        }
        let (own, other, num_own) = (t.queries.at, t.keys.at, t.queries.num);
        self.bias_and_sink(stream, d, TwAttn { own, other, num_own, ..*p })
    }

    pub(super) fn bias_and_sink(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: TwAttn,
    ) -> Result<()> {
        let Some((dbias, dsink)) = &self.kernels.backward.bias_and_sink else { return Ok(()) };
        if let (Some(b), true) = (d.bias, p.dbias != 0) {
            let elements = b.heads * b.sq * b.skv;
            run(stream, dbias, Grid::new(elements.div_ceil(256) as u32, 256), &p)?;
        }
        if d.sink && p.dsink != 0 {
            run(stream, dsink, Grid::new(p.heads_q, 256), &p)?;
        }
        Ok(())
    }
}

/// Tensors that a launch reads.
pub(crate) fn inputs(x: &AttnInputs) -> Vec<Tensor> {
    x.named().into_iter().filter_map(|(_, t)| t.cloned()).collect()
}

/// Tensors of a backward pass.
pub(crate) fn inputs_bwd(x: &AttnInputs, saved: &AttnSaved, grads: &AttnGrads) -> Vec<Tensor> {
    let mut held = inputs(x);
    held.extend([&saved.out, &saved.lse, &saved.d_out].map(Tensor::clone));
    held.extend([&grads.dq, &grads.dk, &grads.dv].map(Tensor::clone));
    held.extend(grads.dbias.iter().chain(&grads.dsink).cloned());
    held
}

/// The parameters of the kernels of a backward pass; `delta` is left open.
pub(crate) fn param_bwd(
    d: &AttentionDesc,
    x: &AttnInputs,
    rows: LocalRows,
    (saved, grads): (&AttnSaved, &AttnGrads),
) -> Result<TwAttn> {
    Ok(TwAttn {
        out: addr(&saved.out)?,
        lse: addr(&saved.lse)?,
        d_out: addr(&saved.d_out)?,
        dq: addr(&grads.dq)?,
        dk: addr(&grads.dk)?,
        dv: addr(&grads.dv)?,
        dbias: addr(grads.dbias.as_ref())?,
        dsink: addr(grads.dsink.as_ref())?,
        ..param(d, x, rows)?
    })
}

/// The parameters of all kernels of a launch.
pub(crate) fn param(d: &AttentionDesc, x: &AttnInputs, rows: LocalRows) -> Result<TwAttn> {
    let window =
        [d.mask.left, d.mask.right].map(|b| b.map_or(1 << 30, |b| bound(b).min(1 << 30)) as i32);
    let bias = d.bias.map_or([0; 3], |b| [b.heads, b.sq, b.skv].map(|n| n as u32));
    Ok(TwAttn {
        q: addr(&x.q.data)?,
        k: addr(&x.k.data)?,
        v: addr(&x.v.data)?,
        bias: addr(x.bias.as_ref())?,
        sink: addr(x.sink.as_ref())?,
        ld_q: (d.heads_q * d.dqk) as i64,
        ld_k: (d.heads_kv * d.dqk) as i64,
        ld_v: (d.heads_kv * d.dv) as i64,
        ld_o: (d.heads_q * d.dv) as i64,
        drop_seed: d.dropout.map_or(0, |x| x.seed),
        // 53 random bits are below p 2^53 exactly if the number that they stand for is below p.
        drop_below: d.dropout.map_or(0, |x| (x.p * (1u64 << 53) as f64).ceil() as u64),
        tokens_q: rows.q as u32,
        heads_q: d.heads_q as u32,
        heads_kv: d.heads_kv as u32,
        bias_heads: bias[0],
        bias_sq: bias[1],
        bias_skv: bias[2],
        left: window[0],
        right: window[1],
        scale: d.scale as f32,
        softcap: d.softcap.map_or(0.0, |c| c as f32),
        keep: d.dropout.map_or(1.0, |x| 1.0 / (1.0 - x.p)) as f32,
        out_type: code(d.out),
        ..TwAttn::zeroed()
    })
}

/// The kernels copy 16 bytes at a time; rows are multiples of that, so only beginnings can be
/// wrong.
pub(crate) fn aligned(d: &AttentionDesc, tensors: &[(&str, u64)]) -> Result<()> {
    match tensors.iter().find(|(_, at)| at % 16 != 0) {
        Some((what, _)) if variant(d, false).is_some() => {
            Err(Error::invalid(format!("`{what}` does not begin at a multiple of 16 bytes"))
                .hint("copy it to a tensor of its own"))
        }
        _ => Ok(()),
    }
}

fn launch(
    stream: &CudaStream,
    k: &Tiled,
    heads: u32,
    p: &TwAttn,
    (own, other): (&Side, &Side),
) -> Result<()> {
    let p = with_tables(p, (own, other));
    run(stream, &k.kernel, k.grid(p.tiles, heads), &p)
}

pub(super) fn with_tables(p: &TwAttn, (own, other): (&Side, &Side)) -> TwAttn {
    TwAttn { own: own.at, other: other.at, num_own: own.num, tiles: own.tiles, ..*p }
}

/// Queues a kernel of attention, unless there is nothing to do.
fn run(stream: &CudaStream, k: &Kernel, grid: Grid, p: &TwAttn) -> Result<()> {
    if grid.blocks.contains(&0) {
        return Ok(());
    }
    // SAFETY: the argument is the kernel's `TwAttn`. What it points to was checked against the
    // description (shapes, types, the same device) and is held by the stream (`held`).
    unsafe { k.launch(stream, grid, LaunchArgs::new().arg(p)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Sequences;
    use crate::attention::{AttnMask, BiasShape};

    #[test]
    fn what_no_kernel_can_count_is_refused() {
        let d = AttentionDesc::new(8, (4, 2), 64, DType::BF16, AttnMask::CAUSAL);
        assert_eq!(fitting_segs(&d, (2, 1)).unwrap(), 1026);
        let bad = |f: fn(&mut AttentionDesc)| {
            let mut d = d.clone();
            f(&mut d);
            fitting_segs(&d, (2, 1)).unwrap_err().to_string()
        };
        assert!(bad(|d| d.dqk = 264).contains("264"));
        assert!(bad(|d| d.sequences = Sequences::one(1 << 29, 8)).contains("2^29"));
        assert!(bad(|d| d.heads_q = 1 << 22).contains("attention"));
        // The kernels would take a row of it for 8 elements.
        const WIDE: BiasShape = BiasShape { heads: 1, sq: 8, skv: (1 << 32) + 8 };
        assert!(bad(|d| d.bias = Some(WIDE)).contains("bias"));
        let d = AttentionDesc { bias: Some(BiasShape { skv: 1 << 20, ..WIDE }), ..d };
        fitting_segs(&d, (2, 1)).unwrap();
    }
}
