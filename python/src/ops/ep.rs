//! Expert parallelism: a layer of experts, buffers for microbatches, dispatch and combine.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tilewire::device::{Device, Queue};
use tilewire::ops::ep::{EpDesc, EpDispatch, EpHandle, EpLayout, EpPlan, Overflow};
use tilewire::plans::Recipe;
use tilewire::prelude::*;

use crate::call::{Call, let_go};
use crate::errors::OrRaise;
use crate::export::{Bytes, export};
use crate::keys::Key;
use crate::symm::SymmBuffer;

type Object<'py> = Bound<'py, PyAny>;

/// A layer of experts over the ranks of a world.
#[pyclass(frozen)]
pub struct EpGroup {
    world: u64,
    plan: Arc<EpPlan>,
}

/// The routing of one microbatch.
#[pyclass(frozen)]
pub struct EpBuffer {
    world: u64,
    plan: Arc<EpPlan>,
    handle: EpHandle,
}

fn layout(name: &str, align: usize) -> Result<EpLayout> {
    match name {
        "expert_major" => Ok(EpLayout::ExpertMajor { align }),
        "rank_major" => Ok(EpLayout::RankMajor { align }),
        "flat" => Ok(EpLayout::Flat { align }),
        other => Err(Error::invalid(format!("the layout `{other}` is not known"))
            .expected("expert_major, rank_major or flat")),
    }
}

fn overflow(name: &str) -> Result<Overflow> {
    match name {
        "drop" => Ok(Overflow::Drop),
        "error" => Ok(Overflow::Error),
        other => {
            Err(Error::invalid(format!("unknown overflow `{other}`")).expected("drop or error"))
        }
    }
}

/// The arguments of the Python class.
#[derive(FromPyObject, serde::Deserialize, Clone, Debug)]
pub struct EpSpec {
    #[pyo3(item)]
    pub num_experts: usize,
    #[pyo3(item)]
    pub max_tokens: usize,
    #[pyo3(item)]
    pub hidden: usize,
    #[pyo3(item)]
    pub top_k: usize,
    #[pyo3(item)]
    pub capacity: Option<usize>,
    #[pyo3(item)]
    pub align: usize,
    #[pyo3(item)]
    pub layout: String,
    #[pyo3(item)]
    pub overflow: String,
    #[pyo3(item)]
    pub dtype: String,
    /// f32 scales of a token, with FP8 tokens.
    #[pyo3(item)]
    pub num_scales: usize,
    /// Type of the experts' results and of all gradients.
    #[pyo3(item)]
    pub out: String,
    #[pyo3(item)]
    pub num_sms: Option<usize>,
}

impl EpSpec {
    pub fn describe(&self, size: usize) -> Result<EpDesc> {
        let mut d = EpDesc::new(size, self.num_experts, self.max_tokens, self.hidden, self.top_k);
        d.layout = layout(&self.layout, self.align)?;
        d.overflow = overflow(&self.overflow)?;
        d.dtype = self.dtype.parse()?;
        d.num_scales = self.num_scales;
        d.out = self.out.parse()?;
        d.capacity = self.capacity.unwrap_or_else(|| d.worst_case());
        Ok(d)
    }
}

#[pymethods]
impl EpGroup {
    /// Collective: makes the plan.
    #[new]
    fn new(py: Python<'_>, world: u64, spec: EpSpec) -> PyResult<Self> {
        let call = Call::new(py, "ep", world)?;
        let desc = spec.describe(call.size()).map_err(|e| e.op("ep")).or_raise(py)?;
        let plan = call.prepare(py, |stream| {
            let key = Key::Ep(desc.clone(), spec.num_sms);
            call.member.plan(&key, stream, || Recipe {
                op: "ep",
                len_bytes: EpPlan::memory(&desc).symmetric,
                make: |heap: &Heap| {
                    let plan = EpPlan::new(desc.clone(), heap)?;
                    Ok(match spec.num_sms {
                        Some(num) => plan.with_num_sms(num),
                        None => plan,
                    })
                },
                prepare: EpPlan::prepare,
            })
        })?;
        crate::explain::note("ep", || plan.explain());
        Ok(Self { world, plan })
    }

    #[getter]
    fn recv_rows(&self) -> usize {
        self.plan.desc().recv_rows()
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.plan.desc().capacity
    }

    /// Bytes of a routing as a tensor.
    #[getter]
    fn state_bytes(&self) -> usize {
        EpHandle::state_bytes(self.plan.desc())
    }

    /// Experts of each rank.
    #[getter]
    fn experts_per_rank(&self) -> Vec<usize> {
        self.plan.desc().experts_per_rank.clone()
    }

    fn explain(&self) -> String {
        self.plan.explain()
    }

    /// Collective: memory that peers write to, as a capsule of DLPack over bytes `[1, len]`: for
    /// the rows that a dispatch receives, or with `grad` for the gradient of a combine without
    /// weights.
    fn zero_copy(&self, py: Python<'_>, grad: bool) -> PyResult<Py<PyAny>> {
        let call = Call::new(py, "ep", self.world)?;
        let (bytes, memory) = call.prepare(py, |stream| {
            not_captured(stream)?;
            let (d, plan) = (self.plan.desc(), &self.plan);
            let rows = if grad { d.capacity } else { d.recv_rows() };
            let len = rows * d.hidden * if grad { d.out } else { d.dtype }.size();
            let_go(Some(stream))?;
            // By the cache of plans, which makes the heap larger if need be.
            let (buf, _) = call.member.plans.alloc("ep rows", len, 0)?;
            let memory = match (grad, &call.device) {
                (true, Device::Cuda(_)) => plan.zero_copy_grad_in(&buf, 0)?,
                (false, Device::Cuda(_)) => plan.zero_copy_recv_in(&buf, 0)?,
                // SAFETY: nothing but the plan and the tensors of this rank uses the buffer.
                (true, Device::Host) => unsafe { plan.host_zero_copy_grad_in(&buf, 0)? },
                // SAFETY: as above.
                (false, Device::Host) => unsafe { plan.host_zero_copy_recv_in(&buf, 0)? },
            };
            let addr = match call.device {
                Device::Cuda(_) => memory.cuda()?.addr(),
                Device::Host => buf.address(call.member.team.rank())?.0,
            };
            Ok((Bytes::flat(addr, len), memory))
        })?;
        // SAFETY: the plan has made the memory for this; it is kept by its tensor.
        unsafe { export(py, &call.device, &bytes, Arc::new((memory, self.plan.clone()))) }
    }

    /// Collective: dispatches may receive their rows from byte `at` of a symmetric buffer on.
    fn receive_in(&self, py: Python<'_>, buf: &Bound<'_, SymmBuffer>, at: usize) -> PyResult<()> {
        let call = Call::new(py, "ep", self.world)?;
        let memory = buf.get().memory().or_raise(py)?;
        call.prepare(py, |stream| {
            not_captured(stream)?;
            match call.device {
                Device::Cuda(_) => self.plan.zero_copy_recv_in(memory, at),
                // SAFETY: torch's tensors over the memory are used by calls that follow each other
                // on this rank, as are tensors of any other memory; transfers of other ranks to it
                // are ordered by `symm_*` signals and barriers, which is their callers' contract.
                Device::Host => unsafe { self.plan.host_zero_copy_recv_in(memory, at) },
            }
            .map(drop)
        })
    }

    /// A buffer for one microbatch.
    fn buffer(&self, py: Python<'_>) -> PyResult<EpBuffer> {
        let handle = py.detach(|| self.plan.handle()).or_raise(py)?;
        Ok(EpBuffer { world: self.world, plan: self.plan.clone(), handle })
    }
}

/// Fails in a capture: ranks meet here.
fn not_captured(stream: &Stream) -> Result<()> {
    if !stream.is_capturing() {
        return Ok(());
    }
    let text = "receive buffers cannot be made during a capture: all ranks make them together";
    Err(Error::new(ErrorKind::NotPrepared, text)
        .hint("make the EpBuffer before the capture begins"))
}

/// Copies `src`, which this layer owns, to a tensor of the caller's.
pub fn copy_out(stream: &Stream, dst: &Tensor, src: &Tensor) -> Result<()> {
    match dst.device() {
        Device::Host => {
            let bytes = src.read(<[u8]>::to_vec)?;
            if bytes.len() != dst.len_bytes() {
                return Err(Error::invalid("a tensor to copy to has the wrong size"));
            }
            dst.write(|b| b.copy_from_slice(&bytes))
        }
        Device::Cuda(_) => stream.cuda()?.copy_memory(&dst.cuda()?, &src.cuda()?),
    }
}

#[pymethods]
impl EpBuffer {
    /// Multiprocessors that the phases may take from now on; none is the group's number.
    fn set_num_sms(&self, num: Option<usize>) {
        self.handle.set_num_sms(num);
    }

    /// Routes only: fills `m_splits [local experts]` i64, at most the capacity in all, and `total
    /// [1]` i64, the rows that this rank needs, dropped ones included. Both count padding.
    fn route(
        &self,
        py: Python<'_>,
        topk_idx: &Object<'_>,
        m_splits: &Object<'_>,
        total: &Object<'_>,
    ) -> PyResult<()> {
        let call = Call::new(py, "ep_route", self.world)?;
        let idx = call.tensor("topk_idx", topk_idx)?;
        let (splits, total) = (call.tensor("m_splits", m_splits)?, call.tensor("total", total)?);
        call.run(py, |stream| {
            let routed = self.plan.route(stream, &idx, None, &self.handle)?;
            if matches!(call.device, Device::Host) {
                routed.wait()?;
                self.handle.check()?;
            } else {
                drop(routed);
            }
            copy_out(stream, &splits, self.handle.m_splits())?;
            copy_out(stream, &total, self.handle.total())?;
            Pending::new((), stream, None)
        })
    }

    /// Routes, unless `topk_idx` is none, and dispatches; `m_splits [local experts]` i64 is filled.
    #[expect(clippy::too_many_arguments, reason = "called by position from one Python function")]
    fn dispatch(
        &self,
        py: Python<'_>,
        topk_idx: Option<&Object<'_>>,
        x: &Object<'_>,
        topk_weights: Option<&Object<'_>>,
        scales: Option<&Object<'_>>,
        recv: &Object<'_>,
        recv_weights: Option<&Object<'_>>,
        recv_scales: Option<&Object<'_>>,
        m_splits: &Object<'_>,
    ) -> PyResult<()> {
        let call = Call::new(py, "ep_dispatch", self.world)?;
        let idx = call.optional("topk_idx", topk_idx)?;
        let (x, w) = (call.tensor("x", x)?, call.optional("topk_weights", topk_weights)?);
        let out = EpDispatch {
            x: call.tensor("received x", recv)?,
            scales: call.optional("received scales", recv_scales)?,
            weights: call.optional("received weights", recv_weights)?,
        };
        let scales = call.optional("scales", scales)?;
        let splits = call.tensor("m_splits", m_splits)?;
        call.run(py, |stream| {
            if let Some(idx) = &idx {
                // Behind it in the stream's order: nobody waits here.
                let _routed = self.plan.route(stream, idx, None, &self.handle)?;
            }
            let beside = (w.as_ref(), scales.as_ref());
            let done = self.plan.dispatch(stream, &self.handle, &x, beside, &out)?;
            if matches!(call.device, Device::Host) {
                done.wait()?;
                self.handle.check()?;
            } else {
                drop(done);
            }
            copy_out(stream, &splits, self.handle.m_splits())?;
            Pending::new((), stream, None)
        })
    }

    /// `dx [tokens, hidden]`, and `dw [tokens, top_k]` of weights that were dispatched.
    fn dispatch_bwd(
        &self,
        py: Python<'_>,
        d_recv: &Object<'_>,
        d_weights: Option<&Object<'_>>,
        dx: &Object<'_>,
        dw: Option<&Object<'_>>,
    ) -> PyResult<()> {
        let call = Call::new(py, "ep_dispatch_bwd", self.world)?;
        let d_recv = call.tensor("d_recv", d_recv)?;
        let d_weights = call.optional("d_weights", d_weights)?;
        let (dx, dw) = (call.tensor("dx", dx)?, call.optional("dw", dw)?);
        call.run(py, |stream| {
            let given = (&d_recv, d_weights.as_ref());
            self.plan.dispatch_bwd(stream, &self.handle, given, (&dx, dw.as_ref()))
        })
    }

    /// `out [tokens, hidden]`: the sum over a token's choices of (weight times) its row of `y`.
    fn combine(
        &self,
        py: Python<'_>,
        y: &Object<'_>,
        weights: Option<&Object<'_>>,
        out: &Object<'_>,
    ) -> PyResult<()> {
        let call = Call::new(py, "ep_combine", self.world)?;
        let (y, w) = (call.tensor("y", y)?, call.optional("weights", weights)?);
        let out = call.tensor("out", out)?;
        call.run(py, |stream| self.plan.combine(stream, &self.handle, &y, w.as_ref(), &out))
    }

    /// `dy [capacity, hidden]`, and with weights their gradient.
    fn combine_bwd(
        &self,
        py: Python<'_>,
        d_out: &Object<'_>,
        weights: Option<(Object<'_>, Object<'_>, Object<'_>)>,
        dy: &Object<'_>,
    ) -> PyResult<()> {
        let call = Call::new(py, "ep_combine_bwd", self.world)?;
        let (d_out, dy) = (call.tensor("d_out", d_out)?, call.tensor("dy", dy)?);
        let weighted = match &weights {
            None => None,
            Some((w, y, dw)) => Some((
                call.tensor("weights", w)?,
                call.tensor("y", y)?,
                call.tensor("d_weights", dw)?,
            )),
        };
        call.run(py, |stream| {
            let weighted = weighted.as_ref().map(|(w, y, dw)| (w, y, dw));
            self.plan.combine_bwd(stream, &self.handle, &d_out, weighted, &dy)
        })
    }

    /// Writes the received row that feeds each expert-major row, `[capacity]` i32: rank-major and
    /// flat layouts.
    fn row_index(&self, py: Python<'_>, out: &Object<'_>) -> PyResult<()> {
        let call = Call::new(py, "ep", self.world)?;
        let out = call.tensor("out", out)?;
        call.prepare(py, |stream| copy_out(stream, &out, self.handle.row_index()))
    }

    /// Writes the routing to `state [state_bytes]` u8, behind the dispatch in the stream's order.
    fn save(&self, py: Python<'_>, state: &Object<'_>) -> PyResult<()> {
        let call = Call::new(py, "ep", self.world)?;
        let state = call.tensor("state", state)?;
        call.prepare(py, |stream| self.handle.save(stream, &state))
    }

    /// Takes the routing of `tokens` tokens from what [`EpBuffer::save`] wrote, for the next calls.
    fn load(&self, py: Python<'_>, state: &Object<'_>, tokens: usize) -> PyResult<()> {
        let call = Call::new(py, "ep", self.world)?;
        let state = call.tensor("state", state)?;
        call.prepare(py, |stream| self.handle.load(stream, &state, tokens))
    }

    /// True numbers of the last routing. Waits for the device.
    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let call = Call::new(py, "ep", self.world)?;
        let t = call.prepare(py, |stream| {
            stream.synchronize_until(None)?;
            self.handle.check()?;
            self.handle.totals()
        })?;
        let d = PyDict::new(py);
        d.set_item("counts", t.counts)?;
        d.set_item("rows", t.rows)?;
        d.set_item("dropped", t.dropped)?;
        Ok(d)
    }
}
