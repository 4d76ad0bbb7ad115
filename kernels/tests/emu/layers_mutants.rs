//! Broken texts of `layers/sm80_layers.cu`.

use tilewire_kernels::portable::LAYERS;

use crate::host::Lib;
use crate::layers::{all_layers, few_chunks, load, poisoned_losses};
use crate::planted::all_are_killed;
use crate::scenarios;

fn planted_layers(lib: &'static Lib) {
    all_layers(lib, 1);
}

fn broken_layers(text: String) -> &'static Lib {
    load(&LAYERS, text, 1)
}

pub fn mutants_of_layers_are_killed() {
    all_are_killed(
        &LAYERS.emu_text(),
        broken_layers,
        ("layers/sm80_layers", "layers"),
        scenarios![few_chunks, planted_layers, poisoned_losses],
    );
}
