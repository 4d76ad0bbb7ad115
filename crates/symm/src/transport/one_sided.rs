//! Free-standing transfers and signals as work on a stream, on every backend alike.

use std::sync::Arc;

use tilewire_core::{Rank, Result};
use tilewire_device::{Node, Stream, Tensor};

use super::{
    Caps, HostTransport, OpCtx, Permit, SignalSlot, Transport, check_channel, check_slots,
};
use crate::heap::Heap;
use crate::vmm::DeviceTransport;

/// One-sided access to a heap for programs of their own: each call is work on a stream, and can be
/// captured.
///
/// Operations call a [`Transport`] under credits, which this type does not have. A caller orders
/// its transfers by signals and barriers of its own, so transfers are `unsafe`.
#[derive(Clone)]
pub enum OneSided {
    /// On a heap of the host: every call becomes a node of the stream.
    Host(Arc<HostTransport>),
    /// On a heap in device memory.
    Device(DeviceTransport),
}

/// Queues `f` as a node of `stream`, which acts on a lane of its own.
fn queue(
    net: &Arc<HostTransport>,
    stream: &Stream,
    name: &'static str,
    f: impl Fn(&HostTransport, &OpCtx) -> Result<()> + Send + Sync + 'static,
) -> Result<()> {
    let heap = net.heap();
    heap.team().check()?;
    let (ctx, net) = (OpCtx::new(heap, name, 0), net.clone());
    let fault = heap.team().fault().clone();
    stream.launch(Node::new(name, move || f(&*net, &ctx)).in_domain(fault, || {}))
}

/// Queues as [`queue`], for work that reads the bytes of `src`.
fn queue_put(
    net: &Arc<HostTransport>,
    stream: &Stream,
    src: &Tensor,
    put: impl Fn(&HostTransport, &OpCtx, &[u8]) -> Result<()> + Send + Sync + 'static,
) -> Result<()> {
    let src = src.clone();
    queue(net, stream, "put", move |n, c| src.read(|b| put(n, c, b))?)
}

impl OneSided {
    /// Returns one-sided access to `heap`.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn new(heap: &Heap) -> Result<Self> {
        match heap.0.vmm {
            None => heap.host_transport().map(Self::Host),
            Some(_) => DeviceTransport::new(heap).map(Self::Device),
        }
    }

    /// Returns the heap.
    pub fn heap(&self) -> &Heap {
        match self {
            Self::Host(net) => net.heap(),
            Self::Device(net) => net.heap(),
        }
    }

    /// Returns the capabilities of its transport.
    pub fn caps(&self) -> Caps {
        match self {
            Self::Host(net) => net.caps(),
            Self::Device(net) => net.caps(),
        }
    }

    /// Returns a permit for all peers: the caller of an `unsafe` method here guarantees the order
    /// that credits would keep.
    fn permit(&self) -> Permit {
        // SAFETY: the contract of `put`, `put_signal` and `put_flag`.
        unsafe { Permit::assume(self.heap().team().size()) }
    }

    /// Writes `src` at byte `to.1` of the chunk of rank `to.0`.
    ///
    /// # Safety
    /// The rank must not access the range, and no other rank may write it, from the time at which
    /// the work runs until the rank has waited for a later signal of this stream. `src` does not
    /// change before the work has run.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is not in the heap, or the rank not in the team; the fault of
    /// the team.
    pub unsafe fn put(&self, stream: &Stream, to: (Rank, usize), src: &Tensor) -> Result<()> {
        self.heap().check_range(to.0, to.1, src.len_bytes())?;
        let permit = self.permit();
        match self {
            Self::Device(net) => net.put(stream.cuda()?, &permit, to, &src.cuda()?, "put"),
            Self::Host(net) => {
                queue_put(net, stream, src, move |n, c, b| n.put(c, &permit, to, b, "put"))
            }
        }
    }

    /// Puts as [`OneSided::put`], and raises a signal behind it.
    ///
    /// # Safety
    /// As [`OneSided::put`].
    ///
    /// # Errors
    /// As [`OneSided::put`].
    pub unsafe fn put_signal(
        &self,
        stream: &Stream,
        to: (Rank, usize),
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        self.heap().check_range(to.0, to.1, src.len_bytes())?;
        let permit = self.permit();
        match self {
            Self::Device(net) => {
                net.put_signal(stream.cuda()?, &permit, to, &src.cuda()?, slot, "put")
            }
            Self::Host(net) => queue_put(net, stream, src, move |n, c, b| {
                n.put_signal(c, &permit, to, b, slot, "put")
            }),
        }
    }

    /// Puts as [`OneSided::put`], and publishes behind it the total that [`OneSided::advance`] made
    /// for the slot.
    ///
    /// # Safety
    /// As [`OneSided::put`].
    ///
    /// # Errors
    /// As [`OneSided::put`].
    pub unsafe fn put_flag(
        &self,
        stream: &Stream,
        to: (Rank, usize),
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        self.heap().check_range(to.0, to.1, src.len_bytes())?;
        let permit = self.permit();
        match self {
            Self::Device(net) => {
                net.put_flag(stream.cuda()?, &permit, to, &src.cuda()?, slot, "put")
            }
            Self::Host(net) => queue_put(net, stream, src, move |n, c, b| {
                n.put_flag(c, &permit, to, b, slot, "put")
            }),
        }
    }

    /// Makes the totals that flags of this stream publish: see [`Transport::advance`].
    ///
    /// # Errors
    /// `InvalidArgument` if the team does not have the slots; the fault of the team.
    pub fn advance(&self, stream: &Stream, first: SignalSlot, num: usize) -> Result<()> {
        check_slots(first, num)?;
        match self {
            Self::Host(net) => net.heap().team().check(),
            Self::Device(net) => net.advance(stream.cuda()?, first, num),
        }
    }

    /// Reads from byte `from.1` of the chunk of rank `from.0` into `out`; usable in stream order.
    ///
    /// # Safety
    /// No rank may write the range from the last wait of this stream for its writer until the work
    /// has run.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    pub unsafe fn get(&self, stream: &Stream, from: (Rank, usize), out: &Tensor) -> Result<()> {
        self.heap().check_range(from.0, from.1, out.len_bytes())?;
        match self {
            // SAFETY: the caller's contract.
            Self::Device(net) => unsafe { net.get(stream.cuda()?, from, &mut out.cuda()?, "get") },
            Self::Host(net) => {
                let out = out.clone();
                queue(net, stream, "get", move |n, c| {
                    // SAFETY: the caller's contract.
                    out.write(|b| unsafe { n.get(c, from, b, "get") })?
                })
            }
        }
    }

    /// Adds `n` to my count on `dst`'s `slot`.
    ///
    /// # Errors
    /// As [`OneSided::put`].
    pub fn signal(&self, stream: &Stream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.heap().check_range(dst, 0, 0)?;
        match self {
            Self::Device(net) => net.signal(stream.cuda()?, dst, slot, n, "signal"),
            Self::Host(net) => {
                queue(net, stream, "signal", move |t, c| t.signal(c, dst, slot, n, "signal"))
            }
        }
    }

    /// Waits for `n` more counts of `src`. Its producer may be ahead: nothing here is gated by
    /// credits.
    ///
    /// # Errors
    /// As [`OneSided::put`]. A timeout surfaces as the fault of the team.
    pub fn wait(&self, stream: &Stream, src: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.heap().check_range(src, 0, 0)?;
        match self {
            Self::Device(net) => net.wait(stream.cuda()?, src, slot, n, "wait"),
            Self::Host(net) => {
                queue(net, stream, "wait", move |t, c| t.wait(c, src, slot, n, "wait"))
            }
        }
    }

    /// Waits until all members have reached the same barrier on `channel`.
    ///
    /// # Errors
    /// As [`OneSided::wait`]; `InvalidArgument` if the team does not have the channel.
    pub fn barrier(&self, stream: &Stream, channel: usize) -> Result<()> {
        check_channel(channel)?;
        match self {
            Self::Device(net) => net.barrier(stream.cuda()?, channel, "barrier"),
            Self::Host(net) => {
                queue(net, stream, "barrier", move |t, c| t.barrier(c, channel, "barrier"))
            }
        }
    }

    /// Orders earlier puts before later ones, without waiting for them.
    ///
    /// # Errors
    /// If the stream has ended; the fault of the team.
    pub fn fence(&self, stream: &Stream) -> Result<()> {
        match self {
            Self::Device(net) => net.fence(stream.cuda()?),
            Self::Host(net) => queue(net, stream, "fence", |t, c| t.fence(c)),
        }
    }

    /// Waits in stream order until all earlier puts are complete at their destinations.
    ///
    /// # Errors
    /// As [`OneSided::fence`].
    pub fn quiet(&self, stream: &Stream) -> Result<()> {
        match self {
            Self::Device(net) => net.quiet(stream.cuda()?),
            Self::Host(net) => queue(net, stream, "quiet", |t, c| t.quiet(c)),
        }
    }

    /// Compares counts with nothing in flight: every signal that was raised has been waited for,
    /// and none twice.
    ///
    /// # Errors
    /// `Protocol` naming the first slot whose count differs from the number that its waits
    /// consumed.
    pub fn check_counters(&self) -> Result<()> {
        match self {
            Self::Host(net) => net.check_counters(),
            Self::Device(net) => net.check_counters(),
        }
    }
}
