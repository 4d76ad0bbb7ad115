//! Counters of puts, gets, signals and bytes, per destination.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tilewire_core::Rank;

/// Counts of one rank's transfers to one peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct LinkTraffic {
    /// Number of puts.
    pub puts: u64,
    /// Payload bytes of the puts.
    pub put_bytes: u64,
    /// Number of gets (from that peer).
    pub gets: u64,
    /// Payload bytes of the gets.
    pub get_bytes: u64,
    /// Number of signals, credits included.
    pub signals: u64,
}

/// Counts of one rank's transfers to each peer: index = team rank of the peer.
pub type Traffic = Vec<LinkTraffic>;

#[derive(Default)]
struct Counters {
    puts: AtomicU64,
    put_bytes: AtomicU64,
    gets: AtomicU64,
    get_bytes: AtomicU64,
    signals: AtomicU64,
}

pub(crate) struct TrafficCounters(Vec<Counters>);

impl TrafficCounters {
    pub fn new(size: usize) -> Self {
        Self((0..size).map(|_| Counters::default()).collect())
    }

    pub fn put(&self, dst: Rank, bytes: usize) {
        self.0[dst.idx()].puts.fetch_add(1, Ordering::Relaxed);
        self.0[dst.idx()].put_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn get(&self, src: Rank, bytes: usize) {
        self.0[src.idx()].gets.fetch_add(1, Ordering::Relaxed);
        self.0[src.idx()].get_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn signal(&self, dst: Rank) {
        self.0[dst.idx()].signals.fetch_add(1, Ordering::Relaxed);
    }

    pub fn snapshot(&self) -> Traffic {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        self.0
            .iter()
            .map(|c| LinkTraffic {
                puts: get(&c.puts),
                put_bytes: get(&c.put_bytes),
                gets: get(&c.gets),
                get_bytes: get(&c.get_bytes),
                signals: get(&c.signals),
            })
            .collect()
    }
}
