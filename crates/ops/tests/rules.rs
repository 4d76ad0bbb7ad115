//! Rules that hold for all operations: who owns what, what may run at once, what is counted.

mod table;

use std::sync::Arc;
use std::time::Duration;

use table::*;
use tilewire_core::*;
use tilewire_device::{Stream, Tensor};
use tilewire_ops::ep::*;
use tilewire_ops::grouped_gemm::*;
use tilewire_symm::*;

/// A plan owns what it needs: team, heap, world and the streams of others may go first, in any
/// order.
#[test]
fn a_plan_outlives_its_helpers_in_any_order() {
    for (name, make) in all_ops().filter(|(n, _)| !n.ends_with("hybrid")) {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            World::run_threads(2, WorldCfg::for_tests(), |world| {
                let outer = world.everyone("outer")?;
                let (team, heap, stream) = heap_of(&world, "short")?;
                let op = make(&heap, &stream, true)?;
                fill(&op, 1)?;
                let (mut team, mut heap, mut op) = (Some(team), Some(heap), Some(op));
                for what in order {
                    match what {
                        0 => drop(team.take()),
                        1 => drop(heap.take()),
                        _ => {
                            let op = op.take().unwrap();
                            (op.launch)(&stream)?;
                            stream.synchronize()?;
                            assert!(op.out.to_f32()?.iter().all(|v| v.is_finite()), "{name}");
                        }
                    }
                }
                outer.agree(true).map(|_| ())
            })
            .unwrap_or_else(|e| panic!("{name} {order:?}: {e}"));
        }
    }
}

/// Every operation beside a collective on another stream of the same team: no deadlock, right
/// results, in the same order on all ranks.
#[test]
fn an_operation_beside_a_collective_does_not_lock_up() {
    let collective = OPS.iter().find(|(n, _)| *n == "all_reduce").unwrap().1;
    for (name, make) in all_ops().filter(|(n, _)| !n.ends_with("hybrid")) {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let (team, heap, stream) = heap_of(&world, "both")?;
            let side = Stream::new("side")?;
            let (op, alone) = (make(&heap, &stream, true)?, make(&heap, &stream, true)?);
            let other = collective(&heap, &stream, true)?;
            for round in 0..20 {
                let seed = round * 8 + u64::from(team.rank().get());
                for r in [&op, &alone, &other] {
                    fill(r, seed)?;
                }
                (alone.launch)(&stream)?;
                finish(&stream, &team)?;
                (op.launch)(&stream)?;
                (other.launch)(&side)?;
                finish(&stream, &team)?;
                finish(&side, &team)?;
                assert!(op.out.read(|a| alone.out.read(|b| a == b))??, "{name} round {round}");
            }
            team.agree(true).map(|_| ())
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// Descriptors and threads of this process, and the free bytes of a heap.
fn held(heap: &Heap) -> (usize, usize, usize) {
    let count = |dir: &str| std::fs::read_dir(dir).map(|d| d.count()).unwrap_or(0);
    (count("/proc/self/fd"), count("/proc/self/task"), heap.usage().0)
}

/// Other tests of this process open and close descriptors and threads; a leak would show by the
/// thousand.
fn nothing_grew(before: (usize, usize, usize), after: (usize, usize, usize)) {
    let more = after.0 >= before.0 + 200 || after.1 >= before.1 + 200;
    assert!(!more && after.2 == before.2, "{before:?} {after:?}");
}

/// A thousand launches leave no more memory, descriptors or threads than ten.
#[test]
fn a_thousand_launches_grow_nothing() {
    World::run_threads(1, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "grow")?;
        let ops = all_ops().filter(|(n, _)| !n.ends_with("hybrid"));
        let ops = ops.map(|(_, make)| make(&heap, &stream, true)).collect::<Result<Vec<_>>>()?;
        let mut before = (0, 0, 0);
        for round in 0..1000u64 {
            for op in &ops {
                fill(op, round)?;
                (op.launch)(&stream)?;
            }
            finish(&stream, &team)?;
            if round == 10 {
                before = held(&heap);
            }
        }
        nothing_grew(before, held(&heap));
        Ok(())
    })
    .unwrap();
}

/// A thousand forward passes of each operation on four ranks: no rank holds more memory of its
/// heap, and the process no more descriptors and threads, than after ten; the last results are
/// those of the oracle.
#[test]
fn a_thousand_launches_on_four_ranks_grow_nothing() {
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    World::run_threads(4, cfg, |world| {
        let (team, heap, stream) = heap_of(&world, "grow")?;
        let place = (team.rank().idx(), team.size());
        let ops = OPS.into_iter().map(|(name, make)| Ok((name, make(&heap, &stream, true)?)));
        let ops = ops.collect::<Result<Vec<_>>>()?;
        let mut before = (0, 0, 0);
        for round in 0..1000u64 {
            for (name, op) in &ops {
                if round % 100 == 0 || round == 999 {
                    finish(&stream, &team)?;
                    fill(op, round)?;
                }
                (op.launch)(&stream)?;
                if round == 999 {
                    finish(&stream, &team)?;
                    assert_eq!(expected::differs(name, op, place)?, None, "{name}");
                }
            }
            if round == 10 {
                finish(&stream, &team)?;
                team.agree(true)?;
                before = held(&heap);
            }
        }
        finish(&stream, &team)?;
        team.agree(true)?;
        nothing_grew(before, held(&heap));
        Ok(())
    })
    .unwrap();
}

/// A heap too small for a plan is the same error on every rank, with both sizes; with more
/// memory the same ranks go on.
#[test]
fn a_heap_that_is_too_small_is_an_error_on_all_ranks() {
    for (name, make) in OPS {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let (team, heap, stream) = heap_of(&world, "short")?;
            let (free, all) = heap.usage();
            let rest = heap.alloc(free - 256, "rest")?;
            let e = make(&heap, &stream, true).err().unwrap_or_else(|| panic!("{name} fits"));
            assert_eq!(e.kind(), ErrorKind::Exhausted, "{name}: {e}");
            let text = e.to_string();
            assert!(e.get_op().is_some() && e.get_hint().is_some(), "{name}: {text}");
            let free = format!("of {all} free in all");
            assert!(text.contains("free in one piece") && text.contains(&free), "{text}");
            let said = team.exchange("said", text.as_bytes())?;
            assert!(said.iter().all(|t| *t == text.as_bytes()), "{name}: {text}");
            drop(rest);
            heap.collect()?;
            let op = make(&heap, &stream, true)?;
            // The reference is of inputs that are the same on all ranks.
            fill(&op, 5)?;
            (op.launch)(&stream)?;
            finish(&stream, &team)?;
            let place = (team.rank().idx(), team.size());
            assert_eq!(expected::differs(name, &op, place)?, None, "{name}");
            team.agree(true).map(|_| ())
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// What a layer says it takes is what it takes, in each layout, and its receive buffer, too.
#[test]
fn expert_memory_is_what_was_promised() {
    let layouts = [
        EpLayout::ExpertMajor { align: 4 },
        EpLayout::RankMajor { align: 2 },
        EpLayout::Flat { align: 3 },
    ];
    for (experts, tokens, hidden, k) in [(4, 8, 16, 2), (7, 5, 3, 3), (2, 1, 1, 1)] {
        World::run_threads(2, WorldCfg::for_tests(), |world| {
            let team = world.everyone("ep")?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
            for layout in layouts {
                let mut desc = EpDesc::new(2, experts, tokens, hidden, k);
                desc.layout = layout;
                desc.capacity = desc.worst_case();
                let said = EpPlan::memory(&desc);
                let free = heap.usage().0;
                let plan = EpPlan::new(desc, &heap)?;
                let taken = free - heap.usage().0;
                // Four areas, each rounded up to the alignment of buffers.
                let near = |taken: usize, said: usize, areas: usize| {
                    taken >= said && taken < said + areas * 256
                };
                assert!(near(taken, said.symmetric, 4), "{layout:?}: {taken} for {said:?}");
                // A sender does not know where rows without gaps stay.
                if !matches!(layout, EpLayout::Flat { .. }) {
                    let free = heap.usage().0;
                    let rows = plan.zero_copy_recv()?;
                    assert_eq!(rows.len_bytes(), said.received, "{layout:?}");
                    let taken = free - heap.usage().0;
                    assert!(near(taken, said.received, 1), "{layout:?}: {taken} for {said:?}");
                }
                drop(plan);
                heap.collect()?;
            }
            team.agree(true).map(|_| ())
        })
        .unwrap();
    }
}

/// What cannot be a layer is refused before anything is allocated, with the name of what is wrong.
#[test]
fn impossible_layers_are_refused() {
    let good = EpDesc::new(2, 4, 8, N, 2);
    good.check(2).unwrap();
    for (bad, says) in [
        (EpDesc { max_tokens: usize::MAX, ..good.clone() }, "max_tokens"),
        (EpDesc { hidden: 1 << 20, ..good.clone() }, "hidden"),
        (EpDesc { layout: EpLayout::Flat { align: 1 << 32 }, ..good.clone() }, "alignment"),
        (EpDesc { capacity: 1 << 40, ..good.clone() }, "capacity"),
        (EpDesc { num_scales: 1, ..good.clone() }, "tokens of type f32 have no scales"),
        (EpDesc { top_k: 33, ..good.clone() }, "top_k 33"),
        (EpDesc { top_k: 0, ..good.clone() }, "top_k 0"),
    ] {
        let e = bad.check(2).unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
    let e = good.check(3).unwrap_err().to_string();
    assert!(e.contains("2 ranks, but the team has 3"), "{e}");
}

/// A smaller capacity than the layer's may be given with each routing.
#[test]
fn capacity_is_given_with_each_routing() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (_team, heap, stream) = heap_of(&world, "capacity")?;
        let plan = EpPlan::new(EpDesc::new(2, 2, 4, N, 1), &heap)?;
        plan.prepare(&stream)?;
        let idx = Tensor::from_slice(&[0i32, 0, 0, 0], Shape::d2(4, 1))?;
        for (capacity, dropped) in [(Some(8), 0), (Some(5), 3), (Some(0), 8), (None, 0)] {
            let h = plan.route(&stream, &idx, capacity, &plan.handle().unwrap())?.wait()?;
            assert_eq!(h.totals().unwrap().dropped, [dropped, 0], "{capacity:?}");
        }
        assert!(plan.route(&stream, &idx, Some(9), &plan.handle().unwrap()).is_err());
        for bad in [DType::F32, DType::U8] {
            let idx = Tensor::zeros(bad, Shape::d2(4, 1));
            let e =
                plan.route(&stream, &idx, None, &plan.handle().unwrap()).map(|_| ()).unwrap_err();
            assert!(e.to_string().contains("i32 or i64"), "{e}");
        }
        Ok(())
    })
    .unwrap();
}

fn wgrad(
    plan: &GroupedGemmPlan,
    s: &Stream,
    x: &Tensor,
    dy: &Tensor,
    splits: &Tensor,
    mask: u32,
) -> Result<Vec<f32>> {
    let dw = Tensor::from_slice(&[1000.0f32; 3], Shape::d2(3, 1))?;
    let mask: Vec<u8> = (0..3).map(|e| (mask >> e & 1) as u8).collect();
    let t = GroupedWgrad {
        x: x.into(),
        dy: dy.into(),
        splits: Splits::counts(splits),
        dw: (&dw).into(),
        mask: Some(Tensor::from_slice(&mask, Shape::d1(3))?),
        dbias: None,
    };
    plan.wgrad(s, t)?.wait()?;
    plan.check()?;
    dw.to_vec()
}

#[test]
fn every_mask_of_three_experts() {
    let s = Stream::new("s").unwrap();
    let plan = GroupedGemmPlan::new(GroupedDesc::new(3, 4, 1, 1, DType::F32)).unwrap();
    plan.prepare(&s).unwrap();
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], Shape::d2(4, 1)).unwrap();
    // Expert 1 has no rows.
    let splits = Tensor::from_slice(&[1i64, 0, 3], Shape::d1(3)).unwrap();
    for mask in 0..8 {
        let got = wgrad(&plan, &s, &x, &x, &splits, mask).unwrap();
        let own = [1.0, 0.0, 4.0 + 9.0 + 16.0];
        for e in 0..3 {
            let want = own[e] + if mask >> e & 1 == 1 { 1000.0 } else { 0.0 };
            assert_eq!(got[e], want, "mask {mask:03b} expert {e}");
        }
    }
    let e = wgrad(&plan, &s, &x, &x, &Tensor::zeros(DType::F32, Shape::d1(3)), 0).unwrap_err();
    assert!(e.to_string().contains("i32 or i64"), "{e}");
}

/// One grouped GEMM on two streams of two threads, and a captured one with other splits each time.
#[test]
fn grouped_products_run_side_by_side_and_replay_with_other_splits() {
    let plan = Arc::new(GroupedGemmPlan::new(GroupedDesc::new(2, 6, 2, 3, DType::F32)).unwrap());
    let w = Tensor::from_f32(&[0.5; 12], DType::F32, Shape::d2(4, 3)).unwrap();
    let eager = |plan: &GroupedGemmPlan, s: &Stream, t: &GroupedFprop| {
        plan.fprop(s, t.clone())?.wait()?.to_f32()
    };
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (plan, w) = (plan.clone(), w.clone());
            scope.spawn(move || {
                let streams = [Stream::new("a").unwrap(), Stream::new("b").unwrap()];
                plan.prepare(&streams[0]).unwrap();
                for round in 0..200 {
                    let v = (round + thread) as f32;
                    let t = |first: i32| GroupedFprop {
                        x: Tensor::from_f32(&[v; 18], DType::F32, Shape::d2(6, 3)).unwrap().into(),
                        w: (&w).into(),
                        bias: None,
                        splits: Splits::counts(
                            &Tensor::from_slice(&[first, 2], Shape::d1(2)).unwrap(),
                        ),
                        out: Tensor::zeros(DType::F32, Shape::d2(6, 2)),
                        aux_out: None,
                    };
                    let pending: Vec<_> = streams
                        .iter()
                        .zip([1, 3])
                        .map(|(s, first)| plan.fprop(s, t(first)).unwrap())
                        .collect();
                    for (p, rows) in pending.into_iter().zip([3, 5]) {
                        let got = p.wait().unwrap().to_f32().unwrap();
                        let want = |i: usize| if i < rows * 2 { 1.5 * v } else { 0.0 };
                        assert!(got.iter().enumerate().all(|(i, g)| *g == want(i)), "{got:?}");
                    }
                }
            });
        }
    });
    let s = Stream::new("graph").unwrap();
    let splits = Tensor::zeros(DType::I32, Shape::d1(2));
    let t = |out: Tensor| GroupedFprop {
        x: Tensor::from_f32(&[2.0; 18], DType::F32, Shape::d2(6, 3)).unwrap().into(),
        w: (&w).into(),
        bias: None,
        splits: Splits::counts(&splits),
        out,
        aux_out: None,
    };
    let captured = Tensor::zeros(DType::F32, Shape::d2(6, 2));
    s.begin_capture().unwrap();
    plan.fprop(&s, t(captured.clone())).unwrap().join(&s).unwrap();
    let graph = s.end_capture().unwrap().instantiate().unwrap();
    for round in 0..200 {
        let v = [round % 5, round % 3 % (6 - round % 5)];
        splits.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v))).unwrap();
        captured.write(|b| b.fill(0)).unwrap();
        s.replay(&graph).unwrap();
        s.synchronize().unwrap();
        let want = eager(&plan, &s, &t(Tensor::zeros(DType::F32, Shape::d2(6, 2)))).unwrap();
        assert_eq!(captured.to_f32().unwrap(), want, "splits {v:?}");
    }
}
