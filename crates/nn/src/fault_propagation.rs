//! One fault for all teams of a rank.
//!
//! A step crosses several teams on one stream. A rank that falls silent is missed by each of them
//! that it belongs to, one behind the other, and each wait has a deadline of its own: together they
//! would take as many times as long. So the first fault of a team here ends the other teams of this
//! rank as well, while the device is still waited for, and their peers learn of it as of any abort.

use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::{Device, Probe};
use tilewire_symm::LiveTeam;

pub(crate) struct FaultPropagation {
    teams: [LiveTeam; 4],
    first: OnceLock<Error>,
}

impl FaultPropagation {
    /// Looks at the teams whenever the device is waited for, as long as it lives.
    pub fn new(teams: [&LiveTeam; 4], device: &Device) -> Arc<Self> {
        let new = Arc::new(Self { teams: teams.map(LiveTeam::clone), first: OnceLock::new() });
        if let Device::Cuda(ctx) = device {
            let probe: Arc<dyn Probe> = new.clone();
            ctx.watch(Arc::downgrade(&probe));
        }
        new
    }

    /// The first fault of a team, which ends the others.
    pub fn check(&self) -> Result<()> {
        if let Some(e) = self.first.get() {
            return Err(e.clone());
        }
        let all = || self.teams.iter().filter_map(|t| t.check().err()).collect::<Vec<_>>();
        if all().is_empty() {
            return Ok(());
        }
        // Once more: a peer tells of a death on one team, and then of its own end on the others.
        let Some(cause) = all().into_iter().min_by_key(nearness) else {
            return Err(Error::internal("the team's fault disappeared between two checks"));
        };
        let first = self.first.get_or_init(|| cause);
        for t in &self.teams {
            if t.check().is_ok() {
                let text = format!("another team of this rank is over: {}", first.message());
                t.fail(Error::new(ErrorKind::Aborted, text).cause(first.clone()));
            }
        }
        Err(first.clone())
    }
}

/// An error that this rank met itself comes before a report of peers, and a death before all: a
/// peer's report of a team that they gave up because of another may be there first.
fn nearness(e: &Error) -> u8 {
    match e.kind() {
        ErrorKind::PeerDead => 0,
        ErrorKind::Aborted => 2,
        _ => 1,
    }
}

impl Probe for FaultPropagation {
    fn poll(&self) {
        // Whoever waits asks, too.
        let _told = self.check();
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::Rank;
    use tilewire_symm::{World, WorldCfg};

    use super::*;

    fn fault(kind: ErrorKind) -> Error {
        Error::new(kind, format!("{kind:?}")).peer(Rank::new(1))
    }

    #[test]
    fn the_cause_ends_all_teams_and_is_told_before_what_it_brings() {
        use ErrorKind::{Aborted, PeerDead, Timeout};
        for (there, want) in [
            ([None, None, Some(Timeout), None], Timeout),
            ([Some(Aborted), None, Some(Timeout), None], Timeout),
            ([Some(Aborted), Some(Timeout), None, Some(PeerDead)], PeerDead),
            ([Some(Aborted), None, None, None], Aborted),
        ] {
            World::run_threads(2, WorldCfg::for_tests(), |world| {
                let teams = ["a", "b", "c", "d"].map(|n| world.everyone(n).unwrap());
                let together =
                    FaultPropagation::new([0, 1, 2, 3].map(|i| &teams[i]), &Device::Host);
                together.check()?;
                // Rank 1 may learn of the faults before this is over.
                let met = teams[0].agree(true);
                if world.rank().get() == 0 {
                    met?;
                    for (team, kind) in teams.iter().zip(there) {
                        if let Some(kind) = kind {
                            team.fail(fault(kind));
                        }
                    }
                    for _ in 0..2 {
                        assert_eq!(together.check().unwrap_err().kind(), want);
                    }
                    for (team, kind) in teams.iter().zip(there) {
                        let e = team.check().unwrap_err();
                        assert_eq!(e.kind(), kind.unwrap_or(Aborted), "{e}");
                        let why = kind.is_some() || e.message().contains(&format!("{want:?}"));
                        assert!(why, "{e}");
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}
