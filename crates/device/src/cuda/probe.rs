//! The devices of this host, and how they reach each other: nothing is allocated, and no context is
//! made (but for [`try_share`]).

use cudarc::driver::sys::{self, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute};
use tilewire_core::{Error, ErrorKind, Rank, Result};

use super::context::{CudaContext, device_count};
use super::error::check;
use super::vmm::{ShareBy, VmmChunk, VmmRange, granularity};

/// One device that this process may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its number, after CUDA_VISIBLE_DEVICES.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its place on the PCI bus, as `nvidia-smi` shows it.
    pub pci: String,
    /// Compute capability, as in 90.
    pub sm: u32,
    /// Multiprocessors.
    pub num_sms: u32,
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Memory can be mapped as the `vmm` backend does.
    pub vmm: bool,
    /// Memory can travel to other processes as a file descriptor.
    pub posix_fd: bool,
    /// Memory can travel to other hosts as a fabric handle.
    pub fabric: bool,
}

impl DeviceInfo {
    /// The architecture to compile for: `sm_90a` for instance.
    pub fn arch(&self) -> String {
        arch(self.sm)
    }
}

pub(super) fn arch(sm: u32) -> String {
    format!("sm_{sm}{}", if sm >= 90 { "a" } else { "" })
}

/// The way in which one device reaches the memory of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerInfo {
    /// It can be addressed.
    pub access: bool,
    /// Rank of the link among those of this device, 0 the best.
    pub performance_rank: i32,
    /// Atomic operations work over the link.
    pub native_atomics: bool,
}

fn device(ordinal: u32) -> Result<CUdevice> {
    let mut device = 0;
    // SAFETY: the callers have loaded the driver; it checks the ordinal; the output is valid.
    check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, "cuDeviceGet")?;
    Ok(device)
}

/// All devices that this process may use.
///
/// # Errors
/// `Unavailable` without a driver.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    (0..device_count()?).map(describe).collect()
}

pub(super) fn describe(ordinal: u32) -> Result<DeviceInfo> {
    use CUdevice_attribute as A;
    let d = device(ordinal)?;
    let attribute = |which: A| {
        let mut v = 0;
        // SAFETY: valid output and device.
        check(unsafe { sys::cuDeviceGetAttribute(&mut v, which, d) }, "cuDeviceGetAttribute")?;
        Ok::<_, Error>(v.max(0) as u32)
    };
    // What an old driver does not know, it does not have.
    let has = |which: A| attribute(which).is_ok_and(|v| v != 0);
    let (mut name, mut pci, mut memory_bytes) = ([0u8; 256], [0u8; 32], 0);
    // SAFETY: the buffers are as long as said, less one byte that keeps them terminated; a valid
    // device.
    unsafe {
        check(sys::cuDeviceGetName(name.as_mut_ptr().cast(), 255, d), "cuDeviceGetName")?;
        check(sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), 31, d), "cuDeviceGetPCIBusId")?;
        check(sys::cuDeviceTotalMem_v2(&mut memory_bytes, d), "cuDeviceTotalMem")?;
    }
    Ok(DeviceInfo {
        ordinal,
        name: text(&name),
        pci: text(&pci),
        sm: 10 * attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        num_sms: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes,
        vmm: has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED),
        posix_fd: has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
        fabric: has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
    })
}

fn text(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// Returns how device `from` reaches the memory of device `to`.
///
/// # Errors
/// `Unavailable` without a driver; `InvalidArgument` if there is no such pair of devices.
pub fn peer_info(from: u32, to: u32) -> Result<PeerInfo> {
    use CUdevice_P2PAttribute as P;
    let count = device_count()?;
    if from == to || from >= count || to >= count {
        return Err(Error::invalid("peer access is between two different devices")
            .expected(format_args!("two different ones below {count}"))
            .seen(format_args!("{from} and {to}")));
    }
    let (from, to) = (device(from)?, device(to)?);
    let attribute = |which: P| {
        let mut v = 0;
        // SAFETY: valid output and devices.
        let code = unsafe { sys::cuDeviceGetP2PAttribute(&mut v, which, from, to) };
        check(code, "cuDeviceGetP2PAttribute")?;
        Ok::<_, Error>(v)
    };
    Ok(PeerInfo {
        access: attribute(P::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
        performance_rank: attribute(P::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        native_atomics: attribute(P::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
    })
}

/// Does what the `vmm` backend does between two ranks: memory of `owner` is exported, imported and
/// mapped by `peer`, and what `peer` writes is read by `owner`.
///
/// # Errors
/// The step that failed, with the reason.
pub fn try_share(owner: &CudaContext, peer: &CudaContext, by: ShareBy) -> Result<()> {
    const WORD: [u8; 8] = *b"tilewire";
    let zero = Rank::new(0);
    let chunk = VmmChunk::create(owner, granularity(owner)?.max(granularity(peer)?), by)?;
    let len = chunk.len_bytes();
    let imported = match by {
        ShareBy::Fd => VmmChunk::import(peer, &chunk.export()?, len)?,
        ShareBy::Fabric => VmmChunk::import_fabric(peer, &chunk.export_fabric()?, len)?,
    };
    let own = VmmRange::map(owner, &[&chunk], chunk.len_bytes())?;
    own.zero(zero)?;
    let theirs = VmmRange::map(peer, &[&imported], chunk.len_bytes())?;
    theirs.write(zero, 64, &WORD)?;
    peer.synchronize()?;
    let mut got = [0; 8];
    own.read(zero, 64, &mut got)?;
    if got != WORD {
        return Err(Error::new(ErrorKind::Corrupt, "shared memory does not hold what was written")
            .expected(format_args!("{WORD:?}"))
            .seen(format_args!("{got:?}")));
    }
    Ok(())
}
