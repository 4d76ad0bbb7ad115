//! The description of an expert-parallel layer: experts, sizes, types, layout.

use std::fmt;

use tilewire_core::{DType, Error, Result};

/// Order of the rows that `dispatch` delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum EpLayout {
    /// Expert after expert, each padded with zero rows to a multiple of `align`: a row per copy.
    ExpertMajor {
        /// Rows of each expert are a multiple of this.
        align: usize,
    },
    /// A fixed slot `[source rank][token]` for each token of each rank, `max_tokens` a rank: a row
    /// per (token, rank), zero for tokens without an expert here.
    RankMajor {
        /// Alignment of the expert-major order that `row_index` describes.
        align: usize,
    },
    /// Rows one after the other without gaps, by source rank and token: a row per (token, rank).
    Flat {
        /// Alignment of the expert-major order that `row_index` describes.
        align: usize,
    },
}

impl EpLayout {
    /// Returns the alignment of the expert-major order.
    pub fn align(self) -> usize {
        match self {
            EpLayout::ExpertMajor { align }
            | EpLayout::RankMajor { align }
            | EpLayout::Flat { align } => align,
        }
    }
}

/// The treatment of copies beyond the capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Overflow {
    /// They are left out; the handle has the true counts.
    Drop,
    /// They are left out, and `EpHandle::check` is an error with the true counts.
    Error,
}

/// An expert-parallel layer. Equal on all ranks.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct EpDesc {
    /// Experts of each rank; global expert numbers run over the ranks in order.
    pub experts_per_rank: Vec<usize>,
    /// The most tokens of a rank.
    pub max_tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// The most expert-major rows that a rank receives.
    pub capacity: usize,
    /// Element type of dispatched tokens: f32, bf16, f16 or FP8.
    pub dtype: DType,
    /// f32 scales per token that travel with FP8 tokens (0: none).
    pub num_scales: usize,
    /// Element type of expert outputs, results and all gradients: f32, bf16 or f16.
    pub out: DType,
    /// Order of the received rows.
    pub layout: EpLayout,
    /// The treatment of copies beyond the capacity.
    pub overflow: Overflow,
}

impl EpDesc {
    /// Experts divided evenly, space for every copy, expert-major without alignment.
    pub fn new(
        size: usize,
        num_experts: usize,
        max_tokens: usize,
        hidden: usize,
        top_k: usize,
    ) -> Self {
        let experts_per_rank: Vec<usize> =
            (0..size).map(|r| num_experts / size + usize::from(r < num_experts % size)).collect();
        let mut d = Self {
            experts_per_rank,
            max_tokens,
            hidden,
            top_k,
            capacity: 0,
            dtype: DType::F32,
            num_scales: 0,
            out: DType::F32,
            layout: EpLayout::ExpertMajor { align: 1 },
            overflow: Overflow::Drop,
        };
        d.capacity = d.worst_case();
        d
    }

    /// Returns the rows that are enough for any routing: every copy, and padding for every local
    /// expert.
    pub fn worst_case(&self) -> usize {
        let local = self.experts_per_rank.iter().copied().max().unwrap_or(0);
        let copies = self.experts_per_rank.len() * self.max_tokens * self.top_k;
        copies + local * (self.layout.align() - 1)
    }

    /// Returns the number of experts.
    pub fn num_experts(&self) -> usize {
        self.experts_per_rank.iter().sum()
    }

    /// Returns the first expert of `rank`.
    pub fn first_expert(&self, rank: usize) -> usize {
        self.experts_per_rank[..rank].iter().sum()
    }

    /// Returns the rows that `dispatch` delivers on a rank of a team of `size`.
    pub fn recv_rows(&self) -> usize {
        match self.layout {
            EpLayout::ExpertMajor { .. } => self.capacity,
            _ => self.experts_per_rank.len() * self.max_tokens,
        }
    }

    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field that does not fit.
    pub fn check(&self, size: usize) -> Result<()> {
        let bad = |text: String| Err(Error::invalid(text).op("ep"));
        if self.experts_per_rank.len() != size {
            return bad(format!(
                "experts are given for {} ranks, but the team has {size}",
                self.experts_per_rank.len()
            ));
        }
        if self.num_experts() == 0 || self.top_k == 0 || self.top_k > 32 {
            return bad(format!(
                "{} experts with top_k {} are not possible: there must be at least one expert, and \
                 top_k must be 1 to 32",
                self.num_experts(),
                self.top_k
            ));
        }
        if self.layout.align() == 0 {
            return bad("the alignment must be positive".to_owned());
        }
        // Within these no size in bytes overflows, and row numbers fit in an i32.
        for (name, v, limit) in [
            ("max_tokens", self.max_tokens, 1usize << 31),
            ("capacity", self.capacity, 1 << 31),
            ("hidden", self.hidden, 1 << 20),
            ("num_scales", self.num_scales, 1 << 20),
            ("experts", self.num_experts(), 1 << 20),
            ("alignment", self.layout.align(), 1 << 31),
        ] {
            if v >= limit {
                return bad(format!("{name} is {v}, but must be less than {limit}"));
            }
        }
        let payload =
            matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) || self.dtype.is_fp8();
        if !payload || !matches!(self.out, DType::F32 | DType::BF16 | DType::F16) {
            return bad(format!(
                "tokens cannot be {} with outputs {}: tokens are f32, bf16, f16 or FP8, outputs \
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

impl fmt::Display for EpDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "E={:?} T={} H={} k={} cap={} {}+{}->{} {:?} {:?}",
            self.experts_per_rank,
            self.max_tokens,
            self.hidden,
            self.top_k,
            self.capacity,
            self.dtype,
            self.num_scales,
            self.out,
            self.layout,
            self.overflow
        )
    }
}
