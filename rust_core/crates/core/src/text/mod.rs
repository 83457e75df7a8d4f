//! Text of token ids: the vocabulary's bytes, incremental decoding, stop strings.
//!
//! What the scheduler calls for every sampled token is [`StreamDecoder::push`]; when a sequence ends for any reason
//! but a stop string it calls [`StreamDecoder::flush`] once.

mod detok;
#[cfg(test)]
mod fuzz;
mod json;
mod logprobs;
mod prompt;
mod stop;
mod utf8;
mod vocab;

pub use detok::StreamDecoder;
pub use json::{push_json_integer, push_json_string};
pub use logprobs::{LogprobsEncoder, LogprobsForm};
pub use prompt::prompt_logprobs_json;
pub use stop::{StopSet, StopSetError};
pub use vocab::{TokenOutOfRange, Vocabulary, VocabularyError};
