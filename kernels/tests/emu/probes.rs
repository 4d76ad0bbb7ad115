//! The emulator itself: what it carries out, and what it finds.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use tilewire_kernels::SIGNAL;

use crate::compile::Unit;
use crate::host::{Kernel, Launch, Lib, RUNTIME, Runtime, Stats};
use crate::memory::{ANY, Memory, Pages};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    threads_know_where_they_stand,
    blocks_keep_their_shared_memory,
    unset_shared_memory_is_poison,
    shuffles_and_votes,
    a_matrix_instruction_gets_all_lanes,
    an_asynchronous_copy_is_there_when_it_was_waited_for,
    atomics_of_all_blocks,
    blocks_and_ranks_that_wait_for_each_other_go_on,
    the_seed_decides_the_order,
    both_kinds_of_fibers_run_alike,
    launches_that_no_device_takes_are_found,
    threads_that_do_not_meet_are_found,
    warps_meet_at_named_barriers,
    memory_that_is_not_there_is_found,
    hangs_are_found,
];

const PROBES: [&str; 26] = [
    "p_index",
    "p_block_sum",
    "p_unset",
    "p_warp",
    "p_lane_gone",
    "p_mma",
    "p_async",
    "p_atomics",
    "p_grid_barrier",
    "p_ping",
    "p_named",
    "p_sync_ended",
    "p_sync_elsewhere",
    "p_warp_elsewhere",
    "p_warp_without_me",
    "p_deadlock",
    "p_store",
    "p_misaligned",
    "p_smem",
    "p_divide",
    "p_stack",
    "p_spin",
    "p_loop",
    "p_fail",
    "tw_signal",
    "tw_wait",
];

static LIB: LazyLock<&'static Lib> = LazyLock::new(|| load(&RUNTIME));

fn load(runtime: &'static Runtime) -> &'static Lib {
    runtime.load(&Unit {
        name: "probes.cu",
        text: SIGNAL.emu_text() + include_str!("probes.cu"),
        defines: SIGNAL.defines.iter().map(|d| (*d, 4096)).collect(),
        kernels: PROBES.to_vec(),
        smem: 16 << 10,
    })
}

fn threads_know_where_they_stand() {
    let out = Memory::new("out", ANY, 4 * 30 * 24);
    let k = LIB.kernel("p_index");
    let launch = k.grid([5, 3, 2], [4, 3, 2]).arg(&out.addr());
    Run::new(1).memory([&out]).stream(0, vec![launch]).go().unwrap();
    let want: Vec<u32> = (0..30u32).flat_map(|b| (0..24).map(move |t| b << 16 | t)).collect();
    assert_eq!(out.read::<u32>(), want);
}

/// Sums of `blocks` blocks, by `workers` OS threads.
fn sums(lib: &'static Lib, blocks: u32, workers: u32, seed: u64) -> Stats {
    let n = 500u32;
    let values: Vec<u32> = (0..blocks * n).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect();
    let (input, out) = (Memory::new("in", ANY, values.len() * 4), Memory::new("out", ANY, 16));
    input.write(&values);
    let k = lib.kernel("p_block_sum");
    let args = k.grid([blocks, 1, 1], [96, 1, 1]).smem(96 * 4);
    // Each warp's first lane holds 32 of the 96 sums.
    let args = args.arg(&input.addr()).arg(&out.addr()).arg(&(out.addr() + 8)).arg(&n);
    let mut run = Run::new(seed).memory([&input, &out]).stream(0, vec![args]);
    (run.workers, run.spread) = (workers, true);
    let stats = run.go().unwrap();
    let want: u64 = values.iter().map(|v| u64::from(*v)).sum();
    assert_eq!((out.get(0, 0), out.get(0, 8)), (want, u64::from(blocks)));
    stats
}

fn blocks_keep_their_shared_memory() {
    for seed in 0..10 {
        sums(*LIB, 40, 1, seed);
        sums(*LIB, 40, 3, seed);
    }
}

fn unset_shared_memory_is_poison() {
    let out = Memory::new("out", ANY, 16);
    let k = LIB.kernel("p_unset");
    // The second block and the second launch find no value of an earlier one either.
    let launch = k.grid([3, 1, 1], [4, 1, 1]).smem(16).arg(&out.addr());
    Run::new(1).memory([&out]).stream(0, vec![launch.clone(), launch]).go().unwrap();
    assert_eq!(out.read::<u32>(), [u32::MAX; 4]);
}

fn shuffles_and_votes() {
    let threads = 48u32;
    let out = Memory::new("out", ANY, 4 * 12 * threads as usize);
    let k = LIB.kernel("p_warp");
    Run::new(3).memory([&out]).stream(0, vec![k.launch(threads).arg(&out.addr())]).go().unwrap();
    let got = out.read::<u32>();
    for t in 0..threads {
        let (lane, first) = (t % 32, t / 32 * 32);
        let exists = |l: u32| first + l < threads;
        let half: Vec<u32> =
            (0..32).filter(|l| l / 16 == lane / 16 && exists(*l)).map(|l| first + l).collect();
        // A lane that is not there gives poison.
        let read = |l: u32| if exists(l) { first + l } else { u32::MAX };
        let want = [
            first + 3,
            if lane < 2 { t } else { t - 2 },
            if lane % 8 + 5 < 8 { read(lane + 5) } else { t },
            read(lane ^ 9),
            half.iter().filter(|u| *u % 3 == 0).map(|u| 1 << (u % 32)).sum(),
            if half.contains(&20) { 0b10 } else { 0b01 },
            half.iter().sum(),
            threads / 2,
            0b10,
            0b01,
            t.count_ones() << 8
                | (if t == 0 { 0 } else { t.trailing_zeros() + 1 }) << 4
                | (t.leading_zeros() & 15),
            (t as f32).max(2.5).to_bits(),
        ];
        assert_eq!(got[12 * t as usize..][..12], want, "thread {t}");
    }
    let gone = Memory::new("gone", ANY, 4 * 32);
    let k = LIB.kernel("p_lane_gone");
    Run::new(3).memory([&gone]).stream(0, vec![k.launch(32).arg(&gone.addr())]).go().unwrap();
    let want: Vec<u32> = (0..32).map(|t| if t == 7 { 0 } else { !(1 << 7) }).collect();
    assert_eq!(gone.read::<u32>(), want);
}

fn a_matrix_instruction_gets_all_lanes() {
    let value = |i: usize, j: usize| ((i * 7 + j * 3) % 11) as f32 - 5.0;
    // Small integers: exact in bf16, and so are their sums in f32.
    let word = |i: usize, k: usize, off: usize| -> u32 {
        value(i + off, 2 * k).to_bits() >> 16 | value(i + off, 2 * k + 1).to_bits() & 0xffff_0000
    };
    let pack = |rows: usize, off: usize| -> Vec<u32> {
        (0..rows).flat_map(|i| (0..8).map(move |k| word(i, k, off))).collect()
    };
    let [a, b, c] = [16 * 8 * 4, 8 * 8 * 4, 16 * 8 * 4].map(|len| Memory::new("tile", ANY, len));
    a.write(&pack(16, 0));
    b.write(&pack(8, 100));
    c.write(&(0..128).map(|i| i as f32).collect::<Vec<_>>());
    let k = LIB.kernel("p_mma");
    let launch = |lanes: u32| k.launch(32).arg(&a.addr()).arg(&b.addr()).arg(&c.addr()).arg(&lanes);
    Run::new(5).memory([&a, &b, &c]).stream(0, vec![launch(32)]).go().unwrap();
    let want: Vec<f32> = (0..128)
        .map(|i| {
            let dot: f32 = (0..16).map(|k| value(i / 8, k) * value(i % 8 + 100, k)).sum();
            i as f32 + dot
        })
        .collect();
    assert_eq!(c.read::<f32>(), want);
    let e = Run::new(5).memory([&a, &b, &c]).stream(0, vec![launch(31)]).go().unwrap_err();
    assert!(e.contains("without all 32 lanes"), "{e}");
}

fn an_asynchronous_copy_is_there_when_it_was_waited_for() {
    let (input, out) = (Memory::new("in", ANY, 64 * 16), Memory::new("out", ANY, 64 * 4));
    input.write(&(0..256u32).map(|i| i / 4 + i % 4 / 3 * 1000).collect::<Vec<_>>());
    let k = LIB.kernel("p_async");
    // Thread 31 copies its first word only; the last word of each other piece is 1000 more.
    let value = |i: u32| if i % 32 == 31 { i } else { i | (i + 1000) };
    let want: Vec<u32> = (0..64).map(|i| value(i / 32 * 32 + (i + 1) % 32)).collect();
    let mut early = 0;
    for (keep, seed) in (0..20u32).map(|i| (i % 2, u64::from(i))) {
        let launch = k.launch(32).arg(&input.addr()).arg(&out.addr()).arg(&keep);
        Run::new(seed).memory([&input, &out]).stream(0, vec![launch]).go().unwrap();
        let got = out.read::<u32>();
        assert_eq!(got[..32], want[..32], "the first stage was waited for");
        early += u32::from(keep == 1 && got[32..] != want[32..]);
        assert!(keep == 1 || got == want, "both stages were waited for");
    }
    assert_eq!(early, 10, "what was not waited for is not there");
}

fn atomics_of_all_blocks() {
    for workers in [1, 4] {
        let [words, rest] = [32, 24].map(|len| Memory::new("words", ANY, len));
        words.write(&[0u32, 1000, 0, u32::MAX, 0, u32::MAX, 0, 0]);
        let k = LIB.kernel("p_atomics");
        let (w, r) = (words.addr(), rest.addr());
        let launch = k.grid([8, 1, 1], [40, 1, 1]).arg(&w).arg(&r).arg(&(r + 8));
        let mut run = Run::new(workers).memory([&words, &rest]).stream(0, vec![launch]);
        (run.workers, run.spread, run.resident) = (workers as u32, true, 3);
        run.go().unwrap();
        let got = words.read::<u32>();
        let want = [320, 1000u32.wrapping_sub(640), u32::MAX, 0, 319, 0, got[6], 1];
        assert_eq!(got, want);
        assert!((1..=320).contains(&got[6]) && (1..=320).contains(&rest.get(0, 8)));
        assert_eq!((f32::from_bits(rest.get(0, 0) as u32), rest.get(0, 16)), (160.0, 320));
    }
}

/// A barrier of `blocks` blocks of which `resident` can be alive at once.
fn grid_barrier(blocks: u32, resident: u32, workers: u32) -> Result<Stats, String> {
    let count = Memory::new("count", ANY, 8);
    let k = LIB.kernel("p_grid_barrier");
    let launch = k.grid([blocks, 1, 1], [33, 1, 1]).arg(&count.addr());
    let mut run = Run::new(7).memory([&count]).stream(0, vec![launch]);
    (run.workers, run.spread, run.resident, run.max_steps) = (workers, true, resident, 300_000);
    run.go()
}

/// Two streams that pass a number to and fro through shared pages.
fn ping(workers: u32, seed: u64) -> Stats {
    let pages = Pages::new(2, 8);
    let [a, b] = [0, 1].map(|r| pages.map("ping", r));
    let k = LIB.kernel("p_ping");
    let side = |m: &Memory, r: usize, rounds: u64| {
        let (mine, other) = (m.addr_of(r), m.addr_of(1 - r));
        k.launch(1).arg(&mine).arg(&other).arg(&(r as u32)).arg(&rounds)
    };
    let mut run = Run::new(seed).memory([&a, &b]);
    run = run.stream(0, vec![side(&a, 0, 300)]).stream(1, vec![side(&b, 1, 300)]);
    run.workers = workers;
    let stats = run.go().unwrap();
    assert_eq!((a.get(0, 0), b.get(1, 0)), (300, 300));
    stats
}

fn blocks_and_ranks_that_wait_for_each_other_go_on() {
    grid_barrier(12, 12, 1).unwrap();
    grid_barrier(12, 12, 3).unwrap();
    // A kernel that needs more blocks at once than fit hangs here as it does on a device.
    let e = grid_barrier(12, 11, 1).unwrap_err();
    assert!(e.contains("no end after 300000 steps") && e.contains("count+0x0"), "{e}");
    ping(1, 1);
    ping(2, 1);
}

fn the_seed_decides_the_order() {
    let traces: BTreeSet<u64> = (0..8).map(|seed| sums(*LIB, 6, 1, seed).trace).collect();
    assert_eq!(traces.len(), 8, "each seed has an order of its own");
    assert_eq!(sums(*LIB, 6, 1, 3), sums(*LIB, 6, 1, 3));
    assert_eq!(ping(1, 5), ping(1, 5));
}

fn both_kinds_of_fibers_run_alike() {
    static OTHER: LazyLock<Runtime> =
        LazyLock::new(|| Runtime::build(&["-O1", "-DTW_EMU_UCONTEXT"]));
    let lib = load(&OTHER);
    assert_eq!(sums(lib, 6, 1, 3), sums(*LIB, 6, 1, 3));
    let k = lib.kernel("p_divide");
    let e = Run::new(1).stream(0, vec![k.launch(1).arg(&0u32)]).go().unwrap_err();
    assert!(e.contains("divides by zero"), "{e}");
}

/// What the emulator says of one block of `threads` threads.
#[track_caller]
fn found(name: &str, threads: u32, args: &[u32], words: &[&str]) {
    let k = LIB.kernel(name);
    let launch = args.iter().fold(k.launch(threads), |l, a| l.arg(a));
    let e = Run::new(9).stream(0, vec![launch]).go().expect_err(name);
    assert!(words.iter().all(|w| e.contains(w)) && e.contains(name), "{name}: {e}");
}

fn launches_that_no_device_takes_are_found() {
    let k = LIB.kernel("p_block_sum");
    let args = |l: Launch<'static>| l.arg(&0u64).arg(&0u64).arg(&0u64);
    let k: &'static Kernel = Box::leak(Box::new(k));
    for (launch, words) in [
        (args(k.launch(97)).arg(&0u32), "97 threads, its bound is 96"),
        (args(k.grid([0, 1, 1], [96, 1, 1])).arg(&0u32), "an empty grid"),
        (args(k.launch(96)), "arguments of [8, 8, 8] bytes, it takes [8, 8, 8, 4]"),
        (args(k.launch(96)).arg(&0u64), "arguments of [8, 8, 8, 8] bytes"),
        (args(k.launch(96)).arg(&0u32).smem(16385), "16385 bytes of shared memory, of 16384"),
    ] {
        let e = Run::new(1).stream(0, vec![launch]).go().unwrap_err();
        assert!(e.contains(words) && e.contains("p_block_sum"), "{e}");
    }
}

fn threads_that_do_not_meet_are_found() {
    let ended = "if (threadIdx.x != 5) __syncthreads();";
    found("p_sync_ended", 64, &[1], &["__syncthreads", ended]);
    found("p_sync_ended", 64, &[0], &["__syncthreads", ended]);
    found(
        "p_sync_elsewhere",
        16,
        &[],
        &["__syncthreads();  // here", "__syncthreads();  // there"],
    );
    let e = {
        let out = Memory::new("out", ANY, 128);
        let k = LIB.kernel("p_warp_elsewhere");
        let launch = k.launch(32).arg(&out.addr());
        Run::new(1).memory([&out]).stream(0, vec![launch]).go().unwrap_err()
    };
    assert!(e.contains("__shfl_xor_sync") && e.contains("__ballot_sync"), "{e}");
    found("p_warp_without_me", 32, &[], &["lanes fffffffe, without its own", "thread (0,0,0)"]);
    let places = ["deadlock", "threads 0-2 waits in __syncwarp", "thread 3 waits in __syncthreads"];
    found("p_deadlock", 32, &[], &places);
    found("p_fail", 1, &[], &["this is not emulated"]);
}

fn warps_meet_at_named_barriers() {
    let out = Memory::new("out", ANY, 128);
    let run = |seed: u64, wrong: u32| {
        let k = LIB.kernel("p_named");
        let launch = k.launch(64).arg(&out.addr()).arg(&wrong);
        Run::new(seed).memory([&out]).stream(0, vec![launch]).go()
    };
    let want: Vec<u32> = (0..32).map(|lane| 7 * (31 - lane) + 1).collect();
    for seed in 0..20 {
        run(seed, 0).unwrap();
        assert_eq!(out.read::<u32>(), want, "seed {seed}");
        for (wrong, words) in [
            (1, "comes to barrier 16 of 64 threads"),
            (2, "ends with 32 of 64 threads at barrier 4"),
            (3, "comes to barrier 5 of 96 threads"),
            (4, "threads 0-31 waits at barrier 5"),
            (5, "barrier 5"),
        ] {
            let e = run(seed, wrong).unwrap_err();
            assert!(e.contains(words), "{e}");
        }
    }
}

fn memory_that_is_not_there_is_found() {
    let words = Memory::new("words", ANY, 64);
    let other = Memory::new("other", 1, 64);
    let k = LIB.kernel("p_store");
    let store = |m: &Memory, i: u64, plain: u32| {
        let launch = k.launch(1).arg(&m.addr()).arg(&i).arg(&plain);
        Run::new(1).memory([&words, &other]).stream(0, vec![launch]).go()
    };
    store(&words, 7, 0).unwrap();
    store(&words, 7, 1).unwrap();
    let e = store(&words, 8, 0).unwrap_err();
    assert!(e.contains("st.relaxed.sys outside of all buffers"), "{e}");
    assert!(e.contains("0 bytes past the end of words"), "{e}");
    let e = store(&words, 8, 1).unwrap_err();
    assert!(e.contains("touches memory that is not there") && e.contains("end of words"), "{e}");
    let e = store(&other, 0, 0).unwrap_err();
    assert!(e.contains("through a mapping of rank 1: other+0x0"), "{e}");
    let misaligned = LIB.kernel("p_misaligned");
    let launch = misaligned.launch(1).arg(&words.addr());
    let e = Run::new(1).memory([&words]).stream(0, vec![launch]).go().unwrap_err();
    assert!(e.contains("no multiple: words+0x4"), "{e}");
    let k = LIB.kernel("p_smem");
    let smem = |i: u32| Run::new(1).stream(0, vec![k.launch(1).smem(100).arg(&i)]).go();
    smem(99).unwrap();
    let e = smem(100).unwrap_err();
    assert!(e.contains("byte 100 of the dynamic shared memory, which has 100"), "{e}");
    found("p_stack", 1, &[10_000], &["needs more stack"]);
    found("p_divide", 1, &[0], &["divides by zero"]);
}

fn hangs_are_found() {
    let word = Memory::new("flag", ANY, 8);
    let (spin, idle) = (LIB.kernel("p_spin"), LIB.kernel("p_loop"));
    let launch = |n: u32| spin.launch(n).arg(&word.addr());
    let mut run = Run::new(1).memory([&word]).stream(0, vec![launch(4)]);
    run.max_steps = 100_000;
    let e = run.go().unwrap_err();
    assert!(e.contains("no end after 100000 steps") && e.contains("thread 2 has ended"), "{e}");
    assert!(e.contains("threads 0-1 at ld.acquire.sys flag+0x0"), "{e}");
    let mut run = Run::new(1).memory([&word]).stream(0, vec![launch(2)]).stream(1, vec![launch(1)]);
    (run.workers, run.deadline_ms) = (2, 300);
    let e = run.go().unwrap_err();
    assert!(e.contains("not over at its deadline"), "{e}");
    assert!(e.contains("rank 0 p_spin") && e.contains("rank 1 p_spin"), "{e}");
    // This one never comes back to the runtime by itself.
    let mut run = Run::new(1).stream(0, vec![idle.launch(1).arg(&1u32)]);
    run.deadline_ms = 300;
    let e = run.go().unwrap_err();
    assert!(e.contains("p_loop block (0,0,0) thread (0,0,0): runs on without"), "{e}");
}
