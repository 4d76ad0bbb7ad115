//! House rules that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};

/// Most lines of a file.
const RUST_CAP: usize = 600;
const CUDA_CAP: usize = 700;
/// Lines of a function, outside of tests.
const FUNCTION_CAP: usize = 70;

/// Crates in which unsafe code is forbidden at the root.
const SAFE: [&str; 6] = ["core", "oracle", "nn", "tilewire", "cli", "boot"];

/// Files that an operation's folder holds; `bulk` only combines others.
const OP_FILES: [&str; 3] = ["mod.rs", "desc.rs", "plan.rs"];

/// All tracked-looking source files below `dir`.
pub fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for e in entries.flatten() {
        let (path, name) = (e.path(), e.file_name());
        if path.is_dir() {
            if name != "target" && name != ".git" {
                files(&path, out);
            }
        } else if path
            .extension()
            .is_some_and(|x| ["rs", "cu", "cuh", "py"].iter().any(|e| x == *e))
        {
            out.push(path);
        }
    }
}

/// Everything that is out of order, one line each.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let mut all = Vec::new();
    files(root, &mut all);
    for path in &all {
        let text = fs::read_to_string(path).unwrap_or_default();
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        check_file(&name, &text, &mut problems);
    }
    for c in SAFE {
        let lib = root.join("crates").join(c).join("src/lib.rs");
        let Ok(text) = fs::read_to_string(&lib) else { continue };
        if !text.contains("#![forbid(unsafe_code)]") && !text.contains("#![deny(unsafe_code)]") {
            problems.push(format!("crates/{c}/src/lib.rs: unsafe code is not forbidden"));
        }
    }
    dependencies(root, &mut problems);
    operations(root, &mut problems);
    problems.extend(crate::layout::check(&root.join("crates/ops/src")));
    problems.extend(crate::api::changelog(root));
    problems
}

/// The name of the function that begins on a line.
fn function_of(line: &str) -> Option<&str> {
    let words = line.trim_start();
    let at = if words.starts_with("fn ") { 0 } else { words.find(" fn ")? + 1 };
    let before = &words[..at];
    let known =
        |w: &str| w.starts_with("pub") || ["const", "unsafe", "async", "extern"].contains(&w);
    let quoted = |w: &str| w.starts_with('"') || w.starts_with("in ") || w.ends_with(')');
    let declares = before.split_whitespace().all(|w| known(w) || quoted(w));
    let name = words[at + 3..].split(['(', '<']).next()?;
    declares.then_some(name)
}

/// Functions of a formatted file that are longer than [`FUNCTION_CAP`].
fn long_functions(name: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let Some(function) = function_of(line) else { continue };
        let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        let declaration = lines[i..].iter().position(|l| l.ends_with('{') || l.ends_with(';'));
        if declaration.is_none_or(|at| lines[i + at].ends_with(';')) {
            continue;
        }
        let len = lines[i..].iter().position(|l| *l == end).map_or(0, |n| n + 1);
        if len > FUNCTION_CAP {
            found.push(format!(
                "{name}:{}: `{function}` has {len} lines, at most {FUNCTION_CAP}",
                i + 1
            ));
        }
    }
    found
}

fn check_file(name: &str, text: &str, problems: &mut Vec<String>) {
    if name.ends_with(".rs") && name.contains("/src/") && !name.contains("tests") {
        problems.extend(long_functions(name, text));
    }
    let lines = text.lines().count();
    let cap = if name.ends_with(".rs") { RUST_CAP } else { CUDA_CAP };
    if lines > cap && !name.ends_with(".py") {
        problems.push(format!("{name}: {lines} lines, the most is {cap}"));
    }
    // This file names what it looks for, as does the crate whose words it looks for.
    if name.starts_with("xtask/") || name == "crates/testing/src/lib.rs" {
        return;
    }
    for (i, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("");
        for (bad, why) in [
            ("static mut ", "no mutable statics"),
            ("cuMulticastCreate(", "NVLink multicast is never used"),
            ("multimem.", "NVLink multicast is never used"),
            ("#[ignore]", "an ignored test needs its reason: #[ignore = \"...\"]"),
            ("did not run", "a test that did not run says so by tilewire_testing::did_not_run"),
        ] {
            if code.contains(bad) {
                problems.push(format!("{name}:{}: {why}", i + 1));
            }
        }
    }
}

/// core <- boot, device <- symm <- ops <- nn <- tilewire <- cli; ops never on oracle.
fn dependencies(root: &Path, problems: &mut Vec<String>) {
    let order = ["core", "boot", "device", "symm", "ops", "nn", "tilewire", "cli"];
    for (i, c) in order.iter().enumerate() {
        let manifest = root.join("crates").join(c).join("Cargo.toml");
        let Ok(text) = fs::read_to_string(&manifest) else { continue };
        let normal = text.split("[dev-dependencies]").next().unwrap_or("");
        for later in &order[i + 1..] {
            let dep = if *later == "tilewire" {
                "tilewire.".to_owned()
            } else {
                format!("tilewire-{later}.")
            };
            if normal.lines().any(|l| l.starts_with(&dep)) {
                problems.push(format!("crates/{c}: depends on {later}, which comes after it"));
            }
        }
        if normal.lines().any(|l| l.starts_with("tilewire-testing")) {
            problems.push(format!("crates/{c}: depends on what tests share outside of tests"));
        }
        if *c != "cli" && normal.lines().any(|l| l.starts_with("tilewire-oracle")) {
            problems.push(format!("crates/{c}: depends on the oracle outside of tests"));
        }
    }
}

/// What is wrong with the table that says where an operation's other files are.
fn where_table(root: &Path, op: &str, text: &str) -> Vec<String> {
    let name = format!("crates/ops/src/{op}/mod.rs");
    let Some(at) = text.find("//! # Where") else {
        return vec![format!("{name}: no table `# Where` of kernels, oracle, cases and page")];
    };
    let table = text[at..].lines().take_while(|l| l.starts_with("//!"));
    let rows: Vec<_> = table.filter_map(|l| l.strip_prefix("//! | ")?.split_once(" | ")).collect();
    let lacks = ["kernel", "oracle", "cases", "page"].into_iter();
    let lacks = lacks.filter(|want| !rows.iter().any(|(what, _)| what == want));
    let mut problems: Vec<_> =
        lacks.map(|what| format!("{name}: its table has no row `{what}`")).collect();
    for (_, path) in &rows {
        let path = path.trim_end_matches(" |").trim_matches('`');
        if path.contains('/') && !root.join(path).is_file() {
            problems.push(format!("{name}: its table names {path}, which does not exist"));
        }
    }
    problems
}

fn operations(root: &Path, problems: &mut Vec<String>) {
    let ops = root.join("crates/ops/src");
    let lib = fs::read_to_string(ops.join("lib.rs")).unwrap_or_default();
    for line in lib.lines() {
        let Some(op) = line.strip_prefix("pub mod ").and_then(|l| l.strip_suffix(';')) else {
            continue;
        };
        if op == "common" {
            continue;
        }
        for f in OP_FILES {
            let excused = op == "bulk" && f == "desc.rs";
            if !excused && !ops.join(op).join(f).exists() {
                problems.push(format!("crates/ops/src/{op}: no {f}"));
            }
        }
        let text = fs::read_to_string(ops.join(op).join("mod.rs")).unwrap_or_default();
        problems.extend(where_table(root, op, &text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_functions_are_found() {
        let body = "    x();\n".repeat(FUNCTION_CAP - 1);
        let long = format!("    pub(crate) fn f(\n        a: u8,\n    ) {{\n{body}    }}\n");
        assert!(long_functions("a.rs", &long)[0].contains("a.rs:1: `f` has 73 lines"));
        let short = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(FUNCTION_CAP - 2));
        assert_eq!(long_functions("a.rs", &short), [""; 0]);
        let declared = format!("fn g(&self);\nimpl fn_of {{\n{body}}}\n");
        assert_eq!(long_functions("a.rs", &declared), [""; 0]);
    }

    #[test]
    fn tables_of_operations_name_files_that_exist() {
        let root = crate::root();
        let row = |what: &str, path: &str| format!("//! | {what} | `{path}` |\n");
        let good = "//! # Where\n".to_owned()
            + &row("kernel", "kernels/src/gemm/sm80_gemm.cu")
            + &row("oracle", "crates/oracle/src/gemm.rs")
            + &row("cases", "crates/cli/src/verify/gemm.rs")
            + &row("page", "docs/protocols/gemm.md");
        assert_eq!(where_table(&root, "gemm", &good), [""; 0]);
        assert_eq!(where_table(&root, "gemm", "//! nothing").len(), 1);
        let lacking = good.replace("oracle |", "model |");
        assert!(where_table(&root, "gemm", &lacking)[0].contains("no row `oracle`"));
        let gone = good.replace("gemm.md", "gone.md");
        assert!(where_table(&root, "gemm", &gone)[0].contains("does not exist"));
    }
}
