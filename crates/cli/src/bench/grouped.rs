//! `tilewire bench` of grouped products: forward, gradients of rows, gradients of weights.
//!
//! Before a pass is timed it runs on operands that repeat along what it sums over, as those of
//! `products.rs` do, so that every element of its result is known exactly. The gradients of weights
//! sum over the rows of a group, whose numbers differ: they are whole numbers of f32.

use std::iter;

use tilewire::core::Rng;
use tilewire::ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};
use tilewire::prelude::*;

use super::device::{Bench, count_wrong};
use super::products::{PERIOD, columns, tflops, times, w_of, whole_row, x_of};
use crate::rows::Row;

/// Groups of random sizes.
const GROUPS: usize = 32;

/// Pairs of operands by the pass that they are for.
const FPROP: usize = 0;
const DGRAD: usize = 1;
const WGRAD: usize = 2;

/// A plan, and where each group ends.
struct Groups<'a> {
    b: &'a Bench<'a>,
    plan: GroupedGemmPlan,
    ends: Vec<i64>,
    splits: Splits,
}

fn dot(a: &[f32; PERIOD], b: &[f32; PERIOD]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl<'a> Groups<'a> {
    fn new(b: &'a Bench<'a>) -> Result<Self> {
        let (m, n, k) = b.sizes();
        let mut rng = Rng::new(2);
        let mut ends: Vec<i64> =
            (1..GROUPS).map(|_| rng.below(m as u64 + 1) as i64).chain([m as i64]).collect();
        ends.sort_unstable();
        let splits = Splits::ends(&Tensor::from_slice(&ends, Shape::d1(GROUPS))?.to(&b.device)?);
        let plan = GroupedGemmPlan::new(GroupedDesc::new(GROUPS, m, n, k, b.o.dtype))?;
        plan.prepare(&b.stream)?;
        Ok(Self { b, plan, ends, splits })
    }

    /// The group of a row.
    fn group(&self, row: usize) -> usize {
        self.ends.partition_point(|end| *end <= row as i64)
    }

    fn fprop(&self, x: &Tensor, w: &Tensor, y: &Tensor) -> Result<()> {
        let (s, splits, out) = (&self.b.stream, self.splits.clone(), y.clone());
        let t = GroupedFprop { x: x.into(), w: w.into(), bias: None, splits, out, aux_out: None };
        self.plan.fprop(s, t)?.join(s).map(|_| ())
    }

    fn dgrad(&self, dy: &Tensor, w: &Tensor, dx: &Tensor) -> Result<()> {
        let (s, splits, dx) = (&self.b.stream, self.splits.clone(), dx.clone());
        let t = GroupedDgrad { dy: dy.into(), w: w.into(), splits, dx };
        self.plan.dgrad(s, t)?.join(s).map(|_| ())
    }

    fn wgrad(&self, x: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
        let (s, splits) = (&self.b.stream, self.splits.clone());
        let (x, dy, dw) = (x.into(), dy.into(), dw.into());
        let t = GroupedWgrad { x, dy, splits, dw, mask: None, dbias: None };
        self.plan.wgrad(s, t)?.join(s).map(|_| ())
    }

    /// Rows of `cols` elements, each the period of an operand repeated.
    fn periodic(&self, which: usize, rows: usize, cols: usize) -> Result<Tensor> {
        let mut v = Vec::with_capacity(rows * cols);
        for row in columns(which, 0..rows) {
            v.extend(whole_row(which, &row, cols / PERIOD));
        }
        self.b.place(&v, Shape::d2(rows, cols))
    }

    /// Blocks of `rows` rows that repeat after [`PERIOD`]: column `c` of block `g` goes through the
    /// period of row `g * cols + c` of an operand.
    fn periodic_down(
        &self,
        which: usize,
        (blocks, rows, cols): (usize, usize, usize),
    ) -> Result<Tensor> {
        let mut v = Vec::with_capacity(blocks * rows * cols);
        for block in 0..blocks {
            let periods = columns(which, block * cols..(block + 1) * cols);
            let few: Vec<f32> =
                (0..PERIOD).flat_map(|p| periods.iter().map(move |c| c[p])).collect();
            let all = iter::repeat_n(&few, rows.div_ceil(PERIOD));
            v.extend(all.flatten().take(rows * cols));
        }
        self.b.place(&v, Shape::d2(blocks * rows, cols))
    }

    /// The elements of a result, once it is there.
    fn finished(&self, t: &Tensor) -> Result<Vec<f32>> {
        self.b.stream.synchronize()?;
        self.b.team.check()?;
        t.to_f32()
    }

    /// Wrong elements of each pass.
    fn compared(&self) -> Result<[u64; 3]> {
        let (b, (m, n, k)) = (self.b, self.b.sizes());
        let y = b.poisoned(b.o.dtype, Shape::d2(m, n))?;
        let (x, w) = (x_of(FPROP), w_of(FPROP));
        self.fprop(&self.periodic(x, m, k)?, &self.periodic(w, GROUPS * n, k)?, &y)?;
        let (rows, cols) = (columns(x, 0..m), columns(w, 0..GROUPS * n));
        let factor = times(k / PERIOD) as f32;
        let bad_y = count_wrong(&self.finished(&y)?, |i| {
            factor * dot(&rows[i / n], &cols[self.group(i / n) * n + i % n])
        });
        let dx = b.poisoned(b.o.dtype, Shape::d2(m, k))?;
        let (dy, w) = (x_of(DGRAD), w_of(DGRAD));
        self.dgrad(&self.periodic(dy, m, n)?, &self.periodic_down(w, (GROUPS, n, k))?, &dx)?;
        let (rows, cols) = (columns(dy, 0..m), columns(w, 0..GROUPS * k));
        let factor = times(n / PERIOD) as f32;
        let bad_dx = count_wrong(&self.finished(&dx)?, |i| {
            factor * dot(&rows[i / k], &cols[self.group(i / k) * k + i % k])
        });
        let dw = b.poisoned(DType::F32, Shape::d2(GROUPS * n, k))?;
        let (dy, x) = (x_of(WGRAD), w_of(WGRAD));
        let (of_dy, of_x) = (self.periodic_down(dy, (1, m, n))?, self.periodic_down(x, (1, m, k))?);
        self.wgrad(&of_x, &of_dy, &dw)?;
        let (rows, cols) = (columns(dy, 0..n), columns(x, 0..k));
        let nums: Vec<_> = (0..GROUPS).map(|g| self.residues(g)).collect();
        let bad_dw = count_wrong(&self.finished(&dw)?, |i| {
            let (row, col, num) = (&rows[i / k % n], &cols[i % k], &nums[i / k / n]);
            (0..PERIOD).map(|p| num[p] * row[p] * col[p]).sum()
        });
        Ok([b.wrong(bad_y)?, b.wrong(bad_dx)?, b.wrong(bad_dw)?])
    }

    /// The rows of a group by their place in the period.
    fn residues(&self, group: usize) -> [f32; PERIOD] {
        let first = if group == 0 { 0 } else { self.ends[group - 1] as usize };
        let mut num = [0.0; PERIOD];
        (first..self.ends[group] as usize).for_each(|row| num[row % PERIOD] += 1.0);
        num
    }
}

impl Bench<'_> {
    /// Products of groups with ends at random places: `m` rows in all.
    pub(super) fn grouped_rows(&self) -> Result<Vec<Row>> {
        let (m, n, k) = self.sizes();
        if !n.is_multiple_of(PERIOD) {
            let text = format!("n={n}: gradients of rows sum over n, and operands repeat");
            return Err(Error::invalid(text).expected(format_args!("a multiple of {PERIOD}")));
        }
        let groups = Groups::new(self)?;
        let wrong = groups.compared()?;
        let (x, dy, w) = (self.noise(m, k)?, self.noise(m, n)?, self.noise(GROUPS * n, k)?);
        let (y, dx) = (
            self.poisoned(self.o.dtype, Shape::d2(m, n))?,
            self.poisoned(self.o.dtype, Shape::d2(m, k))?,
        );
        let dw = self.poisoned(DType::F32, Shape::d2(GROUPS * n, k))?;
        let fprop = || groups.fprop(&x, &w, &y);
        let dgrad = || groups.dgrad(&dy, &w, &dx);
        let wgrad = || groups.wgrad(&x, &dy, &dw);
        let passes: [(&str, &dyn Fn() -> Result<()>); 3] =
            [("fprop", &fprop), ("dgrad", &dgrad), ("wgrad", &wgrad)];
        let shape = format!("groups={GROUPS} {}", self.shape_text());
        let row = |((name, launch), wrong): ((&str, &dyn Fn() -> Result<()>), u64)| {
            let t = self.time(launch)?;
            let op = format!("grouped_gemm/{name}");
            let row = self.row(&op, shape.clone(), t, wrong, tflops(self.flop(), t.us))?;
            Ok(Row { t_gemm_us: Some(t.us), ..row })
        };
        passes.into_iter().zip(wrong).map(row).collect()
    }
}
