//! Tensors of a framework, by the exchange interface of DLPack 1.3.
//!
//! The interface is a table of C functions that a framework gives its tensor type as
//! `__dlpack_c_exchange_api__`. Reading one tensor through it costs a tenth of a microsecond;
//! reading the attributes of the Python object costs four times as much.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};
use tilewire::device::cuda::{CudaContext, CudaMemory};
use tilewire::device::{Device, Memory};
use tilewire::prelude::*;

/// `DLTensor`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub ndim: i32,
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}

impl DlTensor {
    /// Returns the sizes of its dimensions.
    pub fn dims(&self) -> &[i64] {
        // SAFETY: `shape` has `ndim` elements, which live while the tensor does.
        unsafe { elements(self.shape, self.ndim) }
    }

    /// Returns whether its elements lie one behind the other in row-major order.
    pub fn is_dense(&self) -> bool {
        // SAFETY: as of `dims`; strides may be absent.
        let strides = unsafe { elements(self.strides, self.ndim) };
        let mut step = 1;
        self.strides.is_null()
            || self.dims().iter().zip(strides).rev().all(|(&dim, &stride)| {
                let dense = dim == 1 || stride == step;
                step *= dim.max(1);
                dense
            })
    }

    /// Returns whether it is the transposed view of a matrix whose elements lie so.
    pub fn is_dense_transposed(&self) -> bool {
        // SAFETY: as of `is_dense`.
        match (self.dims(), unsafe { elements(self.strides, self.ndim) }) {
            ([rows, cols], [down, across]) => {
                (*rows == 1 || *down == 1) && (*cols == 1 || across == rows)
            }
            _ => false,
        }
    }

    pub fn same_type(&self, other: &Self) -> bool {
        (self.code, self.bits, self.lanes) == (other.code, other.bits, other.lanes)
    }

    pub fn is_f32(&self) -> bool {
        (self.code, self.bits, self.lanes) == (2, 32, 1)
    }

    pub fn is_bf16(&self) -> bool {
        (self.code, self.bits, self.lanes) == (4, 16, 1)
    }
}

/// # Safety
/// `start` is null or has `ndim` elements, which live as `'a` says.
unsafe fn elements<'a>(start: *const i64, ndim: i32) -> &'a [i64] {
    if start.is_null() || ndim <= 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(start, ndim as usize) }
}

/// `DLPackExchangeAPI`; of the functions that are not called the type does not matter.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    prev: *const ExchangeApi,
    allocator: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    view: Option<ViewFn>,
    stream: Option<StreamFn>,
}

/// Fills in a `DLTensor` of an object, which must be a tensor of the framework.
type ViewFn = unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int;
/// The current stream of a device.
type StreamFn = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;

/// Functions of the framework's table, and its tensor type: they trust that the object is one of
/// its tensors.
struct Framework {
    view: ViewFn,
    stream: StreamFn,
    tensor: Py<PyType>,
}

static FRAMEWORK: PyOnceLock<Framework> = PyOnceLock::new();

/// Takes tensors of type `tensor` from now on, by its `__dlpack_c_exchange_api__`.
#[pyfunction]
pub fn use_exchange_api(py: Python<'_>, tensor: &Bound<'_, PyType>) -> PyResult<()> {
    let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
    let capsule = capsule.cast::<PyCapsule>()?;
    let table = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?;
    // SAFETY: a capsule of this name points to such a table, which lives as long as the process.
    let api = unsafe { table.cast::<ExchangeApi>().as_ref() };
    let (1, Some(view), Some(stream)) = (api.major, api.view, api.stream) else {
        let text = format!("DLPack exchange {}.{} is not known", api.major, api.minor);
        return Err(PyRuntimeError::new_err(text));
    };
    FRAMEWORK.get_or_init(py, || Framework { view, stream, tensor: tensor.clone().unbind() });
    Ok(())
}

fn framework(py: Python<'_>) -> PyResult<&Framework> {
    let none = || PyRuntimeError::new_err("no framework is in use: import tilewire.torch first");
    FRAMEWORK.get(py).ok_or_else(none)
}

/// The framework's current stream on a CUDA device.
pub fn current_stream(py: Python<'_>, ordinal: u32) -> PyResult<*mut c_void> {
    let mut raw = std::ptr::null_mut();
    let stream = framework(py)?.stream;
    // SAFETY: the output is valid; the interpreter is attached.
    let code = unsafe { stream(CUDA, ordinal as i32, &mut raw) };
    if code != 0 {
        return Err(PyErr::take(py)
            .unwrap_or_else(|| PyRuntimeError::new_err("the framework has given no stream")));
    }
    Ok(raw)
}

/// Nobody: the caller keeps what it lends.
pub(crate) fn nobody() -> Arc<dyn std::any::Any + Send + Sync> {
    static NOBODY: OnceLock<Arc<()>> = OnceLock::new();
    NOBODY.get_or_init(|| Arc::new(())).clone()
}

/// Returns the view that `obj` exports: it must be a tensor of the framework.
pub fn view(obj: &Bound<'_, PyAny>, what: &str) -> PyResult<DlTensor> {
    let py = obj.py();
    let f = framework(py)?;
    if !obj.is_instance(f.tensor.bind(py))? {
        let seen = obj.get_type().name()?;
        return Err(PyTypeError::new_err(format!("`{what}` must be a torch.Tensor, not {seen}")));
    }
    let mut t = std::mem::MaybeUninit::<DlTensor>::zeroed();
    // SAFETY: `obj` is a tensor of this framework; the output is valid.
    let code = unsafe { (f.view)(obj.as_ptr(), t.as_mut_ptr()) };
    if code != 0 {
        let unknown = || PyTypeError::new_err(format!("`{what}` cannot be exchanged"));
        let e = PyErr::take(py).unwrap_or_else(unknown);
        let text = format!("`{what}` cannot be used in place: {}", e.value(py));
        let ours = Error::invalid(text).hint("pass a dense tensor of an ordinary element type");
        return Err(super::errors::exception(py, &ours));
    }
    // SAFETY: all zero is a `DlTensor`, and the call has filled it in.
    Ok(unsafe { t.assume_init() })
}

/// Returns the view of `obj`, which is of the framework's tensor type or its parameter type, if it
/// exports one.
pub fn view_of_tensor(obj: &Bound<'_, PyAny>) -> Option<DlTensor> {
    let py = obj.py();
    let mut t = std::mem::MaybeUninit::<DlTensor>::zeroed();
    // SAFETY: `obj` is a tensor of this framework; the output is valid.
    let code = unsafe { (FRAMEWORK.get(py)?.view)(obj.as_ptr(), t.as_mut_ptr()) };
    if code != 0 {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: all zero is a `DlTensor`, and the call has filled it in.
    Some(unsafe { t.assume_init() })
}

/// A row-major tensor of `obj`'s elements, used where they lie on `device`. The caller keeps them
/// until the work that uses them has run, or frees them in the order of its stream.
pub fn tensor(obj: &Bound<'_, PyAny>, what: &str, device: &Device) -> PyResult<Tensor> {
    let t = view(obj, what)?;
    // SAFETY: its arrays live while `obj` does.
    let made = unsafe { over(&t, what, device) };
    made.map_err(|e| super::errors::exception(obj.py(), &e))
}

/// The elements of `t` as a row-major tensor of shape `dims`, which has as many, used where they
/// lie on `device`.
///
/// # Safety
/// `t` is the view of a dense tensor that is alive and stays so as [`tensor`] says.
pub unsafe fn reshaped(
    py: Python<'_>,
    t: &DlTensor,
    dims: &[i64],
    what: &str,
    device: &Device,
) -> PyResult<Tensor> {
    let (ndim, shape) = (dims.len() as i32, dims.as_ptr());
    let flat = DlTensor { ndim, shape, strides: std::ptr::null(), ..*t };
    // SAFETY: as above.
    unsafe { over(&flat, what, device) }.map_err(|e| super::errors::exception(py, &e))
}

/// Returns the device whose memory holds `obj`.
pub fn device_of(obj: &Bound<'_, PyAny>, what: &str) -> PyResult<Device> {
    let t = view(obj, what)?;
    let device = match (t.device_type, u32::try_from(t.device_id)) {
        (CPU, _) => Ok(Device::Host),
        (CUDA, Ok(ordinal)) => context(ordinal).map(Device::Cuda),
        (other, _) => Err(Error::invalid(format!("`{what}` is on DLPack device {other}"))
            .expected("the CPU or a CUDA device")),
    };
    device.map_err(|e| super::errors::exception(obj.py(), &e))
}

/// # Safety
/// `t` is of a tensor that is alive and stays so as [`tensor`] says.
unsafe fn over(t: &DlTensor, what: &str, device: &Device) -> Result<Tensor> {
    let dtype = dtype_of(t, what)?;
    let ndim = t.ndim.max(0) as usize;
    if ndim > MAX_NDIM {
        return Err(Error::invalid(format!("`{what}` has too many dimensions"))
            .expected(format_args!("at most {MAX_NDIM}"))
            .seen(ndim));
    }
    let (mut dims, mut strides) = ([0usize; MAX_NDIM], [0i64; MAX_NDIM]);
    for i in 0..ndim {
        // SAFETY: both arrays have `ndim` elements; strides may be absent.
        unsafe {
            dims[i] = usize::try_from(*t.shape.add(i)).unwrap_or(0);
            strides[i] = if t.strides.is_null() { -1 } else { *t.strides.add(i) };
        }
    }
    let shape = Shape::new(&dims[..ndim])?;
    let (num, mut step) = (shape.num_elems(), 1i64);
    for i in (0..ndim).rev() {
        let dense = t.strides.is_null() || dims[i] == 1 || strides[i] == step;
        if !dense && num > 0 {
            return Err(Error::invalid(format!("`{what}` is not contiguous"))
                .expected(format_args!("rows of {shape} one behind the other"))
                .seen(format_args!("strides {:?}", &strides[..ndim]))
                .hint("call `.contiguous()` first"));
        }
        step = step.saturating_mul(dims[i].max(1) as i64);
    }
    let start = t.data.cast::<u8>().wrapping_add(t.byte_offset as usize);
    if t.data.is_null() && num > 0 {
        return Err(Error::invalid(format!("`{what}` has no memory: it is fake or on `meta`")));
    }
    let len = num * dtype.size();
    match (device, t.device_type) {
        (Device::Host, CPU) => {
            // SAFETY: the bytes are there as the caller says.
            let memory = unsafe { Memory::lent(start, len, nobody()) };
            Tensor::over(memory, 0, dtype, shape)
        }
        (Device::Cuda(ctx), CUDA) if t.device_id == ctx.ordinal() as i32 => {
            // SAFETY: as above.
            let memory = unsafe { CudaMemory::lent(ctx, start.addr() as u64, len, nobody()) };
            Tensor::over_cuda(memory, dtype, shape)
        }
        _ => Err(wrong_device(t, what, device)),
    }
}

const MAX_NDIM: usize = 8;

fn wrong_device(t: &DlTensor, what: &str, device: &Device) -> Error {
    let name = |kind, id| match kind {
        CPU => "cpu".to_owned(),
        CUDA => format!("cuda:{id}"),
        other => format!("DLPack device {other}:{id}"),
    };
    let want = match device {
        Device::Host => name(CPU, 0),
        Device::Cuda(ctx) => name(CUDA, ctx.ordinal() as i32),
    };
    Error::invalid(format!("`{what}` lies on another device than the world's"))
        .expected(want)
        .seen(name(t.device_type, t.device_id))
        .hint("move it, or make a world on its device: `init(group, device=...)`")
}

/// Element types by their code and bits; booleans are bytes.
fn dtype_of(t: &DlTensor, what: &str) -> Result<DType> {
    let known = match (t.code, t.bits) {
        (2, 64) => Some(DType::F64),
        (2, 32) => Some(DType::F32),
        (2, 16) => Some(DType::F16),
        (4, 16) => Some(DType::BF16),
        (10, 8) => Some(DType::F8E4M3),
        (12, 8) => Some(DType::F8E5M2),
        (14, 8) => Some(DType::E8M0),
        (0, 32) => Some(DType::I32),
        (0, 64) => Some(DType::I64),
        (1 | 6, 8) => Some(DType::U8),
        _ => None,
    };
    known.filter(|_| t.lanes == 1).ok_or_else(|| {
        let names = DType::ALL.map(|d| d.to_string()).join(", ");
        Error::invalid(format!("`{what}` has an element type that tilewire does not know"))
            .expected(names)
            .seen(format_args!("DLPack code {}, {} bits", t.code, t.bits))
    })
}

/// The context of CUDA device `ordinal`, one for all of the process.
pub fn context(ordinal: u32) -> Result<CudaContext> {
    static KNOWN: Mutex<Vec<CudaContext>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ctx) = known.iter().find(|c| c.ordinal() == ordinal) {
        return Ok(ctx.clone());
    }
    let ctx = CudaContext::new(ordinal)?;
    known.push(ctx.clone());
    Ok(ctx)
}
