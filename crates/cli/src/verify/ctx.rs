//! The context of a case on one rank: team, streams, random numbers, results.

use std::time::Instant;

use tilewire::core::Rng;
use tilewire::core::numerics::{Bound, compare};
use tilewire::device::Device;
use tilewire::ops::ag_gemm::AgGemmInputs;
use tilewire::ops::bulk::BulkInputs;
use tilewire::ops::gemm::{GemmInputs, Operand};
use tilewire::ops::gemm_rs::GemmRsInputs;
use tilewire::prelude::*;
use tilewire::symm::{DeviceTransport, Traffic, Transport};
use tilewire_oracle::Mat;

use super::{Case, Options};

/// Outcome of a case on one rank.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Largest absolute error.
    pub max_err: f64,
    /// Wrong elements and failed checks.
    pub wrong: u64,
    /// The first of them in words.
    pub note: Option<String>,
    /// Time of the last launch in microseconds.
    pub time_us: f64,
}

/// One rank's side of a case: its own team, heap and stream.
pub struct Ctx {
    /// The team of all ranks, made for this case.
    pub team: LiveTeam,
    /// Its heap.
    pub heap: Heap,
    /// The caller's stream.
    pub stream: Stream,
    /// Equal on all ranks.
    pub rng: Rng,
    tally: Tally,
    tolerance: Option<(f64, f64)>,
}

impl Ctx {
    pub(super) fn new(world: &World, case: &Case, options: &Options) -> Result<Self> {
        let team = world.everyone("case")?;
        let heap = team.heap(options.backend, HeapCfg::new(heap_bytes(case, world.size())?))?;
        let tolerance = (options.atol.is_some() || options.rtol.is_some())
            .then(|| (options.atol.unwrap_or(0.0), options.rtol.unwrap_or(0.0)));
        Ok(Self {
            stream: match heap.device() {
                Device::Host => Stream::new("verify")?,
                Device::Cuda(ctx) => Stream::on(&ctx)?,
            },
            team,
            heap,
            rng: Rng::new(options.seed),
            tally: Tally::default(),
            tolerance,
        })
    }

    /// A random matrix, standard normal, rounded to `dtype`. Equal on all ranks.
    pub fn random(&mut self, rows: usize, cols: usize, dtype: DType) -> Mat {
        Mat::random(&mut self.rng, rows, cols).rounded(dtype)
    }

    /// A random matrix of small integers. Equal on all ranks.
    pub fn integers(&mut self, rows: usize, cols: usize, max: u32) -> Mat {
        Mat::random_ints(&mut self.rng, rows, cols, max)
    }

    /// Moves tensors to the heap's device.
    ///
    /// # Errors
    /// `Exhausted` if the device has not enough memory.
    pub fn place<T: Place>(&self, t: T) -> Result<T> {
        match self.heap.device() {
            Device::Host => Ok(t),
            device => t.place(&device),
        }
    }

    /// A matrix as a tensor of `dtype`, on the heap's device.
    ///
    /// # Errors
    /// As [`Ctx::place`].
    pub(super) fn tensor(&self, m: &Mat, dtype: DType) -> Result<Tensor> {
        self.place(tensor(m, dtype)?)
    }

    /// A poisoned tensor on the heap's device.
    ///
    /// # Errors
    /// As [`Ctx::place`].
    pub(super) fn poisoned(&self, dtype: DType, shape: Shape) -> Result<Tensor> {
        self.place(Tensor::poisoned(dtype, shape))
    }

    /// Name of the device that computes.
    pub fn device(&self) -> String {
        match self.heap.device() {
            Device::Host => "cpu".to_owned(),
            Device::Cuda(ctx) => ctx.name().unwrap_or_else(|_| "cuda".to_owned()),
        }
    }

    /// Notes a failed check.
    pub fn fail(&mut self, text: impl Into<String>) {
        self.tally.wrong += 1;
        self.tally.note.get_or_insert(text.into());
    }

    /// Notes a check.
    pub fn check(&mut self, ok: bool, text: impl FnOnce() -> String) {
        if !ok {
            self.fail(text());
        }
    }

    /// Compares every element with the reference under the rule of the design; `mag` is |A||B|.
    ///
    /// # Errors
    /// If the tensor is in use.
    pub fn compare(
        &mut self,
        what: &str,
        got: &Tensor,
        want: &Mat,
        mag: &Mat,
        bound: &Bound,
    ) -> Result<()> {
        let got = got.to_f32()?;
        if got.len() != want.data.len() {
            self.fail(format!("{what}: {} elements instead of {}", got.len(), want.data.len()));
            return Ok(());
        }
        let c = compare(&got, &want.data, |i| match self.tolerance {
            Some((atol, rtol)) => atol + rtol * want.data[i].abs(),
            None => bound.allowed(want.data[i], mag.data[i]),
        });
        // A NaN must stay visible.
        if c.max_err.is_nan() || c.max_err > self.tally.max_err {
            self.tally.max_err = c.max_err;
        }
        if let Some(i) = c.first_wrong {
            let text = format!("{what}: element {i} is {}, not {}", got[i], want.data[i]);
            self.tally.note.get_or_insert(text);
        }
        self.tally.wrong += c.num_wrong as u64;
        Ok(())
    }

    /// Demands bit equality.
    ///
    /// # Errors
    /// If a tensor is in use.
    pub fn same_bits(&mut self, what: &str, a: &Tensor, b: &Tensor) -> Result<()> {
        let same = a.read(|x| b.read(|y| x == y))??;
        self.check(same, || format!("{what}: bits differ"));
        Ok(())
    }

    /// Runs a launch to its end and notes its time.
    ///
    /// # Errors
    /// What the launch or its completion gives.
    pub fn timed<T>(&mut self, launch: impl FnOnce(&Stream) -> Result<Pending<T>>) -> Result<T> {
        let start = Instant::now();
        let out = launch(&self.stream)?.wait()?;
        self.tally.time_us = start.elapsed().as_secs_f64() * 1e6;
        Ok(out)
    }

    /// Demands that what moved since `before` is what the plan predicted.
    pub fn traffic(&mut self, what: &str, before: &Traffic, predicted: &Traffic) {
        let now = self.team.traffic();
        self.traffic_between(what, before, &now, predicted);
    }

    /// Demands that what moved from `before` to `now` is what the plan predicted.
    pub fn traffic_between(
        &mut self,
        what: &str,
        before: &Traffic,
        now: &Traffic,
        predicted: &Traffic,
    ) {
        for (p, ((b, n), want)) in before.iter().zip(now).zip(predicted).enumerate() {
            let got = tilewire::symm::LinkTraffic {
                puts: n.puts - b.puts,
                put_bytes: n.put_bytes - b.put_bytes,
                gets: n.gets - b.gets,
                get_bytes: n.get_bytes - b.get_bytes,
                signals: n.signals - b.signals,
            };
            self.check(got == *want, || {
                format!("{what}: to rank {p} moved {got:?}, predicted {want:?}")
            });
        }
    }

    pub(super) fn finish(mut self) -> Result<Tally> {
        // Everybody's launches have ended before counters are looked at.
        self.team.agree(true)?;
        let counters = match self.heap.device() {
            Device::Host => self.team.check_counters(),
            Device::Cuda(_) => DeviceTransport::new(&self.heap)?.check_counters(),
        };
        if let Err(e) = counters {
            self.fail(e.to_string());
        }
        Ok(self.tally)
    }
}

/// Bytes of a heap that is large enough for the case.
///
/// # Errors
/// `InvalidArgument` for sizes that describe nothing, or more than can be counted.
fn heap_bytes(case: &Case, size: usize) -> Result<usize> {
    /// Of each buffer: up to the next page of a device, and flags.
    const SPARE: usize = 16 << 20;
    let d = |n: &str| case.shape.get(n).copied().unwrap_or(1);
    let needed = match case.bare().split('/').next() {
        Some("ep") => Some(super::ep::heap_bytes(case, size)?),
        Some("cp_attention") => Some(super::cp_attention::heap_bytes(case, size)?),
        // Nothing moves between ranks.
        Some("gemm" | "grouped_gemm" | "permute" | "quant" | "attention") => Some(0),
        // Rows of all ranks, in f32, of two plans: twice, and staging of each rank.
        _ => [d("m") + size, d("n").max(d("k")).max(d("cols")).max(1), 64 * size]
            .into_iter()
            .try_fold(1usize, usize::checked_mul),
    };
    let bytes = needed.and_then(|n| n.checked_add(SPARE));
    bytes.ok_or_else(|| Error::invalid(format!("{}: too large to count", case.shape_text())))
}

/// A matrix as a tensor of `dtype`.
///
/// # Errors
/// Never for a matrix whose data fits its shape.
pub(super) fn tensor(m: &Mat, dtype: DType) -> Result<Tensor> {
    Tensor::from_f32(&m.to_f32(), dtype, Shape::d2(m.rows, m.cols))
}

/// Tensors that a launch takes, as a whole.
pub trait Place: Sized {
    /// The same on `device`.
    ///
    /// # Errors
    /// `Exhausted` if the device has not enough memory.
    fn place(self, device: &Device) -> Result<Self>;
}

impl Place for Tensor {
    fn place(self, device: &Device) -> Result<Self> {
        self.to(device)
    }
}

impl<T: Place> Place for Option<T> {
    fn place(self, device: &Device) -> Result<Self> {
        self.map(|t| t.place(device)).transpose()
    }
}

impl Place for AgGemmInputs {
    fn place(self, d: &Device) -> Result<Self> {
        Ok(Self {
            x: self.x.place(d)?,
            w: self.w.place(d)?,
            bias: self.bias.place(d)?,
            scale: self.scale.place(d)?,
            aux_in: self.aux_in.place(d)?,
            out: self.out.place(d)?,
            aux_out: self.aux_out.place(d)?,
            gathered: self.gathered.place(d)?,
        })
    }
}

impl Place for GemmRsInputs {
    fn place(self, d: &Device) -> Result<Self> {
        Ok(Self {
            x: self.x.place(d)?,
            w: self.w.place(d)?,
            bias: self.bias.place(d)?,
            scale: self.scale.place(d)?,
            out: self.out.place(d)?,
        })
    }
}

impl Place for Operand {
    fn place(self, d: &Device) -> Result<Self> {
        let scales = self.scales.map(|(s, layout)| Ok::<_, Error>((s.place(d)?, layout)));
        Ok(Self { data: self.data.place(d)?, scales: scales.transpose()? })
    }
}

impl Place for GemmInputs {
    fn place(self, d: &Device) -> Result<Self> {
        Ok(Self {
            a: self.a.place(d)?,
            b: self.b.place(d)?,
            bias: self.bias.place(d)?,
            aux_in: self.aux_in.place(d)?,
            out: self.out.place(d)?,
            aux_out: self.aux_out.place(d)?,
            bgrad: self.bgrad.place(d)?,
        })
    }
}

impl Place for BulkInputs {
    fn place(self, d: &Device) -> Result<Self> {
        Ok(Self { gemm: self.gemm.place(d)?, m: self.m, x: self.x.place(d)?, y: self.y.place(d)? })
    }
}
