//! Collectives by kernels between two meetings: `collective/sm80_move.cu` and `sm80_reduce.cu` with
//! `comm/signal.cu`, in the order in which the host queues them, on one to eight ranks and on as
//! many as a launch has segments for.

use std::sync::LazyLock;

use bytemuck::Zeroable;
use tilewire_core::DType;
use tilewire_kernels::abi::{TwMoves, TwPart, TwReduce};
use tilewire_kernels::portable::{MOVE, MOVE_SEGMENTS, REDUCE, REDUCE_THREADS};

use crate::collective::{Batch, OPS, Op, Ranks};
use crate::compile::Unit;
use crate::host::{Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, reduce, scenarios, tests};

pub const TESTS: &[Test] = tests![
    kernels_between_meetings_have_the_hosts_bits,
    as_many_segments_as_there_may_be,
    mutants_of_moves_are_killed,
];

const THREADS: u32 = 64;

fn load(text: String) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: MOVE.name,
        text,
        defines: MOVE.defines.iter().map(|d| (*d, u64::from(THREADS))).collect(),
        kernels: MOVE.kernels.to_vec(),
        smem: 0,
    })
}

static MOVES: LazyLock<&'static Lib> = LazyLock::new(|| load(MOVE.emu_text()));

/// The segments that have bytes; nothing without any.
fn moves(
    lib: &'static Lib,
    parts: impl IntoIterator<Item = TwPart>,
    blocks: u32,
) -> Option<Launch<'static>> {
    let parts: Vec<TwPart> = parts.into_iter().filter(|p| p.len > 0).collect();
    let mut m: TwMoves = Zeroable::zeroed();
    for (i, p) in parts.iter().enumerate() {
        (m.src[i], m.dst[i], m.len[i]) = (p.src, p.dst, p.len);
    }
    // A few hundred bytes for each launch of a test.
    let kernel = Box::leak(Box::new(lib.kernel("tw_move")));
    let grid = [blocks, parts.len() as u32, 1];
    (!parts.is_empty()).then(|| kernel.grid(grid, [THREADS, 1, 1]).arg(&m))
}

/// Signal slots: credit and arrival, and the arrival of a second phase.
const SLOTS: [usize; 3] = [4, 5, 7];

/// What the host queues for `b` on rank `me`.
fn launches<'a>(
    ranks: &'a Ranks,
    b: &Batch,
    (me, size): (usize, usize),
    (adds, dtype): (&'static Lib, DType),
) -> Vec<Launch<'a>> {
    let (p, t) = ranks.param(me, b);
    let meet = |slot: usize| ranks.team.enter_launch(me, slot, slot, 0);
    let mut list = vec![meet(SLOTS[0])];
    list.extend(moves(*MOVES, p.send, 2));
    list.push(meet(SLOTS[1]));
    if matches!(b.op, Op::Gather | Op::Exchange) {
        list.extend(moves(*MOVES, p.take, 1));
        return list;
    }
    let num = t.len / dtype.size() as u64;
    let sum = TwReduce {
        slots: t.slots,
        stride: t.stride,
        own: t.own,
        out: t.to[me],
        bias: 0,
        bias_out: 0,
        pad: 0,
        num,
        cols: 1,
        me: me as u32,
        size: size as u32,
        scale: t.scale,
    };
    let kernel = Box::leak(Box::new(adds.kernel("tw_reduce")));
    let grid = kernel.grid([1, 1, 1], [REDUCE_THREADS as u32, 1, 1]);
    list.extend((num > 0).then(|| grid.arg(&sum)));
    if b.op == Op::Reduce {
        let to = (0..size).filter(|r| *r != me);
        let parts = to.map(|r| TwPart { src: t.to[me], dst: t.to[r], len: t.len });
        list.extend(moves(*MOVES, parts, 3));
        list.push(meet(SLOTS[2]));
        list.extend(moves(*MOVES, p.take, 1));
    }
    list
}

fn kernels_between_meetings_have_the_hosts_bits() {
    let all = [(23, DType::F32), (7, DType::BF16), (10, DType::F16)];
    let all = all.map(|(m, dtype)| (reduce::load(REDUCE.emu_text(), [m; 3]), dtype));
    for size in 1..=8 {
        let (adds, dtype) = all[size % 3];
        let ranks = Ranks::new(*MOVES, size);
        // No way of the host sends whole vectors by these.
        let ops = [&OPS[..4], &OPS[..4]].concat();
        let batch = |(op, seed): (&Op, u64)| Batch::new((*op, dtype), size, seed);
        let batches: Vec<Batch> = ops.iter().zip(size as u64..).map(batch).collect();
        ranks.run((size as u64, size), &batches, &|r| {
            batches.iter().flat_map(|b| launches(&ranks, b, (r, size), (adds, dtype))).collect()
        });
        batches.iter().for_each(Batch::check);
        ranks.team.assert_settled();
    }
}

/// Segments of any alignment and length, as many as a launch takes.
fn segments(lib: &'static Lib) {
    let len = |i: usize| i * 37 % 211 + usize::from(i % 7 == 3) * 4096;
    // Sixteen bytes from any address that is a multiple of 1, 2, 4, 8 and 16.
    let (room, shift) = (4096 + 256, |i: usize| [0, 4, 1, 16, 2, 8][i % 6]);
    let from = Memory::new("from", ANY, MOVE_SEGMENTS * room);
    let to = Memory::new("to", ANY, MOVE_SEGMENTS * room);
    let data: Vec<u8> = (0..from.len_bytes()).map(|i| (i * 7 + i / 251) as u8).collect();
    from.write(&data);
    to.write(&vec![0x77u8; to.len_bytes()]);
    let mut want = vec![0x77u8; to.len_bytes()];
    let parts = (0..MOVE_SEGMENTS).map(|i| {
        let (src, dst) = (i * room + shift(i), i * room + shift(i / 6));
        want[dst..][..len(i)].copy_from_slice(&data[src..][..len(i)]);
        let len = len(i) as u64;
        TwPart { src: from.addr() + src as u64, dst: to.addr() + dst as u64, len }
    });
    let parts: Vec<TwPart> = parts.collect();
    let launch = moves(lib, parts, 2).unwrap();
    Run::new(1).memory([&from, &to]).stream(0, vec![launch]).go().unwrap();
    assert!(to.read::<u8>() == want, "segments have moved");
}

fn as_many_segments_as_there_may_be() {
    segments(*MOVES);
}

fn mutants_of_moves_are_killed() {
    all_are_killed(&MOVE.emu_text(), load, ("collective/sm80_move", "moves"), scenarios![segments]);
}
