//! FP8 in a launch: quantises tensors before they travel, and widens them when they have arrived
//! (`fp8.rs`).

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_kernels::abi::TwAttn;

use super::fp8::{Keys, Parts};
use super::run::DeviceRun;
use crate::common::Bias;
use crate::common::reduce::Sum;
use crate::cp_attention::pieces::place;
use crate::quant::device::{Codes, Scales};

impl DeviceRun<'_> {
    fn keys8(&self) -> Option<&Keys> {
        self.op.p.fp8.keys.as_ref()
    }

    fn parts8(&self) -> Result<&Parts> {
        let none = || Error::internal("the plan has no kernel for parts in FP8");
        self.op.p.fp8.parts.as_ref().ok_or_else(none)
    }

    /// Returns my keys in the form in which they travel: unchanged, or the codes and scales that
    /// `begin` has queued.
    pub(super) fn own_keys(&self) -> Result<Vec<CudaMemory>> {
        let (x, s) = (self.x, self.s);
        if let Some((_, own)) = self.keys8().and_then(|k| k.narrow.as_ref()) {
            let rows = self.op.rows.kv * s.all_kv;
            return own.iter().zip(&s.wire).map(|(m, b)| m.slice(0, rows * b)).collect();
        }
        let all = [Some(&x.k.data), Some(&x.v.data), x.k.scales.as_ref(), x.v.scales.as_ref()];
        all.into_iter().flatten().map(|t| t.cuda()).collect()
    }

    /// Queues the codes and scales of my keys, if they travel in FP8 and are not FP8 already. The
    /// copy stream waits for them.
    pub(super) fn begin(&self) -> Result<()> {
        let Some((narrow, own)) = self.keys8().and_then(|k| k.narrow.as_ref()) else {
            return Ok(());
        };
        let rows = self.op.rows.kv * self.s.all_kv;
        for (i, (t, dim)) in [(&self.x.k, self.s.dqk), (&self.x.v, self.s.dv)].iter().enumerate() {
            let to = (own[i].addr(), own[i + 2].addr());
            // SAFETY: the tensor was checked and is held; the workspace has all rows of a rank, and
            // is held (`keep`).
            unsafe { narrow.launch(self.main(), t.data.cuda()?.addr(), to, (rows, *dim))? };
        }
        self.l.fork()
    }

    /// Returns `base` for a pass over my own queries and keys; with FP8 keys it queues their
    /// values and points to them.
    pub(super) fn own_operands(&self, base: TwAttn) -> Result<TwAttn> {
        let Some(keys) = self.keys8() else { return Ok(base) };
        let scales = self.x.q.scales.as_ref().map_or(Ok(0), |t| t.cuda().map(|m| m.addr()))?;
        let q = self.wide_queries((base.q, scales), self.op.rows.q)?;
        let own: Vec<u64> = self.own_keys()?.iter().map(CudaMemory::addr).collect();
        let first = self.pieces().first_key(self.me().idx());
        // Heads are not traded: my keys have all heads, and are at their place among the keys of
        // all ranks.
        let (k, v) = self.fill_keys(keys, &own, first, self.op.rows.kv)?;
        Ok(TwAttn { q, k, v, ..base })
    }

    /// Queues the widening of `rows` rows of my heads' queries at `q`, with scales at `scales`, and
    /// returns the address of the result; with no need for it, `q`.
    pub(super) fn wide_queries(&self, (q, scales): (u64, u64), rows: usize) -> Result<u64> {
        let Some(keys) = self.keys8() else { return Ok(q) };
        let (s, to) = (self.s, keys.wide.q.addr());
        if let Some(convert) = &keys.convert {
            let sum = Sum {
                slots: q,
                stride: 0,
                own: 0,
                out: to,
                bias: Bias::default(),
                rows: rows * s.hq,
                cols: s.dqk,
                scale: 1.0,
            };
            return convert.launch_parts(self.l, &sum, (None, 1)).map(|()| to);
        }
        if scales == 0 {
            return Ok(q);
        }
        // SAFETY: rows of a checked launch, or of the group as the schedule has them; the caller
        // holds them, and the workspace has all of a group.
        unsafe { keys.wide.fill(self.main(), (q, scales), (rows * s.hq, s.dqk), to)? };
        Ok(to)
    }

    /// Queues the values of the keys of all ranks, if `at` are codes and scales; returns where k
    /// and v are.
    pub(super) fn wide_keys(&self, at: &[u64]) -> Result<(u64, u64)> {
        let Some(keys) = self.keys8() else { return Ok((at[0], at[1])) };
        self.fill_keys(keys, at, 0, self.op.seqs.tokens_kv)
    }

    /// Queues the values of `rows` rows of keys, codes and scales at `at`, to dense row `first`.
    fn fill_keys(&self, keys: &Keys, at: &[u64], first: usize, rows: usize) -> Result<(u64, u64)> {
        let (s, wide) = (self.s, &keys.wide);
        let mut to = [0; 2];
        for (i, (m, dim)) in [(&wide.k, s.dqk), (&wide.v, s.dv)].into_iter().enumerate() {
            to[i] = m.addr() + (wide.size * first * s.hkv * dim) as u64;
            // SAFETY: rows of my own tensors, or of all ranks' keys, which have arrived; the
            // workspace has those of all ranks, and all is held.
            unsafe { wide.fill(self.main(), (at[i], at[i + 2]), (rows * s.hkv, dim), to[i])? };
        }
        Ok((to[0], to[1]))
    }

    /// Returns the addresses to which the kernels write dk and dv of the keys of all ranks: in my
    /// chunk, or beside it if they travel as FP8.
    pub(super) fn part_addrs(&self) -> Result<(u64, u64)> {
        let (s, rows) = (self.s, self.s.all_keys() * self.s.hkv);
        if s.fp8_parts() {
            let raw = self.parts8()?.raw.addr();
            return Ok((raw, raw + (4 * rows * s.dqk) as u64));
        }
        let (buffer, at) = s.parts();
        let addr = |i: usize| self.own(buffer, at[i], rows * s.part_wire[i]);
        Ok((addr(0)?, addr(1)?))
    }

    /// Queues, with parts in FP8, the quantisation of the kernels' parts into my chunk.
    pub(super) fn publish_parts(&self) -> Result<()> {
        let s = self.s;
        if !s.fp8_parts() {
            return Ok(());
        }
        self.keep();
        let (p, (k, v)) = (self.parts8()?, self.part_addrs()?);
        let at = place(0, s.all_keys() * s.hkv, &s.part_wire).0;
        let rows = self.op.seqs.tokens_kv * s.hkv;
        let to = |i: usize| p.packed.addr() + at[i] as u64;
        for (i, (from, dim)) in [(k, s.dqk), (v, s.dv)].into_iter().enumerate() {
            // SAFETY: both memories are as large as the keys of all ranks, scales come first, and
            // all is held.
            unsafe { p.narrow.launch(self.main(), from, (to(i), to(i + 2)), (rows, dim))? };
        }
        let (buffer, to) = s.parts();
        self.publish(buffer, to.into_iter().min().unwrap_or(0), &p.packed)
    }

    /// Returns the memory that parts of my rows are copied to.
    pub(super) fn part_slots(&self) -> Result<&CudaMemory> {
        match self.s.fp8_parts() {
            true => Ok(&self.parts8()?.slots),
            false => Ok(&self.op.p.memory.slots),
        }
    }

    /// Queues, with parts in FP8, the widening of the parts of my rows to the slots that are added.
    pub(super) fn widen_parts(&self) -> Result<()> {
        let (s, rows) = (self.s, self.op.rows.kv * self.s.all_kv);
        if !s.fp8_parts() {
            return Ok(());
        }
        let (p, (at, packed), (stride, second)) = (self.parts8()?, s.packed_slot(), s.slot());
        self.keep();
        for part in 0..s.num_parts() {
            let from = |i: usize| p.slots.addr() + (part * packed + at[i]) as u64;
            for (i, (first, dim)) in [(0, s.dqk), (second, s.dv)].into_iter().enumerate() {
                let shape = (rows, dim);
                let codes = Codes { x: from(i), scales: from(i + 2), layout: Scales::Rows, shape };
                let to = self.op.p.memory.slots.addr() + (part * stride + first) as u64;
                // SAFETY: both slots have all rows of a rank, and are held.
                unsafe { p.widen.launch(self.main(), &codes, to)? };
            }
        }
        Ok(())
    }
}
