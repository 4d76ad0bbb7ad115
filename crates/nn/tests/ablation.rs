//! A trained model needs its parts.

use tilewire_core::Result;
use tilewire_nn::checkpoint::resume;
use tilewire_nn::{AdamW, Checkpoints, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer};
use tilewire_symm::{World, WorldCfg};

/// Parts are ablated in the trained model. One that is *trained* without experts learns to copy
/// with attention alone, because copying is linear in the embedding; so the experts' share is shown
/// on the weights that were trained with them.
#[test]
fn a_trained_model_cannot_copy_without_its_experts_or_attention() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    // The default model: a tiny one does half of its copying without experts. The rate that learns
    // fastest.
    let trainer = |world: &World| -> Result<Trainer> {
        let grid = Grid { dp: 2, cp: 1, tp: 1 };
        let model = Model::new(world, (ModelCfg::default(), grid), Target::default(), 1, None)?;
        let optim = AdamW { lr: 3e-3, ..AdamW::default() };
        Ok(Trainer::new(model, TrainCfg { seed: 1, optim }))
    };
    World::run_threads(2, WorldCfg::default(), |world| {
        let mut t = trainer(&world)?;
        while t.step < 100 {
            t.step(&Data::Copy)?;
        }
        Checkpoints::open(&t.model.comm.world, &at, 1)?.save(&t, &Data::Copy).map(drop)
    })
    .unwrap();
    // The loss of the next step is that of the restored weights.
    let next = |no_experts, no_attention| {
        let all = World::run_threads(2, WorldCfg::default(), |world| {
            let mut t = trainer(&world)?;
            resume(&mut t, &Data::Copy, &at)?;
            t.model.cfg = ModelCfg { no_experts, no_attention, ..t.model.cfg };
            let loss = t.step(&Data::Copy)?.loss;
            t.model.comm.world.agree(true)?;
            Ok(loss)
        });
        all.unwrap()[0]
    };
    let (whole, no_experts, no_attention) =
        (next(false, false), next(true, false), next(false, true));
    assert!(whole <= 0.5, "{whole} nats");
    // Far above what counts as copied: 2.5 and 5.1 nats when this was written.
    assert!(no_experts > 1.0, "without experts {no_experts} nats, with them {whole}");
    assert!(no_attention > 1.0, "without attention {no_attention} nats");
}
