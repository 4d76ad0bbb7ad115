//! `grouped_gemm` against the oracle.

use tilewire_core::numerics::Bound;
use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::{Buffer, Device, Queue, Stream, Tensor};
use tilewire_ops::gemm::Activation;
use tilewire_ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, SplitKind, Splits,
    Weights,
};
use tilewire_oracle::Mat;
use tilewire_oracle::gemm as gemm_oracle;
use tilewire_oracle::grouped_gemm as oracle;

use crate::calls;
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
pub struct Problem {
    d: GroupedDesc,
    splits: Vec<usize>,
    x: Mat,
    dy: Mat,
    w: Vec<Mat>,
    bias: Mat,
    before: Vec<Mat>,
    mask: Vec<bool>,
    dact: Mat,
    saved: Mat,
    form: Form,
    on: Tensors,
}

/// How splits and weights are given.
#[derive(Clone, Copy, Default, Debug)]
pub struct Form {
    pub ends: bool,
    pub narrow: bool,
    /// Weights and their gradients are in a tensor for each group.
    pub discrete: bool,
    /// For the core for sm_90a, which stores no pre-activation without an activation.
    pub core: bool,
    /// No bias, mask or pre-activation.
    pub bare: bool,
}

impl Form {
    fn all() -> [Form; 4] {
        [(false, false), (true, false), (false, true), (true, true)].map(|(ends, narrow)| Form {
            ends,
            narrow,
            discrete: ends != narrow,
            ..Form::default()
        })
    }

    fn bytes(self, counts: &[i64]) -> Vec<u8> {
        let mut v = counts.to_vec();
        if self.ends {
            (1..v.len()).for_each(|i| v[i] += v[i - 1]);
        }
        let narrow: Vec<i32> = v.iter().map(|&s| s as i32).collect();
        let (wide, narrow) = (bytemuck::cast_slice(&v), bytemuck::cast_slice(&narrow));
        if self.narrow { narrow } else { wide }.to_vec()
    }
}

struct Tensors {
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    bias: Tensor,
    /// In the form of `form`.
    splits: Tensor,
    mask: Tensor,
    /// Gradient of the result, and the pre-activation that it is taken at.
    dact: Tensor,
    saved: Tensor,
    dz: Out,
    aux: Out,
    dbias: Out,
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
    pub fn new(g: &Gpu, rng: &mut Rng, d: GroupedDesc, splits: &[usize], form: Form) -> Self {
        let (groups, cap, n, k) = (d.groups, d.capacity, d.n, d.k);
        let x = random(rng, cap, k, d.dtype);
        let dy = random(rng, cap, n, d.dtype);
        let w: Vec<Mat> = (0..groups).map(|_| random(rng, n, k, d.dtype)).collect();
        let bias = random(rng, groups, n, DType::F32);
        let before: Vec<Mat> = (0..groups).map(|_| random(rng, n, k, d.grad)).collect();
        let mask: Vec<bool> = (0..groups).map(|e| !form.bare && e % 2 == 0).collect();
        let bytes: Vec<u8> = mask.iter().map(|&m| 3 * u8::from(m)).collect();
        let (dact, saved) = (random(rng, cap, d.out_cols(), d.out), random(rng, cap, n, d.out));
        let on = Tensors {
            x: g.put_shifted(&x, d.dtype),
            dy: g.put_shifted(&dy, d.dtype),
            w: g.put_shifted(&Mat::vstack(&w), d.dtype),
            bias: g.put(&bias, DType::F32),
            splits: {
                let dtype = if form.narrow { DType::I32 } else { DType::I64 };
                let t = Tensor::zeros(dtype, Shape::d1(groups));
                t.upload(&form.bytes(&counts(splits))).unwrap();
                g.move_here(&t)
            },
            dact: g.put_shifted(&dact, d.out),
            saved: g.put_shifted(&saved, d.out),
            dz: g.out(d.out, cap, n),
            aux: g.out(d.out, cap, n),
            dbias: g.out(DType::F32, groups, n),
            mask: g.move_here(&Tensor::from_slice(&bytes, Shape::d1(groups)).unwrap()),
            out: g.out(d.out, cap, d.out_cols()),
            dx: g.out(d.out, cap, k),
            dw: g.out(d.grad, groups * n, k),
        };
        let p = Self {
            d,
            splits: splits.to_vec(),
            x,
            dy,
            w,
            bias,
            before,
            mask,
            dact,
            saved,
            form,
            on,
        };
        p.reset();
        p
    }

    /// The rows of each group as tensors of their own, or all in one.
    fn weights(&self, t: &Tensor) -> Weights {
        if !self.form.discrete {
            return Weights::from(t);
        }
        let one = |e: usize| (&t.rows(e * self.d.n, self.d.n).unwrap()).into();
        Weights::Discrete((0..self.d.groups).map(one).collect())
    }

    pub fn outs(&self) -> [&Tensor; 6] {
        let t = &self.on;
        [&t.out, &t.dx, &t.dw, &t.dz, &t.aux, &t.dbias].map(|o| &o.t)
    }

    /// Poison in the results, but for what is added to.
    pub fn reset(&self) {
        let t = &self.on;
        self.outs().into_iter().for_each(|t| t.poison().unwrap());
        for (e, m) in self.before.iter().enumerate().filter(|(e, _)| self.mask[*e]) {
            let rows = t.dw.t.rows(e * self.d.n, self.d.n).unwrap();
            rows.upload(&m.to_bytes(self.d.grad)).unwrap();
        }
    }

    fn saves_aux(&self) -> bool {
        !(self.form.bare || self.form.core && self.d.activation == Activation::None)
    }

    fn bias(&self) -> Option<&Mat> {
        (!self.form.bare).then_some(&self.bias)
    }

    /// Queues all passes.
    pub fn run(&self, g: &Gpu, plan: &GroupedGemmPlan) {
        self.launch(g, plan).unwrap();
    }

    pub fn launch(&self, g: &Gpu, plan: &GroupedGemmPlan) -> Result<()> {
        let (s, t) = (&g.stream, &self.on);
        let ends = if self.form.ends { SplitKind::Ends } else { SplitKind::Counts };
        let splits = Splits { values: t.splits.clone(), kind: ends };
        let fprop = GroupedFprop {
            x: (&t.x).into(),
            w: self.weights(&t.w),
            bias: self.bias().map(|_| t.bias.clone()),
            splits: splits.clone(),
            out: t.out.t.clone(),
            aux_out: self.saves_aux().then(|| t.aux.t.clone()),
        };
        plan.fprop(s, fprop)?.join(s)?;
        let dgrad = GroupedDgrad {
            dy: (&t.dy).into(),
            w: self.weights(&t.w),
            splits: splits.clone(),
            dx: t.dx.t.clone(),
        };
        plan.dgrad(s, dgrad)?.join(s)?;
        let wgrad = GroupedWgrad {
            x: (&t.x).into(),
            dy: (&t.dy).into(),
            splits: splits.clone(),
            dw: self.weights(&t.dw.t),
            mask: (!self.form.bare).then(|| t.mask.clone()),
            dbias: Some(t.dbias.t.clone()),
        };
        plan.wgrad(s, wgrad)?.join(s)?;
        let (dy, aux) = (&t.dact, &t.saved);
        plan.dactivation(s, &splits, dy, aux, &t.dz.t)?.join(s)?;
        Ok(())
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

    pub fn check(&self) {
        let (d, zero) = (&self.d, oracle::Tail::Zero);
        let all: Vec<Mat> = self.w.iter().map(abs).collect();
        let (bias, mag) = (self.bias().map(abs), abs(&self.x));
        let z = oracle::grouped_fprop(&self.x, &self.w, self.bias(), &self.splits, zero);
        let mag = oracle::grouped_fprop(&mag, &all, bias.as_ref(), &self.splits, zero);
        if self.saves_aux() {
            self.rows("aux", &self.on.aux, &z, &mag, d.k);
        }
        let act = self.act();
        let half = d.n / 2;
        let mag = match d.activation {
            Activation::SwiGlu => Mat::from_fn(d.capacity, half, |i, j| {
                let (gate, up) = (z.at(i, j).abs(), z.at(i, half + j).abs());
                1.2 * up * mag.at(i, j) + gate * mag.at(i, half + j) + gate * up + 1.0
            }),
            Activation::Gelu => mag.map(|v| 1.2 * v + 1.0),
            _ => mag,
        };
        self.rows("fprop", &self.on.out, &gemm_oracle::activate(act, &z), &mag, d.k);
        let want = oracle::grouped_dgrad(&self.dy, &self.w, &self.splits, zero);
        let mag = oracle::grouped_dgrad(&abs(&self.dy), &all, &self.splits, zero);
        self.rows("dgrad", &self.on.dx, &want, &mag, d.n);
        self.check_wgrad();
        let want = gemm_oracle::activate_bwd(self.act(), &self.saved, &self.dact);
        let cols = d.out_cols().max(1);
        let mag = Mat::from_fn(d.capacity, d.n, |i, j| {
            let size = |j: usize| 1.0 + self.saved.at(i, j).abs();
            let up = if half == cols { size(half + j % cols) } else { 1.0 };
            2.0 * self.dact.at(i, j % cols).abs() * size(j % cols) * up
        });
        self.rows("dactivation", &self.on.dz, &want, &mag, 1);
    }

    fn act(&self) -> gemm_oracle::Activation {
        match self.d.activation {
            Activation::SwiGlu => gemm_oracle::Activation::SwiGlu,
            Activation::Gelu => gemm_oracle::Activation::Gelu,
            Activation::Relu => gemm_oracle::Activation::Relu,
            _ => gemm_oracle::Activation::None,
        }
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
        let want = oracle::grouped_dbias(&self.dy, &self.splits);
        let mag = oracle::grouped_dbias(&abs(&self.dy), &self.splits);
        let bound = Bound::local(DType::F32, self.d.capacity);
        self.on.dbias.check(&format!("dbias, {what}"), &want, &mag, &bound);
    }
}

fn plan(g: &Gpu, d: GroupedDesc) -> GroupedGemmPlan {
    let plan = GroupedGemmPlan::new(d).unwrap();
    plan.prepare(&g.stream).unwrap();
    plan
}

/// Whether every element that a pass writes is the reference's.
pub fn is_right(g: &Gpu, p: &Problem, plan: &GroupedGemmPlan) {
    p.run(g, plan);
    g.stream.synchronize().unwrap();
    plan.check().unwrap();
    p.check();
}

fn every_case(dtype: DType) {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(13);
    // Results are never FP8.
    let wide = if dtype.is_fp8() { DType::BF16 } else { dtype };
    let sizes = [(72, 40), (128, 136), (22, 33), (130, 1), (2, 64)];
    let acts = [Activation::None, Activation::SwiGlu, Activation::Relu, Activation::Gelu];
    for (i, (capacity, splits)) in cases().into_iter().enumerate() {
        for (j, (n, k)) in sizes.into_iter().enumerate() {
            let desc = GroupedDesc {
                activation: if n % 2 == 0 { acts[(i + j) % 4] } else { Activation::None },
                zero_tail: (i + j) % 2 == 0,
                out: [wide, DType::F32][j % 2],
                grad: [DType::F32, wide][j % 2],
                ..GroupedDesc::new(splits.len(), capacity + j, n, k, dtype)
            };
            let p = Problem::new(&g, &mut rng, desc, &splits, Form::all()[(i + j / 2) % 4]);
            is_right(&g, &p, &plan(&g, desc));
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

#[test]
fn passes_of_f32() {
    every_case(DType::F32);
}

#[test]
fn passes_of_fp8() {
    every_case(DType::F8E4M3);
    every_case(DType::F8E5M2);
}

/// Splits that cannot be used: nothing is written, and the status stays until it is cleared.
#[test]
fn bad_splits_write_nothing() {
    let Some(g) = gpu() else { return };
    let d = GroupedDesc { zero_tail: true, ..GroupedDesc::new(3, 100, 40, 24, DType::BF16) };
    let (p, plan) =
        (Problem::new(&g, &mut Rng::new(14), d, &[40, 0, 50], Form::default()), plan(&g, d));
    let put = |s: [i64; 3]| p.on.splits.upload(bytemuck::cast_slice(&s)).unwrap();
    for (bad, status) in [([40, -1, 0], 1), ([40, 61, 0], 2), ([1, i64::MAX, i64::MAX], 2)] {
        put(bad);
        p.reset();
        let before = p.on.dw.t.download().unwrap();
        p.run(&g, &plan);
        g.stream.synchronize().unwrap();
        assert_eq!(plan.status().to_vec::<i32>().unwrap(), [status]);
        for t in p.outs().into_iter().filter(|t| !t.shares_memory(&p.on.dw.t)) {
            assert!(t.download().unwrap().iter().all(|&b| b == DType::POISON), "written");
        }
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
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(15);
    let d = GroupedDesc {
        activation: Activation::SwiGlu,
        ..GroupedDesc::new(6, 400, 96, 72, DType::BF16)
    };
    for (i, form) in Form::all().into_iter().enumerate() {
        let dtype = [DType::BF16, DType::F32, DType::F8E4M3][i % 3];
        let out = if dtype == DType::F32 { dtype } else { DType::BF16 };
        let d = GroupedDesc { dtype, out, ..d };
        let p = Problem::new(&g, &mut rng, d, &[0; 6], form);
        replays(&g, &mut rng, &p, &plan(&g, d));
    }
}

/// Twenty replays with other splits each time.
pub fn replays(g: &Gpu, rng: &mut Rng, p: &Problem, plan: &GroupedGemmPlan) {
    let change = |round: u64| {
        let mut left = 400;
        let splits: Vec<i64> = (0..6)
            .map(|e| {
                let some = if (e + round).is_multiple_of(4) { 0 } else { rng.below(left / 2 + 1) };
                left -= some;
                some as i64
            })
            .collect();
        p.on.splits.upload(&p.form.bytes(&splits)).unwrap();
        refill(&p.on.x, rng);
        refill(&p.on.dy, rng);
    };
    g.replays(&p.outs(), change, || p.reset(), || p.run(g, plan));
    plan.check().unwrap();
}

#[test]
fn what_cannot_run_is_said() {
    let Some(g) = gpu() else { return };
    let bad = GroupedGemmPlan::new(GroupedDesc {
        out: DType::F8E4M3,
        ..GroupedDesc::new(2, 8, 8, 8, DType::BF16)
    })
    .unwrap();
    let e = bad.prepare(&g.stream).unwrap_err();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let host = Tensor::zeros(DType::I64, Shape::d1(2));
    let d = GroupedDesc::new(2, 8, 8, 8, DType::F16);
    let (p, plan) = (Problem::new(&g, &mut Rng::new(16), d, &[1, 2], Form::default()), plan(&g, d));
    let t = GroupedDgrad {
        dy: (&p.on.dy).into(),
        w: Weights::from(&p.on.w),
        splits: Splits::counts(&host),
        dx: p.on.dx.t.clone(),
    };
    let e = plan.dgrad(&g.stream, t).err().unwrap();
    assert!(e.to_string().contains("`splits`") && e.get_hint().is_some(), "{e}");
}

/// A launch cannot read them then; the capture goes on, and is what it was before.
#[test]
fn splits_of_the_host_are_refused_under_capture() {
    let Some(g) = gpu() else { return };
    let d = GroupedDesc::new(2, 8, 8, 8, DType::BF16);
    let (p, plan) = (Problem::new(&g, &mut Rng::new(18), d, &[3, 2], Form::default()), plan(&g, d));
    g.stream.begin_capture().unwrap();
    for dtype in [DType::I32, DType::I64] {
        let t = GroupedDgrad {
            dy: (&p.on.dy).into(),
            w: Weights::from(&p.on.w),
            splits: Splits::counts(&Tensor::zeros(dtype, Shape::d1(2))),
            dx: p.on.dx.t.clone(),
        };
        let e = plan.dgrad(&g.stream, t).err().unwrap();
        assert!(e.to_string().contains("`splits`") && e.get_hint().is_some(), "{e}");
    }
    let graph = g.stream.end_capture().unwrap();
    assert_eq!(graph.num_nodes(), 0, "what is refused leaves nothing in a graph");
}

/// Pages of the host that stay in place are taken by heaps only: neither `prepare` nor a launch
/// does.
#[test]
fn no_memory_of_the_host_is_pinned() {
    let Some(g) = gpu() else { return };
    let d = GroupedDesc::new(2, 8, 8, 8, DType::BF16);
    let p = Problem::new(&g, &mut Rng::new(19), d, &[3, 2], Form::default());
    let seen = calls::of(|| {
        let plan = plan(&g, d);
        for _ in 0..3 {
            p.run(&g, &plan);
        }
        g.stream.synchronize().unwrap();
    });
    let pins = |c: &&String| {
        c.contains("HostAlloc") || c.contains("AllocHost") || c.contains("HostRegister")
    };
    assert_eq!(seen.iter().find(pins), None, "{seen:?}");
    // Blind, it would find nothing, either.
    assert!(
        calls::file("").is_none()
            || seen.iter().any(|c| c.starts_with("cuMem")
                || c.contains("Module")
                || c.contains("Synchronize")),
        "nothing is counted: {seen:?}"
    );
}

/// A problem, and the bits of what it is by itself.
type Alone = (Problem, Vec<Vec<u8>>);

/// Two problems of one plan, and a second stream.
fn two(g: &Gpu, form: Form, dtype: DType) -> (GroupedDesc, [Alone; 2], Gpu) {
    let Device::Cuda(ctx) = &g.device else { panic!("a device") };
    let out = if dtype.is_fp8() { DType::BF16 } else { dtype };
    let d = GroupedDesc { out, ..GroupedDesc::new(6, 90, 24, 16, dtype) };
    let splits = [vec![1; 6], vec![0, 0, 0, 80, 0, 10]];
    let mut rng = Rng::new(20);
    let both = splits.map(|s| {
        let p = Problem::new(g, &mut rng, d, &s, form);
        p.run(g, &plan(g, d));
        g.stream.synchronize().unwrap();
        p.check();
        let bits = p.bits();
        (p, bits)
    });
    (d, both, Gpu { device: g.device.clone(), stream: Stream::on(ctx).unwrap() })
}

impl Problem {
    fn bits(&self) -> Vec<Vec<u8>> {
        self.outs().into_iter().map(|t| t.download().unwrap()).collect()
    }
}

/// Streams with a workspace each, and with one between them; queued by one thread, and by two at
/// once.
#[test]
fn launches_on_two_streams_do_not_meet() {
    let Some(g) = gpu() else { return };
    let discrete = Form { discrete: true, ..Form::default() };
    for (form, dtype) in [(discrete, DType::F16), (Form::default(), DType::F8E4M3)] {
        let (d, [(a, of_a), (b, of_b)], h) = two(&g, form, dtype);
        for way in 0..4 {
            let plan = plan(&g, d);
            if way % 2 == 0 {
                plan.prepare(&h.stream).unwrap();
            }
            for round in 0..3 {
                a.reset();
                b.reset();
                if way < 2 {
                    a.run(&g, &plan);
                    b.run(&h, &plan);
                } else {
                    std::thread::scope(|s| {
                        s.spawn(|| a.run(&g, &plan));
                        b.run(&h, &plan);
                    });
                }
                g.stream.synchronize().unwrap();
                h.stream.synchronize().unwrap();
                assert!(a.bits() == of_a && b.bits() == of_b, "{dtype}, {way}, round {round}");
            }
            plan.check().unwrap();
        }
    }
}

/// A graph has workspaces of its own: one for each of its streams, which outlive the plan.
#[test]
fn graphs_do_not_meet_launches_nor_their_own_branches() {
    let Some(g) = gpu() else { return };
    let discrete = Form { discrete: true, ..Form::default() };
    for (form, dtype) in [(discrete, DType::F16), (Form::default(), DType::F8E4M3)] {
        let (d, [(a, of_a), (b, of_b)], h) = two(&g, form, dtype);
        // Each plan sees the lists of tensors before a capture: the core wants that.
        let [eager, gone] = [plan(&g, d), plan(&g, d)];
        for (p, on, plan) in [(&a, &g, &eager), (&a, &g, &gone), (&b, &h, &gone)] {
            p.run(on, plan);
            on.stream.synchronize().unwrap();
        }
        g.stream.begin_capture().unwrap();
        a.run(&g, &eager);
        let one = g.stream.end_capture().unwrap().instantiate().unwrap();
        let (fork, join) = (g.stream.event().unwrap(), g.stream.event().unwrap());
        g.stream.begin_capture().unwrap();
        g.stream.record(&fork).unwrap();
        h.stream.wait(&fork).unwrap();
        a.run(&g, &gone);
        b.run(&h, &gone);
        h.stream.record(&join).unwrap();
        g.stream.wait(&join).unwrap();
        let branches = g.stream.end_capture().unwrap().instantiate().unwrap();
        drop(gone);
        for round in 0..3 {
            for graph in [&one, &branches] {
                [&a, &b].into_iter().for_each(Problem::reset);
                g.stream.replay(graph).unwrap();
                if std::ptr::eq(graph, &one) {
                    b.run(&h, &eager);
                }
                g.stream.synchronize().unwrap();
                h.stream.synchronize().unwrap();
                assert!(a.bits() == of_a && b.bits() == of_b, "{dtype}, round {round}");
            }
        }
    }
}
