//! Host schedules need nothing of the wire but `Transport`: they run where no peer's memory has an
//! address, by messages over sockets, and give the same bits and the same traffic. Pages of peers
//! cannot be touched there: an access of another kind would end the process.

mod table;

use table::*;
use tilewire_core::*;
use tilewire_device::Stream;
use tilewire_symm::*;

/// The outputs of two eager launches and of two replays, as bits, and what this rank has moved.
fn run(world: &World, make: Make, by_sockets: bool) -> Result<(Vec<Vec<u32>>, Traffic)> {
    let team = world.everyone(if by_sockets { "sockets" } else { "mapped" })?;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
    if by_sockets {
        heap.connect_by_sockets()?;
    }
    let stream = Stream::new("s")?;
    let op = make(&heap, &stream, true)?;
    let mut outs = Vec::new();
    let mut round = |round: u64, go: &dyn Fn() -> Result<()>| -> Result<()> {
        fill(&op, round * 100 + u64::from(team.rank().get()))?;
        go()?;
        finish(&stream, &team)?;
        outs.push(op.out.to_vec::<f32>()?.iter().map(|v| v.to_bits()).collect());
        team.agree(true).map(|_| ())
    };
    (0..2).try_for_each(|n| round(n, &|| (op.launch)(&stream)))?;
    stream.begin_capture()?;
    (op.launch)(&stream)?;
    let graph = stream.end_capture()?.instantiate()?;
    (2..4).try_for_each(|n| round(n, &|| stream.replay(&graph)))?;
    team.check_counters()?;
    Ok((outs, team.traffic()))
}

#[test]
fn every_schedule_runs_where_peers_have_no_addresses() {
    for (name, make) in all_ops() {
        for usual in [2, 3] {
            let ranks = ranks_for(name, usual);
            let both = World::run_threads(ranks, WorldCfg::for_tests(), |w| {
                Ok((run(&w, make, false)?, run(&w, make, true)?))
            });
            for (rank, (mapped, sockets)) in both.unwrap().into_iter().enumerate() {
                assert!(!mapped.0[0].is_empty() && mapped.0[0] != mapped.0[1], "{name}: no values");
                assert_eq!(mapped.0, sockets.0, "{name}: bits of rank {rank} of {ranks}");
                assert_eq!(mapped.1, sockets.1, "{name}: traffic of rank {rank} of {ranks}");
            }
        }
    }
}
