//! GEMM+RS on the host backend: the real task table, packed slots, flags and credits.
//!
//! `fused` pushes each tile as soon as it is computed, from the compute lane, as a kernel's
//! epilogue does. The other algorithms hand finished chunks to the copy lane.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::{Rank, Result, convert_from_f32};
use tilewire_symm::{Permit, Signals, SymBuf};

use super::GemmRsDesc;
use super::launch::{CREDIT, DATA, GemmRsInputs};
use super::schedule::{RsTask, RsTile};
use crate::common::Mat;
use crate::common::{Handoff, Launch, narrow_into, range_of, wide};
use crate::gemm::BOrder;
use crate::gemm::host::{add_bias, matmul};

/// A finished chunk on its way from the compute lane to the copy lane.
pub(crate) type Chunk = (Rank, Vec<(usize, Vec<u8>)>);

pub(crate) struct Run {
    pub launch: Launch,
    pub desc: GemmRsDesc,
    pub tasks: Vec<RsTask>,
    pub handoff: Option<Handoff<Chunk>>,
    /// Nothing is handed over before all products are computed.
    pub sequential: bool,
    pub slot_rows: usize,
    pub rows: Vec<usize>,
    pub slots: SymBuf,
    pub signals: Arc<Signals>,
    /// Row of the output tensor where my rows begin (0 unless the output holds all rows).
    pub out_row: usize,
    pub t: GemmRsInputs,
}

impl Run {
    fn slot(&self, src: Rank, at: usize, num: usize) -> usize {
        let wire = self.desc.wire.size();
        let first = src.idx() * self.slot_rows * self.desc.n + at;
        self.slots.range(first * wire, num * wire)
    }

    /// Pushes the tiles of one chunk and signals it. Zero-length tiles do not exist.
    fn push(&self, permit: &Permit, owner: Rank, tiles: &[(usize, Vec<u8>)]) -> Result<()> {
        let (Launch { ctx, net, .. }, wire) = (&self.launch, self.desc.wire.size());
        for (at, bytes) in tiles {
            let to = (owner, self.slot(ctx.rank(), *at, bytes.len() / wire));
            net.put(ctx, permit, to, bytes, "push")?;
        }
        net.flag(ctx, owner, self.signals.slot(DATA), "chunk")
    }

    /// Copy lane: pushes what the compute lane hands over.
    pub fn copies(&self) -> Result<()> {
        let Some(h) = &self.handoff else { return Ok(()) };
        let ctx = &self.launch.ctx;
        let num = self.tasks.iter().filter(|t| matches!(t, RsTask::Push { .. })).count();
        let mut permit = Permit::none();
        for _ in 0..num {
            let (owner, tiles) = h.receive(ctx)?;
            self.credit(owner, &mut permit)?;
            self.push(&permit, owner, &tiles)?;
        }
        Ok(())
    }

    /// Waits for the credit of `owner`, once in a launch.
    fn credit(&self, owner: Rank, permit: &mut Permit) -> Result<()> {
        if !permit.names(owner) {
            let Launch { ctx, net, tag } = &self.launch;
            permit.add(net.acquire(ctx, owner, self.signals.slot(CREDIT), *tag, "credit")?);
        }
        Ok(())
    }

    /// Compute lane: the task table. `after(chunk, rows)` runs when my rows of a chunk (global
    /// numbers) are reduced and stored.
    pub fn compute(&self, after: impl Fn(usize, Range<usize>) -> Result<()>) -> Result<()> {
        let Launch { ctx, net, tag } = &self.launch;
        for p in ctx.team().peers() {
            net.grant(ctx, p, self.signals.slot(CREDIT), *tag, "credit")?;
        }
        let bias = self.t.bias.as_ref().map(|b| b.to_f32()).transpose()?.unwrap_or_default();
        let scale = self.t.scale.as_ref().map_or(Ok(1.0), |s| s.to_f32().map(|v| v[0]))?;
        let mut permit = Permit::none();
        let mut held = Vec::new();
        self.t.w.read(|w| {
            let w = wide(self.desc.w, w);
            for task in &self.tasks {
                ctx.compute("tile")?;
                match task {
                    RsTask::Push { owner, tiles, .. } => {
                        let mut done = Vec::with_capacity(tiles.len());
                        for tile in tiles {
                            let acc = self.tile(tile, &w, scale)?;
                            let mut bytes = vec![0; acc.len() * self.desc.wire.size()];
                            convert_from_f32(self.desc.wire, &acc, &mut bytes);
                            done.push((tile.at, bytes));
                        }
                        match &self.handoff {
                            None => {
                                self.credit(*owner, &mut permit)?;
                                self.push(&permit, *owner, &done)?;
                            }
                            Some(_) if self.sequential => held.push((*owner, done)),
                            Some(h) => h.send((*owner, done))?,
                        }
                    }
                    RsTask::Reduce { chunk, tiles } => {
                        let mut own = Vec::with_capacity(tiles.len());
                        for tile in tiles {
                            own.push(self.tile(tile, &w, scale)?);
                        }
                        if let Some(h) = &self.handoff {
                            held.drain(..).try_for_each(|c| h.send(c))?;
                        }
                        self.reduce(*chunk, tiles, &own, &bias)?;
                        let rows = tiles.first().map_or(0, |t| t.rows.start)
                            ..tiles.last().map_or(0, |t| t.rows.end);
                        after(*chunk, rows)?;
                    }
                }
            }
            Ok(())
        })?
    }

    /// My partial product of one tile, f32.
    fn tile(&self, tile: &RsTile, w: &[f32], scale: f32) -> Result<Vec<f32>> {
        let d = &self.desc;
        let (m, n, row) = (tile.rows.len(), tile.cols.len(), d.k * d.x.size());
        let mut acc = vec![0.0; m * n];
        let w = match d.w_order {
            BOrder::Nk => Mat::rows(w, d.k).t(),
            BOrder::Kn => Mat::rows(w, d.n),
        };
        self.t.x.read(|b| {
            let x = wide(d.x, &b[tile.rows.start * row..tile.rows.end * row]);
            matmul((m, n, d.k), Mat::rows(&x, d.k), w.from(0, tile.cols.start), &mut acc, false);
        })?;
        if scale != 1.0 {
            acc.iter_mut().for_each(|v| *v *= scale);
        }
        Ok(acc)
    }

    /// Adds all partials of my tiles in rank order (my own unrounded), the bias once, and stores.
    fn reduce(&self, chunk: usize, tiles: &[RsTile], own: &[Vec<f32>], bias: &[f32]) -> Result<()> {
        let (Launch { ctx, net, .. }, d) = (&self.launch, &self.desc);
        let chunks = self.tasks.iter().filter(|t| matches!(t, RsTask::Reduce { .. })).count();
        for p in ctx.team().peers() {
            let slot = self.signals.slot(DATA);
            match chunk + 1 == chunks {
                true => net.wait_last(ctx, p, slot, 1, "chunk")?,
                false => net.wait(ctx, p, slot, 1, "chunk")?,
            }
        }
        ctx.compute("reduce")?;
        let first = range_of(&self.rows, ctx.rank()).start;
        for (tile, own) in tiles.iter().zip(own) {
            let mut sum = vec![0.0f32; own.len()];
            for src in Rank::all(ctx.team().size()) {
                let mut add = |part: &[f32]| sum.iter_mut().zip(part).for_each(|(s, v)| *s += v);
                if src == ctx.rank() {
                    add(own);
                } else {
                    let at = self.slot(src, tile.at, own.len());
                    // SAFETY: `src` has signalled this chunk, and gets no new credit before the
                    // next launch on this stream, which runs after this one.
                    add(&wide(d.wire, unsafe { ctx.local(at, own.len() * d.wire.size()) }));
                }
            }
            if !bias.is_empty() {
                add_bias(&mut sum, &bias[tile.cols.clone()]);
            }
            self.t.out.write(|out| {
                for (row, values) in tile.rows.clone().zip(sum.chunks_exact(tile.cols.len())) {
                    let at = (row - first + self.out_row, tile.cols.start, d.n);
                    narrow_into(out, d.out, at, values);
                }
            })?;
        }
        Ok(())
    }
}
