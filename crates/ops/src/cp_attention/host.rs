//! Context-parallel attention on the host backend: the real protocol, step by step.
//!
//! Compute lane: grant credits, scatter heads (`heads.rs`), exchange keys (`exchange.rs`) and
//! attend, gather results. Copy lane: what the compute lane asks for (`lane.rs`).

use std::sync::Arc;

use tilewire_core::{DType, Rank, Result};
use tilewire_symm::{Signals, SymBuf};

use super::CpAttentionDesc;
use super::config::{Schedule, num_rows};
use super::lane::{Job, Queue};
use super::plan::{CREDIT_DKV, CREDIT_GATHER, CREDIT_SCATTER, Work};
use super::wire::{Format, transpose};
use crate::attention::host::{Core, Operands, State};
use crate::attention::plan::in_sequence;
use crate::attention::{AttnConfig, AttnInputs, AttnOut, Extra, LocalRows, Sequences, Upstream};
use crate::common::Launch;

/// Symmetric buffers of a plan and the strides of their slots, in bytes.
#[derive(Clone)]
pub(super) struct Buffers {
    /// Rows of other members, one slot for each place in the group.
    pub scatter: SymBuf,
    pub scatter_stride: usize,
    /// Keys and values: mine to be got, two slots of a ring, or one slot for each group.
    pub area: SymBuf,
    pub area_stride: usize,
    /// Partial dK and dV, one slot for each group.
    pub dkv: SymBuf,
    pub dkv_stride: usize,
    /// Results of other members, one slot for each place in the group.
    pub gather: SymBuf,
    pub gather_stride: usize,
}

pub(super) struct Run {
    pub launch: Launch,
    pub desc: CpAttentionDesc,
    pub tiles: AttnConfig,
    pub seqs: Sequences,
    pub rows: LocalRows,
    pub sched: Schedule,
    pub buf: Buffers,
    pub signals: Arc<Signals>,
    pub queue: Queue,
    pub x: AttnInputs,
    pub work: Work,
}

/// My heads of my group's rows.
pub(super) struct Local {
    /// `[rows, hq, dqk]`.
    pub q: Vec<f32>,
    /// Backward only.
    pub up: Option<Upstream>,
    /// Keys and values as they travel.
    pub area: Arc<Vec<u8>>,
}

/// Formats of what place `i` of the group computes with.
pub(super) struct Formats {
    pub q: Format,
    pub k: Format,
    pub v: Format,
    pub d_out: Format,
    /// lse and delta, one element for each head.
    pub stat: Format,
}

impl Run {
    pub fn formats(&self) -> Formats {
        let (d, a) = (&self.sched.dims, &self.desc.attn);
        let kv = self.desc.kv_wire().0;
        Formats {
            q: Format::new(d.hq, d.dqk, a.dtype),
            k: Format::new(d.hkv, d.dqk, kv),
            v: Format::new(d.hkv, d.dv, kv),
            d_out: Format::new(d.hq, d.dv, a.out),
            stat: Format::new(d.hq, 1, DType::F32),
        }
    }

    /// Bytes of one row of keys and values on the wire.
    pub fn kv_row_bytes(&self) -> usize {
        let f = self.formats();
        f.k.row_bytes() + f.v.row_bytes()
    }

    /// The copy lane.
    pub fn copies(&self) -> Result<()> {
        self.queue.drain(&self.launch, &self.signals)
    }

    /// The compute lane.
    pub fn compute(&self) -> Result<()> {
        self.grants()?;
        let extra = self.x.extra()?;
        let local = self.scatter()?;
        match &self.work {
            Work::Forward(o) => self.forward(&local, &extra, o)?,
            Work::Backward(b) => self.backward(&local, extra, &b.1)?,
        }
        self.queue.push(Job::End)
    }

    /// My buffers are free: the previous launch on this stream has read them.
    fn grants(&self) -> Result<()> {
        let g = &self.sched.grid;
        for m in g.other_members() {
            self.grant(g.member(m), CREDIT_SCATTER, "scatter credit")?;
            self.grant(g.member(m), CREDIT_GATHER, "gather credit")?;
        }
        self.grant_exchange()?;
        if matches!(self.work, Work::Backward(..)) {
            for o in g.other_groups() {
                self.grant(g.counterpart(o), CREDIT_DKV, "dkv credit")?;
            }
        }
        Ok(())
    }

    /// Grants `dst` one more use of the buffer whose credits have slot `slot`.
    pub fn grant(&self, dst: Rank, slot: usize, phase: &str) -> Result<()> {
        let Launch { ctx, net, tag } = &self.launch;
        net.grant(ctx, dst, self.signals.slot(slot), *tag, phase)
    }

    pub fn core(&self, bias: Vec<f32>) -> Core {
        Core::new(&self.desc.attn, self.tiles, self.sched.dims, self.sched.first_head, bias)
    }

    /// f32 keys and values of an area, `[rows, hkv, d]`. Spans that nobody needs are zeros.
    pub fn decode_area(&self, owner: usize, mut bytes: &[u8]) -> (Vec<f32>, Vec<f32>) {
        let (f, d) = (self.formats(), &self.sched.dims);
        let rows = num_rows(&self.sched.areas[owner]);
        let (wk, wv) = (d.hkv * d.dqk, d.hkv * d.dv);
        let (mut k, mut v) = (vec![0.0; rows * wk], vec![0.0; rows * wv]);
        let mut at = 0;
        for (span, &needed) in self.sched.areas[owner].iter().zip(&self.sched.needed[owner]) {
            let n = span.len();
            if needed {
                let rest = f.k.decode(bytes, n, &mut k[at * wk..(at + n) * wk]);
                f.v.decode(rest, n, &mut v[at * wv..(at + n) * wv]);
            }
            bytes = &bytes[n * self.kv_row_bytes()..];
            at += n;
        }
        (k, v)
    }

    fn forward(&self, local: &Local, extra: &Extra, o: &AttnOut) -> Result<()> {
        let (core, rows) = (self.core(extra.bias.clone()), self.sched.rows_q());
        let mut state = State::new(&core.dims, rows);
        self.exchange(&local.area, |owner, bytes| {
            let slices = &self.sched.slices[owner];
            if !slices.is_empty() {
                let (k, v) = self.decode_area(owner, bytes);
                core.forward(&Operands { q: &local.q, k: &k, v: &v }, slices, &mut state);
            }
            Ok(())
        })?;
        let live = in_sequence(&self.sched.member_q.concat(), &self.seqs);
        let (out, lse) = core.finish(&state, extra.sink.as_deref(), &live);
        self.gather_out(&out, &transpose(&lse, core.dims.hq, rows), o)
    }
}
