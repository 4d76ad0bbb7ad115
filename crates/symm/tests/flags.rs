//! Flags in the heap: one that is lost, stale or stored before its data is noticed; one that is
//! stored twice changes nothing.

use std::time::Duration;

use tilewire_core::*;
use tilewire_symm::*;

const LAUNCHES: u64 = 3;

/// What rank 1 has read in each launch, if `action` meets the steps of rank 0 in the second one.
fn launches(action: HookAction) -> Result<Vec<Vec<u64>>> {
    let cfg = WorldCfg { timeout: Duration::from_millis(300), ..WorldCfg::for_tests() };
    World::run_threads(2, cfg, move |world| {
        let team = world.everyone("flags")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(4096))?;
        let (data, flags, counts) =
            (heap.alloc(8, "data")?, heap.alloc(16, "flags")?, heap.alloc(48, "counts")?);
        let kind = match action {
            HookAction::AfterSignal => StepKind::Put,
            _ => StepKind::Flag,
        };
        if team.rank().get() == 0 {
            team.set_hook(move |h| {
                let hit = h.kind == kind && ["data 2", "counts 2"].contains(&h.phase);
                if hit { action } else { HookAction::Proceed }
            });
        }
        let (zero, one) = (Rank::new(0), Rank::new(1));
        let mut got = Vec::new();
        for launch in 1..=LAUNCHES {
            let (ctx, net) = (OpCtx::new(&heap, "probe", launch), heap.host_transport()?);
            let turn = 24 * (launch as usize % 2);
            let at = |name: &str| format!("{name} {launch}");
            if team.rank() == zero {
                net.wait_flags(&ctx, (one, flags.range(0, 8)), launch - 1, &mut [0], "left")?;
                // SAFETY: rank 1 has left the launch before.
                let permit = unsafe { Permit::assume(2) };
                let bytes = (100 + launch).to_ne_bytes();
                net.put(&ctx, &permit, (one, data.range(0, 8)), &bytes, &at("data"))?;
                net.store_flag(&ctx, (one, flags.range(8, 8)), launch, &at("data"))?;
                let words = [7, 8, 9].map(|n| launch << 32 | n);
                net.put_flags(&ctx, (one, counts.range(turn, 24)), &words, &at("counts"))?;
                continue;
            }
            net.wait_flags(&ctx, (zero, flags.range(8, 8)), launch, &mut [0], "arrival")?;
            let mut word = [0; 8];
            // SAFETY: rank 0 has stored its flag, unless a hook made it put late: that race is what
            // is looked for.
            unsafe { ctx.read_local(data.range(0, 8), &mut word) };
            net.store_flag(&ctx, (zero, flags.range(0, 8)), launch, "left")?;
            let mut words = [0; 3];
            let from = (zero, counts.range(turn, 24));
            net.wait_flags(&ctx, from, launch << 32, &mut words, "counts")?;
            got.extend([u64::from_ne_bytes(word), words[0], words[1], words[2]]);
        }
        team.agree(true)?;
        let moved = &team.traffic()[1 - team.rank().idx()];
        let want = if team.rank() == zero { (6, 3 * 32, 6) } else { (0, 0, 3) };
        assert_eq!((moved.puts, moved.put_bytes, moved.signals), want);
        Ok(got)
    })
}

#[test]
fn a_flag_that_is_lost_stale_or_early_is_noticed_and_a_doubled_one_is_not() {
    let good = launches(HookAction::Proceed).unwrap();
    let want = |n: u64| [100 + n, n << 32 | 7, n << 32 | 8, n << 32 | 9];
    assert_eq!(good[1], (1..=LAUNCHES).flat_map(want).collect::<Vec<_>>());
    assert_eq!(launches(HookAction::Twice).unwrap(), good);
    for action in [HookAction::Skip, HookAction::Stale] {
        let e = launches(action).unwrap_err();
        assert!(e.is_timeout() || e.kind() == ErrorKind::Aborted, "{action:?}: {e}");
    }
    assert_ne!(launches(HookAction::AfterSignal).ok(), Some(good));
}
