//! The one place where a request is checked. What passes is valid by construction. `rules` is about what binds the
//! tokens, `beams` about beam search.

mod beams;
mod rules;

use std::sync::Arc;
use std::time::Instant;

use crate::batch::LIST_CAPACITY;
use crate::config::{
    CoreConfig, MAX_CACHE_SALT_BYTES, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS_VALUE, MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS, MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MIN_TEMPERATURE,
    Policy,
};
use crate::error::Error;
use crate::kv::PrefixHasher;
use crate::request::SubmitRequest;
use crate::sched::{RequestSpec, Sampling, Stopping};
use crate::text::StopSet;
use beams::beam_numbers;
use rules::build_rules;
pub(crate) use rules::check_marker;

/// Checks everything before anything is allocated, then builds what the scheduler needs. The handle is set later.
pub(crate) fn validate(
    config: &CoreConfig,
    has_vocabulary: bool,
    hasher: &PrefixHasher,
    request: SubmitRequest,
) -> Result<RequestSpec, Error> {
    let num_prompt_logprobs = check_prompt_results(config, &request)?;
    check_prompt(config, &request)?;
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
    let numbers = match request.beam_search {
        Some(search) => beam_numbers(config, &request, &stopping, search, numbers)?,
        None => numbers,
    };
    let sampling = Sampling {
        bias: request
            .logit_bias
            .iter()
            .map(|&(token, value)| (token as i32, value as f32))
            .collect(),
        banned: banned_tokens(&stopping),
        picks: request
            .logprob_token_ids
            .iter()
            .map(|&token| token as i32)
            .collect(),
        ..numbers
    };
    check_list_room(num_sequences, &sampling)?;
    let root_key = hasher.root(request.adapter, request.deterministic, &request.cache_salt);
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
        final_only: request.final_only || request.beam_search.is_some(),
        has_seed: request.seed.is_some(),
        num_prompt_logprobs,
        pooling: request.pooling,
        beam_search: request.beam_search,
        sampling,
        stopping,
        rules: rules.map(Arc::new),
    })
}

/// What is wanted of the prompt itself: the number of top log-probabilities, -1 for none.
fn check_prompt_results(config: &CoreConfig, request: &SubmitRequest) -> Result<i32, Error> {
    let num_top = check_num_logprobs("prompt_logprobs", request.prompt_logprobs, config)?;
    if request.pooling.is_some() {
        if config.hidden_size == 0 {
            return Err(Error::request(
                "pooling",
                "this executor gives no hidden states; another one may",
            ));
        }
        if num_top >= 0 || request.max_tokens != Some(0) {
            return Err(Error::request(
                "pooling",
                "a pooled prompt gets no tokens and no log-probabilities; set max_tokens to 0",
            ));
        }
    }
    if request.max_tokens == Some(0) {
        if num_top < 0 && request.pooling.is_none() {
            return Err(Error::request(
                "max_tokens",
                "0 leaves nothing to generate; give at least 1",
            ));
        }
        if request.n != 1 {
            return Err(Error::request(
                "n",
                format!(
                    "{} sequences without tokens are all alike; give 1",
                    request.n
                ),
            ));
        }
    }
    Ok(num_top)
}

fn check_prompt(config: &CoreConfig, request: &SubmitRequest) -> Result<(), Error> {
    let (field, prompt) = ("prompt_token_ids", &request.prompt);
    if prompt.is_empty() {
        return Err(Error::request(
            field,
            "the prompt is empty; give at least one token",
        ));
    }
    let (len, max_model_len) = (prompt.len(), config.max_model_len as usize);
    let has_output = request.max_tokens != Some(0);
    if len + usize::from(has_output) > max_model_len {
        let output = if has_output {
            " and one output token"
        } else {
            ""
        };
        return Err(Error::request(
            field,
            format!("{len} prompt tokens{output} exceed the context of {max_model_len} tokens"),
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
    let field = "logprob_token_ids";
    check_len(
        field,
        request.logprob_token_ids.len(),
        MAX_LOGPROB_TOKEN_IDS,
    )?;
    for &token in &request.logprob_token_ids {
        check_id(field, token, config)?;
    }
    if !request.logprob_token_ids.is_empty() && request.logprobs.is_none() {
        return Err(Error::request(field, "needs logprobs; ask for 0 or more"));
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
    let num_logprobs = check_num_logprobs("logprobs", request.logprobs, config)?;
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
        picks: Vec::new(),
        fixed_order: request.deterministic,
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

/// Top log-probabilities per token; -1 = none.
fn check_num_logprobs(
    field: &'static str,
    wanted: Option<u64>,
    config: &CoreConfig,
) -> Result<i32, Error> {
    match wanted {
        None => Ok(-1),
        Some(count) if count <= u64::from(MAX_LOGPROBS) => {
            Ok(count.min(u64::from(config.vocab_size)) as i32)
        }
        Some(count) => Err(Error::request(
            field,
            format!("{count} is out of range; at most {MAX_LOGPROBS}"),
        )),
    }
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
