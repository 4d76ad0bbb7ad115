//! The loop of a wait, the bell that ends its sleep, and the records that others read while their
//! owner overwrites them. Nobody wakes a sleeper of these models but the bell: a wake-up that is
//! lost is a deadlock, which loom reports.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use loom::sync::atomic::AtomicU32;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use tilewire_symm::protocol::{self, Futex, Pace};

use super::{CODE, Mutant, Payload, Row, Step, W, Weak, until};

/// A word with the queue that the kernel keeps for it: the look at the word and the way into the
/// queue are one step for whoever wakes.
struct Bell {
    word: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
    weak: Weak,
}

impl Bell {
    fn new(weak: Weak) -> Self {
        Self { word: AtomicU32::new(0), queue: Mutex::new(()), woken: Condvar::new(), weak }
    }
}

impl Futex for Bell {
    /// Loom has no order of all `SeqCst` accesses. Where, as here, all of a word's are, a load
    /// returns the newest value, as a read-modify-write that changes nothing does.
    fn load(&self, order: Ordering) -> u32 {
        match (order, self.weak) {
            (Ordering::SeqCst, Weak::No) => self.word.fetch_add(0, Ordering::Acquire),
            _ => self.word.load(Ordering::Acquire),
        }
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_add(value, order)
    }

    fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_sub(value, order)
    }

    /// Without the limit.
    fn wait(&self, seen: u32, _limit: Duration) {
        let queue = self.queue.lock().unwrap();
        if self.word.fetch_add(0, Ordering::Relaxed) == seen {
            drop(self.woken.wait(queue).unwrap());
        }
    }

    fn wake_all(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
}

/// What a waiting rank and its peers share: payload, count, abort slot, bell and sleepers.
struct Page {
    payload: Payload,
    count: W,
    slot: W,
    bell: Bell,
    sleepers: Bell,
}

fn page(m: Mutant) -> Arc<Page> {
    let (payload, bell) = (Payload::new(), Bell::new(Weak::No));
    let (count, slot) = (W::new(0, Weak::No), W::new(0, Weak::No));
    Arc::new(Page { payload, count, slot, bell, sleepers: Bell::new(m.weak) })
}

fn ring(m: Mutant, p: &Page) {
    match m.step {
        Step::NoRing => {}
        Step::LookFirst => {
            let asleep = p.sleepers.load(Ordering::SeqCst) > 0;
            p.bell.fetch_add(1, Ordering::SeqCst);
            if asleep {
                p.bell.wake_all();
            }
        }
        Step::SameBell => {
            if p.sleepers.load(Ordering::SeqCst) > 0 {
                p.bell.wake_all();
            }
        }
        _ => protocol::ring(&p.bell, &p.sleepers),
    }
}

fn sleep(m: Mutant, p: &Page, still: impl FnOnce() -> bool) {
    let (bell, sleepers) = (&p.bell, &p.sleepers);
    match m.step {
        Step::BellLate => {
            sleepers.fetch_add(1, Ordering::SeqCst);
            if still() {
                bell.wait(bell.load(Ordering::SeqCst), Duration::MAX);
            }
            sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        Step::UnseenSleeper => {
            let seen = bell.load(Ordering::SeqCst);
            if still() {
                // Between this look and the count a ring finds nobody; the bell has changed then.
                if bell.load(Ordering::SeqCst) == seen {
                    let queue = bell.queue.lock().unwrap();
                    sleepers.fetch_add(1, Ordering::SeqCst);
                    drop(bell.woken.wait(queue).unwrap());
                    sleepers.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        _ => protocol::sleep(bell, sleepers, Duration::MAX, still),
    }
}

/// A wait for the count `expected`: the loop of the product, asleep from the first poll on.
fn wait(m: Mutant, p: &Page, expected: u64) -> Result<u64, protocol::AbortCode> {
    let pace = Pace { spins: 0, yields: 0 };
    let ready = || protocol::reached(&p.count, expected);
    let must_end = || protocol::raised(&p.slot, CODE.generation);
    if m.step == Step::SignalsOnly {
        // Aborts are looked at between sleeps alone.
        loop {
            let mut got = None;
            sleep(m, p, || {
                got = ready();
                got.is_none()
            });
            if let Some(end) = got.map(Ok).or_else(|| protocol::turn(ready, must_end)) {
                return end;
            }
        }
    }
    protocol::poll(pace, ready, must_end, |still| sleep(m, p, still))
}

fn send(m: Mutant, p: &Page) {
    if m.step == Step::RingFirst {
        ring(m, p);
    }
    protocol::signal(&p.count, 1);
    if m.step != Step::RingFirst {
        ring(m, p);
    }
}

/// A signal wakes who waits for it, whenever it comes, and the payload is there.
pub fn bell_signal(m: Mutant) {
    let p = page(m);
    let theirs = p.clone();
    let producer = thread::spawn(move || {
        theirs.payload.put(7);
        send(m, &theirs);
    });
    assert_eq!(wait(m, &p, 1), Ok(1));
    assert_eq!(p.payload.read(), 7);
    producer.join().unwrap();
}

/// Two peers signal: the first ring is not the last.
pub fn bell_of_two(m: Mutant) {
    let p = page(m);
    let peers = [p.clone(), p.clone()].map(|p| thread::spawn(move || send(m, &p)));
    assert_eq!(wait(m, &p, 2), Ok(2));
    peers.into_iter().for_each(|t| t.join().unwrap());
}

/// Two threads of a rank sleep on one bell: a ring wakes both.
pub fn bell_for_two(m: Mutant) {
    let p = page(m);
    let theirs = p.clone();
    let other = thread::spawn(move || assert_eq!(wait(m, &theirs, 1), Ok(1)));
    let theirs = p.clone();
    let producer = thread::spawn(move || send(m, &theirs));
    assert_eq!(wait(m, &p, 1), Ok(1));
    other.join().unwrap();
    producer.join().unwrap();
}

/// An abort ends a sleep as a signal does.
pub fn bell_abort(m: Mutant) {
    let p = page(m);
    let theirs = p.clone();
    let producer = thread::spawn(move || {
        protocol::raise(&theirs.slot, CODE);
        ring(m, &theirs);
    });
    assert_eq!(wait(m, &p, 1), Err(CODE));
    producer.join().unwrap();
}

const BODY: usize = 2;

/// One entry, where each new one overwrites the last, and two notes.
struct Records {
    entry: [W; 1 + BODY],
    notes: [W; 4],
}

fn records(m: Mutant) -> Arc<Records> {
    let word = || W::new(0, m.weak);
    Arc::new(Records { entry: [word(), word(), word()], notes: [word(), word(), word(), word()] })
}

fn publish(m: Mutant, r: &Records, seq: u64) {
    let body = [10 * seq, 10 * seq + 1];
    let word = |i: usize| &r.entry[i];
    match m.step {
        Step::NumberKept => {
            use protocol::Word;
            body.iter().enumerate().for_each(|(i, v)| word(1 + i).store(*v, Ordering::Relaxed));
            word(0).store(seq, Ordering::Release);
        }
        _ => protocol::publish(word, seq, &body),
    }
}

fn snapshot(m: Mutant, r: &Records, seq: u64) -> Option<[u64; BODY]> {
    use protocol::Word;
    let mut body = [0; BODY];
    let word = |i: usize| &r.entry[i];
    let found = match m.step {
        Step::OneLook => {
            let found = word(0).load(Ordering::Acquire) == seq;
            body.iter_mut().enumerate().for_each(|(i, v)| *v = word(1 + i).load(Ordering::Relaxed));
            found
        }
        _ => protocol::snapshot(word, seq, &mut body),
    };
    found.then_some(body)
}

/// Whoever reads an entry while the next one overwrites it gets it whole, or not at all.
pub fn entry_overwritten(m: Mutant) {
    let r = records(m);
    let theirs = r.clone();
    let owner = thread::spawn(move || (1..=2).for_each(|seq| publish(m, &theirs, seq)));
    for seq in 1..=2 {
        if let Some(body) = snapshot(m, &r, seq) {
            assert_eq!(body, [10 * seq, 10 * seq + 1], "half of entry {seq}");
        }
    }
    owner.join().unwrap();
}

/// A meeting whose entry stands is never found as its note alone.
pub fn entry_before_its_note(m: Mutant) {
    let r = records(m);
    let theirs = r.clone();
    let owner = thread::spawn(move || {
        if m.step == Step::NoteFirst {
            protocol::note(|i| &theirs.notes[i], 1, 100);
        }
        publish(m, &theirs, 1);
        protocol::note(|i| &theirs.notes[i], 1, 100);
    });
    let note = || protocol::noted(|i| &r.notes[i], 1).map(|fp| [fp, 0]);
    let entry = || snapshot(m, &r, 1);
    let found = until(|| match m.step {
        Step::NoSecondEntry => entry().or_else(note),
        _ => protocol::entry_or_note(entry, note),
    });
    assert_eq!(found, [10, 11], "the note, though the entry was there");
    owner.join().unwrap();
}

/// Notes meeting `seq` of this rank.
fn note(m: Mutant, words: &[W; 4], seq: u64) {
    use protocol::Word;
    match m.step {
        Step::OneNote => {
            words[0].store(0, Ordering::Relaxed);
            words[0].fence(Ordering::Release);
            words[1].store(100 * seq, Ordering::Relaxed);
            words[0].store(seq, Ordering::Release);
        }
        _ => protocol::note(|i| &words[i], seq, 100 * seq),
    }
}

/// Two ranks meet three times: each finds the other's note of each meeting, with its fingerprint.
pub fn notes_in_turn(m: Mutant) {
    let words = || [0; 4].map(|v| W::new(v, m.weak));
    let s = Arc::new([words(), words()]);
    let meet = move |s: &[[W; 4]; 2], me: usize| {
        let theirs = |seq| protocol::noted(|i| &s[1 - me][i], seq);
        for seq in 1..=3 {
            note(m, &s[me], seq);
            let found = until(|| {
                let found = theirs(seq);
                if found.is_none() && theirs(seq + 1).is_some() {
                    assert!(theirs(seq).is_some(), "meeting {seq} is lost");
                }
                found
            });
            assert_eq!(found, 100 * seq, "the fingerprint of meeting {seq}");
        }
    };
    let t = s.clone();
    let other = thread::spawn(move || meet(&t, 1));
    meet(&s, 0);
    other.join().unwrap();
}

/// Every argument of the bell, the loop and the records, broken.
pub const WAIT_MUTANTS: [Row; 18] = [
    ("no ring", bell_signal, Weak::No, Step::NoRing),
    ("ring before the signal", bell_signal, Weak::No, Step::RingFirst),
    ("sleepers counted without order", bell_signal, Weak::Load, Step::Right),
    ("sleepers looked at before the ring", bell_signal, Weak::No, Step::LookFirst),
    ("ring leaves the bell as it is", bell_signal, Weak::No, Step::SameBell),
    ("bell read behind the look", bell_signal, Weak::No, Step::BellLate),
    ("sleeper counted behind the look", bell_signal, Weak::No, Step::UnseenSleeper),
    ("no ring, two peers", bell_of_two, Weak::No, Step::NoRing),
    ("bell read behind the look, two sleep", bell_for_two, Weak::No, Step::BellLate),
    ("abort looked at between sleeps", bell_abort, Weak::No, Step::SignalsOnly),
    ("entry without release", entry_before_its_note, Weak::Store, Step::Right),
    ("entry read without acquire", entry_before_its_note, Weak::Load, Step::Right),
    ("number kept while overwritten", entry_overwritten, Weak::No, Step::NumberKept),
    ("overwrite without its fence", entry_overwritten, Weak::Fence, Step::Right),
    ("number looked at once", entry_overwritten, Weak::No, Step::OneLook),
    ("note before its entry", entry_before_its_note, Weak::No, Step::NoteFirst),
    ("entry not looked for again", entry_before_its_note, Weak::No, Step::NoSecondEntry),
    ("one note", notes_in_turn, Weak::No, Step::OneNote),
];
