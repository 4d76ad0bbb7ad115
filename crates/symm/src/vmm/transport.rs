//! [`Transport`] by kernels and copy engines.

use tilewire_core::{BackendKind, Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};

use super::device::{DeviceHeap, DeviceTeam};
use crate::control::{NUM_SIGNALS, OFF_SIGNALS};
use crate::heap::Heap;
use crate::transport::{
    Caps, Enter, Permit, Rows, SignalSlot, Transport, check_channel, check_slots,
};

/// [`Transport`] on the backends in device memory: `vmm`, `nccl` and `nvshmem`.
///
/// Data moves by copy engines; signals, waits and barriers are kernels of one block. A
/// [`Transport::put_signal`] is a data copy and an 8-byte copy of the running total behind it.
/// Phases are not used here: the report of a queued wait names its slot.
#[derive(Clone)]
pub struct DeviceTransport {
    here: DeviceHeap,
    reach: Option<DeviceTeam>,
}

impl DeviceTransport {
    /// Returns one-sided access to `heap`.
    ///
    /// # Errors
    /// `Unsupported` if the heap is not in device memory.
    pub fn new(heap: &Heap) -> Result<Self> {
        let here = DeviceHeap::new(heap)?;
        let reach = here.reach();
        Ok(Self { here, reach })
    }

    /// Returns this rank's part of the heap.
    pub fn here(&self) -> &DeviceHeap {
        &self.here
    }

    fn team(&self) -> &crate::LiveTeam {
        self.here.team()
    }

    fn slot(&self, peer: Rank, slot: SignalSlot) -> Result<(u32, u32)> {
        self.here.heap.check_range(peer, 0, 0)?;
        Ok((peer.get(), slot.index() as u32))
    }

    fn launch(&self, stream: &CudaStream, kernel: &Kernel, at: (u32, u32), n: u64) -> Result<()> {
        self.team().check()?;
        self.here.hold(stream, None);
        let args = LaunchArgs::new().arg(&self.here.store.param).arg(&at.0).arg(&at.1).arg(&n);
        // SAFETY: signal, bump_epoch and wait take (TwTeam, u32, u32, u64); the memory that the
        // team points to lives as long as the store, whose `Drop` waits for the device.
        unsafe { kernel.launch(stream, Grid::new(1, 1), args) }
    }

    /// Queues a kernel of the team that takes (TwTeam, u32, u32, u32).
    fn launch_slots(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        threads: u32,
        (a, b, c): (usize, usize, usize),
    ) -> Result<()> {
        self.team().check()?;
        self.here.hold(stream, None);
        let (a, b, c) = (a as u32, b as u32, c as u32);
        let args = LaunchArgs::new().arg(&self.here.store.param).arg(&a).arg(&b).arg(&c);
        // SAFETY: the kernels that are passed here take a team and up to three u32 (more arguments
        // than a kernel has are not read); lifetimes as in `launch`.
        unsafe { kernel.launch(stream, Grid::new(1, threads), args) }
    }

    /// Copies the total of (slot, dst) to `dst`'s control page.
    fn copy_total(&self, stream: &CudaStream, dst: Rank, slot: SignalSlot) -> Result<()> {
        let flag = self.flag_addr(dst, slot)?;
        self.team().check()?;
        self.here.hold(stream, None);
        self.team().0.traffic.signal(dst);
        let total = self.here.store.counters.sent(slot.index(), dst);
        // SAFETY: 8 bytes each; only this rank writes the flag, and the total changes only by
        // later kernels of this stream (one stream at a time for each slot and destination).
        unsafe { stream.copy(flag, total, 8) }
    }

    /// Returns the address of my counter on `dst`'s page.
    fn flag_addr(&self, dst: Rank, slot: SignalSlot) -> Result<u64> {
        let column = (slot.index() * self.team().size() + self.team().rank().idx()) * 16;
        let at = self.here.store.control.addr(dst, OFF_SIGNALS + column, 8);
        at.map_err(|e| e.of_team(self.team()))
    }

    fn copy(&self, stream: &CudaStream, dst: u64, src: u64, buffer: &CudaMemory) -> Result<()> {
        self.team().check()?;
        self.here.hold(stream, Some(buffer));
        // SAFETY: both ranges were checked and are held; the credits of the protocol keep other
        // accesses apart, as for every one-sided transfer.
        unsafe { stream.copy(dst, src, buffer.len_bytes()) }
    }
}

impl Transport for DeviceTransport {
    type Lane = CudaStream;
    type Memory = CudaMemory;

    fn heap(&self) -> &Heap {
        &self.here.heap
    }

    fn caps(&self) -> Caps {
        // After a death NVSHMEM has lost one of its ranks for good.
        let recoverable = self.here.heap.backend() != BackendKind::Nvshmem;
        let near = self.here.store.near;
        Caps { direct_peer: near, get: near, graph: true, recoverable }
    }

    /// Queues one kernel: credits to and from all peers, and the totals.
    fn enter(&self, stream: &CudaStream, e: &Enter) -> Result<Permit> {
        check_slots(e.first, e.num)?;
        for p in self.team().peers() {
            self.team().0.traffic.signal(p);
        }
        let at = (e.credit.index(), e.first.index(), e.num);
        self.launch_slots(stream, &self.here.store.kernels.enter, 64, at)?;
        // SAFETY: work behind the kernel runs only when the kernel has seen every peer's credit.
        Ok(unsafe { Permit::assume(self.team().size()) })
    }

    fn grant(
        &self,
        stream: &CudaStream,
        dst: Rank,
        slot: SignalSlot,
        _tag: u64,
        phase: &str,
    ) -> Result<()> {
        self.signal(stream, dst, slot, 1, phase)
    }

    fn acquire(
        &self,
        stream: &CudaStream,
        src: Rank,
        slot: SignalSlot,
        _tag: u64,
        phase: &str,
    ) -> Result<Permit> {
        self.wait(stream, src, slot, 1, phase)?;
        Ok(Permit::of(src))
    }

    fn put(
        &self,
        stream: &CudaStream,
        permit: &Permit,
        (dst, at): (Rank, usize),
        src: &CudaMemory,
        _phase: &str,
    ) -> Result<()> {
        permit.check(self.team(), dst)?;
        let to = self.here.peer_addr(dst, at, src.len_bytes())?;
        if dst != self.team().rank() {
            self.team().0.traffic.put(dst, src.len_bytes());
        }
        self.copy(stream, to, src.addr(), src)
    }

    unsafe fn pass(
        &self,
        stream: &CudaStream,
        permit: &Permit,
        (dst, at): (Rank, usize),
        (from, len): (usize, usize),
        _phase: &str,
    ) -> Result<()> {
        permit.check(self.team(), dst)?;
        let (to, src) = (self.here.peer_addr(dst, at, len)?, self.here.addr(from, len)?);
        if dst != self.team().rank() {
            self.team().0.traffic.put(dst, len);
        }
        self.team().check()?;
        self.here.hold(stream, None);
        // SAFETY: both ranges were checked and are held; by the caller's contract no rank writes
        // the source meanwhile, and by the permit no rank uses the destination.
        unsafe { stream.copy(to, src, len) }
    }

    unsafe fn get(
        &self,
        stream: &CudaStream,
        (src, at): (Rank, usize),
        out: &mut CudaMemory,
        _phase: &str,
    ) -> Result<()> {
        let from = self.here.peer_addr(src, at, out.len_bytes())?;
        if src != self.team().rank() {
            self.team().0.traffic.get(src, out.len_bytes());
        }
        self.copy(stream, out.addr(), from, out)
    }

    unsafe fn get_rows(
        &self,
        stream: &CudaStream,
        (src, at): (Rank, usize),
        out: &mut CudaMemory,
        rows: Rows,
        _phase: &str,
    ) -> Result<()> {
        if rows.bytes() == 0 {
            return Ok(());
        }
        let from = self.here.peer_addr(src, at, rows.reach(rows.from_pitch))?;
        let to = out.slice(0, rows.reach(rows.out_pitch))?;
        if src != self.team().rank() {
            self.team().0.traffic.get(src, rows.bytes());
        }
        self.team().check()?;
        self.here.hold(stream, Some(&to));
        let (to, from) = ((to.addr(), rows.out_pitch), (from, rows.from_pitch));
        // SAFETY: both ranges were checked and are held; the credits of the protocol keep other
        // accesses apart, as for every one-sided transfer.
        unsafe { stream.copy_rows(to, from, (rows.width, rows.num)) }
    }

    fn signal(
        &self,
        stream: &CudaStream,
        dst: Rank,
        slot: SignalSlot,
        n: u64,
        _phase: &str,
    ) -> Result<()> {
        let at = self.slot(dst, slot)?;
        self.team().0.traffic.signal(dst);
        self.launch(stream, &self.here.store.kernels.signal, at, n)
    }

    fn advance(&self, stream: &CudaStream, first: SignalSlot, num: usize) -> Result<()> {
        check_slots(first, num)?;
        let at = (first.index(), num, 0);
        self.launch_slots(stream, &self.here.store.kernels.advance, 256, at)
    }

    fn flag(&self, stream: &CudaStream, dst: Rank, slot: SignalSlot, _phase: &str) -> Result<()> {
        self.slot(dst, slot)?;
        self.copy_total(stream, dst, slot)
    }

    fn wait(
        &self,
        stream: &CudaStream,
        src: Rank,
        slot: SignalSlot,
        n: u64,
        _phase: &str,
    ) -> Result<()> {
        let at = self.slot(src, slot)?;
        self.launch(stream, &self.here.store.kernels.wait, at, n)
    }

    /// Waits as [`Transport::wait`]: on devices only [`Transport::check_counters`] finds counts
    /// that are too large.
    fn wait_last(
        &self,
        stream: &CudaStream,
        src: Rank,
        slot: SignalSlot,
        n: u64,
        phase: &str,
    ) -> Result<()> {
        self.wait(stream, src, slot, n, phase)
    }

    /// Queues one kernel.
    fn wait_peers(&self, stream: &CudaStream, slot: SignalSlot, _phase: &str) -> Result<()> {
        let at = (slot.index(), 0, 0);
        self.launch_slots(stream, &self.here.store.kernels.wait_peers, 64, at)
    }

    fn barrier(&self, stream: &CudaStream, channel: usize, _phase: &str) -> Result<()> {
        check_channel(channel)?;
        self.team().check()?;
        self.here.hold(stream, None);
        let channel = channel as u32;
        let args = LaunchArgs::new().arg(&self.here.store.param).arg(&channel);
        // SAFETY: the barrier takes (TwTeam, u32) and one block of 64 threads, one for each of at
        // most 64 members; lifetimes as in `launch`.
        unsafe { self.here.store.kernels.barrier.launch(stream, Grid::new(1, 64), args) }
    }

    unsafe fn pass_signal(
        &self,
        stream: &CudaStream,
        permit: &Permit,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        // Refused before the total moves, as in `put_signal`.
        let at = self.slot(to.0, slot)?;
        permit.check(self.team(), to.0)?;
        self.here.peer_addr(to.0, to.1, from.1)?;
        self.here.addr(from.0, from.1)?;
        self.launch(stream, &self.here.store.kernels.bump_epoch, at, 1)?;
        if from.1 > 0 {
            // SAFETY: the caller's contract.
            unsafe { self.pass(stream, permit, to, from, phase)? };
        }
        self.copy_total(stream, to.0, slot)
    }

    /// Makes the new total before the data is copied; the flag is the total, copied behind the data
    /// on the same stream. Nothing here is baked into a graph but addresses.
    fn put_signal(
        &self,
        stream: &CudaStream,
        permit: &Permit,
        to: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        // Everything that can be refused is refused before the total moves: a total that is one
        // ahead would let the peer's next wait pass before its data.
        let at = self.slot(to.0, slot)?;
        permit.check(self.team(), to.0)?;
        self.here.peer_addr(to.0, to.1, src.len_bytes())?;
        self.launch(stream, &self.here.store.kernels.bump_epoch, at, 1)?;
        self.put_flag(stream, permit, to, src, slot, phase)
    }

    fn put_flag(
        &self,
        stream: &CudaStream,
        permit: &Permit,
        to: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()> {
        self.slot(to.0, slot)?;
        self.flag_addr(to.0, slot)?;
        if src.len_bytes() > 0 {
            self.put(stream, permit, to, src, phase)?;
        }
        self.copy_total(stream, to.0, slot)
    }

    fn fence(&self, _stream: &CudaStream) -> Result<()> {
        // Copies and kernels of one stream run one after the other.
        self.team().check()
    }

    fn quiet(&self, stream: &CudaStream) -> Result<()> {
        // A copy is complete at its destination before the next work of the stream begins.
        self.fence(stream)
    }

    fn check_counters(&self) -> Result<()> {
        let (team, size) = (self.team(), self.team().size());
        let mut counts = vec![0u64; NUM_SIGNALS * size * 2];
        let bytes = bytemuck::cast_slice_mut(&mut counts);
        self.here.store.control.read(team.rank(), OFF_SIGNALS, bytes)?;
        let used = self.here.store.counters.expected()?.download()?;
        for (i, used) in used.chunks_exact(8).enumerate() {
            let used: u64 = bytemuck::pod_read_unaligned(used);
            if counts[2 * i] != used {
                let src = Rank::new((i % size) as u32);
                return Err(team.uneven(i / size, src, used, counts[2 * i]));
            }
        }
        Ok(())
    }

    fn device_team(&self) -> Option<&DeviceTeam> {
        self.reach.as_ref()
    }
}
