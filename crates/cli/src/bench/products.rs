//! `tilewire bench` of what multiplies: products, and products beside a collective.
//!
//! Comm+GEMM operations have a row for each way, sampled in turn, so that the card's clock, which
//! power limits, is one for all: `sequential` by our collective and by NCCL (the faster is
//! `t_seq`), `pipelined` with several chunks, and what `prepare` chooses. `t_gemm` is the product
//! of all rows alone (compute only), `t_comm` the faster of our collective and NCCL's alone, both
//! sampled in the same turns. Results are checked element by element on inputs whose
//! products are sums of eight small integers times a power of two, so that they are exact in every
//! type and order; what is timed has random data.

use std::ops::Range;
use std::thread;

use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::ops::collective::{
    CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp,
};
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::gemm::{GemmDesc, GemmInputs, GemmPlan};
use tilewire::ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire::ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire::prelude::*;

use super::device::{Bench, Heads};
use crate::rows::{Row, Spreads, Time};

/// The operations that these functions time.
pub(crate) const OPS: [&str; 8] =
    ["gemm", "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "bulk", "attention", "cp_attention"];

/// Columns of an operand repeat after so many: products are sums of so many terms, times [`times`].
pub(super) const PERIOD: usize = 8;

enum Plan {
    Ag(AgGemmPlan),
    Rs(GemmRsPlan),
    Ar(GemmArPlan),
}

/// A function that queues one run.
pub(super) type Queued<'a> = Box<dyn Fn() -> Result<()> + 'a>;

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
pub(super) fn columns(which: usize, rows: Range<usize>) -> Vec<[f32; PERIOD]> {
    rows.map(|i| std::array::from_fn(|j| small(which, i, j))).collect()
}

/// Returns what the sum of one period is multiplied by in a product of `num` of them: a power of
/// two, whose products need no more bits than that sum. At most 512, of which f16 holds the sum of
/// fifteen ranks.
pub(super) fn times(num: usize) -> usize {
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
pub(super) fn whole_row(
    which: usize,
    row: &[f32; PERIOD],
    num: usize,
) -> impl Iterator<Item = f32> {
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

    /// Bytes of the heap that [`Bench::products`] needs for `op`. All ways of a row have plans at
    /// once: ten of them, with up to four matrices each.
    pub(crate) fn products_heap(o: &super::device::Options, size: usize, op: &str) -> usize {
        let (m, n, k) = o.shape;
        let h = Heads::of(o.backend);
        let attention = m * (h.q + 2 * h.kv) * h.width * 4;
        let matrix = (m + 64 * size) * n.max(k) * o.dtype.size();
        match op {
            "cp_attention" => 24 * attention,
            "ag_gemm" | "gemm_rs" | "gemm_ar" => 40 * matrix,
            _ => 6 * matrix,
        }
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
        let dot = |a: &[f32; PERIOD], b: &[f32; PERIOD]| -> f32 {
            a.iter().zip(b).map(|(a, b)| a * b).sum()
        };
        let wrong = |(i, line): (usize, &[f32])| {
            let sum = |j: usize| operands.iter().map(|(x, w)| dot(&x[i], &w[j])).sum::<f32>();
            line.iter().enumerate().filter(|(j, v)| **v != times * sum(*j)).count() as u64
        };
        // Ranks are threads of one process mostly, each of which compares its own.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let some = rows.len().div_ceil((cores / self.team.size()).max(1)).max(1);
        let bad: u64 = thread::scope(|s| {
            let count = |(at, part)| {
                let lines = <[f32]>::chunks_exact(part, n).enumerate();
                s.spawn(move || lines.map(|(i, line)| wrong((at * some + i, line))).sum::<u64>())
            };
            let parts: Vec<_> = got.chunks(some * n).enumerate().map(count).collect();
            // A thread that panicked has compared nothing.
            parts
                .into_iter()
                .map(|part| part.join().unwrap_or(u64::MAX))
                .fold(0, u64::saturating_add)
        });
        Ok(bad.saturating_add(u64::from(got.len() != rows.len() * n)))
    }

    /// The product alone, on random operands, and the wrong elements of its result on exact ones.
    fn gemm(&self) -> Result<(Queued<'_>, u64)> {
        let (m, n, k) = self.sizes();
        let me = self.team.rank().idx();
        let plan = GemmPlan::new(GemmDesc::nt(m, n, k, self.o.dtype))?;
        plan.prepare(&self.stream)?;
        let (x, w) = (self.exact(x_of(me), 0..m)?, self.exact(w_of(me), 0..n)?);
        let out = self.poisoned(self.o.dtype, Shape::d2(m, n))?;
        plan.launch(&self.stream, GemmInputs::new(&x, &w, out.clone()))?.wait()?;
        let bad = self.count_wrong(&out, 0..m, &[(x_of(me), w_of(me))])?;
        let (x, w) = (self.noise(m, k)?, self.noise(n, k)?);
        let queued = move || {
            let t = GemmInputs::new(&x, &w, out.clone());
            plan.launch(&self.stream, t)?.join(&self.stream).map(|_| ())
        };
        Ok((Box::new(queued), self.wrong(bad)?))
    }

    pub(super) fn flop(&self) -> f64 {
        let (m, n, k) = self.sizes();
        2.0 * (m * n) as f64 * k as f64
    }

    fn gemm_row(&self) -> Result<Row> {
        let (gemm, wrong) = self.gemm()?;
        let t = self.time(gemm)?;
        let row = self.row("gemm", self.shape_text(), t, wrong, tflops(self.flop(), t.us))?;
        Ok(Row { t_gemm_us: Some(t.us), ..row })
    }

    /// A collective alone; `None` without NCCL.
    fn alone(&self, op: &str, backend: CollectiveBackend) -> Result<Option<Queued<'_>>> {
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
        Ok(Some(Box::new(move || {
            plan.launch(&self.stream, m, &x, &out)?.join(&self.stream).map(|_| ())
        })))
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
        let (gemm, gemm_wrong) = self.gemm()?;
        let ours = self.alone(op, CollectiveBackend::Put)?;
        let nccl = self.alone(op, CollectiveBackend::Nccl)?;
        let (exact, noise, stored) = self.operands(op)?;
        let pairs: Vec<_> = match op {
            "ag_gemm" => vec![(x_of(0), w_of(me))],
            _ => (0..size).map(|r| (x_of(r), w_of(r))).collect(),
        };
        let of = |algo, chunks| Some(OverlapConfig::of(algo, chunks));
        let mut configs = vec![of(Algo::Sequential, 1)];
        if nccl.is_some() {
            configs.push(Some(OverlapConfig::by_nccl()));
        }
        configs.extend([1, 2, 4].map(|chunks| of(Algo::Pipelined, chunks)));
        configs.extend([1, 4].map(|chunks| of(Algo::Ring, chunks)));
        configs.push(None);
        let mut ways = Vec::new();
        for config in configs {
            let plan = Plan::new(self, op, config)?;
            exact.out.poison()?;
            plan.launch(&self.stream, m, &exact)?;
            self.stream.synchronize()?;
            self.team.check()?;
            let bad = self.count_wrong(&exact.out, stored.clone(), &pairs)?;
            ways.push((config, plan, self.wrong(bad)? + gemm_wrong));
        }
        let launches: Vec<_> =
            ways.iter().map(|(_, plan, _)| || plan.launch(&self.stream, m, &noise)).collect();
        // The parts, then the ways.
        let parts = [Some(&gemm), ours.as_ref(), nccl.as_ref()];
        let queued = parts.into_iter().flatten().map(|part| part as &dyn Fn() -> Result<()>);
        let queued: Vec<_> = queued.chain(launches.iter().map(|l| l as _)).collect();
        let mut times = self.in_turn(&queued, || Ok(()))?.into_iter();
        let mut next = || times.next().ok_or_else(|| Error::internal("each way has a time"));
        let t_gemm = next()?;
        let ours = ours.is_some().then(&mut next).transpose()?;
        let nccl = nccl.is_some().then(&mut next).transpose()?;
        let mut rows = Vec::new();
        for (config, plan, wrong) in &ways {
            let (t, chosen) = (next()?, plan.config()?);
            let (way, text) = match config {
                Some(_) => {
                    (format!("{op}/{} s{}", chosen.name(), chosen.sub_chunks), String::new())
                }
                None => (op.to_owned(), format!("; chosen: {chosen}")),
            };
            let note = format!("{}{text}", tflops(flop, t.us));
            rows.push(self.row(&way, self.shape_text(), t, *wrong, note)?);
        }
        drop(queued);
        drop(launches);
        drop(ways);
        self.heap.collect()?;
        Ok(with_parts(rows, t_gemm, [ours, nccl]))
    }
}

/// The rows of all ways, with the product alone, and the collective by puts and by NCCL.
fn with_parts(rows: Vec<Row>, t_gemm: Time, [ours, nccl]: [Option<Time>; 2]) -> Vec<Row> {
    let by_us = |a: &Time, b: &Time| a.us.total_cmp(&b.us);
    let comm_time = ours.into_iter().chain(nccl).min_by(by_us);
    let sequential = rows.iter().filter(|r| r.op.contains("/sequential"));
    let seq = sequential
        .filter_map(|r| Some(Time { us: r.t_ours_us?, spread: r.spread_us.ours? }))
        .min_by(by_us);
    let word = |t: Option<Time>| t.map_or("not here".to_owned(), |t| format!("{:.1} us", t.us));
    let comm = format!("collective alone: puts {}, NCCL {}", word(ours), word(nccl));
    let with = |r: Row| {
        let note = r.note.as_ref().map(|n| format!("{n}; {comm}"));
        let spread_us = Spreads {
            gemm: Some(t_gemm.spread),
            comm: comm_time.map(|t| t.spread),
            seq: seq.map(|t| t.spread),
            ..r.spread_us
        };
        let (t_comm_us, t_seq_us) = (comm_time.map(|t| t.us), seq.map(|t| t.us));
        Row { t_gemm_us: Some(t_gemm.us), t_comm_us, t_seq_us, spread_us, note, ..r }
    };
    rows.into_iter().map(with).collect()
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
