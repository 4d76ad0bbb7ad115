//! The type of the classes of quick nodes (see [`crate::quick`]).
//!
//! For each call, `torch.autograd.Function.apply` looks four attributes of the node's class up by
//! C strings. A name that is a new string each time misses the interpreter's cache: it is hashed,
//! and looked for in all types of the class's type before the class itself, which takes a
//! microsecond in all. The type here answers these names from a table.

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// The names that `apply` of torch 2.11 looks up.
const NAMES: [&[u8]; 4] =
    [b"_backward_cls", b"clear_saved_tensors_on_access", b"setup_context", b"forward"];

/// A class, and its attributes in the order of [`NAMES`].
struct Known {
    class: Py<PyType>,
    attributes: [Option<Py<PyAny>>; NAMES.len()],
}

static KNOWN: PyOnceLock<Vec<Known>> = PyOnceLock::new();

/// Makes a subclass of `base`, the type of torch's function classes, whose instances look their
/// attributes up as [`getattro`].
#[pyfunction]
pub fn node_type<'py>(base: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    let py = base.py();
    let getattro: ffi::getattrofunc = getattro;
    let mut slots = [
        ffi::PyType_Slot { slot: ffi::Py_tp_getattro, pfunc: getattro as *mut _ },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"tilewire._native.NodeType".as_ptr(),
        // Those of the base.
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as _,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [base])?;
    // SAFETY: the interpreter copies what the specification points to, but for the name, which is
    // static; the slot has the type that its number says.
    unsafe {
        let made = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Bound::from_owned_ptr_or_err(py, made)
    }
}

/// Keeps the attributes of `classes`, which are complete and do not change from now on. Later calls
/// change nothing: their classes look everything up.
///
/// # Errors
/// `TypeError` for a class that [`getattro`] does not serve.
#[pyfunction]
pub fn use_nodes(py: Python<'_>, classes: Vec<Bound<'_, PyType>>) -> PyResult<()> {
    let mut known = Vec::new();
    for class in classes {
        // SAFETY: a class's type is a type, of which the slot is read.
        let slot = unsafe {
            ffi::PyType_GetSlot(ffi::Py_TYPE(class.as_ptr()), ffi::Py_tp_getattro).addr()
        };
        if slot != (getattro as ffi::getattrofunc as *const ()).addr() {
            return Err(PyTypeError::new_err(format!("{class} is not of the type of quick nodes")));
        }
        let find = |name| Some(class.getattr(str::from_utf8(name).ok()?).ok()?.unbind());
        known.push(Known { attributes: NAMES.map(find), class: class.unbind() });
    }
    KNOWN.get_or_init(py, || known);
    Ok(())
}

/// `getattr(class, name)`: from the table, or as every type has it.
unsafe extern "C" fn getattro(
    class: *mut ffi::PyObject,
    name: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: the interpreter calls this attached, with a class and a string that live.
    unsafe {
        if let Some(found) = kept(Python::assume_attached(), class, name) {
            return ffi::Py_NewRef(found.as_ptr());
        }
        let base = &raw mut ffi::PyType_Type;
        let usual = ffi::PyType_GetSlot(base, ffi::Py_tp_getattro);
        let usual: ffi::getattrofunc = std::mem::transmute(usual);
        usual(class, name)
    }
}

/// The attribute in the table.
///
/// # Safety
/// `name` is a string.
unsafe fn kept(
    py: Python<'_>,
    class: *mut ffi::PyObject,
    name: *mut ffi::PyObject,
) -> Option<&'static Py<PyAny>> {
    let known = KNOWN.get(py)?.iter().find(|k| k.class.as_ptr() == class)?;
    let mut len = 0;
    // SAFETY: as the caller promises; ASCII lies in the string itself, for as long as that lives.
    let name = unsafe {
        let text = ffi::PyUnicode_AsUTF8AndSize(name, &raw mut len);
        if text.is_null() {
            // No text, or no memory for it: the usual way reports that.
            ffi::PyErr_Clear();
            return None;
        }
        std::slice::from_raw_parts(text.cast::<u8>(), usize::try_from(len).ok()?)
    };
    let at = NAMES.iter().position(|n| *n == name)?;
    known.attributes[at].as_ref()
}
