//! NVIDIA's collectives, opened at run time: 2.27 and newer, as far as it is 2.
//!
//! # Rules
//! - Communicators are non-blocking: no call waits for a peer, so whoever waits can give up.
//! - [`NcclComm::abort`] ends what runs on the device: kernels poll its flag.
//! - The library is not opened unless `NCCL_NVLS_ENABLE=0` keeps it off NVLink multicast.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tilewire_core::{DType, Error, ErrorKind, Result};

use super::context::CudaContext;
use super::library::{InUse, Lib, Open};
use super::places::{Found, NCCL, Places};
use super::stream::CudaStream;

type Code = c_int;
type Raw = *mut c_void;

const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;
/// The oldest whose calls are used here, as `ncclGetVersion` writes it.
const MIN_VERSION: c_int = 22700;
/// The only major version whose declarations are used here, and the newest minor one whose functions
/// `cargo xtask test --only libraries` looks up.
const MAJOR: c_int = 2;
const TESTED_MINOR: c_int = 32;
/// `NCCL_WIN_COLL_SYMMETRIC`: every rank's part lies at the same offset.
const WINDOW_SYMMETRIC: c_int = 1;
const NO_MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// `ncclUniqueId`: where the members of a communicator meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct NcclId(pub [u8; 128]);

/// `ncclConfig_t` as of 2.17, which every newer library reads.
#[repr(C)]
struct RawConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl RawConfig {
    fn non_blocking() -> Self {
        let unset = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21700,
            blocking: 0,
            cga_cluster_size: unset,
            min_ctas: unset,
            max_ctas: unset,
            net_name: std::ptr::null(),
            split_share: unset,
        }
    }
}

type Transfer = unsafe extern "C" fn(u64, usize, c_int, c_int, Raw, Raw) -> Code;

/// The library's functions, as `nccl.h` declares them.
struct Api {
    version: c_int,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    last_error: unsafe extern "C" fn(Raw) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut NcclId) -> Code,
    init: unsafe extern "C" fn(*mut Raw, c_int, NcclId, c_int, *mut RawConfig) -> Code,
    async_error: unsafe extern "C" fn(Raw, *mut Code) -> Code,
    abort: unsafe extern "C" fn(Raw) -> Code,
    group_start: unsafe extern "C" fn() -> Code,
    group_end: unsafe extern "C" fn() -> Code,
    all_gather: unsafe extern "C" fn(u64, u64, usize, c_int, Raw, Raw) -> Code,
    reduce_scatter: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    all_reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, c_int, Raw, Raw) -> Code,
    broadcast: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    send: Transfer,
    recv: Transfer,
    window: Option<unsafe extern "C" fn(Raw, u64, usize, *mut Raw, c_int) -> Code>,
}

impl Api {
    fn get() -> Result<&'static Open<Self>> {
        Self::load(None)
    }

    fn load(named: Option<&Path>) -> Result<&'static Open<Self>> {
        static STATE: InUse<Api> = InUse::new();
        let find = |named: Option<&Path>| {
            no_multicast(std::env::var(NO_MULTICAST).ok().as_deref())?;
            Places::of_process().find(&NCCL, named)
        };
        STATE.get(named, find, Self::open)
    }

    fn open(found: &Found) -> Result<Self> {
        // SAFETY: NCCL's initialisers have no preconditions.
        let lib = unsafe { Lib::open(&found.path, &NCCL, false)? };
        let mut version = 0;
        // SAFETY: the type is that of `nccl.h`; a valid output.
        let code = unsafe {
            let get: unsafe extern "C" fn(*mut c_int) -> Code = lib.symbol("ncclGetVersion")?;
            get(&mut version)
        };
        known(if code == SUCCESS { version } else { 0 }, found)?;
        // SAFETY: the types are those of `nccl.h`, where device addresses are pointers.
        unsafe {
            Ok(Self {
                version,
                error_string: lib.symbol("ncclGetErrorString")?,
                last_error: lib.symbol("ncclGetLastError")?,
                unique_id: lib.symbol("ncclGetUniqueId")?,
                init: lib.symbol("ncclCommInitRankConfig")?,
                async_error: lib.symbol("ncclCommGetAsyncError")?,
                abort: lib.symbol("ncclCommAbort")?,
                group_start: lib.symbol("ncclGroupStart")?,
                group_end: lib.symbol("ncclGroupEnd")?,
                all_gather: lib.symbol("ncclAllGather")?,
                reduce_scatter: lib.symbol("ncclReduceScatter")?,
                all_reduce: lib.symbol("ncclAllReduce")?,
                reduce: lib.symbol("ncclReduce")?,
                broadcast: lib.symbol("ncclBroadcast")?,
                send: lib.symbol("ncclSend")?,
                recv: lib.symbol("ncclRecv")?,
                window: lib.optional("ncclCommWindowRegister"),
            })
        }
    }

    /// Success, or work that goes on elsewhere.
    fn check(&self, code: Code, call: &str) -> Result<()> {
        let kind = match code {
            SUCCESS | IN_PROGRESS => return Ok(()),
            1 => ErrorKind::DeviceLost,
            4 | 5 => ErrorKind::InvalidArgument,
            6 => ErrorKind::PeerDead,
            _ => ErrorKind::Internal,
        };
        let text = |s: *const c_char| {
            // SAFETY: the library's strings are terminated, and are copied before it is called again.
            if s.is_null() { "".into() } else { unsafe { CStr::from_ptr(s) }.to_string_lossy() }
        };
        // SAFETY: any code has a static string; the last error of the process belongs to no
        // communicator.
        let (what, last) = unsafe {
            (text((self.error_string)(code)), text((self.last_error)(std::ptr::null_mut())))
        };
        let text = format!("{call}: {what} {}", last.trim());
        Err(Error::new(kind, text.trim_end().to_owned()).op("nccl"))
    }
}

fn no_multicast(set: Option<&str>) -> Result<()> {
    if set == Some("0") {
        return Ok(());
    }
    let text = format!("NCCL is not opened unless {NO_MULTICAST}=0");
    Err(Error::new(ErrorKind::Unavailable, text).op("nccl").seen(set.unwrap_or("not set")).hint(
        "set NCCL_NVLS_ENABLE=0: NVLink multicast is never used here; `tilewire run` sets it",
    ))
}

fn known(version: c_int, found: &Found) -> Result<()> {
    let (major, minor) = (version / 10_000, version / 100 % 100);
    if version >= MIN_VERSION && major == MAJOR {
        if minor > TESTED_MINOR {
            log::warn!(
                "NCCL {} at {} is newer than what was tested, {MAJOR}.{TESTED_MINOR}",
                text(version),
                found.path.display()
            );
        }
        return Ok(());
    }
    let what = if version < MIN_VERSION { "is too old" } else { "has another interface" };
    Err(Error::new(ErrorKind::Unavailable, format!("{} {what}", found.path.display()))
        .op("nccl")
        .expected(format_args!("{} or a later {MAJOR}", text(MIN_VERSION)))
        .seen(text(version))
        .hint(NCCL.install))
}

/// As in 2.28.9.
fn text(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Part of one collective of a communicator. Addresses are of this rank's device, counts of
/// elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NcclOp {
    /// `count` elements of each rank, in their order, to `dst` of all.
    AllGather {
        /// Mine.
        src: u64,
        /// Those of all.
        dst: u64,
        /// Of one rank.
        count: usize,
    },
    /// The sum of everybody's, `count` elements of it to each rank.
    ReduceScatter {
        /// Mine for all.
        src: u64,
        /// My part of the sum.
        dst: u64,
        /// Of one part.
        count: usize,
    },
    /// The sum of everybody's to all.
    AllReduce {
        /// Mine.
        src: u64,
        /// The sum.
        dst: u64,
        /// Of all.
        count: usize,
    },
    /// The sum of everybody's to one.
    Reduce {
        /// Mine.
        src: u64,
        /// The sum, at the root.
        dst: u64,
        /// Of all.
        count: usize,
        /// Who gets it.
        root: u32,
    },
    /// One rank's to all.
    Broadcast {
        /// The root's.
        src: u64,
        /// Where it goes.
        dst: u64,
        /// Of all.
        count: usize,
        /// Whose it is.
        root: u32,
    },
    /// To a peer that receives as many.
    Send {
        /// Mine.
        src: u64,
        /// Of all.
        count: usize,
        /// To whom.
        peer: u32,
    },
    /// From a peer that sends as many.
    Recv {
        /// Where it goes.
        dst: u64,
        /// Of all.
        count: usize,
        /// From whom.
        peer: u32,
    },
}

/// How elements are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NcclSum {
    /// Sum.
    Sum,
    /// Sum divided by the number of ranks.
    Avg,
}

/// Loads NCCL, from `named` (a file or its folder) if given, and returns where it is.
///
/// # Errors
/// As [`NcclComm::library`]; `Mismatch` if another copy than `named` is loaded or in use.
pub fn load_nccl(named: Option<&Path>) -> Result<Found> {
    Api::load(named).map(|o| o.found.clone())
}

/// A communicator of one rank on one device.
pub struct NcclComm {
    api: &'static Open<Api>,
    ctx: CudaContext,
    /// None once it is aborted. Held during calls: an abort frees what they use.
    raw: Mutex<Option<Handle>>,
}

struct Handle(Raw);

// SAFETY: the library allows calls on a communicator from any thread, one at a time, which the lock
// around the handle sees to.
unsafe impl Send for Handle {}

impl NcclComm {
    /// The library's version, as in `2.28.9`, and which copy it is.
    ///
    /// # Errors
    /// `Unavailable` without the library, naming every place that was searched and the command that
    /// installs it, for one that is older than 2.27 or newer than 2, and unless `NCCL_NVLS_ENABLE=0`;
    /// `Mismatch` if two copies are loaded.
    pub fn library() -> Result<(String, Found)> {
        let api = Api::get()?;
        Ok((text(api.version), api.found.clone()))
    }

    /// A new meeting place, made by one rank for all.
    ///
    /// # Errors
    /// As [`NcclComm::library`]; what the library reports.
    pub fn unique_id() -> Result<NcclId> {
        let api = Api::get()?;
        let mut id = NcclId([0; 128]);
        // SAFETY: a valid output.
        api.check(unsafe { (api.unique_id)(&mut id) }, "ncclGetUniqueId")?;
        Ok(id)
    }

    /// Begins to join the communicator of `size` ranks as `rank`: [`NcclComm::is_ready`] says when it
    /// is done.
    ///
    /// # Errors
    /// As [`NcclComm::library`]; what the library reports.
    pub fn join(ctx: &CudaContext, id: NcclId, (rank, size): (u32, usize)) -> Result<Arc<Self>> {
        let api = Api::get()?;
        let _current = ctx.bind()?;
        let (mut raw, mut config) = (std::ptr::null_mut(), RawConfig::non_blocking());
        // SAFETY: a context is current; valid output and configuration, which is copied.
        let code = unsafe { (api.init)(&mut raw, size as c_int, id, rank as c_int, &mut config) };
        api.check(code, "ncclCommInitRankConfig")?;
        let raw = Mutex::new(Some(Handle(raw)));
        Ok(Arc::new(Self { api, ctx: ctx.clone(), raw }))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if nothing is in progress: the rank has joined, or what it queued last is on the stream.
    ///
    /// # Errors
    /// `Aborted`; what the library reports of this communicator.
    pub fn is_ready(&self) -> Result<bool> {
        let handle = self.lock();
        let raw = handle.as_ref().ok_or_else(aborted)?.0;
        let mut code = SUCCESS;
        // SAFETY: a live communicator and a valid output.
        let call = unsafe { (self.api.async_error)(raw, &mut code) };
        self.api.check(call, "ncclCommGetAsyncError")?;
        self.api.check(code, "communicator")?;
        Ok(code == SUCCESS)
    }

    /// Queues operations as one group. Its last part is done by a thread of the library: the work is
    /// on the stream, or in its capture, when [`NcclComm::is_ready`] says so, and nothing else may be
    /// queued there before.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device for as many elements as are said, until
    /// the work has run (and be held by the graph if captured). No other work may write what is read,
    /// or use what is written, meanwhile. All ranks must make the same calls.
    ///
    /// # Errors
    /// `Aborted`; `InvalidArgument` for a stream of another device, or a type that cannot be added;
    /// what the library reports.
    pub unsafe fn queue(
        &self,
        stream: &CudaStream,
        (dtype, sum): (DType, NcclSum),
        ops: &[NcclOp],
    ) -> Result<()> {
        if stream.context().ordinal() != self.ctx.ordinal() {
            return Err(Error::invalid("the stream is of another device than the communicator"));
        }
        let handle = self.lock();
        let raw = handle.as_ref().ok_or_else(aborted)?.0;
        let _current = self.ctx.bind()?;
        let api = self.api;
        // SAFETY: groups belong to this thread, and this one is ended below.
        api.check(unsafe { (api.group_start)() }, "ncclGroupStart")?;
        // SAFETY: the caller's contract; a live communicator and stream of its device.
        let queued =
            ops.iter().try_for_each(|op| unsafe { self.one(raw, stream, (dtype, sum), op) });
        // SAFETY: begun above.
        let ended = api.check(unsafe { (api.group_end)() }, "ncclGroupEnd");
        queued.and(ended)
    }

    /// # Safety
    /// As [`NcclComm::queue`], within a group.
    unsafe fn one(
        &self,
        raw: Raw,
        stream: &CudaStream,
        (dtype, sum): (DType, NcclSum),
        op: &NcclOp,
    ) -> Result<()> {
        let (api, stream) = (self.api, stream.raw().cast());
        let add = if sum == NcclSum::Avg { 4 } else { 0 };
        let number = match dtype {
            DType::F16 => Some(6),
            DType::F32 => Some(7),
            DType::BF16 => Some(9),
            _ => None,
        };
        // What is only moved is bytes.
        let (t, n) = number.map_or((1, dtype.size()), |t| (t, 1));
        let adds = matches!(
            op,
            NcclOp::ReduceScatter { .. } | NcclOp::AllReduce { .. } | NcclOp::Reduce { .. }
        );
        if adds && number.is_none() {
            return Err(Error::invalid(format!("NCCL adds no {dtype} here")));
        }
        // SAFETY: the caller's contract.
        let code = unsafe {
            match *op {
                NcclOp::AllGather { src, dst, count } => {
                    (api.all_gather)(src, dst, count * n, t, raw, stream)
                }
                NcclOp::ReduceScatter { src, dst, count } => {
                    (api.reduce_scatter)(src, dst, count, t, add, raw, stream)
                }
                NcclOp::AllReduce { src, dst, count } => {
                    (api.all_reduce)(src, dst, count, t, add, raw, stream)
                }
                NcclOp::Reduce { src, dst, count, root } => {
                    (api.reduce)(src, dst, count, t, add, root as c_int, raw, stream)
                }
                NcclOp::Broadcast { src, dst, count, root } => {
                    (api.broadcast)(src, dst, count * n, t, root as c_int, raw, stream)
                }
                NcclOp::Send { src, count, peer } => {
                    (api.send)(src, count * n, t, peer as c_int, raw, stream)
                }
                NcclOp::Recv { dst, count, peer } => {
                    (api.recv)(dst, count * n, t, peer as c_int, raw, stream)
                }
            }
        };
        api.check(code, "NCCL")
    }

    /// Collective: begins to register `len` bytes at `addr`, memory of [`VmmChunk`](super::VmmChunk)s
    /// from the beginning of a mapping on. Done, and told by [`NcclWindow::handle`], when
    /// [`NcclComm::is_ready`] says so.
    ///
    /// # Safety
    /// The memory must stay mapped as long as work of the communicator uses it: the library has a
    /// mapping of its own, but knows this one, too.
    ///
    /// # Errors
    /// `Unsupported` if the library has no windows; `Aborted`; what the library reports.
    pub unsafe fn register(&self, addr: u64, len: usize) -> Result<NcclWindow> {
        let Some(register) = self.api.window else {
            let text = format!("NCCL {} has no windows", text(self.api.version));
            return Err(Error::new(ErrorKind::Unsupported, text).op("nccl").hint(NCCL.install));
        };
        let handle = self.lock();
        let raw = handle.as_ref().ok_or_else(aborted)?.0;
        let _current = self.ctx.bind()?;
        // A thread of the library writes it, even after this one has given up: never freed.
        let out: &'static AtomicPtr<c_void> = Box::leak(Box::default());
        // SAFETY: a live communicator; an output that lives for ever; the caller's contract for the
        // memory.
        let code = unsafe { register(raw, addr, len, out.as_ptr(), WINDOW_SYMMETRIC) };
        self.api.check(code, "ncclCommWindowRegister").map(|()| NcclWindow(out))
    }

    /// Ends what runs and what is queued on the device, and the communicator. Waits for no peer.
    pub fn abort(&self) {
        let Some(handle) = self.lock().take() else { return };
        let _current = match self.ctx.bind() {
            Ok(current) => current,
            Err(e) => return log::warn!("an NCCL communicator is leaked: {e}"),
        };
        // SAFETY: a live communicator, which nobody uses any more: it was taken out of the lock.
        if let Err(e) = self.api.check(unsafe { (self.api.abort)(handle.0) }, "ncclCommAbort") {
            log::warn!("{e}");
        }
    }
}

/// A registration of memory with a communicator, which ends with it.
#[derive(Clone, Copy, Debug)]
pub struct NcclWindow(&'static AtomicPtr<c_void>);

impl NcclWindow {
    /// `ncclWindow_t`, for kernels that are compiled with NCCL's device headers; none if the library
    /// has no symmetric memory for these devices.
    pub fn handle(&self) -> Option<u64> {
        let p = self.0.load(Ordering::Acquire);
        (!p.is_null()).then_some(p as u64)
    }
}

fn aborted() -> Error {
    Error::new(ErrorKind::Aborted, "the NCCL communicator was aborted").op("nccl")
}

impl Drop for NcclComm {
    /// A goodbye would wait for the peers; by now nothing of this rank is in flight.
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multicast_must_be_off() {
        no_multicast(Some("0")).unwrap();
        for set in [None, Some("1"), Some("")] {
            let e = no_multicast(set).unwrap_err();
            assert!(e.is_unavailable() && e.get_hint().is_some_and(|h| h.contains("=0")), "{e}");
        }
    }

    #[test]
    fn other_interfaces_are_named() {
        let found =
            Found { path: "/x/libnccl.so.2".into(), how: super::super::places::How::System };
        // One that is newer than what was tested is used, with a warning.
        for good in [22700, 22809, 23203, 24000] {
            known(good, &found).unwrap();
        }
        for (bad, name) in [(22605, "2.26.5"), (30000, "3.0.0"), (0, "0.0.0")] {
            let e = known(bad, &found).unwrap_err();
            let said = e.to_string();
            assert!(said.contains("/x/libnccl") && said.contains(name), "{e}");
            assert!(e.get_hint().is_some() && e.is_unavailable());
        }
    }

    #[test]
    fn the_library_is_there_or_the_error_says_what_to_do() {
        match NcclComm::library() {
            Ok((version, _)) => assert!(version.starts_with("2."), "{version}"),
            Err(e) => assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}"),
        }
        assert_eq!(size_of::<RawConfig>(), 48);
    }
}
