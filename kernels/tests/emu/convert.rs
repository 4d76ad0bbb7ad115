//! Conversions against tilewire-core's, to the bit.

use std::sync::LazyLock;

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_kernels::Source;

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    every_small_number_widens_as_on_the_host,
    f32_rounds_as_on_the_host,
    mutants_of_the_conversions_are_killed,
];

const SOURCE: Source =
    Source { name: "common/convert.cuh", defines: &[], kernels: &["c_narrow", "c_widen"] };

static LIB: LazyLock<&'static Lib> = LazyLock::new(|| load(SOURCE.emu_text()));

fn load(text: String) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: SOURCE.name,
        text: text + include_str!("convert_probes.cu"),
        defines: Vec::new(),
        kernels: SOURCE.kernels.to_vec(),
        smem: 0,
    })
}

/// As in convert_probes.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Narrow {
    input: u64,
    n: u64,
    outs: [u64; 7],
}

/// `bytes` as numbers of `dtype`.
fn wide(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.size()];
    convert_to_f32(dtype, bytes, &mut out);
    out
}

/// All patterns of a type of one or two bytes.
fn patterns(dtype: DType) -> Vec<f32> {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    if dtype.size() == 2 { wide(dtype, bytemuck::cast_slice(&all)) } else { wide(dtype, &bytes) }
}

const SMALL: [DType; 5] = [DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2, DType::E8M0];

fn widen(lib: &'static Lib) {
    let len = |d: DType| if d.size() == 2 { 1 << 16 } else { 1 << 8 };
    let outs = SMALL.map(|d| Memory::new(d.name(), ANY, 4 * len(d)));
    let k = lib.kernel("c_widen");
    let launch = outs.iter().fold(k.launch(8), |l, m| l.arg(&m.addr()));
    Run::new(1).memory(&outs).stream(0, vec![launch]).go().unwrap();
    for (d, m) in SMALL.into_iter().zip(&outs) {
        let want = patterns(d);
        for (i, (got, want)) in m.read::<u32>().into_iter().zip(want).enumerate() {
            assert_eq!(got, want.to_bits(), "{d} {i:#x}: {:#x}", want.to_bits());
        }
    }
}

/// Every number of the small types, the middle to the next, and the neighbours of both.
fn boundaries() -> Vec<u32> {
    let mut all = Vec::new();
    for d in SMALL {
        let mut values = patterns(d);
        values.retain(|v| v.is_finite());
        values.sort_by(f32::total_cmp);
        for pair in values.windows(2) {
            let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
            for at in [pair[0].to_bits(), middle.to_bits()] {
                all.extend([at.wrapping_sub(1), at, at.wrapping_add(1)]);
            }
        }
    }
    let edges = [448.0f32, 464.0, 57344.0, 61440.0, 65504.0, 65520.0, f32::MAX, f32::INFINITY];
    let edges = edges.into_iter().flat_map(|v| [v.to_bits() - 1, v.to_bits(), v.to_bits() + 1]);
    let nans = [0x7f80_0001, 0x7fa0_0000, 0x7fbf_ffff, 0x7fc0_0000, 0x7fe0_0000, u32::MAX >> 1];
    for bits in edges.chain(nans).chain([0, 1, 1 << 22, (1 << 22) + 1, (1 << 23) - 1]) {
        all.extend([bits, bits | 1 << 31]);
    }
    all
}

/// The bits that the host makes of `values`.
fn narrow(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; values.len() * dtype.size()];
    convert_from_f32(dtype, values, &mut out);
    out
}

fn check(lib: &'static Lib, bits: &[u32]) {
    let n = bits.len();
    let input = Memory::new("in", ANY, 4 * n);
    input.write(bits);
    let outs = [2, 2, 1, 1, 1, 2, 2].map(|size| Memory::new("out", ANY, size * n));
    let outs_at = std::array::from_fn(|i| outs[i].addr());
    let args = Narrow { input: input.addr(), n: n as u64, outs: outs_at };
    let k = lib.kernel("c_narrow");
    let launch = k.launch(8).arg(&args);
    Run::new(1).memory(outs.iter().chain([&input])).stream(0, vec![launch]).go().unwrap();
    let values: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
    for (d, m) in SMALL.into_iter().zip(&outs) {
        let (got, want) = (m.read::<u8>(), narrow(d, &values));
        let size = d.size();
        let bad = (0..n).find(|i| got[i * size..][..size] != want[i * size..][..size]);
        if let Some(i) = bad {
            let (got, want) = (&got[i * size..][..size], &want[i * size..][..size]);
            panic!("{d} of {:#010x}: {got:x?}, not {want:x?}", bits[i]);
        }
    }
    // What a quantisation makes: both in one word, one code for every NaN.
    for (d, m) in [(DType::F8E4M3, &outs[5]), (DType::F8E5M2, &outs[6])] {
        let want = narrow(d, &values);
        for (i, got) in m.read::<u16>().into_iter().enumerate() {
            let (low, high) = (want[i], want[i] ^ 0x80);
            let pair = if values[i].is_nan() { [0x7f, 0x7f] } else { [low, high] };
            assert_eq!(got.to_le_bytes(), pair, "{d} of {:#010x} and its negative", bits[i]);
        }
    }
}

/// `n` patterns, a quarter of them near the range of the small types.
fn random(n: u64) -> Vec<u32> {
    let rng = Rng::new(17);
    let near = |v: u64| (v as u32 & 0x8fff_ffff) | 0x3000_0000 | (v >> 40) as u32 & 0x3fff_ffff;
    (0..n).map(|i| if i % 4 == 0 { near(rng.at(i)) } else { rng.at(i) as u32 }).collect()
}

fn every_small_number_widens_as_on_the_host() {
    widen(*LIB);
}

fn f32_rounds_as_on_the_host() {
    check(*LIB, &boundaries());
    check(*LIB, &random(1_000_000));
}

fn few(lib: &'static Lib) {
    let mut bits: Vec<u32> = boundaries().into_iter().step_by(5).collect();
    bits.extend(boundaries().iter().rev().take(80));
    check(lib, &bits);
}

fn mutants_of_the_conversions_are_killed() {
    all_are_killed(
        &SOURCE.emu_text(),
        load,
        ("common/convert", "conversions"),
        scenarios![few, widen],
    );
}
