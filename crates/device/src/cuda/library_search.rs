//! The search for NVIDIA's libraries: the folders, their order, and the copy that is used.
//!
//! In this order: a copy that the process has loaded already (a second one beside it would have its
//! own state); the path that the caller names (`load_nccl` and its kin, `tilewire --library`), an
//! error if another copy is loaded; the wheels of the active Python environment; conda;
//! `CUDA_HOME`; `/usr/local/cuda`; the wheels of other Pythons on the path; where the system's
//! loader looks.

use std::fmt;
use std::path::{Path, PathBuf};

use tilewire_core::{Error, ErrorKind, Result};

use super::environment::{Pythons, entries, loader_folders, mapped};

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug)]
pub struct LibrarySpec {
    /// Its common name.
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

/// Not used here: reports copies that would mix.
pub const CUDNN: LibrarySpec = LibrarySpec {
    name: "cuDNN",
    soname: "libcudnn.so.9",
    install: "pip install nvidia-cudnn-cu13",
};

/// Ranges that profilers show.
pub const NVTX: LibrarySpec = LibrarySpec {
    name: "NVTX",
    soname: "libnvtx3interop.so.1",
    install: "pip install nvidia-nvtx",
};

/// The same of CUDA 12, which has no other: used where the newer one is not.
pub const NVTX_12: LibrarySpec = LibrarySpec {
    name: "NVTX",
    soname: "libnvToolsExt.so.1",
    install: "pip install nvidia-nvtx-cu12",
};

/// All of them, each in its newest form.
pub const LIBRARIES: [LibrarySpec; 6] = [NVRTC, CUBLASLT, NCCL, NVSHMEM, CUDNN, NVTX];

impl LibrarySpec {
    /// The form of it that is used where this one is not.
    pub fn older(&self) -> Option<LibrarySpec> {
        match self.soname {
            s if s == CUBLASLT.soname => Some(CUBLASLT_12),
            s if s == NVTX.soname => Some(NVTX_12),
            _ => None,
        }
    }

    /// Files carry their whole version: libnccl.so.2.28.9 is a libnccl.so.2.
    pub(super) fn is_copy(&self, file: &Path) -> bool {
        let rest = file_name(file).strip_prefix(self.soname).map(str::to_owned);
        rest.is_some_and(|r| r.is_empty() || r.starts_with('.'))
    }

    /// A library beside this one, which it opens by bare name itself: it must be of the same copy.
    fn is_part(&self, file: &Path) -> bool {
        let name = file_name(file);
        let part = self.soname == CUDNN.soname && name.starts_with("libcudnn_");
        part && name.split_once(".so.").is_some_and(|(_, v)| v == "9" || v.starts_with("9."))
    }
}

pub(super) fn file_name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The way in which a library was found.
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
    /// The way in which it was found.
    pub how: How,
}

/// Everything that the search looks at; a value, so that tests can make one up.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Files that are mapped into this process.
    pub loaded: Vec<PathBuf>,
    /// `site-packages` and `dist-packages` of the active Python environment.
    pub site_packages: Vec<PathBuf>,
    /// Those of other Pythons on the path.
    pub other_packages: Vec<PathBuf>,
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
        let usual = [
            "/usr/local/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
        ];
        let own = var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut toolkits: Vec<PathBuf> = var("CUDA_HOME").map(PathBuf::from).into_iter().collect();
        toolkits.push("/usr/local/cuda".into());
        let pythons = Pythons {
            virtual_env: var("VIRTUAL_ENV"),
            conda: var("CONDA_PREFIX"),
            path: var("PATH").unwrap_or_default(),
            home: var("HOME"),
            no_user_site: var("PYTHONNOUSERSITE").is_some(),
        };
        let sites = pythons.sites();
        Self {
            loaded: mapped(&maps),
            site_packages: sites.active,
            other_packages: sites.others,
            conda: var("CONDA_PREFIX").map(PathBuf::from),
            toolkits,
            system: std::env::split_paths(&own)
                .filter(|p| !p.as_os_str().is_empty())
                .chain(loader_folders(Path::new("/etc")))
                .chain(usual.map(PathBuf::from))
                .collect(),
        }
    }

    /// The folders that are searched for files, in order.
    fn folders(&self) -> Vec<(How, PathBuf)> {
        let mut out = Vec::new();
        let wheels = |sites: &[PathBuf]| -> Vec<(How, PathBuf)> {
            let packages = sites.iter().flat_map(|s| entries(&s.join("nvidia")));
            packages.map(|p| (How::Wheel, p.join("lib"))).collect()
        };
        out.extend(wheels(&self.site_packages));
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
        out.extend(wheels(&self.other_packages));
        out.extend(self.system.iter().map(|s| (How::System, s.clone())));
        out
    }

    /// Finds the copy of `spec` to use: `named`, a file or its folder, if given.
    ///
    /// # Errors
    /// `Mismatch` if two copies are loaded or parts of two, or another one than `named`;
    /// `Unavailable` naming every place that was searched and the command that installs it.
    pub fn find(&self, spec: &LibrarySpec, named: Option<&Path>) -> Result<Found> {
        let parts = self.loaded_where(|p| spec.is_part(p));
        // Also where the library itself is not there: the parts alone cannot work together.
        if let Some(other) = parts.iter().find(|p| !of_one_copy(p, &parts[0])) {
            return Err(mixed(spec, &parts[0], other));
        }
        let found = self.choose(spec, named)?;
        match parts.first().filter(|p| !of_one_copy(p, &found.path)) {
            Some(part) => Err(mixed(spec, &found.path, part)),
            None => Ok(found),
        }
    }

    /// As [`Places::find`], and where there is none the [older](LibrarySpec::older) form of the
    /// library. Which form it is, and the copy.
    ///
    /// # Errors
    /// As [`Places::find`], of the form that `spec` names.
    pub fn find_or_older(
        &self,
        spec: &LibrarySpec,
        named: Option<&Path>,
    ) -> Result<(LibrarySpec, Found)> {
        let Some(older) = spec.older() else { return self.find(spec, named).map(|f| (*spec, f)) };
        let only_older = |p: &Path| {
            older.is_copy(p) || (p.join(older.soname).exists() && !p.join(spec.soname).exists())
        };
        let is_loaded = |s: &LibrarySpec| self.loaded.iter().any(|p| s.is_copy(p));
        // What the process has loaded already goes before a newer one that it has not.
        let take_older = named.map_or(!is_loaded(spec) && is_loaded(&older), only_older);
        if take_older {
            return self.find(&older, named).map(|f| (older, f));
        }
        match self.find(spec, named) {
            Err(e) if e.is_unavailable() && named.is_none() => {
                // What is said of the newer one names the same folders.
                self.find(&older, None).map(|f| (older, f)).map_err(|_| e)
            }
            found => found.map(|f| (*spec, f)),
        }
    }

    fn choose(&self, spec: &LibrarySpec, named: Option<&Path>) -> Result<Found> {
        let loaded = self.loaded_where(|p| spec.is_copy(p));
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
        let mut seen = Vec::new();
        list.retain(|f| !seen.contains(f) && (seen.push(f.clone()), true).1);
        let text = format!(
            "{} cannot be found: there is no {} in {}",
            spec.name,
            spec.soname,
            list.join(", ")
        );
        Err(Error::new(ErrorKind::Unavailable, text).op("cuda").hint(format!(
            "`{}` in the active Python environment, or install CUDA 13",
            spec.install
        )))
    }

    /// Files that the process has loaded, in order, each once.
    fn loaded_where(&self, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = self.loaded.iter().filter(|p| wanted(p)).cloned().collect();
        files.sort();
        files.dedup();
        files
    }
}

/// Returns whether two files belong to one copy: they lie in one folder, and have one version as
/// far as their names say it.
fn of_one_copy(a: &Path, b: &Path) -> bool {
    let real = |p: &Path| p.canonicalize().unwrap_or_else(|_| p.to_owned());
    let (a, b) = (real(a), real(b));
    let version = |p: &Path| {
        let name = file_name(p);
        name.split_once(".so.").map(|(_, v)| v.to_owned()).filter(|v| v.contains('.'))
    };
    let differ = version(&a).zip(version(&b)).is_some_and(|(a, b)| a != b);
    a.parent() == b.parent() && !differ
}

/// Two files that are not of one copy.
fn mixed(spec: &LibrarySpec, a: &Path, b: &Path) -> Error {
    let text = format!("two copies of {}: {} and {}", spec.name, a.display(), b.display());
    Error::new(ErrorKind::Mismatch, text)
        .op("cuda")
        .hint("each would have its own state: make sure that one Python environment serves all")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A tree with one file for each of `files`.
    pub fn tree(files: &[&str]) -> tempfile::TempDir {
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
            other_packages: vec![],
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
    }

    /// cuDNN is a dozen libraries: parts of one copy and parts of another do not work together.
    #[test]
    fn parts_of_two_copies_of_cudnn_are_named() {
        let find = |loaded: &[&str], system: &Path| {
            let loaded = loaded.iter().map(PathBuf::from).collect();
            let system = vec![system.to_owned()];
            Places { loaded, system, ..Places::default() }.find(&CUDNN, None)
        };
        let none = Path::new("/nowhere");
        for good in [
            &["/a/libcudnn.so.9"][..],
            &["/a/libcudnn.so.9", "/a/libcudnn_ops.so.9", "/a/libcudnn_graph.so.9"],
            &["/a/libcudnn.so.9.1.0", "/a/libcudnn_engines_precompiled.so.9.1.0"],
            // Other libraries, and cuDNN 8, which is another one.
            &["/a/libcudnn.so.9", "/b/libcudnn_frontend.so", "/b/libcudnn_ops_infer.so.8"],
        ] {
            assert_eq!(find(good, none).unwrap().how, How::Loaded, "{good:?}");
        }
        for (bad, names) in [
            (
                &["/a/libcudnn.so.9", "/b/libcudnn_ops.so.9"][..],
                ["/a/libcudnn.so.9", "/b/libcudnn_ops"],
            ),
            (
                &["/a/libcudnn.so.9", "/a/libcudnn_graph.so.9", "/b/libcudnn_heuristic.so.9.2.1"],
                ["/a/libcudnn", "/b/libcudnn_heuristic"],
            ),
            (
                &["/a/libcudnn.so.9.1.0", "/a/libcudnn_adv.so.9.2.1"],
                ["/a/libcudnn.so.9.1.0", "/a/libcudnn_adv.so.9.2.1"],
            ),
            // The library itself is not loaded, and there is none.
            (
                &["/a/libcudnn_cnn.so.9", "/b/libcudnn_ops.so.9"],
                ["/a/libcudnn_cnn", "/b/libcudnn_ops"],
            ),
        ] {
            let e = find(bad, none).unwrap_err();
            assert!(e.is_mismatch() && e.get_hint().is_some(), "{bad:?}: {e}");
            assert!(names.iter().all(|n| e.message().contains(n)), "{bad:?}: {e}");
        }
        // One that would be loaded now must lie where the parts are that are loaded already.
        let dir = tree(&["libcudnn.so.9", "libcudnn_ops.so.9"]);
        let ops = dir.path().join("libcudnn_ops.so.9").display().to_string();
        assert_eq!(find(&[&ops], dir.path()).unwrap().how, How::System);
        let e = find(&["/b/libcudnn_ops.so.9"], dir.path()).unwrap_err();
        assert!(e.is_mismatch() && e.message().contains("/b/libcudnn_ops"), "{e}");
    }

    #[test]
    fn an_older_form_is_taken_where_the_newer_is_not_or_it_is_loaded() {
        let dir = tree(&["old/libcublasLt.so.12", "new/libcublasLt.so.13"]);
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        let mut places = Places { system: vec![old.clone()], ..Places::default() };
        let taken = |p: &Places, named: Option<&Path>| {
            p.find_or_older(&CUBLASLT, named).map(|(spec, f)| (spec.soname, f.how))
        };
        assert_eq!(taken(&places, None).unwrap(), ("libcublasLt.so.12", How::System));
        places.system.push(new.clone());
        assert_eq!(taken(&places, None).unwrap(), ("libcublasLt.so.13", How::System));
        for named in [&old, &old.join("libcublasLt.so.12")] {
            assert_eq!(taken(&places, Some(named)).unwrap(), ("libcublasLt.so.12", How::Named));
        }
        places.loaded.push("/torch/libcublasLt.so.12.8.4".into());
        assert_eq!(taken(&places, None).unwrap(), ("libcublasLt.so.12", How::Loaded));
        assert!(taken(&places, Some(&old)).unwrap_err().is_mismatch());
        assert_eq!(taken(&places, Some(&new)).unwrap(), ("libcublasLt.so.13", How::Named));
        // Neither: what is said is of the newer.
        let e = taken(&Places::default(), None).unwrap_err();
        assert!(e.is_unavailable() && e.message().contains("libcublasLt.so.13"), "{e}");
    }
}
