//! `tilewire bench` runs, checks its results, and compares.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let small = ["bench", "--m", "24", "--n", "8", "--k", "8", "--iters", "3", "--warmup", "1"];
    Command::new(env!("CARGO_BIN_EXE_tilewire")).args([&small, args].concat()).output().unwrap()
}

fn text(o: &Output) -> String {
    String::from_utf8_lossy(&o.stdout).into_owned()
}

const BY_MEMORY: [&str; 8] =
    ["quant", "permute", "embed", "norm", "heads", "router", "cross_entropy", "optimizer"];

#[test]
fn every_operation_is_timed_and_right() {
    let small =
        ["--tokens", "9", "--hidden", "16", "--experts", "6", "--top-k", "2", "--align", "2"];
    // On three ranks no strategy trades heads.
    for (ranks, num) in [("1", 55), ("2", 55), ("3", 53)] {
        let o = bench(&[&small[..], &["--ranks", ranks, "--json"]].concat());
        assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
        let rows: Vec<serde_json::Value> =
            text(&o).lines().map(|l| serde_json::from_str(l).expect("a row")).collect();
        assert_eq!(rows.len(), num, "{ranks} ranks: {}", text(&o));
        for r in &rows {
            let op = r["op"].as_str().unwrap();
            assert_eq!((&r["version"], &r["wrong"]), (&1.into(), &0.into()), "{r}");
            assert!(r["t_ours_us"].as_f64().unwrap() > 0.0, "{r}");
            assert!(r["spread_us"]["ours"].as_f64().unwrap() >= 0.0, "{r}");
            let (none, small) = (r["max_err"].is_null(), r["max_err"].as_f64() <= Some(0.01));
            assert!(!none && small, "{r}");
            // More than all of it cannot be hidden, and what is not a collective has no such rate.
            assert!(r["hidden_percent"].as_f64().is_none_or(|h| h <= 100.0), "{r}");
            let collective = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"];
            assert_eq!(r["busbw_gbs"].is_number(), collective.contains(&op), "{r}");
            // What moves has a rate against memory, what multiplies has not.
            let family = op.split('/').next().unwrap();
            let moves =
                r["moved_bytes"].as_f64().map(|b| b / r["t_ours_us"].as_f64().unwrap() / 1e3);
            assert_eq!(moves.is_some(), BY_MEMORY.contains(&family), "{r}");
            assert!(
                moves.is_none_or(|gbs| (r["mem_gbs"].as_f64().unwrap() / gbs - 1.0).abs() < 1e-9)
            );
        }
        let families: std::collections::BTreeSet<&str> =
            rows.iter().filter_map(|r| r["op"].as_str()?.split('/').next()).collect();
        assert_eq!(families.len(), 24, "{families:?}");
    }
}

#[test]
fn rates_are_those_of_nccl_tests() {
    // A product, too: sizes that nothing reads are refused.
    let o = bench(&["--op", "all_reduce,gemm", "--ranks", "3", "--json"]);
    let all = text(&o);
    let r: serde_json::Value =
        serde_json::from_str(all.lines().next().expect("a row")).expect("a row");
    assert_eq!(r["op"], "all_reduce");
    let number = |name: &str| r[name].as_f64().unwrap();
    // 24 rows of 8 f32.
    let alg = 24.0 * 8.0 * 4.0 / number("t_ours_us") / 1e3;
    assert!((number("algbw_gbs") / alg - 1.0).abs() < 1e-9, "{r}");
    assert!((number("busbw_gbs") / alg - 4.0 / 3.0).abs() < 1e-9, "{r}");
}

#[test]
fn forms_and_comparison() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    let one = ["--op", "ag_gemm"];
    std::fs::write(&old, bench(&[&one[..], &["--json"]].concat()).stdout).unwrap();
    assert!(text(&bench(&[&one[..], &["--csv"]].concat())).starts_with("op,dtype,ranks"));
    assert!(text(&bench(&[&one[..], &["--md"]].concat())).starts_with("| op | dtype"));
    let old = old.to_str().unwrap();
    let slow = bench(&[&one[..], &["--compare", old, "--threshold", "1e9"]].concat());
    assert!(slow.status.success());
    let fast = bench(&[&one[..], &["--compare", old, "--threshold=-0.999999"]].concat());
    assert_eq!(fast.status.code(), Some(1), "everything is slower than nothing");
    let said = |o: &Output| String::from_utf8_lossy(&o.stderr).into_owned();
    // Some rows match: the others are named.
    let more = bench(&["--op", "ag_gemm,all_gather", "--compare", old, "--threshold", "1e9"]);
    assert!(more.status.success(), "{}", said(&more));
    assert!(said(&more).contains("all_gather f32 ranks=2 m=24 n=8 k=8: not in"), "{}", said(&more));
    // None does: that is no comparison.
    for other in [&["--ranks", "1"][..], &["--dtype", "bf16"], &["--op", "gemm_ar"]] {
        let o = bench(&[other, &["--compare", old]].concat());
        assert_eq!(o.status.code(), Some(2), "{other:?}");
        assert!(said(&o).contains("no row matches"), "{}", said(&o));
        assert!(said(&o).contains("ag_gemm f32 ranks=2 m=24 n=8 k=8: not timed now"));
    }
    // Times of another backend or device are no times of before.
    let text = std::fs::read_to_string(old).unwrap();
    for (field, other) in [("backend", "vmm"), ("device", "a GPU")] {
        let mut row: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        row[field] = other.into();
        let elsewhere = dir.path().join(field);
        std::fs::write(&elsewhere, format!("{row}\n")).unwrap();
        let o = bench(&[&one[..], &["--compare", elsewhere.to_str().unwrap()]].concat());
        assert_eq!(o.status.code(), Some(2), "{field}: {}", said(&o));
        assert!(said(&o).contains("no row matches") && said(&o).contains(other), "{}", said(&o));
    }
    let o = bench(&[&one[..], &["--threshold", "1"]].concat());
    assert!(!o.status.success() && said(&o).contains("--compare"), "a threshold of nothing");
    assert!(!bench(&["--op", "nope"]).status.success());
    assert!(!bench(&["--iters", "0"]).status.success());
    for zero in ["--align", "--hidden", "--top-k", "--experts", "--tokens"] {
        let o = bench(&["--op", "gemm,permute", zero, "0"]);
        assert!(
            o.status.code() == Some(2) && said(&o).contains("must be positive"),
            "{}",
            said(&o)
        );
    }
}

/// FP8 products leave in bf16. What cannot add FP8 is left out, unless it is asked for.
#[test]
fn every_element_type_can_be_timed() {
    for (dtype, ops) in [("f16", 43), ("bf16", 55), ("f8e4m3", 5), ("f8e5m2", 5)] {
        let sizes = ["--tokens", "9", "--hidden", "16"];
        let given = if ops > 5 { &sizes[..] } else { &[] };
        let o = bench(&[&["--dtype", dtype, "--json"], given].concat());
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        assert!(o.status.success(), "{dtype}: {said}");
        assert_eq!(text(&o).lines().count(), ops, "{dtype}: {said}");
        assert_eq!(said.contains("left out"), ops < 55, "{dtype}: {said}");
    }
    let o = bench(&["--dtype", "f8e4m3", "--op", "all_reduce,ag_gemm"]);
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(!o.status.success() && said.contains("f8e4m3"), "{said}");
}

/// Partial sums above 256 are rounded on the wire, and nearly cancel: the error is small beside
/// |A||B|, not beside the result.
#[test]
fn results_are_judged_by_the_magnitude_of_their_terms() {
    let sizes = ["--m", "8", "--n", "8", "--k", "200001", "--iters", "1", "--warmup", "0"];
    for op in ["gemm_rs", "gemm_ar"] {
        let o = Command::new(env!("CARGO_BIN_EXE_tilewire"))
            .args([&["bench", "--json", "--dtype", "bf16", "--op", op], &sizes[..]].concat())
            .output()
            .unwrap();
        let row: serde_json::Value = serde_json::from_slice(&o.stdout).expect("a row");
        assert_eq!(row["wrong"], 0, "{row}");
        assert!(row["max_err"].as_f64().unwrap() >= 1.0, "{row}: nothing was rounded");
    }
}

/// Before anything is timed.
#[test]
fn sizes_and_files_that_cannot_be_are_told_at_once() {
    let wrong = |args: &[&str], words: &str| {
        let o = bench(args);
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        assert_eq!(o.status.code(), Some(2), "{said}");
        assert!(said.contains(words) && !said.contains("panicked"), "{said}");
        assert!(!said.contains("ranks ..."), "{said}");
    };
    let most = usize::MAX.to_string();
    let huge = ["bench", "--op", "ag_gemm", "--m", &most];
    let o = Command::new(env!("CARGO_BIN_EXE_tilewire")).args(huge).output().unwrap();
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert_eq!(o.status.code(), Some(2), "{said}");
    assert!(said.contains("elements") && !said.contains("panicked"), "{said}");
    wrong(&["--op", "ag_gemm", "--compare", "/nonexistent/rows"], "/nonexistent/rows");
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    std::fs::write(&old, "{\"version\":0}\n").unwrap();
    wrong(&["--op", "ag_gemm", "--compare", old.to_str().unwrap()], "another version");
}

/// Ranks that share the host: threads, and processes; a program against itself, and one that is
/// slower.
#[test]
fn ranks_that_share_a_device_are_timed_by_two_programs_in_turn() {
    let shared = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_tilewire");
        Command::new(program).args(["bench", "shared"]).args(args).output().unwrap()
    };
    let rows = |o: &Output| -> Vec<serde_json::Value> {
        text(o).lines().map(|l| serde_json::from_str(l).expect("a record")).collect()
    };
    let small = "--m 24 --n 8 --tokens 9 --hidden 16 --iters 2 --warmup 0";
    let sizes: Vec<&str> = std::iter::once("--").chain(small.split(' ')).collect();
    // On three ranks no strategy of cp_attention trades heads: three strategies, both ways.
    let alone = shared(&[&["--json", "--rounds", "2", "--ranks", "2,3"], &sizes[..]].concat());
    let said = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert_eq!(alone.status.code(), Some(0), "{said}");
    let all = rows(&alone);
    assert_eq!(all.len(), (8 + 8) + (8 + 6), "{}", text(&alone));
    for r in &all {
        let rounds = r["us"].as_array().unwrap();
        let mean = rounds.iter().map(|v| v.as_f64().unwrap()).sum::<f64>() / 2.0;
        assert!(rounds.len() == 2 && mean > 0.0, "{r}");
        assert!((r["median_us"].as_f64().unwrap() / mean - 1.0).abs() < 1e-9, "{r}");
        assert!(r["apart"].as_f64().unwrap() >= 0.0, "{r}");
    }
    // A program that says ten times what it has measured.
    let dir = tempfile::tempdir().unwrap();
    let script = |name: &str, digit: &str| {
        let at = dir.path().join(name);
        let row = format!(
            r#"{{"op":"all_reduce","backend":"host","device":"cpu","dtype":"f32","ranks":2,"shape":"m=1","t_ours_us":{digit}}}"#
        );
        std::fs::write(&at, format!("#!/bin/sh\necho '{row}'\n")).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o700)).unwrap();
        at.to_str().unwrap().to_owned()
    };
    let (fast, slow) = (script("fast", "10.0"), script("slow", "100.0"));
    let compare = |before: &str, after: &str| {
        let rounds = ["--json", "--rounds", "3", "--ranks", "2", "--op", "all_reduce"];
        shared(&[&rounds[..], &["--before", before, "--after", after]].concat())
    };
    let worse = compare(&fast, &slow);
    assert_eq!(worse.status.code(), Some(1));
    let r = &rows(&worse)[0];
    let figures = (&r["ratio"], &r["before_against_before"], &r["slower"]);
    assert_eq!(figures, (&10.0.into(), &0.0.into(), &true.into()), "{r}");
    assert_eq!(r["before_us"].as_array().unwrap().len(), 3, "{r}");
    assert_eq!(compare(&slow, &fast).status.code(), Some(0));
    // This program in place of the second one, and what cannot be.
    let own = shared(&["--rounds", "1", "--ranks", "2", "--op", "all_reduce", "--before", &slow]);
    let said = String::from_utf8_lossy(&own.stderr).into_owned();
    assert!(said.contains("timed by one program alone"), "{said}");
    let missing = shared(&["--before", "/nonexistent/program", "--ranks", "2"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent/program"));
    assert_eq!(shared(&["--rounds", "0"]).status.code(), Some(2));
}
