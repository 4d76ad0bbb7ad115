//! The view of a heap in device memory for kernels and operations: this rank's part, and the
//! addresses of peers' parts.

use std::any::Any;
use std::sync::Arc;

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, LaunchArgs};
use tilewire_kernels::abi::{TwPoison, TwTeam};

use super::fault::BadInput;
use super::store::VmmStore;
use crate::control::OFF_SIGNALS;
use crate::heap::Heap;
use crate::{LiveTeam, SignalSlot};

/// This rank's part of a heap in device memory. Nothing here needs peers' addresses.
#[derive(Clone)]
pub struct DeviceHeap {
    pub(super) heap: Heap,
    pub(super) store: Arc<VmmStore>,
}

/// The state that kernels need to meet the other ranks by themselves: addresses of peers' memory,
/// and the words that they signal with. It exists only where GPUs reach each other's memory.
#[derive(Clone)]
pub struct DeviceTeam(DeviceHeap);

impl DeviceHeap {
    /// Returns this rank's part of `heap`.
    ///
    /// # Errors
    /// `Unsupported` if the heap is not in device memory.
    pub fn new(heap: &Heap) -> Result<Self> {
        let Some(store) = &heap.0.vmm else {
            return Err(Error::new(ErrorKind::Unsupported, "this heap is not in device memory")
                .expected("vmm")
                .seen(heap.backend())
                .hint("make it with `BackendKind::Vmm`; on the host use `Heap::host_transport`"));
        };
        Ok(Self { heap: heap.clone(), store: store.clone() })
    }

    /// Returns the team with its peers' addresses, where GPUs reach each other, or nobody else is.
    pub(super) fn reach(&self) -> Option<DeviceTeam> {
        (self.store.near || self.team().size() == 1).then(|| DeviceTeam(self.clone()))
    }

    /// Returns the heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the device of this rank.
    pub fn context(&self) -> &CudaContext {
        &self.store.ctx
    }

    /// Returns the multiprocessors that this rank may count on: those of its device, divided among
    /// the team's ranks on it. A kernel that waits for peers must leave multiprocessors for theirs.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn num_sms(&self) -> Result<u32> {
        Ok((self.store.ctx.num_sms()? / self.store.on_device as u32).max(1))
    }

    /// Address on this rank's device of `len` bytes at `offset` of its own chunk.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap.
    pub fn addr(&self, offset: usize, len: usize) -> Result<u64> {
        self.peer_addr(self.team().rank(), offset, len)
    }

    pub(super) fn peer_addr(&self, peer: Rank, offset: usize, len: usize) -> Result<u64> {
        self.heap.check_range(peer, offset, len)?;
        self.store.address(peer, offset, len)
    }

    /// Returns the words by which kernels of this rank learn of faults and signal: `TwTeam` of
    /// `comm/team.cuh`. The memory that it points to lives as long as the heap.
    pub fn team_param(&self) -> TwTeam {
        self.store.param
    }

    /// Counts `len` bytes that a kernel of the caller writes to `dst`'s chunk, as a put.
    pub fn count_put(&self, dst: Rank, len: usize) {
        self.team().0.traffic.put(dst, len);
    }

    /// Counts a word that a kernel of the caller writes to `dst`, as a signal.
    pub fn count_signal(&self, dst: Rank) {
        self.team().0.traffic.signal(dst);
    }

    pub(super) fn team(&self) -> &LiveTeam {
        self.heap.team()
    }

    /// Keeps everything that queued work refers to by address.
    pub(super) fn hold(&self, stream: &CudaStream, buffer: Option<&CudaMemory>) {
        stream.hold(|| -> Arc<dyn Any + Send + Sync> {
            Arc::new((self.heap.clone(), buffer.cloned()))
        });
    }

    /// Queues zeros to `len` bytes at `offset` of my own chunk.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap.
    pub fn clear(&self, stream: &CudaStream, offset: usize, len: usize) -> Result<()> {
        let at = self.addr(offset, len)?;
        self.hold(stream, None);
        // SAFETY: the range was checked and is held; the protocol keeps every other access apart,
        // as for every one-sided transfer.
        unsafe { stream.fill(at, 0, len) }
    }

    /// Queues a kernel for each eight outputs, which fills them with their byte if the team is over
    /// when it runs. It is the last work of a launch, so that the output of a failed launch cannot
    /// be taken for a result.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn poison_if_over(&self, stream: &CudaStream, outs: &[(CudaMemory, u8)]) -> Result<()> {
        for some in outs.chunks(8) {
            let mut p = TwPoison { out: [0; 8], len: [0; 8], byte: [0; 8] };
            for (i, (m, byte)) in some.iter().enumerate() {
                self.hold(stream, Some(m));
                (p.out[i], p.len[i], p.byte[i]) = (m.addr(), m.len_bytes() as u64, *byte);
            }
            let args = LaunchArgs::new().arg(&self.store.param).arg(&p);
            let most = p.len.iter().copied().max().unwrap_or(0);
            let grid = Grid::new((most / 65536).clamp(1, 64) as u32, 256);
            // SAFETY: the kernel takes (TwTeam, TwPoison); outputs are held; lifetimes as in
            // `launch`.
            unsafe { self.store.kernels.poison.launch(stream, grid, args)? };
        }
        Ok(())
    }

    /// Queues a kernel that ends the team if the word `status` is not 0 when it runs: a kernel of
    /// this stream has found an invalid input. `status` must be one u32.
    ///
    /// # Errors
    /// `InvalidArgument` for a status of another size; the fault of the team.
    pub fn fail_if(&self, stream: &CudaStream, status: &CudaMemory, what: BadInput) -> Result<()> {
        if status.len_bytes() != 4 {
            return Err(Error::invalid("a status is one u32").seen(status.len_bytes()));
        }
        self.team().check()?;
        self.hold(stream, Some(status));
        let (addr, what) = (status.addr(), what as u32);
        let args = LaunchArgs::new().arg(&self.store.param).arg(&addr).arg(&what);
        // SAFETY: the kernel takes (TwTeam, u32*, u32); the status is held; lifetimes as in
        // `launch`.
        unsafe { self.store.kernels.fail_if.launch(stream, Grid::new(1, 1), args) }
    }
}

impl DeviceTeam {
    /// Returns the device address, on this rank's device, of `len` bytes at `offset` of `peer`'s
    /// chunk. Kernels compute it as base + rank * stride + offset.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap.
    pub fn addr(&self, peer: Rank, offset: usize, len: usize) -> Result<u64> {
        self.0.peer_addr(peer, offset, len)
    }

    /// Returns the bytes from a rank's chunk to the next one's, as this device sees them; addresses
    /// wrap.
    ///
    /// # Errors
    /// `Unsupported` if the chunks are not in even steps: with more than two ranks of the backend
    /// `nvshmem`.
    pub fn stride(&self) -> Result<u64> {
        self.0.store.heap.stride()
    }

    /// Returns the team as a parameter of kernels that meet by themselves: `TwTeam` of
    /// `comm/team.cuh`. The memory that it points to lives as long as the heap.
    pub fn param(&self) -> TwTeam {
        self.0.team_param()
    }

    /// Returns how kernels find the signals of `slot`: its number, by which the counts that this
    /// rank expects are found, and the address of the count that rank 0 has raised here. The count
    /// of each rank lies 16 bytes behind that of the rank before it.
    ///
    /// # Errors
    /// `InvalidArgument` if the control page has no such slot.
    pub fn counts(&self, slot: SignalSlot) -> Result<(u32, u64)> {
        let (team, store) = (self.0.team(), &self.0.store);
        let at = OFF_SIGNALS + slot.index() * team.size() * 16;
        let at = store.control.addr(team.rank(), at, team.size() * 16);
        Ok((slot.index() as u32, at.map_err(|e| e.of_team(team))?))
    }
}
