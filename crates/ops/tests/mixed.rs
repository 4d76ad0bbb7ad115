//! Several ranks in each of several processes: each rank is a thread with a mesh of its own.
//!
//! The test starts this very binary again with `--exact child_role`; `MIXED_TEST_FIRST` says which
//! ranks the child is.

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tilewire_boot::{LinkMesh, Mesh, Secret, StoreAddr, StoreClient, StoreServer};
use tilewire_core::{BackendKind, DType, Deadline, Rank, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::Shards;
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_symm::{HeapCfg, World, WorldCfg};

const PROCESSES: usize = 2;
const RANKS_OF_EACH: usize = 2;
const SIZE: usize = PROCESSES * RANKS_OF_EACH;
const ROWS: usize = 4 * SIZE;
const COLS: usize = 300;

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Element `i` of the tensor of all ranks, as rank `of` has it.
fn number(i: usize, of: usize) -> f32 {
    (i % 97 + 100 * of) as f32
}

fn rank(me: usize) -> Result<()> {
    let secret = Secret::from_hex(&var("MIXED_TEST_SECRET"))?;
    let (addr, limit) = (StoreAddr::Abstract(var("MIXED_TEST_STORE")), Deadline::after_s(20.0));
    let store = StoreClient::connect(&addr, &secret, limit)?;
    let mesh = LinkMesh::connect(&store, "mixed", Rank::new(me as u32), SIZE, &secret, limit)?;
    let world = World::join(mesh.clone() as Arc<dyn Mesh>, WorldCfg::for_tests());
    collectives(&world, me)?;
    drop(world);
    mesh.leave();
    Ok(())
}

fn collectives(world: &World, me: usize) -> Result<()> {
    let team = world.everyone("all")?;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
    let stream = Stream::new("s")?;
    let plan = |kind| -> Result<CollectivePlan> {
        let desc = CollectiveDesc { kind, m: ROWS, cols: COLS, dtype: DType::F32 };
        let plan = CollectivePlan::new(desc, &heap)?;
        plan.prepare(&stream).map(|()| plan)
    };
    let tensor = |rows: std::ops::Range<usize>, of: usize| {
        let x: Vec<f32> = (rows.start * COLS..rows.end * COLS).map(|i| number(i, of)).collect();
        Tensor::from_f32(&x, DType::F32, Shape::d2(rows.len(), COLS))
    };
    let own = ROWS / SIZE;
    let gather = plan(CollectiveKind::AllGather(Shards::Even))?;
    let add = plan(CollectiveKind::AllReduce(ReduceOp::Sum))?;
    for _ in 0..3 {
        let out = Tensor::poisoned(DType::F32, Shape::d2(ROWS, COLS));
        let x = tensor(me * own..(me + 1) * own, me)?;
        let got = gather.launch(&stream, ROWS, &x, &out)?.wait()?.to_f32()?;
        let want = (0..ROWS * COLS).map(|i| number(i, i / (own * COLS)));
        assert!(got.into_iter().eq(want), "all_gather on rank {me}");
        let out = Tensor::poisoned(DType::F32, Shape::d2(ROWS, COLS));
        let got = add.launch(&stream, ROWS, &tensor(0..ROWS, me)?, &out)?.wait()?.to_f32()?;
        let want = (0..ROWS * COLS).map(|i| (0..SIZE).map(|r| number(i, r)).sum::<f32>());
        assert!(got.into_iter().eq(want), "all_reduce on rank {me}");
    }
    assert!(team.agree(true)?);
    Ok(())
}

#[test]
#[ignore = "run by the tests below"]
fn child_role() {
    let first: usize = var("MIXED_TEST_FIRST").parse().unwrap();
    std::thread::scope(|s| {
        let ranks: Vec<_> =
            (first..first + RANKS_OF_EACH).map(|r| s.spawn(move || rank(r))).collect();
        for (i, r) in ranks.into_iter().enumerate() {
            r.join().unwrap().unwrap_or_else(|e| panic!("rank {}: {e}", first + i));
        }
    });
}

/// Whether a child of ours ended well; it is killed when it takes too long.
fn ended_well(child: &mut Child) -> bool {
    let start = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status.success(),
            None if start.elapsed() > Duration::from_secs(40) => {
                child.kill().unwrap();
                child.wait().unwrap();
                return false;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn two_processes_of_two_ranks_do_collectives() {
    let secret = Secret::random().unwrap();
    let name = format!("tilewire-test-{}", &Secret::random().unwrap().reveal()[..16]);
    let _server = StoreServer::bind(&StoreAddr::Abstract(name.clone()), &secret).unwrap();
    let start = |p: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["child_role", "--exact", "--ignored", "--nocapture"])
            .env("MIXED_TEST_FIRST", (p * RANKS_OF_EACH).to_string())
            .env("MIXED_TEST_STORE", &name)
            .env("MIXED_TEST_SECRET", secret.reveal())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..PROCESSES).map(start).collect();
    let ends: Vec<bool> = children.iter_mut().map(ended_well).collect();
    assert_eq!(ends, [true; PROCESSES]);
}
