//! The libraries that are opened at run time, as they are published: each version must have the
//! functions that are looked up, and be one that is accepted. No GPU is needed for that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::outcome::Outcome;
use crate::stages::{binary, exec, one, size_of};
use crate::suites;

/// A wheel, and the library in it.
struct Wheel {
    spec: &'static str,
    file: &'static str,
}

const fn wheel(spec: &'static str, file: &'static str) -> Wheel {
    Wheel { spec, file }
}

/// First, middle and last of the versions that are accepted without a warning.
const WHEELS: [Wheel; 5] = [
    wheel("nvidia-nccl-cu13==2.27.7", "libnccl.so.2"),
    wheel("nvidia-nccl-cu13==2.29.7", "libnccl.so.2"),
    wheel("nvidia-nccl-cu13==2.32.3", "libnccl.so.2"),
    wheel("nvidia-nvshmem-cu13==3.4.5", "libnvshmem_host.so.3"),
    wheel("nvidia-nvshmem-cu13==3.8.0", "libnvshmem_host.so.3"),
];
/// Ranges for profilers.
const NVTX: Wheel = wheel("nvidia-nvtx==13.0.85", "libnvtx3interop.so.1");

/// Takes one file out of the wheel in a folder: the rest is hundreds of megabytes of other things.
const EXTRACT: &str = "
import glob, os, shutil, sys, zipfile
folder, name = sys.argv[1:]
wheel = zipfile.ZipFile(glob.glob(folder + '/*.whl')[0])
member = next(n for n in wheel.namelist() if n.endswith('/' + name))
with wheel.open(member) as a, open(folder + '/part', 'wb') as b:
    shutil.copyfileobj(a, b)
os.rename(folder + '/part', folder + '/' + name)
os.remove(wheel.filename)
";

/// The library of a wheel, fetched if it is not there; none, after two tries, where it cannot be.
fn fetch(root: &Path, w: &Wheel, o: &mut Outcome) -> Option<PathBuf> {
    let folder = root.join("target/python-libraries").join(w.spec);
    let (file, dir) = (folder.join(w.file), folder.display().to_string());
    let mut tries = 0;
    while !file.exists() {
        tries += 1;
        let get = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", &dir, w.spec];
        let done = exec(root, "python3", &get, Duration::from_secs(300))
            && Command::new("python3")
                .args(["-c", EXTRACT, &dir, w.file])
                .status()
                .is_ok_and(|s| s.success());
        if !done && tries == 2 {
            println!("{} cannot be fetched", w.spec);
            return None;
        }
        if done {
            o.downloaded += size_of(&folder);
        }
    }
    Some(file)
}

/// Checks that the program itself opens this version of a library.
fn check(root: &Path, w: &Wheel, file: &Path) -> Result<(), String> {
    let mut doctor = Command::new(binary(root));
    doctor.args(["doctor", "--json", "--library"]).arg(file);
    let doctor = doctor.envs(crate::stages::OFF);
    let out = doctor.output().map_err(|e| e.to_string())?;
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&out.stdout)
        .map_err(|_| String::from_utf8_lossy(&out.stderr).into_owned())?;
    let version = w.spec.rsplit('=').next().unwrap_or_default();
    let wanted = format!(": {version} at {} (already loaded)", file.display());
    let texts = rows.iter().filter_map(|r| r["text"].as_str());
    let libraries: Vec<&str> = texts.filter(|t| t.contains(w.file)).collect();
    match libraries.iter().any(|t| t.ends_with(&wanted)) {
        true => Ok(()),
        false => Err(format!("no `{wanted}` in {libraries:?}")),
    }
}

/// The stage. What cannot be fetched is a failure.
pub fn run(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    for w in &WHEELS {
        let good = fetch(root, w, &mut o).is_some_and(|file| {
            let checked = check(root, w, &file);
            println!("{}: {}", w.spec, checked.as_ref().err().map_or("as declared", |e| e));
            checked.is_ok()
        });
        o.add(&one(good));
    }
    let Some(nvtx) = fetch(root, &NVTX, &mut o) else {
        o.add(&one(false));
        return o;
    };
    // With the binaries of the stage `unit`.
    let test = "cuda::nvtx::tests::a_profiler_sees_ranges_of_cuda_13";
    let vars = [("NVTX_LIBRARY", &*nvtx.display().to_string())];
    let ran = suites::run_one(root, "tilewire-device lib", test, &vars);
    println!("{} with a profiler: {} passed", NVTX.spec, ran.passed);
    o.add(&one(ran.passed == 1 && ran.failed == 0));
    o
}
