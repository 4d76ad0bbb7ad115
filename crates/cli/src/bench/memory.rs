//! Operations that `tilewire bench` times against memory traffic: they read and write their
//! tensors, and multiply next to nothing.
//!
//! An operation has passes (forward, backward, ...), sampled in turn on random data. A pass is
//! judged by its last run, on poisoned results, after it was timed. Its traffic is its tensors'
//! bytes: what is read or written counts once, what is changed in place twice.

use tilewire::core::numerics::{Bound, compare};
use tilewire::device::Buffer;
use tilewire::prelude::*;
use tilewire_oracle::Mat;

use super::device::Bench;
use crate::rows::Row;

/// The operations that these functions time.
pub(crate) const OPS: [&str; 8] =
    ["quant", "permute", "embed", "norm", "heads", "router", "cross_entropy", "optimizer"];

/// Those of a transformer's layers: f32 and bf16 alone.
pub(crate) const LAYERS: [&str; 6] =
    ["embed", "norm", "heads", "router", "cross_entropy", "optimizer"];

/// A reference of a row: its index, what is wanted, and the magnitude of the terms.
type Reference<'a> = dyn Fn(usize, &mut [f64], &mut [f64]) + Sync + 'a;

/// The outcome of comparisons on this rank.
#[derive(Debug, Default)]
pub(super) struct Judge {
    pub wrong: u64,
    pub max_err: f64,
}

impl Judge {
    /// Compares rows of `cols` elements.
    pub fn rows(&mut self, got: &Tensor, cols: usize, bound: &Bound, want: &Reference<'_>) {
        let Ok(got) = got.to_f32() else { return self.wrong += 1 };
        let per = got.len().div_ceil(cols.max(1)).div_ceil(8).max(1);
        let part = |at: usize, part: &[f32]| {
            let mut found = Judge::default();
            let (mut w, mut mag) = (vec![0.0; cols], vec![0.0; cols]);
            for (r, row) in part.chunks(cols).enumerate() {
                want(at * per + r, &mut w, &mut mag);
                let c = compare(row, &w[..row.len()], |i| bound.allowed(w[i], mag[i]));
                found.add(c.num_wrong as u64, c.max_err);
            }
            found
        };
        let part = &part;
        let parts = std::thread::scope(|s| {
            let pieces = got.chunks((per * cols).max(1)).enumerate();
            let threads: Vec<_> = pieces.map(|(at, p)| s.spawn(move || part(at, p))).collect();
            threads.into_iter().map(|t| t.join()).collect::<Vec<_>>()
        });
        for found in parts {
            match found {
                Ok(j) => self.add(j.wrong, j.max_err),
                // A thread that panicked has compared nothing.
                Err(_) => self.add(1, f64::NAN),
            }
        }
    }

    /// Compares with whole matrices.
    pub fn all(&mut self, got: &Tensor, want: &Mat, mag: &Mat, bound: &Bound) {
        self.same(&[got.shape().num_elems()], &[want.data.len()]);
        self.rows(got, want.cols, bound, &|r, w, m| {
            w.copy_from_slice(want.row(r));
            m.copy_from_slice(mag.row(r));
        });
    }

    /// Counts elements that are not equal.
    pub fn same<T: PartialEq>(&mut self, got: &[T], want: &[T]) {
        let differ = got.iter().zip(want).filter(|(g, w)| g != w).count();
        self.wrong += (differ + got.len().abs_diff(want.len())) as u64;
    }

    /// Compares one number.
    pub fn near(&mut self, got: f64, want: f64, allowed: f64) {
        let error = (got - want).abs();
        // One that is no number is not among the good ones.
        self.add(u64::from(error.is_nan() || error > allowed), error);
    }

    fn add(&mut self, wrong: u64, max_err: f64) {
        self.wrong += wrong;
        // A NaN must stay visible.
        if max_err.is_nan() || max_err > self.max_err {
            self.max_err = max_err;
        }
    }
}

/// Compares what a pass left behind.
pub(super) type Judged<'a> = Box<dyn Fn(&mut Judge) -> Result<()> + 'a>;

/// A pass of an operation.
pub(super) struct Pass<'a> {
    /// Name of its row.
    pub name: String,
    /// Tensors that are read.
    pub reads: Vec<Tensor>,
    /// Tensors that are written.
    pub writes: Vec<Tensor>,
    /// Tensors that are changed in place; before the last run they are what they were at first.
    pub changes: Vec<Tensor>,
    /// Queues it.
    pub queue: Box<dyn Fn() -> Result<()> + 'a>,
    /// Compares what it left behind.
    pub judge: Judged<'a>,
}

impl Pass<'_> {
    fn bytes(&self) -> usize {
        let of = |tensors: &[Tensor]| tensors.iter().map(Tensor::len_bytes).sum::<usize>();
        of(&self.reads) + of(&self.writes) + 2 * of(&self.changes)
    }
}

impl Bench<'_> {
    /// Rows of one operation.
    pub(super) fn moved(&self, op: &str) -> Result<Vec<Row>> {
        match op {
            "quant" => self.quant_rows(),
            "permute" => self.permute_rows(),
            _ => self.layer_rows(op),
        }
    }

    /// Times `passes` in turn, judges them, and says what they moved.
    pub(super) fn by_memory(&self, shape: &str, passes: Vec<Pass<'_>>) -> Result<Vec<Row>> {
        let changed = passes.iter().flat_map(|p| &p.changes);
        let first = changed.clone().map(Tensor::download).collect::<Result<Vec<_>>>()?;
        let ways: Vec<&dyn Fn() -> Result<()>> = passes.iter().map(|p| &*p.queue as _).collect();
        let times = self.in_turn(&ways, || {
            passes.iter().flat_map(|p| &p.writes).try_for_each(Tensor::poison)?;
            changed.zip(&first).try_for_each(|(t, bytes)| t.upload(bytes))
        })?;
        let row = |(p, t): (&Pass<'_>, _)| {
            let mut judge = Judge::default();
            (p.judge)(&mut judge)?;
            let wrong = self.wrong(judge.wrong)?;
            // What is no number is worse than any.
            let mine = if judge.max_err.is_nan() { f64::INFINITY } else { judge.max_err };
            let worst = self.worst(mine)?;
            let row = self.row(&p.name, shape.to_owned(), t, wrong, String::new())?;
            let gbs = p.bytes() as f64 / t.us / 1e3;
            Ok(Row {
                moved_bytes: Some(p.bytes() as u64),
                mem_gbs: Some(gbs),
                max_err: worst.is_finite().then_some(worst),
                note: Some(format!("{gbs:.1} GB/s of {} bytes", p.bytes())),
                ..row
            })
        };
        passes.iter().zip(times).map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;
    use crate::bench::device::tests::on_host;

    fn filled(t: &Tensor, v: f32) -> Result<()> {
        t.write(|b| b.chunks_exact_mut(4).for_each(|e| e.copy_from_slice(&v.to_ne_bytes())))
    }

    /// A pass that wrote while it was timed and no longer is not judged by what it wrote then.
    #[test]
    fn what_is_judged_is_the_last_run() {
        let runs = AtomicUsize::new(0);
        let of = |last: usize, changed: f32| {
            on_host(|b| {
                let out = b.poisoned(DType::F32, Shape::d2(3, 5))?;
                let state = Tensor::zeros(DType::F32, Shape::d2(1, 1));
                runs.store(0, Relaxed);
                let queue = || {
                    runs.fetch_add(1, Relaxed);
                    let before = state.to_f32()?[0];
                    filled(&state, before + changed)?;
                    if runs.load(Relaxed) <= last { filled(&out, 2.0) } else { Ok(()) }
                };
                let ones = Mat::from_fn(3, 5, |_, _| 2.0);
                let pass = Pass {
                    name: "pass".to_owned(),
                    reads: vec![out.clone()],
                    writes: vec![out.clone()],
                    changes: vec![state.clone()],
                    queue: Box::new(queue),
                    judge: Box::new(|j| {
                        j.all(&out, &ones, &ones, &Bound::local(DType::F32, 1));
                        j.near(f64::from(state.to_f32()?[0]), 1.0, 0.0);
                        Ok(())
                    }),
                };
                b.by_memory("m=3", vec![pass])
            })
        };
        // Two timed runs, one before them, one behind.
        let right = of(4, 1.0);
        assert_eq!((right[0].wrong, right[0].max_err, runs.load(Relaxed)), (0, Some(0.0), 4));
        assert_eq!(right[0].moved_bytes, Some(2 * 60 + 2 * 4));
        let rate = 128.0 / right[0].t_ours_us.unwrap() / 1e3;
        assert_eq!(right[0].mem_gbs, Some(rate));
        let stale = of(3, 1.0);
        assert_eq!((stale[0].wrong, stale[0].max_err), (15, None), "poison is left");
        // What is changed in place starts from what it was.
        assert_eq!(of(4, 0.5)[0].wrong, 1);
    }

    #[test]
    fn every_element_is_compared() {
        let of = |values: &[f32]| Tensor::from_slice(values, Shape::d2(20, 3)).unwrap();
        let want = Mat::from_fn(20, 3, |r, c| (3 * r + c) as f64);
        let bound = Bound::local(DType::F32, 1);
        for i in 0..60 {
            let mut values = want.to_f32();
            values[i] += 1.0;
            let mut j = Judge::default();
            j.all(&of(&values), &want, &want, &bound);
            assert_eq!((j.wrong, j.max_err), (1, 1.0), "{i}");
        }
        let mut j = Judge::default();
        j.all(&of(&want.to_f32()), &want, &want, &bound);
        assert_eq!((j.wrong, j.max_err), (0, 0.0));
        j.same(&[1, 2], &[1, 2, 3]);
        j.near(f64::NAN, 1.0, 9.0);
        assert!(j.wrong == 2 && j.max_err.is_nan());
    }
}
