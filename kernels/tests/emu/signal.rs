//! `comm/signal.cu`, executed: signals, waits, barriers, and the ways in which they end.
//!
//! Each scenario takes the library, so that `mutants.rs` can run it on broken texts.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use tilewire_kernels::SIGNAL;

use crate::host::{Launch, Lib};
use crate::team::{self, CONTROL, LAYOUT, Report, STORE, Team};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    signals_and_waits_count_over_ten_thousand_rounds,
    ranks_on_threads_of_their_own,
    copies_of_the_epoch_word_count_as_signals,
    launches_enter_copy_flags_and_wait,
    only_a_team_that_is_over_poisons,
    a_barrier_on_each_of_64_channels,
    a_barrier_of_64_ranks,
    an_abort_is_passed_on_as_it_came,
    an_abort_of_another_generation_is_not_heard,
    a_deadline_writes_the_report_that_the_host_reads,
    a_barrier_names_the_peer_that_is_missing,
    the_first_failure_has_the_report,
    after_a_fault_kernels_return_at_once,
    the_hosts_abort_word_is_published_as_it_is,
    a_peer_that_has_left_is_waited_for_no_longer,
    who_signalled_and_then_aborted_is_not_missing,
    threads_of_a_barrier_part_only_together,
    both_sides_see_one_team,
];

pub static LIB: LazyLock<&'static Lib> = LazyLock::new(|| team::load(SIGNAL.emu_text()));

/// Reasons in a report, as in `vmm/fault.rs`.
pub const TIMEOUT: u64 = 1;
const GONE: u64 = 2;
const ABORTED: u64 = 3;
const HOST: u64 = 6;

/// A ring: put and signal to the next rank, wait for the one before, and acknowledge, so that one
/// word serves all rounds. Counts begin close to the wrap.
pub fn ring(lib: &'static Lib, size: usize, rounds: u64, workers: u32, seed: u64) -> u64 {
    let mut team = Team::new(lib, size);
    if workers > 1 {
        // On the real clock, and perhaps on a busy machine.
        team.timeout_ns = 60_000_000_000;
    }
    let (data, ack) = (LAYOUT.num_signals - 1, seed as usize % 7);
    let start = u64::MAX - rounds / 2;
    let mut run = team.run(seed);
    for r in 0..size {
        let (next, before) = ((r + 1) % size, (r + size - 1) % size);
        for (slot, to, from) in [(data, next, before), (ack, before, next)] {
            team.ranks[r].sent.set(0, 8 * (slot * size + to), start);
            team.ranks[r].expected.set(0, 8 * (slot * size + from), start);
            team.set_count(r, slot, from, start);
        }
        let round = |i: u64| {
            // Several counts at once, and several waits for one signal, come to the same.
            let n = 1 + i % 3;
            let mut v = vec![team.put(r, next, i), team.signal(r, next, data, n)];
            v.push(team.wait(r, before, data, n - n / 2));
            v.push(team.wait(r, before, data, n / 2));
            v.push(team.check(r, before, i));
            v.push(team.signal(r, before, ack, 1));
            v.push(team.wait(r, next, ack, 1));
            v
        };
        run = run.stream(r as u32, (1..=rounds).flat_map(round).collect());
    }
    (run.workers, run.max_steps, run.deadline_ms) = (workers, 100_000_000, 150_000);
    if workers > 1 {
        run.tick_ns = 0;
    }
    let stats = run.go().unwrap();
    team.assert_settled();
    assert_eq!(team.count(1, data, 0), start.wrapping_add((1..=rounds).map(|i| 1 + i % 3).sum()));
    stats.trace
}

fn signals_and_waits_count_over_ten_thousand_rounds() {
    let traces: BTreeSet<u64> =
        [(2, 10_000), (3, 10_000), (4, 10_000), (4, 100), (4, 100), (8, 1_000)]
            .into_iter()
            .enumerate()
            .map(|(seed, (size, rounds))| ring(*LIB, size, rounds, 1, seed as u64))
            .collect();
    assert_eq!(traces.len(), 6, "each run has an order of its own");
}

fn ranks_on_threads_of_their_own() {
    for size in 2..=4 {
        ring(*LIB, size, 1_000, size as u32, 1);
    }
}

/// The way of `put_signal`: the total moves, data are copied, and the total is copied behind them.
pub fn copies(lib: &'static Lib) {
    let (size, slot, rounds) = (2, 5, 200);
    let team = Team::new(lib, size);
    let mut run = team.run(3);
    for r in 0..size {
        let peer = 1 - r;
        let flag = team.ranks[r].control.addr_of(peer) + team.count_offset(slot, r) as u64;
        let total = team.ranks[r].sent.addr() + 8 * (slot * size + peer) as u64;
        let round = |i: u64| {
            let bump = team.bump(r, peer, slot, 1);
            let mut v = vec![bump, team.put(r, peer, i), team.copy(flag, total)];
            v.extend([team.wait(r, peer, slot, 1), team.check(r, peer, i)]);
            // The word is single-buffered: nobody overwrites it before it was checked.
            v.push(team.barrier(r, 0));
            v
        };
        run = run.stream(r as u32, (1..=rounds).flat_map(round).collect());
    }
    run.go().unwrap();
    team.assert_settled();
    assert_eq!(team.count(0, slot, 1), rounds);
}

fn copies_of_the_epoch_word_count_as_signals() {
    copies(*LIB);
}

/// The way of a plan: enter with `num` slots, copies with a flag for each slot and peer, waits for
/// all peers; then a launch whose totals are made without entering.
pub fn launches(lib: &'static Lib, size: usize, num: usize, rounds: u64) {
    let team = Team::new(lib, size);
    let (credit, first) = (3, 4090);
    let mut run = team.run(size as u64);
    let slots = first..first + num;
    for r in 0..size {
        let peers = || (1..size).map(move |i| (r + i) % size);
        let flag = |slot: usize, p: usize| {
            let there = team.ranks[r].control.addr_of(p) + team.count_offset(slot, r) as u64;
            let total = team.ranks[r].sent.addr() + 8 * (slot * size + p) as u64;
            team.copy(there, total)
        };
        let round = |i: u64| {
            let mut v = match i % 2 {
                0 => vec![team.enter_launch(r, credit, first, num)],
                // In two steps, with the barrier's credit.
                _ => vec![team.barrier(r, 1), team.advance(r, first, num)],
            };
            v.extend(peers().map(|p| team.put(r, p, i)));
            v.extend(
                slots.clone().flat_map(|s| peers().map(move |p| (s, p))).map(|(s, p)| flag(s, p)),
            );
            v.extend(slots.clone().rev().map(|s| team.wait_peers(r, s)));
            v.extend(peers().map(|p| team.check(r, p, i)));
            v
        };
        run = run.stream(r as u32, (1..=rounds).flat_map(round).collect());
    }
    run.max_steps = 100_000_000;
    run.go().unwrap();
    team.assert_settled();
    for s in slots {
        assert_eq!(team.count(0, s, 1), rounds, "slot {s}");
    }
}

fn launches_enter_copy_flags_and_wait() {
    for (size, num, rounds) in [(2, 1, 200), (3, 5, 60), (4, 2, 60), (2, 6, 60), (8, 2, 12)] {
        launches(*LIB, size, num, rounds);
    }
}

/// An output of a team in good order stays, that of one that is over, here or as a peer has told,
/// is all poison.
pub fn poison(lib: &'static Lib) {
    for told in [false, true] {
        let team = Team::new(lib, 2);
        let out = &team.ranks[0].data;
        // What an earlier team has told on the same page does not count.
        team.set_abort(0, 1, team.code(1, 0, 4) ^ 1);
        let before = team.snapshot();
        let go = || team.run(1).stream(0, vec![team.poison(0, out.addr(), 13)]).go().unwrap();
        go();
        assert!(team.snapshot() == before, "a team in good order");
        if told {
            team.set_abort(0, 1, team.code(1, 0, 4));
        } else {
            team.ranks[0].fault.set(0, 0, team.code(1, 0, 4));
        }
        go();
        let words = [out.get(0, 0), out.get(0, 8)];
        assert_eq!(words, [u64::MAX, (1 << 40) - 1], "13 bytes and no more");
        // Whoever waits for the launch is told why.
        assert_eq!(team.fault(0), team.code(1, 0, 4));
    }
}

fn only_a_team_that_is_over_poisons() {
    poison(*LIB);
}

/// `rounds` barriers on each channel in an order that is the same on all ranks, and beside them
/// barriers of a second stream on a channel of its own.
pub fn barriers(lib: &'static Lib, size: usize, rounds: u64, seed: u64) {
    let team = Team::new(lib, size);
    let mut run = team.run(seed);
    let own = LAYOUT.num_channels - 1;
    let visits = rounds * own as u64;
    for r in 0..size {
        let around =
            |i: u64| [team.enter(r, i), team.barrier(r, i as usize * 5 % own), team.left(r, i)];
        run = run.stream(r as u32, (1..=visits).flat_map(around).collect());
        run = run.stream(r as u32, (0..visits).map(|_| team.barrier(r, own)).collect());
    }
    run.max_steps = 100_000_000;
    run.go().unwrap();
    team.assert_settled();
    for r in 0..size {
        for c in 0..LAYOUT.num_channels {
            let want = if c == own { visits } else { rounds };
            assert_eq!(team.ranks[r].epoch.get(0, 8 * c), want, "channel {c}");
            for p in 0..LAYOUT.inbox_row / 8 {
                let at = LAYOUT.inbox + c * LAYOUT.inbox_row + 8 * p;
                let seen = team.ranks[r].control.get(r, at);
                assert_eq!(seen, if p < size && p != r { want } else { 0 }, "inbox {p} of {c}");
            }
        }
    }
}

fn a_barrier_on_each_of_64_channels() {
    for size in 1..=4 {
        barriers(*LIB, size, 4, size as u64);
    }
    barriers(*LIB, 8, 1, 8);
}

fn a_barrier_of_64_ranks() {
    let team = Team::new(*LIB, 64);
    let mut run = team.run(1);
    for r in 0..64 {
        let around = |i: u64| [team.enter(r, i), team.barrier(r, 3), team.left(r, i)];
        run = run.stream(r as u32, (1..=2).flat_map(around).collect());
    }
    run.go().unwrap();
    assert_eq!((team.errors(), team.fault(63)), (0, 0));
}

/// Rank 2 aborts towards rank 0 only; rank 1 hears of it from rank 0.
pub fn abort(lib: &'static Lib, seed: u64) {
    let team = Team::new(lib, 3);
    let code = team.code(2, 1, 4);
    team.set_count(0, 9, 1, 3);
    let mut events = 0;
    let run = team.run(seed).hook(|_| {
        events += 1;
        if events == 500 {
            team.set_abort(0, 2, code);
        }
    });
    let run = run.stream(0, vec![team.wait(0, 1, 9, 5)]).stream(1, vec![team.barrier(1, 6)]);
    run.go().unwrap();
    // The rank that began, its reason and whom it is about: every rank has them as they came.
    assert_eq!([team.fault(0), team.fault(1), team.fault(2)], [code, code, 0]);
    let heard = team.report(0).unwrap();
    let want = Report {
        barrier: false,
        reason: ABORTED,
        slot: 9,
        peer: 1,
        expected: 5,
        seen: 3,
        elapsed_ns: heard.elapsed_ns,
        code,
    };
    assert_eq!(heard, want);
    assert!((1..team.timeout_ns).contains(&heard.elapsed_ns), "{heard:?}");
    let passed = team.report(1).unwrap();
    assert!(passed.barrier && [0, 2].contains(&passed.peer), "{passed:?}");
    assert_eq!((passed.reason, passed.slot, passed.expected, passed.code), (ABORTED, 6, 1, code));
    let slots: Vec<u64> = (0..9).map(|i| team.abort(i / 3, i % 3)).collect();
    assert_eq!(slots, [0, code, code, code, 0, 0, code, code, 0]);
}

fn an_abort_is_passed_on_as_it_came() {
    (0..20).for_each(|seed| abort(*LIB, seed));
}

/// Words in abort slots that are not for this team, or no codes at all.
pub fn another_generation(lib: &'static Lib) {
    let team = Team::new(lib, 2);
    let old = team.code(1, 0, 1) - 1;
    for word in [old, team.code(1, 0, 1) & !(1 << 63)] {
        team.set_abort(0, 1, word);
        let mut polls = 0;
        let run = team.run(1).hook(|e| {
            polls += u64::from(e.op == "ld.acquire.sys");
            if polls == 1_000 {
                team.set_count(0, 0, 1, team.count(0, 0, 1) + 1);
                polls += 1;
            }
        });
        run.stream(0, vec![team.wait(0, 1, 0, 1)]).go().unwrap();
        assert_eq!((team.fault(0), team.report(0)), (0, None), "left for {word:x}");
    }
}

fn an_abort_of_another_generation_is_not_heard() {
    another_generation(*LIB);
}

/// Rank 1 waits for rank 2, which is silent; rank 0 waits for rank 1 and is told.
pub fn deadline(lib: &'static Lib) {
    let mut team = Team::new(lib, 3);
    team.timeout_ns = 300_000;
    team.set_count(1, 4095, 2, 10);
    team.ranks[1].expected.set(0, 8 * (4095 * 3 + 2), 10);
    let mut run = team.run(5).stream(1, vec![team.wait(1, 2, 4095, 2)]);
    // It begins later: its own deadline is not the one that ends it.
    let late = (0..2_000).map(|_| team.put(0, 0, 1)).chain([team.wait(0, 1, 0, 1)]);
    run = run.stream(0, late.collect());
    run.go().unwrap();
    let code = team.code(1, 2, TIMEOUT);
    assert_eq!([team.fault(0), team.fault(1), team.fault(2)], [code, code, 0]);
    let report = team.report(1).unwrap();
    let want = Report {
        barrier: false,
        reason: TIMEOUT,
        slot: 4095,
        peer: 2,
        expected: 12,
        seen: 10,
        elapsed_ns: report.elapsed_ns,
        code,
    };
    assert_eq!(report, want);
    // Late by 64 polls of both ranks and a sleep, and by what the scheduler let this rank stand.
    let late = report.elapsed_ns.checked_sub(team.timeout_ns);
    assert!(late.is_some_and(|l| l > 0 && l < 400_000), "{late:?}");
    assert_eq!((team.abort(0, 1), team.abort(2, 1), team.abort(1, 1)), (code, code, 0));
    assert_eq!(team.report(0).map(|r| (r.reason, r.code)), Some((ABORTED, code)));
}

fn a_deadline_writes_the_report_that_the_host_reads() {
    deadline(*LIB);
}

/// Rank 3 does not come to the fifth barrier of a channel.
pub fn missing(lib: &'static Lib) {
    let mut team = Team::new(lib, 4);
    team.timeout_ns = 300_000;
    let mut run = team.run(6);
    for r in 0..4 {
        let rounds = if r == 3 { 4 } else { 5 };
        run = run.stream(r as u32, (0..rounds).map(|_| team.barrier(r, 2)).collect());
    }
    run.go().unwrap();
    let first = (0..3).find(|r| team.report(*r).is_some_and(|w| w.reason == TIMEOUT));
    let first = first.expect("who waited longest");
    let report = team.report(first).unwrap();
    assert!(report.barrier);
    assert_eq!((report.slot, report.peer, report.expected, report.seen), (2, 3, 5, 4));
    assert_eq!(report.code, team.code(first, 3, TIMEOUT));
    assert!((0..3).all(|r| team.fault(r) != 0) && team.fault(3) == 0);
    assert_eq!(team.abort(3, first), report.code);
}

fn a_barrier_names_the_peer_that_is_missing() {
    missing(*LIB);
}

/// Two waits of one rank reach their deadlines together: one of them has the fault word, all of
/// the report, and what the peers are told.
pub fn first_failure(lib: &'static Lib) {
    let mut winners = BTreeSet::new();
    for seed in 0..40 {
        let mut team = Team::new(lib, 3);
        team.timeout_ns = 5_000;
        let run = team.run(seed).stream(0, vec![team.wait(0, 1, 11, 1)]);
        run.stream(0, vec![team.wait(0, 2, 22, 2)]).go().unwrap();
        let report = team.report(0).unwrap();
        let peer = report.peer;
        winners.insert(peer);
        let code = team.code(0, peer, TIMEOUT);
        assert_eq!((report.slot, report.expected), (11 * peer, peer as u64), "{report:?}");
        assert_eq!([report.code, team.fault(0), team.abort(1, 0), team.abort(2, 0)], [code; 4]);
    }
    assert_eq!(winners.len(), 2, "the order of the two varies");
}

fn the_first_failure_has_the_report() {
    first_failure(*LIB);
}

/// Behind a fault nothing is written and nothing is waited for.
pub fn after_fault(lib: &'static Lib) {
    let team = Team::new(lib, 2);
    team.ranks[0].fault.set(0, 0, team.code(1, 0, 4));
    let before = team.snapshot();
    let kernels = [team.signal(0, 1, 3, 1), team.bump(0, 1, 3, 1), team.wait(0, 1, 3, 1)];
    let mut ops = Vec::new();
    let run = team.run(2).hook(|e| {
        assert_eq!((e.op, e.addr), ("ld.relaxed.gpu", team.ranks[0].fault.addr()), "{}", e.kernel);
        ops.push(e.kernel.to_owned());
    });
    let blocks = [
        team.barrier(0, 0),
        team.advance(0, 3, 2),
        team.enter_launch(0, 1, 3, 2),
        team.wait_peers(0, 3),
    ];
    run.stream(0, kernels.into_iter().chain(blocks).collect()).go().unwrap();
    assert!(team.snapshot() == before, "a kernel wrote something");
    assert_eq!(ops.len(), 3 + 64 + 256 + 64 + 64, "one look of each thread");
}

fn after_a_fault_kernels_return_at_once() {
    after_fault(*LIB);
}

/// The monitor of rank 0's host writes its word while kernels wait.
pub fn host_abort(lib: &'static Lib) {
    let team = Team::new(lib, 3);
    // A dead peer, found by another rank's monitor: nothing in it is this rank's.
    let code = team.code(2, 1, 2) | 5 << 56;
    let mut events = 0;
    let run = team.run(8).hook(|_| {
        events += 1;
        if events == 700 {
            team.ranks[0].pinned.set(0, 0, code);
        }
    });
    let run = run.stream(0, vec![team.wait(0, 1, 1, 1)]).stream(2, vec![team.wait(2, 1, 1, 1)]);
    run.go().unwrap();
    assert_eq!([team.fault(0), team.fault(1), team.fault(2)], [code, 0, code]);
    assert_eq!([team.abort(1, 0), team.abort(2, 0), team.abort(0, 2)], [code; 3]);
    // The host raised it: its device's report says so, and the peer's that it was told.
    assert_eq!(team.report(0).map(|r| (r.reason, r.code, r.peer)), Some((HOST, code, 1)));
    assert_eq!(team.report(2).map(|r| (r.reason, r.code, r.peer)), Some((ABORTED, code, 1)));
}

fn the_hosts_abort_word_is_published_as_it_is() {
    host_abort(*LIB);
}

/// Of three ranks rank 0 waits for rank 1; who has left is in the word that its host writes.
pub fn gone(lib: &'static Lib) {
    let second = 1_000_000_000;
    // The rank that left, when, when its signal came (in ms), and how that ends.
    for (left, when, sent, ends) in [
        (1, 0, None, Some(GONE)),
        (2, 0, None, Some(TIMEOUT)),
        (1, 0, Some(500), None),
        (1, 2000, None, Some(GONE)),
        (1, 2000, Some(2500), None),
    ] {
        let mut team = Team::new(lib, 3);
        team.timeout_ns = 5 * second;
        let mut events = 0;
        let mut run = team.run(4).hook(|_| {
            // Each takes a millisecond.
            if events == when {
                team.ranks[0].pinned.set(0, 16, 1 << left);
            }
            if Some(events) == sent {
                team.set_count(0, 9, 1, 1);
            }
            events += 1;
        });
        run.tick_ns = 1_000_000;
        run.stream(0, vec![team.wait(0, 1, 9, 1)]).go().unwrap();
        let Some(reason) = ends else {
            assert_eq!((team.fault(0), team.report(0)), (0, None), "what was under way has come");
            continue;
        };
        let (r, code) = (team.report(0).unwrap(), team.code(0, 1, reason));
        assert_eq!((r.reason, r.peer, r.slot, r.code), (reason, 1, 9, code));
        let after = if reason == GONE { when * 1_000_000 + second } else { team.timeout_ns };
        assert!((after..after + second).contains(&r.elapsed_ns), "{r:?}");
        assert_eq!([team.fault(0), team.abort(1, 0), team.abort(2, 0)], [code; 3]);
    }
}

fn a_peer_that_has_left_is_waited_for_no_longer() {
    gone(*LIB);
}

/// Between the last poll and the look at the reasons to end, the peer signals; and then there is a
/// reason: its abort, the host's word, or the deadline.
pub fn last_look(lib: &'static Lib) {
    for reason in [ABORTED, HOST, TIMEOUT] {
        let mut team = Team::new(lib, 2);
        if reason == TIMEOUT {
            team.timeout_ns = 0;
        }
        let (count, fault) = (
            team.ranks[0].control.addr() + team.count_offset(8, 1) as u64,
            team.ranks[0].fault.addr(),
        );
        let (mut polls, mut placed) = (0, false);
        let run = team.run(1).hook(|e| {
            polls += u64::from(e.addr == count);
            if polls == 64 && e.addr == fault && !placed {
                placed = true;
                team.set_count(0, 8, 1, 1);
                match reason {
                    ABORTED => team.set_abort(0, 1, team.code(1, 0, 4)),
                    HOST => team.ranks[0].pinned.set(0, 0, team.code(0, 1, 2)),
                    _ => {}
                }
            }
        });
        run.stream(0, vec![team.wait(0, 1, 8, 1)]).go().unwrap();
        assert!(placed, "the reasons to end are looked at after 64 polls");
        assert_eq!((team.fault(0), team.report(0)), (0, None), "the signal was there");
        assert_eq!(team.abort(1, 0), 0);
    }
}

fn who_signalled_and_then_aborted_is_not_missing() {
    last_look(*LIB);
}

/// The fault word changes while the threads of a barrier look at it.
pub fn fault_at_a_barrier(lib: &'static Lib) {
    for after in [1, 20, 63] {
        let team = Team::new(lib, 2);
        let mut looks = 0;
        let run = team.run(after).hook(|e| {
            looks += u64::from(e.addr == team.ranks[0].fault.addr());
            if looks == after {
                team.ranks[0].fault.set(0, 0, team.code(0, 0, 5));
            }
        });
        run.stream(0, vec![team.barrier(0, 0)]).go().unwrap();
        let told = team.ranks[0].control.get(1, LAYOUT.inbox);
        assert_eq!(
            (told, team.ranks[0].epoch.get(0, 0)),
            (0, 0),
            "a barrier of a team that is over"
        );
    }
}

fn threads_of_a_barrier_part_only_together() {
    fault_at_a_barrier(*LIB);
}

/// What two texts say twice: the report's place, the definitions.
fn both_sides_see_one_team() {
    assert_eq!(LAYOUT.report, 64, "tw_fail writes words 8 to 15");
    for d in SIGNAL.defines {
        let name = d.trim_start_matches("TW_");
        assert!(STORE.contains(&format!("(\"{d}\", {name} as u64)")), "{d}");
        assert!(CONTROL.contains(&format!("const {name}: usize")), "{d}");
    }
    // Rows and columns that do not overlap, for the most ranks there can be.
    assert!(LAYOUT.abort + 64 * 8 <= LAYOUT.inbox && LAYOUT.inbox_row >= 64 * 8);
    assert!(LAYOUT.inbox + LAYOUT.num_channels * LAYOUT.inbox_row <= LAYOUT.signals);
}

/// A launch alone, for the traces in `orders.rs`.
pub fn alone<'a>(
    team: &'a Team,
    launch: Launch<'a>,
    mut told: impl FnMut(&str, u64, u32) + Send + 'a,
) {
    let run = team.run(1).stream(0, vec![launch]);
    run.hook(move |e| told(e.op, e.addr, e.thread)).go().unwrap();
}
