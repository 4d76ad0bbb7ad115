//! The protocol of every operation: losing, repeating or reordering any one signal is noticed;
//! captured replays equal eager runs; what was not prepared does not run; deaths are named.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tilewire_core::*;
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_ops::ag_gemm::*;
use tilewire_ops::collective::*;
use tilewire_ops::common::OverlapConfig;
use tilewire_ops::gemm_ar::*;
use tilewire_ops::gemm_rs::*;
use tilewire_ops::{Algo, Shards};
use tilewire_symm::*;

const M: usize = 12;
const N: usize = 8;
const K: usize = 6;

/// A prepared operation with buffers of its own: fill the inputs, launch, read the output.
struct Ready {
    inputs: Vec<Tensor>,
    out: Tensor,
    launch: Box<dyn Fn(&Stream) -> Result<()>>,
}

type Make = fn(&Heap, &Stream, bool) -> Result<Ready>;

fn prepared_if(yes: bool, f: impl FnOnce() -> Result<()>) -> Result<()> {
    if yes { f() } else { Ok(()) }
}

fn mine(heap: &Heap) -> usize {
    Shards::Even.rows(M, heap.team().size()).unwrap()[heap.team().rank().idx()]
}

fn zeros(rows: usize, cols: usize) -> Tensor {
    Tensor::zeros(DType::F32, Shape::d2(rows, cols))
}

fn out(rows: usize, cols: usize) -> Tensor {
    Tensor::poisoned(DType::F32, Shape::d2(rows, cols))
}

fn ag(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { algo: Algo::Fused, block_m: 2, block_n: 4, sub_chunks: 2 };
    let plan = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(mine(heap), K), zeros(N, K), out(M, N));
    let t = AgGemmInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn rs_of(algo: Algo, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { algo, block_m: 2, block_n: 4, sub_chunks: 2 };
    let plan = GemmRsPlan::new(GemmRsDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(M, K), zeros(N, K), out(mine(heap), N));
    let t = GemmRsInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn rs_fused(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    rs_of(Algo::Fused, heap, stream, prepare)
}

fn rs_pipelined(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    rs_of(Algo::Pipelined, heap, stream, prepare)
}

fn ar(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { algo: Algo::Fused, block_m: 2, block_n: 4, sub_chunks: 2 };
    let plan = GemmArPlan::new(GemmArDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(M, K), zeros(N, K), out(M, N));
    let t = GemmRsInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn collective(kind: CollectiveKind, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let rows = match &kind {
        CollectiveKind::AllGather(_) => (mine(heap), M),
        CollectiveKind::ReduceScatter(..) => (M, mine(heap)),
        CollectiveKind::AllReduce(_) => (M, M),
        CollectiveKind::AllToAll(s) => (s[0].iter().sum(), s.iter().map(|r| r[0]).sum()),
    };
    let desc = CollectiveDesc { kind, m: M, cols: N, dtype: DType::F32 };
    let plan = CollectivePlan::new(desc, heap)?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, y) = (zeros(rows.0, N), out(rows.1, N));
    let (a, b) = (x.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, &a, &b)?.join(s).map(|_| ())),
    })
}

fn gather(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::AllGather(Shards::Even), heap, stream, prepare)
}

fn scatter(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum), heap, stream, prepare)
}

fn reduce(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::AllReduce(ReduceOp::Sum), heap, stream, prepare)
}

fn exchange(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let n = heap.team().size();
    collective(CollectiveKind::AllToAll(vec![vec![3; n]; n]), heap, stream, prepare)
}

const OPS: [(&str, Make); 8] = [
    ("ag_gemm", ag),
    ("gemm_rs fused", rs_fused),
    ("gemm_rs pipelined", rs_pipelined),
    ("gemm_ar", ar),
    ("all_gather", gather),
    ("reduce_scatter", scatter),
    ("all_reduce", reduce),
    ("all_to_all", exchange),
];

fn fill(r: &Ready, seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for t in &r.inputs {
        let v: Vec<f32> = (0..t.shape().num_elems()).map(|_| rng.uniform(-1.0, 1.0)).collect();
        t.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
    }
    r.out.poison()
}

fn finish(s: &Stream, team: &LiveTeam) -> Result<()> {
    Pending::new((), s, Some(team.fault().clone()))?.wait()
}

fn heap_of(world: &World, name: &str) -> Result<(LiveTeam, Heap, Stream)> {
    let team = world.everyone(name)?;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
    Ok((team, heap, Stream::new("s")?))
}

/// Two launches of `make` on every rank; the outputs as bits.
fn two_launches(world: &World, name: &str, make: Make, hook: Option<Arc<Tamper>>) -> Result<Vec<Vec<u32>>> {
    let (team, heap, stream) = heap_of(world, name)?;
    let op = make(&heap, &stream, true)?;
    if let Some(h) = hook {
        team.set_hook(move |p| h.act(p));
    }
    let mut outs = Vec::new();
    for round in 0..2 {
        fill(&op, round * 100 + u64::from(team.rank().get()))?;
        (op.launch)(&stream)?;
        finish(&stream, &team)?;
        outs.push(op.out.to_vec::<f32>()?.iter().map(|v| v.to_bits()).collect());
    }
    team.agree(true)?;
    team.check_counters()?;
    Ok(outs)
}

/// Changes step number `nth` of `kind` on rank 0.
struct Tamper {
    kind: StepKind,
    nth: u64,
    action: HookAction,
    hits: AtomicU64,
}

impl Tamper {
    fn act(&self, p: &HookPoint<'_>) -> HookAction {
        if p.rank.get() == 0 && p.kind == self.kind && p.nth == self.nth {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return self.action;
        }
        HookAction::Proceed
    }
}

fn short() -> WorldCfg {
    WorldCfg { timeout: Duration::from_millis(400), ..WorldCfg::default() }
}

/// For each operation: leave out, repeat, or overtake each single signal of rank 0 in turn. The
/// run must fail, or the results must differ: nothing may look right.
#[test]
fn any_one_signal_lost_repeated_or_reordered_is_noticed() {
    for (name, make) in OPS {
        let good = World::run_threads(2, WorldCfg::for_tests(), |w| two_launches(&w, "good", make, None)).unwrap();
        for (kind, action) in [
            (StepKind::Signal, HookAction::Skip),
            (StepKind::Signal, HookAction::Twice),
            (StepKind::Put, HookAction::Skip),
            (StepKind::Put, HookAction::AfterSignal),
        ] {
            let mut tried = 0;
            for nth in 0.. {
                let tamper = Arc::new(Tamper { kind, nth, action, hits: AtomicU64::new(0) });
                let got = World::run_threads(2, short(), |w| {
                    two_launches(&w, "bad", make, Some(tamper.clone()))
                });
                if tamper.hits.load(Ordering::Relaxed) == 0 {
                    break;
                }
                tried += 1;
                let noticed = got.as_ref().map_or(true, |outs| *outs != good);
                assert!(noticed, "{name}: {action:?} of {kind:?} {nth} went unnoticed");
            }
            assert!(tried >= 2, "{name}: only {tried} of {kind:?}");
        }
    }
}

/// Replays with changing inputs equal eager launches, bit for bit.
#[test]
fn captured_replays_equal_eager_launches() {
    for (name, make) in OPS {
        World::run_threads(3, WorldCfg::for_tests(), |w| {
            let (team, heap, stream) = heap_of(&w, "graph")?;
            let (eager, captured) = (make(&heap, &stream, true)?, make(&heap, &stream, true)?);
            stream.begin_capture()?;
            (captured.launch)(&stream)?;
            let graph = stream.end_capture()?.instantiate()?;
            for round in 0..40u64 {
                let seed = round << 8 | u64::from(team.rank().get());
                fill(&eager, seed)?;
                fill(&captured, seed)?;
                (eager.launch)(&stream)?;
                stream.replay(&graph)?;
                finish(&stream, &team)?;
                let same = eager.out.read(|a| captured.out.read(|b| a == b))??;
                assert!(same, "{name} round {round}");
            }
            team.agree(true)?;
            team.check_counters()
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// Launch and capture before `prepare` are errors on the host, before anything is queued.
#[test]
fn nothing_runs_before_prepare() {
    for (name, make) in OPS {
        World::run_threads(2, WorldCfg::for_tests(), |w| {
            let (team, heap, stream) = heap_of(&w, "raw")?;
            let op = make(&heap, &stream, false)?;
            let e = (op.launch)(&stream).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotPrepared, "{name}: {e}");
            stream.begin_capture()?;
            assert_eq!((op.launch)(&stream).unwrap_err().kind(), ErrorKind::NotPrepared);
            let e = make(&heap, &stream, true).err().expect("prepare under capture");
            assert!(e.to_string().contains("captured"), "{name}: {e}");
            assert_eq!(stream.end_capture()?.num_nodes(), 0);
            team.agree(true).map(|_| ())
        })
        .unwrap();
    }
}

/// A rank that dies inside an operation: the others name it, its operation and its phase, their
/// outputs are poisoned, and they form a new team that computes.
#[test]
fn a_death_inside_each_operation_is_named() {
    for (name, make) in OPS {
        let start = Instant::now();
        let e = World::run_threads(3, WorldCfg::default(), |w| {
            let (team, heap, stream) = heap_of(&w, "mortal")?;
            let op = make(&heap, &stream, true)?;
            fill(&op, 1)?;
            if w.rank().get() == 2 {
                panic!("victim");
            }
            (op.launch)(&stream)?;
            let e = finish(&stream, &team).unwrap_err();
            assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(2)), "{name}: {e}");
            assert!(e.get_op().is_some_and(|o| name.starts_with(o)) && e.get_phase().is_some(), "{name}: {e}");
            // Poisoned where it was not complete; never half a result that looks whole.
            stream.synchronize()?;
            let rest = w.team(&w.alive(), "rest")?.unwrap();
            let heap = rest.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
            let again = make(&heap, &stream, true)?;
            fill(&again, 2)?;
            (again.launch)(&stream)?;
            finish(&stream, &rest)?;
            assert!(again.out.to_f32()?.iter().all(|v| v.is_finite()), "{name}");
            assert!(op.out.to_f32()?.iter().all(|v| v.is_nan()), "{name}: output not poisoned");
            Ok(())
        })
        .unwrap_err();
        assert!(e.message().contains("victim"), "{name}: {e}");
        assert!(start.elapsed() < Duration::from_secs(5), "{name}: {:?}", start.elapsed());
    }
}

/// Ranks that launch different things are told so, with both ranks' words.
#[test]
fn launches_that_differ_are_a_mismatch() {
    let e = World::run_threads(2, WorldCfg::default(), |w| {
        let (team, heap, stream) = heap_of(&w, "differ")?;
        let (a, b) = (gather(&heap, &stream, true)?, scatter(&heap, &stream, true)?);
        let op = if team.rank().get() == 0 { &a } else { &b };
        fill(op, 1)?;
        (op.launch)(&stream)?;
        finish(&stream, &team)
    })
    .unwrap_err();
    let t = e.to_string();
    assert!(e.is_mismatch() && t.contains("all_gather") && t.contains("reduce_scatter"), "{t}");
}

/// Wrong tensors are refused with what was expected and what was given.
#[test]
fn wrong_tensors_are_refused() {
    World::run_threads(2, WorldCfg::for_tests(), |w| {
        let (team, heap, stream) = heap_of(&w, "bad")?;
        let plan = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), &heap, None)?;
        plan.prepare(&stream)?;
        let rows = mine(&heap);
        let launch = |x: Tensor, w: Tensor, y: Tensor, m: usize| {
            plan.launch(&stream, m, AgGemmInputs::new(x, w, y)).map(|_| ()).unwrap_err().to_string()
        };
        let bf16 = Tensor::zeros(DType::BF16, Shape::d2(rows, K));
        assert!(launch(bf16, zeros(N, K), out(M, N), M).contains("expected f32 [6, 6], got bf16 [6, 6]"));
        assert!(launch(zeros(rows + 1, K), zeros(N, K), out(M, N), M).contains("`x`"));
        assert!(launch(zeros(rows, K), zeros(K, N), out(M, N), M).contains("`w`"));
        assert!(launch(zeros(rows, K), zeros(N, K), out(M + 1, N), M).contains("`out`"));
        assert!(launch(zeros(rows, K), zeros(N, K), out(M, N), M + 1).contains("at most 12"));
        assert!(AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::I32), &heap, None).is_err());
        let cublasmp = Some(OverlapConfig::of(Algo::Cublasmp, 1));
        assert!(AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), &heap, cublasmp).err().unwrap().is_unavailable());
        let huge = AgGemmDesc::new(1 << 20, N, K, DType::F32);
        assert_eq!(AgGemmPlan::new(huge, &heap, None).err().unwrap().kind(), ErrorKind::Exhausted);
        team.agree(true).map(|_| ())
    })
    .unwrap();
}
