//! The local permutation of `tilewire bench`: rows by expert and back, and the gradients of both,
//! under uniform routing.

use tilewire::core::numerics::Bound;
use tilewire::device::Buffer;
use tilewire::ops::permute::{
    PermuteDesc, PermuteMap, PermutePlan, Permuted, Tokens, UnpermuteGrads, WeightedGrads,
};
use tilewire::prelude::*;
use tilewire_oracle::permute as oracle;

use super::device::{Bench, Options};
use super::ep::routing;
use super::memory::{Judge, Pass};
use crate::rows::Row;

/// A permutation of this rank's tokens.
struct Order<'a> {
    b: &'a Bench<'a>,
    plan: PermutePlan,
    map: PermuteMap,
    idx: Tensor,
    weights: Tensor,
    /// The oracle's layout of the same routing.
    layout: oracle::Permutation,
}

impl<'a> Order<'a> {
    fn new(b: &'a Bench<'a>) -> Result<Self> {
        let (t, (experts, k), dtype) = (b.o.tokens, b.o.experts, b.o.dtype);
        let chosen = routing(b.team.rank().idx(), t, k, experts);
        let topk = oracle::TopK::new(t, k, chosen.clone());
        let layout = oracle::Permutation::new(&topk, experts, b.o.align);
        let mut desc = PermuteDesc::new(t, b.o.hidden, experts, k, dtype);
        // As many rows as there are: nothing is dropped.
        (desc.align, desc.out, desc.capacity) = (b.o.align, dtype, layout.sources.len());
        let plan = PermutePlan::new(desc)?;
        plan.prepare(&b.stream)?;
        Ok(Self {
            b,
            map: plan.map(t)?,
            plan,
            idx: Tensor::from_slice(&chosen, Shape::d2(t, k))?.to(&b.device)?,
            weights: b.normal(1, DType::F32, t, k)?,
            layout,
        })
    }

    fn rows(&self) -> usize {
        self.layout.sources.len()
    }

    /// Results of so many rows of the type of the tokens.
    fn like(&self, rows: usize) -> Result<Tensor> {
        self.b.poisoned(self.b.o.dtype, Shape::d2(rows, self.b.o.hidden))
    }

    fn noise(&self, seed: u64, rows: usize) -> Result<Tensor> {
        self.b.normal(seed, self.b.o.dtype, rows, self.b.o.hidden)
    }

    fn route(&self) -> Pass<'_> {
        let m = &self.map;
        let made = [m.slots(), m.sources(), m.m_splits(), m.total(), m.dropped()];
        let queue = || {
            let s = &self.b.stream;
            self.plan.route(s, &self.idx, m)?.join(s).map(|_| ())
        };
        let judge = |j: &mut Judge| {
            let l = &self.layout;
            let slot = |s: &Option<usize>| s.map_or(-1, |r| r as i32);
            j.same(&m.slots().to_vec::<i32>()?, &l.slots.iter().map(slot).collect::<Vec<_>>());
            let padded: Vec<i64> = l.padded().into_iter().map(|rows| rows as i64).collect();
            j.same(&m.m_splits().to_vec::<i64>()?, &padded);
            j.same(&m.total().to_vec::<i64>()?, &[self.rows() as i64]);
            j.same(&m.dropped().to_vec::<i64>()?, &[0]);
            Ok(())
        };
        Pass {
            name: "permute/route".to_owned(),
            reads: vec![self.idx.clone()],
            writes: made.map(Clone::clone).to_vec(),
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(judge),
        }
    }

    /// Copies: equal to the bit.
    fn permute(&self) -> Result<Pass<'_>> {
        let x = self.noise(0, self.b.o.tokens)?;
        let weights = self.b.poisoned(DType::F32, Shape::d1(self.rows()))?;
        let out = Permuted { x: self.like(self.rows())?, weights: Some(weights), scales: None };
        let (of_x, of_w) = (out.x.clone(), out.weights.clone());
        let t = Tokens { x: x.clone(), weights: Some(self.weights.clone()), scales: None };
        let queue = move || {
            let s = &self.b.stream;
            self.plan.permute(s, &self.map, &t, &out)?.join(s).map(|_| ())
        };
        let (x_in, wide, written) = (x.clone(), of_x.clone(), of_w.clone());
        let judge = move |j: &mut Judge| {
            let (x, row) = (x_in.download()?, self.b.o.hidden * self.b.o.dtype.size());
            let (w, k) = (self.weights.to_f32()?, self.b.o.experts.1);
            let (zero, got) = (vec![0u8; row], wide.download()?);
            for (got, from) in got.chunks(row).zip(&self.layout.sources) {
                j.same(got, from.map_or(&zero[..], |(t, _)| &x[t * row..][..row]));
            }
            let of = |from: &Option<(usize, usize)>| from.map_or(0.0, |(t, c)| w[t * k + c]);
            let want: Vec<f32> = self.layout.sources.iter().map(of).collect();
            written.iter().try_for_each(|got| {
                j.same(&got.to_f32()?, &want);
                Ok(())
            })
        };
        Ok(Pass {
            name: "permute/permute".to_owned(),
            reads: vec![x, self.weights.clone(), self.map.slots().clone()],
            writes: std::iter::once(of_x).chain(of_w).collect(),
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(judge),
        })
    }

    /// Sums of the rows of a token, with weights or without.
    fn judge_sums(
        &self,
        j: &mut Judge,
        got: &Tensor,
        rows: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<()> {
        let (h, k) = (self.b.o.hidden, self.b.o.experts.1);
        let (rows, w) = (rows.to_f32()?, weights.map(Tensor::to_f32).transpose()?);
        let bound = Bound::local(self.b.o.dtype, k);
        j.rows(got, h, &bound, &|t, want, mag| {
            want.fill(0.0);
            mag.fill(0.0);
            for c in 0..k {
                let Some(r) = self.layout.slot(t, c) else { continue };
                let w = w.as_ref().map_or(1.0, |w| f64::from(w[t * k + c]));
                for (i, v) in rows[r * h..][..h].iter().enumerate() {
                    want[i] += w * f64::from(*v);
                    mag[i] += (w * f64::from(*v)).abs();
                }
            }
        });
        Ok(())
    }

    fn unpermute(&self) -> Result<Pass<'_>> {
        let (rows, out) = (self.noise(2, self.rows())?, self.like(self.b.o.tokens)?);
        let (given, to) = (rows.clone(), out.clone());
        let queue = move || {
            let s = &self.b.stream;
            let weighted = (&given, Some(&self.weights));
            self.plan.unpermute(s, &self.map, weighted, &to)?.join(s).map(|_| ())
        };
        let (given, got) = (rows.clone(), out.clone());
        Ok(Pass {
            name: "permute/unpermute".to_owned(),
            reads: vec![rows, self.weights.clone(), self.map.slots().clone()],
            writes: vec![out],
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(move |j| self.judge_sums(j, &got, &given, Some(&self.weights))),
        })
    }

    fn permute_bwd(&self) -> Result<Pass<'_>> {
        let (t, k) = (self.b.o.tokens, self.b.o.experts.1);
        let (grad, d_x) = (self.noise(3, self.rows())?, self.like(t)?);
        let d_rows = self.b.normal(4, DType::F32, self.rows(), 1)?;
        let d_rows = d_rows.reshape(Shape::d1(self.rows()))?;
        let d_weights = self.b.poisoned(DType::F32, Shape::d2(t, k))?;
        let given = Permuted { x: grad.clone(), weights: Some(d_rows.clone()), scales: None };
        let out = Tokens { x: d_x.clone(), weights: Some(d_weights.clone()), scales: None };
        let queue = move || {
            let s = &self.b.stream;
            self.plan.permute_bwd(s, &self.map, &given, &out)?.join(s).map(|_| ())
        };
        let (g, w, got, got_w) = (grad.clone(), d_rows.clone(), d_x.clone(), d_weights.clone());
        let judge = move |j: &mut Judge| {
            let w = w.to_f32()?;
            let of = |slot: &Option<usize>| slot.map_or(0.0, |r| w[r]);
            j.same(&got_w.to_f32()?, &self.layout.slots.iter().map(of).collect::<Vec<_>>());
            self.judge_sums(j, &got, &g, None)
        };
        Ok(Pass {
            name: "permute/permute_bwd".to_owned(),
            reads: vec![grad, d_rows, self.map.slots().clone()],
            writes: vec![d_x, d_weights],
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(judge),
        })
    }

    fn unpermute_bwd(&self) -> Result<Pass<'_>> {
        let (t, k) = (self.b.o.tokens, self.b.o.experts.1);
        let (d_out, rows) = (self.noise(5, t)?, self.noise(6, self.rows())?);
        let d_rows = self.like(self.rows())?;
        let d_weights = self.b.poisoned(DType::F32, Shape::d2(t, k))?;
        let weighted = WeightedGrads {
            weights: self.weights.clone(),
            rows: rows.clone(),
            d_weights: d_weights.clone(),
        };
        let g = UnpermuteGrads {
            d_out: d_out.clone(),
            d_rows: d_rows.clone(),
            weighted: Some(weighted),
        };
        let queue = move || {
            let s = &self.b.stream;
            self.plan.unpermute_bwd(s, &self.map, &g)?.join(s).map(|_| ())
        };
        let (ins, outs) = ([d_out.clone(), rows.clone()], [d_rows.clone(), d_weights.clone()]);
        Ok(Pass {
            name: "permute/unpermute_bwd".to_owned(),
            reads: vec![d_out, rows, self.weights.clone(), self.map.slots().clone()],
            writes: vec![d_rows, d_weights],
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(move |j| self.judge_gradients(j, &ins, &outs)),
        })
    }

    /// `d_rows[slot] = w d_out`, and `d_weights = <d_out, rows[slot]>`.
    fn judge_gradients(
        &self,
        j: &mut Judge,
        [d_out, rows]: &[Tensor; 2],
        [d_rows, d_weights]: &[Tensor; 2],
    ) -> Result<()> {
        let (h, k, dtype) = (self.b.o.hidden, self.b.o.experts.1, self.b.o.dtype);
        let (d_out, rows, w) = (d_out.to_f32()?, rows.to_f32()?, self.weights.to_f32()?);
        j.rows(d_rows, h, &Bound::local(dtype, 1), &|r, want, mag| {
            want.fill(0.0);
            if let Some((t, c)) = self.layout.sources[r] {
                let all = want.iter_mut().zip(&d_out[t * h..][..h]);
                all.for_each(|(o, g)| *o = f64::from(w[t * k + c]) * f64::from(*g));
            }
            mag.iter_mut().zip(want.iter()).for_each(|(m, w)| *m = w.abs());
        });
        j.rows(d_weights, k, &Bound::local(DType::F32, h), &|t, want, mag| {
            for c in 0..k {
                let row = self.layout.slot(t, c).map_or(&[][..], |r| &rows[r * h..][..h]);
                let terms = row.iter().zip(&d_out[t * h..][..h]);
                let terms = terms.map(|(a, b)| f64::from(*a) * f64::from(*b));
                (want[c], mag[c]) =
                    terms.fold((0.0, 0.0), |(sum, all), v| (sum + v, all + v.abs()));
            }
        });
        Ok(())
    }
}

impl Bench<'_> {
    /// Each pass under the same routing.
    pub(super) fn permute_rows(&self) -> Result<Vec<Row>> {
        let order = Order::new(self)?;
        let passes = vec![
            order.route(),
            order.permute()?,
            order.unpermute()?,
            order.permute_bwd()?,
            order.unpermute_bwd()?,
        ];
        let (experts, k) = self.o.experts;
        let Options { tokens, hidden, align, .. } = self.o;
        let shape =
            format!("tokens={tokens} hidden={hidden} top_k={k} experts={experts} align={align}");
        self.by_memory(&shape, passes)
    }
}
