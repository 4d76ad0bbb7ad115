//! Whole tensors on one rank, for comparisons; checkpoints never hold one.

use tilewire_core::Result;

use crate::params::{Kind, Param};
use crate::train::Trainer;

/// The part of each parameter's state that a rank contributes.
fn local(p: &Param, which: &str) -> Result<Vec<f32>> {
    match which {
        "g" => p.g.to_f32(),
        "m" => p.m.to_f32(),
        "v" => p.v.to_f32(),
        _ => p.values().to_f32(),
    }
}

/// Collective: the global tensor of a parameter's values (`w`), gradient (`g`) or moments (`m`,
/// `v`), on rank 0 (empty elsewhere).
///
/// # Errors
/// The fault of a team.
pub fn gather(t: &Trainer, p: &Param, which: &str) -> Result<Vec<f32>> {
    let world = &t.model.comm.world;
    let gives = match p.kind {
        Kind::Replicated => world.rank().idx() == 0,
        Kind::Sharded => (t.model.coord.dp, t.model.coord.cp) == (0, 0),
        Kind::Expert => true,
    };
    let mine = if gives { local(p, which)? } else { Vec::new() };
    // Runs first, so that rank 0 knows where each rank's values belong.
    let mut runs = Vec::new();
    if gives {
        p.runs(|local, at, len| runs.extend([local as u64, at as u64, len as u64]));
    }
    let all_runs = world.exchange_large("gather", bytemuck::cast_slice(&runs))?;
    let all = world.exchange_large("gather", bytemuck::cast_slice(&mine))?;
    if world.rank().idx() != 0 {
        return Ok(Vec::new());
    }
    let mut global = vec![f32::NAN; p.global.0 * p.global.1];
    for (values, runs) in all.iter().zip(&all_runs) {
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(values);
        let runs: Vec<u64> = bytemuck::pod_collect_to_vec(runs);
        for r in runs.chunks_exact(3) {
            let (local, at, len) = (r[0] as usize, r[1] as usize, r[2] as usize);
            global[at..at + len].copy_from_slice(&values[local..local + len]);
        }
    }
    Ok(global)
}
