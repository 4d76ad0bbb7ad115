//! The one error type of the workspace.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Rank, Team};

/// Shorthand for results of this workspace.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error: one word that programs can match on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's arguments are not acceptable; nothing was done.
    InvalidArgument,
    /// The combination is legal but not provided by this backend.
    Unsupported,
    /// A library, device or file that this needs is not there.
    Unavailable,
    /// `launch` (or capture) came before `prepare`.
    NotPrepared,
    /// Ranks disagree about what they are doing.
    Mismatch,
    /// A wait passed its deadline while the peer was still alive.
    Timeout,
    /// A peer's process (or rank thread) has ended.
    PeerDead,
    /// The team was aborted by another rank, or by the caller.
    Aborted,
    /// A rule of the protocol was broken (a duplicated signal, a bad frame, a wrong secret).
    Protocol,
    /// Memory, descriptors or slots ran out.
    Exhausted,
    /// A buffer, handle or team from an earlier generation, or from the process that this one was
    /// forked from, was used.
    Stale,
    /// The operating system refused.
    Permission,
    /// Reading or writing a file or socket failed.
    Io,
    /// An environment variable or configuration value is not acceptable.
    Config,
    /// Stored data is damaged or belongs to something else.
    Corrupt,
    /// The accelerator is gone.
    DeviceLost,
    /// A bug in tilewire.
    Internal,
}

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    message: String,
    op: Option<Cow<'static, str>>,
    phase: Option<Cow<'static, str>>,
    team: Option<String>,
    /// World ranks of the team's members, in team order.
    members: Option<Arc<[Rank]>>,
    seq: Option<u64>,
    rank: Option<Rank>,
    peer: Option<Rank>,
    culprit: Option<Rank>,
    expected: Option<String>,
    seen: Option<String>,
    elapsed: Option<Duration>,
    hint: Option<Cow<'static, str>>,
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

/// An error: what failed, where, between which ranks, and what to do about it.
///
/// Cheap to clone: the same fault is reported to every caller that it concerns.
///
/// ```
/// # use tilewire_core::{Error, ErrorKind, Rank};
/// let e = Error::new(ErrorKind::Timeout, "peer did not signal")
///     .op("ag_gemm").phase("wait_chunk").rank(Rank::new(0)).peer(Rank::new(3))
///     .expected(7).seen(6).hint("raise TILEWIRE_TIMEOUT_S");
/// assert!(e.is_timeout());
/// assert_eq!(e.to_json()["peer"], 3);
/// assert!(e.to_string().contains("ag_gemm"));
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

impl Error {
    /// An error of `kind` with a sentence for people.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            op: None,
            phase: None,
            team: None,
            members: None,
            seq: None,
            rank: None,
            peer: None,
            culprit: None,
            expected: None,
            seen: None,
            elapsed: None,
            hint: None,
            cause: None,
        }))
    }

    /// `InvalidArgument` with a sentence.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// `Internal` with a sentence: an invariant of tilewire itself did not hold.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
            .hint("this is a bug in tilewire; please report it with this text")
    }

    /// An operating-system error with the call that met it.
    pub fn io(what: impl fmt::Display, cause: impl StdError + Send + Sync + 'static) -> Self {
        let text = format!("{what}: {cause}");
        // EMFILE and ENFILE, in the words of std and of rustix.
        let (kind, hint) = if text.ends_with("(os error 24)") {
            (ErrorKind::Exhausted, "raise the limit of open files with `ulimit -n`")
        } else if text.ends_with("(os error 27)") {
            // EFBIG. Not `Exhausted`: the limit is one of a file.
            let hint = "the file would pass the limit of file sizes: raise it with `ulimit -f`";
            return Self::new(ErrorKind::Io, text).hint(hint).cause(cause);
        } else if text.ends_with("(os error 12)") {
            (
                ErrorKind::Exhausted,
                "raise the limit of the address space with `ulimit -v`, or free memory",
            )
        } else if text.ends_with("(os error 23)") {
            (ErrorKind::Exhausted, "raise `sysctl fs.file-max`: all files of this machine are open")
        } else {
            return Self::new(ErrorKind::Io, text).cause(cause);
        };
        Self::new(kind, text).hint(hint).cause(cause)
    }

    /// Names the operation. An operation that is already named is kept: the innermost wins.
    pub fn op(mut self, op: impl Into<Cow<'static, str>>) -> Self {
        self.0.op.get_or_insert(op.into());
        self
    }

    /// Names the phase of the operation.
    pub fn phase(mut self, phase: impl Into<Cow<'static, str>>) -> Self {
        self.0.phase.get_or_insert(phase.into());
        self
    }

    /// Names the team.
    pub fn team(mut self, team: impl Into<String>) -> Self {
        self.0.team.get_or_insert(team.into());
        self
    }

    /// Names the team, and its members' places in the world: the text then has world ranks, with
    /// the team ranks in brackets. Nothing changes if another team is named already.
    pub fn of_team(self, team: &Team) -> Self {
        let mut named = self.team(team.name());
        if named.0.team.as_deref() == Some(team.name()) {
            named.0.members.get_or_insert_with(|| team.members().into());
        }
        named
    }

    /// Names the rank that is to blame, by its world rank. It need not be the peer of the wait that
    /// failed: that rank may wait itself.
    pub fn culprit(mut self, world_rank: Rank) -> Self {
        self.0.culprit.get_or_insert(world_rank);
        self
    }

    /// Sequence number of the launch.
    pub fn seq(mut self, seq: u64) -> Self {
        self.0.seq.get_or_insert(seq);
        self
    }

    /// The reporting rank (team rank).
    pub fn rank(mut self, rank: Rank) -> Self {
        self.0.rank.get_or_insert(rank);
        self
    }

    /// The other rank concerned (team rank).
    pub fn peer(mut self, peer: Rank) -> Self {
        self.0.peer.get_or_insert(peer);
        self
    }

    /// Sets the expected value.
    pub fn expected(mut self, v: impl fmt::Display) -> Self {
        self.0.expected = Some(v.to_string());
        self
    }

    /// Sets the value that was seen instead.
    pub fn seen(mut self, v: impl fmt::Display) -> Self {
        self.0.seen = Some(v.to_string());
        self
    }

    /// Sets the time that was waited.
    pub fn elapsed(mut self, d: Duration) -> Self {
        self.0.elapsed = Some(d);
        self
    }

    /// Sets what the user can do.
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.0.hint.get_or_insert(hint.into());
        self
    }

    /// The error underneath.
    pub fn cause(mut self, cause: impl StdError + Send + Sync + 'static) -> Self {
        self.0.cause = Some(Arc::new(cause));
        self
    }

    /// The same with the ranks of another numbering, in place of those it names.
    #[must_use]
    pub fn renumbered(mut self, rank: Rank, peer: Rank) -> Self {
        (self.0.rank, self.0.peer) = (Some(rank), Some(peer));
        self
    }

    /// The same with another sentence.
    #[must_use]
    pub fn reworded(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The sentence, without the context that `Display` adds.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The operation, if known.
    pub fn get_op(&self) -> Option<&str> {
        self.0.op.as_deref()
    }

    /// The phase, if known.
    pub fn get_phase(&self) -> Option<&str> {
        self.0.phase.as_deref()
    }

    /// The team, if known: ranks are those of this one.
    pub fn get_team(&self) -> Option<&str> {
        self.0.team.as_deref()
    }

    /// The reporting team rank, if known.
    pub fn get_rank(&self) -> Option<Rank> {
        self.0.rank
    }

    /// The peer's team rank, if known.
    pub fn get_peer(&self) -> Option<Rank> {
        self.0.peer
    }

    /// The world rank that is to blame, if known: the one that was named so, or the peer that died
    /// or did not signal.
    pub fn get_culprit(&self) -> Option<Rank> {
        let at_fault = matches!(self.kind(), ErrorKind::Timeout | ErrorKind::PeerDead);
        self.0.culprit.or_else(|| self.get_world_peer().filter(|_| at_fault))
    }

    /// The reporting rank's number in the world, if known.
    pub fn get_world_rank(&self) -> Option<Rank> {
        self.in_world(self.0.rank)
    }

    /// The peer's number in the world, if known.
    pub fn get_world_peer(&self) -> Option<Rank> {
        self.in_world(self.0.peer)
    }

    fn in_world(&self, team_rank: Option<Rank>) -> Option<Rank> {
        self.0.members.as_ref()?.get(team_rank?.idx()).copied()
    }

    /// A rank for people: by its number in the world, where that is known.
    fn shown(&self, team_rank: Rank) -> String {
        let mine = team_rank.get();
        match self.in_world(Some(team_rank)) {
            Some(world) if world != team_rank => format!("{} ({mine} in the team)", world.get()),
            _ => mine.to_string(),
        }
    }

    /// Sequence number of the launch, if known.
    pub fn get_seq(&self) -> Option<u64> {
        self.0.seq
    }

    /// Returns what was expected, in words, if something was compared.
    pub fn get_expected(&self) -> Option<&str> {
        self.0.expected.as_deref()
    }

    /// Returns what was seen instead, in words, if something was compared.
    pub fn get_seen(&self) -> Option<&str> {
        self.0.seen.as_deref()
    }

    /// Returns how long was waited, if anything was waited for.
    pub fn get_elapsed(&self) -> Option<Duration> {
        self.0.elapsed
    }

    /// Returns what the user can do, if anything.
    pub fn get_hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// A wait ran out of time.
    pub fn is_timeout(&self) -> bool {
        self.kind() == ErrorKind::Timeout
    }

    /// A peer has ended.
    pub fn is_peer_dead(&self) -> bool {
        self.kind() == ErrorKind::PeerDead
    }

    /// The ranks disagree.
    pub fn is_mismatch(&self) -> bool {
        self.kind() == ErrorKind::Mismatch
    }

    /// The backend does not provide this.
    pub fn is_unsupported(&self) -> bool {
        self.kind() == ErrorKind::Unsupported
    }

    /// Something that is needed is missing on this machine.
    pub fn is_unavailable(&self) -> bool {
        self.kind() == ErrorKind::Unavailable
    }

    /// The team cannot be used any more: re-form it without the dead, or end.
    pub fn is_team_fault(&self) -> bool {
        matches!(self.kind(), ErrorKind::Timeout | ErrorKind::PeerDead | ErrorKind::Aborted)
    }

    /// Returns the distance of an error from its cause: 0 for one of a rank's own, 1 for a peer
    /// that did not signal, 2 for one that reports what happened to another rank. Of the errors of
    /// several ranks the nearest is the one to read.
    pub fn distance(&self) -> u8 {
        match self.kind() {
            ErrorKind::PeerDead | ErrorKind::Aborted => 2,
            ErrorKind::Timeout => 1,
            _ => 0,
        }
    }

    /// The error as a JSON object; absent fields are left out.
    pub fn to_json(&self) -> serde_json::Value {
        let i = &*self.0;
        let mut m = serde_json::Map::new();
        let mut put = |k: &str, v: Option<serde_json::Value>| {
            if let Some(v) = v {
                m.insert(k.to_owned(), v);
            }
        };
        put("kind", serde_json::to_value(i.kind).ok());
        put("message", Some(i.message.clone().into()));
        put("op", i.op.as_deref().map(Into::into));
        put("phase", i.phase.as_deref().map(Into::into));
        put("team", i.team.clone().map(Into::into));
        put("seq", i.seq.map(Into::into));
        put("rank", i.rank.map(|r| r.get().into()));
        put("peer", i.peer.map(|r| r.get().into()));
        put("world_rank", self.get_world_rank().map(|r| r.get().into()));
        put("world_peer", self.get_world_peer().map(|r| r.get().into()));
        put("culprit", self.get_culprit().map(|r| r.get().into()));
        put("expected", i.expected.clone().map(Into::into));
        put("seen", i.seen.clone().map(Into::into));
        put("elapsed_ms", i.elapsed.map(|d| (d.as_secs_f64() * 1e3).into()));
        put("hint", i.hint.as_deref().map(Into::into));
        put("cause", i.cause.as_ref().map(|c| c.to_string().into()));
        serde_json::Value::Object(m)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let i = &*self.0;
        if let Some(op) = &i.op {
            write!(f, "{op}")?;
            if let Some(p) = &i.phase {
                write!(f, " [{p}]")?;
            }
            write!(f, ": ")?;
        }
        write!(f, "{}", i.message)?;
        match (&i.expected, &i.seen) {
            (Some(e), Some(s)) => write!(f, "; expected {e}, got {s}")?,
            (Some(e), None) => write!(f, "; expected {e}")?,
            (None, Some(s)) => write!(f, "; got {s}")?,
            (None, None) => {}
        }
        let mut ctx = Vec::new();
        if let Some(t) = &i.team {
            ctx.push(format!("team {t}"));
        }
        if let Some(s) = i.seq {
            ctx.push(format!("seq {s}"));
        }
        if let Some(r) = i.rank {
            ctx.push(format!("rank {}", self.shown(r)));
        }
        if let Some(p) = i.peer {
            ctx.push(format!("peer {}", self.shown(p)));
        }
        if let Some(c) = self.get_culprit() {
            ctx.push(format!("culprit {}", c.get()));
        }
        if let Some(d) = i.elapsed {
            ctx.push(format!("after {:.3} s", d.as_secs_f64()));
        }
        if !ctx.is_empty() {
            write!(f, " ({})", ctx.join(", "))?;
        }
        if let Some(h) = &i.hint {
            write!(f, "\n  hint: {h}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|c| c as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_everything_and_innermost_context_wins() {
        let e = Error::new(ErrorKind::Timeout, "no signal")
            .op("gemm_rs")
            .op("train")
            .phase("reduce")
            .team("tp")
            .seq(9)
            .rank(Rank::new(1))
            .peer(Rank::new(2))
            .expected(4)
            .seen(3)
            .elapsed(Duration::from_millis(1500))
            .hint("look at rank 2");
        assert_eq!(
            e.to_string(),
            "gemm_rs [reduce]: no signal; expected 4, got 3 (team tp, seq 9, rank 1, peer 2, \
             after 1.500 s)\n  hint: look at rank 2"
        );
        assert_eq!((e.get_seq(), e.get_elapsed()), (Some(9), Some(Duration::from_millis(1500))));
        assert_eq!((e.get_expected(), e.get_seen()), (Some("4"), Some("3")));
        let none = Error::invalid("no");
        assert_eq!((none.get_seq(), none.get_elapsed()), (None, None));
        assert_eq!((none.get_expected(), none.get_seen()), (None, None));
        let j = e.to_json();
        assert_eq!(j["kind"], "timeout");
        assert_eq!(j["elapsed_ms"], 1500.0);
        assert!(j.get("cause").is_none());
    }

    #[test]
    fn ranks_of_a_team_are_shown_by_their_numbers_in_the_world() {
        let members = [Rank::new(4), Rank::new(5)];
        let team = Team::new("cp2.0", &members, Rank::new(4), 8).unwrap().unwrap();
        let dead = || Error::new(ErrorKind::PeerDead, "gone").rank(Rank::new(0)).peer(Rank::new(1));
        let e = dead().of_team(&team);
        let text = "gone (team cp2.0, rank 4 (0 in the team), peer 5 (1 in the team), culprit 5)";
        assert_eq!(e.to_string(), text);
        assert_eq!((e.get_rank(), e.get_peer()), (Some(Rank::new(0)), Some(Rank::new(1))));
        assert_eq!(e.get_world_rank(), Some(Rank::new(4)));
        let j = e.to_json();
        assert_eq!(
            (&j["peer"], &j["world_peer"], &j["culprit"]),
            (&1.into(), &5.into(), &5.into())
        );
        // The rank to blame may be one that the wait was not for.
        let e = dead().culprit(Rank::new(7)).of_team(&team);
        assert_eq!((e.get_culprit(), e.get_world_peer()), (Some(Rank::new(7)), Some(Rank::new(5))));
        // Who waited for something else blames nobody.
        let e = Error::new(ErrorKind::Mismatch, "no").peer(Rank::new(1)).of_team(&team);
        assert_eq!(e.get_culprit(), None);
        // Ranks of a team that is named already are not those of another.
        let other = dead().team("other").of_team(&team);
        assert_eq!((other.get_team(), other.get_world_peer()), (Some("other"), None));
        assert!(dead().team("cp2.0").of_team(&team).get_world_peer().is_some());
    }

    #[test]
    fn limits_of_files_and_memory_are_told_with_their_remedies() {
        for (code, kind, remedy) in
            [(27, ErrorKind::Io, "ulimit -f"), (12, ErrorKind::Exhausted, "ulimit -v")]
        {
            let e = Error::io("writing", std::io::Error::from_raw_os_error(code));
            assert_eq!(e.kind(), kind);
            assert!(e.get_hint().is_some_and(|h| h.contains(remedy)), "{e}");
        }
    }

    #[test]
    fn either_half_of_what_was_compared_is_told() {
        let e = || Error::invalid("no");
        assert_eq!(e().seen(3).to_string(), "no; got 3");
        assert_eq!(e().expected(4).to_string(), "no; expected 4");
    }

    #[test]
    fn a_limit_of_open_files_is_told_with_the_remedy() {
        for (code, remedy) in [(24, "ulimit -n"), (23, "fs.file-max")] {
            let e = Error::io("socket", std::io::Error::from_raw_os_error(code));
            assert_eq!(e.kind(), ErrorKind::Exhausted);
            assert!(e.get_hint().is_some_and(|h| h.contains(remedy)), "{e}");
        }
        assert_eq!(Error::io("x", std::io::Error::from_raw_os_error(2)).kind(), ErrorKind::Io);
    }

    #[test]
    fn cause_is_reachable() {
        let e = Error::io("open x", std::io::Error::other("boom"));
        assert_eq!(e.source().unwrap().to_string(), "boom");
    }
}
