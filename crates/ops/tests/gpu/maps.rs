//! Tensor maps and clusters as they come to the driver and to a kernel: on an emulated device
//! (`kernels/emu/driver`), and where there is one on a GPU, whose driver must refuse the same.

use std::ffi::{c_int, c_void};

use libloading::os::unix::{Library, RTLD_NOW};
use tilewire_core::{DType, ErrorKind};
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaModule, CudaStream, Grid, LaunchArgs, MapPromotion, MapSwizzle,
    Nvrtc, RawTensorMap, TensorMap, TensorMapDesc,
};
use tilewire_device::jit::{Compiler, KernelSpec};
use tilewire_device::{Buffer, Queue};
use tilewire_testing::{Lack, WORDS, did_not_run};

use crate::driver::Driver;

/// `tw_maps`: the words of two maps, and how far their addresses are from a multiple of 64.
/// `tw_meet`: the number of blocks that each has seen begin, until all have or much time is over.
const TEXT: &str = r#"
#ifdef TW_EMU_SMEM
#define __nanosleep emu_sleep
#endif
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void tw_maps(const __grid_constant__ Map a, const __grid_constant__ Map b, unsigned long long* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = a.words[threadIdx.x], out[16 + threadIdx.x] = b.words[threadIdx.x];
    if (threadIdx.x == 0) out[32] = (unsigned long long)&a % 64, out[33] = (unsigned long long)&b % 64;
}
extern "C" __global__ void tw_meet(unsigned* out) {
    if (threadIdx.x != 0) return;
    unsigned seen = atomicAdd(out, 1u) + 1;
    for (int i = 0; i < 100000 && seen < gridDim.x; i++) {
        __nanosleep(100);
        seen = atomicAdd(out, 0u);
    }
    out[1 + blockIdx.x] = seen;
}
"#;

fn spec(ctx: &CudaContext) -> KernelSpec {
    let (name, text) = ("maps.cu".into(), TEXT.into());
    KernelSpec { name, text, defines: Vec::new(), arch: ctx.arch().unwrap() }
}

/// A device with tensor maps and a compiler, and the kernels.
#[track_caller]
fn device() -> Option<(CudaContext, CudaModule)> {
    let ctx = crate::common::gpu().map(|_| CudaContext::new(0).unwrap())?;
    let any = TensorMapDesc::matrix(DType::F32, [1, 16], [1, 16]);
    if let Err(e) = RawTensorMap::at(&ctx, 0, 64, &any) {
        assert!(e.kind() == ErrorKind::Unsupported && e.get_hint().is_some(), "{e}");
        did_not_run(Lack::Sm90, e);
        return None;
    }
    match ctx.module(&spec(&ctx)) {
        Ok(m) => Some((ctx, m)),
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            did_not_run(Lack::Nvrtc, e);
            None
        }
    }
}

fn is_emulated() -> bool {
    std::env::var_os("TW_EMU_TEXTS").is_some()
}

const TESTS: [&str; 4] = [
    "maps::a_kernel_gets_the_map_that_was_described",
    "maps::the_driver_refuses_what_devices_do_not_copy",
    "maps::blocks_of_a_cluster_are_alive_together",
    "maps::the_emulated_driver_refuses_clusters_that_cannot_be",
];

#[test]
fn maps_and_clusters_come_to_an_emulated_device() {
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    for test in TESTS {
        let mut run = driver.command(std::env::current_exe().unwrap(), 1);
        // One multiprocessor has two blocks alive, or one cluster.
        let out = run.env("TW_EMU_SMS", "1").args(["--exact", test, "--nocapture"]).output();
        let out = out.unwrap();
        let (out_text, err_text) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let good = out.status.success()
            && out_text.contains("test result: ok. 1 passed")
            && !err_text.contains(WORDS);
        assert!(good, "{test}: {:?}\n{out_text}\n{err_text}", out.status);
    }
}

/// The bytes of `EmuTensorMap` in `kernels/emu/abi.h`.
fn emulated_map(d: &TensorMapDesc, addr: u64) -> Vec<u8> {
    let list = |of: &[usize], num: usize| {
        let mut list: Vec<u64> = of.iter().rev().map(|&n| n as u64).collect();
        list.resize(num, 0);
        list
    };
    let element = match d.dtype {
        DType::F32 => 1,
        DType::BF16 => 2,
        DType::F16 => 3,
        _ => 0,
    };
    let swizzle = match d.swizzle {
        MapSwizzle::None => 0,
        MapSwizzle::B32 => 32,
        MapSwizzle::B64 => 64,
        MapSwizzle::B128 => 128,
    };
    let words = [vec![0x7061_6d2d_726f_7374, addr], list(&d.shape, 5), list(&d.strides_bytes, 4)];
    let mut bytes: Vec<u8> = words.concat().iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.extend(list(&d.tile, 5).iter().flat_map(|&n| (n as u16).to_le_bytes()));
    bytes.extend([d.shape.len() as u8, d.dtype.size() as u8, element, swizzle]);
    bytes.resize(128, 0);
    bytes
}

#[test]
fn a_kernel_gets_the_map_that_was_described() {
    let Some((ctx, module)) = device() else { return };
    let (kernel, stream) = (module.kernel("tw_maps").unwrap(), CudaStream::new(&ctx).unwrap());
    let memory = CudaMemory::zeroed(&ctx, 1 << 20).unwrap();
    let out = CudaMemory::filled(&ctx, 34 * 8, 0xa5).unwrap();
    let wide = MapSwizzle::B128;
    let bf16 = TensorMapDesc::matrix(DType::BF16, [100, 200], [64, 64]);
    let descs = [
        bf16,
        TensorMapDesc { swizzle: wide, promotion: MapPromotion::B256, ..bf16 },
        TensorMapDesc::ragged(DType::BF16, 200, 416, [128, 32]),
        TensorMapDesc { swizzle: wide, ..TensorMapDesc::ragged(DType::F32, 64, 256, [16, 32]) },
        TensorMapDesc {
            swizzle: MapSwizzle::B32,
            ..TensorMapDesc::matrix(DType::F16, [9, 16], [8, 16])
        },
        TensorMapDesc { dtype: DType::F8E4M3, swizzle: MapSwizzle::B64, ..bf16 },
        TensorMapDesc {
            swizzle: wide,
            ..TensorMapDesc::ragged(DType::F8E4M3, 256, 512, [128, 128])
        },
        TensorMapDesc {
            dtype: DType::I64,
            shape: [2, 3, 4, 5, 6].into(),
            strides_bytes: [9600, 3200, 480, 48].into(),
            tile: [1, 2, 1, 4, 2].into(),
            ..bf16
        },
    ];
    for (i, d) in descs.iter().enumerate() {
        let map = TensorMap::new(&memory, d).unwrap();
        let raw = RawTensorMap::at(&ctx, memory.addr(), memory.len_bytes(), d).unwrap();
        let addr = out.addr();
        let args = LaunchArgs::new().map(&map).raw_map(&raw).arg(&addr);
        // SAFETY: the kernel takes two maps, which it only reads, and a pointer to 34 words.
        unsafe { kernel.launch(&stream, Grid::new(1, 32), args).unwrap() };
        stream.synchronize_until(None).unwrap();
        let got = out.download().unwrap();
        assert_eq!(got[..128], got[128..256], "map {i}: {d:?}");
        assert_eq!(got[256..], [0; 16], "alignment of map {i}");
        if is_emulated() {
            assert_eq!(got[..128], emulated_map(d, memory.addr())[..], "map {i}: {d:?}");
        } else {
            assert!(got[..128].iter().any(|b| *b != 0) && got[..128] != [0xa5; 128], "map {i}");
        }
    }
}

#[test]
fn blocks_of_a_cluster_are_alive_together() {
    let Some((ctx, module)) = device() else { return };
    let (kernel, stream) = (module.kernel("tw_meet").unwrap(), CudaStream::new(&ctx).unwrap());
    for cluster in [8, 4, 3, 2] {
        let out = CudaMemory::zeroed(&ctx, 4 * (1 + cluster as usize)).unwrap();
        let (addr, grid) = (out.addr(), Grid::new(cluster, 32).clusters([cluster, 1, 1]));
        // SAFETY: the kernel takes a pointer to a word for each block and one more.
        unsafe { kernel.launch(&stream, grid, LaunchArgs::new().arg(&addr)).unwrap() };
        stream.synchronize_until(None).unwrap();
        let seen: Vec<u32> = bytemuck::pod_collect_to_vec(&out.download().unwrap());
        assert!(seen.iter().all(|n| *n == cluster), "a cluster of {cluster}: {seen:?}");
    }
}

/// The driver that this process has loaded.
fn driver() -> Library {
    // SAFETY: it is open already.
    unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW) }.unwrap()
}

/// Makes the context of device 0 current on this thread: some drivers describe no map without one.
fn make_current(lib: &Library) {
    let (mut device, mut ctx): (c_int, *mut c_void) = (0, std::ptr::null_mut());
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type Set = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: the driver's functions, with valid outputs; the context stays as long as the process.
    let codes = unsafe {
        let get = lib.get::<Get>(b"cuDeviceGet\0").unwrap()(&mut device, 0);
        let retain = lib.get::<Retain>(b"cuDevicePrimaryCtxRetain\0").unwrap()(&mut ctx, device);
        [get, retain, lib.get::<Set>(b"cuCtxSetCurrent\0").unwrap()(ctx)]
    };
    assert_eq!(codes, [0; 3]);
}

/// The arguments of `cuTensorMapEncodeTiled`, by the driver's numbers.
#[derive(Clone, Copy)]
struct Encode {
    offset: usize,
    element: u32,
    rank: u32,
    base: u64,
    dims: [u64; 6],
    strides: [u64; 5],
    tile: [u32; 6],
    steps: [u32; 6],
    interleave: u32,
    swizzle: u32,
    fill: u32,
}

type EncodeFn = unsafe extern "C" fn(
    *mut c_void,
    u32,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    u32,
    u32,
    u32,
    u32,
) -> c_int;

impl Encode {
    /// bf16 of 100 rows of 200, in tiles of 64 by 64 that are swizzled by 128 bytes.
    fn good(base: u64) -> Self {
        Self {
            offset: 0,
            element: 9,
            rank: 2,
            base,
            dims: [200, 100, 1, 1, 1, 1],
            strides: [400, 40_000, 40_000, 40_000, 40_000],
            tile: [64, 64, 1, 1, 1, 1],
            steps: [1; 6],
            interleave: 0,
            swizzle: 3,
            fill: 0,
        }
    }

    fn code(&self, lib: &Library) -> c_int {
        #[repr(align(128))]
        struct Out([u8; 256]);
        let mut out = Out([0xa5; 256]);
        let at = out.0[self.offset..].as_mut_ptr().cast();
        let base = std::ptr::without_provenance_mut(self.base as usize);
        // SAFETY: the driver's function, with space for a map and lists of six sizes.
        let code = unsafe {
            let encode = lib.get::<EncodeFn>(b"cuTensorMapEncodeTiled\0").unwrap();
            encode(
                at,
                self.element,
                self.rank,
                base,
                self.dims.as_ptr(),
                self.strides.as_ptr(),
                self.tile.as_ptr(),
                self.steps.as_ptr(),
                self.interleave,
                self.swizzle,
                2,
                self.fill,
            )
        };
        assert!(code == 0 || !is_emulated() || out.0 == [0xa5; 256], "{code}, but a map");
        code
    }
}

const INVALID: c_int = 1;
const UNSUPPORTED: c_int = 801;

#[test]
fn the_driver_refuses_what_devices_do_not_copy() {
    let Some((ctx, _)) = device() else { return };
    let (lib, memory) = (driver(), CudaMemory::zeroed(&ctx, 1 << 20).unwrap());
    if !is_emulated() {
        make_current(&lib);
    }
    let good = Encode::good(memory.addr());
    let code = |change: &dyn Fn(&mut Encode)| {
        let mut call = good;
        change(&mut call);
        call.code(&lib)
    };
    let (row, back) = (400, (1 << 35) - 400);
    type Change = (&'static str, fn(&mut Encode));
    assert_eq!(code(&|_| {}), 0);
    // Strides need no order, and addresses may wrap around.
    assert_eq!(
        code(&|c| {
            c.rank = 4;
            c.dims = [200, 1 << 30, (1 << 31) - (1 << 16), (1 << 31) - (1 << 16), 1, 1];
            c.strides = [row, row, back, 0, 0];
        }),
        0
    );
    let refused: [Change; 13] = [
        ("an address of 8", |c| c.base += 8),
        ("no dimension", |c| c.rank = 0),
        ("six dimensions", |c| c.rank = 6),
        ("a stride of 8", |c| c.strides[0] = 408),
        ("a stride of 2^40", |c| c.strides[0] = 1 << 40),
        ("a size of 0", |c| c.dims[1] = 0),
        ("a size above 2^32", |c| c.dims[1] = (1 << 32) + 1),
        ("a tile of 0", |c| c.tile[1] = 0),
        ("a tile of 257", |c| c.tile[1] = 257),
        ("rows of 8 bytes", |c| c.tile[0] = 4),
        ("rows longer than the swizzle", |c| c.tile[0] = 72),
        ("rows longer than a swizzle of 32 bytes", |c| (c.swizzle, c.tile[0]) = (1, 32)),
        ("a step of 0", |c| c.steps[1] = 0),
    ];
    for (what, change) in refused {
        assert_eq!(code(&change), INVALID, "{what}");
    }
    // Launches read maps at multiples of 64 bytes; the driver of H100 and H200 (580.159) describes
    // them elsewhere, too.
    if is_emulated() {
        assert_eq!(code(&|c| c.offset = 32), INVALID, "a map at half of 64 bytes");
    }
    // Without a swizzle rows are as long as a tile may be.
    assert_eq!(code(&|c| (c.swizzle, c.tile[0]) = (0, 256)), 0);
    let beyond: [Change; 5] = [
        ("every second element", |c| c.steps[0] = 2),
        ("slices of channels", |c| (c.rank, c.interleave, c.swizzle) = (3, 1, 0)),
        ("elements of 4 bits", |c| c.element = 13),
        ("a swizzle of pieces of 32 bytes", |c| c.swizzle = 4),
        ("NaN outside", |c| c.fill = 1),
    ];
    // Drivers of devices differ there.
    for (what, change) in beyond.iter().filter(|_| is_emulated()) {
        assert_eq!(code(change), UNSUPPORTED, "{what}");
    }
}

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: c_int,
    pad: c_int,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: *mut c_void,
    attributes: *mut Attribute,
    num: u32,
}

/// What [`Grid::clusters`] refuses by itself never comes to the driver from there.
#[test]
fn the_emulated_driver_refuses_clusters_that_cannot_be() {
    if !is_emulated() {
        return did_not_run(Lack::Watch, "it needs the driver whose devices are emulated");
    }
    let Some((ctx, module)) = device() else { return };
    let out = CudaMemory::zeroed(&ctx, 4 * 17).unwrap();
    let lib = driver();
    let cubin = Nvrtc.compile(&spec(&ctx)).unwrap().cubin;
    let launch = |grid: [u32; 3], cluster: [u32; 3]| -> c_int {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&cluster);
        let mut attribute = Attribute { id: 4, pad: 0, value };
        let (mut loaded, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
        let stream = std::ptr::null_mut();
        let config = Config {
            grid,
            block: [32, 1, 1],
            shared: 0,
            stream,
            attributes: &mut attribute,
            num: 1,
        };
        let mut addr = out.addr();
        let mut args: [*mut u64; 1] = [&mut addr];
        // SAFETY: the driver's functions, with valid in- and outputs; the kernel takes a pointer.
        unsafe {
            type Load = unsafe extern "C" fn(*mut *mut c_void, *const u8) -> c_int;
            type Get = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const u8) -> c_int;
            type Launch = unsafe extern "C" fn(
                *const Config,
                *mut c_void,
                *mut *mut u64,
                *mut c_void,
            ) -> c_int;
            let load = lib.get::<Load>(b"cuModuleLoadData\0").unwrap();
            let get = lib.get::<Get>(b"cuModuleGetFunction\0").unwrap();
            let launch = lib.get::<Launch>(b"cuLaunchKernelEx\0").unwrap();
            assert_eq!(load(&mut loaded, cubin.as_ptr()), 0);
            assert_eq!(get(&mut kernel, loaded, c"tw_meet".as_ptr().cast()), 0);
            launch(&config, kernel, args.as_mut_ptr(), std::ptr::null_mut())
        }
    };
    assert_eq!(launch([5, 1, 1], [2, 1, 1]), INVALID);
    for cluster in [[16, 1, 1], [0, 1, 1], [4, 2, 2], [1 << 31, 1 << 31, 4]] {
        assert_eq!(launch([16, 4, 4], cluster), 912, "{cluster:?}");
    }
    assert_eq!(launch([2, 2, 1], [1, 2, 1]), UNSUPPORTED);
    // As a launch says it.
    let (stream, addr) = (CudaStream::new(&ctx).unwrap(), out.addr());
    let grid = Grid { blocks: [2, 2, 1], ..Grid::new(1, 32).clusters([1, 2, 1]) };
    let kernel = module.kernel("tw_meet").unwrap();
    // SAFETY: the kernel takes a pointer to a word for each block in x and one more.
    let e = unsafe { kernel.launch(&stream, grid, LaunchArgs::new().arg(&addr)) }.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    assert!(out.download().unwrap().iter().all(|b| *b == 0), "a kernel ran");
}
