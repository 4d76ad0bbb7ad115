//! The kernels of the works, and what queues them.

use bytemuck::Pod;
use tilewire_core::{Error, Result, Rng};
use tilewire_device::Tensor;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::{
    TwAdamW, TwEmbedBwd, TwHeads, TwInit, TwLoss, TwNorm, TwNormBwd, TwRouter, TwRouterBwd,
};
use tilewire_kernels::portable::{
    LAYERS, LAYERS_KEPT, LAYERS_THREADS, OPTIMIZER, layers_defines, optimizer_defines,
};

use super::sizes::{
    CLASS_BLOCKS, CLASSES, NORM_BLOCKS, ROUTER_BLOCKS, SHARED, SQUARE_BLOCKS, THREADS, WARPS,
    WorkspaceBytes, class_blocks, lanes, norm_bwd_shared, token_blocks, token_chunks, token_parts,
};
use crate::common::cuda::{addr, fit_32_bits, load, mantissa, no_kernel, workspace};
use crate::layers::desc::{
    AdamStep, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads, Init, LayersDesc, NormBwd,
    Router, RouterBwd, SquareSum,
};

/// Kernels and workspace.
pub(crate) struct Prepared {
    embed: Kernel,
    embed_count: Kernel,
    embed_place: Kernel,
    embed_bwd: Kernel,
    add_norm: Kernel,
    norm_bwd: Kernel,
    sum_rows: Kernel,
    heads: Kernel,
    router: Kernel,
    router_bwd: Kernel,
    cross_entropy: Kernel,
    square_sum: Kernel,
    square_total: Kernel,
    adamw: Kernel,
    count_step: Kernel,
    init: Kernel,
    /// Parts of sums over rows, f32.
    partial: CudaMemory,
    /// Parts of losses, f64.
    losses: CudaMemory,
    /// Parts of sums of squares, f64.
    squares: CudaMemory,
    /// Sums of the router over its blocks, 0 between launches.
    stats: CudaMemory,
    /// Counts of tokens by block, rows by token, and where each token's begin.
    counts: CudaMemory,
    order: CudaMemory,
    starts: CudaMemory,
    /// Tickets, 0 between launches: the loss', then those of tokens.
    tickets: CudaMemory,
    /// Blocks for works on elements.
    blocks: u32,
}

impl Prepared {
    pub fn new(ctx: &CudaContext, d: &LayersDesc) -> Result<Self> {
        fit_32_bits("layers", &[d.rows, d.cols, d.experts])?;
        let m = load(ctx, &LAYERS, layers_defines(mantissa(d.dtype)))?;
        let o = load(ctx, &OPTIMIZER, optimizer_defines(mantissa(d.dtype)))?;
        let (add_norm, norm_bwd) = (m.kernel("tw_add_norm")?, m.kernel("tw_norm_bwd")?);
        let asked = [(&add_norm, 4 * d.cols), (&norm_bwd, norm_bwd_shared(d.dtype, d.cols))];
        for (kernel, bytes) in asked {
            if bytes > SHARED {
                kernel.allow_shared(bytes as u32)?;
            }
        }
        if d.experts > CLASSES {
            return Err(no_kernel(
                format!("a router of {} experts", d.experts),
                "kernels take up to 512: run it on the host",
            ));
        }
        let bytes = WorkspaceBytes::new(d);
        Ok(Self {
            embed: m.kernel("tw_embed")?,
            embed_count: m.kernel("tw_embed_count")?,
            embed_place: m.kernel("tw_embed_place")?,
            embed_bwd: m.kernel("tw_embed_bwd")?,
            add_norm,
            norm_bwd,
            sum_rows: m.kernel("tw_sum_rows")?,
            heads: m.kernel("tw_heads")?,
            router: m.kernel("tw_router")?,
            router_bwd: m.kernel("tw_router_bwd")?,
            cross_entropy: m.kernel("tw_cross_entropy")?,
            square_sum: o.kernel("tw_square_sum")?,
            square_total: o.kernel("tw_square_total")?,
            adamw: o.kernel("tw_adamw")?,
            count_step: o.kernel("tw_count_step")?,
            init: o.kernel("tw_init")?,
            partial: workspace(ctx, bytes.partial)?,
            losses: workspace(ctx, bytes.losses)?,
            squares: workspace(ctx, bytes.squares)?,
            stats: workspace(ctx, bytes.stats)?,
            counts: workspace(ctx, bytes.counts)?,
            order: workspace(ctx, bytes.order)?,
            starts: workspace(ctx, bytes.starts)?,
            tickets: workspace(ctx, bytes.tickets)?,
            blocks: 8 * ctx.num_sms()?,
        })
    }
}

fn grid(blocks: usize) -> Grid {
    Grid::new(blocks as u32, LAYERS_THREADS as u32)
}

/// Rows and columns; both fit 32 bits, as the plan's do.
fn dims(t: &Tensor) -> (usize, usize) {
    (t.shape().dim(0), t.shape().dim(1))
}

/// Kernels move four elements at once.
fn quads(what: &str, cols: usize) -> Result<()> {
    if cols.is_multiple_of(4) {
        return Ok(());
    }
    Err(no_kernel(format!("{what} of {cols} elements"), "make it a multiple of 4"))
}

/// Kernels turn eight pairs at once.
fn whole_heads(dim: usize) -> Result<()> {
    if dim.is_multiple_of(16) {
        return Ok(());
    }
    Err(no_kernel(format!("heads of {dim} elements"), "make it a multiple of 16"))
}

/// The address of a tensor of which a kernel moves `num` elements at once, at most 16 bytes; 0 of
/// none.
fn whole<'a>(what: &str, t: impl Into<Option<&'a Tensor>>, num: usize) -> Result<u64> {
    let Some(t) = t.into() else { return Ok(0) };
    let (at, unit) = (addr(t)?, (num * t.dtype().size()).min(16));
    if at.is_multiple_of(unit as u64) {
        return Ok(at);
    }
    Err(Error::invalid(format!("`{what}` does not begin at a multiple of {unit} bytes"))
        .hint("copy it to a tensor of its own, or take other rows"))
}

/// A prepared plan and a stream of its device.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct On<'a> {
    pub(crate) kernels: &'a Prepared,
    pub(crate) stream: &'a CudaStream,
}

/// Every kernel takes what its struct or its arguments say, in that order. The tensors were checked
/// against the plan's description, lie on this device, and are held by the stream; the workspace is
/// large enough for the plan's sizes. That the caller orders other work on the tensors behind this
/// stream is what every launch asks for.
impl On<'_> {
    fn one(&self, kernel: &Kernel, grid: Grid, param: &impl Pod) -> Result<()> {
        // SAFETY: see the block's comment; `param` is the kernel's one parameter.
        unsafe { kernel.launch(self.stream, grid, LaunchArgs::new().arg(param)) }
    }

    pub fn embed(&self, a: &Embed) -> Result<()> {
        let (n, d) = dims(&a.x);
        quads("rows", d)?;
        if n == 0 {
            return Ok(());
        }
        let (tokens, table, x, d) =
            (addr(&a.tokens)?, whole("table", &a.table, 4)?, whole("x", &a.x, 4)?, d as u32);
        let args = LaunchArgs::new().arg(&tokens).arg(&table).arg(&x).arg(&d);
        // SAFETY: see the block's comment: (const u8*, const Bits*, float*, u32), a block a row.
        unsafe { self.kernels.embed.launch(self.stream, grid(n), args) }
    }

    pub fn embed_bwd(&self, a: &EmbedBwd) -> Result<()> {
        let (n, d) = dims(&a.dx);
        quads("rows", d)?;
        if d == 0 {
            return Ok(());
        }
        let p = TwEmbedBwd {
            tokens: addr(&a.tokens)?,
            dx: whole("dx", &a.dx, 4)?,
            grad: whole("grad", &a.grad, 4)?,
            partial: self.kernels.partial.addr(),
            counts: self.kernels.counts.addr(),
            order: self.kernels.order.addr(),
            starts: self.kernels.starts.addr(),
            tickets: self.kernels.tickets.addr() + 4,
            n: n as u32,
            d: d as u32,
        };
        let sorters = grid(token_blocks(n));
        self.one(&self.kernels.embed_count, sorters, &p)?;
        self.one(&self.kernels.embed_place, sorters, &p)?;
        self.one(&self.kernels.embed_bwd, grid(token_chunks(n) * token_parts(d)), &p)
    }

    pub fn add_norm(&self, a: &AddNorm) -> Result<()> {
        let (n, d) = dims(&a.x);
        quads("rows", d)?;
        if n == 0 {
            return Ok(());
        }
        let (y, sum) = a.add.as_ref().map(|(y, sum)| (y, sum)).unzip();
        let p = TwNorm {
            x: whole("x", &a.x, 4)?,
            y: whole("y", y, 4)?,
            w: whole("w", &a.w, 4)?,
            sum: whole("sum", sum, 4)?,
            out: whole("out", &a.out, 4)?,
            d: d as u32,
            pad: 0,
        };
        self.one(&self.kernels.add_norm, grid(n).shared(4 * d as u32), &p)
    }

    pub fn norm_bwd(&self, a: &NormBwd) -> Result<()> {
        let (n, d) = dims(&a.x);
        quads("rows", d)?;
        let shared = norm_bwd_shared(a.dy.dtype(), d);
        let blocks = n.clamp(1, NORM_BLOCKS);
        let p = TwNormBwd {
            x: whole("x", &a.x, 4)?,
            w: whole("w", &a.w, 4)?,
            dy: whole("dy", &a.dy, 4)?,
            residual: whole("residual", a.residual.as_ref(), 4)?,
            dx: whole("dx", &a.dx, 4)?,
            narrow: whole("narrow", a.narrow.as_ref(), 4)?,
            partial: self.kernels.partial.addr(),
            n: n as u32,
            d: d as u32,
        };
        self.one(&self.kernels.norm_bwd, grid(blocks).shared(shared as u32), &p)?;
        self.sum_rows(blocks, d, addr(&a.dw)?)
    }

    /// `out[c]` = the sum of the first `rows` rows of the workspace.
    fn sum_rows(&self, rows: usize, cols: usize, out: u64) -> Result<()> {
        let (from, rows, blocks) = (self.kernels.partial.addr(), rows as u32, cols.div_ceil(32));
        let cols = cols as u32;
        let args = LaunchArgs::new().arg(&from).arg(&out).arg(&rows).arg(&cols);
        // SAFETY: see the block's comment: (const float*, float*, u32, u32).
        unsafe { self.kernels.sum_rows.launch(self.stream, grid(blocks), args) }
    }

    pub fn heads(&self, a: &Heads) -> Result<()> {
        let (heads, kv, dim) = a.sizes()?;
        let n = dims(&a.rows).0;
        whole_heads(dim)?;
        if n == 0 {
            return Ok(());
        }
        let p = TwHeads {
            rows: whole("rows", &a.rows, 8)?,
            q: whole("q", &a.q, 8)?,
            k: whole("k", &a.k, 8)?,
            v: whole("v", &a.v, 8)?,
            positions: addr(&a.positions)?,
            table: whole("table", &a.table, 4)?,
            heads: heads as u32,
            kv_heads: kv as u32,
            dim: dim as u32,
            join: u32::from(a.join),
        };
        self.one(&self.kernels.heads, grid(n), &p)
    }

    pub fn router(&self, a: &Router) -> Result<()> {
        let ((n, e), (_, k)) = (dims(&a.logits), dims(&a.topk));
        let p = TwRouter {
            logits: addr(&a.logits)?,
            probs: addr(&a.probs)?,
            topk: addr(&a.topk)?,
            weights: addr(&a.weights)?,
            sums: self.kernels.stats.addr(),
            stats: addr(&a.stats)?,
            n: n as u32,
            experts: e as u32,
            k: k as u32,
            lanes: lanes(e) as u32,
        };
        let shared = 4 * (1 + WARPS) * e;
        self.one(
            &self.kernels.router,
            grid(class_blocks(n, e, ROUTER_BLOCKS)).shared(shared as u32),
            &p,
        )
    }

    pub fn router_bwd(&self, a: &RouterBwd) -> Result<()> {
        let ((n, e), (_, k)) = (dims(&a.probs), dims(&a.topk));
        if n == 0 {
            return Ok(());
        }
        let p = TwRouterBwd {
            probs: addr(&a.probs)?,
            topk: addr(&a.topk)?,
            weights: addr(&a.weights)?,
            d_weights: addr(a.d_weights.as_ref())?,
            load: addr(&a.load)?,
            d_logits: addr(&a.d_logits)?,
            scale: a.scale,
            n: n as u32,
            experts: e as u32,
            k: k as u32,
            lanes: lanes(e) as u32,
            pad: 0,
        };
        let shared = 4 * LAYERS_KEPT as u32 * p.lanes;
        self.one(
            &self.kernels.router_bwd,
            grid(class_blocks(n, e, CLASS_BLOCKS)).shared(shared),
            &p,
        )
    }

    pub fn cross_entropy(&self, a: &CrossEntropy) -> Result<()> {
        let (n, cols) = dims(&a.logits);
        if cols > CLASSES {
            return Err(no_kernel(format!("a loss over {cols} classes"), "run it on the host"));
        }
        let p = TwLoss {
            logits: addr(&a.logits)?,
            targets: addr(&a.targets)?,
            d_logits: addr(&a.d_logits)?,
            loss: addr(&a.loss)?,
            partial: self.kernels.losses.addr(),
            ticket: self.kernels.tickets.addr(),
            scale: a.scale,
            n: n as u32,
            cols: cols as u32,
            lanes: lanes(cols) as u32,
            pad: 0,
        };
        self.one(&self.kernels.cross_entropy, grid(class_blocks(n, cols, CLASS_BLOCKS)), &p)
    }

    pub fn square_sum(&self, a: &SquareSum) -> Result<()> {
        let at = |i: usize| self.kernels.squares.addr() + (8 * i * SQUARE_BLOCKS) as u64;
        for (i, t) in a.of.iter().enumerate() {
            let (g, partial, n) = (whole("of", t, 4)?, at(i), t.shape().num_elems() as u64);
            let args = LaunchArgs::new().arg(&g).arg(&partial).arg(&n);
            // SAFETY: see the block's comment: (const float*, double*, u64).
            unsafe { self.kernels.square_sum.launch(self.stream, grid(SQUARE_BLOCKS), args)? };
        }
        let (from, out, n) = (at(0), addr(&a.out)?, (a.of.len() * SQUARE_BLOCKS) as u32);
        let args = LaunchArgs::new().arg(&from).arg(&out).arg(&n);
        // SAFETY: see the block's comment: (const double*, float*, u32).
        unsafe { self.kernels.square_total.launch(self.stream, grid(1), args) }
    }

    /// Blocks for `n` elements, each thread with at least one.
    fn elements(&self, n: usize) -> Grid {
        Grid::new((n.div_ceil(THREADS).max(1) as u32).min(self.kernels.blocks), THREADS as u32)
    }

    pub fn adam_step(&self, a: &AdamStep) -> Result<()> {
        let n = a.w.shape().num_elems();
        let p = TwAdamW {
            w: addr(&a.w)?,
            master: addr(a.master.as_ref())?,
            g: addr(&a.g)?,
            m: addr(&a.m)?,
            v: addr(&a.v)?,
            small: addr(&a.small)?,
            count: addr(&a.count)?,
            n: n as u64,
            lr: a.cfg.lr,
            beta1: a.cfg.beta1,
            beta2: a.cfg.beta2,
            eps: a.cfg.eps,
            decay: if a.decay { a.cfg.weight_decay } else { 0.0 },
            clip: a.cfg.clip,
            warmup: a.cfg.warmup as u64,
            total: a.cfg.total as u64,
        };
        self.one(&self.kernels.adamw, self.elements(n), &p)
    }

    pub fn count_step(&self, a: &CountStep) -> Result<()> {
        let (small, count) = (addr(&a.small)?, addr(&a.count)?);
        let args = LaunchArgs::new().arg(&small).arg(&count);
        // SAFETY: see the block's comment: (const float*, int*), one thread.
        unsafe { self.kernels.count_step.launch(self.stream, Grid::new(1, 1), args) }
    }

    pub fn init(&self, a: &Init) -> Result<()> {
        let (rows, cols) = dims(&a.w);
        let p = TwInit {
            w: addr(&a.w)?,
            master: addr(a.master.as_ref())?,
            n: (rows * cols) as u64,
            cols: cols.max(1) as u64,
            row0: a.origin.0 as u64,
            col0: a.origin.1 as u64,
            global_cols: a.global_cols as u64,
            seed: Rng::new(a.seed).key(),
            std: a.std,
        };
        self.one(&self.kernels.init, self.elements(rows * cols), &p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_does_is_said_with_a_way_out() {
        let e = quads("rows", 6).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        quads("rows", 8).unwrap();
        for dim in [2, 8, 18, 24, 34, 72] {
            let e = whole_heads(dim).unwrap_err();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
        [16, 32, 48, 128].into_iter().try_for_each(whole_heads).unwrap();
    }
}
