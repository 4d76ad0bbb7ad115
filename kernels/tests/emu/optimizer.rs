//! `layers/sm80_optimizer.cu` against the oracle.

use std::sync::OnceLock;

use tilewire_core::{DType, Rng};
use tilewire_kernels::abi::{TwAdamW, TwInit};
use tilewire_kernels::portable::OPTIMIZER;
use tilewire_oracle::{Mat, nn};

use crate::host::Lib;
use crate::layers::{On, TYPES, blocks, load, run};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] =
    tests![the_optimizer_is_the_oracles, mutants_of_the_optimizer_are_killed];

fn optimizer(t: usize) -> &'static Lib {
    static LIBS: [OnceLock<&'static Lib>; 2] = [const { OnceLock::new() }; 2];
    LIBS[t].get_or_init(|| load(&OPTIMIZER, OPTIMIZER.emu_text(), t))
}

/// A step: those before it, the loss and whether all have their sums, which decide whether it is
/// taken, and the schedule.
#[derive(Clone, Copy)]
struct Step {
    count: i32,
    loss: f32,
    sums: f32,
    /// Of warm-up, and in all.
    steps: [u64; 2],
}

const HYPER: [f64; 6] = [0.1, 0.9, 0.98, 1e-6, 0.01, 1.0];
const STEP: Step = Step { count: 0, loss: 1.0, sums: 1.0, steps: [10, 60] };

/// The learning rate after `count` steps: a linear warm-up, then a cosine to a tenth.
fn rate(count: i32, steps: [u64; 2]) -> f64 {
    let (done, [warmup, all]) = (f64::from(count), steps.map(|n| n as f64));
    if done < warmup {
        return HYPER[0] * (done + 1.0) / warmup;
    }
    let t = ((done - warmup) / (all - warmup)).min(1.0);
    HYPER[0] * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * t).cos()))
}

/// Gradients' norm, a step from it, and the count.
fn step(lib: &'static Lib, t: usize, s: Step) {
    let Step { count, loss, sums, steps } = s;
    let (dtype, n, mut rng) = (TYPES[t], 131, Rng::new(8));
    let mut mat = |f: f64| Mat::random(&mut rng, 1, n).map(|v| f * v).rounded(DType::F32);
    let (w, g, m, v) = (mat(1.0), mat(2.0), mat(0.1), mat(0.1).map(|v| v * v).rounded(DType::F32));
    let put = |m: &Mat| On::put(DType::F32, m);
    let (w_at, master, g_at) = (On::put(dtype, &w.rounded(dtype)), put(&w), put(&g));
    let (m_at, v_at) = (put(&m), put(&v));
    let small = put(&Mat::new(1, 4, vec![f64::from(loss), 0.0, 0.0, f64::from(sums)]));
    let counter = Memory::new("count", ANY, 4);
    counter.write(&[count]);
    let counter = On { memory: counter, dtype: DType::I32, shape: (1, 1) };
    let num = 3usize;
    let partial =
        On { memory: Memory::new("squares", ANY, 8 * num), dtype: DType::I64, shape: (1, num) };
    let [lr, beta1, beta2, eps, decay, clip] = HYPER;
    let p = TwAdamW {
        w: w_at.addr(),
        master: if dtype == DType::F32 { 0 } else { master.addr() },
        g: g_at.addr(),
        m: m_at.addr(),
        v: v_at.addr(),
        small: small.addr(),
        count: counter.addr(),
        n: n as u64,
        lr,
        beta1,
        beta2,
        eps,
        decay,
        clip,
        warmup: steps[0],
        total: steps[1],
    };
    let names = ["tw_square_sum", "tw_square_total", "tw_adamw", "tw_count_step"];
    let kernels = names.map(|k| lib.kernel(k));
    let launch = |i: usize, num: usize| {
        let (grid, block) = blocks(num);
        kernels[i].grid(grid, block)
    };
    let squares = launch(0, num).arg(&g_at.addr()).arg(&partial.addr()).arg(&(n as u64));
    let total = launch(1, 1).arg(&partial.addr()).arg(&(small.addr() + 4)).arg(&(num as u32));
    let counted = kernels[3].grid([1, 1, 1], [1, 1, 1]).arg(&small.addr()).arg(&counter.addr());
    let work = vec![squares, total, launch(2, 2).arg(&p), counted];
    let memory = [&w_at, &master, &g_at, &m_at, &v_at, &small, &counter, &partial];
    run(work, &memory);
    let norm = nn::grad_norm(std::slice::from_ref(&g));
    let small = small.get();
    let have = (small.at(0, 1) + small.at(0, 2)).sqrt();
    assert!((have - norm).abs() < 1e-9 * norm, "norm {have} for {norm}");
    let own = if dtype == DType::F32 { &w_at } else { &master };
    if !(loss.is_finite() && sums.is_finite()) {
        assert_eq!(own.get(), w, "no step is taken");
        assert_eq!((m_at.get(), v_at.get()), (m, v));
        assert_eq!(counter.memory.read::<i32>(), [count]);
        return;
    }
    let rate = rate(count, steps);
    let [_, beta1, beta2, eps, weight_decay, clip] = HYPER;
    let opt = nn::AdamW { lr: rate, beta1, beta2, eps, weight_decay };
    let before = nn::AdamWState { param: w, m, v, step: count as u32 };
    let after = nn::adamw_step(&opt, &before, &g.map(|g| g * (clip / norm).min(1.0)));
    own.close("weights", &after.param, 1e-6);
    m_at.close("first moment", &after.m, 1e-6);
    v_at.close("second moment", &after.v, 1e-6);
    assert_eq!(counter.memory.read::<i32>(), [count + 1]);
    if dtype != DType::F32 {
        w_at.close("narrow weights", &after.param, 1e-6);
    }
}

/// First values of a piece are those of the whole at its place.
fn init(lib: &'static Lib, t: usize) {
    let (rng, (rows, cols), (row0, col0, wide)) =
        (Rng::new(77), (7, 11), (5usize, 3usize, 29usize));
    let kernel = lib.kernel("tw_init");
    for std in [0.0, 0.5] {
        let (w, master) = (On::room(TYPES[t], rows, cols), On::room(DType::F32, rows, cols));
        let p = TwInit {
            w: w.addr(),
            master: master.addr(),
            n: (rows * cols) as u64,
            cols: cols as u64,
            row0: row0 as u64,
            col0: col0 as u64,
            global_cols: wide as u64,
            seed: rng.key(),
            std,
        };
        let (grid, block) = blocks(1);
        run(vec![kernel.grid(grid, block).arg(&p)], &[&w, &master]);
        let normal = |i: u64| {
            let u = 1.0 - rng.f64_at(2 * i);
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * rng.f64_at(2 * i + 1)).cos()
        };
        let want = Mat::from_fn(rows, cols, |r, c| {
            let at = ((row0 + r) * wide + col0 + c) as u64;
            if std == 0.0 { 1.0 } else { std * normal(at) }
        });
        master.close("master", &want, 1e-7);
        w.close("first values", &want, 1e-7);
    }
}

fn whole_optimizer(lib: &'static Lib, t: usize) {
    for (count, loss) in [(0, 1.0), (9, 2.0), (10, 2.0), (35, 0.5), (90, 0.5), (3, f32::NAN)] {
        step(lib, t, Step { count, loss, ..STEP });
    }
    step(lib, t, Step { count: 3, sums: f32::NAN, ..STEP });
    // Schedules that are longer than 32 bits count.
    for steps in [[10, 1 << 32], [(1 << 32) + 10, 1 << 33], [10, u64::MAX]] {
        step(lib, t, Step { count: 35, steps, ..STEP });
    }
    init(lib, t);
}

fn the_optimizer_is_the_oracles() {
    (0..2).for_each(|t| whole_optimizer(optimizer(t), t));
}

fn planted_optimizer(lib: &'static Lib) {
    whole_optimizer(lib, 1);
}

fn broken_optimizer(text: String) -> &'static Lib {
    load(&OPTIMIZER, text, 1)
}

fn mutants_of_the_optimizer_are_killed() {
    all_are_killed(
        &OPTIMIZER.emu_text(),
        broken_optimizer,
        ("layers/sm80_optimizer", "optimizer"),
        scenarios![planted_optimizer],
    );
}
