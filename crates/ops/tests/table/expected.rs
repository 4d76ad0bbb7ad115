//! What each operation of the table makes, by the oracle, where all ranks have the inputs of one
//! seed.

use tilewire_core::*;
use tilewire_device::Tensor;
use tilewire_oracle::{Mat, matmul};

use super::{M, N, Ready};

fn mat(t: &Tensor) -> Result<Mat> {
    let cols = *t.shape().dims().last().expect("a matrix");
    let v: Vec<f64> = t.to_f32()?.into_iter().map(f64::from).collect();
    Ok(Mat::new(v.len() / cols, cols, v))
}

/// The output of rank `me` of `size`, whose peers have its very inputs.
fn expected(op: &str, r: &Ready, (me, size): (usize, usize)) -> Result<Vec<f64>> {
    let mine = M / size;
    let own_rows = |m: &Mat| m.slice_rows(me * mine..(me + 1) * mine);
    let times = |m: &Mat, by: f64| Mat::from_fn(m.rows, m.cols, |i, j| by * m.at(i, j));
    let everywhere = |m: &Mat| Mat::vstack(&vec![m.clone(); size]);
    let sum = |m: &Mat| times(m, size as f64);
    let family = op.split(' ').next().expect("a name");
    if family == "ep" {
        return experts(r, op != "ep fine");
    }
    if family == "cp_attention" {
        return attention(r, size);
    }
    let x = mat(&r.inputs[0])?;
    let product = |x: &Mat| Ok::<_, Error>(matmul(x, &mat(&r.inputs[1])?.transpose()));
    let out = match family {
        "ag_gemm" => product(&everywhere(&x))?,
        "gemm_rs" => own_rows(&sum(&product(&x)?)),
        "gemm_ar" => sum(&product(&x)?),
        "all_gather" => everywhere(&x),
        "reduce_scatter" => own_rows(&sum(&x)),
        "all_reduce" => sum(&x),
        // Three rows to each.
        "all_to_all" => everywhere(&x.slice_rows(3 * me..3 * me + 3)),
        _ => panic!("no oracle of {op}"),
    };
    Ok(out.data)
}

/// Rows go to their experts and come back as they went, times the sum of their weights; so do
/// gradients, if they are `weighted`: else once for each choice, with the weights themselves.
fn experts(r: &Ready, weighted: bool) -> Result<Vec<f64>> {
    let (x, w, g) = (mat(&r.inputs[1])?, mat(&r.inputs[2])?, mat(&r.inputs[3])?);
    let sum = |t: usize| w.at(t, 0) + w.at(t, 1);
    let y = Mat::from_fn(x.rows, N, |t, j| x.at(t, j) * sum(t));
    let dx = Mat::from_fn(g.rows, N, |t, j| g.at(t, j) * if weighted { sum(t) } else { 2.0 });
    let dot = |t: usize| (0..N).map(|j| g.at(t, j) * x.at(t, j)).sum::<f64>();
    let dw = (0..8).map(|i| if weighted { dot(i / 2) } else { w.data[i] }).collect();
    Ok(Mat::vstack(&[y, dx, Mat::new(1, N, dw)]).data)
}

/// Output, gradients of queries, keys and values, and lse of one rank. Nothing is masked, and the
/// keys of all ranks are mine: each key counts `size` times in the sum over keys, and each query in
/// the gradients of keys.
fn attention(r: &Ready, size: usize) -> Result<Vec<f64>> {
    let t = r.inputs.iter().map(mat).collect::<Result<Vec<_>>>()?;
    let (rows, d, n) = (t[0].rows, t[0].cols / size, size as f64);
    let dot = |a: &Mat, i: usize, b: &Mat, j: usize, h: usize| -> f64 {
        (0..d).map(|c| a.at(i, h * d + c) * b.at(j, h * d + c)).sum()
    };
    let scale = 1.0 / (d as f64).sqrt();
    let zero = || Mat::from_fn(rows, size * d, |_, _| 0.0);
    let (mut out, mut dq, mut dk, mut dv) = (zero(), zero(), zero(), zero());
    let mut lse = Vec::new();
    for h in 0..size {
        for i in 0..rows {
            let weights = (0..rows).map(|j| (scale * dot(&t[0], i, &t[1], j, h)).exp());
            let weights: Vec<f64> = weights.collect();
            let total = n * weights.iter().sum::<f64>();
            lse.push(total.ln());
            for c in h * d..(h + 1) * d {
                let all: f64 = weights.iter().enumerate().map(|(j, w)| w * t[2].at(j, c)).sum();
                out.data[i * size * d + c] = n * all / total;
            }
        }
        for i in 0..rows {
            let delta = dot(&out, i, &t[6], i, h);
            for j in 0..rows {
                let p = (scale * dot(&t[3], i, &t[4], j, h) - lse[h * rows + i]).exp();
                let ds = p * (dot(&t[6], i, &t[5], j, h) - delta) * scale * n;
                for c in h * d..(h + 1) * d {
                    dq.data[i * size * d + c] += ds * t[4].at(j, c);
                    dk.data[j * size * d + c] += ds * t[3].at(i, c);
                    dv.data[j * size * d + c] += n * p * t[6].at(i, c);
                }
            }
        }
    }
    Ok([out.data, dq.data, dk.data, dv.data, lse].concat())
}

/// Nothing if the output is that of the oracle: else which element is not, and what it is.
pub fn differs(op: &str, r: &Ready, place: (usize, usize)) -> Result<Option<String>> {
    let (want, got) = (expected(op, r, place)?, r.out.to_f32()?);
    if want.len() != got.len() {
        return Ok(Some(format!("{} elements, and not {}", got.len(), want.len())));
    }
    // Products of at most six, sums of at most four ranks, of numbers below one.
    let wrong = |(w, g): (&f64, &f32)| {
        let near = (w - f64::from(*g)).abs() <= 1e-4 * (1.0 + w.abs());
        !near
    };
    let at = want.iter().zip(&got).position(wrong);
    Ok(at.map(|i| format!("element {i} is {} and not {}", got[i], want[i])))
}
