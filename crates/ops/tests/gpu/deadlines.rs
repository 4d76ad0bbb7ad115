//! Deadlines on devices: the rank that an error blames is the one that has made the fewest calls,
//! whichever rank the device has waited for.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, ErrorKind, Rank};
use tilewire_device::Stream;
use tilewire_symm::{DeviceTransport, Fingerprint, HeapCfg, Transport, World, WorldCfg};

use crate::DEVICES;
use crate::team_ops::ranks;

/// Calls of ranks 0, 1 and 2; the rank that the device of rank 0 waits for; who is to blame, and
/// the text about it.
const CASES: [([usize; 3], u32, u32, &str); 5] = [
    ([4, 4, 3], 1, 2, "rank 2 has made 3 calls of 4 of team late; rank 1 is alive"),
    ([4, 3, 2], 1, 2, "rank 2 has made 2 calls of 4 of team late; rank 1 is alive"),
    ([4, 3, 4], 1, 1, "rank 1 is alive but did not signal: it has made 3 calls of 4 of team late"),
    ([4, 4, 4], 1, 1, "rank 1 is alive but did not signal"),
    // Whoever has made more calls than rank 0 holds nobody up.
    ([3, 4, 4], 2, 2, "rank 2 is alive but did not signal"),
];

#[test]
fn the_rank_with_the_fewest_calls_is_to_blame() {
    if ranks().is_none() {
        return;
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_millis(700), ..WorldCfg::default() };
    World::run_threads(3, cfg, |world| {
        for (calls, peer, culprit, text) in CASES {
            let heap = world.everyone("late")?.heap(BackendKind::Vmm, HeapCfg::new(4 << 20))?;
            let (team, net) = (heap.team().clone(), DeviceTransport::new(&heap)?);
            let stream = Stream::on(net.here().context())?;
            let sig = team.signals(1, "late")?;
            let me = team.rank();
            let fp = Fingerprint::new("op", "m=1");
            (0..calls[me.idx()]).try_for_each(|_| team.launch_begin(&fp).map(drop))?;
            team.agree(true)?;
            let start = Instant::now();
            if me.get() == 0 {
                net.wait(stream.cuda()?, Rank::new(peer), sig.slot(0), 1, "wait")?;
                stream.synchronize()?;
            }
            let e = loop {
                match team.check() {
                    Ok(()) if start.elapsed() < Duration::from_secs(6) => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    r => break r.expect_err("the wait has no end"),
                }
            };
            assert_eq!(e.get_culprit(), Some(Rank::new(culprit)), "{calls:?}: {e}");
            if me.get() == 0 {
                assert!(e.is_timeout() && e.get_peer() == Some(Rank::new(peer)), "{calls:?}: {e}");
                assert!(e.message().starts_with(text), "{calls:?}: {e}");
                let silent = e.message().ends_with("did not signal");
                assert_eq!(silent, !text.contains("signal: "), "{calls:?}: {e}");
            } else {
                // The others learn of it by the abort, which names the same rank.
                assert_eq!(e.kind(), ErrorKind::Aborted, "{calls:?}: {e}");
            }
        }
        Ok(())
    })
    .unwrap();
}
