//! Checkpoints: a folder of safetensors files with a manifest, which any grid can read.
//!
//! [`Checkpoints`] writes: each rank streams its share of the parameters and moments into a file of
//! its own; rank 0 adds the manifest, which has a digest of every byte, and puts the folder in
//! place in one step (`store.rs`). [`resume`] reads what this rank needs, checks the digest of all
//! that it reads, and, given the folder of a run, takes the newest checkpoint that is whole. Both
//! hold at most some 40 MiB in memory, whatever the size of the model: the device, digests and the
//! disk work beside each other on blocks (`stream.rs`, `rows.rs`).

mod gather;
mod look;
pub mod manifest;
mod read;
mod rows;
mod shard;
mod store;
mod stream;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_symm::LiveTeam;

pub use gather::gather;
pub use look::{Found, Verified, list, verify};
pub use read::{Difference, Resumed, resume};
pub use store::probe;

use crate::data::Data;
use crate::params::{Kind, Param};
use crate::train::Trainer;
use manifest::{BLOCK, FileEntry, MANIFEST, Manifest, Part, Run, TensorEntry, VERSION};
use shard::Source;
use store::Store;

/// The tensors of a parameter: values, first and second moment.
const STATES: [&str; 3] = ["w", "m", "v"];

/// Checkpoints that a run keeps unless it is asked otherwise.
pub const KEEP: usize = 2;

/// The folder that a run writes its checkpoints to. While it lives, no other job can write there.
pub struct Checkpoints {
    /// On rank 0.
    store: Option<Store>,
}

/// A checkpoint that is in place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files but for the manifest.
    pub bytes: u64,
}

/// The outcome of a step that every rank takes: an error of one is one of all, with its text, so
/// that nobody waits for a rank that has given up, and all do the same next.
fn settle<T>(team: &LiveTeam, mine: Result<T>) -> Result<T> {
    const KINDS: [ErrorKind; 4] =
        [ErrorKind::Io, ErrorKind::Corrupt, ErrorKind::InvalidArgument, ErrorKind::Internal];
    let said = match &mine {
        Ok(_) => Vec::new(),
        Err(e) => {
            let kind = KINDS.iter().position(|k| *k == e.kind()).unwrap_or(KINDS.len() - 1);
            let mut said = vec![kind as u8];
            said.extend(e.to_string().chars().take(2000).collect::<String>().into_bytes());
            said
        }
    };
    let all = team.exchange("checkpoint", &said)?;
    let value = mine?;
    match all.iter().enumerate().find_map(|(rank, said)| Some((rank, said.split_first()?))) {
        None => Ok(value),
        Some((rank, (kind, text))) => {
            let kind = KINDS.get(usize::from(*kind)).copied().unwrap_or(ErrorKind::Internal);
            let text = String::from_utf8_lossy(text);
            Err(Error::new(kind, format!("{text} (rank {rank} reports this)")))
        }
    }
}

/// The report of a rank on its file, for the manifest.
#[derive(Serialize, Deserialize, Default)]
struct Written {
    file: Option<FileEntry>,
    /// Name of each tensor and the part of it.
    parts: Vec<(String, Part)>,
}

impl Checkpoints {
    /// Collective: opens `dir`, which is made if it is not there, to keep the newest `keep` (at
    /// least 1) checkpoints. What a job that was killed has left there is removed.
    ///
    /// # Errors
    /// `Io` if the folder is of another user, no folder, cannot be made, or another job writes
    /// there; the fault of a team.
    pub fn open(world: &LiveTeam, dir: &Path, keep: usize) -> Result<Self> {
        let first = world.rank().idx() == 0;
        let store = if first { Store::open(dir, keep.max(1)).map(Some) } else { Ok(None) };
        Ok(Self { store: settle(world, store)? })
    }

    /// Collective: returns whether the folder has a checkpoint, whole or not.
    ///
    /// # Errors
    /// `Io` if the folder cannot be read; the fault of a team.
    pub fn has_any(&self, world: &LiveTeam) -> Result<bool> {
        let look = |s: &Store| Ok(!store::generations(&s.dir)?.is_empty());
        let has = settle(world, self.store.as_ref().map_or(Ok(true), look))?;
        world.agree(has)
    }

    /// Collective: refuses to go on where the folder has later checkpoints than the trainer, but
    /// for those that are `damaged`: they would be taken for this run's. Damaged ones are not kept
    /// instead of whole ones.
    ///
    /// # Errors
    /// `InvalidArgument` naming the later one; the fault of a team.
    pub fn begin(&mut self, t: &Trainer, damaged: &[PathBuf]) -> Result<()> {
        let later = self.store.as_mut().map_or(Ok(()), |s| no_later(s, t.step as u64, damaged));
        settle(&t.model.comm.world, later)
    }

    /// Collective: writes model, optimizer and step, and removes checkpoints that are not kept. It
    /// is whole or not there. Rank 0 returns what it has written, others none.
    ///
    /// # Errors
    /// `Io` if it cannot be written or put in place, on every rank; the fault of a team.
    pub fn save(&self, t: &Trainer, data: &Data) -> Result<Option<Saved>> {
        let world = &t.model.comm.world;
        let begun = self.store.as_ref().map(Store::begin).transpose();
        let work = settle(world, begun)?;
        let saved = self.write(t, data, work.as_deref());
        if let (Err(_), Some(work)) = (&saved, &work) {
            // Half of a checkpoint is of no use; the error is what counts, and the next job removes
            // what stays.
            std::fs::remove_dir_all(work).ok();
        }
        saved
    }

    fn write(&self, t: &Trainer, data: &Data, work: Option<&Path>) -> Result<Option<Saved>> {
        let world = &t.model.comm.world;
        let name = work.map(|w| w.to_string_lossy().into_owned().into_bytes());
        let all = world.exchange("checkpoint", &name.unwrap_or_default())?;
        let folder = PathBuf::from(String::from_utf8_lossy(&all[0]).into_owned());
        let written = settle(world, write_mine(t, &folder))?;
        let text = serde_json::to_vec(&written).map_err(|e| Error::internal(e.to_string()))?;
        let all = world.exchange_large("checkpoint", &text)?;
        let commit = || -> Result<Option<Saved>> {
            let (Some(store), Some(work)) = (&self.store, work) else { return Ok(None) };
            let all: Vec<Written> = all
                .iter()
                .map(|b| serde_json::from_slice(b).map_err(|e| Error::internal(e.to_string())))
                .collect::<Result<_>>()?;
            let manifest = manifest_of(t, data, all)?;
            let (at, text) = (work.join(MANIFEST), manifest::seal(&manifest)?);
            let mut file = store::create_file(&at)?;
            let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
            written.map_err(|e| Error::io(at.display(), e))?;
            let path = store.commit(work, manifest.step)?;
            store.prune(manifest.step)?;
            Ok(Some(Saved { path, bytes: manifest.files.iter().map(|f| f.bytes).sum() }))
        };
        settle(world, commit())
    }
}

fn no_later(store: &mut Store, now: u64, damaged: &[PathBuf]) -> Result<()> {
    let all = store::generations(&store.dir)?;
    let is_damaged = |p: &Path| damaged.iter().any(|d| d.file_name() == p.file_name());
    store.damaged = all.iter().filter(|(_, p)| is_damaged(p)).map(|(step, _)| *step).collect();
    match all.iter().find(|(step, path)| *step > now && !is_damaged(path)) {
        None => Ok(()),
        Some((step, path)) => {
            let (path, dir) = (path.display(), store.dir.display());
            let text = format!("{path} is of step {step}, and this run is at step {now}");
            Err(Error::invalid(text).hint(format!(
                "give `--resume {dir}` to go on from there, or `--checkpoint` another folder"
            )))
        }
    }
}

/// The parameters that this rank writes, by number: of ranks that hold the same elements the one
/// with the least to write so far. Every rank comes to the same.
fn shares(t: &Trainer) -> Vec<bool> {
    let (grid, me) = (&t.model.grid, t.model.comm.world.rank().idx());
    let mut bytes = vec![0; grid.size()];
    let share = |p: &Param| {
        let mut least = |tp: Option<usize>| {
            let holds = |r: &usize| tp.is_none_or(|tp| grid.coord(Rank::new(*r as u32)).tp == tp);
            let who = (0..bytes.len()).filter(holds).min_by_key(|r| bytes[*r]).unwrap_or(0);
            bytes[who] += p.len();
            who == me
        };
        match p.kind {
            Kind::Replicated => least(None),
            // Each of the parts of tp, all of one size.
            Kind::Sharded => (0..grid.tp).map(|tp| least(Some(tp))).fold(false, |a, b| a | b),
            Kind::Expert => true,
        }
    };
    t.model.params.iter().map(share).collect()
}

/// Writes this rank's file into `folder`, if it has anything to write.
fn write_mine(t: &Trainer, folder: &Path) -> Result<Written> {
    let mut sources = Vec::new();
    for (p, mine) in t.model.params.iter().zip(shares(t)) {
        if mine && !p.is_empty() {
            sources.extend([p.values(), &p.m, &p.v].into_iter().zip(STATES).map(
                |(values, state)| {
                    let name = format!("{}.{state}", p.name);
                    Source { name, values: values.clone(), pieces: p.pieces.clone() }
                },
            ));
        }
    }
    if sources.is_empty() {
        return Ok(Written::default());
    }
    let (file, parts) = shard::write(folder, t.model.comm.world.rank().idx(), &sources)?;
    let parts = sources.into_iter().map(|s| s.name).zip(parts).collect();
    Ok(Written { file: Some(file), parts })
}

/// Joins the reports of all ranks. Files are numbered by the ranks that write.
fn manifest_of(t: &Trainer, data: &Data, all: Vec<Written>) -> Result<Manifest> {
    let mut files = Vec::new();
    let shape = |p: &Param| [p.global.0 as u64, p.global.1 as u64];
    let mut tensors: Vec<_> = t
        .model
        .params
        .iter()
        .flat_map(|p| STATES.map(|s| (format!("{}.{s}", p.name), shape(p))))
        .map(|(name, shape)| TensorEntry { name, shape, parts: Vec::new() })
        .collect();
    let index: std::collections::HashMap<String, usize> =
        tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
    for written in all {
        let Some(file) = written.file else { continue };
        for (name, part) in written.parts {
            let at = index.get(&name);
            let at = at.ok_or_else(|| Error::internal(format!("no parameter has {name}")))?;
            tensors[*at].parts.push(Part { file: files.len(), ..part });
        }
        files.push(file);
    }
    let m = Manifest {
        version: VERSION,
        tilewire: env!("CARGO_PKG_VERSION").to_owned(),
        step: t.step as u64,
        run: run_of(t, data),
        block_bytes: BLOCK,
        files,
        tensors,
    };
    // A checkpoint that could not be read is found while the one before it is there.
    m.check().map_err(|e| Error::internal(format!("the manifest of a checkpoint: {e}")))?;
    Ok(m)
}

/// The parameters of the trainer's run.
fn run_of(t: &Trainer, data: &Data) -> Run {
    Run {
        seed: t.cfg.seed,
        model: t.model.cfg,
        dtype: t.model.comm.place.dtype.to_string(),
        grid: t.model.grid,
        optim: t.cfg.optim.into(),
        data: data.id(),
    }
}
