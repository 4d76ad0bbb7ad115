//! Rates of single operations on one GPU: `layers`, `gemm`, `drawn`, `cold`, `parts`, `grouped`,
//! `attention`, `decode` or `shares`.
//!
//! Ways to one result take turns, the card at rest before each, and once more in the other order:
//! the median of 20 launches in all, which follow each other. With `sustained` behind `gemm`,
//! `attention` or `shares` each way runs for a second and a half without a rest, of which the
//! second half counts; what `nvidia-smi` says of clock and power in that half is beside it.
//!
//! `cargo run --release -p tilewire-ops --example rates WHAT [SHAPE ...] [sustained]`

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod attention;
mod decode;
mod drawn;
mod gemm;
mod grouped;
mod layers;
mod shares;

use std::process::Command;
use std::thread;
use std::time::Duration;

use tilewire_core::{DType, Error, Result, Rng, Shape};
use tilewire_device::cuda::{CudaContext, CudaEvent};
use tilewire_device::{Device, Queue, Stream, Tensor};

/// The rest of the card before each turn, launches of a turn that are not timed, and that are.
const REST: Duration = Duration::from_millis(100);
const WARM: usize = 3;
const RUNS: usize = 10;

/// What is timed.
type Launch<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// One of the ways to a result that are timed beside each other.
struct Turn<'a> {
    by: String,
    explain: String,
    launch: Launch<'a>,
    us: Vec<f64>,
    /// MHz and watts while it ran, where it ran for long and the card's tool is there.
    card: Vec<[f64; 2]>,
}

impl<'a> Turn<'a> {
    fn new(by: impl ToString, explain: impl Into<String>, launch: Launch<'a>) -> Self {
        Self {
            by: by.to_string(),
            explain: explain.into(),
            launch,
            us: Vec::new(),
            card: Vec::new(),
        }
    }

    /// What stands behind the rate in a row of JSON: nothing but for runs that are sustained.
    fn beside(&self) -> String {
        if !sustained() {
            return String::new();
        }
        let mean = |i: usize| {
            let sum: f64 = self.card.iter().map(|c| c[i]).sum();
            match self.card.len() {
                0 => "null".to_owned(),
                n => format!("{:.0}", sum / n as f64),
            }
        };
        format!(",\"sustained\":true,\"clock_mhz\":{},\"watts\":{}", mean(0), mean(1))
    }

    /// Median of all runs, in microseconds.
    fn median(&self) -> f64 {
        let mut us = self.us.clone();
        us.sort_by(f64::total_cmp);
        us[us.len() / 2]
    }
}

/// Returns whether each way is to run for long, as the command line says: of rows that show it.
fn sustained() -> bool {
    let shows = |what: &String| ["gemm", "attention", "shares"].contains(&what.as_str());
    std::env::args().nth(1).is_some_and(|what| shows(&what))
        && std::env::args().skip(2).any(|a| a == "sustained")
}

/// Half of the time that a sustained way runs, in microseconds, and the most launches that are
/// queued at once: what they use is kept until then.
const HALF_US: f64 = 750e3;
const QUEUED: usize = 256;

/// Runs a way for long: the time of a launch in the second half, and what the card says then.
fn sustain(ctx: &CudaContext, stream: &Stream, t: &mut Turn<'_>) -> Result<()> {
    let one = times(ctx, stream, WARM, &*t.launch)?[WARM - 1];
    let parts = (HALF_US / one / QUEUED as f64).ceil().max(2.0) as usize;
    let num = (HALF_US / one / parts as f64).ceil() as usize;
    let s = stream.cuda()?;
    let events: Vec<CudaEvent> =
        (0..=2 * parts).map(|_| CudaEvent::new(ctx, true)).collect::<Result<_>>()?;
    s.record(&events[0])?;
    let mut card = None;
    for (i, e) in events[1..].iter().enumerate() {
        (0..num).try_for_each(|_| (t.launch)())?;
        s.record(e)?;
        if i == parts {
            let card_of = ctx.info()?.pci;
            card = Some(thread::spawn(move || card_now(&card_of)));
        }
        stream.synchronize()?;
    }
    t.us.push(events[2 * parts].us_since(&events[parts])? / (parts * num) as f64);
    t.card.extend(card.and_then(|c| c.join().ok()).flatten());
    Ok(())
}

/// MHz and watts of the card at this place on the PCI bus, if its tool says them.
fn card_now(pci: &str) -> Option<[f64; 2]> {
    let ask = ["-i", pci, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"];
    let said = Command::new("nvidia-smi").args(ask).output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (mhz, watts) = said.trim().split_once(", ")?;
    Some([mhz.parse().ok()?, watts.parse().ok()?])
}

/// Times all of them twice, the second time in the other order: the card's clock falls under load,
/// and a neighbour's heat would count for one of them.
fn take_turns(ctx: &CudaContext, stream: &Stream, turns: &mut [Turn<'_>]) -> Result<()> {
    for _ in 0..2 {
        for t in turns.iter_mut() {
            if sustained() {
                sustain(ctx, stream, t)?;
                continue;
            }
            thread::sleep(REST);
            (0..WARM).try_for_each(|_| (t.launch)())?;
            t.us.extend(times(ctx, stream, RUNS, &*t.launch)?);
        }
        turns.reverse();
    }
    Ok(())
}

/// Times in microseconds of `runs` launches, one behind the other.
fn times(
    ctx: &CudaContext,
    stream: &Stream,
    runs: usize,
    launch: impl Fn() -> Result<()>,
) -> Result<Vec<f64>> {
    let s = stream.cuda()?;
    let events: Vec<CudaEvent> =
        (0..=runs).map(|_| CudaEvent::new(ctx, true)).collect::<Result<_>>()?;
    s.record(&events[0])?;
    for e in &events[1..] {
        launch()?;
        s.record(e)?;
    }
    stream.synchronize()?;
    events.windows(2).map(|e| e[1].us_since(&e[0])).collect()
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("layers") => layers::main(),
        Some("gemm") => gemm::main(),
        Some("drawn") => drawn::main(),
        Some("cold") => drawn::cold(),
        Some("parts") => drawn::parts(),
        Some("grouped") => grouped::main(),
        Some("attention") => attention::main(),
        Some("decode") => decode::main(),
        Some("shares") => shares::main(),
        other => Err(Error::invalid("which rates?")
            .expected(
                "`layers`, `gemm`, `drawn`, `cold`, `parts`, `grouped`, `attention`, `decode`, \
                 `shares`",
            )
            .seen(other.unwrap_or("nothing"))),
    }
}

/// A matrix of normal numbers on the device. They repeat after some 4 million, copied there: what
/// they are matters to power, not to time, and a host makes them slowly.
fn normal(ctx: &CudaContext, stream: &Stream, rows: usize, cols: usize) -> Result<Tensor> {
    let first = (1usize << 22).div_ceil(cols).min(rows);
    let mut rng = Rng::new(1);
    let v: Vec<f32> = (0..first * cols).map(|_| rng.normal()).collect();
    let device = Device::Cuda(ctx.clone());
    let block = Tensor::from_f32(&v, DType::BF16, Shape::d2(first, cols))?.to(&device)?;
    let all = Tensor::zeros_on(&device, DType::BF16, Shape::d2(rows, cols))?;
    for at in (0..rows).step_by(first) {
        let num = first.min(rows - at);
        let (dst, src) = (all.rows(at, num)?.cuda()?, block.rows(0, num)?.cuda()?);
        stream.cuda()?.copy_memory(&dst, &src)?;
    }
    stream.synchronize()?;
    Ok(all)
}
