//! One fault for all teams of a rank.
//!
//! A step crosses several teams on one stream. A rank that falls silent is missed by each of them
//! that it belongs to, one behind the other, and each wait has a deadline of its own: together they
//! would take as many times as long. So the first fault of a team here ends the other teams of this
//! rank as well, and their peers learn of it as of any abort. On the host each wait of a team looks
//! at the other teams; on devices the host does, while the device is waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::{Device, Probe};
use tilewire_symm::LiveTeam;

pub(crate) struct FaultPropagation {
    teams: [LiveTeam; 4],
    first: OnceLock<Error>,
    /// A thread looks at the teams: their faults ask this again.
    looking: AtomicBool,
}

impl FaultPropagation {
    /// Looks at the teams whenever the device is waited for, or on the host whenever a wait asks
    /// whether its team is over, as long as it lives.
    pub fn new(teams: [&LiveTeam; 4], device: &Device) -> Arc<Self> {
        let new = Arc::new(Self {
            teams: teams.map(LiveTeam::clone),
            first: OnceLock::new(),
            looking: AtomicBool::new(false),
        });
        let probe: Arc<dyn Probe> = new.clone();
        let probe: Weak<dyn Probe> = Arc::downgrade(&probe);
        match device {
            Device::Cuda(ctx) => ctx.watch(probe),
            Device::Host => new.teams.iter().for_each(|t| t.fault().watch(probe.clone())),
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
                let e = Error::new(ErrorKind::Aborted, text).cause(first.clone());
                t.fail(match first.get_culprit() {
                    Some(rank) => e.culprit(rank),
                    None => e,
                });
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
        // `check` asks the teams, and each of them asks this: one look at a time.
        if !self.looking.swap(true, Ordering::AcqRel) {
            // Whoever waits asks, too.
            let _seen = self.check();
            self.looking.store(false, Ordering::Release);
        }
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
                // Rank 1 may learn of the faults before this is over, and has none of its own.
                let met = teams[0].agree(true);
                if world.rank().get() == 0 {
                    met?;
                    let all = [0, 1, 2, 3].map(|i| &teams[i]);
                    let together = FaultPropagation::new(all, &Device::Host);
                    together.check()?;
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

    /// A wait of one team ends with the fault of another, without a look from elsewhere, and its
    /// peers learn the cause.
    #[test]
    fn on_the_host_a_wait_ends_with_the_fault_of_another_team() {
        World::run_threads(2, WorldCfg::default(), |world| {
            let teams = ["a", "b", "c", "d"].map(|n| world.everyone(n).unwrap());
            teams[3].agree(true)?;
            if world.rank().get() == 1 {
                // No wait of its own: it learns on the team that rank 0 waits for.
                while teams[1].check().is_ok() {
                    std::thread::yield_now();
                }
                let e = teams[1].check().unwrap_err();
                assert!(e.message().ends_with("it timed out waiting for rank 1"), "{e}");
                return Ok(());
            }
            let all = [0, 1, 2, 3].map(|i| &teams[i]);
            let _together = FaultPropagation::new(all, &Device::Host);
            let start = std::time::Instant::now();
            let e = std::thread::scope(|s| {
                let waits = s.spawn(|| teams[1].agree(true).unwrap_err());
                std::thread::sleep(std::time::Duration::from_millis(50));
                teams[2].fail(fault(ErrorKind::Timeout));
                waits.join().unwrap()
            });
            assert!(start.elapsed() < WorldCfg::default().timeout / 100, "{e}");
            assert_eq!(
                (e.kind(), e.get_culprit()),
                (ErrorKind::Aborted, Some(Rank::new(1))),
                "{e}"
            );
            Ok(())
        })
        .unwrap();
    }
}
