//! The core's behaviour through its public interface, on a simulated device that checks every step.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how tests fail

mod admission;
mod constraints;
mod failures;
mod fairness;
mod final_only;
mod forks;
mod mixed;
mod prefix;
mod priority;
mod property;
mod requests;
mod shared;
mod snapshot;
mod starvation;
mod stops;
mod support;
mod trace;

use oneloop_core::{CoreConfig, SubmitRequest};

use support::driver::VOCAB_SIZE;
use support::rng::Rng;

/// A roomy core with blocks of 4 tokens.
fn config() -> CoreConfig {
    let mut config = CoreConfig::new(256, VOCAB_SIZE);
    config.block_size = 4;
    config.max_num_seqs = 16;
    config.max_num_batched_tokens = 64;
    config.max_model_len = 256;
    config.hash_key = Some([3; 16]);
    config
}

/// `len` tokens that depend on `text`, the shorter a prefix of the longer.
fn tokens(text: u64, len: usize) -> Vec<i32> {
    let mut rng = Rng(text);
    (0..len)
        .map(|_| (rng.bits() % u64::from(VOCAB_SIZE)) as i32)
        .collect()
}

/// A request for so many tokens; nothing else ends it.
fn request(prompt: Vec<i32>, max_tokens: u64) -> SubmitRequest {
    let mut request = SubmitRequest::new(prompt);
    request.max_tokens = Some(max_tokens);
    request
}
