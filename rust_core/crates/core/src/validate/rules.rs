//! What binds a request's tokens, checked.

use super::{check_id, check_len};
use crate::config::{CoreConfig, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_MARKER_TOKENS};
use crate::error::Error;
use crate::grammar::{RuleSpec, ThinkingLimit, clear_bit, mask_words, set_all, set_bit};
use crate::request::SubmitRequest;

/// What binds the tokens; `None` where nothing does.
pub(super) fn build_rules(
    config: &CoreConfig,
    request: &SubmitRequest,
) -> Result<Option<RuleSpec>, Error> {
    let grammar_after = check_marker("grammar_after", &request.grammar_after, config)?;
    let thinking = build_thinking(config, request)?;
    check_bad_words(config, request)?;
    let mut allowed = allowed_bits(config, request)?;
    let (short, long): (Vec<_>, Vec<_>) =
        request.bad_words.iter().partition(|word| word.len() == 1);
    if !short.is_empty() && allowed.is_empty() {
        allowed = vec![0; mask_words(config.vocab_size)];
        set_all(&mut allowed, config.vocab_size);
    }
    for &token in short.into_iter().flatten() {
        clear_bit(&mut allowed, token as i32);
    }
    if !allowed.is_empty() && allowed.iter().all(|&word| word == 0) {
        return Err(Error::request(
            "bad_words",
            "every token that may come is banned; leave one",
        ));
    }
    refuse_for_beams(request)?;
    if request.grammar.is_none() && allowed.is_empty() && long.is_empty() && thinking.is_none() {
        return Ok(None);
    }
    Ok(Some(RuleSpec {
        vocab_size: config.vocab_size,
        grammar: request.grammar.clone(),
        too_early: too_early(request, &grammar_after),
        grammar_after,
        allowed,
        bad_words: long
            .into_iter()
            .map(|word| word.iter().map(|&token| token as i32).collect())
            .collect(),
        thinking,
    }))
}

/// Where a grammar waits for the end of the thinking, an answer is wanted: what would end the text before it is banned,
/// but for tokens that end the thinking too.
fn too_early(request: &SubmitRequest, grammar_after: &[i32]) -> Vec<i32> {
    if request.grammar.is_none() || grammar_after.is_empty() {
        return Vec::new();
    }
    let eos_token_ids: &[i64] = if request.ignore_eos {
        &[]
    } else {
        &request.eos_token_ids
    };
    let ends = eos_token_ids.iter().chain(&request.stop_token_ids);
    ends.map(|&token| token as i32)
        .filter(|token| !grammar_after.contains(token))
        .collect()
}

/// The tokens of beams are chosen from the model's own log-probabilities, which no mask binds.
fn refuse_for_beams(request: &SubmitRequest) -> Result<(), Error> {
    if request.beam_search.is_none() {
        return Ok(());
    }
    for (field, is_asked) in [
        ("grammar", request.grammar.is_some()),
        ("allowed_token_ids", request.allowed_token_ids.is_some()),
        ("bad_words", !request.bad_words.is_empty()),
        ("thinking_budget", request.thinking_budget.is_some()),
    ] {
        if is_asked {
            return Err(Error::request(
                field,
                "goes not with beam search, whose tokens nothing binds; leave one of the two out",
            ));
        }
    }
    Ok(())
}

fn build_thinking(
    config: &CoreConfig,
    request: &SubmitRequest,
) -> Result<Option<ThinkingLimit>, Error> {
    let end = check_marker("thinking_end", &request.thinking_end, config)?;
    let Some(budget) = request.thinking_budget else {
        return Ok(None);
    };
    let problem = if end.is_empty() {
        "needs thinking_end, the tokens that end the thinking"
    } else if request.grammar.is_some() && request.grammar_after.is_empty() {
        "a grammar that holds from the first token leaves no thinking; set grammar_after"
    } else {
        let budget = u32::try_from(budget).unwrap_or(u32::MAX);
        return Ok(Some(ThinkingLimit { end, budget }));
    };
    Err(Error::request("thinking_budget", problem))
}

fn check_bad_words(config: &CoreConfig, request: &SubmitRequest) -> Result<(), Error> {
    let field = "bad_words";
    check_len(field, request.bad_words.len(), MAX_BAD_WORDS)?;
    for word in &request.bad_words {
        if word.is_empty() {
            return Err(Error::request(field, "one of them is empty"));
        }
        if word.len() > MAX_BAD_WORD_TOKENS {
            let len = word.len();
            return Err(Error::request(
                field,
                format!("one of them has {len} tokens; at most {MAX_BAD_WORD_TOKENS} are possible"),
            ));
        }
        for &token in word {
            check_id(field, token, config)?;
        }
    }
    Ok(())
}

/// A bit for each token of `allowed_token_ids`; empty without.
fn allowed_bits(config: &CoreConfig, request: &SubmitRequest) -> Result<Vec<u32>, Error> {
    let field = "allowed_token_ids";
    let Some(ids) = &request.allowed_token_ids else {
        return Ok(Vec::new());
    };
    if ids.is_empty() {
        return Err(Error::request(field, "is empty; allow at least one token"));
    }
    check_len(field, ids.len(), config.vocab_size as usize)?;
    let mut allowed = vec![0; mask_words(config.vocab_size)];
    for &token in ids {
        check_id(field, token, config)?;
        set_bit(&mut allowed, token as i32);
    }
    Ok(allowed)
}

/// Token ids of a marker.
pub(crate) fn check_marker(
    field: &'static str,
    ids: &[i64],
    config: &CoreConfig,
) -> Result<Vec<i32>, Error> {
    check_len(field, ids.len(), MAX_MARKER_TOKENS)?;
    for &token in ids {
        check_id(field, token, config)?;
    }
    Ok(ids.iter().map(|&token| token as i32).collect())
}
