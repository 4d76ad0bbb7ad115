//! [`OneSided`] by kernels and copy engines.

use std::any::Any;
use std::sync::Arc;

use tilewire_core::{BackendKind, Error, ErrorKind, Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};

use super::fault::BadInput;
use super::store::VmmStore;
use crate::control::{NUM_SIGNALS, OFF_SIGNALS};
use crate::heap::Heap;
use crate::onesided::{Caps, OneSided, SignalSlot, check_channel, check_slots};
use tilewire_kernels::abi::{TwPoison, TwTeam};

/// [`OneSided`] on the backends in device memory: `vmm`, `nccl` and `nvshmem`.
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
                .seen(heap.backend())
                .hint("make it with `BackendKind::Vmm`; on the host use `HostOneSided`"));
        };
        Ok(Self { heap: heap.clone(), store: store.clone() })
    }

    /// The device of this rank.
    pub fn context(&self) -> &CudaContext {
        &self.store.ctx
    }

    /// Multiprocessors that this rank may count on: those of its device, divided among the team's ranks
    /// there. A kernel that waits for peers must leave room for theirs.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn num_sms(&self) -> Result<u32> {
        Ok((self.store.ctx.num_sms()? / self.store.on_device as u32).max(1))
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

    /// Bytes from a rank's chunk to the next one's, as this device sees them; addresses wrap.
    ///
    /// # Errors
    /// `Unsupported` if they do not lie in even steps: with more than two ranks of the backend `nvshmem`.
    pub fn stride(&self) -> Result<u64> {
        self.store.heap.stride()
    }

    /// Queues zeros to `len` bytes at `offset` of my own chunk.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap.
    pub fn clear(&self, stream: &CudaStream, offset: usize, len: usize) -> Result<()> {
        let at = self.addr(self.team().rank(), offset, len)?;
        self.hold(stream, None);
        // SAFETY: the range was checked and is held; that nobody else uses it meanwhile is the
        // protocol's business, as for every one-sided transfer.
        unsafe { stream.fill(at, 0, len) }
    }

    /// Queues a get of rows of `width` bytes: from byte `src.1` of the chunk of rank `src.0` on,
    /// `src.2` bytes apart, to the beginning of `out.0`, `out.1` bytes apart.
    ///
    /// # Errors
    /// `InvalidArgument` if the rows are not in the heap, or not in `out`.
    pub fn get_rows(
        &self,
        stream: &CudaStream,
        src: (Rank, usize, usize),
        out: (&CudaMemory, usize),
        (width, rows): (usize, usize),
    ) -> Result<()> {
        if width * rows == 0 {
            return Ok(());
        }
        let reach = |pitch: usize| (rows - 1) * pitch + width;
        let from = self.addr(src.0, src.1, reach(src.2))?;
        let to = out.0.slice(0, reach(out.1))?;
        if src.0 != self.team().rank() {
            self.team().0.traffic.get(src.0, width * rows);
        }
        self.team().check()?;
        self.hold(stream, Some(&to));
        // SAFETY: both ranges were checked and are held; that nobody else uses them meanwhile is
        // the protocol's business (credits), as for every one-sided transfer.
        unsafe { stream.copy_rows((to.addr(), out.1), (from, src.2), (width, rows)) }
    }

    /// The team as a parameter of kernels that meet by themselves: `TwTeam` of `comm/team.cuh`. What it
    /// points to lives as long as the heap.
    pub fn team_param(&self) -> TwTeam {
        self.store.param
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

    /// A kernel of the team that takes (TwTeam, u32, u32, u32).
    fn launch_slots(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        threads: u32,
        (a, b, c): (usize, usize, usize),
    ) -> Result<()> {
        self.team().check()?;
        self.hold(stream, None);
        let (a, b, c) = (a as u32, b as u32, c as u32);
        let args = LaunchArgs::new().arg(&self.store.param).arg(&a).arg(&b).arg(&c);
        // SAFETY: the kernels that are passed here take a team and up to three u32 (more arguments
        // than a kernel has are not read); lifetimes as in `launch`.
        unsafe { kernel.launch(stream, Grid::new(1, threads), args) }
    }

    /// The beginning of a launch, as one kernel: tells every peer on slot `credit` that my receive
    /// areas are free, waits for the same of all peers, and raises the totals of `num` slots from
    /// `first` on as [`OneSided::advance`] does.
    ///
    /// # Errors
    /// `InvalidArgument` if there are no such slots; the fault of the team.
    pub fn enter(
        &self,
        stream: &CudaStream,
        credit: SignalSlot,
        first: SignalSlot,
        num: usize,
    ) -> Result<()> {
        check_slots(first, num)?;
        for p in self.team().peers() {
            self.team().0.traffic.signal(p);
        }
        let at = (credit.index(), first.index(), num);
        self.launch_slots(stream, &self.store.kernels.enter, 64, at)
    }

    /// Waits for one more count of every peer on `slot`, as one kernel.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn wait_peers(&self, stream: &CudaStream, slot: SignalSlot) -> Result<()> {
        self.launch_slots(stream, &self.store.kernels.wait_peers, 64, (slot.index(), 0, 0))
    }

    /// Fills each output with its byte if the team is over by then: the last work of a launch, so
    /// that what a failed launch left cannot be taken for a result. One kernel for eight outputs.
    ///
    /// # Errors
    /// What the driver reports.
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
            // SAFETY: the kernel takes (TwTeam, TwPoison); outputs are held; lifetimes as in `launch`.
            unsafe { self.store.kernels.poison.launch(stream, grid, args)? };
        }
        Ok(())
    }

    /// Ends the team if the word `status` is not 0 by then: a kernel of this stream has found an
    /// input that cannot be. `status` must be one u32.
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
        // SAFETY: the kernel takes (TwTeam, u32*, u32); the status is held; lifetimes as in `launch`.
        unsafe { self.store.kernels.fail_if.launch(stream, Grid::new(1, 1), args) }
    }

    /// As [`OneSided::put_signal`] of `from.1` bytes at `from.0` of my own chunk: how a rank passes on what
    /// has come to it.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    pub fn pass_signal(
        &self,
        stream: &CudaStream,
        dst: (Rank, usize),
        (from, len): (usize, usize),
        slot: SignalSlot,
    ) -> Result<()> {
        // Refused before the total moves, as in `put_signal`.
        let at = self.slot(dst.0, slot)?;
        let (to, src) = (self.addr(dst.0, dst.1, len)?, self.addr(self.team().rank(), from, len)?);
        self.launch(stream, &self.store.kernels.bump_epoch, at, 1)?;
        if len > 0 {
            if dst.0 != self.team().rank() {
                self.team().0.traffic.put(dst.0, len);
            }
            self.team().check()?;
            self.hold(stream, None);
            // SAFETY: both ranges were checked and are held; that nobody else uses them meanwhile is
            // the protocol's business (credits), as for every one-sided transfer.
            unsafe { stream.copy(to, src, len)? };
        }
        self.flag(stream, dst.0, slot)
    }

    /// The total of (slot, dst), to `dst`'s control page.
    fn flag(&self, stream: &CudaStream, dst: Rank, slot: SignalSlot) -> Result<()> {
        let flag = self.flag_addr(dst, slot)?;
        self.team().check()?;
        self.hold(stream, None);
        self.team().0.traffic.signal(dst);
        let total = self.store.counters.sent(slot.index(), dst);
        // SAFETY: 8 bytes each; only this rank writes the flag, and the total changes only by
        // later kernels of this stream (one stream at a time for each slot and destination).
        unsafe { stream.copy(flag, total, 8) }
    }

    /// Counts what a kernel of the caller writes to `dst`'s chunk, as a put.
    pub fn count_put(&self, dst: Rank, len: usize) {
        self.team().0.traffic.put(dst, len);
    }

    /// Counts a word that a kernel of the caller writes to `dst`, as a signal.
    pub fn count_signal(&self, dst: Rank) {
        self.team().0.traffic.signal(dst);
    }

    /// The address of my counter on `dst`'s page.
    fn flag_addr(&self, dst: Rank, slot: SignalSlot) -> Result<u64> {
        let column = (slot.index() * self.team().size() + self.team().rank().idx()) * 16;
        self.store.control.addr(dst, OFF_SIGNALS + column, 8)
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
        // A death leaves NVSHMEM's ranks without one of theirs, for good.
        let recoverable = self.heap.backend() != BackendKind::Nvshmem;
        let near = self.store.near;
        Caps { direct_peer: near, get: near, graph: true, recoverable }
    }

    fn put(
        &self,
        stream: &CudaStream,
        dst: Rank,
        dst_offset: usize,
        src: &CudaMemory,
    ) -> Result<()> {
        let to = self.addr(dst, dst_offset, src.len_bytes())?;
        if dst != self.team().rank() {
            self.team().0.traffic.put(dst, src.len_bytes());
        }
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
        if src != self.team().rank() {
            self.team().0.traffic.get(src, out.len_bytes());
        }
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
        self.launch(stream, &self.store.kernels.bump_epoch, at, 1)?;
        self.put_flag(stream, dst, src, slot)
    }

    fn advance(&self, stream: &CudaStream, first: SignalSlot, num: usize) -> Result<()> {
        check_slots(first, num)?;
        let at = (first.index(), num, 0);
        self.launch_slots(stream, &self.store.kernels.advance, 256, at)
    }

    fn put_flag(
        &self,
        stream: &CudaStream,
        dst: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
    ) -> Result<()> {
        self.slot(dst.0, slot)?;
        self.flag_addr(dst.0, slot)?;
        if src.len_bytes() > 0 {
            self.put(stream, dst.0, dst.1, src)?;
        }
        self.flag(stream, dst.0, slot)
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
