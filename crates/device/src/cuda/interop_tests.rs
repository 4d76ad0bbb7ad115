//! Interoperation with programs around this one: their clusters, tensor maps, streams, contexts and
//! captures. Without CUDA each test checks that an error says so, with a hint; with it, every byte.

#![expect(clippy::print_stdout, reason = "a test on a GPU says that it ran, and where")]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};
use tilewire_core::{DType, Error, ErrorKind, Rank, Result};
use tilewire_testing::{Lack, did_not_run};

use super::current::Current;
use super::error::check;
use super::*;
use crate::jit::{Compiler, KernelSpec, is_whole, kernel_uses};
use crate::{Buffer, Point, Queue};

fn spec(arch: &str) -> KernelSpec {
    KernelSpec {
        name: "interop_tests.cu".into(),
        text: include_str!("interop_tests.cu").into(),
        defines: Vec::new(),
        arch: arch.into(),
    }
}

/// Device 0; none where there is no CUDA.
#[track_caller]
pub(super) fn device() -> Option<CudaContext> {
    match CudaContext::new(0) {
        Ok(ctx) => {
            println!("runs on {}", ctx.name().unwrap());
            Some(ctx)
        }
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            did_not_run(Lack::Gpu, e);
            None
        }
    }
}

/// The kernels, on a device that has their instructions and where there is a compiler.
#[track_caller]
fn module(ctx: &CudaContext) -> Option<CudaModule> {
    if ctx.sm() < 90 {
        let why = "clusters, tensor maps and early kernels are for sm_90 and newer, this is ";
        did_not_run(Lack::Sm90, why.to_owned() + &ctx.arch().unwrap());
        return None;
    }
    match ctx.module(&spec(&ctx.arch().unwrap())) {
        Ok(m) => Some(m),
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            did_not_run(Lack::Nvrtc, e);
            None
        }
    }
}

#[test]
fn the_kernels_of_these_tests_compile() {
    for arch in ["sm_90a", "sm_100a"] {
        match Nvrtc.compile(&spec(arch)) {
            Ok(c) => {
                // Nothing, if NVRTC had it in its own cache: `kernels/tests/nvrtc.rs` looks at the
                // rest.
                let uses = kernel_uses(&c.log);
                assert!(is_whole(&c.cubin));
                let cut = (0..c.cubin.len()).step_by(97).chain([c.cubin.len() - 1]);
                cut.for_each(|len| assert!(!is_whole(&c.cubin[..len]), "{len} bytes"));
                assert!(uses.iter().all(|k| k.spill_bytes == 0), "{uses:?}");
            }
            Err(e) => {
                assert!(e.is_unavailable(), "{e}");
                return did_not_run(Lack::Nvrtc, e);
            }
        }
    }
}

fn words(m: &CudaMemory) -> Vec<u32> {
    bytemuck::pod_collect_to_vec(&m.download().unwrap())
}

#[test]
fn blocks_of_a_cluster_reach_each_others_shared_memory() {
    let Some(ctx) = device() else { return };
    let Some(module) = module(&ctx) else { return };
    let (kernel, stream) = (module.kernel("test_cluster").unwrap(), CudaStream::new(&ctx).unwrap());
    for (blocks, cluster) in [(16, 8), (12, 4), (6, 2), (5, 1)] {
        let out = CudaMemory::filled(&ctx, 4 * blocks as usize, 0xa5).unwrap();
        let (addr, grid) = (out.addr(), Grid::new(blocks, 32).clusters([cluster, 1, 1]));
        // SAFETY: the kernel takes a pointer to a word for each block; `out` outlives the wait
        // below.
        unsafe { kernel.launch(&stream, grid, LaunchArgs::new().arg(&addr)).unwrap() };
        stream.synchronize_until(None).unwrap();
        let next = |b: u32| b / cluster * cluster + (b + 1) % cluster;
        let want: Vec<u32> = (0..blocks).map(|b| (1000 + next(b)) * 16 + cluster).collect();
        assert_eq!(words(&out), want, "clusters of {cluster}");
    }
    // As part of a graph.
    let out = CudaMemory::zeroed(&ctx, 4 * 4).unwrap();
    let addr = out.addr();
    stream.begin_capture().unwrap();
    let grid = Grid::new(4, 32).clusters([2, 1, 1]);
    // SAFETY: as above.
    unsafe { kernel.launch(&stream, grid, LaunchArgs::new().arg(&addr)).unwrap() };
    let graph = stream.end_capture().unwrap();
    stream.replay(&graph).unwrap();
    stream.synchronize_until(None).unwrap();
    assert_eq!(words(&out), [1001 * 16 + 2, 1000 * 16 + 2, 1003 * 16 + 2, 1002 * 16 + 2]);
    // Refused before the driver sees it, and the stream goes on.
    let bad = Grid::new(5, 32).clusters([2, 1, 1]);
    // SAFETY: as above; it is not launched.
    let e = unsafe { kernel.launch(&stream, bad, LaunchArgs::new().arg(&addr)) }.unwrap_err();
    assert!(
        e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("cluster's size"),
        "{e}"
    );
}

/// Two plans that differ in what their blocks take have the same kernel: the later one takes
/// nothing from the other.
#[test]
fn shared_memory_once_allowed_stays_so() {
    let Some(ctx) = device() else { return };
    let Some(module) = module(&ctx) else { return };
    let stream = CudaStream::new(&ctx).unwrap();
    let (first, second) =
        (module.kernel("test_cluster").unwrap(), module.kernel("test_cluster").unwrap());
    let out = CudaMemory::zeroed(&ctx, 4).unwrap();
    let (addr, grid) = (out.addr(), Grid::new(1, 32).shared(60_000));
    // SAFETY: the kernel takes a pointer to a word for each block; `out` outlives the wait below.
    let launch = || unsafe { first.launch(&stream, grid, LaunchArgs::new().arg(&addr)) };
    assert!(launch().is_err(), "this much must be asked for");
    first.allow_shared(60_000).unwrap();
    launch().unwrap();
    second.allow_shared(1000).unwrap();
    launch().unwrap();
    stream.synchronize_until(None).unwrap();
    let e = first.allow_shared(1 << 20).unwrap_err();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
}

/// A kernel that begins while the one before it ends has all that it wrote, queued and in a graph.
#[test]
fn an_early_kernel_waits_for_what_the_one_before_it_writes() {
    let Some(ctx) = device() else { return };
    let Some(module) = module(&ctx) else { return };
    let (write, read) =
        (module.kernel("test_early_write").unwrap(), module.kernel("test_early_read").unwrap());
    let stream = CudaStream::new(&ctx).unwrap();
    const BLOCKS: u32 = 32;
    let (words_out, seen) = (4 * BLOCKS as usize, 8 * BLOCKS as usize);
    let (from, to) =
        (CudaMemory::zeroed(&ctx, words_out).unwrap(), CudaMemory::zeroed(&ctx, seen).unwrap());
    let (grid, early) = (Grid::new(BLOCKS, 32), Grid::new(BLOCKS, 32).early());
    let queue = |value: &CudaMemory| {
        let (value, from, to) = (value.addr(), from.addr(), to.addr());
        // SAFETY: (const u32*, u32*), then (const u32*, u32*, u32); the memory outlives the waits
        // below.
        unsafe {
            write.launch(&stream, grid, LaunchArgs::new().arg(&value).arg(&from)).unwrap();
            read.launch(&stream, early, LaunchArgs::new().arg(&from).arg(&to).arg(&BLOCKS))
                .unwrap();
        }
    };
    // Behind what is no kernel, and behind a join of two streams, there is nothing to begin early
    // behind.
    let other = CudaStream::new(&ctx).unwrap();
    let (word, fork, join) = (
        CudaMemory::zeroed(&ctx, words_out).unwrap(),
        CudaEvent::new(&ctx, false).unwrap(),
        CudaEvent::new(&ctx, false).unwrap(),
    );
    let behind_others = |value: &CudaMemory, joined: bool| {
        let (value, filled, to) = (value.addr(), word.addr(), to.addr());
        stream.record(&fork).unwrap();
        other.wait(&fork).unwrap();
        // SAFETY: as above.
        unsafe {
            if joined {
                let args = LaunchArgs::new().arg(&value).arg(&filled);
                write.launch(&other, grid, args).unwrap();
            }
            other.record(&join).unwrap();
            if !joined {
                stream.fill_memory(&word, 7).unwrap();
            }
            stream.wait(&join).unwrap();
            read.launch(&stream, early, LaunchArgs::new().arg(&filled).arg(&to).arg(&BLOCKS))
                .unwrap();
        }
    };
    let (value, mut began) = (CudaMemory::zeroed(&ctx, 4).unwrap(), 0);
    for joined in [false, true] {
        stream.begin_capture().unwrap();
        behind_others(&value, joined);
        let graph = stream.end_capture().unwrap();
        for round in 1..40u32 {
            stream.fill_memory(&value, 100 + round as u8).unwrap();
            stream.fill_memory(&word, 0).unwrap();
            match round % 2 {
                0 => behind_others(&value, joined),
                _ => stream.replay(&graph).unwrap(),
            }
            stream.synchronize_until(None).unwrap();
            let want = 0x0101_0101 * if joined { 100 + round } else { 7 };
            let rows: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(&to.download().unwrap());
            assert!(rows.iter().all(|r| r[0] == want), "joined {joined}, {round}: {rows:?}");
        }
    }
    stream.begin_capture().unwrap();
    queue(&value);
    let graph = stream.end_capture().unwrap();
    for round in 1..200u32 {
        stream.fill_memory(&value, round as u8).unwrap();
        let round = round * 0x0101_0101;
        match round % 2 {
            0 => queue(&value),
            _ => stream.replay(&graph).unwrap(),
        }
        stream.synchronize_until(None).unwrap();
        // The word that another block wrote, and whether this block had begun before it was
        // written.
        let rows: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(&to.download().unwrap());
        assert!(rows.iter().all(|r| r[0] == round), "round {round}: {rows:?}");
        began += rows.iter().filter(|r| r[1] != round).count();
    }
    assert!(began > 0, "no block began early");
}

/// A matrix of bf16 patterns whose rows are `pitch` apart, in tiles that reach over its edges.
#[test]
fn tiles_go_where_the_tensor_map_says() {
    let Some(ctx) = device() else { return };
    let Some(module) = module(&ctx) else { return };
    let (kernel, stream) = (module.kernel("test_tile").unwrap(), CudaStream::new(&ctx).unwrap());
    // A row is 200 bytes of 224: a store writes pieces of 16 bytes, so that 8 behind it are
    // nobody's.
    let (rows, cols, pitch, store) = (70, 100, 224, 208);
    let tensor: Vec<u8> = (0..rows * pitch).map(|i| (i * 31 + i / 251) as u8 | 1).collect();
    for (swizzle, tile) in [
        (MapSwizzle::None, [16, 40]),
        (MapSwizzle::B32, [32, 16]),
        (MapSwizzle::B64, [24, 32]),
        (MapSwizzle::B128, [32, 64]),
    ] {
        let desc = TensorMapDesc {
            strides_bytes: [pitch].into(),
            swizzle,
            ..TensorMapDesc::matrix(DType::BF16, [rows, cols], tile)
        };
        let (source, copy) = (
            CudaMemory::from_bytes(&ctx, &tensor).unwrap(),
            CudaMemory::filled(&ctx, rows * pitch, 0xa5).unwrap(),
        );
        let maps = [&source, &copy].map(|m| TensorMap::new(m, &desc).unwrap());
        assert!(maps[0].memory().same(&source) && *maps[1].desc() == desc);
        let (width, bytes) = (2 * tile[1], 2 * tile[0] * tile[1]);
        let (y, x) = (rows.div_ceil(tile[0]), cols.div_ceil(tile[1]));
        let seen = CudaMemory::filled(&ctx, x * y * bytes, 0xa5).unwrap();
        let grid =
            Grid { blocks: [x as u32, y as u32, 1], ..Grid::new(1, 64).shared(bytes as u32) };
        let (at, r, c, num) = (seen.addr(), tile[0] as u32, tile[1] as u32, bytes as u32);
        let args = LaunchArgs::new().map(&maps[0]).map(&maps[1]).arg(&at).arg(&r).arg(&c).arg(&num);
        // SAFETY: the kernel takes two maps, a pointer to `bytes` for each block and three numbers;
        // all lives until the wait below.
        unsafe { kernel.launch(&stream, grid, args).unwrap() };
        stream.synchronize_until(None).unwrap();
        // The tensor's own columns are copied; what lies between them is not touched.
        let got = copy.download().unwrap();
        for i in 0..rows * pitch {
            let want = match i % pitch {
                at if at < 2 * cols => tensor[i],
                at if at < store => continue,
                _ => 0xa5,
            };
            assert_eq!(got[i], want, "{swizzle:?}: byte {i} of the copy");
        }
        // 16 bytes each, moved by the number of the 128 bytes that they lie in, as far as the
        // swizzle reaches.
        let mask = match swizzle {
            MapSwizzle::None => 0,
            MapSwizzle::B32 => 1,
            MapSwizzle::B64 => 3,
            MapSwizzle::B128 => 7,
        };
        let got = seen.download().unwrap();
        for (block, tile_bytes) in got.chunks_exact(bytes).enumerate() {
            for i in 0..bytes {
                let (row, col) = (block / x * tile[0] + i / width, block % x * width + i % width);
                let inside = row < rows && col < 2 * cols;
                let want = if inside { tensor[row * pitch + col] } else { 0 };
                let lies = i ^ (i >> 7 & mask) << 4;
                assert_eq!(tile_bytes[lies], want, "{swizzle:?}: byte {i} of tile {block}");
            }
        }
    }
    let m = CudaMemory::zeroed(&ctx, 4096).unwrap();
    let desc = TensorMapDesc::matrix(DType::F32, [8, 16], [8, 16]);
    let e = TensorMap::new(&m.slice(4, 4000).unwrap(), &desc).err().unwrap();
    assert!(
        e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("multiple of 16"),
        "{e}"
    );
}

/// A stream of somebody else's.
pub(super) struct Theirs(pub sys::CUstream, CudaContext);

impl Theirs {
    pub fn new(ctx: &CudaContext) -> Self {
        let _current = ctx.bind().unwrap();
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current, the output is valid; 1 is the flag of a stream that does
        // not wait for the legacy one.
        check(unsafe { sys::cuStreamCreate(&mut raw, 1) }, "cuStreamCreate").unwrap();
        Self(raw, ctx.clone())
    }

    pub fn borrow(&self) -> CudaStream {
        // SAFETY: destroyed below, after what borrows it.
        unsafe { CudaStream::borrow(&self.1, self.0.cast()) }.unwrap()
    }

    fn query(&self) -> CUresult {
        let _current = self.1.bind().unwrap();
        // SAFETY: a live stream.
        unsafe { sys::cuStreamQuery(self.0) }
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        let _current = self.1.bind().unwrap();
        // SAFETY: made by us, destroyed once.
        check(unsafe { sys::cuStreamDestroy_v2(self.0) }, "cuStreamDestroy").unwrap();
    }
}

#[test]
fn a_borrowed_stream_is_used_and_left_alone() {
    let Some(ctx) = device() else { return };
    let theirs = Theirs::new(&ctx);
    let (m, weak) = (CudaMemory::zeroed(&ctx, 1 << 20).unwrap(), {
        let (thing, stream) = (Arc::new(7u8), theirs.borrow());
        let weak = Arc::downgrade(&thing);
        stream.hold(|| thing);
        weak
    });
    let stream = theirs.borrow();
    stream.fill_memory(&m, 0x5a).unwrap();
    let (own, e) = (CudaStream::new(&ctx).unwrap(), stream.event().unwrap());
    stream.record(&e).unwrap();
    own.wait(&e).unwrap();
    let copy = CudaMemory::zeroed(&ctx, 1 << 20).unwrap();
    own.copy_memory(&copy, &m).unwrap();
    own.synchronize_until(None).unwrap();
    assert!(copy.download().unwrap().iter().all(|b| *b == 0x5a));
    assert!(!stream.is_capturing() && e.is_done());
    drop(stream);
    // Still there; what was held for it is not, once its work is done.
    assert!(gone(&weak, &ctx));
    assert_eq!(theirs.query(), CUresult::CUDA_SUCCESS);
    let again = theirs.borrow();
    again.fill_memory(&m, 1).unwrap();
    again.synchronize_until(None).unwrap();
    assert_eq!(m.download().unwrap()[77], 1);
    // The legacy stream is a stream, too.
    // SAFETY: it lives as long as the context.
    let legacy = unsafe { CudaStream::borrow(&ctx, std::ptr::null_mut()) }.unwrap();
    legacy.fill_memory(&m, 2).unwrap();
    legacy.synchronize_until(None).unwrap();
    assert_eq!(m.download().unwrap()[99], 2);
    // SAFETY: refused before it is used.
    let e = unsafe { CudaStream::borrow(&ctx, std::ptr::without_provenance_mut(2)) }.err().unwrap();
    assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
    if device_count().unwrap() > 1 {
        let other = CudaContext::new(1).unwrap();
        // SAFETY: a live stream, of the other device.
        let e = unsafe { CudaStream::borrow(&other, theirs.0.cast()) }.err().unwrap();
        assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
    }
}

pub(super) fn current() -> sys::CUcontext {
    let mut now = std::ptr::null_mut();
    // SAFETY: the driver is initialised; valid output.
    check(unsafe { sys::cuCtxGetCurrent(&mut now) }, "cuCtxGetCurrent").unwrap();
    now
}

/// Everything that a launch, a plan and a heap do with a context.
fn use_device(ctx: &CudaContext) -> Result<()> {
    let stream = CudaStream::new(ctx)?;
    let (a, b) = (CudaMemory::zeroed(ctx, 4096)?, CudaMemory::from_bytes(ctx, &[7; 4096])?);
    let pinned = Pinned::zeroed(ctx, 4)?;
    assert_ne!(pinned.addr(), 0);
    stream.begin_capture()?;
    stream.copy_memory(&a, &b)?;
    let graph = stream.end_capture()?;
    stream.replay(&graph)?;
    let e = stream.event()?;
    stream.record(&e)?;
    stream.wait(&e)?;
    e.synchronize(None)?;
    assert!(e.is_done() && a.download()?.iter().all(|x| *x == 7));
    let chunk = VmmChunk::create(ctx, granularity(ctx)?, ShareBy::Fd)?;
    let range = VmmRange::map(ctx, &[&chunk], chunk.len_bytes())?;
    range.zero(Rank::new(0))?;
    drop((range, chunk));
    if let Some(module) = module(ctx) {
        let (kernel, addr) = (module.kernel("test_cluster")?, a.addr());
        let grid = Grid::new(4, 32).clusters([2, 1, 1]);
        // SAFETY: the kernel takes a pointer to a word for each block; `a` outlives the wait below.
        unsafe { kernel.launch(&stream, grid, LaunchArgs::new().arg(&addr))? };
        TensorMap::new(&a, &TensorMapDesc::matrix(DType::F32, [8, 16], [8, 16]))?;
    }
    stream.synchronize_until(None)?;
    ctx.memory_info()?;
    ctx.synchronize()
}

#[test]
fn the_callers_context_stays_current() {
    let Some(ctx) = device() else { return };
    // Nothing is current on a new thread, and nothing is then.
    assert!(current().is_null());
    use_device(&ctx).unwrap();
    assert!(current().is_null());
    // An error does not leave it behind, either.
    CudaMemory::zeroed(&ctx, usize::MAX / 2).unwrap_err();
    assert!(current().is_null());
    // The caller's is another one: of another device, or of its own.
    let other = match device_count().unwrap() {
        1 => None,
        _ => Some(CudaContext::new(1).unwrap()),
    };
    let outer: Option<Current> = other.as_ref().map(|o| o.bind().unwrap());
    if let Some(other) = &other {
        use_device(&ctx).unwrap();
        assert_eq!(current(), other.raw());
        use_device(other).unwrap();
        assert_eq!(current(), other.raw());
    }
    drop(outer);
    assert!(current().is_null());
    let num = 100_000;
    let start = Instant::now();
    (0..num).for_each(|_| drop(ctx.bind().unwrap()));
    let ns = start.elapsed().as_nanos() / num;
    println!("a context made current and taken away again: {ns} ns");
    assert!(ns < 5000, "{ns} ns for each call of the driver");
}

/// The driver ends what its graphs refer to on a thread of its own.
pub(super) fn gone<T>(weak: &Weak<T>, ctx: &CudaContext) -> bool {
    let start = Instant::now();
    while weak.upgrade().is_some() && start.elapsed() < Duration::from_secs(5) {
        ctx.free_retired();
        std::thread::sleep(Duration::from_millis(1));
    }
    weak.upgrade().is_none()
}

/// Work of ours in a capture that somebody else has begun: part of that graph, which keeps what it
/// refers to. As PyTorch captures by default, as this crate does, and as who cares
/// for nothing.
const MODES: [sys::CUstreamCaptureMode; 3] = [
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
];

#[test]
fn what_waits_for_the_device_waits_and_leaves_captures_alone() {
    let Some(ctx) = device() else { return };
    let stream = CudaStream::new(&ctx).unwrap();
    let large = CudaMemory::zeroed(&ctx, 1 << 28).unwrap();
    // 25 GB take 5 ms or more.
    let busy = || {
        (0..100).for_each(|_| stream.fill_memory(&large, 1).unwrap());
        let end = stream.event().unwrap();
        stream.record(&end).unwrap();
        end
    };
    // Other tests may hold up what queues until the device is idle.
    let end = (0..100).map(|_| busy()).find(|end| !end.is_done()).expect("work takes its time");
    ctx.synchronize().unwrap();
    assert!(end.is_done(), "a stream that does not wait for the legacy one was waited for");
    let theirs = Theirs::new(&ctx);
    let out = CudaMemory::zeroed(&ctx, 64).unwrap();
    // What this crate does elsewhere meanwhile, on this thread and on another one.
    let meanwhile = || {
        let end = busy();
        let _done = end.is_done();
        end.synchronize(None).unwrap();
        drop(CudaMemory::zeroed(&ctx, 1 << 20).unwrap());
        drop(CudaStream::new(&ctx).unwrap());
        ctx.synchronize().unwrap();
    };
    for mode in MODES {
        let borrowed = theirs.borrow();
        {
            let _current = ctx.bind().unwrap();
            // SAFETY: a live stream.
            check(unsafe { sys::cuStreamBeginCapture_v2(theirs.0, mode) }, "begin").unwrap();
        }
        borrowed.fill_memory(&out, 1).unwrap();
        std::thread::scope(|s| s.spawn(meanwhile).join().unwrap());
        meanwhile();
        borrowed.fill_memory(&out, 2).unwrap();
        let mut graph = std::ptr::null_mut();
        // SAFETY: valid output; destroyed once.
        unsafe {
            check(sys::cuStreamEndCapture(theirs.0, &mut graph), "end").unwrap();
            check(sys::cuGraphDestroy(graph), "destroy").unwrap();
        }
    }
    assert_eq!(out.download().unwrap()[5], 0, "captured, not run");
}

#[test]
fn a_capture_begun_elsewhere_takes_our_work() {
    let Some(ctx) = device() else { return };
    let (theirs, side) = (Theirs::new(&ctx), CudaStream::new(&ctx).unwrap());
    let stream = theirs.borrow();
    let (from, out) =
        (CudaMemory::filled(&ctx, 4096, 9).unwrap(), CudaMemory::zeroed(&ctx, 4096).unwrap());
    let (fork, join) = (stream.event().unwrap(), stream.event().unwrap());
    for mode in MODES {
        let held = Arc::new(from.clone());
        let weak = Arc::downgrade(&held);
        out.upload(&[0; 4096]).unwrap();
        let _current = ctx.bind().unwrap();
        // SAFETY: a live stream.
        check(unsafe { sys::cuStreamBeginCapture_v2(theirs.0, mode) }, "begin").unwrap();
        assert!(stream.is_capturing() && !side.is_capturing() && !stream.same_capture(&side));
        // As the lanes of a launch: forked, and joined.
        stream.record(&fork).unwrap();
        side.wait(&fork).unwrap();
        assert!(side.is_capturing() && stream.same_capture(&side));
        side.hold(|| held);
        side.copy_memory(&out, &from).unwrap();
        side.record(&join).unwrap();
        stream.wait(&join).unwrap();
        assert!(join.synchronize(None).is_err() && stream.begin_capture().is_err());
        // It is not ours to end, and goes on.
        let e: Error = stream.end_capture().err().unwrap();
        assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: valid outputs; the graph is destroyed once, what was made of it below.
        unsafe {
            check(sys::cuStreamEndCapture(theirs.0, &mut graph), "end").unwrap();
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "instantiate").unwrap();
            check(sys::cuGraphDestroy(graph), "destroy").unwrap();
        }
        assert!(!stream.is_capturing() && !side.is_capturing() && stream.same_capture(&side));
        assert_eq!(out.download().unwrap()[5], 0, "nothing ran yet");
        for value in [9, 10] {
            from.upload(&[value; 4096]).unwrap();
            // SAFETY: both are alive.
            check(unsafe { sys::cuGraphLaunch(exec, theirs.0) }, "launch").unwrap();
            stream.synchronize_until(None).unwrap();
            assert!(out.download().unwrap().iter().all(|b| *b == value));
        }
        assert!(weak.upgrade().is_some(), "the graph keeps it");
        // SAFETY: instantiated above, destroyed once.
        check(unsafe { sys::cuGraphExecDestroy(exec) }, "destroy").unwrap();
        assert!(gone(&weak, &ctx), "and lets it go with its last user");
    }
    // A stream that ends in the middle of their capture leaves the capture valid.
    let _current = ctx.bind().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a live stream.
    check(unsafe { sys::cuStreamBeginCapture_v2(theirs.0, mode) }, "begin").unwrap();
    let again = theirs.borrow();
    again.copy_memory(&out, &from).unwrap();
    drop((again, stream));
    let mut graph = std::ptr::null_mut();
    // SAFETY: valid output; destroyed once.
    unsafe {
        check(sys::cuStreamEndCapture(theirs.0, &mut graph), "end").unwrap();
        assert!(!graph.is_null());
        check(sys::cuGraphDestroy(graph), "destroy").unwrap();
    }
}
