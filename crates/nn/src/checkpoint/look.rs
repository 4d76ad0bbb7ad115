//! Looking at checkpoints without a model: what a folder has, and what is damaged.

use std::path::{Path, PathBuf};

use tilewire_core::{Error, ErrorKind, Result};

use super::manifest::{self, BLOCK, MANIFEST, Manifest};
use super::shard::{Block, Reader};
use super::store;

/// A checkpoint in the folder of a run.
#[derive(Debug)]
pub struct Found {
    /// Its folder.
    pub path: PathBuf,
    /// Its manifest, or what is wrong with it.
    pub manifest: Result<Manifest>,
}

impl Found {
    /// Bytes of its files but for the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.iter().flat_map(|m| &m.files).map(|f| f.bytes).sum()
    }
}

/// The checkpoints in the folder of a run, the newest first. Reads their manifests alone.
///
/// # Errors
/// `Io` if the folder cannot be read.
pub fn list(dir: &Path) -> Result<Vec<Found>> {
    let found = |(_, path): (u64, PathBuf)| Found { manifest: manifest::read(&path), path };
    Ok(store::generations(dir)?.into_iter().map(found).collect())
}

/// The outcome of [`verify`].
#[derive(Debug)]
pub struct Verified {
    /// The checkpoint.
    pub path: PathBuf,
    /// Number of its next step; none if the manifest cannot be read.
    pub step: Option<u64>,
    /// Bytes that were read.
    pub bytes: u64,
    /// All that is damaged or missing, each with file, tensor and bytes.
    pub damage: Vec<Error>,
}

/// Reads a checkpoint, or all checkpoints of a run's folder, whole, and compares every digest. Uses
/// a thread for each core and some MiB.
///
/// # Errors
/// `Io` if nothing is there.
pub fn verify(path: &Path) -> Result<Vec<Verified>> {
    if path.join(MANIFEST).symlink_metadata().is_ok() {
        return Ok(vec![verify_one(path)]);
    }
    let all = store::generations(path)?;
    if all.is_empty() {
        let text = format!("checkpoint {}: there is none in this folder", path.display());
        return Err(Error::new(ErrorKind::Io, text));
    }
    Ok(all.iter().map(|(_, p)| verify_one(p)).collect())
}

fn verify_one(path: &Path) -> Verified {
    let m = match manifest::read(path) {
        Ok(m) => m,
        Err(e) => {
            return Verified { path: path.to_owned(), step: None, bytes: 0, damage: vec![e] };
        }
    };
    let num = std::thread::available_parallelism().map_or(1, usize::from);
    let damage = std::thread::scope(|s| {
        let share = |i: usize| {
            let m = &m;
            move || damage(path, m, (i, num))
        };
        let start = |i: usize| std::thread::Builder::new().spawn_scoped(s, share(i));
        let workers: Vec<_> = (0..num).map(start).collect();
        let panicked = |_| vec![Error::internal("a thread that reads a checkpoint has panicked")];
        let join = |(i, worker): (usize, std::io::Result<std::thread::ScopedJoinHandle<'_, _>>)| {
            match worker {
                Ok(w) => w.join().unwrap_or_else(panicked),
                // Without memory for a thread this one does its share.
                Err(_) => share(i)(),
            }
        };
        workers.into_iter().enumerate().flat_map(join).collect()
    });
    let bytes = m.files.iter().map(|f| f.bytes).sum();
    Verified { path: path.to_owned(), step: Some(m.step), bytes, damage }
}

/// The damage in the blocks of share `(i, of)`; that of a file as a whole belongs to the share of
/// its number.
pub(super) fn damage(dir: &Path, m: &Manifest, (i, of): (usize, usize)) -> Vec<Error> {
    let (mut reader, mut out) = (Reader::new(dir, m), Vec::new());
    let (mut good, mut bytes) = (Vec::new(), Vec::new());
    for file in 0..m.files.len() {
        match reader.open(file) {
            Ok(_) => good.push(true),
            Err(e) => {
                good.push(false);
                if file % of == i {
                    out.push(e);
                }
            }
        }
    }
    for (_, t) in m.tensors.iter().enumerate().filter(|(n, _)| n % of == i) {
        for part in t.parts.iter().filter(|p| good[p.file]) {
            for num in 0..(4 * part.num_values()).div_ceil(BLOCK) {
                let block = Block { tensor: t, part, num };
                let read = reader.read(block, &mut bytes);
                out.extend(read.and_then(|()| block.check(dir, m, &bytes)).err());
            }
        }
    }
    out
}
