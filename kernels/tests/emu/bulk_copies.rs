//! Bulk copies of the emulator: they complete late, and each way not to wait for them shows.

use std::sync::LazyLock;

use tilewire_kernels::LINKS_BULK;

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME, Stats};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    bulk_copies_that_are_waited_for_have_come,
    bulk_copies_that_are_not_waited_for_show,
    mistakes_with_bulk_copies_are_reported,
    the_seed_decides_when_bulk_copies_come,
];

/// Of `bulk_probes.cu`: what is right, what gives wrong data for most seeds, and what is reported
/// for all.
const RIGHT: [u32; 4] = [0, 6, 7, 16];
const SHOWS: [u32; 3] = [2, 3, 5];
const FLAG_WHEN_READ: u32 = 4;
const REPORTED: [(u32, &str); 12] = [
    (1, "p_bulk"),
    (8, "ends with a bulk store whose shared memory may not have been read"),
    (9, "ends with a bulk store whose shared memory may not have been read"),
    (10, "ends with a bulk load that nobody has waited for"),
    (11, "a barrier that was not made"),
    (12, "a bulk load to a barrier that no fence has made known"),
    (13, "more arrivals at a barrier than its phase has"),
    (14, "a bulk copy behind an acquire, without fence.proxy.async between"),
    (15, "a bulk copy behind an acquire, without fence.proxy.async between"),
    (17, "no multiple"),
    (18, "bulk.load outside of all buffers"),
    (19, "a bulk copy of shared memory that is not there"),
];

const PIECES: usize = 6;
const WORDS: usize = 16;
const SEEDS: u64 = 24;

static LIB: LazyLock<&'static Lib> = LazyLock::new(|| {
    RUNTIME.load(&Unit {
        name: "bulk_probes.cu",
        text: LINKS_BULK.emu_text() + include_str!("bulk_probes.cu"),
        defines: Vec::new(),
        kernels: vec!["p_bulk", "p_bulk_peer"],
        smem: 128,
    })
});

/// What came, to the place and to the peer that was told. The peer looks only if `told`.
fn copies(wrong: u32, seed: u64, told: bool) -> Result<([Vec<u32>; 2], Stats), String> {
    let len = 4 * PIECES * WORDS;
    let [src, dst, out] = ["src", "dst", "out"].map(|name| Memory::new(name, ANY, len));
    let words = Memory::new("words", ANY, 16);
    src.write(&input());
    dst.write(&vec![0x77u8; len]);
    let (flag, n) = (if told { words.addr() } else { 0 }, PIECES as u32);
    let (k, peer) = (LIB.kernel("p_bulk"), LIB.kernel("p_bulk_peer"));
    let launch = k.launch(32).smem(64).arg(&src.addr()).arg(&dst.addr()).arg(&flag);
    let launch = launch.arg(&(words.addr() + 8)).arg(&n).arg(&wrong);
    let mut run = Run::new(seed).memory([&src, &dst, &out, &words]).stream(0, vec![launch]);
    if told {
        let look = peer.launch(1).arg(&dst.addr()).arg(&words.addr()).arg(&out.addr()).arg(&n);
        run = run.stream(1, vec![look]);
    }
    let stats = run.go()?;
    Ok(([dst.read(), out.read()], stats))
}

fn input() -> Vec<u32> {
    (0..(PIECES * WORDS) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

fn want() -> Vec<u32> {
    input().iter().map(|v| v.wrapping_add(1)).collect()
}

fn bulk_copies_that_are_waited_for_have_come() {
    for seed in 0..SEEDS {
        for wrong in RIGHT {
            assert_eq!(copies(wrong, seed, false).unwrap().0[0], want(), "{wrong}, seed {seed}");
        }
        assert_eq!(copies(RIGHT[0], seed, true).unwrap().0, [want(), want()], "seed {seed}");
    }
}

/// Seeds that give wrong data, at the place or to the peer that was told.
fn wrong_data(wrong: u32, told: bool) -> usize {
    (0..SEEDS)
        .filter(|seed| copies(wrong, *seed, told).unwrap().0[usize::from(told)] != want())
        .count()
}

fn bulk_copies_that_are_not_waited_for_show() {
    for wrong in SHOWS {
        let seeds = wrong_data(wrong, false);
        assert!(seeds > SEEDS as usize / 2, "{wrong}: {seeds} of {SEEDS} seeds");
    }
    let seeds = wrong_data(FLAG_WHEN_READ, true);
    assert!(seeds > SEEDS as usize / 2, "a flag too early: {seeds} of {SEEDS} seeds");
    // The place itself is right in the end.
    assert_eq!(wrong_data(FLAG_WHEN_READ, false), 0);
}

fn mistakes_with_bulk_copies_are_reported() {
    for (wrong, words) in REPORTED {
        for seed in 0..SEEDS {
            let e = copies(wrong, seed, false).err().unwrap_or_default();
            assert!(e.contains(words) && e.contains("p_bulk"), "{wrong}, seed {seed}: {e}");
        }
    }
}

fn the_seed_decides_when_bulk_copies_come() {
    let all: Vec<_> = (0..SEEDS).map(|seed| copies(SHOWS[0], seed, true).unwrap()).collect();
    for (seed, first) in (0..).zip(&all) {
        assert!(*first == copies(SHOWS[0], seed, true).unwrap(), "seed {seed}");
    }
    assert!(all.iter().any(|(got, _)| *got != all[0].0), "seeds differ");
}
