//! The rules of prose that a program can check: widths of comments and pages, words that have a
//! plainer or a standard one, and docs that begin with a question instead of their subject.

/// Characters of a line of a comment or a page.
const WIDTH_CAP: usize = 100;

/// Pages that the rules hold for.
pub const PAGES: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Folders and pages whose lines wrap.
pub const WRAPPED: [&str; 4] =
    ["docs/protocols", "docs/lab", "docs/acceptance.md", "docs/coming_from.md"];

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

/// First words of docs that leave their subject to the reader: "What a plan keeps" may be memory, a
/// number or a text.
const QUESTIONS: [&str; 9] =
    ["what", "where", "how", "which", "why", "who", "whose", "whether", "when"];

/// Folders whose docs begin with their subject.
const DOCUMENTED: [&str; 4] = ["crates/", "kernels/src/", "python/src/", "xtask/src/"];

/// Everything that is out of order in a source file or a page.
pub fn check(name: &str, text: &str) -> Vec<String> {
    let is_code = [".rs", ".cu", ".cuh"].iter().any(|e| name.ends_with(e));
    let mut problems = Vec::new();
    let is_page = PAGES.contains(&name) || WRAPPED.iter().any(|p| name.starts_with(p));
    if is_code || is_page {
        problems.extend(wide(name, text, is_code));
    }
    let plain = |c: &str| name.starts_with(&format!("crates/{c}/src/"));
    let is_plain = name.starts_with("kernels/src/") || PLAIN.iter().any(|c| plain(c));
    if PAGES.contains(&name) || is_code && is_plain {
        problems.extend(words(name, text));
    }
    let is_source = !name.starts_with("crates/") || name.contains("/src/");
    if name.ends_with(".rs") && is_source && DOCUMENTED.iter().any(|d| name.starts_with(d)) {
        problems.extend(questions(name, text));
    }
    problems
}

/// Docs whose first word is one of [`QUESTIONS`].
fn questions(name: &str, text: &str) -> Vec<String> {
    let doc = |line: &str| {
        let line = line.trim_start();
        ["//!", "///"].into_iter().find(|m| line.starts_with(m) && !line.starts_with("////"))
    };
    let mut problems = Vec::new();
    let mut before = None;
    for (i, line) in text.lines().enumerate() {
        let here = doc(line);
        let first = here.filter(|_| here != before).and_then(|marker| {
            let words = line.trim_start().strip_prefix(marker)?;
            words.split(|c: char| !c.is_alphanumeric()).find(|w| !w.is_empty())
        });
        if let Some(word) = first.filter(|w| QUESTIONS.contains(&w.to_lowercase().as_str())) {
            problems
                .push(format!("{name}:{}: a doc begins with `{word}`: name its subject", i + 1));
        }
        before = here;
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
        assert_eq!(check("docs/lab/a.md", &format!("{}\n", fill(120))).len(), 1);
        assert_eq!(check("docs/plan.md", &format!("{}\n", fill(120))), [""; 0]);
    }

    #[test]
    fn docs_begin_with_their_subject() {
        let text =
            "//! What it is.\n\n/// A plan.\n/// What it keeps.\nstruct A;\n    /// Whether.\n";
        let name = "crates/symm/src/a.rs";
        let found = |line: usize, word: &str| {
            format!("{name}:{line}: a doc begins with `{word}`: name its subject")
        };
        assert_eq!(check(name, text), [found(1, "What"), found(6, "Whether")]);
        for word in QUESTIONS {
            assert_eq!(check(name, &format!("/// `{word}` of it.\n")), [found(1, word)]);
        }
        // A second doc in the next line is one of its own; a comment is no doc.
        assert_eq!(check(name, "//! A.\n/// How.\n"), [found(2, "How")]);
        for good in ["// What.\n", "//// What.\n", "/// Whatever.\n", "let a = 1; /// What\n"] {
            assert_eq!(check(name, good), [""; 0], "{good}");
        }
        assert_eq!(check("crates/symm/tests/a.rs", text), [""; 0]);
        assert_eq!(check("kernels/src/a.rs", "/// Why.\n").len(), 1);
        assert_eq!(check("xtask/src/a.rs", "/// Why.\n").len(), 1);
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
