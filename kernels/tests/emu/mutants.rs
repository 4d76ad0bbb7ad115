//! Each argument of `comm/signal.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::SIGNAL;

use crate::host::Lib;
use crate::orders::orders;
use crate::planted::{Scenario, all_are_killed};
use crate::signal::{
    LIB, abort, after_fault, another_generation, barriers, copies, deadline, fault_at_a_barrier,
    first_failure, gone, host_abort, last_look, launches, missing, poison, ring,
};
use crate::{Test, scenarios, team, tests};

pub const TESTS: &[Test] = tests![signal_scenarios, every_planted_mutant_is_killed];

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

/// Every scenario passes with the text as it is.
fn signal_scenarios() {
    for (_, scenario) in SCENARIOS {
        scenario(*LIB);
    }
}

const SCENARIOS: &[Scenario] = scenarios![
    after_fault,
    another_generation,
    copies,
    deadline,
    fault_at_a_barrier,
    first_failure,
    gone,
    host_abort,
    last_look,
    missing,
    one_abort,
    orders,
    poison,
    short_barriers,
    short_launches,
    short_ring,
];

fn every_planted_mutant_is_killed() {
    all_are_killed(&SIGNAL.emu_text(), team::load, ("comm/signal", "signals"), SCENARIOS);
}
