//! Keys and values between groups: `get`, ring or all-gather, as the compute lane sees it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use tilewire_core::{Error, Rank, Result};

use super::config::{CpTask, Schedule, Strategy, num_rows};
use super::host::Run;
use super::lane::{Bytes, Job};
use super::plan::{CREDIT_KV, DATA_KV};
use crate::common::{Launch, receive};

/// Where the keys of a group are.
enum Area {
    /// Mine.
    Own,
    /// Fetched by the copy lane.
    Fetched(Vec<u8>),
    /// A range of my chunk of the heap.
    Local(usize, usize),
}

/// State of one exchange.
struct Arrivals {
    /// `get`: answers of the copy lane, in the order of the tasks.
    fetches: std::collections::VecDeque<Receiver<Vec<u8>>>,
    /// Ring: number of messages that have come.
    hop: usize,
    /// Ring: the message in use has been passed on.
    passed: Option<Receiver<()>>,
}

/// Messages of a ring of `n` groups whose slots are free when a launch begins.
fn first_grants(n: usize) -> usize {
    (n - 1).min(2)
}

impl Run {
    fn area_bytes(&self, owner: usize) -> usize {
        num_rows(&self.sched.areas[owner]) * self.kv_row_bytes()
    }

    /// Heap offset of slot `i` of the area buffer.
    fn slot(&self, i: usize, len: usize) -> usize {
        self.buf.area.range(i * self.buf.area_stride, len)
    }

    fn next(&self) -> Rank {
        let g = &self.sched.grid;
        g.counterpart((g.group + 1) % g.outer)
    }

    fn previous(&self) -> Rank {
        let g = &self.sched.grid;
        g.counterpart((g.group + g.outer - 1) % g.outer)
    }

    /// Grants the credits of the exchange: my buffers are free, the previous launch on this stream
    /// has read them.
    pub(super) fn grant_exchange(&self) -> Result<()> {
        let g = &self.sched.grid;
        match self.sched.strategy {
            _ if g.outer == 1 => Ok(()),
            Strategy::Ring | Strategy::Hybrid => {
                let grant = |_| self.grant(self.previous(), CREDIT_KV, "slot credit");
                (0..first_grants(g.outer)).try_for_each(grant)
            }
            _ => g
                .other_groups()
                .try_for_each(|o| self.grant(g.counterpart(o), CREDIT_KV, "kv credit")),
        }
    }

    /// Calls `f(owner, keys)` for every group in the order of the tasks; mine is `area`.
    pub(super) fn exchange(
        &self,
        area: &Arc<Vec<u8>>,
        mut f: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut arrivals = self.start(area)?;
        let mut current = Area::Own;
        for task in &self.sched.tasks {
            match task {
                CpTask::Wait { src, owner } => {
                    current = self.arrive(*src, *owner, &mut arrivals)?;
                }
                CpTask::Attend { owner } => {
                    self.launch.ctx.compute("attend")?;
                    match &current {
                        Area::Own => f(*owner, area)?,
                        Area::Fetched(bytes) => f(*owner, bytes)?,
                        Area::Local(at, len) => {
                            // SAFETY: the writer of the range has signalled (`arrive`), and gets no
                            // credit for it before the next launch, or before `release` below.
                            f(*owner, unsafe { self.launch.ctx.local(*at, *len) })?;
                        }
                    }
                    self.release(&mut arrivals)?;
                }
            }
        }
        Ok(())
    }

    /// Asks the copy lane for everything that does not depend on an arrival.
    fn start(&self, area: &Arc<Vec<u8>>) -> Result<Arrivals> {
        let g = &self.sched.grid;
        let mut a = Arrivals { fetches: Default::default(), hop: 0, passed: None };
        if g.outer == 1 {
            return Ok(a);
        }
        match self.sched.strategy {
            Strategy::Get => {
                let readers = g.other_groups().map(|o| g.counterpart(o)).collect();
                let at = self.slot(0, area.len());
                self.queue.push(Job::Publish { readers, at, bytes: area.clone() })?;
                for owner in g.other_groups() {
                    let (reply, rx) = channel();
                    let len = self.area_bytes(owner);
                    let parts = self.needed_parts(owner);
                    let (src, at) = (g.counterpart(owner), self.slot(0, len));
                    self.queue.push(Job::Fetch { src, at, len, parts, reply })?;
                    a.fetches.push_back(rx);
                }
            }
            Strategy::AllGather => {
                for o in g.other_groups() {
                    let at = self.slot(g.group, area.len());
                    self.send(g.counterpart(o), at, Bytes::Own(area.clone()), None)?;
                }
            }
            _ => {
                self.send(self.next(), self.slot(0, area.len()), Bytes::Own(area.clone()), None)?
            }
        }
        Ok(a)
    }

    fn needed_parts(&self, owner: usize) -> Vec<Range<usize>> {
        let (area, needed) = (&self.sched.areas[owner], &self.sched.needed[owner]);
        let parts = Schedule::parts(area, needed, self.kv_row_bytes());
        parts.into_iter().map(|(bytes, _)| bytes).collect()
    }

    fn send(
        &self,
        dst: Rank,
        at: usize,
        bytes: Bytes,
        ack: Option<std::sync::mpsc::Sender<()>>,
    ) -> Result<()> {
        let puts = vec![(at, bytes)];
        self.queue.push(Job::Send { dst, credit: CREDIT_KV, puts, data: DATA_KV, ack })
    }

    /// Waits for the keys of `owner`.
    fn arrive(&self, src: Rank, owner: usize, a: &mut Arrivals) -> Result<Area> {
        let (Launch { ctx, net, .. }, len) = (&self.launch, self.area_bytes(owner));
        let slot = self.signals.slot(DATA_KV);
        match self.sched.strategy {
            Strategy::Get => {
                let gone = || Error::internal("a fetch that was not asked for");
                let rx = a.fetches.pop_front().ok_or_else(gone)?;
                Ok(Area::Fetched(receive(&rx, ctx)?))
            }
            Strategy::AllGather => {
                net.wait_last(ctx, src, slot, 1, "arrival")?;
                Ok(Area::Local(self.slot(owner, len), len))
            }
            _ => {
                let last = self.sched.grid.outer - 2;
                match a.hop == last {
                    true => net.wait_last(ctx, src, slot, 1, "hop")?,
                    false => net.wait(ctx, src, slot, 1, "hop")?,
                }
                let at = self.slot(a.hop % 2, len);
                if a.hop < last {
                    let (tx, rx) = channel();
                    let to = self.slot((a.hop + 1) % 2, len);
                    self.send(self.next(), to, Bytes::Local(at, len), Some(tx))?;
                    a.passed = Some(rx);
                }
                a.hop += 1;
                Ok(Area::Local(at, len))
            }
        }
    }

    /// Ring: a message that is used and passed on makes room for the next but one.
    fn release(&self, a: &mut Arrivals) -> Result<()> {
        let Some(passed) = a.passed.take() else { return Ok(()) };
        receive(&passed, &self.launch.ctx)?;
        // `hop` messages have come; the slot of the last is for message `hop + 1`.
        if a.hop + 1 < self.sched.grid.outer - 1 {
            self.grant(self.previous(), CREDIT_KV, "slot credit")?;
        }
        Ok(())
    }
}
