//! The launch of an operation neither allocates nor loads code nor waits for the device: what it
//! asks of the driver is counted by the preloaded library of the GPU bundle. Operations of one rank
//! are counted by their own tests, with every replay.
#![expect(clippy::print_stdout, reason = "what was counted must be seen")]

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaStream};
use tilewire_device::{Device, Stream, Tensor};
use tilewire_symm::{World, WorldCfg};
use tilewire_testing::{Lack, did_not_run};

use crate::team_ops::{M, Op, asked, by_nccl, by_puts, heap, ranks_watched, waiting};
use crate::{DEVICES, begins, calls};

#[test]
fn launches_neither_allocate_nor_wait() {
    let Some(n) = ranks_watched() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    let found = World::run_threads(n, cfg, |world| {
        let mut found = BTreeMap::new();
        for (i, make) in asked(&[by_puts(), by_nccl()].concat()) {
            let (heap, stream) = heap(&world, "calls")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            op.refill(3)?;
            op.poison()?;
            let before = op.bits()?;
            heap.team().agree(true)?;
            let mut result: Result<()> = Ok(());
            for _ in 0..2 {
                // Then what a library has to tidy up after its first launches is done, too.
                result = result.and((0..3).try_for_each(|_| (op.launch)(&stream)));
                stream.synchronize()?;
            }
            let mut launches: Vec<_> = (0..4)
                .map(|_| calls::of(|| result = result.clone().and_then(|()| (op.launch)(&stream))))
                .collect();
            launches.sort_by_key(Vec::len);
            // NCCL frees what earlier launches have left now and then: not in each of four.
            let judged =
                if i < by_puts().len() { launches.pop() } else { launches.into_iter().next() };
            if let Some(seen) = judged.filter(|seen| !seen.is_empty()) {
                found.insert((i, op.name), seen);
            }
            stream.synchronize()?;
            result.and(heap.team().check())?;
            assert!(op.bits()? != before, "{}: nothing ran", op.name);
            // Blind, it would find nothing, either.
            let own = heap.device();
            let (t, m) = (Tensor::zeros(DType::F32, Shape::d1(M)), &mut None);
            let seen = calls::of(|| *m = t.to(&own).ok());
            assert!(
                seen.iter().any(|c| c.starts_with("cuMemAlloc")),
                "nothing is counted: {seen:?}"
            );
        }
        Ok(found)
    });
    for (rank, found) in found.unwrap().iter().enumerate() {
        assert!(found.is_empty(), "calls of the launches of rank {rank}: {found:#?}");
    }
}

/// Calls that a launch and its wait may make beside their work, also with the borrow of the stream:
/// an operation of many chunks has more than 40 pieces of work alone, all others make at most 40
/// calls in all.
const MOST_BESIDE: usize = 20;

/// Work with the tensor maps that it takes, and the order between streams. All else is bookkeeping.
fn is_work(call: &str) -> bool {
    let kinds = [
        "cuLaunchKernel",
        "cuTensorMapEncodeTiled",
        "cuMemcpy",
        "cuMemset",
        "cuStreamWaitEvent",
        "cuEventRecord",
    ];
    kinds.iter().any(|k| call.starts_with(k))
}

/// Calls of one launch and its wait, and how many of them are work.
struct Count {
    what: String,
    all: usize,
    work: usize,
    calls: BTreeMap<String, usize>,
}

impl Count {
    fn new(what: String, list: Vec<String>) -> Self {
        let (all, work) = (list.len(), list.iter().filter(|c| is_work(c)).count());
        let mut calls = BTreeMap::new();
        list.into_iter().for_each(|c| *calls.entry(c).or_default() += 1);
        Self { what, all, work, calls }
    }

    fn is_too_many(&self) -> bool {
        self.all - self.work > MOST_BESIDE
    }
}

/// The legacy stream of the device, as a framework's code gives it for each call.
fn borrowed(ctx: &CudaContext) -> Result<Stream> {
    // SAFETY: null is the legacy stream, which lives as long as the context.
    Ok(Stream::Cuda(unsafe { CudaStream::borrow(ctx, std::ptr::null_mut()) }?))
}

/// Each launch of `op` and its wait, on the streams that `stream` gives.
fn count(op: &Op, at: &str, stream: impl Fn() -> Result<Stream>) -> Result<Vec<Count>> {
    let launch = || waiting(|| (op.launch)(&stream()?));
    (0..3).try_for_each(|_| launch())?;
    let mut result = Ok(());
    let all = calls::noted(".all", || result = launch());
    result?;
    assert!(all.iter().any(|c| c.starts_with("cuLaunchKernel")), "blind: {all:?}");
    let Some((steps, go)) = &op.steps else {
        return Ok(vec![Count::new(format!("{} {at}", op.name), all)]);
    };
    // Several launches, each with its wait, on a stream that is borrowed once.
    let mut found = Vec::new();
    let mut before = Vec::new();
    for n in 1..=*steps {
        let mut result = Ok(());
        let mut list =
            calls::noted(".all", || result = stream().and_then(|s| waiting(|| go(&s, n))));
        result?;
        let so_far = list.clone();
        for c in &before {
            list.iter().position(|l| l == c).map(|i| list.swap_remove(i));
        }
        before = so_far;
        found.push(Count::new(format!("{} step {n} {at}", op.name), list));
    }
    Ok(found)
}

/// On the idle driver, which notes all of its calls.
#[test]
fn a_launch_and_its_wait_call_the_driver_rarely() {
    let Some(n) = ranks_watched() else { return };
    if std::env::var_os("TW_COUNTS").is_none() {
        return did_not_run(Lack::Watch, "it needs the idle driver, which notes all calls");
    }
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    let found = World::run_threads(n, cfg, |world| {
        let mut found = Vec::new();
        for (i, make) in asked(by_puts()) {
            let (heap, stream) = heap(&world, "counts")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
            found.extend(count(&op, "own", || Ok(stream.clone()))?);
            found.extend(count(&op, "borrowed", || borrowed(&ctx))?);
        }
        Ok(found)
    });
    let found = found.unwrap();
    for c in &found[0] {
        println!("{}: {} calls, {} beside work", c.what, c.all, c.all - c.work);
    }
    let bad: Vec<_> = found.iter().flatten().filter(|c| c.is_too_many()).collect();
    for c in &bad {
        println!(
            "TOO MANY {}: {} calls, {} beside work: {:?}",
            c.what,
            c.all,
            c.all - c.work,
            c.calls
        );
    }
    assert!(bad.is_empty(), "{} launches ask the driver too much", bad.len());
}
