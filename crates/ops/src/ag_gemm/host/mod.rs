//! AG+GEMM on the host backend: the real task table, chunk flags and credits.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::memory::filled;
use tilewire_core::{Rank, Result};
use tilewire_symm::{Enter, Signals, SymBuf};

use super::AgGemmDesc;
use super::copies::Copies;
use super::launch::{AgGemmInputs, CREDIT, DATA};
use super::schedule::AgTask;
use crate::common::Mat;
use crate::common::ring::arrivals;
use crate::common::{
    Algo, Handoff, Launch, OverlapConfig, chunk_rows, narrow_into, range_of, wide,
};
use crate::gemm::BOrder;
use crate::gemm::host::{activate_row, matmul};

pub(super) struct Run {
    pub launch: Launch,
    pub desc: AgGemmDesc,
    pub config: OverlapConfig,
    pub rows: Vec<usize>,
    pub tasks: Vec<AgTask>,
    pub gather: SymBuf,
    pub signals: Arc<Signals>,
    /// Of a ring: the copy lane, which passes on what arrives, tells the compute lane of each
    /// chunk.
    pub came: Handoff<()>,
    pub t: AgGemmInputs,
}

/// Small operands of the epilogue, widened once per launch.
struct Extra {
    bias: Vec<f32>,
    scale: f32,
    aux: Vec<f32>,
}

impl Run {
    fn row_bytes(&self) -> usize {
        self.desc.k * self.desc.x.size()
    }

    fn lane(&self) -> Copies<'_> {
        Copies {
            rows: &self.rows,
            chunks: self.config.sub_chunks,
            ring: self.config.algo == Algo::Ring,
            row: self.row_bytes(),
            gather: &self.gather,
            signals: &self.signals,
        }
    }

    /// Copy lane: enters, pushes my shard, and of a ring passes on what arrives.
    pub fn copies(&self) -> Result<()> {
        let (Launch { ctx, net, tag }, lane) = (&self.launch, self.lane());
        let slot = |i| self.signals.slot(i);
        let enter = Enter { credit: slot(CREDIT), tag: *tag, first: slot(DATA), num: 1 };
        let permit = net.enter(ctx, &enter)?;
        lane.push((&**net, ctx), &permit, |bytes, put| self.t.x.read(|b| put(&b[bytes]))?)?;
        if !lane.ring {
            return Ok(());
        }
        arrivals(ctx.rank(), &self.rows, lane.chunks)
            .try_for_each(|a| lane.take((&**net, ctx), &permit, &a, || self.came.send(())))
    }

    /// Compute lane: a chunk of `src` has arrived.
    fn arrive(&self, src: Rank, chunk: usize) -> Result<()> {
        let Launch { ctx, net, .. } = &self.launch;
        match self.config.algo {
            Algo::Ring => self.came.receive(ctx),
            _ => net.wait_last(ctx, src, self.lane().slot(chunk), 1, "chunk"),
        }
    }

    /// Compute lane: the task table.
    pub fn compute(&self) -> Result<()> {
        let ctx = &self.launch.ctx;
        if let Some(g) = &self.t.gathered {
            self.keep_gathered(g, &range_of(&self.rows, ctx.rank()))?;
        }
        let bias = self.t.bias.as_ref().map(|b| b.to_f32()).transpose()?.unwrap_or_default();
        let scale = self.t.scale.as_ref().map_or(Ok(1.0), |s| s.to_f32().map(|v| v[0]))?;
        let extra = Extra {
            bias,
            scale,
            aux: self.t.aux_in.as_ref().map(|a| a.to_f32()).transpose()?.unwrap_or_default(),
        };
        self.t.w.read(|w| {
            let w = wide(self.desc.w, w);
            for task in &self.tasks {
                match task {
                    AgTask::Wait { src, chunk } => {
                        self.arrive(*src, *chunk)?;
                        if let Some(g) = &self.t.gathered {
                            let r = chunk_rows(&self.rows, *src, *chunk, self.config.sub_chunks);
                            self.keep_gathered(g, &r)?;
                        }
                    }
                    AgTask::Tile { rows, cols } => {
                        ctx.compute("tile")?;
                        self.tile(rows, cols, &w, &extra)?;
                    }
                }
            }
            Ok(())
        })?
    }

    /// Runs `f` on X's rows (global numbers) as f32, wherever they lie.
    fn with_rows<R>(&self, rows: &Range<usize>, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let (own, row, k) =
            (range_of(&self.rows, self.launch.ctx.rank()), self.row_bytes(), self.desc.k);
        if rows.start >= own.start && rows.end <= own.end {
            let at = (rows.start - own.start) * row..(rows.end - own.start) * row;
            return self.t.x.read(|b| f(&wide(self.desc.x, &b[at])));
        }
        let at = self.gather.range(rows.start * row, rows.len() * row);
        // SAFETY: the task table waits for every chunk of the range before it is used (proved by
        // `each_tile_once_after_its_chunk`), and its writers get no credit before the next launch.
        let bytes = unsafe { self.launch.ctx.local(at, rows.len() * row) };
        let mut x = wide(self.desc.x, bytes);
        // A sequential tile spans all rows: my own are not in the gather buffer.
        let overlap = rows.start.max(own.start)..rows.end.min(own.end);
        if !overlap.is_empty() {
            let mine =
                &mut x.to_mut()[(overlap.start - rows.start) * k..(overlap.end - rows.start) * k];
            self.t.x.read(|b| {
                let at = (overlap.start - own.start) * row..(overlap.end - own.start) * row;
                mine.copy_from_slice(&wide(self.desc.x, &b[at]));
            })?;
        }
        Ok(f(&x))
    }

    fn keep_gathered(&self, g: &tilewire_device::Tensor, rows: &Range<usize>) -> Result<()> {
        let row = self.row_bytes();
        let own = range_of(&self.rows, self.launch.ctx.rank());
        let mine = rows.start >= own.start && rows.end <= own.end;
        g.write(|out| {
            let out = &mut out[rows.start * row..rows.end * row];
            if mine {
                let at = (rows.start - own.start) * row..(rows.end - own.start) * row;
                return self.t.x.read(|b| out.copy_from_slice(&b[at]));
            }
            let at = self.gather.range(rows.start * row, out.len());
            // SAFETY: the chunk has arrived, and its writer gets no credit before the next launch.
            unsafe { self.launch.ctx.read_local(at, out) };
            Ok(())
        })?
    }

    fn tile(&self, rows: &Range<usize>, cols: &Range<usize>, w: &[f32], x: &Extra) -> Result<()> {
        let (bias, aux) = (&x.bias, &x.aux);
        let (d, act) = (&self.desc, self.desc.epilogue.activation);
        let (m, n) = (rows.len(), cols.len());
        let mut acc = filled(0.0, m * n)?;
        let w = match d.w_order {
            BOrder::Nk => Mat::rows(w, d.k).t(),
            BOrder::Kn => Mat::rows(w, d.n),
        };
        self.with_rows(rows, |x| {
            matmul((m, n, d.k), Mat::rows(x, d.k), w.from(0, cols.start), &mut acc, false);
        })?;
        if x.scale != 1.0 {
            acc.iter_mut().for_each(|v| *v *= x.scale);
        }
        if !bias.is_empty() {
            for row in acc.chunks_exact_mut(n.max(1)) {
                row.iter_mut().zip(&bias[cols.clone()]).for_each(|(x, b)| *x += b);
            }
        }
        if let Some(a) = &self.t.aux_out {
            a.write(|out| {
                for (i, row) in acc.chunks_exact(n.max(1)).enumerate() {
                    narrow_into(out, d.out, (rows.start + i, cols.start, d.n), row);
                }
            })?;
        }
        // Tiles of activations that pair columns span all columns, so output columns follow.
        let (first, width, aux_cols) = if act.pairs_columns() {
            (0, act.out_cols(d.n), act.aux_cols(d.n))
        } else {
            (cols.start, n, d.n)
        };
        let mut out_row = filled(0.0, width)?;
        self.t.out.write(|out| {
            for (i, row) in acc.chunks_exact(n.max(1)).enumerate() {
                let saved = match aux.is_empty() {
                    true => &[][..],
                    false if act.pairs_columns() => &aux[(rows.start + i) * aux_cols..][..aux_cols],
                    false => &aux[(rows.start + i) * aux_cols..][cols.clone()],
                };
                activate_row(act, row, saved, &mut out_row);
                narrow_into(out, d.out, (rows.start + i, first, act.out_cols(d.n)), &out_row);
            }
        })
    }
}
