//! `tw_dequant` of `quant/sm80_quant.cu` against tilewire-core's conversions, to the bit.

use tilewire_core::{DType, Rng, ScaleLayout, convert_from_f32, convert_to_f32};
use tilewire_kernels::abi::TwDequant;
use tilewire_kernels::portable::{QUANT, QUANT_THREADS};

use crate::host::Lib;
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::quant::{FP8, LAYOUTS, WIDE, lib, load};
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![codes_and_scales_back, mutants_of_dequantisation_are_killed];

fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut v = vec![0.0; bytes.len() / dtype.size()];
    convert_to_f32(dtype, bytes, &mut v);
    v
}

fn stored(name: &str, bytes: &[u8], skip: usize) -> Memory {
    let m = Memory::new(name, ANY, skip + bytes.len());
    m.write(&[vec![0; skip], bytes.to_vec()].concat());
    m
}

/// One f32 a row, which is no layout of a matrix: as `LAYOUTS.len()`.
fn scale_idx(layout: usize, (r, c): (usize, usize), cols: usize) -> usize {
    LAYOUTS.get(layout).map_or(r, |l| l.scale_idx(r, c, cols))
}

fn num_scales(layout: usize, rows: usize, cols: usize) -> usize {
    LAYOUTS.get(layout).map_or(rows, |l| l.num_scales(rows, cols))
}

/// All codes in turn, with random scales; `shift` elements in front of codes and results.
fn check(lib: &'static Lib, (src, dst): (usize, usize), layout: usize, size: [usize; 3]) {
    let [rows, cols, shift] = size;
    let l = LAYOUTS.get(layout).copied().unwrap_or(ScaleLayout::Tensor);
    let mut rng = Rng::new(layout as u64);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 7 % 256) as u8).collect();
    let scales: Vec<f32> = match l {
        ScaleLayout::Mx1x32 | ScaleLayout::Mx1x32Swizzled => (0..num_scales(layout, rows, cols))
            .map(|_| 2f32.powi(rng.below(40) as i32 - 20))
            .collect(),
        _ => (0..num_scales(layout, rows, cols)).map(|_| rng.uniform(0.01, 2.0)).collect(),
    };
    let mut scale_bytes = vec![0; scales.len() * l.dtype().size()];
    convert_from_f32(l.dtype(), &scales, &mut scale_bytes);
    let at = |i: usize| scale_idx(layout, (i / cols, i % cols), cols);
    let values: Vec<f32> =
        widened(FP8[dst], &codes).iter().enumerate().map(|(i, v)| v * scales[at(i)]).collect();
    let elem = WIDE[src].size();
    let mut want = vec![0; codes.len() * elem];
    convert_from_f32(WIDE[src], &values, &mut want);
    let (x, s) = (stored("codes", &codes, shift), stored("scales", &scale_bytes, 0));
    let out = stored("out", &vec![0xA5; want.len()], shift * elem);
    let chunks = cols.div_ceil(4 * QUANT_THREADS as usize);
    let args = TwDequant {
        x: x.addr() + shift as u64,
        scales: s.addr(),
        out: out.addr() + (shift * elem) as u64,
        rows: rows as u32,
        cols: cols as u32,
        layout: layout as u32,
        chunks: chunks as u32,
    };
    let k = lib.kernel("tw_dequant");
    let launch = k.grid([(rows * chunks) as u32, 1, 1], [QUANT_THREADS as u32, 1, 1]).arg(&args);
    Run::new(1).memory([&x, &s, &out]).stream(0, vec![launch]).go().unwrap();
    let got = out.read::<u8>()[shift * elem..].to_vec();
    let bad = got.iter().zip(&want).position(|(a, b)| a != b);
    assert_eq!(bad, None, "{rows}x{cols} {l:?} to {}: bytes that differ", WIDE[src]);
}

fn all(lib: &'static Lib, types: (usize, usize)) {
    let sizes = [
        [1, 1, 0],
        [7, 130, 0],
        [3, 33, 1],
        [130, 256, 0],
        [5, 132, 1],
        [140, 257, 0],
        [2, 1030, 3],
    ];
    for layout in 0..=LAYOUTS.len() {
        sizes.into_iter().for_each(|size| check(lib, types, layout, size));
    }
}

fn codes_and_scales_back() {
    (0..3).for_each(|src| (0..2).for_each(|dst| all(lib(src, dst), (src, dst))));
}

fn first(lib: &'static Lib) {
    all(lib, (0, 0));
}

fn mutants_of_dequantisation_are_killed() {
    all_are_killed(
        &QUANT.emu_text(),
        |text| load(text, 0, 0),
        ("quant/sm80_quant", "dequantisation"),
        scenarios![first],
    );
}
