//! What a context-parallel attention is asked to do.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{DType, Error, Rank, Result};

use crate::attention::AttentionDesc;
use crate::common::part;

/// Which rows of the global tensors a rank holds. Queries and keys are divided alike, each by its
/// own number of rows; padding counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `2 P` chunks whose sizes differ by at most one (larger ones first, some may be empty); rank
    /// `r` holds chunk `r` and then chunk `2 P - 1 - r`, so that causal work is even.
    Zigzag,
    /// `P` chunks; rank `r` holds chunk `r`.
    Contiguous,
}

impl Layout {
    /// All values with their names.
    pub const NAMES: [(&'static str, Layout); 2] =
        [("zigzag", Layout::Zigzag), ("contiguous", Layout::Contiguous)];

    /// Global rows of `rank`, in the order of its local tensor.
    pub fn spans(self, tokens: usize, rank: Rank, size: usize) -> Vec<Range<usize>> {
        match self {
            Layout::Zigzag => {
                [rank.idx(), 2 * size - 1 - rank.idx()].map(|c| part(tokens, c, 2 * size)).to_vec()
            }
            Layout::Contiguous => vec![part(tokens, rank.idx(), size)],
        }
    }

    /// The most rows any rank has for up to `tokens` rows.
    pub fn max_rows(self, tokens: usize, size: usize) -> usize {
        match self {
            Layout::Zigzag => 2 * tokens.div_ceil(2 * size),
            Layout::Contiguous => tokens.div_ceil(size),
        }
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, l)| *l).ok_or_else(|| {
            Error::invalid(format!("unknown layout `{s}`; one of zigzag, contiguous"))
        })
    }
}

/// Attention over rows that are divided among the ranks of a team. Equal on all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct CpAttentionDesc {
    /// The attention; rows and sequences are global.
    pub attn: AttentionDesc,
    /// Who holds which rows.
    pub layout: Layout,
    /// Ranks of a group in which `hybrid` scatters heads; consecutive ranks form a group.
    pub a2a_size: usize,
    /// K and V travel (and are used) as e4m3 with one f32 scale for each (token, head), although
    /// their type is wider. FP8 inputs always travel as they are.
    pub fp8_kv: bool,
    /// Type of partial dK and dV on the wire: f32, or f8e4m3 or f8e5m2 with one f32 scale for each
    /// (token, head).
    pub dkv_wire: DType,
    /// The plan reserves memory for the backward pass as well.
    pub backward: bool,
}

impl CpAttentionDesc {
    /// Zigzag, nothing quantised, with backward.
    pub fn new(attn: AttentionDesc) -> Self {
        Self {
            attn,
            layout: Layout::Zigzag,
            a2a_size: 1,
            fp8_kv: false,
            dkv_wire: DType::F32,
            backward: true,
        }
    }

    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// As [`AttentionDesc::check`]; `InvalidArgument` for a wire type that partial gradients cannot
    /// travel in, or an `a2a_size` that does not divide the team.
    pub fn check(&self, size: usize) -> Result<()> {
        self.attn.check()?;
        if ![DType::F32, DType::F8E4M3, DType::F8E5M2].contains(&self.dkv_wire) {
            return Err(Error::invalid("partial dK and dV cannot travel in this type")
                .expected("f32, f8e4m3 or f8e5m2")
                .seen(self.dkv_wire));
        }
        if self.a2a_size == 0 || !size.is_multiple_of(self.a2a_size) {
            return Err(Error::invalid("`a2a_size` must divide the team")
                .expected(format_args!("a divisor of {size}"))
                .seen(self.a2a_size));
        }
        Ok(())
    }

    /// Element type of K and V on the wire, and whether scales travel with them.
    pub(crate) fn kv_wire(&self) -> (DType, bool) {
        match self.fp8_kv || self.attn.dtype.is_fp8() {
            true => (DType::F8E4M3, true),
            false => (self.attn.dtype, false),
        }
    }
}

impl fmt::Display for CpAttentionDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attn, layout, a2a_size, fp8_kv, dkv_wire, backward } = self;
        write!(f, "{layout:?} a={a2a_size} kv8={fp8_kv} dkv={dkv_wire} bwd={backward} {attn}")
    }
}
