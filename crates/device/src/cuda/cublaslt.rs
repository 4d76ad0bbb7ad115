//! Matrix products by cuBLASLt.
//!
//! Matrices are row-major here. To the library, which counts in columns, a row-major D is its own
//! transpose: it is asked for `D^T = op(B)^T op(A)^T`, so B is its left operand.
//!
//! # Rules
//! - Sums of parts of a contraction go through the workspace in the compute type; the schemes that
//!   add in the output, in the order of arrival, are excluded. So the same algorithm gives the same
//!   bits on every run.
//! - Nothing is allocated or loaded by [`CublasLt::launch`] once the algorithm has run on the
//!   device.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{DType, Error, ErrorKind, Result};

use super::context::CudaContext;
use super::library::{InUse, Lib, Open};
use super::library_search::{CUBLASLT, CUBLASLT_12, Found, Places};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::Buffer;

type Code = c_int;
type Raw = *mut c_void;
type SetAttribute = unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Code;
type Destroy = unsafe extern "C" fn(Raw) -> Code;

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct RawAlgo([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawResult {
    algo: RawAlgo,
    workspace: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

// `cublasLt.h` of CUDA 12 and 13.
const COMPUTE_32F: i32 = 68;
const R_32F: i32 = 0;
const R_16F: i32 = 2;
const R_16BF: i32 = 14;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const EPILOGUE_BIAS: i32 = 4;
const PREF_MAX_WORKSPACE: c_int = 1;
const PREF_REDUCTIONS: c_int = 3;
/// Alignment of A, of which B, C and D follow.
const PREF_ALIGNMENT_A: c_int = 5;
/// In the workspace, in the compute type.
const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// The library's functions, as `cublasLt.h` of CUDA 12 and 13 declares them.
struct Api {
    version: unsafe extern "C" fn() -> usize,
    create: unsafe extern "C" fn(*mut Raw) -> Code,
    status: unsafe extern "C" fn(Code) -> *const c_char,
    desc_create: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Code,
    desc_set: SetAttribute,
    desc_destroy: Destroy,
    layout_create: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Code,
    layout_destroy: Destroy,
    pref_create: unsafe extern "C" fn(*mut Raw) -> Code,
    pref_set: SetAttribute,
    pref_destroy: Destroy,
    heuristic: unsafe extern "C" fn(
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        c_int,
        *mut RawResult,
        *mut c_int,
    ) -> Code,
    matmul: unsafe extern "C" fn(
        Raw,
        Raw,
        *const c_void,
        u64,
        Raw,
        u64,
        Raw,
        *const c_void,
        u64,
        Raw,
        u64,
        Raw,
        *const RawAlgo,
        u64,
        usize,
        Raw,
    ) -> Code,
}

impl Api {
    /// The library of CUDA 13, or of 12.
    fn get() -> Result<&'static Open<Self>> {
        Self::load(None)
    }

    fn load(named: Option<&Path>) -> Result<&'static Open<Self>> {
        static STATE: InUse<Api> = InUse::new();
        let find = |named: Option<&Path>| {
            Places::of_process().find_or_older(&CUBLASLT, named).map(|(_, found)| found)
        };
        STATE.get(named, find, Self::open)
    }

    fn open(found: &Found) -> Result<Self> {
        let spec = if CUBLASLT_12.is_copy(&found.path) { CUBLASLT_12 } else { CUBLASLT };
        // SAFETY: cuBLASLt's initialisers have no preconditions.
        let lib = unsafe { Lib::open(&found.path, &spec, false)? };
        // SAFETY: the types are those of `cublasLt.h`.
        unsafe {
            Ok(Self {
                version: lib.symbol("cublasLtGetVersion")?,
                create: lib.symbol("cublasLtCreate")?,
                status: lib.symbol("cublasLtGetStatusString")?,
                desc_create: lib.symbol("cublasLtMatmulDescCreate")?,
                desc_set: lib.symbol("cublasLtMatmulDescSetAttribute")?,
                desc_destroy: lib.symbol("cublasLtMatmulDescDestroy")?,
                layout_create: lib.symbol("cublasLtMatrixLayoutCreate")?,
                layout_destroy: lib.symbol("cublasLtMatrixLayoutDestroy")?,
                pref_create: lib.symbol("cublasLtMatmulPreferenceCreate")?,
                pref_set: lib.symbol("cublasLtMatmulPreferenceSetAttribute")?,
                pref_destroy: lib.symbol("cublasLtMatmulPreferenceDestroy")?,
                heuristic: lib.symbol("cublasLtMatmulAlgoGetHeuristic")?,
                matmul: lib.symbol("cublasLtMatmul")?,
            })
        }
    }

    fn check(&self, code: Code, call: &str) -> Result<()> {
        let kind = match code {
            0 => return Ok(()),
            3 => ErrorKind::Exhausted,
            7 => ErrorKind::InvalidArgument,
            1 | 8 | 16 => ErrorKind::Unavailable,
            13 => ErrorKind::DeviceLost,
            15 => ErrorKind::Unsupported,
            _ => ErrorKind::Internal,
        };
        // SAFETY: any code has a static string.
        let text = unsafe { CStr::from_ptr((self.status)(code)) }.to_string_lossy();
        Err(Error::new(kind, format!("{call}: {text}")).op("cublaslt"))
    }

    fn version(&self) -> String {
        // SAFETY: no preconditions.
        let v = unsafe { (self.version)() };
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }
}

/// A descriptor of the library: freed when it goes.
struct Object {
    raw: Raw,
    destroy: Destroy,
    set: Option<SetAttribute>,
}

impl Object {
    fn new(
        create: impl FnOnce(*mut Raw) -> Code,
        destroy: Destroy,
        set: Option<SetAttribute>,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        match create(&mut raw) {
            0 => Ok(Self { raw, destroy, set }),
            code => {
                let text = format!("cuBLASLt returned no descriptor, but status {code}");
                Err(Error::internal(text).op("cublaslt"))
            }
        }
    }

    fn set<T: bytemuck::Pod>(&self, api: &Api, attribute: c_int, value: T) -> Result<()> {
        let set = self.set.ok_or_else(|| Error::internal("this layout has no attributes"))?;
        // SAFETY: a live descriptor; the library copies as many bytes as are said.
        let code =
            unsafe { set(self.raw, attribute, std::ptr::from_ref(&value).cast(), size_of::<T>()) };
        api.check(code, "cublasLt*SetAttribute")
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// The fixed part of `D[m, n] = op(A) op(B) (+ bias) (+ D)`: all but the number of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LtDesc {
    /// Columns of D.
    pub n: usize,
    /// Length of the contraction.
    pub k: usize,
    /// Type of A and B: f32, bf16 or f16.
    pub dtype: DType,
    /// Type of D: that of A and B, or f32.
    pub out: DType,
    /// A lies as `[k, m]`, not `[m, k]`.
    pub a_turned: bool,
    /// B lies as `[k, n]`, not `[n, k]`.
    pub b_turned: bool,
    /// Adds a vector `[n]` of the type of D to each row.
    pub bias: bool,
}

/// The tensors of one product: rows, device addresses, and elements from row to row.
#[derive(Clone, Copy, Debug)]
pub struct LtProduct {
    /// Rows of D.
    pub m: usize,
    /// A and its stride.
    pub a: (u64, usize),
    /// B and its stride.
    pub b: (u64, usize),
    /// D and its stride.
    pub d: (u64, usize),
    /// The vector, or 0.
    pub bias: u64,
    /// Add to what D holds.
    pub accumulate: bool,
}

/// One of the library's ways to a product.
#[derive(Clone, Copy)]
pub struct LtAlgo {
    raw: RawAlgo,
    /// Bytes of workspace that it needs.
    pub workspace_bytes: usize,
    /// Fraction of a wave of blocks that it fills, as the library estimates it.
    pub waves: f32,
}

impl PartialEq for LtAlgo {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw && self.workspace_bytes == other.workspace_bytes
    }
}

/// The library on one device. One for each context of the process, and kept as long.
pub struct CublasLt {
    api: &'static Open<Api>,
    ctx: CudaContext,
    raw: Raw,
}

// SAFETY: the library allows calls with one handle from any thread; it never changes.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// Operands, layouts and result of one product, as the library wants them.
struct Layouts {
    desc: Object,
    left: Object,
    right: Object,
    d: Object,
}

/// Loads cuBLASLt, from `named` (a file or its folder) if given, and returns where it is.
///
/// # Errors
/// `Unavailable`, naming every place that was searched and the command that installs it, or if the
/// file is not cuBLASLt; `Mismatch` if two copies are loaded, or another one than `named` is loaded
/// or in use.
pub fn load_cublaslt(named: Option<&Path>) -> Result<Found> {
    Api::load(named).map(|o| o.found.clone())
}

impl CublasLt {
    /// The library on the device of `ctx`, opened on first use.
    ///
    /// # Errors
    /// `Unavailable`, naming every place that was searched and the command that installs it;
    /// `Mismatch` if two copies are loaded.
    pub fn on(ctx: &CudaContext) -> Result<Arc<Self>> {
        static KEPT: Mutex<Vec<Arc<CublasLt>>> = Mutex::new(Vec::new());
        let api = Api::get()?;
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lt) = kept.iter().find(|lt| lt.ctx.ordinal() == ctx.ordinal()) {
            return Ok(lt.clone());
        }
        let _current = ctx.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current and the output is valid.
        api.check(unsafe { (api.create)(&mut raw) }, "cublasLtCreate")?;
        let new = Arc::new(Self { api, ctx: ctx.clone(), raw });
        kept.push(new.clone());
        Ok(new)
    }

    /// Its version, as in `13.1.0`.
    pub fn version(&self) -> String {
        self.api.version()
    }

    /// Returns the copy of the library that is used.
    pub fn found(&self) -> &Found {
        &self.api.found
    }

    fn layouts(&self, d: &LtDesc, p: &LtProduct) -> Result<Layouts> {
        let api = self.api;
        let layout = |dtype, rows: usize, cols: usize, ld: usize| {
            let dtype = code(dtype)?;
            // SAFETY: a valid output.
            let create = |raw| unsafe {
                (api.layout_create)(raw, dtype, rows as u64, cols as u64, ld as i64)
            };
            Object::new(create, api.layout_destroy, None)
        };
        // SAFETY: a valid output.
        let create = |raw| unsafe { (api.desc_create)(raw, COMPUTE_32F, R_32F) };
        let desc = Object::new(create, api.desc_destroy, Some(api.desc_set))?;
        desc.set(api, DESC_TRANSA, i32::from(!d.b_turned))?;
        desc.set(api, DESC_TRANSB, i32::from(d.a_turned))?;
        if d.bias {
            desc.set(api, DESC_EPILOGUE, EPILOGUE_BIAS)?;
            desc.set(api, DESC_BIAS_POINTER, p.bias)?;
        }
        let turned = |yes: bool, (x, y): (usize, usize)| if yes { (y, x) } else { (x, y) };
        // Rows and columns as the library sees what lies there.
        let (rows, cols) = turned(d.b_turned, (d.k, d.n));
        let left = layout(d.dtype, rows, cols, p.b.1)?;
        let (rows, cols) = turned(d.a_turned, (d.k, p.m));
        let right = layout(d.dtype, rows, cols, p.a.1)?;
        Ok(Layouts { desc, left, right, d: layout(d.out, d.n, p.m, p.d.1)? })
    }

    /// At most `top` algorithms for a product of this shape and these strides, the one that the
    /// library takes for the fastest first, for addresses that are multiples of `align_bytes` and
    /// at most `max_workspace_bytes`. Addresses do not matter here. None if it has no algorithm.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes or types that the library does not take.
    pub fn algos(
        &self,
        d: &LtDesc,
        p: &LtProduct,
        (align_bytes, max_workspace_bytes): (u32, usize),
        top: usize,
    ) -> Result<Vec<LtAlgo>> {
        let _current = self.ctx.bind()?;
        let (api, l) = (self.api, self.layouts(d, p)?);
        // SAFETY: a valid output.
        let create = |raw| unsafe { (api.pref_create)(raw) };
        let pref = Object::new(create, api.pref_destroy, Some(api.pref_set))?;
        pref.set(api, PREF_MAX_WORKSPACE, max_workspace_bytes as u64)?;
        pref.set(api, PREF_REDUCTIONS, REDUCTION_COMPUTE_TYPE)?;
        for i in 0..4 {
            pref.set(api, PREF_ALIGNMENT_A + i, align_bytes)?;
        }
        let (mut results, mut num) = (vec![RawResult::default(); top.max(1)], 0);
        // SAFETY: live descriptors; the array holds as many results as are asked for.
        let code = unsafe {
            (api.heuristic)(
                self.raw,
                l.desc.raw,
                l.left.raw,
                l.right.raw,
                l.d.raw,
                l.d.raw,
                pref.raw,
                results.len() as c_int,
                results.as_mut_ptr(),
                &mut num,
            )
        };
        match api.check(code, "cublasLtMatmulAlgoGetHeuristic") {
            Err(e) if e.is_unsupported() => return Ok(Vec::new()),
            r => r?,
        }
        results.truncate(num.max(0) as usize);
        let good = results.iter().filter(|r| r.state == 0);
        Ok(good
            .map(|r| LtAlgo { raw: r.algo, workspace_bytes: r.workspace, waves: r.waves })
            .collect())
    }

    /// Queues a product by one of its algorithms. Holds the workspace, nothing else.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device, for the shapes, strides and types of
    /// `d` and `p`, until the work has run (and be held by the graph if captured). No other work
    /// may write A, B or bias, or use D or the workspace, meanwhile.
    ///
    /// # Errors
    /// `InvalidArgument` for a workspace that is too small, or a stream of another device;
    /// `Unsupported` if the algorithm does not do this product; what the library reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        (d, p): (&LtDesc, &LtProduct),
        algo: &LtAlgo,
        workspace: Option<&CudaMemory>,
    ) -> Result<()> {
        let available = workspace.map_or(0, CudaMemory::len_bytes);
        if available < algo.workspace_bytes || stream.context().ordinal() != self.ctx.ordinal() {
            return Err(Error::invalid(
                "the workspace of cuBLASLt is too small, or on another device",
            )
            .expected(format_args!("{} bytes", algo.workspace_bytes))
            .seen(available));
        }
        let _current = self.ctx.bind()?;
        if let Some(w) = workspace {
            stream.hold(|| Arc::new(w.clone()));
        }
        let (api, l) = (self.api, self.layouts(d, p)?);
        let (alpha, beta) = (1f32, if p.accumulate { 1f32 } else { 0.0 });
        // SAFETY: live descriptors and a stream of this context; alpha and beta are read before the
        // call returns; the caller's contract for what lies at the addresses.
        let code = unsafe {
            (api.matmul)(
                self.raw,
                l.desc.raw,
                std::ptr::from_ref(&alpha).cast(),
                p.b.0,
                l.left.raw,
                p.a.0,
                l.right.raw,
                std::ptr::from_ref(&beta).cast(),
                p.d.0,
                l.d.raw,
                p.d.0,
                l.d.raw,
                &algo.raw,
                workspace.map_or(0, CudaMemory::addr),
                available,
                stream.raw().cast(),
            )
        };
        api.check(code, "cublasLtMatmul")
    }
}

/// `cudaDataType_t`.
fn code(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::F32 => Ok(R_32F),
        DType::BF16 => Ok(R_16BF),
        DType::F16 => Ok(R_16F),
        other => {
            Err(Error::invalid(format!("tilewire does not use cuBLASLt for products of {other}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layouts of `cublasLt.h`, which the library writes into.
    #[test]
    fn results_are_as_long_as_the_library_writes_them() {
        assert_eq!((size_of::<RawAlgo>(), size_of::<RawResult>()), (64, 96));
        assert_eq!(std::mem::offset_of!(RawResult, waves), 76);
    }

    #[test]
    fn without_the_library_the_error_says_where_it_was_looked_for() {
        match Api::get() {
            Ok(api) => assert!(api.version().split('.').count() == 3, "{}", api.version()),
            Err(e) => {
                assert!(e.is_unavailable() && e.message().contains("libcublasLt"), "{e}");
                assert!(e.get_hint().is_some_and(|h| h.contains("pip install")), "{e}");
            }
        }
    }
}
