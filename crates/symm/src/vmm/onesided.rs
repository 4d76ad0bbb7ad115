//! [`OneSided`] by kernels and copy engines.

use std::any::Any;
use std::sync::Arc;

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};

use super::store::VmmStore;
use crate::control::{NUM_SIGNALS, OFF_SIGNALS};
use crate::heap::Heap;
use crate::onesided::{Caps, OneSided, SignalSlot, check_channel};

/// [`OneSided`] on the `vmm` backend.
///
/// Data moves by copy engines; signals, waits and barriers are kernels of one block. A
/// [`OneSided::put_signal`] is a data copy and an 8-byte copy of the running total behind it.
#[derive(Clone)]
pub struct VmmOneSided {
    heap: Heap,
    store: Arc<VmmStore>,
}

impl VmmOneSided {
    /// One-sided access to `heap`.
    ///
    /// # Errors
    /// `Unsupported` if the heap is not in device memory.
    pub fn new(heap: &Heap) -> Result<Self> {
        let Some(store) = &heap.0.vmm else {
            return Err(Error::new(ErrorKind::Unsupported, "this heap is not in device memory")
                .expected("vmm")
                .seen(heap.backend()));
        };
        Ok(Self { heap: heap.clone(), store: store.clone() })
    }

    /// The device of this rank.
    pub fn context(&self) -> &CudaContext {
        &self.store.ctx
    }

    /// Device address, on this rank's device, of `len` bytes at `offset` of `peer`'s chunk: what
    /// kernels compute as base + rank * stride + offset.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap.
    pub fn addr(&self, peer: Rank, offset: usize, len: usize) -> Result<u64> {
        self.heap.check_range(peer, offset, len)?;
        self.store.heap.addr(peer, offset, len)
    }

    fn team(&self) -> &crate::LiveTeam {
        self.heap.team()
    }

    fn slot(&self, peer: Rank, slot: SignalSlot) -> Result<(u32, u32)> {
        self.heap.check_range(peer, 0, 0)?;
        Ok((peer.get(), slot.index() as u32))
    }

    /// Everything that queued work refers to by address.
    fn hold(&self, stream: &CudaStream, buffer: Option<&CudaMemory>) {
        stream.hold(|| -> Arc<dyn Any + Send + Sync> {
            Arc::new((self.heap.clone(), buffer.cloned()))
        });
    }

    fn launch(&self, stream: &CudaStream, kernel: &Kernel, at: (u32, u32), n: u64) -> Result<()> {
        self.team().check()?;
        self.hold(stream, None);
        let args = LaunchArgs::new().arg(&self.store.param).arg(&at.0).arg(&at.1).arg(&n);
        // SAFETY: signal, bump_epoch and wait take (TwTeam, u32, u32, u64); what the team points
        // to lives as long as the store, whose `Drop` waits for the device.
        unsafe { kernel.launch(stream, Grid::new(1, 1), args) }
    }

    fn copy(&self, stream: &CudaStream, dst: u64, src: u64, buffer: &CudaMemory) -> Result<()> {
        self.team().check()?;
        self.hold(stream, Some(buffer));
        // SAFETY: both ranges were checked and are held; that nobody else uses them meanwhile is
        // the protocol's business (credits), as for every one-sided transfer.
        unsafe { stream.copy(dst, src, buffer.len_bytes()) }
    }
}

impl OneSided for VmmOneSided {
    type Stream = CudaStream;
    type Buffer = CudaMemory;

    fn heap(&self) -> &Heap {
        &self.heap
    }

    fn caps(&self) -> Caps {
        Caps { direct_peer: true, get: true, graph: true, recoverable: true }
    }

    fn put(
        &self,
        stream: &CudaStream,
        dst: Rank,
        dst_offset: usize,
        src: &CudaMemory,
    ) -> Result<()> {
        let to = self.addr(dst, dst_offset, src.len_bytes())?;
        self.team().0.traffic.put(dst, src.len_bytes());
        self.copy(stream, to, src.addr(), src)
    }

    fn get(
        &self,
        stream: &CudaStream,
        src: Rank,
        src_offset: usize,
        out: &CudaMemory,
    ) -> Result<()> {
        let from = self.addr(src, src_offset, out.len_bytes())?;
        self.team().0.traffic.get(src, out.len_bytes());
        self.copy(stream, out.addr(), from, out)
    }

    fn signal(&self, stream: &CudaStream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        let at = self.slot(dst, slot)?;
        self.team().0.traffic.signal(dst);
        self.launch(stream, &self.store.kernels.signal, at, n)
    }

    fn wait(&self, stream: &CudaStream, src: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        let at = self.slot(src, slot)?;
        self.launch(stream, &self.store.kernels.wait, at, n)
    }

    fn barrier(&self, stream: &CudaStream, channel: usize) -> Result<()> {
        check_channel(channel)?;
        self.team().check()?;
        self.hold(stream, None);
        let channel = channel as u32;
        let args = LaunchArgs::new().arg(&self.store.param).arg(&channel);
        // SAFETY: the barrier takes (TwTeam, u32) and one block of 64 threads, one for each of at
        // most 64 members; lifetimes as in `launch`.
        unsafe { self.store.kernels.barrier.launch(stream, Grid::new(1, 64), args) }
    }

    /// The new total is made before the data is copied; the flag is the total, copied behind the
    /// data on the same stream. Nothing here is baked into a graph but addresses.
    fn put_signal(
        &self,
        stream: &CudaStream,
        dst: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
    ) -> Result<()> {
        // Everything that can be refused is refused before the total moves: a total that is one
        // ahead would let the peer's next wait pass before its data.
        let at = self.slot(dst.0, slot)?;
        self.addr(dst.0, dst.1, src.len_bytes())?;
        let column = (slot.index() * self.team().size() + self.team().rank().idx()) * 16;
        let flag = self.store.control.addr(dst.0, OFF_SIGNALS + column, 8)?;
        self.launch(stream, &self.store.kernels.bump_epoch, at, 1)?;
        self.put(stream, dst.0, dst.1, src)?;
        self.team().0.traffic.signal(dst.0);
        let total = self.store.counters.sent(slot.index(), dst.0);
        // SAFETY: 8 bytes each; only this rank writes the flag, and the total changes only by
        // later kernels of this stream (one stream at a time for each slot and destination).
        unsafe { stream.copy(flag, total, 8) }
    }

    fn fence(&self, _stream: &CudaStream) -> Result<()> {
        // Copies and kernels of one stream run one after the other.
        self.team().check()
    }

    fn quiet(&self, stream: &CudaStream) -> Result<()> {
        // A copy is complete at its destination before the stream goes on.
        self.fence(stream)
    }

    fn check_counters(&self) -> Result<()> {
        let (team, size) = (self.team(), self.team().size());
        let mut counts = vec![0u64; NUM_SIGNALS * size * 2];
        let bytes = bytemuck::cast_slice_mut(&mut counts);
        self.store.control.read(team.rank(), OFF_SIGNALS, bytes)?;
        let used = self.store.counters.expected()?.download()?;
        for (i, used) in used.chunks_exact(8).enumerate() {
            let used: u64 = bytemuck::pod_read_unaligned(used);
            if counts[2 * i] != used {
                let src = Rank::new((i % size) as u32);
                return Err(team.uneven(i / size, src, used, counts[2 * i]));
            }
        }
        Ok(())
    }
}
