//! `attention` and `cp_attention`, forward and backward.

use std::sync::Arc;

use pyo3::prelude::*;
use tilewire::device::Device;
use tilewire::ops::attention::{
    AttentionDesc, AttentionPlan, AttnGrads, AttnInputs, AttnMask, AttnOffsets, AttnOut, AttnSaved,
    BiasShape, Dropout, FEW_QUERIES, HeadScales, LONG_QUERIES, Sequences,
};
use tilewire::ops::collective::ReduceOp;
use tilewire::ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Layout, Strategy};
use tilewire::plans::Recipe;
use tilewire::prelude::*;

use crate::call::{Call, Place};
use crate::errors::OrRaise;
use crate::explain;
use crate::keys::{AttnKey, CpKey, Key, planned_for};
use crate::local::{self, LocalKey};
use crate::world::Member;

use super::Form;
use super::collective::{self, Move, rows_of};
use super::grouped::tokens;

type Object<'py> = Bound<'py, PyAny>;

/// The arguments of an attention beside its tensors. `cu` are global row offsets of the sequences:
/// queries, keys. They are empty where tensors have them.
#[derive(FromPyObject, serde::Deserialize, Clone, Debug)]
pub struct Spec {
    #[pyo3(item)]
    pub cu_q: Vec<usize>,
    #[pyo3(item)]
    pub cu_kv: Vec<usize>,
    #[pyo3(item)]
    pub left: Option<usize>,
    #[pyo3(item)]
    pub right: Option<usize>,
    #[pyo3(item)]
    pub scale: Option<f64>,
    #[pyo3(item)]
    pub softcap: Option<f64>,
    #[pyo3(item)]
    pub dropout_p: f64,
    #[pyo3(item)]
    pub seed: u64,
    #[pyo3(item)]
    pub layout: String,
    #[pyo3(item)]
    pub strategy: Option<String>,
    #[pyo3(item)]
    pub a2a_size: usize,
    /// Of attention that is here: gradients have the same bits in every run.
    #[pyo3(item)]
    pub deterministic: bool,
    /// Of rows that are divided: those of all ranks, of queries and of keys, where tensors have the
    /// offsets.
    #[pyo3(item)]
    #[serde(default)]
    pub tokens: Option<[usize; 2]>,
}

/// Heads and head dimension of a packed tensor.
fn heads(what: &str, t: Form) -> Result<(usize, usize)> {
    match t.shape.dims() {
        [_, heads, d] => Ok((*heads, *d)),
        _ => Err(Error::invalid(format!("`{what}` must be [tokens, heads, d]")).seen(t.shape)),
    }
}

/// Shapes and types of the inputs of an attention, as its description needs them.
#[derive(Clone, Copy)]
pub struct Forms {
    pub q: Form,
    pub k: Form,
    pub v: Form,
    pub bias: Option<Form>,
    pub sink: bool,
    /// FP8 codes with a scale for 128 tokens of a head.
    pub blocks: bool,
}

impl Forms {
    /// Rows of queries and of keys.
    fn rows(&self) -> [usize; 2] {
        [self.q, self.k].map(|t| t.shape.dims().first().copied().unwrap_or(0))
    }
}

impl From<&AttnInputs> for Forms {
    fn from(x: &AttnInputs) -> Self {
        let bias = x.bias.as_ref().map(Form::from);
        let [q, k, v] = [&x.q, &x.k, &x.v].map(|o| Form::from(&o.data));
        Self { q, k, v, bias, sink: x.sink.is_some(), blocks: x.q.scales.is_some() }
    }
}

impl Spec {
    /// Of the gradients of attention that is here.
    pub fn order(&self) -> Order {
        if self.deterministic { Order::Fixed } else { Order::Any }
    }

    pub fn sequences(&self) -> Result<Sequences> {
        Sequences::packed(&self.cu_q, &self.cu_kv)
    }

    /// A description for as many rows as one plan serves, and the sequences of this launch.
    pub fn describe(&self, x: Forms, multiple: usize) -> Result<(AttentionDesc, Sequences)> {
        let s = self.sequences()?;
        Ok((self.describe_for(x, &s, multiple)?, s))
    }

    fn describe_for(&self, x: Forms, s: &Sequences, multiple: usize) -> Result<AttentionDesc> {
        let mut d = self.form(x)?;
        // A bias is of the longest sequence, so it says how long sequences may be.
        d.sequences = match d.bias {
            Some(_) => s.clone(),
            None => most([s.tokens_q, s.tokens_kv], s.q.len(), multiple),
        };
        Ok(d)
    }

    /// A description of local attention for launches of such sequences as `s`.
    ///
    /// # Errors
    /// As [`Spec::describe`].
    pub fn local(&self, x: Forms, s: &Sequences) -> Result<AttentionDesc> {
        let mut d = self.describe_for(x, s, 1)?;
        let longest = s.longest().0;
        // Plans of few queries have kernels of their own, by the most queries of a sequence.
        if d.bias.is_none()
            && longest <= FEW_QUERIES
            && let Some(first) = d.sequences.q.first_mut()
        {
            *first = 0..longest.next_power_of_two().min(d.sequences.tokens_q);
        }
        Ok(d)
    }

    /// A description for launches by offsets of `num` sequences.
    pub fn by_offsets(&self, x: Forms, num: usize) -> Result<AttentionDesc> {
        let mut d = self.form(x)?;
        d.sequences = unknown(&d, x.rows().map(|rows| tokens(rows, 1)), num);
        Ok(d)
    }

    /// A description of all but the rows.
    fn form(&self, x: Forms) -> Result<AttentionDesc> {
        let (hq, dqk) = heads("q", x.q)?;
        let (hkv, _) = heads("k", x.k)?;
        let (_, dv) = heads("v", x.v)?;
        let mask = AttnMask { left: self.left, right: self.right };
        let mut d = AttentionDesc::new(1, (hq, hkv), dqk, x.q.dtype, mask);
        d.dv = dv;
        if let Some(scale) = self.scale {
            d.scale = scale;
        }
        d.softcap = self.softcap;
        if self.dropout_p != 0.0 {
            d.dropout = Some(Dropout { p: self.dropout_p, seed: self.seed });
        }
        d.bias = match x.bias.map(|b| b.shape) {
            None => None,
            Some(shape) => match shape.dims() {
                [heads, sq, skv] => Some(BiasShape { heads: *heads, sq: *sq, skv: *skv }),
                _ => return Err(Error::invalid("`bias` must be [heads, sq, skv]").seen(shape)),
            },
        };
        d.sink = x.sink;
        if x.blocks {
            d.scales = HeadScales::Block128;
        }
        Ok(d)
    }

    pub fn cp(&self, x: Forms, size: usize) -> Result<(CpAttentionDesc, Sequences)> {
        let (mut attn, sequences) = self.describe(x, 2 * size)?;
        if attn.bias.is_none() {
            // One plan with its symmetric memory, whatever the number of sequences.
            attn.sequences.q.truncate(1);
            attn.sequences.kv.truncate(1);
        }
        let layout: Layout = self.layout.parse()?;
        let desc =
            CpAttentionDesc { layout, a2a_size: self.a2a_size, ..CpAttentionDesc::new(attn) };
        Ok((desc, sequences))
    }
}

/// Sequences that stand for all of at most as many rows, and as many of them.
fn most(rows: [usize; 2], num: usize, multiple: usize) -> Sequences {
    exactly(rows.map(|rows| tokens(rows, multiple)), num)
}

/// The same of exactly so many rows.
fn exactly([q, kv]: [usize; 2], num: usize) -> Sequences {
    let mut s = Sequences::one(q, kv);
    s.q.resize(planned_for(num), q..q);
    s.kv.resize(planned_for(num), kv..kv);
    s
}

/// Sequences of a plan for launches by offsets of `num` of them, in tensors of so many rows.
fn unknown(d: &AttentionDesc, rows: [usize; 2], num: usize) -> Sequences {
    let mut s = exactly(rows, num);
    if d.bias.is_some() {
        // How long they are is not known, but that none is longer than the bias.
        (s.q[0], s.kv[0]) = (0..0, 0..0);
    }
    s
}

/// The tensors of a call, by their names. `cu` are offsets in place of those of the [`Spec`].
#[derive(FromPyObject)]
pub struct Tensors<'py> {
    #[pyo3(item)]
    q: Object<'py>,
    #[pyo3(item)]
    k: Object<'py>,
    #[pyo3(item)]
    v: Object<'py>,
    #[pyo3(item)]
    bias: Option<Object<'py>>,
    #[pyo3(item)]
    sink: Option<Object<'py>>,
    #[pyo3(item)]
    out: Object<'py>,
    #[pyo3(item)]
    lse: Object<'py>,
    #[pyo3(item)]
    cu_q: Option<Object<'py>>,
    #[pyo3(item)]
    cu_kv: Option<Object<'py>>,
    /// Of FP8 q, k and v.
    #[pyo3(item)]
    scales: Option<[Object<'py>; 3]>,
}

/// The gradients of a call, by their names.
#[derive(FromPyObject)]
pub struct Gradients<'py> {
    #[pyo3(item)]
    d_out: Object<'py>,
    #[pyo3(item)]
    dq: Object<'py>,
    #[pyo3(item)]
    dk: Object<'py>,
    #[pyo3(item)]
    dv: Object<'py>,
    #[pyo3(item)]
    dbias: Option<Object<'py>>,
    #[pyo3(item)]
    dsink: Option<Object<'py>>,
}

fn inputs(place: &Place, t: &Tensors<'_>) -> PyResult<(AttnInputs, AttnOut)> {
    let get = |what, o| place.tensor(what, o);
    let mut x = AttnInputs::new(get("q", &t.q)?, get("k", &t.k)?, get("v", &t.v)?);
    x.bias = place.optional("bias", t.bias.as_ref())?;
    x.sink = place.optional("sink", t.sink.as_ref())?;
    if let Some([q, k, v]) = &t.scales {
        x.q.scales = Some(get("scales of q", q)?);
        x.k.scales = Some(get("scales of k", k)?);
        x.v.scales = Some(get("scales of v", v)?);
    }
    Ok((x, AttnOut { out: get("out", &t.out)?, lse: get("lse", &t.lse)? }))
}

fn gradients(place: &Place, o: AttnOut, g: &Gradients<'_>) -> PyResult<(AttnSaved, AttnGrads)> {
    let get = |what, o| place.tensor(what, o);
    let saved = AttnSaved { out: o.out, lse: o.lse, d_out: get("d_out", &g.d_out)? };
    let mut grads = AttnGrads::new(get("dq", &g.dq)?, get("dk", &g.dk)?, get("dv", &g.dv)?);
    grads.dbias = place.optional("dbias", g.dbias.as_ref())?;
    grads.dsink = place.optional("dsink", g.dsink.as_ref())?;
    Ok((saved, grads))
}

/// The place of the offsets of a call.
enum Offsets {
    /// The spec: they are of all rows.
    Spec,
    /// Tensors of the CPU, whose calls wait: they are read, and the spec has them.
    Read,
    Device(Box<AttnOffsets>),
}

fn offsets(place: &Place, t: &Tensors<'_>, spec: &mut Spec) -> PyResult<Offsets> {
    let (Some(q), Some(kv)) = (&t.cu_q, &t.cu_kv) else { return Ok(Offsets::Spec) };
    let (q, kv) = (place.tensor("cu_seqlens_q", q)?, place.tensor("cu_seqlens_kv", kv)?);
    if !matches!(place.device, Device::Host) {
        return Ok(Offsets::Device(Box::new(AttnOffsets::packed(q, kv))));
    }
    let read = |what: &str, t: &Tensor| -> Result<Vec<usize>> {
        let rows = |n: i64| {
            usize::try_from(n)
                .map_err(|_| Error::invalid(format!("`{what}` has an offset below 0")).seen(n))
        };
        let all = match t.dtype() {
            DType::I64 => t.to_vec::<i64>()?,
            _ => t.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
        };
        all.into_iter().map(rows).collect()
    };
    let both = || Ok((read("cu_seqlens_q", &q)?, read("cu_seqlens_kv", &kv)?));
    let both: Result<_> = both();
    (spec.cu_q, spec.cu_kv) = both.map_err(|e| e.op(place.op)).or_raise(t.q.py())?;
    Ok(Offsets::Read)
}

/// The plan of a call, and its sequences or offsets among its inputs.
fn local_plan_of(
    place: &Place,
    (spec, offsets): (&Spec, Offsets),
    x: &mut AttnInputs,
    (stream, order): (&Stream, Order),
) -> Result<Arc<AttentionPlan>> {
    let forms = Forms::from(&*x);
    if let Offsets::Device(o) = offsets {
        let desc = spec.by_offsets(forms, o.num())?;
        x.offsets = Some(*o);
        return local_plan(place, desc, (stream, order));
    }
    let mut s = spec.sequences()?;
    if matches!(offsets, Offsets::Read) {
        with_rows(&mut s, forms.rows(), ["q", "k"])?;
    }
    let desc = spec.local(forms, &s)?;
    x.sequences = Some(s);
    local_plan(place, desc, (stream, order))
}

/// Gives sequences the rows of their tensors: as on a device, rows behind the last one are of none.
fn with_rows(s: &mut Sequences, rows: [usize; 2], of: [&str; 2]) -> Result<()> {
    let sides = [&mut s.tokens_q, &mut s.tokens_kv];
    for ((tokens, rows), what) in sides.into_iter().zip(rows).zip(of) {
        if *tokens > rows {
            return Err(Error::invalid(format!("the sequences have more rows than `{what}`"))
                .expected(format_args!("at most {rows}"))
                .seen(*tokens));
        }
        *tokens = rows;
    }
    Ok(())
}

/// The order in which a plan adds gradients of queries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    Fixed,
    /// Any, where that is faster.
    Any,
    /// None is added: of the forward pass alone, without memory for sums.
    Forward,
}

impl Order {
    /// A plan of a description.
    pub fn plan(self, desc: AttentionDesc) -> Result<AttentionPlan> {
        let plan = AttentionPlan::new(desc, None)?;
        Ok(match self {
            Order::Fixed => plan,
            Order::Any => plan.allow_unordered_backward(),
            Order::Forward => plan.without_fused_backward(),
        })
    }
}

fn local_plan(
    place: &Place,
    desc: AttentionDesc,
    (stream, order): (&Stream, Order),
) -> Result<Arc<AttentionPlan>> {
    // Both passes share a plan where it has no sums.
    let short = desc.sequences.tokens_q < LONG_QUERIES;
    let order = if order == Order::Forward && short { Order::Fixed } else { order };
    local::plan(LocalKey::Attention(AttnKey::of(&desc), order), &place.device, stream, || {
        let plan = order.plan(desc)?;
        plan.prepare(stream).map(|()| plan)
    })
    .inspect(|p| explain::note("attention", || p.explain()))
}

/// Attention of tensors that are here, without a world.
#[pyfunction]
pub fn attention_fwd(py: Python<'_>, mut spec: Spec, tensors: Tensors<'_>) -> PyResult<()> {
    let place = Place::of("attention", &tensors.q, "q")?;
    let (mut x, out) = inputs(&place, &tensors)?;
    let offsets = offsets(&place, &tensors, &mut spec)?;
    place.run(py, |stream| {
        let with = (stream, Order::Forward);
        local_plan_of(&place, (&spec, offsets), &mut x, with)?.launch_fwd(stream, &x, out)
    })
}

/// The gradients of [`attention_fwd`].
#[pyfunction]
pub fn attention_bwd(
    py: Python<'_>,
    mut spec: Spec,
    tensors: Tensors<'_>,
    grads: Gradients<'_>,
) -> PyResult<()> {
    let place = Place::of("attention_bwd", &tensors.q, "q")?;
    let (mut x, out) = inputs(&place, &tensors)?;
    let (saved, grads) = gradients(&place, out, &grads)?;
    let offsets = offsets(&place, &tensors, &mut spec)?;
    place.run(py, |stream| {
        let with = (stream, spec.order());
        let plan = local_plan_of(&place, (&spec, offsets), &mut x, with)?;
        plan.launch_bwd(stream, &x, saved, grads)
    })
}

fn cp_plan(
    member: &Member,
    desc: CpAttentionDesc,
    config: Option<CpConfig>,
    stream: &Stream,
) -> Result<Arc<CpAttentionPlan>> {
    let key = Key::CpAttention(CpKey {
        attn: AttnKey::of(&desc.attn),
        layout: desc.layout,
        config,
        a2a_size: desc.a2a_size,
        backward: desc.backward,
    });
    let plan = member.plan(&key, stream, || Recipe {
        op: "cp_attention",
        len_bytes: CpAttentionPlan::memory(&desc, member.team.size(), config),
        make: |heap: &Heap| CpAttentionPlan::new(desc.clone(), heap, config),
        prepare: CpAttentionPlan::prepare,
    });
    plan.inspect(|p| explain::note("cp_attention", || p.explain()))
}

impl Spec {
    /// The description of a call whose rows are divided among `size` ranks, and its sequences or
    /// offsets among its inputs. Those in tensors are of exactly so many rows.
    fn divided(
        &self,
        offsets: Offsets,
        x: &mut AttnInputs,
        (rank, size): (Rank, usize),
    ) -> Result<CpAttentionDesc> {
        let forms = Forms::from(&*x);
        let Some(tokens) = self.tokens else {
            let (desc, s) = self.cp(forms, size)?;
            x.sequences = Some(s);
            return Ok(desc);
        };
        let (layout, mask) = (self.layout.parse::<Layout>()?, self.form(forms)?.mask);
        let mut all = Sequences::one(tokens[0], tokens[1]);
        let num = if let Offsets::Device(o) = offsets {
            let num = o.num();
            x.offsets = Some(*o);
            num
        } else {
            let mut s = self.sequences()?;
            with_rows(&mut s, tokens, ["tokens", "tokens"])?;
            x.sequences = Some(s.clone());
            all = s;
            all.q.len()
        };
        // Before a plan is made, which other ranks would wait for.
        let mine =
            [layout.rows_q(&all, &mask, rank, size), layout.rows_kv(&all, &mask, rank, size)];
        for ((spans, rows), what) in mine.into_iter().zip(forms.rows()).zip(["q", "k"]) {
            let want: usize = spans.iter().map(|s| s.len()).sum();
            if want != rows {
                return Err(Error::invalid(format!("`{what}` has other rows than this rank"))
                    .expected(format_args!("{want} of {tokens:?} `tokens`"))
                    .seen(rows));
            }
        }
        self.divided_by_offsets(forms, num)
    }

    /// A description of exactly `tokens` rows, for launches by offsets of `num` sequences.
    pub fn divided_by_offsets(&self, x: Forms, num: usize) -> Result<CpAttentionDesc> {
        let tokens = self.tokens.ok_or_else(|| Error::internal("the call lacks its rows"))?;
        let (layout, mut attn): (Layout, _) = (self.layout.parse()?, self.form(x)?);
        attn.sequences = unknown(&attn, tokens, num);
        Ok(CpAttentionDesc { layout, a2a_size: self.a2a_size, ..CpAttentionDesc::new(attn) })
    }

    /// The strategy of keys, or `gated`, which is `all_gather` by one kernel that waits for keys
    /// where it meets them.
    pub fn config(&self) -> Result<Option<CpConfig>> {
        let of = |name: &str| match name {
            "gated" => Ok(CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) }),
            _ => name.parse().map(CpConfig::of).map_err(|e: Error| {
                e.hint("`gated` is all_gather whose tiles wait for their keys, on sm_90a")
            }),
        };
        self.strategy.as_deref().map(of).transpose()
    }
}

/// Attention of rows that are divided among the ranks of a world. With `grad` plans are made for
/// the backward pass, too: of the bias and the sink, where they have gradients, all ranks' parts
/// are added.
#[pyfunction]
pub fn cp_attention_fwd(
    py: Python<'_>,
    world: u64,
    mut spec: Spec,
    tensors: Tensors<'_>,
    grad: bool,
    dbias: bool,
    dsink: bool,
) -> PyResult<()> {
    let call = Call::new(py, "cp_attention", world)?;
    let (mut x, out) = inputs(&call, &tensors)?;
    let offsets = offsets(&call, &tensors, &mut spec)?;
    call.run(py, |stream| {
        let added = [(dbias, &x.bias), (dsink, &x.sink)];
        for of in
            added.into_iter().filter(|(is_needed, _)| *is_needed).filter_map(|(_, t)| t.as_ref())
        {
            let shape = Form::from(of).shape;
            let (desc, _) = Move::reduce(rows_of(shape)?.0, ReduceOp::Sum)
                .describe(Form { shape, dtype: DType::F32 })?;
            collective::plan(&call.member, &desc, stream)?;
        }
        let mut desc = spec.divided(offsets, &mut x, (call.member.team.rank(), call.size()))?;
        desc.backward = grad;
        cp_plan(&call.member, desc, spec.config()?, stream)?.launch_fwd(stream, &x, out)
    })
}

/// The gradients of [`cp_attention_fwd`], which was called with `grad`.
#[pyfunction]
pub fn cp_attention_bwd(
    py: Python<'_>,
    world: u64,
    mut spec: Spec,
    tensors: Tensors<'_>,
    grads: Gradients<'_>,
) -> PyResult<()> {
    let call = Call::new(py, "cp_attention_bwd", world)?;
    let (mut x, out) = inputs(&call, &tensors)?;
    let (saved, grads) = gradients(&call, out, &grads)?;
    let offsets = offsets(&call, &tensors, &mut spec)?;
    call.run(py, |stream| {
        let desc = spec.divided(offsets, &mut x, (call.member.team.rank(), call.size()))?;
        cp_plan(&call.member, desc, spec.config()?, stream)?.launch_bwd(stream, &x, saved, grads)
    })
}

/// Global rows of rank `rank.0` of `rank.1`, in the order of its tensors: spans `(first, last + 1)`
/// of sequences with the row offsets `cu` under the mask `(left, right)`.
#[pyfunction]
pub fn cp_rows(
    py: Python<'_>,
    cu: Vec<usize>,
    layout: &str,
    rank: (u32, usize),
    mask: (Option<usize>, Option<usize>),
) -> PyResult<Vec<(usize, usize)>> {
    let spans = || {
        let layout: Layout = layout.parse()?;
        let s = Sequences::packed(&cu, &cu)?;
        let ((rank, size), (left, right)) = (rank, mask);
        layout.check(&s, size)?;
        Ok(layout.rows_q(&s, &AttnMask { left, right }, Rank::new(rank), size))
    };
    let spans: Result<Vec<std::ops::Range<usize>>> = spans();
    Ok(spans.or_raise(py)?.into_iter().map(|r| (r.start, r.end)).collect())
}
