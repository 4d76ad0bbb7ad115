//! Shows the output of the ranks line by line.

use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tilewire_core::{Error, Result};

use super::group::RankProcess;
use crate::sock::{self, Bell};

/// Lines of standard error that are kept per rank.
const TAIL: usize = 20;

/// A line that is longer is shown in pieces.
const MAX_LINE: usize = 64 << 10;

/// The thread that reads all pipes of all ranks.
///
/// One thread for all: a line is never torn by another rank's.
pub(super) struct Pump {
    thread: JoinHandle<Vec<Vec<String>>>,
    bell: Arc<Bell>,
    stop: Arc<AtomicBool>,
}

struct Pipe {
    fd: OwnedFd,
    rank: usize,
    is_err: bool,
    line: Vec<u8>,
}

struct Sink {
    prefix: bool,
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
    tails: Vec<VecDeque<String>>,
}

impl Pump {
    pub fn start(
        ranks: &mut [RankProcess],
        prefix: bool,
        out: Box<dyn Write + Send>,
        err: Box<dyn Write + Send>,
    ) -> Result<Self> {
        let mut pipes = Vec::new();
        for (rank, r) in ranks.iter_mut().enumerate() {
            let stdout = r.child.stdout.take().map(|p| (OwnedFd::from(p), false));
            let stderr = r.child.stderr.take().map(|p| (OwnedFd::from(p), true));
            for (fd, is_err) in stdout.into_iter().chain(stderr) {
                rustix::io::ioctl_fionbio(&fd, true)
                    .map_err(|e| Error::io("reading the output of a rank", e))?;
                pipes.push(Pipe { fd, rank, is_err, line: Vec::new() });
            }
        }
        let sink = Sink { prefix, out, err, tails: vec![VecDeque::new(); ranks.len()] };
        let (bell, stop) = (Arc::new(Bell::new()?), Arc::new(AtomicBool::new(false)));
        let (b, s) = (bell.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("tilewire-output".to_owned())
            .spawn(move || run(pipes, sink, &b, &s))
            .map_err(|e| Error::io("starting the output thread", e))?;
        Ok(Self { thread, bell, stop })
    }

    /// Shows what is still in the pipes; the last lines of each rank's standard error.
    ///
    /// Does not wait for the ends of the pipes: a process that left its session may hold them.
    pub fn finish(self) -> Vec<Vec<String>> {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        self.thread.join().unwrap_or_default()
    }
}

fn run(mut pipes: Vec<Pipe>, mut sink: Sink, bell: &Bell, stop: &AtomicBool) -> Vec<Vec<String>> {
    loop {
        let last = stop.load(Ordering::Acquire);
        if !last && !wait(&pipes, bell) {
            break;
        }
        pipes.retain_mut(|p| p.read(&mut sink));
        if last {
            break;
        }
    }
    for p in &mut pipes {
        p.rest(&mut sink);
    }
    sink.tails.into_iter().map(Vec::from).collect()
}

fn wait(pipes: &[Pipe], bell: &Bell) -> bool {
    let mut fds = vec![PollFd::new(bell.fd(), PollFlags::IN)];
    fds.extend(pipes.iter().map(|p| PollFd::new(&p.fd, PollFlags::IN)));
    sock::wait_any(&mut fds, None).is_ok()
}

impl Pipe {
    /// Reads what is there. False at the end of the pipe.
    fn read(&mut self, sink: &mut Sink) -> bool {
        let mut chunk = vec![0u8; 16 << 10];
        // A rank that writes without pause must not keep the others from being shown.
        for _ in 0..64 {
            match rustix::io::read(&self.fd, &mut chunk) {
                Ok(n) if n > 0 => self.take(&chunk[..n], sink),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Ok(_) | Err(_) => {
                    self.rest(sink);
                    return false;
                }
            }
        }
        true
    }

    fn take(&mut self, mut bytes: &[u8], sink: &mut Sink) {
        while let Some(at) = bytes.iter().position(|b| *b == b'\n') {
            self.line.extend(&bytes[..=at]);
            bytes = &bytes[at + 1..];
            self.show(sink);
        }
        self.line.extend(bytes);
        if self.line.len() >= MAX_LINE {
            self.rest(sink);
        }
    }

    /// Shows a line that has no end.
    fn rest(&mut self, sink: &mut Sink) {
        if !self.line.is_empty() {
            self.line.push(b'\n');
            self.show(sink);
        }
    }

    fn show(&mut self, sink: &mut Sink) {
        sink.show(self.rank, self.is_err, &self.line);
        self.line.clear();
    }
}

impl Sink {
    fn show(&mut self, rank: usize, is_err: bool, line: &[u8]) {
        if is_err {
            let tail = &mut self.tails[rank];
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
        }
        let mut text = if self.prefix { format!("[r{rank}] ").into_bytes() } else { Vec::new() };
        text.extend(line);
        let to = if is_err { &mut self.err } else { &mut self.out };
        // If nobody reads our output any more, the ranks still have to be able to write theirs.
        to.write_all(&text).and_then(|()| to.flush()).ok();
    }
}
