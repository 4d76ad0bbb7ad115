use std::mem::size_of;

use tilewire_device::cuda::compile;
use tilewire_kernels::SIGNAL;

use super::store::TeamParam;
use crate::{HeapCfg, VmmOneSided, World, WorldCfg};
use tilewire_core::{BackendKind, ErrorKind};

#[test]
fn kernels_compile_where_the_compiler_is() {
    assert_eq!(size_of::<TeamParam>(), 80, "8 words and 4 half words, as in comm/signal.cu");
    let defines: Vec<_> = SIGNAL.defines.iter().map(|d| (*d, 0x1000)).collect();
    for arch in ["sm_80", "sm_90a", "sm_100a"] {
        match compile(SIGNAL.name, &SIGNAL.text(), arch, &defines) {
            Ok(cubin) => assert!(cubin.len() > 1000),
            Err(e) => assert!(e.is_unavailable(), "{e}"),
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
