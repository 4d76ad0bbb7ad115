//! The model on GPUs: one against the host, several against one, a graph against queued steps.
//!
//! Where there is no CUDA, each test checks that this is said with a hint, and that it did not run.

use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{CudaContext, device_count};
use tilewire_nn::{AdamW, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer, checkpoint};
use tilewire_symm::{World, WorldCfg};
use tilewire_testing::{Lack, did_not_run};

fn small() -> ModelCfg {
    ModelCfg {
        layers: 2,
        d_model: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        experts: 8,
        top_k: 2,
        d_ff: 96,
        seq: 96,
        batch: 4,
        no_attention: false,
        no_experts: false,
    }
}

fn text() -> Data {
    let line = b"Tiles over wires: what moves is hidden behind what computes. 0123456789\n";
    Data::Text(line.iter().copied().cycle().take(4000).collect())
}

/// Number of GPUs; where there is none, the test did not run.
#[track_caller]
fn gpus() -> usize {
    if let Err(e) = CudaContext::new(0) {
        assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
        did_not_run(Lack::Gpu, e);
        return 0;
    }
    device_count().unwrap() as usize
}

const SOLO: Grid = Grid { dp: 1, cp: 1, tp: 1 };

/// Loss, norm and every gradient of the first step, on rank 0.
fn first_step(target: Target, grid: Grid) -> (f64, f64, Vec<(String, Vec<f32>)>) {
    let out = World::run_threads(grid.size(), WorldCfg::default(), |world| {
        let model = Model::new(&world, (small(), grid), target, 7, None)?;
        let t = Trainer::new(model, TrainCfg { seed: 7, optim: AdamW::default() });
        let batch = t.model.batch(&text(), 7, 0);
        let (losses, norm) = t.model.gradients(&batch)?;
        let mut grads = Vec::new();
        for p in &t.model.params {
            grads.push((p.name.clone(), checkpoint::gather(&t, p, "g")?));
        }
        t.model.comm.world.agree(true)?;
        Ok((losses.loss, norm, grads))
    });
    out.expect("training runs").swap_remove(0)
}

fn rms(v: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = v.fold((0.0, 0usize), |(s, n), x| (s + x * x, n + 1));
    (sum / n as f64).sqrt()
}

/// Gradients in bf16 are those in f32 up to rounding: a product of k terms errs by about 2^-8 of
/// its size, and a step is a chain of some thirty of them; a token with a near tie may go
/// elsewhere.
#[test]
fn gradients_are_those_of_the_host() {
    if gpus() == 0 {
        return;
    }
    let host = first_step(Target::default(), SOLO);
    let gpu = first_step(Target::new(BackendKind::Vmm), SOLO);
    assert!((host.0 - gpu.0).abs() < 5e-3 * host.0, "loss {} for {}", gpu.0, host.0);
    assert!((host.1 - gpu.1).abs() < 3e-2 * host.1, "norm {} for {}", gpu.1, host.1);
    for ((name, want), (_, got)) in host.2.iter().zip(&gpu.2) {
        let error = rms(want.iter().zip(got).map(|(w, g)| f64::from(w - g)));
        let size = rms(want.iter().map(|&w| f64::from(w)));
        assert!(error <= 0.08 * size, "{name}: error {error:e} of {size:e}");
    }
}

fn losses(grid: Grid, use_graph: bool, steps: usize) -> Vec<Vec<f64>> {
    curve(grid, use_graph, steps, |_| AdamW::default().lr)
}

/// Losses of each rank; step `i` is taken at the rate `lr(i)`.
fn curve(grid: Grid, use_graph: bool, steps: usize, lr: fn(usize) -> f64) -> Vec<Vec<f64>> {
    World::run_threads(grid.size(), WorldCfg::default(), |world| {
        let target = Target::new(BackendKind::Vmm);
        let model = Model::new(&world, (small(), grid), target, 7, None)?;
        let optim = AdamW { warmup: 2, ..AdamW::default() };
        let mut t = Trainer::new(model, TrainCfg { seed: 7, optim });
        t.use_graph = use_graph;
        let step = |i: usize| {
            t.cfg.optim.lr = lr(i);
            Ok(t.step(&text())?.loss)
        };
        let out = (0..steps).map(step).collect::<Result<Vec<_>>>()?;
        t.model.comm.world.agree(true)?;
        Ok(out)
    })
    .expect("training runs")
}

fn grids(num: usize) -> Vec<Grid> {
    let all = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2)];
    all.iter().map(|&(dp, cp, tp)| Grid { dp, cp, tp }).filter(|g| g.size() <= num).collect()
}

/// The bits of a replayed step are those of a queued one, also at a rate that changes, and every
/// rank reports one loss.
#[test]
fn a_replayed_step_is_the_queued_step_bit_for_bit() {
    for grid in grids(gpus()) {
        let lr = |i: usize| AdamW::default().lr / (1 + i / 3) as f64;
        let (graph, queued) = (curve(grid, true, 7, lr), curve(grid, false, 7, lr));
        assert_ne!(queued, losses(grid, false, 7), "the rate has no effect");
        assert_eq!(graph, queued, "{grid:?}");
        assert!(queued.iter().all(|l| l == &queued[0]), "{grid:?}: {queued:?}");
    }
}

/// Several GPUs learn what one does, within the rounding of bf16.
#[test]
fn curves_of_n_gpus_are_that_of_one() {
    let num = gpus();
    if num == 0 {
        return;
    }
    let one = losses(SOLO, true, 12).swap_remove(0);
    assert!(one[11] < 0.8 * one[0], "it learns: {one:?}");
    for grid in grids(num) {
        let n = losses(grid, true, 12).swap_remove(0);
        for (step, (a, b)) in n.iter().zip(&one).enumerate() {
            assert!((a - b).abs() <= 2e-2 * b, "{grid:?} step {step}: {a} for {b}");
        }
    }
}

/// Where the last rank leaves a step.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Leaves {
    BeforeIt,
    BehindBackward,
}

/// All that a step changes, to the bit.
fn state(t: &Trainer) -> Result<Vec<Vec<u8>>> {
    let tensors = t.model.params.iter().flat_map(|p| [p.values(), &p.w, &p.m, &p.v]);
    tensors.map(|x| x.read(<[u8]>::to_vec)).collect()
}

fn trainer(world: &World, grid: Grid) -> Result<Trainer> {
    let model = Model::new(world, (small(), grid), Target::new(BackendKind::Vmm), 7, None)?;
    let optim = AdamW { warmup: 2, ..AdamW::default() };
    Ok(Trainer::new(model, TrainCfg { seed: 7, optim }))
}

/// The rank of the world that a wait which ran out of time names.
fn named(t: &Trainer, e: &Error) -> Option<Rank> {
    let teams = t.model.comm.teams();
    let team = teams.iter().find(|t| Some(t.name()) == e.get_team()).expect("a team of this rank");
    e.get_peer().filter(|_| e.is_timeout()).map(|p| team.members()[p.idx()])
}

/// Two steps go well; in the third the last rank is silent. Nobody takes that step, and new teams
/// learn again. One deadline passes, not that of every team of the step.
fn silent_in_training(grid: Grid, leaves: Leaves) {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let cfg = WorldCfg { timeout: TIMEOUT, ..WorldCfg::default() };
    let victim = Rank::new(grid.size() as u32 - 1);
    let named = World::run_threads(grid.size(), cfg, |world| {
        let mut t = trainer(&world, grid)?;
        // Replayed, unless the victim is to stop in the middle.
        t.use_graph = leaves == Leaves::BeforeIt;
        for _ in 0..2 {
            t.step(&text())?;
        }
        let before = state(&t)?;
        t.model.comm.world.agree(true)?;
        let start = Instant::now();
        let e = if world.rank() == victim {
            if leaves == Leaves::BehindBackward {
                let batch = t.model.batch(&text(), 7, t.step);
                t.model.load(&batch)?;
                t.model.queue_forward_backward(batch.num_targets)?;
                t.model.stream().synchronize()?;
            }
            loop {
                let told = t.model.comm.teams().iter().try_for_each(|t| t.check());
                match told {
                    Ok(()) if start.elapsed() < Duration::from_secs(20) => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Ok(()) => break Error::internal("nobody told the silent rank"),
                    Err(e) => break e,
                }
            }
        } else {
            t.step(&text()).expect_err("a step without a rank")
        };
        assert!(e.is_timeout() || e.kind() == ErrorKind::Aborted, "{grid:?} {leaves:?}: {e}");
        let (named, took) = (named(&t, &e), start.elapsed());
        assert!(took < TIMEOUT * 2, "{grid:?} {leaves:?}: {took:?}: {e}");
        t.model.stream().synchronize()?;
        assert!(state(&t)? == before, "{grid:?} {leaves:?}: rank {} took a step", world.rank());
        world.everyone("after")?.agree(true)?;
        let mut again = trainer(&world, grid)?;
        let loss = again.step(&text())?.loss;
        assert!(loss.is_finite() && state(&again)? != before, "{grid:?}: loss {loss}");
        again.model.comm.world.agree(true)?;
        Ok(named)
    })
    .unwrap();
    // Who waits for one that waits for the victim may name that one.
    assert!(named.contains(&Some(victim)), "{grid:?} {leaves:?}: {named:?}");
}

/// In the environment: the grids of so many ranks, of which there may be more than GPUs. Without it
/// those of two.
const RANKS: &str = "TW_GRID_RANKS";

#[track_caller]
fn nobody_takes_the_step(leaves: Leaves) {
    let found = gpus();
    let asked = std::env::var(RANKS).ok().map(|n| n.parse::<usize>().unwrap());
    let num = if found == 0 { 0 } else { asked.unwrap_or(found.min(2)) };
    // Contexts take their time: kept from here on.
    let _contexts =
        (0..num.min(found)).map(|i| CudaContext::new(i as u32).unwrap()).collect::<Vec<_>>();
    let grids: Vec<_> = grids(num).into_iter().filter(|g| g.size() == num && num > 1).collect();
    if grids.is_empty() {
        return did_not_run(Lack::Gpus, format!("no grid of {num} ranks"));
    }
    for grid in grids {
        // What is compiled and loaded is there then: two seconds are for waits.
        losses(grid, true, 2);
        silent_in_training(grid, leaves);
    }
}

#[test]
fn no_step_is_taken_with_a_rank_that_is_silent_before_it() {
    nobody_takes_the_step(Leaves::BeforeIt);
}

#[test]
fn no_step_is_taken_with_a_rank_that_is_silent_behind_its_backward_pass() {
    nobody_takes_the_step(Leaves::BehindBackward);
}
