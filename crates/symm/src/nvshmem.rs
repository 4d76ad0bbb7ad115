//! The backend `nvshmem`: a heap's memory is from NVSHMEM's symmetric heap, peers' memory is
//! reached through the library's mappings (`nvshmem_ptr`), and control pages and kernels are those
//! of `vmm`.
//!
//! # Invariants
//! 1. A process has NVSHMEM once. Its ranks are the members of the first team that uses it, each in
//!    a process of its own (and on a GPU of its own: NVSHMEM decides whether ranks may share one).
//!    Later teams of the same members, in the same order, use it too; other teams cannot.
//! 2. Its collectives (`init`, `malloc`) have no deadline: they run on a thread that is abandoned
//!    at our deadline, and NVSHMEM is not used in this process again.
//! 3. Memory is never given back to NVSHMEM, which would be a collective: a block that a heap has
//!    dropped is used again once every rank has dropped it.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result, Team};
use tilewire_device::cuda::{CudaContext, Nvshmem, NvshmemId};

use crate::team::LiveTeam;
use crate::vmm::shared;

/// Blocks are multiples of this, so that a little more or less fits the same one.
const GRAIN: usize = 2 << 20;
/// Interval between looks at the team while a rank waits for NVSHMEM.
const POLL: Duration = Duration::from_millis(5);

/// The state of NVSHMEM in this process.
enum State {
    /// Nothing yet.
    None,
    /// It met as rank `me.0` of `me.1`, at the place of this identity; `named` is the same for
    /// people.
    Ready { id: [u8; 128], me: (u32, usize), named: String, made: usize, free: Vec<(usize, Piece)> },
    /// One of its collectives was given up, or failed.
    Broken,
}

/// A block: how long it is, and where this rank's part is.
#[derive(Clone, Copy)]
struct Piece {
    len: usize,
    addr: u64,
}

static STATE: Mutex<State> = Mutex::new(State::None);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn broken() -> Error {
    Error::new(ErrorKind::Unavailable, "NVSHMEM was given up in this process")
        .op("nvshmem")
        .hint("start the ranks again, or use the `vmm` backend")
}

/// Memory of one heap, the same on all ranks.
pub(crate) struct Block {
    ctx: CudaContext,
    number: usize,
    piece: Piece,
    /// The address of each rank's part, as this device sees it.
    bases: Vec<u64>,
    /// The parts are in even steps on every rank.
    even: bool,
}

impl Block {
    /// Returns the address of `len` bytes at `offset` of `rank`'s part.
    pub fn addr(&self, rank: Rank, offset: usize, len: usize) -> Result<u64> {
        within(&self.bases, self.piece.len, (rank, offset, len))
    }

    /// Returns the bytes from each rank's part to the next one's (below zero, too: addresses wrap).
    pub fn stride(&self) -> Result<u64> {
        stride(&self.bases).and_then(|s| if self.even { Ok(s) } else { Err(uneven()) })
    }
}

impl Drop for Block {
    /// Waits for the kernels of this device, which may still use the block; each of their waits
    /// ends by itself. Kernels of peers may use it, too, so a block is used again only when all
    /// ranks have dropped it.
    fn drop(&mut self) {
        if self.ctx.synchronize().is_err() {
            // The block stays taken: the device may still run work that uses it.
            return;
        }
        if let State::Ready { free, .. } = &mut *state() {
            free.push((self.number, self.piece));
        }
    }
}

/// Returns the address of `len` bytes at `offset` of a rank's part of `total` bytes.
fn within(bases: &[u64], total: usize, (rank, offset, len): (Rank, usize, usize)) -> Result<u64> {
    let end = offset.checked_add(len).filter(|e| *e <= total);
    match (bases.get(rank.idx()), end) {
        (Some(base), Some(_)) => Ok(base + offset as u64),
        _ => Err(Error::invalid("the access reaches beyond the symmetric memory")
            .peer(rank)
            .expected(format_args!("{} ranks of {total} bytes", bases.len()))
            .seen(format_args!("{offset}+{len}"))),
    }
}

/// # Errors
/// `Unsupported` if the parts are not in even steps.
fn stride(bases: &[u64]) -> Result<u64> {
    let step = |w: &[u64]| w[1].wrapping_sub(w[0]);
    let first = bases.windows(2).map(step).next().unwrap_or(0);
    if bases.windows(2).all(|w| step(w) == first) {
        return Ok(first);
    }
    Err(uneven())
}

fn uneven() -> Error {
    let text = "NVSHMEM has mapped the ranks' memory in uneven steps";
    Error::new(ErrorKind::Unsupported, text)
        .op("nvshmem")
        .hint("kernels that write to all peers need even steps: use the `vmm` backend")
}

/// Returns the identity of this process on the host: its number, and its namespace of process
/// numbers.
pub(crate) fn process() -> String {
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} of {}", std::process::id(), space.display())
}

/// Collective: checks that all ranks can use NVSHMEM, before memory is taken.
pub(crate) fn check(team: &LiveTeam) -> Result<()> {
    let all = team.exchange("processes", process().as_bytes())?;
    if let Some((a, b)) = shared(&all) {
        let text = format!(
            "{} and {} are in one process, but NVSHMEM needs a process for each GPU",
            team.named(a),
            team.named(b)
        );
        return Err(Error::new(ErrorKind::Unsupported, text)
            .op("nvshmem")
            .hint("start the ranks with `tilewire run`, or use the `vmm` backend"));
    }
    team.settle("nvshmem", Nvshmem::library()).map(drop)
}

/// Collective: takes memory of `len` bytes on each rank.
pub(crate) fn block(team: &LiveTeam, ctx: &CudaContext, len: usize) -> Result<Block> {
    meet(team, ctx)?;
    let len = len.next_multiple_of(GRAIN);
    let (number, piece) = match reuse(team, len)? {
        Some(found) => found,
        None => allocate(team, ctx, len)?,
    };
    // Made before any step can fail: a block that is dropped can be used again, a block without
    // owner cannot.
    let mut block = Block { ctx: ctx.clone(), number, piece, bases: Vec::new(), even: false };
    let bases = Rank::all(team.size()).map(|r| base(ctx, team, piece.addr, r));
    let bases = bases.collect::<Result<Vec<_>>>();
    block.bases = team.settle("nvshmem peers", bases)?;
    // All ranks agree on it: a rank that went on alone would wait for its peers.
    block.even = team.agree(stride(&block.bases).is_ok())?;
    Ok(block)
}

fn base(ctx: &CudaContext, team: &Team, addr: u64, rank: Rank) -> Result<u64> {
    // SAFETY: `malloc` returned the address on the ranks of this team.
    unsafe { Nvshmem::peer(ctx, addr, rank.get())? }.ok_or_else(|| unmapped(team, rank))
}

/// The peers of the rank that has it get its text alone: so the text names the rank of the world.
fn unmapped(team: &Team, rank: Rank) -> Error {
    let text = format!("NVSHMEM cannot map the memory of {}", team.named(rank));
    Error::new(ErrorKind::Unsupported, text)
        .op("nvshmem")
        .of_team(team)
        .peer(rank)
        .hint("`tilewire topo` shows which GPUs reach each other")
}

/// Collective: NVSHMEM of exactly this team's members, made by the first that asks.
fn meet(team: &LiveTeam, ctx: &CudaContext) -> Result<()> {
    let me = (team.rank().get(), team.size());
    let mine: Result<Option<[u8; 128]>> = match &*state() {
        State::None => Ok(None),
        State::Ready { id, me: then, .. } if *then == me => Ok(Some(*id)),
        State::Ready { named, .. } => Err(others(named)),
        State::Broken => Err(broken()),
    };
    let mine = team.settle("nvshmem state", mine)?;
    let all = team.exchange("nvshmem id", mine.as_ref().map_or(&[][..], |id| id))?;
    if all.iter().any(|theirs| *theirs != all[0]) {
        return Err(others("another rank"));
    }
    if mine.is_some() {
        return Ok(());
    }
    let first = team.rank().idx() == 0;
    let id = team.settle("nvshmem place", first.then(Nvshmem::unique_id).transpose())?;
    let all = team.exchange("nvshmem place", id.as_ref().map_or(&[][..], |id| &id.0))?;
    let place: [u8; 128] = all[0].as_slice().try_into().map_err(|_| {
        let first = Rank::new(0);
        let text = format!("{} has sent no rendezvous identity of NVSHMEM", team.named(first));
        Error::new(ErrorKind::Protocol, text).op("nvshmem").of_team(team).peer(first)
    })?;
    let theirs = ctx.clone();
    guarded(team, "init", move || Nvshmem::init(&theirs, &NvshmemId(place), me))?;
    let named = member(team);
    *state() = State::Ready { id: place, me, named, made: 0, free: Vec::new() };
    Ok(())
}

/// The rank of this process in NVSHMEM, for people: "rank 5 (rank 1 of team cp2.0), of 2 ranks".
fn member(team: &Team) -> String {
    format!("{}, of {} ranks", team.named(team.rank()), team.size())
}

fn others(seen: impl std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "this process has initialised NVSHMEM with other ranks, and can do so only once",
    )
    .op("nvshmem")
    .seen(seen)
    .hint("make heaps of this backend on one team, or use the `vmm` backend")
}

/// Collective: takes a block that no rank uses any more, the smallest that is large enough.
fn reuse(team: &LiveTeam, len: usize) -> Result<Option<(usize, Piece)>> {
    let mine: Vec<(usize, usize)> = match &*state() {
        State::Ready { free, .. } => free.iter().map(|(n, p)| (*n, p.len)).collect(),
        _ => Vec::new(),
    };
    let all = team.intersect("nvshmem blocks", &mine)?;
    let fits = all.into_iter().filter(|(_, l)| *l >= len);
    let Some((number, _)) = fits.min_by_key(|(n, l)| (*l, *n)) else { return Ok(None) };
    let mine = match &mut *state() {
        State::Ready { free, .. } => {
            free.iter().position(|(n, _)| *n == number).map(|at| free.swap_remove(at))
        }
        _ => None,
    };
    mine.map(Some).ok_or_else(|| {
        // Peers take this block, so the failure ends the team: a process must make heaps of this
        // backend one after the other.
        let text = "another thread of this process is making a heap of NVSHMEM";
        team.fail(Error::new(ErrorKind::Protocol, text).op("nvshmem"))
    })
}

/// Collective: allocates a new block.
fn allocate(team: &LiveTeam, ctx: &CudaContext, len: usize) -> Result<(usize, Piece)> {
    let theirs = ctx.clone();
    // SAFETY: `meet` has initialised it.
    let addr = guarded(team, "malloc", move || unsafe { Nvshmem::malloc(&theirs, len) })?;
    let mut state = state();
    let State::Ready { made, .. } = &mut *state else { return Err(broken()) };
    *made += 1;
    Ok((*made, Piece { len, addr }))
}

/// Runs a collective of NVSHMEM on a thread of its own. Returns at the fault of the team, or at the
/// deadline of a rendezvous, and abandons the thread then. A failure here ends the team, because
/// its peers wait inside the collective.
fn guarded<T: Send + 'static>(
    team: &LiveTeam,
    phase: &'static str,
    f: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (tx, rx) = channel();
    let body = move || drop(tx.send(f()));
    let spawned = std::thread::Builder::new().name(format!("nvshmem-{phase}")).spawn(body);
    let deadline = Deadline::after(team.0.cfg.rendezvous_timeout);
    let wait = || -> Result<T> {
        spawned.map_err(|e| Error::io("starting the thread for NVSHMEM", e))?;
        loop {
            match rx.recv_timeout(POLL) {
                Ok(done) => return done,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("the thread of NVSHMEM has ended"));
                }
                Err(RecvTimeoutError::Timeout) => team.check()?,
            }
            if deadline.expired() {
                let text = format!("NVSHMEM's ranks did not meet in time ({phase})");
                return Err(Error::new(ErrorKind::Timeout, text));
            }
        }
    };
    wait().map_err(|e| {
        // This rank does not know how far its peers got.
        *state() = State::Broken;
        team.fail(e.op("nvshmem").phase(phase))
    })
}

#[cfg(test)]
mod tests {
    use tilewire_core::BackendKind;

    use super::*;
    use crate::{HeapCfg, World, WorldCfg};

    #[test]
    fn even_steps_of_either_sign_are_a_stride() {
        assert_eq!(stride(&[7]).unwrap(), 0);
        assert_eq!(stride(&[100, 300, 500]).unwrap(), 200);
        // Each rank's own part first: of two ranks, the second sees them the other way round.
        let down = stride(&[300, 100]).unwrap();
        assert_eq!(300u64.wrapping_add(down), 100);
        let e = stride(&[0, 100, 300]).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    }

    #[test]
    fn addresses_stay_within_a_rank_s_part() {
        let at = |rank, offset, len| within(&[1000, 5000], 64, (Rank::new(rank), offset, len));
        assert_eq!(at(1, 16, 48).unwrap(), 5016);
        for (rank, offset, len) in [(1, 17, 48), (2, 0, 1), (0, usize::MAX, 2)] {
            assert!(at(rank, offset, len).is_err());
        }
    }

    #[test]
    fn texts_name_ranks_of_the_world() {
        let members = [Rank::new(4), Rank::new(5)];
        let team = Team::new("cp2.0", &members, Rank::new(4), 8).unwrap().unwrap();
        let e = unmapped(&team, Rank::new(1));
        let text = "NVSHMEM cannot map the memory of rank 5 (rank 1 of team cp2.0)";
        assert_eq!(e.message(), text);
        assert_eq!(e.get_world_peer(), Some(Rank::new(5)));
        let e = others(member(&team));
        assert_eq!(e.get_seen(), Some("rank 4 (rank 0 of team cp2.0), of 2 ranks"));
    }

    #[test]
    fn threads_of_one_process_are_refused() {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let Some(team) = world.team(&[Rank::new(2), Rank::new(0)], "nvshmem")? else {
                return Ok(());
            };
            let e = team.heap(BackendKind::Nvshmem, HeapCfg::new(4096)).err().unwrap();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
            let text = "rank 2 (rank 0 of team nvshmem) and rank 0 (rank 1 of team nvshmem) are in \
                        one process";
            assert!(e.to_string().contains(text), "{e}");
            // The team is not faulted.
            team.heap(BackendKind::Host, HeapCfg::new(4096)).map(drop)
        })
        .unwrap();
    }

    /// Checks that the error without a driver or the library says what to do.
    #[test]
    fn one_process_gets_as_far_as_the_library() {
        let world = World::solo(WorldCfg::for_tests()).unwrap();
        let team = world.everyone("alone").unwrap();
        if let Err(e) = team.heap(BackendKind::Nvshmem, HeapCfg::new(4096)) {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
        }
    }
}
