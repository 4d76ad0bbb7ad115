//! CUDA C++ of tilewire, embedded as text.
//!
//! A kernel is compiled from the texts of its [`Source`], one after the other: no file includes
//! another, and none includes a header of CUDA's, so that the run-time compiler needs no include
//! path. Inline PTX stands only in `ptx/`. What kernels share with Rust (offsets, sizes) is not
//! written twice: the Rust side passes its constants as definitions.
#![forbid(unsafe_code)]

pub mod attention;
pub mod gemm;
pub mod portable;

/// One compilation unit.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Name for compiler messages and for the kernel cache.
    pub name: &'static str,
    /// The texts, in order.
    pub parts: &'static [&'static str],
    /// Definitions (`-DNAME=value`) that whoever compiles it must pass.
    pub defines: &'static [&'static str],
    /// The kernels in it.
    pub kernels: &'static [&'static str],
}

impl Source {
    /// The whole text.
    pub fn text(&self) -> String {
        self.parts.concat()
    }

    /// The oldest architecture that has its instructions, as in 90 for `sm_90`.
    pub fn min_sm(&self) -> u32 {
        if self.parts.contains(&BULK) { 90 } else { 80 }
    }

    /// True if `arch`, as in `sm_90a`, has its instructions.
    pub fn runs_on(&self, arch: &str) -> bool {
        let number = arch.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
        number.parse().is_ok_and(|sm: u32| sm >= self.min_sm())
    }

    /// The whole text for the emulator in `emu/`: the kernel's own parts as they are, and the
    /// second bodies of the wrappers in place of inline PTX.
    ///
    /// # Panics
    /// If a part with inline PTX has no second body.
    pub fn emu_text(&self) -> String {
        self.parts.iter().copied().map(emulated).collect()
    }
}

fn emulated(part: &'static str) -> &'static str {
    let twin = PTX_TWINS.iter().find(|(ptx, _)| *ptx == part).map(|(_, twin)| *twin);
    assert!(twin.is_some() || !part.contains("asm"), "inline PTX without a body for the emulator");
    twin.unwrap_or(part)
}

/// Loads, stores, fences and timers, named by operation, order and scope.
pub const LD_ST: &str = include_str!("ptx/ld_st.cuh");

/// Warp matrix instructions and asynchronous copies, from sm_80 on.
pub const MMA: &str = include_str!("ptx/mma.cuh");

/// Approximate functions, and the types of 8 and 16 bits.
pub const MATH: &str = include_str!("ptx/math.cuh");

/// Meetings of some of a block's warps.
pub const BARRIER: &str = include_str!("ptx/barrier.cuh");

/// Bulk copies and the barriers they complete on, from sm_90 on.
pub const BULK: &str = include_str!("ptx/bulk.cuh");

/// Kernels that begin before the one before them has ended.
pub const GRID: &str = include_str!("ptx/grid.cuh");

/// The files of `ptx/`, each with its second body for the emulator.
const PTX_TWINS: &[(&str, &str)] = &[
    (LD_ST, include_str!("ptx/ld_st_emu.h")),
    (MMA, include_str!("ptx/mma_emu.h")),
    (MATH, include_str!("ptx/math_emu.h")),
    (BARRIER, include_str!("ptx/barrier_emu.h")),
    (BULK, include_str!("ptx/bulk_emu.h")),
    (GRID, include_str!("ptx/grid_emu.h")),
    (portable::CONVERT, portable::CONVERT_EMU),
];

/// A team as kernels see it; stands behind [`LD_ST`].
pub const TEAM: &str = include_str!("comm/team.cuh");

/// What kernels share that meet inside; stands behind [`TEAM`].
pub(crate) const MEET: &str =
    concat!(include_str!("common/last.cuh"), include_str!("comm/meet.cuh"));
/// A block that comes last.
pub(crate) const LAST: &str = include_str!("common/last.cuh");

/// Rows through shared memory; stands behind [`BULK`].
pub(crate) const STAGE: &str = include_str!("comm/stage.cuh");

/// Signal, wait, barrier and the epoch word of copy-engine pushes.
pub const SIGNAL: Source = Source {
    name: "comm/signal.cu",
    parts: &[LD_ST, TEAM, include_str!("comm/signal.cu")],
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
    parts: &[MMA, include_str!("gemm/mainloop.cuh"), include_str!("gemm/sm80_gemm.cu")],
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
    parts: &[
        MMA,
        include_str!("gemm/mainloop.cuh"),
        include_str!("grouped_gemm/sm80_grouped_gemm.cu"),
    ],
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

/// What a link can do.
pub const LINKS: Source = Source {
    name: "bench/links.cu",
    parts: &[LD_ST, include_str!("bench/links.cu")],
    defines: &[],
    kernels: &["tw_link_store", "tw_link_load", "tw_link_ping", "tw_link_empty", "tw_link_delay"],
};

/// What it can do by bulk copies.
pub const LINKS_BULK: Source = Source {
    name: "bench/links_bulk.cu",
    parts: &[LD_ST, BULK, include_str!("bench/links_bulk.cu")],
    defines: &[],
    kernels: &["tw_link_bulk"],
};

/// The orders that the protocol rests on, for `gpu_spike litmus`.
pub const LITMUS: Source = Source {
    name: "bench/litmus.cu",
    parts: &[LD_ST, BULK, include_str!("bench/litmus.cu")],
    defines: &[],
    kernels: &["tw_litmus_bulk", "tw_litmus_fill", "tw_litmus_count"],
};

/// Every compilation unit.
pub const ALL: &[Source] = &[
    SIGNAL,
    SM80_GEMM,
    SM80_GROUPED_GEMM,
    portable::QUANT,
    portable::PERMUTE,
    portable::REDUCE,
    portable::MOVE,
    portable::COLLECTIVE,
    portable::EP,
    portable::EP_BULK,
    portable::EP_BACK,
    portable::LAYERS,
    portable::OPTIMIZER,
    attention::SM80_ATTENTION,
    attention::PLAIN_ATTENTION,
    LINKS,
    LINKS_BULK,
    LITMUS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_include_nothing_and_name_what_they_define() {
        for s in ALL {
            let text = s.text();
            assert!(!text.contains("#include"), "{}", s.name);
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
        }
        assert!(LINKS_BULK.text().contains(&format!("TW_STAGES = {LINK_STAGES};")));
    }

    #[test]
    fn inline_ptx_stands_only_in_ptx() {
        let comm = include_str!("comm/signal.cu");
        assert!(!comm.contains("asm"));
        assert!(!LD_ST.contains("multimem"));
    }

    /// Everything in front of the bodies: types, and the wrappers' declarations.
    fn declarations(text: &str) -> Vec<&str> {
        let outer = |l: &&str| l.starts_with("typedef") || l.starts_with("__device__");
        text.lines().filter(outer).collect()
    }

    #[test]
    fn both_bodies_of_a_wrapper_have_one_declaration() {
        for (ptx, twin) in PTX_TWINS {
            assert!(declarations(ptx).len() > 3, "the declarations begin their lines");
            assert_eq!(declarations(ptx), declarations(twin));
            assert!(!twin.contains("asm"), "no PTX on the host");
        }
        for s in ALL {
            let (text, emu) = (s.text(), s.emu_text());
            assert!(!emu.contains("asm"), "{}", s.name);
            let own = s.parts.last().unwrap();
            assert!(
                text.ends_with(own) && emu.ends_with(own),
                "{}: a kernel is not changed",
                s.name
            );
        }
    }
}
