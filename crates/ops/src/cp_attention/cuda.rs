//! Context-parallel attention on CUDA devices: copies by copy engines, the kernels of `attention`.
//!
//! A launch is: enter (everybody's buffers are free), publish what peers need in my own chunk, meet
//! (everybody has), get what I need, attend over all keys at once, publish what others own, meet,
//! get what I own. With `all_gather` keys are pushed instead, with a flag behind them.

use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_symm::{OneSided, Signals, SymBuf};

use super::CpAttentionDesc;
use super::config::{Schedule, Strategy};
use super::pieces::{self, AREA, Piece, Pieces, SCATTER, Sizes};
use super::plan::Work;
use crate::attention::cuda::{
    Param, Prepared as Attention, Room, inputs, inputs_bwd, param, param_bwd,
};
use crate::attention::table::segments;
use crate::attention::{AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows, Sequences};
use crate::common::PlanCore;
use crate::common::cuda::{hold, no_kernel, together_on, workspace};
use crate::common::lanes::{Enter, Lane, Lanes, Poison, Reducer, Sum};

/// Signal slots on devices: a credit, the flag of pushed keys, and two meetings.
const CREDIT: usize = 0;
const KEYS: usize = 1;
const MEET_KEYS: usize = 2;
const MEET_BACK: usize = 3;

/// Strategies with a path on devices.
pub(super) fn on_devices(s: Strategy) -> bool {
    s != Strategy::Ring
}

/// Refuses what has no path on devices.
///
/// # Errors
/// `Unsupported`, with what to use instead.
pub(super) fn check(d: &CpAttentionDesc, strategy: Option<Strategy>) -> Result<()> {
    if strategy.is_some_and(|s| !on_devices(s)) {
        let what = "context parallelism by `ring`";
        return Err(no_kernel(what, "use get or all_gather: every device is one hop away"));
    }
    if d.kv_wire().1 {
        let what = "context parallelism with e4m3 keys and values";
        return Err(no_kernel(what, "pass bf16 or f16 and leave `fp8_kv` off"));
    }
    if d.dkv_wire != DType::F32 {
        let what = format!("partial dk and dv in {}", d.dkv_wire);
        return Err(no_kernel(what, "leave `dkv_wire` at f32"));
    }
    Ok(())
}

/// Private memory of a plan. Empty where a strategy has no use for it.
struct Memory {
    q: CudaMemory,
    k: CudaMemory,
    v: CudaMemory,
    d_out: CudaMemory,
    lse: CudaMemory,
    delta: CudaMemory,
    /// Parts of dk and dv of my rows.
    slots: CudaMemory,
}

impl Memory {
    fn new(ctx: &CudaContext, s: &Sizes, backward: bool) -> Result<Self> {
        let some = |there: bool, len: usize| workspace(ctx, if there { len } else { 0 });
        let (scatters, gets) = (s.inner > 1, s.size > 1 && s.strategy != Strategy::AllGather);
        let (rows, keys) = (s.inner * s.max_q * s.hq, s.all_keys() * s.hkv);
        Ok(Self {
            q: some(scatters, rows * s.dqk * s.input)?,
            k: some(gets, keys * s.dqk * s.input)?,
            v: some(gets, keys * s.dv * s.input)?,
            d_out: some(scatters && backward, rows * s.dv * s.out)?,
            lse: some(scatters, rows * 4)?,
            delta: some(scatters && backward, rows * 4)?,
            slots: some(backward && s.adds(), s.num_parts() * s.slot().0)?,
        })
    }

    fn all(&self) -> [CudaMemory; 7] {
        [&self.q, &self.k, &self.v, &self.d_out, &self.lse, &self.delta, &self.slots]
            .map(Clone::clone)
    }
}

/// What `prepare` makes.
pub(super) struct Prepared {
    attention: Attention,
    sizes: Sizes,
    memory: Memory,
    /// Adds parts of dk and dv.
    sum: Option<Reducer>,
}

impl Prepared {
    pub fn new(lane: &Lane, d: &CpAttentionDesc, strategy: Strategy, size: usize) -> Result<Self> {
        let (ctx, sizes) = (lane.context(), Sizes::new(d, strategy, size));
        let dkv = if sizes.adds() { DType::F32 } else { d.attn.out };
        let queries = sizes.max_q * d.attn.heads_q;
        let attention = Attention::sized(
            ctx,
            &d.attn,
            &Room { queries, spans: 4 * size, dkv, out: d.attn.out },
        )?;
        let adds = d.backward && sizes.adds();
        let types = [DType::F32, DType::F32, d.attn.out];
        let sum = adds.then(|| Reducer::new(ctx, types)).transpose()?;
        let memory = Memory::new(ctx, &sizes, d.backward)?;
        Ok(Self { attention, sizes, memory, sum })
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
    let pushes = op.p.sizes.strategy == Strategy::AllGather && op.p.sizes.size > 1;
    let flags = if pushes { KEYS..KEYS + 1 } else { KEYS..KEYS };
    let enter = Enter { signals: op.signals, credit: CREDIT, flags };
    op.core.run_on(op.lane, (stream, seq), &enter, &outs, |l| {
        hold(l.main, op.p.memory.all());
        let run = Run { op, l, x, s: &op.p.sizes };
        match work {
            Work::Forward(o) => run.forward(o),
            Work::Backward(b) => run.backward(&b.0, &b.1),
        }
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

struct Run<'a> {
    op: &'a Op<'a>,
    l: &'a Lanes<'a>,
    x: &'a AttnInputs,
    s: &'a Sizes,
}

impl Run<'_> {
    fn me(&self) -> Rank {
        self.op.core.team().rank()
    }

    fn main(&self) -> &CudaStream {
        self.l.main
    }

    fn pieces(&self) -> Pieces<'_> {
        Pieces { sizes: self.s, sched: self.op.sched, me: self.me() }
    }

    /// Heads are traded: my queries are those of my group.
    fn scatters(&self) -> bool {
        self.s.inner > 1
    }

    /// Address of `len` bytes of my own chunk.
    fn own(&self, buffer: usize, at: usize, len: usize) -> Result<u64> {
        self.l.os.addr(self.me(), self.op.buffers[buffer].range(at, len), len)
    }

    /// Copies `from` to my own chunk.
    fn publish(&self, buffer: usize, at: usize, from: &CudaMemory) -> Result<()> {
        let len = from.len_bytes();
        if len == 0 {
            return Ok(());
        }
        self.l.os.put(self.main(), self.me(), self.op.buffers[buffer].range(at, len), from)
    }

    fn publish_tensor(&self, buffer: usize, at: usize, t: &Tensor) -> Result<()> {
        self.publish(buffer, at, &t.cuda()?)
    }

    /// Everybody has published.
    fn meet(&self, slot: usize) -> Result<()> {
        let slot = self.op.signals.slot(slot);
        self.l.os.enter(self.main(), slot, slot, 0)
    }

    fn get(&self, buffer: usize, pieces: &[Piece], to: &CudaMemory) -> Result<()> {
        for p in pieces.iter().filter(|p| p.width * p.rows > 0) {
            let src = self.op.buffers[buffer].range(p.src, (p.rows - 1) * p.src_pitch + p.width);
            let out = to.slice(p.dst, (p.rows - 1) * p.dst_pitch + p.width)?;
            let shape = (p.width, p.rows);
            self.l.os.get_rows(
                self.main(),
                (p.peer, src, p.src_pitch),
                (&out, p.dst_pitch),
                shape,
            )?;
        }
        Ok(())
    }

    /// Brings keys (and queries, where heads are traded) here: what `base` is told, with addresses,
    /// strides and heads of what this rank computes. `saved` in the backward pass.
    fn bring(&self, base: Param, saved: Option<&AttnSaved>) -> Result<Param> {
        let (s, m) = (self.s, &self.op.p.memory);
        if s.size == 1 {
            return Ok(base);
        }
        let (k, v) = match s.strategy {
            Strategy::AllGather => self.push_keys()?,
            _ => {
                self.publish_all(saved)?;
                self.meet(MEET_KEYS)?;
                let [k, v] = self.pieces().keys();
                let buffer = s.published().0;
                self.get(buffer, &k, &m.k)?;
                self.get(buffer, &v, &m.v)?;
                (m.k.addr(), m.v.addr())
            }
        };
        let p = Param {
            k,
            v,
            ld_q: (s.hq * s.dqk) as u64,
            ld_k: (s.hkv * s.dqk) as u64,
            ld_v: (s.hkv * s.dv) as u64,
            ld_o: (s.hq * s.dv) as u64,
            heads_q: s.hq as u32,
            heads_kv: s.hkv as u32,
            first_head: self.op.sched.first_head as u32,
            tokens_q: self.op.sched.rows_q() as u32,
            ..base
        };
        if !self.scatters() {
            return Ok(p);
        }
        self.get(SCATTER, &self.pieces().queries(0, s.dqk, s.input), &m.q)?;
        if saved.is_some() {
            let [d_out, lse, delta] = s.upstream();
            self.get(SCATTER, &self.pieces().queries(d_out, s.dv, s.out), &m.d_out)?;
            self.get(SCATTER, &self.pieces().stats(lse), &m.lse)?;
            self.get(SCATTER, &self.pieces().stats(delta), &m.delta)?;
        }
        let (q, d_out) = (m.q.addr(), m.d_out.addr());
        Ok(Param { q, d_out, lse: m.lse.addr(), delta: m.delta.addr(), out: 0, ..p })
    }

    /// My keys to everybody; where those of all ranks are once their flags have come.
    fn push_keys(&self) -> Result<(u64, u64)> {
        let (s, op, x, os) = (self.s, self.op, self.x, self.l.os);
        let (_, k_at, v_at) = s.published();
        let (k, v) = (x.k.data.cuda()?, x.v.data.cuda()?);
        let first = self.pieces().first_key(self.me().idx());
        let (k_row, v_row) = (s.all_kv * s.dqk * s.input, s.all_kv * s.dv * s.input);
        let (k_at, v_at) = (k_at + first * k_row, v_at + first * v_row);
        for p in op.core.team().peers() {
            if k.len_bytes() > 0 {
                os.put(self.l.side, p, op.buffers[AREA].range(k_at, k.len_bytes()), &k)?;
            }
            let at = op.buffers[AREA].range(v_at, v.len_bytes());
            os.put_flag(self.l.side, (p, at), &v, op.signals.slot(KEYS))?;
        }
        self.publish(AREA, k_at, &k)?;
        self.publish(AREA, v_at, &v)?;
        os.wait_peers(self.main(), op.signals.slot(KEYS))?;
        let keys = s.all_keys();
        let (_, k_at, v_at) = s.published();
        Ok((self.own(AREA, k_at, keys * k_row)?, self.own(AREA, v_at, keys * v_row)?))
    }

    fn publish_all(&self, saved: Option<&AttnSaved>) -> Result<()> {
        let (s, x) = (self.s, self.x);
        let (buffer, k, v) = s.published();
        self.publish_tensor(buffer, k, &x.k.data)?;
        self.publish_tensor(buffer, v, &x.v.data)?;
        if !self.scatters() {
            return Ok(());
        }
        self.publish_tensor(SCATTER, 0, &x.q.data)?;
        let Some(saved) = saved else { return Ok(()) };
        let [d_out, lse, delta] = s.upstream();
        self.publish_tensor(SCATTER, d_out, &saved.d_out)?;
        self.publish_tensor(SCATTER, lse, &saved.lse)?;
        let own = self.op.p.attention.delta_memory();
        self.publish(SCATTER, delta, &own.slice(0, 4 * s.all_q * self.op.rows.q)?)
    }

    /// My group's queries and everybody's keys, as they lie here.
    fn tables(&self) -> pieces::Tables {
        let s = self.op.sched;
        segments(&s.member_q.concat(), &s.areas.concat(), self.op.seqs)
    }

    fn forward(&self, o: &AttnOut) -> Result<()> {
        let (op, s, m, d) = (self.op, self.s, &self.op.p.memory, &self.op.desc.attn);
        let mut held = inputs(self.x);
        held.extend([o.out.clone(), o.lse.clone()]);
        op.p.attention.hold_all(self.main(), held);
        let (out, lse) = (o.out.cuda()?, o.lse.cuda()?);
        let base = Param { out: out.addr(), lse: lse.addr(), ..param(d, self.x, op.rows)? };
        let mut p = self.bring(base, None)?;
        let rows = op.sched.rows_q() * s.hq;
        if self.scatters() {
            p.out = self.own(pieces::GATHER, 0, rows * s.dv * s.out)?;
        }
        op.p.attention.forward(self.main(), d, &p, self.tables())?;
        if !self.scatters() {
            return Ok(());
        }
        self.publish(pieces::GATHER, s.lse(), &m.lse.slice(0, 4 * rows)?)?;
        self.meet(MEET_BACK)?;
        self.get(pieces::GATHER, &self.pieces().results(0, s.dv), &out)?;
        self.get(pieces::GATHER, &self.pieces().lse(), &lse)
    }

    fn backward(&self, saved: &AttnSaved, g: &AttnGrads) -> Result<()> {
        let (op, s, d) = (self.op, self.s, &self.op.desc.attn);
        let attention = &op.p.attention;
        attention.hold_all(self.main(), inputs_bwd(self.x, saved, g));
        let delta = attention.delta_memory().addr();
        let base = Param { delta, ..param_bwd(d, self.x, op.rows, (saved, g))? };
        // Of my rows and all heads: the output need not travel.
        attention.delta(self.main(), &base)?;
        let mut p = self.bring(base, Some(saved))?;
        let (keys, (buffer, dk, dv)) = (s.all_keys() * s.hkv, s.parts());
        if s.size > 1 {
            p.dk = self.own(buffer, dk, keys * s.dqk * s.part)?;
            p.dv = self.own(buffer, dv, keys * s.dv * s.part)?;
        }
        if self.scatters() {
            let len = op.sched.rows_q() * s.hq * s.dqk * s.out;
            p.dq = self.own(pieces::GATHER, s.dq(), len)?;
            // Heads of others stay zero.
            if let Some(t) = &g.dsink {
                self.main().fill_memory(&t.cuda()?, 0)?;
            }
        }
        let tables = attention.tables(self.main(), self.tables())?;
        attention.keys(self.main(), d, &p, &tables)?;
        attention.queries(self.main(), d, &p, &tables)?;
        if s.size == 1 {
            return Ok(());
        }
        self.meet(MEET_BACK)?;
        if self.scatters() {
            self.get(pieces::GATHER, &self.pieces().results(s.dq(), s.dqk), &g.dq.cuda()?)?;
        }
        self.collect(g)
    }

    /// dk and dv of my rows, from all ranks.
    fn collect(&self, g: &AttnGrads) -> Result<()> {
        let (s, m, buffer) = (self.s, &self.op.p.memory, self.s.parts().0);
        let [k, v] = self.pieces().parts();
        let (dk, dv) = (g.dk.cuda()?, g.dv.cuda()?);
        if !s.adds() {
            self.get(buffer, &k, &dk)?;
            return self.get(buffer, &v, &dv);
        }
        // Parts that were not asked for are zeros.
        self.main().fill_memory(&m.slots, 0)?;
        self.get(buffer, &k, &m.slots)?;
        self.get(buffer, &v, &m.slots)?;
        let (_, dk_at, dv_at) = s.parts();
        let (stride, second) = s.slot();
        self.add((dk_at, s.dqk), (0, stride), &dk)?;
        self.add((dv_at, s.dv), (second, stride), &dv)
    }

    /// Adds the parts at byte `at` of each slot in their order; my own, if of all heads, lies where
    /// the kernel put it.
    fn add(
        &self,
        (own_at, dim): (usize, usize),
        (at, stride): (usize, usize),
        out: &CudaMemory,
    ) -> Result<()> {
        let (s, m, rows) = (self.s, &self.op.p.memory, self.op.rows.kv);
        let sum = self.op.p.sum.as_ref().ok_or_else(|| Error::internal("no kernel that adds"))?;
        let row = s.all_kv * dim * 4;
        let slots = m.slots.addr() + at as u64;
        let me = (s.inner == 1).then_some(self.me().idx());
        let own = match me {
            Some(me) if rows > 0 => {
                let first = self.pieces().first_key(me);
                self.own(s.parts().0, own_at + first * row, rows * row)?
            }
            _ => slots,
        };
        let cols = s.all_kv * dim;
        let (out, stride) = (out.addr(), stride as u64);
        let sum_of = Sum { slots, stride, own, out, bias: None, rows, cols, scale: 1.0 };
        sum.launch_parts(self.l, &sum_of, (me, s.num_parts()))
    }
}
