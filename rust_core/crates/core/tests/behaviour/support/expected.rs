//! What a sequence's tokens and its end must be, computed from the request alone.

use oneloop_core::{Delta, Deltas, FinishReason, StopReason, SubmitRequest};

use super::constraints::{Next, Verdict, judge, next};
use super::device::Truth;
use super::driver::{VOCAB_SIZE, text_of};
use super::outputs::fake_logprobs;
use super::prompt_results::pick;
use super::reference::{bias_columns, sample};

/// The token that the simulated model gives behind these outputs.
pub(crate) fn expected_token(
    request: &SubmitRequest,
    outputs: &[i32],
    truth: &Truth,
    seed: i64,
) -> i32 {
    let bias = request
        .logit_bias
        .iter()
        .map(|&(token, value)| (token as i32, value as f32));
    let banned = banned(request, outputs.len());
    let next = next(request, outputs, &banned);
    let may_come = |token: i32| {
        let is_allowed = match &next {
            Next::These(may) => may[token as usize],
            Next::Anything => true,
            Next::Broken => panic!(
                "a token where nothing may come behind {outputs:?}, banned {banned:?}: {request:?}"
            ),
        };
        is_allowed && !banned.contains(&token)
    };
    sample(
        truth.prefix(outputs.len()),
        seed,
        bias_columns(bias),
        outputs.len() as u32,
        may_come,
        VOCAB_SIZE,
    )
}

/// What `min_tokens` bans behind so many outputs.
fn banned(request: &SubmitRequest, num_outputs: usize) -> Vec<i32> {
    if num_outputs as u64 >= request.min_tokens {
        return Vec::new();
    }
    let eos: &[i64] = if request.ignore_eos {
        &[]
    } else {
        &request.eos_token_ids
    };
    let ids = eos.iter().chain(&request.stop_token_ids);
    ids.map(|&id| id as i32).collect()
}

/// Whether the request's constraints fail with this token.
pub(crate) fn is_broken(request: &SubmitRequest, outputs: &[i32], token: i32) -> bool {
    let banned = banned(request, outputs.len());
    let mut with_token = outputs.to_vec();
    with_token.push(token);
    matches!(next(request, outputs, &banned), Next::Broken)
        || judge(request, &with_token) == Verdict::Wrong
}

/// How and with which text a sequence with these outputs ends, if it does; the whole text otherwise.
pub(crate) fn expected_end(
    request: &SubmitRequest,
    tokens: &[i32],
) -> (Option<FinishReason>, Option<StopReason>, String) {
    let last = *tokens.last().unwrap();
    let (before, whole) = (text_of(&tokens[..tokens.len() - 1]), text_of(tokens));
    let token_text = |kept: bool| if kept { whole.clone() } else { before.clone() };
    if tokens.len() as u64 > request.min_tokens {
        if !request.ignore_eos && request.eos_token_ids.contains(&i64::from(last)) {
            return (
                Some(FinishReason::Stop),
                None,
                token_text(request.include_stop_str_in_output),
            );
        }
        if request.stop_token_ids.contains(&i64::from(last)) {
            let text = token_text(request.include_stop_str_in_output);
            return (
                Some(FinishReason::Stop),
                Some(StopReason::Token(last)),
                text,
            );
        }
        // One letter a token: a stop string that was not there before ends with the text. The longest is reported.
        let fresh = request
            .stop
            .iter()
            .filter(|stop| whole.len() > before.len() && whole.ends_with(stop.as_str()));
        if let Some(stop) = fresh.max_by_key(|stop| stop.len()) {
            let kept = if request.include_stop_str_in_output {
                0
            } else {
                stop.len()
            };
            let text = whole[..whole.len() - kept].to_owned();
            return (
                Some(FinishReason::Stop),
                Some(StopReason::Text(stop.clone())),
                text,
            );
        }
    }
    if judge(request, tokens) == Verdict::Over {
        return (Some(FinishReason::Stop), None, whole);
    }
    let is_full = request.max_tokens == Some(tokens.len() as u64);
    (is_full.then_some(FinishReason::Length), None, whole)
}

/// The delta tells of its token what the device wrote.
/// `prefix`: behind which the token was sampled.
pub(crate) fn check_logprobs(
    request: &SubmitRequest,
    (prefix, token): (u64, i32),
    delta: &Delta,
    deltas: &Deltas,
) {
    let Some(num_top) = request.logprobs else {
        assert!(deltas.logprobs(delta).is_none());
        return;
    };
    let entries: Vec<_> = deltas.logprobs(delta).unwrap().collect();
    let [entry] = entries.as_slice() else {
        panic!("one token, {} entries", entries.len())
    };
    assert_eq!(entry.rank, fake_logprobs(token, 0, VOCAB_SIZE).0);
    let num_columns = num_top as usize + 1;
    let (ids, picked) = entry.token_ids.split_at(num_columns);
    let (logprobs, values) = entry.logprobs.split_at(num_columns);
    let wanted = &request.logprob_token_ids;
    assert!(
        picked
            .iter()
            .map(|&id| i64::from(id))
            .eq(wanted.iter().copied())
    );
    for (&id, value) in wanted.iter().zip(values) {
        assert_eq!(value.to_bits(), pick(prefix, id).to_bits());
    }
    for (column, (&id, &value)) in ids.iter().zip(logprobs).enumerate() {
        let (_, expected_id, expected_value) = fake_logprobs(token, column, VOCAB_SIZE);
        assert_eq!(
            (id, value.to_bits()),
            (expected_id, expected_value.to_bits())
        );
    }
}
