//! What the host passes by value lies as the kernels declare it.

use std::fs;
use std::process::Command;

use tilewire_kernels::ALL;
use tilewire_kernels::abi::LAYOUTS;

use crate::compile::syntax;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    every_parameter_has_one_layout,
    a_wrong_layout_does_not_compile,
    every_parameter_is_in_the_table,
    includes_are_what_the_preprocessor_makes_of_them,
];

fn every_parameter_has_one_layout() {
    for s in ALL {
        let asserts: String = s.layouts().map(|l| l.asserts()).collect();
        if let Err(e) = syntax(&(s.emu_text() + &asserts), &s.first_variant()) {
            panic!("{}: {e}", s.name);
        }
    }
    let checked = |l: &tilewire_kernels::abi::Layout| ALL.iter().any(|s| s.includes(l.file));
    assert!(LAYOUTS.iter().all(checked), "a structure of a file that no unit includes");
}

/// The check can fail: another size, another place.
fn a_wrong_layout_does_not_compile() {
    let s = ALL.iter().find(|s| s.name == "comm/signal.cu").unwrap();
    let team = s.layouts().find(|l| l.name == "TwTeam").unwrap();
    let (fields, size) = (team.asserts(), team.size);
    assert_eq!(fields.matches("static_assert").count(), 13);
    for (from, to) in [(format!("== {size}"), "== 88"), ("== 56".to_owned(), "== 48")] {
        let wrong = fields.replace(&from, to);
        assert_ne!(wrong, fields);
        assert!(syntax(&(s.emu_text() + &wrong), &s.first_variant()).is_err(), "{from} as {to}");
    }
}

/// The names of the structures that the kernels of `text` take by value.
fn taken(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for kernel in text.split("__global__").skip(1) {
        // Behind the name, which may follow launch bounds: `tw_name(`.
        let Some(at) = kernel.find(" tw_").and_then(|n| Some(n + kernel[n..].find('(')?)) else {
            continue;
        };
        let list = &kernel[at + 1..at + kernel[at..].find(')').unwrap()];
        let words = list.split(',').map(|p| p.replace("const __grid_constant__", ""));
        let types = words.filter_map(|p| p.split_whitespace().next().map(str::to_owned));
        names.extend(types.filter(|t| t.starts_with("Tw") && !t.ends_with('*')));
    }
    names
}

fn every_parameter_is_in_the_table() {
    let mut found = 0;
    for s in ALL {
        for name in taken(&s.emu_text()) {
            assert!(LAYOUTS.iter().any(|l| l.name == name), "{}: {name}", s.name);
            found += 1;
        }
    }
    assert!(found > 90, "{found} parameters: what kernels take was not found");
}

/// Lines that are code, without spaces at their ends.
fn code(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim_end);
    lines.filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned).collect()
}

/// What a run-time compiler gets is what an editor and nvcc see.
fn includes_are_what_the_preprocessor_makes_of_them() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/src/");
    let flat = std::env::temp_dir().join(format!("tilewire-flat-{}.cpp", std::process::id()));
    let run = |file: &str, defines: &[(String, u64)]| {
        let defines = defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        let out = Command::new("g++")
            .args(["-E", "-x", "c++", "-std=c++17"])
            .args(defines)
            .arg(file)
            .output()
            .unwrap();
        assert!(out.status.success(), "{file}: {}", String::from_utf8_lossy(&out.stderr));
        code(&out.stdout)
    };
    for s in ALL {
        fs::write(&flat, s.text()).unwrap();
        let defines = s.first_variant();
        let (file, flat) = (format!("{root}{}", s.name), flat.to_str().unwrap());
        assert!(run(&file, &defines) == run(flat, &defines), "{}", s.name);
    }
    fs::remove_file(&flat).unwrap();
}
