//! The layout of operations: which side a file is on, and who imports whom.
//!
//! An operation's plan knows its executors (`host/` and `device/`); they know the description, the
//! schedule and what a launch is given, but never the plan. Nothing imports in circles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Names of files that belong into `host/` or `device/`.
const EXECUTORS: [&str; 4] = ["host.rs", "cuda.rs", "nccl.rs", "cublaslt.rs"];

/// Operations that only combine others, and carry out nothing themselves.
const COMBINED: [&str; 1] = ["bulk"];

/// The file in which a plan chooses its executor by the heap's backend; no other file asks for the
/// backend.
const CHOOSES: &str = "common/core.rs";

/// A path of modules from the crate's root.
type Module = Vec<String>;

/// A source file, as far as its imports go.
#[derive(Default)]
struct File {
    /// From `crates/ops/src`.
    name: String,
    module: Module,
    /// Names that it passes on, with what they stand for.
    passed_on: BTreeMap<String, Module>,
    /// Paths that it uses itself.
    used: Vec<Module>,
}

impl File {
    /// The folder that is an operation's.
    fn op(&self) -> &str {
        self.name.split_once('/').map_or("", |(op, _)| op)
    }

    fn is_executor(&self) -> bool {
        let side = self.name.split('/').nth(1);
        self.name.matches('/').count() > 1 && matches!(side, Some("host" | "device"))
    }

    fn is_plan(&self) -> bool {
        matches!(self.module.get(1).map(String::as_str), Some("plan"))
    }
}

/// All files of a crate's `src`, by their modules.
pub struct Imports {
    files: BTreeMap<Module, File>,
}

impl Imports {
    /// Of texts by their names from `src`; tests are left out.
    pub fn of(texts: &[(String, String)]) -> Self {
        let product = texts.iter().filter(|(name, _)| !name.contains("tests"));
        let modules: BTreeSet<Module> = product.clone().map(|(name, _)| module_of(name)).collect();
        let files = product.map(|(name, text)| {
            let f = read(name, &without_tests(text), &modules);
            (f.module.clone(), f)
        });
        Self { files: files.collect() }
    }

    /// The files that `file` takes something from.
    fn targets(&self, file: &File) -> BTreeSet<&str> {
        let found = file.used.iter().filter_map(|path| self.resolve(path, 0));
        found.filter(|f| f.name != file.name).map(|f| f.name.as_str()).collect()
    }

    /// The file that defines what a path names, behind all that only pass it on.
    fn resolve(&self, path: &[String], depth: usize) -> Option<&File> {
        let known = (0..=path.len()).rev().find(|&n| self.files.contains_key(&path[..n]))?;
        let file = &self.files[&path[..known]];
        let further = path.get(known).and_then(|name| file.passed_on.get(name));
        match further.filter(|_| depth < 8) {
            Some(to) => self.resolve(&[&to[..], &path[known + 1..]].concat(), depth + 1),
            None => Some(file),
        }
    }

    /// Executors that import a plan.
    fn of_plans(&self) -> Vec<String> {
        let mut found = Vec::new();
        for f in self.files.values().filter(|f| f.is_executor()) {
            let plans: BTreeSet<_> = f.used.iter().filter_map(|p| self.resolve(p, 0)).collect();
            found.extend(plans.iter().filter(|p| p.is_plan()).map(|p| {
                format!("crates/ops/src/{}: an executor imports the plan ({})", f.name, p.name)
            }));
        }
        found
    }

    /// Circles between the files of one operation, each with its files.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let arrows = self.files.values().map(|f| {
            let inside =
                self.targets(f).into_iter().filter(|t| !f.op().is_empty() && op_of(t) == f.op());
            (f.name.clone(), inside.map(str::to_owned).collect())
        });
        components(&arrows.collect())
    }

    /// Circles between folders.
    pub fn folder_circles(&self) -> Vec<Vec<String>> {
        let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for f in self.files.values().filter(|f| !f.op().is_empty()) {
            let to =
                self.targets(f).into_iter().map(op_of).filter(|t| !t.is_empty() && *t != f.op());
            arrows.entry(f.op().to_owned()).or_default().extend(to.map(str::to_owned));
        }
        components(&arrows)
    }
}

impl PartialEq for File {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for File {}

impl PartialOrd for File {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for File {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.name.cmp(&other.name)
    }
}

fn op_of(name: &str) -> &str {
    name.split_once('/').map_or("", |(op, _)| op)
}

fn module_of(name: &str) -> Module {
    let path = name.trim_end_matches(".rs");
    path.split('/').filter(|s| !["mod", "lib"].contains(s)).map(str::to_owned).collect()
}

/// Code without comments, and without modules of tests at its end.
fn without_tests(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let inline = |l: &&str| l.starts_with("mod ") && l.ends_with('{');
        if line == "#[cfg(test)]" && lines.peek().is_some_and(inline) {
            lines.by_ref().find(|l| *l == "}");
            continue;
        }
        code += line.split("//").next().unwrap_or("");
        code.push('\n');
    }
    code
}

/// Returns the imports and re-exports of a file's code.
fn read(name: &str, code: &str, modules: &BTreeSet<Module>) -> File {
    let mut f = File { name: name.to_owned(), module: module_of(name), ..File::default() };
    let (mut rest, mut body) = (code, String::new());
    let mut aliases: BTreeMap<String, Module> = BTreeMap::new();
    while let Some((before, statement, after)) = next_use(rest) {
        body += before;
        let public = before.rsplit('\n').next().unwrap_or("").trim_start().starts_with("pub");
        for (path, alias) in expand(statement) {
            let Some(path) = absolute(&path, &f.module, modules) else { continue };
            if public && name.ends_with("mod.rs") {
                f.passed_on.insert(alias, path);
            } else {
                aliases.insert(alias, path.clone());
                f.used.push(path);
            }
        }
        rest = after;
    }
    body += rest;
    for path in paths_in(&body) {
        let known = aliases.get(&path[0]).map(|to| [&to[..], &path[1..]].concat());
        f.used.extend(known.or_else(|| absolute(&path, &f.module, modules)));
    }
    f
}

/// The text before the next `use` statement, the tree it imports, and what follows.
fn next_use(code: &str) -> Option<(&str, &str, &str)> {
    let at = code.match_indices("use ").map(|(at, _)| at).find(|&at| {
        let line = code[..at].rsplit('\n').next().unwrap_or("").trim_start();
        line.is_empty() || (line.starts_with("pub") && !line.contains(['=', '{']))
    })?;
    let end = at + code[at..].find(';')?;
    Some((&code[..at], &code[at + 4..end], &code[end + 1..]))
}

/// The paths of a tree, each with the name that it has afterwards.
fn expand(tree: &str) -> Vec<(Module, String)> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(p, a)| (p, Some(a)));
        let mut path: Module = path.split("::").map(|s| s.trim().to_owned()).collect();
        if path.last().is_some_and(|l| l == "self") {
            path.pop();
        }
        let name = alias.map_or_else(|| path.last().cloned().unwrap_or_default(), str::to_owned);
        return vec![(path, name)];
    };
    let (first, inside) = (&tree[..open], &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())]);
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (i, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inside[start..i].trim();
                if !part.is_empty() {
                    found.extend(expand(&format!("{first}{part}")));
                }
                start = i + 1;
            }
            _ => {}
        }
    }
    found
}

/// A path from the crate's root, if it is one of this crate.
fn absolute(path: &[String], here: &[String], modules: &BTreeSet<Module>) -> Option<Module> {
    let mut at = here.to_vec();
    match path.first()?.as_str() {
        "crate" => at.clear(),
        "self" | "super" => {}
        // Relative to this file, if it has such a module.
        first => {
            at.push(first.to_owned());
            return modules.contains(&at).then(|| [&at[..], &path[1..]].concat());
        }
    }
    let mut rest = path.iter().peekable();
    while let Some(s) = rest.next_if(|s| ["crate", "self", "super"].contains(&s.as_str())) {
        if s == "super" {
            at.pop();
        }
    }
    at.extend(rest.cloned());
    Some(at)
}

/// All paths of at least two segments in a text.
fn paths_in(code: &str) -> Vec<Module> {
    let of_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let words = code.split(|c: char| !of_path(c));
    let paths = words.filter(|w| w.contains("::") && !w.starts_with(':'));
    let segments =
        |w: &str| -> Module { w.trim_end_matches(':').split("::").map(str::to_owned).collect() };
    paths.map(segments).filter(|p| p.len() > 1).collect()
}

/// Sets of more than one node that reach each other.
fn components(arrows: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reach = |from: &str| {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(at) = todo.pop() {
            let next = arrows.get(&at).into_iter().flatten();
            todo.extend(next.filter(|n| seen.insert((*n).clone())).cloned());
        }
        seen
    };
    let reached: BTreeMap<&String, _> = arrows.keys().map(|k| (k, reach(k))).collect();
    let mut found: BTreeSet<Vec<String>> = BTreeSet::new();
    for (k, r) in &reached {
        let circle: Vec<String> = r.iter().filter(|o| reached[o].contains(*k)).cloned().collect();
        if circle.len() > 1 {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

/// Returns the problems in the layout of the operations in `src`.
pub fn check(src: &Path) -> Vec<String> {
    let mut paths: Vec<PathBuf> = Vec::new();
    crate::tidy::files(src, &mut paths);
    let name = |p: &Path| p.strip_prefix(src).unwrap_or(p).display().to_string();
    let texts: Vec<_> =
        paths.iter().map(|p| (name(p), fs::read_to_string(p).unwrap_or_default())).collect();
    problems(&texts)
}

fn problems(texts: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    let ops: BTreeSet<&str> = texts.iter().map(|(name, _)| op_of(name)).collect();
    for op in ops.into_iter().filter(|op| !["", "common"].contains(op)) {
        let has = |side: &str| texts.iter().any(|(n, _)| n.starts_with(&format!("{op}/{side}/")));
        if !COMBINED.contains(&op) && !has("host") && !has("device") {
            found.push(format!("crates/ops/src/{op}: neither host/ nor device/"));
        }
        for file in
            EXECUTORS.iter().filter(|f| texts.iter().any(|(n, _)| *n == format!("{op}/{f}")))
        {
            found.push(format!("crates/ops/src/{op}/{file}: belongs into host/ or device/"));
        }
    }
    for (name, text) in texts.iter().filter(|(n, _)| n != CHOOSES && !n.contains("tests")) {
        if without_tests(text).contains("BackendKind") {
            found.push(format!("crates/ops/src/{name}: the backend is chosen in {CHOOSES} alone"));
        }
    }
    let imports = Imports::of(texts);
    found.extend(imports.of_plans());
    for c in imports.circles() {
        found.push(format!("crates/ops/src: files import in a circle: {}", c.join(", ")));
    }
    for c in imports.folder_circles() {
        found.push(format!("crates/ops/src: folders import in a circle: {}", c.join(", ")));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two operations as they should be.
    fn good() -> Vec<(String, String)> {
        let files = [
            ("lib.rs", "pub mod a;\npub mod b;\npub mod common;\n"),
            ("common/mod.rs", "mod check;\npub(crate) use check::fits;\n"),
            ("common/check.rs", "pub(crate) fn fits() {}\n"),
            (
                "a/mod.rs",
                "mod host;\nmod launch;\nmod plan;\npub use launch::In;\npub use plan::Plan;\n",
            ),
            ("a/launch.rs", "pub struct In;\n"),
            ("a/plan.rs", "use super::launch::In;\nuse super::host;\npub struct Plan(In);\n"),
            ("a/host/mod.rs", "use super::In;\nuse crate::common::fits;\npub fn run(_: &In) {}\n"),
            ("b/mod.rs", "pub mod device;\nmod plan;\n"),
            ("b/device/mod.rs", "mod nccl;\nmod queue;\npub use queue::go;\n"),
            ("b/device/nccl.rs", "pub fn call() {}\n"),
            ("b/device/queue.rs", "use super::nccl;\npub fn go() { nccl::call() }\n"),
            ("b/plan.rs", "use crate::a::Plan;\nuse crate::b::device::go;\n"),
        ];
        files.map(|(n, t)| (n.to_owned(), t.to_owned())).to_vec()
    }

    /// The problems once `text` stands behind what `file` holds.
    fn with(file: &str, text: &str) -> Vec<String> {
        let mut texts = good();
        match texts.iter_mut().find(|(n, _)| n == file) {
            Some((_, t)) => *t += text,
            None => texts.push((file.to_owned(), text.to_owned())),
        }
        problems(&texts)
    }

    fn only(found: &[String], words: &[&str]) {
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(words.iter().all(|w| found[0].contains(w)), "{found:?}");
    }

    #[test]
    fn a_good_layout_has_no_problem() {
        assert_eq!(problems(&good()), [""; 0]);
    }

    #[test]
    fn executors_belong_to_a_side() {
        let mut texts = good();
        texts.retain(|(n, _)| n != "a/host/mod.rs");
        texts.iter_mut().for_each(|(_, t)| *t = t.replace("use super::host;\n", ""));
        only(&problems(&texts), &["src/a", "neither host/ nor device/"]);
        for file in EXECUTORS {
            only(&with(&format!("b/{file}"), ""), &["src/b", file, "belongs into"]);
        }
        // Those that only combine others need no side.
        assert_eq!(with(&format!("{}/mod.rs", COMBINED[0]), ""), [""; 0]);
    }

    #[test]
    fn executors_do_not_import_plans() {
        // By its file, by what the folder passes on, in a tree, inline, and of another operation.
        for (file, text) in [
            ("b/device/nccl.rs", "use crate::a::plan::Plan;\n"),
            (
                "b/device/nccl.rs",
                "pub(crate) use crate::{\n    common::fits,\n    a::{In, Plan as P},\n};\n",
            ),
            ("b/device/nccl.rs", "fn f(_: &crate::a::Plan) {}\n"),
            ("b/device/nccl.rs", "use crate::a;\nfn f(_: &a::Plan) {}\n"),
        ] {
            only(&with(file, text), &["b/device/nccl.rs", "imports the plan", "a/plan.rs"]);
        }
        let own = with("a/host/mod.rs", "fn f(_: super::Plan) {}\n");
        assert!(own.iter().any(|p| p.contains("a/host/mod.rs: an executor imports the plan")));
        // Comments and tests are no imports.
        for text in [
            "// As `crate::a::Plan` has it.\n",
            "#[cfg(test)]\nmod tests {\n    use crate::a::Plan;\n}\n",
        ] {
            assert_eq!(with("b/device/nccl.rs", text), [""; 0]);
        }
        assert_eq!(with("b/device/tests.rs", "use crate::a::Plan;\n"), [""; 0]);
    }

    #[test]
    fn one_file_asks_for_the_backend() {
        let asks = "fn f(k: BackendKind) -> bool { k == BackendKind::Host }\n";
        only(&with("a/plan.rs", asks), &["a/plan.rs", "chosen in common/core.rs"]);
        assert_eq!(with(CHOOSES, asks), [""; 0]);
        assert_eq!(
            with("a/plan.rs", "#[cfg(test)]\nmod tests {\n    use BackendKind;\n}\n"),
            [""; 0]
        );
    }

    #[test]
    fn circles_between_files_and_folders_are_found() {
        let two = with("b/device/nccl.rs", "use super::queue::go;\n");
        only(&two, &["files import in a circle", "b/device/nccl.rs, b/device/queue.rs"]);
        let passed_on = with("b/device/nccl.rs", "use crate::b::device::go;\n");
        only(&passed_on, &["files import in a circle", "b/device/nccl.rs, b/device/queue.rs"]);
        let three = with("a/launch.rs", "use super::other::X;\n").len();
        assert_eq!(three, 0, "a module that is not there is no file");
        let mut texts = good();
        texts.push(("a/other.rs".to_owned(), "use super::plan::Plan;\n".to_owned()));
        texts[4].1 += "use super::other::X;\n";
        only(&problems(&texts), &["a/launch.rs, a/other.rs, a/plan.rs"]);
        let folders = with("common/check.rs", "use crate::a::In;\n");
        only(&folders, &["folders import in a circle: a, common"]);
    }
}
