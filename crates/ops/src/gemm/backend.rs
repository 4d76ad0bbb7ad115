//! The products that cuBLASLt is asked for.

use tilewire_core::DType;

use super::{AOrder, Activation, BOrder, GemmDesc};

/// Addresses and rows of operands and results are multiples of this: below it the library has only
/// kernels that are slower than the portable one.
pub(super) const ALIGN_BYTES: usize = 16;

/// Returns why cuBLASLt cannot make the products of `d`; none if it can, as far as that is known
/// before it is asked.
pub(super) fn unfit(d: &GemmDesc) -> Option<String> {
    let e = &d.epilogue;
    if e.activation != Activation::None || e.aux {
        return Some("activations are fused into the portable kernel only".to_owned());
    }
    let operand = matches!(d.a, DType::F32 | DType::BF16 | DType::F16);
    if !operand || !(d.out == d.a || d.out == DType::F32) {
        return Some(format!("tilewire does not use cuBLASLt for {} x {} -> {}", d.a, d.b, d.out));
    }
    if e.bias && d.out != DType::F32 {
        return Some(format!(
            "a bias may be f32, which cuBLASLt does not add to {} results; each launch says which it is",
            d.out
        ));
    }
    if e.accumulate && d.out != DType::F32 {
        // Seen with 13.1 on an H200: 1.3 units in the last place of bf16, where one rounding is
        // half.
        return Some(format!("cuBLASLt rounds the product before it adds to {}", d.out));
    }
    if d.m == 0 || d.n == 0 || d.k == 0 {
        return Some("the product is empty".to_owned());
    }
    // With A as [k, m] its stride is known at launch only.
    let lda = if d.a_order == AOrder::Mk { d.k } else { ALIGN_BYTES };
    let ldb = if d.b_order == BOrder::Nk { d.k } else { d.n };
    let strides = [(lda, d.a), (ldb, d.b), (d.n, d.out)];
    let odd = strides.iter().find(|(ld, t)| !(ld * t.size()).is_multiple_of(ALIGN_BYTES));
    odd.map(|(ld, t)| format!("rows of {ld} {t} are no multiple of {ALIGN_BYTES} bytes"))
}

#[cfg(test)]
mod tests {
    use super::super::Epilogue;
    use super::*;

    #[test]
    fn what_cublaslt_is_not_asked_for_has_a_reason() {
        let d = GemmDesc::nt(100, 64, 72, DType::BF16);
        let with = |epilogue| GemmDesc { epilogue, ..d };
        let (bias, none) = (Epilogue { bias: true, ..Epilogue::NONE }, Epilogue::NONE);
        for good in [
            d,
            GemmDesc { m: 7, a_order: AOrder::Km, b_order: BOrder::Kn, ..d },
            GemmDesc { out: DType::F32, ..with(bias) },
            with(Epilogue { bgrad: true, ..none }),
            GemmDesc { out: DType::F32, ..with(Epilogue { accumulate: true, ..none }) },
            GemmDesc::nt(3, 4, 4, DType::F32),
        ] {
            assert_eq!(unfit(&good), None, "{good}");
        }
        for (bad, why) in [
            (with(bias), "bias"),
            (with(Epilogue { accumulate: true, ..none }), "rounds"),
            (with(Epilogue { activation: Activation::Gelu, ..none }), "activations"),
            (GemmDesc { k: 73, ..d }, "rows of 73 bf16"),
            (GemmDesc { n: 65, b_order: BOrder::Kn, ..d }, "rows of 65 bf16"),
            (GemmDesc { n: 66, out: DType::F32, ..d }, "rows of 66 f32"),
            (GemmDesc { k: 0, ..d }, "empty"),
            (GemmDesc { out: DType::F16, ..d }, "f16"),
            (GemmDesc::nt(8, 8, 8, DType::F8E4M3), "f8e4m3"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad}: {:?}", unfit(&bad));
        }
    }
}
