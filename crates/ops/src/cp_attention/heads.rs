//! Scatter and gather of heads inside a group, on the host.

use std::sync::Arc;

use tilewire_core::Result;

use super::config::{kv_heads, num_rows};
use super::host::{Local, Run};
use super::lane::{Bytes, Job};
use super::plan::{CREDIT_GATHER, CREDIT_SCATTER, DATA_GATHER, DATA_SCATTER, Work};
use super::wire::{add_heads, pick, transpose};
use crate::attention::host::store;
use crate::attention::{AttnOut, Upstream};
use crate::common::Launch;

impl Run {
    /// Trades my rows of all heads for my group's rows of my heads.
    pub(super) fn scatter(&self) -> Result<Local> {
        let (g, a) = (&self.sched.grid, &self.desc.attn);
        let values = Values::load(self)?;
        for m in g.other_members() {
            let bytes = Arc::new(values.message(self, m));
            let at = self.buf.scatter.range(g.at * self.buf.scatter_stride, bytes.len());
            self.queue.push(Job::Send {
                dst: g.member(m),
                credit: CREDIT_SCATTER,
                puts: vec![(at, Bytes::Own(bytes))],
                data: DATA_SCATTER,
                ack: None,
            })?;
        }
        for m in g.other_members() {
            let slot = self.signals.slot(DATA_SCATTER);
            self.launch.net.wait_last(&self.launch.ctx, g.member(m), slot, 1, "scatter")?;
        }
        let (rows, hq) = (self.sched.rows_q(), self.sched.dims.hq);
        let mut q = vec![0.0; rows * hq * a.dqk];
        let mut d_out = vec![0.0; if values.up.is_some() { rows * hq * a.dv } else { 0 }];
        let mut stats = [vec![0.0; rows * hq], vec![0.0; rows * hq]];
        let (mut area, mut first) = (Vec::new(), 0);
        for m in 0..g.inner {
            let own;
            let mut bytes = match m == g.at {
                true => {
                    own = values.message(self, m);
                    &own[..]
                }
                false => self.scattered(m),
            };
            let (f, n) = (self.formats(), num_rows(&self.sched.member_q[m]));
            let part = |per: usize| first * per..(first + n) * per;
            bytes = f.q.decode(bytes, n, &mut q[part(hq * a.dqk)]);
            if values.up.is_some() {
                bytes = f.d_out.decode(bytes, n, &mut d_out[part(hq * a.dv)]);
                for s in &mut stats {
                    bytes = f.stat.decode(bytes, n, &mut s[part(hq)]);
                }
            }
            area.extend_from_slice(bytes);
            first += n;
        }
        let [lse, delta] = stats.map(|s| transpose(&s, rows, hq));
        let up = values.up.map(|_| Upstream { rows, d_out, lse, delta });
        Ok(Local { q, up, area: Arc::new(area) })
    }

    /// The message of member `m`, after its signal was waited for.
    fn scattered(&self, m: usize) -> &[u8] {
        let f = self.formats();
        let up = match self.work {
            Work::Forward(_) => 0,
            Work::Backward(..) => f.d_out.row_bytes() + 2 * f.stat.row_bytes(),
        };
        let len = num_rows(&self.sched.member_q[m]) * (f.q.row_bytes() + up)
            + num_rows(&self.sched.member_kv[m]) * self.kv_row_bytes();
        let at = self.buf.scatter.range(m * self.buf.scatter_stride, len);
        // SAFETY: member `m` has signalled its message, and gets no new credit before the next
        // launch on this stream, which runs after this one.
        unsafe { self.launch.ctx.local(at, len) }
    }

    /// Returns `out [rows, hq, dv]` and `lse [rows, hq]` to the owners of the rows.
    pub(super) fn gather_out(&self, out: &[f32], lse: &[f32], o: &AttnOut) -> Result<()> {
        let (g, a, f) = (&self.sched.grid, &self.desc.attn, self.formats());
        let hq = self.sched.dims.hq;
        let mut messages = Vec::new();
        let mut at = 0;
        for spans in &self.sched.member_q {
            let (n, mut bytes) = (num_rows(spans), Vec::new());
            f.d_out.encode(&out[at * hq * a.dv..(at + n) * hq * a.dv], None, &mut bytes);
            f.stat.encode(&lse[at * hq..(at + n) * hq], None, &mut bytes);
            messages.push(bytes);
            at += n;
        }
        let n = self.rows.q;
        let mut whole = vec![0.0; n * a.heads_q * a.dv];
        let mut all_lse = vec![0.0; n * a.heads_q];
        let len = n * (f.d_out.row_bytes() + f.stat.row_bytes());
        self.trade(
            messages,
            |_| len,
            |m, bytes| {
                let heads = m * hq..(m + 1) * hq;
                let (mut o, mut l) = (vec![0.0; n * hq * a.dv], vec![0.0; n * hq]);
                let rest = f.d_out.decode(bytes, n, &mut o);
                f.stat.decode(rest, n, &mut l);
                add_heads(&mut whole, &o, &heads, a.heads_q, a.dv);
                add_heads(&mut all_lse, &l, &heads, a.heads_q, 1);
            },
        )?;
        debug_assert_eq!(g.inner * hq, a.heads_q);
        store(&o.out, &whole)?;
        store(&o.lse, &transpose(&all_lse, n, a.heads_q))
    }

    /// Sends each member its message; then `f(m, message of m)` in the order of the members, where
    /// member `m` has sent me `len(m)` bytes.
    pub(super) fn trade(
        &self,
        messages: Vec<Vec<u8>>,
        len: impl Fn(usize) -> usize,
        mut f: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let (g, Launch { ctx, net, .. }) = (&self.sched.grid, &self.launch);
        let messages: Vec<_> = messages.into_iter().map(Arc::new).collect();
        for m in g.other_members() {
            let bytes = messages[m].clone();
            let at = self.buf.gather.range(g.at * self.buf.gather_stride, bytes.len());
            self.queue.push(Job::Send {
                dst: g.member(m),
                credit: CREDIT_GATHER,
                puts: vec![(at, Bytes::Own(bytes))],
                data: DATA_GATHER,
                ack: None,
            })?;
        }
        for m in g.other_members() {
            net.wait_last(ctx, g.member(m), self.signals.slot(DATA_GATHER), 1, "gather")?;
        }
        for (m, own) in messages.iter().enumerate() {
            if m == g.at {
                f(m, own);
                continue;
            }
            let len = len(m);
            let at = self.buf.gather.range(m * self.buf.gather_stride, len);
            // SAFETY: member `m` has signalled its message, and gets no new credit before the next
            // launch on this stream, which runs after this one.
            f(m, unsafe { ctx.local(at, len) });
        }
        Ok(())
    }
}

/// My rows of all heads, as f32.
struct Values {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Scales of q, k and v, `[rows, H]`.
    scales: [Option<Vec<f32>>; 3],
    /// `d_out`, lse and delta, `[rows, Hq, ..]`.
    up: Option<[Vec<f32>; 3]>,
}

impl Values {
    fn load(run: &Run) -> Result<Self> {
        let (d, x, hq, n) = (&run.desc.attn, &run.x, run.desc.attn.heads_q, run.rows.q);
        let scales = |o: &crate::attention::AttnOperand| {
            o.scales.as_ref().map(tilewire_device::Tensor::to_f32).transpose()
        };
        let up = match &run.work {
            Work::Forward(_) => None,
            Work::Backward(b) => Some([
                b.0.d_out.to_f32()?,
                transpose(&b.0.lse.to_f32()?, hq, n),
                transpose(&b.0.delta(d)?, hq, n),
            ]),
        };
        Ok(Self {
            q: x.q.values(d.dqk)?,
            k: x.k.values(d.dqk)?,
            v: x.v.values(d.dv)?,
            scales: [scales(&x.q)?, scales(&x.k)?, scales(&x.v)?],
            up,
        })
    }

    /// What place `m` of the group computes with: q, (d_out, lse, delta,) then k and v span by
    /// span.
    fn message(&self, run: &Run, m: usize) -> Vec<u8> {
        let (a, d, g, f) = (&run.desc.attn, &run.sched.dims, &run.sched.grid, run.formats());
        let (heads, n) = (m * d.hq..(m + 1) * d.hq, run.rows.q);
        let kv = kv_heads(a.heads_kv, g.inner, m);
        let mut out = Vec::new();
        let scale = |i: usize, rows, heads: &_, all| {
            self.scales[i].as_ref().map(|s| pick(s, rows, heads, all, 1))
        };
        let s = scale(0, 0..n, &heads, a.heads_q);
        f.q.encode(&pick(&self.q, 0..n, &heads, a.heads_q, a.dqk), s.as_deref(), &mut out);
        if let Some([d_out, lse, delta]) = &self.up {
            f.d_out.encode(&pick(d_out, 0..n, &heads, a.heads_q, a.dv), None, &mut out);
            f.stat.encode(&pick(lse, 0..n, &heads, a.heads_q, 1), None, &mut out);
            f.stat.encode(&pick(delta, 0..n, &heads, a.heads_q, 1), None, &mut out);
        }
        let mut at = 0;
        for span in &run.sched.member_kv[g.at] {
            let rows = at..at + span.len();
            let tensors = [(&self.k, &f.k, a.dqk, 1), (&self.v, &f.v, a.dv, 2)];
            for (x, f, dim, i) in tensors {
                let s = scale(i, rows.clone(), &kv, a.heads_kv);
                f.encode(&pick(x, rows.clone(), &kv, a.heads_kv, dim), s.as_deref(), &mut out);
            }
            at = rows.end;
        }
        out
    }
}
