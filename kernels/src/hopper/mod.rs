//! Matrix products for sm_90a (`hopper/`): variants of the unit, and the order of its tiles.

use crate::Source;

/// Matrix products by wgmma and TMA.
pub const HOPPER_GEMM: Source =
    Source { name: "hopper/sm90_gemm.cu", defines: &[], kernels: &["tw_hopper_gemm"] };

/// The same of groups, whose sizes are in device memory.
pub const HOPPER_GROUPED_GEMM: Source =
    Source { name: "hopper/sm90_grouped_gemm.cu", defines: &[], kernels: &["tw_hopper_grouped"] };

/// Products of few rows.
pub const HOPPER_SKINNY_GEMM: Source =
    Source { name: "hopper/sm90_skinny_gemm.cu", defines: &[], kernels: &["tw_hopper_skinny"] };

/// The sums of a product whose contraction was cut into parts, with an epilogue.
pub const HOPPER_SUM_PARTS: Source =
    Source { name: "hopper/sm90_sum_parts.cu", defines: &[], kernels: &["tw_hopper_sum_parts"] };

/// Rows of a block's tile.
pub const TILE_M: usize = 128;
/// Elements of the contraction in a stage.
pub const TILE_K: usize = 64;
/// Threads of a block.
pub const THREADS: u32 = 384;
/// Threads of a block of [`HOPPER_SUM_PARTS`], each of which has two columns of D.
pub const SUM_THREADS: u32 = 128;
/// Blocks of a cluster.
pub const CLUSTER: u32 = 2;
/// Threads of a block of [`HOPPER_SKINNY_GEMM`].
pub const SKINNY_THREADS: u32 = 288;
/// The most rows of D of [`HOPPER_SKINNY_GEMM`].
pub const SKINNY_ROWS: usize = 64;
/// The most blocks of a cluster of [`HOPPER_SKINNY_GEMM`]: parts of the contraction.
pub const SKINNY_PARTS: usize = 8;
/// Rows of the boxes by which D is stored.
pub const STORE_ROWS: usize = 16;
/// Columns of a box, whose 128 bytes are what the swizzle permutes.
pub const BOX_COLS: usize = 64;
/// The box by which f32 results are added to, outermost first: twice eight rows, as four pairs of
/// rows that are four apart, of 32 columns (`hopper/boxes.cuh`).
pub const SUM_BOX: [usize; 4] = [2, 4, 2, 32];
/// The flag of a launch whose map of D is one for such boxes.
pub const D_HAS_MAP: u32 = 4096;

/// The tensor that [`SUM_BOX`] is a box of, `rows` x `cols` f32 whose rows begin `ld` elements
/// after each other: sizes, and elements from index to index of all dimensions but the last. The
/// strides do not rise, as those of `TensorMapDesc::ragged` do not: no driver has minded.
pub fn sum_rows([rows, cols]: [usize; 2], ld: usize) -> ([usize; 4], [usize; 3]) {
    ([rows / 8, 4, 2, cols], [8 * ld, ld, 4 * ld])
}

/// Returns whether `rows` x `cols` f32 at `addr` may be added to by such boxes: none is cut between
/// rows, and rows begin and end at multiples of 16 bytes.
pub fn fits_sum_rows(addr: u64, [rows, cols]: [usize; 2], ld: usize) -> bool {
    let whole = [cols, ld].iter().all(|n| n.is_multiple_of(4));
    whole && rows > 0 && rows.is_multiple_of(16) && addr.is_multiple_of(16)
}

/// The function of an epilogue, as `hopper/epilogue.cuh` numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Epilogue {
    /// The product alone.
    Plain,
    /// A bias, or what D holds, is added.
    Linear,
    /// ReLU.
    Relu,
    /// GELU, tanh form.
    Gelu,
    /// SwiGLU.
    SwiGlu,
    /// Times the derivative of GELU.
    DGelu,
    /// The gradients of SwiGLU.
    DSwiGlu,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Epilogue; 7] = [
        Epilogue::Plain,
        Epilogue::Linear,
        Epilogue::Relu,
        Epilogue::Gelu,
        Epilogue::SwiGlu,
        Epilogue::DGelu,
        Epilogue::DSwiGlu,
    ];

    /// Its number, `TW_HG_EPI`.
    pub fn code(self) -> u64 {
        Self::ALL.iter().position(|e| *e == self).unwrap_or_default() as u64
    }
}

/// Orders of the operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// A `[m, k]`, B `[n, k]`.
    Nt,
    /// A `[m, k]`, B `[k, n]`.
    Nn,
    /// A `[k, m]`, B `[k, n]`.
    Tn,
}

impl Order {
    /// All of them.
    pub const ALL: [Order; 3] = [Order::Nt, Order::Nn, Order::Tn];

    /// True for A, and for B, if its rows are indices of the contraction.
    pub fn mn_major(self) -> (bool, bool) {
        (self == Order::Tn, self != Order::Nt)
    }
}

/// A variant of [`HOPPER_GEMM`], or of [`HOPPER_GROUPED_GEMM`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variant {
    /// Orders of the operands.
    pub order: Order,
    /// Operands are f16, not bf16.
    pub f16: bool,
    /// D is f32, not of the operands' type.
    pub out_f32: bool,
    /// The function of the sums.
    pub epilogue: Epilogue,
    /// Columns of a tile: 256; for [`Epilogue::Plain`] also 192 and 128, and for [`Order::Nt`] 224;
    /// 320 for 16-bit results of [`Epilogue::Plain`], for f32 ones of [`Epilogue::Linear`], and for
    /// [`Order::Nt`] also for 16-bit ones of that, of ReLU and of GELU.
    pub cols: usize,
}

impl Variant {
    /// Stages of shared memory: as many as there is space for.
    pub fn stages(&self) -> usize {
        match self.cols {
            128 | SKINNY_ROWS => 6,
            320 => 3,
            _ => 4,
        }
    }

    /// Columns of D, or of each of its halves, in a tile.
    pub fn width(&self) -> usize {
        if self.epilogue == Epilogue::SwiGlu { self.cols / 2 } else { self.cols }
    }

    /// Rows of B's boxes: indices of n, or of the contraction.
    pub fn b_rows(&self) -> usize {
        if self.order.mn_major().1 { TILE_K } else { self.cols / 2 }
    }

    /// Dynamic shared memory in bytes: stages of A and B, buffers of D (two for each of eight
    /// warps), barriers.
    pub fn shared_bytes(&self) -> u32 {
        let stage = (TILE_M + self.cols) * TILE_K * 2;
        let buffers = 8 * 2 * STORE_ROWS * BOX_COLS * 2;
        (self.stages() * (stage + 16) + buffers + 32) as u32
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let (a, b) = self.order.mn_major();
        let out = if self.out_f32 { 2 } else { u64::from(self.f16) };
        let pairs = [
            ("N", self.cols as u64),
            ("STAGES", self.stages() as u64),
            ("F16", u64::from(self.f16)),
            ("OUT", out),
            ("A_MN", u64::from(a)),
            ("B_MN", u64::from(b)),
            ("EPI", self.epilogue.code()),
        ];
        pairs.map(|(name, value)| (format!("TW_HG_{name}"), value)).to_vec()
    }

    /// Dynamic shared memory of a product of groups in bytes: a summary of them, and ends and order
    /// of at most 448.
    pub fn grouped_shared_bytes(&self) -> u32 {
        self.shared_bytes() + 16 + 448 * 6
    }

    /// Every variant of a product of groups that a plan may load: no derivatives; by rows results
    /// are added to nothing, and by columns no function follows.
    pub fn all_grouped() -> Vec<Variant> {
        let fits = |v: &Variant| match v.epilogue {
            Epilogue::Plain => [256, 128].contains(&v.cols),
            Epilogue::Linear => v.cols == 256 && v.order != Order::Nn,
            Epilogue::Relu | Epilogue::Gelu | Epilogue::SwiGlu => {
                v.cols == 256 && v.order == Order::Nt
            }
            Epilogue::DGelu | Epilogue::DSwiGlu => false,
        };
        Self::all().into_iter().filter(fits).collect()
    }

    /// The one of [`HOPPER_SKINNY_GEMM`] that makes this product; none for [`Order::Tn`].
    pub fn skinny(&self) -> Option<Skinny> {
        (self.order != Order::Tn).then_some(Skinny(Variant { cols: 256, ..*self }))
    }

    /// The one of this width whose results are the f32 parts of sums ([`HOPPER_GEMM`]).
    pub fn of_parts(&self) -> Variant {
        Variant { out_f32: true, epilogue: Epilogue::Plain, ..*self }
    }

    /// The one of [`HOPPER_SUM_PARTS`] that ends this product: it does not depend on order, width
    /// and, of f32 results, the operands' type.
    pub fn of_sums(&self) -> Variant {
        Variant { order: Order::Nt, f16: self.f16 && !self.out_f32, cols: 256, ..*self }
    }

    /// Every variant of [`HOPPER_SUM_PARTS`] that a plan may load.
    pub fn all_sums() -> Vec<Variant> {
        Self::all().into_iter().filter(|v| v.of_sums() == *v).collect()
    }

    /// Every variant of one product that a plan may load.
    pub fn all() -> Vec<Variant> {
        let mut all = Vec::new();
        for order in Order::ALL {
            for f16 in [false, true] {
                for epilogue in Epilogue::ALL {
                    let plain = epilogue == Epilogue::Plain;
                    let widths: &[usize] = match (plain, order) {
                        (true, Order::Nt) => &[256, 224, 192, 128],
                        (true, _) => &[256, 192, 128],
                        _ => &[256],
                    };
                    for cols in widths {
                        let v = Variant { order, f16, out_f32: false, epilogue, cols: *cols };
                        all.push(v);
                        if plain || epilogue == Epilogue::Linear {
                            all.push(Variant { out_f32: true, ..v });
                        }
                    }
                    let wide = Variant { order, f16, out_f32: false, epilogue, cols: 320 };
                    match epilogue {
                        Epilogue::Plain => all.push(wide),
                        Epilogue::Linear => all.push(Variant { out_f32: true, ..wide }),
                        _ => {}
                    }
                    let adds = [Epilogue::Linear, Epilogue::Relu, Epilogue::Gelu];
                    if order == Order::Nt && adds.contains(&epilogue) {
                        all.push(wide);
                    }
                }
            }
        }
        all
    }
}

/// A variant of [`HOPPER_SKINNY_GEMM`]: its order, types and epilogue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Skinny(Variant);

impl Skinny {
    /// Columns and stages of the tiles of wgmma, which are rows of D.
    const TILE: Variant = Variant {
        order: Order::Nt,
        f16: false,
        out_f32: false,
        epilogue: Epilogue::Plain,
        cols: SKINNY_ROWS,
    };

    /// Columns of D, or of each of its halves, in a tile.
    pub fn width(&self) -> usize {
        if self.0.epilogue == Epilogue::SwiGlu { TILE_M / 2 } else { TILE_M }
    }

    /// Rows of A's boxes for `m` rows of D.
    pub fn a_rows(m: usize) -> usize {
        m.next_power_of_two().clamp(16, SKINNY_ROWS)
    }

    /// Dynamic shared memory in bytes.
    pub fn shared_bytes(&self) -> u32 {
        Self::TILE.shared_bytes()
    }

    /// Definitions for the compiler.
    pub fn defines(&self) -> Vec<(String, u64)> {
        let mut all = self.0.defines();
        for (name, value) in &mut all {
            match name.as_str() {
                "TW_HG_N" => *value = SKINNY_ROWS as u64,
                "TW_HG_STAGES" => *value = Self::TILE.stages() as u64,
                "TW_HG_A_MN" => *value = u64::from(self.0.order.mn_major().1),
                "TW_HG_B_MN" => *value = 0,
                _ => {}
            }
        }
        all
    }

    /// Every variant that a plan may load.
    pub fn all() -> Vec<Skinny> {
        let mut all = Vec::new();
        for v in Variant::all().iter().filter_map(Variant::skinny) {
            if !all.contains(&v) {
                all.push(v);
            }
        }
        all
    }
}

/// Returns the number of pairs of tiles in a product of `rows` x `cols` tiles: a cluster of two
/// blocks computes one pair at a time (`hopper/order.cuh`).
pub fn pairs(rows: usize, cols: usize) -> usize {
    rows / 2 * cols + rows % 2 * cols.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_fit_into_shared_memory_and_differ() {
        let all = Variant::all();
        for (i, v) in all.iter().enumerate() {
            assert!(v.grouped_shared_bytes() <= 232_448, "{v:?}: {}", v.shared_bytes());
            assert!(!all[..i].contains(v), "{v:?} is twice in the list");
            assert!(v.epilogue == Epilogue::Plain || v.width() % BOX_COLS == 0, "{v:?}");
        }
        let num = (all.len(), Variant::all_grouped().len(), Variant::all_sums().len());
        assert_eq!(num, (100, 38, 16));
        assert!(all.iter().all(|v| Variant::all_sums().contains(&v.of_sums())));
        let skinny = Skinny::all();
        assert_eq!(skinny.len(), 36);
        assert!(skinny.iter().all(|v| v.shared_bytes() <= 232_448));
    }
}
