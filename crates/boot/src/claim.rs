//! Claims: of two processes with the same rank in one meeting the later gives way.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::card::{Card, fetch};
use crate::handshake::Identity;
use crate::sock;
use crate::store::Store;

/// Longest time between a rank's claim and its card: one that takes longer has ended.
const CARD_WAIT: Duration = Duration::from_secs(1);

fn key(job: &str, rank: Rank) -> String {
    format!("claim/{job}/{}", rank.get())
}

/// The rank that claims its place by this key of a store.
pub(crate) fn rank_of(key: &str) -> Option<u32> {
    key.strip_prefix("claim/")?.rsplit_once('/')?.1.parse().ok()
}

/// Claims my rank in this meeting.
///
/// A process that had it before and has ended does not count, so that a rank may be started again.
///
/// # Errors
/// `Mismatch` if another process has the rank and lives. Errors of the store.
pub(crate) fn claim(
    store: &dyn Store,
    me: &Identity<'_>,
    mine: &Card,
    deadline: Deadline,
) -> Result<()> {
    if store.add(&key(me.job, me.rank), 1)? <= 1 {
        return Ok(());
    }
    let wait = Deadline::after(deadline.remaining().min(CARD_WAIT));
    // Another size, secret or host, or given up: its own meeting says more than we can here.
    let Ok(card) = fetch(store, me, mine, me.rank, wait) else { return Ok(()) };
    if !Sign::is_shown(&card.addr) {
        return Ok(());
    }
    Err(taken(me, &card))
}

/// Fails if the process that had my rank in an earlier meeting, that of `me`, is in its world
/// still.
///
/// # Errors
/// `Mismatch` if it lives. Errors of the store.
pub(crate) fn check_left(store: &dyn Store, me: &Identity<'_>) -> Result<()> {
    let mine = Card::new(me, "");
    match fetch(store, me, &mine, me.rank, Deadline::after(Duration::ZERO)) {
        Ok(card) if Sign::is_shown(&card.addr) => Err(taken(me, &card)),
        // It gave the meeting up, or it was of another size: the next meeting says more.
        _ => Ok(()),
    }
}

fn taken(me: &Identity<'_>, card: &Card) -> Error {
    let text = format!("{} is taken: the process {} has joined as this rank", me.rank, card.pid);
    Error::new(ErrorKind::Mismatch, text)
        .op("rendezvous")
        .rank(me.rank)
        .hint("each process needs a rank of its own, or this is the address of another job's store")
}

/// `; r1 was started 2 times`, of those ranks that more than one process has claimed.
pub(crate) fn doubles(store: &dyn Store, me: &Identity<'_>) -> String {
    let mut text = String::new();
    for r in Rank::all(me.size) {
        // It is only a remark: an error of the store has its own way.
        let Ok(n) = store.add(&key(me.job, r), 0) else { break };
        if n > 1 {
            text += &format!("; {r} was started {n} times");
        }
    }
    text
}

/// Shows that a process lives, as long as it is kept: a bound socket, which the kernel removes with
/// the process. Nobody can connect to it.
pub(crate) struct Sign {
    _sock: OwnedFd,
}

impl Sign {
    fn name(addr: &str) -> String {
        format!("@{}-rank", addr.trim_start_matches('@'))
    }

    /// The sign of the process whose listener has this address. None where it cannot be had:
    /// addresses that are files may be too long.
    ///
    /// # Errors
    /// `Exhausted` if no descriptor is free.
    pub fn show(addr: &str) -> Result<Option<Self>> {
        match sock::bind(&Self::name(addr)) {
            Ok(sock) => Ok(sock.map(|sock| Self { _sock: sock })),
            Err(e) if e.kind() == ErrorKind::Exhausted => Err(e),
            // Then a second process with this rank is not noticed at once.
            Err(_) => Ok(None),
        }
    }

    /// True if the process with that listener lives, as far as our network namespace shows.
    fn is_shown(addr: &str) -> bool {
        matches!(sock::bind(&Self::name(addr)), Ok(None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::card_key;
    use crate::secret::{Secret, hex, random_bytes};
    use crate::store::LocalStore;

    fn soon() -> Deadline {
        Deadline::after_s(10.0)
    }

    #[test]
    fn a_rank_is_taken_while_its_process_lives_and_can_be_started_again() {
        let (store, s) = (LocalStore::new(), Secret::random().unwrap());
        let me = Identity { job: "job", rank: Rank::new(1), size: 3, secret: &s };
        let mine = Card::new(&me, &format!("@{}", hex(&random_bytes().unwrap())));
        let sign = Sign::show(&mine.addr).unwrap().unwrap();
        claim(&store, &me, &mine, soon()).unwrap();
        store.set(&card_key("job", me.rank), &serde_json::to_vec(&mine).unwrap()).unwrap();
        let e = claim(&store, &me, &mine, soon()).unwrap_err();
        assert!(e.is_mismatch() && e.message().starts_with("r1 is taken: the process"), "{e}");
        assert_eq!(doubles(&store, &me), "; r1 was started 2 times");
        drop(sign);
        claim(&store, &me, &mine, soon()).unwrap();
    }

    #[test]
    fn a_claim_names_its_rank() {
        assert_eq!(rank_of(&key("tcp-::1-29500.2", Rank::new(63))), Some(63));
        for other in ["claim/", "claim/job", "link/job.1/3", "claim/job/x"] {
            assert_eq!(rank_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_claim_without_a_card_is_of_a_process_that_has_ended() {
        let (store, s) = (LocalStore::new(), Secret::random().unwrap());
        let me = Identity { job: "job", rank: Rank::new(0), size: 2, secret: &s };
        let mine = Card::new(&me, "@a");
        claim(&store, &me, &mine, soon()).unwrap();
        let again = soon();
        claim(&store, &me, &mine, again).unwrap();
        assert!(again.elapsed() < Duration::from_secs(3));
    }
}
