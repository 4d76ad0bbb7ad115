//! Cards: each rank of a job publishes its address and process in the store, for its peers to read.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::claim;
use crate::frame::VERSION;
use crate::handshake::Identity;
use crate::secret::Secret;
use crate::store::Store;

/// Published by each rank in the store: address, process and host.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub(crate) struct Card {
    pub version: u16,
    /// Name of the listener, see [`unix_addr`](crate::sock::unix_addr).
    pub addr: String,
    /// Set once the rank has given up the meeting: the reason.
    pub gave_up: Option<(ErrorKind, String)>,
    pub pid: u32,
    pub uid: u32,
    pub size: usize,
    /// Boot of the host: equal if and only if both ranks run on it.
    pub boot: String,
    /// User namespace: numbers of users are compared within one.
    #[serde(default)]
    pub user_ns: String,
    /// Keyed hash of all the above with job and rank.
    pub mac: String,
}

impl Card {
    pub fn new(me: &Identity<'_>, addr: &str) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let user_ns = std::fs::read_link("/proc/self/ns/user").unwrap_or_default();
        Self {
            version: VERSION,
            addr: addr.to_owned(),
            gave_up: None,
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            size: me.size,
            boot: boot.trim().to_owned(),
            user_ns: user_ns.to_string_lossy().into_owned(),
            mac: String::new(),
        }
        .signed(me.job, me.rank, me.secret)
    }

    /// The card that takes the place of mine when I give up.
    pub fn withdrawn(me: &Identity<'_>, why: &Error) -> Self {
        let gave_up = Some((why.kind(), why.message().to_owned()));
        Self { gave_up, ..Self::new(me, "") }.signed(me.job, me.rank, me.secret)
    }

    fn mac(&self, job: &str, rank: Rank, secret: &Secret) -> blake3::Hash {
        let text = format!("{:?}", Card { mac: String::new(), ..self.clone() });
        secret.mac("card", &[job.as_bytes(), &rank.get().to_le_bytes(), text.as_bytes()])
    }

    fn signed(mut self, job: &str, rank: Rank, secret: &Secret) -> Self {
        self.mac = self.mac(job, rank, secret).to_hex().to_string();
        self
    }

    /// Everything that must be equal is, and the writer knows the secret.
    pub fn check(&self, mine: &Card, me: &Identity<'_>, peer: Rank) -> Result<()> {
        // One user has different numbers in different namespaces: then the sockets compare.
        let uid_here = if self.user_ns == mine.user_ns { self.uid } else { mine.uid };
        let pairs = [
            ("protocol version", mine.version.to_string(), self.version.to_string()),
            ("host (boot id)", mine.boot.clone(), self.boot.clone()),
            ("user id", mine.uid.to_string(), uid_here.to_string()),
            ("world size", mine.size.to_string(), self.size.to_string()),
        ];
        for (what, ours, theirs) in pairs {
            if ours != theirs {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("{peer} runs with another {what}"),
                )
                .op("rendezvous")
                .rank(me.rank)
                .peer(peer)
                .expected(ours)
                .seen(theirs));
            }
        }
        let same =
            blake3::Hash::from_hex(&self.mac).is_ok_and(|m| m == self.mac(me.job, peer, me.secret));
        if !same {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("the entry of {peer} in the store is not signed with our secret"),
            )
            .op("rendezvous")
            .rank(me.rank)
            .peer(peer)
            .hint("all ranks of a job need the same TILEWIRE_SECRET"));
        }
        Ok(())
    }
}

/// The key of a rank's card.
pub(crate) fn card_key(job: &str, rank: Rank) -> String {
    format!("link/{job}/{}", rank.get())
}

/// Longest wait for one rank before a look at the others: one of them may have given up.
const LOOK: Duration = Duration::from_millis(500);

/// The checked card of `peer`.
///
/// # Errors
/// `Timeout` if it is not there in time. Otherwise the reason why `peer` cannot be met.
pub(crate) fn fetch(
    store: &dyn Store,
    me: &Identity<'_>,
    mine: &Card,
    peer: Rank,
    deadline: Deadline,
) -> Result<Card> {
    let text = store
        .get(&card_key(me.job, peer), deadline)
        .map_err(|e| e.op("rendezvous").rank(me.rank))?;
    read(&text, me, mine, peer)
}

/// The checked card in `text`, which `peer` has published.
fn read(text: &[u8], me: &Identity<'_>, mine: &Card, peer: Rank) -> Result<Card> {
    let card: Card = serde_json::from_slice(text).map_err(|e| {
        Error::new(ErrorKind::Protocol, format!("the entry of {peer} cannot be read: {e}"))
            .op("rendezvous")
            .peer(peer)
    })?;
    card.check(mine, me, peer)?;
    let Some((kind, why)) = &card.gave_up else { return Ok(card) };
    let text = format!("{peer} has given up this meeting: {why}");
    let e = match kind {
        ErrorKind::Timeout => Error::new(ErrorKind::Aborted, text)
            .hint("call again: it meets the others at its next try"),
        kind => Error::new(*kind, text),
    };
    Err(e.op("rendezvous").rank(me.rank).peer(peer))
}

/// The checked cards of all ranks.
pub(crate) fn gather(
    store: &dyn Store,
    me: &Identity<'_>,
    mine: &Card,
    deadline: Deadline,
) -> Result<Vec<Card>> {
    let mut cards: Vec<Option<Card>> = vec![None; me.size];
    cards[me.rank.idx()] = Some(mine.clone());
    while let Some(first) = cards.iter().position(Option::is_none) {
        let slice = Deadline::after(deadline.remaining().min(LOOK));
        match fetch(store, me, mine, Rank::new(first as u32), slice) {
            Ok(card) => cards[first] = Some(card),
            Err(e) if !e.is_timeout() => return Err(e),
            Err(e) if deadline.expired() => return Err(absent(store, me, deadline, e)),
            // One that comes late must not hide that another cannot be met at all.
            Err(_) => look_at_others(store, me, mine, &mut cards)?,
        }
    }
    Ok(cards.into_iter().flatten().collect())
}

/// Takes the cards that are there.
fn look_at_others(
    store: &dyn Store,
    me: &Identity<'_>,
    mine: &Card,
    cards: &mut [Option<Card>],
) -> Result<()> {
    let start = Instant::now();
    for (peer, card) in Rank::all(me.size).zip(cards).filter(|(_, c)| c.is_none()) {
        // A store that does not answer would take a while for each.
        if start.elapsed() > LOOK {
            break;
        }
        match fetch(store, me, mine, peer, Deadline::after(Duration::ZERO)) {
            Ok(c) => *card = Some(c),
            Err(e) if e.is_timeout() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The timeout that lists all ranks that have not come.
fn absent(store: &dyn Store, me: &Identity<'_>, deadline: Deadline, cause: Error) -> Error {
    let mut missing = Vec::new();
    let asked = Instant::now();
    for r in Rank::all(me.size).filter(|r| *r != me.rank) {
        match store.get(&card_key(me.job, r), Deadline::after(Duration::ZERO)) {
            Ok(_) => {}
            Err(e) if e.is_timeout() && asked.elapsed() < Duration::from_secs(1) => missing.push(r),
            // It is the store that does not answer: the ranks may all be there.
            Err(e) => return e.op("rendezvous").rank(me.rank).elapsed(deadline.elapsed()),
        }
    }
    let list: Vec<_> = missing.iter().map(Rank::to_string).collect();
    let text = format!(
        "in job `{}` {} of {} ranks did not arrive: {}{}",
        me.job,
        list.len(),
        me.size,
        list.join(", "),
        claim::doubles(store, me)
    );
    let e = Error::new(ErrorKind::Timeout, text);
    let e = e.op("rendezvous").rank(me.rank).elapsed(deadline.elapsed()).cause(cause);
    match missing.first() {
        Some(r) => e.peer(*r),
        None => e,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The identity of `rank`, and its card.
    fn card_of(rank: u32, secret: &Secret) -> (Identity<'_>, Card) {
        let me = Identity { job: "j", rank: Rank::new(rank), size: 3, secret };
        let card = Card::new(&me, "@addr");
        (me, card)
    }

    #[test]
    fn fuzz_card() {
        let secret = Secret::from_job("s");
        let (peer, card) = card_of(1, &secret);
        let why = Error::new(ErrorKind::Timeout, "rank 2 did not arrive");
        let seeds = [card, Card::withdrawn(&peer, &why)].map(|c| serde_json::to_vec(&c).unwrap());
        tilewire_testing::fuzz!("card", seeds.to_vec(), |b| {
            let secret = Secret::from_job("s");
            let (me, mine) = card_of(0, &secret);
            let peer = Rank::new(1);
            let card = serde_json::from_slice::<Card>(b);
            if let Ok(card) = &card {
                let again = serde_json::to_vec(card).unwrap();
                assert_eq!(serde_json::from_slice::<Card>(&again).unwrap(), *card);
                if card.check(&mine, &me, peer).is_ok() && card.gave_up.is_none() {
                    // Nobody signs another one without the secret.
                    let (_, theirs) = card_of(1, &secret);
                    let hex = |c: &Card| blake3::Hash::from_hex(&c.mac).unwrap();
                    assert_eq!(hex(card), hex(&theirs));
                    assert_eq!(Card { mac: theirs.mac.clone(), ..card.clone() }, theirs);
                }
            }
            read(b, &me, &mine, peer).is_ok_and(|c| c.gave_up.is_none())
        });
    }

    proptest! {
        /// Whatever the jobs are called: the same key is that of the same job and rank.
        #[test]
        fn keys_of_jobs_and_ranks_differ(
            a in "[ab/0-2]{0,4}", b in "[ab/0-2]{0,4}", r in 0u32..30, s in 0u32..30,
        ) {
            let same = card_key(&a, Rank::new(r)) == card_key(&b, Rank::new(s));
            prop_assert_eq!(same, a == b && r == s);
        }
    }
}
