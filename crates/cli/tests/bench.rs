//! `tilewire bench` runs, checks its results, and compares.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let small = ["bench", "--m", "24", "--n", "8", "--k", "8", "--iters", "3", "--warmup", "1"];
    Command::new(env!("CARGO_BIN_EXE_tilewire")).args([&small, args].concat()).output().unwrap()
}

fn text(o: &Output) -> String {
    String::from_utf8_lossy(&o.stdout).into_owned()
}

#[test]
fn every_operation_is_timed_and_right() {
    for ranks in ["1", "2", "3"] {
        let o = bench(&["--ranks", ranks, "--json"]);
        assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
        let rows: Vec<serde_json::Value> =
            text(&o).lines().map(|l| serde_json::from_str(l).expect("a row")).collect();
        assert_eq!(rows.len(), 7);
        for r in &rows {
            assert_eq!((&r["version"], &r["wrong"]), (&1.into(), &0.into()), "{r}");
            assert!(r["t_ours_us"].as_f64().unwrap() > 0.0 && r["max_err"] == 0.0, "{r}");
        }
    }
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
}

/// FP8 products leave in bf16. What cannot add FP8 is left out, unless it is asked for.
#[test]
fn every_element_type_can_be_timed() {
    for (dtype, ops) in [("f16", 7), ("bf16", 7), ("f8e4m3", 5), ("f8e5m2", 5)] {
        let o = bench(&["--dtype", dtype, "--json"]);
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        assert!(o.status.success(), "{dtype}: {said}");
        assert_eq!(text(&o).lines().count(), ops, "{dtype}: {said}");
        assert_eq!(said.contains("left out"), ops < 7, "{dtype}: {said}");
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
