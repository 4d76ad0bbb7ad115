//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::{EP, EP_BULK};

use crate::ep::{load, load_bulk, some_bulk_routings, some_routings};
use crate::ep_away::{staying_away, staying_away_bulk};
use crate::ep_straight::{some_straight, some_straight_bulk};
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![mutants_of_expert_parallelism_are_killed, mutants_of_bulk_dispatch_are_killed,];

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
    Planted(
        "the row of another rank",
        "row = __shfl_sync(0xffffffffu, (u32)p.row, from)",
        "row = __shfl_sync(0xffffffffu, (u32)p.row, 0)",
        some_straight,
    ),
    Planted(
        "copies are made from the area",
        "const u64 from = out.buffer ? first :",
        "const u64 from = false ? first :",
        some_straight,
    ),
    Planted(
        "rows of another rank's buffer",
        "out.x + tw_step(l, r) - tw_step(l, l.me) +",
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
        "(i64)tw_ceil(total, l.align) * l.align, &all",
        "(i64)total, &all",
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
        "const u64 record = (u64)l.me * l.max_tokens + token;",
        "const u64 record = token;",
        some_routings,
    ),
    Planted(
        "dropped copies are sent",
        "if (p.row >= 0) {\n        const TwCopy",
        "if (p.rank >= 0) {\n        const TwCopy",
        some_routings,
    ),
    Planted("copies of a rank in one place", "[p.nth] = c;", "[0] = c;", some_routings),
    Planted(
        "scales of another token",
        "scales[s] = in.scales[(u64)of * l.scales + s]",
        "scales[s] = in.scales[(u64)t * l.scales]",
        some_routings,
    ),
    Planted(
        "scales of the first copy only",
        "out, record, n, __shfl_sync(full, (u32)c.row, n)",
        "out, record, n, __shfl_sync(full, (u32)c.row, 0)",
        some_routings,
    ),
    Planted(
        "no scales of padding",
        "out.scales[row * l.scales + i] = 0.0f",
        "out.scales[row * l.scales + i] = 1.0f",
        some_routings,
    ),
    Planted("padding of the expert before", "pads <= next", "pads < next", some_routings),
    Planted(
        "padding at the beginning",
        "__shfl_sync(full, end - pads, owner)",
        "__shfl_sync(full, end - rows, owner)",
        some_routings,
    ),
    Planted(
        "padding of every other row",
        "next < all; next += num",
        "next < all; next += 2 * num",
        some_routings,
    ),
    Planted(
        "rows of earlier warps",
        "lane < warp ? sums[lane]",
        "lane <= warp ? sums[lane]",
        some_routings,
    ),
    Planted(
        "an expert of the rank before",
        "r += e >= s.first[i]",
        "r += e > s.first[i]",
        some_routings,
    ),
    Planted(
        "records of earlier launches",
        "c.stamp == (u32)epoch));",
        "c.stamp != (u32)epoch - 1));",
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
        "__syncwarp();\n        if (!__all_sync(0xffffffffu, good)) return;",
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
    Planted(
        "rank-major rows of copies",
        "out.rank_major ? record : (u32)c.row",
        "(u32)c.row",
        some_routings,
    ),
    Planted(
        "rank-major indices of copies",
        "out.rank_major ? (int)record : c.row",
        "c.row",
        some_routings,
    ),
    Planted(
        "no rank-major rows of records",
        "if (out.rank_major) h.place[record] =",
        "if (false) h.place[record] =",
        some_routings,
    ),
    Planted(
        "rank-major rows of records that did not come",
        "num > 0 ? (int)record : -1",
        "(int)record",
        some_routings,
    ),
    Planted(
        "rank-major rows of the first ones that did not come",
        "if (j == 0 && num == 0 && out.rank_major)",
        "if (false)",
        some_routings,
    ),
    Planted(
        "rank-major scales of copies",
        "const u64 to = out.rank_major ? record : row;",
        "const u64 to = row;",
        some_routings,
    ),
    Planted(
        "rank-major rows of others",
        "recv.rank_major ? (u64)l.me * l.max_tokens + t : row",
        "recv.rank_major ? (u64)t : row",
        some_straight,
    ),
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
        "if (mine || recv.buffer) return",
        "if (mine) return",
        some_straight_bulk,
    ),
    Planted(
        "rows from the area",
        "return out.buffer ? __shfl_sync(full, first, r * k) :",
        "return false ? __shfl_sync(full, first, r * k) :",
        some_straight_bulk,
    ),
    Planted(
        "single copies only",
        "(out.buffer && (n == 0 || !first))",
        "out.buffer",
        some_straight_bulk,
    ),
    Planted(
        "own rows come twice",
        "record / l.max_tokens == l.me || (out",
        "(out",
        some_straight_bulk,
    ),
    Planted(
        "pieces of all warps in one",
        "memory + warp * PIECES * PIECE",
        "memory",
        some_bulk_routings,
    ),
    Planted(
        "a row to its beginning",
        "bulk_store((void*)(to + at), piece",
        "bulk_store((void*)to, piece",
        some_bulk_routings,
    ),
    Planted(
        "always the first piece",
        "tw_bulk_fetch(s, from(i) + at + PIECE,",
        "tw_bulk_fetch(s, from(i),",
        some_bulk_routings,
    ),
    Planted(
        "the same row again",
        "tw_bulk_fetch(s, from(__ffs(live) - 1), bytes);",
        "tw_bulk_fetch(s, from(i), bytes);",
        some_bulk_routings,
    ),
    Planted("to nobody", "if (to && row == i) bulk", "if (false) bulk", some_bulk_routings),
    Planted(
        "to places of other rows",
        "if (to && row == i) bulk",
        "if (to) bulk",
        some_bulk_routings,
    ),
    Planted(
        "own rows stay away",
        "mine = recv.x && p.rank == (int)l.me;",
        "mine = false;",
        some_bulk_routings,
    ),
    Planted(
        "own rows of all ranks",
        "mine = recv.x && p.rank == (int)l.me;",
        "mine = recv.x;",
        some_bulk_routings,
    ),
    Planted(
        "one row for all copies of an own token",
        "(recv.rank_major || !mine)",
        "(true || !mine)",
        some_bulk_routings,
    ),
    Planted(
        "rank-major rows of copies in a buffer",
        "recv.rank_major ? record : p.row",
        "p.row",
        some_straight_bulk,
    ),
    Planted(
        "rank-major rows of the first record",
        "record + (__ffs(none) - 1) / k, TwBulkZeros()",
        "record, TwBulkZeros()",
        some_bulk_routings,
    ),
    Planted(
        "rank-major rows that did not come",
        "__ballot_sync(full, out.rank_major && i < num && n == 0 && !valid)",
        "0",
        some_bulk_routings,
    ),
    Planted(
        "rank-major rows of the next chunk",
        "out.rank_major && i < num && n == 0 && !valid",
        "out.rank_major && n == 0 && !valid",
        some_bulk_routings,
    ),
    Planted(
        "rank-major padding",
        "if (!out.rank_major) tw_empty_row",
        "tw_empty_row",
        some_straight_bulk,
    ),
    Planted(
        "rank-major scales of every copy",
        "out.rank_major ? n != 0 :",
        "out.rank_major ? n == 0 :",
        some_bulk_routings,
    ),
    Planted(
        "tokens are not told apart",
        "(int)(token - t) << 6 | p.rank : -1",
        "p.rank : -1",
        some_bulk_routings,
    ),
    Planted(
        "the first of several tokens only",
        "for (; token < end; token += most)",
        "for (; token < end; token += end)",
        some_bulk_routings,
    ),
    Planted(
        "scales of another record",
        "tw_keep_scales(l, out, record + of / k,",
        "tw_keep_scales(l, out, record,",
        some_bulk_routings,
    ),
    Planted("a chunk for all warps", "taken[0] + warp;", "taken[0];", some_bulk_routings),
    Planted(
        "what came for all warps",
        "taken[1] + warp - SEND :",
        "taken[1] :",
        some_bulk_routings,
    ),
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
    Planted(
        "records of earlier launches",
        "valid = c.stamp == (u32)epoch",
        "valid = c.stamp != (u32)epoch - 1",
        some_bulk_routings,
    ),
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
        "PIECES * PIECE))[i] = 0",
        "PIECES * PIECE))[i] = 1",
        some_bulk_routings,
    ),
    Planted(
        "a load is not waited for",
        "s.used / PIECES & 1)",
        "~(s.used / PIECES) & 1)",
        some_bulk_routings,
    ),
    Planted(
        "a piece is stored before it has come",
        "while (!mbarrier_try_wait_parity(s.full + s.used % PIECES, s.used / PIECES & 1)) {\n    }",
        "",
        some_bulk_routings,
    ),
    Planted(
        "a piece is loaded while it is stored",
        "bulk_wait_group_read<PIECES - 1>();",
        "",
        some_bulk_routings,
    ),
    Planted(
        "the oldest piece is not waited for",
        "bulk_wait_group_read<PIECES - 1>();",
        "bulk_wait_group_read<PIECES>();",
        some_bulk_routings,
    ),
    Planted(
        "stores of a piece are no group",
        "bulk_commit_group();\n    bulk_wait_group_read<PIECES",
        "bulk_wait_group_read<PIECES",
        some_bulk_routings,
    ),
    Planted(
        "rows are told of before they are written",
        "bulk_wait_group<0>();\n        fence_proxy_async();\n        tw_send_flags",
        "fence_proxy_async();\n        tw_send_flags",
        some_bulk_routings,
    ),
    Planted(
        "rows are told of once they are read",
        "bulk_wait_group<0>();\n        fence_proxy_async();\n        tw_send_flags",
        "bulk_wait_group_read<0>();\n        fence_proxy_async();\n        tw_send_flags",
        some_bulk_routings,
    ),
    Planted(
        "rows are not behind the grant",
        "    fence_proxy_async();\n    for (u32 c",
        "    for (u32 c",
        some_bulk_routings,
    ),
    Planted(
        "loads are not behind the flag",
        "fence_proxy_async();\n        const u32 end",
        "const u32 end",
        some_bulk_routings,
    ),
    Planted(
        "zeros are not fenced",
        "fence_proxy_async();\n    griddepcontrol_wait",
        "griddepcontrol_wait",
        some_bulk_routings,
    ),
    Planted(
        "stores of zeros are no group",
        "bulk_commit_group();\n    }\n};",
        "}\n};",
        some_bulk_routings,
    ),
    Planted(
        "stores are left behind",
        "bulk_wait_group<0>();\n    fence_proxy_async();\n    tw_end",
        "fence_proxy_async();\n    tw_end",
        some_bulk_routings,
    ),
    Planted(
        "the end waits until stores are read",
        "bulk_wait_group<0>();\n    fence_proxy_async();\n    tw_end",
        "bulk_wait_group_read<0>();\n    fence_proxy_async();\n    tw_end",
        staying_away_bulk,
    ),
    Planted("rows are not spoiled", "if (tw_told(t)) tw_spoil(p);", "", staying_away_bulk),
];

fn mutants_of_bulk_dispatch_are_killed() {
    all_are_killed(&EP_BULK.emu_text(), load_bulk, BULK_MUTANTS);
}
