//! Who is dead, and who says so.

use std::time::{Duration, Instant};

use tilewire_core::{Error, ErrorKind, Rank};
use tilewire_symm::{World, WorldCfg};

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
