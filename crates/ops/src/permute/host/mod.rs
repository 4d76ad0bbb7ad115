//! Permutation on the host: loops over the map.

use tilewire_core::memory::filled;
use tilewire_core::{DType, Result, convert_from_f32};
use tilewire_device::Tensor;

use super::launch::UnpermuteGrads;
use super::map::{BAD_INDEX, GOOD};
use super::schedule::Layout;
use super::{PermuteDesc, PermuteMap, Permuted, Tokens};

/// Fills the map from `idx`.
pub(super) fn route(d: &PermuteDesc, idx: &Tensor, map: &PermuteMap) -> Result<()> {
    let idx: Vec<i64> = match idx.dtype() {
        DType::I64 => idx.to_vec::<i64>()?,
        _ => idx.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
    };
    match Layout::new(d, &idx) {
        Some(l) => map.store(&l, GOOD),
        None => map.store(&Layout::empty(d, idx.len()), BAD_INDEX),
    }
}

/// Poisons `outs` and returns true if the map is of no use.
pub(super) fn refused(map: &PermuteMap, outs: &[Option<&Tensor>]) -> Result<bool> {
    if map.good()? {
        return Ok(false);
    }
    outs.iter().flatten().try_for_each(|t| t.poison()).map(|()| true)
}

/// Copies element `from(source)` of `src` to each row of `dst`, zeros to rows without a source.
/// Elements are `row_bytes` long.
fn gather(
    sources: &[i32],
    (src, dst): (&Tensor, &Tensor),
    row_bytes: usize,
    from: impl Fn(usize) -> usize,
) -> Result<()> {
    src.read(|s| {
        dst.write(|o| {
            for (r, &i) in sources.iter().enumerate() {
                let row = &mut o[r * row_bytes..][..row_bytes];
                match usize::try_from(i) {
                    Ok(i) => row.copy_from_slice(&s[from(i) * row_bytes..][..row_bytes]),
                    Err(_) => row.fill(0),
                }
            }
        })
    })?
}

pub(super) fn permute(d: &PermuteDesc, map: &PermuteMap, t: &Tokens, out: &Permuted) -> Result<()> {
    if refused(map, &[Some(&out.x), out.weights.as_ref(), out.scales.as_ref()])? {
        return Ok(());
    }
    let sources = map.sources().to_vec::<i32>()?;
    let token = |i: usize| i / d.top_k;
    gather(&sources, (&t.x, &out.x), d.hidden * d.dtype.size(), token)?;
    if let (Some(w), Some(o)) = (&t.weights, &out.weights) {
        gather(&sources, (w, o), 4, |i| i)?;
    }
    match (&t.scales, &out.scales) {
        (Some(s), Some(o)) => gather(&sources, (s, o), 4 * d.num_scales, token),
        _ => Ok(()),
    }
}

/// `out[t] = sum_j w[t, j] rows[slot(t, j)]`, in the order of `j`.
pub(super) fn unpermute(
    d: &PermuteDesc,
    map: &PermuteMap,
    (rows, weights): (&Tensor, Option<&Tensor>),
    out: &Tensor,
) -> Result<()> {
    if refused(map, &[Some(out)])? {
        return Ok(());
    }
    let (h, slots) = (d.hidden, map.slots().to_vec::<i32>()?);
    let (rows, weights) = (rows.to_f32()?, weights.map(Tensor::to_f32).transpose()?);
    let mut sums = filled(0.0f32, map.tokens() * h)?;
    for (i, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let w = weights.as_ref().map_or(1.0, |w| w[i]);
        let sum = &mut sums[i / d.top_k * h..][..h];
        sum.iter_mut().zip(&rows[slot * h..][..h]).for_each(|(s, v)| *s += w * v);
    }
    out.write(|b| convert_from_f32(out.dtype(), &sums, b))
}

pub(super) fn permute_bwd(
    d: &PermuteDesc,
    map: &PermuteMap,
    g: &Permuted,
    out: &Tokens,
) -> Result<()> {
    unpermute(d, map, (&g.x, None), &out.x)?;
    let (Some(g), Some(o)) = (&g.weights, &out.weights) else { return Ok(()) };
    if refused(map, &[Some(o)])? {
        return Ok(());
    }
    gather(&map.slots().to_vec::<i32>()?, (g, o), 4, |slot| slot)
}

/// `d_rows[slot(t, j)] = w[t, j] d_out[t]`, padding zero; `d_weights[t, j] = <d_out[t],
/// rows[slot]>`.
pub(super) fn unpermute_bwd(d: &PermuteDesc, map: &PermuteMap, g: &UnpermuteGrads) -> Result<()> {
    let d_weights = g.weighted.as_ref().map(|w| &w.d_weights);
    if refused(map, &[Some(&g.d_rows), d_weights])? {
        return Ok(());
    }
    let (h, dy) = (d.hidden, g.d_out.to_f32()?);
    let weights = g.weighted.as_ref().map(|w| w.weights.to_f32()).transpose()?;
    let mut d_rows = filled(0.0f32, d.capacity * h)?;
    for (r, &i) in map.sources().to_vec::<i32>()?.iter().enumerate() {
        let Ok(i) = usize::try_from(i) else { continue };
        let w = weights.as_ref().map_or(1.0, |w| w[i]);
        let dy = &dy[i / d.top_k * h..][..h];
        d_rows[r * h..][..h].iter_mut().zip(dy).for_each(|(o, v)| *o = w * v);
    }
    g.d_rows.write(|b| convert_from_f32(d.out, &d_rows, b))?;
    let Some(w) = &g.weighted else { return Ok(()) };
    let rows = w.rows.to_f32()?;
    let mut grads = filled(0.0f32, map.tokens() * d.top_k)?;
    for (i, &slot) in map.slots().to_vec::<i32>()?.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let pairs = dy[i / d.top_k * h..][..h].iter().zip(&rows[slot * h..][..h]);
        grads[i] = pairs.map(|(a, b)| a * b).sum();
    }
    w.d_weights.write(|b| b.copy_from_slice(bytemuck::cast_slice(&grads)))
}
