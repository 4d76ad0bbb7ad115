//! A queue from one lane of a launch to the other, on the host, in place of an event between two
//! streams.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tilewire_core::{Error, Result};
use tilewire_symm::OpCtx;

/// A local queue between the lanes.
pub(crate) struct Handoff<T> {
    tx: Mutex<Sender<T>>,
    rx: Mutex<Receiver<T>>,
}

impl<T> Handoff<T> {
    pub fn new() -> Self {
        let (tx, rx) = channel();
        Self { tx: Mutex::new(tx), rx: Mutex::new(rx) }
    }

    pub fn send(&self, thing: T) -> Result<()> {
        let tx = self.tx.lock().unwrap_or_else(PoisonError::into_inner);
        tx.send(thing).map_err(|_| Error::internal("the other lane of the launch has ended"))
    }

    /// Waits for the next value. Returns the fault of the team if that is set first.
    pub fn receive(&self, ctx: &OpCtx) -> Result<T> {
        receive(&self.rx.lock().unwrap_or_else(PoisonError::into_inner), ctx)
    }
}

/// Waits for a value from the other lane. Returns the fault of the team if that is set first.
fn receive<T>(rx: &Receiver<T>, ctx: &OpCtx) -> Result<T> {
    loop {
        match rx.recv_timeout(Duration::from_millis(20)) {
            Ok(v) => return Ok(v),
            // The other lane will never send once the team is faulted.
            Err(RecvTimeoutError::Timeout) => ctx.team().fault().check()?,
            Err(RecvTimeoutError::Disconnected) => {
                ctx.team().fault().check()?;
                return Err(Error::internal("the other lane of the launch has ended"));
            }
        }
    }
}
