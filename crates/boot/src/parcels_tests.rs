use std::fs::File;

use super::*;
use crate::frame::{FRAGMENT, encode_parcel, encode_small};
use crate::inbox::Limits;
use crate::mesh::PeerExit;
use tilewire_core::Deadline;

/// Ranks of the world of this target; rank 0 is the one that receives.
const SIZE: usize = 4;

/// Limits that some inputs reach.
const LIMITS: Limits = Limits { entries: 5, bytes: 3 * FRAGMENT, fds: 4 };

/// Messages of an input: more cost time, and show nothing else.
const MOST: usize = 40;

/// Descriptors of a message that are made here; a message with more is refused.
const MOST_FDS: usize = 3;

/// One event of an inbox: bytes `[what, peer, length, length]`, and as many bytes behind them.
enum Step<'a> {
    /// A message arrives from the peer. Its payload is not in the input, but made as the header
    /// says.
    Message(&'a [u8]),
    /// An exchange under this tag does not wait.
    Collect(String),
    /// The peer goes.
    Exit(PeerExit),
}

/// The steps of an input, with their peers.
fn steps(mut b: &[u8]) -> Vec<(Rank, Step<'_>)> {
    let mut out = Vec::new();
    while let Some((&[what, peer, low, high], rest)) = b.split_first_chunk::<4>() {
        let (bytes, rest) = rest.split_at(rest.len().min(u16::from_le_bytes([low, high]).into()));
        let step = match what % 8 {
            0 => Step::Exit(if peer < 128 { PeerExit::Left } else { PeerExit::Died }),
            1 | 2 => Step::Collect(String::from_utf8_lossy(bytes).into_owned()),
            _ => Step::Message(bytes),
        };
        out.push((Rank::new(1 + u32::from(peer) % (SIZE as u32 - 1)), step));
        b = rest;
        if out.len() == MOST {
            break;
        }
    }
    out
}

fn step(what: u8, peer: u8, bytes: &[u8]) -> Vec<u8> {
    [&[what, peer][..], &(bytes.len() as u16).to_le_bytes(), bytes].concat()
}

/// The input for a message of rank `1 + peer`: without its payload.
fn message(peer: u8, whole: &[u8]) -> Vec<u8> {
    let payload = u32::from_le_bytes(whole[20..24].try_into().unwrap()) as usize;
    step(3, peer, &whole[..whole.len() - payload])
}

fn parcel(peer: u8, tag: &str, len: usize, fds: usize) -> Vec<u8> {
    let src = Rank::new(1 + u32::from(peer));
    encode_parcel(src, tag, &vec![0; len], fds).iter().flat_map(|f| message(peer, f)).collect()
}

/// The message as it comes from the socket: payloads differ, so that none is taken for another.
fn whole(head: &[u8], number: usize) -> Vec<u8> {
    let len = head.get(20..24).map_or(0, |b| u32::from_le_bytes(b.try_into().unwrap()));
    let len = (len as usize).min(FRAGMENT + 1);
    [head, &vec![number as u8; len]].concat()
}

fn received(bytes: &[u8], null: &File) -> Received {
    let num = usize::from(bytes.get(7).copied().unwrap_or(0));
    let fds = (0..num.min(MOST_FDS)).map(|_| null.try_clone().unwrap().into()).collect();
    Received { len: bytes.len(), fds, cut: false, fds_lost: false }
}

/// Payload and number of descriptors.
type Given = (Vec<u8>, usize);

/// A slow and plain account of what each peer has given, by its tag: payloads, and descriptors.
#[derive(Default)]
struct Account {
    /// With the length that the first fragment promises.
    open: HashMap<(Rank, String), (Vec<u8>, usize, usize)>,
    given: HashMap<(Rank, String), Vec<Given>>,
}

impl Account {
    fn note(&mut self, f: &Frame<'_>) {
        let key = (f.src, f.tag.to_owned());
        let new = || (Vec::new(), f.n_fds, f.total);
        let (payload, ..) = self.open.entry(key.clone()).or_insert_with(new);
        payload.extend(f.payload);
        if f.index + 1 == f.count {
            let (payload, fds, total) = self.open.remove(&key).unwrap();
            assert_eq!(payload.len(), total, "fragments of different parcels");
            self.given.entry(key).or_default().push((payload, fds));
        }
    }
}

/// Runs the steps of an input. Returns whether nothing was refused.
fn run(input: &[u8]) -> bool {
    let null = File::open("/dev/null").unwrap();
    let inbox = Inbox::new(Rank::new(0), SIZE, LIMITS);
    let mut peers: HashMap<Rank, Messages> =
        (1..SIZE as u32).map(|r| (Rank::new(r), Messages::new(Rank::new(r)))).collect();
    let (mut account, mut all_taken) = (Account::default(), true);
    let steps = steps(input);
    for (i, (peer, step)) in steps.iter().enumerate() {
        match step {
            Step::Exit(how) => {
                inbox.exit(*peer, *how);
                peers.remove(peer);
            }
            Step::Collect(tag) => all_taken &= collect(&inbox, tag, &account),
            Step::Message(head) => {
                let Some(messages) = peers.get_mut(peer) else { continue };
                let bytes = whole(head, i);
                match messages.take(&inbox, &bytes, received(&bytes, &null)) {
                    Ok(true) => {
                        inbox.exit(*peer, PeerExit::Left);
                        peers.remove(peer);
                    }
                    Ok(false) => {
                        account.note(&frame::decode(&bytes).expect("it was taken"));
                        check(messages);
                    }
                    Err(e) => {
                        inbox.fail(*peer, e);
                        peers.remove(peer);
                        all_taken = false;
                    }
                }
            }
        }
        inbox.check(LIMITS);
    }
    // Each tag is asked for once more. Whatever an exchange has not had is gone with it.
    let tags: std::collections::HashSet<_> = account.given.keys().map(|(_, t)| t.clone()).collect();
    tags.iter().for_each(|t| all_taken &= collect(&inbox, t, &account));
    assert_eq!(inbox.check(LIMITS), 0, "parcels that no exchange can have");
    all_taken && !steps.is_empty()
}

/// Each part of an exchange is one that its rank has given under this tag, to the byte.
fn collect(inbox: &Inbox, tag: &str, account: &Account) -> bool {
    let members: Vec<Rank> = Rank::all(SIZE).collect();
    let now = Deadline::after(std::time::Duration::ZERO);
    let own = Parcel::default();
    let Ok(parts) = inbox.collect(tag, &members, own, now, &|| Ok(())) else { return false };
    for (rank, part) in members.iter().zip(&parts).skip(1) {
        let given = &account.given[&(*rank, tag.to_owned())];
        let is_this = |(payload, fds): &&Given| *payload == part.payload && *fds == part.fds.len();
        assert!(given.iter().any(|g| is_this(&g)), "{rank} has not given this under {tag:?}");
    }
    true
}

fn check(messages: &Messages) {
    assert!(messages.partial.len() <= MAX_PARTIAL);
    for p in messages.partial.values() {
        assert!(p.payload.len() <= crate::mesh::MAX_PAYLOAD && p.next > 0);
        assert_eq!(p.payload.len(), usize::from(p.next) * FRAGMENT, "only the last is short");
    }
}

#[test]
fn fuzz_parcels() {
    let all = |tag: &str, len| (0..3).flat_map(|p| parcel(p, tag, len, 1)).collect::<Vec<u8>>();
    let bye = encode_small(Kind::Bye, Rank::new(2), b"so long");
    let two = parcel(0, "t", FRAGMENT + 9, 2);
    let seeds = vec![
        all("a", 9),
        [all("a", 9), step(1, 0, b"a"), all("a", 9), step(1, 0, b"a")].concat(),
        // Late parts of an exchange that was given up.
        [parcel(0, "b", 1, 0), step(1, 0, b"b"), all("b", 1)].concat(),
        // Two parcels at once; then beyond the limits; a goodbye between parts.
        [&two[..two.len() / 2], &parcel(0, "u", 7, 0), &two[two.len() / 2..]].concat(),
        (0..4).flat_map(|i| parcel(i, "v", FRAGMENT, 2)).collect(),
        (0..6).flat_map(|i| parcel(1, &format!("w{i}"), 1, 0)).collect(),
        [all("a", 9), message(1, &bye), step(0, 200, b""), step(1, 0, b"a")].concat(),
    ];
    // What the messages bring comes by the socket, and is not in the input.
    tilewire_testing::fuzz!("parcels", seeds, run, spare = 64 << 20);
}
