//! `run.sh evidence` over several calls, of programs that say what the real ones do.

use super::*;

/// Takes the place of the command and of what it starts: two GPUs, and operations that the runner
/// asks for.
const TILEWIRE: &str = r#"#!/usr/bin/env bash
here=$(dirname "$0")
case "$1" in
topo) [ ! -e "$here/no-gpu" ] || { echo 'Unsupported: this needs a GPU' >&2; exit 1; }
    echo '{"gpus": [{"name": "fake"}, {"name": "fake"}]}' ;;
verify) echo 'one of gemm, cp_attention' >&2; exit 2 ;;
run) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
esac
"#;
/// Every other program: it fails where a file `fails-<last argument>` is there, or where `meets` is
/// and another one runs at the same time.
const PROGRAM: &str = r#"#!/usr/bin/env bash
here=$(dirname "$0")
[ ! -e "$here/fails-${!#}" ] || { head -c 30000 /dev/zero | tr '\0' x; echo went wrong; exit 1; }
if [ -e "$here/meets" ]; then
    mine=$(mktemp "$here/running.XXXXXX")
    for _ in {1..15}; do
        [ "$(ls "$here"/running.* | wc -l)" = 1 ] || met=1
        sleep 0.1
    done
    rm "$mine"
    [ -z "${met:-}" ] || exit 1
fi
echo '1 ranks go on'
echo 'test result: ok. 1 passed; 0 failed'
"#;

fn bundle(name: &str) -> Folder {
    let dir = Folder::new(name);
    for (name, text) in TEXTS {
        fs::write(dir.0.join(name), text).unwrap();
    }
    fs::write(dir.0.join("commit"), "abc").unwrap();
    for name in ["tilewire", "symm_checks", "conformance", "gpu", "gpu_team", "device"] {
        let (at, text) = (dir.0.join(name), if name == "tilewire" { TILEWIRE } else { PROGRAM });
        fs::write(&at, text).unwrap();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
    }
    dir
}

/// A row of an earlier call.
fn row(commit: &str, gpus: usize, config: &str, state: &str, seconds: f64) -> String {
    let row = serde_json::json!({"commit": commit, "gpus": gpus, "config": config, "state": state,
        "seconds": seconds, "summary": "before", "gpu": "fake", "driver": "1.2"});
    format!("{row}\n")
}

/// A call, and what came of it.
struct Call {
    status: Option<i32>,
    said: String,
    /// Configuration and state of each new row.
    rows: Vec<(String, String)>,
    summary: Value,
    out: PathBuf,
}

impl Call {
    /// Runs `evidence` for two GPUs with `OUT` `out`, what was done before, and more arguments.
    fn run(dir: &Folder, out: &str, done: &[&str], more: &[&str]) -> Self {
        let out = dir.0.join(out);
        let mut run = Command::new("bash");
        run.arg(dir.0.join("run.sh")).args(["evidence", "2", "--no-interposer"]).args(more);
        run.args(done.iter().flat_map(|d| ["--done".into(), dir.0.join(d).into_os_string()]));
        let done = run.env("OUT", &out).env_remove("CUDA_VISIBLE_DEVICES").output().unwrap();
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap_or_default();
        let lines = read("results.jsonl");
        let rows = lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        Self {
            status: done.status.code(),
            said: String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned(),
            rows: rows.map(|r| (text(&r["config"]), text(&r["state"]))).collect(),
            summary: serde_json::from_str(&read("evidence.json")).unwrap_or_default(),
            out,
        }
    }

    fn names(&self) -> Vec<&str> {
        self.rows.iter().map(|(name, _)| &**name).collect()
    }
}

const FOUR: [&str; 4] = ["--only", "faults/timeout-2", "--only", "faults/abort-2"];

/// Of this commit and as many GPUs is not run again; the rest is, what failed at the end.
#[test]
fn rows_of_this_commit_and_as_many_gpus_are_not_run_again() {
    let dir = bundle("evidence-commit");
    let done = [
        row("other", 2, "faults/timeout-2", "passed", 3.0),
        row("abc", 4, "faults/timeout-2-one-connection", "passed", 3.0),
        row("abc", 2, "faults/abort-2", "failed", 3.0),
        row("abc", 2, "faults/abort-2-one-connection", "passed", 3.0),
    ];
    fs::write(dir.0.join("done"), done.concat()).unwrap();
    let call = Call::run(&dir, "a", &["done"], &FOUR);
    let names = ["faults/timeout-2", "faults/timeout-2-one-connection", "faults/abort-2"];
    assert_eq!((call.status, call.names()), (Some(0), names.to_vec()), "{}", call.said);
    let part = &call.summary["parts"]["faults"];
    assert_eq!((&part["passed"], &part["passed_before"]), (&4.into(), &1.into()), "{part}");
    let again = &call.summary["failed_before_they_passed"];
    assert_eq!(again, &serde_json::json!(["faults/abort-2"]));
    assert!(call.said.contains("done: 4 passed, 1 of them before"), "{}", call.said);
    // Its own rows finish the work; a listing says so, too.
    let call = Call::run(&dir, "b", &["done", "a/results.jsonl"], &FOUR);
    assert_eq!((call.status, call.names()), (Some(0), vec![]), "{}", call.said);
    let call = Call::run(&dir, "c", &["done"], &[&FOUR[..], &["--list"]].concat());
    let listed: Vec<_> = call.said.lines().collect();
    assert_eq!(listed, names);
    // A tree that is not its commit's could be any.
    fs::write(dir.0.join("commit"), "abc-dirty").unwrap();
    let dirty = row("abc-dirty", 2, "faults/abort-2", "passed", 3.0);
    fs::write(dir.0.join("dirty"), dirty).unwrap();
    let call = Call::run(&dir, "d", &["dirty"], &["--only", "faults/abort-2"]);
    assert_eq!(call.rows.len(), 2, "{}", call.said);
}

/// A call whose time is up says what is left and how long that takes; the next does it. Those that
/// run beside each other, too.
#[test]
fn a_call_that_is_cut_off_says_what_is_left_and_the_next_goes_on() {
    let dir = bundle("evidence-left");
    let long =
        ["conformance/ops", "faults/abort-2"].map(|name| row("old", 2, name, "passed", 40.0));
    let short = row("old", 2, "conformance/ops-attention", "passed", 0.5);
    // The end of a file that a killed call has left.
    let done = [&long.concat(), &*short, "{\"config\": \"faults/abort-2-one"].concat();
    fs::write(dir.0.join("done"), done).unwrap();
    let skip = ["--skip", "gpu_team", "--skip", "hopper"];
    let which = [&FOUR[2..], &["--only", "conformance/ops"], &skip].concat();
    let call = Call::run(&dir, "a", &["done"], &[&which[..], &["--for", "30"]].concat());
    // It has not said how long the others take.
    let first = ["conformance/ops-attention", "faults/abort-2-one-connection"];
    assert_eq!((call.status, call.names()), (Some(1), first.to_vec()), "{}", call.said);
    let left = "left: 2 80 s expected, 0 of unknown length: conformance/ops faults/abort-2";
    assert!(call.said.contains(left) && call.said.contains("failed: 0"), "{}", call.said);
    let part = &call.summary["parts"]["conformance"];
    assert_eq!((&part["left"][0], &part["left_s"]), (&"conformance/ops".into(), &40.0.into()));
    assert_eq!(call.summary["complete"], false);
    let files = fs::read_dir(&call.out).unwrap().count();
    assert_eq!(files, 2, "results and summary alone");
    let call = Call::run(&dir, "b", &["done", "a/results.jsonl"], &which);
    let rest = vec!["conformance/ops", "faults/abort-2"];
    assert_eq!((call.status, call.names()), (Some(0), rest), "{}", call.said);
    assert!(call.said.contains("done: 4 passed, 2 of them before"), "{}", call.said);
    assert!(call.said.contains("left: 0") && call.summary["complete"] == true, "{}", call.said);
    // What nobody has timed is begun while there is time, and is left with that word.
    let call = Call::run(&dir, "c", &[], &[&which[..], &["--for", "0"]].concat());
    assert!(call.rows.is_empty() && call.said.contains("left: 4 0 s expected, 4 of unknown"));
}

/// A failure is named, the end of its output is in the one file, and it is run again.
#[test]
fn what_failed_is_run_again_and_the_end_of_its_output_stays() {
    let dir = bundle("evidence-failed");
    fs::write(dir.0.join("fails-abort"), "").unwrap();
    let call = Call::run(&dir, "a", &[], &FOUR);
    let failed = "failed: 2 faults/abort-2 faults/abort-2-one-connection\nleft: 0";
    assert!(call.status == Some(1) && call.said.contains(failed), "{}", call.said);
    assert!(!call.out.join("logs").exists());
    let text = fs::read_to_string(call.out.join("failed-logs.txt")).unwrap();
    assert_eq!((text.matches("went wrong").count(), text.matches("== faults/").count()), (2, 2));
    assert!(text.len() < 2 * 21_000, "{} bytes", text.len());
    // It fails once more, and then no longer.
    let call = Call::run(&dir, "b", &["a/results.jsonl"], &FOUR);
    let states: Vec<_> = call.rows.iter().map(|(_, state)| &**state).collect();
    assert_eq!((call.status, states), (Some(1), vec!["failed"; 2]), "{}", call.said);
    fs::remove_file(dir.0.join("fails-abort")).unwrap();
    let call = Call::run(&dir, "c", &["a/results.jsonl", "b/results.jsonl"], &FOUR);
    assert_eq!((call.status, call.rows.len()), (Some(0), 2), "{}", call.said);
    assert!(call.said.contains("passed, but failed before: 2"), "{}", call.said);
}

/// Others may be why a configuration fails that runs beside them: it runs again alone.
#[test]
fn what_fails_beside_others_runs_again_alone() {
    let dir = bundle("evidence-jobs");
    fs::write(dir.0.join("meets"), "").unwrap();
    let call = Call::run(&dir, "a", &[], &[&FOUR[..], &["--jobs", "2"]].concat());
    let states = |wanted: &str| call.rows.iter().filter(|(_, state)| state == wanted).count();
    // Two at once meet; each of them fails then, and passes alone.
    assert_eq!((call.status, states("passed")), (Some(0), 4), "{}", call.said);
    let failed = states("failed");
    assert!((1..=4).contains(&failed), "{}", call.said);
    assert!(call.said.contains(&format!("passed, but failed before: {failed} ")), "{}", call.said);
    let rows = fs::read_to_string(call.out.join("results.jsonl")).unwrap();
    let rows: Vec<Value> = rows.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let beside = |row: &&Value| row.get("beside").is_some();
    assert_eq!(rows.iter().filter(beside).count(), 4);
    assert!(rows.iter().filter(|r| r["state"] == "failed").all(|r| beside(&r)));
    // Alone from the first on, none of them fails.
    let call = Call::run(&dir, "b", &[], &FOUR);
    assert_eq!((call.status, call.rows.len()), (Some(0), 4), "{}", call.said);
    let call = Call::run(&dir, "c", &[], &["--jobs", "0"]);
    assert!(call.status == Some(2) && call.said.contains("at least 1"), "{}", call.said);
}

/// Ranks that share a GPU take a place each, and what compares free memory takes all: none of these
/// meets another.
#[test]
fn ranks_that_share_a_gpu_take_its_places() {
    let dir = bundle("evidence-places");
    fs::write(dir.0.join("meets"), "").unwrap();
    for (out, only) in [("a", "conformance/one-sided-shared"), ("b", "faults/leaks")] {
        let call = Call::run(&dir, out, &[], &["--only", only, "--jobs", "2"]);
        let all = call.rows.iter().all(|(_, state)| state == "passed");
        assert_eq!((call.status, call.rows.len(), all), (Some(0), 2, true), "{}", call.said);
    }
}

/// A configuration that looks at what the one before it has left runs behind it again.
#[test]
fn what_belongs_together_runs_in_one_call() {
    let dir = bundle("evidence-behind");
    let done = row("abc", 2, "faults/killed-2", "passed", 30.0);
    fs::write(dir.0.join("done"), done).unwrap();
    let which = ["--only", "faults/killed-2", "--only", "faults/after-2", "--skip", "one-con"];
    let call = Call::run(&dir, "a", &["done"], &[&which[..], &["--for", "20"]].concat());
    assert!(call.rows.is_empty() && call.said.contains("left: 1 0 s expected"), "{}", call.said);
    let call = Call::run(&dir, "b", &["done"], &which);
    assert_eq!(call.names(), ["faults/killed-2", "faults/after-2"], "{}", call.said);
    let call = Call::run(&dir, "c", &["done", "b/results.jsonl"], &which);
    assert_eq!((call.status, call.rows.len()), (Some(0), 0), "{}", call.said);
}

/// Without a GPU, with results in the way, or without those that it is to go on from.
#[test]
fn a_call_that_cannot_begin_says_why() {
    let dir = bundle("evidence-refused");
    let call = Call::run(&dir, "a", &["none"], &FOUR);
    assert!(call.status == Some(2) && call.said.contains("No such file"), "{}", call.said);
    fs::create_dir(dir.0.join("b")).unwrap();
    fs::write(dir.0.join("b/results.jsonl"), row("abc", 2, "faults/abort-2", "passed", 1.0))
        .unwrap();
    let call = Call::run(&dir, "b", &["b/results.jsonl"], &FOUR);
    assert!(call.status == Some(2) && call.said.contains("Give another OUT"), "{}", call.said);
    assert_eq!(call.rows.len(), 1, "they are as they were");
    fs::write(dir.0.join("no-gpu"), "").unwrap();
    let call = Call::run(&dir, "c", &[], &FOUR);
    assert!(call.status == Some(2) && call.said.contains("needs a GPU"), "{}", call.said);
}

/// Rows that nobody watched, and what is left out: it counts as long as it is left out for a reason
/// that was told.
#[test]
fn rows_count_for_what_this_call_would_find_out() {
    let said = runner(
        "import evidence\n\
         row = lambda **more: {'config': 'm/c', 'gpus': 1, 'commit': 'abc', 'seconds': 1, **more}\n\
         good, none = row(state='passed', multicast_calls=0), row(state='passed')\n\
         skip = row(state='skipped', told=True)\n\
         def is_open(rows, watches, **more):\n\
         \x20   before = evidence.Before(rows, 'abc', 1, watches)\n\
         \x20   return evidence.Unit('m', configs.Config('c', [], **more), before).is_open()\n\
         print(is_open([good], True), is_open([none], True), is_open([none], False),\n\
         \x20   is_open([none], True, preload=False), is_open([good, row(state='failed')], True))\n\
         told = judges.Reported('no NCCL')\n\
         print(is_open([skip], True), is_open([skip], True, needs=told), is_open([], True, needs='no tool'))\n\
         print(evidence.Before([good], None, 1, True).passed('m/c', True))\n\
         parts = [evidence.part_of(n) for n in ['conformance/litmus-credit', 'conformance/ops', 'bench/links-2', 'bench/op-ep']]\n\
         print(*parts, {evidence.part_of(f'{m}/x') for m in evidence.EVIDENCE} <= set(evidence.PARTS))",
    );
    let want = [
        "False True False False True",
        "True False False",
        "False",
        "litmus conformance links rates True",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), want);
}
