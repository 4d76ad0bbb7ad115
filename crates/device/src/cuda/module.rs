//! Loaded machine code and its kernels.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUmodule};
use tilewire_core::{Error, ErrorKind, Result};

use super::context::CudaContext;
use super::error::check;
use super::stream::CudaStream;
use super::tensor_map::{RawTensorMap, TensorMap};
use crate::jit::is_whole;

/// Machine code loaded into a context.
#[derive(Clone)]
pub struct CudaModule(Arc<Inner>);

struct Inner {
    ctx: CudaContext,
    raw: CUmodule,
    /// Held while it is changed what a kernel's blocks may have.
    allowing: Mutex<()>,
}

// SAFETY: a module may be used from any thread; the handle never changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaModule {
    /// Loads a cubin.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not all there; what the driver reports, for instance code for
    /// another architecture.
    pub fn load(ctx: &CudaContext, cubin: &[u8]) -> Result<Self> {
        if !is_whole(cubin) {
            return Err(Error::invalid("the kernel's machine code is missing or truncated")
                .expected("a whole ELF file")
                .seen(format_args!("{} bytes", cubin.len())));
        }
        let _current = ctx.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a whole file, so that the driver reads nothing behind it; it copies it.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) };
        check(code, "cuModuleLoadData")?;
        Ok(Self(Arc::new(Inner { ctx: ctx.clone(), raw, allowing: Mutex::new(()) })))
    }

    /// The kernel `name`, loaded at once: a lazy load at the first launch may wait for kernels
    /// that are running, and they may wait for this one.
    ///
    /// # Errors
    /// If there is no such kernel.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let _current = self.0.ctx.bind()?;
        let c = CString::new(name)
            .map_err(|_| Error::invalid("the kernel's name contains a zero byte"))?;
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
        if let Ok(_current) = self.ctx.bind() {
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

    /// Adds a tensor map, of a kernel that takes one by value. What it describes must be alive
    /// until the kernel has run: give a clone of the map to [`CudaStream::hold`].
    pub fn map(mut self, map: &'a TensorMap) -> Self {
        self.0.push(std::ptr::from_ref(map.raw()).cast_mut().cast());
        self
    }

    /// Adds a tensor map of an address, of a kernel that takes one by value. The memory there must
    /// be alive until the kernel has run.
    pub fn raw_map(mut self, map: &'a RawTensorMap) -> Self {
        self.0.push(std::ptr::from_ref(map.raw()).cast_mut().cast());
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
    /// Blocks of a cluster in x, y and z, which run at once and reach each other's shared memory.
    /// They divide `blocks`, and are at most 8 in all. `[1, 1, 1]` is no cluster.
    pub cluster: [u32; 3],
    /// See [`Grid::early`].
    pub early: bool,
}

/// The most blocks of a cluster that every device with clusters takes.
const MAX_CLUSTER: u64 = 8;

impl Grid {
    /// `blocks` of `threads`, without dynamic shared memory.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0, cluster: [1; 3], early: false }
    }

    /// The same with `shared_bytes` of dynamic shared memory.
    #[must_use]
    pub fn shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// The same in clusters of `cluster` blocks.
    #[must_use]
    pub fn clusters(self, cluster: [u32; 3]) -> Self {
        Self { cluster, ..self }
    }

    /// The same, to begin while the kernel before it in the stream ends: when each block of that
    /// has ended or has allowed it (`griddepcontrol.launch_dependents`), for which it need not know
    /// what follows. The kernel must wait (`griddepcontrol.wait`) before it touches memory that
    /// others know. Devices before sm_90 take no notice.
    #[must_use]
    pub fn early(self) -> Self {
        Self { early: true, ..self }
    }

    /// Refuses clusters that no launch on a device of compute capability `sm` can have.
    fn check_cluster(&self, sm: u32) -> Result<()> {
        if self.cluster == [1; 3] {
            return Ok(());
        }
        let num = self.cluster.iter().fold(1u64, |num, &n| num.saturating_mul(u64::from(n)));
        if !(1..=MAX_CLUSTER).contains(&num) {
            return Err(Error::invalid("the size of a cluster is out of range")
                .expected(format_args!("1 to {MAX_CLUSTER} blocks"))
                .seen(format_args!("{:?}", self.cluster)));
        }
        if self.blocks.iter().zip(&self.cluster).any(|(b, c)| b % c != 0) {
            return Err(Error::invalid(
                "the number of blocks is no multiple of the cluster's size",
            )
            .expected(format_args!("multiples of {:?}", self.cluster))
            .seen(format_args!("{:?}", self.blocks)));
        }
        if sm < 90 {
            let text = "this device does not support clusters of blocks";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .expected("sm_90 or newer")
                .seen(format_args!("sm_{sm}"))
                .hint("launch without clusters there"));
        }
        Ok(())
    }
}

impl Kernel {
    /// Allows blocks with `shared_bytes` of dynamic shared memory: above 48 KiB it must be asked
    /// for, once, before the first launch. What was allowed before stays so: plans of one device
    /// share their kernels.
    ///
    /// # Errors
    /// `Unsupported` if the device has less.
    pub fn allow_shared(&self, shared_bytes: u32) -> Result<()> {
        let available = self.module.0.ctx.max_shared_bytes()?;
        if shared_bytes > available {
            let text =
                format!("a block of {} needs more shared memory than this device has", self.name);
            return Err(Error::new(ErrorKind::Unsupported, text)
                .expected(format_args!("{shared_bytes} bytes"))
                .seen(format_args!("at most {available}"))
                .hint("use a smaller shape, or a GPU with more (sm_80, sm_90 and sm_100 have)"));
        }
        let _current = self.module.0.ctx.bind()?;
        let what = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let _one = self.module.0.allowing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = 0;
        // SAFETY: a live function and a valid output.
        let code = unsafe { sys::cuFuncGetAttribute(&mut before, what, self.raw) };
        check(code, "cuFuncGetAttribute").map_err(|e| e.phase(self.name))?;
        if u32::try_from(before).is_ok_and(|before| before >= shared_bytes) {
            return Ok(());
        }
        // SAFETY: a live function.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, what, shared_bytes as i32) };
        check(code, "cuFuncSetAttribute").map_err(|e| e.phase(self.name).seen(shared_bytes))
    }

    /// Blocks of this shape that one multiprocessor holds at once.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn blocks_per_sm(&self, grid: Grid) -> Result<u32> {
        let _current = self.module.0.ctx.bind()?;
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
        let sm = self.module.0.ctx.sm();
        grid.check_cluster(sm).map_err(|e| e.phase(self.name))?;
        let _current = self.module.0.ctx.bind()?;
        stream.hold(|| Arc::new(self.module.clone()));
        if grid.cluster != [1; 3] || (grid.early && sm >= 90) {
            // SAFETY: the caller's contract.
            return unsafe { self.launch_with(stream, grid, args) };
        }
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

    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch_with(
        &self,
        stream: &CudaStream,
        grid: Grid,
        mut args: LaunchArgs<'_>,
    ) -> Result<()> {
        use sys::CUlaunchAttributeID as Id;
        let [x, y, z] = grid.cluster;
        let clusters = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::with_capacity(2);
        if grid.cluster != [1; 3] {
            let value = sys::CUlaunchAttributeValue { clusterDim: clusters };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        if grid.early {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            let id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes.push(attribute(id, value));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let args = args.0.as_mut_ptr();
        // SAFETY: the caller's contract; the driver copies the arguments and the configuration.
        let code = unsafe { sys::cuLaunchKernelEx(&config, self.raw, args, std::ptr::null_mut()) };
        check(code, "cuLaunchKernelEx").map_err(|e| e.phase(self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_that_cannot_be_are_refused_before_the_driver() {
        let grid = |blocks, cluster| Grid { blocks, ..Grid::new(1, 32).clusters(cluster) };
        let kind = |g: Grid, sm| g.check_cluster(sm).map_err(|e| e.kind());
        kind(grid([8, 4, 2], [4, 2, 1]), 90).unwrap();
        kind(grid([8, 1, 1], [8, 1, 1]), 100).unwrap();
        kind(grid([5, 3, 1], [1; 3]), 80).unwrap();
        for cluster in [[16, 1, 1], [3, 3, 1], [0, 1, 1], [u32::MAX; 3]] {
            let blocks = cluster.map(|c| c.max(1));
            assert_eq!(kind(grid(blocks, cluster), 90), Err(ErrorKind::InvalidArgument));
        }
        assert_eq!(kind(grid([6, 1, 1], [4, 1, 1]), 90), Err(ErrorKind::InvalidArgument));
        assert_eq!(kind(grid([4, 3, 1], [2, 2, 1]), 90), Err(ErrorKind::InvalidArgument));
        assert_eq!(kind(grid([4, 1, 1], [2, 1, 1]), 89), Err(ErrorKind::Unsupported));
    }
}
