//! What goes wrong in a caller's program is told at once, by name, and touches nobody else.

mod table;

use std::time::{Duration, Instant};

use table::*;
use tilewire_core::*;
use tilewire_device::{Node, Pending, Stream, Tensor};
use tilewire_ops::ag_gemm::*;
use tilewire_ops::attention::*;
use tilewire_ops::bulk::*;
use tilewire_ops::collective::*;
use tilewire_ops::ep::*;
use tilewire_ops::gemm::*;
use tilewire_ops::gemm_rs::*;
use tilewire_ops::grouped_gemm::*;
use tilewire_ops::{Algo, Shards, common::OverlapConfig};
use tilewire_symm::*;

/// The GEMM of a bulk overlap is done while the collective has not moved a byte.
#[test]
fn a_bulk_gemm_does_not_wait_for_its_collective() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "bulk")?;
        let kind = CollectiveKind::AllGather(Shards::Even);
        let gather = CollectiveDesc { kind, m: M, cols: N, dtype: DType::F32 };
        let plan = BulkPlan::new(GemmDesc::nt(4, 4, 4, DType::F32), gather, &heap)?;
        plan.prepare(&stream)?;
        let held = Arc::new(AtomicBool::new(true));
        let gate = held.clone();
        team.set_hook(move |p| {
            while p.kind == StepKind::Put && gate.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            HookAction::Proceed
        });
        let product = out(4, 4);
        let gemm = GemmInputs::new(zeros(4, 4), zeros(4, 4), product.clone());
        let t = BulkInputs { gemm, m: M, x: zeros(mine(&heap), N), y: out(M, N) };
        let pending = plan.launch(&stream, t)?;
        let start = Instant::now();
        let done = loop {
            // A node that writes at this moment has it locked.
            let done = product.to_f32().is_ok_and(|v| v.iter().all(|x| *x == 0.0));
            if done || start.elapsed() > Duration::from_secs(1) {
                break done;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        held.store(false, Ordering::Release);
        let y = pending.wait()?.collective;
        assert!(done, "the GEMM waited for the collective");
        assert!(y.to_f32()?.iter().all(|v| *v == 0.0));
        Ok(())
    })
    .unwrap();
}

/// Its collective is refused: the GEMM does not run either.
#[test]
fn a_bulk_overlap_is_refused_whole() {
    static PREPARED: std::sync::Barrier = std::sync::Barrier::new(2);
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "whole")?;
        let kind = CollectiveKind::AllGather(Shards::Even);
        let gather = CollectiveDesc { kind, m: M, cols: N, dtype: DType::F32 };
        let plan = BulkPlan::new(GemmDesc::nt(4, 4, 4, DType::F32), gather, &heap)?;
        plan.prepare(&stream)?;
        // Nobody is in a call of the team that the end of it would fail.
        PREPARED.wait();
        team.abort("whole");
        let product = out(4, 4);
        let gemm = GemmInputs::new(zeros(4, 4), zeros(4, 4), product.clone());
        let t = BulkInputs { gemm, m: M, x: zeros(mine(&heap), N), y: out(M, N) };
        let e = plan.launch(&stream, t).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        stream.synchronize()?;
        assert!(product.to_f32()?.iter().all(|v| v.is_nan()), "the GEMM ran");
        Ok(())
    })
    .unwrap();
}

/// One capture at a time uses the copy stream of a heap; others are refused, and nothing is lost.
#[test]
fn a_launch_beside_a_capture_of_the_same_heap_is_refused() {
    for (name, make) in all_ops().filter(|(n, _)| !n.ends_with("hybrid")) {
        World::run_threads(2, WorldCfg::for_tests(), |world| {
            let (team, heap, stream) = heap_of(&world, "beside")?;
            let side = Stream::new("side")?;
            let (a, b) = (make(&heap, &stream, true)?, make(&heap, &side, true)?);
            fill(&a, 1)?;
            fill(&b, 1)?;
            stream.begin_capture()?;
            (a.launch)(&stream)?;
            let e = (b.launch)(&side).unwrap_err();
            assert!(e.message().contains("being captured") && e.get_op().is_some(), "{name}: {e}");
            let graph = stream.end_capture()?.instantiate()?;
            (b.launch)(&side)?;
            finish(&side, &team)?;
            stream.replay(&graph)?;
            finish(&stream, &team)?;
            assert!(a.out.read(|x| b.out.read(|y| x == y))??, "{name}");
            team.agree(true).map(|_| ())
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// An output that lies on an input is refused with both names, and the team lives on.
#[test]
fn outputs_that_overlap_inputs_are_refused() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "alias")?;
        let rows = mine(&heap);
        let told = |r: Result<()>, a: &str, b: &str| {
            let e = r.unwrap_err();
            let text = e.to_string();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{text}");
            assert!(text.contains(&format!("`{a}` must not")) && text.contains(b), "{text}");
        };
        let config = OverlapConfig { sub_chunks: 2, ..OverlapConfig::of(Algo::Fused, 1) };
        let ag = AgGemmPlan::new(AgGemmDesc::new(M, N, N, DType::F32), &heap, Some(config))?;
        ag.prepare(&stream)?;
        let (w, y) = (zeros(N, N), zeros(M, N));
        let own = y.rows(team.rank().idx() * rows, rows)?;
        let run = |t| ag.launch(&stream, M, t).map(|_| ());
        told(run(AgGemmInputs::new(own, w.clone(), y.clone())), "out", "`x`");
        let mut t = AgGemmInputs::new(zeros(rows, N), w.clone(), y.clone());
        t.gathered = Some(y.clone());
        told(run(t), "out", "`gathered`");

        let rs = GemmRsPlan::new(GemmRsDesc::new(M, N, N, DType::F32), &heap, Some(config))?;
        rs.prepare(&stream)?;
        let x = zeros(M, N);
        let t = GemmRsInputs::new(x.clone(), w.clone(), x.rows(0, rows)?);
        told(rs.launch(&stream, M, t).map(|_| ()), "out", "`x`");

        let grouped = GroupedGemmPlan::new(GroupedDesc::new(2, M, N, N, DType::F32))?;
        grouped.prepare(&stream)?;
        let splits = Splits::counts(&Tensor::from_slice(&[5i64, 7], Shape::d1(2))?);
        let t = GroupedFprop {
            x: (&x).into(),
            w: (&zeros(2 * N, N)).into(),
            bias: None,
            splits,
            out: x.clone(),
            aux_out: None,
        };
        told(grouped.fprop(&stream, t).map(|_| ()), "out", "`x`");

        // Scales are read while row sums are stored.
        let epilogue = Epilogue { bgrad: true, ..Epilogue::NONE };
        let d = GemmDesc { epilogue, ..GemmDesc::nt(1, N, N, DType::F8E4M3) };
        let gemm = GemmPlan::new(d)?;
        gemm.prepare(&stream)?;
        let (fp8, scale) = (|m| Tensor::zeros(DType::F8E4M3, Shape::d2(m, N)), out(1, 1));
        let b = Operand { data: fp8(N), scales: Some((scale.clone(), ScaleLayout::Tensor)) };
        let mut t = GemmInputs::new(fp8(1), b, Tensor::zeros(d.out, Shape::d2(1, N)));
        t.bgrad = Some(scale.reshape(Shape::d1(1))?);
        told(gemm.launch(&stream, t).map(|_| ()), "bgrad", "`b`");

        let attn =
            AttentionPlan::new(AttentionDesc::new(M, (2, 2), 4, DType::F32, AttnMask::FULL), None)?;
        attn.prepare(&stream)?;
        let (q, k) = (zeros(M, 8), zeros(M, 8));
        let o = AttnOut { out: q.clone(), lse: out(2, M) };
        told(attn.launch_fwd(&stream, &AttnInputs::new(&q, &k, &k), o).map(|_| ()), "out", "`q`");
        stream.synchronize()?;
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// NaN is not lost on the way: not in a row of scores, not in an activation.
#[test]
fn nan_reaches_the_result() {
    let stream = Stream::new("s").unwrap();
    let plan =
        AttentionPlan::new(AttentionDesc::new(M, (1, 1), 4, DType::F32, AttnMask::CAUSAL), None)
            .unwrap();
    plan.prepare(&stream).unwrap();
    let mut rng = Rng::new(3);
    let mut random = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<_>>();
    for row in [0, 5, M - 1] {
        let t = |v: &[f32]| Tensor::from_slice(v, Shape::d2(M, 4)).unwrap();
        let mut q = random(M * 4);
        q[row * 4 + 2] = f32::NAN;
        let (q, k, v, d_out) = (t(&q), t(&random(M * 4)), t(&random(M * 4)), t(&random(M * 4)));
        let x = AttnInputs::new(&q, &k, &v);
        let o = AttnOut { out: out(M, 4), lse: out(1, M) };
        let o = plan.launch_fwd(&stream, &x, o).unwrap().wait().unwrap();
        let is_nan =
            |t: &Tensor| t.to_f32().unwrap().iter().map(|v| v.is_nan()).collect::<Vec<_>>();
        let want: Vec<bool> = (0..M * 4).map(|i| i / 4 == row).collect();
        assert_eq!(is_nan(&o.out), want, "row {row}");
        assert_eq!(is_nan(&o.lse), (0..M).map(|i| i == row).collect::<Vec<_>>(), "row {row}");
        let saved = AttnSaved { out: o.out, lse: o.lse, d_out };
        let g = AttnGrads::new(out(M, 4), out(M, 4), out(M, 4));
        let g = plan.launch_bwd(&stream, &x, saved, g).unwrap().wait().unwrap();
        assert_eq!(is_nan(&g.dq), want, "row {row}");
        // Every key that the row sees; others of its tile may be lost with them.
        for t in [&g.dk, &g.dv] {
            assert!(is_nan(t)[..(row + 1) * 4].iter().all(|n| *n), "row {row}");
        }
    }
    let relu = Epilogue { activation: Activation::Relu, ..Epilogue::NONE };
    let plan =
        GemmPlan::new(GemmDesc { epilogue: relu, ..GemmDesc::nt(1, 1, 1, DType::F32) }).unwrap();
    plan.prepare(&stream).unwrap();
    let one = |v: f32| Tensor::from_slice(&[v], Shape::d2(1, 1)).unwrap();
    let y = plan.launch(&stream, GemmInputs::new(one(f32::NAN), one(1.0), out(1, 1))).unwrap();
    assert!(y.wait().unwrap().to_f32().unwrap()[0].is_nan());
}

/// A window without bound is no window.
#[test]
fn the_widest_windows_are_causal_and_full() {
    let stream = Stream::new("s").unwrap();
    let mut rng = Rng::new(4);
    let t = |rng: &mut Rng| {
        let v: Vec<f32> = (0..M * 4).map(|_| rng.normal()).collect();
        Tensor::from_slice(&v, Shape::d2(M, 4)).unwrap()
    };
    let (q, k, v) = (t(&mut rng), t(&mut rng), t(&mut rng));
    let run = |mask| {
        let plan =
            AttentionPlan::new(AttentionDesc::new(M, (1, 1), 4, DType::F32, mask), None).unwrap();
        plan.prepare(&stream).unwrap();
        let o = AttnOut { out: out(M, 4), lse: out(1, M) };
        let o = plan.launch_fwd(&stream, &AttnInputs::new(&q, &k, &v), o).unwrap().wait().unwrap();
        o.out.to_f32().unwrap()
    };
    for most in [usize::MAX, i64::MAX as usize, 1 << 41] {
        assert_eq!(run(AttnMask::window(most, 0)), run(AttnMask::CAUSAL), "{most}");
        assert_eq!(run(AttnMask::window(most, most)), run(AttnMask::FULL), "{most}");
    }
}

struct Layer {
    plan: EpPlan,
    desc: EpDesc,
}

impl Layer {
    fn new(heap: &Heap, stream: &Stream, capacity: usize) -> Result<Self> {
        let desc = EpDesc { capacity, ..EpDesc::new(heap.team().size(), 4, 4, N, 2) };
        let plan = EpPlan::new(desc.clone(), heap)?;
        plan.prepare(stream)?;
        Ok(Self { plan, desc })
    }

    fn routed(&self, stream: &Stream, idx: &[i64]) -> Result<EpHandle> {
        let idx = Tensor::from_slice(idx, Shape::d2(idx.len() / 2, 2))?;
        self.plan.route(stream, &idx, None, &self.plan.handle().unwrap())?.join(stream)
    }

    fn dispatch(&self, stream: &Stream, h: &EpHandle, tokens: usize) -> Result<EpDispatch> {
        let recv = EpDispatch { x: out(self.desc.capacity, N), scales: None, weights: None };
        self.plan.dispatch(stream, h, &zeros(tokens, N), (None, None), &recv)?.join(stream)
    }
}

/// Microbatches in flight cannot be mixed up, nor the handles of two layers.
#[test]
fn the_wrong_handle_is_refused() {
    let ends = World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "ep")?;
        let (layer, other) = (Layer::new(&heap, &stream, 16)?, Layer::new(&heap, &stream, 12)?);
        let fresh = layer.plan.handle().unwrap();
        let e = layer.dispatch(&stream, &fresh, 2).unwrap_err();
        assert_eq!((e.kind(), e.get_op()), (ErrorKind::NotPrepared, Some("ep_dispatch")), "{e}");
        // Every token reaches both ranks in both microbatches: their counts are equal.
        let a = layer.routed(&stream, &[0, 2, 1, 3])?;
        let b = layer.routed(&stream, &[1, 3, 0, 2])?;
        let e = other.dispatch(&stream, &a, 2).unwrap_err();
        assert!(e.to_string().contains("another layer"), "{e}");
        layer.dispatch(&stream, &a, 2)?;
        layer.dispatch(&stream, &b, 2)?;
        Pending::new((), &stream, Some(team.fault().clone()))?.wait()?;
        // On devices rows are stored while others are still read.
        let dy = out(16, N);
        let done = layer.plan.combine_bwd(&stream, &a, &dy.rows(0, 2).unwrap(), None, &dy);
        let e: Error = done.err().unwrap();
        assert!(e.to_string().contains("overlap") && e.get_op() == Some("ep_combine_bwd"), "{e}");
        let h = if team.rank() == Rank::new(0) { &a } else { &b };
        let y = out(2, N);
        let done = layer.plan.combine(&stream, h, &zeros(16, N), None, &y).and_then(Pending::wait);
        let told = done.err().map(|e| e.to_string());
        assert!(y.to_f32()?.iter().all(|v| v.is_nan()), "{told:?}");
        Ok(told)
    })
    .unwrap();
    let told: Vec<String> = ends.into_iter().flatten().collect();
    assert!(told.len() == 2 && told.iter().any(|t| t.contains("routing=")), "{told:?}");
}

/// Routings that cannot be carried out: an expert that does not exist, and too little room.
#[test]
fn bad_routings_are_told_on_all_ranks() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "ep")?;
        let me = team.rank();
        let desc = EpDesc { overflow: Overflow::Error, ..EpDesc::new(2, 4, 4, N, 2) };
        let layer = Layer { plan: EpPlan::new(desc.clone(), &heap)?, desc };
        layer.plan.prepare(&stream)?;
        // Four copies for the experts of rank 0, room for three.
        let idx = Tensor::from_slice(&[0i64, 1], Shape::d2(1, 2))?;
        let tight =
            layer.plan.route(&stream, &idx, Some(3), &layer.plan.handle().unwrap())?.wait()?;
        let e = tight.check().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Exhausted, "{e}");
        assert!(e.to_string().contains("3 rows") && e.to_string().contains("[1, 0]"), "{e}");
        assert_eq!(tight.totals().unwrap().dropped, [1, 0]);
        layer.plan.route(&stream, &idx, Some(4), &layer.plan.handle().unwrap())?.wait()?.check()?;
        let e =
            layer.plan.route(&stream, &idx, Some(99), &layer.plan.handle().unwrap()).err().unwrap();
        assert_eq!((e.kind(), e.get_op()), (ErrorKind::InvalidArgument, Some("ep_route")), "{e}");

        let bad = if me == Rank::new(1) { 4i64 } else { 3 };
        let idx = Tensor::from_slice(&[0, bad], Shape::d2(1, 2))?;
        // The abort may be heard at the launch already.
        let end = layer.plan.route(&stream, &idx, None, &layer.plan.handle().unwrap());
        let e = end.and_then(Pending::wait).err().unwrap();
        if me == Rank::new(1) {
            assert_eq!((e.kind(), e.get_op()), (ErrorKind::InvalidArgument, Some("ep_route")));
            assert!(e.to_string().contains("0 to 3") && e.to_string().contains('4'), "{e}");
        } else {
            assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Aborted, Some(Rank::new(1))), "{e}");
        }
        Ok(())
    })
    .unwrap();
}

/// Each tensor of a grouped GEMM, wrong in shape or type.
#[test]
fn wrong_tensors_of_a_grouped_gemm_are_refused() {
    let stream = Stream::new("s").unwrap();
    let plan = GroupedGemmPlan::new(GroupedDesc::new(2, M, N, K, DType::F32)).unwrap();
    let splits = || Splits::counts(&Tensor::zeros(DType::I64, Shape::d1(2)));
    let good = || GroupedFprop {
        x: zeros(M, K).into(),
        w: (&zeros(2 * N, K)).into(),
        bias: None,
        splits: splits(),
        out: out(M, N),
        aux_out: None,
    };
    let e = plan.fprop(&stream, good()).err().unwrap();
    assert_eq!((e.kind(), e.get_op()), (ErrorKind::NotPrepared, Some("grouped_gemm")), "{e}");
    plan.prepare(&stream).unwrap();
    plan.fprop(&stream, good()).unwrap().wait().unwrap();
    let short = Splits::counts(&Tensor::zeros(DType::I64, Shape::d1(3)));
    let floats = Splits::counts(&Tensor::zeros(DType::F32, Shape::d1(2)));
    let cases: [(&str, GroupedFprop); 8] = [
        ("`x`", GroupedFprop { x: zeros(M, K + 1).into(), ..good() }),
        ("`x`", GroupedFprop { x: Tensor::zeros(DType::BF16, Shape::d2(M, K)).into(), ..good() }),
        ("`w`", GroupedFprop { w: (&zeros(N, K)).into(), ..good() }),
        ("`bias`", GroupedFprop { bias: Some(zeros(2, K)), ..good() }),
        ("splits", GroupedFprop { splits: short, ..good() }),
        ("splits", GroupedFprop { splits: floats, ..good() }),
        ("`out`", GroupedFprop { out: out(M + 1, N), ..good() }),
        ("`aux_out`", GroupedFprop { aux_out: Some(out(M, N + 1)), ..good() }),
    ];
    for (what, t) in cases {
        let e = plan.fprop(&stream, t).err().unwrap();
        let text = e.to_string();
        assert_eq!((e.kind(), e.get_op()), (ErrorKind::InvalidArgument, Some("grouped_gemm")));
        assert!(text.contains(what) && text.contains("expected"), "{what}: {text}");
    }
    let dw = Weights::from(&zeros(2 * N, N));
    let (x, dy) = (zeros(M, K).into(), zeros(M, N).into());
    let t = GroupedWgrad { x, dy, splits: splits(), dw, mask: None, dbias: None };
    assert!(plan.wgrad(&stream, t).err().unwrap().to_string().contains("`dw`"));
    // Gradients on each other: by an element, wholly, and on those of the bias.
    let all = zeros(3 * N * K, 1);
    let of = |at: usize, rows: usize, cols: usize| {
        all.rows(at, rows * cols).unwrap().reshape(Shape::d2(rows, cols)).unwrap()
    };
    let one = N * K;
    for (second, bias, wrong) in [
        (one, 2 * one, None),
        (one - 1, 2 * one, Some("tensors of `dw` must not overlap")),
        (0, 2 * one, Some("tensors of `dw` must not overlap")),
        (one, 2 * one - 1, Some("`dw` must not overlap `dbias`")),
    ] {
        let dw = Weights::Discrete(vec![(&of(0, N, K)).into(), (&of(second, N, K)).into()]);
        let (x, dy, dbias) = (zeros(M, K).into(), zeros(M, N).into(), Some(of(bias, 2, N)));
        let done =
            plan.wgrad(&stream, GroupedWgrad { x, dy, splits: splits(), dw, mask: None, dbias });
        match (done, wrong) {
            (Ok(done), None) => drop(done.wait().unwrap()),
            (Err(e), Some(words)) => assert!(e.to_string().contains(words), "{e}"),
            (_, wrong) => panic!("{second} {bias}: {wrong:?}"),
        }
    }
    let t = GroupedDgrad {
        dy: zeros(M, K).into(),
        w: (&zeros(2 * N, K)).into(),
        splits: splits(),
        dx: out(M, K),
    };
    assert!(plan.dgrad(&stream, t).err().unwrap().to_string().contains("`dy`"));
}

/// What a node finds wrong says where; counts that a fault left behind ask for nothing.
#[test]
fn errors_of_the_work_name_the_operation_and_rank() {
    World::run_threads(1, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "ep")?;
        let layer = Layer::new(&heap, &stream, 16)?;
        let h = layer.routed(&stream, &[0, 2, 1, 3])?;
        let e = layer.dispatch(&stream, &h, 3).and_then(|_| finish(&stream, &team)).unwrap_err();
        assert!(e.message().contains("differs from that of the routing"), "{e}");
        assert_eq!((e.get_op(), e.get_rank()), (Some("ep_dispatch"), Some(Rank::new(0))), "{e}");
        assert!(e.to_json()["seq"].as_u64().is_some_and(|s| s > 0), "{e}");

        let team = world.everyone("again")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
        let layer = Layer::new(&heap, &stream, 16)?;
        let h = layer.routed(&stream, &[0, 2, 1, 3])?;
        finish(&stream, &team)?;
        assert!(h.m_splits().to_vec::<i64>()?.iter().sum::<i64>() == 4);
        // The next routing is still queued when the team ends.
        stream.launch(Node::new("slow", || {
            std::thread::sleep(Duration::from_millis(100));
            Ok(())
        }))?;
        let idx = Tensor::from_slice(&[0i64, 1], Shape::d2(1, 2))?;
        let routing = layer.plan.route(&stream, &idx, None, &h)?;
        team.abort("enough");
        assert_eq!(routing.wait().err().map(|e| e.kind()), Some(ErrorKind::Aborted));
        assert!(h.m_splits().to_vec::<i64>()?.iter().all(|&s| s == 0));
        assert!(h.row_index().to_vec::<i32>()?.iter().all(|&s| s == -1));

        // A plan that met bad splits can be used again.
        let plan = GroupedGemmPlan::new(GroupedDesc::new(1, 4, N, N, DType::F32))?;
        plan.prepare(&stream)?;
        let run = |rows: i64| {
            let splits = Splits::counts(&Tensor::from_slice(&[rows], Shape::d1(1))?);
            let (x, w) = ((&zeros(4, N)).into(), (&zeros(N, N)).into());
            let t = GroupedFprop { x, w, bias: None, splits, out: out(4, N), aux_out: None };
            plan.fprop(&stream, t)?.wait()?;
            plan.check()
        };
        assert!(run(-1).is_err() && run(4).is_err(), "the status stays");
        plan.reset(&stream)?;
        run(4)
    })
    .unwrap();
}

/// A hundred thousand calls, and a hundred captures of one plan.
#[test]
fn nothing_wears_out() {
    let stream = Stream::new("s").unwrap();
    let plan = GroupedGemmPlan::new(GroupedDesc::new(3, 4, 2, 2, DType::F32)).unwrap();
    plan.prepare(&stream).unwrap();
    let splits = Tensor::from_slice(&[1i64, 0, 3], Shape::d1(3)).unwrap();
    let x = Tensor::from_slice(&[1.0f32, 2., 3., 4., 5., 6., 7., 8.], Shape::d2(4, 2)).unwrap();
    let w = Tensor::from_slice(&[1.0f32; 12], Shape::d2(6, 2)).unwrap();
    let y = out(4, 2);
    let t = GroupedFprop {
        x: (&x).into(),
        w: (&w).into(),
        bias: None,
        splits: Splits::counts(&splits),
        out: y.clone(),
        aux_out: None,
    };
    let right = |y: &Tensor| y.to_f32().unwrap() == [3., 3., 7., 7., 11., 11., 15., 15.];
    for call in 0..100_000 {
        let p = plan.fprop(&stream, t.clone()).unwrap();
        if call % 1000 == 999 {
            assert!(right(&p.wait().unwrap()), "call {call}");
            y.poison().unwrap();
        }
    }
    for capture in 0..100 {
        stream.begin_capture().unwrap();
        plan.fprop(&stream, t.clone()).unwrap().join(&stream).unwrap();
        let graph = stream.end_capture().unwrap().instantiate().unwrap();
        for _ in 0..10 {
            stream.replay(&graph).unwrap();
        }
        stream.synchronize().unwrap();
        assert!(right(&y), "capture {capture}");
        y.poison().unwrap();
    }
    plan.check().unwrap();
}

/// NCCL is for devices: a plan on a heap of the host refuses it, names the backend in use, and has
/// a way out.
#[test]
fn the_host_has_puts_only() {
    let world = World::solo(WorldCfg::for_tests()).unwrap();
    let team = world.everyone("nccl").unwrap();
    let heap = team.heap(BackendKind::Host, HeapCfg::new(4096)).unwrap();
    let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
    let desc = CollectiveDesc { kind, m: 2, cols: 2, dtype: DType::F32 };
    let plan = |b| CollectivePlan::with_backend(desc.clone(), &heap, b);
    plan(CollectiveBackend::Fastest).unwrap();
    let by = Some(OverlapConfig::by_nccl());
    let ag = AgGemmDesc::new(2, 2, 2, DType::F32);
    let rs = GemmRsDesc::new(2, 2, 2, DType::F32);
    let ar = tilewire_ops::gemm_ar::GemmArDesc(rs.clone());
    let ep = EpDesc::new(1, 2, 2, 2, 1);
    let ep = |b| EpPlan::with_backend(ep.clone(), &heap, b).err();
    let mask = AttnMask::CAUSAL;
    let cp = AttentionDesc::new(2, (1, 1), 4, DType::F32, mask);
    let cp = tilewire_ops::cp_attention::CpAttentionDesc::new(cp);
    let cp = |b| {
        tilewire_ops::cp_attention::CpAttentionPlan::with_backend(cp.clone(), &heap, None, b).err()
    };
    for e in [
        AgGemmPlan::new(ag, &heap, by).err(),
        GemmRsPlan::new(rs, &heap, by).err(),
        tilewire_ops::gemm_ar::GemmArPlan::new(ar, &heap, by).err(),
        ep(CollectiveBackend::Nccl),
        cp(CollectiveBackend::Nccl),
        plan(CollectiveBackend::Nccl).err(),
    ] {
        let e = e.unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        for (name, kind) in BackendKind::NAMES {
            let named = e.message().contains(&format!("`{name}`"));
            assert_eq!(named, *kind == BackendKind::Host, "{e}");
        }
    }
    // Nothing to choose from: puts.
    assert!(ep(CollectiveBackend::Fastest).is_none());
    assert!(cp(CollectiveBackend::Fastest).is_none());
    let e = heap.nccl().err().unwrap();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
}
