//! The environment of the process, the shell and the system's loader, as far as it names folders of
//! libraries.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::library_search::file_name;

/// Files in the text of `/proc/self/maps`.
pub(super) fn mapped(maps: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = maps.lines().filter_map(file_of).collect();
    files.sort();
    files.dedup();
    files
}

/// The suffix that the system appends to the name of a mapped file that has been removed or
/// replaced.
pub(super) const DELETED: &str = " (deleted)";

/// The file of a line of `/proc/self/maps`, by its name if somebody has replaced it since.
pub(super) fn file_of(line: &str) -> Option<PathBuf> {
    let name = &line[line.find('/')?..];
    Some(name.strip_suffix(DELETED).unwrap_or(name).into())
}

/// The folders that `ld.so.conf` gives to the system's loader, and the files that it takes in
/// everywhere.
pub(super) fn loader_folders(etc: &Path) -> Vec<PathBuf> {
    let mut files = vec![etc.join("ld.so.conf")];
    let more = entries(&etc.join("ld.so.conf.d"));
    files.extend(more.into_iter().filter(|p| p.extension().is_some_and(|x| x == "conf")));
    let text = |p: &PathBuf| std::fs::read_to_string(p).unwrap_or_default();
    let texts: Vec<String> = files.iter().map(text).collect();
    let lines = texts.iter().flat_map(|t| t.lines()).map(|l| l.split('#').next().unwrap_or(l));
    lines.map(str::trim).filter(|l| l.starts_with('/')).map(PathBuf::from).collect()
}

/// `site-packages` and `dist-packages` of Pythons.
#[derive(Default, Debug, PartialEq)]
pub(super) struct Sites {
    /// Of the active environment.
    pub active: Vec<PathBuf>,
    /// Of the others.
    pub others: Vec<PathBuf>,
}

/// The variables that name Pythons.
#[derive(Clone, Default)]
pub(super) struct Pythons {
    pub virtual_env: Option<OsString>,
    pub conda: Option<OsString>,
    pub path: OsString,
    pub home: Option<OsString>,
    /// Python leaves out the user's folder.
    pub no_user_site: bool,
}

impl Pythons {
    /// The active Python is that of the virtual environment, else the first one on the path that
    /// has packages (a wrapper has none). The user's folder belongs to it as Python has it, but to
    /// the others where conda is active. A virtual environment knows none.
    pub fn sites(self) -> Sites {
        let on_path = std::env::split_paths(&self.path)
            .filter(|p| p.join("python3").exists())
            .filter_map(|p| p.parent().map(Path::to_owned));
        let isolated = self.virtual_env.is_some();
        let roots = self.virtual_env.into_iter().map(PathBuf::from).chain(on_path);
        let mut seen = Vec::new();
        let mut of_roots = roots.map(|root| {
            packages(["lib", "lib64", "local/lib"].map(|lib| root.join(lib)), &mut seen)
        });
        let mut active = of_roots.find(|sites| !sites.is_empty()).unwrap_or_default();
        let mut others: Vec<PathBuf> = of_roots.flatten().collect();
        if let Some(home) = self.home.filter(|_| !isolated && !self.no_user_site) {
            let to = if self.conda.is_some() { &mut others } else { &mut active };
            to.extend(packages([Path::new(&home).join(".local/lib")], &mut seen));
        }
        Sites { active, others }
    }
}

/// `python3.x/site-packages` of the folders that were not `seen`. Debian names it `dist-packages`,
/// and what pip installs there lies in `local`; Fedora's is in `lib64`, which elsewhere is often a
/// link to `lib`.
fn packages(libs: impl IntoIterator<Item = PathBuf>, seen: &mut Vec<PathBuf>) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for lib in libs {
        let pythons = entries(&lib).into_iter().filter(|p| file_name(p).starts_with("python3"));
        for site in pythons.flat_map(|p| ["site-packages", "dist-packages"].map(|s| p.join(s))) {
            let Ok(real) = site.canonicalize() else { continue };
            if !seen.contains(&real) {
                seen.push(real);
                out.push(site);
            }
        }
    }
    out
}

/// Returns what a folder holds, in order; nothing if it is not there.
pub(super) fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut list: Vec<_> = list.collect();
    list.sort();
    list
}

#[cfg(test)]
mod tests {
    use super::super::library_search::tests::tree;
    use super::super::library_search::{How, NCCL, Places};
    use super::*;

    #[test]
    fn maps_and_environments_are_read() {
        let maps = "7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n\
                    7f10-7f20 rw-p 00000000 00:00 0 [heap]\n\
                    7f20-7f30 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n\
                    7f30-7f40 r-xp 00000000 08:01 13 /venv/libnccl.so.2 (deleted)\n";
        assert_eq!(mapped(maps), ["/usr/lib/libc.so.6", "/venv/libnccl.so.2"].map(PathBuf::from));
        let dir = tree(&[
            "a/bin/python3",
            "a/lib/python3.11/site-packages/x",
            "v/lib/python3.12/site-packages/x",
            "b/bin/sh",
        ]);
        let at = |p: &str| dir.path().join(p);
        let path = std::env::join_paths([at("b/bin"), at("a/bin")]).unwrap();
        let pythons = Pythons { virtual_env: Some(at("v").into()), path, ..Pythons::default() };
        let want = Sites {
            active: vec![at("v/lib/python3.12/site-packages")],
            others: vec![at("a/lib/python3.11/site-packages")],
        };
        assert_eq!(pythons.sites(), want);
        assert!(!Places::of_process().loaded.is_empty());
    }

    /// Wheels are found in the folders of Debian, Fedora and `pip install --user`; a folder under
    /// two names counts once.
    #[test]
    fn pythons_of_the_system_and_the_user_are_searched() {
        let dir = tree(&[
            "shims/bin/python3",
            "usr/bin/python3",
            "usr/lib/python3/dist-packages/x",
            "usr/lib64/python3.12/site-packages/x",
            "usr/local/lib/python3.12/dist-packages/x",
            "usr/lib/perl/site-packages/x",
            "v/lib/python3.12/site-packages/x",
            "home/.local/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
        ]);
        let at = |p: &str| dir.path().join(p);
        std::os::unix::fs::symlink("lib", at("v/lib64")).unwrap();
        let system = [
            "usr/lib/python3/dist-packages",
            "usr/lib64/python3.12/site-packages",
            "usr/local/lib/python3.12/dist-packages",
        ]
        .map(at);
        let user = at("home/.local/lib/python3.12/site-packages");
        let pythons = Pythons {
            path: std::env::join_paths([at("shims/bin"), at("usr/bin")]).unwrap(),
            home: Some(at("home").into()),
            ..Pythons::default()
        };
        // As Python has it, and no further.
        let alone = pythons.clone().sites();
        assert_eq!(alone.active, [&system[..], std::slice::from_ref(&user)].concat());
        assert!(alone.others.is_empty());
        let none = Pythons { no_user_site: true, ..pythons.clone() }.sites();
        assert_eq!((&none.active[..], none.others.len()), (&system[..], 0));
        let conda = Pythons { conda: Some(at("conda").into()), ..pythons.clone() }.sites();
        assert_eq!((conda.active, conda.others), (system.to_vec(), vec![user]));
        let venv = Pythons { virtual_env: Some(at("v").into()), ..pythons }.sites();
        let own = vec![at("v/lib/python3.12/site-packages")];
        assert_eq!((venv.active, venv.others), (own, system.to_vec()));
        // Those of the active Python go before a toolkit, others' behind it.
        let (site_packages, other_packages) = (alone.active, Vec::new());
        let mut places = Places { site_packages, other_packages, ..Places::default() };
        assert_eq!(places.find(&NCCL, None).unwrap().how, How::Wheel);
        places.toolkits = vec![at("cuda")];
        std::mem::swap(&mut places.site_packages, &mut places.other_packages);
        std::fs::create_dir_all(at("cuda/lib64")).unwrap();
        std::fs::write(at("cuda/lib64/libnccl.so.2"), "").unwrap();
        assert_eq!(places.find(&NCCL, None).unwrap().how, How::Toolkit);
    }

    #[test]
    fn folders_of_the_systems_loader_are_read() {
        let dir = tree(&["ld.so.conf.d/a.conf", "ld.so.conf.d/b.txt"]);
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n/opt/lib\n");
        write("ld.so.conf.d/a.conf", "# CUDA\n/usr/local/cuda/lib64 # here\n\n");
        write("ld.so.conf.d/b.txt", "/not/taken\n");
        let want = ["/opt/lib", "/usr/local/cuda/lib64"].map(PathBuf::from);
        assert_eq!(loader_folders(dir.path()), want);
        assert!(loader_folders(Path::new("/nowhere")).is_empty());
    }
}
