//! Checks of the caller's tensors, and access to them as f32.

use std::borrow::Cow;
use std::ops::Range;

use tilewire_core::memory::filled_or_unwind;
use tilewire_core::{DType, Error, ErrorKind, Result, Shape, convert_from_f32, convert_to_f32};
use tilewire_device::Tensor;

/// Checks dtype and shape of an argument.
///
/// # Errors
/// `InvalidArgument` naming the argument, what was expected and what was given.
pub fn expect_tensor(what: &str, t: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
    let want = Shape::new(shape)?;
    if t.dtype() == dtype && t.shape() == want {
        return Ok(());
    }
    Err(Error::invalid(format!("`{what}` has the wrong shape or dtype"))
        .expected(format_args!("{dtype} {want}"))
        .seen(format_args!("{} {}", t.dtype(), t.shape())))
}

/// Checks that no output overlaps another output or an input: an operation stores tiles while it
/// has inputs still to read.
///
/// # Errors
/// `InvalidArgument` naming both arguments.
pub(crate) fn apart(outs: &[Named<'_>], ins: &[Named<'_>]) -> Result<()> {
    let (outs, ins) = (given(outs), given(ins));
    for (i, (what, t)) in outs.iter().enumerate() {
        if let Some((other, _)) = outs[i + 1..].iter().chain(&ins).find(|(_, u)| t.overlaps(u)) {
            return Err(Error::invalid(format!("`{what}` must not overlap `{other}`"))
                .hint("give each output a buffer of its own"));
        }
    }
    Ok(())
}

fn given<'a>(list: &[Named<'a>]) -> Vec<(&'static str, &'a Tensor)> {
    list.iter().filter_map(|&(what, t)| Some((what, t?))).collect()
}

/// Checks that no two tensors of one output overlap. An output may have a tensor for each of many
/// groups.
///
/// # Errors
/// `InvalidArgument` naming the output.
pub(crate) fn each_apart<'a>(
    what: &'static str,
    list: impl Iterator<Item = &'a Tensor>,
) -> Result<()> {
    let mut spans: Vec<_> = list.map(Tensor::span).collect();
    spans.sort_unstable_by_key(|(of, at)| (*of, at.start));
    let meets = |w: &[(usize, Range<u64>)]| w[0].0 == w[1].0 && w[1].1.start < w[0].1.end;
    match spans.windows(2).any(meets) {
        false => Ok(()),
        true => Err(Error::invalid(format!("tensors of `{what}` must not overlap each other"))
            .hint("give each group a buffer of its own")),
    }
}

/// An argument, if it was given, and its name.
pub(crate) type Named<'a> = (&'static str, Option<&'a Tensor>);

/// Returns the elements as f32: borrowed if they are f32, converted if they are not.
pub(crate) fn wide(dtype: DType, bytes: &[u8]) -> Cow<'_, [f32]> {
    if dtype == DType::F32
        && let Ok(s) = bytemuck::try_cast_slice(bytes)
    {
        return Cow::Borrowed(s);
    }
    let mut v = filled_or_unwind(0.0, bytes.len() / dtype.size());
    convert_to_f32(dtype, bytes, &mut v);
    Cow::Owned(v)
}

/// Rounds `values` into row `row`, columns `col..` of a row-major matrix with `width` columns.
pub(crate) fn narrow_into(
    out: &mut [u8],
    dtype: DType,
    (row, col, width): (usize, usize, usize),
    values: &[f32],
) {
    let at = (row * width + col) * dtype.size();
    convert_from_f32(dtype, values, &mut out[at..at + values.len() * dtype.size()]);
}

/// Returns an `Unsupported` error: no kernel does `what`; `instead` is its hint.
pub(crate) fn no_kernel(what: impl Into<String>, instead: &'static str) -> Error {
    let what = what.into();
    unsupported(format!("there is no CUDA kernel for {what}"), instead)
}

/// Returns an `Unsupported` error with a text and a hint.
pub(crate) fn unsupported(text: impl Into<String>, instead: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, text).hint(instead)
}

/// Returns a `NotPrepared` error: the plan was not prepared.
pub(crate) fn not_prepared() -> Error {
    Error::new(ErrorKind::NotPrepared, "the plan is not prepared")
        .hint("call `plan.prepare(&stream)` on all ranks first")
}
