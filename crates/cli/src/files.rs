//! Files that the user names on the command line.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use tilewire::core::{Error, Result};

/// The most bytes of a file that is held in memory as a whole: ten times what a day of training
/// writes.
const MOST: u64 = 256 << 20;

/// Reads a whole file, a pipe as well.
///
/// # Errors
/// `Io` if it cannot be read; `InvalidArgument` if it has more than 256 MiB.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let io = |e| Error::io(path.display(), e);
    let file = File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    // A file says its length before it is read; a pipe does not.
    let long = file.metadata().map_err(io)?.len() > MOST;
    let long = long || file.take(MOST + 1).read_to_end(&mut bytes).map_err(io)? as u64 > MOST;
    if long {
        let text = format!("{}: the file is too long", path.display());
        return Err(Error::invalid(text).expected(format_args!("at most {MOST} bytes")));
    }
    Ok(bytes)
}

/// Reads a whole text file.
///
/// # Errors
/// As [`read`]; `Io`, too, if it is not UTF-8.
pub fn text(path: &Path) -> Result<String> {
    let invalid = |e| std::io::Error::new(std::io::ErrorKind::InvalidData, e);
    String::from_utf8(read(path)?).map_err(|e| Error::io(path.display(), invalid(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = File::create(&path).unwrap();
        file.set_len(MOST + 1).unwrap();
        let e = text(&path).unwrap_err();
        assert!(e.message().ends_with("the file is too long"), "{e}");
        file.set_len(MOST).unwrap();
        assert_eq!(read(&path).unwrap().len() as u64, MOST);
        std::fs::write(&path, b"\xff").unwrap();
        assert!(text(&path).unwrap_err().to_string().contains("utf-8"));
        // It has no length, and no end either.
        let e = read(Path::new("/dev/zero")).unwrap_err();
        assert!(e.message().ends_with("the file is too long"), "{e}");
    }
}
