//! Sizes and policies of a core: fixed when it is made.

use crate::error::Error;

/// Order in which waiting requests are admitted; the reverse of the order in which running ones are preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// By arrival.
    #[default]
    Fcfs,
    /// Lower priority value first, then by arrival.
    Priority,
}

/// Sizes and policies. All sizes are counts unless the name says otherwise.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    /// KV blocks of the pool.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences that may run at once = batch rows = slots.
    pub max_num_seqs: u32,
    /// Tokens one step may compute.
    pub max_num_batched_tokens: u32,
    /// Tokens one step may compute while streams decode; prefill gets at least half of it beside any number of
    /// rows. `None`: as many as any step.
    pub mixed_step_tokens: Option<u32>,
    /// Tokens (prompt and output) of the longest sequence.
    pub max_model_len: u32,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Numbers of a pooled hidden state; 0: the executor gives none, and pooling is refused.
    pub hidden_size: u32,
    /// Whether blocks of equal prefixes are shared between requests.
    pub enable_prefix_caching: bool,
    /// Order of admission.
    pub policy: Policy,
    /// Steps that may be scheduled and not yet committed.
    pub max_steps_in_flight: u32,
    /// Source of the seeds of requests that bring none.
    pub seed: u64,
    /// Key of the prefix hashes; `None` draws one at random.
    pub hash_key: Option<[u8; 16]>,
}

impl CoreConfig {
    /// The usual sizes, for a pool of `num_blocks` blocks and a vocabulary of `vocab_size` tokens.
    pub fn new(num_blocks: u32, vocab_size: u32) -> Self {
        Self {
            num_blocks,
            block_size: 16,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            mixed_step_tokens: None,
            max_model_len: 2048,
            vocab_size,
            hidden_size: 0,
            enable_prefix_caching: true,
            policy: Policy::default(),
            max_steps_in_flight: 2,
            seed: 0,
            hash_key: None,
        }
    }

    /// Checks every field against its range and against the others.
    pub fn validate(&self) -> Result<(), Error> {
        let ranges = [
            ("num_blocks", self.num_blocks, MAX_NUM_BLOCKS),
            ("block_size", self.block_size, MAX_BLOCK_SIZE),
            ("max_num_seqs", self.max_num_seqs, MAX_NUM_SEQS),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                MAX_NUM_BATCHED_TOKENS,
            ),
            (
                "mixed_step_tokens",
                self.mixed_step_tokens.unwrap_or(1),
                MAX_NUM_BATCHED_TOKENS,
            ),
            ("max_model_len", self.max_model_len, MAX_MODEL_LEN),
            ("vocab_size", self.vocab_size, MAX_VOCAB_SIZE),
            (
                "max_steps_in_flight",
                self.max_steps_in_flight,
                MAX_STEPS_IN_FLIGHT,
            ),
        ];
        for (field, value, max) in ranges {
            if value == 0 || value > max {
                return Err(Error::config(
                    field,
                    format!("{value} is out of range; give a value from 1 to {max}"),
                ));
            }
        }
        if self.hidden_size > MAX_HIDDEN_SIZE {
            return Err(Error::config(
                "hidden_size",
                format!(
                    "{} is out of range; at most {MAX_HIDDEN_SIZE}",
                    self.hidden_size
                ),
            ));
        }
        if self.max_model_len < 2 {
            return Err(Error::config(
                "max_model_len",
                "1 leaves no room for an output token; give at least 2",
            ));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::config(
                "max_num_batched_tokens",
                format!(
                    "{} is less than max_num_seqs = {}, and every running sequence gets at least one token a step; \
                     raise it or lower max_num_seqs",
                    self.max_num_batched_tokens, self.max_num_seqs
                ),
            ));
        }
        Ok(())
    }

    /// Tokens that a step in which streams decode may compute beside the first one of each of its `num_rows` rows.
    #[inline]
    pub(crate) fn tokens_beside_streams(&self, num_rows: u32) -> u32 {
        let Some(num_tokens) = self.mixed_step_tokens else {
            return u32::MAX;
        };
        num_tokens
            .saturating_sub(num_rows)
            .max(num_tokens.div_ceil(LEAST_PREFILL_PART))
    }

    /// Blocks that hold `num_tokens` tokens.
    #[inline]
    pub(crate) fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }
}

/// Part of `mixed_step_tokens` that prefill gets whatever the number of rows: so a burst is over after a bounded time.
const LEAST_PREFILL_PART: u32 = 2;

/// Blocks of the pool per block of the least margin that an admission leaves available.
pub(crate) const BLOCKS_PER_MARGIN_BLOCK: u32 = 64;
/// Largest magnitude of beam search's `length_penalty`.
pub(crate) const MAX_LENGTH_PENALTY: f64 = 10.0;

// Upper bounds that keep every count and every slab offset far inside 32 bits.
const MAX_NUM_BLOCKS: u32 = 1 << 28;
const MAX_BLOCK_SIZE: u32 = 1024;
const MAX_NUM_SEQS: u32 = 1 << 16;
const MAX_NUM_BATCHED_TOKENS: u32 = 1 << 20;
const MAX_MODEL_LEN: u32 = 1 << 24;
const MAX_VOCAB_SIZE: u32 = 1 << 24;
const MAX_STEPS_IN_FLIGHT: u32 = 16;
const MAX_HIDDEN_SIZE: u32 = 1 << 16;

/// Most top log-probabilities a request may ask for per token.
pub const MAX_LOGPROBS: u32 = 20;
/// Most tokens whose log-probabilities a request may ask for by name, at each of its tokens.
pub const MAX_LOGPROB_TOKEN_IDS: usize = 128;
/// Most prompt tokens of one step whose log-probabilities are computed: their results have a place in the slab.
pub const MAX_SCORES_PER_STEP: u32 = 2048;
/// Most bytes of a cache salt.
pub const MAX_CACHE_SALT_BYTES: usize = 128;
/// Most entries of a request's `logit_bias`.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 64;
/// Most bytes of one stop string.
pub const MAX_STOP_STRING_BYTES: usize = 1024;
/// Most stop ids of a request, and most EOS ids.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Largest magnitude of a `logit_bias` value.
pub const MAX_LOGIT_BIAS_VALUE: f32 = 100.0;
/// Temperatures below it are greedy: dividing logits by less leaves the range of 32-bit floats.
pub const MIN_TEMPERATURE: f32 = 1e-5;
/// Most sequences of tokens that a request may ban.
pub const MAX_BAD_WORDS: usize = 1024;
/// Most tokens of one of them.
pub const MAX_BAD_WORD_TOKENS: usize = 64;
/// Most tokens of what begins a grammar or ends the thinking.
pub const MAX_MARKER_TOKENS: usize = 64;
