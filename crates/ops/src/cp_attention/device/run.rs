//! One launch on a device: copies by copy engines, the kernels of `attention`.
//!
//! A launch enters (the buffers of all ranks are free), publishes the rows that peers need in its
//! own chunk, meets (all ranks have published), gets the rows that it needs, computes attention,
//! publishes results of rows that peers own, meets again, and gets the results of its own rows
//! (`transfers.rs`). Where heads are not traded, the arithmetic begins with the rank's own keys
//! while the other keys travel, and parts of dk and dv travel while dq is made. Through NCCL
//! (`nccl.rs`) nothing is published: one exchange precedes the arithmetic, and one follows it.

use tilewire_core::{Error, Rank, Result};
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_device::{Stream, Tensor};
use tilewire_kernels::abi::TwAttn;
use tilewire_symm::{Signals, StreamTransport, SymBuf};

use super::prepared::Prepared;
use crate::attention::device::{
    Gated, Keys, Parts, Segments, inputs, inputs_bwd, param, param_bwd, part,
};
use crate::attention::{AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows, Sequences};
use crate::common::cuda::{hold, together_on};
use crate::common::lanes::{Lane, Lanes, Poison, Slots};
use crate::common::reduce::Sum;
use crate::common::{Bias, LaunchAt, PlanCore};
use crate::cp_attention::config::KeyOrder;
use crate::cp_attention::desc::CpAttentionDesc;
use crate::cp_attention::launch::{CREDIT, KEYS, MEET_BACK, MEET_KEYS, Work};
use crate::cp_attention::pieces::{Against, GATHER, Piece, Pieces, SCATTER, Sizes};
use crate::cp_attention::schedule::Schedule;
use crate::cp_attention::schedules::Made;
use crate::cp_attention::transfers::{Transfers, flags};

/// The parts of a plan that a launch borrows.
pub(in crate::cp_attention) struct Op<'a> {
    pub core: &'a PlanCore,
    pub lane: &'a Lane,
    pub desc: &'a CpAttentionDesc,
    pub signals: &'a Signals,
    pub buffers: &'a [SymBuf; 4],
    pub p: &'a Prepared,
    pub sched: &'a Made,
    pub seqs: &'a Sequences,
    pub rows: LocalRows,
}

/// Queues one launch of tensors that were checked.
pub(in crate::cp_attention) fn launch(
    op: &Op<'_>,
    at: LaunchAt<'_>,
    x: &AttnInputs,
    work: &Work,
) -> Result<()> {
    let outs = work.outputs();
    let outs = outs.into_iter().map(|t| t.cuda().map(Poison::value)).collect::<Result<Vec<_>>>()?;
    let enter = Slots { signals: op.signals, credit: CREDIT, flags: flags(&op.p.sizes) };
    op.core.run_on(op.lane, at, &enter, &outs, |l| {
        let held = match work {
            Work::Forward(o) => {
                let outs = [o.out.clone(), o.lse.clone()];
                inputs(x).into_iter().chain(outs).collect()
            }
            Work::Backward(b) => inputs_bwd(x, &b.0, &b.1),
        };
        let (me, s) = (op.core.team().rank(), &op.p.sizes);
        let others: &[_] = match op.p.nccl {
            Some(_) => op.sched.others(op.desc, me, s.size),
            None => &[],
        };
        let run = DeviceRun { op, l, x, s, held, others };
        run.keep();
        let done = run.begin().and_then(|()| match work {
            Work::Forward(o) if run.s.begins_at_once() => run.forward_at_once(o),
            Work::Forward(o) => run.forward(o),
            Work::Backward(b) if run.s.begins_at_once() => run.backward_at_once(&b.0, &b.1),
            Work::Backward(b) => run.backward(&b.0, &b.1),
        });
        let done = done.and_then(|()| match &x.offsets {
            Some(_) => op.p.attention.refuse(run.main(), work.outputs()),
            None => Ok(()),
        });
        // Tables of many sequences, and parts of many ranks, are many kernels behind one `keep`.
        run.keep();
        done
    })
}

/// Checks that the tensors of a launch are on the device of `stream`.
pub(in crate::cp_attention) fn together(
    stream: &Stream,
    x: &AttnInputs,
    work: &Work,
) -> Result<()> {
    together_on(stream, &x.named())?;
    match work {
        Work::Forward(o) => together_on(stream, &[("out", Some(&o.out)), ("lse", Some(&o.lse))]),
        Work::Backward(b) => {
            together_on(stream, &b.0.named())?;
            together_on(stream, &b.1.named())
        }
    }
}

pub(super) struct DeviceRun<'a> {
    pub op: &'a Op<'a>,
    pub l: &'a Lanes<'a>,
    pub x: &'a AttnInputs,
    pub s: &'a Sizes,
    held: Vec<Tensor>,
    /// Through NCCL, the schedules of the other ranks; none for mine.
    pub others: &'a [Option<Schedule>],
}

impl DeviceRun<'_> {
    pub(super) fn me(&self) -> Rank {
        self.op.core.team().rank()
    }

    pub(super) fn main(&self) -> &CudaStream {
        self.l.main
    }

    /// Keeps the memory that the next kernels refer to. Called before each batch of kernels, not
    /// once a launch: memory that is registered long before its kernel may be released before that
    /// runs.
    pub(super) fn keep(&self) {
        let held = self.op.p.attention.held(self.held.clone());
        hold(self.main(), (held, self.op.p.memory.all(), self.op.p.fp8.all()));
    }

    pub(super) fn pieces(&self) -> Pieces<'_> {
        Pieces { sizes: self.s, sched: self.op.sched, me: self.me() }
    }

    /// Returns the rows that meet in a kernel of this launch.
    fn segments(&self, of: Against) -> Segments {
        self.pieces().segments(of, self.op.seqs, self.x.offsets.as_ref())
    }

    /// Returns whether heads are traded: then I compute the queries of my group.
    pub fn scatters(&self) -> bool {
        self.s.inner > 1
    }

    /// Address of `len` bytes of my own chunk.
    pub(super) fn own(&self, buffer: usize, at: usize, len: usize) -> Result<u64> {
        self.l.here.addr(self.op.buffers[buffer].range(at, len), len)
    }

    pub(super) fn transfers(&self) -> Transfers<'_, StreamTransport> {
        Transfers {
            net: self.l.net,
            permit: &self.l.permit,
            // Devices compare launches when they begin.
            tag: 0,
            sizes: self.s,
            sched: self.op.sched,
            buffers: self.op.buffers,
            signals: self.op.signals,
        }
    }

    /// Copies `from` to my own chunk.
    pub(super) fn publish(&self, buffer: usize, at: usize, from: &CudaMemory) -> Result<()> {
        self.transfers().publish(self.main(), buffer, at, from)
    }

    fn publish_tensor(&self, buffer: usize, at: usize, t: &Tensor) -> Result<()> {
        self.publish(buffer, at, &t.cuda()?)
    }

    /// Meets the peers: all ranks have published.
    pub(super) fn meet(&self, slot: usize) -> Result<()> {
        self.transfers().meet(self.main(), slot)
    }

    fn get(&self, buffer: usize, pieces: &[Piece], to: &CudaMemory) -> Result<()> {
        self.get_on(self.main(), buffer, pieces, to)
    }

    fn get_on(
        &self,
        stream: &CudaStream,
        buffer: usize,
        pieces: &[Piece],
        to: &CudaMemory,
    ) -> Result<()> {
        self.transfers().get(stream, buffer, pieces, &mut to.clone())
    }

    /// Queues the transfers of the keys of all ranks and, where heads are traded, of my group's
    /// queries. Returns `base` with the addresses, strides and heads of this rank's arithmetic.
    /// `saved` is given in the backward pass.
    fn bring(&self, base: TwAttn, saved: Option<&AttnSaved>) -> Result<TwAttn> {
        let (s, m) = (self.s, &self.op.p.memory);
        match &self.op.p.nccl {
            Some(n) if s.size > 1 => self.bring_by_nccl(n, saved)?,
            _ if self.scatters() => self.bring_by_gets(saved)?,
            _ => return self.own_operands(base),
        }
        self.keep();
        let at: Vec<u64> = m.keys.iter().map(CudaMemory::addr).collect();
        let (k, v) = self.wide_keys(&at)?;
        if !self.scatters() {
            return Ok(TwAttn { k, v, ..base });
        }
        let rows = self.op.sched.rows_q();
        let q = self.wide_queries((m.q[0].addr(), m.q.get(1).map_or(0, |m| m.addr())), rows)?;
        Ok(TwAttn {
            q,
            k,
            v,
            d_out: m.d_out.addr(),
            lse: m.lse.addr(),
            delta: m.delta.addr(),
            out: 0,
            ld_q: (s.hq * s.dqk) as i64,
            ld_k: (s.hkv * s.dqk) as i64,
            ld_v: (s.hkv * s.dv) as i64,
            ld_o: (s.hq * s.dv) as i64,
            heads_q: s.hq as u32,
            heads_kv: s.hkv as u32,
            first_head: self.op.sched.first_head as u32,
            tokens_q: rows as u32,
            ..base
        })
    }

    fn bring_by_gets(&self, saved: Option<&AttnSaved>) -> Result<()> {
        let (s, m) = (self.s, &self.op.p.memory);
        self.publish_all(saved)?;
        self.meet(MEET_KEYS)?;
        // Two streams: two copies at a time.
        self.l.fork()?;
        self.get_keys(true)?;
        for (pieces, to) in self.pieces().query_tensors().iter().zip(&m.q) {
            self.get(SCATTER, pieces, to)?;
        }
        if saved.is_some() {
            let [d_out, lse, delta] = s.upstream();
            self.get(SCATTER, &self.pieces().queries(d_out, s.dv, s.out), &m.d_out)?;
            self.get(SCATTER, &self.pieces().stats(lse), &m.lse)?;
            self.get(SCATTER, &self.pieces().stats(delta), &m.delta)?;
        }
        self.l.join()
    }

    /// Publishes the rows of mine that my group and the ranks of my heads need.
    fn publish_all(&self, saved: Option<&AttnSaved>) -> Result<()> {
        let (s, x) = (self.s, self.x);
        self.transfers().publish_keys(self.main(), &self.own_keys()?)?;
        self.publish_tensor(SCATTER, 0, &x.q.data)?;
        if let Some(scales) = &x.q.scales {
            self.publish_tensor(SCATTER, s.query_scales(), scales)?;
        }
        let Some(saved) = saved else { return Ok(()) };
        let [d_out, lse, delta] = s.upstream();
        self.publish_tensor(SCATTER, d_out, &saved.d_out)?;
        self.publish_tensor(SCATTER, lse, &saved.lse)?;
        let own = self.op.p.attention.delta_memory();
        self.publish(SCATTER, delta, &own.slice(0, 4 * s.all_q * self.op.rows.q)?)
    }

    fn param_fwd(&self, o: &AttnOut) -> Result<TwAttn> {
        let (out, lse) = (o.out.cuda()?.addr(), o.lse.cuda()?.addr());
        Ok(TwAttn { out, lse, ..param(&self.op.desc.attn, self.x, self.op.rows)? })
    }

    /// Returns the kernels' parameters, and queues delta of my rows and all heads, so that the
    /// output need not travel.
    fn param_bwd(&self, saved: &AttnSaved, g: &AttnGrads) -> Result<TwAttn> {
        let attention = &self.op.p.attention;
        self.keep();
        let delta = attention.delta_memory().addr();
        let p = param_bwd(&self.op.desc.attn, self.x, self.op.rows, (saved, g))?;
        let p = TwAttn { delta, ..p };
        attention.delta(self.main(), &self.op.p.desc, &p)?;
        Ok(p)
    }

    /// Computes my queries over my own keys while the other keys travel, then over those, and
    /// merges. Queries that see no other keys are done after the first step.
    fn forward_at_once(&self, o: &AttnOut) -> Result<()> {
        let (op, s, m, d) = (self.op, self.s, &self.op.p.memory, &self.op.p.desc);
        let base = self.param_fwd(o)?;
        if op.p.gated.is_some() {
            // The kernel holds multiprocessors until keys have come. It begins when the copy stream
            // has nothing left of other launches of this heap: these may wait for kernels.
            self.l.join()?;
        }
        self.begin_keys(false)?;
        self.keep();
        let base = self.own_operands(base)?;
        let tables = self.segments(Against::Own);
        // The kernels store 16 bytes of a result at a time, the merge one element. In the canonical
        // order tiles are others.
        let canonical = op.p.config.order == KeyOrder::Canonical;
        if !op.sched.sees_others() && base.out.is_multiple_of(16) && !canonical {
            op.p.attention.forward(self.main(), d, &base, tables)?;
            return self.wait_keys();
        }
        if let Some(gated) = &op.p.gated {
            return self.forward_gated(&base, gated);
        }
        let rows = op.rows.q;
        let (outs, lses) = (m.outs.addr(), m.lses.addr());
        let own = part(base, outs, lses);
        op.p.attention.forward(self.main(), d, &own, tables)?;
        let (k, v) = self.end_keys()?;
        self.keep();
        let (out, lse) = ((rows * s.hq * s.dv * 4) as u64, (rows * s.hq * 4) as u64);
        // The sink belongs to one part.
        let others = TwAttn { k, v, sink: 0, ..part(base, outs + out, lses + lse) };
        op.p.attention.forward(self.main(), d, &others, self.segments(Against::Others))?;
        let merge =
            op.p.merge
                .as_ref()
                .ok_or_else(|| Error::internal("the plan has no kernel that merges"))?;
        let (out, lse, heads) = (base.out, base.lse, s.hq);
        let parts = Parts { parts: outs, lses, num: 2, rows, heads, out, lse };
        merge.launch(self.main(), &parts)
    }

    /// Computes my queries over the keys of all ranks by one kernel, which waits for each rank's.
    /// `base` has my own keys.
    fn forward_gated(&self, base: &TwAttn, gated: &Gated) -> Result<()> {
        let (op, lists, team) = (self.op, self.pieces(), self.l.team()?);
        let own = [base.k, base.v];
        let alone = self.s.size == 1;
        let (k, v) = if alone { (base.k, base.v) } else { self.pushed_keys()? };
        let flags = team.counts(op.signals.slot(KEYS))?;
        let keys = Keys { own, team: team.param(), flags, ends: lists.ends() };
        let all = TwAttn { k, v, ..*base };
        let tables = match op.p.config.order {
            KeyOrder::Arrival => self.segments(Against::AsTheyCome),
            KeyOrder::Canonical => self.segments(Against::All),
        };
        op.p.attention.forward_gated(self.main(), &op.p.desc, (&all, &keys), tables, gated)?;
        // Counts the flags. The kernel has waited for them, if it had queries.
        if alone { Ok(()) } else { self.wait_keys() }
    }

    /// Queues the backward pass with parts of dk and dv first, so that they travel while dq is
    /// made.
    fn backward_at_once(&self, saved: &AttnSaved, g: &AttnGrads) -> Result<()> {
        let (op, s, d) = (self.op, self.s, &self.op.p.desc);
        let (attention, lists, main) = (&op.p.attention, self.pieces(), self.main());
        let base = self.param_bwd(saved, g)?;
        self.begin_keys(true)?;
        self.keep();
        let base = self.own_operands(base)?;
        let (dk, dv) = self.part_addrs()?;
        let first = (lists.first_key(self.me().idx()) * s.hkv * s.part) as u64;
        let at = |base: u64, dim: usize| base + first * dim as u64;
        let own = TwAttn { dk: at(dk, s.dqk), dv: at(dv, s.dv), ..base };
        let tables = |of| attention.tables(main, d, self.segments(of));
        attention.keys(main, d, &own, &tables(Against::Own)?)?;
        let (k, v) = self.end_keys()?;
        let all = TwAttn { k, v, dk, dv, ..base };
        self.keep();
        // Nobody gets parts of keys that no query of mine sees.
        if op.sched.sees_others() {
            attention.keys(main, d, &all, &tables(Against::Others)?)?;
        }
        self.publish_parts()?;
        self.meet(MEET_BACK)?;
        self.l.fork()?;
        self.get_parts(self.l.side)?;
        self.keep();
        attention.queries(main, d, &all, &tables(Against::All)?)?;
        self.l.join()?;
        self.widen_parts()?;
        self.add_all(g)
    }

    /// Gets the parts of my rows from all ranks. Parts that no query contributes to stay zero.
    fn get_parts(&self, stream: &CudaStream) -> Result<()> {
        let (to, buffer) = (self.part_slots()?, self.s.parts().0);
        stream.fill_memory(to, 0)?;
        self.pieces().parts().iter().try_for_each(|p| self.get_on(stream, buffer, p, to))
    }

    fn forward(&self, o: &AttnOut) -> Result<()> {
        let (op, s, m, d) = (self.op, self.s, &self.op.p.memory, &self.op.p.desc);
        let mut p = self.bring(self.param_fwd(o)?, None)?;
        if let Some(gated) = &op.p.gated {
            // One rank, in the canonical order.
            return self.forward_gated(&p, gated);
        }
        let rows = op.sched.rows_q() * s.hq;
        if self.scatters() {
            p.out = self.own(GATHER, 0, rows * s.dv * s.out)?;
        }
        self.keep();
        op.p.attention.forward(self.main(), d, &p, self.segments(Against::All))?;
        if !self.scatters() {
            return Ok(());
        }
        if let Some(n) = &op.p.nccl {
            return self.give_out(n, o);
        }
        self.publish(GATHER, s.lse(), &m.lse.slice(0, 4 * rows)?)?;
        self.meet(MEET_BACK)?;
        self.get(GATHER, &self.pieces().results(0, s.dv), &o.out.cuda()?)?;
        self.get(GATHER, &self.pieces().lse(), &o.lse.cuda()?)
    }

    fn backward(&self, saved: &AttnSaved, g: &AttnGrads) -> Result<()> {
        let (op, s, d, main) = (self.op, self.s, &self.op.p.desc, self.main());
        let attention = &op.p.attention;
        let mut p = self.bring(self.param_bwd(saved, g)?, Some(saved))?;
        // Without heads that are traded or ranks to give to, dk and dv are the gradients
        // themselves.
        let parts = self.scatters() || s.size > 1;
        if parts {
            (p.dk, p.dv) = self.part_addrs()?;
        }
        if self.scatters() {
            let len = op.sched.rows_q() * s.hq * s.dqk * s.out;
            p.dq = self.own(GATHER, s.dq(), len)?;
            // Heads of other ranks stay zero.
            if let Some(t) = &g.dsink {
                main.fill_memory(&t.cuda()?, 0)?;
            }
        }
        self.keep();
        let tables = attention.tables(main, d, self.segments(Against::All))?;
        attention.keys(main, d, &p, &tables)?;
        attention.queries(main, d, &p, &tables)?;
        if !parts {
            return Ok(());
        }
        if let Some(n) = &op.p.nccl {
            return self.give_grads(n, g);
        }
        self.publish_parts()?;
        self.meet(MEET_BACK)?;
        self.get(GATHER, &self.pieces().results(s.dq(), s.dqk), &g.dq.cuda()?)?;
        self.collect(g)
    }

    /// Gets and adds dk and dv of my rows from all ranks.
    fn collect(&self, g: &AttnGrads) -> Result<()> {
        if !self.s.adds() {
            let (lists, buffer) = (self.pieces().parts(), self.s.parts().0);
            self.get(buffer, &lists[0], &g.dk.cuda()?)?;
            return self.get(buffer, &lists[1], &g.dv.cuda()?);
        }
        self.get_parts(self.main())?;
        self.widen_parts()?;
        self.add_all(g)
    }

    pub fn add_all(&self, g: &AttnGrads) -> Result<()> {
        self.keep();
        let (dk, dv) = self.part_addrs()?;
        let (stride, second) = self.s.slot();
        self.add((dk, self.s.dqk), (0, stride), &g.dk.cuda()?)?;
        self.add((dv, self.s.dv), (second, stride), &g.dv.cuda()?)
    }

    /// Adds the parts at byte `at` of each slot in their order. My own part, if it has all heads,
    /// is read where the kernel wrote it.
    fn add(
        &self,
        (parts, dim): (u64, usize),
        (at, stride): (usize, usize),
        out: &CudaMemory,
    ) -> Result<()> {
        let (s, m, rows) = (self.s, &self.op.p.memory, self.op.rows.kv);
        let sum = self
            .op
            .p
            .sum
            .as_ref()
            .ok_or_else(|| Error::internal("the plan has no kernel that adds"))?;
        let row = s.all_kv * dim * 4;
        let slots = m.slots.addr() + at as u64;
        let me = (s.inner == 1).then_some(self.me().idx());
        let own = match me {
            Some(me) if rows > 0 => parts + (self.pieces().first_key(me) * row) as u64,
            _ => slots,
        };
        let cols = s.all_kv * dim;
        let (out, stride) = (out.addr(), stride as u64);
        let sum_of = Sum { slots, stride, own, out, bias: Bias::default(), rows, cols, scale: 1.0 };
        sum.launch_parts(self.l, &sum_of, (me, s.num_parts()))
    }
}
