//! `attention`: one rank's attention, forward and backward; no communication.
//!
//! For query `i` and key `j` of one sequence (the definitions of `tilewire_oracle::attention`):
//!
//! ```text
//! z_ij = scale <q_i, k_j>                    z_ij <- cap tanh(z_ij / cap)     with softcap
//! s_ij = z_ij + bias[h, i, j]                only for pairs that the mask lets see each other
//! lse_i = ln(sum_j exp(s_ij) + exp(sink_h))  the sink term only with a sink; natural logarithm
//! p_ij = exp(s_ij - lse_i)                   out_i = sum_j p_ij keep_ij / (1 - p_drop) v_j
//! ```
//!
//! Tensors are packed: `q [tokens_q, Hq, dqk]`, `k [tokens_kv, Hkv, dqk]`, `v [tokens_kv, Hkv,
//! dv]`, `out [tokens_q, Hq, dv]` (heads may be folded into the columns), `lse [Hq, tokens_q]` f32.
//! Query head `h` uses key-value head `h / (Hq / Hkv)`. Rows that see nothing, and rows between
//! sequences, have `out = 0` and `lse = -inf` (`lse = sink` where a row of a sequence sees only the
//! sink).
//!
//! FP8 inputs are e4m3 with one f32 scale for each (token, head) or each 128 tokens of a head
//! ([`HeadScales`]), `value = data * scale`; the output and the gradients are bf16 then. On devices
//! q, k and v of FP8 are rounded to the type that [`AttentionDesc::widened`] says, and
//! probabilities of 16-bit types to these before their products; where the kernel of FP8 is asked
//! for or chosen ([`AttnBackend`]), codes stay what they are, and probabilities are rounded to
//! e4m3. All other arithmetic is f32 (but for sums of FP8 products, `docs/protocols/attention.md`):
//! online softmax over tiles of keys with the running maximum, sum and accumulator kept unrounded
//! (Dao et al., FlashAttention, 2022), and the backward pass from `lse` and `delta = <d_out, out>`.
//! The order of tiles depends on shapes alone: equal inputs give equal bits. Where a plan chooses
//! the kernel of FP8 it depends on whether all addresses are multiples of 16, too. Where all
//! sequences have few queries ([`FEW_QUERIES`]), and for gradients of long ones ([`LONG_QUERIES`]),
//! it depends on all sequences of the launch, on those of the plan, on whether they are offsets in
//! device memory, and on the device's multiprocessors, too.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/attention/sm80_attention.cu` |
//! |  | `kernels/src/attention/sm90_attention.cu` |
//! |  | `kernels/src/attention/sm90_attention_bwd.cu` |
//! |  | `kernels/src/attention/sm90_attention_grads.cu` |
//! |  | `kernels/src/attention/sm90_attention_fp8.cu` |
//! |  | `kernels/src/attention/sm80_attention_split.cu` |
//! |  | `kernels/src/attention/plain_attention.cu` |
//! |  | `kernels/src/attention/sequences.cu` |
//! | oracle | `crates/oracle/src/attention/mod.rs` |
//! | cases | `crates/cli/src/verify/attention.rs` |
//! | page | `docs/protocols/attention.md` |

mod backend;
mod desc;
pub(crate) mod device;
pub(crate) mod host;
mod launch;
mod offsets;
mod plan;
mod schedule;
mod sequences;
pub(crate) mod split;
pub(crate) mod table;
#[cfg(test)]
mod tests;

pub use backend::{AttnBackend, LONG_QUERIES};
pub(crate) use desc::bound;
pub use desc::{AttentionDesc, AttnMask, BiasShape, Dropout, HeadScales};
pub(crate) use host::{Grads, Upstream, rows_first};
pub use launch::{AttnGrads, AttnInputs, AttnOperand, AttnOut, AttnSaved};
pub(crate) use launch::{Extra, LocalRows};
pub use offsets::AttnOffsets;
pub(crate) use offsets::{Refused, read_status};
pub use plan::AttentionPlan;
pub use schedule::AttnConfig;
pub(crate) use schedule::{Queries, Slice, slices};
pub use sequences::Sequences;
pub(crate) use sequences::in_sequence;
pub use split::FEW_QUERIES;
