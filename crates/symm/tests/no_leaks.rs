//! A hundred teams and heaps leave nothing behind. Alone in its process, whose descriptors and
//! mappings it counts.

mod cases;

use cases::queued::Queued;

use tilewire_core::Result;
use tilewire_symm::{World, WorldCfg};

use cases::{Host, KIB, setup};

fn no_leaks(world: World) -> Result<()> {
    // Threads share one process, so only one rank looks, while the others are between barriers.
    let count = |dir: &str| std::fs::read_dir(dir).map(|d| d.count()).unwrap_or(0);
    let outer = world.everyone("outer")?;
    let mut first = (0, 0);
    for i in 0..100 {
        let s = setup::<Host>(&world, 16 * KIB)?;
        s.os.barrier(&s.stream, 0)?;
        s.finish()?;
        drop(s);
        if i == 3 || i == 99 {
            outer.agree(true)?;
            // To look takes descriptors, too.
            if world.rank().get() == 0 {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
                let now = (count("/proc/self/fd"), maps.matches("tilewire").count());
                if i == 3 {
                    first = now;
                }
                assert!(now.0 <= first.0 && now.1 <= first.1, "{first:?} -> {now:?}");
            }
            outer.agree(true)?;
        }
    }
    Ok(())
}

#[test]
fn teams_and_heaps_leave_nothing_behind() {
    for n in [1, 2, 3, 5] {
        World::run_threads(n, WorldCfg::for_tests(), no_leaks).unwrap();
    }
}
