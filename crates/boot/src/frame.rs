//! Messages between ranks: one frame is one `SOCK_SEQPACKET` message, little-endian.

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::mesh::{MAX_FDS, MAX_PAYLOAD, MAX_TAG};

/// Version of the protocol between ranks. Both ends must have the same one.
pub(crate) const VERSION: u16 = 2;

/// The most payload of one frame; a socket's buffer holds about three of them.
pub(crate) const FRAGMENT: usize = 64 << 10;

const MAGIC: u32 = u32::from_le_bytes(*b"TWLK");
const HEADER: usize = 28;

/// The longest legal frame.
pub(crate) const MAX_FRAME: usize = HEADER + MAX_TAG + FRAGMENT;

/// The purpose of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// First message of the connecting side.
    Hello = 1,
    /// The listener's answer with its proof.
    Challenge = 2,
    /// The connecting side's proof.
    Proof = 3,
    /// The listener accepts.
    Welcome = 4,
    /// A fragment of what a member gives to an exchange.
    Parcel = 5,
    /// Goodbye.
    Bye = 6,
    /// The listener refuses, for the reason in the payload: coming again is of no use.
    Refused = 7,
}

const KINDS: [Kind; 7] = [
    Kind::Hello,
    Kind::Challenge,
    Kind::Proof,
    Kind::Welcome,
    Kind::Parcel,
    Kind::Bye,
    Kind::Refused,
];

/// A frame whose every field has been checked against the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Frame<'a> {
    pub kind: Kind,
    pub src: Rank,
    pub tag: &'a str,
    /// Descriptors that travel with this frame.
    pub n_fds: usize,
    pub index: u16,
    pub count: u16,
    /// Bytes of the whole parcel.
    pub total: usize,
    pub payload: &'a [u8],
}

fn fragments(total: usize) -> usize {
    total.div_ceil(FRAGMENT).max(1)
}

/// One frame of a payload that fits in one fragment.
pub(crate) fn encode_small(kind: Kind, src: Rank, payload: &[u8]) -> Vec<u8> {
    encode_one(&Frame {
        kind,
        src,
        tag: "",
        n_fds: 0,
        index: 0,
        count: 1,
        total: payload.len(),
        payload,
    })
}

/// All frames of a parcel. Its size, tag and number of descriptors have been checked.
pub(crate) fn encode_parcel(src: Rank, tag: &str, payload: &[u8], n_fds: usize) -> Vec<Vec<u8>> {
    let count = fragments(payload.len());
    let one = |i: usize| {
        let end = payload.len().min((i + 1) * FRAGMENT);
        encode_one(&Frame {
            kind: Kind::Parcel,
            src,
            tag,
            n_fds: if i == 0 { n_fds } else { 0 },
            index: i as u16,
            count: count as u16,
            total: payload.len(),
            payload: &payload[i * FRAGMENT..end],
        })
    };
    (0..count).map(one).collect()
}

fn encode_one(f: &Frame<'_>) -> Vec<u8> {
    let mut b = Vec::with_capacity(HEADER + f.tag.len() + f.payload.len());
    b.extend(MAGIC.to_le_bytes());
    b.extend(VERSION.to_le_bytes());
    b.push(f.kind as u8);
    b.push(f.n_fds as u8);
    b.extend(f.src.get().to_le_bytes());
    b.extend((f.tag.len() as u16).to_le_bytes());
    b.extend(f.index.to_le_bytes());
    b.extend(f.count.to_le_bytes());
    b.extend([0; 2]);
    b.extend((f.payload.len() as u32).to_le_bytes());
    b.extend((f.total as u32).to_le_bytes());
    b.extend(f.tag.as_bytes());
    b.extend(f.payload);
    b
}

fn array<const N: usize>(b: &[u8], at: usize) -> Result<[u8; N]> {
    b.get(at..at + N)
        .and_then(|s| s.try_into().ok())
        .ok_or_else(|| bad("is cut short").expected(HEADER).seen(b.len()))
}

fn u16_at(b: &[u8], at: usize) -> Result<u16> {
    array(b, at).map(u16::from_le_bytes)
}

fn u32_at(b: &[u8], at: usize) -> Result<u32> {
    array(b, at).map(u32::from_le_bytes)
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("a frame {what}")).op("mesh")
}

/// Checks and splits a message. Never panics, whatever the bytes.
///
/// # Errors
/// `Mismatch` for another protocol version, `Protocol` for everything else.
pub(crate) fn decode(b: &[u8]) -> Result<Frame<'_>> {
    if u32_at(b, 0)? != MAGIC {
        return Err(bad("does not begin with the magic number"));
    }
    let version = u16_at(b, 4)?;
    if version != VERSION {
        return Err(Error::new(ErrorKind::Mismatch, "the peer speaks another protocol version")
            .op("mesh")
            .expected(VERSION)
            .seen(version));
    }
    let [kind, n_fds] = array(b, 6)?;
    let kind = KINDS.into_iter().find(|k| *k as u8 == kind);
    let kind = kind.ok_or_else(|| bad("is of no known kind"))?;
    let src = Rank::new(u32_at(b, 8)?);
    let (tag_len, index) = (u16_at(b, 12)? as usize, u16_at(b, 14)?);
    let (count, zero) = (u16_at(b, 16)?, u16_at(b, 18)?);
    let (len, total) = (u32_at(b, 20)? as usize, u32_at(b, 24)? as usize);
    if zero != 0 {
        return Err(bad("has reserved bits set"));
    }
    if n_fds as usize > MAX_FDS || tag_len > MAX_TAG || len > FRAGMENT || total > MAX_PAYLOAD {
        return Err(bad("is larger than allowed").expected(MAX_PAYLOAD).seen(total));
    }
    if count as usize != fragments(total) || index >= count {
        return Err(bad("has a fragment number that does not fit its size"));
    }
    let due = total.saturating_sub(index as usize * FRAGMENT).min(FRAGMENT);
    if len != due || b.len() != HEADER + tag_len + len {
        return Err(bad("has a wrong length").expected(HEADER + tag_len + due).seen(b.len()));
    }
    if (n_fds > 0 && (index > 0 || kind != Kind::Parcel))
        || (kind == Kind::Parcel) == (tag_len == 0)
    {
        return Err(bad("has descriptors or a tag that its kind does not allow"));
    }
    let (tag, payload) = b[HEADER..].split_at(tag_len);
    let tag = std::str::from_utf8(tag).map_err(|_| bad("has a tag that is not UTF-8"))?;
    Ok(Frame { kind, src, tag, n_fds: n_fds as usize, index, count, total, payload })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_is_golden() {
        let frames = encode_parcel(Rank::new(3), "t", b"ab", 2);
        assert_eq!(frames.len(), 1);
        let want = b"TWLK\x02\0\x05\x02\x03\0\0\0\x01\0\0\0\x01\0\0\0\x02\0\0\0\x02\0\0\0tab";
        assert_eq!(frames[0], want);
    }

    #[test]
    fn other_versions_are_a_mismatch_with_both_values() {
        let mut f = encode_small(Kind::Bye, Rank::new(0), b"");
        f[4] = 9;
        let e = decode(&f).unwrap_err();
        assert!(e.is_mismatch() && e.to_string().contains("expected 2, got 9"), "{e}");
    }

    #[test]
    fn oversized_is_refused() {
        let mut f = encode_parcel(Rank::new(0), "t", &[7; 100], 0).remove(0);
        f[24..28].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        assert_eq!(decode(&f).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn fuzz_frame() {
        let mut seeds: Vec<_> = KINDS
            .into_iter()
            .filter(|k| *k != Kind::Parcel)
            .map(|k| encode_small(k, Rank::new(2), b"payload"))
            .collect();
        seeds.extend(encode_parcel(Rank::new(1), "tag/0", &[7; 300], 3));
        // Of two fragments: the second is not full.
        seeds.push(encode_parcel(Rank::new(1), "t", &[7; FRAGMENT + 9], 1).remove(1));
        tilewire_testing::fuzz!("frame", seeds, |b| {
            let Ok(f) = decode(b) else { return false };
            assert!(f.payload.len() <= FRAGMENT && f.index < f.count && f.total <= MAX_PAYLOAD);
            assert_eq!(encode_one(&f), b, "a frame has one encoding");
            true
        });
    }

    proptest! {
        #[test]
        fn round_trip(src: u32, tag in "[a-z/0-9]{1,40}", len in 0usize..200_000, n_fds in 0usize..254) {
            let payload: Vec<u8> = (0..len).map(|i| (i * 31) as u8).collect();
            let mut whole: Vec<u8> = Vec::new();
            let frames = encode_parcel(Rank::new(src), &tag, &payload, n_fds);
            for (i, b) in frames.iter().enumerate() {
                prop_assert!(b.len() <= MAX_FRAME);
                let f = decode(b).unwrap();
                prop_assert_eq!((f.src, f.tag, f.index as usize), (Rank::new(src), &*tag, i));
                prop_assert_eq!((f.count as usize, f.total), (frames.len(), len));
                prop_assert_eq!(f.n_fds, if i == 0 { n_fds } else { 0 });
                whole.extend(f.payload);
            }
            prop_assert_eq!(whole, payload);
        }

        #[test]
        fn arbitrary_bytes_never_panic(b in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(decode(&b).is_err() || b.len() >= HEADER);
        }

        #[test]
        fn truncated_is_an_error(len in 0usize..300, cut in 1usize..300) {
            let f = encode_parcel(Rank::new(1), "tag", &vec![1; len], 0).remove(0);
            prop_assert!(decode(&f[..f.len().saturating_sub(cut)]).is_err());
        }

        #[test]
        fn mutations_never_panic_and_stay_within_bounds(
            len in 0usize..300, at in 0usize..328, to: u8, extra in 0usize..3,
        ) {
            let mut f = encode_parcel(Rank::new(1), "tag", &vec![1; len], 1).remove(0);
            if let Some(b) = f.get_mut(at) { *b = to; }
            f.extend(vec![0; extra]);
            if let Ok(f) = decode(&f) {
                prop_assert!(f.payload.len() <= FRAGMENT && f.index < f.count && extra == 0);
            }
        }
    }
}
