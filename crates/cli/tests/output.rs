//! Standard output that takes nothing, and arguments that are no text.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};

fn tilewire(args: &[&OsStr], out: Stdio) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    program.args(args).stdout(out).stderr(Stdio::piped()).output().unwrap()
}

/// What was to be read and is lost must not end as if all went well.
#[test]
fn a_full_disk_is_an_error_and_a_reader_that_leaves_is_none() {
    for line in [
        "verify --op permute --json",
        "run -n 1 -- echo x",
        "completions bash",
        "bench --op all_gather --m 8 --n 8 --iters 1 --json",
        "env",
    ] {
        let args: Vec<&OsStr> = line.split(' ').map(OsStr::new).collect();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let o = tilewire(&args, full.into());
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        assert_eq!(o.status.code(), Some(2), "{line}: {said}");
        assert!(
            said.contains("standard output") && said.contains("No space left"),
            "{line}: {said}"
        );
        assert!(!said.contains("panicked"), "{line}: {said}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let o = tilewire(&args, writer.into());
        assert_eq!(o.status.code(), Some(0), "{line}: {}", String::from_utf8_lossy(&o.stderr));
    }
}

#[test]
fn arguments_that_are_no_text_are_passed_on() {
    let odd = OsStr::from_bytes(b"a\xff");
    let words = |line: &'static str| line.split(' ').map(OsStr::new);
    let run: Vec<&OsStr> = words("run -n 1 --no-prefix -- printf %s").chain([odd]).collect();
    let o = tilewire(&run, Stdio::piped());
    assert!(o.status.success() && o.stdout.starts_with(odd.as_bytes()), "{o:?}");
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join(odd);
    let bench = || words("bench --op all_gather --m 8 --n 8 --iters 1 --json");
    let o = tilewire(&bench().collect::<Vec<_>>(), Stdio::piped());
    std::fs::write(&old, &o.stdout).unwrap();
    let compare = bench().chain(words("--threshold 1e9 --compare")).chain([old.as_os_str()]);
    let o = tilewire(&compare.collect::<Vec<_>>(), Stdio::piped());
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    assert_eq!(o.stdout.iter().filter(|b| **b == b'\n').count(), 1);
}
