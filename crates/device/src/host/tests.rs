use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind};

use super::*;
use crate::{Event, Fault, Pending, Stream};

fn push(log: &Arc<Mutex<Vec<u32>>>, v: u32) -> Node {
    let log = log.clone();
    Node::new("push", move || {
        log.lock().unwrap().push(v);
        Ok(())
    })
}

#[test]
fn a_stream_runs_in_order() {
    let s = Stream::new("s").unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    (0..100).for_each(|i| s.launch(push(&log, i)).unwrap());
    s.synchronize().unwrap();
    assert_eq!(*log.lock().unwrap(), (0..100).collect::<Vec<_>>());
}

/// Threads that wait run what is queued, one at a time, in the order of each thread that queues.
#[test]
fn jobs_of_a_stream_run_one_at_a_time_and_in_order_whoever_waits() {
    let s = Stream::new("s").unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    let (inside, by_waiters) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let job = |thread: u32, i: u32| {
        let (log, inside, by_waiters) = (log.clone(), inside.clone(), by_waiters.clone());
        Node::new("job", move || {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two jobs at once");
            log.lock().unwrap().push((thread, i));
            let own = std::thread::current().name() == Some("tw-s");
            by_waiters.fetch_add(u64::from(!own), Ordering::SeqCst);
            inside.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
    };
    std::thread::scope(|t| {
        for thread in 0..4 {
            let (s, job) = (s.clone(), &job);
            t.spawn(move || {
                for i in 0..2000 {
                    s.launch(job(thread, i)).unwrap();
                    // Some wait at once, some never.
                    if i % (thread + 1) == 0 && thread < 3 {
                        s.synchronize().unwrap();
                    }
                }
            });
        }
    });
    s.synchronize().unwrap();
    let log = log.lock().unwrap();
    for thread in 0..4 {
        let of = log.iter().filter(|(t, _)| *t == thread).map(|(_, i)| *i);
        assert!(of.eq(0..2000), "thread {thread}");
    }
    assert!(by_waiters.load(Ordering::SeqCst) > 0, "nobody who waited ran anything");
}

/// The last handle of a stream may be in one of its jobs, which another thread runs: its end does
/// not wait for itself.
#[test]
fn a_stream_may_end_in_its_own_job_on_another_thread() {
    let (tx, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let other = HostStream::new("other").unwrap();
        let by_others = Arc::new(AtomicU64::new(0));
        for _ in 0..500 {
            let (s, e) = (HostStream::new("s").unwrap(), HostEvent::new());
            let (last, by) = (Mutex::new(Some(s.clone())), by_others.clone());
            let node = Node::new("last", move || {
                let own = std::thread::current().name() == Some("tw-s");
                by.fetch_add(u64::from(!own), Ordering::SeqCst);
                drop(last.lock().unwrap().take());
                Ok(())
            });
            let open = Arc::new(AtomicU64::new(0));
            let gate = open.clone();
            // Nobody runs the job before this handle has gone.
            s.launch(Node::new("gate", move || {
                while gate.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                Ok(())
            }))
            .unwrap();
            s.launch(node).unwrap();
            s.record(&e).unwrap();
            other.wait(&e).unwrap();
            drop(s);
            open.store(1, Ordering::SeqCst);
            other.synchronize().unwrap();
        }
        tx.send(by_others.load(Ordering::SeqCst)).unwrap();
    });
    let by_others = ended.recv_timeout(Duration::from_secs(60)).expect("a stream waits for itself");
    assert!(by_others > 0, "no other thread ran a last job");
}

/// A thread that waits for an event leaves to the stream's own what is queued behind it.
#[test]
fn who_waits_runs_nothing_that_it_does_not_wait_for() {
    let s = HostStream::new("s").unwrap();
    let (begun, go) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let e = HostEvent::new();
    s.launch(Node::new("first", || Ok(()))).unwrap();
    s.record(&e).unwrap();
    let (b, g) = (begun.clone(), go.clone());
    s.launch(Node::new("long", move || {
        b.store(1, Ordering::SeqCst);
        while g.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        Ok(())
    }))
    .unwrap();
    s.synchronize_at(&e).unwrap();
    // The stream's own thread takes it.
    while begun.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    go.store(1, Ordering::SeqCst);
    s.synchronize().unwrap();
}

#[test]
fn an_event_orders_two_streams() {
    let (a, b) = (Stream::new("a").unwrap(), Stream::new("b").unwrap());
    let log = Arc::new(Mutex::new(Vec::new()));
    a.launch(Node::new("slow", || {
        std::thread::sleep(Duration::from_millis(50));
        Ok(())
    }))
    .unwrap();
    a.launch(push(&log, 1)).unwrap();
    let e = Event::new();
    a.record(&e).unwrap();
    b.wait(&e).unwrap();
    b.launch(push(&log, 2)).unwrap();
    b.synchronize().unwrap();
    assert_eq!(*log.lock().unwrap(), [1, 2]);
}

#[test]
fn a_fault_poisons_later_nodes_and_the_stream_lives_on() {
    let s = Stream::new("s").unwrap();
    let fault = Arc::new(Fault::new());
    let poisoned = Arc::new(AtomicU64::new(0));
    let node = |fail: bool| {
        let p = poisoned.clone();
        Node::new(
            "n",
            move || {
                if fail { Err(Error::new(ErrorKind::Timeout, "late")) } else { Ok(()) }
            },
        )
        .in_domain(fault.clone(), move || {
            p.fetch_add(1, Ordering::Relaxed);
        })
    };
    s.launch(node(false)).unwrap();
    s.launch(node(true)).unwrap();
    s.launch(node(false)).unwrap();
    let p = Pending::new((), &s, Some(fault.clone())).unwrap();
    assert!(p.wait().unwrap_err().is_timeout());
    assert_eq!(poisoned.load(Ordering::Relaxed), 2);
    s.launch(Node::new("other domain", || Ok(()))).unwrap();
    s.synchronize().unwrap();
}

#[test]
fn a_panicking_node_is_an_error() {
    let s = Stream::new("s").unwrap();
    s.launch(Node::new("boom", || panic!("kaboom"))).unwrap();
    let e = s.synchronize().unwrap_err();
    assert!(e.to_string().contains("kaboom"), "{e}");
}

#[test]
fn a_result_is_not_handed_out_when_its_work_failed() {
    let s = Stream::new("s").unwrap();
    s.launch(Node::new("boom", || panic!("kaboom"))).unwrap();
    let e = Pending::new(1, &s, None).unwrap().wait().unwrap_err();
    assert!(e.to_string().contains("kaboom"), "{e}");
    let s = Stream::new("s").unwrap();
    s.launch(Node::new("late", || Err(Error::new(ErrorKind::Timeout, "late")))).unwrap();
    let p = Pending::new(1, &s, None).unwrap();
    assert!(p.wait_until(Deadline::after_s(5.0)).unwrap_err().is_timeout());
}

/// The flight recorder takes the end of a device's launches from here.
#[test]
fn who_asks_hears_how_the_work_ended_once_it_is_waited_for() {
    let seen = |fails: bool| {
        let s = Stream::new("s").unwrap();
        s.launch(Node::new("work", move || {
            if fails { Err(Error::new(ErrorKind::Timeout, "late")) } else { Ok(()) }
        }))
        .unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let p = Pending::new(1, &s, None).unwrap().on_end(move |good| tx.send(good).unwrap());
        assert!(rx.try_recv().is_err(), "nobody has waited yet");
        assert_eq!(p.wait_until(Deadline::after_s(5.0)).is_err(), fails);
        rx.try_iter().collect::<Vec<_>>()
    };
    assert_eq!((seen(false), seen(true)), (vec![true], vec![false]));
}

#[test]
fn an_error_on_a_side_lane_of_a_graph_is_reported() {
    let (a, b) = (Stream::new("a").unwrap(), Stream::new("b").unwrap());
    a.begin_capture().unwrap();
    let (fork, join) = (Event::new(), Event::new());
    a.record(&fork).unwrap();
    b.wait(&fork).unwrap();
    b.launch(Node::new("side", || Err(Error::new(ErrorKind::Timeout, "late")))).unwrap();
    b.record(&join).unwrap();
    a.wait(&join).unwrap();
    let g = a.end_capture().unwrap().instantiate().unwrap();
    a.replay(&g).unwrap();
    assert!(a.synchronize().unwrap_err().is_timeout());
}

/// Lanes with edges between them, replayed from several streams at once.
#[test]
fn replays_of_one_graph_follow_each_other() {
    let s: Vec<_> = (0..4).map(|i| Stream::new(format!("s{i}")).unwrap()).collect();
    let (a, rest) = s.split_first().unwrap();
    let sum = Arc::new(AtomicU64::new(0));
    let add = || {
        let sum = sum.clone();
        Node::new("add", move || {
            std::thread::yield_now();
            sum.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    };
    a.begin_capture().unwrap();
    let mut last = Event::new();
    a.record(&last).unwrap();
    for s in rest.iter().chain([&rest[0], &rest[1], a]) {
        s.wait(&last).unwrap();
        s.launch(add()).unwrap();
        last = Event::new();
        s.record(&last).unwrap();
        // Each lane must be joined, whoever comes last.
        a.wait(&last).unwrap();
    }
    let g = a.end_capture().unwrap().instantiate().unwrap();
    for _ in 0..200 {
        s.iter().for_each(|s| s.replay(&g).unwrap());
    }
    s.iter().for_each(|s| s.synchronize().unwrap());
    assert_eq!(sum.load(Ordering::Relaxed), 6 * 800);
}

#[test]
fn a_capture_that_has_ended_takes_nothing_in() {
    let (a, b) = (Stream::new("a").unwrap(), Stream::new("b").unwrap());
    let e = Event::new();
    a.begin_capture().unwrap();
    a.record(&e).unwrap();
    a.end_capture().unwrap();
    assert!(b.wait(&e).unwrap_err().to_string().contains("has ended"));
    assert!(!b.is_capturing());
    // Given up in the middle: the stream that had joined is free again.
    a.begin_capture().unwrap();
    a.record(&e).unwrap();
    b.wait(&e).unwrap();
    assert!(b.is_capturing());
    drop(a);
    assert!(!b.is_capturing());
    let log = Arc::new(Mutex::new(Vec::new()));
    b.launch(push(&log, 1)).unwrap();
    b.synchronize().unwrap();
    assert_eq!(*log.lock().unwrap(), [1]);
}

#[test]
fn a_graph_with_a_side_stream_replays() {
    let (a, b) = (Stream::new("a").unwrap(), Stream::new("b").unwrap());
    let sum = Arc::new(AtomicU64::new(0));
    let add = |v: u64| {
        let sum = sum.clone();
        Node::new("add", move || {
            sum.fetch_add(v, Ordering::Relaxed);
            Ok(())
        })
    };
    a.begin_capture().unwrap();
    let (fork, join) = (Event::new(), Event::new());
    a.record(&fork).unwrap();
    b.wait(&fork).unwrap();
    b.launch(add(1)).unwrap();
    a.launch(add(10)).unwrap();
    b.record(&join).unwrap();
    a.wait(&join).unwrap();
    let p = Pending::new((), &a, None).unwrap();
    assert!(p.wait().unwrap_err().to_string().contains("captured"));
    let g = a.end_capture().unwrap().instantiate().unwrap();
    assert_eq!((sum.load(Ordering::Relaxed), g.num_nodes()), (0, 2));
    assert!(!b.is_capturing());
    for _ in 0..50 {
        a.replay(&g).unwrap();
    }
    a.synchronize().unwrap();
    assert_eq!(sum.load(Ordering::Relaxed), 550);
}

#[test]
fn an_unjoined_side_stream_is_refused() {
    let (a, b) = (Stream::new("a").unwrap(), Stream::new("b").unwrap());
    a.begin_capture().unwrap();
    let fork = Event::new();
    a.record(&fork).unwrap();
    b.wait(&fork).unwrap();
    b.launch(Node::new("n", || Ok(()))).unwrap();
    assert!(a.end_capture().is_err_and(|e| e.to_string().contains("not joined back")));
    assert!(!b.is_capturing() && !a.is_capturing());
    assert!(a.end_capture().is_err());
}

#[test]
fn waiting_gives_up_at_the_deadline() {
    let s = Stream::new("s").unwrap();
    s.launch(Node::new("slow", || {
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }))
    .unwrap();
    let p = Pending::new((), &s, None).unwrap();
    let e = p.wait_until(Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert!(e.is_timeout());
}

#[test]
fn what_is_of_another_device_is_refused() {
    let s = Stream::new("s").unwrap();
    assert!(s.host().is_ok());
    let e = s.cuda().err().unwrap();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let t = crate::Tensor::zeros(tilewire_core::DType::F32, tilewire_core::Shape::d1(4));
    assert!(t.cuda().err().unwrap().to_string().contains("CPU"));
    let copy = t.to(&crate::Device::Host).unwrap();
    assert!(!copy.shares_memory(&t) && copy.to_f32().unwrap() == [0.0; 4]);
    // An event that nothing has recorded is no wait, wherever it will belong.
    s.wait(&Event::new()).unwrap();
}
