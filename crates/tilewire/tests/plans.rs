//! Plans that are made on a miss: alike on all ranks, within bounds, never silently.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::plans::{Plans, Recipe};
use tilewire::prelude::*;

type Key = (usize, usize);

/// `ag_gemm` of `m` rows with rows of `k` elements, and 4 columns.
fn plan(plans: &Plans<Key>, stream: &Stream, (m, k): Key) -> Result<Arc<AgGemmPlan>> {
    let desc = AgGemmDesc::new(m, 4, k, DType::F32);
    plans.get(&(m, k), stream, || Recipe {
        op: "ag_gemm",
        len_bytes: AgGemmPlan::memory(&desc),
        make: |heap: &Heap| AgGemmPlan::new(desc.clone(), heap, None),
        prepare: AgGemmPlan::prepare,
    })
}

fn launch(plan: &Arc<AgGemmPlan>, stream: &Stream, (m, k): Key, size: usize) -> Result<Vec<f32>> {
    let ones = |rows| Tensor::from_slice(&vec![1.0f32; rows * k], Shape::d2(rows, k));
    let out = Tensor::poisoned(DType::F32, Shape::d2(m, 4));
    let inputs = AgGemmInputs::new(ones(m / size)?, ones(4)?, out);
    plan.launch(stream, m, inputs)?.wait()?.out.to_vec::<f32>()
}

fn plans_of(team: &LiveTeam, len: usize, limit: usize) -> Result<Plans<Key>> {
    let cfg = HeapCfg { reserve_bytes: Some(limit), ..HeapCfg::new(len) };
    Ok(Plans::new(&team.heap(BackendKind::Host, cfg)?, limit))
}

#[test]
fn plans_are_kept_and_the_least_recently_prepared_goes_first() {
    World::run_threads(3, WorldCfg::for_tests(), |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 4096, 64 << 10)?;
        let s = Stream::new("s")?;
        // Each takes 12 KiB of a heap that begins with 4 and may grow to 64.
        let keys: Vec<Key> = (0..8).map(|i| (24, 128 + i)).collect();
        for &key in &keys {
            let p = plan(&plans, &s, key)?;
            let y = launch(&p, &s, key, 3)?;
            assert!(y.iter().all(|&v| v == key.1 as f32), "{key:?}");
            // A hit meets nobody, and is the same plan.
            assert!(Arc::ptr_eq(&p, &plan(&plans, &s, key)?));
        }
        let there: Vec<bool> = keys.iter().map(|k| plans.contains(k)).collect();
        assert_eq!(there, [false, false, false, false, true, true, true, true]);
        let u = plans.usage();
        assert_eq!((u.plans, u.misses, u.total_bytes), (4, 8, 64 << 10));
        // One that went is made anew.
        let y = launch(&plan(&plans, &s, keys[0])?, &s, keys[0], 3)?;
        assert!(y.iter().all(|&v| v == 128.0) && !plans.contains(&keys[4]));
        // One that never fits is an error, and the team goes on.
        let e = plan(&plans, &s, (300, 128)).err().unwrap();
        assert!(e.kind() == ErrorKind::Exhausted && e.get_hint().is_some(), "{e}");
        launch(&plan(&plans, &s, keys[0])?, &s, keys[0], 3).map(drop)
    })
    .unwrap();
}

/// Signals run out long before memory does: a team has 4096 slots, two for each of these plans.
#[test]
fn more_plans_than_there_are_signals_for() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 16 << 20, 16 << 20)?;
        let s = Stream::new("s")?;
        for k in 1..2100 {
            plan(&plans, &s, (2, k))?;
        }
        assert!(!plans.contains(&(2, 1)) && plans.usage().plans <= 2048);
        let y = launch(&plan(&plans, &s, (2, 2099))?, &s, (2, 2099), 2)?;
        assert!(y.iter().all(|&v| v == 2099.0));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_does_something_else_is_named_within_seconds() {
    let cfg = WorldCfg { timeout: Duration::from_secs(600), ..WorldCfg::for_tests() };
    World::run_threads(2, cfg, |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 1 << 20, 1 << 20)?;
        let s = Stream::new("s")?;
        let first = plan(&plans, &s, (4, 8))?;
        let start = Instant::now();
        // One rank has this plan, the other one asks for another.
        let e = match team.rank().get() {
            0 => launch(&first, &s, (4, 8), 2).err().unwrap(),
            _ => plan(&plans, &s, (8, 8)).err().unwrap(),
        };
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let word = format!("{e}");
        assert!(e.is_mismatch() && word.contains("is made") && word.contains("launch"), "{e}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn nothing_is_made_during_a_capture() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 1 << 20, 1 << 20)?;
        let s = Stream::new("s")?;
        s.begin_capture()?;
        let e = plan(&plans, &s, (4, 8)).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::NotPrepared, "{e}");
        s.end_capture()?;
        plan(&plans, &s, (4, 8)).map(drop)
    })
    .unwrap();
}

#[test]
fn buffers_take_the_place_of_older_plans() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 4096, 64 << 10)?;
        let s = Stream::new("s")?;
        plan(&plans, &s, (24, 128))?;
        let (first, signals) = plans.alloc("buffer", 40 << 10, 2)?;
        assert_eq!((first.len_bytes(), signals.len()), (40 << 10, 2));
        assert!(plans.contains(&(24, 128)) && plans.usage().misses == 2);
        // It fits without the plan only.
        let (second, _) = plans.alloc("buffer", 12 << 10, 1)?;
        assert!(!plans.contains(&(24, 128)) && first.offset() != second.offset());
        let e = plans.alloc("buffer", 12 << 10, 1).err().unwrap();
        assert!(e.kind() == ErrorKind::Exhausted, "{e}");
        // What is dropped on all ranks comes back.
        drop(first);
        plans.alloc("buffer", 40 << 10, 1).map(drop)
    })
    .unwrap();
}

#[test]
fn buffers_of_other_sizes_are_a_mismatch() {
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let team = world.everyone("t")?;
        let plans = plans_of(&team, 1 << 20, 1 << 20)?;
        let e = plans.alloc("buffer", 100 + team.rank().idx(), 1).err().unwrap();
        assert!(e.is_mismatch() && format!("{e}").contains("101 bytes"), "{e}");
        Ok(())
    })
    .unwrap();
}
