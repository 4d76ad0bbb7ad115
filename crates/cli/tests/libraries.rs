//! Libraries of NVIDIA's that are named by their file: fakes, which export what is looked up in the
//! real ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// What is looked up in each library, beside what says its version.
const NCCL: [&str; 18] = [
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclCommCuDevice",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
];
const NVSHMEM: [&str; 7] = [
    "nvshmemx_get_uniqueid",
    "nvshmemx_set_attr_uniqueid_args",
    "nvshmemx_hostlib_init_attr",
    "nvshmem_my_pe",
    "nvshmem_n_pes",
    "nvshmem_malloc",
    "nvshmem_ptr",
];
const CUBLASLT: [&str; 13] = [
    "cublasLtGetVersion",
    "cublasLtCreate",
    "cublasLtGetStatusString",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
];

fn nccl_version(number: u32) -> String {
    format!("int ncclGetVersion(int* v) {{ *v = {number}; return 0; }}\n")
}

fn nvshmem_version(minor: u32) -> String {
    let args = "int* a, int* b, int* c";
    format!("void nvshmemx_vendor_get_version_info({args}) {{ *a = 3; *b = {minor}; *c = 1; }}\n")
}

/// A library at `path` that exports `names`, which do nothing, and what `more` defines.
fn fake(path: &Path, names: &[&str], more: &str) -> PathBuf {
    fake_with(&[], path, names, more)
}

/// The same, made with more arguments.
fn fake_with(args: &[&str], path: &Path, names: &[&str], more: &str) -> PathBuf {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let does_nothing = names.iter().map(|n| format!("int {n}(void) {{ return 0; }}\n"));
    let source = path.with_extension("c");
    fs::write(&source, does_nothing.collect::<String>() + more).unwrap();
    let mut gcc = Command::new("gcc");
    let made = gcc.args(["-shared", "-fPIC"]).args(args).arg("-o").args([path, &*source]).status();
    assert!(made.is_ok_and(|s| s.success()), "this test needs gcc (apt-get install gcc)");
    path.to_owned()
}

fn doctor(libraries: &[&Path], vars: &[(&str, &str)]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    let safe =
        [("NCCL_NVLS_ENABLE", "0"), ("NCCL_GRAPH_REGISTER", "0"), ("NVSHMEM_DISABLE_NVLS", "1")];
    c.args(["doctor", "--json"]).envs(safe);
    for l in libraries {
        c.arg("--library").arg(l);
    }
    c.envs(vars.iter().copied()).output().unwrap()
}

/// The line about the library of that name.
fn line(o: &Output, name: &str) -> String {
    let all: Vec<Value> = serde_json::from_slice(&o.stdout).expect("JSON");
    let texts = all.iter().filter(|f| f["code"] == "library").filter_map(|f| f["text"].as_str());
    texts.filter(|t| t.contains(name)).collect()
}

fn refused(o: &Output) -> String {
    assert_eq!(o.status.code(), Some(2), "{o:?}");
    String::from_utf8_lossy(&o.stderr).into_owned()
}

#[test]
fn the_named_copy_is_the_one_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let nccl = fake(&at("a/libnccl.so.2"), &NCCL, &nccl_version(22907));
    // Newer than what was tested: with a warning, which `doctor` does not show.
    let nvshmem = fake(&at("a/libnvshmem_host.so.3"), &NVSHMEM, &nvshmem_version(99));
    let lt = fake(&at("a/libcublasLt.so.12.8"), &CUBLASLT, "");
    let o = doctor(&[&nccl, &nvshmem, &lt], &[]);
    assert!(o.status.code() != Some(2), "{o:?}");
    for (name, file) in
        [("NCCL: 2.29.7 at", &nccl), ("NVSHMEM: 3.99.1 at", &nvshmem), ("cuBLASLt: ", &lt)]
    {
        let said = line(&o, name);
        assert!(said.contains(&file.display().to_string()), "{said}");
        assert!(said.contains("already loaded"), "{said}");
    }
}

#[test]
fn another_copy_that_is_loaded_is_an_error_that_names_both() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let copies = |name: &str, names: &[&str], more: &str| {
        [fake(&at("a").join(name), names, more), fake(&at("b").join(name), names, more)]
    };
    for [a, b] in [
        copies("libnccl.so.2", &NCCL, &nccl_version(22907)),
        copies("libnvshmem_host.so.3", &NVSHMEM, &nvshmem_version(4)),
        copies("libcublasLt.so.13", &CUBLASLT, ""),
    ] {
        let (a_text, b_text) = (a.display().to_string(), b.display().to_string());
        let said = refused(&doctor(&[&a], &[("LD_PRELOAD", &b_text)]));
        assert!(said.contains(&a_text) && said.contains(&b_text), "{said}");
        assert!(said.contains("two copies"), "{said}");
        let said = refused(&doctor(&[&a, &b], &[]));
        assert!(said.contains(&a_text) && said.contains(&b_text), "{said}");
        // The one that is loaded already may be named.
        assert!(doctor(&[&a, &a], &[("LD_PRELOAD", &a_text)]).status.code() != Some(2));
    }
}

/// The finding about the library of that name: its state, what it says and what to do.
fn state(o: &Output, name: &str) -> [String; 3] {
    let all: Vec<Value> = serde_json::from_slice(&o.stdout).expect("JSON");
    let named = |f: &&Value| f["text"].as_str().is_some_and(|t| t.starts_with(name));
    let found = all.iter().filter(|f| f["code"] == "library").find(named);
    let found = found.unwrap_or_else(|| panic!("nothing of {name} in {all:#?}"));
    ["state", "text", "remedy"].map(|k| found[k].as_str().unwrap_or_default().to_owned())
}

/// Nobody has named these: the search finds them.
#[test]
fn a_file_that_is_no_library_fails_with_the_loaders_words() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().display().to_string();
    fs::create_dir(dir.path().join("lib64")).unwrap();
    let files = ["libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2", "libnvshmem_host.so.3"];
    for name in files {
        fs::write(dir.path().join("lib64").join(name), "no library").unwrap();
    }
    let alone = [("VIRTUAL_ENV", ""), ("CONDA_PREFIX", ""), ("PATH", "/none"), ("HOME", &home)];
    let vars = [&alone[..], &[("CUDA_HOME", &home)]].concat();
    let o = doctor(&[], &vars);
    assert_eq!(o.status.code(), Some(1), "{o:?}");
    for name in ["NVRTC: ", "cuBLASLt: ", "NCCL: ", "NVSHMEM: "] {
        let [state, text, remedy] = state(&o, name);
        assert_eq!(state, "fail", "{text}");
        assert!(text.contains("file too short") && text.contains(&home), "{text}");
        assert!(remedy.starts_with("pip install nvidia-"), "{remedy}");
    }
    // One that opens and is of another version serves nobody, and nothing is wrong with the
    // machine.
    for (file, names, version) in
        [(files[2], &NCCL[..], nccl_version(22105)), (files[3], &NVSHMEM[1..], nvshmem_version(3))]
    {
        fake(&dir.path().join("lib64").join(file), names, &version);
    }
    let o = doctor(&[], &vars);
    for name in ["NCCL: ", "NVSHMEM: "] {
        let [state, text, remedy] = state(&o, name);
        assert_eq!(state, "warn", "{text}");
        assert!(text.contains(&home) && remedy.starts_with("pip install nvidia-"), "{text}");
    }
    // One that may use multicast is not opened, and nothing is wrong with that.
    let on = [&vars[..], &[("NCCL_NVLS_ENABLE", "1"), ("NVSHMEM_DISABLE_NVLS", "0")]].concat();
    let o = doctor(&[], &on);
    for (name, want) in [("NCCL: ", "NCCL_NVLS_ENABLE=0"), ("NVSHMEM: ", "NVSHMEM_DISABLE_NVLS=1")]
    {
        let [state, text, remedy] = state(&o, name);
        assert!(state == "warn" && remedy.contains(want), "{state} {text}: {remedy}");
    }
    // Nor one that may register the memory of one side of a captured transfer.
    let o = doctor(&[], &[&vars[..], &[("NCCL_GRAPH_REGISTER", "1")]].concat());
    let [state, text, remedy] = state(&o, "NCCL: ");
    assert!(state == "warn" && remedy.contains("NCCL_GRAPH_REGISTER=0"), "{state} {text}");
}

/// A driver without devices.
#[test]
fn the_driver_can_be_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let make = |name: &str, args: &[&str]| {
        let more = "int cuInit(unsigned flags) { return 100 + flags; }\n\
            int cuDriverGetVersion(int* v) { *v = 13000; return 0; }\n\
            int cuGetErrorName(int c, const char** s) { *s = \"NO_DEVICE\"; return 0; }\n\
            int cuGetErrorString(int c, const char** s) { return cuGetErrorName(c, s); }\n";
        fake_with(args, &at(name), &[], more)
    };
    let soname = ["-Wl,-soname,libcuda.so.1"];
    let [a, b] = ["a", "b"].map(|d| make(&format!("{d}/libcuda.so.1"), &soname));
    let o = doctor(&[&a], &[]);
    let all: Vec<Value> = serde_json::from_slice(&o.stdout).expect("JSON");
    let said: Vec<_> = all.iter().filter_map(|f| f["text"].as_str()).collect();
    assert!(said.iter().any(|t| t.contains("finds no device")), "{said:?}");
    let (a_text, b_text) = (a.display().to_string(), b.display().to_string());
    for said in
        [refused(&doctor(&[&a], &[("LD_PRELOAD", &b_text)])), refused(&doctor(&[&a, &b], &[]))]
    {
        assert!(said.contains(&a_text) && said.contains(&b_text), "{said}");
        assert!(said.contains("two copies"), "{said}");
    }
    assert!(doctor(&[&a, &a], &[("LD_PRELOAD", &a_text)]).status.code() != Some(2));
    // The binding's first name is libcuda.so: where the loader knows one, it must be of the same
    // driver.
    std::os::unix::fs::symlink(&b, b.with_file_name("libcuda.so")).unwrap();
    let folder = b.parent().unwrap().display().to_string();
    let there = [("LD_LIBRARY_PATH", &*folder)];
    assert!(doctor(&[&b], &there).status.code() != Some(2));
    let said = refused(&doctor(&[&a], &there));
    assert!(
        said.contains(&a_text) && said.contains(&b_text) && said.contains("libcuda.so,"),
        "{said}"
    );
    let said = refused(&doctor(&[&make("c/libcuda.so.1", &[])], &[]));
    assert!(said.contains("does not call itself") && said.contains("hint"), "{said}");
    let said = refused(&doctor(&[&at("d/libcuda.so.1")], &[]));
    assert!(said.contains("cannot be loaded") && said.contains("hint"), "{said}");
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let old = fake(&at("old/libnccl.so.2"), &NCCL, &nccl_version(22605));
    let next = fake(&at("next/libnccl.so.2"), &NCCL, &nccl_version(30001));
    let part = fake(&at("part/libnccl.so.2"), &NCCL[1..], &nccl_version(22907));
    let old_shmem = fake(&at("old/libnvshmem_host.so.3"), &NVSHMEM, &nvshmem_version(3));
    fs::write(at("libnccl.so.2"), "no library").unwrap();
    let install = "pip install nvidia-n";
    for (file, needles) in [
        (&old, ["too old", "2.26.5", "2.27.0", install]),
        (&next, ["another interface", "3.0.1", "2.27.0", install]),
        (&part, ["ncclGetErrorString", "part/libnccl.so.2", "has no", install]),
        (&old_shmem, ["another interface", "3.3.1", "3.4", install]),
        (&at("libnccl.so.2"), ["cannot be loaded", "libnccl", "file too short", install]),
        (&at("none/libnccl.so.2"), ["No such file", "none/libnccl.so.2", "NCCL", "error"]),
        (&at("libm.so.6"), ["libm.so.6", "libnccl.so.2", "libnvrtc.so.13", "libcublasLt.so.12"]),
    ] {
        let said = refused(&doctor(&[file], &[]));
        for n in needles {
            assert!(said.contains(n), "{}: no `{n}` in: {said}", file.display());
        }
    }
    let said = refused(&doctor(&[&part], &[("NCCL_NVLS_ENABLE", "1")]));
    assert!(said.contains("NCCL_NVLS_ENABLE=0"), "{said}");
    let mut run = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    run.args(["run", "-n", "1", "--library"]).arg(&part).args(["--", "true"]);
    let said = refused(&run.output().unwrap());
    assert!(said.contains("behind `--`"), "{said}");
}
