//! Kernels: from text to machine code, at most once.
//!
//! A [`KernelSpec`] (text, definitions, architecture) has a [`Key`]. [`Jit::cubin`] looks for its
//! machine code in this order, and says where it came from:
//!
//! 1. **embedded**: files that were built with the program, in a folder beside it, or in one that
//!    it names ([`look_in`]);
//! 2. **cached**: the user's disk cache (see [`Cache`]), filled by earlier runs;
//! 3. **compiled**: NVRTC, opened at run time; the result goes into the cache.
//!
//! Processes that start together on an empty cache compile each kernel once: the first takes a
//! lock, the others wait for it and read. A cache that cannot be written, is full or damaged
//! never makes a kernel unavailable: it costs a compilation, and one warning.
//!
//! No GPU is needed for any of this; `tilewire kernels compile` does it anywhere.

mod cache;
mod elf;
mod key;
mod log;
#[cfg(test)]
mod tests;
mod times;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{Config, Error, ErrorKind, JitMode, Result};

pub use cache::{Cache, CacheUsage};
pub(crate) use elf::is_whole;
pub use key::{KernelSpec, Key};
pub use log::{KernelUse, kernel_uses};
pub(crate) use times::Busy;
use times::Clock;
pub use times::KernelTimes;

/// A compiler's result for a spec.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// ELF machine code.
    pub cubin: Vec<u8>,
    /// Messages: registers and spills of each kernel, warnings.
    pub log: String,
}

/// Something that compiles kernels: NVRTC, or what a test puts in its place.
pub trait Compiler: Send + Sync {
    /// Name and version, as in a file name: `nvrtc13.0`.
    ///
    /// # Errors
    /// `Unavailable` if there is no compiler here.
    fn version(&self) -> Result<String>;

    /// Compiles.
    ///
    /// # Errors
    /// `Internal` with the compiler's messages.
    fn compile(&self, spec: &KernelSpec) -> Result<Compiled>;
}

/// The source of machine code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Built with the program.
    Embedded,
    /// The disk cache.
    Cached,
    /// The compiler, just now.
    Compiled,
}

/// Returns whether `dir` holds the whole machine code of a kernel that was built with the program.
pub fn is_built_in(dir: &Path, key: &Key) -> bool {
    matches!(built_in(dir, key), Some(Ok(_)))
}

/// The file of a kernel that was built with the program, or what is wrong with it; none if there is
/// no such file.
fn built_in(dir: &Path, key: &Key) -> Option<Result<Vec<u8>, String>> {
    let path = dir.join(format!("{key}.cubin"));
    let cubin = std::fs::read(&path).ok()?;
    let wrong = || format!("{} is truncated or no machine code", path.display());
    Some(if is_whole(&cubin) { Ok(cubin) } else { Err(wrong()) })
}

/// Folders that the program has named.
static NAMED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Contexts that are made from now on look for kernels that were built with the program in `dir`,
/// too: for a library that a program such as an interpreter loads, whose own folder is not ours.
pub fn look_in(dir: impl Into<PathBuf>) {
    let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = dir.into();
    if !named.contains(&dir) {
        named.push(dir);
    }
}

/// Finds or makes machine code.
pub struct Jit {
    mode: JitMode,
    /// Folders with `<key>.cubin` files that were built with the program.
    embedded: Vec<PathBuf>,
    cache: Result<Cache>,
    compiler: Arc<dyn Compiler>,
    /// A cache that does not work is worth one warning.
    warned: Mutex<bool>,
    clock: Clock,
}

impl Jit {
    /// As `config` says, with NVRTC, the folder `cubins` beside the program, and those of
    /// [`look_in`].
    pub fn new(config: &Config) -> Self {
        let beside = std::env::current_exe().ok();
        let beside = beside.and_then(|p| Some(p.parent()?.join("cubins")));
        let named = NAMED.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Self::with(
            config.jit,
            beside.into_iter().chain(named).collect(),
            Cache::open(config.cache_dir.as_deref()),
            Arc::new(crate::cuda::Nvrtc),
        )
    }

    /// Of given parts.
    pub fn with(
        mode: JitMode,
        embedded: Vec<PathBuf>,
        cache: Result<Cache>,
        compiler: Arc<dyn Compiler>,
    ) -> Self {
        Self { mode, embedded, cache, compiler, warned: Mutex::new(false), clock: Clock::default() }
    }

    /// The machine code of `spec`, and where it came from.
    ///
    /// # Errors
    /// `Unavailable` if it is neither embedded nor cached and there is no compiler, or compiling
    /// is switched off. `Internal` with the compiler's messages.
    pub fn cubin(&self, spec: &KernelSpec) -> Result<(Vec<u8>, Origin)> {
        let _busy = self.busy();
        self.get(spec).inspect(|(_, origin)| self.clock.count(*origin))
    }

    /// Returns how many kernels were asked for so far, and how long it took.
    pub fn times(&self) -> KernelTimes {
        self.clock.times()
    }

    /// Work on kernels, which counts as such until what is returned goes.
    pub(crate) fn busy(&self) -> Busy<'_> {
        self.clock.busy()
    }

    fn get(&self, spec: &KernelSpec) -> Result<(Vec<u8>, Origin)> {
        let key = spec.key();
        let mut unusable = None;
        for dir in &self.embedded {
            match built_in(dir, &key) {
                Some(Ok(cubin)) => return Ok((cubin, Origin::Embedded)),
                Some(Err(why)) => {
                    ::log::warn!("{why}; this file is not used");
                    unusable = Some(why);
                }
                None => {}
            }
        }
        let version = match self.mode {
            JitMode::Off => Err(Error::new(
                ErrorKind::Unavailable,
                match unusable {
                    Some(why) => format!("kernel `{}` for {}: {why}", spec.name, spec.arch),
                    None => format!("kernel `{}` for {} is not built in", spec.name, spec.arch),
                },
            )
            .hint("compiling is switched off (TILEWIRE_JIT=off): set it to auto")),
            JitMode::Auto => self.compiler.version(),
        };
        let cache = self.cache.as_ref().inspect_err(|e| self.warn(e)).ok();
        let version = match version {
            Ok(v) => v,
            // Whatever compiler made it: better than nothing.
            Err(none) => {
                let any = cache.and_then(|c| c.load_any(&key));
                return any.map(|cubin| (cubin, Origin::Cached)).ok_or(none);
            }
        };
        let Some(cache) = cache else {
            return Ok((self.compiler.compile(spec)?.cubin, Origin::Compiled));
        };
        if let Some(cubin) = cache.load(&key, &version) {
            return Ok((cubin, Origin::Cached));
        }
        // Another process may be at it; it may also hang: then both compile.
        let _lock = cache.lock(&key).inspect_err(|e| self.warn(e)).ok();
        if let Some(cubin) = cache.load(&key, &version) {
            return Ok((cubin, Origin::Cached));
        }
        let cubin = self.compiler.compile(spec)?.cubin;
        if let Err(e) = cache.store(&key, &version, &cubin) {
            self.warn(&e);
        }
        Ok((cubin, Origin::Compiled))
    }

    /// Returns whether [`Jit::cubin`] would compile `spec`: it is neither embedded nor cached, and
    /// there is a compiler.
    pub fn would_compile(&self, spec: &KernelSpec) -> bool {
        let key = spec.key();
        if self.mode == JitMode::Off || self.embedded.iter().any(|dir| is_built_in(dir, &key)) {
            return false;
        }
        let Ok(version) = self.compiler.version() else { return false };
        !self.cache.as_ref().is_ok_and(|c| c.holds(&key, &version))
    }

    /// The disk cache.
    ///
    /// # Errors
    /// Why there is none.
    pub fn cache(&self) -> Result<&Cache> {
        self.cache.as_ref().map_err(Error::clone)
    }

    fn warn(&self, e: &Error) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *warned, true) {
            ::log::warn!(
                "the kernel cache cannot be used, so that kernels are compiled in every run: {e}"
            );
        }
    }
}
