//! Threads that wait for launches on the CPU and tell XLA.
//!
//! Setting a future may run whatever XLA does next on the same thread: kernels, callbacks to
//! Python, collectives of XLA's own that wait for other devices. So there is a thread for each
//! launch in flight, used again when it is idle: no launch waits for another one's thread.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use tilewire::prelude::*;

type Job = Box<dyn FnOnce() + Send>;

/// Threads without work, as the way to give them some. They stay as long as the process.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// A thread that has nothing else to do until it is given a job or dropped.
pub struct Waiter(Option<Sender<Job>>);

/// A thread for a launch to come: asked for before it, as nothing can be taken back behind it.
///
/// # Errors
/// `Exhausted` if the operating system gives no thread.
pub fn reserve() -> Result<Waiter> {
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    idle.map_or_else(start, Ok).map(|tx| Waiter(Some(tx)))
}

impl Waiter {
    /// Runs `job` on the thread, or here if that has ended, which a job's panic does.
    pub fn run(mut self, job: Job) {
        if let Some(Err(back)) = self.0.take().map(|tx| tx.send(job)) {
            (back.0)();
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(self.0.take());
    }
}

fn start() -> Result<Sender<Job>> {
    let (tx, rx) = channel::<Job>();
    let back = tx.clone();
    let work = move || {
        while let Ok(job) = rx.recv() {
            job();
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(back.clone());
        }
    };
    let named = std::thread::Builder::new().name("tilewire-jax".to_owned());
    named.spawn(work).map(|_| tx).map_err(|e| {
        Error::new(ErrorKind::Exhausted, format!("the thread of a launch cannot be started: {e}"))
    })
}
