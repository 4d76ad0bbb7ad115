//! Packed sequences: which rows of the tensors belong together.

use std::fmt;
use std::ops::Range;

use tilewire_core::{Error, Result};

/// Rows of each sequence in the global packed tensors, and how many rows these have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sequences {
    /// Rows of `q` and `out`, padding included.
    pub tokens_q: usize,
    /// Rows of `k` and `v`, padding included.
    pub tokens_kv: usize,
    /// Rows of `q` of each sequence, ascending.
    pub q: Vec<Range<usize>>,
    /// Rows of `k` and `v` of each sequence, ascending.
    pub kv: Vec<Range<usize>>,
}

impl Sequences {
    /// One sequence.
    pub fn one(sq: usize, skv: usize) -> Self {
        Self::batched(1, sq, skv)
    }

    /// `batch` sequences of equal lengths (the layout `[batch, seq, heads, d]`).
    pub fn batched(batch: usize, sq: usize, skv: usize) -> Self {
        let ranges = |len: usize| (0..batch).map(|b| b * len..(b + 1) * len).collect();
        Self { tokens_q: batch * sq, tokens_kv: batch * skv, q: ranges(sq), kv: ranges(skv) }
    }

    /// Sequences one after the other: sequence `s` is rows `cu[s]..cu[s + 1]`.
    ///
    /// # Errors
    /// `InvalidArgument` if offsets do not start at 0, decrease, or differ in number.
    pub fn packed(cu_seqlens_q: &[usize], cu_seqlens_kv: &[usize]) -> Result<Self> {
        Self::padded((cu_seqlens_q, cu_seqlens_q), (cu_seqlens_kv, cu_seqlens_kv))
    }

    /// Sequences with padding between them: sequence `s` has `cu_seqlens[s + 1] - cu_seqlens[s]`
    /// rows from row `cu_seqlens_padded[s]` on. Each argument is `(cu_seqlens, cu_seqlens_padded)`.
    ///
    /// # Errors
    /// `InvalidArgument` if offsets do not start at 0, decrease, differ in number, or a sequence
    /// does not fit its padded rows.
    pub fn padded(q: (&[usize], &[usize]), kv: (&[usize], &[usize])) -> Result<Self> {
        let (rq, rkv) = (ranges("q", q)?, ranges("kv", kv)?);
        if rq.len() != rkv.len() {
            return Err(Error::invalid("the numbers of query and key sequences must be equal")
                .expected(rq.len())
                .seen(rkv.len()));
        }
        let last = |cu: &[usize]| cu.last().copied().unwrap_or(0);
        Ok(Self { tokens_q: last(q.1), tokens_kv: last(kv.1), q: rq, kv: rkv })
    }

    /// The longest query and key lengths.
    pub fn longest(&self) -> (usize, usize) {
        let most = |r: &[Range<usize>]| r.iter().map(Range::len).max().unwrap_or(0);
        (most(&self.q), most(&self.kv))
    }

    pub(super) fn check(&self) -> Result<()> {
        for (what, ranges, tokens) in
            [("q", &self.q, self.tokens_q), ("kv", &self.kv, self.tokens_kv)]
        {
            let mut end = 0;
            for r in ranges {
                if r.start < end || r.end < r.start || r.end > tokens {
                    return Err(Error::invalid(format!("sequences of `{what}` must ascend"))
                        .expected(format_args!("a range in {end}..{tokens}"))
                        .seen(format_args!("{r:?}")));
                }
                end = r.end;
            }
        }
        if self.q.len() != self.kv.len() {
            return Err(Error::invalid("the numbers of query and key sequences must be equal")
                .expected(self.q.len())
                .seen(self.kv.len()));
        }
        Ok(())
    }
}

impl fmt::Display for Sequences {
    /// Row counts and a digest: equal text means equal sequences.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut h = blake3::Hasher::new();
        for r in self.q.iter().chain(&self.kv) {
            h.update(&(r.start as u64).to_le_bytes());
            h.update(&(r.end as u64).to_le_bytes());
        }
        let hex = h.finalize().to_hex();
        write!(f, "{}x{}/{}:{}", self.tokens_q, self.tokens_kv, self.q.len(), &hex[..16])
    }
}

fn ranges(what: &str, (cu, padded): (&[usize], &[usize])) -> Result<Vec<Range<usize>>> {
    let bad = |text: &str, seen: &[usize]| {
        Err(Error::invalid(format!("cu_seqlens of `{what}`: {text}"))
            .seen(format_args!("{seen:?}")))
    };
    if cu.len() != padded.len() {
        return bad("the numbers of offsets and of padded offsets must be equal", padded);
    }
    if cu.first() != Some(&0) || padded.first() != Some(&0) {
        return bad("the first offset must be 0", if cu.first() == Some(&0) { padded } else { cu });
    }
    let mut out = Vec::with_capacity(cu.len() - 1);
    for (c, p) in cu.windows(2).zip(padded.windows(2)) {
        if c[0] > c[1] {
            return bad("offsets must not decrease", c);
        }
        if p[0] > p[1] || c[1] - c[0] > p[1] - p[0] {
            return bad("a sequence does not fit its padded rows", p);
        }
        out.push(p[0]..p[0] + (c[1] - c[0]));
    }
    Ok(out)
}

/// Returns, for each row of `spans`, whether it belongs to a sequence.
pub(crate) fn in_sequence(spans: &[std::ops::Range<usize>], seqs: &Sequences) -> Vec<bool> {
    let row = |r: usize| {
        let s = seqs.q.partition_point(|s| s.end <= r);
        seqs.q.get(s).is_some_and(|s| s.contains(&r))
    };
    spans.iter().flat_map(|s| s.clone().map(row)).collect()
}
