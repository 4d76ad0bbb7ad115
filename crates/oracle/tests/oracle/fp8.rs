use tilewire_core::{DType, convert_from_f32, convert_to_f32};
use tilewire_oracle::fp8::{NAN_CODE, decode, decode_e8m0, encode, round, ulp};

use crate::rng;

const BOTH: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

/// What core makes of the same value.
fn core_code(dtype: DType, v: f32) -> u8 {
    let mut out = [0];
    convert_from_f32(dtype, &[v], &mut out);
    out[0]
}

#[test]
fn known_codes() {
    let (e4, e5) = (DType::F8E4M3, DType::F8E5M2);
    // OCP 8-bit floating point specification, table 2.
    for (d, code, want) in [
        (e4, 0x7E, 448.0),
        (e4, 0x08, 2f64.powi(-6)),
        (e4, 0x07, 0.875 * 2f64.powi(-6)),
        (e4, 0x01, 2f64.powi(-9)),
        (e4, 0xB8, -1.0),
        (e5, 0x7B, 57344.0),
        (e5, 0x04, 2f64.powi(-14)),
        (e5, 0x03, 0.75 * 2f64.powi(-14)),
        (e5, 0x01, 2f64.powi(-16)),
        (e5, 0xBC, -1.0),
        (e5, 0x7C, f64::INFINITY),
    ] {
        assert_eq!(decode(d, code), want, "{d} {code:#x}");
    }
    assert!(decode(e4, 0x7F).is_nan() && decode(e4, 0xFF).is_nan() && decode(e5, 0x7D).is_nan());
    assert_eq!((decode_e8m0(127), decode_e8m0(130), decode_e8m0(0)), (1.0, 8.0, 2f64.powi(-127)));
    assert!(decode_e8m0(255).is_nan());
}

#[test]
fn decoding_equals_core() {
    for d in [DType::F8E4M3, DType::F8E5M2, DType::E8M0] {
        for code in 0..=255u8 {
            let mut want = [0.0];
            convert_to_f32(d, &[code], &mut want);
            let got = if d == DType::E8M0 { decode_e8m0(code) } else { decode(d, code) };
            let same =
                got.to_bits() == f64::from(want[0]).to_bits() || got.is_nan() && want[0].is_nan();
            assert!(same, "{d} {code:#x}: {got} {}", want[0]);
        }
    }
}

#[test]
fn rounding_equals_core_at_every_boundary() {
    for d in BOTH {
        let mut values: Vec<f64> =
            (0..128).map(|c| decode(d, c)).filter(|v| v.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        for pair in values.windows(2) {
            let middle = ((pair[0] + pair[1]) / 2.0) as f32;
            for v in [pair[0] as f32, middle, middle.next_down(), middle.next_up()] {
                for v in [v, -v] {
                    assert_eq!(encode(d, f64::from(v)), core_code(d, v), "{d} {v:e}");
                }
            }
        }
        for v in [0.0, -0.0, 1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE] {
            assert_eq!(encode(d, f64::from(v)), core_code(d, v), "{d} {v:e}");
        }
        assert_eq!(encode(d, f64::NAN), NAN_CODE);
        assert!(decode(d, core_code(d, f32::NAN)).is_nan() && decode(d, NAN_CODE).is_nan());
    }
}

#[test]
fn rounding_equals_core_on_random_values() {
    let mut r = rng(1);
    for d in BOTH {
        for _ in 0..20_000 {
            let v = r.normal() * 2f32.powi(r.below(40) as i32 - 22);
            assert_eq!(encode(d, f64::from(v)), core_code(d, v), "{d} {v:e}");
        }
    }
}

#[test]
fn error_is_at_most_half_an_ulp_and_ties_go_to_even() {
    let mut r = rng(2);
    for d in BOTH {
        let mut largest = 0.0f64;
        for _ in 0..5_000 {
            let v = f64::from(r.normal()) * 2f64.powi(r.below(20) as i32 - 14);
            let err = (round(d, v) - v).abs() / ulp(d, v);
            largest = largest.max(err);
        }
        assert!(largest <= 0.5 && largest > 0.49, "{d} {largest}");
    }
    // 1 + 1/16 lies between the codes of 1 and 1.125; 1.125 + 1/16 between 1.125 and 1.25.
    assert_eq!((round(DType::F8E4M3, 1.0625), round(DType::F8E4M3, 1.1875)), (1.0, 1.25));
    assert_eq!(ulp(DType::F8E4M3, 1.5), 0.125);
    assert_eq!(ulp(DType::F8E5M2, 0.0), 2f64.powi(-16));
}

/// The nearest of all codes, one after the other.
fn exhaustive(dtype: DType, v: f64) -> u8 {
    let clamped = v.clamp(-dtype.max_finite(), dtype.max_finite());
    let mut best = (f64::INFINITY, 0u8);
    for code in 0..=255u8 {
        let value = decode(dtype, code);
        if !value.is_finite() || (code & 0x80 != 0) != v.is_sign_negative() {
            continue;
        }
        let distance = (value - clamped).abs();
        if distance < best.0 || distance == best.0 && code & 1 == 0 {
            best = (distance, code);
        }
    }
    best.1
}

#[test]
fn the_search_finds_what_trying_all_codes_finds() {
    let mut r = rng(3);
    for d in BOTH {
        for _ in 0..5_000 {
            let v = f64::from(r.normal()) * 2f64.powi(r.below(60) as i32 - 40);
            assert_eq!(encode(d, v), exhaustive(d, v), "{d} {v:e}");
        }
        for a in (0..=255).map(|c| decode(d, c)).filter(|v| v.is_finite()) {
            for v in [a, a.next_up(), a.next_down()] {
                assert_eq!(encode(d, v), exhaustive(d, v), "{d} {v:e}");
            }
        }
        for v in [f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(encode(d, v), exhaustive(d, v), "{d} {v:e}");
        }
    }
}
