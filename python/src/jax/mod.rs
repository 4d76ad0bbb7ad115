//! Calls from XLA: `tilewire.jax`.
//!
//! A call of an operation in a JAX program is a custom call of one target, `tilewire`, whose
//! attribute is a text that says what is asked for ([`spec`]). XLA calls it by its foreign function
//! interface ([`ffi`]) in two stages:
//! - *instantiate*, once for each call of a compiled program, when that is compiled or loaded: the
//!   plan is made here, for all ranks of this process at once, together with the other processes
//!   ([`site`], [`world`]). What it makes is the call's state, which XLA keeps with the program.
//! - *execute*, on each device: the plan is launched ([`run`]).
//!
//! # Order, and why nothing waits forever
//! XLA runs calls that do not depend on each other in any order, and in different orders on
//! different devices. So each call has a team, memory and a plan of its own, on the CPU also a
//! stream: a launch of one never waits for one of another, and launches of the same call have the
//! same order on all ranks, because a call is executed again only when it is complete: the next
//! iteration of a loop follows the one before, and executions of a program on one device follow
//! each other. The state belongs to the *instruction*: a function that is called twice is two
//! instructions after XLA has inlined it, and has two states, though JAX lowers it once.
//!
//! Making plans has one order on all ranks. Processes compile the same programs in the same order,
//! each compilation instantiates its calls in the order of the same schedule, and a process does so
//! for one call after the other. Ranks that come to different calls get a `Mismatch`: the
//! meeting compares the number of the call in its program, which JAX's lowering gives it, how often
//! a call of that number was instantiated, and all its shapes. So two calls of equal shapes that
//! are written twice are never taken for each other; of the two instructions of a function that is
//! called twice, XLA's order, which depends on the program alone, says which is which. The meeting
//! takes place on a team that is used for nothing else, so launches of other programs go on
//! meanwhile and do not disturb it.
//!
//! On the CPU, execute does not block. It queues the launch and returns a future, which a thread of
//! ours sets when the launch is complete ([`pool`]): no thread of XLA's waits in a call, whatever
//! number of devices shares however few threads. On a GPU the launch goes to XLA's stream and
//! execute returns; kernels wait for each other there. One stream executes a program's calls in the
//! order of its schedule, which is the same on all ranks. The plan is there before the first
//! execution, so a call may be captured into a command buffer at once.
//!
//! A launch that fails ends the teams of all calls of its rank ([`world::Local::end`]): its program
//! stops there, and ranks that wait for it in a later call hear of it at once. Every other wait
//! ends at the deadline of the world.

mod ffi;
mod pool;
mod run;
mod site;
mod spec;
pub mod world;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::prelude::*;
use tilewire::core::memory::error_of_panic;
use tilewire::device::Device;
use tilewire::device::cuda::CudaStream;
use tilewire::ops::ep::EpHandle;
use tilewire::prelude::*;

use crate::errors::OrRaise;
use ffi::{CallFrame, Frame, TypeId, TypeInfo, XlaError};
use run::Tensors;
use site::{Site, Slot};
use spec::{Desc, Spec};

/// Each platform's XLA gives the type of the state a number of its own.
static STATE: [TypeId; 2] = [TypeId::unknown(), TypeId::unknown()];
static STATE_INFO: TypeInfo = TypeInfo::new(site::drop_site);

/// # Safety
/// XLA calls it with a valid frame.
unsafe extern "C" fn instantiate<const CUDA: bool>(frame: *mut CallFrame) -> *mut XlaError {
    // SAFETY: as above.
    unsafe { called(frame, CUDA, |frame| instantiated(frame, &STATE[usize::from(CUDA)])) }
}

/// # Safety
/// XLA calls it with a valid frame.
unsafe extern "C" fn initialize<const CUDA: bool>(frame: *mut CallFrame) -> *mut XlaError {
    // SAFETY: as above.
    unsafe {
        called(frame, CUDA, |frame| {
            // Plans without a team are made here: not in a capture.
            state(frame, CUDA)?.with_slot(frame.ordinal()?, CUDA, |_, _| Ok(()))
        })
    }
}

/// # Safety
/// XLA calls it with a valid frame.
unsafe extern "C" fn execute<const CUDA: bool>(frame: *mut CallFrame) -> *mut XlaError {
    // SAFETY: as above.
    unsafe { called(frame, CUDA, |frame| if CUDA { on_device(frame) } else { on_host(frame) }) }
}

/// # Safety
/// `raw` is the frame that XLA calls a handler with.
unsafe fn called(
    raw: *mut CallFrame,
    cuda: bool,
    f: impl FnOnce(&mut Frame<'_>) -> Result<()>,
) -> *mut XlaError {
    // SAFETY: as above.
    if let Some(answer) = unsafe { ffi::answer_query(raw, &STATE[usize::from(cuda)]) } {
        return answer;
    }
    // SAFETY: as above.
    let mut frame = match unsafe { Frame::new(raw) } {
        Ok(frame) => frame,
        // SAFETY: as above.
        Err(e) => return unsafe { ffi::refuse(raw, &e) },
    };
    let done = catch_unwind(AssertUnwindSafe(|| f(&mut frame))).unwrap_or_else(panicked);
    done.map_or_else(|e| frame.error(&e), |()| std::ptr::null_mut())
}

fn panicked<T>(panic: Box<dyn Any + Send>) -> Result<T> {
    Err(error_of_panic("the call", panic))
}

fn instantiated(frame: &Frame<'_>, id: &TypeId) -> Result<()> {
    frame.set_state(id, Box::new(Arc::new(Site::new(frame.attr("spec")?)?)))
}

fn state(frame: &Frame<'_>, cuda: bool) -> Result<Arc<Site>> {
    // SAFETY: states of these types are made by `instantiated`.
    unsafe { frame.get_state::<Arc<Site>>(&STATE[usize::from(cuda)]) }.cloned()
}

/// # Safety
/// As [`Frame::tensors`].
unsafe fn tensors(frame: &Frame<'_>, device: &Device) -> Result<Tensors> {
    // SAFETY: as above.
    unsafe {
        Ok(Tensors { args: frame.tensors(false, device)?, rets: frame.tensors(true, device)? })
    }
}

/// Queues the launch, and returns a future that is set when it is complete.
fn on_host(frame: &mut Frame<'_>) -> Result<()> {
    let (site, ordinal) = (state(frame, false)?, frame.ordinal()?);
    let future = site.with_slot(ordinal, false, |slot: &Slot, flight| {
        let none = || Error::internal("a call on the CPU has no stream");
        let stream = slot.stream.as_ref().ok_or_else(none)?;
        // SAFETY: XLA keeps the buffers until the future is set, which is behind the launch.
        let t = unsafe { tensors(frame, &slot.device) }?;
        // Before the launch, which uses XLA's buffers from then on, whatever fails behind it.
        let (future, waiter, waits) = (frame.future()?, pool::reserve()?, site.clone());
        let raw = future.raw();
        let launched = slot.launch(&site, stream, t).inspect_err(|_| {
            // Part of it may have been queued. That it failed, too, is the smaller news.
            stream.synchronize().ok();
        });
        let rest = match launched {
            Ok(rest) => rest,
            Err(e) => {
                // Nobody waits for it: the call returns the error.
                future.set(Err(e.clone()));
                return Err(e);
            }
        };
        waiter.run(Box::new(move || {
            let wait = AssertUnwindSafe(|| rest.map_or(Ok(()), |rest| rest()));
            let done = catch_unwind(wait).unwrap_or_else(panicked);
            let done = done.map_err(|e| waits.failed(ordinal, e));
            // XLA may drop the state, and a program may end the world, once the future is set.
            drop((waits, flight));
            future.set(done);
        }));
        Ok(raw)
    })?;
    frame.return_future(future);
    Ok(())
}

/// Queues the launch on XLA's stream.
fn on_device(frame: &mut Frame<'_>) -> Result<()> {
    let site = state(frame, true)?;
    site.with_slot(frame.ordinal()?, true, |slot, flight| {
        let stream = match &slot.device {
            // SAFETY: XLA's streams outlive what is queued on them.
            Device::Cuda(ctx) => Stream::Cuda(unsafe { CudaStream::borrow(ctx, frame.stream()?) }?),
            Device::Host => return Err(Error::internal("a call on a GPU for the CPU")),
        };
        // SAFETY: XLA uses the buffers in the order of its stream, which the launch has joined when
        // it returns.
        let t = unsafe { tensors(frame, &slot.device) }?;
        let rest = slot.launch(&site, &stream, t)?;
        drop(flight);
        match rest {
            None => Ok(()),
            Some(_) => Err(Error::internal("a launch on a GPU that is not complete")),
        }
    })
}

/// Addresses of the handlers by their stage, of the number that XLA gives the state's type, and of
/// what it must know of it.
#[pyfunction]
pub fn jax_handlers(cuda: bool) -> (Vec<(&'static str, usize)>, usize, usize) {
    type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut XlaError;
    let of = |i: Handler, n: Handler, e: Handler| {
        let mut all = vec![("instantiate", i as usize), ("execute", e as usize)];
        if cuda {
            all.push(("initialize", n as usize));
        }
        all
    };
    let handlers = match cuda {
        true => of(instantiate::<true>, initialize::<true>, execute::<true>),
        false => of(instantiate::<false>, initialize::<false>, execute::<false>),
    };
    let id = ffi::address(&STATE[usize::from(cuda)]);
    (handlers, id, ffi::address(&STATE_INFO))
}

/// Raises what is wrong with a call on a team of `size`.
#[pyfunction]
pub fn jax_check_call(py: Python<'_>, text: &str, size: usize) -> PyResult<()> {
    Spec::parse(text).and_then(|s| s.describe(size)).map(drop).or_raise(py)
}

/// Rows received, rows in the order of the experts, and bytes of a handle of a layer of experts.
#[pyfunction]
pub fn jax_layer(py: Python<'_>, text: &str, size: usize) -> PyResult<(usize, usize, usize)> {
    let numbers = || match Spec::parse(text)?.describe(size)? {
        Desc::Ep(d, _) => Ok((d.recv_rows(), d.capacity, EpHandle::state_bytes(&d))),
        _ => Err(Error::internal("the call is not one of a layer of experts")),
    };
    numbers().or_raise(py)
}
