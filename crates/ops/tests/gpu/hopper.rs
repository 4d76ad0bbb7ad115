//! Products by the core for sm_90a against the oracle: on a GPU, and on an emulated device.

use tilewire_core::{DType, ErrorKind, Rng, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan,
};
use tilewire_ops::grouped_gemm::{GroupedDesc, GroupedGemmPlan, GroupedWgrad, Splits};
use tilewire_testing::{Lack, WORDS, did_not_run};

use crate::common::{Gpu, gpu};
use crate::driver::Driver;
use crate::gemm::{Problem, epilogue, plan_by, same_bits};
use crate::grouped_gemm::{self, Form, is_right};

const ORDERS: [(AOrder, BOrder); 3] =
    [(AOrder::Mk, BOrder::Nk), (AOrder::Mk, BOrder::Kn), (AOrder::Km, BOrder::Kn)];

/// A device whose kernels are for sm_90a.
#[track_caller]
pub fn hopper() -> Option<Gpu> {
    let g = gpu()?;
    let arch = CudaContext::new(0).unwrap().arch().unwrap();
    if arch == "sm_90a" {
        return Some(g);
    }
    let plan = GemmPlan::with_backend(GemmDesc::nt(8, 8, 8, DType::BF16), GemmBackend::Hopper);
    let e = plan.unwrap().prepare(&g.stream).unwrap_err();
    assert!(e.is_unsupported() && e.to_string().contains(&arch), "{e}");
    did_not_run(Lack::Sm90, e);
    None
}

pub fn is_emulated() -> bool {
    std::env::var_os("TW_EMU_TEXTS").is_some()
}

/// Shapes: one tile and less, tails of everything, tiles that overlap; of the plain product also
/// odd rows of tiles, one step, many steps, several waves, tiles of 320 columns; of what is added
/// to, those whose f32 come by tensor map, few steps, many, and wide tiles.
fn shapes(e: Epilogue) -> Vec<(usize, usize, usize)> {
    let mut all = vec![(1, 8, 8), (130, 264, 72)];
    if e.accumulate && !e.bias {
        all.push((144, 264, 72));
        if !is_emulated() {
            all.extend([(1040, 2056, 136), (272, 520, 2056), (1040, 3840, 136)]);
        }
    }
    let plain = e == Epilogue::NONE;
    if !is_emulated() {
        all.extend([(257, 136, 136), (520, 776, 328)]);
    }
    if !is_emulated() && plain {
        all.extend([
            (63, 136, 200),
            (128, 256, 64),
            (300, 40, 4096),
            (1032, 2056, 64),
            (1032, 3840, 136),
        ]);
    }
    all
}

fn epilogues() -> Vec<Epilogue> {
    let accumulate = Epilogue { accumulate: true, ..Epilogue::NONE };
    vec![
        Epilogue::NONE,
        epilogue(true, Activation::None),
        accumulate,
        Epilogue { bias: true, ..accumulate },
        epilogue(true, Activation::Relu),
        Epilogue { aux: true, ..epilogue(true, Activation::Gelu) },
        Epilogue { aux: true, ..epilogue(true, Activation::SwiGlu) },
        epilogue(false, Activation::SwiGlu),
        epilogue(false, Activation::DGelu),
        epilogue(false, Activation::DSwiGlu),
        Epilogue { bgrad: true, ..Epilogue::NONE },
    ]
}

/// Every order, epilogue and result, with the plan's most rows and with fewer; again, the bits are
/// the same.
#[test]
fn products_by_the_core() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(31);
    let types = if is_emulated() { &[DType::BF16][..] } else { &[DType::BF16, DType::F16] };
    for &dtype in types {
        for (i, e) in epilogues().into_iter().enumerate() {
            for (j, (a_order, b_order)) in ORDERS.into_iter().enumerate() {
                // An emulated device compiles each variant, and takes its time.
                if is_emulated() && (i + j) % 3 != 0 {
                    continue;
                }
                for (m, n, k) in shapes(e) {
                    let turned = a_order == AOrder::Km;
                    let m = if turned { m.next_multiple_of(8) } else { m };
                    let n =
                        if e.activation == Activation::SwiGlu { n.next_multiple_of(16) } else { n };
                    let wide = e.activation == Activation::None && i % 2 == 0;
                    let out = if wide && (m + n) % 16 == 8 { DType::F32 } else { dtype };
                    let base = GemmDesc { a_order, b_order, out, ..GemmDesc::nt(m, n, k, dtype) };
                    let desc = GemmDesc { epilogue: e, ..base };
                    let plan = plan_by(&g, desc, GemmBackend::Hopper);
                    assert!(plan.explain().contains("sm_90a"), "{}", plan.explain());
                    for rows in [m, m.div_ceil(24) * 8] {
                        let p = Problem::new(&g, &mut rng, desc, rows.min(m));
                        p.run(&g, &plan);
                        p.check();
                        if !e.accumulate {
                            let first = p.out.t.download().unwrap();
                            p.run(&g, &plan);
                            assert!(p.out.t.download().unwrap() == first, "bits of {desc}");
                        }
                    }
                }
            }
        }
    }
}

/// What the core does not take is an error of it alone, and takes the portable kernel with `auto`.
#[test]
fn what_the_core_does_not_take() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(32);
    let nt = |m, n, k| GemmDesc::nt(m, n, k, DType::BF16);
    let gelu = GemmDesc { epilogue: epilogue(true, Activation::Gelu), ..nt(40, 30, 33) };
    let turned = GemmDesc { a_order: AOrder::Km, ..nt(40, 32, 32) };
    for (desc, why) in
        [(gelu, "8 columns"), (turned, "[n, k]"), (GemmDesc::nt(8, 8, 8, DType::F32), "f32")]
    {
        let e = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap();
        let e = e.prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some() && e.to_string().contains(why), "{e}");
        let auto = plan_by(&g, desc, GemmBackend::Auto);
        let p = Problem::new(&g, &mut rng, desc, desc.m);
        p.run(&g, &auto);
        p.check();
    }
    // 41 rows of [k, m]: known at launch only.
    let desc = GemmDesc {
        a_order: AOrder::Km,
        b_order: BOrder::Kn,
        epilogue: epilogue(true, Activation::Relu),
        ..nt(48, 64, 32)
    };
    let p = Problem::new(&g, &mut rng, desc, 41);
    let forced = plan_by(&g, desc, GemmBackend::Hopper);
    let e = forced.launch(&g.stream, p.inputs.clone()).err().unwrap();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let auto = plan_by(&g, desc, GemmBackend::Auto);
    assert!(auto.explain().contains("sm_90a"), "{}", auto.explain());
    p.run(&g, &auto);
    p.check();
}

/// Launches of one plan side by side on two streams: each has the bits of its own operands.
#[test]
fn the_core_gives_the_same_bits_on_two_streams() {
    let Some(g) = hopper() else { return };
    let Device::Cuda(ctx) = &g.device else { return };
    let streams = [g.stream.clone(), Stream::on(ctx).unwrap()];
    let desc = GemmDesc::nt(264, 520, 136, DType::BF16);
    let plan = plan_by(&g, desc, GemmBackend::Hopper);
    same_bits(&g, &streams, &plan, (if is_emulated() { 2 } else { 50 }, 4));
}

/// With one cluster of blocks, and with as many as the device takes, the bits are the same; who
/// cannot keep to so few multiprocessors says so.
#[test]
fn the_core_keeps_to_its_multiprocessors() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(37);
    let desc = GemmDesc::nt(264, 520, 136, DType::BF16);
    let auto = GemmPlan::new(desc).unwrap().with_num_sms(3);
    auto.prepare(&g.stream).unwrap();
    assert!(auto.explain().contains(" 1 clusters of 2 blocks"), "{}", auto.explain());
    let p = Problem::new(&g, &mut rng, desc, 257);
    p.run(&g, &plan_by(&g, desc, GemmBackend::Hopper));
    let all = p.out.t.download().unwrap();
    p.run(&g, &auto);
    p.check();
    assert!(p.out.t.download().unwrap() == all, "bits of {desc}");
    let d = GroupedDesc { grad: DType::F32, ..GroupedDesc::new(3, 330, 144, 136, DType::BF16) };
    let form = Form { core: true, ..Form::default() };
    let p = grouped_gemm::Problem::new(&g, &mut rng, d, &[200, 0, 129], form);
    is_right(&g, &p, &grouped_plan(&g, d));
    let all = p.outs().map(|t| t.download().unwrap());
    let few = GroupedGemmPlan::new(d).unwrap().with_num_sms(2);
    few.prepare(&g.stream).unwrap();
    assert!(few.explain().contains(" 1 clusters of 2 blocks"), "{}", few.explain());
    p.reset();
    is_right(&g, &p, &few);
    assert!(p.outs().map(|t| t.download().unwrap()) == all, "bits of {d}");
    // Nobody else keeps to them.
    let odd = GemmPlan::new(GemmDesc::nt(8, 9, 7, DType::BF16)).unwrap().with_num_sms(2);
    odd.prepare(&g.stream).unwrap();
    assert!(odd.explain().contains("takes all multiprocessors"), "{}", odd.explain());
    let by = GemmPlan::with_backend(desc, GemmBackend::Portable).unwrap().with_num_sms(2);
    let groups = GroupedGemmPlan::with_backend(d, GemmBackend::Portable).unwrap().with_num_sms(2);
    for e in [by.prepare(&g.stream), groups.prepare(&g.stream)].map(Result::unwrap_err) {
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        assert!(e.to_string().contains("takes all multiprocessors"), "{e}");
    }
}

fn grouped_plan(g: &Gpu, d: GroupedDesc) -> GroupedGemmPlan {
    let plan = GroupedGemmPlan::with_backend(d, GemmBackend::Hopper).unwrap();
    plan.prepare(&g.stream).unwrap();
    assert!(plan.explain().contains("sm_90a"), "{}", plan.explain());
    plan
}

/// Splits: empty groups, tails of everything, one row, more groups than a warp has lanes.
fn splits() -> Vec<Vec<usize>> {
    let mut all = vec![vec![3, 0, 170, 1, 0, 126], vec![0, 0, 0]];
    if !is_emulated() {
        all.extend([vec![0, 65, 2, 129], vec![190], vec![1], vec![300, 2100, 0, 257]]);
        all.push((0..70).map(|e| usize::from(e % 7 == 3) * (e % 5) * 30).collect());
    }
    all
}

/// Every pass, activation, form of splits and type of results.
#[test]
fn products_of_groups_by_the_core() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(33);
    let sizes: &[_] =
        if is_emulated() { &[(144, 72)] } else { &[(144, 72), (512, 264), (16, 8), (272, 1032)] };
    for (i, splits) in splits().into_iter().enumerate() {
        for (j, &(n, k)) in sizes.iter().enumerate() {
            for (a, activation) in
                [Activation::None, Activation::SwiGlu, Activation::Relu, Activation::Gelu]
                    .into_iter()
                    .enumerate()
            {
                let round = i + j + a;
                if is_emulated() && (i + a) % 2 == 1 {
                    continue;
                }
                let dtype = if round % 3 == 2 { DType::F16 } else { DType::BF16 };
                let wide = activation == Activation::None && i % 2 == 1;
                let rows = splits.iter().sum::<usize>() + 7 * j;
                let d = GroupedDesc {
                    activation,
                    zero_tail: round % 2 == 0,
                    out: if wide { DType::F32 } else { dtype },
                    grad: if round % 2 == 1 { DType::F32 } else { dtype },
                    ..GroupedDesc::new(splits.len(), rows, n, k, dtype)
                };
                let (ends, narrow, bare) = (round % 2 == 1, round % 4 > 1, (i + a) % 4 == 0);
                let discrete = (i + j + a) % 3 == 1;
                let form = Form { ends, narrow, discrete, bare, core: true };
                let p = grouped_gemm::Problem::new(&g, &mut rng, d, &splits, form);
                let plan = grouped_plan(&g, d);
                is_right(&g, &p, &plan);
                let bits = |p: &grouped_gemm::Problem| p.outs().map(|t| t.download().unwrap());
                let first = bits(&p);
                p.reset();
                is_right(&g, &p, &plan);
                assert!(bits(&p) == first, "bits of {d}");
            }
        }
    }
}

/// Short sums into large results, many times: the loads and stores of one warpgroup stand in the
/// way of the other's ticket. Numbers are whole and small, so that every sum is exact; those of all
/// rows and columns are compared, and 21 launches with one.
#[test]
fn short_sums_are_added_to_large_results() {
    let Some(g) = hopper() else { return };
    if is_emulated() {
        return;
    }
    let [groups, rows, n, k] = [8, 2048, 4096, 7168];
    let mut rng = Rng::new(36);
    let mut whole = |cols: usize| -> Vec<f32> {
        (0..rows * cols).map(|_| (rng.below(3) as f32) - 1.0).collect()
    };
    let (x, dy) = (whole(k), whole(n));
    let put = |v: &[f32], cols| {
        g.move_here(&Tensor::from_f32(v, DType::BF16, Shape::d2(rows, cols)).unwrap())
    };
    let (on_x, on_dy) = (put(&x, k), put(&dy, n));
    let dw = Tensor::zeros_on(&on_x.device(), DType::F32, Shape::d2(groups * n, k)).unwrap();
    let d = GroupedDesc { grad: DType::F32, ..GroupedDesc::new(groups, rows, n, k, DType::BF16) };
    let plan = grouped_plan(&g, d);
    let splits = vec![(rows / groups) as i64; groups];
    let splits = g.move_here(&Tensor::from_slice(&splits, Shape::d1(groups)).unwrap());
    let mask = g.move_here(&Tensor::from_slice(&vec![1u8; groups], Shape::d1(groups)).unwrap());
    let add = || {
        let (splits, mask) = (Splits::counts(&splits), Some(mask.clone()));
        let (x, dy, dw) = ((&on_x).into(), (&on_dy).into(), (&dw).into());
        plan.wgrad(&g.stream, GroupedWgrad { x, dy, splits, dw, mask, dbias: None })
            .unwrap()
            .join(&g.stream)
            .unwrap();
    };
    add();
    g.stream.synchronize().unwrap();
    let first: Vec<f32> = dw.to_vec().unwrap();
    (0..20).for_each(|_| add());
    g.stream.synchronize().unwrap();
    let last: Vec<f32> = dw.to_vec().unwrap();
    let bad = first.iter().zip(&last).filter(|(a, b)| **b != 21.0 * **a).count();
    assert_eq!(bad, 0, "elements of 21 launches that are not 21 times those of one");
    let sum = |v: &[f32]| v.iter().map(|x| *x as i64).sum::<i64>();
    for e in 0..groups {
        let of = e * rows / groups..(e + 1) * rows / groups;
        let (mut by_row, mut by_col) = (vec![0i64; n], vec![0i64; k]);
        for r in of {
            let (x, dy) = (&x[r * k..(r + 1) * k], &dy[r * n..(r + 1) * n]);
            let (of_x, of_dy) = (sum(x), sum(dy));
            by_row.iter_mut().zip(dy).for_each(|(to, v)| *to += *v as i64 * of_x);
            by_col.iter_mut().zip(x).for_each(|(to, v)| *to += *v as i64 * of_dy);
        }
        let own = &first[e * n * k..(e + 1) * n * k];
        let mut cols = vec![0i64; k];
        for (row, want) in own.chunks(k).zip(by_row) {
            assert_eq!(sum(row), want, "a row of group {e}");
            cols.iter_mut().zip(row).for_each(|(to, v)| *to += *v as i64);
        }
        assert!(cols == by_col, "columns of group {e}");
    }
}

/// Numbers below the least normal one stay as they are where nothing is added to them, and come out
/// where normal ones cancel, whoever adds.
#[test]
fn tiny_results_are_added_to() {
    let Some(g) = hopper() else { return };
    for k in if is_emulated() { &[72][..] } else { &[72, 2056] } {
        let desc = GemmDesc {
            a_order: AOrder::Km,
            b_order: BOrder::Kn,
            out: DType::F32,
            epilogue: Epilogue { accumulate: true, ..Epilogue::NONE },
            ..GemmDesc::nt(144, 264, *k, DType::BF16)
        };
        let plan = plan_by(&g, desc, GemmBackend::Hopper);
        // Operands whose product is `v` squared, with the sign of `v` turned, or zero.
        let operand = |rows: usize, v: f32| {
            let mut all = vec![0.0; k * rows];
            all[..rows].fill(v);
            g.move_here(&Tensor::from_f32(&all, DType::BF16, Shape::d2(*k, rows)).unwrap())
        };
        let tiny: Vec<f32> = (1..=144 * 264).map(f32::from_bits).collect();
        let (root, least) = (2f32.powi(-63), f32::MIN_POSITIVE);
        for (v, before, after) in [
            (0.0, tiny.clone(), tiny.clone()),
            (root, tiny.iter().map(|t| least + t).collect(), tiny),
        ] {
            let d =
                g.move_here(&Tensor::from_f32(&before, DType::F32, Shape::d2(144, 264)).unwrap());
            let inputs = GemmInputs::new(operand(144, v), operand(264, -v), d.clone());
            plan.launch(&g.stream, inputs).unwrap().join(&g.stream).unwrap();
            g.stream.synchronize().unwrap();
            let all = d.to_vec::<f32>().unwrap();
            let bad = all.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert_eq!(bad, 0, "numbers of {desc} with {v} that are others");
        }
    }
}

/// Twenty replays of a graph with other splits each time.
#[test]
fn replays_of_the_core_follow_the_splits() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(34);
    let d = GroupedDesc::new(6, 400, 96, 72, DType::BF16);
    let d = GroupedDesc { activation: Activation::SwiGlu, ..d };
    let form = Form { core: true, ..Form::default() };
    let p = grouped_gemm::Problem::new(&g, &mut rng, d, &[0; 6], form);
    grouped_gemm::replays(&g, &mut rng, &p, &grouped_plan(&g, d));
}

/// What the core does not take of groups is an error of it alone.
#[test]
fn groups_that_the_core_does_not_take() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(35);
    let d = |n, k| GroupedDesc::new(2, 40, n, k, DType::BF16);
    for (d, by, why) in [
        (d(30, 32), GemmBackend::Hopper, "30 x 32"),
        (GroupedDesc { dtype: DType::F32, out: DType::F32, ..d(8, 8) }, GemmBackend::Hopper, "f32"),
        (d(8, 8), GemmBackend::CublasLt, "device"),
    ] {
        let e = GroupedGemmPlan::with_backend(d, by).unwrap().prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some() && e.to_string().contains(why), "{e}");
    }
    // Features of 30 take the portable kernels; the emulated device here is large enough for
    // others.
    let takes = |d: GroupedDesc| {
        let auto = GroupedGemmPlan::new(d).unwrap();
        auto.prepare(&g.stream).unwrap();
        (auto.explain().contains("the core for sm_90a (128"), auto)
    };
    assert!(!takes(d(30, 32)).0);
    let (by_core, auto) = takes(d(16, 32));
    assert!(by_core, "{}", auto.explain());
    let form = Form { discrete: true, core: true, ..Form::default() };
    let p = grouped_gemm::Problem::new(&g, &mut rng, d(16, 32), &[30, 7], form);
    is_right(&g, &p, &auto);
}

/// A list of tensors that no launch has seen cannot be captured; one that a launch has seen can.
#[test]
fn lists_of_tensors_are_seen_before_a_capture() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(36);
    let d = GroupedDesc::new(3, 40, 16, 32, DType::BF16);
    let form = Form { discrete: true, core: true, ..Form::default() };
    let [p, other] = [0, 1].map(|_| grouped_gemm::Problem::new(&g, &mut rng, d, &[30, 0, 7], form));
    let plan = grouped_plan(&g, d);
    is_right(&g, &p, &plan);
    g.stream.begin_capture().unwrap();
    let e = other.launch(&g, &plan).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::NotPrepared, "{e}");
    assert!(e.get_hint().is_some() && e.to_string().contains("capture"), "{e}");
    p.launch(&g, &plan).unwrap();
    let graph = g.stream.end_capture().unwrap().instantiate().unwrap();
    p.reset();
    g.stream.replay(&graph).unwrap();
    g.stream.synchronize().unwrap();
    p.check();
}

/// Runs tests of this program on an emulated device of so many multiprocessors: all must pass, and
/// none may have lacked one.
pub fn pass_on_an_emulated_device(num_sms: usize, tests: &[&str]) {
    if is_emulated() {
        return;
    }
    let Some(driver) = Driver::emulated() else {
        did_not_run(Lack::Compiler, "no g++ builds an emulated driver here");
        return;
    };
    let mut run = driver.command(std::env::current_exe().unwrap(), 1);
    let out = run.env("TW_EMU_SMS", num_sms.to_string()).arg("--exact").args(tests);
    let out = out.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let text = format!("{text}{}", String::from_utf8_lossy(&out.stderr));
    let passed = format!("{} passed", tests.len());
    assert!(out.status.success() && text.contains(&passed), "{text}");
    assert!(!text.contains(WORDS), "{text}");
}

#[test]
fn the_core_runs_on_emulated_devices() {
    // As many multiprocessors as `auto` wants for it.
    pass_on_an_emulated_device(
        8,
        &[
            "hopper::products_by_the_core",
            "hopper::what_the_core_does_not_take",
            "hopper::the_core_gives_the_same_bits_on_two_streams",
            "hopper::the_core_keeps_to_its_multiprocessors",
            "hopper::products_of_groups_by_the_core",
            "hopper::replays_of_the_core_follow_the_splits",
            "hopper::groups_that_the_core_does_not_take",
            "hopper::lists_of_tensors_are_seen_before_a_capture",
            "parts::products_in_parts",
            "parts::few_tiles_are_computed_in_parts",
            "parts::few_rows_have_their_bits_whatever_is_beside_them",
            "parts::launches_behind_each_other_wait_for_each_other",
            "parts::parts_of_many_rows",
        ],
    );
}
