//! `tilewire train`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use tilewire::boot::{Launch, Place, Rejoin};
use tilewire::device::Tracer;
use tilewire::device::jit::KernelTimes;
use tilewire::nn::{
    AdamW, Checkpoints, Data, Grid, Model, ModelCfg, StepReport, Target, TrainCfg, Trainer,
    checkpoint,
};
use tilewire::prelude::*;

use crate::args::{PlaceArgs, Preset, Task, TrainArgs};
use crate::ending::Ending;
use crate::{complain, plot, say, trace, worlds};

/// Runs the command; returns the exit code.
///
/// # Errors
/// Bad arguments, files that cannot be read or written, the fault of a team.
pub fn run(args: &TrainArgs) -> Result<i32> {
    let size = (args.place.rank.is_some()).then_some(args.ranks);
    let place =
        worlds::place(&PlaceArgs { rank: args.place.rank, size, store: args.place.store.clone() })?;
    let launched = worlds::launched(&place);
    let ranks = if launched { place.size } else { args.ranks };
    let cfg = model_cfg(args)?;
    let (optim, target) = (optim(args)?, target(args)?);
    if args.generate.as_ref().is_some_and(String::is_empty) {
        return Err(Error::invalid("--generate: the prompt is empty"));
    }
    let grid = Grid::fit(ranks, args.dp, args.cp, args.tp)?;
    grid.check(&cfg)?;
    let data = match args.task {
        Task::Copy => Data::Copy,
        Task::Text => Data::text(&args.data, cfg.seq + 2)?,
    };
    if place.rank.get() == 0 {
        can_write(args)?;
    }
    if args.processes && !launched {
        return spawn(args);
    }
    let grace = args.grace_s.map(|s| worlds::seconds("--grace-s", s)).transpose()?;
    // Without a checkpoint there is nothing to write, and signals are what they are.
    let ending = args.checkpoint.as_ref().map(|_| Ending::watch(grace)).transpose()?;
    let (start, began) = (Instant::now(), SystemTime::now());
    let job = Job { args, cfg, grid, target, optim, data: &data, ending, start, began };
    if launched {
        return job.process(place).map(|()| 0);
    }
    World::run_threads(ranks, worlds::world_cfg(args.timeout_s, 600.0)?, |world| {
        job.rank(world, false)
    })?;
    Ok(0)
}

/// Returns whether what is written after training can be: said before it, and with every file as it
/// was.
fn can_write(args: &TrainArgs) -> Result<()> {
    if let Some(dir) = &args.checkpoint {
        checkpoint::probe(dir).map_err(|e| {
            let text = format!("--checkpoint: nothing was trained: {}", e.message());
            e.reworded(text)
        })?;
    }
    for (flag, path) in [("--trace", &args.trace), ("--svg", &args.svg)] {
        let Some(path) = path else { continue };
        let tried = match path.metadata() {
            Ok(m) if m.is_dir() => Err(std::io::ErrorKind::IsADirectory.into()),
            Ok(m) if m.is_file() => File::options().write(true).open(path).map(drop),
            // A pipe would wait for its reader.
            Ok(_) => Ok(()),
            Err(_) => probe(path),
        };
        tried.map_err(|e| {
            Error::io(format!("{flag} {}", path.display()), e).hint(
                "nothing was trained: name a file in a folder that is there and may be written",
            )
        })?;
    }
    Ok(())
}

/// Makes a file in the folder of `path`, and removes it.
fn probe(path: &Path) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.probe", std::process::id()));
    File::options().write(true).create_new(true).open(&name)?;
    std::fs::remove_file(&name)
}

/// The sizes of the preset, but for those that are given.
fn model_cfg(args: &TrainArgs) -> Result<ModelCfg> {
    let m = &args.model;
    let p = match m.preset {
        Preset::Small => ModelCfg::default(),
        Preset::H200 => ModelCfg::h200(),
    };
    let cfg = ModelCfg {
        layers: m.layers.unwrap_or(p.layers),
        d_model: m.d_model.unwrap_or(p.d_model),
        heads: m.heads.unwrap_or(p.heads),
        kv_heads: m.kv_heads.unwrap_or(p.kv_heads),
        head_dim: m.head_dim.unwrap_or(p.head_dim),
        experts: m.experts.unwrap_or(p.experts),
        top_k: m.top_k.unwrap_or(p.top_k),
        d_ff: m.d_ff.unwrap_or(p.d_ff),
        seq: m.seq.unwrap_or(p.seq),
        batch: m.batch.unwrap_or(p.batch),
        no_attention: m.no_attention,
        no_experts: m.no_experts,
    };
    cfg.check().map(|()| cfg)
}

/// The optimizer of the preset, with the learning rate that is given.
fn optim(args: &TrainArgs) -> Result<AdamW> {
    let usual = AdamW::default();
    let lr = args.lr.unwrap_or(match args.model.preset {
        Preset::Small => usual.lr,
        Preset::H200 => 1e-4,
    });
    if !(lr.is_finite() && lr > 0.0) {
        return Err(Error::invalid(format!("--lr {lr}: must be a positive number")));
    }
    Ok(AdamW { lr, ..usual })
}

fn target(args: &TrainArgs) -> Result<Target> {
    let usual = Target::new(worlds::backend(args.backend)?);
    let target = Target { dtype: args.dtype.unwrap_or(usual.dtype), ..usual };
    target.check().map(|()| target)
}

/// Starts the same command once per rank.
fn spawn(args: &TrainArgs) -> Result<i32> {
    let exe =
        std::env::current_exe().map_err(|e| Error::io("finding the file of this program", e))?;
    let mut launch = Launch::new(args.ranks, exe);
    launch.args = std::env::args_os().skip(1).filter(|a| a != "--processes").collect();
    launch.no_prefix = true;
    let report = launch.run_to(Box::new(crate::Out), Box::new(std::io::stderr()))?;
    if let Some(f) = &report.first_failure {
        complain(format_args!("rank {} failed first: {:?}", f.rank.get(), f.status));
    }
    report.findings().iter().for_each(complain);
    Ok(report.code)
}

/// Errors that the loss of another rank causes.
fn is_loss(e: &Error) -> bool {
    matches!(e.kind(), ErrorKind::PeerDead | ErrorKind::Aborted | ErrorKind::Timeout)
}

/// Errors of arguments and of the environment, which a restart would meet again.
fn comes_again(e: &Error) -> bool {
    use ErrorKind::{Config, InvalidArgument, Mismatch, Unsupported};
    matches!(e.kind(), Config | InvalidArgument | Mismatch | Unsupported)
}

struct Job<'a> {
    args: &'a TrainArgs,
    cfg: ModelCfg,
    grid: Grid,
    target: Target,
    optim: AdamW,
    data: &'a Data,
    ending: Option<Ending>,
    start: Instant,
    /// The same by the clock that all processes read.
    began: SystemTime,
}

impl Job<'_> {
    /// One rank in a process of its own. Where the launcher starts lost ranks anew, the loss of one
    /// is no end: this rank leaves its world, and meets the others in a new one.
    fn process(&self, mut place: Place) -> Result<()> {
        let cfg = worlds::world_cfg(self.args.timeout_s, 600.0)?;
        let mut rejoin = Rejoin::from_env()?;
        loop {
            let again = rejoin.as_ref().is_some_and(|r| r.restarts() > 0);
            let done = worlds::join(&place, cfg).and_then(|world| self.rank(world, again));
            match (done, &mut rejoin) {
                (Err(e), Some(rejoin)) if is_loss(&e) => {
                    complain(format_args!("a peer is lost, waiting for a restart: {e}"));
                    place = rejoin.again(place.rank)?;
                }
                (Err(e), Some(rejoin)) if comes_again(&e) => {
                    rejoin.give_up(place.rank);
                    return Err(e);
                }
                (done, _) => return done,
            }
        }
    }

    /// Returns what one rank does; `again`: after a restart of the job.
    fn rank(&self, world: World, again: bool) -> Result<()> {
        self.in_world(&world, again).inspect_err(|e| world.leave_because(e))
    }

    fn in_world(&self, world: &World, again: bool) -> Result<()> {
        let (args, first) = (self.args, world.rank().get() == 0);
        if let (true, Some(folder)) = (first, &args.dump) {
            // Nobody can have written any before all have made the model together.
            crate::dump::clear(folder)?;
        }
        let tracer = args.trace.is_some().then(|| Arc::new(Tracer::new(self.start)));
        let sizes = (self.cfg, self.grid);
        let model = Model::new(world, sizes, self.target, args.seed, tracer.clone())?;
        let mut t = Trainer::new(model, TrainCfg { seed: args.seed, optim: self.optim });
        // A graph leaves no spans.
        t.use_graph &= !args.no_graph && args.trace.is_none();
        let done = self.work(&mut t, (first, again), tracer.as_deref());
        let done = done.map_err(|e| t.model.cause_of(e));
        if let (Err(_), Some(folder)) = (&done, &args.dump) {
            // It helps to understand the error, and must not take its place.
            if let Err(e) = crate::dump::write(folder, &t.model.comm.teams()) {
                complain(format_args!("warning: --dump is not complete: {e}"));
            }
        }
        done
    }

    fn work(
        &self,
        t: &mut Trainer,
        (first, again): (bool, bool),
        tracer: Option<&Tracer>,
    ) -> Result<()> {
        let args = self.args;
        let saves = self.checkpoints(t, first, again)?;
        if args.calibrate {
            t.calibrate()?;
        }
        if first {
            say(format_args!(
                "{} parameters, {} ranks (dp {} x cp {} x tp {}), batch {} x {} bytes, {:.1} MB symmetric memory a rank",
                t.model.num_params(),
                self.grid.size(),
                self.grid.dp,
                self.grid.cp,
                self.grid.tp,
                self.cfg.batch,
                self.cfg.seq,
                t.model.comm.symmetric_bytes() as f64 / 1e6
            ));
            if let Some(k) = t.kernel_times() {
                say(start_up(self.start.elapsed(), k));
            }
        }
        let mut out = Output::new(args, (first, again), t.step)?;
        self.steps(t, &mut out, tracer, saves.as_ref())?;
        self.last_words(t, &mut out, tracer)?;
        // Nobody leaves while others still wait for the last words.
        t.model.comm.world.agree(true).map(|_| ())
    }

    /// Collective: the signal by which a rank was asked to end, if any was.
    fn asked(&self, t: &Trainer) -> Result<Option<&'static str>> {
        let Some(ending) = &self.ending else { return Ok(None) };
        let mine = ending.asked();
        let all_go_on = t.model.comm.world.agree(mine.is_none())?;
        Ok((!all_go_on).then(|| mine.unwrap_or("a signal to another rank")))
    }

    /// Opens the folder of checkpoints, and goes on from one, as asked.
    fn checkpoints(
        &self,
        t: &mut Trainer,
        first: bool,
        again: bool,
    ) -> Result<Option<Checkpoints>> {
        let (args, world) = (self.args, t.model.comm.world.clone());
        let open = |dir: &PathBuf| Checkpoints::open(&world, dir, args.keep);
        let mut saves = args.checkpoint.as_ref().map(open).transpose()?;
        let mut damaged = Vec::new();
        // After a restart, from where the job was; before its first checkpoint, from its beginning.
        let own = match (&saves, again) {
            (Some(s), true) if s.has_any(&world)? => args.checkpoint.as_ref(),
            _ => None,
        };
        if let Some(path) = own.or(args.resume.as_ref()) {
            let start = Instant::now();
            let found = checkpoint::resume(t, self.data, path)?;
            if first {
                for (path, e) in &found.damaged {
                    complain(format_args!("warning: {} is damaged: {e}", path.display()));
                }
                say(format_args!(
                    "going on from {}, at step {}: {:.1} MB in {:.2} s",
                    found.path.display(),
                    t.step,
                    found.bytes as f64 / 1e6,
                    start.elapsed().as_secs_f64()
                ));
                for d in &found.differences {
                    complain(format_args!("warning: {d}"));
                }
            }
            damaged.extend(found.damaged.into_iter().map(|(path, _)| path));
        }
        if let Some(saves) = &mut saves {
            saves.begin(t, &damaged)?;
        }
        Ok(saves)
    }

    fn steps(
        &self,
        t: &mut Trainer,
        out: &mut Output,
        tracer: Option<&Tracer>,
        saves: Option<&Checkpoints>,
    ) -> Result<()> {
        let (args, mut saved) = (self.args, None);
        if let Some(tr) = tracer {
            // What came before is no step, however few there are.
            tr.take();
        }
        if t.step >= args.steps && t.model.comm.world.rank().get() == 0 {
            let (n, steps) = (t.step, args.steps);
            complain(format_args!(
                "the checkpoint has {n} steps: none of --steps {steps} is left to train"
            ));
        }
        while t.step < args.steps {
            if let Some(signal) = self.asked(t)? {
                out.ended_by(signal, t.step);
                break;
            }
            if let Some(tr) = tracer.filter(|_| t.step + 3 == args.steps) {
                // Only the last three steps are kept.
                tr.take();
            }
            let report = t.step(self.data)?;
            out.step(&report)?;
            let due = args.every.is_some_and(|n| t.step.is_multiple_of(n));
            if let Some(to) = saves.filter(|_| due) {
                out.save(to, t, self.data)?;
                saved = Some(t.step);
            }
        }
        // Also if there was no step left to train.
        match saves.filter(|_| saved != Some(t.step)) {
            Some(to) => out.save(to, t, self.data),
            None => Ok(()),
        }
    }

    /// Summary, trace, generated text.
    fn last_words(&self, t: &Trainer, out: &mut Output, tracer: Option<&Tracer>) -> Result<()> {
        let (args, first) = (self.args, out.first);
        out.finish(self.start)?;
        if let (Some(path), Some(tr)) = (&args.trace, tracer) {
            let mine = trace::to_json(&tr.take(), self.began).to_string();
            let all = t.model.comm.world.exchange_large("trace", mine.as_bytes())?;
            if first {
                let ranks: Vec<_> = all
                    .iter()
                    .map(|b| serde_json::from_slice(b).unwrap_or(serde_json::Value::Null))
                    .collect();
                trace::write(path, &ranks)?;
            }
        }
        if let Some(prompt) = &args.generate {
            let text = t.generate(prompt.as_bytes(), args.generate_len)?;
            if first {
                say(format_args!("{prompt}{}", String::from_utf8_lossy(&text)));
            }
        }
        Ok(())
    }
}

/// Returns what came before the first step, and the part of it that kernels took.
fn start_up(all: Duration, k: KernelTimes) -> String {
    let (all, kernels) = (all.as_secs_f64(), k.took.as_secs_f64());
    format!(
        "ready after {all:.2} s: kernels {kernels:.2} s ({} compiled, {} found), the rest {:.2} s",
        k.compiled,
        k.found,
        (all - kernels).max(0.0)
    )
}

/// The outputs of rank 0: progress bar, metrics, curve.
struct Output {
    bar: ProgressBar,
    first: bool,
    metrics: Option<File>,
    svg: Option<PathBuf>,
    /// Steps before the first of this run.
    done: usize,
    losses: Vec<f64>,
    rates: Vec<f64>,
    hidden: Option<f64>,
    /// Bytes of each checkpoint and the time it took.
    saved: Vec<(u64, Duration)>,
}

impl Output {
    fn new(args: &TrainArgs, (first, again): (bool, bool), done: usize) -> Result<Self> {
        let bar = if first { ProgressBar::new(args.steps as u64) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {msg} ({eta} left)")
        {
            bar.set_style(style);
        }
        bar.set_position(done as u64);
        // A resumed run goes on where the file ends.
        let resumed = args.resume.is_some() || again;
        let open = |p: &PathBuf| {
            let mut how = File::options();
            how.create(true).write(true).append(resumed).truncate(!resumed);
            how.open(p).map_err(|e| Error::io(p.display(), e))
        };
        let metrics = args.metrics.as_ref().filter(|_| first).map(open).transpose()?;
        let svg = args.svg.clone().filter(|_| first);
        let (losses, rates, saved) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { bar, first, metrics, svg, done, losses, rates, hidden: None, saved })
    }

    fn step(&mut self, r: &StepReport) -> Result<()> {
        self.losses.push(r.loss);
        self.rates.push(r.tokens_per_s);
        self.hidden = r.hidden;
        self.bar.set_position(r.step as u64 + 1);
        self.bar.set_message(format!("loss {:.4}  {:.0} bytes/s", r.loss, r.tokens_per_s));
        if self.first && self.bar.is_hidden() && r.step.is_multiple_of(10) {
            // No terminal: a line now and then.
            say(format_args!(
                "step {:>5}  loss {:.4}  {:.0} bytes/s",
                r.step, r.loss, r.tokens_per_s
            ));
        }
        if let Some(f) = &mut self.metrics {
            let mut line = serde_json::to_string(r).map_err(|e| Error::internal(e.to_string()))?;
            line.push('\n');
            // In one piece: whatever ends the run, it leaves whole lines, which can be added to.
            f.write_all(line.as_bytes()).map_err(|e| Error::io("writing the metrics", e))?;
        }
        Ok(())
    }

    fn ended_by(&self, signal: &str, step: usize) {
        if self.first {
            say(format_args!("ending at step {step}, asked by {signal}"));
        }
    }

    fn save(&mut self, to: &Checkpoints, t: &Trainer, data: &Data) -> Result<()> {
        let start = Instant::now();
        if let Some(saved) = to.save(t, data)? {
            self.saved.push((saved.bytes, start.elapsed()));
        }
        Ok(())
    }

    fn finish(&mut self, start: Instant) -> Result<()> {
        self.bar.finish_and_clear();
        if let Some(p) = &self.svg {
            let chart = plot::line_chart("loss, nats per byte", "loss", self.done, &self.losses);
            std::fs::write(p, chart).map_err(|e| Error::io(p.display(), e))?;
        }
        if let (true, Some(a), Some(b)) = (self.first, self.losses.first(), self.losses.last()) {
            self.rates.sort_by(f64::total_cmp);
            say(format_args!(
                "{} steps in {:.1} s: loss {a:.4} -> {b:.4} ({:.0} % lower), {:.0} bytes/s, hidden share: {}",
                self.losses.len(),
                start.elapsed().as_secs_f64(),
                100.0 * (1.0 - b / a),
                self.rates[self.rates.len() / 2],
                self.hidden.map_or("not calibrated".to_owned(), |h| format!("{:.0} %", 100.0 * h))
            ));
        }
        if let Some((bytes, _)) = self.saved.last() {
            let (num, took) = (self.saved.len(), self.saved.iter().map(|s| s.1).sum::<Duration>());
            say(format_args!(
                "{num} checkpoints of {:.1} MB in {:.2} s",
                *bytes as f64 / 1e6,
                took.as_secs_f64()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_from_the_rest_of_the_start() {
        let took = Duration::from_millis(450);
        let k = KernelTimes { compiled: 0, found: 34, took };
        assert_eq!(
            start_up(Duration::from_millis(1700), k),
            "ready after 1.70 s: kernels 0.45 s (0 compiled, 34 found), the rest 1.25 s"
        );
    }
}
