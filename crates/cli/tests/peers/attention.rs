//! Rows of attention: lengths, heads, mask and extras of a peer's case, run forward and backward,
//! on one rank or on the peer's number of ranks with each strategy that the row allows.

use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use tilewire::core::Rng;
use tilewire::ops::attention::*;
use tilewire::ops::cp_attention::*;
use tilewire::prelude::*;

use super::PeerRow;
use super::attention_ref::{Part, Problem};

/// Sizes of a row: `batch` is 1, `heads_kv` `heads` and `dv` `d` if left out; `seq` is both
/// lengths.
const SIZES: [&str; 8] = ["batch", "seq", "sq", "skv", "heads", "heads_kv", "d", "dv"];

/// What a row says beside its sizes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attn {
    mask: Mask,
    /// The peer's way to bring keys to queries; every way of ours where it has none of them.
    #[serde(default)]
    strategy: Option<Strategy>,
    /// Of `cp_attention`; zigzag if left out.
    #[serde(default)]
    layout: Option<Layout>,
    /// Bound of the scores; q is multiplied by a quarter of it, as the peer does.
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default)]
    bias: Option<Bias>,
    #[serde(default)]
    sink: Option<Sink>,
    /// Lengths that the peer spells out, of queries and keys alike.
    #[serde(default)]
    cu_seqlens: Option<Vec<usize>>,
    /// Lengths that the peer draws.
    #[serde(default)]
    lengths: Option<Lengths>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mask {
    Full,
    Causal,
    /// Keys seen before and behind the own position.
    Window(usize, usize),
    /// Both drawn below the number of keys.
    RandomWindow,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Bias {
    EachHead,
    AllHeads,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sink {
    /// The off-by-one softmax.
    Zero,
    Learned,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Lengths {
    /// At most 20 below the longest; every fifth sequence and the last have no key.
    Near,
    /// Anything from 0 on, alike for queries and keys; room is a multiple of twice the ranks.
    Any,
}

impl Attn {
    /// The description of a row and what it is to be run with: no strategy means one rank alone.
    ///
    /// # Panics
    /// If the operation refuses it: the row is wrong, whether it can be run here or not.
    pub fn case(&self, row: &PeerRow) -> Case {
        for name in row.shape.keys() {
            assert!(SIZES.contains(&&**name), "no size `{name}`: {:?}", row.shape);
        }
        let mut rng = Rng::new(7);
        let d = |name: &str| row.shape.get(name).copied();
        let size = |name: &str| d(name).unwrap_or_else(|| panic!("no `{name}`: {:?}", row.shape));
        let (sq, skv) = d("seq").map_or_else(|| (size("sq"), size("skv")), |s| (s, s));
        let heads = (size("heads"), d("heads_kv").unwrap_or_else(|| size("heads")));
        let dtype = row.dtype.parse().unwrap();
        let mask = self.mask.draw(skv, &mut rng);
        let mut a = AttentionDesc::new(sq, heads, size("d"), dtype, mask);
        a.dv = d("dv").unwrap_or(a.dqk);
        a.sequences = self.sequences((d("batch").unwrap_or(1), sq, skv), row.ranks, &mut rng);
        a.softcap = self.softcap;
        a.sink = self.sink.is_some();
        a.bias = self.bias.as_ref().map(|b| BiasShape {
            heads: if matches!(b, Bias::EachHead) { heads.0 } else { 1 },
            sq: a.sequences.longest().0,
            skv: a.sequences.longest().1,
        });
        let layout = self.layout.unwrap_or(Layout::Zigzag);
        // The peers' inner groups are pairs.
        let a2a_size = if row.ranks.is_multiple_of(2) { 2 } else { 1 };
        let desc = CpAttentionDesc { layout, a2a_size, ..CpAttentionDesc::new(a) };
        let strategies: Vec<Strategy> = match (&*row.op, self.strategy) {
            ("attention", None) if row.ranks == 1 => Vec::new(),
            ("cp_attention", Some(s)) => vec![s],
            ("cp_attention", None) => Strategy::NAMES.map(|(_, s)| s).to_vec(),
            (op, s) => panic!("{op} with strategy {s:?} on {} ranks", row.ranks),
        };
        desc.check(row.ranks).unwrap_or_else(|e| panic!("{}: {e}", desc.attn));
        for s in &strategies {
            s.check(&desc, row.ranks).unwrap_or_else(|e| panic!("{}: {e}", desc.attn));
        }
        let q_factor = self.softcap.map_or(1.0, |c| c / 4.0);
        let zero_sink = matches!(self.sink, Some(Sink::Zero));
        Case { ranks: row.ranks, desc, strategies, q_factor, zero_sink, rng }
    }

    fn sequences(
        &self,
        (batch, sq, skv): (usize, usize, usize),
        ranks: usize,
        rng: &mut Rng,
    ) -> Sequences {
        if let Some(cu) = &self.cu_seqlens {
            assert!(batch == 1 && cu.last() == Some(&sq), "{cu:?} for {batch} x {sq}");
            return Sequences::packed(cu, cu).unwrap();
        }
        let mut draw =
            |least: usize, most: usize| least + rng.below((most - least + 1) as u64) as usize;
        let room = 2 * ranks;
        let (mut q, mut kv, mut padded) = (vec![0], vec![0], vec![0]);
        for b in 0..batch {
            let (lq, lkv) = match self.lengths {
                None => return Sequences::batched(batch, sq, skv),
                Some(Lengths::Any) => {
                    let both = draw(0, sq);
                    (both, both)
                }
                Some(Lengths::Near) => {
                    let none = b % 5 == 0 || b + 1 == batch;
                    let lq = draw(sq.saturating_sub(20).max(1), sq);
                    (lq, if none { 0 } else { draw(skv.saturating_sub(20), skv) })
                }
            };
            q.push(q[b] + lq);
            kv.push(kv[b] + lkv);
            padded.push(padded[b] + lq.next_multiple_of(room));
        }
        match self.lengths {
            Some(Lengths::Any) => Sequences::padded((&q, &padded), (&kv, &padded)),
            _ => Sequences::packed(&q, &kv),
        }
        .unwrap()
    }
}

impl Mask {
    fn draw(&self, skv: usize, rng: &mut Rng) -> AttnMask {
        match *self {
            Mask::Full => AttnMask::FULL,
            Mask::Causal => AttnMask::CAUSAL,
            Mask::Window(left, right) => AttnMask::window(left, right),
            Mask::RandomWindow => {
                let mut below = || rng.below(skv as u64) as usize;
                AttnMask::window(below(), below())
            }
        }
    }
}

/// A row that is ready to run.
pub struct Case {
    ranks: usize,
    pub desc: CpAttentionDesc,
    strategies: Vec<Strategy>,
    q_factor: f64,
    zero_sink: bool,
    rng: Rng,
}

impl Case {
    /// Multiplications and additions of the forward pass: pairs that see each other, in all heads.
    pub fn work(&self) -> usize {
        let (a, m) = (&self.desc.attn, &self.desc.attn.mask);
        let pairs = |sq: usize, skv: usize| -> usize {
            let keys = |i: usize| {
                let own = (i + skv) as i64 - sq as i64;
                let first = m.left.map_or(0, |l| (own - l as i64).max(0));
                let end = m.right.map_or(skv as i64, |r| (own + r as i64 + 1).min(skv as i64));
                (end - first).max(0) as usize
            };
            (0..sq).map(keys).sum()
        };
        let all: usize =
            a.sequences.q.iter().zip(&a.sequences.kv).map(|(q, kv)| pairs(q.len(), kv.len())).sum();
        2 * all * a.heads_q * (a.dqk + a.dv)
    }

    /// Runs it; how many cases that were.
    ///
    /// # Errors
    /// What does not hold, in words.
    pub fn replay(mut self) -> std::result::Result<usize, String> {
        let attn = self.desc.attn.clone();
        let p = Problem::new(&mut self.rng, attn, self.q_factor, self.zero_sink);
        let want = p.want();
        let alone = p.assemble(&[self.alone(&p).map_err(|e| e.to_string())?]);
        let alone = want.check(&alone, 0).map_err(|e| format!("one rank: {e}"))?;
        for s in &self.strategies {
            let parts = self.spread(&p, *s).map_err(|e| format!("{s}: {e}"))?;
            let got = p.assemble(&parts);
            let rms = want.check(&got, self.ranks).map_err(|e| format!("{s}: {e}"))?;
            for (what, most) in [("out", 1.1), ("dq", 1.1), ("dk", 1.2), ("dv", 1.2)] {
                if rms[what] > most * alone[what] {
                    let (n, one) = (rms[what], alone[what]);
                    return Err(format!("{s}: {what}: error {n:e} on ranks, {one:e} on one"));
                }
            }
        }
        Ok(self.strategies.len().max(1))
    }

    fn alone(&self, p: &Problem) -> Result<Part> {
        let (stream, s) = (Stream::new("alone")?, &p.desc.sequences);
        let plan = AttentionPlan::new(p.desc.clone(), None)?;
        plan.prepare(&stream)?;
        let rows = |n: usize| -> Vec<Range<usize>> { vec![Range { start: 0, end: n }] };
        p.pass(
            (rows(s.tokens_q), rows(s.tokens_kv)),
            |x, out| plan.launch_fwd(&stream, x, out)?.wait(),
            |x, saved, grads| plan.launch_bwd(&stream, x, saved, grads)?.wait(),
        )
    }

    fn spread(&self, p: &Problem, strategy: Strategy) -> Result<Vec<Part>> {
        let config = Some(CpConfig::of(strategy));
        let bytes = CpAttentionPlan::memory(&self.desc, self.ranks, config) + (1 << 16);
        let cfg = WorldCfg { timeout: Duration::from_secs(60), ..WorldCfg::default() };
        World::run_threads(self.ranks, cfg, |world| {
            let heap = world.everyone("cp")?.heap(BackendKind::Host, HeapCfg::new(bytes))?;
            let stream = Stream::new("cp")?;
            let plan = CpAttentionPlan::new(self.desc.clone(), &heap, config)?;
            plan.prepare(&stream)?;
            p.pass(
                (plan.rows_q(None), plan.rows_kv(None)),
                |x, out| plan.launch_fwd(&stream, x, out)?.wait(),
                |x, saved, grads| plan.launch_bwd(&stream, x, saved, grads)?.wait(),
            )
        })
    }
}
