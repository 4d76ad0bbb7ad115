//! The attention kernels: which text for which attention, and how it is launched.

use crate::Source;

pub mod hopper;
pub mod hopper_fp8;
pub mod hopper_fused;
pub mod hopper_gates;
pub mod split;

use hopper::{HopperGrad, HopperVariant, SM90_ATTENTION, SM90_ATTENTION_BWD};
use hopper_fp8::SM90_ATTENTION_FP8;
use hopper_fused::{HopperFused, SM90_ATTENTION_GRADS};
use hopper_gates::{HopperGated, SM90_ATTENTION_GATED};
use split::{SM80_ATTENTION_SPLIT, Split};

/// Attention of 16-bit types on any GPU from sm_80 on. See [`Variant`] for its definitions.
pub const SM80_ATTENTION: Source = Source {
    name: "attention/sm80_attention.cu",
    defines: &[],
    kernels: &["tw_attn_table", "tw_attn_fwd", "tw_attn_delta", "tw_attn_dq"],
};

/// Rows of heads whose delta a block of 256 threads of the 16-bit units computes, of values of `dv`
/// elements: eight of them a lane (`attention/delta.cuh`).
pub fn delta_rows(dv: usize) -> usize {
    256 / (dv / 8).next_power_of_two()
}

/// Attention of any types, and the gradients of bias and sink. See [`Plain`] for its definitions.
pub const PLAIN_ATTENTION: Source = Source {
    name: "attention/plain_attention.cu",
    defines: &[],
    kernels: &[
        "tw_attn_table",
        "tw_attn_fwd",
        "tw_attn_delta",
        "tw_attn_dq",
        "tw_attn_dkv",
        "tw_attn_dbias",
        "tw_attn_dsink",
        "tw_attn_merge",
    ],
};

/// Tables of segments from offsets in device memory.
pub const SEQUENCES: Source = Source {
    name: "attention/sequences.cu",
    defines: &[],
    kernels: &["tw_attn_sequences", "tw_attn_refuse"],
};

/// Threads of `tw_attn_sequences`.
pub const SEQUENCES_THREADS: u32 = 256;
/// Most parts of the rows of one side, for `attention/sequences.cu`.
pub const PARTS: usize = 64;
/// Results that one launch of `tw_attn_refuse` fills.
pub const REFUSED: usize = 5;

/// Rows of a tile of the kernels of [`PLAIN_ATTENTION`].
pub const PLAIN_ROWS: u64 = 4;
/// Segments that one launch of `tw_attn_table` writes.
pub const TABLE: usize = 96;

/// One compilation of [`PLAIN_ATTENTION`]. A type is 0 bf16, 1 f16 or 2 f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plain {
    /// Of q, k and v.
    pub input: u64,
    /// Of out and the gradients.
    pub output: u64,
    /// Head dimension of q and k.
    pub dqk: u64,
    /// Head dimension of v and out.
    pub dv: u64,
}

impl Plain {
    /// The definitions that the text takes.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let all = [
            ("TW_ATTN_IN", self.input),
            ("TW_ATTN_OUT", self.output),
            ("TW_ATTN_DQK", self.dqk),
            ("TW_ATTN_DV", self.dv),
        ];
        all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect()
    }

    /// The same with dk and dv in f32: parts of a sum over ranks.
    pub fn parts(&self) -> Vec<(String, u64)> {
        let mut defines = self.defines();
        if self.output != 2 {
            defines.push(("TW_ATTN_DKV".to_owned(), 2));
        }
        defines
    }
}

/// `TwBlock` of the kernels, at most.
const BLOCK_BYTES: u64 = 256;

/// One compilation of [`SM80_ATTENTION`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variant {
    /// f16 in place of bf16.
    pub f16: bool,
    /// Head dimension of q and k, a multiple of 8 up to 256.
    pub dqk: u64,
    /// Head dimension of v and out, a multiple of 8 up to 256.
    pub dv: u64,
    /// Softcap, bias, dropout or a scale that is not positive.
    pub extra: bool,
}

/// Rows of a tile and warps of a block of one kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Queries.
    pub m: u64,
    /// Keys.
    pub n: u64,
    /// Warps of a block.
    pub warps: u64,
}

impl Variant {
    /// Tiles of the forward kernel.
    pub fn forward(&self) -> Tile {
        match (self.dqk.max(self.dv), self.extra) {
            (0..=128, false) => Tile { m: 128, n: 64, warps: 4 },
            (0..=192, _) => Tile { m: 64, n: 64, warps: 4 },
            // So that an A100's shared memory is enough.
            _ => Tile { m: 64, n: 32, warps: 4 },
        }
    }

    /// Tiles of the kernel of dq.
    pub fn dq(&self) -> Tile {
        let m = if self.dqk.max(self.dv) <= 128 && !self.extra { 128 } else { 64 };
        Tile { m, n: 32, warps: 4 }
    }

    /// Tiles of the kernel of dk and dv, or of each.
    pub fn dkv(&self) -> Tile {
        match self.dqk.max(self.dv) <= 128 && !self.extra {
            true => Tile { m: 64, n: 128, warps: 8 },
            false => Tile { m: 32, n: 64, warps: 4 },
        }
    }

    /// Returns true if dk and dv are made by two kernels, because both do not fit into the
    /// registers.
    pub fn split(&self) -> bool {
        self.dqk.max(self.dv) > 128
    }

    /// Returns true if dk and dv are made by pairs of warps (`pairs.cuh`).
    pub fn pairs(&self) -> bool {
        self.dqk == self.dv && self.dqk <= 128 && !self.extra
    }

    /// Columns of a row in shared memory, of q and k and of v.
    fn padded(&self) -> (u64, u64) {
        (self.dqk.next_multiple_of(64), self.dv.next_multiple_of(64))
    }

    /// Dynamic shared memory of the forward kernel: the queries, then two stages of keys and
    /// values.
    pub fn forward_shared_bytes(&self) -> u64 {
        let (t, (qk, v)) = (self.forward(), self.padded());
        2 * (t.m * qk.max(v) + 2 * t.n * (qk + v))
    }

    /// Dynamic shared memory of the kernel of dq: queries and gradients, then two stages of keys
    /// and values.
    pub fn dq_shared_bytes(&self) -> u64 {
        let (t, (qk, v)) = (self.dq(), self.padded());
        2 * (t.m + 2 * t.n) * (qk + v)
    }

    /// Dynamic shared memory of the kernels of dk and dv: keys and values, then two stages of
    /// queries, gradients and two numbers of each query; of pairs, then probabilities.
    pub fn dkv_shared_bytes(&self) -> u64 {
        let (t, (qk, v)) = (self.dkv(), self.padded());
        let pairs = if self.pairs() { 4 * t.m * t.n } else { 0 };
        2 * (t.n + 2 * t.m) * (qk + v) + 16 * t.m + pairs
    }

    /// This, or the smaller tiles of the text with all features: the first whose kernels take
    /// `bytes` of shared memory that a block may have, at most `limit` in all.
    pub fn fitting(self, limit: u64, bytes: impl Fn(&Variant) -> u64) -> Option<Variant> {
        let fits = |v: &Variant| bytes(v) <= limit;
        [self, Variant { extra: true, ..self }].into_iter().find(fits)
    }

    /// All shared memory of the forward kernel.
    pub fn forward_bytes(&self) -> u64 {
        // Largest magnitudes and sums: two numbers of each row of a thread, which has 16 of a
        // warp's rows in eighths.
        let rows = self.forward().m / self.forward().warps / 16;
        self.forward_shared_bytes() + BLOCK_BYTES + 2 * 8 * rows * 32 * self.forward().warps
    }

    /// All shared memory of the largest kernel of the backward pass.
    pub fn backward_bytes(&self) -> u64 {
        self.dq_shared_bytes().max(self.dkv_shared_bytes()) + BLOCK_BYTES
    }

    /// The definitions that the text takes.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let (f, q, kv) = (self.forward(), self.dq(), self.dkv());
        let all = [
            ("TW_ATTN_TYPE", u64::from(self.f16)),
            ("TW_ATTN_DQK", self.dqk),
            ("TW_ATTN_DV", self.dv),
            ("TW_ATTN_EXTRA", u64::from(self.extra)),
            ("TW_ATTN_SPLIT", u64::from(self.split())),
            ("TW_ATTN_PAIRS", u64::from(self.pairs())),
            ("TW_ATTN_M", f.m),
            ("TW_ATTN_N", f.n),
            ("TW_ATTN_WARPS", f.warps),
            ("TW_ATTN_DQ_M", q.m),
            ("TW_ATTN_DQ_N", q.n),
            ("TW_ATTN_DQ_WARPS", q.warps),
            ("TW_ATTN_DKV_M", kv.m),
            ("TW_ATTN_DKV_N", kv.n),
            ("TW_ATTN_DKV_WARPS", kv.warps),
        ];
        all.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect()
    }
}

/// Variants that are compiled ahead and tested: the usual head dimensions.
pub fn variants() -> Vec<Variant> {
    let dims = [(128, 128), (64, 64), (256, 256), (192, 128)];
    let all = dims.iter().flat_map(|&(dqk, dv)| {
        [(false, false), (true, false), (false, true)].map(|(f16, extra)| Variant {
            f16,
            dqk,
            dv,
            extra,
        })
    });
    all.collect()
}

/// The same of [`Plain`].
pub fn plain_variants() -> Vec<Plain> {
    [(2, 2, 64), (0, 2, 40), (1, 1, 33)]
        .map(|(input, output, d)| Plain { input, output, dqk: d, dv: d })
        .to_vec()
}

/// The compilation of [`PLAIN_ATTENTION`] whose `tw_attn_merge` makes outputs of a type (0 bf16, 1
/// f16, 2 f32) and head dimension.
pub fn merge(output: u64, dv: u64) -> Plain {
    Plain { input: output, output, dqk: dv, dv }
}

/// Every unit of this module with the definitions of every variant.
pub fn attention() -> Vec<(Source, Vec<(String, u64)>)> {
    let tiles = variants().into_iter().map(|v| (SM80_ATTENTION, v.defines()));
    let merges = [64, 128, 256].into_iter().flat_map(|dv| [0, 1].map(|output| merge(output, dv)));
    let plain = plain_variants().into_iter().chain(merges).map(|p| p.defines());
    let parts = plain_variants().into_iter().filter(|p| p.output != 2).map(|p| p.parts());
    let hopper = HopperVariant::all().into_iter().map(|v| (SM90_ATTENTION, v.defines()));
    let grads = HopperGrad::all().into_iter().map(|v| (SM90_ATTENTION_BWD, v.defines()));
    let gated = HopperGated::all().into_iter().map(|v| (SM90_ATTENTION_GATED, v.defines()));
    let fused = HopperFused::all().into_iter().map(|v| (SM90_ATTENTION_GRADS, v.defines()));
    tiles
        .chain(plain.chain(parts).map(|defines| (PLAIN_ATTENTION, defines)))
        .chain(hopper)
        .chain(gated)
        .chain(grads)
        .chain(fused)
        .chain(Split::all().into_iter().map(|v| (SM80_ATTENTION_SPLIT, v.defines())))
        .chain([(SM90_ATTENTION_FP8, hopper_fp8::defines()), (SEQUENCES, Vec::new())])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block: sm_90 and sm_100; sm_80; sm_86, sm_89 and sm_120.
    const LIMITS: [u64; 3] = [227 << 10, 163 << 10, 99 << 10];

    #[test]
    fn tiles_fit_the_shared_memory_of_every_device() {
        let of = |dqk, dv| Variant { f16: false, dqk, dv, extra: false };
        let forward = |v: Variant| LIMITS.map(|r| v.fitting(r, Variant::forward_bytes));
        let backward = |v: Variant| LIMITS.map(|r| v.fitting(r, Variant::backward_bytes));
        let small = |v: Variant| Some(Variant { extra: true, ..v });
        for d in [8, 64] {
            assert_eq!(forward(of(d, d)), [Some(of(d, d)); 3]);
        }
        let v = of(128, 128);
        assert_eq!(forward(v), [Some(v), Some(v), small(v)]);
        assert_eq!(backward(v), [Some(v), Some(v), small(v)]);
        // `None`: the plain kernels do it.
        let (v, w) = (of(192, 128), of(256, 256));
        assert_eq!((forward(v), forward(w)), ([Some(v), Some(v), None], [Some(w); 3]));
        assert_eq!((backward(v), backward(w)), ([Some(v); 3], [Some(w), Some(w), None]));
    }
}
