//! One connection of a store's server: what has been read, what has to be written.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use tilewire_core::{Error, Result};

use super::wire::{self, MAX_BODY, MAX_HELLO};
use crate::handshake::HELLO_LIMIT;
use crate::secret::Nonce;

/// The progress of a connection through its handshake.
pub(super) enum Stage {
    Hello,
    Proof {
        client: Nonce,
        server: Nonce,
    },
    Ready,
    /// A `get` that waits for its key.
    Waiting {
        key: String,
        until: Instant,
    },
}

/// One connection of a server.
pub(super) struct Conn {
    pub sock: OwnedFd,
    pub born: Instant,
    /// The user of a process of this host, where the kernel tells.
    pub user: Option<u32>,
    pub stage: Stage,
    pub input: Vec<u8>,
    pub output: Vec<u8>,
}

impl Conn {
    pub fn half_open(&self) -> bool {
        matches!(self.stage, Stage::Hello | Stage::Proof { .. })
    }

    pub fn alarm(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Hello | Stage::Proof { .. } => Some(self.born + HELLO_LIMIT),
            Stage::Waiting { until, .. } => Some(*until),
            Stage::Ready => None,
        }
    }

    pub fn interest(&self) -> PollFlags {
        if self.output.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    pub fn say(&mut self, body: &[u8]) {
        self.output.extend(wire::frame(body));
    }

    /// Reads what is there, up to one message more than a whole one. False at the end of the
    /// stream.
    pub fn fill(&mut self) -> Result<bool> {
        let mut chunk = vec![0u8; 64 << 10];
        let max = if self.half_open() { MAX_HELLO } else { MAX_BODY } + 4;
        while self.input.len() < max {
            match rustix::io::read(&self.sock, &mut chunk) {
                Ok(0) => return Ok(false),
                Ok(n) => self.input.extend(&chunk[..n]),
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("reading", e)),
            }
        }
        Ok(true)
    }

    pub fn flush(&mut self) -> Result<()> {
        while !self.output.is_empty() {
            match rustix::net::send(&self.sock, &self.output, rustix::net::SendFlags::NOSIGNAL) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("writing", e)),
            }
        }
        Ok(())
    }
}
