//! Layouts that hold each token once for each rank, however many of its experts live there.

use super::{EpLayout, EpSpec};
use crate::Mat;
use crate::mat::total;
use crate::permute::TopK;

/// A token on a rank, with all its choices that this rank serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenCopies {
    /// Source rank.
    pub src: usize,
    /// Token, counted within the source rank.
    pub token: usize,
    /// Choices served here, ascending; never empty.
    pub choices: Vec<usize>,
}

/// Rank-major fixed slots: on every rank, row `src * t_max + token` belongs to that token, and holds it
/// if any of its choices is an expert of the rank. `[rank][num_ranks * t_max]`.
///
/// Nothing is dropped: the buffer always holds every token once.
///
/// # Panics
/// If a rank has more than `t_max` tokens or an index is not an expert.
pub fn rank_major(spec: &EpSpec, topks: &[TopK], t_max: usize) -> Vec<Vec<Option<TokenCopies>>> {
    assert_eq!(topks.len(), spec.num_ranks(), "one set of choices for each rank");
    let mut ranks = vec![vec![None; spec.num_ranks() * t_max]; spec.num_ranks()];
    for (src, topk) in topks.iter().enumerate() {
        assert!(topk.num_tokens <= t_max, "{} tokens in {t_max} slots", topk.num_tokens);
        for token in 0..topk.num_tokens {
            for (rank, rows) in ranks.iter_mut().enumerate() {
                let here =
                    |j: &usize| topk.expert(token, *j).is_some_and(|e| spec.owner(e) == rank);
                let choices: Vec<usize> = (0..topk.k).filter(here).collect();
                if !choices.is_empty() {
                    rows[src * t_max + token] = Some(TokenCopies { src, token, choices });
                }
            }
        }
    }
    ranks
}

/// Flat layout of one rank, with the index that a row-gathering GEMM reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FlatRank {
    /// Each token that has a slot on the rank, once, by source rank and token. All are present.
    pub rows: Vec<Option<TokenCopies>>,
    /// For each row of the expert-major buffer the flat row that feeds it; none in empty rows.
    pub row_index: Vec<Option<usize>>,
}

/// The flat layouts that correspond to an expert-major layout (dropped copies are left out).
pub fn flat(layout: &EpLayout) -> Vec<FlatRank> {
    let one = |rows: &Vec<Option<super::Origin>>| {
        let mut origins: Vec<_> = rows.iter().flatten().copied().collect();
        origins.sort_unstable();
        let mut copies: Vec<TokenCopies> = Vec::new();
        for o in origins {
            match copies.last_mut().filter(|c| (c.src, c.token) == (o.src, o.token)) {
                Some(last) => last.choices.push(o.choice),
                None => {
                    copies.push(TokenCopies { src: o.src, token: o.token, choices: vec![o.choice] })
                }
            }
        }
        let find =
            |o: &super::Origin| copies.iter().position(|c| (c.src, c.token) == (o.src, o.token));
        let row_index = rows.iter().map(|r| r.as_ref().and_then(find)).collect();
        FlatRank { row_index, rows: copies.into_iter().map(Some).collect() }
    };
    layout.ranks.iter().map(|r| one(&r.rows)).collect()
}

/// What the rows hold after dispatch: the token, or zeros where there is none. `[rows, H]`.
///
/// # Panics
/// If `x` does not have the tokens.
pub fn gather_copies(rows: &[Option<TokenCopies>], x: &[Mat]) -> Mat {
    let cols = x.first().map_or(0, |m| m.cols);
    Mat::from_fn(rows.len(), cols, |r, c| rows[r].as_ref().map_or(0.0, |t| x[t.src].at(t.token, c)))
}

/// Sums the rows of each token over the ranks, in rank order: combine when each rank has already
/// reduced its experts. `rows[rank]` lies beside `y[rank]`, `[rows, H]`; `tokens[src]` tokens come
/// back.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_copies(rows: &[Vec<Option<TokenCopies>>], y: &[Mat], tokens: &[usize]) -> Vec<Mat> {
    assert_eq!(rows.len(), y.len(), "one buffer for each rank");
    let cols = y.first().map_or(0, |m| m.cols);
    let one = |(src, &num): (usize, &usize)| {
        Mat::from_fn(num, cols, |token, c| {
            let of_rank = |(rank, rows): (usize, &Vec<Option<TokenCopies>>)| {
                let here = |t: &Option<TokenCopies>| {
                    t.as_ref().is_some_and(|t| (t.src, t.token) == (src, token))
                };
                rows.iter().position(here).map_or(0.0, |row| y[rank].at(row, c))
            };
            total(rows.iter().enumerate().map(of_rank))
        })
    };
    tokens.iter().enumerate().map(one).collect()
}
