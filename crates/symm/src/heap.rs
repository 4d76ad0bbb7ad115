//! Heaps: one chunk of symmetric memory per rank, cut into buffers.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use tilewire_core::{BackendKind, Deadline, Error, ErrorKind, Rank, Result, inject};
use tilewire_device::cuda::NcclWindow;
use tilewire_device::{Device, Stream, Tracer};

use crate::alloc::Allocator;
use crate::broadcast_status::exchange_parts;
use crate::buf::{Dropped, SymBuf, take, unused};
use crate::map::{Mapping, PAGE, shared_file};
use crate::nccl::{self, NcclTeam};
use crate::nvshmem;
use crate::silence::Watch;
use crate::team::{LiveTeam, lock};
use crate::transport::{HostTransport, Mapped, Peers, over};
use crate::vmm::VmmStore;

/// Alignment of every buffer, in bytes.
pub(crate) const ALIGN: usize = 256;

/// The most bytes of whole pages that an address can count.
const MOST: usize = usize::MAX - (PAGE - 1);

/// Size of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeapCfg {
    /// Bytes per rank to begin with (rounded up to pages).
    pub len_bytes: usize,
    /// Address range per rank that the heap may grow into. Default: four times `len_bytes`.
    pub reserve_bytes: Option<usize>,
    /// CUDA device that holds this rank's part (not on the host). Default: the world rank,
    /// modulo the number of devices.
    pub device: Option<u32>,
    /// GPUs use each other's memory where they can. Default: true. Without it, and where
    /// they cannot, only operations through NCCL move data, and ranks meet in the host's memory.
    pub peer_access: bool,
}

impl HeapCfg {
    /// Describes a heap of `len_bytes` per rank.
    pub fn new(len_bytes: usize) -> Self {
        Self { len_bytes, reserve_bytes: None, device: None, peer_access: true }
    }

    /// Returns this configuration on CUDA device `ordinal`.
    pub fn on_device(self, ordinal: u32) -> Self {
        Self { device: Some(ordinal), ..self }
    }

    /// Returns this configuration without access to the memory of other GPUs, as on machines whose
    /// GPUs have none.
    pub fn without_peer_access(self) -> Self {
        Self { peer_access: false, ..self }
    }
}

pub(crate) struct HeapInner {
    pub team: LiveTeam,
    /// NCCL on devices, made at the first request. It is dropped before the memory, which may be
    /// registered with it.
    pub nccl: OnceLock<Arc<NcclTeam>>,
    /// The chunks of the host backend; empty on a device heap.
    pub map: Arc<Mapping>,
    /// Bytes of reserved addresses for each rank.
    stride: usize,
    /// The chunks of the `vmm` backend.
    pub vmm: Option<Arc<VmmStore>>,
    own: Option<OwnedFd>,
    alloc: Mutex<Allocator>,
    dropped: Mutex<Vec<Dropped>>,
    copies: OnceLock<Stream>,
    /// On the host: how peers are reached, where it is not by their mapped memory.
    pub peers: OnceLock<Arc<dyn Peers>>,
    pub window: OnceLock<NcclWindow>,
    kind: BackendKind,
}

impl Drop for HeapInner {
    fn drop(&mut self) {
        nccl::unregister(self.nccl.get(), self.window.get());
    }
}

/// One chunk of symmetric memory per rank, mapped by every member. Clones are the same heap.
///
/// On a GPU the drop of the last clone waits for all work of that device before it frees the
/// memory, as `cudaFree` does. It does not break captures in progress, except those on a device
/// that ranks of this process share.
#[derive(Clone)]
pub struct Heap(pub(crate) Arc<HeapInner>);

impl Drop for Heap {
    fn drop(&mut self) {
        // A forked child must not release resources that only its parent can end.
        if self.0.team.0.process.is_foreign() {
            std::mem::forget(self.0.clone());
        }
    }
}

impl LiveTeam {
    /// Collective: makes a heap of `cfg.len_bytes` per rank.
    ///
    /// # Errors
    /// `Unavailable` for a backend that this build or machine does not have; `Mismatch` if the
    /// ranks give different sizes; `Exhausted` if there is not enough memory.
    pub fn heap(&self, backend: BackendKind, cfg: HeapCfg) -> Result<Heap> {
        self.check()?;
        // Sizes that no machine has saturate, so that they are refused after the ranks have met.
        let pages = |bytes: usize| bytes.checked_next_multiple_of(PAGE).unwrap_or(MOST);
        let len = pages(cfg.len_bytes.max(1));
        let reserve = cfg.reserve_bytes.unwrap_or_else(|| len.saturating_mul(4));
        let stride = pages(reserve.max(len));
        same_request(self, backend, len, stride)?;
        if stride == MOST {
            return Err(too_large());
        }
        if backend == BackendKind::Nccl {
            nccl::check(self).map_err(|e| of_backend(backend, e).team(self.name()))?;
        }
        if backend == BackendKind::Nvshmem {
            nvshmem::check(self).map_err(|e| of_backend(backend, e).team(self.name()))?;
        }
        let (map, vmm, own) = match backend {
            BackendKind::Host => {
                let own = shared_file("tilewire-heap", len);
                let part = own.as_ref().map(|f| vec![f.as_fd()]).map_err(Error::clone);
                let fds = exchange_chunks(self, part)?;
                let map = Mapping::new(&fds.concat_fds(), len, stride);
                (self.settle("heap-map", map)?, None, Some(own?))
            }
            BackendKind::Vmm | BackendKind::Nccl | BackendKind::Nvshmem => {
                let own = backend != BackendKind::Nvshmem;
                // A window of NCCL's is registered once.
                let reserve = if backend == BackendKind::Vmm { stride } else { len };
                let of_chunks = HeapCfg { len_bytes: len, reserve_bytes: Some(reserve), ..cfg };
                let store = VmmStore::create(self, &of_chunks, own)
                    .map_err(|e| of_backend(backend, e).team(self.name()))?;
                (Mapping::new(&[], 0, PAGE)?, Some(store), None)
            }
            _ => return Err(crate::world::unavailable(backend).op("heap").team(self.name())),
        };
        let heap = Heap(Arc::new(HeapInner {
            team: self.clone(),
            map: Arc::new(map),
            stride,
            vmm,
            own,
            alloc: Mutex::new(Allocator::new(len, ALIGN)),
            dropped: Mutex::new(Vec::new()),
            copies: OnceLock::new(),
            peers: OnceLock::new(),
            nccl: OnceLock::new(),
            window: OnceLock::new(),
            kind: backend,
        }));
        if backend == BackendKind::Nccl && !heap.reaches_peers() {
            let text = "windows of NCCL need GPUs that reach each other's memory";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .op("heap")
                .team(self.name())
                .hint("use the `vmm` backend, where operations through NCCL work without"));
        }
        if backend == BackendKind::Nccl {
            heap.register().map_err(|e| of_backend(backend, e).team(self.name()))?;
        }
        Ok(heap)
    }
}

fn of_backend(backend: BackendKind, e: Error) -> Error {
    let text = format!("backend `{backend}`: {}", e.message());
    e.reworded(text).op("heap")
}

fn too_large() -> Error {
    Error::new(ErrorKind::Exhausted, "a heap of this size cannot be addressed")
        .op("heap")
        .hint("give fewer bytes: Plan::memory says what each plan needs")
}

pub(crate) fn out_of_reach() -> Error {
    Error::new(ErrorKind::Unsupported, "the GPUs of this team do not reach each other's memory")
        .hint("`Heap::reaches_peers` returns false there; plans use NCCL")
}

fn no_address() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "this transport reaches the memory of peers by messages, so that it has no addresses",
    )
}

/// The descriptors of all members, in team order.
pub(crate) struct Chunks(pub Vec<Vec<OwnedFd>>);

impl Chunks {
    pub fn concat_fds(self) -> Vec<OwnedFd> {
        self.0.into_iter().flatten().collect()
    }
}

/// Collective: fails unless all ranks request the same heap. It precedes every other exchange,
/// because ranks with different requests would go on to different meetings.
fn same_request(team: &LiveTeam, backend: BackendKind, len: usize, stride: usize) -> Result<()> {
    let words = format!("backend `{backend}`, {len} bytes, reserve {stride}");
    let all = team.exchange("heap", words.as_bytes())?;
    for (i, theirs) in all.iter().enumerate() {
        if theirs != words.as_bytes() {
            return Err(Error::new(ErrorKind::Mismatch, "ranks ask for different heaps")
                .op("heap")
                .of_team(team)
                .rank(team.rank())
                .peer(Rank::new(i as u32))
                .expected(words)
                .seen(String::from_utf8_lossy(theirs)));
        }
    }
    Ok(())
}

/// Collective: exchanges the chunks of all ranks. A rank that could not make its chunk sends its
/// error instead.
pub(crate) fn exchange_chunks(team: &LiveTeam, own: Result<Vec<BorrowedFd<'_>>>) -> Result<Chunks> {
    let tag = team.0.mesh_tag();
    let deadline = Deadline::after(team.timeout());
    let num = own.as_ref().map_or(0, Vec::len);
    let part = (&[][..], own.as_deref().map_err(Error::clone));
    let watch = RefCell::new(Watch::new(team, None));
    let stop = || team.look(&watch);
    let met = exchange_parts(&*team.0.mesh, &stop, &tag, team.members(), part, deadline);
    // An error without a peer, of another kind than the fault, began on this rank: the peers' fault
    // may be its consequence, so this rank's own error is reported.
    let by_others = |f: &Error, e: &Error| e.get_peer().is_some() || f.kind() == e.kind();
    let parcels = met.map_err(|e| match team.fault().get().filter(|f| by_others(f, &e)) {
        // It speaks of ranks of the team; the mesh, of the world's.
        Some(fault) => fault,
        None => team.translate(e).op("heap").phase("exchange").of_team(team),
    })?;
    let mut fds = Vec::new();
    for (i, p) in parcels.into_iter().enumerate() {
        if p.fds.len() != num {
            return Err(Error::new(ErrorKind::Protocol, "a peer has sent no memory")
                .op("heap")
                .of_team(team)
                .peer(Rank::new(i as u32))
                .expected(num)
                .seen(p.fds.len()));
        }
        fds.push(p.fds);
    }
    Ok(Chunks(fds))
}

impl Heap {
    /// Returns the team that shares this heap.
    pub fn team(&self) -> &LiveTeam {
        &self.0.team
    }

    /// Returns the transport of a heap of the host.
    ///
    /// # Errors
    /// `Unsupported` for a heap in device memory.
    pub fn host_transport(&self) -> Result<Arc<HostTransport>> {
        if self.0.vmm.is_some() {
            let text = "a host transport needs a heap of the host";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .expected("host")
                .seen(self.backend())
                .hint("make it with `BackendKind::Host`; on devices use `DeviceTransport`"));
        }
        Ok(over(self, self.0.peers.get().cloned().unwrap_or_else(|| Arc::new(Mapped))))
    }

    /// Returns the backend that provides the memory.
    pub fn backend(&self) -> BackendKind {
        self.0.kind
    }

    /// Returns whether each rank reaches the memory of all ranks, which one-sided transfers and
    /// kernels that put need. It is equal on all ranks.
    pub fn reaches_peers(&self) -> bool {
        self.0.vmm.as_ref().is_none_or(|store| store.near)
    }

    /// Returns, on the host, whether peers' memory is mapped here.
    fn has_host_addresses(&self) -> bool {
        self.0.peers.get().is_none_or(|p| p.has_addresses())
    }

    /// Checks that `len` bytes at `offset` of `peer`'s chunk exist.
    pub(crate) fn check_range(&self, peer: Rank, offset: usize, len: usize) -> Result<()> {
        let (size, total) = (self.0.team.size(), self.usage().1);
        if peer.idx() >= size {
            let text = format!("there is no {}: it has {size} ranks", self.0.team.named(peer));
            return Err(Error::invalid(text));
        }
        if offset.checked_add(len).is_none_or(|e| e > total) {
            return Err(Error::invalid("the range reaches beyond the heap")
                .expected(format_args!("at most {total} bytes"))
                .seen(format_args!("{offset}+{len}")));
        }
        Ok(())
    }

    /// Returns the address of `len` bytes at `offset` of `rank`'s chunk, as this rank sees them.
    pub(crate) fn address(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        self.check_range(rank, offset, len)?;
        match &self.0.vmm {
            Some(store) if store.near || rank == self.0.team.rank() => {
                store.address(rank, offset, len)
            }
            Some(_) => Err(out_of_reach()),
            None if rank != self.0.team.rank() && !self.has_host_addresses() => Err(no_address()),
            None => Ok(self.0.map.address(rank.idx(), offset, len)),
        }
    }

    /// Returns the bytes from each rank's chunk to the next one's, as this rank sees them.
    pub(crate) fn stride(&self) -> Result<u64> {
        match &self.0.vmm {
            Some(store) if store.near => store.stride(),
            Some(_) => Err(out_of_reach()),
            None if !self.has_host_addresses() => Err(no_address()),
            None => Ok(self.0.stride as u64),
        }
    }

    /// Takes `len_bytes` from the heap, at the same offset on every rank that makes the same
    /// calls in the same order. Local; `prepare` checks that the calls were equal.
    ///
    /// # Errors
    /// `Exhausted` if the heap is full; `Stale` in a forked child.
    pub fn alloc(&self, len_bytes: usize, tag: &str) -> Result<SymBuf> {
        self.0.team.0.process.check()?;
        let offset = lock(&self.0.alloc)
            .alloc(len_bytes, tag)
            .map_err(|e| e.op("heap.alloc").team(self.0.team.name()))?;
        Ok(SymBuf::new(self, offset, len_bytes))
    }

    /// Collective: returns the buffers and signals that every rank has dropped, and that no queued
    /// work of a plan uses. Buffers of a captured graph are returned after its end. On a device the
    /// call may wait for queued work, because it frees memory.
    ///
    /// # Errors
    /// As [`LiveTeam::exchange`].
    pub fn collect(&self) -> Result<()> {
        self.0.team.0.process.check()?;
        if let Some(store) = &self.0.vmm {
            store.ctx.free_retired();
        }
        let dropped = lock(&self.0.dropped).clone();
        let mine = unused(dropped);
        let agreed = self.0.team.intersect("collect", &mine)?;
        let mut alloc = lock(&self.0.alloc);
        for &(offset, len) in &agreed {
            alloc.release(offset, len);
        }
        let gone = take(&mut lock(&self.0.dropped), &agreed);
        drop(alloc);
        drop(gone);
        self.0.team.collect_signals()
    }

    /// Collective: makes the heap larger, up to its reserve. Addresses do not change; plans and
    /// captured graphs go on. On an error it has its old length.
    ///
    /// # Errors
    /// `Exhausted` past the reserve, or if a rank has no memory left; `Unsupported` on `nccl` and
    /// `nvshmem`; otherwise as [`LiveTeam::heap`].
    pub fn grow(&self, len_bytes: usize) -> Result<()> {
        if !matches!(self.backend(), BackendKind::Host | BackendKind::Vmm) {
            let text = format!("a heap of the backend `{}` cannot grow", self.backend());
            return Err(Error::new(ErrorKind::Unsupported, text).op("heap.grow").hint(
                "make it large enough at once (Plan::memory says what each plan needs), or use `vmm`",
            ));
        }
        let len = len_bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large)?;
        let (old, stride) = (self.usage().1, self.0.stride);
        if len > stride {
            return Err(Error::new(ErrorKind::Exhausted, "the heap cannot grow past its reserve")
                .op("heap.grow")
                .expected(format_args!("at most {stride} bytes"))
                .seen(len)
                .hint("give HeapCfg::reserve_bytes when making the heap"));
        }
        let team = &self.0.team;
        same_request(team, self.backend(), len.max(old), stride)?;
        match (&self.0.vmm, &self.0.own) {
            (Some(store), _) if len > old => {
                store.grow(len).map_err(|e| e.op("heap.grow").team(team.name()))?;
            }
            (None, Some(own)) => self.grow_file(own, (old, len))?,
            _ => {}
        }
        if len > old {
            lock(&self.0.alloc).grow(len - old);
        }
        Ok(())
    }

    /// Collective: makes memory that another library has allocated part of every rank's chunk, and
    /// a buffer over it. The memory is the whole allocation to which the `len_bytes` at `addr`, a
    /// device address of this process, belong. Returns the buffer and the offset of `addr` in it.
    /// Peers reach the same memory at the buffer's addresses; its owner goes on using its own
    /// addresses. The memory stays part of the heap, and in use, as long as the heap lives, also
    /// when its owner has freed it.
    ///
    /// Tensors of `torch.distributed._symmetric_memory` are in allocations of this kind.
    ///
    /// # Errors
    /// `Unsupported` if the memory was not made to be shared (`cuMemCreate` with a handle type),
    /// and on heaps of other backends than `vmm` or whose GPUs do not reach each other; `Mismatch`
    /// if the allocations of the ranks are not alike; `Exhausted` past the heap's reserve.
    pub fn adopt(&self, addr: u64, len_bytes: usize) -> Result<(SymBuf, usize)> {
        let named = |e: Error| e.op("heap.adopt").team(self.0.team.name());
        let Some(store) = self.0.vmm.as_ref().filter(|_| self.backend() == BackendKind::Vmm) else {
            let text = format!("a heap of the backend `{}` cannot adopt memory", self.backend());
            return Err(named(Error::new(ErrorKind::Unsupported, text).expected("vmm")));
        };
        let (at, len, inside) = store.adopt(addr, len_bytes).map_err(named)?;
        lock(&self.0.alloc).take_over(at, len);
        let buf = SymBuf::new(self, at, len);
        // Never given to anybody else: its owner uses it.
        buf.keep_until(|| false);
        Ok((buf, inside))
    }

    /// Collective: grows and maps every rank's file to at least `len` bytes.
    fn grow_file(&self, own: &OwnedFd, (old, len): (usize, usize)) -> Result<()> {
        let enlarge = || {
            inject::step("growing shared memory")?;
            let io = |e| Error::io("growing the heap", e).op("heap.grow");
            // Larger already if an earlier try failed on a peer; it cannot shrink.
            if rustix::fs::fstat(own).map_err(io)?.st_size as u64 >= len as u64 {
                return Ok(());
            }
            rustix::fs::ftruncate(own, len as u64).map_err(io)
        };
        let grown = if len > old { enlarge() } else { Ok(()) };
        let part = grown.map(|()| vec![own.as_fd()]);
        let fds = exchange_chunks(&self.0.team, part)?.concat_fds();
        if len > old {
            self.0.team.settle("heap-map", self.0.map.extend(&fds, len))?;
        }
        Ok(())
    }

    /// Returns the stream on which operations push data to peers, which on the host takes the place
    /// of a copy engine. All operations of the heap share it, so that pushes never compete.
    ///
    /// # Errors
    /// `Exhausted` if the system has no thread for it.
    pub fn copy_stream(&self) -> Result<&Stream> {
        self.copy_stream_traced(None)
    }

    /// Returns the stream of [`Heap::copy_stream`]; the first call may give a tracer for its spans.
    ///
    /// # Errors
    /// As [`Heap::copy_stream`].
    pub fn copy_stream_traced(&self, tracer: Option<Arc<Tracer>>) -> Result<&Stream> {
        if let Some(s) = self.0.copies.get() {
            return Ok(s);
        }
        let name = format!("copy {}", self.0.team.name());
        let new = match &self.0.vmm {
            Some(store) => Stream::on_with_tracer(&store.ctx, name, tracer)?,
            None => Stream::with_tracer(name, tracer)?,
        };
        Ok(self.0.copies.get_or_init(|| new))
    }

    /// Returns the device that holds this rank's part.
    pub fn device(&self) -> Device {
        self.0.vmm.as_ref().map_or(Device::Host, |s| Device::Cuda(s.ctx.clone()))
    }

    /// Returns the bytes per rank: free, and in all.
    pub fn usage(&self) -> (usize, usize) {
        let a = lock(&self.0.alloc);
        (a.free_len(), a.total_len())
    }

    /// Returns a text of all allocations so far, which must be equal on all ranks.
    pub fn digest(&self) -> String {
        let (d, n) = lock(&self.0.alloc).digest();
        let (s, m) = self.0.team.signals_digest();
        format!("allocs {n}:{:08x} signals {m}:{:08x}", d as u32, s as u32)
    }

    /// Notes that a buffer was dropped; `collect` returns it.
    pub(crate) fn note_dropped(&self, space: Dropped) {
        // A buffer of no bytes took no space, and its place is not its own.
        if space.len > 0 && !self.0.team.0.process.is_foreign() {
            lock(&self.0.dropped).push(space);
        }
    }

    pub(crate) fn same(&self, other: &Heap) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
