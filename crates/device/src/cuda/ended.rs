//! Ends of streams, and what their work still uses then.

use std::mem::take;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys;
use tilewire_core::{Deadline, Error, Result};

use super::context::Thing;
use super::error::check;
use super::event::{CudaEvent, Last};
use super::flight::Flight;
use super::graph::Held;
use super::stream::{Inner, capture_info, poll};
use crate::Point;

/// The way in which a stream has ended, for graphs that were launched there.
pub(super) enum Ended {
    /// All its work had ended.
    Idle,
    /// Behind all its work.
    Behind(Arc<CudaEvent>),
    /// With work that an event cannot be had behind.
    Unsure,
    /// With work that does not end.
    Busy,
}

/// Limit for the work of an own stream at its end; then it leaks what that work uses.
const LAST_WAIT_S: f64 = 10.0;

impl Inner {
    /// The end of a borrow: hands what the work uses to the context, behind an event, and waits for
    /// nothing. While the owner captures the stream no event can be had: then the captured graph
    /// keeps it, and its end waits for the device.
    pub(super) fn give_back(&self, flight: &mut Flight) -> Ended {
        for (event, things) in flight.closed.drain(..) {
            self.ctx.retire_behind(Arc::new(event), Arc::new(things));
        }
        let things: Vec<Thing> = take(&mut flight.open).into_iter().map(|o| o.thing).collect();
        if things.is_empty() && !self.has_replays() {
            return Ended::Idle;
        }
        match self.last_event() {
            Ok(event) => {
                let event = Arc::new(event);
                self.ctx.retire_behind(event.clone(), Arc::new(things));
                Ended::Behind(event)
            }
            // Its owner captures it: an event would be part of that.
            Err(_) => {
                let things = self.ctx.unsure(Arc::new(things));
                match self.captured_into() {
                    Some(held) => held.push(things),
                    None => self.ctx.retire([things]),
                }
                Ended::Unsure
            }
        }
    }

    /// An event behind all that is queued.
    fn last_event(&self) -> Result<CudaEvent> {
        let _current = self.ctx.bind()?;
        if capture_info(self.raw)?.is_some() {
            return Err(Error::invalid("the stream is being captured"));
        }
        let event = CudaEvent::new(&self.ctx, false)?;
        // SAFETY: both are alive.
        check(unsafe { sys::cuEventRecord(event.raw(), self.raw) }, "cuEventRecord")?;
        let by = Some(std::thread::current().id());
        event.set_last(Last { id: self.id, by, ..Last::default() });
        Ok(event)
    }

    /// Returns what the graph keeps that the owner is capturing the stream into.
    fn captured_into(&self) -> Option<Arc<Held>> {
        let _current = self.ctx.bind().ok()?;
        let (id, graph) = capture_info(self.raw).ok()??;
        // SAFETY: the graph that the stream is being captured into.
        Some(unsafe { Held::of_graph(&self.ctx, id, graph) })
    }

    /// The end of a capture that was given up: as long as it is open, synchronising fails.
    fn give_up(&self, held: &Held) {
        held.end();
        drop(held.take());
        let mut graph = std::ptr::null_mut();
        let Ok(_current) = self.ctx.bind() else { return };
        // SAFETY: a live stream and a valid output; a graph that comes out is ours to destroy.
        unsafe {
            sys::cuStreamEndCapture(self.raw, &mut graph);
            if !graph.is_null() {
                sys::cuGraphDestroy(graph);
            }
        }
    }

    /// The end of a stream of our own: waits for its work, and lets go what that used.
    fn end(&self, flight: Flight) -> Ended {
        let limit = Some(Deadline::after_s(LAST_WAIT_S));
        let Ok(_current) = self.ctx.bind() else {
            std::mem::forget(flight);
            return Ended::Busy;
        };
        // SAFETY: a live stream.
        let ended = poll(limit, || unsafe { sys::cuStreamQuery(self.raw) }, |_, _| ());
        // SAFETY: created by us, destroyed once; the driver lets what is queued run.
        unsafe { sys::cuStreamDestroy_v2(self.raw) };
        if ended.is_err() {
            log::warn!(
                "a stream was dropped while its work does not end: the memory of that work is \
                 leaked"
            );
            std::mem::forget(flight);
            return Ended::Busy;
        }
        // Some may be of another stream, whose work of another thread goes on.
        let waits = flight.closed.into_iter().filter(|(e, _)| !e.is_done());
        waits.for_each(|(e, things)| self.ctx.retire_behind(Arc::new(e), Arc::new(things)));
        self.ctx.retire(flight.open.into_iter().map(|o| o.thing));
        Ended::Idle
    }
}
impl Drop for Inner {
    fn drop(&mut self) {
        let capture = self.capture.get_mut().unwrap_or_else(PoisonError::into_inner).held.take();
        let ours = |h: &Arc<Held>| !h.has_ended() && h.foreign().is_none();
        if let Some(h) = capture.filter(ours) {
            self.give_up(&h);
        }
        let mut flight = take(self.flight.get_mut().unwrap_or_else(PoisonError::into_inner));
        let ended = if self.is_borrowed() { self.give_back(&mut flight) } else { self.end(flight) };
        let _first = self.ended.set(ended);
        self.ctx.free_retired();
    }
}
