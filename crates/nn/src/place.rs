//! The device and the type that a model computes on and in.

use tilewire_core::{BackendKind, DType, Error, Result, Shape};
use tilewire_device::{Device, Tensor};
use tilewire_symm::LiveTeam;

/// The backend and the type that a model computes on and in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// Backend of symmetric memory; it decides the device.
    pub backend: BackendKind,
    /// Type of weights and activations: f32, or bf16 with f32 masters.
    pub dtype: DType,
}

impl Default for Target {
    /// f32 on the host.
    fn default() -> Self {
        Self { backend: BackendKind::Host, dtype: DType::F32 }
    }
}

impl Target {
    /// The usual type of a backend: f32 on the host, bf16 on GPUs.
    pub fn new(backend: BackendKind) -> Self {
        let dtype = if backend == BackendKind::Host { DType::F32 } else { DType::BF16 };
        Self { backend, dtype }
    }

    /// The backend of a team's heaps. NVSHMEM lives once in a process, over everybody: teams of
    /// fewer have memory of `vmm`.
    pub fn backend_of(&self, team: &LiveTeam) -> BackendKind {
        if self.backend == BackendKind::Nvshmem && team.size() < team.world_size() {
            return BackendKind::Vmm;
        }
        self.backend
    }

    /// Checks that there is such a model.
    ///
    /// # Errors
    /// `InvalidArgument` for another type; `Unsupported` for one that the device has no kernels
    /// for.
    pub fn check(&self) -> Result<()> {
        match (self.backend, self.dtype) {
            (BackendKind::Host, DType::F32) | (_, DType::BF16) => Ok(()),
            (_, DType::F32) => Err(Error::new(
                tilewire_core::ErrorKind::Unsupported,
                "a model in f32 runs on the host only: on GPUs it is bf16 with f32 masters",
            )
            .hint("leave out --dtype, or use bf16")),
            (_, other) => Err(Error::invalid("the model does not support this type")
                .expected("f32 or bf16")
                .seen(other)),
        }
    }
}

/// A device and the type of weights and activations on it: makes tensors.
#[derive(Clone)]
pub struct Place {
    /// Device of the tensors.
    pub device: Device,
    /// T.
    pub dtype: DType,
}

impl Place {
    /// Poisoned rows of T.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn narrow(&self, rows: usize, cols: usize) -> Result<Tensor> {
        Tensor::poisoned_on(&self.device, self.dtype, Shape::d2(rows, cols))
    }

    /// Poisoned rows of f32.
    ///
    /// # Errors
    /// As [`Place::narrow`].
    pub fn wide(&self, rows: usize, cols: usize) -> Result<Tensor> {
        Tensor::poisoned_on(&self.device, DType::F32, Shape::d2(rows, cols))
    }

    /// Zeroed rows of `dtype`.
    ///
    /// # Errors
    /// As [`Place::narrow`].
    pub fn zeros(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
        Tensor::zeros_on(&self.device, dtype, Shape::d2(rows, cols))
    }

    /// A copy of `t` there.
    ///
    /// # Errors
    /// As [`Place::narrow`].
    pub fn put(&self, t: &Tensor) -> Result<Tensor> {
        t.to(&self.device)
    }
}
