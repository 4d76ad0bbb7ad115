//! Kernels compiled before the plans that need them are prepared.

use tilewire_core::{DType, Result};
use tilewire_device::Device;
use tilewire_device::jit::KernelSpec;
use tilewire_kernels::attention::hopper::SM90_ATTENTION;
use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION};
use tilewire_kernels::portable::EP_UNEVEN;

use crate::attention::device::unit;
use crate::common::cuda::{kernel_specs, mantissa, spec};

/// Compiles, on all cores, the kernels of plans with elements of `dtype` (and f32) and of attention
/// with head dimensions `heads` (of q and k, of v), if `device` is a GPU and they are not built in
/// or cached. Without it each plan compiles its own when it is prepared, one after the other; what
/// fails here fails there and is reported there. How many were compiled.
///
/// # Errors
/// `Config` for a bad variable of the environment.
pub fn compile_ahead(device: &Device, dtype: DType, heads: &[(usize, usize)]) -> Result<usize> {
    let Device::Cuda(ctx) = device else { return Ok(0) };
    ctx.compile_ahead(&specs_of(&ctx.arch()?, dtype, heads))
}

fn specs_of(arch: &str, dtype: DType, heads: &[(usize, usize)]) -> Vec<KernelSpec> {
    let types = [DType::F32, dtype].map(mantissa);
    let is_of = |(name, value): &(String, u64)| match name.as_str() {
        "TW_GEMM_F16" => *value == u64::from(dtype == DType::F16),
        n if n.ends_with("_MANTISSA") => types.contains(value),
        // Of some machines only.
        n if n == EP_UNEVEN => false,
        // Each takes seconds, and a plan needs one or two.
        n if n.starts_with("TW_HG_") => false,
        _ => true,
    };
    // The one for sm_90a is taken where it is asked for alone.
    let attention = [SM80_ATTENTION.name, PLAIN_ATTENTION.name, SM90_ATTENTION.name];
    let mut all = kernel_specs(arch);
    all.retain(|s| !attention.contains(&s.name.as_str()) && s.defines.iter().all(is_of));
    let of_heads = heads.iter().map(|&h| unit(dtype, h));
    all.extend(of_heads.map(|(source, defines)| spec(&source, defines, arch)));
    all
}

#[cfg(test)]
mod tests {
    use tilewire_kernels::portable::{
        COLLECTIVE, EP_BULK, MOVE, PERMUTE, collective_defines, ep_bulk_defines, move_defines,
        permute_defines,
    };
    use tilewire_kernels::{SM80_GEMM, SM80_GROUPED_GEMM, Source};

    use super::*;
    use crate::common::cuda::gemm_defines;

    #[test]
    fn what_is_compiled_ahead_is_of_one_type_and_the_heads_asked_for() {
        let specs = specs_of("sm_90a", DType::BF16, &[(64, 64), (20, 20)]);
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
        let attention: Vec<_> = specs.iter().filter(|s| s.name.starts_with("attention")).collect();
        let names: Vec<&str> = attention.iter().map(|s| s.name.as_str()).collect();
        // No matrix kernel has heads of 20.
        assert_eq!(names, [SM80_ATTENTION.name, PLAIN_ATTENTION.name]);
        let of = |s: &KernelSpec, n| s.defines.iter().any(|d| *d == ("TW_ATTN_DQK".to_owned(), n));
        assert!(of(attention[0], 64) && of(attention[1], 20));
        assert_eq!(compile_ahead(&Device::Host, DType::BF16, &[(64, 64)]).unwrap(), 0);
    }
}
