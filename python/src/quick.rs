//! The shortest way of a call: from Python's arguments to the launch in one step.
//!
//! A call of `tilewire.torch` depends on what watches it (modes, transforms, profilers, autocast,
//! gradients) and on the types and strides of its tensors. Asked in Python, these questions take
//! longer than the rest of the call. Here they go through the interpreter's C functions and
//! DLPack's views of the tensors.
//!
//! A function of this file makes its output and launches where nothing asks for more. Where a
//! gradient is wanted, it returns `True`: the caller makes a node of autograd at once, whose
//! forward function is here, too. In all other cases it has done nothing and returns `None`: the
//! caller goes the way in Python, which has the same results, and reports what is wrong with an
//! argument.
//!
//! A node's arguments are its tensors alone: torch takes a quarter of a microsecond for each that
//! is none. The rest waits in [`SEEN`] for the forward function.

use std::cell::RefCell;

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyTuple};
use tilewire::ops::ag_gemm::AgGemmInputs;
use tilewire::ops::gemm_rs::GemmRsInputs;
use tilewire::prelude::*;

use crate::call::Call;
use crate::dlpack::{self, DlTensor};
use crate::errors::OrRaise;
use crate::ops::overlap::{AgParams, Backward, SumParams, run_ag, run_ar, run_rs};

/// Types and functions of torch, by their names in the mapping that [`use_torch`] takes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Torch {
    /// The types that stand for themselves: `torch.Tensor` and `torch.nn.Parameter`.
    tensor: Py<PyAny>,
    parameter: Py<PyAny>,
    grad_enabled: Py<PyAny>,
    /// Functions without arguments: each returns something false where it sees nothing.
    watching: Vec<Py<PyAny>>,
    forward_ad: Py<PyAny>,
    /// The device that is current, and its current stream as `(number, ..)`; none without CUDA.
    current_device: Option<Py<PyAny>>,
    current_stream: Option<Py<PyAny>>,
    /// Functions of a shape, strides and a dtype that make a tensor on the CPU and on the current
    /// CUDA device, in half the time of `new_empty`; none where torch has no such function.
    empty_cpu: Option<Py<PyAny>>,
    empty_cuda: Option<Py<PyAny>>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Takes torch's types and functions.
#[pyfunction]
pub fn use_torch(py: Python<'_>, parts: &Bound<'_, PyAny>) -> PyResult<()> {
    let torch = parts.extract()?;
    TORCH.get_or_init(py, || torch);
    Ok(())
}

/// Returns whether torch's stream `raw`, the current one of device `ordinal`, lives as long as the
/// process: the legacy stream, and those of torch's pools, which have numbers. Of a stream that
/// torch was given the handle is the number, too, and its owner may destroy it.
pub fn lives_on(py: Python<'_>, ordinal: u32, raw: usize) -> PyResult<bool> {
    const LEGACY: usize = 1;
    if raw <= LEGACY {
        return Ok(true);
    }
    let current = TORCH.get(py).and_then(|t| t.current_stream.as_ref());
    let Some(current) = current else { return Ok(false) };
    let number: i64 = current.bind(py).call1((ordinal,))?.get_item(0)?.extract()?;
    Ok(number != raw as i64)
}

impl Torch {
    /// Returns whether nothing watches calls of this thread.
    fn unwatched(&self, py: Python<'_>) -> PyResult<bool> {
        for f in &self.watching {
            if f.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        let level = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
        Ok(level.extract::<i64>()? < 0)
    }

    /// Returns the view of a tensor that stands for itself: no subclass, nothing lazy, of 16 bits
    /// an element or more.
    fn plain<'a, 'py>(&self, obj: &'a Bound<'py, PyAny>) -> PyResult<Option<Plain<'a, 'py>>> {
        let kind = obj.get_type_ptr().cast::<ffi::PyObject>();
        if kind != self.tensor.as_ptr() && kind != self.parameter.as_ptr() {
            return Ok(None);
        }
        let usable = dlpack::view_of_tensor(obj).filter(|t| !t.data.is_null() && t.bits >= 16);
        // Views that are negated lazily are parts of complex numbers, which bf16 has none of.
        if usable.is_some_and(|t| !t.is_bf16())
            && obj.call_method0(intern!(obj.py(), "is_neg"))?.is_truthy()?
        {
            return Ok(None);
        }
        Ok(usable.map(|view| Plain { obj, view }))
    }

    /// Returns the operands of a product if the kernels take them as they lie.
    fn operands<'a, 'py>(&self, args: Args<'a, 'py>) -> PyResult<Option<Operands<'a, 'py>>> {
        let (Some(x), Some(w)) = (self.plain(args.x)?, self.plain(args.w)?) else {
            return Ok(None);
        };
        let kn = !w.view.is_dense();
        let lies = x.view.ndim >= 2 && x.view.is_dense() && w.view.ndim == 2;
        if !lies || kn && !w.view.is_dense_transposed() {
            return Ok(None);
        }
        let mut bias = None;
        if let Some(obj) = args.bias {
            let fits = |b: &Plain<'_, '_>| {
                b.view.is_dense() && (b.view.is_f32() || b.view.same_type(&x.view))
            };
            let Some(found) = self.plain(obj)?.filter(fits) else { return Ok(None) };
            bias = Some(found);
        }
        Ok(Some(Operands { x, w, bias, kn }))
    }
}

/// The tensors of a product as Python passes them.
#[derive(Clone, Copy)]
struct Args<'a, 'py> {
    x: &'a Bound<'py, PyAny>,
    w: &'a Bound<'py, PyAny>,
    bias: Option<&'a Bound<'py, PyAny>>,
}

impl<'a, 'py> Args<'a, 'py> {
    /// Returns the operands if nothing but a gradient asks for more than the launch, and whether
    /// one does.
    fn look(self) -> PyResult<Option<(Operands<'a, 'py>, bool)>> {
        let py = self.x.py();
        let Some(torch) = TORCH.get(py) else { return Ok(None) };
        if !torch.unwatched(py)? {
            return Ok(None);
        }
        let Some(operands) = torch.operands(self)? else { return Ok(None) };
        let mut grad = false;
        if torch.grad_enabled.bind(py).call0()?.is_truthy()? {
            for t in [Some(self.x), Some(self.w), self.bias].into_iter().flatten() {
                grad = grad || t.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
            }
        }
        Ok(Some((operands, grad)))
    }

    /// Leaves the rest of a call for the forward function of its node, and returns `True`: the node
    /// is to be made.
    fn node(self, t: &Operands<'_, '_>, how: How<'_>) -> Py<PyAny> {
        let Operands { x, w, bias, kn } = t;
        let seen = Seen {
            of: self.addresses(),
            views: (x.view, w.view, bias.as_ref().map(|b| b.view)),
            kn: *kn,
            world: how.world,
            wire: how.wire.map(Into::into),
            algo: how.algo.map(Into::into),
        };
        SEEN.with_borrow_mut(|all| {
            // Calls whose nodes were never made.
            if all.len() == MOST_SEEN {
                all.remove(0);
            }
            all.push(seen);
        });
        PyBool::new(self.x.py(), true).to_owned().into_any().unbind()
    }

    fn addresses(&self) -> [usize; 3] {
        [Some(self.x), Some(self.w), self.bias].map(|t| t.map_or(0, |t| t.as_ptr().addr()))
    }

    /// Takes what [`Args::node`] has left, in the forward function of the node.
    fn seen(self) -> PyResult<(Operands<'a, 'py>, Seen)> {
        let of = self.addresses();
        let seen = SEEN.with_borrow_mut(|all| {
            let at = all.iter().rposition(|s| s.of == of)?;
            all.truncate(at + 1);
            all.pop()
        });
        let Some(seen) = seen else {
            let e = Error::invalid("a node of autograd without a call of tilewire.torch")
                .hint("call the function of tilewire.torch, which makes its node");
            return Err(e).or_raise(self.x.py());
        };
        let (x, w, bias) = seen.views;
        let operands = Operands {
            x: Plain { obj: self.x, view: x },
            w: Plain { obj: self.w, view: w },
            bias: self.bias.zip(bias).map(|(obj, view)| Plain { obj, view }),
            kn: seen.kn,
        };
        Ok((operands, seen))
    }
}

/// The way a product is done, beside its operands: the number of the world, and `wire` and `algo`
/// as Python passes them.
#[derive(Clone, Copy)]
struct How<'a> {
    world: u64,
    wire: Option<&'a str>,
    algo: Option<&'a str>,
}

/// A call that waits for its node: the addresses of its tensors, their views, and a [`How`].
struct Seen {
    of: [usize; 3],
    views: (DlTensor, DlTensor, Option<DlTensor>),
    kn: bool,
    world: u64,
    wire: Option<Box<str>>,
    algo: Option<Box<str>>,
}

impl Seen {
    fn how(&self) -> How<'_> {
        How { world: self.world, wire: self.wire.as_deref(), algo: self.algo.as_deref() }
    }
}

/// The most calls that [`SEEN`] has: a call inside another comes from a finalizer that the
/// interpreter runs between the two.
const MOST_SEEN: usize = 16;

thread_local! {
    /// Calls whose node comes next, the last one at the end.
    static SEEN: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
}

/// A tensor of torch and its view.
struct Plain<'a, 'py> {
    obj: &'a Bound<'py, PyAny>,
    view: DlTensor,
}

impl<'py> Plain<'_, 'py> {
    /// Rows, which are all dimensions but the last one, and columns.
    fn flat(&self) -> [i64; 2] {
        match self.view.dims().split_last() {
            Some((cols, rows)) => [rows.iter().product(), *cols],
            None => [1, 1],
        }
    }

    /// Its elements in the shape `dims`, where they lie.
    fn tensor(&self, what: &str, dims: &[i64], call: &Call) -> PyResult<Tensor> {
        // SAFETY: the view is of `obj`, which the caller of this call keeps, and dense, or the
        // transposed view of what is dense in the shape that the caller passes.
        unsafe { dlpack::reshaped(self.obj.py(), &self.view, dims, what, &call.device) }
    }

    /// Makes a tensor of this type: `rows` for its first dimension, `cols` for its last one.
    fn new_like(&self, rows: i64, cols: i64) -> PyResult<Bound<'py, PyAny>> {
        let py = self.obj.py();
        let dims = self.view.dims();
        if let ([_, _], Some(empty)) = (dims, self.empty()?) {
            let dtype = self.obj.getattr(intern!(py, "dtype"))?;
            return empty.bind(py).call1(((rows, cols), (cols.max(1), 1), dtype));
        }
        let inner = dims.get(1..dims.len() - 1).unwrap_or_default();
        let shape = PyTuple::new(py, [&[rows], inner, &[cols]].concat())?;
        self.obj.getattr(intern!(py, "new_empty"))?.call1(shape)
    }

    /// Returns the function that makes tensors on this one's device, if there is one.
    fn empty(&self) -> PyResult<Option<&'py Py<PyAny>>> {
        let py = self.obj.py();
        let Some(torch) = TORCH.get(py) else { return Ok(None) };
        Ok(match (self.view.device_type, &torch.current_device) {
            (dlpack::CPU, _) => torch.empty_cpu.as_ref(),
            (dlpack::CUDA, Some(current)) => {
                let now: i32 = current.bind(py).call0()?.extract()?;
                torch.empty_cuda.as_ref().filter(|_| now == self.view.device_id)
            }
            _ => None,
        })
    }
}

/// The operands of a product that may go the shortest way.
struct Operands<'a, 'py> {
    x: Plain<'a, 'py>,
    w: Plain<'a, 'py>,
    bias: Option<Plain<'a, 'py>>,
    /// True if `w` is the transposed view of a matrix `[k, n]`.
    kn: bool,
}

impl<'py> Operands<'_, 'py> {
    /// Rows of the weight: columns of the product.
    fn n(&self) -> i64 {
        self.w.view.dims()[0]
    }

    fn x(&self, call: &Call) -> PyResult<Tensor> {
        self.x.tensor("x", &self.x.flat(), call)
    }

    /// The weight as it lies.
    fn w(&self, call: &Call) -> PyResult<Tensor> {
        let dims = self.w.view.dims();
        let lies = if self.kn { [dims[1], dims[0]] } else { [dims[0], dims[1]] };
        self.w.tensor("w", &lies, call)
    }

    fn bias(&self, call: &Call) -> PyResult<Option<Tensor>> {
        self.bias.as_ref().map(|b| b.tensor("bias", b.view.dims(), call)).transpose()
    }

    /// Makes an output of `rows` for x's first dimension and `cols` columns, and returns it and its
    /// elements as a matrix.
    fn output(
        &self,
        (rows, cols): (i64, i64),
        what: &str,
        call: &Call,
    ) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
        let made = self.x.new_like(rows, cols)?;
        let view = match dlpack::view_of_tensor(&made) {
            Some(view) => view,
            None => dlpack::view(&made, what)?,
        };
        let made = Plain { obj: &made, view };
        let tensor = made.tensor(what, &made.flat(), call)?;
        Ok((made.obj.clone(), tensor))
    }
}

/// Returns whether a node's first and second input need gradients.
fn needs(ctx: &Bound<'_, PyAny>) -> PyResult<(bool, bool)> {
    let all = ctx.getattr(intern!(ctx.py(), "needs_input_grad"))?;
    let all = all.cast::<PyTuple>()?;
    Ok((all.get_item(0)?.is_truthy()?, all.get_item(1)?.is_truthy()?))
}

/// Keeps what the backward pass of a product takes: `w`, `rows`, and `(world, algo, dtype of the
/// bias)` as `ctx.args`.
fn keep(
    ctx: &Bound<'_, PyAny>,
    (w, rows): (Option<&Bound<'_, PyAny>>, Option<&Bound<'_, PyAny>>),
    how: How<'_>,
    bias: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = ctx.py();
    // All that `ctx.save_for_backward` does, which is written in Python.
    ctx.setattr(intern!(py, "to_save"), (w, rows))?;
    let dtype = bias.map(|b| b.getattr(intern!(py, "dtype"))).transpose()?;
    ctx.setattr(intern!(py, "args"), (how.world, how.algo, dtype))
}

/// Launches `ag_gemm` and returns its output, and the gathered rows if `gather`. With `grad`, the
/// plans of the backward pass are made, too.
fn ag_gemm<'py>(
    py: Python<'py>,
    t: &Operands<'_, 'py>,
    how: How<'_>,
    act: Option<&str>,
    (grad, gather): (bool, bool),
) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
    let call = Call::new(py, "ag_gemm", how.world)?;
    let rows = t.x.view.dims()[0] * call.size() as i64;
    let cols = if act == Some("swiglu") { t.n() / 2 } else { t.n() };
    let (x, w, bias) = (t.x(&call)?, t.w(&call)?, t.bias(&call)?);
    let (made, out) = t.output((rows, cols), "out", &call)?;
    let (mut rows_made, mut gathered) = (None, None);
    if gather {
        let (obj, tensor) = t.output((rows, t.x.flat()[1]), "gathered", &call)?;
        (rows_made, gathered) = (Some(obj), Some(tensor));
    }
    let params =
        AgParams { act, rows: None, kn: t.kn, algo: how.algo, bias: bias.is_some(), aux: false };
    let inputs = AgGemmInputs { bias, gathered, ..AgGemmInputs::new(x, w, out) };
    run_ag(py, &call, inputs, params, Backward { needed: grad, returns_gathered: false })?;
    Ok((made, rows_made))
}

/// `ag_gemm`: its output, `True` or `None`.
#[pyfunction]
pub fn quick_ag_gemm<'py>(
    py: Python<'py>,
    world: u64,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    act: Option<&str>,
    algo: Option<&str>,
) -> PyResult<Option<Py<PyAny>>> {
    let args = Args { x, w, bias };
    let Some((t, grad)) = args.look()? else { return Ok(None) };
    let how = How { world, wire: None, algo };
    if grad {
        return Ok(act.is_none().then(|| args.node(&t, how)));
    }
    let (out, _) = ag_gemm(py, &t, how, act, (false, false))?;
    Ok(Some(out.unbind()))
}

/// The forward function of `ag_gemm`'s node: its output. Keeps w and the gathered x.
#[pyfunction]
#[pyo3(signature = (ctx, x, w, bias=None))]
pub fn quick_ag_gemm_node<'py>(
    py: Python<'py>,
    ctx: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let (t, seen) = (Args { x, w, bias }).seen()?;
    let (needs_x, needs_w) = needs(ctx)?;
    // One rank has gathered its own rows.
    let alone = crate::world::size_of(seen.world) == 1;
    let (out, gathered) = ag_gemm(py, &t, seen.how(), None, (needs_x, needs_w && !alone))?;
    let rows = needs_w.then(|| gathered.as_ref().unwrap_or(x));
    keep(ctx, (Some(w), rows), seen.how(), bias)?;
    Ok(out.unbind())
}

/// Launches `gemm_rs` and returns its output.
fn gemm_rs<'py>(
    py: Python<'py>,
    t: &Operands<'_, 'py>,
    how: How<'_>,
    grad: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let How { wire, algo, .. } = how;
    let call = Call::new(py, "gemm_rs", how.world)?;
    let rows = t.x.view.dims()[0] / call.size() as i64;
    let (x, w, bias) = (t.x(&call)?, t.w(&call)?, t.bias(&call)?);
    let (made, out) = t.output((rows, t.n()), "out", &call)?;
    let params = SumParams { rows: None, kn: t.kn, wire, algo, bias: bias.is_some() };
    let inputs = GemmRsInputs { bias, ..GemmRsInputs::new(x, w, out) };
    run_rs(py, &call, inputs, params, grad)?;
    Ok(made)
}

/// `gemm_rs` where all ranks get equally many rows: its output, `True` or `None`.
#[pyfunction]
pub fn quick_gemm_rs<'py>(
    py: Python<'py>,
    world: u64,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    wire: Option<&str>,
    algo: Option<&str>,
) -> PyResult<Option<Py<PyAny>>> {
    let (args, how) = (Args { x, w, bias }, How { world, wire, algo });
    let Some((t, grad)) = args.look()? else { return Ok(None) };
    if t.x.view.dims()[0] % crate::world::size_of(world) as i64 != 0 {
        return Ok(None);
    }
    if grad {
        return Ok(Some(args.node(&t, how)));
    }
    gemm_rs(py, &t, how, false).map(|out| Some(out.unbind()))
}

/// The forward function of `gemm_rs`' node: its output. Keeps w and x.
#[pyfunction]
#[pyo3(signature = (ctx, x, w, bias=None))]
pub fn quick_gemm_rs_node<'py>(
    py: Python<'py>,
    ctx: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let (t, seen) = (Args { x, w, bias }).seen()?;
    let out = gemm_rs(py, &t, seen.how(), true)?;
    keep(ctx, (Some(w), needs(ctx)?.1.then_some(x)), seen.how(), bias)?;
    Ok(out.unbind())
}

/// Launches `gemm_ar` and returns its output.
fn gemm_ar<'py>(
    py: Python<'py>,
    t: &Operands<'_, 'py>,
    how: How<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    let How { wire, algo, .. } = how;
    let call = Call::new(py, "gemm_ar", how.world)?;
    let (x, w, bias) = (t.x(&call)?, t.w(&call)?, t.bias(&call)?);
    let (made, out) = t.output((t.x.view.dims()[0], t.n()), "out", &call)?;
    let params = SumParams { rows: None, kn: t.kn, wire, algo, bias: bias.is_some() };
    run_ar(py, &call, GemmRsInputs { bias, ..GemmRsInputs::new(x, w, out) }, params)?;
    Ok(made)
}

/// `gemm_ar`: its output, `True` or `None`.
#[pyfunction]
pub fn quick_gemm_ar<'py>(
    py: Python<'py>,
    world: u64,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    wire: Option<&str>,
    algo: Option<&str>,
) -> PyResult<Option<Py<PyAny>>> {
    let (args, how) = (Args { x, w, bias }, How { world, wire, algo });
    let Some((t, grad)) = args.look()? else { return Ok(None) };
    if grad {
        return Ok(Some(args.node(&t, how)));
    }
    gemm_ar(py, &t, how).map(|out| Some(out.unbind()))
}

/// The forward function of `gemm_ar`'s node: its output. Keeps w and x.
#[pyfunction]
#[pyo3(signature = (ctx, x, w, bias=None))]
pub fn quick_gemm_ar_node<'py>(
    py: Python<'py>,
    ctx: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let (t, seen) = (Args { x, w, bias }).seen()?;
    let out = gemm_ar(py, &t, seen.how())?;
    let (needs_x, needs_w) = needs(ctx)?;
    keep(ctx, (needs_x.then_some(w), needs_w.then_some(x)), seen.how(), bias)?;
    Ok(out.unbind())
}
