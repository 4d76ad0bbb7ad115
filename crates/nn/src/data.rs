//! Training data: bytes of files, or the copy task.

use std::fs;
use std::io::Read;
use std::path::Path;

use tilewire_core::{Error, ErrorKind, Result, Rng};

use crate::checkpoint::manifest::DataId;

/// The source of sequences.
#[derive(Clone, Debug)]
pub enum Data {
    /// Random windows of a text.
    Text(Vec<u8>),
    /// A random string twice: the second copy can be predicted, the first cannot.
    Copy,
}

/// The most bytes read: more than enough for any run on a host.
const MAX_BYTES: u64 = 64 << 20;

impl Data {
    /// Reads a file, or all regular files below a folder in name order, up to 64 MiB in all. Any
    /// bytes will do.
    ///
    /// # Errors
    /// `Io` if nothing is there, `InvalidArgument` if it is neither a file nor a folder, or there
    /// are fewer than `min_len` bytes.
    pub fn text(path: &Path, min_len: usize) -> Result<Self> {
        let kind = meta(path)?;
        if !kind.is_dir() && !kind.is_file() {
            let text = format!("{}: neither a file nor a folder", path.display());
            return Err(Error::invalid(text).hint("write its output into a file first"));
        }
        let mut bytes = Vec::new();
        collect(path, &mut bytes)?;
        if bytes.len() < min_len {
            return Err(Error::invalid(format!("{}: not enough text", path.display()))
                .expected(format_args!("at least {min_len} bytes"))
                .seen(format_args!("{} bytes", bytes.len()))
                .hint("give a larger file or folder, or a shorter --seq"));
        }
        Ok(Data::Text(bytes))
    }

    /// The identity of the data, for checkpoints.
    pub fn id(&self) -> DataId {
        match self {
            Data::Text(bytes) => DataId {
                task: "text".to_owned(),
                bytes: bytes.len() as u64,
                blake3: blake3::hash(bytes).to_hex().to_string(),
            },
            Data::Copy => DataId { task: "copy".to_owned(), bytes: 0, blake3: String::new() },
        }
    }

    /// Sequence `index` of step `step`: `len + 1` bytes (inputs and, one later, targets), and how
    /// many targets at the front do not count.
    pub fn sequence(&self, seed: u64, step: usize, index: usize, len: usize) -> (Vec<u8>, usize) {
        let mut rng = Rng::new(seed ^ (step as u64) << 20 ^ index as u64);
        match self {
            Data::Text(bytes) => {
                let start = rng.below((bytes.len() - len) as u64) as usize;
                (bytes[start..start + len + 1].to_vec(), 0)
            }
            Data::Copy => {
                let half = len.div_ceil(2);
                let first: Vec<u8> = (0..half).map(|_| b'a' + rng.below(16) as u8).collect();
                let mut s = first.clone();
                s.extend_from_slice(&first);
                s.resize(len + 1, b'.');
                (s, half)
            }
        }
    }
}

fn meta(path: &Path) -> Result<fs::Metadata> {
    fs::metadata(path).map_err(|e| {
        Error::new(ErrorKind::Io, format!("{}: {e}", path.display()))
            .cause(e)
            .hint("--data takes a file or a folder")
    })
}

/// Appends what is below `path` until there are [`MAX_BYTES`]; what is no file says nothing about
/// its length, and a pipe would block.
fn collect(path: &Path, out: &mut Vec<u8>) -> Result<()> {
    let left = MAX_BYTES.saturating_sub(out.len() as u64);
    // A link that leads nowhere, or in a circle, is no file either.
    if left == 0 || path.is_symlink() && fs::metadata(path).is_err() {
        return Ok(());
    }
    let meta = meta(path)?;
    if meta.is_dir() {
        let mut names: Vec<_> = fs::read_dir(path)
            .map_err(|e| Error::io(path.display(), e))?
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.')))
            .collect();
        names.sort();
        return names.iter().try_for_each(|p| collect(p, out));
    }
    if meta.is_file() {
        let read = |f: fs::File| f.take(left).read_to_end(out);
        fs::File::open(path).and_then(read).map_err(|e| Error::io(path.display(), e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_empty_and_binary_files() {
        let dir = tempfile::tempdir().unwrap();
        let e = Data::text(&dir.path().join("nope"), 1).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io);
        fs::write(dir.path().join("empty"), "").unwrap();
        assert!(
            Data::text(&dir.path().join("empty"), 10).unwrap_err().to_string().contains("0 bytes")
        );
        fs::write(dir.path().join("b"), [0xff, 0xfe, 0x00, 0x80]).unwrap();
        let Data::Text(t) = Data::text(dir.path(), 4).unwrap() else { unreachable!() };
        assert_eq!(t, [0xff, 0xfe, 0x00, 0x80]);
    }

    #[test]
    fn a_large_file_is_read_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let sparse = |name: &str, len: u64| {
            fs::File::create(dir.path().join(name)).unwrap().set_len(len).unwrap();
        };
        fs::write(dir.path().join("a"), "small").unwrap();
        sparse("b", MAX_BYTES);
        fs::write(dir.path().join("c"), "too late").unwrap();
        let Data::Text(t) = Data::text(dir.path(), 1).unwrap() else { unreachable!() };
        assert_eq!((t.len() as u64, &t[..6]), (MAX_BYTES, &b"small\0"[..]));
    }

    /// A socket stands for all that is no file: opening it would fail, opening a pipe would block.
    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        fs::write(dir.path().join("text"), "words").unwrap();
        // A link that leads nowhere, and one to itself.
        std::os::unix::fs::symlink("gone", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("circle", dir.path().join("circle")).unwrap();
        let Data::Text(t) = Data::text(dir.path(), 1).unwrap() else { unreachable!() };
        assert_eq!(t, b"words");
        let e = Data::text(&dir.path().join("link"), 1).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io);
        let e = Data::text(&path, 1).unwrap_err().to_string();
        assert!(e.contains("neither a file nor a folder"), "{e}");
    }

    #[test]
    fn sequences_are_a_function_of_seed_step_and_index() {
        let d = Data::Text((0..=255).cycle().take(2000).collect());
        assert_eq!(d.sequence(1, 2, 3, 50), d.sequence(1, 2, 3, 50));
        assert_ne!(d.sequence(1, 2, 3, 50), d.sequence(1, 2, 4, 50));
        assert_eq!(d.sequence(1, 2, 3, 50).0.len(), 51);
        let (s, free) = Data::Copy.sequence(1, 0, 0, 16);
        assert_eq!((&s[..8], free), (&s[8..16], 8));
    }
}
