//! Transfers that do nothing but move bytes, for measuring links: `tilewire bench links`.

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::jit::KernelSpec;
use tilewire_kernels::abi::TwBulk;
use tilewire_kernels::{LINK_STAGES, LINKS, LINKS_BULK, Source};

use super::device::DeviceTeam;
use super::transport::DeviceTransport;
use crate::heap::{Heap, out_of_reach};
use crate::transport::Transport;

/// A piece of the heap or of the rank's own buffer, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its first byte.
    pub offset: usize,
    /// Its length.
    pub len: usize,
}

/// Kernels and a buffer to measure the links of a heap in device memory with.
///
/// These calls order nothing: the caller waits for the stream, and for the peers, before it reads
/// the bytes or drops the heap.
pub struct LinkProbe {
    net: DeviceTransport,
    team: DeviceTeam,
    local: CudaMemory,
    store: Kernel,
    load: Kernel,
    /// `None` where the device has no bulk copies.
    bulk: Option<Kernel>,
    ping: Kernel,
    empty: Kernel,
    delay: Kernel,
    delayed: CudaMemory,
}

/// Returns the unit of a source without definitions.
pub(super) fn spec(source: &Source, arch: &str) -> KernelSpec {
    KernelSpec {
        name: source.name.to_owned(),
        text: source.text(),
        defines: Vec::new(),
        arch: arch.to_owned(),
    }
}

impl LinkProbe {
    /// Makes a probe of `heap`, with a buffer of its own of `local_bytes` zeros.
    ///
    /// # Errors
    /// `Unsupported` if the heap is not in device memory, or GPUs do not reach each other;
    /// `Exhausted` without memory for the buffer.
    pub fn new(heap: &Heap, local_bytes: usize) -> Result<Self> {
        let net = DeviceTransport::new(heap)?;
        let team = net.device_team().cloned().ok_or_else(out_of_reach)?;
        let ctx = net.here().context();
        let arch = ctx.arch()?;
        let module = ctx.module(&spec(&LINKS, &arch))?;
        let bulk = match LINKS_BULK.runs_on(&arch) {
            true => Some(ctx.module(&spec(&LINKS_BULK, &arch))?.kernel("tw_link_bulk")?),
            false => None,
        };
        Ok(Self {
            local: CudaMemory::zeroed(ctx, local_bytes)?,
            store: module.kernel("tw_link_store")?,
            load: module.kernel("tw_link_load")?,
            bulk,
            ping: module.kernel("tw_link_ping")?,
            empty: module.kernel("tw_link_empty")?,
            delay: module.kernel("tw_link_delay")?,
            delayed: CudaMemory::zeroed(ctx, 8)?,
            net,
            team,
        })
    }

    /// Returns the rank's device.
    pub fn context(&self) -> &CudaContext {
        self.net.here().context()
    }

    /// Returns one-sided access to the heap.
    pub fn transport(&self) -> &DeviceTransport {
        &self.net
    }

    /// Copies the bytes at `offset` of my own chunk to `out`.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist.
    pub fn read(&self, stream: &CudaStream, offset: usize, out: &CudaMemory) -> Result<()> {
        // SAFETY: the range is checked. The caller orders it with the peers, as all calls here.
        unsafe { self.net.get(stream, (self.me(), offset), &mut out.clone(), "read") }
    }

    /// Returns the rank's own buffer.
    pub fn local(&self) -> &CudaMemory {
        &self.local
    }

    fn own(&self, p: Piece) -> Result<u64> {
        Ok(self.local.slice(p.offset, p.len)?.addr())
    }

    fn me(&self) -> Rank {
        self.net.heap().team().rank()
    }

    /// Copies `from` of my buffer to `offset` of `peer`'s heap by a copy engine.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist.
    pub fn put(&self, stream: &CudaStream, peer: Rank, offset: usize, from: Piece) -> Result<()> {
        let (to, from_addr) = (self.team.addr(peer, offset, from.len)?, self.own(from)?);
        // SAFETY: both ranges were checked; they live as long as `self`, whose `Drop` waits for the
        // device. The caller orders accesses to the bytes.
        unsafe { stream.copy(to, from_addr, from.len) }
    }

    /// Copies `offset` of `peer`'s heap into `to` of my buffer by a copy engine.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist.
    pub fn get(&self, stream: &CudaStream, peer: Rank, offset: usize, to: Piece) -> Result<()> {
        let (from, to_addr) = (self.team.addr(peer, offset, to.len)?, self.own(to)?);
        // SAFETY: as for `put`.
        unsafe { stream.copy(to_addr, from, to.len) }
    }

    /// Moves bytes by loads and stores of `blocks` blocks, as [`LinkProbe::put`] does (or
    /// [`LinkProbe::get`] if `pull`), between the same offset of both chunks; rounded down to 16
    /// bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist.
    pub fn ld_st(
        &self,
        stream: &CudaStream,
        blocks: u32,
        peer: Rank,
        piece: Piece,
        pull: bool,
    ) -> Result<()> {
        let (there, here) = (self.team.addr(peer, piece.offset, piece.len)?, self.own(piece)?);
        let (kernel, dst, src) = match pull {
            true => (&self.load, here, there),
            false => (&self.store, there, here),
        };
        let n = (piece.len / 16) as u64;
        let args = LaunchArgs::new().arg(&dst).arg(&src).arg(&n);
        // SAFETY: both kernels take (u64, u64, u64); ranges and lifetimes as for `put`.
        unsafe { kernel.launch(stream, Grid::new(blocks, 512), args) }
    }

    /// Puts `piece` of my buffer to the same offset of the `num` ranks behind me by bulk copies of
    /// `blocks` blocks, in chunks of `chunk` bytes in turn.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece, a chunk or ranks that cannot be; `Unsupported` without
    /// [`LinkProbe::has_bulk`].
    pub fn bulk_put(
        &self,
        stream: &CudaStream,
        blocks: u32,
        num: u32,
        chunk: u32,
        piece: Piece,
    ) -> Result<()> {
        let size = self.net.heap().team().size() as u32;
        if num == 0 || num >= size {
            return Err(Error::invalid("the number of peers to put to is out of range")
                .expected("1 to size - 1")
                .seen(num));
        }
        let mut param = self.bulk_param(chunk, piece)?;
        param.num = num;
        param.src = self.own(piece)?;
        // The kernel finds each peer's by the stride.
        for peer in self.net.heap().team().peers() {
            self.team.addr(peer, piece.offset, piece.len)?;
        }
        param.dst = self.team.addr(Rank::new(0), piece.offset, piece.len)?;
        self.launch_bulk(stream, blocks, param)
    }

    /// Loads `piece` of `peer`'s heap by bulk copies and stores it at the same offset of my buffer.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece or a chunk that cannot be; `Unsupported` without
    /// [`LinkProbe::has_bulk`].
    pub fn bulk_get(
        &self,
        stream: &CudaStream,
        blocks: u32,
        peer: Rank,
        chunk: u32,
        piece: Piece,
    ) -> Result<()> {
        let mut param = self.bulk_param(chunk, piece)?;
        param.src = self.team.addr(peer, piece.offset, piece.len)?;
        param.dst = self.own(piece)?;
        self.launch_bulk(stream, blocks, param)
    }

    fn bulk_param(&self, chunk: u32, piece: Piece) -> Result<TwBulk> {
        if chunk == 0 || chunk > 24 << 10 || !(chunk | piece.offset as u32).is_multiple_of(16) {
            return Err(Error::invalid("chunks and offsets must be multiples of 16 bytes")
                .expected("a chunk of 16 to 24576")
                .seen(chunk));
        }
        Ok(TwBulk {
            dst: 0,
            stride: self.team.stride()?,
            src: 0,
            bytes: piece.len as u64,
            chunk,
            me: self.me().get(),
            size: self.net.heap().team().size() as u32,
            num: 0,
        })
    }

    fn launch_bulk(&self, stream: &CudaStream, blocks: u32, param: TwBulk) -> Result<()> {
        let grid = Grid::new(blocks, 32).shared(param.chunk * LINK_STAGES);
        // SAFETY: the kernel takes a `TwBulk`; the callers checked both ranges (the heap's is as
        // long for every rank); lifetimes as for `put`.
        unsafe { self.bulk_kernel()?.launch(stream, grid, LaunchArgs::new().arg(&param)) }
    }

    /// Returns whether the device has bulk copies: sm_90 and newer.
    pub fn has_bulk(&self) -> bool {
        self.bulk.is_some()
    }

    fn bulk_kernel(&self) -> Result<&Kernel> {
        self.bulk.as_ref().ok_or_else(|| {
            let text = format!(
                "this device does not support bulk copies: they need sm_{}",
                LINKS_BULK.min_sm()
            );
            Error::new(ErrorKind::Unsupported, text).hint("use copy engines, or loads and stores")
        })
    }

    /// Allows chunks of up to `chunk` bytes: before the first bulk copy, and once.
    ///
    /// # Errors
    /// `InvalidArgument` if the device has not as much shared memory.
    pub fn allow_chunks(&self, chunk: u32) -> Result<()> {
        self.bulk_kernel()?.allow_shared(chunk * LINK_STAGES)
    }

    /// Exchanges `n` flags between two ranks, inside one kernel on each, and returns the
    /// nanoseconds of one way. The word at `offset` of both heaps must be zero.
    ///
    /// # Errors
    /// `Timeout` if the peer does not answer within 2 s.
    pub fn ping(&self, stream: &CudaStream, peer: Rank, offset: usize, n: u64) -> Result<f64> {
        let (mine, theirs) =
            (self.team.addr(self.me(), offset, 8)?, self.team.addr(peer, offset, 8)?);
        let out = self.local.slice(0, 8)?;
        let (first, at) = (u32::from(self.me() < peer), out.addr());
        let args = LaunchArgs::new().arg(&mine).arg(&theirs).arg(&at).arg(&n).arg(&first);
        // SAFETY: the kernel takes (u64*, u64*, u64*, u64, u32); ranges and lifetimes as for `put`;
        // it ends by itself.
        unsafe { self.ping.launch(stream, Grid::new(1, 1), args)? };
        tilewire_device::Queue::synchronize_until(
            stream,
            Some(tilewire_core::Deadline::after_s(10.0)),
        )?;
        match bytemuck::pod_read_unaligned::<u64>(&out.download()?) {
            0 => {
                let text = "the peer has not answered a flag in time";
                let e = Error::new(ErrorKind::Timeout, text).rank(self.me()).peer(peer);
                Err(e.of_team(self.net.heap().team()))
            }
            ns => Ok(ns as f64 / (2 * n) as f64),
        }
    }

    /// Queues a kernel of one block that does nothing.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn empty(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: the kernel takes nothing and touches nothing.
        unsafe { self.empty.launch(stream, Grid::new(1, 64), LaunchArgs::new()) }
    }

    /// Keeps the stream busy for `ns` nanoseconds. Work that is queued meanwhile begins at once
    /// behind it, however long the host took.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn delay(&self, stream: &CudaStream, ns: u64) -> Result<()> {
        let out = self.delayed.addr();
        let args = LaunchArgs::new().arg(&out).arg(&ns);
        // SAFETY: the kernel writes one word, of memory that lives as long as `self`, whose `Drop`
        // waits.
        unsafe { self.delay.launch(stream, Grid::new(1, 1), args) }
    }
}

impl Drop for LinkProbe {
    fn drop(&mut self) {
        // Work that names the buffer and the heap may be in flight.
        self.context().synchronize().ok();
    }
}
