//! The exchanges of a launch through NCCL, before and behind the arithmetic (`nccl.rs`).

use tilewire_core::{Rank, Result};
use tilewire_device::Tensor;

use super::nccl::{Exchange, List};
use super::run::DeviceRun;
use crate::attention::{AttnGrads, AttnOut, AttnSaved};
use crate::collective::device::gather;
use crate::common::cuda::hold;
use crate::cp_attention::config::Strategy;
use crate::cp_attention::pieces::{GATHER, Piece, Pieces};
use crate::cp_attention::schedule::Schedule;

impl DeviceRun<'_> {
    /// Returns the list of pieces from `src`, where their buffer would begin, to `dst`.
    fn list(&self, src: u64, dst: u64, f: impl Fn(&Pieces<'_>) -> Vec<Piece>) -> List {
        let of = |(r, sched): (usize, &Option<Schedule>)| {
            let me = Rank::new(r as u32);
            let pieces = |sched| f(&Pieces { sizes: self.s, sched, me });
            sched.as_ref().map_or(Vec::new(), pieces)
        };
        let all = self.others.iter().enumerate().map(of).collect();
        List { src, dst, mine: f(&self.pieces()), all }
    }

    fn swap(&self, n: &Exchange, lists: &[List]) -> Result<()> {
        let keep = || {
            self.keep();
            hold(self.main(), self.op.core.heap().clone());
        };
        // SAFETY: the lists are of checked tensors of the launch, of the plan's memory and of its
        // buffers, with the sizes that `Sizes` has for all of them; ranks agree on the description
        // at `prepare`, and on the sequences by the rules of a launch. All of it is held, and used
        // by this stream only.
        unsafe { n.run((self.main(), self.me()), lists, &keep) }
    }

    /// Exchanges the keys of all ranks and, where heads are traded, my group's rows of my heads.
    pub fn bring_by_nccl(&self, n: &Exchange, saved: Option<&AttnSaved>) -> Result<()> {
        let (s, m, x) = (self.s, &self.op.p.memory, self.x);
        if s.strategy == Strategy::AllGather && self.all_need_all() {
            return self.gather_keys(n);
        }
        let at = s.published().1;
        let (k_from, v_from) = (begins(&x.k.data, at[0])?, begins(&x.v.data, at[1])?);
        let mut lists = vec![
            self.list(k_from, m.keys[0].addr(), |p| p.keys()[0].clone()),
            self.list(v_from, m.keys[1].addr(), |p| p.keys()[1].clone()),
        ];
        if self.scatters() {
            let from = begins(&x.q.data, 0)?;
            lists.push(self.list(from, m.q[0].addr(), |p| p.query_tensors()[0].clone()));
        }
        if let (true, Some(saved)) = (self.scatters(), saved) {
            let [d_out, lse, delta] = s.upstream();
            let from = begins(&saved.d_out, d_out)?;
            lists.push(self.list(from, m.d_out.addr(), |p| p.queries(d_out, s.dv, s.out)));
            lists.push(self.list(begins(&saved.lse, lse)?, m.lse.addr(), |p| p.stats(lse)));
            let from = self.op.p.attention.delta_memory().addr().wrapping_sub(delta as u64);
            lists.push(self.list(from, m.delta.addr(), |p| p.stats(delta)));
        }
        self.swap(n, &lists)
    }

    /// Returns whether every rank needs all rows of the others: equal on all ranks.
    fn all_need_all(&self) -> bool {
        let others = self.others.iter().flatten();
        others.chain([&**self.op.sched]).all(Schedule::needs_all_others)
    }

    /// Gathers all keys of all ranks by one collective for each of k and v.
    fn gather_keys(&self, n: &Exchange) -> Result<()> {
        let (s, m, x, lists) = (self.s, &self.op.p.memory, self.x, self.pieces());
        let first = |r: usize| lists.first_key(r);
        let rows: Vec<usize> = (0..s.size).map(|r| first(r + 1) - first(r)).collect();
        for (t, to, bytes) in
            [(&x.k.data, &m.keys[0], s.wire[0]), (&x.v.data, &m.keys[1], s.wire[1])]
        {
            let (from, row) = (t.cuda()?, s.all_kv * bytes);
            self.keep();
            let calls = gather(self.me(), &rows, (row, 1), (from.addr(), to.addr()));
            // SAFETY: a checked tensor of the launch to the plan's memory, which holds the
            // rows of all ranks; both are held.
            unsafe { n.queue(self.main(), &calls)? };
        }
        Ok(())
    }

    /// Results and lse of traded heads, to the owners of their rows.
    pub fn give_out(&self, n: &Exchange, o: &AttnOut) -> Result<()> {
        let s = self.s;
        let (out, lse) = (o.out.cuda()?.addr(), o.lse.cuda()?.addr());
        let lse_from = self.op.p.memory.lse.addr().wrapping_sub(s.lse() as u64);
        let out = self.list(self.own(GATHER, 0, 0)?, out, |p| p.results(0, s.dv));
        self.swap(n, &[out, self.list(lse_from, lse, |p| p.lse())])
    }

    /// Sends dk and dv, and where heads are traded dq, to the owners of their rows.
    pub fn give_grads(&self, n: &Exchange, g: &AttnGrads) -> Result<()> {
        let (s, m) = (self.s, &self.op.p.memory);
        let from = self.own(s.parts().0, 0, 0)?;
        let to = match s.adds() {
            true => [m.slots.addr(); 2],
            false => [g.dk.cuda()?.addr(), g.dv.cuda()?.addr()],
        };
        let mut lists = vec![
            self.list(from, to[0], |p| p.parts()[0].clone()),
            self.list(from, to[1], |p| p.parts()[1].clone()),
        ];
        if self.scatters() {
            let from = self.own(GATHER, 0, 0)?;
            lists.push(self.list(from, g.dq.cuda()?.addr(), |p| p.results(s.dq(), s.dqk)));
        }
        if s.adds() {
            // Parts that are not asked for are zeros.
            self.keep();
            self.main().fill_memory(&m.slots, 0)?;
        }
        self.swap(n, &lists)?;
        if s.adds() { self.add_all(g) } else { Ok(()) }
    }
}

/// Returns the first address of a buffer in which tensor `t` would be at byte `at`.
fn begins(t: &Tensor, at: usize) -> Result<u64> {
    Ok(t.cuda()?.addr().wrapping_sub(at as u64))
}
