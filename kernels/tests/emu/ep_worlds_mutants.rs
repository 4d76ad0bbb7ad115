//! Kernels of expert parallelism, broken on purpose where only other worlds, layouts and gradients show it.

use tilewire_kernels::portable::{EP, EP_BACK};

use crate::ep_worlds::{ROOM, flat_rows, of_nine_ranks, some_gradients, some_gradients_by_bulk};
use crate::host::Lib;
use crate::planted::{Planted, all_are_killed};
use crate::{Test, ep, tests};

pub const TESTS: &[Test] = tests![mutants_of_gradients_are_killed];

const PLAIN: &[Planted] = &[
    Planted(
        "flat rows begin anew",
        "        row += all;\n        if (r < records)",
        "        if (r < records)",
        flat_rows,
    ),
    Planted(
        "flat rows of records that did not come",
        "h.place[r] = there ? (int)at : -1;",
        "h.place[r] = (int)at;",
        some_gradients,
    ),
    Planted("flat rows without sources", "if (there) row_source[at] = (int)r;", "", some_gradients),
    Planted(
        "flat rows of the next record",
        "row_source[at] = (int)r;",
        "row_source[at] = (int)r + 1;",
        some_gradients,
    ),
    Planted(
        "indices of expert-major rows",
        "place ? place[record] : (int)row",
        "(int)row",
        some_gradients,
    ),
    Planted(
        "rows behind the last are left",
        "((u8*)to)[i] = 0;\n    } else {\n        tw_copy_one",
        ";\n    } else {\n        tw_copy_one",
        some_gradients,
    ),
    Planted("scales behind the last", "record < 0 ? 0.0f : from[i];", "from[i];", some_gradients),
    Planted(
        "gradients without weights",
        "v[j] = weights ? __fmul_rn(w, g.at(j)) : g.at(j);",
        "v[j] = g.at(j);",
        some_gradients,
    ),
    Planted(
        "gradients of padding",
        "const int record = h.source[row];\n    const u64 from = l.tokens + tw_step(l, l.me) + (record < 0 ? 0 : record)",
        "const int record = max(h.source[row], 0);\n    const u64 from = l.tokens + tw_step(l, l.me) + (record < 0 ? 0 : record)",
        some_gradients,
    ),
    Planted(
        "weights behind the last row",
        "if (weights && threadIdx.x == 0) d_weights[row] = 0.0f;",
        "",
        some_gradients,
    ),
    Planted(
        "products of one warp",
        "for (u32 w = 0; w < WARPS; w++) all",
        "for (u32 w = 0; w < 1; w++) all",
        some_gradients,
    ),
    Planted(
        "products of some lanes",
        "for (int by = 16; by > 0; by /= 2) dot =",
        "for (int by = 8; by > 0; by /= 2) dot =",
        some_gradients,
    ),
    Planted(
        "the gradient of the first copy",
        "grads[n] = b.dw[copies[n].row];",
        "grads[n] = b.dw[copies[0].row];",
        some_gradients,
    ),
    Planted(
        "dropped choices have a place",
        "n += ranks[e] == ranks[i] && rows[e] >= 0;",
        "n += ranks[e] == ranks[i];",
        some_gradients,
    ),
    Planted(
        "gradients of what was not sent",
        "= sent ? ((const float*)(back + l.back_stride) - k)[n] : 0.0f;",
        "= ((const float*)(back + l.back_stride) - k)[n];",
        some_gradients,
    ),
    Planted(
        "rows of records are copies",
        "b.expert_major ? copies[c].row : h.place[record]",
        "copies[c].row",
        some_gradients,
    ),
    Planted(
        "all rows of a record's copies",
        "rows = b.expert_major ? num : 1;",
        "rows = num;",
        some_gradients,
    ),
    Planted(
        "narrow indices are wide",
        "a.wide ? ((const i64*)a.idx)[i] : ((const int*)a.idx)[i]",
        "((const i64*)a.idx)[i]",
        some_gradients,
    ),
    Planted(
        "counts of eight ranks",
        "r0 < l.size; r0 += 8",
        "r0 < min(l.size, 8u); r0 += 8",
        of_nine_ranks,
    ),
    Planted(
        "earlier ones of eight",
        "earlier += r < l.me ? (u32)",
        "earlier += i < l.me ? (u32)",
        of_nine_ranks,
    ),
    Planted(
        "a mask of eight ranks",
        "mask |= rows[i] >= 0 ? 1ull << ranks[i] : 0;",
        "mask |= rows[i] >= 0 ? 1ull << (ranks[i] & 7) : 0;",
        of_nine_ranks,
    ),
];

const BULK: &[Planted] = &[
    Planted(
        "the gradient of the first copy",
        "grads[n] = b.dw[copies[n].row];",
        "grads[n] = b.dw[copies[0].row];",
        some_gradients_by_bulk,
    ),
    Planted(
        "gradients of the first record",
        "const TwCopy* copies = h.copies + (first + j) * l.top_k;",
        "const TwCopy* copies = h.copies + first * l.top_k;",
        some_gradients_by_bulk,
    ),
    Planted(
        "dropped choices have a place",
        "n += ranks[e] == ranks[i] && rows[e] >= 0;",
        "n += ranks[e] == ranks[i];",
        some_gradients_by_bulk,
    ),
    Planted(
        "gradients of what was not sent",
        "= sent ? ((const float*)(back + l.back_stride) - k)[n] : 0.0f;",
        "= ((const float*)(back + l.back_stride) - k)[n];",
        some_gradients_by_bulk,
    ),
    Planted(
        "all rows of a record's copies",
        "(b.expert_major ? num[j] : min(num[j], 1u))",
        "num[j]",
        some_gradients_by_bulk,
    ),
    Planted(
        "the place of another record",
        "b.expert_major ? 0 : h.place[first + j]",
        "b.expert_major ? 0 : h.place[first]",
        some_gradients_by_bulk,
    ),
];

fn plain(text: String) -> &'static Lib {
    ep::unit(&EP, text, ROOM)
}

fn back(text: String) -> &'static Lib {
    ep::unit(&EP_BACK, text, ROOM)
}

fn mutants_of_gradients_are_killed() {
    all_are_killed(&EP.emu_text(), plain, PLAIN);
    all_are_killed(&EP_BACK.emu_text(), back, BULK);
}
