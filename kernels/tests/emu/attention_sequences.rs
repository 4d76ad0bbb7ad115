//! `attention/sequences.cu`: each row is in one tile of a launch, with what its sequence says;
//! offsets that cannot be used read and write nothing outside.

use std::sync::LazyLock;

use bytemuck::Zeroable;
use tilewire_core::Rng;
use tilewire_kernels::abi::{TwOffsets, TwRefuse, TwSeg, TwSequences, TwShard};
use tilewire_kernels::attention::{PARTS, REFUSED, SEQUENCES, SEQUENCES_THREADS};

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![sequences_scenarios, mutants_of_sequences_are_killed];

static LIB: LazyLock<&'static Lib> = LazyLock::new(|| load(SEQUENCES.emu_text()));

/// The shift of rows of no sequence.
const GAP: i32 = i32::MIN;

fn load(text: String) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: SEQUENCES.name,
        text,
        defines: Vec::new(),
        kernels: SEQUENCES.kernels.to_vec(),
        smem: 0,
    })
}

/// Offsets of one side, the rows of its tensors, and of its tiles.
#[derive(Clone, Debug)]
struct Side {
    cu: Vec<i32>,
    /// First rows; none where sequences follow each other.
    at: Option<Vec<i32>>,
    tokens: u32,
    tile: u32,
    longest: u32,
    /// Rows of the tensors, among all; none for all of them.
    parts: Option<Vec<TwShard>>,
}

impl Side {
    fn packed(lens: &[i32], tail: i32, tile: u32) -> Self {
        let cu = sums(lens);
        let tokens = (cu[lens.len()] + tail) as u32;
        Self { cu, at: None, tokens, tile, longest: u32::MAX, parts: None }
    }

    fn padded(lens: &[i32], gaps: &[i32], tail: i32, tile: u32) -> Self {
        let at = sums(&lens.iter().zip(gaps).map(|(a, b)| a + b).collect::<Vec<_>>());
        let tokens = (at[lens.len()] + tail) as u32;
        Self { at: Some(at), tokens, ..Self::packed(lens, 0, tile) }
    }

    fn num(&self) -> usize {
        self.cu.len() - 1
    }

    /// The rows of `chunks` of as many equal chunks as `of`, in this order; the tensors have them
    /// in the order of `places`.
    fn divided(self, chunks: &[usize], places: &[usize], of: usize) -> Self {
        let at = |c: usize| (c * self.tokens as usize / of) as u32;
        let len = |c: usize| at(c + 1) - at(c);
        let part = |c: &usize| {
            let before = places.iter().take_while(|p| *p != c);
            TwShard { global: at(*c), row: before.map(|p| len(*p)).sum(), len: len(*c) }
        };
        Self { parts: Some(chunks.iter().map(part).collect()), ..self }
    }

    fn parts(&self) -> Vec<TwShard> {
        let whole = || vec![TwShard { global: 0, row: 0, len: self.tokens }];
        self.parts.clone().unwrap_or_else(whole)
    }

    fn num_rows(&self) -> u32 {
        self.parts().iter().map(|p| p.len).sum()
    }

    /// The most segments with rows, and the tiles of a launch: as the host computes them.
    fn most(&self) -> usize {
        let runs = if self.at.is_some() { 2 * self.num() } else { self.num() + 1 };
        runs + self.parts().len().saturating_sub(1)
    }

    fn tiles(&self) -> u32 {
        // No row, no tile.
        let rows = self.num_rows();
        if rows == 0 { 0 } else { rows / self.tile + self.most() as u32 }
    }

    /// The global row of each of the tensors, in the order of the parts.
    fn rows(&self) -> Vec<(u32, u32)> {
        let of = |p: &TwShard| {
            let p = *p;
            (0..p.len).map(move |i| (p.row + i, p.global + i))
        };
        self.parts().iter().flat_map(of).collect()
    }

    fn row(&self, s: usize) -> i32 {
        self.at.as_ref().unwrap_or(&self.cu)[s]
    }

    fn len(&self, s: usize) -> i32 {
        self.cu[s + 1] - self.cu[s]
    }

    /// The sequence of a row, and its position there.
    fn place(&self, row: u32) -> Option<(usize, u32)> {
        (0..self.num()).find_map(|s| {
            let at = row.checked_sub(self.row(s) as u32)?;
            (at < self.len(s) as u32).then_some((s, at))
        })
    }
}

fn sums(of: &[i32]) -> Vec<i32> {
    let mut at = 0;
    let mut next = |n: &i32| {
        at += n;
        at
    };
    [0].into_iter().chain(of.iter().map(&mut next)).collect()
}

/// The tables of both sides, and whether launches were refused: any, and this one.
struct Made {
    tables: [Vec<TwSeg>; 2],
    status: [u32; 2],
}

fn run(lib: &'static Lib, sides: [&Side; 2], status: [u32; 2]) -> Made {
    let of = |name: &str, v: &[i32]| {
        let m = Memory::new(name, ANY, 4 * v.len());
        m.write(v);
        m
    };
    let words = status.map(|v| {
        let m = Memory::new("status", ANY, 4);
        m.write(&[v]);
        m
    });
    let cu = sides.map(|s| of("cu", &s.cu));
    let at = sides.map(|s| s.at.as_ref().map(|at| of("at", at)));
    let tables = sides.map(|s| Memory::new("table", ANY, 2 * s.most() * size_of::<TwSeg>()));
    tables.iter().for_each(|t| t.write(&vec![0xA5u8; t.len_bytes()]));
    let parts = |i: usize| {
        let (mut all, given) = ([TwShard::zeroed(); PARTS], sides[i].parts());
        all[..given.len()].copy_from_slice(&given);
        (all, given.len() as u32)
    };
    let offsets = |i: usize| TwOffsets {
        cu: cu[i].addr(),
        at: at[i].as_ref().unwrap_or(&cu[i]).addr(),
        table: tables[i].addr(),
        tokens: sides[i].tokens,
        tile: sides[i].tile,
        segs: 2 * sides[i].most() as u32,
        longest: sides[i].longest,
        num_parts: parts(i).1,
        pad: 0,
        parts: parts(i).0,
    };
    let num = sides[0].num() as u32;
    let [any, refused] = words.each_ref().map(Memory::addr);
    let p = TwSequences { q: offsets(0), kv: offsets(1), refused, any, num, pad: 0 };
    let kernel = lib.kernel("tw_attn_sequences");
    let launch = kernel.launch(SEQUENCES_THREADS).arg(&p);
    let memory = cu.iter().chain(at.iter().flatten()).chain(&tables).chain(&words);
    Run::new(1).memory(memory).stream(0, vec![launch]).go().unwrap();
    let status = words.each_ref().map(|w| w.read::<u32>()[0]);
    Made { tables: tables.each_ref().map(Memory::read), status }
}

/// The rows of all tiles of a launch, with their segments, as `tw_own` finds these.
fn rows(side: &Side, table: &[TwSeg]) -> Vec<Option<TwSeg>> {
    let mut found = vec![None; side.num_rows() as usize];
    assert!(table.windows(2).all(|w| w[0].tile <= w[1].tile), "tiles ascend");
    for t in 0..side.tiles() {
        let seg = table[table.partition_point(|s| s.tile <= t) - 1];
        let first = (t - seg.tile) * side.tile;
        // What kernels compute of the rows of a tile does not overflow.
        assert!(first <= seg.len, "tile {t} begins behind its segment: {seg:?}");
        for i in first..seg.len.min(first + side.tile) {
            let seen = found[(seg.row + i) as usize].replace(seg);
            assert!(seen.is_none(), "row {} is in two tiles", seg.row + i);
        }
    }
    found
}

fn check(lib: &'static Lib, sides: [&Side; 2]) {
    let made = run(lib, sides, [0, 7]);
    assert_eq!(made.status, [0, 0], "{sides:?}");
    for (i, side) in sides.into_iter().enumerate() {
        let other = sides[1 - i];
        let found = rows(side, &made.tables[i]);
        for (row, global) in side.rows() {
            let seg = found[row as usize];
            let seg = seg.unwrap_or_else(|| panic!("row {row} is in no tile of {side:?}"));
            assert_eq!(seg.global + row - seg.row, global, "row {row} of {side:?}");
            let Some((s, pos)) = side.place(global) else {
                let of_none = (seg.shift, seg.pos, seg.first, seg.end);
                assert_eq!(of_none, (GAP, 0, 0, 0), "row {row} of {side:?}");
                continue;
            };
            assert_eq!(seg.pos + row - seg.row, pos, "row {row} of {side:?}");
            assert_eq!(seg.shift, sides[1].len(s) - sides[0].len(s));
            // In the order of the parts, and no segment without rows.
            let theirs = &made.tables[1 - i][seg.first as usize..seg.end as usize];
            let all: Vec<u32> = theirs.iter().flat_map(|t| t.row..t.row + t.len).collect();
            let of_s = |r: &(u32, u32)| other.place(r.1).is_some_and(|(of, _)| of == s);
            let want: Vec<u32> = other.rows().into_iter().filter(of_s).map(|r| r.0).collect();
            assert_eq!(all, want, "row {row} of {side:?}");
            assert!(theirs.iter().all(|t| t.len > 0));
        }
    }
}

fn tables(lib: &'static Lib) {
    let mut rng = Rng::new(5);
    for (num, most, tile_q, tile_kv) in
        [(1, 9, 4, 1), (1, 1, 128, 4), (7, 30, 4, 8), (300, 5, 2, 3), (600, 3, 64, 1)]
    {
        let mut some =
            |most: u64| -> Vec<i32> { (0..num).map(|_| rng.below(most) as i32).collect() };
        let (q, kv, gaps) = (some(most), some(most + 2), some(3));
        for tail in [0, 5] {
            let packed = [Side::packed(&q, tail, tile_q), Side::packed(&kv, 0, tile_kv)];
            check(lib, packed.each_ref());
            let padded =
                [Side::padded(&q, &gaps, tail, tile_q), Side::padded(&kv, &some(2), 1, tile_kv)];
            check(lib, padded.each_ref());
        }
    }
    divided(lib);
    // No rows at all.
    check(lib, [&Side::packed(&[0, 0], 0, 4), &Side::packed(&[3, 0], 0, 4)]);
}

/// Rows of one rank of several, against its own keys, those of the others, and those of all.
fn divided(lib: &'static Lib) {
    let mut rng = Rng::new(6);
    for (num, most, tile_q, tile_kv) in [(1, 40, 4, 1), (9, 20, 3, 8), (300, 4, 2, 3)] {
        let mut some =
            |most: u64| -> Vec<i32> { (0..num).map(|_| rng.below(most) as i32).collect() };
        let (q, kv, gaps) = (some(most), some(most + 2), some(3));
        for keys in [vec![1, 4], vec![2, 3, 0, 5], vec![1, 4, 0, 5, 2, 3], vec![0, 1, 2, 3, 4, 5]] {
            let places: Vec<_> =
                [0, 5, 1, 4, 2, 3].into_iter().filter(|c| keys.contains(c)).collect();
            let of_q = Side::padded(&q, &gaps, 2, tile_q).divided(&[1, 4], &[1, 4], 6);
            let of_kv = Side::padded(&kv, &gaps, 0, tile_kv).divided(&keys, &places, 6);
            check(lib, [&of_q, &of_kv]);
            let of_q = Side::packed(&q, 3, tile_q).divided(&[1, 4], &[1, 4], 6);
            check(lib, [&of_q, &Side::packed(&kv, 3, tile_kv).divided(&keys, &places, 6)]);
        }
    }
    // A rank without queries.
    let none = Side::packed(&[5, 9], 2, 4).divided(&[], &[], 6);
    check(lib, [&none, &Side::packed(&[4, 9], 1, 1)]);
    // As many parts as there may be, each of a sequence of its own.
    let many = Side::packed(&[3; PARTS], 0, 2);
    let chunks: Vec<_> = (0..PARTS).rev().collect();
    let divided = many.clone().divided(&chunks, &chunks, PARTS);
    check(lib, [&many, &divided]);
}

/// Offsets that cannot be used, of either side: one segment of no sequence has all rows.
fn refused(lib: &'static Lib) {
    let good = Side::padded(&[3, 0, 9], &[1, 2, 0], 4, 4);
    let with = |f: &dyn Fn(&mut Side)| {
        let mut s = good.clone();
        f(&mut s);
        s
    };
    let at = |i: usize, v: i32| with(&move |s| s.at.as_mut().unwrap()[i] = v);
    let cu = |i: usize, v: i32| with(&move |s| s.cu[i] = v);
    let bad = [
        cu(0, 1),
        cu(0, -1),
        cu(1, -3),
        cu(2, 2),
        cu(3, 100),
        cu(1, i32::MAX),
        cu(3, i32::MIN),
        at(0, 1),
        at(1, 2),
        at(1, 7),
        at(2, 3),
        at(3, 14),
        at(3, 100),
        at(3, -1),
        with(&|s| s.tokens = 14),
        with(&|s| s.longest = 8),
    ];
    let exact = with(&|s| (s.tokens, s.longest) = (15, 9));
    assert_eq!(run(lib, [&exact, &good], [0, 1]).status, [0, 0]);
    for (n, side) in bad.iter().enumerate() {
        for (i, sides) in [[side, &good], [&good, side]].into_iter().enumerate() {
            let made = run(lib, sides, [0, 0]);
            assert_eq!(made.status, [1, 1], "{n}: {side:?} as side {i}");
            for (side, table) in sides.into_iter().zip(&made.tables) {
                let all = rows(side, table);
                assert!(all.iter().all(|s| s.is_some_and(|s| s.shift == GAP && s.first == s.end)));
            }
        }
    }
    // Each part has a segment of its own.
    let parts = good.clone().divided(&[1, 2], &[2, 1], 3);
    let made = run(lib, [&parts, &bad[0]], [0, 0]);
    let all = rows(&parts, &made.tables[0]);
    assert!(all.iter().all(|s| s.is_some_and(|s| s.shift == GAP && s.first == s.end)));
    // What was refused before stays on record; this launch was not.
    assert_eq!(run(lib, [&good, &good], [1, 1]).status, [1, 0]);
}

/// Results become NaN if the launch was refused, and only these.
fn results(lib: &'static Lib) {
    let lens = [0usize, 2, 1000, 70_000, 3];
    for refused in [0u32, 1] {
        let word = Memory::new("refused", ANY, 4);
        word.write(&[refused]);
        let outs = lens.map(|n| Memory::new("result", ANY, (2 * n + 16).next_multiple_of(16)));
        let mut p = TwRefuse { refused: word.addr(), to: [0; REFUSED], num: [0; REFUSED] };
        for (i, m) in outs.iter().enumerate() {
            m.write(&vec![0x3Cu8; m.len_bytes()]);
            (p.to[i], p.num[i]) = (m.addr(), lens[i] as u64);
        }
        let kernel = lib.kernel("tw_attn_refuse");
        let launch = kernel.grid([3, 1, 1], [256, 1, 1]).arg(&p);
        Run::new(1).memory(outs.iter().chain([&word])).stream(0, vec![launch]).go().unwrap();
        for (m, n) in outs.iter().zip(lens) {
            let want = if refused == 1 { 0xffff } else { 0x3C3C };
            let got = m.read::<u16>();
            assert!(got[..n].iter().all(|w| *w == want) && got[n..].iter().all(|w| *w == 0x3C3C));
        }
    }
}

fn sequences_scenarios() {
    tables(*LIB);
    refused(*LIB);
    results(*LIB);
}

fn mutants_of_sequences_are_killed() {
    all_are_killed(
        &SEQUENCES.emu_text(),
        load,
        ("attention/sequences", "tables"),
        scenarios![refused, results, tables],
    );
}
