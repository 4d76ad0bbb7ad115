//! The plan of AG+GEMM.

use std::sync::{Arc, OnceLock};

use tilewire_core::{DType, Error, Result};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::{Heap, LinkTraffic, Traffic};

use super::AgGemmDesc;
use super::device::{self, Prepared};
use super::host::Run;
use super::launch::{AgGemmInputs, Base, DATA};
use super::schedule::schedule;
use crate::common::bias_type;
use crate::common::lanes::Lane;
use crate::common::{
    Algo, Choice, Explain, Handoff, Machine, OverlapConfig, PlanCore, Via, apart, expect_tensor,
    only_meets, ring,
};
use crate::gemm::BOrder;

/// AG+GEMM with its gather buffer.
pub struct AgGemmPlan {
    base: Base,
    choice: Choice,
    machine: Machine,
    /// On a heap in device memory, made by `prepare`.
    device: OnceLock<Prepared>,
}

impl AgGemmPlan {
    /// Bytes of symmetric memory that a plan takes on each rank.
    pub fn memory(desc: &AgGemmDesc) -> usize {
        desc.m * desc.k * desc.x.size()
    }

    /// A plan on `heap`; `config` of `None` leaves the choice to `prepare`: what is predicted to be
    /// fastest for the slowest rank.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported`, `Unavailable` for the description or the algorithm;
    /// `Exhausted` if the heap is too small.
    pub fn new(desc: AgGemmDesc, heap: &Heap, config: Option<OverlapConfig>) -> Result<Self> {
        let size = heap.team().size();
        desc.check(size).map_err(|e| e.op("ag_gemm"))?;
        let choice = Choice::new(config, heap).map_err(|e| e.op("ag_gemm"))?;
        let slots = DATA + choice.max_chunks();
        let gather = heap.alloc(Self::memory(&desc), "ag_gemm")?;
        let signals = Arc::new(heap.team().signals(slots, "ag_gemm")?);
        let core =
            PlanCore::new("ag_gemm", heap, format_args!("{} {}", desc.common(), choice.text()))?
                .using([&gather], [&signals])
                .lanes_in_turn();
        let machine = Machine::of(&heap.device(), desc.x)?;
        let base = Base { desc, core, gather, signals };
        Ok(Self { base, choice, machine, device: OnceLock::new() })
    }

    /// Collective: must be called by all ranks before the first launch.
    ///
    /// # Errors
    /// `Mismatch` if the ranks' plans differ.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let team = self.base.core.team();
        let make = |lane: &Lane| Prepared::new(lane, &self.base.desc, self.choice.kernel());
        self.base.core.prepare_made(stream, (&self.device, make), || {
            self.base
                .core
                .choose(&self.choice, || explain(&self.base.desc, team.size(), &self.machine))?;
            let (Some(lane), Some(p)) = (self.base.core.lane(), self.device.get()) else {
                return Ok(());
            };
            p.agree(team)?;
            match self.config()?.via {
                Via::Nccl => p.connect(&self.base, lane, stream),
                Via::Puts => Ok(()),
            }
        })
    }

    /// The configuration in use.
    ///
    /// # Errors
    /// `NotPrepared` if the choice was left to `prepare`.
    pub fn config(&self) -> Result<OverlapConfig> {
        self.choice.get()
    }

    /// Candidates with their predicted times; on a device, once prepared, what makes the products.
    pub fn explain(&self) -> Explain {
        let mut e = explain(&self.base.desc, self.base.core.team().size(), &self.machine);
        e.chosen = self.choice.get().unwrap_or(e.chosen);
        if let Some(p) = self.device.get() {
            e.what = format!("{}\n{}", e.what, p.explain());
        }
        e
    }

    /// Returns what one launch with `m` rows moves from this rank to each peer.
    ///
    /// # Errors
    /// `InvalidArgument` if `m` does not fit the shards; `NotPrepared`.
    pub fn predict(&self, m: usize) -> Result<Traffic> {
        let team = self.base.core.team();
        let (me, size, config) = (team.rank().idx(), team.size(), self.choice.get()?);
        if config.via == Via::Nccl {
            return Ok(only_meets(team));
        }
        let s = config.sub_chunks;
        let rows = self.base.desc.shards.rows(m, size)?;
        let mut t = vec![LinkTraffic::default(); size];
        if config.algo == Algo::Ring {
            let row = self.base.desc.k * self.base.desc.x.size();
            t[ring::neighbours(team.rank(), size).1.idx()] = ring::sent(team.rank(), &rows, row, s);
            t.iter_mut().for_each(|link| link.signals += 1);
            t[me] = LinkTraffic::default();
            return Ok(t);
        }
        let mine = rows[me];
        for (_, link) in t.iter_mut().enumerate().filter(|(p, _)| *p != me) {
            link.puts = if self.base.desc.k == 0 { 0 } else { mine.min(s) as u64 };
            link.put_bytes = (mine * self.base.desc.k * self.base.desc.x.size()) as u64;
            link.signals = 1 + s as u64;
        }
        Ok(t)
    }

    fn check_inputs(&self, t: &AgGemmInputs, m: usize, mine: usize) -> Result<()> {
        let (d, e) = (&self.base.desc, &self.base.desc.epilogue);
        expect_tensor("x", &t.x, d.x, &[mine, d.k])?;
        match d.w_order {
            BOrder::Nk => expect_tensor("w", &t.w, d.w, &[d.n, d.k])?,
            BOrder::Kn => expect_tensor("w", &t.w, d.w, &[d.k, d.n])?,
        }
        expect_tensor("out", &t.out, d.out, &[m, e.activation.out_cols(d.n)])?;
        let aux = [m, e.activation.aux_cols(d.n)];
        for (what, want, t, dtype, shape) in [
            ("bias", e.bias, &t.bias, bias_type(t.bias.as_ref(), d.out), &[d.n][..]),
            ("aux_in", e.activation.reads_aux(), &t.aux_in, d.out, &aux[..]),
            ("aux_out", e.aux, &t.aux_out, d.out, &aux[..]),
        ] {
            match t {
                Some(t) if want => expect_tensor(what, t, dtype, shape)?,
                None if !want => {}
                _ => {
                    return Err(Error::invalid(format!("`{what}` and the epilogue do not agree"))
                        .expected(if want { "a tensor" } else { "none" })
                        .seen(if want { "none" } else { "a tensor" }));
                }
            }
        }
        if let Some(s) = &t.scale {
            expect_tensor("scale", s, DType::F32, &[1])?;
        }
        if let Some(g) = &t.gathered {
            expect_tensor("gathered", g, d.x, &[m, d.k])?;
        }
        apart(
            &[
                ("out", Some(&t.out)),
                ("aux_out", t.aux_out.as_ref()),
                ("gathered", t.gathered.as_ref()),
            ],
            &[
                ("x", Some(&t.x)),
                ("w", Some(&t.w)),
                ("bias", t.bias.as_ref()),
                ("scale", t.scale.as_ref()),
                ("aux_in", t.aux_in.as_ref()),
            ],
        )
    }

    /// Queues the operation for `m` rows in all (at most the plan's).
    ///
    /// # Errors
    /// `NotPrepared`, `InvalidArgument` for tensors that do not fit, the fault of the team.
    pub fn launch(
        &self,
        stream: &Stream,
        m: usize,
        t: AgGemmInputs,
    ) -> Result<Pending<AgGemmInputs>> {
        let team = self.base.core.team();
        if m > self.base.desc.m {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .op("ag_gemm")
                .expected(format_args!("at most {}", self.base.desc.m))
                .seen(m));
        }
        let rows = self.base.desc.shards.rows(m, team.size()).map_err(|e| e.op("ag_gemm"))?;
        self.check_inputs(&t, m, rows[team.rank().idx()]).map_err(|e| e.op("ag_gemm"))?;
        let config = self.choice.get().map_err(|e| e.op("ag_gemm"))?;
        let whole = self.base.desc.epilogue.activation.pairs_columns();
        let tasks = schedule(team.rank(), &rows, self.base.desc.n, &config, whole);
        if let Some(lane) = self.base.core.lane() {
            let job = device::Job {
                base: &self.base,
                prepared: self.device.get(),
                m,
                rows: &rows,
                tasks: &tasks,
                config,
            };
            let launch = || device::launch(lane, stream, &job, t);
            return stream.in_launch(launch).map_err(|e| e.op("ag_gemm"));
        }
        let launch = self.base.core.begin(stream, format_args!("m={m}"))?;
        let seq = launch.ctx.seq();
        let run = Arc::new(Run {
            launch,
            desc: self.base.desc.clone(),
            config,
            rows,
            tasks,
            gather: self.base.gather.clone(),
            signals: self.base.signals.clone(),
            came: Handoff::new(),
            t: t.clone(),
        });
        let (copies, compute, poison) = (run.clone(), run.clone(), t.clone());
        self.base.core.run(
            stream,
            move || copies.copies(),
            move || compute.compute(),
            move || {
                for o in [Some(&poison.out), poison.aux_out.as_ref(), poison.gathered.as_ref()] {
                    o.map(Tensor::poison).transpose().ok();
                }
            },
            seq,
        )?;
        Pending::new(t, stream, Some(team.fault().clone()))
    }
}

fn explain(d: &AgGemmDesc, size: usize, machine: &Machine) -> Explain {
    let wire = (AgGemmPlan::memory(d) * (size - 1)) as f64 / size as f64;
    let product = ([d.m, d.n, d.k], d.n * d.k * d.w.size());
    Explain::predict(format!("ag_gemm {d}"), product, wire, size, machine)
}
