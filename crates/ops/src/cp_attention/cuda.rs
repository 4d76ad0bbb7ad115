//! Context-parallel attention on CUDA devices: copies by copy engines, the kernels of `attention`.
//!
//! A launch is: enter (everybody's buffers are free), publish what peers need in my own chunk, meet
//! (everybody has), get what I need, attend, publish what others own, meet, get what I own. With
//! `all_gather` keys are pushed instead, with a flag behind them; with `ring` they go from neighbour
//! to neighbour. Where heads are not traded, the
//! arithmetic begins with my own keys while those of others come, and parts of dk and dv travel
//! while dq is made. Through NCCL (`nccl.rs`) nothing is published: one exchange stands before the
//! arithmetic, and one behind it.

use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_symm::{Enter, Signals, SymBuf};

use super::config::{Schedule, Strategy};
use super::fp8::{self, Fp8};
use super::nccl::Exchange;
use super::pieces::{GATHER, Piece, Pieces, SCATTER, Sizes};
use super::plan::Work;
use super::{CpAttentionDesc, Layout};
use crate::attention::cuda::{
    Prepared as Attention, Room, inputs, inputs_bwd, param, param_bwd, part,
};
use crate::attention::fp8::kernel_desc;
use crate::attention::merge::{Merge, Parts};
use crate::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows, Sequences,
};
use crate::common::Bias;
use crate::common::PlanCore;
use crate::common::cuda::{hold, together_on, workspace};
use crate::common::lanes::{Lane, Lanes, Poison, Reducer, Slots, Sum};
use tilewire_kernels::abi::TwAttn;

/// Signal slots on devices: a credit, the flag of pushed keys, two meetings, and the credit of a slot
/// of the ring.
const CREDIT: usize = 0;
pub(super) const KEYS: usize = 1;
pub(super) const MEET_KEYS: usize = 2;
const MEET_BACK: usize = 3;
pub(super) const RING_CREDIT: usize = 4;

/// Strategies that `prepare` may choose on devices. Each device is one hop away from every other, so
/// a ring sends the same bytes over fewer links: it is there for who asks for it.
pub(super) fn may_choose(s: Strategy) -> bool {
    s != Strategy::Ring
}

/// Refuses what has no path on devices.
///
/// # Errors
/// `Unsupported`, with what to use instead.
pub(super) fn check(d: &CpAttentionDesc) -> Result<()> {
    fp8::check(d)
}

/// Private memory of a plan. Empty where a strategy has no use for it.
pub(super) struct Memory {
    /// Tensors of queries of my group.
    pub q: Vec<CudaMemory>,
    /// Tensors of keys of all ranks.
    pub keys: Vec<CudaMemory>,
    pub d_out: CudaMemory,
    pub lse: CudaMemory,
    pub delta: CudaMemory,
    /// Parts of dk and dv of my rows.
    pub slots: CudaMemory,
    /// Results over my own keys and over those of others, and their lse.
    outs: CudaMemory,
    lses: CudaMemory,
}

impl Memory {
    fn new(ctx: &CudaContext, s: &Sizes, backward: bool) -> Result<Self> {
        let some = |there: bool, len: usize| workspace(ctx, if there { len } else { 0 });
        let scatters = s.inner > 1;
        let gets = s.size > 1 && (s.sequential || s.strategy != Strategy::AllGather);
        let (rows, keys) = (s.inner * s.max_q * s.hq, s.all_keys() * s.hkv);
        let split = s.begins_at_once();
        Ok(Self {
            q: s.q_wire.iter().map(|b| some(scatters, rows * b)).collect::<Result<_>>()?,
            keys: s.wire.iter().map(|b| some(gets, keys * b)).collect::<Result<_>>()?,
            d_out: some(scatters && backward, rows * s.dv * s.out)?,
            lse: some(scatters, rows * 4)?,
            delta: some(scatters && backward, rows * 4)?,
            slots: some(backward && s.adds(), s.num_parts() * s.slot().0)?,
            outs: some(split, 2 * rows * s.dv * 4)?,
            lses: some(split, 2 * rows * 4)?,
        })
    }

    fn all(&self) -> Vec<CudaMemory> {
        let a = [&self.d_out, &self.lse, &self.delta, &self.slots, &self.outs, &self.lses];
        a.into_iter().chain(&self.q).chain(&self.keys).cloned().collect()
    }
}

/// What `prepare` makes.
pub(super) struct Prepared {
    pub attention: Attention,
    /// What its kernels compute: of f32 where keys travel as FP8.
    desc: AttentionDesc,
    pub fp8: Fp8,
    pub sizes: Sizes,
    pub memory: Memory,
    /// Adds parts of dk and dv.
    sum: Option<Reducer>,
    /// Merges results over parts of the keys.
    merge: Option<Merge>,
    pub nccl: Option<Exchange>,
}

impl Prepared {
    pub fn new(
        lane: &Lane,
        d: &CpAttentionDesc,
        (strategy, nccl): (Strategy, bool),
        size: usize,
    ) -> Result<Self> {
        let (ctx, mut sizes) = (lane.context(), Sizes::new(d, strategy, size));
        sizes.sequential = nccl;
        let dkv = if sizes.adds() { DType::F32 } else { d.attn.out };
        let split = sizes.begins_at_once();
        let queries = sizes.max_q * d.attn.heads_q;
        let out = if split { DType::F32 } else { d.attn.out };
        // Chunks of each sequence, and one more where a sequence ends and its padding begins.
        let pieces = match d.layout {
            Layout::ZigzagPerSequence => (2 * size + 1, 0),
            Layout::Zigzag | Layout::Contiguous => (2, 4 * size),
        };
        let room = Room { queries, pieces, dkv, out };
        let desc = if d.kv_wire().1 { kernel_desc(&d.attn) } else { d.attn.clone() };
        let attention = Attention::sized(ctx, &desc, &room)?;
        let adds = d.backward && sizes.adds();
        let types = [DType::F32, DType::F32, d.attn.out];
        let sum = adds.then(|| Reducer::new(ctx, types)).transpose()?;
        let merge = split.then(|| Merge::new(ctx, &d.attn)).transpose()?;
        let memory = Memory::new(ctx, &sizes, d.backward)?;
        let fp8 = Fp8::new(ctx, d, &sizes)?;
        let nccl = nccl.then(|| Exchange::new(ctx, &sizes, d.backward)).transpose()?;
        Ok(Self { attention, desc, fp8, sizes, memory, sum, merge, nccl })
    }

    /// Collective, behind the agreement: NCCL, if rows go through it.
    pub fn connect(&self, core: &PlanCore, stream: &Stream) -> Result<()> {
        self.nccl.as_ref().map_or(Ok(()), |n| n.connect(core, stream))
    }

    pub fn explain(&self) -> Option<&str> {
        self.nccl.as_ref().and_then(Exchange::explain)
    }
}

/// What a plan lends to a launch.
pub(super) struct Op<'a> {
    pub core: &'a PlanCore,
    pub lane: &'a Lane,
    pub desc: &'a CpAttentionDesc,
    pub signals: &'a Signals,
    pub buffers: &'a [SymBuf; 4],
    pub p: &'a Prepared,
    pub sched: &'a Schedule,
    pub seqs: &'a Sequences,
    pub rows: LocalRows,
}

/// Queues one launch of tensors that were checked; `seq` is its number.
pub(super) fn launch(
    op: &Op<'_>,
    (stream, seq): (&Stream, u64),
    x: &AttnInputs,
    work: &Work,
) -> Result<()> {
    let outs = work.outputs();
    let outs = outs.into_iter().map(|t| t.cuda().map(Poison::value)).collect::<Result<Vec<_>>>()?;
    let all_gather = op.p.sizes.strategy == Strategy::AllGather;
    let pushes = op.p.nccl.is_none() && all_gather && op.p.sizes.size > 1;
    let flags = if pushes { KEYS..KEYS + 1 } else { KEYS..KEYS };
    let enter = Slots { signals: op.signals, credit: CREDIT, flags };
    op.core.run_on(op.lane, (stream, seq), &enter, &outs, |l| {
        let held = match work {
            Work::Forward(o) => {
                let outs = [o.out.clone(), o.lse.clone()];
                inputs(x).into_iter().chain(outs).collect()
            }
            Work::Backward(b) => inputs_bwd(x, &b.0, &b.1),
        };
        let others = if op.p.nccl.is_some() { others(op) } else { Vec::new() };
        let run = Run { op, l, x, s: &op.p.sizes, held, others };
        run.keep();
        let done = run.begin().and_then(|()| match work {
            Work::Forward(o) if run.s.begins_at_once() => run.forward_at_once(o),
            Work::Forward(o) => run.forward(o),
            Work::Backward(b) if run.s.begins_at_once() => run.backward_at_once(&b.0, &b.1),
            Work::Backward(b) => run.backward(&b.0, &b.1),
        });
        // Tables of many sequences, and parts of many ranks, are many kernels behind one `keep`.
        run.keep();
        done
    })
}

/// Checks that the tensors of a launch lie on the device of `stream`.
pub(super) fn together(stream: &Stream, x: &AttnInputs, work: &Work) -> Result<()> {
    together_on(stream, &x.named())?;
    match work {
        Work::Forward(o) => together_on(stream, &[("out", Some(&o.out)), ("lse", Some(&o.lse))]),
        Work::Backward(b) => {
            together_on(stream, &b.0.named())?;
            together_on(stream, &b.1.named())
        }
    }
}

pub(super) struct Run<'a> {
    pub op: &'a Op<'a>,
    pub l: &'a Lanes<'a>,
    pub x: &'a AttnInputs,
    pub s: &'a Sizes,
    held: Vec<Tensor>,
    /// Through NCCL, the schedules of the other ranks; none for mine.
    pub others: Vec<Option<Schedule>>,
}

fn others(op: &Op<'_>) -> Vec<Option<Schedule>> {
    let (me, s) = (op.core.team().rank(), &op.p.sizes);
    let of = |r| Schedule::new(op.desc, op.seqs, s.strategy, r, s.size);
    Rank::all(s.size).map(|r| (r != me).then(|| of(r))).collect()
}

impl Run<'_> {
    pub(super) fn me(&self) -> Rank {
        self.op.core.team().rank()
    }

    pub(super) fn main(&self) -> &CudaStream {
        self.l.main
    }

    /// Keeps what the kernels that are queued next refer to. Not once for a launch: what is held long
    /// before its work may be let go, and copies hold much.
    pub(super) fn keep(&self) {
        let held = self.op.p.attention.held(self.held.clone());
        hold(self.main(), (held, self.op.p.memory.all(), self.op.p.fp8.all()));
    }

    pub(super) fn pieces(&self) -> Pieces<'_> {
        Pieces { sizes: self.s, sched: self.op.sched, me: self.me() }
    }

    /// Heads are traded: my queries are those of my group.
    pub fn scatters(&self) -> bool {
        self.s.inner > 1
    }

    /// Address of `len` bytes of my own chunk.
    pub(super) fn own(&self, buffer: usize, at: usize, len: usize) -> Result<u64> {
        self.l.here.addr(self.op.buffers[buffer].range(at, len), len)
    }

    /// Copies `from` to my own chunk.
    pub(super) fn publish(&self, buffer: usize, at: usize, from: &CudaMemory) -> Result<()> {
        let len = from.len_bytes();
        if len == 0 {
            return Ok(());
        }
        let to = (self.me(), self.op.buffers[buffer].range(at, len));
        self.l.net.put(self.main(), &self.l.permit, to, from, "own rows")
    }

    fn publish_tensor(&self, buffer: usize, at: usize, t: &Tensor) -> Result<()> {
        self.publish(buffer, at, &t.cuda()?)
    }

    /// Everybody has published.
    pub(super) fn meet(&self, slot: usize) -> Result<()> {
        let slot = self.op.signals.slot(slot);
        let meeting = Enter { credit: slot, tag: 0, first: slot, num: 0 };
        // Nothing is put behind this meeting under its permit.
        self.l.net.enter(self.main(), &meeting).map(|_permit| ())
    }

    fn get(&self, buffer: usize, pieces: &[Piece], to: &CudaMemory) -> Result<()> {
        self.get_on(self.main(), buffer, pieces, to)
    }

    pub(super) fn get_on(
        &self,
        stream: &CudaStream,
        buffer: usize,
        pieces: &[Piece],
        to: &CudaMemory,
    ) -> Result<()> {
        let team = self.l.team()?;
        for p in pieces.iter().filter(|p| p.width * p.rows > 0) {
            let src = self.op.buffers[buffer].range(p.src, (p.rows - 1) * p.src_pitch + p.width);
            let out = to.slice(p.dst, (p.rows - 1) * p.dst_pitch + p.width)?;
            let shape = (p.width, p.rows);
            let (from, to) = ((p.peer, src, p.src_pitch), (&out, p.dst_pitch));
            // SAFETY: every rank has published and met the others (`meet`), and writes its area
            // again behind the meeting at the head of the next launch.
            unsafe { team.get_rows(stream, from, to, shape)? };
        }
        Ok(())
    }

    /// Where heads are traded, brings the keys of all ranks and the queries of my group: what `base`
    /// is told, with addresses, strides and heads of what this rank computes. `saved` in the
    /// backward pass.
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
        self.get_keys(SCATTER)?;
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

    /// What my group and the owners of my heads need of mine.
    fn publish_all(&self, saved: Option<&AttnSaved>) -> Result<()> {
        let (s, x) = (self.s, self.x);
        self.publish_keys()?;
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

    /// With delta, of my rows and all heads: the output need not travel.
    fn param_bwd(&self, saved: &AttnSaved, g: &AttnGrads) -> Result<TwAttn> {
        let attention = &self.op.p.attention;
        self.keep();
        let delta = attention.delta_memory().addr();
        let p = param_bwd(&self.op.desc.attn, self.x, self.op.rows, (saved, g))?;
        let p = TwAttn { delta, ..p };
        attention.delta(self.main(), &p)?;
        Ok(p)
    }

    /// My queries against my own keys while those of others come, then against those.
    fn forward_at_once(&self, o: &AttnOut) -> Result<()> {
        let (op, s, m, d) = (self.op, self.s, &self.op.p.memory, &self.op.p.desc);
        let base = self.param_fwd(o)?;
        self.begin_keys(false)?;
        self.keep();
        let base = self.own_operands(base)?;
        let rows = op.rows.q;
        let (outs, lses) = (m.outs.addr(), m.lses.addr());
        let own = part(base, outs, lses);
        op.p.attention.forward(self.main(), d, &own, self.pieces().own_tables(op.seqs))?;
        let (k, v) = self.end_keys()?;
        self.keep();
        let (out, lse) = ((rows * s.hq * s.dv * 4) as u64, (rows * s.hq * 4) as u64);
        // The sink belongs to one part.
        let others = TwAttn { k, v, sink: 0, ..part(base, outs + out, lses + lse) };
        op.p.attention.forward(self.main(), d, &others, self.pieces().other_tables(op.seqs))?;
        let merge = op.p.merge.as_ref().ok_or_else(|| Error::internal("no kernel that merges"))?;
        let (out, lse, heads) = (base.out, base.lse, s.hq);
        let parts = Parts { parts: outs, lses, num: 2, rows, heads, out, lse };
        merge.launch(self.main(), &parts)
    }

    /// Parts of dk and dv first, so that they travel while dq is made.
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
        attention.keys(main, d, &own, &attention.tables(main, lists.own_tables(op.seqs))?)?;
        let (k, v) = self.end_keys()?;
        let all = TwAttn { k, v, dk, dv, ..base };
        self.keep();
        attention.keys(main, d, &all, &attention.tables(main, lists.other_tables(op.seqs))?)?;
        self.publish_parts()?;
        self.meet(MEET_BACK)?;
        self.l.fork()?;
        self.get_parts(self.l.side)?;
        self.keep();
        attention.queries(main, d, &all, &attention.tables(main, lists.all_tables(op.seqs))?)?;
        self.l.join()?;
        self.widen_parts()?;
        self.add_all(g)
    }

    /// Parts of my rows of all ranks. Those that are not asked for are zeros.
    fn get_parts(&self, stream: &CudaStream) -> Result<()> {
        let (to, buffer) = (self.part_slots()?, self.s.parts().0);
        stream.fill_memory(to, 0)?;
        self.pieces().parts().iter().try_for_each(|p| self.get_on(stream, buffer, p, to))
    }

    fn forward(&self, o: &AttnOut) -> Result<()> {
        let (op, s, m, d) = (self.op, self.s, &self.op.p.memory, &self.op.p.desc);
        let mut p = self.bring(self.param_fwd(o)?, None)?;
        let rows = op.sched.rows_q() * s.hq;
        if self.scatters() {
            p.out = self.own(GATHER, 0, rows * s.dv * s.out)?;
        }
        self.keep();
        op.p.attention.forward(self.main(), d, &p, self.pieces().all_tables(op.seqs))?;
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
        // Without heads that are traded or ranks to give to, dk and dv are the gradients themselves.
        let parts = self.scatters() || s.size > 1;
        if parts {
            (p.dk, p.dv) = self.part_addrs()?;
        }
        if self.scatters() {
            let len = op.sched.rows_q() * s.hq * s.dqk * s.out;
            p.dq = self.own(GATHER, s.dq(), len)?;
            // Heads of others stay zero.
            if let Some(t) = &g.dsink {
                main.fill_memory(&t.cuda()?, 0)?;
            }
        }
        self.keep();
        let tables = attention.tables(main, self.pieces().all_tables(op.seqs))?;
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

    /// dk and dv of my rows, from all ranks.
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

    /// Adds the parts at byte `at` of each slot in their order; my own, if of all heads, lies where
    /// the kernel put it.
    fn add(
        &self,
        (parts, dim): (u64, usize),
        (at, stride): (usize, usize),
        out: &CudaMemory,
    ) -> Result<()> {
        let (s, m, rows) = (self.s, &self.op.p.memory, self.op.rows.kv);
        let sum = self.op.p.sum.as_ref().ok_or_else(|| Error::internal("no kernel that adds"))?;
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
