//! Who is dead, and who says so.

use std::time::{Duration, Instant};

use tilewire_core::{Error, ErrorKind, Rank};
use tilewire_symm::{Fingerprint, World, WorldCfg};

/// The death may come while the survivor is still forming the team: it is a death all the same.
#[test]
fn a_death_just_after_the_team_has_formed_is_a_death() {
    for _ in 0..50 {
        let out = World::run_threads(2, WorldCfg::for_tests(), |world| {
            let team = world.everyone("brief")?;
            if world.rank() == Rank::new(1) {
                panic!("gone");
            }
            let start = Instant::now();
            let e = loop {
                match team.check() {
                    Ok(()) => assert!(start.elapsed() < Duration::from_secs(2), "not noticed"),
                    Err(e) => break e,
                }
            };
            assert_eq!((e.kind(), e.get_peer()), (ErrorKind::PeerDead, Some(Rank::new(1))), "{e}");
            assert!(e.message().contains("died"), "{e}");
            Ok(())
        });
        assert_eq!(out.unwrap_err().message(), "a rank panicked: gone");
    }
}

/// A rank hears of a death from a peer before its own connections show it: the dead rank is not
/// among those alive from then on, whether its team is still there or not.
#[test]
fn a_death_that_a_peer_has_told_counts_at_once() {
    let told = World::run_threads(3, WorldCfg::for_tests(), |world| {
        // In other numbers than the world's.
        let reversed: Vec<Rank> = (0..3).rev().map(Rank::new).collect();
        let team = world.team(&reversed, "all")?.unwrap();
        let (me, victim) = (world.rank().get(), Rank::new(2));
        if me == 2 {
            // Nothing has happened to it; so nobody can have noticed anything by himself.
            while team.check().is_ok() {
                std::thread::yield_now();
            }
            return Ok(world.alive().len());
        }
        if me == 0 {
            let about = team.team_rank(victim).unwrap();
            let _first = team.fail(Error::new(ErrorKind::PeerDead, "it is told").peer(about));
        } else {
            while team.check().is_ok() {
                std::thread::yield_now();
            }
        }
        assert_eq!(world.alive().len(), 2, "{:?}", team.check());
        drop(team);
        let rest = world.team(&world.alive(), "rest")?.unwrap();
        assert!(rest.agree(true)?);
        Ok(rest.size())
    });
    assert_eq!(told.unwrap()[..2], [2, 2]);
}

/// A fault that names nobody tells of no death: the rank that met it is alive for the others.
#[test]
fn a_death_without_a_name_is_nobodys() {
    let alive = World::run_threads(3, WorldCfg::for_tests(), |world| {
        let team = world.everyone("all")?;
        if world.rank().get() == 1 {
            let _first = team.fail(Error::new(ErrorKind::PeerDead, "a connection has ended"));
        }
        let e = loop {
            match team.check() {
                Ok(()) => std::thread::yield_now(),
                Err(e) => break e,
            }
        };
        let told = world.rank().get() == 1;
        assert_eq!(e.kind(), if told { ErrorKind::PeerDead } else { ErrorKind::Aborted }, "{e}");
        let rest = world.team(&world.alive(), "again")?.unwrap();
        assert!(rest.agree(true)?);
        Ok(rest.size())
    });
    assert_eq!(alive.unwrap(), [3, 3, 3]);
}

/// A wait for a rank that ended because of an error of its own has the reason, on all ranks.
#[test]
fn a_rank_that_leaves_because_of_an_error_says_which() {
    let text = |world: World| {
        let team = world.everyone("all")?;
        let agreed = team.agree(true);
        if world.rank().get() == 1 {
            agreed?;
            let why = Error::new(ErrorKind::Exhausted, "no memory is left");
            world.leave_because(&why);
            return Ok(String::new());
        }
        // A slow rank is still at the first meeting when another reports the end.
        let next = agreed.and_then(|_| team.prepare_agree(&Fingerprint::new("op", "m=1")));
        let e = next.unwrap_err();
        assert_eq!((e.kind(), e.get_culprit()), (ErrorKind::PeerDead, Some(Rank::new(1))), "{e}");
        Ok(e.message().to_owned())
    };
    let texts = World::run_threads(3, WorldCfg::for_tests(), text).unwrap();
    for text in [&texts[0], &texts[2]] {
        let want = "rank 1 has left the job (exhausted: no memory is left)";
        assert!(text.starts_with(want), "{text}");
    }
}

/// Of the errors of all ranks that is returned which no other rank has caused.
#[test]
fn the_error_of_ranks_as_threads_is_that_of_the_rank_that_met_its_own() {
    let e = World::run_threads(3, WorldCfg::for_tests(), |world| {
        let team = world.everyone("all")?;
        team.agree(true)?;
        if world.rank().get() == 2 {
            return Err(Error::new(ErrorKind::Exhausted, "no memory is left"));
        }
        team.prepare_agree(&Fingerprint::new("op", "m=1"))
    })
    .unwrap_err();
    assert_eq!((e.kind(), e.message()), (ErrorKind::Exhausted, "no memory is left"), "{e}");
}
