//! `quant/sm80_quant.cu` against the oracle, to the bit. (`tilewire-ops` has the same tests for the
//! host operation.)

use std::sync::OnceLock;

use tilewire_core::{DType, QTensor, Rng, ScaleLayout, Shape, convert_from_f32, convert_to_f32};
use tilewire_kernels::abi::TwQuant;
use tilewire_kernels::portable::{
    FP8_MANTISSAS, QUANT, QUANT_THREADS, QUANT_TILE, WIDE_MANTISSAS, quant_defines,
};
use tilewire_oracle::Mat;
use tilewire_oracle::fp8::NAN_CODE;
use tilewire_oracle::quant as oracle;

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    what_is_expected_is_the_oracles,
    a_scale_that_is_given,
    codes_and_scales_of_every_layout,
    special_values_of_every_layout,
    scales_of_every_exponent,
    the_largest_magnitude_of_a_tensor,
    delayed_scales_follow_the_oracle,
    mutants_of_quantisation_are_killed,
];

/// In the order of `WIDE_MANTISSAS` and `FP8_MANTISSAS`.
pub const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
pub const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];
pub const LAYOUTS: [ScaleLayout; 5] = [
    ScaleLayout::Tensor,
    ScaleLayout::Block1x128,
    ScaleLayout::Block128x128,
    ScaleLayout::Mx1x32,
    ScaleLayout::Mx1x32Swizzled,
];
/// Fills results before a run.
const POISON: u8 = 0xA5;
/// Bytes behind a result that nothing may touch.
const TAIL: usize = 24;

/// The kernels for `WIDE[src]` and `FP8[dst]`.
pub fn lib(src: usize, dst: usize) -> &'static Lib {
    static LIBS: [[OnceLock<&'static Lib>; 2]; 3] = [const { [const { OnceLock::new() }; 2] }; 3];
    LIBS[src][dst].get_or_init(|| load(QUANT.emu_text(), src, dst))
}

pub fn load(text: String, src: usize, dst: usize) -> &'static Lib {
    let defines = quant_defines(WIDE_MANTISSAS[src], FP8_MANTISSAS[dst]);
    let values = QUANT.defines.iter().zip(defines).map(|(n, (_, v))| (*n, v)).collect();
    RUNTIME.load(&Unit {
        name: QUANT.name,
        text,
        defines: values,
        kernels: QUANT.kernels.to_vec(),
        smem: 0,
    })
}

/// Memory with poison, `shift` bytes of it in front and `TAIL` behind.
fn poisoned(name: &str, len: usize, shift: usize) -> Memory {
    let m = Memory::new(name, ANY, (shift + len + TAIL).next_multiple_of(16));
    m.write(&vec![POISON; m.len_bytes()]);
    m
}

/// The result in `m`; what is around it must be as it was.
fn result(what: &str, m: &Memory, len: usize, shift: usize) -> Vec<u8> {
    let all = m.read::<u8>();
    let around = all[..shift].iter().chain(&all[shift + len..]);
    assert!(around.into_iter().all(|b| *b == POISON), "{what}: bytes around the result");
    all[shift..shift + len].to_vec()
}

/// What is quantised, and how.
struct Case<'a> {
    x: &'a Mat,
    spec: oracle::QuantSpec,
    src: usize,
    /// Elements from an aligned address to the first one, of every tensor.
    shift: usize,
    /// Row-wise, column-wise.
    sides: [bool; 2],
    /// The scale, if it does not come from `x`.
    given: Option<f32>,
}

/// What the oracle makes of it: its scales, and codes by tilewire-core's conversions, which are the
/// oracle's (it tries all 256 codes for each element: too slow for every case).
fn expected(x: &Mat, spec: oracle::QuantSpec, given: Option<f32>) -> QTensor {
    let mut q = oracle::quantize(&Mat::zeros(0, 0), spec);
    q.shape = Shape::d2(x.rows, x.cols);
    q.scales = vec![0; spec.layout.num_scales(x.rows, x.cols) * spec.layout.dtype().size()];
    let (block_rows, block_cols) = spec.block(x.rows, x.cols);
    q.data = vec![0; x.data.len()];
    if spec.layout == ScaleLayout::Tensor {
        q.scales = given.unwrap_or(1.0).to_ne_bytes().to_vec();
    }
    for r0 in (0..x.rows).step_by(block_rows) {
        for c0 in (0..x.cols).step_by(block_cols) {
            let (r1, c1) = (x.rows.min(r0 + block_rows), x.cols.min(c0 + block_cols));
            let top = || spec.scale(oracle::amax_of(x, r0..r1, c0..c1)) as f32;
            let scale = given.unwrap_or_else(top);
            let (i, size) = (spec.layout.scale_idx(r0, c0, x.cols), spec.layout.dtype().size());
            convert_from_f32(spec.layout.dtype(), &[scale], &mut q.scales[i * size..][..size]);
            for r in r0..r1 {
                let values: Vec<f32> = (c0..c1).map(|c| x.at(r, c) as f32 / scale).collect();
                let codes = &mut q.data[r * x.cols + c0..r * x.cols + c1];
                convert_from_f32(spec.dtype, &values, codes);
                let nans = codes.iter_mut().zip(&values).filter(|(_, v)| v.is_nan());
                nans.for_each(|(c, _)| *c = NAN_CODE);
            }
        }
    }
    q
}

impl Case<'_> {
    fn kernel(&self) -> &'static str {
        match self.spec.layout {
            ScaleLayout::Tensor => "tw_quant_tensor",
            ScaleLayout::Block1x128 => "tw_quant_1x128",
            ScaleLayout::Block128x128 => "tw_quant_128x128",
            _ => "tw_quant_mx",
        }
    }

    /// Runs amax and scale (per tensor), and the quantisation; compares with the oracle.
    fn check(&self, lib: &'static Lib) {
        let (x, spec, elem) = (self.x, self.spec, WIDE[self.src].size());
        let (rows, cols) = (x.rows, x.cols);
        let skip = self.shift * elem;
        let input = poisoned("x", x.data.len() * elem, skip);
        input.write(&[vec![POISON; skip], x.to_bytes(WIDE[self.src])].concat());
        let want = [expected(x, spec, self.given), expected(&x.transpose(), spec, self.given)];
        let outs = want.each_ref().map(|q| {
            let scales = poisoned("scales", q.scales.len(), 0);
            (poisoned("codes", q.data.len(), self.shift), scales)
        });
        let parts = Memory::new("parts", ANY, 64);
        let at = |i: usize, m: &Memory, skip: usize| {
            if self.sides[i] { m.addr() + skip as u64 } else { 0 }
        };
        let args = TwQuant {
            x: input.addr() + skip as u64,
            row: at(0, &outs[0].0, self.shift),
            row_scales: at(0, &outs[0].1, 0),
            column: at(1, &outs[1].0, self.shift),
            column_scales: at(1, &outs[1].1, 0),
            scale: if self.sides[0] { outs[0].1.addr() } else { outs[1].1.addr() },
            rows: rows as u32,
            cols: cols as u32,
            pow2: u32::from(spec.pow2_scales),
            swizzled: u32::from(spec.layout == ScaleLayout::Mx1x32Swizzled),
        };
        let [amax, scale, quant] = ["tw_amax", "tw_scale", self.kernel()].map(|k| lib.kernel(k));
        let block = [QUANT_THREADS as u32, 1, 1];
        let mut launches = Vec::new();
        if let Some(scale) = self.given {
            outs.iter().for_each(|(_, s)| s.write(&[scale]));
        } else if spec.layout == ScaleLayout::Tensor {
            let n = x.data.len() as u64;
            let num = n.div_ceil(4096).min(3) as u32;
            if num > 0 {
                let l = amax.grid([num, 1, 1], block).arg(&args.x);
                launches.push(l.arg(&n).arg(&parts.addr()));
            }
            let l = scale.grid([1, 1, 1], block).arg(&parts.addr()).arg(&num).arg(&args.pow2);
            launches.push(l.arg(&0u64).arg(&args.row_scales).arg(&args.column_scales));
        }
        let tile = QUANT_TILE as usize;
        let tiles = (rows.div_ceil(tile) * cols.div_ceil(tile)) as u32;
        if tiles > 0 {
            launches.push(quant.grid([tiles, 1, 1], block).arg(&args));
        }
        if !launches.is_empty() {
            let memory = outs.iter().flat_map(|(a, b)| [a, b]).chain([&input, &parts]);
            Run::new(1).memory(memory).stream(0, launches).go().unwrap();
        }
        for (i, (codes, scales)) in outs.iter().enumerate().filter(|(i, _)| self.sides[*i]) {
            self.compare(["row", "column"][i], (codes, scales), &want[i]);
        }
    }

    fn compare(&self, side: &str, (codes, scales): (&Memory, &Memory), want: &QTensor) {
        let (x, s) = (self.x, self.spec);
        let what = format!("{side} of {}x{} {} {s:?}", x.rows, x.cols, WIDE[self.src]);
        let got = result(&what, scales, want.scales.len(), 0);
        let bad = got.iter().zip(&want.scales).position(|(a, b)| a != b);
        assert_eq!(bad, None, "{what}: bytes of the scales that differ");
        let got = result(&what, codes, want.data.len(), self.shift);
        let bad = got.iter().zip(&want.data).position(|(a, b)| a != b);
        assert_eq!(bad, None, "{what}: codes that differ");
    }
}

/// Magnitudes from 2^-20 to 2^20, so that blocks differ; rounded to `dtype`.
fn data(seed: u64, rows: usize, cols: usize, dtype: DType) -> Mat {
    let x = Mat::random(&mut Rng::new(seed), rows, cols);
    let scale = |i: usize, j: usize| 2f64.powi(((i / 3 * 7 + j / 16 * 5) % 25) as i32 - 12);
    Mat::from_fn(rows, cols, |i, j| x.at(i, j) * scale(i, j)).rounded(dtype)
}

const BOTH: [bool; 2] = [true, true];

/// One matrix under every layout, with and without powers of two, to one FP8 type.
fn every_layout(
    lib: &'static Lib,
    x: &Mat,
    (src, dst): (usize, usize),
    shift: usize,
    sides: [bool; 2],
) {
    for layout in LAYOUTS {
        for pow2_scales in [false, true] {
            let spec = oracle::QuantSpec { dtype: FP8[dst], layout, pow2_scales };
            Case { x, spec, src, shift, sides, given: None }.check(lib);
        }
    }
}

fn what_is_expected_is_the_oracles() {
    for layout in LAYOUTS {
        for (i, dtype) in FP8.into_iter().enumerate() {
            for pow2_scales in [false, true] {
                let spec = oracle::QuantSpec { dtype, layout, pow2_scales };
                let mut x = data(i as u64, 19, 67, DType::F32);
                x.data[..4].copy_from_slice(&[f64::NAN, -f64::NAN, f64::INFINITY, -0.0]);
                assert_eq!(expected(&x, spec, None), oracle::quantize(&x, spec), "{spec:?}");
            }
            let x = data(9, 5, 7, DType::F32);
            let spec = oracle::QuantSpec::new(dtype, ScaleLayout::Tensor);
            let want = oracle::quantize_with_scale(&x, dtype, 0.003);
            assert_eq!(expected(&x, spec, Some(0.003)), want);
        }
    }
}

fn given(lib: &'static Lib, src: usize, dst: usize) {
    let x = data(3, 40, 20, WIDE[src]);
    // Some saturate everything, some leave nothing but zeros.
    for (scale, pow2_scales) in [(0.003f32, false), (1e-30, false), (1e30, false), (0.25, true)] {
        let spec = oracle::QuantSpec { dtype: FP8[dst], layout: ScaleLayout::Tensor, pow2_scales };
        Case { x: &x, spec, src, shift: 0, sides: BOTH, given: Some(scale) }.check(lib);
    }
}

/// Elements whose quotients lie at the middle between two codes, or beside it.
fn ties(lib: &'static Lib) {
    let codes: Vec<u8> = (0..0x7e).collect();
    let mut values = vec![0.0; codes.len()];
    convert_to_f32(FP8[0], &codes, &mut values);
    let middles: Vec<f32> = values.windows(2).map(|p| (p[0] + p[1]) / 2.0).collect();
    for seed in 0..4 {
        let scale = Rng::new(seed).uniform(0.001, 0.01);
        let x: Vec<f32> = middles.iter().flat_map(|m| [m * scale, -m * scale]).collect();
        let x = Mat::from_f32(2, middles.len(), &x);
        let spec = oracle::QuantSpec::new(FP8[0], ScaleLayout::Tensor);
        Case { x: &x, spec, src: 0, shift: 0, sides: BOTH, given: Some(scale) }.check(lib);
    }
}

fn a_scale_that_is_given() {
    ties(lib(0, 0));
    (0..3).for_each(|src| (0..2).for_each(|dst| given(lib(src, dst), src, dst)));
}

fn codes_and_scales_of_every_layout() {
    // Each type of x and of the codes has an aligned size, an odd one, and one of several tiles.
    let sizes = [
        (1, 1),
        (0, 7),
        (128, 132),
        (3, 33),
        (5, 129),
        (160, 64),
        (33, 5),
        (130, 31),
        (16, 260),
        (7, 0),
        (131, 137),
        (2, 256),
    ];
    let sides = [BOTH, BOTH, [true, false], [false, true]];
    for (i, (rows, cols)) in sizes.into_iter().enumerate() {
        let (src, dst) = (i % 3, i / 3 % 2);
        let x = data(i as u64, rows, cols, WIDE[src]);
        every_layout(lib(src, dst), &x, (src, dst), 0, sides[i % 4]);
        // Rows that would be aligned, from an address that is not.
        if cols % 4 == 0 && rows % 4 == 0 {
            every_layout(lib(src, dst), &x, (src, dst), 1, BOTH);
        }
    }
}

fn special(lib: &'static Lib, src: usize, dst: usize) {
    let tiny = f64::from(f32::from_bits(1));
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let rows: [[f64; 4]; 6] = [
        [nan, 1.0, -2.0, 0.0],
        [inf, 3.0, -inf, -0.0],
        [0.0, -0.0, 0.0, 0.0],
        [nan; 4],
        [tiny, -tiny, 3.0 * tiny, 0.0],
        [f64::from(f32::MAX), -1.0, f64::from(f32::MIN_POSITIVE), 1e-30],
    ];
    for row in rows {
        every_layout(lib, &Mat::new(1, 4, row.to_vec()).rounded(WIDE[src]), (src, dst), 0, BOTH);
    }
    every_layout(lib, &Mat::new(6, 4, rows.concat()).rounded(WIDE[src]), (src, dst), 0, BOTH);
}

fn special_values_of_every_layout() {
    for (src, dst) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
        special(lib(src, dst), src, dst);
    }
}

/// A matrix of one column with every exponent, and the fractions at which scales change.
fn exponents() -> Mat {
    let fractions = [0, 1, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x7f_ffff];
    let bits = (0..255u32).flat_map(|e| fractions.map(|f| e << 23 | f));
    let values: Vec<f64> = bits.map(|b| f64::from(f32::from_bits(b))).collect();
    Mat::new(values.len(), 1, values)
}

fn every_exponent(lib: &'static Lib, dst: usize) {
    let x = exponents();
    for layout in [ScaleLayout::Block1x128, ScaleLayout::Mx1x32] {
        for pow2_scales in [false, true] {
            let spec = oracle::QuantSpec { dtype: FP8[dst], layout, pow2_scales };
            Case { x: &x, spec, src: 0, shift: 0, sides: [true, false], given: None }.check(lib);
        }
    }
}

fn scales_of_every_exponent() {
    (0..2).for_each(|dst| every_exponent(lib(0, dst), dst));
}

/// The largest magnitude of `x` from element `shift` on, by `blocks` blocks.
fn amax(
    lib: &'static Lib,
    x: &Memory,
    elem: usize,
    (shift, n): (usize, usize),
    blocks: u32,
) -> f32 {
    let (parts, out) =
        (Memory::new("parts", ANY, 4 * blocks as usize), Memory::new("amax", ANY, 4));
    let (first, second) = (lib.kernel("tw_amax"), lib.kernel("tw_scale"));
    let block = [QUANT_THREADS as u32, 1, 1];
    let at = x.addr() + (shift * elem) as u64;
    let l = first.grid([blocks, 1, 1], block).arg(&at).arg(&(n as u64)).arg(&parts.addr());
    let r = second.grid([1, 1, 1], block).arg(&parts.addr()).arg(&blocks).arg(&0u32);
    let r = r.arg(&out.addr()).arg(&0u64).arg(&0u64);
    Run::new(1).memory([x, &parts, &out]).stream(0, vec![l, r]).go().unwrap();
    out.read::<f32>()[0]
}

fn largest(lib: &'static Lib, src: usize) {
    let elem = WIDE[src].size();
    for (n, blocks) in [(1, 1), (3, 2), (700, 2), (2051, 3)] {
        // The largest stands at each end, in the middle, and among numbers that do not count.
        for at in [0, n / 2, n - 1] {
            for shift in [0, 1] {
                let mut x = data(n as u64, 1, n + shift, WIDE[src]);
                x.data[shift + (at + 1) % n] = f64::NAN;
                x.data[shift + at] = -12345.0;
                let x = x.rounded(WIDE[src]);
                let m = Memory::new("x", ANY, x.data.len() * elem);
                m.write(&x.to_bytes(WIDE[src]));
                let want = x.data[shift + at].abs() as f32;
                assert_eq!(amax(lib, &m, elem, (shift, n), blocks), want, "{n} {at} {shift}");
            }
        }
    }
}

fn the_largest_magnitude_of_a_tensor() {
    (0..3).for_each(|src| largest(lib(src, 0), src));
}

fn delayed(lib: &'static Lib, dst: usize, window: usize, margin: i32) {
    let k = lib.kernel("tw_scale_delayed");
    let (parts, history) = (Memory::new("parts", ANY, 12), Memory::new("history", ANY, 4 * window));
    let (steps, state, out) =
        (Memory::new("steps", ANY, 8), Memory::new("state", ANY, 4), Memory::new("out", ANY, 8));
    state.write(&[1.0f32]);
    let mut want = oracle::DelayedScaling::new(FP8[dst], window, margin);
    for step in 0..10u64 {
        let top = match step {
            3 | 4 => 0.0,
            6 => f32::INFINITY,
            8 => f32::from_bits(3),
            9 => f32::MAX,
            _ => Rng::new(step).uniform(0.1, 900.0),
        };
        parts.write(&[0.0, top, top / 2.0]);
        let l = k.grid([1, 1, 1], [QUANT_THREADS as u32, 1, 1]).arg(&parts.addr()).arg(&3u32);
        let l = l.arg(&history.addr()).arg(&(window as u32)).arg(&steps.addr());
        let l = l.arg(&state.addr()).arg(&margin).arg(&out.addr()).arg(&(out.addr() + 4));
        let all = [&parts, &history, &steps, &state, &out];
        Run::new(1).memory(all).stream(0, vec![l]).go().unwrap();
        assert_eq!(out.read::<f32>(), [want.scale; 2], "step {step}");
        want.record(f64::from(top));
        assert_eq!(state.read::<f32>(), [want.scale], "after step {step}");
        assert!(want.scale.is_finite(), "after step {step}");
        assert_eq!(steps.get(0, 0), step + 1);
    }
}

fn short_delayed(lib: &'static Lib) {
    delayed(lib, 0, 3, 1);
}

fn delayed_scales_follow_the_oracle() {
    for (window, margin) in [(1, 0), (3, 1), (4, -2), (2, -64), (2, 64)] {
        (0..2).for_each(|dst| delayed(lib(0, dst), dst, window, margin));
    }
}

/// Mutants are of f32 to e4m3.
fn broken(text: String) -> &'static Lib {
    load(text, 0, 0)
}

fn odd(lib: &'static Lib) {
    every_layout(lib, &data(5, 131, 137, DType::F32), (0, 0), 0, BOTH);
}

fn even(lib: &'static Lib) {
    every_layout(lib, &data(6, 144, 132, DType::F32), (0, 0), 0, BOTH);
}

fn specials(lib: &'static Lib) {
    special(lib, 0, 0);
}

fn exponents_e4m3(lib: &'static Lib) {
    every_exponent(lib, 0);
}

fn largest_f32(lib: &'static Lib) {
    largest(lib, 0);
}

fn mutants_of_quantisation_are_killed() {
    all_are_killed(
        &QUANT.emu_text(),
        broken,
        ("quant/sm80_quant", "quantisation"),
        scenarios![even, exponents_e4m3, largest_f32, odd, short_delayed, specials, ties],
    );
}
