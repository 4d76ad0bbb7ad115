//! Worlds that compare every launch: ranks that launch different things hear of it at once, on the
//! host and on devices.

use std::time::{Duration, Instant};

use tilewire_core::{DType, ErrorKind, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_symm::{Heap, WorldCfg};

const M: usize = 24;
const N: usize = 8;
const K: usize = 16;

/// A deadline that no mismatch may wait for.
pub fn cfg() -> WorldCfg {
    WorldCfg { timeout: Duration::from_secs(60), check: true, ..WorldCfg::default() }
}

/// Launches of the same sizes run, eager and captured; then the last rank launches fewer rows.
pub fn another_m_is_a_mismatch(heap: &Heap, stream: &Stream) -> Result<()> {
    let (team, size) = (heap.team(), heap.team().size());
    let plan = GemmRsPlan::new(GemmRsDesc::new(M, N, K, DType::BF16), heap, None)?;
    plan.prepare(stream)?;
    let zeros = |rows, cols| Tensor::zeros_on(&heap.device(), DType::BF16, Shape::d2(rows, cols));
    let launch = |m: usize| {
        let t = GemmRsInputs::new(zeros(m, K)?, zeros(N, K)?, zeros(m / size, N)?);
        plan.launch(stream, m, t).map(drop)
    };
    // More launches than the flight recorder has entries.
    for _ in 0..70 {
        launch(M)?;
    }
    stream.synchronize()?;
    stream.begin_capture()?;
    launch(M)?;
    let graph = stream.end_capture()?.instantiate()?;
    stream.replay(&graph)?;
    stream.synchronize()?;
    team.check()?;
    let start = Instant::now();
    let odd = team.rank().idx() == size - 1;
    let e = launch(if odd { M / 2 } else { M }).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // Of two ranks, one may hear it from the other.
    assert!(matches!(e.kind(), ErrorKind::Mismatch | ErrorKind::Aborted), "{e}");
    if e.is_mismatch() && e.get_expected().is_some() {
        let words = [e.get_expected(), e.get_seen()].map(|w| w.unwrap_or_default().to_owned());
        assert!(words.iter().any(|w| w.contains("m=24")), "{e}");
        assert!(words.iter().any(|w| w.contains("m=12")), "{e}");
        return Ok(());
    }
    Err(e)
}
