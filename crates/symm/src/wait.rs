//! Waits of the host backend: polling, and the reasons to stop.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::protocol::{AbortCode, turn};
use crate::recorder::{self, EntryState, Fingerprint};
use crate::team::LiveTeam;

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
        mut ready: impl FnMut() -> Option<T>,
        seen: impl Fn() -> u64,
    ) -> Result<T> {
        let deadline = Deadline::after(self.0.cfg.timeout);
        let mut warned = false;
        for polls in 0u64.. {
            if let Some(v) = ready() {
                return Ok(v);
            }
            match polls {
                0..64 => std::hint::spin_loop(),
                64..80 => std::thread::yield_now(),
                _ => {
                    let mut got = None;
                    // A lost wake-up costs one slice, so the slice bounds every latency.
                    self.0.ctl.sleep(self.rank(), Duration::from_millis(20), || {
                        got = ready();
                        got.is_none() && !self.0.fault.is_set()
                    });
                    if let Some(v) = got {
                        return Ok(v);
                    }
                }
            }
            if polls % 64 == 63 || polls >= 80 {
                if let Some(end) = turn(&mut ready, || self.must_end(ctx, &deadline, &seen)) {
                    return end;
                }
                if !warned && deadline.elapsed() > self.0.cfg.late_warning {
                    warned = true;
                    log::warn!(
                        "{} [{}]: rank {} has waited {:.0} s for rank {} (team {}, seq {})",
                        ctx.op,
                        ctx.phase,
                        self.rank().get(),
                        deadline.elapsed().as_secs_f64(),
                        ctx.peer.get(),
                        self.name(),
                        ctx.seq
                    );
                }
            }
        }
        Err(Error::internal("unreachable: 2^64 polls"))
    }

    /// Returns the text for the log about a long wait for a device: the ranks that have made fewer
    /// calls, which delay the other ranks. It returns a text once for each call, whichever thread
    /// waits and however many heaps the team has, and `None` where no call of mine is open.
    pub(crate) fn lateness(&self, waited: Duration) -> Option<String> {
        let last = |r: Rank| self.flight_recorder(r).pop();
        let mine = last(self.rank())
            .filter(|e| matches!(e.state, EntryState::Queued | EntryState::Running))?
            .seq;
        if self.0.late.swap(mine, Ordering::Relaxed) == mine {
            return None;
        }
        // A peer that is further behind than the recorder reaches has no entry in it.
        let calls = |r: Rank| last(r).map_or(0, |e| e.seq);
        let behind: Vec<_> = self
            .peers()
            .map(|r| (r, calls(r)))
            .filter(|(_, n)| *n < mine)
            .map(|(r, n)| match n {
                0 => format!("rank {} has made far fewer calls than {mine}", r.get()),
                _ => format!("rank {} has made {n} calls of {mine}", r.get()),
            })
            .collect();
        let why = match behind.is_empty() {
            true => "no rank has made fewer calls".to_owned(),
            false => behind.join(", "),
        };
        let (me, s) = (self.rank().get(), waited.as_secs_f64());
        Some(format!(
            "this process has waited {s:.0} s for a device of team {} (rank {me}); {why}",
            self.name()
        ))
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
        let why = match code.reason {
            1 => format!("it timed out waiting for rank {}", code.about),
            2 => {
                let how = if self.has_left(about) { "left" } else { "died" };
                let text = format!("rank {} has {how}, says rank {}", code.about, src.get());
                return Error::new(ErrorKind::PeerDead, text).rank(self.rank()).peer(about);
            }
            3 => "its user asked for it".to_owned(),
            4 => format!("it disagrees with rank {}", code.about),
            _ => "it met an error".to_owned(),
        };
        let text = format!("rank {} aborted the team: {why}", src.get());
        Error::new(ErrorKind::Aborted, text).rank(self.rank()).peer(src)
    }

    /// Returns an abort or a death that peers or the monitor have reported, and that no wait of
    /// mine has met yet.
    pub(crate) fn news(&self) -> Option<Error> {
        let dead = || {
            let peer = self.first_dead()?;
            let text = format!("rank {} has died", peer.get());
            Some(Error::new(ErrorKind::PeerDead, text).rank(self.rank()).peer(peer))
        };
        dead().or_else(|| self.peer_abort().map(|(src, code)| self.abort_error(src, code)))
    }

    fn must_end(
        &self,
        ctx: &WaitCtx<'_>,
        deadline: &Deadline,
        seen: &impl Fn() -> u64,
    ) -> Option<Error> {
        if let Some(e) = self.0.fault.get() {
            return Some(e);
        }
        let here = |e: Error| {
            e.op(ctx.op.to_owned())
                .phase(ctx.phase.to_owned())
                .team(self.name())
                .seq(ctx.seq)
                .rank(self.rank())
                .elapsed(deadline.elapsed())
        };
        let error = |kind, text: String, peer: Rank| here(Error::new(kind, text).peer(peer));
        let counts = |e: Error| e.expected(ctx.expected).seen(seen());
        let abort = if self.first_dead().is_none() { self.peer_abort() } else { None };
        // If a rank disagrees with me, my own error has the texts of both.
        if let Some((src, code)) = abort
            && code.reason == 4
            && Rank::new(u32::from(code.about)) == self.rank()
            && let Some(e) = self.order_mismatch(&WaitCtx { peer: src, ..*ctx })
        {
            return Some(e);
        }
        if let Some(e) = self.news() {
            return Some(counts(here(e)));
        }
        // After the abort: a rank that disagreed may have raised an abort and left.
        if self.has_left(ctx.peer) {
            let text = format!("rank {} has left the job and will not signal", ctx.peer.get());
            let left = || counts(error(ErrorKind::PeerDead, text, ctx.peer));
            return Some(self.order_mismatch(ctx).unwrap_or_else(left));
        }
        if deadline.elapsed() > Duration::from_secs(1)
            && let Some(e) = self.order_mismatch(ctx)
        {
            return Some(e);
        }
        deadline.expired().then(|| {
            counts(error(
                ErrorKind::Timeout,
                format!("rank {} is alive but did not signal", ctx.peer.get()),
                ctx.peer,
            ))
            .hint(
                "is that rank stuck, or does it make fewer calls? `tilewire dump` shows what each \
                   rank was doing; --timeout-s, TILEWIRE_TIMEOUT_S or `WorldCfg` raise the limit",
            )
        })
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
