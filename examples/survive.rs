//! A rank dies in the middle of an operation: the others are told who, at once, and go on as a
//! smaller team on new memory.
//!
//! `cargo run --release --package tilewire --example survive`

use std::io::Write;

use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire::prelude::*;

fn sum(team: &LiveTeam) -> Result<f32> {
    let desc = CollectiveDesc {
        kind: CollectiveKind::AllReduce(ReduceOp::Sum),
        m: 4,
        cols: 1,
        dtype: DType::F32,
    };
    let bytes = CollectivePlan::memory(&desc, team.size()) + 4096;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(bytes))?;
    let (plan, stream) = (CollectivePlan::new(desc, &heap)?, Stream::new("main")?);
    plan.prepare(&stream)?;
    if team.name() == "all" && team.rank().get() == 2 {
        // Leaves without launching: what a crash looks like from outside.
        return Err(Error::invalid("rank 2 gives up"));
    }
    let x = Tensor::from_slice(&[1.0f32; 4], Shape::d2(4, 1))?;
    let out = Tensor::poisoned(DType::F32, Shape::d2(4, 1));
    Ok(plan.launch(&stream, 4, &x, &out)?.wait()?.to_vec::<f32>()?[0])
}

fn main() -> Result<()> {
    let done = World::run_threads(4, WorldCfg::default(), |world| {
        let team = world.everyone("all")?;
        let error = match sum(&team) {
            Err(e) if world.rank().get() == 2 => return Err(e),
            Err(e) => e,
            Ok(v) => return Err(Error::internal(format!("nobody noticed: {v}"))),
        };
        writeln!(std::io::stderr(), "rank {}: {error}", world.rank().get()).ok();
        let rest: Vec<Rank> = Rank::all(4).filter(|r| r.get() != 2).collect();
        let team = world.team(&rest, "rest")?.ok_or_else(|| Error::internal("not a member"))?;
        let v = sum(&team)?;
        assert_eq!(v, 3.0);
        writeln!(std::io::stderr(), "rank {}: the rest adds up to {v}", world.rank().get()).ok();
        Ok(())
    });
    // The one error is rank 2's own.
    assert!(done.is_err_and(|e| e.message() == "rank 2 gives up"));
    Ok(())
}
