//! A rank that stays away from a phase of expert parallelism: the others end, and what they leave
//! is poison.

use tilewire_kernels::portable::{EP_BULK, EP_RETURN};

use crate::ep::{ODD, PORTABLE, RANKS, WHOLE, load_back, load_bulk};
use crate::ep_batch::batch;
use crate::ep_layers::{Layers, Libs};
use crate::host::Lib;
use crate::memory::Memory;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![a_rank_that_stays_away_poisons_the_others];

/// The last rank makes no launch: the others end, and nothing that they leave looks like a result.
pub fn staying_away(lib: &'static Lib) {
    (0..3).for_each(|phase| stay_away(Libs::plain(lib), ODD, phase));
}

pub fn staying_away_bulk(lib: &'static Lib) {
    stay_away(Libs { push: Some(lib), ..Libs::plain(*PORTABLE) }, WHOLE, 1);
}

pub fn staying_away_back(lib: &'static Lib) {
    stay_away(Libs { returns: Some(lib), ..Libs::plain(*PORTABLE) }, WHOLE, 2);
}

fn stay_away(libs: Libs, hidden: usize, phase: usize) {
    let layers = Layers::new(libs, hidden);
    let b = batch(7, 150, hidden);
    let make = |r: usize, phase: usize| match phase {
        0 => vec![layers.route(r, &b)],
        1 => layers.dispatch(r, &b, true),
        _ => vec![layers.combine(r, &b)],
    };
    for done in 0..phase {
        layers.run((7, RANKS), &b, &|r| make(r, done));
    }
    layers.run((7, RANKS - 1), &b, &|r| make(r, phase));
    for (r, s) in b.sides.iter().enumerate().take(RANKS - 1) {
        // A rank without tokens has nothing to wait for in a combine.
        let waits = phase < 2 || s.tokens > 0;
        assert_eq!(layers.team.fault(r) != 0, waits, "rank {r} knows");
        let all = |m: &Memory, byte: u8| m.read::<u8>().iter().all(|&b| b == byte);
        let spoiled = match phase {
            0 => all(&s.index, 255) && all(&s.handle[7], 0) && all(&s.handle[8], 0),
            1 => all(&s.recv, 255) && all(&s.recv_w, 255) && all(&s.index, 255),
            _ => !waits || all(&s.out, 255),
        };
        assert!(spoiled, "phase {phase} of rank {r} looks like a result");
    }
}

fn a_rank_that_stays_away_poisons_the_others() {
    staying_away(*PORTABLE);
    staying_away_bulk(load_bulk(EP_BULK.emu_text()));
    staying_away_back(load_back(EP_RETURN.emu_text()));
}
