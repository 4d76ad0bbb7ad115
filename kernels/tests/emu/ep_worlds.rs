//! Expert parallelism of one to eight ranks, and of as many as there may be: every phase and
//! layout, forward and backward, by both kernels, with choices that are the same, dropped, or all
//! of one rank; launch after launch.

use std::sync::LazyLock;

use tilewire_core::DType;
use tilewire_kernels::portable::{EP, EP_BULK, EP_RETURN, EP_RETURN_ENTRIES, EP_RETURN_TOKENS};

use crate::ep::{FEW, Room, unit};
use crate::ep_batch::{Batch, Rows, Sum};
use crate::ep_layers::{Layers, Libs, Side};
use crate::ep_world::{Choices, World};
use crate::host::Lib;
use crate::{Test, tests};
use Choices::{Distinct, Masked, Of, Repeated};

pub const TESTS: &[Test] = tests![
    worlds_of_one_to_five_ranks,
    eight_ranks_with_eight_choices,
    eight_ranks_with_fp8_tokens,
    what_comes_to_one_of_eight_ranks,
    ranks_whose_memory_is_not_in_even_steps,
    sixteen_ranks_return_by_bulk_loads,
    as_many_ranks_and_choices_as_there_may_be,
    what_mutants_of_gradients_must_fail,
];

/// As many tokens, copies and ranks as the kernel on GPUs is compiled for.
pub const ROOM: Room =
    Room { tokens: EP_RETURN_TOKENS as usize, entries: EP_RETURN_ENTRIES as usize, ..FEW };

/// All kernels for results of one type.
struct Units {
    plain: &'static Lib,
    push: &'static Lib,
    returns: &'static Lib,
    room: Room,
}

impl Units {
    fn new(room: Room) -> Self {
        Self {
            room,
            plain: unit(&EP, EP.emu_text(), room),
            push: unit(&EP_BULK, EP_BULK.emu_text(), room),
            returns: unit(&EP_RETURN, EP_RETURN.emu_text(), room),
        }
    }

    fn libs(&self, bulk: bool) -> Libs {
        let some = |lib| bulk.then_some(lib);
        Libs {
            plain: self.plain,
            push: some(self.push),
            returns: some(self.returns),
            room: self.room,
        }
    }
}

static IN_F32: LazyLock<Units> = LazyLock::new(|| Units::new(ROOM));
static IN_BF16: LazyLock<Units> = LazyLock::new(|| Units::new(Room { mantissa: 7, ..ROOM }));
static UNEVEN: LazyLock<Units> = LazyLock::new(|| Units::new(Room { uneven: true, ..ROOM }));

fn units(w: &World) -> &'static Units {
    if w.out == DType::F32 { &IN_F32 } else { &IN_BF16 }
}

/// Rows of f32 of a whole number of pieces.
fn world(experts: &[usize], tokens: &[usize], k: usize) -> World {
    let max_tokens = *tokens.iter().max().unwrap();
    let mut w = World {
        experts: experts.to_vec(),
        tokens: tokens.to_vec(),
        max_tokens,
        k,
        align: 1,
        chunk: [3, 2],
        slices: [1, 2],
        ..World::usual(8)
    };
    w.most_rows = w.worst_case();
    w
}

const LAYOUTS: [Rows; 3] = [Rows::ExpertMajor, Rows::RankMajor, Rows::Flat];

/// All phases of two batches, one behind the other and without meetings between, then of one more
/// in the same memory. `straight`: rows of a dispatch to receive buffers.
fn all_phases(
    libs: Libs,
    w: &World,
    (rows, straight): (Rows, bool),
    (seed, limit, choices): (u64, usize, &[Choices]),
) {
    let mut layers = Layers::of(libs, w.clone());
    // Of kernels' time, which passes by steps of all ranks.
    layers.team.timeout_ns = 20_000_000_000;
    let batch = |n: usize| {
        let size = (seed + n as u64, w.most_rows, limit);
        Batch::of(w, size, rows, choices[n % choices.len()])
    };
    let straight = straight && rows != Rows::Flat;
    for some in [0..2, 2..3] {
        let first = some.start;
        let batches: Vec<Batch> = some.map(batch).collect();
        (1..=2).for_each(|n| layers.refill(n));
        // Each batch its own, in turn the other one.
        let buffer = |i: usize| if straight { 1 + (i + first / 2) % 2 } else { 0 };
        // By rows of the area both are the same kernels.
        let backward = |i: usize| match rows {
            Rows::ExpertMajor => vec![true, false],
            _ => vec![(first + i).is_multiple_of(2)],
        };
        let sums = |i: usize| {
            let (weighted, grads) = ((first + i).is_multiple_of(2), (first + i) % 3 != 2);
            [Sum::Combine { weighted }, Sum::DispatchBwd { grads }]
        };
        let each: Vec<&Batch> = batches.iter().collect();
        layers.run_all((seed, w.size()), &each, &|r| {
            let mut list = Vec::new();
            for (i, b) in batches.iter().enumerate() {
                list.push(layers.route(r, b));
                list.extend(layers.dispatch_to(r, b, (true, buffer(i))));
                list.extend(sums(i).map(|sum| layers.return_rows(r, b, sum)));
                for weighted in backward(i) {
                    list.extend(layers.combine_bwd((r, b), weighted, 0));
                }
            }
            list
        });
        for (i, b) in batches.iter().enumerate() {
            b.routed();
            b.dispatched_to(|s, r, len| match buffer(i) {
                0 => s.recv.read::<u8>()[..len].to_vec(),
                n => layers.received(r, n, len),
            });
            sums(i).into_iter().for_each(|sum| b.summed(sum));
            for weighted in backward(i) {
                let dy = |s: &Side| s.dy[usize::from(weighted)].read::<u8>();
                b.graded(weighted, |s, _, len| dy(s)[..len].to_vec());
            }
        }
        let faults: Vec<u64> = (0..w.size()).map(|r| layers.team.fault(r)).collect();
        assert!(faults.iter().all(|f| *f == 0), "{faults:x?}");
    }
}

/// Every layout by one of both kernels each, in turn with the seed; rows straight to receive
/// buffers and by areas.
fn all_layouts(w: &World, seed: u64, limit: usize, choices: &[Choices]) {
    for (i, rows) in LAYOUTS.into_iter().enumerate() {
        let turn = i + seed as usize;
        let (bulk, straight) = (turn.is_multiple_of(2), turn % 4 < 2);
        let at = seed + 10 * i as u64;
        all_phases(units(w).libs(bulk), w, (rows, straight), (at, limit, choices));
    }
}

fn worlds_of_one_to_five_ranks() {
    let one = world(&[3], &[7], 2);
    all_layouts(&one, 1, one.most_rows, &[Distinct, Repeated]);
    let two = World { align: 4, sms: 1, bulk: 1, ..world(&[1, 4], &[0, 9], 1) };
    all_layouts(&two, 2, two.worst_case(), &[Distinct, Of(0), Repeated]);
    // More choices than a rank has experts, and than there are in all.
    let three = World { sms: 5, bulk: 7, ..world(&[0, 5, 1], &[5, 9, 3], 8) };
    all_layouts(&three, 3, three.most_rows, &[Repeated, Masked, Of(1)]);
    let five = World { align: 8, ..world(&[2, 1, 0, 3, 2], &[4, 6, 1, 0, 5], 2) };
    all_layouts(&five, 4, 7, &[Distinct, Repeated, Of(3)]);
}

fn eight_ranks_with_eight_choices() {
    let even = world(&[2; 8], &[4, 3, 0, 5, 2, 4, 1, 3], 8);
    all_layouts(&even, 5, even.most_rows, &[Distinct, Repeated, Distinct]);
    let uneven = world(&[4, 0, 1, 2, 3, 1, 0, 5], &[2, 5, 3, 0, 4, 1, 5, 2], 8);
    let uneven = World { align: 8, sms: 2, bulk: 1, ..uneven };
    all_layouts(&uneven, 6, 30, &[Repeated, Distinct]);
    // More blocks than there is work, and rows that bulk copies do not take.
    let odd = World { hidden: 7, align: 3, sms: 9, routers: 3, ..world(&[1; 8], &[2; 8], 1) };
    for (i, rows) in LAYOUTS.into_iter().enumerate() {
        let choices = (7, 11, &[Distinct, Repeated][..]);
        all_phases(IN_F32.libs(false), &odd, (rows, i == 0), choices);
    }
}

/// Tokens of FP8 with scales of blocks, results in bf16.
fn eight_ranks_with_fp8_tokens() {
    let w = world(&[1, 2, 1, 3, 0, 1, 2, 1], &[2, 1, 3, 0, 2, 3, 1, 2], 4);
    let (dtype, out) = (DType::F8E4M3, DType::BF16);
    let w = World { hidden: 48, scales: 3, dtype, out, align: 4, ..w };
    let w = World { most_rows: w.worst_case(), ..w };
    all_layouts(&w, 8, w.most_rows, &[Distinct, Repeated]);
}

/// One rank receives everything, with room for it and without; then another one.
fn what_comes_to_one_of_eight_ranks() {
    let w = World { align: 4, bulk: 3, ..world(&[1, 1, 1, 1, 1, 2, 1, 1], &[3; 8], 2) };
    let w = World { most_rows: w.worst_case(), ..w };
    all_layouts(&w, 11, w.most_rows, &[Of(5), Of(0), Masked]);
    all_layouts(&w, 10, 9, &[Of(7), Of(5)]);
}

/// As NVSHMEM may map it: the memory of the ranks is in no order.
fn ranks_whose_memory_is_not_in_even_steps() {
    let five = World { align: 4, ..world(&[2, 1, 0, 3, 2], &[4, 6, 1, 0, 5], 3) };
    let eight = world(&[1, 2, 1, 0, 2, 1, 1, 1], &[2, 1, 3, 0, 2, 3, 1, 2], 2);
    for (n, w) in [five, eight].into_iter().enumerate() {
        for (i, rows) in LAYOUTS.into_iter().enumerate() {
            let (bulk, straight) = ((n + i) % 2 == 0, rows != Rows::Flat);
            let choices = (40 + (3 * n + i) as u64, w.most_rows, &[Distinct, Repeated][..]);
            all_phases(UNEVEN.libs(bulk), &w, (rows, straight), choices);
        }
    }
}

/// The most ranks, and copies of a token, that a combine by bulk loads takes.
fn sixteen_ranks_return_by_bulk_loads() {
    let w = World { bulk: 1, sms: 1, ..world(&[1; 16], &[1; 16], ROOM.entries) };
    let sums = [Sum::Combine { weighted: true }, Sum::DispatchBwd { grads: true }];
    once(IN_F32.libs(true), &w, (11, w.most_rows), &sums);
}

/// 64 ranks are a bit each of a mask, 32 choices a lane each; combine then is the portable
/// kernel's.
fn as_many_ranks_and_choices_as_there_may_be() {
    let w = World { bulk: 1, sms: 1, routers: 1, ..world(&[1; 64], &[1; 64], 32) };
    let libs = Libs { returns: None, ..IN_F32.libs(true) };
    once(libs, &w, (12, 20), &[Sum::DispatchBwd { grads: true }]);
}

/// Routing and dispatch of one batch, and what is returned of it.
fn once(libs: Libs, w: &World, (seed, limit): (u64, usize), sums: &[Sum]) {
    let mut layers = Layers::of(libs, w.clone());
    layers.team.timeout_ns = 20_000_000_000;
    let b = Batch::of(w, (seed, w.most_rows, limit), Rows::ExpertMajor, Distinct);
    layers.run((seed, w.size()), &b, &|r| {
        let mut list = vec![layers.route(r, &b)];
        list.extend(layers.dispatch(r, &b, true));
        list.extend(sums.iter().map(|sum| layers.return_rows(r, &b, *sum)));
        list
    });
    b.routed();
    b.dispatched();
    sums.iter().for_each(|sum| b.summed(*sum));
}

fn few(hidden: usize) -> World {
    World { hidden, align: 4, ..world(&[1, 3, 2], &[4, 0, 6], 4) }
}

/// Backward phases on three ranks, some choices dropped: what mutants of them must fail. Rows of
/// more quads than a block has threads.
pub fn some_gradients(lib: &'static Lib) {
    let w = few(260);
    for (i, rows) in [Rows::Flat, Rows::ExpertMajor].into_iter().enumerate() {
        let choices = (13 + i as u64, 14, &[Distinct, Repeated][..]);
        all_phases(Libs { room: ROOM, ..Libs::plain(lib) }, &w, (rows, false), choices);
    }
}

pub fn some_gradients_by_bulk(lib: &'static Lib) {
    let libs = Libs { returns: Some(lib), ..IN_F32.libs(false) };
    for (i, rows) in LAYOUTS.into_iter().enumerate() {
        let choices = (16 + i as u64, 14, &[Distinct, Repeated][..]);
        all_phases(libs, &few(8), (rows, false), choices);
    }
}

/// More ranks than words of counts are in flight.
pub fn of_nine_ranks(lib: &'static Lib) {
    let w = world(&[1; 9], &[2; 9], 3);
    let libs = Libs { room: ROOM, ..Libs::plain(lib) };
    once(libs, &w, (20, w.most_rows), &[Sum::Combine { weighted: true }]);
}

/// More records than a block has threads.
pub fn flat_rows(lib: &'static Lib) {
    let w = World::usual(8);
    let layers = Layers::of(Libs::plain(lib), w.clone());
    let b = Batch::new(&w, (21, w.most_rows), Rows::Flat);
    layers.run((21, w.size()), &b, &|r| {
        let mut list = vec![layers.route(r, &b)];
        list.extend(layers.dispatch(r, &b, true));
        list
    });
    b.dispatched();
}

fn what_mutants_of_gradients_must_fail() {
    flat_rows(IN_F32.plain);
    some_gradients(IN_F32.plain);
    some_gradients_by_bulk(IN_F32.returns);
    of_nine_ranks(IN_F32.plain);
}
