//! Context-parallel attention of documents of which some ranks hold all: these attend once, to
//! their own keys, and others of the same launch twice.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Result, Rng, Shape};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOperand, AttnOut, AttnSaved, BiasShape,
    Dropout, Sequences,
};
use tilewire_ops::collective::CollectiveBackend;
use tilewire_ops::cp_attention::{
    CpAttentionDesc, CpAttentionPlan, CpConfig, KeyOrder, Layout, Strategy,
};
use tilewire_oracle::{Mat, attention};
use tilewire_symm::{Heap, HeapCfg, World, WorldCfg};
use tilewire_testing::{Lack, did_not_run};

use crate::checks::cfg;
use crate::team_ops::{heap, ranks, ranks_watched};
use crate::{DEVICES, calls};

const HEADS: (usize, usize) = (4, 2);
/// Probabilities and gradients are rounded to 16 bits on their way.
const SLACK: f64 = 1.0 / 32.0;

/// Documents in parts of a rank's `rows` rows, and which ranks see keys of others.
struct Documents {
    layout: Layout,
    seqs: Sequences,
    travels: Vec<bool>,
}

/// A document for rank 0, of whose rows the last ones are padding; one that ranks share; and one
/// for the last rank, if there are more than two. Causal: the first of those that share sees its
/// own keys alone.
fn shared(size: usize, rows: usize) -> Result<Documents> {
    let last = if size > 2 { size - 1 } else { size };
    // Of two ranks the first has the beginning of the shared document, too.
    let first = if size > 2 { rows } else { rows / 2 };
    let mut padded = vec![0, first, last * rows];
    padded.extend((last < size).then_some(size * rows));
    let mut cu = vec![0];
    for (i, p) in padded.windows(2).enumerate() {
        cu.push(cu[i] + p[1] - p[0] - if i == 0 { 3 } else { 0 });
    }
    let travels = (0..size).map(|r| if size > 2 { (2..last).contains(&r) } else { r == 1 });
    let travels = travels.collect();
    let seqs = Sequences::padded((&cu, &padded), (&cu, &padded))?;
    Ok(Documents { layout: Layout::Contiguous, seqs, travels })
}

/// A document for each of a rank's two chunks: nothing travels.
fn chunks(size: usize, rows: usize) -> Documents {
    let seqs = Sequences::batched(2 * size, rows / 2, rows / 2);
    Documents { layout: Layout::Zigzag, seqs, travels: vec![false; size] }
}

/// One document on all ranks, each of which sees keys of the ranks before it.
fn one(size: usize, rows: usize) -> Documents {
    let seqs = Sequences::one(size * rows, size * rows);
    Documents { layout: Layout::Zigzag, seqs, travels: vec![true; size] }
}

fn desc(d: &Documents, (dtype, dim): (DType, usize), extras: bool) -> CpAttentionDesc {
    let mut attn = AttentionDesc::new(d.seqs.tokens_q, HEADS, dim, dtype, AttnMask::CAUSAL);
    attn.sequences = d.seqs.clone();
    if extras {
        let (sq, skv) = d.seqs.longest();
        attn.bias = Some(BiasShape { heads: HEADS.0, sq, skv });
        (attn.softcap, attn.sink) = (Some(3.0), true);
        attn.dropout = Some(Dropout { p: 0.2, seed: 5 });
    }
    CpAttentionDesc { layout: d.layout, ..CpAttentionDesc::new(attn) }
}

/// Rows of a global tensor as elements of a type, and the values that they stand for.
struct Global {
    values: Mat,
    /// Of each row and head, for FP8: powers of two, so that values are exact.
    scales: Option<Mat>,
}

impl Global {
    fn random(rng: &mut Rng, (rows, heads, dim): (usize, usize, usize), dtype: DType) -> Self {
        let codes = Mat::random(rng, rows, heads * dim).rounded(dtype);
        let scales = dtype
            .is_fp8()
            .then(|| Mat::from_fn(rows, heads, |i, h| if (i + h) % 2 == 0 { 0.5 } else { 1.0 }));
        let of = |i: usize, c: usize| scales.as_ref().map_or(1.0, |s| s.at(i, c / dim));
        let values = Mat::from_fn(rows, heads * dim, |i, c| codes.at(i, c) * of(i, c));
        Self { values, scales }
    }

    /// The rows of a rank.
    fn operand(&self, rows: &[usize], heap: &Heap, dtype: DType) -> Result<AttnOperand> {
        let pick = |m: &Mat| Mat::from_fn(rows.len(), m.cols, |i, c| m.at(rows[i], c));
        let scales = self.scales.as_ref().map(pick);
        let mut codes = pick(&self.values);
        if let Some(s) = &scales {
            let dim = codes.cols / s.cols;
            codes = Mat::from_fn(rows.len(), codes.cols, |i, c| codes.at(i, c) / s.at(i, c / dim));
        }
        let place = |m: &Mat, t| {
            Tensor::from_f32(&m.to_f32(), t, Shape::d2(m.rows, m.cols))?.to(&heap.device())
        };
        let scales = scales.map(|s| place(&s, DType::F32)).transpose()?;
        Ok(AttnOperand { data: place(&codes, dtype)?, scales })
    }
}

/// The inputs of all ranks.
struct Case {
    q: Global,
    k: Global,
    v: Global,
    d_out: Global,
    bias: Option<Mat>,
    sink: Option<Vec<f64>>,
}

impl Case {
    fn new(d: &AttentionDesc) -> Self {
        let (rng, rows) = (&mut Rng::new(11), d.sequences.tokens_q);
        let [q, k, v] = [(HEADS.0, d.dqk), (HEADS.1, d.dqk), (HEADS.1, d.dv)]
            .map(|(heads, dim)| Global::random(rng, (rows, heads, dim), d.dtype));
        let d_out = Global::random(rng, (rows, HEADS.0, d.dv), d.out);
        let bias = d.bias.map(|b| Mat::random(rng, b.heads * b.sq, b.skv).rounded(DType::F32));
        let sink = d.sink.then(|| (0..HEADS.0).map(|h| h as f64 / 2.0 - 1.0).collect());
        Self { q, k, v, d_out, bias, sink }
    }

    /// Results and gradients of all rows.
    fn wants(&self, d: &AttentionDesc) -> (attention::AttnOut, attention::AttnGrads) {
        let mask = attention::AttnMask { left: d.mask.left, right: d.mask.right };
        let spec = attention::AttnSpec {
            softcap: d.softcap,
            dropout: d.dropout.map(|x| attention::Dropout { p: x.p, seed: x.seed }),
            ..attention::AttnSpec::new(HEADS.0, HEADS.1, d.dqk, mask)
        };
        let bias = d
            .bias
            .zip(self.bias.clone())
            .map(|(b, data)| attention::Bias::new(b.heads, b.sq, b.skv, data));
        let x = attention::AttnInputs {
            bias: bias.as_ref(),
            sink: self.sink.as_deref(),
            ..attention::AttnInputs::new(&self.q.values, &self.k.values, &self.v.values)
        };
        let s = &d.sequences;
        let s = attention::Sequences { q: s.q.clone(), kv: s.kv.clone() };
        let out = attention::attention(&spec, &x, &s);
        (out, attention::attention_bwd(&spec, &x, &s, &self.d_out.values))
    }
}

/// The tensors of a rank.
struct Tensors {
    rows: Vec<usize>,
    x: AttnInputs,
    out: AttnOut,
    d_out: Tensor,
    grads: AttnGrads,
}

impl Tensors {
    fn new(plan: &CpAttentionPlan, case: &Case, heap: &Heap) -> Result<Self> {
        let d = &plan.desc().attn;
        let rows: Vec<usize> = plan.rows_q(None).into_iter().flat_map(Range::into_iter).collect();
        let new = |t, rows, cols| Tensor::poisoned_on(&heap.device(), t, Shape::d2(rows, cols));
        let place = |values: &[f32]| {
            Tensor::from_f32(values, DType::F32, Shape::d1(values.len()))?.to(&heap.device())
        };
        let of = |g: &Global, t| g.operand(&rows, heap, t);
        let mut x =
            AttnInputs::new(of(&case.q, d.dtype)?, of(&case.k, d.dtype)?, of(&case.v, d.dtype)?);
        x.bias = case.bias.as_ref().map(|b| place(&b.to_f32())).transpose()?;
        let sink = case.sink.as_ref().map(|s| s.iter().map(|v| *v as f32).collect::<Vec<_>>());
        x.sink = sink.map(|s| place(&s)).transpose()?;
        let n = rows.len();
        let out =
            AttnOut { out: new(d.out, n, HEADS.0 * d.dv)?, lse: new(DType::F32, HEADS.0, n)? };
        let grads = AttnGrads::new(
            new(d.out, n, HEADS.0 * d.dqk)?,
            new(d.out, n, HEADS.1 * d.dqk)?,
            new(d.out, n, HEADS.1 * d.dv)?,
        );
        let d_out = of(&case.d_out, d.out)?.data;
        Ok(Self { rows, x, out, d_out, grads })
    }

    fn check(
        &self,
        what: &str,
        (out, grads): &(attention::AttnOut, attention::AttnGrads),
    ) -> Result<()> {
        let pick =
            |m: &Mat| Mat::from_fn(self.rows.len(), m.cols, |i, c| m.at(self.rows[i], c)).data;
        let lse = &out.lse;
        let lse = Mat::from_fn(lse.rows, self.rows.len(), |h, i| lse.at(h, self.rows[i])).data;
        for (name, got, want) in [
            ("out", &self.out.out, pick(&out.o)),
            ("lse", &self.out.lse, lse),
            ("dq", &self.grads.dq, pick(&grads.dq)),
            ("dk", &self.grads.dk, pick(&grads.dk)),
            ("dv", &self.grads.dv, pick(&grads.dv)),
        ] {
            let got = got.to_f32()?;
            let finite = want.iter().filter(|v| v.is_finite());
            let typical = (finite.map(|v| v * v).sum::<f64>() / want.len() as f64).sqrt();
            let right = |(g, w): (&f32, &f64)| {
                f64::from(*g) == *w || (f64::from(*g) - w).abs() <= SLACK * (w.abs() + typical)
            };
            let wrong = got.iter().zip(&want).position(|p| !right(p));
            assert_eq!(got.len(), want.len(), "{what}: {name}");
            assert_eq!(wrong.map(|i| (i, got[i], want[i])), None, "{what}: {name}");
        }
        Ok(())
    }
}

/// Fills the free memory of the heap with NaN, where the next plan has its buffers.
fn poison(heap: &Heap) -> Result<()> {
    let (free, _) = heap.usage();
    let free = heap.alloc(free / 2, "free")?;
    let (_, len) = free.address(heap.team().rank())?;
    free.tensor(DType::F32, Shape::d1(len / 4))?.poison()?;
    drop(free);
    heap.collect()
}

/// Leaves NaN wherever keys arrive if all rows are one document, which no bias is large enough for.
fn arrive_as_nan(plan: &CpAttentionPlan, t: &Tensors, s: &Stream) -> Result<()> {
    if t.x.bias.is_some() {
        return Ok(());
    }
    let rows = plan.desc().attn.sequences.tokens_q;
    let mut x = t.x.clone();
    x.sequences = Some(Sequences::one(rows, rows));
    for k in [&mut x.k, &mut x.v] {
        k.data = Tensor::poisoned_on(&k.data.device(), k.data.dtype(), k.data.shape())?;
    }
    plan.launch_fwd(s, &x, t.out.clone())?.join(s)?;
    s.synchronize()
}

/// Both passes, eager and replayed, with the bits of each other and the oracle's values; also to
/// an output that begins at an odd element. Rows that are not sent are NaN where they would arrive.
fn computes(d: CpAttentionDesc, config: CpConfig, (heap, s): (&Heap, &Stream)) -> Result<()> {
    let what = format!("{config} {d}, rank {}", heap.team().rank());
    let case = Case::new(&d.attn);
    poison(heap)?;
    let plan = CpAttentionPlan::new(d, heap, Some(config))?;
    plan.prepare(s)?;
    let t = Tensors::new(&plan, &case, heap)?;
    arrive_as_nan(&plan, &t, s)?;
    let launch = || -> Result<()> {
        plan.launch_fwd(s, &t.x, t.out.clone())?.join(s)?;
        let o = &t.out;
        let saved = AttnSaved { out: o.out.clone(), lse: o.lse.clone(), d_out: t.d_out.clone() };
        plan.launch_bwd(s, &t.x, saved, t.grads.clone())?.join(s).map(drop)
    };
    s.begin_capture()?;
    launch()?;
    let graph = s.end_capture()?.instantiate()?;
    let mut bits = Vec::new();
    for replay in [false, true, false] {
        [&t.out.out, &t.out.lse].into_iter().try_for_each(Tensor::poison)?;
        heap.team().agree(true)?;
        if replay {
            s.replay(&graph)?
        } else {
            launch()?
        }
        s.synchronize()?;
        heap.team().check()?;
        bits.push((t.out.out.download()?, t.out.lse.download()?));
    }
    assert_eq!(plan.explain().to_string().contains("wait for their keys"), config.gated, "{what}");
    // Kernels do not store to such an address; the merge does.
    let n = t.out.out.shape().num_elems();
    let odd = Tensor::poisoned_on(&heap.device(), plan.desc().attn.out, Shape::d1(n + 1))?;
    let odd = odd.rows(1, n)?.reshape(t.out.out.shape())?;
    heap.team().agree(true)?;
    let to = AttnOut { out: odd.clone(), lse: t.out.lse.clone() };
    let queued = plan.launch_fwd(s, &t.x, to).and_then(|p| p.join(s));
    if config.gated {
        // Refused before any rank knows of the launch: the next one is as good as the last.
        assert_eq!(queued.err().map(|e| e.kind()), Some(ErrorKind::InvalidArgument), "{what}");
        plan.launch_fwd(s, &t.x, t.out.clone())?.join(s)?;
    } else {
        queued?;
    }
    if plan.desc().attn.widened() != DType::F32 {
        // Kernels of matrix instructions do not read at such an address, and no rank knows of it.
        let d_out = odd.reshape(t.d_out.shape())?;
        let saved = AttnSaved { out: t.out.out.clone(), lse: t.out.lse.clone(), d_out };
        let e = plan.launch_bwd(s, &t.x, saved, t.grads.clone()).err();
        assert_eq!(e.map(|e| e.kind()), Some(ErrorKind::InvalidArgument), "{what}");
    }
    s.synchronize()?;
    heap.team().check()?;
    let last = if config.gated { &t.out.out } else { &odd };
    bits.push((last.download()?, t.out.lse.download()?));
    assert!(bits.iter().all(|b| *b == bits[0]), "{what}");
    t.check(&what, &case.wants(&plan.desc().attn))
}

#[test]
fn documents_of_one_rank_and_of_several_are_right() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let (heap, s) = heap(&world, "documents")?;
        let size = heap.team().size();
        let all = [shared(size, 24)?, chunks(size, 24)];
        // By matrix instructions, by plain kernels of one type, and widened from FP8.
        let kinds = [(DType::BF16, 64), (DType::BF16, 33), (DType::F8E4M3, 32), (DType::F32, 16)];
        for d in &all {
            for (i, kind) in kinds.into_iter().enumerate() {
                let strategies = [Strategy::AllGather, Strategy::Get, Strategy::Ring];
                let config = CpConfig::of(strategies[i % 3]);
                computes(desc(d, kind, i == 1), config, (&heap, &s))?;
            }
            for strategy in [Strategy::Get, Strategy::AllGather] {
                let config = CpConfig::of(strategy);
                computes(desc(d, (DType::F16, 64), true), config, (&heap, &s))?;
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The same by one kernel that waits for keys itself, and what it is not for.
#[test]
fn documents_are_right_where_tiles_wait_for_their_keys() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let (heap, s) = heap(&world, "documents")?;
        let size = heap.team().size();
        let gated = CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) };
        for d in [shared(size, 24)?, chunks(size, 24), one(size, 140)] {
            computes(desc(&d, (DType::BF16, 64), false), gated, (&heap, &s))?;
        }
        let d = shared(size, 24)?;
        computes(desc(&d, (DType::F16, 128), true), gated, (&heap, &s))?;
        for (dtype, dim) in [(DType::F32, 64), (DType::BF16, 40), (DType::F8E4M3, 64)] {
            let plan = CpAttentionPlan::new(desc(&d, (dtype, dim), false), &heap, Some(gated))?;
            let e = plan.prepare(&s).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        }
        let get = CpConfig { strategy: Strategy::Get, ..gated };
        let bad = CpAttentionPlan::new(desc(&d, (DType::BF16, 64), false), &heap, Some(get));
        assert_eq!(bad.err().map(|e| e.kind()), Some(ErrorKind::InvalidArgument));
        Ok(())
    })
    .unwrap();
}

/// A plan that is free to choose takes gates where every rank has a device of its own with a kernel
/// for them, and only there; what the kernel does not take it computes without them.
#[test]
fn plans_that_may_choose_take_gates_where_each_rank_has_a_device() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| chooses(&world, true)).unwrap();
    // The last rank is on the first one's device, and a team of some of them does not see that.
    World::run_threads(n + 1, cfg(), |world| chooses(&world, false)).unwrap();
}

/// `alone`: each rank of the world has a device.
fn chooses(world: &World, alone: bool) -> Result<()> {
    let kinds = [(DType::BF16, 64, true), (DType::BF16, 40, false), (DType::F8E4M3, 64, false)];
    let some: Vec<_> = Rank::all(2).collect();
    let Some(team) =
        (if alone { Some(world.everyone("chosen")?) } else { world.team(&some, "chosen")? })
    else {
        return Ok(());
    };
    let heap = team.heap(BackendKind::Vmm, HeapCfg::new(64 << 20))?;
    let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
    let s = Stream::on(&ctx)?;
    // Emulated devices of 4 multiprocessors take none of the kernels for sm_90a by default.
    let gates = alone && ctx.arch()? == "sm_90a" && ctx.num_sms()? >= 8;
    // Equal work on all ranks, so that no heads are traded for it.
    let d = one(team.size(), 140);
    for (dtype, dim, fits) in kinds {
        for backend in [CollectiveBackend::Put, CollectiveBackend::Fastest] {
            let desc = desc(&d, (dtype, dim), false);
            let case = Case::new(&desc.attn);
            let plan = CpAttentionPlan::with_backend(desc, &heap, None, backend)?;
            plan.prepare(&s)?;
            plan.prepare(&s)?;
            let (text, config) = (plan.explain().to_string(), plan.config()?);
            assert_eq!(config.gated, gates && fits && !text.contains("by NCCL"), "{text}");
            assert_eq!(text.contains("wait for their keys"), config.gated, "{text}");
            assert_eq!(text.contains("all_gather gated"), gates && fits, "{text}");
            assert!(text.contains(&format!("* {config}")), "{text}");
            let t = Tensors::new(&plan, &case, &heap)?;
            [&t.out.out, &t.out.lse].into_iter().try_for_each(Tensor::poison)?;
            plan.launch_fwd(&s, &t.x, t.out.clone())?.join(&s)?;
            let o = &t.out;
            let saved =
                AttnSaved { out: o.out.clone(), lse: o.lse.clone(), d_out: t.d_out.clone() };
            plan.launch_bwd(&s, &t.x, saved, t.grads.clone())?.join(&s)?;
            s.synchronize()?;
            heap.team().check()?;
            t.check(&text, &case.wants(&plan.desc().attn))?;
            drop(plan);
            heap.collect()?;
        }
    }
    Ok(())
}

/// Tiles enough for all multiprocessors that a launch takes, which leaves one free, with every rank
/// a little later than the one before it: each holds them while it waits for keys of the others,
/// and keys must leave it meanwhile. Eager launches enter together, so that replays show it better.
/// (Two H200 passed it at 8be9f69, where a launch took all: copies need none.)
#[test]
fn keys_leave_a_rank_whose_tiles_wait_on_its_multiprocessors() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..cfg() };
    World::run_threads(n, cfg, |world| {
        let (heap, s) = heap(&world, "held")?;
        let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
        // A tile of 128 queries of a head for each multiprocessor, of each rank.
        let tiles = (ctx.num_sms()? as usize).div_ceil(HEADS.0) + 1;
        let d = one(n, 128 * tiles);
        let config = CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) };
        let desc = desc(&d, (DType::BF16, 64), false);
        let case = Case::new(&desc.attn);
        let plan = CpAttentionPlan::new(desc, &heap, Some(config))?;
        plan.prepare(&s)?;
        let t = Tensors::new(&plan, &case, &heap)?;
        let launch = || plan.launch_fwd(&s, &t.x, t.out.clone())?.join(&s).map(drop);
        s.begin_capture()?;
        launch()?;
        let graph = s.end_capture()?.instantiate()?;
        let mut bits = Vec::new();
        for replay in [false, true, false, true] {
            [&t.out.out, &t.out.lse].into_iter().try_for_each(Tensor::poison)?;
            heap.team().agree(true)?;
            if !replay {
                std::thread::sleep(Duration::from_millis(20 * heap.team().rank().idx() as u64));
            }
            if replay {
                s.replay(&graph)?
            } else {
                launch()?
            }
            s.synchronize()?;
            heap.team().check()?;
            bits.push((t.out.out.download()?, t.out.lse.download()?));
        }
        assert!(bits.iter().all(|b| *b == bits[0]));
        assert!(t.out.out.to_f32()?.iter().all(|x| x.is_finite()));
        Ok(())
    })
    .unwrap();
}

/// A plan in the canonical order: layout, offsets of queries and of keys, mask.
type Canonical<'a> = (Layout, &'a [usize], &'a [usize], AttnMask);

/// In the canonical order every row has the same bits of out and lse on one, two and all ranks,
/// also where a window ends inside of tiles, and where keys have other sequences than queries. What
/// would cut tiles is refused on all ranks alike.
#[test]
fn rows_have_the_same_bits_on_any_number_of_ranks() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    // Chunks of a multiple of 128 rows on all of them.
    let rows = 256 * n * (1 + n % 2);
    let (cu, causal) = (&[0, 128, rows][..], AttnMask::CAUSAL);
    same_bits_on_any_ranks(n, (Layout::Zigzag, cu, cu, causal), Some(&[0, 130, rows]));
    for (cu_q, cu_kv, mask) in [
        ([0, 128, rows], [0, 128, rows], AttnMask::window(150, 70)),
        ([0, 128, rows], [0, rows - 130, rows], causal),
        ([0, rows - 129, rows], [0, 128, rows], AttnMask::window(100, 0)),
    ] {
        same_bits_on_any_ranks(n, (Layout::Contiguous, &cu_q, &cu_kv, mask), None);
    }
}

/// `cut`: offsets that are refused.
fn same_bits_on_any_ranks(n: usize, plan: Canonical<'_>, cut: Option<&[usize]>) {
    let (layout, cu_q, cu_kv, mask) = plan;
    let rows = cu_q[cu_q.len() - 1];
    let mut sizes = vec![1, 2, n];
    sizes.dedup();
    let config =
        CpConfig { gated: true, order: KeyOrder::Canonical, ..CpConfig::of(Strategy::AllGather) };
    let of = |q: &[usize], kv: &[usize]| -> Result<CpAttentionDesc> {
        let seqs = Sequences::packed(q, kv)?;
        let d = Documents { layout, seqs, travels: Vec::new() };
        let mut d = desc(&d, (DType::BF16, 64), false);
        d.attn.mask = mask;
        Ok(d)
    };
    // Of each number of ranks, the bits of each row.
    let all: Mutex<BTreeMap<(usize, usize), Vec<u8>>> = Mutex::default();
    World::run_threads(n, cfg(), |world| {
        for &size in &sizes {
            let members: Vec<_> = Rank::all(size).collect();
            let Some(team) = world.team(&members, &format!("canonical {size}"))? else { continue };
            let heap = team.heap(BackendKind::Vmm, HeapCfg::new(64 << 20))?;
            let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
            let s = Stream::on(&ctx)?;
            if let Some(cu) = cut {
                let cut = CpAttentionPlan::new(of(cu, cu)?, &heap, Some(config))?;
                cut.prepare(&s)?;
                let case = Case::new(&cut.desc().attn);
                let t = Tensors::new(&cut, &case, &heap)?;
                let e = cut.launch_fwd(&s, &t.x, t.out.clone()).map(drop).unwrap_err();
                let whole = e.to_string().contains("whole");
                assert!(e.kind() == ErrorKind::InvalidArgument && whole, "{e}");
            }
            heap.collect()?;
            let plan = CpAttentionPlan::new(of(cu_q, cu_kv)?, &heap, Some(config))?;
            plan.prepare(&s)?;
            let case = Case::new(&plan.desc().attn);
            let t = Tensors::new(&plan, &case, &heap)?;
            plan.launch_fwd(&s, &t.x, t.out.clone())?.join(&s)?;
            s.synchronize()?;
            let (out, lse) = (t.out.out.download()?, t.out.lse.to_vec::<f32>()?);
            let (num, width) = (t.rows.len(), out.len() / t.rows.len());
            let mut all = all.lock().unwrap();
            for (i, row) in t.rows.iter().enumerate() {
                let lse = (0..HEADS.0).flat_map(|h| lse[h * num + i].to_ne_bytes());
                let bits = out[i * width..][..width].iter().copied().chain(lse).collect();
                assert!(all.insert((size, *row), bits).is_none());
            }
        }
        Ok(())
    })
    .unwrap();
    let all = all.into_inner().unwrap();
    for row in 0..rows {
        let of = |size: usize| all.get(&(size, row)).unwrap_or_else(|| panic!("row {row}"));
        assert!(of(1) == of(2) && of(2) == of(n), "row {row}: its bits");
    }
}

/// On the idle driver, which notes the kernels that are launched.
#[test]
fn who_needs_no_other_keys_attends_once() {
    let Some(n) = ranks_watched() else { return };
    if std::env::var_os("TW_COUNTS").is_none() {
        return did_not_run(Lack::Watch, "it needs the idle driver, which notes all kernels");
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, cfg(), |world| {
        let (heap, s) = heap(&world, "documents")?;
        let me = heap.team().rank().idx();
        for d in [shared(n, 256)?, chunks(n, 256)] {
            for kind in [(DType::BF16, 64), (DType::BF16, 33), (DType::F8E4M3, 32)] {
                for strategy in [Strategy::AllGather, Strategy::Get, Strategy::Ring] {
                    let desc = desc(&d, kind, false);
                    let case = Case::new(&desc.attn);
                    let what = format!("{strategy:?} {desc}, rank {me}");
                    let plan = CpAttentionPlan::new(desc, &heap, Some(CpConfig::of(strategy)))?;
                    plan.prepare(&s)?;
                    let t = Tensors::new(&plan, &case, &heap)?;
                    let mut done = Ok(());
                    let seen = calls::noted(".kernels", || {
                        done = plan.launch_fwd(&s, &t.x, t.out.clone()).map(drop);
                    });
                    done.and_then(|()| s.synchronize())?;
                    let num = |word: &str| seen.iter().filter(|k| k.contains(word)).count();
                    let want = if d.travels[me] { (2, 1) } else { (1, 0) };
                    assert_eq!((num("attn_fwd"), num("merge")), want, "{what}: {seen:?}");
                    println!("{what}: {} kernels", seen.len());
                    let (out, lse) = (t.out.out.clone(), t.out.lse.clone());
                    let saved = AttnSaved { out, lse, d_out: t.d_out.clone() };
                    let mut done = Ok(());
                    let seen = calls::noted(".kernels", || {
                        done = plan.launch_bwd(&s, &t.x, saved, t.grads.clone()).map(drop);
                    });
                    done.and_then(|()| s.synchronize())?;
                    // Of its own keys, and of those of others.
                    let num = seen.iter().filter(|k| k.contains("attn_dkv")).count();
                    let want = 1 + usize::from(d.travels[me]);
                    assert_eq!(num, want, "{what}: {seen:?}");
                    println!("{what}, backward: {} kernels", seen.len());
                }
            }
        }
        Ok(())
    })
    .unwrap();
}
