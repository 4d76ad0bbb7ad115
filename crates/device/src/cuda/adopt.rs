//! Physical memory that somebody else in this process has allocated.

use cudarc::driver::sys::{self, CUpointer_attribute};
use tilewire_core::{Error, ErrorKind, Result};

use super::context::CudaContext;
use super::error::check;
use super::vmm::VmmChunk;

impl VmmChunk {
    /// The physical memory behind `addr`, and how many bytes `addr` lies behind its beginning. It
    /// lives as long as the chunk, whatever its allocator does. Exporting it fails unless it was
    /// made to be shared.
    ///
    /// # Errors
    /// `Unsupported` if it was not made by `cuMemCreate`.
    pub fn of_address(ctx: &CudaContext, addr: u64) -> Result<(Self, usize)> {
        let _current = ctx.bind()?;
        let mut handle = 0;
        // SAFETY: valid output; the driver looks the address up and reads nothing there.
        let code = unsafe {
            sys::cuMemRetainAllocationHandle(
                &mut handle,
                std::ptr::without_provenance_mut(addr as usize),
            )
        };
        check(code, "cuMemRetainAllocationHandle").map_err(|e| {
            Error::new(ErrorKind::Unsupported, "this memory cannot be mapped by other ranks")
                .expected(
                    "an allocation of cuMemCreate, as `torch.distributed._symmetric_memory` makes",
                )
                .hint("copy it to a tensor of `symm_empty`")
                .cause(e)
        })?;
        // From here on the handle is released, whatever happens.
        let mut chunk = Self { ctx: ctx.clone(), handle, len: 0 };
        let (mut base, mut len) = (0u64, 0usize);
        let (at, size) = (
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        );
        // SAFETY: an address for the first attribute, a size for the second one.
        unsafe {
            check(
                sys::cuPointerGetAttribute((&raw mut base).cast(), at, addr),
                "cuPointerGetAttribute",
            )?;
            check(
                sys::cuPointerGetAttribute((&raw mut len).cast(), size, addr),
                "cuPointerGetAttribute",
            )?;
        }
        chunk.len = len;
        Ok((chunk, (addr - base) as usize))
    }
}
