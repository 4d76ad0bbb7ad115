//! Rows that no query of a rank sees are not sent to it, and nothing reads the places where they
//! would be: these hold NaN here.

use std::ops::Range;

use tilewire_core::{BackendKind, DType, Result, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_oracle::{Mat, attention as oracle};
use tilewire_symm::{Heap, HeapCfg, LiveTeam, World, WorldCfg};

use super::{CpAttentionDesc, CpAttentionPlan, CpConfig, Layout, Pass, Strategy};
use crate::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved, Sequences,
};

const RANKS: usize = 4;
const ROWS: usize = 96;
/// Heads of queries and of keys, and their elements.
const HEADS: (usize, usize, usize) = (4, 4, 8);

/// Returns a heap of which every byte of this rank's part is that of a NaN, whatever lies there.
fn poisoned_heap(team: &LiveTeam) -> Result<Heap> {
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
    let all = heap.alloc(1 << 20, "all")?;
    let (at, len) = all.address(team.rank())?;
    // SAFETY: this rank's own part of a buffer that no plan has yet, and that lives on.
    unsafe { std::ptr::write_bytes(at as *mut u8, 0xff, len) };
    drop(all);
    heap.collect()?;
    Ok(heap)
}

/// The inputs of all ranks.
struct Case {
    mask: AttnMask,
    inputs: [Mat; 4],
}

impl Case {
    fn new(mask: AttnMask) -> Self {
        let (q, kv, dim) = HEADS;
        let mut rng = Rng::new(5);
        let inputs = [q, kv, kv, q].map(|heads| Mat::random(&mut rng, ROWS, heads * dim));
        Self { mask, inputs }
    }

    /// Returns out, dq, dk and dv of all rows, by the oracle.
    fn wants(&self, s: &Sequences) -> [Mat; 4] {
        let mask = oracle::AttnMask { left: self.mask.left, right: self.mask.right };
        let spec = oracle::AttnSpec::new(HEADS.0, HEADS.1, HEADS.2, mask);
        let s = oracle::Sequences { q: s.q.clone(), kv: s.kv.clone() };
        let [q, k, v, d_out] = &self.inputs;
        let x = oracle::AttnInputs::new(q, k, v);
        let g = oracle::attention_bwd(&spec, &x, &s, d_out);
        [oracle::attention(&spec, &x, &s).o, g.dq, g.dk, g.dv]
    }

    /// Runs both passes of this rank over `s`, and checks each of its rows.
    fn check(&self, plan: &CpAttentionPlan, stream: &Stream, s: &Sequences) -> Result<()> {
        let (rq, rkv) = (plan.rows_q(Some(s)), plan.rows_kv(Some(s)));
        let rows = |m: &Mat, spans: &[Range<usize>]| {
            Mat::vstack(&spans.iter().map(|r| m.slice_rows(r.clone())).collect::<Vec<_>>())
        };
        let tensor = |m: &Mat, spans: &[Range<usize>]| {
            let m = rows(m, spans);
            Tensor::from_f32(&m.to_f32(), DType::F32, Shape::d2(m.rows, m.cols)).unwrap()
        };
        let [q, k, v, d_out] = &self.inputs;
        let x = AttnInputs::new(tensor(q, &rq), tensor(k, &rkv), tensor(v, &rkv));
        let x = AttnInputs { sequences: Some(s.clone()), ..x };
        let like = |t: &Tensor| Tensor::poisoned(DType::F32, t.shape());
        let num = rq.iter().map(Range::len).sum();
        let lse = Tensor::poisoned(DType::F32, Shape::d2(HEADS.0, num));
        let o = plan.launch_fwd(stream, &x, AttnOut { out: like(&x.q.data), lse })?.wait()?;
        let d_out = tensor(d_out, &rq);
        let saved = AttnSaved { out: o.out.clone(), lse: o.lse, d_out };
        let grads = AttnGrads::new(like(&x.q.data), like(&x.k.data), like(&x.v.data));
        let g = plan.launch_bwd(stream, &x, saved, grads)?.wait()?;
        let spans = [&rq, &rq, &rkv, &rkv];
        for ((got, want), spans) in [o.out, g.dq, g.dk, g.dv].iter().zip(self.wants(s)).zip(spans) {
            let (got, want) = (got.to_vec::<f32>()?, rows(&want, spans));
            let right = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() <= 1e-4;
            let wrong = got.iter().zip(&want.data).position(|p| !right(p));
            let what = plan.explain().what;
            assert_eq!(wrong.map(|i| (i, got[i], want.data[i])), None, "{what} {s}");
            assert_eq!(got.len(), want.data.len());
        }
        Ok(())
    }
}

/// Returns the bytes that this rank and its peers move in a forward pass over `s`.
fn moved(plan: &CpAttentionPlan, s: &Sequences) -> Result<u64> {
    let links = plan.predict(Some(s), Pass::Forward)?;
    Ok(links.iter().map(|l| l.put_bytes + l.get_bytes).sum())
}

/// Every strategy and layout, several masks, and other documents in each launch of a plan.
#[test]
fn nothing_reads_rows_that_are_not_sent() {
    let documents = [vec![0, 24, 48, 72, 96], vec![0, 40, 48, 96], vec![0, 96], vec![0, 8, 88, 96]];
    let mut documents: Vec<_> =
        documents.iter().map(|cu| Sequences::packed(cu, cu).unwrap()).collect();
    // Keys that no query sees: 16 more than queries, and 16 fewer.
    documents.push(Sequences::packed(&[0, 24, 48, 72, 96], &[0, 40, 48, 72, 96]).unwrap());
    let layouts = Layout::NAMES.into_iter().map(|(_, l)| l);
    for (layout, (_, strategy)) in
        layouts.flat_map(|l| Strategy::NAMES.into_iter().map(move |s| (l, s)))
    {
        for mask in
            [AttnMask::CAUSAL, AttnMask::FULL, AttnMask::window(9, 2), AttnMask::window(3, 0)]
        {
            let case = Case::new(mask);
            World::run_threads(RANKS, WorldCfg::for_tests(), |w| {
                let team = w.everyone("unsent")?;
                let (heap, stream) = (poisoned_heap(&team)?, Stream::new("s")?);
                let attn = AttentionDesc::new(ROWS, (HEADS.0, HEADS.1), HEADS.2, DType::F32, mask);
                let d = CpAttentionDesc { layout, a2a_size: 2, ..CpAttentionDesc::new(attn) };
                let plan = CpAttentionPlan::new(d, &heap, Some(CpConfig::of(strategy)))?;
                plan.prepare(&stream)?;
                documents.iter().try_for_each(|s| case.check(&plan, &stream, s))?;
                team.agree(true)?;
                team.check_counters()?;
                // Four documents of the length of a contiguous shard: no key travels.
                if layout == Layout::Contiguous {
                    let moved = moved(&plan, &documents[0])?;
                    let trades = matches!(strategy, Strategy::AllToAll | Strategy::Hybrid);
                    assert_eq!(moved > 0, trades, "{strategy}: {moved}");
                }
                Ok(())
            })
            .unwrap();
        }
    }
}
