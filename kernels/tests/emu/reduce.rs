//! `collective/sm80_reduce.cu`: sums of parts, against the same sums on the host, to the bit.

use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_kernels::abi::TwReduce;
use tilewire_kernels::portable::{REDUCE, REDUCE_MANTISSAS, REDUCE_THREADS, reduce_defines};

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] =
    tests![sums_of_every_type_and_size_have_the_hosts_bits, mutants_of_the_sum_are_killed];

fn dtype(mantissa: u64) -> DType {
    match mantissa {
        23 => DType::F32,
        10 => DType::F16,
        _ => DType::BF16,
    }
}

pub fn load(text: String, types: [u64; 3]) -> &'static Lib {
    let value = |d: &&'static str| {
        let all = reduce_defines(types);
        (*d, all.iter().find(|(n, _)| n == *d).expect("a definition").1)
    };
    RUNTIME.load(&Unit {
        name: REDUCE.name,
        text,
        defines: REDUCE.defines.iter().map(value).collect(),
        kernels: REDUCE.kernels.to_vec(),
        smem: 0,
    })
}

fn bytes(dtype: DType, v: &[f32]) -> Vec<u8> {
    let mut out = vec![0; v.len() * dtype.size()];
    convert_from_f32(dtype, v, &mut out);
    out
}

fn wide(dtype: DType, b: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; b.len() / dtype.size()];
    convert_to_f32(dtype, b, &mut out);
    out
}

/// Size of the team, my rank, rows, columns, elements from an aligned address, bias, scale. Without
/// a shift, a bias is of the type of the sums.
type Case = (usize, usize, usize, usize, usize, bool, f32);

fn sum(lib: &'static Lib, types: [u64; 3], (size, me, rows, cols, shift, with, scale): Case) {
    let [t_wire, t_own, t_out] = types.map(dtype);
    let (num, mut rng) = (rows * cols, Rng::new((size * 1000 + rows * 7 + me) as u64));
    let mut some = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.normal() * 100.0).collect() };
    let at = shift * t_wire.size();
    // Slots with room behind them that nobody reads.
    let stride = (num * t_wire.size() + 24).next_multiple_of(16);
    let slots = Memory::new("slots", ANY, size * stride + 16);
    let mut all = vec![0xffu8; slots.len_bytes()];
    let parts: Vec<Vec<u8>> = (0..size).map(|_| bytes(t_wire, &some(num))).collect();
    for (r, p) in parts.iter().enumerate().filter(|(r, _)| *r != me) {
        all[r * stride + at..][..p.len()].copy_from_slice(p);
    }
    slots.write(&all);
    let mine = bytes(t_own, &some(num));
    let own_at = shift * t_own.size();
    let own = Memory::new("own", ANY, own_at + mine.len());
    let mut padded = vec![0u8; own.len_bytes()];
    padded[own_at..own_at + mine.len()].copy_from_slice(&mine);
    own.write(&padded);
    let of_out = with && shift == 0;
    let t_bias = if of_out { t_out } else { DType::F32 };
    let bias_bytes = bytes(t_bias, &some(cols));
    let bias_values = wide(t_bias, &bias_bytes);
    let bias = Memory::new("bias", ANY, (t_bias.size() * cols).max(1));
    if cols > 0 {
        bias.write(&bias_bytes);
    }
    let out = Memory::new("out", ANY, num * t_out.size() + 32);
    out.write(&vec![0xa5u8; out.len_bytes()]);
    let param = TwReduce {
        slots: slots.addr() + at as u64,
        stride: stride as u64,
        own: if me < size { own.addr() + own_at as u64 } else { 0 },
        out: out.addr() + (shift * t_out.size()) as u64,
        bias: if with { bias.addr() } else { 0 },
        num: num as u64,
        cols: cols as u32,
        me: me as u32,
        size: size as u32,
        scale,
        bias_out: u32::from(of_out),
        pad: 0,
    };
    let kernel = lib.kernel("tw_reduce");
    let launch = kernel.grid([2, 1, 1], [REDUCE_THREADS as u32, 1, 1]).arg(&param);
    Run::new(1).memory([&slots, &own, &bias, &out]).stream(0, vec![launch]).go().unwrap();
    let values: Vec<Vec<f32>> = parts
        .iter()
        .enumerate()
        .map(|(r, p)| if r == me { wide(t_own, &mine) } else { wide(t_wire, p) })
        .collect();
    let want: Vec<f32> = (0..num)
        .map(|i| {
            let s = values[1..].iter().fold(values[0][i], |s, v| s + v[i]);
            s * scale + if with { bias_values[i % cols] } else { 0.0 }
        })
        .collect();
    let got = out.read::<u8>();
    let first = shift * t_out.size();
    assert_eq!(got[first..first + num * t_out.size()], bytes(t_out, &want), "{types:?}");
    let around = got[..first].iter().chain(&got[first + num * t_out.size()..]);
    assert!(around.copied().all(|b| b == 0xa5), "bytes around the output");
}

const CASES: [Case; 9] = [
    (1, 0, 3, 5, 0, false, 1.0),
    (2, 1, 7, 9, 0, true, 1.0),
    (3, 0, 1, 1, 1, false, 0.25),
    (4, 2, 33, 64, 0, true, 0.5),
    (9, 8, 20, 33, 2, true, 1.0),
    (17, 3, 5, 8, 0, false, 1.0 / 17.0),
    (2, 0, 0, 4, 0, false, 1.0),
    // All parts in slots.
    (1, 99, 6, 12, 0, false, 1.0),
    (3, 99, 5, 7, 1, true, 0.5),
];

fn all(lib: &'static Lib, types: [u64; 3]) {
    CASES.iter().for_each(|c| sum(lib, types, *c));
}

fn sums_of_every_type_and_size_have_the_hosts_bits() {
    for types in REDUCE_MANTISSAS {
        all(load(REDUCE.emu_text(), types), types);
    }
}

const TYPES: [u64; 3] = [7, 23, 7];

fn planted(lib: &'static Lib) {
    all(lib, TYPES);
}

fn broken(text: String) -> &'static Lib {
    load(text, TYPES)
}

fn mutants_of_the_sum_are_killed() {
    all_are_killed(
        &REDUCE.emu_text(),
        broken,
        ("collective/sm80_reduce", "sums"),
        scenarios![planted],
    );
}
