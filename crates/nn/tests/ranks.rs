//! N ranks compute what one rank computes: losses and gradients.

use tilewire_core::Result;
use tilewire_nn::{AdamW, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer, checkpoint};
use tilewire_symm::{World, WorldCfg};

fn small() -> ModelCfg {
    ModelCfg {
        layers: 2,
        d_model: 16,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        experts: 6,
        top_k: 2,
        d_ff: 12,
        seq: 20,
        batch: 4,
        no_attention: false,
        no_experts: false,
    }
}

fn text() -> Data {
    let line = b"Tiles over wires: what moves is hidden behind what computes. 0123456789\n";
    Data::Text(line.iter().copied().cycle().take(4000).collect())
}

fn trainer(world: &World, cfg: ModelCfg, grid: Grid) -> Result<Trainer> {
    let model = Model::new(world, (cfg, grid), Target::default(), 7, None)?;
    let optim = AdamW { warmup: 2, ..AdamW::default() };
    Ok(Trainer::new(model, TrainCfg { seed: 7, optim }))
}

/// Loss, gradient norm and every global gradient of the first step, on rank 0.
type First = (f64, f64, Vec<(String, Vec<f32>)>);

fn first_step(cfg: ModelCfg, grid: Grid) -> First {
    let out = World::run_threads(grid.size(), WorldCfg::default(), |world| {
        let t = trainer(&world, cfg, grid)?;
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

const GRIDS: [Grid; 7] = [
    Grid { dp: 1, cp: 1, tp: 2 },
    Grid { dp: 1, cp: 2, tp: 1 },
    Grid { dp: 2, cp: 1, tp: 1 },
    Grid { dp: 1, cp: 3, tp: 1 },
    Grid { dp: 1, cp: 2, tp: 2 },
    Grid { dp: 4, cp: 1, tp: 1 },
    Grid { dp: 2, cp: 2, tp: 2 },
];

const SOLO: Grid = Grid { dp: 1, cp: 1, tp: 1 };

/// The first step on `grid` is that of one rank.
fn is_that_of_one_rank(cfg: ModelCfg, grid: Grid, (loss, norm, grads): &First) {
    let (l, n, g) = first_step(cfg, grid);
    assert!((l - loss).abs() <= 1e-5 * loss, "{grid:?}: loss {l} for {loss}");
    assert!((n - norm).abs() <= 1e-5 * norm, "{grid:?}: norm {n} for {norm}");
    for ((name, got), (_, want)) in g.iter().zip(grads) {
        let most = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for (i, (a, b)) in got.iter().zip(want).enumerate() {
            assert!((a - b).abs() <= 1e-5 * most, "{grid:?} {name}[{i}]: {a} for {b}");
        }
    }
}

#[test]
fn gradients_of_n_ranks_are_those_of_one() {
    let one = first_step(small(), SOLO);
    assert!(
        one.2.iter().all(|(_, g)| g.iter().any(|v| *v != 0.0)),
        "every parameter has a gradient"
    );
    for grid in GRIDS {
        is_that_of_one_rank(small(), grid, &one);
    }
}

/// Three tokens: some ranks of a tp team have no rows of their own, some cp parts none at all.
#[test]
fn ranks_without_rows_compute_along() {
    let cfg = ModelCfg { seq: 3, batch: 1, ..small() };
    let one = first_step(cfg, SOLO);
    for (cp, tp) in [(2, 2), (4, 1), (4, 2)] {
        is_that_of_one_rank(cfg, Grid { dp: 1, cp, tp }, &one);
    }
}

/// One rank hides nothing; else the share is measured on every grid, and ranks agree on it.
#[test]
fn the_hidden_share_covers_every_way_to_divide() {
    for (dp, cp, tp) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)] {
        let grid = Grid { dp, cp, tp };
        let shares = World::run_threads(grid.size(), WorldCfg::default(), |world| {
            let mut t = trainer(&world, small(), grid)?;
            t.calibrate()?;
            t.model.comm.world.agree(true)?;
            // The calibration leaves the model as it was.
            Ok((t.hidden, t.step(&text())?.loss))
        })
        .unwrap();
        assert!(shares.iter().all(|s| s.0 == shares[0].0), "{grid:?}: {shares:?}");
        match shares[0].0 {
            None => assert_eq!(grid, SOLO),
            Some(h) => assert!(grid != SOLO && h <= 1.0, "{grid:?}: {h}"),
        }
        let loss = first_loss(grid);
        assert_eq!(shares[0].1.to_bits(), loss.to_bits(), "{grid:?}");
    }
}

fn first_loss(grid: Grid) -> f64 {
    let out = World::run_threads(grid.size(), WorldCfg::default(), |world| {
        let loss = trainer(&world, small(), grid)?.step(&text())?.loss;
        Ok((world, loss))
    });
    out.expect("training runs").swap_remove(0).1
}

/// A step is one graph: replayed with other batches it gives the bits of steps that are queued.
#[test]
fn a_replayed_step_is_the_queued_step_bit_for_bit() {
    let grid = Grid { dp: 1, cp: 2, tp: 2 };
    let run = |use_graph| {
        World::run_threads(grid.size(), WorldCfg::default(), |world| {
            let mut t = trainer(&world, small(), grid)?;
            t.use_graph = use_graph;
            let steps = (0..5).map(|_| t.step(&text()).map(|r| r.loss.to_bits()));
            let losses = steps.collect::<Result<Vec<_>>>()?;
            t.model.comm.world.agree(true)?;
            Ok(losses)
        })
        .expect("training runs")
    };
    let (graph, queued) = (run(true), run(false));
    assert_eq!(graph, queued);
    assert!(queued.iter().all(|l| l == &queued[0]), "ranks report one loss: {queued:?}");
}

#[test]
fn a_model_that_does_not_fit_the_grid_is_refused() {
    World::run_threads(4, WorldCfg::default(), |world| {
        let tp4 = Grid { dp: 1, cp: 1, tp: 4 };
        let e = Model::new(&world, (small(), tp4), Target::default(), 1, None)
            .err()
            .expect("tp 4 with 2 kv heads");
        assert!(e.to_string().contains("key/value heads"), "{e}");
        let e = Model::new(
            &world,
            (ModelCfg { batch: 5, ..small() }, Grid { dp: 4, cp: 1, tp: 1 }),
            Target::default(),
            1,
            None,
        );
        assert!(e.err().expect("batch 5 over dp 4").to_string().contains("batch of 5"));
        let e =
            Model::new(&world, (small(), Grid { dp: 1, cp: 1, tp: 2 }), Target::default(), 1, None);
        assert!(e.err().expect("a grid of 2 for 4 ranks").to_string().contains("expected 4"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn experts_are_divided_without_gap() {
    for size in 1..9 {
        let mut next = 0;
        for r in 0..size {
            let e = tilewire_nn::model::experts_of(6, r, size);
            assert_eq!(e.start, next);
            next = e.end;
        }
        assert_eq!(next, 6);
    }
}
