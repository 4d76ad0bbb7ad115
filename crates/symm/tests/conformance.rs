//! One suite, held against every backend and process model by one macro line each.
//!
//! What `Transport` promises is in `cases`, generic over the backend; what only the host backend
//! has (hooks, the flight recorder) is here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, DType, Error, ErrorKind, Rank, Result, Shape};
use tilewire_device::{Pending, Tensor};
use tilewire_symm::*;
use tilewire_testing::{Lack, did_not_run};

mod cases;

use cases::nccl::{adopted, adopted_waiting, host_puts};
use cases::no_address_of_a_peer;
use cases::queued::Queued;
use cases::{Host, KIB, Nccl, Sockets, Vmm};

type Setup = cases::Setup<Host>;

fn setup(world: &World, len_bytes: usize) -> Result<Setup> {
    cases::setup::<Host>(world, len_bytes)
}

fn tensor(bytes: &[u8]) -> Tensor {
    Tensor::from_slice(bytes, Shape::d1(bytes.len())).unwrap()
}

/// Teams: subsets, overlapping, non-members, reversed order.
fn teams(world: World) -> Result<()> {
    let n = world.size() as u32;
    let me = world.rank();
    let low: Vec<Rank> = (0..n.div_ceil(2)).map(Rank::new).collect();
    let rev: Vec<Rank> = (0..n).rev().map(Rank::new).collect();
    let low_team = world.team(&low, "low")?;
    assert_eq!(low_team.is_some(), low.contains(&me));
    let rev_team = world.team(&rev, "rev")?.unwrap();
    assert_eq!(rev_team.rank(), Rank::new(n - 1 - me.get()));
    if let Some(t) = &low_team {
        let all = t.exchange("names", me.get().to_string().as_bytes())?;
        let want: Vec<Vec<u8>> = low.iter().map(|r| r.get().to_string().into_bytes()).collect();
        assert_eq!(all, want);
    }
    assert!(rev_team.agree(true)?);
    assert!(!rev_team.agree(me.get() != 0)?);
    assert!(world.team(&[Rank::new(n)], "bad").is_err());
    Ok(())
}

/// What differs between ranks at `prepare` is shown with both ranks' words.
fn mismatch(world: World) -> Result<()> {
    let s = setup(&world, 64 * KIB)?;
    let me = s.team.rank();
    s.team.prepare_agree(&Fingerprint::new("op", "m=1"))?;
    let start = Instant::now();
    let fp = Fingerprint::new("op", format_args!("m={}", if me.get() == 0 { 2 } else { 3 }));
    let e = s.team.prepare_agree(&fp).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5));
    if e.is_mismatch() {
        let t = e.to_string();
        assert!(t.contains("m=2") && t.contains("m=3"), "{t}");
    } else {
        // A rank that came later heard the abort first.
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    }
    // A prepare against a launch.
    let t2 = world.everyone("second")?;
    let r = if me.get() == 0 {
        t2.launch_begin(&Fingerprint::new("op", "m=1")).map(|_| ())?;
        std::thread::sleep(Duration::from_millis(300));
        t2.check()
    } else {
        t2.prepare_agree(&Fingerprint::new("op", "m=1")).map(|_| ())
    };
    // In its own words, or in those of a rank that looked first; rank 0 by the abort.
    let t = r.unwrap_err().to_string();
    let own = t.contains("`launch op m=1`") && t.contains("`prepare op m=1`");
    assert!(own || t.contains("it disagrees with rank 0"), "{t}");
    Ok(())
}

/// Equal calls give equal offsets; dropped space returns only when all have dropped it; growth
/// keeps contents; unequal sizes are an error on every rank.
fn heap_rules(world: World) -> Result<()> {
    let s = setup(&world, 64 * KIB)?;
    let me = s.team.rank();
    let a = s.heap.alloc(1000, "a")?;
    let b = s.heap.alloc(50 * KIB, "b")?;
    let offsets =
        s.team.exchange("offsets", format!("{} {}", a.offset(), b.offset()).as_bytes())?;
    assert!(offsets.iter().all(|o| *o == offsets[0]));
    assert!(s.heap.alloc(50 * KIB, "c").unwrap_err().to_string().contains("heap.grow"));
    let keep = (me.get() == 0).then(|| b.clone());
    drop(b);
    s.heap.collect()?;
    assert!(s.heap.alloc(50 * KIB, "c").is_err(), "rank 0 still holds `b`");
    drop(keep);
    s.heap.collect()?;
    // Rank 1 has work in flight that knows the addresses alone.
    let ended = Arc::new(AtomicBool::new(me.get() != 1));
    let (e, f, g) = (ended.clone(), ended.clone(), s.heap.alloc(50 * KIB, "g")?);
    g.keep_until(move || e.load(Ordering::Acquire));
    let slots = s.team.signals(1, "slots")?;
    slots.keep_until(move || f.load(Ordering::Acquire));
    let first = slots.slot(0).index();
    drop((g, slots));
    s.heap.collect()?;
    assert!(s.heap.alloc(50 * KIB, "c").is_err(), "rank 1 still uses `g`");
    let other = s.team.signals(1, "slots")?;
    assert_ne!(other.slot(0).index(), first, "rank 1 still uses the slot");
    ended.store(true, Ordering::Release);
    s.heap.collect()?;
    assert_eq!(s.team.signals(1, "slots")?.slot(0).index(), first);
    let c = s.heap.alloc(50 * KIB, "c")?;
    s.os.put(&s.stream, me, c.range(0, 4), &tensor(&[1, 2, 3, 4]))?;
    s.heap.grow(128 * KIB)?;
    let d = s.heap.alloc(60 * KIB, "d")?;
    s.os.put(&s.stream, me, d.range(60 * KIB - 4, 4), &tensor(&[5, 6, 7, 8]))?;
    assert_eq!(s.own(c.range(0, 4), 4)?, [1, 2, 3, 4]);
    assert_eq!(s.own(d.range(60 * KIB - 4, 4), 4)?, [5, 6, 7, 8]);
    assert_eq!(s.heap.grow(1 << 40).unwrap_err().kind(), ErrorKind::Exhausted);
    let t2 = world.everyone("sizes")?;
    let len = if me.get() == 0 { 8192 } else { 4096 };
    let e = t2.heap(BackendKind::Host, HeapCfg::new(len)).err().expect("sizes differ");
    let text = e.to_string();
    assert!(e.is_mismatch() && text.contains("8192") && text.contains("4096"), "{e}");
    if tilewire_device::cuda::available().is_err() {
        let e = t2.heap(BackendKind::Vmm, HeapCfg::new(4096)).err().expect("no CUDA here");
        assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
    }
    // An empty and a tiny buffer have a place.
    s.heap.alloc(0, "none")?;
    s.heap.alloc(1, "one")?;
    Ok(())
}

/// A signal too few, or too many, or before its data: each is noticed.
fn tampered_signals(world: World) -> Result<()> {
    for (i, action) in
        [HookAction::Skip, HookAction::Twice, HookAction::AfterSignal].into_iter().enumerate()
    {
        let team = world.everyone(&format!("tampered{i}"))?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(4096))?;
        let buf = heap.alloc(64, "x")?;
        let sig = team.signals(1, "x")?;
        let kind = if action == HookAction::AfterSignal { StepKind::Put } else { StepKind::Signal };
        if team.rank().get() == 0 {
            team.set_hook(move |h| {
                let hit = h.kind == kind && h.phase != "start";
                if hit { action } else { HookAction::Proceed }
            });
        }
        let ctx = OpCtx::new(&heap, "probe", 0);
        let net = heap.host_transport()?;
        // SAFETY: nobody puts before the barrier.
        unsafe { ctx.write_local(buf.range(0, 64), &[DType::POISON; 64]) };
        net.barrier(&ctx, 0, "start").ok();
        let (zero, one) = (Rank::new(0), Rank::new(1));
        let noticed = if team.rank() == zero {
            // SAFETY: rank 1 reads the range behind its wait for the signal, and once.
            let permit = unsafe { Permit::assume(team.size()) };
            net.put(&ctx, &permit, (one, buf.range(0, 64)), &[7; 64], "put")?;
            net.signal(&ctx, one, sig.slot(0), 1, "signal")?;
            true
        } else if team.rank() == one {
            let mut got = [0; 64];
            let r = net.wait(&ctx, zero, sig.slot(0), 1, "wait").map(|()| {
                // SAFETY: rank 0 has signalled, and puts once, unless a hook made it put late: that
                // race is what is looked for.
                unsafe { ctx.read_local(buf.range(0, 64), &mut got) };
            });
            // The second count may come a moment after the first was taken.
            std::thread::sleep(Duration::from_millis(20));
            r.is_err() || got != [7; 64] || team.check_counters().is_err()
        } else {
            true
        };
        assert!(noticed, "{action:?} went unnoticed");
        world.everyone(&format!("after{i}"))?.agree(true)?;
    }
    Ok(())
}

/// What a case lacked, and in words.
type Lacks = (Lack, String);

type Case = fn(World) -> Result<()>;

fn threads(n: usize, case: Case) -> Result<(), Lacks> {
    // Two seconds, as everywhere in tests; only the fault cases ever use them up.
    let cfg = WorldCfg::for_tests();
    let r: Result<Vec<()>> = World::run_threads(n, cfg, case);
    r.map_err(|e: Error| panic!("{e}")).ok();
    Ok(())
}

/// Runs a case on GPUs, or says what lacks. One case at a time: freeing memory waits for all work
/// of a device, that of other cases' waits included.
fn gpus(n: usize, case: Case) -> Result<(), Lacks> {
    static DEVICES: Mutex<()> = Mutex::new(());
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    match tilewire_device::cuda::available() {
        // More ranks than devices would share them, which proves nothing about ordering.
        Ok(()) if tilewire_device::cuda::device_count().unwrap_or(0) < n as u32 => {
            Err((Lack::Gpus, format!("{n} ranks, and fewer devices")))
        }
        Ok(()) => threads(n, case),
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            Err((Lack::Gpu, e.to_string()))
        }
    }
}

/// As [`gpus`], where NCCL can be opened.
fn gpus_with_nccl(n: usize, case: Case) -> Result<(), Lacks> {
    if let Err(e) = tilewire_device::cuda::NcclComm::library() {
        assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
        tilewire_device::cuda::available().map_err(|e| (Lack::Gpu, e.to_string()))?;
        return Err((Lack::Nccl, e.to_string()));
    }
    gpus(n, case)
}

/// A case with several numbers of ranks: it ran if it ran with one of them.
#[track_caller]
fn with_each(ns: &[usize], run: fn(usize, Case) -> Result<(), Lacks>, case: Case) {
    let lacks: Vec<Lacks> = ns.iter().filter_map(|&n| run(n, case).err()).collect();
    if let Some((lack, why)) = lacks.first().filter(|_| lacks.len() == ns.len()) {
        did_not_run(*lack, why);
    }
}

macro_rules! conformance {
    ($model:ident, $backend:ident, $run:path, $ns:tt; $($own:ident)*) => {
        mod $model {
            conformance!(@generic $backend, $run, $ns, put_signal_wait put_flag permits get_after_signal
                barrier graph_replay growth timeout_and_reform abort_and_reform);
            conformance!(@case $run, $ns, $($own)*);
        }
    };
    (@generic $backend:ident, $run:path, $ns:tt, $($case:ident)+) => {
        $(#[test]
        fn $case() {
            super::with_each(&$ns, $run, super::cases::$case::<super::$backend>);
        })+
    };
    (@case $run:path, $ns:tt, $($case:ident)*) => {
        $(#[test]
        fn $case() {
            super::with_each(&$ns, $run, super::$case);
        })*
    };
}
conformance!(host_threads, Host, super::threads, [2, 3, 5];
    teams mismatch heap_rules tampered_signals);
conformance!(host_sockets, Sockets, super::threads, [2, 3, 5]; no_address_of_a_peer);
conformance!(vmm_threads, Vmm, super::gpus, [2, 3, 4, 5, 8];);
conformance!(nccl_threads, Nccl, super::gpus_with_nccl, [2, 3, 4, 5, 8]; adopted adopted_waiting host_puts);

#[test]
fn a_world_of_one_does_everything_alone() {
    use cases::{barrier, get_after_signal, graph_replay, put_signal_wait};
    for case in [put_signal_wait::<Host>, get_after_signal::<Host>, barrier::<Host>] {
        with_each(&[1], threads, case);
    }
    for case in [graph_replay::<Host>, teams] {
        with_each(&[1], threads, case);
    }
}

/// One rank, one GPU.
#[test]
fn vmm_alone() {
    use cases::{barrier, get_after_signal, graph_replay, put_signal_wait};
    for case in [put_signal_wait::<Vmm>, get_after_signal::<Vmm>, barrier::<Vmm>] {
        with_each(&[1], gpus, case);
    }
    with_each(&[1], gpus, graph_replay::<Vmm>);
}

#[test]
fn a_dead_rank_is_named_at_once_and_the_others_form_a_new_team() {
    let start = Instant::now();
    let out = World::run_threads(4, WorldCfg::default(), |world| {
        let s = setup(&world, 16 * KIB)?;
        let victim = Rank::new(2);
        let sig = s.team.signals(1, "x")?;
        if world.rank() == victim {
            // Not while the others still set up: that would be their error.
            for peer in s.team.peers() {
                s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
            }
            s.finish()?;
            // A thread that ends without a goodbye: what a crash looks like from outside.
            panic!("gone");
        }
        s.os.signal(&s.stream, victim, sig.slot(0), 1)?;
        s.os.wait(&s.stream, victim, sig.slot(0), 1)?;
        let p = Pending::new((), &s.stream, Some(s.team.fault().clone()))?;
        let e = p.wait().unwrap_err();
        assert_eq!((e.kind(), e.get_peer()), (ErrorKind::PeerDead, Some(victim)), "{e}");
        let t = world.team(&world.alive(), "rest")?.unwrap();
        assert_eq!(t.size(), 3);
        assert!(t.agree(true)?);
        Ok(())
    });
    let e = out.unwrap_err();
    assert_eq!(e.message(), "a rank panicked: gone", "{e}");
    assert!(start.elapsed() < Duration::from_secs(3));
}

/// A message names the backend that was asked for, and no other (but the one to use instead).
#[test]
fn messages_name_the_backend_in_use() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        for s in backends() {
            let team = world.everyone(s.kind.name())?;
            let Err(e) = team.heap(s.kind, HeapCfg::new(4096)) else { continue };
            // NVSHMEM, wherever it is, is not for threads.
            let refused = match s.kind {
                BackendKind::Nvshmem => e.is_unsupported(),
                _ => e.is_unavailable(),
            };
            assert!(refused && e.get_hint().is_some(), "{e}");
            for (name, kind) in BackendKind::NAMES {
                let named = e.message().contains(&format!("`{name}`"));
                assert_eq!(named, *kind == s.kind, "{}", e.message());
            }
        }
        // Ranks that ask for different backends are told which.
        let team = world.everyone("both")?;
        let own = [BackendKind::Host, BackendKind::Vmm][team.rank().idx()];
        let e = team.heap(own, HeapCfg::new(4096)).err().unwrap();
        assert!(e.is_mismatch(), "{e}");
        assert!(e.to_string().contains("`host`") && e.to_string().contains("`vmm`"), "{e}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn backends_are_listed_without_a_world() {
    let b = backends();
    assert_eq!(b.len(), 4);
    for s in b {
        let can = match s.kind {
            BackendKind::Host => true,
            BackendKind::Vmm => tilewire_device::cuda::available().is_ok(),
            BackendKind::Nccl => {
                let nccl = tilewire_device::cuda::NcclComm::library();
                tilewire_device::cuda::available().is_ok() && nccl.is_ok()
            }
            BackendKind::Nvshmem => {
                let nvshmem = tilewire_device::cuda::Nvshmem::library();
                tilewire_device::cuda::available().is_ok() && nvshmem.is_ok()
            }
            _ => false,
        };
        assert_eq!(can, s.why_not.is_none(), "{s:?}");
    }
}

/// A peer may pass a prepare and make more launches than the recorder holds before I look.
#[test]
fn a_prepare_is_seen_however_far_the_peer_has_gone() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("far")?;
        let fp = Fingerprint::new("op", "m=1");
        for _ in 0..20 {
            team.prepare_agree(&fp)?;
            for _ in 0..2100 {
                team.launch_begin(&fp)?;
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Who gives up an agreement ends it for those who come later, too.
#[test]
fn an_agreement_that_failed_for_one_fails_for_all() {
    let cfg = WorldCfg { timeout: Duration::from_millis(300), ..WorldCfg::default() };
    World::run_threads(2, cfg, |world| {
        let team = world.everyone("late")?;
        if world.rank().get() == 1 {
            std::thread::sleep(Duration::from_millis(900));
        }
        let e = team.agree(true).expect_err("nobody may commit what the other gave up");
        let late = world.rank().get() == 1;
        assert_eq!(e.kind(), if late { ErrorKind::Aborted } else { ErrorKind::Timeout }, "{e}");
        Ok(())
    })
    .unwrap();
}

/// A collective call hears of an abort: nobody waits there for a rank that has gone to re-form.
#[test]
fn an_abort_ends_collective_calls() {
    type Call = fn(&Heap) -> Result<()>;
    let calls: [(&str, Call); 4] = [
        ("agree", |h| h.team().agree(true).map(|_| ())),
        ("heap", |h| h.team().heap(BackendKind::Host, HeapCfg::new(4096)).map(|_| ())),
        ("collect", Heap::collect),
        ("grow", |h| h.grow(8 * KIB)),
    ];
    let start = Instant::now();
    World::run_threads(3, WorldCfg::default(), |world| {
        for (name, call) in calls {
            let team = world.everyone(name)?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(4096))?;
            if world.rank().get() == 0 {
                std::thread::sleep(Duration::from_millis(50));
                team.abort("enough");
            } else {
                let e = call(&heap).unwrap_err();
                assert_eq!(
                    (e.kind(), e.get_peer()),
                    (ErrorKind::Aborted, Some(Rank::new(0))),
                    "{e}"
                );
            }
        }
        Ok(())
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(3));
}

/// A rank that panics with a wait in flight neither waits for it nor keeps its death to itself.
#[test]
fn a_panic_with_work_in_flight_is_a_death() {
    let start = Instant::now();
    let out = World::run_threads(3, WorldCfg::default(), |world| {
        let s = setup(&world, 16 * KIB)?;
        let sig = s.team.signals(1, "x")?;
        let victim = Rank::new(2);
        let on = if world.rank() == victim { Rank::new(0) } else { victim };
        s.os.wait(&s.stream, on, sig.slot(0), 1)?;
        if world.rank() == victim {
            panic!("gone");
        }
        let p = Pending::new((), &s.stream, Some(s.team.fault().clone()))?;
        let e = p.wait().unwrap_err();
        assert_eq!((e.kind(), e.get_peer()), (ErrorKind::PeerDead, Some(victim)), "{e}");
        Ok(())
    });
    assert_eq!(out.unwrap_err().message(), "a rank panicked: gone");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// Ranks that came too late for each other meet at a later try.
#[test]
fn who_meets_anew_does_not_wait_for_a_rank_that_panicked() {
    let start = Instant::now();
    let out = World::run_threads(3, WorldCfg::default(), |world| {
        let heap = world.everyone("first")?.heap(BackendKind::Host, HeapCfg::new(4096))?;
        if world.rank().get() == 2 {
            // As memory of work that does not end would: it keeps the team, and so the mesh.
            std::mem::forget(heap.clone());
            panic!("gone");
        }
        let Err(e) = world.everyone("second") else { panic!("a team with a rank that is gone") };
        // Rank 2, or the other one, which has heard of it and ended.
        assert_eq!(e.kind(), ErrorKind::PeerDead, "{e}");
        Ok(())
    });
    assert_eq!(out.unwrap_err().message(), "a rank panicked: gone");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_came_too_late_catches_up() {
    let cfg = WorldCfg { rendezvous_timeout: Duration::from_millis(200), ..WorldCfg::default() };
    let tries = World::run_threads(3, cfg, |world| {
        if world.rank().get() == 1 {
            std::thread::sleep(Duration::from_millis(700));
        }
        for tries in 1..20 {
            match world.everyone("late") {
                Ok(t) => return t.agree(true).map(|_| tries),
                Err(e) => assert!(e.is_timeout(), "{e}"),
            }
        }
        Err(Error::internal("they never met"))
    });
    assert!(tries.unwrap().iter().all(|t| (3..10).contains(t)));
}

/// What nobody consumed is not left to the next owner of the slot.
#[test]
fn a_slot_with_a_signal_too_many_is_not_given_back() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let s = setup(&world, 4 * KIB)?;
        let sig = s.team.signals(1, "x")?;
        let (me, peer) = (s.team.rank(), Rank::new(1 - s.team.rank().get()));
        if me.get() == 0 {
            s.os.signal(&s.stream, peer, sig.slot(0), 2)?;
        } else {
            s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
        }
        s.finish()?;
        drop(sig);
        let e = s.heap.collect().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert!(e.message().contains("slot 0"), "{e}");
        Ok(())
    })
    .unwrap();
}

/// Ranks in an error of a team are the team's; its text has those of the world.
#[test]
fn an_error_of_a_team_has_the_ranks_of_the_world_in_its_text() {
    let cfg = WorldCfg { rendezvous_timeout: Duration::from_millis(100), ..WorldCfg::default() };
    World::run_threads(3, cfg, |world| {
        let outer = world.everyone("outer");
        if world.rank().get() != 1 {
            // World ranks 2 and 1: team ranks 0 and 1.
            if world.rank().get() == 2 {
                let members = [Rank::new(2), Rank::new(1)];
                let e = world.team(&members, "pair").unwrap_err();
                assert!(e.is_timeout(), "{e}");
                assert_eq!((e.get_rank(), e.get_peer()), (Some(Rank::new(0)), Some(Rank::new(1))));
                assert_eq!(e.get_culprit(), Some(Rank::new(1)));
                let text = e.to_string();
                assert!(text.contains("rank 2 (0 in the team), peer 1,"), "{e}");
            }
        }
        outer?.agree(true).map(|_| ())
    })
    .unwrap();
}

/// A fault that ends the meeting for memory speaks of the team's ranks already.
#[test]
fn an_abort_while_memory_is_exchanged_names_the_rank_of_the_team() {
    World::run_threads(3, WorldCfg::for_tests(), |world| {
        let members = [2, 0, 1].map(Rank::new);
        let team = world.team(&members, "turned")?.ok_or_else(|| Error::internal("no member"))?;
        if team.rank().get() == 0 {
            // The first meeting of `heap`; to the second one it does not come.
            team.exchange("heap", b"backend `host`, 4096 bytes, reserve 16384")?;
            std::thread::sleep(Duration::from_millis(50));
            team.abort("enough");
            return Ok(());
        }
        let e = team.heap(BackendKind::Host, HeapCfg::new(4096)).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        assert_eq!((e.get_rank(), e.get_peer()), (Some(team.rank()), Some(Rank::new(0))), "{e}");
        Ok(())
    })
    .unwrap();
}

/// After a failed try a heap can grow by less.
#[test]
fn growth_that_failed_can_be_smaller_next_time() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("grow")?;
        let cfg = HeapCfg { reserve_bytes: Some(1 << 20), ..HeapCfg::new(4096) };
        let heap = team.heap(BackendKind::Host, cfg)?;
        let len = if world.rank().get() == 0 { 128 * KIB } else { 120 * KIB };
        assert!(heap.grow(len).unwrap_err().is_mismatch());
        heap.grow(64 * KIB)?;
        assert_eq!(heap.usage().1, 64 * KIB);
        let e = team.heap(BackendKind::Host, HeapCfg::new(usize::MAX)).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Exhausted, "{e}");
        Ok(())
    })
    .unwrap();
}

/// Buffers of no bytes may be dropped unevenly.
#[test]
fn empty_buffers_do_not_upset_the_digest() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("empty")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(4096))?;
        let (a, b) = (heap.alloc(0, "a")?, heap.alloc(0, "b")?);
        drop(a);
        let keep = (world.rank().get() == 0).then_some(b);
        heap.collect()?;
        let digests = team.exchange("digest", heap.digest().as_bytes())?;
        assert_eq!(digests[0], digests[1]);
        drop(keep);
        team.agree(true).map(|_| ())
    })
    .unwrap();
}
