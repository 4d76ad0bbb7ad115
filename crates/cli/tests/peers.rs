//! The cases of other systems' test suites (`tests/peers/*.json`: source, shape, dtype, and the
//! tolerance that the peer states), run under our rule (one under its own, and why). Rows that are
//! too large for a CPU are counted, and the count may not grow unseen.

#[path = "peers/attention.rs"]
mod attention;
#[path = "peers/attention_mag.rs"]
mod attention_mag;
#[path = "peers/attention_ref.rs"]
mod attention_ref;

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
    /// Of `attention` and `cp_attention`.
    #[serde(default)]
    attn: Option<attention::Attn>,
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
/// The same for attention, whose rows run once for each strategy.
const ATTN_LIMIT: usize = 540_000_000;
/// Rows above their limit: what waits for GPUs.
const ABOVE: usize = 205;

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
        .flat_map(|f| {
            let text = std::fs::read_to_string(f).unwrap();
            // One suite, or the suites of one operation.
            let all = if text.starts_with('[') {
                serde_json::from_str(&text)
            } else {
                serde_json::from_str(&text).map(|p| vec![p])
            };
            all.unwrap_or_else(|e| panic!("{}: {e}", f.display()))
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

/// Runs a row: how many cases hold, or none if it is too large.
fn replay(peer: &Peer, row: &PeerRow) -> Option<usize> {
    if let Some(attn) = &row.attn {
        assert!(peer.theirs.is_none(), "{}: attention is judged by our rule", peer.peer);
        let case = attn.case(row);
        let what = format!("{}: {} {}", peer.peer, row.op, case.desc);
        return (case.work() <= ATTN_LIMIT)
            .then(|| case.replay().unwrap_or_else(|e| panic!("{what}: {e}")));
    }
    let shape: Vec<(&str, usize)> = row.shape.iter().map(|(k, &v)| (&**k, v)).collect();
    if row.work() > LIMIT {
        return None;
    }
    let options = Options {
        atol: peer.theirs.as_ref().map(|t| t.atol),
        rtol: peer.theirs.as_ref().map(|t| t.rtol),
        ..options(&row.op, row.dtype.parse().unwrap(), &shape)
    };
    let rows = run(row.ranks, &row.op, &options);
    for r in &rows {
        assert_eq!(r.wrong, 0, "{}: {} {} {}: {:?}", peer.peer, r.op, r.dtype, r.shape, r.note);
    }
    Some(rows.len())
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
            let start = std::time::Instant::now();
            let Some(cases) = replay(&peer, row) else {
                above += 1;
                continue;
            };
            held += cases;
            let (op, shape, took) = (&row.op, &row.shape, start.elapsed().as_secs_f64());
            println!("  {op:<14} {:<7} {} ranks {shape:?} {took:.2} s", row.dtype, row.ranks);
        }
    }
    println!("{held} cases hold, {above} rows above {LIMIT} operations ({ATTN_LIMIT}: attention)");
    assert!(held >= 90, "only {held} cases");
    assert_eq!(above, ABOVE, "rows that are not run");
}

/// What only rows above the limit ask for works too: they are to run where there are GPUs.
#[test]
fn rows_of_attention_above_the_limit_could_run() {
    let sizes = r#""batch": 2, "heads": 4, "heads_kv": 2, "d": 12, "dv": 8"#;
    for (ranks, seq, attn) in [
        (1, 19, r#""mask": "full", "bias": "each_head", "sink": "learned""#),
        (2, 21, r#""mask": "causal", "bias": "each_head", "strategy": "ring""#),
        (2, 18, r#""mask": "causal", "bias": "all_heads", "strategy": "all_gather""#),
        (2, 30, r#""mask": {"window": [5, 3]}, "sink": "learned", "strategy": "all_to_all""#),
        (4, 40, r#""mask": "causal", "sink": "zero", "lengths": "any", "strategy": "hybrid""#),
    ] {
        let op = if ranks == 1 { "attention" } else { "cp_attention" };
        let row = format!(
            r#"{{"op": "{op}", "dtype": "bf16", "ranks": {ranks}, "attn": {{{attn}}},
            "shape": {{{sizes}, "seq": {seq}}}}}"#
        );
        let row: PeerRow = serde_json::from_str(&row).unwrap();
        let held = row.attn.as_ref().unwrap().case(&row).replay();
        assert_eq!(held, Ok(1), "{attn}");
    }
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
