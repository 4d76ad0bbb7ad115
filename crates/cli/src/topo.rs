//! `tilewire topo`: the GPUs of this host, and how each reaches the others.

use serde_json::{Value, json};
use tilewire::device::cuda::{DeviceInfo, PeerInfo, devices, peer_info};
use tilewire::prelude::*;

use crate::args::TopoArgs;
use crate::say;

/// Runs the command; the exit code.
///
/// # Errors
/// `Unavailable` without a driver.
pub fn run(args: &TopoArgs) -> Result<i32> {
    let all = devices()?;
    let links = links(&all)?;
    if args.json {
        say(to_json(&all, &links));
    } else {
        lines(&all, &links).iter().for_each(say);
    }
    Ok(0)
}

/// Returns how each device reaches each: `None` for itself.
///
/// # Errors
/// What the driver reports.
pub fn links(all: &[DeviceInfo]) -> Result<Vec<Vec<Option<PeerInfo>>>> {
    let link = |a: &DeviceInfo, b: &DeviceInfo| {
        (a.ordinal != b.ordinal).then(|| peer_info(a.ordinal, b.ordinal)).transpose()
    };
    all.iter().map(|a| all.iter().map(|b| link(a, b)).collect()).collect()
}

/// One line for a device.
pub fn describe(d: &DeviceInfo) -> String {
    let gib = d.memory_bytes as f64 / f64::from(1 << 30);
    format!(
        "GPU {}: {} at {}, sm_{}, {} SMs, {gib:.1} GiB",
        d.ordinal, d.name, d.pci, d.sm, d.num_sms
    )
}

/// A link in one word: `no` access; `P2P` and its performance rank, with `a` for atomics.
fn word(link: Option<PeerInfo>) -> String {
    match link {
        None => "-".to_owned(),
        Some(p) if !p.access => "no".to_owned(),
        Some(p) => {
            format!("P2P{}{}", p.performance_rank, if p.native_atomics { "a" } else { "" })
        }
    }
}

fn lines(all: &[DeviceInfo], links: &[Vec<Option<PeerInfo>>]) -> Vec<String> {
    let mut out: Vec<String> = all.iter().map(describe).collect();
    let row = |cells: Vec<String>| {
        cells.iter().map(|c| format!("{c:<7}")).collect::<String>().trim_end().to_owned()
    };
    let head = all.iter().map(|d| format!("GPU{}", d.ordinal));
    out.push(row(std::iter::once("from".to_owned()).chain(head).collect()));
    for (d, links) in all.iter().zip(links) {
        let cells = links.iter().map(|l| word(*l));
        out.push(row(std::iter::once(format!("GPU{}", d.ordinal)).chain(cells).collect()));
    }
    out.push(
        "P2P: peer access, with the performance rank (0 is best); a: native atomics".to_owned(),
    );
    out
}

fn to_json(all: &[DeviceInfo], links: &[Vec<Option<PeerInfo>>]) -> Value {
    let gpus: Vec<Value> = all
        .iter()
        .map(|d| {
            json!({
                "ordinal": d.ordinal, "name": d.name, "pci": d.pci, "sm": d.sm,
                "num_sms": d.num_sms, "memory_bytes": d.memory_bytes, "vmm": d.vmm,
                "posix_fd": d.posix_fd, "fabric": d.fabric,
            })
        })
        .collect();
    let pairs = all.iter().zip(links).flat_map(|(a, row)| {
        let known = all.iter().zip(row).filter_map(|(b, l)| Some((b, (*l)?)));
        known.map(|(b, l)| {
            json!({
                "from": a.ordinal, "to": b.ordinal, "access": l.access,
                "performance_rank": l.performance_rank, "native_atomics": l.native_atomics,
            })
        })
    });
    json!({ "gpus": gpus, "links": pairs.collect::<Vec<_>>() })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn device(ordinal: u32) -> DeviceInfo {
        DeviceInfo {
            ordinal,
            name: "GPU".to_owned(),
            pci: format!("0000:{ordinal:02x}:00.0"),
            sm: 90,
            num_sms: 132,
            memory_bytes: 1 << 37,
            vmm: true,
            posix_fd: true,
            fabric: false,
        }
    }

    pub const LINK: PeerInfo = PeerInfo { access: true, performance_rank: 0, native_atomics: true };

    #[test]
    fn the_matrix_and_its_json_tell_the_same() {
        let all = [device(0), device(1)];
        let none = PeerInfo { access: false, native_atomics: false, ..LINK };
        let links = vec![vec![None, Some(LINK)], vec![Some(none), None]];
        let text = lines(&all, &links);
        assert_eq!(text[0], "GPU 0: GPU at 0000:00:00.0, sm_90, 132 SMs, 128.0 GiB");
        assert_eq!(text[2], "from   GPU0   GPU1");
        assert_eq!(text[3], "GPU0   -      P2P0a");
        assert_eq!(text[4], "GPU1   no     -");
        let v = to_json(&all, &links);
        assert_eq!(v["gpus"][1]["num_sms"], 132);
        assert_eq!(v["links"].as_array().unwrap().len(), 2);
        assert_eq!(v["links"][0]["native_atomics"], true);
        assert_eq!(v["links"][1]["access"], false);
    }
}
