//! Signals by which a scheduler asks a job to write a checkpoint and end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::flag;
use tilewire::prelude::*;

/// Pause between looks for a first SIGTERM: the grace time may begin so much later.
const LOOK: Duration = Duration::from_millis(50);

/// The exit status of a process that SIGTERM has ended.
const TERMINATED: i32 = 128 + SIGTERM;

/// The wish to end, of this process.
#[derive(Clone, Default)]
pub struct Ending(Arc<AtomicUsize>);

impl Ending {
    /// Takes SIGUSR1 for the wish to end, and with `grace` SIGTERM as well: the process then ends
    /// with 143 if it is still there after that time, or at a second SIGTERM.
    ///
    /// # Errors
    /// `Io` if the operating system refuses.
    pub fn watch(grace: Option<Duration>) -> Result<Self> {
        let io = |e| Error::io("watching for signals", e);
        let asked = Arc::new(AtomicUsize::new(0));
        flag::register_usize(SIGUSR1, asked.clone(), SIGUSR1 as usize).map_err(io)?;
        let Some(grace) = grace else { return Ok(Self(asked)) };
        let armed = Arc::new(AtomicBool::new(false));
        // In this order: the second signal finds what the first has set.
        flag::register_conditional_shutdown(SIGTERM, TERMINATED, armed.clone()).map_err(io)?;
        flag::register(SIGTERM, armed.clone()).map_err(io)?;
        flag::register_usize(SIGTERM, asked.clone(), SIGTERM as usize).map_err(io)?;
        let wait = move || {
            while !armed.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
            }
            std::thread::sleep(grace);
            std::process::exit(TERMINATED)
        };
        std::thread::Builder::new().name("grace".to_owned()).spawn(wait).map_err(io)?;
        Ok(Self(asked))
    }

    /// The name of the signal that has come, if any.
    pub fn asked(&self) -> Option<&'static str> {
        match self.0.load(Ordering::Relaxed) as i32 {
            SIGUSR1 => Some("SIGUSR1"),
            SIGTERM => Some("SIGTERM"),
            _ => None,
        }
    }
}
