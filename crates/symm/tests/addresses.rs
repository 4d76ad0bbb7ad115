//! Addresses of symmetric buffers on the host.

use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Shape};
use tilewire_symm::{HeapCfg, World, WorldCfg};

#[test]
fn parts_are_tensors_of_the_host_for_who_orders_their_use() {
    World::run_threads(3, WorldCfg::default(), |world| {
        let team = world.everyone("tensors")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
        let (_before, buf) = (heap.alloc(100, "before")?, heap.alloc(64, "words")?);
        let shape = Shape::d2(2, 4);
        let part = |rank: Rank| {
            // SAFETY: each rank writes its own part before the meeting, nobody behind it.
            unsafe { buf.host_tensor(rank, DType::F32, shape) }
        };
        let value = |r: u32, i: usize| (10 * r) as f32 + i as f32;
        let own = part(team.rank())?;
        let mine = (0..8).flat_map(|i| value(team.rank().get(), i).to_le_bytes());
        own.write(|bytes| bytes.iter_mut().zip(mine).for_each(|(b, v)| *b = v))?;
        team.agree(true)?;
        for r in 0..3 {
            let want: Vec<f32> = (0..8).map(|i| value(r, i)).collect();
            assert_eq!(part(Rank::new(r))?.to_f32()?, want, "rank {r}");
        }
        team.agree(true)?;
        // SAFETY: no tensor is made.
        let kind = |rank, shape| unsafe { buf.host_tensor(rank, DType::F32, shape) };
        for (rank, shape) in [(Rank::new(3), shape), (team.rank(), Shape::d1(17))] {
            assert_eq!(kind(rank, shape).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        drop(buf);
        assert_eq!(own.to_f32()?.len(), 8, "the tensor keeps the memory");
        Ok(())
    })
    .unwrap();
}

#[test]
fn addresses_show_what_each_rank_has_put() {
    World::run_threads(3, WorldCfg::default(), |world| {
        let team = world.everyone("addresses")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
        let (_before, buf) = (heap.alloc(100, "before")?, heap.alloc(64, "words")?);
        let all = buf.all_ranks(DType::I64, Shape::d1(8))?;
        assert_eq!((all.num_ranks, all.stride_bytes), (3, buf.stride()?));
        assert_eq!((all.dtype, all.shape), (DType::I64, Shape::d1(8)));
        let (mine, len) = buf.address(team.rank())?;
        assert_eq!(len, 64);
        // SAFETY: my own part, which nobody else touches before the meeting; it is aligned for
        // words.
        unsafe { *(mine as *mut i64) = 40 + i64::from(team.rank().get()) };
        team.agree(true)?;
        for r in 0..3u32 {
            let at = all.address + u64::from(r) * all.stride_bytes;
            assert_eq!(buf.address(Rank::new(r))?, (at, 64));
            // SAFETY: a part that was written before the meeting and is not written any more.
            assert_eq!(unsafe { *(at as *const i64) }, 40 + i64::from(r));
        }
        team.agree(true)?;
        assert!(heap.host_transport()?.caps().direct_peer);
        let kind = |r: tilewire_core::Result<_>| r.map(|_: u64| ()).unwrap_err().kind();
        assert_eq!(kind(buf.address(Rank::new(3)).map(|a| a.0)), ErrorKind::InvalidArgument);
        let e = buf.all_ranks(DType::I64, Shape::d1(9)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        let e = buf.tensor(DType::I64, Shape::d1(8)).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        Ok(())
    })
    .unwrap();
}
