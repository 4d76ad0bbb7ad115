//! NVIDIA's collectives, opened at run time: 2.27 and newer, as far as it is 2.
//!
//! # Rules
//! - Communicators are non-blocking: no call waits for a peer, so whoever waits can give up. One
//!   that was adopted is as its maker made it.
//! - [`NcclComm::abort`] ends what runs on the device: kernels poll its flag.
//! - A communicator that is ours ends with its value. One that was adopted goes on: it is its
//!   maker's.
//! - The library is not opened unless `NCCL_NVLS_ENABLE=0` keeps it off NVLink multicast, and
//!   `NCCL_GRAPH_REGISTER=0` from registering one side of a captured transfer alone.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tilewire_core::{DType, Error, ErrorKind, Result};

use super::context::CudaContext;
use super::library::Open;
use super::library_search::{Found, NCCL};
use super::nccl_api::{Api, Code, Raw, RawConfig, RawWait, SUCCESS, WINDOW_SYMMETRIC, text};
use super::stream::CudaStream;

/// Limit for a call that holds a communicator; then the communicator is aborted while the call is
/// in it.
const IN_CALL: Duration = Duration::from_millis(300);

/// `ncclUniqueId`: where the members of a communicator meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct NcclId(pub [u8; 128]);

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
        /// Rank that receives the result.
        root: u32,
    },
    /// One rank's to all.
    Broadcast {
        /// The root's.
        src: u64,
        /// Address of the result.
        dst: u64,
        /// Of all.
        count: usize,
        /// Rank that sends.
        root: u32,
    },
    /// To a peer that receives as many.
    Send {
        /// Mine.
        src: u64,
        /// Of all.
        count: usize,
        /// The rank that it goes to.
        peer: u32,
    },
    /// From a peer that sends as many.
    Recv {
        /// Address of the received elements.
        dst: u64,
        /// Of all.
        count: usize,
        /// The rank that it comes from.
        peer: u32,
    },
    /// Elements into a peer's window, then one to what it counts of my signals. A library from 2.29
    /// on; no multiprocessor takes part where the peer is near.
    PutSignal {
        /// Mine, in a window of mine.
        src: u64,
        /// Of all.
        count: usize,
        /// The rank that it goes to.
        peer: u32,
        /// My handle of the window: [`NcclWindow::handle`].
        window: u64,
        /// In bytes, in the peer's.
        offset: usize,
    },
    /// One to what a peer counts of my signals.
    Signal {
        /// The rank that it goes to.
        peer: u32,
    },
    /// Waits for more signals of a peer, so many as no wait before has taken. A wait of the
    /// driver's: it knows no deadline and no abort.
    WaitSignals {
        /// Rank that signals.
        peer: u32,
        /// Number of its signals.
        count: u32,
    },
}

/// The operation that combines elements.
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
    /// None once it is aborted or given back. Held during calls: an abort frees what they use.
    raw: Mutex<Option<Handle>>,
    /// The same, for who must end a call that holds the lock.
    ptr: AtomicPtr<c_void>,
    /// Rank and size.
    me: (u32, usize),
    adopted: bool,
    /// It was aborted, or revoked.
    over: AtomicBool,
    /// It is about to be.
    condemned: AtomicBool,
    /// It was aborted beside a call that held the lock.
    gone: AtomicBool,
}

struct Handle(Raw);

// SAFETY: the library allows calls on a communicator from any thread, one at a time, which the lock
// around the handle sees to.
unsafe impl Send for Handle {}

fn no_host_puts(version: c_int) -> Error {
    let text = format!("NCCL {} does not support puts and signals from the host", text(version));
    Error::new(ErrorKind::Unsupported, text)
        .op("nccl")
        .hint("use NCCL 2.29 or newer, or the puts and signals of a heap, which need no library")
}

impl NcclComm {
    /// The library's version, as in `2.28.9`, and which copy it is.
    ///
    /// # Errors
    /// `Unavailable` without the library, naming every place that was searched and the command that
    /// installs it, for one that is older than 2.27 or newer than 2, and unless
    /// `NCCL_NVLS_ENABLE=0`; `Mismatch` if two copies are loaded.
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

    /// Begins to join the communicator of `size` ranks as `rank`: [`NcclComm::is_ready`] says when
    /// it is done.
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
        Ok(Self::with(api, ctx, raw, ((rank, size), false)))
    }

    fn with(
        api: &'static Open<Api>,
        ctx: &CudaContext,
        raw: Raw,
        (me, adopted): ((u32, usize), bool),
    ) -> Arc<Self> {
        let new = Self {
            api,
            ctx: ctx.clone(),
            ptr: AtomicPtr::new(raw),
            raw: Mutex::new(Some(Handle(raw))),
            me,
            adopted,
            over: AtomicBool::default(),
            condemned: AtomicBool::default(),
            gone: AtomicBool::default(),
        };
        Arc::new(new)
    }

    /// Takes up a communicator of the caller's, an `ncclComm_t` on the device of `ctx`. It is never
    /// destroyed here, but an [`NcclComm::abort`], which a fault of its team is, revokes it:
    /// nothing else ends its kernels. A library without `ncclCommRevoke` aborts it, and it is gone
    /// for its maker, too: [`NcclComm::release`] tells.
    ///
    /// # Safety
    /// `raw` must be a communicator of the NCCL that is loaded in this process, and live until this
    /// value is dropped or has released it. No other thread may call NCCL with it meanwhile, but
    /// for looking at its errors. All ranks must queue what they queue on it, here and elsewhere,
    /// in one order.
    ///
    /// # Errors
    /// As [`NcclComm::library`]; `InvalidArgument` for null, or a communicator of another device;
    /// what the library reports of it.
    pub unsafe fn adopt(ctx: &CudaContext, raw: u64) -> Result<Arc<Self>> {
        let api = Api::get()?;
        let raw = raw as Raw;
        if raw.is_null() {
            return Err(Error::invalid("the NCCL communicator is null").op("nccl"));
        }
        let ask = |what: unsafe extern "C" fn(Raw, *mut c_int) -> Code, call: &str| {
            let mut out = -1;
            // SAFETY: the caller's contract; a valid output.
            api.check(unsafe { what(raw, &mut out) }, call)?;
            u32::try_from(out).map_err(|_| Error::internal(format!("{call} returned {out}")))
        };
        let device = ask(api.device, "ncclCommCuDevice")?;
        if device != ctx.ordinal() {
            return Err(Error::invalid("the NCCL communicator belongs to another device")
                .op("nccl")
                .expected(ctx.ordinal())
                .seen(device));
        }
        let me = (ask(api.rank, "ncclCommUserRank")?, ask(api.count, "ncclCommCount")? as usize);
        let new = Self::with(api, ctx, raw, (me, true));
        new.is_ready()?;
        Ok(new)
    }

    /// Gives the communicator to the caller, who ends it; `None` if it was aborted. One that was
    /// revoked can only be destroyed: [`NcclComm::is_over`]. Other owners of this value learn of
    /// that `Aborted` from now on.
    pub fn release(&self) -> Option<u64> {
        let handle = self.lock().take();
        handle.filter(|_| !self.gone.load(Ordering::Acquire)).map(|h| h.0 as u64)
    }

    /// True once it was aborted, or revoked.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Says that it is about to be aborted: nobody may begin to use it.
    pub fn condemn(&self) {
        self.condemned.store(true, Ordering::Release);
    }

    /// True once it is about to be aborted.
    pub fn is_condemned(&self) -> bool {
        self.is_over() || self.condemned.load(Ordering::Acquire)
    }

    /// My rank, and the number of ranks.
    pub fn me(&self) -> (u32, usize) {
        self.me
    }

    /// Its device.
    pub fn context(&self) -> &CudaContext {
        &self.ctx
    }

    /// True for one that the caller made.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self, handle: &Option<Handle>) -> Result<Raw> {
        let live = handle.as_ref().filter(|_| !self.is_condemned());
        live.map(|h| h.0).ok_or_else(aborted)
    }

    /// True if nothing is in progress: the rank has joined, or what it queued last is on the
    /// stream.
    ///
    /// # Errors
    /// `Aborted`; what the library reports of this communicator.
    pub fn is_ready(&self) -> Result<bool> {
        // A communicator that blocks holds the lock while it waits for peers.
        let handle = match self.raw.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
        };
        let raw = self.live(&handle)?;
        let mut code = SUCCESS;
        // SAFETY: a live communicator and a valid output.
        let call = unsafe { (self.api.async_error)(raw, &mut code) };
        self.api.check(call, "ncclCommGetAsyncError")?;
        self.api.check(code, "communicator")?;
        Ok(code == SUCCESS)
    }

    /// Queues operations as one group. Its last part is done by a thread of the library: the work
    /// is on the stream, or in its capture, when [`NcclComm::is_ready`] says so, and nothing else
    /// may be queued there before.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device for as many elements as are said, until
    /// the work has run (and be held by the graph if captured). No other work may write what is
    /// read, or use what is written, meanwhile. All ranks must make the same calls.
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
            return Err(Error::invalid(
                "the stream and the communicator belong to different devices",
            ));
        }
        let handle = self.lock();
        let raw = self.live(&handle)?;
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
        let rma = || api.rma.ok_or_else(|| no_host_puts(api.version));
        // What is only moved is bytes.
        let (t, n) = number.map_or((1, dtype.size()), |t| (t, 1));
        let adds = matches!(
            op,
            NcclOp::ReduceScatter { .. } | NcclOp::AllReduce { .. } | NcclOp::Reduce { .. }
        );
        if adds && number.is_none() {
            return Err(Error::invalid(format!("tilewire does not sum {dtype} through NCCL")));
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
                NcclOp::PutSignal { src, count, peer, window, offset } => {
                    let (peer, window) = (peer as c_int, window as Raw);
                    let put = rma()?.put_signal;
                    put(src, count * n, t, peer, window, offset, 0, 0, 0, raw, stream)
                }
                NcclOp::Signal { peer } => (rma()?.signal)(peer as c_int, 0, 0, 0, raw, stream),
                NcclOp::WaitSignals { peer, count } => {
                    let (count, peer) = (count as c_int, peer as c_int);
                    let mut wait = RawWait { count, peer, signal: 0, context: 0 };
                    (rma()?.wait)(1, &mut wait, raw, stream)
                }
            }
        };
        api.check(code, "NCCL")
    }

    /// Collective: begins to register `len` bytes at `addr`, memory of
    /// [`VmmChunk`](super::VmmChunk)s from the beginning of a mapping on. Done, and reported by
    /// [`NcclWindow::handle`], when [`NcclComm::is_ready`] says so.
    ///
    /// # Safety
    /// The memory must stay mapped as long as work of the communicator uses it: the library has a
    /// mapping of its own, but knows this one, too.
    ///
    /// # Errors
    /// `Unsupported` if the library has no windows; `Aborted`; what the library reports.
    pub unsafe fn register(&self, addr: u64, len: usize) -> Result<NcclWindow> {
        let Some(register) = self.api.window else {
            let text = format!("NCCL {} does not support windows", text(self.api.version));
            return Err(Error::new(ErrorKind::Unsupported, text).op("nccl").hint(NCCL.install));
        };
        let handle = self.lock();
        let raw = self.live(&handle)?;
        let _current = self.ctx.bind()?;
        // A thread of the library writes it, even after this one has given up: never freed.
        let out: &'static AtomicPtr<c_void> = Box::leak(Box::default());
        // SAFETY: a live communicator; an output that lives for ever; the caller's contract for the
        // memory.
        let code = unsafe { register(raw, addr, len, out.as_ptr(), WINDOW_SYMMETRIC) };
        self.api.check(code, "ncclCommWindowRegister").map(|()| NcclWindow(out))
    }

    /// Ends a registration of this rank; nothing that uses it may be queued any more. Needed for
    /// communicators that go on: the end of one is that of its windows.
    ///
    /// # Errors
    /// `Aborted`; what the library reports.
    pub fn unregister(&self, window: NcclWindow) -> Result<()> {
        let (Some(end), Some(win)) = (self.api.window_end, window.handle()) else { return Ok(()) };
        let handle = self.lock();
        let raw = self.live(&handle)?;
        let _current = self.ctx.bind()?;
        // SAFETY: a live communicator, and a window of it, which its users have left.
        self.api.check(unsafe { end(raw, win as Raw) }, "ncclCommWindowDeregister")
    }

    /// Ends what runs and what is queued on the device, and the communicator. Waits for no peer. An
    /// adopted one is revoked where the library can do that, so that its maker can destroy it; else
    /// it is gone for its maker, too.
    pub fn abort(&self) {
        self.condemn();
        let start = Instant::now();
        let mut handle = loop {
            match self.raw.try_lock() {
                Ok(handle) => break Some(handle),
                Err(TryLockError::Poisoned(p)) => break Some(p.into_inner()),
                // A call of an adopted communicator that blocks: nothing else ends it.
                Err(TryLockError::WouldBlock) if self.adopted && start.elapsed() > IN_CALL => {
                    break None;
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if self.over.swap(true, Ordering::AcqRel) || handle.as_ref().is_some_and(|h| h.is_none()) {
            return;
        }
        let raw = self.ptr.load(Ordering::Acquire);
        let _current = match self.ctx.bind() {
            Ok(current) => current,
            Err(e) => return log::warn!("an NCCL communicator is leaked: {e}"),
        };
        let ended = match self.api.revoke.filter(|_| self.adopted) {
            // SAFETY: a live communicator; the library allows this beside a call that waits.
            Some(revoke) => self.api.check(unsafe { revoke(raw, 0) }, "ncclCommRevoke"),
            None => {
                if let Some(handle) = &mut handle {
                    **handle = None;
                } else {
                    self.gone.store(true, Ordering::Release);
                }
                // SAFETY: a live communicator, which nobody uses any more, but for a call that this
                // ends.
                self.api.check(unsafe { (self.api.abort)(raw) }, "ncclCommAbort")
            }
        };
        if let Err(e) = ended {
            log::warn!("{e}");
        }
    }
}

/// A registration of memory with a communicator, which ends with it.
#[derive(Clone, Copy, Debug)]
pub struct NcclWindow(&'static AtomicPtr<c_void>);

impl NcclWindow {
    /// `ncclWindow_t`, for kernels that are compiled with NCCL's device headers; none if the
    /// library has no symmetric memory for these devices.
    pub fn handle(&self) -> Option<u64> {
        let p = self.0.load(Ordering::Acquire);
        (!p.is_null()).then_some(p as u64)
    }
}

fn aborted() -> Error {
    Error::new(ErrorKind::Aborted, "the NCCL communicator was aborted, or given back").op("nccl")
}

impl Drop for NcclComm {
    /// A goodbye would wait for the peers; by now nothing of this rank is in flight.
    fn drop(&mut self) {
        if !self.adopted {
            self.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_there_or_the_error_says_what_to_do() {
        match NcclComm::library() {
            Ok((version, _)) => assert!(version.starts_with("2."), "{version}"),
            Err(e) => assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}"),
        }
        assert_eq!(size_of::<RawConfig>(), 48);
    }
}
