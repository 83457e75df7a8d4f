//! Random tokens, vocabularies and stop strings against a definition of what the text must be.
//!
//! `ONELOOP_FUZZ=long` runs 10^6 sequences, `ONELOOP_FUZZ_SEED` starts elsewhere.

use std::sync::Arc;

use super::{StopSet, StreamDecoder, Vocabulary};

const CORPUS: [&str; 10] = [
    "the cat sat on the mat",
    "aaaaaaa",
    "abababa",
    "\n\n### User:\n",
    "caf\u{e9} na\u{ef}ve e\u{301}",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}\u{200d}\u{1f466}\u{1f3fd}",
    "\u{1f1e9}\u{1f1ea}\u{fffd}\u{fffd}",
    "\u{10ffff}\u{e000}\u{800}\u{7ff}\u{80}",
    "{\"a\": [1, 2]}",
];

/// `SplitMix64`: a whole run follows from one number.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// Byte-level (0), byte-fallback (1) or arbitrary pieces (2); about one id in eight is special.
fn vocabulary(rng: &mut Rng, family: usize) -> Vocabulary {
    let mut pieces: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for _ in 0..200 {
        let text = rng.pick(&CORPUS);
        let (start, end) = (rng.below(text.len()), 1 + rng.below(text.len()));
        let piece = match family {
            0 => text.as_bytes().get(start..end).unwrap_or_default().to_vec(),
            1 => text.get(start..end).unwrap_or_default().as_bytes().to_vec(),
            _ => (0..rng.below(6)).map(|_| rng.next() as u8).collect(),
        };
        pieces.push(piece);
    }
    let special: Vec<u32> = (0..pieces.len() as u32).filter(|_| rng.one_in(8)).collect();
    Vocabulary::new(pieces, &special, false).unwrap()
}

/// Ids that spell corpus texts in pieces as small as single bytes, with random ids in between.
fn tokens(rng: &mut Rng, vocabulary: &Vocabulary) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..rng.below(6) {
        match rng.below(3) {
            0 => ids.extend((0..rng.below(6)).map(|_| rng.below(vocabulary.len()) as u32)),
            1 => ids.extend(rng.pick(&CORPUS).bytes().map(u32::from)),
            _ => ids
                .extend((0..rng.below(6)).map(|_| 256 + rng.below(vocabulary.len() - 256) as u32)),
        }
    }
    ids
}

/// Substrings of the text itself (so that they match), of the corpus, prefixes and extensions of one another.
fn stop_strings(rng: &mut Rng, text: &str) -> Vec<String> {
    let mut stops: Vec<String> = Vec::new();
    for _ in 0..rng.below(5) {
        let source = match rng.below(4) {
            0 if !stops.is_empty() => format!(
                "{}{}",
                rng.pick(&stops).clone(),
                rng.pick(&["a", "b", "\u{200d}", " "])
            ),
            1 => (*rng.pick(&CORPUS)).to_string(),
            _ => text.to_string(),
        };
        let chars: Vec<char> = source.chars().collect();
        if chars.is_empty() {
            continue;
        }
        let start = if rng.one_in(3) {
            0
        } else {
            rng.below(chars.len())
        };
        let len = 1 + rng.below((chars.len() - start).min(8));
        stops.push(chars[start..start + len].iter().collect());
    }
    stops
}

/// What the decoder has been fed so far, seen as a whole.
struct Reference<'a> {
    vocabulary: &'a Vocabulary,
    skip: bool,
    stops: &'a [String],
    include: bool,
    min_tokens: usize,
}

impl Reference<'_> {
    /// Text of the ids without an incomplete character at the end.
    fn settled(&self, ids: &[u32]) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for &id in ids
            .iter()
            .filter(|&&id| !(self.skip && self.vocabulary.is_special(id)))
        {
            bytes.extend(self.vocabulary.piece(id).unwrap());
        }
        let mut end = bytes.len();
        for back in 1..=3.min(bytes.len()) {
            let tail = &bytes[bytes.len() - back..];
            if std::str::from_utf8(tail)
                .is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
            {
                end = bytes.len() - back;
            }
        }
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    /// The text cut by the earliest-ending stop string beyond the gate, and that string.
    fn cut(&self, ids: &[u32], text: &str) -> (String, Option<&str>) {
        if ids.len() <= self.min_tokens {
            return (text.to_string(), None);
        }
        let gate = self.settled(&ids[..self.min_tokens]).len();
        for end in gate + 1..=text.len() {
            let head = &text.as_bytes()[..end];
            let ends_here = self
                .stops
                .iter()
                .filter(|stop| head.ends_with(stop.as_bytes()));
            if let Some(stop) = ends_here.max_by_key(|stop| stop.len()) {
                let cut = if self.include { end } else { end - stop.len() };
                return (text[..cut].to_string(), Some(stop));
            }
        }
        (text.to_string(), None)
    }

    /// Length of the longest end of the text that is a proper beginning of a stop string.
    fn live_len(&self, text: &str) -> usize {
        let ends_with = |stop: &str, len: usize| text.as_bytes().ends_with(&stop.as_bytes()[..len]);
        let of = |stop: &String| {
            (1..stop.len())
                .rev()
                .find(|&len| ends_with(stop, len))
                .unwrap_or(0)
        };
        self.stops.iter().map(of).max().unwrap_or(0)
    }
}

fn check_sequence(rng: &mut Rng, vocabulary: &Arc<Vocabulary>) {
    let ids = tokens(rng, vocabulary);
    let skip = rng.one_in(2);
    let whole = vocabulary.decode(&ids, skip).unwrap();
    let stops = if rng.one_in(4) {
        Vec::new()
    } else {
        stop_strings(rng, &whole)
    };
    let include = rng.one_in(3);
    let min_tokens = if rng.one_in(2) {
        0
    } else {
        rng.below(ids.len() + 2)
    };
    let reference = Reference {
        vocabulary,
        skip,
        stops: &stops,
        include,
        min_tokens,
    };

    let set = Arc::new(StopSet::new(stops.clone(), include, min_tokens as u32).unwrap());
    let mut decoder = StreamDecoder::new(Arc::clone(vocabulary), skip, Some(set));
    let mut out = String::new();
    let mut matched = None;
    for count in 1..=ids.len() {
        let hit = decoder.push(ids[count - 1], &mut out);
        assert!(hit.is_none() || matched.is_none(), "matched twice");
        matched = matched.or(hit);
        let settled = reference.settled(&ids[..count]);
        let (text, stop) = reference.cut(&ids[..count], &settled);
        assert_eq!(matched.map(|index| &stops[index as usize][..]), stop);
        let held = if stop.is_some() || include {
            0
        } else {
            reference.live_len(&settled)
        };
        assert_eq!(out, text[..text.len() - held], "after {count} tokens");
    }
    let hit = decoder.flush(&mut out);
    assert!(hit.is_none() || matched.is_none(), "matched twice");
    matched = matched.or(hit);
    let (text, stop) = reference.cut(&ids, &whole);
    assert_eq!(out, text);
    assert_eq!(matched.map(|index| &stops[index as usize][..]), stop);
    assert_eq!(decoder.matched(), stop);
    assert_eq!(decoder.flush(&mut out), None);
    assert_eq!(out, text, "a second flush gave text");
    if min_tokens == 0 && !include {
        assert!(
            !stops.iter().any(|stop| out.contains(stop)),
            "a stop string was emitted"
        );
    }
}

#[test]
fn random_sequences_equal_the_cut_one_shot_decode() {
    let long = std::env::var("ONELOOP_FUZZ").is_ok_and(|profile| profile == "long");
    let seed = std::env::var("ONELOOP_FUZZ_SEED").map_or(1, |seed| seed.parse().unwrap());
    let num_vocabularies = if long { 1_000 } else { 30 };
    for round in 0..num_vocabularies {
        let mut rng = Rng(seed + round);
        let vocabulary = Arc::new(vocabulary(&mut rng, round as usize % 3));
        for _ in 0..1_000 {
            let before = rng.0;
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                check_sequence(&mut rng, &vocabulary);
            }));
            assert!(
                outcome.is_ok(),
                "vocabulary seed {}, sequence state {before:#x}",
                seed + round
            );
        }
    }
}

/// The cost must not depend on what came before: neither the text nor the held part may pile up.
#[test]
fn buffers_stay_small_over_100_000_tokens() {
    let vocabulary = Arc::new(Vocabulary::new(["a", "b", "\u{e9}", "ab"], &[], false).unwrap());
    let set = Arc::new(StopSet::new(vec!["aabaab!".into(), "abab?".into()], false, 0).unwrap());
    let mut decoder = StreamDecoder::new(vocabulary, true, Some(set));
    let mut rng = Rng(7);
    let mut out = String::with_capacity(64);
    for _ in 0..100_000 {
        out.clear();
        assert_eq!(decoder.push(rng.below(4) as u32, &mut out), None);
        assert!(out.len() <= 8);
    }
    assert!(std::mem::size_of::<StreamDecoder>() <= 40);
}

/// Marks that a reader of the text must see are shown, while other special tokens stay hidden.
#[test]
fn shown_special_tokens_leave_their_text() {
    let pieces: [&[u8]; 4] = [b"a", b"<think>", b"</s>", b"<tool>"];
    let vocabulary = Arc::new(Vocabulary::new(pieces, &[1, 2, 3], false).unwrap());
    for (skip, shown, expected) in [
        (true, None, "aa"),
        (true, Some(vec![1]), "a<think>a"),
        (true, Some(vec![1, 3]), "a<think><tool>a"),
        (false, None, "a<think></s><tool>a"),
    ] {
        let mut decoder =
            StreamDecoder::new(Arc::clone(&vocabulary), skip, None).showing(shown.map(Arc::new));
        let mut text = String::new();
        for token in [0, 1, 2, 3, 0] {
            decoder.push(token, &mut text);
        }
        decoder.flush(&mut text);
        assert_eq!(text, expected);
    }
}
