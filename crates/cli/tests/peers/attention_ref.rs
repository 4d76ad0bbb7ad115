//! An attention on global tensors: its inputs, what ranks gave together, and what the oracle says.

use std::collections::BTreeMap;
use std::ops::Range;

use tilewire::core::Rng;
use tilewire::core::numerics::{Bound, compare};
use tilewire::ops::attention::*;
use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::attention as oracle;

use super::attention_mag::{Magnitudes, magnitudes};

/// q, k or v: rounded elements, and under FP8 one scale for each (row, head).
struct Operand {
    data: Mat,
    heads: usize,
    scales: Option<Vec<f32>>,
}

impl Operand {
    fn new(rng: &mut Rng, (rows, heads, d): (usize, usize, usize), dtype: DType, by: f64) -> Self {
        let data = Mat::random(rng, rows, heads * d).map(|x| by * x).rounded(dtype);
        let mut scale = |_| rng.uniform(0.0, 2.0);
        let scales = dtype.is_fp8().then(|| (0..rows * heads).map(&mut scale).collect());
        Self { data, heads, scales }
    }

    /// As the operation reads them, in f32.
    fn values(&self) -> Mat {
        let (mut v, d) = (self.data.to_f32(), self.data.cols / self.heads);
        for (x, s) in v.chunks_exact_mut(d).zip(self.scales.iter().flatten()) {
            x.iter_mut().for_each(|x| *x *= s);
        }
        Mat::from_f32(self.data.rows, self.data.cols, &v)
    }

    fn tensor(&self, dtype: DType, spans: &[Range<usize>]) -> Result<AttnOperand> {
        let rows = rows_of(&self.data, spans);
        let shape = Shape::d3(rows.rows, self.heads, rows.cols / self.heads);
        let data = Tensor::from_f32(&rows.to_f32(), dtype, shape)?;
        let Some(scales) = &self.scales else { return Ok(data.into()) };
        let h = self.heads;
        let mine: Vec<f32> =
            spans.iter().flat_map(|s| &scales[s.start * h..s.end * h]).copied().collect();
        Ok(AttnOperand { data, scales: Some(Tensor::from_slice(&mine, Shape::d2(rows.rows, h))?) })
    }
}

fn rows_of(m: &Mat, spans: &[Range<usize>]) -> Mat {
    Mat::vstack(&spans.iter().map(|s| m.slice_rows(s.clone())).collect::<Vec<_>>())
}

/// What one rank holds and gave.
pub struct Part {
    rows_q: Vec<Range<usize>>,
    rows_kv: Vec<Range<usize>>,
    out: AttnOut,
    grads: AttnGrads,
}

/// Outputs by name, on global rows; `lse` is `[tokens_q, Hq]`.
pub type Results = BTreeMap<&'static str, Vec<f32>>;

pub struct Problem {
    pub desc: AttentionDesc,
    q: Operand,
    k: Operand,
    v: Operand,
    d_out: Mat,
    bias: Option<oracle::Bias>,
    sink: Option<Vec<f64>>,
}

impl Problem {
    pub fn new(rng: &mut Rng, desc: AttentionDesc, q_factor: f64, zero_sink: bool) -> Self {
        let (a, s) = (&desc, &desc.sequences);
        let q = Operand::new(rng, (s.tokens_q, a.heads_q, a.dqk), a.dtype, q_factor);
        let k = Operand::new(rng, (s.tokens_kv, a.heads_kv, a.dqk), a.dtype, 1.0);
        let v = Operand::new(rng, (s.tokens_kv, a.heads_kv, a.dv), a.dtype, 1.0);
        let d_out = Mat::random(rng, s.tokens_q, a.heads_q * a.dv).rounded(a.out);
        let bias = a.bias.map(|b| {
            oracle::Bias::new(b.heads, b.sq, b.skv, Mat::random(rng, b.heads * b.sq, b.skv))
        });
        let by = if zero_sink { 0.0 } else { 1.0 };
        let sink = a.sink.then(|| Mat::random(rng, 1, a.heads_q).map(|x| by * x).data);
        Self { desc, q, k, v, d_out, bias, sink }
    }

    /// Both passes on the rows of a rank, into poisoned tensors.
    pub fn pass(
        &self,
        (rows_q, rows_kv): (Vec<Range<usize>>, Vec<Range<usize>>),
        forward: impl FnOnce(&AttnInputs, AttnOut) -> Result<AttnOut>,
        backward: impl FnOnce(&AttnInputs, AttnSaved, AttnGrads) -> Result<AttnGrads>,
    ) -> Result<Part> {
        let a = &self.desc;
        let count = |spans: &[Range<usize>]| spans.iter().map(|s| s.len()).sum::<usize>();
        let (nq, nkv) = (count(&rows_q), count(&rows_kv));
        let f32s = |m: &Mat, shape| Tensor::from_f32(&m.to_f32(), DType::F32, shape);
        let mut x = AttnInputs::new(
            self.q.tensor(a.dtype, &rows_q)?,
            self.k.tensor(a.dtype, &rows_kv)?,
            self.v.tensor(a.dtype, &rows_kv)?,
        );
        if let Some(b) = &self.bias {
            x.bias = Some(f32s(&b.data, Shape::d3(b.heads, b.sq, b.skv))?);
        }
        if let Some(s) = &self.sink {
            x.sink = Some(f32s(&Mat::new(1, s.len(), s.clone()), Shape::d1(s.len()))?);
        }
        let new = |rows, cols| Tensor::poisoned(a.out, Shape::d2(rows, cols));
        let lse = Tensor::poisoned(DType::F32, Shape::d2(a.heads_q, nq));
        let out = forward(&x, AttnOut { out: new(nq, a.heads_q * a.dv), lse })?;
        let d_out = rows_of(&self.d_out, &rows_q).to_f32();
        let d_out = Tensor::from_f32(&d_out, a.out, Shape::d2(nq, a.heads_q * a.dv))?;
        let (dq, dk) = (new(nq, a.heads_q * a.dqk), new(nkv, a.heads_kv * a.dqk));
        let like = |t: &Option<Tensor>| t.as_ref().map(|t| Tensor::poisoned(DType::F32, t.shape()));
        let grads = AttnGrads {
            dbias: like(&x.bias),
            dsink: like(&x.sink),
            ..AttnGrads::new(dq, dk, new(nkv, a.heads_kv * a.dv))
        };
        let saved = AttnSaved { out: out.out.clone(), lse: out.lse.clone(), d_out };
        let grads = backward(&x, saved, grads)?;
        Ok(Part { rows_q, rows_kv, out, grads })
    }

    /// The global outputs. A row that no rank holds stays NaN.
    pub fn assemble(&self, parts: &[Part]) -> Results {
        let a = &self.desc;
        let (nq, nkv) = (a.sequences.tokens_q, a.sequences.tokens_kv);
        let mut all = Results::new();
        all.insert("out", scatter(nq, a.heads_q * a.dv, parts, |p| (&p.rows_q, &p.out.out)));
        all.insert("dq", scatter(nq, a.heads_q * a.dqk, parts, |p| (&p.rows_q, &p.grads.dq)));
        all.insert("dk", scatter(nkv, a.heads_kv * a.dqk, parts, |p| (&p.rows_kv, &p.grads.dk)));
        all.insert("dv", scatter(nkv, a.heads_kv * a.dv, parts, |p| (&p.rows_kv, &p.grads.dv)));
        let mut lse = vec![f32::NAN; nq * a.heads_q];
        for p in parts {
            let got = p.out.lse.to_f32().unwrap();
            let rows: Vec<usize> = p.rows_q.iter().cloned().flatten().collect();
            for (at, value) in got.iter().enumerate() {
                let (head, row) = (at / rows.len(), rows[at % rows.len()]);
                lse[row * a.heads_q + head] = *value;
            }
        }
        all.insert("lse", lse);
        // Each rank has what its own queries (or heads) contribute.
        let sum = |pick: fn(&Part) -> &Option<Tensor>| -> Option<Vec<f32>> {
            let mut each = parts.iter().map(|p| Some(pick(p).as_ref()?.to_f32().unwrap()));
            let first = each.next()??;
            Some(each.flatten().fold(first, |s, x| s.iter().zip(x).map(|(s, x)| s + x).collect()))
        };
        all.extend(sum(|p| &p.grads.dbias).map(|v| ("dbias", v)));
        all.extend(sum(|p| &p.grads.dsink).map(|v| ("dsink", v)));
        all
    }

    /// What the oracle says, on two threads: it is most of the time of a row.
    pub fn want(&self) -> Want {
        let a = &self.desc;
        let spec = oracle::AttnSpec {
            heads_q: a.heads_q,
            heads_kv: a.heads_kv,
            scale: a.scale,
            mask: oracle::AttnMask { left: a.mask.left, right: a.mask.right },
            softcap: a.softcap,
            dropout: None,
        };
        let [q, k, v] = [&self.q, &self.k, &self.v].map(Operand::values);
        let (bias, sink) = (self.bias.as_ref(), self.sink.as_deref());
        let x = oracle::AttnInputs { q: &q, k: &k, v: &v, bias, sink };
        let seqs = oracle::Sequences { q: a.sequences.q.clone(), kv: a.sequences.kv.clone() };
        std::thread::scope(|s| {
            let grads = s.spawn(|| oracle::attention_bwd(&spec, &x, &seqs, &self.d_out));
            let out = oracle::attention(&spec, &x, &seqs);
            let mag = magnitudes(&spec, &x, &seqs, &self.d_out, &out);
            let (sq, skv) = a.sequences.longest();
            let k_len = a.dqk.max(a.dv) + skv.max(sq * (a.heads_q / a.heads_kv));
            Want { out, grads: grads.join().unwrap(), mag, dtype: a.out, k_len }
        })
    }
}

fn scatter<'a>(
    rows: usize,
    cols: usize,
    parts: &'a [Part],
    pick: impl Fn(&'a Part) -> (&'a Vec<Range<usize>>, &'a Tensor),
) -> Vec<f32> {
    let mut all = vec![f32::NAN; rows * cols];
    for (spans, tensor) in parts.iter().map(pick) {
        let mut got = tensor.to_f32().unwrap().into_iter();
        for at in spans.iter().flat_map(|s| s.start * cols..s.end * cols) {
            all[at] = got.next().unwrap();
        }
    }
    all
}

/// The reference.
pub struct Want {
    out: oracle::AttnOut,
    grads: oracle::AttnGrads,
    mag: Magnitudes,
    dtype: DType,
    k_len: usize,
}

impl Want {
    /// Compares every element under the rule of the design (`ranks` of 0: nothing travelled), and
    /// returns the RMS error of each output.
    ///
    /// # Errors
    /// The first element that is wrong.
    pub fn check(
        &self,
        got: &Results,
        ranks: usize,
    ) -> std::result::Result<BTreeMap<&'static str, f64>, String> {
        let f32s = Bound::local(DType::F32, self.k_len);
        let local = Bound { out: self.dtype, ..f32s };
        // Partial dK and dV travel in f32.
        let summed = Bound { num_partials: ranks, ..local };
        let dsink = self.grads.dsink.as_ref().map(|s| Mat::new(1, s.len(), s.clone()));
        let lse = (self.out.lse.transpose(), self.mag.lse.transpose());
        let (m, g) = (&self.mag, &self.grads);
        let mut list = vec![
            ("out", &self.out.o, &m.out, None, local),
            ("lse", &lse.0, &lse.1, None, f32s),
            ("dq", &g.dq, &m.dq.all, Some(&m.dq.stored), local),
            ("dk", &g.dk, &m.dk.all, Some(&m.dk.stored), summed),
            ("dv", &g.dv, &m.dv, None, summed),
        ];
        if let (Some(want), Some(m)) = (&g.dbias, &m.dbias) {
            list.push(("dbias", &want.data, &m.all, Some(&m.stored), f32s));
        }
        if let (Some(want), Some(m)) = (&dsink, &m.dsink) {
            list.push(("dsink", want, &m.all, Some(&m.stored), f32s));
        }
        if list.len() != got.len() {
            return Err(format!("{} outputs instead of {}", got.len(), list.len()));
        }
        let u = self.dtype.unit_roundoff();
        let one = |(what, want, mag, stored, bound): (_, &Mat, &Mat, Option<&Mat>, Bound)| {
            let allowed =
                |i: usize, w| bound.allowed(w, mag.data[i]) + u * stored.map_or(0.0, |s| s.data[i]);
            Ok((what, element(what, &got[what], want, allowed)?))
        };
        list.into_iter().map(one).collect()
    }
}

fn element(
    what: &str,
    got: &[f32],
    want: &Mat,
    allowed: impl Fn(usize, f64) -> f64,
) -> std::result::Result<f64, String> {
    if got.len() != want.data.len() {
        return Err(format!("{what}: {} elements instead of {}", got.len(), want.data.len()));
    }
    // Where nothing is visible, lse must be -inf; a bound that grows with it would allow anything.
    let pick = |i: usize| match (got[i], want.data[i]) {
        (f32::NEG_INFINITY, f64::NEG_INFINITY) => (0.0, 0.0),
        (g, f64::NEG_INFINITY) => (g, f64::NAN),
        pair => pair,
    };
    let (g, w): (Vec<f32>, Vec<f64>) = (0..got.len()).map(pick).unzip();
    let c = compare(&g, &w, |i| allowed(i, w[i]));
    match c.first_wrong {
        None => Ok(c.rms_err),
        Some(i) => Err(format!(
            "{what}: {} of {} wrong; element {i} is {}, not {}",
            c.num_wrong, c.num_elems, got[i], want.data[i]
        )),
    }
}

/// One element that is wrong, missing or not a number is found, in every output.
#[test]
fn one_wrong_element_is_refused() {
    let mut desc = AttentionDesc::new(9, (4, 2), 8, DType::BF16, AttnMask::CAUSAL);
    // The first sequence has no key: its queries have lse = -inf.
    desc.sequences = Sequences::packed(&[0, 3, 9], &[0, 0, 9]).unwrap();
    desc.bias = Some(BiasShape { heads: 4, sq: 6, skv: 9 });
    let p = Problem::new(&mut Rng::new(3), desc, 1.0, false);
    let want = p.want();
    let f32s = |m: &Mat| m.to_f32();
    let mut right = Results::from([
        ("out", f32s(&want.out.o)),
        ("lse", f32s(&want.out.lse.transpose())),
        ("dq", f32s(&want.grads.dq)),
        ("dk", f32s(&want.grads.dk)),
        ("dv", f32s(&want.grads.dv)),
    ]);
    assert!(want.check(&right, 1).unwrap_err().contains("outputs"));
    right.insert("dbias", f32s(&want.grads.dbias.as_ref().unwrap().data));
    want.check(&right, 1).unwrap();
    for what in right.keys() {
        for at in [0, right[what].len() - 1] {
            for bad in [right[what][at] + 1.0, 1e9, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut got = right.clone();
                got.get_mut(what).unwrap()[at] = bad;
                let same = right[what][at] == bad;
                assert_eq!(want.check(&got, 1).is_ok(), same, "{what}[{at}] = {bad}");
            }
        }
    }
}
