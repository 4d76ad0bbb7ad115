//! Where NVIDIA's libraries may lie, and which copy is used.
//!
//! In this order: a copy that the process has loaded already (a second one beside it would have
//! its own state); the path that the caller names, an error if another copy is loaded; the wheels
//! of the active Python environment; conda; `CUDA_HOME`; `/usr/local/cuda`; what the system's
//! loader knows.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use tilewire_core::{Error, ErrorKind, Result};

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug)]
pub struct LibrarySpec {
    /// What people call it.
    pub name: &'static str,
    /// Its file name, as the loader knows it.
    pub soname: &'static str,
    /// Command that installs it.
    pub install: &'static str,
}

/// The run-time compiler.
pub const NVRTC: LibrarySpec = LibrarySpec {
    name: "NVRTC",
    soname: "libnvrtc.so.13",
    install: "pip install nvidia-cuda-nvrtc==13.0.88",
};

/// Matrix products.
pub const CUBLASLT: LibrarySpec = LibrarySpec {
    name: "cuBLASLt",
    soname: "libcublasLt.so.13",
    install: "pip install nvidia-cublas",
};

/// Matrix products, as CUDA 12 has them: used where the newer one is not.
pub const CUBLASLT_12: LibrarySpec = LibrarySpec {
    name: "cuBLASLt",
    soname: "libcublasLt.so.12",
    install: "pip install nvidia-cublas-cu12",
};

/// Collectives.
pub const NCCL: LibrarySpec =
    LibrarySpec { name: "NCCL", soname: "libnccl.so.2", install: "pip install nvidia-nccl-cu13" };

/// Symmetric memory of NVSHMEM.
pub const NVSHMEM: LibrarySpec = LibrarySpec {
    name: "NVSHMEM",
    soname: "libnvshmem_host.so.3",
    install: "pip install nvidia-nvshmem-cu13",
};

/// Reference attention in benchmarks.
pub const CUDNN: LibrarySpec = LibrarySpec {
    name: "cuDNN",
    soname: "libcudnn.so.9",
    install: "pip install nvidia-cudnn-cu13",
};

/// All of them.
pub const LIBRARIES: [LibrarySpec; 5] = [NVRTC, CUBLASLT, NCCL, NVSHMEM, CUDNN];

/// How a library was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// The process had loaded it.
    Loaded,
    /// The caller named it.
    Named,
    /// A wheel of the active Python environment.
    Wheel,
    /// The active conda environment.
    Conda,
    /// `CUDA_HOME` or `/usr/local/cuda`.
    Toolkit,
    /// The system's loader.
    System,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            How::Loaded => "already loaded",
            How::Named => "named by the caller",
            How::Wheel => "Python wheel",
            How::Conda => "conda",
            How::Toolkit => "CUDA toolkit",
            How::System => "system",
        })
    }
}

/// A copy of a library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// How it was found.
    pub how: How,
}

/// Everything that the search looks at; a value, so that tests can make one up.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Files that are mapped into this process.
    pub loaded: Vec<PathBuf>,
    /// `site-packages` of the Python environments that the shell would use, the active one first.
    pub site_packages: Vec<PathBuf>,
    /// Root of the active conda environment.
    pub conda: Option<PathBuf>,
    /// Roots of CUDA toolkits.
    pub toolkits: Vec<PathBuf>,
    /// Folders of the system's loader.
    pub system: Vec<PathBuf>,
}

impl Places {
    /// Those of this process.
    pub fn of_process() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let system =
            ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
        let own = var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut toolkits: Vec<PathBuf> = var("CUDA_HOME").map(PathBuf::from).into_iter().collect();
        toolkits.push("/usr/local/cuda".into());
        Self {
            loaded: mapped(&maps),
            site_packages: site_packages(var("VIRTUAL_ENV"), &var("PATH").unwrap_or_default()),
            conda: var("CONDA_PREFIX").map(PathBuf::from),
            toolkits,
            system: std::env::split_paths(&own)
                .filter(|p| !p.as_os_str().is_empty())
                .chain(system.map(PathBuf::from))
                .collect(),
        }
    }

    /// The folders that are searched for files, in order.
    fn folders(&self) -> Vec<(How, PathBuf)> {
        let mut out = Vec::new();
        for site in &self.site_packages {
            for package in entries(&site.join("nvidia")) {
                out.push((How::Wheel, package.join("lib")));
            }
        }
        if let Some(c) = &self.conda {
            out.push((How::Conda, c.join("lib")));
            for site in entries(&c.join("lib")).iter().map(|p| p.join("site-packages/nvidia")) {
                out.extend(entries(&site).iter().map(|p| (How::Conda, p.join("lib"))));
            }
        }
        for t in &self.toolkits {
            for lib in ["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"] {
                out.push((How::Toolkit, t.join(lib)));
            }
        }
        out.extend(self.system.iter().map(|s| (How::System, s.clone())));
        out
    }

    /// Finds the copy of `spec` to use.
    ///
    /// # Errors
    /// `Mismatch` if two copies are loaded, or another one than `named`; `Unavailable` naming
    /// every place that was searched and the command that installs it.
    pub fn find(&self, spec: &LibrarySpec, named: Option<&Path>) -> Result<Found> {
        let loaded = self.loaded_copies(spec);
        if let [first, second, ..] = &loaded[..] {
            return Err(mixed(spec, first, second));
        }
        if let Some(path) = named {
            let path = if path.is_dir() { path.join(spec.soname) } else { path.to_owned() };
            let real = path.canonicalize().map_err(|e| {
                let text = format!("{} at {}: {e}", spec.name, path.display());
                Error::new(ErrorKind::Unavailable, text).cause(e)
            })?;
            return match loaded.first() {
                Some(other) if *other != real => Err(mixed(spec, other, &real)),
                _ => Ok(Found { path, how: How::Named }),
            };
        }
        if let Some(path) = loaded.into_iter().next() {
            return Ok(Found { path, how: How::Loaded });
        }
        let folders = self.folders();
        for (how, folder) in &folders {
            let path = folder.join(spec.soname);
            if path.exists() {
                return Ok(Found { path, how: *how });
            }
        }
        let mut list: Vec<String> = folders.iter().map(|(_, f)| f.display().to_string()).collect();
        list.dedup();
        let text = format!("{} is not there: no {} in {}", spec.name, spec.soname, list.join(", "));
        Err(Error::new(ErrorKind::Unavailable, text).op("cuda").hint(format!(
            "`{}` in the active Python environment, or install CUDA 13",
            spec.install
        )))
    }

    /// Copies of the library that the process has loaded.
    fn loaded_copies(&self, spec: &LibrarySpec) -> Vec<PathBuf> {
        // Files carry their whole version: libnccl.so.2.28.9 is a libnccl.so.2.
        let ours = |p: &PathBuf| {
            let name = p.file_name().unwrap_or_default().to_string_lossy();
            name.strip_prefix(spec.soname).is_some_and(|r| r.is_empty() || r.starts_with('.'))
        };
        let mut copies: Vec<PathBuf> = self.loaded.iter().filter(|p| ours(p)).cloned().collect();
        copies.sort();
        copies.dedup();
        copies
    }
}

fn mixed(spec: &LibrarySpec, a: &Path, b: &Path) -> Error {
    let text = format!("two copies of {}: {} and {}", spec.name, a.display(), b.display());
    Error::new(ErrorKind::Mismatch, text)
        .op("cuda")
        .hint("each would have its own state: make sure that one Python environment serves all")
}

/// Files in the text of `/proc/self/maps`.
fn mapped(maps: &str) -> Vec<PathBuf> {
    let path = |line: &str| line.find('/').map(|at| PathBuf::from(&line[at..]));
    let mut files: Vec<PathBuf> = maps.lines().filter_map(path).collect();
    files.sort();
    files.dedup();
    files
}

/// `lib/python3.x/site-packages` of the active environment, then of those on the path.
fn site_packages(virtual_env: Option<OsString>, path: &OsString) -> Vec<PathBuf> {
    let on_path = std::env::split_paths(path)
        .filter(|p| p.join("python3").exists())
        .filter_map(|p| p.parent().map(Path::to_owned));
    let mut out = Vec::new();
    for root in virtual_env.map(PathBuf::from).into_iter().chain(on_path) {
        for python in entries(&root.join("lib")) {
            let named =
                python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
            let site = python.join("site-packages");
            if named && site.is_dir() && !out.contains(&site) {
                out.push(site);
            }
        }
    }
    out
}

/// What a folder holds, in order; nothing if it is not there.
pub(super) fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut list: Vec<_> = list.collect();
    list.sort();
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with one file for each of `files`.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for f in files {
            let path = dir.path().join(f);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        dir
    }

    #[test]
    fn the_order_is_loaded_named_wheel_conda_toolkit_system() {
        let dir = tree(&[
            "venv/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "conda/lib/libnvrtc.so.13",
            "cuda/lib64/libnvrtc.so.13",
            "usr/lib/libnvrtc.so.13",
            "own/libnvrtc.so.13",
            "torch/libnvrtc.so.13.0.88",
        ]);
        let at = |p: &str| dir.path().join(p);
        let mut places = Places {
            loaded: vec![at("torch/libnvrtc.so.13.0.88"), at("torch/libnvrtc-builtins.so.13.0")],
            site_packages: vec![at("venv/site-packages")],
            conda: Some(at("conda")),
            toolkits: vec![at("cuda")],
            system: vec![at("usr/lib")],
        };
        let found = |p: &Places| p.find(&NVRTC, None).unwrap();
        assert_eq!(found(&places).how, How::Loaded);
        assert_eq!(found(&places).path, at("torch/libnvrtc.so.13.0.88"));
        // Another copy than the one that is loaded is refused, with both names.
        let e = places.find(&NVRTC, Some(&at("own"))).unwrap_err();
        assert!(e.is_mismatch() && e.message().contains("torch") && e.message().contains("own"));
        places.loaded.clear();
        let named = places.find(&NVRTC, Some(&at("own"))).unwrap();
        assert_eq!((named.how, named.path), (How::Named, at("own/libnvrtc.so.13")));
        assert!(places.find(&NVRTC, Some(&at("nowhere"))).unwrap_err().is_unavailable());
        for (how, gone) in [
            (How::Wheel, "venv"),
            (How::Conda, "conda"),
            (How::Toolkit, "cuda"),
            (How::System, "usr"),
        ] {
            assert_eq!(found(&places).how, how);
            std::fs::remove_dir_all(at(gone)).unwrap();
        }
        let e = places.find(&NVRTC, None).unwrap_err();
        assert!(e.is_unavailable() && e.get_hint().unwrap().contains("pip install"), "{e}");
        for place in ["conda/lib", "cuda/lib64", "usr/lib"] {
            assert!(e.message().contains(place), "{e}");
        }
    }

    #[test]
    fn two_loaded_copies_are_named() {
        let loaded = vec!["/a/libnccl.so.2".into(), "/b/libnccl.so.2.28.9".into()];
        let places = Places { loaded, ..Places::default() };
        let e = places.find(&NCCL, None).unwrap_err();
        assert!(
            e.is_mismatch() && e.message().contains("/a/") && e.message().contains("/b/"),
            "{e}"
        );
        // Parts of another library are no copy.
        let loaded = vec!["/a/libcudnn.so.9".into(), "/a/libcudnn_ops.so.9.1".into()];
        let places = Places { loaded, ..Places::default() };
        assert_eq!(places.find(&CUDNN, None).unwrap().how, How::Loaded);
    }

    #[test]
    fn maps_and_environments_are_read() {
        let maps = "7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n\
                    7f10-7f20 rw-p 00000000 00:00 0 [heap]\n\
                    7f20-7f30 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n";
        assert_eq!(mapped(maps), [PathBuf::from("/usr/lib/libc.so.6")]);
        let dir = tree(&[
            "a/bin/python3",
            "a/lib/python3.11/site-packages/x",
            "v/lib/python3.12/site-packages/x",
            "b/bin/sh",
        ]);
        let at = |p: &str| dir.path().join(p);
        let path = std::env::join_paths([at("b/bin"), at("a/bin")]).unwrap();
        assert_eq!(
            site_packages(Some(at("v").into()), &path),
            [at("v/lib/python3.12/site-packages"), at("a/lib/python3.11/site-packages")]
        );
        assert!(!Places::of_process().loaded.is_empty());
    }
}
