//! Outputs of the operations of [`team_ops`](crate::team_ops) by the oracle, where all ranks have
//! filled their inputs from one seed: a shorter tensor is then the beginning of a longer one, so
//! that each rank knows the inputs of all.

use std::ops::Range;

use tilewire_core::{DType, Result, ScaleLayout, Shape};
use tilewire_device::Tensor;
use tilewire_ops::ep::{EpDesc, EpLayout};
use tilewire_oracle::permute::TopK;
use tilewire_oracle::quant::{QuantSpec, amax, quantize_with_scale};
use tilewire_oracle::{Mat, attention, ep, fp8, matmul};
use tilewire_symm::Heap;

use crate::inputs::filled;
use crate::team_ops::{M, Op};

/// What the oracle must know of an operation beside its tensors.
#[derive(Clone)]
pub enum Facts {
    /// Nothing but its name.
    Named,
    /// The layer of experts, and whether gradients come without weights.
    Experts(EpDesc, bool),
    /// Global rows of this rank's queries, heads, and whether keys or gradients travel as FP8.
    Attention { rows: Vec<Range<usize>>, heads: usize, fp8_wires: bool },
}

/// The beginning of an output.
struct Want {
    out: usize,
    values: Vec<f64>,
    /// An element may differ by this much of itself and of what is typical of its tensor. A value
    /// that is stale, of another rank or missing one part differs by about all of that.
    slack: f64,
}

/// Products, sums of parts and their rounding to 16 bits: each rounding is 2^-9 of a value.
const ROUNDED: f64 = 1.0 / 64.0;
/// Attention also rounds its probabilities, and its gradients are sums of many such products.
const ATTENTION: f64 = 1.0 / 32.0;
/// Inputs of FP8 with random scales make scores large: gradients of queries and keys are small
/// differences of numbers that 16 bits have rounded, times keys and queries with scales. Of 16
/// seeds the worst element differs by 0.19, most by 0.02 to 0.1 (results and gradients of values:
/// 0.004).
const SCALED: f64 = 1.0 / 4.0;
/// Values that travel as f8e4m3 have errors of 2^-4 each, of which a row that sees few keys
/// averages none away. Among thousands of elements those of another launch or rank still stand out.
const BY_FP8: f64 = 1.0;

/// The inputs of all ranks.
struct Case<'a> {
    op: &'a Op,
    seed: u64,
    me: usize,
    size: usize,
    heap: &'a Heap,
}

/// In the environment of tests on the idle driver, whose values mean nothing.
pub const IDLE: &str = "TW_IDLE";

/// Compares every element of all outputs of a launch whose inputs were of `seed` on all ranks.
/// Collective.
///
/// # Errors
/// Those of copies, and of an exchange of the team.
///
/// # Panics
/// If an element is not the oracle's.
pub fn check(op: &Op, seed: u64, heap: &Heap) -> Result<()> {
    if std::env::var_os(IDLE).is_some() {
        return Ok(());
    }
    if let Some(wrong) = differs(op, seed, heap)? {
        panic!("{} on rank {}: {wrong}", op.name, heap.team().rank());
    }
    Ok(())
}

/// The first element that is not right.
fn differs(op: &Op, seed: u64, heap: &Heap) -> Result<Option<String>> {
    let team = heap.team();
    let case = Case { op, seed, me: team.rank().idx(), size: team.size(), heap };
    for w in case.wants()? {
        let got = read(&op.outs[w.out])?;
        let sum: f64 = w.values.iter().filter(|v| v.is_finite()).map(|v| v * v).sum();
        let typical = (sum / w.values.len().max(1) as f64).sqrt();
        let right =
            |(w_, g): (&f64, &f64)| w_ == g || (w_ - g).abs() <= w.slack * (w_.abs() + typical);
        if got.len() < w.values.len() {
            return Ok(Some(format!("output {} has {} elements", w.out, got.len())));
        }
        if let Some(i) = w.values.iter().zip(&got).position(|p| !right(p)) {
            let text = format!("output {}, element {i}: {} and not {}", w.out, got[i], w.values[i]);
            return Ok(Some(text));
        }
    }
    Ok(None)
}

fn read(t: &Tensor) -> Result<Vec<f64>> {
    if t.dtype() == DType::I64 {
        return Ok(t.to_vec::<i64>()?.into_iter().map(|v| v as f64).collect());
    }
    Ok(t.to_f32()?.into_iter().map(f64::from).collect())
}

fn shard(m: usize, size: usize, rank: usize) -> Range<usize> {
    let first = |r: usize| r * (m / size) + r.min(m % size);
    first(rank)..first(rank + 1)
}

impl Case<'_> {
    fn wants(&self) -> Result<Vec<Want>> {
        match (&self.op.facts, self.op.name) {
            (Facts::Experts(d, unweighted), _) => self.experts(d, *unweighted),
            (Facts::Attention { rows, heads, fp8_wires }, _) => {
                self.attention(rows, *heads, *fp8_wires)
            }
            (Facts::Named, "ag_gemm") => self.ag_gemm(),
            (Facts::Named, "gemm_rs" | "gemm_ar") => self.gemm_reduce(),
            (Facts::Named, "quant") => self.quant(),
            (Facts::Named, name) => self.collective(name),
        }
    }

    fn cols(&self, i: usize) -> usize {
        let t = &self.op.inputs[i].0;
        t.shape().dims().last().copied().unwrap_or(1)
    }

    /// The first `rows` rows of what every rank has as input `i`.
    fn input(&self, i: usize, rows: usize) -> Result<Mat> {
        let (t, fill) = &self.op.inputs[i];
        let shape = Shape::d2(rows, self.cols(i));
        let t = filled(*fill, (self.seed, i), t.dtype(), shape)?;
        Ok(Mat::new(rows, self.cols(i), read(&t)?))
    }

    /// Input `i` of all ranks, one behind the other: shards of `m` rows.
    fn gathered(&self, i: usize, m: usize) -> Result<Mat> {
        let longest = self.input(i, shard(m, self.size, 0).len())?;
        let of = |r| longest.slice_rows(0..shard(m, self.size, r).len());
        Ok(Mat::vstack(&(0..self.size).map(of).collect::<Vec<_>>()))
    }

    fn collective(&self, name: &str) -> Result<Vec<Want>> {
        let dims = |t: &Tensor| t.shape().dims()[0];
        let (rows, out) = (dims(&self.op.inputs[0].0), dims(&self.op.outs[0]));
        let size = self.size as f64;
        let values = match name {
            "all_gather" => self.gathered(0, out)?.data,
            // The mean of equal numbers.
            "reduce_scatter" => {
                self.input(0, rows)?.slice_rows(shard(rows, self.size, self.me)).data
            }
            "all_reduce" => self.input(0, rows)?.map(|v| v * size).data,
            _ => {
                let each = rows / self.size;
                let block = self.input(0, rows)?.slice_rows(self.me * each..(self.me + 1) * each);
                Mat::vstack(&vec![block; self.size]).data
            }
        };
        Ok(vec![Want { out: 0, values, slack: ROUNDED }])
    }

    /// `x` times the transposed weights, times the scale if there is one.
    fn product(&self, x: &Mat) -> Result<Mat> {
        let (w, inputs) = (self.input(1, self.op.inputs[1].0.shape().dims()[0])?, &self.op.inputs);
        let scale = match inputs.len() {
            3 => self.input(2, 1)?.data[0],
            _ => 1.0,
        };
        Ok(matmul(x, &w.transpose()).map(|v| v * scale))
    }

    fn ag_gemm(&self) -> Result<Vec<Want>> {
        let x = self.gathered(0, M)?;
        let values = self.product(&x)?.data;
        Ok(vec![
            Want { out: 0, values, slack: ROUNDED },
            Want { out: 1, values: x.data, slack: 0.0 },
        ])
    }

    fn gemm_reduce(&self) -> Result<Vec<Want>> {
        let size = self.size as f64;
        let all = self.product(&self.input(0, M)?)?.map(|v| v * size + 0.5);
        let values = match self.op.name {
            "gemm_rs" => all.slice_rows(shard(M, self.size, self.me)).data,
            _ => all.data,
        };
        Ok(vec![Want { out: 0, values, slack: ROUNDED }])
    }

    /// Codes of rows and of columns with one scale of the team: that of the longest shard, which
    /// the others begin.
    fn quant(&self) -> Result<Vec<Want>> {
        let longest = self.input(0, shard(M, self.size, 0).len())?;
        let x = longest.slice_rows(0..shard(M, self.size, self.me).len());
        let spec = QuantSpec::new(DType::F8E4M3, ScaleLayout::Tensor);
        let scale = spec.scale(amax(&longest));
        let mut wants = Vec::new();
        for (i, x) in [x.clone(), x.transpose()].iter().enumerate() {
            let codes = quantize_with_scale(x, DType::F8E4M3, scale as f32).data;
            let values = codes.iter().map(|&c| fp8::decode(DType::F8E4M3, c)).collect();
            wants.push(Want { out: 2 * i, values, slack: 0.0 });
            wants.push(Want { out: 2 * i + 1, values: vec![scale], slack: 0.0 });
        }
        Ok(wants)
    }

    /// Routing, dispatch, combine and both gradients, of layers whose ranks choose the same experts
    /// for the same tokens.
    fn experts(&self, d: &EpDesc, unweighted: bool) -> Result<Vec<Want>> {
        let (t, k) = (d.max_tokens, d.top_k);
        let idx = self.input(0, t)?.data.iter().map(|&e| e as i64).collect();
        let topks = vec![TopK::new(t, k, idx); self.size];
        let spec = ep::EpSpec {
            experts_per_rank: d.experts_per_rank.clone(),
            align: d.layout.align(),
            capacity: Some(d.capacity),
        };
        let layout = ep::EpLayout::new(&spec, &topks);
        let same = |m: Mat| vec![m; self.size];
        let (x, w, g) = (same(self.input(1, t)?), same(self.input(2, t)?), same(self.input(4, t)?));
        let used = |r: usize| layout.ranks[r].m_splits().iter().sum::<usize>();
        let y: Vec<Mat> = (0..self.size).map(|r| self.input(3, used(r))).collect::<Result<_>>()?;
        let out = ep::combine_at(&layout, &y, Some(&w), self.me);
        let weights = (!unweighted).then_some(&w[..]);
        let dy = ep::combine_bwd_at(&layout, &y, weights, &g, self.me).0;
        // The dispatched weights themselves go home as their gradients.
        let dw = |i: usize| {
            let o = ep::Origin { src: self.me, token: i / k, choice: i % k };
            layout.slot(o).map_or(0.0, |_| w[self.me].data[i])
        };
        let splits = layout.ranks[self.me].m_splits().iter().map(|&n| n as f64).collect();
        let rounded = |out: usize, m: Mat| Want { out, values: m.data, slack: ROUNDED };
        let mut wants = vec![
            Want { out: 2, values: splits, slack: 0.0 },
            rounded(3, out),
            rounded(4, dy.slice_rows(0..used(self.me))),
            rounded(5, self.rows_home(d, &layout)?),
            Want { out: 6, values: (0..t * k).map(dw).collect(), slack: 0.0 },
        ];
        let exact = |m: Mat| Want { out: 0, values: m.data, slack: 0.0 };
        match d.layout {
            EpLayout::ExpertMajor { .. } => {
                let all = ep::dispatch_to(&layout, &x, self.me);
                wants.push(exact(all.slice_rows(0..used(self.me))));
            }
            EpLayout::Flat { .. } => {
                wants.push(exact(ep::gather_copies(&ep::flat(&layout)[self.me].rows, &x)));
            }
            EpLayout::RankMajor { .. } => {
                let rows = &ep::rank_major(&spec, &topks, t)[self.me];
                wants.push(exact(ep::gather_copies(rows, &x)));
            }
        }
        Ok(wants)
    }

    /// The sum of the gradients of each token's rows.
    fn rows_home(&self, d: &EpDesc, layout: &ep::EpLayout) -> Result<Mat> {
        let all = self.input(5, d.recv_rows())?;
        let rows: Vec<_> = ep::flat(layout).into_iter().map(|f| f.rows).collect();
        let of = |r: usize| -> Mat {
            let used = layout.ranks[r].m_splits().iter().sum();
            let at = |i: usize| {
                let o = rows[r][i].as_ref().expect("all rows of a flat layout are there");
                o.src * d.max_tokens + o.token
            };
            match d.layout {
                EpLayout::ExpertMajor { .. } => all.slice_rows(0..used),
                EpLayout::Flat { .. } => all.slice_rows(0..rows[r].len()),
                EpLayout::RankMajor { .. } => {
                    Mat::from_fn(rows[r].len(), all.cols, |i, c| all.at(at(i), c))
                }
            }
        };
        let of: Vec<Mat> = (0..self.size).map(of).collect();
        Ok(match d.layout {
            EpLayout::ExpertMajor { .. } => ep::combine_at(layout, &of, None, self.me),
            _ => ep::combine_copies_at(&rows, &of, &vec![d.max_tokens; self.size], self.me),
        })
    }

    /// Global rows of all ranks, in the order of their tensors.
    fn rows_of_all(&self, mine: &[Range<usize>]) -> Result<Vec<Vec<usize>>> {
        let list: Vec<u8> =
            mine.iter().cloned().flatten().flat_map(|r| (r as u64).to_le_bytes()).collect();
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes")) as usize;
        let all = self.heap.team().exchange("rows", &list)?;
        Ok(all.iter().map(|l| l.chunks_exact(8).map(word).collect()).collect())
    }

    /// Input `i` of all ranks at its global rows, times the scale of each (row, head), which is the
    /// input behind it.
    fn operand(&self, i: usize, rows: &[Vec<usize>], heads: Option<usize>) -> Result<Mat> {
        let num = |r: &Vec<usize>| r.len();
        let longest = rows.iter().map(num).max().unwrap_or(0);
        let mut local = self.input(i, longest)?;
        if let Some(heads) = heads {
            let (scales, d) = (self.input(i + 1, longest)?, local.cols / heads);
            local = Mat::from_fn(longest, local.cols, |r, c| local.at(r, c) * scales.at(r, c / d));
            // Devices widen codes to the type of the results.
            local = local.rounded(DType::F32).rounded(DType::BF16);
        }
        let mut all = Mat::zeros(rows.iter().map(num).sum(), local.cols);
        for rows in rows {
            rows.iter()
                .enumerate()
                .for_each(|(i, &g)| all.row_mut(g).copy_from_slice(local.row(i)));
        }
        Ok(all)
    }

    fn attention(&self, mine: &[Range<usize>], heads: usize, fp8: bool) -> Result<Vec<Want>> {
        let rows = self.rows_of_all(mine)?;
        let scaled = (self.op.inputs.len() > 4).then_some(heads);
        let step = if scaled.is_some() { 2 } else { 1 };
        let d_out = self.operand(0, &rows, None)?;
        let at = |n: usize| self.operand(1 + n * step, &rows, scaled);
        let (q, k, v) = (at(0)?, at(1)?, at(2)?);
        let mask = attention::AttnMask::CAUSAL;
        let spec = attention::AttnSpec::new(heads, heads, q.cols / heads, mask);
        let (x, seqs) =
            (attention::AttnInputs::new(&q, &k, &v), attention::Sequences::batched(1, M, M));
        let o = attention::attention(&spec, &x, &seqs);
        let g = attention::attention_bwd(&spec, &x, &seqs, &d_out);
        let own = &rows[self.me];
        let pick = |m: &Mat| Mat::from_fn(own.len(), m.cols, |i, c| m.at(own[i], c)).data;
        let lse = Mat::from_fn(heads, own.len(), |h, i| o.lse.at(h, own[i])).data;
        // Of each output: gradients of queries and keys are numbers 2 and 3.
        let slack = |out| match fp8 {
            true => BY_FP8,
            false if scaled.is_some() && (2..4).contains(&out) => SCALED,
            false => ATTENTION,
        };
        let outs = [pick(&o.o), lse, pick(&g.dq), pick(&g.dk), pick(&g.dv)];
        let want = |(out, values)| Want { out, values, slack: slack(out) };
        Ok(outs.into_iter().enumerate().map(want).collect())
    }
}
