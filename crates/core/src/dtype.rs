//! Element types and their conversions.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Eight-bit float with 4 exponent and 3 mantissa bits; largest value 448, no infinities.
pub type F8E4M3 = float8::F8E4M3;
/// Eight-bit float with 5 exponent and 2 mantissa bits; largest finite value 57344.
pub type F8E5M2 = float8::F8E5M2;

/// Element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary64; oracles and gradient checks only.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16: 8 exponent and 7 mantissa bits.
    BF16,
    /// IEEE binary16.
    F16,
    /// FP8 with 4 exponent bits ([`F8E4M3`]).
    F8E4M3,
    /// FP8 with 5 exponent bits ([`F8E5M2`]).
    F8E5M2,
    /// Power-of-two scale of MXFP8: value `2^(byte - 127)`, 255 is NaN.
    E8M0,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// Byte.
    U8,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 10] = [
        DType::F64,
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::E8M0,
        DType::I32,
        DType::I64,
        DType::U8,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::E8M0 | DType::U8 => 1,
        }
    }

    /// Name as written on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::E8M0 => "e8m0",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        }
    }

    /// True for the floating types that arithmetic is done on.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2
        )
    }

    /// True for the two FP8 types.
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// Unit roundoff `u` (half the distance from 1 to the next value); 0 for integers.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON / 2.0,
            DType::F32 => 5.960_464_477_539_063e-8,
            DType::BF16 => 1.0 / 256.0,
            DType::F16 => 1.0 / 2048.0,
            DType::F8E4M3 => 1.0 / 16.0,
            DType::F8E5M2 => 1.0 / 8.0,
            _ => 0.0,
        }
    }

    /// Largest finite value, for the floating types.
    pub const fn max_finite(self) -> f64 {
        match self {
            DType::F64 => f64::MAX,
            DType::F32 => f32::MAX as f64,
            DType::BF16 => 3.389_531_389_251_535_5e38,
            DType::F16 => 65504.0,
            DType::F8E4M3 => 448.0,
            DType::F8E5M2 => 57344.0,
            _ => 0.0,
        }
    }

    /// Byte that fills an aborted output of this type: NaN for floats, NaN for `e8m0`, -1 or 255
    /// for integers. (Four `0xFF` bytes are a NaN in every floating type here.)
    pub const POISON: u8 = 0xFF;
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names: Vec<_> = DType::ALL.iter().map(|d| d.name()).collect();
            Error::invalid(format!("unknown dtype `{s}`; one of {}", names.join(", ")))
        })
    }
}

/// Rust types that stand for a [`DType`] in memory.
pub trait Element: bytemuck::Pod + PartialEq + fmt::Debug + Send + Sync {
    /// The element type.
    const DTYPE: DType;
    /// Nearest value (ties to even); FP8 saturates, integers round.
    fn from_f32(v: f32) -> Self;
    /// Exact widening (integers beyond 2^24 round).
    fn to_f32(self) -> f32;
}

macro_rules! element {
    ($t:ty, $d:ident, $from:expr, $to:expr) => {
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            #[inline]
            fn from_f32(v: f32) -> Self {
                ($from)(v)
            }
            #[inline]
            fn to_f32(self) -> f32 {
                ($to)(self)
            }
        }
    };
}
element!(f64, F64, |v| v as f64, |s| s as f32);
element!(f32, F32, |v| v, |s| s);
element!(bf16, BF16, bf16::from_f32, |s: bf16| s.to_f32());
element!(f16, F16, f16::from_f32, |s: f16| s.to_f32());
element!(i32, I32, |v: f32| v.round() as i32, |s| s as f32);
element!(i64, I64, |v: f32| v.round() as i64, |s| s as f32);
element!(u8, U8, |v: f32| v.round() as u8, |s| s as f32);

/// FP8 bits of `v`, rounded to nearest even and saturated to the largest finite value.
fn to_fp8(dtype: DType, v: f32) -> u8 {
    let max = dtype.max_finite() as f32;
    // NaN stays NaN: clamp passes it through.
    let v = v.clamp(-max, max);
    match dtype {
        DType::F8E4M3 => F8E4M3::from_f32(v).to_bits(),
        _ => F8E5M2::from_f32(v).to_bits(),
    }
}

/// Widens `src` (elements of `dtype`, any alignment) to f32.
///
/// # Panics
/// If `src` is not `dst.len()` elements long.
pub fn convert_to_f32(dtype: DType, src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len() * dtype.size(), "byte length and element count differ");
    fn each<const N: usize>(src: &[u8], dst: &mut [f32], f: impl Fn([u8; N]) -> f32) {
        for (d, s) in dst.iter_mut().zip(src.chunks_exact(N)) {
            let mut b = [0; N];
            b.copy_from_slice(s);
            *d = f(b);
        }
    }
    match dtype {
        DType::F64 => each(src, dst, |b| f64::from_ne_bytes(b) as f32),
        DType::F32 => each(src, dst, f32::from_ne_bytes),
        DType::BF16 => each(src, dst, |b| bf16::from_ne_bytes(b).to_f32()),
        DType::F16 => each(src, dst, |b| f16::from_ne_bytes(b).to_f32()),
        DType::F8E4M3 => each(src, dst, |[b]| F8E4M3::from_bits(b).to_f32()),
        DType::F8E5M2 => each(src, dst, |[b]| F8E5M2::from_bits(b).to_f32()),
        DType::E8M0 => each(src, dst, |[b]| e8m0_to_f32(b)),
        DType::I32 => each(src, dst, |b| i32::from_ne_bytes(b) as f32),
        DType::I64 => each(src, dst, |b| i64::from_ne_bytes(b) as f32),
        DType::U8 => each(src, dst, |[b]| b as f32),
    }
}

/// Rounds `src` to `dtype` (nearest, ties to even; FP8 saturates).
///
/// # Panics
/// If `dst` is not `src.len()` elements long.
pub fn convert_from_f32(dtype: DType, src: &[f32], dst: &mut [u8]) {
    assert_eq!(dst.len(), src.len() * dtype.size(), "byte length and element count differ");
    fn each<const N: usize>(src: &[f32], dst: &mut [u8], f: impl Fn(f32) -> [u8; N]) {
        for (d, &s) in dst.chunks_exact_mut(N).zip(src) {
            d.copy_from_slice(&f(s));
        }
    }
    match dtype {
        DType::F64 => each(src, dst, |v| (v as f64).to_ne_bytes()),
        DType::F32 => each(src, dst, f32::to_ne_bytes),
        DType::BF16 => each(src, dst, |v| bf16::from_f32(v).to_ne_bytes()),
        DType::F16 => each(src, dst, |v| f16::from_f32(v).to_ne_bytes()),
        DType::F8E4M3 | DType::F8E5M2 => each(src, dst, |v| [to_fp8(dtype, v)]),
        DType::E8M0 => each(src, dst, |v| [f32_to_e8m0(v)]),
        DType::I32 => each(src, dst, |v| (v.round() as i32).to_ne_bytes()),
        DType::I64 => each(src, dst, |v| (v.round() as i64).to_ne_bytes()),
        DType::U8 => each(src, dst, |v| [v.round() as u8]),
    }
}

/// Value of an E8M0 byte: `2^(byte - 127)`, NaN for 255 (OCP Microscaling Formats, §5.4.1).
pub fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        // 2^-127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        b => f32::from_bits(u32::from(b) << 23),
    }
}

/// Smallest E8M0 byte whose value is at least `v` (round up), 255 for NaN or negative.
pub fn f32_to_e8m0(v: f32) -> u8 {
    if v.is_nan() || v < 0.0 {
        return 255;
    }
    // The sign that is left is that of -0.
    let bits = v.abs().to_bits();
    let exp = bits >> 23;
    let frac = bits & 0x7f_ffff;
    let up = match exp {
        0 => u32::from(frac > 1 << 22),
        _ => exp + u32::from(frac != 0),
    };
    up.min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp8_byte_round_trips() {
        for d in [DType::F8E4M3, DType::F8E5M2] {
            for b in 0..=255u8 {
                let mut f = [0.0];
                convert_to_f32(d, &[b], &mut f);
                if !f[0].is_finite() {
                    continue;
                }
                let mut back = [0];
                convert_from_f32(d, &f, &mut back);
                assert_eq!(back[0], b, "{d} byte {b:#x} = {}", f[0]);
            }
        }
    }

    #[test]
    fn fp8_saturates_and_keeps_nan() {
        for d in [DType::F8E4M3, DType::F8E5M2] {
            let mut out = [0; 3];
            convert_from_f32(d, &[1e30, -1e30, f32::NAN], &mut out);
            let mut f = [0.0; 3];
            convert_to_f32(d, &out, &mut f);
            let max = d.max_finite() as f32;
            assert_eq!(&f[..2], &[max, -max]);
            assert!(f[2].is_nan());
        }
    }

    #[test]
    fn poison_byte_is_nan_in_every_float_type() {
        for d in DType::ALL.into_iter().filter(|d| d.is_float() || *d == DType::E8M0) {
            let mut f = [0.0];
            convert_to_f32(d, &vec![DType::POISON; d.size()], &mut f);
            assert!(f[0].is_nan(), "{d}");
        }
    }

    #[test]
    fn e8m0_rounds_up_and_round_trips() {
        for b in 0..=254u8 {
            assert_eq!(f32_to_e8m0(e8m0_to_f32(b)), b);
        }
        assert_eq!(f32_to_e8m0(1.0), 127);
        assert_eq!(f32_to_e8m0(-0.0), f32_to_e8m0(0.0));
        assert_eq!(f32_to_e8m0(1.0001), 128);
        assert_eq!(f32_to_e8m0(f32::NAN), 255);
        assert_eq!(f32_to_e8m0(f32::MAX), 254);
    }

    #[test]
    fn names_parse() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        assert!("fp4".parse::<DType>().unwrap_err().to_string().contains("bf16"));
    }
}
