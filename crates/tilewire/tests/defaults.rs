//! Every default in one file: a changed default is a changed interface.

use tilewire::core::Config;
use tilewire::nn::{AdamW, ModelCfg};
use tilewire::ops::attention::AttnConfig;
use tilewire::ops::common::{Algo, Machine, OverlapConfig};
use tilewire::symm::{HeapCfg, WorldCfg};

/// The file names of the interface are bound to CHANGELOG.md by `cargo xtask tidy`.
/// `TILEWIRE_BLESS=1 cargo test -p tilewire --test defaults` writes the file anew.
#[test]
fn all_defaults_are_golden() {
    let mut text = String::new();
    let mut add = |name: &str, value: String| text += &format!("{name}: {value}\n");
    add("Config", format!("{:?}", Config::default()));
    add("WorldCfg", format!("{:?}", WorldCfg::default()));
    add("HeapCfg", format!("{:?}", HeapCfg::new(4096)));
    add("Machine", format!("{:?}", Machine::default()));
    for (_, algo) in Algo::NAMES {
        add("OverlapConfig", format!("{:?}", OverlapConfig::of(algo, 1)));
    }
    add("OverlapConfig", format!("{:?}", OverlapConfig::by_nccl()));
    add("AttnConfig", format!("{:?}", AttnConfig::default()));
    add("ModelCfg", format!("{:?}", ModelCfg::default()));
    add("AdamW", format!("{:?}", AdamW::default()));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/api/defaults.txt");
    if std::env::var_os("TILEWIRE_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(golden, text, "a default has changed: bless it and say so in CHANGELOG.md");
}
