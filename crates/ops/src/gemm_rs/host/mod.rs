//! GEMM+RS on the host: the task table, and the transfers of `copies.rs`.
//!
//! `fused` pushes each chunk from the compute lane as soon as it is computed, as a kernel's
//! epilogue does. The other algorithms hand finished chunks to the copy lane.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::memory::filled;
use tilewire_core::{Error, Rank, Result, convert_from_f32};
use tilewire_symm::{Enter, HostTransport, OpCtx, Permit, Signals, SymBuf};

use super::GemmRsDesc;
use super::copies::{Copies, Gather};
use super::launch::{CREDIT, GemmRsInputs};
use super::schedule::{RsTask, RsTile};
use crate::common::Mat;
use crate::common::{Handoff, Launch, narrow_into, wide};
use crate::gemm::BOrder;
use crate::gemm::host::{add_bias, matmul};

/// A finished chunk of a peer's rows: whose, which, and its tiles with their places in the slot.
pub(crate) struct Chunk {
    owner: Rank,
    chunk: usize,
    tiles: Vec<(usize, Vec<u8>)>,
}

/// A message from the compute lane to the copy lane.
pub(crate) enum ToCopies {
    /// The launch has entered: first of all.
    Entered(Arc<Permit>),
    Chunk(Chunk),
}

pub(crate) struct Run {
    pub launch: Launch,
    pub desc: GemmRsDesc,
    pub tasks: Vec<RsTask>,
    pub handoff: Option<Handoff<ToCopies>>,
    /// Nothing is handed over before all products are computed.
    pub sequential: bool,
    pub chunks: usize,
    pub slot_rows: usize,
    pub rows: Vec<usize>,
    pub slots: SymBuf,
    pub signals: Arc<Signals>,
    /// GEMM+AR: where reduced rows return to, and whether they go around a ring.
    pub gather: Option<(SymBuf, bool)>,
    pub t: GemmRsInputs,
}

impl Run {
    pub fn copies(&self) -> Copies<'_> {
        let gather = self.gather.as_ref().map(|(buf, ring)| Gather {
            buf,
            row: self.desc.n * self.desc.out.size(),
            ring: *ring,
        });
        Copies {
            rows: &self.rows,
            chunks: self.chunks,
            slot_rows: self.slot_rows,
            row: self.desc.n * self.desc.wire.size(),
            slots: &self.slots,
            signals: &self.signals,
            gather,
        }
    }

    /// The transport and the lane of this launch's calls.
    pub fn net(&self) -> (&HostTransport, &OpCtx) {
        (&*self.launch.net, &self.launch.ctx)
    }

    fn push(&self, permit: &Permit, c: &Chunk) -> Result<()> {
        let wire = self.desc.wire.size();
        self.copies().push(self.net(), permit, (c.owner, c.chunk), c.tiles.len(), |i, put| {
            let (at, bytes) = &c.tiles[i];
            put(at * wire, bytes, bytes.len())
        })
    }

    /// Copy lane: pushes what the compute lane hands over.
    pub fn push_all(&self) -> Result<()> {
        let Some(h) = &self.handoff else { return Ok(()) };
        let ctx = &self.launch.ctx;
        let num = self.tasks.iter().filter(|t| matches!(t, RsTask::Push { .. })).count();
        let ToCopies::Entered(permit) = h.receive(ctx)? else {
            return Err(Error::internal("a chunk was handed over before the launch had entered"));
        };
        for _ in 0..num {
            let ToCopies::Chunk(c) = h.receive(ctx)? else {
                return Err(Error::internal("a launch has entered twice"));
            };
            self.push(&permit, &c)?;
        }
        Ok(())
    }

    /// Compute lane: enters, and does the task table. `after(permit, chunk, rows)` runs when my
    /// rows of a chunk (global numbers) are reduced and stored. Returns the permit of the launch.
    pub fn compute(
        &self,
        after: impl Fn(&Permit, usize, Range<usize>) -> Result<()>,
    ) -> Result<Arc<Permit>> {
        let (Launch { ctx, net, tag }, flags) = (&self.launch, self.copies().flags());
        let slot = |i| self.signals.slot(i);
        let enter =
            Enter { credit: slot(CREDIT), tag: *tag, first: slot(flags.start), num: flags.len() };
        let permit = Arc::new(net.enter(ctx, &enter)?);
        if let Some(h) = &self.handoff {
            h.send(ToCopies::Entered(permit.clone()))?;
        }
        let bias = self.t.bias.as_ref().map(|b| b.to_f32()).transpose()?.unwrap_or_default();
        let scale = self.t.scale.as_ref().map_or(Ok(1.0), |s| s.to_f32().map(|v| v[0]))?;
        let mut held = Vec::new();
        self.t.w.read(|w| {
            let w = wide(self.desc.w, w);
            self.tasks.iter().try_for_each(|task| {
                ctx.compute("tile")?;
                match task {
                    RsTask::Push { owner, chunk, tiles } => {
                        let (owner, chunk) = (*owner, *chunk);
                        let done = Chunk { owner, chunk, tiles: self.narrow(tiles, &w, scale)? };
                        match &self.handoff {
                            None => self.push(&permit, &done),
                            Some(_) if self.sequential => {
                                held.push(done);
                                Ok(())
                            }
                            Some(h) => h.send(ToCopies::Chunk(done)),
                        }
                    }
                    RsTask::Reduce { chunk, tiles } => {
                        let own = tiles.iter().map(|t| self.tile(t, &w, scale));
                        let own = own.collect::<Result<Vec<_>>>()?;
                        if let Some(h) = &self.handoff {
                            held.drain(..).try_for_each(|c| h.send(ToCopies::Chunk(c)))?;
                        }
                        self.reduce(*chunk, tiles, &own, &bias)?;
                        let rows = tiles.first().map_or(0, |t| t.rows.start)
                            ..tiles.last().map_or(0, |t| t.rows.end);
                        after(&permit, *chunk, rows)
                    }
                }
            })
        })??;
        Ok(permit)
    }

    /// My partial products of tiles of a peer's rows, in the wire's type.
    fn narrow(&self, tiles: &[RsTile], w: &[f32], scale: f32) -> Result<Vec<(usize, Vec<u8>)>> {
        let one = |tile: &RsTile| {
            let acc = self.tile(tile, w, scale)?;
            let mut bytes = filled(0, acc.len() * self.desc.wire.size())?;
            convert_from_f32(self.desc.wire, &acc, &mut bytes);
            Ok((tile.at, bytes))
        };
        tiles.iter().map(one).collect()
    }

    /// My partial product of one tile, f32.
    fn tile(&self, tile: &RsTile, w: &[f32], scale: f32) -> Result<Vec<f32>> {
        let d = &self.desc;
        let (m, n, row) = (tile.rows.len(), tile.cols.len(), d.k * d.x.size());
        let mut acc = filled(0.0, m * n)?;
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
        let (ctx, d, copies) = (&self.launch.ctx, &self.desc, self.copies());
        copies.wait(self.net(), chunk)?;
        ctx.compute("reduce")?;
        let first = copies.range(ctx.rank()).start;
        // GEMM+AR stores my rows among all.
        let out_row = if copies.gather.is_some() { first } else { 0 };
        for (tile, own) in tiles.iter().zip(own) {
            let mut sum = filled(0.0f32, own.len())?;
            for src in Rank::all(ctx.team().size()) {
                let mut add = |part: &[f32]| sum.iter_mut().zip(part).for_each(|(s, v)| *s += v);
                if src == ctx.rank() {
                    add(own);
                } else {
                    let (at, len) = (tile.at * d.wire.size(), own.len() * d.wire.size());
                    let at = copies.slot(src, at, len);
                    // SAFETY: `src` has signalled this chunk, and gets no new credit before the
                    // next launch on this stream, which runs after this one.
                    add(&wide(d.wire, unsafe { ctx.local(at, len) }));
                }
            }
            if !bias.is_empty() {
                add_bias(&mut sum, &bias[tile.cols.clone()]);
            }
            self.t.out.write(|out| {
                for (row, values) in tile.rows.clone().zip(sum.chunks_exact(tile.cols.len())) {
                    let at = (row - first + out_row, tile.cols.start, d.n);
                    narrow_into(out, d.out, at, values);
                }
            })?;
        }
        Ok(())
    }
}
