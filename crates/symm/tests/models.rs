//! The protocol under every interleaving and every stale read that C11 allows: loom runs the very
//! functions of `protocol.rs` on small instances. Then each argument is broken on purpose, one at a
//! time: every one of these mutants must be found.
//!
//! The slots of a launch are those of `Transport`: `signal`/`wait`, `grant`/`acquire`,
//! `store_flag`/ `wait_flag`, `put_flagged`/`wait_flagged`, `barrier`, and the way a wait ends
//! (`wait.rs`: the count, then the abort slots, then the count once more). `models/waits.rs` has
//! the loop of a wait, the bell, and the records.

#[path = "models/waits.rs"]
mod waits;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicU64;
use loom::thread;
use tilewire_symm::protocol::{self, AbortCode, Word};
use waits::*;

/// Which ordering of a word is weakened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Weak {
    No,
    Rmw,
    Load,
    Store,
    Cas,
    /// Compare and exchange writes whatever it finds.
    Overwrite,
    Fence,
}

/// Which step is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Right,
    SignalFirst,
    PlainCompare,
    NoAck,
    AckFirst,
    TagLate,
    TagBeforeCount,
    NoCredit,
    FlagFirst,
    LeaveFirst,
    NoLeave,
    OneBuffer,
    ArriveFirst,
    NoSecondWait,
    AnyGeneration,
    ReadOnAbort,
    NoLastLook,
    NoRing,
    RingFirst,
    LookFirst,
    SameBell,
    BellLate,
    UnseenSleeper,
    SignalsOnly,
    NumberKept,
    OneLook,
    NoteFirst,
    NoSecondEntry,
    OneNote,
}

#[derive(Clone, Copy, Debug)]
struct Mutant {
    weak: Weak,
    step: Step,
}

const RIGHT: Mutant = Mutant { weak: Weak::No, step: Step::Right };

/// A word of loom's, possibly weakened.
struct W(AtomicU64, Weak);

impl W {
    fn new(value: u64, weak: Weak) -> Self {
        Self(AtomicU64::new(value), weak)
    }

    fn order(&self, weak: Weak, order: Ordering) -> Ordering {
        if self.1 == weak { Ordering::Relaxed } else { order }
    }
}

impl Word for W {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(self.order(Weak::Load, order))
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, self.order(Weak::Store, order));
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, self.order(Weak::Rmw, order))
    }

    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        if self.1 == Weak::Overwrite {
            return Ok(self.0.swap(new, Ordering::AcqRel));
        }
        self.0.compare_exchange(current, new, self.order(Weak::Cas, success), failure)
    }

    fn fence(&self, order: Ordering) {
        // A relaxed fence is none.
        if self.1 != Weak::Fence {
            loom::sync::atomic::fence(order);
        }
    }
}

/// Plain memory that a peer puts to. Loom reports every access that no ordering covers.
struct Payload(loom::cell::UnsafeCell<u64>);

// SAFETY: loom checks each access against all others and ends the model where two could meet.
unsafe impl Sync for Payload {}
// SAFETY: a number.
unsafe impl Send for Payload {}

impl Payload {
    fn new() -> Self {
        Self(loom::cell::UnsafeCell::new(0))
    }

    fn put(&self, value: u64) {
        // SAFETY: the pointer is valid inside the closure, and loom has checked the access.
        self.0.with_mut(|p| unsafe { *p = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as in `put`.
        self.0.with(|p| unsafe { *p })
    }
}

fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(v) = ready() {
            return v;
        }
        thread::yield_now();
    }
}

fn reached(m: Mutant, count: &W, expected: u64) -> Option<u64> {
    if m.step == Step::PlainCompare {
        let seen = count.load(Ordering::Acquire);
        return (seen >= expected).then_some(seen);
    }
    protocol::reached(count, expected)
}

/// Signal and wait: the payload is there. The count wraps, as no count may matter.
fn message(m: Mutant) {
    let s = Arc::new((Payload::new(), W::new(u64::MAX, m.weak)));
    let t = s.clone();
    let producer = thread::spawn(move || {
        if m.step == Step::SignalFirst {
            protocol::signal(&t.1, 1);
        }
        t.0.put(7);
        if m.step != Step::SignalFirst {
            protocol::signal(&t.1, 1);
        }
    });
    until(|| reached(m, &s.1, 0));
    assert_eq!(s.0.read(), 7);
    producer.join().unwrap();
}

/// One buffer, two epochs: the second is not written before the first was read.
fn mailbox(m: Mutant) {
    let s = Arc::new((Payload::new(), W::new(0, Weak::No), W::new(0, m.weak)));
    let t = s.clone();
    let producer = thread::spawn(move || {
        for epoch in 1..=2 {
            if m.step != Step::NoAck {
                until(|| protocol::reached(&t.2, epoch - 1));
            }
            t.0.put(epoch);
            protocol::signal(&t.1, 1);
        }
    });
    for epoch in 1..=2 {
        until(|| protocol::reached(&s.1, epoch));
        if m.step == Step::AckFirst {
            protocol::signal(&s.2, 1);
        }
        assert_eq!(s.0.read(), epoch);
        if m.step != Step::AckFirst {
            protocol::signal(&s.2, 1);
        }
    }
    producer.join().unwrap();
}

fn grant(m: Mutant, count: &W, tag_word: &W, tag: u64) {
    if m.step == Step::TagLate {
        protocol::signal(count, 1);
        tag_word.store(tag, Ordering::Relaxed);
        return;
    }
    protocol::grant(count, tag_word, tag);
}

fn granted(m: Mutant, count: &W, tag_word: &W, expected: u64) -> Option<u64> {
    if m.step == Step::TagBeforeCount {
        let tag = tag_word.load(Ordering::Relaxed);
        return protocol::reached(count, expected).map(|_| tag);
    }
    protocol::granted(count, tag_word, expected)
}

/// Two launches: each grant carries the tag of its launch, and the buffer is overwritten only
/// after the grant that follows its reading.
fn credit(m: Mutant) {
    let words = [W::new(0, Weak::No), W::new(0, m.weak), W::new(0, Weak::No)];
    let s = Arc::new((Payload::new(), words));
    let t = s.clone();
    let producer = thread::spawn(move || {
        let (buf, [data, count, tag_word]) = &*t;
        for launch in 1..=2 {
            if m.step != Step::NoCredit {
                let tag = until(|| granted(m, count, tag_word, launch));
                assert_eq!(tag, 100 + launch, "the tag is that of the launch");
            }
            buf.put(launch);
            protocol::signal(data, 1);
        }
    });
    let (buf, [data, count, tag_word]) = &*s;
    for launch in 1..=2 {
        grant(m, count, tag_word, 100 + launch);
        until(|| protocol::reached(data, launch));
        assert_eq!(buf.read(), launch);
    }
    producer.join().unwrap();
}

/// A flag is stored, and found by comparison: the payload is there. The number wraps.
fn flag_message(m: Mutant) {
    let s = Arc::new((Payload::new(), W::new(u64::MAX, m.weak)));
    let t = s.clone();
    let producer = thread::spawn(move || {
        if m.step == Step::FlagFirst {
            protocol::flag(&t.1, 0);
        }
        t.0.put(7);
        protocol::flag(&t.1, 0);
    });
    let found = |word: &W| match m.step {
        Step::PlainCompare => Some(word.load(Ordering::Acquire)),
        _ => protocol::flagged(word, 0),
    };
    until(|| found(&s.1));
    assert_eq!(s.0.read(), 7);
    producer.join().unwrap();
}

/// One buffer, two launches, each flag stored twice: who has read leaves, and only then is the
/// buffer written again. Nothing is counted, and nothing is cleared.
fn flag_leave(m: Mutant) {
    let s = Arc::new((Payload::new(), W::new(0, Weak::No), W::new(0, m.weak)));
    let t = s.clone();
    let producer = thread::spawn(move || {
        let (buf, arrival, left) = &*t;
        for launch in 1..=2 {
            if m.step != Step::NoLeave {
                until(|| protocol::flagged(left, launch - 1));
            }
            buf.put(launch);
            protocol::flag(arrival, launch);
            protocol::flag(arrival, launch);
        }
    });
    let (buf, arrival, left) = &*s;
    for launch in 1..=2 {
        until(|| protocol::flagged(arrival, launch));
        if m.step == Step::LeaveFirst {
            protocol::flag(left, launch);
        }
        assert_eq!(buf.read(), launch);
        protocol::flag(left, launch);
        protocol::flag(left, launch);
    }
    producer.join().unwrap();
}

/// My words of three launches to the peer, each number of the launch and count, and the peer's to
/// me: two buffers in turn need no grant.
fn exchange_counts(m: Mutant, words: &[[W; 2]; 2], me: usize) {
    for launch in 1..=3u64 {
        let buffer = if m.step == Step::OneBuffer { 0 } else { launch as usize % 2 };
        protocol::flag(&words[1 - me][buffer], launch << 32 | (10 * launch + me as u64));
        let word = until(|| protocol::flagged(&words[me][buffer], launch << 32));
        assert_eq!(word as u32 as u64, 10 * launch + 1 - me as u64, "the count of this launch");
    }
}

fn counts_in_turn(m: Mutant) {
    let pair = || [W::new(0, m.weak), W::new(0, m.weak)];
    let s = Arc::new([pair(), pair()]);
    let t = s.clone();
    let other = thread::spawn(move || exchange_counts(m, &t, 1));
    exchange_counts(m, &s, 0);
    other.join().unwrap();
}

/// What two ranks share: a payload each, and for each an inbox on two channels.
type Pair = ([Payload; 2], [[W; 2]; 2]);

fn member(m: Mutant, s: &Pair, me: usize, rounds: u64) {
    let (payload, inbox) = s;
    let peer = 1 - me;
    for round in 1..=rounds {
        payload[me].put(10 * round + me as u64);
        protocol::arrive(&inbox[peer][0], round);
        if m.step == Step::ArriveFirst {
            protocol::arrive(&inbox[peer][1], round);
        }
        until(|| protocol::arrived(&inbox[me][0], round).then_some(()));
        assert_eq!(payload[peer].read(), 10 * round + peer as u64);
        // Nobody writes after the last round.
        if round < rounds {
            if m.step != Step::ArriveFirst {
                protocol::arrive(&inbox[peer][1], round);
            }
            if m.step != Step::NoSecondWait {
                until(|| protocol::arrived(&inbox[me][1], round).then_some(()));
            }
        }
    }
}

fn barrier_of(m: Mutant, rounds: u64) {
    // In two rounds only the second barrier is weakened: the first has a model of its own.
    let first = if rounds == 1 { m.weak } else { Weak::No };
    let boxes = || [W::new(0, first), W::new(0, m.weak)];
    let s: Arc<Pair> = Arc::new(([Payload::new(), Payload::new()], [boxes(), boxes()]));
    let t = s.clone();
    let other = thread::spawn(move || member(m, &t, 1, rounds));
    member(m, &s, 0, rounds);
    other.join().unwrap();
}

/// Two ranks, one barrier: what was written before it is seen behind it.
fn barrier_one(m: Mutant) {
    barrier_of(m, 1);
}

/// Two rounds with a barrier before reading and one before overwriting.
fn barrier_two(m: Mutant) {
    barrier_of(m, 2);
}

const CODE: AbortCode = AbortCode { generation: 7, reason: 1, about: 3, from: 2 };

/// A wait: the count; else an abort; and then the count once more, by the turn of `wait.rs`.
fn wait(m: Mutant, count: &W, slot: &W) -> Result<u64, AbortCode> {
    until(|| {
        let ready = || protocol::reached(count, 1);
        let aborted = || {
            let generation = match m.step {
                Step::AnyGeneration => slot.load(Ordering::Acquire) as u32,
                _ => CODE.generation,
            };
            protocol::raised(slot, generation)
        };
        match m.step {
            Step::ReadOnAbort => ready().or_else(|| aborted().map(|_| 0)).map(Ok),
            Step::NoLastLook => ready().map(Ok).or_else(|| aborted().map(Err)),
            _ => protocol::turn(ready, aborted),
        }
    })
}

type Abortable = (Payload, W, W);

fn abortable(m: Mutant) -> Arc<Abortable> {
    Arc::new((Payload::new(), W::new(0, Weak::No), W::new(0, m.weak)))
}

/// A producer that fails half-way: the waiter leaves, and takes nothing for data.
fn abort_leaves(m: Mutant) {
    let s = abortable(m);
    let t = s.clone();
    let producer = thread::spawn(move || {
        t.0.put(u64::MAX);
        protocol::raise(&t.2, CODE);
    });
    match wait(m, &s.1, &s.2) {
        Ok(_) => assert_eq!(s.0.read(), 7, "poison was taken for data"),
        Err(code) => assert_eq!(code, CODE),
    }
    producer.join().unwrap();
}

/// A producer that signals and fails later: it is not taken for missing.
fn abort_after_signal(m: Mutant) {
    let s = abortable(m);
    let t = s.clone();
    let producer = thread::spawn(move || {
        t.0.put(7);
        protocol::signal(&t.1, 1);
        protocol::raise(&t.2, CODE);
    });
    assert!(wait(m, &s.1, &s.2).is_ok(), "who has signalled is not missing");
    assert_eq!(s.0.read(), 7);
    producer.join().unwrap();
}

/// An abort of an earlier generation is not heard.
fn abort_of_another_generation(m: Mutant) {
    let s = abortable(m);
    protocol::raise(&s.2, AbortCode { generation: 6, ..CODE });
    let t = s.clone();
    let producer = thread::spawn(move || {
        t.0.put(7);
        protocol::signal(&t.1, 1);
    });
    assert!(wait(m, &s.1, &s.2).is_ok(), "left for an old abort");
    assert_eq!(s.0.read(), 7);
    producer.join().unwrap();
}

/// Worker and monitor of a rank abort at once: what was read first stays.
fn abort_first_stays(m: Mutant) {
    let s = Arc::new(W::new(0, m.weak));
    let raise = |about| {
        let t = s.clone();
        thread::spawn(move || protocol::raise(&*t, AbortCode { about, ..CODE }))
    };
    let threads = [raise(1), raise(2)];
    let first = protocol::raised(&*s, CODE.generation);
    threads.into_iter().for_each(|t| t.join().unwrap());
    let last = protocol::raised(&*s, CODE.generation);
    assert!(last.is_some() && (first.is_none() || first == last), "the first abort stays");
}

/// Runs `model` under every schedule with at most `bound` preemptions (all of them without).
fn explore(model: fn(Mutant), m: Mutant, bound: Option<usize>) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = bound;
    b.check(move || model(m));
}

macro_rules! holds {
    ($($model:ident $bound:expr;)*) => {
        $(#[test]
        fn $model() {
            explore(super::$model, super::RIGHT, $bound);
        })*
    };
}

mod holds {
    use super::explore;

    holds! {
        message None;
        mailbox None;
        credit None;
        flag_message None;
        flag_leave None;
        counts_in_turn None;
        barrier_one None;
        barrier_two None;
        abort_leaves None;
        abort_after_signal None;
        abort_of_another_generation None;
        abort_first_stays None;
        bell_signal None;
        bell_of_two Some(3);
        bell_for_two Some(3);
        bell_abort None;
        entry_overwritten None;
        entry_before_its_note None;
        notes_in_turn Some(2);
    }
}

type Row = (&'static str, fn(Mutant), Weak, Step);

/// Every argument of the protocol page, broken.
const MUTANTS: [Row; 33] = [
    ("signal without release", message, Weak::Rmw, Step::Right),
    ("wait without acquire", message, Weak::Load, Step::Right),
    ("signal before the put", message, Weak::No, Step::SignalFirst),
    ("counts compared without wrap", message, Weak::No, Step::PlainCompare),
    ("ack without release", mailbox, Weak::Rmw, Step::Right),
    ("ack read without acquire", mailbox, Weak::Load, Step::Right),
    ("no ack", mailbox, Weak::No, Step::NoAck),
    ("ack before the read", mailbox, Weak::No, Step::AckFirst),
    ("grant without release", credit, Weak::Rmw, Step::Right),
    ("grant read without acquire", credit, Weak::Load, Step::Right),
    ("tag stored after the count", credit, Weak::No, Step::TagLate),
    ("tag read before the count", credit, Weak::No, Step::TagBeforeCount),
    ("overwrite without credit", credit, Weak::No, Step::NoCredit),
    ("flag without release", flag_message, Weak::Store, Step::Right),
    ("flag read without acquire", flag_message, Weak::Load, Step::Right),
    ("flag before the put", flag_message, Weak::No, Step::FlagFirst),
    ("flag not compared", flag_message, Weak::No, Step::PlainCompare),
    ("leave without release", flag_leave, Weak::Store, Step::Right),
    ("leave read without acquire", flag_leave, Weak::Load, Step::Right),
    ("leave before the read", flag_leave, Weak::No, Step::LeaveFirst),
    ("overwrite before the leave", flag_leave, Weak::No, Step::NoLeave),
    ("counts in one buffer", counts_in_turn, Weak::No, Step::OneBuffer),
    ("arrival without release", barrier_one, Weak::Store, Step::Right),
    ("arrival read without acquire", barrier_one, Weak::Load, Step::Right),
    ("arrival before the reads are done", barrier_two, Weak::No, Step::ArriveFirst),
    ("no wait in the second barrier", barrier_two, Weak::No, Step::NoSecondWait),
    ("second barrier without release", barrier_two, Weak::Store, Step::Right),
    ("abort of any generation heard", abort_of_another_generation, Weak::No, Step::AnyGeneration),
    ("data read on abort", abort_leaves, Weak::No, Step::ReadOnAbort),
    ("no last look at the count", abort_after_signal, Weak::No, Step::NoLastLook),
    ("abort without release", abort_after_signal, Weak::Cas, Step::Right),
    ("abort read without acquire", abort_after_signal, Weak::Load, Step::Right),
    ("abort overwrites an abort", abort_first_stays, Weak::Overwrite, Step::Right),
];

/// What loom, or an assertion of the model, says about a mutant; none if it survives.
fn kill(row: &Row) -> Option<String> {
    let (model, m) = (row.1, Mutant { weak: row.2, step: row.3 });
    // A thread of its own: a model that ended by panic leaves loom's state in its thread.
    let end = std::thread::spawn(move || explore(model, m, Some(3))).join();
    let payload = end.err()?;
    let text = payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_default();
    // Giving up is not finding.
    assert!(!text.contains("exceeded"), "{}: {text}", row.0);
    Some(
        text.lines().map(str::trim).filter(|l| !l.is_empty()).take(2).collect::<Vec<_>>().join(" "),
    )
}

#[test]
#[expect(clippy::print_stdout, reason = "the table is what CI shows")]
fn every_planted_mutant_is_killed() {
    let mut killed = 0;
    let rows = || MUTANTS.iter().chain(&WAIT_MUTANTS);
    for row in rows() {
        let how = kill(row);
        killed += usize::from(how.is_some());
        println!("{:<36} {}", row.0, how.as_deref().unwrap_or("SURVIVED"));
    }
    let num = rows().count();
    println!("{killed} of {num} mutants killed");
    assert_eq!(killed, num, "a mutant survived: see the table");
}
