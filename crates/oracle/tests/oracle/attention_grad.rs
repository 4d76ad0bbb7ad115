use tilewire_oracle::Mat;
use tilewire_oracle::attention::{
    AttnGrads, AttnInputs, AttnMask, AttnSpec, Bias, Dropout, Sequences, attention, attention_bwd,
};

use crate::{assert_close, assert_grad, rng, vector};

/// Everything attention reads, owned.
struct Case {
    spec: AttnSpec,
    sequences: Sequences,
    q: Mat,
    k: Mat,
    v: Mat,
    bias: Option<Bias>,
    sink: Option<Vec<f64>>,
    d_o: Mat,
}

impl Case {
    fn new(spec: AttnSpec, sequences: Sequences, dims: (usize, usize)) -> Self {
        let mut r = rng(17);
        let (dqk, dv) = dims;
        let rows =
            |ranges: &[std::ops::Range<usize>]| ranges.iter().map(|s| s.end).max().unwrap_or(0);
        // One row of padding behind the last sequence.
        let (tq, tkv) = (rows(&sequences.q) + 1, rows(&sequences.kv) + 1);
        Self {
            q: Mat::random(&mut r, tq, spec.heads_q * dqk),
            k: Mat::random(&mut r, tkv, spec.heads_kv * dqk),
            v: Mat::random(&mut r, tkv, spec.heads_kv * dv),
            d_o: Mat::random(&mut r, tq, spec.heads_q * dv),
            bias: None,
            sink: None,
            spec,
            sequences,
        }
    }

    fn with_bias(mut self, heads: usize, sq: usize, skv: usize) -> Self {
        self.bias = Some(Bias::new(heads, sq, skv, Mat::random(&mut rng(18), heads * sq, skv)));
        self
    }

    fn with_sink(mut self) -> Self {
        self.sink = Some(Mat::random(&mut rng(19), 1, self.spec.heads_q).data);
        self
    }

    fn inputs(&self) -> AttnInputs<'_> {
        AttnInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            bias: self.bias.as_ref(),
            sink: self.sink.as_deref(),
        }
    }

    fn grads(&self) -> AttnGrads {
        attention_bwd(&self.spec, &self.inputs(), &self.sequences, &self.d_o)
    }

    fn loss(&self, inputs: &AttnInputs<'_>) -> f64 {
        attention(&self.spec, inputs, &self.sequences).o.dot(&self.d_o)
    }

    #[track_caller]
    fn check(&self) {
        let (g, inputs) = (self.grads(), self.inputs());
        assert_grad("dq", &g.dq, &self.q, |q| self.loss(&AttnInputs { q, ..inputs }));
        assert_grad("dk", &g.dk, &self.k, |k| self.loss(&AttnInputs { k, ..inputs }));
        assert_grad("dv", &g.dv, &self.v, |v| self.loss(&AttnInputs { v, ..inputs }));
        assert_eq!(g.dbias.is_some(), self.bias.is_some());
        if let (Some(dbias), Some(bias)) = (&g.dbias, &self.bias) {
            assert_grad("dbias", &dbias.data, &bias.data, |data| {
                let bias = Bias { data: data.clone(), ..bias.clone() };
                self.loss(&AttnInputs { bias: Some(&bias), ..inputs })
            });
        }
        assert_eq!(g.dsink.is_some(), self.sink.is_some());
        if let (Some(dsink), Some(sink)) = (&g.dsink, &self.sink) {
            assert_grad("dsink", &vector(dsink), &vector(sink), |s| {
                self.loss(&AttnInputs { sink: Some(&s.data), ..inputs })
            });
        }
    }
}

fn packed() -> Sequences {
    Sequences::packed(&[0, 3, 3, 7], &[0, 5, 6, 9])
}

#[test]
fn plain_masks_and_head_groups() {
    for mask in [AttnMask::FULL, AttnMask::CAUSAL, AttnMask::window(2, 0), AttnMask::window(1, 2)] {
        for (hq, hkv) in [(1, 1), (2, 2), (4, 2), (3, 1)] {
            Case::new(AttnSpec::new(hq, hkv, 3, mask), packed(), (3, 2)).check();
        }
    }
}

#[test]
fn batched_and_single_rows() {
    Case::new(AttnSpec::new(2, 1, 2, AttnMask::CAUSAL), Sequences::batched(2, 3, 3), (2, 4))
        .check();
    Case::new(AttnSpec::new(1, 1, 4, AttnMask::CAUSAL), Sequences::batched(1, 1, 5), (4, 1))
        .check();
    Case::new(AttnSpec::new(1, 1, 1, AttnMask::CAUSAL), Sequences::batched(1, 4, 2), (1, 1))
        .check();
}

#[test]
fn softcap() {
    let spec = AttnSpec { softcap: Some(0.8), ..AttnSpec::new(2, 1, 3, AttnMask::CAUSAL) };
    Case::new(spec, packed(), (3, 2)).check();
}

#[test]
fn bias_for_each_head_and_for_all() {
    for heads in [1, 4] {
        let spec = AttnSpec::new(4, 2, 2, AttnMask::CAUSAL);
        Case::new(spec, packed(), (2, 2)).with_bias(heads, 4, 5).check();
    }
}

#[test]
fn sink() {
    let spec = AttnSpec::new(4, 2, 2, AttnMask::CAUSAL);
    Case::new(spec.clone(), packed(), (2, 3)).with_sink().check();
    // Rows that see only the sink.
    Case::new(spec, Sequences::batched(1, 4, 2), (2, 3)).with_sink().check();
}

#[test]
fn dropout() {
    let dropout = Some(Dropout { p: 0.3, seed: 5 });
    let spec = AttnSpec { dropout, ..AttnSpec::new(2, 1, 3, AttnMask::CAUSAL) };
    Case::new(spec, packed(), (3, 2)).check();
}

#[test]
fn everything_at_once() {
    let spec = AttnSpec {
        scale: 0.7,
        softcap: Some(1.1),
        dropout: Some(Dropout { p: 0.2, seed: 6 }),
        ..AttnSpec::new(4, 2, 3, AttnMask { left: Some(3), right: Some(0) })
    };
    let sequences = Sequences::padded((&[0, 3, 5], &[1, 5, 8]), (&[0, 4, 7], &[0, 4, 9]));
    Case::new(spec, sequences, (3, 2)).with_bias(4, 3, 4).with_sink().check();
}

#[test]
fn gradients_ignore_padding_even_if_it_is_nan() {
    let sequences = Sequences::padded((&[0, 2, 3], &[1, 4, 6]), (&[0, 2, 5], &[0, 3, 6]));
    let mut case = Case::new(AttnSpec::new(2, 1, 2, AttnMask::CAUSAL), sequences, (2, 2));
    let clean = case.grads();
    let inside =
        |ranges: &[std::ops::Range<usize>], r: usize| ranges.iter().any(|s| s.contains(&r));
    let poison = |m: &Mat, ranges: &[std::ops::Range<usize>]| {
        Mat::from_fn(m.rows, m.cols, |r, c| if inside(ranges, r) { m.at(r, c) } else { f64::NAN })
    };
    let (rows_q, rows_kv) = (case.sequences.q.clone(), case.sequences.kv.clone());
    case.q = poison(&case.q, &rows_q);
    case.d_o = poison(&case.d_o, &rows_q);
    case.k = poison(&case.k, &rows_kv);
    case.v = poison(&case.v, &rows_kv);
    assert!(case.q.data.iter().any(|v| v.is_nan()) && case.v.data.iter().any(|v| v.is_nan()));
    let dirty = case.grads();
    assert_close("dq", &dirty.dq, &clean.dq);
    assert_close("dk", &dirty.dk, &clean.dk);
    assert_close("dv", &dirty.dv, &clean.dv);
    for r in (0..dirty.dq.rows).filter(|&r| !inside(&rows_q, r)) {
        assert!(dirty.dq.row(r).iter().all(|&v| v == 0.0));
    }
}

#[test]
fn shared_bias_gradient_is_the_sum_over_heads() {
    let spec = AttnSpec::new(3, 1, 2, AttnMask::FULL);
    let shared = Case::new(spec.clone(), packed(), (2, 2)).with_bias(1, 4, 5);
    let mut each = Case::new(spec, packed(), (2, 2));
    let one = shared.bias.clone().unwrap();
    each.bias =
        Some(Bias::new(3, 4, 5, Mat::vstack(&[one.data.clone(), one.data.clone(), one.data])));
    let by_head = each.grads().dbias.unwrap().data;
    let sum =
        by_head.slice_rows(0..4).add(&by_head.slice_rows(4..8)).add(&by_head.slice_rows(8..12));
    assert_close("dbias", &shared.grads().dbias.unwrap().data, &sum);
}
