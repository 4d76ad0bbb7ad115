//! Rows of tensors out of the files of a checkpoint, in an order that is known before. One thread
//! reads the blocks that they are made of, one compares their digests, and the thread that calls
//! takes the values: none waits for the others, and none is more than a few blocks ahead.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tilewire_core::{Error, Result};

use super::manifest::{BLOCK, Manifest, Part, TensorEntry, corrupt};
use super::shard::{Block, Reader};
use super::stream::{helper, join};
use crate::params::Piece;

/// Blocks on the way from one thread to the next.
const ON_THE_WAY: usize = 4;
/// Most blocks that are kept: the rows of a rank may come from many parts by turns.
const KEPT: usize = 32;

/// Pieces of a tensor whose rows are taken, from top to bottom.
pub struct Job<'a> {
    /// The tensor.
    pub tensor: &'a TensorEntry,
    /// Its pieces.
    pub pieces: &'a [Piece],
}

/// Bytes of a row that lie in one block.
struct Span<'a> {
    block: Block<'a>,
    /// First byte within the block.
    within: usize,
    /// First byte within the row's columns, and the end.
    out: std::ops::Range<usize>,
}

/// Calls `f` for each span of columns `cols` of a row; the number of values in them.
fn spans<'a, E>(
    tensor: &'a TensorEntry,
    row: usize,
    cols: (usize, usize),
    mut f: impl FnMut(Span<'a>) -> Result<(), E>,
) -> Result<usize, E> {
    let mut filled = 0;
    for part in &tensor.parts {
        let mut before = 0;
        for p in part.pieces() {
            let (from, to) = (cols.0.max(p.cols.start), cols.1.min(p.cols.end));
            if p.rows.contains(&row) && from < to {
                let at = before + (row - p.rows.start) * p.cols.len() + from - p.cols.start;
                let values = (from - cols.0, to - cols.0);
                within_part(tensor, part, 4 * at as u64, values, &mut f)?;
                filled += to - from;
            }
            before += p.rows.len() * p.cols.len();
        }
    }
    Ok(filled)
}

/// The spans of a row in one part, from its byte `at`.
fn within_part<'a, E>(
    tensor: &'a TensorEntry,
    part: &'a Part,
    mut at: u64,
    values: (usize, usize),
    f: &mut impl FnMut(Span<'a>) -> Result<(), E>,
) -> Result<(), E> {
    let (mut out, end) = (4 * values.0, 4 * values.1);
    while out < end {
        let within = (at % BLOCK) as usize;
        let len = (end - out).min(BLOCK as usize - within);
        let block = Block { tensor, part, num: at / BLOCK };
        f(Span { block, within, out: out..out + len })?;
        (at, out) = (at + len as u64, out + len);
    }
    Ok(())
}

/// The blocks used last, the newest first, by their places. Who reads and who takes each have such
/// a list, and do the same with it: so both know which block comes next.
struct Kept<T> {
    most: usize,
    blocks: VecDeque<((usize, u64), T)>,
}

impl<T> Kept<T> {
    /// Enough for a tensor whose rows lie in all of its parts, over the end of a block in each.
    fn new(m: &Manifest) -> Self {
        let parts = m.tensors.iter().map(|t| t.parts.len()).max().unwrap_or(0);
        Self { most: (2 * parts).clamp(2, KEPT), blocks: VecDeque::new() }
    }

    /// True if a block is there; it is then the first.
    fn has(&mut self, place: (usize, u64)) -> bool {
        let found = self.blocks.iter().position(|(p, _)| *p == place);
        let block = found.and_then(|at| self.blocks.remove(at));
        let has = block.is_some();
        self.blocks.extend(block);
        self.blocks.rotate_right(usize::from(has));
        has
    }

    /// Adds one that is not there; what goes for it.
    fn add(&mut self, place: (usize, u64), block: T) -> Option<T> {
        let full = self.blocks.len() >= self.most;
        let old = full.then(|| self.blocks.pop_back()).flatten();
        self.blocks.push_front((place, block));
        old.map(|(_, block)| block)
    }
}

/// A block and its bytes.
type Got<'a> = Result<(Block<'a>, Vec<u8>)>;

/// Reads all blocks of `jobs` in the order of their first use, until somebody else has stopped.
fn read<'a>(
    reader: &mut Reader<'a>,
    jobs: &[Job<'a>],
    mut kept: Kept<()>,
    free: &Receiver<Vec<u8>>,
    out: &SyncSender<Got<'a>>,
) {
    let mut get = |block: Block<'a>| {
        if kept.has(block.place()) {
            return Ok(());
        }
        kept.add(block.place(), ());
        // The memory of one that is used up, if there is any.
        let mut bytes = free.try_recv().unwrap_or_default();
        let got = reader.read(block, &mut bytes).map(|()| (block, bytes));
        let stop = got.is_err();
        if out.send(got).is_err() || stop { Err(()) } else { Ok(()) }
    };
    for job in jobs {
        for p in job.pieces {
            for row in p.rows.clone() {
                let cols = (p.cols.start, p.cols.end);
                if spans(job.tensor, row, cols, |s| get(s.block)).is_err() {
                    return;
                }
            }
        }
    }
}

/// Takes rows in the order of the jobs.
pub struct Rows<'a> {
    dir: &'a Path,
    kept: Kept<Vec<u8>>,
    checked: Receiver<Got<'a>>,
    free: SyncSender<Vec<u8>>,
}

impl Rows<'_> {
    /// Copies columns `cols` of row `row` of a tensor into `out`.
    ///
    /// # Errors
    /// `Corrupt` if a block is damaged or cannot be read (the text names tensor, file and bytes),
    /// or if no part has an element.
    pub fn take(
        &mut self,
        tensor: &TensorEntry,
        row: usize,
        cols: (usize, usize),
        out: &mut [f32],
    ) -> Result<()> {
        let out = bytemuck::cast_slice_mut::<f32, u8>(out);
        let filled = spans(tensor, row, cols, |s| {
            let len = s.out.len();
            out[s.out].copy_from_slice(&self.block(s.block)?[s.within..s.within + len]);
            Ok(())
        })?;
        match filled == cols.1 - cols.0 {
            true => Ok(()),
            false => {
                let text = format!("{}: row {row} is in no file, or in two", tensor.name);
                Err(corrupt(self.dir, text))
            }
        }
    }

    fn block(&mut self, block: Block<'_>) -> Result<&[u8]> {
        let place = block.place();
        if !self.kept.has(place) {
            let next = self.checked.recv();
            let (came, bytes) =
                next.map_err(|_| Error::internal("the reader of a checkpoint has ended"))??;
            if came.place() != place {
                return Err(Error::internal("the blocks of a checkpoint come in another order"));
            }
            if let Some(old) = self.kept.add(place, bytes) {
                // More of them than are needed may go.
                self.free.try_send(old).ok();
            }
        }
        Ok(&self.kept.blocks[0].1)
    }
}

/// Runs `f`, which takes the rows of all pieces of `jobs` in their order, of the checkpoint `dir`
/// whose manifest has been checked.
///
/// # Errors
/// That of `f`; `Io` or `Exhausted` if no thread can be started.
pub fn with<R>(
    dir: &Path,
    m: &Manifest,
    jobs: &[Job<'_>],
    f: impl FnOnce(&mut Rows<'_>) -> Result<R>,
) -> Result<R> {
    // Whoever stops closes its ends, and with them all others stop.
    let (to_check, got) = sync_channel(ON_THE_WAY);
    let (out, checked) = sync_channel(ON_THE_WAY);
    let (free, used) = sync_channel(2 * ON_THE_WAY);
    std::thread::scope(|s| {
        let reader = helper(s, "reader", move || {
            read(&mut Reader::new(dir, m), jobs, Kept::new(m), &used, &to_check);
        })?;
        let checks = helper(s, "digests", move || {
            for got in got {
                let got: Got<'_> = got.and_then(|(block, bytes)| {
                    block.check(dir, m, &bytes)?;
                    Ok((block, bytes))
                });
                let stop = got.is_err();
                if out.send(got).is_err() || stop {
                    break;
                }
            }
        })?;
        let mut rows = Rows { dir, kept: Kept::new(m), checked, free };
        let taken = f(&mut rows);
        drop(rows);
        join(reader)?;
        join(checks)?;
        taken
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use tilewire_core::{ErrorKind, Shape};
    use tilewire_device::Tensor;

    use super::super::look::damage;
    use super::super::manifest::tests::small;
    use super::super::shard::{self, Source};
    use super::*;

    const SHAPE: (usize, usize) = (700, 3000);

    /// A checkpoint of two tensors: one whose rows lie in both files, some MiB in each, and a small
    /// one. An element's value is its number.
    fn write(dir: &Path) -> Manifest {
        let (rows, cols) = SHAPE;
        let mut m = small();
        let mut parts = Vec::new();
        m.files.clear();
        for (file, cols_of) in [0..1000, 1000..cols].into_iter().enumerate() {
            let values: Vec<f32> = (0..rows)
                .flat_map(|r| cols_of.clone().map(move |c| (r * cols + c) as f32))
                .collect();
            let shape = Shape::d2(rows, cols_of.len());
            let piece = Piece { rows: 0..rows, cols: cols_of };
            let mut sources = vec![Source {
                name: "a.w".to_owned(),
                values: Tensor::from_slice(&values, shape).unwrap(),
                pieces: vec![piece],
            }];
            if file == 0 {
                let values = Tensor::from_slice(&[7.0f32, 8.0, 9.0], Shape::d2(1, 3)).unwrap();
                let pieces = vec![Piece { rows: 0..1, cols: 0..3 }];
                sources.push(Source { name: "b.w".to_owned(), values, pieces });
            }
            let (entry, written) = shard::write(dir, file, &sources).unwrap();
            m.files.push(entry);
            parts.extend(written);
        }
        let tensor = |name: &str, shape, parts| TensorEntry { name: name.to_owned(), shape, parts };
        let b = parts.remove(1);
        let a = tensor("a.w", [rows as u64, cols as u64], parts);
        m.tensors = vec![a, tensor("b.w", [1, 3], vec![b])];
        m.check().unwrap();
        m
    }

    /// Takes all rows of some pieces of the first tensor and of the second, with `stop` after some
    /// of them.
    fn take(dir: &Path, m: &Manifest, stop: Option<usize>) -> Result<()> {
        let pieces = [
            Piece { rows: 0..300, cols: 500..2500 },
            Piece { rows: 300..700, cols: 0..3000 },
            Piece { rows: 10..20, cols: 2999..3000 },
        ];
        let b = [Piece { rows: 0..1, cols: 1..3 }];
        let jobs = [
            Job { tensor: &m.tensors[0], pieces: &pieces },
            Job { tensor: &m.tensors[1], pieces: &b },
        ];
        with(dir, m, &jobs, |rows| {
            let mut taken = 0;
            for p in &pieces {
                for r in p.rows.clone() {
                    let mut out = vec![0.0f32; p.cols.len()];
                    rows.take(&m.tensors[0], r, (p.cols.start, p.cols.end), &mut out)?;
                    let right = |(c, v): (usize, &f32)| *v == (r * SHAPE.1 + c) as f32;
                    assert!(p.cols.clone().zip(&out).all(right), "row {r}");
                    if Some(taken) == stop {
                        return Err(Error::invalid("the device refuses"));
                    }
                    taken += 1;
                }
            }
            let mut out = [0.0; 2];
            rows.take(&m.tensors[1], 0, (1, 3), &mut out)?;
            assert_eq!(out, [8.0, 9.0]);
            Ok(())
        })
    }

    /// Runs `f`, which must come to an end: a thread that waits for another that has stopped would
    /// not.
    fn within<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
        let (out, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || out.send(f()));
        done.recv_timeout(Duration::from_secs(60)).expect("it comes to an end")
    }

    /// Damage in any block is named as `verify` names it, and whoever takes rows may stop.
    #[test]
    fn damage_in_any_block_and_a_device_that_fails_end_all() {
        within(|| {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path();
            let m = write(at);
            take(at, &m, None).unwrap();
            for stop in [0, 1, 299, 500, 709] {
                let e = take(at, &m, Some(stop)).unwrap_err();
                assert_eq!(e.to_string(), Error::invalid("the device refuses").to_string());
            }
            let mut blocks = 0;
            for f in &m.files {
                let path = at.join(&f.name);
                let whole = fs::read(&path).unwrap();
                for byte in (f.header_bytes as usize..whole.len()).step_by(BLOCK as usize) {
                    let mut bad = whole.clone();
                    bad[byte + 77] ^= 1;
                    fs::write(&path, bad).unwrap();
                    let e = take(at, &m, None).unwrap_err();
                    let seen = damage(at, &m, (0, 1));
                    assert!(e.kind() == ErrorKind::Corrupt && seen.len() == 1, "{e}");
                    assert_eq!(e.to_string(), seen[0].to_string());
                    blocks += 1;
                }
                fs::remove_file(&path).unwrap();
                let e = take(at, &m, None).unwrap_err().to_string();
                assert!(e.contains(&f.name) && e.contains("No such file"), "{e}");
                fs::write(&path, whole).unwrap();
            }
            assert_eq!(blocks, 3 + 6);
            take(at, &m, None).unwrap();
        });
    }
}
