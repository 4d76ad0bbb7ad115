//! The works of the host against the oracle, through the plan.

use tilewire_core::{DType, ErrorKind, Rng, Shape};
use tilewire_device::{Stream, Tensor};

use super::*;

fn plan(stream: &Stream) -> LayersPlan {
    let desc = LayersDesc { dtype: DType::F32, rows: 16, cols: 16, experts: 8 };
    let p = LayersPlan::new(desc).unwrap();
    p.prepare(stream).unwrap();
    p
}

fn random(rng: &mut Rng, rows: usize, cols: usize) -> Tensor {
    let v: Vec<f32> = (0..rows * cols).map(|_| rng.normal()).collect();
    Tensor::from_slice(&v, Shape::d2(rows, cols)).unwrap()
}

fn empty(rows: usize, cols: usize) -> Tensor {
    Tensor::poisoned(DType::F32, Shape::d2(rows, cols))
}

#[test]
fn the_sum_and_its_norm_are_one_work() {
    let (mut rng, s) = (Rng::new(1), Stream::new("test").unwrap());
    let p = plan(&s);
    let (x, y, w) = (random(&mut rng, 5, 8), random(&mut rng, 5, 8), random(&mut rng, 1, 8));
    let (sum, out) = (empty(5, 8), empty(5, 8));
    let work = AddNorm {
        x: x.clone(),
        add: Some((y.clone(), sum.clone())),
        w: w.clone(),
        out: out.clone(),
    };
    p.run(&s, &work).unwrap();
    s.synchronize().unwrap();
    let want: Vec<f32> =
        x.to_f32().unwrap().iter().zip(y.to_f32().unwrap()).map(|(x, y)| x + y).collect();
    assert_eq!(sum.to_f32().unwrap(), want);
    assert_eq!(out.to_f32().unwrap(), math::rms_norm(&want, &w.to_f32().unwrap()));
    // Its gradient, with and without what goes past it.
    let (dy, dx, dw) = (random(&mut rng, 5, 8), empty(5, 8), empty(1, 8));
    let mut work = NormBwd {
        x: sum.clone(),
        w: w.clone(),
        dy: dy.clone(),
        residual: None,
        dx: dx.clone(),
        narrow: Some(empty(5, 8)),
        dw: dw.clone(),
    };
    p.run(&s, &work).unwrap();
    s.synchronize().unwrap();
    let alone = dx.to_f32().unwrap();
    assert_eq!(work.narrow.as_ref().unwrap().to_f32().unwrap(), alone);
    work.residual = Some(x.clone());
    p.run(&s, &work).unwrap();
    s.synchronize().unwrap();
    let both: Vec<f32> = alone.iter().zip(x.to_f32().unwrap()).map(|(a, x)| a + x).collect();
    assert_eq!(dx.to_f32().unwrap(), both);
}

#[test]
fn heads_that_are_taken_apart_and_joined_are_what_they_were() {
    let (mut rng, s) = (Rng::new(2), Stream::new("test").unwrap());
    let p = plan(&s);
    let (heads, kv, dim, n) = (2, 1, 4, 3);
    let rows = random(&mut rng, n, (heads + 2 * kv) * dim);
    let mut work = Heads {
        rows: rows.clone(),
        q: empty(n, heads * dim),
        k: empty(n, kv * dim),
        v: empty(n, kv * dim),
        positions: Tensor::from_slice(&[0i32, 7, 2], Shape::d1(n)).unwrap(),
        table: Tensor::from_slice(&math::rope_table(8, dim), Shape::d2(8, dim)).unwrap(),
        join: false,
    };
    p.run(&s, &work).unwrap();
    work.rows = empty(n, (heads + 2 * kv) * dim);
    work.join = true;
    p.run(&s, &work).unwrap();
    s.synchronize().unwrap();
    let (have, want) = (work.rows.to_f32().unwrap(), rows.to_f32().unwrap());
    assert!(have.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{have:?} for {want:?}");
    // Position 0 turns nothing, later ones do.
    let q = work.q.to_f32().unwrap();
    assert_eq!(q[..heads * dim], want[..heads * dim]);
    assert_ne!(q[heads * dim..2 * heads * dim], want[16..16 + heads * dim]);
}

/// A loss or norm that is no number leaves everything as it is, the count included.
#[test]
fn no_step_is_taken_from_poison() {
    let (mut rng, s) = (Rng::new(3), Stream::new("test").unwrap());
    let p = plan(&s);
    let count = Tensor::from_slice(&[4i32], Shape::d1(1)).unwrap();
    let step = |small: [f32; 4], rng: &mut Rng| {
        let small = Tensor::from_slice(&small, Shape::d1(4)).unwrap();
        let (w, g, zero) =
            (random(rng, 2, 3), random(rng, 2, 3), Tensor::zeros(DType::F32, Shape::d2(2, 3)));
        let before = w.to_f32().unwrap();
        let work = AdamStep {
            cfg: AdamW::default(),
            decay: true,
            w: w.clone(),
            master: None,
            g,
            m: zero.clone(),
            v: Tensor::zeros(DType::F32, Shape::d2(2, 3)),
            small: small.clone(),
            count: count.clone(),
        };
        p.run(&s, &work).unwrap();
        p.run(&s, &CountStep { small, count: count.clone() }).unwrap();
        s.synchronize().unwrap();
        let moved = w.to_f32().unwrap() != before && zero.to_f32().unwrap() != [0.0; 6];
        (moved, count.to_vec::<i32>().unwrap()[0])
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for bad in
        [[nan, 1.0, 0.0, 1.0], [1.0, inf, 0.0, 1.0], [1.0, 1.0, nan, 1.0], [1.0, 1.0, 0.0, nan]]
    {
        assert_eq!(step(bad, &mut rng), (false, 4), "{bad:?}");
    }
    assert_eq!(step([1.0, 9.0, 0.0, 2.0], &mut rng), (true, 5));
}

#[test]
fn squares_are_summed_in_two_floats() {
    let s = Stream::new("test").unwrap();
    let p = plan(&s);
    let t = |v: &[f32]| Tensor::from_slice(v, Shape::d1(v.len())).unwrap();
    let out = empty(1, 2);
    // 2^40 + 1 does not fit one float.
    let of = vec![t(&[1048576.0]), t(&[]), t(&[1.0])];
    p.run(&s, &SquareSum { of, out: out.clone() }).unwrap();
    s.synchronize().unwrap();
    let v = out.to_f32().unwrap();
    assert_eq!(f64::from(v[0]) + f64::from(v[1]), (1u64 << 40) as f64 + 1.0);
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let s = Stream::new("test").unwrap();
    let p = plan(&s);
    let tokens = Tensor::zeros(DType::U8, Shape::d1(3));
    let work = Embed { tokens, table: empty(255, 8), x: empty(3, 8) };
    let e = p.run(&s, &work).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("table"), "{e}");
    let tokens = Tensor::zeros(DType::U8, Shape::d1(17));
    let e = p.run(&s, &Embed { tokens, table: empty(256, 8), x: empty(17, 8) }).unwrap_err();
    assert!(e.to_string().contains("larger than the plan"), "{e}");
    let unprepared = LayersPlan::new(*p.desc()).unwrap();
    let tokens = Tensor::zeros(DType::U8, Shape::d1(3));
    let e =
        unprepared.run(&s, &Embed { tokens, table: empty(256, 8), x: empty(3, 8) }).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotPrepared);
    assert!(LayersPlan::new(LayersDesc { dtype: DType::F16, ..*p.desc() }).is_err());
}
