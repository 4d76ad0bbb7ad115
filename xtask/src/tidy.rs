//! House rules that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};

/// Most lines of a file: of Rust, Python and shell, and of CUDA.
const LINES_CAP: usize = 600;
const CUDA_CAP: usize = 700;
/// Lines of a function, outside of tests.
const FUNCTION_CAP: usize = 70;
/// Characters of a line of Python and shell; those of Rust are the formatter's.
const WIDTH_CAP: usize = 100;

/// Scripts that have no ending.
const SCRIPTS: [&str; 1] = [".ci/run"];

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
            .is_some_and(|x| ["rs", "cu", "cuh", "py", "sh"].iter().any(|e| x == *e))
            || SCRIPTS.iter().any(|s| path.ends_with(s))
        {
            out.push(path);
        }
    }
}

/// Returns the pages that have rules of prose: those by name, and those of folders.
fn pages(root: &Path) -> Vec<String> {
    let mut pages: Vec<String> = crate::prose::PAGES.map(str::to_owned).to_vec();
    for place in crate::prose::WRAPPED {
        match fs::read_dir(root.join(place)) {
            Ok(entries) => pages.extend(entries.flatten().filter_map(|e| {
                let name = e.file_name().into_string().ok()?;
                name.ends_with(".md").then(|| format!("{place}/{name}"))
            })),
            Err(_) => pages.push(place.to_owned()),
        }
    }
    pages
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
        problems.extend(crate::prose::check(&name, &text));
    }
    for page in pages(root) {
        let text = fs::read_to_string(root.join(&page)).unwrap_or_default();
        problems.extend(crate::prose::check(&page, &text));
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
        found.extend(too_long(name, i, function, len));
    }
    found
}

/// Functions of a Python file that are longer than [`FUNCTION_CAP`]: to the last line that is
/// further in than the `def`, or in a text.
fn long_python(name: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let inner = |l: &str| l.len() - l.trim_start().len();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let words = line.trim_start();
        let words = words.strip_prefix("async ").unwrap_or(words);
        let Some(function) = words.strip_prefix("def ").and_then(|w| w.split('(').next()) else {
            continue;
        };
        let (mut open, mut in_text, mut last) = (0, false, i);
        for (k, l) in lines[i..].iter().enumerate() {
            let inside = k == 0 || in_text || open > 0 || inner(l) > inner(line);
            if !l.trim().is_empty() && !inside {
                break;
            }
            if !l.trim().is_empty() {
                last = i + k;
            }
            in_text ^= l.matches("\"\"\"").count() % 2 == 1;
            if !in_text {
                open += l.matches('(').count() as i64 - l.matches(')').count() as i64;
            }
            // Brackets count for what stands before the body alone: texts have any.
            open = if l.ends_with(':') { 0 } else { open };
        }
        found.extend(too_long(name, i, function, last + 1 - i));
    }
    found
}

/// Functions of a shell script that are longer than [`FUNCTION_CAP`].
fn long_shell(name: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let functions = lines.iter().enumerate().filter_map(|(i, l)| {
        let function = l.strip_suffix("() {")?;
        let len = lines[i..].iter().position(|l| *l == "}").map_or(0, |n| n + 1);
        too_long(name, i, function, len)
    });
    functions.collect()
}

fn too_long(name: &str, line: usize, function: &str, len: usize) -> Option<String> {
    (len > FUNCTION_CAP).then(|| {
        format!("{name}:{}: `{function}` has {len} lines, at most {FUNCTION_CAP}", line + 1)
    })
}

/// Lines of a script that are longer than [`WIDTH_CAP`].
fn wide_lines(name: &str, text: &str) -> Vec<String> {
    let wide = text.lines().enumerate().filter_map(|(i, l)| {
        let width = l.chars().count();
        (width > WIDTH_CAP)
            .then(|| format!("{name}:{}: {width} characters, at most {WIDTH_CAP}", i + 1))
    });
    wide.collect()
}

/// Files with a check of development builds alone, which is no precondition: whether a list names
/// a kernel's variant, and whether memory could be given back, of which a drop can tell nobody.
const WHILE_DEVELOPED: [&str; 2] = ["crates/ops/src/common/cuda.rs", "crates/symm/src/map.rs"];

fn check_file(name: &str, text: &str, problems: &mut Vec<String>) {
    let in_tests = name.contains("tests");
    let (is_rust, is_python) = (name.ends_with(".rs"), name.ends_with(".py"));
    let is_shell = name.ends_with(".sh") || SCRIPTS.contains(&name);
    if is_rust && name.contains("/src/") && !in_tests {
        problems.extend(long_functions(name, text));
    }
    if is_python && !in_tests {
        problems.extend(long_python(name, text));
    }
    if is_shell {
        problems.extend(long_shell(name, text));
    }
    if is_python || is_shell {
        problems.extend(wide_lines(name, text));
    }
    let lines = text.lines().count();
    let cap = if is_rust || is_python || is_shell { LINES_CAP } else { CUDA_CAP };
    if lines > cap {
        problems.push(format!("{name}: {lines} lines, the most is {cap}"));
    }
    // This file names what it looks for, as does the crate whose words it looks for.
    if name.starts_with("xtask/") || name == "crates/testing/src/lib.rs" {
        return;
    }
    let in_every_build = is_rust && name.contains("/src/") && !WHILE_DEVELOPED.contains(&name);
    for (i, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("");
        let of_debug = ["debug_assert!", "debug_assert_"].iter().any(|w| code.contains(w));
        if in_every_build && of_debug {
            let why = "a check holds in optimised builds, too: assert, or an error";
            problems.push(format!("{name}:{}: {why}", i + 1));
        }
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

/// Returns the problems in the table that names an operation's other files.
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
    fn checks_are_of_every_build() {
        let of = |name: &str| {
            let mut problems = Vec::new();
            check_file(
                name,
                "    debug_assert!(a < b);\n    debug_assert_eq!(a, b);\n",
                &mut problems,
            );
            problems.len()
        };
        assert_eq!(of("crates/a/src/b.rs"), 2);
        assert_eq!([of("crates/a/tests/b.rs"), of(WHILE_DEVELOPED[0])], [0, 0]);
    }

    /// A planted violation of each cap, in each language, and what is just good enough.
    #[test]
    fn scripts_keep_the_caps_of_lines_functions_and_widths() {
        let of = |name: &str, text: &str| {
            let mut problems = Vec::new();
            check_file(name, text, &mut problems);
            problems
        };
        let only = |found: Vec<String>, words: &str| {
            assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
        };
        for name in ["a/b.py", "a/b.sh", ".ci/run"] {
            let lines = |n| "true\n".repeat(n);
            assert_eq!(of(name, &lines(LINES_CAP)), [""; 0]);
            only(of(name, &lines(LINES_CAP + 1)), "601 lines, the most is 600");
            let comment = |n| format!("# {}\n", "\u{e4}".repeat(n - 2));
            assert_eq!(of(name, &comment(WIDTH_CAP)), [""; 0]);
            only(of(name, &comment(WIDTH_CAP + 1)), ":1: 101 characters, at most 100");
        }
        let body = |n| "        x()\n\n        y(')', ':')\n".repeat(n);
        let text = "        t = \"\"\"(\nat the margin\n\"\"\"\n";
        for head in ["    def f(a):\n", "    async def f(\n        a=(1, 2),\n    ) -> int:\n"] {
            let own = head.lines().count() + 3;
            let fits = (FUNCTION_CAP - own) / 3;
            let f = |n| format!("class A:\n{head}{text}{}\n    b = 1\n", body(n));
            assert_eq!(of("a/b.py", &f(fits)), [""; 0]);
            only(of("a/b.py", &f(fits + 1)), "a/b.py:2: `f` has");
            assert_eq!(of("a/tests/b.py", &f(fits + 1)), [""; 0]);
        }
        let shell = |n| format!("f() {{\n{}}}\ng() {{\n    x\n}}\n", "    x\n".repeat(n));
        assert_eq!(of(".ci/run", &shell(FUNCTION_CAP - 2)), [""; 0]);
        only(of(".ci/run", &shell(FUNCTION_CAP - 1)), ".ci/run:1: `f` has 71 lines");
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
