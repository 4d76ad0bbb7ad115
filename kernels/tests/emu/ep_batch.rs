//! A routing of expert parallelism with its data, and what must come of it by the oracle and the host's arithmetic.

use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_oracle::ep::{EpLayout, EpSpec};
use tilewire_oracle::permute::TopK;

use crate::ep::{ALIGN, EXPERTS, K, NUM, RANKS, RECORDS, SCALES, Side, TOKENS, filled, poisoned};

/// A routing with its data, and what must come of it.
pub struct Batch {
    want: EpLayout,
    x: Vec<Vec<f32>>,
    w: Vec<Vec<f32>>,
    y: Vec<Vec<f32>>,
    scales: Vec<Vec<f32>>,
    pub sides: Vec<Side>,
    pub capacity: usize,
    /// A row for each (token, rank), at the record's place, not one for each copy.
    pub rank_major: bool,
    /// Neither weights nor scales, and no index: gradients.
    pub rows_only: bool,
}

pub fn batch(seed: u64, capacity: usize, hidden: usize) -> Batch {
    batch_of(seed, capacity, hidden, false)
}

/// Of either layout.
pub fn batch_of(seed: u64, capacity: usize, hidden: usize, rank_major: bool) -> Batch {
    // Rows that a rank receives.
    let received = if rank_major { RECORDS } else { capacity };
    let mut rng = Rng::new(seed);
    let tokens = [TOKENS, 0, 13, 20];
    let topks: Vec<TopK> =
        tokens.iter().map(|&t| TopK::random(&mut rng, (t, K), NUM, 0.2)).collect();
    let spec =
        EpSpec { experts_per_rank: EXPERTS.to_vec(), align: ALIGN, capacity: Some(capacity) };
    // Negative zeros among them: a sum that begins with 0 has none.
    let mut some = |n: usize| -> Vec<f32> {
        let one = |i: usize, v: f32| if i % 4 == 3 { -0.0 } else { v };
        (0..n).map(|i| one(i, rng.normal())).collect()
    };
    let x: Vec<Vec<f32>> = tokens.iter().map(|t| some(t * hidden)).collect();
    let w: Vec<Vec<f32>> = tokens.iter().map(|t| some(t * K)).collect();
    let y: Vec<Vec<f32>> = (0..RANKS).map(|_| some(received * hidden)).collect();
    let scales: Vec<Vec<f32>> = tokens.iter().map(|t| some(t * SCALES)).collect();
    let ints = [4 * TOKENS * K, 4 * TOKENS * K, 4 * RECORDS, 16 * RECORDS * K];
    let sides = (0..RANKS).map(|r| {
        let local = 8 * EXPERTS[r].max(1);
        let rest = [4 * capacity, 4 * RECORDS, local, local, 8, 8, 8 * RANKS];
        Side {
            handle: ints.into_iter().chain(rest).map(poisoned).collect(),
            idx: filled(&topks[r].idx),
            x: filled(&x[r]),
            w: filled(&w[r]),
            recv: poisoned(4 * received * hidden),
            recv_w: poisoned(4 * capacity),
            scales: filled(&scales[r]),
            recv_scales: poisoned(4 * received * SCALES),
            index: poisoned(4 * capacity),
            y: filled(&y[r]),
            out: poisoned(4 * tokens[r] * hidden),
            tokens: tokens[r],
        }
    });
    let sides = sides.collect();
    let want = EpLayout::new(&spec, &topks);
    Batch { want, x, w, y, scales, sides, capacity, rank_major, rows_only: false }
}

impl Batch {
    pub fn routed(&self) {
        let want = &self.want;
        let lost: Vec<i64> =
            want.ranks.iter().map(|r| r.overflow.iter().sum::<usize>() as i64).collect();
        for (r, s) in self.sides.iter().enumerate() {
            let ints = |i: usize| s.handle[i].read::<i64>();
            let (rank, n) = (&want.ranks[r], EXPERTS[r]);
            let counts: Vec<i64> = rank.counts.iter().map(|&c| c as i64).collect();
            let splits: Vec<i64> = rank.m_splits().iter().map(|&c| c as i64).collect();
            assert_eq!((&ints(6)[..n], &ints(7)[..n]), (&counts[..], &splits[..]), "rank {r}");
            assert_eq!(ints(8), [rank.total_padded() as i64]);
            assert_eq!((ints(9)[0], ints(10)), (lost[r], lost.clone()));
            let rows = s.handle[0].read::<i32>();
            let row =
                |s: &Option<tilewire_oracle::ep::Slot>| s.as_ref().map_or(-1, |s| s.row as i32);
            let kept: Vec<i32> = want.slots[r].iter().map(row).collect();
            assert_eq!(rows[..kept.len()], kept, "rows of rank {r}");
        }
    }

    pub fn dispatched(&self, hidden: usize) {
        self.dispatched_to(hidden, |s, _, used| s.recv.read::<f32>()[..used].to_vec());
    }

    /// What the handle keeps of the records that came.
    pub fn counted(&self) {
        for (r, s) in self.sides.iter().enumerate() {
            let (mut num, mut place) = (vec![0u32; RECORDS], vec![-1i32; RECORDS]);
            for (src, slots) in self.want.slots.iter().enumerate() {
                for (i, slot) in slots.iter().enumerate() {
                    if slot.as_ref().is_some_and(|s| s.rank == r) {
                        let record = src * TOKENS + i / K;
                        num[record] += 1;
                        place[record] = record as i32;
                    }
                }
            }
            assert_eq!(s.handle[2].read::<u32>(), num, "copies of the records at {r}");
            if self.rank_major {
                assert_eq!(s.handle[5].read::<i32>(), place, "rows of the records at {r}");
            }
        }
    }

    /// `read` gives the first elements of what a rank has received.
    pub fn dispatched_to(&self, hidden: usize, read: impl Fn(&Side, usize, usize) -> Vec<f32>) {
        self.counted();
        let (want, capacity) = (&self.want, self.capacity);
        let received = if self.rank_major { RECORDS } else { capacity };
        for (r, s) in self.sides.iter().enumerate() {
            let (mut rows, mut weights) = (vec![0.0f32; received * hidden], vec![0.0f32; capacity]);
            let mut index = vec![-1i32; capacity];
            let mut scales = vec![0.0f32; received * SCALES];
            for (src, slots) in want.slots.iter().enumerate() {
                for (i, slot) in slots.iter().enumerate() {
                    let Some(slot) = slot.as_ref().filter(|s| s.rank == r) else { continue };
                    let record = src * TOKENS + i / K;
                    let row = if self.rank_major { record } else { slot.row };
                    let from = &self.x[src][i / K * hidden..][..hidden];
                    rows[row * hidden..][..hidden].copy_from_slice(from);
                    weights[slot.row] = self.w[src][i];
                    let from = &self.scales[src][i / K * SCALES..][..SCALES];
                    scales[row * SCALES..][..SCALES].copy_from_slice(from);
                    index[slot.row] = row as i32;
                }
            }
            // Behind the rows of all experts nothing is promised.
            let experts = want.ranks[r].m_splits().iter().sum::<usize>();
            let used = if self.rank_major { RECORDS } else { experts };
            assert!(read(s, r, used * hidden) == rows[..used * hidden], "received by {r}");
            if self.rows_only {
                continue;
            }
            let got = s.recv_scales.read::<f32>();
            assert_eq!(got[..used * SCALES], scales[..used * SCALES], "scales of {r}");
            assert_eq!(s.recv_w.read::<f32>(), weights, "weights of {r}");
            assert_eq!(s.index.read::<i32>(), index, "index of {r}");
        }
    }

    pub fn combined(&self, hidden: usize) {
        for (r, s) in self.sides.iter().enumerate() {
            let mut out = vec![0.0f32; s.tokens * hidden];
            for t in 0..s.tokens {
                let mut begun = false;
                for (home, y) in self.y.iter().enumerate() {
                    let mut part = vec![0.0f32; hidden];
                    let mut any = false;
                    for j in 0..K {
                        let slot = self.want.slots[r][t * K + j].as_ref();
                        let Some(slot) = slot.filter(|s| s.rank == home) else { continue };
                        // Rank-major the rows are sums already.
                        if self.rank_major && any {
                            continue;
                        }
                        let first = !std::mem::replace(&mut any, true);
                        let row = if self.rank_major { r * TOKENS + t } else { slot.row };
                        let from = &y[row * hidden..][..hidden];
                        let weight = if self.rank_major { 1.0 } else { self.w[r][t * K + j] };
                        let term = |p: f32, v: f32| if first { weight * v } else { p + weight * v };
                        part.iter_mut().zip(from).for_each(|(p, v)| *p = term(*p, *v));
                    }
                    if any {
                        let sum = &mut out[t * hidden..][..hidden];
                        let first = !std::mem::replace(&mut begun, true);
                        let term = |o: f32, p: f32| if first { p } else { o + p };
                        sum.iter_mut().zip(part).for_each(|(o, p)| *o = term(*o, p));
                    }
                }
            }
            let mut bytes = vec![0; 4 * out.len()];
            convert_from_f32(DType::F32, &out, &mut bytes);
            let mut again = vec![0.0; out.len()];
            convert_to_f32(DType::F32, &bytes, &mut again);
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(s.out.read()), bits(again), "combined on {r}");
        }
    }
}
