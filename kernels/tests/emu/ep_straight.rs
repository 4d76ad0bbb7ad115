//! Dispatches of expert parallelism straight to receive buffers (zero copy), by both kernels: rows
//! against the host's arithmetic, to the bit; a buffer that is used again; ranks that take
//! different ones.

use tilewire_kernels::portable::EP_BULK;

use crate::ep::{BUFFERS, FEW, MOST_ROWS, ODD, PORTABLE, RANKS, WHOLE, load_bulk, unit};
use crate::ep_batch::{batch, batch_of};
use crate::ep_layers::{Layers, Libs, filled, go};
use crate::host::Lib;
use crate::run::Run;
use crate::team::RankMemory;
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![rows_go_straight_to_where_they_stay, rows_go_straight_by_bulk_copies];

impl Layers {
    /// Fills a receive buffer of all ranks with what no launch writes.
    pub fn refill(&self, n: usize) {
        let (at, len) = (self.buffer_at(n), self.world.buffer());
        for (r, v) in self.views.iter().enumerate() {
            (0..len / 8).for_each(|i| v.set(r, at + 8 * i, 0x7777_7777_7777_7777));
        }
    }

    /// The first bytes of a receive buffer.
    pub fn received(&self, r: usize, n: usize, len: usize) -> Vec<u8> {
        let at = self.buffer_at(n);
        let words = (0..len.div_ceil(8))
            .flat_map(|i| self.views[r].get(self.page(r), at + 8 * i).to_le_bytes());
        words.take(len).collect()
    }
}

/// Dispatches into receive buffers, alone and in turn with others.
fn straight(layers: &Layers, cases: &[(u64, usize, usize, bool)]) {
    let h = layers.world.hidden;
    for &(seed, capacity, buffer, rank_major) in cases {
        let b = batch_of(seed, capacity, h, rank_major);
        let at = (seed, RANKS);
        layers.run(at, &b, &|r| vec![layers.route(r, &b)]);
        if buffer == 0 {
            layers.run(at, &b, &|r| layers.dispatch(r, &b, true));
            b.dispatched();
            continue;
        }
        layers.refill(buffer);
        layers.run(at, &b, &|r| layers.dispatch_to(r, &b, (true, buffer)));
        b.dispatched_to(|_, r, used| layers.received(r, buffer, used));
    }
}

/// The backward of a combine without weights: a dispatch of rows alone, behind one with everything.
fn gradients(layers: &Layers, seed: u64) {
    let mut b = batch(seed, MOST_ROWS, layers.world.hidden);
    layers.run((seed, RANKS), &b, &|r| vec![layers.route(r, &b)]);
    layers.refill(2);
    for (rows_only, buffer) in [(false, 0), (true, 2), (true, 0)] {
        b.rows_only = rows_only;
        b.sides.iter().for_each(|s| s.recv.write(&vec![0x77u8; s.recv.len_bytes()]));
        layers.run((seed, RANKS), &b, &|r| layers.dispatch_to(r, &b, (true, buffer)));
        b.dispatched_to(|s, r, used| match buffer {
            0 => s.recv.read::<u8>()[..used].to_vec(),
            n => layers.received(r, n, used),
        });
    }
}

/// Seed, capacity, buffer, rank-major or expert-major.
const STRAIGHT: [(u64, usize, usize, bool); 8] = [
    (1, MOST_ROWS, 1, false),
    (2, MOST_ROWS, 2, false),
    (7, MOST_ROWS, 1, true),
    (3, 20, 1, false),
    (4, MOST_ROWS, 0, false),
    (8, 20, 2, true),
    (9, MOST_ROWS, 0, true),
    (5, 1, 1, false),
];

/// Two batches through one buffer, each read by a kernel behind its dispatch: the second one's rows
/// may not come before, although a rank may be ahead of another.
fn in_turn(layers: &Layers, seed: u64, rank_major: bool) {
    let [a, b] = [5, 6].map(|seed| batch_of(seed, MOST_ROWS, layers.world.hidden, rank_major));
    let received = a.received();
    let rows: Vec<i32> = (0..received as i32).collect();
    let rows = filled(&rows);
    let row_bytes = layers.world.payload() as u64;
    layers.run((seed, RANKS), &a, &|r| vec![layers.route(r, &a)]);
    layers.run((seed, RANKS), &b, &|r| vec![layers.route(r, &b)]);
    layers.refill(1);
    let mut run = Run::new(seed);
    run.max_steps = 50_000_000;
    for r in 0..RANKS {
        let mut list = Vec::new();
        for batch in [&a, &b] {
            let s = &batch.sides[r];
            list.extend(layers.dispatch_to(r, batch, (true, 1)));
            // What stands for tokens is the buffer.
            let mut layer = layers.layer(r, MOST_ROWS);
            layer.tokens = layers.buffer(r, 1) - r as u64 * layer.stride;
            layer.row_stride = row_bytes;
            // Again and again: the last one has to find the same rows.
            for _ in 0..4 {
                let gather = go(layers.libs.plain, "tw_ep_gather", received as u32).arg(&layer);
                let gather = gather.arg(&rows.addr()).arg(&s.recv.addr());
                list.push(gather.arg(&row_bytes).arg(&0u64));
            }
            run = run.memory(&s.handle).memory([&s.x, &s.w, &s.recv, &s.recv_w, &s.index]);
        }
        run = run.stream(r as u32, list).memory([&*layers.views[r], &layers.states[r]]);
    }
    let team = layers.team.ranks.iter().flat_map(RankMemory::all);
    run.memory(team).memory([&layers.first, &rows]).go().unwrap();
    a.dispatched();
    b.dispatched();
}

/// One rank takes its rows elsewhere: nobody's output looks like a result, and everybody is told
/// why.
fn differ(layers: &Layers, buffers: [usize; RANKS]) {
    let b = batch(7, MOST_ROWS, layers.world.hidden);
    layers.run((7, RANKS), &b, &|r| vec![layers.route(r, &b)]);
    (1..=BUFFERS).for_each(|n| layers.refill(n));
    layers.run((7, RANKS), &b, &|r| layers.dispatch_to(r, &b, (true, buffers[r])));
    for (r, s) in b.sides.iter().enumerate() {
        assert_eq!(layers.team.fault(r) >> 32 & 0xff, 5, "rank {r} is told of a bad input");
        let spoiled = |v: Vec<u8>| v.iter().all(|v| *v == u8::MAX);
        let x = match buffers[r] {
            0 => s.recv.read::<u8>(),
            n => layers.received(r, n, MOST_ROWS * layers.world.payload()),
        };
        let all = spoiled(x) && spoiled(s.recv_w.read());
        assert!(all, "rank {r} has what looks like a result");
    }
}

pub fn some_straight(lib: &'static Lib) {
    let layers = || Layers::new(Libs::plain(lib), ODD);
    straight(&layers(), &STRAIGHT);
    let turns = layers();
    (0..6).for_each(|seed| in_turn(&turns, seed, false));
    (6..9).for_each(|seed| ahead(&turns, seed, false));
    (9..12).for_each(|seed| in_turn(&turns, seed, true));
    only_counted(&turns);
    gradients(&turns, 12);
    differ(&layers(), [1, 1, 2, 1]);
    differ(&layers(), [1, 0, 1, 1]);
}

pub fn some_straight_bulk(lib: &'static Lib) {
    let libs = Libs { push: Some(lib), ..Libs::plain(*PORTABLE) };
    let layers = || Layers::new(libs, WHOLE);
    straight(&layers(), &STRAIGHT);
    // What pads experts has no rank-major row: in some of these it would come behind one that has
    // arrived.
    let cases: Vec<_> = (10..20).map(|seed| (seed, MOST_ROWS, 1, true)).collect();
    straight(&layers(), &cases);
    let turns = layers();
    (0..6).for_each(|seed| ahead(&turns, seed, seed % 2 == 1));
    only_counted(&turns);
    gradients(&turns, 12);
    differ(&layers(), [2, 1, 1, 1]);
    differ(&layers(), [0, 1, 1, 1]);
}

/// A phase that leaves its rows in the area, as the backward of combine does, tells the rank-major
/// rows of records, too.
fn only_counted(layers: &Layers) {
    let b = batch_of(7, MOST_ROWS, layers.world.hidden, true);
    layers.run((7, RANKS), &b, &|r| vec![layers.route(r, &b)]);
    layers.run((7, RANKS), &b, &|r| layers.dispatch(r, &b, false));
    b.counted();
}

/// Two batches to two buffers, one behind the other: a rank that has all rows of the first says
/// that those of the second may come while warps of others have not looked yet.
fn ahead(layers: &Layers, seed: u64, rank_major: bool) {
    let [a, b] = [5, 6].map(|seed| batch_of(seed, MOST_ROWS, layers.world.hidden, rank_major));
    for batch in [&a, &b] {
        layers.run((seed, RANKS), batch, &|r| vec![layers.route(r, batch)]);
    }
    (1..=BUFFERS).for_each(|n| layers.refill(n));
    layers.run_all((seed, RANKS), &[&a, &b], &|r| {
        let mut list = layers.dispatch_to(r, &a, (true, 1));
        list.extend(layers.dispatch_to(r, &b, (true, 2)));
        list
    });
    a.dispatched_to(|_, r, used| layers.received(r, 1, used));
    b.dispatched_to(|_, r, used| layers.received(r, 2, used));
}

fn rows_go_straight_to_where_they_stay() {
    some_straight(*PORTABLE);
}

fn rows_go_straight_by_bulk_copies() {
    some_straight_bulk(load_bulk(EP_BULK.emu_text()));
    some_straight_bulk(unit(&EP_BULK, EP_BULK.emu_text(), FEW));
}
