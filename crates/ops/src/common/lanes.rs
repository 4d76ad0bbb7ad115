//! Launches of plans on a heap in device memory: two streams, forked and joined by events.
//!
//! A launch is queued in this order, on the caller's stream (`main`) and on the heap's copy stream
//! (`side`): enter (credits to and from all peers, totals of this launch's flags), fork, then the
//! operation's copies on `side` and its waits and kernels on `main`, join, poison if the team is
//! over. Nothing waits for the host, so all of it can be captured.

use tilewire_core::{DType, Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaEvent, CudaMemory, CudaStream};
use tilewire_device::{Buffer, Queue, Stream};
use tilewire_kernels::abi::TwPoison;
use tilewire_symm::{
    DeviceHeap, DeviceTeam, DeviceTransport, Enter, Heap, Permit, Signals, StreamTransport,
    Transport,
};

/// The transport and the events that a plan keeps for its launches.
pub(crate) struct Lane {
    op: &'static str,
    net: DeviceTransport,
    fork: CudaEvent,
    join: CudaEvent,
}

/// Slots that a launch enters with: a credit, and flags that each peer is sent exactly once.
pub(crate) struct Slots<'a> {
    pub signals: &'a Signals,
    pub credit: usize,
    pub flags: std::ops::Range<usize>,
}

/// An output, and the byte that it is filled with after a fault.
pub(crate) struct Poison(pub CudaMemory, pub u8);

impl Poison {
    /// Values become NaN, indices -1.
    pub fn value(memory: CudaMemory) -> Self {
        Self(memory, DType::POISON)
    }
}

/// Returns the outputs of a phase, at most eight, in the form that kernels take.
pub(crate) fn poison_of(outs: &[Poison]) -> TwPoison {
    let mut p: TwPoison = bytemuck::Zeroable::zeroed();
    for (i, o) in outs.iter().enumerate() {
        (p.out[i], p.len[i], p.byte[i]) = (o.0.addr(), o.0.len_bytes() as u64, o.1);
    }
    p
}

/// The two streams of one launch.
pub(crate) struct Lanes<'a> {
    pub net: &'a StreamTransport,
    /// This rank's part of the heap.
    pub here: &'a DeviceHeap,
    pub main: &'a CudaStream,
    pub side: &'a CudaStream,
    /// The credits that the peers granted this launch at its beginning.
    pub permit: Permit,
    lane: &'a Lane,
}

impl Lane {
    /// Makes the lane of launches of `op` on a heap in device memory.
    pub fn new(op: &'static str, heap: &Heap) -> Result<Self> {
        let net = DeviceTransport::new(heap)?;
        let event = || CudaEvent::new(net.here().context(), false);
        let (fork, join) = (event()?, event()?);
        Ok(Self { op, net, fork, join })
    }

    pub fn context(&self) -> &CudaContext {
        self.here().context()
    }

    /// Returns this rank's part of the heap.
    pub fn here(&self) -> &DeviceHeap {
        self.net.here()
    }

    /// Returns the parameters by which kernels meet the other ranks themselves.
    ///
    /// # Errors
    /// `Unsupported` if the GPUs do not reach each other's memory.
    pub fn team(&self) -> Result<&DeviceTeam> {
        self.net.device_team().ok_or_else(no_reach)
    }

    /// Returns the bytes from a rank's chunk to the next one's, as this device sees them.
    pub fn stride(&self) -> Result<u64> {
        self.team()?.stride()
    }

    /// Queues one launch. `main` and `side` must be behind all earlier launches of the plan.
    pub fn run(
        &self,
        (main, side): (&CudaStream, &CudaStream),
        slots: &Slots<'_>,
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        let _span = main.span(self.op);
        let (s, flags) = (slots.signals, &slots.flags);
        // Without flags any slot will do as the first of none. Devices compare launches when they
        // begin, so credits carry no tag.
        let first = s.slot(flags.start.min(s.len() - 1));
        let enter = Enter { credit: s.slot(slots.credit), tag: 0, first, num: flags.len() };
        let permit = self.net.enter(main, &enter)?;
        let lanes = Lanes { permit, ..self.lanes((main, side)) };
        lanes.fork()?;
        let pushes = side.span(self.op);
        let done = f(&lanes);
        drop(pushes);
        // Joined whatever happened: a capture would not be whole otherwise.
        lanes.join()?;
        done?;
        let outs: Vec<_> = outs.iter().map(|o| (o.0.clone(), o.1)).collect();
        self.here().poison_if_over(main, &outs)
    }

    /// Returns the streams of a launch whose kernels meet the other ranks themselves.
    pub fn lanes<'a>(&'a self, (main, side): (&'a CudaStream, &'a CudaStream)) -> Lanes<'a> {
        Lanes { net: &self.net, here: self.here(), main, side, permit: Permit::none(), lane: self }
    }

    /// Poisons the outputs of a launch of which only a part could be queued. That part may run, and
    /// a caller who joins other work of the stream must not take its output for a result.
    pub fn spoil(main: &CudaStream, outs: &[Poison]) {
        for o in outs {
            // The caller reports the error that led here. If nothing can be queued any more, the
            // stream has ended, and no output of it is a result.
            main.fill_memory(&o.0, o.1).ok();
        }
    }
}

fn no_reach() -> Error {
    Error::new(ErrorKind::Unsupported, "the GPUs of this team do not reach each other's memory")
        .hint("make the plan with NCCL (`CollectiveBackend::Nccl`)")
}

impl Lanes<'_> {
    /// Returns the same as [`Lane::team`].
    pub fn team(&self) -> Result<&DeviceTeam> {
        self.net.device_team().ok_or_else(no_reach)
    }

    /// Returns my team rank.
    pub fn me(&self) -> Rank {
        self.here.heap().team().rank()
    }

    /// Makes `side` wait for all work that is queued on `main` now.
    pub fn fork(&self) -> Result<()> {
        // One event serves every fork: a wait refers to the last record before it.
        self.main.record(&self.lane.fork)?;
        self.side.wait(&self.lane.fork)
    }

    /// Makes `main` wait for all work that is queued on `side` now.
    pub fn join(&self) -> Result<()> {
        self.side.record(&self.lane.join)?;
        self.main.wait(&self.lane.join)?;
        // The heap owns `side`, and objects that its work uses own the heap: `main` takes them
        // over, or the heap would never be freed.
        self.main.take_over(self.side);
        Ok(())
    }
}

/// Returns the stream of a launch on the device of a heap.
///
/// # Errors
/// `Unsupported` for a stream of another device.
pub(crate) fn stream_on<'a>(stream: &'a Stream, ctx: &CudaContext) -> Result<&'a CudaStream> {
    let s = stream.cuda()?;
    if s.context().ordinal() != ctx.ordinal() {
        return Err(Error::new(ErrorKind::Unsupported, "the stream belongs to another device")
            .expected(ctx.ordinal())
            .seen(s.context().ordinal())
            .hint("launch on a stream of the heap's device: `Stream::on(&context)`"));
    }
    Ok(s)
}
