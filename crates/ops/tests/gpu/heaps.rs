//! Heaps on devices: left in any order, two backends in one process, sizes around a page of the
//! device's memory, and rows that stay where a dispatch has put them until they are combined.

use std::sync::PoisonError;
use std::time::Duration;

use tilewire_core::{BackendKind, DType, Error, ErrorKind, Rank, Result, Rng, Shape};
use tilewire_device::cuda::{CudaContext, CudaMemory, ShareBy, VmmChunk, VmmRange, granularity};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::ep::{EpDesc, EpDispatch, EpPlan};
use tilewire_ops::grouped_gemm::{GroupedDesc, GroupedFprop, GroupedGemmPlan, Splits};
use tilewire_symm::{
    DeviceTransport, Heap, HeapCfg, LinkProbe, Permit, Transport, World, WorldCfg,
};

use crate::team_ops::{asked, by_puts, heap, ranks, ranks_with_nccl};
use crate::{DEVICES, all_poison, begins, computes_again, told};

fn cfg() -> WorldCfg {
    WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() }
}

/// Tensors over a buffer's parts show what each rank has written, also once the buffer's other
/// handles are gone.
#[test]
fn tensors_over_symmetric_memory_are_that_memory() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let heap = world.everyone("tensors")?.heap(BackendKind::Vmm, HeapCfg::new(4 << 20))?;
        let (team, _before) = (heap.team().clone(), heap.alloc(300, "before")?);
        let buf = heap.alloc(64, "words")?;
        let all = buf.all_ranks(DType::I64, Shape::d1(4))?;
        let own = buf.tensor(DType::I64, Shape::d1(4))?;
        let me = i64::from(team.rank().get());
        own.upload(bytemuck::cast_slice(&[me, 7, 8, 9i64]))?;
        team.agree(true)?;
        let peers = (0..n as u32).map(|r| buf.peer_tensor(Rank::new(r), DType::I64, Shape::d1(4)));
        let peers = peers.collect::<Result<Vec<_>>>()?;
        let e = buf.tensor(DType::I64, Shape::d1(9)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        drop((buf, heap));
        for (r, t) in peers.iter().enumerate() {
            assert_eq!(t.to_vec::<i64>()?, [r as i64, 7, 8, 9]);
            let at = all.address.wrapping_add(all.stride_bytes.wrapping_mul(r as u64));
            assert_eq!(t.cuda()?.addr(), at);
        }
        assert_eq!((all.num_ranks, all.buf().len_bytes()), (n, 64));
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// Memory of `ctx`'s device that can be shared, as another library of this process allocates it:
/// nobody else knows of its handle.
fn foreign(ctx: &CudaContext) -> Result<VmmRange> {
    let len = granularity(ctx)?;
    let chunk = VmmChunk::create(ctx, len, ShareBy::Fd)?;
    VmmRange::map(ctx, &[&chunk], len)
}

/// Memory that somebody else has allocated, seen by all ranks where the heap has it, and where its
/// owner has it; its owner may let go of it.
#[test]
fn memory_of_others_becomes_symmetric() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let cfg = HeapCfg { reserve_bytes: Some(64 << 20), ..HeapCfg::new(4 << 20) };
        let heap = world.everyone("adopts")?.heap(BackendKind::Vmm, cfg)?;
        let team = heap.team().clone();
        let Device::Cuda(ctx) = heap.device() else { panic!("a heap of devices") };
        let (me, len) = (u64::from(team.rank().get()), granularity(&ctx)?);
        let theirs = foreign(&ctx)?;
        theirs.write(Rank::new(0), 4096, &[10 + me as u8; 64])?;
        // Ordinary memory is refused on all ranks, and they go on.
        let plain = CudaMemory::from_bytes(&ctx, &[0; 64])?;
        let e = heap.adopt(plain.addr(), 64).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        let before = heap.usage().0;
        let e = heap.adopt(theirs.base() + 4096, len).unwrap_err();
        assert!(e.kind() == ErrorKind::Unsupported && format!("{e}").contains("several"), "{e}");
        let (buf, inside) = heap.adopt(theirs.base() + 4096, len - 4096)?;
        assert_eq!((buf.len_bytes(), inside), (len, 4096));
        assert!(heap.usage().0 >= before, "what was free stays free");
        let part = |r: u64| buf.peer_tensor(Rank::new(r as u32), DType::U8, Shape::d1(len));
        for r in 0..n as u64 {
            let bytes = part(r)?.to_vec::<u8>()?;
            assert_eq!(bytes[4096..4160], [10 + r as u8; 64], "rank {r}");
        }
        team.agree(true)?;
        // To the next rank, whose owner sees it.
        let to = part((me + 1) % n as u64)?.cuda()?.slice(8192, 64)?;
        to.upload(&[50 + me as u8; 64])?;
        team.agree(true)?;
        let mut seen = [0u8; 64];
        theirs.read(Rank::new(0), 8192, &mut seen)?;
        assert_eq!(seen, [50 + ((me + n as u64 - 1) % n as u64) as u8; 64]);
        // The owner lets go of it; the heap does not, nor does it give the memory to anybody else.
        drop(theirs);
        assert_eq!(part(me)?.to_vec::<u8>()?[8192..8256], seen);
        let (offset, end) = (buf.offset(), buf.offset() + len);
        drop(buf);
        heap.collect()?;
        heap.grow(end + (2 << 20))?;
        let more = heap.alloc(1 << 20, "more")?;
        assert!(more.offset() >= end || more.offset() + (1 << 20) <= offset);
        team.agree(true).map(drop)
    })
    .unwrap();
}

/// A team whose ranks are not those of the world: errors about a peer name the world's.
#[test]
fn errors_about_a_peer_name_its_rank_in_the_world() {
    if ranks().is_none() {
        return;
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(2, cfg(), |world| {
        let heap = |near: bool, name: &str| {
            let team = world.team(&[Rank::new(1), Rank::new(0)], name)?.unwrap();
            team.heap(BackendKind::Vmm, HeapCfg { peer_access: near, ..HeapCfg::new(4 << 20) })
        };
        let of_peer = |e: Error, kind: ErrorKind, name: &str| {
            let me = world.rank().get();
            let text = format!("(team {name}, peer {} ({me} in the team)", 1 - me);
            let said = e.to_string().replace(&format!("rank {me} ({} in the team), ", 1 - me), "");
            assert!(e.kind() == kind && said.contains(&text), "{e}");
            assert!(!e.message().contains(&format!("r{me}")), "{e}");
        };
        let far = heap(false, "far")?;
        let net = DeviceTransport::new(&far)?;
        let stream = Stream::on(net.here().context())?;
        let (s, me) = (stream.cuda()?, far.team().rank());
        let peer = Rank::new(1 - me.get());
        let mut out = CudaMemory::zeroed(net.here().context(), 8)?;
        // SAFETY: it is refused.
        let e = unsafe { net.get(s, (peer, 0), &mut out, "far") }.unwrap_err();
        of_peer(e, ErrorKind::Unsupported, "far");
        let near = heap(true, "near")?;
        if me.get() == 0 {
            // The peer answers no flag.
            let e = LinkProbe::new(&near, 4096)?.ping(s, peer, 0, 1).unwrap_err();
            of_peer(e, ErrorKind::Timeout, "near");
        }
        near.team().agree(true).map(drop)
    })
    .unwrap();
}

/// A plan has what it needs: team, heap and stream may go before it in any order, and the devices
/// are as before.
#[test]
fn devices_are_left_in_any_order() {
    const ORDERS: [[usize; 3]; 6] =
        [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let outer = world.everyone("outer")?;
        for (i, make) in asked(by_puts()) {
            let (heap, stream) = heap(&world, "short")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            let me = u64::from(outer.rank().get());
            op.refill(9 + me)?;
            op.poison()?;
            outer.agree(true)?;
            let team = heap.team().clone();
            let (mut team, mut heap, mut op) = (Some(team), Some(heap), Some(op));
            for what in ORDERS[i % ORDERS.len()] {
                match what {
                    0 => drop(team.take()),
                    1 => drop(heap.take()),
                    _ => {
                        let op = op.take().unwrap();
                        told(&op, (op.launch)(&stream))?;
                        stream.synchronize()?;
                        assert!(!op.outs.iter().all(all_poison), "{}", op.name);
                    }
                }
            }
            drop(stream);
            outer.agree(true)?;
            computes_again(&world, &make)?;
        }
        Ok(())
    })
    .unwrap();
}

/// Whichever is there first: both compute, beside each other, the same bits.
#[test]
fn two_backends_in_one_process_in_both_orders() {
    let Some(n) = ranks_with_nccl() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    for order in [[BackendKind::Vmm, BackendKind::Nccl], [BackendKind::Nccl, BackendKind::Vmm]] {
        World::run_threads(n, cfg(), |world| {
            let both = order.map(|kind| -> Result<(Heap, Stream)> {
                let heap = world.everyone("both")?.heap(kind, HeapCfg::new(64 << 20))?;
                assert_eq!(heap.backend(), kind);
                let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
                Ok((heap, Stream::on(&ctx)?))
            });
            let [a, b] = both;
            let both = [a?, b?];
            let ops = both.each_ref().map(|(heap, stream)| by_puts()[0](heap, stream));
            let [a, b] = ops;
            let ops = [a?, b?];
            let me = u64::from(world.rank().get());
            for round in 0..3 {
                for op in &ops {
                    op.refill(11 + 64 * round + me)?;
                    op.poison()?;
                }
                both[0].0.team().agree(true)?;
                for (op, (_, stream)) in ops.iter().zip(&both) {
                    told(op, (op.launch)(stream))?;
                }
                for (heap, stream) in &both {
                    stream.synchronize()?;
                    heap.team().check()?;
                }
                let bits = [ops[0].bits()?, ops[1].bits()?];
                assert!(!ops[0].outs.iter().all(all_poison), "{order:?}: nothing ran");
                assert!(bits[0] == bits[1], "{order:?}: round {round} differs");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// A page of the device's memory, one byte less, and one more: all of it arrives, and nothing
/// beside it.
#[test]
fn sizes_around_a_page_of_the_device_arrive_whole() {
    const PAGE: usize = 2 << 20;
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        for len in [PAGE - 1, PAGE, PAGE + 1] {
            // The heap itself has such a size, too, besides room for what surrounds the buffer.
            let heap = world.everyone("page")?.heap(BackendKind::Vmm, HeapCfg::new(len + PAGE))?;
            let (team, os) = (heap.team().clone(), DeviceTransport::new(&heap)?);
            let stream = Stream::on(os.here().context())?;
            let (s, me) = (stream.cuda()?, team.rank());
            let next = Rank::new((me.get() + 1) % n as u32);
            let before = Rank::new((me.get() + n as u32 - 1) % n as u32);
            let around =
                [heap.alloc(64, "front")?, heap.alloc(len, "page")?, heap.alloc(64, "back")?];
            let bytes = |rank: Rank| -> Vec<u8> {
                let rng = Rng::new(len as u64 * 16 + u64::from(rank.get()));
                (0..len as u64).map(|i| rng.at(i) as u8).collect()
            };
            let own = |at: usize, len: usize| -> Result<Vec<u8>> {
                let mut out =
                    CudaMemory::from_bytes(os.here().context(), &vec![DType::POISON; len])?;
                // SAFETY: what is got was waited for, or met behind.
                unsafe { os.get(s, (me, at), &mut out, "get")? };
                stream.synchronize()?;
                out.download()
            };
            // What lies beside it is known.
            let edge = CudaMemory::from_bytes(os.here().context(), &[7; 64])?;
            for buf in [&around[0], &around[2]] {
                os.put(s, &Permit::none(), (me, buf.range(0, 64)), &edge, "put")?;
            }
            os.barrier(s, 0, "barrier")?;
            let sig = team.signals(1, "page")?;
            let mine = CudaMemory::from_bytes(os.here().context(), &bytes(me))?;
            let to = (next, around[1].range(0, len));
            // SAFETY: all have met, and the neighbour reads behind its wait.
            let permit = unsafe { Permit::assume(team.size()) };
            os.put_signal(s, &permit, to, &mine, sig.slot(0), "put")?;
            os.wait(s, before, sig.slot(0), 1, "wait")?;
            let got = own(around[1].range(0, len), len)?;
            let want = bytes(before);
            let bad = got.iter().zip(&want).position(|(a, b)| a != b);
            assert!(got.len() == len && bad.is_none(), "{len} bytes: the first wrong is {bad:?}");
            for buf in [&around[0], &around[2]] {
                assert_eq!(own(buf.range(0, 64), 64)?, [7; 64], "{len} bytes: beside them");
            }
            team.check()?;
            team.agree(true)?;
        }
        Ok(())
    })
    .unwrap();
}

/// From the rank of a token to its experts and back without a copy beside the operations: what a
/// dispatch puts straight into symmetric memory is the operand of a grouped product, whose output
/// is what is combined. Bits are those of tensors of the caller.
#[test]
fn a_zero_copy_dispatch_feeds_a_grouped_product() {
    const HIDDEN: usize = 64;
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let mut seen = Vec::new();
        // Into a tensor of the caller's, memory of the plan's, and memory that somebody else has
        // allocated.
        for place in 0..3 {
            let (heap, stream) = heap(&world, "experts")?;
            let (s, me) = (&stream, heap.team().rank());
            let (tokens, k, local) = (48, 2, 3);
            let mut desc = EpDesc::new(n, n * local, tokens, HIDDEN, k);
            (desc.dtype, desc.out) = (DType::BF16, DType::BF16);
            desc.capacity = desc.worst_case();
            let (capacity, rows) = (desc.capacity, desc.recv_rows());
            let plan = EpPlan::new(desc, &heap)?;
            plan.prepare(s)?;
            let product = GroupedDesc::new(local, capacity, HIDDEN, HIDDEN, DType::BF16);
            let product = GroupedGemmPlan::new(product)?;
            product.prepare(s)?;
            let handle = plan.handle()?;
            let mut rng = Rng::new(17 + u64::from(me.get()));
            let mut random = |rows: usize| -> Result<Tensor> {
                let v: Vec<f32> = (0..rows * HIDDEN).map(|_| rng.normal()).collect();
                Tensor::from_f32(&v, DType::BF16, Shape::d2(rows, HIDDEN))?.to(&heap.device())
            };
            let (x, w) = (random(tokens)?, random(local * HIDDEN)?);
            let experts = n * local;
            let idx: Vec<i64> = (0..tokens * k)
                .map(|i| ((i / k * 5 + me.idx() + i % k * (1 + i / k % 2)) % experts) as i64)
                .collect();
            let idx = Tensor::from_slice(&idx, Shape::d2(tokens, k))?.to(&heap.device())?;
            let poisoned =
                |rows| Tensor::poisoned_on(&heap.device(), DType::BF16, Shape::d2(rows, HIDDEN));
            let Device::Cuda(ctx) = heap.device() else { panic!("a heap of devices") };
            let theirs = foreign(&ctx)?;
            let into = match place {
                0 => poisoned(rows)?,
                1 => plan.zero_copy_recv()?,
                _ => {
                    let (buf, inside) = heap.adopt(theirs.base() + 256, 64)?;
                    let odd = plan.zero_copy_recv_in(&buf, inside + 8).unwrap_err();
                    assert_eq!(odd.kind(), ErrorKind::InvalidArgument, "{odd}");
                    plan.zero_copy_recv_in(&buf, inside)?
                }
            };
            let recv = EpDispatch { x: into, scales: None, weights: None };
            let (y, out) = (poisoned(capacity)?, poisoned(tokens)?);
            heap.team().agree(true)?;
            plan.route(s, &idx, None, &handle)?.join(s)?;
            plan.dispatch(s, &handle, &x, (None, None), &recv)?.join(s)?;
            let fprop = GroupedFprop {
                x: (&recv.x).into(),
                w: (&w).into(),
                bias: None,
                splits: Splits::counts(handle.m_splits()),
                out: y.clone(),
                aux_out: None,
            };
            product.fprop(s, fprop)?.join(s)?;
            plan.combine(s, &handle, &y, None, &out)?.join(s)?;
            stream.synchronize()?;
            heap.team().check()?;
            product.check()?;
            let out = out.to_f32()?;
            assert!(out.iter().all(|v| v.is_finite()) && out.iter().any(|&v| v != 0.0));
            seen.push(out);
        }
        assert!(seen[0] == seen[1], "rows that go straight make other results");
        assert!(seen[0] == seen[2], "rows in memory of others make other results");
        Ok(())
    })
    .unwrap();
}
