//! Plans that ranks launch in different orders or one, each on a stream of its own, with NCCL on a
//! third: nobody waits for anybody in a circle, and results are those of launches one after the
//! other.

use std::sync::PoisonError;
use std::time::Duration;

use tilewire_core::Result;
use tilewire_device::Stream;
use tilewire_symm::{World, WorldCfg};

use crate::team_ops::{Make, Op, by_nccl, for_orders, heap, ranks};
use crate::{DEVICES, told};

/// Two operations in this order or the other, then a third between them.
fn launch(ops: &[(Op, Stream)], backwards: bool) -> Result<()> {
    let order: &[usize] = if backwards { &[1, 2, 0] } else { &[0, 2, 1] };
    order.iter().filter_map(|i| ops.get(*i)).try_for_each(|(op, s)| told(op, (op.launch)(s)))
}

#[test]
fn opposite_orders_of_launches_go_on() {
    in_orders(true);
}

/// With one connection to the device (`CUDA_DEVICE_MAX_CONNECTIONS=1`) its streams are one queue: a
/// launch there waits for those before it, so that ranks must launch in one order.
#[test]
fn one_order_of_launches_goes_on() {
    in_orders(false);
}

fn in_orders(opposite: bool) {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(10), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        let all = for_orders();
        // A sum through NCCL; communicators take their time.
        let nccl = |i: usize| by_nccl().get(2).filter(|_| i < 2);
        for i in 0..all.len() {
            let two: [Make; 2] = [all[i], all[(i + 1) % all.len()]];
            let makes = two.iter().chain(nccl(i));
            let (heaps, ops): (Vec<_>, Vec<_>) = makes
                .map(|make| {
                    let (heap, stream) = heap(&world, "orders")?;
                    let op = make(&heap, &stream)?;
                    op.refill(3 + i as u64)?;
                    Ok((heap, (op, stream)))
                })
                .collect::<Result<Vec<_>>>()?
                .into_iter()
                .unzip();
            let run = |go: &dyn Fn() -> Result<()>| -> Result<Vec<_>> {
                ops.iter().try_for_each(|(op, _)| op.poison())?;
                heaps[0].team().agree(true)?;
                go()?;
                ops.iter().try_for_each(|(_, s)| s.synchronize())?;
                for ((op, _), heap) in ops.iter().zip(&heaps) {
                    told(op, heap.team().check())?;
                }
                ops.iter().map(|(op, _)| op.bits()).collect()
            };
            let one_by_one = || {
                ops.iter().try_for_each(|(op, s)| {
                    told(op, (op.launch)(s))?;
                    s.synchronize()
                })
            };
            let want = run(&one_by_one)?;
            for round in 0..4 {
                let me = if opposite { world.rank().idx() } else { 0 };
                let backwards = (me + round) % 2 == 1;
                let got = run(&|| (0..3).try_for_each(|_| launch(&ops, backwards)))?;
                let names: Vec<_> = ops.iter().map(|(op, _)| op.name).collect();
                assert!(got == want, "{names:?} round {round}");
            }
        }
        Ok(())
    })
    .unwrap();
}
