//! Shows the output of the ranks line by line.
//!
//! One thread reads the pipes of all ranks; two write, one to each of our own streams. What is read
//! and not yet written is bounded: behind the bound a rank's pipe is left full, and the rank waits,
//! as it would without a launcher. A stream that nobody reads cannot hold up the end of a job: what
//! it has not taken within [`STALLED`] without progress is dropped, and counted.

use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tilewire_core::{Error, Result};

use super::group::RankProcess;
use crate::sock::{self, Bell};

/// Lines of standard error that are kept per rank.
const TAIL: usize = 20;

/// A line that is longer is shown in pieces.
const MAX_LINE: usize = 64 << 10;

/// Bytes that wait for one of our streams before the ranks' pipes are left full.
const MOST_WAITING: usize = 4 << 20;

/// Longest time in which a stream takes nothing at all, once the ranks have ended.
const STALLED: Duration = Duration::from_secs(1);

/// The threads between the pipes of all ranks and our own streams.
///
/// One thread reads for all: a line is never torn by another rank's.
pub(super) struct Pump {
    thread: JoinHandle<Vec<Vec<String>>>,
    streams: [Arc<Stream>; 2],
    bell: Arc<Bell>,
    stop: Arc<AtomicBool>,
    /// Pipes of ranks that were started anew.
    more: Arc<Mutex<Vec<Pipe>>>,
}

/// The last lines of each rank's standard error, and bytes that nobody has read.
pub(super) struct Shown {
    pub tails: Vec<Vec<String>>,
    pub lost: u64,
}

struct Pipe {
    fd: OwnedFd,
    rank: usize,
    is_err: bool,
    line: Vec<u8>,
}

/// Lines on their way to one of our streams.
#[derive(Default)]
struct Stream {
    queue: Mutex<Queue>,
    /// The queue has got lines or is closed; or, of the writer, it has got on.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    /// Bytes of lines that are not written yet, those that are being written among them.
    waiting: usize,
    /// Lines written since the beginning.
    written: u64,
    lost: u64,
    closed: bool,
    done: bool,
}

impl Stream {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_full(&self) -> bool {
        self.lock().waiting >= MOST_WAITING
    }

    /// Behind the end of the ranks there may be more than the bound, but not without end.
    fn push(&self, line: Vec<u8>) {
        let mut q = self.lock();
        if q.waiting >= 2 * MOST_WAITING {
            q.lost += line.len() as u64;
            return;
        }
        q.waiting += line.len();
        q.lines.push_back(line);
        self.changed.notify_all();
    }

    /// The writer's thread. Each line is one `write`.
    fn write_all(&self, mut to: Box<dyn Write + Send>, bell: &Bell) {
        loop {
            let mut q = self.lock();
            while q.lines.is_empty() && !q.closed {
                q = self.changed.wait(q).unwrap_or_else(PoisonError::into_inner);
            }
            let Some(line) = q.lines.pop_front() else {
                q.done = true;
                return self.changed.notify_all();
            };
            drop(q);
            // If nobody reads our output any more, the ranks still have to be able to write theirs.
            to.write_all(&line).and_then(|()| to.flush()).ok();
            let mut q = self.lock();
            let was_full = q.waiting >= MOST_WAITING;
            q.waiting -= line.len();
            q.written += 1;
            if was_full && q.waiting < MOST_WAITING {
                bell.ring();
            }
            self.changed.notify_all();
        }
    }

    /// Nothing comes any more. Waits as long as lines are written; bytes that were not.
    fn close(&self) -> u64 {
        let mut q = self.lock();
        q.closed = true;
        self.changed.notify_all();
        while !q.done {
            let before = q.written;
            let (next, timeout) = self
                .changed
                .wait_timeout_while(q, STALLED, |q| !q.done && q.written == before)
                .unwrap_or_else(PoisonError::into_inner);
            q = next;
            if timeout.timed_out() && !q.done {
                // The writer stays behind in its call, with the one line that it has.
                q.lost += q.waiting as u64;
                q.lines.clear();
                break;
            }
        }
        q.lost
    }
}

struct Sink {
    prefix: bool,
    streams: [Arc<Stream>; 2],
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
            pipes.extend(pipes_of(rank, r)?);
        }
        let (bell, stop) = (Arc::new(Bell::new()?), Arc::new(AtomicBool::new(false)));
        let streams = [Arc::new(Stream::default()), Arc::new(Stream::default())];
        for (stream, to) in streams.iter().zip([out, err]) {
            let (stream, b) = (stream.clone(), bell.clone());
            spawn("tilewire-writer", move || stream.write_all(to, &b))?;
        }
        let tails = vec![VecDeque::new(); ranks.len()];
        let sink = Sink { prefix, streams: streams.clone(), tails };
        let more = Arc::new(Mutex::new(Vec::new()));
        let (b, s, m) = (bell.clone(), stop.clone(), more.clone());
        let thread = spawn("tilewire-output", move || run(pipes, sink, &b, &s, &m))?;
        Ok(Self { thread, streams, bell, stop, more })
    }

    /// Shows the output of a rank that was started anew.
    pub fn add(&self, rank: usize, r: &mut RankProcess) -> Result<()> {
        let pipes = pipes_of(rank, r)?;
        self.more.lock().unwrap_or_else(PoisonError::into_inner).extend(pipes);
        self.bell.ring();
        Ok(())
    }

    /// Shows a line of the launcher's own.
    pub fn note(&self, line: &str) {
        self.streams[1].push(format!("{line}\n").into_bytes());
    }

    /// Shows what is still in the pipes.
    ///
    /// Does not wait for the ends of the pipes: a process that left its session may hold them. Nor
    /// for ever for whoever reads our streams.
    pub fn finish(self) -> Shown {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        let tails = self.thread.join().unwrap_or_default();
        let [out, err] = &self.streams;
        // Each may take its time: both at once, where there is memory for a thread.
        let lost = std::thread::scope(|t| {
            let closing = std::thread::Builder::new().spawn_scoped(t, || out.close());
            let of_err = err.close();
            of_err + closing.map_or_else(|_| out.close(), |c| c.join().unwrap_or(0))
        });
        Shown { tails, lost }
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(f);
    thread.map_err(|e| Error::io("starting the output threads", e))
}

/// The pipes of a rank, which do not block.
fn pipes_of(rank: usize, r: &mut RankProcess) -> Result<Vec<Pipe>> {
    let stdout = r.child.stdout.take().map(|p| (OwnedFd::from(p), false));
    let stderr = r.child.stderr.take().map(|p| (OwnedFd::from(p), true));
    let both = stdout.into_iter().chain(stderr).map(|(fd, is_err)| {
        rustix::io::ioctl_fionbio(&fd, true)
            .map_err(|e| Error::io("reading the output of a rank", e))?;
        Ok(Pipe { fd, rank, is_err, line: Vec::new() })
    });
    both.collect()
}

fn run(
    mut pipes: Vec<Pipe>,
    mut sink: Sink,
    bell: &Bell,
    stop: &AtomicBool,
    more: &Mutex<Vec<Pipe>>,
) -> Vec<Vec<String>> {
    loop {
        let last = stop.load(Ordering::Acquire);
        for p in more.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // The last lines are those of the process that runs now.
            sink.tails[p.rank].clear();
            pipes.push(p);
        }
        if !last && !wait(&pipes, &sink, bell) {
            break;
        }
        pipes.retain_mut(|p| (!last && sink.is_full(p.is_err)) || p.read(&mut sink));
        if last {
            break;
        }
    }
    for p in &mut pipes {
        p.rest(&mut sink);
    }
    sink.tails.into_iter().map(Vec::from).collect()
}

/// Until a pipe whose stream has space has something, or the bell rings.
fn wait(pipes: &[Pipe], sink: &Sink, bell: &Bell) -> bool {
    let mut fds = vec![PollFd::new(bell.fd(), PollFlags::IN)];
    let read = pipes.iter().filter(|p| !sink.is_full(p.is_err));
    fds.extend(read.map(|p| PollFd::new(&p.fd, PollFlags::IN)));
    let good = sock::wait_any(&mut fds, None).is_ok();
    if !fds[0].revents().is_empty() {
        bell.hush();
    }
    good
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
    fn is_full(&self, is_err: bool) -> bool {
        self.streams[usize::from(is_err)].is_full()
    }

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
        self.streams[usize::from(is_err)].push(text);
    }
}
