//! Tokens out, what stands for them in: prefixes that were equal stay equal, others stay different, and nothing else of
//! the content is left.
//!
//! Each token is replaced by its image under a permutation of the vocabulary that a secret key and all tokens before it
//! choose. So a sequence of images determines the sequence of tokens (given the key, which is never written), which
//! makes the mapping exact whatever the hash does.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use super::columns::Column;
use super::event::{Chosen, Event, Outcome, Step};
use crate::sched::mix;

/// Rounds of the permutation.
const NUM_ROUNDS: u32 = 4;

/// Request and index of a sequence.
type Name = (u64, u32);

/// Replaces the tokens of all sequences, as their events come by.
#[derive(Debug)]
pub(super) struct Veil {
    cover: Cover,
    /// Of each live request's sequences: what stands for the tokens so far.
    live: HashMap<u64, Vec<u128>>,
    slots: Vec<Name>,
    in_flight: VecDeque<(u64, Vec<Name>)>,
}

impl Veil {
    pub(super) fn new(key: &[u8; 16], vocab_size: u32, max_num_seqs: u32) -> Self {
        Self {
            cover: Cover::new(key, vocab_size),
            live: HashMap::new(),
            slots: vec![(0, 0); max_num_seqs as usize],
            in_flight: VecDeque::new(),
        }
    }

    /// Replaces what the event holds of tokens.
    pub(super) fn apply(&mut self, event: &mut Event) {
        match event {
            Event::Submitted(submission) => {
                submission.name_space = self.cover.extend(submission.name_space, -1);
                let mut prefix = submission.name_space;
                for token in &mut submission.prompt {
                    *token = self.cover.next(&mut prefix, *token);
                }
                let prefixes = vec![prefix; submission.n as usize];
                self.live.insert(submission.request, prefixes);
            }
            Event::Scheduled(step) => self.note_step(step),
            Event::Committed {
                step_id,
                outcomes,
                chosen,
            } => {
                let names = self.take_step(*step_id);
                for (outcome, name) in outcomes.iter_mut().zip(names) {
                    self.apply_to_outcome(outcome, name);
                }
                for one in chosen {
                    self.go_on(one);
                }
            }
            Event::Failed { step_id } => {
                self.take_step(*step_id);
            }
            Event::Ended(request) => {
                self.live.remove(request);
            }
            _ => {}
        }
    }

    fn note_step(&mut self, step: &Step) {
        for admission in &step.admitted {
            if let Some(name) = self.slots.get_mut(admission.slot as usize) {
                *name = (admission.request, admission.index);
            }
        }
        let names = step.column(Column::SampleSlot).iter();
        let names = names.map(|&slot| self.slots.get(slot as usize).copied().unwrap_or_default());
        self.in_flight.push_back((step.step_id(), names.collect()));
    }

    fn take_step(&mut self, step_id: u64) -> Vec<Name> {
        match self.in_flight.front() {
            Some((oldest, _)) if *oldest == step_id => self
                .in_flight
                .pop_front()
                .map_or_else(Vec::new, |(_, names)| names),
            _ => Vec::new(),
        }
    }

    fn apply_to_outcome(&mut self, outcome: &mut Outcome, (request, index): Name) {
        let prefixes = self.live.get_mut(&request);
        let prefix = prefixes.and_then(|prefixes| prefixes.get_mut(index as usize));
        match outcome {
            Outcome::Token(token) => {
                *token = prefix.map_or(0, |prefix| self.cover.next(prefix, *token));
            }
            Outcome::Candidates(candidates) => {
                // One of them may follow; none has yet.
                let prefix = prefix.map(|prefix| *prefix);
                for token in candidates.iter_mut().flat_map(|one| &mut one.token) {
                    *token = prefix.map_or(0, |mut prefix| self.cover.next(&mut prefix, *token));
                }
            }
            _ => {}
        }
    }

    /// The beams of a request have got a token more each, some behind the tokens of another one.
    fn go_on(&mut self, chosen: &mut Chosen) {
        let Some(prefixes) = self.live.get_mut(&chosen.request) else {
            chosen.heirs.clear();
            return;
        };
        let parents = prefixes.clone();
        for (prefix, (parent, token)) in prefixes.iter_mut().zip(&mut chosen.heirs) {
            *prefix = parents.get(*parent as usize).copied().unwrap_or_default();
            *token = self.cover.next(prefix, *token);
        }
    }

    #[cfg(test)]
    pub(super) fn num_live(&self) -> usize {
        self.live.len()
    }
}

/// The permutations.
#[derive(Debug)]
struct Cover {
    keyed: SipHasher24,
    vocab_size: u32,
    /// Bits of half a block: the blocks are the least power of four that holds the vocabulary.
    half_bits: u32,
}

impl Cover {
    fn new(key: &[u8; 16], vocab_size: u32) -> Self {
        let bits = u32::BITS - vocab_size.saturating_sub(1).leading_zeros();
        Self {
            keyed: SipHasher24::new_with_key(key),
            vocab_size,
            half_bits: bits.div_ceil(2).max(1),
        }
    }

    /// What stands for a token after this prefix, which grows by it.
    fn next(&self, prefix: &mut u128, token: i32) -> i32 {
        let image = self.permute(*prefix, token as u32);
        *prefix = self.extend(*prefix, token);
        image as i32
    }

    fn extend(&self, prefix: u128, token: i32) -> u128 {
        let mut hasher = self.keyed;
        hasher.write(&prefix.to_le_bytes());
        hasher.write(&token.to_le_bytes());
        hasher.finish128().into()
    }

    /// A Feistel network, applied until the image is in the vocabulary again.
    fn permute(&self, key: u128, token: u32) -> u32 {
        let mask = (1 << self.half_bits) - 1;
        let mut image = token;
        loop {
            let (mut left, mut right) = (image >> self.half_bits, image & mask);
            for round in 0..NUM_ROUNDS {
                let round_key = (key >> (32 * round)) as u64;
                let noise = mix(round_key ^ u64::from(right) << 32) as u32;
                (left, right) = (right, left ^ (noise & mask));
            }
            image = left << self.half_bits | right;
            if image < self.vocab_size {
                return image;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prefix_has_a_permutation_of_its_own() {
        for vocab_size in [2, 3, 5, 64, 100, 1000] {
            let cover = Cover::new(&[7; 16], vocab_size);
            let images = |key: u128| -> Vec<u32> {
                (0..vocab_size)
                    .map(|token| cover.permute(key, token))
                    .collect()
            };
            let mut sorted = images(1 << 77 | 5);
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..vocab_size), "{vocab_size}");
            if vocab_size >= 64 {
                assert_ne!(images(1 << 77 | 5), images(1 << 77 | 6));
                let kept = images(9)
                    .iter()
                    .enumerate()
                    .filter(|&(token, &image)| token == image as usize)
                    .count();
                assert!(
                    kept < 8,
                    "{kept} of {vocab_size} tokens stand for themselves"
                );
            }
        }
    }

    #[test]
    fn equal_prefixes_stay_equal_and_nothing_else() {
        let cover = Cover::new(&[1; 16], 50_000);
        let images = |tokens: &[i32]| -> Vec<i32> {
            let mut prefix = 3;
            tokens
                .iter()
                .map(|&token| cover.next(&mut prefix, token))
                .collect()
        };
        let (a, b) = (images(&[1, 2, 3, 4, 4, 4]), images(&[1, 2, 9, 4, 4, 4]));
        assert_eq!(a[..2], b[..2]);
        assert!((2..6).all(|index| a[index] != b[index]), "{a:?} {b:?}");
        assert!(
            a[3] != a[4] || a[4] != a[5],
            "equal tokens at different places are not seen to be equal"
        );
        assert!(a != [1, 2, 3, 4, 4, 4]);
    }
}
