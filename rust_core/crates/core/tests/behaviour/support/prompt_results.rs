//! What the simulated device gives beside tokens, and what the core must make of it.

use oneloop_core::{Delta, FinishReason, NUM_LOGPROB_COLUMNS, Pooling, SubmitRequest};

use super::reference::{empty_prefix, extend_prefix};
use super::rng::scramble;
use super::slab::Slab;

/// Numbers of a hidden state.
pub(crate) const HIDDEN_SIZE: u32 = 3;

/// Hash of the prompt up to each position.
fn prefixes(request: &SubmitRequest) -> Vec<u64> {
    let mut last = empty_prefix(request.adapter);
    let tokens = request.prompt.iter();
    tokens
        .map(|&token| {
            last = extend_prefix(last, token);
            last
        })
        .collect()
}

/// (rank, id, log-probability) of a token behind a prefix.
fn score(prefix: u64, token: i32, column: usize) -> (i32, i32, f32) {
    let mixed = prefix.rotate_left(column as u32 * 3);
    let id = if column == 0 {
        token
    } else {
        (mixed % 50) as i32
    };
    ((prefix % 9) as i32 + 1, id, -((mixed % 1024) as f32) - 1.0)
}

/// The log-probability that a token has behind a prefix.
pub(crate) fn pick(prefix: u64, token: i64) -> f32 {
    -(((prefix.rotate_left(29) ^ scramble(token as u64)) % 1024) as f32)
}

/// A number of a hidden state: small enough that sums are exact.
fn hidden(prefix: u64, index: u32) -> f32 {
    ((prefix >> (8 * index)) % 256) as f32
}

/// Writes a step's results. `prefix`: of the step's token with an index, `None` where it is garbage.
pub(crate) fn write(slab: &mut Slab, prefix: impl Fn(i32) -> Option<u64>) {
    let count = slab.count("num_scores");
    let indices = slab.ints("score_token_index", count).to_vec();
    let tokens = slab.ints("score_token", count).to_vec();
    for (at, (&index, &token)) in indices.iter().zip(&tokens).enumerate() {
        let prefix = prefix(index);
        for column in 0..NUM_LOGPROB_COLUMNS {
            let (rank, id, value) =
                prefix.map_or((-7, -7, 7.0), |prefix| score(prefix, token, column));
            slab.array_mut::<i32>("score_rank")[at] = rank;
            let place = at * NUM_LOGPROB_COLUMNS + column;
            slab.array_mut::<i32>("score_logprob_token")[place] = id;
            slab.array_mut::<f32>("score_logprob")[place] = value;
        }
    }
    let count = slab.count("num_picked");
    let indices = slab.ints("pick_token_index", count).to_vec();
    let starts = slab
        .ints("pick_start", count + usize::from(count > 0))
        .to_vec();
    let tokens = slab.ints("pick_token", slab.count("num_picks")).to_vec();
    assert_eq!(starts.last().map_or(0, |&end| end as usize), tokens.len());
    for (&index, range) in indices.iter().zip(starts.windows(2)) {
        let range = range[0] as usize..range[1] as usize;
        let values = &mut slab.array_mut::<f32>("pick_logprob")[range.clone()];
        for (value, &token) in values.iter_mut().zip(&tokens[range]) {
            *value = prefix(index).map_or(7.0, |prefix| pick(prefix, token.into()));
        }
    }
    let count = slab.count("num_pools");
    let starts = slab.ints("pool_start", count).to_vec();
    let ends = slab.ints("pool_end", count).to_vec();
    for (at, (&start, &end)) in starts.iter().zip(&ends).enumerate() {
        assert!(start < end, "an empty pool");
        for number in 0..HIDDEN_SIZE {
            let value = |index| prefix(index).map_or(0.5, |prefix| hidden(prefix, number));
            slab.array_mut::<f32>("pooled")[at * HIDDEN_SIZE as usize + number as usize] =
                (start..end).map(value).sum();
        }
    }
}

/// What the first delta of a sequence says of the prompt.
pub(crate) fn check(request: &SubmitRequest, delta: &Delta, is_first: bool) {
    let prefixes = prefixes(request);
    let is_due = is_first && delta.index == 0;
    let told = delta.told.as_ref();
    let scored = told.and_then(|told| told.prompt_logprobs.as_ref());
    let pooled = told.and_then(|told| told.pooled.as_ref());
    assert_eq!(
        scored.is_some(),
        is_due && request.prompt_logprobs.is_some()
    );
    if let (Some(scored), Some(num_top)) = (scored, request.prompt_logprobs) {
        assert_eq!(scored.len(), request.prompt.len() - 1);
        for (index, &prefix) in prefixes.iter().enumerate().take(scored.len()) {
            let entry = scored.get(index).unwrap();
            assert_eq!(entry.token_ids.len() as u64, num_top + 1);
            for (column, (&id, &value)) in entry.token_ids.iter().zip(entry.logprobs).enumerate() {
                let (rank, token, expected) = score(prefix, request.prompt[index + 1], column);
                assert_eq!(
                    (entry.rank, id, value.to_bits()),
                    (rank, token, expected.to_bits())
                );
            }
        }
    }
    assert_eq!(pooled.is_some(), is_due && request.pooling.is_some());
    if let (Some(pooled), Some(pooling)) = (pooled, request.pooling) {
        let expected = (0..HIDDEN_SIZE).map(|number| match pooling {
            Pooling::Last => hidden(*prefixes.last().unwrap(), number),
            Pooling::Mean => {
                let sum: f64 = prefixes
                    .iter()
                    .map(|&prefix| f64::from(hidden(prefix, number)))
                    .sum();
                (sum / prefixes.len() as f64) as f32
            }
        });
        assert_eq!(*pooled, expected.collect::<Vec<_>>());
    }
}

/// The one delta of a request without tokens.
pub(crate) fn is_whole_answer(request: &SubmitRequest, delta: &Delta) -> bool {
    request.max_tokens == Some(0) && delta.finish_reason == Some(FinishReason::Length)
}
