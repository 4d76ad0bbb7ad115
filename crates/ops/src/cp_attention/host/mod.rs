//! Context-parallel attention on the host: the transfers of `transfers.rs`, step by step.
//!
//! The compute lane enters, publishes and meets as the main stream of a device does; the copy lane
//! transfers the keys of other ranks, and parts of dk and dv, as the side stream does. Where a
//! device records an event, the lanes use a [`Handoff`]. The arithmetic is the host's own: one
//! running softmax over the keys of all groups, this rank's own first.

mod backward;
mod bytes;

use std::borrow::Cow;
use std::sync::Arc;

use tilewire_core::memory::{filled, filled_or_unwind};
use tilewire_core::{DType, Result};
use tilewire_device::Tensor;
use tilewire_symm::{Enter, HostTransport, OpCtx, Permit, Signals, SymBuf};

use self::bytes::{KeyBytes, narrow, quantise, widen};
use super::config::Strategy;
use super::desc::CpAttentionDesc;
use super::launch::{CREDIT, Entered, KEYS, MEET_BACK, MEET_KEYS, Work};
use super::pieces::{AREA, GATHER, Pieces, SCATTER, Sizes};
use super::schedules::Made;
use super::transfers::{Transfers, flags};
use crate::attention::host::{Core, Operands, State, store};
use crate::attention::{
    AttnConfig, AttnInputs, AttnOut, AttnSaved, Extra, LocalRows, Queries, Refused, Sequences,
    Slice, Upstream, in_sequence,
};
use crate::common::{Handoff, Launch, wide};

/// Bytes of some tensors.
type Tensors = Vec<Box<[u8]>>;

/// One launch of one rank.
pub(super) struct HostRun {
    pub launch: Launch,
    pub desc: CpAttentionDesc,
    pub tiles: AttnConfig,
    pub seqs: Sequences,
    pub rows: LocalRows,
    pub sched: Arc<Made>,
    pub sizes: Sizes,
    pub buffers: [SymBuf; 4],
    pub signals: Arc<Signals>,
    pub x: AttnInputs,
    pub work: Work,
    /// Keeps the reason if the offsets of this launch cannot be used.
    pub refused: Refused,
    pub to_copies: Handoff<Fork>,
    pub to_compute: Handoff<Tensors>,
}

/// The work that the compute lane lets the copy lane begin.
pub(super) enum Fork {
    /// Get the keys of other ranks; my own are given.
    Keys(Entered, Arc<Tensors>),
    /// Get the parts of dk and dv of my rows.
    Parts(Entered),
}

/// My heads of my group's rows, and the keys that have arrived so far.
struct Local {
    /// `[rows, hq, dqk]`.
    q: Vec<f32>,
    /// Backward only.
    up: Option<Upstream>,
    keys: Keys,
}

/// The sequences of a launch, and the slices of my group's queries against each area.
struct Now<'a> {
    seqs: Cow<'a, Sequences>,
    slices: Cow<'a, [Vec<Slice>]>,
}

/// The place of the keys of the groups.
enum Keys {
    /// My own keys alone, in rows of my own; the keys of other ranks are on their way.
    Own(Arc<Tensors>),
    /// The keys of all ranks, in dense rows.
    All(Tensors),
}

/// Returns memory full of poison, so that unwritten bytes show in the result.
fn poisoned(len: usize) -> Box<[u8]> {
    filled_or_unwind(DType::POISON, len).into_boxed_slice()
}

fn bytes_of(t: &Tensor) -> Result<Box<[u8]>> {
    t.read(|b| {
        let mut all = filled(0, b.len())?;
        all.copy_from_slice(b);
        Ok(all.into_boxed_slice())
    })?
}

impl HostRun {
    fn ctx(&self) -> &OpCtx {
        &self.launch.ctx
    }

    fn transfers<'a>(&'a self, permit: &'a Permit) -> Transfers<'a, HostTransport> {
        Transfers {
            net: &*self.launch.net,
            permit,
            tag: self.launch.tag,
            sizes: &self.sizes,
            sched: &self.sched,
            buffers: &self.buffers,
            signals: &self.signals,
        }
    }

    fn pieces(&self) -> Pieces<'_> {
        Pieces { sizes: &self.sizes, sched: &self.sched, me: self.ctx().rank() }
    }

    fn scatters(&self) -> bool {
        self.sizes.inner > 1
    }

    /// Runs the copy lane.
    pub fn copies(&self) -> Result<()> {
        if self.sizes.size == 1 {
            return Ok(());
        }
        let Fork::Keys(permit, own) = self.to_copies.receive(self.ctx())? else {
            return Err(tilewire_core::Error::internal("the parts were requested before the keys"));
        };
        self.to_compute.send(self.bring_keys(&permit, &own)?)?;
        if !(self.sizes.begins_at_once() && self.work.is_backward()) {
            return Ok(());
        }
        let Fork::Parts(permit) = self.to_copies.receive(self.ctx())? else {
            return Err(tilewire_core::Error::internal("the keys were requested twice"));
        };
        self.to_compute.send(vec![self.get_parts(&permit)?])
    }

    /// Copy lane: gets the keys of all ranks but me, in dense rows; nothing where they are pushed.
    fn bring_keys(&self, permit: &Permit, own: &Tensors) -> Result<Tensors> {
        let (t, ctx, s) = (self.transfers(permit), self.ctx(), &self.sizes);
        if s.begins_at_once() && s.strategy == Strategy::AllGather {
            t.push_keys(ctx, own)?;
            return Ok(Tensors::new());
        }
        let rows = self.seqs.tokens_kv * s.hkv;
        let mut keys: Tensors = s.wire.iter().map(|b| poisoned(rows * b)).collect();
        match s.begins_at_once() && s.strategy == Strategy::Ring {
            true => t.pass_keys(ctx, own, &mut keys)?,
            false => t.get_keys(ctx, &mut keys, self.scatters())?,
        }
        Ok(keys)
    }

    /// Runs the compute lane.
    pub fn compute(&self) -> Result<()> {
        let Launch { ctx, net, tag } = &self.launch;
        let (slot, flags) = (|i| self.signals.slot(i), flags(&self.sizes));
        let enter =
            Enter { credit: slot(CREDIT), tag: *tag, first: slot(flags.start), num: flags.len() };
        let permit = Arc::new(net.enter(ctx, &enter)?);
        let extra = self.x.extra()?;
        let (now, refused) = match self.now() {
            Ok(now) => (now, None),
            // No sequence: this rank moves all rows, as its peers expect.
            Err(why) => (self.with(Cow::Borrowed(&self.seqs)), Some(why)),
        };
        match &self.work {
            Work::Forward(o) => self.forward(&permit, &now, &extra, o)?,
            Work::Backward(b) => self.backward(&permit, &now, extra, &b.0, &b.1)?,
        }
        if let Some(why) = refused {
            self.work.poison();
            self.refused.keep(why);
        }
        Ok(())
    }

    /// Returns the sequences of this launch, which it reads if they are offsets.
    fn now(&self) -> Result<Now<'_>> {
        let Some(o) = &self.x.offsets else {
            let (seqs, slices) = (&self.seqs, &self.sched.slices);
            return Ok(Now { seqs: Cow::Borrowed(seqs), slices: Cow::Borrowed(slices) });
        };
        let seqs = o.read((self.seqs.tokens_q, self.seqs.tokens_kv))?;
        self.desc.attn.check_launch(&seqs)?;
        Ok(self.with(Cow::Owned(seqs)))
    }

    /// Returns other sequences than those of the schedule.
    fn with<'a>(&self, seqs: Cow<'a, Sequences>) -> Now<'a> {
        let queries = Queries::new(&self.sched.member_q.concat(), &seqs, &self.desc.attn.mask);
        let slices = self.sched.areas.iter().map(|area| queries.slices(area)).collect();
        Now { slices, seqs }
    }

    fn core(&self, bias: Vec<f32>) -> Core {
        Core::new(&self.desc.attn, self.tiles, self.sched.dims, self.sched.first_head, bias)
    }

    /// Returns my keys and values in the form in which they travel.
    fn own_keys(&self) -> Result<Tensors> {
        let (x, a) = (&self.x, &self.desc.attn);
        let (dtype, scaled) = self.desc.kv_wire();
        if !scaled || a.dtype.is_fp8() {
            let all = [Some(&x.k.data), Some(&x.v.data), x.k.scales.as_ref(), x.v.scales.as_ref()];
            return all.into_iter().flatten().map(bytes_of).collect();
        }
        let [k, k_scales] = quantise(dtype, &x.k.values(a.dqk)?, a.dqk);
        let [v, v_scales] = quantise(dtype, &x.v.values(a.dv)?, a.dv);
        Ok([k, v, k_scales, v_scales].map(Vec::into_boxed_slice).into())
    }

    /// Starts the transfer of keys, and waits for the tensors with which the arithmetic begins.
    fn begin(&self, permit: &Entered, saved: Option<&AttnSaved>) -> Result<Local> {
        let (ctx, s, own) = (self.ctx(), &self.sizes, Arc::new(self.own_keys()?));
        let t = self.transfers(permit);
        if self.scatters() {
            return self.trade_heads(permit, &own, saved);
        }
        if s.size > 1 {
            if !matches!(s.strategy, Strategy::AllGather | Strategy::Ring) {
                t.publish_keys(ctx, &own)?;
                t.meet(ctx, MEET_KEYS)?;
            }
            self.to_copies.send(Fork::Keys(permit.clone(), own.clone()))?;
        }
        let (d, a) = (&self.sched.dims, &self.desc.attn);
        let up = saved.map(|saved| -> Result<_> {
            let (d_out, lse) = (saved.d_out.to_f32()?, saved.lse.to_f32()?);
            Ok(Upstream { rows: self.rows.q, d_out, lse, delta: saved.delta(a)? })
        });
        Ok(Local { q: self.x.q.values(d.dqk)?, up: up.transpose()?, keys: Keys::Own(own) })
    }

    /// Publishes my rows of all heads, and gets my group's rows of my heads and the keys of all
    /// ranks.
    fn trade_heads(
        &self,
        permit: &Entered,
        own: &Arc<Tensors>,
        saved: Option<&AttnSaved>,
    ) -> Result<Local> {
        let (ctx, s, a, t) = (self.ctx(), &self.sizes, &self.desc.attn, self.transfers(permit));
        t.publish_keys(ctx, own)?;
        t.publish(ctx, SCATTER, 0, &*bytes_of(&self.x.q.data)?)?;
        if let Some(scales) = &self.x.q.scales {
            t.publish(ctx, SCATTER, s.query_scales(), &*bytes_of(scales)?)?;
        }
        let [d_out, lse, delta] = s.upstream();
        if let Some(saved) = saved {
            t.publish(ctx, SCATTER, d_out, &*bytes_of(&saved.d_out)?)?;
            t.publish(ctx, SCATTER, lse, &*bytes_of(&saved.lse)?)?;
            t.publish(ctx, SCATTER, delta, &*narrow(DType::F32, &saved.delta(a)?))?;
        }
        t.meet(ctx, MEET_KEYS)?;
        self.to_copies.send(Fork::Keys(permit.clone(), own.clone()))?;
        let (rows, lists) = (self.sched.rows_q(), self.pieces());
        let mut q: Tensors = s.q_wire.iter().map(|b| poisoned(rows * s.hq * b)).collect();
        for (list, to) in lists.query_tensors().iter().zip(&mut q) {
            t.get(ctx, SCATTER, list, &mut **to)?;
        }
        let mut up = None;
        if saved.is_some() {
            let mut bytes = [s.dv * s.out, 4, 4].map(|b| poisoned(rows * s.hq * b));
            let lists = [lists.queries(d_out, s.dv, s.out), lists.stats(lse), lists.stats(delta)];
            for (list, to) in lists.iter().zip(&mut bytes) {
                t.get(ctx, SCATTER, list, &mut **to)?;
            }
            let f32s = |t, b: &[u8]| wide(t, b).into_owned();
            up = Some(Upstream {
                rows,
                d_out: f32s(a.out, &bytes[0]),
                lse: f32s(DType::F32, &bytes[1]),
                delta: f32s(DType::F32, &bytes[2]),
            });
        }
        let q = widen(a.dtype, &q[0], q.get(1).map(|s| &**s), s.dqk);
        Ok(Local { q, up, keys: Keys::All(self.to_compute.receive(ctx)?) })
    }

    fn key_bytes<'a>(&'a self, tensors: Vec<&'a [u8]>) -> KeyBytes<'a> {
        let s = &self.sizes;
        let (dtype, heads) = (self.desc.kv_wire().0, s.hkv);
        KeyBytes { tensors, dtype, heads, wire: &s.wire, dims: [s.dqk, s.dv] }
    }

    /// Calls `f(group, keys, values)` for every group whose keys my queries see: my own group, then
    /// the next ones. It waits for keys that are still on their way.
    fn each_group(
        &self,
        (local, now): (&Local, &Now<'_>),
        mut f: impl FnMut(usize, [Vec<f32>; 2]) -> Result<()>,
    ) -> Result<()> {
        let (s, g, ctx) = (&self.sizes, &self.sched.grid, self.ctx());
        let mut one = |group: usize, keys: &KeyBytes<'_>, rows| {
            ctx.compute("attend")?;
            let sees = !now.slices[group].is_empty();
            f(group, if sees { keys.widen(&rows) } else { Default::default() })
        };
        let dense = |group| self.sched.dense(group);
        let came = match &local.keys {
            Keys::All(all) => all,
            Keys::Own(own) => {
                let own = self.key_bytes(own.iter().map(|t| &**t).collect());
                one(g.group, &own, 0..self.rows.kv)?;
                if s.size == 1 {
                    return Ok(());
                }
                &self.to_compute.receive(ctx)?
            }
        };
        let pushed = s.begins_at_once() && s.strategy == Strategy::AllGather;
        let tensors = match pushed {
            true => self.pushed_keys()?,
            false => came.iter().map(|t| &**t).collect(),
        };
        let keys = self.key_bytes(tensors);
        if matches!(local.keys, Keys::All(_)) {
            one(g.group, &keys, dense(g.group))?;
        }
        g.other_groups().try_for_each(|group| one(group, &keys, dense(group)))
    }

    /// Returns the keys that all peers have pushed, in the area.
    fn pushed_keys(&self) -> Result<Vec<&[u8]>> {
        let (s, ctx) = (&self.sizes, self.ctx());
        self.launch.net.wait_peers(ctx, self.signals.slot(KEYS), "keys")?;
        let tensor = |(at, bytes): (usize, &usize)| {
            let len = self.seqs.tokens_kv * s.all_kv * bytes;
            // SAFETY: all peers have pushed the rows that I need and signalled, and push again when
            // this rank has granted that, at the head of the next launch. Rows of my own and rows
            // that I do not need are not read.
            unsafe { ctx.local(self.buffers[AREA].range(at, len), len) }
        };
        Ok(s.published().1.into_iter().zip(&s.wire).map(tensor).collect())
    }

    fn forward(&self, permit: &Entered, now: &Now<'_>, extra: &Extra, o: &AttnOut) -> Result<()> {
        let (core, rows) = (self.core(extra.bias.clone()), self.sched.rows_q());
        let local = self.begin(permit, None)?;
        let mut state = State::new(&core.dims, rows);
        self.each_group((&local, now), |group, [k, v]| {
            let x = Operands { q: &local.q, k: &k, v: &v };
            core.forward(&x, &now.slices[group], &mut state);
            Ok(())
        })?;
        let live = in_sequence(&self.sched.member_q.concat(), &now.seqs);
        let (out, lse) = core.finish(&state, extra.sink.as_deref(), &live);
        if !self.scatters() {
            store(&o.out, &out)?;
            return store(&o.lse, &lse);
        }
        let (ctx, s, t) = (self.ctx(), &self.sizes, self.transfers(permit));
        t.publish(ctx, GATHER, 0, &*narrow(self.desc.attn.out, &out))?;
        t.publish(ctx, GATHER, s.lse(), &*narrow(DType::F32, &lse))?;
        t.meet(ctx, MEET_BACK)?;
        let lists = self.pieces();
        o.out.write(|b| t.get(ctx, GATHER, &lists.results(0, s.dv), b))??;
        o.lse.write(|b| t.get(ctx, GATHER, &lists.lse(), b))?
    }
}
