//! One launch on the host: all queries against all keys.

use std::borrow::Cow;

use tilewire_core::Result;

use super::core::{Core, Dims, Operands, State, store};
use super::grad::{Grads, Upstream, rows_first};
use crate::attention::sequences::in_sequence;
use crate::attention::{
    AttentionDesc, AttnConfig, AttnGrads, AttnInputs, AttnOut, AttnSaved, LocalRows, Sequences,
    Slice, slices,
};

/// A launch.
#[derive(Clone)]
pub(crate) struct Run {
    pub desc: AttentionDesc,
    pub config: AttnConfig,
    pub seqs: Sequences,
    pub rows: LocalRows,
    pub x: AttnInputs,
}

impl Run {
    /// With the sequences of the launch, where these come by offsets.
    pub fn now(&self) -> Result<Cow<'_, Self>> {
        let Some(o) = &self.x.offsets else { return Ok(Cow::Borrowed(self)) };
        let seqs = o.read((self.rows.q, self.rows.kv))?;
        self.desc.check_launch(&seqs)?;
        Ok(Cow::Owned(Self { seqs, ..self.clone() }))
    }

    fn core(&self, bias: Vec<f32>) -> Core {
        let d = &self.desc;
        let dims = Dims { hq: d.heads_q, hkv: d.heads_kv, dqk: d.dqk, dv: d.dv };
        Core::new(d, self.config, dims, 0, bias)
    }

    /// Values of q, k and v.
    fn operands(&self) -> Result<[Vec<f32>; 3]> {
        let (d, x) = (&self.desc, &self.x);
        Ok([x.q.values(d.dqk)?, x.k.values(d.dqk)?, x.v.values(d.dv)?])
    }

    /// All queries against all keys.
    fn slices(&self, core: &Core) -> Vec<Slice> {
        let (q, kv) = (0..self.rows.q, 0..self.rows.kv);
        slices(std::slice::from_ref(&q), std::slice::from_ref(&kv), &self.seqs, &core.mask)
    }

    pub fn forward(&self, o: &AttnOut) -> Result<()> {
        let [q, k, v] = self.operands()?;
        let extra = self.x.extra()?;
        let core = self.core(extra.bias);
        let slices = self.slices(&core);
        let mut state = State::new(&core.dims, self.rows.q);
        core.forward(&Operands { q: &q, k: &k, v: &v }, &slices, &mut state);
        let live = in_sequence(std::slice::from_ref(&(0..self.rows.q)), &self.seqs);
        let (out, lse) = core.finish(&state, extra.sink.as_deref(), &live);
        store(&o.out, &out)?;
        store(&o.lse, &lse)
    }

    pub fn backward(&self, saved: &AttnSaved, out: &AttnGrads) -> Result<()> {
        let [q, k, v] = self.operands()?;
        let extra = self.x.extra()?;
        let core = self.core(extra.bias);
        let slices = self.slices(&core);
        let up = Upstream {
            rows: self.rows.q,
            d_out: saved.d_out.to_f32()?,
            lse: saved.lse.to_f32()?,
            delta: saved.delta(&self.desc)?,
        };
        let mut g = Grads::new(&core, self.rows.q, out.dbias.is_some());
        g.begin(&core, self.rows.kv);
        core.backward(&Operands { q: &q, k: &k, v: &v }, &up, &slices, &mut g);
        let d = &core.dims;
        store(&out.dq, &rows_first(&g.dq, d.hq, self.rows.q, d.dqk))?;
        store(&out.dk, &rows_first(&g.dk, d.hkv, self.rows.kv, d.dqk))?;
        store(&out.dv, &rows_first(&g.dv, d.hkv, self.rows.kv, d.dv))?;
        if let Some(t) = &out.dbias {
            store(t, &g.dbias)?;
        }
        match (&out.dsink, &extra.sink) {
            (Some(t), Some(sink)) => store(t, &core.sink_grad(&up, sink)),
            _ => Ok(()),
        }
    }
}
