//! Tensor maps: how the tensor memory accelerator of sm_90 and newer sees a tensor in device
//! memory.

use std::fmt;
use std::ops::Deref;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as Type, CUtensorMapFloatOOBfill as Fill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as L2, CUtensorMapSwizzle as Raw,
};
use tilewire_core::{DType, Error, ErrorKind, Result};

use super::context::CudaContext;
use super::error::check;
use super::memory::CudaMemory;
use crate::Buffer;

/// The permutation of a tile's bytes in shared memory, so that its columns lie in different
/// banks. The innermost size of the tile is at most as many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MapSwizzle {
    /// As they are in the tensor.
    #[default]
    None,
    /// Of 32 bytes.
    B32,
    /// Of 64 bytes.
    B64,
    /// Of 128 bytes.
    B128,
}

impl MapSwizzle {
    fn span(self) -> usize {
        match self {
            MapSwizzle::None => usize::MAX,
            MapSwizzle::B32 => 32,
            MapSwizzle::B64 => 64,
            MapSwizzle::B128 => 128,
        }
    }

    fn raw(self) -> Raw {
        match self {
            MapSwizzle::None => Raw::CU_TENSOR_MAP_SWIZZLE_NONE,
            MapSwizzle::B32 => Raw::CU_TENSOR_MAP_SWIZZLE_32B,
            MapSwizzle::B64 => Raw::CU_TENSOR_MAP_SWIZZLE_64B,
            MapSwizzle::B128 => Raw::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// The piece that a load brings into the L2 cache at least, of which the tile may need less.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MapPromotion {
    /// As much as the tile needs.
    None,
    /// 64 bytes.
    B64,
    /// 128 bytes.
    #[default]
    B128,
    /// 256 bytes.
    B256,
}

impl MapPromotion {
    fn raw(self) -> L2 {
        match self {
            MapPromotion::None => L2::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            MapPromotion::B64 => L2::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            MapPromotion::B128 => L2::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            MapPromotion::B256 => L2::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        }
    }
}

/// The most dimensions of a tensor map.
const MAX_RANK: usize = 5;

/// Numbers of a tensor map, one for a dimension: made from an array of at most 5, and used as a
/// slice. It owns no memory, so that a launch may describe tensors without an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MapSizes {
    /// Zeros behind the first `rank`.
    of: [usize; MAX_RANK],
    rank: usize,
}

impl<const N: usize> From<[usize; N]> for MapSizes {
    fn from(sizes: [usize; N]) -> Self {
        const { assert!(N <= MAX_RANK, "a tensor map has at most 5 dimensions") };
        let mut of = [0; MAX_RANK];
        of[..N].copy_from_slice(&sizes);
        Self { of, rank: N }
    }
}

impl Deref for MapSizes {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.of[..self.rank]
    }
}

impl fmt::Debug for MapSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

impl MapSizes {
    /// As the driver counts, from the innermost dimension on; zeros behind them.
    fn reversed<T: Copy + Default>(&self, to: impl Fn(usize) -> T) -> [T; MAX_RANK] {
        let mut out = [T::default(); MAX_RANK];
        out.iter_mut().zip(self.iter().rev()).for_each(|(out, &n)| *out = to(n));
        out
    }
}

/// A tensor and the tiles that are copied of it. Sizes are in elements, outermost first; elements
/// of the last dimension lie side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorMapDesc {
    /// Type of an element; FP8 and e8m0 are copied as bytes.
    pub dtype: DType,
    /// Sizes of the tensor: 1 to 5 dimensions of 1 to 2^32.
    pub shape: MapSizes,
    /// Bytes from an index to the next, of all dimensions but the last: multiples of 16 below 2^40.
    pub strides_bytes: MapSizes,
    /// Sizes of a tile, 1 to 256 each; the last times the bytes of an element is a multiple of 16.
    /// What of a tile lies outside of the tensor reads as 0 and is not written; but a row whose
    /// bytes are no multiple of 16 is written up to the next one, in memory too.
    pub tile: MapSizes,
    /// The order of a tile's bytes in shared memory.
    pub swizzle: MapSwizzle,
    /// The piece that a load brings into the L2 cache at least.
    pub promotion: MapPromotion,
    /// The tensor's sizes say nothing of the memory, as those of [`TensorMapDesc::ragged`]: the
    /// length of the memory is not checked.
    pub wraps: bool,
}

/// Alignment of addresses and strides.
const ALIGN: usize = 16;

impl TensorMapDesc {
    /// The most rows of a group of a [`ragged`](TensorMapDesc::ragged) map: what its kernels pass
    /// as the outermost coordinate, and count the row's coordinate from.
    pub const RAGGED_ROWS: usize = 1 << 30;
    /// One more than the last row at which a group of a [`ragged`](TensorMapDesc::ragged) map may
    /// end.
    pub const RAGGED_END: usize = (1 << 31) - (1 << 16);

    /// Rows of a dense matrix in tiles of `tile`, as they are.
    pub fn matrix(dtype: DType, [rows, cols]: [usize; 2], tile: [usize; 2]) -> Self {
        Self {
            dtype,
            shape: [rows, cols].into(),
            strides_bytes: [cols * dtype.size()].into(),
            tile: tile.into(),
            swizzle: MapSwizzle::default(),
            promotion: MapPromotion::default(),
            wraps: false,
        }
    }

    /// Rows of a matrix that belong to groups, packed behind each other, in tiles of `tile` rows
    /// and columns that end with their group. Rows are `row_stride_bytes` apart; where groups begin
    /// and end, the kernel alone knows.
    ///
    /// For row `r` of a group of `n` rows that begins at row `o` of the matrix, and column `c`, a
    /// kernel passes four coordinates, innermost first:
    ///
    /// ```text
    /// (c, 2^30 - n + r, o + n, 2^30)
    /// ```
    ///
    /// - The tensor has four dimensions: `cols`, 2^30, 2^31 - 2^16 and again 2^31 - 2^16. The
    ///   middle two have the stride of a row, `s`; the outermost has `2^34 * size - s`, with the
    ///   bytes `size` of an element. The terms of the last three coordinates add up to
    ///   `s * (o + r) + 2^64 * size`: addresses have 64 bits, so that this is row `o + r`.
    /// - The second dimension ends at 2^30, which is row `n` of the group. A row behind the group's
    ///   last is thus outside of the tensor: it reads as zeros, and is neither written nor added
    ///   to. Columns from `cols` on are outside in the same way. A group of no rows has none
    ///   inside.
    /// - Nothing else is clipped. `r` must not be negative, `n` is at most
    ///   [`RAGGED_ROWS`](Self::RAGGED_ROWS), `o + n` is less than
    ///   [`RAGGED_END`](Self::RAGGED_END), and the group's rows must lie in memory. The tensor
    ///   reaches beyond all memory, so [`check`](Self::check) compares no length: a kernel
    ///   whose offsets are wrong reads and writes at wrong addresses.
    ///
    /// A row stride above `2^34 * size` bytes leaves none for the outermost dimension, which
    /// [`check`](Self::check) refuses.
    pub fn ragged(dtype: DType, cols: usize, row_stride_bytes: usize, tile: [usize; 2]) -> Self {
        let row = row_stride_bytes;
        // Times 2^30 this is a multiple of 2^64, less 2^30 rows.
        let back = (dtype.size() << 34).wrapping_sub(row);
        Self {
            shape: [Self::RAGGED_END, Self::RAGGED_END, Self::RAGGED_ROWS, cols].into(),
            strides_bytes: [back, row, row].into(),
            tile: [1, 1, tile[0], tile[1]].into(),
            wraps: true,
            ..Self::matrix(dtype, [1, cols], tile)
        }
    }

    fn element(&self) -> Result<Type> {
        Ok(match self.dtype {
            DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::I32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
            DType::I64 => Type::CU_TENSOR_MAP_DATA_TYPE_INT64,
            d if d.size() == 1 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            d => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "tensor maps do not support this type",
                )
                .seen(d)
                .hint("describe the bytes as elements of a type of that size"));
            }
        })
    }

    /// Checks the description for a tensor at `addr`, with `len_bytes` from there on. The length
    /// counts for nothing where the map [`wraps`](Self::wraps).
    ///
    /// # Errors
    /// `InvalidArgument` naming what does not fit; `Unsupported` for the type.
    pub fn check(&self, addr: u64, len_bytes: usize) -> Result<()> {
        self.element()?;
        let (rank, size) = (self.shape.len(), self.dtype.size());
        let bad = |what: &str, want: String, seen: String| {
            Err(Error::invalid(format!("a tensor map does not support this {what}"))
                .expected(want)
                .seen(seen))
        };
        if !(1..=MAX_RANK).contains(&rank) {
            return bad("rank", format!("1 to {MAX_RANK}"), rank.to_string());
        }
        if self.strides_bytes.len() != rank - 1 || self.tile.len() != rank {
            let want = format!("{} strides and a tile of {rank}", rank - 1);
            let seen = format!("{} and {}", self.strides_bytes.len(), self.tile.len());
            return bad("number of sizes", want, seen);
        }
        if !addr.is_multiple_of(ALIGN as u64) {
            return bad("address", format!("a multiple of {ALIGN}"), format!("{addr:#x}"));
        }
        if let Some(n) = self.shape.iter().find(|&&n| n == 0 || n > 1 << 32) {
            return bad("size", "1 to 2^32".into(), n.to_string());
        }
        if let Some(s) =
            self.strides_bytes.iter().find(|&&s| !s.is_multiple_of(ALIGN) || s >= 1 << 40)
        {
            return bad("stride", format!("multiples of {ALIGN} below 2^40"), format!("{s} bytes"));
        }
        if let Some(n) = self.tile.iter().find(|n| !(1..=256).contains(*n)) {
            return bad("tile", "1 to 256 in each dimension".into(), n.to_string());
        }
        let inner = self.tile[rank - 1] * size;
        if !inner.is_multiple_of(ALIGN) || inner > self.swizzle.span() {
            let most = match self.swizzle {
                MapSwizzle::None => String::new(),
                s => format!(", at most {}", s.span()),
            };
            return bad(
                "tile",
                format!("rows of a multiple of {ALIGN} bytes{most}"),
                inner.to_string(),
            );
        }
        if self.wraps {
            return Ok(());
        }
        // Of sizes up to 2^32 and strides below 2^40 the sum fits.
        let last = |(n, s): (&usize, &usize)| (*n as u128 - 1) * *s as u128;
        let outer: u128 = self.shape.iter().zip(self.strides_bytes.iter()).map(last).sum();
        let reach = outer + (self.shape[rank - 1] * size).next_multiple_of(ALIGN) as u128;
        if reach > len_bytes as u128 {
            return bad("memory", format!("{reach} bytes"), len_bytes.to_string());
        }
        Ok(())
    }
}

/// An encoded tensor map of an address. Nothing keeps the memory there: whoever launches a kernel
/// with it answers for that. See [`LaunchArgs::raw_map`](super::LaunchArgs::raw_map).
#[derive(Clone, Copy)]
pub struct RawTensorMap(CUtensorMap);

impl RawTensorMap {
    /// Encodes `desc` for the tensor at `addr`, with `len_bytes` from there on. It allocates
    /// nothing unless it fails.
    ///
    /// # Errors
    /// As [`TensorMapDesc::check`]; `Unsupported` on devices older than sm_90.
    pub fn at(
        ctx: &CudaContext,
        addr: u64,
        len_bytes: usize,
        desc: &TensorMapDesc,
    ) -> Result<Self> {
        Ok(Self::all(ctx, [(addr, len_bytes, desc)])?[0])
    }

    /// As [`RawTensorMap::at`] for several: addresses, bytes from there on, descriptions. The
    /// context is made current once, which is most of what one map costs.
    ///
    /// # Errors
    /// As [`RawTensorMap::at`].
    pub fn all<const N: usize>(
        ctx: &CudaContext,
        tensors: [(u64, usize, &TensorMapDesc); N],
    ) -> Result<[Self; N]> {
        let sm = ctx.sm();
        for (addr, len_bytes, desc) in tensors {
            desc.check(addr, len_bytes)?;
        }
        if sm < 90 {
            let text = "this device does not support tensor maps";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .expected("sm_90 or newer")
                .seen(format_args!("sm_{sm}"))
                .hint("copy without one there"));
        }
        let _current = ctx.bind()?;
        let mut out = [Self(CUtensorMap { opaque: [0; 16] }); N];
        for (map, (addr, _, desc)) in out.iter_mut().zip(tensors) {
            *map = Self::encode(addr, desc)?;
        }
        Ok(out)
    }

    /// The encoded map, for kernels that find maps in device memory. It lies there at a multiple of
    /// 128 bytes; each thread makes it known to itself by `fence.proxy.tensormap` before it copies
    /// by it.
    pub fn to_bytes(&self) -> [u8; 128] {
        bytemuck::cast(self.0.opaque)
    }

    /// Encodes what was checked; a context is current.
    fn encode(addr: u64, desc: &TensorMapDesc) -> Result<Self> {
        let element = desc.element()?;
        let sizes = desc.shape.reversed(|n| n as u64);
        let strides = desc.strides_bytes.reversed(|n| n as u64);
        let tile = desc.tile.reversed(|n| n as u32);
        let mut raw = CUtensorMap { opaque: [0; 16] };
        // SAFETY: valid output; lists of at least as many numbers as there are dimensions; steps
        // of one element.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut raw,
                element,
                desc.shape.len() as u32,
                std::ptr::without_provenance_mut(addr as usize),
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                [1; MAX_RANK].as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                desc.swizzle.raw(),
                desc.promotion.raw(),
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(code, "cuTensorMapEncodeTiled").map_err(|e| e.seen(format_args!("{desc:?}")))?;
        Ok(Self(raw))
    }

    pub(super) fn raw(&self) -> &CUtensorMap {
        &self.0
    }
}

/// An encoded tensor map, and the memory that it describes, which lives as long. A kernel takes it
/// as `const __grid_constant__ CUtensorMap`: see [`LaunchArgs::map`](super::LaunchArgs::map).
#[derive(Clone)]
pub struct TensorMap {
    raw: RawTensorMap,
    desc: TensorMapDesc,
    memory: CudaMemory,
}

impl TensorMap {
    /// Encodes `desc` for the tensor at the beginning of `memory`.
    ///
    /// # Errors
    /// As [`TensorMapDesc::check`]; `Unsupported` on devices older than sm_90.
    pub fn new(memory: &CudaMemory, desc: &TensorMapDesc) -> Result<Self> {
        let raw = RawTensorMap::at(memory.context(), memory.addr(), memory.len_bytes(), desc)?;
        Ok(Self { raw, desc: *desc, memory: memory.clone() })
    }

    /// Returns what was encoded.
    pub fn desc(&self) -> &TensorMapDesc {
        &self.desc
    }

    /// The memory that it describes.
    pub fn memory(&self) -> &CudaMemory {
        &self.memory
    }

    pub(super) fn raw(&self) -> &CUtensorMap {
        self.raw.raw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_encoded_is_refused_with_what_was_expected() {
        let good = || TensorMapDesc::matrix(DType::BF16, [100, 72], [64, 32]);
        let len = 100 * 72 * 2;
        good().check(0x1000, len).unwrap();
        // Of the last row only its own columns must be there.
        let wide = TensorMapDesc { strides_bytes: [256].into(), ..good() };
        wide.check(0x1000, 99 * 256 + 144).unwrap();
        let refused = |change: &dyn Fn(&mut TensorMapDesc), addr, len, word: &str| {
            let mut d = good();
            change(&mut d);
            let e = d.check(addr, len).unwrap_err();
            assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains(word), "{e}");
        };
        refused(&|_| {}, 0x1008, len, "address");
        refused(&|_| {}, 0x1000, len - 1, "14400 bytes");
        refused(&|d| d.strides_bytes = [150].into(), 0x1000, 1 << 20, "150 bytes");
        refused(&|d| d.strides_bytes = [1 << 40].into(), 0x1000, usize::MAX, "stride");
        refused(&|d| d.strides_bytes = [].into(), 0x1000, len, "1 strides");
        refused(&|d| d.tile = [64].into(), 0x1000, len, "tile of 2");
        refused(&|d| d.tile = [257, 32].into(), 0x1000, len, "257");
        refused(&|d| d.tile = [0, 32].into(), 0x1000, len, "1 to 256");
        refused(&|d| d.tile = [64, 12].into(), 0x1000, len, "24");
        refused(&|d| d.shape = [0, 72].into(), 0x1000, len, "size");
        refused(&|d| d.shape = [].into(), 0x1000, len, "rank");
        for (swizzle, most, over) in
            [(MapSwizzle::B32, 16, 24), (MapSwizzle::B64, 32, 40), (MapSwizzle::B128, 64, 72)]
        {
            let d = |cols| TensorMapDesc { swizzle, tile: [8, cols].into(), ..good() };
            d(most).check(0, len).unwrap();
            let e = d(over).check(0, len).unwrap_err();
            assert!(e.to_string().contains("at most"), "{e}");
        }
        let five = TensorMapDesc {
            shape: [2; 5].into(),
            strides_bytes: [256, 128, 64, 32].into(),
            tile: [1, 1, 1, 1, 16].into(),
            ..good()
        };
        // Two elements are written as one piece of 16 bytes.
        five.check(0, 496).unwrap();
        assert!(five.check(0, 495).is_err());
    }

    /// The bytes from a map's base to the element at coordinates that a kernel passes, as the
    /// device adds them up; none where it is outside of the tensor.
    fn place(d: &TensorMapDesc, coordinates: [usize; 4]) -> Option<u64> {
        let sizes = d.shape.reversed(|n| n);
        let strides = d.strides_bytes.reversed(|n| n as u64);
        let inside = coordinates.iter().zip(&sizes).all(|(c, n)| c < n);
        let terms = coordinates[1..].iter().zip(&strides);
        let outer = terms.fold(0u64, |sum, (&c, s)| sum.wrapping_add(s.wrapping_mul(c as u64)));
        inside.then(|| outer.wrapping_add((coordinates[0] * d.dtype.size()) as u64))
    }

    #[test]
    fn coordinates_of_a_ragged_map_end_with_their_group() {
        use TensorMapDesc as D;
        for dtype in [DType::U8, DType::BF16, DType::F32, DType::I64] {
            let (cols, row) = (128, 128 * dtype.size() + 48);
            let d = D::ragged(dtype, cols, row, [64, 16]);
            // No memory is enough for it, and none is asked for.
            d.check(0x1000, 0).unwrap();
            let end = D::RAGGED_END - 1;
            for (o, n) in [(0, 5), (7, 1), (1000, 0), (0, D::RAGGED_ROWS), (end - 9, 9)] {
                let at = |r, c| place(&d, [c, D::RAGGED_ROWS - n + r, o + n, D::RAGGED_ROWS]);
                for r in (0..n.min(3)).chain(n.saturating_sub(3)..n) {
                    let want = ((o + r) * row + 100 * dtype.size()) as u64;
                    assert_eq!(at(r, 100), Some(want), "{dtype}: row {r} of {n} from {o}");
                    assert_eq!(at(r, cols), None);
                }
                for r in [n, n + 1, n + 300] {
                    assert_eq!(at(r, 0), None, "{dtype}: row {r} of {n}");
                }
            }
        }
    }

    #[test]
    fn a_ragged_map_is_checked_but_for_the_length_of_its_memory() {
        let good = TensorMapDesc::ragged(DType::BF16, 200, 400, [64, 64]);
        good.check(0x1000, 0).unwrap();
        assert!(TensorMapDesc { wraps: false, ..good }.check(0x1000, usize::MAX >> 16).is_err());
        let bad = |d: TensorMapDesc, addr, word: &str| {
            let e = d.check(addr, usize::MAX).unwrap_err();
            assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains(word), "{e}");
        };
        bad(good, 0x1008, "address");
        bad(TensorMapDesc::ragged(DType::BF16, 200, 408, [64, 64]), 0, "stride");
        // Above 2^35 bytes there is no way back.
        TensorMapDesc::ragged(DType::BF16, 200, 1 << 35, [64, 64]).check(0, 0).unwrap();
        bad(TensorMapDesc::ragged(DType::BF16, 200, (1 << 35) + 16, [64, 64]), 0, "stride");
        bad(TensorMapDesc::ragged(DType::BF16, 200, 400, [257, 64]), 0, "tile");
        bad(TensorMapDesc { swizzle: MapSwizzle::B64, ..good }, 0, "at most 64");
    }

    #[test]
    fn the_driver_counts_from_the_innermost_dimension() {
        let sizes = MapSizes::from([4, 5, 6]);
        assert_eq!(sizes.reversed(|n| n as u32), [6, 5, 4, 0, 0]);
        assert_eq!((&sizes[..], format!("{sizes:?}")), (&[4, 5, 6][..], "[4, 5, 6]".to_owned()));
        let default = TensorMapDesc::matrix(DType::F32, [8, 16], [8, 16]);
        assert_eq!(default.promotion, MapPromotion::B128);
    }
}
