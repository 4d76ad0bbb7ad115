//! The specification of a call site, as the text that the Python package gives it.
//!
//! The text is an attribute of the call, so it is equal in all processes and lives in the compiled
//! program, also in one that comes from a cache. Descriptions are made of it by the functions that
//! the operations of torch use.

use serde::Deserialize;
use tilewire::core::ScaleLayout;
use tilewire::ops::ag_gemm::AgGemmDesc;
use tilewire::ops::attention::{AttentionDesc, Sequences};
use tilewire::ops::collective::CollectiveDesc;
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::cp_attention::{CpAttentionDesc, CpConfig};
use tilewire::ops::ep::{EpDesc, EpHandle};
use tilewire::ops::gemm_ar::GemmArDesc;
use tilewire::ops::gemm_rs::GemmRsDesc;
use tilewire::ops::grouped_gemm::GroupedDesc;
use tilewire::ops::permute::PermuteDesc;
use tilewire::ops::quant::{DequantDesc, QuantDesc, Scope};
use tilewire::prelude::*;

use crate::ops::attention::{Forms, Order, Spec as Attention};
use crate::ops::collective::{Move, reduction, rows_of};
use crate::ops::ep::EpSpec;
use crate::ops::overlap::{AgParams, SumParams};
use crate::ops::{Form, grouped, quant};

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    AllGather,
    ReduceScatter,
    AllReduce,
    AllToAll,
    AgGemm,
    GemmRs,
    GemmAr,
    GroupedFprop,
    GroupedDgrad,
    GroupedWgrad,
    Attention,
    AttentionBwd,
    CpAttention,
    CpAttentionBwd,
    EpDispatch,
    EpCombine,
    EpDispatchBwd,
    EpCombineBwd,
    Permute,
    PermuteBwd,
    Unpermute,
    UnpermuteBwd,
    Quantize,
    Dequantize,
}

impl Op {
    pub fn name(self) -> &'static str {
        match self {
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllReduce => "all_reduce",
            Op::AllToAll => "all_to_all",
            Op::AgGemm => "ag_gemm",
            Op::GemmRs => "gemm_rs",
            Op::GemmAr => "gemm_ar",
            Op::GroupedFprop => "grouped_gemm",
            Op::GroupedDgrad => "grouped_gemm_dgrad",
            Op::GroupedWgrad => "grouped_gemm_wgrad",
            Op::Attention => "attention",
            Op::AttentionBwd => "attention_bwd",
            Op::CpAttention => "cp_attention",
            Op::CpAttentionBwd => "cp_attention_bwd",
            Op::EpDispatch => "ep_dispatch",
            Op::EpCombine => "ep_combine",
            Op::EpDispatchBwd => "ep_dispatch_bwd",
            Op::EpCombineBwd => "ep_combine_bwd",
            Op::Permute => "permute",
            Op::PermuteBwd => "permute_bwd",
            Op::Unpermute => "unpermute",
            Op::UnpermuteBwd => "unpermute_bwd",
            Op::Quantize => "quantize",
            Op::Dequantize => "dequantize",
        }
    }
}

/// An operand or a result.
#[derive(Deserialize, Clone, Debug)]
pub struct Operand {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
}

/// Parameters of the operations; each uses its own.
#[derive(Deserialize, Clone, Default, Debug)]
#[serde(default)]
pub struct Params {
    pub act: Option<String>,
    pub rows: Option<Vec<usize>>,
    pub kn: bool,
    pub algo: Option<String>,
    pub wire: Option<String>,
    pub reduce: Option<String>,
    pub splits: Option<Vec<Vec<usize>>>,
    pub grad: bool,
    /// Number of an EP buffer among those of its group.
    pub buffer: u64,
    pub num_experts: usize,
    pub capacity: usize,
    pub align: usize,
    pub recipe: String,
    /// Of the weights of a grouped product, if they are of FP8.
    pub recipes: Vec<String>,
    pub pow2_scales: bool,
}

#[derive(Deserialize, Clone, Debug)]
pub struct Spec {
    pub op: Op,
    /// Number of the world; of an operation that needs none, that of the program around it, or 0.
    pub world: u64,
    /// Number of the call in its program, given when it is lowered; equal in all processes.
    pub site: u64,
    pub axes: Vec<String>,
    pub args: Vec<Operand>,
    pub rets: Vec<Operand>,
    #[serde(default)]
    pub params: Params,
    #[serde(default)]
    pub attention: Option<Attention>,
    #[serde(default)]
    pub ep: Option<EpSpec>,
}

/// The operation to plan, and the arguments of a launch beside tensors.
pub enum Desc {
    Collective(CollectiveDesc, usize),
    AgGemm(AgGemmDesc, usize, Option<OverlapConfig>),
    GemmRs(GemmRsDesc, usize, Option<OverlapConfig>),
    GemmAr(GemmArDesc, usize, Option<OverlapConfig>),
    Grouped(GroupedDesc),
    /// Without sequences, offsets are among its arguments.
    Attention(AttentionDesc, Option<Sequences>),
    /// Without sequences, those of offsets among the arguments.
    CpAttention(CpAttentionDesc, Option<Sequences>, Option<CpConfig>),
    Ep(EpDesc, Option<usize>),
    Permute(PermuteDesc),
    Quant(QuantDesc),
    Dequant(DequantDesc),
}

impl Operand {
    fn form(&self) -> Result<Form> {
        Ok(Form { shape: Shape::new(&self.shape)?, dtype: self.dtype.parse()? })
    }
}

impl Spec {
    /// # Errors
    /// `Internal` for a text that the Python package does not write.
    pub fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .map_err(|e| Error::internal(format!("the attributes of the call cannot be read: {e}")))
    }

    /// Needs no other rank.
    pub fn is_local(&self) -> bool {
        match self.op {
            Op::GroupedFprop | Op::GroupedDgrad | Op::GroupedWgrad => true,
            Op::Attention | Op::AttentionBwd | Op::Dequantize => true,
            Op::Permute | Op::PermuteBwd | Op::Unpermute | Op::UnpermuteBwd => true,
            // Over axes, the tensors of all ranks have one scale.
            Op::Quantize => self.axes.is_empty(),
            _ => false,
        }
    }

    /// Place of operand `name`.
    pub fn arg(&self, name: &str) -> Option<usize> {
        self.args.iter().position(|a| a.name == name)
    }

    /// Place of result `name`.
    pub fn ret(&self, name: &str) -> Option<usize> {
        self.rets.iter().position(|a| a.name == name)
    }

    fn of(all: &[Operand], name: &str) -> Result<Form> {
        let found = all.iter().find(|a| a.name == name);
        found.ok_or_else(|| Error::internal(format!("the call lacks `{name}`")))?.form()
    }

    fn form(&self, name: &str) -> Result<Form> {
        Self::of(&self.args, name)
    }

    fn out(&self, name: &str) -> Result<Form> {
        Self::of(&self.rets, name)
    }

    /// Fails unless operand `name`, if there is one, has these extents.
    fn expect(&self, name: &str, dims: &[usize]) -> Result<()> {
        let Some(operand) = self.args.iter().find(|a| a.name == name) else { return Ok(()) };
        if operand.shape == dims {
            return Ok(());
        }
        Err(Error::invalid(format!("`{name}` has the wrong shape"))
            .expected(format_args!("{dims:?}"))
            .seen(format_args!("{:?}", operand.shape)))
    }

    /// Returns the description of the call on a team of `size`, checked as far as shapes and types
    /// allow.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, with the operation's name.
    pub fn describe(&self, size: usize) -> Result<Desc> {
        self.described(size).map_err(|e| e.op(self.op.name()))
    }

    fn described(&self, size: usize) -> Result<Desc> {
        match self.op {
            Op::AllGather | Op::ReduceScatter | Op::AllReduce | Op::AllToAll => self.moved(size),
            Op::AgGemm => self.ag_gemm(size),
            Op::GemmRs | Op::GemmAr => self.sum(size),
            Op::GroupedFprop | Op::GroupedDgrad | Op::GroupedWgrad => self.grouped(),
            Op::Attention | Op::AttentionBwd => {
                if let Some(num) = self.num_sequences()? {
                    let desc = self.attention()?.by_offsets(self.forms()?, num)?;
                    desc.check()?;
                    return Ok(Desc::Attention(desc, None));
                }
                let sequences = self.attention()?.sequences()?;
                let desc = self.attention()?.local(self.forms()?, &sequences)?;
                desc.check()?;
                desc.check_launch(&sequences)?;
                self.check_tokens(&sequences, 1)?;
                Ok(Desc::Attention(desc, Some(sequences)))
            }
            Op::CpAttention | Op::CpAttentionBwd => {
                let spec = self.attention()?;
                if let Some(num) = self.num_sequences()? {
                    let mut desc = spec.divided_by_offsets(self.forms()?, num)?;
                    desc.backward = self.params.grad;
                    desc.check(size)?;
                    self.check_tokens(&desc.attn.sequences, size)?;
                    let config = spec.config()?;
                    config.map_or(Ok(()), |c| c.takes_offsets(&desc, size))?;
                    return Ok(Desc::CpAttention(desc, None, config));
                }
                let (mut desc, sequences) = spec.cp(self.forms()?, size)?;
                desc.backward = self.params.grad;
                desc.check(size)?;
                desc.check_launch(&sequences, size)?;
                self.check_tokens(&sequences, size)?;
                Ok(Desc::CpAttention(desc, Some(sequences), spec.config()?))
            }
            Op::EpDispatch | Op::EpCombine | Op::EpDispatchBwd | Op::EpCombineBwd => self.ep(size),
            Op::Permute | Op::PermuteBwd | Op::Unpermute | Op::UnpermuteBwd => self.permute(),
            Op::Quantize => self.quantize(),
            Op::Dequantize => self.dequantize(),
        }
    }

    /// Fails unless `rows` are one number for each rank, of which the largest is `most`.
    fn check_rows(&self, size: usize, what: &str, most: usize) -> Result<()> {
        let Some(rows) = &self.params.rows else { return Ok(()) };
        if rows.len() == size && rows.iter().max() == Some(&most) {
            return Ok(());
        }
        Err(Error::invalid(format!("`rows` do not fit {what}"))
            .expected(format_args!("{size} numbers, the largest {most}"))
            .seen(format_args!("{rows:?}"))
            .hint("pass rows for each rank; every rank's tensor has as many rows as the largest"))
    }

    fn moved(&self, size: usize) -> Result<Desc> {
        let (x, p) = (self.form("x")?, &self.params);
        let (mine, _) = rows_of(x.shape)?;
        let op = || reduction(p.reduce.as_deref().unwrap_or("sum"));
        let rows = p.rows.clone();
        let of = match self.op {
            Op::AllGather => {
                self.check_rows(size, "`x`", mine)?;
                Move::gather(mine, size, rows)
            }
            Op::ReduceScatter => {
                self.check_rows(size, "the result", rows_of(self.out("out")?.shape)?.0)?;
                Move::scatter(mine, size, rows, op()?)
            }
            Op::AllReduce => Move::reduce(mine, op()?),
            _ => Move::exchange(p.splits.clone().unwrap_or_default(), size),
        };
        let (desc, m) = of.describe(x)?;
        desc.check(size)?;
        Ok(Desc::Collective(desc, m))
    }

    fn ag_gemm(&self, size: usize) -> Result<Desc> {
        let (x, w, p) = (self.form("x")?, self.form("w")?, &self.params);
        let params = AgParams {
            act: p.act.as_deref(),
            rows: p.rows.as_deref(),
            kn: p.kn,
            algo: p.algo.as_deref(),
            bias: self.arg("bias").is_some(),
            aux: self.ret("aux").is_some(),
        };
        let (desc, m, algo) = params.describe((x, w, self.out("out")?.dtype), size)?;
        let (mine, _) = x.matrix("x")?;
        self.check_rows(size, "`x`", mine)?;
        self.expect("x", &[mine, desc.k])?;
        self.expect("bias", &[desc.n])?;
        self.expect("scale", &[1])?;
        desc.check(size)?;
        Ok(Desc::AgGemm(desc, m, algo))
    }

    fn sum(&self, size: usize) -> Result<Desc> {
        let (x, w, p) = (self.form("x")?, self.form("w")?, &self.params);
        let params = SumParams {
            rows: p.rows.as_deref(),
            kn: p.kn,
            wire: p.wire.as_deref(),
            algo: p.algo.as_deref(),
            bias: self.arg("bias").is_some(),
        };
        let out = self.out("out")?;
        let (desc, m, algo) = params.describe((x, w, out.dtype), size)?;
        let (rows, _) = x.matrix("x")?;
        self.check_rows(size, "the result", out.matrix("out")?.0)?;
        self.expect("x", &[rows, desc.k])?;
        self.expect("bias", &[desc.n])?;
        self.expect("scale", &[1])?;
        if self.op == Op::GemmAr {
            let desc = GemmArDesc(desc);
            desc.check(size)?;
            return Ok(Desc::GemmAr(desc, m, algo));
        }
        desc.check(size)?;
        Ok(Desc::GemmRs(desc, m, algo))
    }

    fn grouped(&self) -> Result<Desc> {
        let (groups, p) = (self.form("m_splits")?.shape.num_elems(), &self.params);
        let rows_cols = |f: Form, what| f.matrix(what);
        let (a, b, dtype) = match self.op {
            Op::GroupedFprop => {
                let x = self.form("x")?;
                (rows_cols(x, "x")?, rows_cols(self.out("out")?, "out")?, x.dtype)
            }
            Op::GroupedDgrad => {
                let dy = self.form("dy")?;
                (rows_cols(self.out("dx")?, "dx")?, rows_cols(dy, "dy")?, dy.dtype)
            }
            _ => {
                let x = self.form("x")?;
                (rows_cols(x, "x")?, rows_cols(self.form("dy")?, "dy")?, x.dtype)
            }
        };
        let ((rows, k), (_, n)) = (a, b);
        let mut desc = grouped::describe(groups, (rows, n, k), dtype);
        if self.op == Op::GroupedWgrad {
            desc.grad = self.out("dw")?.dtype;
        }
        self.expect("w", &[groups, n, k])?;
        self.expect("bias", &[groups, n])?;
        if self.arg("x_scales").is_some() {
            self.scaled("x", &p.recipe)?;
        }
        for (i, recipe) in p.recipes.iter().enumerate() {
            let w = format!("w{i}");
            self.expect(&w, &[n, k])?;
            self.scaled(&w, recipe)?;
        }
        desc.check()?;
        Ok(Desc::Grouped(desc))
    }

    /// Each call routes anew, so the indices are an operand of all of them.
    fn permute(&self) -> Result<Desc> {
        let (idx, p) = (self.form("topk_idx")?, &self.params);
        if !matches!(idx.dtype, DType::I32 | DType::I64) {
            return Err(Error::invalid("`topk_idx` cannot have this type")
                .expected("i32 or i64")
                .seen(idx.dtype));
        }
        let (tokens, top_k) = idx.matrix("topk_idx")?;
        let what = match self.op {
            Op::Permute => "x",
            Op::PermuteBwd => "d_rows",
            Op::Unpermute => "rows",
            _ => "d_out",
        };
        let x = self.form(what)?;
        let (_, hidden) = x.matrix(what)?;
        let new = PermuteDesc::new(tokens, hidden, p.num_experts, top_k, x.dtype);
        let desc = PermuteDesc { capacity: p.capacity, align: p.align, ..new };
        // Tokens of FP8 would need scales, and have results of another type.
        if !matches!(x.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid(format!("`{what}` cannot have this type"))
                .expected("f32, bf16 or f16")
                .seen(x.dtype));
        }
        for name in ["x", "d_out"] {
            self.expect(name, &[tokens, hidden])?;
        }
        for name in ["rows", "d_rows"] {
            self.expect(name, &[desc.capacity, hidden])?;
        }
        for name in ["topk_weights", "weights"] {
            self.expect(name, &[tokens, top_k])?;
        }
        self.expect("d_row_weights", &[desc.capacity])?;
        desc.check()?;
        Ok(Desc::Permute(desc))
    }

    fn quantize(&self) -> Result<Desc> {
        let (x, data, p) = (self.form("x")?, self.out("data")?, &self.params);
        let (rows, cols) = x.matrix("x")?;
        let new = QuantDesc::new(rows, cols, x.dtype, data.dtype, quant::layout(&p.recipe)?);
        let scope = if self.is_local() { Scope::Local } else { Scope::Team };
        let desc = QuantDesc { pow2_scales: p.pow2_scales, scope, ..new };
        desc.check()?;
        Ok(Desc::Quant(desc))
    }

    fn dequantize(&self) -> Result<Desc> {
        let (data, layout) = self.scaled("data", &self.params.recipe)?;
        let (rows, cols) = data.matrix("data")?;
        let out = self.out("out")?.dtype;
        let desc = DequantDesc { rows, cols, src: data.dtype, layout, out };
        desc.check()?;
        Ok(Desc::Dequant(desc))
    }

    /// The codes of operand `name`, whose scales are `name_scales`, if both are of the recipe.
    fn scaled(&self, name: &str, recipe: &str) -> Result<(Form, ScaleLayout)> {
        let (data, scales) = (self.form(name)?, self.form(&format!("{name}_scales"))?);
        let (rows, cols) = data.matrix(name)?;
        if !data.dtype.is_fp8() {
            return Err(Error::invalid(format!("the codes of `{name}` are not of FP8"))
                .expected("f8e4m3 or f8e5m2")
                .seen(data.dtype));
        }
        let layout = quant::layout(recipe)?;
        let (want, seen) = (layout.num_scales(rows, cols), scales.shape.num_elems());
        if (want, layout.dtype()) != (seen, scales.dtype) {
            return Err(Error::invalid(format!("the scales of `{name}` are not of {recipe}"))
                .expected(format_args!("{want} of {}", layout.dtype()))
                .seen(format_args!("{seen} of {}", scales.dtype)));
        }
        Ok((data, layout))
    }

    /// The order in which a plan of attention adds gradients. The forward pass has none.
    pub fn order(&self) -> Result<Order> {
        match self.op {
            Op::AttentionBwd => self.attention().map(Attention::order),
            _ => Ok(Order::Forward),
        }
    }

    fn attention(&self) -> Result<&Attention> {
        self.attention
            .as_ref()
            .ok_or_else(|| Error::internal("the call lacks the numbers of the attention"))
    }

    /// Sequences of which the offsets are arguments, if they are.
    fn num_sequences(&self) -> Result<Option<usize>> {
        if self.arg("cu_q").is_none() {
            return Ok(None);
        }
        let (q, kv) = (self.form("cu_q")?, self.form("cu_kv")?);
        match (q.shape.dims(), q.dtype) {
            ([n], DType::I32) if *n > 1 && (q.shape, q.dtype) == (kv.shape, kv.dtype) => {
                Ok(Some(*n - 1))
            }
            _ => Err(Error::invalid("`cu_seqlens_q` and `cu_seqlens_kv` have other forms")
                .expected("i32 [sequences + 1] both, of one sequence at least")
                .seen(format_args!("{} {} and {} {}", q.dtype, q.shape, kv.dtype, kv.shape))),
        }
    }

    fn forms(&self) -> Result<Forms> {
        let bias = self.arg("bias").map(|_| self.form("bias")).transpose()?;
        let [q, k, v] = ["q", "k", "v"].map(|n| self.form(n));
        let sink = self.arg("sink").is_some();
        Ok(Forms { q: q?, k: k?, v: v?, bias, sink, blocks: false })
    }

    /// Fails unless the ranks' rows together are those of the sequences.
    fn check_tokens(&self, s: &Sequences, size: usize) -> Result<()> {
        let f = self.forms()?;
        for (what, form, tokens) in [("q", f.q, s.tokens_q), ("k", f.k, s.tokens_kv)] {
            let rows = form.shape.dim(0) * size;
            if rows != tokens {
                return Err(Error::invalid(format!(
                    "the rows of `{what}` differ from those of its sequences"
                ))
                .expected(format_args!("{tokens} rows of {size} ranks together"))
                .seen(rows));
            }
        }
        Ok(())
    }

    /// A layer of experts and the bytes of a routing's state in it.
    fn ep(&self, size: usize) -> Result<Desc> {
        let spec = self
            .ep
            .as_ref()
            .ok_or_else(|| Error::internal("the call lacks the numbers of the layer"))?;
        let desc = spec.describe(size)?;
        desc.check(size)?;
        let state = [EpHandle::state_bytes(&desc)];
        self.expect("handle", &state)?;
        match self.op {
            Op::EpDispatch => {
                let tokens = self.form("topk_idx")?.matrix("topk_idx")?.0;
                self.expect("topk_idx", &[tokens, desc.top_k])?;
                self.expect("x", &[tokens, desc.hidden])?;
                self.expect("topk_weights", &[tokens, desc.top_k])?;
                self.expect("x_scales", &[tokens, desc.num_scales])?;
                if tokens > desc.max_tokens {
                    return Err(Error::invalid(
                        "the launch has more tokens than the layer was made for",
                    )
                    .expected(format_args!("at most {}", desc.max_tokens))
                    .seen(tokens));
                }
            }
            Op::EpCombine => {
                self.expect("y", &[desc.capacity, desc.hidden])?;
                self.expect("weights", &[desc.capacity])?;
            }
            _ => {}
        }
        for (name, want) in [("x", desc.dtype), ("y", desc.out)] {
            let Some(i) = self.arg(name) else { continue };
            let seen = self.args[i].form()?.dtype;
            if seen != want {
                let text = format!("`{name}` is not of the layer's type");
                return Err(Error::invalid(text).expected(want).seen(seen));
            }
        }
        Ok(Desc::Ep(desc, spec.num_sms))
    }
}
