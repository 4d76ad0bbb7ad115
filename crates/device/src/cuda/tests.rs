use std::path::PathBuf;

use super::*;

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
            ] {
                assert!(r.unwrap_err().is_unavailable());
            }
        }
    }
}

#[test]
fn a_missing_compiler_names_where_it_was_looked_for() {
    if let Err(e) = loader::find_nvrtc(&[PathBuf::from("/nowhere/lib")]) {
        assert!(e.is_unavailable() && e.message().contains("/nowhere/lib"), "{e}");
        assert!(e.get_hint().is_some_and(|h| h.contains("pip install")), "{e}");
    }
    match compile(
        "t",
        "extern \"C\" __global__ void t(int* p) { *p = TW_T; }",
        "sm_90a",
        &[("TW_T", 1)],
    ) {
        Ok(cubin) => {
            assert!(cubin.starts_with(b"\x7fELF"));
            let e = compile("bad", "this is not C", "sm_90a", &[]).unwrap_err();
            assert!(e.to_string().contains("error"), "{e}");
        }
        Err(e) => assert!(e.is_unavailable(), "{e}"),
    }
}
