//! Products by the core for sm_90a whose contractions are cut into parts: on a GPU, and on an
//! emulated device.

use tilewire_core::{DType, Rng};
use tilewire_device::{Buffer, Device, Queue, Stream};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan,
};
use tilewire_oracle::Mat;

use crate::common::Gpu;
use crate::gemm::{Problem, epilogue, plan_by, same_bits};
use crate::hopper::{hopper, is_emulated};

fn plan_in(g: &Gpu, desc: GemmDesc, parts: usize) -> GemmPlan {
    let plan = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap().with_parts(parts);
    plan.prepare(&g.stream).unwrap();
    plan
}

/// What a launch gives, which is right. Where it is added to, once.
fn bits(g: &Gpu, p: &Problem, plan: &GemmPlan) -> Vec<u8> {
    if !p.desc.epilogue.accumulate {
        poison(p);
    }
    p.run(g, plan);
    p.check();
    p.out.t.download().unwrap()
}

fn poison(p: &Problem) {
    p.out.t.write(|out| out.fill(0xff)).unwrap();
}

/// Every epilogue and order, parts of which the last is short, the plan's most rows and fewer;
/// again, and on few multiprocessors, the bits are the same.
#[test]
fn products_in_parts() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(41);
    let accumulate = Epilogue { accumulate: true, ..Epilogue::NONE };
    let all = [
        (Epilogue::NONE, DType::BF16),
        (Epilogue { aux: true, ..epilogue(true, Activation::Gelu) }, DType::F16),
        (Epilogue { aux: true, ..epilogue(true, Activation::SwiGlu) }, DType::BF16),
        (epilogue(true, Activation::Relu), DType::BF16),
        (epilogue(false, Activation::DSwiGlu), DType::BF16),
        (epilogue(false, Activation::DGelu), DType::BF16),
        (Epilogue { bias: true, ..accumulate }, DType::BF16),
        (accumulate, DType::F32),
    ];
    let orders = [(AOrder::Mk, BOrder::Nk), (AOrder::Mk, BOrder::Kn), (AOrder::Km, BOrder::Kn)];
    for (i, (e, out)) in all.into_iter().enumerate() {
        for (j, (a_order, b_order)) in orders.into_iter().enumerate() {
            // An emulated device compiles each variant, and takes its time.
            if is_emulated() && (i > 2 || i != j) {
                continue;
            }
            let dtype = if out == DType::F16 { DType::F16 } else { DType::BF16 };
            let base = GemmDesc { a_order, b_order, out, ..GemmDesc::nt(136, 144, 328, dtype) };
            let desc = GemmDesc { epilogue: e, ..base };
            let [plan, most] = [3, 100].map(|parts| plan_in(&g, desc, parts));
            assert!(plan.explain().contains("k in up to 3 parts, 229 KiB"), "{}", plan.explain());
            let few = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap();
            let few = few.with_parts(3).with_num_sms(2);
            few.prepare(&g.stream).unwrap();
            for rows in [136, 8] {
                let p = Problem::new(&g, &mut rng, desc, rows);
                let first = bits(&g, &p, &plan);
                if e.accumulate {
                    continue;
                }
                assert!(bits(&g, &p, &plan) == first, "bits of {desc}");
                assert!(bits(&g, &p, &few) == first, "bits of {desc} on two");
                bits(&g, &p, &most);
            }
        }
    }
}

/// Plans cut a long contraction of few tiles by themselves, and one part has the bits of none.
#[test]
fn few_tiles_are_computed_in_parts() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(42);
    // Rounded to 16 bits, sums in two orders may all be the same.
    let desc = GemmDesc { out: DType::F32, ..GemmDesc::nt(24, 128, 1024, DType::BF16) };
    let p = Problem::new(&g, &mut rng, desc, 24);
    let auto = plan_by(&g, desc, GemmBackend::Hopper);
    assert!(auto.explain().contains("k in 4 parts"), "{}", auto.explain());
    let one = plan_in(&g, desc, 1);
    assert!(!one.explain().contains("parts"), "{}", one.explain());
    // A cluster of more blocks than a launch may have is the core's.
    let core = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap();
    let core = core.with_parts(4).with_num_sms(2);
    core.prepare(&g.stream).unwrap();
    assert!(core.explain().contains("few tiles"), "{}", core.explain());
    assert!(bits(&g, &p, &auto) == bits(&g, &p, &core), "bits of four parts");
    assert!(bits(&g, &p, &one) != bits(&g, &p, &auto), "one chain is not four");
    // Other rows change no bit of these.
    let wide = GemmDesc { m: 136, ..desc };
    let (p, plan) = (Problem::new(&g, &mut rng, wide, 136), plan_in(&g, wide, 1));
    let all = bits(&g, &p, &plan);
    first_rows(&g, &p, &plan, 24, &all);
}

/// Launches the first rows of a product, which have the bits that all have; others stay.
fn first_rows(g: &Gpu, p: &Problem, plan: &GemmPlan, rows: usize, all: &[u8]) {
    poison(p);
    let i = &p.inputs;
    let (a, out) = (i.a.data.rows(0, rows).unwrap(), i.out.rows(0, rows).unwrap());
    drop(plan.launch(&g.stream, GemmInputs::new(a, i.b.clone(), out)).unwrap());
    g.stream.synchronize().unwrap();
    let some = p.out.t.download().unwrap();
    let len = some.len() / p.desc.m * rows;
    assert!(some[..len] == all[..len], "bits of {rows} rows of {}", p.desc);
    assert!(some[len..].iter().all(|b| *b == 0xff), "rows behind {rows} of {}", p.desc);
}

/// The number of rows, up to 64, and that of multiprocessors change no bit, nor does the kernel:
/// where a cluster would be larger than a launch may be, the core makes the same parts. Few rows
/// are those that `auto` gives to the core.
#[test]
fn few_rows_have_their_bits_whatever_is_beside_them() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(45);
    for (b_order, n, k) in [(BOrder::Nk, 264, 1096), (BOrder::Kn, 136, 2056)] {
        let base = GemmDesc { b_order, out: DType::F32, ..GemmDesc::nt(64, n, k, DType::BF16) };
        let plan = plan_by(&g, base, GemmBackend::Hopper);
        let p = Problem::new(&g, &mut rng, base, 64);
        let all = bits(&g, &p, &plan);
        assert!(plan.explain().contains("up to 64 rows"), "{}", plan.explain());
        for rows in [1, 16, 17, 33, 63] {
            first_rows(&g, &p, &plan, rows, &all);
        }
        let few = GemmPlan::with_backend(base, GemmBackend::Hopper).unwrap().with_num_sms(2);
        few.prepare(&g.stream).unwrap();
        assert!(bits(&g, &p, &few) == all, "bits of {base} on two multiprocessors");
    }
    // Several tiles of a block, and of a cluster of two.
    for (parts, m) in [(1, 5), (2, 64), (1, 64), (2, 5)] {
        let desc = GemmDesc { out: DType::F32, ..GemmDesc::nt(m, 1000, 1096, DType::BF16) };
        let p = Problem::new(&g, &mut rng, desc, m);
        let few = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap();
        let few = few.with_parts(parts).with_num_sms(2);
        few.prepare(&g.stream).unwrap();
        assert!(!few.explain().contains("few tiles"), "{}", few.explain());
        assert!(bits(&g, &p, &few) == bits(&g, &p, &plan_in(&g, desc, parts)), "bits of {desc}");
        if is_emulated() {
            return;
        }
    }
    for (m, by_core) in [(32, true), (33, false)] {
        let plan = plan_by(&g, GemmDesc::nt(m, 256, 256, DType::BF16), GemmBackend::Auto);
        assert_eq!(plan.explain().contains("faster by the core"), by_core, "{}", plan.explain());
    }
}

/// Launches begin while those before them end: each reads what the last one has written, and parts
/// of one are added before the next one's are stored, eagerly and in a graph, without a wait of the
/// host between them.
#[test]
fn launches_behind_each_other_wait_for_each_other() {
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(44);
    let num = if is_emulated() { 3 } else { 40 };
    // Moves all columns by one, so that no two launches give the same.
    let turn = Mat::from_fn(128, 128, |n, k| f64::from(u8::from(k == (n + 1) % 128)));
    let b = g.put_shifted(&turn, DType::BF16);
    let all = [(1, 1), (2, 1), (1, 2), (2, 2)];
    for (m, (first, second)) in [128, 64, 16].into_iter().flat_map(|m| all.map(|all| (m, all))) {
        // Those of few rows are by another kernel, of which an emulated device tries one.
        if is_emulated() && m < 128 && (m, first, second) != (16, 2, 1) {
            continue;
        }
        let desc = GemmDesc::nt(m, 128, 128, DType::BF16);
        let plans = [first, second].map(|parts| plan_in(&g, desc, parts));
        let start = Problem::new(&g, &mut rng, desc, m).inputs.a.data;
        let outs: Vec<_> = (0..num).map(|_| g.out(DType::BF16, m, 128).t).collect();
        // D of each launch is A of the next one.
        let queue = |waits: bool| {
            let mut a = &start;
            for (i, out) in outs.iter().enumerate() {
                let inputs = GemmInputs::new(a.clone(), b.clone(), out.clone());
                drop(plans[i % 2].launch(&g.stream, inputs).unwrap());
                if waits {
                    g.stream.synchronize().unwrap();
                }
                a = out;
            }
        };
        let got = || {
            g.stream.synchronize().unwrap();
            let all: Vec<_> = outs.iter().map(|o| o.download().unwrap()).collect();
            outs.iter().for_each(|o| o.write(|o| o.fill(0xff)).unwrap());
            all
        };
        queue(true);
        let want = got();
        for round in 0..3 {
            queue(false);
            assert!(got() == want, "{m}: {first}, {second}: round {round}");
        }
        g.stream.begin_capture().unwrap();
        queue(false);
        let graph = g.stream.end_capture().unwrap().instantiate().unwrap();
        for round in 0..3 {
            g.stream.replay(&graph).unwrap();
            assert!(got() == want, "{m}: {first}, {second}: replay {round}");
        }
    }
}

/// A block of the second kernel has many rows where launches may take few multiprocessors, and
/// there may be more rows than a grid has blocks along y.
#[test]
fn parts_of_many_rows() {
    let Some(g) = hopper() else { return };
    let rows = if is_emulated() { 300 } else { 66_000 };
    let mut rng = Rng::new(45);
    let desc = GemmDesc::nt(rows, 16, 128, DType::BF16);
    let p = Problem::new(&g, &mut rng, desc, rows);
    let all = bits(&g, &p, &plan_in(&g, desc, 2));
    let few = GemmPlan::with_backend(desc, GemmBackend::Hopper).unwrap();
    let few = few.with_parts(2).with_num_sms(2);
    few.prepare(&g.stream).unwrap();
    assert!(bits(&g, &p, &few) == all, "bits on two");
}

/// Launches of one plan on two streams, and graphs of it with two branches, use no sums of each
/// other.
#[test]
fn launches_in_parts_do_not_meet() {
    let Some(g) = hopper() else { return };
    let Device::Cuda(ctx) = &g.device else { return };
    let other = Stream::on(ctx).unwrap();
    let desc = GemmDesc::nt(136, 144, 328, DType::BF16);
    let [plan, gone] = [0, 1].map(|_| plan_in(&g, desc, 3));
    let streams = [g.stream.clone(), other];
    same_bits(&g, &streams, &plan, (if is_emulated() { 2 } else { 50 }, 4));
    let mut rng = Rng::new(43);
    let [a, b] = [0, 1].map(|_| Problem::new(&g, &mut rng, desc, 136));
    let want = [&a, &b].map(|p| bits(&g, p, &plan));
    let [main, side] = &streams;
    let launch =
        |plan: &GemmPlan, s: &Stream, p: &Problem| drop(plan.launch(s, p.inputs.clone()).unwrap());
    main.begin_capture().unwrap();
    launch(&gone, main, &a);
    let one = main.end_capture().unwrap().instantiate().unwrap();
    let (fork, join) = (main.event().unwrap(), main.event().unwrap());
    main.begin_capture().unwrap();
    main.record(&fork).unwrap();
    side.wait(&fork).unwrap();
    launch(&gone, main, &a);
    launch(&gone, side, &b);
    side.record(&join).unwrap();
    main.wait(&join).unwrap();
    let branches = main.end_capture().unwrap().instantiate().unwrap();
    drop(gone);
    for round in 0..3 {
        for graph in [&one, &branches] {
            [&a, &b].into_iter().for_each(poison);
            main.replay(graph).unwrap();
            if std::ptr::eq(graph, &one) {
                launch(&plan, side, &b);
            }
            streams.iter().for_each(|s| s.synchronize().unwrap());
            let got = [&a, &b].map(|p| p.out.t.download().unwrap());
            assert!(got == want, "round {round}");
        }
    }
}
