//! Helpers of all plans on CUDA devices: the device that a plan was prepared for, checks that its
//! tensors are there, and the loading of its kernels.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use tilewire_core::{DType, Error, ErrorKind, Result};
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaModule, CudaStream, MapPromotion, MapSwizzle, TensorMapDesc,
};
use tilewire_device::jit::KernelSpec;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_kernels::attention::split::SM80_ATTENTION_SPLIT;
use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION};
use tilewire_kernels::hopper::{SUM_BOX, sum_rows};
use tilewire_kernels::{SM80_GEMM, SM80_GROUPED_GEMM, Source, variants};

use super::check::Named;
pub(crate) use super::check::{no_kernel, unsupported};

/// Fewer multiprocessors than any GPU of sm_90a has, or part of one.
const LEAST_SMS: u32 = 8;

/// Returns why `auto` does not take kernels for sm_90a on `ctx`; none if it does: a device of a few
/// multiprocessors has one or two of their large tiles at a time.
///
/// # Errors
/// What the driver reports.
pub(crate) fn too_few_sms(ctx: &CudaContext) -> Result<Option<String>> {
    let num = ctx.num_sms()?;
    let text = || format!("this device has {num} multiprocessors, too few for its tiles");
    Ok((num < LEAST_SMS).then(text))
}

/// Bytes of shared memory that a block has on every GPU of sm_90, of which the kernels for sm_90a
/// take most.
const SM90_SHARED_BYTES: u32 = 227 << 10;

/// The tensor map by which the core for sm_90a adds to f32, rows of which are `ld` elements apart:
/// see `hopper::fits_sum_rows` of the kernels.
pub(crate) fn map_of_sums(size: [usize; 2], ld: usize) -> TensorMapDesc {
    let (shape, strides) = sum_rows(size, ld);
    TensorMapDesc {
        dtype: DType::F32,
        shape: shape.into(),
        strides_bytes: strides.map(|s| 4 * s).into(),
        tile: SUM_BOX.into(),
        swizzle: MapSwizzle::B128,
        promotion: MapPromotion::B256,
        wraps: false,
    }
}

/// Returns why `ctx` does not run `source`, which is for sm_90a; none if it does.
///
/// # Errors
/// What the driver reports.
pub(crate) fn lacks_sm90(ctx: &CudaContext, source: &Source) -> Result<Option<String>> {
    let (arch, shared) = (ctx.arch()?, ctx.max_shared_bytes()?);
    Ok(if !source.runs_on(&arch) {
        Some(format!("it is for sm_90a, and this is {arch}"))
    } else if shared < SM90_SHARED_BYTES {
        let text = "bytes of shared memory for a block, which this device limits to";
        Some(format!("it takes up to {SM90_SHARED_BYTES} {text} {shared}"))
    } else {
        None
    })
}

/// The results of `prepare`: nothing on the host, kernels and workspace (`T`) on a CUDA device. A
/// plan is prepared for one device.
pub(crate) struct Ready<T>(OnceLock<Place<T>>);

enum Place<T> {
    Host,
    Cuda(CudaContext, T),
}

impl<T> Ready<T> {
    pub fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Prepares for the device of `stream`, the first time by `make`.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device; those of
    /// `make`.
    pub fn prepare(
        &self,
        stream: &Stream,
        make: impl FnOnce(&CudaContext) -> Result<T>,
    ) -> Result<()> {
        if stream.is_capturing() {
            return Err(Error::invalid("`prepare` cannot be captured"));
        }
        if self.0.get().is_none() {
            let new = match stream {
                Stream::Host(_) => Place::Host,
                Stream::Cuda(s) => Place::Cuda(s.context().clone(), make(s.context())?),
            };
            // If another thread was first, its value stays.
            let _first = self.0.set(new);
        }
        agree("the stream", self.device(), of_stream(stream))
            .map_err(|e| e.hint("a plan is prepared for one device: make one plan for each"))
    }

    /// Returns the context, and the kernels and workspace made for it, if the plan is prepared for
    /// a CUDA device.
    pub fn cuda(&self) -> Option<(&CudaContext, &T)> {
        match self.0.get() {
            Some(Place::Cuda(ctx, t)) => Some((ctx, t)),
            _ => None,
        }
    }

    /// Returns the ordinal of the device; `None` for the host.
    fn device(&self) -> Option<u32> {
        self.cuda().map(|(ctx, _)| ctx.ordinal())
    }

    /// Returns the kernels and workspace of a launch on `stream` of a CUDA device; `None` on the
    /// host.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` if the plan is prepared for another device.
    pub fn on<'a>(&'a self, stream: &'a Stream) -> Result<Option<(&'a CudaStream, &'a T)>> {
        let Some(place) = self.0.get() else {
            return Err(Error::new(ErrorKind::NotPrepared, "the plan is not prepared")
                .hint("call `plan.prepare(&stream)` first"));
        };
        agree("the stream", self.device(), of_stream(stream))
            .map_err(|e| e.hint("launch on a stream of the device that it was prepared for"))?;
        match (place, stream) {
            (Place::Cuda(_, t), Stream::Cuda(s)) => Ok(Some((s, t))),
            _ => Ok(None),
        }
    }
}

/// Fails unless both are on one device: `want` and `have` are ordinals of CUDA devices, or `None`
/// for the host.
fn agree(what: &str, want: Option<u32>, have: Option<u32>) -> Result<()> {
    let name = |d: Option<u32>| d.map_or("the host".to_owned(), |o| format!("CUDA device {o}"));
    if want == have {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} is on another device"))
        .expected(name(want))
        .seen(name(have)))
}

fn of_stream(stream: &Stream) -> Option<u32> {
    match stream {
        Stream::Host(_) => None,
        Stream::Cuda(s) => Some(s.context().ordinal()),
    }
}

fn of_tensor(t: &Tensor) -> Option<u32> {
    match t.device() {
        Device::Host => None,
        Device::Cuda(ctx) => Some(ctx.ordinal()),
    }
}

/// Checks that all tensors are on the device of `stream`.
///
/// # Errors
/// `InvalidArgument` naming the first tensor that is not.
pub(crate) fn together_on(stream: &Stream, tensors: &[Named<'_>]) -> Result<()> {
    let want = of_stream(stream);
    let given = tensors.iter().filter_map(|&(what, t)| Some((what, t?)));
    for (what, t) in given {
        lies(what, want, of_tensor(t))?;
    }
    Ok(())
}

fn lies(what: &str, want: Option<u32>, have: Option<u32>) -> Result<()> {
    agree(&format!("`{what}`"), want, have)
        .map_err(|e| e.hint("move it with `tensor.to(&device)` before the launch"))
}

/// Returns the address of a tensor on a CUDA device; 0 for no tensor.
pub(crate) fn addr<'a>(t: impl Into<Option<&'a Tensor>>) -> Result<u64> {
    t.into().map_or(Ok(0), |t| Ok(t.cuda()?.addr()))
}

/// Keeps `thing` alive for the work that is queued next, which refers to it by address.
pub(crate) fn hold<T: Any + Send + Sync>(stream: &CudaStream, thing: T) {
    stream.hold(|| -> Arc<dyn Any + Send + Sync> { Arc::new(thing) });
}

/// Queues work that refers to `thing` by address, and keeps `thing` until all of it has run. It
/// holds `thing` before the work and again behind it, because a stream may release an object that
/// was held more than a few kernels or copies before the work that needs it; many chunks, or the
/// tables of many sequences, are more than a few.
pub(crate) fn holding<T: Any + Clone + Send + Sync, R>(
    stream: &CudaStream,
    thing: T,
    queue: impl FnOnce() -> R,
) -> R {
    hold(stream, thing.clone());
    let done = queue();
    hold(stream, thing);
    done
}

/// Loads the kernels of `source`, compiled with `defines` for the device. They must be among
/// [`kernel_specs`], which are compiled ahead for machines without a compiler. Attention alone may
/// load others: it has a variant for each pair of head dimensions.
pub(crate) fn load(
    ctx: &CudaContext,
    source: &Source,
    defines: Vec<(String, u64)>,
) -> Result<CudaModule> {
    let spec = spec(source, defines, &ctx.arch()?);
    let any = [SM80_ATTENTION, SM80_ATTENTION_SPLIT, PLAIN_ATTENTION];
    let any = any.iter().any(|s| s.name == source.name);
    debug_assert!(any || is_listed(&spec), "{} is used in a variant that nobody lists", spec.name);
    ctx.module(&spec)
}

/// Returns one variant of a source for one architecture.
pub(crate) fn spec(source: &Source, defines: Vec<(String, u64)>, arch: &str) -> KernelSpec {
    KernelSpec { name: source.name.to_owned(), text: source.text(), defines, arch: arch.to_owned() }
}

/// By name and definitions alone: the texts of all variants are tens of megabytes, and a plan loads
/// several of them.
fn is_listed(spec: &KernelSpec) -> bool {
    listed(&spec.arch).any(|(source, defines)| source.name == spec.name && defines == spec.defines)
}

/// Returns every kernel of the operations for one architecture (as in `sm_90a`), in each variant
/// that a plan may load. Of attention it returns the usual head dimensions.
pub fn kernel_specs(arch: &str) -> Vec<KernelSpec> {
    listed(arch).map(|(source, defines)| spec(&source, defines, arch)).collect()
}

/// Sources and definitions of [`kernel_specs`].
fn listed(arch: &str) -> impl Iterator<Item = (Source, Vec<(String, u64)>)> {
    let gemm = [SM80_GEMM, SM80_GROUPED_GEMM]
        .into_iter()
        .flat_map(|source| [DType::BF16, DType::F16].map(|d| (source, gemm_defines(d))));
    gemm.chain(variants()).filter(move |(source, _)| source.runs_on(arch))
}

/// Allocates zeroed workspace.
pub(crate) fn workspace(ctx: &CudaContext, len_bytes: usize) -> Result<CudaMemory> {
    CudaMemory::zeroed(ctx, len_bytes)
}

/// Checks extents: kernels count rows, columns and blocks in 32 bits.
pub(crate) fn fit_32_bits(what: &str, numbers: &[usize]) -> Result<()> {
    match numbers.iter().find(|&&n| n > i32::MAX as usize) {
        None => Ok(()),
        Some(n) => Err(Error::invalid(format!("{what} is too large for the kernels"))
            .expected(format_args!("at most {}", i32::MAX))
            .seen(n)),
    }
}

/// Returns the number of mantissa bits, which is how kernels name a type.
pub(crate) fn mantissa(dtype: DType) -> u64 {
    match dtype {
        DType::F16 => 10,
        DType::BF16 => 7,
        DType::F8E4M3 => 3,
        DType::F8E5M2 => 2,
        _ => 23,
    }
}

/// Definitions of the units of `gemm/` and `grouped_gemm/` for operands of `dtype`.
pub(crate) fn gemm_defines(dtype: DType) -> Vec<(String, u64)> {
    vec![("TW_GEMM_F16".to_owned(), u64::from(dtype == DType::F16))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::Shape;

    #[test]
    fn things_of_different_devices_are_refused_with_a_hint() {
        for (want, have) in [(None, Some(0)), (Some(0), None), (Some(0), Some(1))] {
            let e = lies("x", want, have).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains("`x`") && e.get_hint().is_some(), "{e}");
        }
        let t = Tensor::zeros(DType::F32, Shape::d1(1));
        let s = Stream::new("test").unwrap();
        together_on(&s, &[("x", Some(&t)), ("y", None)]).unwrap();
        assert!(lies("x", Some(1), of_tensor(&t)).is_err() && addr(&t).is_err());
        assert_eq!(addr(None).unwrap(), 0);
    }

    #[test]
    fn a_plan_is_prepared_before_it_is_launched() {
        let (ready, s) = (Ready::<()>::new(), Stream::new("test").unwrap());
        let e = ready.on(&s).err().unwrap();
        assert!(e.kind() == ErrorKind::NotPrepared && e.get_hint().is_some());
        s.begin_capture().unwrap();
        assert!(ready.prepare(&s, |_| Ok(())).is_err());
        s.end_capture().unwrap();
        ready.prepare(&s, |_| Ok(())).unwrap();
        assert!(ready.on(&s).unwrap().is_none() && ready.cuda().is_none());
    }

    /// Checks that the list of kernel variants has all definitions that plans pass to `load`,
    /// computed by the functions that the plans use.
    #[test]
    fn every_variant_of_a_plan_is_listed() {
        use tilewire_kernels::portable::*;
        let gemms = DType::ALL.map(gemm_defines);
        for defines in gemms {
            for source in [SM80_GEMM, SM80_GROUPED_GEMM] {
                assert!(is_listed(&spec(&source, defines.clone(), "sm_90a")), "{defines:?}");
            }
        }
        for wide in [DType::F32, DType::BF16, DType::F16].map(mantissa) {
            for small in [DType::F8E4M3, DType::F8E5M2].map(mantissa) {
                assert!(is_listed(&spec(&QUANT, quant_defines(wide, small), "sm_90a")));
            }
            for (source, defines) in [(PERMUTE, permute_defines(wide)), (EP, ep_defines(wide))] {
                assert!(is_listed(&spec(&source, defines, "sm_90a")), "{wide}");
            }
        }
        for types in REDUCE_MANTISSAS {
            assert!(is_listed(&spec(&REDUCE, reduce_defines(types), "sm_90a")), "{types:?}");
        }
        assert!(is_listed(&spec(&MOVE, move_defines(), "sm_90a")));
        for wide in [DType::F32, DType::BF16, DType::F16].map(mantissa) {
            assert!(is_listed(&spec(&COLLECTIVE, collective_defines(wide), "sm_90a")), "{wide}");
        }
        assert!(is_listed(&spec(&EP_BULK, ep_bulk_defines(), "sm_90a")));
        assert!(is_listed(&spec(&EP_RETURN, ep_return_defines(7), "sm_90a")));
        assert!(!is_listed(&spec(&EP_BULK, ep_bulk_defines(), "sm_80")));
        for mut defines in [ep_bulk_defines(), ep_return_defines(7), ep_defines(7)] {
            defines.push((EP_UNEVEN.to_owned(), 1));
            let source =
                [EP_BULK, EP_RETURN, EP].into_iter().find(|s| defines.len() == s.defines.len() + 1);
            assert!(is_listed(&spec(&source.unwrap(), defines, "sm_90a")));
        }
        for wide in [DType::F32, DType::BF16].map(mantissa) {
            assert!(is_listed(&spec(&LAYERS, layers_defines(wide), "sm_90a")), "{wide}");
            assert!(is_listed(&spec(&OPTIMIZER, optimizer_defines(wide), "sm_90a")), "{wide}");
        }
        let all = kernel_specs("sm_90a");
        let mut keys: Vec<String> = all.iter().map(|s| s.key().to_string()).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), all.len(), "a key for each");
        assert!(!is_listed(&spec(&QUANT, quant_defines(3, 2), "sm_90a")));
    }

    /// Checks that each unit which a plan loads is one of [`kernel_specs`].
    #[test]
    fn every_unit_of_a_plan_is_listed() {
        let mut folders =
            vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        let mut text = String::new();
        while let Some(path) = folders.pop() {
            match std::fs::read_dir(&path) {
                Ok(inside) => folders.extend(inside.map(|e| e.unwrap().path())),
                Err(_) => text += &std::fs::read_to_string(&path).unwrap(),
            }
        }
        let call = concat!("load(", "ctx, &");
        let loaded: std::collections::BTreeSet<&str> =
            text.split(call).skip(1).filter_map(|t| t.split(',').next()).collect();
        let listed = [
            "COLLECTIVE",
            "EP",
            "EP_BULK",
            "EP_RETURN",
            "HOPPER_GEMM",
            "HOPPER_GROUPED_GEMM",
            "HOPPER_SKINNY_GEMM",
            "HOPPER_SUM_PARTS",
            "LAYERS",
            "MOVE",
            "OPTIMIZER",
            "PERMUTE",
            "PLAIN_ATTENTION",
            "QUANT",
            "REDUCE",
            "SEQUENCES",
            "SM80_ATTENTION",
            "SM80_ATTENTION_SPLIT",
            "SM80_GEMM",
            "SM80_GROUPED_GEMM",
            "SM90_ATTENTION",
            "SM90_ATTENTION_BWD",
            "SM90_ATTENTION_FP8",
            "SM90_ATTENTION_GATED",
            "SM90_ATTENTION_GRADS",
        ];
        assert_eq!(
            loaded.into_iter().collect::<Vec<_>>(),
            listed,
            "list it, and test its variants"
        );
    }
}
