//! Kernels that any GPU from sm_80 on runs: quantisation, permutation and sums of parts, and the
//! variants of each.
//!
//! An element type is passed to them as its number of mantissa bits: 23 f32, 10 f16, 7 bf16, 3
//! e4m3, 2 e5m2.

use crate::Source;

/// Mantissa bits of the types that are quantised and permuted: f32, f16, bf16.
pub const WIDE_MANTISSAS: [u64; 3] = [23, 10, 7];
/// Mantissa bits of the FP8 types: e4m3, e5m2.
pub const FP8_MANTISSAS: [u64; 2] = [3, 2];

/// Threads of a block of every kernel of [`QUANT`].
pub const QUANT_THREADS: u64 = 256;
/// Rows and columns that a block of `tw_quant_*` takes.
pub const QUANT_TILE: u64 = 128;

/// Largest magnitudes, scales and codes, and back.
pub const QUANT: Source = Source {
    name: "quant/sm80_quant.cu",
    defines: &["TW_SRC_MANTISSA", "TW_DST_MANTISSA", "TW_QUANT_THREADS", "TW_QUANT_TILE"],
    kernels: &[
        "tw_quant_tensor",
        "tw_quant_1x128",
        "tw_quant_128x128",
        "tw_quant_mx",
        "tw_amax",
        "tw_scale",
        "tw_scale_delayed",
        "tw_dequant",
    ],
};

/// [`QUANT`]'s definitions for elements with `src` mantissa bits to FP8 with `dst`.
pub fn quant_defines(src: u64, dst: u64) -> Vec<(String, u64)> {
    with(QUANT.defines, &[src, dst, QUANT_THREADS, QUANT_TILE])
}

/// Threads of a block of every kernel of [`PERMUTE`].
pub const PERMUTE_THREADS: u64 = 256;
/// Choices that a block of `tw_route_count` and `tw_route_place` takes.
pub const PERMUTE_CHUNK: u64 = 2048;
/// Status of a map after an index that is no expert; 0 is good.
pub const PERMUTE_BAD_INDEX: u64 = 1;

/// Routing, permute, unpermute and their gradients.
pub const PERMUTE: Source = Source {
    name: "permute/sm80_permute.cu",
    defines: &["TW_SRC_MANTISSA", "TW_PERMUTE_THREADS", "TW_PERMUTE_CHUNK", "TW_PERMUTE_BAD_INDEX"],
    kernels: &[
        "tw_route_count",
        "tw_route_scan",
        "tw_route_place",
        "tw_permute",
        "tw_permute_words",
        "tw_unpermute",
        "tw_unpermute_bwd",
        "tw_unpermute_bwd_weights",
    ],
};

/// [`PERMUTE`]'s definitions for rows of elements with `src` mantissa bits.
pub fn permute_defines(src: u64) -> Vec<(String, u64)> {
    with(PERMUTE.defines, &[src, PERMUTE_THREADS, PERMUTE_CHUNK, PERMUTE_BAD_INDEX])
}

/// Threads of a block of [`MOVE`].
pub const MOVE_THREADS: u64 = 512;
/// The most segments of a launch of [`MOVE`].
pub const MOVE_SEGMENTS: usize = 64;

/// Pieces of memory from here to there, on other devices too.
pub const MOVE: Source = Source {
    name: "collective/sm80_move.cu",
    defines: &["TW_MOVE_THREADS"],
    kernels: &["tw_move"],
};

/// [`MOVE`]'s definitions.
pub fn move_defines() -> Vec<(String, u64)> {
    with(MOVE.defines, &[MOVE_THREADS])
}

/// Threads of a block of the kernels of [`EP`] that stay on one rank.
pub const EP_THREADS: u64 = 256;
/// Threads of a block of those that meet other ranks.
pub const EP_MOVERS: u64 = 1024;
/// Warps of a block that send rows by bulk copies, and that lay out what arrives.
pub const EP_BULK_PUSH: u64 = 6;
/// The latter.
pub const EP_BULK_LAY: u64 = 9;
/// Most bytes of a bulk copy: a row of 7168 in bf16.
pub const EP_BULK_PIECE: u64 = 14336;
/// Copies that each of those warps has shared memory for. Two of half the size were 3 to 6 %
/// slower.
pub const EP_BULK_PIECES: u64 = 1;
/// Bytes of shared memory that are 0.
pub const EP_BULK_ZERO: u64 = 14336;

/// Expert parallelism: routing, dispatch, combine and their gradients.
pub const EP: Source = Source {
    name: "ep/sm80_ep.cu",
    defines: &["TW_OUT_MANTISSA", "TW_EP_THREADS", "TW_EP_MOVERS"],
    kernels: &[
        "tw_ep_route",
        "tw_ep_push",
        "tw_ep_leave",
        "tw_ep_flat",
        "tw_ep_row_index",
        "tw_ep_gather",
        "tw_ep_return",
        "tw_ep_gather_bwd",
    ],
};

/// A definition more of [`EP`], [`EP_BULK`] and [`EP_RETURN`], where the ranks' memory is not in
/// even steps.
pub const EP_UNEVEN: &str = "TW_EP_UNEVEN";

/// [`EP`]'s definitions for results with `out` mantissa bits.
pub fn ep_defines(out: u64) -> Vec<(String, u64)> {
    with(EP.defines, &[out, EP_THREADS, EP_MOVERS])
}

/// Dispatch by bulk copies.
pub const EP_BULK: Source = Source {
    name: "ep/sm90_ep.cu",
    defines: &[
        "TW_OUT_MANTISSA",
        "TW_EP_THREADS",
        "TW_EP_MOVERS",
        "TW_EP_BULK_PUSH",
        "TW_EP_BULK_LAY",
        "TW_EP_BULK_PIECE",
        "TW_EP_BULK_PIECES",
        "TW_EP_BULK_ZERO",
    ],
    kernels: &["tw_ep_push_bulk"],
};

/// [`EP_BULK`]'s definitions. It moves bytes: the type of results is any.
pub fn ep_bulk_defines() -> Vec<(String, u64)> {
    let own = [EP_BULK_PUSH, EP_BULK_LAY, EP_BULK_PIECE, EP_BULK_PIECES, EP_BULK_ZERO];
    with(EP_BULK.defines, &[&[7, EP_THREADS, EP_MOVERS][..], &own].concat())
}

/// Warps of a block that return sums of copies.
pub const EP_RETURN_PUSH: u64 = 11;
/// Those that add what arrives back.
pub const EP_RETURN_SUM: u64 = 3;
/// Bytes of a bulk load of the combine.
pub const EP_RETURN_SLICE: u64 = 3584;
/// Loads that a warp has on their way; it has shared memory for one more.
pub const EP_RETURN_STAGES: u64 = 3;
/// The most tokens of a chunk that a combine by bulk loads takes.
pub const EP_RETURN_TOKENS: u64 = 8;
/// The most copies of a token, and ranks.
pub const EP_RETURN_ENTRIES: u64 = 16;

/// Combine by bulk loads.
pub const EP_RETURN: Source = Source {
    name: "ep/sm90_return.cu",
    defines: &[
        "TW_OUT_MANTISSA",
        "TW_EP_THREADS",
        "TW_EP_MOVERS",
        "TW_EP_RETURN_PUSH",
        "TW_EP_RETURN_SUM",
        "TW_EP_RETURN_SLICE",
        "TW_EP_RETURN_STAGES",
        "TW_EP_RETURN_TOKENS",
        "TW_EP_RETURN_ENTRIES",
    ],
    kernels: &["tw_ep_return_bulk"],
};

/// [`EP_RETURN`]'s definitions for results with `out` mantissa bits.
pub fn ep_return_defines(out: u64) -> Vec<(String, u64)> {
    let own = [
        EP_RETURN_PUSH,
        EP_RETURN_SUM,
        EP_RETURN_SLICE,
        EP_RETURN_STAGES,
        EP_RETURN_TOKENS,
        EP_RETURN_ENTRIES,
    ];
    with(EP_RETURN.defines, &[&[out, EP_THREADS, EP_MOVERS][..], &own].concat())
}

/// Threads of a block of [`REDUCE`].
pub const REDUCE_THREADS: u64 = 256;

/// Sums of parts that peers have pushed, in the order of the ranks.
pub const REDUCE: Source = Source {
    name: "collective/sm80_reduce.cu",
    defines: &["TW_WIRE_MANTISSA", "TW_OWN_MANTISSA", "TW_OUT_MANTISSA", "TW_REDUCE_THREADS"],
    kernels: &["tw_reduce"],
};

/// Mantissa bits of (slots, own part, output) that [`REDUCE`] is used with: all of one type, or a
/// part of one's own that was not rounded.
pub const REDUCE_MANTISSAS: [[u64; 3]; 9] = [
    [23, 23, 23],
    [10, 10, 10],
    [7, 7, 7],
    [10, 23, 10],
    [7, 23, 7],
    [10, 23, 23],
    [7, 23, 23],
    [23, 23, 10],
    [23, 23, 7],
];

/// [`REDUCE`]'s definitions for these types.
pub fn reduce_defines([wire, own, out]: [u64; 3]) -> Vec<(String, u64)> {
    with(REDUCE.defines, &[wire, own, out, REDUCE_THREADS])
}

/// Warps of a block of [`COLLECTIVE`].
pub const COLLECTIVE_WARPS: u64 = 16;
/// Bytes of shared memory of each, for what is taken in.
pub const COLLECTIVE_PIECE: u64 = 7168;
/// Warps of a block that send first.
pub const COLLECTIVE_SEND: u64 = 4;
/// Most bytes of a bulk copy of theirs.
pub const COLLECTIVE_CHUNK: u64 = 7168;
/// Copies that each has shared memory for; half of them are being loaded.
pub const COLLECTIVE_STAGES: u64 = 4;
/// The most ranks.
pub const COLLECTIVE_RANKS: usize = 16;

/// A collective as one kernel that meets the other ranks itself, by bulk copies.
pub const COLLECTIVE: Source = Source {
    name: "collective/sm90_collective.cu",
    defines: &[
        "TW_OUT_MANTISSA",
        "TW_COLLECTIVE_WARPS",
        "TW_COLLECTIVE_PIECE",
        "TW_COLLECTIVE_SEND",
        "TW_COLLECTIVE_CHUNK",
        "TW_COLLECTIVE_STAGES",
        "TW_COLLECTIVE_RANKS",
    ],
    kernels: &["tw_collective", "tw_collective_leave"],
};

/// [`COLLECTIVE`]'s definitions for sums of elements with `out` mantissa bits.
pub fn collective_defines(out: u64) -> Vec<(String, u64)> {
    let take = [out, COLLECTIVE_WARPS, COLLECTIVE_PIECE];
    let send = [COLLECTIVE_SEND, COLLECTIVE_CHUNK, COLLECTIVE_STAGES];
    with(COLLECTIVE.defines, &[&take[..], &send, &[COLLECTIVE_RANKS as u64]].concat())
}

/// Threads of a block of every kernel of [`LAYERS`] and [`OPTIMIZER`].
pub const LAYERS_THREADS: u64 = 256;

/// Columns of a row of classes that a lane keeps: 32 lanes, those of the most that kernels take.
pub const LAYERS_KEPT: u64 = 16;
/// Rows whose tokens a block sorts.
pub const LAYERS_TOKENS: u64 = 2048;
/// Rows of one token that are summed by a block, and the number of such chunks of a token from
/// which on chunks grow.
pub const LAYERS_CHUNK: u64 = 64;
/// The latter.
pub const LAYERS_CHUNKS: u64 = 128;

/// Mantissa bits of the types that layers compute in: f32, bf16.
pub const LAYERS_MANTISSAS: [u64; 2] = [23, 7];

/// Embedding, norm, rotation of heads, router, loss, and their gradients.
pub const LAYERS: Source = Source {
    name: "layers/sm80_layers.cu",
    defines: &[
        "TW_SRC_MANTISSA",
        "TW_LAYERS_THREADS",
        "TW_LAYERS_KEPT",
        "TW_LAYERS_TOKENS",
        "TW_LAYERS_CHUNK",
        "TW_LAYERS_CHUNKS",
    ],
    kernels: &[
        "tw_embed",
        "tw_embed_count",
        "tw_embed_place",
        "tw_embed_bwd",
        "tw_add_norm",
        "tw_norm_bwd",
        "tw_sum_rows",
        "tw_heads",
        "tw_router",
        "tw_router_bwd",
        "tw_cross_entropy",
    ],
};

/// The norm of the gradient, AdamW, and first values.
pub const OPTIMIZER: Source = Source {
    name: "layers/sm80_optimizer.cu",
    defines: &["TW_SRC_MANTISSA", "TW_LAYERS_THREADS"],
    kernels: &["tw_square_sum", "tw_square_total", "tw_adamw", "tw_count_step", "tw_init"],
};

/// The definitions of [`LAYERS`] for activations with `src` mantissa bits.
pub fn layers_defines(src: u64) -> Vec<(String, u64)> {
    let values = [src, LAYERS_THREADS, LAYERS_KEPT, LAYERS_TOKENS, LAYERS_CHUNK, LAYERS_CHUNKS];
    with(LAYERS.defines, &values)
}

/// The definitions of [`OPTIMIZER`] for activations with `src` mantissa bits.
pub fn optimizer_defines(src: u64) -> Vec<(String, u64)> {
    with(OPTIMIZER.defines, &[src, LAYERS_THREADS])
}

/// The definitions of a source with their values, in its order.
fn with(names: &[&str], values: &[u64]) -> Vec<(String, u64)> {
    assert_eq!(names.len(), values.len(), "a value for each definition");
    names.iter().map(|n| (*n).to_owned()).zip(values.iter().copied()).collect()
}

/// Every unit of this module with the definitions of every variant.
pub fn portable() -> Vec<(Source, Vec<(String, u64)>)> {
    let quant = WIDE_MANTISSAS
        .iter()
        .flat_map(|src| FP8_MANTISSAS.iter().map(|dst| (QUANT, quant_defines(*src, *dst))));
    let permute = WIDE_MANTISSAS.iter().map(|src| (PERMUTE, permute_defines(*src)));
    let reduce = REDUCE_MANTISSAS.iter().map(|types| (REDUCE, reduce_defines(*types)));
    let ep = WIDE_MANTISSAS
        .iter()
        .flat_map(|out| [(EP, ep_defines(*out)), (EP_RETURN, ep_return_defines(*out))])
        .chain([(EP_BULK, ep_bulk_defines())]);
    let ep = ep.flat_map(|(source, defines)| {
        let uneven = [&defines[..], &[(EP_UNEVEN.to_owned(), 1)]].concat();
        [(source, defines), (source, uneven)]
    });
    let moves = [(MOVE, move_defines())];
    let collective = WIDE_MANTISSAS.iter().map(|out| (COLLECTIVE, collective_defines(*out)));
    let layers = LAYERS_MANTISSAS
        .iter()
        .flat_map(|src| [(LAYERS, layers_defines(*src)), (OPTIMIZER, optimizer_defines(*src))]);
    let all = quant.chain(permute).chain(reduce).chain(collective).chain(moves);
    all.chain(ep).chain(layers).collect()
}
