//! The file of one rank: a safetensors file of the parts that the rank writes, streamed by blocks.
//!
//! Any reader of safetensors can read it; where its tensors lie in those of the whole model is in
//! the manifest. Writer and reader hold a few blocks at a time, whatever the size of the tensors.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use tilewire_core::{Error, Result, Shape};
use tilewire_device::Tensor;

use super::manifest::{BLOCK, FileEntry, Manifest, Part, TensorEntry, corrupt};
use super::store;
use crate::params::Piece;

/// A tensor of a rank, f32, and where its rows lie in the whole.
pub struct Source {
    /// Name of the whole tensor.
    pub name: String,
    /// Values, f32, not empty.
    pub values: Tensor,
    /// Pieces of the whole, from top to bottom.
    pub pieces: Vec<Piece>,
}

/// Writes file number `file` of a checkpoint, and flushes it. Returns its entry, and the parts in
/// the order of `sources`.
///
/// # Errors
/// `Io` if it cannot be written; what a device reports.
pub fn write(folder: &Path, file: usize, sources: &[Source]) -> Result<(FileEntry, Vec<Part>)> {
    let name = format!("rank-{file:05}.safetensors");
    let path = folder.join(&name);
    let io = |e| Error::io(path.display(), e);
    let header = header(sources)?;
    let out = store::create_file(&path)?;
    out.write_all_at(&header, 0).map_err(io)?;
    let (mut at, mut parts) = (header.len() as u64, Vec::new());
    for s in sources {
        let num = s.values.shape().num_elems();
        let flat = s.values.reshape(Shape::d1(num))?;
        let per = (BLOCK / 4) as usize;
        let (offset, mut digests) = (at, Vec::new());
        for first in (0..num).step_by(per) {
            flat.rows(first, per.min(num - first))?.read(|bytes| {
                digests.push(blake3::hash(bytes).to_hex().to_string());
                out.write_all_at(bytes, at).map_err(io)?;
                at += bytes.len() as u64;
                Ok(())
            })??;
        }
        let ends =
            |p: &Piece| [p.rows.start, p.rows.end, p.cols.start, p.cols.end].map(|n| n as u64);
        let pieces = s.pieces.iter().map(ends).collect();
        parts.push(Part { file, offset, pieces, blake3: digests });
    }
    out.sync_all().map_err(io)?;
    let header_blake3 = blake3::hash(&header).to_hex().to_string();
    let entry = FileEntry { name, bytes: at, header_bytes: header.len() as u64, header_blake3 };
    Ok((entry, parts))
}

/// The bytes in front of the values: the length of the header and the header, padded to whole
/// words.
fn header(sources: &[Source]) -> Result<Vec<u8>> {
    let (mut infos, mut at) = (Vec::new(), 0);
    for s in sources {
        let bytes = s.values.len_bytes();
        let shape = s.values.shape().dims().to_vec();
        let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (at, at + bytes) };
        infos.push((s.name.clone(), info));
        at += bytes;
    }
    // One key: more would come in any order.
    let about = HashMap::from([("format".to_owned(), "tilewire checkpoint".to_owned())]);
    let made = Metadata::new(Some(about), infos);
    let made = made.map_err(|e| Error::internal(format!("the header of a checkpoint: {e}")))?;
    let text = serde_json::to_vec(&made).map_err(|e| Error::internal(e.to_string()))?;
    let padded = text.len().next_multiple_of(8);
    let mut bytes = (padded as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes.resize(8 + padded, b' ');
    Ok(bytes)
}

/// Blocks that a reader keeps: the rows of a rank may come from many parts by turns.
const CACHED: usize = 32;

/// Bytes that the kernel is asked to read ahead: of its page cache, not of ours.
const AHEAD: u64 = 16 << 20;

/// Reads parts of a checkpoint, and checks the digest of all that it reads.
pub struct Reader<'a> {
    dir: &'a Path,
    manifest: &'a Manifest,
    files: Vec<Option<File>>,
    /// Start of a block (file, offset) and its bytes, the last read first.
    blocks: VecDeque<((usize, u64), Vec<u8>)>,
}

impl<'a> Reader<'a> {
    /// A reader of the checkpoint `dir`, whose manifest has been checked.
    pub fn new(dir: &'a Path, manifest: &'a Manifest) -> Self {
        let files = manifest.files.iter().map(|_| None).collect();
        Self { dir, manifest, files, blocks: VecDeque::new() }
    }

    /// Opens file number `i` if it is not open, and checks its length and header.
    ///
    /// # Errors
    /// `Corrupt` if it is not what the manifest says, or cannot be read.
    pub fn open(&mut self, i: usize) -> Result<&File> {
        let entry = &self.manifest.files[i];
        let damaged = |what: String| corrupt(self.dir, format_args!("{}: {what}", entry.name));
        if self.files[i].is_none() {
            // What is missing is damage, too: the manifest names it.
            let file = store::open_file(&self.dir.join(&entry.name))
                .map_err(|e| damaged(e.message().to_owned()))?;
            let len = file.metadata().map_err(|e| damaged(e.to_string()))?.len();
            if len != entry.bytes {
                return Err(damaged("the length is another".to_owned())
                    .expected(format_args!("{} bytes", entry.bytes))
                    .seen(format_args!("{len} bytes")));
            }
            let mut header = vec![0; entry.header_bytes as usize];
            file.read_exact_at(&mut header, 0).map_err(|e| damaged(e.to_string()))?;
            if blake3::hash(&header).to_hex().as_str() != entry.header_blake3 {
                let end = entry.header_bytes;
                return Err(damaged(format!("bytes 0 to {end}, its header, are damaged")));
            }
            self.files[i] = Some(file);
        }
        Ok(self.files[i].as_ref().unwrap_or_else(|| unreachable!("it was opened above")))
    }

    /// Block `i` of a part, whole and checked.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged or cannot be read; the text names tensor, file and bytes.
    pub fn block(&mut self, t: &TensorEntry, part: &Part, i: u64) -> Result<&[u8]> {
        let start = part.offset + i * BLOCK;
        let key = (part.file, start);
        let found = self.blocks.iter().position(|(k, _)| *k == key);
        let (_, bytes) = match found.and_then(|at| self.blocks.remove(at)) {
            Some(b) => b,
            None => (key, self.read_block(t, part, i, start)?),
        };
        self.blocks.push_front((key, bytes));
        Ok(&self.blocks[0].1)
    }

    fn read_block(&mut self, t: &TensorEntry, part: &Part, i: u64, start: u64) -> Result<Vec<u8>> {
        let len = BLOCK.min(4 * part.num_values() - i * BLOCK) as usize;
        // The memory of the block that goes.
        let old = (self.blocks.len() >= CACHED).then(|| self.blocks.pop_back()).flatten();
        let mut bytes = old.map(|(_, b)| b).unwrap_or_default();
        bytes.resize(len, 0);
        let file = self.open(part.file)?;
        let read = file.read_exact_at(&mut bytes, start);
        // The disk goes on while the digest is computed. A file system that cannot is slower.
        let ahead = std::num::NonZeroU64::new(AHEAD);
        rustix::fs::fadvise(file, start + len as u64, ahead, rustix::fs::Advice::WillNeed).ok();
        let why = match read {
            Err(e) => e.to_string(),
            Ok(()) if blake3::hash(&bytes).to_hex().as_str() != part.blake3[i as usize] => {
                "their digest is another: they are damaged".to_owned()
            }
            Ok(()) => return Ok(bytes),
        };
        let name = &self.manifest.files[part.file].name;
        let end = start + len as u64;
        let text = format!("{name}: tensor {}: bytes {start} to {end} of the file: {why}", t.name);
        Err(corrupt(self.dir, text))
    }

    /// Copies columns `cols` of row `row` of a tensor into `out`.
    ///
    /// # Errors
    /// `Corrupt` if a block is damaged, or no part has an element.
    pub fn row(
        &mut self,
        t: &TensorEntry,
        row: usize,
        cols: (usize, usize),
        out: &mut [f32],
    ) -> Result<()> {
        let mut filled = 0;
        for part in &t.parts {
            let mut before = 0;
            for p in part.pieces() {
                let (from, to) = (cols.0.max(p.cols.start), cols.1.min(p.cols.end));
                if p.rows.contains(&row) && from < to {
                    let at = before + (row - p.rows.start) * p.cols.len() + from - p.cols.start;
                    let part_of_row = &mut out[from - cols.0..to - cols.0];
                    self.values(t, part, at as u64, part_of_row)?;
                    filled += to - from;
                }
                before += p.rows.len() * p.cols.len();
            }
        }
        match filled == cols.1 - cols.0 {
            true => Ok(()),
            false => {
                let text = format!("{}: row {row} is in no file, or in two", t.name);
                Err(corrupt(self.dir, text))
            }
        }
    }

    /// Values `at..at + out.len()` of a part.
    fn values(&mut self, t: &TensorEntry, part: &Part, at: u64, out: &mut [f32]) -> Result<()> {
        let (mut at, mut out) = (4 * at, bytemuck::cast_slice_mut::<f32, u8>(out));
        while !out.is_empty() {
            let within = (at % BLOCK) as usize;
            let block = self.block(t, part, at / BLOCK)?;
            let len = out.len().min(block.len() - within);
            let (now, rest) = out.split_at_mut(len);
            now.copy_from_slice(&block[within..within + len]);
            at += len as u64;
            out = rest;
        }
        Ok(())
    }
}
