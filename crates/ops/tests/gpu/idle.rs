//! Host code of devices where there are none: some of these tests again, on a driver whose devices
//! do nothing (`idle.c`). Who owns memory and how long, what happens when there is none, and in
//! which order things go are seen; values are not.

use std::process::Command;
use std::sync::PoisonError;

use tilewire_testing::{Lack, WORDS, did_not_run};

use crate::DEVICES;
use crate::driver::{COMMON, Driver};
use crate::expected::IDLE;
use crate::little::SHARED;

const DRIVER: &str = include_str!("idle.c");
/// What refuses allocations.
const WATCH: &str = include_str!("../../../../xtask/bundle/nomulticast.c");

const DROPPED: &str = "dropped::dropped_plans_leave_their_memory_to_graphs_and_queued_work";
const LACKING: &str = "lacking::a_rank_without_memory_at_prepare_is_named_and_the_team_goes_on";
const CALLS: &str = "launches::launches_neither_allocate_nor_wait";
const BORROWED: &str = "borrowed::a_borrow_ends_at_once_and_what_it_used_behind_its_work";
const FEW: &str = "launches::a_launch_and_its_wait_call_the_driver_rarely";
const ONE: &str = "whole::sequential_by_puts_is_one_product";
const ONCE: &str = "documents::who_needs_no_other_keys_attends_once";
const LITTLE: &str = "little::plans_on_a_device_of_little_shared_memory_take_portable_kernels";

/// A test, with how many devices (which divide 12, as some heads are), and which operations where
/// not all.
const RUNS: [(&str, usize, Option<&str>); 18] = [
    (DROPPED, 2, None),
    (DROPPED, 6, None),
    ("heaps::devices_are_left_in_any_order", 3, Some("14-19")),
    (LACKING, 2, None),
    (LACKING, 3, None),
    (LACKING, 6, None),
    // Others move much memory.
    (CALLS, 3, Some("0-3")),
    (CALLS, 3, Some("6-29")),
    (CALLS, 6, Some("6-29")),
    (BORROWED, 2, None),
    (FEW, 2, Some("0-3")),
    (FEW, 2, Some("6-29")),
    (ONE, 2, None),
    (ONE, 6, None),
    (ONCE, 2, None),
    (ONCE, 6, None),
    // As it is, and with as much as on sm_120.
    (LITTLE, 1, None),
    (LITTLE, 2, None),
];

#[test]
fn host_code_runs_on_idle_devices() {
    let files = [("driver.c", format!("{COMMON}{DRIVER}"))];
    let words =
        "gcc -O1 -w -shared -fPIC -finstrument-functions -o libcuda.so.1 driver.c -lpthread -ldl";
    let Some(driver) = Driver::build("idle", &files, words) else {
        return did_not_run(Lack::Compiler, "it needs gcc");
    };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("watch.c"), WATCH).unwrap();
    let args = ["-O1", "-w", "-shared", "-fPIC", "-o", "watch.so", "watch.c", "-lpthread", "-ldl"];
    let out = Command::new("gcc").args(args).current_dir(dir.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    std::fs::create_dir(at("calls")).unwrap();
    for (test, devices, ops) in RUNS {
        let mut run = driver.command(std::env::current_exe().unwrap(), devices);
        run.args(["--exact", test, "--nocapture"])
            .env("LD_PRELOAD", at("watch.so"))
            .env("TILEWIRE_CACHE_DIR", at("cache"))
            .env("TW_CALLS_DIR", at("calls"))
            .env(IDLE, "1")
            .env("TW_RANKS", devices.to_string());
        ops.map(|ops| run.env("TW_TEAM_OPS", ops));
        if [FEW, ONE, ONCE].contains(&test) {
            run.env("TW_COUNTS", "1");
        }
        if test == LITTLE && devices == 2 {
            run.env(SHARED, "101376");
        }
        if test == CALLS {
            // It wants other outputs than before.
            run.env("TW_IDLE_VARIES", "1");
        }
        let out = run.output().unwrap();
        let (said, told) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let good = out.status.success()
            && said.contains("test result: ok. 1 passed")
            && !told.contains(WORDS);
        assert!(good, "{test}, {devices} devices: {:?}\n{said}\n{told}", out.status);
    }
}
