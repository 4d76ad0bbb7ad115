//! Steps that every rank makes alone inside a collective call.
//!
//! A rank whose step failed still joins the meeting, with its error instead of its result: the call
//! then fails on all ranks, at once, and can be made again. If the rank only returned its error,
//! its peers would wait until their deadline.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewire_boot::{Mesh, NOT_SENT, Parcel};
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::recorder::cut;
use crate::team::LiveTeam;

/// Ends a collective call with an error: a fault of the team.
pub(crate) type Stop<'a> = &'a dyn Fn() -> Result<()>;

const OK: u8 = 0;
const FAILED: u8 = 1;
/// Limit of the text in a report: the payload of a parcel is limited, and the log of a compiler is
/// not.
const MAX_TEXT: usize = 4096;

/// The report of a rank whose step failed.
#[derive(Serialize, Deserialize)]
struct Failure {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
}

fn failed(why: &Error) -> Vec<u8> {
    let short = |text: &str| cut(text, MAX_TEXT).to_owned();
    let hint = why.get_hint().map(short);
    let f = Failure { kind: why.kind(), message: short(why.message()), hint };
    [&[FAILED], &serde_json::to_vec(&f).unwrap_or_default()[..]].concat()
}

/// Returns the payload of `peer`, or the error that its step failed.
fn payload_of(peer: Rank, words: &[u8]) -> Result<&[u8]> {
    match words.split_first() {
        Some((&OK, rest)) => Ok(rest),
        Some((&FAILED, rest)) => {
            let f: Failure = serde_json::from_slice(rest).map_err(|e| {
                Error::new(
                    ErrorKind::Protocol,
                    format!("{peer} failed with an error that cannot be read: {e}"),
                )
            })?;
            let e = Error::new(f.kind, format!("{peer} failed: {}", f.message)).peer(peer);
            Err(match f.hint {
                Some(hint) => e.hint(hint),
                None => e,
            })
        }
        _ => Err(Error::new(ErrorKind::Protocol, format!("{peer} sent no status")).peer(peer)),
    }
}

/// Collective over `members` (world ranks): exchanges payloads and descriptors, if every rank has
/// them.
///
/// # Errors
/// My own failure; otherwise that of the first rank that failed, with its world rank as the peer;
/// otherwise as [`Mesh::exchange`].
pub(crate) fn exchange_parts(
    mesh: &dyn Mesh,
    stop: Stop<'_>,
    tag: &str,
    members: &[Rank],
    (payload, fds): (&[u8], Result<&[BorrowedFd<'_>]>),
    deadline: Deadline,
) -> Result<Vec<Parcel>> {
    let report = |e: Error| {
        // A peer that does not join is no concern of this rank: its caller needs its own error.
        let _theirs = mesh.exchange_unless(stop, tag, members, &failed(&e), &[], deadline);
        Err(e)
    };
    let fds = match fds {
        Ok(fds) => fds,
        Err(e) => return report(e),
    };
    let words = [&[OK], payload].concat();
    let mut parcels = match mesh.exchange_unless(stop, tag, members, &words, fds, deadline) {
        Err(e) if e.get_phase() == Some(NOT_SENT) => return report(e),
        r => r?,
    };
    for (&peer, p) in members.iter().zip(&mut parcels) {
        p.payload = payload_of(peer, &p.payload)?.to_vec();
    }
    Ok(parcels)
}

/// Leaves the reason why I did not reach the exchange `tag` for ranks that join it later. Does not
/// wait.
pub(crate) fn leave_word(mesh: &dyn Mesh, tag: &str, members: &[Rank], why: &Error) {
    let _nobody = mesh.exchange(tag, members, &failed(why), &[], Deadline::after(Duration::ZERO));
}

impl LiveTeam {
    /// Collective: returns `mine`, unless the step that made it failed here or on a peer. This
    /// failure, unlike that of a wait, is no fault of the team: `what` can be tried again.
    ///
    /// # Errors
    /// The error of the first rank that failed, of one kind on all ranks; on other ranks it names
    /// that rank as the peer. Otherwise as [`LiveTeam::exchange`].
    pub fn settle<T>(&self, what: &str, mine: Result<T>) -> Result<T> {
        // An error that speaks of a peer means one of this team.
        let of_team = |e: Error| if e.get_peer().is_some() { e.of_team(self) } else { e };
        let mine = mine.map_err(of_team);
        let words = mine.as_ref().map_or_else(failed, |_| vec![OK]);
        let all = match (self.exchange(what, &words), &mine) {
            // My own failure first: peers may have aborted because of it.
            (Err(_), Err(own)) => return Err(own.clone()),
            (all, _) => all?,
        };
        for (i, words) in all.iter().enumerate() {
            // One verdict, so that all do the same about it.
            let peer = self.world_rank(Rank::new(i as u32));
            match payload_of(peer, words) {
                Err(_) if self.rank().idx() == i => return mine,
                done => done.map(drop).map_err(|e| self.translate(e))?,
            }
        }
        mine
    }
}
