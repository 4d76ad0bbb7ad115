//! Mutants of `collective/sm90_collective.cu`: each is killed by what `collective.rs` checks.

use tilewire_kernels::portable::COLLECTIVE;

use crate::collective::{in_f32, load, one_ahead, staying_away, told_early};
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![mutants_of_collectives_are_killed];

fn mutants_of_collectives_are_killed() {
    all_are_killed(
        &COLLECTIVE.emu_text(),
        load,
        ("collective/sm90_collective", "collective"),
        scenarios![in_f32, one_ahead, staying_away, told_early],
    );
}
