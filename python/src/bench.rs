//! The cost of a launch in Rust, which the cost of a call from Python is compared with.

use std::time::Instant;

use pyo3::prelude::*;
use tilewire::device::{Device, Queue};
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs};
use tilewire::prelude::Result;

use crate::call::{Call, held};
use crate::ops::overlap::ag_plan;

/// Microseconds of a launch of `ag_gemm` (on the CPU with its wait): the median of `times` that are
/// timed one by one, and the mean of the fastest of seven rows of `times / 8`. Shapes as `ag_gemm`;
/// all ranks call it.
#[pyfunction]
pub fn launch_us(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    w: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    times: usize,
) -> PyResult<(f64, f64)> {
    let call = Call::new(py, "ag_gemm", world)?;
    let (x, w, out) = (call.tensor("x", x)?, call.tensor("w", w)?, call.tensor("out", out)?);
    call.prepare(py, |stream| {
        let (m, n, k) = (out.shape().dim(0), w.shape().dim(0), w.shape().dim(1));
        let most = crate::keys::rounded(m / call.size()) * call.size();
        let desc = AgGemmDesc::new(most, n, k, x.dtype());
        let plan = ag_plan(&call.member, (desc, None), stream)?;
        let launch = || -> Result<()> {
            let t = AgGemmInputs::new(x.clone(), w.clone(), out.clone());
            // As calls from Python do.
            let _held = held(stream);
            let pending = plan.launch(stream, m, t)?;
            match call.device {
                Device::Host => pending.wait().map(drop),
                Device::Cuda(_) => Ok(()),
            }
        };
        let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6;
        let mut all = Vec::with_capacity(times);
        for _ in 0..times.max(1) {
            let start = Instant::now();
            launch()?;
            all.push(us(start));
            if all.len() % 64 == 0 {
                stream.synchronize_until(None)?;
            }
        }
        all.sort_by(f64::total_cmp);
        let (mut best, num) = (f64::INFINITY, (times / 8).max(1));
        for _ in 0..7 {
            let start = Instant::now();
            for _ in 0..num {
                launch()?;
            }
            best = best.min(us(start) / num as f64);
            stream.synchronize_until(None)?;
        }
        Ok((all[all.len() / 2], best))
    })
}
