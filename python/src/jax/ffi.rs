//! XLA's foreign function interface, as far as it is used here: the structures of API 0.3.
//!
//! Versions 0.4 and later add functions behind those of 0.3 and rename some, and keep the layout.
//! Every structure begins with its size, which is checked before fields of it are read.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, Ordering};

use tilewire::device::Device;
use tilewire::prelude::*;

mod buffer;

use buffer::{Buffer, lend};

const MAJOR: c_int = 0;
const MINOR: c_int = 3;
/// `XLA_FFI_Extension_Metadata`.
const METADATA: c_int = 1;
/// `XLA_FFI_ArgType_BUFFER` and `XLA_FFI_RetType_BUFFER`.
const BUFFER: c_int = 1;
/// `XLA_FFI_AttrType_STRING`.
const STRING: c_int = 4;
/// `XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE`.
const COMMAND_BUFFER: u32 = 1;

/// `XLA_FFI_ExecutionStage_INSTANTIATE`.
pub const INSTANTIATE: c_int = 0;

/// An error that XLA owns.
pub enum XlaError {}
enum Context {}
pub enum RawFuture {}

type Call<A> = Option<unsafe extern "C" fn(*mut A) -> *mut XlaError>;

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

/// `XLA_FFI_Api`; of the functions that are not called the type does not matter.
#[repr(C)]
pub struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: Call<ErrorCreate>,
    error_get_message: *const c_void,
    error_destroy: Option<unsafe extern "C" fn(*mut ErrorDestroy)>,
    handler_register: *const c_void,
    stream_get: Call<Get>,
    type_register: *const c_void,
    context_get: *const c_void,
    state_set: Call<State>,
    state_get: Call<State>,
    memory_allocate: *const c_void,
    memory_free: *const c_void,
    pool_schedule: *const c_void,
    pool_num_threads: *const c_void,
    future_create: Call<FutureCreate>,
    future_set_available: Call<FutureSet>,
    future_set_error: Call<FutureFail>,
    run_id_get: *const c_void,
    device_ordinal_get: Call<GetOrdinal>,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct ErrorDestroy {
    struct_size: usize,
    extension: *mut Extension,
    error: *mut XlaError,
}

#[repr(C)]
struct Get {
    struct_size: usize,
    extension: *mut Extension,
    ctx: *mut Context,
    out: *mut c_void,
}

#[repr(C)]
struct GetOrdinal {
    struct_size: usize,
    extension: *mut Extension,
    ctx: *mut Context,
    out: i32,
}

#[repr(C)]
struct State {
    struct_size: usize,
    extension: *mut Extension,
    ctx: *mut Context,
    stage: c_int,
    type_id: *mut TypeId,
    state: *mut c_void,
}

#[repr(C)]
struct FutureCreate {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut RawFuture,
}

#[repr(C)]
struct FutureSet {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut RawFuture,
}

#[repr(C)]
struct FutureFail {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut RawFuture,
    error: *mut XlaError,
}

/// `XLA_FFI_TypeId`: XLA writes it when the type is registered. Each platform's XLA has its own.
#[repr(C)]
pub struct TypeId(AtomicI64);

impl TypeId {
    pub const fn unknown() -> Self {
        Self(AtomicI64::new(0))
    }

    fn ptr(&self) -> *mut TypeId {
        std::ptr::from_ref(self).cast_mut()
    }
}

/// `XLA_FFI_TypeInfo`.
#[repr(C)]
pub struct TypeInfo {
    struct_size: usize,
    extension: *mut Extension,
    deleter: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: constant after it was made; XLA reads it.
unsafe impl Sync for TypeInfo {}

impl TypeInfo {
    pub const fn new(deleter: unsafe extern "C" fn(*mut c_void)) -> Self {
        Self { struct_size: size_of::<Self>(), extension: null_mut(), deleter }
    }
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    types: *const c_int,
    items: *const *const c_void,
}

#[repr(C)]
struct ByteSpan {
    ptr: *const u8,
    len: usize,
}

#[repr(C)]
struct Attrs {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    types: *const c_int,
    names: *const *const ByteSpan,
    items: *const *const c_void,
}

/// `XLA_FFI_CallFrame`.
#[repr(C)]
pub struct CallFrame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    ctx: *mut Context,
    stage: c_int,
    args: Buffers,
    rets: Buffers,
    attrs: Attrs,
    future: *mut RawFuture,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
    state_type: i64,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// A call of a handler.
pub struct Frame<'a> {
    raw: &'a mut CallFrame,
    api: &'static Api,
}

fn unknown_version(what: &str, expected: usize, seen: usize) -> Error {
    let text = format!("XLA's foreign function interface has another `{what}`");
    Error::new(ErrorKind::Unsupported, text)
        .expected(format_args!("at least {expected} bytes, as API {MAJOR}.{MINOR}"))
        .seen(seen)
        .hint("use jax >= 0.10, < 0.12")
}

/// Answers a query for what a handler is; none if the call is another one.
///
/// # Safety
/// `raw` is the frame that XLA calls a handler with.
pub unsafe fn answer_query(raw: *mut CallFrame, state: &TypeId) -> Option<*mut XlaError> {
    // SAFETY: the frame is valid for the call, and so are its extensions.
    let extension = unsafe { (*raw).extension.as_ref() }?;
    if extension.kind != METADATA {
        return None;
    }
    // XLA's size of it ends with the traits, though the type follows in every 0.3.
    let most = std::mem::offset_of!(Metadata, state_type) - size_of::<u32>();
    let fits = extension.struct_size >= size_of::<MetadataExtension>();
    // SAFETY: an extension of this kind and size is this structure, and points to such metadata.
    let metadata = fits.then(|| unsafe {
        (*std::ptr::from_ref(extension).cast::<MetadataExtension>()).metadata.as_mut()
    });
    let Some(m) = metadata.flatten().filter(|m| m.struct_size >= most) else {
        let e = unknown_version("metadata", most, extension.struct_size);
        // SAFETY: the frame is valid for the call.
        return Some(unsafe { refuse(raw, &e) });
    };
    m.version = Version {
        struct_size: size_of::<Version>(),
        extension: null_mut(),
        major: MAJOR,
        minor: MINOR,
    };
    m.traits = COMMAND_BUFFER;
    m.state_type = state.0.load(Ordering::Relaxed);
    Some(null_mut())
}

/// `e` by the frame's table, as far as that is known: errors stand at its head in every version.
///
/// # Safety
/// `raw` is the frame that XLA calls a handler with.
pub unsafe fn refuse(raw: *mut CallFrame, e: &Error) -> *mut XlaError {
    // SAFETY: the frame is valid for the call, and its table lives as long as the process.
    let api = unsafe { raw.as_ref().and_then(|f| f.api.as_ref()) };
    let least = std::mem::offset_of!(Api, error_get_message);
    match api.filter(|a| a.struct_size >= least) {
        Some(api) => error_of(api, e),
        None => {
            // To return without an error would be to say that the results are there.
            log::error!("XLA's table of functions is not understood: {e}");
            std::process::abort();
        }
    }
}

impl<'a> Frame<'a> {
    /// # Safety
    /// `raw` is the frame that XLA calls a handler with.
    ///
    /// # Errors
    /// `Unsupported` for a version that is not known.
    pub unsafe fn new(raw: *mut CallFrame) -> Result<Self> {
        // SAFETY: the frame is valid for the call.
        let raw = unsafe { raw.as_mut() }
            .ok_or_else(|| Error::internal("XLA has passed no call frame"))?;
        let seen = raw.struct_size;
        let most = std::mem::offset_of!(CallFrame, future);
        if seen < most {
            return Err(unknown_version("call frame", most, seen));
        }
        // SAFETY: the table lives as long as the process; its size is checked before it is used.
        let api = unsafe { raw.api.as_ref() }
            .ok_or_else(|| Error::internal("XLA has passed no function table"))?;
        if api.struct_size < size_of::<Api>() || api.version.major != MAJOR {
            return Err(unknown_version("table", size_of::<Api>(), api.struct_size));
        }
        Ok(Self { raw, api })
    }

    /// The string attribute `name`.
    ///
    /// # Errors
    /// `Internal` if there is none: the Python package passes it.
    pub fn attr(&self, name: &str) -> Result<&str> {
        let a = &self.raw.attrs;
        for i in 0..a.size.max(0) as usize {
            // SAFETY: the arrays have `size` elements, and names and values live as long as the
            // frame.
            let (kind, span, value) =
                unsafe { (*a.types.add(i), &**a.names.add(i), *a.items.add(i)) };
            // SAFETY: a name is bytes that live as long as the frame.
            if kind != STRING || unsafe { bytes(span) } != name.as_bytes() {
                continue;
            }
            // SAFETY: the value of a string is such a span.
            let value = unsafe { bytes(&*value.cast::<ByteSpan>()) };
            return std::str::from_utf8(value)
                .map_err(|_| Error::internal(format!("attribute `{name}` is not text")));
        }
        Err(Error::internal(format!("the call lacks the attribute `{name}`")))
    }

    /// Returns the device of this process that executes the call.
    ///
    /// # Errors
    /// What XLA says.
    pub fn ordinal(&self) -> Result<i32> {
        let mut args = GetOrdinal {
            struct_size: size_of::<GetOrdinal>(),
            extension: null_mut(),
            ctx: self.raw.ctx,
            out: -1,
        };
        self.ask(self.api.device_ordinal_get, &mut args, "the device's ordinal")?;
        Ok(args.out)
    }

    /// The `CUstream` that the call is queued on.
    ///
    /// # Errors
    /// What XLA says.
    pub fn stream(&self) -> Result<*mut c_void> {
        let mut args = Get {
            struct_size: size_of::<Get>(),
            extension: null_mut(),
            ctx: self.raw.ctx,
            out: null_mut(),
        };
        self.ask(self.api.stream_get, &mut args, "the stream")?;
        Ok(args.out)
    }

    fn state(&self, id: &TypeId, state: *mut c_void) -> State {
        State {
            struct_size: size_of::<State>(),
            extension: null_mut(),
            ctx: self.raw.ctx,
            stage: INSTANTIATE,
            type_id: id.ptr(),
            state,
        }
    }

    /// Gives XLA the state of this call site. It is dropped with the executable.
    ///
    /// # Errors
    /// What XLA says.
    pub fn set_state<T>(&self, id: &TypeId, state: Box<T>) -> Result<()> {
        let raw = Box::into_raw(state);
        let mut args = self.state(id, raw.cast());
        self.ask(self.api.state_set, &mut args, "the state of a call").inspect_err(|_| {
            // SAFETY: made above, and XLA has not taken it.
            drop(unsafe { Box::from_raw(raw) });
        })
    }

    /// The state of this call site, which the executable keeps while it runs.
    ///
    /// # Errors
    /// What XLA says.
    ///
    /// # Safety
    /// States of type `id` are `T`s.
    pub unsafe fn get_state<T>(&self, id: &TypeId) -> Result<&T> {
        let mut args = self.state(id, null_mut());
        self.ask(self.api.state_get, &mut args, "the state of a call")?;
        // SAFETY: a state of this type is such a box, and lives as long as the executable.
        unsafe { args.state.cast::<T>().as_ref() }
            .ok_or_else(|| Error::internal("the call site has no state"))
    }

    /// A future that this call returns: it is complete when the future is.
    ///
    /// # Errors
    /// What XLA says.
    pub fn future(&self) -> Result<Future> {
        let mut args = FutureCreate {
            struct_size: size_of::<FutureCreate>(),
            extension: null_mut(),
            future: null_mut(),
        };
        self.ask(self.api.future_create, &mut args, "a future")?;
        Ok(Future { raw: args.future, api: self.api })
    }

    /// Makes `future` what the call returns.
    pub fn return_future(&mut self, future: *mut RawFuture) {
        self.raw.future = future;
    }

    fn ask<A>(&self, f: Call<A>, args: &mut A, what: &str) -> Result<()> {
        ask(self.api, f, args, what)
    }

    /// The operands, or the results, used where they lie on `device`.
    ///
    /// # Errors
    /// `InvalidArgument` for an element type that is not known.
    ///
    /// # Safety
    /// They are used only until the call is complete, or in the order of its stream.
    pub unsafe fn tensors(&self, results: bool, device: &Device) -> Result<Vec<Tensor>> {
        let b = if results { &self.raw.rets } else { &self.raw.args };
        (0..b.size.max(0) as usize)
            .map(|i| {
                // SAFETY: the arrays have `size` elements.
                let (kind, item) = unsafe { (*b.types.add(i), *b.items.add(i)) };
                if kind != BUFFER {
                    return Err(Error::internal("an operand is no buffer"));
                }
                // SAFETY: an item of this kind is a buffer; the caller keeps to its life.
                unsafe { lend(&*item.cast::<Buffer>(), device) }
            })
            .collect()
    }

    /// `e` as an error that XLA takes over.
    pub fn error(&self, e: &Error) -> *mut XlaError {
        error_of(self.api, e)
    }
}

fn ask<A>(api: &Api, f: Call<A>, args: &mut A, what: &str) -> Result<()> {
    let f = f.ok_or_else(|| Error::internal(format!("XLA has no call for {what}")))?;
    // SAFETY: the arguments are those of this function, and begin with their size.
    let error = unsafe { f(args) };
    if error.is_null() {
        return Ok(());
    }
    if let Some(destroy) = api.error_destroy {
        let mut args =
            ErrorDestroy { struct_size: size_of::<ErrorDestroy>(), extension: null_mut(), error };
        // SAFETY: the error is ours, and destroyed once.
        unsafe { destroy(&mut args) };
    }
    Err(Error::internal(format!("XLA refuses {what}")))
}

/// # Safety
/// The span's bytes are there.
unsafe fn bytes(span: &ByteSpan) -> &[u8] {
    if span.len == 0 {
        return &[];
    }
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(span.ptr, span.len) }
}

fn error_of(api: &Api, e: &Error) -> *mut XlaError {
    let text: String = e.to_string().chars().filter(|&c| c != '\0').collect();
    let text = CString::new(text).unwrap_or_default();
    let mut args = ErrorCreate {
        struct_size: size_of::<ErrorCreate>(),
        extension: null_mut(),
        message: text.as_ptr(),
        code: code_of(e.kind()),
    };
    // SAFETY: the arguments are those of this function; XLA copies the text.
    api.error_create.map_or(null_mut(), |f| unsafe { f(&mut args) })
}

/// The code of `absl::Status` that says most of an error's kind.
fn code_of(kind: ErrorKind) -> c_int {
    match kind {
        ErrorKind::InvalidArgument => 3,
        ErrorKind::Timeout => 4,
        ErrorKind::Permission => 7,
        ErrorKind::Exhausted => 8,
        ErrorKind::NotPrepared | ErrorKind::Stale | ErrorKind::Mismatch => 9,
        ErrorKind::Aborted => 10,
        ErrorKind::Unsupported => 12,
        ErrorKind::PeerDead | ErrorKind::Unavailable | ErrorKind::DeviceLost => 14,
        _ => 13,
    }
}

/// The return value of a call that continues behind its return: XLA keeps its buffers until it is
/// set.
pub struct Future {
    raw: *mut RawFuture,
    api: &'static Api,
}

// SAFETY: XLA's futures may be set by any thread.
unsafe impl Send for Future {}

impl Future {
    /// For [`Frame::return_future`].
    pub fn raw(&self) -> *mut RawFuture {
        self.raw
    }

    /// The call is complete, or has failed. What XLA does next may run in here.
    pub fn set(self, result: Result<()>) {
        let size = size_of::<FutureSet>();
        let sent = match result {
            Ok(()) => {
                let mut args =
                    FutureSet { struct_size: size, extension: null_mut(), future: self.raw };
                ask(self.api, self.api.future_set_available, &mut args, "a result")
            }
            Err(e) => {
                let mut args = FutureFail {
                    struct_size: size_of::<FutureFail>(),
                    extension: null_mut(),
                    future: self.raw,
                    error: error_of(self.api, &e),
                };
                ask(self.api, self.api.future_set_error, &mut args, "an error")
            }
        };
        if let Err(e) = sent {
            log::error!("{e}");
        }
    }
}

/// A pointer as the number that Python makes a capsule of.
pub fn address<T>(of: *const T) -> usize {
    of.expose_provenance()
}
