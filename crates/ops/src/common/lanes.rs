//! How plans on a heap in device memory launch: two streams, forked and joined by events.
//!
//! A launch is queued in this order, on the caller's stream (`main`) and on the heap's copy stream
//! (`side`): enter (credits to and from all peers, totals of this launch's flags), fork, then the
//! operation's copies on `side` and its waits and kernels on `main`, join, poison if the team is
//! over. Nothing waits for the host, so all of it can be captured.

use tilewire_core::{DType, Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{
    CudaContext, CudaEvent, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs,
};
use tilewire_device::{Buffer, Queue, Stream};
use tilewire_kernels::abi::{TwMoves, TwPoison, TwReduce};
use tilewire_kernels::portable::{
    MOVE, MOVE_SEGMENTS, MOVE_THREADS, REDUCE, REDUCE_MANTISSAS, REDUCE_THREADS, move_defines,
    reduce_defines,
};
use tilewire_symm::{
    DeviceHeap, DeviceTeam, DeviceTransport, Enter, Heap, Permit, Signals, StreamTransport,
    Transport,
};

use super::Bias;
use super::cuda::{load, mantissa, no_kernel};

/// What a plan keeps for its launches.
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

/// The at most eight outputs of a phase, as kernels take them.
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
    /// What the peers have granted this launch at its beginning.
    pub permit: Permit,
    lane: &'a Lane,
}

impl Lane {
    /// For launches of `op` on a heap in device memory.
    pub fn new(op: &'static str, heap: &Heap) -> Result<Self> {
        let net = DeviceTransport::new(heap)?;
        let event = || CudaEvent::new(net.here().context(), false);
        let (fork, join) = (event()?, event()?);
        Ok(Self { op, net, fork, join })
    }

    pub fn context(&self) -> &CudaContext {
        self.here().context()
    }

    /// This rank's part of the heap.
    pub fn here(&self) -> &DeviceHeap {
        self.net.here()
    }

    /// What kernels need to meet the other ranks by themselves.
    ///
    /// # Errors
    /// `Unsupported` if the GPUs do not reach each other's memory.
    pub fn team(&self) -> Result<&DeviceTeam> {
        self.net.device_team().ok_or_else(no_reach)
    }

    /// Bytes from a rank's chunk to the next one's, as this device sees them.
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

    /// The streams of a launch whose kernels meet the other ranks themselves.
    pub fn lanes<'a>(&'a self, (main, side): (&'a CudaStream, &'a CudaStream)) -> Lanes<'a> {
        Lanes { net: &self.net, here: self.here(), main, side, permit: Permit::none(), lane: self }
    }

    /// Poisons the outputs of a launch that could not be queued whole: some of its kernels may run,
    /// and whoever joins other work of the stream must not take what they leave for a result.
    pub fn spoil(main: &CudaStream, outs: &[Poison]) {
        for o in outs {
            // The error to tell is the one before. If nothing can be queued any more, the stream is
            // at its end, and nothing of it is a result.
            main.fill_memory(&o.0, o.1).ok();
        }
    }
}

fn no_reach() -> Error {
    Error::new(ErrorKind::Unsupported, "the GPUs of this team do not reach each other's memory")
        .hint("make the plan with NCCL (`CollectiveBackend::Nccl`)")
}

impl Lanes<'_> {
    /// As [`Lane::team`].
    pub fn team(&self) -> Result<&DeviceTeam> {
        self.net.device_team().ok_or_else(no_reach)
    }

    /// My team rank.
    pub fn me(&self) -> Rank {
        self.here.heap().team().rank()
    }

    /// `side` goes on behind what is queued on `main` now.
    pub fn fork(&self) -> Result<()> {
        // One event serves every fork: a wait refers to the last record before it.
        self.main.record(&self.lane.fork)?;
        self.side.wait(&self.lane.fork)
    }

    /// `main` goes on behind what is queued on `side` now.
    pub fn join(&self) -> Result<()> {
        self.side.record(&self.lane.join)?;
        self.main.wait(&self.lane.join)?;
        // The heap owns `side`, and what its work uses owns the heap.
        self.main.take_over(self.side);
        Ok(())
    }
}

/// The stream of a launch on the device of a heap.
///
/// # Errors
/// `Unsupported` for a stream of another device.
pub(crate) fn stream_on<'a>(stream: &'a Stream, ctx: &CudaContext) -> Result<&'a CudaStream> {
    let s = stream.cuda()?;
    if s.context().ordinal() != ctx.ordinal() {
        return Err(Error::new(ErrorKind::Unsupported, "the stream is of another device")
            .expected(ctx.ordinal())
            .seen(s.context().ordinal())
            .hint("launch on a stream of the heap's device: `Stream::on(&context)`"));
    }
    Ok(s)
}

/// Sums of parts in the order of the ranks: `collective/sm80_reduce.cu`.
pub(crate) struct Reducer {
    kernel: Kernel,
    num_sms: u32,
}

/// One sum: addresses on the device, `stride` in bytes from rank to rank.
pub(crate) struct Sum {
    pub slots: u64,
    pub stride: u64,
    pub own: u64,
    pub out: u64,
    pub bias: Bias,
    pub rows: usize,
    pub cols: usize,
    pub scale: f32,
}

impl Reducer {
    /// For parts of `wire`, an own part of `own`, and results of `out`.
    ///
    /// # Errors
    /// `Unsupported` for types that there is no kernel for.
    pub fn new(ctx: &CudaContext, [wire, own, out]: [DType; 3]) -> Result<Self> {
        let types = [wire, own, out].map(mantissa);
        let floats = [wire, own, out].iter().all(|d| d.is_float());
        if !floats || !REDUCE_MANTISSAS.contains(&types) {
            return Err(no_kernel(
                format!("a sum of {wire} parts with {own} of one's own to {out}"),
                "use f32, bf16 or f16 for all of them",
            ));
        }
        let kernel = load(ctx, &REDUCE, reduce_defines(types))?.kernel("tw_reduce")?;
        Ok(Self { kernel, num_sms: ctx.num_sms()? })
    }

    /// Queues the sum. The addresses must stay valid as those of the launch do: symmetric memory,
    /// and tensors that the caller has given to `stream.hold`.
    pub fn launch(&self, l: &Lanes<'_>, sum: &Sum) -> Result<()> {
        let team = l.here.heap().team();
        self.launch_parts(l, sum, (Some(team.rank().idx()), team.size()))
    }

    /// As [`Reducer::launch`], of any number of parts, of which one may be `own`.
    pub fn launch_parts(
        &self,
        l: &Lanes<'_>,
        sum: &Sum,
        (own, parts): (Option<usize>, usize),
    ) -> Result<()> {
        let num = (sum.rows * sum.cols) as u64;
        if num == 0 {
            return Ok(());
        }
        let param = TwReduce {
            slots: sum.slots,
            stride: sum.stride,
            own: sum.own,
            out: sum.out,
            bias: sum.bias.addr,
            num,
            cols: sum.cols as u32,
            me: own.map_or(u32::MAX, |own| own as u32),
            size: parts as u32,
            scale: sum.scale,
            bias_out: u32::from(sum.bias.of_out),
            pad: 0,
        };
        let threads = REDUCE_THREADS as u32;
        let blocks = num.div_ceil(4 * REDUCE_THREADS).min(u64::from(self.num_sms) * 8) as u32;
        // SAFETY: the kernel takes one TwReduce, as `abi` declares it; the ranges are
        // those of a checked launch, held by it.
        unsafe {
            self.kernel.launch(l.main, Grid::new(blocks, threads), LaunchArgs::new().arg(&param))
        }
    }
}

/// Copies by a kernel, many at once: `collective/sm80_move.cu`.
pub(crate) struct Mover {
    kernel: Kernel,
    num_sms: u32,
}

/// Bytes that are worth a block of their own.
const BLOCK_BYTES: u64 = 8192;

impl Mover {
    pub fn new(ctx: &CudaContext) -> Result<Self> {
        let kernel = load(ctx, &MOVE, move_defines())?.kernel("tw_move")?;
        Ok(Self { kernel, num_sms: ctx.num_sms()? })
    }

    /// Queues copies of `(source, destination, bytes)` on `main`; those of no bytes are left out.
    /// The addresses must stay valid as those of the launch do: symmetric memory, and tensors that
    /// the caller has given to `stream.hold`.
    pub fn launch(&self, l: &Lanes<'_>, copies: &[(u64, u64, usize)]) -> Result<()> {
        let copies: Vec<_> = copies.iter().filter(|c| c.2 > 0).collect();
        for some in copies.chunks(MOVE_SEGMENTS) {
            let mut m: TwMoves = bytemuck::Zeroable::zeroed();
            for (i, (src, dst, len)) in some.iter().enumerate() {
                (m.src[i], m.dst[i], m.len[i]) = (*src, *dst, *len as u64);
            }
            let largest = m.len.iter().copied().max().unwrap_or(0);
            let most = u64::from(2 * self.num_sms).div_ceil(some.len() as u64);
            let blocks = largest.div_ceil(BLOCK_BYTES).clamp(1, most) as u32;
            let grid = Grid {
                blocks: [blocks, some.len() as u32, 1],
                ..Grid::new(1, MOVE_THREADS as u32)
            };
            // SAFETY: the kernel takes one TwMoves, as `abi` declares it; the ranges are
            // those of a checked launch, held by it.
            unsafe { self.kernel.launch(l.main, grid, LaunchArgs::new().arg(&m))? };
        }
        Ok(())
    }
}
