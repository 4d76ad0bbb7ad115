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
    tracks(events, 2);
}

/// Two steps are fewer than a trace holds: nothing of the start and the calibration takes
/// it.
#[test]
fn a_trace_is_of_steps_alone() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--ranks", "2", "--steps", "2", "--calibrate"];
    good(d, &with(&train, &["--trace", "t.json"]));
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(d.join("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let num = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    assert_eq!((num("cross_entropy"), num("init")), (4, 0), "two ranks, two steps");
}

/// A process for each rank, and in it one track for each of its streams, whose work does not
/// overlap.
fn tracks(events: &[serde_json::Value], num_ranks: u64) {
    use std::collections::{BTreeMap, BTreeSet};
    let of = |kind: &'static str| events.iter().filter(move |e| e["name"] == kind);
    let ranks: BTreeSet<u64> = of("process_name").map(|e| e["pid"].as_u64().unwrap()).collect();
    assert_eq!(ranks, (0..num_ranks).collect());
    let mut names = BTreeMap::new();
    for e in of("thread_name") {
        let track = (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap());
        let stream = e["args"]["name"].as_str().unwrap();
        assert!(names.insert(track, stream).is_none(), "{track:?} is named twice");
    }
    let streams: BTreeSet<_> = names.iter().map(|((rank, _), stream)| (rank, stream)).collect();
    assert_eq!(streams.len(), names.len(), "a stream has one track: {names:?}");
    for rank in &ranks {
        assert!(streams.contains(&(rank, &"main")), "rank {rank}: {names:?}");
        let copies = streams.iter().filter(|s| s.0 == rank && s.1.starts_with("copy "));
        assert!(copies.count() > 0, "rank {rank} has no copies: {names:?}");
    }
    let mut work: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
    for e in events.iter().filter(|e| e["ph"] == "X") {
        let track = (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap());
        let span = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
        work.entry(track).or_default().push(span);
    }
    assert_eq!(work.keys().collect::<Vec<_>>(), names.keys().collect::<Vec<_>>());
    for (track, mut spans) in work {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let apart = |w: &[(f64, f64)]| w[0].0 + w[0].1 <= w[1].0 + 0.01;
        assert!(spans.windows(2).all(apart), "{track:?}: one stream runs two things at once");
    }
}

/// A resumed run goes on with the files of the run before, and writes those it is asked for even if
/// no step is left.
#[test]
fn a_resumed_run_adds_to_the_metrics_and_always_writes_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--metrics", "m"];
    good(d, &with(&train, &["--steps", "2", "--checkpoint", "a"]));
    let o = tilewire(d, &with(&train, &["--steps", "2", "--resume", "a", "--checkpoint", "b"]));
    let said = String::from_utf8_lossy(&o.stderr);
    assert!(
        o.status.success() && said.contains("has 2 steps: none of --steps 2 is left"),
        "{said}"
    );
    assert_eq!(losses(&d.join("m")).len(), 2);
    good(d, &with(&train, &["--steps", "4", "--resume", "b"]));
    let text = std::fs::read_to_string(d.join("m")).unwrap();
    let step = |l: &str| serde_json::from_str::<serde_json::Value>(l).unwrap()["step"].clone();
    assert_eq!(text.lines().map(step).collect::<Vec<_>>(), [0, 1, 2, 3]);
    // Not resumed: from the beginning.
    good(d, &with(&train, &["--steps", "1"]));
    assert_eq!(losses(&d.join("m")).len(), 1);
}

/// Differences are printed, the seed goes on, another model is refused, a damaged checkpoint is
/// named and the one before it taken, and `checkpoint list` and `verify` say the same.
#[test]
fn a_resumed_run_says_how_it_differs() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let sizes = ["--seq", "32", "--batch", "4", "--d-model", "64", "--head-dim", "16"];
    let run = |more: &[&'static str]| -> Vec<&'static str> {
        [&["train", "--task", "copy", "--checkpoint", "c"], &sizes[..], more].concat()
    };
    good(d, &run(&["--steps", "4", "--every", "2", "--metrics", "m"]));
    let said = bad(d, &run(&["--steps", "6"]));
    assert!(said.contains("is of step 4, and this run is at step 0"), "{said}");
    let said = bad(d, &run(&["--steps", "6", "--resume", "c", "--no-experts"]));
    assert!(said.contains("another model"), "{said}");
    let o = tilewire(d, &run(&["--steps", "5", "--resume", "c", "--seed", "9", "--lr", "0.5"]));
    let said = String::from_utf8_lossy(&o.stderr);
    assert!(o.status.success() && said.contains("lr: 0.5, and 0.001 when"), "{said}");
    assert!(said.contains("seed: 1 of the checkpoint goes on, 9 is not used"), "{said}");
    let names = |list: &str| {
        list.lines().map(|l| l.split("  ").next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        names(&good(d, &["checkpoint", "list", "c"])),
        ["c/step-0000000005", "c/step-0000000004"]
    );
    assert!(good(d, &["checkpoint", "verify", "c"]).contains("c/step-0000000005: whole, "));
    let file = d.join("c/step-0000000005/rank-00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let o = tilewire(d, &["checkpoint", "verify", "c", "--json"]);
    assert_eq!(o.status.code(), Some(1));
    let rows: Vec<serde_json::Value> = String::from_utf8_lossy(&o.stdout)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let place = "rank-00000.safetensors: tensor layers.1.down.v: bytes";
    assert!(rows[0]["damage"][0].as_str().unwrap().contains(place), "{rows:?}");
    assert_eq!((rows.len(), rows[1]["damage"].as_array().unwrap().len()), (2, 0));
    let o = tilewire(d, &run(&["--steps", "6", "--resume", "c", "--metrics", "m"]));
    let (said, text) = (String::from_utf8_lossy(&o.stderr), String::from_utf8_lossy(&o.stdout));
    assert!(o.status.success() && said.contains(place), "{said}");
    assert!(text.contains("going on from c/step-0000000004, at step 4"), "{text}");
    assert_eq!(losses(&d.join("m")).len(), 6);
    let said =
        bad(d, &["train", "--task", "copy", "--resume", "c/step-0000000004", "--layers", "1"]);
    assert!(said.contains("another model"), "{said}");
}

/// After an error there is a recorder of every team of every rank, and the error is still told if
/// there is not.
#[test]
fn after_an_error_all_teams_are_dumped() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    // The first line of metrics cannot be written.
    let train = ["train", "--task", "copy", "--steps", "2", "--ranks", "4", "--tp", "2"];
    let train = with(&train, &["--cp", "2", "--metrics", "/dev/full", "--dump"]);
    let said = bad(d, &[&train[..], &["all"]].concat());
    assert!(said.contains("No space left"), "{said}");
    let mut names: Vec<String> = std::fs::read_dir(d.join("all"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let teams = ["cp0.0", "cp0.1", "shard0", "shard1", "tp0.0", "tp0.1"];
    let mut want: Vec<String> =
        teams.iter().flat_map(|t| [0, 1].map(|r| format!("{t}-1-r{r}.json"))).collect();
    want.extend((0..4).map(|r| format!("world-1-r{r}.json")));
    assert_eq!(names, want);
    let told = tilewire(d, &["dump", "all"]);
    assert!(String::from_utf8_lossy(&told.stdout).contains("team tp0.1"), "{told:?}");

    std::fs::write(d.join("file"), "").unwrap();
    let said = bad(d, &[&train[..], &["file/folder"]].concat());
    assert!(said.contains("No space left") && said.contains("file/folder"), "{said}");
}

#[test]
fn the_hidden_share_is_null_until_it_is_calibrated() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let train = ["train", "--task", "copy", "--steps", "1", "--metrics", "m"];
    let hidden = |rest: &[&str]| {
        good(d, &with(&train, rest));
        let text = std::fs::read_to_string(d.join("m")).unwrap();
        let step = serde_json::from_str::<serde_json::Value>(&text).unwrap();
        // The host has no kernels to compile, which is not the same as none that took time.
        assert_eq!(step.get("kernels_s"), Some(&serde_json::Value::Null));
        step["hidden"].clone()
    };
    assert!(hidden(&["--ranks", "2", "--tp", "2"]).is_null());
    for divided in ["--tp", "--cp", "--dp"] {
        assert!(hidden(&["--ranks", "2", divided, "2", "--calibrate"]).is_f64(), "{divided}");
    }
    assert!(hidden(&["--calibrate"]).is_null(), "one rank has nobody to talk to");
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
    let silent = [&t[..], &["--generate", "", "--steps", "1", "--metrics", "m"]].concat();
    assert!(bad(d, &silent).contains("prompt is empty"));
    assert!(!d.join("m").exists(), "it is said before anything is trained");
    for (flags, missing) in [
        (&["--every", "2"][..], "--checkpoint"),
        (&["--generate-len", "2"], "--generate"),
        (&["--every", "0", "--checkpoint", "c"], "--every"),
    ] {
        let said = bad(d, &[&t[..], &["--steps", "0"], flags].concat());
        assert!(said.contains(missing), "{flags:?}: {said}");
    }
    assert!(bad(d, &[&t[..], &["--lr", "nan"]].concat()).contains("--lr NaN"));
    assert!(bad(d, &[&t[..], &["--lr=-1"]].concat()).contains("positive"));
    assert!(bad(d, &[&t[..], &["--d-model", "99999999999"]].concat()).contains("1048576"));
    assert!(
        bad(d, &["run", "-n", "1", "--timeout-s", "nan", "--", "true"]).contains("--timeout-s")
    );
    assert!(bad(d, &["train", "--task", "sing"]).contains("possible values: text, copy"));
    // What diverges is no bug.
    let wild = bad(d, &[&t[..], &["--lr", "1e300", "--steps", "9"]].concat());
    assert!(wild.contains("not finite") && wild.contains("`--lr`"), "{wild}");
    assert!(!wild.contains("bug"), "{wild}");
    // Places that cannot be written are told before a step is taken, and nothing is left.
    for flag in ["--checkpoint", "--trace", "--svg"] {
        let taken = if flag == "--checkpoint" { "text" } else { "." };
        for (place, why) in
            [("none/file", "no such file"), (taken, "directory"), ("text/file", "not a directory")]
        {
            let said = bad(d, &[&t[..], &["--steps", "2", "--metrics", "m", flag, place]].concat());
            let told = said.to_lowercase().contains(why);
            assert!(said.contains(flag) && told && said.contains("hint"), "{said}");
            assert!(!d.join("m").exists(), "{flag} {place}: it is said before anything is trained");
        }
    }
    assert_eq!(std::fs::read_dir(d).unwrap().count(), 2, "empty and text");
    for (arch, says) in
        [("sm_90", "sm_90a"), ("sm_80a", "sm_80"), ("sm_75", "sm_80 and newer"), ("foo", "as in")]
    {
        for command in ["list", "compile"] {
            let said = bad(d, &["kernels", command, "--arch", arch]);
            assert!(said.contains(says) && said.contains("--arch"), "{arch}: {said}");
        }
    }
    assert!(bad(d, &["verify", "--op", "nope"]).contains("one of ag_gemm"));
    assert!(bad(d, &["verify", "--dtype", "f4"]).contains("one of f64, f32"));
}
