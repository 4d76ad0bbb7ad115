//! Tests of launches on several streams again, on an emulated device: there an edge that is missing
//! between two streams shows.

use tilewire_testing::{Lack, WORDS, did_not_run};

use crate::driver::Driver;

const TESTS: [&str; 5] = [
    "attention_streams::launches_of_attention_on_two_streams_do_not_meet",
    "attention_streams::graphs_of_attention_do_not_meet_launches_nor_their_own_branches",
    "grouped_gemm::launches_on_two_streams_do_not_meet",
    "grouped_gemm::graphs_do_not_meet_launches_nor_their_own_branches",
    "parts::launches_in_parts_do_not_meet",
];

/// `cargo xtask test --full`: twenty replays of each form.
const MORE_TESTS: [&str; 1] = ["grouped_gemm::replays_follow_the_splits"];

#[test]
fn streams_of_an_emulated_device_do_not_meet() {
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let more = MORE_TESTS.iter().filter(|_| std::env::var_os("TW_FULL").is_some());
    for test in TESTS.iter().chain(more) {
        let mut run = driver.command(std::env::current_exe().unwrap(), 1);
        let out = run.args(["--exact", *test, "--nocapture"]).output().unwrap();
        let (said, told) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let good = out.status.success()
            && said.contains("test result: ok. 1 passed")
            && !told.contains(WORDS);
        assert!(good, "{test}: {:?}\n{said}\n{told}", out.status);
    }
}
