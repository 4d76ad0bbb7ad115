//! A forked child: its calls fail, its drops neither wait nor speak for the parent, and the parent
//! goes on.

mod table;

use std::time::{Duration, Instant};

use table::*;
use tilewire_core::ErrorKind;
use tilewire_device::Process;
use tilewire_symm::{World, WorldCfg};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn kill(pid: i32, signal: i32) -> i32;
}

/// Status of the child, which runs `f` and nothing else of this program.
fn in_child(f: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls `f`, which takes no lock that another thread may hold, and ends by
    // `_exit`.
    let pid = unsafe { fork() };
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(99);
        // SAFETY: ends the child at once.
        unsafe { _exit(code) }
    }
    assert!(pid > 0, "no child");
    let (start, mut status) = (Instant::now(), 0);
    // SAFETY: a child of ours, and a valid place for its status; 1 is WNOHANG.
    while unsafe { waitpid(pid, &mut status, 1) } == 0 {
        if start.elapsed() > Duration::from_secs(10) {
            // SAFETY: a child of ours that was not waited for.
            unsafe { kill(pid, 9) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    status
}

#[test]
fn a_forked_child_can_drop_all_and_call_nothing() {
    let (name, make) = all_ops().find(|(n, _)| n.starts_with("ag_gemm")).unwrap();
    World::run_threads(2, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "forks")?;
        let op = make(&heap, &stream, true)?;
        let buf = heap.alloc(64, "buffer")?;
        let mut bits = Vec::new();
        for round in 0..2 {
            fill(&op, 1)?;
            (op.launch)(&stream)?;
            stream.synchronize()?;
            bits.push(op.out.to_f32()?);
            team.agree(true)?;
            if world.rank().get() == 0 && round == 0 {
                let stale =
                    |r: tilewire_core::Result<()>| r.unwrap_err().kind() == ErrorKind::Stale;
                let parts = (&world, &team, &heap, &stream, &op, &buf);
                let status = in_child(|| {
                    let (world, team, heap, stream, op, buf) = parts;
                    let calls = [
                        stale(team.agree(true).map(drop)),
                        stale(team.check()),
                        stale(world.check()),
                        stale(world.everyone("child").map(drop)),
                        stale(heap.alloc(64, "child").map(drop)),
                        stale(heap.collect()),
                        stale(stream.synchronize()),
                        (op.launch)(stream).unwrap_err().kind() == ErrorKind::Stale,
                    ];
                    team.abort("a child must not");
                    // SAFETY: bitwise copies of values that the child's own copy of the memory
                    // holds; the originals are never dropped in the child, which ends by `_exit`.
                    unsafe {
                        drop(std::ptr::read(op));
                        drop(std::ptr::read(buf));
                        drop(std::ptr::read(heap));
                        drop(std::ptr::read(team));
                        drop(std::ptr::read(world));
                        drop(std::ptr::read(stream));
                    }
                    calls.iter().position(|good| !good).map_or(0, |i| 1 + i as i32)
                });
                assert_eq!(status, 0, "{name}: call {} of the child", status >> 8);
            }
            team.agree(true)?;
        }
        assert_eq!(bits[0], bits[1], "{name}");
        team.check()
    })
    .unwrap();
}

/// A child is distinguished from its parent, and from its own children, without a system call.
#[test]
fn each_process_of_a_line_of_forks_is_another_one() {
    let ours = Process::default();
    assert!(!ours.is_foreign());
    let status = in_child(|| {
        let mine = Process::default();
        let below = in_child(|| i32::from(!(ours.is_foreign() && mine.is_foreign())));
        i32::from(!(ours.is_foreign() && !mine.is_foreign() && below == 0))
    });
    assert_eq!(status, 0);
    assert!(!ours.is_foreign(), "a child's forks are not ours");
}
