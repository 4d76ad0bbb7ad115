//! Gradients of biases and activations in `grouped_gemm/sm80_grouped_gemm.cu`.

use bytemuck::Zeroable;
use tilewire_kernels::SM80_GROUPED_GEMM;
use tilewire_kernels::abi::{TwGemm, TwGrouped};

use crate::gemm::{Build, GELU, NONE, RELU, SMALL, SWIGLU, Type, dgelu, load, number};
use crate::grouped::LIB;
use crate::host::Lib;
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    grouped_gradients_of_biases,
    grouped_gradients_of_activations,
    addresses_by_value,
    grouped_grad_mutants
];

const GOOD: [&[i64]; 5] = [&[3, 0, 70, 1], &[0, 0], &[9], &[], &[20, 20, 34]];
/// The bad one is behind the first 32, which a warp looks at together.
const FAR: [i64; 40] = {
    let mut splits = [0; 40];
    (splits[0], splits[35]) = (5, -1);
    splits
};
const BAD: [&[i64]; 3] = [&[3, -1, 70], &[70, 11], &FAR];
const CAPACITY: usize = 80;

fn store(name: &str, bytes: &[u8]) -> Memory {
    let m = Memory::new(name, ANY, bytes.len());
    m.write(bytes);
    m
}

fn values(t: Type, tensor: u64, num: usize) -> Vec<f32> {
    (0..num).map(|i| t.round(2.0 * number(false, tensor, i))).collect()
}

/// A launch of `kernel` on `g` (whose addresses are those of A, D and aux) and `splits`; the
/// status.
fn run(
    on: &Build,
    kernel: &str,
    g: TwGemm,
    splits: &[i64],
    memory: [&Memory; 3],
    blocks: usize,
) -> i32 {
    let (s, status) = (store("splits", bytemuck::cast_slice(splits)), store("status", &[0; 4]));
    let [a, d, aux] = memory;
    let p = TwGrouped {
        g: TwGemm { a: a.addr(), d: d.addr(), aux: aux.addr(), ..g },
        splits: s.addr(),
        status: status.addr(),
        groups: splits.len() as u32,
        ..TwGrouped::zeroed()
    };
    let k = on.lib.kernel(kernel);
    let threads = if kernel == "tw_grouped_dbias" { 256 } else { on.threads };
    let launch = k.grid([blocks.max(1) as u32, 1, 1], [threads, 1, 1]).smem(1024).arg(&p);
    Run::new(1).memory([a, d, aux, &s, &status]).stream(0, vec![launch]).go().unwrap();
    status.read::<i32>()[0]
}

fn dbias(on: &Build) {
    for (i, splits) in GOOD.iter().chain(&BAD).enumerate() {
        let (t, n) = ([Type::F16, Type::Bf16][i % 2], [37, 8, 70][i % 3]);
        let (a, groups) = (values(t, 1, CAPACITY * n), splits.len());
        let (from, none) = (store("A", &t.bytes(&a)), store("none", &[]));
        let out = store("dbias", &Type::F32.bytes(&vec![f32::NAN; groups * n]));
        let g = TwGemm {
            lda: n as i64,
            n: n as u32,
            k: CAPACITY as u32,
            flags: t as u32,
            ..TwGemm::zeroed()
        };
        let blocks = groups * n.div_ceil(32);
        let status = run(on, "tw_grouped_dbias", g, splits, [&from, &out, &none], blocks);
        let got = out.read::<f32>();
        if i >= GOOD.len() {
            assert!(status > 0 && got.iter().all(|v| v.is_nan()), "{splits:?}");
            continue;
        }
        let mut first = 0;
        for (e, rows) in splits.iter().map(|s| *s as usize).enumerate() {
            for j in 0..n {
                let terms = || (first..first + rows).map(|r| f64::from(a[r * n + j]));
                let e32 = 1e-6 * terms().map(f64::abs).sum::<f64>();
                let (g, want) = (f64::from(got[e * n + j]), terms().sum::<f64>());
                assert!((g - want).abs() <= e32, "{splits:?}: {g}, not {want} at {e} {j}");
            }
            first += rows;
        }
    }
}

fn grouped_gradients_of_biases() {
    dbias(&LIB);
}

/// The gradient at a row of `n` columns.
fn slope(act: u32, dy: &[f32], aux: &[f32]) -> Vec<f64> {
    let n = dy.len();
    let d = |j: usize| f64::from(dy[j]);
    let x = |j: usize| f64::from(aux[j]);
    let s = |j: usize| 1.0 / (1.0 + (-x(j)).exp());
    match act {
        RELU => (0..n).map(|j| if x(j) > 0.0 { d(j) } else { 0.0 }).collect(),
        GELU => (0..n).map(|j| d(j) * dgelu(x(j))).collect(),
        SWIGLU => {
            let gate = |j: usize| d(j) * x(n + j) * s(j) * (1.0 + x(j) * (1.0 - s(j)));
            (0..n).map(gate).chain((0..n).map(|j| d(j) * x(j) * s(j))).collect()
        }
        _ => (0..n).map(d).collect(),
    }
}

fn dact(on: &Build) {
    for (i, splits) in GOOD.iter().chain(&BAD).enumerate() {
        for act in [NONE, RELU, GELU, SWIGLU] {
            let (t, zero) =
                ([Type::F16, Type::F32, Type::Bf16][(i + act as usize) % 3], i % 2 == 0);
            let n = [37, 8][i % 2];
            let cols = if act == SWIGLU { 2 * n } else { n };
            let (dy, x) = (values(t, 1, CAPACITY * n), values(t, 2, CAPACITY * cols));
            let (a, aux) = (store("dy", &t.bytes(&dy)), store("aux", &t.bytes(&x)));
            let poison = t.bytes(&vec![f32::NAN; CAPACITY * cols]);
            let d = store("dz", &poison);
            let g = TwGemm {
                lda: n as i64,
                ldd: cols as i64,
                m: CAPACITY as u32,
                n: n as u32,
                flags: t as u32 | act << 2 | u32::from(zero) << 7,
                ldaux: cols as i64,
                ..TwGemm::zeroed()
            };
            let status = run(on, "tw_grouped_dact", g, splits, [&a, &d, &aux], 7);
            let bytes = d.read::<u8>();
            if i >= GOOD.len() {
                assert!(status > 0 && bytes == poison, "{splits:?}");
                continue;
            }
            let used = splits.iter().sum::<i64>() as usize;
            let got = t.values(&bytes);
            for (r, row) in got.chunks(cols).enumerate() {
                if r >= used {
                    assert!(row.iter().all(|v| if zero { *v == 0.0 } else { v.is_nan() }));
                    continue;
                }
                let want = slope(act, &dy[r * n..][..n], &x[r * cols..][..cols]);
                let (u, tiny) = t.roundoff();
                for (g, w) in row.iter().zip(want) {
                    let good = (f64::from(*g) - w).abs() <= 1.1 * u * w.abs() + 2e-6 + tiny;
                    assert!(good, "{splits:?} {act} {t:?}: {g}, not {w} in row {r}");
                }
            }
        }
    }
}

fn grouped_gradients_of_activations() {
    dact(&LIB);
}

fn addresses_by_value() {
    let at: [u64; 64] = std::array::from_fn(|i| i as u64 * 77 + 5);
    for num in [0u32, 1, 37, 64] {
        let table = store("table", &[0xA5; 512]);
        let k = LIB.lib.kernel("tw_grouped_table");
        let launch = k.launch(64).arg(&at).arg(&num).arg(&table.addr());
        Run::new(1).memory([&table]).stream(0, vec![launch]).go().unwrap();
        let (got, n) = (table.read::<u64>(), num as usize);
        assert_eq!(got[..n], at[..n]);
        assert!(got[n..].iter().all(|v| *v == u64::from_ne_bytes([0xA5; 8])));
    }
}

fn small_dbias(lib: &'static Lib) {
    dbias(&Build { lib, ..*LIB });
}

fn small_dact(lib: &'static Lib) {
    dact(&Build { lib, ..*LIB });
}

fn grouped_grad_mutants() {
    let build = |text| load(&SM80_GROUPED_GEMM, text, SMALL, &[]).lib;
    all_are_killed(
        &SM80_GROUPED_GEMM.emu_text(),
        build,
        ("grouped_gemm/sm80_grouped_gemm", "gradients"),
        scenarios![small_dact, small_dbias],
    );
}
