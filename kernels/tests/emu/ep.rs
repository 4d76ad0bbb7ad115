//! `ep/sm80_ep.cu` on four ranks: routing against the oracle, rows and sums against the arithmetic of the
//! host operation, to the bit.

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_kernels::portable::{EP, EP_THREADS, ep_defines};
use tilewire_oracle::ep::{EpLayout, EpSpec};
use tilewire_oracle::permute::TopK;

use crate::compile::Unit;
use crate::host::{Kernel, Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory, Pages};
use crate::planted::{Planted, all_are_killed};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![tokens_go_to_their_experts_and_back, mutants_of_expert_parallelism_are_killed];

const RANKS: usize = 4;
const TOKENS: usize = 5;
const K: usize = 3;
const HIDDEN: usize = 6;
const ALIGN: usize = 2;
const EXPERTS: [usize; RANKS] = [2, 0, 2, 1];
const NUM: usize = 5;
const META: usize = 64;
const ROW: usize = 32;
const BACK: usize = 48;
const THREADS: u32 = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Layer {
    areas: [u64; 4],
    stride: u64,
    first: u64,
    strides: [u64; 3],
    size: u32,
    me: u32,
    max_tokens: u32,
    top_k: u32,
    experts: u32,
    capacity: u32,
    align: u32,
    scales: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Routing {
    idx: u64,
    chunks: u64,
    next: u64,
    status: u64,
    choices: u32,
    wide: u32,
    num_chunks: u32,
    pad: u32,
}

fn load(text: String) -> &'static Lib {
    let value = |d: &&'static str| {
        let all = ep_defines(23);
        let own = all.iter().find(|(n, _)| n == *d).expect("a definition").1;
        // Small blocks: several chunks with few choices.
        (*d, if *d == "TW_OUT_MANTISSA" { own } else { u64::from(THREADS) })
    };
    assert!(EP_THREADS.is_multiple_of(u64::from(THREADS)));
    RUNTIME.load(&Unit {
        name: EP.name,
        text,
        defines: EP.defines.iter().map(value).collect(),
        kernels: EP.kernels.to_vec(),
        smem: 0,
    })
}

/// One rank's own memory: the handle's eleven arrays, scratch, inputs and outputs.
struct Side {
    handle: Vec<Memory>,
    scratch: [Memory; 4],
    idx: Memory,
    x: Memory,
    w: Memory,
    recv: Memory,
    recv_w: Memory,
    y: Memory,
    out: Memory,
    tokens: usize,
}

fn filled<T: Pod>(v: &[T]) -> Memory {
    let m = Memory::new("input", ANY, size_of_val(v));
    if !v.is_empty() {
        m.write(v);
    }
    m
}

fn poisoned(len: usize) -> Memory {
    let m = Memory::new("output", ANY, len);
    m.write(&vec![0xffu8; len]);
    m
}

fn layer_param(pages: &Memory, side: &Side, me: usize, capacity: usize) -> Layer {
    let base = pages.addr();
    let records = (RANKS * TOKENS) as u64;
    let meta = 512;
    let tokens = meta + records * META as u64;
    Layer {
        areas: [base, base + meta, base + tokens, base + tokens + records * ROW as u64],
        stride: pages.stride(),
        first: side.scratch[3].addr(),
        strides: [META as u64, ROW as u64, BACK as u64],
        size: RANKS as u32,
        me: me as u32,
        max_tokens: TOKENS as u32,
        top_k: K as u32,
        experts: NUM as u32,
        capacity: capacity as u32,
        align: ALIGN as u32,
        scales: 0,
    }
}

/// The launches of a rank, from its number, memory, layer and handle.
type Phase<'a> = dyn Fn(usize, &Side, Layer, [u64; 11]) -> Vec<Launch<'static>> + 'a;

/// Everything of one routing, on all ranks: dispatch with weights, then a weighted combine.
fn exchange(lib: &'static Lib, seed: u64, capacity: usize) {
    let mut rng = Rng::new(seed);
    let tokens = [TOKENS, 0, 3, 4];
    let topks: Vec<TopK> =
        tokens.iter().map(|&t| TopK::random(&mut rng, (t, K), NUM, 0.2)).collect();
    let spec =
        EpSpec { experts_per_rank: EXPERTS.to_vec(), align: ALIGN, capacity: Some(capacity) };
    let want = EpLayout::new(&spec, &topks);
    let mut some = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.normal()).collect() };
    let x: Vec<Vec<f32>> = tokens.iter().map(|t| some(t * HIDDEN)).collect();
    let w: Vec<Vec<f32>> = tokens.iter().map(|t| some(t * K)).collect();
    let y: Vec<Vec<f32>> = (0..RANKS).map(|_| some(capacity * HIDDEN)).collect();
    let first: Vec<u32> = (0..=RANKS).map(|r| EXPERTS[..r].iter().sum::<usize>() as u32).collect();
    let records = RANKS * TOKENS;
    let sides: Vec<Side> = (0..RANKS)
        .map(|r| Side {
            handle: [
                4 * TOKENS * K,
                4 * TOKENS * K,
                4 * records,
                12 * records * K,
                4 * capacity,
                4 * records,
                8 * EXPERTS[r].max(1),
                8 * EXPERTS[r].max(1),
                8,
                8,
                8 * RANKS,
            ]
            .map(poisoned)
            .into(),
            scratch: [poisoned(4 * 2 * (NUM + 1)), poisoned(8 * NUM), poisoned(4), filled(&first)],
            idx: filled(&topks[r].idx),
            x: filled(&x[r]),
            w: filled(&w[r]),
            recv: poisoned(4 * capacity * HIDDEN),
            recv_w: filled(&vec![0.0f32; capacity]),
            y: filled(&y[r]),
            out: poisoned(4 * tokens[r] * HIDDEN),
            tokens: tokens[r],
        })
        .collect();
    let pages = Pages::new(RANKS, 8192);
    let views: Vec<Memory> = (0..RANKS).map(|r| pages.map("symmetric", r as u32)).collect();
    // Kernels of all ranks between two meetings; the meeting is the end of the run.
    let phase = |make: &Phase<'_>| {
        let mut run = Run::new(seed);
        for (r, s) in sides.iter().enumerate() {
            let handle: Vec<u64> = s.handle.iter().map(Memory::addr).collect();
            let layer = layer_param(&views[r], s, r, capacity);
            let launches = make(r, s, layer, handle.try_into().unwrap());
            run = run.stream(r as u32, launches).memory(&s.handle).memory(&s.scratch);
            run = run.memory([&s.idx, &s.x, &s.w, &s.recv, &s.recv_w, &s.y, &s.out, &views[r]]);
        }
        run.go().unwrap();
    };
    let go = |name: &str, blocks: usize| {
        // A few hundred bytes for each launch of a test.
        let kernel: &'static Kernel = Box::leak(Box::new(lib.kernel(name)));
        kernel.grid([blocks as u32, 1, 1], [THREADS, 1, 1])
    };
    let routing = |s: &Side| Routing {
        idx: s.idx.addr(),
        chunks: s.scratch[0].addr(),
        next: s.scratch[1].addr(),
        status: s.scratch[2].addr(),
        choices: (s.tokens * K) as u32,
        wide: 1,
        num_chunks: 1,
        pad: 0,
    };
    phase(&|_, s, l, _| {
        let a = routing(s);
        let two = |l: &Layer| {
            [go("tw_ep_count", 1), go("tw_ep_publish", RANKS)].map(|k| k.arg(l).arg(&a))
        };
        two(&l).into()
    });
    phase(&|_, s, l, h| {
        let a = routing(s);
        [go("tw_ep_scan", 1), go("tw_ep_place", 1)].map(|k| k.arg(&l).arg(&a).arg(&h)).into()
    });
    for (r, s) in sides.iter().enumerate() {
        let ints = |i: usize| s.handle[i].read::<i64>();
        let rank = &want.ranks[r];
        let n = EXPERTS[r];
        let counts: Vec<i64> = rank.counts.iter().map(|&c| c as i64).collect();
        let splits: Vec<i64> = rank.m_splits().iter().map(|&c| c as i64).collect();
        assert_eq!((&ints(6)[..n], &ints(7)[..n]), (&counts[..], &splits[..]), "rank {r}");
        assert_eq!(ints(8), [rank.total_padded() as i64]);
        let lost: Vec<i64> =
            want.ranks.iter().map(|r| r.overflow.iter().sum::<usize>() as i64).collect();
        assert_eq!((ints(9)[0], ints(10)), (lost[r], lost.clone()));
        let rows = s.handle[0].read::<i32>();
        let slots = &want.slots[r];
        let kept: Vec<i32> =
            slots.iter().map(|s| s.as_ref().map_or(-1, |s| s.row as i32)).collect();
        assert_eq!(rows[..kept.len()], kept, "rows of rank {r}");
        assert_eq!(s.scratch[2].read::<u32>(), [0]);
    }
    let row_bytes = 4 * HIDDEN as u64;
    phase(&|_, s, l, h| {
        if s.tokens == 0 {
            return Vec::new();
        }
        let k = go("tw_ep_push", s.tokens).arg(&l).arg(&h).arg(&s.x.addr()).arg(&row_bytes);
        vec![k.arg(&s.w.addr()).arg(&0u64)]
    });
    for s in &sides {
        s.handle[4].write(&vec![-1i32; capacity]);
    }
    phase(&|_, s, l, h| {
        let index = go("tw_ep_index", records.div_ceil(THREADS as usize));
        let gather = go("tw_ep_gather", capacity).arg(&l).arg(&s.handle[4].addr());
        vec![
            index.arg(&l).arg(&h).arg(&s.recv_w.addr()),
            gather.arg(&s.recv.addr()).arg(&row_bytes).arg(&0u64),
        ]
    });
    for (r, s) in sides.iter().enumerate() {
        let there = |i: usize| views[r].get(r, 512 + META * i) as u32;
        assert!((0..records).all(|i| there(i) == 0), "records that were read are there no more");
        let mut num = vec![0u32; records];
        for (src, slots) in want.slots.iter().enumerate() {
            let here = slots.iter().enumerate().filter(|(_, s)| s.is_some_and(|s| s.rank == r));
            here.for_each(|(i, _)| num[src * TOKENS + i / K] += 1);
        }
        assert_eq!(s.handle[2].read::<u32>(), num, "copies of the records at {r}");
        let (mut rows, mut weights) = (vec![0.0f32; capacity * HIDDEN], vec![0.0f32; capacity]);
        for (src, slots) in want.slots.iter().enumerate() {
            for (i, slot) in slots.iter().enumerate() {
                let Some(slot) = slot.as_ref().filter(|s| s.rank == r) else { continue };
                let from = &x[src][i / K * HIDDEN..][..HIDDEN];
                rows[slot.row * HIDDEN..][..HIDDEN].copy_from_slice(from);
                weights[slot.row] = w[src][i];
            }
        }
        assert_eq!(s.recv.read::<f32>(), rows, "received by {r}");
        assert_eq!(s.recv_w.read::<f32>(), weights, "weights of {r}");
    }
    phase(&|_, s, l, h| {
        let k = go("tw_ep_return", records).arg(&l).arg(&h).arg(&s.y.addr()).arg(&s.recv_w.addr());
        vec![k.arg(&0u64).arg(&(HIDDEN as u32)).arg(&1u32)]
    });
    phase(&|_, s, l, h| {
        if s.tokens == 0 {
            return Vec::new();
        }
        let k = go("tw_ep_sum", s.tokens).arg(&l).arg(&h).arg(&s.out.addr()).arg(&0u64);
        vec![k.arg(&(HIDDEN as u32))]
    });
    for (r, s) in sides.iter().enumerate() {
        let mut out = vec![0.0f32; s.tokens * HIDDEN];
        for t in 0..s.tokens {
            for (home, y) in y.iter().enumerate() {
                let mut part = [0.0f32; HIDDEN];
                let mut any = false;
                for j in 0..K {
                    let slot = want.slots[r][t * K + j].as_ref().filter(|s| s.rank == home);
                    let Some(slot) = slot else { continue };
                    any = true;
                    let from = &y[slot.row * HIDDEN..][..HIDDEN];
                    part.iter_mut().zip(from).for_each(|(p, v)| *p += w[r][t * K + j] * v);
                }
                if any {
                    let sum = &mut out[t * HIDDEN..][..HIDDEN];
                    sum.iter_mut().zip(part).for_each(|(o, p)| *o += p);
                }
            }
        }
        let mut bytes = vec![0; 4 * out.len()];
        convert_from_f32(DType::F32, &out, &mut bytes);
        let mut again = vec![0.0; out.len()];
        convert_to_f32(DType::F32, &bytes, &mut again);
        assert_eq!(s.out.read::<f32>(), again, "combined on {r}");
    }
}

fn some_routings(lib: &'static Lib) {
    for (seed, capacity) in [(1, 40), (2, 40), (3, 6), (4, 1)] {
        exchange(lib, seed, capacity);
    }
}

fn tokens_go_to_their_experts_and_back() {
    some_routings(load(EP.emu_text()));
}

const MUTANTS: &[Planted] = &[
    Planted(
        "own counts count as earlier ones",
        "mine += s < l.me",
        "mine += s <= l.me",
        some_routings,
    ),
    Planted(
        "experts are not aligned",
        "(total + l.align - 1) / l.align * l.align, &all",
        "total, &all",
        some_routings,
    ),
    Planted(
        "rows of all ranks in one",
        "a.next[e] - (i64)rows[r], padded",
        "a.next[e], padded",
        some_routings,
    ),
    Planted(
        "rows beyond the capacity",
        "at < l.capacity ? (int)at",
        "at <= l.capacity ? (int)at",
        some_routings,
    ),
    Planted(
        "choices of a chunk share a row",
        "a.next[e] + counts[e] + before",
        "a.next[e] + counts[e]",
        some_routings,
    ),
    Planted(
        "records of another rank",
        "(u64)l.me * l.max_tokens + t;\n    // One",
        "(u64)t;\n    // One",
        some_routings,
    ),
    Planted("dropped copies are sent", "|| h.rows[i] < 0) continue;", ") continue;", some_routings),
    Planted("records stay", "    meta->num = 0;\n", "", some_routings),
    Planted("no weights", "c.row] = c.weight", "c.row] = 1.0f", some_routings),
    Planted("padding is not written", "((u8*)to)[i] = 0;", ";", some_routings),
    Planted(
        "returned without weights",
        "expert_major && weights ? weights[row]",
        "false ? weights[row]",
        some_routings,
    ),
    Planted(
        "returned to the wrong place",
        "((u64)l.me * l.max_tokens + t) * l.back_stride;\n    for",
        "(u64)t * l.back_stride;\n    for",
        some_routings,
    ),
    Planted(
        "ranks from the last to the first",
        "for (u32 r = 0; r < num_from; r++)",
        "for (u32 r = num_from; r-- > 0;)",
        some_routings,
    ),
];

fn mutants_of_expert_parallelism_are_killed() {
    all_are_killed(&EP.emu_text(), load, MUTANTS);
}
