//! The timed parts.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tilewire_core::{Deadline, Error, Result};
use tilewire_device::cuda::{CudaEvent, CudaMemory, CudaModule, Grid, LaunchArgs};
use tilewire_device::jit::KernelSpec;
use tilewire_device::{Buffer, Queue};
use tilewire_kernels::LD_ST;
use tilewire_symm::World;

use crate::cases::queued::Queued as _;

use crate::cases::{Setup, Vmm, setup};
use crate::{TIMEOUT, run};

const MIB: usize = 1 << 20;

type Check = fn() -> Result<String>;

pub const ALL: [(&str, Check); 10] = [
    ("signal, in one kernel", in_kernel),
    ("signal + wait, eager", || ping_pong(false)),
    ("signal + wait, graph", || ping_pong(true)),
    ("put bandwidth", bandwidth),
    ("cost of a flag", flag_cost),
    ("1000 graph replays", replays),
    ("timeout", timeout),
    ("abort", abort),
    ("hundred heaps", hundred),
    ("killed", killed),
];

const KERNELS: &str = r#"
extern "C" __global__ void ping(u64* mine, u64* peer, u64 n, u64 first, u64* out) {
    u64 t0 = globaltimer();
    for (u64 i = 1; i <= n; i++) {
        if (first) st_release_sys_u64(peer, i);
        for (u32 polls = 1; ld_acquire_sys_u64(mine) < i; polls++)
            if (polls % 64 == 0 && globaltimer() - t0 > 2000000000ull) { *out = 0; return; }
        if (!first) st_release_sys_u64(peer, i);
    }
    *out = globaltimer() - t0;
}
extern "C" __global__ void next(u64* round) { *round += 1; }
extern "C" __global__ void fill(u64* p, u64 n, const u64* round, u64 rank) {
    u64 v = *round * 1000003ull + rank * 77ull;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = v + i;
}
extern "C" __global__ void verify(const u64* p, u64 n, const u64* round, u64 rank, u64* bad) {
    u64 v = *round * 1000003ull + rank * 77ull;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        if (p[i] != v + i) red_add_release_sys_u64(bad, 1);
}
"#;

fn module(s: &Setup<Vmm>) -> Result<CudaModule> {
    let spec = KernelSpec {
        name: "symm_checks.cu".to_owned(),
        text: LD_ST.text() + KERNELS,
        defines: Vec::new(),
        arch: s.os.here().context().arch()?,
    };
    s.os.here().context().module(&spec)
}

fn word(m: &CudaMemory) -> Result<u64> {
    Ok(bytemuck::pod_read_unaligned(&m.slice(0, 8)?.download()?))
}

/// The text of rank 0.
fn first(all: Result<Vec<String>>) -> Result<String> {
    all?.into_iter().next().ok_or_else(|| Error::internal("no rank"))
}

/// Store with release to the peer, load with acquire there and back, inside one kernel each.
fn in_kernel() -> Result<String> {
    first(run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, MIB)?;
        let (me, peer) = (s.team.rank(), s.team.rank().offset(1, 2));
        let flag = s.heap.alloc(64, "flag")?;
        let out = s.buffer(&[0; 8])?;
        let ping = module(&s)?.kernel("ping")?;
        let zero = s.buffer(&[0; 8])?;
        s.os.put(&s.stream, me, flag.offset(), &zero)?;
        s.os.barrier(&s.stream, 0)?;
        s.finish()?;
        let (n, lead) = (2000u64, u64::from(me.get() == 0));
        let peers = tilewire_symm::Transport::device_team(&s.os)
            .ok_or_else(|| Error::internal("no addresses of peers"))?;
        let (mine, theirs) =
            (peers.addr(me, flag.offset(), 8)?, peers.addr(peer, flag.offset(), 8)?);
        let args = [mine, theirs, n, lead, out.addr()];
        let args = args.iter().fold(LaunchArgs::new(), |a, v| a.arg(v));
        // SAFETY: five 64-bit parameters; all memory lives until `finish`.
        unsafe { ping.launch(&s.stream, Grid::new(1, 1), args)? };
        s.finish()?;
        match word(&out)? {
            0 => Err(Error::internal("the ping was not answered")),
            ns => Ok(format!("{:.2} us one way", ns as f64 / 2e3 / n as f64)),
        }
    }))
}

/// Signal and wait as queued operations: each hop is a kernel start.
fn ping_pong(graph: bool) -> Result<String> {
    first(run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, MIB)?;
        let peer = s.team.rank().offset(1, 2);
        let sig = s.team.signals(1, "ping")?;
        let hops = || -> Result<()> {
            for _ in 0..100 {
                if s.team.rank().get() == 0 {
                    s.os.signal(&s.stream, peer, sig.slot(0), 1)?;
                    s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
                } else {
                    s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
                    s.os.signal(&s.stream, peer, sig.slot(0), 1)?;
                }
            }
            Ok(())
        };
        let captured = match graph {
            false => None,
            true => {
                s.stream.begin_capture()?;
                hops()?;
                Some(s.stream.end_capture()?)
            }
        };
        let once = || captured.as_ref().map_or_else(&hops, |g| s.stream.replay(g));
        once()?;
        s.finish()?;
        s.team.agree(true)?;
        let us = timed(&s, 10, once)?;
        s.os.check_counters()?;
        Ok(format!("{:.2} us one way, kernel starts included", us / 200.0))
    }))
}

/// Microseconds of one `f`, mean of `n`, by events around all of them.
fn timed(s: &Setup<Vmm>, n: usize, f: impl Fn() -> Result<()>) -> Result<f64> {
    let ctx = s.os.here().context();
    let (start, end) = (CudaEvent::new(ctx, true)?, CudaEvent::new(ctx, true)?);
    s.stream.record(&start)?;
    for _ in 0..n {
        f()?;
    }
    s.stream.record(&end)?;
    s.stream.synchronize_until(Some(Deadline::after(TIMEOUT * 4)))?;
    s.team.check()?;
    Ok(end.us_since(&start)? / n as f64)
}

/// Both ranks put to each other at the same time, by copy engines.
fn bandwidth() -> Result<String> {
    first(run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, 64 * MIB)?;
        let peer = s.team.rank().offset(1, 2);
        let mut out = Vec::new();
        for mib in [1, 16, 64] {
            let src = s.buffer(&vec![1; mib * MIB])?;
            let put = || s.os.put(&s.stream, peer, 0, &src);
            put()?;
            s.os.barrier(&s.stream, 0)?;
            let us = timed(&s, 20, put)?;
            out.push(format!("{mib} MiB {us:.1} us {:.0} GB/s", (mib * MIB) as f64 / us / 1e3));
            s.team.agree(true)?;
        }
        Ok(out.join(", "))
    }))
}

/// 64 pieces of 1 MiB in a graph, with and without a flag behind each.
fn flag_cost() -> Result<String> {
    first(run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, 64 * MIB)?;
        let peer = s.team.rank().offset(1, 2);
        let sig = s.team.signals(65, "flags")?;
        let src = s.buffer(&vec![1; 64 * MIB])?;
        let capture = |flags: u32| {
            s.stream.begin_capture()?;
            if flags == 1 {
                s.os.advance(&s.stream, sig.slot(1), 64)?;
            }
            for i in 0..64 {
                let piece = src.slice(i * MIB, MIB)?;
                match flags {
                    2 => s.os.put_signal(&s.stream, (peer, i * MIB), &piece, sig.slot(0))?,
                    1 => s.os.put_flag(&s.stream, (peer, i * MIB), &piece, sig.slot(1 + i))?,
                    _ => s.os.put(&s.stream, peer, i * MIB, &piece)?,
                }
            }
            s.stream.end_capture()
        };
        let graphs = [capture(0)?, capture(1)?, capture(2)?];
        let mut us = [0.0; 3];
        for (g, us) in graphs.iter().zip(&mut us) {
            s.stream.replay(g)?;
            s.os.barrier(&s.stream, 0)?;
            *us = timed(&s, 20, || s.stream.replay(g))?;
        }
        s.os.barrier(&s.stream, 0)?;
        s.os.wait(&s.stream, peer, sig.slot(0), 64 * 21)?;
        for i in 0..64 {
            s.os.wait(&s.stream, peer, sig.slot(1 + i), 21)?;
        }
        s.finish()?;
        s.os.check_counters()?;
        let each = |i: usize| (us[i] - us[0]) / 64.0;
        Ok(format!(
            "64 x 1 MiB: {:.0} us without; put_flag {:.2} us each, put_signal {:.2} us each",
            us[0],
            each(1),
            each(2)
        ))
    }))
}

/// Fill, credit, push, flag, wait, verify: one graph, replayed with data that differs each time.
fn replays() -> Result<String> {
    first(run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, 2 * MIB)?;
        let (me, peer) = (s.team.rank(), s.team.rank().offset(1, 2));
        let sig = s.team.signals(2, "data+credit")?;
        let recv = s.heap.alloc(MIB, "recv")?;
        let (data, round, bad) = (s.poisoned(MIB)?, s.buffer(&[0; 8])?, s.buffer(&[0; 8])?);
        let m = module(&s)?;
        let (next, fill, verify) = (m.kernel("next")?, m.kernel("fill")?, m.kernel("verify")?);
        let words = (MIB / 8) as u64;
        let got = s.os.here().addr(recv.offset(), MIB)?;
        let (mine, theirs) = (u64::from(me.get()), u64::from(peer.get()));
        s.stream.begin_capture()?;
        let args = |v: [u64; 5]| v;
        let (f, v) = (
            args([data.addr(), words, round.addr(), mine, 0]),
            args([got, words, round.addr(), theirs, bad.addr()]),
        );
        // SAFETY: the parameters are those of the kernels above; all memory outlives the graph.
        unsafe {
            next.launch(&s.stream, Grid::new(1, 1), LaunchArgs::new().arg(&f[2]))?;
            let a = f[..4].iter().fold(LaunchArgs::new(), |a, v| a.arg(v));
            fill.launch(&s.stream, Grid::new(64, 256), a)?;
        }
        s.os.signal(&s.stream, peer, sig.slot(1), 1)?;
        s.os.wait(&s.stream, peer, sig.slot(1), 1)?;
        s.os.put_signal(&s.stream, (peer, recv.offset()), &data, sig.slot(0))?;
        s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
        // SAFETY: as above.
        unsafe {
            let a = v.iter().fold(LaunchArgs::new(), |a, v| a.arg(v));
            verify.launch(&s.stream, Grid::new(64, 256), a)?;
        }
        let graph = s.stream.end_capture()?;
        s.team.agree(true)?;
        let us = timed(&s, 1000, || s.stream.replay(&graph))?;
        s.finish()?;
        s.os.check_counters()?;
        let (wrong, rounds) = (word(&bad)?, word(&round)?);
        if wrong != 0 || rounds != 1000 {
            return Err(Error::internal("replays went wrong")
                .expected("1000 and 0")
                .seen(format_args!("{rounds} rounds, {wrong} wrong words")));
        }
        Ok(format!("1 MiB with flag and credit: {us:.1} us each, 0 wrong words in {rounds} rounds"))
    }))
}

fn reform(world: &World) -> Result<Duration> {
    let start = Instant::now();
    let s = setup::<Vmm>(world, MIB)?;
    s.os.barrier(&s.stream, 0)?;
    s.finish()?;
    Ok(start.elapsed())
}

/// A peer that never signals, with a deadline of 300 ms; then a new team.
fn timeout() -> Result<String> {
    let limit = Duration::from_millis(300);
    first(run(limit, |world: World| {
        let s = setup::<Vmm>(&world, MIB)?;
        let sig = s.team.signals(1, "never")?;
        s.team.agree(true)?;
        let start = Instant::now();
        let text = if s.team.rank().get() == 0 {
            s.os.wait(&s.stream, s.team.rank().offset(1, 2), sig.slot(0), 1)?;
            let e = s.finish().err().ok_or_else(|| Error::internal("no error"))?;
            let late = start.elapsed().saturating_sub(limit).as_secs_f64() * 1e3;
            format!("raised {late:.2} ms after the deadline: {:?}", e.to_json())
        } else {
            while s.team.check().is_ok() && start.elapsed() < limit * 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
            String::new()
        };
        let again = reform(&world)?;
        Ok(format!("new team after {:.0} ms; {text}", again.as_secs_f64() * 1e3))
    }))
}

/// Rank 0 aborts; how long until rank 1's kernel has ended and its caller has the error?
fn abort() -> Result<String> {
    let at = Mutex::new(None::<Instant>);
    let all = run(TIMEOUT, |world: World| {
        let s = setup::<Vmm>(&world, MIB)?;
        let sig = s.team.signals(1, "never")?;
        let peer = s.team.rank().offset(1, 2);
        s.team.agree(true)?;
        s.os.wait(&s.stream, peer, sig.slot(0), 1)?;
        if s.team.rank().get() == 0 {
            std::thread::sleep(Duration::from_millis(50));
            *at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            s.team.abort("spike");
        }
        let e = s.finish().err().ok_or_else(|| Error::internal("no error"))?;
        // A rank in another process does not know when rank 0 aborted.
        let at = *at.lock().unwrap_or_else(PoisonError::into_inner);
        let us = at.map_or("?".to_owned(), |t| format!("{:.0}", t.elapsed().as_secs_f64() * 1e6));
        let again = reform(&world)?.as_secs_f64() * 1e3;
        Ok(format!("rank {}: {us} us to `{}`, new team {again:.0} ms", s.team.rank(), e.message()))
    })?;
    Ok(all.join("; "))
}

/// A hundred teams with a heap leave no descriptor and no device memory behind.
fn hundred() -> Result<String> {
    let all = run(TIMEOUT, |world: World| {
        let outer = world.everyone("outer")?;
        let look = |s: &Setup<Vmm>| -> Result<(usize, usize)> {
            let fds = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
            Ok((fds, s.os.here().context().memory_info()?.0))
        };
        let (mut first, mut last) = (None, (0, 0));
        let start = Instant::now();
        for _ in 0..100 {
            let s = setup::<Vmm>(&world, 16 * MIB)?;
            s.os.barrier(&s.stream, 0)?;
            s.finish()?;
            // Everybody holds as much while somebody looks.
            outer.agree(true)?;
            last = look(&s)?;
            first.get_or_insert(last);
            outer.agree(true)?;
        }
        let ms = start.elapsed().as_secs_f64() * 10.0;
        let first = first.unwrap_or_default();
        let lost = first.1.saturating_sub(last.1);
        if last.0 > first.0 + 4 || lost > 8 * MIB {
            return Err(Error::internal("heaps leave something behind")
                .expected(format_args!("{first:?} descriptors and free bytes"))
                .seen(format_args!("{last:?}")));
        }
        Ok(format!("{ms:.1} ms each, descriptors {} -> {}, {lost} bytes less", first.0, last.0))
    });
    first(all)
}

/// As processes: one is killed while the others' kernels wait for it.
fn killed() -> Result<String> {
    let all = run(Duration::from_secs(8), |world: World| {
        let s = setup::<Vmm>(&world, MIB)?;
        let (n, me) = (s.team.size(), s.team.rank());
        let victim = tilewire_core::Rank::new(n as u32 - 1);
        let sig = s.team.signals(1, "never")?;
        s.team.agree(true)?;
        if me == victim {
            std::thread::sleep(Duration::from_millis(300));
            let own = std::process::id().to_string();
            // Nothing of this process runs after it.
            let _status = std::process::Command::new("kill").args(["-9", &own]).status();
        }
        s.os.wait(&s.stream, victim, sig.slot(0), 1)?;
        let start = Instant::now();
        let e = s.finish().err().ok_or_else(|| Error::internal("no error"))?;
        let ms = start.elapsed().as_secs_f64() * 1e3 - 300.0;
        let rest = world.alive();
        let team = world.team(&rest, "rest")?.ok_or_else(|| Error::internal("not in the rest"))?;
        let heap = team.heap(tilewire_core::BackendKind::Vmm, tilewire_symm::HeapCfg::new(MIB))?;
        let os = <Vmm as crate::cases::Backend>::one_sided(&heap)?;
        let stream = <Vmm as crate::cases::Backend>::stream(&os)?;
        os.barrier(&stream, 0)?;
        tilewire_device::Queue::synchronize_until(&stream, Some(Deadline::after_s(5.0)))?;
        team.check()?;
        println!("killed: {ms:.0} ms after the death: {e}; {} ranks go on", team.size());
        Ok(String::new())
    });
    first(all)
}
