//! The one place where a request is checked. What passes is valid by construction.

use std::sync::Arc;
use std::time::Instant;

use crate::batch::LIST_CAPACITY;
use crate::config::{
    CoreConfig, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_CACHE_SALT_BYTES, MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_VALUE, MAX_LOGPROBS, MAX_MARKER_TOKENS, MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS, MIN_TEMPERATURE, Policy,
};
use crate::error::Error;
use crate::grammar::{RuleSpec, ThinkingLimit, clear_bit, mask_words, set_all, set_bit};
use crate::kv::PrefixHasher;
use crate::request::SubmitRequest;
use crate::sched::{RequestSpec, Sampling, Stopping};
use crate::text::StopSet;

/// Checks everything before anything is allocated, then builds what the scheduler needs. The handle is set later.
pub(crate) fn validate(
    config: &CoreConfig,
    has_vocabulary: bool,
    hasher: &PrefixHasher,
    request: SubmitRequest,
) -> Result<RequestSpec, Error> {
    check_prompt(config, &request.prompt)?;
    let num_sequences = check_n(config, request.n)?;
    let (max_tokens, min_tokens) = check_lengths(config, &request)?;
    check_lists(config, &request)?;
    check_stop_strings(&request, has_vocabulary)?;
    let numbers = check_numbers(config, &request)?;
    if request.cache_salt.len() > MAX_CACHE_SALT_BYTES {
        let len = request.cache_salt.len();
        return Err(Error::request(
            "cache_salt",
            format!("{len} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed"),
        ));
    }
    if request.adapter < -1 {
        return Err(Error::request(
            "adapter",
            format!("{} is neither a slot nor -1 (none)", request.adapter),
        ));
    }
    let rules = build_rules(config, &request)?;
    let stopping = build_stopping(&request, max_tokens, min_tokens)?;
    let sampling = Sampling {
        bias: request
            .logit_bias
            .iter()
            .map(|&(token, value)| (token as i32, value as f32))
            .collect(),
        banned: banned_tokens(&stopping),
        ..numbers
    };
    check_list_room(num_sequences, &sampling)?;
    let root_key = hasher.root(request.adapter, &request.cache_salt);
    let prompt_keys = if config.enable_prefix_caching {
        hasher.blocks(root_key, &request.prompt, config.block_size as usize)
    } else {
        Vec::new()
    };
    Ok(RequestSpec {
        handle: 0,
        num_sequences,
        priority: if config.policy == Policy::Priority {
            request.priority
        } else {
            0
        },
        submitted_at: Instant::now(),
        prompt: request.prompt,
        root_key,
        prompt_keys,
        final_only: request.final_only,
        has_seed: request.seed.is_some(),
        sampling,
        stopping,
        rules: rules.map(Arc::new),
    })
}

/// What binds the tokens; `None` where nothing does.
fn build_rules(config: &CoreConfig, request: &SubmitRequest) -> Result<Option<RuleSpec>, Error> {
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
    if request.grammar.is_none() && allowed.is_empty() && long.is_empty() && thinking.is_none() {
        return Ok(None);
    }
    Ok(Some(RuleSpec {
        vocab_size: config.vocab_size,
        grammar: request.grammar.clone(),
        grammar_after,
        allowed,
        bad_words: long
            .into_iter()
            .map(|word| word.iter().map(|&token| token as i32).collect())
            .collect(),
        thinking,
    }))
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

fn check_prompt(config: &CoreConfig, prompt: &[i32]) -> Result<(), Error> {
    let field = "prompt_token_ids";
    if prompt.is_empty() {
        return Err(Error::request(
            field,
            "the prompt is empty; give at least one token",
        ));
    }
    let (len, max_model_len) = (prompt.len(), config.max_model_len as usize);
    if len + 1 > max_model_len {
        return Err(Error::request(
            field,
            format!(
                "{len} prompt tokens and one output token exceed the context of {max_model_len} tokens"
            ),
        ));
    }
    let num_needed = config.blocks_for(len as u32);
    if num_needed > config.num_blocks {
        return Err(too_large_for_pool(field, num_needed, config));
    }
    match prompt
        .iter()
        .find(|&&token| token < 0 || token as u32 >= config.vocab_size)
    {
        Some(&token) => Err(bad_id(field, i64::from(token), config)),
        None => Ok(()),
    }
}

fn check_n(config: &CoreConfig, n: u64) -> Result<u32, Error> {
    if n == 0 || n > u64::from(config.max_num_seqs) {
        let max = config.max_num_seqs;
        return Err(Error::request(
            "n",
            format!("{n} is out of range; 1 to {max} (max_num_seqs) are possible"),
        ));
    }
    Ok(n as u32)
}

/// `max_tokens` within the context, and within the pool if none was given; and `min_tokens`.
fn check_lengths(config: &CoreConfig, request: &SubmitRequest) -> Result<(u32, u32), Error> {
    let prompt_len = request.prompt.len() as u64;
    let in_context = u64::from(config.max_model_len) - prompt_len;
    // The last token's KV is never needed.
    let in_pool = u64::from(config.num_blocks) * u64::from(config.block_size) + 1 - prompt_len;
    let max_tokens = match request.max_tokens {
        Some(0) => {
            return Err(Error::request(
                "max_tokens",
                "0 leaves nothing to generate; give at least 1",
            ));
        }
        Some(max_tokens) => {
            let max_tokens = max_tokens.min(in_context);
            if max_tokens > in_pool {
                let num_needed = config.blocks_for((prompt_len + max_tokens - 1) as u32);
                return Err(too_large_for_pool("max_tokens", num_needed, config));
            }
            max_tokens
        }
        None => in_context.min(in_pool),
    };
    if request.min_tokens > max_tokens {
        return Err(Error::request(
            "min_tokens",
            format!(
                "{} exceeds the {max_tokens} output tokens that this request can get",
                request.min_tokens
            ),
        ));
    }
    Ok((max_tokens as u32, request.min_tokens as u32))
}

fn check_lists(config: &CoreConfig, request: &SubmitRequest) -> Result<(), Error> {
    check_len("logit_bias", request.logit_bias.len(), MAX_LOGIT_BIAS)?;
    for &(token, value) in &request.logit_bias {
        check_id("logit_bias", token, config)?;
        let max = f64::from(MAX_LOGIT_BIAS_VALUE);
        check_range("logit_bias", value, -max, max)?;
    }
    let mut tokens: Vec<i64> = request.logit_bias.iter().map(|&(token, _)| token).collect();
    tokens.sort_unstable();
    if let Some([token, _]) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::request(
            "logit_bias",
            format!("token id {token} occurs twice"),
        ));
    }
    for (field, ids) in [
        ("stop_token_ids", &request.stop_token_ids),
        ("eos_token_ids", &request.eos_token_ids),
        ("shown_special_ids", &request.shown_special_ids),
    ] {
        check_len(field, ids.len(), MAX_STOP_TOKEN_IDS)?;
        for &token in ids {
            check_id(field, token, config)?;
        }
    }
    Ok(())
}

fn check_stop_strings(request: &SubmitRequest, has_vocabulary: bool) -> Result<(), Error> {
    let field = "stop";
    check_len(field, request.stop.len(), MAX_STOP_STRINGS)?;
    if request.stop.is_empty() {
        return Ok(());
    }
    if !has_vocabulary || !request.detokenize {
        return Err(Error::request(
            field,
            "stop strings need text; set detokenize and serve with a tokenizer",
        ));
    }
    for stop in &request.stop {
        if stop.is_empty() {
            return Err(Error::request(field, "a stop string is empty"));
        }
        if stop.len() > MAX_STOP_STRING_BYTES {
            let len = stop.len();
            return Err(Error::request(
                field,
                format!(
                    "a stop string has {len} bytes; at most {MAX_STOP_STRING_BYTES} are allowed"
                ),
            ));
        }
    }
    Ok(())
}

/// The numeric columns, as 32-bit values.
fn check_numbers(config: &CoreConfig, request: &SubmitRequest) -> Result<Sampling, Error> {
    let temperature = check_range("temperature", request.temperature, 0.0, f64::from(f32::MAX))?;
    let top_p = check_positive("top_p", request.top_p, 1.0)?;
    let repetition_penalty = check_positive(
        "repetition_penalty",
        request.repetition_penalty,
        f64::from(f32::MAX),
    )?;
    let top_k = i32::try_from(request.top_k).map_err(|_| {
        Error::request(
            "top_k",
            format!("{} is out of range; at most {}", request.top_k, i32::MAX),
        )
    })?;
    let num_logprobs = match request.logprobs {
        None => -1,
        Some(logprobs) if logprobs <= u64::from(MAX_LOGPROBS) => {
            logprobs.min(u64::from(config.vocab_size)) as i32
        }
        Some(logprobs) => {
            return Err(Error::request(
                "logprobs",
                format!("{logprobs} is out of range; at most {MAX_LOGPROBS}"),
            ));
        }
    };
    Ok(Sampling {
        temperature: if temperature < MIN_TEMPERATURE {
            0.0
        } else {
            temperature
        },
        top_p,
        min_p: check_range("min_p", request.min_p, 0.0, 1.0)?,
        repetition_penalty,
        presence_penalty: check_range("presence_penalty", request.presence_penalty, -2.0, 2.0)?,
        frequency_penalty: check_range("frequency_penalty", request.frequency_penalty, -2.0, 2.0)?,
        top_k: top_k.min(config.vocab_size as i32),
        num_logprobs,
        adapter: request.adapter,
        seed: request.seed.unwrap_or(0),
        bias: Vec::new(),
        banned: Vec::new(),
    })
}

fn build_stopping(
    request: &SubmitRequest,
    max_tokens: u32,
    min_tokens: u32,
) -> Result<Stopping, Error> {
    let ids = |ids: &[i64]| {
        let mut ids: Vec<i32> = ids.iter().map(|&token| token as i32).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let stop_strings = if request.stop.is_empty() {
        None
    } else {
        let set = StopSet::new(
            request.stop.clone(),
            request.include_stop_str_in_output,
            min_tokens,
        );
        Some(Arc::new(set.map_err(|error| {
            Error::request("stop", error.to_string())
        })?))
    };
    Ok(Stopping {
        max_tokens,
        min_tokens,
        num_unstoppable: min_tokens,
        eos_token_ids: if request.ignore_eos {
            Vec::new()
        } else {
            ids(&request.eos_token_ids)
        },
        stop_token_ids: ids(&request.stop_token_ids),
        stop_strings,
        include_stop_in_output: request.include_stop_str_in_output,
        skip_special_tokens: request.skip_special_tokens,
        shown_special_ids: shown_special_ids(request),
        detokenize: request.detokenize,
    })
}

/// The markers a reader of the text must see; nothing where every token is shown anyway.
fn shown_special_ids(request: &SubmitRequest) -> Option<Arc<Vec<u32>>> {
    if request.shown_special_ids.is_empty() || !request.skip_special_tokens {
        return None;
    }
    let mut ids: Vec<u32> = request
        .shown_special_ids
        .iter()
        .map(|&token| token as u32)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    Some(Arc::new(ids))
}

/// What may not be sampled before `min_tokens`.
fn banned_tokens(stopping: &Stopping) -> Vec<i32> {
    if stopping.min_tokens == 0 {
        return Vec::new();
    }
    let mut banned = [stopping.eos_token_ids.as_slice(), &stopping.stop_token_ids].concat();
    banned.sort_unstable();
    banned.dedup();
    banned
}

/// The n sequences start in one step, so their lists must fit into one slab.
fn check_list_room(num_sequences: u32, sampling: &Sampling) -> Result<(), Error> {
    for (field, len) in [
        ("logit_bias", sampling.bias.len()),
        ("stop_token_ids", sampling.banned.len()),
    ] {
        let total = len * num_sequences as usize;
        if total > LIST_CAPACITY {
            return Err(Error::request(
                field,
                format!(
                    "{len} entries for each of n = {num_sequences} sequences exceed {LIST_CAPACITY} in all"
                ),
            ));
        }
    }
    Ok(())
}

fn check_len(field: &'static str, len: usize, max: usize) -> Result<(), Error> {
    if len > max {
        return Err(Error::request(
            field,
            format!("{len} entries; at most {max} are allowed"),
        ));
    }
    Ok(())
}

fn check_id(field: &'static str, token: i64, config: &CoreConfig) -> Result<(), Error> {
    if token < 0 || token >= i64::from(config.vocab_size) {
        return Err(bad_id(field, token, config));
    }
    Ok(())
}

/// NaN and infinities are in no range.
fn check_range(field: &'static str, value: f64, min: f64, max: f64) -> Result<f32, Error> {
    if !(min..=max).contains(&value) {
        return Err(Error::request(
            field,
            format!("{value:?} is out of range; {min:?} to {max:?} are possible"),
        ));
    }
    Ok(value as f32)
}

/// Above 0. What 32 bits would round down to 0 becomes the least they hold.
fn check_positive(field: &'static str, value: f64, max: f64) -> Result<f32, Error> {
    if value == 0.0 {
        return Err(Error::request(field, "0 is not above 0"));
    }
    Ok(check_range(field, value, 0.0, max)?.max(f32::MIN_POSITIVE))
}

fn bad_id(field: &'static str, token: i64, config: &CoreConfig) -> Error {
    let vocab_size = config.vocab_size;
    Error::request(
        field,
        format!("token id {token} is out of range; the vocabulary has {vocab_size} tokens"),
    )
}

fn too_large_for_pool(field: &'static str, num_needed: u32, config: &CoreConfig) -> Error {
    let num_blocks = config.num_blocks;
    Error::request(
        field,
        format!(
            "the sequence could need {num_needed} KV blocks and there are {num_blocks}; ask for fewer tokens"
        ),
    )
}
