//! The forward pass for sm_90a over keys that come while it runs (`attention/hopper_gates.cuh`):
//! variants of the unit.

use super::hopper::HopperVariant;
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
/// Keys of a tile of heads of 64 with extras: with more of them, registers spill here.
const KEYS_OF_64_WITH_EXTRAS: usize = 128;

/// A variant of [`SM90_ATTENTION_GATED`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HopperGated(
    /// The variant without gates.
    pub HopperVariant,
);

impl HopperGated {
    /// Every variant that a plan may load.
    pub fn all() -> Vec<HopperGated> {
        HopperVariant::all().into_iter().map(HopperGated).collect()
    }

    /// Keys of a tile.
    pub fn keys(&self) -> usize {
        match (self.0.dqk, self.0.extra) {
            (64, true) => KEYS_OF_64_WITH_EXTRAS,
            _ => self.0.keys(),
        }
    }

    /// Dynamic shared memory in bytes: two tiles of queries, stages of keys and values, barriers,
    /// gates.
    pub fn shared_bytes(&self) -> u32 {
        let fewer = self.0.stages() * (self.0.keys() - self.keys()) * (self.0.dqk + self.0.dv) * 2;
        self.0.shared_bytes() - fewer as u32 + WATCH_BYTES
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let mut all = self.0.defines();
        let keys = all.iter_mut().find(|(name, _)| name == "TW_HA_N");
        keys.expect("a tile has keys").1 = self.keys() as u64;
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
        }
    }
}
