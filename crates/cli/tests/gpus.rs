//! Commands that look at GPUs: where there are some they describe them, where there are none they
//! say what is missing and what to do.

use std::process::{Command, Output};

use serde_json::Value;
use tilewire::device::cuda::{available, device_count};

fn tilewire(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tilewire")).args(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit code 2, one error with a hint, and nothing on standard output.
fn refused(o: &Output, word: &str) {
    let err = text(&o.stderr);
    assert_eq!(o.status.code(), Some(2), "{err}");
    assert!(err.starts_with("error: ") && err.contains("hint") && err.contains(word), "{err}");
    assert!(o.stdout.is_empty());
}

#[test]
fn topo_lists_gpus_or_says_what_is_missing() {
    for args in [&["topo"][..], &["topo", "--json"]] {
        let o = tilewire(args);
        match available() {
            Err(_) => refused(&o, "CUDA"),
            Ok(()) => assert!(o.status.success() && !o.stdout.is_empty()),
        }
    }
    if available().is_ok() {
        let v: Value = serde_json::from_slice(&tilewire(&["topo", "--json"]).stdout).unwrap();
        let n = device_count().unwrap() as usize;
        assert_eq!(v["gpus"].as_array().unwrap().len(), n);
        assert_eq!(v["links"].as_array().unwrap().len(), n * (n - 1));
    }
}

#[test]
fn bench_links_refuses_what_it_cannot_do() {
    let word = if available().is_ok() { "--ranks 2 to" } else { "CUDA" };
    refused(&tilewire(&["bench", "links", "--ranks", "1"]), word);
    refused(&tilewire(&["bench", "links", "--ranks", "65", "--json"]), word);
    // Not both at once.
    let o = tilewire(&["bench", "--op", "gemm", "links"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(text(&o.stderr).contains("cannot be used with"), "{}", text(&o.stderr));
}

#[test]
fn doctor_tells_of_the_driver() {
    let o = tilewire(&["doctor", "--json"]);
    let all: Vec<Value> = serde_json::from_slice(&o.stdout).unwrap();
    let driver = all.iter().find(|f| f["code"] == "driver").unwrap();
    let state = if available().is_ok() { "ok" } else { "warn" };
    assert_eq!(driver["state"], state, "{driver}");
    for f in &all {
        assert!(f["state"] == "ok" || f["remedy"].is_string(), "no remedy: {f}");
    }
}
