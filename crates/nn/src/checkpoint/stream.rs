//! Tensors on their way into a file. Copying from a device, digests, writing and the disk go on
//! beside each other: the thread that calls copies, as devices are bound to it, and three of its
//! own do the rest. A few buffers go round, so that none of them is far ahead of the others.
//!
//! Tensors of the host need no copy, and one thread does all: on two cores that is faster than four
//! threads, as a block is in the cache when it is written (1.88 GB: 1.5 s, and 2.4 to 3.5 s).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use tilewire_core::{Error, Result, Shape};
use tilewire_device::{Buffer, Device};

use super::manifest::BLOCK;
use super::shard::Source;

/// Most bytes of a buffer: whole blocks.
const PIECE: usize = 2 * BLOCK as usize;
/// Buffers that go round, one or two for each stage: 12 MiB a rank.
const BUFFERS: usize = 6;
/// Bytes after which those so far go to the disk. A system with much memory would keep all of a
/// checkpoint until it is flushed, and the disk have nothing to do before the end.
const SENT: u64 = 32 << 20;

/// The file of a rank.
pub trait Sink: Sync {
    /// Writes all of `bytes` at byte `at`.
    ///
    /// # Errors
    /// The system's.
    fn put(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Has the disk begin with `len` bytes from `at` on, which are written. What comes of it is
    /// known once all is flushed.
    fn send(&self, at: u64, len: u64);
}

impl Sink for File {
    fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn send(&self, at: u64, len: u64) {
        // Linux begins to write what is said not to be needed. Where that is not so it is slower.
        let len = std::num::NonZeroU64::new(len);
        rustix::fs::fadvise(self, at, len, rustix::fs::Advice::DontNeed).ok();
    }
}

/// Bytes of a tensor, by its number.
struct Piece {
    tensor: usize,
    len: usize,
    buffer: Vec<u8>,
}

/// The end of the file, and of each tensor the digests of its blocks.
pub type Streamed = (u64, Vec<Vec<String>>);

/// Writes the values of `sources` to `sink`, one behind the other from byte `start`. Some of it may
/// not be on the disk yet.
///
/// # Errors
/// `Io` if `sink` fails or no thread can be started, with the words of `error`; what a device
/// reports. Nothing more is written then.
pub fn stream(
    sources: &[Source],
    start: u64,
    sink: &impl Sink,
    error: &(impl Fn(io::Error) -> Error + Sync),
) -> Result<Streamed> {
    match sources.iter().all(|s| matches!(s.values.device(), Device::Host)) {
        true => in_place(sources, start, sink, error),
        false => piped(sources, start, sink, error),
    }
}

/// The same where nothing has to be copied.
fn in_place(
    sources: &[Source],
    start: u64,
    sink: &impl Sink,
    error: &impl Fn(io::Error) -> Error,
) -> Result<Streamed> {
    let (mut at, mut sent, mut all) = (start, start, Vec::new());
    let per = BLOCK as usize / 4;
    for s in sources {
        let (num, mut digests) = (s.values.shape().num_elems(), Vec::new());
        let flat = s.values.reshape(Shape::d1(num))?;
        for first in (0..num).step_by(per) {
            flat.rows(first, per.min(num - first))?.read(|bytes| {
                digests.push(blake3::hash(bytes).to_hex().to_string());
                at += bytes.len() as u64;
                sink.put(bytes, at - bytes.len() as u64).map_err(error)
            })??;
            if at - sent >= SENT {
                sink.send(sent, at - sent);
                sent = at;
            }
        }
        all.push(digests);
    }
    Ok((at, all))
}

/// The same by four threads.
fn piped(
    sources: &[Source],
    start: u64,
    sink: &impl Sink,
    error: &(impl Fn(io::Error) -> Error + Sync),
) -> Result<Streamed> {
    let longest = sources.iter().map(|s| s.values.len_bytes()).max().unwrap_or(0);
    // As many places as there are buffers: nobody waits to hand one on. Whoever stops closes its
    // ends, and with them all others stop.
    let (to_hash, copied) = sync_channel(BUFFERS);
    let (to_write, hashed) = sync_channel(BUFFERS);
    let (give, free) = sync_channel(BUFFERS);
    let (to_disk, written) = sync_channel(1);
    std::thread::scope(|s| {
        let hasher = helper(s, "digests", move || digests(sources.len(), &copied, &to_write))?;
        let writer = helper(s, "writer", move || {
            let mut at = start;
            let done = write(sink, &mut at, &hashed, &give, &to_disk);
            done.map(|()| at).map_err(error)
        })?;
        let disk = helper(s, "disk", move || {
            written.iter().for_each(|(at, len): (u64, u64)| sink.send(at, len));
        })?;
        let copied = copy(sources, longest.min(PIECE), &free, to_hash);
        let (digests, end, sent) = (join(hasher), join(writer), join(disk));
        // A stage that stops because of another has no error of its own.
        let end = end??;
        sent?;
        copied?;
        Ok((end, digests?))
    })
}

/// Starts a thread that serves a checkpoint.
///
/// # Errors
/// `Io` or `Exhausted` if it cannot be started.
pub fn helper<'s, R: Send + 's>(
    s: &'s Scope<'s, '_>,
    name: &str,
    f: impl FnOnce() -> R + Send + 's,
) -> Result<ScopedJoinHandle<'s, R>> {
    let thread = Builder::new().name(format!("ckpt-{name}"));
    thread.spawn_scoped(s, f).map_err(|e| Error::io("starting a thread of a checkpoint", e))
}

/// Waits for the end of a thread.
///
/// # Errors
/// `Internal` if it has panicked.
pub fn join<R>(thread: ScopedJoinHandle<'_, R>) -> Result<R> {
    thread.join().map_err(|_| Error::internal("a thread of a checkpoint has panicked"))
}

/// Copies all from the device, until somebody else has stopped.
fn copy(
    sources: &[Source],
    most: usize,
    free: &Receiver<Vec<u8>>,
    out: SyncSender<Piece>,
) -> Result<()> {
    let (per, mut made) = ((most / 4).max(1), 0);
    for (tensor, s) in sources.iter().enumerate() {
        let num = s.values.shape().num_elems();
        let flat = s.values.reshape(Shape::d1(num))?;
        for first in (0..num).step_by(per) {
            let now = flat.rows(first, per.min(num - first))?;
            let mut buffer = match free.try_recv() {
                Ok(buffer) => buffer,
                Err(_) if made < BUFFERS => {
                    made += 1;
                    vec![0; 4 * per]
                }
                Err(_) => match free.recv() {
                    Ok(buffer) => buffer,
                    Err(_) => return Ok(()),
                },
            };
            let len = now.len_bytes();
            now.download_into(&mut buffer[..len])?;
            if out.send(Piece { tensor, len, buffer }).is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The digests of all that comes, which goes on to the writer.
fn digests(num: usize, copied: &Receiver<Piece>, out: &SyncSender<Piece>) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new(); num];
    for piece in copied {
        let blocks = piece.buffer[..piece.len].chunks(BLOCK as usize);
        all[piece.tensor].extend(blocks.map(|b| blake3::hash(b).to_hex().to_string()));
        if out.send(piece).is_err() {
            break;
        }
    }
    all
}

/// Writes all that comes from byte `at` on, and gives the buffers back.
fn write(
    sink: &impl Sink,
    at: &mut u64,
    hashed: &Receiver<Piece>,
    free: &SyncSender<Vec<u8>>,
    to_disk: &SyncSender<(u64, u64)>,
) -> io::Result<()> {
    let mut sent = *at;
    for piece in hashed {
        sink.put(&piece.buffer[..piece.len], *at)?;
        *at += piece.len as u64;
        // At the end nobody waits for it any more.
        free.send(piece.buffer).ok();
        // Later, if it is still busy with what came before.
        if *at - sent >= SENT && to_disk.try_send((sent, *at - sent)).is_ok() {
            sent = *at;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use tilewire_core::{ErrorKind, Rng};
    use tilewire_device::Tensor;

    use super::*;

    fn source(rng: &mut Rng, len: usize) -> Source {
        let values: Vec<f32> = (0..len).map(|_| rng.normal()).collect();
        let values = Tensor::from_slice(&values, Shape::d2(1, len)).unwrap();
        Source { name: "a.w".to_owned(), values, pieces: Vec::new() }
    }

    /// A disk that may refuse a block.
    #[derive(Default)]
    struct Disk {
        bytes: Mutex<Vec<u8>>,
        puts: AtomicU64,
        full_at: Option<u64>,
        sent: Mutex<Vec<(u64, u64)>>,
    }

    impl Sink for Disk {
        fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
            if Some(self.puts.fetch_add(1, Ordering::Relaxed)) == self.full_at {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let mut all = self.bytes.lock().unwrap();
            assert_eq!(all.len() as u64 + 8, at);
            all.extend(bytes);
            Ok(())
        }

        fn send(&self, at: u64, len: u64) {
            assert!(at + len <= 8 + self.bytes.lock().unwrap().len() as u64, "it is not written");
            self.sent.lock().unwrap().push((at, len));
        }
    }

    type Way = fn(&[Source], &Disk) -> Result<Streamed>;

    /// By both ways; tensors of the host stand for those of a device.
    const WAYS: [Way; 2] = [
        |sources, disk| piped(sources, 8, disk, &|e| Error::io("the file", e)),
        |sources, disk| stream(sources, 8, disk, &|e| Error::io("the file", e)),
    ];

    /// Runs `f`, which must come to an end: a stage that waits for another that has stopped would
    /// not.
    fn within<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
        let (out, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || out.send(f()));
        done.recv_timeout(Duration::from_secs(60)).expect("it comes to an end")
    }

    /// The bytes that come out are those that went in, whatever the lengths: parts of blocks, whole
    /// ones, more than a buffer, and many.
    #[test]
    fn bytes_and_digests_are_those_of_the_tensors() {
        let (mut rng, block) = (Rng::new(5), BLOCK as usize / 4);
        let lens = [1, 3, block - 1, block, block + 1, PIECE / 4, PIECE / 4 + 7, 2 * PIECE / 4];
        let mut sources: Vec<_> = lens.iter().map(|len| source(&mut rng, *len)).collect();
        sources.extend((0..3 * BUFFERS).map(|i| source(&mut rng, i + 1)));
        WAYS.iter().for_each(|run| right(&sources, *run));
    }

    fn right(sources: &[Source], run: Way) {
        let disk = Disk::default();
        let (end, digests) = run(sources, &disk).unwrap();
        let mut all = Vec::new();
        for (s, digests) in sources.iter().zip(&digests) {
            let bytes = s.values.download().unwrap();
            let want: Vec<_> =
                bytes.chunks(BLOCK as usize).map(|b| blake3::hash(b).to_hex()).collect();
            assert!(digests.iter().map(String::as_str).eq(want.iter().map(|d| d.as_str())));
            all.extend(bytes);
        }
        assert_eq!(end, 8 + all.len() as u64);
        assert!(*disk.bytes.lock().unwrap() == all, "other bytes");
        assert_eq!(run(&[], &disk).unwrap(), (8, vec![]));
    }

    /// A disk that is full ends the rest at any block, and comes out as it is.
    #[test]
    fn a_disk_that_is_full_ends_all_at_any_block() {
        let num = 4 * BUFFERS as u64;
        for (full_at, run) in (0..num).flat_map(|at| WAYS.map(|run| (at, run))) {
            let (e, puts) = within(move || {
                let mut rng = Rng::new(full_at);
                let sources: Vec<_> = (0..num).map(|_| source(&mut rng, 50)).collect();
                let disk = Disk { full_at: Some(full_at), ..Disk::default() };
                (run(&sources, &disk).unwrap_err(), disk.puts.into_inner())
            });
            let full = io::Error::from(io::ErrorKind::StorageFull);
            assert_eq!(e.kind(), ErrorKind::Io);
            assert_eq!(e.to_string(), Error::io("the file", full).to_string());
            assert_eq!(puts, full_at + 1, "it went on");
        }
    }

    /// The disk begins before the end, and with nothing twice.
    #[test]
    fn the_disk_begins_while_others_work() {
        let values = source(&mut Rng::new(1), 1 << 20).values;
        let one = |_| Source { name: String::new(), values: values.clone(), pieces: Vec::new() };
        let many: Vec<_> = (0..4 * SENT as usize / values.len_bytes()).map(one).collect();
        for run in WAYS {
            let disk = Disk::default();
            run(&many, &disk).unwrap();
            let sent = disk.sent.into_inner().unwrap();
            assert!(!sent.is_empty() && sent.iter().all(|(_, len)| *len >= SENT), "{sent:?}");
            let mut end = 8;
            for (at, len) in sent {
                assert_eq!(at, end);
                end = at + len;
            }
        }
    }

    /// A tensor that cannot be copied, the first or any other, ends the rest.
    #[test]
    fn a_device_that_fails_ends_all() {
        for (bad, run) in [0, 1, 2 * BUFFERS].into_iter().flat_map(|at| WAYS.map(|run| (at, run))) {
            let e = within(move || {
                let mut rng = Rng::new(bad as u64);
                let sources: Vec<_> = (0..3 * BUFFERS).map(|_| source(&mut rng, 50)).collect();
                let in_use = sources[bad].values.clone();
                in_use.write(|_| run(&sources, &Disk::default()).unwrap_err()).unwrap()
            });
            assert!(e.kind() != ErrorKind::Io && e.to_string().contains("tensor"), "{e}");
        }
    }
}
