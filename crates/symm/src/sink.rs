//! The devices that must learn of an abort raised on this host, because their kernels cannot see
//! the host's control pages.

use std::sync::{Arc, Mutex, Weak};

use crate::protocol::AbortCode;
use crate::team::lock;

/// Reports the abort of the team. Called when the team has failed, from the thread that failed or
/// from the monitor thread, so it must be quick and must not block on the device.
pub(crate) trait AbortSink: Send + Sync {
    fn raise(&self, code: AbortCode);

    /// Reports the members that have said goodbye, a bit for each: they will not signal any more.
    fn left(&self, members: u64);
}

#[derive(Default)]
pub(crate) struct AbortSinks(Mutex<Vec<Weak<dyn AbortSink>>>);

impl AbortSinks {
    pub fn add(&self, sink: Weak<dyn AbortSink>) {
        lock(&self.0).push(sink);
    }

    pub fn raise(&self, code: AbortCode) {
        self.live().iter().for_each(|s| s.raise(code));
    }

    pub fn left(&self, members: u64) {
        self.live().iter().for_each(|s| s.left(members));
    }

    fn live(&self) -> Vec<Arc<dyn AbortSink>> {
        let mut list = lock(&self.0);
        list.retain(|s| s.strong_count() > 0);
        list.iter().filter_map(Weak::upgrade).collect()
    }
}
