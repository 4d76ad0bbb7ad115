//! Going on from a checkpoint, on any grid.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use tilewire_core::{DType, Error, ErrorKind, Result, convert_from_f32};
use tilewire_device::{Buffer, Tensor};

use super::manifest::{self, MANIFEST, Manifest, Run, TensorEntry, corrupt};
use super::rows::{self, Job, Rows};
use super::{STATES, run_of, settle, store};
use crate::config::ModelCfg;
use crate::data::Data;
use crate::train::Trainer;

/// Values that are restored at a time, as whole rows: 4 MiB.
const CHUNK: usize = 1 << 20;

/// A parameter of the run that was another when the checkpoint was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Name of the parameter.
    pub what: &'static str,
    /// Value in the checkpoint.
    pub was: String,
    /// Value of this run.
    pub is: String,
    /// True if the checkpoint's goes on.
    pub keeps: bool,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, was, is, keeps } = self;
        match keeps {
            true => write!(f, "{what}: {was} of the checkpoint goes on, {is} is not used"),
            false => write!(f, "{what}: {is}, and {was} when the checkpoint was written"),
        }
    }
}

/// The outcome of [`resume`].
#[derive(Debug)]
pub struct Resumed {
    /// The checkpoint that the trainer goes on from.
    pub path: PathBuf,
    /// Bytes of its files but for the manifest; a rank reads its part of them.
    pub bytes: u64,
    /// The parameters in which this run differs from the one that wrote it.
    pub differences: Vec<Difference>,
    /// Newer checkpoints of the folder that are damaged, with the first damage found in each.
    pub damaged: Vec<(PathBuf, Error)>,
}

/// Collective: restores model, optimizer, step and seed into a trainer of any grid. `path` is a
/// checkpoint, or the folder of a run, of which the newest checkpoint that is whole is taken.
///
/// # Errors
/// `Io` if there is none; `InvalidArgument` if it is of another model: the trainer is as it was.
/// `Corrupt` if it, or every one of the folder, is damaged, with file, tensor and bytes, and the
/// newest of the same folder that is whole in the hint; the trainer then refuses to step, as it may
/// have values of both. What a device reports; the fault of a team.
pub fn resume(t: &mut Trainer, data: &Data, path: &Path) -> Result<Resumed> {
    let world = t.model.comm.world.clone();
    let steps = settle(&world, candidates(path))?;
    // Rank 0's list is that of all: another job may write to the folder meanwhile.
    let words = steps.as_ref().map_or(&[][..], |s| bytemuck::cast_slice(s));
    let all = world.exchange_large("checkpoint", words)?;
    let listed: Vec<u64> = bytemuck::pod_collect_to_vec(&all[0]);
    let paths = match steps {
        Some(_) => listed.into_iter().map(|s| path.join(store::name_of(s))).collect(),
        None => vec![path.to_owned()],
    };
    let mut damaged = Vec::new();
    for dir in paths {
        match restore(t, data, &dir) {
            Ok((bytes, differences)) => {
                return Ok(Resumed { path: dir, bytes, differences, damaged });
            }
            Err(e) if e.kind() == ErrorKind::Corrupt => damaged.push((dir, e)),
            Err(e) => return Err(e),
        }
    }
    let many = damaged.len();
    let Some((dir, e)) = damaged.into_iter().next() else {
        let text = format!("checkpoint {}: there is none in this folder", path.display());
        return Err(Error::new(ErrorKind::Io, text));
    };
    if dir != path {
        return Err(e.hint(format!("all {many} checkpoints of the folder are damaged")));
    }
    Err(match newest_whole(t, &dir)? {
        Some(other) => e.hint(format!("{} is whole", other.display())),
        None => e.hint("no other checkpoint beside it is whole"),
    })
}

/// Steps of the checkpoints in the folder of a run, the newest first; none if `path` is itself a
/// checkpoint.
fn candidates(path: &Path) -> Result<Option<Vec<u64>>> {
    let what = |e: std::io::Error| {
        Error::new(ErrorKind::Io, format!("checkpoint {}: {e}", path.display())).cause(e)
    };
    if !path.metadata().map_err(what)?.is_dir() {
        return Err(corrupt(path, "it is not a folder: tilewire did not write it"));
    }
    let name = path.canonicalize().map_err(what)?;
    let is_step = name.file_name().and_then(store::step_of).is_some();
    if path.join(MANIFEST).symlink_metadata().is_ok() || is_step {
        return Ok(None);
    }
    Ok(Some(store::generations(path)?.into_iter().map(|(step, _)| step).collect()))
}

/// Collective: the newest checkpoint beside `dir`, but for itself, that is whole: each rank looks
/// at its share of the files.
fn newest_whole(t: &Trainer, dir: &Path) -> Result<Option<PathBuf>> {
    let world = &t.model.comm.world;
    let folder = dir.canonicalize().ok().and_then(|d| d.parent().map(Path::to_owned));
    let all = folder.and_then(|f| store::generations(&f).ok()).unwrap_or_default();
    // Ranks of one host see one folder; the first rank's list is that of all.
    let names: Vec<_> = all.iter().map(|(_, p)| p.to_string_lossy()).collect();
    let lists = world.exchange_large("checkpoint", names.join("\n").as_bytes())?;
    let list = String::from_utf8_lossy(&lists[0]).into_owned();
    for other in list.lines().map(Path::new).filter(|p| p.file_name() != dir.file_name()) {
        let share = (world.rank().idx(), world.size());
        let whole =
            manifest::read(other).is_ok_and(|m| super::look::damage(other, &m, share).is_empty());
        if world.agree(whole)? {
            return Ok(Some(other.to_owned()));
        }
    }
    Ok(None)
}

/// Collective: restores the checkpoint `dir`.
fn restore(t: &mut Trainer, data: &Data, dir: &Path) -> Result<(u64, Vec<Difference>)> {
    let world = t.model.comm.world.clone();
    let read = || {
        let m = manifest::read(dir)?;
        same_model(dir, &m.run.model, &t.model.cfg)?;
        check_tensors(t, dir, &m)?;
        Ok(m)
    };
    // All before the first value is written: what is refused leaves the trainer as it was.
    let m = settle(&world, read())?;
    t.half_restored = true;
    settle(&world, values(t, dir, &m))?;
    let mine = run_of(t, data);
    t.cfg.seed = m.run.seed;
    t.resume_at(m.step as usize)?;
    t.half_restored = false;
    let bytes = m.files.iter().map(|f| f.bytes).sum();
    Ok((bytes, differences(&m.run, &mine)))
}

/// Refuses a checkpoint of another model; lengths of sequence and batch may differ.
fn same_model(dir: &Path, was: &ModelCfg, is: &ModelCfg) -> Result<()> {
    let alike = |m: &ModelCfg| ModelCfg { seq: 1, batch: 1, ..*m };
    match alike(was) == alike(is) {
        true => Ok(()),
        false => {
            let text = format!("checkpoint {}: it is of another model", dir.display());
            let e = Error::invalid(text).expected(format_args!("{is:?}"));
            Err(e.seen(format_args!("{was:?}")).hint("give the sizes of the checkpoint's model"))
        }
    }
}

/// Checks that there is a tensor of the right shape for each parameter.
fn check_tensors(t: &Trainer, dir: &Path, m: &Manifest) -> Result<()> {
    let by_name = by_name(m);
    for p in &t.model.params {
        for state in STATES {
            let name = format!("{}.{state}", p.name);
            let entry = by_name.get(name.as_str());
            let entry = entry.ok_or_else(|| corrupt(dir, format_args!("{name} is missing")))?;
            if entry.shape != [p.global.0 as u64, p.global.1 as u64] {
                return Err(corrupt(dir, format_args!("{name} has another shape"))
                    .expected(format_args!("{:?}", p.global))
                    .seen(format_args!("{:?}", entry.shape)));
            }
        }
    }
    Ok(())
}

fn by_name(m: &Manifest) -> HashMap<&str, &TensorEntry> {
    m.tensors.iter().map(|t| (t.name.as_str(), t)).collect()
}

/// Restores this rank's part of all tensors, a few rows at a time.
fn values(t: &Trainer, dir: &Path, m: &Manifest) -> Result<()> {
    let by_name = by_name(m);
    let (mut jobs, mut to) = (Vec::new(), Vec::new());
    for p in &t.model.params {
        for state in STATES {
            let name = format!("{}.{state}", p.name);
            let entry = by_name.get(name.as_str());
            let entry = entry.ok_or_else(|| Error::internal("a tensor that was there is gone"))?;
            jobs.push(Job { tensor: entry, pieces: &p.pieces });
            to.push(match state {
                "m" => vec![&p.m],
                "v" => vec![&p.v],
                // Of the values, both forms.
                _ => p.master.iter().chain([&p.w]).collect(),
            });
        }
    }
    rows::with(dir, m, &jobs, |rows| {
        let mut buffers = (Vec::new(), Vec::new());
        jobs.iter().zip(&to).try_for_each(|(job, to)| one(job, to, rows, &mut buffers))
    })
}

/// Restores one tensor of a parameter. The buffers are for values, and for their bytes in a type
/// that is not f32.
fn one(
    job: &Job<'_>,
    to: &[&Tensor],
    rows: &mut Rows<'_>,
    (values, bytes): &mut (Vec<f32>, Vec<u8>),
) -> Result<()> {
    let mut local = 0;
    for piece in job.pieces {
        let cols = piece.cols.len();
        let per = (CHUNK / cols.max(1)).max(1);
        let mut row = piece.rows.start;
        while row < piece.rows.end {
            let num = per.min(piece.rows.end - row);
            values.resize(num * cols, 0.0f32);
            for (r, out) in (row..row + num).zip(values.chunks_exact_mut(cols)) {
                rows.take(job.tensor, r, (piece.cols.start, piece.cols.end), out)?;
            }
            for t in to {
                let place = t.rows(local, num)?;
                if t.dtype() == DType::F32 {
                    place.upload(bytemuck::cast_slice(values))?;
                } else {
                    bytes.resize(place.len_bytes(), 0);
                    convert_from_f32(t.dtype(), values, bytes);
                    place.upload(bytes)?;
                }
            }
            local += num;
            row += num;
        }
    }
    Ok(())
}

/// The parameters in which the run `is` differs from `was`.
fn differences(was: &Run, is: &Run) -> Vec<Difference> {
    let mut out = Vec::new();
    let mut add = |what, was: String, is: String, keeps| {
        if was != is {
            out.push(Difference { what, was, is, keeps });
        }
    };
    add("seed", was.seed.to_string(), is.seed.to_string(), true);
    add("dtype", was.dtype.clone(), is.dtype.clone(), false);
    let grid = |r: &Run| format!("dp {} x cp {} x tp {}", r.grid.dp, r.grid.cp, r.grid.tp);
    add("grid", grid(was), grid(is), false);
    add("seq", was.model.seq.to_string(), is.model.seq.to_string(), false);
    add("batch", was.model.batch.to_string(), is.model.batch.to_string(), false);
    add("task", was.data.task.clone(), is.data.task.clone(), false);
    let data = |r: &Run| match r.data.blake3.get(..8) {
        Some(d) => format!("{} bytes ({d})", r.data.bytes),
        None => "none".to_owned(),
    };
    add("data", data(was), data(is), false);
    add("lr", was.optim.lr.to_string(), is.optim.lr.to_string(), false);
    let rest = |r: &Run| format!("{:?}", super::manifest::Optim { lr: 0.0, ..r.optim });
    add("optimizer", rest(was), rest(is), false);
    out
}

#[cfg(test)]
mod tests {
    use super::super::manifest::tests::small;
    use super::*;

    /// Each value of a run that may change is named when it does, and only then.
    #[test]
    fn every_difference_is_named() {
        let was = small().run;
        assert!(differences(&was, &was).is_empty());
        type Change = (&'static str, fn(&mut Run));
        let changes: [Change; 9] = [
            ("seed", |r| r.seed += 1),
            ("dtype", |r| r.dtype = "bf16".to_owned()),
            ("grid", |r| r.grid.tp += 1),
            ("seq", |r| r.model.seq += 1),
            ("batch", |r| r.model.batch += 1),
            ("task", |r| r.data.task = "text".to_owned()),
            ("data", |r| (r.data.bytes, r.data.blake3) = (9, "0123456789".to_owned())),
            ("lr", |r| r.optim.lr += 1.0),
            ("optimizer", |r| r.optim.warmup += 1),
        ];
        for (what, change) in changes {
            let mut is = was.clone();
            change(&mut is);
            let all = differences(&was, &is);
            assert_eq!(all.iter().map(|d| d.what).collect::<Vec<_>>(), [what]);
            assert!(all[0].was != all[0].is && all[0].keeps == (what == "seed"));
        }
    }
}
