//! Drivers that stand in for CUDA's, so that programs run on "GPUs" where there are none: one whose
//! devices run the text of every kernel on the CPU (`kernels/emu/driver`), and one whose devices do
//! nothing (`idle.rs`).

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use tilewire_kernels::ALL;

/// What all have: devices and their memory.
pub const COMMON: &str = include_str!("../../../../kernels/emu/driver/devices.h");
const ABI: &str = include_str!("../../../../kernels/emu/abi.h");
const PRELUDE: &str = include_str!("../../../../kernels/emu/emu.h");
const RUNTIME: [&str; 4] = [
    include_str!("../../../../kernels/emu/fibers.h"),
    include_str!("../../../../kernels/emu/bulk.h"),
    include_str!("../../../../kernels/emu/hopper.h"),
    include_str!("../../../../kernels/emu/runtime.cpp"),
];
const EMULATED: [&str; 3] = [
    include_str!("../../../../kernels/emu/driver/streams.h"),
    include_str!("../../../../kernels/emu/driver/attacks.h"),
    include_str!("../../../../kernels/emu/driver/driver.cpp"),
];

/// Where drivers lie: in one place for all programs, so that each is made once.
const FOLDER: &str = match option_env!("CARGO_TARGET_TMPDIR") {
    Some(of_tests) => of_tests,
    // Of a program that is no test: `cargo xtask`.
    None => concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tmp"),
};

/// A folder with a driver and a compiler of kernels, and the variables that they read.
pub struct Driver {
    dir: PathBuf,
    vars: Vec<(&'static str, OsString)>,
}

/// Runs a compiler in `dir`; false if there is none.
fn compile(dir: &Path, words: &str) -> bool {
    let mut words = words.split_whitespace();
    match Command::new(words.next().unwrap()).args(words).current_dir(dir).output() {
        Ok(out) => {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            true
        }
        Err(_) => false,
    }
}

/// The texts that the emulated compiler knows.
fn write_texts(dir: &Path) {
    fs::create_dir(dir).unwrap();
    for s in ALL {
        let base = dir.join(s.name.replace('/', "_").trim_end_matches(".cu"));
        fs::write(base.with_extension("cu"), s.text()).unwrap();
        fs::write(base.with_extension("emu"), s.emu_text()).unwrap();
        fs::write(base.with_extension("kernels"), s.kernels.join(" ")).unwrap();
    }
}

impl Driver {
    /// The driver whose devices are emulated. None without a compiler.
    pub fn emulated() -> Option<Self> {
        let files = [
            ("abi.h", ABI.to_owned()),
            ("emu.h", PRELUDE.to_owned()),
            ("runtime.cpp", format!("{ABI}{}", RUNTIME.concat())),
            ("driver.cpp", format!("{ABI}{COMMON}{}", EMULATED.concat())),
        ];
        let words = "g++ -O2 -std=c++17 -Wall -Wextra -Werror -shared -fPIC -pthread -Wl,-soname,libcuda.so.1 \
                     -o libcuda.so.1 runtime.cpp driver.cpp -ldl";
        let mut driver = Self::build("emulated", &files, words)?;
        // What it has compiled is of this very text, and stays.
        let (cache, texts) = (driver.dir.join("cache"), driver.dir.join("texts"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        driver.vars.extend([
            ("TILEWIRE_CACHE_DIR", cache.into()),
            ("TW_EMU_TEXTS", texts.into()),
            ("TW_EMU_PATH", path),
        ]);
        Some(driver)
    }

    /// The driver that `words` compile from `files`, made once for all runs of these texts and
    /// those of the kernels. None without the compiler.
    pub fn build(name: &str, files: &[(&str, String)], words: &str) -> Option<Self> {
        // Tests of one process make it under the same name.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hash = DefaultHasher::new();
        let kernels: Vec<_> = ALL.iter().map(|s| (s.text(), s.emu_text(), s.kernels)).collect();
        (files, words, kernels).hash(&mut hash);
        let all = Path::new(FOLDER);
        let dir = all.join(format!("{name}-{:016x}", hash.finish()));
        if !dir.exists() {
            // Those of other texts. Under another name first: a run that was killed leaves nothing
            // that looks whole.
            for old in fs::read_dir(all).into_iter().flatten().flatten() {
                let it = old.file_name().to_string_lossy().into_owned();
                if it.starts_with(&format!("{name}-")) && !it.ends_with(".new") {
                    fs::remove_dir_all(old.path()).ok();
                }
            }
            let new = all.join(format!("{name}-{}.new", std::process::id()));
            fs::create_dir_all(new.join("lib64")).unwrap();
            for (name, text) in files {
                fs::write(new.join(name), text).unwrap();
            }
            if !compile(&new, words) {
                fs::remove_dir_all(&new).unwrap();
                return None;
            }
            write_texts(&new.join("texts"));
            symlink("libcuda.so.1", new.join("libcuda.so")).unwrap();
            symlink("../libcuda.so.1", new.join("lib64/libnvrtc.so.13")).unwrap();
            // Another process may have been faster.
            fs::rename(&new, &dir).or_else(|e| if dir.exists() { Ok(()) } else { Err(e) }).unwrap();
            fs::remove_dir_all(&new).ok();
        }
        Some(Self { dir, vars: Vec::new() })
    }

    /// `program` on so many devices: with no driver, compiler or library of this machine, and none
    /// of its settings.
    pub fn command(&self, program: impl AsRef<Path>, devices: usize) -> Command {
        let mut run = Command::new(program.as_ref());
        run.env_clear()
            .env("PATH", "/none")
            .env("HOME", &self.dir)
            .env("CUDA_HOME", &self.dir)
            .env("LD_LIBRARY_PATH", &self.dir)
            .env("TW_DEVICES", devices.to_string())
            .env("NCCL_NVLS_ENABLE", "0")
            .env("NCCL_GRAPH_REGISTER", "0")
            .env("NVSHMEM_DISABLE_NVLS", "1")
            .env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            .env("CUBLASMP_DISABLE_MULTICAST", "1")
            .envs(std::env::var_os("TW_FULL").map(|full| ("TW_FULL", full)))
            .envs(self.vars.iter().map(|(name, value)| (name, value)));
        run
    }

    /// The same, with kernels that tell of their stores, so that somebody may watch
    /// (`driver/attacks.h`). Fewer blocks at a time, and threads that give way less often: such
    /// programs run many times.
    #[allow(dead_code, reason = "not every program that shares this file attacks")]
    pub fn watching(&self, program: impl AsRef<Path>, devices: usize) -> Command {
        let mut run = self.command(program, devices);
        run.env("TILEWIRE_CACHE_DIR", self.dir.join("cache-watched"))
            .env("TW_EMU_WATCH", "1")
            .env("TW_EMU_SMS", "2")
            .env("TW_EMU_YIELD", "5");
        run
    }
}
