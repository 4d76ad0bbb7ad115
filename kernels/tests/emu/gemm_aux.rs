//! What training adds to `gemm/sm80_gemm.cu`: pre-activations, derivatives, sums of rows.

use crate::gemm::Layout::{Nn, Nt, Tn};
use crate::gemm::{
    BF16, Build, Case, DGELU, DSWIGLU, F16, GELU, LAYOUTS, Matrix, RELU, SMALL, SWIGLU, Type, case,
    load, number,
};
use crate::host::Lib;
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};
use tilewire_kernels::SM80_GEMM;

pub const TESTS: &[Test] =
    tests![gemm_saves_pre_activations, gemm_derivatives, gemm_sums_of_rows, gemm_aux_mutants];

fn saves(on: &Build) {
    for (i, act) in [RELU, GELU, SWIGLU].into_iter().enumerate() {
        for (j, layout) in LAYOUTS.into_iter().enumerate() {
            let out = [Type::F16, Type::F32, Type::Bf16][(i + j) % 3];
            let bias = j % 2 == 0;
            let c = Case {
                out,
                act,
                bias,
                aux: true,
                pad: [0, 5, 8][j % 3],
                ..case(layout, 70, 44, 40)
            };
            c.check(on, false, 1);
        }
    }
    Case { act: SWIGLU, aux: true, ..case(Nt, 70, 276, 40) }.check(on, true, 2);
}

fn gemm_saves_pre_activations() {
    saves(&BF16);
}

fn derivatives(on: &Build) {
    for (i, act) in [DGELU, DSWIGLU].into_iter().enumerate() {
        for (j, layout) in LAYOUTS.into_iter().enumerate() {
            let out = [Type::F32, Type::F16, Type::Bf16][(i + j) % 3];
            let c =
                Case { out, act, bias: j == 3, pad: [0, 3, 8][j % 3], ..case(layout, 70, 90, 40) };
            c.check(on, false, 3);
        }
        Case { act, ..case(Nn, 65, 37, 20) }.check(on, true, 4);
        Case { act, ..case(Tn, 5, 8, 0) }.check(on, false, 5);
    }
}

fn gemm_derivatives() {
    derivatives(&F16);
}

/// Sums of the rows of op(A), with NaN between the rows in memory and behind the sums.
fn sums(on: &Build) {
    let types = [Type::Bf16, Type::F16, Type::F32];
    for (i, (m, k)) in [(1, 1), (33, 70), (70, 9), (64, 0), (100, 260)].into_iter().enumerate() {
        for km in [false, true] {
            let t = types[(i + usize::from(km)) % 3];
            let (rows, cols) = if km { (k, m) } else { (m, k) };
            let a = Matrix::new(rows, cols, 3, t, |i| number(false, 1, i));
            let (from, out) = (a.memory("A"), Memory::new("sums", ANY, 4 * (m + 8)));
            out.write(&vec![f32::NAN; m + 8]);
            let kernel = on.lib.kernel("tw_gemm_row_sums");
            let launch = kernel.grid([m.div_ceil(32) as u32, 1, 1], [256, 1, 1]).smem(1024);
            let flags = t as u32 | u32::from(km) << 5;
            let launch = launch.arg(&from.addr()).arg(&(a.ld as u64)).arg(&(m as u32));
            let launch = launch.arg(&(k as u32)).arg(&flags).arg(&out.addr());
            Run::new(1).memory([&from, &out]).stream(0, vec![launch]).go().unwrap();
            let got = out.read::<f32>();
            assert!(got[m..].iter().all(|v| v.is_nan()), "behind {m} sums");
            for (i, g) in got[..m].iter().enumerate() {
                let at = |z: usize| f64::from(a.values[if km { z * m + i } else { i * k + z }]);
                let (sum, size) = (0..k).map(at).fold((0.0, 0.0), |(s, n), v| (s + v, n + v.abs()));
                let e = 4.0 * 2f64.powi(-24) * (k as f64).sqrt() * size;
                assert!((f64::from(*g) - sum).abs() <= e, "row {i} of {m}: {g}, not {sum}");
            }
        }
    }
}

fn gemm_sums_of_rows() {
    sums(&BF16);
}

fn small(lib: &'static Lib) -> Build {
    Build { lib, ..*F16 }
}

fn small_saves(lib: &'static Lib) {
    saves(&small(lib));
}

fn small_derivatives(lib: &'static Lib) {
    derivatives(&small(lib));
}

fn small_sums(lib: &'static Lib) {
    sums(&small(lib));
}

fn gemm_aux_mutants() {
    let build = |text| load(&SM80_GEMM, text, SMALL, &[]).lib;
    all_are_killed(
        &SM80_GEMM.emu_text(),
        build,
        ("gemm/sm80_gemm", "auxiliary"),
        scenarios![small_derivatives, small_saves, small_sums],
    );
}
