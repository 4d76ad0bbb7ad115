//! GPUs that do not use each other's memory: what goes through NCCL computes the same bits, what
//! puts is refused, and ranks meet, signal and end in the host's memory.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Device, Stream};
use tilewire_ops::Algo;
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmPlan};
use tilewire_ops::attention::{AttentionDesc, AttnMask};
use tilewire_ops::collective::{CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan};
use tilewire_ops::common::OverlapConfig;
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan};
use tilewire_ops::ep::{EpDesc, EpPlan};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsPlan};
use tilewire_symm::{DeviceTransport, Heap, HeapCfg, Permit, Transport, World, WorldCfg};

use crate::team_ops::{asked, by_nccl, has_bits_of_its_way, ranks, ranks_with_nccl};
use crate::{DEVICES, all_poison, begins, told};

const BYTES: usize = 600 << 20;

fn heap(world: &World, name: &str, near: bool) -> Result<(Heap, Stream)> {
    let cfg = HeapCfg { peer_access: near, ..HeapCfg::new(BYTES) };
    let heap = world.everyone(name)?.heap(BackendKind::Vmm, cfg)?;
    assert_eq!(heap.reaches_peers(), near);
    let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
    Ok((heap, Stream::on(&ctx)?))
}

#[test]
fn far_gpus_compute_the_same_by_nccl() {
    let Some(n) = ranks_with_nccl() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        for (i, make) in asked(by_nccl()) {
            let mut seen = Vec::new();
            for near in [true, false] {
                let (heap, stream) = heap(&world, "far", near)?;
                let op = make(&heap, &stream)?;
                begins(i, &op, &heap);
                stream.begin_capture()?;
                told(&op, (op.launch)(&stream))?;
                let graph = stream.end_capture()?.instantiate()?;
                for replay in [false, true] {
                    op.refill(7 + 64 * u64::from(replay) + u64::from(heap.team().rank().get()))?;
                    op.poison()?;
                    heap.team().agree(true)?;
                    let queued = if replay { stream.replay(&graph) } else { (op.launch)(&stream) };
                    told(&op, queued)?;
                    stream.synchronize()?;
                    told(&op, heap.team().check())?;
                    assert!(!op.outs.iter().all(all_poison), "{}", op.name);
                    seen.push(op.bits()?);
                }
            }
            let same = seen[0] == seen[2] && seen[1] == seen[3];
            assert!(same || has_bits_of_its_way(i), "operation {i} differs without access");
        }
        Ok(())
    })
    .unwrap();
}

/// Each operation that can be asked for what the heap does not have names the heap's backend.
#[test]
fn refusals_name_the_backend_of_the_heap() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, WorldCfg::for_tests(), |world| {
        let near = heap(&world, "near", true)?.0;
        let far = heap(&world, "far", false)?.0;
        let kind = CollectiveKind::AllGather(tilewire_ops::Shards::Even);
        let gather = CollectiveDesc { kind, m: 4 * n, cols: 8, dtype: DType::F32 };
        let puts = CollectiveBackend::Put;
        let attention = AttentionDesc::new(4 * n, (n, n), 16, DType::F32, AttnMask::FULL);
        let cp = CpAttentionDesc::new(attention);
        let ring = Some(OverlapConfig::of(Algo::Ring, 1));
        let fused = Some(OverlapConfig::of(Algo::Fused, 1));
        let ag = AgGemmDesc::new(4 * n, 8, 8, DType::F32);
        let rs = GemmRsDesc::new(4 * n, 8, 8, DType::F32);
        let ar = GemmArDesc(rs.clone());
        let refusals = [
            CollectivePlan::with_backend(gather, &far, puts).err(),
            EpPlan::with_backend(EpDesc::new(n, 2 * n, 8, 16, 2), &far, puts).err(),
            CpAttentionPlan::with_backend(cp, &far, None, puts).err(),
            AgGemmPlan::new(ag.clone(), &far, ring).err(),
            GemmRsPlan::new(rs.clone(), &far, ring).err(),
            GemmArPlan::new(ar.clone(), &far, ring).err(),
            AgGemmPlan::new(ag, &near, fused).err(),
            GemmRsPlan::new(rs, &near, fused).err(),
            GemmArPlan::new(ar, &near, fused).err(),
        ];
        for (i, e) in refusals.into_iter().enumerate() {
            let e = e.unwrap_or_else(|| panic!("{i} is not refused"));
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
            for (name, kind) in BackendKind::NAMES {
                let named = e.message().contains(&format!("`{name}`"));
                assert_eq!(named, *kind == BackendKind::Vmm, "{i}: {e}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Puts are refused, and say what to do; without a word, plans go through NCCL.
#[test]
fn far_gpus_refuse_puts_and_meet() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(2), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        let (heap, stream) = heap(&world, "refused", false)?;
        let (team, os) = (heap.team().clone(), DeviceTransport::new(&heap)?);
        let (me, next) = (team.rank(), Rank::new((team.rank().get() + 1) % n as u32));
        let s = stream.cuda()?;
        let bytes = CudaMemory::from_bytes(os.here().context(), &[1; 64])?;
        // SAFETY: nothing is put: the peer has no address.
        let permit = unsafe { Permit::assume(n) };
        let e = os.put(s, &permit, (next, 0), &bytes, "put").unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        let buf = heap.alloc(64, "words")?;
        let shape = tilewire_core::Shape::d1(4);
        assert_eq!(buf.address(me)?.1, 64);
        let refusals = [
            buf.address(next).err(),
            buf.stride().err(),
            buf.peer_tensor(next, DType::F32, shape).err(),
            buf.all_ranks(DType::F32, shape).err(),
        ];
        for e in refusals {
            assert!(e.is_some_and(|e| e.is_unsupported() && e.get_hint().is_some()));
        }
        let kind = CollectiveKind::AllGather(tilewire_ops::Shards::Even);
        let gather = CollectiveDesc { kind, m: 4 * n, cols: 8, dtype: DType::F32 };
        let put = CollectivePlan::with_backend(gather.clone(), &heap, CollectiveBackend::Put);
        let e = put.err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        let desc = EpDesc::new(n, 2 * n, 8, 16, 2);
        let e = EpPlan::with_backend(desc.clone(), &heap, CollectiveBackend::Put).err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        let plan = CollectivePlan::new(gather, &heap)?;
        plan.prepare(&stream)?;
        assert!(plan.explain().contains("NCCL"), "{}", plan.explain());
        // Where puts cannot be there is nothing to time.
        let plans = [
            EpPlan::new(desc.clone(), &heap)?,
            EpPlan::with_backend(desc, &heap, CollectiveBackend::Fastest)?,
        ];
        for (plan, free) in plans.iter().zip([false, true]) {
            let e = plan.zero_copy_recv().unwrap_err();
            let want = if free { ErrorKind::NotPrepared } else { ErrorKind::Unsupported };
            assert_eq!(e.kind(), want, "{e}");
            plan.prepare(&stream)?;
            let text = plan.explain();
            assert!(text.contains("NCCL") && !text.contains("faster"), "{text}");
            let e = plan.zero_copy_recv().unwrap_err();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
        let e = world
            .everyone("window")?
            .heap(BackendKind::Nccl, HeapCfg::new(1 << 20).without_peer_access());
        let e = e.err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");

        // What ranks say to each other is in the host's memory.
        let sig = team.signals(1, "far")?;
        for _ in 0..3 {
            os.signal(s, next, sig.slot(0), 1, "signal")?;
            let before = Rank::new((me.get() + n as u32 - 1) % n as u32);
            os.wait(s, before, sig.slot(0), 1, "wait")?;
            os.barrier(s, 0, "barrier")?;
        }
        stream.synchronize()?;
        team.check()?;
        heap.grow(heap.usage().1 + (4 << 20))?;
        team.agree(true)?;
        // The last rank signals nobody: the others are told who it is, in time.
        let start = Instant::now();
        let victim = Rank::new(n as u32 - 1);
        if me != victim {
            os.wait(s, victim, sig.slot(0), 1, "wait")?;
            stream.synchronize()?;
        }
        let e = loop {
            match team.check() {
                Ok(()) if start.elapsed() < Duration::from_secs(6) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                r => break r.expect_err("nobody missed the victim"),
            }
        };
        assert!(matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Aborted), "{e}");
        if e.is_timeout() && me != victim {
            assert_eq!(e.get_peer(), Some(victim), "{e}");
        }
        Ok(())
    })
    .unwrap();
}
