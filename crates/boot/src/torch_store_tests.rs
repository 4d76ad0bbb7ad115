use std::collections::HashMap;
use std::io::{Read, Result as IoResult, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar};

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
