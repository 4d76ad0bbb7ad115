//! Attention over the cp team.

use std::ops::Range;

use tilewire_core::{DType, Error, ErrorKind, Result, Shape};
use tilewire_device::Tensor;
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnGrads, AttnInputs, AttnOut, AttnSaved, Sequences,
};
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan};
use tilewire_ops::cp_attention::Pass;
use tilewire_symm::HeapCfg;

use super::{Clock, Times};
use crate::comm::Comm;
use crate::model::Model;

/// Collective. The forward pass, and the backward pass unless the model has no attention.
pub(super) fn measure(clock: &Clock<'_>, m: &Model) -> Result<Vec<Times>> {
    let (comm, plan) = (&m.comm, m.comm.attn.plan());
    let s = &comm.stream;
    let global = &plan.desc().attn;
    let sequences = seen(&plan.rows_q(None), &global.sequences)?;
    let desc = AttentionDesc { sequences: sequences.clone(), ..global.clone() };
    // By as many kernels as the plan of several ranks has: what is measured is the communication.
    let local = AttentionPlan::new(desc, Some(plan.config()?.tiles))?.without_fused_backward();
    local.prepare(s)?;

    let rows = comm.rows.attn.len();
    let (ours, alone) = (
        Workspace::new(comm, global, (rows, rows))?,
        Workspace::new(comm, global, (rows, sequences.tokens_kv))?,
    );
    let wire = Wire::new(comm, Pass::Forward)?;
    let mut times = vec![clock.measure(
        &|| plan.launch_fwd(s, &ours.x, ours.y.clone())?.wait().map(|_| ()),
        &|| local.launch_fwd(s, &alone.x, alone.y.clone())?.wait().map(|_| ()),
        &|| wire.run(comm),
    )?];
    if !m.cfg.no_attention {
        let wire = Wire::new(comm, Pass::Backward)?;
        times.push(clock.measure(
            &|| plan.launch_bwd(s, &ours.x, ours.saved(), ours.g.clone())?.wait().map(|_| ()),
            &|| local.launch_bwd(s, &alone.x, alone.saved(), alone.g.clone())?.wait().map(|_| ()),
            &|| wire.run(comm),
        )?);
    }
    Ok(times)
}

/// Returns what the queries in `spans` of the global rows see, as sequences of their own: those of
/// a span that lie in one sequence, over that sequence's keys up to the last of them. A causal mask
/// sits at the bottom right, so that query for query the same keys are seen.
fn seen(spans: &[Range<usize>], global: &Sequences) -> Result<Sequences> {
    let (mut q, mut kv) = (vec![0], vec![0]);
    for span in spans {
        for s in &global.q {
            let mine = span.start.max(s.start)..span.end.min(s.end);
            if !mine.is_empty() {
                q.push(q[q.len() - 1] + mine.len());
                kv.push(kv[kv.len() - 1] + mine.end - s.start);
            }
        }
    }
    Sequences::packed(&q, &kv)
}

/// Tensors of one way to do it.
struct Workspace {
    x: AttnInputs,
    y: AttnOut,
    d_out: Tensor,
    g: AttnGrads,
}

impl Workspace {
    fn new(comm: &Comm, d: &AttentionDesc, (rows_q, rows_kv): (usize, usize)) -> Result<Self> {
        let p = &comm.place;
        let q = || p.zeros(p.dtype, rows_q, d.heads_q * d.dqk);
        let kv = || p.zeros(p.dtype, rows_kv, d.heads_kv * d.dqk);
        let lse = p.zeros(DType::F32, d.heads_q, rows_q)?;
        Ok(Self {
            x: AttnInputs::new(q()?, kv()?, kv()?),
            y: AttnOut { out: q()?, lse },
            d_out: q()?,
            g: AttnGrads::new(q()?, kv()?, kv()?),
        })
    }

    fn saved(&self) -> AttnSaved {
        let AttnOut { out, lse } = self.y.clone();
        AttnSaved { out, lse, d_out: self.d_out.clone() }
    }
}

/// The bytes of one pass between each two ranks.
struct Wire {
    plan: CollectivePlan,
    x: Tensor,
    out: Tensor,
}

impl Wire {
    /// Collective over the cp team.
    fn new(comm: &Comm, pass: Pass) -> Result<Self> {
        let (cp, me) = (&comm.cp, comm.cp.rank().idx());
        let traffic = comm.attn.plan().predict(None, pass)?;
        let mine: Vec<u64> = traffic.iter().flat_map(|l| [l.put_bytes, l.get_bytes]).collect();
        let all: Vec<Vec<u64>> = cp
            .exchange("bytes", bytemuck::cast_slice(&mine))?
            .iter()
            .map(|b| bytemuck::pod_collect_to_vec(b))
            .collect();
        if all.iter().any(|t| t.len() != mine.len()) {
            return Err(Error::new(
                ErrorKind::Protocol,
                "a peer has measured another number of links",
            ));
        }
        // What a rank puts it sends; what it gets the other sends. In words of four bytes.
        let ranks = 0..cp.size();
        let link = |src: usize, dst: usize| match src == dst {
            true => 0,
            false => ((all[src][2 * dst] + all[dst][2 * src + 1]) / 4) as usize,
        };
        let splits: Vec<Vec<usize>> =
            ranks.clone().map(|s| ranks.clone().map(|d| link(s, d)).collect()).collect();
        let (sent, got) = (splits[me].iter().sum(), splits.iter().map(|s| s[me]).sum());
        let kind = CollectiveKind::AllToAll(splits);
        let desc = CollectiveDesc { kind, m: 0, cols: 1, dtype: DType::F32 };
        let bytes = CollectivePlan::memory(&desc, cp.size()) + (1 << 14);
        let heap = cp.heap(comm.target.backend_of(cp), HeapCfg::new(bytes))?;
        let plan = CollectivePlan::new(desc, &heap)?;
        plan.prepare(&comm.stream)?;
        let zeros = |rows| Tensor::zeros_on(&comm.place.device, DType::F32, Shape::d2(rows, 1));
        Ok(Self { plan, x: zeros(sent)?, out: zeros(got)? })
    }

    fn run(&self, comm: &Comm) -> Result<()> {
        self.plan.launch(&comm.stream, 0, &self.x, &self.out)?.wait().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::Rank;
    use tilewire_ops::attention::AttnMask;
    use tilewire_ops::cp_attention::Layout;

    /// Pairs of a query and a key that it sees, under a causal mask.
    fn pairs(s: &Sequences) -> usize {
        let of = |(q, kv): (&Range<usize>, &Range<usize>)| {
            (0..q.len()).map(|i| kv.len() - q.len() + i + 1).sum::<usize>()
        };
        s.q.iter().zip(&s.kv).map(of).sum()
    }

    /// All ranks together do the arithmetic of the undivided attention, no more and no less.
    #[test]
    fn the_local_attention_sees_every_pair_once() {
        for (batch, seq, size) in [(1, 16, 2), (3, 10, 2), (2, 7, 3), (1, 3, 4), (4, 1, 3)] {
            let global = Sequences::batched(batch, seq, seq);
            let (mut rows, mut all) = (0, 0);
            for r in Rank::all(size) {
                let rows_of = Layout::Zigzag.rows_q(&global, &AttnMask::CAUSAL, r, size);
                let s = seen(&rows_of, &global).unwrap();
                rows += s.tokens_q;
                all += pairs(&s);
            }
            assert_eq!((rows, all), (batch * seq, pairs(&global)), "{batch} x {seq} on {size}");
        }
    }
}
