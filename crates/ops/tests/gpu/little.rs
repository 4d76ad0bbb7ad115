//! A device of sm_90 whose blocks get less shared memory than the kernels for sm_90a take: plans
//! take the portable ones, and say why.

use std::sync::PoisonError;

use tilewire_core::DType;
use tilewire_device::Stream;
use tilewire_device::cuda::CudaContext;
use tilewire_ops::attention::{AttentionDesc, AttentionPlan, AttnBackend, AttnMask};
use tilewire_ops::gemm::{GemmBackend, GemmDesc, GemmPlan};
use tilewire_ops::grouped_gemm::{GroupedDesc, GroupedGemmPlan};
use tilewire_testing::{Lack, did_not_run};

use crate::DEVICES;

/// In the environment: what the library that watches the driver's calls makes of the limit.
pub const SHARED: &str = "TW_SHARED_BYTES";

#[test]
fn plans_on_a_device_of_little_shared_memory_take_portable_kernels() {
    let ctx = match CudaContext::new(0) {
        Ok(ctx) if ctx.arch().unwrap().starts_with("sm_90") => ctx,
        Ok(_) => return did_not_run(Lack::Gpu, "it is not of sm_90"),
        Err(e) => return did_not_run(Lack::Gpu, e),
    };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = Stream::on(&ctx).unwrap();
    let little: Option<u32> = std::env::var(SHARED).ok().map(|n| n.parse().unwrap());
    let d = GemmDesc::nt(256, 256, 256, DType::BF16);
    let gemm = |by| {
        let plan = GemmPlan::with_backend(d, by)?;
        plan.prepare(&stream).map(|()| plan.explain())
    };
    let grouped = GroupedGemmPlan::new(GroupedDesc::new(2, 256, 256, 256, DType::BF16)).unwrap();
    grouped.prepare(&stream).unwrap();
    let d = AttentionDesc::new(256, (4, 2), 128, DType::BF16, AttnMask::CAUSAL);
    let attention = AttentionPlan::new(d.clone(), None).unwrap();
    attention.prepare(&stream).unwrap();
    let asked = AttentionPlan::with_backend(d, None, AttnBackend::Hopper).unwrap();
    let (asked, gemm) =
        (asked.prepare(&stream).map(|()| asked.explain()), gemm(GemmBackend::Hopper));
    let [grouped, attention] = [grouped.explain(), attention.explain()];
    let Some(little) = little else {
        assert!(gemm.is_ok() && asked.is_ok(), "{gemm:?}, {asked:?}");
        assert!(grouped.contains("the core for sm_90a ("), "{grouped}");
        return assert!(attention.contains("kernels for sm_90a (dq"), "{attention}");
    };
    assert_eq!(ctx.max_shared_bytes().unwrap(), little);
    let why = format!("shared memory for a block, which this device limits to {little}");
    for explained in [&grouped, &attention] {
        assert!(explained.contains(&why), "{explained}");
    }
    // Forward and backward.
    assert_eq!(attention.matches(&why).count(), 2, "{attention}");
    for e in [gemm.unwrap_err(), asked.unwrap_err()] {
        assert!(e.is_unsupported() && e.to_string().contains(&why), "{e}");
    }
}
