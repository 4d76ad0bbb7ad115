//! `ep/sm90_back.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::portable::EP_BACK;

use crate::ep::{load_back, some_bulk_returns};
use crate::ep_away::staying_away_back;
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![mutants_of_bulk_combine_are_killed];

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
        "WEIGHTED ? __fmul_rn(w, v.q[q].term(k))",
        "false ? __fmul_rn(w, v.q[q].term(k))",
        some_bulk_returns,
    ),
    Planted("always the first phase", "ring.phase ^= ring.use == 0;", "", some_bulk_returns),
    Planted("one part of a chunk", "i % parts * PART", "0", some_bulk_returns),
    Planted("sums begin with 0", "FIRST ? term", "false ? term", some_bulk_returns),
    Planted(
        "the first of several is passed on",
        "num == 1 && !WEIGHTED",
        "num != 0 && !WEIGHTED",
        some_bulk_returns,
    ),
    Planted(
        "the first is also the second",
        "for (u32 n = 1; n < num; n++)",
        "for (u32 n = 1; n < num; n++, n == 2 ? ring.use = 0 : 0)",
        some_bulk_returns,
    ),
    Planted(
        "a load is not waited for",
        "stage, ring.phase)",
        "stage, ring.phase ^ 1)",
        some_bulk_returns,
    ),
    Planted("loads are not counted", "ring.ask = tw_stage_after(ring.ask);", "", some_bulk_returns),
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
    Planted(
        "a slice is added before it has come",
        "while (!mbarrier_try_wait_parity(ring.full + stage, ring.phase)) {\n    }",
        "",
        some_bulk_returns,
    ),
    Planted("a sum over one that is stored", "bulk_wait_group_read<0>();", "", some_bulk_returns),
    Planted(
        "the sum before is not waited for",
        "bulk_wait_group_read<0>();",
        "bulk_wait_group_read<1>();",
        some_bulk_returns,
    ),
    Planted("sums are not fenced", "fence_proxy_async_shared_cta();", "", some_bulk_returns),
    Planted("sums are no group", "bulk_commit_group();", "", some_bulk_returns),
    Planted(
        "sums are told of before they are written",
        "bulk_wait_group<0>();\n        fence_proxy_async();\n        fence_acq",
        "fence_proxy_async();\n        fence_acq",
        some_bulk_returns,
    ),
    Planted(
        "sums are told of once they are read",
        "bulk_wait_group<0>();\n        fence_proxy_async();\n        fence_acq",
        "bulk_wait_group_read<0>();\n        fence_proxy_async();\n        fence_acq",
        some_bulk_returns,
    ),
    Planted(
        "sums are not behind the grant",
        "    fence_proxy_async();\n    const TwRows rows = {(u64)b.y",
        "    const TwRows rows = {(u64)b.y",
        some_bulk_returns,
    ),
    Planted(
        "loads are not behind the flags",
        "fence_proxy_async();\n        const u64 to",
        "const u64 to",
        some_bulk_returns,
    ),
    Planted(
        "stores are left behind",
        "bulk_wait_group<0>();\n    fence_proxy_async();\n    tw_end",
        "fence_proxy_async();\n    tw_end",
        some_bulk_returns,
    ),
    Planted("results are not spoiled", "if (tw_told(t)) tw_spoil(p);", "", staying_away_back),
];

fn mutants_of_bulk_combine_are_killed() {
    all_are_killed(&EP_BACK.emu_text(), load_back, BACK_MUTANTS);
}
