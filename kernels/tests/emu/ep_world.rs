//! Layers of expert parallelism that tests run: ranks, tokens and experts, how kernels cut them,
//! where areas lie.

use tilewire_core::{DType, Rng};
use tilewire_oracle::permute::TopK;

/// A layer, and how its kernels are launched.
#[derive(Clone)]
pub struct World {
    /// Of each rank.
    pub experts: Vec<usize>,
    /// Of each rank, none with more than `max_tokens`.
    pub tokens: Vec<usize>,
    pub max_tokens: usize,
    pub k: usize,
    pub align: usize,
    pub hidden: usize,
    pub scales: usize,
    /// Types of tokens, and of results.
    pub dtype: DType,
    pub out: DType,
    /// The most rows of a capacity.
    pub most_rows: usize,
    /// Tokens of a chunk, and warps that share its rows: of a dispatch and of a combine.
    pub chunk: [usize; 2],
    pub slices: [usize; 2],
    /// Blocks of the routing, of the dispatch by bulk copies, and of the others.
    pub routers: u32,
    pub bulk: u32,
    pub sms: u32,
}

/// Which experts tokens choose.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Choices {
    /// Different ones, a fifth masked.
    Distinct,
    /// Any, so that a token has several copies at one expert, and some tokens none at all.
    Repeated,
    /// Those of one rank.
    Of(usize),
    /// None.
    Masked,
}

impl Choices {
    /// Of `tokens` tokens of a rank.
    pub fn make(self, rng: &mut Rng, world: &World, tokens: usize) -> TopK {
        let (k, num) = (world.k, world.num_experts());
        let (first, num) = match self {
            Choices::Distinct => return TopK::random(rng, (tokens, k), num, 0.2),
            Choices::Repeated => (0, num),
            Choices::Of(rank) => (world.experts[..rank].iter().sum(), world.experts[rank]),
            Choices::Masked => return TopK::new(tokens, k, vec![-1; tokens * k]),
        };
        let idx = (0..tokens * k).map(|i| {
            let e = first + rng.below(num as u64) as usize;
            let masked = self == Choices::Repeated && (i / k % 5 == 4 || rng.below(8) == 0);
            if masked { -1 } else { e as i64 }
        });
        TopK::new(tokens, k, idx.collect())
    }
}

impl World {
    /// Four ranks, three choices a token, rows of f32: what tests and mutants run if they say
    /// nothing else.
    pub fn usual(hidden: usize) -> Self {
        Self {
            experts: vec![2, 0, 2, 1],
            tokens: vec![24, 0, 13, 20],
            max_tokens: 24,
            k: 3,
            align: 8,
            hidden,
            scales: 2,
            dtype: DType::F32,
            out: DType::F32,
            most_rows: 150,
            // More tokens than a warp has at a time.
            chunk: [11; 2],
            slices: [2; 2],
            routers: 2,
            // Fewer than there are chunks: each takes several.
            bulk: 2,
            sms: 3,
        }
    }

    pub fn size(&self) -> usize {
        self.experts.len()
    }

    pub fn num_experts(&self) -> usize {
        self.experts.iter().sum()
    }

    pub fn records(&self) -> usize {
        self.size() * self.max_tokens
    }

    /// Rows that are enough for any routing.
    pub fn worst_case(&self) -> usize {
        let local = self.experts.iter().max().unwrap_or(&0);
        self.records() * self.k + local * (self.align - 1)
    }

    /// Bytes of a token, and of a result.
    pub fn payload(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    pub fn result(&self) -> usize {
        self.hidden * self.out.size()
    }

    /// Bytes from record to record: copies and scales, payload, and what returns; as
    /// `areas::strides` of the host.
    pub fn strides(&self) -> [usize; 3] {
        let up = |bytes: usize| bytes.next_multiple_of(16);
        [
            up(16 * self.k + 4 * self.scales),
            up(self.payload().max(self.result())),
            up(up(self.result()) + 4 * self.k),
        ]
    }

    pub fn chunks(&self, area: usize) -> usize {
        self.max_tokens.div_ceil(self.chunk[area]).max(1)
    }

    /// Bytes of the flags of one area.
    fn flags(&self) -> usize {
        8 * self.size() * (2 + self.chunks(0).max(self.chunks(1)))
    }

    /// Where metadata, tokens, what returns, flags of both areas, and receive buffers of a rank
    /// lie, behind the counts.
    pub fn places(&self) -> [usize; 6] {
        let [meta, row, back] = self.strides().map(|s| self.records() * s);
        let first = (16 * self.size() * self.num_experts()).next_multiple_of(512);
        let flags = first + meta + row + back;
        let rows = flags + 2 * self.flags();
        [first, first + meta, first + meta + row, flags, flags + self.flags(), rows]
    }

    /// Bytes of a receive buffer: room for the most rows of the longest.
    pub fn buffer(&self) -> usize {
        self.most_rows.max(self.records()) * self.strides()[1]
    }
}
