//! `grouped_gemm` against the oracle.

use tilewire_core::numerics::Bound;
use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Buffer, Tensor};
use tilewire_ops::gemm::Activation;
use tilewire_ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits, Weights,
};
use tilewire_oracle::Mat;
use tilewire_oracle::gemm as gemm_oracle;
use tilewire_oracle::grouped_gemm as oracle;

use crate::common::{Gpu, Out, check, gpu, random, refill};

/// Groups and capacity, with splits that use them.
fn cases() -> Vec<(usize, Vec<usize>)> {
    let many = (0..70).map(|e| usize::from(e % 7 == 3) * (e % 5)).collect();
    vec![
        (300, vec![3, 0, 170, 1, 0, 126]),
        (200, vec![0, 65, 2, 129]),
        (190, vec![190]),
        (64, many),
        (20, vec![0, 0, 0]),
        (1, vec![1]),
        (0, vec![0, 0]),
    ]
}

/// Operands of all passes, and their tensors.
struct Problem {
    d: GroupedDesc,
    splits: Vec<usize>,
    x: Mat,
    dy: Mat,
    w: Vec<Mat>,
    bias: Mat,
    before: Vec<Mat>,
    mask: Vec<bool>,
    on: Tensors,
}

struct Tensors {
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    bias: Tensor,
    splits: Tensor,
    mask: Tensor,
    out: Out,
    dx: Out,
    dw: Out,
}

fn abs(m: &Mat) -> Mat {
    m.map(f64::abs)
}

fn counts(splits: &[usize]) -> Vec<i64> {
    splits.iter().map(|&s| s as i64).collect()
}

impl Problem {
    fn new(g: &Gpu, rng: &mut Rng, d: GroupedDesc, splits: &[usize]) -> Self {
        let (groups, cap, n, k) = (d.groups, d.capacity, d.n, d.k);
        let x = random(rng, cap, k, d.dtype);
        let dy = random(rng, cap, n, d.dtype);
        let w: Vec<Mat> = (0..groups).map(|_| random(rng, n, k, d.dtype)).collect();
        let bias = random(rng, groups, n, DType::F32);
        let before: Vec<Mat> = (0..groups).map(|_| random(rng, n, k, d.grad)).collect();
        let mask: Vec<bool> = (0..groups).map(|e| e % 2 == 0).collect();
        let bytes: Vec<u8> = mask.iter().map(|&m| 3 * u8::from(m)).collect();
        let on = Tensors {
            x: g.put_shifted(&x, d.dtype),
            dy: g.put_shifted(&dy, d.dtype),
            w: g.put_shifted(&Mat::vstack(&w), d.dtype),
            bias: g.put(&bias, DType::F32),
            splits: g.move_here(&Tensor::from_slice(&counts(splits), Shape::d1(groups)).unwrap()),
            mask: g.move_here(&Tensor::from_slice(&bytes, Shape::d1(groups)).unwrap()),
            out: g.out(d.out, cap, d.out_cols()),
            dx: g.out(d.out, cap, k),
            dw: g.out(d.grad, groups * n, k),
        };
        let p = Self { d, splits: splits.to_vec(), x, dy, w, bias, before, mask, on };
        p.reset();
        p
    }

    /// Poison in the results, but for what is added to.
    fn reset(&self) {
        let t = &self.on;
        [&t.out.t, &t.dx.t, &t.dw.t].into_iter().for_each(|t| t.poison().unwrap());
        for (e, m) in self.before.iter().enumerate().filter(|(e, _)| self.mask[*e]) {
            let rows = t.dw.t.rows(e * self.d.n, self.d.n).unwrap();
            rows.upload(&m.to_bytes(self.d.grad)).unwrap();
        }
    }

    /// Queues all passes.
    fn run(&self, g: &Gpu, plan: &GroupedGemmPlan) {
        let (s, t) = (&g.stream, &self.on);
        let splits = Splits::counts(&t.splits);
        let fprop = GroupedFprop {
            x: (&t.x).into(),
            w: Weights::from(&t.w),
            bias: Some(t.bias.clone()),
            splits: splits.clone(),
            out: t.out.t.clone(),
            aux_out: None,
        };
        plan.fprop(s, fprop).unwrap().join(s).unwrap();
        let dgrad = GroupedDgrad {
            dy: (&t.dy).into(),
            w: Weights::from(&t.w),
            splits: splits.clone(),
            dx: t.dx.t.clone(),
        };
        plan.dgrad(s, dgrad).unwrap().join(s).unwrap();
        let wgrad = GroupedWgrad {
            x: (&t.x).into(),
            dy: (&t.dy).into(),
            splits,
            dw: Weights::from(&t.dw.t),
            mask: Some(t.mask.clone()),
            dbias: None,
        };
        plan.wgrad(s, wgrad).unwrap().join(s).unwrap();
    }

    /// Rows of groups against the reference, and the rows behind them.
    fn rows(&self, what: &str, out: &Out, want: &Mat, mag: &Mat, k: usize) {
        let used = self.splits.iter().sum();
        let what = format!("{what} of {} with {:?}", self.d, self.splits);
        out.alone(&what);
        let part = |m: &Mat| m.slice_rows(0..used);
        let bound = Bound::local(self.d.out, k);
        check(&what, &out.t.rows(0, used).unwrap(), &part(want), &part(mag), &bound);
        let rest = out.t.rows(used, self.d.capacity - used).unwrap().download().unwrap();
        let tail = if self.d.zero_tail { 0 } else { DType::POISON };
        assert!(rest.iter().all(|&b| b == tail), "{what}: rows behind the groups");
    }

    fn check(&self) {
        let (d, zero) = (&self.d, oracle::Tail::Zero);
        let all: Vec<Mat> = self.w.iter().map(abs).collect();
        let (bias, mag) = (abs(&self.bias), abs(&self.x));
        let z = oracle::grouped_fprop(&self.x, &self.w, Some(&self.bias), &self.splits, zero);
        let mag = oracle::grouped_fprop(&mag, &all, Some(&bias), &self.splits, zero);
        let act = match d.activation {
            Activation::SwiGlu => gemm_oracle::Activation::SwiGlu,
            Activation::Relu => gemm_oracle::Activation::Relu,
            _ => gemm_oracle::Activation::None,
        };
        let half = d.n / 2;
        let mag = match d.activation {
            Activation::SwiGlu => Mat::from_fn(d.capacity, half, |i, j| {
                let (gate, up) = (z.at(i, j).abs(), z.at(i, half + j).abs());
                1.2 * up * mag.at(i, j) + gate * mag.at(i, half + j) + gate * up + 1.0
            }),
            _ => mag,
        };
        self.rows("fprop", &self.on.out, &gemm_oracle::activate(act, &z), &mag, d.k);
        let want = oracle::grouped_dgrad(&self.dy, &self.w, &self.splits, zero);
        let mag = oracle::grouped_dgrad(&abs(&self.dy), &all, &self.splits, zero);
        self.rows("dgrad", &self.on.dx, &want, &mag, d.n);
        self.check_wgrad();
    }

    fn check_wgrad(&self) {
        let before: Vec<Mat> = self.before.iter().map(abs).collect();
        let add = oracle::Accumulate { c: &self.before, mask: &self.mask };
        let want = oracle::grouped_wgrad(&self.x, &self.dy, &self.splits, Some(add));
        let add = oracle::Accumulate { c: &before, mask: &self.mask };
        let mag = oracle::grouped_wgrad(&abs(&self.x), &abs(&self.dy), &self.splits, Some(add));
        let what = format!("wgrad of {} with {:?}", self.d, self.splits);
        let bound = Bound::local(self.d.grad, self.d.capacity);
        self.on.dw.check(&what, &Mat::vstack(&want), &Mat::vstack(&mag), &bound);
    }
}

fn plan(g: &Gpu, d: GroupedDesc) -> GroupedGemmPlan {
    let plan = GroupedGemmPlan::new(d).unwrap();
    plan.prepare(&g.stream).unwrap();
    plan
}

fn every_case(dtype: DType) {
    let Some(g) = gpu("grouped_gemm") else { return };
    let mut rng = Rng::new(13);
    let sizes = [(72, 40), (128, 136), (22, 33), (130, 1), (2, 64)];
    let acts = [Activation::None, Activation::SwiGlu, Activation::Relu];
    for (i, (capacity, splits)) in cases().into_iter().enumerate() {
        for (j, (n, k)) in sizes.into_iter().enumerate() {
            let desc = GroupedDesc {
                activation: acts[(i + j) % 3],
                zero_tail: (i + j) % 2 == 0,
                out: [dtype, DType::F32][j % 2],
                grad: [DType::F32, dtype][j % 2],
                ..GroupedDesc::new(splits.len(), capacity + j, n, k, dtype)
            };
            let p = Problem::new(&g, &mut rng, desc, &splits);
            let plan = plan(&g, desc);
            p.run(&g, &plan);
            g.stream.synchronize().unwrap();
            plan.check().unwrap();
            p.check();
        }
    }
}

#[test]
fn passes_of_bf16() {
    every_case(DType::BF16);
}

#[test]
fn passes_of_f16() {
    every_case(DType::F16);
}

/// Splits that cannot be used: nothing is written, and the status stays until it is cleared.
#[test]
fn bad_splits_write_nothing() {
    let Some(g) = gpu("grouped_gemm") else { return };
    let d = GroupedDesc { zero_tail: true, ..GroupedDesc::new(3, 100, 40, 24, DType::BF16) };
    let (p, plan) = (Problem::new(&g, &mut Rng::new(14), d, &[40, 0, 50]), plan(&g, d));
    let put = |s: [i64; 3]| p.on.splits.upload(bytemuck::cast_slice(&s)).unwrap();
    for (bad, status) in [([40, -1, 0], 1), ([40, 61, 0], 2), ([1, i64::MAX, i64::MAX], 2)] {
        put(bad);
        p.reset();
        let before = p.on.dw.t.download().unwrap();
        p.run(&g, &plan);
        g.stream.synchronize().unwrap();
        assert_eq!(plan.status().to_vec::<i32>().unwrap(), [status]);
        assert!(p.on.out.t.download().unwrap().iter().all(|&b| b == DType::POISON));
        assert!(p.on.dw.t.download().unwrap() == before);
        put([40, 0, 50]);
        p.run(&g, &plan);
        g.stream.synchronize().unwrap();
        assert!(plan.check().is_err(), "good splits leave what was found");
        plan.reset(&g.stream).unwrap();
        g.stream.synchronize().unwrap();
        plan.check().unwrap();
    }
    p.reset();
    p.run(&g, &plan);
    g.stream.synchronize().unwrap();
    p.check();
}

#[test]
fn replays_follow_the_splits() {
    let Some(g) = gpu("grouped_gemm") else { return };
    let mut rng = Rng::new(15);
    let d = GroupedDesc {
        activation: Activation::SwiGlu,
        ..GroupedDesc::new(6, 400, 96, 72, DType::BF16)
    };
    let (p, plan) = (Problem::new(&g, &mut rng, d, &[0; 6]), plan(&g, d));
    let change = |round: u64| {
        let mut left = 400;
        let splits: Vec<i64> = (0..6)
            .map(|e| {
                let some = if (e + round).is_multiple_of(4) { 0 } else { rng.below(left / 2 + 1) };
                left -= some;
                some as i64
            })
            .collect();
        p.on.splits.upload(bytemuck::cast_slice(&splits)).unwrap();
        refill(&p.on.x, &mut rng);
        refill(&p.on.dy, &mut rng);
    };
    let outs = [&p.on.out.t, &p.on.dx.t, &p.on.dw.t];
    g.replays(&outs, change, || p.reset(), || p.run(&g, &plan));
    plan.check().unwrap();
}

#[test]
fn what_cannot_run_is_said() {
    let Some(g) = gpu("grouped_gemm") else { return };
    let bad = GroupedGemmPlan::new(GroupedDesc::new(2, 8, 8, 8, DType::F32)).unwrap();
    let e = bad.prepare(&g.stream).unwrap_err();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let host = Tensor::zeros(DType::I64, Shape::d1(2));
    let d = GroupedDesc::new(2, 8, 8, 8, DType::F16);
    let (p, plan) = (Problem::new(&g, &mut Rng::new(16), d, &[1, 2]), plan(&g, d));
    let t = GroupedDgrad {
        dy: (&p.on.dy).into(),
        w: Weights::from(&p.on.w),
        splits: Splits::counts(&host),
        dx: p.on.dx.t.clone(),
    };
    let e = plan.dgrad(&g.stream, t).err().unwrap();
    assert!(e.to_string().contains("`splits`") && e.get_hint().is_some(), "{e}");
}
