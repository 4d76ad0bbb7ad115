//! `bench/links.cu` and `bench/links_bulk.cu`: every byte goes where it should, once, and nothing
//! beside it is touched.

use tilewire_core::Rng;
use tilewire_kernels::abi::TwBulk;
use tilewire_kernels::{LINK_STAGES, LINKS, LINKS_BULK, Source};

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    loads_and_stores_move_every_word,
    bulk_copies_go_to_peers_in_turn,
    pings_are_answered,
    a_delay_ends_in_time,
    mutants_of_the_links_are_killed,
];

const CHUNK: usize = 64;

fn load(text: String) -> &'static Lib {
    load_of(&LINKS, text)
}

fn load_bulk(text: String) -> &'static Lib {
    load_of(&LINKS_BULK, text)
}

fn load_of(source: &Source, text: String) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: source.name,
        text,
        defines: Vec::new(),
        kernels: source.kernels.to_vec(),
        smem: LINK_STAGES as usize * CHUNK,
    })
}

fn filled(name: &str, len: usize, seed: u64) -> (Memory, Vec<u8>) {
    let rng = Rng::new(seed);
    let bytes: Vec<u8> = (0..len as u64).map(|i| rng.at(i) as u8).collect();
    let m = Memory::new(name, ANY, len.max(1));
    m.write(&bytes);
    (m, bytes)
}

const GUARD: u8 = 0xa5;

/// Memory of guard bytes.
fn guarded(name: &str, len: usize) -> Memory {
    let m = Memory::new(name, ANY, len);
    m.write(&vec![GUARD; len]);
    m
}

fn move_words(lib: &'static Lib) {
    for (name, words, blocks) in [
        ("tw_link_store", 1, 1),
        ("tw_link_store", 1000, 3),
        ("tw_link_load", 0, 1),
        ("tw_link_load", 127, 1),
        ("tw_link_load", 128, 1),
        ("tw_link_load", 1000, 3),
    ] {
        let (src, bytes) = filled("src", words * 16, words as u64);
        let dst = guarded("dst", words * 16 + 16);
        let (to, from, n) = (dst.addr(), src.addr(), words as u64);
        let kernel = lib.kernel(name);
        let launch = kernel.grid([blocks, 1, 1], [32, 1, 1]);
        let launch = launch.arg(&to).arg(&from).arg(&n);
        Run::new(1).memory([&src, &dst]).stream(0, vec![launch]).go().unwrap();
        let got = dst.read::<u8>();
        assert!(got[..words * 16] == bytes[..], "{name}, {words} words");
        assert!(got[words * 16..].iter().all(|b| *b == GUARD), "{name}, {words} words: too far");
    }
}

fn loads_and_stores_move_every_word() {
    move_words(load(LINKS.emu_text()));
}

/// Ranks, my rank, peers in turn (0: straight to `dst`), chunks, blocks.
fn bulk(
    lib: &'static Lib,
    seed: u64,
    (size, me, num, chunks, blocks): (usize, usize, usize, usize, u32),
) {
    let len = chunks * CHUNK;
    let (src, bytes) = filled("src", len, 7);
    let stride = len + 48;
    let dst = guarded("dst", size * stride);
    let param = TwBulk {
        dst: dst.addr(),
        stride: stride as u64,
        src: src.addr(),
        // The end that is no whole chunk is left out.
        bytes: (len + CHUNK / 2) as u64,
        chunk: CHUNK as u32,
        me: me as u32,
        size: size as u32,
        num: num as u32,
    };
    let smem = LINK_STAGES * CHUNK as u32;
    let kernel = lib.kernel("tw_link_bulk");
    let launch = kernel.grid([blocks, 1, 1], [32, 1, 1]).smem(smem).arg(&param);
    Run::new(seed).memory([&src, &dst]).stream(0, vec![launch]).go().unwrap();
    let mut want = vec![GUARD; size * stride];
    for c in 0..chunks {
        let rank = if num == 0 { 0 } else { (me + 1 + c % num) % size };
        let (from, to) = (c * CHUNK, rank * stride + c * CHUNK);
        want[to..to + CHUNK].copy_from_slice(&bytes[from..from + CHUNK]);
    }
    assert!(
        dst.read::<u8>() == want,
        "{size} ranks, {num} peers, {chunks} chunks, {blocks} blocks"
    );
}

fn bulk_cases(lib: &'static Lib) {
    for seed in 1..4 {
        for case in [
            (2, 0, 1, 1, 1),
            (2, 1, 1, 40, 3),
            (4, 2, 3, 50, 2),
            (8, 7, 7, 33, 5),
            (3, 0, 0, 20, 1),
            (2, 0, 1, 3, 8),
        ] {
            bulk(lib, seed, case);
        }
    }
}

fn bulk_copies_go_to_peers_in_turn() {
    bulk_cases(load_bulk(LINKS_BULK.emu_text()));
}

/// What both kernels tell of `n` pings, of which the second rank answers all or none.
fn ping(lib: &'static Lib, n: u64, answered: bool) -> [u64; 2] {
    let (flags, out) = (Memory::new("flags", ANY, 16), Memory::new("out", ANY, 16));
    out.write(&[1u64; 2]);
    let at = |rank: u64| (flags.addr() + 8 * rank, out.addr() + 8 * rank);
    let args = |rank: u64| (at(rank).0, at(1 - rank).0, at(rank).1, u32::from(rank == 0));
    let all = [args(0), args(1)];
    let kernel = lib.kernel("tw_link_ping");
    let launch = |rank: usize| {
        let (mine, peer, out, first) = &all[rank];
        vec![kernel.launch(1).arg(mine).arg(peer).arg(out).arg(&n).arg(first)]
    };
    let mut run = Run::new(1).memory([&flags, &out]).stream(0, launch(0));
    if answered {
        run = run.stream(1, launch(1));
    } else {
        run.tick_ns = 1_000_000;
    }
    run.go().unwrap();
    [out.get(0, 0), out.get(0, 8)]
}

fn pings(lib: &'static Lib) {
    assert!(ping(lib, 20, true).iter().all(|ns| *ns > 1), "answered");
    assert_eq!(ping(lib, 20, false)[0], 0, "given up");
}

fn pings_are_answered() {
    pings(load(LINKS.emu_text()));
}

fn delay(lib: &'static Lib) {
    let out = Memory::new("out", ANY, 8);
    let kernel = lib.kernel("tw_link_delay");
    let launch = kernel.launch(1).arg(&out.addr()).arg(&5000u64);
    Run::new(1).memory([&out]).stream(0, vec![launch]).go().unwrap();
    let ns = out.get(0, 0);
    assert!((5000..10_000).contains(&ns), "{ns} ns");
}

fn a_delay_ends_in_time() {
    delay(load(LINKS.emu_text()));
}

fn mutants_of_the_links_are_killed() {
    all_are_killed(
        &LINKS.emu_text(),
        load,
        ("bench/links", "links"),
        scenarios![delay, move_words, pings],
    );
    all_are_killed(
        &LINKS_BULK.emu_text(),
        load_bulk,
        ("bench/links_bulk", "links"),
        scenarios![bulk_cases],
    );
}
