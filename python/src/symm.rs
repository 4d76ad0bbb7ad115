//! Symmetric tensors: memory that all ranks of a world have at the same place, shown to the
//! framework, with transfers and signals on its streams.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use tilewire::device::{Device, Point, Queue};
use tilewire::prelude::*;
use tilewire::symm::{OneSided, SignalSlot, Signals, SymBuf};

use crate::call::{Call, let_go};
use crate::errors::OrRaise;
use crate::export::{Bytes, export};
use crate::world::Member;

type Object<'py> = Bound<'py, PyAny>;

const ADOPT: &str = "symm_adopt";

/// The barrier channel of symmetric tensors: operations use none.
const BARRIER: usize = 0;

/// The memory that the tensors over a buffer keep.
struct Inner {
    world: u64,
    device: Device,
    addr: u64,
    stream: Stream,
    adopted: bool,
    /// Absent only in the drop.
    held: Option<(SymBuf, Signals)>,
}

/// A buffer of symmetric memory, equal on all ranks, and a signal slot.
#[pyclass(frozen)]
pub struct SymmBuffer(Arc<Inner>);

/// Buffers by the address of my part.
static BUFFERS: Mutex<Option<HashMap<u64, Weak<Inner>>>> = Mutex::new(None);
/// A buffer of a device whose last tensor is gone, with the stream on which it was made.
struct Gone {
    stream: Stream,
    held: (SymBuf, Signals),
    adopted: bool,
}

static GONE: Mutex<Vec<Gone>> = Mutex::new(Vec::new());

/// Returns true if [`free_gone`] has something to do.
pub fn any_gone() -> bool {
    !GONE.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
}

/// Gives back what tensors that are gone have used, once the stream on which they were made has
/// come to where it is now: as in torch's allocator, work of other streams must be ordered before a
/// tensor's end. Called where memory is taken; nothing waits.
pub fn free_gone() -> Result<()> {
    let gone = std::mem::take(&mut *GONE.lock().unwrap_or_else(PoisonError::into_inner));
    for g in gone {
        if g.stream.is_capturing() {
            GONE.lock().unwrap_or_else(PoisonError::into_inner).push(g);
            continue;
        }
        let event = Arc::new(g.stream.event()?);
        g.stream.record(&event)?;
        // Memory that was adopted is its owner's: it stays as long as the heap.
        if !g.adopted {
            let event = event.clone();
            g.held.0.keep_until(move || event.is_done());
        }
        g.held.1.keep_until(move || event.is_done());
    }
    Ok(())
}

impl Inner {
    fn buf(&self) -> Result<&(SymBuf, Signals)> {
        self.held.as_ref().ok_or_else(|| Error::internal("the buffer has been freed"))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut all = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(all) = all.as_mut()
            // The address may belong to a newer buffer by now.
            && all.get(&self.addr).is_some_and(|w| w.strong_count() == 0)
        {
            all.remove(&self.addr);
        }
        if let (Device::Cuda(_), Some(held)) = (&self.device, self.held.take()) {
            let (stream, adopted) = (self.stream.clone(), self.adopted);
            let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
            gone.push(Gone { stream, held, adopted });
        }
    }
}

/// A transfer or signal of a call.
struct Side<'a> {
    os: OneSided,
    stream: &'a Stream,
    buf: &'a SymBuf,
    slot: SignalSlot,
}

impl SymmBuffer {
    /// Runs `f` of a call on the world that the buffer belongs to.
    fn on(
        &self,
        py: Python<'_>,
        op: &'static str,
        f: impl FnOnce(Side<'_>) -> Result<()> + Send,
    ) -> PyResult<()> {
        let call = Call::new(py, op, self.0.world)?;
        call.run(py, |stream| {
            let (buf, signals) = self.0.buf()?;
            let os = OneSided::new(buf.heap())?;
            f(Side { os, stream, buf, slot: signals.slot(0) })?;
            Pending::new((), stream, None)
        })?;
        // Work of the host has run: what it met is known.
        call.member.team.check().map_err(|e| e.op(op)).or_raise(py)
    }
}

impl SymmBuffer {
    /// Collective: a buffer of `world`, made by `make`, and what that says beside.
    fn made<T: Send>(
        py: Python<'_>,
        (op, world): (&'static str, u64),
        make: impl FnOnce(&Member) -> Result<((SymBuf, Signals), T)> + Send,
    ) -> PyResult<(Self, T)> {
        let call = Call::new(py, op, world)?;
        let member = call.member.clone();
        let (inner, beside) = call.prepare(py, |stream| {
            if stream.is_capturing() {
                let text = "symmetric memory cannot be allocated during a capture: all ranks \
                    allocate it together";
                return Err(Error::new(ErrorKind::NotPrepared, text)
                    .hint("call this before the capture begins"));
            }
            let_go(Some(stream))?;
            free_gone()?;
            let (held, beside) = make(&member)?;
            let (addr, _) = held.0.address(member.team.rank())?;
            let (device, stream) = (member.device.clone(), stream.clone());
            let adopted = op == ADOPT;
            Ok((Inner { world, device, addr, stream, adopted, held: Some(held) }, beside))
        })?;
        let inner = Arc::new(inner);
        let mut all = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().insert(inner.addr, Arc::downgrade(&inner));
        drop(all);
        Ok((Self(inner), beside))
    }

    /// The memory, for calls on its own world.
    pub fn memory(&self) -> Result<&SymBuf> {
        self.0.buf().map(|held| &held.0)
    }
}

#[pymethods]
impl SymmBuffer {
    /// Collective: `len_bytes` on every rank of `world`.
    #[new]
    fn new(py: Python<'_>, world: u64, len_bytes: usize) -> PyResult<Self> {
        let make =
            |member: &Member| Ok((member.plans.alloc("symm_empty", len_bytes.max(1), 1)?, ()));
        Ok(Self::made(py, ("symm_empty", world), make)?.0)
    }

    /// Collective: the allocation of the bytes at `addr`, which somebody else has made, and how
    /// many bytes `addr` lies inside.
    #[staticmethod]
    fn adopt(py: Python<'_>, world: u64, addr: u64, len_bytes: usize) -> PyResult<(Self, usize)> {
        Self::made(py, (ADOPT, world), |member: &Member| {
            let (buf, inside) = member.plans.heap().adopt(addr, len_bytes)?;
            Ok(((buf, member.team.signals(1, ADOPT)?), inside))
        })
    }

    /// The buffer whose part here begins at `addr`, if there is one.
    #[staticmethod]
    fn at(addr: u64) -> Option<Self> {
        let all = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
        all.as_ref()?.get(&addr)?.upgrade().map(Self)
    }

    #[getter]
    fn world(&self) -> u64 {
        self.0.world
    }

    /// Bytes of a rank's part.
    #[getter]
    fn len_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.buf().or_raise(py)?.0.len_bytes())
    }

    /// A capsule of DLPack over the part of `rank`: bytes `[1, len]`.
    fn part(&self, py: Python<'_>, rank: u32) -> PyResult<Py<PyAny>> {
        let (addr, len) = self.0.buf().or_raise(py)?.0.address(Rank::new(rank)).or_raise(py)?;
        // SAFETY: the heap maps the part for reading and writing, and the buffer keeps the heap.
        unsafe { export(py, &self.0.device, &Bytes::flat(addr, len), self.0.clone()) }
    }

    /// A capsule of DLPack over the parts of all ranks: bytes `[ranks, len]`.
    fn parts(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let (buf, _) = self.0.buf().or_raise(py)?;
        let len = buf.len_bytes();
        let all = buf.all_ranks(DType::U8, Shape::d1(len)).or_raise(py)?;
        let rows = (all.num_ranks, all.stride_bytes);
        let bytes = Bytes { addr: all.address, len, rows };
        // SAFETY: as in `part`, for each rank.
        unsafe { export(py, &self.0.device, &bytes, self.0.clone()) }
    }

    /// Writes `src` at byte `at` of `peer`'s part; with `signal`, raises the slot behind it.
    fn put(
        &self,
        py: Python<'_>,
        peer: u32,
        at: usize,
        src: &Object<'_>,
        signal: bool,
    ) -> PyResult<()> {
        let op = if signal { "put_signal" } else { "put" };
        let src = crate::dlpack::tensor(src, "src", &self.0.device)?;
        self.on(py, op, |s| {
            let to = inside(s.buf, at, &src)?;
            let to = (Rank::new(peer), to);
            if signal {
                // SAFETY: the program orders its transfers by signals and barriers of its own.
                unsafe { s.os.put_signal(s.stream, to, &src, s.slot) }
            } else {
                // SAFETY: as above.
                unsafe { s.os.put(s.stream, to, &src) }
            }
        })
    }

    /// Reads byte `at` of `peer`'s part and what follows into `out`.
    fn get(&self, py: Python<'_>, peer: u32, at: usize, out: &Object<'_>) -> PyResult<()> {
        let out = crate::dlpack::tensor(out, "out", &self.0.device)?;
        self.on(py, "get", |s| {
            let from = inside(s.buf, at, &out)?;
            // SAFETY: as in `put`.
            unsafe { s.os.get(s.stream, (Rank::new(peer), from), &out) }
        })
    }

    /// Waits, in the stream's order, for `n` more signals of `peer`.
    fn wait_signal(&self, py: Python<'_>, peer: u32, n: u64) -> PyResult<()> {
        self.on(py, "wait_signal", |s| s.os.wait(s.stream, Rank::new(peer), s.slot, n))
    }

    /// Collective, in the stream's order: all ranks have come here.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.on(py, "barrier", |s| s.os.barrier(s.stream, BARRIER))
    }
}

/// Offset in the heap of byte `at` of a buffer, where `t` must fit.
fn inside(buf: &SymBuf, at: usize, t: &Tensor) -> Result<usize> {
    let (len, most) = (t.len_bytes(), buf.len_bytes());
    if at.checked_add(len).is_none_or(|end| end > most) {
        return Err(Error::invalid("a transfer reaches past the symmetric tensor")
            .expected(format_args!("at most {most} bytes"))
            .seen(format_args!("{at}+{len}")));
    }
    Ok(buf.range(at, len))
}
