//! The files of the kernels, embedded, and the texts that their includes make of them.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

/// Declares the table of files: paths below `kernels/src`, with their texts.
macro_rules! files {
    ($($path:literal,)*) => {
        /// Every file of CUDA C++ below `kernels/src`: its path there, and its text.
        pub(crate) const FILES: &[(&str, &str)] = &[$(($path, include_str!($path)),)*];
    };
}

files![
    "attention/backward.cuh",
    "attention/common.cuh",
    "attention/delta.cuh",
    "attention/extras.cuh",
    "attention/forward.cuh",
    "attention/hopper.cuh",
    "attention/hopper_fp8.cuh",
    "attention/hopper_fused.cuh",
    "attention/hopper_gates.cuh",
    "attention/hopper_grad.cuh",
    "attention/hopper_tiles.cuh",
    "attention/pairs.cuh",
    "attention/plain_attention.cu",
    "attention/segments.cuh",
    "attention/sequences.cu",
    "attention/sm80_attention.cu",
    "attention/sm80_attention_split.cu",
    "attention/sm90_attention.cu",
    "attention/sm90_attention_bwd.cu",
    "attention/sm90_attention_fp8.cu",
    "attention/sm90_attention_gated.cu",
    "attention/sm90_attention_grads.cu",
    "bench/links.cu",
    "bench/links_bulk.cu",
    "bench/litmus.cu",
    "collective/sm80_move.cu",
    "collective/sm80_reduce.cu",
    "collective/sm90_collective.cu",
    "collective/sum.cuh",
    "comm/await.cuh",
    "comm/meet.cuh",
    "comm/signal.cu",
    "comm/stage.cuh",
    "comm/team.cuh",
    "common/convert.cuh",
    "common/last.cuh",
    "ep/layer.cuh",
    "ep/sm80_ep.cu",
    "ep/sm90_ep.cu",
    "ep/sm90_return.cu",
    "gemm/activation.cuh",
    "gemm/mainloop.cuh",
    "gemm/sm80_gemm.cu",
    "grouped_gemm/sm80_grouped_gemm.cu",
    "grouped_gemm/splits.cuh",
    "hopper/boxes.cuh",
    "hopper/core.cuh",
    "hopper/dense.cuh",
    "hopper/epilogue.cuh",
    "hopper/groups.cuh",
    "hopper/order.cuh",
    "hopper/pieces.cuh",
    "hopper/sm90_gemm.cu",
    "hopper/sm90_grouped_gemm.cu",
    "hopper/sm90_skinny_gemm.cu",
    "hopper/sm90_sum_parts.cu",
    "hopper/stages.cuh",
    "hopper/store.cuh",
    "hopper/sums.cuh",
    "hopper/tile.cuh",
    "layers/classes.cuh",
    "layers/embed.cuh",
    "layers/sm80_layers.cu",
    "layers/sm80_optimizer.cu",
    "permute/sm80_permute.cu",
    "ptx/barrier.cuh",
    "ptx/barrier_emu.h",
    "ptx/bulk.cuh",
    "ptx/bulk_emu.h",
    "ptx/cluster.cuh",
    "ptx/cluster_emu.h",
    "ptx/convert.cuh",
    "ptx/convert_emu.h",
    "ptx/grid.cuh",
    "ptx/grid_emu.h",
    "ptx/ld_st.cuh",
    "ptx/ld_st_emu.h",
    "ptx/math.cuh",
    "ptx/math_emu.h",
    "ptx/mma.cuh",
    "ptx/mma_emu.h",
    "ptx/tensor.cuh",
    "ptx/tensor_emu.h",
    "ptx/wgmma.cuh",
    "ptx/wgmma_emu.h",
    "quant/sm80_quant.cu",
];

/// The folder of the table's paths, seen from the root of the repository.
const ROOT: &str = "kernels/src/";

/// The text of a file of the table.
pub(crate) fn file(path: &str) -> Option<&'static str> {
    FILES.iter().find(|(p, _)| *p == path).map(|(_, text)| *text)
}

/// The reader that a text is flattened for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum For {
    /// A compiler of CUDA C++: `#line` names the file and line that each line came from.
    Device,
    /// The emulator: files of `ptx/` are replaced by their second bodies. Lines are numbered
    /// through, because the emulator tells two meeting places apart by their lines.
    Emulator,
}

/// The path that `relative` means in a file of `folder`.
///
/// # Panics
/// If it leads out of the repository.
fn resolved(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in relative.split('/') {
        match part {
            ".." => assert!(parts.pop().is_some(), "{relative} leads out of the repository"),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The path in quotes of a line `#include "path"`.
fn included(line: &str) -> Option<&str> {
    line.strip_prefix("#include \"")?.strip_suffix('"')
}

struct Flattened {
    purpose: For,
    /// Paths from the root of the repository, in the order in which they were included.
    seen: HashSet<String>,
    out: String,
}

impl Flattened {
    /// Appends the file at `path` (from the root of the repository), and first, at their places,
    /// what it includes: each file once.
    fn add(&mut self, path: &str, text: &str) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        self.line(1, path);
        for (i, line) in text.lines().enumerate() {
            if let Some(relative) = included(line) {
                let target = resolved(folder, relative);
                if self.seen.insert(target.clone()) {
                    self.include(&target);
                    self.line(i + 2, path);
                    continue;
                }
            }
            if included(line).is_none() && line != "#pragma once" {
                self.out.push_str(line);
            }
            self.out.push('\n');
        }
    }

    fn include(&mut self, path: &str) {
        let name = path.strip_prefix(ROOT).unwrap_or(path);
        let twin = name.strip_prefix("ptx/").and_then(|p| p.strip_suffix(".cuh"));
        let emulated = twin.filter(|_| self.purpose == For::Emulator);
        let name = emulated.map_or_else(|| name.to_owned(), |p| format!("ptx/{p}_emu.h"));
        let text = file(&name);
        assert!(
            text.is_some(),
            "{path} is included and is not in the table of kernels/src/files.rs"
        );
        self.add(&format!("{ROOT}{name}"), text.unwrap_or_default());
    }

    fn line(&mut self, number: usize, path: &str) {
        if self.purpose == For::Device {
            self.out.push_str(&format!("#line {number} \"{path}\"\n"));
        }
    }
}

/// A text with what it includes, and the paths of the files that it includes, in no order.
pub(crate) type Whole = (String, HashSet<String>);

/// The file `name` of the table with what it includes. Made once: a plan asks for the texts of its
/// kernels each time that it is made, which took as long as all else that a small plan does.
///
/// # Panics
/// If the table has no such file.
pub(crate) fn flatten(name: &'static str, purpose: For) -> &'static Whole {
    static KNOWN: Mutex<BTreeMap<(&str, For), &'static Whole>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = known().get(&(name, purpose)).copied();
    found.unwrap_or_else(|| {
        let new = made(name, purpose);
        // Another thread may have been faster: then this one's is dropped.
        let mut known = known();
        known.entry((name, purpose)).or_insert_with(|| Box::leak(Box::new(new)))
    })
}

fn made(name: &str, purpose: For) -> Whole {
    let text = file(name);
    assert!(text.is_some(), "{name} is not in the table of kernels/src/files.rs");
    let (path, mut all) =
        (path_of(name), Flattened { purpose, seen: HashSet::new(), out: String::new() });
    all.seen.insert(path.clone());
    all.add(&path, text.unwrap_or_default());
    (all.out, all.seen)
}

/// The path of a file of the table, from the root of the repository.
pub(crate) fn path_of(name: &str) -> String {
    format!("{ROOT}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn walk(folder: &Path, found: &mut Vec<String>) {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            let name = path.to_str().unwrap().to_owned();
            if path.is_dir() {
                walk(&path, found);
            } else if [".cu", ".cuh", ".h"].iter().any(|e| name.ends_with(e)) {
                found.push(name);
            }
        }
    }

    #[test]
    fn the_table_has_every_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = Vec::new();
        walk(&root, &mut found);
        found.sort();
        let known: Vec<_> =
            FILES.iter().map(|(p, _)| root.join(p).to_str().unwrap().to_owned()).collect();
        assert_eq!(found, known);
    }

    #[test]
    fn paths_are_resolved_from_their_folder() {
        assert_eq!(resolved("kernels/src/ep", "layer.cuh"), "kernels/src/ep/layer.cuh");
        assert_eq!(resolved("kernels/src/ep", "../ptx/grid.cuh"), "kernels/src/ptx/grid.cuh");
        assert_eq!(resolved("crates/x", "../../kernels/src/a.cuh"), "kernels/src/a.cuh");
    }

    #[test]
    fn a_text_is_made_once_for_each_purpose() {
        let name = "ep/sm90_ep.cu";
        let (device, emulated) = (flatten(name, For::Device), flatten(name, For::Emulator));
        assert!(std::ptr::eq(device, flatten(name, For::Device)), "made again");
        assert_eq!(device, &made(name, For::Device));
        assert_eq!(emulated, &made(name, For::Emulator));
        assert_ne!(device, emulated);
    }

    #[test]
    fn every_line_keeps_its_file_and_number() {
        let name = "ep/sm90_ep.cu";
        let (text, _) = flatten(name, For::Device);
        let (mut path, mut number, mut checked) = (String::new(), 0, 0);
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("#line ") {
                let (n, p) = rest.split_once(' ').unwrap();
                (path, number) = (p.trim_matches('"').to_owned(), n.parse::<usize>().unwrap());
                continue;
            }
            let from = file(path.strip_prefix(ROOT).unwrap()).unwrap();
            let own = from.lines().nth(number - 1).unwrap_or("");
            assert!(line == own || line.is_empty() && own.starts_with('#'), "{path}:{number}");
            (number, checked) = (number + 1, checked + 1);
        }
        assert!(checked > 1000, "{checked} lines");
    }
}
