//! Stage `kernels`: what is compiled where there is no GPU, and what is wrong with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::outcome::Outcome;
use crate::stages::{binary, exec, from_problems, one, size_of};
use crate::suites::Extent;

/// The pinned compiler.
const PINNED: &str = "nvidia-cuda-nvrtc==13.0.88";
/// Its folder, and below that the folder of its libraries.
const WHEEL: &str = "target/python-nvrtc";
const WHEEL_LIB: &str = "nvidia/cu13/lib";

/// The folder of the pinned compiler, fetched if it is not there; none where it cannot be.
pub fn nvrtc_wheel(root: &Path) -> Option<PathBuf> {
    let site = root.join(WHEEL);
    if !site.join("nvidia").exists() {
        let dir = site.display().to_string();
        let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", &dir, PINNED];
        if !exec(root, "python3", &args, Duration::from_secs(900)) {
            println!("{PINNED} cannot be installed here");
            return None;
        }
    }
    Some(site.join(WHEEL_LIB)).filter(|p| p.exists())
}

/// Compiles the kernels for three architectures with the pinned NVRTC wheel ([`to_compile`]); needs
/// no GPU. What cannot be fetched is a failure: nothing else shows that the kernels compile. Notes
/// in [`NOTES`] the units of which all variants passed.
pub fn run(root: &Path, extent: Extent) -> Outcome {
    let mut o = Outcome::default();
    let there = root.join(WHEEL).join("nvidia").exists();
    // Twice, as other fetched libraries.
    let Some(lib) = nvrtc_wheel(root).or_else(|| nvrtc_wheel(root)) else { return one(false) };
    if !there {
        o.downloaded = size_of(&root.join(WHEEL));
    }
    // As a user would, who has the wheel and no GPU.
    let lib = lib.display().to_string();
    let bin = binary(root).display().to_string();
    let args = ["kernels", "compile", "--nvrtc", &lib];
    let text = |args: &[&str]| -> (bool, String) {
        let done = Command::new(&bin)
            .args(args)
            .current_dir(root)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output();
        done.map_or((false, String::new()), |d| {
            (d.status.success(), String::from_utf8_lossy(&d.stdout).into_owned())
        })
    };
    let listed = ARCHS.map(|arch| text(&["kernels", "list", "--json", "--arch", arch]).1).concat();
    let units = units_of(&listed);
    let notes = fs::read_to_string(root.join(NOTES)).unwrap_or_default();
    let keys = to_compile(&units, &notes, extent == Extent::Full);
    let archs = ARCHS.join(",");
    println!(
        "$ {bin} {} --arch {archs} --keys <{} of {}>",
        args.join(" "),
        keys.len(),
        listed.lines().count()
    );
    let chosen = ["--arch", &archs, "--keys", &keys.join(","), "--json"];
    let (ended_well, rows) = text(&[&args[..], &chosen].concat());
    let listed: String = listed
        .lines()
        .filter(|l| keys.iter().any(|k| l.contains(k)))
        .map(|l| format!("{l}\n"))
        .collect();
    let problems = kernel_problems(ended_well, &listed, &rows);
    println!("{} kernels of {} variants", rows.lines().count(), listed.lines().count());
    if problems.is_empty() {
        let now = noted(&units, &notes, &keys);
        if now != notes && fs::write(root.join(NOTES), now).is_ok() {
            println!("{NOTES} has what passed: commit it");
        }
    }
    o.add(&from_problems(&problems));
    o
}

/// Architectures that every unit is compiled for.
const ARCHS: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];
/// Units of which all variants have compiled well, a line for each architecture: their names, and
/// the digest of their texts, options and compiler.
const NOTES: &str = "kernels/compiled.txt";
/// Of a unit that [`NOTES`] has, one variant of so many is compiled: types, head dimensions and
/// epilogues that take the same text. All of all units take five minutes of both processors.
const PART: usize = 8;

/// The variants of a unit for an architecture.
struct Unit {
    /// Architecture and name.
    name: String,
    keys: Vec<String>,
    digest: blake3::Hash,
}

impl Unit {
    fn note(&self) -> String {
        format!("{} {}", self.name, &self.digest.to_hex()[..16])
    }
}

/// The units of rows of `kernels list`, sorted by name. Keys are digests of texts and options.
fn units_of(listed: &str) -> Vec<Unit> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for l in listed.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()) {
        let word = |name: &str| l[name].as_str().unwrap_or_default().to_owned();
        all.entry(format!("{} {}", word("arch"), word("unit"))).or_default().push(word("key"));
    }
    let unit = |(name, keys): (String, Vec<String>)| {
        let digest = blake3::hash(format!("{PINNED} {}", keys.join(" ")).as_bytes());
        Unit { name, keys, digest }
    };
    all.into_iter().map(unit).collect()
}

/// Keys of what is compiled: all of a unit that `notes` does not have as it is, or where `all` are
/// asked for, otherwise a part that the unit's digest decides, and every run of one text the same.
fn to_compile(units: &[Unit], notes: &str, all: bool) -> Vec<String> {
    let mut keys = Vec::new();
    for u in units {
        let is_known = !all && notes.lines().any(|l| l == u.note());
        let part = if is_known { PART } else { 1 };
        let begin = usize::from(u.digest.as_bytes()[0]) % part.min(u.keys.len());
        keys.extend(u.keys.iter().skip(begin).step_by(part).cloned());
    }
    keys
}

/// The notes behind a run that compiled `keys` without a problem: of the units that there are,
/// those that had a note, or all of whose keys were compiled.
fn noted(units: &[Unit], notes: &str, keys: &[String]) -> String {
    let has =
        |u: &&Unit| notes.lines().any(|l| l == u.note()) || u.keys.iter().all(|k| keys.contains(k));
    units.iter().filter(has).map(|u| u.note() + "\n").collect()
}

/// Returns the problems of a run of `kernels compile`: its status, the rows of `kernels list` for
/// the same architectures, its own rows. It stops at the first unit that does not compile, behind
/// good rows.
fn kernel_problems(ended_well: bool, listed: &str, compiled: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if !ended_well {
        problems.push("`kernels compile` failed".to_owned());
    }
    let mut parse = |text: &str| -> Vec<Value> {
        let rows = text.lines().map(|l| serde_json::from_str(l).map_err(|e| format!("{l}: {e}")));
        let (good, bad): (Vec<_>, Vec<_>) = rows.partition(Result::is_ok);
        problems.extend(bad.into_iter().filter_map(Result::err));
        good.into_iter().flatten().collect()
    };
    let (listed, compiled) = (parse(listed), parse(compiled));
    for arch in ARCHS {
        if !listed.iter().any(|l| l["arch"] == arch) {
            problems.push(format!("no unit is listed for {arch}"));
        }
    }
    for l in &listed {
        if !compiled.iter().any(|k| k["key"] == l["key"]) {
            problems.push(format!("no row of {} {} {}", l["unit"], l["variant"], l["arch"]));
        }
    }
    for k in &compiled {
        // A missing field is a fault, too.
        let good = k["spill_bytes"] == 0
            && k["serialised"] == false
            && k["cubin_bytes"].as_u64() > Some(0);
        if !good {
            problems.push(format!("spills, is serialised or has no code: {k}"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rows(rows: &[Value]) -> String {
        rows.iter().map(|r| format!("{r}\n")).collect()
    }

    /// Two units for each architecture, and the rows of a run that compiled them.
    fn all() -> (Vec<Value>, Vec<Value>) {
        let units = ARCHS.iter().flat_map(|arch| ["a.cu", "b.cu"].map(|unit| (unit, *arch)));
        let listed = units.map(|(unit, arch)| {
            json!({"unit": unit, "variant": "", "arch": arch, "key": format!("{unit}-{arch}")})
        });
        let listed: Vec<_> = listed.collect();
        let compiled = listed.iter().map(|l| {
            let mut k = l.clone();
            k["spill_bytes"] = 0.into();
            k["serialised"] = false.into();
            k["cubin_bytes"] = 100.into();
            k
        });
        let compiled = compiled.collect();
        (listed, compiled)
    }

    #[test]
    fn a_unit_that_does_not_compile_is_noticed() {
        let (listed, compiled) = all();
        let problems_of = |ended_well, compiled: &[Value]| {
            kernel_problems(ended_well, &rows(&listed), &rows(compiled))
        };
        assert_eq!(problems_of(true, &compiled), [""; 0]);
        // The compiler stopped at the second unit of sm_80: the row before it is good.
        let stopped = problems_of(false, &compiled[..1]);
        assert_eq!(stopped.len(), 1 + 5, "{stopped:?}");
        assert!(stopped[0].contains("failed") && stopped[5].contains("sm_100a"), "{stopped:?}");
        assert_eq!(
            problems_of(false, &compiled).len(),
            1,
            "every row, and a status that says otherwise"
        );
        let left_out = problems_of(true, &compiled[..5]);
        assert!(left_out.len() == 1 && left_out[0].contains("b.cu"), "{left_out:?}");
        for (field, value) in [
            ("spill_bytes", json!(8)),
            ("serialised", json!(true)),
            ("cubin_bytes", json!(0)),
            ("serialised", json!(null)),
        ] {
            let mut bad = compiled.clone();
            bad[3][field] = value;
            assert_eq!(problems_of(true, &bad).len(), 1, "{field}");
        }
        // Nothing listed is nothing compiled.
        assert_eq!(kernel_problems(true, "", "").len(), ARCHS.len());
        assert_eq!(kernel_problems(true, &rows(&listed), "no row\n").len(), 1 + listed.len());
    }

    /// Rows of `kernels list`: a unit of 17 variants and one of one, for each architecture.
    fn listed(text: &str) -> String {
        let of = |arch: &'static str| {
            let many = (0..17).map(move |i| ("many.cu", i));
            many.chain([("one.cu", 0)]).map(move |(unit, i)| (arch, unit, i))
        };
        let row = |(arch, unit, i)| json!({"unit": unit, "arch": arch, "key": format!("{text} {arch} {unit} {i}")});
        rows(&ARCHS.into_iter().flat_map(of).map(row).collect::<Vec<_>>())
    }

    #[test]
    fn a_unit_is_compiled_whole_until_all_of_it_has_passed() {
        let units = units_of(&listed("a"));
        let all = to_compile(&units, "", false);
        assert_eq!(all.len(), 3 * 18);
        // One variant did not come: the unit has no note.
        let most: Vec<_> = all.iter().filter(|k| *k != "a sm_80 many.cu 16").cloned().collect();
        let notes = noted(&units, "", &most);
        assert_eq!(notes.lines().count(), 5, "{notes}");
        let then = to_compile(&units, &notes, false);
        let of = |unit: &str| then.iter().filter(|k| k.contains(unit)).count();
        assert_eq!(of("sm_80 many.cu"), 17);
        assert!((2..=3).contains(&of("sm_90a many.cu")), "{then:?}");
        assert_eq!(of("one.cu"), 3, "one of each unit at least");
        assert_eq!(to_compile(&units, &notes, true), all);
        // Now it has; what had a note keeps it.
        let notes = noted(&units, &notes, &then);
        assert_eq!(notes.lines().count(), 6, "{notes}");
        // Another text has no note, and those of the old one go.
        let changed = units_of(&listed("a").replace("a sm_90a many.cu 3", "b sm_90a many.cu 3"));
        let then = to_compile(&changed, &notes, false);
        assert_eq!(then.iter().filter(|k| k.contains("sm_90a many.cu")).count(), 17);
        let after = noted(&changed, &notes, &then);
        assert!(after.lines().count() == 6 && after != notes, "{after}");
    }

    #[test]
    fn each_variant_comes_with_some_text() {
        let mut tried = Vec::new();
        for text in 0..60 {
            let units = units_of(&listed(&text.to_string()));
            let notes = noted(&units, "", &to_compile(&units, "", true));
            tried.extend(to_compile(&units, &notes, false));
        }
        for i in 0..17 {
            let key = format!("sm_80 many.cu {i}");
            assert!(tried.iter().any(|k| k.ends_with(&key)), "{key} never comes");
        }
    }
}
