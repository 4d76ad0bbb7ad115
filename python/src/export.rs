//! Memory of ours as tensors of the framework: capsules of DLPack that keep what they show.
//!
//! Elements are bytes: the framework views them as what they are, whatever element types its DLPack
//! knows.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use tilewire::device::Device;
use tilewire::prelude::*;

use crate::dlpack::{CPU, CUDA, DlTensor};

const NAME: &CStr = c"dltensor";

/// `DLManagedTensor`.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// A tensor with what its pointers mean; it is freed as a whole.
struct Exported {
    managed: DlManaged,
    shape: [i64; 2],
    strides: [i64; 2],
    /// Dropped by the framework's thread, with or without the GIL: it must not need Python.
    _keeper: Arc<dyn Any + Send + Sync>,
}

/// Rows of bytes on a device.
pub struct Bytes {
    pub addr: u64,
    pub len: usize,
    /// Number of rows, and bytes from each to the next.
    pub rows: (usize, u64),
}

impl Bytes {
    /// One row.
    pub fn flat(addr: u64, len: usize) -> Self {
        Self { addr, len, rows: (1, len as u64) }
    }
}

unsafe extern "C" fn free(managed: *mut DlManaged) {
    // SAFETY: `export` made the box, and whoever takes the tensor calls this once.
    let exported = unsafe { Box::from_raw((*managed).context.cast::<Exported>()) };
    drop(exported);
}

/// The destructor of the capsule: if nobody has taken the tensor, its name is still `dltensor`.
unsafe extern "C" fn unused(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with our capsule, attached; the pointer is that of `export`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            free(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// A capsule with a uint8 tensor `[rows, len]` over `bytes`, which `keeper` keeps.
///
/// # Safety
/// The bytes must be mapped on `device`, for reading and writing, as long as `keeper` lives.
pub unsafe fn export(
    py: Python<'_>,
    device: &Device,
    bytes: &Bytes,
    keeper: Arc<dyn Any + Send + Sync>,
) -> PyResult<Py<PyAny>> {
    let too_far =
        |_| Error::new(ErrorKind::Unsupported, "torch cannot represent the strides of these rows");
    let stride = i64::try_from(bytes.rows.1).map_err(too_far);
    let stride = stride.map_err(|e| crate::errors::exception(py, &e))?;
    let (device_type, device_id) = match device {
        Device::Host => (CPU, 0),
        Device::Cuda(ctx) => (CUDA, ctx.ordinal() as i32),
    };
    let tensor = DlTensor {
        data: bytes.addr as *mut c_void,
        device_type,
        device_id,
        ndim: 2,
        code: 1,
        bits: 8,
        lanes: 1,
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };
    let managed = DlManaged { tensor, context: std::ptr::null_mut(), deleter: Some(free) };
    let shape = [bytes.rows.0 as i64, bytes.len as i64];
    let made = Box::new(Exported { managed, shape, strides: [stride, 1], _keeper: keeper });
    let me = Box::into_raw(made);
    // SAFETY: `me` was just made and is not shared yet; its arrays live as long as it does. The
    // capsule owns it from here on.
    unsafe {
        (*me).managed.context = me.cast();
        (*me).managed.tensor.shape = (*me).shape.as_ptr();
        (*me).managed.tensor.strides = (*me).strides.as_ptr();
        let raw = ffi::PyCapsule_New((&raw mut (*me).managed).cast(), NAME.as_ptr(), Some(unused));
        if raw.is_null() {
            drop(Box::from_raw(me));
        }
        Bound::from_owned_ptr_or_err(py, raw).map(Bound::unbind)
    }
}
