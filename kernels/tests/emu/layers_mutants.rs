//! Broken texts of `layers/sm80_layers.cu`.

use tilewire_kernels::portable::LAYERS;

use crate::host::Lib;
use crate::layers::{all_layers, few_chunks, load, poisoned_losses};
use crate::planted::{Planted, all_are_killed};

fn planted_layers(lib: &'static Lib) {
    all_layers(lib, 1);
}

const OF_LAYERS: &[Planted] = &[
    Planted(
        "a token's row too few",
        "for (; i < num; i++)",
        "for (; i + 1 < num; i++)",
        planted_layers,
    ),
    Planted("rows of a batch", "i + AHEAD <= num", "i + AHEAD <= num + 7", planted_layers),
    Planted(
        "one list of a chunk",
        "for (; from < stop; from += LIST)",
        "for (; from < stop; from = stop)",
        planted_layers,
    ),
    Planted(
        "chunks of one size",
        "TW_LAYERS_CHUNK * max(tw_ceil(rows, TW_LAYERS_CHUNK * TW_LAYERS_CHUNKS), 1u)",
        "TW_LAYERS_CHUNK",
        few_chunks,
    ),
    Planted("rows of earlier warps are not counted", "next += num;", "", planted_layers),
    Planted(
        "rows of earlier blocks are not counted",
        "(u32)start + before[v]",
        "(u32)start",
        planted_layers,
    ),
    Planted(
        "tokens of one round have one place",
        "__popc(same & ((1u << lane) - 1))",
        "0",
        planted_layers,
    ),
    Planted(
        "tokens of two rounds have one place",
        "if (lane == (u32)__ffs(same) - 1) at[warp][token] += __popc(same);",
        "",
        planted_layers,
    ),
    Planted(
        "tokens without rows have no chunk",
        "(u64)max(tw_ceil(all, tw_chunk(all)), 1u) << 32",
        "(u64)tw_ceil(all, tw_chunk(all)) << 32",
        planted_layers,
    ),
    Planted("tokens of the last block", "(v >= by ? upto[from][v - by] : 0)", "0", planted_layers),
    Planted("a chunk is all", "if (chunks == 1) {", "if (true) {", planted_layers),
    Planted(
        "chunks of other columns come last",
        "a.tickets + value * parts + part, chunks",
        "a.tickets + value, chunks",
        planted_layers,
    ),
    Planted("the chunks of another token", "return first + i; }", "return i; }", planted_layers),
    Planted(
        "a block that is no number is not told",
        "atomicOr(&a.sums[i], TW_NO_NUMBER);",
        ";",
        planted_layers,
    ),
    Planted("a ticket is taken once", "if (last) *ticket = 0;", "", planted_layers),
    Planted(
        "the first comes last",
        "atomicAdd(ticket, 1u) == num - 1",
        "atomicAdd(ticket, 1u) == 0",
        planted_layers,
    ),
    Planted(
        "columns of the first block",
        "part * THREADS + threadIdx.x",
        "threadIdx.x",
        planted_layers,
    ),
    Planted(
        "a quad of another lane",
        "4 * (LANES * (i / 4) + threadIdx.x % LANES)",
        "4 * (LANES * (i / 4) + threadIdx.x % 4)",
        planted_layers,
    ),
    Planted(
        "rows that are no quads",
        "cols % 4 == 0 && tw_aligned(x, 4 * sizeof(E))",
        "true",
        planted_layers,
    ),
    Planted(
        "the largest of a lane",
        "by = LANES / 2; by > 0; by /= 2) most",
        "by = 0; by > 0; by /= 2) most",
        planted_layers,
    ),
    Planted(
        "rows beyond the end are chosen",
        "if (lane == 0 && mine) atomicAdd",
        "if (lane == 0) atomicAdd",
        planted_layers,
    ),
    Planted("rows beyond the end are summed", "if (!mine) inv = 0;", "", planted_layers),
    Planted(
        "one group's probabilities",
        "tw_lanes_sum<LANES, 32>(sum[i])",
        "sum[i]",
        planted_layers,
    ),
    Planted(
        "one block's stats",
        "u64 all = atomicAdd(&a.sums[i], add) + add;",
        "u64 all = gridDim.x * TW_ADDED + add % TW_ADDED;",
        planted_layers,
    ),
    Planted("stats of the launch before, too", "a.sums[i] = 0;", "", planted_layers),
    Planted(
        "the same rows again",
        "if (first + step < a.n) read(first + step);\n        // A row",
        "// A row",
        planted_layers,
    ),
    Planted(
        "the same rows' gradients again",
        "if (first + step < a.n) read(first + step);\n        // The first choice",
        "// The first choice",
        planted_layers,
    ),
    Planted(
        "the same rows' losses again",
        "if (first + step < a.n) read(first + step);\n        TwSoftmax s",
        "TwSoftmax s",
        planted_layers,
    ),
    Planted(
        "choices of full lanes are lost",
        "if (j % LANES == LANES - 1 && j + 1 < a.k && mine)",
        "if (false)",
        planted_layers,
    ),
    Planted(
        "weights of full lanes are not scaled",
        "for (u32 j = lane; j < full; j += LANES) weights[j] /= sum;",
        "",
        planted_layers,
    ),
    Planted(
        "no number is chosen",
        "if (!(best >= 0)) expert = j, best = TW_NAN;",
        "",
        planted_layers,
    ),
    Planted(
        "choices behind the first are not read",
        "return j0 == 0 ? choice : with_prob(tw_choice(a, row, j0 + lane));",
        "return choice;",
        planted_layers,
    ),
    Planted(
        "weights are gradients where there are none",
        "const u32 k = a.d_weights ? a.k : 0;",
        "const u32 k = a.k;",
        planted_layers,
    ),
    Planted("the sum is not stored", "((float4*)(a.sum + at))[i] = v;", "", planted_layers),
    Planted(
        "the norm of x alone",
        "keep[i] = v;",
        "keep[i] = ((const float4*)(a.x + at))[i];",
        planted_layers,
    ),
    Planted(
        "the gradient past the norm is lost",
        "if (a.residual) o =",
        "if (false) o =",
        planted_layers,
    ),
    Planted(
        "a block's first row only",
        "row += gridDim.x) {\n        u64 at",
        "row += a.n) {\n        u64 at",
        planted_layers,
    ),
    Planted(
        "sums of another row's columns",
        "partial[r * cols + c]",
        "partial[r * cols + lane]",
        planted_layers,
    ),
    Planted(
        "warps are not added",
        "for (u32 w = 1; w < WARPS; w++) sum += sums[w][lane];",
        "",
        planted_layers,
    ),
    Planted(
        "joining turns again",
        "float t = a.join ? -s[n] : s[n], first",
        "float t = s[n], first",
        planted_layers,
    ),
    Planted(
        "keys lie among queries",
        "(row * a.kv_heads + h - a.heads)",
        "(row * a.kv_heads + h - a.heads + 1)",
        planted_layers,
    ),
    Planted(
        "values are not copied",
        "u32 values = a.kv_heads * a.dim / 8;",
        "u32 values = 0;",
        planted_layers,
    ),
    Planted(
        "ties go to the higher",
        "(q == best && e < expert)",
        "(q == best && e > expert)",
        planted_layers,
    ),
    Planted("an expert is chosen again", "if (i == at) p[i] = -1;", ";", planted_layers),
    Planted(
        "ties of a lane go to the higher",
        "odd = p[q + 1] > p[q],",
        "odd = p[q + 1] >= p[q],",
        planted_layers,
    ),
    Planted("weights are not scaled", "weight / sum;", "weight;", planted_layers),
    Planted(
        "one warp's probabilities",
        "for (u32 w = 0; w < WARPS; w++) all += sums[w * a.experts + i - a.experts];",
        "all = sums[i - a.experts];",
        planted_layers,
    ),
    Planted(
        "choices are not counted",
        "atomicAdd(&chosen[expert], 1u);",
        "atomicAdd(&chosen[expert], 0u);",
        planted_layers,
    ),
    Planted("the load does not matter", "a.load[e] * a.scale :", "0.0f :", planted_layers),
    Planted(
        "the mean is not taken off",
        "(c.d_weight - mean) / sum",
        "c.d_weight / sum",
        planted_layers,
    ),
    Planted(
        "the softmax is not differentiated",
        "p[q] *= e.x - dot,",
        "p[q] *= e.x,",
        planted_layers,
    ),
    Planted("rows that do not count", "target < 0 ? 0 : fmaf", "fmaf", planted_layers),
    Planted(
        "rows that do not count are no numbers",
        "target < 0 ? 0 : fmaf(v[i], by, i == at ? -scale : 0.0f)",
        "fmaf(v[i], target < 0 ? 0.0f : by, i == at ? -scale : 0.0f)",
        poisoned_losses,
    ),
    Planted("the target's own gradient", "i == at ? -scale : 0.0f", "0.0f", planted_layers),
    Planted("one row's loss of many", "sum -= logf(", "sum = -logf(", planted_layers),
    Planted(
        "the target's logit alone",
        "expf(logit - s.most) * s.inv",
        "expf(logit - s.most)",
        planted_layers,
    ),
    Planted(
        "a target that is no class",
        "(u32)target < a.cols ? a.logits[(u64)row * a.cols + target] : TW_NAN",
        "a.logits[(u64)row * a.cols + (u32)target % a.cols]",
        poisoned_losses,
    ),
    Planted("one group's losses", "tw_lanes_sum<LANES, 32>(v);", "v;", planted_layers),
    Planted(
        "one warp's losses",
        "for (u32 w = 0; w < WARPS; w++) v += sums[w];",
        "v = sums[0];",
        planted_layers,
    ),
    Planted(
        "one block's losses",
        "for (u32 b = threadIdx.x; b < gridDim.x; b += THREADS)",
        "for (u32 b = threadIdx.x; b < 1; b += THREADS)",
        planted_layers,
    ),
    Planted(
        "a NaN is the least of probabilities",
        "p < 1.17549435e-38f ? 1.17549435e-38f : p",
        "fmaxf(p, 1.17549435e-38f)",
        poisoned_losses,
    ),
];

fn broken_layers(text: String) -> &'static Lib {
    load(&LAYERS, text, 1)
}

pub fn mutants_of_layers_are_killed() {
    all_are_killed(&LAYERS.emu_text(), broken_layers, OF_LAYERS);
}
