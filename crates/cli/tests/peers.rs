//! The cases of other systems' test suites (`tests/peers/*.json`: source, shape, dtype, and the
//! tolerance that the peer states), run under our rule (one under its own, and why). Rows that are too large for a CPU are
//! counted, and the count may not grow unseen.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tilewire::prelude::*;
use tilewire_cli::rows::Row;
use tilewire_cli::verify::{self, Options};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Peer {
    peer: String,
    source: String,
    version: String,
    tolerance: String,
    /// Only where our rule cannot judge yet: the peer's, and why.
    #[serde(default)]
    theirs: Option<Theirs>,
    #[serde(default)]
    note: Option<String>,
    rows: Vec<PeerRow>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Theirs {
    atol: f64,
    rtol: f64,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerRow {
    op: String,
    dtype: String,
    ranks: usize,
    shape: BTreeMap<String, usize>,
}

impl PeerRow {
    /// Multiplications and additions of one launch, about; for what only moves, elements.
    fn work(&self) -> usize {
        let d = |n: &str| self.shape.get(n).copied().unwrap_or(0);
        match (d("k"), d("hidden")) {
            (0, 0) => d("m") * d("cols"),
            (0, hidden) => self.ranks * d("tokens") * hidden * d("top_k"),
            // The matrices of all groups are made, rows or not.
            (k, _) => 2 * (d("m") + d("groups")) * d("n") * k,
        }
    }
}

/// Work of a row that a test may do. Verification runs each row in many ways, and the reference
/// is three plain loops.
const LIMIT: usize = 9_000_000;
/// Rows above it: what waits for GPUs.
const ABOVE: usize = 66;

fn files() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/peers");
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

fn peers() -> Vec<Peer> {
    files()
        .iter()
        .map(|f| {
            let text = std::fs::read_to_string(f).unwrap();
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", f.display()))
        })
        .collect()
}

/// The cases of `options` on `ranks` threads: all of an operation, or one variant of it. Cases that
/// became equal by their shape run once.
fn run(ranks: usize, op: &str, options: &Options) -> Vec<Row> {
    let mut cases = verify::cases(options).unwrap();
    let mut seen = Vec::new();
    cases.retain(|c| {
        let key = (c.op.clone(), c.dtype, c.shape_text());
        let new = !seen.contains(&key) && (!op.contains('/') || c.op == op);
        seen.push(key);
        new
    });
    assert!(!cases.is_empty(), "no case for {options:?}");
    let cfg = WorldCfg { timeout: std::time::Duration::from_secs(60), ..WorldCfg::default() };
    World::run_threads(ranks, cfg, |w| verify::run(&w, &cases, options, |_, _| {}))
        .unwrap()
        .swap_remove(0)
}

fn options(op: &str, dtype: DType, shape: &[(&str, usize)]) -> Options {
    Options {
        ops: vec![op.split('/').next().unwrap_or(op).to_owned()],
        dtypes: vec![dtype],
        shape: shape.iter().map(|&(k, v)| (k.to_owned(), v)).collect(),
        seed: 7,
        ..Options::default()
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the table is what CI shows")]
fn rows_of_other_suites_hold_under_our_rule() {
    let (mut held, mut above) = (0, 0);
    for peer in peers() {
        assert!(!peer.version.is_empty() && !peer.tolerance.is_empty(), "{}", peer.peer);
        println!("{} ({}, {}): {}", peer.peer, peer.source, peer.version, peer.tolerance);
        peer.note.iter().for_each(|n| println!("  note: {n}"));
        peer.theirs.iter().for_each(|t| println!("  by its own rule: {}", t.why));
        for row in &peer.rows {
            let shape: Vec<(&str, usize)> = row.shape.iter().map(|(k, &v)| (&**k, v)).collect();
            if row.work() > LIMIT {
                above += 1;
                continue;
            }
            let start = std::time::Instant::now();
            let options = Options {
                atol: peer.theirs.as_ref().map(|t| t.atol),
                rtol: peer.theirs.as_ref().map(|t| t.rtol),
                ..options(&row.op, row.dtype.parse().unwrap(), &shape)
            };
            for r in run(row.ranks, &row.op, &options) {
                assert_eq!(
                    r.wrong, 0,
                    "{}: {} {} {}: {:?}",
                    peer.peer, r.op, r.dtype, r.shape, r.note
                );
                held += 1;
            }
            let (op, took) = (&row.op, start.elapsed().as_secs_f64());
            println!("  {op:<14} {:<7} {} ranks {shape:?} {took:.2} s", row.dtype, row.ranks);
        }
    }
    println!("{held} cases hold, {above} rows above {LIMIT} operations");
    assert!(held >= 30, "only {held} cases");
    assert_eq!(above, ABOVE, "rows that are not run");
}

#[test]
fn sixty_five_and_more_experts() {
    for groups in [65, 129, 384] {
        let shape = [("groups", groups), ("m", 2 * groups)];
        for r in run(1, "grouped_gemm", &options("grouped_gemm", DType::BF16, &shape)) {
            assert_eq!(r.wrong, 0, "{groups}: {:?}", r.note);
        }
    }
}

/// `--atol` and `--rtol` replace the rule: nothing allowed refuses what rounding does, and a lot
/// allowed accepts it.
#[test]
fn tolerances_given_by_hand_are_used() {
    let shape = [("m", 9), ("n", 8), ("k", 31)];
    let wrong = |atol, rtol| -> u64 {
        let o = Options { atol, rtol, ..options("ag_gemm", DType::BF16, &shape) };
        run(1, "ag_gemm", &o).iter().map(|r| r.wrong).sum()
    };
    assert_eq!(wrong(None, None), 0);
    assert!(wrong(Some(0.0), None) > 0 && wrong(None, Some(1e-9)) > 0);
    assert_eq!(wrong(Some(1.0), Some(1.0)), 0);
}
