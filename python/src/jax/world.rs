//! Worlds of JAX: a rank for each device of a mesh.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tilewire::boot::{LinkMesh, Mesh, Secret, ThreadMesh};
use tilewire::core::memory::error_of_panic;
use tilewire::device::Device;
use tilewire::ops::ep::EpPlan;
use tilewire::prelude::*;
use tilewire::symm::{self, Fingerprint};

use crate::errors::OrRaise;
use crate::store::PyStore;
use crate::world::{Settings, check_fork, settings, world_cfg};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device of this process.
pub struct Local {
    pub rank: Rank,
    /// XLA's number of the device in this process.
    pub ordinal: i32,
    pub device: Device,
    pub world: symm::World,
    /// The team on which ranks agree on what they make next. Nothing is launched on it, so that its
    /// meetings have one order whatever the devices execute meanwhile.
    control: LiveTeam,
    /// Teams of call sites.
    teams: Mutex<Vec<Weak<LiveTeam>>>,
    /// The error that ended the first of them.
    first: Mutex<Option<Error>>,
    /// Layers of experts on a GPU, whose phases share a plan.
    layers: Mutex<HashMap<String, Layer>>,
}

type Layer = (Arc<LiveTeam>, Arc<EpPlan>);

pub struct JaxWorld {
    pub locals: Vec<Local>,
    pub settings: Settings,
    /// Names and sizes of the mesh's axes; ranks are numbered row by row.
    axes: Vec<(String, usize)>,
    ended: AtomicBool,
    /// Call sites are made one after the other.
    making: Mutex<HashMap<u64, u64>>,
    /// Bytes per rank of symmetric memory in use.
    used_bytes: AtomicU64,
    flying: Mutex<usize>,
    landed: Condvar,
}

static WORLDS: RwLock<Option<HashMap<u64, Arc<JaxWorld>>>> = RwLock::new(None);

/// World `number`.
///
/// # Errors
/// `Stale` if it has been finalised, or the process is a fork of the one that made it.
pub fn world(number: u64) -> Result<Arc<JaxWorld>> {
    check_fork()?;
    let all = WORLDS.read().unwrap_or_else(PoisonError::into_inner);
    all.as_ref().and_then(|w| w.get(&number)).cloned().ok_or_else(stale)
}

fn stale() -> Error {
    Error::new(ErrorKind::Stale, "the world that this was traced for has been finalised").hint(
        "call `jax.clear_caches()` after a new `tilewire.jax.init`, so that it is traced again",
    )
}

/// A launch in flight, for [`JaxWorld::finalize`].
pub struct Flight(Arc<JaxWorld>);

impl Drop for Flight {
    fn drop(&mut self) {
        *lock(&self.0.flying) -= 1;
        self.0.landed.notify_all();
    }
}

impl JaxWorld {
    /// Ranks along `axes`, in their order, of the team that `rank` belongs to.
    ///
    /// # Errors
    /// `InvalidArgument` for an axis that the mesh does not have.
    pub fn group(&self, rank: Rank, axes: &[String]) -> Result<Vec<Rank>> {
        let mut strides = vec![1; self.axes.len()];
        for i in (0..self.axes.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * self.axes[i + 1].1;
        }
        let mut base = rank.idx();
        let mut along = Vec::with_capacity(axes.len());
        for name in axes {
            let i = self.axes.iter().position(|(n, _)| n == name).ok_or_else(|| {
                let names: Vec<_> = self.axes.iter().map(|(n, _)| n.as_str()).collect();
                Error::invalid(format!("the world has no axis `{name}`")).expected(names.join(", "))
            })?;
            let (stride, size) = (strides[i], self.axes[i].1);
            base -= base / stride % size * stride;
            along.push((stride, size));
        }
        let mut group = vec![base];
        for (stride, size) in along {
            group = group.iter().flat_map(|&b| (0..size).map(move |c| b + c * stride)).collect();
        }
        Ok(group.into_iter().map(|r| Rank::new(r as u32)).collect())
    }

    /// The device of this process that XLA calls `ordinal`.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not in the mesh.
    pub fn local(&self, ordinal: i32) -> Result<usize> {
        self.locals.iter().position(|l| l.ordinal == ordinal).ok_or_else(|| {
            let have: Vec<_> = self.locals.iter().map(|l| l.ordinal).collect();
            Error::invalid("this device is not in the world's mesh")
                .expected(format_args!("one of {have:?}"))
                .seen(ordinal)
        })
    }

    /// Notes a launch.
    ///
    /// # Errors
    /// `Stale` after the end.
    pub fn fly(self: &Arc<Self>) -> Result<Flight> {
        check_fork()?;
        let mut flying = lock(&self.flying);
        if self.ended.load(Ordering::Acquire) {
            return Err(stale());
        }
        *flying += 1;
        Ok(Flight(self.clone()))
    }

    /// Collective: makes a call site on each device of this process, `make(device, number)` at the
    /// same time on all of them, where ranks may meet. `words` must be equal in all processes; the
    /// number counts the sites that were made for call `site`.
    ///
    /// # Errors
    /// `Mismatch` if another process makes something else; what `make` reports.
    pub fn together<T: Send>(
        &self,
        (op, site): (&'static str, u64),
        words: &str,
        len_bytes: usize,
        make: impl Fn(usize, u64) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let mut making = lock(&self.making);
        if self.ended.load(Ordering::Acquire) {
            return Err(stale());
        }
        let count = making.entry(site).or_default();
        *count += 1;
        let number = *count;
        let one = |i: usize| -> Result<T> {
            let control = &self.locals[i].control;
            let fp = Fingerprint::new(op, format_args!("is made, call {site}.{number} {words}"));
            control.prepare_agree(&fp)?;
            control.settle("memory", self.within_limit(len_bytes))?;
            make(i, number)
        };
        let made = std::thread::scope(|s| {
            let one = &one;
            let threads: Vec<_> = (0..self.locals.len()).map(|i| s.spawn(move || one(i))).collect();
            let panicked = |p| Err(error_of_panic("the call", p));
            threads.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect::<Vec<_>>()
        });
        // The cause, rather than what it brings on other ranks.
        let cause = made.iter().filter_map(|r| r.as_ref().err()).min_by_key(|e| nearness(e));
        if let Some(e) = cause {
            let e = e.clone().op(op);
            // A refusal that all ranks have agreed on ends nothing.
            let ended = |l: &&Local| l.control.fault().get().is_some();
            self.locals.iter().filter(ended).for_each(|l| l.note(&e));
            return Err(e);
        }
        made.into_iter().collect()
    }

    fn within_limit(&self, len_bytes: usize) -> Result<()> {
        let (used, most) =
            (self.used_bytes.load(Ordering::Acquire) as usize, self.settings.heap_bytes);
        if used.saturating_add(len_bytes) <= most {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Exhausted,
            "the world has too little symmetric memory for another call",
        )
        .expected(format_args!("at most {most} bytes per rank"))
        .seen(format_args!("{used} in use, {len_bytes} more"))
        .hint("give `init` a larger `heap_bytes`; calls in a `lax.scan` body share their memory"))
    }

    /// Counts bytes of a call site in, or out.
    pub fn count_bytes(&self, len_bytes: usize, out: bool) {
        let n = len_bytes as u64;
        match out {
            false => self.used_bytes.fetch_add(n, Ordering::AcqRel),
            true => self.used_bytes.fetch_sub(n, Ordering::AcqRel),
        };
    }

    /// Fails with the error that ended the world, if one did.
    ///
    /// # Errors
    /// The first fault of a team of a device of this process.
    pub fn check(&self) -> Result<()> {
        let first = self.locals.iter().filter_map(|l| lock(&l.first).clone());
        let met = self.locals.iter().filter_map(|l| l.world.check().err());
        first.chain(met).min_by_key(nearness).map_or(Ok(()), Err)
    }

    fn finalize(&self) {
        // No launch begins after this; those that have begun are waited for.
        self.ended.store(true, Ordering::Release);
        let most = self.locals.first().map_or(Duration::ZERO, |l| l.control.timeout());
        let end = Instant::now() + most;
        let mut flying = lock(&self.flying);
        while *flying > 0 {
            let Some(left) = end.checked_duration_since(Instant::now()) else { break };
            flying =
                self.landed.wait_timeout(flying, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.locals.iter().for_each(|l| l.world.leave());
    }
}

/// Ranks errors: one that this rank has met itself comes before those that others report, and a
/// death before all.
fn nearness(e: &Error) -> u8 {
    match e.kind() {
        ErrorKind::PeerDead => 0,
        ErrorKind::Aborted => 2,
        _ => 1,
    }
}

impl Local {
    /// The layer of experts `key`, if a call site has made it.
    pub fn layer(&self, key: &str) -> Option<Layer> {
        lock(&self.layers).get(key).cloned()
    }

    pub fn keep_layer(&self, key: String, layer: Layer) {
        lock(&self.layers).insert(key, layer);
    }

    /// Notes a team of a call site. Teams that have gone leave the list.
    pub fn watch(&self, team: &Arc<LiveTeam>) {
        let mut teams = lock(&self.teams);
        teams.retain(|t| t.strong_count() > 0);
        teams.push(Arc::downgrade(team));
    }

    /// A launch has failed: the teams of all other call sites of this rank end, too. Its program
    /// does not come to them any more, and whoever waits there must not wait for the deadline.
    pub fn end(&self, e: &Error) {
        self.note(e);
        let teams: Vec<_> = lock(&self.teams).iter().filter_map(Weak::upgrade).collect();
        for t in teams.into_iter().filter(|t| t.fault().get().is_none()) {
            let text = format!("another call of this rank has failed: {}", e.message());
            let _told = t.fail(Error::new(ErrorKind::Aborted, text).cause(e.clone()));
        }
    }

    fn note(&self, e: &Error) {
        let mut first = lock(&self.first);
        if first.as_ref().is_none_or(|f| nearness(e) < nearness(f)) {
            *first = Some(e.clone());
        }
    }
}

/// Collective over the processes of a mesh: a rank for each of its devices. `mine` are ranks and
/// ordinals of those that this process has. Processes meet in `store`, as `name`.
#[pyfunction]
#[pyo3(signature = (number, axes, mine, store, name, backend, cuda, heap_bytes, timeout_s))]
#[expect(clippy::too_many_arguments, reason = "called by position from one Python function")]
pub fn jax_init(
    py: Python<'_>,
    number: u64,
    axes: Vec<(String, usize)>,
    mine: Vec<(u32, i32)>,
    store: Option<Py<PyAny>>,
    name: &str,
    backend: &str,
    cuda: bool,
    heap_bytes: Option<usize>,
    timeout_s: f64,
) -> PyResult<String> {
    let make = || {
        let size = axes.iter().map(|a| a.1).product();
        let cfg = world_cfg(timeout_s, false)?;
        let ordinal = |n: i32| if cuda { u32::try_from(n).ok() } else { None };
        let all = mine.iter().map(|m| settings(backend, ordinal(m.1), heap_bytes));
        let all = all.collect::<Result<Vec<_>>>()?;
        let first = all
            .first()
            .cloned()
            .ok_or_else(|| Error::invalid("no device of the mesh belongs to this process"))?;
        let locals = meet(&mine, size, (store, name), cfg, &all)?;
        let kind = first.backend.to_string();
        let world = JaxWorld {
            locals,
            settings: first,
            axes: axes.clone(),
            ended: AtomicBool::new(false),
            making: Mutex::default(),
            used_bytes: AtomicU64::new(0),
            flying: Mutex::default(),
            landed: Condvar::new(),
        };
        let mut worlds = WORLDS.write().unwrap_or_else(PoisonError::into_inner);
        worlds.get_or_insert_default().insert(number, Arc::new(world));
        Ok(kind)
    };
    py.detach(make).or_raise(py)
}

/// Connects the ranks of this process with all others, a thread for each.
fn meet(
    mine: &[(u32, i32)],
    size: usize,
    (store, name): (Option<Py<PyAny>>, &str),
    cfg: WorldCfg,
    settings: &[Settings],
) -> Result<Vec<Local>> {
    let secret = match &Config::from_env()?.secret {
        Some(text) => Secret::from_hex(text)?,
        None => Secret::from_job(name),
    };
    let deadline = Deadline::after(cfg.rendezvous_timeout);
    let store = store.map(|s| PyStore::open(s, "tilewire", deadline)).transpose()?;
    let threads = match &store {
        None => ThreadMesh::group(size)?,
        Some(_) => Vec::new(),
    };
    let join = |i: usize| -> Result<Local> {
        let ((rank, ordinal), device) = (mine[i], settings[i].device.clone());
        let rank = Rank::new(rank);
        let mesh: Arc<dyn Mesh> = match &store {
            None => threads[rank.idx()].clone(),
            Some(s) => LinkMesh::connect(s, name, rank, size, &secret, deadline)
                .map_err(|e| s.failure(e, rank))?,
        };
        let world = symm::World::join(mesh, cfg);
        let control = world.everyone("jax")?;
        let (teams, first, layers) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Local { rank, ordinal, device, world, control, teams, first, layers })
    };
    std::thread::scope(|s| {
        let join = &join;
        let ranks: Vec<_> = (0..mine.len()).map(|i| s.spawn(move || join(i))).collect();
        let panicked = |p| Err(error_of_panic("the call", p));
        ranks.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
    })
}

/// Raises what ended the world, if anything did.
#[pyfunction]
pub fn jax_check(py: Python<'_>, number: u64) -> PyResult<()> {
    world(number).and_then(|w| w.check()).or_raise(py)
}

/// Bytes per rank of symmetric memory in use.
#[pyfunction]
pub fn jax_used_bytes(py: Python<'_>, number: u64) -> PyResult<u64> {
    let world = world(number).or_raise(py)?;
    Ok(world.used_bytes.load(Ordering::Acquire))
}

/// Ends a world on this process: launches in flight are waited for, the others hear of it. May be
/// called many times.
#[pyfunction]
pub fn jax_finalize(py: Python<'_>, number: u64) {
    if check_fork().is_err() {
        return;
    }
    let gone = {
        let mut all = WORLDS.write().unwrap_or_else(PoisonError::into_inner);
        all.as_mut().and_then(|m| m.remove(&number))
    };
    if let Some(world) = gone {
        py.detach(|| world.finalize());
    }
}

/// At the end of the process: says goodbye and drops nothing.
#[pyfunction]
pub fn jax_leave_all() {
    super::site::keep_states();
    if check_fork().is_err() {
        return;
    }
    let all = WORLDS.write().unwrap_or_else(PoisonError::into_inner).take();
    for (_, world) in all.into_iter().flatten() {
        world.locals.iter().for_each(|l| l.world.leave());
        std::mem::forget(world);
    }
}
