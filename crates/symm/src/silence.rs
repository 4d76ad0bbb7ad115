//! The search for the rank that holds the others up. Each rank that waits on the host says so on
//! all its control pages, with the rank that it waits for.
//!
//! At a deadline the rank that a wait is for need not be the one that is stuck: it may wait itself.
//! So a wait follows these words from rank to rank, to one that gives no sign of waiting.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tilewire_core::{Rank, Result};

use crate::recorder;
use crate::team::{LiveTeam, TeamInner, lock};

/// Least time between two signs of one wait, and between two looks at those of the peers.
const PACE: Duration = Duration::from_millis(10);

/// A rank that waits gives a sign every 20 ms. One that has given none for this long does something
/// else, however busy the machine is.
const SILENT: Duration = Duration::from_secs(5);

/// In place of an awaited rank of the world: it is not known which.
const SOMEBODY: u64 = 0xff;

/// The teams of one rank of a world.
#[derive(Default)]
pub(crate) struct Siblings {
    teams: Mutex<Vec<Weak<TeamInner>>>,
    signs: AtomicU64,
}

impl Siblings {
    pub fn add(&self, team: &Arc<TeamInner>) {
        let mut teams = lock(&self.teams);
        teams.retain(|t| t.strong_count() > 0);
        teams.push(Arc::downgrade(team));
    }

    /// Returns the teams that are alive. The list is not locked any more: the last clone of a team
    /// may end with what is returned.
    pub fn all(&self) -> Vec<LiveTeam> {
        lock(&self.teams).iter().filter_map(Weak::upgrade).map(LiveTeam).collect()
    }

    /// Tells the peers of all teams that this rank waits for several.
    pub fn sign_all(&self) -> Result<()> {
        self.sign(&self.all(), None);
        Ok(())
    }

    /// Tells the peers of all teams that this rank waits, and for which rank of the world.
    fn sign(&self, teams: &[LiveTeam], awaited: Option<Rank>) {
        let n = self.signs.fetch_add(1, Ordering::Relaxed) + 1;
        let rank = awaited.map_or(SOMEBODY, |r| u64::from(r.get()));
        for t in teams {
            t.0.ctl.sign_word(t.rank()).store(n << 8 | rank, Ordering::Relaxed);
        }
    }
}

/// The signs of the other ranks that a wait has seen.
pub(crate) struct Watch {
    awaited: Option<Rank>,
    start: Instant,
    last: Instant,
    /// For each rank of the world: its newest sign, and since when it is that one.
    signs: Vec<(u64, Instant)>,
    /// Ranks of the world whose signs can be seen: bit `i` is rank `i`.
    known: u64,
}

/// The result of a search for the rank that holds the others up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Suspect {
    /// World rank.
    pub rank: Rank,
    /// The evidence against it; `None` if it only did not signal.
    pub why: Option<String>,
}

impl Watch {
    /// Begins the watch of a wait for a team rank, or for several.
    pub fn new(team: &LiveTeam, awaited: Option<Rank>) -> Self {
        let start = Instant::now();
        let signs = vec![(0, start); team.world_size()];
        Self { awaited: awaited.map(|r| team.world_rank(r)), start, last: start, signs, known: 0 }
    }

    /// Gives a sign and looks at those of the others, if it is time. Called while a wait lasts.
    pub fn look(&mut self, team: &LiveTeam) {
        let now = Instant::now();
        if now - self.last < PACE {
            // Most waits end before they cost anything here.
            return;
        }
        self.last = now;
        let teams = team.0.siblings.all();
        team.0.siblings.sign(&teams, self.awaited);
        for t in &teams {
            for (i, world) in t.members().iter().enumerate() {
                let sign = t.0.ctl.sign_word(Rank::new(i as u32)).load(Ordering::Relaxed);
                self.known |= 1 << world.idx();
                let known = &mut self.signs[world.idx()];
                // Of a rank's pages the newest sign counts: it may have dropped a team.
                if sign >> 8 > known.0 >> 8 {
                    *known = (sign, now);
                }
            }
        }
    }

    /// Returns how long `world` has given no sign, if that is longer than a rank that waits takes.
    fn silence(&self, world: Rank) -> Option<Duration> {
        let now = Instant::now();
        let quiet = now - self.signs[world.idx()].1;
        (quiet >= SILENT.min((now - self.start) / 2)).then_some(quiet)
    }

    /// Returns who holds up the wait for `peer`, a rank of the team.
    pub fn suspect(&self, team: &LiveTeam, peer: Rank) -> Suspect {
        let me = team.world_rank(team.rank());
        let teams = team.0.siblings.all();
        let first = team.world_rank(peer);
        let (mut at, mut met) = (first, vec![me]);
        loop {
            if self.known >> at.idx() & 1 == 0 {
                return Suspect { rank: at, why: None };
            }
            if let Some(quiet) = self.silence(at) {
                let calls = fewer_calls(&teams, at).map_or(String::new(), |c| format!("; {c}"));
                let s = quiet.as_secs_f64();
                let why = format!("has itself waited for nobody for {s:.1} s{calls}");
                return Suspect { rank: at, why: Some(why) };
            }
            met.push(at);
            let next = match self.signs[at.idx()].0 & 0xff {
                SOMEBODY => self.most_silent(&teams, &met),
                r => Some(Rank::new(r as u32)).filter(|r| r.idx() < self.signs.len()),
            };
            match next.filter(|r| !met.contains(r)) {
                Some(next) => at = next,
                None => break,
            }
        }
        // All of them wait, each for another.
        let fewest = team.fewest_calls();
        let (rank, why) =
            fewest.map_or((first, None), |(r, text)| (team.world_rank(r), Some(text)));
        Suspect { rank, why }
    }

    /// Returns who has been silent longest, of the ranks that this one shares a team with.
    fn most_silent(&self, teams: &[LiveTeam], but: &[Rank]) -> Option<Rank> {
        let known = teams.iter().flat_map(|t| t.members().iter().copied());
        let quiet = known.filter(|r| !but.contains(r));
        quiet.filter_map(|r| Some((self.silence(r)?, r))).max().map(|(_, r)| r)
    }
}

/// Returns a text about the calls of a rank of the world, if they are fewer than mine in a team.
fn fewer_calls(teams: &[LiveTeam], world: Rank) -> Option<String> {
    teams.iter().find_map(|t| {
        let (mine, theirs) = (t.calls(t.rank()), t.calls(t.team_rank(world)?));
        let made = || format!("it has made {theirs} calls of {mine} of team {}", t.name());
        (theirs < mine).then(made)
    })
}

impl LiveTeam {
    /// Returns how many calls a team rank has made in this team, by its flight recorder.
    pub(crate) fn calls(&self, r: Rank) -> u64 {
        recorder::last(&self.0.ctl, r)
    }

    /// Returns the team rank that has made the fewest calls in this team, and a text about it, if
    /// they are fewer than mine.
    pub(crate) fn fewest_calls(&self) -> Option<(Rank, String)> {
        let mine = self.calls(self.rank());
        let (calls, r) = self.peers().map(|r| (self.calls(r), r)).min()?;
        let text = || (r, format!("has made {calls} calls of {mine} of team {}", self.name()));
        (calls < mine).then(text)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tilewire_core::{ErrorKind, Rank, Result};

    use crate::wait::WaitCtx;
    use crate::{Fingerprint, LiveTeam, World, WorldCfg};

    fn pair(world: &World, members: [u32; 2], name: &str) -> Result<Option<LiveTeam>> {
        world.team(&members.map(Rank::new), name)
    }

    fn launch() -> Fingerprint {
        Fingerprint::new("op", "m=1")
    }

    /// Rank 0 waits for rank 1, which waits for rank 2, which does nothing: rank 0 blames rank 2,
    /// of which its own wait knows nothing, and rank 1's abort names it where it is no member.
    #[test]
    fn who_waits_for_one_that_waits_names_the_rank_at_the_end() {
        let errors = World::run_threads(3, WorldCfg::for_tests(), |world| {
            let all = world.everyone("all")?;
            let [low, high] = [([0, 1], "low"), ([1, 2], "high")].map(|(m, n)| pair(&world, m, n));
            let (low, high) = (low?, high?);
            all.agree(true)?;
            let start = Instant::now();
            let waited = match world.rank().get() {
                0 => low.as_ref().map(|t| t.prepare_agree(&launch())),
                // Later than rank 0, which is not to learn of this rank's deadline.
                1 => {
                    std::thread::sleep(all.timeout() / 4);
                    high.as_ref().map(|t| t.prepare_agree(&launch()))
                }
                _ => {
                    std::thread::sleep(all.timeout() * 3 / 2);
                    None
                }
            };
            assert!(start.elapsed() < all.timeout() * 7 / 4);
            let Some(waited) = waited else { return Ok(None) };
            let e = waited.unwrap_err();
            if let (1, Some(low)) = (world.rank().get(), low) {
                // The other member of that team learns of a rank that is not in it.
                let e = low.check().unwrap_err();
                assert!(e.message().ends_with("it timed out waiting for rank 2"), "{e}");
                assert_eq!((e.kind(), e.get_culprit()), (ErrorKind::Aborted, Some(Rank::new(2))));
            }
            Ok(Some(e))
        })
        .unwrap();
        let [Some(chained), Some(direct), None] = &errors[..] else { panic!("{errors:?}") };
        for e in [chained, direct] {
            assert!(e.is_timeout() && e.get_culprit() == Some(Rank::new(2)), "{e}");
        }
        assert_eq!(chained.get_peer(), Some(Rank::new(1)), "{chained}");
        let text = chained.message();
        assert!(
            text.starts_with("rank 2 holds the others up") && text.contains("rank 1"),
            "{text}"
        );
        let text = direct.message();
        let want = "rank 2 (rank 1 of team high) is alive but did not signal: it has itself waited";
        assert!(text.starts_with(want) && text.contains("0 calls of 1 of team high"), "{text}");
    }

    /// Each waits for the next one: nobody is silent, and the flight recorders tell.
    #[test]
    fn where_all_wait_the_rank_with_the_fewest_calls_is_named() {
        let errors = World::run_threads(3, WorldCfg::for_tests(), |world| {
            let team = world.everyone("all")?;
            let calls = if world.rank().get() == 2 { 3 } else { 4 };
            (0..calls).try_for_each(|_| team.launch_begin(&launch()).map(drop))?;
            team.agree(true)?;
            let peer = world.rank().offset(1, 3);
            let ctx = WaitCtx { op: "op", phase: "wait", seq: 9, peer, expected: 1 };
            let e = team.wait_until(&ctx, || None::<()>, || 0).unwrap_err();
            team.agree(true)?;
            Ok(e)
        })
        .unwrap();
        for (e, culprit) in errors.iter().zip([2, 2, 0]) {
            assert!(e.is_timeout() && e.get_culprit() == Some(Rank::new(culprit)), "{e}");
            let says = e.message().contains("has made 3 calls of 4 of team all");
            assert_eq!(says, culprit == 2, "{e}");
        }
        assert!(errors[0].message().contains("rank 1 is alive but did not signal"), "{errors:?}");
    }
}
