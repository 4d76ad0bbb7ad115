//! Loaded machine code and its kernels.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUmodule};
use tilewire_core::{Error, Result};

use super::context::CudaContext;
use super::error::check;
use super::stream::CudaStream;

/// Machine code loaded into a context.
#[derive(Clone)]
pub struct CudaModule(Arc<Inner>);

struct Inner {
    ctx: CudaContext,
    raw: CUmodule,
}

// SAFETY: a module may be used from any thread; the handle never changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaModule {
    /// Loads a cubin.
    ///
    /// # Errors
    /// What the driver reports, for instance code for another architecture.
    pub fn load(ctx: &CudaContext, cubin: &[u8]) -> Result<Self> {
        ctx.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a complete cubin; the driver copies it.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) };
        check(code, "cuModuleLoadData")?;
        Ok(Self(Arc::new(Inner { ctx: ctx.clone(), raw })))
    }

    /// The kernel `name`, loaded at once: a lazy load at the first launch may wait for kernels
    /// that are running, and they may wait for this one.
    ///
    /// # Errors
    /// If there is no such kernel.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        self.0.ctx.bind()?;
        let c = CString::new(name).map_err(|_| Error::invalid("a zero byte in a kernel's name"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live module, a valid name and output.
        unsafe {
            check(
                sys::cuModuleGetFunction(&mut raw, self.0.raw, c.as_ptr()),
                "cuModuleGetFunction",
            )
            .map_err(|e| e.phase(name))?;
            check(sys::cuFuncLoad(raw), "cuFuncLoad")?;
        }
        Ok(Kernel { module: self.clone(), raw, name })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.ctx.bind().is_ok() {
            // SAFETY: loaded by us, unloaded once, after the last kernel handle.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A kernel of a [`CudaModule`].
#[derive(Clone)]
pub struct Kernel {
    module: CudaModule,
    raw: CUfunction,
    name: &'static str,
}

// SAFETY: a function handle may be used from any thread; it never changes.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The arguments of one launch, in order.
#[derive(Default)]
pub struct LaunchArgs<'a>(Vec<*mut c_void>, PhantomData<&'a ()>);

impl<'a> LaunchArgs<'a> {
    /// No argument yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an argument. Its type must have the layout of the kernel's parameter.
    pub fn arg<T: bytemuck::Pod>(mut self, v: &'a T) -> Self {
        self.0.push(std::ptr::from_ref(v).cast_mut().cast());
        self
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
}

impl Grid {
    /// `blocks` of `threads`, without dynamic shared memory.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0 }
    }

    /// The same with `shared_bytes` of dynamic shared memory.
    #[must_use]
    pub fn shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }
}

impl Kernel {
    /// Allows blocks with `shared_bytes` of dynamic shared memory: above 48 KiB it must be asked
    /// for, once, before the first launch.
    ///
    /// # Errors
    /// `InvalidArgument` if the device has less.
    pub fn allow_shared(&self, shared_bytes: u32) -> Result<()> {
        self.module.0.ctx.bind()?;
        let what = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a live function.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, what, shared_bytes as i32) };
        check(code, "cuFuncSetAttribute").map_err(|e| e.phase(self.name).seen(shared_bytes))
    }

    /// Blocks of this shape that one multiprocessor holds at once.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn blocks_per_sm(&self, grid: Grid) -> Result<u32> {
        self.module.0.ctx.bind()?;
        let mut num = 0;
        let shared = grid.shared_bytes as usize;
        // SAFETY: a live function and a valid output.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut num,
                self.raw,
                grid.threads as i32,
                shared,
            )
        };
        check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
            .map_err(|e| e.phase(self.name))?;
        Ok(num as u32)
    }

    /// Queues the kernel.
    ///
    /// # Safety
    /// The arguments must be those that the kernel takes, and what they point to must be alive
    /// until it has run (and be held by the graph if captured).
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: Grid,
        mut args: LaunchArgs<'_>,
    ) -> Result<()> {
        self.module.0.ctx.bind()?;
        stream.hold(|| Arc::new(self.module.clone()));
        // SAFETY: the caller's contract; the driver copies the arguments before it returns.
        let code = unsafe {
            sys::cuLaunchKernel(
                self.raw,
                grid.blocks[0],
                grid.blocks[1],
                grid.blocks[2],
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                stream.raw(),
                args.0.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(code, "cuLaunchKernel").map_err(|e| e.phase(self.name))
    }
}
