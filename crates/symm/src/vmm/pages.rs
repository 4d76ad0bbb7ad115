//! Control pages that kernels of all ranks reach.

use std::os::fd::AsFd;

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{CudaContext, HostRegistered, VmmRange};

use crate::control;
use crate::heap::exchange_chunks;
use crate::map::{Mapping, PAGE, shared_file};
use crate::team::LiveTeam;

/// The control pages of all ranks: on their devices, or where these do not reach each other in the
/// host's memory.
pub(super) enum ControlMemory {
    Device(VmmRange),
    Host(HostPages),
}

/// The registrations go before the mapping.
pub(super) struct HostPages {
    parts: Vec<HostRegistered>,
    map: Mapping,
    page: usize,
}

impl HostPages {
    /// Collective.
    pub fn create(team: &LiveTeam, ctx: &CudaContext) -> Result<Self> {
        let page = control::device_page_bytes(team.size()).next_multiple_of(PAGE);
        let own = shared_file("tilewire-device-control", page);
        let part = own.as_ref().map(|f| vec![f.as_fd()]).map_err(Error::clone);
        let fds = exchange_chunks(team, part)?.concat_fds();
        let made = Mapping::new(&fds, page, page).and_then(|map| {
            // SAFETY: mapped as long as the registration, which is dropped first; all accesses are
            // atomic words, or are made before anybody else knows the page.
            let part = |i| unsafe { HostRegistered::new(ctx, map.ptr(i), page) };
            let parts = (0..team.size()).map(part).collect::<Result<Vec<_>>>()?;
            let even =
                |(i, p): (usize, &HostRegistered)| p.addr() == parts[0].addr() + (i * page) as u64;
            if !parts.iter().enumerate().all(even) {
                let text = "the device sees the host's memory at other addresses";
                return Err(Error::new(ErrorKind::Unsupported, text)
                    .op("heap")
                    .hint("use GPUs that reach each other (`nvidia-smi topo -p2p r`)"));
            }
            Ok(Self { parts, map, page })
        });
        team.settle("vmm-pages", made)
    }
}

impl ControlMemory {
    /// Returns the device address of rank 0's page.
    pub fn base(&self) -> u64 {
        match self {
            Self::Device(r) => r.base(),
            Self::Host(h) => h.parts[0].addr(),
        }
    }

    /// Returns the bytes from each rank's page to the next one's.
    pub fn stride(&self) -> u64 {
        match self {
            Self::Device(r) => r.stride() as u64,
            Self::Host(h) => h.page as u64,
        }
    }

    /// Returns the device address of `len` bytes at `offset` of `rank`'s page.
    pub fn addr(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        match self {
            Self::Device(r) => r.addr(rank, offset, len),
            Self::Host(h) => match h.parts.get(rank.idx()) {
                Some(p) if offset + len <= h.page => Ok(p.addr() + offset as u64),
                _ => Err(Error::invalid("the control page is not mapped").peer(rank)),
            },
        }
    }

    pub fn read(&self, rank: Rank, offset: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Device(r) => r.read(rank, offset, out),
            Self::Host(h) => {
                h.map.read(rank.idx(), offset, out);
                Ok(())
            }
        }
    }

    /// Makes my page ready: zeros, and its header.
    pub fn begin(&self, team: &LiveTeam) -> Result<()> {
        let rank = team.rank();
        let words = control::header(rank, team.size(), team.id(), team.generation());
        let header = bytemuck::cast_slice(&words);
        match self {
            Self::Device(r) => {
                r.zero(rank)?;
                r.write(rank, 0, header)
            }
            Self::Host(h) => {
                h.map.fill(rank.idx(), 0, h.page, 0);
                h.map.write(rank.idx(), 0, header);
                Ok(())
            }
        }
    }
}
