//! The effect on the loss curve of one choice of experts that turns over.
//!
//! Ranks round differently, so now and then a token whose last chosen expert and first left out are
//! as good as tied goes elsewhere than on one rank. That may not matter: the curve of N ranks is
//! that of one within 1e-3.

use tilewire_core::{Result, Rng};
use tilewire_symm::{World, WorldCfg};

use crate::activations::Saved;
use crate::{AdamW, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer};

const STEPS: usize = 40;
const K: usize = 2;
const CFG: ModelCfg = ModelCfg {
    layers: 2,
    d_model: 64,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    experts: 8,
    top_k: K,
    d_ff: 64,
    seq: 64,
    batch: 16,
    no_attention: false,
    no_experts: false,
};

/// Gives the row whose last chosen expert is closest to the first that is left out that one
/// instead: what another rounding does.
pub(crate) fn turn_over(s: &Saved) -> Result<()> {
    let ranked = |row: &[f32]| {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        order
    };
    let probs = s.probs.to_f32()?;
    let margin = |row: &[f32]| {
        let order = ranked(row);
        row[order[K - 1]] / row[order[K]]
    };
    let margins = probs.chunks_exact(CFG.experts).map(margin).enumerate();
    let at = margins.min_by(|a, b| a.1.total_cmp(&b.1)).expect("a row").0;
    let row = &probs[at * CFG.experts..][..CFG.experts];
    let mut order = ranked(row);
    order.swap(K - 1, K);
    s.stats.write(|b| {
        let counts: &mut [f32] = bytemuck::cast_slice_mut(b);
        counts[order[K]] -= 1.0;
        counts[order[K - 1]] += 1.0;
    })?;
    let sum: f32 = order[..K].iter().map(|&e| row[e]).sum();
    for (j, &e) in order[..K].iter().enumerate() {
        let at = at * K + j;
        s.topk.write(|b| bytemuck::cast_slice_mut::<_, i64>(b)[at] = e as i64)?;
        s.weights.write(|b| bytemuck::cast_slice_mut::<_, f32>(b)[at] = row[e] / sum)?;
    }
    Ok(())
}

/// Words at random: enough to learn for as long as the test lasts, with frequent and rare bytes.
fn text() -> Data {
    let mut rng = Rng::new(5);
    let words: Vec<Vec<u8>> = (0..400)
        .map(|_| {
            let len = 2 + rng.below(7);
            (0..len).map(|_| b'!' + (rng.below(9) * rng.below(11)) as u8).collect()
        })
        .collect();
    let pick = |rng: &mut Rng| words[(rng.below(20) * rng.below(20)) as usize].clone();
    Data::Text((0..6000).flat_map(|_| [pick(&mut rng), b" ".to_vec()].concat()).collect())
}

/// Losses of a run in which `flip` (step, layer) turns the closest choice over.
fn losses(flip: Option<(usize, usize)>) -> Result<Vec<f64>> {
    let mut out = World::run_threads(1, WorldCfg::default(), |world| {
        let grid = Grid { dp: 1, cp: 1, tp: 1 };
        let model = Model::new(&world, (CFG, grid), Target::default(), 1, None)?;
        let mut t = Trainer::new(model, TrainCfg { seed: 1, optim: AdamW::default() });
        let data = text();
        (0..STEPS)
            .map(|step| {
                t.model.flip = flip.filter(|f| f.0 == step).map(|f| f.1);
                t.step(&data).map(|r| r.loss)
            })
            .collect()
    })?;
    Ok(out.swap_remove(0))
}

/// With a rate of 3e-3 and first logits of spread 1 the worst was 1.0e-3; it is 7.5e-5 with the
/// defaults.
#[test]
fn one_choice_that_turns_over_does_not_move_the_curve() {
    let whole = losses(None).unwrap();
    for flip in [(6, 1), (15, 1)] {
        let other = losses(Some(flip)).unwrap();
        let far = other.iter().zip(&whole).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        assert!(far > 0.0, "(step, layer) {flip:?}: nothing has turned over");
        assert!(far < 3e-4, "(step, layer) {flip:?}: the loss moves by {far:.1e}");
    }
}
