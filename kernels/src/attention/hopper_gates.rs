//! The forward pass for sm_90a over keys that come while it runs (`attention/hopper_gates.cuh`):
//! variants of the unit.

use super::hopper::{HopperVariant, TILE_M, forward_bytes};
use crate::Source;

/// The forward pass with a gate for each rank's keys.
pub const SM90_ATTENTION_GATED: Source = Source {
    name: "attention/sm90_attention_gated.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_hopper_attn_gated"],
};

/// The most ranks of a launch.
pub const GATES: usize = 32;
/// Gates and the team, in bytes.
const WATCH_BYTES: u32 = 1152;
/// Rows at whose multiples chunks are cut, so that tiles are the same on any number of ranks: tiles
/// of queries, and keys of a whole number of tiles.
pub const WHOLE: usize = 128;

/// A variant of [`SM90_ATTENTION_GATED`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HopperGated {
    /// The variant without gates.
    pub base: HopperVariant,
    /// The keys of a tile divide [`WHOLE`].
    pub whole: bool,
}

impl HopperGated {
    /// Every variant that a plan may load.
    pub fn all() -> Vec<HopperGated> {
        let of = |base| [false, true].map(|whole| HopperGated { base, whole });
        let mut all: Vec<_> = HopperVariant::all().into_iter().flat_map(of).collect();
        // Some are the same.
        all.dedup_by_key(|v| v.defines());
        all
    }

    /// Keys of a tile.
    pub fn keys(&self) -> usize {
        match (self.base.dqk, self.base.extra, self.whole) {
            (256, _, true) => 32,
            (192, _, true) => 64,
            (128, _, true) => WHOLE,
            // With more of them, registers spill here.
            (64, true, _) | (64, _, true) => WHOLE,
            (64, ..) => 160,
            _ => self.base.keys(),
        }
    }

    /// Dynamic shared memory in bytes: that of the forward pass by two warpgroups, gates.
    pub fn shared_bytes(&self) -> u32 {
        let b = &self.base;
        forward_bytes(TILE_M, (b.stages(), self.keys()), (b.dqk, b.dv)) + WATCH_BYTES
    }

    /// Definitions for the compiler. Two warpgroups multiply whatever the base has: with three, of
    /// heads of 64, the loader spills, and with [`WHOLE`] rows tiles would not be the same on any
    /// number of ranks.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let mut all = self.base.defines();
        for (name, value) in &mut all {
            match name.as_str() {
                "TW_HA_N" => *value = self.keys() as u64,
                "TW_HA_GROUPS" => *value = 2,
                _ => {}
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_into_shared_memory() {
        for v in HopperGated::all() {
            assert!(v.shared_bytes() <= 232_448, "{v:?}: {}", v.shared_bytes());
            assert!(!v.whole || WHOLE.is_multiple_of(v.keys()), "{v:?}");
        }
        assert_eq!(HopperGated::all().len(), 16 + 12);
    }
}
