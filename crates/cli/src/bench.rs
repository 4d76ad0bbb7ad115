//! `tilewire bench`: times of the comm+GEMM operations and of the collectives beside their parts,
//! each result checked in the same run.
//!
//! Columns: `t_gemm` the product alone, `t_comm` the collective alone, `t_seq` one after the other
//! (the baseline), `t_ours` the operation as its cost model chooses. A time is the median over
//! iterations of the slowest rank. Hidden = (t_gemm + t_comm - t_ours) / min(t_gemm, t_comm).

use std::time::Instant;

use tilewire::core::Rng;
use tilewire::core::numerics::{Bound, compare};
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::gemm::{GemmDesc, GemmInputs, GemmPlan};
use tilewire::ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire::ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire::prelude::*;
use tilewire_oracle::Mat;

use crate::rows::Row;

/// What to time.
#[derive(Clone, Debug)]
pub struct Options {
    /// Operations.
    pub ops: Vec<String>,
    /// Element type.
    pub dtype: DType,
    /// Global rows.
    pub m: usize,
    /// Columns per rank (AG) or in all (RS, AR, collectives).
    pub n: usize,
    /// Contraction per rank.
    pub k: usize,
    /// Timed iterations.
    pub iters: usize,
    /// Untimed iterations before.
    pub warmup: usize,
}

/// Operations that can be timed.
pub const OPS: [&str; 7] =
    ["ag_gemm", "gemm_rs", "gemm_ar", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"];

struct Bench<'a> {
    o: &'a Options,
    team: LiveTeam,
    heap: Heap,
    stream: Stream,
    x: Mat,
    w: Mat,
}

/// Collective: one row per operation; the same on every rank.
///
/// # Errors
/// `InvalidArgument` for an unknown operation; the fault of the team.
pub fn run(world: &World, o: &Options, mut progress: impl FnMut(&str)) -> Result<Vec<Row>> {
    if let Some(bad) = o.ops.iter().find(|op| !OPS.contains(&op.as_str())) {
        return Err(Error::invalid(format!(
            "unknown operation `{bad}`; one of {}",
            OPS.join(", ")
        )));
    }
    if o.iters == 0 || o.m == 0 || o.n == 0 || o.k == 0 {
        return Err(Error::invalid("sizes and iterations must be positive"));
    }
    let mut rows = Vec::new();
    for op in &o.ops {
        progress(op);
        let team = world.everyone("bench")?;
        let widest = o.n.max(o.k) * 4;
        let heap =
            team.heap(BackendKind::Host, HeapCfg::new((1 << 20) + 8 * (o.m + 64) * widest))?;
        // Integers: every partial sum is exact, so results must be exact too.
        let mut rng = Rng::new(1 + team.rank().idx() as u64);
        let b = Bench {
            o,
            stream: Stream::new("bench")?,
            x: Mat::random_ints(&mut rng, o.m, o.k, 1),
            w: Mat::random_ints(&mut Rng::new(99), o.n, o.k, 1),
            team,
            heap,
        };
        rows.push(b.row(op)?);
    }
    Ok(rows)
}

impl Bench<'_> {
    fn tensor(&self, m: &Mat) -> Result<Tensor> {
        Tensor::from_f32(&m.to_f32(), self.o.dtype, Shape::d2(m.rows, m.cols))
    }

    fn empty(&self, rows: usize, cols: usize) -> Tensor {
        Tensor::poisoned(self.o.dtype, Shape::d2(rows, cols))
    }

    /// Median over iterations of the slowest rank, microseconds.
    fn time(&self, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
        let mut times = Vec::with_capacity(self.o.iters);
        for i in 0..self.o.warmup + self.o.iters {
            self.team.exchange("align", &[])?;
            let start = Instant::now();
            f()?;
            let mine = start.elapsed().as_secs_f64() * 1e6;
            let all = self.team.exchange("time", &mine.to_le_bytes())?;
            let slowest = all
                .iter()
                .filter_map(|b| Some(f64::from_le_bytes(b.as_slice().try_into().ok()?)))
                .fold(0.0, f64::max);
            if i >= self.o.warmup {
                times.push(slowest);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn collective(&self, kind: CollectiveKind, cols: usize) -> Result<(f64, Tensor, Tensor)> {
        let (m, size) = (self.o.m, self.team.size());
        let mine = Shards::Even.rows(m, size)?[self.team.rank().idx()];
        let (rows_in, rows_out) = match &kind {
            CollectiveKind::AllGather(_) => (mine, m),
            CollectiveKind::ReduceScatter(..) => (m, mine),
            CollectiveKind::AllReduce(_) => (m, m),
            CollectiveKind::AllToAll(s) => {
                let me = self.team.rank().idx();
                (s[me].iter().sum(), s.iter().map(|r| r[me]).sum())
            }
        };
        let mut rng = Rng::new(7 + self.team.rank().idx() as u64);
        let x = self.tensor(&Mat::random_ints(&mut rng, rows_in, cols, 2))?;
        let out = self.empty(rows_out, cols);
        let desc = CollectiveDesc { kind, m, cols, dtype: self.o.dtype };
        let plan = CollectivePlan::new(desc, &self.heap)?;
        plan.prepare(&self.stream)?;
        let t = self.time(|| plan.launch(&self.stream, m, &x, &out)?.wait().map(|_| ()))?;
        Ok((t, x, out))
    }

    fn gemm(&self, m: usize, n: usize) -> Result<f64> {
        let plan = GemmPlan::new(GemmDesc::nt(m, n, self.o.k, self.o.dtype))?;
        plan.prepare(&self.stream)?;
        let (x, w, out) = (self.tensor(&self.x)?, self.tensor(&self.w)?, self.empty(m, n));
        self.time(|| {
            plan.launch(&self.stream, GemmInputs::new(&x, &w, out.clone()))?.wait().map(|_| ())
        })
    }

    /// Everybody's X, in rank order.
    fn all_x(&self) -> Vec<Mat> {
        (0..self.team.size())
            .map(|r| Mat::random_ints(&mut Rng::new(1 + r as u64), self.o.m, self.o.k, 1))
            .collect()
    }

    fn row(&self, op: &str) -> Result<Row> {
        let (o, me) = (self.o, self.team.rank());
        let (m, n, k) = (o.m, o.n, o.k);
        let rows = Shards::Even.rows(m, self.team.size())?;
        let start: usize = rows[..me.idx()].iter().sum();
        let mine = start..start + rows[me.idx()];
        let seq = Some(OverlapConfig::of(Algo::Sequential, 1));
        let (t_gemm, t_comm, t_seq, t_ours, out, want) = match op {
            "ag_gemm" => {
                // The gathered X is everybody's part of one matrix.
                let x_all = self.all_x().swap_remove(0);
                let x = self.tensor(&x_all.slice_rows(mine))?;
                let (w, out) = (self.tensor(&self.w)?, self.empty(m, n));
                let run = |config| {
                    let plan =
                        AgGemmPlan::new(AgGemmDesc::new(m, n, k, o.dtype), &self.heap, config)?;
                    plan.prepare(&self.stream)?;
                    self.time(|| {
                        let t = AgGemmInputs::new(x.clone(), w.clone(), out.clone());
                        plan.launch(&self.stream, m, t)?.wait().map(|_| ())
                    })
                };
                let t_comm = self.collective(CollectiveKind::AllGather(Shards::Even), k)?.0;
                let (t_seq, t_ours) = (run(seq)?, run(None)?);
                let want = tilewire_oracle::matmul(&x_all, &self.w.transpose());
                (Some(self.gemm(m, n)?), Some(t_comm), Some(t_seq), t_ours, out, want)
            }
            "gemm_rs" | "gemm_ar" => {
                let scatter = op == "gemm_rs";
                let (x, w) = (self.tensor(&self.x)?, self.tensor(&self.w)?);
                let out = self.empty(if scatter { rows[me.idx()] } else { m }, n);
                let desc = GemmRsDesc::new(m, n, k, o.dtype);
                let run = |config| {
                    let t = || GemmRsInputs::new(x.clone(), w.clone(), out.clone());
                    if scatter {
                        let plan = GemmRsPlan::new(desc.clone(), &self.heap, config)?;
                        plan.prepare(&self.stream)?;
                        self.time(|| plan.launch(&self.stream, m, t())?.wait().map(|_| ()))
                    } else {
                        let plan = GemmArPlan::new(GemmArDesc(desc.clone()), &self.heap, config)?;
                        plan.prepare(&self.stream)?;
                        self.time(|| plan.launch(&self.stream, m, t())?.wait().map(|_| ()))
                    }
                };
                let kind = match scatter {
                    true => CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum),
                    false => CollectiveKind::AllReduce(ReduceOp::Sum),
                };
                let t_comm = self.collective(kind, n)?.0;
                let (t_seq, t_ours) = (run(seq)?, run(None)?);
                let sum = self.all_x().into_iter().reduce(|a, b| a.add(&b));
                let sum = sum.ok_or_else(|| Error::internal("a team without ranks"))?;
                let mut want = tilewire_oracle::matmul(&sum, &self.w.transpose());
                if scatter {
                    want = want.slice_rows(mine);
                }
                (Some(self.gemm(m, n)?), Some(t_comm), Some(t_seq), t_ours, out, want)
            }
            _ => return self.collective_row(op),
        };
        self.finish(op, (t_gemm, t_comm, t_seq, t_ours), &out, &want)
    }

    fn collective_row(&self, op: &str) -> Result<Row> {
        let (o, size) = (self.o, self.team.size());
        let kind = match op {
            "all_gather" => CollectiveKind::AllGather(Shards::Even),
            "reduce_scatter" => CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum),
            "all_reduce" => CollectiveKind::AllReduce(ReduceOp::Sum),
            _ => CollectiveKind::AllToAll(vec![vec![o.m / size; size]; size]),
        };
        let (t, x, out) = self.collective(kind, o.n)?;
        // What every rank gave, to compare with.
        let bytes = x.read(|b| b.to_vec())?;
        let all = self.team.exchange_large("inputs", &bytes)?;
        let inputs: Vec<Mat> = all
            .iter()
            .map(|b| Mat::from_bytes(b.len() / o.dtype.size() / o.n, o.n, o.dtype, b))
            .collect();
        let me = self.team.rank().idx();
        use tilewire_oracle::collective as oracle;
        let rows = Shards::Even.rows(o.m, size)?;
        let want = match op {
            "all_gather" => oracle::all_gather(&inputs),
            "reduce_scatter" => oracle::reduce_scatter(&inputs, &rows, oracle::ReduceOp::Sum),
            "all_reduce" => oracle::all_reduce(&inputs, oracle::ReduceOp::Sum),
            _ => oracle::all_to_all(&inputs),
        };
        self.finish(op, (None, None, None, t), &out, &want[me])
    }

    fn finish(
        &self,
        op: &str,
        times: (Option<f64>, Option<f64>, Option<f64>, f64),
        out: &Tensor,
        want: &Mat,
    ) -> Result<Row> {
        let bound = Bound {
            out: self.o.dtype,
            wire: self.o.dtype,
            acc: DType::F32,
            num_partials: self.team.size(),
            k: self.o.k,
        };
        let c = compare(&out.to_f32()?, &want.data, |i| {
            bound.allowed(want.data[i], want.data[i].abs())
        });
        let word = [c.max_err.to_le_bytes(), (c.num_wrong as f64).to_le_bytes()].concat();
        let all = self.team.exchange("compared", &word)?;
        let number = |b: &[u8]| b.try_into().map(f64::from_le_bytes).unwrap_or(f64::NAN);
        let max_err = all
            .iter()
            .map(|b| number(&b[..8]))
            .fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
        Ok(Row {
            op: op.to_owned(),
            backend: "host".to_owned(),
            device: "cpu".to_owned(),
            dtype: self.o.dtype.to_string(),
            ranks: self.team.size(),
            shape: format!("m={} n={} k={}", self.o.m, self.o.n, self.o.k),
            t_gemm_us: times.0,
            t_comm_us: times.1,
            t_seq_us: times.2,
            t_ours_us: Some(times.3),
            max_err: max_err.is_finite().then_some(max_err),
            wrong: all.iter().map(|b| number(&b[8..]) as u64).sum(),
            note: None,
        })
    }
}
