use tilewire_oracle::Mat;
use tilewire_oracle::ep::{
    EpLayout, EpSpec, Origin, combine, combine_bwd, combine_copies, dispatch, dispatch_bwd,
    dispatch_weights, flat, gather_copies, rank_major,
};
use tilewire_oracle::permute::TopK;

use crate::ep::problem;
use crate::{assert_close, assert_grad, rng};

const H: usize = 2;

struct Case {
    spec: EpSpec,
    topks: Vec<TopK>,
    layout: EpLayout,
    x: Vec<Mat>,
    weights: Vec<Mat>,
    y: Vec<Mat>,
}

fn case(seed: u64, num_ranks: usize, capacity: Option<usize>) -> Case {
    let (spec, topks) = problem(seed, num_ranks, 2, capacity);
    let layout = EpLayout::new(&spec, &topks);
    let mut r = rng(seed ^ 77);
    let mut tokens = |cols: usize| -> Vec<Mat> {
        topks.iter().map(|t| Mat::random(&mut r, t.num_tokens, cols)).collect()
    };
    let (x, weights) = (tokens(H), tokens(layout.k));
    let y = layout.ranks.iter().map(|d| Mat::random(&mut r, d.rows.len(), H)).collect();
    Case { spec, topks, layout, x, weights, y }
}

fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for seed in 0..24 {
        for num_ranks in [1, 3, 4] {
            all.push(case(seed, num_ranks, (seed % 2 == 0).then_some(6)));
        }
    }
    all
}

fn dots(a: &[Mat], b: &[Mat]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a.dot(b)).sum()
}

/// `blocks` with block `i` replaced.
fn with(blocks: &[Mat], i: usize, m: &Mat) -> Vec<Mat> {
    let mut all = blocks.to_vec();
    all[i] = m.clone();
    all
}

#[test]
fn dispatch_puts_tokens_and_weights_where_the_layout_says() {
    for c in cases() {
        let (recv, weights) = (dispatch(&c.layout, &c.x), dispatch_weights(&c.layout, &c.weights));
        for (rank, dest) in c.layout.ranks.iter().enumerate() {
            for (row, origin) in dest.rows.iter().enumerate() {
                let (want, w) = match origin {
                    Some(o) => {
                        (c.x[o.src].row(o.token).to_vec(), c.weights[o.src].at(o.token, o.choice))
                    }
                    None => (vec![0.0; H], 0.0),
                };
                assert_eq!((recv[rank].row(row), weights[rank][row]), (&want[..], w));
            }
        }
    }
}

#[test]
fn combine_sums_the_copies_that_have_a_slot() {
    for c in cases() {
        for weights in [None, Some(&c.weights[..])] {
            let got = combine(&c.layout, &c.y, weights);
            // Scatter instead of gather: walk the rows and add each to its token.
            let mut want: Vec<Mat> = c.x.iter().map(|x| Mat::zeros(x.rows, H)).collect();
            for (rank, dest) in c.layout.ranks.iter().enumerate() {
                for (row, o) in dest.rows.iter().enumerate().filter_map(|(i, o)| o.map(|o| (i, o)))
                {
                    let w = weights.map_or(1.0, |w| w[o.src].at(o.token, o.choice));
                    for col in 0..H {
                        *want[o.src].at_mut(o.token, col) += w * c.y[rank].at(row, col);
                    }
                }
            }
            for (got, want) in got.iter().zip(&want) {
                assert_close("combine", got, want);
            }
        }
    }
}

#[test]
fn gradients() {
    for c in cases() {
        let mut r = rng(5);
        let mut like = |blocks: &[Mat]| -> Vec<Mat> {
            blocks.iter().map(|b| Mat::random(&mut r, b.rows, b.cols)).collect()
        };
        let (d_recv, d_out) = (like(&c.y), like(&c.x));
        let d_recv_weights: Vec<Vec<f64>> =
            d_recv.iter().map(|d| d.slice_cols(0..1).data).collect();
        let back = dispatch_bwd(&c.layout, &d_recv, Some(&d_recv_weights));
        let dw = back.dw.unwrap();
        let weight_loss = |w: &[Mat]| -> f64 {
            let pairs = dispatch_weights(&c.layout, w).concat();
            pairs.iter().zip(d_recv_weights.concat()).map(|(a, b)| a * b).sum()
        };
        let plain = combine_bwd(&c.layout, &c.y, None, &d_out);
        let weighted = combine_bwd(&c.layout, &c.y, Some(&c.weights), &d_out);
        assert!(plain.dw.is_none());
        let cw = weighted.dw.unwrap();
        for s in 0..c.x.len() {
            assert_grad("dx", &back.dx[s], &c.x[s], |x| {
                dots(&dispatch(&c.layout, &with(&c.x, s, x)), &d_recv)
            });
            assert_grad("routed weights", &dw[s], &c.weights[s], |w| {
                weight_loss(&with(&c.weights, s, w))
            });
            assert_grad("combine weights", &cw[s], &c.weights[s], |w| {
                dots(&combine(&c.layout, &c.y, Some(&with(&c.weights, s, w))), &d_out)
            });
            assert_grad("dy", &plain.dy[s], &c.y[s], |y| {
                dots(&combine(&c.layout, &with(&c.y, s, y), None), &d_out)
            });
            assert_grad("weighted dy", &weighted.dy[s], &c.y[s], |y| {
                dots(&combine(&c.layout, &with(&c.y, s, y), Some(&c.weights)), &d_out)
            });
        }
    }
}

#[test]
fn identity_experts_return_the_token_times_its_weights() {
    for c in cases() {
        let out = combine(&c.layout, &dispatch(&c.layout, &c.x), Some(&c.weights));
        for (src, topk) in c.topks.iter().enumerate() {
            let sums = Mat::from_fn(topk.num_tokens, 1, |token, _| {
                let placed =
                    |&choice: &usize| c.layout.slot(Origin { src, token, choice }).is_some();
                (0..topk.k)
                    .filter(placed)
                    .map(|j| c.weights[src].at(token, j))
                    .fold(0.0, |a, b| a + b)
            });
            assert_close("identity", &out[src], &c.x[src].scale_rows(&sums.data));
        }
    }
}

#[test]
fn flat_rows_feed_the_expert_major_buffer_and_combine_to_the_same() {
    for c in cases() {
        let recv = dispatch(&c.layout, &c.x);
        let flats = flat(&c.layout);
        let mut reduced = Vec::new();
        for (rank, f) in flats.iter().enumerate() {
            let rows = gather_copies(&f.rows, &c.x);
            for (row, index) in f.row_index.iter().enumerate() {
                if let Some(i) = index {
                    assert_eq!(recv[rank].row(row), rows.row(*i));
                }
            }
            // Each rank adds up its experts' rows of a token before sending one row home.
            let mut sum = Mat::zeros(f.rows.len(), H);
            for (row, index) in f.row_index.iter().enumerate() {
                for col in 0..H {
                    if let Some(i) = index {
                        *sum.at_mut(*i, col) += c.y[rank].at(row, col);
                    }
                }
            }
            reduced.push(sum);
        }
        let rows: Vec<_> = flats.iter().map(|f| f.rows.clone()).collect();
        let got = combine_copies(&rows, &reduced, &c.layout.tokens);
        for (got, want) in got.iter().zip(&combine(&c.layout, &c.y, None)) {
            assert_close("two-level combine", got, want);
        }
    }
}

#[test]
fn rank_major_counts_the_ranks_of_each_token() {
    for c in cases() {
        let ranks = rank_major(&c.spec, &c.topks, 9);
        let y: Vec<Mat> = ranks.iter().map(|rows| gather_copies(rows, &c.x)).collect();
        let back = combine_copies(&ranks, &y, &c.layout.tokens);
        for (src, topk) in c.topks.iter().enumerate() {
            let distinct = |t: usize| {
                let mut owners: Vec<_> = (0..topk.k)
                    .filter_map(|j| topk.expert(t, j))
                    .map(|e| c.spec.owner(e))
                    .collect();
                owners.sort_unstable();
                owners.dedup();
                owners.len() as f64
            };
            let counts: Vec<f64> = (0..topk.num_tokens).map(distinct).collect();
            assert_close("one copy for each rank", &back[src], &c.x[src].scale_rows(&counts));
        }
    }
}
