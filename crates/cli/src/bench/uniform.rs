//! Causal attention whose weights are all equal, in closed form: what `bench` compares with.
//!
//! Where all queries are zero, or all keys, row `i` of a document weighs each of its first `i + 1`
//! values with w_i = 1 / (i + 1). With the scale s, the gradients g of the output, and
//! o_i = w_i (v_0 + ... + v_i),
//!
//! - dq_i = s w_i ((sum over j <= i of k_j v_j^T) g_i - (g_i . o_i) (k_0 + ... + k_i)),
//! - dk_j = s ((sum over i >= j of w_i q_i g_i^T) v_j - sum over i >= j of
//!   w_i (g_i . o_i) q_i),
//! - dv_j = sum over i >= j of w_i g_i,
//!
//! so one sweep over the rows of a document and one back give every element of the results. Inputs
//! are -1, 0 and 1, and rows repeat after [`PERIOD`], so that a sum of products of two rows is one
//! of few terms, by how often each pair was seen. Two passes show both gradients: one of queries
//! that are zero, one of keys.

use std::thread;

use super::device::Heads;

/// Rows of inputs repeat after so many: a prime, so that tiles that are left out or taken twice see
/// other rows.
const PERIOD: usize = 29;

/// The largest relative error of a number that is rounded to bf16.
const ROUNDED: f32 = 1.0 / 512.0;

/// The side of the scores that is zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Zero {
    Queries,
    Keys,
}

/// An input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Of {
    Q = 1,
    K,
    V,
    DOut,
}

/// A pass over documents of equal rows.
pub(super) struct Uniform {
    pub heads: Heads,
    /// Rows in all, and of each document.
    pub rows: usize,
    pub doc: usize,
    pub scale: f32,
    pub zero: Zero,
    /// Global rows of this rank, in the order of its tensors.
    pub mine: Vec<usize>,
}

/// Results of this rank: `[rows, heads x width]`, and `lse` `[heads, rows]`.
pub(super) struct Results {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
}

/// Wrong elements and the largest error of a pass.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Judged {
    pub wrong: u64,
    pub worst: f64,
}

impl Judged {
    pub fn add(&mut self, other: Self) {
        self.wrong = self.wrong.saturating_add(other.wrong);
        self.worst = self.worst.max(other.worst);
    }

    /// Compares elements with `want`: within 3 % of the root of its mean square, which is several
    /// times what 8 bits of a weight cost, and a part of what one lost key or a wrong scale costs.
    fn row(&mut self, got: &[f32], want: &[f32]) {
        self.row_of_differences(got, want, &vec![0.0; want.len()]);
    }

    /// As [`Judged::row`], of elements that are differences: `lost` is what the rounding of the
    /// terms may leave where they cancel.
    fn row_of_differences(&mut self, got: &[f32], want: &[f32], lost: &[f32]) {
        let square: f32 = want.iter().map(|w| w * w).sum();
        let most = 0.03 * (square / want.len() as f32).sqrt() + 1e-4;
        let errors = got.iter().zip(want).map(|(g, w)| (g - w).abs());
        // One that is no number is not among the good ones.
        let good = errors.clone().zip(lost).filter(|(e, lost)| *e <= most + **lost).count();
        self.wrong += (want.len() - good.min(want.len())) as u64;
        self.worst = errors.map(f64::from).fold(self.worst, f64::max);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor` times `x` to `to`.
fn add(to: &mut [f32], factor: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(t, x)| *t += factor * x);
}

/// Adds rows of `table`, each times its number.
fn add_rows(to: &mut [f32], factors: impl Iterator<Item = f32>, table: &[Vec<f32>]) {
    factors.zip(table).filter(|(f, _)| *f != 0.0).for_each(|(f, row)| add(to, f, row));
}

/// The period of one head of keys and of the queries that share it.
struct Head {
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    q: Vec<Vec<Vec<f32>>>,
    d_out: Vec<Vec<Vec<f32>>>,
    /// Of each head of queries, by the rows of `d_out`: their products with each row of `v`.
    inner: Vec<Vec<Vec<f32>>>,
    /// By the rows of `v`, for each row of queries: the queries of all heads, each times the
    /// product of its `d_out` with that row of `v`.
    pulled: Vec<Vec<Vec<f32>>>,
}

/// Sums that the sweeps carry along, of one head of keys.
struct Sums {
    /// Of each row of the period: how often it was seen, or its weights together.
    seen: [f32; PERIOD],
    /// Of keys, or of queries by their weights and inner products.
    row: Vec<f32>,
    values: Vec<f32>,
}

impl Uniform {
    /// Element `col` of global row `row`: -1, 0 or 1, or the zero of this pass.
    fn value(&self, of: Of, row: usize, col: usize) -> f32 {
        let zero = match self.zero {
            Zero::Queries => Of::Q,
            Zero::Keys => Of::K,
        };
        if of == zero {
            return 0.0;
        }
        let seed = (of as u64) << 56 ^ ((row % PERIOD) as u64) << 20 ^ col as u64;
        let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as f32 % 3.0 - 1.0
    }

    fn row(&self, of: Of, row: usize, head: usize) -> Vec<f32> {
        let w = self.heads.width;
        (head * w..(head + 1) * w).map(|col| self.value(of, row, col)).collect()
    }

    /// The rows of this rank of an input.
    pub fn input(&self, of: Of) -> Vec<f32> {
        let heads = if matches!(of, Of::Q | Of::DOut) { self.heads.q } else { self.heads.kv };
        let cols = heads * self.heads.width;
        let period: Vec<Vec<f32>> =
            (0..PERIOD).map(|r| (0..cols).map(|c| self.value(of, r, c)).collect()).collect();
        self.mine.iter().flat_map(|r| &period[r % PERIOD]).copied().collect()
    }

    /// Compares the results of the forward and of the backward pass, every element.
    pub fn judge(&self, got: &Results) -> [Judged; 2] {
        let mut place = vec![None; self.rows];
        self.mine.iter().enumerate().for_each(|(at, row)| place[*row] = Some(at));
        let place = &place;
        thread::scope(|s| {
            let heads: Vec<_> =
                (0..self.heads.kv).map(|h| s.spawn(move || self.head(h, place, got))).collect();
            let mut all = [Judged::default(); 2];
            for head in heads {
                // A thread that panicked has compared nothing.
                let lost = [Judged { wrong: u64::MAX, worst: f64::INFINITY }; 2];
                let judged = head.join().unwrap_or(lost);
                all.iter_mut().zip(judged).for_each(|(a, j)| a.add(j));
            }
            all
        })
    }

    fn period(&self, head: usize) -> Head {
        let of = |of, head| (0..PERIOD).map(|row| self.row(of, row, head)).collect::<Vec<_>>();
        let (k, v) = (of(Of::K, head), of(Of::V, head));
        let q: Vec<_> = self.queries(head).map(|h| of(Of::Q, h)).collect();
        let d_out: Vec<_> = self.queries(head).map(|h| of(Of::DOut, h)).collect();
        let products = |g: &Vec<f32>| v.iter().map(|v| dot(g, v)).collect::<Vec<_>>();
        let inner: Vec<Vec<Vec<f32>>> =
            d_out.iter().map(|g| g.iter().map(products).collect()).collect();
        let pulled = |row: usize, of: usize| {
            let mut all = vec![0.0; self.heads.width];
            q.iter().zip(&inner).for_each(|(q, inner)| add(&mut all, inner[of][row], &q[of]));
            all
        };
        let pulled =
            (0..PERIOD).map(|row| (0..PERIOD).map(|of| pulled(row, of)).collect()).collect();
        Head { k, v, q, d_out, inner, pulled }
    }

    fn head(&self, head: usize, place: &[Option<usize>], got: &Results) -> [Judged; 2] {
        let (w, mut all, period) = (self.heads.width, [Judged::default(); 2], self.period(head));
        for first in (0..self.rows).step_by(self.doc) {
            let new = |values| Sums { seen: [0.0; PERIOD], row: vec![0.0; w], values };
            let mut sums = new(vec![0.0; w]);
            for i in 0..self.doc {
                self.ahead(&period, &mut sums, (head, first, i), place, (got, &mut all));
            }
            let mut sums = new(sums.values);
            let mut dv = vec![0.0; w];
            for i in (0..self.doc).rev() {
                let at = (head, first, i);
                self.back(&period, (&mut sums, &mut dv), at, place, (got, &mut all[1]));
            }
        }
        all
    }

    /// The heads of queries that share a head of keys.
    fn queries(&self, head: usize) -> impl Iterator<Item = usize> + use<> {
        let group = self.heads.q / self.heads.kv;
        head * group..(head + 1) * group
    }

    /// Row `i` of a document, forward: results, and gradients of queries.
    fn ahead(
        &self,
        period: &Head,
        sums: &mut Sums,
        (head, first, i): (usize, usize, usize),
        place: &[Option<usize>],
        (got, all): (&Results, &mut [Judged; 2]),
    ) {
        let (row, width) = (first + i, self.heads.width);
        let at_period = row % PERIOD;
        sums.seen[at_period] += 1.0;
        add(&mut sums.row, 1.0, &period.k[at_period]);
        add(&mut sums.values, 1.0, &period.v[at_period]);
        let Some(at) = place[row] else { return };
        let weight = 1.0 / (i + 1) as f32;
        let o: Vec<f32> = sums.values.iter().map(|v| weight * v).collect();
        for (h, q) in self.queries(head).enumerate() {
            let (mut dq, mut lost) = (vec![0.0; width], vec![0.0; width]);
            if self.zero == Zero::Queries {
                let (of, d_out) = (&period.inner[h][at_period], &period.d_out[h][at_period]);
                add_rows(&mut dq, sums.seen.iter().zip(of).map(|(n, x)| n * x), &period.k);
                add(&mut dq, -dot(d_out, &o), &sums.row);
                dq.iter_mut().for_each(|x| *x *= self.scale * weight);
                // Kernels take g . o of an output of 16 bits.
                let terms: f32 = d_out.iter().zip(&o).map(|(g, o)| (g * o).abs()).sum();
                let most = self.scale * weight * terms * ROUNDED;
                lost.iter_mut().zip(&sums.row).for_each(|(l, k)| *l = most * k.abs());
            }
            let from = (at * self.heads.q + q) * width;
            all[0].row(part(&got.out, from, width), &o);
            all[0].row(part(&got.lse, q * self.mine.len() + at, 1), &[((i + 1) as f32).ln()]);
            all[1].row_of_differences(part(&got.dq, from, width), &dq, &lost);
        }
    }

    /// Row `i` of a document, on the way back: gradients of keys and values.
    fn back(
        &self,
        period: &Head,
        (sums, dv): (&mut Sums, &mut [f32]),
        (head, first, i): (usize, usize, usize),
        place: &[Option<usize>],
        (got, all): (&Results, &mut Judged),
    ) {
        let (row, width) = (first + i, self.heads.width);
        let (at_period, weight) = (row % PERIOD, 1.0 / (i + 1) as f32);
        sums.seen[at_period] += weight;
        for (q, d_out) in period.q.iter().zip(&period.d_out) {
            let (q, d_out) = (&q[at_period], &d_out[at_period]);
            add(&mut sums.row, weight * weight * dot(d_out, &sums.values), q);
            add(dv, weight, d_out);
        }
        add(&mut sums.values, -1.0, &period.v[at_period]);
        let Some(at) = place[row] else { return };
        let mut dk = vec![0.0; width];
        if self.zero == Zero::Keys {
            add_rows(&mut dk, sums.seen.iter().copied(), &period.pulled[at_period]);
            add(&mut dk, -1.0, &sums.row);
            dk.iter_mut().for_each(|x| *x *= self.scale);
        }
        let from = (at * self.heads.kv + head) * width;
        all.row(part(&got.dk, from, width), &dk);
        all.row(part(&got.dv, from, width), dv);
    }
}

/// `num` elements from `from` on; none, which are all wrong, where there are fewer.
fn part(all: &[f32], from: usize, num: usize) -> &[f32] {
    all.get(from..from + num).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every result of a pass by its definition, in f64.
    fn by_definition(u: &Uniform) -> Results {
        let (h, m) = (u.heads, u.rows);
        let (w, group) = (h.width, h.q / h.kv);
        let f = |of, row, head| -> Vec<f64> {
            u.row(of, row, head).into_iter().map(f64::from).collect()
        };
        let inner = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let zeros = |heads: usize| vec![0f64; m * heads * w];
        let (mut out, mut dq) = (zeros(h.q), zeros(h.q));
        let (mut dk, mut dv) = (zeros(h.kv), zeros(h.kv));
        let mut lse = vec![0f64; h.q * m];
        for hq in 0..h.q {
            for i in 0..m {
                let first = i / u.doc * u.doc;
                let (q, d_out) = (f(Of::Q, i, hq), f(Of::DOut, i, hq));
                let seen: Vec<_> = (first..=i)
                    .map(|j| (j, f(Of::K, j, hq / group), f(Of::V, j, hq / group)))
                    .collect();
                let e: Vec<f64> = seen
                    .iter()
                    .map(|(_, k, _)| (f64::from(u.scale) * inner(&q, k)).exp())
                    .collect();
                let total: f64 = e.iter().sum();
                lse[hq * m + i] = total.ln();
                let at = (i * h.q + hq) * w;
                for ((_, _, v), e) in seen.iter().zip(&e) {
                    (0..w).for_each(|c| out[at + c] += e / total * v[c]);
                }
                let delta = inner(&d_out, &out[at..at + w]);
                for ((j, k, v), e) in seen.iter().zip(&e) {
                    let p = e / total;
                    let ds = f64::from(u.scale) * p * (inner(&d_out, v) - delta);
                    let to = (j * h.kv + hq / group) * w;
                    for c in 0..w {
                        dq[at + c] += ds * k[c];
                        dk[to + c] += ds * q[c];
                        dv[to + c] += p * d_out[c];
                    }
                }
            }
        }
        let [out, lse, dq, dk, dv] =
            [out, lse, dq, dk, dv].map(|v| v.into_iter().map(|x| x as f32).collect());
        Results { out, lse, dq, dk, dv }
    }

    fn cases() -> impl Iterator<Item = Uniform> {
        [(Zero::Queries, 72), (Zero::Keys, 72), (Zero::Queries, 36), (Zero::Keys, 8)]
            .into_iter()
            .map(|(zero, doc)| Uniform {
                heads: Heads { q: 4, kv: 2, width: 8 },
                rows: 72,
                doc,
                scale: 0.3,
                zero,
                mine: (0..72).collect(),
            })
    }

    #[test]
    fn closed_forms_are_the_definition() {
        for u in cases() {
            let judged = u.judge(&by_definition(&u));
            assert!(judged.iter().all(|j| j.wrong == 0 && j.worst < 1e-4), "{judged:?}");
        }
    }

    /// A gradient that nearly cancels: the third row of a document of the 30th head, whose three
    /// products with d_out are nearly equal. Its output is rounded to bf16 before the product.
    #[test]
    fn what_rounding_leaves_of_a_difference_is_not_wrong() {
        let heads = Heads { q: 32, kv: 8, width: 128 };
        let (zero, scale) = (Zero::Queries, 128f32.sqrt().recip());
        let u = Uniform { heads, rows: 22, doc: 11, scale, zero, mine: (0..22).collect() };
        let (row, head) = (13, 30);
        let all = by_definition(&u);
        let at = (row * heads.q + head) * heads.width;
        let g = u.row(Of::DOut, row, head);
        let moved: f32 = (g.iter().zip(&all.out[at..]))
            .map(|(g, o)| g * (f32::from_bits((o.to_bits() + 0x8000) & 0xffff_0000) - o))
            .sum();
        for (times, wrong) in [(0.0, 0), (1.0, 0), (16.0, 1)] {
            let mut got = by_definition(&u);
            for j in row - 2..=row {
                let k = u.row(Of::K, j, head / 4);
                add(&mut got.dq[at..at + heads.width], -times * moved * scale / 3.0, &k);
            }
            let judged = u.judge(&got)[1].wrong;
            assert!(if wrong == 0 { judged == 0 } else { judged > 0 }, "{times}: {judged}");
        }
        // Without the allowance the rounded ones are wrong.
        let mut without = Judged::default();
        let mut got = all.dq[at..at + heads.width].to_vec();
        for j in row - 2..=row {
            add(&mut got, -moved * scale / 3.0, &u.row(Of::K, j, head / 4));
        }
        without.row(&got, &all.dq[at..at + heads.width]);
        assert!(without.wrong > 0, "{moved}");
    }

    /// Each result is compared, each element of it, also of a rank that has some rows.
    #[test]
    fn every_element_counts() {
        for mut u in cases() {
            let all = by_definition(&u);
            u.mine = vec![70, 2, 33];
            let (h, mine) = (u.heads, u.mine.clone());
            let pick = |v: &[f32], heads: usize| -> Vec<f32> {
                let cols = heads * h.width;
                mine.iter().flat_map(|r| v[r * cols..(r + 1) * cols].to_vec()).collect()
            };
            let lse = (0..h.q).flat_map(|q| mine.iter().map(move |r| (q, *r)));
            let good = || Results {
                out: pick(&all.out, h.q),
                lse: lse.clone().map(|(q, r)| all.lse[q * u.rows + r]).collect(),
                dq: pick(&all.dq, h.q),
                dk: pick(&all.dk, h.kv),
                dv: pick(&all.dv, h.kv),
            };
            assert!(u.judge(&good()).iter().all(|j| j.wrong == 0));
            type Field = fn(&mut Results) -> &mut Vec<f32>;
            let forward: [Field; 2] = [|r| &mut r.out, |r| &mut r.lse];
            let backward: [Field; 3] = [|r| &mut r.dq, |r| &mut r.dk, |r| &mut r.dv];
            let fields = forward.map(|f| (0, f)).into_iter().chain(backward.map(|f| (1, f)));
            for (pass, field) in fields {
                let num = field(&mut good()).len();
                for i in 0..num {
                    for bad in [f32::NAN, 9.0] {
                        let mut r = good();
                        field(&mut r)[i] = bad;
                        assert_eq!(u.judge(&r)[pass].wrong, 1, "{i} of {num}");
                    }
                }
                let mut short = good();
                field(&mut short).clear();
                assert_eq!(u.judge(&short)[pass].wrong, num as u64);
            }
        }
    }
}
