//! Cases of expert parallelism: layouts, dtypes, capacities, uneven tokens and experts, backward.

use tilewire::core::numerics::Bound;
use tilewire::device::Device;
use tilewire::ops::ep::{EpDesc, EpDispatch, EpHandle, EpLayout, EpPlan, EpTraffic};
use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::ep as oracle;
use tilewire_oracle::permute::TopK;

use super::{Case, Ctx, NCCL};

/// Rows are put directly to receive buffers in symmetric memory: expert-major, rank-major.
const ZERO_COPY: [&str; 2] = ["ep/zero_copy", "ep/zero_copy_rank"];
const VARIANTS: [&str; 7] = ["expert", "aligned", "rank", "flat", "drop", "uneven", "one"];

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    for variant in VARIANTS {
        for dtype in [DType::F32, DType::BF16] {
            let shape = [("tokens", 11), ("hidden", 12), ("experts", 9), ("top_k", 3)];
            v.push(Case::new(format!("ep/{variant}"), dtype, &shape, run));
        }
    }
    for variant in VARIANTS {
        let shape = [("tokens", 11), ("hidden", 12), ("experts", 9), ("top_k", 3)];
        v.push(Case::new(format!("{NCCL}/ep/{variant}"), DType::BF16, &shape, run));
    }
    let shape = [("tokens", 7), ("hidden", 16), ("experts", 5), ("top_k", 2)];
    v.push(Case::new(format!("{NCCL}/ep/flat"), DType::F8E4M3, &shape, run));
    v.push(Case::new("ep/expert", DType::F16, &shape, run));
    // Rows of several slices of the combine by bulk copies, whole ones and a short one.
    let long = [("tokens", 11), ("hidden", 3592), ("experts", 9), ("top_k", 3)];
    v.push(Case::new("ep/expert", DType::BF16, &long, run));
    // By plain stores, and in pieces of 16 bytes.
    for name in ZERO_COPY {
        for (dtype, hidden) in [(DType::BF16, 13), (DType::F32, 12), (DType::F8E4M3, 16)] {
            let shape = [("tokens", 11), ("hidden", hidden), ("experts", 9), ("top_k", 3)];
            v.push(Case::new(name, dtype, &shape, run));
        }
    }
    v.push(Case::new("ep/rank", DType::F8E4M3, &shape, run));
    v.push(Case::new("ep/aligned", DType::F8E4M3, &shape, run));
    v.push(Case::new("ep/flat", DType::F8E4M3, &shape, run));
    v
}

/// Routing and data of one microbatch, equal on all ranks.
struct Batch {
    topks: Vec<TopK>,
    layout: oracle::EpLayout,
    x: Vec<Mat>,
    w: Vec<Mat>,
    d_out: Vec<Mat>,
}

fn batch(ctx: &mut Ctx, case: &Case, desc: &EpDesc, spec: &oracle::EpSpec, variant: &str) -> Batch {
    let (size, k, h) = (ctx.team.size(), desc.top_k, desc.hidden);
    let tokens: Vec<usize> = (0..size)
        .map(|r| match (variant, r) {
            // One rank has no token at all, the others differ.
            ("uneven", 0) => 0,
            ("uneven", _) => 1 + ctx.rng.below(desc.max_tokens as u64) as usize,
            ("one", _) => 1,
            _ => desc.max_tokens,
        })
        .collect();
    let num = desc.num_experts();
    let topks: Vec<TopK> = tokens
        .iter()
        .map(|&t| match variant {
            // Everybody to the same experts.
            "one" => TopK::new(t, k, (0..t * k).map(|i| (i % k) as i64).collect()),
            _ => TopK::random(&mut ctx.rng, (t, k), num, 0.15),
        })
        .collect();
    let layout = oracle::EpLayout::new(spec, &topks);
    let x = tokens.iter().map(|&t| ctx.random(t, h, case.dtype)).collect();
    let w = tokens.iter().map(|&t| ctx.random(t, k, DType::F32)).collect();
    let d_out = tokens.iter().map(|&t| ctx.random(t, h, desc.out)).collect();
    Batch { topks, layout, x, w, d_out }
}

/// Symmetric memory of a case on a heap of `size` ranks.
///
/// # Errors
/// `InvalidArgument` for sizes that no layer has.
pub(super) fn heap_bytes(case: &Case, size: usize) -> Result<usize> {
    let d = describe(size, case);
    d.check(size)?;
    let m = EpPlan::memory(&d);
    // Each batch has rows of its own, and each gradient without weights does.
    let straight = 2 * (m.received + m.expert_out);
    Ok(m.symmetric + if ZERO_COPY.contains(&case.bare()) { straight } else { 0 })
}

fn variant(case: &Case) -> &str {
    case.bare().split('/').nth(1).unwrap_or("expert")
}

fn describe(size: usize, case: &Case) -> EpDesc {
    let variant = variant(case);
    let mut d = EpDesc::new(
        size,
        case.dim("experts"),
        case.dim("tokens"),
        case.dim("hidden"),
        case.dim("top_k"),
    );
    d.dtype = case.dtype;
    d.out = if case.dtype.is_fp8() { DType::BF16 } else { case.dtype };
    d.num_scales = if case.dtype.is_fp8() { 2 } else { 0 };
    let align = if variant == "aligned" { 4 } else { 1 };
    d.layout = match variant {
        "rank" | "zero_copy_rank" => EpLayout::RankMajor { align: 2 },
        "flat" => EpLayout::Flat { align },
        _ => EpLayout::ExpertMajor { align },
    };
    if variant == "uneven" {
        // All experts but one at the last rank; the first has one.
        let all = d.num_experts();
        d.experts_per_rank = vec![0; size];
        d.experts_per_rank[0] = 1;
        d.experts_per_rank[size - 1] += all - 1;
    }
    d.capacity = d.worst_case();
    if variant == "drop" {
        d.capacity = (size * d.max_tokens * d.top_k) / (2 * size).max(3);
    }
    d
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (variant, desc) = (variant(case), describe(ctx.team.size(), case));
    let spec = oracle::EpSpec {
        experts_per_rank: desc.experts_per_rank.clone(),
        align: desc.layout.align(),
        capacity: Some(desc.capacity),
    };
    let plan = EpPlan::with_backend(desc.clone(), &ctx.heap, case.backend())?;
    plan.prepare(&ctx.stream)?;
    // Two microbatches in flight: both routed and dispatched before the first is combined.
    let batches =
        [batch(ctx, case, &desc, &spec, variant), batch(ctx, case, &desc, &spec, variant)];
    let mut flying = Vec::new();
    for b in &batches {
        flying.push(forward(ctx, &plan, b, ZERO_COPY.contains(&case.bare()))?);
    }
    for (b, (handle, recv)) in batches.iter().zip(&flying) {
        finish(ctx, &plan, b, (handle, recv), ZERO_COPY.contains(&case.bare()))?;
    }
    Ok(())
}

fn idx_tensor(ctx: &Ctx, t: &TopK) -> Result<Tensor> {
    let shape = Shape::d2(t.num_tokens, t.k);
    // Both index types are accepted; ranks may even differ.
    if ctx.team.rank().idx().is_multiple_of(2) {
        return ctx.place(Tensor::from_slice(&t.idx, shape)?);
    }
    ctx.place(Tensor::from_slice(&t.idx.iter().map(|&i| i as i32).collect::<Vec<_>>(), shape)?)
}

/// Returns what the plan predicts for each phase; on devices kernels move the rows, and nobody
/// counts them.
fn predicted(ctx: &Ctx, plan: &EpPlan, handle: &EpHandle) -> Result<Option<EpTraffic>> {
    match ctx.heap.device() {
        Device::Host => plan.predict(handle).map(Some),
        Device::Cuda(_) => Ok(None),
    }
}

fn mat_1(v: &[f64]) -> Mat {
    Mat::new(v.len(), 1, v.to_vec())
}

/// Poison where the rows of a dispatch will be.
fn recv_x(ctx: &Ctx, plan: &EpPlan, straight: bool) -> Result<Tensor> {
    let d = plan.desc();
    if !straight {
        return ctx.poisoned(d.dtype, Shape::d2(d.recv_rows(), d.hidden));
    }
    let x = plan.zero_copy_recv()?;
    x.poison().map(|()| x)
}

/// A routing of the batch; its counts are those of the oracle.
fn routed(ctx: &mut Ctx, plan: &EpPlan, b: &Batch) -> Result<EpHandle> {
    let me = ctx.team.rank().idx();
    let handle = plan.handle()?;
    let idx = idx_tensor(ctx, &b.topks[me])?;
    ctx.timed(|s| plan.route(s, &idx, None, &handle))?;
    let rank = &b.layout.ranks[me];
    let as_i64 = |v: &[usize]| v.iter().map(|&x| x as i64).collect::<Vec<_>>();
    let splits = handle.m_splits().to_vec::<i64>()?;
    ctx.check(splits == as_i64(&rank.m_splits()), || format!("m_splits {splits:?}"));
    let total = handle.total().to_vec::<i64>()?;
    ctx.check(total == as_i64(&[rank.total_padded()]), || format!("total {total:?}"));
    let dropped: Vec<usize> = b.layout.ranks.iter().map(|r| r.overflow.iter().sum()).collect();
    let totals = handle.totals()?;
    ctx.check(totals.dropped == dropped, || format!("dropped {:?}", totals.dropped));
    ctx.check(totals.counts == rank.counts, || format!("counts {:?}", totals.counts));
    Ok(handle)
}

/// Scales that tell their row and column.
fn scales_of(x: &Mat, num: usize) -> Mat {
    Mat::from_fn(x.rows, num, |r, c| (100 * r + c) as f64 + x.at(r, 0))
}

fn forward(
    ctx: &mut Ctx,
    plan: &EpPlan,
    b: &Batch,
    straight: bool,
) -> Result<(EpHandle, EpDispatch)> {
    let (d, me) = (plan.desc().clone(), ctx.team.rank().idx());
    let before = ctx.team.traffic();
    let handle = routed(ctx, plan, b)?;
    let now = ctx.team.traffic();
    let rows = d.recv_rows();
    let recv = EpDispatch {
        x: recv_x(ctx, plan, straight)?,
        scales: (d.num_scales > 0)
            .then(|| ctx.poisoned(DType::F32, Shape::d2(rows, d.num_scales)))
            .transpose()?,
        weights: Some(ctx.poisoned(DType::F32, Shape::d1(d.capacity))?),
    };
    let (x, w) = (ctx.tensor(&b.x[me], d.dtype)?, ctx.tensor(&b.w[me], DType::F32)?);
    let scales = (d.num_scales > 0).then(|| scales_of(&b.x[me], d.num_scales));
    let scales = scales.map(|s| ctx.tensor(&s, DType::F32)).transpose()?;
    ctx.timed(|s| plan.dispatch(s, &handle, &x, (Some(&w), scales.as_ref()), &recv))?;
    if let Some(p) = predicted(ctx, plan, &handle)? {
        ctx.traffic_between("ep_route", &before, &now, &p.route);
        ctx.traffic("ep_dispatch", &now, &p.dispatch);
    }
    check_received(ctx, b, &d, &recv)?;
    if !matches!(d.layout, EpLayout::ExpertMajor { .. }) {
        let flat = &oracle::flat(&b.layout)[me];
        let fixed: Vec<usize> = fixed_rows(&flat.rows, d.max_tokens).collect();
        let place = |w: usize| match d.layout {
            EpLayout::Flat { .. } => w as i32,
            _ => fixed[w] as i32,
        };
        let want: Vec<i32> = flat.row_index.iter().map(|w| w.map_or(-1, place)).collect();
        let got = handle.row_index().to_vec::<i32>()?;
        ctx.check(got == want, || "row_index differs".to_owned());
    }
    Ok((handle, recv))
}

/// The rows of `x` that rank `me` receives: per copy, or per (token, rank).
fn gathered(b: &Batch, d: &EpDesc, x: &[Mat], me: usize) -> Mat {
    let rows = d.recv_rows();
    match d.layout {
        EpLayout::ExpertMajor { .. } => oracle::dispatch_to(&b.layout, x, me),
        EpLayout::Flat { .. } => {
            pad(&oracle::gather_copies(&oracle::flat(&b.layout)[me].rows, x), rows)
        }
        EpLayout::RankMajor { .. } => {
            let flat = &oracle::flat(&b.layout)[me].rows;
            let dense = oracle::gather_copies(flat, x);
            let mut out = Mat::zeros(rows, dense.cols);
            for (i, at) in fixed_rows(flat, d.max_tokens).enumerate() {
                out.row_mut(at).copy_from_slice(dense.row(i));
            }
            out
        }
    }
}

/// Rows, scales and weights of a dispatch are the oracle's.
fn check_received(ctx: &mut Ctx, b: &Batch, d: &EpDesc, recv: &EpDispatch) -> Result<()> {
    let me = ctx.team.rank().idx();
    let exact = |m: &Mat| (Mat::zeros(m.rows, m.cols), Bound::local(DType::F32, 1));
    // Behind the rows of all experts nothing is promised.
    let promised = match d.layout {
        EpLayout::ExpertMajor { .. } => b.layout.ranks[me].m_splits().iter().sum(),
        _ => d.recv_rows(),
    };
    let want = gathered(b, d, &b.x, me).slice_rows(0..promised);
    ctx.same_bits("dispatched x", &recv.x.rows(0, promised)?, &ctx.tensor(&want, d.dtype)?)?;
    if let Some(s) = &recv.scales {
        let scales: Vec<_> = b.x.iter().map(|x| scales_of(x, d.num_scales)).collect();
        let want = gathered(b, d, &scales, me).slice_rows(0..promised);
        let (mag, bound) = exact(&want);
        ctx.compare("dispatched scales", &s.rows(0, promised)?, &want, &mag, &bound)?;
    }
    if let Some(got) = &recv.weights {
        let want = mat_1(&oracle::dispatch_weights(&b.layout, &b.w)[me]);
        let (mag, bound) = exact(&want);
        ctx.compare("dispatched weights", got, &want, &mag, &bound)?;
    }
    Ok(())
}

fn pad(m: &Mat, rows: usize) -> Mat {
    Mat::vstack(&[m.clone(), Mat::zeros(rows - m.rows, m.cols)])
}

/// Poison where the gradient of expert outputs will be.
fn grad_y(ctx: &mut Ctx, plan: &EpPlan, straight: bool) -> Result<Tensor> {
    let d = plan.desc();
    if straight {
        match plan.zero_copy_grad() {
            Err(e) if e.is_unsupported() && matches!(d.layout, EpLayout::RankMajor { .. }) => {}
            dy => return dy.and_then(|dy| dy.poison().map(|()| dy)),
        }
    }
    ctx.poisoned(d.out, Shape::d2(d.capacity, d.hidden))
}

/// Combine, its backward, and the backward of dispatch, on random expert outputs.
fn finish(
    ctx: &mut Ctx,
    plan: &EpPlan,
    b: &Batch,
    (handle, recv): (&EpHandle, &EpDispatch),
    straight: bool,
) -> Result<()> {
    let (d, me) = (plan.desc().clone(), ctx.team.rank().idx());
    // Behind the rows of all experts nothing is promised.
    let promised = 0..b.layout.ranks[me].m_splits().iter().sum();
    let size = ctx.team.size();
    let y = expert_rows(ctx, b, &d);
    let y_t = whole(ctx, &y[me], &d)?;
    let tokens = b.x[me].rows;
    let bound = Bound { out: d.out, wire: d.out, acc: DType::F32, num_partials: size, k: d.top_k };
    let abs_y = abs(&y);
    for weighted in [false, true] {
        let w_t = weighted.then(|| recv.weights.clone()).flatten();
        let oracle_w = weighted.then_some(&b.w[..]);
        let before = ctx.team.traffic();
        let out = ctx.poisoned(d.out, Shape::d2(tokens, d.hidden))?;
        ctx.timed(|s| plan.combine(s, handle, &y_t, w_t.as_ref(), &out))?;
        if let Some(p) = predicted(ctx, plan, handle)? {
            ctx.traffic("ep_combine", &before, &p.combine);
        }
        let want = oracle::combine_at(&b.layout, &y, oracle_w, me);
        let abs_w = oracle_w.map(abs);
        let mag = oracle::combine_at(&b.layout, &abs_y, abs_w.as_deref(), me);
        ctx.compare("combine", &out, &want, &mag, &bound)?;

        let before = ctx.team.traffic();
        let dy = grad_y(ctx, plan, straight)?;
        let dw = ctx.poisoned(DType::F32, Shape::d1(d.capacity))?;
        let d_out = ctx.tensor(&b.d_out[me], d.out)?;
        let extra = w_t.as_ref().map(|w| (w, &y_t, &dw));
        ctx.timed(|s| plan.combine_bwd(s, handle, &d_out, extra, &dy))?;
        if let Some(p) = predicted(ctx, plan, handle)? {
            ctx.traffic("ep_combine_bwd", &before, &p.combine_bwd);
        }
        let (want_dy, want_dw) = oracle::combine_bwd_at(&b.layout, &y, oracle_w, &b.d_out, me);
        let want_dy = want_dy.slice_rows(promised.clone());
        let dy = dy.rows(promised.start, promised.end)?;
        let mag = want_dy.map(f64::abs);
        ctx.compare("combine_bwd", &dy, &want_dy, &mag, &Bound::local(d.out, 1))?;
        if weighted {
            let dw_home = dispatch_bwd(ctx, plan, b, (handle, &dw), &bound)?;
            if let Some(w) = &want_dw {
                let (abs_d, y) = (abs(&b.d_out), &abs_y);
                let mag = oracle::combine_bwd_at(&b.layout, y, oracle_w, &abs_d, me).1;
                let mag = mag.unwrap_or_else(|| w.clone());
                ctx.compare("dw", &dw_home, w, &mag, &Bound::local(DType::F32, d.hidden))?;
            }
        }
    }
    Ok(())
}

fn abs(m: &[Mat]) -> Vec<Mat> {
    m.iter().map(|m| m.map(f64::abs)).collect()
}

/// The backward of dispatch, on random gradients of the received rows. The gradients of weights,
/// which are per received row in `dw` and per (token, choice) in the oracle, at their tokens.
fn dispatch_bwd(
    ctx: &mut Ctx,
    plan: &EpPlan,
    b: &Batch,
    (handle, dw): (&EpHandle, &Tensor),
    bound: &Bound,
) -> Result<Tensor> {
    let (d, me) = (plan.desc().clone(), ctx.team.rank().idx());
    let (tokens, size) = (b.x[me].rows, ctx.team.size());
    let d_recv: Vec<Mat> = match d.layout {
        EpLayout::ExpertMajor { .. } => expert_rows(ctx, b, &d),
        _ => (0..size).map(|_| ctx.random(d.recv_rows(), d.hidden, d.out)).collect(),
    };
    let dx = ctx.poisoned(d.out, Shape::d2(tokens, d.hidden))?;
    let dw_home = ctx.poisoned(DType::F32, Shape::d2(tokens, d.top_k))?;
    let d_recv_t = match d.layout {
        EpLayout::ExpertMajor { .. } => whole(ctx, &d_recv[me], &d)?,
        _ => ctx.tensor(&d_recv[me], d.out)?,
    };
    let before = ctx.team.traffic();
    ctx.timed(|s| plan.dispatch_bwd(s, handle, (&d_recv_t, Some(dw)), (&dx, Some(&dw_home))))?;
    if let Some(p) = predicted(ctx, plan, handle)? {
        ctx.traffic("ep_dispatch_bwd", &before, &p.dispatch_bwd);
    }
    let home = |d_recv: &[Mat]| rows_home(&d, b, d_recv, me);
    ctx.compare("dispatch_bwd", &dx, &home(&d_recv), &home(&abs(&d_recv)), bound)?;
    Ok(dw_home)
}

/// Random rows of all experts on every rank, equal on all ranks; none behind the last expert's.
fn expert_rows(ctx: &mut Ctx, b: &Batch, d: &EpDesc) -> Vec<Mat> {
    let used = b.layout.ranks.iter().map(|r| r.m_splits().iter().sum());
    used.map(|rows| ctx.random(rows, d.hidden, d.out)).collect()
}

/// Such rows as a tensor of all rows that a plan has, poison behind them: nobody may read that.
fn whole(ctx: &Ctx, rows: &Mat, d: &EpDesc) -> Result<Tensor> {
    let t = Tensor::poisoned(d.out, Shape::d2(d.capacity, d.hidden));
    let bytes = rows.to_bytes(d.out);
    t.write(|b| b[..bytes.len()].copy_from_slice(&bytes))?;
    ctx.place(t)
}

/// Returns what the backward of dispatch gives rank `me`: the sum of the gradients of each token's
/// rows.
fn rows_home(d: &EpDesc, b: &Batch, d_recv: &[Mat], me: usize) -> Mat {
    if matches!(d.layout, EpLayout::ExpertMajor { .. }) {
        return oracle::combine_at(&b.layout, d_recv, None, me);
    }
    let rows: Vec<_> = oracle::flat(&b.layout).into_iter().map(|f| f.rows).collect();
    let used: Vec<Mat> = rows
        .iter()
        .zip(d_recv)
        .map(|(r, m)| match d.layout {
            EpLayout::RankMajor { .. } => dense(r, m, d.max_tokens),
            _ => m.slice_rows(0..r.len()),
        })
        .collect();
    let tokens: Vec<usize> = b.x.iter().map(|x| x.rows).collect();
    oracle::combine_copies_at(&rows, &used, &tokens, me)
}

/// The fixed slots of the tokens of a flat layout.
fn fixed_rows(
    flat: &[Option<oracle::TokenCopies>],
    max_tokens: usize,
) -> impl Iterator<Item = usize> {
    flat.iter().map(move |t| t.as_ref().map_or(0, |t| t.src * max_tokens + t.token))
}

/// Rows of the rank-major layout that hold records, in flat order.
fn dense(rows: &[Option<oracle::TokenCopies>], m: &Mat, max_tokens: usize) -> Mat {
    let mut out = Mat::zeros(rows.len(), m.cols);
    for (i, at) in fixed_rows(rows, max_tokens).enumerate() {
        out.row_mut(i).copy_from_slice(m.row(at));
    }
    out
}
