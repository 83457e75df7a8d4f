//! One sequence: its tokens, how many of them have KV, and the blocks that hold it.

use super::prompt_results::PromptResults;
use crate::delta::Deltas;
use crate::grammar::Rules;
use crate::kv::{BlockKey, BlockRef};
use crate::text::StreamDecoder;

/// Importance: the lowest is admitted first and preempted last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: i64,
    /// Handle of the request: they are given out in order of arrival.
    pub(crate) arrival: u64,
    pub(crate) index: u32,
}

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The record is unused.
    Vacant,
    /// In the queue, without slot and blocks.
    Queued,
    /// In a slot.
    Running,
    /// Waits, out of the queue, for what a running one is about to compute.
    Deferred,
    /// Not forked yet: goes where the request's first sequence goes. Has a slot when that one has.
    Attached,
}

/// No slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// No front.
pub(crate) const NO_FRONT: u32 = u32::MAX;

/// The device knows the whole block table.
pub(crate) const TOLD: u32 = u32::MAX;

/// State of one sequence.
///
/// ```text
/// 0 ─────────── num_prompt ─── num_prompt + outputs.len() ─── + num_pending
///                                          known │ being sampled │
/// 0 ──────── num_computed (has KV, or will have it after the steps in flight)
/// ```
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) place: Place,
    pub(crate) slot: u32,
    pub(crate) num_prompt: u32,
    pub(crate) num_computed: u32,
    pub(crate) num_pending: u32,
    pub(crate) max_tokens: u32,
    pub(crate) min_tokens: u32,
    /// `flags` bits that its samples set in the header, without the one for `min_tokens`.
    pub(crate) flags: u32,
    pub(crate) num_logprobs: i32,
    /// A beam: its next token is known only when those of all beams are.
    pub(crate) is_beam: bool,
    /// First entry of the block table that the device does not know; `TOLD` for none.
    pub(crate) first_stale: u32,
    /// Whether the block it writes next may be held by a sibling too.
    pub(crate) shares_tail: bool,
    /// Blocks of the table that were looked at for making them findable.
    pub(crate) num_registered: u32,
    /// First full block of known tokens that is not findable, where the map of fronts leads here.
    pub(crate) front: u32,
    /// Blocks at the start of the table that were found in the cache: written by others.
    pub(crate) num_hit: u32,
    /// Prompt tokens found in the cache at the request's first admission.
    pub(crate) num_cached_tokens: u32,
    /// Drawn anew when results in flight must not count any more; 0 when vacant.
    pub(crate) life: u64,
    /// Drawn anew at each admission: KV computed for an earlier one is gone.
    pub(crate) admission: u64,
    pub(crate) request: u32,
    pub(crate) num_preemptions: u32,
    pub(crate) rank: Rank,
    pub(crate) table: Vec<BlockRef>,
    pub(crate) outputs: Vec<i32>,
    /// Keys of the full blocks after the prompt's.
    pub(crate) output_keys: Vec<BlockKey>,
    pub(crate) decoder: Option<StreamDecoder>,
    /// What binds its next token, as its committed tokens leave it.
    pub(crate) rules: Option<Box<Rules>>,
    /// What its one delta will say; `None` where every token is told at once.
    pub(crate) gathered: Option<Box<Deltas>>,
    /// Whether a delta was reported.
    pub(crate) has_reported: bool,
    /// What is wanted of the prompt itself, until it is told.
    pub(crate) prompt_results: Option<Box<PromptResults>>,
}

impl Sequence {
    pub(crate) fn vacant() -> Self {
        Self {
            place: Place::Vacant,
            slot: NO_SLOT,
            num_prompt: 0,
            num_computed: 0,
            num_pending: 0,
            max_tokens: 0,
            min_tokens: 0,
            flags: 0,
            num_logprobs: -1,
            is_beam: false,
            first_stale: TOLD,
            shares_tail: false,
            num_registered: 0,
            front: NO_FRONT,
            num_hit: 0,
            num_cached_tokens: 0,
            life: 0,
            admission: 0,
            request: 0,
            num_preemptions: 0,
            rank: Rank {
                priority: 0,
                arrival: 0,
                index: 0,
            },
            table: Vec::new(),
            outputs: Vec::new(),
            output_keys: Vec::new(),
            decoder: None,
            rules: None,
            gathered: None,
            has_reported: false,
            prompt_results: None,
        }
    }

    /// Makes the record vacant; its buffers keep their memory.
    pub(crate) fn clear(&mut self) {
        let mut outputs = std::mem::take(&mut self.outputs);
        let mut output_keys = std::mem::take(&mut self.output_keys);
        outputs.clear();
        output_keys.clear();
        let table = std::mem::take(&mut self.table);
        *self = Self {
            table,
            outputs,
            output_keys,
            ..Self::vacant()
        };
    }

    /// Tokens that the host knows.
    #[inline]
    pub(crate) fn num_known(&self) -> u32 {
        self.num_prompt + self.outputs.len() as u32
    }

    /// Known tokens and those being sampled.
    #[inline]
    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_known() + self.num_pending
    }

    /// Tokens to compute before the next one can be sampled; 0 when every token it may get is known or on its way.
    #[inline]
    pub(crate) fn num_owed(&self) -> u32 {
        if self.outputs.len() as u32 + self.num_pending >= self.max_tokens {
            // Without output tokens the prompt is computed all the same, for its results.
            return if self.max_tokens == 0 {
                self.num_prompt - self.num_computed
            } else {
                0
            };
        }
        if self.is_beam && self.num_pending > 0 {
            return 0;
        }
        self.num_tokens() - self.num_computed
    }

    /// Whether results other than tokens are in flight.
    #[inline]
    pub(crate) fn awaits_results(&self) -> bool {
        self.prompt_results
            .as_ref()
            .is_some_and(|results| results.num_in_flight > 0)
    }

    /// Tokens at its start that may come from the cache.
    #[inline]
    pub(crate) fn num_cacheable(&self) -> u32 {
        let num_known = self.num_known() - 1;
        self.prompt_results.as_ref().map_or(num_known, |results| {
            results.num_cacheable(self.num_prompt).min(num_known)
        })
    }

    /// Whether its rows take places in the slab's list of scores.
    #[inline]
    pub(crate) fn is_scored(&self) -> bool {
        self.prompt_results
            .as_ref()
            .is_some_and(|results| results.is_scored(self.num_prompt))
    }

    /// Whether somebody gets its tokens one by one and has, or is about to have, the first of them.
    #[inline]
    pub(crate) fn is_streaming(&self) -> bool {
        self.gathered.is_none() && self.num_tokens() > self.num_prompt
    }
}

/// The tokens `[start, start + buffer.len())` of prompt and outputs.
pub(crate) fn copy_tokens(prompt: &[i32], outputs: &[i32], start: usize, buffer: &mut [i32]) {
    let from_prompt = prompt.len().saturating_sub(start).min(buffer.len());
    let (head, tail) = buffer.split_at_mut(from_prompt);
    if !head.is_empty() {
        head.copy_from_slice(&prompt[start..start + from_prompt]);
    }
    if !tail.is_empty() {
        let first = start + from_prompt - prompt.len();
        tail.copy_from_slice(&outputs[first..first + tail.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_copied_across_the_end_of_the_prompt() {
        let (prompt, outputs) = ([1, 2, 3], [4, 5, 6]);
        for start in 0..6 {
            for len in 0..=6 - start {
                let mut buffer = vec![0; len];
                copy_tokens(&prompt, &outputs, start, &mut buffer);
                let expected: Vec<i32> = (1..=6).skip(start).take(len).collect();
                assert_eq!(buffer, expected);
            }
        }
    }
}
