//! Every parameter's gradient against central finite differences of the same model in f64, built
//! from the oracle.

use std::collections::HashMap;

use tilewire_core::Rng;
use tilewire_nn::{Data, Grid, Model, ModelCfg, Target};
use tilewire_ops::layers::math::NORM_EPS;
use tilewire_oracle::attention::{AttnInputs, AttnMask, AttnSpec, Sequences, attention};
use tilewire_oracle::gemm::silu;
use tilewire_oracle::nn as oracle;
use tilewire_oracle::{Mat, matmul};
use tilewire_symm::{World, WorldCfg};

fn cfg() -> ModelCfg {
    ModelCfg {
        layers: 2,
        d_model: 8,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        experts: 4,
        top_k: 2,
        d_ff: 6,
        seq: 6,
        batch: 2,
        no_attention: false,
        no_experts: false,
    }
}

type Weights = HashMap<String, Mat>;

fn linear(x: &Mat, w: &Mat) -> Mat {
    matmul(x, &w.transpose())
}

fn attend(c: &ModelCfg, w: &Mat, h: &Mat) -> Mat {
    let qkv = linear(h, w);
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let positions: Vec<usize> = (0..h.rows).map(|t| t % c.seq).collect();
    let style = oracle::RopeStyle::HalfSplit;
    let spec = oracle::RopeSpec { head_dim: c.head_dim, base: 1e4, style };
    let turn = |m: Mat| oracle::rope(&m, &positions, spec);
    let (q, k, v) = (
        turn(qkv.slice_cols(0..q)),
        turn(qkv.slice_cols(q..q + kv)),
        qkv.slice_cols(q + kv..q + 2 * kv),
    );
    let spec = AttnSpec::new(c.heads, c.kv_heads, c.head_dim, AttnMask::CAUSAL);
    let inputs = AttnInputs { q: &q, k: &k, v: &v, bias: None, sink: None };
    attention(&spec, &inputs, &Sequences::batched(c.batch, c.seq, c.seq)).o
}

/// The experts' output of one token.
fn expert(c: &ModelCfg, up: &Mat, down: &Mat, e: usize, h: &Mat) -> Mat {
    let z = linear(h, &up.slice_rows(e * 2 * c.d_ff..(e + 1) * 2 * c.d_ff));
    let a = Mat::from_fn(1, c.d_ff, |_, i| silu(z.at(0, i)) * z.at(0, c.d_ff + i));
    linear(&a, &down.slice_rows(e * c.d_model..(e + 1) * c.d_model))
}

/// Mean cross-entropy plus `balance` times the layers' load-balancing losses.
fn loss(c: &ModelCfg, w: &Weights, tokens: &[u8], targets: &[i64], balance: f64) -> f64 {
    let ids: Vec<usize> = tokens.iter().map(|&t| t as usize).collect();
    let eps = f64::from(NORM_EPS);
    let mut x = oracle::embedding(&w["embed"], &ids);
    let mut total = 0.0;
    for l in 0..c.layers {
        let p = |n: &str| &w[&format!("layers.{l}.{n}")];
        let h = oracle::rms_norm(&x, &p("norm1").data, eps);
        x = x.add(&linear(&attend(c, p("qkv"), &h), p("out")));
        let h = oracle::rms_norm(&x, &p("norm2").data, eps);
        let r = oracle::router(&linear(&h, p("router")), c.top_k);
        total += balance * r.aux_loss;
        let moe: Vec<Mat> = (0..x.rows)
            .map(|t| {
                let h = h.slice_rows(t..t + 1);
                (0..c.top_k).fold(Mat::zeros(1, c.d_model), |sum, j| {
                    let e = r.topk.expert(t, j).expect("nothing is masked");
                    sum.add(&expert(c, p("up"), p("down"), e, &h).map(|v| v * r.weights.at(t, j)))
                })
            })
            .collect();
        x = x.add(&Mat::vstack(&moe));
    }
    let h = oracle::rms_norm(&x, &w["norm"].data, eps);
    total + oracle::cross_entropy(&linear(&h, &w["head"]), targets).loss
}

#[test]
fn every_parameters_gradient_is_the_finite_difference() {
    let c = cfg();
    let text: Vec<u8> =
        b"0123456789abcdefghijklmnopqrstuvwxyz,.".iter().copied().cycle().take(300).collect();
    let grid = Grid { dp: 1, cp: 1, tp: 1 };
    World::run_threads(1, WorldCfg::default(), |world| {
        let mut m = Model::new(&world, (c, grid), Target::default(), 3, None)?;
        m.balance = 0.3;
        let balance = f64::from(m.balance);
        let batch = m.batch(&Data::Text(text.clone()), 3, 0);
        let mut weights = Weights::new();
        for p in &m.params {
            weights.insert(p.name.clone(), Mat::from_f32(p.global.0, p.global.1, &p.w.to_f32()?));
        }
        let (losses, _) = m.gradients(&batch)?;
        let want = loss(&c, &weights, &batch.tokens, &batch.targets, balance);
        let have = losses.loss + balance * losses.balance * c.layers as f64;
        assert!((have - want).abs() < 1e-5, "loss {have} for {want}");

        let mut rng = Rng::new(11);
        for p in &m.params {
            let g = p.g.to_f32()?;
            let most = g.iter().fold(0.0f32, |a, g| a.max(g.abs()));
            assert!(most > 0.0, "{} has no gradient", p.name);
            // The largest element and a few at random.
            let mut picks: Vec<usize> =
                (0..6).map(|_| rng.below(g.len() as u64) as usize).collect();
            picks.extend(g.iter().position(|g| g.abs() == most));
            for i in picks {
                let h = 1e-5;
                let at = |delta: f64| {
                    let mut w = weights.clone();
                    w.get_mut(&p.name).expect("known").data[i] += delta;
                    loss(&c, &w, &batch.tokens, &batch.targets, balance)
                };
                let slope = (at(h) - at(-h)) / (2.0 * h);
                let (got, scale) = (f64::from(g[i]), f64::from(most));
                assert!((got - slope).abs() <= 2e-4 * scale, "{}[{i}]: {got} for {slope}", p.name);
            }
        }
        Ok(())
    })
    .unwrap();
}
