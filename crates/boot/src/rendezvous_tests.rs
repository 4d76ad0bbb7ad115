use super::*;
use crate::secret::Secret;
use crate::store::LocalStore;

fn id<'a>(rank: u32, size: usize, secret: &'a Secret) -> Identity<'a> {
    Identity { job: "job", rank: Rank::new(rank), size, secret }
}

#[test]
fn cards_are_compared_and_their_signature_is_checked() {
    let (s, other) = (Secret::random().unwrap(), Secret::random().unwrap());
    let me = id(0, 2, &s);
    let mine = Card::new(&me, "@a");
    let theirs = Card::new(&id(1, 2, &s), "@b");
    let peer = Rank::new(1);
    assert!(theirs.check(&mine, &me, peer).is_ok());
    let old = Card { version: 0, ..theirs.clone() };
    let e = old.check(&mine, &me, peer).unwrap_err();
    assert!(e.is_mismatch() && e.to_string().contains("expected 2, got 0"), "{e}");
    let far = Card { boot: "elsewhere".into(), ..theirs.clone() };
    let e = far.check(&mine, &me, peer).unwrap_err();
    assert!(e.is_mismatch() && e.to_string().contains("elsewhere"), "{e}");
    let e = Card::new(&id(1, 3, &s), "@b").check(&mine, &me, peer).unwrap_err();
    assert!(e.to_string().contains("world size; expected 2, got 3"), "{e}");
    for forged in [
        Card { addr: "@c".into(), ..theirs.clone() },
        Card::new(&id(1, 2, &other), "@b"),
        Card { mac: String::new(), ..theirs },
    ] {
        assert_eq!(forged.check(&mine, &me, peer).unwrap_err().kind(), ErrorKind::Protocol);
    }
}

#[test]
fn a_timeout_lists_all_ranks_that_did_not_come() {
    let (store, s) = (LocalStore::new(), Secret::random().unwrap());
    let here = Card::new(&id(2, 4, &s), "@nobody");
    store.set(&card_key("job", Rank::new(2)), &serde_json::to_vec(&here).unwrap()).unwrap();
    let e = rendezvous(&store, id(0, 4, &s), Deadline::after_s(0.1)).err().unwrap();
    assert!(e.is_timeout() && e.get_peer() == Some(Rank::new(1)), "{e}");
    assert!(e.to_string().contains("2 of 4 ranks did not arrive: r1, r3"), "{e}");
}

#[test]
fn a_rank_that_ended_after_publishing_is_dead_at_once() {
    let (store, s) = (LocalStore::new(), Secret::random().unwrap());
    let gone = Card::new(&id(1, 2, &s), "@tilewire-nobody-listens-here");
    store.set(&card_key("job", Rank::new(1)), &serde_json::to_vec(&gone).unwrap()).unwrap();
    let d = Deadline::after_s(30.0);
    let e = rendezvous(&store, id(0, 2, &s), d).err().unwrap();
    assert!(e.is_peer_dead() && d.elapsed() < Duration::from_secs(5), "{e}");
}

#[test]
fn garbage_in_the_store_is_an_error() {
    let (store, s) = (LocalStore::new(), Secret::random().unwrap());
    store.set(&card_key("job", Rank::new(1)), b"{\"version\":").unwrap();
    let e = rendezvous(&store, id(0, 2, &s), Deadline::after_s(5.0)).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
}

#[test]
fn long_or_odd_job_names_make_short_socket_names() {
    assert_eq!(short("a-b.c_9"), "a-b.c_9");
    for odd in ["x".repeat(41), "a/b".to_owned(), "ü".to_owned()] {
        assert_eq!(short(&odd).len(), 32);
    }
}

#[test]
fn a_connection_that_breaks_in_the_hello_is_tried_again() {
    let s = Secret::random().unwrap();
    let (low, high) = (id(0, 2, &s), id(1, 2, &s));
    let name = format!("tilewire-test-{}", hex(&random_bytes().unwrap()[..8]));
    let l = Listener::open_abstract(SocketType::SEQPACKET, &name).unwrap();
    let card = Card::new(&high, &l.name);
    let stop = Stop { flag: AtomicBool::new(false), bell: Bell::new().unwrap() };
    std::thread::scope(|t| {
        let client =
            t.spawn(|| connect_one(&card, &low, high.rank, &stop, Deadline::after_s(10.0)));
        let accept = || loop {
            if let Accepted::Connection(s) = l.accept().unwrap() {
                break s;
            }
        };
        (0..3).for_each(|_| drop(accept()));
        let mut h = HalfOpen::new(accept());
        while h.step(&high).unwrap().is_none() {}
        assert!(client.join().unwrap().is_ok());
    });
}

/// It gave up between our look at its card and our connection: it has not died.
#[test]
fn a_rank_that_gives_up_meanwhile_is_not_dead() {
    struct Changes(Secret, AtomicBool);
    impl Store for Changes {
        fn set(&self, _: &str, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn get(&self, _: &str, _: Deadline) -> Result<Vec<u8>> {
            let who = id(1, 2, &self.0);
            let card = match self.1.swap(true, Ordering::AcqRel) {
                false => Card::new(&who, "@tilewire-nobody-listens-here"),
                true => Card::withdrawn(&who, &Error::new(ErrorKind::Timeout, "too late")),
            };
            Ok(serde_json::to_vec(&card).unwrap())
        }
        fn add(&self, _: &str, _: i64) -> Result<i64> {
            Ok(0)
        }
    }
    let store = Changes(Secret::random().unwrap(), AtomicBool::new(false));
    let e = rendezvous(&store, id(0, 2, &store.0), Deadline::after_s(5.0)).err().unwrap();
    assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Aborted, Some(Rank::new(1))), "{e}");
    assert!(e.message().contains("given up") && e.get_hint().is_some(), "{e}");
}
