//! The output of a dispatch-type phase on the host: received rows, laid out.

use tilewire_core::memory::reserve;
use tilewire_core::{DType, Error, Result, convert_from_f32};
use tilewire_device::{Memory, MemoryWrite, Tensor};

use crate::common::wide;
use crate::ep::handle::{Arrived, Record};
use crate::ep::launch::Out;
use crate::ep::schedule::Copy16;
use crate::ep::{EpDesc, EpDispatch, EpHandle, EpLayout};

/// A receive buffer of this launch, to which peers write rows directly.
#[derive(Clone)]
pub(crate) struct Straight {
    pub memory: Memory,
    /// Offset in the heap, the same on all ranks.
    pub at: usize,
}

impl Straight {
    /// Returns the offset in the heap of a row.
    pub fn offset(&self, row: usize, row_bytes: usize) -> usize {
        self.at + row * row_bytes
    }
}

/// A received record.
struct Arrival {
    token: usize,
    /// `(choice, row, weight)`.
    copies: Vec<(usize, usize, f32)>,
    /// Index of its row and scales among all received records.
    nth: usize,
}

/// The received records, which are laid out once all have arrived.
pub(super) struct Came {
    dtype: DType,
    /// Of each source rank, by token.
    records: Vec<Vec<Arrival>>,
    num: usize,
    /// Empty if the rows are where they stay.
    rows: Vec<u8>,
    scales: Vec<u8>,
    straight: bool,
}

/// Returns the row of record `i` of `src` in the rank-major or flat layout.
pub(super) fn record_row(d: &EpDesc, arrived: &Arrived, src: usize, i: usize) -> usize {
    match d.layout {
        EpLayout::RankMajor { .. } => src * d.max_tokens + arrived[src][i].token,
        _ => arrived[..src].iter().map(Vec::len).sum::<usize>() + i,
    }
}

impl Came {
    pub fn new(d: &EpDesc, dtype: DType, straight: bool) -> Self {
        let records = d.experts_per_rank.iter().map(|_| Vec::new()).collect();
        Self { dtype, records, num: 0, rows: Vec::new(), scales: Vec::new(), straight }
    }

    /// A record of launch `stamp`, unless its metadata are of an earlier one; `read` copies its
    /// row.
    ///
    /// # Errors
    /// `Exhausted` if memory lacks.
    pub fn record(
        &mut self,
        d: &EpDesc,
        (src, token): (usize, usize),
        (meta, stamp): (&[u8], u32),
        read: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let (copies, scales) = meta.split_at(size_of::<Copy16>() * d.top_k);
        let copies: Vec<_> = copies
            .chunks_exact(size_of::<Copy16>())
            .map(bytemuck::pod_read_unaligned::<Copy16>)
            .take_while(|c| c.stamp == stamp)
            // A row that a peer sent is not trusted: it could be outside of the outputs.
            .filter(|c| {
                (c.row as u32 as usize) < d.capacity && (c.choice as u32 as usize) < d.top_k
            })
            .map(|c| (c.choice as usize, c.row as usize, c.weight))
            .collect();
        if copies.is_empty() {
            return Ok(());
        }
        reserve(&mut self.scales, 4 * d.num_scales)?;
        self.scales.extend_from_slice(&scales[..4 * d.num_scales]);
        if !self.straight {
            let (at, len) = (self.rows.len(), d.hidden * self.dtype.size());
            reserve(&mut self.rows, len)?;
            self.rows.resize(at + len, 0);
            read(&mut self.rows[at..]);
        }
        self.records[src].push(Arrival { token, copies, nth: self.num });
        self.num += 1;
        Ok(())
    }

    /// Writes the outputs; with `straight` their rows are in place already. Returns the records
    /// that the handle keeps.
    pub fn store(
        &self,
        d: &EpDesc,
        out: &Out,
        handle: &EpHandle,
        straight: Option<MemoryWrite<'_>>,
    ) -> Result<Arrived> {
        let kept = |a: &Arrival| Record {
            token: a.token,
            copies: a.copies.iter().map(|&(j, row, _)| (j, row)).collect(),
        };
        let arrived: Arrived =
            self.records.iter().map(|list| list.iter().map(kept).collect()).collect();
        match out {
            Out::Dispatch(o) => self.store_dispatch(d, o, (handle, &arrived), straight)?,
            Out::CombineBwd { dy, weighted: None } => {
                let copies = |_: usize, _: usize, a: &Arrival| -> Vec<usize> {
                    a.copies.iter().map(|c| c.1).collect()
                };
                self.store_rows(d, dy, copies, straight)?;
            }
            Out::CombineBwd { dy, weighted: Some((w, y, dw)) } => {
                self.store_weighted(d, dy, (w, y, dw))?;
            }
        }
        Ok(arrived)
    }

    /// Calls `f` with each record, its source, and its number among the source's.
    fn each(&self, mut f: impl FnMut(usize, usize, &Arrival)) {
        for (src, list) in self.records.iter().enumerate() {
            list.iter().enumerate().for_each(|(i, a)| f(src, i, a));
        }
    }

    /// Writes the row of each record to the rows of `t` that `rows_of` names; other rows become
    /// zero.
    fn store_rows(
        &self,
        d: &EpDesc,
        t: &Tensor,
        rows_of: impl Fn(usize, usize, &Arrival) -> Vec<usize>,
        straight: Option<MemoryWrite<'_>>,
    ) -> Result<()> {
        let len = d.hidden * self.dtype.size();
        let Some(mut memory) = straight else {
            return t.write(|b| {
                b.fill(0);
                self.each(|src, i, a| {
                    for row in rows_of(src, i, a) {
                        b[row * len..][..len].copy_from_slice(&self.rows[a.nth * len..][..len]);
                    }
                });
            });
        };
        // The first one is where it stays.
        let b = memory.bytes_mut();
        let mut fed = vec![false; t.shape().dim(0)];
        self.each(|src, i, a| {
            let rows = rows_of(src, i, a);
            for &row in &rows {
                fed[row] = true;
                if row != rows[0] {
                    b.copy_within(rows[0] * len..(rows[0] + 1) * len, row * len);
                }
            }
        });
        for (row, _) in fed.iter().enumerate().filter(|(_, fed)| !**fed) {
            b[row * len..][..len].fill(0);
        }
        Ok(())
    }

    fn store_dispatch(
        &self,
        d: &EpDesc,
        o: &EpDispatch,
        (handle, arrived): (&EpHandle, &Arrived),
        straight: Option<MemoryWrite<'_>>,
    ) -> Result<()> {
        let expert_major = matches!(d.layout, EpLayout::ExpertMajor { .. });
        let rows_of = |src: usize, i: usize, a: &Arrival| -> Vec<usize> {
            if expert_major {
                a.copies.iter().map(|c| c.1).collect()
            } else {
                vec![record_row(d, arrived, src, i)]
            }
        };
        self.store_rows(d, &o.x, rows_of, straight)?;
        if let Some(s) = &o.scales {
            let len = 4 * d.num_scales;
            s.write(|b| {
                b.fill(0);
                self.each(|src, i, a| {
                    for row in rows_of(src, i, a) {
                        b[row * len..][..len].copy_from_slice(&self.scales[a.nth * len..][..len]);
                    }
                });
            })?;
        }
        if let Some(w) = &o.weights {
            let mut v = vec![0.0f32; d.capacity];
            self.each(|_, _, a| a.copies.iter().for_each(|&(_, row, weight)| v[row] = weight));
            w.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
        }
        let mut index = vec![-1i32; d.capacity];
        self.each(|src, i, a| {
            for &(_, row, _) in &a.copies {
                let from = if expert_major { row } else { record_row(d, arrived, src, i) };
                index[row] = from as i32;
            }
        });
        handle.row_index().write(|b| b.copy_from_slice(bytemuck::cast_slice(&index)))
    }

    /// Writes `dy[row] = w d_out`, and `dw[row] = <d_out, y[row]>`.
    fn store_weighted(
        &self,
        d: &EpDesc,
        dy: &Tensor,
        (weights, y, dw): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        if self.straight {
            return Err(Error::internal("rows of a weighted gradient were received by zero copy"));
        }
        let (h, len) = (d.hidden, d.hidden * self.dtype.size());
        let (weights, y) = (weights.to_f32()?, y.to_f32()?);
        let mut grads = vec![0.0f32; d.capacity];
        let mut rows = vec![0.0f32; d.capacity * h];
        self.each(|_, _, a| {
            let g = wide(self.dtype, &self.rows[a.nth * len..][..len]);
            for &(_, row, _) in &a.copies {
                let y = &y[row * h..][..h];
                grads[row] = g.iter().zip(y).map(|(a, b)| a * b).sum();
                let out = &mut rows[row * h..][..h];
                out.iter_mut().zip(g.iter()).for_each(|(o, v)| *o = weights[row] * v);
            }
        });
        dy.write(|b| convert_from_f32(d.out, &rows, b))?;
        dw.write(|b| b.copy_from_slice(bytemuck::cast_slice(&grads)))
    }
}
