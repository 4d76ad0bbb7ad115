//! Expert parallelism of `tilewire bench` on GPUs: dispatch, combine and their backward, under
//! uniform routing.

use tilewire::ops::ep::{EpDesc, EpDispatch, EpHandle, EpLayout, EpPlan};
use tilewire::prelude::*;

use super::device::{Bench, Options, value};
use crate::args::RowOrder;
use crate::rows::Row;

/// The layer that `op` is timed with.
pub fn desc(o: &Options, size: usize, op: &str) -> EpDesc {
    let (experts, top_k) = o.experts;
    let mut d = EpDesc::new(size, experts, o.tokens, o.hidden, top_k);
    let align = o.align;
    d.layout = match o.layout {
        RowOrder::RankMajor if op.starts_with("ep_dispatch") => EpLayout::RankMajor { align },
        RowOrder::Flat if op.starts_with("ep_dispatch") => EpLayout::Flat { align },
        _ => EpLayout::ExpertMajor { align },
    };
    (d.dtype, d.out) = (o.dtype, o.dtype);
    d.capacity = capacity(&d);
    d
}

/// A quarter more than the mean of the ranks, or all that comes where a rank has more experts than
/// others, or few tokens are no mean: nothing is dropped.
fn capacity(d: &EpDesc) -> usize {
    let (t, align, experts) = (d.max_tokens, d.layout.align(), d.num_experts());
    let mut rows = vec![0usize; experts];
    for rank in 0..d.experts_per_rank.len() {
        let chosen = routing(rank, t, d.top_k, experts);
        chosen.into_iter().filter(|e| *e >= 0).for_each(|e| rows[e as usize] += 1);
    }
    let mut rows = rows.into_iter().map(|rows| rows.next_multiple_of(align));
    let of_rank = |local: &usize| rows.by_ref().take(*local).sum::<usize>();
    let most = d.experts_per_rank.iter().map(of_rank).max().unwrap_or(0);
    let local = d.experts_per_rank.iter().copied().max().unwrap_or(0);
    d.worst_case().min((t * d.top_k * 5 / 4 + align * local).max(most))
}

/// A layer, its tensors on this rank, and the operations in turn.
struct Layer<'a> {
    b: &'a Bench<'a>,
    plan: EpPlan,
    handle: EpHandle,
    idx: Tensor,
    weights: Tensor,
    recv: EpDispatch,
    dy: Tensor,
    /// Of combine and of the backward of dispatch.
    out: Tensor,
    dw: Tensor,
}

impl<'a> Layer<'a> {
    fn new(b: &'a Bench<'a>, op: &str, d: &EpDesc, idx: &[i64]) -> Result<Self> {
        let (t, h, k) = (b.o.tokens, b.o.hidden, d.top_k);
        let plan = EpPlan::new(d.clone(), &b.heap)?;
        let plan = match b.o.sms {
            Some(n) => plan.with_num_sms(n),
            None => plan,
        };
        plan.prepare(&b.stream)?;
        let straight = |made: Result<Tensor>| made.and_then(|x| x.poison().map(|()| x));
        let recv = EpDispatch {
            x: match b.o.zero_copy {
                true => straight(plan.zero_copy_recv())?,
                false => b.poisoned(d.dtype, Shape::d2(d.recv_rows(), h))?,
            },
            scales: None,
            weights: Some(b.poisoned(DType::F32, Shape::d1(d.capacity))?),
        };
        let dy = match b.o.zero_copy && op == "ep_combine_bwd" {
            true => straight(plan.zero_copy_grad())?,
            false => b.poisoned(d.out, Shape::d2(d.capacity, h))?,
        };
        let ones = Tensor::from_f32(&vec![1.0; t * k], DType::F32, Shape::d2(t, k))?;
        Ok(Self {
            b,
            handle: plan.handle()?,
            idx: Tensor::from_slice(idx, Shape::d2(t, k))?.to(&b.device)?,
            weights: ones.to(&b.device)?,
            recv,
            dy,
            out: b.poisoned(d.out, Shape::d2(t, h))?,
            dw: b.poisoned(DType::F32, Shape::d2(t, k))?,
            plan,
        })
    }

    fn expert_major(&self) -> bool {
        matches!(self.plan.desc().layout, EpLayout::ExpertMajor { .. })
    }

    /// With the preparation that belongs to it.
    fn dispatch(&self, x: &Tensor) -> Result<()> {
        let s = &self.b.stream;
        self.plan.route(s, &self.idx, None, &self.handle)?.join(s)?;
        let given = (Some(&self.weights), None);
        self.plan.dispatch(s, &self.handle, x, given, &self.recv)?.join(s).map(|_| ())
    }

    fn combine(&self, y: &Tensor) -> Result<()> {
        let s = &self.b.stream;
        self.plan.combine(s, &self.handle, y, None, &self.out)?.join(s).map(|_| ())
    }

    /// Received rows and weights are their own gradients.
    fn dispatch_bwd(&self) -> Result<()> {
        let (s, given) = (&self.b.stream, (&self.recv.x, self.recv.weights.as_ref()));
        let out = (&self.out, Some(&self.dw));
        self.plan.dispatch_bwd(s, &self.handle, given, out)?.join(s).map(|_| ())
    }

    fn combine_bwd(&self, g: &Tensor) -> Result<()> {
        let s = &self.b.stream;
        self.plan.combine_bwd(s, &self.handle, g, None, &self.dy)?.join(s).map(|_| ())
    }

    /// There and back with `exact`: what is wrong. A token comes back k times over, once for each
    /// choice, or, where each rank has a row of it, as often as it went to ranks (`times`).
    fn check(&self, op: &str, exact: &[f32], times: &[usize]) -> Result<u64> {
        let (b, k, h) = (self.b, self.plan.desc().top_k, self.b.o.hidden);
        let x = b.place(exact, Shape::d2(b.o.tokens, h))?;
        self.dispatch(&x)?;
        let rows = match op {
            "ep_combine_bwd" => {
                self.combine_bwd(&x)?;
                self.combine(&self.dy)?;
                false
            }
            "ep_dispatch_bwd" => self.dispatch_bwd().map(|()| !self.expert_major())?,
            _ if self.expert_major() => self.combine(&self.recv.x).map(|()| false)?,
            _ => self.dispatch_bwd().map(|()| true)?,
        };
        b.stream.synchronize()?;
        b.team.check()?;
        let times = |i: usize| if rows { times[i / h] } else { k } as f32;
        let got = self.out.to_f32()?;
        let all = got.iter().zip(exact).enumerate();
        let mut bad = all.filter(|(i, (g, e))| **g != times(*i) * **e).count();
        if op == "ep_dispatch_bwd" {
            bad += self.dw.to_f32()?.iter().filter(|w| **w != 1.0).count();
        }
        Ok(bad as u64)
    }
}

impl Bench<'_> {
    /// One row: `ep_dispatch` with its preparation, `ep_combine` without weights, or the backward
    /// of either.
    pub(crate) fn ep(&self, op: &str) -> Result<Row> {
        let (size, me) = (self.team.size(), self.team.rank().idx());
        let d = desc(self.o, size, op);
        let (t, h, k) = (self.o.tokens, self.o.hidden, d.top_k);
        let idx = routing(me, t, k, d.num_experts());
        let layer = Layer::new(self, op, &d, &idx)?;
        let exact: Vec<f32> = (0..t * h).map(|i| value(me, i)).collect();
        let rows: Vec<usize> = idx.chunks_exact(k).map(|c| ranks_of(c, &d)).collect();
        let bad = layer.check(op, &exact, &rows)?;
        let x = self.random(t, h)?;
        layer.dispatch(&x)?;
        let time = match op {
            "ep_dispatch" => self.time(|| layer.dispatch(&x))?,
            "ep_combine" => self.time(|| layer.combine(&layer.recv.x))?,
            "ep_dispatch_bwd" => self.time(|| layer.dispatch_bwd())?,
            _ => self.time(|| layer.combine_bwd(&x))?,
        };
        let moved = (rows.iter().sum::<usize>() * h * d.dtype.size()) as f64;
        let with = if op == "ep_dispatch" { ", preparation included" } else { "" };
        let note = format!(
            "{:.1} GB/s of rows to the ranks of their experts{with}",
            moved / time.us / 1e3
        );
        let sms = self.o.sms.map_or(String::new(), |n| format!(" sms={n}"))
            + if self.o.zero_copy { " zero_copy" } else { "" }
            + match d.layout {
                EpLayout::RankMajor { .. } => " rank_major",
                EpLayout::Flat { .. } => " flat",
                EpLayout::ExpertMajor { .. } => "",
            };
        let align = d.layout.align();
        let shape = format!(
            "tokens={t} hidden={h} top_k={k} experts={} align={align}{sms}",
            d.num_experts()
        );
        self.row(op, shape, time, self.wrong(bad)?, note)
    }
}

/// Different experts for each choice of a token, uniform.
pub(super) fn routing(rank: usize, tokens: usize, k: usize, experts: usize) -> Vec<i64> {
    let mut rng = tilewire::core::Rng::new(1000 + rank as u64);
    let mut out = Vec::with_capacity(tokens * k);
    for _ in 0..tokens {
        let mut row: Vec<i64> = Vec::with_capacity(k);
        while row.len() < k.min(experts) {
            let e = rng.below(experts as u64) as i64;
            if !row.contains(&e) {
                row.push(e);
            }
        }
        row.resize(k, -1);
        out.extend(row);
    }
    out
}

/// Returns how many ranks a token goes to, its own included with the share that it has of all.
fn ranks_of(choices: &[i64], d: &EpDesc) -> usize {
    let owner =
        |e: i64| (0..d.experts_per_rank.len()).rev().find(|&r| d.first_expert(r) <= e as usize);
    let mut seen: Vec<_> = choices.iter().filter(|e| **e >= 0).filter_map(|&e| owner(e)).collect();
    seen.sort_unstable();
    seen.dedup();
    seen.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nine experts on eight ranks: one has two of them, and gets 1.8 times the mean.
    #[test]
    fn no_rank_gets_more_rows_than_it_has_room_for() {
        for (size, experts, tokens, top_k, align) in [
            (8, 9, 512, 4, 1),
            (8, 9, 512, 4, 128),
            (8, 64, 512, 8, 1),
            (8, 8, 1, 1, 1),
            (3, 7, 5, 2, 4),
        ] {
            let mut d = EpDesc::new(size, experts, tokens, 8, top_k);
            d.layout = EpLayout::ExpertMajor { align };
            let mut rows = vec![vec![0; experts]; size];
            for e in (0..size).flat_map(|r| routing(r, tokens, top_k, experts)) {
                let e = e as usize;
                let owner = (0..size).rev().find(|&r| d.first_expert(r) <= e).unwrap();
                rows[owner][e] += 1;
            }
            for of_rank in rows {
                let all: usize = of_rank.iter().map(|r: &usize| r.div_ceil(align) * align).sum();
                assert!(all <= capacity(&d), "{all} rows, {d}");
            }
            assert!(capacity(&d) <= d.worst_case());
        }
    }
}
