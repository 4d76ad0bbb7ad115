//! A routing of expert parallelism with its data, and what must come of it by the oracle and the
//! host's arithmetic.

use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_oracle::ep::{EpLayout, EpSpec, Slot};
use tilewire_oracle::permute::TopK;

use crate::ep::THREADS;
use crate::ep_layers::{Side, filled, poisoned};
use crate::ep_world::{Choices, World};
use crate::memory::{ANY, Memory};

/// How the rows that a rank receives are ordered.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rows {
    /// One for each copy.
    ExpertMajor,
    /// One for each (token, rank), at the record's place.
    RankMajor,
    /// The same without gaps.
    Flat,
}

/// A phase that adds what returns.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sum {
    /// Of expert-major rows.
    Combine { weighted: bool },
    /// Of rows as they were received, with gradients of weights.
    DispatchBwd { grads: bool },
}

/// A routing with its data, and what must come of it.
pub struct Batch {
    world: World,
    want: EpLayout,
    x: Vec<Vec<u8>>,
    w: Vec<Vec<f32>>,
    scales: Vec<Vec<f32>>,
    /// As far as their types hold them.
    y: Vec<Vec<f32>>,
    d_recv: Vec<Vec<f32>>,
    d_recv_w: Vec<Vec<f32>>,
    d_out: Vec<Vec<f32>>,
    pub sides: Vec<Side>,
    /// Rows of the layer, and of this routing.
    pub capacity: usize,
    pub limit: usize,
    pub rows: Rows,
    /// Indices are i64, not i32.
    pub wide: bool,
    /// Neither weights nor scales, and no index: gradients.
    pub rows_only: bool,
}

pub fn batch(seed: u64, capacity: usize, hidden: usize) -> Batch {
    batch_of(seed, capacity, hidden, false)
}

/// Of either layout.
pub fn batch_of(seed: u64, capacity: usize, hidden: usize, rank_major: bool) -> Batch {
    let rows = if rank_major { Rows::RankMajor } else { Rows::ExpertMajor };
    Batch::new(&World::usual(hidden), (seed, capacity), rows)
}

pub fn bytes(dtype: DType, v: &[f32]) -> Vec<u8> {
    let mut out = vec![0; v.len() * dtype.size()];
    convert_from_f32(dtype, v, &mut out);
    out
}

/// `v` as far as `dtype` holds it.
fn rounded(dtype: DType, v: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; v.len()];
    convert_to_f32(dtype, &bytes(dtype, v), &mut out);
    out
}

impl Batch {
    pub fn new(world: &World, (seed, capacity): (u64, usize), rows: Rows) -> Self {
        Self::of(world, (seed, capacity, capacity), rows, Choices::Distinct)
    }

    /// Of `limit` rows in a layer of `capacity`.
    pub fn of(
        world: &World,
        (seed, capacity, limit): (u64, usize, usize),
        rows: Rows,
        choices: Choices,
    ) -> Self {
        let (k, hidden, records) = (world.k, world.hidden, world.records());
        let received = if rows == Rows::ExpertMajor { capacity } else { records };
        let mut rng = Rng::new(seed);
        let tokens = &world.tokens;
        let topks: Vec<TopK> = tokens.iter().map(|&t| choices.make(&mut rng, world, t)).collect();
        let spec = EpSpec {
            experts_per_rank: world.experts.clone(),
            align: world.align,
            capacity: Some(limit),
        };
        // Negative zeros among them: a sum that begins with 0 has none.
        let mut some = |n: usize| -> Vec<f32> {
            let one = |i: usize, v: f32| if i % 4 == 3 { -0.0 } else { v };
            (0..n).map(|i| one(i, rng.normal())).collect()
        };
        let mut of_tokens = |cols: usize| tokens.iter().map(|t| some(t * cols)).collect();
        let x: Vec<Vec<f32>> = of_tokens(hidden);
        let w: Vec<Vec<f32>> = of_tokens(k);
        let mut results = |rows: usize| -> Vec<Vec<f32>> {
            tokens.iter().map(|_| rounded(world.out, &some(rows * hidden))).collect()
        };
        let d_recv = results(received);
        let mut of_tokens = |cols: usize| tokens.iter().map(|t| some(t * cols)).collect();
        let scales: Vec<Vec<f32>> = of_tokens(world.scales);
        let d_out: Vec<Vec<f32>> = of_tokens(hidden);
        let d_out: Vec<_> = d_out.iter().map(|v| rounded(world.out, v)).collect();
        let y = match rows {
            Rows::ExpertMajor => d_recv.clone(),
            _ => tokens.iter().map(|_| rounded(world.out, &some(capacity * hidden))).collect(),
        };
        let d_recv_w: Vec<Vec<f32>> = tokens.iter().map(|_| some(capacity)).collect();
        let x: Vec<Vec<u8>> = x.iter().map(|v| bytes(world.dtype, v)).collect();
        let (want, world) = (EpLayout::new(&spec, &topks), world.clone());
        let mut batch = Self {
            world,
            want,
            x,
            w,
            scales,
            y,
            d_recv,
            d_recv_w,
            d_out,
            sides: Vec::new(),
            capacity,
            limit,
            rows,
            wide: seed % 3 != 2,
            rows_only: false,
        };
        batch.sides = topks.iter().enumerate().map(|(r, topk)| batch.side(r, topk)).collect();
        batch
    }

    /// The tensors of rank `r`: inputs as they are, outputs poisoned.
    fn side(&self, r: usize, topk: &TopK) -> Side {
        let (world, capacity, records) = (&self.world, self.capacity, self.world.records());
        let (k, tokens, received) = (world.k, world.tokens[r], self.received());
        let choices = 4 * world.max_tokens * k;
        let local = 8 * world.experts[r].max(1);
        let handle = [choices, choices, 4 * records, 16 * records * k, 4 * capacity, 4 * records];
        let totals = [local, local, 8, 8, 8 * world.size()];
        let narrow: Vec<i32> = topk.idx.iter().map(|&e| e as i32).collect();
        let none = Memory::new("output", ANY, 4 * records);
        none.write(&vec![-1i32; records]);
        let results = |v: &[f32]| filled(&bytes(world.out, v));
        Side {
            handle: handle.into_iter().chain(totals).map(poisoned).collect(),
            idx: if self.wide { filled(&topk.idx) } else { filled(&narrow) },
            x: filled(&self.x[r]),
            w: filled(&self.w[r]),
            recv: poisoned(received * world.payload()),
            recv_w: poisoned(4 * capacity),
            scales: filled(&self.scales[r]),
            recv_scales: poisoned(4 * received * world.scales),
            index: poisoned(4 * capacity),
            row_source: none,
            y: results(&self.y[r]),
            d_recv: results(&self.d_recv[r]),
            d_recv_w: filled(&self.d_recv_w[r]),
            out: poisoned(tokens * world.result()),
            dx: poisoned(tokens * world.result()),
            dw: poisoned(4 * tokens * k),
            d_out: results(&self.d_out[r]),
            dy: [(), ()].map(|()| poisoned(capacity * world.result())),
            d_y_w: poisoned(4 * capacity),
            tokens,
        }
    }

    /// Rows that a rank receives.
    pub fn received(&self) -> usize {
        if self.rows == Rows::ExpertMajor { self.capacity } else { self.world.records() }
    }

    /// True if rows of copies are added, not those of records.
    pub fn sums_copies(&self, sum: Sum) -> bool {
        matches!(sum, Sum::Combine { .. }) || self.rows == Rows::ExpertMajor
    }

    /// Rows of rank `r` that a kernel behind a dispatch may read.
    fn used(&self, r: usize) -> usize {
        match self.rows {
            // Behind the rows of all experts nothing is promised.
            Rows::ExpertMajor => self.want.ranks[r].m_splits().iter().sum(),
            _ => self.world.records(),
        }
    }

    /// Copies that rank `r` has, with their sources: rank, choice of all its tokens, and record.
    fn copies(&self, r: usize) -> impl Iterator<Item = (&Slot, usize, usize, usize)> {
        let (k, most) = (self.world.k, self.world.max_tokens);
        self.want.slots.iter().enumerate().flat_map(move |(src, slots)| {
            slots.iter().enumerate().filter_map(move |(i, s)| {
                let s = s.as_ref().filter(|s| s.rank == r)?;
                Some((s, src, i, src * most + i / k))
            })
        })
    }

    /// The received row of each record at rank `r`, -1 where there is none; not of expert-major
    /// rows.
    fn places(&self, r: usize) -> Vec<i32> {
        let mut place = vec![-1; self.world.records()];
        let mut next = 0;
        for (_, _, _, record) in self.copies(r) {
            if place[record] < 0 {
                place[record] = if self.rows == Rows::Flat { next } else { record as i32 };
                next += 1;
            }
        }
        place
    }

    pub fn routed(&self) {
        let want = &self.want;
        let lost: Vec<i64> =
            want.ranks.iter().map(|r| r.overflow.iter().sum::<usize>() as i64).collect();
        for (r, s) in self.sides.iter().enumerate() {
            let ints = |i: usize| s.handle[i].read::<i64>();
            let (rank, n) = (&want.ranks[r], self.world.experts[r]);
            let counts: Vec<i64> = rank.counts.iter().map(|&c| c as i64).collect();
            let splits: Vec<i64> = rank.m_splits().iter().map(|&c| c as i64).collect();
            assert_eq!((&ints(6)[..n], &ints(7)[..n]), (&counts[..], &splits[..]), "rank {r}");
            assert_eq!(ints(8), [rank.total_padded() as i64]);
            assert_eq!((ints(9)[0], ints(10)), (lost[r], lost.clone()));
            let rows = s.handle[0].read::<i32>();
            let row = |s: &Option<Slot>| s.as_ref().map_or(-1, |s| s.row as i32);
            let kept: Vec<i32> = want.slots[r].iter().map(row).collect();
            assert_eq!(rows[..kept.len()], kept, "rows of rank {r}");
        }
    }

    pub fn dispatched(&self) {
        self.dispatched_to(|s, _, used| s.recv.read::<u8>()[..used].to_vec());
    }

    /// What the handle keeps of the records that came.
    pub fn counted(&self) {
        for (r, s) in self.sides.iter().enumerate() {
            let mut num = vec![0u32; self.world.records()];
            self.copies(r).for_each(|(_, _, _, record)| num[record] += 1);
            assert_eq!(s.handle[2].read::<u32>(), num, "copies of the records at {r}");
            if self.rows != Rows::ExpertMajor {
                let place = s.handle[5].read::<i32>();
                assert_eq!(place, self.places(r), "rows of the records at {r}");
            }
        }
    }

    /// `read` gives the first bytes of what a rank has received.
    pub fn dispatched_to(&self, read: impl Fn(&Side, usize, usize) -> Vec<u8>) {
        self.counted();
        let (k, len, num) = (self.world.k, self.world.payload(), self.world.scales);
        for (r, s) in self.sides.iter().enumerate() {
            let (mut rows, mut weights) =
                (vec![0; self.received() * len], vec![0.0f32; self.capacity]);
            let mut index = vec![-1i32; self.capacity];
            let mut scales = vec![0.0f32; self.received() * num];
            let places = self.places(r);
            for (slot, src, i, record) in self.copies(r) {
                let expert_major = self.rows == Rows::ExpertMajor;
                let row = if expert_major { slot.row } else { places[record] as usize };
                rows[row * len..][..len].copy_from_slice(&self.x[src][i / k * len..][..len]);
                weights[slot.row] = self.w[src][i];
                let from = &self.scales[src][i / k * num..][..num];
                scales[row * num..][..num].copy_from_slice(from);
                index[slot.row] = row as i32;
            }
            let used = self.used(r);
            assert!(read(s, r, used * len) == rows[..used * len], "received by {r}");
            if self.rows_only {
                continue;
            }
            let got = s.recv_scales.read::<f32>();
            assert_eq!(got[..used * num], scales[..used * num], "scales of {r}");
            assert_eq!(s.recv_w.read::<f32>(), weights, "weights of {r}");
            assert_eq!(s.index.read::<i32>(), index, "index of {r}");
        }
    }

    /// What rank `home` returns for token `t` of rank `r`, rounded; nothing if it has none.
    fn returned(&self, (home, r, t): (usize, usize, usize), sum: Sum) -> Option<Vec<f32>> {
        let (k, h) = (self.world.k, self.world.hidden);
        let mut part: Option<Vec<f32>> = None;
        let mut add = |from: &[f32], weight: f32| match &mut part {
            None => part = Some(from.iter().map(|v| weight * v).collect()),
            Some(p) => p.iter_mut().zip(from).for_each(|(p, v)| *p += weight * v),
        };
        for j in 0..k {
            let slot = self.want.slots[r][t * k + j].as_ref();
            let Some(slot) = slot.filter(|s| s.rank == home) else { continue };
            let y = match sum {
                Sum::Combine { .. } => &self.y[home],
                Sum::DispatchBwd { .. } => &self.d_recv[home],
            };
            if !self.sums_copies(sum) {
                // The rows are sums already.
                let row = self.places(home)[r * self.world.max_tokens + t] as usize;
                add(&y[row * h..][..h], 1.0);
                break;
            }
            let weighted = sum == (Sum::Combine { weighted: true });
            add(&y[slot.row * h..][..h], if weighted { self.w[r][t * k + j] } else { 1.0 });
        }
        part.map(|p| rounded(self.world.out, &p))
    }

    /// After a combine, or the backward of a dispatch.
    pub fn summed(&self, sum: Sum) {
        let (k, h) = (self.world.k, self.world.hidden);
        for (r, s) in self.sides.iter().enumerate() {
            let mut out = Vec::new();
            for t in 0..s.tokens {
                let parts =
                    (0..self.world.size()).filter_map(|home| self.returned((home, r, t), sum));
                let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect();
                out.extend(parts.reduce(add).unwrap_or_else(|| vec![0.0; h]));
            }
            let got = if matches!(sum, Sum::Combine { .. }) { &s.out } else { &s.dx };
            assert!(got.read::<u8>() == bytes(self.world.out, &out), "{sum:?} on {r}");
            if sum != (Sum::DispatchBwd { grads: true }) {
                continue;
            }
            let grad =
                |slot: &Option<Slot>| slot.as_ref().map_or(0.0, |s| self.d_recv_w[s.rank][s.row]);
            let want: Vec<f32> = self.want.slots[r].iter().map(grad).collect();
            assert_eq!((s.dw.read::<f32>(), want.len()), (want, s.tokens * k), "weights of {r}");
        }
    }

    /// After the backward of a combine. `read` gives the first bytes of a rank's rows.
    pub fn graded(&self, weighted: bool, read: impl Fn(&Side, usize, usize) -> Vec<u8>) {
        let (k, h) = (self.world.k, self.world.hidden);
        for (r, s) in self.sides.iter().enumerate() {
            let (mut rows, mut grads) = (vec![0.0; self.capacity * h], vec![0.0; self.capacity]);
            for (slot, src, i, _) in self.copies(r) {
                let g = &self.d_out[src][i / k * h..][..h];
                let weight = if weighted { self.w[src][i] } else { 1.0 };
                let row = rows[slot.row * h..][..h].iter_mut();
                row.zip(g).for_each(|(o, v)| *o = if weighted { weight * v } else { *v });
                grads[slot.row] = inner(g, &self.y[r][slot.row * h..][..h]);
            }
            let used: usize = self.want.ranks[r].m_splits().iter().sum();
            let len = used * self.world.result();
            let want = bytes(self.world.out, &rows[..used * h]);
            assert!(read(s, r, len) == want, "gradients of rows of {r}, weighted {weighted}");
            if weighted {
                assert_eq!(s.d_y_w.read::<f32>(), grads, "gradients of weights of {r}");
            }
        }
    }
}

/// The inner product as a block of the kernel adds it: by threads in turn, four elements at a time,
/// then in pairs of lanes, then by warps.
fn inner(a: &[f32], b: &[f32]) -> f32 {
    let mut dots = vec![0.0f32; THREADS as usize];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let dot = &mut dots[i / 4 % THREADS as usize];
        *dot = a.mul_add(*b, *dot);
    }
    let warp = |lanes: &[f32]| {
        let mut lanes = lanes.to_vec();
        for by in [16, 8, 4, 2, 1] {
            lanes = (0..32).map(|i| lanes[i] + lanes[i ^ by]).collect();
        }
        lanes[0]
    };
    dots.chunks(32).map(warp).fold(0.0, |sum, w| sum + w)
}
