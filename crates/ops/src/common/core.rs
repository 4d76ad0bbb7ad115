//! Bookkeeping that every plan with a team needs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tilewire_core::{BackendKind, Error, ErrorKind, Result};
use tilewire_device::cuda::CudaStream;
use tilewire_device::{Event, Node, Pending, Point, Stream};
use tilewire_symm::{
    EntryState, Fingerprint, Heap, HostTransport, LinkTraffic, LiveTeam, OpCtx, Signals, SymBuf,
    Traffic,
};

use super::check::not_prepared;
use super::choice::Choice;
use super::lanes::{Lane, Lanes, Poison, Slots, stream_on};
use super::overlap::Explain;

/// Identity of a plan on its team: name, fingerprint, whether it is prepared.
pub struct PlanCore {
    op: &'static str,
    heap: Heap,
    text: String,
    prepared: AtomicBool,
    order: Arc<Order>,
    /// On a heap of the host.
    net: Option<Arc<HostTransport>>,
    /// On a heap in device memory.
    lane: Option<Lane>,
    uses: Arc<Uses>,
    /// The lanes of a launch on the host follow each other: see [`PlanCore::lanes_in_turn`].
    in_turn: bool,
}

/// Symmetric memory and slots to which launches on devices refer by address alone. A graph keeps
/// them as long as it lives, eager launches until the last one has run.
#[derive(Default)]
struct Uses {
    bufs: Vec<SymBuf>,
    signals: Vec<Arc<Signals>>,
}

impl Drop for PlanCore {
    fn drop(&mut self) {
        let last = self.order.last().clone().filter(|e| !e.is_done());
        let Some(last) = last.filter(|_| self.lane.is_some()) else { return };
        for b in &self.uses.bufs {
            let last = last.clone();
            b.keep_until(move || last.is_done());
        }
        for s in &self.uses.signals {
            let last = last.clone();
            s.keep_until(move || last.is_done());
        }
    }
}

/// Orders launches that share receive areas one after the other, whatever streams they are on.
#[derive(Default)]
struct Order {
    last: Mutex<Option<Event>>,
    busy: AtomicBool,
}

struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Order {
    fn last(&self) -> MutexGuard<'_, Option<Event>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `stream` wait for the last eager launch.
    fn follow(&self, stream: &Stream) -> Result<()> {
        let last = self.last().clone();
        last.map_or(Ok(()), |e| stream.wait(&e))
    }

    /// Records the work that is queued on `stream` now as the last launch.
    fn done(&self, stream: &Stream) -> Result<()> {
        // Recording moves the event; a wait refers to the last record before it.
        stream.record(self.last().get_or_insert_default())
    }

    /// Runs `f` unless a launch is running. Eager launches follow each other by events; replays of
    /// graphs must be ordered by the caller.
    fn alone(&self, f: impl Fn() -> Result<()>) -> Result<()> {
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(Error::new(ErrorKind::Protocol, "two launches of one plan run at once")
                .hint("join the streams, or make a plan for each graph that runs beside others"));
        }
        // Released by a panic of `f`, too.
        let _release = Release(&self.busy);
        f()
    }
}

/// Returns the counted traffic of a launch by NCCL: the signals of its meeting. The transport does
/// not count the bytes that NCCL moves.
pub(crate) fn only_meets(team: &tilewire_core::Team) -> Traffic {
    let mut t = vec![LinkTraffic { signals: 1, ..LinkTraffic::default() }; team.size()];
    t[team.rank().idx()] = LinkTraffic::default();
    t
}

/// A launch that is on record: its number, and the stream that it is queued on.
#[derive(Clone, Copy)]
pub(crate) struct LaunchAt<'a> {
    pub stream: &'a Stream,
    pub seq: u64,
}

/// One launch on the host, in program order.
pub struct Launch {
    /// The lane that the launch's calls act on.
    pub ctx: OpCtx,
    /// The transport to peers.
    pub net: Arc<HostTransport>,
    /// The fingerprint that credits of this launch carry.
    pub tag: u64,
}

impl PlanCore {
    /// Returns a plan of `op` on `heap`; `text` holds everything that must be equal on all ranks.
    ///
    /// # Errors
    /// The errors of the device.
    pub(crate) fn new(op: &'static str, heap: &Heap, text: impl std::fmt::Display) -> Result<Self> {
        let (net, lane) = match heap.backend() {
            BackendKind::Host => (Some(heap.host_transport()?), None),
            _ => (None, Some(Lane::new(op, heap).map_err(|e| e.op(op))?)),
        };
        Ok(Self {
            op,
            heap: heap.clone(),
            text: text.to_string(),
            prepared: AtomicBool::new(false),
            order: Arc::default(),
            net,
            lane,
            uses: Arc::default(),
            in_turn: false,
        })
    }

    /// Adds the symmetric memory and slots that launches use, so that they outlive the launches.
    pub(crate) fn using<'a>(
        mut self,
        bufs: impl IntoIterator<Item = &'a SymBuf>,
        signals: impl IntoIterator<Item = &'a Arc<Signals>>,
    ) -> Self {
        let (bufs, signals) = (bufs.into_iter().cloned(), signals.into_iter().cloned());
        self.uses = Arc::new(Uses { bufs: bufs.collect(), signals: signals.collect() });
        self
    }

    /// In a team of one rank the lanes of a launch on the host follow each other on the caller's
    /// stream, copies first: two changes of threads cost more than a small product. For operations
    /// whose copies then wait for nothing that `compute` does.
    pub(crate) fn lanes_in_turn(mut self) -> Self {
        self.in_turn = self.team().size() == 1;
        self
    }

    /// Returns the lane of launches on a heap in device memory; `None` on the host.
    pub(crate) fn lane(&self) -> Option<&Lane> {
        self.lane.as_ref()
    }

    /// Queues one launch on a heap in device memory: see [`Lane::run`].
    pub(crate) fn run_on(
        &self,
        lane: &Lane,
        at: LaunchAt<'_>,
        slots: &Slots<'_>,
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        self.queue_on(lane, at, outs, |streams| lane.run(streams, slots, outs, f))
    }

    /// Queues one launch of kernels that meet the other ranks, and poison their outputs,
    /// themselves.
    pub(crate) fn run_alone(
        &self,
        lane: &Lane,
        at: LaunchAt<'_>,
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        self.queue_on(lane, at, outs, |streams| f(&lane.lanes(streams)))
    }

    fn queue_on(
        &self,
        lane: &Lane,
        LaunchAt { stream, seq }: LaunchAt<'_>,
        outs: &[Poison],
        f: impl FnOnce((&CudaStream, &CudaStream)) -> Result<()>,
    ) -> Result<()> {
        let queue = || {
            let (main, side) = (stream_on(stream, lane.context())?, self.heap.copy_stream()?);
            let captured = stream.is_capturing();
            if captured {
                main.hold(|| self.uses.clone());
            } else {
                self.order.follow(stream)?;
            }
            self.team().set_state(seq, EntryState::Running);
            f((main, side.cuda()?))?;
            if captured { Ok(()) } else { self.order.done(stream) }
        };
        // The launch is on record: if it cannot be queued, the peers must not wait for it.
        queue().map_err(|e| {
            self.team().set_state(seq, EntryState::Failed);
            let e = self.team().fail(e.op(self.op).seq(seq));
            if let Ok(main) = stream.cuda() {
                Lane::spoil(main, outs);
            }
            e
        })
    }

    /// Returns the token of a launch. On the host the nodes of a launch record its state in the
    /// flight recorder; on a device the wait for its end does.
    pub(crate) fn pending<T>(
        &self,
        out: T,
        LaunchAt { stream, seq }: LaunchAt<'_>,
    ) -> Result<Pending<T>> {
        let pending = Pending::new(out, stream, Some(self.team().fault().clone()))?;
        if self.lane.is_none() {
            return Ok(pending);
        }
        let team = self.team().clone();
        Ok(pending.on_end(move |good| {
            let state = if good { EntryState::Done } else { EntryState::Failed };
            team.set_state(seq, state);
        }))
    }

    /// Makes launches of this plan and of `other` follow each other: they share receive areas.
    pub(crate) fn share_order(mut self, other: &PlanCore) -> Self {
        self.order = other.order.clone();
        self
    }

    /// Returns the heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the team.
    pub fn team(&self) -> &LiveTeam {
        self.heap.team()
    }

    /// Returns the name of the operation.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// Collective: compares descriptions and allocation digests, makes lazy state.
    ///
    /// # Errors
    /// `Mismatch` with both ranks' texts; `InvalidArgument` during capture; the error of a rank
    /// that lacks a resource, on all ranks.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        self.prepare_with(stream, || Ok(()), |()| Ok(()))
    }

    /// Prepares as [`PlanCore::prepare`], with two more steps: `mine`, which each rank makes alone
    /// before the ranks meet, and `ours`, which they make together behind the meeting. If `mine`
    /// fails on one rank, the call fails on all, the team goes on, and the ranks can call it again.
    /// `ours` may launch the plan; a plan whose `ours` failed is not prepared.
    pub(crate) fn prepare_with<T>(
        &self,
        stream: &Stream,
        mine: impl FnOnce() -> Result<T>,
        ours: impl FnOnce(T) -> Result<()>,
    ) -> Result<()> {
        // Mistakes of the caller are found before anything is done: a captured stream must not get
        // any work.
        if let Some(lane) = &self.lane {
            stream_on(stream, lane.context()).map_err(|e| e.op(self.op))?;
        }
        if stream.is_capturing() {
            return Err(Error::invalid("`prepare` cannot be captured")
                .op(self.op)
                .hint("prepare the plan before the capture begins"));
        }
        let mine = self.heap.copy_stream().and_then(|_| mine());
        let fp = Fingerprint::new(self.op, format_args!("{} {}", self.text, self.heap.digest()));
        // A rank whose step failed meets its peers all the same, so that no rank waits for it, and
        // launch numbers stay equal.
        let met = self.team().prepare_agree(&fp).and_then(|_| self.team().settle("prepare", mine));
        let mine = met.map_err(|e| e.op(self.op))?;
        let before = self.prepared.swap(true, Ordering::AcqRel);
        ours(mine).map_err(|e| {
            self.prepared.store(before, Ordering::Release);
            e.op(self.op)
        })
    }

    /// Prepares as [`PlanCore::prepare_with`]. The first step is to `make` kernels and workspace
    /// once, on a heap in device memory.
    pub(crate) fn prepare_made<T>(
        &self,
        stream: &Stream,
        (made, make): (&OnceLock<T>, impl FnOnce(&Lane) -> Result<T>),
        ours: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.prepare_with(
            stream,
            || self.make_once(made, make),
            |new| {
                if let Some(new) = new {
                    made.get_or_init(|| new);
                }
                ours()
            },
        )
    }

    /// Makes kernels and workspace on a heap in device memory unless they have been `made`; `None`
    /// if so, and on the host.
    pub(crate) fn make_once<T, M>(
        &self,
        made: &OnceLock<M>,
        make: impl FnOnce(&Lane) -> Result<T>,
    ) -> Result<Option<T>> {
        match (&self.lane, made.get()) {
            (Some(lane), None) => make(lane).map(Some),
            _ => Ok(None),
        }
    }

    /// Collective, behind the agreement: settles the tile configuration.
    pub(crate) fn choose(&self, choice: &Choice, explain: impl FnOnce() -> Explain) -> Result<()> {
        choice.settle(self.team(), self.lane.is_some(), explain)
    }

    /// Records a launch on `stream` of the host; `detail` holds the sizes that may differ from
    /// launch to launch.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` if another stream of this heap is being captured; the
    /// fault of the team.
    pub fn begin(&self, stream: &Stream, detail: impl std::fmt::Display) -> Result<Launch> {
        let fp = self.note(stream, detail)?;
        let net = self
            .net
            .clone()
            .ok_or_else(|| Error::internal("a launch of the host runs on a device"))?;
        Ok(Launch { ctx: OpCtx::new(&self.heap, self.op, fp.0), net, tag: fp.1 })
    }

    /// Records a launch as [`PlanCore::begin`], on a heap in device memory.
    pub(crate) fn begin_on<'a>(
        &self,
        stream: &'a Stream,
        detail: impl std::fmt::Display,
    ) -> Result<LaunchAt<'a>> {
        self.note(stream, detail).map(|(seq, _)| LaunchAt { stream, seq })
    }

    /// Records a launch, and returns its sequence number and tag.
    fn note(&self, stream: &Stream, detail: impl std::fmt::Display) -> Result<(u64, u64)> {
        self.check_launch(stream)?;
        let fp = Fingerprint::new(self.op, format_args!("{} {detail}", self.text));
        let team = self.team();
        let checked = team.checks_launches() && !stream.is_capturing();
        let begun = if checked { team.launch_agree(&fp) } else { team.launch_begin(&fp) };
        let seq = begun.map_err(|e| e.op(self.op))?;
        Ok((seq, fp.tag()))
    }

    /// Returns whether a launch on `stream` would begin.
    ///
    /// # Errors
    /// As [`PlanCore::begin`].
    pub(crate) fn check_launch(&self, stream: &Stream) -> Result<()> {
        // Before the launch is on record: a stream of another device is the caller's mistake, not
        // the end of the team.
        if let Some(lane) = &self.lane {
            stream_on(stream, lane.context()).map_err(|e| e.op(self.op))?;
        }
        // The copy stream of the heap serves one capture, or none: half of this launch would go
        // into the graph of another stream.
        let side = self.heap.copy_stream()?;
        if side.is_capturing() && !side.same_capture(stream) {
            return Err(Error::invalid("another stream of this heap is being captured")
                .op(self.op)
                .hint("end that capture first, or use a heap of its own for it"));
        }
        if !self.prepared.load(Ordering::Acquire) {
            return Err(not_prepared().op(self.op));
        }
        self.check()
    }

    /// Returns the fault of the team. An abort or a death that no wait has met yet becomes the
    /// fault here, in the name of this operation.
    ///
    /// # Errors
    /// The fault of the team.
    pub(crate) fn check(&self) -> Result<()> {
        self.team().check_at(self.op, "launch").map_err(|e| e.op(self.op))
    }

    /// Queues the two lanes of a launch: `copies` on the heap's copy stream, `compute` on the
    /// caller's stream, forked and joined by events. `poison` runs instead once the team is
    /// faulted.
    ///
    /// # Errors
    /// If a stream has ended.
    pub fn run(
        &self,
        stream: &Stream,
        copies: impl Fn() -> Result<()> + Send + Sync + 'static,
        compute: impl Fn() -> Result<()> + Send + Sync + 'static,
        poison: impl Fn() + Send + Sync + 'static,
        seq: u64,
    ) -> Result<()> {
        // The launch is on record: if it cannot be queued, the peers must not wait for it.
        self.queue(stream, copies, compute, poison, seq)
            .map_err(|e| self.team().fail(e.op(self.op)))
    }

    fn queue(
        &self,
        stream: &Stream,
        copies: impl Fn() -> Result<()> + Send + Sync + 'static,
        compute: impl Fn() -> Result<()> + Send + Sync + 'static,
        poison: impl Fn() + Send + Sync + 'static,
        seq: u64,
    ) -> Result<()> {
        stream.check()?;
        let fault = self.team().fault().clone();
        let side = self.heap.copy_stream()?;
        let captured = stream.is_capturing();
        if !captured {
            self.order.follow(stream)?;
        }
        let team = Arc::new(self.team().clone());
        let (fork, join) = (Event::new(), Event::new());
        if !self.in_turn {
            stream.record(&fork)?;
            side.wait(&fork)?;
        }
        let (started, order) = (team.clone(), self.order.clone());
        // An error inside must name its operation and rank, however far from here it is reported.
        let (op, of) = (self.op, team.clone());
        let here = move |e: Error| e.op(op).seq(seq).of_team(&of).rank(of.rank());
        let also_here = here.clone();
        let copies = move || copies().map_err(&also_here);
        let mut first = None;
        if self.in_turn {
            first = Some(copies);
        } else {
            side.launch(Node::new(op, copies).in_domain(fault.clone(), || {}))?;
        }
        stream.launch(
            Node::new(self.op, move || {
                started.set_state(seq, EntryState::Running);
                first.as_ref().map_or(Ok(()), |copies| copies())?;
                order.alone(&compute).map_err(&here)?;
                started.set_state(seq, EntryState::Done);
                Ok(())
            })
            .in_domain(fault.clone(), move || {
                team.set_state(seq, EntryState::Failed);
                poison();
            }),
        )?;
        if !self.in_turn {
            side.record(&join)?;
            stream.wait(&join)?;
        }
        if captured { Ok(()) } else { self.order.done(stream) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tilewire_core::Rank;
    use tilewire_symm::{HeapCfg, World, WorldCfg};

    use super::*;

    /// No rank waits for one that lacks a resource, and the plan can be prepared once the resource
    /// is there.
    #[test]
    fn what_one_rank_lacks_fails_on_all_and_can_be_tried_again() {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let heap = world.everyone("lack")?.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
            let core = PlanCore::new("op", &heap, "m=1")?;
            let stream = Stream::new("lack")?;
            let lacking = || Error::new(ErrorKind::Exhausted, "no memory").hint("free some");
            for round in 0..3 {
                let mine =
                    || if heap.team().rank().get() == 1 { Err(lacking()) } else { Ok(round) };
                let start = Instant::now();
                let e = core.prepare_with(&stream, mine, |_| Ok(())).unwrap_err();
                assert!(start.elapsed() < heap.team().timeout() / 2, "waited: {e}");
                assert_eq!((e.kind(), e.get_hint()), (ErrorKind::Exhausted, Some("free some")));
                let who = (heap.team().rank().get() != 1).then_some(Rank::new(1));
                assert_eq!((e.get_peer(), e.get_op()), (who, Some("op")), "{e}");
                assert_eq!(core.begin(&stream, "").err().unwrap().kind(), ErrorKind::NotPrepared);
            }
            // Where several fail, all get the same error.
            let mine = || -> Result<()> {
                Err(match heap.team().rank().get() {
                    0 => return Ok(()),
                    1 => Error::new(ErrorKind::Unavailable, "no compiler"),
                    _ => Error::internal("something else"),
                })
            };
            let e = core.prepare_with(&stream, mine, |()| Ok(())).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
            // A failure behind the agreement leaves the plan unprepared, too.
            let ours = |_| core.begin(&stream, "measured").and_then(|_| Err(lacking()));
            let e = core.prepare_with(&stream, || Ok(()), ours).unwrap_err();
            assert_eq!((e.kind(), e.get_op()), (ErrorKind::Exhausted, Some("op")), "{e}");
            assert_eq!(core.begin(&stream, "").err().unwrap().kind(), ErrorKind::NotPrepared);
            core.prepare(&stream)?;
            let seq = core.begin_on(&stream, "")?.seq;
            // The same launch everywhere.
            let all = heap.team().exchange("seq", &seq.to_le_bytes())?;
            assert!(all.iter().all(|s| s == &all[0]), "{all:?}");
            Ok(())
        })
        .unwrap();
    }

    /// A mistake of the caller's is found before anything is done or anybody met.
    #[test]
    fn during_a_capture_nothing_is_made() {
        World::run_threads(1, WorldCfg::for_tests(), |world| {
            let heap = world.everyone("capture")?.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
            let core = PlanCore::new("op", &heap, "m=1")?;
            let stream = Stream::new("capture")?;
            stream.begin_capture()?;
            let made = || -> Result<()> { panic!("it was made") };
            let e = core.prepare_with(&stream, made, |()| Ok(()));
            assert_eq!(e.unwrap_err().kind(), ErrorKind::InvalidArgument);
            stream.end_capture()?;
            core.prepare(&stream)
        })
        .unwrap();
    }
}
