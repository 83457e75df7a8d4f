//! Beam search, checked.

use super::check_range;
use crate::config::{BLOCKS_PER_MARGIN_BLOCK, CoreConfig, MAX_LENGTH_PENALTY, MAX_LOGPROBS};
use crate::error::Error;
use crate::request::{BeamSearch, SubmitRequest};
use crate::sched::{Sampling, Stopping};

/// Columns of the sampler for beams, whose tokens are chosen from the likeliest of each.
pub(super) fn beam_numbers(
    config: &CoreConfig,
    request: &SubmitRequest,
    stopping: &Stopping,
    search: BeamSearch,
    numbers: Sampling,
) -> Result<Sampling, Error> {
    let field = "beam_search";
    let is_neutral = !numbers.has_penalties()
        && request.logprobs.is_none()
        && request.logit_bias.is_empty()
        && request.stop.is_empty()
        && request.min_tokens == 0
        && stopping.max_tokens > 0;
    if !is_neutral {
        return Err(Error::request(
            field,
            "goes with no penalties, logprobs, logit_bias, stop strings or min_tokens, and needs max_tokens; leave them out",
        ));
    }
    check_range(
        "length_penalty",
        search.length_penalty,
        -MAX_LENGTH_PENALTY,
        MAX_LENGTH_PENALTY,
    )?;
    // The best continuations that end no text are among these of each beam.
    let num_candidates =
        request.n + (stopping.eos_token_ids.len() + stopping.stop_token_ids.len()) as u64;
    let most = u64::from(MAX_LOGPROBS.min(config.vocab_size));
    if num_candidates > most {
        return Err(Error::request(
            field,
            format!(
                "{} beams with {} end tokens need more than {most} candidates each; ask for fewer beams",
                request.n,
                num_candidates - request.n
            ),
        ));
    }
    check_beam_blocks(config, request, stopping)?;
    Ok(Sampling {
        temperature: 0.0,
        num_logprobs: num_candidates as i32,
        ..numbers
    })
}

/// Beams wait for one another: the pool must hold all of them at once, as different as they can be, with the margin of
/// an admission and the blocks that a step copies.
fn check_beam_blocks(
    config: &CoreConfig,
    request: &SubmitRequest,
    stopping: &Stopping,
) -> Result<(), Error> {
    let num_prompt = request.prompt.len() as u32;
    let num_shared = if config.enable_prefix_caching {
        (num_prompt - 1) / config.block_size
    } else {
        0
    };
    let num_beams = request.n as u32;
    let longest = config.blocks_for(num_prompt + stopping.max_tokens);
    let margin = config
        .num_blocks
        .div_ceil(BLOCKS_PER_MARGIN_BLOCK)
        .max(num_beams);
    let num_needed = u64::from(num_shared)
        + u64::from(num_beams) * u64::from(longest - num_shared + 1)
        + u64::from(margin);
    if num_needed > u64::from(config.num_blocks) {
        return Err(Error::request(
            "beam_search",
            format!(
                "{num_beams} beams could need {num_needed} KV blocks and there are {}; ask for fewer beams or tokens",
                config.num_blocks
            ),
        ));
    }
    Ok(())
}
