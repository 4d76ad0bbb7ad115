//! The description of a permutation: tokens, experts, choices, types.

use std::fmt;

use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;

use crate::common::{Named, expect_tensor};

/// A permutation of at most `max_tokens` tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PermuteDesc {
    /// The most tokens.
    pub max_tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Number of experts.
    pub num_experts: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Rows of the expert-major tensors.
    pub capacity: usize,
    /// Rows of each expert are a multiple of this.
    pub align: usize,
    /// Element type of permuted tokens: f32, bf16, f16 or FP8.
    pub dtype: DType,
    /// f32 scales per token that travel with FP8 tokens (0: none).
    pub num_scales: usize,
    /// Element type of unpermuted rows, results and gradients: f32, bf16 or f16.
    pub out: DType,
}

impl PermuteDesc {
    /// Everything of one type (bf16 results for FP8), no alignment, space for every copy.
    pub fn new(
        max_tokens: usize,
        hidden: usize,
        num_experts: usize,
        top_k: usize,
        dtype: DType,
    ) -> Self {
        let out = if dtype.is_fp8() { DType::BF16 } else { dtype };
        let mut d = Self {
            max_tokens,
            hidden,
            num_experts,
            top_k,
            capacity: 0,
            align: 1,
            dtype,
            num_scales: 0,
            out,
        };
        d.capacity = d.worst_case();
        d
    }

    /// Rows that are enough for any routing: every copy, and padding for every expert.
    pub fn worst_case(&self) -> usize {
        self.max_tokens * self.top_k + self.num_experts * self.align.saturating_sub(1)
    }

    /// Checks the description.
    ///
    /// # Errors
    /// `InvalidArgument` naming what does not fit.
    pub fn check(&self) -> Result<()> {
        let bad = |text: String| Err(Error::invalid(text).op("permute"));
        if self.num_experts == 0 || !(1..=32).contains(&self.top_k) {
            return bad(format!(
                "{} experts with top_k {} are not possible: there must be at least one expert, and \
                 top_k must be 1 to 32",
                self.num_experts, self.top_k
            ));
        }
        if self.align == 0 {
            return bad("the alignment must be positive".to_owned());
        }
        let most = i32::MAX as usize;
        if self.max_tokens.saturating_mul(self.top_k) > most || self.capacity > most {
            return bad(format!(
                "{} tokens with top_k {} and capacity {} have more rows than 32-bit row numbers \
                 can count",
                self.max_tokens, self.top_k, self.capacity
            ));
        }
        let plain = |d| matches!(d, DType::F32 | DType::BF16 | DType::F16);
        if !(plain(self.dtype) || self.dtype.is_fp8()) || !plain(self.out) {
            return bad(format!(
                "tokens cannot be {} with results {}: tokens are f32, bf16, f16 or FP8, results \
                 f32, bf16 or f16",
                self.dtype, self.out
            ));
        }
        if self.num_scales > 0 && !self.dtype.is_fp8() {
            return bad(format!("tokens of type {} have no scales", self.dtype));
        }
        Ok(())
    }
}

impl fmt::Display for PermuteDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "T={} H={} E={} k={} cap={} align={} {}+{}->{}",
            self.max_tokens,
            self.hidden,
            self.num_experts,
            self.top_k,
            self.capacity,
            self.align,
            self.dtype,
            self.num_scales,
            self.out
        )
    }
}

/// Bytes that a permutation takes, before anything is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PermuteMemory {
    /// One map for `max_tokens` tokens.
    pub map: usize,
    /// Permuted tokens with their scales and weights: the caller's tensors.
    pub permuted: usize,
}

/// Tokens (or their gradients) in their own order.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[tokens, hidden]`.
    pub x: Tensor,
    /// `topk_weights` `[tokens, top_k]` f32, if they travel along.
    pub weights: Option<Tensor>,
    /// Scales of FP8 tokens `[tokens, num_scales]` f32.
    pub scales: Option<Tensor>,
}

/// Tokens (or their gradients) in expert-major order.
#[derive(Clone, Debug)]
pub struct Permuted {
    /// `[capacity, hidden]`.
    pub x: Tensor,
    /// Weight of the copy in each row, `[capacity]` f32.
    pub weights: Option<Tensor>,
    /// Scales of the copy in each row, `[capacity, num_scales]` f32.
    pub scales: Option<Tensor>,
}

impl Tokens {
    /// Every tensor with its name.
    pub(super) fn named(&self) -> [Named<'_>; 3] {
        named("x", [Some(&self.x), self.weights.as_ref(), self.scales.as_ref()])
    }

    pub(super) fn check(&self, d: &PermuteDesc, dtype: DType, tokens: usize) -> Result<()> {
        expect_tensor("x", &self.x, dtype, &[tokens, d.hidden])?;
        optional("topk_weights", &self.weights, &[tokens, d.top_k])?;
        optional("scales", &self.scales, &[tokens, d.num_scales])
    }
}

impl Permuted {
    /// Every tensor with its name.
    pub(super) fn named(&self) -> [Named<'_>; 3] {
        named("permuted x", [Some(&self.x), self.weights.as_ref(), self.scales.as_ref()])
    }

    pub(super) fn check(&self, d: &PermuteDesc, dtype: DType) -> Result<()> {
        expect_tensor("permuted x", &self.x, dtype, &[d.capacity, d.hidden])?;
        optional("permuted weights", &self.weights, &[d.capacity])?;
        optional("permuted scales", &self.scales, &[d.capacity, d.num_scales])
    }
}

fn named<'a>(x: &'static str, [a, b, c]: [Option<&'a Tensor>; 3]) -> [Named<'a>; 3] {
    [(x, a), ("weights", b), ("scales", c)]
}

fn optional(what: &str, t: &Option<Tensor>, shape: &[usize]) -> Result<()> {
    t.as_ref().map_or(Ok(()), |t| expect_tensor(what, t, DType::F32, shape))
}

/// Fails unless both or neither are given.
pub(super) fn together(what: &str, a: bool, b: bool) -> Result<()> {
    if a == b {
        return Ok(());
    }
    Err(Error::invalid(format!("`{what}` must be given on both sides or on none")))
}
