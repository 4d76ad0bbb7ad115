//! `verify`: every operation against the oracle, on any number of ranks.
//!
//! A [`Case`] runs on all ranks of a team. Each rank makes the same global inputs from a seed,
//! keeps its part, runs the operation on poisoned outputs, and compares every element of its
//! part with the f64 reference. Beside the numbers it checks that exact integer inputs give the
//! same bits in every variant, that a second run gives the same bits, that fewer rows than the
//! plan's work, that what moved is what the plan predicted, and that no signal is left over.

mod attention;
mod collective;
mod cp_attention;
mod ctx;
mod ep;
mod gemm;
mod grouped;
mod overlap;
mod permute;
mod quant;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tilewire::ops::collective::CollectiveBackend;
use tilewire::ops::gemm::GemmBackend;
use tilewire::prelude::*;

pub use ctx::{Ctx, Tally};

use crate::rows::Row;

/// The family of the cases that go through NCCL: on devices only, and apart from the others,
/// because the library does what sanitizers report.
const NCCL: &str = "nccl";

/// The end of the names of cases whose products the kernels for sm_90a make: on devices only.
const CORE: &str = "/hopper";

fn has_no_nccl() -> bool {
    tilewire::device::cuda::NcclComm::library().is_err()
}

/// One thing to verify.
#[derive(Clone, Debug)]
pub struct Case {
    /// Operation and variant.
    pub op: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes by name.
    pub shape: BTreeMap<&'static str, usize>,
    /// Runs it on one rank.
    pub run: fn(&mut Ctx, &Case) -> Result<()>,
}

impl Case {
    fn new(
        op: impl Into<String>,
        dtype: DType,
        shape: &[(&'static str, usize)],
        run: fn(&mut Ctx, &Case) -> Result<()>,
    ) -> Self {
        Self { op: op.into(), dtype, shape: shape.iter().copied().collect(), run }
    }

    /// A size by name.
    ///
    /// # Panics
    /// If the case has no such size: the table of cases is wrong.
    pub fn dim(&self, name: &str) -> usize {
        *self.shape.get(name).unwrap_or_else(|| panic!("case {} has no size `{name}`", self.op))
    }

    /// Sizes in words.
    pub fn shape_text(&self) -> String {
        self.shape.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
    }

    /// True if everything moves through NCCL.
    fn by_nccl(&self) -> bool {
        self.family() == NCCL
    }

    /// True if the kernels for sm_90a make the products, on a device of any size.
    fn by_core(&self) -> bool {
        self.op.ends_with(CORE)
    }

    fn gemm_backend(&self) -> GemmBackend {
        if self.by_core() { GemmBackend::Hopper } else { GemmBackend::Auto }
    }

    /// Operation and variant, whoever moves the data.
    fn bare(&self) -> &str {
        match self.by_nccl() {
            true => self.op[NCCL.len()..].trim_start_matches('/'),
            false => &self.op,
        }
    }

    fn backend(&self) -> CollectiveBackend {
        if self.by_nccl() { CollectiveBackend::Nccl } else { CollectiveBackend::Put }
    }

    fn family(&self) -> &str {
        self.op.split('/').next().unwrap_or(&self.op)
    }
}

/// The cases to verify.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Only these operations (all if empty).
    pub ops: Vec<String>,
    /// Only these element types (all if empty).
    pub dtypes: Vec<DType>,
    /// Replaces sizes of the cases by name.
    pub shape: BTreeMap<String, usize>,
    /// Seed of the inputs.
    pub seed: u64,
    /// Absolute tolerance instead of the rule of the design.
    pub atol: Option<f64>,
    /// Relative tolerance instead of the rule of the design.
    pub rtol: Option<f64>,
    /// Backend of the heap.
    pub backend: BackendKind,
}

/// Names of all operations.
pub fn ops() -> Vec<String> {
    let mut names: Vec<String> = all_cases().iter().map(|c| c.family().to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

fn all_cases() -> Vec<Case> {
    let mut v = collective::cases();
    v.extend(gemm::cases());
    v.extend(overlap::cases());
    v.extend(ep::cases());
    v.extend(grouped::cases());
    v.extend(permute::cases());
    v.extend(quant::cases());
    v.extend(attention::cases());
    v.extend(cp_attention::cases());
    v
}

/// The most elements in a matrix of a case, 4 GiB of f32: it holds a few on every rank.
const MAX_ELEMENTS: usize = 1 << 30;

/// Refuses matrices of more elements than that.
///
/// # Errors
/// `InvalidArgument` with the sizes.
pub(crate) fn check_sizes(sizes: &[usize]) -> Result<()> {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let most = sizes.iter().take(2).try_fold(1usize, |all, n| all.checked_mul(*n));
    match most.is_some_and(|n| n <= MAX_ELEMENTS) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("two of {sizes:?} make more than {MAX_ELEMENTS} elements")))
        }
    }
}

/// The cases that `options` selects.
///
/// # Errors
/// `InvalidArgument` for an unknown operation or size.
pub fn cases(options: &Options) -> Result<Vec<Case>> {
    let known = ops();
    let all = all_cases();
    let names = |c: &Case, o: &String| o == c.family() || *o == c.op;
    if let Some(bad) = options.ops.iter().find(|o| !all.iter().any(|c| names(c, o))) {
        let names = known.join(", ");
        return Err(Error::invalid(format!("unknown operation `{bad}`; one of {names}")));
    }
    let mut selected: Vec<Case> = all
        .into_iter()
        .filter(|c| options.ops.is_empty() || options.ops.iter().any(|o| names(c, o)))
        .filter(|c| !(c.by_nccl() || c.by_core()) || options.backend != BackendKind::Host)
        .filter(|c| options.dtypes.is_empty() || options.dtypes.contains(&c.dtype))
        .collect();
    for (name, &value) in &options.shape {
        // A matrix may be empty; a model without experts or heads is no case.
        let least = usize::from(!["m", "n", "k", "seq"].contains(&name.as_str()));
        if !(least..=MAX_ELEMENTS).contains(&value) {
            let text = format!("size {name}={value}: must be {least} to {MAX_ELEMENTS}");
            return Err(Error::invalid(text));
        }
        let mut used = false;
        for c in &mut selected {
            if let Some(v) = c.shape.iter_mut().find(|(k, _)| **k == name.as_str()) {
                *v.1 = value;
                used = true;
            }
        }
        if !used {
            return Err(Error::invalid(format!("no selected operation has a size `{name}`")));
        }
    }
    // Cases that differed in sizes alone are one.
    let mut seen = std::collections::HashSet::new();
    selected.retain(|c| {
        options.shape.is_empty() || seen.insert((c.op.clone(), c.dtype, c.shape_text()))
    });
    for c in &selected {
        let mut sizes: Vec<usize> = c.shape.values().copied().collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        if sizes.len() > 1 && sizes[0] * sizes[1] > MAX_ELEMENTS {
            return Err(Error::invalid(format!(
                "{} {}: two sizes make more than {MAX_ELEMENTS} elements",
                c.op,
                c.shape_text()
            )));
        }
    }
    Ok(selected)
}

/// The result of a case on one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Finding {
    max_err: Option<f64>,
    wrong: u64,
    note: Option<String>,
    time_us: f64,
    /// The backend has no such operation, and said so.
    unsupported: bool,
    device: String,
}

/// Collective: runs the cases on all ranks of `world`; the rows are the same on every rank.
/// `progress` is called before each case.
///
/// # Errors
/// What forming a team can give. A case that fails is a row, not an error.
pub fn run(
    world: &World,
    cases: &[Case],
    options: &Options,
    mut progress: impl FnMut(usize, &Case),
) -> Result<Vec<Row>> {
    let mut rows = Vec::with_capacity(cases.len());
    let outer = world.everyone("verify")?;
    for (i, case) in cases.iter().enumerate() {
        progress(i, case);
        let finding = run_one(world, case, options);
        let bytes = serde_json::to_vec(&finding)
            .map_err(|e| Error::internal(format!("finding as JSON: {e}")))?;
        let all = outer.exchange("finding", &bytes)?;
        let all: Vec<Finding> = all
            .iter()
            .map(|b| serde_json::from_slice(b))
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| Error::new(ErrorKind::Protocol, format!("a peer's finding: {e}")))?;
        let finite = all.iter().all(|f| f.max_err.is_some());
        // A rank alone that refuses would leave its peers waiting: that is wrong.
        let odd = all.iter().any(|f| f.unsupported) && !all.iter().all(|f| f.unsupported);
        rows.push(Row {
            op: case.op.clone(),
            backend: options.backend.to_string(),
            device: all
                .iter()
                .map(|f| f.device.clone())
                .find(|d| !d.is_empty())
                .unwrap_or_default(),
            dtype: case.dtype.to_string(),
            ranks: world.size(),
            shape: case.shape_text(),
            t_ours_us: Some(all.iter().map(|f| f.time_us).fold(0.0, f64::max)),
            max_err: finite.then(|| all.iter().filter_map(|f| f.max_err).fold(0.0, f64::max)),
            wrong: all.iter().map(|f| f.wrong).sum::<u64>() + u64::from(odd),
            unsupported: all.iter().all(|f| f.unsupported),
            note: first_cause(&all),
            ..Row::default()
        });
    }
    Ok(rows)
}

/// The first note that is not the echo of another rank's.
fn first_cause(all: &[Finding]) -> Option<String> {
    let notes = || all.iter().filter_map(|f| f.note.as_ref());
    notes().find(|n| !n.contains("aborted the team")).or_else(|| notes().next()).cloned()
}

fn run_one(world: &World, case: &Case, options: &Options) -> Finding {
    let mut device = String::new();
    let done = Ctx::new(world, case, options).and_then(|mut ctx| {
        device = ctx.device();
        (case.run)(&mut ctx, case)?;
        ctx.finish()
    });
    match done {
        Ok(t) => Finding {
            max_err: t.max_err.is_finite().then_some(t.max_err),
            wrong: t.wrong,
            note: t.note,
            time_us: t.time_us,
            unsupported: false,
            device,
        },
        // Refused before anything was queued, and by all ranks alike; without NCCL there is no such
        // operation. Something else that is not there, like a kernel, is a failure.
        Err(e)
            if (e.is_unsupported() || case.by_nccl() && has_no_nccl() && e.is_unavailable())
                && options.backend != BackendKind::Host =>
        {
            let note = Some(e.to_string());
            Finding { note, unsupported: true, device, ..Finding::default() }
        }
        Err(e) => Finding { wrong: 1, note: Some(e.to_string()), device, ..Finding::default() },
    }
}
