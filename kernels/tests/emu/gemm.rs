//! `gemm/sm80_gemm.cu` against an f64 reference: shapes, layouts, types, epilogues.

use std::sync::LazyLock;

use half::{bf16, f16};
use tilewire_core::{DType, convert_from_f32, convert_to_f32};
use tilewire_kernels::abi::TwGemm;
use tilewire_kernels::{SM80_GEMM, Source, gemm};

use crate::compile::Unit;
use crate::host::{Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    matrix_fragments_and_instructions,
    copies_fill_with_zeros,
    conversions_round_to_even,
    tile_order_agrees_with_rust,
    gemm_of_every_layout_and_edge,
    gemm_small_tiles_of_f16,
    gemm_f32,
    gemm_epilogues,
    gemm_is_exact_and_repeatable,
];

/// Tile, threads and shared memory of a build.
#[derive(Clone, Copy)]
pub struct Build {
    pub lib: &'static Lib,
    pub f16: bool,
    pub tile: (usize, usize),
    pub threads: u32,
    pub smem: u32,
}

const PROBES: [&str; 5] = ["p_gemm_order", "p_ldmatrix", "p_gemm_mma", "p_gemm_copy", "p_gemm_cvt"];

/// Tile, warps, stages, f16.
pub type Sizes = (usize, usize, u64, u64, u64, u64);
pub const SMALL: Sizes = (64, 64, 2, 2, 3, 1);

/// `text` of the unit `s`, for `sizes`.
pub fn load(s: &Source, text: String, sizes: Sizes, probes: &[&'static str]) -> Build {
    let (m, n, warps_m, warps_n, stages, f16) = sizes;
    let smem = stages as usize * (m + n) * 64;
    let lib = RUNTIME.load(&Unit {
        name: s.name,
        text: text + if probes.is_empty() { "" } else { include_str!("gemm_probes.cu") },
        defines: vec![
            ("TW_GEMM_M", m as u64),
            ("TW_GEMM_N", n as u64),
            ("TW_GEMM_WARPS_M", warps_m),
            ("TW_GEMM_WARPS_N", warps_n),
            ("TW_GEMM_STAGES", stages),
            ("TW_GEMM_F16", f16),
        ],
        kernels: [s.kernels, probes].concat(),
        smem,
    });
    let threads = 32 * (warps_m * warps_n) as u32;
    Build { lib, f16: f16 == 1, tile: (m, n), threads, smem: smem as u32 }
}

/// The text as it is: 128x128, four warps, four stages, bf16.
pub static BF16: LazyLock<Build> =
    LazyLock::new(|| load(&SM80_GEMM, SM80_GEMM.emu_text(), (128, 128, 2, 2, 4, 0), &PROBES));
/// 64x64, four warps, three stages, f16.
pub static F16: LazyLock<Build> =
    LazyLock::new(|| load(&SM80_GEMM, SM80_GEMM.emu_text(), SMALL, &[]));

/// Type of an element.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Type {
    Bf16 = 0,
    F16 = 1,
    F32 = 2,
    E4m3 = 3,
}

impl Type {
    /// Unit roundoff, and half of the least subnormal.
    pub fn roundoff(self) -> (f64, f64) {
        match self {
            Type::Bf16 => (2f64.powi(-8), 0.0),
            Type::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            Type::F32 => (2f64.powi(-24), 0.0),
            Type::E4m3 => (2f64.powi(-4), 2f64.powi(-10)),
        }
    }

    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Type::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_ne_bytes()).collect(),
            Type::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes()).collect(),
            Type::F32 => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
            Type::E4m3 => {
                let mut codes = vec![0; values.len()];
                convert_from_f32(DType::F8E4M3, values, &mut codes);
                codes
            }
        }
    }

    pub fn values(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
        match self {
            Type::Bf16 => pairs().map(|b| bf16::from_bits(b).to_f32()).collect(),
            Type::F16 => pairs().map(|b| f16::from_bits(b).to_f32()).collect(),
            Type::F32 => bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            Type::E4m3 => {
                let mut values = vec![0.0; bytes.len()];
                convert_to_f32(DType::F8E4M3, bytes, &mut values);
                values
            }
        }
    }

    pub fn round(self, v: f32) -> f32 {
        self.values(&self.bytes(&[v]))[0]
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Layout {
    Nt,
    Nn,
    Tn,
    Tt,
}
use Layout::{Nn, Nt, Tn, Tt};

impl Layout {
    /// A is [k, m].
    fn a_km(self) -> bool {
        matches!(self, Tn | Tt)
    }

    /// B is [n, k].
    fn b_nk(self) -> bool {
        matches!(self, Nt | Tt)
    }
}

pub const NONE: u32 = 0;
pub const RELU: u32 = 1;
pub const GELU: u32 = 2;
pub const SWIGLU: u32 = 3;
/// The bit of derivatives beside them.
pub const DERIVATIVE: u32 = 256 >> 2;
pub const DGELU: u32 = DERIVATIVE | GELU;
pub const DSWIGLU: u32 = DERIVATIVE | SWIGLU;

/// A product. `pad` elements lie between rows of A, B and D.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub layout: Layout,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub out: Type,
    pub act: u32,
    pub bias: bool,
    pub accumulate: bool,
    /// The pre-activation is stored, too.
    pub aux: bool,
    pub pad: usize,
    /// Small integers.
    pub exact: bool,
    /// Biases are in -100..100.
    pub large: bool,
}

pub fn case(layout: Layout, m: usize, n: usize, k: usize) -> Case {
    let (act, pad, out) = (NONE, 0, Type::F32);
    let [bias, accumulate, aux, exact, large] = [false; 5];
    Case { layout, m, n, k, out, act, bias, accumulate, aux, pad, exact, large }
}

/// Numbers in -1..1, or the integers of it.
pub fn number(exact: bool, tensor: u64, i: usize) -> f32 {
    let mut x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ tensor << 57;
    x = (x ^ x >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 29;
    if exact { (x % 3) as f32 - 1.0 } else { (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0 }
}

/// A matrix in memory: the space between its rows holds NaN.
pub struct Matrix {
    pub values: Vec<f32>,
    pub ld: usize,
    pub bytes: Vec<u8>,
}

impl Matrix {
    pub fn new(rows: usize, cols: usize, pad: usize, t: Type, f: impl Fn(usize) -> f32) -> Self {
        let ld = cols + pad;
        let values: Vec<f32> = (0..rows * cols).map(|i| t.round(f(i))).collect();
        let len = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
        let at = |i: usize| if i % ld < cols { values[i / ld * cols + i % ld] } else { f32::NAN };
        let bytes = t.bytes(&(0..len).map(at).collect::<Vec<_>>());
        Self { values, ld, bytes }
    }

    pub fn memory(&self, name: &str) -> Memory {
        let m = Memory::new(name, ANY, self.bytes.len());
        m.write(&self.bytes);
        m
    }
}

impl Case {
    pub fn cols(&self) -> usize {
        match self.act {
            SWIGLU => self.n / 2,
            DSWIGLU => 2 * self.n,
            _ => self.n,
        }
    }

    /// What derivatives are taken at, or where the pre-activation goes.
    fn aux(&self) -> Matrix {
        let cols = if self.act == DSWIGLU { 2 * self.n } else { self.n };
        Matrix::new(self.m, cols, self.pad, self.out, |i| {
            if self.aux { f32::NAN } else { 2.0 * number(false, 5, i) }
        })
    }

    fn matrices(&self, t: Type) -> [Matrix; 3] {
        let (a_rows, a_cols) = if self.layout.a_km() { (self.k, self.m) } else { (self.m, self.k) };
        let (b_rows, b_cols) = if self.layout.b_nk() { (self.n, self.k) } else { (self.k, self.n) };
        let a = Matrix::new(a_rows, a_cols, self.pad, t, |i| number(self.exact, 1, i));
        let b = Matrix::new(b_rows, b_cols, self.pad, t, |i| number(self.exact, 2, i));
        let d = Matrix::new(self.m, self.cols(), self.pad, self.out, |i| {
            if self.accumulate { number(self.exact, 3, i) } else { f32::NAN }
        });
        [a, b, d]
    }

    /// Where all rows are one behind the other, a bias is of the type of D.
    fn bias_type(&self) -> Type {
        if self.pad == 0 { self.out } else { Type::F32 }
    }

    fn bias(&self) -> Vec<f32> {
        let t = self.bias_type();
        let scale = if self.large { 100.0 } else { 1.0 };
        (0..self.n).map(|i| t.round(scale * number(self.exact, 4, i))).collect()
    }

    fn bias_flag(&self) -> u32 {
        u32::from(self.bias && self.bias_type() != Type::F32) << 11
    }

    fn flags(&self) -> u32 {
        let layout = u32::from(self.layout.a_km()) << 5 | u32::from(!self.layout.b_nk()) << 6;
        self.out as u32
            | self.act << 2
            | u32::from(self.accumulate) << 4
            | layout
            | self.bias_flag()
    }

    /// The pre-activation and its error.
    fn pre_activation(&self, [a, b, d]: &[Matrix; 3]) -> Vec<(f64, f64)> {
        let (m, n, k) = (self.m, self.n, self.k);
        let a_at = |i, z| a.values[if self.layout.a_km() { z * m + i } else { i * k + z }];
        let b_at = |z, j| b.values[if self.layout.b_nk() { j * k + z } else { z * n + j }];
        let bias = self.bias();
        let z = |(i, j): (usize, usize)| {
            let terms = || (0..k).map(|z| f64::from(a_at(i, z)) * f64::from(b_at(z, j)));
            let old = if self.accumulate { f64::from(d.values[i * n + j]) } else { 0.0 };
            let bias = if self.bias { f64::from(bias[j]) } else { 0.0 };
            let magnitude: f64 = terms().map(f64::abs).sum::<f64>() + old.abs() + bias.abs();
            let e = 4.0 * 2f64.powi(-24) * (k.max(1) as f64).sqrt() * magnitude;
            (terms().sum::<f64>() + old + bias, e)
        };
        (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(z).collect()
    }

    /// `D`, and how far an element may be from it.
    fn reference(&self, z: &[(f64, f64)], aux: &Matrix) -> Vec<(f64, f64)> {
        let (m, n) = (self.m, self.n);
        let z = |i: usize, j: usize| z[i * n + j];
        let at = |i: usize, j: usize| f64::from(aux.values[i * (aux.ld - self.pad) + j]);
        let (u, tiny) = self.out.roundoff();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let out = |i: usize, j: usize| {
            let (x, e) = z(i, j % n);
            let (y, e) = match self.act {
                RELU => (x.max(0.0), e),
                GELU => {
                    let t = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                    (0.5 * x * (1.0 + t.tanh()), 1.2 * e + 1e-6 * x.abs())
                }
                SWIGLU => {
                    let (up, eu) = z(i, self.n / 2 + j);
                    let e = 1.2 * up.abs() * e + silu(x).abs() * eu + 1e-6 * (x * up).abs();
                    (silu(x) * up, e + 1e-10)
                }
                DGELU => {
                    let slope = dgelu(at(i, j));
                    (x * slope, 1.2 * e + 1e-6 * x.abs())
                }
                DSWIGLU => {
                    let (gate, up) = (at(i, j % n), at(i, n + j % n));
                    let s = 1.0 / (1.0 + (-gate).exp());
                    let slope = if j < n { up * s * (1.0 + gate * (1.0 - s)) } else { gate * s };
                    (x * slope, (e + 2e-6 * x.abs()) * (1.0 + gate.abs()) * (1.0 + up.abs()))
                }
                _ => (x, e),
            };
            (y, e * (1.0 + u) + u * y.abs() + tiny)
        };
        (0..m).flat_map(|i| (0..self.cols()).map(move |j| (i, j))).map(|(i, j)| out(i, j)).collect()
    }

    /// Runs it; the bytes of D. Panics if an element is not as the reference says.
    pub fn check(&self, on: &Build, f32_in: bool, seed: u64) -> Vec<u8> {
        let narrow = if on.f16 { Type::F16 } else { Type::Bf16 };
        let (name, (bm, bn), threads, smem) = match self.layout {
            _ if f32_in => ("tw_gemm_f32", (64, 64), 256, 18432),
            Nt => ("tw_gemm_nt", on.tile, on.threads, on.smem),
            Nn => ("tw_gemm_nn", on.tile, on.threads, on.smem),
            Tn => ("tw_gemm_tn", on.tile, on.threads, on.smem),
            Tt => ("tw_gemm_tt", on.tile, on.threads, on.smem),
        };
        let blocks = self.m.div_ceil(bm) * self.n.div_ceil(bn);
        let k = on.lib.kernel(name);
        let launch = k.grid([blocks.max(1) as u32, 1, 1], [threads, 1, 1]).smem(smem);
        self.check_by(if f32_in { Type::F32 } else { narrow }, seed, |param, _| launch.arg(param))
    }

    /// The same by the launch that `how` makes of the product and of two words that are zero, and
    /// must be again at the end; operands are of type `t`.
    pub fn check_by<'a>(
        &self,
        t: Type,
        seed: u64,
        how: impl FnOnce(&TwGemm, u64) -> Launch<'a>,
    ) -> Vec<u8> {
        self.check_launches(t, seed, None, |p, words| vec![how(p, words)])
    }

    /// The same by several launches of one stream, which may use `space`, too.
    pub fn check_launches<'a>(
        &self,
        t: Type,
        seed: u64,
        space: Option<&Memory>,
        how: impl FnOnce(&TwGemm, u64) -> Vec<Launch<'a>>,
    ) -> Vec<u8> {
        let matrices = self.matrices(t);
        let [a, b, d] = [(0, "A"), (1, "B"), (2, "D")].map(|(i, name)| matrices[i].memory(name));
        let bias_bytes = self.bias_type().bytes(&self.bias());
        let bias = Memory::new("bias", ANY, bias_bytes.len());
        bias.write(&bias_bytes);
        let aux = self.aux();
        let saved = aux.memory("aux");
        let param = TwGemm {
            a: a.addr(),
            b: b.addr(),
            d: d.addr(),
            aux: if self.aux || self.act >= DERIVATIVE { saved.addr() } else { 0 },
            ldaux: aux.ld as i64,
            bias: if self.bias { bias.addr() } else { 0 },
            lda: matrices[0].ld as i64,
            ldb: matrices[1].ld as i64,
            ldd: matrices[2].ld as i64,
            m: self.m as u32,
            n: self.n as u32,
            k: self.k as u32,
            flags: self.flags(),
        };
        let words = Memory::new("words", ANY, 8);
        let launches = how(&param, words.addr());
        let all = [&a, &b, &d, &bias, &saved, &words].into_iter().chain(space);
        let mut run = Run::new(seed).memory(all).stream(0, launches);
        run.warp_pauses = seed % 4 > 1;
        // Even seeds change between threads often.
        run.yield_permille = if seed.is_multiple_of(2) { 200 } else { 10 };
        run.go().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        assert_eq!(words.get(0, 0), 0, "{self:?}: words that are not zero at the end");
        let bytes = d.read::<u8>();
        let z = self.pre_activation(&matrices);
        self.compare(&self.reference(&z, &aux), self.cols(), &bytes);
        let after = saved.read::<u8>();
        if self.aux {
            let (u, tiny) = self.out.roundoff();
            let z: Vec<_> =
                z.iter().map(|(y, e)| (*y, e * (1.0 + u) + u * y.abs() + tiny)).collect();
            self.compare(&z, self.n, &after);
        } else {
            assert!(after[..aux.bytes.len()] == aux.bytes, "{self:?}: aux was written");
        }
        bytes
    }

    fn compare(&self, want: &[(f64, f64)], cols: usize, bytes: &[u8]) {
        let (got, ld) = (self.out.values(bytes), cols + self.pad);
        for (i, g) in got.iter().enumerate() {
            if i % ld >= cols {
                assert!(g.is_nan(), "{self:?}: {g} between rows, at {i}");
                continue;
            }
            let (y, e) = want[i / ld * cols + i % ld];
            let (e, g) = (if self.exact && self.act < GELU { 0.0 } else { e }, f64::from(*g));
            assert!((g - y).abs() <= e, "{self:?}: {g}, not {y} +- {e} at {} {}", i / ld, i % ld);
        }
    }
}

pub fn dgelu(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let t = (root * (x + 0.044715 * x.powi(3))).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x)
}

fn matrix_fragments_and_instructions() {
    let [rows, out] = [512, 512].map(|len| Memory::new("words", ANY, len));
    // Element `e` of row `r`.
    let element = |r: u32, e: u32| 16 * r + e;
    let words: Vec<u32> =
        (0..128).map(|i| element(i / 4, i % 4 * 2) | element(i / 4, i % 4 * 2 + 1) << 16).collect();
    rows.write(&words);
    for trans in [0u32, 1] {
        let k = BF16.lib.kernel("p_ldmatrix");
        let launch = k.launch(32).arg(&rows.addr()).arg(&out.addr()).arg(&trans);
        Run::new(1).memory([&rows, &out]).stream(0, vec![launch]).go().unwrap();
        let want = (0..128u32).map(|i| {
            let (lane, part) = (i / 4, i % 4 * 8);
            let (across, along) = (lane / 4, lane % 4 * 2);
            let at = |along| {
                if trans == 1 {
                    element(part + along, across)
                } else {
                    element(part + across, along)
                }
            };
            at(along) | at(along + 1) << 16
        });
        assert_eq!(out.read::<u32>(), want.collect::<Vec<_>>(), "transposed: {trans}");
    }
    for t in [Type::Bf16, Type::F16] {
        let a = Matrix::new(16, 16, 0, t, |i| (i * 7 % 23) as f32 * 0.25 - 2.0);
        let b = Matrix::new(8, 16, 0, t, |i| (i * 5 % 19) as f32 - 9.0);
        let c: Vec<f32> = (0..128).map(|i| i as f32).collect();
        let (am, bm, cm) = (a.memory("A"), b.memory("B"), Memory::new("C", ANY, 512));
        cm.write(&c);
        let k = BF16.lib.kernel("p_gemm_mma");
        let launch = k.launch(32).arg(&am.addr()).arg(&bm.addr()).arg(&cm.addr());
        let launch = launch.arg(&u32::from(t == Type::F16));
        Run::new(1).memory([&am, &bm, &cm]).stream(0, vec![launch]).go().unwrap();
        let dot = |i: usize, j: usize| -> f32 {
            (0..16).map(|k| a.values[16 * i + k] * b.values[16 * j + k]).sum()
        };
        let want: Vec<f32> = (0..128).map(|i| c[i] + dot(i / 8, i % 8)).collect();
        assert_eq!(cm.read::<f32>(), want, "{t:?}");
    }
}

fn copies_fill_with_zeros() {
    let [input, out] = [1024, 1024].map(|len| Memory::new("bytes", ANY, len));
    let bytes: Vec<u8> = (0..1024).map(|i| (i % 251) as u8 + 1).collect();
    input.write(&bytes);
    let want: Vec<u8> =
        (0..1024).map(|i| if i % 16 < i / 16 % 17 { bytes[i] } else { 0 }).collect();
    let mut early = 0;
    for (seed, all) in (0..12u64).map(|i| (i, (i % 2) as u32)) {
        let k = BF16.lib.kernel("p_gemm_copy");
        let launch = k.launch(32).arg(&input.addr()).arg(&out.addr()).arg(&all);
        Run::new(seed).memory([&input, &out]).stream(0, vec![launch]).go().unwrap();
        let got = out.read::<u8>();
        assert_eq!(got[..512], want[..512], "the first group was waited for");
        assert!(all == 0 || got == want, "both groups were waited for");
        early += u32::from(got != want);
    }
    assert_eq!(early, 6, "what was not waited for is not there");
}

fn conversions_round_to_even() {
    let mut values: Vec<f32> =
        (0..240).map(|i| number(false, 9, i) * 2f32.powi(i as i32 % 50 - 32)).collect();
    let hard = [65519.0, 65520.0, 1e30, f32::INFINITY, 2049.0, 2051.0, 6e-8, 2.98e-8, 2.9802322e-8];
    values.extend(hard.iter().chain(&[
        6.1e-5,
        6.0975e-5,
        0.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -0.0,
        f32::MAX,
    ]));
    let [input, b, h, back] = [1024; 4].map(|len| Memory::new("numbers", ANY, len));
    input.write(&values);
    let k = BF16.lib.kernel("p_gemm_cvt");
    let launch = k.launch(256).arg(&input.addr()).arg(&b.addr()).arg(&h.addr()).arg(&back.addr());
    Run::new(1).memory([&input, &b, &h, &back]).stream(0, vec![launch]).go().unwrap();
    let (b, h, back) = (b.read::<u16>(), h.read::<u16>(), back.read::<f32>());
    for (i, v) in values.iter().enumerate() {
        let want = [bf16::from_f32(*v), bf16::from_f32(-*v)].map(bf16::to_bits);
        assert_eq!(b[2 * i..][..2], want, "bf16 of {v}");
        let want = [f16::from_f32(*v), f16::from_f32(-*v)];
        assert_eq!(h[2 * i..][..2], want.map(f16::to_bits), "f16 of {v}");
        assert_eq!(back[i], want[0].to_f32(), "{v}");
    }
}

fn tile_order_agrees_with_rust() {
    for (tiles_m, tiles_n) in [(1u32, 1u32), (8, 4), (9, 7), (35, 11), (3, 100), (500, 2)] {
        let num = tiles_m * tiles_n;
        let out = Memory::new("order", ANY, 8 * num as usize);
        let k = BF16.lib.kernel("p_gemm_order");
        let launch = k.launch(num).arg(&out.addr()).arg(&tiles_m).arg(&tiles_n);
        Run::new(1).memory([&out]).stream(0, vec![launch]).go().unwrap();
        let tile = |b| <[u32; 2]>::from(gemm::tile(b, tiles_m, tiles_n));
        let want: Vec<u32> = (0..num).flat_map(tile).collect();
        assert_eq!(out.read::<u32>(), want, "{tiles_m} x {tiles_n}");
    }
}

pub const LAYOUTS: [Layout; 4] = [Nt, Nn, Tn, Tt];
/// Exact tiles, edges in each direction, rows that are not aligned, nothing.
const SHAPES: [(usize, usize, usize); 9] = [
    (128, 128, 32),
    (160, 144, 72),
    (8, 24, 168),
    (37, 5, 19),
    (129, 130, 33),
    (1, 1, 1),
    (0, 16, 16),
    (16, 0, 16),
    (16, 16, 0),
];

fn gemm_of_every_layout_and_edge() {
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for layout in LAYOUTS {
            let out = [Type::F32, Type::Bf16, Type::F16][i % 3];
            Case { out, pad: [0, 8, 3][i % 3], ..case(layout, m, n, k) }.check(&BF16, false, 1);
        }
    }
}

fn gemm_small_tiles_of_f16() {
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for layout in LAYOUTS {
            let out = [Type::F16, Type::F32, Type::Bf16][i % 3];
            let act = [NONE, RELU, SWIGLU][if n % 2 == 0 { i % 3 } else { 0 }];
            let c = Case { out, act, bias: true, pad: [0, 5, 8][i % 3], ..case(layout, m, n, k) };
            c.check(&F16, false, 2);
        }
    }
}

fn gemm_f32() {
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for layout in LAYOUTS {
            let out = [Type::F32, Type::Bf16, Type::F32][i % 3];
            let c = Case { out, bias: i % 2 == 0, pad: i % 2, ..case(layout, m, n, k) };
            c.check(&BF16, true, 3);
        }
    }
    let c = Case { act: SWIGLU, bias: true, ..case(Nt, 70, 92, 20) };
    c.check(&BF16, true, 3);
}

fn gemm_epilogues() {
    for out in [Type::F32, Type::Bf16, Type::F16] {
        for act in [NONE, RELU, GELU, SWIGLU] {
            for bias in [false, true] {
                // Half of 44 columns is no multiple of 8.
                let (n, layout) = if bias { (44, Nn) } else { (144, Nt) };
                let c = Case { out, act, bias, ..case(layout, 70, n, 40) };
                c.check(&BF16, false, 4);
                let c = Case { accumulate: true, ..c };
                if act == NONE {
                    c.check(&BF16, false, 5);
                }
            }
        }
    }
    Case { act: SWIGLU, bias: true, ..case(Nn, 20, 272, 40) }.check(&BF16, false, 6);
}

fn gemm_is_exact_and_repeatable() {
    for layout in LAYOUTS {
        for (out, f32_in) in [(Type::Bf16, false), (Type::F32, false), (Type::F32, true)] {
            let c =
                Case { out, accumulate: true, bias: true, exact: true, ..case(layout, 70, 40, 70) };
            let first = c.check(&BF16, f32_in, 7);
            assert!(first == c.check(&BF16, f32_in, 8), "two runs differ");
            let c = Case { exact: false, ..c };
            assert!(c.check(&BF16, f32_in, 7) == c.check(&BF16, f32_in, 8), "two runs differ");
        }
    }
}
