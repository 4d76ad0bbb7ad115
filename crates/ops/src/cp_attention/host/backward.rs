//! The backward pass on the host: every rank publishes its parts of dk and dv, and the owner of a
//! row adds the parts of all ranks in rank order.

use tilewire_core::memory::filled;
use tilewire_core::{DType, Result};
use tilewire_device::Tensor;
use tilewire_symm::Permit;

use super::bytes::{narrow, quantise, widen};
use super::{Fork, HostRun, Now};
use crate::attention::host::{Core, Operands, store};
use crate::attention::{AttnGrads, AttnSaved, Extra, Grads, Upstream, rows_first};
use crate::cp_attention::launch::{Entered, MEET_BACK};
use crate::cp_attention::pieces::GATHER;
use crate::cp_attention::schedule::Schedule;

/// dk and dv of some rows, `[rows, hkv, d]`.
type Dkv = [Vec<f32>; 2];

impl HostRun {
    pub(super) fn backward(
        &self,
        permit: &Entered,
        now: &Now<'_>,
        extra: Extra,
        saved: &AttnSaved,
        out: &AttnGrads,
    ) -> Result<()> {
        let (core, rows) = (self.core(extra.bias), self.sched.rows_q());
        let local = self.begin(permit, Some(saved))?;
        let none = Upstream { rows: 0, d_out: vec![], lse: vec![], delta: vec![] };
        let up = local.up.as_ref().unwrap_or(&none);
        let mut g = Grads::new(&core, rows, out.dbias.is_some());
        let mut own = Dkv::default();
        self.each_group((&local, now), |group, [k, v]| {
            g.begin(&core, self.sched.dense(group).len());
            let x = Operands { q: &local.q, k: &k, v: &v };
            core.backward(&x, up, &now.slices[group], &mut g);
            let part = partial(&core, &g);
            if group == self.sched.grid.group && !self.scatters() {
                // Used in place: no peer gets it.
                own = part;
                return Ok(());
            }
            self.publish_part(permit, group, &part)
        })?;
        let dq = rows_first(&g.dq, core.dims.hq, rows, core.dims.dqk);
        self.give_and_take(permit, (&dq, &own), out)?;
        if let Some(t) = &out.dbias {
            store(t, &g.dbias)?;
        }
        match (&out.dsink, &extra.sink) {
            (Some(t), Some(sink)) => store(t, &core.sink_grad(up, sink)),
            _ => Ok(()),
        }
    }

    /// Publishes my part of dk and dv of `group`'s rows in my own chunk: the rows that my queries
    /// see, or all rows where one rank has the whole sum of its heads.
    fn publish_part(&self, permit: &Permit, group: usize, part: &Dkv) -> Result<()> {
        let (s, ctx, t) = (&self.sizes, self.ctx(), self.transfers(permit));
        let area = &self.sched.areas[group];
        let wanted = match s.adds() {
            true => self.sched.needed[group].clone(),
            false => filled(true, area.len())?,
        };
        let (buffer, places) = s.parts();
        let first = self.sched.dense(group).start;
        for rows in Schedule::runs(area, &wanted) {
            let at = |i: usize| places[i] + (first + rows.start) * s.hkv * s.part_wire[i];
            for (i, dim) in [s.dqk, s.dv].into_iter().enumerate() {
                let values = &part[i][rows.start * s.hkv * dim..rows.end * s.hkv * dim];
                match s.fp8_parts() {
                    true => {
                        let [codes, scales] = quantise(self.desc.dkv_wire, values, dim);
                        t.publish(ctx, buffer, at(i), &*codes)?;
                        t.publish(ctx, buffer, at(i + 2), &*scales)?;
                    }
                    false => t.publish(ctx, buffer, at(i), &*narrow(self.part_type(), values))?,
                }
            }
        }
        Ok(())
    }

    /// Returns the type of parts that are not FP8. Where one rank has the whole sum it is the
    /// output type, so that values are rounded once.
    fn part_type(&self) -> DType {
        if self.sizes.adds() { DType::F32 } else { self.desc.attn.out }
    }

    /// Gets the parts of dk and dv of my rows. Parts that no query contributes to stay zero.
    pub(super) fn get_parts(&self, permit: &Permit) -> Result<Box<[u8]>> {
        let s = &self.sizes;
        let stride = if s.fp8_parts() { s.packed_slot().1 } else { s.slot().0 };
        let mut slots = filled(0, s.num_parts() * stride)?.into_boxed_slice();
        let t = self.transfers(permit);
        for list in self.pieces().parts() {
            t.get(self.ctx(), s.parts().0, &list, &mut *slots)?;
        }
        Ok(slots)
    }

    /// Meets the peers behind the published gradients, and gets the gradients of my rows. `dq` has
    /// rows of my group and heads; `own` is my part of my own rows where heads are not traded.
    fn give_and_take(
        &self,
        permit: &Entered,
        (dq, own): (&[f32], &Dkv),
        out: &AttnGrads,
    ) -> Result<()> {
        let (s, ctx, t) = (&self.sizes, self.ctx(), self.transfers(permit));
        if !self.scatters() {
            if s.size == 1 {
                return self.store_all(dq, own, out);
            }
            t.meet(ctx, MEET_BACK)?;
            self.to_copies.send(Fork::Parts(permit.clone()))?;
            store(&out.dq, dq)?;
            let slots = self.to_compute.receive(ctx)?;
            return self.add_parts(&slots[0], Some(own), out);
        }
        t.publish(ctx, GATHER, s.dq(), &*narrow(self.desc.attn.out, dq))?;
        t.meet(ctx, MEET_BACK)?;
        let lists = self.pieces();
        let get = |to: &Tensor, buffer, list: &[_]| to.write(|b| t.get(ctx, buffer, list, b))?;
        get(&out.dq, GATHER, &lists.results(s.dq(), s.dqk))?;
        if s.adds() {
            return self.add_parts(&self.get_parts(permit)?, None, out);
        }
        let (lists, buffer) = (lists.parts(), s.parts().0);
        get(&out.dk, buffer, &lists[0])?;
        get(&out.dv, buffer, &lists[1])
    }

    fn store_all(&self, dq: &[f32], [dk, dv]: &Dkv, out: &AttnGrads) -> Result<()> {
        store(&out.dq, dq)?;
        store(&out.dk, dk)?;
        store(&out.dv, dv)
    }

    /// Adds the parts of my rows in their order, my own in its place.
    fn add_parts(&self, slots: &[u8], own: Option<&Dkv>, out: &AttnGrads) -> Result<()> {
        self.ctx().compute("reduce")?;
        let (s, me) = (&self.sizes, self.ctx().rank().idx());
        for (i, (to, dim)) in [(&out.dk, s.dqk), (&out.dv, s.dv)].into_iter().enumerate() {
            let mut sum = filled(0.0, self.rows.kv * s.all_kv * dim)?;
            for part in 0..s.num_parts() {
                match own {
                    Some(own) if part == me => add(&mut sum, &own[i]),
                    _ => add(&mut sum, &self.part_of(slots, part, (i, dim))),
                }
            }
            store(to, &sum)?;
        }
        Ok(())
    }

    /// Returns part `part` of dk (`i` of 0) or dv of my rows, `[rows, all_kv, dim]`.
    fn part_of(&self, slots: &[u8], part: usize, (i, dim): (usize, usize)) -> Vec<f32> {
        let (s, rows) = (&self.sizes, self.rows.kv * self.sizes.all_kv);
        if !s.fp8_parts() {
            let (stride, second) = s.slot();
            let at = part * stride + [0, second][i];
            return widen(DType::F32, &slots[at..at + 4 * rows * dim], None, dim);
        }
        let (places, stride) = s.packed_slot();
        let bytes = |i: usize| {
            let at = part * stride + places[i];
            &slots[at..at + rows * s.part_wire[i]]
        };
        widen(self.desc.dkv_wire, bytes(i), Some(bytes(i + 2)), dim)
    }
}

fn add(sum: &mut [f32], part: &[f32]) {
    sum.iter_mut().zip(part).for_each(|(x, p)| *x += p);
}

fn partial(core: &Core, g: &Grads) -> Dkv {
    let d = &core.dims;
    [rows_first(&g.dk, d.hkv, g.kv_rows, d.dqk), rows_first(&g.dv, d.hkv, g.kv_rows, d.dv)]
}
