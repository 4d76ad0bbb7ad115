//! Checks our client against a store served by torch itself:
//! `python -c "import torch.distributed as d; s = d.TCPStore('127.0.0.1', 29555, is_master=True,
//! wait_for_workers=False); input()"` in one shell, `torch_store_probe 127.0.0.1 29555` in another.

use std::io::Write;
use std::time::Duration;

use tilewire_boot::{LinkMesh, Mesh, Secret, Store, TorchStore};
use tilewire_core::{Deadline, Error, Rank, Result};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(host), Some(port)) = (args.next(), args.next()) else {
        return Err(Error::invalid("usage: torch_store_probe HOST PORT"));
    };
    let port = port.parse().map_err(|_| Error::invalid(format!("`{port}` is not a port")))?;
    let soon = || Deadline::after_s(10.0);
    // A prefix of its own, so that the probe can be run again against the same store.
    let prefix = format!("tilewire-probe-{}", std::process::id());
    let s = TorchStore::connect(&host, port, &prefix, soon())?;
    check("set, then get", s.set("k", b"v").and_then(|()| s.get("k", soon()))? == b"v")?;
    let big = vec![9u8; 1 << 20];
    check("a megabyte", s.set("big", &big).and_then(|()| s.get("big", soon()))? == big)?;
    check("an empty value", s.set("e", b"").and_then(|()| s.get("e", soon()))?.is_empty())?;
    check("add", s.add("n", 5)? == 5 && s.add("n", -7)? == -2 && s.get("n", soon())? == b"-2")?;
    let e = s.get("never", Deadline::after_s(0.1)).err();
    check("a get that times out", e.is_some_and(|e| e.is_timeout()))?;
    let late = std::thread::scope(|t| {
        let waiting = t.spawn(|| s.get("late", soon()));
        std::thread::sleep(Duration::from_millis(100));
        s.set("late", b"x")?;
        waiting.join().map_err(|_| Error::internal("the thread panicked"))?
    })?;
    check("a get that waits", late == b"x")?;
    let met = std::thread::scope(|t| {
        let meet = |r| {
            let s = TorchStore::connect(&host, port, &prefix, soon())?;
            let m = LinkMesh::connect(&s, "j", r, 3, &Secret::from_job("j"), soon())?;
            let all: Vec<Rank> = Rank::all(3).collect();
            let got = m.exchange("t", &all, b"p", &[], soon())?;
            m.leave();
            Ok(got.len() == 3)
        };
        let all: Vec<_> = Rank::all(3).map(|r| t.spawn(move || meet(r))).collect();
        all.into_iter().all(|h| h.join().is_ok_and(|r: Result<bool>| r.is_ok_and(|ok| ok)))
    });
    check("three ranks meet", met)
}

fn check(what: &str, good: bool) -> Result<()> {
    let verdict = if good { "ok" } else { "FAILED" };
    writeln!(std::io::stdout(), "{what}: {verdict}").map_err(|e| Error::io("writing", e))?;
    if good { Ok(()) } else { Err(Error::internal(format!("{what}: failed"))) }
}
