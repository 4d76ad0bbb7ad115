//! The file of one rank: a safetensors file of the parts that the rank writes, streamed by blocks.
//!
//! Any reader of safetensors can read it; where its tensors lie in those of the whole model is in
//! the manifest. Writer and reader hold a few blocks at a time, whatever the size of the tensors.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use tilewire_core::{Error, Result};
use tilewire_device::Tensor;

use super::manifest::{BLOCK, FileEntry, Manifest, Part, TensorEntry, corrupt};
use super::{store, stream};
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
    let start = header.len() as u64;
    let (bytes, digests) = stream::stream(sources, start, &out, &io)?;
    let (mut offset, mut parts) = (start, Vec::new());
    for (s, blake3) in sources.iter().zip(digests) {
        let ends =
            |p: &Piece| [p.rows.start, p.rows.end, p.cols.start, p.cols.end].map(|n| n as u64);
        let pieces = s.pieces.iter().map(ends).collect();
        parts.push(Part { file, offset, pieces, blake3 });
        offset += s.values.len_bytes() as u64;
    }
    out.sync_all().map_err(io)?;
    let header_blake3 = blake3::hash(&header).to_hex().to_string();
    let entry = FileEntry { name, bytes, header_bytes: start, header_blake3 };
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

/// Bytes that the kernel is asked to read ahead: of its page cache, not of ours.
const AHEAD: u64 = 16 << 20;

/// A block of a part of a tensor: what one digest covers.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// The tensor.
    pub tensor: &'a TensorEntry,
    /// One of its parts.
    pub part: &'a Part,
    /// Number of the block within the part.
    pub num: u64,
}

impl Block<'_> {
    /// Number of the file, and first byte there.
    pub fn place(&self) -> (usize, u64) {
        (self.part.file, self.part.offset + self.num * BLOCK)
    }

    fn len(&self) -> usize {
        BLOCK.min(4 * self.part.num_values() - self.num * BLOCK) as usize
    }

    /// Compares the digest of its bytes with that of the manifest.
    ///
    /// # Errors
    /// `Corrupt` if it is another; the text names tensor, file and bytes.
    pub fn check(&self, dir: &Path, m: &Manifest, bytes: &[u8]) -> Result<()> {
        match blake3::hash(bytes).to_hex().as_str() == self.part.blake3[self.num as usize] {
            true => Ok(()),
            false => Err(self.damaged(dir, m, "their digest is another: they are damaged")),
        }
    }

    fn damaged(&self, dir: &Path, m: &Manifest, why: &str) -> Error {
        let (file, start) = self.place();
        let (name, tensor, end) =
            (&m.files[file].name, &self.tensor.name, start + self.len() as u64);
        let text = format!("{name}: tensor {tensor}: bytes {start} to {end} of the file: {why}");
        corrupt(dir, text)
    }
}

/// Reads blocks of a checkpoint.
pub struct Reader<'a> {
    dir: &'a Path,
    manifest: &'a Manifest,
    /// Files that are open, and up to which byte the kernel was asked to read each.
    files: Vec<Option<(File, u64)>>,
}

impl<'a> Reader<'a> {
    /// A reader of the checkpoint `dir`, whose manifest has been checked.
    pub fn new(dir: &'a Path, manifest: &'a Manifest) -> Self {
        Self { dir, manifest, files: manifest.files.iter().map(|_| None).collect() }
    }

    /// Opens file number `i` if it is not open, and checks its length and header.
    ///
    /// # Errors
    /// `Corrupt` if it is not what the manifest says, or cannot be read.
    pub fn open(&mut self, i: usize) -> Result<&mut (File, u64)> {
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
            self.files[i] = Some((file, 0));
        }
        Ok(self.files[i].as_mut().unwrap_or_else(|| unreachable!("it was opened above")))
    }

    /// Reads a block into `bytes`, which are then as many as it has. Its digest is not compared.
    ///
    /// # Errors
    /// `Corrupt` if it cannot be read; the text names tensor, file and bytes.
    pub fn read(&mut self, block: Block<'_>, bytes: &mut Vec<u8>) -> Result<()> {
        let (file, start) = block.place();
        bytes.resize(block.len(), 0);
        let end = start + bytes.len() as u64;
        let (dir, m) = (self.dir, self.manifest);
        let (file, asked) = self.open(file)?;
        // The disk goes on while the block is used. A file system that cannot is slower.
        let goes_on = (start..=end + AHEAD).contains(asked);
        if !goes_on || *asked < end + AHEAD / 2 {
            let from = if goes_on { *asked } else { start };
            *asked = end + AHEAD;
            let len = std::num::NonZeroU64::new(*asked - from);
            rustix::fs::fadvise(&*file, from, len, rustix::fs::Advice::WillNeed).ok();
        }
        file.read_exact_at(bytes, start).map_err(|e| block.damaged(dir, m, &e.to_string()))
    }
}
