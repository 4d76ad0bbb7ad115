//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::{EP, EP_BULK};

use crate::ep::{load, load_bulk, some_bulk_routings, some_routings, staying_away};
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![mutants_of_expert_parallelism_are_killed, mutants_of_bulk_dispatch_are_killed];

const MUTANTS: &[Planted] = &[
    Planted(
        "own counts count as earlier ones",
        "r < l.me ? (u32)",
        "r <= l.me ? (u32)",
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
        "s.next[e] - (i64)rows[r], padded",
        "s.next[e], padded",
        some_routings,
    ),
    Planted(
        "rows beyond the capacity",
        "at < l.capacity ? (int)at",
        "at <= l.capacity ? (int)at",
        some_routings,
    ),
    Planted(
        "choices of a warp share a row",
        "mine[e] + __popc(same & ((1u << lane) - 1))",
        "mine[e]",
        some_routings,
    ),
    Planted(
        "warps of a block share rows",
        "s.warp[w * l.experts + e] = sum;",
        "s.warp[w * l.experts + e] = 0;",
        some_routings,
    ),
    Planted("blocks share rows", "s.earlier[e] + blocks", "s.earlier[e]", some_routings),
    Planted("counts of one block", "b < gridDim.x; b++) sum", "b < 1; b++) sum", some_routings),
    Planted(
        "counts are not waited for",
        "if (seen[i] >> 32 != (u32)epoch) {",
        "if (false) {",
        some_routings,
    ),
    Planted(
        "records of another rank",
        "(u64)l.me * l.max_tokens + t);\n    TwCopy*",
        "(u64)t);\n    TwCopy*",
        some_routings,
    ),
    Planted("dropped copies are sent", "&& c.row >= 0) copies", ") copies", some_routings),
    Planted(
        "records of earlier launches",
        "(u32)(word >> 32) == (u32)epoch ? (u32)word : 0",
        "(u32)word",
        some_routings,
    ),
    Planted("the area is not granted", "epoch - 1, 0, 0, 0}", "0, 0, 0, 0}", some_routings),
    Planted(
        "rows are not waited for",
        "if (!tw_arrived(t, l, m, epoch, s, c)) return;",
        "",
        some_routings,
    ),
    Planted(
        "rows of earlier launches are enough",
        "m.slot + 1, src, 0, 0, epoch,",
        "m.slot + 1, src, 0, 0, 1,",
        some_routings,
    ),
    Planted("no weights", "c.row] = c.weight", "c.row] = 1.0f", some_routings),
    Planted("padding is not written", "((u8*)to)[i] = 0;\n}", ";\n}", some_routings),
    Planted(
        "weights of padding",
        "out.weights[row] = 0.0f",
        "out.weights[row] = 1.0f",
        some_routings,
    ),
    Planted(
        "the second copy is forgotten",
        "if (to[1]) ((Piece*)to[1])",
        "if (false) ((Piece*)to[1])",
        some_routings,
    ),
    Planted(
        "the second slice is forgotten",
        "*begin = min(j * per, num)",
        "*begin = min(0 * per, num)",
        some_routings,
    ),
    Planted(
        "the rest of the row is not sent",
        "if (two) ((Piece*)(to",
        "if (false) ((Piece*)(to",
        some_routings,
    ),
    Planted("returned without weights", "b.expert_major && b.weights ?", "false ?", some_routings),
    Planted(
        "returned to the wrong place",
        "((u64)l.me * l.max_tokens + t) * l.back_stride;\n    u64",
        "(u64)t * l.back_stride;\n    u64",
        some_routings,
    ),
    Planted(
        "ranks from the last to the first",
        "for (u32 r = 0; r < l.size; r++) {\n            if (!(mask",
        "for (u32 r = l.size; r-- > 0;) {\n            if (!(mask",
        some_routings,
    ),
    Planted(
        "what comes back is not waited for",
        "if (!__all_sync(0xffffffffu, good)) return;",
        "",
        some_routings,
    ),
    Planted(
        "the launch is not counted",
        "if (threadIdx.x == 0) *m.epoch = epoch;\n    if (tw_is_over(t)) return;",
        "if (tw_is_over(t)) return;",
        some_routings,
    ),
    Planted("the ticket stays", "if (last) *ticket = 0;", "", some_routings),
    Planted("routing is not spoiled", "if (tw_is_over(t)) tw_spoil(out);", "", staying_away),
    Planted("rows are not spoiled", "if (tw_is_over(t)) tw_spoil(p);", "", staying_away),
];

fn mutants_of_expert_parallelism_are_killed() {
    all_are_killed(&EP.emu_text(), load, MUTANTS);
}

const BULK_MUTANTS: &[Planted] = &[
    Planted(
        "pieces of all warps in one",
        "tw_smem + threadIdx.x / 32 * PIECE, (const",
        "tw_smem, (const",
        some_bulk_routings,
    ),
    Planted(
        "every piece to the row's beginning",
        "l.stride + at), tw_smem",
        "l.stride), tw_smem",
        some_bulk_routings,
    ),
    Planted(
        "always the first piece",
        "tw_bulk_fetch(from + at,",
        "tw_bulk_fetch(from,",
        some_bulk_routings,
    ),
    Planted(
        "to nobody",
        "if (mask >> r & 1) bulk_store",
        "if (false) bulk_store",
        some_bulk_routings,
    ),
    Planted(
        "only the first piece",
        "at < in.row_bytes; at += PIECE",
        "at < in.row_bytes; at += in.row_bytes",
        some_bulk_routings,
    ),
    Planted(
        "nobody is told",
        "tw_send_flags(t, l, m, epoch, c);\n    }\n}\n\n// As",
        "}\n}\n\n// As",
        some_bulk_routings,
    ),
];

fn mutants_of_bulk_dispatch_are_killed() {
    all_are_killed(&EP_BULK.emu_text(), load_bulk, BULK_MUTANTS);
}
