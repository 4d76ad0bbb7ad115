//! Waits of the host backend: polling, and the reasons to stop.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::protocol::{
    ASKED_FOR, AbortCode, DEAD, DEAD_OUTSIDE, DISAGREES, OTHER_ERROR, Pace, TIMED_OUT,
    TIMED_OUT_OUTSIDE, poll,
};
use crate::recorder::{self, EntryState, Fingerprint};
use crate::silence::Watch;
use crate::team::LiveTeam;

/// So long a rank that learns of another's end from a third one waits for what the connection says.
const FAREWELL: Duration = Duration::from_millis(100);

/// The longest sleep: what rings no bell, as a deadline, is looked at so often.
const SLICE: Duration = Duration::from_millis(20);

/// The context of a wait, for its error.
#[derive(Clone, Copy)]
pub(crate) struct WaitCtx<'a> {
    pub op: &'a str,
    pub phase: &'a str,
    pub seq: u64,
    pub peer: Rank,
    pub expected: u64,
}

impl LiveTeam {
    /// Polls `ready` until it returns a value, or the wait must end. Does not set the fault.
    pub(crate) fn wait_until<T>(
        &self,
        ctx: &WaitCtx<'_>,
        ready: impl FnMut() -> Option<T>,
        seen: impl Fn() -> u64,
    ) -> Result<T> {
        let deadline = Deadline::after(self.0.cfg.timeout);
        let watch = RefCell::new(None);
        let mut warned = false;
        let must_end = || self.must_end(ctx, (&deadline, watch.borrow().as_ref()), &seen);
        let sleep = |still: &mut dyn FnMut() -> bool| {
            self.0.ctl.sleep(self.rank(), SLICE, still);
            // Only a wait that sleeps: a short one is over before anybody asks about it.
            watch.borrow_mut().get_or_insert_with(|| Watch::new(self, Some(ctx.peer))).look(self);
            if !warned && deadline.elapsed() > self.0.cfg.late_warning {
                warned = true;
                self.warn_late(ctx, deadline.elapsed());
            }
        };
        poll(Pace::HOST, ready, must_end, sleep)
    }

    fn warn_late(&self, ctx: &WaitCtx<'_>, waited: Duration) {
        log::warn!(
            "{} [{}]: {} has waited {:.0} s for {} (team {}, seq {})",
            ctx.op,
            ctx.phase,
            self.named(self.rank()),
            waited.as_secs_f64(),
            self.named(ctx.peer),
            self.name(),
            ctx.seq
        );
    }

    /// Returns the text for the log about a long wait for a device: the ranks that have made fewer
    /// calls, which delay the other ranks. It returns a text once for each call, whichever thread
    /// waits and however many heaps the team has, and `None` where no call of mine is open.
    pub(crate) fn lateness(&self, waited: Duration) -> Option<String> {
        let mine = self.calls(self.rank());
        recorder::read(&self.0.ctl, self.rank(), mine)
            .filter(|e| matches!(e.state, EntryState::Queued | EntryState::Running))?;
        if self.0.late.swap(mine, Ordering::Relaxed) == mine {
            return None;
        }
        let behind: Vec<_> = self
            .peers()
            .map(|r| (r, self.calls(r)))
            .filter(|(_, n)| *n < mine)
            .map(|(r, n)| format!("{} has made {n} calls of {mine}", self.named(r)))
            .collect();
        let why = match behind.is_empty() {
            true => "no rank has made fewer calls".to_owned(),
            false => behind.join(", "),
        };
        let (me, s) = (self.named(self.rank()), waited.as_secs_f64());
        let team = self.name();
        Some(format!("{me} has waited {s:.0} s for its device, in team {team}; {why}"))
    }

    /// Returns the abort that a peer has raised on my page, and the rank that raised it first.
    pub(crate) fn peer_abort(&self) -> Option<(Rank, AbortCode)> {
        self.peers().find_map(|src| {
            let slot = self.0.ctl.abort_slot(self.rank(), src);
            let code = crate::protocol::raised(slot, self.0.generation as u32)?;
            // Ranks pass on an abort unchanged: the slot need not be that of the rank that raised
            // it first.
            let src = self.peers().find(|p| p.get() == u32::from(code.from)).unwrap_or(src);
            Some((src, code))
        })
    }

    /// Returns an abort as an error of this rank. A peer may learn of a death before I do: then the
    /// error is that of the death.
    pub(crate) fn abort_error(&self, src: Rank, code: AbortCode) -> Error {
        let about = Rank::new(u32::from(code.about));
        let in_world = || self.members().get(about.idx()).copied();
        let (why, culprit) = match code.reason {
            TIMED_OUT => (format!("it timed out waiting for {}", self.named(about)), in_world()),
            DEAD => {
                let how = self.how_went(about).unwrap_or_else(|| "has died".to_owned());
                let text = format!("{} {how}, says {}", self.named(about), self.named(src));
                return Error::new(ErrorKind::PeerDead, text).rank(self.rank()).peer(about);
            }
            ASKED_FOR => ("its user asked for it".to_owned(), None),
            DISAGREES => (format!("it disagrees with {}", self.named(about)), None),
            TIMED_OUT_OUTSIDE => {
                (format!("it timed out waiting for rank {}", code.about), Some(about))
            }
            DEAD_OUTSIDE => (format!("rank {} has died or left", code.about), Some(about)),
            _ => ("it met an error".to_owned(), None),
        };
        let text = format!("{} aborted the team: {why}", self.named(src));
        let e = Error::new(ErrorKind::Aborted, text).rank(self.rank()).peer(src);
        match culprit {
            Some(r) => e.culprit(r),
            None => e,
        }
    }

    /// Returns how a peer that has said goodbye went: with the error that it met, if it gave one.
    pub(crate) fn how_gone(&self, peer: Rank) -> Option<String> {
        let why = || self.0.mesh.farewell(self.world_rank(peer));
        self.has_left(peer).then(|| match why() {
            Some(why) => format!("has left the job ({why})"),
            None => "has left the job".to_owned(),
        })
    }

    /// As [`LiveTeam::how_gone`], of a peer that another rank calls gone. That rank's word comes
    /// through memory, faster than the peer's own through its connection, which alone says why it
    /// left: waits for it, at most [`FAREWELL`].
    fn how_went(&self, peer: Rank) -> Option<String> {
        let begun = Instant::now();
        loop {
            let how = self.how_gone(peer);
            let known = how.is_some() || self.has_died(peer) || peer == self.rank();
            if known || begun.elapsed() > FAREWELL {
                return how;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the abort for an error that this rank met itself.
    pub(crate) fn code_of(&self, error: &Error) -> AbortCode {
        let peer = error.get_peer();
        // Not at the caller's request, but because of another error of this rank.
        let cause = std::error::Error::source(error).filter(|_| peer.is_none());
        let reason = match error.kind() {
            ErrorKind::Aborted if cause.is_some() => {
                // It may be that of another team, about a rank that this one does not have.
                let first = cause.and_then(|c| c.downcast_ref::<Error>());
                let about = first.and_then(|f| Some((f.kind(), f.get_culprit()?)));
                return about.map_or_else(
                    || self.abort_code(OTHER_ERROR, self.rank()),
                    |(kind, rank)| self.code_about(kind == ErrorKind::PeerDead, rank),
                );
            }
            ErrorKind::Timeout => {
                let peer = peer.unwrap_or(self.rank());
                return self
                    .code_about(false, error.get_culprit().unwrap_or(self.world_rank(peer)));
            }
            // Without a peer's name the error reports no death: peers would take it for the death
            // of this rank.
            ErrorKind::PeerDead if peer.is_some() => DEAD,
            ErrorKind::Aborted => ASKED_FOR,
            ErrorKind::Mismatch => DISAGREES,
            _ => OTHER_ERROR,
        };
        self.abort_code(reason, peer.unwrap_or(self.rank()))
    }

    /// Returns the abort because a rank of the world is gone or silent.
    fn code_about(&self, gone: bool, world: Rank) -> AbortCode {
        match (self.team_rank(world), gone) {
            (Some(r), true) => self.abort_code(DEAD, r),
            (Some(r), false) => self.abort_code(TIMED_OUT, r),
            (None, true) => self.abort_code(DEAD_OUTSIDE, world),
            (None, false) => self.abort_code(TIMED_OUT_OUTSIDE, world),
        }
    }

    /// Returns an abort or a death that peers or the monitor have reported, and that no wait of
    /// mine has met yet.
    pub(crate) fn news(&self) -> Option<Error> {
        let dead = || {
            let peer = self.first_dead()?;
            let text = format!("{} has died", self.named(peer));
            Some(Error::new(ErrorKind::PeerDead, text).rank(self.rank()).peer(peer))
        };
        dead().or_else(|| self.peer_abort().map(|(src, code)| self.abort_error(src, code)))
    }

    fn must_end(
        &self,
        ctx: &WaitCtx<'_>,
        (deadline, watch): (&Deadline, Option<&Watch>),
        seen: &impl Fn() -> u64,
    ) -> Option<Error> {
        if let Some(e) = self.0.fault.get() {
            return Some(e);
        }
        let here = |e: Error| {
            e.op(ctx.op.to_owned())
                .phase(ctx.phase.to_owned())
                .of_team(self)
                .seq(ctx.seq)
                .rank(self.rank())
                .elapsed(deadline.elapsed())
        };
        let error = |kind, text: String, peer: Rank| here(Error::new(kind, text).peer(peer));
        let counts = |e: Error| e.expected(ctx.expected).seen(seen());
        let abort = if self.first_dead().is_none() { self.peer_abort() } else { None };
        // If a rank disagrees with me, my own error has the texts of both.
        if let Some((src, code)) = abort
            && code.reason == DISAGREES
            && Rank::new(u32::from(code.about)) == self.rank()
            && let Some(e) = self.order_mismatch(&WaitCtx { peer: src, ..*ctx })
        {
            return Some(e);
        }
        if let Some(e) = self.news() {
            return Some(counts(here(e)));
        }
        // After the abort: a rank that disagreed may have raised an abort and left.
        if let Some(how) = self.how_gone(ctx.peer) {
            let text = format!("{} {how} and will not signal", self.named(ctx.peer));
            let left = || counts(error(ErrorKind::PeerDead, text, ctx.peer));
            return Some(self.order_mismatch(ctx).unwrap_or_else(left));
        }
        if deadline.elapsed() > Duration::from_secs(1)
            && let Some(e) = self.order_mismatch(ctx)
        {
            return Some(e);
        }
        deadline.expired().then(|| {
            let (text, culprit) = self.verdict(ctx.peer, watch);
            counts(error(ErrorKind::Timeout, text, ctx.peer)).culprit(culprit).hint(
                "is that rank stuck, or does it make fewer calls? `tilewire dump` shows what each \
                   rank was doing; --timeout-s, TILEWIRE_TIMEOUT_S or `WorldCfg` raise the limit",
            )
        })
    }

    /// Returns the text about a deadline of a wait for `peer`, and the world rank that is to blame.
    pub(crate) fn verdict(&self, peer: Rank, watch: Option<&Watch>) -> (String, Rank) {
        let first = self.world_rank(peer);
        let silent = format!("{} is alive but did not signal", self.named(peer));
        let Some(s) = watch.map(|w| w.suspect(self, peer)) else { return (silent, first) };
        let text = match (&s.why, s.rank == first) {
            (Some(why), true) => format!("{silent}: it {why}"),
            (None, true) => silent,
            (Some(why), false) => {
                let other = s.rank.get();
                format!("rank {other} holds the others up: it {why}; {silent}: it waits as well")
            }
            (None, false) => {
                format!("{silent}: it waits as well, in the end for rank {}", s.rank.get())
            }
        };
        (text, s.rank)
    }

    /// Returns the `Mismatch` if the peer's record at my sequence number shows another call than
    /// mine.
    fn order_mismatch(&self, ctx: &WaitCtx<'_>) -> Option<Error> {
        let mine = recorder::read(&self.0.ctl, self.rank(), ctx.seq)?;
        let theirs = recorder::read(&self.0.ctl, ctx.peer, ctx.seq)?;
        if mine.fingerprint == theirs.fingerprint && mine.kind == theirs.kind {
            return None;
        }
        let fp = Fingerprint::recorded(mine.fingerprint, mine.text);
        self.compare(&fp, mine.kind, ctx.peer, &theirs).err()
    }

    /// Returns the error for a credit whose tag is not that of my launch.
    pub(crate) fn tag_mismatch(&self, ctx: &WaitCtx<'_>, want: u64, got: u64) -> Error {
        self.order_mismatch(ctx).unwrap_or_else(|| {
            Error::new(ErrorKind::Mismatch, "a peer granted its buffer for another launch")
                .op(ctx.op.to_owned())
                .phase(ctx.phase.to_owned())
                .seq(ctx.seq)
                .of_team(self)
                .rank(self.rank())
                .peer(ctx.peer)
                .expected(format_args!("{want:016x}"))
                .seen(format_args!("{got:016x}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::recorder::EntryState;
    use crate::{Fingerprint, World, WorldCfg};

    #[test]
    fn who_has_made_fewer_calls_keeps_the_others_waiting() {
        World::run_threads(3, WorldCfg::for_tests(), |world| {
            let team = world.everyone("late")?;
            let calls = |n| {
                (0..n).try_for_each(|_| team.launch_begin(&Fingerprint::new("op", "m=1")).map(drop))
            };
            calls(4)?;
            team.agree(true)?;
            let late = || team.lateness(Duration::from_secs(30));
            let text = late().expect("an open call");
            assert!(text.contains("team late") && text.contains("30 s"), "{text}");
            assert_eq!(late(), None, "reported twice");
            assert!(text.ends_with("no rank has made fewer calls"), "{text}");
            team.agree(true)?;
            calls(if world.rank().get() == 2 { 1 } else { 3 })?;
            team.agree(true)?;
            let text = late().expect("another call");
            assert_eq!(
                text.ends_with("rank 2 has made 5 calls of 7"),
                world.rank().get() != 2,
                "{text}"
            );
            team.agree(true)?;
            team.set_state(team.launch_begin(&Fingerprint::new("op", "m=1"))?, EntryState::Done);
            assert_eq!(late(), None, "nobody waits for a call that is over");
            team.agree(true)?;
            Ok(())
        })
        .unwrap();
    }
}
