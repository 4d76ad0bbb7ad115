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
        Err(e) => return assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}"),
    };
    for d in &all {
        assert!(d.sm >= 50 && d.num_sms > 0 && d.memory_bytes > 1 << 30, "{d:?}");
        assert!(!d.name.is_empty() && d.pci.contains(':'), "{d:?}");
        assert!(peer_info(d.ordinal, d.ordinal).is_err());
        for o in all.iter().filter(|o| o.ordinal != d.ordinal) {
            let link = peer_info(d.ordinal, o.ordinal).unwrap();
            if link.access && d.vmm && o.vmm && d.posix_fd {
                let context = |i: &DeviceInfo| CudaContext::new(i.ordinal).unwrap();
                try_share(&context(d), &context(o)).unwrap();
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
            assert!(kernel_uses(&c.log).iter().any(|k| k.name == "t" && k.registers > 0));
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
