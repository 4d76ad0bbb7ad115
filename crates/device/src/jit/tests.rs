use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use tilewire_core::inject;

use super::*;

/// Counts what it compiles; the code is the text.
struct Fake {
    version: Result<String>,
    compiled: AtomicUsize,
}

impl Compiler for Fake {
    fn version(&self) -> Result<String> {
        self.version.clone()
    }

    fn compile(&self, spec: &KernelSpec) -> Result<Compiled> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(std::time::Duration::from_millis(20));
        if spec.text.is_empty() {
            return Err(Error::internal("nothing to compile"));
        }
        Ok(Compiled { cubin: spec.text.clone().into_bytes(), log: String::new() })
    }
}

fn fake(version: &str) -> Arc<Fake> {
    Arc::new(Fake { version: Ok(version.to_owned()), compiled: AtomicUsize::new(0) })
}

fn no_compiler() -> Arc<Fake> {
    let version = Err(Error::new(ErrorKind::Unavailable, "no compiler here"));
    Arc::new(Fake { version, compiled: AtomicUsize::new(0) })
}

fn spec(text: &str) -> KernelSpec {
    KernelSpec {
        name: "k".into(),
        text: text.into(),
        defines: vec![("TW_N".into(), 4)],
        arch: "sm_80".into(),
    }
}

fn jit(dir: &std::path::Path, compiler: &Arc<Fake>) -> Jit {
    Jit::with(JitMode::Auto, Vec::new(), Cache::open(Some(dir)), compiler.clone())
}

#[test]
fn everything_that_matters_is_in_the_key() {
    let base = spec("text");
    let mut keys = vec![base.key()];
    let mut add = |f: &dyn Fn(&mut KernelSpec)| {
        let mut s = base.clone();
        f(&mut s);
        keys.push(s.key());
    };
    add(&|s| s.name = "other".into());
    add(&|s| s.text = "text ".into());
    add(&|s| s.arch = "sm_90a".into());
    add(&|s| s.defines[0].1 = 5);
    add(&|s| s.defines[0].0 = "TW_M".into());
    add(&|s| s.defines.clear());
    // Fields do not run together.
    add(&|s| (s.name, s.text) = ("kt".into(), "ext".into()));
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    assert_eq!(base.key(), spec("text").key());
}

#[test]
fn a_kernel_is_compiled_once_and_then_read() {
    let dir = tempfile::tempdir().unwrap();
    let compiler = fake("nvrtc13.0");
    for (want, n) in [(Origin::Compiled, 1), (Origin::Cached, 1), (Origin::Cached, 1)] {
        let (code, origin) = jit(dir.path(), &compiler).cubin(&spec("a")).unwrap();
        assert_eq!((&code[..], origin), (&b"a"[..], want));
        assert_eq!(compiler.compiled.load(Ordering::Relaxed), n);
    }
    // Another compiler makes other code; without one, what there is must do.
    let newer = fake("nvrtc13.1");
    assert_eq!(jit(dir.path(), &newer).cubin(&spec("a")).unwrap().1, Origin::Compiled);
    assert_eq!(jit(dir.path(), &no_compiler()).cubin(&spec("a")).unwrap().1, Origin::Cached);
    let e = jit(dir.path(), &no_compiler()).cubin(&spec("b")).unwrap_err();
    assert!(e.is_unavailable() && e.message() == "no compiler here", "{e}");
    // An error of the compiler is not cached.
    assert!(jit(dir.path(), &compiler).cubin(&spec("")).is_err());
    let cache = Cache::open(Some(dir.path())).unwrap();
    assert_eq!(cache.usage().unwrap().entries, 2);
    assert_eq!(cache.clear().unwrap().entries, 2);
    assert_eq!(std::fs::read_dir(cache.dir()).unwrap().count(), 0);
}

#[test]
fn built_in_kernels_come_first_and_switched_off_is_off() {
    let (dir, built) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let compiler = fake("nvrtc13.0");
    let at = |mode| {
        let dirs = vec![built.path().to_owned()];
        Jit::with(mode, dirs, Cache::open(Some(dir.path())), compiler.clone())
    };
    let e = at(JitMode::Off).cubin(&spec("a")).unwrap_err();
    assert!(e.is_unavailable() && e.get_hint().unwrap().contains("TILEWIRE_JIT"), "{e}");
    at(JitMode::Auto).cubin(&spec("a")).unwrap();
    assert_eq!(at(JitMode::Off).cubin(&spec("a")).unwrap().1, Origin::Cached);
    let file = built.path().join(format!("{}.cubin", spec("a").key()));
    let whole = super::elf::tests::file();
    std::fs::write(&file, &whole).unwrap();
    for mode in [JitMode::Off, JitMode::Auto] {
        assert_eq!(at(mode).cubin(&spec("a")).unwrap(), (whole.clone(), Origin::Embedded));
    }
    // A file that was cut off is none.
    for len in [0, whole.len() / 2] {
        std::fs::write(&file, &whole[..len]).unwrap();
        assert_eq!(at(JitMode::Auto).cubin(&spec("a")).unwrap().1, Origin::Cached, "{len} bytes");
        // Nor one of a kernel that nobody has compiled, which would be, and is ahead of time.
        let other = built.path().join(format!("{}.cubin", spec("c").key()));
        std::fs::write(&other, &whole[..len]).unwrap();
        assert!(at(JitMode::Auto).would_compile(&spec("c")), "{len} bytes");
        assert!(!is_built_in(built.path(), &spec("c").key()), "{len} bytes");
        let e = at(JitMode::Off).cubin(&spec("c")).unwrap_err();
        assert!(e.is_unavailable() && e.message().contains("truncated"), "{e}");
        std::fs::write(&other, &whole).unwrap();
        assert!(!at(JitMode::Auto).would_compile(&spec("c")));
        assert!(is_built_in(built.path(), &spec("c").key()));
    }
}

#[test]
fn what_was_compiled_and_found_is_counted_with_its_time() {
    let (dir, compiler) = (tempfile::tempdir().unwrap(), fake("nvrtc13.0"));
    let first = jit(dir.path(), &compiler);
    assert_eq!(first.times(), KernelTimes::default());
    first.cubin(&spec("a")).unwrap();
    first.cubin(&spec("b")).unwrap();
    first.cubin(&spec("a")).unwrap();
    let t = first.times();
    assert_eq!((t.compiled, t.found), (2, 1));
    // The compiler sleeps that long.
    assert!(t.took >= std::time::Duration::from_millis(40), "{t:?}");
    // Another run, with the cache; a failure is no kernel, but takes its time.
    let second = jit(dir.path(), &compiler);
    second.cubin(&spec("b")).unwrap();
    second.cubin(&spec("")).unwrap_err();
    let t = second.times();
    assert_eq!((t.compiled, t.found), (0, 1));
    assert!(t.took >= std::time::Duration::from_millis(20), "{t:?}");
}

#[test]
fn what_would_be_compiled_is_known_ahead() {
    let (dir, built) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let compiler = fake("nvrtc13.0");
    let at = |mode, compiler: &Arc<Fake>| {
        let dirs = vec![built.path().to_owned()];
        Jit::with(mode, dirs, Cache::open(Some(dir.path())), compiler.clone())
    };
    assert!(at(JitMode::Auto, &compiler).would_compile(&spec("a")));
    assert!(!at(JitMode::Off, &compiler).would_compile(&spec("a")));
    assert!(!at(JitMode::Auto, &no_compiler()).would_compile(&spec("a")));
    assert_eq!(compiler.compiled.load(Ordering::Relaxed), 0);
    at(JitMode::Auto, &compiler).cubin(&spec("a")).unwrap();
    assert!(!at(JitMode::Auto, &compiler).would_compile(&spec("a")), "it is cached");
    assert!(at(JitMode::Auto, &fake("nvrtc13.1")).would_compile(&spec("a")), "by another compiler");
    let file = built.path().join(format!("{}.cubin", spec("b").key()));
    std::fs::write(file, super::elf::tests::file()).unwrap();
    assert!(!at(JitMode::Auto, &compiler).would_compile(&spec("b")), "it is built in");
    let no_cache = Err(Error::new(ErrorKind::Permission, "no cache"));
    let without = Jit::with(JitMode::Auto, Vec::new(), no_cache, compiler.clone());
    assert!(without.would_compile(&spec("a")));
}

#[test]
fn a_damaged_entry_is_compiled_anew() {
    let dir = tempfile::tempdir().unwrap();
    let compiler = fake("nvrtc13.0");
    jit(dir.path(), &compiler).cubin(&spec("good")).unwrap();
    let cache = Cache::open(Some(dir.path())).unwrap();
    let file = cache.dir().join(format!("{}-nvrtc13.0.cubin", spec("good").key()));
    let whole = std::fs::read(&file).unwrap();
    let mut bad: Vec<Vec<u8>> = (0..whole.len())
        .map(|i| {
            let mut b = whole.clone();
            b[i] ^= 1;
            b
        })
        .collect();
    bad.extend((0..whole.len()).map(|n| whole[..n].to_vec()));
    bad.push([&whole[..], b"x"].concat());
    for (i, b) in bad.iter().enumerate() {
        std::fs::write(&file, b).unwrap();
        assert!(cache.load(&spec("good").key(), "nvrtc13.0").is_none(), "case {i}");
    }
    let (code, origin) = jit(dir.path(), &compiler).cubin(&spec("good")).unwrap();
    assert_eq!((&code[..], origin), (&b"good"[..], Origin::Compiled));
    assert_eq!(std::fs::read(&file).unwrap(), whole);
    // The entry of another kernel under this name is no entry of this one.
    jit(dir.path(), &compiler).cubin(&spec("evil")).unwrap();
    let other = cache.dir().join(format!("{}-nvrtc13.0.cubin", spec("evil").key()));
    std::fs::rename(other, &file).unwrap();
    assert!(cache.load(&spec("good").key(), "nvrtc13.0").is_none());
}

#[test]
#[cfg_attr(
    not(debug_assertions),
    ignore = "faults are injected only in builds with debug assertions"
)]
fn a_cache_that_cannot_be_used_costs_compilations_only() {
    let compiler = fake("nvrtc13.0");
    // A full disk, in the middle of the file.
    let dir = tempfile::tempdir().unwrap();
    let j = jit(dir.path(), &compiler);
    inject::arm(0);
    assert_eq!(j.cubin(&spec("a")).unwrap().1, Origin::Compiled);
    assert!(inject::disarm());
    assert_eq!(j.cache().unwrap().usage().unwrap().entries, 0, "half a file was left");
    assert!(
        std::fs::read_dir(j.cache().unwrap().dir())
            .unwrap()
            .flatten()
            .all(|e| { e.path().extension().is_some_and(|x| x == "lock") })
    );
    // A folder that others may write, one that is a link, one that is a file.
    let open = |p: &std::path::Path| Cache::open(Some(p)).unwrap_err();
    let shared = tempfile::tempdir().unwrap();
    let inner = shared.path().join("kernels-1");
    std::fs::create_dir(&inner).unwrap();
    std::fs::set_permissions(&inner, PermissionsExt::from_mode(0o777)).unwrap();
    let e = open(shared.path());
    assert!(e.kind() == ErrorKind::Permission && e.to_string().contains("777"), "{e}");
    assert!(e.get_hint().unwrap().contains("TILEWIRE_CACHE_DIR"));
    let linked = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(dir.path(), linked.path().join("kernels-1")).unwrap();
    assert_eq!(open(linked.path()).kind(), ErrorKind::Permission);
    let file = linked.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_eq!(open(&file).kind(), ErrorKind::Io);
    let j = jit(shared.path(), &compiler);
    assert_eq!(j.cubin(&spec("b")).unwrap().1, Origin::Compiled);
    assert_eq!(j.cubin(&spec("b")).unwrap().1, Origin::Compiled);
    // A lock that is not to be had, by root either.
    let full = tempfile::tempdir().unwrap();
    let j = jit(full.path(), &compiler);
    let lock = format!("{}.lock", spec("c").key());
    std::fs::create_dir(j.cache().unwrap().dir().join(lock)).unwrap();
    assert_eq!(j.cubin(&spec("c")).unwrap().1, Origin::Compiled);
    // A new one is private.
    let made = jit(dir.path(), &compiler);
    let mode = std::fs::metadata(made.cache().unwrap().dir()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

/// Of a process with the same number, in another container or killed: they are not ours to touch.
#[test]
fn files_that_others_write_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(Some(dir.path())).unwrap();
    let key = spec("a").key();
    let name = |i| dir.path().join(format!(".{key}.{}.{i}", std::process::id()));
    (0..50).for_each(|i| std::fs::write(name(i), "theirs").unwrap());
    cache.store(&key, "nvrtc13.0", b"code").unwrap();
    assert_eq!(cache.load(&key, "nvrtc13.0").as_deref(), Some(&b"code"[..]));
    assert!((0..50).all(|i| std::fs::read(name(i)).unwrap() == b"theirs"));
}

/// Without a compiler: 13.10 is newer than 13.9.
#[test]
fn the_newest_code_is_that_of_the_newest_compiler() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(Some(dir.path())).unwrap();
    let key = spec("a").key();
    for version in ["nvrtc13.10", "nvrtc13.9", "nvrtc12.11"] {
        cache.store(&key, version, version.as_bytes()).unwrap();
    }
    assert_eq!(cache.load_any(&key).as_deref(), Some(&b"nvrtc13.10"[..]));
}

#[test]
fn leftovers_of_killed_processes_go_and_folders_stay() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(Some(dir.path())).unwrap();
    let (old, new, sub) = ([".old.1.0", ".new.2.0", "sub"]).map(|n| cache.dir().join(n)).into();
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    std::fs::File::create(&old).unwrap().set_modified(long_ago).unwrap();
    std::fs::write(&new, "half").unwrap();
    std::fs::create_dir(&sub).unwrap();
    cache.store(&spec("a").key(), "nvrtc13.0", b"code").unwrap();
    assert!(!old.exists() && new.exists(), "somebody may still write the new one");
    assert_eq!(cache.clear().unwrap().entries, 1);
    assert!(!new.exists() && sub.is_dir());
    assert_eq!(cache.usage().unwrap().entries, 0);
    // Two that clear at a time: neither finds what the other has removed.
    for i in 0..200 {
        std::fs::write(cache.dir().join(format!("{i}.cubin")), "").unwrap();
    }
    let both = || {
        std::thread::spawn({
            let cache = cache.clone();
            move || cache.clear().map(|_| ())
        })
    };
    let [a, b] = [both(), both()].map(|t| t.join().unwrap());
    a.and(b).unwrap();
}

/// Eight processes start on an empty cache: one compiles. A test starts this binary again.
#[test]
fn processes_that_start_together_compile_once() {
    if let Ok(dir) = std::env::var("JIT_TEST_DIR") {
        let compiler = fake("nvrtc13.0");
        let (code, _) = jit(dir.as_ref(), &compiler).cubin(&spec("shared")).unwrap();
        assert_eq!(code, b"shared");
        if compiler.compiled.load(Ordering::Relaxed) > 0 {
            std::fs::write(format!("{dir}/compiled-by-{}", std::process::id()), "").unwrap();
        }
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let name = "jit::tests::processes_that_start_together_compile_once";
    let start = |_| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact"])
            .env("JIT_TEST_DIR", dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..8).map(start).collect();
    for mut c in children {
        assert!(c.wait().unwrap().success());
    }
    let names = std::fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name());
    let compiled = names.filter(|n| n.to_string_lossy().starts_with("compiled-by-")).count();
    assert_eq!(compiled, 1);
}

#[test]
fn a_library_names_the_folder_of_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let code = elf::tests::file();
    let config = Config { jit: JitMode::Off, ..Config::default() };
    let s = spec("named");
    assert!(Jit::new(&config).cubin(&s).is_err());
    look_in(dir.path());
    look_in(dir.path());
    assert!(Jit::new(&config).cubin(&s).is_err());
    std::fs::write(dir.path().join(format!("{}.cubin", s.key())), &code).unwrap();
    let (found, origin) = Jit::new(&config).cubin(&s).unwrap();
    assert_eq!((found, origin), (code, Origin::Embedded));
}
