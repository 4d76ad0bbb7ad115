//! Launches of one plan of attention on several streams, and its graphs: their tables, deltas and
//! f32 copies do not meet.

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Buffer, Device, Queue, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnGrads, AttnInputs, AttnMask, AttnOffsets,
    AttnOperand, AttnOut, AttnSaved, Sequences,
};

use crate::common::{Gpu, gpu, random};

const ROWS: usize = 24;

/// Documents, more than a launch contains itself, and others.
const DOCUMENTS: [[usize; 8]; 2] = [[0, 3, 6, 9, 12, 15, 18, ROWS], [0, 1, 2, 3, 4, 5, 17, ROWS]];

/// How a launch says where its documents lie.
#[derive(Clone, Copy, PartialEq, Debug)]
enum By {
    Host,
    Offsets,
    /// Offsets that cannot be used: the results are NaN.
    Refused,
}

/// Both passes of one launch, and the bits of what they are by themselves.
struct Problem {
    x: AttnInputs,
    d_out: Tensor,
    out: AttnOut,
    grads: AttnGrads,
    want: Vec<Vec<u8>>,
}

fn desc(dtype: DType) -> AttentionDesc {
    let documents = Sequences::packed(&DOCUMENTS[0], &DOCUMENTS[0]).unwrap();
    let d = AttentionDesc::new(ROWS, (4, 2), 16, dtype, AttnMask::CAUSAL);
    AttentionDesc { sequences: documents, ..d }
}

fn plan(d: &AttentionDesc, stream: &Stream) -> AttentionPlan {
    // Those for sm_90a take their tables the same way, and minutes on an emulated device.
    let plan = AttentionPlan::with_backend(d.clone(), None, AttnBackend::Portable).unwrap();
    plan.prepare(stream).unwrap();
    plan
}

impl Problem {
    fn new(g: &Gpu, rng: &mut Rng, d: &AttentionDesc, (by, cu): (By, &[usize])) -> Self {
        let mut put = |cols, t| g.put(&random(rng, ROWS, cols, t), t);
        let mut operand = |heads: usize| AttnOperand {
            data: put(heads * d.dqk, d.dtype),
            scales: d.dtype.is_fp8().then(|| put(heads, DType::F32)),
        };
        let (q, k, v) = (operand(d.heads_q), operand(d.heads_kv), operand(d.heads_kv));
        let mut x = AttnInputs::new(q.data.clone(), k.data.clone(), v.data.clone());
        (x.q, x.k, x.v) = (q, k, v);
        match by {
            By::Host => x.sequences = Some(Sequences::packed(cu, cu).unwrap()),
            By::Offsets | By::Refused => {
                let late = usize::from(by == By::Refused) * ROWS;
                let cu: Vec<i32> = cu.iter().map(|&c| (c + late) as i32).collect();
                let cu = Tensor::from_slice(&cu, Shape::d1(cu.len())).unwrap();
                x.offsets = Some(AttnOffsets::packed(g.move_here(&cu), g.move_here(&cu)));
            }
        }
        let d_out = put(d.heads_q * d.dv, d.out);
        let of = |t, rows, cols| g.move_here(&Tensor::poisoned(t, Shape::d2(rows, cols)));
        let out = AttnOut {
            out: of(d.out, ROWS, d.heads_q * d.dv),
            lse: of(DType::F32, d.heads_q, ROWS),
        };
        let [q, kv] = [d.heads_q, d.heads_kv].map(|heads| heads * d.dqk);
        let grads = AttnGrads::new(of(d.out, ROWS, q), of(d.out, ROWS, kv), of(d.out, ROWS, kv));
        let mut p = Self { x, d_out, out, grads, want: Vec::new() };
        p.run(&plan(d, &g.stream), &g.stream);
        g.stream.synchronize().unwrap();
        let is_nan = |t: &Tensor| t.to_f32().unwrap().iter().all(|v| v.is_nan());
        assert_eq!(p.outs().into_iter().all(is_nan), by == By::Refused);
        p.want = p.bits();
        p
    }

    fn outs(&self) -> [&Tensor; 5] {
        [&self.out.out, &self.out.lse, &self.grads.dq, &self.grads.dk, &self.grads.dv]
    }

    fn bits(&self) -> Vec<Vec<u8>> {
        self.outs().map(|t| t.download().unwrap()).to_vec()
    }

    fn reset(&self, g: &Gpu) {
        let s = g.stream.cuda().unwrap();
        // Poison is NaN, as refused results are.
        self.outs().into_iter().for_each(|t| s.fill_memory(&t.cuda().unwrap(), 0x11).unwrap());
        g.stream.synchronize().unwrap();
    }

    fn run(&self, plan: &AttentionPlan, stream: &Stream) {
        let _out = plan.launch_fwd(stream, &self.x, self.out.clone()).unwrap();
        let (out, lse) = (self.out.out.clone(), self.out.lse.clone());
        let saved = AttnSaved { out, lse, d_out: self.d_out.clone() };
        let _grads = plan.launch_bwd(stream, &self.x, saved, self.grads.clone()).unwrap();
    }
}

/// Pairs of problems of one plan.
const PAIRS: [(DType, By, By); 4] = [
    (DType::BF16, By::Host, By::Host),
    (DType::BF16, By::Offsets, By::Refused),
    (DType::F32, By::Offsets, By::Host),
    (DType::F8E4M3, By::Host, By::Offsets),
];

fn two(g: &Gpu, (dtype, a, b): (DType, By, By)) -> (AttentionDesc, [Problem; 2], Gpu) {
    let Device::Cuda(ctx) = &g.device else { panic!("a device") };
    let (d, mut rng) = (desc(dtype), Rng::new(30));
    let both = [(a, &DOCUMENTS[0][..]), (b, &DOCUMENTS[1][..])];
    let both = both.map(|by| Problem::new(g, &mut rng, &d, by));
    (d, both, Gpu { device: g.device.clone(), stream: Stream::on(ctx).unwrap() })
}

/// Streams with a workspace each, and with one between them; queued by one thread, and by two at
/// once.
#[test]
fn launches_of_attention_on_two_streams_do_not_meet() {
    let Some(g) = gpu() else { return };
    for pair in PAIRS {
        let (d, [a, b], h) = two(&g, pair);
        for way in 0..4 {
            let plan = plan(&d, &g.stream);
            if way % 2 == 0 {
                plan.prepare(&h.stream).unwrap();
            }
            for round in 0..3 {
                [&a, &b].into_iter().for_each(|p| p.reset(&g));
                if way < 2 {
                    a.run(&plan, &g.stream);
                    b.run(&plan, &h.stream);
                } else {
                    std::thread::scope(|s| {
                        s.spawn(|| a.run(&plan, &g.stream));
                        b.run(&plan, &h.stream);
                    });
                }
                g.stream.synchronize().unwrap();
                h.stream.synchronize().unwrap();
                assert!(a.bits() == a.want && b.bits() == b.want, "{pair:?}, {way}, {round}");
            }
            assert_eq!(plan.check().is_err(), pair.2 == By::Refused);
        }
    }
}

/// A graph has a workspace of its own for each of its streams, which outlive the plan.
#[test]
fn graphs_of_attention_do_not_meet_launches_nor_their_own_branches() {
    let Some(g) = gpu() else { return };
    for pair in PAIRS {
        let (d, [a, b], h) = two(&g, pair);
        let [eager, gone] = [plan(&d, &g.stream), plan(&d, &g.stream)];
        g.stream.begin_capture().unwrap();
        a.run(&eager, &g.stream);
        let one = g.stream.end_capture().unwrap().instantiate().unwrap();
        let (fork, join) = (g.stream.event().unwrap(), g.stream.event().unwrap());
        g.stream.begin_capture().unwrap();
        g.stream.record(&fork).unwrap();
        h.stream.wait(&fork).unwrap();
        a.run(&gone, &g.stream);
        b.run(&gone, &h.stream);
        h.stream.record(&join).unwrap();
        g.stream.wait(&join).unwrap();
        let branches = g.stream.end_capture().unwrap().instantiate().unwrap();
        drop(gone);
        for round in 0..3 {
            for graph in [&one, &branches] {
                [&a, &b].into_iter().for_each(|p| p.reset(&g));
                g.stream.replay(graph).unwrap();
                if std::ptr::eq(graph, &one) {
                    b.run(&eager, &h.stream);
                }
                g.stream.synchronize().unwrap();
                h.stream.synchronize().unwrap();
                assert!(a.bits() == a.want && b.bits() == b.want, "{pair:?}, round {round}");
            }
        }
    }
}
