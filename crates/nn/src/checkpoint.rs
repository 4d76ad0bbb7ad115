//! Checkpoints: safetensors files of global tensors, so that any grid can read what another wrote.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::Tensor;

use crate::config::{Grid, ModelCfg};
use crate::params::{Kind, Param};
use crate::train::Trainer;

fn corrupt(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("checkpoint {}: {what}", path.display()))
}

/// True if this rank's part of `p` is the one that is written.
fn writes(t: &Trainer, p: &Param) -> bool {
    match p.kind {
        Kind::Replicated => t.model.comm.world.rank().idx() == 0,
        Kind::Sharded => (t.model.coord.dp, t.model.coord.cp) == (0, 0),
        Kind::Expert => true,
    }
}

/// The part of each parameter's state that a rank contributes.
fn local(p: &Param, which: &str) -> Result<Vec<f32>> {
    match which {
        "g" => p.g.to_f32(),
        "m" => p.m.to_f32(),
        "v" => p.v.to_f32(),
        _ => p.values().to_f32(),
    }
}

/// Collective: the global tensor of a parameter's values (`w`), gradient (`g`) or moments (`m`,
/// `v`), on rank 0 (empty elsewhere).
///
/// # Errors
/// The fault of a team.
pub fn gather(t: &Trainer, p: &Param, which: &str) -> Result<Vec<f32>> {
    let world = &t.model.comm.world;
    let mine = if writes(t, p) { local(p, which)? } else { Vec::new() };
    // Runs first, so that rank 0 knows where each rank's values belong.
    let mut runs = Vec::new();
    if writes(t, p) {
        p.runs(|local, at, len| runs.extend([local as u64, at as u64, len as u64]));
    }
    let all_runs = world.exchange_large("checkpoint", bytemuck::cast_slice(&runs))?;
    let all = world.exchange_large("checkpoint", bytemuck::cast_slice(&mine))?;
    if world.rank().idx() != 0 {
        return Ok(Vec::new());
    }
    let mut global = vec![f32::NAN; p.global.0 * p.global.1];
    for (values, runs) in all.iter().zip(&all_runs) {
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(values);
        let runs: Vec<u64> = bytemuck::pod_collect_to_vec(runs);
        for r in runs.chunks_exact(3) {
            let (local, at, len) = (r[0] as usize, r[1] as usize, r[2] as usize);
            global[at..at + len].copy_from_slice(&values[local..local + len]);
        }
    }
    Ok(global)
}

/// Collective: writes model, optimizer and step. Complete or not there: it is written beside the
/// target, synchronised, and renamed once all ranks agree.
///
/// # Errors
/// `Io` if the file cannot be written or put in place, on every rank; rank 0's says why, and
/// whether it is in place after all. The fault of a team.
pub fn save(t: &Trainer, path: &Path) -> Result<()> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for p in &t.model.params {
        for which in ["w", "m", "v"] {
            let values = gather(t, p, which)?;
            tensors.push((format!("{}.{which}", p.name), vec![p.global.0, p.global.1], values));
        }
    }
    let first = t.model.comm.world.rank().idx() == 0;
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = std::path::PathBuf::from(part);
    let written = if first { write(t, &part, &tensors) } else { Ok(()) };
    // A piece of a file is of no use to anybody.
    let written = written.inspect_err(|_| drop(fs::remove_file(&part)));
    settle(t, written)?;
    let committed = if first { commit(&part, path, flush_folder) } else { Ok(()) };
    settle(t, committed)
}

/// Collective: what rank 0 has come to; an error of its is one of every rank. Nobody returns before
/// the others know, as they would wait for it.
fn settle(t: &Trainer, mine: Result<()>) -> Result<()> {
    let good = t.model.comm.world.agree(mine.is_ok())?;
    mine?;
    if good {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, "rank 0 could not write the checkpoint; its error says why"))
}

/// Gives the complete file its name, and makes the name survive a crash.
fn commit(
    part: &Path,
    path: &Path,
    flush: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<()> {
    if let Err(e) = fs::rename(part, path) {
        // The first error is the one that counts.
        fs::remove_file(part).ok();
        return Err(Error::io(path.display(), e));
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    flush(folder).map_err(|e| {
        let text = format!(
            "checkpoint {}: written and in place, but {} could not be flushed, so that it may not \
             survive a crash of the machine: {e}",
            path.display(),
            folder.display()
        );
        Error::new(ErrorKind::Io, text).cause(e)
    })
}

fn flush_folder(folder: &Path) -> std::io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

fn write(t: &Trainer, path: &Path, tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Result<()> {
    let views = tensors
        .iter()
        .map(|(name, shape, values)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values))
                .map_err(|e| Error::internal(format!("{name}: {e}")))?;
            Ok((name.as_str(), view))
        })
        .collect::<Result<Vec<_>>>()?;
    let json = |v: serde_json::Result<String>| v.map_err(|e| Error::internal(e.to_string()));
    let meta = HashMap::from([
        ("format".to_owned(), "tilewire-1".to_owned()),
        ("step".to_owned(), t.step.to_string()),
        ("seed".to_owned(), t.cfg.seed.to_string()),
        ("model".to_owned(), json(serde_json::to_string(&t.model.cfg))?),
        ("grid".to_owned(), json(serde_json::to_string(&t.model.grid))?),
    ]);
    let bytes = safetensors::serialize(views, Some(meta))
        .map_err(|e| Error::internal(format!("serialisation: {e}")))?;
    let io = |e| Error::io(path.display(), e);
    fs::write(path, bytes).map_err(io)?;
    fs::File::open(path).and_then(|f| f.sync_all()).map_err(io)
}

/// The description of a checkpoint, from its own header.
pub struct Info {
    /// Number of the next step.
    pub step: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Sizes.
    pub model: ModelCfg,
    /// Grid that wrote it.
    pub grid: Grid,
}

/// Reads sizes and step without the tensors' values.
///
/// # Errors
/// `Io` if it cannot be read, `Corrupt` if it is damaged or not a checkpoint of this program.
pub fn info(path: &Path) -> Result<Info> {
    parse_info(path, &read(path)?)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| {
        Error::new(ErrorKind::Io, format!("checkpoint {}: {e}", path.display())).cause(e)
    })
}

fn parse_info(path: &Path, bytes: &[u8]) -> Result<Info> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| corrupt(path, e))?;
    let meta = header.metadata().clone().unwrap_or_default();
    let get = |k: &str| {
        meta.get(k).ok_or_else(|| {
            corrupt(path, format!("the file has no `{k}`: tilewire did not write it"))
        })
    };
    if get("format")? != "tilewire-1" {
        return Err(corrupt(path, "it has another format")
            .expected("tilewire-1")
            .seen(get("format")?));
    }
    // Devices count steps in an i32.
    let step = get("step")?.parse().ok().filter(|&s| i32::try_from(s).is_ok());
    Ok(Info {
        step: step.ok_or_else(|| corrupt(path, "the number of steps cannot be read"))?,
        seed: get("seed")?.parse().map_err(|_| corrupt(path, "the seed cannot be read"))?,
        model: serde_json::from_str(get("model")?).map_err(|e| corrupt(path, e))?,
        grid: serde_json::from_str(get("grid")?).map_err(|e| corrupt(path, e))?,
    })
}

/// Restores model, optimizer and step into a trainer of any grid.
///
/// # Errors
/// `Corrupt` if the file is damaged, or of another model: the trainer is as it was. What a device
/// reports, which may leave it half restored.
pub fn load(t: &mut Trainer, path: &Path) -> Result<()> {
    let bytes = read(path)?;
    let info = parse_info(path, &bytes)?;
    let sizes = |m: &ModelCfg| {
        [m.layers, m.d_model, m.heads, m.kv_heads, m.head_dim, m.experts, m.d_ff, m.top_k]
    };
    if sizes(&info.model) != sizes(&t.model.cfg) {
        return Err(corrupt(path, "it is of another model")
            .expected(format_args!("{:?}", t.model.cfg))
            .seen(format_args!("{:?}", info.model)));
    }
    let file = SafeTensors::deserialize(&bytes).map_err(|e| corrupt(path, e))?;
    let tensor = |p: &Param, which: &str| {
        let name = format!("{}.{which}", p.name);
        let view = file.tensor(&name).map_err(|e| corrupt(path, format!("{name}: {e}")))?;
        match view.shape() == [p.global.0, p.global.1] && view.dtype() == Dtype::F32 {
            true => Ok(view),
            false => Err(corrupt(path, format!("{name} has the wrong shape or type"))),
        }
    };
    let all = || t.model.params.iter().flat_map(|p| ["w", "m", "v"].map(|which| (p, which)));
    // All before the first is written: a file that is refused leaves the trainer as it was.
    all().try_for_each(|(p, which)| tensor(p, which).map(|_| ()))?;
    for (p, which) in all() {
        let global: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(p, which)?.data());
        let mut values = vec![0.0f32; p.len()];
        p.runs(|local, at, len| values[local..local + len].copy_from_slice(&global[at..at + len]));
        put(p, which, &values)?;
    }
    t.cfg.seed = info.seed;
    t.resume_at(info.step)
}

/// Restores one tensor of a parameter; of the values, both forms.
fn put(p: &Param, which: &str, values: &[f32]) -> Result<()> {
    let write = |t: &Tensor| {
        let narrow = Tensor::from_f32(values, t.dtype(), t.shape())?;
        narrow.read(|b| tilewire_device::Buffer::upload(t, b))?
    };
    match which {
        "m" => write(&p.m),
        "v" => write(&p.v),
        _ => {
            p.master.as_ref().map_or(Ok(()), write)?;
            write(&p.w)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2^32 was taken for step 0 by the optimizer alone.
    #[test]
    fn a_step_that_no_device_counts_is_corrupt() {
        for (step, good) in [("7", true), ("2147483647", true), ("2147483648", false)] {
            let words = [("format", "tilewire-1"), ("step", step), ("seed", "1")];
            let mut meta: HashMap<_, _> =
                words.map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect();
            let grid = Grid { dp: 1, cp: 1, tp: 1 };
            meta.insert("model".to_owned(), serde_json::to_string(&ModelCfg::default()).unwrap());
            meta.insert("grid".to_owned(), serde_json::to_string(&grid).unwrap());
            let none: [(&str, TensorView<'_>); 0] = [];
            let bytes = safetensors::serialize(none, Some(meta)).unwrap();
            let info = parse_info(Path::new("c"), &bytes);
            assert_eq!(info.map(|i| i.step.to_string()).ok(), good.then(|| step.to_owned()));
        }
    }

    #[test]
    fn a_folder_that_cannot_be_flushed_does_not_undo_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let (part, path) = (dir.path().join("c.part"), dir.path().join("c"));
        fs::write(&part, "whole").unwrap();
        let e = commit(&part, &path, |folder| {
            assert_eq!(folder, dir.path());
            Err(std::io::ErrorKind::StorageFull.into())
        });
        let e = e.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io);
        assert!(e.to_string().contains("in place, but"), "{e}");
        assert_eq!(fs::read(&path).unwrap(), b"whole");
    }
}
