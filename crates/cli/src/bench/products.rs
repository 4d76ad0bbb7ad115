//! `tilewire bench` on GPUs of what multiplies: products, products beside a collective, attention.
//!
//! Comm+GEMM operations have a row for each way, timed in the same run: `sequential` by our
//! collective and by NCCL (the faster is `t_seq`), `pipelined` with several chunks, and what
//! `prepare` chooses. `t_gemm` is the product of all rows alone (compute only), `t_comm` the faster
//! of our collective and NCCL's alone. Results are checked element by element on inputs whose
//! products are sums of eight small integers times a power of two, so that they are exact in every
//! type and order; what is timed has random data.

use std::ops::Range;

use tilewire::core::Rng;
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::ops::attention::{
    AttentionDesc, AttentionPlan, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};
use tilewire::ops::collective::{
    CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp,
};
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Strategy};
use tilewire::ops::gemm::{GemmDesc, GemmInputs, GemmPlan};
use tilewire::ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire::ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire::ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};
use tilewire::prelude::*;

use super::device::{Bench, Heads};
use crate::rows::{Row, Spreads, Time};

/// The operations that these functions time.
pub(crate) const OPS: [&str; 8] =
    ["gemm", "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "bulk", "attention", "cp_attention"];

/// Columns of an operand repeat after so many: products are sums of so many terms, times [`times`].
const PERIOD: usize = 8;
/// Groups of grouped products, of random sizes.
const GROUPS: usize = 32;
enum Plan {
    Ag(AgGemmPlan),
    Rs(GemmRsPlan),
    Ar(GemmArPlan),
}

/// Operands and output of a comm+GEMM operation on this rank.
struct Tensors {
    x: Tensor,
    w: Tensor,
    out: Tensor,
}

impl Plan {
    fn new(b: &Bench<'_>, op: &str, config: Option<OverlapConfig>) -> Result<Self> {
        let (m, n, k) = b.sizes();
        let plan = match op {
            "ag_gemm" => {
                Plan::Ag(AgGemmPlan::new(AgGemmDesc::new(m, n, k, b.o.dtype), &b.heap, config)?)
            }
            "gemm_rs" => {
                Plan::Rs(GemmRsPlan::new(GemmRsDesc::new(m, n, k, b.o.dtype), &b.heap, config)?)
            }
            _ => {
                let desc = GemmArDesc(GemmRsDesc::new(m, n, k, b.o.dtype));
                Plan::Ar(GemmArPlan::new(desc, &b.heap, config)?)
            }
        };
        match &plan {
            Plan::Ag(p) => p.prepare(&b.stream)?,
            Plan::Rs(p) => p.prepare(&b.stream)?,
            Plan::Ar(p) => p.prepare(&b.stream)?,
        }
        Ok(plan)
    }

    fn config(&self) -> Result<OverlapConfig> {
        match self {
            Plan::Ag(p) => p.config(),
            Plan::Rs(p) => p.config(),
            Plan::Ar(p) => p.config(),
        }
    }

    fn launch(&self, s: &Stream, m: usize, t: &Tensors) -> Result<()> {
        let (x, w, out) = (t.x.clone(), t.w.clone(), t.out.clone());
        match self {
            Plan::Ag(p) => p.launch(s, m, AgGemmInputs::new(x, w, out))?.join(s).map(|_| ()),
            Plan::Rs(p) => p.launch(s, m, GemmRsInputs::new(x, w, out))?.join(s).map(|_| ()),
            Plan::Ar(p) => p.launch(s, m, GemmRsInputs::new(x, w, out))?.join(s).map(|_| ()),
        }
    }
}

/// -1, 0 or 1 for row `i` of operand `which`, column `j` modulo [`PERIOD`].
fn small(which: usize, i: usize, j: usize) -> f32 {
    let seed = (which as u64) << 48 ^ (i as u64) << 8 ^ j as u64;
    let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as f32 % 3.0 - 1.0
}

/// The first [`PERIOD`] columns of rows of operand `which`.
fn columns(which: usize, rows: Range<usize>) -> Vec<[f32; PERIOD]> {
    rows.map(|i| std::array::from_fn(|j| small(which, i, j))).collect()
}

/// Returns what the sum of one period is multiplied by in a product of `num` of them: a power of
/// two, whose products need no more bits than that sum. At most 512, of which f16 holds the sum of
/// fifteen ranks.
fn times(num: usize) -> usize {
    match num.is_multiple_of(2) {
        true => 1 << num.ilog2().min(9),
        false => 1,
    }
}

/// Returns how many of `num` periods of X have the other sign, so that [`times`] are left. All
/// elements count, and these are the last ones: of periods that took turns no part of K, if left
/// out, would be missed.
fn turned(num: usize) -> usize {
    (num - times(num)) / 2
}

/// A row of operand `which`, `num` times its first columns `row`.
fn whole_row(which: usize, row: &[f32; PERIOD], num: usize) -> impl Iterator<Item = f32> {
    let straight = num - if is_x(which) { turned(num) } else { 0 };
    (0..num).flat_map(move |i| row.map(|v| if i < straight { v } else { -v }))
}

/// Operands of rank `r`.
pub(super) fn x_of(r: usize) -> usize {
    2 * r
}

pub(super) fn w_of(r: usize) -> usize {
    2 * r + 1
}

fn is_x(which: usize) -> bool {
    which.is_multiple_of(2)
}

pub(super) fn tflops(flop: f64, us: f64) -> String {
    format!("{:.1} TFLOP/s", flop / us / 1e6)
}

impl Bench<'_> {
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        self.o.shape
    }

    /// Bytes of the heap that [`Bench::products`] needs.
    pub(crate) fn products_heap(o: &super::device::Options, size: usize) -> usize {
        let (m, n, k) = o.shape;
        let h = Heads::of(o.backend);
        let attention = m * (h.q + 2 * h.kv) * h.width * 4;
        6 * (m + 64 * size) * n.max(k) * o.dtype.size() + 12 * attention
    }

    /// Rows of one operation.
    pub(crate) fn products(&self, op: &str) -> Result<Vec<Row>> {
        let (m, n, k) = self.sizes();
        if m < self.team.size() || n == 0 || k == 0 || !k.is_multiple_of(PERIOD) {
            let text = "m must be at least the number of ranks, n and k must be positive";
            return Err(Error::invalid(format!("m={m} n={n} k={k}: {text}"))
                .hint(format!("k must also be a multiple of {PERIOD}: operands repeat after it")));
        }
        let documents = self.o.documents;
        if documents == 0 || !m.is_multiple_of(documents) {
            return Err(Error::invalid(format!("{m} rows are no {documents} equal documents"))
                .hint("give a number of documents that divides the rows"));
        }
        match op {
            "gemm" => Ok(vec![self.gemm_row()?]),
            "grouped_gemm" => self.grouped_rows(),
            "attention" => self.attention_rows(),
            "cp_attention" => self.cp_rows(),
            "bulk" => self.bulk_rows(),
            _ => self.overlapped(op),
        }
    }

    pub(super) fn shape_text(&self) -> String {
        let (m, n, k) = self.sizes();
        format!("m={m} n={n} k={k}")
    }

    /// Normal numbers: what they are matters to power, not to results.
    pub(super) fn noise(&self, rows: usize, cols: usize) -> Result<Tensor> {
        self.normal(0, self.o.dtype, rows, cols)
    }

    /// Rows `rows` of operand `which`, on the device.
    pub(super) fn exact(&self, which: usize, rows: Range<usize>) -> Result<Tensor> {
        let (num, k) = (rows.len(), self.sizes().2);
        let mut v = Vec::with_capacity(num * k);
        for row in columns(which, rows) {
            v.extend(whole_row(which, &row, k / PERIOD));
        }
        self.place(&v, Shape::d2(num, k))
    }

    /// Elements of `out` (rows `rows` of the product, summed over `pairs` of operands) that are
    /// wrong.
    pub(super) fn count_wrong(
        &self,
        out: &Tensor,
        rows: Range<usize>,
        pairs: &[(usize, usize)],
    ) -> Result<u64> {
        let (_, n, k) = self.sizes();
        let operands: Vec<_> =
            pairs.iter().map(|&(x, w)| (columns(x, rows.clone()), columns(w, 0..n))).collect();
        let got = out.to_f32()?;
        let times = times(k / PERIOD) as f32;
        let mut bad = u64::from(got.len() != rows.len() * n);
        for (i, line) in got.chunks_exact(n).enumerate() {
            for (j, v) in line.iter().enumerate() {
                let dot = |a: &[f32; PERIOD], b: &[f32; PERIOD]| -> f32 {
                    a.iter().zip(b).map(|(a, b)| a * b).sum()
                };
                let sum: f32 = operands.iter().map(|(x, w)| dot(&x[i], &w[j])).sum();
                bad += u64::from(*v != times * sum);
            }
        }
        Ok(bad)
    }

    /// The product alone: microseconds and wrong elements.
    fn gemm(&self) -> Result<(Time, u64)> {
        let (m, n, k) = self.sizes();
        let me = self.team.rank().idx();
        let plan = GemmPlan::new(GemmDesc::nt(m, n, k, self.o.dtype))?;
        plan.prepare(&self.stream)?;
        let (x, w) = (self.exact(x_of(me), 0..m)?, self.exact(w_of(me), 0..n)?);
        let out = self.poisoned(self.o.dtype, Shape::d2(m, n))?;
        plan.launch(&self.stream, GemmInputs::new(&x, &w, out.clone()))?.wait()?;
        let bad = self.count_wrong(&out, 0..m, &[(x_of(me), w_of(me))])?;
        let (x, w) = (self.noise(m, k)?, self.noise(n, k)?);
        let time = self.time(|| {
            let t = GemmInputs::new(&x, &w, out.clone());
            plan.launch(&self.stream, t)?.join(&self.stream).map(|_| ())
        })?;
        Ok((time, self.wrong(bad)?))
    }

    pub(super) fn flop(&self) -> f64 {
        let (m, n, k) = self.sizes();
        2.0 * (m * n) as f64 * k as f64
    }

    fn gemm_row(&self) -> Result<Row> {
        let (t, wrong) = self.gemm()?;
        let row = self.row("gemm", self.shape_text(), t, wrong, tflops(self.flop(), t.us))?;
        Ok(Row { t_gemm_us: Some(t.us), ..row })
    }

    /// A collective alone; `None` without NCCL.
    fn alone(&self, op: &str, backend: CollectiveBackend) -> Result<Option<Time>> {
        let (m, n, k) = self.sizes();
        let mine = self.my_rows()?.len();
        let sum = ReduceOp::Sum;
        let (kind, cols, rows_in, rows_out) = match op {
            "ag_gemm" => (CollectiveKind::AllGather(Shards::Even), k, mine, m),
            "gemm_rs" => (CollectiveKind::ReduceScatter(Shards::Even, sum), n, m, mine),
            _ => (CollectiveKind::AllReduce(sum), n, m, m),
        };
        let desc = CollectiveDesc { kind, m, cols, dtype: self.o.dtype };
        let plan = CollectivePlan::with_backend(desc, &self.heap, backend)?;
        match plan.prepare(&self.stream) {
            Err(e) if e.is_unavailable() || e.is_unsupported() => return Ok(None),
            r => r?,
        }
        let (x, out) =
            (self.noise(rows_in, cols)?, self.poisoned(self.o.dtype, Shape::d2(rows_out, cols))?);
        self.time(|| plan.launch(&self.stream, m, &x, &out)?.join(&self.stream).map(|_| ()))
            .map(Some)
    }

    pub(super) fn my_rows(&self) -> Result<Range<usize>> {
        let rows = Shards::Even.rows(self.sizes().0, self.team.size())?;
        let me = self.team.rank().idx();
        let start: usize = rows[..me].iter().sum();
        Ok(start..start + rows[me])
    }

    /// Exact operands of this rank, random ones, and the rows that it stores.
    fn operands(&self, op: &str) -> Result<(Tensors, Tensors, Range<usize>)> {
        let (m, n, k) = self.sizes();
        let (me, mine) = (self.team.rank().idx(), self.my_rows()?);
        // The gathered X is one matrix, that of rank 0.
        let (which, rows) =
            if op == "ag_gemm" { (x_of(0), mine.clone()) } else { (x_of(me), 0..m) };
        let stored = if op == "gemm_rs" { mine } else { 0..m };
        let out = self.poisoned(self.o.dtype, Shape::d2(stored.len(), n))?;
        let num = rows.len();
        let (x, w) = (self.exact(which, rows)?, self.exact(w_of(me), 0..n)?);
        let noise = Tensors { x: self.noise(num, k)?, w: self.noise(n, k)?, out: out.clone() };
        Ok((Tensors { x, w, out }, noise, stored))
    }

    /// All ways of a comm+GEMM operation.
    fn overlapped(&self, op: &str) -> Result<Vec<Row>> {
        let (size, m, flop) = (self.team.size(), self.sizes().0, self.flop());
        let me = self.team.rank().idx();
        let (t_gemm, gemm_wrong) = self.gemm()?;
        let ours = self.alone(op, CollectiveBackend::Put)?;
        self.heap.collect()?;
        let nccl = self.alone(op, CollectiveBackend::Nccl)?;
        self.heap.collect()?;
        let (exact, noise, stored) = self.operands(op)?;
        let pairs: Vec<_> = match op {
            "ag_gemm" => vec![(x_of(0), w_of(me))],
            _ => (0..size).map(|r| (x_of(r), w_of(r))).collect(),
        };
        let of = |algo, chunks| Some(OverlapConfig::of(algo, chunks));
        let mut ways = vec![of(Algo::Sequential, 1)];
        if nccl.is_some() {
            ways.push(Some(OverlapConfig::by_nccl()));
        }
        ways.extend([1, 2, 4].map(|chunks| of(Algo::Pipelined, chunks)));
        ways.extend([1, 4].map(|chunks| of(Algo::Ring, chunks)));
        ways.push(None);
        let mut rows = Vec::new();
        for config in ways {
            let plan = Plan::new(self, op, config)?;
            exact.out.poison()?;
            plan.launch(&self.stream, m, &exact)?;
            self.stream.synchronize()?;
            self.team.check()?;
            let bad = self.count_wrong(&exact.out, stored.clone(), &pairs)?;
            let t = self.time(|| plan.launch(&self.stream, m, &noise))?;
            let way = match (config, plan.config()?) {
                (Some(_), c) => format!("{op}/{} s{}", c.name(), c.sub_chunks),
                (None, _) => op.to_owned(),
            };
            let text = match config {
                Some(_) => String::new(),
                None => format!("; chosen: {}", plan.config()?),
            };
            let wrong = self.wrong(bad)? + gemm_wrong;
            let note = format!("{}{text}", tflops(flop, t.us));
            rows.push(self.row(&way, self.shape_text(), t, wrong, note)?);
            drop(plan);
            self.heap.collect()?;
        }
        let by_us = |a: &Time, b: &Time| a.us.total_cmp(&b.us);
        let comm_time = ours.into_iter().chain(nccl).min_by(by_us);
        let sequential = rows.iter().filter(|r| r.op.contains("/sequential"));
        let seq = sequential
            .filter_map(|r| Some(Time { us: r.t_ours_us?, spread: r.spread_us.ours? }))
            .min_by(by_us);
        let word = |t: Option<Time>| t.map_or("not here".to_owned(), |t| format!("{:.1} us", t.us));
        let comm = format!("collective alone: puts {}, NCCL {}", word(ours), word(nccl));
        Ok(rows
            .into_iter()
            .map(|r| {
                let note = r.note.as_ref().map(|n| format!("{n}; {comm}"));
                let spread_us = Spreads {
                    gemm: Some(t_gemm.spread),
                    comm: comm_time.map(|t| t.spread),
                    seq: seq.map(|t| t.spread),
                    ..r.spread_us
                };
                let (t_comm_us, t_seq_us) = (comm_time.map(|t| t.us), seq.map(|t| t.us));
                Row { t_gemm_us: Some(t_gemm.us), t_comm_us, t_seq_us, spread_us, note, ..r }
            })
            .collect())
    }

    /// Products of groups with ends at random places: `m` rows in all. Not compared here.
    fn grouped_rows(&self) -> Result<Vec<Row>> {
        let (m, n, k) = self.sizes();
        let mut rng = Rng::new(2);
        let mut ends: Vec<i64> =
            (1..GROUPS).map(|_| rng.below(m as u64 + 1) as i64).chain([m as i64]).collect();
        ends.sort_unstable();
        let ends = Tensor::from_slice(&ends, Shape::d1(GROUPS))?.to(&self.device)?;
        let splits = Splits::ends(&ends);
        let plan = GroupedGemmPlan::new(GroupedDesc::new(GROUPS, m, n, k, self.o.dtype))?;
        plan.prepare(&self.stream)?;
        let (x, dy, w) = (self.noise(m, k)?, self.noise(m, n)?, self.noise(GROUPS * n, k)?);
        let (y, dx) = (
            self.poisoned(self.o.dtype, Shape::d2(m, n))?,
            self.poisoned(self.o.dtype, Shape::d2(m, k))?,
        );
        let dw = self.poisoned(DType::F32, Shape::d2(GROUPS * n, k))?;
        let s = &self.stream;
        let fprop = || {
            let (x, w, splits, out) = ((&x).into(), (&w).into(), splits.clone(), y.clone());
            let t = GroupedFprop { x, w, bias: None, splits, out, aux_out: None };
            plan.fprop(s, t)?.join(s).map(|_| ())
        };
        let dgrad = || {
            let (dy, w, splits, dx) = ((&dy).into(), (&w).into(), splits.clone(), dx.clone());
            plan.dgrad(s, GroupedDgrad { dy, w, splits, dx })?.join(s).map(|_| ())
        };
        let wgrad = || {
            let (x, dy, splits, dw) = ((&x).into(), (&dy).into(), splits.clone(), (&dw).into());
            let t = GroupedWgrad { x, dy, splits, dw, mask: None, dbias: None };
            plan.wgrad(s, t)?.join(s).map(|_| ())
        };
        let passes: [(&str, &dyn Fn() -> Result<()>); 3] =
            [("fprop", &fprop), ("dgrad", &dgrad), ("wgrad", &wgrad)];
        let shape = format!("groups={GROUPS} {}", self.shape_text());
        let row = |(name, launch): (&str, &dyn Fn() -> Result<()>)| {
            let t = self.time(launch)?;
            let row = self.row(
                &format!("grouped_gemm/{name}"),
                shape.clone(),
                t,
                0,
                tflops(self.flop(), t.us),
            )?;
            Ok(Row { t_gemm_us: Some(t.us), max_err: None, ..row })
        };
        passes.into_iter().map(row).collect()
    }
}

/// Tensors of a forward and a backward pass over some rows.
struct Pass {
    x: AttnInputs,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    grads: AttnGrads,
}

impl Pass {
    /// Random; with `flat` all values are one half, and so is every result.
    fn new(b: &Bench<'_>, rows: usize, flat: bool) -> Result<Self> {
        let h = Heads::of(b.o.backend);
        let (q, kv) = (h.q * h.width, h.kv * h.width);
        let v = match flat {
            true => b.place(&vec![0.5; rows * kv], Shape::d2(rows, kv))?,
            false => b.noise(rows, kv)?,
        };
        let x = AttnInputs::new(b.noise(rows, q)?, b.noise(rows, kv)?, v);
        let like = |cols| b.poisoned(b.o.dtype, Shape::d2(rows, cols));
        let grads = AttnGrads::new(like(q)?, like(kv)?, like(kv)?);
        let lse = b.poisoned(DType::F32, Shape::d2(h.q, rows))?;
        Ok(Self { x, out: like(q)?, lse, d_out: b.noise(rows, q)?, grads })
    }

    fn outputs(&self) -> AttnOut {
        AttnOut { out: self.out.clone(), lse: self.lse.clone() }
    }

    fn saved(&self) -> AttnSaved {
        let (out, lse, d_out) = (self.out.clone(), self.lse.clone(), self.d_out.clone());
        AttnSaved { out, lse, d_out }
    }

    /// Results that are not the values' one half, but for rounding; and the largest error.
    fn count_wrong(&self) -> Result<(u64, f64)> {
        let errors: Vec<f32> = self.out.to_f32()?.iter().map(|v| (v - 0.5).abs()).collect();
        // One that is no number is not among the good ones.
        let wrong = errors.len() - errors.iter().filter(|e| **e <= 0.01).count();
        Ok((wrong as u64, f64::from(errors.into_iter().fold(0.0, f32::max))))
    }
}

impl Bench<'_> {
    fn attention_desc(&self) -> AttentionDesc {
        let h = Heads::of(self.o.backend);
        let (m, num) = (self.sizes().0, self.o.documents);
        let d = AttentionDesc::new(m, (h.q, h.kv), h.width, self.o.dtype, AttnMask::CAUSAL);
        AttentionDesc { sequences: Sequences::batched(num, m / num, m / num), ..d }
    }

    /// Rows of both passes of an operation; `flop` of the forward pass on this rank.
    fn passes(
        &self,
        op: &str,
        rows: usize,
        flop: f64,
        fwd: impl Fn(&Pass) -> Result<()>,
        bwd: impl Fn(&Pass) -> Result<()>,
    ) -> Result<Vec<Row>> {
        let flat = Pass::new(self, rows, true)?;
        fwd(&flat)?;
        self.stream.synchronize()?;
        self.team.check()?;
        let (wrong, mine) = flat.count_wrong()?;
        let (wrong, worst) = (self.wrong(wrong)?, self.worst(mine)?);
        drop(flat);
        let p = Pass::new(self, rows, false)?;
        let times =
            [("fwd", self.time(|| fwd(&p))?, flop), ("bwd", self.time(|| bwd(&p))?, 2.5 * flop)];
        let h = Heads::of(self.o.backend);
        let packed = match self.o.documents {
            1 => String::new(),
            num => format!(" documents={num}"),
        };
        let shape = format!("m={} heads={}/{} d={}{packed}", self.sizes().0, h.q, h.kv, h.width);
        let row = |(pass, t, flop): (&str, Time, f64)| {
            let name = format!("{op}/{pass}");
            // The backward pass is compared by `verify` only.
            let r = self.row(&name, shape.clone(), t, wrong, tflops(flop, t.us))?;
            Ok(Row { max_err: r.max_err.filter(|_| pass == "fwd").map(|_| worst), ..r })
        };
        times.into_iter().map(row).collect()
    }

    /// Two products of 2 m^2 d for each document of m rows, half of them visible.
    fn attention_flop(&self) -> f64 {
        let (m, h) = (self.sizes().0, Heads::of(self.o.backend));
        2.0 * (m * m / self.o.documents) as f64 * (h.width * h.q) as f64
    }

    /// All rows on every GPU.
    fn attention_rows(&self) -> Result<Vec<Row>> {
        let plan = AttentionPlan::new(self.attention_desc(), None)?;
        plan.prepare(&self.stream)?;
        let s = &self.stream;
        let fwd = |p: &Pass| plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ());
        let bwd =
            |p: &Pass| plan.launch_bwd(s, &p.x, p.saved(), p.grads.clone())?.join(s).map(|_| ());
        self.passes("attention", self.sizes().0, self.attention_flop(), fwd, bwd)
    }

    fn cp_way(&self, strategy: Strategy, backend: CollectiveBackend) -> Result<Vec<Row>> {
        let (desc, config) = (CpAttentionDesc::new(self.attention_desc()), CpConfig::of(strategy));
        let plan = CpAttentionPlan::with_backend(desc, &self.heap, Some(config), backend)?;
        plan.prepare(&self.stream)?;
        let s = &self.stream;
        let rows = plan.rows_q(None).iter().map(Range::len).sum();
        let fwd = |p: &Pass| plan.launch_fwd(s, &p.x, p.outputs())?.join(s).map(|_| ());
        let bwd =
            |p: &Pass| plan.launch_bwd(s, &p.x, p.saved(), p.grads.clone())?.join(s).map(|_| ());
        let way = if backend == CollectiveBackend::Nccl { "nccl" } else { "put" };
        let name = format!("cp_attention/{strategy}/{way}");
        let flop = self.attention_flop() / self.team.size() as f64;
        let done = self.passes(&name, rows, flop, fwd, bwd)?;
        drop(plan);
        self.heap.collect()?;
        Ok(done)
    }

    /// Each strategy by puts and gets and by NCCL. `t_gemm` is the rank's part of local attention
    /// over all rows, `t_seq` the fastest through NCCL.
    fn cp_rows(&self) -> Result<Vec<Row>> {
        let size = self.team.size();
        let local: Vec<_> = self.attention_rows()?.iter().map(|r| r.t_ours_us).collect();
        let mut rows = Vec::new();
        let h = Heads::of(self.o.backend);
        let trades = h.q.is_multiple_of(size) && h.kv.is_multiple_of(size);
        for strategy in [Strategy::Get, Strategy::AllGather, Strategy::AllToAll] {
            if strategy == Strategy::AllToAll && !trades {
                continue;
            }
            for backend in [CollectiveBackend::Put, CollectiveBackend::Nccl] {
                match self.cp_way(strategy, backend) {
                    Err(e) if e.is_unavailable() || e.is_unsupported() => {}
                    r => rows.extend(r?),
                }
            }
        }
        let of = |pass: &str| {
            let by_nccl = rows.iter().filter(|r| r.op.ends_with(&format!("nccl/{pass}")));
            by_nccl.filter_map(|r| r.t_ours_us).min_by(f64::total_cmp)
        };
        let best = [of("fwd"), of("bwd")];
        let with = |r: Row| {
            let i = usize::from(r.op.ends_with("bwd"));
            let t_gemm_us = local.get(i).copied().flatten().map(|us| us / size as f64);
            Row { t_gemm_us, t_seq_us: best[i], ..r }
        };
        Ok(rows.into_iter().map(with).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 11008, 18944 and 22016 are contractions of models: 1376 periods whose sum is 7 are 9632,
    /// which bf16 has not.
    #[test]
    fn sums_are_exact_for_every_k() {
        let ks =
            (1..=70).map(|i| i * PERIOD).chain([4096, 8192, 11008, 14336, 18944, 22016, 53248]);
        for k in ks {
            let num = k / PERIOD;
            let times = times(num);
            // Sums of the terms of up to eight ranks, each added to those before it.
            let sums: Vec<f32> = (0..=8 * PERIOD).map(|sum| (times * sum) as f32).collect();
            for dtype in [DType::BF16, DType::F16] {
                let held = Tensor::from_f32(&sums, dtype, Shape::d1(sums.len())).unwrap();
                assert_eq!(held.to_f32().unwrap(), sums, "k={k} in {dtype}");
            }
            let (x, w) = (columns(x_of(1), 3..4)[0], columns(w_of(1), 5..6)[0]);
            let (a, b) = (whole_row(x_of(1), &x, num), whole_row(w_of(1), &w, num));
            let dot: f32 = x.iter().zip(&w).map(|(a, b)| a * b).sum();
            assert_eq!(a.zip(b).map(|(a, b)| a * b).sum::<f32>(), times as f32 * dot, "k={k}");
            assert_eq!(whole_row(x_of(0), &x, num).count(), k);
        }
    }
}
