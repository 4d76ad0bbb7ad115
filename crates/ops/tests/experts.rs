//! Expert parallelism on the host: cuts, receive buffers, and memory that was used before.

mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use table::*;
use tilewire_core::*;
use tilewire_device::{Node, Pending, Stream, Tensor};
use tilewire_ops::ep::*;
use tilewire_symm::*;

const TOKENS: usize = 7;
const K: usize = 3;

fn desc(size: usize, layout: EpLayout) -> EpDesc {
    let mut d = EpDesc::new(size, 2 * size + 1, TOKENS, N, K);
    (d.dtype, d.out, d.layout) = (DType::BF16, DType::BF16, layout);
    d.capacity = d.worst_case();
    d
}

/// Where a dispatch and the gradient of a combine without weights are delivered.
struct Rows {
    x: Tensor,
    dy: Tensor,
}

impl Rows {
    /// Receive buffers where the layout has them, if they are `straight`.
    fn new(plan: &EpPlan, straight: bool) -> Result<Self> {
        let d = plan.desc();
        let own = |t, rows| Ok(Tensor::zeros(t, Shape::d2(rows, N)));
        let made = |made: Result<Tensor>, own: Result<Tensor>| match made {
            Err(e) if e.is_unsupported() => own,
            made => made,
        };
        let (x, dy) = (own(d.dtype, d.recv_rows()), own(d.out, d.capacity));
        if !straight {
            return Ok(Self { x: x?, dy: dy? });
        }
        Ok(Self { x: made(plan.zero_copy_recv(), x)?, dy: made(plan.zero_copy_grad(), dy)? })
    }

    /// Receive buffers at two places of `buf` where the layout has them.
    fn within(plan: &EpPlan, buf: &SymBuf) -> Result<Self> {
        let d = plan.desc();
        let made = |made: Result<Tensor>, t, rows| match made {
            Err(e) if e.is_unsupported() => Ok(Tensor::zeros(t, Shape::d2(rows, N))),
            made => made,
        };
        let at = 48 + d.recv_rows() * N * d.dtype.size();
        // SAFETY: nothing but this plan uses the buffer.
        let (x, dy) =
            unsafe { (plan.host_zero_copy_recv_in(buf, 48), plan.host_zero_copy_grad_in(buf, at)) };
        Ok(Self { x: made(x, d.dtype, d.recv_rows())?, dy: made(dy, d.out, d.capacity)? })
    }
}

/// All outputs of a round of all phases, as bytes.
fn round(plan: &EpPlan, s: &Stream, to: &Rows, seed: u64) -> Result<Vec<Vec<u8>>> {
    let d = plan.desc();
    let mut rng = Rng::new(seed);
    let tokens = TOKENS - seed as usize % 3;
    let experts = d.num_experts() as u64;
    let idx: Vec<i64> = (0..tokens * K).map(|_| rng.below(experts + 1) as i64 - 1).collect();
    let mut random = |t: DType, rows: usize, cols: usize| {
        let v: Vec<f32> = (0..rows * cols).map(|_| rng.uniform(-1.0, 1.0)).collect();
        Tensor::from_f32(&v, t, Shape::d2(rows, cols))
    };
    let (x, w) = (random(d.dtype, tokens, N)?, random(DType::F32, tokens, K)?);
    let (y, g) = (random(d.out, d.capacity, N)?, random(d.out, tokens, N)?);
    let d_recv = random(d.out, d.recv_rows(), N)?;
    let vector = || Tensor::poisoned(DType::F32, Shape::d1(d.capacity));
    let rows = |t, rows, cols| Tensor::poisoned(t, Shape::d2(rows, cols));
    let (out, dx, dw) =
        (rows(d.out, tokens, N), rows(d.out, tokens, N), rows(DType::F32, tokens, K));
    let (weighted_dy, d_weights) = (rows(d.out, d.capacity, N), vector());
    to.x.poison()?;
    to.dy.poison()?;
    let recv = EpDispatch { x: to.x.clone(), scales: None, weights: Some(vector()) };
    let weights = recv.weights.as_ref();
    let idx = Tensor::from_slice(&idx, Shape::d2(tokens, K))?;
    let h = plan.route(s, &idx, None, &plan.handle()?)?.join(s)?;
    plan.dispatch(s, &h, &x, (Some(&w), None), &recv)?.join(s)?;
    plan.combine(s, &h, &y, weights, &out)?.join(s)?;
    plan.combine_bwd(s, &h, &g, None, &to.dy)?.join(s)?;
    let given = weights.map(|w| (w, &y, &d_weights));
    plan.combine_bwd(s, &h, &g, given, &weighted_dy)?.join(s)?;
    plan.dispatch_bwd(s, &h, (&d_recv, Some(&d_weights)), (&dx, Some(&dw)))?.join(s)?;
    s.synchronize()?;
    let all = [&recv.x, h.row_index(), h.m_splits(), &out, &to.dy, &weighted_dy, &dx, &dw];
    all.into_iter().chain(weights).map(|t| t.read(<[u8]>::to_vec)).collect()
}

/// One chunk or many, straight or by the area, to memory of the plan's or the caller's, whatever a
/// receive buffer held: the same bits.
#[test]
fn cuts_and_receive_buffers_change_no_bit() {
    for layout in [
        EpLayout::ExpertMajor { align: 4 },
        EpLayout::RankMajor { align: 2 },
        EpLayout::Flat { align: 1 },
    ] {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let (team, heap, s) = heap_of(&world, "cuts")?;
            let d = desc(3, layout);
            let mut plans = Vec::new();
            for (fine, straight) in [(false, false), (true, false), (false, true), (true, true)] {
                let plan = match fine {
                    true => EpPlan::with_fine_chunks(d.clone(), &heap)?,
                    false => EpPlan::new(d.clone(), &heap)?,
                };
                plan.prepare(&s)?;
                let rows = Rows::new(&plan, straight)?;
                plans.push((plan, rows));
            }
            let plan = EpPlan::new(d.clone(), &heap)?;
            plan.prepare(&s)?;
            let mine = heap.alloc(1 << 15, "mine")?;
            let rows = Rows::within(&plan, &mine)?;
            plans.push((plan, rows));
            for n in 0..20 {
                let seed = 10 * n + u64::from(team.rank().get());
                let outs = plans.iter().map(|(plan, rows)| round(plan, &s, rows, seed));
                let outs = outs.collect::<Result<Vec<_>>>()?;
                team.check()?;
                for (i, other) in outs.iter().enumerate().skip(1) {
                    let differs = other.iter().zip(&outs[0]).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "{layout:?}: plan {i}, round {n}: this output");
                }
            }
            team.agree(true)?;
            team.check_counters()
        })
        .unwrap();
    }
}

/// Every phase moves what the plan says, in one chunk or many, straight or by the area.
#[test]
fn phases_move_what_was_predicted() {
    World::run_threads(3, WorldCfg::for_tests(), |world| {
        let (team, heap, s) = heap_of(&world, "moved")?;
        let mut d = desc(3, EpLayout::ExpertMajor { align: 2 });
        (d.dtype, d.num_scales) = (DType::F8E4M3, 2);
        for (fine, straight) in [(false, false), (true, true)] {
            let plan = match fine {
                true => EpPlan::with_fine_chunks(d.clone(), &heap)?,
                false => EpPlan::new(d.clone(), &heap)?,
            };
            plan.prepare(&s)?;
            let to = Rows::new(&plan, straight)?;
            let h = plan.handle()?;
            let mut rng = Rng::new(3 + u64::from(team.rank().get()));
            let idx: Vec<i64> = (0..TOKENS * K).map(|_| rng.below(8) as i64 - 1).collect();
            let idx = Tensor::from_slice(&idx, Shape::d2(TOKENS, K))?;
            let rows = |t, rows, cols| Tensor::zeros(t, Shape::d2(rows, cols));
            let (x, scales) = (rows(d.dtype, TOKENS, N), rows(DType::F32, TOKENS, 2));
            let recv = EpDispatch {
                x: to.x.clone(),
                scales: Some(rows(DType::F32, d.capacity, 2)),
                weights: None,
            };
            let (y, g, out) =
                (rows(d.out, d.capacity, N), rows(d.out, TOKENS, N), rows(d.out, TOKENS, N));
            let (w, dw) =
                (Tensor::zeros(DType::F32, Shape::d1(d.capacity)), rows(DType::F32, TOKENS, K));
            let mut before = team.traffic();
            let mut moved = |run: &dyn Fn() -> Result<()>| -> Result<Traffic> {
                run()?;
                let now = team.traffic();
                let was = std::mem::replace(&mut before, now);
                let since = |(now, was): (&LinkTraffic, &LinkTraffic)| LinkTraffic {
                    puts: now.puts - was.puts,
                    put_bytes: now.put_bytes - was.put_bytes,
                    gets: now.gets - was.gets,
                    get_bytes: now.get_bytes - was.get_bytes,
                    signals: now.signals - was.signals,
                };
                Ok(before.iter().zip(&was).map(since).collect())
            };
            let route = moved(&|| plan.route(&s, &idx, None, &h)?.wait().map(drop))?;
            let sent = moved(&|| {
                plan.dispatch(&s, &h, &x, (None, Some(&scales)), &recv)?.wait().map(drop)
            })?;
            let combine = moved(&|| plan.combine(&s, &h, &y, None, &out)?.wait().map(drop))?;
            let dispatch_bwd = moved(&|| {
                plan.dispatch_bwd(&s, &h, (&y, Some(&w)), (&out, Some(&dw)))?.wait().map(drop)
            })?;
            let again =
                moved(&|| plan.dispatch_bwd(&s, &h, (&y, None), (&out, None))?.wait().map(drop))?;
            let combine_bwd =
                moved(&|| plan.combine_bwd(&s, &h, &g, None, &to.dy)?.wait().map(drop))?;
            let p = plan.predict(&h)?;
            assert_eq!(again, p.combine, "fine {fine}: without gradients of weights");
            let seen = EpTraffic { route, dispatch: sent, combine, dispatch_bwd, combine_bwd };
            assert_eq!(seen, p, "fine {fine}");
            let chunks = if fine { TOKENS as u64 } else { 1 };
            let mut peers = team.peers();
            assert!(peers.all(|r| p.dispatch[r.idx()].signals == 2 + chunks));
        }
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// Flags and metadata of a plan that was there before say nothing to the next one.
#[test]
fn a_plan_in_the_place_of_an_earlier_one_starts_anew() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, s) = heap_of(&world, "again")?;
        let layout = EpLayout::ExpertMajor { align: 1 };
        let rounds = |plan: &EpPlan, first: u64| -> Result<Vec<_>> {
            plan.prepare(&s)?;
            let rows = Rows::new(plan, false)?;
            let me = u64::from(team.rank().get());
            (first..first + 3).map(|n| round(plan, &s, &rows, 10 * n + me)).collect()
        };
        let free = heap.usage().0;
        let plan = EpPlan::new(desc(2, layout), &heap)?;
        let taken = free - heap.usage().0;
        rounds(&plan, 0)?;
        let want = rounds(&plan, 50)?;
        drop(plan);
        heap.collect()?;
        assert_eq!(heap.usage().0, free);
        let plan = EpPlan::new(desc(2, layout), &heap)?;
        assert_eq!(free - heap.usage().0, taken);
        assert!(rounds(&plan, 50)? == want, "words of the plan before");
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// Ranks that dispatch into different receive buffers: the rows of one would come where the other
/// does not expect them.
#[test]
fn another_receive_buffer_is_a_mismatch() {
    let told = World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, s) = heap_of(&world, "buffers")?;
        let plan = EpPlan::new(desc(2, EpLayout::ExpertMajor { align: 1 }), &heap)?;
        plan.prepare(&s)?;
        let bufs = [plan.zero_copy_recv()?, plan.zero_copy_recv()?];
        let idx = Tensor::from_slice(&[0i64, 2, 4], Shape::d2(1, K))?;
        let h = plan.route(&s, &idx, None, &plan.handle()?)?.wait()?;
        let x = Tensor::zeros(DType::BF16, Shape::d2(1, N));
        let to = bufs[team.rank().idx()].clone();
        let recv = EpDispatch { x: to, scales: None, weights: None };
        let done = plan.dispatch(&s, &h, &x, (None, None), &recv).and_then(Pending::wait);
        assert!(h.row_index().to_vec::<i32>()?.iter().all(|&i| i == -1));
        assert!(recv.x.to_f32()?.iter().all(|v| v.is_nan()));
        Ok(done.err().map(|e| e.to_string()).unwrap_or_default())
    })
    .unwrap();
    assert!(told.iter().all(|t| !t.is_empty()), "{told:?}");
    let both = |t: &String| t.contains("buffer=1") && t.contains("buffer=2");
    assert!(told.iter().any(both), "{told:?}");
}

/// A receive buffer belongs to the peers from the announcement of a launch up to its end.
#[test]
fn nobody_reads_a_receive_buffer_while_rows_come() {
    let gate = Arc::new(AtomicBool::new(true));
    // The rows come as long as rank 1 is held up: the deadline must not end that on a busy machine.
    let cfg = WorldCfg { timeout: Duration::from_secs(60), ..WorldCfg::for_tests() };
    World::run_threads(2, cfg, |world| {
        let (team, heap, s) = heap_of(&world, "held")?;
        let plan = EpPlan::new(desc(2, EpLayout::ExpertMajor { align: 1 }), &heap)?;
        plan.prepare(&s)?;
        let x = plan.zero_copy_recv()?;
        if team.rank().get() == 1 {
            let gate = gate.clone();
            team.set_hook(move |p| {
                while p.op == "ep_dispatch" && gate.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                HookAction::Proceed
            });
        }
        let idx = Tensor::from_slice(&[0i64, 2, 4], Shape::d2(1, K))?;
        let h = plan.route(&s, &idx, None, &plan.handle()?)?.wait()?;
        let tokens = Tensor::from_f32(&[1.5; N], DType::BF16, Shape::d2(1, N))?;
        let recv = EpDispatch { x: x.clone(), scales: None, weights: None };
        let done = plan.dispatch(&s, &h, &tokens, (None, None), &recv)?;
        if team.rank().get() == 0 {
            let begun = Instant::now();
            let e = loop {
                match x.read(|_| ()) {
                    Err(e) => break Some(e),
                    Ok(()) if begun.elapsed() > Duration::from_secs(30) => break None,
                    Ok(()) => std::thread::yield_now(),
                }
            };
            gate.store(false, Ordering::Release);
            let e = e.expect("reading was refused for 30 s at no time");
            assert!(e.to_string().contains("work in flight"), "{e}");
        }
        done.wait()?;
        let fed: i64 = h.m_splits().to_vec::<i64>()?.iter().sum();
        let want =
            [[1.5f32; N].repeat(fed as usize), vec![0.0; x.to_f32()?.len() - N * fed as usize]];
        assert_eq!(x.to_f32()?, want.concat());
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// What is queued before a dispatch may use its receive buffer: peers that are ahead wait.
#[test]
fn no_row_comes_before_its_launch_has_begun() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, s) = heap_of(&world, "early")?;
        let plan = EpPlan::new(desc(2, EpLayout::ExpertMajor { align: 1 }), &heap)?;
        plan.prepare(&s)?;
        let x = plan.zero_copy_recv()?;
        let idx = Tensor::from_slice(&[0i64, 2, 4], Shape::d2(1, K))?;
        let h = plan.route(&s, &idx, None, &plan.handle()?)?.wait()?;
        let tokens = Tensor::from_f32(&[1.5; N], DType::BF16, Shape::d2(1, N))?;
        x.poison()?;
        team.agree(true)?;
        if team.rank().get() == 0 {
            let x = x.clone();
            s.launch(Node::new("still used", move || {
                std::thread::sleep(Duration::from_millis(60));
                match x.read(|b| b.iter().all(|&b| b == DType::POISON))? {
                    true => Ok(()),
                    false => Err(Error::internal("rows came before the launch")),
                }
            }))?;
        }
        let recv = EpDispatch { x, scales: None, weights: None };
        plan.dispatch(&s, &h, &tokens, (None, None), &recv)?.wait()?;
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// A rank that is launches ahead of another one waits until its records have been read.
#[test]
fn records_stay_until_they_are_read() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, s) = heap_of(&world, "ahead")?;
        let d = EpDesc::new(2, 2, TOKENS, N, 1);
        let plan = EpPlan::new(d.clone(), &heap)?;
        plan.prepare(&s)?;
        let me = team.rank().get();
        // Everything goes from rank 1 to rank 0 and back: who receives takes its time to read.
        let slow = if me == 0 { "tokens" } else { "returns" };
        team.set_hook(move |p| {
            if p.kind == StepKind::Wait && p.phase == slow {
                std::thread::sleep(Duration::from_millis(15));
            }
            HookAction::Proceed
        });
        let tokens = if me == 0 { 0 } else { TOKENS };
        let idx = Tensor::from_slice(&vec![0i64; tokens], Shape::d2(tokens, 1))?;
        let h = plan.route(&s, &idx, None, &plan.handle()?)?.join(&s)?;
        let mut came = Vec::new();
        for launch in 0..8 {
            let x = Tensor::from_f32(
                &vec![launch as f32; tokens * N],
                DType::F32,
                Shape::d2(tokens, N),
            )?;
            let recv = EpDispatch { x: out(d.capacity, N), scales: None, weights: None };
            plan.dispatch(&s, &h, &x, (None, None), &recv)?.join(&s)?;
            came.push((launch as f32, recv.x));
        }
        let mut back = Vec::new();
        for launch in 0..8 {
            let all = vec![launch as f32; d.capacity * N];
            let y = Tensor::from_f32(&all, DType::F32, Shape::d2(d.capacity, N))?;
            let sums = out(tokens, N);
            plan.combine(&s, &h, &y, None, &sums)?.join(&s)?;
            back.push((launch as f32, sums));
        }
        finish(&s, &team)?;
        for (launch, x) in came {
            let rows = x.rows(0, if me == 0 { TOKENS } else { 0 })?;
            assert!(rows.to_f32()?.iter().all(|v| *v == launch), "rows of launch {launch}");
        }
        for (launch, sums) in back {
            assert!(sums.to_f32()?.iter().all(|v| *v == launch), "sums of launch {launch}");
        }
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// What has no receive buffer says so on the host as on devices.
#[test]
fn layouts_whose_rows_have_no_known_place_have_no_receive_buffer() {
    World::run_threads(1, WorldCfg::for_tests(), |world| {
        let (_team, heap, s) = heap_of(&world, "places")?;
        for (layout, recv, grad) in [
            (EpLayout::ExpertMajor { align: 1 }, true, true),
            (EpLayout::RankMajor { align: 1 }, true, false),
            (EpLayout::Flat { align: 1 }, false, false),
        ] {
            let plan = EpPlan::new(desc(1, layout), &heap)?;
            plan.prepare(&s)?;
            for (made, there) in [(plan.zero_copy_recv(), recv), (plan.zero_copy_grad(), grad)] {
                assert_eq!(made.is_ok(), there, "{layout:?}");
                assert!(made.err().is_none_or(|e| e.is_unsupported()), "{layout:?}");
            }
            let buf = heap.alloc(1 << 12, "mine")?;
            for made in [plan.zero_copy_recv_in(&buf, 0), plan.zero_copy_grad_in(&buf, 0)] {
                assert!(made.is_err_and(|e| e.is_unsupported() && e.to_string().contains("host_")));
            }
            if !recv {
                continue;
            }
            let len = plan.desc().recv_rows() * N * plan.desc().dtype.size();
            let at = (1 << 12) - len.next_multiple_of(16);
            for (at, fits) in [(at + 16, false), (8, false), (at, true), (at, false)] {
                // SAFETY: nothing but this plan uses the buffer.
                let made = unsafe { plan.host_zero_copy_recv_in(&buf, at) };
                assert_eq!(made.is_ok(), fits, "{layout:?}, at byte {at} of {len}: {made:?}");
                assert!(made.err().is_none_or(|e| e.kind() == ErrorKind::InvalidArgument));
            }
        }
        Ok(())
    })
    .unwrap();
}
