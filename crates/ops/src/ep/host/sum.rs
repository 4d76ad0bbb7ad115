//! The sums of a combine on the host: over the copies of a record where its experts are, over the
//! ranks where the token is.

use std::ops::Range;

use tilewire_core::memory::filled;
use tilewire_core::{Result, convert_from_f32};
use tilewire_device::Tensor;

use super::lay::record_row;
use crate::common::{narrow_into, wide};
use crate::ep::EpDesc;
use crate::ep::handle::Arrived;
use crate::ep::launch::Return;
use crate::ep::routing::Record as Sent;

/// Returns the range of `list`, which is sorted by token, whose tokens are in `tokens`.
pub(super) fn within<T>(
    list: &[T],
    tokens: &Range<usize>,
    token: impl Fn(&T) -> usize,
) -> Range<usize> {
    let first = |t: usize| list.partition_point(|e| token(e) < t);
    first(tokens.start)..first(tokens.end)
}

/// Sums the expert outputs of a record.
pub(super) struct Reduce<'a> {
    desc: &'a EpDesc,
    arrived: &'a Arrived,
    y: Vec<f32>,
    weights: Option<Vec<f32>>,
    dw: Option<Vec<f32>>,
    expert_major: bool,
    sum: Vec<f32>,
    row: Vec<u8>,
    grads: Vec<f32>,
}

impl<'a> Reduce<'a> {
    pub fn new(desc: &'a EpDesc, b: &Return, arrived: &'a Arrived) -> Result<Self> {
        Ok(Self {
            desc,
            arrived,
            y: b.y.to_f32()?,
            weights: b.weights.as_ref().map(Tensor::to_f32).transpose()?,
            dw: b.dw.as_ref().map(Tensor::to_f32).transpose()?,
            expert_major: b.expert_major,
            sum: filled(0.0, desc.hidden)?,
            row: filled(0, desc.hidden * desc.out.size())?,
            grads: Vec::new(),
        })
    }

    /// Returns the row that answers record `i` of rank `src`, and the gradient of the weight of
    /// each of its copies. It adds rows in the order of choices and begins with the first one, so
    /// that a single row without a weight is passed on unchanged (0 added to it would change a
    /// negative zero).
    pub fn record(&mut self, src: usize, i: usize) -> (&[u8], Option<&[f32]>) {
        let (d, h, copies) = (self.desc, self.desc.hidden, &self.arrived[src][i].copies);
        let (sum, y) = (&mut self.sum, &self.y);
        let mut first = true;
        let mut add = |row: usize, weight: f32| {
            for (s, v) in sum.iter_mut().zip(&y[row * h..][..h]) {
                *s = if first { weight * v } else { *s + weight * v };
            }
            first = false;
        };
        if self.expert_major {
            for &(_, row) in copies {
                add(row, self.weights.as_ref().map_or(1.0, |w| w[row]));
            }
        } else {
            add(record_row(d, self.arrived, src, i), 1.0);
        }
        narrow_into(&mut self.row, d.out, (0, 0, h), &self.sum);
        let grads = self.dw.as_ref().map(|dw| {
            self.grads.clear();
            self.grads.extend(copies.iter().map(|&(_, row)| dw[row]));
            &self.grads[..]
        });
        (&self.row, grads)
    }
}

/// Adds the returned rows of each token in rank order, from the first one on, in f32, and rounds
/// once.
pub(super) struct Sums<'a> {
    desc: &'a EpDesc,
    with_grads: bool,
    sums: Vec<f32>,
    dw: Vec<f32>,
    begun: Vec<bool>,
    row: Vec<u8>,
    grads: Vec<f32>,
}

impl<'a> Sums<'a> {
    pub fn new(desc: &'a EpDesc, b: &Return) -> Result<Self> {
        let rows = b.out.shape().dim(0);
        Ok(Self {
            desc,
            with_grads: b.dw_out.is_some(),
            sums: filled(0.0, rows * desc.hidden)?,
            dw: filled(0.0, rows * desc.top_k)?,
            begun: filled(false, rows)?,
            row: filled(0, desc.hidden * desc.out.size())?,
            grads: filled(0.0, desc.top_k)?,
        })
    }

    /// Adds the returned rows of `tokens`; `read` copies a rank's row and gradients of a token.
    pub fn add(
        &mut self,
        sends: &[Vec<Sent>],
        tokens: &Range<usize>,
        read: impl Fn(usize, usize, &mut [u8], &mut [f32]),
    ) {
        let d = self.desc;
        for (src, list) in sends.iter().enumerate() {
            for (token, copies) in &list[within(list, tokens, |s| s.0)] {
                let grads = if self.with_grads { copies.len() } else { 0 };
                read(src, *token, &mut self.row, &mut self.grads[..grads]);
                let row = wide(d.out, &self.row);
                let first = !std::mem::replace(&mut self.begun[*token], true);
                let sums = &mut self.sums[token * d.hidden..][..d.hidden];
                for (s, v) in sums.iter_mut().zip(row.iter()) {
                    *s = if first { *v } else { *s + v };
                }
                for (&(choice, _), g) in copies.iter().zip(&self.grads[..grads]) {
                    self.dw[token * d.top_k + choice] = *g;
                }
            }
        }
    }

    pub fn store(&self, b: &Return) -> Result<()> {
        b.out.write(|o| convert_from_f32(self.desc.out, &self.sums, o))?;
        match &b.dw_out {
            Some(t) => t.write(|o| o.copy_from_slice(bytemuck::cast_slice(&self.dw))),
            None => Ok(()),
        }
    }
}
