//! `tilewire train` as a user runs it: the binary, its files, its errors.

use std::path::Path;
use std::process::{Command, Output};

const TINY: [&str; 14] = [
    "--seq",
    "32",
    "--d-model",
    "64",
    "--head-dim",
    "16",
    "--d-ff",
    "64",
    "--batch",
    "24",
    "--seed",
    "3",
    "--lr",
    "6e-3",
];

fn tilewire(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(args)
        .current_dir(dir)
        .env_remove("RANK")
        .output()
        .expect("the binary starts")
}

fn good(dir: &Path, args: &[&str]) -> String {
    let o = tilewire(dir, args);
    let text = String::from_utf8_lossy(&o.stdout).into_owned();
    assert!(o.status.success(), "{args:?}: {text}{}", String::from_utf8_lossy(&o.stderr));
    text
}

fn bad(dir: &Path, args: &[&str]) -> String {
    let o = tilewire(dir, args);
    assert!(!o.status.success(), "{args:?} must fail");
    String::from_utf8_lossy(&o.stderr).into_owned()
}

fn with<'a>(head: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [head, &TINY, rest].concat()
}

fn losses(file: &Path) -> Vec<f64> {
    std::fs::read_to_string(file)
        .expect("metrics")
        .lines()
        .map(|l| {
            serde_json::from_str::<serde_json::Value>(l).expect("JSON")["loss"].as_f64().unwrap()
        })
        .collect()
}

#[test]
fn threads_processes_and_one_rank_give_the_same_curve() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    std::fs::write(d.join("text"), "tiles over wires, wires under tiles. ".repeat(40)).unwrap();
    let train = ["train", "--data", "text", "--steps", "6"];
    good(d, &with(&train, &["--metrics", "one"]));
    let one = losses(&d.join("one"));
    assert_eq!(one.len(), 6);
    for (i, grid) in [
        &["--ranks", "4", "--tp", "2", "--cp", "2"][..],
        &["--ranks", "3"],
        &["--ranks", "8", "--dp", "2", "--tp", "2", "--cp", "2"],
        &["--ranks", "4", "--tp", "2", "--cp", "2", "--processes"],
    ]
    .into_iter()
    .enumerate()
    {
        let file = format!("m{i}");
        good(d, &with(&train, &[grid, &["--metrics", &file]].concat()));
        for (a, b) in losses(&d.join(&file)).iter().zip(&one) {
            assert!((a - b).abs() <= 1e-3 * b, "{grid:?}: {a} for {b}");
        }
    }
}

#[test]
fn the_copy_task_is_learned_and_needs_attention() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--steps", "100", "--ranks", "2", "--tp", "2"];
    good(d, &with(&train, &["--metrics", "whole"]));
    let whole = *losses(&d.join("whole")).last().unwrap();
    assert!(whole <= 0.5, "second copy: {whole} nats");
    good(d, &with(&train, &["--metrics", "blind", "--no-attention"]));
    let blind = *losses(&d.join("blind")).last().unwrap();
    assert!(blind > 2.0, "without attention: {blind} nats");
}

/// Parts are ablated in the trained model. One that is *trained* without experts learns to copy with
/// attention alone, because copying is linear in the embedding; so the experts' share is shown on
/// the weights that were trained with them.
#[test]
fn a_trained_model_is_worse_without_its_experts_and_lost_without_attention() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--ranks", "2", "--metrics", "m"];
    good(d, &with(&train, &["--steps", "100", "--checkpoint", "c"]));
    // The loss of the next step is that of the restored weights.
    let next = |ablated: &[&str]| {
        let args = [&["--steps", "101", "--resume", "c"], ablated].concat();
        good(d, &with(&train, &args));
        losses(&d.join("m"))[0]
    };
    let (whole, no_experts, no_attention) =
        (next(&[]), next(&["--no-experts"]), next(&["--no-attention"]));
    assert!(whole <= 0.5, "{whole} nats");
    assert!(no_experts > 1.5 * whole, "without experts {no_experts} nats, with them {whole}");
    assert!(no_attention > 0.5, "without attention {no_attention} nats");
}

#[test]
fn checkpoint_resume_generate_trace_and_curve() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    std::fs::write(d.join("text"), "abcdefgh".repeat(100)).unwrap();
    let train = ["train", "--data", "text"];
    good(d, &with(&train, &["--steps", "6", "--metrics", "whole"]));
    good(d, &with(&train, &["--steps", "3", "--checkpoint", "c", "--every", "2"]));
    let text = good(
        d,
        &with(
            &train,
            &[
                "--steps",
                "6",
                "--ranks",
                "2",
                "--cp",
                "2",
                "--resume",
                "c",
                "--metrics",
                "rest",
                "--trace",
                "t.json",
                "--svg",
                "l.svg",
                "--generate",
                "abc",
                "--generate-len",
                "5",
            ],
        ),
    );
    for (a, b) in losses(&d.join("rest")).iter().zip(&losses(&d.join("whole"))[3..]) {
        assert!((a - b).abs() <= 1e-3 * b, "{a} for {b}");
    }
    assert!(text.lines().last().is_some_and(|l| l.starts_with("abc") && l.len() >= 8), "{text}");
    assert!(std::fs::read_to_string(d.join("l.svg")).unwrap().contains("polyline"));
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(d.join("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for op in ["ag_gemm", "gemm_rs", "cp_attention", "grouped_gemm", "ep_dispatch", "ep_combine"] {
        assert!(events.iter().any(|e| e["name"] == op), "no {op} in the trace");
    }
    assert!(events.iter().any(|e| e["pid"] == 1), "rank 1 is in the trace");
}

#[test]
fn the_hidden_share_is_null_until_it_is_calibrated() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--steps", "1", "--ranks", "2", "--metrics", "m"];
    let hidden = |rest: &[&str]| {
        good(d, &with(&train, rest));
        let text = std::fs::read_to_string(d.join("m")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["hidden"].clone()
    };
    assert!(hidden(&["--tp", "2"]).is_null());
    assert!(hidden(&["--tp", "2", "--calibrate"]).is_f64());
    assert!(hidden(&["--calibrate"]).is_null(), "nothing is communicated by projections at tp 1");
}

#[test]
fn bad_input_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    assert!(bad(d, &["train", "--data", "nope"]).contains("--data takes a file or a folder"));
    std::fs::write(d.join("empty"), "").unwrap();
    assert!(bad(d, &["train", "--data", "empty"]).contains("not enough text"));
    std::fs::write(d.join("text"), "x".repeat(5000)).unwrap();
    let t = ["train", "--data", "text"];
    assert!(bad(d, &[&t[..], &["--ranks", "3", "--tp", "2"]].concat()).contains("dp * cp * tp"));
    assert!(bad(d, &[&t[..], &["--ranks", "4", "--tp", "4"]].concat()).contains("key/value heads"));
    assert!(bad(d, &[&t[..], &["--top-k", "9"]].concat()).contains("top_k"));
    assert!(bad(d, &[&t[..], &["--resume", "nope"]].concat()).contains("checkpoint nope"));
    assert!(
        bad(d, &[&t[..], &["--generate", "", "--steps", "0"]].concat()).contains("prompt is empty")
    );
    assert!(bad(d, &[&t[..], &["--lr", "nan"]].concat()).contains("--lr NaN"));
    assert!(bad(d, &[&t[..], &["--lr=-1"]].concat()).contains("positive"));
    assert!(bad(d, &[&t[..], &["--d-model", "99999999999"]].concat()).contains("1048576"));
    assert!(
        bad(d, &["run", "-n", "1", "--timeout-s", "nan", "--", "true"]).contains("--timeout-s")
    );
    assert!(bad(d, &["train", "--task", "sing"]).contains("possible values: text, copy"));
    assert!(bad(d, &["verify", "--op", "nope"]).contains("one of ag_gemm"));
    assert!(bad(d, &["verify", "--dtype", "f4"]).contains("one of f64, f32"));
}
