//! `manifest.json`: what a checkpoint consists of, and the digest of every byte of it.
//!
//! The file is `{"blake3":"<64 hex digits>","manifest":<value>}` and a line feed. The digest is
//! that of the exact text of the value, and the text around it is fixed, so that no bit of the file
//! can change unseen.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, ErrorKind, Result};
use tilewire_ops::layers::AdamW;

use crate::config::{Grid, ModelCfg};
use crate::params::Piece;

/// The version of the format. A reader refuses any other.
pub const VERSION: u32 = 2;
/// The name of the manifest within a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// Bytes that one digest covers; of a part's last block fewer.
pub const BLOCK: u64 = 1 << 20;
/// The longest manifest that is read: tens of millions of parameters a byte.
const MAX_BYTES: u64 = 256 << 20;

const BEFORE: &str = "{\"blake3\":\"";
const BETWEEN: &str = "\",\"manifest\":";
const AFTER: &str = "}\n";
const HEX: usize = 64;

/// The content of `manifest.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// Version of the library that wrote it.
    pub tilewire: String,
    /// Number of the next step: the position in the data, too.
    pub step: u64,
    /// The run that wrote it.
    pub run: Run,
    /// [`BLOCK`].
    pub block_bytes: u64,
    /// The other files, by their numbers.
    pub files: Vec<FileEntry>,
    /// All tensors of the model and the optimizer.
    pub tensors: Vec<TensorEntry>,
}

/// The parameters of a run that decide its curve.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Seed of parameters and batches.
    pub seed: u64,
    /// Sizes.
    pub model: ModelCfg,
    /// Type of weights and activations.
    pub dtype: String,
    /// Division over ranks.
    pub grid: Grid,
    /// Optimizer.
    pub optim: Optim,
    /// Training data.
    pub data: DataId,
}

/// The parameters of the optimizer ([`AdamW`]).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields of AdamW")]
pub struct Optim {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub clip: f64,
    pub warmup: usize,
    pub total: usize,
}

impl From<AdamW> for Optim {
    fn from(a: AdamW) -> Self {
        let AdamW { lr, beta1, beta2, eps, weight_decay, clip, warmup, total } = a;
        Self { lr, beta1, beta2, eps, weight_decay, clip, warmup, total }
    }
}

/// The training data, by a digest of its text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DataId {
    /// `text` or `copy`.
    pub task: String,
    /// Length of the text.
    pub bytes: u64,
    /// BLAKE3 digest of the text; empty where there is none.
    pub blake3: String,
}

/// A safetensors file of one rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name within the folder.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Bytes in front of the values: the length of the header, and the header.
    pub header_bytes: u64,
    /// Their BLAKE3 digest.
    pub header_blake3: String,
}

/// A tensor of the whole model, `[rows, cols]` f32.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name of the parameter, and `.w` (values), `.m` or `.v` (moments).
    pub name: String,
    /// Rows and columns.
    pub shape: [u64; 2],
    /// The places of its elements: every one is in exactly one part.
    pub parts: Vec<Part>,
}

/// The elements of a tensor that lie in one file, in one piece.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Number of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Blocks of rows and columns of the whole tensor, one behind the other, each by rows:
    /// `[first row, end, first column, end]`.
    pub pieces: Vec<[u64; 4]>,
    /// BLAKE3 digests of the values, one for each [`BLOCK`] bytes.
    pub blake3: Vec<String>,
}

impl Part {
    /// Rows and columns of its pieces.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let size = |a: u64, b: u64| Range { start: a as usize, end: b as usize };
        self.pieces.iter().map(move |p| Piece { rows: size(p[0], p[1]), cols: size(p[2], p[3]) })
    }

    /// Number of elements. Pieces have been checked: nothing overflows.
    pub fn num_values(&self) -> u64 {
        self.pieces.iter().map(|p| (p[1] - p[0]) * (p[3] - p[2])).sum()
    }
}

/// The error of what is damaged in the checkpoint `dir`.
pub fn corrupt(dir: &Path, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("checkpoint {}: {what}", dir.display()))
}

/// The text of the file.
///
/// # Errors
/// `Internal` if it cannot be written as JSON.
pub fn seal(m: &Manifest) -> Result<String> {
    let value = serde_json::to_string_pretty(m).map_err(|e| Error::internal(e.to_string()))?;
    let digest = blake3::hash(value.as_bytes()).to_hex();
    Ok(format!("{BEFORE}{digest}{BETWEEN}{value}{AFTER}"))
}

/// Reads and checks the manifest of the checkpoint `dir`.
///
/// # Errors
/// `Corrupt` if it is damaged, cannot be read, or is of another version.
pub fn read(dir: &Path) -> Result<Manifest> {
    let bad = |e: &dyn std::fmt::Display| corrupt(dir, format_args!("{MANIFEST}: {e}"));
    let file = super::store::open_file(&dir.join(MANIFEST)).map_err(|e| bad(&e.message()))?;
    let len = file.metadata().map_err(|e| bad(&e))?.len();
    if len > MAX_BYTES {
        return Err(corrupt(dir, format_args!("{MANIFEST} is too long"))
            .expected(format_args!("at most {MAX_BYTES} bytes"))
            .seen(format_args!("{len} bytes")));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|e| bad(&e))?;
    let m = open(&bytes).map_err(|e| bad(&e))?;
    m.check().map_err(|e| bad(&e))?;
    Ok(m)
}

/// The manifest of the text of a file; the error says what is wrong with it.
pub fn open(bytes: &[u8]) -> Result<Manifest, String> {
    let frame = |text: &'static str| format!("the text is damaged: `{text}` is not in its place");
    let rest = bytes.strip_prefix(BEFORE.as_bytes()).ok_or_else(|| frame("{\"blake3\":"))?;
    let (digest, rest) = rest.split_at_checked(HEX).ok_or("the text ends in its digest")?;
    let rest = rest.strip_prefix(BETWEEN.as_bytes()).ok_or_else(|| frame("\"manifest\":"))?;
    let value = rest.strip_suffix(AFTER.as_bytes()).ok_or("the text is cut off")?;
    if blake3::hash(value).to_hex().as_bytes() != digest {
        return Err("its digest is another: the text is damaged".to_owned());
    }
    // The version first: another one may have other fields.
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(value).map_err(|e| e.to_string())?;
    if version != VERSION {
        return Err(format!(
            "the format has version {version}, and this program reads version {VERSION}"
        ));
    }
    serde_json::from_slice(value).map_err(|e| e.to_string())
}

impl Manifest {
    /// Checks that its numbers fit together, so that readers can trust them: no sum of them
    /// overflows, files have plain names, parts lie in their files, every element of a tensor is
    /// in exactly one part.
    ///
    /// # Errors
    /// The first that does not fit, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.block_bytes != BLOCK {
            return Err(format!("blocks have {} bytes instead of {BLOCK}", self.block_bytes));
        }
        // Devices count steps in an i32.
        if i32::try_from(self.step).is_err() {
            return Err(format!("step {} is more than a device counts", self.step));
        }
        self.run.model.check().map_err(|e| e.to_string())?;
        let mut names = HashSet::new();
        for f in &self.files {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            let good = f.name.bytes().all(plain) && !f.name.starts_with('.') && !f.name.is_empty();
            if !good || !names.insert(&f.name) {
                return Err(format!("{:?} is no name of a file, or twice", f.name));
            }
            if f.header_bytes < 8 || f.header_bytes > f.bytes.min(1 << 30) {
                return Err(format!("{}: the header has {} bytes", f.name, f.header_bytes));
            }
        }
        if self.files.iter().try_fold(0u64, |sum, f| sum.checked_add(f.bytes)).is_none() {
            return Err("its files have more bytes than there are numbers for".to_owned());
        }
        let mut names = HashSet::new();
        for t in &self.tensors {
            if !names.insert(&t.name) {
                return Err(format!("{} is there twice", t.name));
            }
            self.check_tensor(t).map_err(|e| format!("{}: {e}", t.name))?;
        }
        Ok(())
    }

    fn check_tensor(&self, t: &TensorEntry) -> Result<(), String> {
        let [rows, cols] = t.shape;
        let most = 1 << 30;
        if rows == 0 || cols == 0 || rows > most || cols > most {
            return Err(format!("a shape of {rows} x {cols}"));
        }
        let mut all = 0;
        for p in &t.parts {
            let inside = |[a, b, c, d]: &[u64; 4]| a < b && *b <= rows && c < d && *d <= cols;
            if p.pieces.is_empty() || p.pieces.len() > 1 << 20 || !p.pieces.iter().all(inside) {
                return Err(format!("pieces {:?} are not within {rows} x {cols}", p.pieces));
            }
            let wide = |p: &[u64; 4]| u128::from(p[1] - p[0]) * u128::from(p[3] - p[2]);
            let len = p.pieces.iter().map(wide).sum::<u128>();
            all += len;
            let file = self.files.get(p.file).ok_or_else(|| format!("no file {}", p.file))?;
            let end = u128::from(p.offset) + 4 * len;
            if p.offset < file.header_bytes || end > u128::from(file.bytes) {
                return Err(format!("its values are not within {}", file.name));
            }
            if p.blake3.len() as u128 != (4 * len).div_ceil(u128::from(BLOCK)) {
                return Err(format!("{} digests of {len} values", p.blake3.len()));
            }
        }
        if all != u128::from(rows) * u128::from(cols) {
            return Err(format!("{all} values of {rows} x {cols}"));
        }
        // As many as there are, and none twice: none is missing.
        match overlap(t.parts.iter().flat_map(|p| &p.pieces)) {
            Some([a, b]) => Err(format!("pieces {a:?} and {b:?} overlap")),
            None => Ok(()),
        }
    }
}

/// Two pieces that have an element in common, if there are any. No piece is empty.
fn overlap<'a>(pieces: impl Iterator<Item = &'a [u64; 4]>) -> Option<[&'a [u64; 4]; 2]> {
    // By rows from top to bottom; at one row pieces end before others begin.
    let mut ends: Vec<_> = pieces.flat_map(|p| [(p[0], true, p), (p[1], false, p)]).collect();
    ends.sort_unstable_by_key(|(row, begins, _)| (*row, *begins));
    // Pieces of the current row, by their first columns: they do not overlap.
    let mut now: BTreeMap<u64, &[u64; 4]> = BTreeMap::new();
    for (_, begins, p) in ends {
        if !begins {
            now.remove(&p[2]);
            continue;
        }
        let before = now.range(..p[3]).next_back().filter(|(_, q)| q[3] > p[2]);
        if let Some((_, q)) = before {
            return Some([q, p]);
        }
        now.insert(p[2], p);
    }
    None
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
pub(super) mod tests;
