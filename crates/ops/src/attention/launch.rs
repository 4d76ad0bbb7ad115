//! Tensors of one launch, their checks, and access to them as f32.

use tilewire_core::memory::filled_or_unwind;
use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::Tensor;

use super::desc::BLOCK;
use super::{AttentionDesc, AttnOffsets, Sequences};
use crate::common::{Named, apart, expect_tensor, wide};

/// One launch: its tensors, sequences and rows.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub x: &'a AttnInputs,
    pub seqs: &'a Sequences,
    pub rows: LocalRows,
}

/// q, k or v: a plain tensor, or e4m3 data with f32 scales as the description says
/// ([`HeadScales`](super::HeadScales)); `value = data * scale`.
#[derive(Clone, Debug)]
pub struct AttnOperand {
    /// The elements, `[tokens, H * d]` or `[tokens, H, d]`.
    pub data: Tensor,
    /// Scales of e4m3 data.
    pub scales: Option<Tensor>,
}

impl From<Tensor> for AttnOperand {
    fn from(data: Tensor) -> Self {
        Self { data, scales: None }
    }
}

impl From<&Tensor> for AttnOperand {
    fn from(data: &Tensor) -> Self {
        data.clone().into()
    }
}

impl AttnOperand {
    fn check(&self, what: &str, d: &AttentionDesc, dims: (usize, usize, usize)) -> Result<()> {
        let (dtype, scales) = (d.dtype, [d.scales.rows(dims.0), dims.1]);
        expect_packed(what, &self.data, dtype, dims)?;
        match &self.scales {
            Some(_) if !dtype.is_fp8() => {
                Err(Error::invalid(format!("`{what}` is {dtype} and has no scales")))
            }
            Some(s) => expect_tensor(&format!("{what} scales"), s, DType::F32, &scales),
            None if dtype.is_fp8() => {
                Err(Error::invalid(format!("`{what}` is {dtype} and needs its scales"))
                    .expected(format_args!("f32 {scales:?}")))
            }
            None => Ok(()),
        }
    }

    /// The values, `[tokens, heads, d]`, of codes that were checked.
    pub(crate) fn values(&self, d: usize) -> Result<Vec<f32>> {
        let mut v = self.data.to_f32()?;
        let Some(s) = &self.scales else { return Ok(v) };
        let ([rows, heads], s) = ([0, 1].map(|i| s.shape().dims()[i]), s.to_f32()?);
        // As checked: as many as tokens, or one for 128 of them.
        let tokens = if rows * heads * d == v.len() { 1 } else { BLOCK };
        for (i, x) in v.chunks_exact_mut(d).enumerate() {
            let scale = s[i / heads / tokens * heads + i % heads];
            x.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(v)
    }
}

/// Checks a packed tensor: `[tokens, heads * d]` or `[tokens, heads, d]`.
fn expect_packed(
    what: &str,
    t: &Tensor,
    dtype: DType,
    (tokens, heads, d): (usize, usize, usize),
) -> Result<()> {
    if t.shape() == Shape::d3(tokens, heads, d) && t.dtype() == dtype {
        return Ok(());
    }
    expect_tensor(what, t, dtype, &[tokens, heads * d])
}

/// Checks a tensor that is there if and only if the description says so.
fn expect_optional(what: &str, t: &Option<Tensor>, want: Option<&[usize]>) -> Result<()> {
    match (want, t) {
        (Some(shape), Some(t)) => {
            let flat = shape.iter().product::<usize>();
            match t.dtype() == DType::F32 && t.shape().num_elems() == flat {
                true => Ok(()),
                false => expect_tensor(what, t, DType::F32, shape),
            }
        }
        (None, None) => Ok(()),
        (Some(_), None) => Err(Error::invalid(format!("`{what}` is missing"))),
        (None, Some(_)) => {
            Err(Error::invalid(format!("`{what}` was given, but the description has none")))
        }
    }
}

/// Rows of the tensors on this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LocalRows {
    pub q: usize,
    pub kv: usize,
}

/// The tensors that a launch reads. In `cp_attention` the rows are those of this rank.
#[derive(Clone, Debug)]
pub struct AttnInputs {
    /// `[tokens_q, Hq, dqk]`.
    pub q: AttnOperand,
    /// `[tokens_kv, Hkv, dqk]`.
    pub k: AttnOperand,
    /// `[tokens_kv, Hkv, dv]`.
    pub v: AttnOperand,
    /// `[heads, sq, skv]` f32, equal on all ranks.
    pub bias: Option<Tensor>,
    /// `[Hq]` f32, equal on all ranks.
    pub sink: Option<Tensor>,
    /// Other (global) sequences than those of the description, of at most as many rows. By FP8
    /// products at most as many sequences, or 64.
    pub sequences: Option<Sequences>,
    /// The same by offsets that the launch reads when it runs, in place of `sequences`. The tensors
    /// have the rows that `q` and `k` have; in `cp_attention`, which takes offsets with
    /// `all_gather`, the rows that the description says.
    pub offsets: Option<AttnOffsets>,
}

impl AttnInputs {
    /// Inputs without bias and sink, and with the sequences of the description.
    pub fn new(
        q: impl Into<AttnOperand>,
        k: impl Into<AttnOperand>,
        v: impl Into<AttnOperand>,
    ) -> Self {
        let (q, k, v) = (q.into(), k.into(), v.into());
        Self { q, k, v, bias: None, sink: None, sequences: None, offsets: None }
    }

    pub(crate) fn check(&self, d: &AttentionDesc, rows: LocalRows) -> Result<()> {
        self.q.check("q", d, (rows.q, d.heads_q, d.dqk))?;
        self.k.check("k", d, (rows.kv, d.heads_kv, d.dqk))?;
        self.v.check("v", d, (rows.kv, d.heads_kv, d.dv))?;
        let bias = d.bias.map(|b| [b.heads, b.sq, b.skv]);
        expect_optional("bias", &self.bias, bias.as_ref().map(|b| &b[..]))?;
        expect_optional("sink", &self.sink, d.sink.then_some(&[d.heads_q]))
    }

    pub(crate) fn named(&self) -> [Named<'_>; 12] {
        let none = [("", None); 4];
        let [cu_q, cu_kv, at_q, at_kv] = self.offsets.as_ref().map_or(none, AttnOffsets::named);
        [
            ("q", Some(&self.q.data)),
            ("k", Some(&self.k.data)),
            ("v", Some(&self.v.data)),
            ("q scales", self.q.scales.as_ref()),
            ("k scales", self.k.scales.as_ref()),
            ("v scales", self.v.scales.as_ref()),
            ("bias", self.bias.as_ref()),
            ("sink", self.sink.as_ref()),
            cu_q,
            cu_kv,
            at_q,
            at_kv,
        ]
    }

    pub(crate) fn extra(&self) -> Result<Extra> {
        let get = |t: &Option<Tensor>| t.as_ref().map(Tensor::to_f32).transpose();
        Ok(Extra { bias: get(&self.bias)?.unwrap_or_default(), sink: get(&self.sink)? })
    }
}

/// Bias and sink as f32.
pub(crate) struct Extra {
    pub bias: Vec<f32>,
    pub sink: Option<Vec<f32>>,
}

/// The tensors that the forward pass writes.
#[derive(Clone, Debug)]
pub struct AttnOut {
    /// `[tokens_q, Hq, dv]`.
    pub out: Tensor,
    /// `[Hq, tokens_q]` f32, natural logarithm.
    pub lse: Tensor,
}

impl AttnOut {
    pub(crate) fn check(&self, d: &AttentionDesc, rows: LocalRows, x: &AttnInputs) -> Result<()> {
        self.check_shapes(d, rows)?;
        apart(&[("out", Some(&self.out)), ("lse", Some(&self.lse))], &x.named())
    }

    fn check_shapes(&self, d: &AttentionDesc, rows: LocalRows) -> Result<()> {
        expect_packed("out", &self.out, d.out, (rows.q, d.heads_q, d.dv))?;
        expect_tensor("lse", &self.lse, DType::F32, &[d.heads_q, rows.q])
    }

    pub(crate) fn poison(&self) {
        poison([Some(&self.out), Some(&self.lse)]);
    }
}

/// The tensors that the backward pass reads beside the inputs of the forward pass.
#[derive(Clone, Debug)]
pub struct AttnSaved {
    /// Output of the forward pass.
    pub out: Tensor,
    /// Log-sum-exp of the forward pass.
    pub lse: Tensor,
    /// Gradient of the output, of its shape and type.
    pub d_out: Tensor,
}

impl AttnSaved {
    fn check(&self, d: &AttentionDesc, rows: LocalRows) -> Result<()> {
        AttnOut { out: self.out.clone(), lse: self.lse.clone() }.check_shapes(d, rows)?;
        expect_packed("d_out", &self.d_out, d.out, (rows.q, d.heads_q, d.dv))
    }

    pub(crate) fn named(&self) -> [Named<'_>; 3] {
        [("out", &self.out), ("lse", &self.lse), ("d_out", &self.d_out)].map(|(w, t)| (w, Some(t)))
    }

    /// `delta = <d_out, out>`, `[Hq, rows]`.
    pub(crate) fn delta(&self, d: &AttentionDesc) -> Result<Vec<f32>> {
        let (hq, dv) = (d.heads_q, d.dv);
        self.out.read(|o| {
            self.d_out.read(|g| {
                let (o, g) = (wide(d.out, o), wide(d.out, g));
                let rows = o.len() / (hq * dv);
                let mut delta = filled_or_unwind(0.0, hq * rows);
                for (at, (o, g)) in o.chunks_exact(dv).zip(g.chunks_exact(dv)).enumerate() {
                    let sum = o.iter().zip(g).fold(0.0, |s, (o, g)| s + o * g);
                    delta[at % hq * rows + at / hq] = sum;
                }
                delta
            })
        })?
    }
}

/// The tensors that the backward pass writes.
///
/// `dbias` and `dsink` hold what the queries (or heads) of this rank contribute: add them over the
/// ranks, as the gradient of any replicated parameter.
#[derive(Clone, Debug)]
pub struct AttnGrads {
    /// Of q's shape, in the output type.
    pub dq: Tensor,
    /// Of k's shape, in the output type.
    pub dk: Tensor,
    /// Of v's shape, in the output type.
    pub dv: Tensor,
    /// Of the bias's shape, f32; may be left out.
    pub dbias: Option<Tensor>,
    /// `[Hq]` f32; may be left out.
    pub dsink: Option<Tensor>,
}

impl AttnGrads {
    /// Gradients of q, k and v only.
    pub fn new(dq: Tensor, dk: Tensor, dv: Tensor) -> Self {
        Self { dq, dk, dv, dbias: None, dsink: None }
    }

    pub(crate) fn check(
        &self,
        d: &AttentionDesc,
        rows: LocalRows,
        x: &AttnInputs,
        saved: &AttnSaved,
    ) -> Result<()> {
        saved.check(d, rows)?;
        expect_packed("dq", &self.dq, d.out, (rows.q, d.heads_q, d.dqk))?;
        expect_packed("dk", &self.dk, d.out, (rows.kv, d.heads_kv, d.dqk))?;
        expect_packed("dv", &self.dv, d.out, (rows.kv, d.heads_kv, d.dv))?;
        if self.dbias.is_some() {
            let bias = d.bias.map(|b| [b.heads, b.sq, b.skv]);
            expect_optional("dbias", &self.dbias, bias.as_ref().map(|b| &b[..]))?;
        }
        if self.dsink.is_some() {
            expect_optional("dsink", &self.dsink, d.sink.then_some(&[d.heads_q]))?;
        }
        let outs = self.named();
        apart(&outs, &x.named()).and_then(|()| apart(&outs, &saved.named()))
    }

    pub(crate) fn named(&self) -> [Named<'_>; 5] {
        [
            ("dq", Some(&self.dq)),
            ("dk", Some(&self.dk)),
            ("dv", Some(&self.dv)),
            ("dbias", self.dbias.as_ref()),
            ("dsink", self.dsink.as_ref()),
        ]
    }

    pub(crate) fn poison(&self) {
        let optional = [self.dbias.as_ref(), self.dsink.as_ref()];
        poison([Some(&self.dq), Some(&self.dk), Some(&self.dv)].into_iter().chain(optional));
    }
}

fn poison<'a>(outputs: impl IntoIterator<Item = Option<&'a Tensor>>) {
    for t in outputs.into_iter().flatten() {
        // Fails only while the caller touches the tensor: then there is nobody to protect.
        t.poison().ok();
    }
}
