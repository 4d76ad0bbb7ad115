//! `grouped_gemm/sm80_grouped_gemm.cu` against an f64 reference: groups, tails, bad splits.

use std::ops::Range;
use std::sync::LazyLock;

use tilewire_kernels::SM80_GROUPED_GEMM;
use tilewire_kernels::abi::{TwGemm, TwGrouped};

use crate::gemm::{Build, NONE, RELU, SMALL, SWIGLU, Type, load, number};
use crate::host::{Launch, Lib};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    grouped_fprop_and_dgrad,
    grouped_wgrad,
    grouped_f32,
    grouped_splits_that_cannot_be_used_write_nothing,
    grouped_mutants,
];

/// 64x64, four warps, three stages, f16.
pub static LIB: LazyLock<Build> =
    LazyLock::new(|| load(&SM80_GROUPED_GEMM, SM80_GROUPED_GEMM.emu_text(), SMALL, &[]));

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pass {
    /// D [capacity, n] = A [capacity, k] W_e [n, k]^T.
    Fprop,
    /// The same with W_e [k, n].
    Dgrad,
    /// D [groups][m, n] = A_e [rows, m]^T B_e [rows, n].
    Wgrad,
}
pub use Pass::{Dgrad, Fprop, Wgrad};

#[derive(Clone, Debug)]
pub struct Case {
    pub pass: Pass,
    pub splits: Vec<i64>,
    pub capacity: usize,
    /// `m` of wgrad, `k` of the others.
    pub k: usize,
    pub n: usize,
    pub act: u32,
    pub bias: bool,
    pub zero_tail: bool,
    /// Wgrad adds to the groups of odd number.
    pub accumulate: bool,
    /// Splits are given as ends, and as i32.
    pub ends: bool,
    pub narrow: bool,
    /// The pre-activation is stored, too.
    pub aux: bool,
    /// Weights, or their gradients, are found by a table: the last group's come first.
    pub table: bool,
    /// Of the operands, f16 or f32.
    pub input: Type,
    pub out: Type,
    pub exact: bool,
}

pub fn case(pass: Pass, splits: &[i64], capacity: usize, k: usize, n: usize) -> Case {
    let (act, out, splits) = (NONE, Type::F32, splits.to_vec());
    Case {
        pass,
        splits,
        capacity,
        k,
        n,
        act,
        bias: false,
        zero_tail: false,
        accumulate: false,
        ends: false,
        narrow: false,
        aux: false,
        table: false,
        input: Type::F16,
        out,
        exact: false,
    }
}

/// Operands as f32, rounded to their type: A, B, what D holds, bias.
struct Operands {
    a: Vec<f32>,
    b: Vec<f32>,
    d: Vec<f32>,
    bias: Vec<f32>,
}

impl Case {
    pub fn cols(&self) -> usize {
        if self.act == SWIGLU { self.n / 2 } else { self.n }
    }

    /// f32 beside integers, else that of D.
    fn bias_type(&self) -> Type {
        if self.exact { Type::F32 } else { self.out }
    }

    fn operands(&self) -> Operands {
        let rounded = |num: usize, tensor| -> Vec<f32> {
            (0..num).map(|i| self.input.round(number(self.exact, tensor, i))).collect()
        };
        let groups = self.splits.len();
        let (b, d) = match self.pass {
            Wgrad => (self.capacity * self.n, groups * self.k * self.n),
            _ => (groups * self.n * self.k, self.capacity * self.cols()),
        };
        let poison = |i: usize| self.accumulate && i / (self.k * self.n).max(1) % 2 == 1;
        let d = (0..d).map(|i| if poison(i) { -number(true, 3, i) } else { f32::NAN }).collect();
        let t = self.bias_type();
        let bias = (0..groups * self.n).map(|i| t.round(number(self.exact, 4, i))).collect();
        Operands { a: rounded(self.capacity * self.k, 1), b: rounded(b, 2), d, bias }
    }

    /// The bytes of D before the launch.
    fn before(&self) -> Vec<u8> {
        self.out.bytes(&self.operands().d)
    }

    /// Group and rows of each.
    fn groups(&self) -> Vec<(usize, Range<usize>)> {
        let mut end = 0;
        let rows = |(e, v): (usize, &i64)| {
            end += *v as usize;
            (e, end - *v as usize..end)
        };
        self.splits.iter().enumerate().map(rows).collect()
    }

    /// The sum over `terms` and how far it may be off.
    fn sum(start: f64, terms: impl Iterator<Item = f64>) -> (f64, f64) {
        let (mut sum, mut magnitude, mut num) = (start, start.abs(), 1u32);
        for t in terms {
            (sum, magnitude, num) = (sum + t, magnitude + t.abs(), num + 1);
        }
        (sum, 4.0 * 2f64.powi(-24) * f64::from(num).sqrt() * magnitude)
    }

    /// D with errors; NaN where nothing is written.
    fn reference(&self, x: &Operands) -> Vec<(f64, f64)> {
        let (n, k, cols) = (self.n, self.k, self.cols());
        let mut out = vec![(if self.zero_tail { 0.0 } else { f64::NAN }, 0.0); x.d.len()];
        let (a, b) = (|i: usize| f64::from(x.a[i]), |i: usize| f64::from(x.b[i]));
        for (e, rows) in self.groups() {
            if self.pass == Wgrad {
                for i in 0..k * n {
                    let old = if self.accumulate && e % 2 == 1 { x.d[e * k * n + i] } else { 0.0 };
                    let term = |r: usize| a(r * k + i / n) * b(r * n + i % n);
                    out[e * k * n + i] = Self::sum(old.into(), rows.clone().map(term));
                }
                continue;
            }
            let z = |i: usize, j: usize| {
                let w = |q: usize| if self.pass == Fprop { j * k + q } else { q * n + j };
                let bias = if self.bias { x.bias[e * n + j] } else { 0.0 };
                Self::sum(bias.into(), (0..k).map(|q| a(i * k + q) * b(e * n * k + w(q))))
            };
            for i in rows {
                for j in 0..cols {
                    let (y, err) = z(i, j);
                    out[i * cols + j] = match self.act {
                        RELU => (y.max(0.0), err),
                        SWIGLU => {
                            let (up, err_up) = z(i, cols + j);
                            let silu = y / (1.0 + (-y).exp());
                            (silu * up, 1.2 * up.abs() * err + silu.abs() * err_up + 1e-6)
                        }
                        _ => (y, err),
                    };
                }
            }
        }
        out
    }

    /// Splits as the kernel is given them.
    fn split_bytes(&self) -> Vec<u8> {
        let mut v = self.splits.clone();
        if self.ends {
            (1..v.len()).for_each(|i| v[i] = v[i].wrapping_add(v[i - 1]));
        }
        let narrow: Vec<i32> = v.iter().map(|&s| s as i32).collect();
        let (wide, narrow) = (bytemuck::cast_slice(&v), bytemuck::cast_slice(&narrow));
        if self.narrow { narrow } else { wide }.to_vec()
    }

    fn param(&self, [a, b, d, bias, splits, status, add, aux]: [u64; 8]) -> TwGrouped {
        let (k, n, cols) = (self.k as u64, self.n as u64, self.cols() as u64);
        let (m, len) =
            if self.pass == Wgrad { (self.k, self.capacity) } else { (self.capacity, self.k) };
        let ldb = if self.pass == Fprop { k } else { n };
        TwGrouped {
            g: TwGemm {
                a,
                b,
                d,
                bias: if self.bias { bias } else { 0 },
                lda: k as i64,
                ldb: ldb as i64,
                ldd: cols as i64,
                m: m as u32,
                n: self.n as u32,
                k: len as u32,
                flags: self.out as u32
                    | self.act << 2
                    | u32::from(self.zero_tail) << 7
                    | u32::from(self.ends) << 9
                    | u32::from(self.narrow) << 10
                    | u32::from(self.bias && self.bias_type() != Type::F32) << 11
                    | self.order_flags(),
                aux: if self.aux { aux } else { 0 },
                ldaux: self.n as i64,
            },
            splits,
            status,
            accumulate: if self.accumulate { add } else { 0 },
            stride: (k * n) as i64,
            groups: self.splits.len() as u32,
            pad: 0,
            table: 0,
        }
    }

    /// The kernel of f32 is told the order.
    fn order_flags(&self) -> u32 {
        match (self.input, self.pass) {
            (Type::F32, Wgrad) => 32,
            (Type::F32, Dgrad) => 64,
            _ => 0,
        }
    }

    /// Status and D of the portable kernels.
    fn run(&self, on: &Build, seed: u64) -> (u32, Vec<u8>) {
        let wide = self.input == Type::F32;
        let ((bm, bn), threads, smem) =
            if wide { ((64, 64), 256, 18432) } else { (on.tile, on.threads, on.smem) };
        let (tiles_n, groups) = (self.n.div_ceil(bn), self.splits.len());
        let (name, blocks) = match self.pass {
            Fprop => ("tw_grouped_nt", (self.capacity / bm + groups) * tiles_n),
            Dgrad => ("tw_grouped_nn", (self.capacity / bm + groups) * tiles_n),
            Wgrad => ("tw_grouped_tn", groups * self.k.div_ceil(bm) * tiles_n),
        };
        let k = on.lib.kernel(if wide { "tw_grouped_f32" } else { name });
        let launch = k.grid([blocks.max(1) as u32, 1, 1], [threads, 1, 1]).smem(smem);
        self.run_by(seed, &|param, _, _| launch.clone().arg(param))
    }

    /// Status and D of the launch that `how` makes of the products, of two words that are zero, and
    /// must be again at the end, and of memory for a tensor map of each group.
    pub fn run_by<'a>(
        &self,
        seed: u64,
        how: &dyn Fn(&TwGrouped, u64, &Memory) -> Launch<'a>,
    ) -> (u32, Vec<u8>) {
        let x = self.operands();
        let store = |name: &str, bytes: &[u8]| {
            let m = Memory::new(name, ANY, bytes.len());
            m.write(bytes);
            m
        };
        let groups = self.splits.len();
        let add: Vec<u8> = (0..groups).map(|e| (e % 2) as u8).collect();
        let all = [
            store("A", &self.input.bytes(&x.a)),
            store("B", &self.input.bytes(&x.b)),
            store("D", &self.out.bytes(&x.d)),
            store("bias", &self.bias_type().bytes(&x.bias)),
            store("splits", &self.split_bytes()),
            store("status", &[9, 0, 0, 0]),
            store("accumulate", &add),
            store("aux", &self.out.bytes(&vec![f32::NAN; self.capacity * self.n])),
        ];
        let words = Memory::new("words", ANY, 8);
        let maps = Memory::new("maps", ANY, 128 * groups);
        let mut param = self.param(all.each_ref().map(Memory::addr));
        let table = Memory::new("table", ANY, 8 * groups);
        let of = if self.pass == Wgrad { self.out } else { self.input };
        let size = of.bytes(&vec![0.0; self.k * self.n]).len() as u64;
        if self.table {
            let which = &all[if self.pass == Wgrad { 2 } else { 1 }];
            which.write(&reversed(&which.read::<u8>(), size as usize));
            let at: Vec<u64> =
                (0..groups).map(|e| which.addr() + (groups - 1 - e) as u64 * size).collect();
            table.write(&at);
            param.table = table.addr();
        }
        let launch = how(&param, words.addr(), &maps);
        let mut run = Run::new(seed)
            .memory(all.iter().chain([&table, &words, &maps]))
            .stream(0, vec![launch]);
        run.yield_permille = 20;
        run.go().unwrap_or_else(|e| panic!("{self:?}: {e}"));
        assert_eq!(words.get(0, 0), 0, "{self:?}: words that are not zero at the end");
        self.check_aux(&x, &all[7].read());
        let d = all[2].read::<u8>();
        let turned = self.table && self.pass == Wgrad;
        let d = if turned { reversed(&d, size as usize) } else { d };
        (all[5].read::<u32>()[0], d)
    }

    fn check(&self, on: &Build) {
        self.check_runs(&|seed| self.run(on, seed));
    }

    /// Compares what two seeds give with the reference, and with each other.
    pub fn check_runs(&self, run: &dyn Fn(u64) -> (u32, Vec<u8>)) {
        let x = self.operands();
        let (status, bytes) = run(1);
        assert_eq!(status, 9, "{self:?}: good splits leave what was found before");
        let (u, tiny) = self.out.roundoff();
        let got = self.out.values(&bytes);
        for (i, (g, (y, e))) in got.iter().zip(self.reference(&x)).enumerate() {
            let e = if self.exact { 0.0 } else { e * (1.0 + u) + u * y.abs() + tiny };
            let good = (f64::from(*g) - y).abs() <= e || (g.is_nan() && y.is_nan());
            assert!(good, "{self:?}: {g}, not {y} +- {e} at {i}");
        }
        self.kept(&bytes);
        assert!(bytes == run(2).1, "two runs differ");
    }
}

impl Case {
    /// The pre-activation is the product without activation; zero behind the groups, or as it was.
    fn check_aux(&self, x: &Operands, bytes: &[u8]) {
        let got = self.out.values(bytes);
        if !self.aux {
            assert!(got.iter().all(|v| v.is_nan()), "{self:?}: aux was written");
            return;
        }
        let plain = Case { act: NONE, ..self.clone() };
        let room = Operands {
            a: x.a.clone(),
            b: x.b.clone(),
            d: vec![0.0; got.len()],
            bias: x.bias.clone(),
        };
        let (u, tiny) = self.out.roundoff();
        for (i, (g, (y, e))) in got.iter().zip(plain.reference(&room)).enumerate() {
            let good = (f64::from(*g) - y).abs() <= e * (1.0 + u) + u * y.abs() + tiny;
            assert!(good || (g.is_nan() && y.is_nan()), "{self:?}: aux {g}, not {y} at {i}");
        }
    }

    /// Gradients that nothing is added to keep their bits: -0 too.
    fn kept(&self, bytes: &[u8]) {
        if self.pass != Wgrad || !self.accumulate {
            return;
        }
        let (before, len) = (self.before(), self.out.bytes(&[0.0]).len() * self.k * self.n);
        for (e, _) in self.groups().iter().filter(|(e, rows)| e % 2 == 1 && rows.is_empty()) {
            let at = e * len..(e + 1) * len;
            assert!(bytes[at.clone()] == before[at], "{self:?}: group {e} was touched");
        }
    }
}

/// The pieces of `len` bytes, the last one first.
fn reversed(bytes: &[u8], len: usize) -> Vec<u8> {
    bytes.chunks(len.max(1)).rev().flatten().copied().collect()
}

/// Groups without rows, of one row, of more than a tile; more groups than a warp has lanes.
pub fn many() -> Vec<i64> {
    (0..40).map(|e| i64::from(e % 7 == 3) * (e % 5)).collect()
}

fn rows_of(on: &Build, pass: Pass) {
    case(pass, &[3, 0, 70, 1, 0], 74, 40, 72).check(on);
    Case { zero_tail: true, out: Type::F16, ..case(pass, &[0, 65, 2], 90, 37, 21) }.check(on);
    Case { act: SWIGLU, bias: true, ..case(pass, &[5, 0, 9], 20, 24, 40) }.check(on);
    Case { act: RELU, bias: true, exact: true, ..case(pass, &many(), 30, 16, 24) }.check(on);
    Case { zero_tail: true, ..case(pass, &[0, 0], 5, 16, 16) }.check(on);
    case(pass, &[0, 0, 0], 7, 16, 16).check(on);
    case(pass, &[], 7, 16, 16).check(on);
    case(pass, &[2, 1], 3, 0, 8).check(on);
    case(pass, &[0], 0, 8, 8).check(on);
    let splits = [[5, 0, 70, 9], [0, 3, 1, 66]];
    for (i, s) in splits.iter().enumerate() {
        let (ends, narrow, zero_tail) = (true, i == 0, i == 1);
        let c = Case { ends, narrow, zero_tail, aux: true, ..case(pass, s, 90, 24, 40) };
        Case { act: SWIGLU, bias: true, ..c.clone() }.check(on);
        Case { act: RELU, ends: false, narrow: true, out: Type::F16, ..c }.check(on);
    }
    Case { ends: true, ..case(pass, &many(), 60, 16, 24) }.check(on);
    Case { table: true, ..case(pass, &many(), 60, 16, 24) }.check(on);
}

fn grouped_fprop_and_dgrad() {
    rows_of(&LIB, Fprop);
    rows_of(&LIB, Dgrad);
}

fn wgrad_of(on: &Build) {
    case(Wgrad, &[3, 0, 70, 1, 0], 80, 72, 40).check(on);
    Case { accumulate: true, exact: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 21, 70) }.check(on);
    Case { out: Type::F16, ..case(Wgrad, &many(), 30, 16, 8) }.check(on);
    case(Wgrad, &[0, 0], 5, 16, 16).check(on);
    Case { table: true, accumulate: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 24, 40) }.check(on);
    Case { ends: true, narrow: true, ..case(Wgrad, &[3, 0, 20], 30, 16, 24) }.check(on);
}

fn grouped_wgrad() {
    wgrad_of(&LIB);
}

/// Every pass of f32, with what is its own: tiles of 64, the order by flags, four bytes.
fn f32_of(on: &Build) {
    let wide = |c: Case| Case { input: Type::F32, ..c };
    for pass in [Fprop, Dgrad] {
        wide(case(pass, &[3, 0, 70, 1, 0], 74, 40, 72)).check(on);
        wide(Case { act: SWIGLU, bias: true, aux: true, ..case(pass, &[5, 0, 9], 20, 24, 40) })
            .check(on);
        let table =
            Case { table: true, zero_tail: true, ends: true, ..case(pass, &many(), 60, 17, 24) };
        wide(Case { out: Type::F16, ..table }).check(on);
        wide(Case { exact: true, ..case(pass, &[2, 1], 3, 0, 8) }).check(on);
    }
    wide(case(Wgrad, &[3, 0, 70, 1, 0], 80, 72, 40)).check(on);
    let add = Case { accumulate: true, exact: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 21, 70) };
    wide(Case { table: true, ..add }).check(on);
    let c = wide(Case { zero_tail: true, ..case(Fprop, &[4, 7, 0], 10, 16, 24) });
    let (got, bytes) = c.run(on, 3);
    assert!(got == 2 && bytes == c.before(), "{c:?}");
}

fn grouped_f32() {
    f32_of(&LIB);
}

/// Runs a case once.
pub type RunOnce<'a> = &'a dyn Fn(&Case) -> (u32, Vec<u8>);

/// Splits, and the status they set.
pub fn bad_splits(run: RunOnce<'_>) {
    let [near, far] = [3, 35].map(|bad| (0..40).map(|e| -i64::from(e == bad)).collect());
    let cases = [
        (vec![2, -1, 3], 1),
        (vec![4, 7, 0], 2),
        (vec![1, i64::MAX, i64::MAX], 2),
        (vec![i64::MIN, 1], 1),
        (vec![11, -1], 2),
        (vec![-1, 11], 1),
        (near, 1),
        ((0..40).map(|e| 8 * i64::from(e % 32 == 1)).collect(), 2),
        (far, 1),
    ];
    for (pass, (splits, status)) in
        [Fprop, Dgrad, Wgrad].iter().flat_map(|p| cases.iter().map(move |c| (*p, c)))
    {
        let c = Case { zero_tail: pass != Wgrad, ..case(pass, splits, 10, 16, 24) };
        let (got, bytes) = run(&c);
        assert_eq!(got, *status, "{c:?}");
        assert!(bytes == c.before(), "{c:?} wrote something");
    }
}

/// Ends that fall, and that pass the capacity: the first that is bad decides.
pub fn bad_ends(run: RunOnce<'_>) {
    let cases =
        [(vec![4, 3, 5], 1), (vec![4, 11, 3], 2), (vec![4, -9, 50], 1), (vec![i64::MAX, 0], 2)];
    for (ends, status) in cases {
        // `split_bytes` makes them ends again.
        let mut splits = ends.clone();
        (1..ends.len()).for_each(|i| splits[i] = ends[i].wrapping_sub(ends[i - 1]));
        let c = Case { ends: true, zero_tail: true, ..case(Fprop, &splits, 10, 16, 24) };
        let (got, bytes) = run(&c);
        assert_eq!(got, status, "{ends:?}");
        assert!(bytes == c.before(), "{c:?} wrote something");
    }
}

fn grouped_splits_that_cannot_be_used_write_nothing() {
    let once = |c: &Case| c.run(&LIB, 3);
    bad_splits(&once);
    bad_ends(&once);
}

fn good(lib: &'static Lib) {
    let on = &Build { lib, ..*LIB };
    rows_of(on, Fprop);
    wgrad_of(on);
}

fn wide(lib: &'static Lib) {
    f32_of(&Build { lib, ..*LIB });
}

fn bad(lib: &'static Lib) {
    let once = |c: &Case| c.run(&Build { lib, ..*LIB }, 3);
    bad_splits(&once);
    bad_ends(&once);
}

fn grouped_mutants() {
    let build = |text| load(&SM80_GROUPED_GEMM, text, SMALL, &[]).lib;
    all_are_killed(
        &SM80_GROUPED_GEMM.emu_text(),
        build,
        ("grouped_gemm/sm80_grouped_gemm", "products"),
        scenarios![bad, good, wide],
    );
}
