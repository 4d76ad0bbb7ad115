//! A launch of each phase on the host, step by step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::{Memory, Tensor};
use tilewire_symm::{HostTransport, OpCtx, Permit, SignalSlot, Signals, SymBuf};

use super::lay::{Came, Straight};
use super::sum::{Reduce, Sums, within};
use crate::common::Launch;
use crate::ep::launch::{COUNTS, Out, Push, RETURNS, Return, TOKENS};
use crate::ep::routing::{Record as Sent, count, route};
use crate::ep::schedule::{Area, Copy16, Cut, Schedule};
use crate::ep::{EpDesc, EpHandle, EpLayout};

/// The host's cuts, and the launches that it counts.
#[derive(Clone)]
pub(crate) struct HostPart {
    /// The cuts of the tokens and of the returns.
    pub cuts: [Cut; 2],
    /// Of counts, tokens and returns: equal on all ranks.
    launches: Arc<[AtomicU64; 3]>,
}

impl HostPart {
    /// Makes the host's part; with `fine` its chunks are as small as those of devices.
    pub fn new(d: &EpDesc, fine: bool) -> Self {
        let cuts = if fine { [Cut::push(d), Cut::returns(d)] } else { [Cut::whole(d); 2] };
        Self { cuts, launches: Arc::default() }
    }
}

pub(crate) struct Run {
    pub desc: EpDesc,
    pub counts: SymBuf,
    pub tokens: SymBuf,
    pub returns: SymBuf,
    pub flags: SymBuf,
    pub signals: Arc<Signals>,
    pub part: HostPart,
}

/// A launch under way: it has begun, and counts as `number`.
struct Begun<'a> {
    run: &'a Run,
    ctx: &'a OpCtx,
    net: &'a HostTransport,
    at: Schedule,
    me: usize,
    number: u64,
    tag: u64,
    slot: usize,
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

fn rank(r: usize) -> Rank {
    Rank::new(r as u32)
}

impl Begun<'_> {
    /// Announces this launch to all peers, by its fingerprint.
    fn announce(&self) -> Result<()> {
        let mut peers = self.ctx.team().peers();
        peers.try_for_each(|p| self.net.grant(self.ctx, p, self.said(), self.tag, "launch"))
    }

    /// Returns the slot of the announcement: two in turn, as counts have two buffers. A rank that
    /// announces the next launch has all ranks' announcements of this one, so all ranks have begun
    /// it and taken the announcement before.
    fn said(&self) -> SignalSlot {
        self.run.signals.slot(self.slot + (self.number & 1) as usize)
    }

    /// Waits until all peers have announced this launch, with the same receive buffer.
    fn accepted(&self) -> Result<()> {
        let mut peers = self.ctx.team().peers();
        peers.try_for_each(|p| {
            self.net.acquire(self.ctx, p, self.said(), self.tag, "launch").map(|_permit| ())
        })
    }

    /// Waits until all peers have read the area in the launch before.
    fn granted(&self, area: Area) -> Result<Permit> {
        for p in self.ctx.team().peers() {
            let at = self.run.flags.range(self.at.credit(area, p.idx()), 8);
            self.net.wait_flags(self.ctx, (p, at), self.number - 1, &mut [0], "credit")?;
        }
        // SAFETY: every peer has stored that it left the launch before, behind its last read of the
        // area; receive buffers of zero copy are open from the announcement on (`accepted`).
        Ok(unsafe { Permit::assume(self.ctx.team().size()) })
    }

    fn arrive(&self, area: Area, cut: &Cut, c: usize, dst: usize, phase: &str) -> Result<()> {
        if dst == self.me {
            return Ok(());
        }
        let at = self.run.flags.range(self.at.arrival(area, cut, self.me, c), 8);
        self.net.store_flag(self.ctx, (rank(dst), at), self.number, phase)
    }

    fn arrived(&self, area: Area, cut: &Cut, c: usize, src: usize, phase: &str) -> Result<()> {
        if src == self.me {
            return Ok(());
        }
        let at = self.run.flags.range(self.at.arrival(area, cut, src, c), 8);
        self.net.wait_flags(self.ctx, (rank(src), at), self.number, &mut [0], phase)
    }

    /// Stores my credit at all peers: I have read the area, and they may write to it in the next
    /// launch.
    fn leave(&self, area: Area) -> Result<()> {
        for p in self.ctx.team().peers() {
            let at = self.run.flags.range(self.at.credit(area, self.me), 8);
            self.net.store_flag(self.ctx, (p, at), self.number, "leave")?;
        }
        self.ended();
        Ok(())
    }

    fn ended(&self) {
        self.run.part.launches[self.slot / 2].store(self.number, Ordering::Relaxed);
    }

    /// Puts bytes to rank `dst`. My own records have the same places in my own areas, and need no
    /// transport.
    fn put(
        &self,
        permit: &Permit,
        (dst, offset): (usize, usize),
        bytes: &[u8],
        phase: &str,
    ) -> Result<()> {
        if dst != self.me {
            return self.net.put(self.ctx, permit, (rank(dst), offset), bytes, phase);
        }
        // SAFETY: places of my own records, which no peer uses.
        unsafe { self.ctx.write_local(offset, bytes) };
        Ok(())
    }
}

impl Run {
    fn begin<'a>(&'a self, l: &'a Launch, slot: usize) -> Result<Begun<'a>> {
        // Launches of a plan follow each other on a rank, replayed ones too.
        let number = self.part.launches[slot / 2].load(Ordering::Relaxed) + 1;
        let at = Schedule::new(&self.desc);
        let me = l.ctx.rank().idx();
        let begun =
            Begun { run: self, ctx: &l.ctx, net: &*l.net, at, me, number, tag: l.tag, slot };
        begun.announce()?;
        Ok(begun)
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
        let num = d.num_experts();
        let idx = read_idx(idx)?;
        if let Some(bad) = idx.iter().find(|&&e| e < -1 || e >= num as i64) {
            return Err(Error::invalid("`topk_idx` names an expert that does not exist")
                .op("ep_route")
                .of_team(ctx.team())
                .rank(ctx.rank())
                .expected(format_args!("-1 or 0 to {}", num as i64 - 1))
                .seen(bad));
        }
        let b = self.begin(l, COUNTS.0)?;
        let all = self.exchange_counts(&b, count(d, &idx))?;
        b.accepted()?;
        b.ended();
        let routing = route(d, b.me, &idx, &all, capacity);
        set_i64(handle.m_splits(), &routing.m_splits)?;
        set_i64(handle.total(), &[routing.offsets.last().copied().unwrap_or(0)])?;
        set_i64(handle.dropped(), &[routing.dropped[b.me]])?;
        let mut state = handle.state();
        state.routing = routing;
        state.arrived = Vec::new();
        Ok(())
    }

    /// Puts my counts to every rank and returns the counts of all ranks. Launch number and count
    /// are one word, so there is nothing else to order, and two buffers in turn need no credit.
    fn exchange_counts(&self, b: &Begun<'_>, mine: Vec<u32>) -> Result<Vec<Vec<u32>>> {
        let (size, num) = (self.desc.experts_per_rank.len(), mine.len());
        let place = |writer| self.counts.range(b.at.counts(b.number, writer), b.at.count_bytes());
        let mut words: Vec<u64> = mine.iter().map(|&c| b.number << 32 | u64::from(c)).collect();
        for r in b.at.ranks(b.me) {
            if r == b.me {
                // SAFETY: the row of my own counts, which no peer uses.
                unsafe { b.ctx.write_local(place(b.me), bytemuck::cast_slice(&words)) };
            } else {
                b.net.put_flags(b.ctx, (rank(r), place(b.me)), &words, "counts")?;
            }
        }
        let mut all = vec![vec![0u32; num]; size];
        for p in b.ctx.team().peers() {
            let from = (p, place(p.idx()));
            b.net.wait_flags(b.ctx, from, b.number << 32, &mut words, "counts")?;
            all[p.idx()].iter_mut().zip(&words).for_each(|(c, w)| *c = *w as u32);
        }
        all[b.me] = mine;
        Ok(all)
    }

    /// Runs a dispatch-type phase: sends one record per (token, rank), receives rows.
    pub fn push_rows(
        &self,
        l: &Launch,
        handle: &EpHandle,
        (send, out): (&Push, &Out),
        straight: Option<&Straight>,
    ) -> Result<()> {
        // Peers write there from the announcement on, so no reader of this rank may.
        let memory = straight.map(|s| &s.memory);
        let rows = memory.map(|m: &Memory| m.write("received x")).transpose()?;
        let b = self.begin(l, TOKENS.0)?;
        let sends = {
            let s = handle.state();
            let rows = send.x.shape().dim(0);
            if s.routing.sends.len() != l.ctx.team().size() || s.routing.num_tokens != rows {
                return Err(Error::invalid(
                    "the number of tokens differs from that of the routing",
                )
                .expected(format_args!("{} tokens", s.routing.num_tokens))
                .seen(format_args!("{rows} tokens")));
            }
            s.routing.sends.clone()
        };
        let permit = b.granted(Area::Tokens)?;
        if straight.is_some() {
            b.accepted()?;
        }
        send.x.read(|x| self.push((&b, &permit), send, (x, &sends), straight))??;
        if straight.is_none() {
            b.accepted()?;
        }
        let came = self.receive(&b, send.x.dtype(), straight.is_some())?;
        b.leave(Area::Tokens)?;
        l.ctx.compute("unpack")?;
        let arrived = came.store(&self.desc, out, handle, rows)?;
        handle.state().arrived = arrived;
        Ok(())
    }

    /// Puts, chunk by chunk, a record of each of my tokens to each rank that has a kept copy of it.
    fn push(
        &self,
        (b, permit): (&Begun<'_>, &Permit),
        send: &Push,
        (x, sends): (&[u8], &[Vec<Sent>]),
        straight: Option<&Straight>,
    ) -> Result<()> {
        let d = &self.desc;
        let weights = send.weights.as_ref().map(Tensor::to_f32).transpose()?;
        let scales = send.scales.as_ref().map(|s| s.read(<[u8]>::to_vec)).transpose()?;
        let (row_bytes, cut) = (d.hidden * send.x.dtype().size(), &self.part.cuts[0]);
        let mut next = vec![0; sends.len()];
        let mut metas = Vec::with_capacity(d.top_k);
        for c in 0..cut.chunks {
            for token in cut.tokens(c, send.x.shape().dim(0)) {
                for dst in b.at.ranks(b.me) {
                    let Some((_, copies)) = sends[dst].get(next[dst]).filter(|s| s.0 == token)
                    else {
                        continue;
                    };
                    next[dst] += 1;
                    let record = b.at.record(b.me, token);
                    let weight =
                        |choice| weights.as_ref().map_or(0.0, |w| w[token * d.top_k + choice]);
                    metas.clear();
                    metas.extend(copies.iter().map(|&(choice, row)| Copy16 {
                        choice: choice as i32,
                        row: row as i32,
                        weight: weight(choice),
                        stamp: b.number as u32,
                    }));
                    let bytes: &[u8] = bytemuck::cast_slice(&metas);
                    let to = (dst, self.tokens.range(b.at.meta(record), bytes.len()));
                    b.put(permit, to, bytes, "push")?;
                    if let Some(s) = &scales {
                        let s = &s[4 * d.num_scales * token..][..4 * d.num_scales];
                        let to = (dst, self.tokens.range(b.at.scales(record), s.len()));
                        b.put(permit, to, s, "push")?;
                    }
                    let to = match straight {
                        None => self.tokens.range(b.at.row(record), row_bytes),
                        Some(s) => s.offset(self.kept_row(record, copies[0].1), row_bytes),
                    };
                    b.put(permit, (dst, to), &x[token * row_bytes..][..row_bytes], "push")?;
                }
            }
            b.at.ranks(b.me).try_for_each(|dst| b.arrive(Area::Tokens, cut, c, dst, "tokens"))?;
        }
        Ok(())
    }

    /// Returns the row of a receive buffer for a record whose first copy has row `first`.
    fn kept_row(&self, record: usize, first: usize) -> usize {
        match self.desc.layout {
            EpLayout::RankMajor { .. } => record,
            _ => first,
        }
    }

    /// Reads the records out of the area, chunk by chunk, as chunks arrive.
    fn receive(&self, b: &Begun<'_>, dtype: DType, straight: bool) -> Result<Came> {
        let (d, cut) = (&self.desc, &self.part.cuts[0]);
        let mut came = Came::new(d, dtype, straight);
        let mut metas = Vec::new();
        for (c, src) in b.at.visits(b.me, cut) {
            b.arrived(Area::Tokens, cut, c, src, "tokens")?;
            let tokens = cut.tokens(c, d.max_tokens);
            let stride = b.at.strides().meta;
            metas.resize(tokens.len() * stride, 0);
            let first = b.at.meta(b.at.record(src, tokens.start));
            // SAFETY: the chunk has arrived, and its writer waits for this rank to leave.
            unsafe { b.ctx.read_local(self.tokens.range(first, metas.len()), &mut metas) };
            for (token, meta) in tokens.zip(metas.chunks_exact(stride)) {
                let row = b.at.row(b.at.record(src, token));
                came.record(d, (src, token), (meta, b.number as u32), |row_out| {
                    let at = self.tokens.range(row, row_out.len());
                    // SAFETY: as above.
                    unsafe { b.ctx.read_local(at, row_out) };
                })?;
            }
        }
        Ok(came)
    }

    /// Runs a combine-type phase: returns one row per record, and adds the rows of my tokens.
    pub fn return_rows(&self, l: &Launch, handle: &EpHandle, back: &Return) -> Result<()> {
        let (ctx, d, cut) = (&l.ctx, &self.desc, &self.part.cuts[1]);
        let b = self.begin(l, RETURNS.0)?;
        let (arrived, sends, rows) = {
            let s = handle.state();
            (s.arrived.clone(), s.routing.sends.clone(), s.routing.num_tokens)
        };
        if arrived.len() != ctx.team().size() {
            return Err(Error::invalid("no dispatch has run with this handle"));
        }
        if back.out.shape().dim(0) != rows {
            return Err(Error::invalid(
                "the number of the output's rows differs from that of the routed tokens",
            )
            .expected(rows)
            .seen(back.out.shape().dim(0)));
        }
        let permit = b.granted(Area::Returns)?;
        let mut reduce = Reduce::new(d, back, &arrived)?;
        for (c, dst) in b.at.visits(b.me, cut) {
            let tokens = cut.tokens(c, d.max_tokens);
            for i in within(&arrived[dst], &tokens, |r| r.token) {
                let record = b.at.record(b.me, arrived[dst][i].token);
                let (row, grads) = reduce.record(dst, i);
                let to = (dst, self.returns.range(b.at.returned(record), row.len()));
                b.put(&permit, to, row, "return")?;
                if let Some(g) = grads {
                    let g: &[u8] = bytemuck::cast_slice(g);
                    let to = (dst, self.returns.range(b.at.grads(record), g.len()));
                    b.put(&permit, to, g, "return")?;
                }
            }
            b.arrive(Area::Returns, cut, c, dst, "returns")?;
        }
        b.accepted()?;
        let mut sums = Sums::new(d, back)?;
        for c in 0..cut.chunks {
            for src in b.at.ranks(b.me) {
                b.arrived(Area::Returns, cut, c, src, "returns")?;
            }
            ctx.compute("sum")?;
            sums.add(&sends, &cut.tokens(c, d.max_tokens), |src, token, row, grads| {
                let record = b.at.record(src, token);
                let grads: &mut [u8] = bytemuck::cast_slice_mut(grads);
                let at = self.returns.range(b.at.returned(record), row.len());
                let grads_at = self.returns.range(b.at.grads(record), grads.len());
                // SAFETY: the chunk has arrived, and its writer waits for this rank to leave.
                unsafe {
                    ctx.read_local(at, row);
                    ctx.read_local(grads_at, grads);
                }
            });
        }
        b.leave(Area::Returns)?;
        sums.store(back)
    }
}
