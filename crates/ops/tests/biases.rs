//! Biases of the type of the results, on the host.

#[path = "gpu/biases.rs"]
mod biases;

use tilewire_core::{BackendKind, DType};
use tilewire_device::Stream;
use tilewire_symm::{HeapCfg, World, WorldCfg};

#[test]
fn a_bias_of_the_type_of_the_results_gives_the_bits_of_an_f32_bias() {
    World::run_threads(2, WorldCfg::default(), |world| {
        let heap = world.everyone("biases")?.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
        let stream = Stream::new("biases")?;
        for dtype in [DType::BF16, DType::F16] {
            biases::same_bits(&heap, &stream, dtype)?;
        }
        Ok(())
    })
    .unwrap();
}
