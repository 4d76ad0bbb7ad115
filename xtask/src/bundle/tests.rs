//! Tests of the bundle for machines with GPUs, without a GPU.

use super::*;

mod evidence;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        fs::create_dir_all(dir.join("cubins")).unwrap();
        Self(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn a_bundle_that_is_too_large_names_its_largest_files() {
    let dir = Folder::new("sizes");
    fs::write(dir.0.join("cubins/a.cubin"), [0; 100]).unwrap();
    fs::write(dir.0.join("tilewire"), [0; 1000]).unwrap();
    let sizes = sizes(&dir.0);
    assert_eq!(sizes[Path::new("cubins/a.cubin")], 100);
    check_sizes(&sizes, 1100).unwrap();
    let e = check_sizes(&sizes, 1099).unwrap_err();
    assert!(e.contains("1100 bytes") && e.find("tilewire") < e.find("a.cubin"), "{e}");
}

/// Kernels and programs that are packed here are there once `run.sh` has begun.
#[test]
fn packed_kernels_are_unpacked_once() {
    let dir = Folder::new("packed");
    fs::write(dir.0.join("cubins/a.cubin"), [7; 100]).unwrap();
    pack(&dir.0, "cubins").unwrap();
    assert!(!dir.0.join("cubins").exists());
    fs::create_dir_all(dir.0.join("programs")).unwrap();
    fs::write(dir.0.join("programs/a-program"), [8; 100]).unwrap();
    pack(&dir.0, "programs").unwrap();
    for (name, text) in TEXTS {
        fs::write(dir.0.join(name), text).unwrap();
    }
    for _ in 0..2 {
        let done = Command::new("bash").arg(dir.0.join("run.sh")).arg("--help").output();
        assert!(done.unwrap().status.success());
        assert_eq!(fs::read(dir.0.join("cubins/a.cubin")).unwrap(), [7; 100]);
        assert_eq!(fs::read(dir.0.join("a-program")).unwrap(), [8; 100]);
    }
    let left = fs::read_dir(&dir.0).unwrap().flatten();
    let left: Vec<_> =
        left.map(|e| e.file_name()).filter(|n| n.to_string_lossy().starts_with("new")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_key_without_machine_code_is_named() {
    let dir = Folder::new("keys");
    let keys = keys_of("{\"key\": \"k1\"}\nno row\n{\"key\": \"k2\"}\n");
    assert_eq!(keys, ["k1", "k2"]);
    let cubins = dir.0.join("cubins");
    fs::write(cubins.join("k1.cubin"), b"\x7fELF...").unwrap();
    fs::write(cubins.join("k2.cubin"), b"not code").unwrap();
    let e = check_keys(&cubins, &keys).unwrap_err();
    assert!(e.contains("k2") && !e.contains("k1"), "{e}");
    fs::write(cubins.join("k2.cubin"), b"\x7fELF...").unwrap();
    check_keys(&cubins, &keys).unwrap();
    assert!(check_keys(&cubins, &[]).is_err());
}

#[test]
fn programs_are_found_in_cargos_messages() {
    let json = r#"{"reason":"compiler-artifact","target":{"name":"tilewire_device"},"executable":"/t/device-1"}
{"reason":"compiler-artifact","target":{"name":"tilewire_core"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"tilewire"},"executable":"/t/tilewire"}"#;
    let found = executables(json);
    let names: Vec<_> = found.keys().collect();
    assert_eq!(names, ["device", "tilewire"]);
}

#[test]
fn every_test_on_gpus_is_taken() {
    let nn = gpu_tests(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/nn/tests")));
    assert_eq!(nn, ["gpu_model"]);
    let tests = gpu_tests(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/ops/tests")));
    assert!(tests.iter().any(|t| t == "gpu") && tests.iter().any(|t| t == "gpu_team"), "{tests:?}");
}

/// However it is looked up, the call fails and is noted.
#[test]
fn the_interposer_counts_calls() {
    // Not passed over: without the interposer nothing shows that multicast is never called.
    let gcc = Command::new("gcc").arg("--version").output();
    assert!(gcc.is_ok(), "this test needs gcc (install it: apt-get install gcc): {gcc:?}");
    let dir = Folder::new("multicast");
    let (lib, log) = (dir.0.join("lib.so"), dir.0.join("log"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/bundle/nomulticast.c");
    let gcc = ["-shared", "-fPIC", "-Wall", "-Werror", source, "-ldl", "-o"];
    output(Command::new("gcc").args(gcc).arg(&lib)).unwrap();
    let script = "import ctypes; print(ctypes.CDLL(None).cuMulticastCreate(None, None))";
    let mut python = Command::new("python3");
    python.args(["-c", script]).env("LD_PRELOAD", &lib).env("TW_MULTICAST_LOG", &log);
    assert_eq!(output(&mut python).unwrap().trim(), "801");
    let log = fs::read_to_string(log).unwrap();
    let calls = log.lines().filter(|l| *l == "cuMulticastCreate").count();
    assert!(log.starts_with("loaded") && calls == 1, "{log}");
}

/// Calls of a thread are told where that thread has a file, and otherwise not; and it has no more
/// memory than its file says.
#[test]
fn the_interposer_tells_what_a_thread_calls() {
    let dir = Folder::new("calls");
    let (lib, fake) = (dir.0.join("lib.so"), dir.0.join("fake.so"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/bundle/nomulticast.c");
    let gcc = ["-shared", "-fPIC", "-Wall", "-Werror", source, "-ldl", "-o"];
    output(Command::new("gcc").args(gcc).arg(&lib)).unwrap();
    let driver = dir.0.join("fake.c");
    let text = "int cuMemAlloc_v2(long *p, long n) { *p = n; return 0; }\n\
                int cuModuleLoadDataEx(long a, long b, long c, long d, long e) { return a * b - c + d * e; }\n\
                int cuLaunchKernel(void) { return 7; }\n";
    fs::write(&driver, text).unwrap();
    let build = ["-shared", "-fPIC", "-o"];
    output(Command::new("gcc").args(build).arg(&fake).arg(&driver)).unwrap();
    let script = "import ctypes, os, sys, threading\n\
        d = ctypes.CDLL(sys.argv[1])\n\
        out, mine = ctypes.c_long(), f'{sys.argv[2]}/{threading.get_native_id()}'\n\
        assert d.cuMemAlloc_v2(ctypes.byref(out), 5) == 0 and out.value == 5\n\
        open(mine, 'w').close()\n\
        t = threading.Thread(target=lambda: d.cuMemAlloc_v2(ctypes.byref(out), 6))\n\
        t.start(), t.join()\n\
        assert d.cuModuleLoadDataEx(2, 3, 4, 5, 6) == 32 and d.cuLaunchKernel() == 7\n\
        print(open(mine).read().split(), out.value)\n\
        open(f'{mine}.memory', 'w').write('2\\n')\n\
        print([d.cuMemAlloc_v2(ctypes.byref(out), 7) for _ in range(4)], open(f'{mine}.memory').read().split())\n\
        os.remove(f'{mine}.memory')\n\
        print(d.cuMemAlloc_v2(ctypes.byref(out), 8), out.value)";
    let mut python = Command::new("python3");
    python.args(["-c", script]).arg(&fake).arg(&dir.0);
    python.env("LD_PRELOAD", &lib).env("TW_CALLS_DIR", &dir.0);
    let said = output(&mut python).unwrap();
    let said: Vec<_> = said.lines().collect();
    let few = "[0, 0, 2, 2] ['2', 'passed', 'passed', 'refused', 'refused']";
    assert_eq!(said, ["['cuModuleLoadDataEx'] 6", few, "0 8"]);
}

/// The interposer makes a machine look worse than it is, and leaves it alone without its variables.
#[test]
fn the_interposer_breaks_what_it_is_told_to() {
    let dir = Folder::new("broken");
    let (lib, fake, driver) = (dir.0.join("lib.so"), dir.0.join("fake.so"), dir.0.join("fake.c"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/bundle/nomulticast.c");
    let gcc = ["-shared", "-fPIC", "-Wall", "-Werror", source, "-ldl", "-o"];
    output(Command::new("gcc").args(gcc).arg(&lib)).unwrap();
    let text = "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\n\
                int cuDeviceGetAttribute(int *v, int a, int d) { *v = 9; return d; }\n\
                int cuDeviceCanAccessPeer(int *v, int a, int b) { *v = 1; return 0; }\n\
                int cuMemCreate(long *h, long n, void *p, long f) { *h = n; return 0; }\n\
                int cuMemImportFromShareableHandle(long *h, void *os, int t) { *h = 77; return 0; }\n\
                int cuMemExportToShareableHandle(int *o, long h, int t, long f) { return 0; }\n\
                int cuMemMap(long p, long n, long o, long h, long f) { return 0; }\n\
                int cuMemSetAccess(long p, long n, void *d, long c) { return 0; }\n";
    fs::write(&driver, text).unwrap();
    output(Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&fake).arg(&driver)).unwrap();
    // Rank's own memory is 5, mapped at 100; the peer's 77, at 200.
    let script = "import ctypes, sys\n\
        d, i, l = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_long()\n\
        def value(call, *more): return (call(ctypes.byref(i), *more), i.value)[1]\n\
        print(value(d.cuDriverGetVersion), value(d.cuDeviceGetAttribute, 75, 0), value(d.cuDeviceGetAttribute, 76, 0),\n\
            value(d.cuDeviceGetAttribute, 97, 0), value(d.cuDeviceGetAttribute, 16, 0), value(d.cuDeviceCanAccessPeer, 0, 1),\n\
            d.cuMemCreate(ctypes.byref(l), 5, None, 0), d.cuMemMap(100, 1, 0, 5, 0), d.cuMemSetAccess(100, 1, None, 1),\n\
            d.cuMemImportFromShareableHandle(ctypes.byref(l), None, 1), d.cuMemMap(200, 1, 0, 77, 0),\n\
            d.cuMemSetAccess(200, 1, None, 1), d.cuMemExportToShareableHandle(None, 5, 1, 0))";
    let run = |vars: &[(&str, &str)]| {
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(&fake).env("LD_PRELOAD", &lib);
        python.envs(vars.iter().copied());
        output(&mut python).unwrap().trim().to_owned()
    };
    assert_eq!(run(&[]), "13000 9 9 9 9 1 0 0 0 0 0 0 0");
    let worse = [
        ("TW_DRIVER_VERSION", "12000"),
        ("TW_COMPUTE_CAPABILITY", "75"),
        ("TW_NO_PEERS", "217"),
        ("TW_SHARED_BYTES", "101376"),
        ("TW_FAIL", "cuMem=3,cuMemExportToShareableHandle=800"),
    ];
    assert_eq!(run(&worse), "12000 7 5 101376 9 0 0 0 0 0 0 217 800");
}

#[test]
fn a_changed_tree_is_told_from_its_commit() {
    let dir = Folder::new("commit");
    let git = |args: &[&str]| {
        let who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"];
        let mut git = Command::new("git");
        output(git.arg("-C").arg(&dir.0).args(who).args(args)).unwrap()
    };
    git(&["init", "--quiet"]);
    fs::write(dir.0.join("a"), "1").unwrap();
    git(&["add", "a"]);
    git(&["commit", "--quiet", "-m", "a"]);
    let commit = commit_of(&dir.0).unwrap();
    assert!(commit.len() == 12 && git(&["rev-parse", "HEAD"]).starts_with(&commit), "{commit}");
    fs::write(dir.0.join("a"), "2").unwrap();
    assert_eq!(commit_of(&dir.0), Some(format!("{commit}-dirty")));
}

/// Runs `script` in Python with the runner's modules, and returns its output.
fn runner(script: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/bundle");
    let script = format!(
        "import json, sys\nsys.path.insert(0, sys.argv[1])\nimport configs, faults, judges, modes, run\n{script}"
    );
    let mut python = Command::new("python3");
    output(python.args(["-B", "-c", &script, folder])).unwrap().trim().to_owned()
}

#[test]
fn rows_that_did_not_run_are_failures() {
    let said = runner(
        "row = lambda op, **more: json.dumps({'op': op, 'dtype': 'bf16', 'ranks': 2, 'shape': 'm=1', 'wrong': 0, **more})\n\
         right, left = row('all_gather'), row('ag_gemm/nccl', unsupported=True, note='no peers')\n\
         but, ran = judges.rows_but('/nccl', why='peers'), row('gemm_rs/nccl')\n\
         for judge, rows in [(judges.by_rows, [right]), (judges.by_rows, [right, left]), (but, [right, left]),\n\
         \x20   (but, [left]), (judges.rows_but('/ep', why='peers'), [right, left]), (judges.by_rows, [right, row('ep', wrong=3)]),\n\
         \x20   (judges.rows_but('/nccl', why='memory'), [right, left]), (but, [right, left, ran])]:\n\
         \x20   print(*judge(0, '\\n'.join(rows)))\n\
         print(*judges.by_rows(1, right))",
    );
    let said: Vec<_> = said.lines().collect();
    let states: Vec<_> = said.iter().filter_map(|l| l.split(' ').next()).collect();
    let want = "passed failed passed failed failed failed failed failed failed";
    assert_eq!(states.join(" "), want, "{said:#?}");
    assert!(said[1].contains("ag_gemm/nccl") && said[1].contains("no peers"), "{}", said[1]);
}

#[test]
fn what_nobody_watched_is_a_failure() {
    let said = runner(
        "for calls in [0, None, 2]:\n\
         \x20   line = {'state': 'passed', 'summary': 'good'}\n\
         \x20   judges.watched(line, calls)\n\
         \x20   print(line['state'], line['multicast_calls'], line['summary'])",
    );
    let said: Vec<_> = said.lines().collect();
    assert_eq!(said[0], "passed 0 good");
    assert!(said[1].starts_with("failed None not watched"), "{}", said[1]);
    assert!(said[2].starts_with("failed 2 2 calls"), "{}", said[2]);
}

/// A doctor that ended early has not said that a backend cannot be used.
#[test]
fn what_is_left_out_was_told_by_doctor() {
    let said = runner(
        "told = 'ok   cores: 4\\nwarn backend nccl: no libnccl.so.2\\n       -> x\\nok   backend nvshmem: available\\n'\n\
         modes.doctor_says = lambda: ''\n\
         print(configs.why_not('nccl', told), configs.why_not('nvshmem', told), configs.why_not('nccl', told[:20]))\n\
         for rc, out in [(0, told), (1, told), (1, told + 'FAIL NCCL: x cannot be loaded'), (0, told[:50]), (139, told), (0, '')]:\n\
         \x20   print(judges.by_backends('nccl', 'nvshmem')(rc, out)[0])\n\
         left = {c.name for n in [2, 8] for c in modes.conformance(n) if 'nccl' in c.name and c.needs}\n\
         print(left, all(isinstance(c.needs, judges.Reported) for c in modes.conformance(1) if c.needs and 'check' not in c.name))",
    );
    let want = [
        "backend nccl: no libnccl.so.2 None None",
        "passed",
        "passed",
        "failed",
        "failed",
        "failed",
        "failed",
        "set() True",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), want);
}

/// In `conformance` on two GPUs and more; where there is one, and elsewhere, it is known why.
#[test]
fn what_is_left_out_without_a_word_is_no_success() {
    let said = runner(
        "import pathlib, tempfile\n\
         for n, needs in [(2, 'no tool'), (2, judges.Reported('doctor says')), (1, 'no tool')]:\n\
         \x20   with tempfile.TemporaryDirectory() as out:\n\
         \x20       r = run.Runner(pathlib.Path(out), n, False, {})\n\
         \x20       for mode in ['conformance', 'faults']:\n\
         \x20           r.run(mode, configs.Config('c', [], needs=needs))\n\
         \x20       print('=', r.unreported, r.count['skipped'])",
    );
    let said: Vec<_> = said.lines().filter(|l| l.starts_with('=')).collect();
    assert_eq!(said, ["= ['conformance/c'] 2", "= [] 2", "= [] 2"]);
}

#[test]
fn tests_that_did_not_run_and_rates_that_were_not_compared_are_failures() {
    let said = runner(
        "result = 'test result: ok. 3 passed; 0 failed'\n\
         print(*judges.by_ran(0, 'runs on a GPU\\n' + result))\n\
         print(*judges.by_ran(0, 'kernels did not run: no NVRTC\\n' + result))\n\
         rows = [{'op': 'links/put', 'shape': 'len=1MiB', 'note': '90 GB/s'}]\n\
         for text in ['CE ring   1024 KiB: get 1 us 2 GB/s | put 1 us 91 GB/s', 'CE ring of another form', '']:\n\
         \x20   print(*judges.by_ratios(judges.against_limits(text, rows)))\n\
         of = {configs.program('gpu_team'), configs.program('device')}\n\
         team = lambda n: [c for m in [modes.conformance, faults.faults] for c in m(n) if of & set(c.argv)]\n\
         print([c.name for c in team(1) if not c.needs and 'TW_RANKS' not in c.env])\n\
         print([c.name for c in team(2) if c.judge is judges.by_tests or '--nocapture' not in c.argv], len(team(2)) > 40)",
    );
    let said: Vec<_> = said.lines().collect();
    assert_eq!(said[0], "passed test result: ok. 3 passed; 0 failed");
    assert!(said[1].starts_with("failed kernels did not run: no NVRTC"), "{}", said[1]);
    assert!(said[2].starts_with("passed 1 rates, lowest: 0.989 put"), "{}", said[2]);
    assert!(said[3..5].iter().all(|l| l.starts_with("failed no line")), "{said:?}");
    // A test of a team that finds one GPU, or no NCCL, says so and passes.
    assert_eq!(said[5..], ["['device']", "[] True"]);
}

#[test]
fn every_line_of_the_runner_says_what_ran_and_where() {
    let said = runner(
        "print(judges.cases_of('ok      rendezvous of 4 ranks            12.5 ms  1.0 ms each\\nall ok'))\n\
         print(run.where({'gpus': [{'name': 'A'}, {'name': 'B'}]}, 1))\n\
         print(run.where({'gpus': [{'name': 'A'}, {'name': 'B'}]}, 2)['gpu'])",
    );
    let said: Vec<_> = said.lines().collect();
    let case = "[{'case': 'rendezvous of 4 ranks', 'ok': True, 'ms': 12.5, 'text': '1.0 ms each'}]";
    assert_eq!(said[0], case);
    assert!(said[1].contains("'gpu': 'A'") && said[1].contains("'driver'"), "{}", said[1]);
    assert!(said[1].contains("'commit': None"), "a folder that is no bundle: {}", said[1]);
    assert_eq!(said[2], "A, B");
}

/// The runner itself, without a GPU: the configurations of every mode.
#[test]
fn the_runner_lists_its_configurations() {
    let run = concat!(env!("CARGO_MANIFEST_DIR"), "/bundle/run.sh");
    let list = |args: &[&str]| output(Command::new("bash").arg(run).args(args).arg("--list"));
    let all = list(&["all", "8"]).unwrap();
    for wanted in [
        "smoke/doctor",
        "conformance/one-sided-threads-vmm",
        "conformance/one-sided-processes-3",
        "conformance/litmus-copy_push_flag",
        "conformance/launch-calls-14-17",
        "conformance/ops-gpu_team-heaps",
        "conformance/ops-gpu_team-left-6-13",
        "conformance/verify-threads-8-products",
        "conformance/verify-processes-2-ep",
        "conformance/memcheck-1-gemm",
        "conformance/memcheck-1-virtual-all_gather",
        "conformance/synccheck-2-all_gather",
        "conformance/memcheck-2-team-21-24",
        "conformance/memcheck-1-layers",
        "faults/ranks-5-ep",
        "faults/no-export-verify",
        "faults/silent-in-training-behind-4",
        "faults/left-in-6-14",
        "faults/stopped-in-0-5",
        "faults/killed-in-19-20",
        "faults/two-ranks-on-one-gpu",
        "faults/killed-4-one-connection",
        "bench/links-8",
        "bench/train-8",
    ] {
        assert!(all.lines().any(|l| l == wanted), "{wanted} is not in\n{all}");
    }
    let names: std::collections::BTreeSet<&str> = all.lines().collect();
    assert_eq!(names.len(), all.lines().count(), "each has a name of its own");
    let two = list(&["conformance", "2", "--only", "verify-", "--skip", "shared"]).unwrap();
    assert!(two.lines().all(|l| l.contains("verify") && !l.contains("-4-")), "{two}");
    assert!(list(&["nothing"]).is_err());
}
