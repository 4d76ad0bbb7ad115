//! Findings of `doctor` about the GPUs: each one by itself, and pairs by really sharing memory.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tilewire::boot::NO_MULTICAST;
use tilewire::device::cuda::{
    CudaContext, DeviceInfo, PeerInfo, Places, ShareBy, available, devices, driver_version,
    fabric_handles, try_share,
};
use tilewire::device::jit::is_built_in;
use tilewire::prelude::*;

use super::{Finding, State, finding};
use crate::{kernels_cmd, topo};

/// The oldest GPUs that there are kernels for.
const MIN_SM: u32 = 80;
const HOST: &str = "the `host` backend runs everywhere";

/// Everything about GPUs. Where there is no driver, that is the only finding.
pub(super) fn examine() -> Vec<Finding> {
    let all = match available().and_then(|()| devices()) {
        Ok(all) => all,
        Err(e) => {
            let remedy = e.get_hint().unwrap_or(HOST);
            return vec![finding("driver", State::Warn, e.message(), remedy)];
        }
    };
    let mut v = vec![driver()];
    v.extend(all.iter().map(device));
    // What there are no kernels for needs no links.
    let all: Vec<DeviceInfo> = all.into_iter().filter(|d| d.sm >= MIN_SM).collect();
    match topo::links(&all) {
        Ok(links) => {
            v.push(access(&all, &links));
            v.push(sharing(&all, &links));
            v.push(fabric(&all, &links));
        }
        Err(e) => v.push(failed("p2p", "how the GPUs reach each other is not known", &e)),
    }
    let archs: BTreeSet<String> = all.iter().map(DeviceInfo::arch).collect();
    let beside = std::env::current_exe().ok().and_then(|p| Some(p.parent()?.join("cubins")));
    v.extend(archs.iter().map(|arch| built_in(beside.as_deref(), arch)));
    v.extend(nvlinks());
    v.push(multicast(|name| std::env::var(name).ok()));
    v.extend(connections(std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().as_deref()));
    v
}

fn failed(code: &'static str, what: &str, e: &Error) -> Finding {
    finding(code, State::Fail, format!("{what}: {}", e.message()), e.get_hint().unwrap_or(HOST))
}

fn driver() -> Finding {
    let is_driver =
        |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libcuda.so"));
    let path = Places::of_process().loaded.into_iter().find(is_driver);
    let path = path.map_or("a file that is not known".to_owned(), |p| p.display().to_string());
    match driver_version() {
        Ok(v) => {
            let text = format!("CUDA driver: for CUDA {}.{}, {path}", v / 1000, v % 1000 / 10);
            finding("driver", State::Ok, text, "")
        }
        Err(e) => failed("driver", "the CUDA driver's version is not known", &e),
    }
}

fn device(d: &DeviceInfo) -> Finding {
    let text = topo::describe(d);
    if d.sm < MIN_SM {
        let text = format!("{text}: older than sm_{MIN_SM}, there are no kernels for it");
        return finding("gpu", State::Warn, text, "hide it with CUDA_VISIBLE_DEVICES");
    }
    if !d.vmm || !d.posix_fd {
        let text = format!("{text}: its memory cannot be shared as file descriptors");
        return finding(
            "gpu",
            State::Fail,
            text,
            "install a newer driver; under virtualisation, pass the whole GPU through",
        );
    }
    finding("gpu", State::Ok, text, "")
}

/// Pairs (from, to) of different devices with their links.
fn pairs<'a>(
    all: &'a [DeviceInfo],
    links: &'a [Vec<Option<PeerInfo>>],
) -> impl Iterator<Item = (u32, u32, PeerInfo)> + 'a {
    all.iter().zip(links).flat_map(move |(a, row)| {
        let known = all.iter().zip(row).filter_map(|(b, l)| Some((b, (*l)?)));
        known.map(|(b, l)| (a.ordinal, b.ordinal, l))
    })
}

fn named(list: &[String]) -> String {
    let more = if list.len() > 4 { format!(" and {} more", list.len() - 4) } else { String::new() };
    format!("{}{more}", list[..list.len().min(4)].join(", "))
}

fn access(all: &[DeviceInfo], links: &[Vec<Option<PeerInfo>>]) -> Finding {
    let without: Vec<String> = pairs(all, links)
        .filter(|(_, _, l)| !l.access)
        .map(|(a, b, _)| format!("{a} -> {b}"))
        .collect();
    let num = pairs(all, links).count();
    if without.is_empty() {
        let atomics = pairs(all, links).filter(|(_, _, l)| l.native_atomics).count();
        let text = format!("peer access: all {num} pairs of GPUs, {atomics} with native atomics");
        return finding("p2p", State::Ok, text, "");
    }
    let text =
        format!("peer access: {} of {num} pairs have none: {}", without.len(), named(&without));
    finding(
        "p2p",
        State::Warn,
        text,
        "see `nvidia-smi topo -p2p rw`; switch off the IOMMU or ACS for GPUs on PCIe; or choose GPUs \
         that reach each other with CUDA_VISIBLE_DEVICES",
    )
}

/// Export, import, map, write and read: what the `vmm` backend will do. A device that reaches no
/// other does it with itself, as the heap of a single rank exports its memory, too.
fn sharing(all: &[DeviceInfo], links: &[Vec<Option<PeerInfo>>]) -> Finding {
    let near: Vec<_> = pairs(all, links).filter(|p| p.2.access).map(|(a, b, _)| (a, b)).collect();
    let alone = |d: &u32| near.iter().all(|(a, b)| a != d && b != d);
    let alone = all.iter().map(|d| d.ordinal).filter(alone).map(|d| (d, d));
    let (mut bad, mut first) = (Vec::new(), None);
    let tried: Vec<_> = near.iter().copied().chain(alone).collect();
    for &(owner, peer) in &tried {
        let shared = CudaContext::new(owner)
            .and_then(|o| try_share(&o, &CudaContext::new(peer)?, ShareBy::Fd));
        if let Err(e) = shared {
            bad.push(format!("{owner} -> {peer}"));
            first.get_or_insert(e);
        }
    }
    let num = tried.len();
    match first {
        None if near.is_empty() => {
            let text =
                format!("sharing memory by file descriptors: done by each of {num} GPUs alone");
            finding("share", State::Ok, text, "")
        }
        None => {
            let (near, alone) = (near.len(), num - near.len());
            let more =
                if alone > 0 { format!(", and by {alone} GPUs alone") } else { String::new() };
            let text =
                format!("sharing memory by file descriptors: done between {near} pairs{more}");
            finding("share", State::Ok, text, "")
        }
        Some(e) => {
            let text = format!(
                "sharing memory by file descriptors: {} of {num} pairs cannot: {}: {}",
                bad.len(),
                named(&bad),
                e.message()
            );
            let remedy = e.get_hint().unwrap_or(
                "in a container, start it with `--gpus all` and without a seccomp profile that \
                 forbids it; `ulimit -n` must leave descriptors free",
            );
            finding("share", State::Fail, text, remedy)
        }
    }
}

/// Done, too, as a rank does it alone; and between all pairs that can.
fn fabric(all: &[DeviceInfo], links: &[Vec<Option<PeerInfo>>]) -> Finding {
    let tried = all.iter().map(|d| {
        let found = CudaContext::new(d.ordinal).and_then(|c| fabric_handles(&c));
        (d.ordinal, found.err().map(|e| e.message().to_owned()))
    });
    let tried: Vec<_> = tried.collect();
    let can = |d: u32| tried.iter().any(|(o, why)| *o == d && why.is_none());
    let open = |l: &(u32, u32, PeerInfo)| l.2.access && can(l.0) && can(l.1);
    let pairs = pairs(all, links).filter(open).map(|(a, b, _)| {
        let shared =
            CudaContext::new(a).and_then(|o| try_share(&o, &CudaContext::new(b)?, ShareBy::Fabric));
        shared.map_err(|e| format!("{a} -> {b}: {}", e.message()))
    });
    fabric_found(&tried, &pairs.collect::<Vec<_>>())
}

fn fabric_found(
    tried: &[(u32, Option<String>)],
    pairs: &[std::result::Result<(), String>],
) -> Finding {
    let num = tried.iter().filter(|t| t.1.is_none()).count();
    let text = format!("fabric handles: done on {num} of {} GPUs", tried.len());
    if let Some(why) = pairs.iter().find_map(|p| p.as_ref().err()) {
        return finding(
            "fabric",
            State::Fail,
            format!("{text}, but not between them: {why}"),
            "stop nvidia-imex or take its channels away: then memory travels as file descriptors",
        );
    }
    let text = match tried.iter().find_map(|(d, why)| Some((d, why.as_ref()?))) {
        None if tried.is_empty() => "fabric handles: no GPU to try them with".to_owned(),
        None => format!("{text} and {} pairs", pairs.len()),
        Some((d, why)) => {
            format!("{text}; GPU {d}: {why}: memory travels as file descriptors, as one host needs")
        }
    };
    finding("fabric", State::Ok, text, "")
}

/// Kernels that came with the program: all of them, or none.
fn built_in(folder: Option<&Path>, arch: &str) -> Finding {
    let all = kernels_cmd::specs(arch);
    let num = all.iter().filter(|s| folder.is_some_and(|f| is_built_in(f, &s.key()))).count();
    if num == 0 {
        let text = format!("kernels for {arch}: none is built in, they are compiled at first use");
        return finding("built-in", State::Ok, text, "");
    }
    let text = format!("kernels for {arch}: {num} of {} are built in", all.len());
    match num == all.len() {
        true => finding("built-in", State::Ok, text, ""),
        false => finding(
            "built-in",
            State::Warn,
            format!(
                "{text}: the folder `cubins` belongs to another version of this program, or is \
                 incomplete"
            ),
            "`tilewire kernels compile --out cubins` beside the program, or remove the folder",
        ),
    }
}

/// NVLinks as `nvidia-smi` tells them, if it is there.
fn nvlinks() -> Option<Finding> {
    // It asks the driver, which may hang.
    let limit = Duration::from_secs(10);
    let text = match output(Command::new("nvidia-smi").args(["nvlink", "--status"]), limit) {
        Ok(Some(text)) => text,
        Ok(None) => {
            let text = format!("NVLinks: `nvidia-smi` has not answered within {limit:?}");
            let remedy = "look at `dmesg` for errors of the driver; a reset of the GPU, or a reboot, ends a hang";
            return Some(finding("nvlink", State::Warn, text, remedy));
        }
        Err(_) => return None,
    };
    let links = count_links(&text);
    let (least, most) = (links.iter().min()?, links.iter().max()?);
    Some(match least == most {
        true => finding("nvlink", State::Ok, format!("NVLinks: {most} at each GPU"), ""),
        false => finding(
            "nvlink",
            State::Warn,
            format!("NVLinks: {least} at one GPU, {most} at another"),
            "see `nvidia-smi nvlink --status`: a link that is down halves what ranks get",
        ),
    })
}

/// Returns what a program prints; none if it has not ended its output within `limit`.
fn output(command: &mut Command, limit: Duration) -> std::io::Result<Option<String>> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let (send, said) = mpsc::channel();
    if let Some(mut out) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            out.read_to_end(&mut bytes).ok();
            // Nobody takes it if it comes too late.
            send.send(bytes).ok();
        });
    }
    let bytes = said.recv_timeout(limit).ok();
    if bytes.is_none() {
        child.kill().ok();
    }
    // Not waited for: one that hangs inside the driver does not even end when it is killed.
    child.try_wait()?;
    Ok(bytes.map(|b| String::from_utf8_lossy(&b).into_owned()))
}

/// Links that are up, of each GPU in the text of `nvidia-smi nvlink --status`.
fn count_links(text: &str) -> Vec<usize> {
    let mut out = Vec::new();
    for line in text.lines() {
        if line.starts_with("GPU ") {
            out.push(0);
        } else if line.trim_start().starts_with("Link ")
            && line.contains("GB/s")
            && let Some(n) = out.last_mut()
        {
            *n += 1;
        }
    }
    out
}

/// The variables without which other libraries use NVLink multicast.
fn multicast(value: impl Fn(&str) -> Option<String>) -> Finding {
    let missing: Vec<String> = NO_MULTICAST
        .iter()
        .filter(|(name, want)| value(name).as_deref() != Some(want))
        .map(|(name, want)| format!("{name}={want}"))
        .collect();
    if missing.is_empty() {
        return finding("multicast", State::Ok, "NVLink multicast: switched off", "");
    }
    finding(
        "multicast",
        State::Warn,
        format!("NVLink multicast: not switched off for {} libraries", missing.len()),
        &format!("export {} (`tilewire run` does it)", missing.join(" ")),
    )
}

/// With one connection to a device its streams are one queue.
fn connections(value: Option<&str>) -> Option<Finding> {
    (value? == "1").then(|| {
        finding(
            "connections",
            State::Warn,
            "CUDA_DEVICE_MAX_CONNECTIONS=1: the streams of a GPU are one queue, and ranks that launch in different \
             orders wait for each other",
            "unset it, or launch in one order on all ranks",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::tests::{LINK, device as gpu};

    #[test]
    fn what_fails_has_a_remedy() {
        let old = DeviceInfo { sm: 75, ..gpu(0) };
        let closed = DeviceInfo { posix_fd: false, ..gpu(0) };
        for (d, state) in [(&old, State::Warn), (&closed, State::Fail)] {
            let f = device(d);
            assert!(f.state == state && f.remedy.is_some(), "{f:?}");
        }
        assert_eq!(device(&gpu(1)).state, State::Ok);
        let all = [gpu(0), gpu(1), gpu(2)];
        let no = PeerInfo { access: false, ..LINK };
        let links = vec![
            vec![None, Some(LINK), Some(no)],
            vec![Some(LINK), None, Some(LINK)],
            vec![Some(no), Some(LINK), None],
        ];
        let f = access(&all, &links);
        assert!(f.state == State::Warn && f.remedy.is_some(), "{f:?}");
        assert!(f.text.contains("2 of 6") && f.text.contains("0 -> 2, 2 -> 0"), "{f:?}");
        let links = vec![vec![None, Some(LINK)], vec![Some(LINK), None]];
        assert_eq!(access(&all[..2], &links).state, State::Ok);
        assert_eq!(pairs(&all[..2], &links).count(), 2);
        assert_eq!(named(&["a"; 6].map(str::to_owned)), "a, a, a, a and 2 more");
    }

    #[test]
    fn the_fall_back_from_fabric_handles_says_why() {
        let why = || Some("there is no IMEX channel in /dev/x".to_owned());
        let f = fabric_found(&[(0, None), (1, why())], &[]);
        assert!(f.state == State::Ok && f.text.contains("1 of 2"), "{f:?}");
        assert!(
            f.text.contains("GPU 1: there is no IMEX") && f.text.contains("file desc"),
            "{f:?}"
        );
        let f = fabric_found(&[(0, None), (1, None)], &[Ok(()), Ok(())]);
        assert!(f.state == State::Ok && f.text.contains("2 of 2 GPUs and 2 pairs"), "{f:?}");
        let f = fabric_found(&[(0, None), (1, None)], &[Ok(()), Err("1 -> 0: no".into())]);
        assert!(f.state == State::Fail && f.remedy.is_some() && f.text.contains("1 -> 0"), "{f:?}");
    }

    #[test]
    fn one_connection_is_warned_of() {
        assert!(connections(None).is_none() && connections(Some("8")).is_none());
        let f = connections(Some("1")).unwrap();
        assert!(f.state == State::Warn && f.remedy.is_some(), "{f:?}");
    }

    #[test]
    fn missing_variables_are_named_with_their_values() {
        assert_eq!(
            multicast(|n| NO_MULTICAST.iter().find(|v| v.0 == n).map(|v| v.1.into())).state,
            State::Ok
        );
        let f = multicast(|n| (n == "NCCL_NVLS_ENABLE").then(|| "1".to_owned()));
        assert!(f.state == State::Warn && f.text.contains("4 libraries"), "{f:?}");
        let remedy = f.remedy.unwrap();
        for (name, want) in NO_MULTICAST {
            assert!(remedy.contains(&format!("{name}={want}")), "{remedy}");
        }
    }

    #[test]
    fn kernels_of_another_version_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let look = || built_in(Some(dir.path()), "sm_90a");
        assert!(look().state == State::Ok && look().text.contains("none"));
        let all = kernels_cmd::specs("sm_90a");
        let mut code = [0; 64];
        code[..6].copy_from_slice(b"\x7fELF\x02\x01");
        for s in &all {
            let f = look();
            assert!(f.text.contains("none") || (f.state == State::Warn && f.remedy.is_some()));
            std::fs::write(dir.path().join(format!("{}.cubin", s.key())), code).unwrap();
        }
        assert!(look().state == State::Ok && !look().text.contains("none"));
        assert_eq!(built_in(None, "sm_90a").state, State::Ok);
        let last = dir.path().join(format!("{}.cubin", all[0].key()));
        std::fs::write(last, &code[..40]).unwrap();
        assert!(look().state == State::Warn && look().text.contains("incomplete"));
    }

    #[test]
    fn a_program_that_hangs_is_not_waited_for() {
        let sh = |script: &str, limit_ms| {
            output(Command::new("sh").args(["-c", script]), Duration::from_millis(limit_ms))
        };
        assert_eq!(sh("echo up", 60_000).unwrap().as_deref(), Some("up\n"));
        let start = std::time::Instant::now();
        assert_eq!(sh("echo up; exec sleep 60", 50).unwrap(), None);
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        assert!(output(&mut Command::new("/nowhere/nvidia-smi"), Duration::ZERO).is_err());
    }

    #[test]
    fn links_that_are_down_are_not_counted() {
        let text = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\
                    GPU 1: NVIDIA H200 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n";
        assert_eq!(count_links(text), [2, 1]);
        assert!(count_links("").is_empty());
    }

    /// With and without GPUs: nothing fails without saying what to do.
    #[test]
    fn every_finding_of_this_machine_that_is_not_good_has_a_remedy() {
        let all = examine();
        assert!(all.iter().all(|f| f.state == State::Ok || f.remedy.is_some()), "{all:?}");
        assert_eq!(all[0].code, "driver");
        assert_eq!(all.len() == 1, available().is_err(), "{all:?}");
    }
}
