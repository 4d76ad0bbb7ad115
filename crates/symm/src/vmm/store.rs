//! Memory and kernels of one rank.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::Probe;
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaStream, FabricHandle, Kernel, Pinned, ShareBy, VmmChunk, VmmRange,
    device_count, devices, fabric_handles, granularity,
};
use tilewire_device::jit::KernelSpec;
use tilewire_kernels::SIGNAL;
use tilewire_kernels::abi::TwTeam;

use super::pages::{ControlMemory, HostPages};
use crate::Fingerprint;
use crate::control::{
    self, INBOX_ROW, NUM_CHANNELS, NUM_SIGNALS, OFF_ABORT, OFF_INBOX, OFF_SIGNALS,
};
use crate::heap::{HeapCfg, exchange_chunks};
use crate::nvshmem;
use crate::sink::AbortSink;
use crate::team::LiveTeam;

/// Words of pinned memory: host abort, abort code, ranks that have left, spare, then the 64-byte
/// report.
pub(super) const PINNED_CODE: usize = 1;
pub(super) const PINNED_LEFT: usize = 2;
pub(super) const PINNED_REPORT: usize = 8;
const PINNED_WORDS: usize = 16;

pub(super) struct Kernels {
    pub signal: Kernel,
    pub bump_epoch: Kernel,
    pub wait: Kernel,
    pub barrier: Kernel,
    pub advance: Kernel,
    pub enter: Kernel,
    pub wait_peers: Kernel,
    pub poison: Kernel,
    pub fail_if: Kernel,
}

/// The chunks of a heap, as this device sees them.
pub(super) enum HeapMemory {
    Own(VmmRange),
    Nvshmem(nvshmem::Block),
}

impl HeapMemory {
    /// Returns the device address of `len` bytes at `offset` of `rank`'s chunk.
    pub fn addr(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        match self {
            HeapMemory::Own(r) => r.addr(rank, offset, len),
            HeapMemory::Nvshmem(b) => b.addr(rank, offset, len),
        }
    }

    /// Returns the bytes from each rank's chunk to the next one's; addresses wrap.
    pub fn stride(&self) -> Result<u64> {
        match self {
            HeapMemory::Own(r) => Ok(r.stride() as u64),
            HeapMemory::Nvshmem(b) => b.stride(),
        }
    }
}

impl VmmStore {
    /// Returns the address as [`HeapMemory::addr`], whose errors know no team.
    pub(crate) fn address(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        self.heap.addr(rank, offset, len).map_err(|e| e.of_team(&self.team))
    }

    /// Returns the stride as [`HeapMemory::stride`].
    pub(crate) fn stride(&self) -> Result<u64> {
        self.heap.stride()
    }
}

/// The hint of errors about a virtual address range that is too long.
const RESERVE: &str = "give a smaller HeapCfg::reserve_bytes";

pub(crate) struct VmmStore {
    /// Every rank reaches the memory of all.
    pub(crate) near: bool,
    pub(super) team: LiveTeam,
    pub(crate) ctx: CudaContext,
    /// The kind of handle by which memory is shared with the other ranks.
    by: ShareBy,
    pub(super) heap: HeapMemory,
    pub(super) control: ControlMemory,
    pub(super) counters: Counters,
    pub(super) pinned: Pinned,
    pub(super) kernels: Kernels,
    pub(super) param: TwTeam,
    /// Ranks of the team on this rank's device, itself among them.
    pub(super) on_device: usize,
    /// Carries abort codes past kernels that spin on other streams.
    pub(super) abort_stream: CudaStream,
}

/// The resources that a rank makes before it meets its peers.
struct Parts {
    ctx: CudaContext,
    /// Not if the memory is NVSHMEM's.
    heap: Option<(VmmChunk, Handle)>,
    control: (VmmChunk, Handle),
    counters: Counters,
    pinned: Pinned,
    kernels: Kernels,
    abort_stream: CudaStream,
}

/// Returns the kernels of `comm/signal.cu` with the offsets of the control page.
pub(crate) fn signal_spec(arch: &str) -> KernelSpec {
    let defines = [
        ("TW_OFF_INBOX", OFF_INBOX as u64),
        ("TW_OFF_SIGNALS", OFF_SIGNALS as u64),
        ("TW_INBOX_ROW", INBOX_ROW as u64),
    ];
    KernelSpec {
        name: SIGNAL.name.to_owned(),
        text: SIGNAL.text(),
        defines: defines.map(|(n, v)| (n.to_owned(), v)).to_vec(),
        arch: arch.to_owned(),
    }
}

/// The rank's own totals, in its device memory.
pub(super) struct Counters {
    memory: CudaMemory,
    size: usize,
}

impl Counters {
    fn new(ctx: &CudaContext, size: usize) -> Result<Self> {
        let words = 2 * NUM_SIGNALS * size + NUM_CHANNELS + 1;
        Ok(Self { memory: CudaMemory::zeroed(ctx, words * 8)?, size })
    }

    /// Address of the total sent to `dst` on `slot`.
    pub fn sent(&self, slot: usize, dst: Rank) -> u64 {
        self.memory.addr() + ((slot * self.size + dst.idx()) * 8) as u64
    }

    /// Returns the expected totals of all (slot, source).
    pub fn expected(&self) -> Result<CudaMemory> {
        let len = NUM_SIGNALS * self.size * 8;
        self.memory.slice(len, len)
    }

    fn epoch(&self) -> u64 {
        self.memory.addr() + (2 * NUM_SIGNALS * self.size * 8) as u64
    }

    fn fault(&self) -> u64 {
        self.epoch() + (NUM_CHANNELS * 8) as u64
    }
}

impl VmmStore {
    /// Collective: makes and maps the chunks of all ranks. The heap's are our own, or NVSHMEM's.
    pub fn create(team: &LiveTeam, cfg: &HeapCfg, own: bool) -> Result<Arc<Self>> {
        let ctx = team.settle("vmm-device", device(team, cfg))?;
        let by = share_by(team, fabric_handles(&ctx))?;
        let parts = team.settle("vmm-make", Parts::make(team, (cfg, ctx), own, by))?;
        let gpus = gpus(team, &parts.ctx)?;
        warn_of_shared(team, &gpus);
        let on_device = gpus.iter().filter(|g| **g == gpus[team.rank().idx()]).count();
        if shared(&gpus).is_some() {
            // Ranks of other processes have contexts of their own.
            let processes = team.exchange("processes", nvshmem::process().as_bytes())?;
            let me = team.rank().idx();
            let beside = |r: usize| r != me && gpus[r] == gpus[me] && processes[r] == processes[me];
            if (0..team.size()).any(beside) {
                parts.ctx.keep_memory();
            }
        }
        let reach = team.settle("vmm-reach", reaches(&parts.ctx, &gpus))?;
        let near = !own || team.agree(cfg.peer_access && reach)?;
        if !near {
            return Self::create_far(team, cfg, parts, on_device, by);
        }
        let block = match own {
            true => None,
            false => Some(nvshmem::block(team, &parts.ctx, cfg.len_bytes)?),
        };
        // The control page first: a heap of NVSHMEM's has no chunk.
        let own: Vec<_> = std::iter::once(&parts.control).chain(&parts.heap).collect();
        let handles: Vec<_> = own.iter().map(|c| &c.1).collect();
        let all = Handles::exchange(team, &handles)?;
        let own: Vec<_> = own.iter().map(|c| &c.0).collect();
        let map = |which: usize, reserve: usize| {
            let stride = reserve.max(own[which].len_bytes());
            let stride =
                stride.checked_next_multiple_of(granularity(&parts.ctx)?).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Exhausted,
                        "a virtual address range of this length cannot be represented",
                    )
                    .hint(RESERVE)
                })?;
            all.with_chunks(&parts.ctx, team.rank(), (which, own[which]), |chunks| {
                VmmRange::map(&parts.ctx, chunks, stride)
            })
        };
        let heap = match block {
            Some(block) => Ok(HeapMemory::Nvshmem(block)),
            None => map(1, cfg.reserve_bytes.unwrap_or(0)).map(HeapMemory::Own),
        };
        let mapped = heap.and_then(|heap| Ok((heap, ControlMemory::Device(map(0, 0)?))));
        let made = mapped.and_then(|m| m.1.begin(team).map(|()| m));
        // No kernel may access a page before its owner has cleared it.
        let memory = team.settle("vmm-map", made)?;
        Self::finish(team, parts, memory, (true, on_device, by))
    }

    /// Collective: makes the memory of ranks whose GPUs do not reach each other. Each rank maps its
    /// own memory only.
    fn create_far(
        team: &LiveTeam,
        cfg: &HeapCfg,
        parts: Parts,
        on_device: usize,
        by: ShareBy,
    ) -> Result<Arc<Self>> {
        if team.rank().get() == 0 {
            log::warn!(
                "team {}: its GPUs do not use each other's memory: only operations through NCCL move data",
                team.name()
            );
        }
        let control = HostPages::create(team, &parts.ctx)?;
        let control = ControlMemory::Host(control);
        let me = (team.rank(), team.size());
        let heap = granularity(&parts.ctx).and_then(|grain| {
            let (own, _) =
                parts.heap.as_ref().ok_or_else(|| Error::internal("the rank has no chunk"))?;
            let stride = cfg.reserve_bytes.unwrap_or(0).max(own.len_bytes());
            let stride = stride.checked_next_multiple_of(grain).ok_or_else(|| {
                Error::new(
                    ErrorKind::Exhausted,
                    "a virtual address range of this length cannot be represented",
                )
                .hint(RESERVE)
            })?;
            VmmRange::map_own(&parts.ctx, me, own, stride).map(HeapMemory::Own)
        });
        let made = heap.and_then(|heap| control.begin(team).map(|()| (heap, control)));
        let memory = team.settle("vmm-map", made)?;
        Self::finish(team, parts, memory, (false, on_device, by))
    }

    /// Collective: waits until the pages of all ranks are ready.
    fn finish(
        team: &LiveTeam,
        parts: Parts,
        (heap, control): (HeapMemory, ControlMemory),
        (near, on_device, by): (bool, usize, ShareBy),
    ) -> Result<Arc<Self>> {
        let seen = Rank::all(team.size()).try_for_each(|r| {
            let mut got = [0u64; 5];
            control.read(r, 0, bytemuck::cast_slice_mut(&mut got))?;
            let want = control::header(r, team.size(), team.id(), team.generation());
            control::check_header(&got, &want, r)
        });
        team.settle("vmm-see", seen)?;
        let store = Arc::new(parts.into_store(team, (heap, control), (near, on_device, by)));
        let probe: Arc<dyn Probe> = store.clone();
        team.fault().watch(Arc::downgrade(&probe));
        let sink: Arc<dyn AbortSink> = store.clone();
        team.0.sinks.add(Arc::downgrade(&sink));
        // A rank that left before is reported to no sink.
        sink.left(team.left());
        let probe: Weak<dyn Probe> = Arc::downgrade(&probe);
        store.ctx.watch(probe);
        Ok(store)
    }

    /// Collective: at least `len` bytes of every rank, which all have asked for. On an error no
    /// rank has more than before.
    pub fn grow(&self, len: usize) -> Result<()> {
        let HeapMemory::Own(range) = &self.heap else {
            return Err(Error::internal("a heap in NVSHMEM's memory cannot grow"));
        };
        let (ctx, team) = (&self.ctx, &self.team);
        let old = range.len_bytes();
        let made = granularity(ctx).and_then(|grain| {
            match len.next_multiple_of(grain).saturating_sub(old) {
                // The chunk was rounded up to this size already.
                0 => Ok(None),
                more => chunk(ctx, more, self.by).map(Some),
            }
        });
        let Some(part) = team.settle("vmm-grow", made)? else { return Ok(()) };
        self.attach(range, part)
    }

    /// Collective: makes the allocation behind `addr` of every rank, by whichever library, part of
    /// its chunk. Returns its offset there, its length, and the offset of `addr` in it. On an error
    /// no chunk has changed.
    pub fn adopt(&self, addr: u64, len_bytes: usize) -> Result<(usize, usize, usize)> {
        let (HeapMemory::Own(range), true) = (&self.heap, self.near) else {
            let text = "a heap can adopt memory only where GPUs reach each other";
            return Err(Error::new(ErrorKind::Unsupported, text).expected("a heap of `vmm`"));
        };
        let found = VmmChunk::of_address(&self.ctx, addr).and_then(|(chunk, inside)| {
            if inside.checked_add(len_bytes).is_none_or(|end| end > chunk.len_bytes()) {
                let text = "the memory consists of several allocations";
                return Err(Error::new(ErrorKind::Unsupported, text)
                    .expected(format_args!("{len_bytes} bytes of one"))
                    .seen(format_args!("{inside} bytes inside one of {}", chunk.len_bytes())));
            }
            let handle = export(&chunk, self.by).map_err(|e| {
                Error::new(ErrorKind::Unsupported, "the memory was not allocated for sharing")
                    .hint("copy it to a tensor of `symm_empty`")
                    .cause(e)
            })?;
            Ok((chunk, handle, inside))
        });
        let (chunk, handle, inside) = self.team.settle("adopt", found)?;
        let len = chunk.len_bytes();
        let words = format_args!("{len} bytes, {inside} bytes inside");
        self.team.prepare_agree(&Fingerprint::new("adopt", words))?;
        let at = range.len_bytes();
        self.attach(range, (chunk, handle))?;
        Ok((at, len, inside))
    }

    /// Collective: maps new chunks of all ranks behind their existing ones.
    fn attach(&self, range: &VmmRange, (chunk, handle): (VmmChunk, Handle)) -> Result<()> {
        let (ctx, team) = (&self.ctx, &self.team);
        let mapped = match self.near {
            true => Handles::exchange(team, &[&handle])?.with_chunks(
                ctx,
                team.rank(),
                (0, &chunk),
                |chunks| range.extend(chunks),
            ),
            // Mine alone is mapped.
            false => range.extend(&vec![&chunk; team.size()]),
        };
        let mine = mapped.is_ok();
        team.settle("vmm-map", mapped).inspect_err(|_| {
            if mine && let Err(undo) = range.take_back() {
                log::warn!("the memory of a failed growth of a heap cannot be unmapped: {undo}");
            }
        })
    }
}

/// Returns whether this GPU reaches the GPUs of all ranks. A GPU that this process does not see is
/// taken to be within reach; if it is not, mapping its memory fails.
fn reaches(ctx: &CudaContext, gpus: &[Vec<u8>]) -> Result<bool> {
    let mine = ctx.info()?;
    for d in devices()?.iter().filter(|d| d.ordinal != mine.ordinal) {
        if gpus.iter().any(|g| g == d.pci.as_bytes()) && !ctx.can_access(d.ordinal)? {
            log::info!("GPU {} does not reach GPU {}", mine.pci, d.pci);
            return Ok(false);
        }
    }
    Ok(true)
}

/// Allocates memory of this device, a multiple of its granularity, that peers can map.
fn chunk(ctx: &CudaContext, len: usize, by: ShareBy) -> Result<(VmmChunk, Handle)> {
    let chunk = VmmChunk::create(ctx, len, by)?;
    let handle = export(&chunk, by)?;
    Ok((chunk, handle))
}

fn export(chunk: &VmmChunk, by: ShareBy) -> Result<Handle> {
    Ok(match by {
        ShareBy::Fd => Handle::Fd(chunk.export()?),
        ShareBy::Fabric => Handle::Fabric(chunk.export_fabric()?),
    })
}

/// The handle by which peers map a chunk of this rank.
pub(super) enum Handle {
    Fd(OwnedFd),
    Fabric(FabricHandle),
}

/// The same chunks of all ranks, in the order of the ranks.
pub(super) enum Handles {
    Fds(Vec<Vec<OwnedFd>>),
    Fabric(Vec<Vec<FabricHandle>>),
}

impl Handles {
    /// Collective. `own` are all of one kind, the same on all ranks.
    pub fn exchange(team: &LiveTeam, own: &[&Handle]) -> Result<Self> {
        let fabric = own.iter().filter_map(|h| match h {
            Handle::Fabric(bytes) => Some(*bytes),
            Handle::Fd(_) => None,
        });
        let fabric: Vec<FabricHandle> = fabric.collect();
        if fabric.is_empty() {
            let fds = own.iter().filter_map(|h| match h {
                Handle::Fd(fd) => Some(fd.as_fd()),
                Handle::Fabric(_) => None,
            });
            return Ok(Self::Fds(exchange_chunks(team, Ok(fds.collect()))?.0));
        }
        let lists = team.exchange("fabric", fabric.as_flattened())?;
        let list = |(i, bytes): (usize, Vec<u8>)| {
            let (list, rest) = bytes.as_chunks::<64>();
            if list.len() == own.len() && rest.is_empty() {
                return Ok(list.to_vec());
            }
            Err(Error::new(ErrorKind::Protocol, "a peer has sent no memory")
                .op("heap")
                .of_team(team)
                .peer(Rank::new(i as u32))
                .expected(64 * own.len())
                .seen(bytes.len()))
        };
        lists.into_iter().enumerate().map(list).collect::<Result<_>>().map(Self::Fabric)
    }

    /// Calls `f` with chunk `which` of all ranks. The own chunk is not imported: accesses to an
    /// imported one may take the path to a peer.
    fn with_chunks<T>(
        &self,
        ctx: &CudaContext,
        me: Rank,
        (which, own): (usize, &VmmChunk),
        f: impl FnOnce(&[&VmmChunk]) -> Result<T>,
    ) -> Result<T> {
        let size = match self {
            Handles::Fds(all) => all.len(),
            Handles::Fabric(all) => all.len(),
        };
        let import = |r: Rank| match r == me {
            true => Ok(None),
            false => self.import(ctx, (r, which), own.len_bytes()).map(Some),
        };
        let peers = Rank::all(size).map(import).collect::<Result<Vec<_>>>()?;
        f(&peers.iter().map(|c| c.as_ref().unwrap_or(own)).collect::<Vec<_>>())
    }

    fn import(
        &self,
        ctx: &CudaContext,
        (peer, which): (Rank, usize),
        len: usize,
    ) -> Result<VmmChunk> {
        match self {
            Handles::Fds(all) => VmmChunk::import(ctx, &all[peer.idx()][which], len),
            Handles::Fabric(all) => VmmChunk::import_fabric(ctx, &all[peer.idx()][which], len),
        }
    }
}

/// Collective: fabric handles if every rank can use them, else file descriptors. Why not is logged.
pub(super) fn share_by(team: &LiveTeam, mine: Result<()>) -> Result<ShareBy> {
    let why = mine.err().map_or_else(String::new, |e| e.message().to_owned());
    let all = team.exchange("handles", why.as_bytes())?;
    let Some(first) = all.iter().position(|why| !why.is_empty()) else {
        return Ok(ShareBy::Fabric);
    };
    if team.rank().get() == 0 {
        let why = String::from_utf8_lossy(&all[first]);
        let name = team.name();
        let first = team.named(Rank::new(first as u32));
        log::info!("team {name}: memory travels as file descriptors: {first}: {why}");
    }
    Ok(ShareBy::Fd)
}

fn device(team: &LiveTeam, cfg: &HeapCfg) -> Result<CudaContext> {
    let count = device_count()?;
    CudaContext::new(cfg.device.unwrap_or(team.world_rank(team.rank()).get() % count.max(1)))
}

/// Collective: returns the PCI address of each rank's GPU. A GPU whose address is not known counts
/// as one of its own.
pub(crate) fn gpus(team: &LiveTeam, ctx: &CudaContext) -> Result<Vec<Vec<u8>>> {
    let pci = ctx.info().map_or_else(|_| format!("rank {}", team.rank()), |i| i.pci);
    team.exchange("gpu", pci.as_bytes())
}

/// Warns if ranks share a GPU, which is allowed but rarely meant.
fn warn_of_shared(team: &LiveTeam, gpus: &[Vec<u8>]) {
    if let Some((a, b)) = shared(gpus).filter(|_| team.rank().get() == 0) {
        log::warn!(
            "team {}: {} and {} share the GPU at {}: it works, but slowly, and memory is freed \
             only when there is none left; start no more ranks than there are GPUs. Threads of one process \
             share its queues to the GPU as well, and wait for each other there: run a process for each \
             rank, or set CUDA_DEVICE_MAX_CONNECTIONS=32",
            team.name(),
            team.named(a),
            team.named(b),
            String::from_utf8_lossy(&gpus[a.idx()])
        );
    }
}

/// Returns the first two ranks on one GPU.
pub(crate) fn shared(gpus: &[Vec<u8>]) -> Option<(Rank, Rank)> {
    let before = |b: usize| gpus[..b].iter().position(|a| *a == gpus[b]);
    let rank = |i: usize| Rank::new(i as u32);
    (1..gpus.len()).find_map(|b| Some((rank(before(b)?), rank(b))))
}

impl Parts {
    fn make(
        team: &LiveTeam,
        (cfg, ctx): (&HeapCfg, CudaContext),
        own: bool,
        by: ShareBy,
    ) -> Result<Self> {
        let grain = granularity(&ctx)?;
        let chunk = |len: usize| chunk(&ctx, len.next_multiple_of(grain), by);
        let module = ctx.module(&signal_spec(&ctx.arch()?))?;
        Ok(Self {
            heap: own.then(|| chunk(cfg.len_bytes)).transpose()?,
            control: chunk(control::device_page_bytes(team.size()))?,
            counters: Counters::new(&ctx, team.size())?,
            pinned: Pinned::zeroed(&ctx, PINNED_WORDS)?,
            kernels: Kernels {
                signal: module.kernel("tw_signal")?,
                bump_epoch: module.kernel("tw_bump_epoch")?,
                wait: module.kernel("tw_wait")?,
                barrier: module.kernel("tw_barrier")?,
                advance: module.kernel("tw_advance")?,
                enter: module.kernel("tw_enter")?,
                wait_peers: module.kernel("tw_wait_peers")?,
                poison: module.kernel("tw_poison")?,
                fail_if: module.kernel("tw_fail_if")?,
            },
            abort_stream: CudaStream::new(&ctx)?,
            ctx,
        })
    }

    fn into_store(
        self,
        team: &LiveTeam,
        (heap, control): (HeapMemory, ControlMemory),
        (near, on_device, by): (bool, usize, ShareBy),
    ) -> VmmStore {
        let param = TwTeam {
            control: control.base(),
            stride: control.stride(),
            sent: self.counters.sent(0, Rank::new(0)),
            expected: self.counters.sent(NUM_SIGNALS, Rank::new(0)),
            epoch: self.counters.epoch(),
            fault: self.counters.fault(),
            pinned: self.pinned.addr(),
            timeout_ns: u64::try_from(team.timeout().as_nanos()).unwrap_or(u64::MAX),
            me: team.rank().get(),
            size: team.size() as u32,
            generation: team.generation() as u32,
            abort: OFF_ABORT as u32,
        };
        VmmStore {
            near,
            team: team.clone(),
            ctx: self.ctx,
            by,
            heap,
            control,
            counters: self.counters,
            pinned: self.pinned,
            kernels: self.kernels,
            param,
            on_device,
            abort_stream: self.abort_stream,
        }
    }
}
