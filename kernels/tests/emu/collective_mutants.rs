//! Mutants of `collective/sm90_collective.cu`: each is killed by what `collective.rs` checks.

use tilewire_kernels::portable::COLLECTIVE;

use crate::collective::{in_f32, load, one_ahead, staying_away, told_early};
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![mutants_of_collectives_are_killed];

fn mutants_of_collectives_are_killed() {
    all_are_killed(&COLLECTIVE.emu_text(), load, MUTANTS);
}

const MUTANTS: &[Planted] = &[
    Planted("pieces of all warps in one", "memory + warp * PIECES * PIECE", "memory", in_f32),
    Planted("rings of all warps in one", "PIECE + warp * STAGES * CHUNK", "PIECE", in_f32),
    Planted(
        "chunks of a ring in one",
        "ring.at + stage * CHUNK, (const",
        "ring.at, (const",
        in_f32,
    ),
    Planted(
        "flags of all ranks in one",
        "(u64)(phase * t.size + writer) * c.pieces + n",
        "(u64)(phase * t.size) * c.pieces + n",
        in_f32,
    ),
    Planted(
        "flags of both phases in one",
        "(u64)(phase * t.size + writer) * c.pieces + n",
        "(u64)writer * c.pieces + n",
        in_f32,
    ),
    Planted("one flag for all pieces", "* c.pieces + n;", "* c.pieces;", in_f32),
    Planted(
        "launches are not granted",
        "if (!tw_all_reached(t, c.slot, epoch - 1, credit)) return;",
        "",
        in_f32,
    ),
    Planted("an earlier grant is enough", "epoch - 1, credit", "epoch - 2, credit", one_ahead),
    Planted(
        "pieces of earlier launches are enough",
        "tw_all_reached(t, c.slot + 1, epoch,",
        "tw_all_reached(t, c.slot + 1, 1,",
        in_f32,
    ),
    Planted(
        "what is taken in came before",
        "c.slot + 1, r, 0, 0, epoch,",
        "c.slot + 1, r, 0, 0, 1,",
        in_f32,
    ),
    Planted("sums do not wait", "if (!tw_all_came(t, c, epoch, at / c.piece)) break;", "", in_f32),
    Planted(
        "sums wait for another piece",
        "tw_all_came(t, c, epoch, at / c.piece)",
        "tw_all_came(t, c, epoch, 0)",
        in_f32,
    ),
    Planted(
        "a chunk is loaded twice",
        "(c.send[cut.r].src + cut.at)",
        "(c.send[cut.r].src + cut.at / c.piece * c.piece)",
        in_f32,
    ),
    Planted("a chunk to the beginning", "c.send[r].dst + k.at", "c.send[r].dst", in_f32),
    Planted("of all ranks the first part", "(c.send[cut.r].src +", "(c.send[0].src +", in_f32),
    Planted("a load is not waited for", "stored / STAGES & 1", "~(stored / STAGES) & 1", in_f32),
    Planted(
        "pieces beyond the end",
        "min(cut.at + c.piece, c.send",
        "max(cut.at + c.piece, c.send",
        in_f32,
    ),
    Planted(
        "a piece is told of by its first chunk",
        "if (!k.last) continue;",
        "if (k.at % c.piece != 0) continue;",
        told_early,
    ),
    Planted(
        "the last pieces are not told of",
        "tw_tell_chunks(t, c, epoch, ring, told, stored);",
        "",
        in_f32,
    ),
    Planted(
        "one rank is not told",
        "j < (c.same ? t.size : 1); j++) {\n            const u32 r = (t.me + 1 + (c.same ? j : k.item % fan)) % t.size;\n            if",
        "j < (c.same ? 2 : 1); j++) {\n            const u32 r = (t.me + 1 + (c.same ? j : k.item % fan)) % t.size;\n            if",
        in_f32,
    ),
    Planted(
        "unaligned parts are left",
        "tw_lay(part.src + cut.at, cut.end - cut.at, to, 0, 1);",
        "",
        in_f32,
    ),
    Planted(
        "nobody is told of unaligned parts",
        "tw_tell(t, c, epoch, 0, lane < (c.same ? t.size : 1), r, i / fan);",
        "",
        in_f32,
    ),
    Planted(
        "unaligned parts are taken for whole",
        "(mine.src | mine.dst | mine.len) % 16 == 0",
        "mine.len % 16 == 0",
        in_f32,
    ),
    Planted("what came unaligned is left", "tw_lay(from, len, places, 0, 1);", "", in_f32),
    Planted("what came is all of one copy", "from + at + PIECE,", "from,", in_f32),
    Planted("copies to the beginning", "(void*)(to + at), piece", "(void*)to, piece", in_f32),
    Planted(
        "nobody is told of sums",
        "if (c.takes > 0) tw_tell(t, c, epoch, 1, lane < t.size, r, i);",
        "",
        in_f32,
    ),
    Planted("slots lie at one place", "a.slots + r * a.stride", "a.slots", in_f32),
    Planted("no part of one's own", "r == t.me ? a.own : a.slots", "a.slots", in_f32),
    Planted(
        "sums in another order",
        "tw_part(t, a, min(r0 + k, t.size - 1))",
        "tw_part(t, a, t.size - 1 - min(r0 + k, t.size - 1))",
        in_f32,
    ),
    Planted(
        "unaligned sums in another order",
        "tw_part(t, a, r) + at, n, num",
        "tw_part(t, a, t.size - 1 - r) + at, n, num",
        in_f32,
    ),
    Planted("the last rank again and again", "if (r0 + k < t.size) {", "if (true) {", in_f32),
    Planted("the first part is added to 0", "q.term(3), r0 + k == 0)", "q.term(3), false)", in_f32),
    Planted("sums of whole groups only", "if (i / 32 * 32 < units)", "if (false)", in_f32),
    Planted("sums without scale", "sum[d][w][j] = __fmul_rn(sum[d][w][j], a.scale);", ";", in_f32),
    Planted("unaligned sums without scale", "sum[j] = __fmul_rn(sum[j], a.scale);", ";", in_f32),
    Planted("sums to the beginning", "(void*)(to + at), s.piece", "(void*)to, s.piece", in_f32),
    Planted(
        "a launch of another way is not counted",
        "    __syncthreads();\n    tw_grant(t, c, epoch);\n}",
        "    __syncthreads();\n}",
        in_f32,
    ),
    Planted("the launch is not counted", "if (threadIdx.x == 0) *c.epoch = epoch;", "", in_f32),
    Planted(
        "what was taken stays",
        "if (threadIdx.x < 3) c.ticket",
        "if (threadIdx.x < 2) c.ticket",
        in_f32,
    ),
    Planted("the ticket stays", "if (last) *ticket = 0;", "", in_f32),
    Planted(
        "what is taken in is read too early",
        "while (!mbarrier_try_wait_parity(s.full + s.used % PIECES, s.used / PIECES & 1)) {\n    }",
        "",
        in_f32,
    ),
    Planted(
        "a piece is loaded while it is stored",
        "bulk_wait_group_read<PIECES - 1>();",
        "",
        in_f32,
    ),
    Planted(
        "the latest piece is not waited for",
        "bulk_wait_group_read<PIECES - 1>();",
        "bulk_wait_group_read<PIECES>();",
        in_f32,
    ),
    Planted(
        "stores of a piece are no group",
        "bulk_commit_group();\n    bulk_wait_group_read<PIECES",
        "bulk_wait_group_read<PIECES",
        in_f32,
    ),
    Planted(
        "a chunk is stored before it has come",
        "while (!mbarrier_try_wait_parity(ring.full + stage, stored / STAGES & 1)) {\n        }",
        "",
        in_f32,
    ),
    Planted("pieces are told of before they are written", "bulk_wait_group<LEAD>();", "", in_f32),
    Planted(
        "pieces are told of once they are read",
        "bulk_wait_group<LEAD>();",
        "bulk_wait_group_read<LEAD>();",
        in_f32,
    ),
    Planted(
        "pieces are told of a chunk early",
        "bulk_wait_group<LEAD>();",
        "bulk_wait_group<LEAD + 1>();",
        in_f32,
    ),
    Planted(
        "the last pieces are told of before",
        "    bulk_wait_group<0>();\n    tw_tell_chunks",
        "    tw_tell_chunks",
        in_f32,
    ),
    Planted(
        "the last pieces are told of when read",
        "    bulk_wait_group<0>();\n    tw_tell_chunks",
        "    bulk_wait_group_read<0>();\n    tw_tell_chunks",
        in_f32,
    ),
    Planted(
        "the last chunk is not waited for",
        "    bulk_wait_group<0>();\n    tw_tell_chunks",
        "    bulk_wait_group<1>();\n    tw_tell_chunks",
        in_f32,
    ),
    Planted(
        "stores of a chunk are no group",
        "bulk_commit_group();\n        // All but",
        "// All but",
        in_f32,
    ),
    Planted(
        "sums are told of before they are written",
        "    bulk_wait_group<0>();\n    fence_proxy_async();\n    __syncwarp();",
        "    fence_proxy_async();\n    __syncwarp();",
        in_f32,
    ),
    Planted(
        "sums are told of once they are read",
        "    bulk_wait_group<0>();\n    fence_proxy_async();\n    __syncwarp();",
        "    bulk_wait_group_read<0>();\n    fence_proxy_async();\n    __syncwarp();",
        in_f32,
    ),
    Planted(
        "a sum over one that is stored",
        "bulk_wait_group_read<0>();\n            __syncwarp();",
        "__syncwarp();",
        in_f32,
    ),
    Planted("sums are no group", "bulk_commit_group();\n        } else", "} else", in_f32),
    Planted(
        "sums are not fenced",
        "fence_proxy_async();\n            __syncwarp();\n            if (to)",
        "__syncwarp();\n            if (to)",
        in_f32,
    ),
    Planted(
        "sums are fenced, but not behind the flags",
        "fence_proxy_async();\n            __syncwarp();\n            if (to)",
        "fence_proxy_async_shared_cta();\n            __syncwarp();\n            if (to)",
        in_f32,
    ),
    Planted(
        "stores are left behind",
        "bulk_wait_group<0>();\n    fence_proxy_async();\n    if (!tw_comes_last",
        "fence_proxy_async();\n    if (!tw_comes_last",
        staying_away,
    ),
    Planted(
        "chunks are not behind the grant",
        "    fence_proxy_async();\n    const TwPart mine",
        "    const TwPart mine",
        in_f32,
    ),
    Planted(
        "loads are not behind the flag",
        "fence_proxy_async();\n        tw_copy",
        "tw_copy",
        in_f32,
    ),
    Planted(
        "the end waits until stores are read",
        "bulk_wait_group<0>();\n    fence_proxy_async();\n    if (!tw_comes_last",
        "bulk_wait_group_read<0>();\n    fence_proxy_async();\n    if (!tw_comes_last",
        staying_away,
    ),
    Planted("results are not spoiled", "if (tw_told(t)) tw_spoil(out);", "", staying_away),
    Planted(
        "those who wait are taken for missing",
        "if (phase && !tw_all_came(t, c, epoch, 0)) return;",
        "",
        staying_away,
    ),
];
