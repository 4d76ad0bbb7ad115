//! Kernels of expert parallelism, broken on purpose where only other worlds, layouts and gradients
//! show it.

use tilewire_kernels::portable::{EP, EP_RETURN};

use crate::ep_worlds::{ROOM, flat_rows, of_nine_ranks, some_gradients, some_gradients_by_bulk};
use crate::host::Lib;
use crate::planted::all_are_killed;
use crate::{Test, ep, scenarios, tests};

pub const TESTS: &[Test] = tests![mutants_of_gradients_are_killed];

fn plain(text: String) -> &'static Lib {
    ep::unit(&EP, text, ROOM)
}

fn back(text: String) -> &'static Lib {
    ep::unit(&EP_RETURN, text, ROOM)
}

fn mutants_of_gradients_are_killed() {
    all_are_killed(
        &EP.emu_text(),
        plain,
        ("ep/sm80_ep", "worlds"),
        scenarios![flat_rows, of_nine_ranks, some_gradients],
    );
    all_are_killed(
        &EP_RETURN.emu_text(),
        back,
        ("ep/sm90_return", "worlds"),
        scenarios![some_gradients_by_bulk],
    );
}
