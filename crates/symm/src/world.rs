//! The world: all ranks of a job, and the teams they form.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tilewire_boot::{Mesh, PeerExit, ThreadMesh};
use tilewire_core::{BackendKind, Config, Error, ErrorKind, Rank, Result, Team};
use tilewire_device::cuda::NcclComm;
use tilewire_device::{Fault, Process};

use crate::nccl::{Adopted, GRACE};
use crate::silence::Siblings;
use crate::team::{LiveTeam, lock};

/// Time limits of a world.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WorldCfg {
    /// Longest wait on a live peer. Default 600 s.
    pub timeout: Duration,
    /// Longest time for the ranks to meet, and to form a team. Default 60 s, or `timeout` where
    /// that is set and shorter.
    pub rendezvous_timeout: Duration,
    /// After how long a wait is reported in the log. Default 30 s.
    pub late_warning: Duration,
    /// Makes every eager launch first compare operation and sizes with all members on the host, so
    /// that ranks with different launches get a `Mismatch` at once, on devices too. It costs a
    /// meeting of the hosts for each launch; launches into a capture are not compared. It must be
    /// equal on all ranks. Default off.
    pub check: bool,
}

impl Default for WorldCfg {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            rendezvous_timeout: Duration::from_secs(60),
            late_warning: Duration::from_secs(30),
            check: false,
        }
    }
}

impl WorldCfg {
    /// Returns the defaults, with the values that the environment sets (`TILEWIRE_TIMEOUT_S`).
    pub fn of(config: &Config) -> Self {
        config.timeout.map_or_else(Self::default, Self::of_timeout)
    }

    /// Returns the defaults with this `timeout`. No meeting lasts longer, either.
    pub fn of_timeout(timeout: Duration) -> Self {
        let default = Self::default();
        let rendezvous_timeout = default.rendezvous_timeout.min(timeout);
        Self { timeout, rendezvous_timeout, ..default }
    }

    /// Limits for tests: two seconds on a live peer.
    pub fn for_tests() -> Self {
        Self { timeout: Duration::from_secs(2), ..Self::default() }
    }
}

struct WorldInner {
    process: Process,
    mesh: Arc<dyn Mesh>,
    cfg: WorldCfg,
    teams: Arc<Siblings>,
    /// The exits so far, with their kinds, for teams that are formed later.
    exits: Mutex<Vec<(Rank, PeerExit)>>,
    /// The number of teams that each (name, members) has formed: their generations.
    generations: Mutex<HashMap<(String, Vec<Rank>), u64>>,
    reported: Mutex<ReportedDeaths>,
    adopted: Arc<Adopted>,
}

/// Deaths that the faults of teams report. A peer may report one before my own mesh knows it.
#[derive(Default)]
struct ReportedDeaths {
    /// The faults of teams that may still report a death, and the members of these teams.
    open: Vec<(Arc<Fault>, Team)>,
    /// World ranks: bit `i` is rank `i`.
    mask: u64,
}

impl ReportedDeaths {
    /// Reads the faults. Keeps each fault that is not set yet and that a team can still set.
    fn read(&mut self) -> u64 {
        let mask = &mut self.mask;
        self.open.retain(|(fault, team)| {
            // Counted first: a fault without another holder cannot be set after it was read.
            let last = Arc::strong_count(fault) == 1;
            // Reads a fault that is set already, without asking devices for new ones.
            let Some(e) = fault.is_set().then(|| fault.get()).flatten() else { return !last };
            if let Some(peer) = e.get_peer().filter(|_| e.is_peer_dead()) {
                *mask |= team.members().get(peer.idx()).map_or(0, |r| 1 << r.idx());
            }
            false
        });
        *mask
    }
}

/// All ranks of a job. A value: make and drop as many as you like, several may live side by side.
///
/// Dropping it says goodbye to the peers, unless the thread is panicking: then they see a death.
/// Drop it behind the work that peers wait for: a second after the goodbye their waits end. Keep it
/// as long as its teams: a team that outlives it learns of no more deaths, so a wait for a rank
/// that dies then ends at its deadline.
///
/// In a forked child its calls are `Stale`, and dropping it does nothing.
pub struct World(Arc<WorldInner>);

/// An `ncclComm_t` that [`World::return_nccl`] gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnedNccl {
    /// As it was adopted: its maker may use it on.
    Live(u64),
    /// The fault of a team has revoked it: `ncclCommDestroy` is all that it may be given to.
    Revoked(u64),
}

impl World {
    /// Joins over connections that are already made.
    pub fn join(mesh: Arc<dyn Mesh>, cfg: WorldCfg) -> Self {
        let inner = Arc::new(WorldInner {
            process: Process::default(),
            mesh,
            cfg,
            teams: Arc::default(),
            exits: Mutex::default(),
            generations: Mutex::default(),
            reported: Mutex::default(),
            adopted: Arc::default(),
        });
        let weak = Arc::downgrade(&inner);
        inner.mesh.on_exit(Box::new(move |rank, how| {
            if let Some(w) = weak.upgrade() {
                w.peer_exit(rank, how);
            }
        }));
        Self(inner)
    }

    /// Makes a world of one rank.
    ///
    /// # Errors
    /// `Exhausted` if the operating system gives no resources.
    pub fn solo(cfg: WorldCfg) -> Result<Self> {
        let mesh =
            ThreadMesh::group(1)?.pop().ok_or_else(|| Error::internal("the world has no mesh"))?;
        Ok(Self::join(mesh, cfg))
    }

    /// Runs `f` on `n` ranks, each a thread of this process, and returns their results in order.
    ///
    /// # Errors
    /// The error of the rank that met one of its own; of several the first. `Internal` if a rank
    /// panicked.
    pub fn run_threads<R: Send>(
        n: usize,
        cfg: WorldCfg,
        f: impl Fn(World) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let meshes = ThreadMesh::group(n)?;
        let f = &f;
        std::thread::scope(|s| {
            let threads: Vec<_> = meshes
                .into_iter()
                .map(|mesh| {
                    std::thread::Builder::new()
                        .name(format!("rank{}", mesh.rank().get()))
                        .spawn_scoped(s, move || f(World::join(mesh, cfg)))
                        .map_err(|e| Error::io("starting the thread of a rank", e))
                })
                .collect();
            let mut out = Vec::with_capacity(n);
            let (mut errors, mut panics) = (Vec::new(), Vec::new());
            for t in threads {
                match t.map(std::thread::ScopedJoinHandle::join) {
                    Ok(Ok(Ok(v))) => out.push(v),
                    Ok(Ok(Err(e))) | Err(e) => errors.push(e),
                    Ok(Err(payload)) => panics.push(panic_text(&*payload)),
                }
            }
            // Panics are the cause, and errors of other ranks their consequence. All panics are
            // reported: one must not hide another.
            if !panics.is_empty() {
                let text = format!("a rank panicked: {}", panics.join("; another: "));
                return Err(Error::internal(text));
            }
            // Of equals the first: a rank's own error before its consequences on others.
            errors.into_iter().min_by_key(Error::distance).map_or(Ok(out), Err)
        })
    }

    /// Returns my rank in the world.
    pub fn rank(&self) -> Rank {
        self.0.mesh.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.mesh.size()
    }

    /// Returns the world ranks that have not died or left, as far as this rank knows. A rank whose
    /// death is the fault of a team of mine is never among them, also where only a peer had noticed
    /// it. So after a `PeerDead` the remaining ranks can form their next team of these at once.
    pub fn alive(&self) -> Vec<Rank> {
        let gone = self.0.mesh.gone() | lock(&self.0.reported).read();
        Rank::all(self.size()).filter(|r| gone >> r.idx() & 1 == 0).collect()
    }

    /// Collective over `members` (world ranks, in team order): forms a team. `None` if I am not
    /// a member; then nothing is waited for.
    ///
    /// The same name and members may be used again: each time is a new generation on new memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad member list; `Timeout` or `PeerDead` naming the missing ranks;
    /// `Stale` in a forked child.
    pub fn team(&self, members: &[Rank], name: &str) -> Result<Option<LiveTeam>> {
        self.0.process.check()?;
        let Some(info) = Team::new(name, members, self.rank(), self.size())? else {
            return Ok(None);
        };
        let generation = {
            let mut g = lock(&self.0.generations);
            let n = g.entry((name.to_owned(), members.to_vec())).or_default();
            *n += 1;
            *n
        };
        let list: Vec<String> = members.iter().map(|r| r.get().to_string()).collect();
        let digest = blake3::hash(list.join(",").as_bytes()).to_hex();
        let tag = format!("team/{name}/{}/{generation}", &digest[..16]);
        let met = LiveTeam::meet(
            self.0.mesh.clone(),
            info.clone(),
            &tag,
            generation,
            (self.0.cfg, self.0.adopted.clone(), self.0.teams.clone()),
        );
        let team = met?;
        {
            let mut reported = lock(&self.0.reported);
            reported.read();
            reported.open.push((team.fault().clone(), info));
        }
        self.0.teams.add(&team.0);
        // A member may have left while we met, before the team was on the list.
        let gone = lock(&self.0.exits).clone();
        for (r, how) in gone {
            team.peer_exit(r, how);
        }
        Ok(Some(team))
    }

    /// Collective over all ranks: makes the team of all ranks.
    ///
    /// # Errors
    /// As [`World::team`].
    pub fn everyone(&self, name: &str) -> Result<LiveTeam> {
        let all: Vec<Rank> = Rank::all(self.size()).collect();
        self.team(&all, name)?
            .ok_or_else(|| Error::internal("this rank is not in the team of all ranks"))
    }

    /// Adopts a communicator of the caller's. Heaps of teams with all ranks of this world, in
    /// order, use it for NCCL instead of one of their own. All ranks must adopt, before they make
    /// heaps of this kind.
    ///
    /// It must live until [`World::return_nccl`] returns it, and work on it must be queued in one
    /// order on all ranks ([`NcclComm::adopt`]). The fault of a team that uses it revokes it.
    ///
    /// # Errors
    /// `InvalidArgument` if its ranks are not the world's, or if the world has one already.
    pub fn adopt_nccl(&self, comm: Arc<NcclComm>) -> Result<()> {
        let mine = (self.rank().get(), self.size());
        if comm.me() != mine {
            return Err(Error::invalid("the NCCL communicator has other ranks than the world")
                .op("nccl")
                .expected(format_args!("rank {} of {}", mine.0, mine.1))
                .seen(format_args!("rank {} of {}", comm.me().0, comm.me().1)));
        }
        let mut adopted = lock(&self.0.adopted.0);
        if adopted.is_some() {
            return Err(Error::invalid("this world has an NCCL communicator already")
                .op("nccl")
                .hint("take that one back first: `World::return_nccl`"));
        }
        *adopted = Some(comm);
        Ok(())
    }

    /// Ends [`World::adopt_nccl`]. Returns the `ncclComm_t`, and whether its maker can still use it
    /// or only destroy it. `None` if no communicator was adopted, or if it was aborted, which has
    /// freed it.
    ///
    /// A fault of one team ends the communicator for all teams that use it: work on it would wait
    /// for the rank that failed.
    ///
    /// # Errors
    /// `InvalidArgument` while heaps, plans, graphs or queued work use it, or the caller has a
    /// clone.
    pub fn return_nccl(&self) -> Result<Option<ReturnedNccl>> {
        // The watching thread of a team that has just ended releases it soon.
        let start = Instant::now();
        while lock(&self.0.adopted.0).as_ref().is_some_and(|c| Arc::strong_count(c) > 1)
            && start.elapsed() < 40 * GRACE
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut adopted = lock(&self.0.adopted.0);
        let Some(comm) = adopted.take() else { return Ok(None) };
        match Arc::try_unwrap(comm) {
            Ok(comm) => {
                let over = comm.is_over();
                let kind = if over { ReturnedNccl::Revoked } else { ReturnedNccl::Live };
                Ok(comm.release().map(kind))
            }
            Err(comm) => {
                let users = Arc::strong_count(&comm) - 1;
                *adopted = Some(comm);
                Err(Error::invalid("the NCCL communicator is in use").op("nccl").seen(users).hint(
                    "drop the heaps, plans and graphs that use it, and synchronize their streams",
                ))
            }
        }
    }

    /// Says goodbye to the peers now, as the end of the last owner would: for a process that ends
    /// without dropping its objects. Waits of peers for this rank end.
    pub fn leave(&self) {
        self.0.mesh.leave();
    }

    /// As [`World::leave`], for a rank that ends because of `why`: waits of peers that end by this
    /// goodbye then name the reason. The faults that peers have met are not given: these know them.
    pub fn leave_because(&self, why: &Error) {
        if why.is_team_fault() {
            return self.leave();
        }
        let kind = why.to_json()["kind"].as_str().unwrap_or("error").to_owned();
        self.0.mesh.leave_because(&format!("{kind}: {}", why.message()));
    }

    /// Raises the first fault of any live team.
    ///
    /// # Errors
    /// That fault; `Stale` in a forked child.
    pub fn check(&self) -> Result<()> {
        self.0.process.check()?;
        self.0.teams.all().into_iter().try_for_each(|t| t.check())
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let owned = payload.downcast_ref::<String>().cloned();
    owned
        .or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "(no text)".to_owned())
}

impl WorldInner {
    fn peer_exit(&self, rank: Rank, how: PeerExit) {
        // Before the list is read: a team is put on the list before it reads the exits.
        lock(&self.exits).push((rank, how));
        for t in self.teams.all() {
            t.peer_exit(rank, how);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A forked child has neither the threads nor the right to speak for its parent.
        if self.0.process.is_foreign() {
            std::mem::forget(self.0.clone());
            return;
        }
        if !std::thread::panicking() {
            self.0.mesh.leave();
            return;
        }
        // Work in flight holds the mesh, and waits for peers that wait for us: the death must be
        // reported before that work can end.
        for team in self.0.teams.all() {
            let text = format!("{} panicked", team.named(team.rank()));
            let death = Error::new(ErrorKind::PeerDead, text).rank(team.rank()).peer(team.rank());
            let _told = team.fail(death);
        }
        // Owners of the mesh may stay alive (memory of work that does not end), so it ends here:
        // peers that meet anew must not wait for this rank.
        self.0.mesh.die();
    }
}

/// The availability of a backend on this machine, and the reason if it is not available.
#[derive(Clone, PartialEq, Debug)]
pub struct BackendStatus {
    /// The backend.
    pub kind: BackendKind,
    /// `None` if it can be used.
    pub why_not: Option<String>,
}

/// Returns the availability of each backend on this machine. Never fails and needs no world.
pub fn backends() -> Vec<BackendStatus> {
    BackendKind::NAMES
        .iter()
        .map(|&(_, kind)| BackendStatus { kind, why_not: why_not(kind) })
        .collect()
}

fn why_not(kind: BackendKind) -> Option<String> {
    match kind {
        BackendKind::Host => None,
        BackendKind::Vmm => tilewire_device::cuda::usable().err().map(|e| e.message().to_owned()),
        BackendKind::Nccl => tilewire_device::cuda::usable()
            .and_then(|()| tilewire_device::cuda::NcclComm::library().map(drop))
            .err()
            .map(|e| e.message().to_owned()),
        BackendKind::Nvshmem => tilewire_device::cuda::usable()
            .and_then(|()| tilewire_device::cuda::Nvshmem::library().map(drop))
            .err()
            .map(|e| e.message().to_owned()),
        _ => Some("it is not part of this version".to_owned()),
    }
}

pub(crate) fn unavailable(kind: BackendKind) -> Error {
    let why = why_not(kind).unwrap_or_else(|| "it is not available".to_owned());
    Error::new(ErrorKind::Unavailable, format!("backend `{kind}`: {why}"))
        .hint("use the `host` backend, which runs everywhere")
}
