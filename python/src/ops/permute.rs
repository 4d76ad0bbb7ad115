//! `permute` and `unpermute`: tokens of this rank in the order of their experts, and back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tilewire::device::{Device, Queue};
use tilewire::ops::permute::{
    PermuteDesc, PermuteMap, PermutePlan, Permuted, Tokens, UnpermuteGrads, WeightedGrads,
};
use tilewire::prelude::*;

use crate::call::Place;
use crate::errors::OrRaise;
use crate::keys::rounded;
use crate::local::{self, LocalKey};
use crate::ops::ep::copy_out;

type Object<'py> = Bound<'py, PyAny>;

/// Maps of a plan that are kept for later calls.
const SPARE: usize = 16;

/// A plan with maps that nobody uses: making one allocates. A map that was used on one stream only
/// is used again there, where its old readers come before its new writers.
pub struct Pool {
    plan: PermutePlan,
    spare: Mutex<HashMap<(usize, u64), Vec<PermuteMap>>>,
}

/// The routing of one batch.
#[pyclass(frozen)]
pub struct RowMap {
    pool: Arc<Pool>,
    /// Absent only in the drop.
    map: Option<PermuteMap>,
    /// Number of tokens, and the stream.
    key: (usize, u64),
    /// A graph replays into it, or another stream reads it: it is never used again for anything
    /// else. What uses it keeps it.
    once: AtomicBool,
}

impl Drop for RowMap {
    fn drop(&mut self) {
        if self.once.load(Ordering::Relaxed) {
            return;
        }
        let mut spare = self.pool.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.values().map(Vec::len).sum::<usize>() < SPARE {
            spare.entry(self.key).or_default().extend(self.map.take());
        }
    }
}

/// The arguments of the Python function.
#[derive(FromPyObject)]
pub struct PermuteSpec {
    #[pyo3(item)]
    num_experts: usize,
    #[pyo3(item)]
    top_k: usize,
    #[pyo3(item)]
    capacity: usize,
    #[pyo3(item)]
    align: usize,
}

/// Tensors of tokens, or of their rows, and their weights.
type Both<'py> = (Object<'py>, Option<Object<'py>>);

impl RowMap {
    fn map(&self) -> Result<&PermuteMap> {
        self.map.as_ref().ok_or_else(|| Error::internal("the row map has been freed"))
    }

    /// Runs `f` of a call on tensors that lie where `first` does.
    fn on<T: Send>(
        &self,
        place: &Place,
        py: Python<'_>,
        f: impl FnOnce(&PermutePlan, &PermuteMap, &Stream) -> Result<Pending<T>> + Send,
    ) -> PyResult<()> {
        place.run(py, |stream| {
            if stream.is_capturing() || place.stream_id != self.key.1 {
                self.once.store(true, Ordering::Relaxed);
            }
            f(&self.pool.plan, self.map()?, stream)
        })
    }
}

#[pymethods]
impl RowMap {
    /// Routes `topk_idx [tokens, top_k]` for tokens like `x [tokens, hidden]`.
    #[new]
    fn new(
        py: Python<'_>,
        x: &Object<'_>,
        topk_idx: &Object<'_>,
        spec: PermuteSpec,
    ) -> PyResult<Self> {
        let place = Place::of("permute", x, "x")?;
        let (x, idx) = (place.tensor("x", x)?, place.tensor("topk_idx", topk_idx)?);
        let describe = || match x.shape().dims() {
            [tokens, hidden] => {
                let new = PermuteDesc::new(
                    rounded(*tokens),
                    *hidden,
                    spec.num_experts,
                    spec.top_k,
                    x.dtype(),
                );
                Ok((*tokens, PermuteDesc { capacity: spec.capacity, align: spec.align, ..new }))
            }
            _ => Err(Error::invalid("`x` must be a matrix").seen(x.shape())),
        };
        let (tokens, desc) = describe().map_err(|e: Error| e.op("permute")).or_raise(py)?;
        place.prepare(py, |stream| {
            let pool = local::plan(LocalKey::Permute(desc), &place.device, stream, || {
                let plan = PermutePlan::new(desc)?;
                plan.prepare(stream)?;
                Ok(Pool { plan, spare: Mutex::default() })
            })?;
            let key = (tokens, place.stream_id);
            let spare = {
                let mut all = pool.spare.lock().unwrap_or_else(PoisonError::into_inner);
                all.get_mut(&key).and_then(Vec::pop)
            };
            let map = match spare {
                Some(map) => map,
                None => pool.plan.map(tokens)?,
            };
            let once = AtomicBool::new(stream.is_capturing());
            let routed = pool.plan.route(stream, &idx, &map)?;
            if matches!(place.device, Device::Host) {
                routed.wait()?;
                map.check()?;
            }
            Ok(Self { pool, map: Some(map), key, once })
        })
    }

    /// `rows [capacity, hidden]` of the tokens, their weights, and `m_splits [num_experts]` i64.
    fn permute(
        &self,
        py: Python<'_>,
        tokens: Both<'_>,
        rows: Both<'_>,
        m_splits: &Object<'_>,
    ) -> PyResult<()> {
        let place = Place::of("permute", &tokens.0, "x")?;
        let t = Tokens {
            x: place.tensor("x", &tokens.0)?,
            weights: place.optional("weights", tokens.1.as_ref())?,
            scales: None,
        };
        let out = Permuted {
            x: place.tensor("rows", &rows.0)?,
            weights: place.optional("row weights", rows.1.as_ref())?,
            scales: None,
        };
        let splits = place.tensor("m_splits", m_splits)?;
        self.on(&place, py, |plan, map, stream| {
            let done = plan.permute(stream, map, &t, &out)?;
            if matches!(place.device, Device::Host) {
                done.wait()?;
            }
            copy_out(stream, &splits, map.m_splits())?;
            Pending::new((), stream, None)
        })
    }

    /// The gradients of [`RowMap::permute`].
    fn permute_bwd(&self, py: Python<'_>, d_rows: Both<'_>, d_tokens: Both<'_>) -> PyResult<()> {
        let place = Place::of("permute_bwd", &d_rows.0, "d_rows")?;
        let g = Permuted {
            x: place.tensor("d_rows", &d_rows.0)?,
            weights: place.optional("d_row_weights", d_rows.1.as_ref())?,
            scales: None,
        };
        let out = Tokens {
            x: place.tensor("dx", &d_tokens.0)?,
            weights: place.optional("d_weights", d_tokens.1.as_ref())?,
            scales: None,
        };
        self.on(&place, py, |plan, map, stream| plan.permute_bwd(stream, map, &g, &out))
    }

    /// `out [tokens, hidden]`: the sum over a token's choices of (weight times) its row.
    fn unpermute(&self, py: Python<'_>, rows: Both<'_>, out: &Object<'_>) -> PyResult<()> {
        let place = Place::of("unpermute", &rows.0, "rows")?;
        let (rows, w) =
            (place.tensor("rows", &rows.0)?, place.optional("weights", rows.1.as_ref())?);
        let out = place.tensor("out", out)?;
        self.on(&place, py, |plan, map, stream| {
            plan.unpermute(stream, map, (&rows, w.as_ref()), &out)
        })
    }

    /// The gradients of [`RowMap::unpermute`]: `d_rows`, and with `(weights, rows, d_weights)`
    /// theirs.
    fn unpermute_bwd(
        &self,
        py: Python<'_>,
        d_out: &Object<'_>,
        d_rows: &Object<'_>,
        weighted: Option<(Object<'_>, Object<'_>, Object<'_>)>,
    ) -> PyResult<()> {
        let place = Place::of("unpermute_bwd", d_out, "d_out")?;
        let weighted = match &weighted {
            None => None,
            Some((w, rows, dw)) => Some(WeightedGrads {
                weights: place.tensor("weights", w)?,
                rows: place.tensor("rows", rows)?,
                d_weights: place.tensor("d_weights", dw)?,
            }),
        };
        let g = UnpermuteGrads {
            d_out: place.tensor("d_out", d_out)?,
            d_rows: place.tensor("d_rows", d_rows)?,
            weighted,
        };
        self.on(&place, py, |plan, map, stream| plan.unpermute_bwd(stream, map, &g))
    }

    /// True numbers of the routing. Waits for the device.
    fn totals<'py>(&self, py: Python<'py>, x: &Object<'_>) -> PyResult<Bound<'py, PyDict>> {
        let place = Place::of("permute", x, "x")?;
        let (total, dropped) = place.prepare(py, |stream| {
            stream.synchronize_until(None)?;
            let map = self.map()?;
            map.check()?;
            Ok((map.total().to_vec::<i64>()?, map.dropped().to_vec::<i64>()?))
        })?;
        let d = PyDict::new(py);
        d.set_item("rows", total.first())?;
        d.set_item("dropped", dropped.first())?;
        Ok(d)
    }
}
