//! Ranks of our user that have come to a store with another secret.
//!
//! A connection with a wrong secret is refused, and anybody can make one: what it says ends no job.
//! But a rank that will never come is worth an early end. Rank 0 takes the word of a connection
//! when the kernel says that its process runs as our user, it names our job, its size and a rank
//! that has not come, and none with the right secret comes as that rank in [`PATIENCE`]. Whoever
//! can do this can kill rank 0 by a signal as well, so the word gives nobody a new power.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use super::wire::Who;
use super::{StoreServer, user};
use crate::peer;
use crate::store::Store;

/// Time for a rank with the right secret, behind one with another: a user may start it again, or
/// another job may have come to the address of this one.
const PATIENCE: Duration = Duration::from_secs(1);

/// Words that are looked at; each costs a look at the system's table of connections.
const MOST: usize = 64;

/// Longest wait of a request before the next look at those that have come.
const LOOK: Duration = Duration::from_millis(250);

/// Connections with another secret, and who they say that they are.
#[derive(Default)]
pub(crate) struct OtherSecrets(Mutex<Said>);

#[derive(Default)]
struct Said {
    looks: usize,
    of_our_user: Vec<(Who, Instant)>,
}

impl OtherSecrets {
    /// Notes what a connection says, if its process runs as our user. `user` is that of a TCP
    /// connection, where the server knows it. The connection must still be open at the other end.
    pub fn note(&self, sock: &OwnedFd, is_tcp: bool, user: Option<u32>, who: Who) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.looks += 1;
        let is_ours =
            || user.or_else(|| user::in_system_table(sock)).is_some_and(peer::is_our_user);
        // On Unix sockets others have been refused before they said anything.
        if said.looks <= MOST && (!is_tcp || is_ours()) {
            said.of_our_user.push((who, Instant::now()));
        }
    }

    /// The ranks of a world that have said so since `begin`, and that have had their time.
    fn ranks(&self, world: &Who, begin: Instant) -> Vec<u32> {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |w: &Who| Who { rank: world.rank, ..*w } == *world && w.rank < world.size;
        let due = said.of_our_user.iter().filter(|(w, at)| {
            fits(w) && w.rank != world.rank && *at >= begin && at.elapsed() >= PATIENCE
        });
        due.map(|(w, _)| w.rank).collect()
    }
}

/// The store of a meeting, for the rank that serves it: waits end once a rank is known to have
/// another secret.
pub(crate) struct Watched {
    store: Box<dyn Store>,
    server: Arc<StoreServer>,
    me: Who,
    begin: Instant,
}

impl Watched {
    /// Words since `begin` count: the server may have served meetings before.
    pub fn new(store: Box<dyn Store>, server: Arc<StoreServer>, me: Who, begin: Instant) -> Self {
        Self { store, server, me, begin }
    }

    /// # Errors
    /// `Protocol` naming the rank.
    fn look(&self) -> Result<()> {
        let ranks = self.server.other_secrets().ranks(&self.me, self.begin);
        let Some(rank) = ranks.into_iter().map(Rank::new).find(|r| !self.server.has_come(*r))
        else {
            return Ok(());
        };
        let text = format!(
            "{rank} has another secret: a process of our user has come as this rank and does not \
             know ours, and none that does has come in {} s",
            PATIENCE.as_secs()
        );
        Err(Error::new(ErrorKind::Protocol, text).op("rendezvous").peer(rank).hint(
            "all ranks of a job need the same TILEWIRE_SECRET, and each job a store of its own",
        ))
    }
}

impl Store for Watched {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        loop {
            let slice = Deadline::after(deadline.remaining().min(LOOK));
            match self.store.get(key, slice) {
                Err(e) if e.is_timeout() && !deadline.expired() => self.look()?,
                done => return done,
            }
        }
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        self.store.add(key, n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_rank_of_this_world_counts_and_only_later() {
        let (me, all) = (Who::new(0, 3, "job"), OtherSecrets::default());
        let begin = Instant::now();
        for who in [
            Who::new(1, 3, "other"),
            Who::new(1, 4, "job"),
            Who::new(0, 3, "job"),
            Who::new(3, 3, "job"),
            Who::new(2, 3, "job"),
        ] {
            all.0.lock().unwrap().of_our_user.push((who, Instant::now()));
        }
        assert!(all.ranks(&me, begin).is_empty(), "it has its time");
        std::thread::sleep(PATIENCE);
        assert_eq!(all.ranks(&me, begin), [2]);
        assert!(all.ranks(&me, Instant::now()).is_empty(), "of an earlier meeting");
    }
}
