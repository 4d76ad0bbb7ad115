//! `tilewire plan`: what each rank of an operation would hold, compute and move.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tilewire::ops::attention::{AttentionDesc, AttnMask, Sequences};
use tilewire::ops::cp_attention::{CpAttentionDesc, CpShare, Layout, Pass, Strategy};
use tilewire::prelude::*;

use crate::say;

/// `tilewire plan`
#[derive(Debug, Subcommand)]
pub enum PlanCommand {
    /// Context-parallel attention: rows, work, bytes and copies of each rank.
    #[command(name = "cp_attention")]
    CpAttention(CpAttentionArgs),
}

/// `tilewire plan cp_attention`
#[derive(Debug, Args)]
pub struct CpAttentionArgs {
    /// Rows of each document.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "ROWS",
        required_unless_present = "cu_seqlens"
    )]
    pub docs: Vec<usize>,
    /// A file with the first row of each document and the number of all rows: numbers, between
    /// which are spaces, commas or lines.
    #[arg(long, value_name = "FILE", conflicts_with = "docs")]
    pub cu_seqlens: Option<PathBuf>,
    /// Number of ranks.
    #[arg(long, default_value_t = 8, value_parser = crate::args::positive)]
    pub ranks: usize,
    /// Query heads.
    #[arg(long, default_value_t = 32)]
    pub heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 8)]
    pub kv_heads: usize,
    /// Elements of a head.
    #[arg(long, default_value_t = 128)]
    pub head_dim: usize,
    /// Element type.
    #[arg(long, default_value = "bf16")]
    pub dtype: DType,
    /// `causal`, `full`, or the most keys seen before and behind a query, as in `1024,0`.
    #[arg(long, default_value = "causal")]
    pub mask: Mask,
    /// Rows of a rank: zigzag, zigzag_per_sequence, contiguous or balanced.
    #[arg(long, default_value = "balanced")]
    pub layout: Layout,
    /// The way in which keys reach queries: get, ring, all_gather, all_to_all or hybrid.
    #[arg(long, default_value = "get")]
    pub strategy: Strategy,
    /// Ranks of a group in which `hybrid` scatters heads.
    #[arg(long, default_value_t = 1)]
    pub a2a_size: usize,
    /// Print one JSON object per rank.
    #[arg(long)]
    pub json: bool,
}

/// A mask of attention, in words.
#[derive(Clone, Copy, Debug)]
pub struct Mask(AttnMask);

impl FromStr for Mask {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let bad = || format!("`{s}` is none of `causal`, `full` and two numbers, as in `1024,0`");
        Ok(Self(match (s, s.split_once(',')) {
            ("causal", _) => AttnMask::CAUSAL,
            ("full", _) => AttnMask::FULL,
            (_, Some((left, right))) => {
                let keys = |n: &str| n.trim().parse().map_err(|_| bad());
                AttnMask::window(keys(left)?, keys(right)?)
            }
            _ => return Err(bad()),
        }))
    }
}

/// Runs the command; returns the exit code.
///
/// # Errors
/// `InvalidArgument` for what the operation would refuse, or a file without offsets; `Io`.
pub fn run(command: &PlanCommand) -> Result<i32> {
    let PlanCommand::CpAttention(args) = command;
    let desc = describe(args)?;
    let shares = |pass| CpShare::of_all(&desc, args.strategy, args.ranks, pass);
    let (forward, backward) = (shares(Pass::Forward)?, shares(Pass::Backward)?);
    let mean = forward.iter().map(|s| s.pairs).sum::<u128>() as f64 / args.ranks as f64;
    let all: Vec<Shown<'_>> = (0..args.ranks)
        .map(|r| Shown {
            share: &forward[r],
            of_mean: if mean == 0.0 { 1.0 } else { forward[r].pairs as f64 / mean },
            passes: [moved(&forward, r), moved(&backward, r)],
        })
        .collect();
    match args.json {
        true => all.iter().enumerate().for_each(|(r, s)| say(s.json(r))),
        false => table(&desc, args, &all).iter().for_each(say),
    }
    Ok(0)
}

fn describe(args: &CpAttentionArgs) -> Result<CpAttentionDesc> {
    let cu = match &args.cu_seqlens {
        Some(file) => offsets(file)?,
        None => std::iter::once(0)
            .chain(args.docs.iter().scan(0usize, |end, n| {
                *end = end.saturating_add(*n);
                Some(*end)
            }))
            .collect(),
    };
    let heads = (args.heads, args.kv_heads);
    let mut attn = AttentionDesc::new(1, heads, args.head_dim, args.dtype, args.mask.0);
    attn.sequences = Sequences::packed(&cu, &cu)?;
    let (layout, a2a_size) = (args.layout, args.a2a_size);
    Ok(CpAttentionDesc { layout, a2a_size, ..CpAttentionDesc::new(attn) })
}

/// Reads the offsets of a file.
fn offsets(file: &Path) -> Result<Vec<usize>> {
    let text = crate::files::text(file)?;
    let words = text.split(|c: char| c.is_whitespace() || ",[]".contains(c));
    let number = |w: &str| {
        let e = Error::invalid("a file of offsets has something that is no number");
        w.parse().map_err(|_| e.expected("row offsets, the first one 0").seen(w))
    };
    words.filter(|w| !w.is_empty()).map(number).collect()
}

/// The traffic of one rank in one pass.
struct Moved {
    /// Bytes from and to each rank.
    receives: Vec<u64>,
    sends: Vec<u64>,
    copies: u64,
    signals: u64,
}

fn moved(all: &[CpShare], r: usize) -> Moved {
    // A get belongs to the rank that receives, a put to the one that sends.
    let from = |to: usize, p: usize| all[to].traffic[p].get_bytes + all[p].traffic[to].put_bytes;
    let count = |f: fn(&tilewire::symm::LinkTraffic) -> u64| all[r].traffic.iter().map(f).sum();
    Moved {
        receives: (0..all.len()).map(|p| from(r, p)).collect(),
        sends: (0..all.len()).map(|p| from(p, r)).collect(),
        copies: count(|l| l.puts + l.gets),
        signals: count(|l| l.signals),
    }
}

impl Moved {
    fn json(&self) -> Value {
        json!({
            "receives": self.receives, "sends": self.sends, "copies": self.copies,
            "signals": self.signals,
        })
    }
}

/// One rank.
struct Shown<'a> {
    share: &'a CpShare,
    of_mean: f64,
    passes: [Moved; 2],
}

fn count(rows: &[Range<usize>]) -> usize {
    rows.iter().map(Range::len).sum()
}

impl Shown<'_> {
    fn json(&self, rank: usize) -> Value {
        let s = self.share;
        let spans = |rows: &[Range<usize>]| -> Vec<[usize; 2]> {
            rows.iter().filter(|r| !r.is_empty()).map(|r| [r.start, r.end]).collect()
        };
        json!({
            "rank": rank, "rows": count(&s.rows_q), "rows_q": spans(&s.rows_q),
            "rows_kv": spans(&s.rows_kv), "pairs": u64::try_from(s.pairs).unwrap_or(u64::MAX),
            "work_of_mean": self.of_mean, "forward": self.passes[0].json(),
            "backward": self.passes[1].json(),
        })
    }

    fn line(&self, rank: usize) -> String {
        let runs = self.share.rows_q.iter().filter(|r| !r.is_empty()).count();
        let mut line = format!(
            "{rank:>4} {:>10} {runs:>5} {:>18} {:>8.3}",
            count(&self.share.rows_q),
            self.share.pairs,
            self.of_mean
        );
        for m in &self.passes {
            let sum = |b: &[u64]| b.iter().sum::<u64>();
            let (receives, sends) = (sum(&m.receives), sum(&m.sends));
            line += &format!("{receives:>15}{sends:>15}{:>7}{:>8}", m.copies, m.signals);
        }
        line
    }
}

/// Returns the lines of the table: one for each rank, then the bytes of each link.
fn table(desc: &CpAttentionDesc, args: &CpAttentionArgs, all: &[Shown<'_>]) -> Vec<String> {
    let s = &desc.attn.sequences;
    let most = all.iter().map(|s| s.of_mean).fold(0.0, f64::max);
    let layout = Layout::NAMES.iter().find(|(_, l)| *l == args.layout).map_or("?", |(n, _)| n);
    let mut out = vec![
        format!(
            "cp_attention, {} ranks, {} rows in {} documents, {layout}, {}: most work {most:.3} of the mean",
            args.ranks,
            s.tokens_q,
            s.q.len(),
            args.strategy
        ),
        format!("{:>49}{:>45}{:>45}", "", "forward", "backward"),
        format!("{:>4} {:>10} {:>5} {:>18} {:>8}", "rank", "rows", "runs", "pairs", "of mean"),
    ];
    let head = format!("{:>15}{:>15}{:>7}{:>8}", "receives B", "sends B", "copies", "signals");
    out[2] += &head.repeat(2);
    out.extend(all.iter().enumerate().map(|(r, s)| s.line(r)));
    for (pass, name) in ["forward", "backward"].into_iter().enumerate() {
        out.push(format!("{name}: bytes that each rank receives from rank 0, 1, ..."));
        out.extend(all.iter().enumerate().map(|(r, s)| {
            let from = &s.passes[pass].receives;
            format!("{r:>4}") + &from.iter().map(|b| format!(" {b:>12}")).collect::<String>()
        }));
    }
    out
}
