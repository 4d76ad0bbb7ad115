//! Kernels' text to shared libraries, by the host's compiler.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::panic_any;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::apart;

const COMPILER: &str = "g++";
const ABI: &str = include_str!("../../emu/abi.h");
const PRELUDE: &str = include_str!("../../emu/emu.h");
const RUNTIME: [&str; 4] = [
    include_str!("../../emu/fibers.h"),
    include_str!("../../emu/bulk.h"),
    include_str!("../../emu/hopper.h"),
    include_str!("../../emu/runtime.cpp"),
];

/// A text with kernels, and how to compile it.
#[derive(Clone, PartialEq)]
pub struct Unit {
    pub name: &'static str,
    /// Everything behind the prelude.
    pub text: String,
    pub defines: Vec<(&'static str, u64)>,
    pub kernels: Vec<&'static str>,
    /// Most bytes of `tw_smem` that a launch may ask for.
    pub smem: usize,
}

/// Why nothing can be compiled here.
pub fn available() -> Result<(), String> {
    match Command::new(COMPILER).arg("--version").output() {
        Ok(out) if out.status.success() => Ok(()),
        Ok(out) => Err(format!("{COMPILER} --version ends with {}", out.status)),
        Err(e) => {
            Err(format!("{COMPILER} cannot be started ({e}); install it, as the README says"))
        }
    }
}

/// Names the folder of the parent to the processes of mutants.
pub const DIR: &str = "TW_EMU_DIR";

/// A folder of this process and its children: two runs at once do not meet.
pub fn dir() -> PathBuf {
    let own = || {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emu-{}", std::process::id())).into()
    };
    // A folder of the parent's is of its children alone: a parent removes its folder.
    env::var_os(DIR).filter(|_| apart::is_child()).unwrap_or_else(own).into()
}

/// Removes what was compiled. What is loaded stays usable.
pub fn clean() {
    fs::remove_dir_all(dir()).ok();
}

/// The payload of a panic: the compiler's words about a text that it refuses.
pub struct Refused(pub String);

/// A name that no other call has, here or in a child.
fn unique() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Compiles `text`, unless that was done before; panics with [`Refused`].
fn compile(name: &str, text: &str, flags: &[String]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (text, flags).hash(&mut hasher);
    let there = dir().join(format!("{name}-{:016x}.so", hasher.finish()));
    if there.exists() {
        return there;
    }
    fs::create_dir_all(dir()).unwrap();
    let file = dir().join(unique());
    let (source, library) = (file.with_extension("cpp"), file.with_extension("so"));
    fs::write(&source, text).unwrap();
    // No fused multiply-add that the text does not ask for, on any processor.
    let fixed = ["-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"];
    let out = Command::new(COMPILER)
        .args(fixed)
        .arg("-o")
        .args([&library, &source])
        .args(flags)
        .output()
        .unwrap();
    if !out.status.success() {
        panic_any(Refused(format!("{name}:\n{}", String::from_utf8_lossy(&out.stderr))));
    }
    // Whole or not at all: others may be looking for it.
    fs::rename(&library, &there).unwrap();
    there
}

/// Checks that `text`, behind the prelude, is good C++; what the compiler says if it is not.
pub fn syntax(text: &str, defines: &[(String, u64)]) -> Result<(), String> {
    fs::create_dir_all(dir()).unwrap();
    let source = dir().join(format!("syntax-{}.cpp", unique()));
    fs::write(&source, format!("{ABI}{PRELUDE}\n{text}")).unwrap();
    let out = Command::new(COMPILER)
        .args(["-fsyntax-only", "-std=c++17", "-DTW_EMU_SMEM=1024"])
        .args(defines.iter().map(|(name, value)| format!("-D{name}={value}")))
        .arg(&source)
        .output()
        .unwrap();
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into()) }
}

/// The emulator's runtime.
pub fn runtime(flags: &[&str]) -> PathBuf {
    let mut flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
    flags.extend(["-Wall", "-Wextra", "-Werror", "-pthread"].map(str::to_owned));
    compile("runtime", &(ABI.to_owned() + &RUNTIME.concat()), &flags)
}

/// A unit, linked to the runtime at `runtime`; `quickly` if it is to run once, and not for long.
pub fn kernels(unit: &Unit, runtime: &Path, quickly: bool) -> PathBuf {
    // Lines count from the unit's first: that is what messages name.
    let mut text = format!("{ABI}{PRELUDE}\n#line 1 \"{}\"\n{}\n", unit.name, unit.text);
    for k in &unit.kernels {
        text += &format!("EMU_ENTRY({k})\n");
    }
    let mut flags: Vec<String> =
        unit.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    if unit.smem > 0 {
        flags.push(format!("-DTW_EMU_SMEM={}", unit.smem));
    }
    // Nearly all time of this suite goes into compiling mutants, of which few run for a second:
    // with -O0 the compiler takes half as long as with -Og, and that half as long as with -O1.
    // Kernels of `ep` run longer, so that nothing is gained; and with their seeds one mutant, whose
    // lanes read a word while it changes, shows in the order of operations that -Og makes.
    let level = if quickly && !unit.name.starts_with("ep/") { "-O0" } else { "-Og" };
    let all = [level, "-fno-exceptions", "-fvisibility=hidden"].map(str::to_owned);
    flags.extend(all.into_iter().chain([runtime.display().to_string()]));
    compile(&unit.name.replace('/', "_"), &text, &flags)
}
