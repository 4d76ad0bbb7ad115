//! The copy lane: it does what the compute lane asks for, in order. The queue between them is the
//! host's stand-in for an event per chunk.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{Error, Rank, Result};
use tilewire_symm::{SignalSlot, Signals};

use super::plan::{CREDIT_KV, DATA_KV};
use crate::common::{Launch, receive};

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
    pub fn drain(&self, launch: &Launch, signals: &Signals) -> Result<()> {
        let Launch { ctx, net, tag } = launch;
        let rx = self.rx.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = |i| signals.slot(i);
        loop {
            match receive(&rx, ctx)? {
                Job::End => return Ok(()),
                Job::Send { dst, credit, puts, data, ack } => {
                    send(launch, (dst, slot(credit), slot(data)), &puts)?;
                    if let Some(ack) = ack {
                        // A compute lane that has failed does not listen any more.
                        ack.send(()).ok();
                    }
                }
                Job::Publish { readers, at, bytes } => {
                    for &r in &readers {
                        let _read = net.acquire(ctx, r, slot(CREDIT_KV), *tag, "kv credit")?;
                    }
                    // SAFETY: all readers have granted the range: they read it before this launch.
                    unsafe { ctx.write_local(at, &bytes) };
                    for &r in &readers {
                        net.signal(ctx, r, slot(DATA_KV), 1, "publish")?;
                    }
                }
                Job::Fetch { src, at, len, parts, reply } => {
                    net.wait_last(ctx, src, slot(DATA_KV), 1, "publish")?;
                    let mut area = vec![tilewire_core::DType::POISON; len];
                    for p in parts {
                        let (from, out) = ((src, at + p.start), &mut area[p]);
                        // SAFETY: `src` has published its area, and writes it again when this rank
                        // has granted that, at the head of the next launch.
                        unsafe { net.get(ctx, from, out, "fetch")? };
                    }
                    reply.send(area).ok();
                }
            }
        }
    }
}

fn send(
    Launch { ctx, net, tag }: &Launch,
    (dst, credit, data): (Rank, SignalSlot, SignalSlot),
    puts: &[(usize, Bytes)],
) -> Result<()> {
    let permit = net.acquire(ctx, dst, credit, *tag, "credit")?;
    for (at, bytes) in puts {
        match bytes {
            Bytes::Own(b) if b.is_empty() => {}
            Bytes::Own(b) => net.put(ctx, &permit, (dst, *at), b, "push")?,
            Bytes::Local(_, 0) => {}
            Bytes::Local(from, len) => {
                // SAFETY: the compute lane has waited for the message in this range before it asked
                // for this job, and grants its writer no credit for the range before it has the
                // acknowledgement that follows.
                unsafe { net.pass(ctx, &permit, (dst, *at), (*from, *len), "forward")? };
            }
        }
    }
    net.signal(ctx, dst, data, 1, "arrival")
}
