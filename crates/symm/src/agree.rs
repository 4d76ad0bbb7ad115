//! Agreement on a team's next call: every member writes it into its flight recorder, and reads the
//! flight recorders of the other members.

use std::sync::atomic::Ordering;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::recorder::{self, Entry, EntryKind, EntryState, Fingerprint};
use crate::team::LiveTeam;
use crate::wait::WaitCtx;

impl LiveTeam {
    /// Collective: all members must be at a `prepare` with this fingerprint.
    ///
    /// Meets through the flight recorders in shared memory, so a peer that is at another
    /// `prepare`, or at a `launch`, is seen at once. Returns the sequence number.
    ///
    /// # Errors
    /// `Mismatch` with both ranks' texts; `Timeout`, `PeerDead`, or the fault of the team.
    pub fn prepare_agree(&self, fp: &Fingerprint) -> Result<u64> {
        self.check_at(fp.op(), "agree")?;
        let seq = self.record(EntryKind::Prepare, fp);
        self.meet_all("prepare", EntryKind::Prepare, (fp, seq))?;
        self.set_state(seq, EntryState::Done);
        Ok(seq)
    }

    /// Waits for the entry `seq` of every peer, which must be equal to mine.
    fn meet_all(&self, op: &str, kind: EntryKind, (fp, seq): (&Fingerprint, u64)) -> Result<()> {
        self.peers().try_for_each(|p| {
            let waited = self.wait_until(
                &WaitCtx { op, phase: "agree", seq, peer: p, expected: seq },
                // A peer may have passed and made so many launches that they have overwritten its
                // entry; its last two meetings stay recorded.
                || recorder::read_or_met(&self.0.ctl, p, (kind, seq)),
                || 0,
            );
            let theirs = waited.map_err(|e| self.fail(e))?;
            self.compare(fp, kind, p, &theirs).map_err(|e| self.fail(e))
        })
    }

    pub(crate) fn compare(
        &self,
        fp: &Fingerprint,
        kind: EntryKind,
        peer: Rank,
        theirs: &Entry,
    ) -> Result<()> {
        if theirs.fingerprint == fp.tag() && theirs.kind == kind {
            return Ok(());
        }
        let word = |k| if k == EntryKind::Prepare { "prepare" } else { "launch" };
        Err(Error::new(ErrorKind::Mismatch, "the ranks disagree about their next call")
            .op(if kind == EntryKind::Prepare { "prepare" } else { "launch" })
            .phase("agree")
            .of_team(self)
            .rank(self.rank())
            .peer(peer)
            .seq(theirs.seq)
            .expected(format_args!("`{} {}`", word(kind), fp.text()))
            .seen(format_args!("`{} {}`", word(theirs.kind), theirs.text))
            .hint("all ranks must make the same calls with the same shapes, in the same order"))
    }

    /// Records a launch in program order; returns its sequence number.
    ///
    /// # Errors
    /// The fault of the team.
    pub fn launch_begin(&self, fp: &Fingerprint) -> Result<u64> {
        self.check_at(fp.op(), "launch")?;
        Ok(self.record(EntryKind::Launch, fp))
    }

    /// Collective: begins a launch as [`LiveTeam::launch_begin`]; all members must be at a launch
    /// with this fingerprint. For teams of a world with
    /// [`WorldCfg::check`](crate::WorldCfg::check).
    ///
    /// # Errors
    /// As [`LiveTeam::prepare_agree`].
    pub fn launch_agree(&self, fp: &Fingerprint) -> Result<u64> {
        let seq = self.launch_begin(fp)?;
        self.note_meeting(seq, fp);
        self.meet_all(fp.op(), EntryKind::Launch, (fp, seq)).map(|()| seq)
    }

    /// Returns whether launches are compared: [`WorldCfg::check`](crate::WorldCfg::check).
    pub fn checks_launches(&self) -> bool {
        self.0.cfg.check
    }

    fn note_meeting(&self, seq: u64, fp: &Fingerprint) {
        recorder::write_prepare(&self.0.ctl, self.rank(), seq, fp.tag());
        self.peers().for_each(|p| self.0.ctl.ring(p));
    }

    fn record(&self, kind: EntryKind, fp: &Fingerprint) -> u64 {
        let seq = self.0.seq.fetch_add(1, Ordering::Relaxed) + 1;
        recorder::write(&self.0.ctl, self.rank(), seq, kind, fp.tag(), fp.text());
        if kind == EntryKind::Prepare {
            self.note_meeting(seq, fp);
        }
        seq
    }
}
