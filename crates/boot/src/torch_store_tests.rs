use std::collections::HashMap;
use std::io::{Read, Result as IoResult, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar};

use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType};
use rustix::net::{shutdown, socketpair};

use super::*;

type Shared = Arc<(Mutex<HashMap<String, Vec<u8>>>, Condvar)>;

fn bytes<const N: usize>(s: &mut TcpStream) -> IoResult<[u8; N]> {
    let mut b = [0; N];
    s.read_exact(&mut b)?;
    Ok(b)
}

fn vector(s: &mut TcpStream) -> IoResult<Vec<u8>> {
    let mut b = vec![0; u64::from_ne_bytes(bytes(s)?) as usize];
    s.read_exact(&mut b)?;
    Ok(b)
}

fn key(s: &mut TcpStream) -> IoResult<String> {
    vector(s).map(|b| String::from_utf8(b).unwrap())
}

/// Returns what torch's server does with these bytes, for one connection.
fn serve(mut s: TcpStream, data: &Shared) -> IoResult<()> {
    assert_eq!(bytes::<1>(&mut s)?, [query::VALIDATE]);
    assert_eq!(u32::from_ne_bytes(bytes(&mut s)?), 0x3C85F7CE);
    loop {
        let [op] = bytes(&mut s)?;
        match op {
            query::PING => {
                let nonce = bytes::<4>(&mut s)?;
                s.write_all(&nonce)?;
            }
            query::SET => {
                let (k, v) = (key(&mut s)?, vector(&mut s)?);
                data.0.lock().unwrap().insert(k, v);
                data.1.notify_all();
            }
            query::GET => {
                let v = data.0.lock().unwrap()[&key(&mut s)?].clone();
                s.write_all(&(v.len() as u64).to_ne_bytes())?;
                s.write_all(&v)?;
            }
            query::ADD => {
                let (k, n) = (key(&mut s)?, i64::from_ne_bytes(bytes(&mut s)?));
                let mut map = data.0.lock().unwrap();
                let old = map.get(&k).map_or(0, |v| String::from_utf8_lossy(v).parse().unwrap());
                map.insert(k, (old + n).to_string().into_bytes());
                s.write_all(&(old + n).to_ne_bytes())?;
            }
            query::CHECK | query::WAIT => {
                assert_eq!(u64::from_ne_bytes(bytes(&mut s)?), 1);
                let k = key(&mut s)?;
                let mut map = data.0.lock().unwrap();
                if op == query::CHECK {
                    s.write_all(&[u8::from(!map.contains_key(&k))])?;
                    continue;
                }
                while !map.contains_key(&k) {
                    map = data.1.wait(map).unwrap();
                }
                s.write_all(&[0])?;
            }
            _ => panic!("query {op}"),
        }
    }
}

fn fake() -> (u16, Shared) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, data) = (l.local_addr().unwrap().port(), Shared::default());
    let d = data.clone();
    std::thread::spawn(move || {
        for s in l.incoming() {
            let d = d.clone();
            std::thread::spawn(move || serve(s.unwrap(), &d));
        }
    });
    (port, data)
}

#[test]
fn speaks_the_protocol() {
    let (port, data) = fake();
    let soon = || Deadline::after_s(10.0);
    let s = TorchStore::connect("127.0.0.1", port, "tilewire", soon()).unwrap();
    s.set("k", b"v").unwrap();
    assert_eq!(data.0.lock().unwrap()["/tilewire/k"], b"v");
    assert_eq!(s.get("k", soon()).unwrap(), b"v");
    assert_eq!((s.add("n", 4).unwrap(), s.add("n", -1).unwrap()), (4, 3));
    assert_eq!(s.get("n", Deadline::after_s(0.0)).unwrap(), b"3");
    let e = s.get("never", Deadline::after_s(0.05)).unwrap_err();
    assert!(e.is_timeout() && e.to_string().contains("`never`"), "{e}");
    std::thread::scope(|t| {
        let waiting = t.spawn(|| s.get("late", soon()).unwrap());
        std::thread::sleep(Duration::from_millis(30));
        s.set("late", b"x").unwrap();
        assert_eq!(waiting.join().unwrap(), b"x");
    });
}

#[test]
fn silence_and_strangers_are_told_with_the_address() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let e = TorchStore::connect("127.0.0.1", port, "t", Deadline::after_s(0.2)).err().unwrap();
    assert!(e.is_timeout() && e.to_string().contains(&format!("127.0.0.1:{port}")), "{e}");
    std::thread::spawn(move || {
        for s in l.incoming() {
            s.unwrap().write_all(b"HTTP/1.1 400").ok();
        }
    });
    let e = TorchStore::connect("127.0.0.1", port, "t", Deadline::after_s(5.0)).err().unwrap();
    assert!(e.to_string().contains("not a torch store"), "{e}");
}

/// Says to a store what a rank says at the end of a meeting: its card, and that this is over.
fn last_words(s: &TorchStore) -> Duration {
    let start = std::time::Instant::now();
    s.set("card", b"given up").unwrap_err();
    s.add("ended", 1).unwrap_err();
    start.elapsed()
}

/// A meeting of a minute that fails early: its last words for a store that has ended take no time.
#[test]
fn a_server_that_has_ended_is_not_waited_for() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut s, _) = l.accept().unwrap();
        // The hello, and nothing else.
        bytes::<5>(&mut s).unwrap();
        let [_, nonce @ ..] = bytes::<5>(&mut s).unwrap();
        s.write_all(&nonce).unwrap();
    });
    let end = Deadline::after_s(60.0);
    let s = TorchStore::connect("127.0.0.1", port, "t", end).unwrap().ending(end);
    server.join().unwrap();
    let took = last_words(&s);
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// A store whose process is stopped takes connections and answers nothing: it is waited for once.
#[test]
fn a_server_that_is_stopped_is_waited_for_once() {
    let (port, _data) = fake();
    let s = TorchStore::connect("127.0.0.1", port, "t", Deadline::after_s(10.0)).unwrap();
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let to_mute = mute.local_addr().unwrap();
    let stream = TcpStream::connect(to_mute).unwrap();
    stream.set_nonblocking(true).unwrap();
    *s.idle.lock().unwrap() = vec![Stream(stream.into())];
    let s = TorchStore { port: to_mute.port(), ..s }.ending(Deadline::after_s(0.5));
    let e = s.set("k", b"v").unwrap_err();
    assert!(e.is_timeout(), "{e}");
    let s = s.ending(Deadline::after_s(60.0));
    let took = last_words(&s);
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// A store whose server has said `bytes` already, and says no more; with the server's end.
fn said(bytes: &[u8]) -> (TorchStore, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    if !bytes.is_empty() {
        let sent = rustix::net::send(&theirs, bytes, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len(), "the socket takes all at once");
    }
    shutdown(&theirs, Shutdown::Write).unwrap();
    let idle = Mutex::new(vec![Stream(ours)]);
    let (host, prefix) = ("127.0.0.1".to_owned(), "/p/".to_owned());
    let lost = AtomicBool::new(false);
    (TorchStore { host, port: 1, prefix, idle, end: None, lost }, theirs)
}

#[test]
fn fuzz_torch_reply() {
    let value = [&5u64.to_ne_bytes()[..], b"value"].concat();
    let ping = std::process::id().to_ne_bytes();
    let seeds = vec![
        [&[0][..], &value].concat(),
        [&[1, 0][..], &value].concat(),
        ping.to_vec(),
        vec![7; 8],
    ];
    let spare = 2 * MAX_VALUE as usize;
    let decodes: fn(&[u8]) -> bool = |b| {
        let (store, _server) = said(b);
        let got = store.get("k", Deadline::after_s(60.0));
        if let Ok(value) = &got {
            let checked = if b[0] == 0 { &[0][..] } else { &[1, 0] };
            let len = (value.len() as u64).to_ne_bytes();
            assert!(b.starts_with(&[checked, &len, value].concat()));
        }
        let (store, _server) = said(b);
        let added = store.add("k", 1).ok();
        assert_eq!(added, b.first_chunk().map(|n| i64::from_ne_bytes(*n)));
        let (store, _server) = said(b);
        assert_eq!(store.set("k", b"v").is_ok(), b.starts_with(&std::process::id().to_ne_bytes()));
        got.is_ok()
    };
    tilewire_testing::fuzz!("torch_reply", seeds, decodes, spare = spare);
}
