//! The transfer of all ranks' keys and values to this rank, on devices.

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaMemory;

use super::run::DeviceRun;
use crate::cp_attention::config::Strategy;
use crate::cp_attention::launch::{KEYS, MEET_KEYS};
use crate::cp_attention::pieces::AREA;

impl DeviceRun<'_> {
    /// Gets the published keys to private memory, on the copy stream.
    pub(super) fn get_keys(&self, with_own: bool) -> Result<()> {
        self.transfers().get_keys(self.l.side, &mut self.op.p.memory.keys.clone(), with_own)
    }

    /// Queues the transfers of the other ranks' keys on the copy stream. In the backward pass it
    /// also copies my own keys to their place among all.
    pub(super) fn begin_keys(&self, backward: bool) -> Result<()> {
        let (t, own, side) = (self.transfers(), self.own_keys()?, self.l.side);
        match self.s.strategy {
            Strategy::AllGather => {
                t.push_keys(side, &own)?;
                let own = own.iter().zip(t.own_places()).filter(|_| backward);
                own.into_iter().try_for_each(|(k, at)| t.publish(self.main(), AREA, at, k))
            }
            Strategy::Ring => {
                t.pass_keys(side, &own, &mut self.op.p.memory.keys.clone())?;
                if !backward {
                    return Ok(());
                }
                let first = self.pieces().first_key(self.me().idx());
                let place = self.dense(first..first + self.op.rows.kv)?;
                place.iter().zip(&own).try_for_each(|(to, from)| side.copy_memory(to, from))
            }
            _ => {
                t.publish_keys(self.main(), &own)?;
                self.meet(MEET_KEYS)?;
                self.l.fork()?;
                self.get_keys(backward)
            }
        }
    }

    /// Returns these rows of the keys of all ranks.
    fn dense(&self, rows: std::ops::Range<usize>) -> Result<Vec<CudaMemory>> {
        let row = |bytes: &usize| self.s.hkv * bytes;
        let part =
            |(m, b): (&CudaMemory, &usize)| m.slice(rows.start * row(b), rows.len() * row(b));
        self.op.p.memory.keys.iter().zip(&self.s.wire).map(part).collect()
    }

    /// Waits for the other ranks' keys. A launch that reads none of them waits, too: the flags of
    /// all launches are counted, and what the copy stream does is done when a launch ends.
    pub(super) fn wait_keys(&self) -> Result<()> {
        match self.s.strategy {
            Strategy::AllGather => {
                self.l.net.wait_peers(self.main(), self.op.signals.slot(KEYS), "keys")
            }
            _ => self.l.join(),
        }
    }

    /// Waits for the keys, and returns the addresses at which kernels behind this point read the
    /// keys of all ranks.
    pub(super) fn end_keys(&self) -> Result<(u64, u64)> {
        let (s, m) = (self.s, &self.op.p.memory);
        self.wait_keys()?;
        if s.strategy != Strategy::AllGather {
            let at: Vec<u64> = m.keys.iter().map(CudaMemory::addr).collect();
            return self.wide_keys(&at);
        }
        self.wide_keys(&self.area()?)
    }

    /// Returns the addresses of the tensors of all ranks' keys that are pushed here.
    fn area(&self) -> Result<Vec<u64>> {
        let (places, keys) = (self.s.published().1, self.s.all_keys() * self.s.all_kv);
        let addr = |(at, bytes): (usize, &usize)| self.own(AREA, at, keys * bytes);
        places.into_iter().zip(&self.s.wire).map(addr).collect()
    }

    /// Returns the addresses of the keys and values of all ranks, which are pushed here as they
    /// are.
    pub(super) fn pushed_keys(&self) -> Result<(u64, u64)> {
        match self.area()?[..] {
            [k, v] => Ok((k, v)),
            _ => Err(Error::internal("keys that travel with scales, at gates")),
        }
    }
}
