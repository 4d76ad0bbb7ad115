//! Parameters that the host passes to kernels by value, laid out as the kernels declare them.
//!
//! Names are those of CUDA C++; the file that the table names says what fields mean. Addresses are
//! `u64` here, and `pad` is C++'s own. Tests compare both declarations ([`Layout::asserts`]).
#![expect(missing_docs, reason = "the fields are documented where the kernels declare them")]

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::attention::hopper::FEW;
use crate::attention::hopper_gates::GATES;
use crate::attention::split::SPLIT_FEW;
use crate::attention::{PARTS, REFUSED, TABLE};
pub use crate::layout::{Field, Layout};
use crate::portable::{COLLECTIVE_RANKS, MOVE_SEGMENTS};

/// Declares structures, and the table [`LAYOUTS`] of them.
macro_rules! abi {
    ($($(#[$doc:meta])* $file:literal $name:ident { $($field:ident: $type:ty,)+ })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Pod, Zeroable)]
            #[repr(C)]
            pub struct $name {
                $(pub $field: $type,)+
            }
        )+

        /// Every structure that kernels take by value.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            file: $file,
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), offset_of!($name, $field)),)+],
        },)+];
    };
}

abi! {
    /// A team: where its control pages and counters are, and the deadline of its waits.
    "comm/team.cuh" TwTeam {
        control: u64,
        stride: u64,
        sent: u64,
        expected: u64,
        epoch: u64,
        fault: u64,
        pinned: u64,
        timeout_ns: u64,
        me: u32,
        size: u32,
        generation: u32,
        abort: u32,
    }

    /// Outputs of a launch, their bytes, and what a team that is over fills them with.
    "comm/team.cuh" TwPoison { out: [u64; 8], len: [u64; 8], byte: [u8; 8], }

    /// Sums of parts that peers have pushed, in the order of the ranks.
    "collective/sm80_reduce.cu" TwReduce {
        slots: u64,
        stride: u64,
        own: u64,
        out: u64,
        bias: u64,
        num: u64,
        cols: u32,
        me: u32,
        size: u32,
        scale: f32,
        bias_out: u32,
        pad: u32,
    }

    /// Copies of segments: addresses and bytes.
    "collective/sm80_move.cu" TwMoves {
        src: [u64; MOVE_SEGMENTS],
        dst: [u64; MOVE_SEGMENTS],
        len: [u64; MOVE_SEGMENTS],
    }

    /// A product by the core for sm_90a, beside its tensor maps.
    "hopper/epilogue.cuh" TwHopper {
        d: u64,
        bias: u64,
        aux: u64,
        counter: u64,
        ldd: i64,
        ldaux: i64,
        m: u32,
        n: u32,
        k: u32,
        flags: u32,
        parts: u32,
        steps: u32,
    }

    /// Products of groups by the core for sm_90a, beside their tensor maps.
    "hopper/groups.cuh" TwHopperGrouped {
        g: TwHopper,
        splits: u64,
        status: u64,
        accumulate: u64,
        stride: i64,
        groups: u32,
        pad: u32,
        maps: u64,
        addresses: u64,
    }

    /// An encoded tensor map, which a kernel needs at a multiple of 64 bytes.
    "ptx/tensor.cuh" TwTensorMap {
        words: [u64; 16],
    }

    /// A part of a collective: from, to, bytes.
    "collective/sm90_collective.cu" TwPart {
        src: u64,
        dst: u64,
        len: u64,
    }

    /// A collective as one kernel that meets the other ranks.
    "collective/sm90_collective.cu" TwCollective {
        flags: [u64; COLLECTIVE_RANKS],
        epoch: u64,
        ticket: u64,
        slot: u32,
        pieces: u32,
        piece: u32,
        slice: u32,
        sends: u32,
        sums: u32,
        takes: u32,
        same: u32,
        summers: u32,
        pad: u32,
        send: [TwPart; COLLECTIVE_RANKS],
        take: [TwPart; COLLECTIVE_RANKS],
    }

    /// A sum over the ranks inside of a collective.
    "collective/sm90_collective.cu" TwTotal {
        slots: u64,
        stride: u64,
        own: u64,
        len: u64,
        to: [u64; COLLECTIVE_RANKS],
        scale: f32,
        pad: u32,
    }

    /// A layer of experts and its team, with the symmetric areas.
    "ep/layer.cuh" TwEp {
        counts: u64,
        meta: u64,
        tokens: u64,
        returns: u64,
        stride: u64,
        first: u64,
        steps: u64,
        meta_stride: u64,
        row_stride: u64,
        return_stride: u64,
        size: u32,
        me: u32,
        max_tokens: u32,
        top_k: u32,
        experts: u32,
        capacity: u32,
        align: u32,
        scales: u32,
    }

    /// The routing of one microbatch, in this rank's memory.
    "ep/layer.cuh" TwHandle {
        rows: u64,
        ranks: u64,
        num: u64,
        copies: u64,
        source: u64,
        place: u64,
        counts: u64,
        m_splits: u64,
        total: u64,
        dropped: u64,
        lost: u64,
    }

    /// The meeting of a launch with its peers in one area: flags, epoch, chunks.
    "ep/layer.cuh" TwMeet {
        flags: u64,
        stride: u64,
        epoch: u64,
        ticket: u64,
        slot: u32,
        chunk: u32,
        slices: u32,
        chunks: u32,
        senders: u32,
        leave: u32,
    }

    /// The receive buffers of a dispatch.
    "ep/layer.cuh" TwRecv {
        x: u64,
        weights: u64,
        scales: u64,
        index: u64,
        row_bytes: u64,
        buffer: u32,
        bad_input: u32,
        rank_major: u32,
        pad: u32,
    }

    /// The tokens of a dispatch.
    "ep/layer.cuh" TwPush {
        x: u64,
        weights: u64,
        scales: u64,
        row_bytes: u64,
        tokens: u32,
        pad: u32,
    }

    /// The rows and outputs of a combine.
    "ep/layer.cuh" TwReturn {
        y: u64,
        weights: u64,
        dw: u64,
        out: u64,
        dw_out: u64,
        hidden: u32,
        expert_major: u32,
        tokens: u32,
        pad: u32,
    }

    /// The choices of experts that a routing is made from.
    "ep/sm80_ep.cu" TwRouting {
        idx: u64,
        blocks: u64,
        choices: u32,
        wide: u32,
        span: u32,
        bad_input: u32,
        part: u32,
        pad: u32,
    }

    /// A matrix product with epilogue.
    "gemm/mainloop.cuh" TwGemm {
        a: u64,
        b: u64,
        d: u64,
        bias: u64,
        lda: i64,
        ldb: i64,
        ldd: i64,
        m: u32,
        n: u32,
        k: u32,
        flags: u32,
        aux: u64,
        ldaux: i64,
    }

    /// A grouped product: the product of one group, and where the groups are.
    "grouped_gemm/sm80_grouped_gemm.cu" TwGrouped {
        g: TwGemm,
        splits: u64,
        status: u64,
        accumulate: u64,
        stride: i64,
        groups: u32, pad: u32,
        table: u64,
    }

    /// Addresses of at most 64 groups, for `tw_grouped_table`.
    "grouped_gemm/sm80_grouped_gemm.cu" TwAddresses { at: [u64; 64], }

    /// A segment of consecutive rows of one sequence.
    "attention/segments.cuh" TwSeg {
        row: u32,
        len: u32,
        pos: u32,
        global: u32,
        tile: u32,
        first: u32,
        end: u32,
        shift: i32,
    }

    /// Attention, forward and backward.
    "attention/segments.cuh" TwAttn {
        q: u64,
        k: u64,
        v: u64,
        out: u64,
        lse: u64,
        bias: u64,
        sink: u64,
        own: u64,
        other: u64,
        d_out: u64,
        delta: u64,
        dq: u64,
        dk: u64,
        dv: u64,
        dbias: u64,
        dsink: u64,
        ld_q: i64,
        ld_k: i64,
        ld_v: i64,
        ld_o: i64,
        drop_seed: u64,
        drop_below: u64,
        num_own: u32,
        tiles: u32,
        tokens_q: u32,
        heads_q: u32,
        heads_kv: u32,
        first_head: u32,
        bias_heads: u32,
        bias_sq: u32,
        bias_skv: u32,
        left: i32,
        right: i32,
        scale: f32, softcap: f32, keep: f32,
        out_type: u32,
        dqk: u32, dv_dim: u32, in_type: u32,
    }

    /// Results over pieces of the keys, and few segments.
    "attention/sm80_attention_split.cu" TwSplit {
        parts: u64, ends: u64, tiles: u32, few: u32, own: [TwSeg; SPLIT_FEW], other: [TwSeg; SPLIT_FEW],
    }

    /// The order in which the kernels for sm_90a take tiles, and few segments.
    "attention/hopper_tiles.cuh" TwAttnOrder {
        counter: u64, heads: u32, few: u32, own: [TwSeg; FEW], other: [TwSeg; FEW],
    }

    /// Gates of the ranks whose keys come while a kernel attends.
    "attention/hopper_gates.cuh" TwGates {
        team: TwTeam, flags: u64, slot: u32, own: u32, end: [u32; GATES],
    }

    /// Memory in which the kernel of five products sums dq.
    "attention/hopper_fused.cuh" TwDqSums { sums: u64, words: u64, }

    /// Scales of e4m3, and memory for transposed values.
    "attention/hopper_fp8.cuh" TwFp8 { q_scales: u64, k_scales: u64, v_scales: u64, values: u64, num_other: u32, pad: u32, }

    /// Segments that `tw_attn_table` writes to device memory.
    "attention/segments.cuh" TwTable { to: u64, num: u32, pad: u32, segs: [TwSeg; TABLE], }

    /// Rows that are neighbours in the global tensors and in those of a launch.
    "attention/sequences.cu" TwShard { global: u32, row: u32, len: u32, }

    /// Rows of one side, by offsets in device memory.
    "attention/sequences.cu" TwOffsets {
        cu: u64, at: u64, table: u64,
        tokens: u32, tile: u32, segs: u32, longest: u32, num_parts: u32, pad: u32,
        parts: [TwShard; PARTS],
    }

    /// Tables that are made of offsets.
    "attention/sequences.cu" TwSequences {
        q: TwOffsets, kv: TwOffsets,
        refused: u64, any: u64,
        num: u32, pad: u32,
    }

    /// Results that are NaN where the offsets cannot be used.
    "attention/sequences.cu" TwRefuse {
        refused: u64,
        to: [u64; REFUSED], num: [u64; REFUSED],
    }

    /// Results over parts of the keys, to be merged.
    "attention/plain_attention.cu" TwMerge {
        parts: u64,
        lses: u64,
        out: u64,
        lse: u64,
        num: u32, tokens_q: u32, heads_q: u32, pad: u32,
    }

    /// A quantisation.
    "quant/sm80_quant.cu" TwQuant {
        x: u64,
        row: u64,
        row_scales: u64,
        column: u64,
        column_scales: u64,
        scale: u64,
        rows: u32,
        cols: u32,
        pow2: u32,
        swizzled: u32,
    }

    /// A dequantisation.
    "quant/sm80_quant.cu" TwDequant {
        x: u64,
        scales: u64,
        out: u64,
        rows: u32,
        cols: u32,
        layout: u32,
        chunks: u32,
    }

    /// A map of rows to experts.
    "permute/sm80_permute.cu" TwRoute {
        idx: u64,
        counts: u64,
        first: u64,
        slots: u64,
        sources: u64,
        m_splits: u64,
        total: u64,
        dropped: u64,
        status: u64,
        choices: u32,
        experts: u32,
        capacity: u32,
        align: u32,
        wide: u32,
        chunks: u32,
    }

    /// The gradient of an embedding.
    "layers/embed.cuh" TwEmbedBwd {
        tokens: u64,
        dx: u64,
        grad: u64,
        partial: u64,
        counts: u64,
        order: u64,
        starts: u64,
        tickets: u64,
        n: u32,
        d: u32,
    }

    /// An addition and an RMS norm.
    "layers/sm80_layers.cu" TwNorm {
        x: u64,
        y: u64,
        w: u64,
        sum: u64,
        out: u64,
        d: u32,
        pad: u32,
    }

    /// The gradient of a norm.
    "layers/sm80_layers.cu" TwNormBwd {
        x: u64,
        w: u64,
        dy: u64,
        residual: u64,
        dx: u64,
        narrow: u64,
        partial: u64,
        n: u32,
        d: u32,
    }

    /// Heads of attention from rows, turned by their positions, or back.
    "layers/sm80_layers.cu" TwHeads {
        rows: u64,
        q: u64,
        k: u64,
        v: u64,
        positions: u64,
        table: u64,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        join: u32,
    }

    /// A router: probabilities, choices, weights.
    "layers/classes.cuh" TwRouter {
        logits: u64,
        probs: u64,
        topk: u64,
        weights: u64,
        sums: u64,
        stats: u64,
        n: u32,
        experts: u32,
        k: u32,
        lanes: u32,
    }

    /// The gradient of a router.
    "layers/classes.cuh" TwRouterBwd {
        probs: u64,
        topk: u64,
        weights: u64,
        d_weights: u64,
        load: u64,
        d_logits: u64,
        scale: f32,
        n: u32,
        experts: u32,
        k: u32,
        lanes: u32,
        pad: u32,
    }

    /// The cross entropy and its gradient.
    "layers/classes.cuh" TwLoss {
        logits: u64,
        targets: u64,
        d_logits: u64,
        loss: u64,
        partial: u64,
        ticket: u64,
        scale: f64,
        n: u32,
        cols: u32,
        lanes: u32,
        pad: u32,
    }

    /// A step of AdamW.
    "layers/sm80_optimizer.cu" TwAdamW {
        w: u64,
        master: u64,
        g: u64,
        m: u64,
        v: u64,
        small: u64,
        count: u64,
        n: u64,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        decay: f64,
        clip: f64,
        warmup: u64,
        total: u64,
    }

    /// First values of a parameter.
    "layers/sm80_optimizer.cu" TwInit {
        w: u64,
        master: u64,
        n: u64,
        cols: u64,
        row0: u64,
        col0: u64,
        global_cols: u64,
        seed: u64,
        std: f64,
    }

    /// Bulk copies to measure a link with.
    "bench/links_bulk.cu" TwBulk {
        dst: u64,
        stride: u64,
        src: u64,
        bytes: u64,
        chunk: u32,
        me: u32,
        size: u32,
        num: u32,
    }

    /// A litmus test of memory order.
    "bench/litmus.cu" TwLitmus {
        put: u64,
        flag: u64,
        credit: u64,
        got: u64,
        seen: u64,
        grant: u64,
        own: u64,
        out: u64,
        rounds: u64,
        timeout_ns: u64,
        bytes: u32,
        lanes: u32,
        reads: u32,
        broken: u32,
        late_ns: u32,
        pad: u32,
    }
}
