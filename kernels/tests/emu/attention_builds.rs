//! What the tests of attention compile: texts, head dimensions, tiles.

use std::sync::LazyLock;

use tilewire_kernels::attention::{PLAIN_ATTENTION, PLAIN_ROWS, SM80_ATTENTION, Tile};

use crate::compile::Unit;
use crate::gemm::Type;
use crate::host::{Kernel, Lib, RUNTIME};

/// What a text was compiled for.
#[derive(Clone, Copy)]
pub struct Build {
    pub lib: Option<&'static Lib>,
    /// Type of q, k and v.
    pub input: Type,
    /// The plain kernels, whose output and its gradient are of one type.
    pub plain: bool,
    pub dqk: usize,
    pub dv: usize,
    pub tiles: Tiles,
}

/// Tiles of the forward kernel, of dq, and of dk and dv; whether these are two kernels, or made by
/// pairs of warps.
#[derive(Clone, Copy)]
pub struct Tiles {
    pub fwd: Tile,
    pub dq: Tile,
    pub dkv: Tile,
    pub split: bool,
    pub pairs: bool,
}

/// dqk, dv, f16, extra, tiles.
pub type Sizes = (usize, usize, bool, bool, Tiles);

const fn tile(m: u64, n: u64, warps: u64) -> Tile {
    Tile { m, n, warps }
}
/// Two rows of matrix instructions to a warp where the usual tiles have them.
pub const PLAIN: Sizes = (64, 64, false, false, {
    Tiles {
        fwd: tile(64, 32, 2),
        dq: tile(64, 16, 2),
        dkv: tile(16, 32, 2),
        split: false,
        pairs: false,
    }
});
/// dk and dv by two pairs of warps.
pub const PAIRS: Sizes = (64, 64, false, false, {
    Tiles {
        fwd: tile(64, 32, 2),
        dq: tile(64, 16, 2),
        dkv: tile(16, 64, 4),
        split: false,
        pairs: true,
    }
});
/// Neither dimension is a multiple of 16, and they differ.
pub const EXTRA: Sizes = (40, 24, true, true, {
    Tiles {
        fwd: tile(32, 16, 2),
        dq: tile(32, 16, 2),
        dkv: tile(16, 32, 2),
        split: true,
        pairs: false,
    }
});

impl Build {
    pub fn kernel(&self, name: &str) -> Kernel {
        self.lib.unwrap().kernel(name)
    }

    fn smem(&self, rows: u64) -> usize {
        if self.plain {
            return 0;
        }
        let pad = |d: usize| d.next_multiple_of(64) as u64;
        2 * (rows * (pad(self.dqk) + pad(self.dv))) as usize
    }

    pub fn fwd_smem(&self) -> usize {
        if self.plain {
            return 0;
        }
        let widest = self.dqk.max(self.dv).next_multiple_of(64);
        self.smem(2 * self.tiles.fwd.n) + 2 * self.tiles.fwd.m as usize * widest
    }

    pub fn dq_smem(&self) -> usize {
        self.smem(self.tiles.dq.m + 2 * self.tiles.dq.n)
    }

    pub fn dkv_smem(&self) -> usize {
        let t = self.tiles.dkv;
        let pairs = if self.tiles.pairs { 4 * t.m * t.n } else { 0 };
        self.smem(t.n + 2 * t.m) + if self.plain { 0 } else { (16 * t.m + pairs) as usize }
    }
}

pub fn load(text: String, (dqk, dv, f16, extra, tiles): Sizes) -> Build {
    let Tiles { fwd, dq, dkv, split, pairs } = tiles;
    let mut b = Build {
        lib: None,
        input: if f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk,
        dv,
        tiles,
    };
    let last: &[&str] = if split { &["tw_attn_dk", "tw_attn_dv"] } else { &["tw_attn_dkv"] };
    b.lib = Some(RUNTIME.load(&Unit {
        name: SM80_ATTENTION.name,
        text,
        defines: vec![
            ("TW_ATTN_TYPE", u64::from(f16)),
            ("TW_ATTN_DQK", dqk as u64),
            ("TW_ATTN_DV", dv as u64),
            ("TW_ATTN_EXTRA", u64::from(extra)),
            ("TW_ATTN_SPLIT", u64::from(split)),
            ("TW_ATTN_PAIRS", u64::from(pairs)),
            ("TW_ATTN_M", fwd.m),
            ("TW_ATTN_N", fwd.n),
            ("TW_ATTN_WARPS", fwd.warps),
            ("TW_ATTN_DQ_M", dq.m),
            ("TW_ATTN_DQ_N", dq.n),
            ("TW_ATTN_DQ_WARPS", dq.warps),
            ("TW_ATTN_DKV_M", dkv.m),
            ("TW_ATTN_DKV_N", dkv.n),
            ("TW_ATTN_DKV_WARPS", dkv.warps),
        ],
        kernels: [SM80_ATTENTION.kernels, last].concat(),
        smem: b.fwd_smem().max(b.dq_smem()).max(b.dkv_smem()),
    }));
    b
}

/// The plain kernels.
pub fn load_plain(text: String, (dqk, dv, t, out): (usize, usize, Type, Type)) -> Build {
    let rows = tile(PLAIN_ROWS, PLAIN_ROWS, 4);
    let tiles = Tiles { fwd: rows, dq: rows, dkv: rows, split: false, pairs: false };
    let lib = RUNTIME.load(&Unit {
        name: PLAIN_ATTENTION.name,
        text,
        defines: vec![
            ("TW_ATTN_IN", t as u64),
            ("TW_ATTN_OUT", out as u64),
            ("TW_ATTN_DQK", dqk as u64),
            ("TW_ATTN_DV", dv as u64),
        ],
        kernels: PLAIN_ATTENTION.kernels.to_vec(),
        smem: 16,
    });
    Build { lib: Some(lib), input: t, plain: true, dqk, dv, tiles }
}

pub static SMALL: LazyLock<Build> = LazyLock::new(|| load(SM80_ATTENTION.emu_text(), PLAIN));
pub static PAIRED: LazyLock<Build> = LazyLock::new(|| load(SM80_ATTENTION.emu_text(), PAIRS));
pub static F32: LazyLock<Build> =
    LazyLock::new(|| load_plain(PLAIN_ATTENTION.emu_text(), (40, 37, Type::F32, Type::F32)));
pub static ODD: LazyLock<Build> = LazyLock::new(|| load(SM80_ATTENTION.emu_text(), EXTRA));
