//! The rules of prose that a program can check: widths of comments and pages, and words that have a
//! plainer or a standard one.

/// Characters of a line of a comment or a page.
const WIDTH_CAP: usize = 100;

/// Pages that the rules hold for.
pub const PAGES: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Folders whose sources must not use the words.
const PLAIN: [&str; 10] =
    ["core", "boot", "device", "symm", "ops", "nn", "oracle", "tilewire", "cli", "testing"];

/// Words, and what is written instead.
const WORDS: [(&str, &str); 8] = [
    ("told", "reported, called, signalled"),
    ("whom", "the rank or the caller by its name"),
    ("hears", "sees, learns"),
    ("heard", "seen"),
    ("room", "workspace, memory, space"),
    ("rooms", "workspaces"),
    ("surroundings", "environment"),
    ("telling", "reporting"),
];

/// Everything that is out of order in a source file or a page.
pub fn check(name: &str, text: &str) -> Vec<String> {
    let is_code = [".rs", ".cu", ".cuh"].iter().any(|e| name.ends_with(e));
    let mut problems = Vec::new();
    if is_code || PAGES.contains(&name) {
        problems.extend(wide(name, text, is_code));
    }
    let plain = |c: &str| name.starts_with(&format!("crates/{c}/src/"));
    let is_plain = name.starts_with("kernels/src/") || PLAIN.iter().any(|c| plain(c));
    if PAGES.contains(&name) || is_code && is_plain {
        problems.extend(words(name, text));
    }
    problems
}

/// Lines of comments, or of a page, that are too wide. Tables and examples cannot be broken.
fn wide(name: &str, text: &str, is_code: bool) -> Vec<String> {
    let mut fenced = false;
    let mut problems = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let words = line.trim_start();
        let said = match is_code {
            true if !words.starts_with("//") => continue,
            true => words.trim_start_matches(['/', '!']).trim_start(),
            false => words,
        };
        fenced ^= said.starts_with("```");
        let width = line.chars().count();
        if width > WIDTH_CAP && !fenced && !said.starts_with('|') && said.contains(' ') {
            problems.push(format!("{name}:{}: {width} characters, at most {WIDTH_CAP}", i + 1));
        }
    }
    problems
}

fn words(name: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for word in line.split(|c: char| !c.is_alphanumeric() && c != '_') {
            let lower = word.to_lowercase();
            if let Some((bad, good)) = WORDS.iter().find(|(bad, _)| *bad == lower) {
                problems.push(format!("{name}:{}: `{bad}`: write {good}", i + 1));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_are_found() {
        let fill = |n: usize| "a ".repeat(n / 2);
        let comment = |n: usize| format!("    // {}b\n", fill(n - 8));
        assert_eq!(check("a.rs", &comment(100)), [""; 0]);
        assert!(check("a.rs", &comment(102))[0].contains("a.rs:1: 102 characters, at most 100"));
        // Code is the formatter's; tables, examples and addresses stay whole.
        for text in [
            format!("{}\n", fill(120)),
            format!("//! | {} |\n", fill(120)),
            format!("//! ```\n//! {}\n//! ```\n", fill(120)),
            format!("// https://{}\n", "a".repeat(120)),
        ] {
            assert_eq!(check("kernels/a.cu", &text), [""; 0], "{text}");
        }
        assert_eq!(check("README.md", &format!("{}\n", fill(120))).len(), 1);
        assert_eq!(check("docs/lab/a.md", &format!("{}\n", fill(120))), [""; 0]);
    }

    #[test]
    fn words_have_plainer_ones() {
        let found = check("crates/symm/src/a.rs", "// Peers are Told.\nlet x = 1;\n");
        assert_eq!(found, ["crates/symm/src/a.rs:1: `told`: write reported, called, signalled"]);
        assert_eq!(check("crates/symm/src/a.rs", "let untold = told_by;\n"), [""; 0]);
        assert_eq!(check("crates/symm/tests/a.rs", "// told\n"), [""; 0]);
        assert_eq!(check("ARCHITECTURE.md", "a room\n").len(), 1);
    }
}
