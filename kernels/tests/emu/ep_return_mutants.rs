//! `ep/sm90_return.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::EP_RETURN;

use crate::ep::{load_back, some_bulk_returns};
use crate::ep_away::staying_away_back;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![mutants_of_bulk_combine_are_killed];

fn mutants_of_bulk_combine_are_killed() {
    all_are_killed(
        &EP_RETURN.emu_text(),
        load_back,
        ("ep/sm90_return", "combine"),
        scenarios![some_bulk_returns, staying_away_back],
    );
}
