use tilewire::prelude::*;

fn first_row_of(rank: Rank, size: usize) -> usize {
    rank.idx() * size
}

fn main() {
    let team = Team::solo();
    // Rank and size the wrong way round.
    first_row_of(team.size(), team.rank());
}
