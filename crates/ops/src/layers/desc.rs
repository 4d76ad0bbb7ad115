//! The descriptions of the layer works, and the checks of their tensors.

use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;

use super::AdamW;
use crate::common::{Named, expect_tensor};

/// The largest sizes of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayersDesc {
    /// Type T of activations and weights: f32 or bf16.
    pub dtype: DType,
    /// The most rows of a work.
    pub rows: usize,
    /// The most elements of a row of the residual stream.
    pub cols: usize,
    /// The most experts.
    pub experts: usize,
}

impl LayersDesc {
    /// Checks the combination.
    ///
    /// # Errors
    /// `InvalidArgument` for another type, or sizes of zero.
    pub fn check(&self) -> Result<()> {
        if !matches!(self.dtype, DType::F32 | DType::BF16) {
            let e = Error::invalid("layers support f32 and bf16 only")
                .expected("f32 or bf16")
                .seen(self.dtype);
            return Err(e);
        }
        if self.cols == 0 || self.experts == 0 {
            return Err(Error::invalid("the columns and experts of the layers must be positive"));
        }
        Ok(())
    }

    /// Checks sizes of a work against the plan's.
    fn holds(&self, rows: usize, cols: usize, experts: usize) -> Result<()> {
        if rows <= self.rows && cols <= self.cols && experts <= self.experts {
            return Ok(());
        }
        Err(Error::invalid("a launch is larger than the plan")
            .expected(format_args!(
                "at most {} rows, {} columns, {} experts",
                self.rows, self.cols, self.experts
            ))
            .seen(format_args!("{rows}, {cols}, {experts}")))
    }
}

/// Rows and columns of a matrix.
fn dims(what: &str, t: &Tensor) -> Result<(usize, usize)> {
    match *t.shape().dims() {
        [rows, cols] => Ok((rows, cols)),
        _ => Err(Error::invalid(format!("`{what}` must be a matrix")).seen(t.shape())),
    }
}

/// Checks that `t` has at least `len` elements of `dtype`.
fn at_least(what: &str, t: &Tensor, dtype: DType, len: usize) -> Result<()> {
    if t.dtype() == dtype && t.shape().num_elems() >= len {
        return Ok(());
    }
    Err(Error::invalid(format!("`{what}` is too short or has the wrong dtype"))
        .expected(format_args!("at least {len} x {dtype}"))
        .seen(format_args!("{} {}", t.dtype(), t.shape())))
}

type Checked<'a> = Result<Vec<Named<'a>>>;

/// `x[r] = table[tokens[r]]`.
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[n]` u8.
    pub tokens: Tensor,
    /// `[256, d]` T.
    pub table: Tensor,
    /// `[n, d]` f32.
    pub x: Tensor,
}

impl Embed {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (n, d) = dims("x", &self.x)?;
        p.holds(n, d, 0)?;
        expect_tensor("x", &self.x, DType::F32, &[n, d])?;
        expect_tensor("tokens", &self.tokens, DType::U8, &[n])?;
        expect_tensor("table", &self.table, p.dtype, &[256, d])?;
        Ok(vec![("tokens", Some(&self.tokens)), ("table", Some(&self.table)), ("x", Some(&self.x))])
    }
}

/// `grad[v]` = the sum of `dx[r]` over the rows of token v.
#[derive(Clone, Debug)]
pub struct EmbedBwd {
    /// `[n]` u8.
    pub tokens: Tensor,
    /// `[n, d]` f32.
    pub dx: Tensor,
    /// `[256, d]` f32: all of it is written.
    pub grad: Tensor,
}

impl EmbedBwd {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (n, d) = dims("dx", &self.dx)?;
        p.holds(n, d, 0)?;
        expect_tensor("dx", &self.dx, DType::F32, &[n, d])?;
        expect_tensor("tokens", &self.tokens, DType::U8, &[n])?;
        expect_tensor("grad", &self.grad, DType::F32, &[256, d])?;
        let (t, dx, g) = (Some(&self.tokens), Some(&self.dx), Some(&self.grad));
        Ok(vec![("tokens", t), ("dx", dx), ("grad", g)])
    }
}

/// `sum = x + y` and `out = sum * w / rms(sum)`, row by row.
#[derive(Clone, Debug)]
pub struct AddNorm {
    /// `[n, d]` f32.
    pub x: Tensor,
    /// The addend, `[n, d]` T, and the sum, `[n, d]` f32; none for the norm of `x` itself.
    pub add: Option<(Tensor, Tensor)>,
    /// `[1, d]` T.
    pub w: Tensor,
    /// `[n, d]` T.
    pub out: Tensor,
}

impl AddNorm {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (n, d) = dims("x", &self.x)?;
        p.holds(n, d, 0)?;
        expect_tensor("x", &self.x, DType::F32, &[n, d])?;
        expect_tensor("w", &self.w, p.dtype, &[1, d])?;
        expect_tensor("out", &self.out, p.dtype, &[n, d])?;
        let (y, sum) = self.add.as_ref().map(|(y, sum)| (y, sum)).unzip();
        if let (Some(y), Some(sum)) = (y, sum) {
            expect_tensor("y", y, p.dtype, &[n, d])?;
            expect_tensor("sum", sum, DType::F32, &[n, d])?;
        }
        let (x, w, out) = (Some(&self.x), Some(&self.w), Some(&self.out));
        Ok(vec![("x", x), ("y", y), ("sum", sum), ("w", w), ("out", out)])
    }
}

/// The gradient of the norm of `x`, plus what goes past it.
#[derive(Clone, Debug)]
pub struct NormBwd {
    /// The input of the norm, `[n, d]` f32.
    pub x: Tensor,
    /// `[1, d]` T.
    pub w: Tensor,
    /// Gradient of the norm's output, `[n, d]` T.
    pub dy: Tensor,
    /// Gradient of `x` from elsewhere, `[n, d]` f32.
    pub residual: Option<Tensor>,
    /// `[n, d]` f32.
    pub dx: Tensor,
    /// `dx` once more, `[n, d]` T.
    pub narrow: Option<Tensor>,
    /// Gradient of `w`, `[1, d]` f32: written, not added to.
    pub dw: Tensor,
}

impl NormBwd {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (n, d) = dims("x", &self.x)?;
        p.holds(n, d, 0)?;
        let wide = [("x", Some(&self.x)), ("residual", self.residual.as_ref())];
        for (what, t) in wide.into_iter().chain([("dx", Some(&self.dx))]) {
            t.map_or(Ok(()), |t| expect_tensor(what, t, DType::F32, &[n, d]))?;
        }
        for (what, t) in [("dy", Some(&self.dy)), ("narrow", self.narrow.as_ref())] {
            t.map_or(Ok(()), |t| expect_tensor(what, t, p.dtype, &[n, d]))?;
        }
        expect_tensor("w", &self.w, p.dtype, &[1, d])?;
        expect_tensor("dw", &self.dw, DType::F32, &[1, d])?;
        Ok(vec![
            ("x", Some(&self.x)),
            ("w", Some(&self.w)),
            ("dy", Some(&self.dy)),
            ("residual", self.residual.as_ref()),
            ("dx", Some(&self.dx)),
            ("narrow", self.narrow.as_ref()),
            ("dw", Some(&self.dw)),
        ])
    }
}

/// Rows `[q | k | v]` taken apart, queries and keys turned by their position; or joined, with that
/// undone (which is the gradient).
#[derive(Clone, Debug)]
pub struct Heads {
    /// `[n, (heads + 2 kv_heads) * dim]` T.
    pub rows: Tensor,
    /// `[n, heads * dim]` T.
    pub q: Tensor,
    /// `[n, kv_heads * dim]` T.
    pub k: Tensor,
    /// `[n, kv_heads * dim]` T.
    pub v: Tensor,
    /// `[n]` i32.
    pub positions: Tensor,
    /// `[positions, dim]` f32: [`super::math::rope_table`].
    pub table: Tensor,
    /// From q, k, v to rows.
    pub join: bool,
}

impl Heads {
    /// Query heads, key and value heads, elements of a head.
    pub(super) fn sizes(&self) -> Result<(usize, usize, usize)> {
        let (_, dim) = dims("table", &self.table)?;
        let ((_, q), (_, kv)) = (dims("q", &self.q)?, dims("k", &self.k)?);
        if dim == 0 || dim % 2 != 0 || q % dim != 0 || kv % dim != 0 {
            return Err(Error::invalid(
                "rotary tables must have an even dim of which `q` and `k` are multiples",
            ));
        }
        Ok((q / dim, kv / dim, dim))
    }

    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (heads, kv, dim) = self.sizes()?;
        let n = dims("rows", &self.rows)?.0;
        p.holds(n, 0, 0)?;
        expect_tensor("rows", &self.rows, p.dtype, &[n, (heads + 2 * kv) * dim])?;
        expect_tensor("q", &self.q, p.dtype, &[n, heads * dim])?;
        expect_tensor("k", &self.k, p.dtype, &[n, kv * dim])?;
        expect_tensor("v", &self.v, p.dtype, &[n, kv * dim])?;
        expect_tensor("positions", &self.positions, DType::I32, &[n])?;
        expect_tensor("table", &self.table, DType::F32, self.table.shape().dims())?;
        let all = [&self.rows, &self.q, &self.k, &self.v, &self.positions, &self.table].map(Some);
        Ok(["rows", "q", "k", "v", "positions", "table"].into_iter().zip(all).collect())
    }
}

/// Probabilities of experts, the k most likely (ties to the lower), and their probabilities scaled
/// to sum to one.
#[derive(Clone, Debug)]
pub struct Router {
    /// `[n, experts]` f32.
    pub logits: Tensor,
    /// `[n, experts]` f32.
    pub probs: Tensor,
    /// `[n, k]` i64.
    pub topk: Tensor,
    /// `[n, k]` f32.
    pub weights: Tensor,
    /// f32, at least `2 * experts`: how often each was chosen, then sums of probabilities.
    pub stats: Tensor,
}

impl Router {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let ((n, e), (_, k)) = (dims("logits", &self.logits)?, dims("topk", &self.topk)?);
        p.holds(n, 0, e)?;
        if k > e {
            return Err(Error::invalid("a token has more choices than there are experts")
                .expected(e)
                .seen(k));
        }
        expect_tensor("logits", &self.logits, DType::F32, &[n, e])?;
        expect_tensor("probs", &self.probs, DType::F32, &[n, e])?;
        expect_tensor("topk", &self.topk, DType::I64, &[n, k])?;
        expect_tensor("weights", &self.weights, DType::F32, &[n, k])?;
        at_least("stats", &self.stats, DType::F32, 2 * e)?;
        let all = [&self.logits, &self.probs, &self.topk, &self.weights, &self.stats].map(Some);
        Ok(["logits", "probs", "topk", "weights", "stats"].into_iter().zip(all).collect())
    }
}

/// Gradient of the router's logits.
#[derive(Clone, Debug)]
pub struct RouterBwd {
    /// As [`Router`] left it, `[n, experts]` f32.
    pub probs: Tensor,
    /// `[n, k]` i64.
    pub topk: Tensor,
    /// `[n, k]` f32.
    pub weights: Tensor,
    /// Gradient of the weights, `[n, k]` f32.
    pub d_weights: Option<Tensor>,
    /// f32, at least `experts`: how often each was chosen, by all ranks.
    pub load: Tensor,
    /// `scale * load[e]` is the gradient of every probability of expert e by the balancing loss.
    pub scale: f32,
    /// `[n, experts]` T.
    pub d_logits: Tensor,
}

impl RouterBwd {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let ((n, e), (_, k)) = (dims("probs", &self.probs)?, dims("topk", &self.topk)?);
        p.holds(n, 0, e)?;
        expect_tensor("probs", &self.probs, DType::F32, &[n, e])?;
        expect_tensor("topk", &self.topk, DType::I64, &[n, k])?;
        expect_tensor("weights", &self.weights, DType::F32, &[n, k])?;
        if let Some(d) = &self.d_weights {
            expect_tensor("d_weights", d, DType::F32, &[n, k])?;
        }
        at_least("load", &self.load, DType::F32, e)?;
        expect_tensor("d_logits", &self.d_logits, p.dtype, &[n, e])?;
        Ok(vec![
            ("probs", Some(&self.probs)),
            ("topk", Some(&self.topk)),
            ("weights", Some(&self.weights)),
            ("d_weights", self.d_weights.as_ref()),
            ("load", Some(&self.load)),
            ("d_logits", Some(&self.d_logits)),
        ])
    }
}

/// `scale` times the sum of the rows' cross-entropies, and its gradient.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// `[n, cols]` f32.
    pub logits: Tensor,
    /// `[n]` i32; rows with a negative target do not count.
    pub targets: Tensor,
    /// Of loss and gradient.
    pub scale: f64,
    /// `[n, cols]` T.
    pub d_logits: Tensor,
    /// f32, at least one: the first becomes the loss.
    pub loss: Tensor,
}

impl CrossEntropy {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (n, c) = dims("logits", &self.logits)?;
        p.holds(n, 0, 0)?;
        expect_tensor("logits", &self.logits, DType::F32, &[n, c])?;
        expect_tensor("targets", &self.targets, DType::I32, &[n])?;
        expect_tensor("d_logits", &self.d_logits, p.dtype, &[n, c])?;
        at_least("loss", &self.loss, DType::F32, 1)?;
        let all = [&self.logits, &self.targets, &self.d_logits, &self.loss].map(Some);
        Ok(["logits", "targets", "d_logits", "loss"].into_iter().zip(all).collect())
    }
}

/// The sum of the squares of all elements of up to four tensors, as two floats whose sum it is.
#[derive(Clone, Debug)]
pub struct SquareSum {
    /// f32.
    pub of: Vec<Tensor>,
    /// f32, at least two: the first two are written.
    pub out: Tensor,
}

/// The most tensors of a [`SquareSum`].
pub(super) const SQUARES: usize = 4;

impl SquareSum {
    pub(super) fn checked(&self, _: &LayersDesc) -> Checked<'_> {
        if self.of.len() > SQUARES {
            return Err(Error::invalid("the sum of squares has too many tensors")
                .expected(SQUARES)
                .seen(self.of.len()));
        }
        at_least("out", &self.out, DType::F32, 2)?;
        for t in &self.of {
            at_least("of", t, DType::F32, 0)?;
        }
        Ok(self.of.iter().map(|t| ("of", Some(t))).chain([("out", Some(&self.out))]).collect())
    }
}

/// One step of AdamW on a parameter, unless [`AdamStep::small`] forbids it.
#[derive(Clone, Debug)]
pub struct AdamStep {
    /// Hyperparameters.
    pub cfg: AdamW,
    /// Decay the weights.
    pub decay: bool,
    /// T, of any shape; its own master if it is f32.
    pub w: Tensor,
    /// The weights in f32, if T is another type.
    pub master: Option<Tensor>,
    /// Gradient, summed over ranks: f32, as many.
    pub g: Tensor,
    /// First moment.
    pub m: Tensor,
    /// Second moment.
    pub v: Tensor,
    /// f32, at least four: the loss, (as two floats) the square of the gradient's norm, and a
    /// number that is finite if every rank has its sums, summed over all ranks. Where one is not
    /// finite, no step is taken.
    pub small: Tensor,
    /// `[1]` i32: steps taken before.
    pub count: Tensor,
}

impl AdamStep {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let len = self.w.shape().num_elems();
        at_least("w", &self.w, p.dtype, len)?;
        if self.master.is_some() == (p.dtype == DType::F32) {
            return Err(Error::invalid(
                "a master must be given if and only if the weights are not f32",
            ));
        }
        let wide = [("master", self.master.as_ref()), ("g", Some(&self.g))];
        for (what, t) in wide.into_iter().chain([("m", Some(&self.m)), ("v", Some(&self.v))]) {
            t.map_or(Ok(()), |t| at_least(what, t, DType::F32, len))?;
        }
        at_least("small", &self.small, DType::F32, 4)?;
        expect_tensor("count", &self.count, DType::I32, &[1])?;
        Ok(vec![
            ("w", Some(&self.w)),
            ("master", self.master.as_ref()),
            ("g", Some(&self.g)),
            ("m", Some(&self.m)),
            ("v", Some(&self.v)),
            ("small", Some(&self.small)),
            ("count", Some(&self.count)),
        ])
    }
}

/// Counts the step, if it is taken; behind its last [`AdamStep`].
#[derive(Clone, Debug)]
pub struct CountStep {
    /// As in [`AdamStep`].
    pub small: Tensor,
    /// As in [`AdamStep`].
    pub count: Tensor,
}

impl CountStep {
    pub(super) fn checked(&self, _: &LayersDesc) -> Checked<'_> {
        at_least("small", &self.small, DType::F32, 4)?;
        expect_tensor("count", &self.count, DType::I32, &[1])?;
        Ok(vec![("small", Some(&self.small)), ("count", Some(&self.count))])
    }
}

/// First values of a piece of a parameter: normal numbers that depend on seed and global position
/// alone, or ones. On the host to the bit what they always were, on a device up to rounding.
#[derive(Clone, Debug)]
pub struct Init {
    /// T, `[rows, cols]`.
    pub w: Tensor,
    /// f32, as many, if T is another type.
    pub master: Option<Tensor>,
    /// Row and column of the piece's first element in the parameter.
    pub origin: (usize, usize),
    /// Columns of the parameter.
    pub global_cols: usize,
    /// Seed of the parameter.
    pub seed: u64,
    /// Standard deviation; 0 for ones.
    pub std: f64,
}

impl Init {
    pub(super) fn checked(&self, p: &LayersDesc) -> Checked<'_> {
        let (rows, cols) = dims("w", &self.w)?;
        expect_tensor("w", &self.w, p.dtype, &[rows, cols])?;
        if let Some(m) = &self.master {
            at_least("master", m, DType::F32, rows * cols)?;
        }
        Ok(vec![("w", Some(&self.w)), ("master", self.master.as_ref())])
    }
}
