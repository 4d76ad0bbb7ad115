//! `attention/hopper_gates.cuh`, broken on purpose: every mutant must fail its scenario.
#![expect(clippy::single_range_in_vec_init, reason = "spans that happen to be one")]

use tilewire_kernels::attention::hopper_gates::{HopperGated, SM90_ATTENTION_GATED};

use crate::attention::{Case, case};
use crate::attention_hopper::{D64, How};
use crate::attention_hopper_gates::{Gated, causal, check_on, faults, load, zigzag};
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![gated_attention_scenarios, gated_attention_mutants];

const HOW: How = How { blocks: 1, heads: 1, counted: false };

/// Keys in any order and late, each rank in turn.
fn late(lib: &'static Lib) {
    for seed in 0..6 {
        let (size, me) = (3 + seed as usize % 2, seed as usize % 3);
        check_on(lib, &Gated { up: seed > 2, ..causal(420, size, me) }, D64, HOW, seed);
    }
}

/// A rank's rows end where a tile of keys does, and those of the next one begin.
fn borders(lib: &'static Lib) {
    let ranks = [vec![0..160], vec![160..161], vec![161..321], vec![321..481], vec![481..490]];
    for seed in 0..10 {
        let c = Case { q: vec![0..64], out: Type::Bf16, heads: (1, 1), ..case(490, 490) };
        let g = Gated { up: seed > 4, ..Gated::new(c, &ranks, seed as usize % 5) };
        check_on(lib, &g, D64, HOW, seed);
    }
}

/// Counts of many launches before, which wrap around.
fn wraps(lib: &'static Lib) {
    for before in [u64::MAX, 1 << 33] {
        check_on(lib, &Gated { before, ..causal(200, 2, 1) }, D64, HOW, 2);
    }
}

/// A document whose keys nobody has.
fn no_keys(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, ..Case::packed(&[(40, 0), (60, 60)]) };
    check_on(lib, &Gated::new(c, &zigzag(60, 2), 1), D64, HOW, 2);
}

fn gated_attention_scenarios() {
    let lib = base(SM90_ATTENTION_GATED.emu_text());
    [late, borders, wraps, no_keys, faults].iter().for_each(|f| f(lib));
}

fn base(text: String) -> &'static Lib {
    load(text, &HopperGated { base: D64, whole: false })
}

fn gated_attention_mutants() {
    let of = ("attention/sm90_attention_gated", "gates");
    let scenarios = scenarios![late, borders, wraps, faults];
    all_are_killed(&SM90_ATTENTION_GATED.emu_text(), base, of, scenarios);
}
