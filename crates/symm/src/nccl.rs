//! NCCL over the members of a team: a communicator that ends with the team, and the backend `nccl`.
//!
//! The backend's memory is that of `vmm`, each rank's chunk registered as a window besides. Peers
//! are addressed through our own mappings of their chunks: before 2.29 (`ncclGetPeerDevicePointer`)
//! the host has no call for the library's addresses, and `ncclGetLsaPointer` of 2.28 is for kernels
//! that are compiled with its headers.
//!
//! # Invariants
//! 1. The communicator is made by all members at one `prepare`, or by none; or it is the caller's,
//!    the caller that the world has it from ([`World::adopt_nccl`](crate::World::adopt_nccl)).
//! 2. No call waits for a peer past the fault of the team.
//! 3. Its kernels have no deadline. A launch meets by kernels of `vmm` before it queues one of
//!    NCCL's, so that the meeting reports a peer that does not launch; a thread of this process
//!    watches the team and aborts the communicator once the team is over, which ends the kernels
//!    that run.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tilewire_core::{DType, Deadline, Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{
    CudaContext, CudaStream, NcclComm, NcclId, NcclOp, NcclSum, NcclWindow,
};

use crate::heap::Heap;
use crate::team::{LiveTeam, lock};
use crate::vmm::{DeviceHeap, gpus, shared};

/// Interval between looks at the team: the monitor names a dead peer at once, and kernels that wait
/// for it end at most this much later.
const WATCH: Duration = Duration::from_millis(5);
/// Between the end of a team and the abort: kernels that are queued behind a meeting that has just
/// been given up start in that time, and must find the communicator's memory.
pub(crate) const GRACE: Duration = Duration::from_millis(50);
/// Polls before a wait for the library's own thread yields.
const SPINS: u32 = 2000;

/// The communicator that a world was given by the caller.
#[derive(Default)]
pub(crate) struct Adopted(pub Mutex<Option<Arc<NcclComm>>>);

impl Adopted {
    /// Returns the adopted communicator for a team on a device: if the team has all ranks of the
    /// world, in order.
    fn of(&self, team: &LiveTeam, ctx: &CudaContext) -> Result<Option<Arc<NcclComm>>> {
        let comm = lock(&self.0).clone();
        let everyone = team.size() == team.world_size()
            && Rank::all(team.size()).all(|r| team.world_rank(r) == r);
        let Some(comm) = comm.filter(|_| everyone) else { return Ok(None) };
        if comm.context().ordinal() != ctx.ordinal() {
            return Err(Error::invalid("the adopted NCCL communicator belongs to another device")
                .op("nccl")
                .expected(ctx.ordinal())
                .seen(comm.context().ordinal()));
        }
        Ok(Some(comm))
    }
}

/// NCCL's communicator of a team, on the device of a heap.
pub struct NcclTeam {
    team: LiveTeam,
    comm: Arc<NcclComm>,
    library: String,
}

impl NcclTeam {
    /// Collective.
    fn meet(team: &LiveTeam, ctx: &CudaContext) -> Result<Arc<Self>> {
        let library = || -> Result<_> {
            let (version, found) = NcclComm::library()?;
            let adopted = team.0.adopted.of(team, ctx)?;
            let first = team.rank().idx() == 0;
            let id = first.then(NcclComm::unique_id).transpose()?;
            Ok((version, found, id, adopted))
        };
        let (version, found, id, adopted) = team.settle("nccl", library())?;
        let library = format!("NCCL {version} ({}: {})", found.how, found.path.display());
        if let Some(comm) = all_adopted(team, adopted)? {
            let new = Arc::new(Self { team: team.clone(), comm, library });
            watch(&new).map_err(|e| team.fail(e))?;
            return Ok(new);
        }
        let words = [version.as_bytes(), id.as_ref().map_or(&[][..], |id| &id.0)].concat();
        let all = team.exchange("nccl id", &words)?;
        if let Some((a, b)) = shared(&gpus(team, ctx)?) {
            let (a, b) = (team.named(a), team.named(b));
            let text = format!("{a} and {b} share a GPU, but NCCL needs one for each rank");
            return Err(Error::new(ErrorKind::Unsupported, text).op("nccl").hint(
                "start no more ranks than there are GPUs, or use puts and the `vmm` backend",
            ));
        }
        let mut id = NcclId([0; 128]);
        for (i, theirs) in all.iter().enumerate() {
            let (text, place) = theirs.split_at(version.len().min(theirs.len()));
            if text != version.as_bytes() || place.len() != if i == 0 { 128 } else { 0 } {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "the ranks have loaded different versions of NCCL",
                )
                .op("nccl")
                .expected(&version)
                .seen(String::from_utf8_lossy(text)));
            }
            if i == 0 {
                id.0.copy_from_slice(place);
            }
        }
        let me = (team.rank().get(), team.size());
        // The peers are about to meet me there.
        let comm = NcclComm::join(ctx, id, me).map_err(|e| team.fail(e))?;
        let new = Arc::new(Self { team: team.clone(), comm, library });
        let deadline = Deadline::after(team.0.cfg.rendezvous_timeout);
        new.settled(Some(deadline)).map_err(|e| team.fail(e.op("nccl").phase("rendezvous")))?;
        // Without the watch NCCL's kernels would wait for ever, and the peers are about to meet me
        // in one.
        watch(&new).map_err(|e| team.fail(e))?;
        Ok(new)
    }

    /// Returns the name of the library, for people.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Waits until the library's own thread has finished its work.
    fn settled(&self, deadline: Option<Deadline>) -> Result<()> {
        for polls in 0u32.. {
            if self.comm.is_ready()? {
                return Ok(());
            }
            if polls < SPINS {
                std::hint::spin_loop();
                continue;
            }
            self.team.check()?;
            if deadline.as_ref().is_some_and(Deadline::expired) {
                let text = "NCCL's ranks did not meet in time";
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Err(Error::internal("unreachable: 2^32 polls"))
    }

    /// Collective: registers my chunk of a heap.
    fn register(&self, addr: u64, len: usize) -> Result<NcclWindow> {
        // SAFETY: the chunk of a heap, which lives as long as the work that is queued on it, and is
        // dropped behind its communicator.
        let window = unsafe { self.comm.register(addr, len)? };
        self.settled(Some(Deadline::after(self.team.0.cfg.rendezvous_timeout)))?;
        if window.handle().is_none() {
            let text =
                format!("{} does not support symmetric memory on these devices", self.library);
            return Err(Error::new(ErrorKind::Unsupported, text).op("nccl").hint(
                "NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE must not be 0; or use the `vmm` backend",
            ));
        }
        Ok(window)
    }

    /// Ends a registration with a communicator that stays in use.
    fn unregister(&self, window: NcclWindow) {
        if !self.comm.is_adopted() {
            return;
        }
        // Running work may use the window.
        let idle = self.comm.context().synchronize();
        if let Err(e) = idle.and_then(|()| self.comm.unregister(window)) {
            log::debug!("a window of NCCL's is left to its communicator: {e}");
        }
    }

    /// Queues operations as one group, behind a meeting of the launch (see the module), and returns
    /// when they are on the stream. The stream, or the graph that it is captured into, holds the
    /// communicator.
    ///
    /// # Safety
    /// As [`NcclComm::queue`].
    ///
    /// # Errors
    /// The fault of the team; as [`NcclComm::queue`].
    pub unsafe fn queue(
        self: &Arc<Self>,
        stream: &CudaStream,
        what: (DType, NcclSum),
        ops: &[NcclOp],
    ) -> Result<()> {
        self.team.check()?;
        let me = self.clone();
        stream.hold(|| me);
        // SAFETY: the caller's contract.
        let queued =
            unsafe { self.comm.queue(stream, what, ops) }.and_then(|()| self.settled(None));
        queued.map_err(|e| self.team.check().err().unwrap_or(e))
    }
}

impl Drop for NcclTeam {
    /// Aborts the communicator after a fault that the watching thread may not have seen yet. A
    /// communicator of our own ends with this object anyway.
    fn drop(&mut self) {
        if self.comm.is_adopted() && self.team.check().is_err() {
            self.comm.condemn();
            self.comm.abort();
        }
    }
}

/// Collective: returns the adopted communicator, if all ranks have one. A communicator that has
/// ended on any rank does not count.
fn all_adopted(team: &LiveTeam, mine: Option<Arc<NcclComm>>) -> Result<Option<Arc<NcclComm>>> {
    const OVER: u8 = 2;
    let word = mine.as_ref().map_or(0, |c| if c.is_condemned() { OVER } else { 1 });
    let all = team.exchange("nccl adopted", &[word])?;
    if let Some(odd) = all.iter().position(|a| (*a == [0]) != (all[0] == [0])) {
        let text = "some ranks have adopted an NCCL communicator, others have not";
        return Err(Error::new(ErrorKind::Mismatch, text)
            .op("nccl")
            .of_team(team)
            .peer(Rank::new(odd as u32))
            .hint("call `World::adopt_nccl` on every rank, before heaps are made"));
    }
    Ok(mine.filter(|_| !all.contains(&vec![OVER])))
}

/// Aborts the communicator when the team is over, and reports errors of the library to the team.
fn watch(team: &Arc<NcclTeam>) -> Result<()> {
    let weak = Arc::downgrade(team);
    let body = move || {
        while let Some(t) = Weak::upgrade(&weak) {
            let failed = t.team.check().is_err();
            if failed {
                t.comm.condemn();
                std::thread::sleep(GRACE);
                t.comm.abort();
                return;
            }
            if let Err(e) = t.comm.is_ready() {
                t.team.fail(e);
                continue;
            }
            drop(t);
            std::thread::sleep(WATCH);
        }
    };
    let thread = std::thread::Builder::new().name("nccl-watch".to_owned()).spawn(body);
    thread.map(drop).map_err(|e| Error::io("starting the thread that watches NCCL", e))
}

/// Collective: checks that all ranks can open NCCL, before memory is taken.
pub(crate) fn check(team: &LiveTeam) -> Result<()> {
    team.settle("nccl", NcclComm::library()).map(drop)
}

/// Deregisters the window of a heap before its memory is freed, where the communicator stays.
pub(crate) fn unregister(nccl: Option<&Arc<NcclTeam>>, window: Option<&NcclWindow>) {
    if let (Some(nccl), Some(window)) = (nccl, window) {
        nccl.unregister(*window);
    }
}

impl Heap {
    /// Collective: registers every rank's chunk as a window of NCCL.
    pub(crate) fn register(&self) -> Result<()> {
        let nccl = self.nccl()?;
        let here = DeviceHeap::new(self)?;
        let len = self.usage().1;
        let window = nccl.register(here.addr(0, len)?, len);
        // A rank without a window reports that to its peers. A window is kept also where a peer has
        // none: it ends with the heap.
        if let Ok(window) = &window {
            self.0.window.get_or_init(|| *window);
        }
        self.team().settle("nccl window", window).map(drop)
    }

    /// Returns NCCL's handle of this heap (`ncclWindow_t`), whose offsets are those of
    /// [`SymBuf`](crate::SymBuf)s, for kernels that are compiled with NCCL's device headers. Only
    /// the backend `nccl` has one.
    pub fn nccl_window(&self) -> Option<u64> {
        self.0.window.get().and_then(NcclWindow::handle)
    }

    /// Collective at the first call: returns NCCL over the members of this heap's team, on its
    /// devices. It is the communicator that the world has adopted, if the team has all ranks in
    /// order; else one of its own.
    ///
    /// # Errors
    /// On all ranks, `Unavailable` if one has no NCCL or has not set `NCCL_NVLS_ENABLE=0` and
    /// `NCCL_GRAPH_REGISTER=0`, and `Mismatch` if they have different ones; `Unsupported` for a
    /// heap of the host, and if ranks share a GPU.
    pub fn nccl(&self) -> Result<Arc<NcclTeam>> {
        if let Some(n) = self.0.nccl.get() {
            return Ok(n.clone());
        }
        let tilewire_device::Device::Cuda(ctx) = self.device() else {
            return Err(Error::new(ErrorKind::Unsupported, "NCCL is for heaps in device memory")
                .op("nccl")
                .hint("make the heap on the `vmm` backend"));
        };
        let new = NcclTeam::meet(self.team(), &ctx).map_err(|e| e.op("nccl"))?;
        Ok(self.0.nccl.get_or_init(|| new).clone())
    }
}
