//! Ranges that profilers show. The library is looked for when the first stream is made; where it is
//! not, nothing happens: it is no part of a driver, and only a profiler has a use for it.
//!
//! The library of CUDA 13 is `libnvtx3interop.so.1`, that of CUDA 12 `libnvToolsExt.so.1`. Either
//! one finds the profiler by itself, by the variable that the profiler sets.

use std::ffi::{c_char, c_int};
use std::marker::PhantomData;
use std::sync::OnceLock;

use tilewire_core::Result;

use super::library::Lib;
use super::library_search::{NVTX, Places};

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

    use super::super::library_search::NVTX_12;
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

    /// A profiler, as NVTX calls it: writes what it sees into a file. The numbers are those of
    /// `nvtxTypes.h`.
    const PROFILER_TEXT: &str = r#"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
typedef void (*Function)(void);
typedef struct { size_t size; int (*table)(int, Function***, unsigned*); } Callbacks;
static int level;
static void say(const char* what, const char* name) {
    FILE* f = fopen(getenv("PROFILER_LOG"), "a");
    fprintf(f, "%s%s\n", what, name);
    fclose(f);
}
static int push(const char* name) { say("push ", name); return level++; }
static int pop(void) { say("pop", ""); return --level; }
int InitializeInjectionNvtx2(const void* (*export_table)(unsigned)) {
    const Callbacks* callbacks = export_table(1);
    Function** table;
    unsigned len;
    if (!callbacks->table(1, &table, &len) || len <= 11) return 0;
    *table[9] = (Function)push;
    *table[11] = (Function)pop;
    return 1;
}
"#;

    /// The library of CUDA 13 itself, which `cargo xtask test --only libraries` fetches, with a
    /// profiler attached: it reads the environment, so this is another process.
    #[test]
    fn a_profiler_sees_ranges_of_cuda_13() {
        let Some(lib) = std::env::var_os("NVTX_LIBRARY").map(std::path::PathBuf::from) else {
            use tilewire_testing::{Lack, did_not_run};
            return did_not_run(Lack::Nvtx, "stage `libraries` of `cargo xtask test` names it");
        };
        if std::env::var_os(PROFILER).is_some() {
            let system = vec![lib.parent().unwrap().to_owned()];
            let nvtx = open(&Places { system, ..Places::default() }).unwrap();
            assert_eq!((nvtx.push("gemm"), nvtx.push("wait")), (0, 1));
            assert_eq!((nvtx.pop(), nvtx.pop()), (1, 0));
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("p.c"), PROFILER_TEXT).unwrap();
        let mut gcc = Command::new("gcc");
        let made = gcc.args(["-shared", "-fPIC", "-o"]).args([at("p.so"), at("p.c")]).status();
        assert!(made.is_ok_and(|s| s.success()), "this test needs gcc (apt-get install gcc)");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "cuda::nvtx::tests::a_profiler_sees_ranges_of_cuda_13"]);
        child.env(PROFILER, at("p.so")).env("PROFILER_LOG", at("log"));
        let out = child.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        let seen = std::fs::read_to_string(at("log")).unwrap();
        assert_eq!(seen, "push gemm\npush wait\npop\npop\n");
    }
}
