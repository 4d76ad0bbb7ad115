//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::{EP, EP_BULK};

use crate::ep::{load, load_bulk, some_bulk_routings, some_routings};
use crate::ep_away::{staying_away, staying_away_bulk};
use crate::ep_straight::{some_straight, some_straight_bulk};
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] =
    tests![mutants_of_expert_parallelism_are_killed, mutants_of_bulk_dispatch_are_killed,];

fn mutants_of_expert_parallelism_are_killed() {
    all_are_killed(
        &EP.emu_text(),
        load,
        ("ep/sm80_ep", "exchange"),
        scenarios![some_routings, some_straight, staying_away],
    );
}

fn mutants_of_bulk_dispatch_are_killed() {
    all_are_killed(
        &EP_BULK.emu_text(),
        load_bulk,
        ("ep/sm90_ep", "dispatch"),
        scenarios![some_bulk_routings, some_straight_bulk, staying_away_bulk],
    );
}
