//! Teams that have met: control pages, signals, faults, agreement.

use std::cell::RefCell;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tilewire_boot::{Mesh, Parcel, PeerExit};
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result, Team};
use tilewire_device::{Fault, Process};

use crate::broadcast_status::{Stop, exchange_parts, leave_word};
use crate::control::{Control, NUM_CHANNELS, NUM_SIGNALS, page_bytes};
use crate::hook::{Hook, HookAction, HookPoint, StepKind};
use crate::map::{Mapping, shared_file};
use crate::nccl::Adopted;
use crate::protocol::{AbortCode, DEAD, raise};
use crate::recorder::{self, Entry, EntryState, NUM_ENTRIES};
use crate::signals::SlotPool;
use crate::silence::{Siblings, Watch};
use crate::sink::AbortSinks;
use crate::traffic::{Traffic, TrafficCounters};
use crate::world::WorldCfg;

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct TeamInner {
    pub process: Process,
    pub info: Team,
    pub id: u64,
    pub generation: u64,
    pub ctl: Control,
    pub mesh: Arc<dyn Mesh>,
    pub fault: Arc<Fault>,
    pub cfg: WorldCfg,
    /// The world's, of the caller's making.
    pub adopted: Arc<Adopted>,
    /// All teams of this rank, this one included once the world has it.
    pub siblings: Arc<Siblings>,
    pub traffic: TrafficCounters,
    /// Devices that must learn of an abort.
    pub sinks: AbortSinks,
    /// Team ranks that died, and that left.
    dead: AtomicU64,
    left: AtomicU64,
    /// The abort of a peer that my device has seen, packed; or 0.
    seen_abort: AtomicU64,
    /// The last call of mine whose wait was reported to take long.
    pub late: AtomicU64,
    /// The count that the next wait on (slot, source) expects, less the wait's own number.
    expected: Vec<AtomicU64>,
    epochs: Vec<AtomicU64>,
    pub slots: Mutex<SlotPool>,
    pub seq: AtomicU64,
    exchanges: AtomicU64,
    hook: OnceLock<Hook>,
    hook_counts: [AtomicU64; 6],
}

impl TeamInner {
    /// Makes a tag for the next exchange that carries descriptors.
    pub fn mesh_tag(&self) -> String {
        format!("{:016x}/{}/fds", self.id, self.exchanges.fetch_add(1, Ordering::Relaxed))
    }
}

/// The mesh speaks of world ranks; errors of a team speak of team ranks.
fn translate(team: &Team, e: Error) -> Error {
    match e.get_peer().and_then(|world| team.team_rank(world)) {
        Some(peer) => e.renumbered(team.rank(), peer).of_team(team),
        None => e,
    }
}

/// A team whose members have met. Clones are the same team; it derefs to its [`Team`] value.
///
/// Once a wait has failed the team is faulted for good: every call returns the first error. The
/// members that are left can form a new team on new memory.
///
/// In a forked child its calls are `Stale`, and dropping it does nothing.
#[derive(Clone)]
pub struct LiveTeam(pub(crate) Arc<TeamInner>);

impl Drop for LiveTeam {
    fn drop(&mut self) {
        // A forked child must not release resources that only its parent can end.
        if self.0.process.is_foreign() {
            std::mem::forget(self.0.clone());
        }
    }
}

impl Deref for LiveTeam {
    type Target = Team;

    fn deref(&self) -> &Team {
        &self.0.info
    }
}

impl std::fmt::Debug for LiveTeam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LiveTeam({}, {} of {})", self.name(), self.rank(), self.size())
    }
}

/// Returns the file of each member's control page.
///
/// # Errors
/// `Mismatch` where a member forms another generation of the team.
fn control_files(parcels: Vec<Parcel>, generation: u64) -> Result<Vec<OwnedFd>> {
    let mut fds = Vec::with_capacity(parcels.len());
    for (i, mut p) in parcels.into_iter().enumerate() {
        if p.payload != generation.to_le_bytes() || p.fds.len() != 1 {
            let text = "a member is forming another generation";
            return Err(Error::new(ErrorKind::Mismatch, text)
                .op("team")
                .peer(Rank::new(i as u32))
                .expected(generation)
                .seen(format_args!("{:?}", p.payload)));
        }
        fds.append(&mut p.fds);
    }
    Ok(fds)
}

fn id_of(tag: &str) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&blake3::hash(tag.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(word)
}

fn map_pages(files: &[OwnedFd], len: usize, team: &Team) -> Result<Control> {
    let map = Mapping::new(files, len, len).map_err(|e| e.of_team(team))?;
    Ok(Control::new(map, team.size()))
}

impl LiveTeam {
    /// Collective over the members: makes and maps the control pages.
    pub(crate) fn meet(
        mesh: Arc<dyn Mesh>,
        info: Team,
        tag: &str,
        generation: u64,
        (cfg, adopted, siblings): (WorldCfg, Arc<Adopted>, Arc<Siblings>),
    ) -> Result<Self> {
        let size = info.size();
        let id = id_of(tag);
        let page = page_bytes(size);
        let own = shared_file("tilewire-control", page);
        // No team exists yet whose abort could end this. Peers in others see that this rank waits.
        let go: Stop<'_> = &|| siblings.sign_all();
        let deadline = Deadline::after(cfg.rendezvous_timeout);
        let here = |e: Error| translate(&info, e).op("team").phase("rendezvous").of_team(&info);
        let own = own.as_ref().map(|f| [f.as_fd()]).map_err(Error::clone);
        let part =
            (&generation.to_le_bytes()[..], own.as_ref().map(|f| &f[..]).map_err(Error::clone));
        let ready = format!("{tag}/ready");
        let met = exchange_parts(&*mesh, go, tag, info.members(), part, deadline);
        let parcels = met.map_err(|e| {
            if e.is_timeout() {
                // My part of this meeting stays visible. A rank that joins late must not wait for
                // me at the second half; it must fail as I did, and join my next try.
                leave_word(&*mesh, &ready, info.members(), &e);
            }
            here(e)
        })?;
        let fds = control_files(parcels, generation).map_err(|e| e.of_team(&info))?;
        let ctl = map_pages(&fds, page, &info);
        if let Ok(ctl) = &ctl {
            ctl.init(info.rank(), id, generation);
        }
        // No rank may read a page before its owner has filled in the header.
        let part = (&[][..], ctl.as_ref().map(|_| &[][..]).map_err(Error::clone));
        exchange_parts(&*mesh, go, &ready, info.members(), part, deadline).map_err(here)?;
        let ctl = ctl?;
        for r in Rank::all(size) {
            ctl.check(r, id, generation).map_err(|e| e.of_team(&info))?;
        }
        let counters = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let inner = Arc::new(TeamInner {
            id,
            generation,
            ctl,
            fault: Arc::new(Fault::new()),
            siblings,
            traffic: TrafficCounters::new(size),
            sinks: AbortSinks::default(),
            process: Process::default(),
            dead: AtomicU64::new(0),
            left: AtomicU64::new(0),
            seen_abort: AtomicU64::new(0),
            late: AtomicU64::new(0),
            expected: counters(NUM_SIGNALS * size),
            epochs: counters(NUM_CHANNELS),
            slots: Mutex::default(),
            seq: AtomicU64::new(0),
            exchanges: AtomicU64::new(0),
            hook: OnceLock::new(),
            hook_counts: Default::default(),
            info,
            mesh,
            cfg,
            adopted,
        });
        Ok(Self(inner).publishing())
    }

    /// Makes this rank publish its faults to peers from now on.
    fn publishing(self) -> Self {
        let weak = Arc::downgrade(&self.0);
        self.0.fault.on_set(move |e| {
            if let Some(team) = weak.upgrade() {
                Self(team).publish(e);
            }
        });
        self
    }

    /// Returns the identity of this team: equal on all members, different from every other team of
    /// the job.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns the generation, which grows each time the same members form a team of the same name.
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Returns the number of ranks of the world, members or not.
    pub fn world_size(&self) -> usize {
        self.0.mesh.size()
    }

    /// Returns the fault of this team, for nodes that belong to it.
    pub fn fault(&self) -> &Arc<Fault> {
        &self.0.fault
    }

    /// Returns how long a wait on a live peer may last.
    pub fn timeout(&self) -> Duration {
        self.0.cfg.timeout
    }

    /// Raises the first error of the team, or a death or an abort that no wait has met yet.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn check(&self) -> Result<()> {
        self.meet_news(|e| e)
    }

    /// Checks as [`LiveTeam::check`]. An abort or a death that no wait has met yet becomes the
    /// fault here, in the name of this operation and phase.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn check_at(&self, op: &str, phase: &'static str) -> Result<()> {
        self.meet_news(|e| e.op(op.to_owned()).phase(phase))
    }

    fn meet_news(&self, at: impl FnOnce(Error) -> Error) -> Result<()> {
        self.0.process.check().map_err(|e| e.team(self.name()))?;
        self.0.fault.check()?;
        self.news().map_or(Ok(()), |e| Err(self.fail(at(e))))
    }

    pub(crate) fn first_dead(&self) -> Option<Rank> {
        let mask = self.0.dead.load(Ordering::Acquire);
        (mask != 0).then(|| Rank::new(mask.trailing_zeros()))
    }

    /// Returns whether the monitor has seen `peer` die.
    pub(crate) fn has_died(&self, peer: Rank) -> bool {
        self.0.dead.load(Ordering::Acquire) >> peer.idx() & 1 == 1
    }

    /// Returns the members that have said goodbye, a bit for each.
    pub(crate) fn left(&self) -> u64 {
        self.0.left.load(Ordering::Acquire)
    }

    /// Returns whether `peer` has said goodbye.
    pub(crate) fn has_left(&self, peer: Rank) -> bool {
        self.left() >> peer.idx() & 1 == 1
    }

    /// Records the exit of a peer. Called by the monitor thread.
    pub(crate) fn peer_exit(&self, world_rank: Rank, how: PeerExit) {
        let Some(peer) = self.team_rank(world_rank) else { return };
        let mask = match how {
            PeerExit::Died => &self.0.dead,
            PeerExit::Left => &self.0.left,
        };
        mask.fetch_or(1 << peer.idx(), Ordering::Release);
        match how {
            PeerExit::Died => self.0.sinks.raise(self.abort_code(DEAD, peer)),
            PeerExit::Left => self.0.sinks.left(self.left()),
        }
        self.0.ctl.ring(self.rank());
    }

    /// Records `error` as the fault of the team, reports it to all peers, and returns the team's
    /// first fault.
    pub fn fail(&self, error: Error) -> Error {
        // A forked child must not abort its parent's team.
        if let Err(e) = self.0.process.check() {
            return e.team(self.name());
        }
        self.0.fault.set(error.of_team(self))
    }

    pub(crate) fn abort_code(&self, reason: u8, about: Rank) -> AbortCode {
        let byte = |r: Rank| r.get() as u8;
        let generation = self.0.generation as u32;
        AbortCode { generation, reason, about: byte(about), from: byte(self.rank()) }
    }

    /// Raises the abort of the team's fault on every page. If the fault is a peer's abort, it is
    /// passed on unchanged, so that all ranks name the rank that raised it first.
    fn publish(&self, error: &Error) {
        let aborted = error.kind() == ErrorKind::Aborted && error.get_peer().is_some();
        let seen = if aborted { self.seen_abort() } else { None };
        let code = seen.unwrap_or_else(|| self.code_of(error));
        let me = self.rank();
        self.write_report(code);
        for p in self.peers() {
            raise(self.0.ctl.abort_slot(p, me), code);
            self.0.ctl.ring(p);
        }
        self.0.ctl.ring(me);
        self.0.sinks.raise(code);
    }

    /// Records the abort of another device that a device has seen; the other device's host may not
    /// know of it yet.
    pub(crate) fn note_heard(&self, code: AbortCode) {
        self.0.seen_abort.store(code.pack(), Ordering::Release);
    }

    /// Returns an abort of a peer, from its device or its host.
    fn seen_abort(&self) -> Option<AbortCode> {
        let device = AbortCode::unpack(self.0.seen_abort.load(Ordering::Acquire));
        device.or_else(|| self.peer_abort().map(|(_, code)| code))
    }

    /// Writes the 64-byte report of my page: reason, peer and generation, then the sequence number.
    fn write_report(&self, code: AbortCode) {
        let word = |i| self.0.ctl.report_word(self.rank(), i);
        let [reason, about, from] = [code.reason, code.about, code.from].map(u64::from);
        let claim = 1 << 63 | from << 16 | reason << 8 | about;
        let first = word(0).compare_exchange(0, claim, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if first {
            word(1).store(self.0.generation, Ordering::Relaxed);
            word(2).store(self.0.seq.load(Ordering::Relaxed), Ordering::Release);
        }
    }

    /// Returns the report that `rank` wrote into its page when its first fault was set; `None`
    /// without a fault.
    fn report(&self, rank: Rank) -> Option<serde_json::Value> {
        let word = |i| self.0.ctl.report_word(rank, i).load(Ordering::Acquire);
        let [about, reason, from, ..] = word(0).to_le_bytes();
        let seq = word(2);
        let json = serde_json::json!({ "rank": rank, "reason": reason, "about": about, "from": from, "seq": seq });
        (word(0) != 0).then_some(json)
    }

    /// Ends the team on purpose: every wait of every member returns `Aborted`.
    pub fn abort(&self, why: &str) {
        // The caller asked for the abort, so its error goes to peers and to later calls.
        let _recorded = self.fail(
            Error::new(
                ErrorKind::Aborted,
                format!("aborted by {}: {why}", self.named(self.rank())),
            )
            .rank(self.rank()),
        );
    }

    /// Collective: returns the entries of `mine` that every member has, sorted.
    pub(crate) fn intersect(
        &self,
        what: &str,
        mine: &[(usize, usize)],
    ) -> Result<Vec<(usize, usize)>> {
        let mut bytes = Vec::with_capacity(mine.len() * 16);
        for &(a, b) in mine {
            bytes.extend_from_slice(&(a as u64).to_le_bytes());
            bytes.extend_from_slice(&(b as u64).to_le_bytes());
        }
        let all = self.exchange(what, &bytes)?;
        let has = |list: &[u8], item: &(usize, usize)| {
            list.chunks_exact(16).any(|c| {
                let word = |r: std::ops::Range<usize>| {
                    let mut b = [0; 8];
                    b.copy_from_slice(&c[r]);
                    u64::from_le_bytes(b) as usize
                };
                (word(0..8), word(8..16)) == *item
            })
        };
        Ok(mine.iter().filter(|item| all.iter().all(|l| has(l, item))).copied().collect())
    }

    /// Collective: sends `payload` to all members, and returns the payloads of all in team order.
    ///
    /// # Errors
    /// The fault of the team; `Timeout` or `PeerDead` naming the missing.
    pub fn exchange(&self, what: &str, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        let n = self.0.exchanges.fetch_add(1, Ordering::Relaxed);
        let tag = format!("{:016x}/{n}/{what}", self.0.id);
        let deadline = Deadline::after(self.0.cfg.timeout);
        let watch = RefCell::new(Watch::new(self, None));
        let stop = || self.look(&watch);
        let got = self.0.mesh.exchange_unless(&stop, &tag, self.members(), payload, &[], deadline);
        // Peers may have completed the exchange: they must learn that I have not.
        let parcels = match got {
            Ok(parcels) => parcels,
            Err(e) => {
                self.0.fault.check()?;
                let e = self.translate(e).op("exchange").phase(what.to_owned());
                let e = match e.get_peer().filter(|_| e.is_timeout()) {
                    Some(peer) => {
                        let (text, culprit) = self.verdict(peer, Some(&watch.borrow()));
                        let text = format!("{}; {text}", e.message());
                        e.reworded(text).culprit(culprit)
                    }
                    None => e,
                };
                return Err(self.fail(e));
            }
        };
        // A rank that gave up has left its part behind.
        self.check()?;
        Ok(parcels.into_iter().map(|p| p.payload).collect())
    }

    /// Checks as [`LiveTeam::check`] while a message is waited for, and tells the peers that it is.
    pub(crate) fn look(&self, watch: &RefCell<Watch>) -> Result<()> {
        watch.borrow_mut().look(self);
        self.check()
    }

    /// The mesh speaks of world ranks; errors of a team speak of team ranks.
    pub(crate) fn translate(&self, e: Error) -> Error {
        translate(&self.0.info, e)
    }

    /// Collective: as [`LiveTeam::exchange`] for payloads of any size, in pieces.
    ///
    /// # Errors
    /// As [`LiveTeam::exchange`].
    pub fn exchange_large(&self, what: &str, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        const PIECE: usize = 1 << 19;
        let sizes = self.exchange(what, &(payload.len() as u64).to_le_bytes())?;
        let mut most = 0;
        for s in &sizes {
            let word = s.as_slice().try_into().map_err(|_| {
                Error::new(ErrorKind::Protocol, "a peer has sent no length").op("exchange")
            })?;
            most = most.max(u64::from_le_bytes(word) as usize);
        }
        let mut all = vec![Vec::new(); self.size()];
        for i in 0..most.div_ceil(PIECE) {
            let rest = payload.get(i * PIECE..).unwrap_or_default();
            let pieces = self.exchange(what, &rest[..rest.len().min(PIECE)])?;
            all.iter_mut().zip(pieces).for_each(|(a, p)| a.extend(p));
        }
        Ok(all)
    }

    /// Collective: returns whether every member passes true. With it an optimizer step or a
    /// checkpoint commits on all ranks or on none.
    ///
    /// # Errors
    /// As [`LiveTeam::exchange`].
    pub fn agree(&self, flag: bool) -> Result<bool> {
        Ok(self.exchange("agree", &[u8::from(flag)])?.iter().all(|p| p == &[1]))
    }

    /// Records the state of a launch.
    pub fn set_state(&self, seq: u64, state: EntryState) {
        if self.0.process.is_foreign() {
            return;
        }
        recorder::set_state(&self.0.ctl, self.rank(), seq, state);
    }

    /// Returns the flight recorder of `rank` (team rank), oldest first.
    pub fn flight_recorder(&self, rank: Rank) -> Vec<Entry> {
        // A peer may be ahead of me: look a little past my own position.
        let ahead = if rank == self.rank() { 0 } else { NUM_ENTRIES as u64 / 2 };
        let last = self.0.seq.load(Ordering::Relaxed) + ahead;
        let first = last.saturating_sub(NUM_ENTRIES as u64 - 1);
        (first..=last).filter_map(|s| recorder::read(&self.0.ctl, rank, s)).collect()
    }

    /// Returns my flight recorder as JSON, for `tilewire dump`: team, generation, rank and entries.
    pub fn dump(&self) -> serde_json::Value {
        serde_json::json!({
            "team": self.name(),
            "id": format!("{:016x}", self.0.id),
            "generation": self.0.generation,
            "rank": self.rank(),
            "size": self.size(),
            "fault": self.0.fault.get().map(|e| e.to_json()),
            "reports": Rank::all(self.size()).filter_map(|r| self.report(r)).collect::<Vec<_>>(),
            "entries": self.flight_recorder(self.rank()),
        })
    }

    /// Returns the traffic of this rank so far, per destination.
    pub fn traffic(&self) -> Traffic {
        self.0.traffic.snapshot()
    }

    /// Installs a test hook that sees every protocol step of this rank. Only the first counts.
    pub fn set_hook(&self, hook: impl Fn(&HookPoint<'_>) -> HookAction + Send + Sync + 'static) {
        let _first = self.0.hook.set(Arc::new(hook));
    }

    pub(crate) fn hook(&self, at: (&str, &str), kind: StepKind, peer: Option<Rank>) -> HookAction {
        let nth = self.0.hook_counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        match self.0.hook.get() {
            None => HookAction::Proceed,
            Some(h) => h(&HookPoint { op: at.0, phase: at.1, kind, rank: self.rank(), peer, nth }),
        }
    }

    /// Returns the count that a wait on (slot, source) must see after `n` more signals.
    pub(crate) fn expect(&self, slot: usize, src: Rank, n: u64) -> u64 {
        self.0.expected[slot * self.size() + src.idx()].fetch_add(n, Ordering::Relaxed) + n
    }

    pub(crate) fn next_epoch(&self, channel: usize) -> u64 {
        self.0.epochs[channel].fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Checks, with nothing in flight, that every raised signal has been waited for, and none
    /// twice.
    ///
    /// # Errors
    /// `Protocol` naming the first slot whose count differs from the number that its waits
    /// consumed.
    pub fn check_counters(&self) -> Result<()> {
        self.check_slots(0..NUM_SIGNALS)
    }

    pub(crate) fn check_slots(&self, slots: impl Iterator<Item = usize>) -> Result<()> {
        for slot in slots {
            for src in Rank::all(self.size()) {
                let seen = self.0.ctl.count(self.rank(), slot, src).load(Ordering::Acquire);
                let used = self.0.expected[slot * self.size() + src.idx()].load(Ordering::Relaxed);
                if seen != used {
                    return Err(self.uneven(slot, src, used, seen));
                }
            }
        }
        Ok(())
    }
}
