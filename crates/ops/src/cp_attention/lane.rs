//! The copy lane: it does what the compute lane asks for, in order. The queue between them is the
//! host's stand-in for an event per chunk.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{Error, Rank, Result};
use tilewire_symm::{OpCtx, SignalSlot, Signals};

use super::plan::{CREDIT_KV, DATA_KV};
use crate::common::receive;

/// What a put sends.
pub(super) enum Bytes {
    /// Bytes of this rank's own.
    Own(Arc<Vec<u8>>),
    /// A range of my chunk of the heap, at an offset: a message that is passed on.
    Local(usize, usize),
}

/// A piece of work for the copy lane.
pub(super) enum Job {
    /// Take `dst`'s credit, put each part at its heap offset, signal.
    Send {
        dst: Rank,
        credit: usize,
        puts: Vec<(usize, Bytes)>,
        data: usize,
        /// Told when the puts are made: then their source may be overwritten.
        ack: Option<Sender<()>>,
    },
    /// Take the credit of all `readers`, write at my own offset, signal them.
    Publish { readers: Vec<Rank>, at: usize, bytes: Arc<Vec<u8>> },
    /// Wait until `src` has published, get the parts (relative to `at`), hand over the area.
    Fetch { src: Rank, at: usize, len: usize, parts: Vec<Range<usize>>, reply: Sender<Vec<u8>> },
    /// Nothing more in this launch.
    End,
}

/// The queue.
pub(super) struct Queue {
    tx: Mutex<Sender<Job>>,
    rx: Mutex<Receiver<Job>>,
}

impl Queue {
    pub fn new() -> Self {
        let (tx, rx) = channel();
        Self { tx: Mutex::new(tx), rx: Mutex::new(rx) }
    }

    pub fn push(&self, job: Job) -> Result<()> {
        let tx = self.tx.lock().unwrap_or_else(PoisonError::into_inner);
        tx.send(job).map_err(|_| Error::internal("the copy lane is gone"))
    }

    /// Does all jobs of a launch.
    pub fn drain(&self, ctx: &OpCtx, signals: &Signals, tag: u64) -> Result<()> {
        let rx = self.rx.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = |i| signals.slot(i);
        loop {
            match receive(&rx, ctx)? {
                Job::End => return Ok(()),
                Job::Send { dst, credit, puts, data, ack } => {
                    send(ctx, (dst, slot(credit), slot(data)), tag, &puts)?;
                    if let Some(ack) = ack {
                        // A compute lane that has failed does not listen any more.
                        ack.send(()).ok();
                    }
                }
                Job::Publish { readers, at, bytes } => {
                    for &r in &readers {
                        ctx.acquire(r, slot(CREDIT_KV), tag, "kv credit")?;
                    }
                    ctx.write_local(at, &bytes);
                    readers.iter().for_each(|&r| ctx.signal(r, slot(DATA_KV), 1, "publish"));
                }
                Job::Fetch { src, at, len, parts, reply } => {
                    ctx.wait_last(src, slot(DATA_KV), 1, "publish")?;
                    let mut area = vec![tilewire_core::DType::POISON; len];
                    for p in parts {
                        ctx.get(src, at + p.start, &mut area[p.clone()], "fetch");
                    }
                    reply.send(area).ok();
                }
            }
        }
    }
}

fn send(
    ctx: &OpCtx,
    (dst, credit, data): (Rank, SignalSlot, SignalSlot),
    tag: u64,
    puts: &[(usize, Bytes)],
) -> Result<()> {
    ctx.acquire(dst, credit, tag, "credit")?;
    for (at, bytes) in puts {
        match bytes {
            Bytes::Own(b) if b.is_empty() => {}
            Bytes::Own(b) => ctx.put(dst, *at, b, "push"),
            Bytes::Local(_, 0) => {}
            Bytes::Local(from, len) => {
                // SAFETY: the compute lane has waited for the message in this range before it asked
                // for this job, and grants its writer no credit for the range before it has the
                // acknowledgement that follows.
                ctx.put(dst, *at, unsafe { ctx.local(*from, *len) }, "forward");
            }
        }
    }
    ctx.signal(dst, data, 1, "arrival");
    Ok(())
}
