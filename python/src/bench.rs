//! What a launch costs in Rust: what the cost of a call from Python is compared with.

use std::time::Instant;

use pyo3::prelude::*;
use tilewire::device::{Device, Queue};
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs};

use crate::call::Call;
use crate::ops::overlap::ag_plan;

/// Microseconds of a launch of `ag_gemm` (on the CPU with its wait), the median of `times`; with
/// `gathered` it writes the gathered x, too, as a call does that has a gradient. Shapes as `ag_gemm`;
/// all ranks call it.
#[pyfunction]
pub fn launch_us(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    w: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    gathered: Option<&Bound<'_, PyAny>>,
    times: usize,
) -> PyResult<f64> {
    let call = Call::new(py, "ag_gemm", world)?;
    let (x, w, out) = (call.tensor("x", x)?, call.tensor("w", w)?, call.tensor("out", out)?);
    let gathered = call.optional("gathered", gathered)?;
    call.prepare(py, |stream| {
        let (m, n, k) = (out.shape().dim(0), w.shape().dim(0), w.shape().dim(1));
        let most = crate::keys::rounded(m / call.size()) * call.size();
        let desc = AgGemmDesc::new(most, n, k, x.dtype());
        let plan = ag_plan(&call.member, (desc, None), stream)?;
        let mut all = Vec::with_capacity(times);
        for _ in 0..times.max(1) {
            let t = AgGemmInputs::new(x.clone(), w.clone(), out.clone());
            let t = AgGemmInputs { gathered: gathered.clone(), ..t };
            let start = Instant::now();
            let pending = plan.launch(stream, m, t)?;
            if matches!(call.device, Device::Host) {
                pending.wait()?;
            } else {
                drop(pending);
            }
            all.push(start.elapsed().as_secs_f64() * 1e6);
            if all.len() % 64 == 0 {
                stream.synchronize_until(None)?;
            }
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2])
    })
}
