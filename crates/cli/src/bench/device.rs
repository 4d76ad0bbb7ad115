//! `tilewire bench` on GPUs: collectives, timed by events; expert parallelism is in `ep.rs`,
//! products are in `products.rs`.
//!
//! An operation is captured once; a sample is a device barrier, an event, up to ten replays (as
//! many as take 10 ms), an event. A time is the median over samples, of the slowest rank. Results
//! are checked element by element, on inputs whose sums are exact in the element type, before
//! anything is timed; what is timed has random data. What is bound by memory (`memory.rs`) is
//! checked behind the samples instead. On the host, where there are no events, a sample is one
//! launch between two exchanges.

use std::time::Instant;

use tilewire::core::Rng;
use tilewire::device::cuda::{CudaEvent, CudaStream};
use tilewire::device::{Device, GraphExec};
use tilewire::ops::collective::{
    CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp,
};
use tilewire::ops::ep::EpPlan;
use tilewire::prelude::*;
use tilewire::symm::{DeviceTransport, Transport};

use super::{ep, memory, products};
use crate::args::RowOrder;
use crate::rows::{Row, Spreads, Time, bandwidth};

/// The operations to time, with their sizes.
#[derive(Clone, Debug)]
pub struct Options {
    /// Operations.
    pub ops: Vec<String>,
    /// Backend of the heap.
    pub backend: BackendKind,
    /// Element type.
    pub dtype: DType,
    /// Sizes of collectives: bytes of the whole vector.
    pub bytes: Vec<usize>,
    /// Tokens of a rank, elements of a token.
    pub tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Experts in all, and choices of a token.
    pub experts: (usize, usize),
    /// Rows of each expert are a multiple of this.
    pub align: usize,
    /// Order of the rows that a dispatch delivers, and its backward takes; that of a combine is
    /// expert-major.
    pub layout: RowOrder,
    /// Multiprocessors that a collective or expert parallelism may take.
    pub sms: Option<usize>,
    /// Rows of `ep` are received in place (zero copy).
    pub zero_copy: bool,
    /// Equal documents that the rows of attention are packed of.
    pub documents: usize,
    /// Rows in all, columns and contraction of a rank, of what multiplies.
    pub shape: (usize, usize, usize),
    /// Timed samples.
    pub iters: usize,
    /// Untimed samples before.
    pub warmup: usize,
}

impl Options {
    /// Checks what can be checked before anything is timed.
    ///
    /// # Errors
    /// `InvalidArgument` for a size or number of zero.
    pub fn check(&self) -> Result<()> {
        let ((m, n, k), (experts, top_k)) = (self.shape, self.experts);
        let sizes = [m, n, k, self.tokens, self.hidden, experts, top_k, self.align, self.iters];
        if sizes.contains(&0) || self.bytes.contains(&0) {
            return Err(Error::invalid("sizes and iterations must be positive"));
        }
        Ok(())
    }
}

/// Operations that can be timed on devices, beside those of [`products`] and [`memory`].
const MOVES: [&str; 8] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "ep_dispatch",
    "ep_combine",
    "ep_dispatch_bwd",
    "ep_combine_bwd",
];

/// Operations that can be timed on devices.
pub fn ops() -> Vec<&'static str> {
    MOVES.into_iter().chain(products::OPS).chain(memory::OPS).collect()
}

/// The way in which an operation is timed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Collective,
    Ep,
    Product,
    /// Bound by memory.
    Memory,
}

impl Kind {
    fn of(op: &str) -> Self {
        match op {
            _ if products::OPS.contains(&op) => Kind::Product,
            _ if memory::OPS.contains(&op) => Kind::Memory,
            _ if op.starts_with("ep_") => Kind::Ep,
            _ => Kind::Collective,
        }
    }
}

/// Most replays of a sample.
const REPLAYS: usize = 10;
/// Microseconds that a sample lasts at least, if so many replays do: what a barrier in front of it
/// leaves ranks apart is a thousandth of that.
const SAMPLE_US: f64 = 10_000.0;
/// Elements of a row of a collective.
const COLS: usize = 8;

/// Heads of queries and of keys, and their width: causal attention over `m` rows.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub q: usize,
    pub kv: usize,
    pub width: usize,
}

impl Heads {
    /// On the host there are fewer and narrower ones.
    pub fn of(backend: BackendKind) -> Self {
        match backend {
            BackendKind::Host => Self { q: 8, kv: 4, width: 64 },
            _ => Self { q: 32, kv: 8, width: 128 },
        }
    }
}

/// The work of a sample: on devices a captured graph, on the host the launches themselves.
enum Way<'a> {
    Replays(GraphExec),
    Launches(&'a dyn Fn() -> Result<()>),
}

impl Way<'_> {
    fn queue(&self, stream: &Stream) -> Result<()> {
        match self {
            Way::Replays(graph) => stream.replay(graph),
            Way::Launches(queue) => queue(),
        }
    }
}

pub(crate) struct Bench<'a> {
    pub o: &'a Options,
    pub team: LiveTeam,
    pub heap: Heap,
    /// Of devices.
    os: Option<DeviceTransport>,
    pub stream: Stream,
    pub device: Device,
}

/// Collective: one row per operation and size; the same on every rank. `done` is called with each
/// as soon as it is measured.
///
/// # Errors
/// `InvalidArgument` for an unknown operation; the fault of the team.
pub fn run(
    world: &World,
    o: &Options,
    mut progress: impl FnMut(&str),
    mut done: impl FnMut(&Row),
) -> Result<Vec<Row>> {
    if let Some(bad) = o.ops.iter().find(|op| !ops().contains(&op.as_str())) {
        let names = ops().join(", ");
        return Err(Error::invalid(format!("`{bad}` is not timed on devices; one of {names}")));
    }
    let mut rows = Vec::new();
    for op in &o.ops {
        progress(op);
        let kind = Kind::of(op);
        for &bytes in if kind == Kind::Collective { &o.bytes } else { &[0][..] } {
            let team = world.everyone("bench")?;
            let heap_bytes = match kind {
                Kind::Ep => {
                    let m = EpPlan::memory(&ep::desc(o, team.size(), op));
                    m.symmetric + if o.zero_copy { m.received + m.expert_out } else { 0 }
                }
                Kind::Product => Bench::products_heap(o, team.size(), op),
                Kind::Memory => 0,
                // All-reduce has two areas of the vector's size; there are two plans.
                Kind::Collective => 4 * bytes,
            };
            let heap = team.heap(o.backend, HeapCfg::new(heap_bytes + (64 << 20)))?;
            let device = heap.device();
            let (os, stream) = match &device {
                Device::Cuda(ctx) => (Some(DeviceTransport::new(&heap)?), Stream::on(ctx)?),
                Device::Host => (None, Stream::new("bench")?),
            };
            let b = Bench { o, team, heap, os, stream, device };
            let new = match kind {
                Kind::Ep => vec![b.ep(op)?],
                Kind::Product => b.products(op)?,
                Kind::Memory => b.moved(op)?,
                Kind::Collective => vec![b.collective(op, bytes)?],
            };
            new.iter().for_each(&mut done);
            rows.extend(new);
        }
    }
    Ok(rows)
}

/// A small whole number for element `i` of rank `r`: sums of 64 are exact in bf16.
pub fn value(r: usize, i: usize) -> f32 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(r as u32 % 64 + 17);
    ((mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 61) as i64 - 4) as f32 * 0.5
}

/// Returns how many of `m` rows a collective is about: all_to_all moves equal parts, without the
/// rest.
fn sent_rows(op: &str, m: usize, size: usize) -> usize {
    if op == "all_to_all" { m / size * size } else { m }
}

/// Elements that are not what `want` says of their place, counted on several cores.
pub(super) fn count_wrong(got: &[f32], want: impl Fn(usize) -> f32 + Sync) -> u64 {
    const THREADS: usize = 8;
    let len = got.len().div_ceil(THREADS).max(1 << 16);
    let want = &want;
    std::thread::scope(|s| {
        let parts: Vec<_> = got
            .chunks(len)
            .enumerate()
            .map(|(c, part)| {
                let wrong = move || {
                    part.iter().enumerate().filter(|(i, v)| **v != want(c * len + i)).count() as u64
                };
                s.spawn(wrong)
            })
            .collect();
        // A thread that panicked has compared nothing.
        parts.into_iter().map(|t| t.join().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    })
}

impl Bench<'_> {
    fn cuda(&self) -> Result<&CudaStream> {
        self.stream.cuda()
    }

    pub fn place(&self, values: &[f32], shape: Shape) -> Result<Tensor> {
        Tensor::from_f32(values, self.o.dtype, shape)?.to(&self.device)
    }

    pub fn poisoned(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        Tensor::poisoned_on(&self.device, dtype, shape)
    }

    /// Normal numbers that repeat after a while; other ones for each `seed`.
    pub fn normal(&self, seed: u64, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
        let mut rng = Rng::new(1 + self.team.rank().idx() as u64 + (seed << 32));
        let few: Vec<f32> = (0..65_521).map(|_| rng.normal()).collect();
        let few = Tensor::from_f32(&few, dtype, Shape::d1(few.len()))?;
        let all = self.poisoned(dtype, Shape::d2(rows, cols))?;
        few.read(|few| {
            all.write(|out| {
                for part in out.chunks_mut(few.len()) {
                    part.copy_from_slice(&few[..part.len()]);
                }
            })
        })??;
        Ok(all)
    }

    pub fn random(&self, rows: usize, cols: usize) -> Result<Tensor> {
        let mut rng = Rng::new(1 + self.team.rank().idx() as u64);
        // Drawing a number takes longer than moving it: large tensors repeat four million of them.
        let drawn: Vec<f32> = (0..(rows * cols).min(1 << 22)).map(|_| rng.normal()).collect();
        let v: Vec<f32> = drawn.iter().copied().cycle().take(rows * cols).collect();
        self.place(&v, Shape::d2(rows, cols))
    }

    /// Microseconds of the slowest rank.
    pub fn time(&self, queue: impl Fn() -> Result<()>) -> Result<Time> {
        let times = self.sampled(&[self.prepared(&queue)?])?;
        times.first().copied().ok_or_else(|| Error::internal("nothing was timed"))
    }

    /// As [`Bench::time`] for each of `ways`, sampled in turn, in another order each time, so that
    /// what disturbs the machine for a while disturbs all. Then `fresh` runs, and behind it each
    /// way once more as it was timed: what lies in its results afterwards is of that run.
    pub fn in_turn(
        &self,
        ways: &[&dyn Fn() -> Result<()>],
        fresh: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Time>> {
        let ways = ways.iter().map(|way| self.prepared(way)).collect::<Result<Vec<_>>>()?;
        let times = self.sampled(&ways)?;
        fresh()?;
        self.team.exchange("align", &[])?;
        for way in &ways {
            way.queue(&self.stream)?;
        }
        self.stream.synchronize()?;
        self.team.check()?;
        Ok(times)
    }

    fn prepared<'w>(&self, queue: &'w dyn Fn() -> Result<()>) -> Result<Way<'w>> {
        if self.os.is_none() {
            return Ok(Way::Launches(queue));
        }
        self.stream.begin_capture()?;
        let queued = queue();
        let graph = self.stream.end_capture()?;
        queued?;
        Ok(Way::Replays(graph.instantiate()?))
    }

    fn sampled(&self, ways: &[Way<'_>]) -> Result<Vec<Time>> {
        let replays = ways.iter().map(|way| self.replays(way)).collect::<Result<Vec<_>>>()?;
        let mut samples = vec![Vec::with_capacity(self.o.iters); ways.len()];
        // The same on all ranks.
        let mut rng = Rng::new(1);
        let mut order: Vec<usize> = (0..ways.len()).collect();
        for i in 0..self.o.warmup.saturating_add(self.o.iters) {
            // What runs in front decides on the card's clock: each way is behind each other one
            // now and then. At first they run in their order, as one may read what another leaves.
            for left in (2..=order.len()).rev().filter(|_| i > 0) {
                order.swap(left - 1, rng.below(left as u64) as usize);
            }
            for &at in &order {
                let us = match &self.os {
                    Some(os) => self.sample_replays(os, &ways[at], replays[at])?,
                    None => self.sample_launch(&ways[at])?,
                };
                if i >= self.o.warmup {
                    samples[at].push(us);
                }
            }
        }
        let of_all = |samples| {
            let mine = Time::of(samples);
            Ok(Time { us: self.slowest(mine.us)?, spread: self.slowest(mine.spread)? })
        };
        samples.into_iter().map(of_all).collect()
    }

    fn sample_launch(&self, way: &Way<'_>) -> Result<f64> {
        self.team.exchange("align", &[])?;
        let start = Instant::now();
        way.queue(&self.stream)?;
        self.stream.synchronize()?;
        let slowest = self.slowest(start.elapsed().as_secs_f64() * 1e6)?;
        self.team.check()?;
        Ok(slowest)
    }

    /// Replays of a sample of `way`, the same on all ranks.
    fn replays(&self, way: &Way<'_>) -> Result<usize> {
        let Some(os) = &self.os else { return Ok(1) };
        // The first one of a graph is slower.
        self.sample_replays(os, way, 1)?;
        let one = self.slowest(self.sample_replays(os, way, 1)?)?;
        Ok(((SAMPLE_US / one).ceil() as usize).clamp(1, REPLAYS))
    }

    /// On this rank alone.
    fn sample_replays(&self, os: &DeviceTransport, way: &Way<'_>, replays: usize) -> Result<f64> {
        let ctx = os.here().context();
        let (start, end) = (CudaEvent::new(ctx, true)?, CudaEvent::new(ctx, true)?);
        os.barrier(self.cuda()?, 60, "barrier")?;
        tilewire::device::Queue::record(self.cuda()?, &start)?;
        for _ in 0..replays {
            way.queue(&self.stream)?;
        }
        tilewire::device::Queue::record(self.cuda()?, &end)?;
        self.stream.synchronize()?;
        self.team.check()?;
        Ok(end.us_since(&start)? / replays as f64)
    }

    fn slowest(&self, us: f64) -> Result<f64> {
        let all = self.team.exchange("time", &us.to_le_bytes())?;
        let number = |b: &Vec<u8>| b.as_slice().try_into().map_or(f64::NAN, f64::from_le_bytes);
        Ok(all.iter().map(number).fold(0.0, f64::max))
    }

    pub fn wrong(&self, mine: u64) -> Result<u64> {
        let all = self.team.exchange("wrong", &mine.to_le_bytes())?;
        let number = |b: &Vec<u8>| b.as_slice().try_into().map_or(u64::MAX, u64::from_le_bytes);
        Ok(all.iter().map(number).fold(0, u64::saturating_add))
    }

    /// The largest of all ranks.
    pub fn worst(&self, mine: f64) -> Result<f64> {
        let all = self.team.exchange("worst", &mine.to_le_bytes())?;
        let number =
            |b: &Vec<u8>| b.as_slice().try_into().map_or(f64::INFINITY, f64::from_le_bytes);
        Ok(all.iter().map(number).fold(0.0, f64::max))
    }

    pub fn row(&self, op: &str, shape: String, t: Time, wrong: u64, note: String) -> Result<Row> {
        let device = match &self.device {
            Device::Cuda(ctx) => ctx.name()?,
            Device::Host => "cpu".to_owned(),
        };
        Ok(Row {
            op: op.to_owned(),
            backend: self.o.backend.to_string(),
            device,
            dtype: self.o.dtype.to_string(),
            ranks: self.team.size(),
            shape,
            t_ours_us: Some(t.us),
            spread_us: Spreads { ours: Some(t.spread), ..Spreads::default() },
            max_err: (wrong == 0).then_some(0.0),
            wrong,
            note: Some(note),
            ..Row::default()
        })
    }

    /// Global rows of my shard, and all rows.
    fn rows(&self, bytes: usize) -> Result<(Vec<usize>, usize)> {
        let m = (bytes / (COLS * self.o.dtype.size())).max(1);
        Ok((Shards::Even.rows(m, self.team.size())?, m))
    }

    fn collective(&self, op: &str, bytes: usize) -> Result<Row> {
        let (size, me) = (self.team.size(), self.team.rank().idx());
        let (rows, m) = self.rows(bytes)?;
        let start: usize = rows[..me].iter().sum();
        let part = m / size;
        let (kind, rows_in, rows_out) = match op {
            "all_gather" => (CollectiveKind::AllGather(Shards::Even), rows[me], m),
            "reduce_scatter" => {
                (CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum), m, rows[me])
            }
            "all_reduce" => (CollectiveKind::AllReduce(ReduceOp::Sum), m, m),
            _ => (CollectiveKind::AllToAll(vec![vec![part; size]; size]), part * size, part * size),
        };
        // First rows of all ranks.
        let firsts: Vec<usize> = (0..size).map(|r| rows[..r].iter().sum()).collect();
        let want = |i: usize| -> f32 {
            let (row, col) = (i / COLS, i % COLS);
            let sum = |i: usize| (0..size).map(|r| value(r, i)).sum();
            match &kind {
                CollectiveKind::AllGather(_) => {
                    let owner = firsts.partition_point(|&f| f <= row) - 1;
                    value(owner, (row - firsts[owner]) * COLS + col)
                }
                CollectiveKind::ReduceScatter(..) => sum(start * COLS + i),
                CollectiveKind::AllReduce(_) => sum(i),
                _ => value(row / part.max(1), (me * part + row % part.max(1)) * COLS + col),
            }
        };
        let plan = CollectivePlan::new(
            CollectiveDesc { kind: kind.clone(), m, cols: COLS, dtype: self.o.dtype },
            &self.heap,
        )?;
        let plan = match self.o.sms {
            Some(n) => plan.with_num_sms(n),
            None => plan,
        };
        plan.prepare(&self.stream)?;
        let exact: Vec<f32> = (0..rows_in * COLS).map(|i| value(me, i)).collect();
        let x = self.place(&exact, Shape::d2(rows_in, COLS))?;
        let out = self.poisoned(self.o.dtype, Shape::d2(rows_out, COLS))?;
        plan.launch(&self.stream, m, &x, &out)?.wait()?;
        let bad = count_wrong(&out.to_f32()?, want);
        let x = self.random(rows_in, COLS)?;
        let t =
            self.time(|| plan.launch(&self.stream, m, &x, &out)?.join(&self.stream).map(|_| ()))?;
        let moved = sent_rows(op, m, size) * COLS * self.o.dtype.size();
        let nccl = match self.by_nccl(plan.desc().clone(), m, (&x, &out)) {
            Ok(t) => format!("{:.1} us, {:.1} GB/s bus", t.us, bandwidth(op, moved, size, t.us).1),
            Err(e) if e.is_unavailable() || e.is_unsupported() => "not here".to_owned(),
            Err(e) => return Err(e),
        };
        let (alg, bus) = bandwidth(op, moved, size, t.us);
        let note = format!("{bus:.1} GB/s bus; NCCL: {nccl}");
        let row = self.row(op, shape_text(bytes, self.o.sms), t, self.wrong(bad)?, note)?;
        Ok(Row { algbw_gbs: Some(alg), busbw_gbs: Some(bus), ..row })
    }

    /// The time of the same collective through NCCL.
    fn by_nccl(
        &self,
        desc: CollectiveDesc,
        m: usize,
        (x, out): (&Tensor, &Tensor),
    ) -> Result<Time> {
        let plan = CollectivePlan::with_backend(desc, &self.heap, CollectiveBackend::Nccl)?;
        plan.prepare(&self.stream)?;
        self.time(|| plan.launch(&self.stream, m, x, out)?.join(&self.stream).map(|_| ()))
    }
}

/// Returns what tells a row of a collective from others: on so many multiprocessors it is another.
fn shape_text(bytes: usize, sms: Option<usize>) -> String {
    let sms = sms.map_or(String::new(), |n| format!(" sms={n}"));
    format!("bytes={bytes}{sms}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the rows of `f` on one rank of the host: two timed samples, one before.
    pub fn on_host(f: impl Fn(&Bench<'_>) -> Result<Vec<Row>> + Sync) -> Vec<Row> {
        let o = Options {
            ops: Vec::new(),
            backend: BackendKind::Host,
            dtype: DType::F32,
            bytes: Vec::new(),
            tokens: 1,
            hidden: 1,
            experts: (1, 1),
            align: 1,
            layout: RowOrder::ExpertMajor,
            sms: None,
            zero_copy: false,
            documents: 1,
            shape: (1, 1, 1),
            iters: 2,
            warmup: 1,
        };
        let one = |world: World| {
            let team = world.everyone("bench")?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
            let (stream, device) = (Stream::new("bench")?, Device::Host);
            f(&Bench { o: &o, team, heap, os: None, stream, device })
        };
        World::run_threads(1, WorldCfg::for_tests(), one).unwrap().swap_remove(0)
    }

    /// Fewer rows than ranks have no parts: nothing moves.
    #[test]
    fn what_is_not_sent_is_not_counted() {
        assert_eq!((sent_rows("all_to_all", 7, 8), sent_rows("all_to_all", 17, 8)), (0, 16));
        assert_eq!((sent_rows("all_gather", 7, 8), sent_rows("all_reduce", 7, 8)), (7, 7));
    }
}
