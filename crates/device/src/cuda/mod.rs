//! The CUDA device: thin owners over the driver's handles.
//!
//! Nothing here links CUDA: the libraries are opened on first use, and their absence is an error of
//! kind `Unavailable` that says where they were looked for. Every object keeps its context alive
//! and makes it current for its calls of the driver, so that any thread may use it; then the
//! caller's is current again.
//!
//! # Rules
//! - A [`CudaMemory`] that queued work names is held by its stream until the work has run, or by
//!   the graph that it was captured into: the driver promises neither to finish pending work before
//!   it frees memory nor not to wait for it.
//! - Streams of our own never wait for the legacy default stream.
//! - NVLink multicast and managed memory are never used.

mod adopt;
mod borrow;
#[cfg(test)]
mod borrow_tests;
mod context;
mod cublaslt;
mod current;
mod ended;
mod environment;
mod error;
mod event;
mod flight;
mod graph;
#[cfg(test)]
mod interop_tests;
mod library;
mod library_search;
mod loader;
mod memory;
mod module;
mod nccl;
mod nccl_api;
mod nvrtc;
mod nvshmem;
mod nvtx;
mod probe;
mod rates;
mod span;
mod stream;
mod tensor_map;
#[cfg(test)]
mod tests;
mod vmm;

pub use context::{CudaContext, device_count, driver_version, usable};
pub use cublaslt::{CublasLt, LtAlgo, LtDesc, LtProduct, load_cublaslt};
pub use event::CudaEvent;
pub use graph::CudaGraph;
pub use library::load_library;
pub use library_search::{
    CUBLASLT, CUBLASLT_12, CUDNN, Found, How, LIBRARIES, LibrarySpec, NCCL, NVRTC, NVSHMEM, NVTX,
    NVTX_12, Places,
};
pub use loader::{available, load_driver_from};
pub use memory::{CudaMemory, HostRegistered, Pinned};
pub use module::{CudaModule, Grid, Kernel, LaunchArgs};
pub use nccl::{NcclComm, NcclId, NcclOp, NcclSum, NcclWindow, load_nccl};
pub use nvrtc::{Nvrtc, load_nvrtc};
pub use nvshmem::{Nvshmem, NvshmemId, load_nvshmem};
pub use probe::{DeviceInfo, PeerInfo, devices, peer_info, try_share};
pub use rates::DeviceRates;
pub use span::CudaSpan;
pub(crate) use span::DeviceSpans;
pub use stream::{CudaStream, StreamKey};
pub use tensor_map::{MapPromotion, MapSizes, MapSwizzle, RawTensorMap, TensorMap, TensorMapDesc};
pub use vmm::{FabricHandle, ShareBy, VmmChunk, VmmRange, fabric_handles, granularity};
