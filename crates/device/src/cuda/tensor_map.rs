//! Tensor maps: how the tensor memory accelerator of sm_90 and newer sees a tensor in device
//! memory.

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as Type, CUtensorMapFloatOOBfill as Fill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as L2, CUtensorMapSwizzle as Raw,
};
use tilewire_core::{DType, Error, ErrorKind, Result};

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

/// A tensor and the tiles that are copied of it. Sizes are in elements, outermost first; elements
/// of the last dimension lie side by side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorMapDesc {
    /// Type of an element; FP8 and e8m0 are copied as bytes.
    pub dtype: DType,
    /// Sizes of the tensor: 1 to 5 dimensions of 1 to 2^32.
    pub shape: Vec<usize>,
    /// Bytes from an index to the next, of all dimensions but the last: multiples of 16 below 2^40.
    pub strides_bytes: Vec<usize>,
    /// Sizes of a tile, 1 to 256 each; the last times the bytes of an element is a multiple of 16.
    /// What of a tile lies outside of the tensor reads as 0 and is not written; but a row whose
    /// bytes are no multiple of 16 is written up to the next one, in memory too.
    pub tile: Vec<usize>,
    /// The order of a tile's bytes in shared memory.
    pub swizzle: MapSwizzle,
}

/// Alignment of addresses and strides.
const ALIGN: usize = 16;

impl TensorMapDesc {
    /// Rows of a dense matrix in tiles of `tile`, as they are.
    pub fn matrix(dtype: DType, [rows, cols]: [usize; 2], tile: [usize; 2]) -> Self {
        Self {
            dtype,
            shape: vec![rows, cols],
            strides_bytes: vec![cols * dtype.size()],
            tile: tile.to_vec(),
            swizzle: MapSwizzle::None,
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

    /// Checks the description for a tensor at `addr`, with `len_bytes` from there on.
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
        if !(1..=5).contains(&rank) {
            return bad("rank", "1 to 5".into(), rank.to_string());
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
        // Of sizes up to 2^32 and strides below 2^40 the sum fits.
        let last = |(n, s): (&usize, &usize)| (*n as u128 - 1) * *s as u128;
        let outer: u128 = self.shape.iter().zip(&self.strides_bytes).map(last).sum();
        let reach = outer + (self.shape[rank - 1] * size).next_multiple_of(ALIGN) as u128;
        if reach > len_bytes as u128 {
            return bad("memory", format!("{reach} bytes"), len_bytes.to_string());
        }
        Ok(())
    }
}

/// An encoded tensor map, and the memory that it describes, which lives as long. A kernel takes it
/// as `const __grid_constant__ CUtensorMap`: see [`LaunchArgs::map`](super::LaunchArgs::map).
#[derive(Clone)]
pub struct TensorMap {
    raw: CUtensorMap,
    desc: TensorMapDesc,
    memory: CudaMemory,
}

impl TensorMap {
    /// Encodes `desc` for the tensor at the beginning of `memory`.
    ///
    /// # Errors
    /// As [`TensorMapDesc::check`]; `Unsupported` on devices older than sm_90.
    pub fn new(memory: &CudaMemory, desc: &TensorMapDesc) -> Result<Self> {
        desc.check(memory.addr(), memory.len_bytes())?;
        let (ctx, element) = (memory.context(), desc.element()?);
        let sm = ctx.sm();
        if sm < 90 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this device does not support tensor maps",
            )
            .expected("sm_90 or newer")
            .seen(format_args!("sm_{sm}"))
            .hint("copy without one there"));
        }
        let _current = ctx.bind()?;
        // The driver counts from the innermost dimension.
        let sizes: Vec<u64> = desc.shape.iter().rev().map(|&n| n as u64).collect();
        let strides: Vec<u64> = desc.strides_bytes.iter().rev().map(|&n| n as u64).collect();
        let tile: Vec<u32> = desc.tile.iter().rev().map(|&n| n as u32).collect();
        let mut raw = CUtensorMap { opaque: [0; 16] };
        let base = std::ptr::without_provenance_mut(memory.addr() as usize);
        // SAFETY: valid output; lists of as many numbers as there are dimensions, strides one less;
        // steps of one element.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut raw,
                element,
                sizes.len() as u32,
                base,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                [1; 5].as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                desc.swizzle.raw(),
                L2::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(code, "cuTensorMapEncodeTiled").map_err(|e| e.seen(format_args!("{desc:?}")))?;
        Ok(Self { raw, desc: desc.clone(), memory: memory.clone() })
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
        &self.raw
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
        let wide = TensorMapDesc { strides_bytes: vec![256], ..good() };
        wide.check(0x1000, 99 * 256 + 144).unwrap();
        let refused = |change: &dyn Fn(&mut TensorMapDesc), addr, len, word: &str| {
            let mut d = good();
            change(&mut d);
            let e = d.check(addr, len).unwrap_err();
            assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains(word), "{e}");
        };
        refused(&|_| {}, 0x1008, len, "address");
        refused(&|_| {}, 0x1000, len - 1, "14400 bytes");
        refused(&|d| d.strides_bytes = vec![150], 0x1000, 1 << 20, "150 bytes");
        refused(&|d| d.strides_bytes = vec![1 << 40], 0x1000, usize::MAX, "stride");
        refused(&|d| d.strides_bytes.clear(), 0x1000, len, "1 strides");
        refused(&|d| d.tile = vec![64], 0x1000, len, "tile of 2");
        refused(&|d| d.tile = vec![257, 32], 0x1000, len, "257");
        refused(&|d| d.tile = vec![0, 32], 0x1000, len, "1 to 256");
        refused(&|d| d.tile = vec![64, 12], 0x1000, len, "24");
        refused(&|d| d.shape = vec![0, 72], 0x1000, len, "size");
        refused(&|d| d.shape.clear(), 0x1000, len, "rank");
        for (swizzle, most, over) in
            [(MapSwizzle::B32, 16, 24), (MapSwizzle::B64, 32, 40), (MapSwizzle::B128, 64, 72)]
        {
            let d = |cols| TensorMapDesc { swizzle, tile: vec![8, cols], ..good() };
            d(most).check(0, len).unwrap();
            let e = d(over).check(0, len).unwrap_err();
            assert!(e.to_string().contains("at most"), "{e}");
        }
        let five = TensorMapDesc {
            shape: vec![2; 5],
            strides_bytes: vec![256, 128, 64, 32],
            tile: vec![1, 1, 1, 1, 16],
            ..good()
        };
        // Two elements are written as one piece of 16 bytes.
        five.check(0, 496).unwrap();
        assert!(five.check(0, 495).is_err());
    }
}
