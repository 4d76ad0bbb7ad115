//! CUDA C++ of tilewire, embedded as text.
//!
//! A kernel is a file that includes what it needs, as editors and nvcc read it. What the run-time
//! compiler gets is flattened: each included file once, at its place, with `#line` in front, so
//! that messages, profilers and sanitizers name the file. No file includes a header of CUDA's, so
//! the compiler needs no include path. Inline PTX stands only in `ptx/`. What kernels share with
//! Rust (offsets, sizes) is not written twice: the Rust side passes its constants as definitions.
#![forbid(unsafe_code)]

pub mod abi;
pub mod attention;
mod files;
pub mod gemm;
pub mod hopper;
mod layout;
pub mod portable;

use files::For;

/// One compilation unit.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its file below `kernels/src`; also its name in the kernel cache.
    pub name: &'static str,
    /// Definitions (`-DNAME=value`) that whoever compiles it must pass.
    pub defines: &'static [&'static str],
    /// The kernels in it.
    pub kernels: &'static [&'static str],
}

impl Source {
    fn flatten(&self, purpose: For) -> &'static files::Whole {
        files::flatten(self.name, purpose)
    }

    /// The whole text, for a compiler of CUDA C++.
    ///
    /// # Panics
    /// If a file is missing in the table of the crate: a test flattens every unit.
    pub fn text(&self) -> String {
        self.flatten(For::Device).0.clone()
    }

    /// True if this unit includes `name`, a path below `kernels/src`, or is that file.
    pub fn includes(&self, name: &str) -> bool {
        self.flatten(For::Device).1.contains(&files::path_of(name))
    }

    /// Definitions with which it compiles: those of its first variant, or 4096 for each.
    pub fn first_variant(&self) -> Vec<(String, u64)> {
        let all = variants();
        let own = || self.defines.iter().map(|d| ((*d).to_owned(), 4096)).collect();
        all.into_iter().find(|(s, _)| s.name == self.name).map_or_else(own, |(_, defines)| defines)
    }

    /// The structures of its files that kernels take by value.
    pub fn layouts(&self) -> impl Iterator<Item = &'static abi::Layout> + use<> {
        let files = &self.flatten(For::Device).1;
        abi::LAYOUTS.iter().filter(move |l| files.contains(&files::path_of(l.file)))
    }

    /// The oldest architecture that has its instructions, as in 90 for `sm_90`.
    pub fn min_sm(&self) -> u32 {
        if self.includes("ptx/bulk.cuh") { 90 } else { 80 }
    }

    /// True if only sm_90a has its instructions: those of warpgroups.
    pub fn is_of_hopper(&self) -> bool {
        self.includes("ptx/wgmma.cuh")
    }

    /// True if `arch`, as in `sm_90a`, has its instructions.
    pub fn runs_on(&self, arch: &str) -> bool {
        if self.is_of_hopper() {
            return arch == "sm_90a";
        }
        let number = arch.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
        number.parse().is_ok_and(|sm: u32| sm >= self.min_sm())
    }

    /// The whole text for the emulator in `emu/`: the kernel's own files as they are, and the
    /// second bodies of the wrappers in place of inline PTX.
    ///
    /// # Panics
    /// As [`Source::text`].
    pub fn emu_text(&self) -> String {
        self.flatten(For::Emulator).0.clone()
    }
}

/// The units that have variants, each with its definitions.
pub fn variants() -> Vec<(Source, Vec<(String, u64)>)> {
    let of =
        |source, all: Vec<hopper::Variant>| all.into_iter().map(move |v| (source, v.defines()));
    let dense = of(hopper::HOPPER_GEMM, hopper::Variant::all());
    let grouped = of(hopper::HOPPER_GROUPED_GEMM, hopper::Variant::all_grouped());
    let portable = portable::portable().into_iter().chain(attention::attention());
    let sums = of(hopper::HOPPER_SUM_PARTS, hopper::Variant::all_sums());
    let skinny = hopper::Skinny::all();
    let skinny = skinny.into_iter().map(|v| (hopper::HOPPER_SKINNY_GEMM, v.defines()));
    portable.chain(dense).chain(grouped).chain(sums).chain(skinny).collect()
}

/// Loads, stores, fences and timers, named by operation, order and scope: for kernels of tests.
pub const LD_ST: Source = Source { name: "ptx/ld_st.cuh", defines: &[], kernels: &[] };

/// Signal, wait, barrier and the epoch word of copy-engine pushes.
pub const SIGNAL: Source = Source {
    name: "comm/signal.cu",
    defines: &["TW_OFF_INBOX", "TW_OFF_SIGNALS", "TW_INBOX_ROW"],
    kernels: &[
        "tw_signal",
        "tw_bump_epoch",
        "tw_wait",
        "tw_barrier",
        "tw_advance",
        "tw_enter",
        "tw_wait_peers",
        "tw_poison",
        "tw_fail_if",
    ],
};

/// Matrix product with epilogue on any GPU from sm_80 on. `TW_GEMM_*` at the head of
/// `gemm/mainloop.cuh` may be defined otherwise: tile, warps, stages, and f16 in place of bf16.
pub const SM80_GEMM: Source = Source {
    name: "gemm/sm80_gemm.cu",
    defines: &[],
    kernels: &[
        "tw_gemm_nt",
        "tw_gemm_nn",
        "tw_gemm_tn",
        "tw_gemm_tt",
        "tw_gemm_f32",
        "tw_gemm_row_sums",
    ],
};

/// The same products of groups whose rows are counted in device memory.
pub const SM80_GROUPED_GEMM: Source = Source {
    name: "grouped_gemm/sm80_grouped_gemm.cu",
    defines: &[],
    kernels: &[
        "tw_grouped_nt",
        "tw_grouped_nn",
        "tw_grouped_tn",
        "tw_grouped_f32",
        "tw_grouped_dbias",
        "tw_grouped_dact",
        "tw_grouped_table",
    ],
};

/// Stages of a block of `tw_link_bulk`: its dynamic shared memory is so many chunks.
pub const LINK_STAGES: u32 = 8;

/// Kernels that measure a link by loads and stores.
pub const LINKS: Source = Source {
    name: "bench/links.cu",
    defines: &[],
    kernels: &["tw_link_store", "tw_link_load", "tw_link_ping", "tw_link_empty", "tw_link_delay"],
};

/// The kernel that measures a link by bulk copies.
pub const LINKS_BULK: Source =
    Source { name: "bench/links_bulk.cu", defines: &[], kernels: &["tw_link_bulk"] };

/// The orders that the protocol rests on, for `symm_checks litmus`.
pub const LITMUS: Source = Source {
    name: "bench/litmus.cu",
    defines: &[],
    kernels: &["tw_litmus_bulk", "tw_litmus_fill", "tw_litmus_count"],
};

/// Every compilation unit.
pub const ALL: &[Source] = &[
    SIGNAL,
    SM80_GEMM,
    SM80_GROUPED_GEMM,
    hopper::HOPPER_GEMM,
    hopper::HOPPER_GROUPED_GEMM,
    hopper::HOPPER_SKINNY_GEMM,
    hopper::HOPPER_SUM_PARTS,
    portable::QUANT,
    portable::PERMUTE,
    portable::REDUCE,
    portable::MOVE,
    portable::COLLECTIVE,
    portable::EP,
    portable::EP_BULK,
    portable::EP_RETURN,
    portable::LAYERS,
    portable::OPTIMIZER,
    attention::SM80_ATTENTION,
    attention::PLAIN_ATTENTION,
    attention::SEQUENCES,
    attention::split::SM80_ATTENTION_SPLIT,
    attention::hopper::SM90_ATTENTION,
    attention::hopper::SM90_ATTENTION_BWD,
    attention::hopper_fused::SM90_ATTENTION_GRADS,
    attention::hopper_gates::SM90_ATTENTION_GATED,
    attention::hopper_fp8::SM90_ATTENTION_FP8,
    LINKS,
    LINKS_BULK,
    LITMUS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_whole_and_name_what_they_define() {
        for s in ALL {
            let text = s.text();
            assert!(!text.contains("#include") && !text.contains("#pragma once"), "{}", s.name);
            for k in s.kernels {
                assert!(text.contains(&format!("{k}(")), "{k}");
            }
            for d in s.defines {
                assert!(text.contains(d), "{d}");
            }
        }
    }

    #[test]
    fn architectures_have_their_instructions() {
        for (arch, links) in [("sm_80", false), ("sm_90a", true), ("sm_100a", true), ("x", false)] {
            assert_eq!(LINKS_BULK.runs_on(arch), links, "{arch}");
            assert_eq!(LINKS.runs_on(arch), arch != "x", "{arch}");
            assert_eq!(SIGNAL.runs_on(arch), arch != "x", "{arch}");
            assert_eq!(hopper::HOPPER_GEMM.runs_on(arch), arch == "sm_90a", "{arch}");
        }
        assert!(LINKS_BULK.text().contains(&format!("TW_STAGES = {LINK_STAGES};")));
    }

    #[test]
    fn inline_ptx_stands_only_in_ptx() {
        for (path, text) in files::FILES {
            let allowed = path.starts_with("ptx/") && path.ends_with(".cuh");
            assert!(allowed || !text.contains("asm"), "{path}: inline PTX");
            assert!(!text.contains("multimem"), "{path}: NVLink multicast");
        }
    }

    /// Everything in front of the bodies: types, and the wrappers' declarations.
    fn declarations(text: &str) -> Vec<&str> {
        let outer = |l: &&str| l.starts_with("typedef") || l.starts_with("__device__");
        text.lines().filter(outer).collect()
    }

    #[test]
    fn both_bodies_of_a_wrapper_have_one_declaration() {
        for (path, ptx) in files::FILES.iter().filter(|(p, _)| p.ends_with(".cuh")) {
            let Some(stem) = path.strip_prefix("ptx/").and_then(|p| p.strip_suffix(".cuh")) else {
                continue;
            };
            let twin = files::file(&format!("ptx/{stem}_emu.h")).unwrap();
            assert!(declarations(ptx).len() > 3, "the declarations begin their lines");
            assert_eq!(declarations(ptx), declarations(twin));
        }
    }

    #[test]
    fn the_emulator_gets_the_kernels_own_lines() {
        let code = |l: &&str| !l.is_empty() && !l.starts_with('#');
        for s in ALL {
            let emu = s.emu_text();
            assert!(!emu.contains("asm") && !emu.contains("#line"), "{}", s.name);
            let own: Vec<_> = files::file(s.name).unwrap().lines().filter(code).collect();
            let mut all = emu.lines().filter(code);
            assert!(
                own.iter().all(|l| all.any(|m| m == *l)),
                "{}: a kernel is not changed",
                s.name
            );
        }
    }
}
