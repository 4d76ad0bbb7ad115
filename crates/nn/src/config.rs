//! Sizes of the model, and how ranks divide it.

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, Rank, Result};

/// Sizes of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelCfg {
    /// Number of layers.
    pub layers: usize,
    /// Elements of a token.
    pub d_model: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Inner features of an expert.
    pub d_ff: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of the global batch.
    pub batch: usize,
    /// Attention is replaced by zero (to show that the model needs it).
    #[serde(default)]
    pub no_attention: bool,
    /// The output of the experts is replaced by zero (to show that the model needs it).
    #[serde(default)]
    pub no_experts: bool,
}

/// Bytes are the vocabulary.
pub const VOCAB: usize = 256;

impl Default for ModelCfg {
    fn default() -> Self {
        Self {
            layers: 2,
            d_model: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            experts: 8,
            top_k: 2,
            d_ff: 128,
            seq: 256,
            batch: 24,
            no_attention: false,
            no_experts: false,
        }
    }
}

impl ModelCfg {
    /// A model for a host of H200: 1.2 billion parameters of experts a layer.
    pub fn h200() -> Self {
        Self {
            layers: 4,
            d_model: 4096,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            experts: 64,
            top_k: 2,
            d_ff: 1536,
            seq: 4096,
            batch: 8,
            ..Self::default()
        }
    }

    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// `InvalidArgument` naming what does not fit.
    pub fn check(&self) -> Result<()> {
        let bad = |text: &str| Err(Error::invalid(format!("model: {text}")));
        let sizes = [
            self.layers,
            self.d_model,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.experts,
            self.top_k,
            self.d_ff,
            self.seq,
            self.batch,
        ];
        if sizes.contains(&0) {
            return bad("every size must be positive");
        }
        // No size of a model for a host comes near this; beyond it products would overflow.
        if sizes.iter().any(|&s| s > 1 << 20) {
            return bad("no size may exceed 1048576");
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return bad("heads must be a multiple of kv_heads");
        }
        if !self.head_dim.is_multiple_of(2) {
            return bad("head_dim must be even");
        }
        if self.top_k > self.experts {
            return bad("top_k is larger than the number of experts");
        }
        Ok(())
    }

    /// Tokens of the global batch.
    pub fn tokens(&self) -> usize {
        self.seq * self.batch
    }
}

/// The division of the work among `dp * cp * tp` ranks; experts are divided over all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grid {
    /// Parts of the batch.
    pub dp: usize,
    /// Parts of each part's tokens.
    pub cp: usize,
    /// Parts of heads and of projections.
    pub tp: usize,
}

/// Place of a rank in the grid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coord {
    /// Part of the batch.
    pub dp: usize,
    /// Part of the tokens.
    pub cp: usize,
    /// Part of the heads.
    pub tp: usize,
}

impl Grid {
    /// Completes a grid for `ranks` ranks: what is not given for `dp` is the rest.
    ///
    /// # Errors
    /// `InvalidArgument` if the product is not the number of ranks.
    pub fn fit(ranks: usize, dp: Option<usize>, cp: usize, tp: usize) -> Result<Self> {
        let inner = cp * tp;
        let dp = dp.unwrap_or(ranks.checked_div(inner).unwrap_or(0));
        if dp * inner != ranks || ranks == 0 {
            return Err(Error::invalid("dp * cp * tp must be the number of ranks")
                .expected(ranks)
                .seen(format_args!("{dp} * {cp} * {tp}")));
        }
        Ok(Self { dp, cp, tp })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.dp * self.cp * self.tp
    }

    /// Checks that the model can be divided this way.
    ///
    /// # Errors
    /// `InvalidArgument` with what would fit.
    pub fn check(&self, m: &ModelCfg) -> Result<()> {
        m.check()?;
        if !m.batch.is_multiple_of(self.dp) {
            return Err(Error::invalid(format!(
                "--dp {} does not divide the batch of {}",
                self.dp, m.batch
            )));
        }
        if !m.kv_heads.is_multiple_of(self.tp) {
            return Err(Error::invalid(format!(
                "--tp {} does not divide the {} key/value heads",
                self.tp, m.kv_heads
            ))
            .hint("raise --kv-heads, or use --cp or --dp instead"));
        }
        Ok(())
    }

    /// Place of a world rank: tp varies fastest, then cp.
    pub fn coord(&self, r: Rank) -> Coord {
        let i = r.idx();
        Coord { tp: i % self.tp, cp: i / self.tp % self.cp, dp: i / (self.tp * self.cp) }
    }

    /// World ranks for which `keep` holds, in order.
    pub fn ranks(&self, keep: impl Fn(Coord) -> bool) -> Vec<Rank> {
        Rank::all(self.size()).filter(|&r| keep(self.coord(r))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_fit_and_coordinates_are_unique() {
        let g = Grid::fit(8, None, 2, 2).unwrap();
        assert_eq!(g, Grid { dp: 2, cp: 2, tp: 2 });
        assert!(Grid::fit(6, Some(2), 2, 2).is_err() && Grid::fit(3, None, 2, 1).is_err());
        let tp = g.ranks(|c| c.dp == 1 && c.cp == 0);
        assert_eq!(tp.iter().map(|r| r.get()).collect::<Vec<_>>(), [4, 5]);
        assert_eq!(g.coord(Rank::new(6)), Coord { dp: 1, cp: 1, tp: 0 });
        let e = Grid { dp: 1, cp: 1, tp: 4 }.check(&ModelCfg::default()).unwrap_err();
        assert!(e.to_string().contains("key/value heads"), "{e}");
    }
}
