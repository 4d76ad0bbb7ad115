//! Cases of grouped GEMM: fprop, dgrad, wgrad; counts and ends; empty groups; capacity rows.

use tilewire::core::ScaleLayout;
use tilewire::core::numerics::Bound;
use tilewire::ops::gemm::{Activation, Operand};
use tilewire::ops::grouped_gemm::*;
use tilewire::prelude::*;
use tilewire_oracle::grouped_gemm as oracle;
use tilewire_oracle::{Mat, gemm as gemm_oracle};

use super::{CORE, Case, Ctx};

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
        // Rows of one whole block of an MX scale and a part of one, and of parts alone.
        for (groups, rows, k) in [(5, 40, 40), (1, 7, 12), (70, 90, 12)] {
            let shape = [("groups", groups), ("m", rows), ("n", 10), ("k", k)];
            v.push(Case::new("grouped_gemm", dtype, &shape, run));
        }
    }
    for dtype in [DType::BF16, DType::F16] {
        let shape = [("groups", 5), ("m", 200), ("n", 144), ("k", 72)];
        v.push(Case::new(format!("grouped_gemm{CORE}"), dtype, &shape, run));
    }
    v
}

/// Draws the number of rows of each group in one round.
fn draw(ctx: &mut Ctx, groups: usize, capacity: usize, round: usize) -> Vec<usize> {
    let mut left = match round {
        // Nothing at all; everything; with rows to spare.
        0 => 0,
        1 => capacity,
        _ => capacity * 3 / 4,
    };
    let mut s: Vec<usize> = (0..groups)
        .map(|e| {
            let n = if e % 3 == 1 { 0 } else { ctx.rng.below(left as u64 / 2 + 1) as usize };
            left -= n;
            n
        })
        .collect();
    s[groups - 1] += left;
    s
}

fn splits(ctx: &Ctx, s: &[usize], round: usize) -> Result<Splits> {
    let mut v: Vec<i64> = s.iter().map(|&x| x as i64).collect();
    let ends = round % 2 == 1;
    if ends {
        (1..v.len()).for_each(|i| v[i] += v[i - 1]);
    }
    let shape = Shape::d1(v.len());
    let t = match (round + ctx.team.rank().idx()) % 2 {
        0 => Tensor::from_slice(&v, shape)?,
        _ => Tensor::from_slice(&v.iter().map(|&x| x as i32).collect::<Vec<_>>(), shape)?,
    };
    let t = ctx.place(t)?;
    Ok(if ends { Splits::ends(&t) } else { Splits::counts(&t) })
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let mut p = Problem::new(ctx, case)?;
    for round in 0..4 {
        for activation in [Activation::None, Activation::SwiGlu] {
            p.splits = draw(ctx, case.dim("groups"), case.dim("m"), round);
            one(ctx, case, &p, (round, activation))?;
        }
    }
    refused(ctx, case)
}

/// Scales of FP8 operands: those of a row do not depend on the rows around it. Between the two
/// types each pass has operands of MX blocks, of others, and one of each.
fn layout(case: &Case, which: &str) -> ScaleLayout {
    match (which, case.dtype) {
        ("x", DType::F8E5M2) | ("dy" | "w", DType::F8E4M3) => ScaleLayout::Mx1x32,
        _ => ScaleLayout::Block1x128,
    }
}

/// An operand: its values, and what they are stored as.
struct Coded {
    values: Mat,
    stored: Mat,
    layout: ScaleLayout,
    /// Of FP8; of MX powers of two.
    scales: Option<Vec<f32>>,
}

impl Coded {
    fn new(ctx: &mut Ctx, (which, rows, cols): (&str, usize, usize), case: &Case) -> Self {
        let (dtype, layout) = (case.dtype, layout(case, which));
        let stored = ctx.random(rows, cols, dtype);
        if !dtype.is_fp8() {
            return Self { values: stored.clone(), stored, layout, scales: None };
        }
        let draw = |rng: &mut tilewire::core::Rng| match layout.dtype() {
            DType::E8M0 => (rng.below(5) as f32 - 2.0).exp2(),
            _ => rng.uniform(0.2, 2.0),
        };
        let num = layout.num_scales(rows, cols);
        let scales: Vec<f32> = (0..num).map(|_| draw(&mut ctx.rng)).collect();
        // Rounded once to f32, as every bit counts.
        let values = Mat::from_fn(rows, cols, |r, c| {
            f64::from(stored.at(r, c) as f32 * scales[layout.scale_idx(r, c, cols)])
        });
        Self { values, stored, layout, scales: Some(scales) }
    }

    /// Splits `rows` rows off, again and again. Scales of whole blocks of rows go along.
    fn cut(&self, rows: usize) -> Vec<Coded> {
        let cut = |m: &Mat| -> Vec<Mat> {
            (0..m.rows / rows).map(|e| m.slice_rows(e * rows..(e + 1) * rows)).collect()
        };
        let scales = |e: usize| {
            let num = self.layout.num_scales(rows, self.stored.cols);
            self.scales.as_ref().map(|s| s[e * num..(e + 1) * num].to_vec())
        };
        let both = cut(&self.values).into_iter().zip(cut(&self.stored)).enumerate();
        both.map(|(e, (values, stored))| Coded {
            values,
            stored,
            layout: self.layout,
            scales: scales(e),
        })
        .collect()
    }

    fn operand(&self, ctx: &Ctx, dtype: DType) -> Result<Operand> {
        let scales = self.scales.as_ref().map(|s| -> Result<_> {
            let scales = Tensor::from_f32(s, self.layout.dtype(), Shape::d1(s.len()))?;
            Ok((ctx.place(scales)?, self.layout))
        });
        Ok(Operand { data: ctx.tensor(&self.stored, dtype)?, scales: scales.transpose()? })
    }
}

/// A tensor of all rounds: what it stands for, its absolute values for the error bound, and the
/// tensor itself.
struct Given {
    values: Mat,
    mag: Mat,
    operand: Operand,
}

impl Given {
    fn new(ctx: &mut Ctx, what: (&str, usize, usize), case: &Case) -> Result<Self> {
        let coded = Coded::new(ctx, what, case);
        let operand = coded.operand(ctx, case.dtype)?;
        Ok(Self { mag: abs(&coded.values), values: coded.values, operand })
    }
}

/// Operands of all rounds, made once; which rows are whose differs.
struct Problem {
    x: Given,
    dy: Given,
    /// Of all groups, below each other and alone.
    packed: Weights,
    discrete: Weights,
    w: Vec<Mat>,
    bias: Mat,
    before: Vec<Mat>,
    splits: Vec<usize>,
    /// Absolute values of the weights.
    w_mag: Vec<Mat>,
}

impl Problem {
    fn new(ctx: &mut Ctx, case: &Case) -> Result<Self> {
        let (groups, cap, n, k, dtype) =
            (case.dim("groups"), case.dim("m"), case.dim("n"), case.dim("k"), case.dtype);
        let (x, dy) =
            (Given::new(ctx, ("x", cap, k), case)?, Given::new(ctx, ("dy", cap, n), case)?);
        let packed = Coded::new(ctx, ("w", groups * n, k), case);
        let alone = packed.cut(n);
        let discrete = alone.iter().map(|w| w.operand(ctx, dtype)).collect::<Result<_>>()?;
        let w: Vec<Mat> = alone.into_iter().map(|w| w.values).collect();
        Ok(Self {
            x,
            dy,
            packed: Weights::Packed(packed.operand(ctx, dtype)?),
            discrete: Weights::Discrete(discrete),
            w_mag: all(&w),
            w,
            bias: ctx.random(groups, n, DType::F32),
            before: (0..groups).map(|_| ctx.random(n, k, DType::F32)).collect(),
            splits: Vec::new(),
        })
    }
}

fn one(
    ctx: &mut Ctx,
    case: &Case,
    p: &Problem,
    (round, activation): (usize, Activation),
) -> Result<()> {
    let [groups, cap, n, k] = ["groups", "m", "n", "k"].map(|d| case.dim(d));
    let dtype = case.dtype;
    let zero_tail = round.is_multiple_of(2);
    let desc = GroupedDesc { activation, zero_tail, ..GroupedDesc::new(groups, cap, n, k, dtype) };
    let plan = GroupedGemmPlan::with_backend(desc, case.gemm_backend())?;
    plan.prepare(&ctx.stream)?;
    let s = splits(ctx, &p.splits, round)?;
    let w = if round.is_multiple_of(2) { &p.packed } else { &p.discrete };
    let used: usize = p.splits.iter().sum();
    fprop(ctx, &plan, p, (w, &s, !case.by_core()), used)?;
    if activation == Activation::None {
        dgrad(ctx, &plan, p, (w, &s), used)?;
        wgrad(ctx, &plan, p, &s, round)?;
        needed_alone(ctx, &plan, p, (w, &s), used)?;
    }
    plan.check()
}

/// Without what may be missing: bias, saved sums, mask, gradient of the bias.
fn needed_alone(
    ctx: &mut Ctx,
    plan: &GroupedGemmPlan,
    p: &Problem,
    (w, s): (&Weights, &Splits),
    used: usize,
) -> Result<()> {
    let d = *plan.desc();
    let out = ctx.poisoned(d.out, Shape::d2(d.capacity, d.n))?;
    let (w, splits) = (w.clone(), s.clone());
    let x = p.x.operand.clone();
    let t = GroupedFprop { x, w, bias: None, splits, out: out.clone(), aux_out: None };
    ctx.timed(|st| plan.fprop(st, t))?;
    let of = |x: &Mat, w: &[Mat]| {
        oracle::grouped_fprop(x, w, None, &p.splits, oracle::Tail::Zero).slice_rows(0..used)
    };
    let (want, mag) = (of(&p.x.values, &p.w), of(&p.x.mag, &p.w_mag));
    let bound = Bound::local(d.out, d.k);
    ctx.compare("fprop alone", &out.rows(0, used)?, &want, &mag, &bound)?;
    let dw = ctx.poisoned(DType::F32, Shape::d2(d.groups * d.n, d.k))?;
    let (x, dy) = (p.x.operand.clone(), p.dy.operand.clone());
    let splits = s.clone();
    let t = GroupedWgrad { x, dy, splits, dw: (&dw).into(), mask: None, dbias: None };
    ctx.timed(|st| plan.wgrad(st, t))?;
    let of = |x, dy| Mat::vstack(&oracle::grouped_wgrad(x, dy, &p.splits, None));
    let (want, mag) = (of(&p.x.values, &p.dy.values), of(&p.x.mag, &p.dy.mag));
    ctx.compare("wgrad alone", &dw, &want, &mag, &Bound::local(DType::F32, d.capacity))
}

fn abs(m: &Mat) -> Mat {
    m.map(f64::abs)
}

fn all(m: &[Mat]) -> Vec<Mat> {
    m.iter().map(abs).collect()
}

/// Rows beyond the groups: zero, or untouched.
fn tail(ctx: &mut Ctx, what: &str, plan: &GroupedGemmPlan, t: &Tensor, used: usize) -> Result<()> {
    let rest = t.rows(used, plan.desc().capacity - used)?;
    let want = if plan.desc().zero_tail { 0 } else { DType::POISON };
    let ok = rest.read(|b| b.iter().all(|&x| x == want))?;
    ctx.check(ok, || format!("{what}: rows beyond the groups"));
    Ok(())
}

fn fprop(
    ctx: &mut Ctx,
    plan: &GroupedGemmPlan,
    p: &Problem,
    (w, s, saves): (&Weights, &Splits, bool),
    used: usize,
) -> Result<()> {
    let d = *plan.desc();
    let swiglu = d.activation == Activation::SwiGlu;
    // The core stores no pre-activation where no activation follows.
    let saves = saves || swiglu;
    let out = ctx.poisoned(d.out, Shape::d2(d.capacity, d.out_cols()))?;
    let aux = ctx.poisoned(d.out, Shape::d2(d.capacity, d.n))?;
    let t = GroupedFprop {
        x: p.x.operand.clone(),
        w: w.clone(),
        bias: Some(ctx.tensor(&p.bias, DType::F32)?),
        splits: s.clone(),
        out: out.clone(),
        aux_out: saves.then(|| aux.clone()),
    };
    ctx.timed(|st| plan.fprop(st, t))?;
    let z = oracle::grouped_fprop(&p.x.values, &p.w, Some(&p.bias), &p.splits, oracle::Tail::Zero)
        .slice_rows(0..used);
    let act = if swiglu { gemm_oracle::Activation::SwiGlu } else { gemm_oracle::Activation::None };
    let want = gemm_oracle::activate(act, &z);
    let bias = p.bias.map(f64::abs);
    let tail_zero = oracle::Tail::Zero;
    let z_mag = oracle::grouped_fprop(&p.x.mag, &p.w_mag, Some(&bias), &p.splits, tail_zero)
        .slice_rows(0..used);
    if saves {
        ctx.compare("aux", &aux.rows(0, used)?, &z, &z_mag, &Bound::local(d.out, d.k))?;
    }
    // SwiGLU: the error of each factor times the other; its slope is below 1.1.
    let half = d.n / 2;
    let mag = match swiglu {
        false => z_mag.clone(),
        true => Mat::from_fn(used, half, |r, c| {
            let (g, u) = (z.at(r, c).abs(), z.at(r, half + c).abs());
            1.1 * (u * z_mag.at(r, c) + (g + 1.0) * z_mag.at(r, half + c))
        }),
    };
    ctx.compare("fprop", &out.rows(0, used)?, &want, &mag, &Bound::local(d.out, d.k))?;
    tail(ctx, "fprop", plan, &out, used)?;
    if swiglu {
        let dy = ctx.random(d.capacity, d.out_cols(), d.out);
        let dz = ctx.poisoned(d.out, Shape::d2(d.capacity, d.n))?;
        let dy_t = ctx.tensor(&dy, d.out)?;
        ctx.timed(|st| plan.dactivation(st, s, &dy_t, &aux, &dz))?;
        let saved = Mat::from_f32(used, d.n, &aux.rows(0, used)?.to_f32()?);
        let want = gemm_oracle::activate_bwd(act, &saved, &dy.slice_rows(0..used));
        let mag = Mat::from_fn(used, d.n, |r, c| {
            let (g, u) = (saved.at(r, c % half).abs(), saved.at(r, half + c % half).abs());
            2.0 * dy.at(r, c % half).abs() * (1.0 + g) * (1.0 + u)
        });
        ctx.compare("dactivation", &dz.rows(0, used)?, &want, &mag, &Bound::local(d.out, 1))?;
    }
    Ok(())
}

fn dgrad(
    ctx: &mut Ctx,
    plan: &GroupedGemmPlan,
    p: &Problem,
    (w, s): (&Weights, &Splits),
    used: usize,
) -> Result<()> {
    let d = *plan.desc();
    let dx = ctx.poisoned(d.out, Shape::d2(d.capacity, d.k))?;
    let t =
        GroupedDgrad { dy: p.dy.operand.clone(), w: w.clone(), splits: s.clone(), dx: dx.clone() };
    ctx.timed(|st| plan.dgrad(st, t))?;
    let want = oracle::grouped_dgrad(&p.dy.values, &p.w, &p.splits, oracle::Tail::Zero)
        .slice_rows(0..used);
    let mag = oracle::grouped_dgrad(&p.dy.mag, &p.w_mag, &p.splits, oracle::Tail::Zero)
        .slice_rows(0..used);
    ctx.compare("dgrad", &dx.rows(0, used)?, &want, &mag, &Bound::local(d.out, d.n))?;
    tail(ctx, "dgrad", plan, &dx, used)
}

fn wgrad(
    ctx: &mut Ctx,
    plan: &GroupedGemmPlan,
    p: &Problem,
    s: &Splits,
    round: usize,
) -> Result<()> {
    let d = *plan.desc();
    let mask: Vec<bool> = (0..d.groups).map(|e| round > 0 && e % 2 == 0).collect();
    // What is overwritten is poisoned before: it must not be read.
    let before = &p.before;
    let dw = ctx.tensor(&Mat::vstack(before), DType::F32)?;
    for (e, _) in mask.iter().enumerate().filter(|(_, m)| !**m) {
        dw.rows(e * d.n, d.n)?.poison()?;
    }
    let dbias = ctx.poisoned(DType::F32, Shape::d2(d.groups, d.n))?;
    let bytes: Vec<u8> = mask.iter().map(|&m| u8::from(m)).collect();
    let t = GroupedWgrad {
        x: p.x.operand.clone(),
        dy: p.dy.operand.clone(),
        splits: s.clone(),
        dw: (&dw).into(),
        mask: Some(ctx.place(Tensor::from_slice(&bytes, Shape::d1(d.groups))?)?),
        dbias: Some(dbias.clone()),
    };
    ctx.timed(|st| plan.wgrad(st, t))?;
    let acc = oracle::Accumulate { c: before, mask: &mask };
    let want = Mat::vstack(&oracle::grouped_wgrad(&p.x.values, &p.dy.values, &p.splits, Some(acc)));
    let c = all(before);
    let acc = oracle::Accumulate { c: &c, mask: &mask };
    let mag = Mat::vstack(&oracle::grouped_wgrad(&p.x.mag, &p.dy.mag, &p.splits, Some(acc)));
    ctx.compare("wgrad", &dw, &want, &mag, &Bound::local(DType::F32, d.capacity))?;
    let want = oracle::grouped_dbias(&p.dy.values, &p.splits);
    let mag = oracle::grouped_dbias(&p.dy.mag, &p.splits);
    ctx.compare("dbias", &dbias, &want, &mag, &Bound::local(DType::F32, d.capacity))
}

/// Splits that are negative or too large set the status and write nothing.
fn refused(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (groups, cap, n, k, dtype) =
        (case.dim("groups"), case.dim("m"), case.dim("n"), case.dim("k"), case.dtype);
    for (first, code) in [(-1i64, 1), (cap as i64 + 1, 2)] {
        let d = GroupedDesc::new(groups, cap, n, k, dtype);
        let plan = GroupedGemmPlan::with_backend(d, case.gemm_backend())?;
        plan.prepare(&ctx.stream)?;
        let mut v = vec![0i64; groups];
        v[0] = first;
        let s = Splits::counts(&ctx.place(Tensor::from_slice(&v, Shape::d1(groups))?)?);
        let out = ctx.poisoned(plan.desc().out, Shape::d2(cap, n))?;
        let t = GroupedFprop {
            x: ctx.place(Tensor::zeros(dtype, Shape::d2(cap, k)))?.into(),
            w: (&ctx.place(Tensor::zeros(dtype, Shape::d2(groups * n, k)))?).into(),
            bias: None,
            splits: s,
            out: out.clone(),
            aux_out: None,
        };
        ctx.timed(|st| plan.fprop(st, t))?;
        let status = plan.status().to_vec::<i32>()?[0];
        let untouched = out.read(|b| b.iter().all(|&x| x == DType::POISON))?;
        ctx.check(status == code && untouched && plan.check().is_err(), || {
            format!("splits {first} were not refused")
        });
    }
    Ok(())
}
