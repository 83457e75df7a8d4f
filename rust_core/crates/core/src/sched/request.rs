//! A request: what its n sequences have in common.

use std::sync::Arc;
use std::time::Instant;

use super::beams::Beams;
use crate::grammar::RuleSpec;
use crate::kv::BlockKey;
use crate::request::{BeamSearch, Pooling};
use crate::text::StopSet;

/// Columns of the sampler, as the slab carries them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sampling {
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) top_k: i32,
    /// -1 = none.
    pub(crate) num_logprobs: i32,
    /// Tokens whose log-probabilities are told with every sample's.
    pub(crate) picks: Vec<i32>,
    pub(crate) adapter: i32,
    /// Seed of the sequence with index 0.
    pub(crate) seed: i64,
    pub(crate) bias: Vec<(i32, f32)>,
    /// Ids that may not be sampled before `min_tokens`; empty when it is 0.
    pub(crate) banned: Vec<i32>,
    /// Steps that hold one of its rows take their sums in the fixed order.
    pub(crate) fixed_order: bool,
}

impl Sampling {
    pub(crate) fn has_penalties(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() > 0.0
            || self.presence_penalty.abs() > 0.0
            || self.frequency_penalty.abs() > 0.0
    }

    /// Seed of the sequence with this index; sequence 0 uses the request's own, so n changes nothing for it.
    pub(crate) fn seed_of(&self, index: u32) -> i64 {
        if index == 0 {
            return self.seed;
        }
        mix(mix(self.seed as u64).wrapping_add(u64::from(index))) as i64
    }
}

/// `SplitMix64`: a bijection on 64 bits whose outputs look independent.
pub(crate) fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// When a sequence ends.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stopping {
    /// Output tokens: what was asked, within the context and the pool.
    pub(crate) max_tokens: u32,
    pub(crate) min_tokens: u32,
    /// Tokens among which no stop token counts: `min_tokens`, but in a replay, whose stops are those of the trace.
    pub(crate) num_unstoppable: u32,
    /// Empty when EOS is ignored.
    pub(crate) eos_token_ids: Vec<i32>,
    pub(crate) stop_token_ids: Vec<i32>,
    pub(crate) stop_strings: Option<Arc<StopSet>>,
    /// The text of the stopping token is part of the text.
    pub(crate) include_stop_in_output: bool,
    pub(crate) skip_special_tokens: bool,
    /// Special ids that leave text all the same, ascending; `None` for none.
    pub(crate) shown_special_ids: Option<Arc<Vec<u32>>>,
    pub(crate) detokenize: bool,
}

impl Stopping {
    pub(crate) fn is_stop_token(&self, token: i32) -> bool {
        self.eos_token_ids.contains(&token) || self.stop_token_ids.contains(&token)
    }
}

/// A request that was found valid, on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct RequestSpec {
    pub(crate) handle: u64,
    pub(crate) num_sequences: u32,
    /// Lower is sooner; 0 unless the policy is by priority.
    pub(crate) priority: i64,
    pub(crate) submitted_at: Instant,
    pub(crate) prompt: Vec<i32>,
    /// Parent of the first block's key.
    pub(crate) root_key: BlockKey,
    /// Keys of the prompt's full blocks.
    pub(crate) prompt_keys: Vec<BlockKey>,
    /// Deltas are kept back until a sequence ends.
    pub(crate) final_only: bool,
    /// Whether the client gave the seed.
    pub(crate) has_seed: bool,
    /// Top log-probabilities of each prompt token; -1 = none.
    pub(crate) num_prompt_logprobs: i32,
    pub(crate) pooling: Option<Pooling>,
    pub(crate) beam_search: Option<BeamSearch>,
    pub(crate) sampling: Sampling,
    pub(crate) stopping: Stopping,
    /// What binds its tokens, if anything does.
    pub(crate) rules: Option<Arc<RuleSpec>>,
}

impl RequestSpec {
    /// Names the request; without a seed of its own it gets one from the core's seed and its name.
    pub(crate) fn set_handle(&mut self, handle: u64, core_seed: u64) {
        self.handle = handle;
        if !self.has_seed {
            self.sampling.seed = mix(mix(core_seed).wrapping_add(handle)) as i64;
        }
    }

    pub(crate) fn vacant() -> Self {
        Self {
            handle: 0,
            num_sequences: 0,
            priority: 0,
            submitted_at: Instant::now(),
            prompt: Vec::new(),
            root_key: 0,
            prompt_keys: Vec::new(),
            final_only: false,
            has_seed: true,
            num_prompt_logprobs: -1,
            pooling: None,
            beam_search: None,
            sampling: Sampling::default(),
            stopping: Stopping::default(),
            rules: None,
        }
    }
}

/// A live request, or a vacant record (handle 0).
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) spec: RequestSpec,
    /// Its sequences by index; `NO_SEQUENCE` for those that have ended.
    pub(crate) members: Vec<u32>,
    pub(crate) num_live: u32,
    /// Whether the prompt has been prefilled and each sequence goes its own way. Before, sequence 0 acts for all.
    pub(crate) forked: bool,
    /// Set at the first admission.
    pub(crate) queue_s: Option<f64>,
    /// Where its sequences are beams.
    pub(super) beams: Option<Box<Beams>>,
}

impl Request {
    pub(crate) fn new(spec: RequestSpec) -> Self {
        Self {
            num_live: spec.num_sequences,
            forked: spec.num_sequences == 1,
            members: Vec::with_capacity(spec.num_sequences as usize),
            beams: spec
                .beam_search
                .map(|search| Box::new(Beams::new(search, spec.num_sequences))),
            spec,
            queue_s: None,
        }
    }

    /// Slots it takes at its next admission.
    pub(crate) fn num_slots(&self) -> u32 {
        if self.forked {
            1
        } else {
            self.spec.num_sequences
        }
    }
}

/// Marks an ended sequence in a list of members.
pub(crate) const NO_SEQUENCE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_siblings_differ_and_the_first_is_the_request_s() {
        let sampling = Sampling {
            seed: -7,
            ..Sampling::default()
        };
        let mut seeds: Vec<i64> = (0..1000).map(|index| sampling.seed_of(index)).collect();
        assert_eq!(seeds[0], -7);
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 1000);
    }
}
