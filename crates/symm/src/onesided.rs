//! One-sided transfers as work on a stream: what every backend offers, and the conformance suite
//! holds it to.

use tilewire_core::{Error, Rank, Result};
use tilewire_device::{Buffer, Node, Queue, Stream, Tensor};

use crate::heap::Heap;
use crate::port::OpCtx;

/// Number of a signal counter in the team's control pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalSlot(pub(crate) usize);

impl SignalSlot {
    /// The slot's number.
    pub fn index(self) -> usize {
        self.0
    }
}

/// What a backend can do. Asked for when a heap is made, never found out in the middle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Peers' memory can be addressed directly.
    pub direct_peer: bool,
    /// `get` is provided.
    pub get: bool,
    /// Work can be captured and replayed.
    pub graph: bool,
    /// A timed-out or dead peer leaves the process able to go on.
    pub recoverable: bool,
}

/// One-sided operations, each queued on a stream of the backend's own kind.
///
/// Ordering: a `put` becomes visible to its destination only after a later `signal` to that
/// destination on the same stream. `wait` consumes `n` counts of one source. The signals of one
/// (slot, destination) are raised from one stream at a time: a device backend sends the running
/// total, not the increment, so totals must leave in the order in which they grew.
///
/// Faults: an operation that fails on the device sets the fault of the team. It is raised by the
/// next call here, by `Pending::wait`, and by [`LiveTeam::check`](crate::LiveTeam::check); until
/// then, and for good after it, queued waits return at once and queued signals raise nothing.
/// What a `get` wrote after a fault is unspecified.
pub trait OneSided: Clone + Send + Sync {
    /// Where work is queued.
    type Stream: Queue;
    /// What a transfer reads and writes on this rank.
    type Buffer: Buffer;

    /// The heap that is accessed.
    fn heap(&self) -> &Heap;

    /// What this backend can do.
    fn caps(&self) -> Caps;

    /// Writes `src` at byte `dst_offset` of `dst`'s chunk.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap, or the rank not in the team.
    fn put(
        &self,
        stream: &Self::Stream,
        dst: Rank,
        dst_offset: usize,
        src: &Self::Buffer,
    ) -> Result<()>;

    /// Reads byte `src_offset` of `src`'s chunk into `out`; usable in stream order.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    fn get(
        &self,
        stream: &Self::Stream,
        src: Rank,
        src_offset: usize,
        out: &Self::Buffer,
    ) -> Result<()>;

    /// Adds `n` to `dst`'s counter.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    fn signal(&self, stream: &Self::Stream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()>;

    /// Waits for `n` more counts of `src`.
    ///
    /// # Errors
    /// As [`OneSided::put`]. A timeout surfaces as the fault of the team.
    fn wait(&self, stream: &Self::Stream, src: Rank, slot: SignalSlot, n: u64) -> Result<()>;

    /// Waits until all members have reached the same barrier on `channel`.
    ///
    /// # Errors
    /// As [`OneSided::wait`].
    fn barrier(&self, stream: &Self::Stream, channel: usize) -> Result<()>;

    /// A put and the signal that publishes it.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    fn put_signal(
        &self,
        stream: &Self::Stream,
        dst: (Rank, usize),
        src: &Self::Buffer,
        slot: SignalSlot,
    ) -> Result<()> {
        self.put(stream, dst.0, dst.1, src)?;
        self.signal(stream, dst.0, slot, 1)
    }

    /// Raises the totals of `num` slots from `first` on, for every peer, by one: what this
    /// launch's [`OneSided::put_flag`]s will publish. One piece of work for all of them, where
    /// [`OneSided::put_signal`] needs one between any two copies.
    ///
    /// Each (slot, peer) must then be published by exactly one `put_flag`, of no bytes if there is
    /// nothing to send: a total that nobody publishes lets a later wait pass too early. The stream
    /// must be behind all flags of earlier totals: a flag carries what the total is when it is
    /// copied.
    ///
    /// # Errors
    /// `InvalidArgument` if there are no such slots; the fault of the team.
    fn advance(&self, stream: &Self::Stream, first: SignalSlot, num: usize) -> Result<()>;

    /// A put and, behind it, the total that [`OneSided::advance`] made for the slot. The stream
    /// must be ordered behind that call.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    fn put_flag(
        &self,
        stream: &Self::Stream,
        dst: (Rank, usize),
        src: &Self::Buffer,
        slot: SignalSlot,
    ) -> Result<()>;

    /// Orders earlier puts before later ones, without waiting for them.
    ///
    /// # Errors
    /// If the stream has ended.
    fn fence(&self, stream: &Self::Stream) -> Result<()>;

    /// Waits in stream order until all earlier puts are complete at their destinations.
    ///
    /// # Errors
    /// If the stream has ended.
    fn quiet(&self, stream: &Self::Stream) -> Result<()>;

    /// With nothing in flight: every signal that was raised has been waited for, and none twice.
    ///
    /// # Errors
    /// `Protocol` naming the first slot whose count is not what its waits consumed.
    fn check_counters(&self) -> Result<()>;
}

/// [`OneSided`] on the host backend.
#[derive(Clone)]
pub struct HostOneSided {
    heap: Heap,
}

impl HostOneSided {
    /// One-sided access to `heap`.
    pub fn new(heap: &Heap) -> Self {
        Self { heap: heap.clone() }
    }

    fn launch(
        &self,
        stream: &Stream,
        name: &'static str,
        f: impl Fn(&OpCtx) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        self.heap.team().check()?;
        let ctx = OpCtx::new(&self.heap, name, 0);
        let fault = self.heap.team().fault().clone();
        stream.launch(Node::new(name, move || f(&ctx)).in_domain(fault, || {}))
    }
}

impl OneSided for HostOneSided {
    type Stream = Stream;
    type Buffer = Tensor;

    fn heap(&self) -> &Heap {
        &self.heap
    }

    fn caps(&self) -> Caps {
        Caps { direct_peer: true, get: true, graph: true, recoverable: true }
    }

    fn put(&self, stream: &Stream, dst: Rank, dst_offset: usize, src: &Tensor) -> Result<()> {
        self.heap.check_range(dst, dst_offset, src.len_bytes())?;
        let src = src.clone();
        self.launch(stream, "put", move |c| src.read(|b| c.put(dst, dst_offset, b, "put")))
    }

    fn get(&self, stream: &Stream, src: Rank, src_offset: usize, out: &Tensor) -> Result<()> {
        self.heap.check_range(src, src_offset, out.len_bytes())?;
        let out = out.clone();
        self.launch(stream, "get", move |c| out.write(|b| c.get(src, src_offset, b, "get")))
    }

    fn signal(&self, stream: &Stream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.heap.check_range(dst, 0, 0)?;
        self.launch(stream, "signal", move |c| {
            c.signal(dst, slot, n, "signal");
            Ok(())
        })
    }

    fn wait(&self, stream: &Stream, src: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.heap.check_range(src, 0, 0)?;
        // Free-standing signals are not credit-gated: the producer may be ahead.
        self.launch(stream, "wait", move |c| c.wait(src, slot, n, "wait"))
    }

    fn barrier(&self, stream: &Stream, channel: usize) -> Result<()> {
        check_channel(channel)?;
        self.launch(stream, "barrier", move |c| c.barrier(channel, "barrier"))
    }

    /// A signal of the host adds to the count: there is no total to make first.
    fn advance(&self, _stream: &Stream, first: SignalSlot, num: usize) -> Result<()> {
        check_slots(first, num)?;
        self.heap.team().check()
    }

    fn put_flag(
        &self,
        stream: &Stream,
        dst: (Rank, usize),
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        if src.len_bytes() > 0 {
            self.put(stream, dst.0, dst.1, src)?;
        }
        self.signal(stream, dst.0, slot, 1)
    }

    fn fence(&self, stream: &Stream) -> Result<()> {
        self.launch(stream, "fence", |_| {
            std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
            Ok(())
        })
    }

    fn quiet(&self, stream: &Stream) -> Result<()> {
        // A host put is complete when the call returns, so stream order is enough.
        self.fence(stream)
    }

    fn check_counters(&self) -> Result<()> {
        self.heap.team().check_counters()
    }
}

pub(crate) fn check_channel(channel: usize) -> Result<()> {
    let num = crate::control::NUM_CHANNELS;
    if channel < num {
        return Ok(());
    }
    Err(Error::invalid(format!("no barrier channel {channel}"))
        .expected(format_args!("less than {num}"))
        .seen(channel))
}

pub(crate) fn check_slots(first: SignalSlot, num: usize) -> Result<()> {
    let all = crate::control::NUM_SIGNALS;
    if first.0.checked_add(num).is_some_and(|end| end <= all) {
        return Ok(());
    }
    Err(Error::invalid(format!("no {num} signal slots from {} on", first.0))
        .expected(format_args!("at most {all} in all")))
}
