//! Launches by offsets: the bits of launches whose sequences the host knows, but for few queries
//! and FP8 products, which other kernels attend to there; offsets that cannot be used.

use std::ops::Range;

use tilewire::device::{Pending, Stream};
use tilewire::ops::attention::{
    AttentionPlan, AttnGrads, AttnInputs, AttnOffsets, AttnOut, AttnSaved, Sequences,
};
use tilewire::ops::cp_attention::{CpAttentionPlan, Pass};
use tilewire::prelude::*;
use tilewire::symm::Traffic;

use super::Problem;
use crate::verify::Ctx;

/// Sequences that have no rows, behind the others.
const UNUSED: usize = 3;

/// A plan that takes offsets.
pub trait TakesOffsets {
    fn sequences(&self) -> &Sequences;
    fn fwd(&self, s: &Stream, x: &AttnInputs, o: AttnOut) -> Result<Pending<AttnOut>>;
    fn bwd(
        &self,
        s: &Stream,
        x: &AttnInputs,
        saved: AttnSaved,
        g: AttnGrads,
    ) -> Result<Pending<AttnGrads>>;
    fn check(&self) -> Result<()>;
    fn reset(&self, s: &Stream) -> Result<()>;
    /// The traffic of a launch by offsets.
    fn traffic(&self, pass: Pass) -> Result<Traffic>;
}

macro_rules! takes_offsets {
    ($plan:ty, |$p:ident| $sequences:expr, $traffic:expr) => {
        impl TakesOffsets for $plan {
            fn sequences(&self) -> &Sequences {
                let $p = self;
                $sequences
            }

            fn fwd(&self, s: &Stream, x: &AttnInputs, o: AttnOut) -> Result<Pending<AttnOut>> {
                self.launch_fwd(s, x, o)
            }

            fn bwd(
                &self,
                s: &Stream,
                x: &AttnInputs,
                saved: AttnSaved,
                g: AttnGrads,
            ) -> Result<Pending<AttnGrads>> {
                self.launch_bwd(s, x, saved, g)
            }

            fn check(&self) -> Result<()> {
                <$plan>::check(self)
            }

            fn reset(&self, s: &Stream) -> Result<()> {
                <$plan>::reset(self, s)
            }

            fn traffic(&self, pass: Pass) -> Result<Traffic> {
                let predict: fn(&Self, Pass) -> Result<Traffic> = $traffic;
                predict(self, pass)
            }
        }
    };
}

takes_offsets!(AttentionPlan, |p| &p.desc().sequences, |_, _| Ok(Traffic::new()));
takes_offsets!(CpAttentionPlan, |p| &p.desc().attn.sequences, Self::predict_by_offsets);

/// The global rows of this rank.
pub struct Rows<'a> {
    pub q: &'a [Range<usize>],
    pub kv: &'a [Range<usize>],
}

impl Rows<'_> {
    fn num(&self) -> (usize, usize) {
        let num = |spans: &[Range<usize>]| spans.iter().map(|s| s.len()).sum();
        (num(self.q), num(self.kv))
    }
}

/// Offsets of one side, without and with padding.
fn of(ranges: &[Range<usize>], tokens: usize) -> (Vec<i32>, Vec<i32>) {
    let (mut cu, mut end) = (vec![0], 0);
    for r in ranges {
        end += r.len() as i32;
        cu.push(end);
    }
    cu.extend([end; UNUSED]);
    let mut at: Vec<i32> = ranges.iter().map(|r| r.start as i32).collect();
    at.extend([tokens as i32; UNUSED + 1]);
    (cu, at)
}

/// Returns the offsets of `s` on the device of the case; `None` if rows of no sequence come first.
fn offsets(ctx: &Ctx, s: &Sequences, spoil: bool) -> Result<Option<AttnOffsets>> {
    if [&s.q, &s.kv].iter().any(|r| r.first().is_none_or(|r| r.start != 0)) {
        return Ok(None);
    }
    let place = |v: Vec<i32>| {
        let shape = Shape::d1(v.len());
        ctx.place(Tensor::from_slice(&v, shape)?)
    };
    let [(mut cu_q, at_q), (cu_kv, at_kv)] = [of(&s.q, s.tokens_q), of(&s.kv, s.tokens_kv)];
    let follow =
        |cu: &[i32], at: &[i32]| cu[..cu.len() - UNUSED - 1] == at[..at.len() - UNUSED - 1];
    let packed = follow(&cu_q, &at_q) && follow(&cu_kv, &at_kv);
    if spoil {
        let last = cu_q.len() - 1;
        cu_q[last] = s.tokens_q as i32 + 1;
    }
    Ok(Some(match packed {
        true => AttnOffsets::packed(place(cu_q)?, place(cu_kv)?),
        false => AttnOffsets::padded((place(cu_q)?, place(at_q)?), (place(cu_kv)?, place(at_kv)?)),
    }))
}

/// Runs both passes by offsets that come late: a graph of both is captured with others, of no
/// rows, and replayed with these. `None` where there are none.
pub fn run(
    ctx: &mut Ctx,
    (plan, p): (&impl TakesOffsets, &Problem),
    (x, rows): (&AttnInputs, &Rows<'_>),
) -> Result<Option<(AttnOut, AttnGrads)>> {
    let Some(offsets) = offsets(ctx, plan.sequences(), false)? else { return Ok(None) };
    let tensors = offsets.tensors();
    let late: Vec<Vec<u8>> =
        tensors.iter().map(|t| t.read(<[u8]>::to_vec)).collect::<Result<_>>()?;
    tensors.iter().try_for_each(|t| t.write(|b| b.fill(0)))?;
    let x = AttnInputs { offsets: Some(offsets), ..x.clone() };
    let (num_q, num_kv) = rows.num();
    let (o, grads) = (p.out(ctx, num_q)?, p.grads(ctx, num_q, num_kv)?);
    let saved = p.saved(ctx, &o, rows.q)?;
    ctx.stream.synchronize()?;
    ctx.stream.begin_capture()?;
    let queued = plan.fwd(&ctx.stream, &x, o.clone()).and_then(|fwd| {
        fwd.join(&ctx.stream)?;
        plan.bwd(&ctx.stream, &x, saved, grads.clone())?.join(&ctx.stream)
    });
    let graph = ctx.stream.end_capture()?;
    queued?;
    let graph = graph.instantiate()?;
    ctx.stream.replay(&graph)?;
    ctx.stream.synchronize()?;
    let none = o.out.to_f32()?.iter().all(|v| *v == 0.0);
    ctx.check(none, || "rows of no sequence are not zero".to_owned());
    tensors.iter().zip(&late).try_for_each(|(t, v)| t.write(|b| b.copy_from_slice(v)))?;
    ctx.stream.replay(&graph)?;
    ctx.stream.synchronize()?;
    plan.check()?;
    Ok(Some((o, grads)))
}

/// Offsets that cannot be used: the plan's check raises, and results are NaN.
pub fn refused(
    ctx: &mut Ctx,
    (plan, p): (&impl TakesOffsets, &Problem),
    (x, rows): (&AttnInputs, &Rows<'_>),
) -> Result<()> {
    let Some(offsets) = offsets(ctx, plan.sequences(), true)? else { return Ok(()) };
    let x = AttnInputs { offsets: Some(offsets), ..x.clone() };
    let (num_q, num_kv) = rows.num();
    let (good, o) = (p.out(ctx, num_q)?, p.out(ctx, num_q)?);
    let (saved, g) = (p.saved(ctx, &good, rows.q)?, p.grads(ctx, num_q, num_kv)?);
    // What moves is the same, whatever the offsets are.
    let before = ctx.team.traffic();
    let fwd = plan.fwd(&ctx.stream, &x, o.clone())?.wait().and_then(|_| plan.check());
    ctx.check(fwd.is_err(), || "offsets behind the rows are taken".to_owned());
    ctx.traffic("forward by offsets", &before, &plan.traffic(Pass::Forward)?);
    plan.reset(&ctx.stream)?;
    let before = ctx.team.traffic();
    let bwd = plan.bwd(&ctx.stream, &x, saved, g.clone())?.wait().and_then(|_| plan.check());
    ctx.check(bwd.is_err(), || "offsets behind the rows are taken, backward".to_owned());
    ctx.traffic("backward by offsets", &before, &plan.traffic(Pass::Backward)?);
    plan.reset(&ctx.stream)?;
    ctx.stream.synchronize()?;
    plan.check()?;
    for (what, t) in [("out", &o.out), ("lse", &o.lse), ("dq", &g.dq), ("dk", &g.dk), ("dv", &g.dv)]
    {
        let nan = t.to_f32()?.iter().all(|v| v.is_nan());
        ctx.check(nan, || format!("`{what}` of a launch that was refused is not NaN"));
    }
    Ok(())
}
