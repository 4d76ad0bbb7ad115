//! Calls of a transport as work on a stream: what the cases make, on every backend alike. On
//! devices a call of [`Transport`] queues already; on the host each one becomes a node.

use std::sync::Arc;

use tilewire_core::{Rank, Result};
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_device::{Buffer, Node, Queue, Stream, Tensor};
use tilewire_symm::*;

/// The calls of [`Transport`], queued. Puts go under a permit for all: the cases order them by
/// signals of their own.
pub trait Queued: Clone + Send + Sync {
    type Stream: Queue;
    type Buffer: Buffer;

    fn heap(&self) -> &Heap;
    fn caps(&self) -> Caps;
    fn put(&self, s: &Self::Stream, dst: Rank, at: usize, src: &Self::Buffer) -> Result<()>;
    /// As [`Queued::put`], under the permit of a launch that begins with it.
    fn enter_and_put(
        &self,
        s: &Self::Stream,
        enter: Enter,
        dst: Vec<(Rank, usize)>,
        src: &Self::Buffer,
        slot: SignalSlot,
    ) -> Result<()>;
    /// A put under a permit that names `granted` alone.
    fn put_granted(
        &self,
        s: &Self::Stream,
        granted: Option<(Rank, SignalSlot)>,
        dst: (Rank, usize),
        src: &Self::Buffer,
    ) -> Result<()>;
    fn get(&self, s: &Self::Stream, src: Rank, at: usize, out: &Self::Buffer) -> Result<()>;
    fn get_rows(
        &self,
        s: &Self::Stream,
        from: (Rank, usize),
        out: &Self::Buffer,
        rows: Rows,
    ) -> Result<()>;
    fn pass_signal(
        &self,
        s: &Self::Stream,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
    ) -> Result<()>;
    fn signal(&self, s: &Self::Stream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()>;
    fn wait(&self, s: &Self::Stream, src: Rank, slot: SignalSlot, n: u64) -> Result<()>;
    fn wait_peers(&self, s: &Self::Stream, slot: SignalSlot) -> Result<()>;
    fn barrier(&self, s: &Self::Stream, channel: usize) -> Result<()>;
    fn put_signal(
        &self,
        s: &Self::Stream,
        dst: (Rank, usize),
        src: &Self::Buffer,
        slot: SignalSlot,
    ) -> Result<()>;
    fn advance(&self, s: &Self::Stream, first: SignalSlot, num: usize) -> Result<()>;
    fn put_flag(
        &self,
        s: &Self::Stream,
        dst: (Rank, usize),
        src: &Self::Buffer,
        slot: SignalSlot,
    ) -> Result<()>;
    fn fence(&self, s: &Self::Stream) -> Result<()>;
    fn quiet(&self, s: &Self::Stream) -> Result<()>;
    fn check_counters(&self) -> Result<()>;
}

/// A permit for all: the case orders its puts by signals of its own, or by barriers.
fn all(heap: &Heap) -> Permit {
    // SAFETY: as above; nothing but the case uses the heap.
    unsafe { Permit::assume(heap.team().size()) }
}

/// On the host.
#[derive(Clone)]
pub struct OnHost(pub Arc<HostTransport>);

impl OnHost {
    fn queue(
        &self,
        stream: &Stream,
        name: &'static str,
        f: impl Fn(&HostTransport, &OpCtx) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let heap = self.0.heap();
        heap.team().check()?;
        let (ctx, net) = (OpCtx::new(heap, name, 0), self.0.clone());
        let fault = heap.team().fault().clone();
        stream.launch(Node::new(name, move || f(&*net, &ctx)).in_domain(fault, || {}))
    }

    /// The free-standing calls.
    fn one_sided(&self) -> OneSided {
        OneSided::Host(self.0.clone())
    }
}

impl Queued for OnHost {
    type Stream = Stream;
    type Buffer = Tensor;

    fn heap(&self) -> &Heap {
        self.0.heap()
    }

    fn caps(&self) -> Caps {
        self.0.caps()
    }

    fn put(&self, s: &Stream, dst: Rank, at: usize, src: &Tensor) -> Result<()> {
        // SAFETY: the cases order their transfers by signals and barriers.
        unsafe { self.one_sided().put(s, (dst, at), src) }
    }

    fn enter_and_put(
        &self,
        s: &Stream,
        enter: Enter,
        dst: Vec<(Rank, usize)>,
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        let src = src.clone();
        self.queue(s, "enter", move |n, c| {
            let permit = n.enter(c, &enter)?;
            let put = |b: &[u8]| {
                dst.iter().try_for_each(|&to| n.put_flag(c, &permit, to, b, slot, "put"))
            };
            src.read(put)?
        })
    }

    fn put_granted(
        &self,
        s: &Stream,
        granted: Option<(Rank, SignalSlot)>,
        to: (Rank, usize),
        src: &Tensor,
    ) -> Result<()> {
        let src = src.clone();
        self.queue(s, "put", move |n, c| {
            let acquire = |(r, slot)| n.acquire(c, r, slot, 0, "credit");
            let permit = granted.map_or(Ok(Permit::none()), acquire)?;
            src.read(|b| n.put(c, &permit, to, b, "put"))?
        })
    }

    fn get(&self, s: &Stream, src: Rank, at: usize, out: &Tensor) -> Result<()> {
        // SAFETY: as in `put`.
        unsafe { self.one_sided().get(s, (src, at), out) }
    }

    fn get_rows(&self, s: &Stream, from: (Rank, usize), out: &Tensor, rows: Rows) -> Result<()> {
        let out = out.clone();
        self.queue(s, "get", move |n, c| {
            // SAFETY: the case has waited for what it gets.
            out.write(|b| unsafe { n.get_rows(c, from, b, rows, "get") })?
        })
    }

    fn pass_signal(
        &self,
        s: &Stream,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
    ) -> Result<()> {
        self.queue(s, "pass", move |n, c| {
            // SAFETY: the case has waited for what it passes on.
            unsafe { n.pass_signal(c, &all(n.heap()), to, from, slot, "pass") }
        })
    }

    fn signal(&self, s: &Stream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.one_sided().signal(s, dst, slot, n)
    }

    fn wait(&self, s: &Stream, src: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        self.one_sided().wait(s, src, slot, n)
    }

    fn wait_peers(&self, s: &Stream, slot: SignalSlot) -> Result<()> {
        self.queue(s, "wait", move |t, c| t.wait_peers(c, slot, "wait"))
    }

    fn barrier(&self, s: &Stream, channel: usize) -> Result<()> {
        self.one_sided().barrier(s, channel)
    }

    fn put_signal(
        &self,
        s: &Stream,
        to: (Rank, usize),
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        // SAFETY: as in `put`.
        unsafe { self.one_sided().put_signal(s, to, src, slot) }
    }

    fn advance(&self, s: &Stream, first: SignalSlot, num: usize) -> Result<()> {
        self.one_sided().advance(s, first, num)
    }

    fn put_flag(
        &self,
        s: &Stream,
        to: (Rank, usize),
        src: &Tensor,
        slot: SignalSlot,
    ) -> Result<()> {
        // SAFETY: as in `put`.
        unsafe { self.one_sided().put_flag(s, to, src, slot) }
    }

    fn fence(&self, s: &Stream) -> Result<()> {
        self.one_sided().fence(s)
    }

    fn quiet(&self, s: &Stream) -> Result<()> {
        self.one_sided().quiet(s)
    }

    fn check_counters(&self) -> Result<()> {
        self.0.check_counters()
    }
}

/// On devices: the transport itself.
impl Queued for DeviceTransport {
    type Stream = CudaStream;
    type Buffer = CudaMemory;

    fn heap(&self) -> &Heap {
        Transport::heap(self)
    }

    fn caps(&self) -> Caps {
        Transport::caps(self)
    }

    fn put(&self, s: &CudaStream, dst: Rank, at: usize, src: &CudaMemory) -> Result<()> {
        Transport::put(self, s, &all(Transport::heap(self)), (dst, at), src, "put")
    }

    fn enter_and_put(
        &self,
        s: &CudaStream,
        enter: Enter,
        dst: Vec<(Rank, usize)>,
        src: &CudaMemory,
        slot: SignalSlot,
    ) -> Result<()> {
        let permit = self.enter(s, &enter)?;
        dst.iter().try_for_each(|&to| Transport::put_flag(self, s, &permit, to, src, slot, "put"))
    }

    fn put_granted(
        &self,
        s: &CudaStream,
        granted: Option<(Rank, SignalSlot)>,
        to: (Rank, usize),
        src: &CudaMemory,
    ) -> Result<()> {
        let acquire = |(r, slot)| self.acquire(s, r, slot, 0, "credit");
        let permit = granted.map_or(Ok(Permit::none()), acquire)?;
        Transport::put(self, s, &permit, to, src, "put")
    }

    fn get(&self, s: &CudaStream, src: Rank, at: usize, out: &CudaMemory) -> Result<()> {
        // SAFETY: the case has waited for what it gets.
        unsafe { Transport::get(self, s, (src, at), &mut out.clone(), "get") }
    }

    fn get_rows(
        &self,
        s: &CudaStream,
        from: (Rank, usize),
        out: &CudaMemory,
        rows: Rows,
    ) -> Result<()> {
        // SAFETY: the case has waited for what it gets.
        unsafe { Transport::get_rows(self, s, from, &mut out.clone(), rows, "get") }
    }

    fn pass_signal(
        &self,
        s: &CudaStream,
        to: (Rank, usize),
        from: (usize, usize),
        slot: SignalSlot,
    ) -> Result<()> {
        let permit = all(Transport::heap(self));
        // SAFETY: the case has waited for what it passes on.
        unsafe { Transport::pass_signal(self, s, &permit, to, from, slot, "pass") }
    }

    fn signal(&self, s: &CudaStream, dst: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        Transport::signal(self, s, dst, slot, n, "signal")
    }

    fn wait(&self, s: &CudaStream, src: Rank, slot: SignalSlot, n: u64) -> Result<()> {
        Transport::wait(self, s, src, slot, n, "wait")
    }

    fn wait_peers(&self, s: &CudaStream, slot: SignalSlot) -> Result<()> {
        Transport::wait_peers(self, s, slot, "wait")
    }

    fn barrier(&self, s: &CudaStream, channel: usize) -> Result<()> {
        Transport::barrier(self, s, channel, "barrier")
    }

    fn put_signal(
        &self,
        s: &CudaStream,
        to: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
    ) -> Result<()> {
        Transport::put_signal(self, s, &all(Transport::heap(self)), to, src, slot, "put")
    }

    fn advance(&self, s: &CudaStream, first: SignalSlot, num: usize) -> Result<()> {
        Transport::advance(self, s, first, num)
    }

    fn put_flag(
        &self,
        s: &CudaStream,
        to: (Rank, usize),
        src: &CudaMemory,
        slot: SignalSlot,
    ) -> Result<()> {
        Transport::put_flag(self, s, &all(Transport::heap(self)), to, src, slot, "put")
    }

    fn fence(&self, s: &CudaStream) -> Result<()> {
        Transport::fence(self, s)
    }

    fn quiet(&self, s: &CudaStream) -> Result<()> {
        Transport::quiet(self, s)
    }

    fn check_counters(&self) -> Result<()> {
        Transport::check_counters(self)
    }
}
