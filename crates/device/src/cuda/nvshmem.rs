//! NVIDIA's NVSHMEM, opened at run time: the host library of 3.4 and newer, without its device
//! library.
//!
//! # Rules
//! - It lives once in a process, and is never finalized: that is a meeting of all its ranks.
//! - [`Nvshmem::init`] and [`Nvshmem::malloc`] wait for all ranks, for as long as it takes: whoever
//!   calls them does so on a thread that can be left behind.
//! - The library is not opened unless `NVSHMEM_DISABLE_NVLS=1` keeps it off NVLink multicast.

use std::ffi::{c_int, c_void};
use std::path::Path;

use tilewire_core::{Error, ErrorKind, Result};

use super::context::CudaContext;
use super::library::{InUse, Lib, Open};
use super::library_search::{Found, NVSHMEM, Places};

const NO_MULTICAST: &str = "NVSHMEM_DISABLE_NVLS";
/// The first version whose interface is the one below, and the major version that has it.
const MIN: (c_int, c_int) = (3, 4);
const MAJOR: c_int = 3;
/// The newest whose functions `cargo xtask test --only libraries` looks up. Later ones are used,
/// too, with a warning: they take the version of each structure as an argument, and keep to it.
const TESTED_MINOR: c_int = 8;
/// `NVSHMEMX_INIT_WITH_UNIQUEID`.
const WITH_UNIQUEID: u32 = 1 << 3;

/// `nvshmemx_uniqueid_v1`: where the ranks meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(4))]
pub struct NvshmemId(pub [u8; 128]);

/// `nvshmemx_uniqueid_args_v1`.
#[repr(C)]
struct IdArgs {
    version: c_int,
    id: *const NvshmemId,
    my_rank: c_int,
    num_ranks: c_int,
}

/// `nvshmemx_init_args_v1`.
#[repr(C)]
struct InitArgs {
    version: c_int,
    id: IdArgs,
    content: [u8; 96],
}

/// `nvshmemx_init_attr_v1`, which newer libraries read by its version.
#[repr(C)]
struct InitAttr {
    version: c_int,
    mpi_comm: *mut c_void,
    args: InitArgs,
}

// The sizes that the headers of 3.4.5 and 3.8.0 assert, and the places of what is set.
const _: () = {
    assert!(size_of::<NvshmemId>() == 128 && align_of::<NvshmemId>() == 4);
    assert!(size_of::<IdArgs>() == 24 && size_of::<InitArgs>() == 128);
    assert!(size_of::<InitAttr>() == 144);
    assert!(std::mem::offset_of!(IdArgs, id) == 8 && std::mem::offset_of!(IdArgs, num_ranks) == 20);
    assert!(
        std::mem::offset_of!(InitArgs, id) == 8 && std::mem::offset_of!(InitArgs, content) == 32
    );
    assert!(std::mem::offset_of!(InitAttr, args) == 16);
};

/// Versions of the structures, as the headers write them.
const fn version(size: usize) -> c_int {
    (1 << 16) + size as c_int
}

impl InitAttr {
    fn new() -> Self {
        let id = IdArgs {
            version: version(size_of::<IdArgs>()),
            id: std::ptr::null(),
            my_rank: -1,
            num_ranks: -1,
        };
        let args = InitArgs { version: version(size_of::<InitArgs>()), id, content: [0; 96] };
        Self { version: version(size_of::<Self>()), mpi_comm: std::ptr::null_mut(), args }
    }
}

/// The library's functions, as its headers declare them.
struct Api {
    version: (c_int, c_int, c_int),
    unique_id: unsafe extern "C" fn(*mut NvshmemId) -> c_int,
    set_id: unsafe extern "C" fn(c_int, c_int, *const NvshmemId, *mut InitAttr) -> c_int,
    init: unsafe extern "C" fn(u32, *mut InitAttr) -> c_int,
    my_pe: unsafe extern "C" fn() -> c_int,
    num_pes: unsafe extern "C" fn() -> c_int,
    malloc: unsafe extern "C" fn(usize) -> u64,
    peer: unsafe extern "C" fn(u64, c_int) -> u64,
}

impl Api {
    fn get() -> Result<&'static Open<Self>> {
        Self::load(None)
    }

    fn load(named: Option<&Path>) -> Result<&'static Open<Self>> {
        static STATE: InUse<Api> = InUse::new();
        let find = |named: Option<&Path>| {
            no_multicast(std::env::var(NO_MULTICAST).ok().as_deref())?;
            Places::of_process().find(&NVSHMEM, named)
        };
        STATE.get(named, find, Self::open)
    }

    fn open(found: &Found) -> Result<Self> {
        // SAFETY: the library's initialisers have no preconditions.
        let lib = unsafe { Lib::open(&found.path, &NVSHMEM, false)? };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the type is that of `nvshmem_api.h`; three valid outputs.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int) =
                lib.symbol("nvshmemx_vendor_get_version_info")?;
            get(&mut major, &mut minor, &mut patch);
        }
        known((major, minor, patch), found)?;
        // SAFETY: the types are those of `nvshmem_api.h` and `nvshmemx_api.h`, where addresses are
        // pointers.
        unsafe {
            Ok(Self {
                version: (major, minor, patch),
                unique_id: lib.symbol("nvshmemx_get_uniqueid")?,
                set_id: lib.symbol("nvshmemx_set_attr_uniqueid_args")?,
                init: lib.symbol("nvshmemx_hostlib_init_attr")?,
                my_pe: lib.symbol("nvshmem_my_pe")?,
                num_pes: lib.symbol("nvshmem_n_pes")?,
                malloc: lib.symbol("nvshmem_malloc")?,
                peer: lib.symbol("nvshmem_ptr")?,
            })
        }
    }
}

fn check(code: c_int, call: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Internal, format!("{call} failed with {code}"))
        .op("nvshmem")
        .hint("NVSHMEM_DEBUG=INFO makes the library say why"))
}

fn no_multicast(set: Option<&str>) -> Result<()> {
    if set == Some("1") {
        return Ok(());
    }
    let text = format!("NVSHMEM is not opened unless {NO_MULTICAST}=1");
    Err(Error::new(ErrorKind::Unavailable, text).op("nvshmem").seen(set.unwrap_or("not set")).hint(
        "set NVSHMEM_DISABLE_NVLS=1: NVLink multicast is never used here; `tilewire run` sets it",
    ))
}

fn known(v: (c_int, c_int, c_int), found: &Found) -> Result<()> {
    if v.0 == MAJOR && (v.0, v.1) >= MIN {
        if v.1 > TESTED_MINOR {
            log::warn!(
                "NVSHMEM {} at {} is newer than what was tested, {MAJOR}.{TESTED_MINOR}",
                text_of(v),
                found.path.display()
            );
        }
        return Ok(());
    }
    let text = format!("{} has another interface than tilewire knows", found.path.display());
    Err(Error::new(ErrorKind::Unavailable, text)
        .op("nvshmem")
        .expected(format_args!("{}.{} or a later {MAJOR}", MIN.0, MIN.1))
        .seen(text_of(v))
        .hint(NVSHMEM.install))
}

/// As in 3.4.5.
fn text_of(v: (c_int, c_int, c_int)) -> String {
    format!("{}.{}.{}", v.0, v.1, v.2)
}

/// Loads NVSHMEM, from `named` (a file or its folder) if given, and returns where it is.
///
/// # Errors
/// As [`Nvshmem::library`]; `Mismatch` if another copy than `named` is loaded or in use.
pub fn load_nvshmem(named: Option<&Path>) -> Result<Found> {
    Api::load(named).map(|o| o.found.clone())
}

/// The library, one for a process.
pub struct Nvshmem;

impl Nvshmem {
    /// The library's version, as in `3.4.5`, and which copy it is.
    ///
    /// # Errors
    /// `Unavailable` without the library, naming every place that was searched and the command that
    /// installs it, for another major version, and unless `NVSHMEM_DISABLE_NVLS=1`; `Mismatch` if
    /// two copies are loaded.
    pub fn library() -> Result<(String, Found)> {
        let api = Api::get()?;
        Ok((text_of(api.version), api.found.clone()))
    }

    /// A new meeting place, made by one rank for all.
    ///
    /// # Errors
    /// As [`Nvshmem::library`]; what the library reports.
    pub fn unique_id() -> Result<NvshmemId> {
        let api = Api::get()?;
        let mut id = NvshmemId([0; 128]);
        id.0[..4].copy_from_slice(&version(size_of::<NvshmemId>()).to_ne_bytes());
        // SAFETY: a valid output with its version.
        check(unsafe { (api.unique_id)(&mut id) }, "nvshmemx_get_uniqueid")?;
        Ok(id)
    }

    /// Collective, without a deadline: joins `size` ranks as `rank`, with memory on the device of
    /// `ctx`. Once in a process.
    ///
    /// # Errors
    /// As [`Nvshmem::library`]; what the library reports.
    pub fn init(ctx: &CudaContext, id: &NvshmemId, (rank, size): (u32, usize)) -> Result<()> {
        let api = Api::get()?;
        let _current = ctx.bind()?;
        let mut attr = InitAttr::new();
        // SAFETY: a valid identity and attributes with their versions.
        let code = unsafe { (api.set_id)(rank as c_int, size as c_int, id, &mut attr) };
        check(code, "nvshmemx_set_attr_uniqueid_args")?;
        // SAFETY: attributes of these ranks; a context is current; the identity lives until the
        // call ends.
        check(unsafe { (api.init)(WITH_UNIQUEID, &mut attr) }, "nvshmemx_hostlib_init_attr")?;
        // SAFETY: the library is initialised.
        let (me, all) = unsafe { ((api.my_pe)(), (api.num_pes)()) };
        if (me, all) == (rank as c_int, size as c_int) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Mismatch, "NVSHMEM was initialised for other ranks")
            .op("nvshmem")
            .expected(format_args!("PE {rank} of {size}"))
            .seen(format_args!("PE {me} of {all}")))
    }

    /// Collective over all ranks, without a deadline: `len_bytes` (the same on all) on each device.
    /// Returns the address of mine. What is in it is undefined.
    ///
    /// # Safety
    /// [`Nvshmem::init`] must have returned on this process.
    ///
    /// # Errors
    /// `Exhausted` if a rank has not as much.
    pub unsafe fn malloc(ctx: &CudaContext, len_bytes: usize) -> Result<u64> {
        let api = Api::get()?;
        let _current = ctx.bind()?;
        // SAFETY: the caller's contract.
        match unsafe { (api.malloc)(len_bytes) } {
            0 => Err(Error::new(
                ErrorKind::Exhausted,
                format!("NVSHMEM cannot allocate {len_bytes} bytes"),
            )
            .op("nvshmem")
            .hint("NVSHMEM_MAX_MEMORY_PER_GPU limits its memory")),
            at => Ok(at),
        }
    }

    /// Returns the address at which this device reaches `rank`'s part of the symmetric memory at
    /// `addr`; none if it cannot.
    ///
    /// # Safety
    /// `addr` must have been returned by [`Nvshmem::malloc`], of at least `rank + 1` ranks.
    ///
    /// # Errors
    /// As [`Nvshmem::library`].
    pub unsafe fn peer(ctx: &CudaContext, addr: u64, rank: u32) -> Result<Option<u64>> {
        let api = Api::get()?;
        let _current = ctx.bind()?;
        // SAFETY: the caller's contract.
        let at = unsafe { (api.peer)(addr, rank as c_int) };
        Ok((at != 0).then_some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::super::library_search::How;
    use super::*;

    #[test]
    fn multicast_must_be_off() {
        no_multicast(Some("1")).unwrap();
        for set in [None, Some("0"), Some("")] {
            let e = no_multicast(set).unwrap_err();
            assert!(e.is_unavailable() && e.get_hint().is_some_and(|h| h.contains("=1")), "{e}");
        }
    }

    #[test]
    fn other_interfaces_are_named() {
        let found = Found { path: "/x/libnvshmem_host.so.3".into(), how: How::System };
        for good in [(3, 4, 5), (3, 8, 0), (3, 12, 0)] {
            known(good, &found).unwrap();
        }
        for bad in [(3, 3, 9), (2, 9, 0), (4, 0, 0)] {
            let e = known(bad, &found).unwrap_err();
            assert!(e.is_unavailable() && e.to_string().contains("/x/libnvshmem"), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains("nvidia-nvshmem-cu13")), "{e}");
        }
    }

    /// The attributes that are passed have the versions and offsets of NVSHMEM's headers.
    #[test]
    fn attributes_are_those_of_the_headers() {
        let a = InitAttr::new();
        assert_eq!(
            (a.version, a.args.version, a.args.id.version),
            (65536 + 144, 65536 + 128, 65536 + 24)
        );
        assert!(a.mpi_comm.is_null() && a.args.id.id.is_null());
        assert_eq!((a.args.id.my_rank, a.args.id.num_ranks), (-1, -1));
    }

    /// The library, where it is installed, reads and writes the structures that are declared here;
    /// that needs no GPU.
    #[test]
    fn the_library_agrees_on_the_places() {
        let api = match Api::get() {
            Ok(api) => api,
            Err(e) => return tilewire_testing::did_not_run(tilewire_testing::Lack::Nvshmem, e),
        };
        let (id, mut attr) = (Nvshmem::unique_id().unwrap(), InitAttr::new());
        // SAFETY: as in `init`.
        check(unsafe { (api.set_id)(1, 2, &id, &mut attr) }, "set").unwrap();
        let a = &attr.args.id;
        assert_eq!((a.my_rank, a.num_ranks, attr.version), (1, 2, 65536 + 144));
        // SAFETY: set just now, to a copy or to ours; 128 bytes either way.
        assert!(!a.id.is_null() && unsafe { *a.id } == id);
    }

    #[test]
    fn the_library_is_there_or_the_error_says_what_to_do() {
        match Nvshmem::library() {
            Ok((version, _)) => assert!(version.starts_with("3."), "{version}"),
            Err(e) => assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}"),
        }
    }
}
