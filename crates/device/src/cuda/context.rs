//! Contexts: one per device and process.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent};
use tilewire_core::{Config, Error, ErrorKind, Result};

use super::borrow::Known;
use super::current::{Current, apart};
use super::error::check;
use super::event::CudaEvent;
use super::graph::Held;
use super::loader::available;
use super::module::CudaModule;
use super::probe::{DeviceInfo, arch, describe};
use super::vmm::{explain, free_descriptors};
use crate::jit::{Jit, KernelSpec, KernelTimes, Key};
use crate::{Point, Probe};

/// Number of devices that this process may use.
///
/// # Errors
/// `Unavailable` without a driver.
pub fn device_count() -> Result<u32> {
    available()?;
    let mut n = 0;
    // SAFETY: the driver is initialised; `n` is valid.
    check(unsafe { sys::cuDeviceGetCount(&mut n) }, "cuDeviceGetCount")?;
    Ok(n.max(0) as u32)
}

/// Version of CUDA that the driver supports, as 1000 * major + 10 * minor.
///
/// # Errors
/// `Unavailable` without a driver.
pub fn driver_version() -> Result<u32> {
    available()?;
    let mut v = 0;
    // SAFETY: the driver is initialised; `v` is valid.
    check(unsafe { sys::cuDriverGetVersion(&mut v) }, "cuDriverGetVersion")?;
    Ok(v.max(0) as u32)
}

/// The oldest GPUs that there are kernels for.
const MIN_SM: i32 = 80;

/// As in 90.
fn capability(device: CUdevice) -> Result<i32> {
    use CUdevice_attribute as A;
    let (mut major, mut minor) = (0, 0);
    let (x, y) = (
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    );
    // SAFETY: valid outputs and device.
    unsafe {
        check(sys::cuDeviceGetAttribute(&mut major, x, device), "cuDeviceGetAttribute")?;
        check(sys::cuDeviceGetAttribute(&mut minor, y, device), "cuDeviceGetAttribute")?;
    }
    Ok(10 * major + minor)
}

fn has_kernels(ordinal: u32, sm: i32) -> Result<()> {
    if sm >= MIN_SM {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unsupported, format!("CUDA device {ordinal} is too old"))
        .expected(format_args!("sm_{MIN_SM} or newer"))
        .seen(format_args!("sm_{sm}"))
        .hint("hide it with CUDA_VISIBLE_DEVICES, or use the `host` backend"))
}

/// Checks that the driver finds a device that there are kernels for.
///
/// # Errors
/// As [`available`](super::available); `Unsupported` if all devices are too old.
pub fn usable() -> Result<()> {
    let all: Vec<_> = (0..device_count()?)
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: the driver is initialised, the ordinal is in range, the output is valid.
            check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, "cuDeviceGet")?;
            has_kernels(ordinal, capability(device)?)
        })
        .collect();
    match all.iter().all(Result::is_err) {
        true => all.into_iter().collect(),
        false => Ok(()),
    }
}

/// A device that another process has for itself is no fault of ours.
fn taken(ordinal: u32, code: sys::CUresult, e: Error) -> Error {
    if code != sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE {
        return e;
    }
    let text = format!("CUDA device {ordinal} is taken: {}", e.message());
    let hint = "another process has it for itself where its compute mode says so (`nvidia-smi -q -d COMPUTE`): one rank \
                for each GPU, or `nvidia-smi -c DEFAULT`, which lets several in";
    Error::new(ErrorKind::Unavailable, text).hint(hint).cause(e)
}

/// The primary context of one device, shared with every other library of the process and kept until
/// the process ends.
#[derive(Clone)]
pub struct CudaContext(pub(super) Arc<Inner>);

pub(super) struct Inner {
    raw: CUcontext,
    device: CUdevice,
    ordinal: u32,
    /// Compute capability: launches ask for it.
    sm: u32,
    jit: OnceLock<Jit>,
    /// Machine code that was loaded: as long as the context, that is, as the process.
    modules: Mutex<HashMap<Key, CudaModule>>,
    /// Objects of finished work, to be freed later: see [`CudaContext::retire`].
    retired: Mutex<Vec<Thing>>,
    /// The same, once an event is reached.
    leaving: Mutex<Vec<(Arc<CudaEvent>, Thing)>>,
    /// Events without timing that nobody uses.
    events: Mutex<Vec<CUevent>>,
    /// Streams of others that were borrowed last.
    pub(super) borrowed: Mutex<Known>,
    /// Objects held by captures that were begun elsewhere, by the numbers of the captures.
    pub(super) captures: Mutex<Vec<(u64, Weak<Held>)>>,
    /// Device memory that is not freed although nothing uses it: see [`CudaContext::keep_memory`].
    kept: Mutex<Option<Vec<CUdeviceptr>>>,
    /// Called while a thread waits for the device: see [`CudaContext::watch`].
    watchers: Mutex<Vec<Weak<dyn Probe>>>,
}

/// Something that queued work refers to by address.
pub(super) type Thing = Arc<dyn Any + Send + Sync>;

/// So many unused events are kept: those of launches that are in flight together.
const SPARE_EVENTS: usize = 256;

/// An object of queued work whose end is not known.
struct Unsure {
    ctx: CudaContext,
    thing: Option<Thing>,
}

impl Drop for Unsure {
    fn drop(&mut self) {
        if let Err(e) = self.ctx.synchronize() {
            log::warn!(
                "the memory of queued work is leaked, because the device cannot be waited for: {e}"
            );
            std::mem::forget(self.thing.take());
        }
    }
}

// SAFETY: contexts may be made current, and events used, on any thread; what changes is behind
// locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaContext {
    /// The primary context of device `ordinal`.
    ///
    /// # Errors
    /// `Unavailable` without a driver; `InvalidArgument` if there is no such device.
    pub fn new(ordinal: u32) -> Result<Self> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(Error::invalid(format!("there is no CUDA device {ordinal}"))
                .expected(format_args!("less than {count}"))
                .seen(ordinal));
        }
        // Making a primary context takes a third of a second, and the driver makes one at a time:
        // it is kept for the life of the process.
        static KEPT: Mutex<Vec<CudaContext>> = Mutex::new(Vec::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(c) = kept.iter().find(|c| c.ordinal() == ordinal) {
            return Ok(c.clone());
        }
        let (mut device, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: the driver is initialised, the ordinal is in range, the output is valid.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, "cuDeviceGet")?;
        let sm = capability(device)?;
        has_kernels(ordinal, sm)?;
        // SAFETY: a device of the driver and a valid output.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
        check(code, "cuDevicePrimaryCtxRetain")
            .map_err(|e| taken(ordinal, code, explain(e, free_descriptors())))?;
        let new = Self(Arc::new(Inner {
            raw,
            device,
            ordinal,
            sm: sm as u32,
            jit: OnceLock::new(),
            modules: Mutex::default(),
            retired: Mutex::default(),
            leaving: Mutex::default(),
            events: Mutex::default(),
            borrowed: Mutex::default(),
            captures: Mutex::default(),
            kept: Mutex::default(),
            watchers: Mutex::default(),
        }));
        kept.push(new.clone());
        Ok(new)
    }

    /// Tells `probe` from now on, as long as it lives, while a thread waits for work of this
    /// device.
    pub fn watch(&self, probe: Weak<dyn Probe>) {
        let mut list = self.0.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|p| p.strong_count() > 0);
        list.push(probe);
    }

    pub(super) fn tell_waiting(&self, from: Duration, to: Duration) {
        // Cloned out: the callee may be the last owner of the watcher, too.
        let all: Vec<_> = {
            let mut list = self.0.watchers.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|p| p.strong_count() > 0);
            list.iter().filter_map(Weak::upgrade).collect()
        };
        apart(|| all.iter().for_each(|p| p.waiting(from, to)));
    }

    /// Makes the context current on the calling thread, until the result is dropped; captures
    /// elsewhere go on.
    pub(crate) fn bind(&self) -> Result<Current> {
        Current::new(self.0.raw)
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.0.raw
    }

    /// Takes things that a launch has found to be done with. It must not free them: that may wait
    /// for the device, and a kernel there for what this thread is about to queue.
    pub(super) fn retire(&self, things: impl IntoIterator<Item = Thing>) {
        self.0.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(things);
    }

    /// As [`CudaContext::retire`], once `event` is reached.
    pub(super) fn retire_behind(&self, event: Arc<CudaEvent>, thing: Thing) {
        self.0.leaving.lock().unwrap_or_else(PoisonError::into_inner).push((event, thing));
    }

    /// Returns what work uses that no event is behind: its end waits for the device.
    pub(super) fn unsure(&self, thing: Thing) -> Thing {
        Arc::new(Unsure { ctx: self.clone(), thing: Some(thing) })
    }

    /// Frees what queued work has used and no longer does: where the caller allocates or waits
    /// anyway, and at the end of a stream.
    pub fn free_retired(&self) {
        let take = |list: &Mutex<Vec<Thing>>| {
            std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner))
        };
        let things = take(&self.0.retired);
        let gone = self.left();
        // Not under a lock: a thing may have a stream, whose end comes here again.
        apart(|| drop((things, gone)));
    }

    /// Takes what is behind events that have been reached.
    fn left(&self) -> Vec<(Arc<CudaEvent>, Thing)> {
        let leaving = || self.0.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = std::mem::take(&mut *leaving());
        if waiting.is_empty() {
            return waiting;
        }
        let _current = self.bind();
        // Of a stream's events the first that is not reached is asked, as those behind it are not,
        // either.
        let mut busy = Vec::new();
        let (gone, mut rest): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(e, _)| {
            let last = e.last();
            let is_done = !busy.contains(&last.id) && e.is_done();
            if !is_done && last.capture.is_none() && !busy.contains(&last.id) {
                busy.push(last.id);
            }
            is_done
        });
        let mut all = leaving();
        rest.append(&mut all);
        *all = rest;
        gone
    }

    /// An event without timing that was used before: what it had recorded is nobody's business any
    /// more.
    pub(super) fn spare_event(&self) -> Option<CUevent> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Takes an event that nobody uses any more; false if there are enough.
    pub(super) fn keep_event(&self, event: CUevent) -> bool {
        let mut events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = events.len() < SPARE_EVENTS;
        if has_room {
            events.push(event);
        }
        has_room
    }

    /// From now on device memory is freed only when there is none left. For ranks that share a
    /// device in one process: a free waits for all kernels there, under a lock of the driver, and a
    /// kernel of this rank may wait for one that another rank's thread could then not launch.
    pub fn keep_memory(&self) {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
    }

    /// True if `ptr` was taken, not to be freed now.
    pub(super) fn keeps(&self, ptr: CUdeviceptr) -> bool {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.as_mut().map(|list| list.push(ptr)).is_some()
    }

    /// Frees what was kept; true if there was anything: memory that was not there may be now.
    pub(super) fn free_kept(&self) -> bool {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let list = kept.as_mut().map(std::mem::take).unwrap_or_default();
        // SAFETY: allocated by `CudaMemory`, whose last owner gave them here instead of freeing
        // them.
        list.iter().for_each(|ptr| unsafe {
            sys::cuMemFree_v2(*ptr);
        });
        !list.is_empty()
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The device's name.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn name(&self) -> Result<String> {
        let mut buf = [0u8; 256];
        // SAFETY: the buffer is as long as said, less one byte that keeps it terminated.
        let code = unsafe { sys::cuDeviceGetName(buf.as_mut_ptr().cast(), 255, self.0.device) };
        check(code, "cuDeviceGetName")?;
        let len = buf.iter().position(|&b| b == 0).unwrap_or(0);
        Ok(String::from_utf8_lossy(&buf[..len]).into_owned())
    }

    /// Returns what the device is.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn info(&self) -> Result<DeviceInfo> {
        describe(self.0.ordinal)
    }

    pub(crate) fn attribute(&self, which: CUdevice_attribute) -> Result<i32> {
        let mut v = 0;
        // SAFETY: valid output and device.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut v, which, self.0.device) };
        check(code, "cuDeviceGetAttribute")?;
        Ok(v)
    }

    /// The architecture to compile for: `sm_90a` for instance.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn arch(&self) -> Result<String> {
        Ok(arch(self.sm()))
    }

    /// Compute capability, as in 90.
    pub(super) fn sm(&self) -> u32 {
        self.0.sm
    }

    /// Number of multiprocessors.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn num_sms(&self) -> Result<u32> {
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.attribute(which)?.max(0) as u32)
    }

    /// Bytes of shared memory that a block may have.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn max_shared_bytes(&self) -> Result<u32> {
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        Ok(self.attribute(which)?.max(0) as u32)
    }

    /// Bytes of the device's memory that are free and that there are, of all processes.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let _current = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, the outputs are valid.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// The machine code of `spec` (whose architecture should be [`CudaContext::arch`]), found or
    /// made, and loaded: once for all plans of the process.
    ///
    /// # Errors
    /// As [`Jit::cubin`] and [`CudaModule::load`].
    pub fn module(&self, spec: &KernelSpec) -> Result<CudaModule> {
        let key = spec.key();
        let loaded = || self.0.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(m) = loaded().get(&key) {
            return Ok(m.clone());
        }
        // Not under the lock: a compilation takes seconds, and others need other kernels.
        let jit = self.jit()?;
        let _busy = jit.busy();
        let new = CudaModule::load(self, &jit.cubin(spec)?.0)?;
        Ok(loaded().entry(key).or_insert(new).clone())
    }

    /// Compiles those of `specs` that are neither embedded nor cached, on all cores, and loads
    /// them; how many there were. Plans that ask for them one by one would compile on one core.
    /// What fails is left for the plan that needs it, which says why. Nothing is compiled ahead
    /// without a cache: its locks keep ranks from all compiling the same.
    ///
    /// # Errors
    /// As [`CudaContext::jit`].
    pub fn compile_ahead(&self, specs: &[KernelSpec]) -> Result<usize> {
        let jit = self.jit()?;
        if jit.cache().is_err() {
            return Ok(0);
        }
        let _busy = jit.busy();
        let missing: Vec<_> = specs.iter().filter(|s| jit.would_compile(s)).collect();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(spec) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(e) = self.module(spec) {
                    log::debug!("`{}` ahead of its plan: {e}", spec.name);
                }
            }
        };
        if !missing.is_empty() {
            log::info!("compiling {} kernels for {}", missing.len(), self.arch()?);
        }
        std::thread::scope(|s| {
            for _ in 1..cores.min(missing.len()) {
                // Where there are no more threads, fewer compile.
                if std::thread::Builder::new().spawn_scoped(s, work).is_err() {
                    break;
                }
            }
            work();
        });
        Ok(missing.len())
    }

    /// Returns how many kernels were asked for on this device, and how long it took to find,
    /// compile and load them.
    pub fn kernel_times(&self) -> KernelTimes {
        self.0.jit.get().map(Jit::times).unwrap_or_default()
    }

    /// Returns the source of this device's kernels, configured from the environment at the first
    /// call.
    ///
    /// # Errors
    /// `Config` for a bad variable.
    pub fn jit(&self) -> Result<&Jit> {
        if self.0.jit.get().is_none() {
            let new = Jit::new(&Config::from_env()?);
            return Ok(self.0.jit.get_or_init(|| new));
        }
        self.0.jit.get().ok_or_else(|| Error::internal("the kernels' source was just set"))
    }

    /// True if this device can address the memory of device `other`.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn can_access(&self, other: u32) -> Result<bool> {
        let mut yes = 0;
        // SAFETY: valid output; the driver checks the ordinal.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&mut yes, self.0.device, other as i32) };
        check(code, "cuDeviceCanAccessPeer")?;
        Ok(yes == 1)
    }

    /// Blocks until all work of the context has run. Captures go on, unless memory is kept
    /// ([`CudaContext::keep_memory`]) or there is none left: then those of this context end.
    ///
    /// # Errors
    /// `DeviceLost` if a kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.bind()?;
        let keeps = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let mut ptr = 0;
        // `cuCtxSynchronize` ends every capture of the context, of any thread and mode. To free
        // memory waits as well (CUDA Programming Guide, stream-ordered memory allocator: it
        // synchronises across all streams), and harms no capture. SAFETY: a context is current, the
        // output is valid.
        let code = (!keeps).then(|| unsafe { sys::cuMemAlloc_v2(&mut ptr, 16) });
        match code {
            // SAFETY: a context is current.
            None | Some(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => unsafe {
                check(sys::cuCtxSynchronize(), "cuCtxSynchronize")
            },
            Some(code) => {
                check(code, "cuMemAlloc")?;
                // SAFETY: allocated above, freed once.
                check(unsafe { sys::cuMemFree_v2(ptr) }, "cuMemFree")
            }
        }
    }

    pub(crate) fn device(&self) -> CUdevice {
        self.0.device
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`. A failure at the end of the process is harmless.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_another_process_has_is_named() {
        use sys::CUresult as C;
        let e = || Error::new(ErrorKind::Unavailable, "cuDevicePrimaryCtxRetain: busy");
        let other = taken(3, C::CUDA_ERROR_SYSTEM_NOT_READY, e());
        assert_eq!(other.message(), e().message());
        let e = taken(3, C::CUDA_ERROR_DEVICE_UNAVAILABLE, e());
        assert!(e.is_unavailable() && e.message().contains("device 3 is taken"), "{e}");
        assert!(e.get_hint().is_some_and(|h| h.contains("nvidia-smi -c DEFAULT")), "{e}");
    }

    #[test]
    fn an_old_device_is_refused_with_a_hint() {
        for sm in [80, 90, 100, 120] {
            has_kernels(0, sm).unwrap();
        }
        let e = has_kernels(3, 75).unwrap_err();
        assert!(e.kind() == ErrorKind::Unsupported && e.get_hint().is_some(), "{e}");
        assert!(e.to_string().contains("sm_75") && e.message().contains('3'), "{e}");
    }
}
