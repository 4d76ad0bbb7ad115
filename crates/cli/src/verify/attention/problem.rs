//! Problems of attention on global tensors, and what the oracle says about them.

use std::ops::Range;

use tilewire::core::ScaleLayout;
use tilewire::core::numerics::Bound;
use tilewire::device::Device;
use tilewire::ops::attention::*;
use tilewire::prelude::*;
use tilewire_oracle::attention as oracle;
use tilewire_oracle::quant::{QuantSpec, code};
use tilewire_oracle::{Mat, fp8};

use super::super::Ctx;
use super::magnitude::{Magnitudes, Roundings, magnitudes};
use super::share::share;

/// A tensor of the problem: its values, and its codes and scales if it is FP8.
pub struct Operand {
    pub values: Mat,
    heads: usize,
    quantised: Option<Codes>,
}

/// FP8 codes `[rows, heads, d]` and f32 scales of `tokens` rows and a head each.
struct Codes {
    data: Vec<u8>,
    scales: Vec<u8>,
    tokens: usize,
}

impl Operand {
    fn new(ctx: &mut Ctx, rows: usize, heads: usize, d: usize, a: &AttentionDesc) -> Self {
        let dtype = a.dtype;
        if !dtype.is_fp8() {
            return Self { values: ctx.random(rows, heads * d, dtype), heads, quantised: None };
        }
        let x = ctx.random(rows, heads * d, DType::F32);
        let tokens = match a.scales {
            HeadScales::Token => 1,
            HeadScales::Block128 => 128,
        };
        let (codes, values) = quantised(&x, heads, tokens);
        Self { values, heads, quantised: Some(codes) }
    }

    /// The rows of `spans` as a tensor of `dtype`, on the heap's device.
    fn tensor(&self, ctx: &Ctx, dtype: DType, spans: &[Range<usize>]) -> Result<AttnOperand> {
        let rows = rows_of(&self.values, spans);
        let d = self.values.cols / self.heads;
        let shape = Shape::d3(rows.rows, self.heads, d);
        let Some(q) = &self.quantised else {
            return Ok(ctx.place(Tensor::from_f32(&rows.to_f32(), dtype, shape)?)?.into());
        };
        let pick = |x: &[u8], width: usize, tokens: usize| -> Vec<u8> {
            let part = |s: &Range<usize>| s.start / tokens * width..s.end.div_ceil(tokens) * width;
            let each = spans.iter().map(|s| x[part(s)].to_vec());
            each.collect::<Vec<_>>().concat()
        };
        let memory = |b: &[u8]| tilewire::device::Memory::from_bytes(b);
        let data = Tensor::over(memory(&pick(&q.data, self.values.cols, 1)), 0, dtype, shape)?;
        let scales = memory(&pick(&q.scales, 4 * self.heads, q.tokens));
        let shape = Shape::d2(rows.rows.div_ceil(q.tokens), self.heads);
        let scales = ctx.place(Tensor::over(scales, 0, DType::F32, shape)?)?;
        Ok(AttnOperand { data: ctx.place(data)?, scales: Some(scales) })
    }
}

/// e4m3 with one f32 scale for each (`tokens` rows, head), whatever the head's width: codes and
/// scales, and the values that they stand for.
fn quantised(x: &Mat, heads: usize, tokens: usize) -> (Codes, Mat) {
    let spec = QuantSpec::new(DType::F8E4M3, ScaleLayout::Tensor);
    let d = (x.cols / heads).max(1);
    let scale_of = |block: usize, head: usize| {
        let rows = block * tokens..((block + 1) * tokens).min(x.rows);
        let all = rows.flat_map(|r| &x.row(r)[head * d..(head + 1) * d]);
        spec.scale(all.fold(0.0, |m: f64, v| m.max(v.abs())))
    };
    let blocks = (0..x.rows.div_ceil(tokens)).flat_map(|b| (0..heads).map(move |h| (b, h)));
    let scales: Vec<f64> = blocks.map(|(b, h)| scale_of(b, h)).collect();
    let (mut data, mut values) = (Vec::new(), Mat::zeros(x.rows, x.cols));
    for (i, (from, out)) in x.data.iter().zip(&mut values.data).enumerate() {
        let scale = scales[i / x.cols / tokens * heads + i % x.cols / d];
        let code = code(spec.dtype, *from, scale);
        data.push(code);
        *out = fp8::decode(spec.dtype, code) * f64::from(scale as f32);
    }
    let scales = scales.iter().flat_map(|s| (*s as f32).to_ne_bytes()).collect();
    (Codes { data, scales, tokens }, values)
}

/// Rows of `m` in the order of `spans`.
pub fn rows_of(m: &Mat, spans: &[Range<usize>]) -> Mat {
    let rows: Vec<usize> = spans.iter().cloned().flatten().collect();
    Mat::from_fn(rows.len(), m.cols, |r, c| m.at(rows[r], c))
}

fn on_device(ctx: &Ctx) -> bool {
    !matches!(ctx.heap.device(), Device::Host)
}

/// A problem on global tensors, equal on all ranks.
pub struct Problem {
    pub desc: AttentionDesc,
    q: Operand,
    k: Operand,
    v: Operand,
    bias: Option<oracle::Bias>,
    sink: Option<Vec<f64>>,
    d_o: Mat,
    /// The type that kernels round probabilities to before their products, if they do.
    rounds: Option<DType>,
    /// Errors of scores beside those of sums in f32, relative to the magnitudes of their terms.
    scores: f64,
}

/// The oracle's results, and the magnitudes of the error bound.
pub struct Want {
    pub out: oracle::AttnOut,
    pub grads: oracle::AttnGrads,
    pub mag: Magnitudes,
}

fn sequences(words: &[&str], seq: usize) -> Result<Sequences> {
    let has = |w: &str| words.contains(&w);
    let skv = match () {
        () if has("cross") => seq + 5,
        () if has("masked") => seq.saturating_sub(4),
        () => seq,
    };
    let cu = |n: usize| [0, n / 3, n / 3, n / 3 + n.min(2) / 2, n];
    // No more queries of a sequence than the kernels take that cut keys.
    let cu_q = if has("few") { [0, 3, 3, 4, 20] } else { cu(seq) };
    match () {
        () if has("padded") => {
            let padded = |cu: [usize; 5]| [0, cu[1] + 2, cu[1] + 3, cu[1] + 5, cu[4] + 6];
            Sequences::padded((&cu_q, &padded(cu_q)), (&cu(skv), &padded(cu(skv))))
        }
        () if has("packed") => Sequences::packed(&cu_q, &cu(skv)),
        () => Ok(Sequences::one(seq, skv)),
    }
}

/// The description that the words stand for. `heads` are those without `gqa` and `mqa`.
pub fn describe(
    words: &[&str],
    (seq, d): (usize, usize),
    heads: usize,
    dtype: DType,
) -> Result<AttentionDesc> {
    let has = |w: &str| words.contains(&w);
    let mask = match () {
        () if has("causal") => AttnMask::CAUSAL,
        () if has("window") => AttnMask::window(seq / 4, 2),
        () => AttnMask::FULL,
    };
    let heads_kv = match () {
        () if has("gqa") => heads / 2,
        () if has("mqa") => 1,
        () => heads,
    };
    let mut a = AttentionDesc::new(seq, (heads, heads_kv.max(1)), d, dtype, mask);
    if has("dims") {
        (a.dqk, a.dv) = (d + 4, d.saturating_sub(3).max(1));
    }
    if has("blocks") {
        a.scales = HeadScales::Block128;
    }
    a.sequences = sequences(words, seq)?;
    a.softcap = has("softcap").then_some(2.0);
    a.sink = has("sink");
    a.dropout = has("dropout").then_some(Dropout { p: 0.3, seed: 11 });
    let (sq, skv) = a.sequences.longest();
    let bias = |heads| BiasShape { heads, sq: sq + 1, skv: skv + 2 };
    a.bias = has("bias").then(|| bias(heads)).or(has("bias1").then(|| bias(1)));
    Ok(a)
}

impl Problem {
    pub fn new(ctx: &mut Ctx, desc: AttentionDesc) -> Self {
        let (a, s) = (&desc, &desc.sequences);
        let q = Operand::new(ctx, s.tokens_q, a.heads_q, a.dqk, a);
        let k = Operand::new(ctx, s.tokens_kv, a.heads_kv, a.dqk, a);
        let v = Operand::new(ctx, s.tokens_kv, a.heads_kv, a.dv, a);
        let d_o = ctx.random(s.tokens_q, a.heads_q * a.dv, a.out);
        let bias = a.bias.map(|b| {
            let data = ctx.random(b.heads * b.sq, b.skv, DType::F32);
            oracle::Bias::new(b.heads, b.sq, b.skv, data)
        });
        let sink = a.sink.then(|| ctx.random(1, a.heads_q, DType::F32).data);
        let narrow = matches!(a.dtype, DType::BF16 | DType::F16);
        let rounds = (on_device(ctx) && narrow).then_some(a.dtype);
        Self { desc, q, k, v, bias, sink, d_o, rounds, scores: 0.0 }
    }

    /// As computed by FP8 products, if there is a device: these are added with some 14 bits, the
    /// others cut off.
    pub fn by_fp8_products(&mut self, ctx: &Ctx) {
        if on_device(ctx) {
            (self.rounds, self.scores) = (Some(DType::F8E4M3), 8.0 * 2f64.powi(-13));
        }
    }

    /// A backward pass of widened q and k with results of [`Problem::by_fp8_products`]: it makes
    /// other scores.
    pub fn behind_fp8_products(&mut self, ctx: &Ctx) {
        if on_device(ctx) {
            self.scores += 2.0 * self.desc.widened().unit_roundoff();
        }
    }

    /// As computed from FP8 codes that a device, if there is one, has widened: values of that type,
    /// and kernels that round to it.
    pub fn widened(&mut self, ctx: &Ctx) {
        let wide = self.desc.widened();
        if !on_device(ctx) || wide == DType::F32 {
            return;
        }
        (self.rounds, self.scores) = (Some(wide), 0.0);
        for x in [&mut self.q, &mut self.k, &mut self.v] {
            // As the product of code and scale is.
            x.values = x.values.rounded(DType::F32).rounded(wide);
        }
    }

    /// As if K and V had travelled as e4m3 with one scale for each (token, head).
    pub fn quantise_kv(&mut self) {
        self.rounds = None;
        for x in [&mut self.k, &mut self.v] {
            x.values = quantised(&x.values, x.heads, 1).1;
        }
    }

    /// Tensors of the rows of a rank.
    pub fn inputs(&self, ctx: &Ctx, q: &[Range<usize>], kv: &[Range<usize>]) -> Result<AttnInputs> {
        let dtype = self.desc.dtype;
        let flat = |v: &[f64], shape| {
            let v: Vec<f32> = v.iter().map(|x| *x as f32).collect();
            ctx.place(Tensor::from_f32(&v, DType::F32, shape)?)
        };
        let bias = self.bias.as_ref();
        Ok(AttnInputs {
            bias: bias.map(|b| flat(&b.data.data, Shape::d3(b.heads, b.sq, b.skv))).transpose()?,
            sink: self.sink.as_ref().map(|s| flat(s, Shape::d1(s.len()))).transpose()?,
            ..AttnInputs::new(
                self.q.tensor(ctx, dtype, q)?,
                self.k.tensor(ctx, dtype, kv)?,
                self.v.tensor(ctx, dtype, kv)?,
            )
        })
    }

    /// Poisoned outputs for `rows` queries.
    pub fn out(&self, ctx: &Ctx, rows: usize) -> Result<AttnOut> {
        let d = &self.desc;
        Ok(AttnOut {
            out: ctx.poisoned(d.out, Shape::d2(rows, d.heads_q * d.dv))?,
            lse: ctx.poisoned(DType::F32, Shape::d2(d.heads_q, rows))?,
        })
    }

    /// Returns what the backward pass reads after the forward pass wrote `o`.
    pub fn saved(&self, ctx: &Ctx, o: &AttnOut, q: &[Range<usize>]) -> Result<AttnSaved> {
        let d_out = ctx.tensor(&rows_of(&self.d_o, q), self.desc.out)?;
        Ok(AttnSaved { out: o.out.clone(), lse: o.lse.clone(), d_out })
    }

    /// Poisoned gradients.
    pub fn grads(&self, ctx: &Ctx, rows_q: usize, rows_kv: usize) -> Result<AttnGrads> {
        let d = &self.desc;
        let t = |rows, cols| ctx.poisoned(d.out, Shape::d2(rows, cols));
        let wide = |shape| ctx.poisoned(DType::F32, shape);
        Ok(AttnGrads {
            dbias: d.bias.map(|b| wide(Shape::d3(b.heads, b.sq, b.skv))).transpose()?,
            dsink: d.sink.then(|| wide(Shape::d1(d.heads_q))).transpose()?,
            ..AttnGrads::new(
                t(rows_q, d.heads_q * d.dqk)?,
                t(rows_kv, d.heads_kv * d.dqk)?,
                t(rows_kv, d.heads_kv * d.dv)?,
            )
        })
    }

    /// Returns what the oracle says, computed once for all ranks. Collective.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn want_of_all(&self, ctx: &Ctx) -> Result<Want> {
        share(ctx, || self.want())
    }

    /// Returns what the oracle says.
    pub fn want(&self) -> Want {
        let (d, s) = (&self.desc, &self.desc.sequences);
        let spec = oracle::AttnSpec {
            heads_q: d.heads_q,
            heads_kv: d.heads_kv,
            scale: d.scale,
            mask: oracle::AttnMask { left: d.mask.left, right: d.mask.right },
            softcap: d.softcap,
            dropout: d.dropout.map(|x| oracle::Dropout { p: x.p, seed: x.seed }),
        };
        let inputs = oracle::AttnInputs {
            q: &self.q.values,
            k: &self.k.values,
            v: &self.v.values,
            bias: self.bias.as_ref(),
            sink: self.sink.as_deref(),
        };
        let seqs = oracle::Sequences { q: s.q.clone(), kv: s.kv.clone() };
        let out = oracle::attention(&spec, &inputs, &seqs);
        let grads = oracle::attention_bwd(&spec, &inputs, &seqs, &self.d_o);
        // What `Bound::local` allows for one unit of magnitude.
        let unit = 4.0 * DType::F32.unit_roundoff() * (self.k_len() as f64).sqrt();
        let stored = self.desc.out.unit_roundoff() / unit;
        let rounded = self.rounds.map_or(0.0, |t| t.unit_roundoff() / unit);
        let by = Roundings { stored, rounded, scores: self.scores / unit };
        let mag = magnitudes(&spec, &inputs, &seqs, &self.d_o, (&out, by));
        Want { out, grads, mag }
    }

    /// Length of the longest contraction.
    fn k_len(&self) -> usize {
        let (sq, skv) = self.desc.sequences.longest();
        let group = self.desc.heads_q / self.desc.heads_kv;
        self.desc.dqk.max(self.desc.dv) + skv.max(sq * group)
    }

    /// Compares out and lse of the queries `rows`.
    pub fn check_out(
        &self,
        ctx: &mut Ctx,
        w: &Want,
        o: &AttnOut,
        rows: &[Range<usize>],
    ) -> Result<()> {
        let bound = Bound::local(self.desc.out, self.k_len());
        let (want, mag) = (rows_of(&w.out.o, rows), rows_of(&w.mag.o, rows));
        ctx.compare("out", &o.out, &want, &mag, &bound)?;
        // -inf must be -inf; what is finite is compared.
        let pick = |m: &Mat| rows_of(&m.transpose(), rows).transpose();
        let (want, mag) = (pick(&w.out.lse), pick(&w.mag.lse));
        let mut got = o.lse.to_vec::<f32>()?;
        for (g, w) in got.iter_mut().zip(&want.data).filter(|(_, w)| **w == f64::NEG_INFINITY) {
            ctx.check(*g == f32::NEG_INFINITY, || format!("lse: {g} instead of -inf"));
            *g = *w as f32;
        }
        let finite = |x: f64| if x == f64::NEG_INFINITY { 0.0 } else { x };
        let got: Vec<f32> = got.iter().map(|g| finite(f64::from(*g)) as f32).collect();
        let got = Tensor::from_f32(&got, DType::F32, Shape::d1(got.len()))?;
        ctx.compare("lse", &got, &want.map(finite), &mag, &Bound::local(DType::F32, self.k_len()))
    }

    /// Compares the gradients of the rows of a rank. `wire`: in which partial dK and dV travel, and
    /// the number of partials; dbias and dsink are summed over the team if `spread`.
    pub fn check_grads(
        &self,
        ctx: &mut Ctx,
        w: &Want,
        g: &AttnGrads,
        (q, kv): (&[Range<usize>], &[Range<usize>]),
        (wire, num_partials): (DType, usize),
    ) -> Result<()> {
        let own = Bound::local(self.desc.out, self.k_len());
        let (dq, mag) = (rows_of(&w.grads.dq, q), rows_of(&w.mag.dq, q));
        ctx.compare("dq", &g.dq, &dq, &mag, &own)?;
        for (what, got, want, mag) in
            [("dk", &g.dk, &w.grads.dk, &w.mag.dk), ("dv", &g.dv, &w.grads.dv, &w.mag.dv)]
        {
            let bound = Bound { wire, num_partials, ..own };
            ctx.compare(what, got, &rows_of(want, kv), &rows_of(mag, kv), &bound)?;
        }
        let own = Bound { out: DType::F32, ..own };
        let sum = |ctx: &Ctx, t: &Tensor| sum_over_ranks(ctx, t, num_partials > 0);
        if let (Some(t), Some(want), Some(mag)) = (&g.dbias, &w.grads.dbias, &w.mag.dbias) {
            let t = sum(ctx, t)?;
            ctx.compare("dbias", &t, &want.data, mag, &own)?;
        }
        if let (Some(t), Some(want), Some(mag)) = (&g.dsink, &w.grads.dsink, &w.mag.dsink) {
            let t = sum(ctx, t)?;
            let want = Mat::new(1, want.len(), want.clone());
            ctx.compare("dsink", &t, &want, mag, &own)?;
        }
        Ok(())
    }
}

/// The sum of an f32 tensor over the team, if it is a part on each rank.
fn sum_over_ranks(ctx: &Ctx, t: &Tensor, spread: bool) -> Result<Tensor> {
    if !spread {
        return Ok(t.clone());
    }
    let mine: Vec<u8> = t.read(<[u8]>::to_vec)?;
    let mut sum = vec![0.0f64; t.shape().num_elems()];
    for part in ctx.team.exchange("sum", &mine)? {
        let part = Mat::from_bytes(1, sum.len(), DType::F32, &part);
        sum.iter_mut().zip(part.data).for_each(|(s, p)| *s += p);
    }
    let sum: Vec<f32> = sum.iter().map(|s| *s as f32).collect();
    Tensor::from_f32(&sum, DType::F32, t.shape())
}
