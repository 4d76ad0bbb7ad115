use super::*;

fn parcel(bytes: &[u8]) -> Parcel {
    Parcel { payload: bytes.to_vec(), fds: Vec::new() }
}

fn r(i: u32) -> Rank {
    Rank::new(i)
}

fn soon() -> Deadline {
    Deadline::after_s(0.01)
}

#[test]
fn overflow_is_a_typed_error_of_the_exchange_that_lost_its_part_only() {
    let limits = Limits { entries: 2, bytes: 100, fds: 1 };
    let inbox = Inbox::new(r(0), 2, limits);
    for tag in ["a", "b", "c"] {
        inbox.deliver(r(1), tag, parcel(b"x"));
    }
    let all = [r(0), r(1)];
    let e = inbox.collect("c", &all, parcel(b""), soon(), &|| Ok(())).unwrap_err();
    assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Exhausted, Some(r(1))), "{e}");
    assert_eq!(inbox.collect("a", &all, parcel(b""), soon(), &|| Ok(())).unwrap()[1].payload, b"x");
    inbox.deliver(r(1), "d", parcel(&[0; 100]));
    let e = inbox.collect("d", &all, parcel(b""), soon(), &|| Ok(())).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Exhausted, "{e}");
}

#[test]
fn same_tag_twice_is_told_and_late_parts_are_dropped() {
    let inbox = Inbox::new(r(0), 3, Limits::default());
    let all = [r(2), r(0), r(1)];
    inbox.deliver(r(1), "t", parcel(b"1"));
    inbox.deliver(r(1), "t", parcel(b"2"));
    inbox.deliver(r(2), "t", parcel(b"3"));
    let got = inbox.collect("t", &all, parcel(b"me"), soon(), &|| Ok(())).unwrap();
    assert_eq!(got.iter().map(|p| p.payload[0]).collect::<Vec<_>>(), *b"3m1");
    let e = inbox.collect("t", &all, parcel(b""), soon(), &|| Ok(())).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");

    inbox.deliver(r(1), "u", parcel(b"1"));
    let e = inbox.collect("u", &all, parcel(b""), soon(), &|| Ok(())).unwrap_err();
    assert!(e.is_timeout() && e.get_peer() == Some(r(2)), "{e}");
    inbox.deliver(r(2), "u", parcel(b"late"));
    assert_eq!(inbox.lock().entries, 0);
    assert!(!inbox.lock().given_up.contains_key("u"));
}

#[test]
fn left_after_giving_is_fine_left_before_is_not() {
    let inbox = Inbox::new(r(0), 2, Limits::default());
    inbox.deliver(r(1), "t", parcel(b"1"));
    inbox.exit(r(1), PeerExit::Left);
    inbox.exit(r(1), PeerExit::Died);
    assert_eq!(inbox.exit_of(r(1)), Some(PeerExit::Left));
    let all = [r(0), r(1)];
    assert!(inbox.check_alive("t", &all).is_ok());
    assert!(inbox.collect("t", &all, parcel(b""), soon(), &|| Ok(())).is_ok());
    let e = inbox.collect("u", &all, parcel(b""), Deadline::after_s(60.0), &|| Ok(())).unwrap_err();
    assert!(e.is_peer_dead() && e.to_string().contains("has left"), "{e}");
}

#[test]
fn a_death_behind_a_part_ends_the_wait_for_others_but_spoils_nothing() {
    let inbox = Inbox::new(r(0), 3, Limits::default());
    let all = [r(0), r(1), r(2)];
    inbox.deliver(r(2), "t", parcel(b"2"));
    inbox.deliver(r(2), "u", parcel(b"2"));
    inbox.deliver(r(1), "u", parcel(b"1"));
    inbox.exit(r(2), PeerExit::Died);
    assert_eq!(inbox.collect("u", &all, parcel(b""), soon(), &|| Ok(())).unwrap().len(), 3);
    let e = inbox.collect("t", &all, parcel(b""), Deadline::after_s(5.0), &|| Ok(())).unwrap_err();
    assert!(e.is_peer_dead() && e.get_peer() == Some(r(2)), "{e}");
}

#[test]
fn every_watcher_hears_every_exit_once_and_panics_are_contained() {
    let inbox = Inbox::new(r(0), 3, Limits::default());
    let seen = Arc::new(Mutex::new(Vec::new()));
    inbox.exit(r(1), PeerExit::Died);
    inbox.watch(Box::new(|_, _| panic!("callback panics (expected in this test)")));
    let h = seen.clone();
    inbox.watch(Box::new(move |rank, how| h.lock().unwrap().push((rank, how))));
    inbox.announce();
    inbox.exit(r(2), PeerExit::Left);
    inbox.announce();
    inbox.announce();
    assert_eq!(*seen.lock().unwrap(), [(r(1), PeerExit::Died), (r(2), PeerExit::Left)]);
    assert_eq!(inbox.gone(), 0b110);
}
