use tilewire_device::cuda::Nvrtc;
use tilewire_device::jit::{Compiler, kernel_uses};
use tilewire_kernels::{LINKS, LINKS_BULK, LITMUS, SIGNAL};

use super::store::{Handle, Handles, share_by, shared};
use crate::protocol::AbortCode;
use crate::{DeviceTransport, HeapCfg, World, WorldCfg, kernel_specs};
use tilewire_core::{BackendKind, Error, ErrorKind, Rank};
use tilewire_device::cuda::ShareBy;
use tilewire_testing::{Lack, did_not_run};

#[test]
fn kernels_compile_where_the_compiler_is() {
    for arch in ["sm_80", "sm_90a", "sm_100a"] {
        for spec in kernel_specs(arch) {
            let named: Vec<&str> = spec.defines.iter().map(|(n, _)| &**n).collect();
            let source = [SIGNAL, LINKS, LINKS_BULK, LITMUS]
                .into_iter()
                .find(|s| s.name == spec.name)
                .unwrap();
            assert_eq!(named, source.defines);
            match Nvrtc.compile(&spec) {
                Ok(c) => {
                    let uses = kernel_uses(&c.log);
                    assert_eq!(uses.len(), source.kernels.len());
                    assert!(uses.iter().all(|k| k.spill_bytes == 0), "{uses:?}");
                }
                Err(e) => {
                    assert!(e.is_unavailable(), "{e}");
                    return did_not_run(Lack::Nvrtc, e);
                }
            }
        }
    }
}

#[test]
fn a_host_heap_gives_no_device_access() {
    let world = World::solo(WorldCfg::for_tests()).unwrap();
    let team = world.everyone("t").unwrap();
    let heap = team.heap(BackendKind::Host, HeapCfg::new(4096)).unwrap();
    let e = DeviceTransport::new(&heap).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
}

#[test]
fn ranks_on_one_gpu_are_found() {
    let gpus = |names: &[&str]| names.iter().map(|n| n.as_bytes().to_vec()).collect::<Vec<_>>();
    assert_eq!(shared(&gpus(&["0:1", "0:2", "0:3"])), None);
    assert_eq!(shared(&gpus(&["0:1", "0:2", "0:2", "0:1"])), Some((Rank::new(1), Rank::new(2))));
    assert_eq!(shared(&[]), None);
}

/// Checks that a third rank names the rank that raised an abort first, not the rank that passed it
/// on; the first rank's host may not know of the abort yet.
#[test]
fn what_a_device_has_heard_is_passed_on_as_it_came() {
    World::run_threads(3, WorldCfg::for_tests(), |w| {
        let team = w.everyone("seen")?;
        // Rank 0's device has waited for rank 2 in vain, and reported that to rank 1, which is the
        // first to look.
        let generation = team.generation() as u32;
        let code = AbortCode { generation, reason: 1, about: 2, from: 0 };
        if team.rank().get() == 1 {
            team.note_heard(code);
            team.fail(team.abort_error(Rank::new(0), code));
        }
        while team.rank().get() > 0 {
            let Err(e) = team.check() else {
                std::thread::yield_now();
                continue;
            };
            assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Aborted, Some(Rank::new(0))), "{e}");
            assert!(e.message().contains("timed out waiting for rank 2"), "{e}");
            break;
        }
        Ok(())
    })
    .unwrap();
}

/// One rank that cannot is enough, and all ranks know it.
#[test]
fn memory_travels_in_one_way_on_all_ranks() {
    World::run_threads(3, WorldCfg::for_tests(), |w| {
        let team = w.everyone("handles")?;
        let me = team.rank().get();
        let mine = |who: Option<u32>| match who {
            Some(r) if r == me => Err(Error::new(ErrorKind::Unavailable, "no channel")),
            _ => Ok(()),
        };
        for (who, want) in [(None, ShareBy::Fabric), (Some(0), ShareBy::Fd), (Some(2), ShareBy::Fd)]
        {
            assert_eq!(share_by(&team, mine(who))?, want);
        }
        let own = [Handle::Fabric([me as u8; 64]), Handle::Fabric([me as u8 + 100; 64])];
        let Handles::Fabric(all) = Handles::exchange(&team, &[&own[0], &own[1]])? else {
            panic!("handles of another kind");
        };
        let want: Vec<_> = (0..3).map(|r| vec![[r; 64], [r + 100; 64]]).collect();
        assert_eq!(all, want);
        team.agree(true).map(|_| ())
    })
    .unwrap();
}
