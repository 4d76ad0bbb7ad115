//! `tilewire bench links`: what the links between GPUs can do, by copy engines, bulk copies, and
//! loads and stores; how long a flag and a barrier take.
//!
//! One process, one thread (rank) for each GPU, symmetric memory of the `vmm` backend. Every rank
//! sends at the same time. A time is the median over repetitions, between events on the device, of
//! the slowest rank; the bytes are random, each repetition takes other places of buffers far larger
//! than caches, and what arrived is looked at.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use tilewire::core::Rng;
use tilewire::device::cuda::{CudaEvent, CudaMemory, CudaStream, available, device_count};
use tilewire::device::{Buffer, Queue};
use tilewire::prelude::*;
use tilewire::symm::{LinkProbe, Piece, Transport};

use crate::args::{LinksArgs, PlaceArgs};
use crate::rows::{ROW_VERSION, Row};
use crate::{say, worlds};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Bytes of the heap that transfers use, and of each rank's own buffer.
const CAP: usize = 512 * MIB;
/// The random bytes repeat after so many.
const PERIOD: usize = 4 * MIB;
/// Bytes of one transfer of kernels.
const LEN: usize = 256 * MIB;
const CHUNK: u32 = 16 << 10;
/// Nothing here takes longer.
const LIMIT_S: f64 = 20.0;
/// Nodes of the graph that times a barrier.
const NODES: usize = 1000;

/// Runs the command; the exit code is 1 if other bytes arrived than were sent.
///
/// # Errors
/// `Unavailable` without a driver; `InvalidArgument` for ranks that there are no devices for; the
/// fault of the team.
pub fn run(args: &LinksArgs) -> Result<i32> {
    available()?;
    let devices = device_count()? as usize;
    let ranks = args.ranks.unwrap_or(devices);
    check_ranks(ranks, devices)?;
    if worlds::launched(&worlds::place(&PlaceArgs::default())?) {
        return Err(Error::invalid("`bench links` is one process with a thread for each GPU")
            .hint("start it without a launcher"));
    }
    let meet = Meet::new(ranks);
    let cfg = worlds::world_cfg(None, LIMIT_S)?;
    let all = World::run_threads(ranks, cfg, |world| {
        let done = measure(&world, &meet);
        if let Err(e) = &done {
            meet.fail(e);
        }
        done
    })?;
    let rows = merge(&all);
    print(&rows, args.json);
    Ok(i32::from(rows.iter().any(|r| r.wrong > 0)))
}

fn check_ranks(ranks: usize, devices: usize) -> Result<()> {
    if (2..=devices).contains(&ranks) {
        return Ok(());
    }
    let expected = match devices {
        0 | 1 => format!("two GPUs; this process sees {devices}"),
        _ => format!("--ranks 2 to {devices}, the GPUs that this process sees"),
    };
    Err(Error::invalid("a link has two ends: each rank needs a GPU of its own")
        .expected(expected)
        .seen(ranks)
        .hint("`tilewire topo` lists the GPUs; CUDA_VISIBLE_DEVICES may hide some"))
}

/// A meeting of the threads of all ranks that costs them microseconds.
struct Meet {
    size: usize,
    arrived: AtomicUsize,
    round: AtomicUsize,
    failed: AtomicBool,
    why: Mutex<Option<Error>>,
}

impl Meet {
    fn new(size: usize) -> Self {
        Self {
            size,
            arrived: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            why: Mutex::new(None),
        }
    }

    /// Ends all meetings: the others get this rank's error.
    fn fail(&self, e: &Error) {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| e.clone());
        self.failed.store(true, Ordering::Release);
    }

    fn wait(&self) -> Result<()> {
        let deadline = Deadline::after_s(LIMIT_S);
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size {
            self.arrived.store(0, Ordering::Release);
            self.round.fetch_add(1, Ordering::AcqRel);
            return Ok(());
        }
        for polls in 1u64.. {
            if self.round.load(Ordering::Acquire) != round {
                return Ok(());
            }
            if self.failed.load(Ordering::Acquire) {
                let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
                return Err(why.unwrap_or_else(|| Error::internal("a rank failed")));
            }
            if polls % 1024 == 0 {
                if deadline.expired() {
                    break;
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        Err(Error::new(ErrorKind::Timeout, "not every rank has reached the next measurement"))
    }
}

/// One measurement of one rank.
#[derive(Clone, Debug)]
struct Line {
    op: &'static str,
    shape: String,
    us: f64,
    /// Bytes that a rank sent, or 0 where the time is all there is to say.
    bytes: usize,
    wrong: u64,
    note: String,
    device: String,
    /// Not measured, as the devices do not have it.
    unsupported: bool,
}

/// The rows of the ranks' lines: the slowest of each.
fn merge(all: &[Vec<Line>]) -> Vec<Row> {
    let Some(first) = all.first() else { return Vec::new() };
    let row = |(i, l): (usize, &Line)| {
        let same = || all.iter().filter_map(|lines| lines.get(i));
        let us = same().map(|l| l.us).fold(0.0, f64::max);
        let wrong = same().map(|l| l.wrong).sum();
        let rate = (l.bytes > 0).then(|| format!("{:.1} GB/s", l.bytes as f64 / us / 1e3));
        let note = rate.or_else(|| Some(l.note.clone()).filter(|n| !n.is_empty()));
        Row {
            op: format!("links/{}", l.op),
            backend: BackendKind::Vmm.name().to_owned(),
            device: l.device.clone(),
            dtype: DType::U8.to_string(),
            ranks: all.len(),
            shape: l.shape.clone(),
            t_ours_us: Some(us).filter(|_| !l.unsupported),
            // Bytes are right or wrong: how far off those are says nothing.
            max_err: (wrong == 0 && !l.unsupported).then_some(0.0),
            wrong,
            unsupported: l.unsupported,
            note,
            ..Row::default()
        }
    };
    first.iter().enumerate().map(row).collect()
}

fn print(rows: &[Row], json: bool) {
    for r in rows {
        if json {
            // A row is plain numbers and text: it always has a JSON form.
            if let Ok(mut v) = serde_json::to_value(r) {
                v["version"] = ROW_VERSION.into();
                say(v);
            }
            continue;
        }
        say(format_args!(
            "{:<18} ranks={:<2} {:<34} {:>10.2} us  {:<28} #wrong={}",
            r.op,
            r.ranks,
            r.shape,
            r.t_ours_us.unwrap_or(f64::NAN),
            r.note.as_deref().unwrap_or(""),
            r.wrong
        ));
    }
}

/// One rank.
struct Bench<'a> {
    // First: it drains before the memory that its work uses goes.
    stream: CudaStream,
    probe: LinkProbe,
    master: CudaMemory,
    events: (CudaEvent, CudaEvent),
    team: LiveTeam,
    meet: &'a Meet,
    device: String,
    lines: Vec<Line>,
}

fn measure(world: &World, meet: &Meet) -> Result<Vec<Line>> {
    let team = world.everyone("links")?;
    let heap = team.heap(BackendKind::Vmm, HeapCfg::new(CAP + MIB))?;
    let probe = LinkProbe::new(&heap, CAP)?;
    // All or none: the rows of the ranks stand beside each other.
    let has_bulk = team.agree(probe.has_bulk())?;
    if has_bulk {
        probe.allow_chunks(CHUNK)?;
    }
    let ctx = probe.context().clone();
    let mut b = Bench {
        stream: CudaStream::new(&ctx)?,
        master: CudaMemory::from_bytes(&ctx, &pattern(team.rank()))?,
        events: (CudaEvent::new(&ctx, true)?, CudaEvent::new(&ctx, true)?),
        device: ctx.name()?,
        probe,
        team,
        meet,
        lines: Vec::new(),
    };
    b.copy_engine()?;
    b.all_gather()?;
    match has_bulk {
        true => b.bulk()?,
        false => b.lack("bulk_put", "bulk copies need sm_90 on every GPU"),
    }
    b.ld_st()?;
    b.flag()?;
    b.barrier()?;
    // Nobody unmaps what a peer still uses.
    b.finish()?;
    b.meet.wait()?;
    Ok(b.lines)
}

/// The bytes that a rank sends, again and again.
fn pattern(rank: Rank) -> Vec<u8> {
    let rng = Rng::new(1 + u64::from(rank.get()));
    (0..PERIOD as u64 / 8).flat_map(|i| rng.at(i).to_le_bytes()).collect()
}

/// Returns the offset at which repetition `i` of transfers of `len` bytes takes place.
fn place(i: usize, len: usize) -> usize {
    i % (CAP / len) * len
}

impl Bench<'_> {
    fn me(&self) -> Rank {
        self.team.rank()
    }

    fn behind(&self, by: usize) -> Rank {
        self.me().offset(by, self.team.size())
    }

    fn before(&self) -> Rank {
        self.behind(self.team.size() - 1)
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize_until(Some(Deadline::after_s(LIMIT_S)))?;
        self.team.check()
    }

    /// My bytes in my buffer and in my heap: nothing of the last measurement is left.
    fn reset(&self) -> Result<()> {
        self.finish()?;
        self.meet.wait()?;
        for offset in (0..CAP).step_by(PERIOD) {
            let piece = Piece { offset, len: PERIOD };
            self.stream.copy_memory(&self.probe.local().slice(offset, PERIOD)?, &self.master)?;
            self.probe.put(&self.stream, self.me(), offset, piece)?;
        }
        self.finish()?;
        self.meet.wait()
    }

    /// Median of `n` repetitions after an untimed one, microseconds.
    fn time(&self, n: usize, f: impl Fn(usize) -> Result<()>) -> Result<f64> {
        self.time_behind(n, |_| Ok(()), f)
    }

    /// Of copies: behind an untimed copy of the same kind. The host queues the timed one while that
    /// runs, so that only the engine's time is counted; of small copies the host's was up to two
    /// thirds.
    fn time_copies(&self, n: usize, f: impl Fn(usize) -> Result<()>) -> Result<f64> {
        self.time_behind(n, |i| f(i + n), &f)
    }

    fn time_behind(
        &self,
        n: usize,
        first: impl Fn(usize) -> Result<()>,
        f: impl Fn(usize) -> Result<()>,
    ) -> Result<f64> {
        f(0)?;
        self.finish()?;
        let mut us = Vec::with_capacity(n);
        for i in 1..=n {
            self.meet.wait()?;
            first(i)?;
            self.stream.record(&self.events.0)?;
            f(i)?;
            self.stream.record(&self.events.1)?;
            self.finish()?;
            us.push(self.events.1.us_since(&self.events.0)?);
        }
        self.meet.wait()?;
        us.sort_by(f64::total_cmp);
        Ok(us[n / 2])
    }

    /// Bytes at `offset` of the own buffer (or the heap) that are not `from`'s.
    fn wrong(&self, heap: bool, from: Rank, offset: usize, len: usize) -> Result<u64> {
        let len = len.min(64 * KIB);
        let mut bad = 0;
        let got = match heap {
            false => self.probe.local().slice(offset, len)?.download()?,
            true => {
                let out = CudaMemory::zeroed(self.probe.context(), len)?;
                self.probe.read(&self.stream, offset, &out)?;
                self.finish()?;
                out.download()?
            }
        };
        let want = pattern(from);
        for (i, byte) in got.iter().enumerate() {
            bad += u64::from(*byte != want[(offset + i) % PERIOD]);
        }
        Ok(bad)
    }

    fn add(&mut self, op: &'static str, shape: String, bytes: usize, us: f64, wrong: u64) {
        let (device, note) = (self.device.clone(), String::new());
        self.lines.push(Line { op, shape, us, bytes, wrong, note, device, unsupported: false });
    }

    /// Records that these devices lack what `op` needs.
    fn lack(&mut self, op: &'static str, why: &str) {
        let (device, note) = (self.device.clone(), why.to_owned());
        let (shape, us, bytes, wrong) = (String::new(), f64::NAN, 0, 0);
        self.lines.push(Line { op, shape, us, bytes, wrong, note, device, unsupported: true });
    }

    /// Every rank puts to, or gets from, the next.
    fn copy_engine(&mut self) -> Result<()> {
        const N: usize = 9;
        let next = self.behind(1);
        for mib in [1, 4, 16, 64, 256] {
            let len = mib * MIB;
            let last = place(N, len);
            for (op, push) in [("put", true), ("get", false)] {
                self.reset()?;
                let us = self.time_copies(N, |i| {
                    let piece = Piece { offset: place(i, len), len };
                    match push {
                        true => self.probe.put(&self.stream, next, piece.offset, piece),
                        false => self.probe.get(&self.stream, next, piece.offset, piece),
                    }
                })?;
                let from = if push { self.before() } else { next };
                let wrong = self.wrong(push, from, last, len)?;
                self.add(op, format!("len={mib}MiB"), len, us, wrong);
            }
        }
        Ok(())
    }

    /// Everybody's shard to everybody: one stream, peers in rotated order.
    fn all_gather(&mut self) -> Result<()> {
        const N: usize = 7;
        let size = self.team.size();
        for mib in [1, 4, 16, 32] {
            let shard = mib * MIB;
            let mine = |i: usize, r: Rank| place(i, size * shard) + r.idx() * shard;
            self.reset()?;
            let us = self.time_copies(N, |i| {
                let piece = Piece { offset: mine(i, self.me()), len: shard };
                (1..size).try_for_each(|by| {
                    self.probe.put(&self.stream, self.behind(by), piece.offset, piece)
                })
            })?;
            let mut wrong = 0;
            for by in 1..size {
                let from = self.behind(by);
                wrong += self.wrong(true, from, mine(N, from), shard)?;
            }
            self.add("all_gather", format!("shard={mib}MiB"), (size - 1) * shard, us, wrong);
        }
        Ok(())
    }

    /// Bulk copies: to the next rank, to all, and from the next.
    fn bulk(&mut self) -> Result<()> {
        const N: usize = 5;
        let (next, others) = (self.behind(1), self.team.size() as u32 - 1);
        let last = place(N, LEN);
        for ctas in [2, 4, 8, 16, 132] {
            for (op, num) in [("bulk_put", 1), ("bulk_put_all", others), ("bulk_get", 0)] {
                self.reset()?;
                let us = self.time(N, |i| {
                    let piece = Piece { offset: place(i, LEN), len: LEN };
                    match num {
                        0 => self.probe.bulk_get(&self.stream, ctas, next, CHUNK, piece),
                        _ => self.probe.bulk_put(&self.stream, ctas, num, CHUNK, piece),
                    }
                })?;
                let wrong = match num {
                    0 => self.wrong(false, next, last, LEN)?,
                    // The first chunk of each went to the next.
                    _ => self.wrong(true, self.before(), last, CHUNK as usize)?,
                };
                self.add(op, format!("ctas={ctas} chunk=16KiB len=256MiB"), LEN, us, wrong);
            }
        }
        Ok(())
    }

    /// Plain loads and stores.
    fn ld_st(&mut self) -> Result<()> {
        const N: usize = 5;
        let next = self.behind(1);
        for ctas in [16, 64, 132] {
            for (op, pull) in [("st_put", false), ("ld_get", true)] {
                self.reset()?;
                let us = self.time(N, |i| {
                    let piece = Piece { offset: place(i, LEN), len: LEN };
                    self.probe.ld_st(&self.stream, ctas, next, piece, pull)
                })?;
                let from = if pull { next } else { self.before() };
                let wrong = self.wrong(!pull, from, place(N, LEN), LEN)?;
                self.add(op, format!("ctas={ctas} len=256MiB"), LEN, us, wrong);
            }
        }
        Ok(())
    }

    /// Ranks 0 and 1, inside one kernel each.
    fn flag(&mut self) -> Result<()> {
        let mut ns = 0.0;
        // The first time is not counted.
        for _ in 0..2 {
            self.probe.transport().here().clear(&self.stream, CAP, 8)?;
            self.finish()?;
            self.meet.wait()?;
            if self.me().get() < 2 {
                let peer = Rank::new(1 - self.me().get());
                ns = self.probe.ping(&self.stream, peer, CAP, 2000)?;
            }
            self.meet.wait()?;
        }
        self.add("flag", "one way".to_owned(), 0, ns / 1e3, 0);
        Ok(())
    }

    /// A barrier of all ranks as a node of a graph, less a node that does nothing.
    fn barrier(&mut self) -> Result<()> {
        let node = |work: &dyn Fn() -> Result<()>| -> Result<f64> {
            self.stream.begin_capture()?;
            (0..NODES).try_for_each(|_| work())?;
            let graph = self.stream.end_capture()?;
            self.meet.wait()?;
            Ok(self.time(9, |_| self.stream.replay(&graph))? / NODES as f64)
        };
        let empty = node(&|| self.probe.empty(&self.stream))?;
        let full = node(&|| self.probe.transport().barrier(&self.stream, 0, "barrier"))?;
        self.add("barrier", format!("graph of {NODES} nodes"), 0, full - empty, 0);
        if let Some(l) = self.lines.last_mut() {
            l.note = format!("{full:.2} us, less {empty:.2} us of an empty node");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(us: f64, bytes: usize, wrong: u64) -> Line {
        let (shape, note, device) = ("len=1MiB".to_owned(), "why".to_owned(), "GPU".to_owned());
        Line { op: "put", shape, us, bytes, wrong, note, device, unsupported: false }
    }

    #[test]
    fn a_row_is_the_slowest_ranks() {
        let all = [vec![line(10.0, 1_000_000, 0)], vec![line(20.0, 1_000_000, 3)]];
        let rows = merge(&all);
        assert_eq!((rows.len(), rows[0].ranks, rows[0].wrong), (1, 2, 3));
        assert_eq!((rows[0].op.as_str(), rows[0].t_ours_us), ("links/put", Some(20.0)));
        assert_eq!(rows[0].note.as_deref(), Some("50.0 GB/s"));
        assert_eq!((rows[0].max_err, merge(&all[..1])[0].max_err), (None, Some(0.0)));
        assert_eq!(merge(&[vec![line(1.0, 0, 0)]])[0].note.as_deref(), Some("why"));
        assert!(merge(&[]).is_empty());
        let lacking = Line { unsupported: true, ..line(f64::NAN, 0, 0) };
        let row = merge(&[vec![lacking.clone()], vec![lacking]]).swap_remove(0);
        assert!(row.unsupported && row.t_ours_us.is_none() && row.max_err.is_none());
    }

    #[test]
    fn ranks_without_a_device_are_refused() {
        for (ranks, devices) in [(1, 8), (9, 8), (0, 0), (2, 1)] {
            let e = check_ranks(ranks, devices).unwrap_err();
            assert!(e.get_hint().is_some() && e.kind() == ErrorKind::InvalidArgument, "{e}");
            assert_eq!(e.to_string().contains("--ranks 2 to"), devices > 1, "{e}");
        }
        check_ranks(2, 2).unwrap();
        check_ranks(5, 8).unwrap();
    }

    #[test]
    fn places_lie_in_the_buffers_and_change() {
        for len in [MIB, 16 * MIB, LEN, 8 * 32 * MIB] {
            for i in 0..20 {
                assert!(place(i, len) + len <= CAP);
                assert_ne!(place(i, len), place(i + 1, len));
            }
        }
        assert_ne!(pattern(Rank::new(0))[..64], pattern(Rank::new(1))[..64]);
        assert_eq!(pattern(Rank::new(0)).len(), PERIOD);
    }

    #[test]
    fn a_meeting_ends_for_all_when_one_fails() {
        let meet = Meet::new(3);
        let all = World::run_threads(3, WorldCfg::for_tests(), |world| {
            (0..100).try_for_each(|_| meet.wait())?;
            if world.rank().get() == 2 {
                meet.fail(&Error::invalid("enough"));
                return Ok(());
            }
            assert_eq!(meet.wait().unwrap_err().message(), "enough");
            Ok(())
        });
        all.unwrap();
    }
}
