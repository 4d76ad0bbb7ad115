//! Worlds: the ranks of a process group, their memory and their plans.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tilewire::boot::{Flags, LinkMesh, Secret, ThreadMesh, detect, join_processes};
use tilewire::device::Device;
use tilewire::plans::{Plans, Recipe};
use tilewire::prelude::*;
use tilewire::symm;

use crate::call::let_go;
use crate::dlpack;
use crate::errors::OrRaise;
use crate::keys::Key;
use crate::store::PyStore;

/// A rank's part in a team: what its calls need.
pub struct Member {
    pub team: LiveTeam,
    pub plans: Plans<Key>,
    pub device: Device,
    /// Calls on the CPU run here, one after the other.
    pub stream: Option<Stream>,
    /// Shared with the teams that were made of it: the goodbye comes with the last of them.
    world: Arc<symm::World>,
    settings: Settings,
}

#[derive(Clone)]
pub struct Settings {
    pub backend: BackendKind,
    pub device: Device,
    pub heap_bytes: usize,
}

/// Members by the number that calls pass.
static MEMBERS: RwLock<Option<HashMap<u64, Arc<Member>>>> = RwLock::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);
/// This process has what a fork of it lacks: threads, connections, devices.
static USED: AtomicBool = AtomicBool::new(false);
/// This process is a fork of one that had.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The number of worlds that each group has formed in this process: the name of the next meeting.
static FORMED: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);

/// Bytes that a heap begins with; it grows as plans need more.
const FIRST_BYTES: usize = 16 << 20;
/// Bytes per rank that a heap on the CPU may grow to by default. Pages that nothing touches cost
/// nothing.
const HOST_LIMIT: usize = 4 << 30;
/// Limit for the ranks of a group to arrive, where a wait may last longer.
const RENDEZVOUS: Duration = Duration::from_secs(120);

/// The member of world `id`.
///
/// # Errors
/// `Stale` if it has been finalised, or the process is a fork of the one that made it.
pub fn member(id: u64) -> Result<Arc<Member>> {
    check_fork()?;
    let all = MEMBERS.read().unwrap_or_else(PoisonError::into_inner);
    all.as_ref().and_then(|m| m.get(&id)).cloned().ok_or_else(|| {
        Error::new(ErrorKind::Stale, "the world has been finalised")
            .hint("make a new one: `tilewire.torch.init()`")
    })
}

/// Returns the number of ranks of world `id`, which the number says.
pub fn size_of(id: u64) -> usize {
    (id >> 12 & 0xFFF) as usize
}

/// Fails in a fork of a process that has called an operation or made a world. Every call comes here
/// first, so that a fork of a process which has only imported this module is as any other.
///
/// # Errors
/// `Stale`.
pub fn check_fork() -> Result<()> {
    // No store where all would write the same line.
    if !USED.load(Ordering::Relaxed) {
        USED.store(true, Ordering::Relaxed);
    }
    if FORKED.load(Ordering::Relaxed) {
        return Err(Error::new(
            ErrorKind::Stale,
            "this process is a fork: what it sees of tilewire is the parent's",
        )
        .hint(
            "start workers with `spawn`, or fork them before the first call, or call tilewire in \
             the parent only",
        ));
    }
    Ok(())
}

impl Member {
    /// The plan of `key`, as [`Plans::get`] has it. A miss has what symmetric tensors have left.
    pub fn plan<P: Any + Send + Sync, M: Fn(&Heap) -> Result<P>>(
        &self,
        key: &Key,
        stream: &Stream,
        recipe: impl FnOnce() -> Recipe<P, M>,
    ) -> Result<Arc<P>> {
        if crate::symm::any_gone() && !self.plans.contains(key) {
            crate::symm::free_gone()?;
        }
        let mut freed = Ok(());
        let plan = self.plans.get(key, stream, || {
            // Plans are made by work that other threads wait for.
            if let Stream::Host(own) = stream {
                own.let_go();
            }
            // What older plans hold can be taken then.
            freed = let_go(Some(stream));
            recipe()
        });
        freed.and(plan)
    }

    fn over(world: Arc<symm::World>, team: LiveTeam, settings: Settings) -> Result<u64> {
        let Settings { backend, ref device, heap_bytes } = settings;
        let grows = matches!(backend, BackendKind::Host | BackendKind::Vmm);
        let first = if grows { FIRST_BYTES.min(heap_bytes) } else { heap_bytes };
        let mut cfg = HeapCfg { reserve_bytes: Some(heap_bytes), ..HeapCfg::new(first) };
        let stream = match device {
            Device::Host => Some(Stream::new("python")?),
            Device::Cuda(ctx) => {
                cfg = cfg.on_device(ctx.ordinal());
                None
            }
        };
        let heap = team.heap(backend, cfg)?;
        let plans = Plans::new(&heap, heap_bytes);
        // A compiled graph bakes the number and the shapes that follow from size and rank, and may
        // be taken from a cache on disk by a job of another size: the number says both.
        let (size, rank) = (team.size() as u64, u64::from(team.rank().get()));
        let id = NEXT.fetch_add(1, Ordering::Relaxed) << 24 | size << 12 | rank;
        let device = device.clone();
        let me = Self { team, plans, device, stream, world, settings };
        let mut all = MEMBERS.write().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().insert(id, Arc::new(me));
        Ok(id)
    }
}

/// A world, seen from one rank. The Python class wraps it.
#[pyclass(frozen)]
pub struct World {
    id: u64,
}

#[pymethods]
impl World {
    /// The number that operations take.
    #[getter]
    fn handle(&self) -> u64 {
        self.id
    }

    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(member(self.id).or_raise(py)?.team.rank().get())
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(member(self.id).or_raise(py)?.team.size())
    }

    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        Ok(match &member(self.id).or_raise(py)?.device {
            Device::Host => "cpu".to_owned(),
            Device::Cuda(ctx) => format!("cuda:{}", ctx.ordinal()),
        })
    }

    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<String> {
        Ok(member(self.id).or_raise(py)?.settings.backend.to_string())
    }

    /// Collective over `ranks` (of this team, in order): a team of them; none for others.
    fn team(&self, py: Python<'_>, ranks: Vec<u32>, name: &str) -> PyResult<Option<World>> {
        let me = member(self.id).or_raise(py)?;
        let make = || {
            let mut members = Vec::with_capacity(ranks.len());
            for &r in &ranks {
                let of_team = me.team.members().get(r as usize).copied();
                members.push(of_team.ok_or_else(|| {
                    Error::invalid(format!("rank {r} is not in a team of {} ranks", me.team.size()))
                })?);
            }
            let Some(team) = me.world.team(&members, name)? else { return Ok(None) };
            Member::over(me.world.clone(), team, me.settings.clone()).map(Some)
        };
        let id = py.detach(make).or_raise(py)?;
        Ok(id.map(|id| World { id }))
    }

    /// Raises the fault of the team, if there is one.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        member(self.id).or_raise(py)?.team.check().or_raise(py)
    }

    /// Collective: waits until all ranks have come here.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let me = member(self.id).or_raise(py)?;
        py.detach(|| me.team.exchange("barrier", &[]).map(drop)).or_raise(py)
    }

    /// Plans, and bytes of symmetric memory, in use.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let me = member(self.id).or_raise(py)?;
        let u = py.detach(|| me.plans.usage());
        let d = PyDict::new(py);
        d.set_item("plans", u.plans)?;
        d.set_item("plans_made", u.misses)?;
        d.set_item("used_bytes", u.used_bytes)?;
        d.set_item("total_bytes", u.total_bytes)?;
        d.set_item("limit_bytes", me.settings.heap_bytes)?;
        Ok(d)
    }

    /// Ends it on this rank: says goodbye to the others, and gives the memory back once nothing
    /// uses it. May be called many times.
    fn finalize(&self, py: Python<'_>) {
        if FORKED.load(Ordering::Relaxed) {
            return;
        }
        let gone = {
            let mut all = MEMBERS.write().unwrap_or_else(PoisonError::into_inner);
            all.as_mut().and_then(|m| m.remove(&self.id))
        };
        // Its end may wait for work of the device.
        py.detach(|| {
            if let Err(e) = let_go(None).and_then(|()| crate::symm::free_gone()) {
                log::warn!("symmetric tensors of a world that ends: {e}");
            }
            drop(gone);
        });
    }
}

/// Says goodbye for every world, and drops nothing else: at the end of the process the framework's
/// memory and the driver may be gone already.
#[pyfunction]
pub fn leave_all() {
    if FORKED.load(Ordering::Relaxed) {
        return;
    }
    let all = MEMBERS.write().unwrap_or_else(PoisonError::into_inner).take();
    for (_, member) in all.into_iter().flatten() {
        member.world.leave();
        std::mem::forget(member);
    }
}

/// Called in the child of a fork: its worlds are the parent's, whatever Python does with the
/// objects.
#[pyfunction]
pub fn forked() {
    if !USED.load(Ordering::Relaxed) {
        return;
    }
    FORKED.store(true, Ordering::Relaxed);
    // Another thread of the parent may have held the lock at the fork; then the child never takes
    // it, which is as good: calls are refused before.
    if let Ok(mut all) = MEMBERS.try_write() {
        std::mem::forget(all.take());
    }
}

pub fn settings(
    backend: &str,
    ordinal: Option<u32>,
    heap_bytes: Option<usize>,
) -> Result<Settings> {
    let device = match ordinal {
        None => Device::Host,
        Some(n) => Device::Cuda(dlpack::context(n)?),
    };
    let backend = match (backend, &device) {
        ("auto", Device::Host) => BackendKind::Host,
        ("auto", Device::Cuda(_)) => BackendKind::Vmm,
        (name, _) => name.parse()?,
    };
    if (backend == BackendKind::Host) != matches!(device, Device::Host) {
        return Err(Error::invalid(format!("the backend `{backend}` does not serve this device"))
            .hint("`host` serves the CPU; `vmm`, `nccl` and `nvshmem` serve CUDA devices"));
    }
    let limit = match (heap_bytes, &device) {
        (Some(bytes), _) => bytes.max(1),
        (None, Device::Host) => HOST_LIMIT,
        (None, Device::Cuda(ctx)) => ctx.memory_info()?.1 / 4,
    };
    Ok(Settings { backend, device, heap_bytes: limit })
}

pub fn world_cfg(timeout_s: f64, check: bool) -> Result<WorldCfg> {
    check_fork()?;
    let timeout = Duration::try_from_secs_f64(timeout_s).ok().filter(|t| !t.is_zero());
    let timeout = timeout.ok_or_else(|| {
        Error::invalid("`timeout_s` must be a positive number of seconds").seen(timeout_s)
    })?;
    let rendezvous_timeout = RENDEZVOUS.min(timeout);
    Ok(WorldCfg { timeout, check, rendezvous_timeout, ..WorldCfg::default() })
}

fn next_meeting(group: &str) -> String {
    let mut formed = FORMED.lock().unwrap_or_else(PoisonError::into_inner);
    let n = formed.get_or_insert_default().entry(group.to_owned()).or_default();
    *n += 1;
    format!("{group}.{n}")
}

/// Collective: the world of the process group whose ranks meet in `store`, as `name`.
#[pyfunction]
#[pyo3(signature = (store, name, rank, size, backend, ordinal, heap_bytes, timeout_s, check))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python function")]
pub fn world_of_store(
    py: Python<'_>,
    store: Py<PyAny>,
    name: &str,
    rank: u32,
    size: usize,
    backend: &str,
    ordinal: Option<u32>,
    heap_bytes: Option<usize>,
    timeout_s: f64,
    check: bool,
) -> PyResult<World> {
    let make = || {
        let cfg = world_cfg(timeout_s, check)?;
        // Counted before anything can fail: ranks that call again after a failure, here or on
        // another rank, must mean the same meeting.
        let job = next_meeting(name);
        let settings = settings(backend, ordinal, heap_bytes)?;
        let mesh: Arc<dyn tilewire::boot::Mesh> = if size == 1 {
            ThreadMesh::group(1)?.pop().ok_or_else(|| Error::internal("a group of one is empty"))?
        } else {
            let config = Config::from_env()?;
            let secret = Secret::of_process(&config, &job)?;
            let (rank, deadline) = (Rank::new(rank), Deadline::after(cfg.rendezvous_timeout));
            let store = PyStore::open(store, "tilewire", deadline)?;
            LinkMesh::connect(&store, &job, rank, size, &secret, deadline)
                .map_err(|e| store.failure(e, rank))?
        };
        form(mesh, cfg, settings)
    };
    let id = py.detach(make).or_raise(py)?;
    Ok(World { id })
}

/// Collective: the world of the processes that a launcher started (`torchrun`, `tilewire run`,
/// `mpirun`, ...), or of this process alone.
#[pyfunction]
pub fn world_of_environment(
    py: Python<'_>,
    backend: &str,
    ordinal: Option<u32>,
    heap_bytes: Option<usize>,
    timeout_s: f64,
    check: bool,
) -> PyResult<World> {
    let make = || {
        let cfg = world_cfg(timeout_s, check)?;
        let config = Config::from_env()?;
        let place = detect(&Flags::of_process(), &std::env::vars().collect())?;
        let mesh = join_processes(&place, &config, Deadline::after(cfg.rendezvous_timeout))?;
        form(mesh, cfg, settings(backend, ordinal, heap_bytes)?)
    };
    let id = py.detach(make).or_raise(py)?;
    Ok(World { id })
}

fn form(mesh: Arc<dyn tilewire::boot::Mesh>, cfg: WorldCfg, settings: Settings) -> Result<u64> {
    let world = Arc::new(symm::World::join(mesh, cfg));
    let team = world.everyone("world")?;
    Member::over(world, team, settings)
}

/// Kernels that came with the package lie in `dir`.
#[pyfunction]
pub fn use_cubins(dir: std::path::PathBuf) {
    tilewire::device::jit::look_in(dir);
}

/// Returns the backends of this machine: name, and why not (none if it can be used).
#[pyfunction]
pub fn backends() -> Vec<(String, Option<String>)> {
    symm::backends().into_iter().map(|b| (b.kind.to_string(), b.why_not)).collect()
}
