//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::{EP, EP_BACK, EP_BULK};

use crate::ep::{load, load_back, load_bulk, some_bulk_returns, some_bulk_routings, some_routings};
use crate::ep_away::{staying_away, staying_away_back, staying_away_bulk};
use crate::ep_straight::{some_straight, some_straight_bulk};
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    mutants_of_expert_parallelism_are_killed,
    mutants_of_bulk_dispatch_are_killed,
    mutants_of_bulk_combine_are_killed,
];

const MUTANTS: &[Planted] = &[
    Planted(
        "rows come to a buffer that is in use",
        " || !tw_accepted(t, l, m, recv, epoch)) return;",
        ") return;",
        some_straight,
    ),
    Planted(
        "a buffer is free too early",
        "r, 0, 0, epoch << 16, 0, 0, 0}",
        "r, 0, 0, (epoch - 1) << 16, 0, 0, 0}",
        some_straight,
    ),
    Planted(
        "different buffers are not seen",
        "(u32)(word & 0xffff) != out.buffer",
        "false",
        some_straight,
    ),
    Planted("buffers are not told", "epoch << 16 | out.buffer", "epoch << 16", some_straight),
    Planted("the first row is the last", "if (n == 0) row0 =", "row0 =", some_straight),
    Planted(
        "copies are made from the area",
        "if (out.buffer && num > 0) from =",
        "if (false) from =",
        some_straight,
    ),
    Planted(
        "rows of another rank's buffer",
        "out.x + (u64)r * l.stride - (u64)l.me * l.stride +",
        "out.x +",
        some_straight,
    ),
    Planted(
        "lanes of a warp do not agree",
        "if (tw_warp_is_over(t)) return;\n    tw_pad(",
        "if (tw_is_over(t)) return;\n    tw_pad(",
        some_straight,
    ),
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
    Planted("dropped copies are sent", "&& c.row >= 0) {", ") {", some_routings),
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
    Planted(
        "padding is not written",
        "((u8*)to)[i] = 0;\n    }\n};",
        ";\n    }\n};",
        some_routings,
    ),
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
    Planted("routing is not spoiled", "if (tw_told(t)) tw_spoil(out);", "", staying_away),
    Planted("rows are not spoiled", "if (tw_told(t)) tw_spoil(p);", "", staying_away),
];

fn mutants_of_expert_parallelism_are_killed() {
    all_are_killed(&EP.emu_text(), load, MUTANTS);
}

const BULK_MUTANTS: &[Planted] = &[
    Planted(
        "different buffers are not seen",
        "(u32)(word & 0xffff) != out.buffer",
        "false",
        some_straight_bulk,
    ),
    Planted(
        "rows come before they may",
        " || !tw_accepted(t, l, m, recv, epoch)) return;",
        ") return;",
        some_straight_bulk,
    ),
    Planted(
        "rows to the area",
        "if (recv.buffer) return tw_recv_row",
        "if (false) return tw_recv_row",
        some_straight_bulk,
    ),
    Planted(
        "rows from the area",
        "if (!out.buffer) return l.tokens",
        "return l.tokens",
        some_straight_bulk,
    ),
    Planted("single copies only", "if (num == 1) return 0;", "return 0;", some_straight_bulk),
    Planted(
        "pieces of all warps in one",
        "memory + warp * PIECES * PIECE",
        "memory",
        some_bulk_routings,
    ),
    Planted(
        "a row sent to its beginning",
        "rows[r / 32]) + at), piece",
        "rows[r / 32])), piece",
        some_bulk_routings,
    ),
    Planted(
        "a row laid to its beginning",
        "out.row_bytes + at), piece",
        "out.row_bytes), piece",
        some_bulk_routings,
    ),
    Planted(
        "always the first piece",
        "tw_bulk_fetch(s, from + at + PIECE, left - PIECE);\n            else if (token",
        "tw_bulk_fetch(s, from, left - PIECE);\n            else if (token",
        some_bulk_routings,
    ),
    Planted(
        "always the first piece of what came",
        "tw_bulk_fetch(s, from + at + PIECE, left - PIECE);\n            else if (live",
        "tw_bulk_fetch(s, from, left - PIECE);\n            else if (live",
        some_bulk_routings,
    ),
    Planted(
        "the same token again",
        "tw_bulk_fetch(s, from + in.row_bytes,",
        "tw_bulk_fetch(s, from,",
        some_bulk_routings,
    ),
    Planted(
        "the same record again",
        "else if (live != 0) tw_bulk_fetch(s, next,",
        "else if (live != 0) tw_bulk_fetch(s, from,",
        some_bulk_routings,
    ),
    Planted("to nobody", "if (mask >> r & 1)\n", "if (false)\n", some_bulk_routings),
    Planted(
        "own rows to their beginning",
        "recv.row_bytes + at), piece",
        "recv.row_bytes), piece",
        some_bulk_routings,
    ),
    Planted("own rows stay away", "if (mine >= 0)\n", "if (false)\n", some_bulk_routings),
    Planted(
        "own rows of the first choice only",
        "if (threadIdx.x % 32 < l.top_k &&",
        "if (threadIdx.x % 32 < 1 &&",
        some_straight_bulk,
    ),
    Planted("own rows of all ranks", "&& h.ranks[i] == (int)l.me)", "&& true)", some_bulk_routings),
    Planted("to no row", "if (row < l.capacity) bulk", "if (false) bulk", some_bulk_routings),
    Planted(
        "the other piece",
        "return tw_piece(s, s.used++)",
        "return tw_piece(s, ++s.used)",
        some_bulk_routings,
    ),
    Planted(
        "nobody is told",
        "tw_send_flags(t, l, m, epoch, c);\n    }\n}\n\n// By",
        "}\n}\n\n// By",
        some_bulk_routings,
    ),
    Planted(
        "rows are not waited for",
        "if (!tw_arrived(t, l, m, epoch, src, c)) return;",
        "",
        some_bulk_routings,
    ),
    Planted("records of earlier launches", "== (u32)epoch ? min", ">= 0 ? min", some_bulk_routings),
    Planted(
        "what was taken stays",
        "if (threadIdx.x < 2) m.ticket",
        "if (false) m.ticket",
        some_bulk_routings,
    ),
    Planted(
        "padding of one piece",
        "at < len; at += 32 * ZERO",
        "at < ZERO; at += 32 * ZERO",
        some_bulk_routings,
    ),
    Planted(
        "padding is not zero",
        "((u32*)fill.zeros)[i] = 0",
        "((u32*)fill.zeros)[i] = 1",
        some_bulk_routings,
    ),
    Planted(
        "a load is not waited for",
        "s.used / PIECES & 1)",
        "~(s.used / PIECES) & 1)",
        some_bulk_routings,
    ),
    Planted("rows are not spoiled", "if (tw_told(t)) tw_spoil(p);", "", staying_away_bulk),
];

fn mutants_of_bulk_dispatch_are_killed() {
    all_are_killed(&EP_BULK.emu_text(), load_bulk, BULK_MUTANTS);
}

const BACK_MUTANTS: &[Planted] = &[
    Planted(
        "slices of all warps in one",
        "tw_smem + warp * (STAGES + 1) * SLICE",
        "tw_smem",
        some_bulk_returns,
    ),
    Planted("always the first slice", "rows.stride + c.at;", "rows.stride;", some_bulk_returns),
    Planted(
        "slices to the row's beginning",
        "(to(j) + at), ring",
        "(to(j)), ring",
        some_bulk_returns,
    ),
    Planted(
        "the first row again",
        "list.e[c.token][c.n].row",
        "list.e[c.token][0].row",
        some_bulk_returns,
    ),
    Planted(
        "the first token again",
        "list.e[c.token][c.n].row",
        "list.e[0][c.n].row",
        some_bulk_returns,
    ),
    Planted(
        "the weight of the first",
        "list.e[j][n].weight",
        "list.e[j][0].weight",
        some_bulk_returns,
    ),
    Planted(
        "no weights",
        "WEIGHTED ? __fmul_rn(w, v.term(k))",
        "false ? __fmul_rn(w, v.term(k))",
        some_bulk_returns,
    ),
    Planted(
        "a load is not waited for",
        "ring.used / STAGES & 1",
        "~(ring.used / STAGES) & 1",
        some_bulk_returns,
    ),
    Planted("loads are not counted", "ring.asked++;", "", some_bulk_returns),
    Planted(
        "tokens without rows are left",
        "if (list.num[j] == 0 && !zeros) continue;",
        "if (list.num[j] == 0) continue;",
        some_bulk_returns,
    ),
    Planted(
        "ranks from the last to the first",
        "for (u32 r = 0; r < l.size; r++) {\n            if (!__any",
        "for (u32 r = l.size; r-- > 0;) {\n            if (!__any",
        some_bulk_returns,
    ),
    Planted("dropped copies come back", "&& h.rows[i] >= 0 ?", "?", some_bulk_returns),
    Planted(
        "to the wrong place",
        "((u64)l.me * l.max_tokens + token) * l.back_stride;\n        tw_list",
        "(u64)token * l.back_stride;\n        tw_list",
        some_bulk_returns,
    ),
    Planted(
        "of another rank",
        "(u64)s * l.max_tokens + token;",
        "(u64)l.me * l.max_tokens + token;",
        some_bulk_returns,
    ),
    Planted(
        "what came back before is enough",
        "m.slot + 1, r, 0, 0, epoch,",
        "m.slot + 1, r, 0, 0, epoch - 1,",
        some_bulk_returns,
    ),
    Planted(
        "nobody is told",
        "st_relaxed_sys_u64(tw_arrival(l, m, s, l.me, c), epoch);",
        "",
        some_bulk_returns,
    ),
    Planted(
        "what was taken stays",
        "if (threadIdx.x < 2) m.ticket",
        "if (false) m.ticket",
        some_bulk_returns,
    ),
    Planted("results are not spoiled", "if (tw_told(t)) tw_spoil(p);", "", staying_away_back),
];

fn mutants_of_bulk_combine_are_killed() {
    all_are_killed(&EP_BACK.emu_text(), load_back, BACK_MUTANTS);
}
