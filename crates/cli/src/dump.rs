//! `tilewire dump`: what every rank was doing, and where they first differ.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tilewire::boot::MAX_RANKS;
use tilewire::prelude::*;
use tilewire::symm::Entry;

use crate::args::DumpArgs;
use crate::say;

/// Writes the flight recorders of this rank, one file per team: all that can be written.
///
/// # Errors
/// `Io` if one cannot, the first of them.
pub fn write(folder: &Path, teams: &[&LiveTeam]) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder.display(), e))?;
    let one = |t: &LiveTeam| {
        let path = folder.join(format!("{}-{}-r{}.json", t.name(), t.generation(), t.rank().get()));
        std::fs::write(&path, t.dump().to_string()).map_err(|e| Error::io(path.display(), e))
    };
    let mut first = Ok(());
    for t in teams {
        first = first.and(one(t));
    }
    first
}

/// Removes the recorders that [`write()`] has left in `folder`: those of another run would be taken
/// for ranks of this one.
///
/// # Errors
/// `Io` if one stays.
pub fn clear(folder: &Path) -> Result<()> {
    let Ok(dir) = std::fs::read_dir(folder) else { return Ok(()) };
    for path in dir.filter_map(|e| Some(e.ok()?.path())).filter(|p| is_recorder(p)) {
        std::fs::remove_file(&path).map_err(|e| Error::io(path.display(), e))?;
    }
    Ok(())
}

/// True for `TEAM-GENERATION-rRANK.json`.
fn is_recorder(path: &Path) -> bool {
    let is_number = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    let parts = || {
        let name = path.file_name()?.to_str()?.strip_suffix(".json")?;
        let (team, rank) = name.rsplit_once("-r")?;
        Some(is_number(rank) && is_number(team.rsplit_once('-')?.1))
    };
    parts().unwrap_or(false)
}

/// Recorders of one team: rank to entries by sequence number.
type Ranks = BTreeMap<u64, BTreeMap<u64, Entry>>;

fn read(folder: &Path) -> Result<BTreeMap<String, (usize, Ranks)>> {
    let mut teams: BTreeMap<String, (usize, Ranks)> = BTreeMap::new();
    let dir = std::fs::read_dir(folder).map_err(|e| Error::io(folder.display(), e))?;
    for path in dir
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "json"))
    {
        let bad =
            |what: String| Error::new(ErrorKind::Corrupt, format!("{}: {what}", path.display()));
        let bytes = crate::files::read(&path)?;
        let r = recorder(&bytes).map_err(bad)?;
        let size = r.size;
        let (of, ranks) = teams.entry(r.team).or_insert_with(|| (size, Ranks::new()));
        if *of != size {
            let text = format!(
                "this recorder is of a team with {size} ranks, others of the same team have {of}"
            );
            return Err(bad(text).hint("remove the recorders of the earlier run"));
        }
        ranks.insert(r.rank, r.entries);
    }
    Ok(teams)
}

/// The content of the file of one rank.
struct Recorder {
    /// Name and generation.
    team: String,
    rank: u64,
    size: usize,
    entries: BTreeMap<u64, Entry>,
}

/// Reads the file of one rank; the error says what is wrong with it.
fn recorder(bytes: &[u8]) -> Result<Recorder, String> {
    let mut v: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let (Some(team), Some(rank), Some(size)) =
        (v["team"].as_str(), v["rank"].as_u64(), v["size"].as_u64())
    else {
        return Err("the file names no team, rank or size".to_owned());
    };
    // The ranks that are missing are listed.
    if rank >= size || size > MAX_RANKS as u64 {
        return Err(format!("the file is of rank {rank} of {size}, at most {MAX_RANKS} there are"));
    }
    let team = format!("{team} generation {}", v["generation"]);
    let entries = v.get_mut("entries").map(Value::take).unwrap_or_default();
    let entries: Vec<Entry> = serde_json::from_value(entries).map_err(|e| e.to_string())?;
    let entries = entries.into_iter().map(|e| (e.seq, e)).collect();
    Ok(Recorder { team, rank, size: size as usize, entries })
}

/// First sequence number at which the ranks' entries differ, or where some have stopped.
fn divergence(ranks: &Ranks) -> Option<u64> {
    // Only what every recorder still reaches back to can be compared.
    let first = ranks.values().filter_map(|e| e.keys().next()).max()?;
    let last = ranks.values().filter_map(|e| e.keys().next_back()).max()?;
    (*first..=*last).find(|seq| {
        let mut at = ranks.values().map(|e| e.get(seq).map(|e| (e.fingerprint, e.kind)));
        let one = at.next().flatten();
        one.is_none() || at.any(|other| other != one)
    })
}

/// Runs the command; returns the exit code: 1 if ranks diverge.
///
/// # Errors
/// `Io` or `Corrupt` for files that cannot be read.
pub fn run(args: &DumpArgs) -> Result<i32> {
    let teams = read(&args.folder)?;
    if teams.is_empty() {
        return Err(Error::invalid(format!(
            "{} contains no flight recorders",
            args.folder.display()
        ))
        .hint("`train --dump FOLDER` writes them after an error"));
    }
    let mut code = 0;
    for (name, (size, ranks)) in &teams {
        let missing: Vec<u64> = (0..*size as u64).filter(|r| !ranks.contains_key(r)).collect();
        let at = divergence(ranks);
        code |= i32::from(at.is_some());
        if args.json {
            say(
                json!({"team": name, "size": size, "missing_ranks": missing, "first_divergence": at}),
            );
            continue;
        }
        say(format_args!("team {name}: recorders of {} of {size} ranks", ranks.len()));
        if !missing.is_empty() {
            say(format_args!("  no recorder of ranks {missing:?}: they may have died"));
        }
        let Some(at) = at else {
            say("  all ranks made the same calls");
            continue;
        };
        say(format_args!("  ranks first differ at call {at}:"));
        for (rank, entries) in ranks {
            for seq in at.saturating_sub(args.context as u64).max(1)..=at {
                let what = entries.get(&seq).map_or("(nothing)".to_owned(), |e| {
                    format!("{:?} {:?} {}", e.kind, e.state, e.text)
                });
                say(format_args!("    rank {rank} call {seq}: {what}"));
            }
        }
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_that_cannot_be_written_does_not_keep_the_others() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a-1-r0.json")).unwrap();
        World::run_threads(1, WorldCfg::for_tests(), |w| {
            let (a, b) = (w.everyone("a")?, w.everyone("b")?);
            let e = write(dir.path(), &[&a, &b]).unwrap_err();
            assert!(e.to_string().contains("a-1-r0.json"), "{e}");
            Ok(())
        })
        .unwrap();
        assert!(dir.path().join("b-1-r0.json").is_file());
    }

    #[test]
    fn fuzz_dump() {
        let seeds = World::run_threads(1, WorldCfg::for_tests(), |w| {
            let team = w.everyone("t")?;
            team.launch_begin(&tilewire::symm::Fingerprint::new("gemm", "m=1"))?;
            team.launch_begin(&tilewire::symm::Fingerprint::new("gemm_rs", "m=2"))?;
            Ok(team.dump().to_string().into_bytes())
        });
        tilewire_testing::fuzz!("dump", seeds.unwrap(), |b| {
            let Ok(r) = recorder(b) else { return false };
            assert!(r.rank < r.size as u64);
            let entries: Vec<&Entry> = r.entries.values().collect();
            let text = serde_json::json!({
                "team": "t", "rank": r.rank, "size": r.size, "entries": entries,
            });
            let again = recorder(text.to_string().as_bytes()).unwrap();
            assert_eq!(again.entries, r.entries);
            // One rank agrees with itself up to the first call that is not there.
            let hole = r.entries.keys().zip(r.entries.keys().skip(1)).find(|(a, b)| *a + 1 < **b);
            let ranks = Ranks::from([(r.rank, r.entries.clone())]);
            assert_eq!(divergence(&ranks), hole.map(|(a, _)| a + 1));
            true
        });
    }

    /// The list of missing ranks would have no end.
    #[test]
    fn a_recorder_of_more_ranks_than_there_can_be_is_refused() {
        let of = |rank: u64, size: u64| {
            let text = json!({ "team": "t", "rank": rank, "size": size, "entries": [] });
            recorder(text.to_string().as_bytes()).map(|r| r.size)
        };
        assert_eq!(of(1, 2), Ok(2));
        assert!(of(2, 2).is_err() && of(0, u64::MAX).is_err());
    }

    /// Of an earlier run with more ranks, and a file of the user's.
    #[test]
    fn recorders_of_another_run_are_not_taken_for_ranks_of_this_one() {
        let dir = tempfile::tempdir().unwrap();
        let of = |size: usize, but: usize| {
            World::run_threads(size, WorldCfg::for_tests(), |w| {
                let team = w.everyone("t")?;
                if w.rank().idx() != but {
                    write(dir.path(), &[&team])?;
                }
                team.agree(true).map(|_| ())
            })
            .unwrap();
        };
        std::fs::write(dir.path().join("notes-r1.txt"), "mine").unwrap();
        of(3, 3);
        of(2, 1);
        let e = read(dir.path()).unwrap_err();
        assert!(e.to_string().contains("earlier run"), "{e}");
        clear(dir.path()).unwrap();
        of(2, 1);
        let teams = read(dir.path()).unwrap();
        assert_eq!(teams["t generation 1"].1.keys().collect::<Vec<_>>(), [&0]);
        assert!(dir.path().join("notes-r1.txt").is_file());
        assert!(
            !is_recorder(Path::new("d/config-r.json")) && !is_recorder(Path::new("d/a-r1.json"))
        );
    }

    #[test]
    fn the_first_differing_call_is_found() {
        let dir = tempfile::tempdir().unwrap();
        World::run_threads(2, WorldCfg::for_tests(), |w| {
            let team = w.everyone("t")?;
            let fp = |op: &str| tilewire::symm::Fingerprint::new(op, "m=1");
            team.launch_begin(&fp("gemm"))?;
            team.launch_begin(&fp(if team.rank().get() == 0 { "all_gather" } else { "gemm_rs" }))?;
            write(dir.path(), &[&team])?;
            team.agree(true).map(|_| ())
        })
        .unwrap();
        let teams = read(dir.path()).unwrap();
        assert_eq!(teams.len(), 1);
        assert_eq!(divergence(&teams["t generation 1"].1), Some(2));
        let args = DumpArgs { folder: dir.path().to_owned(), json: false, context: 1 };
        assert_eq!(run(&args).unwrap(), 1);
    }
}
