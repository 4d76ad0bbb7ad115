//! The description of a context-parallel attention: shapes, types, layout.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{DType, Error, Rank, Result};

use super::balanced;
use super::work::extents;
use crate::attention::{AttentionDesc, AttnMask, HeadScales, Sequences};
use crate::common::part;

/// The rows of the global tensors that a rank holds. Queries and keys are divided alike, each by
/// its own number of rows; padding counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// `2 P` chunks whose sizes differ by at most one (larger ones first, some may be empty); rank
    /// `r` holds chunk `r` and then chunk `2 P - 1 - r`, so that causal work is even.
    Zigzag,
    /// As `Zigzag`, with each sequence on its own, sequence after sequence: rank `r` holds chunks
    /// `r` and `2 P - 1 - r` of the first sequence, then those of the second. TransformerEngine and
    /// Megatron divide packed sequences this way. The padding behind a sequence belongs to it; with
    /// it, the sequence has a multiple of `2 P` rows, unless there is only one rank.
    ZigzagPerSequence,
    /// `P` chunks; rank `r` holds chunk `r`.
    Contiguous,
    /// Equally many rows for each rank, and equally many visible pairs, of any sequences and under
    /// any mask: at most 1.05 times the mean, wherever no query sees more than a hundredth of it.
    /// Ranks hold whole sequences where those fill them evenly. Otherwise they hold at most
    /// `2 P - 1` runs of rows in all, which are cut in multiples of 128 rows of a sequence where
    /// lengths allow. Keys are where their queries are; where keys have other sequences than
    /// queries, they are in `P` chunks.
    Balanced,
}

impl Layout {
    /// All values with their names.
    pub const NAMES: [(&'static str, Layout); 4] = [
        ("zigzag", Layout::Zigzag),
        ("zigzag_per_sequence", Layout::ZigzagPerSequence),
        ("contiguous", Layout::Contiguous),
        ("balanced", Layout::Balanced),
    ];

    /// Returns the global rows of the queries of `rank`, in the order of its local tensor. All
    /// ranks have equally many spans, some of which may be empty. They hold every row once, also
    /// where [`Layout::check`] fails. Only [`Layout::Balanced`] looks at the mask.
    pub fn rows_q(
        self,
        s: &Sequences,
        mask: &AttnMask,
        rank: Rank,
        size: usize,
    ) -> Vec<Range<usize>> {
        match self {
            Layout::Balanced => balanced::divided(s, mask, size)[rank.idx()].clone(),
            _ => self.cut(s.tokens_q, &s.q, rank, size),
        }
    }

    /// Returns the global rows of the keys of `rank` as [`Layout::rows_q`] those of its queries.
    pub fn rows_kv(
        self,
        s: &Sequences,
        mask: &AttnMask,
        rank: Rank,
        size: usize,
    ) -> Vec<Range<usize>> {
        match self {
            Layout::Balanced if s.tokens_q == s.tokens_kv && s.q == s.kv => {
                self.rows_q(s, mask, rank, size)
            }
            Layout::Balanced => Layout::Contiguous.cut(s.tokens_kv, &s.kv, rank, size),
            _ => self.cut(s.tokens_kv, &s.kv, rank, size),
        }
    }

    /// Returns the rows of `rank` of `tokens` rows with these sequences, by a layout that divides
    /// each side by itself.
    fn cut(
        self,
        tokens: usize,
        sequences: &[Range<usize>],
        rank: Rank,
        size: usize,
    ) -> Vec<Range<usize>> {
        let two = |rows: Range<usize>| {
            [rank.idx(), 2 * size - 1 - rank.idx()].map(|chunk| {
                let p = part(rows.len(), chunk, 2 * size);
                rows.start + p.start..rows.start + p.end
            })
        };
        match self {
            Layout::Zigzag => two(0..tokens).to_vec(),
            Layout::ZigzagPerSequence => extents(tokens, sequences).flat_map(two).collect(),
            Layout::Contiguous | Layout::Balanced => vec![part(tokens, rank.idx(), size)],
        }
    }

    /// Checks that `size` ranks can divide these sequences.
    ///
    /// # Errors
    /// `InvalidArgument` that names the sequence which [`Layout::ZigzagPerSequence`] cannot cut
    /// into `2 P` equal chunks, and its length.
    pub fn check(self, s: &Sequences, size: usize) -> Result<()> {
        if self != Layout::ZigzagPerSequence || size == 1 {
            return Ok(());
        }
        let chunks = 2 * size;
        for (what, tokens, sequences) in [("q", s.tokens_q, &s.q), ("kv", s.tokens_kv, &s.kv)] {
            let odd = |(_, rows): &(usize, Range<usize>)| !rows.len().is_multiple_of(chunks);
            if let Some((i, rows)) = extents(tokens, sequences).enumerate().find(odd) {
                return Err(Error::invalid(format!(
                    "sequence {i} of `{what}` cannot be cut into {chunks} equal chunks"
                ))
                .expected(format_args!("a multiple of {chunks} (2 P) rows, padding included"))
                .seen(format_args!("{} rows, {rows:?}", rows.len()))
                .hint("pad the sequence, or use the layout `zigzag`"));
            }
        }
        Ok(())
    }

    /// Returns the most rows any rank has for up to `tokens` rows.
    pub fn max_rows(self, tokens: usize, size: usize) -> usize {
        match self {
            Layout::Zigzag | Layout::ZigzagPerSequence => 2 * tokens.div_ceil(2 * size),
            Layout::Contiguous | Layout::Balanced => tokens.div_ceil(size),
        }
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, l)| *l).ok_or_else(|| {
            let names = Self::NAMES.map(|(n, _)| n).join(", ");
            Error::invalid(format!("unknown layout `{s}`; one of {names}"))
        })
    }
}

/// Attention over rows that are divided among the ranks of a team. Equal on all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct CpAttentionDesc {
    /// The attention; rows and sequences are global.
    pub attn: AttentionDesc,
    /// The distribution of rows over ranks.
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
    /// Describes attention in the zigzag layout, unquantised, with backward.
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
    /// As [`AttentionDesc::check`] and [`Layout::check`]; `InvalidArgument` for a type in which
    /// partial gradients cannot travel, or an `a2a_size` that does not divide the team.
    pub fn check(&self, size: usize) -> Result<()> {
        self.attn.check()?;
        if self.attn.scales != HeadScales::Token {
            return Err(Error::invalid("scales of several tokens cannot be divided among ranks")
                .expected("a scale for each token and head (`HeadScales::Token`)")
                .seen(format_args!("{:?}", self.attn.scales)));
        }
        self.layout.check(&self.attn.sequences, size)?;
        if ![DType::F32, DType::F8E4M3, DType::F8E5M2].contains(&self.dkv_wire) {
            return Err(Error::invalid("partial dK and dV cannot be sent in this type")
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

    /// Checks the sequences of one launch for a team of `size` ranks.
    ///
    /// # Errors
    /// As [`AttentionDesc::check_launch`] and [`Layout::check`].
    pub fn check_launch(&self, s: &Sequences, size: usize) -> Result<()> {
        self.attn.check_launch(s)?;
        self.layout.check(s, size)
    }

    /// Returns the global rows of the queries of `rank`.
    pub(super) fn rows_q(&self, s: &Sequences, rank: Rank, size: usize) -> Vec<Range<usize>> {
        self.layout.rows_q(s, &self.attn.mask, rank, size)
    }

    /// Returns the global rows of the keys of `rank`.
    pub(super) fn rows_kv(&self, s: &Sequences, rank: Rank, size: usize) -> Vec<Range<usize>> {
        self.layout.rows_kv(s, &self.attn.mask, rank, size)
    }

    /// Returns the element type of K and V on the wire, and whether scales travel with them.
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
