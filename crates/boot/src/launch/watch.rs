//! The launcher while the ranks run: who ends, who has to be ended, and when.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use tilewire_core::{Error, Rank, Result};

use super::group::RankProcess;
use super::pump::Shown;
use super::restart::Restarts;
use super::{ExitReport, Failure, Launch, RankStatus};
use crate::sock;

/// Exit code after the time limit, as that of `timeout(1)`.
const TIMEOUT_CODE: i32 = 124;

/// Failures within this time after the first are judged together: the sockets of a process close
/// before its end can be seen, so that its peers may have failed and ended earlier.
const TOGETHER: Duration = Duration::from_millis(100);

/// The exit status of a program that was started wrongly: that of clap, argparse and shells.
const MISUSE: i32 = 2;

/// Words of errors that another rank has caused: texts of `PeerDead` and `Aborted`, and names of
/// exceptions.
const OF_A_PEER: [&str; 6] =
    ["has died", "has left", "PeerDead", "aborted by rank", "aborted the team", "Aborted"];

/// Words of errors of a rank that waited for another, which was silent.
const OF_SILENCE: [&str; 2] = ["did not signal", "no message has arrived"];

/// The signals that the launcher passes on, each with a pipe that tells of it.
pub(super) struct Signals(Vec<(i32, UnixStream, SigId)>);

impl Signals {
    pub fn new(forward: bool) -> Result<Self> {
        let io = |e| Error::io("watching for signals", e);
        let mut all = Self(Vec::new());
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGUSR1].into_iter().filter(|_| forward) {
            let (read, write) = UnixStream::pair().map_err(io)?;
            read.set_nonblocking(true).map_err(io)?;
            let id = signal_hook::low_level::pipe::register(signal, write).map_err(io)?;
            all.0.push((signal, read, id));
        }
        Ok(all)
    }

    fn take(&self, i: usize) -> Option<i32> {
        let (signal, pipe, _) = &self.0[i];
        rustix::io::read(pipe, &mut [0u8; 64]).ok().filter(|n| *n > 0).map(|_| *signal)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (_, _, id) in &self.0 {
            signal_hook::low_level::unregister(*id);
        }
    }
}

/// The end of a wait.
pub(super) enum Round {
    /// All ranks have ended, for good.
    End,
    /// The ranks that have ended are to be started anew; the others wait for them.
    Restart,
}

/// The wait for the ranks to end.
pub(super) struct Watch<'a> {
    launch: &'a Launch,
    start: Instant,
    /// Set when the ranks have been asked to end.
    ending: Option<Instant>,
    killed: bool,
    /// Ranks that did not end when they were asked to.
    stuck: Vec<Rank>,
    /// Ranks that have failed before anybody was asked to end, in the order in which that was seen.
    pub failed: Vec<(Rank, RankStatus)>,
    /// Ranks that were killed because they did not come back.
    pub silent: Vec<Rank>,
    /// A failure would come again: no restart answers it.
    is_final: bool,
    /// Set with the first of them: the others are asked to end then.
    verdict: Option<Instant>,
    timed_out: bool,
    interrupted: Option<i32>,
}

/// A signal that comes again within this time is the same wish.
const IMPATIENT: Duration = Duration::from_millis(500);

impl<'a> Watch<'a> {
    pub fn new(launch: &'a Launch, start: Instant) -> Self {
        Self {
            launch,
            start,
            ending: None,
            killed: false,
            stuck: Vec::new(),
            failed: Vec::new(),
            silent: Vec::new(),
            is_final: false,
            verdict: None,
            timed_out: false,
            interrupted: None,
        }
    }

    /// Waits until all ranks have ended, or, where restarts are left, each has ended or come back.
    /// `has_met`: whether a rank has come to meet the others in this round.
    pub fn run(
        &mut self,
        ranks: &mut [RankProcess],
        signals: &Signals,
        mut restarts: Option<&mut Restarts>,
        has_met: &dyn Fn(Rank) -> bool,
    ) -> Result<Round> {
        while ranks.iter().any(|r| r.status.is_none()) {
            let open = restarts.as_deref().filter(|_| !self.is_final);
            let (came, ended) = self.wait(ranks, signals, open)?;
            for signal in came {
                self.interrupt(signal, ranks);
            }
            for i in ended {
                let Some(status) = ranks[i].poll_status()? else { continue };
                // What ends after we asked it to has not failed by itself.
                if !status.success() && self.ending.is_none() {
                    let rank = Rank::new(i as u32);
                    self.is_final |= status == RankStatus::Exited(MISUSE) && !has_met(rank);
                    self.failed.push((rank, status));
                    self.verdict.get_or_insert_with(|| Instant::now() + TOGETHER);
                }
            }
            if let Some(r) = restarts.as_deref_mut().filter(|_| self.ending.is_none()) {
                r.accept(ranks.len());
                self.is_final |= r.is_given_up;
                if self.verdict.is_some() && r.are_left() {
                    r.since.get_or_insert_with(Instant::now);
                }
                if !self.is_final && self.regroup(ranks, r) {
                    return Ok(Round::Restart);
                }
            }
            let regroups = !self.is_final && restarts.as_deref().is_some_and(|r| r.since.is_some());
            let is_due = self.verdict.is_some_and(|t| Instant::now() >= t);
            if is_due && self.ending.is_none() && !regroups {
                self.end(ranks, Signal::TERM);
            }
            if self.launch.timeout.is_some_and(|t| self.start.elapsed() >= t)
                && self.ending.is_none()
            {
                self.timed_out = true;
                self.end(ranks, Signal::TERM);
            }
            if !self.killed && self.ending.is_some_and(|t| t.elapsed() >= self.launch.grace) {
                self.kill(ranks);
            }
        }
        let all_lost = !self.failed.is_empty() && self.ending.is_none() && !self.is_final;
        match restarts {
            Some(r) if all_lost && r.are_left() => Ok(Round::Restart),
            _ => Ok(Round::End),
        }
    }

    /// True once every rank has ended or come back; kills those that are late.
    fn regroup(&mut self, ranks: &[RankProcess], restarts: &Restarts) -> bool {
        let Some(since) = restarts.since else { return false };
        let is_away = |i: &usize| ranks[*i].status.is_none() && !restarts.ready.contains_key(i);
        let away: Vec<usize> = (0..ranks.len()).filter(is_away).collect();
        if since.elapsed() >= self.launch.regroup && self.silent.is_empty() {
            for i in &away {
                self.silent.push(Rank::new(*i as u32));
                ranks[*i].signal_group(Signal::KILL);
            }
        }
        away.is_empty()
    }

    /// The failure that a restart answers, in words.
    pub fn why(&self) -> String {
        match (cause(&self.failed, &[]), self.silent.first()) {
            (_, Some(rank)) => format!("rank {} did not come back and was killed", rank.get()),
            (Some((rank, status)), None) => format!("rank {} has failed ({status:?})", rank.get()),
            (None, None) => "a rank has lost another".to_owned(),
        }
    }

    /// Forgets the failures that a restart has answered.
    pub fn restarted(&mut self) {
        (self.failed, self.silent, self.verdict) = (Vec::new(), Vec::new(), None);
    }

    /// Sleeps until a signal comes, a rank ends, or a limit is reached.
    fn wait(
        &self,
        ranks: &[RankProcess],
        signals: &Signals,
        restarts: Option<&Restarts>,
    ) -> Result<(Vec<i32>, Vec<usize>)> {
        let now = Instant::now();
        let late = restarts.and_then(|r| r.since).filter(|_| self.silent.is_empty());
        let limit = match (self.ending, self.launch.timeout) {
            (Some(_), _) if self.killed => None,
            (Some(t), _) => Some(t + self.launch.grace),
            (None, timeout) => {
                // A verdict that is answered by a restart is over.
                let verdict = self.verdict.filter(|_| restarts.is_none_or(|r| r.since.is_none()));
                let times = [
                    verdict,
                    timeout.map(|t| self.start + t),
                    late.map(|t| t + self.launch.regroup),
                ];
                times.into_iter().flatten().min()
            }
        };
        let mut fds: Vec<PollFd<'_>> =
            signals.0.iter().map(|(_, p, _)| PollFd::new(p, PollFlags::IN)).collect();
        let callers = restarts.map(|r| PollFd::new(&r.listener, PollFlags::IN));
        let running: Vec<usize> = (0..ranks.len()).filter(|i| ranks[*i].status.is_none()).collect();
        fds.extend(running.iter().map(|i| PollFd::new(&ranks[*i].pidfd, PollFlags::IN)));
        // The last: who polls looks at it by accepting.
        fds.extend(callers);
        sock::wait_any(&mut fds, limit.map(|t| t.saturating_duration_since(now)))?;
        let (sig, proc) = fds.split_at(signals.0.len());
        let is_ready = |f: &PollFd<'_>| !f.revents().is_empty();
        let came = (0..sig.len()).filter(|i| is_ready(&sig[*i])).filter_map(|i| signals.take(i));
        let ended = running.iter().zip(proc).filter(|(_, f)| is_ready(f)).map(|(i, _)| *i);
        Ok((came.collect(), ended.collect()))
    }

    /// The first signal ends the ranks; another one, later, kills them: somebody is impatient.
    /// One wish may come as two signals at once, as TERM and HUP of a service or HUP of a shell and
    /// of its terminal: ranks keep the grace time then.
    fn interrupt(&mut self, signal: i32, ranks: &[RankProcess]) {
        if signal == SIGUSR1 {
            // A word to the ranks, and no wish of the launcher's: they decide.
            return ranks.iter().for_each(|r| r.signal_group(Signal::USR1));
        }
        if self.interrupted.is_some() {
            if self.ending.is_some_and(|t| t.elapsed() >= IMPATIENT) {
                self.kill(ranks);
            }
            return;
        }
        self.interrupted = Some(signal);
        let known = [(SIGINT, Signal::INT), (SIGHUP, Signal::HUP)];
        let as_signal = known.iter().find(|(n, _)| *n == signal).map_or(Signal::TERM, |(_, s)| *s);
        self.end(ranks, as_signal);
    }

    fn end(&mut self, ranks: &[RankProcess], signal: Signal) {
        self.ending.get_or_insert_with(Instant::now);
        ranks.iter().for_each(|r| r.signal_group(signal));
    }

    fn kill(&mut self, ranks: &[RankProcess]) {
        self.killed = true;
        let alive = ranks.iter().enumerate().filter(|(_, r)| r.status.is_none());
        self.stuck = alive.map(|(i, _)| Rank::new(i as u32)).collect();
        ranks.iter().for_each(|r| r.signal_group(Signal::KILL));
    }

    pub fn grace_left(&self) -> Duration {
        match self.ending {
            Some(t) => self.launch.grace.saturating_sub(t.elapsed()),
            None => self.launch.grace,
        }
    }

    pub fn report(
        &self,
        ranks: &[RankProcess],
        Shown { mut tails, lost }: Shown,
        stragglers: usize,
    ) -> ExitReport {
        let first_failure = cause(&self.failed, &tails).map(|(rank, status)| {
            let last_stderr = tails.get_mut(rank.idx()).map(std::mem::take).unwrap_or_default();
            let culprit = last_stderr.iter().rev().find_map(|l| culprit(l));
            Failure {
                rank,
                status,
                culprit: culprit.filter(|r| r.idx() < ranks.len()),
                last_stderr,
            }
        });
        let all_well = ranks.iter().all(|r| r.status.is_some_and(RankStatus::success));
        let code = match (&first_failure, self.interrupted) {
            (Some(f), _) => f.status.code(),
            // Ranks that end well when a scheduler asks them to have done what was wanted. Who
            // interrupts a job at a terminal does not want its shell to go on.
            (None, Some(SIGTERM)) if all_well => 0,
            (None, Some(signal)) => 128 + signal,
            (None, None) if self.timed_out => TIMEOUT_CODE,
            (None, None) => 0,
        };
        ExitReport {
            code,
            // All have ended: the wait is over only then.
            ranks: ranks.iter().map(|r| r.status.unwrap_or(RankStatus::Signaled(9))).collect(),
            first_failure,
            restarts: 0,
            stuck: self.stuck.clone(),
            timed_out: self.timed_out,
            interrupted: self.interrupted,
            stragglers,
            lost_output: lost,
            elapsed: self.start.elapsed(),
        }
    }
}

/// The failure that caused the others: a signal before an exit, an error of its own before that of
/// a wait for a silent rank, this before one that reports what befell a peer, and of equals the
/// one seen first. `tails`: the last lines of standard error.
fn cause(failed: &[(Rank, RankStatus)], tails: &[Vec<String>]) -> Option<(Rank, RankStatus)> {
    let lines = |rank: Rank| tails.get(rank.idx()).map_or(&[][..], Vec::as_slice);
    let says = |rank: Rank, what: &[&str]| {
        lines(rank).iter().any(|l| what.iter().any(|words| l.contains(words)))
    };
    let step_of_peer =
        |rank: Rank| lines(rank).iter().any(|l| failed_peer(l).is_some_and(|peer| peer != rank));
    let weight = |&(rank, status): &(Rank, RankStatus)| match status {
        RankStatus::Signaled(_) => 0,
        RankStatus::Exited(_) if says(rank, &OF_SILENCE) => 2,
        RankStatus::Exited(_) if says(rank, &OF_A_PEER) || step_of_peer(rank) => 3,
        RankStatus::Exited(_) => 1,
    };
    failed.iter().copied().min_by_key(weight)
}

/// Returns the world rank whose step of a collective call failed, of an error's text: `r1 failed:
/// no memory`.
fn failed_peer(line: &str) -> Option<Rank> {
    let (before, _) = line.split_once(" failed: ")?;
    before.rsplit(' ').next()?.strip_prefix('r')?.parse().ok().map(Rank::new)
}

/// Returns the world rank that an error's text blames.
fn culprit(line: &str) -> Option<Rank> {
    let Some((_, rest)) = line.rsplit_once("culprit ") else { return failed_peer(line) };
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    rest[..digits].parse().ok().map(Rank::new)
}
