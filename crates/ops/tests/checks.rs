//! Worlds that compare every launch, on the host.

#[path = "gpu/checks.rs"]
mod checks;

use tilewire_core::BackendKind;
use tilewire_device::Stream;
use tilewire_symm::{HeapCfg, World};

#[test]
fn a_rank_that_launches_another_m_is_named_at_once() {
    World::run_threads(2, checks::cfg(), |world| {
        let heap = world.everyone("checks")?.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
        checks::another_m_is_a_mismatch(&heap, &Stream::new("checks")?)
    })
    .unwrap();
}
