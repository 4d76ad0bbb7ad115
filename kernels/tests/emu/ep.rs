//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu` on four ranks: routing against the oracle, rows and sums
//! against the arithmetic of the host operation, to the bit; launch after launch in one memory; a
//! rank that stays away.

use std::sync::LazyLock;

use tilewire_kernels::Source;
use tilewire_kernels::portable::{EP, EP_BULK, EP_RETURN, EP_THREADS, EP_UNEVEN, ep_defines};

use crate::compile::Unit;
use crate::ep_batch::{Batch, Rows, Sum, batch};
use crate::ep_layers::{Layers, Libs};
use crate::host::{Lib, RUNTIME};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    tokens_go_to_their_experts_and_back,
    tokens_go_by_bulk_copies,
    tokens_come_back_by_bulk_loads,
];

/// Elements of a row: more words than a warp has lanes, and a whole number of pieces.
pub const ODD: usize = 38;
pub const WHOLE: usize = 8;
/// What `World::usual` has.
pub const RANKS: usize = 4;
pub const MOST_ROWS: usize = 150;
pub const PIECE: usize = 16;
pub const THREADS: u32 = 64;
pub const BUFFERS: usize = 2;
/// What a unit is compiled for.
#[derive(Clone, Copy)]
pub struct Room {
    /// Mantissa bits of results.
    pub mantissa: u64,
    /// Bulk copies of a warp that are on their way.
    pub pieces: u64,
    /// The most tokens of a chunk that returns, and ranks or copies of a token.
    pub tokens: usize,
    pub entries: usize,
    /// The ranks' memory is not in even steps.
    pub uneven: bool,
}

/// As few as `World::usual` needs.
pub const FEW: Room = Room { mantissa: 23, pieces: 1, tokens: 11, entries: 4, uneven: false };

impl Room {
    /// Bytes of dynamic shared memory of a combine by bulk loads.
    pub fn return_bytes(self) -> usize {
        3 * (4 * PIECE + self.tokens * (4 + 8 * self.entries))
    }
}

pub fn unit(source: &Source, text: String, room: Room) -> &'static Lib {
    let value = |d: &&'static str| {
        let own = match *d {
            "TW_OUT_MANTISSA" => ep_defines(room.mantissa)[0].1,
            "TW_EP_BULK_PUSH" | "TW_EP_BULK_LAY" | "TW_EP_RETURN_PUSH" => 2,
            "TW_EP_RETURN_SUM" => 1,
            "TW_EP_RETURN_STAGES" => 3,
            "TW_EP_RETURN_SLICE" => PIECE as u64,
            "TW_EP_RETURN_TOKENS" => room.tokens as u64,
            "TW_EP_RETURN_ENTRIES" => room.entries as u64,
            "TW_EP_BULK_PIECES" => room.pieces,
            // Two stores a row.
            "TW_EP_BULK_ZERO" => PIECE as u64,
            // Two pieces a row.
            "TW_EP_BULK_PIECE" => PIECE as u64,
            // Small blocks: several of them with few choices.
            _ => u64::from(THREADS),
        };
        (*d, own)
    };
    assert!(EP_THREADS.is_multiple_of(u64::from(THREADS)));
    RUNTIME.load(&Unit {
        name: source.name,
        text,
        defines: source
            .defines
            .iter()
            .map(value)
            .chain(room.uneven.then_some((EP_UNEVEN, 1)))
            .collect(),
        kernels: source.kernels.to_vec(),
        smem: room.return_bytes().max(2048),
    })
}

pub fn load(text: String) -> &'static Lib {
    unit(&EP, text, FEW)
}

pub fn load_bulk(text: String) -> &'static Lib {
    unit(&EP_BULK, text, Room { pieces: 2, ..FEW })
}

pub fn load_back(text: String) -> &'static Lib {
    unit(&EP_RETURN, text, FEW)
}

/// Kernels of the portable unit, for tests of the other.
pub static PORTABLE: LazyLock<&'static Lib> = LazyLock::new(|| load(EP.emu_text()));

/// Rows of a dispatch: their order, and true if kernels behind it bring them there.
type Order = (Rows, bool);

/// Launch after launch: dispatch with weights, then a combine, weighted, or the backward of a
/// dispatch where rows are not expert-major.
fn exchanges(layers: &Layers, cases: &[(u64, usize, Order)]) {
    for &(seed, capacity, (rows, later)) in cases {
        let b = Batch::new(&layers.world, (seed, capacity), rows);
        let at = (seed, RANKS);
        layers.run(at, &b, &|r| vec![layers.route(r, &b)]);
        b.routed();
        layers.run(at, &b, &|r| layers.dispatch(r, &b, !later));
        b.dispatched();
        let sum = match rows {
            Rows::ExpertMajor => Sum::Combine { weighted: true },
            _ => Sum::DispatchBwd { grads: false },
        };
        layers.run(at, &b, &|r| vec![layers.return_rows(r, &b, sum)]);
        b.summed(sum);
    }
}

const EXPERT_MAJOR: Order = (Rows::ExpertMajor, false);
const LATER: Order = (Rows::ExpertMajor, true);
const RANK_MAJOR: Order = (Rows::RankMajor, false);

pub fn some_routings(lib: &'static Lib) {
    let layers = Layers::new(Libs::plain(lib), ODD);
    let aligned = [(1, 150, EXPERT_MAJOR), (2, 150, LATER), (3, 20, EXPERT_MAJOR)];
    exchanges(&layers, &aligned);
    exchanges(&layers, &[(7, 150, RANK_MAJOR), (4, 1, EXPERT_MAJOR), (8, 20, RANK_MAJOR)]);
    // Two batches in flight, without a meeting between launches: a rank may be one ahead of
    // another.
    let (a, b) = (batch(5, 150, ODD), batch(6, 150, ODD));
    for seed in 0..3 {
        layers.run_all((seed, RANKS), &[&a, &b], &|r| {
            [&a, &b, &a, &b].map(|b| layers.route(r, b)).into()
        });
        a.routed();
        b.routed();
    }
    for seed in 5..9 {
        in_flight(&layers, seed, &[&a, &b]);
    }
}

/// Routings, dispatches and combines of two batches, one behind the other.
fn in_flight(layers: &Layers, seed: u64, batches: &[&Batch; 2]) {
    let [a, b] = batches;
    layers.run_all((seed, RANKS), batches, &|r| {
        let mut all: Vec<_> = [a, b, a, b].map(|b| layers.route(r, b)).into();
        for b in *batches {
            all.extend(layers.dispatch(r, b, true));
        }
        all.extend(batches.map(|b| layers.combine(r, b)));
        all
    });
    for batch in batches {
        batch.routed();
        batch.dispatched();
        batch.summed(Sum::Combine { weighted: true });
    }
}

fn tokens_go_to_their_experts_and_back() {
    some_routings(*PORTABLE);
}

const BULK: [(u64, usize, Order); 5] = [
    (1, 150, EXPERT_MAJOR),
    (7, 150, RANK_MAJOR),
    (2, 150, EXPERT_MAJOR),
    (3, 20, EXPERT_MAJOR),
    (8, 20, RANK_MAJOR),
];

pub fn some_bulk_routings(lib: &'static Lib) {
    let libs = Libs { push: Some(lib), ..Libs::plain(*PORTABLE) };
    exchanges(&Layers::new(libs, WHOLE), &BULK);
}

pub fn some_bulk_returns(lib: &'static Lib) {
    let libs = Libs { returns: Some(lib), ..Libs::plain(*PORTABLE) };
    exchanges(&Layers::new(libs, WHOLE), &BULK);
}

fn tokens_come_back_by_bulk_loads() {
    some_bulk_returns(load_back(EP_RETURN.emu_text()));
}

fn tokens_go_by_bulk_copies() {
    some_bulk_routings(load_bulk(EP_BULK.emu_text()));
    some_bulk_routings(unit(&EP_BULK, EP_BULK.emu_text(), FEW));
}
