//! Quantisation on the host: magnitudes, the team's maximum by put and signal, codes.

use std::sync::Arc;

use tilewire_core::memory::filled;
use tilewire_core::{DType, Error, F8E4M3, F8E5M2, Rank, Result, ScaleLayout, convert_from_f32};
use tilewire_device::Tensor;
use tilewire_symm::{Enter, Signals, SymBuf};

use super::launch::{CREDIT, DATA, State};
use super::recipe::blocks;
use super::{QuantDesc, QuantInputs, Quantized, Recipe, Scaling};
use crate::common::Mat;
use crate::common::{Launch, wide};

/// Code of every NaN: what the GPU's conversion gives.
const NAN_CODE: u8 = 0x7F;

/// Largest magnitude, NaN ignored.
pub(super) fn amax(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |m, v| m.max(v.abs()))
}

/// One f32 division and one rounding.
fn code(dtype: DType, x: f32, scale: f32) -> u8 {
    let (v, max) = (x / scale, dtype.max_finite() as f32);
    if v.is_nan() {
        return NAN_CODE;
    }
    match dtype {
        DType::F8E4M3 => F8E4M3::from_f32(v.clamp(-max, max)).to_bits(),
        _ => F8E5M2::from_f32(v.clamp(-max, max)).to_bits(),
    }
}

/// Quantises the `rows x cols` matrix `x`, with the scale `given` or one for each block.
fn fill(
    x: Mat<'_>,
    (rows, cols): (usize, usize),
    recipe: &Recipe,
    given: Option<f32>,
    out: &Quantized,
) -> Result<()> {
    let layout = out.layout;
    let mut scales = filled(0.0f32, layout.num_scales(rows, cols))?;
    if layout == ScaleLayout::Tensor {
        // An empty matrix has a scale, too.
        scales[0] = given.unwrap_or(1.0);
    }
    let mut codes = filled(0u8, rows * cols)?;
    let at = |r: usize, c: usize| x.data[r * x.row + c * x.col];
    for (rs, cs) in blocks(layout, rows, cols) {
        let scale = given.unwrap_or_else(|| {
            recipe.scale(amax(rs.clone().flat_map(|r| cs.clone().map(move |c| at(r, c)))))
        });
        scales[layout.scale_idx(rs.start, cs.start, cols)] = scale;
        for r in rs {
            for c in cs.clone() {
                codes[r * cols + c] = code(recipe.dtype, at(r, c), scale);
            }
        }
    }
    out.data.write(|b| b.copy_from_slice(&codes))?;
    // Bytes of the swizzled layout that belong to no block hold 0, which is what 0.0 becomes.
    out.scales.write(|b| convert_from_f32(layout.dtype(), &scales, b))
}

/// The inputs of a launch on the host.
pub(super) struct Run {
    pub desc: QuantDesc,
    pub t: QuantInputs,
    pub state: Option<Arc<State>>,
    /// Team, area and signals, if magnitudes are compared over ranks.
    pub team: Option<(Launch, SymBuf, Arc<Signals>)>,
}

impl Run {
    /// The whole quantisation.
    pub fn run(&self) -> Result<()> {
        let recipe = self.desc.recipe();
        let given = self.given(&recipe)?;
        let (rows, cols) = (self.t.x.shape().dim(0), self.t.x.shape().dim(1));
        self.t.x.read(|b| -> Result<()> {
            let x = wide(self.desc.src, b);
            if let Some(q) = &self.t.row {
                fill(Mat::rows(&x, cols), (rows, cols), &recipe, given, q)?;
            }
            match &self.t.column {
                Some(q) => fill(Mat::rows(&x, cols).t(), (cols, rows), &recipe, given, q),
                None => Ok(()),
            }
        })?
    }

    /// The per-tensor scale of this launch, if there is one. Moves delayed scaling on by a step:
    /// after the exchange, so that a launch which failed leaves the state as it was.
    fn given(&self, recipe: &Recipe) -> Result<Option<f32>> {
        if self.desc.layout != ScaleLayout::Tensor {
            return Ok(None);
        }
        let mine = self.t.x.read(|b| amax(wide(self.desc.src, b).iter().copied()))?;
        let top = match &self.team {
            Some((l, area, signals)) => team_max(l, area, signals, mine)?,
            None => mine,
        };
        match (self.desc.scaling, &self.state) {
            (Scaling::Delayed { margin, .. }, Some(s)) => s.step(recipe, margin, top).map(Some),
            (Scaling::Delayed { .. }, None) => {
                Err(Error::internal("delayed scaling lacks its state"))
            }
            (Scaling::Current, _) => Ok(Some(recipe.scale(top))),
        }
    }
}

/// The largest of all ranks' `mine`: one f32 to every peer, under credits.
fn team_max(l: &Launch, area: &SymBuf, signals: &Signals, mine: f32) -> Result<f32> {
    let Launch { ctx, net, tag } = l;
    let (credit, data) = (signals.slot(CREDIT), signals.slot(DATA));
    let permit = net.enter(ctx, &Enter { credit, tag: *tag, first: data, num: 1 })?;
    let at = |r: Rank| area.range(4 * r.idx(), 4);
    for p in ctx.team().peers() {
        let bytes = &mine.to_ne_bytes()[..];
        net.put_flag(ctx, &permit, (p, at(ctx.rank())), bytes, data, "amax")?;
    }
    net.wait_peers(ctx, data, "amax")?;
    ctx.compute("max")?;
    let mut top = mine;
    for src in Rank::all(ctx.team().size()).filter(|&r| r != ctx.rank()) {
        let mut word = [0; 4];
        // SAFETY: `src` has signalled its word, and gets no new credit before the next launch.
        unsafe { ctx.read_local(at(src), &mut word) };
        top = top.max(f32::from_ne_bytes(word));
    }
    Ok(top)
}

impl State {
    /// The scale to quantise with now; then records `top` and sets the scale of the next step.
    fn step(&self, recipe: &Recipe, margin: i32, top: f32) -> Result<f32> {
        let (scale, steps) = (self.scale.to_vec::<f32>()?[0], self.steps.to_vec::<i64>()?[0]);
        let mut history = self.history.to_vec::<f32>()?;
        let window = history.len();
        history[steps as usize % window] = top;
        let next = recipe.delayed(amax(history.iter().copied()), margin, scale);
        let set = |t: &Tensor, bytes: &[u8]| t.write(|b| b.copy_from_slice(bytes));
        set(&self.history, bytemuck::cast_slice(&history))?;
        set(&self.scale, &next.to_ne_bytes())?;
        set(&self.steps, &(steps + 1).to_ne_bytes())?;
        Ok(scale)
    }
}
