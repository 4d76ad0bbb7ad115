//! The harness's side of the emulator: its runtime, libraries with kernels, and launches.
//!
//! A kernel reads and writes what its arguments say. Here that is a `Memory`, which lies between
//! pages that cannot be touched; the runtime reports an access outside as an error of the run.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::panic_any;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

use bytemuck::NoUninit;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::compile::{self, Refused, Unit};
use crate::planted;

type Entry = unsafe extern "C" fn(*mut *mut c_void);
type SmemOf = unsafe extern "C" fn(*mut u32) -> *mut u8;
type RawHook = unsafe extern "C" fn(*mut c_void, *const RawEvent) -> bool;

#[repr(C)]
pub struct RawEvent {
    pub op: *const c_char,
    pub kernel: *const c_char,
    pub addr: u64,
    pub rank: u32,
    pub block: u32,
    pub thread: u32,
    pub pad: u32,
}

#[repr(C)]
pub struct RawRegion {
    pub name: *const c_char,
    pub base: u64,
    pub len: u64,
    pub rank: u32,
    pub pad: u32,
}

#[repr(C)]
pub struct RawLaunch {
    pub entry: Entry,
    pub smem_of: SmemOf,
    pub args: *const *mut c_void,
    pub kernel: *const c_char,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub smem: u32,
    pub cluster: u32,
}

#[repr(C)]
pub struct RawStream {
    pub launches: *const RawLaunch,
    pub len: u32,
    pub rank: u32,
    pub worker: u32,
    pub pad: u32,
}

/// What a run did.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stats {
    /// Memory operations and meetings.
    pub steps: u64,
    /// From one thread of a kernel to another.
    pub switches: u64,
    /// Hash of the order in which threads ran.
    pub trace: u64,
    /// The kernels' clock at the end.
    pub now_ns: u64,
}

#[repr(C)]
pub struct RawRun {
    pub streams: *const RawStream,
    pub regions: *const RawRegion,
    pub hook: Option<RawHook>,
    pub hook_ctx: *mut c_void,
    pub message: *mut u8,
    pub message_len: u64,
    pub seed: u64,
    pub max_steps: u64,
    pub deadline_ns: u64,
    pub tick_ns: u64,
    pub num_streams: u32,
    pub num_regions: u32,
    pub workers: u32,
    pub resident: u32,
    pub yield_permille: u32,
    pub no_views: u32,
    pub warp_pauses: u32,
    pub pad: u32,
    pub stats: Stats,
}

/// The functions of one build of the runtime.
pub struct Runtime {
    library: PathBuf,
    pub run: unsafe extern "C" fn(*mut RawRun) -> bool,
    pub map: unsafe extern "C" fn(*const c_int, u32, u64, u64) -> *mut u8,
    pub unmap: unsafe extern "C" fn(*mut u8, u32, u64),
    pub memory: unsafe extern "C" fn(u64) -> c_int,
    pub close: unsafe extern "C" fn(c_int),
}

/// The runtime of all tests but one.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::build(&["-O2"]));

/// Loads a library for the rest of the process.
fn open(path: &Path) -> &'static Library {
    // SAFETY: the library was compiled from this repository; it has no initialisers.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    match library {
        Ok(library) => Box::leak(Box::new(library)),
        Err(e) => panic_any(Refused(format!("{}: {e}", path.display()))),
    }
}

/// A function of `library`. `T` is the function's type.
fn symbol<T: Copy>(library: &'static Library, name: &str) -> T {
    // SAFETY: every caller gives the type that abi.h or emu.h declares for that name.
    match unsafe { library.get::<T>(name.as_bytes()) } {
        Ok(it) => *it,
        Err(e) => panic_any(Refused(e.to_string())),
    }
}

impl Runtime {
    pub fn build(flags: &[&str]) -> Self {
        let path = compile::runtime(flags);
        let library = open(&path);
        let mut sizes = [0u32; 5];
        let abi: unsafe extern "C" fn(*mut u32) = symbol(library, "emu_abi");
        // SAFETY: it writes five numbers.
        unsafe { abi(sizes.as_mut_ptr()) };
        let ours = [
            size_of::<RawEvent>(),
            size_of::<RawRegion>(),
            size_of::<RawLaunch>(),
            size_of::<RawStream>(),
            size_of::<RawRun>(),
        ];
        assert_eq!(sizes.map(|s| s as usize), ours, "the structures of abi.h");
        Self {
            run: symbol(library, "emu_run"),
            map: symbol(library, "emu_map"),
            unmap: symbol(library, "emu_unmap"),
            memory: symbol(library, "emu_memory"),
            close: symbol(library, "emu_close"),
            library: path,
        }
    }

    /// Compiles and loads `unit`; a broken text not before a scenario asks for its kernels, and
    /// once for all that the scenario does with it.
    pub fn load(&'static self, unit: &Unit) -> &'static Lib {
        let new = || {
            let (unit, parts) = (unit.clone(), Mutex::new(Vec::new()));
            &*Box::leak(Box::new(Lib { runtime: self, unit, parts }))
        };
        if planted::is_broken(&unit.text) {
            return planted::loaded(unit, new);
        }
        let lib = new();
        lib.compile(&unit.kernels);
        lib
    }
}

/// The kernels of a unit, in a library, or in two where the text is broken: what its scenario asks
/// for first, and all others.
pub struct Lib {
    runtime: &'static Runtime,
    unit: Unit,
    parts: Mutex<Vec<Part>>,
}

/// A library, and the kernels that are in it.
struct Part {
    library: &'static Library,
    kernels: Vec<&'static str>,
}

/// A kernel of a [`Lib`].
pub struct Kernel {
    lib: &'static Lib,
    entry: Entry,
    smem_of: SmemOf,
    name: CString,
    arg_sizes: Vec<u32>,
    max_threads: u32,
}

impl Lib {
    pub fn runtime(&self) -> &'static Runtime {
        self.runtime
    }

    /// What was compiled.
    pub fn text(&self) -> &str {
        &self.unit.text
    }

    fn compile(&self, kernels: &[&'static str]) -> &'static Library {
        let unit = Unit { kernels: kernels.to_vec(), ..self.unit.clone() };
        let broken = planted::is_broken(&unit.text);
        let library = open(&compile::kernels(&unit, &self.runtime.library, broken));
        self.parts.lock().unwrap().push(Part { library, kernels: unit.kernels });
        library
    }

    /// The library with the kernel `name`.
    fn library_with(&self, name: &str) -> &'static Library {
        let there = |p: &Part| p.kernels.contains(&name);
        if let Some(part) = self.parts.lock().unwrap().iter().find(|p| there(p)) {
            return part.library;
        }
        assert!(self.unit.kernels.contains(&name), "{}: no kernel {name}", self.unit.name);
        // Kernels that the scenario has asked for before, with other broken texts. If it asks for
        // more, all others at once: two libraries are the most.
        let asked = planted::asked(&self.unit, name);
        let first = self.parts.lock().unwrap().is_empty() && asked.contains(&name);
        let others = |k: &&str| !self.parts.lock().unwrap().iter().any(|p| p.kernels.contains(k));
        let rest: Vec<_> = self.unit.kernels.iter().copied().filter(others).collect();
        self.compile(if first { &asked } else { &rest })
    }

    /// The kernel `name`.
    pub fn kernel(&'static self, name: &str) -> Kernel {
        let library = self.library_with(name);
        let mut arg_sizes = vec![0u32; 64];
        let args: unsafe extern "C" fn(*mut u32) -> u32 =
            symbol(library, &format!("emu_args_{name}"));
        // SAFETY: it writes one number for each parameter, and no kernel has 64.
        let num = unsafe { args(arg_sizes.as_mut_ptr()) };
        arg_sizes.truncate(num as usize);
        Kernel {
            lib: self,
            entry: symbol(library, &format!("emu_entry_{name}")),
            smem_of: symbol(library, "emu_smem"),
            name: CString::new(name).unwrap(),
            arg_sizes,
            max_threads: self.launch_bound(name),
        }
    }

    /// N of `__launch_bounds__(N) name(` or `__launch_bounds__(N, M) name(`, or what a block may
    /// have at most.
    fn launch_bound(&self, name: &str) -> u32 {
        let head = self.unit.text.split(&format!(" {name}(")).next().unwrap_or("");
        let bound = head.rsplit_once("__launch_bounds__(").map(|(_, rest)| rest);
        let bound = bound.and_then(|b| b.strip_suffix(')')?.split(',').next()?.parse().ok());
        bound.unwrap_or(1024)
    }

    /// A message with `@line@` replaced by the line and its text.
    pub fn explain(&self, message: &str) -> String {
        let mut out = String::new();
        for (i, part) in message.split('@').enumerate() {
            match (i % 2, part.parse::<usize>()) {
                (1, Ok(n)) => {
                    let line = self.unit.text.lines().nth(n.wrapping_sub(1)).unwrap_or("").trim();
                    out += &format!("(line {n}: {line})");
                }
                _ => out += part,
            }
        }
        out
    }
}

impl Kernel {
    /// A launch with one block of `threads` threads.
    pub fn launch(&self, threads: u32) -> Launch<'_> {
        self.grid([1, 1, 1], [threads, 1, 1])
    }

    pub fn grid(&self, grid: [u32; 3], block: [u32; 3]) -> Launch<'_> {
        let (words, starts, sizes) = (Vec::new(), Vec::new(), Vec::new());
        Launch { kernel: self, grid, block, smem: 0, cluster: 1, words, starts, sizes }
    }
}

/// A kernel with its grid and arguments.
#[derive(Clone)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    grid: [u32; 3],
    block: [u32; 3],
    smem: u32,
    cluster: u32,
    /// The arguments, each from a multiple of 16 bytes on: kernels copy large ones so.
    words: Vec<u64>,
    starts: Vec<usize>,
    sizes: Vec<u32>,
}

impl Launch<'_> {
    /// The next argument. Addresses are passed as `u64`.
    pub fn arg<T: NoUninit>(mut self, value: &T) -> Self {
        assert!(align_of::<T>() <= 8, "arguments are aligned to 8 bytes");
        self.words.resize(self.words.len().next_multiple_of(2), 0);
        self.starts.push(self.words.len());
        self.sizes.push(size_of::<T>() as u32);
        for bytes in bytemuck::bytes_of(value).chunks(8) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.words.push(u64::from_ne_bytes(word));
        }
        self
    }

    /// Bytes of dynamic shared memory.
    pub fn smem(mut self, len_bytes: u32) -> Self {
        self.smem = len_bytes;
        self
    }

    /// Blocks of a cluster, which follow each other in x.
    pub fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    pub fn lib(&self) -> &'static Lib {
        self.kernel.lib
    }

    pub fn name(&self) -> &str {
        self.kernel.name.to_str().unwrap()
    }

    /// Why no device would take this launch.
    pub fn problem(&self) -> Option<String> {
        let (k, mut capacity) = (self.kernel, 0);
        // SAFETY: it writes one number.
        unsafe { (k.smem_of)(&raw mut capacity) };
        let threads: u32 = self.block.iter().product();
        let what = if threads == 0 || self.grid.contains(&0) {
            "an empty grid".to_owned()
        } else if threads > k.max_threads {
            format!("{threads} threads, its bound is {}", k.max_threads)
        } else if self.sizes != k.arg_sizes {
            format!("arguments of {:?} bytes, it takes {:?}", self.sizes, k.arg_sizes)
        } else if !self.grid[0].is_multiple_of(self.cluster) {
            format!("{} blocks in clusters of {}", self.grid[0], self.cluster)
        } else if self.smem > capacity {
            format!("{} bytes of shared memory, of {capacity}", self.smem)
        } else {
            return None;
        };
        Some(format!("{}: {what}", k.name.to_string_lossy()))
    }

    /// Where the arguments lie, as kernels get them.
    pub fn pointers(&self) -> Vec<*mut c_void> {
        self.starts.iter().map(|s| self.words[*s..].as_ptr().cast_mut().cast()).collect()
    }

    pub fn raw(&self, args: &[*mut c_void]) -> RawLaunch {
        RawLaunch {
            entry: self.kernel.entry,
            smem_of: self.kernel.smem_of,
            args: args.as_ptr(),
            kernel: self.kernel.name.as_ptr(),
            grid: self.grid,
            block: self.block,
            smem: self.smem,
            cluster: self.cluster,
        }
    }
}
