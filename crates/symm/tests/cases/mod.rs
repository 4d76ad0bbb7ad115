//! Cases that every backend runs: one source, generic over [`Backend`].
//!
//! A case is a function of a [`World`]: it runs on every rank and returns an error, or panics,
//! if the backend does not do what [`Transport`] promises.
// Used by the conformance suite and by the example, neither of which uses all of it.
#![allow(dead_code)]

use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Result, Rng, Shape};
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_device::{Buffer, Pending, Queue, Stream, Tensor};
use tilewire_symm::*;

pub mod nccl;
pub mod queued;

use queued::{OnHost, Queued};

pub const KIB: usize = 1024;

/// How a backend makes what the cases need.
pub trait Backend {
    type Net: Queued;
    const KIND: BackendKind;

    fn one_sided(heap: &Heap) -> Result<Self::Net>;
    fn stream(os: &Self::Net) -> Result<StreamOf<Self>>;
    fn buffer(os: &Self::Net, bytes: &[u8]) -> Result<BufferOf<Self>>;
    fn slice(b: &BufferOf<Self>, offset: usize, len: usize) -> Result<BufferOf<Self>>;
}

pub type StreamOf<B> = <<B as Backend>::Net as Queued>::Stream;
pub type BufferOf<B> = <<B as Backend>::Net as Queued>::Buffer;

pub struct Host;

impl Backend for Host {
    type Net = OnHost;
    const KIND: BackendKind = BackendKind::Host;

    fn one_sided(heap: &Heap) -> Result<OnHost> {
        Ok(OnHost(heap.host_transport()?))
    }

    fn stream(os: &OnHost) -> Result<Stream> {
        Stream::new(format!("{}", os.heap().team().rank()))
    }

    fn buffer(_: &OnHost, bytes: &[u8]) -> Result<Tensor> {
        Tensor::from_slice(bytes, Shape::d1(bytes.len()))
    }

    fn slice(b: &Tensor, offset: usize, len: usize) -> Result<Tensor> {
        b.rows(offset, len)
    }
}

/// The host, whose ranks reach each other by messages: no peer's memory has an address.
pub struct Sockets;

impl Backend for Sockets {
    type Net = OnHost;
    const KIND: BackendKind = BackendKind::Host;

    fn one_sided(heap: &Heap) -> Result<OnHost> {
        heap.connect_by_sockets()?;
        let net = heap.host_transport()?;
        assert!(!net.caps().direct_peer);
        Ok(OnHost(net))
    }

    fn stream(os: &OnHost) -> Result<Stream> {
        Host::stream(os)
    }

    fn buffer(os: &OnHost, bytes: &[u8]) -> Result<Tensor> {
        Host::buffer(os, bytes)
    }

    fn slice(b: &Tensor, offset: usize, len: usize) -> Result<Tensor> {
        Host::slice(b, offset, len)
    }
}

pub struct Vmm;

impl Backend for Vmm {
    type Net = DeviceTransport;
    const KIND: BackendKind = BackendKind::Vmm;

    fn one_sided(heap: &Heap) -> Result<DeviceTransport> {
        DeviceTransport::new(heap)
    }

    fn stream(os: &DeviceTransport) -> Result<CudaStream> {
        CudaStream::new(os.here().context())
    }

    fn buffer(os: &DeviceTransport, bytes: &[u8]) -> Result<CudaMemory> {
        CudaMemory::from_bytes(os.here().context(), bytes)
    }

    fn slice(b: &CudaMemory, offset: usize, len: usize) -> Result<CudaMemory> {
        b.slice(offset, len)
    }
}

/// Memory of NVSHMEM: a process for each rank, so in `symm_checks` only.
pub struct Nvshmem;

impl Backend for Nvshmem {
    type Net = DeviceTransport;
    const KIND: BackendKind = BackendKind::Nvshmem;

    fn one_sided(heap: &Heap) -> Result<DeviceTransport> {
        assert!(heap.backend() == Self::KIND);
        DeviceTransport::new(heap)
    }

    fn stream(os: &DeviceTransport) -> Result<CudaStream> {
        Vmm::stream(os)
    }

    fn buffer(os: &DeviceTransport, bytes: &[u8]) -> Result<CudaMemory> {
        Vmm::buffer(os, bytes)
    }

    fn slice(b: &CudaMemory, offset: usize, len: usize) -> Result<CudaMemory> {
        Vmm::slice(b, offset, len)
    }
}

/// Memory of `vmm`, registered with NCCL.
pub struct Nccl;

impl Backend for Nccl {
    type Net = DeviceTransport;
    const KIND: BackendKind = BackendKind::Nccl;

    fn one_sided(heap: &Heap) -> Result<DeviceTransport> {
        assert!(heap.nccl_window().is_some() && heap.backend() == Self::KIND);
        DeviceTransport::new(heap)
    }

    fn stream(os: &DeviceTransport) -> Result<CudaStream> {
        Vmm::stream(os)
    }

    fn buffer(os: &DeviceTransport, bytes: &[u8]) -> Result<CudaMemory> {
        Vmm::buffer(os, bytes)
    }

    fn slice(b: &CudaMemory, offset: usize, len: usize) -> Result<CudaMemory> {
        Vmm::slice(b, offset, len)
    }
}

pub struct Setup<B: Backend> {
    // Streams first: they drain before the memory that their work uses goes.
    pub stream: StreamOf<B>,
    pub os: B::Net,
    pub heap: Heap,
    pub team: LiveTeam,
}

pub fn setup<B: Backend>(world: &World, len_bytes: usize) -> Result<Setup<B>> {
    let team = world.everyone("all")?;
    let heap = team.heap(B::KIND, HeapCfg::new(len_bytes))?;
    let os = B::one_sided(&heap)?;
    Ok(Setup { stream: B::stream(&os)?, os, heap, team })
}

impl<B: Backend> Setup<B> {
    /// A buffer that holds `bytes`.
    pub fn buffer(&self, bytes: &[u8]) -> Result<BufferOf<B>> {
        B::buffer(&self.os, bytes)
    }

    /// A buffer that holds poison.
    pub fn poisoned(&self, len: usize) -> Result<BufferOf<B>> {
        self.buffer(&vec![DType::POISON; len])
    }

    /// Waits for everything queued, and raises the fault of the team.
    pub fn finish(&self) -> Result<()> {
        Pending::new((), &self.stream, Some(self.team.fault().clone()))?.wait()
    }

    /// Reads my own chunk through the one-sided interface.
    pub fn own(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let out = self.poisoned(len)?;
        self.os.get(&self.stream, self.team.rank(), offset, &out)?;
        self.finish()?;
        out.download()
    }
}

pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let rng = Rng::new(seed);
    (0..len as u64).map(|i| rng.at(i) as u8).collect()
}

/// A pattern to the next rank, in `buf`, and what the one before has put.
fn shift<B: Backend>(s: &Setup<B>, buf: &SymBuf, sig: &Signals, len: usize) -> Result<()> {
    let (n, me) = (s.team.size(), s.team.rank());
    let (next, before) = (me.offset(1, n), me.offset(n - 1, n));
    let data = |r: Rank| pattern((buf.offset() + r.idx()) as u64, len);
    let own = s.buffer(&data(me))?;
    s.os.put_signal(&s.stream, (next, buf.range(0, len)), &own, sig.slot(0))?;
    s.os.wait(&s.stream, before, sig.slot(0), 1)?;
    assert!(s.own(buf.range(0, len), len)? == data(before), "at {}", buf.offset());
    Ok(())
}

/// A heap grows twice; a buffer lies across the end of what was there at first, and what was there
/// stays. What has not grown anywhere can grow by less.
pub fn growth<B: Backend>(world: World) -> Result<()> {
    const MIB: usize = 1 << 20;
    let s = setup::<B>(&world, 3 * MIB)?;
    let sig = s.team.signals(1, "data")?;
    if !matches!(B::KIND, BackendKind::Host | BackendKind::Vmm) {
        let e = s.heap.grow(4 * MIB).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        return Ok(());
    }
    let a = s.heap.alloc(MIB, "a")?;
    shift(&s, &a, &sig, MIB)?;
    let old = s.own(a.range(0, MIB), MIB)?;
    for (total, len) in [(9, 7), (12, 3)] {
        assert!(s.heap.alloc(len * MIB, "more").is_err());
        s.heap.grow(total * MIB)?;
        let more = s.heap.alloc(len * MIB, "more")?;
        shift(&s, &more, &sig, len * MIB)?;
        assert!(s.own(a.range(0, MIB), MIB)? == old, "after it has {total} MiB");
    }
    assert_eq!(s.heap.grow(13 * MIB).unwrap_err().kind(), ErrorKind::Exhausted);
    assert_eq!(s.heap.usage().1, 12 * MIB);
    // All have read: the next team's memory may be this one's.
    s.team.agree(true)?;
    if B::KIND == BackendKind::Vmm {
        let team = world.everyone("large")?;
        let cfg = HeapCfg { reserve_bytes: Some(MIB << 20), ..HeapCfg::new(MIB) };
        let heap = team.heap(B::KIND, cfg)?;
        // No device has so much.
        let e = heap.grow(MIB << 20).unwrap_err();
        assert_eq!((e.kind(), heap.usage().1), (ErrorKind::Exhausted, MIB), "{e}");
        heap.grow(8 * MIB)?;
        heap.alloc(7 * MIB, "less")?;
    }
    Ok(())
}

/// Every rank puts a different pattern to every other, with credits, many rounds.
pub fn put_signal_wait<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 256 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let len = 3000;
    let recv = s.heap.alloc(n * len, "recv")?;
    let sig = s.team.signals(2, "data+credit")?;
    let seed =
        |round: usize, src: Rank, dst: Rank| (round * 4096 + src.idx() * 64 + dst.idx()) as u64;
    for round in 0..20 {
        for p in s.team.peers() {
            s.os.signal(&s.stream, p, sig.slot(1), 1)?;
        }
        for p in s.team.peers() {
            s.os.wait(&s.stream, p, sig.slot(1), 1)?;
            let data = s.buffer(&pattern(seed(round, me, p), len))?;
            let at = recv.range(me.idx() * len, len);
            s.os.put_signal(&s.stream, (p, at), &data, sig.slot(0))?;
        }
        for p in s.team.peers() {
            s.os.wait(&s.stream, p, sig.slot(0), 1)?;
        }
        for p in s.team.peers() {
            let got = s.own(recv.range(p.idx() * len, len), len)?;
            assert_eq!(got, pattern(seed(round, p, me), len), "round {round} from {p}");
        }
    }
    // Of no bytes the signal alone goes, and no put is counted.
    let none = B::slice(&s.buffer(&[1; 8])?, 0, 0)?;
    for p in s.team.peers() {
        s.os.put_signal(&s.stream, (p, recv.range(0, 0)), &none, sig.slot(0))?;
    }
    for p in s.team.peers() {
        s.os.wait(&s.stream, p, sig.slot(0), 1)?;
    }
    s.finish()?;
    s.os.check_counters()?;
    for p in s.team.peers() {
        let t = s.team.traffic()[p.idx()];
        assert_eq!((t.puts, t.put_bytes, t.signals), (20, 20 * len as u64, 41));
    }
    Ok(())
}

/// Pieces with a flag each, whose totals were made by one call: eager, and as a graph. Some pieces
/// are empty. A piece is there when its own flag is, not only when all are.
pub fn put_flag<B: Backend>(world: World) -> Result<()> {
    const PIECES: usize = 5;
    let s = setup::<B>(&world, 256 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let lens = [3000, 0, 8, 1, 4096];
    let (len, start) = (lens.iter().sum::<usize>(), |i: usize| lens[..i].iter().sum::<usize>());
    let recv = s.heap.alloc(n * len, "recv")?;
    let sig = s.team.signals(1 + PIECES, "credit+pieces")?;
    let seed =
        |round: usize, src: Rank, dst: Rank| (round * 4096 + src.idx() * 64 + dst.idx()) as u64;
    let data: Vec<_> = Rank::all(n).map(|_| s.poisoned(len)).collect::<Result<_>>()?;
    let got: Vec<_> = Rank::all(n).map(|_| s.poisoned(len)).collect::<Result<_>>()?;
    let exchange = || -> Result<()> {
        for p in s.team.peers() {
            s.os.signal(&s.stream, p, sig.slot(0), 1)?;
        }
        for p in s.team.peers() {
            s.os.wait(&s.stream, p, sig.slot(0), 1)?;
        }
        s.os.advance(&s.stream, sig.slot(1), PIECES)?;
        for (i, num) in lens.into_iter().enumerate() {
            for p in s.team.peers() {
                let piece = B::slice(&data[p.idx()], start(i), num)?;
                let at = recv.range(me.idx() * len + start(i), num);
                s.os.put_flag(&s.stream, (p, at), &piece, sig.slot(1 + i))?;
            }
        }
        // Last pieces first: each has a count of its own.
        for i in (0..PIECES).rev() {
            for p in s.team.peers() {
                s.os.wait(&s.stream, p, sig.slot(1 + i), 1)?;
                let out = B::slice(&got[p.idx()], start(i), lens[i])?;
                s.os.get(&s.stream, me, recv.range(p.idx() * len + start(i), lens[i]), &out)?;
            }
        }
        Ok(())
    };
    let round = |round: usize, run: &dyn Fn() -> Result<()>| -> Result<()> {
        for p in s.team.peers() {
            data[p.idx()].upload(&pattern(seed(round, me, p), len))?;
            got[p.idx()].upload(&vec![DType::POISON; len])?;
        }
        run()?;
        s.finish()?;
        for p in s.team.peers() {
            let want = pattern(seed(round, p, me), len);
            assert_eq!(got[p.idx()].download()?, want, "round {round} from {p}");
        }
        Ok(())
    };
    for r in 0..10 {
        round(r, &exchange)?;
    }
    s.stream.begin_capture()?;
    exchange()?;
    let graph = s.stream.end_capture()?;
    for r in 10..60 {
        round(r, &|| s.stream.replay(&graph))?;
    }
    assert!(s.os.advance(&s.stream, sig.slot(0), NUM_SIGNALS + 1).is_err());
    s.os.check_counters()
}

/// A launch enters, puts to all peers under the permit that this gives it, and passes on to its
/// right neighbour what its left one has put; eager, and as a graph. A put to a peer that has not
/// granted is refused by name, and nothing of it arrives.
pub fn permits<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let (next, before) = (me.offset(1, n), me.offset(n - 1, n));
    let len = 512;
    let (recv, passed) = (s.heap.alloc(n * len, "recv")?, s.heap.alloc(len, "passed")?);
    let sig = s.team.signals(4, "credit+data+passed+lone")?;
    let (data, got) = (s.poisoned(len)?, s.poisoned(len)?);
    let enter = Enter { credit: sig.slot(0), tag: 7, first: sig.slot(1), num: 1 };
    let launch = || -> Result<()> {
        let to = s.team.peers().map(|p| (p, recv.range(me.idx() * len, len))).collect();
        s.os.enter_and_put(&s.stream, enter, to, &data, sig.slot(1))?;
        s.os.wait_peers(&s.stream, sig.slot(1))?;
        let (to, from) = (passed.range(0, len), recv.range(before.idx() * len, len));
        s.os.pass_signal(&s.stream, (next, to), (from, len), sig.slot(2))?;
        s.os.wait(&s.stream, before, sig.slot(2), 1)?;
        s.os.get(&s.stream, me, passed.range(0, len), &got)
    };
    let round = |round: u64, run: &dyn Fn() -> Result<()>| -> Result<()> {
        data.upload(&pattern(round << 8 | u64::from(me.get()), len))?;
        run()?;
        s.finish()?;
        let two_back = me.offset(2 * n - 2, n).get();
        assert_eq!(got.download()?, pattern(round << 8 | u64::from(two_back), len), "{round}");
        s.team.agree(true).map(|_| ())
    };
    if n > 2 {
        for r in 0..5 {
            round(r, &launch)?;
        }
        s.stream.begin_capture()?;
        launch()?;
        let graph = s.stream.end_capture()?;
        for r in 5..20 {
            round(r, &|| s.stream.replay(&graph))?;
        }
        s.os.check_counters()?;
        s.team.agree(true)?;
    }
    // One credit, for one rank, whose put arrives; another rank's is refused.
    s.os.signal(&s.stream, next, sig.slot(3), 1)?;
    let mine = s.buffer(&pattern(99, len))?;
    let granted = Some((before, sig.slot(3)));
    s.os.put_granted(&s.stream, granted, (before, recv.range(0, len)), &mine)?;
    s.os.barrier(&s.stream, 0)?;
    s.finish()?;
    assert_eq!(s.own(recv.range(0, len), len)?, pattern(99, len));
    // A refusal on the host ends the team, of which a slower rank hears in this meeting.
    let _met = s.team.agree(true);
    let at = recv.range(len, len);
    let eight = s.buffer(&[1; 8])?;
    let refused = s.os.put_granted(&s.stream, None, (next, at), &eight);
    let e = refused.and_then(|()| s.finish()).unwrap_err();
    assert!(e.message().contains("has no credit") || e.kind() == ErrorKind::Aborted, "{e}");
    Ok(())
}

/// Rows of `r` from byte 5 on come to where they belong, and nothing else changes.
fn rows_come_alone<B: Backend>(s: &Setup<B>, (r, buf): (Rank, &SymBuf), rows: Rows) -> Result<()> {
    let out = s.poisoned(rows.reach(rows.out_pitch) + 3)?;
    let before = s.team.traffic()[r.idx()];
    s.os.get_rows(&s.stream, (r, buf.range(5, rows.reach(rows.from_pitch))), &out, rows)?;
    s.finish()?;
    let after = s.team.traffic()[r.idx()];
    let counted = (after.gets - before.gets, after.get_bytes - before.get_bytes);
    let own = r == s.team.rank();
    assert_eq!(counted, if own { (0, 0) } else { (1, rows.bytes() as u64) });
    let source = pattern(r.get().into(), 5000);
    let mut want = vec![DType::POISON; rows.reach(rows.out_pitch) + 3];
    for row in 0..rows.num {
        let (from, to) = (5 + row * rows.from_pitch, row * rows.out_pitch);
        want[to..to + rows.width].copy_from_slice(&source[from..from + rows.width]);
    }
    assert_eq!(out.download()?, want, "{rows:?} of {r}");
    Ok(())
}

/// Every rank publishes; every rank gets from every other. Bad arguments are refused.
pub fn get_after_signal<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let me = s.team.rank();
    let buf = s.heap.alloc(5000, "shared")?;
    let mine = s.buffer(&pattern(me.get().into(), 5000))?;
    s.os.put(&s.stream, me, buf.range(0, 5000), &mine)?;
    s.os.barrier(&s.stream, 0)?;
    for r in Rank::all(s.team.size()) {
        let out = s.poisoned(4999)?;
        s.os.get(&s.stream, r, buf.range(1, 4999), &out)?;
        s.finish()?;
        assert_eq!(out.download()?, pattern(r.get().into(), 5000)[1..]);
        for (from_pitch, out_pitch) in [(101, 29), (101, 13), (13, 29), (13, 13)] {
            rows_come_alone(&s, (r, &buf), Rows { width: 13, num: 7, from_pitch, out_pitch })?;
        }
    }
    s.os.barrier(&s.stream, 0)?;
    s.finish()?;
    let one = s.buffer(&[1])?;
    assert!(s.os.put(&s.stream, Rank::new(99), 0, &one).is_err());
    assert!(s.os.put(&s.stream, me, 64 * KIB, &one).is_err());
    assert!(s.os.barrier(&s.stream, 64).is_err());
    s.team.check()
}

/// A barrier orders: what everybody put before it, everybody sees after it, on two channels.
pub fn barrier<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let buf = s.heap.alloc(8 * n, "words")?;
    for round in 0..50u64 {
        let word = s.buffer(&(round * 100 + u64::from(me.get())).to_le_bytes())?;
        for p in s.team.peers() {
            s.os.put(&s.stream, p, buf.range(8 * me.idx(), 8), &word)?;
        }
        s.os.barrier(&s.stream, 1)?;
        for p in s.team.peers() {
            let got = s.own(buf.range(8 * p.idx(), 8), 8)?;
            assert_eq!(got, (round * 100 + u64::from(p.get())).to_le_bytes(), "from {p}");
        }
        s.os.barrier(&s.stream, 2)?;
    }
    s.finish()
}

/// A captured exchange replays with data that changes between replays, bit-equal to eager.
pub fn graph_replay<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let (next, prev) = (me.offset(1, n), me.offset(n - 1, n));
    let buf = s.heap.alloc(512, "ring")?;
    let sig = s.team.signals(2, "ring")?;
    let (data, out) = (s.poisoned(512)?, s.poisoned(512)?);
    s.stream.begin_capture()?;
    s.os.signal(&s.stream, prev, sig.slot(1), 1)?;
    s.os.wait(&s.stream, next, sig.slot(1), 1)?;
    s.os.put_signal(&s.stream, (next, buf.range(0, 512)), &data, sig.slot(0))?;
    s.os.wait(&s.stream, prev, sig.slot(0), 1)?;
    s.os.get(&s.stream, me, buf.range(0, 512), &out)?;
    let graph = s.stream.end_capture()?;
    for round in 0..200u64 {
        data.upload(&pattern(round << 8 | u64::from(me.get()), 512))?;
        s.stream.replay(&graph)?;
        s.finish()?;
        assert_eq!(out.download()?, pattern(round << 8 | u64::from(prev.get()), 512));
    }
    s.os.check_counters()
}

/// After a fault: a team of the same members on new memory works at once, the old heap is stale.
fn reform<B: Backend>(world: &World, s: &Setup<B>) -> Result<()> {
    let again = world.everyone("all")?;
    assert!(again.generation() > s.team.generation() && again.id() != s.team.id());
    let heap = again.heap(B::KIND, HeapCfg::new(64 * KIB))?;
    let old = s.heap.alloc(64, "old")?;
    assert_eq!(old.check_heap(&heap).unwrap_err().kind(), ErrorKind::Stale);
    let os = B::one_sided(&heap)?;
    let stream = B::stream(&os)?;
    os.barrier(&stream, 3)?;
    stream.synchronize_until(None)?;
    again.check()
}

/// A rank that does not signal: the waiter times out and names it, everybody else is aborted,
/// nobody hangs, and the same members can form a new team at once.
pub fn timeout_and_reform<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let (n, me) = (s.team.size(), s.team.rank());
    let sig = s.team.signals(1, "never")?;
    let silent = Rank::new(n as u32 - 1);
    let start = Instant::now();
    // The silent rank, too, waits: it hears the others' abort.
    let on = if me == silent { Rank::new(0) } else { silent };
    s.os.wait(&s.stream, on, sig.slot(0), 1)?;
    let e = s.finish().unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}: {e}", start.elapsed());
    assert!(e.is_team_fault(), "{e}");
    if e.is_timeout() {
        let text = e.to_string();
        assert!(text.contains("expected 1, got 0") && e.get_op() == Some("wait"), "{text}");
        assert_eq!(e.get_peer(), Some(on));
    }
    // Every later call raises the same error.
    assert_eq!(s.team.check().unwrap_err().kind(), e.kind());
    assert_eq!(s.os.barrier(&s.stream, 0).unwrap_err().kind(), e.kind());
    reform(&world, &s)
}

/// One rank aborts on purpose while the others wait: they return at once, long before their
/// deadline, and the team can be formed again.
pub fn abort_and_reform<B: Backend>(world: World) -> Result<()> {
    let s = setup::<B>(&world, 64 * KIB)?;
    let sig = s.team.signals(1, "never")?;
    s.team.agree(true)?;
    let start = Instant::now();
    if s.team.rank().get() == 0 {
        // Its own wait ends as well.
        s.os.wait(&s.stream, Rank::new(1), sig.slot(0), 1)?;
        std::thread::sleep(Duration::from_millis(100));
        s.team.abort("test");
    } else {
        s.os.wait(&s.stream, Rank::new(0), sig.slot(0), 1)?;
    }
    let e = s.finish().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}: {e}", start.elapsed());
    let dump = s.team.dump();
    let mine =
        dump["reports"].as_array().and_then(|a| a.iter().find(|r| r["rank"] == dump["rank"]));
    let said = mine.map(|r| (&r["reason"], &r["about"], &r["from"]));
    // Whoever it was heard from, everybody names the rank that asked for it.
    assert_eq!(said, Some((&3.into(), &0.into(), &0.into())), "{dump}");
    assert!(s.team.rank().get() == 0 || e.get_peer() == Some(Rank::new(0)), "{e}");
    reform(&world, &s)
}

/// Ranks that reach each other by messages have no addresses of each other, and say so.
pub fn no_address_of_a_peer(world: World) -> Result<()> {
    let s = setup::<Sockets>(&world, 64 * KIB)?;
    let (buf, me) = (s.heap.alloc(64, "x")?, s.team.rank());
    let peer = me.offset(1, s.team.size());
    assert!(buf.address(me).is_ok());
    for e in [buf.address(peer).unwrap_err(), buf.stride().unwrap_err()] {
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    }
    s.team.agree(true).map(|_| ())
}
