//! `compile_commands.json`: what clangd needs to read the kernels.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tilewire_kernels::{ALL, Source};

/// Returns the compilation command of a unit: as CUDA C++ where a toolkit is at `cuda`, else as C++
/// behind the emulator's prelude, without inline PTX.
fn command(root: &Path, s: &Source, cuda: Option<&Path>) -> Value {
    let mut args = vec!["clang++".to_owned(), "-std=c++17".to_owned()];
    if let Some(cuda) = cuda {
        args.extend(["-x", "cuda", "--cuda-gpu-arch=sm_90a"].map(str::to_owned));
        args.push(format!("--cuda-path={}", cuda.display()));
    } else {
        let prelude = |name: &str| root.join("kernels/emu").join(name).display().to_string();
        args.extend(["-x", "c++", "-DTW_EMU_SMEM=1024"].map(str::to_owned));
        for header in ["abi.h", "emu.h", "editor.h"] {
            args.extend(["-include".to_owned(), prelude(header)]);
        }
    }
    args.extend(s.first_variant().iter().map(|(name, value)| format!("-D{name}={value}")));
    let file = root.join("kernels/src").join(s.name).display().to_string();
    args.extend(["-fsyntax-only".to_owned(), file.clone()]);
    json!({ "directory": root.display().to_string(), "file": file, "arguments": args })
}

/// Returns the folder of a CUDA toolkit, if there is one.
fn toolkit() -> Option<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let usual = [PathBuf::from("/usr/local/cuda")];
    named.chain(usual).find(|p| p.join("include/cuda_runtime.h").exists())
}

/// Writes `compile_commands.json` at the root.
pub fn write(root: &Path) -> Vec<String> {
    let cuda = toolkit();
    let how = cuda.as_ref().map_or_else(
        || "no CUDA toolkit: as C++, without inline PTX".to_owned(),
        |p| format!("with the toolkit at {}", p.display()),
    );
    let all: Vec<_> = ALL.iter().map(|s| command(root, s, cuda.as_deref())).collect();
    let path = root.join("compile_commands.json");
    let text = serde_json::to_string_pretty(&all).unwrap_or_default();
    match fs::write(&path, text) {
        Ok(()) => {
            println!("{}: {} units, {how}", path.display(), all.len());
            Vec::new()
        }
        Err(e) => vec![format!("{}: {e}", path.display())],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn every_unit_is_read_as_its_command_says() {
        let root = crate::root();
        for s in ALL {
            let command = command(&root, s, None);
            let args: Vec<_> = command["arguments"]
                .as_array()
                .unwrap()
                .iter()
                .map(|a| a.as_str().unwrap())
                .collect();
            let out = Command::new("g++").args(&args[1..]).output().unwrap();
            assert!(out.status.success(), "{}: {}", s.name, String::from_utf8_lossy(&out.stderr));
        }
    }
}
