//! Each argument of `comm/signal.cu`, broken on purpose: every mutant must fail its scenario.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tilewire_kernels::SIGNAL;

use crate::host::Lib;
use crate::orders::orders;
use crate::run::words;
use crate::signal::{
    LIB, abort, after_fault, another_generation, barriers, copies, deadline, fault_at_a_barrier,
    first_failure, gone, host_abort, last_look, launches, missing, poison, ring,
};
use crate::{Test, team, tests};

pub const TESTS: &[Test] = tests![every_planted_mutant_is_killed];

fn short_ring(lib: &'static Lib) {
    ring(lib, 3, 30, 1, 1);
}

fn short_barriers(lib: &'static Lib) {
    barriers(lib, 3, 2, 1);
}

fn short_launches(lib: &'static Lib) {
    launches(lib, 3, 3, 4);
}

fn one_abort(lib: &'static Lib) {
    abort(lib, 1);
}

/// What is wrong, the text, what stands in its place, and the scenario that must fail.
struct Mutant(&'static str, &'static str, &'static str, fn(&'static Lib));

const LOOK: &str = "            w.seen = ld_acquire_sys_u64(p);
            if ((i64)(w.seen - w.expected) >= 0) return true;
            tw_fail(t, w);";
const CLAIM: &str = "    if (atom_cas_acq_rel_gpu_u64(t.fault, 0, code) != 0) return;\n";
const REPORT: &str = "    u64* report = t.pinned + 8;\n    st_relaxed_sys_u64(report + 1, w.slot);";
const HEAD: &str = "    st_release_sys_u64(report, 1ull << 63 | (u64)w.op << 8 | w.reason);\n";
const TELL: &str = "if (p != t.me) st_release_sys_u64(tw_word(t, p, t.abort + 8 * t.me), code);";
const HEARD: &str = "if (word >> 63 && (u32)word == t.generation) {";
const ROW: &str = "u64 at = TW_OFF_INBOX + (u64)channel * TW_INBOX_ROW;";
const ARRIVE: &str = "    TwWait w = {TW_OP_BARRIER,";

const MUTANTS: &[Mutant] = &[
    Mutant("signal counts from zero", "*sent += n;", "*sent = n;", short_ring),
    Mutant("signal is one short", "*sent += n;", "*sent += n - 1;", short_ring),
    Mutant(
        "signal into the wrong slot",
        "(u64)slot * t.size + writer) * 16",
        "(u64)slot * t.size + writer) * 8",
        short_ring,
    ),
    Mutant(
        "signal into the column of the receiver",
        "tw_count(t, dst, slot, t.me), *sent",
        "tw_count(t, dst, slot, dst), *sent",
        short_ring,
    ),
    Mutant(
        "signal on the sender's page",
        "tw_count(t, dst, slot, t.me), *sent",
        "tw_count(t, t.me, slot, t.me), *sent",
        short_ring,
    ),
    Mutant(
        "signal without release",
        "st_release_sys_u64(tw_count(",
        "st_relaxed_sys_u64(tw_count(",
        orders,
    ),
    Mutant(
        "signal without fence",
        "    fence_acq_rel_sys();\n    // One producer",
        "    // One producer",
        orders,
    ),
    Mutant(
        "expected is not kept",
        "*expected += n;\n    TwWait w = {TW_OP_WAIT, slot, src, 0, 0, *expected,",
        "TwWait w = {TW_OP_WAIT, slot, src, 0, 0, *expected + n,",
        short_ring,
    ),
    Mutant("wait for one less", "*expected += n;", "*expected += n - 1;", short_ring),
    Mutant(
        "counts compared without wrap",
        "if ((i64)(w.seen - w.expected) >= 0) return true;\n        if (polls",
        "if (w.seen >= w.expected) return true;\n        if (polls",
        short_ring,
    ),
    Mutant(
        "poll without acquire",
        "        w.seen = ld_acquire_sys_u64(p);\n        if ((i64)(w.seen - w.expected) >= 0) return true;\n        if (polls",
        "        w.seen = ld_relaxed_gpu_u64(p);\n        if ((i64)(w.seen - w.expected) >= 0) return true;\n        if (polls",
        orders,
    ),
    Mutant("epoch word counts from zero", "dst] += n;", "dst] = n;", copies),
    Mutant(
        "epoch word moves after a fault",
        "tw_bump_epoch(TwTeam t, u32 dst, u32 slot, u64 n) {\n    if (tw_is_over(t)) return;",
        "tw_bump_epoch(TwTeam t, u32 dst, u32 slot, u64 n) {",
        after_fault,
    ),
    Mutant(
        "signal after a fault",
        "tw_signal(TwTeam t, u32 dst, u32 slot, u64 n) {\n    if (tw_is_over(t)) return;",
        "tw_signal(TwTeam t, u32 dst, u32 slot, u64 n) {",
        after_fault,
    ),
    Mutant(
        "wait after a fault",
        "tw_wait(TwTeam t, u32 src, u32 slot, u64 n) {\n    if (tw_is_over(t)) return;",
        "tw_wait(TwTeam t, u32 src, u32 slot, u64 n) {",
        after_fault,
    ),
    Mutant("no last look", LOOK, "            tw_fail(t, w);", last_look),
    Mutant("looks too seldom", "polls % 64 != 0", "polls % 65536 != 0", last_look),
    Mutant("no deadline", "w.elapsed_ns > t.timeout_ns", "w.elapsed_ns > ~0ull - 1", deadline),
    Mutant(
        "deadline in microseconds",
        "w.elapsed_ns > t.timeout_ns",
        "w.elapsed_ns / 1000 > t.timeout_ns",
        deadline,
    ),
    Mutant(
        "fault without a name",
        "w.about = w.peer;\n            over",
        "w.about = t.me;\n            over",
        deadline,
    ),
    Mutant("peers are not told", TELL, "(void)code;", deadline),
    Mutant(
        "peers are told in the wrong slot",
        TELL,
        "if (p != t.me) st_release_sys_u64(tw_word(t, p, t.abort + 8 * p), code);",
        deadline,
    ),
    Mutant(
        "report without generation",
        "st_relaxed_sys_u64(report + 7, t.generation);",
        "",
        deadline,
    ),
    Mutant("report without a claim", CLAIM, "", first_failure),
    Mutant(
        "report is begun before the claim",
        "    if (atom_cas_acq_rel_gpu_u64",
        "    st_relaxed_sys_u64(t.pinned + 9, w.slot);\n    st_relaxed_sys_u64(t.pinned + 10, w.peer);\n    if (atom_cas_acq_rel_gpu_u64",
        first_failure,
    ),
    Mutant(
        "head of the report first",
        REPORT,
        "    u64* report = t.pinned + 8;\n    st_release_sys_u64(report, 1ull << 63 | (u64)w.op << 8 | w.reason);\n    st_relaxed_sys_u64(report + 1, w.slot);",
        orders,
    ),
    Mutant(
        "head of the report without release",
        HEAD,
        "    st_relaxed_sys_u64(report, 1ull << 63 | (u64)w.op << 8 | w.reason);\n",
        orders,
    ),
    Mutant(
        "own code for an abort that was heard",
        "u64 code = w.heard;",
        "u64 code = 0;",
        one_abort,
    ),
    Mutant(
        "abort is heard and not passed on",
        TELL,
        "if (p != t.me && w.heard == 0) st_release_sys_u64(tw_word(t, p, t.abort + 8 * t.me), code);",
        one_abort,
    ),
    Mutant(
        "only the first peer's abort is heard",
        "for (u32 p = 0; p < t.size; p++) {\n        u64 word",
        "for (u32 p = 0; p < 1; p++) {\n        u64 word",
        one_abort,
    ),
    Mutant("abort of any generation", HEARD, "if (word >> 63) {", another_generation),
    Mutant(
        "any word is an abort",
        HEARD,
        "if (word != 0 && (u32)word == t.generation) {",
        another_generation,
    ),
    Mutant("pinned word is not looked at", "if (host != 0) {", "if (false) {", host_abort),
    Mutant("who has left is waited for", ">> w.peer & 1) {", ">> w.peer & 2) {", gone),
    Mutant("anybody's leaving ends a wait", ">> w.peer & 1) {", "!= 0) {", gone),
    Mutant("what is under way is lost", "w.elapsed_ns - w.left_ns > TW_UNDER_WAY_NS", "true", gone),
    Mutant(
        "who has left is not named",
        "w.reason = TW_GONE;\n            w.about = w.peer;",
        "w.reason = TW_GONE;\n            w.about = t.me;",
        gone,
    ),
    Mutant("pinned word becomes this rank's own", "w.heard = host;", "w.heard = 0;", host_abort),
    Mutant(
        "barrier does not keep its round",
        "if (p == 0) t.epoch[channel] = round;",
        "",
        short_barriers,
    ),
    Mutant(
        "barrier does not wait for the last peer",
        ARRIVE,
        "    if (p == t.size - 1) return;\n    TwWait w = {TW_OP_BARRIER,",
        short_barriers,
    ),
    Mutant(
        "barrier does not tell the last peer",
        "    fence_acq_rel_sys();\n    st_release_sys_u64(tw_word(t, p, at",
        "    if (p != t.size - 1) st_release_sys_u64(tw_word(t, p, at",
        missing,
    ),
    Mutant("all barriers on one channel", ROW, "u64 at = TW_OFF_INBOX;", short_barriers),
    Mutant(
        "barrier without its own column",
        "tw_word(t, p, at + 8 * t.me), round",
        "tw_word(t, p, at), round",
        short_barriers,
    ),
    Mutant(
        "barrier without release",
        "st_release_sys_u64(tw_word(t, p, at",
        "st_relaxed_sys_u64(tw_word(t, p, at",
        orders,
    ),
    Mutant(
        "threads of a barrier look one by one",
        "if (__syncthreads_or(tw_is_over(t))) return;",
        "if (tw_is_over(t)) return;\n    __syncthreads();",
        fault_at_a_barrier,
    ),
    Mutant(
        "barrier after a fault",
        "if (__syncthreads_or(tw_is_over(t))) return;",
        "__syncthreads();",
        after_fault,
    ),
    Mutant("a launch raises one slot", "(u64)num * t.size", "(u64)t.size", short_launches),
    Mutant("a launch raises other slots", "(u64)first * t.size", "(u64)first", short_launches),
    Mutant(
        "a launch raises its own column",
        "if (i % t.size != t.me) sent",
        "sent",
        short_launches,
    ),
    Mutant("totals are made twice", "sent[i] += 1;", "sent[i] += 2;", short_launches),
    Mutant(
        "enter does not wait",
        "    TwWait w = {TW_OP_WAIT, credit,",
        "    return;\n    TwWait w = {TW_OP_WAIT, credit,",
        short_launches,
    ),
    Mutant(
        "enter counts from one again",
        "st_release_sys_u64(there, *sent);",
        "st_release_sys_u64(there, 1);",
        short_launches,
    ),
    Mutant(
        "no peer is waited for",
        "    TwWait w = {TW_OP_WAIT, slot, p,",
        "    return;\n    TwWait w = {TW_OP_WAIT, slot, p,",
        short_launches,
    ),
    Mutant(
        "only the first output is poisoned",
        "o < 8; o++)\n        for (u64 i",
        "o < 1; o++)\n        for (u64 i",
        poison,
    ),
    Mutant("an output in good order is poisoned", "if (!tw_told(t)) return;", "", poison),
    Mutant(
        "what a peer has told is not heard",
        "if (!tw_told(t)) return;",
        "if (!tw_is_over(t)) return;",
        poison,
    ),
    Mutant(
        "what an earlier team was told counts",
        "if (!(word >> 63) || (u32)word != t.generation) continue;",
        "if (!(word >> 63)) continue;",
        poison,
    ),
    Mutant(
        "poison of one block only",
        "((unsigned char*)p.out[o])[i] = p.byte[o];",
        "if (i < 8) ((unsigned char*)p.out[o])[i] = p.byte[o];",
        poison,
    ),
];

/// What `f` panics with.
fn failure(f: impl FnOnce()) -> Option<String> {
    let payload = panic::catch_unwind(AssertUnwindSafe(f)).err()?;
    let text = words(&*payload);
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What the scenario says about a mutant. An error if it says nothing, or not because of it.
fn kill(m: &Mutant) -> Result<String, String> {
    let mut lib = *LIB;
    if let Some(why) = failure(|| (m.3)(lib)) {
        return Err(format!("FAILS WITHOUT IT: {why}"));
    }
    if let Some(why) = failure(|| lib = team::load(SIGNAL.emu_text().replace(m.1, m.2))) {
        return Err(format!("DOES NOT COMPILE: {why}"));
    }
    failure(|| (m.3)(lib)).ok_or_else(|| "SURVIVED".to_owned())
}

#[expect(clippy::print_stdout, reason = "the table is what CI shows")]
fn every_planted_mutant_is_killed() {
    let text = SIGNAL.emu_text();
    for m in MUTANTS {
        assert_eq!(text.matches(m.1).count(), 1, "{}: its place in the text", m.0);
    }
    let (next, table) = (AtomicUsize::new(0), Mutex::new(vec![None; MUTANTS.len()]));
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(m) = MUTANTS.get(i) else { return };
            let how = kill(m);
            table.lock().unwrap()[i] = Some(how);
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|s| (0..num).for_each(|_| drop(s.spawn(work))));
    let table: Vec<_> = table.into_inner().unwrap().into_iter().flatten().collect();
    for (m, how) in MUTANTS.iter().zip(&table) {
        let line = how.as_ref().map_or_else(String::clone, |l| l.chars().take(100).collect());
        println!("{:<40} {line}", m.0);
    }
    let killed = table.iter().flatten().count();
    println!("{killed} of {} mutants killed", MUTANTS.len());
    assert_eq!(killed, MUTANTS.len(), "a mutant survived: see the table");
}
