//! Jobs whose processes may open few files: each either works or says how to let them open more.

use std::process::Command;

#[test]
fn few_open_files_are_enough_or_the_remedy_is_told() {
    let tilewire = env!("CARGO_BIN_EXE_tilewire");
    let mut done = Vec::new();
    // Whoever runs the test may leave some open, so that the last limit is ample.
    for limit in (5..=17).chain([100]) {
        let few = format!("ulimit -n {limit}; exec \"$0\" verify --op all_gather --quiet");
        let out = Command::new(tilewire)
            .args(["run", "-n", "3", "--", "sh", "-c", &few, tilewire])
            .output()
            .unwrap();
        let said = format!("{out:?}");
        let told = ["ulimit -n", "error while loading shared libraries"];
        let ok = out.status.success();
        assert!(ok || told.iter().any(|t| said.contains(t)), "{limit} open files: {said}");
        done.push(ok);
    }
    // Both were met: with few there is none, with more there is all.
    assert!(!done[0] && done[done.len() - 1], "{done:?}");
}
