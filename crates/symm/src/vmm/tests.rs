use std::mem::size_of;

use tilewire_device::cuda::Nvrtc;
use tilewire_device::jit::{Compiler, kernel_uses};
use tilewire_kernels::SIGNAL;

use super::store::TeamParam;
use crate::{HeapCfg, VmmOneSided, World, WorldCfg, kernel_specs};
use tilewire_core::{BackendKind, ErrorKind};

#[test]
fn kernels_compile_where_the_compiler_is() {
    assert_eq!(size_of::<TeamParam>(), 80, "8 words and 4 half words, as in comm/signal.cu");
    for arch in ["sm_80", "sm_90a", "sm_100a"] {
        for spec in kernel_specs(arch) {
            let named: Vec<&str> = spec.defines.iter().map(|(n, _)| &**n).collect();
            assert_eq!(named, SIGNAL.defines);
            match Nvrtc.compile(&spec) {
                Ok(c) => {
                    let uses = kernel_uses(&c.log);
                    assert_eq!(uses.len(), SIGNAL.kernels.len());
                    assert!(uses.iter().all(|k| k.spill_bytes == 0), "{uses:?}");
                }
                Err(e) => assert!(e.is_unavailable(), "{e}"),
            }
        }
    }
}

#[test]
fn a_host_heap_gives_no_device_access() {
    let world = World::solo(WorldCfg::for_tests()).unwrap();
    let team = world.everyone("t").unwrap();
    let heap = team.heap(BackendKind::Host, HeapCfg::new(4096)).unwrap();
    let e = VmmOneSided::new(&heap).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
}
