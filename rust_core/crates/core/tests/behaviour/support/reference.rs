//! What a sequence must be: the "KV" of a position is a hash of all tokens up to it, a token is a function of that.

use super::rng::scramble;

/// Hash of a token prefix, given the hash of the prefix before its last token.
pub(crate) fn extend_prefix(prefix: u64, token: i32) -> u64 {
    scramble(prefix.rotate_left(17) ^ scramble(token as u64 + 1))
}

/// Hash of the empty prefix under an adapter.
pub(crate) fn empty_prefix(adapter: i32) -> u64 {
    scramble(0x5eed ^ (i64::from(adapter) as u64))
}

/// The sampler: depends on the prefix, the row's seed and columns, and which output token it is.
pub(crate) fn sample(
    prefix: u64,
    seed: i64,
    columns: u64,
    output_index: u32,
    may_come: impl Fn(i32) -> bool,
    vocab_size: u32,
) -> i32 {
    let mut state =
        prefix ^ scramble(seed as u64) ^ columns.rotate_left(7) ^ scramble(u64::from(output_index));
    for _ in 0..5000 {
        state = scramble(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        let token = (state % u64::from(vocab_size)) as i32;
        if may_come(token) {
            return token;
        }
    }
    unreachable!("nearly all ids are banned")
}

/// Stands for `logit_bias` in the sampler.
pub(crate) fn bias_columns(bias: impl IntoIterator<Item = (i32, f32)>) -> u64 {
    bias.into_iter().fold(0, |columns, (token, value)| {
        columns.wrapping_add(scramble(
            u64::from(value.to_bits()) << 32 | u64::from(token as u32),
        ))
    })
}
