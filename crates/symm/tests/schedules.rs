//! Three ranks, one of which dies at a random step: shuttle runs the functions of `protocol.rs`
//! under random schedules. It sees no reordered memory (`models.rs` is for that), but three ranks
//! and a crash, which exhaustive search does not reach.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::rand::Rng;
use shuttle::sync::atomic::AtomicU64;
use shuttle::thread;
use tilewire_symm::protocol::{self, AbortCode, Word};

const RANKS: usize = 3;
const ROUNDS: u64 = 3;
const GENERATION: u32 = 5;

struct W(AtomicU64);

impl Word for W {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }

    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, success, failure)
    }

    /// Shuttle runs one thread at a time.
    fn fence(&self, _order: Ordering) {}
}

/// The page of one rank: what its peers write.
struct Page {
    inbox: [W; RANKS],
    abort: [W; RANKS],
    /// Written by the rank's own monitor.
    dead: W,
    /// One word from each rank for each round.
    data: Vec<[W; RANKS]>,
}

fn words() -> [W; RANKS] {
    [0; RANKS].map(|v| W(AtomicU64::new(v)))
}

impl Page {
    fn new() -> Self {
        let data = (0..=ROUNDS).map(|_| words()).collect();
        Self { inbox: words(), abort: words(), dead: W(AtomicU64::new(0)), data }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Dead(usize),
    Aborted(AbortCode),
}

/// Why a wait must end, in the order of `wait.rs`: a death, then a peer's abort.
fn must_end(page: &Page) -> Option<End> {
    let dead = page.dead.load(Ordering::Acquire);
    if dead != 0 {
        return Some(End::Dead(dead.trailing_zeros() as usize));
    }
    page.abort.iter().find_map(|slot| protocol::raised(slot, GENERATION)).map(End::Aborted)
}

/// Puts, arrives everywhere, and waits for everybody. `steps` counts down to the crash.
fn round(
    pages: &[Page],
    me: usize,
    epoch: u64,
    steps: &mut Option<usize>,
) -> Option<Result<(), End>> {
    let mut alive = || match steps {
        Some(0) => false,
        Some(n) => {
            *n -= 1;
            true
        }
        None => true,
    };
    for p in (1..RANKS).map(|i| (me + i) % RANKS) {
        if !alive() {
            return None;
        }
        pages[p].data[epoch as usize][me].store(epoch * 10 + me as u64, Ordering::Relaxed);
        if !alive() {
            return None;
        }
        protocol::arrive(&pages[p].inbox[me], epoch);
    }
    for p in (1..RANKS).map(|i| (me + i) % RANKS) {
        let ready = || protocol::arrived(&pages[me].inbox[p], epoch).then_some(());
        loop {
            match protocol::turn(ready, || must_end(&pages[me])) {
                Some(Ok(())) => break,
                Some(Err(end)) => return Some(Err(end)),
                None => thread::yield_now(),
            }
        }
        let seen = pages[me].data[epoch as usize][p].load(Ordering::Relaxed);
        assert_eq!(seen, epoch * 10 + p as u64, "rank {me} round {epoch} from {p}");
    }
    Some(Ok(()))
}

/// All rounds of one rank; `None` if it crashed. A rank that fails tells its peers.
fn rank(pages: &[Page], me: usize, mut steps: Option<usize>) -> Option<Result<(), End>> {
    for epoch in 1..=ROUNDS {
        if let Err(end) = round(pages, me, epoch, &mut steps)? {
            let about = match end {
                End::Dead(r) => r as u8,
                End::Aborted(code) => code.about,
            };
            let code = AbortCode { generation: GENERATION, reason: 2, about, from: me as u8 };
            for p in (0..RANKS).filter(|&p| p != me) {
                protocol::raise(&pages[p].abort[me], code);
            }
            return Some(Err(end));
        }
    }
    Some(Ok(()))
}

/// How often each outcome was seen.
#[derive(Default)]
struct Seen {
    completed: AtomicUsize,
    dead: AtomicUsize,
    aborted: AtomicUsize,
}

fn team(seen: &Seen) {
    let pages: Arc<Vec<Page>> = Arc::new((0..RANKS).map(|_| Page::new()).collect());
    // Two steps for each peer and round; beyond the last of them nobody crashes.
    let most = 4 * ROUNDS as usize + 2;
    let crash = shuttle::rand::thread_rng().gen_range(0..most);
    let start = |me: usize, steps| {
        let pages = pages.clone();
        thread::spawn(move || rank(&pages, me, steps))
    };
    let (victim, others) = (start(2, Some(crash)), [start(0, None), start(1, None)]);
    let crashed = victim.join().unwrap().is_none();
    if crashed {
        // Each rank's own monitor notices in its own time.
        let monitors = [0, 1].map(|r| {
            let pages = pages.clone();
            thread::spawn(move || pages[r].dead.store(1 << 2, Ordering::Release))
        });
        monitors.into_iter().for_each(|m| m.join().unwrap());
    }
    for t in others {
        match t.join().unwrap().expect("only the victim crashes") {
            Ok(()) => seen.completed.fetch_add(1, Ordering::Relaxed),
            Err(End::Dead(r)) => {
                assert_eq!(r, 2);
                seen.dead.fetch_add(1, Ordering::Relaxed)
            }
            Err(End::Aborted(code)) => {
                assert_eq!((code.generation, code.about), (GENERATION, 2));
                seen.aborted.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

#[test]
fn three_ranks_and_a_crash_at_any_step_end_with_data_or_with_its_name() {
    let seen = Arc::new(Seen::default());
    let s = seen.clone();
    shuttle::check_random_with_seed(move || team(&s), 20, 4000);
    for (what, n) in
        [("completed", &seen.completed), ("dead", &seen.dead), ("aborted", &seen.aborted)]
    {
        assert!(n.load(Ordering::Relaxed) > 50, "{what}: {}", n.load(Ordering::Relaxed));
    }
}
