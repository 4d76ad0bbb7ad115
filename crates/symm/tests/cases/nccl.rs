//! What the backend `nccl` has beside the others: a communicator of the caller's, and NCCL's own
//! puts.

use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Result};
use tilewire_device::Queue;
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaStream, NcclComm, NcclId, NcclOp, NcclSum, device_count,
};
use tilewire_symm::*;

use super::{KIB, Nccl, Setup, pattern, setup};

/// Elements that a rank adds, and what they are.
const COUNT: usize = 1000;

fn share(r: Rank) -> f32 {
    1.0 + r.get() as f32
}

/// Whether calls on a communicator wait until the library has done what they ask: NCCL's default.
#[derive(Clone, Copy)]
enum Calls {
    Wait,
    Return,
}

/// As a program makes one that knows nothing of this library.
fn of_the_caller(world: &World, calls: Calls) -> Result<(CudaContext, u64)> {
    let team = world.everyone("caller")?;
    let (me, n) = (world.rank(), world.size());
    let ctx = CudaContext::new(me.get() % device_count()?)?;
    let mine = if me.get() == 0 { NcclComm::unique_id()?.0.to_vec() } else { Vec::new() };
    let all = team.exchange("id", &mine)?;
    let id = NcclId(all[0].as_slice().try_into().unwrap());
    let raw = match calls {
        Calls::Wait => joined(&ctx, id, (me.get(), n))?,
        Calls::Return => {
            let comm = NcclComm::join(&ctx, id, (me.get(), n))?;
            ready(&comm)?;
            comm.release().unwrap()
        }
    };
    Ok((ctx, raw))
}

/// By `ncclCommInitRank`, which this library does not use.
fn joined(ctx: &CudaContext, id: NcclId, (me, n): (u32, usize)) -> Result<u64> {
    use std::ffi::{c_int, c_void};
    #[repr(C)]
    struct Id([u8; 128]);
    type Init = unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int) -> c_int;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
    let (mut cuda_ctx, mut raw) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: both libraries are in use; the signatures are those of cuda.h and nccl.h, and the
    // outputs valid. The primary context is kept by `ctx`, too.
    unsafe {
        let cuda = libloading::Library::new("libcuda.so.1").unwrap();
        let nccl = libloading::Library::new(NcclComm::library()?.1.path).unwrap();
        let retain = cuda.get::<Retain>(b"cuDevicePrimaryCtxRetain").unwrap();
        let set_current = cuda.get::<SetCurrent>(b"cuCtxSetCurrent").unwrap();
        let init = nccl.get::<Init>(b"ncclCommInitRank").unwrap();
        assert_eq!(retain(&mut cuda_ctx, ctx.ordinal() as c_int), 0);
        assert_eq!(set_current(cuda_ctx), 0);
        let code = init(&mut raw, n as c_int, Id(id.0), me as c_int);
        assert_eq!((code, set_current(std::ptr::null_mut())), (0, 0));
    }
    Ok(raw as u64)
}

fn ready(comm: &NcclComm) -> Result<()> {
    let start = Instant::now();
    while !comm.is_ready()? {
        assert!(start.elapsed() < Duration::from_secs(30), "NCCL does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The sum over all ranks, by a heap's NCCL or by a communicator itself.
fn adds(
    (ctx, stream): (&CudaContext, &CudaStream),
    n: usize,
    me: Rank,
    queue: impl FnOnce(&[NcclOp]) -> Result<()>,
) -> Result<()> {
    let src = CudaMemory::from_bytes(ctx, bytemuck::cast_slice(&[share(me); COUNT]))?;
    let dst = CudaMemory::from_bytes(ctx, &[DType::POISON; 4 * COUNT])?;
    queue(&[NcclOp::AllReduce { src: src.addr(), dst: dst.addr(), count: COUNT }])?;
    stream.synchronize_until(None)?;
    let mut got = vec![0f32; COUNT];
    bytemuck::cast_slice_mut(&mut got).copy_from_slice(&download(&dst)?);
    let want: f32 = Rank::all(n).map(share).sum();
    assert!(got.iter().all(|g| *g == want), "{want}: {:?}", &got[..4]);
    Ok(())
}

fn download(m: &CudaMemory) -> Result<Vec<u8>> {
    use tilewire_device::Buffer;
    m.download()
}

fn by_heap(s: &Setup<Nccl>) -> Result<()> {
    let nccl = s.heap.nccl()?;
    let (n, me) = (s.team.size(), s.team.rank());
    // SAFETY: memory that lives until the work has run, which `adds` waits for; all ranks do this.
    adds((s.os.here().context(), &s.stream), n, me, |ops| unsafe {
        nccl.queue(&s.stream, (DType::F32, NcclSum::Sum), ops)
    })
}

/// A communicator of the caller's is used, given back alive, and revoked by the fault of a team
/// only.
pub fn adopted(world: World) -> Result<()> {
    adopted_with(&world, Calls::Return)
}

/// The same of one whose calls wait, as NCCL makes them unless it is told otherwise.
pub fn adopted_waiting(world: World) -> Result<()> {
    adopted_with(&world, Calls::Wait)
}

fn adopted_with(world: &World, calls: Calls) -> Result<()> {
    let (ctx, raw) = of_the_caller(world, calls)?;
    let (me, n) = (world.rank(), world.size());
    // SAFETY: null is refused.
    let e = unsafe { NcclComm::adopt(&ctx, 0) }.err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert_eq!(world.return_nccl()?, None);

    // Not of all ranks. SAFETY: the communicator lives until the end of this test, and one thread
    // of each rank uses it.
    let adopt = || unsafe { NcclComm::adopt(&ctx, raw) };
    if me.get() == 0 {
        world.adopt_nccl(adopt()?)?;
    }
    let half = world.everyone("half")?;
    let e = half.heap(BackendKind::Nccl, HeapCfg::new(64 * KIB)).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
    if me.get() != 0 {
        world.adopt_nccl(adopt()?)?;
    }
    let again = adopt()?;
    assert_eq!((again.me(), again.is_adopted()), ((me.get(), n), true));
    assert_eq!(world.adopt_nccl(again).unwrap_err().kind(), ErrorKind::InvalidArgument);

    let s = setup::<Nccl>(world, 64 * KIB)?;
    by_heap(&s)?;
    let e = world.return_nccl().unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument && e.get_hint().is_some(), "{e}");
    s.team.agree(true)?;
    drop(s);
    let back = world.return_nccl()?;
    assert_eq!(back, Some(ReturnedNccl::Live(raw)));

    // It is as it was.
    let comm = adopt()?;
    let stream = CudaStream::new(&ctx)?;
    let queue = |ops: &[NcclOp]| {
        // SAFETY: as in `by_heap`.
        unsafe { comm.queue(&stream, (DType::F32, NcclSum::Sum), ops) }?;
        ready(&comm)
    };
    adds((&ctx, &stream), n, me, queue)?;

    // A sum that the last rank never joins ends with the team, and the communicator is over.
    world.adopt_nccl(comm.clone())?;
    let s = setup::<Nccl>(world, 64 * KIB)?;
    by_heap(&s)?;
    s.team.agree(true)?;
    let start = Instant::now();
    if me.idx() + 1 < n {
        let m = CudaMemory::from_bytes(&ctx, &[0; 4 * COUNT])?;
        let op = NcclOp::AllReduce { src: m.addr(), dst: m.addr(), count: COUNT };
        // A second one waits behind the first.
        for _ in 0..2 {
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { s.heap.nccl()?.queue(&s.stream, (DType::F32, NcclSum::Sum), &[op]) }?;
        }
        if me.get() == 0 {
            std::thread::sleep(Duration::from_millis(200));
            s.team.abort("test");
        }
        s.stream.synchronize_until(None)?;
    }
    while !comm.is_over() {
        assert!(start.elapsed() < Duration::from_secs(10), "nobody ended it");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(s.team.check().unwrap_err().kind(), ErrorKind::Aborted);
    // SAFETY: nothing is queued.
    let e = unsafe { comm.queue(&stream, (DType::F32, NcclSum::Sum), &[]) }.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Aborted);
    drop((s, comm));
    // A library without `ncclCommRevoke` has freed it.
    let back = world.return_nccl()?;
    assert!(matches!(back, None | Some(ReturnedNccl::Revoked(_))), "{back:?}");
    // Whoever comes next has one of its own.
    let s = setup::<Nccl>(world, 64 * KIB)?;
    by_heap(&s)?;
    s.team.agree(true).map(drop)
}

/// Puts and signals of NCCL's, from 2.29 on; before, each says so.
pub fn host_puts(world: World) -> Result<()> {
    const LEN: usize = 16 * KIB;
    let s = setup::<Nccl>(&world, 64 * KIB)?;
    let nccl = s.heap.nccl()?;
    let (n, me) = (s.team.size(), s.team.rank());
    let at = |by: usize| Rank::new(((me.idx() + by) % n) as u32);
    let (next, before) = (at(1), at(n - 1));
    let queue = |ops: &[NcclOp]| {
        // SAFETY: addresses are of the heap, which lives until the stream has been waited for.
        unsafe { nccl.queue(&s.stream, (DType::F32, NcclSum::Sum), ops) }
    };
    let version: Vec<u32> =
        NcclComm::library()?.0.split('.').map(|w| w.parse().unwrap_or(0)).collect();
    if (version[0], version[1]) < (2, 29) {
        let e = queue(&[NcclOp::Signal { peer: next.get() }]).unwrap_err();
        assert!(e.kind() == ErrorKind::Unsupported && e.get_hint().is_some(), "{e}");
        return s.team.agree(true).map(drop);
    }
    let window = s.heap.nccl_window().unwrap();
    for round in 0..3u64 {
        let sent = pattern(100 * round + u64::from(me.get()), LEN);
        let want = pattern(100 * round + u64::from(before.get()), LEN);
        // From the first part of my chunk to the second one of the next rank's.
        let mine = s.buffer(&[sent, vec![DType::POISON; LEN]].concat())?;
        super::Queued::put(&s.os, &s.stream, me, 0, &mine)?;
        s.finish()?;
        s.team.agree(true)?;
        let (src, count) = (s.os.here().addr(0, LEN)?, LEN / 4);
        queue(&[NcclOp::PutSignal { src, count, peer: next.get(), window, offset: LEN }])?;
        queue(&[NcclOp::Signal { peer: next.get() }])?;
        queue(&[NcclOp::WaitSignals { peer: before.get(), count: 2 }])?;
        assert!(s.own(LEN, LEN)? == want, "round {round}");
        s.team.agree(true)?;
    }
    log::info!("puts and signals of NCCL {version:?}: 3 rounds of {LEN} bytes");
    Ok(())
}
