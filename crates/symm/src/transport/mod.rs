//! The interface to the wire, which operations call, backends implement, and the conformance suite
//! certifies.
//!
//! A [`Transport`] acts on a *lane*. On the host the lane is the launch that the calling worker
//! thread runs ([`OpCtx`]), and a call acts at once, without an allocation or a node of a graph. On
//! devices the lane is a stream, a call queues work, and everything can be captured.
//!
//! | who | lane | memory | how data moves |
//! |---|---|---|---|
//! | [`Heap::host_transport`] | [`OpCtx`] | `[u8]` | stores into the peers' mapped memory |
//! | [`Heap::connect_by_sockets`] (tests) | [`OpCtx`] | `[u8]` | messages; no peer has an address |
//! | [`DeviceTransport`] | `CudaStream` | `CudaMemory` | copy engines, and kernels of one block |
//!
//! # Rules
//! - **Credits.** A put needs a [`Permit`]: the proof that its destination has granted this launch
//!   the use of its receive buffers. [`Transport::acquire`] and [`Transport::enter`] give permits;
//!   a put to a peer that the permit does not name is refused.
//! - **Order.** A put is visible to its destination once that peer has waited for a signal that the
//!   same lane raised later. A signal orders nothing for other peers.
//! - **One producer.** One lane at a time raises the signals of a (slot, destination): devices send
//!   the running total, so totals must leave in the order in which they grew.
//! - **Faults.** A wait that fails sets the fault of the team. On the host the call itself returns
//!   the error; on devices the next call, `Pending::wait` and
//!   [`LiveTeam::check`](crate::LiveTeam::check) do, and until then queued waits return at once and
//!   queued signals raise nothing.

use tilewire_core::{Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{CudaMemory, CudaStream};

use crate::heap::Heap;
use crate::vmm::DeviceTeam;

mod host;
mod lane;
mod one_sided;
mod permit;
mod sockets;

pub(crate) use host::{Mapped, Peers, over};
pub use lane::OpCtx;
pub use one_sided::OneSided;
pub use permit::Permit;

#[cfg(doc)]
use crate::vmm::DeviceTransport;

/// Number of a signal counter in the team's control pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalSlot(pub(crate) usize);

impl SignalSlot {
    /// Returns the slot's number.
    pub fn index(self) -> usize {
        self.0
    }
}

/// The capabilities of a transport. They are known when a heap is made, never found out in the
/// middle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Peers' memory can be addressed directly.
    pub direct_peer: bool,
    /// `get` is provided.
    pub get: bool,
    /// Work can be captured and replayed.
    pub graph: bool,
    /// The process can go on after a peer timed out or died.
    pub recoverable: bool,
}

/// The slots that a launch enters with.
#[derive(Clone, Copy, Debug)]
pub struct Enter {
    /// Slot of the credits.
    pub credit: SignalSlot,
    /// Fingerprint of the launch: every credit carries it on the host.
    pub tag: u64,
    /// First of the slots whose flags this launch raises once for each peer.
    pub first: SignalSlot,
    /// Number of those slots.
    pub num: usize,
}

/// The shape of rows that are read: `num` rows of `width` bytes each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Bytes of a row.
    pub width: usize,
    /// Number of rows.
    pub num: usize,
    /// Bytes from the beginning of a row to that of the next, in the chunk that is read.
    pub from_pitch: usize,
    /// The same in the memory that is written.
    pub out_pitch: usize,
}

impl Rows {
    /// Returns the bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.width * self.num
    }

    /// Returns the bytes from the first to the last byte that rows `pitch` apart take.
    pub fn reach(&self, pitch: usize) -> usize {
        if self.bytes() == 0 { 0 } else { (self.num - 1) * pitch + self.width }
    }
}

/// A transport on which host executors run.
pub type HostTransport = dyn Transport<Lane = OpCtx, Memory = [u8]>;

/// A transport whose work is queued on a stream of a CUDA device.
pub type StreamTransport = dyn Transport<Lane = CudaStream, Memory = CudaMemory>;

/// One-sided transfers and signals between the members of a team. The module's documentation has
/// the rules. `at` is a byte offset in a rank's chunk of the heap, `phase` names the step in
/// errors.
pub trait Transport: Send + Sync {
    /// The lane on which calls act, or queue their work.
    type Lane;
    /// Memory of this rank outside of the heap: the source of puts, the destination of gets.
    type Memory: ?Sized;

    /// Returns the heap that is accessed.
    fn heap(&self) -> &Heap;

    /// Returns the capabilities of this transport.
    fn caps(&self) -> Caps;

    /// Begins a launch: grants every peer the use of my receive buffers, waits for the same of all
    /// peers, and makes the totals that the launch's flags publish ([`Transport::advance`]).
    ///
    /// # Errors
    /// The errors of [`Transport::acquire`]; `InvalidArgument` if the team does not have the slots.
    fn enter(&self, lane: &Self::Lane, e: &Enter) -> Result<Permit>;

    /// Grants `dst` one more use of my receive buffers, for the launch with fingerprint `tag`.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that the team does not have; the fault of the team.
    fn grant(
        &self,
        lane: &Self::Lane,
        dst: Rank,
        slot: SignalSlot,
        tag: u64,
        phase: &str,
    ) -> Result<()>;

    /// Waits for a grant of `src`. On the host the grant must be for the launch with fingerprint
    /// `tag`; devices compare launches when they begin.
    ///
    /// # Errors
    /// The errors of [`Transport::wait`]; `Mismatch` with both ranks' texts if the launches differ.
    fn acquire(
        &self,
        lane: &Self::Lane,
        src: Rank,
        slot: SignalSlot,
        tag: u64,
        phase: &str,
    ) -> Result<Permit>;

    /// Writes `src` at `to.1` of the chunk of rank `to.0`.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap; `Protocol` if `permit` does not name the
    /// rank; the fault of the team.
    fn put(
        &self,
        lane: &Self::Lane,
        permit: &Permit,
        to: (Rank, usize),
        src: &Self::Memory,
        phase: &str,
    ) -> Result<()>;

    /// Puts `from.1` bytes at `from.0` of my own chunk: a rank passes on bytes that it has
    /// received.
    ///
    /// # Safety
    /// No rank may write the range meanwhile: its writer has signalled, a lane that this one is
    /// behind has waited for the signal, and the writer has no credit to write again.
    ///
    /// # Errors
    /// As [`Transport::put`].
    unsafe fn pass(
        &self,
        lane: &Self::Lane,
        permit: &Permit,
        to: (Rank, usize),
        from: (usize, usize),
        phase: &str,
    ) -> Result<()>;

    /// Reads from `from.1` of the chunk of rank `from.0` into `out`, usable behind the call on the
    /// same lane. The content of `out` after a fault is unspecified.
    ///
    /// # Safety
    /// No rank may write the range meanwhile: its writer has signalled, a lane that this one is
    /// behind has waited for the signal, and the writer does not write it again before this rank
    /// signals.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap; the fault of the team.
    unsafe fn get(
        &self,
        lane: &Self::Lane,
        from: (Rank, usize),
        out: &mut Self::Memory,
        phase: &str,
    ) -> Result<()>;

    /// Reads rows from `from.1` of the chunk of rank `from.0` on into `out`: one get of
    /// `rows.bytes()` bytes. Without bytes nothing happens.
    ///
    /// # Safety
    /// As [`Transport::get`].
    ///
    /// # Errors
    /// `InvalidArgument` if the rows are not in the heap, or not in `out`.
    unsafe fn get_rows(
        &self,
        lane: &Self::Lane,
        from: (Rank, usize),
        out: &mut Self::Memory,
        rows: Rows,
        phase: &str,
    ) -> Result<()>;

    /// Adds `n` to my count on `dst`'s `slot`.
    ///
    /// # Errors
    /// As [`Transport::grant`].
    fn signal(
        &self,
        lane: &Self::Lane,
        dst: Rank,
        slot: SignalSlot,
        n: u64,
        phase: &str,
    ) -> Result<()>;

    /// Raises the totals of `num` slots from `first` on, for every peer, by one. The flags of this
    /// launch publish these totals. It is one piece of work for all of them, where each signal is
    /// one of its own.
    ///
    /// Each (slot, peer) must then be published by exactly one [`Transport::flag`]: a total that is
    /// not published lets a later wait pass too early. The lane must be behind all flags of earlier
    /// totals, because a flag carries the total at the time of its copy.
    ///
    /// # Errors
    /// `InvalidArgument` if the team does not have the slots; the fault of the team.
    fn advance(&self, lane: &Self::Lane, first: SignalSlot, num: usize) -> Result<()>;

    /// Publishes to `dst` the total that [`Transport::advance`] made for the slot, behind the
    /// lane's puts to it. The lane must be ordered behind that call.
    ///
    /// # Errors
    /// As [`Transport::grant`].
    fn flag(&self, lane: &Self::Lane, dst: Rank, slot: SignalSlot, phase: &str) -> Result<()>;

    /// Waits for `n` more counts of `src` on my `slot`.
    ///
    /// # Errors
    /// `Timeout`, `PeerDead`, `Aborted` or `Mismatch`; the team is faulted then.
    fn wait(
        &self,
        lane: &Self::Lane,
        src: Rank,
        slot: SignalSlot,
        n: u64,
        phase: &str,
    ) -> Result<()>;

    /// Waits as [`Transport::wait`], for the last count that `src` raises on this slot in this
    /// launch. Producers that need a credit cannot run ahead, so that the host reports a count that
    /// is larger than expected.
    ///
    /// # Errors
    /// As [`Transport::wait`]; `Protocol` if `src` has signalled more often than it may.
    fn wait_last(
        &self,
        lane: &Self::Lane,
        src: Rank,
        slot: SignalSlot,
        n: u64,
        phase: &str,
    ) -> Result<()>;

    /// Waits for one more count of every peer on `slot`.
    ///
    /// # Errors
    /// As [`Transport::wait`].
    fn wait_peers(&self, lane: &Self::Lane, slot: SignalSlot, phase: &str) -> Result<()> {
        self.heap().team().peers().try_for_each(|p| self.wait_last(lane, p, slot, 1, phase))
    }

    /// Stores `value` in the word at `to.1` of the chunk of rank `to.0`: a flag of the heap, which
    /// has one writer, and whose values grow from launch to launch. This lane's earlier puts to the
    /// rank are visible to a reader that sees the value. Flags are not counted: the same value
    /// stored twice changes nothing.
    ///
    /// # Errors
    /// `Unsupported` on devices, whose kernels store these words themselves; as
    /// [`Transport::grant`].
    fn store_flag(
        &self,
        lane: &Self::Lane,
        to: (Rank, usize),
        value: u64,
        phase: &str,
    ) -> Result<()> {
        let _ = (lane, to, value, phase);
        Err(flags_are_kernels())
    }

    /// Puts `words`, each of which is a flag as well, so that no signal has to follow.
    ///
    /// # Errors
    /// As [`Transport::store_flag`].
    fn put_flags(
        &self,
        lane: &Self::Lane,
        to: (Rank, usize),
        words: &[u64],
        phase: &str,
    ) -> Result<()> {
        let _ = (lane, to, words, phase);
        Err(flags_are_kernels())
    }

    /// Waits until rank `from.0` has stored `least` or more in each of the words at `from.1` of my
    /// own chunk, and copies them to `out`.
    ///
    /// # Errors
    /// As [`Transport::wait`] and [`Transport::store_flag`].
    fn wait_flags(
        &self,
        lane: &Self::Lane,
        from: (Rank, usize),
        least: u64,
        out: &mut [u64],
        phase: &str,
    ) -> Result<()> {
        let _ = (lane, from, least, out, phase);
        Err(flags_are_kernels())
    }

    /// Waits until all members have reached the same barrier on `channel`.
    ///
    /// # Errors
    /// As [`Transport::wait`]; `InvalidArgument` if the team does not have the channel.
    fn barrier(&self, lane: &Self::Lane, channel: usize, phase: &str) -> Result<()>;

    /// Puts as [`Transport::pass`], and raises `slot` behind it. Without bytes it raises the signal
    /// alone.
    ///
    /// # Safety
    /// As [`Transport::pass`].
    ///
    /// # Errors
    /// As [`Transport::put`].
    unsafe fn pass_signal(
        &self,
        lane: &Self::Lane,
        permit: &Permit,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()>;

    /// Puts `src` and raises `slot` behind it. Without bytes it raises the signal alone.
    ///
    /// # Errors
    /// As [`Transport::put`].
    fn put_signal(
        &self,
        lane: &Self::Lane,
        permit: &Permit,
        to: (Rank, usize),
        src: &Self::Memory,
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()>;

    /// Puts `src` and publishes the total of [`Transport::advance`] behind it. Without bytes it
    /// publishes the flag alone.
    ///
    /// # Errors
    /// As [`Transport::put`].
    fn put_flag(
        &self,
        lane: &Self::Lane,
        permit: &Permit,
        to: (Rank, usize),
        src: &Self::Memory,
        slot: SignalSlot,
        phase: &str,
    ) -> Result<()>;

    /// Orders earlier puts before later ones, without waiting for them.
    ///
    /// # Errors
    /// The fault of the team.
    fn fence(&self, lane: &Self::Lane) -> Result<()>;

    /// Waits in lane order until all earlier puts are complete at their destinations.
    ///
    /// # Errors
    /// The fault of the team.
    fn quiet(&self, lane: &Self::Lane) -> Result<()>;

    /// Compares counts with nothing in flight: every signal that was raised has been waited for,
    /// and none twice.
    ///
    /// # Errors
    /// `Protocol` naming the first slot whose count differs from the number that its waits
    /// consumed.
    fn check_counters(&self) -> Result<()>;

    /// Returns the addresses and words by which kernels meet the other ranks themselves. `None` on
    /// the host, and where GPUs do not reach each other's memory.
    fn device_team(&self) -> Option<&DeviceTeam> {
        None
    }
}

fn flags_are_kernels() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "flag words are for the host: on devices kernels store and compare them",
    )
}

pub(crate) fn check_channel(channel: usize) -> Result<()> {
    let num = crate::control::NUM_CHANNELS;
    if channel < num {
        return Ok(());
    }
    Err(Error::invalid(format!("there is no barrier channel {channel}"))
        .expected(format_args!("less than {num}"))
        .seen(channel))
}

pub(crate) fn check_slots(first: SignalSlot, num: usize) -> Result<()> {
    let all = crate::control::NUM_SIGNALS;
    if first.0.checked_add(num).is_some_and(|end| end <= all) {
        return Ok(());
    }
    Err(Error::invalid(format!("the team does not have {num} signal slots from {} on", first.0))
        .expected(format_args!("at most {all} in all")))
}
