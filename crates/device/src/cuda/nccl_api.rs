//! The functions of NCCL's library, as `nccl.h` declares them; what only newer ones have is
//! optional.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use tilewire_core::{Error, ErrorKind, Result};

use super::error::check;
use super::library::{InUse, Lib, Open};
use super::library_search::{Found, NCCL, Places};
use super::nccl::NcclId;

pub(super) type Code = c_int;
pub(super) type Raw = *mut c_void;

pub(super) const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;
/// The oldest whose calls are used here, as `ncclGetVersion` writes it.
const MIN_VERSION: c_int = 22700;
/// The only major version whose declarations are used here, and the newest minor one whose
/// functions `cargo xtask test --only libraries` looks up.
const MAJOR: c_int = 2;
const TESTED_MINOR: c_int = 32;
/// `NCCL_WIN_COLL_SYMMETRIC`: every rank's part lies at the same offset.
pub(super) const WINDOW_SYMMETRIC: c_int = 1;
const NO_MULTICAST: &str = "NCCL_NVLS_ENABLE";
/// The variable by which NCCL registers memory of captured calls.
const REGISTERS: &str = "NCCL_GRAPH_REGISTER";

/// `ncclConfig_t` as of 2.17, which every newer library reads.
#[repr(C)]
pub(super) struct RawConfig {
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
    pub fn non_blocking() -> Self {
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

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
pub(super) struct RawWait {
    pub count: c_int,
    pub peer: c_int,
    pub signal: c_int,
    pub context: c_int,
}

type PutSignal =
    unsafe extern "C" fn(u64, usize, c_int, c_int, Raw, usize, c_int, c_int, u32, Raw, Raw) -> Code;

/// Puts and signals that the host queues: 2.29 and newer.
#[derive(Clone, Copy)]
pub(super) struct Rma {
    pub put_signal: PutSignal,
    pub signal: unsafe extern "C" fn(c_int, c_int, c_int, u32, Raw, Raw) -> Code,
    pub wait: unsafe extern "C" fn(c_int, *mut RawWait, Raw, Raw) -> Code,
}

impl Rma {
    /// All of them, or none.
    fn of(lib: &Lib<'_>) -> Option<Self> {
        // SAFETY: the types are those of `nccl.h`, where device addresses are pointers.
        unsafe {
            Some(Self {
                put_signal: lib.optional("ncclPutSignal")?,
                signal: lib.optional("ncclSignal")?,
                wait: lib.optional("ncclWaitSignal")?,
            })
        }
    }
}

type Transfer = unsafe extern "C" fn(u64, usize, c_int, c_int, Raw, Raw) -> Code;

/// The library's functions, as `nccl.h` declares them.
pub(super) struct Api {
    pub version: c_int,
    pub error_string: unsafe extern "C" fn(Code) -> *const c_char,
    pub last_error: unsafe extern "C" fn(Raw) -> *const c_char,
    pub unique_id: unsafe extern "C" fn(*mut NcclId) -> Code,
    pub init: unsafe extern "C" fn(*mut Raw, c_int, NcclId, c_int, *mut RawConfig) -> Code,
    pub async_error: unsafe extern "C" fn(Raw, *mut Code) -> Code,
    pub abort: unsafe extern "C" fn(Raw) -> Code,
    pub count: unsafe extern "C" fn(Raw, *mut c_int) -> Code,
    pub rank: unsafe extern "C" fn(Raw, *mut c_int) -> Code,
    pub device: unsafe extern "C" fn(Raw, *mut c_int) -> Code,
    pub group_start: unsafe extern "C" fn() -> Code,
    pub group_end: unsafe extern "C" fn() -> Code,
    pub all_gather: unsafe extern "C" fn(u64, u64, usize, c_int, Raw, Raw) -> Code,
    pub reduce_scatter: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    pub all_reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    pub reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, c_int, Raw, Raw) -> Code,
    pub broadcast: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Raw, Raw) -> Code,
    pub send: Transfer,
    pub recv: Transfer,
    pub window: Option<unsafe extern "C" fn(Raw, u64, usize, *mut Raw, c_int) -> Code>,
    pub window_end: Option<unsafe extern "C" fn(Raw, Raw) -> Code>,
    pub revoke: Option<unsafe extern "C" fn(Raw, c_int) -> Code>,
    pub rma: Option<Rma>,
}

impl Api {
    pub fn get() -> Result<&'static Open<Self>> {
        Self::load(None)
    }

    pub fn load(named: Option<&Path>) -> Result<&'static Open<Self>> {
        static STATE: InUse<Api> = InUse::new();
        let find = |named: Option<&Path>| {
            no_multicast(std::env::var(NO_MULTICAST).ok().as_deref())?;
            registers_nothing(std::env::var(REGISTERS).ok().as_deref())?;
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
                count: lib.symbol("ncclCommCount")?,
                rank: lib.symbol("ncclCommUserRank")?,
                device: lib.symbol("ncclCommCuDevice")?,
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
                window_end: lib.optional("ncclCommWindowDeregister"),
                revoke: lib.optional("ncclCommRevoke"),
                rma: Rma::of(&lib),
            })
        }
    }

    /// Success, or work that goes on elsewhere.
    pub fn check(&self, code: Code, call: &str) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |s: *const c_char| {
            // SAFETY: the library's strings are terminated, and are copied before it is called
            // again.
            if s.is_null() { "".into() } else { unsafe { CStr::from_ptr(s) }.to_string_lossy() }
        };
        // SAFETY: any code has a static string; the last error of the process belongs to no
        // communicator.
        let (what, last) = unsafe {
            (text((self.error_string)(code)), text((self.last_error)(std::ptr::null_mut())))
        };
        Err(failed(code, call, (&what, last.trim()), is_lost))
    }
}

/// By the code and NCCL's own words: it has one code for all that a call of CUDA may say.
fn failed(code: Code, call: &str, (what, last): (&str, &str), is_lost: fn() -> bool) -> Error {
    let kind = match code {
        1 if last.contains("out of memory") => ErrorKind::Exhausted,
        1 if is_lost() => ErrorKind::DeviceLost,
        2 => ErrorKind::Io,
        4 | 5 => ErrorKind::InvalidArgument,
        6 => ErrorKind::PeerDead,
        _ => ErrorKind::Internal,
    };
    let e = Error::new(kind, format!("{call}: {what} {last}").trim_end().to_owned()).op("nccl");
    let more = "NCCL_DEBUG=INFO makes NCCL say why";
    match kind {
        ErrorKind::Exhausted => e.hint(format!(
            "free memory of the device: NCCL takes some beside the heap's; {more}"
        )),
        ErrorKind::Io => e.hint(format!(
            "{more}; its ranks need space in /dev/shm (in a container: `--shm-size=1g`) and the network interface \
             that NCCL_SOCKET_IFNAME names"
        )),
        _ => e.hint(more),
    }
}

/// Once a kernel has failed, every call of its context does.
fn is_lost() -> bool {
    let (mut free, mut all) = (0, 0);
    super::loader::available().is_ok_and(|()| {
        // SAFETY: the driver is loaded; valid outputs.
        let code = unsafe { cudarc::driver::sys::cuMemGetInfo_v2(&mut free, &mut all) };
        check(code, "cuMemGetInfo").is_err_and(|e| e.kind() == ErrorKind::DeviceLost)
    })
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

/// Checks that NCCL registers no memory of captured calls.
///
/// It does so by itself where memory comes from `cuMemCreate`, each rank alone. If only one side of
/// a send and its receive is registered, the sender counts one step and the receiver many
/// (`sendIpcReg`, `recvIpcReg` of 2.28): from some megabytes on both wait without a deadline. Heaps
/// are such memory, and tensors mostly are not.
fn registers_nothing(set: Option<&str>) -> Result<()> {
    if set == Some("0") {
        return Ok(());
    }
    let text = format!("NCCL is not opened unless {REGISTERS}=0");
    Err(Error::new(ErrorKind::Unavailable, text).op("nccl").seen(set.unwrap_or("not set")).hint(
        "set NCCL_GRAPH_REGISTER=0: where NCCL registers the memory of one side of a captured \
         transfer alone, both wait for ever; `tilewire run` sets it",
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
pub(super) fn text(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
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
    fn memory_of_captured_calls_must_not_be_registered() {
        registers_nothing(Some("0")).unwrap();
        for set in [None, Some("1"), Some("")] {
            let e = registers_nothing(set).unwrap_err();
            assert!(e.is_unavailable() && e.get_hint().is_some_and(|h| h.contains("=0")), "{e}");
        }
    }

    #[test]
    fn codes_become_kinds_and_hints() {
        let memory = "Cuda failure 2 'out of memory'";
        for (code, last, lost, kind, hint) in [
            (1, memory, false, ErrorKind::Exhausted, "free memory"),
            (1, "Cuda failure 700", true, ErrorKind::DeviceLost, "NCCL_DEBUG"),
            (1, "Cuda failure 1", false, ErrorKind::Internal, "NCCL_DEBUG"),
            (2, "No space left on device", false, ErrorKind::Io, "--shm-size"),
            (3, "", false, ErrorKind::Internal, "NCCL_DEBUG"),
            (5, "", false, ErrorKind::InvalidArgument, "NCCL_DEBUG"),
            (6, "", false, ErrorKind::PeerDead, "NCCL_DEBUG"),
        ] {
            let e = failed(code, "ncclX", ("words", last), if lost { || true } else { || false });
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.message().contains(last) && e.message().contains("ncclX: words"), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains(hint)), "{e}");
        }
        // A machine without a driver, or a context that works, has lost nothing.
        assert!(!is_lost());
    }

    #[test]
    fn other_interfaces_are_named() {
        let found = Found {
            path: "/x/libnccl.so.2".into(),
            how: super::super::library_search::How::System,
        };
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
}
