use tilewire_testing::{Lack, did_not_run};

use super::interop_tests::device;
use super::*;
use crate::jit::{Compiler, KernelSpec, kernel_uses};

/// Without CUDA every way in is a typed error, never a panic; with CUDA they work.
#[test]
fn a_machine_without_cuda_gets_a_typed_error() {
    match available() {
        Ok(()) => assert!(device_count().unwrap() > 0 && driver_version().unwrap() >= 12000),
        Err(e) => {
            assert!(e.is_unavailable(), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains("host")), "{e}");
            assert!(e.message().contains("libcuda.so") || e.message().contains("device"), "{e}");
            for r in [
                CudaContext::new(0).map(|_| ()),
                device_count().map(|_| ()),
                driver_version().map(|_| ()),
                devices().map(|_| ()),
                peer_info(0, 1).map(|_| ()),
            ] {
                assert!(r.unwrap_err().is_unavailable());
            }
        }
    }
}

/// Every pair of devices that says it can share memory does.
#[test]
fn devices_describe_themselves_and_share_memory() {
    let all = match devices() {
        Ok(all) => all,
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            return did_not_run(Lack::Gpu, e);
        }
    };
    for d in &all {
        assert!(d.sm >= 50 && d.num_sms > 0 && d.memory_bytes > 1 << 30, "{d:?}");
        assert!(!d.name.is_empty() && d.pci.contains(':'), "{d:?}");
        assert!(peer_info(d.ordinal, d.ordinal).is_err());
        for o in all.iter().filter(|o| o.ordinal != d.ordinal) {
            let link = peer_info(d.ordinal, o.ordinal).unwrap();
            if link.access && d.vmm && o.vmm && d.posix_fd {
                let context = |i: &DeviceInfo| CudaContext::new(i.ordinal).unwrap();
                try_share(&context(d), &context(o), ShareBy::Fd).unwrap();
            }
        }
    }
}

/// With the compiler at hand it compiles; without it the error names every place.
#[test]
fn the_compiler_compiles_or_says_where_it_was_looked_for() {
    let text = "extern \"C\" __global__ void t(int* p) { *p = (int)TW_T; }";
    let mut spec = KernelSpec {
        name: "t".into(),
        text: text.into(),
        defines: vec![("TW_T".into(), 1)],
        arch: "sm_90a".into(),
    };
    match Nvrtc.compile(&spec) {
        Ok(c) => {
            assert!(c.cubin.starts_with(b"\x7fELF"));
            // Also the second time, when the compiler could take it from a cache of its own,
            // without a log.
            for log in [c.log, Nvrtc.compile(&spec).unwrap().log] {
                assert!(kernel_uses(&log).iter().any(|k| k.name == "t" && k.registers > 0));
            }
            spec.text = "this is not C".into();
            let e = Nvrtc.compile(&spec).unwrap_err();
            assert!(e.to_string().contains("error"), "{e}");
            assert!(load_nvrtc(Some("/nowhere".as_ref())).unwrap_err().is_unavailable());
        }
        Err(e) => {
            assert!(e.is_unavailable() && e.message().contains("libnvrtc.so.13"), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains("pip install")), "{e}");
        }
    }
}

/// Times of spans come from events: of more spans than are looked at together, and of none in a
/// graph.
#[test]
fn a_traced_stream_tells_what_ran_and_when() {
    use crate::{Buffer, Queue, Tracer};
    let Some(ctx) = device() else { return };
    let start = std::time::Instant::now();
    let tracer = std::sync::Arc::new(Tracer::new(start));
    let stream = CudaStream::with_tracer(&ctx, "main", Some(tracer.clone())).unwrap();
    let (small, large) =
        (CudaMemory::zeroed(&ctx, 1 << 10).unwrap(), CudaMemory::zeroed(&ctx, 1 << 28).unwrap());
    let fill = |name, m: &CudaMemory| {
        let _span = stream.span(name);
        stream.fill_memory(m, 1).unwrap();
    };
    (0..1500).for_each(|_| fill("small", &small));
    fill("large", &large);
    let spans = tracer.take();
    assert_eq!((spans.len(), tracer.take().len()), (1501, 0));
    let end_us = start.elapsed().as_secs_f64() * 1e6;
    for two in spans.windows(2) {
        // The driver tells half a microsecond.
        assert!(two[0].start_us + two[0].len_us <= two[1].start_us + 1.0, "{two:?}");
    }
    // Other tests share the GPU, and a span may wait for what they do: one in 1500 has not.
    let last = spans.last().unwrap();
    let small = spans[..1500].iter().min_by(|a, b| a.len_us.total_cmp(&b.len_us)).unwrap();
    assert!(small.name == "small" && last.name == "large" && last.lane == "main", "{last:?}");
    assert!(small.start_us > 0.0 && last.start_us + last.len_us < end_us + 100.0, "{last:?}");
    // 256 MiB at less than 10 TB/s.
    assert!(last.len_us > 26.0 && small.len_us < last.len_us, "{small:?} {last:?}");
    stream.begin_capture().unwrap();
    fill("captured", &large);
    let graph = stream.end_capture().unwrap();
    stream.replay(&graph).unwrap();
    stream.synchronize_until(None).unwrap();
    assert!(tracer.take().is_empty() && large.download().unwrap().iter().all(|b| *b == 1));
}

/// Queuing work frees nothing, as that may wait for the device; waiting for the stream does.
#[test]
fn what_work_has_used_is_not_freed_by_a_launch() {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::{Point, Queue};
    thread_local!(static LAUNCHES: Cell<bool> = const { Cell::new(false) });
    #[derive(Default)]
    struct Ends {
        all: AtomicUsize,
        in_launches: AtomicUsize,
    }
    struct Thing(Arc<Ends>);
    impl Drop for Thing {
        fn drop(&mut self) {
            self.0.all.fetch_add(1, Ordering::Relaxed);
            self.0.in_launches.fetch_add(usize::from(LAUNCHES.get()), Ordering::Relaxed);
        }
    }
    let Some(ctx) = device() else { return };
    let (stream, ends) = (CudaStream::new(&ctx).unwrap(), Arc::new(Ends::default()));
    for _ in 0..5 {
        for _ in 0..100 {
            LAUNCHES.set(true);
            stream.hold(|| Arc::new(Thing(ends.clone())));
            LAUNCHES.set(false);
        }
        let e = stream.event().unwrap();
        stream.record(&e).unwrap();
        e.synchronize(None).unwrap();
    }
    // Another test may have taken some, and be about to free them.
    let reached = |n: usize| {
        let start = std::time::Instant::now();
        while ends.all.load(Ordering::Relaxed) < n && start.elapsed().as_secs() < 5 {
            std::thread::yield_now();
        }
        ends.all.load(Ordering::Relaxed)
    };
    let ended = reached(300);
    assert!((300..500).contains(&ended), "all but the latest are freed: {ended} of 500");
    // What another thread holds is for work that it may not have queued yet.
    let theirs = || stream.hold(|| Arc::new(Thing(ends.clone())));
    std::thread::scope(|s| s.spawn(theirs).join()).unwrap();
    let (token, later) = (crate::Pending::new((), &stream, None).unwrap(), ends.clone());
    stream.hold(|| Arc::new(Thing(later)));
    token.wait().unwrap();
    assert_eq!(reached(500), 500, "the host has waited for all but two");
    stream.synchronize_until(None).unwrap();
    assert_eq!(reached(501), 501);
    drop(stream);
    assert_eq!((reached(502), ends.in_launches.load(Ordering::Relaxed)), (502, 0));
}
