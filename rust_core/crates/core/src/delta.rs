//! What a step added to its sequences: one buffer per kind of data, ranges into it per sequence.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::sync::Arc;

use crate::prompt::PromptLogprobs;

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// EOS, a stop id, a stop string, or a grammar that lets nothing follow.
    Stop,
    /// `max_tokens` or the context.
    Length,
    /// Aborted (never reported by the core itself: no delta follows an abort).
    Abort,
    /// See [`Delta::error`].
    Error,
}

impl FinishReason {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Why a sequence ended with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// One line.
    pub message: Box<str>,
    /// The request cannot be answered as it stands: what it asks for contradicts itself, or needs more work for one
    /// token than there may be. Else the model or the engine has failed.
    pub is_of_request: bool,
}

impl Failure {
    /// The request is at fault.
    pub fn of_request(message: impl Into<Box<str>>) -> Self {
        Self {
            message: message.into(),
            is_of_request: true,
        }
    }

    /// The model or the engine is.
    pub fn of_engine(message: impl Into<Box<str>>) -> Self {
        Self {
            message: message.into(),
            is_of_request: false,
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What a "stop" matched; EOS matches nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(i32),
    /// One of the stop strings.
    Text(String),
}

/// What few requests are told, once: kept apart, so that the deltas of all others stay small.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Of the prompt's tokens, where asked for; only in the first delta of the request's sequence 0.
    pub prompt_logprobs: Option<Arc<PromptLogprobs>>,
    /// The pooled hidden state, where asked for.
    pub pooled: Option<Vec<f32>>,
    /// Of a text that beam search found.
    pub cumulative_logprob: Option<f64>,
}

/// What one step added to one sequence. The ranges index the buffers of the [`Deltas`] it lives in.
#[derive(Debug, Clone)]
pub struct Delta {
    /// Handle of the request.
    pub request: u64,
    /// Which of the request's n sequences.
    pub index: u32,
    /// Bytes of [`Deltas::text`].
    pub(crate) text: Range<u32>,
    /// Elements of [`Deltas::token_ids`].
    pub(crate) tokens: Range<u32>,
    /// Elements of [`Deltas::logprobs`]; `None` when not asked for.
    pub(crate) logprobs: Option<Range<u32>>,
    /// Set in a sequence's last delta.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it.
    pub stop_reason: Option<StopReason>,
    /// Prompt tokens taken from the prefix cache at the first admission.
    pub num_cached_tokens: u32,
    /// Seconds from submit to first admission; only in a sequence's first delta.
    pub queue_s: Option<f64>,
    /// When the finish reason is an error.
    pub error: Option<Arc<Failure>>,
    /// What few requests are told.
    pub told: Option<Box<Told>>,
}

/// Log-probabilities of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprobs<'a> {
    /// Rank of the sampled token, 1 = most likely.
    pub rank: i32,
    /// The sampled id, then the top ids.
    pub token_ids: &'a [i32],
    /// The log-probabilities of the same.
    pub logprobs: &'a [f32],
}

/// Where one token's log-probabilities lie.
#[derive(Debug, Clone)]
pub(crate) struct LogprobEntry {
    pub(crate) rank: i32,
    pub(crate) range: Range<u32>,
}

/// Lengths of the buffers before something was added to them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) text: u32,
    pub(crate) tokens: u32,
    pub(crate) logprobs: u32,
}

/// All deltas of one commit, in the order of the step's samples.
#[derive(Debug, Clone, Default)]
pub struct Deltas {
    pub(crate) entries: Vec<Delta>,
    pub(crate) text: String,
    pub(crate) token_ids: Vec<i32>,
    pub(crate) logprob_entries: Vec<LogprobEntry>,
    pub(crate) logprob_ids: Vec<i32>,
    pub(crate) logprob_values: Vec<f32>,
}

impl Deltas {
    /// The deltas.
    pub fn entries(&self) -> &[Delta] {
        &self.entries
    }

    /// Number of deltas.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was added to any sequence.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Text that became final.
    pub fn text(&self, delta: &Delta) -> &str {
        &self.text[delta.text.start as usize..delta.text.end as usize]
    }

    /// New tokens.
    pub fn token_ids(&self, delta: &Delta) -> &[i32] {
        &self.token_ids[delta.tokens.start as usize..delta.tokens.end as usize]
    }

    /// Per new token its log-probabilities; `None` when not asked for.
    pub fn logprobs(
        &self,
        delta: &Delta,
    ) -> Option<impl ExactSizeIterator<Item = TokenLogprobs<'_>>> {
        let range = delta.logprobs.clone()?;
        let entries = &self.logprob_entries[range.start as usize..range.end as usize];
        Some(entries.iter().map(|entry| {
            let range = entry.range.start as usize..entry.range.end as usize;
            TokenLogprobs {
                rank: entry.rank,
                token_ids: &self.logprob_ids[range.clone()],
                logprobs: &self.logprob_values[range],
            }
        }))
    }

    /// Where the next delta's data will start.
    pub(crate) fn mark(&self) -> Mark {
        Mark {
            text: self.text.len() as u32,
            tokens: self.token_ids.len() as u32,
            logprobs: self.logprob_entries.len() as u32,
        }
    }

    /// Appends the data, without the entries, of `other`.
    pub(crate) fn append(&mut self, other: &Self) {
        let shift = self.logprob_ids.len() as u32;
        self.text.push_str(&other.text);
        self.token_ids.extend_from_slice(&other.token_ids);
        self.logprob_ids.extend_from_slice(&other.logprob_ids);
        self.logprob_values.extend_from_slice(&other.logprob_values);
        let entries = other.logprob_entries.iter().map(|entry| LogprobEntry {
            rank: entry.rank,
            range: entry.range.start + shift..entry.range.end + shift,
        });
        self.logprob_entries.extend(entries);
    }

    /// Room for one token and a few bytes of text for each of `num_samples` samples.
    pub(crate) fn with_capacity(num_samples: usize) -> Self {
        Self {
            entries: Vec::with_capacity(num_samples),
            text: String::with_capacity(8 * num_samples),
            token_ids: Vec::with_capacity(num_samples),
            ..Self::default()
        }
    }
}
