//! The conformance suite: every case of `verify`, one macro line for each backend and model.

use tilewire::prelude::*;
use tilewire_cli::verify::{self, Options};

fn threads(ranks: usize, op: &str) {
    let options = Options { ops: vec![op.to_owned()], seed: 7, ..Options::default() };
    let cases = verify::cases(&options).expect("known operation");
    let cfg = WorldCfg { timeout: std::time::Duration::from_secs(30), ..WorldCfg::default() };
    let rows =
        World::run_threads(ranks, cfg, |world| verify::run(&world, &cases, &options, |_, _| {}))
            .expect("verify runs");
    for row in &rows[0] {
        assert_eq!(
            row.wrong, 0,
            "{} {} {} on {ranks}: {:?}",
            row.op, row.dtype, row.shape, row.note
        );
        assert!(row.max_err.is_some());
    }
}

macro_rules! conformance {
    ($model:ident, $ns:tt, $($op:ident)+) => {
        mod $model {
            $(#[test]
            fn $op() {
                for ranks in $ns {
                    super::$model(ranks, stringify!($op));
                }
            })+
        }
    };
}
conformance!(threads, [1, 2, 3, 4], all_gather reduce_scatter all_reduce all_to_all gemm ag_gemm gemm_rs gemm_ar bulk ep grouped_gemm permute quant);

/// Context parallelism up to the ranks of one host.
fn host_of_eight(ranks: usize, op: &str) {
    threads(ranks, op);
}
conformance!(host_of_eight, [1, 2, 3, 4, 8], attention cp_attention);

#[test]
fn the_list_above_is_complete() {
    let here = [
        "ag_gemm",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "attention",
        "bulk",
        "cp_attention",
        "ep",
        "gemm",
        "gemm_ar",
        "gemm_rs",
        "grouped_gemm",
        "nccl",
        "permute",
        "quant",
        "reduce_scatter",
    ];
    assert_eq!(verify::ops(), here);
    // On devices only.
    let nccl = |backend| {
        let o = Options { ops: vec!["nccl".to_owned()], backend, ..Options::default() };
        verify::cases(&o).unwrap().len()
    };
    assert_eq!((nccl(BackendKind::Host), nccl(BackendKind::Vmm) > 0), (0, true));
}

#[test]
fn sizes_out_of_reach_are_refused() {
    for (op, name, value, says) in [
        ("gemm", "n", usize::MAX, "must be 0 to"),
        ("gemm", "n", 1 << 29, "two sizes make more than"),
        ("gemm", "seq", 8, "no selected"),
        ("ep", "tokens", 0, "must be 1 to"),
        ("grouped_gemm", "groups", 0, "must be 1 to"),
        ("attention", "d", 0, "must be 1 to"),
    ] {
        let shape = [(name.to_owned(), value)].into();
        let e = verify::cases(&Options { ops: vec![op.to_owned()], shape, ..Options::default() });
        let e = e.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
}
