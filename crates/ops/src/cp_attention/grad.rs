//! The backward pass on the host: partial dK and dV go to the owner and are added in rank order.

use std::sync::Arc;

use tilewire_core::{DType, Result};

use super::config::{Schedule, kv_heads, num_rows};
use super::host::{Local, Run};
use super::lane::{Bytes, Job};
use super::plan::{CREDIT_DKV, DATA_DKV};
use super::wire::{Format, add_heads};
use crate::attention::host::{Core, Operands, store};
use crate::attention::{AttnGrads, Extra, Grads, Upstream, rows_first};
use crate::common::Launch;

/// dK and dV of some rows, `[rows, hkv, d]`.
struct Dkv {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Run {
    /// Formats of dK and dV in `dtype` on the wire.
    fn dkv_formats(&self, dtype: DType) -> (Format, Format) {
        let d = &self.sched.dims;
        (Format::new(d.hkv, d.dqk, dtype), Format::new(d.hkv, d.dv, dtype))
    }

    pub(super) fn backward(&self, local: &Local, extra: Extra, out: &AttnGrads) -> Result<()> {
        let (core, rows) = (self.core(extra.bias), self.sched.rows_q());
        let none = Upstream { rows: 0, d_out: vec![], lse: vec![], delta: vec![] };
        let up = local.up.as_ref().unwrap_or(&none);
        let mut g = Grads::new(&core, rows, out.dbias.is_some());
        let mut own = Dkv { k: Vec::new(), v: Vec::new() };
        self.exchange(&local.area, |owner, bytes| {
            g.begin(&core, num_rows(&self.sched.areas[owner]));
            let slices = &self.sched.slices[owner];
            if !slices.is_empty() {
                let (k, v) = self.decode_area(owner, bytes);
                core.backward(&Operands { q: &local.q, k: &k, v: &v }, up, slices, &mut g);
            }
            let part = partial(&core, &g);
            match owner == self.sched.grid.group {
                true => own = part,
                false => self.push_partial(owner, &part)?,
            }
            Ok(())
        })?;
        let sum = self.add_partials(own)?;
        let dq = rows_first(&g.dq, core.dims.hq, rows, core.dims.dqk);
        self.gather_grads(&dq, &sum, out)?;
        if let Some(t) = &out.dbias {
            store(t, &g.dbias)?;
        }
        match (&out.dsink, &extra.sink) {
            (Some(t), Some(sink)) => store(t, &core.sink_grad(up, sink)),
            _ => Ok(()),
        }
    }

    /// Sends my part of dK and dV to the owner: the spans that my queries see.
    fn push_partial(&self, owner: usize, part: &Dkv) -> Result<()> {
        let g = &self.sched.grid;
        let (fk, fv) = self.dkv_formats(self.desc.dkv_wire);
        let row = fk.row_bytes() + fv.row_bytes();
        let (area, needed) = (&self.sched.areas[owner], &self.sched.needed[owner]);
        let (wk, wv) = (fk.heads * fk.d, fv.heads * fv.d);
        let mut puts = Vec::new();
        for (at, rows) in Schedule::parts(area, needed, row) {
            let mut bytes = Vec::with_capacity(at.len());
            fk.encode(&part.k[rows.start * wk..rows.end * wk], None, &mut bytes);
            fv.encode(&part.v[rows.start * wv..rows.end * wv], None, &mut bytes);
            let at = self.buf.dkv.range(g.group * self.buf.dkv_stride + at.start, bytes.len());
            puts.push((at, Bytes::Own(Arc::new(bytes))));
        }
        let dst = g.counterpart(owner);
        self.queue.push(Job::Send { dst, credit: CREDIT_DKV, puts, data: DATA_DKV, ack: None })
    }

    /// Waits for everybody's part of my area, and adds them in the order of the groups.
    fn add_partials(&self, own: Dkv) -> Result<Dkv> {
        let (g, Launch { ctx, net, .. }) = (&self.sched.grid, &self.launch);
        if g.outer == 1 {
            return Ok(own);
        }
        for o in g.other_groups() {
            net.wait_last(ctx, g.counterpart(o), self.signals.slot(DATA_DKV), 1, "dkv")?;
        }
        ctx.compute("reduce")?;
        let (fk, fv) = self.dkv_formats(self.desc.dkv_wire);
        let row = fk.row_bytes() + fv.row_bytes();
        let (wk, wv) = (fk.heads * fk.d, fv.heads * fv.d);
        let mut sum = Dkv { k: vec![0.0; own.k.len()], v: vec![0.0; own.v.len()] };
        let add = |x: &mut [f32], p: &[f32]| x.iter_mut().zip(p).for_each(|(x, p)| *x += p);
        for o in 0..g.outer {
            if o == g.group {
                add(&mut sum.k, &own.k);
                add(&mut sum.v, &own.v);
                continue;
            }
            let area = &self.sched.areas[g.group];
            for (at, rows) in Schedule::parts(area, &self.sched.asked[o], row) {
                let at_heap = self.buf.dkv.range(o * self.buf.dkv_stride + at.start, at.len());
                // SAFETY: group `o` has signalled its part, and gets no new credit before the next
                // launch on this stream, which runs after this one.
                let bytes = unsafe { ctx.local(at_heap, at.len()) };
                let (mut k, mut v) = (vec![0.0; rows.len() * wk], vec![0.0; rows.len() * wv]);
                let rest = fk.decode(bytes, rows.len(), &mut k);
                fv.decode(rest, rows.len(), &mut v);
                add(&mut sum.k[rows.start * wk..rows.end * wk], &k);
                add(&mut sum.v[rows.start * wv..rows.end * wv], &v);
            }
        }
        Ok(sum)
    }

    /// Type in which finished dK and dV go back to the owner of the rows: rounded once where one
    /// rank has the whole sum, as partial results where key heads are shared.
    fn return_dtype(&self, to_self: bool) -> DType {
        let (heads, a) = (self.desc.attn.heads_kv, self.sched.grid.inner);
        match to_self {
            true => DType::F32,
            false if heads.is_multiple_of(a) && self.desc.dkv_wire == DType::F32 => {
                self.desc.attn.out
            }
            false => self.desc.dkv_wire,
        }
    }

    /// Returns `dq [rows, hq, dqk]`, dK and dV to the owners of the rows.
    fn gather_grads(&self, dq: &[f32], dkv: &Dkv, out: &AttnGrads) -> Result<()> {
        let (g, a, d) = (&self.sched.grid, &self.desc.attn, &self.sched.dims);
        let fq = Format::new(d.hq, d.dqk, a.out);
        let (wq, wk, wv) = (d.hq * d.dqk, d.hkv * d.dqk, d.hkv * d.dv);
        let (mut messages, mut q, mut kv) = (Vec::new(), 0, 0);
        for m in 0..g.inner {
            let nq = num_rows(&self.sched.member_q[m]);
            let nkv = num_rows(&self.sched.member_kv[m]);
            let (fk, fv) = self.dkv_formats(self.return_dtype(m == g.at));
            let mut bytes = Vec::new();
            fq.encode(&dq[q * wq..(q + nq) * wq], None, &mut bytes);
            fk.encode(&dkv.k[kv * wk..(kv + nkv) * wk], None, &mut bytes);
            fv.encode(&dkv.v[kv * wv..(kv + nkv) * wv], None, &mut bytes);
            messages.push(bytes);
            (q, kv) = (q + nq, kv + nkv);
        }
        let (nq, nkv) = (self.rows.q, self.rows.kv);
        let mut whole_q = vec![0.0; nq * a.heads_q * a.dqk];
        let mut whole_k = vec![0.0; nkv * a.heads_kv * a.dqk];
        let mut whole_v = vec![0.0; nkv * a.heads_kv * a.dv];
        let formats = |m: usize| self.dkv_formats(self.return_dtype(m == g.at));
        let len = |m: usize| {
            let (fk, fv) = formats(m);
            nq * fq.row_bytes() + nkv * (fk.row_bytes() + fv.row_bytes())
        };
        self.trade(messages, len, |m, bytes| {
            let (fk, fv) = formats(m);
            let (mut q, mut k, mut v) =
                (vec![0.0; nq * wq], vec![0.0; nkv * wk], vec![0.0; nkv * wv]);
            let rest = fq.decode(bytes, nq, &mut q);
            let rest = fk.decode(rest, nkv, &mut k);
            fv.decode(rest, nkv, &mut v);
            let kvh = kv_heads(a.heads_kv, g.inner, m);
            add_heads(&mut whole_q, &q, &(m * d.hq..(m + 1) * d.hq), a.heads_q, a.dqk);
            add_heads(&mut whole_k, &k, &kvh, a.heads_kv, a.dqk);
            add_heads(&mut whole_v, &v, &kvh, a.heads_kv, a.dv);
        })?;
        store(&out.dq, &whole_q)?;
        store(&out.dk, &whole_k)?;
        store(&out.dv, &whole_v)
    }
}

fn partial(core: &Core, g: &Grads) -> Dkv {
    let d = &core.dims;
    Dkv {
        k: rows_first(&g.dk, d.hkv, g.kv_rows, d.dqk),
        v: rows_first(&g.dv, d.hkv, g.kv_rows, d.dv),
    }
}
