//! Stage `kernels`: what is compiled where there is no GPU, and what is wrong with it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::outcome::Outcome;
use crate::stages::{binary, exec, from_problems, one, size_of};
use crate::suites::Extent;

/// The folder of the pinned compiler, and below it the folder of its libraries.
const WHEEL: &str = "target/python-nvrtc";
const WHEEL_LIB: &str = "nvidia/cu13/lib";

/// The folder of the pinned compiler, fetched if it is not there; none where it cannot be.
pub fn nvrtc_wheel(root: &Path) -> Option<PathBuf> {
    let site = root.join(WHEEL);
    if !site.join("nvidia").exists() {
        let dir = site.display().to_string();
        let wheel = "nvidia-cuda-nvrtc==13.0.88";
        let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", &dir, wheel];
        if !exec(root, "python3", &args, Duration::from_secs(900)) {
            println!("{wheel} cannot be installed here");
            return None;
        }
    }
    Some(site.join(WHEEL_LIB)).filter(|p| p.exists())
}

/// Compiles the kernels for three architectures with the pinned NVRTC wheel ([`to_compile`]); needs
/// no GPU. What cannot be fetched is a failure: nothing else shows that the kernels compile.
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
    let keys = to_compile(&listed, extent == Extent::Full);
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
    println!("{} kernels of {} units", rows.lines().count(), listed.lines().count());
    o.add(&from_problems(&problems));
    o
}

/// Architectures that every unit is compiled for.
const ARCHS: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];
/// Of each unit for an architecture one variant of so many: types, head dimensions and epilogues
/// that take the same text. All of them take eight minutes of both processors.
const PART: usize = 3;
/// Of the architecture with the most variants, whose kernels have the fewest registers to spare.
const PART_OF_SM90A: usize = 2;

/// Keys of what is compiled, of the rows of `kernels list`: each unit for each architecture, and
/// where `all` are asked for, each variant. A unit's keys, which are digests of its text, decide
/// which variants come: a change of the unit tries others than the change before it, and every run
/// of one text the same.
fn to_compile(listed: &str, all: bool) -> Vec<String> {
    let mut units: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for l in listed.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()) {
        let word = |name: &str| l[name].as_str().unwrap_or_default().to_owned();
        units.entry((word("arch"), word("unit"))).or_default().push(word("key"));
    }
    let mut keys = Vec::new();
    for ((arch, _), of) in units {
        let part = match &*arch {
            _ if all => 1,
            "sm_90a" => PART_OF_SM90A,
            _ => PART,
        };
        let mut hasher = DefaultHasher::new();
        of.hash(&mut hasher);
        let begin = hasher.finish() as usize % part.min(of.len());
        keys.extend(of.into_iter().skip(begin).step_by(part));
    }
    keys
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

    /// Each unit for each architecture, all variants for sm_90a; another text, other variants.
    #[test]
    fn a_part_of_the_variants_is_compiled_and_every_unit() {
        let listed = |text: &str| {
            let of = |arch: &'static str| {
                let many = (0..7).map(move |i| ("many.cu", i));
                many.chain([("one.cu", 0)]).map(move |(unit, i)| (arch, unit, i))
            };
            let row = |(arch, unit, i)| json!({"unit": unit, "arch": arch, "key": format!("{text} {arch} {unit} {i}")});
            rows(&ARCHS.into_iter().flat_map(of).map(row).collect::<Vec<_>>())
        };
        assert_eq!(to_compile(&listed("a"), true).len(), 3 * 8);
        let mut tried: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for text in 0..20 {
            let keys = to_compile(&listed(&text.to_string()), false);
            assert_eq!(keys, to_compile(&listed(&text.to_string()), false), "one text, one part");
            for arch in ARCHS {
                let of = |unit: &str| {
                    keys.iter().filter(|k| k.contains(arch) && k.contains(unit)).count()
                };
                let (many, one) = (of("many.cu"), of("one.cu"));
                assert_eq!(one, 1, "{arch}: {keys:?}");
                let part = if arch == "sm_90a" { 3..=4 } else { 2..=3 };
                assert!(part.contains(&many), "{arch}: {keys:?}");
            }
            tried.entry(text).or_default().extend(keys);
        }
        for i in 0..7 {
            let key = format!("sm_80 many.cu {i}");
            assert!(tried.values().flatten().any(|k| k.ends_with(&key)), "{key} never comes");
        }
    }
}
