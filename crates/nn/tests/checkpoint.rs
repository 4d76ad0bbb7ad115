//! Checkpoints load exactly on any grid, or say what is damaged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use tilewire_core::{Error, ErrorKind, Result, Rng};
use tilewire_nn::checkpoint::{self, Resumed, resume, verify};
use tilewire_nn::{AdamW, Checkpoints, Data, Grid, Model, ModelCfg, Target, TrainCfg, Trainer};
use tilewire_symm::{World, WorldCfg};

const SOLO: Grid = Grid { dp: 1, cp: 1, tp: 1 };
const FOUR: Grid = Grid { dp: 1, cp: 2, tp: 2 };

fn small() -> ModelCfg {
    ModelCfg {
        layers: 2,
        d_model: 16,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        experts: 6,
        top_k: 2,
        d_ff: 12,
        seq: 20,
        batch: 4,
        ..ModelCfg::default()
    }
}

fn text() -> Data {
    let line = b"Tiles over wires: what moves is hidden behind what computes. 0123456789\n";
    Data::Text(line.iter().copied().cycle().take(4000).collect())
}

fn trainer(world: &World, cfg: ModelCfg, grid: Grid) -> Result<Trainer> {
    let model = Model::new(world, (cfg, grid), Target::default(), 7, None)?;
    let optim = AdamW { warmup: 2, ..AdamW::default() };
    Ok(Trainer::new(model, TrainCfg { seed: 7, optim }))
}

/// Runs `f` on each rank of `grid` with a new trainer; returns what rank 0 returns.
fn on<R: Send>(grid: Grid, f: impl Fn(&mut Trainer) -> Result<R> + Sync) -> R {
    let all = World::run_threads(grid.size(), WorldCfg::default(), |world| {
        let mut t = trainer(&world, small(), grid)?;
        let r = f(&mut t)?;
        t.model.comm.world.agree(true)?;
        Ok(r)
    });
    all.expect("all ranks run").swap_remove(0)
}

fn save(t: &Trainer, dir: &Path, keep: usize) -> Result<()> {
    Checkpoints::open(&t.model.comm.world, dir, keep)?.save(t, &text()).map(drop)
}

/// Losses of `steps` steps; resumes and saves where asked.
fn losses(grid: Grid, steps: usize, from: Option<&Path>, to: Option<&Path>) -> Vec<u64> {
    on(grid, |t| {
        if let Some(p) = from {
            resume(t, &text(), p)?;
        }
        let mut out = Vec::new();
        while t.step < steps {
            out.push(t.step(&text())?.loss.to_bits());
        }
        to.map_or(Ok(()), |p| save(t, p, 2))?;
        Ok(out)
    })
}

/// The bits of all whole tensors, by name.
fn bits(t: &Trainer) -> Result<BTreeMap<String, Vec<u32>>> {
    let mut all = BTreeMap::new();
    for p in &t.model.params {
        for state in ["w", "m", "v"] {
            let values = checkpoint::gather(t, p, state)?;
            let bits = values.iter().map(|v| v.to_bits()).collect();
            all.insert(format!("{}.{state}", p.name), bits);
        }
    }
    Ok(all)
}

/// All files below a folder but for the lock.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        } else if !path.ends_with(".lock") {
            all.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    all
}

fn step_dir(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("step-{step:010}"))
}

#[test]
fn a_resumed_run_is_the_uninterrupted_run_bit_for_bit_and_on_any_grid() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let whole = losses(FOUR, 8, None, None);
    losses(FOUR, 4, None, Some(&at));
    assert_eq!(losses(FOUR, 8, Some(&at), None), whole[4..]);
    assert_eq!(losses(FOUR, 8, None, None), whole, "two runs are bit-equal");
    let saved = on(FOUR, |t| resume(t, &text(), &at).and_then(|_| bits(t)));
    for other in [SOLO, Grid { dp: 2, cp: 1, tp: 1 }, Grid { dp: 1, cp: 3, tp: 1 }] {
        let same = on(other, |t| resume(t, &text(), &at).and_then(|_| bits(t)));
        assert!(same == saved, "{other:?}: another grid reads other bits");
        for (a, b) in losses(other, 8, Some(&at), None).iter().zip(&whole[4..]) {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            assert!((a - b).abs() <= 1e-4 * b, "{other:?}: {a} for {b}");
        }
    }
}

/// The same run writes the same bytes, and each file can be read by the library of the format, with
/// the tensors that the manifest names.
#[test]
fn files_are_the_same_from_run_to_run_and_plain_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    losses(FOUR, 2, None, Some(&a));
    losses(FOUR, 2, None, Some(&b));
    let relative = |dir: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
        let all = files(dir).into_iter();
        all.map(|(p, bytes)| (p.strip_prefix(dir).unwrap().to_owned(), bytes)).collect()
    };
    assert!(relative(&a) == relative(&b), "two runs write other bytes");
    let found = checkpoint::list(&a).unwrap();
    let m = found[0].manifest.as_ref().unwrap();
    assert_eq!((found.len(), m.files.len(), m.step), (1, 4, 2));
    let read = |f: &checkpoint::manifest::FileEntry| fs::read(found[0].path.join(&f.name)).unwrap();
    let bytes: Vec<_> = m.files.iter().map(read).collect();
    let parsed: Vec<_> = bytes.iter().map(|b| SafeTensors::deserialize(b).unwrap()).collect();
    let mut total = 0;
    for t in &m.tensors {
        for part in &t.parts {
            let view = parsed[part.file].tensor(&t.name).unwrap();
            assert_eq!(view.data().len() as u64, 4 * part.num_values());
            let at = part.offset as usize;
            assert!(view.data() == &bytes[part.file][at..at + view.data().len()]);
            total += view.data().len() as u64;
        }
    }
    let headers: u64 = m.files.iter().map(|f| f.header_bytes).sum();
    assert_eq!(total + headers, found[0].bytes(), "every byte is a tensor's or a header's");
    // Tensors that several ranks hold are shared out, each to the rank with the least so far.
    let largest = m.tensors.iter().map(|t| 3 * 4 * t.shape[0] * t.shape[1]).max().unwrap();
    let most = m.files.iter().map(|f| f.bytes - f.header_bytes).max().unwrap();
    assert!(most <= total / 4 + largest, "one rank writes {most} of {total} bytes");
}

/// Harm to a file: a bit turned over, the end cut off, bytes added, or the file gone.
fn harm(rng: &mut Rng, path: &Path, bytes: &[u8]) -> (String, Option<usize>) {
    let len = bytes.len() as u64;
    match rng.below(10) {
        0 => {
            let cut = rng.below(len) as usize;
            fs::write(path, &bytes[..cut]).unwrap();
            (format!("cut at {cut}"), None)
        }
        1 => {
            fs::write(path, [bytes, b"\0"].concat()).unwrap();
            ("a byte more".to_owned(), None)
        }
        2 => {
            fs::remove_file(path).unwrap();
            ("removed".to_owned(), None)
        }
        _ => {
            let (at, bit) = (rng.below(len) as usize, rng.below(8));
            let mut bad = bytes.to_vec();
            bad[at] ^= 1 << bit;
            fs::write(path, bad).unwrap();
            (format!("bit {bit} of byte {at}"), Some(at))
        }
    }
}

/// The tensor that has byte `at` of file `name`.
fn tensor_at(m: &checkpoint::manifest::Manifest, name: &str, at: usize) -> Option<String> {
    let has = |p: &checkpoint::manifest::Part| {
        m.files[p.file].name == name
            && (p.offset..p.offset + 4 * p.num_values()).contains(&(at as u64))
    };
    m.tensors.iter().find(|t| t.parts.iter().any(has)).map(|t| t.name.clone())
}

/// A thousand cases of random harm in both checkpoints of a run at once: each is named, with file
/// and tensor. Every twentieth is also resumed from, which must say the same and train nothing.
#[test]
fn a_thousand_cases_of_damage_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let grid = Grid { dp: 1, cp: 1, tp: 2 };
    losses(grid, 1, None, Some(&at));
    losses(grid, 2, Some(&at), Some(&at));
    let whole = files(&at);
    assert_eq!(whole.len(), 2 * 3);
    let manifests: Vec<_> =
        checkpoint::list(&at).unwrap().into_iter().map(|f| f.manifest.unwrap()).collect();
    on(grid, |t| {
        if t.model.comm.world.rank().idx() != 0 {
            for _ in 0..50 {
                let e = resume(t, &text(), &at).expect_err("the other rank has damaged it");
                assert!(e.kind() == ErrorKind::Corrupt && t.step == 0);
                t.model.comm.world.agree(true)?;
            }
            return Ok(());
        }
        let mut rng = Rng::new(20);
        for case in 0..1000 {
            let mut harmed = Vec::new();
            for (m, step) in manifests.iter().zip([2, 1]) {
                let one = step_dir(&at, step);
                let paths: Vec<_> = whole.keys().filter(|p| p.starts_with(&one)).collect();
                let path = paths[rng.below(paths.len() as u64) as usize];
                let (text, byte) = harm(&mut rng, path, &whole[path]);
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                let tensor = byte.and_then(|b| tensor_at(m, &name, b));
                harmed.push((path, name, tensor, text));
            }
            let seen = verify(&at).unwrap();
            assert_eq!(seen.len(), 2);
            for ((_, name, tensor, text), v) in harmed.iter().zip(&seen) {
                let all: Vec<_> = v.damage.iter().map(Error::to_string).collect();
                let named = all.len() == 1
                    && all[0].contains(name)
                    && tensor.as_ref().is_none_or(|t| all[0].contains(&format!("tensor {t}:")));
                assert!(named, "{name} {tensor:?} {text}: {all:?}");
            }
            if case % 20 == 0 {
                let e = resume(t, &text(), &at).expect_err("both are damaged");
                assert!(e.kind() == ErrorKind::Corrupt && t.step == 0, "{e}");
                assert!(e.to_string().contains(&harmed[0].1), "{:?}: {e}", harmed[0]);
                t.model.comm.world.agree(true)?;
            }
            harmed.iter().for_each(|(path, ..)| fs::write(path, &whole[*path]).unwrap());
        }
        assert!(verify(&at).unwrap().iter().all(|v| v.damage.is_empty()));
        Ok(())
    });
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Of a run's folder the newest checkpoint that is whole is taken, and the damaged ones are named;
/// one that was asked for by its own name is refused, with another that is whole.
#[test]
fn the_newest_whole_checkpoint_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let grid = Grid { dp: 2, cp: 1, tp: 1 };
    let whole = losses(grid, 4, None, None);
    losses(grid, 2, None, Some(&at));
    losses(grid, 3, Some(&at), Some(&at));
    let newest = step_dir(&at, 3);
    let file = newest.join("rank-00001.safetensors");
    flip(&file, fs::metadata(&file).unwrap().len() as usize - 1);
    let (path, step, damaged) = on(grid, |t| {
        let Resumed { path, bytes, damaged, differences } = resume(t, &text(), &at)?;
        assert!(differences.is_empty() && bytes > 0, "{differences:?}");
        Ok((path, t.step, damaged))
    });
    assert_eq!((path, step, damaged.len()), (step_dir(&at, 2), 2, 1));
    let said = damaged[0].1.to_string();
    assert!(damaged[0].0 == newest && said.contains("rank-00001.safetensors: tensor "), "{said}");
    let rest = on(grid, |t| {
        let damaged = resume(t, &text(), &at)?.damaged.into_iter().map(|(p, _)| p);
        let mut to = Checkpoints::open(&t.model.comm.world, &at, 2)?;
        // Where the damaged one was, this run writes its own.
        to.begin(t, &damaged.collect::<Vec<_>>())?;
        let mut losses = vec![t.step(&text())?.loss.to_bits()];
        to.save(t, &text())?;
        losses.push(t.step(&text())?.loss.to_bits());
        Ok(losses)
    });
    assert_eq!(rest, whole[2..]);
    assert!(verify(&at).unwrap().iter().all(|v| v.damage.is_empty()));
    // By its own name; the trainer has parts of it and does not train on.
    flip(&file, fs::metadata(&file).unwrap().len() as usize - 1);
    on(grid, |t| {
        let e = resume(t, &text(), &newest).unwrap_err();
        let hint = e.get_hint().unwrap_or_default().to_owned();
        assert!(e.kind() == ErrorKind::Corrupt && hint.contains("step-0000000002 is whole"), "{e}");
        let e = t.step(&text()).unwrap_err().to_string();
        assert!(e.contains("restored in part"), "{e}");
        resume(t, &text(), &step_dir(&at, 2))?;
        t.step(&text()).map(drop)
    });
}

/// What is refused by its manifest leaves the trainer as it was.
#[test]
fn another_model_is_refused_and_differences_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    losses(SOLO, 1, None, Some(&at));
    let with = |cfg: ModelCfg, seed, lr, data: &Data| {
        let all = World::run_threads(1, WorldCfg::default(), |world| {
            let model = Model::new(&world, (cfg, SOLO), Target::default(), 7, None)?;
            let optim = AdamW { warmup: 2, lr, ..AdamW::default() };
            let mut t = Trainer::new(model, TrainCfg { seed, optim });
            let before = bits(&t)?;
            let got = resume(&mut t, data, &at);
            assert!(got.is_ok() || before == bits(&t)? && t.step == 0);
            Ok(got.map(|r| (t.cfg.seed, r.differences)))
        });
        all.unwrap().swap_remove(0)
    };
    let lr = AdamW::default().lr;
    for other in [
        ModelCfg { d_ff: 8, ..small() },
        ModelCfg { no_experts: true, ..small() },
        ModelCfg { no_attention: true, ..small() },
    ] {
        let e = with(other, 7, lr, &text()).unwrap_err();
        assert!(e.kind() == ErrorKind::InvalidArgument, "{e}");
        assert!(e.to_string().contains("another model"), "{e}");
    }
    assert_eq!(with(small(), 7, lr, &text()).unwrap(), (7, vec![]));
    let other = ModelCfg { seq: 10, batch: 2, ..small() };
    let (seed, all) = with(other, 8, 0.5, &Data::Copy).unwrap();
    let all: Vec<_> = all.iter().map(ToString::to_string).collect();
    assert_eq!(seed, 7, "the checkpoint's seed goes on");
    for (one, text) in all.iter().zip([
        "seed: 7 of the checkpoint goes on, 8 is not used",
        "seq: 10, and 20 when the checkpoint was written",
        "batch: 2, and 4 when",
        "task: copy, and text when",
        "data: none, and 4000 bytes (",
        "lr: 0.5, and 0.001 when",
    ]) {
        assert!(one.starts_with(text), "{one}, not {text}");
    }
    assert_eq!(all.len(), 6, "{all:?}");
    let (_, grid) = on(FOUR, |t| {
        let r = resume(t, &text(), &at)?;
        Ok((r.path, r.differences))
    });
    let want = "grid: dp 1 x cp 2 x tp 2, and dp 1 x cp 1 x tp 1 when the checkpoint was written";
    assert!(grid.len() == 1 && grid[0].to_string() == want, "{grid:?}");
}

/// Places that hold no checkpoint, and places that one cannot be put at, are errors on every rank.
#[test]
fn what_is_in_the_way_is_an_error_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "text").unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::create_dir(at("taken")).unwrap();
    fs::write(at("taken/step-0000000000"), "mine").unwrap();
    let kinds = World::run_threads(2, WorldCfg::default(), |world| {
        let mut t = trainer(&world, small(), Grid { dp: 2, cp: 1, tp: 1 })?;
        let mut all = Vec::new();
        for name in ["none", "file", "empty"] {
            all.push(resume(&mut t, &text(), &at(name)).unwrap_err());
        }
        all.push(save(&t, &at("file"), 1).unwrap_err());
        all.push(save(&t, &at("taken"), 1).unwrap_err());
        let w = &t.model.comm.world;
        let _held = Checkpoints::open(w, &at("held"), 1)?;
        all.push(Checkpoints::open(w, &at("held"), 1).err().unwrap());
        t.model.comm.world.agree(true)?;
        Ok(all.iter().map(|e| (e.kind(), e.to_string())).collect::<Vec<_>>())
    })
    .unwrap();
    let texts = [
        "No such file",
        "not a folder",
        "there is none",
        "not a directory",
        "not a directory",
        "another job writes there",
    ];
    for rank in kinds {
        for ((kind, text), want) in rank.iter().zip(texts) {
            let right = if want == "not a folder" { ErrorKind::Corrupt } else { ErrorKind::Io };
            assert!(*kind == right && text.contains(want), "{text}, not {want}");
        }
    }
    assert_eq!(fs::read(at("file")).unwrap(), b"text");
    assert_eq!(fs::read_dir(at("taken")).unwrap().count(), 2, "nothing half-written is left");
}

/// A run does not write where a later run has: its checkpoints would be removed as old.
#[test]
fn a_folder_with_later_checkpoints_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    losses(SOLO, 2, None, Some(&at));
    on(SOLO, |t| {
        let mut to = Checkpoints::open(&t.model.comm.world, &at, 2)?;
        let e = to.begin(t, &[]).unwrap_err();
        assert!(
            e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("is of step 2"),
            "{e}"
        );
        resume(t, &text(), &at)?;
        to.begin(t, &[])
    });
}
