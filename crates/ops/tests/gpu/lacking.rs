//! A rank that alone has no memory at `prepare`: nobody waits for it, all are told, the team goes
//! on and computes. Each allocation of each `prepare` is refused once, by the preloaded library of
//! the GPU bundle.
#![expect(clippy::print_stdout, reason = "how much was refused must be seen")]

use std::cell::Cell;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::{ErrorKind, Rank, Result};
use tilewire_symm::{World, WorldCfg};

use crate::team_ops::{FAMILIES, Make, by_nccl, by_puts, heap, ranks_watched};
use crate::{DEVICES, all_poison, calls, told};

thread_local! {
    /// How many allocations of the next `prepare` of this thread pass.
    static PASS: Cell<Option<usize>> = const { Cell::new(None) };
    /// Whether one was refused.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// `prepare`, without memory if the test of this module wants it so.
pub fn prepared(prepare: impl FnOnce() -> Result<()>) -> Result<()> {
    let Some(pass) = PASS.take() else { return prepare() };
    let file = calls::file(".memory").unwrap();
    std::fs::write(&file, format!("{pass}\n")).unwrap();
    let done = prepare();
    REFUSED.set(std::fs::read_to_string(&file).unwrap().contains("refused"));
    std::fs::remove_file(&file).unwrap();
    done
}

/// What may come of a refusal, besides the error.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Puts,
    /// What NCCL itself lacks ends the team.
    Nccl,
    /// The same, in a measurement; without room for one, puts are taken.
    Clock,
}

/// One operation of each family, of small tensors.
fn families() -> Vec<(Make, By)> {
    let puts = FAMILIES.map(|i| (by_puts()[i], By::Puts));
    let nccl =
        [0, 9, 10].map(|i| (i, By::Nccl)).into_iter().chain([5, 13, 14].map(|i| (i, By::Clock)));
    let nccl = nccl.filter_map(|(i, by)| Some((*by_nccl().get(i)?, by)));
    puts.into_iter().chain(nccl).collect()
}

#[test]
fn a_rank_without_memory_at_prepare_is_named_and_the_team_goes_on() {
    let Some(n) = ranks_watched() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(10), ..WorldCfg::default() };
    let last = Rank::new(n as u32 - 1);
    let refused = World::run_threads(n, cfg, |world| {
        let mut all = Vec::new();
        for (make, by) in families() {
            let (heap, stream) = heap(&world, "lacking")?;
            // What a library takes for itself, once, is not this rank's lack.
            drop(make(&heap, &stream)?);
            heap.team().agree(true)?;
            let me = heap.team().rank();
            let mut num = 0;
            let name = loop {
                PASS.set((me == last).then_some(num));
                REFUSED.set(false);
                let start = Instant::now();
                let made = make(&heap, &stream);
                // Tensors of an operation are taken behind its `prepare`, but for those of it that
                // failed.
                PASS.set(None);
                // A communicator takes its time.
                let most = if by == By::Puts { 5 } else { 9 };
                assert!(start.elapsed() < Duration::from_secs(most), "waited: {:?}", made.err());
                let Ok(words) = heap.team().exchange("refused", &[u8::from(REFUSED.get())]) else {
                    let e = made.err().or_else(|| heap.team().check().err());
                    assert!(by != By::Puts && num > 0, "allocation {num} ended the team: {e:?}");
                    break if by == By::Nccl { "through NCCL" } else { "by the clock" };
                };
                let some = words[last.idx()] == [1];
                match made {
                    Ok(op) if !some => {
                        op.refill(3 + u64::from(me.get()))?;
                        op.poison()?;
                        heap.team().agree(true)?;
                        told(&op, (op.launch)(&stream))?;
                        stream.synchronize()?;
                        told(&op, heap.team().check())?;
                        assert!(!op.outs.iter().all(all_poison), "{}", op.name);
                        break op.name;
                    }
                    Ok(op) => assert!(by == By::Clock, "{}: allocation {num} was refused", op.name),
                    Err(e) => {
                        assert!(some, "allocation {num}: {e}");
                        assert_eq!(e.kind(), ErrorKind::Exhausted, "allocation {num}: {e}");
                        let peer = (me != last).then_some(last);
                        assert_eq!(e.get_peer(), peer, "allocation {num}: {e}");
                        heap.team().check()?;
                    }
                }
                heap.collect()?;
                num += 1;
                assert!(num < 100, "it does not end");
            };
            all.push((name, num));
        }
        Ok(all)
    })
    .unwrap();
    for (name, num) in &refused[0] {
        println!("{name}: {num} allocations refused, one at a time");
    }
    // Collectives, ep (both layouts) and attention take memory whatever the machine has.
    assert!(refused[0].iter().filter(|(_, num)| *num > 0).count() >= 4, "{refused:?}");
}
