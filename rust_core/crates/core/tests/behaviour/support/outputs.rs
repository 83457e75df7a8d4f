//! What the simulated device writes for samples.

use oneloop_core::NUM_LOGPROB_COLUMNS;

use super::slab::Slab;

/// Rank and log-probabilities that the tests can recompute from the token.
pub(crate) fn fake_logprobs(token: i32, column: usize, vocab_size: u32) -> (i32, i32, f32) {
    let id = (token as usize + column) % vocab_size as usize;
    (1 + token % 5, id as i32, -(column as f32) - token as f32)
}

/// Writes tokens and what is said of each.
pub(crate) fn write_outputs(slab: &mut Slab, tokens: &[i32], vocab_size: u32) {
    slab.array_mut::<i32>("output_token")[..tokens.len()].copy_from_slice(tokens);
    for (position, &token) in tokens.iter().enumerate() {
        slab.array_mut::<i32>("output_rank")[position] = fake_logprobs(token, 0, vocab_size).0;
        for column in 0..NUM_LOGPROB_COLUMNS {
            let (_, id, value) = fake_logprobs(token, column, vocab_size);
            slab.array_mut::<i32>("output_logprob_token")
                [position * NUM_LOGPROB_COLUMNS + column] = id;
            slab.array_mut::<f32>("output_logprob")[position * NUM_LOGPROB_COLUMNS + column] =
                value;
        }
    }
}
