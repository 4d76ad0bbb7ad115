//! Layouts that hold each token once for each rank, however many of its experts live there.

use super::{EpLayout, EpSpec};
use crate::Mat;
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

/// Rank-major fixed slots: on every rank, row `src * t_max + token` belongs to that token, and
/// holds it if any of its choices is an expert of the rank. `[rank][num_ranks * t_max]`.
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
        // Ascending, as the origins were.
        let find = |o: &super::Origin| {
            copies.binary_search_by_key(&(o.src, o.token), |c| (c.src, c.token)).ok()
        };
        let row_index = rows.iter().map(|r| r.as_ref().and_then(find)).collect();
        FlatRank { row_index, rows: copies.into_iter().map(Some).collect() }
    };
    layout.ranks.iter().map(|r| one(&r.rows)).collect()
}

/// Returns what the rows hold after dispatch: the token, or zeros where there is none. `[rows, H]`.
///
/// # Panics
/// If `x` does not have the tokens.
pub fn gather_copies(rows: &[Option<TokenCopies>], x: &[Mat]) -> Mat {
    let cols = x.first().map_or(0, |m| m.cols);
    Mat::from_rows(rows.len(), cols, |r, out| {
        if let Some(t) = &rows[r] {
            out.copy_from_slice(x[t.src].row(t.token));
        }
    })
}

/// Sums the rows of each token over the ranks, in rank order: combine when each rank has already
/// reduced its experts. `rows[rank]` lies beside `y[rank]`, `[rows, H]`; `tokens[src]` tokens come
/// back.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_copies(rows: &[Vec<Option<TokenCopies>>], y: &[Mat], tokens: &[usize]) -> Vec<Mat> {
    (0..tokens.len()).map(|src| combine_copies_at(rows, y, tokens, src)).collect()
}

/// [`combine_copies`] at one source rank.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_copies_at(
    rows: &[Vec<Option<TokenCopies>>],
    y: &[Mat],
    tokens: &[usize],
    src: usize,
) -> Mat {
    assert_eq!(rows.len(), y.len(), "one buffer for each rank");
    let cols = y.first().map_or(0, |m| m.cols);
    // Of each token the first row on each rank, in rank order.
    let mut places = vec![Vec::new(); tokens[src]];
    for (rank, rows) in rows.iter().enumerate() {
        for (row, t) in rows.iter().enumerate() {
            let place = t.as_ref().filter(|t| t.src == src).and_then(|t| places.get_mut(t.token));
            if let Some(place) = place.filter(|p| p.last().is_none_or(|(r, _)| *r != rank)) {
                place.push((rank, row));
            }
        }
    }
    Mat::from_rows(tokens[src], cols, |token, out| {
        for &(rank, row) in &places[token] {
            out.iter_mut().zip(y[rank].row(row)).for_each(|(sum, v)| *sum += v);
        }
    })
}
