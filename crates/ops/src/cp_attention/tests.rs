//! The schedule, the byte counts, the errors at N ranks, validation. Numbers against the oracle:
//! `tilewire verify`; lost and repeated signals: `tests/protocol.rs`.

use proptest::prelude::*;
use tilewire_core::{BackendKind, DType, ErrorKind, Rank, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_oracle::{Mat, attention as oracle};
use tilewire_symm::{HeapCfg, Traffic, World, WorldCfg};

use super::explain::explain;
use super::pieces::tests::{World as Plans, fitted, worlds, worlds_of_fp8};
use super::pieces::{Pieces, Sizes};
use super::schedule::{Schedule, kv_heads};
use super::{Strategy, *};
use crate::attention::*;
use crate::common::Machine;

/// True if the definition lets these global rows see each other.
pub(super) fn allowed(s: &Sequences, mask: &AttnMask, q: usize, kv: usize) -> bool {
    let pairs = s.q.iter().zip(&s.kv);
    pairs.into_iter().any(|(sq, skv)| {
        let oracle = oracle::AttnMask { left: mask.left, right: mask.right };
        sq.contains(&q)
            && skv.contains(&kv)
            && oracle.sees(q - sq.start, kv - skv.start, sq.len(), skv.len())
    })
}

pub(super) fn seqs(lens: &[(usize, usize, usize)]) -> Sequences {
    let (mut q, mut kv, mut padded) = (vec![0], vec![0], (vec![0], vec![0]));
    for &(a, b, pad) in lens {
        q.push(q.last().unwrap() + a);
        kv.push(kv.last().unwrap() + b);
        padded.0.push(padded.0.last().unwrap() + a + pad);
        padded.1.push(padded.1.last().unwrap() + b + pad);
    }
    Sequences::padded((&q, &padded.0), (&kv, &padded.1)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Checks that over all ranks every (head, query, key) that the mask allows is computed exactly
    /// once, and no other; and that readers get the rows that owners expect them to get.
    #[test]
    fn every_visible_pair_once(
        lens in prop::collection::vec((0usize..12, 0usize..12, 0usize..3), 1..4),
        strategy in prop::sample::select(Strategy::NAMES.map(|(_, s)| s).to_vec()),
        layout in prop::sample::select(Layout::NAMES.map(|(_, l)| l).to_vec()),
        mask in (prop::option::of(0usize..6), prop::option::of(0usize..4)),
        grid in prop::sample::select(vec![(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (8, 4)]),
    ) {
        let (size, a2a_size) = grid;
        let s = fitted(layout, size, &seqs(&lens));
        let mask = AttnMask { left: mask.0, right: mask.1 };
        let shared = if size % 2 == 0 { 2 } else { 1 };
        let heads = (48, [48, 24, shared][lens.len() - 1]);
        let mut attn = AttentionDesc::new(1, heads, 4, DType::F32, mask);
        attn.sequences = s.clone();
        let d = CpAttentionDesc { layout, a2a_size, ..CpAttentionDesc::new(attn) };
        d.check(size).and_then(|()| strategy.check(&d, size)).unwrap();
        let (nq, nkv) = (s.tokens_q, s.tokens_kv);
        let mut done = vec![0u8; heads.0 * nq * nkv];
        let all: Vec<_> =
            Rank::all(size).map(|r| Schedule::new(&d, &s, strategy, r, size)).collect();
        for sch in &all {
            for owner in 0..sch.grid.outer {
                count(sch, owner, &mask, (nq, nkv), &mut done);
                let theirs = &all[owner * sch.grid.inner + sch.grid.at];
                prop_assert_eq!(&sch.needed[owner], &theirs.asked[sch.grid.group]);
            }
        }
        for (at, &n) in done.iter().enumerate() {
            let (q, kv) = (at / nkv % nq, at % nkv);
            prop_assert_eq!(n == 1, allowed(&s, &mask, q, kv), "head {} q {} kv {}: {}", at / nkv / nq, q, kv, n);
            prop_assert!(n <= 1);
        }
    }

    /// Rows of all ranks tile the tokens; chunk sizes differ by at most one.
    #[test]
    fn layouts_tile_the_rows(tokens in 0usize..100, size in 1usize..9) {
        for (_, layout) in Layout::NAMES {
            let one = |tokens| Sequences::one(tokens, tokens);
            let spans_of =
                |tokens, r| layout.rows_q(&one(tokens), &AttnMask::CAUSAL, r, size);
            let mut spans: Vec<_> =
                Rank::all(size).flat_map(|r| spans_of(tokens, r)).collect();
            spans.sort_by_key(|s| (s.start, s.end));
            let lens: Vec<usize> = spans.iter().map(|s| s.len()).collect();
            let even = lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 1;
            prop_assert!(even || layout == Layout::Balanced);
            let mut next = 0;
            for s in spans {
                prop_assert_eq!(s.start, next);
                next = s.end;
            }
            prop_assert_eq!(next, tokens);
            for fewer in [tokens, tokens / 2] {
                let most = layout.max_rows(tokens, size);
                let rows = |r| spans_of(fewer, r).iter().map(|s| s.len()).sum::<usize>();
                prop_assert!(Rank::all(size).all(|r| rows(r) <= most));
            }
        }
    }
}

/// Each rank has chunks `r` and `2 P - 1 - r` of every sequence, and of the padding behind it.
#[test]
fn a_zigzag_per_sequence_cuts_each_sequence() {
    let layout: Layout = "zigzag_per_sequence".parse().unwrap();
    // 8, 0 and 4 rows; the last has one row of padding.
    let s = Sequences::padded((&[0, 8, 8, 11], &[0, 8, 8, 12]), (&[0, 4, 8, 8], &[0, 4, 8, 8]));
    let s = s.unwrap();
    layout.check(&s, 2).unwrap();
    let rows = |r| layout.rows_q(&s, &AttnMask::FULL, Rank::new(r), 2).into_iter().flatten();
    assert_eq!(rows(0).collect::<Vec<_>>(), [0, 1, 6, 7, 8, 11]);
    assert_eq!(rows(1).collect::<Vec<_>>(), [2, 3, 4, 5, 9, 10]);
    let keys = layout.rows_kv(&s, &AttnMask::FULL, Rank::new(1), 2);
    assert_eq!(keys.into_iter().flatten().collect::<Vec<_>>(), [1, 2, 5, 6]);
}

/// A sequence that cannot be cut into equal chunks is named, by a description and by a launch.
#[test]
fn a_sequence_that_does_not_divide_is_named() {
    let layout = Layout::ZigzagPerSequence;
    let mut d = CpAttentionDesc { layout, ..desc(AttnMask::CAUSAL) };
    d.check(4).unwrap();
    d.check_launch(&Sequences::packed(&[0, 8, 32], &[0, 16, 24]).unwrap(), 4).unwrap();
    let odd = Sequences::packed(&[0, 8, 32], &[0, 16, 30]).unwrap();
    let e = d.check_launch(&odd, 4).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    let text = e.to_string();
    for part in ["sequence 1 of `kv`", "a multiple of 8", "14 rows"] {
        assert!(text.contains(part), "{text}");
    }
    d.attn.sequences = Sequences::one(60, 64);
    assert!(d.check(4).unwrap_err().to_string().contains("sequence 0 of `q`"));
    // One rank has all rows as they are.
    d.check_launch(&odd, 1).unwrap();
}

/// Counts the pairs that `sch` computes against the keys of `owner`.
fn count(
    sch: &Schedule,
    owner: usize,
    mask: &AttnMask,
    (nq, nkv): (usize, usize),
    done: &mut [u8],
) {
    let rule = oracle::AttnMask { left: mask.left, right: mask.right };
    for sl in &sch.slices[owner] {
        // Any length that puts the slice's last row inside will do: only the distance counts.
        let (sq, skv) = (1000i64, 1000 + sl.shift);
        for q in 0..sl.num_q {
            for kv in 0..sl.num_kv {
                if rule.sees(sl.i + q, sl.j + kv, sq as usize, skv as usize) {
                    for h in sch.first_head..sch.first_head + sch.dims.hq {
                        done[(h * nq + sl.q_pos + q) * nkv + sl.kv_pos + kv] += 1;
                    }
                }
            }
        }
    }
}

#[test]
fn key_heads_are_divided_or_shared() {
    assert_eq!(kv_heads(8, 4, 1), 2..4);
    assert_eq!([0, 1, 2, 3].map(|i| kv_heads(2, 4, i)), [0..1, 0..1, 1..2, 1..2]);
    assert_eq!(kv_heads(1, 8, 7), 0..1);
}

fn desc(mask: AttnMask) -> CpAttentionDesc {
    CpAttentionDesc {
        a2a_size: 2,
        ..CpAttentionDesc::new(AttentionDesc::new(64, (8, 4), 16, DType::BF16, mask))
    }
}

fn traffic(d: &CpAttentionDesc, strategy: Strategy, pass: Pass, me: u32) -> Traffic {
    let (me, size) = (Rank::new(me), 4);
    let sched = &Schedule::new(d, &d.attn.sequences, strategy, me, size);
    Pieces { sizes: &Sizes::new(d, strategy, size), sched, me }.traffic(pass)
}

/// Bytes from rank 1 to (or gotten from) each of four ranks, as the definitions say. 16 rows a
/// rank; a row of K and V has 4 x 32 bf16 = 256 bytes, of Q and of O 8 x 16 bf16 = 256 bytes.
#[test]
fn strategies_move_different_bytes() {
    let d = desc(AttnMask::FULL);
    let bytes = |s, pass| {
        let t = traffic(&d, s, pass, 1);
        (
            t.iter().map(|l| l.put_bytes).collect::<Vec<_>>(),
            t.iter().map(|l| l.get_bytes).collect::<Vec<_>>(),
        )
    };
    let (none, kv) = (vec![0; 4], 16 * 256);
    let f = |s| bytes(s, Pass::Forward);
    assert_eq!(f(Strategy::Get), (none.clone(), vec![kv, 0, kv, kv]));
    assert_eq!(f(Strategy::Ring), (vec![0, 0, 3 * kv, 0], none.clone()));
    assert_eq!(f(Strategy::AllGather), (vec![kv, 0, kv, kv], none.clone()));
    // A quarter of the heads of Q, K, V, O and the lse of two heads.
    let a2a = 16 * (64 + 64 + 64 + 2 * 4);
    assert_eq!(f(Strategy::AllToAll), (none.clone(), vec![a2a, 0, a2a, a2a]));
    // Half of the heads: of the keys of every rank, of Q, O and lse inside of the group (0).
    let (keys, inside) = (16 * 128, 16 * (128 + 128 + 4 * 4));
    let hybrid = vec![keys + inside, 0, keys, keys];
    assert_eq!(f(Strategy::Hybrid), (none.clone(), hybrid));
    // A rank receives as many bytes of keys as in a ring between the groups.
    assert_eq!(3 * keys, 16 * 128 + 32 * 128);
    // Backward: the owners get partial dK and dV in f32.
    let part = 16 * 512;
    let b = |s| bytes(s, Pass::Backward);
    let parts = |more| vec![part + more, 0, part + more, part + more];
    assert_eq!(b(Strategy::Get), (none.clone(), parts(kv)));
    assert_eq!(b(Strategy::Ring), (vec![0, 0, 3 * kv, 0], parts(0)));
    assert_eq!(b(Strategy::AllGather), (vec![kv, 0, kv, kv], parts(0)));
    // Q, dO, K, V, lse and delta there; dQ, dK, dV (whole sums, so in bf16) back.
    let a2a = 16 * (64 + 64 + 64 + 2 * 8) + 16 * (64 + 64);
    assert_eq!(b(Strategy::AllToAll), (none, vec![a2a, 0, a2a, a2a]));
}

/// Bytes that rank `r` takes from rank `p`, from the definitions of the strategies alone.
fn defined(w: &Plans, pass: Pass, r: usize, p: usize) -> usize {
    let (a, s, size) = (&w.d.attn, w.sizes.strategy, w.sizes.size);
    let inner = s.inner(&w.d, size);
    let (hq, hkv) = (a.heads_q / inner, kv_heads(a.heads_kv, inner, r % inner).len());
    let head = |dims: &[usize], t: DType| -> usize {
        let scale = if t.is_fp8() { 4 } else { 0 };
        dims.iter().map(|d| d * t.size() + scale).sum()
    };
    let keys = head(&[a.dqk, a.dv], w.d.kv_wire().0);
    // Rows of keys of rank `owner` that one of these ranks needs.
    let needed = |readers: &[usize], owner: usize| -> usize {
        w.wanted(readers, owner).into_iter().filter(|wanted| *wanted).count()
    };
    let mut bytes = match s {
        // From the rank before me, of the keys of each other rank what I need, and the ranks behind
        // me up to that one.
        Strategy::Ring if (p + 1) % size == r => {
            let passes = |n: usize| (0..n).map(|i| (r + i) % size).collect::<Vec<_>>();
            let from = |n: usize| needed(&passes(n), (r + n) % size) * a.heads_kv * keys;
            (1..size).map(from).sum()
        }
        Strategy::Ring => 0,
        _ => needed(&[r], p) * hkv * keys,
    };
    let (mine, theirs) = (w.rows_q(r).len(), w.rows_q(p).len());
    if inner > 1 && r / inner == p / inner {
        let (up, back) = match pass {
            Pass::Forward => (0, head(&[a.dv], a.out) + 4),
            Pass::Backward => (head(&[a.dv], a.out) + 8, head(&[a.dqk], a.out)),
        };
        bytes += theirs * hq * (head(&[a.dqk], a.dtype) + up) + mine * hq * back;
    }
    if pass == Pass::Backward {
        // Gradients of heads that one rank has alone travel in their final type.
        let alone = size / inner == 1 && a.heads_kv.is_multiple_of(inner);
        let (rows, t) = match alone && !w.d.dkv_wire.is_fp8() {
            true => (w.rows_kv(r).len(), a.out),
            false => (needed(&[p], r), w.d.dkv_wire),
        };
        let heads = kv_heads(a.heads_kv, inner, p % inner).len();
        bytes += rows * heads * head(&[a.dqk, a.dv], t);
    }
    bytes
}

#[test]
fn bytes_are_those_of_the_definitions() {
    worlds(bytes_are_defined);
    worlds_of_fp8(bytes_are_defined);
}

fn bytes_are_defined(w: &Plans) {
    let s = &w.sizes;
    for pass in [Pass::Forward, Pass::Backward] {
        let here: Vec<Traffic> = (0..s.size).map(|r| w.lists(r).traffic(pass)).collect();
        for (r, p) in (0..s.size).flat_map(|r| (0..s.size).map(move |p| (r, p))) {
            let got = here[r][p].get_bytes + here[p][r].put_bytes;
            let want = if r == p { 0 } else { defined(w, pass, r, p) as u64 };
            assert_eq!(got, want, "{:?} {pass:?} {r}<-{p}", s.strategy);
        }
    }
}

/// Checks that of a chunk with rows of several sequences only those travel that are of a sequence
/// of the receiver.
#[test]
fn rows_of_other_sequences_do_not_travel() {
    let mut d = CpAttentionDesc { layout: Layout::Contiguous, ..desc(AttnMask::FULL) };
    d.attn.sequences = Sequences::packed(&[0, 10, 34, 64], &[0, 10, 34, 64]).unwrap();
    // Ranks have 10 rows of sequence 0 and 6 of 1; 16 of 1; 2 of 1 and 14 of 2; 16 of 2.
    let rows = |s, me, peer: usize| {
        let t = traffic(&d, s, Pass::Forward, me);
        (t[peer].put_bytes + t[peer].get_bytes) / 256
    };
    for (s, me, want) in [
        (Strategy::Get, 0, [0, 16, 2, 0]),
        (Strategy::Get, 2, [6, 16, 0, 16]),
        (Strategy::AllGather, 0, [0, 6, 6, 0]),
        (Strategy::AllGather, 2, [2, 2, 0, 14]),
        // To rank 1 those of rank 0; of rank 3, for rank 2; and of rank 2, which stay there.
        (Strategy::Ring, 0, [0, 6 + 16 + 2, 0, 0]),
        // To rank 0 those of rank 3, for rank 2; of rank 2, for it and rank 1; and of rank 1.
        (Strategy::Ring, 3, [16 + 2 + 16, 0, 0, 0]),
    ] {
        assert_eq!([0, 1, 2, 3].map(|p| rows(s, me, p)), want, "{s} of {me}");
    }
}

/// Checks that padding between rows that are needed travels with them, in one copy, and other
/// padding does not.
#[test]
fn padding_does_not_divide_a_run() {
    let mut d = CpAttentionDesc { layout: Layout::ZigzagPerSequence, ..desc(AttnMask::FULL) };
    let (cu, padded) = ([0, 14, 28, 42], [0, 16, 32, 64]);
    d.attn.sequences = Sequences::padded((&cu, &padded), (&cu, &padded)).unwrap();
    let t = traffic(&d, Strategy::AllGather, Pass::Forward, 0);
    // Rows 0, 1, 14, 15 and 16, 17, 30, 31 and 32..36, 60..64, of which the padding 14, 15 and 30,
    // 31 is between rows of sequences, and 60..64 is behind the last.
    assert_eq!((t[1].puts, t[1].put_bytes), (2, 12 * 256));
}

/// Under a causal zigzag, `get` leaves out the late chunks of the ranks before it.
#[test]
fn get_skips_what_the_mask_hides() {
    let d = desc(AttnMask::CAUSAL);
    let get = |me| {
        let t = traffic(&d, Strategy::Get, Pass::Forward, me);
        t.iter().map(|l| l.get_bytes / (8 * 256)).collect::<Vec<_>>()
    };
    // In chunks: rank 0 (chunks 0 and 7) needs all; rank 3 (3 and 4) the first of each.
    assert_eq!(get(0), [0, 2, 2, 2]);
    assert_eq!(get(1), [1, 0, 2, 2]);
    assert_eq!(get(3), [1, 1, 1, 0]);
}

fn random(rng: &mut Rng, rows: usize, cols: usize) -> Mat {
    Mat::random(rng, rows, cols)
}

fn rows_of(m: &Mat, spans: &[std::ops::Range<usize>]) -> Mat {
    Mat::vstack(&spans.iter().map(|s| m.slice_rows(s.clone())).collect::<Vec<_>>())
}

fn tensor(m: &Mat) -> Tensor {
    Tensor::from_f32(&m.to_f32(), DType::F32, Shape::d2(m.rows, m.cols)).unwrap()
}

/// Sum of squared errors of (o, dq) and of (dk, dv) over all ranks.
fn errors(size: usize, strategy: Strategy) -> (f64, f64) {
    const S: usize = 200;
    let attn = AttentionDesc::new(S, (4, 2), 32, DType::F32, AttnMask::CAUSAL);
    let mut rng = Rng::new(3);
    let (q, k, v) = (random(&mut rng, S, 128), random(&mut rng, S, 64), random(&mut rng, S, 64));
    let d_o = random(&mut rng, S, 128);
    let spec = oracle::AttnSpec::new(4, 2, 32, oracle::AttnMask::CAUSAL);
    let (x, seqs) = (oracle::AttnInputs::new(&q, &k, &v), oracle::Sequences::batched(1, S, S));
    let (o, g) =
        (oracle::attention(&spec, &x, &seqs), oracle::attention_bwd(&spec, &x, &seqs, &d_o));
    let all = World::run_threads(size, WorldCfg::for_tests(), |w| {
        let team = w.everyone("cp")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(4 << 20))?;
        let stream = Stream::new("s")?;
        let desc = CpAttentionDesc::new(attn.clone());
        let plan = CpAttentionPlan::new(desc, &heap, Some(CpConfig::of(strategy)))?;
        plan.prepare(&stream)?;
        let (rq, rk) = (plan.rows_q(None), plan.rows_kv(None));
        let mine = |m: &Mat, r: &[std::ops::Range<usize>]| tensor(&rows_of(m, r));
        let x = AttnInputs::new(mine(&q, &rq), mine(&k, &rk), mine(&v, &rk));
        let (n, nkv) = (rows_of(&q, &rq).rows, rows_of(&k, &rk).rows);
        let t = |r, c| Tensor::poisoned(DType::F32, Shape::d2(r, c));
        let out = plan.launch_fwd(&stream, &x, AttnOut { out: t(n, 128), lse: t(4, n) })?.wait()?;
        let saved = AttnSaved { out: out.out.clone(), lse: out.lse, d_out: mine(&d_o, &rq) };
        let grads = AttnGrads::new(t(n, 128), t(nkv, 64), t(nkv, 64));
        let got = plan.launch_bwd(&stream, &x, saved, grads)?.wait()?;
        let sq = |t: &Tensor, want: &Mat, r: &[std::ops::Range<usize>]| -> f64 {
            let (t, want) = (t.to_vec::<f32>().unwrap(), rows_of(want, r));
            t.iter().zip(&want.data).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum()
        };
        Ok((
            sq(&out.out, &o.o, &rq) + sq(&got.dq, &g.dq, &rq),
            sq(&got.dk, &g.dk, &rk) + sq(&got.dv, &g.dv, &rk),
        ))
    });
    all.unwrap().iter().fold((0.0, 0.0), |s, e| (s.0 + e.0, s.1 + e.1))
}

/// RMS errors at N ranks are at most 1.1 times those at one rank (1.2 times for dK and dV).
#[test]
fn errors_do_not_grow_with_ranks() {
    let one = errors(1, Strategy::Get);
    for size in [2, 4, 8] {
        for strategy in [Strategy::Get, Strategy::Ring, Strategy::AllGather] {
            let n = errors(size, strategy);
            let ratio = ((n.0 / one.0).sqrt(), (n.1 / one.1).sqrt());
            assert!(ratio.0 <= 1.1 && ratio.1 <= 1.2, "{strategy} on {size}: {ratio:?}");
        }
    }
    let n = errors(4, Strategy::AllToAll);
    assert!((n.0 / one.0).sqrt() <= 1.1 && (n.1 / one.1).sqrt() <= 1.2);
}

/// Passes queued one behind the other, on ranks whose steps are delayed at random, give the bits of
/// passes that are waited for one by one: no buffer is overwritten while it is in use.
#[test]
fn delays_change_nothing() {
    let run = |strategy: Strategy, delayed: bool| {
        World::run_threads(4, WorldCfg::for_tests(), |w| {
            let team = w.everyone("slow")?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 18))?;
            let stream = Stream::new("s")?;
            let attn = AttentionDesc::new(24, (4, 4), 4, DType::F32, AttnMask::CAUSAL);
            let d = CpAttentionDesc { a2a_size: 2, ..CpAttentionDesc::new(attn) };
            let plan = CpAttentionPlan::new(d, &heap, Some(CpConfig::of(strategy)))?;
            plan.prepare(&stream)?;
            if delayed {
                team.set_hook(|p| {
                    let rng = Rng::new(u64::from(p.rank.get()) << 8 | p.kind as u64);
                    std::thread::sleep(std::time::Duration::from_micros(rng.at(p.nth) % 1500));
                    tilewire_symm::HookAction::Proceed
                });
            }
            let mut rng = Rng::new(u64::from(team.rank().get()));
            let mut all = Vec::new();
            for _ in 0..6 {
                let mut t = || tensor(&random(&mut rng, 6, 16));
                let (x, d_out) = (AttnInputs::new(t(), t(), t()), t());
                let empty = |r, c| Tensor::poisoned(DType::F32, Shape::d2(r, c));
                let o = AttnOut { out: empty(6, 16), lse: empty(4, 6) };
                let o = plan.launch_fwd(&stream, &x, o)?.join(&stream)?;
                let g = AttnGrads::new(empty(6, 16), empty(6, 16), empty(6, 16));
                let s = AttnSaved { out: o.out.clone(), lse: o.lse.clone(), d_out };
                let g = plan.launch_bwd(&stream, &x, s, g)?;
                let g = if delayed { g.join(&stream)? } else { g.wait()? };
                all.extend([o.out, g.dq, g.dk, g.dv]);
            }
            stream.synchronize()?;
            team.agree(true)?;
            team.check_counters()?;
            Ok(all.iter().map(|t| t.to_vec::<f32>().unwrap()).collect::<Vec<_>>())
        })
        .unwrap()
    };
    for (_, strategy) in Strategy::NAMES {
        let want = run(strategy, false);
        assert!(want.iter().flatten().flatten().all(|v| v.is_finite()));
        assert!(run(strategy, true) == want, "{strategy}");
    }
}

#[test]
fn bad_descriptions_are_refused() {
    World::run_threads(4, WorldCfg::for_tests(), |w| {
        let team = w.everyone("bad")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
        let refuse = |d: CpAttentionDesc, s| {
            let e = CpAttentionPlan::new(d, &heap, Some(CpConfig::of(s))).err().unwrap();
            (e.kind(), e.to_string())
        };
        let good = desc(AttnMask::CAUSAL);
        let mut odd = good.clone();
        (odd.attn.heads_q, odd.attn.heads_kv) = (6, 3);
        let (kind, text) = refuse(odd.clone(), Strategy::AllToAll);
        assert!(kind == ErrorKind::InvalidArgument && text.contains("Hq 6, Hkv 3"), "{text}");
        let three = CpAttentionDesc { a2a_size: 3, ..good.clone() };
        assert!(refuse(three, Strategy::Hybrid).1.contains("a divisor of 4"));
        let wire = CpAttentionDesc { dkv_wire: DType::BF16, ..good.clone() };
        assert!(refuse(wire, Strategy::Get).1.contains("f8e5m2"));
        let mut huge = good.clone();
        huge.attn.sequences = Sequences::one(1 << 20, 1 << 20);
        assert_eq!(refuse(huge, Strategy::Ring).0, ErrorKind::Exhausted);
        // The cost model omits strategies that the heads do not allow.
        let plan = CpAttentionPlan::new(odd, &heap, None)?;
        let text = plan.explain().to_string();
        assert!(text.contains("ring") && !text.contains("all_to_all") && text.contains('*'));
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// Gates are a candidate of devices that have them, and the first: nothing else moves while it
/// computes and merges nothing. Traded heads merge nothing either, but wait for keys first.
#[test]
fn gates_are_the_first_candidate_where_there_are_some() {
    let attn = AttentionDesc::new(16384, (32, 8), 128, DType::BF16, AttnMask::CAUSAL);
    let d = CpAttentionDesc::new(attn);
    let [with, without] = [true, false].map(|gates| explain(&d, 2, &Machine::H200, gates));
    let gated = CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) };
    assert_eq!(with.chosen, gated, "{with}");
    assert!(without.candidates.iter().all(|c| !c.config.gated), "{without}");
    let us = |e: &CpExplain, s| {
        let c = e.candidates.iter().find(|c| c.config == CpConfig::of(s)).unwrap();
        c.predicted_us
    };
    let half = without.candidates[0].predicted_us;
    assert_eq!(with.candidates[0].predicted_us, half, "{with}");
    for s in [Strategy::Get, Strategy::AllGather] {
        // Two parts of 8192 rows of 4096 values, written and read: 537 MB.
        let merge = us(&with, s) - us(&without, s);
        assert!((120.0..140.0).contains(&merge), "{s}: {merge}");
    }
    assert_eq!(us(&with, Strategy::AllToAll), us(&without, Strategy::AllToAll));
}

/// Ranks that describe different things get a mismatch at `prepare`; other sequences at a launch.
#[test]
fn ranks_that_differ_are_a_mismatch() {
    let run = |differ_at_launch: bool| {
        World::run_threads(2, WorldCfg::default(), |w| {
            let team = w.everyone("differ")?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 18))?;
            let stream = Stream::new("s")?;
            let me = team.rank().idx();
            let left = if differ_at_launch { 4 } else { 4 + me };
            let attn = AttentionDesc::new(16, (2, 2), 4, DType::F32, AttnMask::window(left, 0));
            let config = Some(CpConfig::of(Strategy::Ring));
            let plan = CpAttentionPlan::new(CpAttentionDesc::new(attn), &heap, config)?;
            plan.prepare(&stream)?;
            let cu = if me == 0 { [0, 6, 16] } else { [0, 7, 16] };
            let t = |r, c| Tensor::zeros(DType::F32, Shape::d2(r, c));
            let x = AttnInputs {
                sequences: Some(Sequences::packed(&cu, &cu)?),
                ..AttnInputs::new(t(8, 8), t(8, 8), t(8, 8))
            };
            plan.launch_fwd(&stream, &x, AttnOut { out: t(8, 8), lse: t(2, 8) })?.wait().map(|_| ())
        })
        .unwrap_err()
    };
    for at_launch in [false, true] {
        let e = run(at_launch);
        assert!(e.is_mismatch(), "{e}");
    }
}

/// Offsets of the global tensors are for plans whose rows and transfers do not depend on them.
#[test]
fn plans_that_depend_on_sequences_refuse_offsets() {
    World::run_threads(2, WorldCfg::default(), |w| {
        let team = w.everyone("offsets")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 20))?;
        let stream = Stream::new("s")?;
        let t = |r, c| Tensor::zeros(DType::F32, Shape::d2(r, c));
        let cu = Tensor::from_slice(&[0i32, 5, 8], Shape::d1(3))?;
        let offsets = Some(AttnOffsets::packed(cu.clone(), cu));
        let launch = |layout, strategy, sequences| {
            let attn = AttentionDesc::new(8, (2, 2), 4, DType::F32, AttnMask::CAUSAL);
            let d = CpAttentionDesc { layout, ..CpAttentionDesc::new(attn) };
            let plan = CpAttentionPlan::new(d, &heap, Some(CpConfig::of(strategy)))?;
            plan.prepare(&stream)?;
            let x = AttnInputs {
                offsets: offsets.clone(),
                sequences,
                ..AttnInputs::new(t(4, 8), t(4, 8), t(4, 8))
            };
            plan.launch_fwd(&stream, &x, AttnOut { out: t(4, 8), lse: t(2, 4) })?.wait()?;
            plan.check()?;
            // Every row travels, once each way.
            let moved = plan.predict_by_offsets(Pass::Forward)?;
            let peer = 1 - w.rank().idx();
            assert_eq!(moved[peer].put_bytes, 2 * 4 * 8 * 4, "{layout:?}");
            Ok(())
        };
        for layout in [Layout::Zigzag, Layout::Contiguous] {
            launch(layout, Strategy::AllGather, None)?;
        }
        let all = Strategy::AllGather;
        for (layout, strategy, why) in [
            (Layout::Zigzag, Strategy::Get, "by get"),
            (Layout::Zigzag, Strategy::AllToAll, "by all_to_all"),
            (Layout::ZigzagPerSequence, all, "ZigzagPerSequence"),
            (Layout::Balanced, all, "Balanced"),
        ] {
            let e = launch(layout, strategy, None).unwrap_err();
            assert!(e.is_unsupported() && e.to_string().contains(why), "{e}");
        }
        let e = launch(Layout::Zigzag, all, Some(Sequences::one(8, 8))).unwrap_err();
        assert!(e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("not both"));
        Ok(())
    })
    .unwrap();
}
