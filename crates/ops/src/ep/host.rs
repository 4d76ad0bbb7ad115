//! Expert parallelism on the host backend: counts, tokens and returns by put and signal.
//!
//! A token record is
//! `[payload | scales f32 | token i32 | copies: top_k x (choice i32, row i32, weight f32)]`;
//! the number of records travels as the word of the arrival signal. A return record is
//! `[row | top_k x weight gradient f32]` at the index of the token record it answers.

use std::sync::Arc;

use tilewire_core::{DType, Error, ErrorKind, Rank, Result, convert_from_f32};
use tilewire_device::Tensor;
use tilewire_symm::{OpCtx, Signals, SymBuf};

use super::config::{Record, count, route};
use super::handle::Arrived;
use super::plan::{COUNTS, RETURNS, TOKENS};
use super::{EpDesc, EpDispatch, EpHandle, EpLayout};
use crate::common::{Launch, narrow_into, wide};

const TOKEN_BYTES: usize = 4;
const COPY_BYTES: usize = 12;

/// Copies of one record as they arrive: `(choice, row, weight)`.
type Copies = Vec<(usize, usize, f32)>;

/// Bytes of the tokens' own data in a record: large enough for either direction.
fn payload_bytes(d: &EpDesc) -> usize {
    (d.hidden * d.dtype.size().max(d.out.size())).next_multiple_of(4)
}

/// Bytes of a token record.
pub(super) fn record_bytes(d: &EpDesc) -> usize {
    payload_bytes(d) + 4 * d.num_scales + TOKEN_BYTES + COPY_BYTES * d.top_k
}

/// Bytes of a return record.
pub(super) fn return_bytes(d: &EpDesc) -> usize {
    (d.hidden * d.out.size()).next_multiple_of(4) + 4 * d.top_k
}

/// What a dispatch-type phase sends.
pub(super) struct Send {
    pub x: Tensor,
    pub weights: Option<Tensor>,
    pub scales: Option<Tensor>,
}

/// Where a dispatch-type phase delivers.
pub(super) enum Out {
    Dispatch(EpDispatch),
    CombineBwd { dy: Tensor, weighted: Option<(Tensor, Tensor, Tensor)> },
}

/// What a combine-type phase sends and delivers.
pub(super) struct Back {
    pub y: Tensor,
    pub weights: Option<Tensor>,
    /// True if `y` has a row per copy, false if it has a row per record.
    pub expert_major: bool,
    pub dw: Option<Tensor>,
    pub out: Tensor,
    pub dw_out: Option<Tensor>,
}

pub(super) struct Run {
    pub desc: EpDesc,
    pub counts: SymBuf,
    pub tokens: SymBuf,
    pub returns: SymBuf,
    pub signals: Arc<Signals>,
}

fn read_idx(t: &Tensor) -> Result<Vec<i64>> {
    match t.dtype() {
        DType::I64 => t.to_vec::<i64>(),
        _ => Ok(t.to_vec::<i32>()?.into_iter().map(i64::from).collect()),
    }
}

fn set_i64(t: &Tensor, v: &[usize]) -> Result<()> {
    let v: Vec<i64> = v.iter().map(|&x| x as i64).collect();
    t.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))
}

impl Run {
    fn grant_all(&self, l: &Launch, slot: usize) {
        for p in l.ctx.team().peers() {
            l.ctx.grant(p, self.signals.slot(slot), l.tag, "credit");
        }
    }

    /// Exchanges counts and computes the routing.
    pub fn route(
        &self,
        l: &Launch,
        idx: &Tensor,
        capacity: usize,
        handle: &EpHandle,
    ) -> Result<()> {
        let (ctx, d) = (&l.ctx, &self.desc);
        let (me, size, num) = (ctx.rank(), ctx.team().size(), d.num_experts());
        let idx = read_idx(idx)?;
        if let Some(bad) = idx.iter().find(|&&e| e < -1 || e >= num as i64) {
            return Err(Error::invalid("`topk_idx` names an expert that does not exist")
                .op("ep_prepare")
                .rank(me)
                .expected(format_args!("-1 or 0 to {}", num as i64 - 1))
                .seen(bad));
        }
        self.grant_all(l, COUNTS.0);
        let mine = count(d, &idx);
        let bytes: &[u8] = bytemuck::cast_slice(&mine);
        for p in ctx.team().peers() {
            ctx.acquire(p, self.signals.slot(COUNTS.0), l.tag, "credit")?;
            ctx.put(p, self.counts.range(me.idx() * bytes.len(), bytes.len()), bytes, "counts");
            ctx.signal(p, self.signals.slot(COUNTS.1), 1, "counts");
        }
        let mut all = vec![vec![0u32; num]; size];
        all[me.idx()] = mine.clone();
        for p in ctx.team().peers() {
            ctx.wait_last(p, self.signals.slot(COUNTS.1), 1, "counts")?;
            let row: &mut [u8] = bytemuck::cast_slice_mut(&mut all[p.idx()]);
            ctx.read_local(self.counts.range(p.idx() * row.len(), row.len()), row);
        }
        let routing = route(d, me.idx(), &idx, &all, capacity);
        set_i64(handle.m_splits(), &routing.m_splits)?;
        set_i64(handle.total(), &[routing.offsets.last().copied().unwrap_or(0)])?;
        set_i64(handle.dropped(), &[routing.dropped[me.idx()]])?;
        let mut state = handle.state();
        state.routing = routing;
        state.arrived = Vec::new();
        Ok(())
    }

    /// Dispatch-type phase: one record per (token, rank) out, rows in.
    pub fn send(&self, l: &Launch, handle: &EpHandle, send: &Send, out: &Out) -> Result<()> {
        let (ctx, d) = (&l.ctx, &self.desc);
        let me = ctx.rank();
        self.grant_all(l, TOKENS.0);
        let sends = {
            let s = handle.state();
            let rows = send.x.shape().dim(0);
            if s.routing.sends.len() != ctx.team().size() || s.routing.num_tokens != rows {
                return Err(Error::invalid("the tokens are not those that were routed")
                    .expected(format_args!("{} tokens", s.routing.num_tokens))
                    .seen(format_args!("{rows} tokens")));
            }
            s.routing.sends.clone()
        };
        let (record, area) = (record_bytes(d), d.max_tokens);
        for p in ctx.team().peers() {
            ctx.acquire(p, self.signals.slot(TOKENS.0), l.tag, "credit")?;
            for (i, (token, copies)) in sends[p.idx()].iter().enumerate() {
                let bytes = self.pack(send, *token, copies)?;
                ctx.put(
                    p,
                    self.tokens.range((me.idx() * area + i) * record, record),
                    &bytes,
                    "push",
                );
            }
            let n = sends[p.idx()].len() as u64;
            ctx.signal_word(p, self.signals.slot(TOKENS.1), n, "tokens");
        }
        let mut unpack = Unpack::new(d, ctx.team().size(), out)?;
        // Own tokens take the same path, without the wire.
        let own: Vec<Vec<u8>> =
            sends[me.idx()].iter().map(|(t, c)| self.pack(send, *t, c)).collect::<Result<_>>()?;
        for (i, bytes) in own.iter().enumerate() {
            unpack.record(me.idx(), i, bytes)?;
        }
        for p in ctx.team().peers() {
            let n = ctx.wait_word(p, self.signals.slot(TOKENS.1), "tokens")? as usize;
            let mut bytes = vec![0; record];
            for i in 0..n.min(area) {
                ctx.read_local(
                    self.tokens.range((p.idx() * area + i) * record, record),
                    &mut bytes,
                );
                unpack.record(p.idx(), i, &bytes)?;
            }
        }
        ctx.compute("unpack")?;
        let arrived = unpack.store(out, handle)?;
        handle.state().arrived = arrived;
        Ok(())
    }

    fn pack(&self, send: &Send, token: usize, copies: &[(usize, usize)]) -> Result<Vec<u8>> {
        let d = &self.desc;
        let mut bytes = vec![0; record_bytes(d)];
        let row = d.hidden * send.x.dtype().size();
        send.x.read(|x| bytes[..row].copy_from_slice(&x[token * row..][..row]))?;
        let mut at = payload_bytes(d);
        if let Some(s) = &send.scales {
            let n = 4 * d.num_scales;
            s.read(|s| bytes[at..at + n].copy_from_slice(&s[token * n..][..n]))?;
        }
        at += 4 * d.num_scales;
        bytes[at..at + TOKEN_BYTES].copy_from_slice(&(token as i32).to_ne_bytes());
        at += TOKEN_BYTES;
        for j in 0..d.top_k {
            let (choice, row) = copies.get(j).map_or((-1, -1), |&(c, r)| (c as i32, r as i32));
            let weight = match &send.weights {
                Some(w) if choice >= 0 => {
                    let i = (token * d.top_k + choice as usize) * 4;
                    w.read(|w| [w[i], w[i + 1], w[i + 2], w[i + 3]])?
                }
                _ => [0; 4],
            };
            bytes[at..at + 4].copy_from_slice(&choice.to_ne_bytes());
            bytes[at + 4..at + 8].copy_from_slice(&row.to_ne_bytes());
            bytes[at + 8..at + 12].copy_from_slice(&weight);
            at += COPY_BYTES;
        }
        Ok(bytes)
    }

    /// Combine-type phase: one row per record back, sums at home.
    pub fn back(&self, l: &Launch, handle: &EpHandle, b: &Back) -> Result<()> {
        let (ctx, d) = (&l.ctx, &self.desc);
        let me = ctx.rank();
        self.grant_all(l, RETURNS.0);
        let (arrived, sends, rows) = {
            let s = handle.state();
            (s.arrived.clone(), s.routing.sends.clone(), s.routing.num_tokens)
        };
        if arrived.len() != ctx.team().size() {
            return Err(Error::invalid("nothing was dispatched with this handle"));
        }
        if b.out.shape().dim(0) != rows {
            return Err(Error::invalid("the output is not for the tokens that were routed")
                .expected(rows)
                .seen(b.out.shape().dim(0)));
        }
        let (record, area) = (return_bytes(d), d.max_tokens);
        let reduce = Reduce::new(d, b)?;
        for p in ctx.team().peers() {
            ctx.acquire(p, self.signals.slot(RETURNS.0), l.tag, "credit")?;
            for i in 0..arrived[p.idx()].len() {
                let bytes = reduce.record(&arrived, p.idx(), i);
                ctx.put(
                    p,
                    self.returns.range((me.idx() * area + i) * record, record),
                    &bytes,
                    "push",
                );
            }
            let n = arrived[p.idx()].len() as u64;
            ctx.signal_word(p, self.signals.slot(RETURNS.1), n, "returns");
        }
        for p in ctx.team().peers() {
            let n = ctx.wait_word(p, self.signals.slot(RETURNS.1), "returns")?;
            if n as usize != sends[p.idx()].len() {
                return Err(Error::new(ErrorKind::Protocol, "a peer answers another dispatch")
                    .peer(p)
                    .expected(sends[p.idx()].len())
                    .seen(n));
            }
        }
        ctx.compute("sum")?;
        self.sum(ctx, b, &sends, |rank, i| {
            if rank == me.idx() {
                return reduce.record(&arrived, rank, i);
            }
            let mut bytes = vec![0; record];
            ctx.read_local(self.returns.range((rank * area + i) * record, record), &mut bytes);
            bytes
        })
    }

    /// Adds the returned rows of each token in rank order, from the first one on, in f32, and rounds once.
    fn sum(
        &self,
        ctx: &OpCtx,
        b: &Back,
        sends: &[Vec<Record>],
        record: impl Fn(usize, usize) -> Vec<u8>,
    ) -> Result<()> {
        let d = &self.desc;
        let rows = b.out.shape().dim(0);
        let mut sums = vec![0.0f32; rows * d.hidden];
        let mut dw = vec![0.0f32; rows * d.top_k];
        let mut begun = vec![false; rows];
        let row_bytes = d.hidden * d.out.size();
        let grads_at = row_bytes.next_multiple_of(4);
        for rank in Rank::all(ctx.team().size()) {
            for (i, (token, copies)) in sends[rank.idx()].iter().enumerate() {
                let bytes = record(rank.idx(), i);
                let row = wide(d.out, &bytes[..row_bytes]);
                let first = !std::mem::replace(&mut begun[*token], true);
                for (s, v) in sums[token * d.hidden..][..d.hidden].iter_mut().zip(row.iter()) {
                    *s = if first { *v } else { *s + v };
                }
                for (n, &(choice, _)) in copies.iter().enumerate() {
                    let at = grads_at + 4 * n;
                    let word = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
                    dw[token * d.top_k + choice] = f32::from_ne_bytes(word);
                }
            }
        }
        b.out.write(|o| convert_from_f32(d.out, &sums, o))?;
        match &b.dw_out {
            Some(t) => t.write(|o| o.copy_from_slice(bytemuck::cast_slice(&dw))),
            None => Ok(()),
        }
    }
}

/// Sums the expert outputs of a record.
struct Reduce<'a> {
    desc: &'a EpDesc,
    y: Vec<f32>,
    weights: Option<Vec<f32>>,
    dw: Option<Vec<f32>>,
    expert_major: bool,
}

impl<'a> Reduce<'a> {
    fn new(desc: &'a EpDesc, b: &Back) -> Result<Self> {
        Ok(Self {
            desc,
            y: b.y.to_f32()?,
            weights: b.weights.as_ref().map(Tensor::to_f32).transpose()?,
            dw: b.dw.as_ref().map(Tensor::to_f32).transpose()?,
            expert_major: b.expert_major,
        })
    }

    /// The return record of record `i` of rank `src`: rows added in the order of choices, from the first one on, so that a
    /// single one without a weight is passed on as it is (0 added to it would change a negative zero).
    fn record(&self, arrived: &Arrived, src: usize, i: usize) -> Vec<u8> {
        let (d, h, copies) = (self.desc, self.desc.hidden, &arrived[src][i].copies);
        let mut sum = vec![0.0f32; h];
        let mut first = true;
        let mut add = |row: usize, weight: f32| {
            for (s, v) in sum.iter_mut().zip(&self.y[row * h..][..h]) {
                *s = if first { weight * v } else { *s + weight * v };
            }
            first = false;
        };
        if self.expert_major {
            for &(_, row) in copies {
                add(row, self.weights.as_ref().map_or(1.0, |w| w[row]));
            }
        } else {
            add(record_row(d, arrived, src, i), 1.0);
        }
        let mut bytes = vec![0; return_bytes(d)];
        narrow_into(&mut bytes, d.out, (0, 0, h), &sum);
        let at = (h * d.out.size()).next_multiple_of(4);
        if let Some(dw) = &self.dw {
            for (n, &(_, row)) in copies.iter().enumerate() {
                bytes[at + 4 * n..][..4].copy_from_slice(&dw[row].to_ne_bytes());
            }
        }
        bytes
    }
}

/// Row of record `i` of `src` in the rank-major or flat layout.
fn record_row(d: &EpDesc, arrived: &Arrived, src: usize, i: usize) -> usize {
    match d.layout {
        EpLayout::RankMajor { .. } => src * d.max_tokens + arrived[src][i].token,
        _ => arrived[..src].iter().map(Vec::len).sum::<usize>() + i,
    }
}

/// Collects what arrives, then lays it out.
struct Unpack<'a> {
    desc: &'a EpDesc,
    dtype: DType,
    records: Vec<Vec<Vec<u8>>>,
}

impl<'a> Unpack<'a> {
    fn new(desc: &'a EpDesc, size: usize, out: &Out) -> Result<Self> {
        let dtype = match out {
            Out::Dispatch(d) => d.x.dtype(),
            Out::CombineBwd { dy, .. } => dy.dtype(),
        };
        Ok(Self { desc, dtype, records: vec![Vec::new(); size] })
    }

    fn record(&mut self, src: usize, i: usize, bytes: &[u8]) -> Result<()> {
        if self.records[src].len() != i {
            return Err(Error::internal("records out of order"));
        }
        self.records[src].push(bytes.to_vec());
        Ok(())
    }

    /// Where the token's number stands in a record.
    fn token_at(&self) -> usize {
        payload_bytes(self.desc) + 4 * self.desc.num_scales
    }

    /// The token that a record carries, as its source numbers it.
    fn token(&self, bytes: &[u8]) -> Result<usize> {
        let at = self.token_at();
        let word = i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        usize::try_from(word).ok().filter(|&t| t < self.desc.max_tokens).ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "a record names a token that cannot be")
                .expected(format_args!("0 to {}", self.desc.max_tokens))
                .seen(word)
        })
    }

    /// `(choice, row, weight)` of the copies of a record.
    fn copies(&self, bytes: &[u8]) -> Vec<(usize, usize, f32)> {
        let d = self.desc;
        let at = self.token_at() + TOKEN_BYTES;
        let word = |o: usize| [bytes[o], bytes[o + 1], bytes[o + 2], bytes[o + 3]];
        (0..d.top_k)
            .map(|j| at + j * COPY_BYTES)
            .filter_map(|o| {
                let (c, r) = (i32::from_ne_bytes(word(o)), i32::from_ne_bytes(word(o + 4)));
                (c >= 0 && (r as usize) < d.capacity)
                    .then(|| (c as usize, r as usize, f32::from_ne_bytes(word(o + 8))))
            })
            .collect()
    }

    /// Writes the outputs; returns the copies of every record.
    fn store(&self, out: &Out, handle: &EpHandle) -> Result<Arrived> {
        let d = self.desc;
        let copies: Vec<Vec<Copies>> =
            self.records.iter().map(|l| l.iter().map(|b| self.copies(b)).collect()).collect();
        let mut arrived: Arrived = Vec::new();
        for (records, copies) in self.records.iter().zip(&copies) {
            let record = |(bytes, copies): (&Vec<u8>, &Copies)| {
                let copies = copies.iter().map(|&(j, r, _)| (j, r)).collect();
                Ok(super::handle::Record { token: self.token(bytes)?, copies })
            };
            arrived.push(records.iter().zip(copies).map(record).collect::<Result<_>>()?);
        }
        match out {
            Out::Dispatch(o) => self.store_dispatch(o, handle, &copies, &arrived)?,
            Out::CombineBwd { dy, weighted } => {
                self.store_combine_bwd(dy, weighted.as_ref(), &copies)?;
            }
        }
        debug_assert_eq!(d.experts_per_rank.len(), arrived.len());
        Ok(arrived)
    }

    fn store_dispatch(
        &self,
        o: &EpDispatch,
        handle: &EpHandle,
        copies: &[Vec<Copies>],
        arrived: &Arrived,
    ) -> Result<()> {
        let d = self.desc;
        let expert_major = matches!(d.layout, EpLayout::ExpertMajor { .. });
        let rows_of = |src: usize, i: usize| -> Vec<usize> {
            if expert_major {
                arrived[src][i].copies.iter().map(|&(_, r)| r).collect()
            } else {
                vec![record_row(d, arrived, src, i)]
            }
        };
        // Bytes [from, from + len) of each record into the rows of `t`; other rows are zero.
        let scatter = |t: &Tensor, from: usize, len: usize| {
            t.write(|b| {
                b.fill(0);
                for (src, list) in self.records.iter().enumerate() {
                    for (i, bytes) in list.iter().enumerate() {
                        for row in rows_of(src, i) {
                            b[row * len..][..len].copy_from_slice(&bytes[from..from + len]);
                        }
                    }
                }
            })
        };
        scatter(&o.x, 0, d.hidden * self.dtype.size())?;
        if let Some(s) = &o.scales {
            scatter(s, payload_bytes(d), 4 * d.num_scales)?;
        }
        if let Some(w) = &o.weights {
            let mut v = vec![0.0f32; d.capacity];
            copies.iter().flatten().flatten().for_each(|&(_, row, weight)| v[row] = weight);
            w.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
        }
        let mut index = vec![-1i32; d.capacity];
        for (src, list) in arrived.iter().enumerate() {
            for (i, c) in list.iter().enumerate() {
                c.copies.iter().for_each(|&(_, row)| {
                    index[row] =
                        if expert_major { row } else { record_row(d, arrived, src, i) } as i32;
                });
            }
        }
        handle.row_index().write(|b| b.copy_from_slice(bytemuck::cast_slice(&index)))
    }

    /// `dy[row] = (w) d_out`, and `dw[row] = <d_out, y[row]>`.
    fn store_combine_bwd(
        &self,
        dy: &Tensor,
        weighted: Option<&(Tensor, Tensor, Tensor)>,
        copies: &[Vec<Copies>],
    ) -> Result<()> {
        let (d, h) = (self.desc, self.desc.hidden);
        let operands =
            weighted.map(|(w, y, _)| Ok::<_, Error>((w.to_f32()?, y.to_f32()?))).transpose()?;
        let mut grads = vec![0.0f32; d.capacity];
        let mut rows = vec![0.0f32; d.capacity * h];
        for (list, copies) in self.records.iter().zip(copies) {
            for (bytes, copies) in list.iter().zip(copies) {
                let g = wide(self.dtype, &bytes[..h * self.dtype.size()]);
                for &(_, row, _) in copies {
                    let out = &mut rows[row * h..][..h];
                    match &operands {
                        None => out.copy_from_slice(&g),
                        Some((w, y)) => {
                            let y = &y[row * h..][..h];
                            grads[row] = g.iter().zip(y).map(|(a, b)| a * b).sum();
                            out.iter_mut().zip(g.iter()).for_each(|(o, v)| *o = w[row] * v);
                        }
                    }
                }
            }
        }
        dy.write(|b| convert_from_f32(d.out, &rows, b))?;
        match weighted {
            Some((_, _, t)) => t.write(|b| b.copy_from_slice(bytemuck::cast_slice(&grads))),
            None => Ok(()),
        }
    }
}
