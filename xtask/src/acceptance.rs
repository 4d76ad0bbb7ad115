//! docs/acceptance.md: every line of the acceptance list, with the test that shows it.
//!
//! A row is `| id | requirement | evidence |`. Evidence is one or more test function names in
//! backticks, or a mark: `[python]` (waits for that part of the system), `[rule]` (kept by a lint
//! or a check named there), or `none: <reason>` where no test shows it. Nothing may be open.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::tidy::files;

/// Lines of the list per group 0 to 4.
const LINES: [usize; 5] = [45, 20, 19, 28, 25];

/// Everything that is out of order, one line each.
pub fn check(root: &Path) -> Vec<String> {
    let text = fs::read_to_string(root.join("docs/acceptance.md")).unwrap_or_default();
    let mut tests = BTreeSet::new();
    let mut all = Vec::new();
    files(root, &mut all);
    let of =
        |ext: &'static str| all.iter().filter(move |f| f.extension().is_some_and(|e| e == ext));
    for f in of("rs") {
        tests.extend(tests_of(&fs::read_to_string(f).unwrap_or_default()));
    }
    for f in of("py") {
        tests.extend(python_tests_of(&fs::read_to_string(f).unwrap_or_default()));
    }
    problems(&text, &tests)
}

/// Names of the test functions of a file, and of those in its lists of `conformance!` and `tests!`.
fn tests_of(text: &str) -> BTreeSet<String> {
    let name = |s: &str| {
        let end = s.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(s.len());
        s[..end].to_owned()
    };
    let mut tests = BTreeSet::new();
    let mut marked = false;
    for line in text.lines().map(str::trim) {
        if line.ends_with("#[test]") {
            marked = true;
        } else if let Some(at) = line.find("fn ").filter(|_| marked) {
            tests.insert(name(&line[at + 3..]));
            marked = false;
        } else if line.ends_with([';', '}']) {
            // Attributes of several lines do not end so.
            marked = false;
        }
    }
    let lists = |start: &str, end: &str| -> Vec<String> {
        let lists = text.split(start).skip(1).filter_map(|made| made.split(end).next());
        lists.map(str::to_owned).collect()
    };
    for list in lists("conformance!(", ");").into_iter().chain(lists("tests![", "]")) {
        tests.extend(list.split(|c: char| !(c.is_alphanumeric() || c == '_')).map(str::to_owned));
    }
    tests
}

/// Names of the test functions of a Python file.
fn python_tests_of(text: &str) -> BTreeSet<String> {
    let names = text.lines().filter_map(|l| l.strip_prefix("def ")?.split('(').next());
    names.filter(|n| n.starts_with("test_")).map(str::to_owned).collect()
}

fn problems(text: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for row in text.lines().filter(|l| l.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [id, _, evidence, ..] = cells[..] else { continue };
        if !id.contains('.') {
            continue;
        }
        let mut told = |what: String| problems.push(format!("docs/acceptance.md: {id} {what}"));
        if !seen.insert(id.to_owned()) {
            told("stands there twice".to_owned());
        }
        // Stages of `cargo xtask test` stand in backticks, too.
        let parts: Vec<&str> = evidence.split('`').collect();
        let names = parts.chunks(2).filter_map(|p| match p {
            [before, name] if !before.ends_with("stage ") => Some(*name),
            _ => None,
        });
        let is_name =
            |n: &&str| n.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit());
        let names: Vec<&str> = names.filter(is_name).collect();
        let reason = evidence.split("none:").nth(1).map(str::trim);
        let marked = ["[python]", "[rule]"].iter().any(|m| evidence.contains(m));
        if names.is_empty() && !marked && reason.is_none() {
            told("has no evidence".to_owned());
        }
        if reason.is_some_and(|r| r.len() < 10) {
            told("has no test, and no reason for that".to_owned());
        }
        for mark in ["[gpu]", "[fused]", "[open]"] {
            if evidence.contains(mark) {
                told(format!("has {mark}: name a test, or write `none: <reason>`"));
            }
        }
        for n in names {
            if !tests.contains(n) {
                told(format!("names `{n}`, which is no test"));
            }
        }
    }
    for (group, &num) in LINES.iter().enumerate() {
        for i in 1..=num {
            let id = format!("{group}.{i}");
            if !seen.contains(&id) {
                problems.push(format!("docs/acceptance.md: {id} is missing"));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
        fn helper_of_tests() {}\n\
        #[test]\n\
        #[cfg_attr(\n    unix,\n    ignore = \"why\"\n)]\n\
        // Why.\n\
        fn that_works() { helper_of_tests(); let calls_it = 1; }\n\
        proptest! {\n    #[test]\n    fn for_all(x in 0..3) {}\n}\n\
        conformance!(threads, [1, 2], ag_gemm ep);\n\
        tests![of_the_emulator];\n";

    #[test]
    fn only_what_is_a_test_is_one() {
        let tests = tests_of(SOURCE);
        for name in ["that_works", "for_all", "ag_gemm", "ep", "of_the_emulator"] {
            assert!(tests.contains(name), "{name} of {tests:?}");
        }
        for name in ["helper_of_tests", "calls_it", "x"] {
            assert!(!tests.contains(name), "{name} of {tests:?}");
        }
    }

    #[test]
    fn tests_of_python_are_found() {
        let text = "def test_one(world):\n    def test_inner():\n\ndef helper():\ntest_two = 1\n";
        assert_eq!(python_tests_of(text).into_iter().collect::<Vec<_>>(), ["test_one"]);
    }

    #[test]
    fn a_row_names_a_test_or_says_why_not() {
        let tests = tests_of(SOURCE);
        let told = |evidence: &str| {
            let found = problems(&format!("| 0.1 | what | {evidence} |\n"), &tests);
            found.into_iter().filter(|p| p.contains(": 0.1 ")).collect::<Vec<_>>()
        };
        for good in [
            "`that_works`",
            "`ep` (with and without), `for_all`",
            "[rule] test stage `spelling`",
            "`that_works`; none: no machine has two such devices",
            "none: nothing counts them",
            "[python]",
        ] {
            assert_eq!(told(good), [""; 0], "{good}");
        }
        for (bad, why) in [
            ("", "no evidence"),
            ("`helper_of_tests`", "is no test"),
            ("`that_works`, `gone`", "names `gone`"),
            ("[gpu]", "[gpu]"),
            ("`ep`; kernels [gpu]", "[gpu]"),
            ("none:", "no reason"),
        ] {
            let told = told(bad);
            assert!(told.iter().any(|p| p.contains(why)), "{bad}: {told:?}");
        }
        let twice = problems("| 0.1 | a | `ep` |\n| 0.1 | a | `ep` |\n", &tests);
        assert!(twice.iter().any(|p| p.contains("0.1 stands there twice")), "{twice:?}");
        assert!(twice.iter().any(|p| p.contains("0.2 is missing")), "{twice:?}");
    }
}
