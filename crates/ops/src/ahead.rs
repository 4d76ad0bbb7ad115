//! Kernels compiled before the plans that need them are prepared.

use tilewire_core::{DType, Result};
use tilewire_device::Device;
use tilewire_device::jit::KernelSpec;
use tilewire_kernels::attention::hopper::{SM90_ATTENTION, SM90_ATTENTION_BWD};
use tilewire_kernels::attention::hopper_fp8::SM90_ATTENTION_FP8;
use tilewire_kernels::attention::hopper_fused::SM90_ATTENTION_GRADS;
use tilewire_kernels::attention::hopper_gates::SM90_ATTENTION_GATED;
use tilewire_kernels::attention::split::SM80_ATTENTION_SPLIT;
use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION};
use tilewire_kernels::hopper::{
    Epilogue, HOPPER_GEMM, HOPPER_GROUPED_GEMM, HOPPER_SKINNY_GEMM, HOPPER_SUM_PARTS,
};
use tilewire_kernels::portable::EP_UNEVEN;

use crate::attention::device::units;
use crate::common::cuda::{kernel_specs, lacks_sm90, mantissa, spec, too_few_sms};

/// Epilogues of the grouped products of a layer of experts, and of their gradients.
const EXPERTS: [Epilogue; 3] = [Epilogue::Plain, Epilogue::Linear, Epilogue::SwiGlu];

/// Compiles, on all cores, the kernels of plans with elements of `dtype` (and f32) and of attention
/// with head dimensions `heads` (of q and k, of v), if `device` is a GPU and they are not built in
/// or cached. Without it each plan compiles its own when it is prepared, one after the other; what
/// fails here fails there and is reported there. How many were compiled.
///
/// # Errors
/// `Config` for a bad variable of the environment.
pub fn compile_ahead(device: &Device, dtype: DType, heads: &[(usize, usize)]) -> Result<usize> {
    let Device::Cuda(ctx) = device else { return Ok(0) };
    let arch = ctx.arch()?;
    let core = lacks_sm90(ctx, &HOPPER_GROUPED_GEMM)?.is_none() && too_few_sms(ctx)?.is_none();
    ctx.compile_ahead(&specs_of(&arch, core, dtype, heads))
}

/// `core`: plans take the kernels for sm_90a.
fn specs_of(arch: &str, core: bool, dtype: DType, heads: &[(usize, usize)]) -> Vec<KernelSpec> {
    let types = [DType::F32, dtype].map(mantissa);
    let is_of = |(name, value): &(String, u64)| match name.as_str() {
        "TW_GEMM_F16" => *value == u64::from(dtype == DType::F16),
        n if n.ends_with("_MANTISSA") => types.contains(value),
        // Of some machines only.
        n if n == EP_UNEVEN => false,
        "TW_HG_F16" => *value == u64::from(dtype == DType::F16),
        // What layers of experts take.
        "TW_HG_EPI" => EXPERTS.iter().any(|e| e.code() == *value),
        _ => true,
    };
    // Plans of one product need one or two of the many variants, each of which takes seconds.
    let mut others = vec![SM80_ATTENTION, PLAIN_ATTENTION, SM90_ATTENTION, SM90_ATTENTION_BWD];
    // No model asks for gradients by one kernel, for few queries over many keys, or for FP8.
    others.extend([SM90_ATTENTION_GRADS, SM90_ATTENTION_GATED, SM80_ATTENTION_SPLIT]);
    others.push(SM90_ATTENTION_FP8);
    others.extend([HOPPER_GEMM, HOPPER_SKINNY_GEMM, HOPPER_SUM_PARTS]);
    if !core {
        others.push(HOPPER_GROUPED_GEMM);
    }
    let mut all = kernel_specs(arch);
    all.retain(|s| others.iter().all(|o| o.name != s.name) && s.defines.iter().all(is_of));
    let of_heads = heads.iter().flat_map(|&h| units(dtype, h, core));
    all.extend(of_heads.map(|(source, defines)| spec(&source, defines, arch)));
    all
}

#[cfg(test)]
mod tests {
    use tilewire_kernels::attention::SEQUENCES;
    use tilewire_kernels::hopper::Variant;
    use tilewire_kernels::portable::{
        COLLECTIVE, EP_BULK, MOVE, PERMUTE, collective_defines, ep_bulk_defines, move_defines,
        permute_defines,
    };
    use tilewire_kernels::{SM80_GEMM, SM80_GROUPED_GEMM, Source};

    use super::*;
    use crate::common::cuda::gemm_defines;

    #[test]
    fn what_is_compiled_ahead_is_of_one_type_and_the_heads_asked_for() {
        let specs = specs_of("sm_90a", false, DType::BF16, &[(64, 64), (20, 20)]);
        let has = |s: &Source, defines| specs.contains(&spec(s, defines, "sm_90a"));
        for source in [SM80_GEMM, SM80_GROUPED_GEMM] {
            assert!(has(&source, gemm_defines(DType::BF16)));
            assert!(!has(&source, gemm_defines(DType::F16)));
        }
        for (wide, is_there) in [(DType::F32, true), (DType::BF16, true), (DType::F16, false)] {
            assert_eq!(has(&COLLECTIVE, collective_defines(mantissa(wide))), is_there, "{wide}");
            assert_eq!(has(&PERMUTE, permute_defines(mantissa(wide))), is_there, "{wide}");
        }
        assert!(has(&MOVE, move_defines()) && has(&EP_BULK, ep_bulk_defines()));
        assert!(has(&SEQUENCES, Vec::new()));
        let by_heads =
            |s: &&KernelSpec| s.name.starts_with("attention") && s.name != SEQUENCES.name;
        let attention: Vec<_> = specs.iter().filter(by_heads).collect();
        let names: Vec<&str> = attention.iter().map(|s| s.name.as_str()).collect();
        // No matrix kernel has heads of 20.
        assert_eq!(names, [SM80_ATTENTION.name, PLAIN_ATTENTION.name]);
        let of = |s: &KernelSpec, n| s.defines.iter().any(|d| *d == ("TW_ATTN_DQK".to_owned(), n));
        assert!(of(attention[0], 64) && of(attention[1], 20));
        // Where plans take the kernels for sm_90a, also these, of one type and what experts need.
        let core = specs_of("sm_90a", true, DType::BF16, &[(64, 64), (20, 20)]);
        let num = |s: &Source| core.iter().filter(|c| c.name == s.name).count();
        assert_eq!((num(&SM90_ATTENTION), num(&SM90_ATTENTION_BWD), num(&HOPPER_GEMM)), (1, 1, 0));
        assert_eq!(num(&SM90_ATTENTION_GATED), 1);
        let grouped = Variant::all_grouped();
        let wanted = grouped.iter().filter(|v| !v.f16 && EXPERTS.contains(&v.epilogue)).count();
        assert!(wanted > 0 && num(&HOPPER_GROUPED_GEMM) == wanted, "{wanted}");
        assert_eq!(core.len(), specs.len() + wanted + 3);
        assert_eq!(compile_ahead(&Device::Host, DType::BF16, &[(64, 64)]).unwrap(), 0);
    }
}
