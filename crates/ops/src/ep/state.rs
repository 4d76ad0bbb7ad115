//! A handle saved as bytes of the caller's.
//!
//! A framework that schedules by data alone (XLA) keeps no objects beside its arrays. There the
//! routing of a microbatch is an array that dispatch writes and every later phase reads, so that
//! XLA can keep it, recompute it and carry it through loops as any other value.
//!
//! The bytes begin with `m_splits` (i64 for each local expert), `total`, `dropped` (i64) and
//! `row_index` (i32 for each row of the capacity); the bytes behind them are private to the
//! backend.

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Stream, Tensor};

use super::EpDesc;
use super::handle::{Arrived, EpHandle, Record, State};
use super::routing::{Record as Sent, Routing};

/// A token and its copies.
type Of<'a> = (usize, &'a [(usize, usize)]);

/// Numbers of 32 bits, written and read in order.
#[derive(Default)]
struct Words(Vec<u32>);

impl Words {
    fn list(&mut self, list: &[usize]) {
        self.0.push(list.len() as u32);
        self.0.extend(list.iter().map(|&n| n as u32));
    }

    /// Writes each rank's records: a token, and choice and row of each of its copies.
    fn records<'a>(&mut self, ranks: impl ExactSizeIterator<Item = Vec<Of<'a>>>) {
        self.0.push(ranks.len() as u32);
        for records in ranks {
            self.0.push(records.len() as u32);
            for (token, copies) in records {
                self.0.extend([token as u32, copies.len() as u32]);
                self.0.extend(copies.iter().flat_map(|&(choice, row)| [choice as u32, row as u32]));
            }
        }
    }
}

struct Reader<'a>(std::slice::ChunksExact<'a, u8>);

impl Reader<'_> {
    fn next(&mut self) -> Result<usize> {
        let word = self.0.next().and_then(|c| c.try_into().ok()).map(u32::from_le_bytes);
        word.map(|w| w as usize).ok_or_else(broken)
    }

    fn many<T>(&mut self, one: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let num = self.next()?;
        // Read one by one: a number that is too large ends with the bytes.
        (0..num).map(|_| one(self)).collect()
    }

    fn list(&mut self) -> Result<Vec<usize>> {
        self.many(Self::next)
    }

    fn records<T>(&mut self, make: impl Fn(Sent) -> T) -> Result<Vec<Vec<T>>> {
        let one = |r: &mut Self| -> Result<T> {
            let token = r.next()?;
            Ok(make((token, r.many(|r| Ok((r.next()?, r.next()?)))?)))
        };
        self.many(|r| r.many(one))
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Corrupt, "these bytes are not the state of a routing")
        .op("ep")
        .hint("pass the handle that the dispatch returned, unchanged")
}

/// Returns the bytes of the tensors at the front.
fn front(desc: &EpDesc) -> usize {
    8 * most_experts(desc) + 16 + 4 * desc.capacity
}

fn most_experts(desc: &EpDesc) -> usize {
    desc.experts_per_rank.iter().max().copied().unwrap_or(0)
}

impl EpHandle {
    /// Returns the bytes that [`EpHandle::save`] takes: equal on all ranks.
    pub fn state_bytes(desc: &EpDesc) -> usize {
        let (size, local) = (desc.experts_per_rank.len(), most_experts(desc));
        let choices = desc.max_tokens * desc.top_k;
        // Records with one copy each take the most words: token, number, choice, row.
        let host = 4 * (16 + 4 * size + 4 * local + 4 * choices + 4 * size * choices);
        let device = 8 * choices
            + 8 * size * desc.max_tokens
            + 16 * size * choices
            + 4 * desc.capacity
            + 8 * local
            + 8 * size;
        front(desc) + host.max(device)
    }

    /// Copies the contents of the handle to `to`, `[state_bytes]` u8: on a device in the order of
    /// `stream`; on the host at once, so wait for the dispatch first.
    ///
    /// # Errors
    /// `InvalidArgument` for another tensor; the errors of the device.
    pub fn save(&self, stream: &Stream, to: &Tensor) -> Result<()> {
        self.check_state(to)?;
        if self.device().is_some() {
            return self.pieces(to, |mine, theirs| stream.cuda()?.copy_memory(theirs, mine));
        }
        let mut words = Words::default();
        {
            let s = self.state();
            let r = &s.routing;
            words.0.push(r.num_tokens as u32);
            words.records(r.sends.iter().map(|l| l.iter().map(|(t, c)| (*t, &c[..])).collect()));
            words.records(
                s.arrived.iter().map(|l| l.iter().map(|r| (r.token, &r.copies[..])).collect()),
            );
            for list in [&r.counts, &r.offsets, &r.m_splits, &r.dropped] {
                words.list(list);
            }
        }
        let mut bytes = Vec::with_capacity(to.len_bytes());
        for t in [self.m_splits(), self.total(), self.dropped(), self.row_index()] {
            t.read(|b| bytes.extend_from_slice(b))?;
        }
        bytes.resize(front(self.desc()), 0);
        bytes.extend(words.0.iter().flat_map(|w| w.to_le_bytes()));
        if bytes.len() > to.len_bytes() {
            return Err(Error::internal("the saved routing is larger than any can be"));
        }
        to.write(|b| {
            b[..bytes.len()].copy_from_slice(&bytes);
            b[bytes.len()..].fill(0);
        })
    }

    /// Loads the contents of the handle from `from`, which [`EpHandle::save`] of a handle of an
    /// equal layer has written on this rank for `tokens` tokens: on a device in the order of
    /// `stream`; on the host at once.
    ///
    /// # Errors
    /// `InvalidArgument` for another tensor; `Corrupt` for bytes that are no state.
    pub fn load(&self, stream: &Stream, from: &Tensor, tokens: usize) -> Result<()> {
        self.check_state(from)?;
        if self.device().is_some() {
            self.pieces(from, |mine, theirs| stream.cuda()?.copy_memory(mine, theirs))?;
        } else {
            let new = from.read(|b| decode(self.desc(), b))??;
            if new.routing.num_tokens != tokens {
                return Err(Error::invalid(
                    "the number of tokens differs from that of the routing",
                )
                .op("ep")
                .expected(new.routing.num_tokens)
                .seen(tokens));
            }
            let bytes = from.read(<[u8]>::to_vec)?;
            let mut at = 0;
            for t in [self.m_splits(), self.total(), self.dropped(), self.row_index()] {
                let len = t.len_bytes();
                t.write(|to| to.copy_from_slice(&bytes[at..at + len]))?;
                at += len;
            }
            *self.state() = new;
        }
        self.set_tokens(tokens, self.desc().capacity);
        // Equal on all ranks; the bytes identify the routing.
        self.set_routing(1);
        Ok(())
    }

    fn check_state(&self, t: &Tensor) -> Result<()> {
        let want = Self::state_bytes(self.desc());
        if t.len_bytes() == want {
            return Ok(());
        }
        Err(Error::invalid("a handle has the wrong size")
            .op("ep")
            .expected(format_args!("{want} bytes"))
            .seen(t.len_bytes()))
    }

    /// Calls `f` with each piece of this handle's device memory, and its place in `all`.
    fn pieces(
        &self,
        all: &Tensor,
        f: impl Fn(&CudaMemory, &CudaMemory) -> Result<()>,
    ) -> Result<()> {
        let (all, mut at) = (all.cuda()?, 0);
        let mut each = |mine: &CudaMemory, space: usize| -> Result<()> {
            if mine.len_bytes() > 0 {
                f(mine, &all.slice(at, mine.len_bytes())?)?;
            }
            at += space.max(mine.len_bytes());
            Ok(())
        };
        each(&self.m_splits().cuda()?, 8 * most_experts(self.desc()))?;
        for t in [self.total(), self.dropped(), self.row_index()] {
            each(&t.cuda()?, 0)?;
        }
        let Some(d) = self.device() else { return Ok(()) };
        [&d.rows, &d.ranks, &d.num, &d.copies, &d.source, &d.place, &d.counts, &d.lost]
            .into_iter()
            .try_for_each(|m| each(m, 0))
    }
}

fn decode(desc: &EpDesc, bytes: &[u8]) -> Result<State> {
    let words = bytes.get(front(desc)..).ok_or_else(broken)?;
    let mut r = Reader(words.chunks_exact(4));
    let num_tokens = r.next()?;
    let sends = r.records(|record| record)?;
    let arrived: Arrived = r.records(|(token, copies)| Record { token, copies })?;
    let (counts, offsets) = (r.list()?, r.list()?);
    let (m_splits, dropped) = (r.list()?, r.list()?);
    let routing = Routing { num_tokens, sends, counts, offsets, m_splits, dropped };
    let size = desc.experts_per_rank.len();
    if routing.sends.len() != size || routing.dropped.len() != size {
        return Err(broken());
    }
    Ok(State { routing, arrived })
}

#[cfg(test)]
mod tests {
    use tilewire_core::{BackendKind, DType, Shape};
    use tilewire_symm::{HeapCfg, World, WorldCfg};

    use super::*;
    use crate::ep::{EpDispatch, EpPlan};

    /// Checks that a combine on another plan, whose handle was loaded, gives the result of the
    /// first plan.
    #[test]
    fn a_phase_of_another_plan_goes_on_with_the_saved_state() {
        const TOKENS: usize = 7;
        const HIDDEN: usize = 4;
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let heap = world.everyone("state")?.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
            let stream = Stream::new("state")?;
            let mut desc = EpDesc::new(3, 6, TOKENS, HIDDEN, 2);
            (desc.dtype, desc.out) = (DType::F32, DType::F32);
            let plans = [EpPlan::new(desc.clone(), &heap)?, EpPlan::new(desc.clone(), &heap)?];
            plans.iter().try_for_each(|p| p.prepare(&stream))?;
            let me = world.rank().idx();
            let choices: Vec<i32> = (0..TOKENS)
                .flat_map(|t| [(t + me) % 6, (2 * t + 3 * me + 1) % 6])
                .map(|e| e as i32)
                .collect();
            let idx = Tensor::from_slice(&choices, Shape::d2(TOKENS, 2))?;
            let values: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| (i + 100 * me) as f32).collect();
            let x = Tensor::from_slice(&values, Shape::d2(TOKENS, HIDDEN))?;
            let rows = Tensor::zeros(DType::F32, Shape::d2(desc.recv_rows(), HIDDEN));
            let out = EpDispatch { x: rows.clone(), scales: None, weights: None };
            let first = plans[0].handle()?;
            plans[0].route(&stream, &idx, None, &first)?.wait()?;
            plans[0].dispatch(&stream, &first, &x, (None, None), &out)?.wait()?;
            let state = Tensor::zeros(DType::U8, Shape::d1(EpHandle::state_bytes(&desc)));
            first.save(&stream, &state)?;

            let second = plans[1].handle()?;
            let e = second.load(&stream, &state, TOKENS + 1).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            second.load(&stream, &state, TOKENS)?;
            let sums = Tensor::zeros(DType::F32, Shape::d2(TOKENS, HIDDEN));
            plans[1].combine(&stream, &second, &rows, None, &sums)?.wait()?;
            let twice: Vec<f32> = values.iter().map(|v| 2.0 * v).collect();
            assert_eq!(sums.to_vec::<f32>()?, twice);

            let broken = Tensor::zeros(DType::U8, Shape::d1(EpHandle::state_bytes(&desc)));
            let e = second.load(&stream, &broken, 0).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt);
            let short = Tensor::zeros(DType::U8, Shape::d1(8));
            assert!(second.load(&stream, &short, TOKENS).is_err());
            Ok(())
        })
        .unwrap();
    }
}
