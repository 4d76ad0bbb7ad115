//! Flags of `tilewire bench` that not every operation reads, and where each has an effect. One that
//! was given and has none is an error: whoever gave it would believe that it was timed.

use clap::ArgMatches;
use clap::parser::ValueSource;
use tilewire::prelude::*;

use super::{device, parts};

type Ops = &'static [&'static str];

/// Products that are timed beside their parts on the host.
const OVERLAPPED: Ops = &["ag_gemm", "gemm_rs", "gemm_ar"];
const PRODUCTS: Ops = &["gemm", "grouped_gemm", "bulk"];
const COLLECTIVES: Ops = &["all_gather", "reduce_scatter", "all_reduce", "all_to_all"];
const ATTENTION: Ops = &["attention", "cp_attention"];
const EP: Ops = &["ep_dispatch", "ep_combine", "ep_dispatch_bwd", "ep_combine_bwd"];
const DISPATCH: Ops = &["ep_dispatch", "ep_dispatch_bwd"];
const ZERO_COPY: Ops = &["ep_dispatch", "ep_combine_bwd"];
const PERMUTE: Ops = &["permute"];
const ROUTER: Ops = &["router"];
/// Layers of so many heads or experts.
const ROWS: Ops = &["heads", "router"];
/// Of whole matrices.
const MATRICES: Ops = &["quant", "embed", "norm", "cross_entropy", "optimizer"];

/// A flag, the operations on the host that read it, and those on devices.
struct Effect {
    flag: &'static str,
    host: &'static [Ops],
    devices: &'static [Ops],
}

const fn effect(flag: &'static str, host: &'static [Ops], devices: &'static [Ops]) -> Effect {
    Effect { flag, host, devices }
}

/// The flags that have an effect for some operations alone; those that are not listed have one
/// everywhere.
const EFFECTS: [Effect; 13] = [
    effect(
        "m",
        &[OVERLAPPED, PRODUCTS, COLLECTIVES, ATTENTION, MATRICES, ROWS],
        &[OVERLAPPED, PRODUCTS, ATTENTION, MATRICES, ROWS],
    ),
    effect("n", &[OVERLAPPED, PRODUCTS, COLLECTIVES, MATRICES], &[OVERLAPPED, PRODUCTS, MATRICES]),
    effect("k", &[OVERLAPPED, PRODUCTS], &[OVERLAPPED, PRODUCTS]),
    effect("bytes", &[], &[COLLECTIVES]),
    effect("sms", &[], &[COLLECTIVES, EP]),
    effect("tokens", &[EP, PERMUTE], &[EP, PERMUTE]),
    effect("hidden", &[EP, PERMUTE], &[EP, PERMUTE]),
    effect("experts", &[EP, PERMUTE, ROUTER], &[EP, PERMUTE, ROUTER]),
    effect("top_k", &[EP, PERMUTE, ROUTER], &[EP, PERMUTE, ROUTER]),
    effect("align", &[EP, PERMUTE], &[EP, PERMUTE]),
    effect("layout", &[DISPATCH], &[DISPATCH]),
    effect("zero_copy", &[], &[ZERO_COPY]),
    effect("documents", &[], &[ATTENTION]),
];

/// Names of the arguments that stand on the command line, not those that have their default.
pub fn given(matches: &ArgMatches) -> Vec<String> {
    let said = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    // Groups are in the list, too: they are no flags of the table.
    matches.ids().filter(said).map(|id| id.as_str().to_owned()).collect()
}

/// Checks that every flag of `given` is read by one of the operations `ops`.
///
/// # Errors
/// `InvalidArgument` for one that is not.
pub fn check(backend: BackendKind, ops: &[String], given: &[String]) -> Result<()> {
    let host = backend == BackendKind::Host;
    let known = if host { parts::ops() } else { device::ops() };
    if ops.iter().any(|op| !known.contains(&op.as_str())) {
        // An unknown operation is another error.
        return Ok(());
    }
    for e in EFFECTS.iter().filter(|e| given.iter().any(|g| g == e.flag)) {
        let (on_host, devices) = (e.host.concat(), e.devices.concat());
        let here = if host { &on_host } else { &devices };
        if ops.iter().any(|op| here.contains(&op.as_str())) {
            continue;
        }
        let name = format!("--{}", e.flag.replace('_', "-"));
        let refusal = |what: &str, ops: &[&str]| match ops {
            [] => None,
            _ => Some(format!("{what} it is for {}", ops.join(", "))),
        };
        let hints: Vec<String> =
            [refusal("with `--backend vmm`", &devices), refusal("with `--backend host`", &on_host)]
                .into_iter()
                .flatten()
                .collect();
        return Err(Error::invalid(format!(
            "`{name}` has no effect on {} of the {backend} backend",
            ops.join(", ")
        ))
        .hint(hints.join("; ")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn a_flag_that_no_operation_reads_is_refused() {
        let refusal = |backend, ops: &[&str], flag: &str| {
            check(backend, &words(ops), &words(&[flag])).err().map(|e| e.to_string())
        };
        for backend in [BackendKind::Vmm, BackendKind::Nccl, BackendKind::Nvshmem] {
            for (op, good, bad) in [
                ("all_gather", &["bytes", "sms"][..], &["m", "n", "k", "tokens", "zero_copy"][..]),
                ("ep_combine", &["sms", "tokens", "align"], &["m", "bytes", "layout", "zero_copy"]),
                ("ep_dispatch", &["top_k", "layout", "zero_copy"], &["k", "bytes"]),
                ("gemm", &["m", "n", "k"], &["bytes", "sms", "hidden"]),
                ("cp_attention", &["m"], &["n", "k", "experts"]),
                ("permute", &["tokens", "hidden", "top_k", "align"], &["m", "sms", "layout"]),
                ("router", &["m", "experts", "top_k"], &["n", "tokens"]),
                ("norm", &["m", "n"], &["k", "bytes", "experts"]),
            ] {
                good.iter().for_each(|f| assert_eq!(refusal(backend, &[op], f), None, "{op} {f}"));
                for f in bad {
                    let e = refusal(backend, &[op], f).unwrap_or_else(|| panic!("{op} {f}"));
                    let name = format!("`--{}` has no effect on {op}", f.replace('_', "-"));
                    assert!(e.contains(&name) && e.contains("it is for"), "{e}");
                }
            }
        }
        let host = BackendKind::Host;
        assert_eq!(refusal(host, &["all_gather"], "n"), None);
        let e = refusal(host, &["all_gather"], "bytes").unwrap();
        assert!(e.contains("`--backend vmm`") && !e.contains("--backend host"), "{e}");
        let e = refusal(host, &["all_gather"], "k").unwrap();
        assert!(e.contains("`--backend host` it is for ag_gemm"), "{e}");
        // One that reads it is enough.
        assert_eq!(refusal(host, &["all_gather", "ag_gemm"], "k"), None);
        // What is read everywhere, and operations that nobody knows.
        assert_eq!(refusal(host, &["all_gather"], "warmup"), None);
        assert_eq!(refusal(host, &["none"], "bytes"), None);
    }

    /// The host times what devices time; each operation has a type that it takes.
    #[test]
    fn operations_are_the_same_everywhere() {
        let sorted = |mut ops: Vec<&'static str>| {
            ops.sort_unstable();
            ops
        };
        assert_eq!(sorted(parts::ops()), sorted(device::ops()));
        assert!(parts::ops().iter().all(|op| parts::takes(op, DType::F32)));
    }

    /// Every flag of the table is one of the command, and every name of an operation one that is
    /// timed.
    #[test]
    fn the_table_names_what_there_is() {
        let cli = Cli::command();
        let bench = cli.find_subcommand("bench").unwrap();
        for e in &EFFECTS {
            assert!(bench.get_arguments().any(|a| a.get_id() == e.flag), "{}", e.flag);
            assert!(e.host.concat().iter().all(|op| parts::ops().contains(op)), "{}", e.flag);
            let devices = device::ops();
            assert!(e.devices.concat().iter().all(|op| devices.contains(op)), "{}", e.flag);
        }
    }

    #[test]
    fn defaults_are_not_given() {
        let line = ["tilewire", "bench", "--m", "512", "--zero-copy"];
        let matches = Cli::command().try_get_matches_from(line).unwrap();
        let mut given = given(matches.subcommand_matches("bench").unwrap());
        given.retain(|g| g != "BenchArgs");
        given.sort_unstable();
        assert_eq!(given, ["m", "zero_copy"]);
    }
}
