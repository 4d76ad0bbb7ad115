//! `tilewire kernels`: what kernels there are, compiling them anywhere, and the cache.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::json;
use tilewire::device::cuda::{Nvrtc, load_nvrtc};
use tilewire::device::jit::{Cache, Compiled, Compiler, KernelSpec, kernel_uses};
use tilewire::prelude::*;

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

/// Every kernel, in each of its variants: the very specs that plans look for.
pub(crate) fn specs(arch: &str) -> Vec<KernelSpec> {
    let mut all = tilewire::symm::kernel_specs(arch);
    all.extend(tilewire::ops::kernel_specs(arch));
    all
}

/// Definitions that tell the variants of attention apart.
const VARIES: [&str; 6] =
    ["TW_ATTN_TYPE", "TW_ATTN_DQK", "TW_ATTN_DV", "TW_ATTN_EXTRA", "TW_ATTN_IN", "TW_ATTN_OUT"];

/// The definitions that make a variant, in words.
fn variant(s: &KernelSpec) -> String {
    let differ = |n: &str| n.contains("MANTISSA") || n.contains("F16") || VARIES.contains(&n);
    let words = s.defines.iter().filter(|(n, _)| differ(n)).map(|(n, v)| format!("{n}={v}"));
    words.collect::<Vec<_>>().join(" ")
}

fn list(args: &KernelsListArgs) -> Result<i32> {
    for s in specs(&args.arch) {
        if args.json {
            let row = json!({
                "unit": s.name, "variant": variant(&s), "arch": s.arch,
                "key": s.key().to_string(),
            });
            say(format_args!("{row}"));
        } else {
            say(format_args!("{}  {:<34} {} {}", s.key(), s.name, s.arch, variant(&s)));
        }
    }
    Ok(0)
}

/// Everything, or what the keys name.
fn chosen(args: &KernelsCompileArgs) -> Result<Vec<KernelSpec>> {
    let all: Vec<KernelSpec> = args.arch.iter().flat_map(|a| specs(a)).collect();
    if args.keys.is_empty() {
        return Ok(all);
    }
    let mut keys: HashSet<&str> = args.keys.iter().map(String::as_str).collect();
    let chosen = all.into_iter().filter(|s| keys.remove(&*s.key().to_string())).collect();
    let Some(unknown) = args.keys.iter().find(|k| keys.contains(&***k)) else { return Ok(chosen) };
    let archs = args.arch.join(", ");
    Err(Error::invalid(format!("no kernel for {archs} has the key `{unknown}`"))
        .hint("`tilewire kernels list --arch ARCH` prints the keys of this build"))
}

/// Compiles what is asked for. A kernel that spills, or whose matrix instructions are serialised,
/// is an error: it would be slow, and nobody would know why.
fn compile(args: &KernelsCompileArgs) -> Result<i32> {
    let all = chosen(args)?;
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
    let done = compile_all(&all);
    if done.len() != all.len() {
        return Err(Error::internal("a thread that compiled kernels panicked"));
    }
    for (spec, done) in all.iter().zip(done) {
        let (done, ms) = done?;
        let uses = kernel_uses(&done.log);
        if let Some(dir) = &args.out {
            write(&dir.join(format!("{}.cubin", spec.key())), &done.cubin)?;
        }
        for k in &uses {
            let good = k.spill_bytes == 0 && !k.serialised;
            bad += i32::from(!good);
            if args.json {
                let row = json!({
                    "unit": spec.name, "variant": variant(spec), "key": spec.key().to_string(),
                    "kernel": k.name, "arch": spec.arch, "compiler": version,
                    "registers": k.registers, "spill_bytes": k.spill_bytes,
                    "shared_bytes": k.shared_bytes, "serialised": k.serialised,
                    "cubin_bytes": done.cubin.len(), "ms": ms,
                });
                say(format_args!("{row}"));
            } else {
                say(format_args!(
                    "{:<8} {:<34} {:<20} {:>3} registers {:>4} B spilled {:>6} B shared {}{}",
                    spec.arch,
                    spec.name,
                    k.name,
                    k.registers,
                    k.spill_bytes,
                    k.shared_bytes,
                    variant(spec),
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

/// Compiles on all cores; results in order, with the milliseconds that each took.
fn compile_all(all: &[KernelSpec]) -> Vec<Result<(Compiled, f64)>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut mine = Vec::new();
        while let Some((i, spec)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, all.get(i)?)))
        {
            let start = Instant::now();
            let done = Nvrtc.compile(spec);
            mine.push((i, done.map(|d| (d, start.elapsed().as_secs_f64() * 1e3))));
        }
        mine
    };
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut done: Vec<_> = std::thread::scope(|s| {
        let more = |_| std::thread::Builder::new().spawn_scoped(s, work).ok();
        let threads: Vec<_> = (1..cores).map_while(more).collect();
        let mut done = work();
        // A panic of a thread would leave a gap that the caller reports.
        done.extend(threads.into_iter().filter_map(|t| t.join().ok()).flatten());
        done
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, d)| d).collect()
}

/// Whole or not at all: programs take what they find there.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let done = std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path));
    done.map_err(|e| {
        std::fs::remove_file(&beside).ok();
        Error::io(format!("writing {}", path.display()), e)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_what_is_compiled() {
        let args = |keys: &[&str]| KernelsCompileArgs {
            arch: vec!["sm_80".to_owned(), "sm_90a".to_owned()],
            keys: keys.iter().map(|k| (*k).to_owned()).collect(),
            nvrtc: None,
            out: None,
            json: false,
        };
        let all = chosen(&args(&[])).unwrap();
        assert_eq!(all.len(), specs("sm_80").len() + specs("sm_90a").len());
        let (a, b) = (all[1].key().to_string(), all.last().unwrap().key().to_string());
        let got = chosen(&args(&[&b, &a, &b])).unwrap();
        let keys: Vec<_> = got.iter().map(|s| s.key().to_string()).collect();
        assert_eq!(keys, [a.clone(), b], "in the order of the list, each once");
        let e = chosen(&args(&[&a, "none"])).unwrap_err();
        assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("`none`"), "{e}");
        let other = specs("sm_100a")[0].key().to_string();
        assert!(chosen(&args(&[&other])).is_err(), "of an architecture that is not asked for");
    }
}
