//! Nanoseconds per token of the detokenizer: many sequences in turn, as a batch of decodes visits them.
//!
//! `cargo bench -p oneloop-core --bench detok`
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use oneloop_core::text::{StopSet, StreamDecoder, Vocabulary};

const VOCABULARY_SIZE: usize = 128_000;
const NUM_SEQUENCES: usize = 1024;
const NUM_STEPS: usize = 400;

/// Words of 1 to 10 bytes; every eighth is a CJK character split over two tokens.
fn vocabulary() -> Arc<Vocabulary> {
    let pieces = (0..VOCABULARY_SIZE).map(|id| match id % 16 {
        0 => vec![0xe4, 0xb8],
        1 => vec![0x80 + (id / 16 % 64) as u8],
        _ => (0..=id * 7919 % 10)
            .map(|i| {
                if i == 0 {
                    b' '
                } else {
                    b'a' + ((id >> i) % 26) as u8
                }
            })
            .collect(),
    });
    Arc::new(Vocabulary::new(pieces, &[2], false).unwrap())
}

/// Ordinary words, or halves of characters in turn.
fn ids(split: bool) -> Vec<u32> {
    let mut state = 1u64;
    (0..NUM_SEQUENCES * NUM_STEPS)
        .map(|index| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Squared, so that small ids are common, as in real text.
            let unit = (state >> 40) as f64 / f64::from(1u32 << 24);
            let id = (unit * unit * (VOCABULARY_SIZE / 16) as f64) as u32 * 16;
            if split {
                id + (index / NUM_SEQUENCES % 2) as u32
            } else {
                id + 2 + (state >> 33) as u32 % 14
            }
        })
        .collect()
}

fn measure(name: &str, vocabulary: &Arc<Vocabulary>, ids: &[u32], stops: &[&str]) {
    let set =
        Arc::new(StopSet::new(stops.iter().map(ToString::to_string).collect(), false, 0).unwrap());
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let mut decoders: Vec<_> = (0..NUM_SEQUENCES)
            .map(|_| StreamDecoder::new(Arc::clone(vocabulary), true, Some(Arc::clone(&set))))
            .collect();
        let mut out = String::with_capacity(16 * NUM_SEQUENCES);
        let start = Instant::now();
        for step in ids.chunks(NUM_SEQUENCES) {
            out.clear();
            for (decoder, &id) in decoders.iter_mut().zip(step) {
                assert!(decoder.push(id, &mut out).is_none());
            }
            black_box(&out);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / ids.len() as f64);
    }
    println!("{name:<44} {best:6.1} ns/token");
}

fn main() {
    let vocabulary = vocabulary();
    let (words, halves) = (ids(false), ids(true));
    measure("words", &vocabulary, &words, &[]);
    measure(
        "characters split over two tokens",
        &vocabulary,
        &halves,
        &[],
    );
    measure(
        "words, a stop string that never starts",
        &vocabulary,
        &words,
        &["\n\n"],
    );
    measure(
        "words, four stop strings that often start",
        &vocabulary,
        &words,
        &[" a!", " th!", "er?", "\n"],
    );
}
