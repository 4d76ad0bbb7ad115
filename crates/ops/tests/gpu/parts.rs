//! Products by the core for sm_90a whose contractions are cut into parts: on a GPU, and on an
//! emulated device.

use tilewire_core::{DType, Rng};
use tilewire_device::{Buffer, Device, Queue, Stream};
use tilewire_ops::gemm::{AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmPlan};

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
    let desc = GemmDesc::nt(24, 128, 1024, DType::BF16);
    let p = Problem::new(&g, &mut rng, desc, 24);
    let auto = plan_by(&g, desc, GemmBackend::Hopper);
    assert!(auto.explain().contains("k in up to 4 parts"), "{}", auto.explain());
    let one = plan_in(&g, desc, 1);
    assert!(!one.explain().contains("parts"), "{}", one.explain());
    assert!(bits(&g, &p, &auto) == bits(&g, &p, &plan_in(&g, desc, 4)), "bits of four");
    // 16 rows more change no bit of the others.
    let wide = GemmDesc { m: 40, ..desc };
    let rows = |plan: &GemmPlan| bits(&g, &p, plan);
    assert!(rows(&one) == rows(&plan_in(&g, wide, 1)), "bits of one");
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
