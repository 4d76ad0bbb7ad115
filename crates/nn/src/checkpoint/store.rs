//! The folder of a run's checkpoints: names, the lock, and what makes a checkpoint appear whole.
//!
//! ```text
//! DIR/.lock                     held by the job that writes here
//! DIR/step-0000000060/          a checkpoint: manifest.json and one file of each rank that writes
//! DIR/.work-<random>/           one that is being written, or taken away
//! ```
//!
//! A checkpoint is written into a new folder of a random name and mode 0700, by files that did not
//! exist (mode 0600), each flushed; the manifest comes last; then the folder is flushed and gets
//! its name in one step. So a name that begins with `step-` is whole from its first moment, and
//! nothing that others put at a name is followed or written to. What a job that was killed leaves
//! is a work folder, which the next owner of the lock removes.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags};
use tilewire_core::{Error, ErrorKind, Result};

const STEP: &str = "step-";
const WORK: &str = ".work-";
const LOCK: &str = ".lock";
const HINT: &str = "name a folder that is not there yet, or one that this user's jobs have made";

/// The name of the checkpoint of `step` within its folder.
pub fn name_of(step: u64) -> String {
    format!("{STEP}{step:010}")
}

fn refused(dir: &Path, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io, format!("checkpoints in {}: {what}", dir.display())).hint(HINT)
}

fn io_at(path: &Path, e: io::Error) -> Error {
    Error::io(path.display(), e)
}

/// Opens a regular file for reading: no link is followed, no pipe waits for its writer.
///
/// # Errors
/// `Io` if it cannot be opened or is none.
pub fn open_file(path: &Path) -> Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| io_at(path, e))?;
    match file.metadata().map_err(|e| io_at(path, e))?.is_file() {
        true => Ok(file),
        false => {
            Err(Error::new(ErrorKind::Io, format!("{}: it is no regular file", path.display())))
        }
    }
}

/// Makes a file that was not there, which this user alone can read.
///
/// # Errors
/// `Io` if it is there or cannot be made.
pub fn create_file(path: &Path) -> Result<File> {
    let mut how = OpenOptions::new();
    how.write(true).create_new(true).mode(0o600).open(path).map_err(|e| io_at(path, e))
}

/// The real path of `dir`, and whether it is there: links are resolved, and the folder is ours.
fn resolve(dir: &Path) -> Result<(PathBuf, bool)> {
    let there = match dir.symlink_metadata() {
        Ok(_) => true,
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(io_at(dir, e).hint(HINT)),
    };
    if !there {
        let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = parent.canonicalize().map_err(|e| io_at(dir, e).hint(HINT))?;
        let name = dir.file_name().ok_or_else(|| refused(dir, "the path ends in `..`"))?;
        if !parent.is_dir() {
            return Err(refused(dir, "what should hold it is not a directory"));
        }
        return Ok((parent.join(name), false));
    }
    let real = dir.canonicalize().map_err(|e| io_at(dir, e).hint(HINT))?;
    let meta = real.symlink_metadata().map_err(|e| io_at(dir, e))?;
    if !meta.is_dir() {
        return Err(refused(dir, "this is not a directory"));
    }
    own(dir, &meta)?;
    Ok((real, true))
}

/// Refuses what another user owns: its owner could put anything at our names.
fn own(path: &Path, meta: &fs::Metadata) -> Result<()> {
    let me = rustix::process::geteuid().as_raw();
    match meta.uid() == me {
        true => Ok(()),
        false => Err(refused(path, format_args!("user {} owns this, and not {me}", meta.uid()))),
    }
}

/// Checks that checkpoints can be written to `dir`, and leaves everything as it was.
///
/// # Errors
/// `Io` with what is in the way.
pub fn probe(dir: &Path) -> Result<()> {
    let (real, there) = resolve(dir)?;
    // A folder that is to come is made beside others of its kind.
    let place = if there { real.as_path() } else { real.parent().unwrap_or(Path::new("/")) };
    let work = new_folder(place).map_err(|e| e.hint(HINT))?;
    fs::remove_dir(&work).map_err(|e| io_at(&work, e))
}

/// A new folder of a random name in `dir`.
fn new_folder(dir: &Path) -> Result<PathBuf> {
    let mut random = [0u8; 12];
    let got = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    got.map_err(|e| Error::io("random bytes", e))?;
    let name: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let path = dir.join(format!("{WORK}{name}"));
    DirBuilder::new().mode(0o700).create(&path).map_err(|e| io_at(&path, e))?;
    Ok(path)
}

fn flush_folder(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|f| f.sync_all()).map_err(|e| io_at(dir, e))
}

/// The step of which a name is that of the checkpoint.
pub fn step_of(name: &std::ffi::OsStr) -> Option<u64> {
    let step = name.to_str()?.strip_prefix(STEP)?.parse().ok()?;
    (name == &*name_of(step)).then_some(step)
}

/// The checkpoints in `dir`, the newest first.
///
/// # Errors
/// `Io` if the folder cannot be read.
pub fn generations(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let is_dir = |e: &fs::DirEntry| e.file_type().is_ok_and(|t| t.is_dir());
    let read = || -> io::Result<Vec<(u64, PathBuf)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if let Some(step) = step_of(&entry.file_name()).filter(|_| is_dir(&entry)) {
                all.push((step, entry.path()));
            }
        }
        all.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
        Ok(all)
    };
    read().map_err(|e| {
        Error::new(ErrorKind::Io, format!("checkpoints in {}: {e}", dir.display())).cause(e)
    })
}

/// A folder of checkpoints that this process writes to: it holds the lock.
pub struct Store {
    /// Its real path.
    pub dir: PathBuf,
    keep: usize,
    /// Steps of checkpoints that are known to be damaged.
    pub damaged: Vec<u64>,
    /// Released when the process ends, however it ends.
    _lock: File,
}

impl Store {
    /// Makes the folder if it is not there, takes the lock, and removes what jobs that were killed
    /// have left.
    ///
    /// # Errors
    /// `Io` if the folder cannot be made or is not ours, or another job writes there.
    pub fn open(dir: &Path, keep: usize) -> Result<Self> {
        let (real, there) = resolve(dir)?;
        if !there {
            let made = DirBuilder::new().mode(0o700).create(&real);
            made.map_err(|e| io_at(dir, e).hint(HINT))?;
            flush_folder(real.parent().unwrap_or(Path::new("/")))?;
        }
        let lock = lock(&real)?;
        let store = Self { dir: real, keep, damaged: Vec::new(), _lock: lock };
        store.clean()?;
        Ok(store)
    }

    fn clean(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).map_err(|e| io_at(&self.dir, e))? {
            let entry = entry.map_err(|e| io_at(&self.dir, e))?;
            if entry.file_name().to_str().is_some_and(|n| n.starts_with(WORK)) {
                let path = entry.path();
                fs::remove_dir_all(&path).map_err(|e| io_at(&path, e))?;
            }
        }
        Ok(())
    }

    /// A new folder to write a checkpoint into.
    ///
    /// # Errors
    /// `Io` if it cannot be made.
    pub fn begin(&self) -> Result<PathBuf> {
        new_folder(&self.dir)
    }

    /// Gives the complete folder `work` the name of its step, in one step: a checkpoint of the same
    /// step that was there is taken away. Returns its path.
    ///
    /// # Errors
    /// `Io` if it cannot be put in place, or, where the text says so, if it is in place but may not
    /// survive a crash of the machine.
    pub fn commit(&self, work: &Path, step: u64) -> Result<PathBuf> {
        let path = self.dir.join(name_of(step));
        flush_folder(work)?;
        let rename =
            |flags| rustix::fs::renameat_with(rustix::fs::CWD, work, rustix::fs::CWD, &path, flags);
        match path.symlink_metadata() {
            Err(_) => rename(RenameFlags::NOREPLACE).or_else(|_| rename(RenameFlags::empty())),
            Ok(meta) if !meta.is_dir() => {
                return Err(refused(&path, "this is not a directory"));
            }
            Ok(meta) => {
                own(&path, &meta)?;
                // Where the file system cannot exchange two names, the old one is away for a
                // moment: a job that is killed then goes on from the checkpoint before it.
                rename(RenameFlags::EXCHANGE).or_else(|_| {
                    let away = self.begin().map_err(|_| rustix::io::Errno::IO)?;
                    rustix::fs::rename(&path, &away)?;
                    rustix::fs::rename(work, &path)?;
                    rustix::fs::rename(&away, work)
                })
            }
        }
        .map_err(|e| Error::io(path.display(), e))?;
        flush_folder(&self.dir).map_err(|e| {
            e.reworded(format!(
                "checkpoint {}: written and in place, but its folder could not be flushed, so that \
                 it may not survive a crash of the machine",
                path.display()
            ))
        })?;
        if work.exists() {
            fs::remove_dir_all(work).map_err(|e| io_at(work, e))?;
        }
        Ok(path)
    }

    /// Removes checkpoints up to `step` but for the newest `keep`, of which damaged ones are the
    /// last. Later ones are of another run, or damaged: nobody asked for their end.
    ///
    /// # Errors
    /// `Io` if one cannot be removed.
    pub fn prune(&self, step: u64) -> Result<()> {
        let mut ours = generations(&self.dir)?;
        ours.retain(|(s, _)| *s <= step);
        ours.sort_by_key(|(s, _)| self.damaged.contains(s) && *s < step);
        for (_, path) in ours.into_iter().skip(self.keep) {
            // Under another name first: no half of a checkpoint is ever seen.
            let away = self.begin()?;
            fs::rename(&path, &away).map_err(|e| io_at(&path, e))?;
            fs::remove_dir_all(&away).map_err(|e| io_at(&away, e))?;
        }
        Ok(())
    }
}

/// Takes the lock of a folder of ours.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
        .open(&path)
        .map_err(|e| io_at(&path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::new(
            ErrorKind::Io,
            format!("checkpoints in {}: another job writes there", dir.display()),
        )
        .hint("wait for its end, or name another folder")),
        Err(TryLockError::Error(e)) => {
            let text = format!("{}: its file system cannot lock files: {e}", path.display());
            Err(Error::new(ErrorKind::Io, text).cause(e).hint("name a folder on another one"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(store: &Store, step: u64, text: &str) -> PathBuf {
        let work = store.begin().unwrap();
        fs::write(work.join("f"), text).unwrap();
        store.commit(&work, step).unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string());
        let mut names: Vec<_> = names.map(|n| n.unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn one_job_writes_and_keeps_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("c");
        probe(&at).unwrap();
        assert!(!at.exists());
        let store = Store::open(&at, 2).unwrap();
        let e = Store::open(&at, 2).err().unwrap().to_string();
        assert!(e.contains("another job writes there"), "{e}");
        for step in [5, 10, 20, 900] {
            whole(&store, step, "x");
        }
        store.prune(20).unwrap();
        assert_eq!(names(&at), [".lock", "step-0000000010", "step-0000000020", "step-0000000900"]);
        // One that is damaged goes before one that is whole.
        let mut store = store;
        whole(&store, 30, "x");
        store.damaged = vec![20];
        store.prune(30).unwrap();
        assert_eq!(names(&at), [".lock", "step-0000000010", "step-0000000030", "step-0000000900"]);
        store.damaged.clear();
        whole(&store, 20, "x");
        store.prune(30).unwrap();
        // The same step once more takes the place of the first.
        let path = whole(&store, 20, "y");
        assert_eq!(fs::read(path.join("f")).unwrap(), b"y");
        assert_eq!(names(&at).len(), 4);
        // What a killed job leaves is gone with the next owner of the lock, and nothing else.
        let left = store.begin().unwrap();
        fs::write(left.join("f"), "half").unwrap();
        fs::write(at.join("mine.txt"), "").unwrap();
        drop(store);
        let store = Store::open(&at, 2).unwrap();
        assert_eq!((names(&at).len(), left.exists()), (5, false));
        assert_eq!(generations(&at).unwrap()[0].0, 900);
        drop(store);
        assert_eq!(fs::metadata(&at).unwrap().mode() & 0o777, 0o700);
    }

    /// Devices, pipes, files and links to nowhere are refused, links to folders are resolved, and
    /// nothing that stands at one of our names is followed.
    #[test]
    fn nothing_that_is_not_ours_is_followed_or_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "mine").unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        std::os::unix::fs::symlink("nowhere", at("lost")).unwrap();
        let mut all = vec!["file", "pipe", "lost", "none/c", "file/c"];
        // Root can make a device: that of /dev/null, under a name of ours.
        let kind = rustix::fs::FileType::CharacterDevice;
        let null = rustix::fs::makedev(1, 3);
        if rustix::fs::mknodat(rustix::fs::CWD, at("device"), kind, 0o600.into(), null).is_ok() {
            all.push("device");
        }
        let kinds = || -> Vec<_> {
            all.iter().map(|n| at(n).symlink_metadata().map(|m| m.file_type()).ok()).collect()
        };
        let before = kinds();
        for name in &all {
            assert!(probe(&at(name)).is_err() && Store::open(&at(name), 1).is_err(), "{name}");
        }
        assert_eq!(kinds(), before);
        assert_eq!(fs::read(at("file")).unwrap(), b"mine");
        fs::create_dir(at("real")).unwrap();
        std::os::unix::fs::symlink("real", at("latest")).unwrap();
        let store = Store::open(&at("latest"), 1).unwrap();
        let path = whole(&store, 1, "x");
        assert_eq!(path, at("real").canonicalize().unwrap().join("step-0000000001"));
        assert!(at("latest").is_symlink());
        // A link at the name of a step, and at that of the lock.
        fs::create_dir(at("victim")).unwrap();
        std::os::unix::fs::symlink(at("victim"), at("real").join(name_of(2))).unwrap();
        let work = store.begin().unwrap();
        assert!(store.commit(&work, 2).unwrap_err().to_string().contains("not a directory"));
        drop(store);
        fs::remove_file(at("real/.lock")).unwrap();
        std::os::unix::fs::symlink(at("file"), at("real/.lock")).unwrap();
        assert!(Store::open(&at("real"), 1).is_err());
        assert_eq!(fs::read(at("file")).unwrap(), b"mine");
        assert_eq!(names(&at("victim")).len(), 0);
        // Of another user: root can make such a folder.
        if rustix::process::geteuid().is_root() {
            fs::create_dir(at("other")).unwrap();
            std::os::unix::fs::chown(at("other"), Some(12345), None).unwrap();
            let e = probe(&at("other")).unwrap_err().to_string();
            assert!(e.contains("user 12345 owns this"), "{e}");
        }
    }

    #[test]
    fn files_are_new_private_and_regular() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        create_file(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(create_file(&path).is_err());
        std::os::unix::fs::symlink("f", dir.path().join("l")).unwrap();
        assert!(open_file(&path).is_ok());
        assert!(open_file(&dir.path().join("l")).is_err() && open_file(dir.path()).is_err());
    }
}
