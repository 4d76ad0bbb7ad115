//! Command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tilewire::nn::checkpoint;
use tilewire::prelude::*;

/// Tiles over wires: communication hidden behind arithmetic on many accelerators.
#[derive(Debug, Parser)]
#[command(name = "tilewire", version, propagate_version = true)]
pub struct Cli {
    /// A library of NVIDIA's to use instead of the one that is found, by its file: libcuda.so.1,
    /// libnvrtc.so.13, libcublasLt.so.13 or .12, libnccl.so.2, libnvshmem_host.so.3. Can be given
    /// for each of them.
    #[arg(long, global = true, value_name = "FILE")]
    pub library: Vec<PathBuf>,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a program on several ranks of this host.
    Run(crate::launch::RunArgs),
    /// Check operations against the f64 oracle (all but `layers`, which has its own tests).
    Verify(VerifyArgs),
    /// Time operations beside their parts.
    Bench(BenchArgs),
    /// Train a mixture-of-experts transformer on text, over any grid of ranks.
    Train(Box<TrainArgs>),
    /// List the checkpoints of `train`, and check them against their digests.
    #[command(subcommand)]
    Checkpoint(crate::checkpoint_cmd::CheckpointCommand),
    /// Merge flight recorders and name the first divergence between ranks.
    Dump(DumpArgs),
    /// Turn a trace file into a self-contained HTML timeline.
    Trace(TraceArgs),
    /// Say what each rank of an operation would hold, compute and move; starts nothing.
    #[command(subcommand)]
    Plan(crate::plan_cmd::PlanCommand),
    /// List, compile and cache the kernels; needs no GPU.
    #[command(subcommand)]
    Kernels(KernelsCommand),
    /// List the GPUs and how each reaches the others.
    Topo(TopoArgs),
    /// Say what works on this machine, and what to do about what does not.
    Doctor(DoctorArgs),
    /// List the `TILEWIRE_` variables with their values.
    Env,
    /// Wait for the launcher of a job, and end the job if it dies: `tilewire run` starts this.
    #[command(hide = true)]
    Warden,
    /// Print a completion script for a shell.
    Completions {
        /// The shell to write completions for.
        shell: clap_complete::Shell,
    },
}

/// `tilewire kernels`
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// List the kernels and their keys in caches.
    List(KernelsListArgs),
    /// Compile all kernels; fails if one spills or is serialised.
    Compile(KernelsCompileArgs),
    /// Show or empty the disk cache of compiled kernels.
    Cache(KernelsCacheArgs),
}

/// An architecture in the form that devices ask for: code of another one would never be found.
fn arch(text: &str) -> Result<String, String> {
    let sm = text.strip_prefix("sm_").map(|n| n.strip_suffix('a').unwrap_or(n));
    let Some(sm) = sm.and_then(|n| n.parse::<u32>().ok()).filter(|sm| *sm >= 80) else {
        return Err(
            "there are kernels for sm_80 and newer, as in sm_80, sm_90a, sm_100a".to_owned()
        );
    };
    let asked = format!("sm_{sm}{}", if sm >= 90 { "a" } else { "" });
    match text == asked {
        true => Ok(asked),
        false => Err(format!("devices look for kernels of {asked}: give that name")),
    }
}

/// `tilewire kernels list`
#[derive(Debug, Args)]
pub struct KernelsListArgs {
    /// Architecture, as in `sm_90a`.
    #[arg(long, default_value = "sm_90a", value_parser = arch)]
    pub arch: String,
    /// Print one JSON object per row instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `tilewire kernels compile`
#[derive(Debug, Args)]
pub struct KernelsCompileArgs {
    /// Architectures.
    #[arg(long, value_delimiter = ',', default_values = ["sm_80", "sm_90a", "sm_100a"], value_parser = arch)]
    pub arch: Vec<String>,
    /// Compile these alone: keys that `list` prints for one of the architectures.
    #[arg(long, value_delimiter = ',', value_name = "KEY")]
    pub keys: Vec<String>,
    /// NVRTC to use, a file or its folder, instead of the one that is found.
    #[arg(long)]
    pub nvrtc: Option<PathBuf>,
    /// Write `<key>.cubin` files here: as the folder `cubins` beside the program they are used
    /// instead of compiling.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Print one JSON object per kernel instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `tilewire kernels cache`
#[derive(Debug, Args)]
pub struct KernelsCacheArgs {
    /// Remove everything.
    #[arg(long)]
    pub clear: bool,
    /// Print a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Flags that say who I am, for a launcher that sets no variables.
#[derive(Debug, Args, Default)]
pub struct PlaceArgs {
    /// My rank in the job (with --size and --store).
    #[arg(long)]
    pub rank: Option<u32>,
    /// Number of ranks in the job.
    #[arg(long)]
    pub size: Option<usize>,
    /// `host:port` of the job's store.
    #[arg(long)]
    pub store: Option<String>,
}

/// `tilewire verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Rank counts, each as threads of this process. Under a launcher the job's size is used.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    pub ranks: Vec<usize>,
    /// Backend of tensors and symmetric memory: `host`, or one of GPUs (one for each rank): `vmm`,
    /// `nccl`, or `nvshmem`, which needs a process for each rank (`tilewire run`). Default:
    /// TILEWIRE_BACKEND, or `host`.
    #[arg(long)]
    pub backend: Option<BackendKind>,
    /// Only these operations (`gemm`) or single variants (`gemm/plain`); a name that there is not
    /// lists all operations.
    #[arg(long, value_delimiter = ',')]
    pub op: Vec<String>,
    /// Only these element types.
    #[arg(long, value_delimiter = ',')]
    pub dtype: Vec<DType>,
    /// Replace sizes of the cases, e.g. `m=128,n=64`.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    pub shape: Vec<(String, usize)>,
    /// Seed of the random inputs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Absolute tolerance instead of the operation's bound (`core::numerics`).
    #[arg(long, value_parser = tolerance)]
    pub atol: Option<f64>,
    /// Relative tolerance instead of the operation's bound (`core::numerics`).
    #[arg(long, value_parser = tolerance)]
    pub rtol: Option<f64>,
    /// Seconds that a wait on a live peer may last. Default: TILEWIRE_TIMEOUT_S, or 60.
    #[arg(long)]
    pub timeout_s: Option<f64>,
    /// Print one JSON object per row instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Print only rows that are wrong, and the summary of the table.
    #[arg(long, short)]
    pub quiet: bool,
    /// Place of this rank in its job.
    #[command(flatten)]
    pub place: PlaceArgs,
}

fn parse_size(s: &str) -> std::result::Result<(String, usize), String> {
    let (name, value) = s.split_once('=').ok_or("write name=value, e.g. m=128")?;
    let value = value.parse().map_err(|_| format!("`{value}` is not a whole number"))?;
    Ok((name.to_owned(), value))
}

pub(crate) fn positive(s: &str) -> std::result::Result<usize, String> {
    match s.parse() {
        Ok(0) | Err(_) => Err("must be a whole number above 0".to_owned()),
        Ok(n) => Ok(n),
    }
}

/// A tolerance: with NaN or less than 0 nothing would be right.
fn tolerance(s: &str) -> std::result::Result<f64, String> {
    match s.parse::<f64>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        _ => Err("must be a finite number, 0 or more".to_owned()),
    }
}

/// Bytes to generate: each takes a forward pass.
fn generated(s: &str) -> std::result::Result<usize, String> {
    const MOST: usize = 1 << 20;
    match s.parse() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        _ => Err(format!("must be a whole number from 1 to {MOST}")),
    }
}

/// `tilewire doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Folder to search for leftovers of crashed jobs.
    #[arg(long, default_value = "/dev/shm")]
    pub shm: PathBuf,
}

/// `tilewire topo`
#[derive(Debug, Args)]
pub struct TopoArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// A task to learn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Task {
    /// The bytes of --data.
    Text,
    /// To repeat a random string.
    Copy,
}

/// `tilewire train`
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// A text file, or a folder of them; the first 64 MiB count. Any bytes will do.
    #[arg(long, default_value = "docs")]
    pub data: PathBuf,
    /// Task to learn.
    #[arg(long, value_enum, default_value = "text")]
    pub task: Task,
    /// Number of ranks (under a launcher: the job's).
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// Ranks are processes instead of threads.
    #[arg(long)]
    pub processes: bool,
    /// Parts of the batch. Default: what tp and cp leave.
    #[arg(long)]
    pub dp: Option<usize>,
    /// Parts of the sequence.
    #[arg(long, default_value_t = 1)]
    pub cp: usize,
    /// Parts of heads and projections.
    #[arg(long, default_value_t = 1)]
    pub tp: usize,
    /// Train until so many steps are done; with --resume those of the checkpoint count.
    #[arg(long, default_value_t = 60)]
    pub steps: usize,
    /// Seed of parameters and batches.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Learning rate [small: 0.001, h200: 0.0001].
    #[arg(long)]
    pub lr: Option<f64>,
    /// Backend of symmetric memory, and so of the computation: `host`, or one of GPUs (one for each
    /// rank): `vmm`, `nccl`, or `nvshmem`, which needs a process for each rank. Default:
    /// TILEWIRE_BACKEND, or `host`.
    #[arg(long)]
    pub backend: Option<BackendKind>,
    /// Type of weights and activations: bf16 (with f32 masters), or f32, on the host only [default:
    /// f32 on the host, bf16 on GPUs].
    #[arg(long)]
    pub dtype: Option<DType>,
    /// Queue every step anew on GPUs, instead of replaying the second one.
    #[arg(long)]
    pub no_graph: bool,
    /// First measure what share of the communication is hidden (needs more than one rank).
    #[arg(long)]
    pub calibrate: bool,
    /// Write one JSON object per step to this file; with --resume, add to it.
    #[arg(long)]
    pub metrics: Option<PathBuf>,
    /// Draw the loss curve into this SVG file.
    #[arg(long)]
    pub svg: Option<PathBuf>,
    /// Write a Perfetto (Chrome) trace of the last three steps to this file.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Write checkpoints into this folder, which is made if it is not there: at the end, and every
    /// --every steps. Each is a folder `step-<number>` of safetensors files and a manifest.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps between checkpoints.
    #[arg(long, requires = "checkpoint", value_parser = positive)]
    pub every: Option<usize>,
    /// At SIGTERM write a checkpoint and end with 0, as at SIGUSR1 in any case; after so many
    /// seconds, or at a second SIGTERM, end with 143.
    #[arg(long, requires = "checkpoint")]
    pub grace_s: Option<f64>,
    /// Checkpoints to keep: older ones are removed when a new one is in place.
    #[arg(long, requires = "checkpoint", default_value_t = checkpoint::KEEP, value_parser = positive)]
    pub keep: usize,
    /// Continue from the newest whole checkpoint in this folder, or from this one of it
    /// (`DIR/step-<number>`), written by any number of ranks.
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// After an error, write each rank's flight recorders into this folder (for `tilewire dump`);
    /// those of an earlier run there are removed.
    #[arg(long)]
    pub dump: Option<PathBuf>,
    /// After training, continue this text.
    #[arg(long)]
    pub generate: Option<String>,
    /// Bytes to generate, at most 1048576.
    #[arg(long, default_value_t = 64, requires = "generate", value_parser = generated)]
    pub generate_len: usize,
    /// Seconds that a wait on a live peer may last. Default: TILEWIRE_TIMEOUT_S, or 600.
    #[arg(long)]
    pub timeout_s: Option<f64>,
    /// Sizes of the model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Place of this rank in its job.
    #[command(flatten)]
    pub place: TrainPlaceArgs,
}

/// Place of a rank whose launcher sets no variables (`--ranks` is the number of ranks).
#[derive(Debug, Args, Default)]
pub struct TrainPlaceArgs {
    /// My rank in the job.
    #[arg(long, requires = "store")]
    pub rank: Option<u32>,
    /// `host:port` of the job's store.
    #[arg(long, requires = "rank")]
    pub store: Option<String>,
}

/// Order of the rows that a dispatch delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum RowOrder {
    /// Expert after expert, a row for each copy.
    ExpertMajor,
    /// A place for each token of each rank, a row for each (token, rank).
    RankMajor,
    /// As rank-major, without gaps.
    Flat,
}

/// A model and how it is trained, by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Preset {
    /// A model that a laptop trains in seconds.
    Small,
    /// Hidden size 4096, 64 experts, sequences of 4096: for a host of H200.
    H200,
}

/// Sizes of the model that `train` makes; those of the preset where they are not given.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Sizes and learning rate.
    #[arg(long, value_enum, default_value = "small")]
    pub preset: Preset,
    /// Layers [small: 2, h200: 4].
    #[arg(long)]
    pub layers: Option<usize>,
    /// Elements of a token [small: 128, h200: 4096].
    #[arg(long)]
    pub d_model: Option<usize>,
    /// Query heads [small: 4, h200: 32].
    #[arg(long)]
    pub heads: Option<usize>,
    /// Key and value heads [small: 2, h200: 8].
    #[arg(long)]
    pub kv_heads: Option<usize>,
    /// Elements of a head [small: 32, h200: 128].
    #[arg(long)]
    pub head_dim: Option<usize>,
    /// Experts [small: 8, h200: 64].
    #[arg(long)]
    pub experts: Option<usize>,
    /// Experts of a token [small: 2, h200: 2].
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Inner features of an expert [small: 128, h200: 1536].
    #[arg(long)]
    pub d_ff: Option<usize>,
    /// Tokens of a sequence [small: 256, h200: 4096].
    #[arg(long)]
    pub seq: Option<usize>,
    /// Sequences of the global batch [small: 24, h200: 8].
    #[arg(long)]
    pub batch: Option<usize>,
    /// Train without attention, to see that it matters.
    #[arg(long)]
    pub no_attention: bool,
    /// Train without experts, to see that they matter.
    #[arg(long)]
    pub no_experts: bool,
}

/// Other things to time than operations.
#[derive(Debug, Subcommand)]
pub enum BenchWhat {
    /// Measure the links between the GPUs of this host.
    Links(LinksArgs),
    /// Ranks that share one device, by one program or by two in turn.
    ///
    /// The collectives, expert parallelism and attention over ranks that share a GPU (--backend
    /// vmm; hide the others by CUDA_VISIBLE_DEVICES) or the host: two ranks are threads, more are
    /// processes. With --before another program is timed in turn with this one, round by round; the
    /// exit code is 1 if a case is slower by more than 2 % and by more than the rounds of the other
    /// program lie apart.
    Shared(SharedArgs),
}

/// `tilewire bench shared`
#[derive(Debug, Args)]
pub struct SharedArgs {
    /// Backend of tensors and symmetric memory. Default: TILEWIRE_BACKEND, or `host`.
    #[arg(long)]
    pub backend: Option<BackendKind>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    pub ranks: Vec<usize>,
    /// Number of runs of each program.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Operations of `bench` (default: the collectives, `ep` and `cp_attention`).
    #[arg(long, default_value = "")]
    pub op: String,
    /// Another build of this program, which is compared with.
    #[arg(long)]
    pub before: Option<PathBuf>,
    /// The build that is compared with it (default: this program).
    #[arg(long, requires = "before")]
    pub after: Option<PathBuf>,
    /// Print one JSON object per case.
    #[arg(long)]
    pub json: bool,
    /// Flags of `bench` for sizes, in place of those for shared devices.
    #[arg(last = true)]
    pub sizes: Vec<String>,
}

/// `tilewire bench links`
#[derive(Debug, Args)]
pub struct LinksArgs {
    /// Number of GPUs, from the first on, each with a thread of this process. Default: all.
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Print one JSON object per row.
    #[arg(long)]
    pub json: bool,
}

/// `tilewire bench`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// Time something else than operations.
    #[command(subcommand)]
    pub what: Option<BenchWhat>,
    /// Backend of tensors and symmetric memory: `host`, or one of GPUs (one for each rank), on
    /// which every operation is timed: `vmm`, `nccl`, or `nvshmem`, which needs a process for each
    /// rank (`tilewire run`). Default: TILEWIRE_BACKEND, or `host`.
    #[arg(long)]
    pub backend: Option<BackendKind>,
    /// Seconds that a wait on a live peer may last. Default: TILEWIRE_TIMEOUT_S, or 600 on the host
    /// and 60 on GPUs.
    #[arg(long)]
    pub timeout_s: Option<f64>,
    /// On GPUs: bytes of a collective's whole vector.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 65536, 1 << 20, 8 << 20, 64 << 20, 256 << 20])]
    pub bytes: Vec<usize>,
    /// Tokens of a rank for `ep` and `permute`. On the host, if not given: 256.
    #[arg(long, default_value_t = 4096)]
    pub tokens: usize,
    /// Elements of a token for `ep` and `permute`. On the host, if not given: 512.
    #[arg(long, default_value_t = 7168)]
    pub hidden: usize,
    /// Experts in all for `ep`, of a rank for `permute` and `router`. On the host, if not given:
    /// 16.
    #[arg(long, default_value_t = 256)]
    pub experts: usize,
    /// Choices of a token for `ep`, `permute` and `router`. On the host, if not given: 4.
    #[arg(long, default_value_t = 8)]
    pub top_k: usize,
    /// Rows of each expert are a multiple of this, for `ep` and `permute`. On the host, if not
    /// given: 8.
    #[arg(long, default_value_t = 128)]
    pub align: usize,
    /// Order of the rows that `ep_dispatch` delivers, and `ep_dispatch_bwd` takes.
    #[arg(long, value_enum, default_value_t = RowOrder::ExpertMajor)]
    pub layout: RowOrder,
    /// On GPUs: multiprocessors that a collective or `ep` may take (default: as the operation
    /// does).
    #[arg(long)]
    pub sms: Option<usize>,
    /// On GPUs: equal documents that the rows of attention are packed of.
    #[arg(long, default_value_t = 1)]
    pub documents: usize,
    /// On GPUs: `ep_dispatch` and `ep_combine_bwd` bring rows straight to a receive buffer in
    /// symmetric memory.
    #[arg(long)]
    pub zero_copy: bool,
    /// Only these operations; a name that there is not lists all.
    #[arg(long, value_delimiter = ',')]
    pub op: Vec<String>,
    /// Number of ranks, as threads (under a launcher: the job's).
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// Element type.
    #[arg(long, default_value = "f32")]
    pub dtype: DType,
    /// Global rows of products, attention and, on the host, collectives; rows of a rank for `quant`
    /// and layers.
    #[arg(long, default_value_t = 512)]
    pub m: usize,
    /// Output columns of products and, on the host, collectives; columns for `quant` and layers.
    #[arg(long, default_value_t = 256)]
    pub n: usize,
    /// Contraction of a rank, of products.
    #[arg(long, default_value_t = 256)]
    pub k: usize,
    /// Timed iterations.
    #[arg(long, default_value_t = 20)]
    pub iters: usize,
    /// Untimed iterations before.
    #[arg(long, default_value_t = 3)]
    pub warmup: usize,
    /// Names of the flags that were given.
    #[arg(skip)]
    pub given: Vec<String>,
    /// Print one JSON object per row.
    #[arg(long, conflicts_with_all = ["csv", "md"])]
    pub json: bool,
    /// Print comma-separated values.
    #[arg(long, conflicts_with = "md")]
    pub csv: bool,
    /// Print a Markdown table.
    #[arg(long)]
    pub md: bool,
    /// Compare with the --json output of an earlier run, row by row of the same shape, backend and
    /// device.
    #[arg(long)]
    pub compare: Option<PathBuf>,
    /// Slower than before by more than this share is a failure.
    #[arg(long, default_value_t = 0.1, requires = "compare")]
    pub threshold: f64,
}

/// `tilewire dump`
#[derive(Debug, Args)]
pub struct DumpArgs {
    /// Folder with the flight recorders of all ranks.
    pub folder: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Entries to show before the divergence.
    #[arg(long, default_value_t = 3)]
    pub context: usize,
}

/// `tilewire trace`
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// A trace file written by `train --trace`.
    pub file: PathBuf,
    /// File to write the timeline to.
    #[arg(long, default_value = "timeline.html")]
    pub html: PathBuf,
}
