//! The messages of a peer, put together: fragments become parcels of the inbox.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::frame::{self, Frame, Kind};
use crate::inbox::Inbox;
use crate::mesh::{Parcel, short};
use crate::sock::Received;

/// Parcels of one peer of which only some fragments have arrived.
const MAX_PARTIAL: usize = 64;

#[derive(Default)]
struct Partial {
    next: u16,
    /// Bytes of the parcel, as all of its fragments say.
    total: usize,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// The messages of one peer: parcels of which only some fragments have arrived.
pub(crate) struct Messages {
    src: Rank,
    partial: HashMap<String, Partial>,
}

impl Messages {
    pub fn new(src: Rank) -> Self {
        Self { src, partial: HashMap::new() }
    }

    /// Handles one message: `bytes` is what `got` is about. True if it was a goodbye.
    ///
    /// # Errors
    /// Any error means that the connection is of no use any more.
    pub fn take(&mut self, inbox: &Inbox, bytes: &[u8], got: Received) -> Result<bool> {
        if got.fds_lost {
            return Err(Error::new(
                ErrorKind::Exhausted,
                "this process had no free file descriptor to receive one of a peer: the connection \
                 is closed",
            )
            .hint("raise the limit of open files with `ulimit -n`"));
        }
        let f = frame::decode(bytes)?;
        if got.cut || f.src != self.src || got.fds.len() != f.n_fds {
            return Err(broken("a frame with a wrong source, length or number of descriptors"));
        }
        match f.kind {
            Kind::Bye => {
                inbox.reason(self.src, short(&String::from_utf8_lossy(f.payload)));
                return Ok(true);
            }
            Kind::Parcel => {
                if let Some((tag, parcel)) = self.assemble(&f, got.fds)? {
                    inbox.deliver(self.src, &tag, parcel);
                }
            }
            _ => return Err(broken("a hello after the rendezvous")),
        }
        Ok(false)
    }

    /// Puts fragments together; the whole parcel with its last one.
    fn assemble(&mut self, f: &Frame<'_>, fds: Vec<OwnedFd>) -> Result<Option<(String, Parcel)>> {
        if f.index == 0 && (self.partial.len() >= MAX_PARTIAL || self.partial.contains_key(f.tag)) {
            return Err(broken("the beginnings of too many parcels, or that of one twice"));
        }
        if f.count == 1 {
            return Ok(Some((f.tag.to_owned(), Parcel { payload: f.payload.to_vec(), fds })));
        }
        if f.index == 0 {
            let p = Partial { next: 0, total: f.total, payload: Vec::new(), fds };
            self.partial.insert(f.tag.to_owned(), p);
        }
        let fits = |p: &&mut Partial| p.next == f.index && p.total == f.total;
        let Some(p) = self.partial.get_mut(f.tag).filter(fits) else {
            return Err(broken("a fragment out of order, or of another parcel"));
        };
        p.payload.extend(f.payload);
        p.next += 1;
        if p.next < f.count {
            return Ok(None);
        }
        let whole = self.partial.remove_entry(f.tag);
        Ok(whole.map(|(tag, p)| (tag, Parcel { payload: p.payload, fds: p.fds })))
    }
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the peer sent {what}")).op("mesh")
}

#[cfg(test)]
#[path = "parcels_tests.rs"]
mod tests;
