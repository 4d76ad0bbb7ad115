//! Local products of the model, through the `gemm` operation.

use tilewire_core::{DType, Result};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::gemm::{AOrder, BOrder, Epilogue, GemmDesc, GemmInputs, GemmPlan};

/// One product, unless it has no rows.
pub(crate) struct Product(Option<GemmPlan>);

impl Product {
    fn new(desc: GemmDesc, stream: &Stream) -> Result<Self> {
        if desc.m == 0 {
            return Ok(Self(None));
        }
        let plan = GemmPlan::new(desc)?;
        plan.prepare(stream)?;
        Ok(Self(Some(plan)))
    }

    /// `dw = dy^T x` in f32: `dy` is `[m, n]`, `x` is `[m, k]`, both `dtype`.
    pub fn wgrad(stream: &Stream, (m, n, k): (usize, usize, usize), dtype: DType) -> Result<Self> {
        let desc = GemmDesc {
            a_order: AOrder::Km,
            b_order: BOrder::Kn,
            out: DType::F32,
            ..GemmDesc::nt(n, k, m, dtype)
        };
        Self::new(desc, stream)
    }

    pub fn run(&self, stream: &Stream, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        let Some(plan) = &self.0 else { return Ok(()) };
        plan.launch(stream, GemmInputs::new(a, b, out.clone()))?.join(stream).map(|_| ())
    }
}

/// `x w^T` with logits in f32, and its gradients: `x` is `[m, k]`, `w` is `[n, k]`.
pub(crate) struct Linear {
    pub fwd: Product,
    /// `dx = dy w`.
    pub dgrad: Product,
    /// `dx += dy w`.
    pub dgrad_add: Product,
    pub wgrad: Product,
}

impl Linear {
    pub fn new(stream: &Stream, (m, n, k): (usize, usize, usize), dtype: DType) -> Result<Self> {
        let fwd = GemmDesc { out: DType::F32, ..GemmDesc::nt(m, n, k, dtype) };
        let dgrad = GemmDesc { b_order: BOrder::Kn, ..GemmDesc::nt(m, k, n, dtype) };
        let epilogue = Epilogue { accumulate: true, ..Epilogue::NONE };
        Ok(Self {
            fwd: Product::new(fwd, stream)?,
            dgrad: Product::new(dgrad, stream)?,
            dgrad_add: Product::new(GemmDesc { epilogue, ..dgrad }, stream)?,
            wgrad: Product::wgrad(stream, (m, n, k), dtype)?,
        })
    }
}
