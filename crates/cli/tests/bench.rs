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
    assert!(!bench(&["--op", "nope"]).status.success());
    assert!(!bench(&["--iters", "0"]).status.success());
}
