use tilewire_core::{DType, QTensor, ScaleLayout, convert_from_f32};
use tilewire_oracle::quant::{
    DelayedScaling, QuantSpec, amax, dequantize, fake_quantize, quantize, quantize_transposed,
    quantize_with_scale,
};
use tilewire_oracle::{Mat, fp8};

use crate::rng;

const LAYOUTS: [ScaleLayout; 5] = [
    ScaleLayout::Tensor,
    ScaleLayout::Block1x128,
    ScaleLayout::Block128x128,
    ScaleLayout::Mx1x32,
    ScaleLayout::Mx1x32Swizzled,
];

fn specs() -> Vec<QuantSpec> {
    let mut all = Vec::new();
    for layout in LAYOUTS {
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for pow2_scales in [false, true] {
                all.push(QuantSpec { dtype, layout, pow2_scales });
            }
        }
    }
    all
}

/// Magnitudes from 2^-20 to 2^20 in different columns and rows, so that blocks differ.
fn wide(seed: u64, rows: usize, cols: usize) -> Mat {
    let mut r = rng(seed);
    let x = Mat::random(&mut r, rows, cols);
    Mat::from_fn(rows, cols, |i, j| {
        x.at(i, j) * 2f64.powi(((i / 3 * 7 + j / 16 * 5) % 41) as i32 - 20)
    })
}

#[test]
fn error_is_half_an_ulp_of_the_scaled_value() {
    for spec in specs() {
        for (rows, cols) in [(1, 1), (3, 130), (70, 40), (130, 33)] {
            let x = wide(1, rows, cols);
            let q = quantize(&x, spec);
            let y = dequantize(&q);
            for r in 0..rows {
                for c in 0..cols {
                    let scale = f64::from(q.scale(r, c));
                    let half = 0.5 * fp8::ulp(spec.dtype, x.at(r, c) / scale) * scale;
                    let err = (x.at(r, c) - y.at(r, c)).abs();
                    // The f32 division before the rounding adds its own half ulp.
                    assert!(err <= half * (1.0 + 1e-5), "{spec:?} {r},{c}: {err:e} {half:e}");
                }
            }
        }
    }
}

#[test]
fn parts_fit_and_quantising_twice_changes_nothing() {
    for spec in specs() {
        for (rows, cols) in [(0, 5), (3, 0), (2, 200), (129, 31)] {
            let x = wide(2, rows, cols);
            let q = quantize(&x, spec);
            QTensor::new(q.data.clone(), q.scales.clone(), q.dtype, q.shape, q.layout).unwrap();
            let y = fake_quantize(&x, spec);
            assert_eq!(fake_quantize(&y, spec), y, "{spec:?}");
        }
    }
}

#[test]
fn codes_are_cores_rounding_of_the_f32_quotient() {
    for spec in specs() {
        let x = wide(3, 40, 150);
        let q = quantize(&x, spec);
        for r in 0..x.rows {
            for c in 0..x.cols {
                let mut want = [0];
                convert_from_f32(spec.dtype, &[x.at(r, c) as f32 / q.scale(r, c)], &mut want);
                assert_eq!(q.data[r * x.cols + c], want[0], "{spec:?} {r},{c}");
            }
        }
    }
}

#[test]
fn the_quotient_is_rounded_to_f32_before_it_is_rounded_to_fp8() {
    // The exact quotient lies just above the tie between 1 (even) and 1.125, the f32 one on it.
    let tie = 1.0625;
    let mut found = 0;
    for i in 1..200 {
        let scale = 0.01 * i as f32;
        let middle = tie * scale;
        for x in [middle.next_down(), middle, middle.next_up()] {
            let exact = f64::from(x) / f64::from(scale);
            if exact > f64::from(tie) && x / scale == tie {
                found += 1;
                let x = Mat::new(1, 1, vec![f64::from(x)]);
                assert_eq!(quantize_with_scale(&x, DType::F8E4M3, scale).data, [0x38]);
            }
        }
    }
    assert!(found > 10, "{found}");
}

#[test]
fn scales_are_the_smallest_that_hold_the_block() {
    for spec in specs() {
        let max = spec.dtype.max_finite();
        let pow2 = spec.pow2_scales || spec.layout.dtype() == DType::E8M0;
        for a in [max, max * 1.0001, 1.0, 3.0e-5, 1e20, max * 2f64.powi(-30)] {
            let a = f64::from(a as f32);
            let s = spec.scale(a);
            if pow2 {
                assert_eq!(s.log2().fract(), 0.0, "{spec:?}");
                assert!(a / s <= max && a / (s / 2.0) > max, "{spec:?} {a} {s}");
            } else {
                assert_eq!(s, f64::from(a as f32 / max as f32), "{spec:?}");
            }
        }
        assert_eq!(spec.scale(max), 1.0);
        assert_eq!((spec.scale(0.0), spec.scale(f64::INFINITY)), (1.0, 1.0));
        let floor = if spec.layout.dtype() == DType::E8M0 { -127 } else { -126 };
        assert_eq!(spec.scale(1e-45), 2f64.powi(floor), "{spec:?}");
    }
}

#[test]
fn blocks_have_their_own_scale() {
    let mut x = Mat::zeros(130, 130).map(|_| 1.0);
    *x.at_mut(129, 129) = 448.0;
    *x.at_mut(1, 2) = 448.0 * 4.0;
    let spec = |layout| QuantSpec::new(DType::F8E4M3, layout);
    let one = |layout| f64::from((spec(layout).scale(1.0)) as f32);
    for (layout, at_1_3, at_1_127, at_129_128, at_2_2) in [
        (ScaleLayout::Tensor, 4.0, 4.0, 4.0, 4.0),
        (ScaleLayout::Block1x128, 4.0, 4.0, 1.0, one(ScaleLayout::Block1x128)),
        (ScaleLayout::Block128x128, 4.0, 4.0, 1.0, 4.0),
        (ScaleLayout::Mx1x32, 4.0, one(ScaleLayout::Mx1x32), 1.0, one(ScaleLayout::Mx1x32)),
    ] {
        let q = quantize(&x, spec(layout));
        let got = [(1, 3), (1, 127), (129, 128), (2, 2)].map(|(r, c)| f64::from(q.scale(r, c)));
        assert_eq!(got, [at_1_3, at_1_127, at_129_128, at_2_2], "{layout:?}");
    }
}

#[test]
fn zeros_nan_and_infinity() {
    for spec in specs() {
        let zero = quantize(&Mat::zeros(2, 40), spec);
        assert!(zero.data.iter().all(|&b| b == 0) && zero.scale(1, 39) == 1.0, "{spec:?}");
        let clean = Mat::new(1, 4, vec![1.0, -2.0, 3.5, 0.25]);
        let mut dirty = clean.clone();
        dirty.data[1] = f64::NAN;
        let (q, want) = (quantize(&dirty, spec), quantize(&clean, spec));
        assert_eq!((q.data[1], q.data[2], &q.scales), (fp8::NAN_CODE, want.data[2], &want.scales));
        assert!(dequantize(&q).at(0, 1).is_nan());
        dirty.data[1] = f64::NEG_INFINITY;
        let y = fake_quantize(&dirty, spec);
        assert_eq!((y.at(0, 0), y.at(0, 1)), (1.0, -spec.dtype.max_finite()), "{spec:?}");
    }
}

#[test]
fn column_wise_blocks_run_along_the_rows() {
    let x = wide(4, 70, 45);
    for spec in specs() {
        let y = dequantize(&quantize_transposed(&x, spec)).transpose();
        let row_wise = fake_quantize(&x, spec);
        let square = matches!(spec.layout, ScaleLayout::Tensor | ScaleLayout::Block128x128);
        assert_eq!(y == row_wise, square, "{spec:?}");
        // Column 7 alone, as a row, has the same blocks.
        let column = x.slice_cols(7..8).transpose();
        if !square {
            assert_eq!(fake_quantize(&column, spec).data, y.slice_cols(7..8).data, "{spec:?}");
        }
    }
}

#[test]
fn swizzled_scales_are_the_same_scales() {
    let x = wide(5, 150, 170);
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        let plain = quantize(&x, QuantSpec::new(dtype, ScaleLayout::Mx1x32));
        let tiled = quantize(&x, QuantSpec::new(dtype, ScaleLayout::Mx1x32Swizzled));
        assert_eq!(plain.data, tiled.data);
        assert_eq!(dequantize(&plain), dequantize(&tiled));
        // cuBLAS VEC32_UE8M0: row 130, block 5 of 6 is tile (1, 1), byte 2 * 16 + 0 * 4 + 1.
        assert_eq!(tiled.scales[3 * 512 + 33], plain.scales[130 * 6 + 5]);
        let used = tiled.scales.iter().filter(|&&b| b != 0).count();
        assert_eq!(used, 150 * 6, "padding bytes are 0");
    }
}

#[test]
fn delayed_scaling_follows_the_window() {
    let mut d = DelayedScaling::new(DType::F8E4M3, 2, 1);
    let step = |d: &mut DelayedScaling, v: f64| {
        let q = d.step(&Mat::new(1, 2, vec![v, -v / 2.0]));
        (q.scale(0, 0), dequantize(&q).at(0, 0))
    };
    assert_eq!(step(&mut d, 448.0), (1.0, 448.0));
    // Margin 1: headroom of a factor of two.
    assert_eq!(step(&mut d, 2000.0), (2.0, 896.0), "saturates at the scale of the step before");
    assert_eq!(d.scale, (2000.0 / 448.0 * 2.0) as f32);
    assert_eq!(step(&mut d, 4.48).0, (2000.0 / 448.0 * 2.0) as f32);
    assert_eq!(d.scale, (2000.0 / 448.0 * 2.0) as f32, "2000 is still in the window");
    d.record(4.48);
    assert_eq!(d.scale, (4.48 / 448.0 * 2.0) as f32, "2000 has left it");
    let kept = d.scale;
    d.record(0.0);
    d.record(0.0);
    assert_eq!(d.scale, kept, "a window of zeros keeps the scale");
}

#[test]
fn given_scale_is_used() {
    let x = Mat::new(1, 3, vec![3.0, -1000.0, 0.1]);
    let q = quantize_with_scale(&x, DType::F8E4M3, 0.5);
    assert_eq!(q.scale(0, 2), 0.5);
    assert_eq!(dequantize(&q).data, [3.0, -224.0, 0.1015625]);
    assert_eq!(amax(&x), 1000.0);
}
