//! Some of these tests again, on emulated devices: values, graphs that are replayed, ranks that are
//! silent, killed or gone, where there is no GPU. `kernels/emu/README.md` says what that cannot
//! show.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tilewire_testing::{Lack, WORDS, did_not_run};

use crate::DEVICES;
use crate::driver::Driver;

/// A test, with how many devices, and which operations where it asks. Of those that compute,
/// products in a ring alone on four, where a rank passes on more than one message: attention does
/// so in `crates/cli/tests/emulated.rs`.
const RUNS: [(&str, usize, &str); 31] = [
    ("every_operation_computes", 3, "0-3"),
    ("every_operation_computes", 3, "6-24"),
    ("every_operation_computes", 4, "25-29"),
    ("every_operation_computes", 3, "36-40"),
    ("far::refusals_name_the_backend_of_the_heap", 2, ""),
    ("layouts::both_executors_leave_the_same_bytes", 3, ""),
    ("kernels::the_kernel_of_a_team_is_the_callers_choice", 2, ""),
    ("a_rank_that_launches_another_m_is_named_at_once", 2, ""),
    ("heaps::tensors_over_symmetric_memory_are_that_memory", 3, ""),
    ("deadlines::the_rank_with_the_fewest_calls_is_to_blame", 3, ""),
    ("heaps::errors_about_a_peer_name_its_rank_in_the_world", 2, ""),
    ("a_bias_of_the_type_of_the_results_gives_the_bits_of_an_f32_bias", 2, ""),
    ("whole::one_product_of_all_rows_has_the_bits_of_the_definition", 2, ""),
    ("whole::one_product_of_all_rows_has_the_bits_of_the_definition", 3, ""),
    ("documents::documents_of_one_rank_and_of_several_are_right", 2, ""),
    ("documents::documents_are_right_where_tiles_wait_for_their_keys", 3, ""),
    ("documents::rows_have_the_same_bits_on_any_number_of_ranks", 2, ""),
    (CHOOSES, 2, ""),
    ("documents::keys_leave_a_rank_whose_tiles_wait_on_its_multiprocessors", 2, ""),
    ("replays_with_changed_inputs_equal_eager_launches", 3, "0-4"),
    ("replays_with_changed_inputs_equal_eager_launches", 3, "14-15"),
    ("replays_with_changed_inputs_equal_eager_launches", 2, "40-40"),
    ("a_rank_that_never_launches_is_named_and_outputs_are_poison", 3, "0-2"),
    ("dropped::dropped_plans_leave_their_memory_to_graphs_and_queued_work", 2, "9-14"),
    ("heaps::memory_of_others_becomes_symmetric", 3, ""),
    ("heaps::a_zero_copy_dispatch_feeds_a_grouped_product", 4, ""),
    ("heaps::devices_are_left_in_any_order", 2, "14-19"),
    ("heaps::sizes_around_a_page_of_the_device_arrive_whole", 4, ""),
    ("processes::a_killed_process_is_named_in_each_way_of_waiting", 3, "0-2"),
    ("processes::a_process_that_leaves_is_named_in_each_way_of_waiting", 3, "3-5"),
    ("processes::a_stopped_process_is_named_by_every_operation", 3, "14-15"),
];

/// With as many multiprocessors as plans that may choose want of a device before they take kernels
/// for sm_90a.
const CHOOSES: &str = "documents::plans_that_may_choose_take_gates_where_each_rank_has_a_device";

/// `cargo xtask test --full`: on more devices; operations that wait, leave or keep memory as others
/// do; and replays of 40 s whose copy engines and sums are in other operations, too: engines in 4,
/// and in `engines` of [`ATTACKED`].
const MORE_RUNS: [(&str, usize, &str); 11] = [
    ("documents::documents_of_one_rank_and_of_several_are_right", 4, ""),
    ("documents::documents_are_right_where_tiles_wait_for_their_keys", 2, ""),
    ("documents::rows_have_the_same_bits_on_any_number_of_ranks", 4, ""),
    ("dropped::dropped_plans_leave_their_memory_to_graphs_and_queued_work", 2, "0-6"),
    ("dropped::dropped_plans_leave_their_memory_to_graphs_and_queued_work", 2, "15-39"),
    ("processes::a_killed_process_is_named_in_each_way_of_waiting", 3, "3-5"),
    ("processes::a_process_that_leaves_is_named_in_each_way_of_waiting", 3, "0-2"),
    ("replays_with_changed_inputs_equal_eager_launches", 3, "5-5"),
    ("every_operation_computes", 4, "6-24"),
    ("replays_with_changed_inputs_equal_eager_launches", 4, "14-15"),
    ("heaps::devices_are_left_in_any_order", 3, "14-19"),
];

#[test]
fn operations_of_a_team_run_on_emulated_devices() {
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    // Deadlines are short: nothing else of this binary beside them.
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let more = MORE_RUNS.iter().filter(|_| std::env::var_os("TW_FULL").is_some());
    for (test, devices, ops) in RUNS.iter().chain(more).copied() {
        let mut run = driver.command(std::env::current_exe().unwrap(), devices);
        run.args(["--exact", test, "--nocapture"]).env("TW_RANKS", devices.to_string());
        if !ops.is_empty() {
            run.env("TW_TEAM_OPS", ops);
        }
        if test == CHOOSES {
            run.env("TW_EMU_SMS", "8");
        }
        let begun = Instant::now();
        let out = run.output().unwrap();
        let (said, told) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let good = out.status.success()
            && said.contains("test result: ok. 1 passed")
            && !told.contains(WORDS);
        assert!(good, "{test} {ops}, {devices} devices: {:?}\n{said}\n{told}", out.status);
        println!("{test} {ops}: {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// Operations whose protocol is attacked in one process each, and on how many devices: a peer and
/// no peer between, and four where a rank passes on more than two messages or heads are traded in
/// groups. Longest first.
const ATTACKED: [(&str, usize); 12] = [
    ("cp_attention hybrid,cp_attention ring", 4),
    ("cp_attention gated", 3),
    ("ep expert-major", 3),
    ("ep zero copy,ep twice", 2),
    ("ep flat,ep rank-major", 2),
    ("gemm_ar", 3),
    ("cp_attention all_gather,cp_attention get,cp_attention all_to_all", 3),
    ("all_gather,reduce_scatter,all_reduce,all_to_all,quant,bulk", 3),
    ("gemm_rs", 3),
    ("engines", 3),
    ("ag_gemm", 3),
    ("cp_attention ring", 2),
];

#[test]
fn each_signal_and_put_of_devices_is_attacked() {
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let begun = Instant::now();
    let test = "attacks::each_signal_and_put_of_each_operation_is_attacked";
    // Three at a time: waits for what was lost and slow reads take time and no processor.
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&(ops, devices)) = ATTACKED.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut run = driver.watching(std::env::current_exe().unwrap(), devices);
            run.args(["--exact", test, "--nocapture"]).env("TW_RANKS", devices.to_string());
            let out = run.env("TW_ATTACKED", ops).output().unwrap();
            let (said, told) =
                (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
            let good = out.status.success()
                && said.contains("test result: ok. 1 passed")
                && !told.contains(WORDS);
            assert!(good, "{ops}: {:?}\n{said}\n{told}", out.status);
            let rows: Vec<_> = said.lines().filter(|l| l.starts_with('|')).collect();
            println!("{devices} devices\n{}", rows.join("\n"));
        }
    };
    std::thread::scope(|t| (0..3).for_each(|_| drop(t.spawn(work))));
    println!("attacks: {:.1} s", begun.elapsed().as_secs_f64());
}
