//! Misuse that must not compile.
//!
//! The compiler gets the library that this test is linked with. The `trybuild` crate would check
//! all dependencies again, in a folder of its own: two minutes of two processors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of compiled libraries, and in it the library `tilewire`: of several, built with other
/// sets of features, the latest, whose sources are at least as new as this test's.
fn library() -> (PathBuf, PathBuf) {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let files = fs::read_dir(&deps).unwrap().map(|f| f.unwrap().path());
    let ours = files.filter(|p| {
        let name = p.file_name().unwrap().to_string_lossy();
        name.starts_with("libtilewire-") && name.ends_with(".rlib")
    });
    let latest = ours.max_by_key(|p| p.metadata().unwrap().modified().unwrap());
    (deps, latest.expect("the library that this test is linked with"))
}

/// What the compiler reports of `file`, without its closing lines, which count errors. None if it
/// compiles.
fn refusal(file: &Path) -> Option<String> {
    let (deps, library) = library();
    let out = tempfile::tempdir().unwrap();
    let run = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--color=never"])
        .args(["--allow=dead_code"])
        .arg("-L")
        .arg(format!("dependency={}", deps.display()))
        .arg("--extern")
        .arg(format!("tilewire={}", library.display()))
        .arg("--out-dir")
        .arg(out.path())
        .arg(file)
        .output()
        .unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    let kept = text.split("error: aborting due to").next().unwrap_or_default().trim_end();
    (!run.status.success()).then(|| format!("{kept}\n"))
}

/// `TILEWIRE_BLESS=1` writes the texts anew.
#[test]
fn misuse_does_not_compile() {
    let files = fs::read_dir("tests/ui").unwrap().map(|f| f.unwrap().path());
    let mut files: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "rs")).collect();
    files.sort();
    assert_eq!(files.len(), 3);
    for file in files {
        let text = refusal(&file).unwrap_or_else(|| panic!("{} compiles", file.display()));
        let expected = file.with_extension("stderr");
        if std::env::var_os("TILEWIRE_BLESS").is_some() {
            fs::write(&expected, &text).unwrap();
        }
        assert_eq!(text, fs::read_to_string(&expected).unwrap(), "{}", file.display());
    }
}

/// The same way of compiling accepts what is right: a refusal is no accident of its arguments.
#[test]
fn use_compiles() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("right.rs");
    fs::write(&file, "use tilewire::prelude::*;\nfn main() { let _ = Rank::new(0); }\n").unwrap();
    assert_eq!(refusal(&file), None);
}
