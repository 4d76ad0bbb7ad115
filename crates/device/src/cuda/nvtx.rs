//! Ranges that profilers show. The library is looked for when the first stream is made; where it is not,
//! nothing happens: it is no part of a driver, and only a profiler has a use for it.
//!
//! The library of CUDA 13 is `libnvtx3interop.so.1`, that of CUDA 12 `libnvToolsExt.so.1`. Either one
//! finds the profiler by itself, by the variable that the profiler sets.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::sync::OnceLock;

use tilewire_core::Result;

use super::library::Lib;
use super::places::{NVTX, Places};

/// Set by profilers: the library of theirs that NVTX calls.
const PROFILER: &str = "NVTX_INJECTION64_PATH";

struct Nvtx {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

static STATE: OnceLock<Option<Nvtx>> = OnceLock::new();

/// Looks for the library, once in a process: [`range`] does not, as launches read no environment.
pub(super) fn load() {
    STATE.get_or_init(|| {
        // Without a profiler nobody misses the ranges.
        let level = match std::env::var_os(PROFILER) {
            Some(_) => log::Level::Warn,
            None => log::Level::Debug,
        };
        let opened = open(&Places::of_process());
        opened.map_err(|e| log::log!(level, "no ranges for the profiler: {e}")).ok()
    });
}

fn open(places: &Places) -> Result<Nvtx> {
    let (spec, found) = places.find_or_older(&NVTX, None)?;
    // SAFETY: the library has no initialisers with preconditions; both functions have these types
    // since its first version.
    unsafe {
        let lib = Lib::open(&found.path, &spec, false)?;
        Ok(Nvtx { push: lib.symbol("nvtxRangePushA")?, pop: lib.symbol("nvtxRangePop")? })
    }
}

impl Nvtx {
    /// The level of the new range.
    fn push(&self, name: &str) -> c_int {
        // With its end, and without an allocation.
        let mut text = [0u8; 48];
        let len = name.len().min(text.len() - 1);
        text[..len].copy_from_slice(&name.as_bytes()[..len]);
        // SAFETY: a string with its end, which the library copies.
        unsafe { (self.push)(text.as_ptr().cast()) }
    }

    fn pop(&self) -> c_int {
        // SAFETY: no preconditions: without a range it is an error code.
        unsafe { (self.pop)() }
    }
}

/// A range of the thread that began it; ends where it is dropped.
pub(super) struct Range(&'static Nvtx, PhantomData<*const ()>);

/// A range, if there is the library.
pub(super) fn range(name: &str) -> Option<Range> {
    let nvtx = STATE.get()?.as_ref()?;
    nvtx.push(name);
    Some(Range(nvtx, PhantomData))
}

impl Drop for Range {
    fn drop(&mut self) {
        self.0.pop();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::places::NVTX_12;
    use super::*;

    #[test]
    fn ranges_nest_where_there_is_the_library() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { system: vec![dir.path().to_owned()], ..Places::default() };
        let e = open(&places).err().unwrap();
        assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
        // That of CUDA 12 is used where the other one is not.
        let lib = dir.path().join(NVTX_12.soname);
        std::fs::write(&lib, "no library").unwrap();
        assert!(open(&places).err().unwrap().is_unavailable());
        let lib = dir.path().join(NVTX.soname);
        // One that answers with the level, or with the length of a name that it was given before.
        let text = "#include <string.h>\nstatic int level;\n\
                    int nvtxRangePushA(const char* s) { level++; return level * 100 + (int)strlen(s); }\n\
                    int nvtxRangePop(void) { return level-- * 100; }\n";
        let source = dir.path().join("nvtx.c");
        std::fs::write(&source, text).unwrap();
        let mut gcc = Command::new("gcc");
        let made = gcc.args(["-shared", "-fPIC", "-o"]).args([&lib, &source]).status();
        assert!(made.is_ok_and(|s| s.success()), "this test needs gcc (apt-get install gcc)");
        let nvtx = open(&places).unwrap();
        assert_eq!((nvtx.push("gemm"), nvtx.push(&"x".repeat(99))), (104, 247));
        assert_eq!((nvtx.pop(), nvtx.pop()), (200, 100));
    }
}
