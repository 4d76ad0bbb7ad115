//! The conformance suite: every case of `verify`, one macro line for each backend and model.

use tilewire::prelude::*;
use tilewire_cli::verify::{self, Options};

fn threads(ranks: usize, op: &str) {
    judge(ranks, Options { ops: vec![op.to_owned()], seed: 7, ..Options::default() });
}

fn judge(ranks: usize, options: Options) {
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

/// Sizes that no case of the table has, among them heads that are wider than a block of scales.
#[test]
fn other_shapes_are_judged() {
    for (ranks, op, dtype, shape) in [
        (1, "attention", DType::F8E4M3, &[("seq", 37), ("d", 128)][..]),
        (1, "attention", DType::F8E4M3, &[("seq", 9), ("d", 300)]),
        (1, "attention", DType::F32, &[("seq", 5), ("d", 1)]),
        (2, "cp_attention", DType::F8E4M3, &[("seq", 11), ("d", 130)]),
        (3, "ep", DType::BF16, &[("tokens", 23), ("experts", 61), ("hidden", 528), ("top_k", 5)]),
        (1, "grouped_gemm", DType::BF16, &[("groups", 17), ("m", 41), ("n", 36), ("k", 76)]),
        (1, "gemm/swiglu", DType::F16, &[("m", 77), ("n", 104), ("k", 256)]),
    ] {
        let shape = shape.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        let (ops, dtypes) = (vec![op.to_owned()], vec![dtype]);
        judge(ranks, Options { ops, dtypes, shape, seed: 7, ..Options::default() });
    }
}

#[test]
fn cases_that_sizes_make_alike_run_once() {
    let num = |ops: &str, shape: &[(&str, usize)]| {
        let shape = shape.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        verify::cases(&Options { ops: vec![ops.to_owned()], shape, ..Options::default() })
            .unwrap()
            .len()
    };
    let one = [("m", 5), ("n", 6), ("k", 7)];
    // Three plain ones of f32 alone differ in sizes only, and a variant is named by itself.
    assert_eq!((num("gemm/bias", &one), num("gemm/plain", &one), num("gemm", &one)), (3, 3, 29));
    assert_eq!(num("gemm/plain", &[]), 10);
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
