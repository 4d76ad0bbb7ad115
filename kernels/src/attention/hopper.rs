//! The kernels for sm_90a (`attention/hopper.cuh`, `attention/hopper_grad.cuh`): variants of the
//! units.

use crate::Source;

/// The forward pass by wgmma and TMA.
pub const SM90_ATTENTION: Source = Source {
    name: "attention/sm90_attention.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_hopper_attn_fwd"],
};

/// The backward pass by wgmma and TMA; [`HopperGrad::of_keys`] names its other kernels.
pub const SM90_ATTENTION_BWD: Source = Source {
    name: "attention/sm90_attention_bwd.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_attn_delta", "tw_hopper_attn_dq"],
};

/// Rows of a tile for each warpgroup that multiplies.
pub const GROUP_ROWS: usize = 64;
/// Own rows of a tile of two warpgroups: queries, or keys where dk and dv are made.
pub const TILE_M: usize = 2 * GROUP_ROWS;
/// Threads of a block with two warpgroups that multiply.
pub const THREADS: u32 = threads(2);
/// Rows of the boxes by which the output is stored.
pub const STORE_ROWS: usize = 16;
/// Columns of a box, whose 128 bytes are what the swizzle permutes.
pub const BOX_COLS: usize = 64;
/// The most segments of queries, and of keys, that a launch contains itself.
pub const FEW: usize = 4;
/// Barriers, and what the loader tells the others, in bytes.
const STATE_BYTES: usize = 1024;

/// Returns the threads of a block: warpgroups that multiply, and one of which a thread loads.
pub(super) const fn threads(groups: usize) -> u32 {
    128 * (groups as u32 + 1)
}

/// Returns the dynamic shared memory of a forward pass in bytes: two tiles of `rows` queries,
/// stages of keys and values, barriers.
pub(super) const fn forward_bytes(
    rows: usize,
    (stages, keys): (usize, usize),
    (dqk, dv): (usize, usize),
) -> u32 {
    (2 * rows * dqk * 2 + stages * keys * (dqk + dv) * 2 + STATE_BYTES) as u32
}

/// Types (f16 in place of bf16), without and with extras.
const BOTH: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

/// A variant of [`SM90_ATTENTION`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HopperVariant {
    /// f16 in place of bf16.
    pub f16: bool,
    /// Head dimension of q and k.
    pub dqk: usize,
    /// Head dimension of v and out.
    pub dv: usize,
    /// With softcap, bias, dropout and scales that are not positive.
    pub extra: bool,
}

impl HopperVariant {
    /// Head dimensions of all variants: of q and k, and of v.
    pub const DIMS: [(usize, usize); 4] = [(128, 128), (64, 64), (192, 128), (256, 256)];

    /// Every variant that a plan may load.
    pub fn all() -> Vec<HopperVariant> {
        let of = |(dqk, dv)| BOTH.map(|(f16, extra)| HopperVariant { f16, dqk, dv, extra });
        Self::DIMS.into_iter().flat_map(of).collect()
    }

    /// Warpgroups that multiply: three where their registers, 160 a thread, hold an output and
    /// scores that are under way together, else two.
    pub fn groups(&self) -> usize {
        if self.dqk == 64 { 3 } else { 2 }
    }

    /// Queries of a tile.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.groups()
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        threads(self.groups())
    }

    /// Keys of a tile: as many as shared memory and registers hold.
    pub fn keys(&self) -> usize {
        match (self.dqk, self.extra) {
            (256, _) => 48,
            (192, _) => 96,
            (128, false) => 160,
            _ => 128,
        }
    }

    /// Stages of keys, and of values.
    pub fn stages(&self) -> usize {
        if self.dqk > 64 { 2 } else { 3 }
    }

    /// Dynamic shared memory in bytes.
    pub fn shared_bytes(&self) -> u32 {
        forward_bytes(self.rows(), (self.stages(), self.keys()), (self.dqk, self.dv))
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let pairs = [
            ("TW_ATTN_TYPE", u64::from(self.f16)),
            ("TW_ATTN_DQK", self.dqk as u64),
            ("TW_ATTN_DV", self.dv as u64),
            ("TW_HA_N", self.keys() as u64),
            ("TW_HA_STAGES", self.stages() as u64),
            ("TW_HA_GROUPS", self.groups() as u64),
            ("TW_ATTN_EXTRA", u64::from(self.extra)),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

/// Tiles of one kernel of the backward pass: of the other side, which it visits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Others {
    /// Rows of a tile.
    pub rows: usize,
    /// Tiles that shared memory holds at once.
    pub stages: usize,
    /// Own tiles that it holds at once, beside them: 1 or 2.
    pub slots: usize,
}

/// A variant of [`SM90_ATTENTION_BWD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HopperGrad {
    /// f16 in place of bf16.
    pub f16: bool,
    /// Head dimension of q and k.
    pub dqk: usize,
    /// Head dimension of v and out.
    pub dv: usize,
    /// Keys that the kernel of dq visits.
    pub keys: Others,
    /// Queries that the kernels of dk and dv visit.
    pub queries: Others,
    /// With softcap, bias, dropout and scales that are not positive.
    pub extra: bool,
}

impl HopperGrad {
    /// Head dimensions of all variants: those of the forward pass.
    pub const DIMS: [(usize, usize); 4] = HopperVariant::DIMS;

    /// Returns the variant of a type and one of the [dimensions](Self::DIMS): tiles as large as
    /// registers hold, and as many as shared memory does.
    pub const fn of(f16: bool, (dqk, dv): (usize, usize), extra: bool) -> HopperGrad {
        let [keys, queries] = match (dqk, extra) {
            (256, false) => [(48, 2, 1), (32, 3, 1)],
            (256, true) => [(32, 2, 1), (32, 3, 1)],
            (192, false) => [(96, 2, 1), (32, 3, 2)],
            (192, true) => [(64, 2, 1), (32, 3, 2)],
            (128, false) => [(96, 2, 2), (64, 3, 2)],
            (128, true) => [(64, 2, 2), (32, 3, 2)],
            (_, false) => [(128, 4, 2), (96, 4, 2)],
            (_, true) => [(96, 4, 2), (64, 4, 2)],
        };
        let keys = Others { rows: keys.0, stages: keys.1, slots: keys.2 };
        let queries = Others { rows: queries.0, stages: queries.1, slots: queries.2 };
        HopperGrad { f16, dqk, dv, keys, queries, extra }
    }

    /// Every variant that a plan may load.
    pub fn all() -> Vec<HopperGrad> {
        let of = |dims| BOTH.map(|(f16, extra)| Self::of(f16, dims, extra));
        Self::DIMS.into_iter().flat_map(of).collect()
    }

    /// Returns true if dk and dv are made by two kernels, because the registers do not hold both.
    pub fn split(&self) -> bool {
        self.dqk + self.dv > if self.extra { 256 } else { 320 }
    }

    /// The kernels that make dk and dv.
    pub fn of_keys(&self) -> &'static [&'static str] {
        if self.split() {
            &["tw_hopper_attn_dk", "tw_hopper_attn_dv"]
        } else {
            &["tw_hopper_attn_dkv"]
        }
    }

    /// Slots of two own tiles, stages of two tiles of others, lse and delta of those that are
    /// queries, barriers.
    fn shared_bytes(&self, others: Others, queries: usize) -> u32 {
        let rows = others.slots * TILE_M + others.stages * others.rows;
        (rows * (self.dqk + self.dv) * 2 + queries * 8 + STATE_BYTES) as u32
    }

    /// Dynamic shared memory of the kernel of dq, in bytes.
    pub fn dq_shared_bytes(&self) -> u32 {
        self.shared_bytes(self.keys, self.keys.slots * TILE_M)
    }

    /// Dynamic shared memory of each kernel of dk and dv, in bytes. Of two kernels that of dv has
    /// two slots of keys alone, which are as large as one of keys and values.
    pub fn dkv_shared_bytes(&self) -> u32 {
        self.shared_bytes(self.queries, self.queries.stages * self.queries.rows)
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let (k, q) = (self.keys, self.queries);
        let pairs = [
            ("TW_ATTN_TYPE", u64::from(self.f16)),
            ("TW_ATTN_DQK", self.dqk as u64),
            ("TW_ATTN_DV", self.dv as u64),
            ("TW_HB_DQ_N", k.rows as u64),
            ("TW_HB_DQ_STAGES", k.stages as u64),
            ("TW_HB_DQ_SLOTS", k.slots as u64),
            ("TW_HB_DKV_M", q.rows as u64),
            ("TW_HB_DKV_STAGES", q.stages as u64),
            ("TW_HB_DKV_SLOTS", q.slots as u64),
            ("TW_HB_SPLIT", u64::from(self.split())),
            ("TW_ATTN_EXTRA", u64::from(self.extra)),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_into_shared_memory() {
        for v in HopperVariant::all() {
            assert!(v.shared_bytes() <= 232_448, "{v:?}: {}", v.shared_bytes());
        }
        for v in HopperGrad::all() {
            let most = v.dq_shared_bytes().max(v.dkv_shared_bytes());
            assert!(most <= 232_448, "{v:?}: {most}");
        }
    }
}
