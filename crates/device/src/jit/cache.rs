//! The disk cache of machine code.
//!
//! `<folder>/kernels-1/<key>-<compiler>.cubin`, each `magic | length u64 | digest | code`. The
//! folder belongs to the user and nobody else may write it: code from it runs on the device. A
//! file appears whole or not at all (written beside its place, flushed, renamed), and is checked
//! when it is read.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tilewire_core::{Error, ErrorKind, Result, inject};

use super::Key;

const MAGIC: &[u8; 8] = b"twcubin1";
const HEADER: usize = 8 + 8 + 32;
/// Larger files are not ours.
const MAX_CODE: u64 = 256 << 20;
/// A file that is still beside its place after so long: the process that wrote it was killed.
const ABANDONED: Duration = Duration::from_secs(3600);
/// Limit for one process to wait for another that compiles the same kernel.
const PATIENCE: Duration = Duration::from_secs(60);

/// The disk cache of one user.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
}

/// The contents of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheUsage {
    /// Kernels.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Held while a kernel is compiled; released with the file.
pub struct Lock(#[expect(dead_code, reason = "closing it releases the lock")] File);

impl Cache {
    /// Opens or makes the cache in `folder`, by default `$XDG_CACHE_HOME/tilewire` or
    /// `~/.cache/tilewire`.
    ///
    /// # Errors
    /// `Permission` if the folder belongs to somebody else or others may write it; `Io` if it
    /// cannot be made; `Unavailable` if there is no home.
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        let base = match folder {
            Some(f) => f.to_owned(),
            None => default_folder()?,
        };
        let dir = base.join("kernels-1");
        let io = |e| Error::io(format!("making the kernel cache {}", dir.display()), e).hint(HINT);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(io)?;
        // Not through a link: its target may be anybody's.
        let meta = std::fs::symlink_metadata(&dir).map_err(io)?;
        let owner = rustix::process::geteuid().as_raw();
        if !meta.is_dir() || meta.uid() != owner || meta.mode() & 0o022 != 0 {
            let text = format!("the kernel cache {} is not safe to use", dir.display());
            return Err(Error::new(ErrorKind::Permission, text)
                .expected(format_args!("a folder of user {owner} that nobody else may write"))
                .seen(format_args!("owner {}, mode {:o}", meta.uid(), meta.mode() & 0o7777))
                .hint(HINT));
        }
        Ok(Self { dir })
    }

    /// Returns the folder of the cache.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, key: &Key, compiler: &str) -> PathBuf {
        self.dir.join(format!("{key}-{compiler}.cubin"))
    }

    /// The code of `key` by `compiler`, if it is there and whole.
    pub fn load(&self, key: &Key, compiler: &str) -> Option<Vec<u8>> {
        let path = self.path(key, compiler);
        match read(&path, key, compiler) {
            Ok(code) => code,
            Err(e) => {
                log::warn!("{}: {e}; it is compiled anew", path.display());
                None
            }
        }
    }

    /// Returns whether there is a file for the code of `key` by `compiler`; it may be damaged.
    pub fn holds(&self, key: &Key, compiler: &str) -> bool {
        self.path(key, compiler).exists()
    }

    /// The code of `key` by any compiler.
    pub fn load_any(&self, key: &Key) -> Option<Vec<u8>> {
        let start = format!("{key}-");
        let mut names: Vec<String> = std::fs::read_dir(&self.dir)
            .ok()?
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| n.starts_with(&start) && n.ends_with(".cubin"))
            .collect();
        // The newest compiler first: 13.10 is newer than 13.9.
        names.sort_by_key(|n| {
            let numbers = n[start.len()..].split(|c: char| !c.is_ascii_digit());
            numbers.filter_map(|part| part.parse().ok()).collect::<Vec<u64>>()
        });
        names.iter().rev().find_map(|n| self.load(key, &n[start.len()..n.len() - 6]))
    }

    /// Puts the code of `key` by `compiler` in place.
    ///
    /// # Errors
    /// `Io`, with nothing left behind, if the disk is full or the folder cannot be written.
    pub fn store(&self, key: &Key, compiler: &str, code: &[u8]) -> Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let to = self.path(key, compiler);
        // A process of another container, or one that was killed, may have had the same number.
        let name = || {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            self.dir.join(format!(".{key}.{}.{number}", std::process::id()))
        };
        let mut made = None;
        let mut write = || -> std::io::Result<()> {
            let (mut f, beside) = loop {
                let beside = name();
                match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside) {
                    Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                    f => break (f?, beside),
                }
            };
            let beside = made.insert(beside);
            f.write_all(&head(key, compiler, code))?;
            inject::step("writing to the kernel cache").map_err(std::io::Error::other)?;
            f.write_all(code)?;
            f.sync_all()?;
            std::fs::rename(beside, &to)?;
            // It is in place; some file systems cannot flush a folder.
            File::open(&self.dir).and_then(|d| d.sync_all()).ok();
            Ok(())
        };
        let done = write();
        done.map_err(|e| {
            // Only what is ours.
            made.map(std::fs::remove_file);
            Error::io(format!("writing {}", to.display()), e).hint(HINT)
        })?;
        self.sweep();
        Ok(())
    }

    /// Removes what processes left that were killed as they wrote.
    fn sweep(&self) {
        let is_beside = |p: &Path| p.file_name().is_some_and(|n| n.as_encoded_bytes()[0] == b'.');
        let is_old = |p: &Path| {
            let changed = std::fs::symlink_metadata(p).and_then(|m| m.modified());
            changed.is_ok_and(|t| t.elapsed().is_ok_and(|age| age > ABANDONED))
        };
        for path in self.files().unwrap_or_default() {
            if is_beside(&path) && is_old(&path) {
                // Another process may have been faster.
                std::fs::remove_file(&path).ok();
            }
        }
    }

    /// Waits until no other process compiles `key`.
    ///
    /// # Errors
    /// `Timeout`; `Io` where files cannot be locked.
    pub fn lock(&self, key: &Key) -> Result<Lock> {
        let path = self.dir.join(format!("{key}.lock"));
        let io = |e: std::io::Error| Error::io(format!("locking {}", path.display()), e);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(io)?;
        let start = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) if start.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(Errno::WOULDBLOCK) => {
                    let text = format!("{}: another process holds it", path.display());
                    return Err(Error::new(ErrorKind::Timeout, text).elapsed(start.elapsed()));
                }
                Err(e) => return Err(io(e.into())),
            }
        }
    }

    /// Returns what is there.
    ///
    /// # Errors
    /// `Io` if the folder cannot be read.
    pub fn usage(&self) -> Result<CacheUsage> {
        let mut usage = CacheUsage::default();
        for path in self.files()?.iter().filter(|p| p.extension().is_some_and(|x| x == "cubin")) {
            usage.entries += 1;
            usage.bytes += std::fs::metadata(path).map_or(0, |m| m.len());
        }
        Ok(usage)
    }

    /// Removes every file; what was there. Folders are none of this cache's.
    ///
    /// # Errors
    /// `Io` if a file cannot be removed.
    pub fn clear(&self) -> Result<CacheUsage> {
        let usage = self.usage()?;
        for path in self.files()? {
            match std::fs::remove_file(&path) {
                // Another process was faster.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(_) if std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir()) => {}
                r => r.map_err(|e| Error::io(format!("removing {}", path.display()), e))?,
            }
        }
        Ok(usage)
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let io = |e| Error::io(format!("reading {}", self.dir.display()), e);
        let entries = std::fs::read_dir(&self.dir).map_err(io)?;
        entries.map(|e| e.map(|e| e.path()).map_err(io)).collect()
    }
}

const HINT: &str = "TILEWIRE_CACHE_DIR names another folder for it";

fn default_folder() -> Result<PathBuf> {
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    var("XDG_CACHE_HOME")
        .or_else(|| Some(var("HOME")?.join(".cache")))
        .map(|p| p.join("tilewire"))
        .ok_or_else(|| {
            let text = "the kernel cache has no folder: neither XDG_CACHE_HOME nor HOME is set";
            Error::new(ErrorKind::Unavailable, text).hint(HINT)
        })
}

/// The bytes in front of the code in its file.
fn head(key: &Key, compiler: &str, code: &[u8]) -> Vec<u8> {
    let len = (code.len() as u64).to_le_bytes();
    [&MAGIC[..], &len, digest(key, compiler, code).as_bytes()].concat()
}

fn digest(key: &Key, compiler: &str, code: &[u8]) -> blake3::Hash {
    let mut h = blake3::Hasher::new();
    h.update(key.to_string().as_bytes());
    h.update(compiler.as_bytes());
    h.update(code);
    h.finalize()
}

/// `Ok(None)` if there is no such file.
fn read(path: &Path, key: &Key, compiler: &str) -> Result<Option<Vec<u8>>, String> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(f) => f,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let mut bytes = Vec::new();
    file.take(MAX_CODE).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    code_of(&bytes, key, compiler)?;
    // Not a copy: code may have some hundred MiB.
    bytes.drain(..HEADER);
    Ok(Some(bytes))
}

/// The code in the bytes of a file.
fn code_of<'a>(bytes: &'a [u8], key: &Key, compiler: &str) -> Result<&'a [u8], String> {
    let Some((first, code)) = bytes.split_at_checked(HEADER) else {
        return Err("shorter than its header".to_owned());
    };
    if first == head(key, compiler, code) { Ok(code) } else { Err("damaged".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::KernelSpec;

    fn key() -> Key {
        let (name, text, arch) = ("k".to_owned(), "text".to_owned(), "sm_90a".to_owned());
        KernelSpec { name, text, arch, defines: vec![] }.key()
    }

    #[test]
    fn fuzz_kernel_cache() {
        let of = |compiler, code: &[u8]| [&head(&key(), compiler, code), code].concat();
        let seeds = vec![
            of("13.0", b"code"),
            of("13.0", b""),
            of("13.0", &crate::jit::elf::tests::file()),
            // Good, and not what was asked for.
            of("13.1", b"code"),
        ];
        tilewire_testing::fuzz!("kernel_cache", seeds, |b| {
            let Ok(code) = code_of(b, &key(), "13.0") else { return false };
            assert_eq!([&head(&key(), "13.0", code), code].concat(), b);
            assert!(
                code_of(b, &key(), "13.1").is_err() && code_of(&b[1..], &key(), "13.0").is_err()
            );
            true
        });
    }
}
