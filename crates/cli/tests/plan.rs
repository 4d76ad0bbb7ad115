//! `tilewire plan cp_attention`: its rows add up, bytes that one rank sends are those that another
//! receives, and what the operation would refuse is refused.

use std::process::{Command, Output};

use serde_json::Value;

fn plan(words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(["plan", "cp_attention"]).args(words.split_whitespace());
    command.output().expect("the binary starts")
}

fn rows(words: &str) -> Vec<Value> {
    let out = plan(&format!("{words} --json"));
    assert!(out.status.success(), "{words}: {out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn number(v: &Value) -> u64 {
    v.as_u64().unwrap_or_else(|| panic!("{v} is no number"))
}

const DOCS: &str = "--docs 4096,1024,512,256,2048,256 --ranks 4 --heads 8 --kv-heads 4";

#[test]
fn ranks_have_equal_rows_and_work_and_what_is_sent_is_received() {
    for strategy in ["get", "ring", "all_gather", "all_to_all", "hybrid --a2a-size 2"] {
        let all = rows(&format!("{DOCS} --strategy {strategy}"));
        assert_eq!(all.len(), 4);
        let pairs: u64 = all.iter().map(|r| number(&r["pairs"])).sum();
        assert_eq!(
            pairs,
            [4096, 1024, 512, 256, 2048, 256].map(|n: u64| n * (n + 1) / 2).iter().sum::<u64>()
        );
        let mut spans: Vec<(u64, u64)> = Vec::new();
        for (i, r) in all.iter().enumerate() {
            assert!(r["rows"] == 2048 && r["rank"] == i, "{r}");
            assert!(r["work_of_mean"].as_f64().unwrap() <= 1.05, "{r}");
            let list = r["rows_q"].as_array().unwrap();
            spans.extend(list.iter().map(|s| (number(&s[0]), number(&s[1]))));
            for pass in ["forward", "backward"] {
                assert!(number(&r[pass]["signals"]) > 0, "{r}");
                for (j, other) in all.iter().enumerate() {
                    assert_eq!(r[pass]["receives"][j], other[pass]["sends"][i], "{strategy}");
                }
            }
        }
        spans.sort_unstable();
        let end = spans.iter().fold(0, |end, s| if s.0 == end { s.1 } else { u64::MAX });
        assert_eq!(end, 8192, "{spans:?}");
    }
}

/// A file says the same as numbers, and the layouts differ as their page says.
#[test]
fn offsets_may_come_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cu");
    std::fs::write(&file, "[0, 4096, 5120 5632,\n5888,7936,8192]\n").unwrap();
    let more = "--ranks 4 --heads 8 --kv-heads 4 --mask 1024,0";
    let of_file = rows(&format!("--cu-seqlens {} {more}", file.display()));
    assert_eq!(of_file, rows(&format!("{DOCS} --mask 1024,0")));
    let most = |layout: &str| {
        let work = |r: &Value| r["work_of_mean"].as_f64().unwrap();
        rows(&format!("{DOCS} --layout {layout}")).iter().map(work).fold(0.0, f64::max)
    };
    assert!(most("contiguous") > 1.5 && most("zigzag") > 1.1 && most("balanced") <= 1.05);
    std::fs::write(&file, "0, 5, seven").unwrap();
    let out = plan(&format!("--cu-seqlens {}", file.display()));
    assert!(out.status.code() == Some(2) && String::from_utf8_lossy(&out.stderr).contains("seven"));
}

#[test]
fn what_the_operation_refuses_is_refused() {
    for (words, want) in [
        ("", "--docs"),
        ("--docs 5 --cu-seqlens x", "cannot be used with"),
        ("--cu-seqlens nowhere", "nowhere"),
        ("--docs 5 --ranks 0", "above 0"),
        ("--docs 5 --mask 1", "as in `1024,0`"),
        ("--docs 5 --heads 6 --kv-heads 4", "a multiple of 4"),
        ("--docs 5 --layout spiral", "balanced"),
        ("--docs 5 --strategy pigeons", "all_gather"),
        ("--docs 17 --layout zigzag_per_sequence --ranks 2", "a multiple of 4 (2 P) rows"),
        ("--docs 64 --heads 6 --kv-heads 3 --strategy all_to_all --ranks 4", "Hq 6"),
    ] {
        let out = plan(words);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && text.contains(want), "{words}: {text}");
    }
}
