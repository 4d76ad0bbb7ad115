//! Memory that checkpoints take beside the model: a test binary of its own, since other tests of
//! the process would count.

use tilewire_nn::checkpoint::resume;
use tilewire_nn::{AdamW, Checkpoints, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer};
use tilewire_symm::{World, WorldCfg};

/// Bytes of the line `name` of /proc/self/status.
fn status(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(name)).expect("the kernel knows it");
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Bytes beyond those before it that the process had in memory at most while `f` ran.
fn grown(f: impl FnOnce()) -> usize {
    // The highest mark begins anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    f();
    status("VmHWM:").saturating_sub(before)
}

#[test]
fn saving_and_loading_take_64_mib_a_rank_beside_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let cfg = ModelCfg {
        layers: 3,
        d_model: 256,
        heads: 4,
        kv_heads: 4,
        head_dim: 64,
        no_experts: true,
        d_ff: 1024,
        seq: 16,
        batch: 1,
        ..ModelCfg::default()
    };
    let all = World::run_threads(1, WorldCfg::default(), |world| {
        let solo = Grid { dp: 1, cp: 1, tp: 1 };
        let model = Model::new(&world, (cfg, solo), Target::default(), 7, None)?;
        let mut t = Trainer::new(model, TrainCfg { seed: 7, optim: AdamW::default() });
        let store = Checkpoints::open(&t.model.comm.world, &at, 1)?;
        let mut bytes = 0;
        let save = grown(|| drop(store.save(&t, &Data::Copy).expect("it is written")));
        let load = grown(|| bytes = resume(&mut t, &Data::Copy, &at).expect("it is whole").bytes);
        // Several times the limit, so that a copy of the whole would show.
        assert!(bytes > 180 << 20, "{bytes} bytes are too few to show anything");
        for (what, grew) in [("saving", save), ("loading", load)] {
            assert!(grew <= 64 << 20, "{what} {bytes} bytes took {grew} more");
        }
        Ok(())
    });
    all.expect("the rank runs");
}
