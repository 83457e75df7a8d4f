//! A request as it is submitted: plain data, checked once by `Inbox::submit`.

use crate::grammar::SharedGrammar;

/// Which final hidden states of a prompt a request wants, as one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The last token's.
    Last,
    /// The mean of all tokens'.
    Mean,
}

/// When beam search ends, once as many texts are finished as there are beams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EarlyStopping {
    /// When the best beam, scored as if it ended now, is no better than the worst of them.
    #[default]
    Heuristic,
    /// At once.
    Always,
    /// When no beam can become better, however long it gets.
    Never,
}

/// The `n` sequences are beams.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BeamSearch {
    /// Exponent of the length that log-probabilities are divided by.
    pub length_penalty: f64,
    /// When it ends.
    pub early_stopping: EarlyStopping,
}

/// What a client asks for. Limits and meanings are those of the stub's `Core.submit`.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of the API"
)]
pub struct SubmitRequest {
    /// Token ids, each in `[0, vocab_size)`.
    pub prompt: Vec<i32>,
    /// New tokens per sequence; `None` fills the context (and no more than the pool can hold). 0 only for what is said
    /// of the prompt.
    pub max_tokens: Option<u64>,
    /// No stop of any kind counts before a later token than this many.
    pub min_tokens: u64,
    /// Sequences to generate.
    pub n: u64,
    /// 0 = greedy.
    pub temperature: f64,
    /// 0 = off.
    pub top_k: u64,
    /// In (0, 1].
    pub top_p: f64,
    /// In [0, 1].
    pub min_p: f64,
    /// > 0.
    pub repetition_penalty: f64,
    /// In [-2, 2].
    pub presence_penalty: f64,
    /// In [-2, 2].
    pub frequency_penalty: f64,
    /// Seed of the first sequence; the others' are derived from it. `None` draws one from the configured seed.
    pub seed: Option<i64>,
    /// Top log-probabilities per token.
    pub logprobs: Option<u64>,
    /// Tokens whose log-probabilities are wanted beside every token's own, in this order; needs `logprobs`.
    pub logprob_token_ids: Vec<i64>,
    /// Top log-probabilities per prompt token but the first.
    pub prompt_logprobs: Option<u64>,
    /// A vector of the prompt instead of an answer: no token is sampled.
    pub pooling: Option<Pooling>,
    /// The most likely texts instead of sampled ones: of the sampling fields all must be neutral.
    pub beam_search: Option<BeamSearch>,
    /// (token id, value added to its logit).
    pub logit_bias: Vec<(i64, f64)>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Ids that end the sequence and are reported as the stop reason.
    pub stop_token_ids: Vec<i64>,
    /// Ids that end the sequence unless `ignore_eos`.
    pub eos_token_ids: Vec<i64>,
    /// EOS ids are ordinary tokens.
    pub ignore_eos: bool,
    /// The text ends after what stopped it instead of before.
    pub include_stop_str_in_output: bool,
    /// Special tokens leave no text.
    pub skip_special_tokens: bool,
    /// Special tokens that leave their text all the same: marks that a reader of the text must see.
    pub shown_special_ids: Vec<i64>,
    /// Whether deltas carry text.
    pub detokenize: bool,
    /// One delta per sequence, at its end, instead of one per token.
    pub final_only: bool,
    /// What the tokens must be.
    pub grammar: Option<SharedGrammar>,
    /// The grammar holds once these were generated; empty: from the first token.
    pub grammar_after: Vec<i64>,
    /// The only ids that may come; `None`: all.
    pub allowed_token_ids: Option<Vec<i64>>,
    /// Sequences of ids that may not come: the last one is banned where the others stand before it.
    pub bad_words: Vec<Vec<i64>>,
    /// After so many tokens without `thinking_end`, these are forced.
    pub thinking_budget: Option<u64>,
    /// What ends the thinking.
    pub thinking_end: Vec<i64>,
    /// Lower is sooner (policy "priority").
    pub priority: i64,
    /// Prefix cache name space.
    pub cache_salt: Vec<u8>,
    /// Adapter slot; -1 = none.
    pub adapter: i32,
    /// Sums are taken in the fixed order; prefixes are shared with such requests only.
    pub deterministic: bool,
}

impl SubmitRequest {
    /// A request with every option at its default.
    pub fn new(prompt: Vec<i32>) -> Self {
        Self {
            prompt,
            max_tokens: None,
            min_tokens: 0,
            n: 1,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            logprobs: None,
            logprob_token_ids: Vec::new(),
            prompt_logprobs: None,
            pooling: None,
            beam_search: None,
            logit_bias: Vec::new(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            shown_special_ids: Vec::new(),
            detokenize: true,
            final_only: false,
            grammar: None,
            grammar_after: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            thinking_budget: None,
            thinking_end: Vec::new(),
            priority: 0,
            cache_salt: Vec::new(),
            adapter: -1,
            deterministic: false,
        }
    }
}
