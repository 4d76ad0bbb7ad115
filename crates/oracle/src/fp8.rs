//! FP8 and E8M0 codes from their definitions, independent of any conversion library.

use std::sync::OnceLock;

use tilewire_core::DType;

/// Canonical NaN code of both FP8 types (what `cvt.rn.satfinite` of the GPU returns).
pub const NAN_CODE: u8 = 0x7F;

/// Exponent bits, mantissa bits and bias of an FP8 type.
fn fields(dtype: DType) -> (u32, u32, i32) {
    assert!(dtype.is_fp8(), "{dtype} is not FP8");
    if dtype == DType::F8E4M3 { (4, 3, 7) } else { (5, 2, 15) }
}

/// Value of an FP8 code (OCP 8-bit floating point specification, §5): `(-1)^s 2^(e - bias) 1.m`,
/// subnormal `(-1)^s 2^(1 - bias) 0.m` for `e = 0`.
///
/// E4M3 has no infinities and one NaN (`S.1111.111`). E5M2 is IEEE-like: exponent 31 is infinite
/// with mantissa 0 and NaN otherwise.
///
/// # Panics
/// If `dtype` is not FP8.
pub fn decode(dtype: DType, code: u8) -> f64 {
    let (exp_bits, man_bits, bias) = fields(dtype);
    let exp = i32::from(code >> man_bits) & ((1 << exp_bits) - 1);
    let man = code & ((1 << man_bits) - 1);
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    if dtype == DType::F8E4M3 && code & 0x7F == 0x7F {
        return f64::NAN;
    }
    if dtype == DType::F8E5M2 && exp == 31 {
        return if man == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    let fraction = f64::from(man) / f64::from(1u32 << man_bits);
    match exp {
        0 => sign * fraction * 2f64.powi(1 - bias),
        e => sign * (1.0 + fraction) * 2f64.powi(e - bias),
    }
}

/// The finite values without a sign, ascending: index and code are the same.
fn magnitudes(dtype: DType) -> &'static [f64] {
    static EACH: [OnceLock<Vec<f64>>; 2] = [const { OnceLock::new() }; 2];
    EACH[usize::from(dtype == DType::F8E4M3)].get_or_init(|| {
        (0..=0x7F).map(|code| decode(dtype, code)).take_while(|v| v.is_finite()).collect()
    })
}

/// FP8 code nearest to `v`: ties go to the code with an even mantissa, values beyond the largest
/// finite one (infinities too) saturate, the sign of zero is kept, and NaN gives [`NAN_CODE`].
///
/// # Panics
/// If `dtype` is not FP8.
pub fn encode(dtype: DType, v: f64) -> u8 {
    assert!(dtype.is_fp8(), "{dtype} is not FP8");
    if v.is_nan() {
        return NAN_CODE;
    }
    let values = magnitudes(dtype);
    let above = values.partition_point(|&x| x < v.abs());
    let distance = |at: usize| (values[at] - v.abs()).abs();
    let code = match above {
        0 => 0,
        at if at == values.len() => at - 1,
        // The lowest mantissa bit is the lowest bit of the code.
        at if distance(at) == distance(at - 1) => at & !1,
        at if distance(at) < distance(at - 1) => at,
        at => at - 1,
    };
    code as u8 | if v.is_sign_negative() { 0x80 } else { 0 }
}

/// `v` rounded to FP8: the value of [`encode`].
///
/// # Panics
/// If `dtype` is not FP8.
pub fn round(dtype: DType, v: f64) -> f64 {
    decode(dtype, encode(dtype, v))
}

/// Distance between the two FP8 values that enclose `v` (the spacing of its binade).
///
/// # Panics
/// If `dtype` is not FP8.
pub fn ulp(dtype: DType, v: f64) -> f64 {
    let (_, man_bits, bias) = fields(dtype);
    let mut exp = 1 - bias;
    while 2f64.powi(exp + 1) <= v.abs().min(dtype.max_finite()) {
        exp += 1;
    }
    2f64.powi(exp - man_bits as i32)
}

/// Value of an E8M0 byte: `2^(byte - 127)`, NaN for 255 (OCP Microscaling Formats, §5.4.1).
pub fn decode_e8m0(byte: u8) -> f64 {
    if byte == 255 { f64::NAN } else { 2f64.powi(i32::from(byte) - 127) }
}
