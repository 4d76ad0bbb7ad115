//! `tilewire kernels`: what kernels there are, compiling them anywhere, and the cache.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tilewire::device::cuda::{Nvrtc, load_nvrtc};
use tilewire::device::jit::{Cache, Compiler, KernelSpec, kernel_uses};
use tilewire::prelude::*;
use tilewire::symm::kernel_specs;

use crate::args::{KernelsCacheArgs, KernelsCommand, KernelsCompileArgs, KernelsListArgs};
use crate::say;

/// Runs the command; the exit code.
///
/// # Errors
/// `Unavailable` without the compiler; `Io` for files.
pub fn run(command: &KernelsCommand) -> Result<i32> {
    match command {
        KernelsCommand::List(args) => list(args),
        KernelsCommand::Compile(args) => compile(args),
        KernelsCommand::Cache(args) => cache(args),
    }
}

/// Every kernel of every operation.
fn specs(arch: &str) -> Vec<KernelSpec> {
    kernel_specs(arch)
}

fn list(args: &KernelsListArgs) -> Result<i32> {
    for s in specs(&args.arch) {
        if args.json {
            let row = json!({ "unit": s.name, "arch": s.arch, "key": s.key().to_string() });
            say(format_args!("{row}"));
        } else {
            say(format_args!("{}  {:<24} {}", s.key(), s.name, s.arch));
        }
    }
    Ok(0)
}

/// Compiles everything. A kernel that spills, or whose matrix instructions are serialised, is an
/// error: it would be slow, and nobody would know why.
fn compile(args: &KernelsCompileArgs) -> Result<i32> {
    let found = load_nvrtc(args.nvrtc.as_deref())?;
    let version = Nvrtc.version()?;
    if !args.json {
        say(format_args!("{version} at {} ({})", found.path.display(), found.how));
    }
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir)
            .map_err(|e| Error::io(format!("creating {}", dir.display()), e))?;
    }
    let mut bad = 0;
    for spec in args.arch.iter().flat_map(|a| specs(a)) {
        let start = Instant::now();
        let done = Nvrtc.compile(&spec)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let uses = kernel_uses(&done.log);
        if let Some(dir) = &args.out {
            write(&dir.join(format!("{}.cubin", spec.key())), &done.cubin)?;
        }
        for k in &uses {
            let good = k.spill_bytes == 0 && !k.serialised;
            bad += i32::from(!good);
            if args.json {
                let row = json!({
                    "unit": spec.name, "kernel": k.name, "arch": spec.arch, "compiler": version,
                    "registers": k.registers, "spill_bytes": k.spill_bytes,
                    "shared_bytes": k.shared_bytes, "serialised": k.serialised,
                    "cubin_bytes": done.cubin.len(), "ms": ms,
                });
                say(format_args!("{row}"));
            } else {
                say(format_args!(
                    "{:<8} {:<20} {:<16} {:>3} registers {:>4} B spilled {:>6} B shared{}",
                    spec.arch,
                    spec.name,
                    k.name,
                    k.registers,
                    k.spill_bytes,
                    k.shared_bytes,
                    if good { "" } else { "  TOO SLOW" }
                ));
            }
        }
        if uses.is_empty() {
            return Err(Error::internal(format!("`{}` holds no kernel", spec.name)));
        }
    }
    Ok(i32::from(bad > 0))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|e| Error::io(format!("writing {}", path.display()), e))
}

fn cache(args: &KernelsCacheArgs) -> Result<i32> {
    let config = Config::from_env()?;
    let cache = Cache::open(config.cache_dir.as_deref())?;
    let usage = if args.clear { cache.clear()? } else { cache.usage()? };
    let dir = cache.dir().display();
    if args.json {
        let row = json!({
            "dir": dir.to_string(), "entries": usage.entries, "bytes": usage.bytes,
            "cleared": args.clear,
        });
        say(format_args!("{row}"));
    } else {
        let what = if args.clear { "removed from" } else { "in" };
        say(format_args!("{} kernels, {} bytes {what} {dir}", usage.entries, usage.bytes));
    }
    Ok(0)
}
