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

/// Runs `job` on a thread that does nothing else meanwhile.
///
/// # Errors
/// `Exhausted` if the operating system gives no thread; `job` is dropped then.
pub fn run(job: Job) -> Result<()> {
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    match idle {
        None => start(job),
        // Its receiver is gone only if a job panicked, which ends the thread.
        Some(idle) => idle.send(job).or_else(|back| start(back.0)),
    }
}

fn start(first: Job) -> Result<()> {
    let (tx, rx) = channel::<Job>();
    let work = move || {
        first();
        loop {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(tx.clone());
            match rx.recv() {
                Ok(job) => job(),
                Err(_) => return,
            }
        }
    };
    let named = std::thread::Builder::new().name("tilewire-jax".to_owned());
    named
        .spawn(work)
        .map(drop)
        .map_err(|e| Error::new(ErrorKind::Exhausted, format!("a thread for a launch: {e}")))
}
