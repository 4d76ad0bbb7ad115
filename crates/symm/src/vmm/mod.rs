//! The `vmm` backend: chunks of CUDA virtual memory, shared by descriptors, on GPUs that reach
//! each other's memory.
//!
//! Each rank has two chunks, mapped by all: the heap, and a control page with the layout of the
//! host's page (`control`), in which kernels signal, wait and abort. Hosts use their own control
//! pages for meetings, the flight recorder and `prepare_agree`.
//!
//! GPUs that do not reach each other have their control pages in the host's memory, where all
//! kernels reach them. Each of them maps its own chunk only: calls that need a peer's chunk are
//! `Unsupported`, and data moves through NCCL.
//!
//! # Invariants
//! 1. Control pages are zero before `create` returns on any rank.
//! 2. The sent and expected totals live in the rank's own device memory, so replays count on.
//! 3. A failure on the device is known to the host by the pinned report, and to the peers by their
//!    abort slots; a failure on the host is known to the device by the pinned abort word, and by
//!    8-byte copies into the fault word and the peers' slots, which need no SM.

mod device;
mod fault;
mod links;
mod pages;
mod store;
#[cfg(test)]
mod tests;
mod transport;

use tilewire_device::jit::KernelSpec;

pub use device::{DeviceHeap, DeviceTeam};
pub use fault::BadInput;
pub use links::{LinkProbe, Piece};
pub(crate) use store::{VmmStore, gpus, shared};
pub use transport::DeviceTransport;

/// Returns every kernel of symmetric memory that runs on an architecture (as in `sm_90a`).
pub fn kernel_specs(arch: &str) -> Vec<KernelSpec> {
    use tilewire_kernels::{LINKS, LINKS_BULK, LITMUS};
    let mut all = vec![store::signal_spec(arch)];
    let probes = [LINKS, LINKS_BULK, LITMUS].into_iter().filter(|s| s.runs_on(arch));
    all.extend(probes.map(|s| links::spec(&s, arch)));
    all
}
