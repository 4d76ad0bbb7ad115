//! The description of an attention: shapes, types, mask, sequences.

use std::fmt;

use tilewire_core::{DType, Error, Result};

use super::Sequences;

/// The keys that a query sees, by their distance.
///
/// Query `i` of `sq` sits at key position `i + skv - sq` (bottom-right alignment: the last query
/// sees the last key under any causal mask). Key `j` is visible if it lies at most `left` before
/// and `right` behind that position; no bound means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct AttnMask {
    /// Most keys seen before the own position.
    pub left: Option<usize>,
    /// Most keys seen behind the own position; 0 is causal.
    pub right: Option<usize>,
}

impl AttnMask {
    /// Every query sees every key of its sequence.
    pub const FULL: Self = Self { left: None, right: None };
    /// A query sees itself and what came before.
    pub const CAUSAL: Self = Self { left: None, right: Some(0) };

    /// Sliding window: `left` keys before, the own position, `right` keys behind.
    pub const fn window(left: usize, right: usize) -> Self {
        Self { left: Some(left), right: Some(right) }
    }

    /// Of the pairs at distances `behind` (key position less query position): none, some or all.
    pub(crate) fn visible(&self, behind: std::ops::RangeInclusive<i64>) -> Visible {
        let left = self.left.map_or(i64::MIN, |l| -bound(l));
        let right = self.right.map_or(i64::MAX, bound);
        let (first, last) = (*behind.start(), *behind.end());
        if last < left || first > right {
            Visible::None
        } else if first >= left && last <= right {
            Visible::All
        } else {
            Visible::Some
        }
    }
}

/// A bound of a window as a distance. Beyond any sequence all bounds are the same.
pub(crate) fn bound(keys: usize) -> i64 {
    keys.min(1 << 40) as i64
}

/// The visible part of a block's pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Visible {
    None,
    Some,
    All,
}

/// Dropout of attention probabilities. The entry of (head, query, key) is kept if
/// `Rng::new(seed).f64_at(head << 48 | q_row << 24 | kv_row) >= p`, with rows of the global packed
/// tensors: the mask does not depend on the number of ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// Probability that an entry is dropped, in `[0, 1)`.
    pub p: f64,
    /// Seed of the mask.
    pub seed: u64,
}

/// Tokens of a scale of [`HeadScales::Block128`], and elements of its heads.
pub(crate) const BLOCK: usize = 128;

/// Scales of e4m3 q, k and v: `value = code * scale`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum HeadScales {
    /// One for each (token, head), f32 `[tokens, H]`.
    #[default]
    Token,
    /// One for each 128 tokens of a head, from the first row of the tensor on, f32
    /// `[ceil(tokens / 128), H]`: those of [`ScaleLayout::Block128x128`] of `[tokens, H * 128]`.
    /// For heads of 128, and for local attention alone. They must not be negative; FP8 products
    /// take those below 2^-60 for 2^-60.
    ///
    /// [`ScaleLayout::Block128x128`]: tilewire_core::ScaleLayout::Block128x128
    Block128,
}

impl HeadScales {
    /// Returns the rows of the scales of `tokens` rows.
    pub(crate) fn rows(self, tokens: usize) -> usize {
        match self {
            HeadScales::Token => tokens,
            HeadScales::Block128 => tokens.div_ceil(BLOCK),
        }
    }
}

/// Shape of the additive bias `[heads, sq, skv]`, by position inside the sequence and shared by all
/// sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct BiasShape {
    /// `Hq`, or 1 for one bias for all heads.
    pub heads: usize,
    /// Largest query length.
    pub sq: usize,
    /// Largest key length.
    pub skv: usize,
}

/// Attention over packed tensors. Rows are global; pure data, equal on all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionDesc {
    /// Query heads, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Head dimension of q and k.
    pub dqk: usize,
    /// Head dimension of v and out.
    pub dv: usize,
    /// Element type of q, k, v: f32, bf16, f16 or f8e4m3.
    pub dtype: DType,
    /// Scales of q, k and v if they are f8e4m3.
    pub scales: HeadScales,
    /// Element type of out, d_out, dq, dk, dv: f32, bf16 or f16.
    pub out: DType,
    /// Visible pairs.
    pub mask: AttnMask,
    /// Factor of the scores, usually `1 / sqrt(dqk)`.
    pub scale: f64,
    /// Bound of the scores, applied before the bias.
    pub softcap: Option<f64>,
    /// Dropout of the probabilities; it does not enter `lse`.
    pub dropout: Option<Dropout>,
    /// There is an additive bias.
    pub bias: Option<BiasShape>,
    /// There is a logit for each query head that takes part in the softmax and has no value.
    pub sink: bool,
    /// The most rows, and the sequences of a launch that does not say otherwise.
    pub sequences: Sequences,
}

impl AttentionDesc {
    /// Returns the type in which devices compute with FP8 q, k and v whose codes they do not
    /// multiply, and with keys that travelled as FP8. q, k and v become `code * scale`, rounded to
    /// it: bf16 if that is the type of `out`, else f32; 16-bit queries beside keys that travelled
    /// as FP8 keep their type. f32, too, with head dimensions that are no multiples of 8 up to
    /// 256. The host computes from f32.
    pub fn widened(&self) -> DType {
        match self.dtype {
            _ if !self.fits_matrices() => DType::F32,
            DType::F8E4M3 if self.out == DType::BF16 => DType::BF16,
            DType::BF16 | DType::F16 => self.dtype,
            _ => DType::F32,
        }
    }

    /// Returns whether matrix instructions take such heads.
    pub(crate) fn fits_matrices(&self) -> bool {
        [self.dqk, self.dv].iter().all(|d| d.is_multiple_of(8) && (8..=256).contains(d))
    }

    /// Returns whether kernels need the text with all features for it: softcap, bias, dropout, or a
    /// scale that is not positive.
    pub(crate) fn has_extras(&self) -> bool {
        let scale = self.scale as f32;
        self.softcap.is_some() || self.bias.is_some() || self.dropout.is_some() || scale <= 0.0
    }

    /// One sequence of `seq` tokens, `heads = (Hq, Hkv)`, head dimension `d` for q, k and v, scale
    /// `1 / sqrt(d)`, no extras. FP8 inputs give a bf16 output.
    pub fn new(seq: usize, heads: (usize, usize), d: usize, dtype: DType, mask: AttnMask) -> Self {
        Self {
            heads_q: heads.0,
            heads_kv: heads.1,
            dqk: d,
            dv: d,
            dtype,
            scales: HeadScales::default(),
            out: if dtype.is_fp8() { DType::BF16 } else { dtype },
            mask,
            scale: 1.0 / (d.max(1) as f64).sqrt(),
            softcap: None,
            dropout: None,
            bias: None,
            sink: false,
            sequences: Sequences::one(seq, seq),
        }
    }

    /// Checks the description.
    ///
    /// # Errors
    /// `InvalidArgument` for heads, dimensions, dtypes, factors or sequences that are not
    /// acceptable.
    pub fn check(&self) -> Result<()> {
        let bad = |m: String| Err(Error::invalid(m));
        if self.heads_kv == 0 || self.heads_q == 0 || !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(Error::invalid("query heads must be a multiple of key heads")
                .expected(format_args!("a multiple of {}", self.heads_kv))
                .seen(self.heads_q));
        }
        if self.dqk == 0 || self.dv == 0 {
            return bad(format!("head dimensions must be positive: {} and {}", self.dqk, self.dv));
        }
        let plain = [DType::F32, DType::BF16, DType::F16];
        if !plain.contains(&self.dtype) && self.dtype != DType::F8E4M3 {
            return bad(format!(
                "q, k, v cannot be {}: f32, bf16, f16 or f8e4m3 is expected",
                self.dtype
            ));
        }
        if self.scales == HeadScales::Block128 {
            let good = self.dtype.is_fp8() && (self.dqk, self.dv) == (BLOCK, BLOCK);
            if !good {
                return Err(Error::invalid("scales of 128 tokens are of f8e4m3 heads of 128")
                    .expected("f8e4m3, head dimensions 128 and 128")
                    .seen(format_args!("{}, {} and {}", self.dtype, self.dqk, self.dv)));
            }
        }
        if !plain.contains(&self.out) {
            return bad(format!("`out` cannot be {}: f32, bf16 or f16 is expected", self.out));
        }
        // As the arithmetic has them, in f32: a softcap that is 0 there would be none to the
        // kernels.
        let cap = self.softcap.map(|c| c as f32);
        if !(self.scale as f32).is_finite() || cap.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
            return bad(format!(
                "scale {} must be finite, and softcap {:?} finite and positive",
                self.scale, self.softcap
            ));
        }
        self.sequences.check()?;
        if let Some(d) = self.dropout {
            let rows = self.sequences.tokens_q.max(self.sequences.tokens_kv);
            if !(0.0..1.0).contains(&d.p) || rows > 1 << 24 || self.heads_q > 1 << 16 {
                return bad(format!(
                    "dropout with p {} needs p in [0, 1), at most 2^24 rows and at most 65536 \
                     query heads",
                    d.p
                ));
            }
        }
        match self.bias {
            Some(b) if b.heads != 1 && b.heads != self.heads_q => {
                bad(format!("a bias must have 1 or {} heads, not {}", self.heads_q, b.heads))
            }
            _ => self.check_launch(&self.sequences),
        }
    }

    /// Checks the sequences of one launch against the description.
    ///
    /// # Errors
    /// `InvalidArgument` if they have more rows, or longer sequences than the bias.
    pub fn check_launch(&self, s: &Sequences) -> Result<()> {
        s.check()?;
        let most = (self.sequences.tokens_q, self.sequences.tokens_kv);
        if s.tokens_q > most.0 || s.tokens_kv > most.1 {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .expected(format_args!("at most {} and {}", most.0, most.1))
                .seen(format_args!("{} and {}", s.tokens_q, s.tokens_kv)));
        }
        let (sq, skv) = s.longest();
        match self.bias {
            Some(b) if sq > b.sq || skv > b.skv => {
                Err(Error::invalid("a sequence is longer than the bias")
                    .expected(format_args!("at most {} x {}", b.sq, b.skv))
                    .seen(format_args!("{sq} x {skv}")))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for AttentionDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} h={}/{} d={}/{} {}->{} l={:?} r={:?} scale={:e} cap={:?} drop={:?} bias={:?} sink={}",
            self.sequences,
            self.heads_q,
            self.heads_kv,
            self.dqk,
            self.dv,
            self.dtype,
            self.out,
            self.mask.left,
            self.mask.right,
            self.scale,
            self.softcap,
            self.dropout,
            self.bias,
            self.sink
        )?;
        match self.scales {
            HeadScales::Token => Ok(()),
            HeadScales::Block128 => f.write_str(" scales=128"),
        }
    }
}
