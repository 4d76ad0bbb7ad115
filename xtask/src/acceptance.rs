//! docs/acceptance.md: every line of the acceptance list, with the test that shows it.
//!
//! A row is `| id | requirement | evidence |`. Evidence is one or more test function names in
//! backticks, or a mark: `[gpu]`, `[python]`, `[fused]` (waits for that part of the system), or
//! `[rule]` (kept by a lint or a check named there). Nothing may be open.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::tidy::files;

/// Lines of the list per group 0 to 4.
const LINES: [usize; 5] = [45, 20, 19, 28, 25];

/// Everything that is out of order, one line each.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let text = fs::read_to_string(root.join("docs/acceptance.md")).unwrap_or_default();
    let mut tests = BTreeSet::new();
    let mut all = Vec::new();
    files(root, &mut all);
    for f in all {
        let text = fs::read_to_string(&f).unwrap_or_default();
        for word in text.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            if word.contains('_') {
                tests.insert(word.to_owned());
            }
        }
    }
    let mut seen = BTreeSet::new();
    for row in text.lines().filter(|l| l.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [id, _, evidence, ..] = cells[..] else { continue };
        if !id.contains('.') {
            continue;
        }
        if !seen.insert(id.to_owned()) {
            problems.push(format!("docs/acceptance.md: {id} stands there twice"));
        }
        let names: Vec<&str> = evidence.split('`').skip(1).step_by(2).collect();
        let marked =
            ["[gpu]", "[python]", "[fused]", "[rule]"].iter().any(|m| evidence.contains(m));
        if names.is_empty() && !marked {
            problems.push(format!("docs/acceptance.md: {id} has no evidence"));
        }
        if evidence.contains("[open]") {
            problems.push(format!("docs/acceptance.md: {id} is open"));
        }
        for n in names.iter().filter(|n| n.contains('_') && !n.contains([' ', '/', '.', ':'])) {
            if !tests.contains(*n) {
                problems.push(format!(
                    "docs/acceptance.md: {id} names `{n}`, which is not in the sources"
                ));
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
