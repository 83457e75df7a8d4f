//! What the slab says of a request to the sampler.

use oneloop_core::SubmitRequest;

use super::slab::Slab;

/// Bits that a sample of this request sets in the header, but for `min_tokens`.
pub(crate) fn flags_of(request: &SubmitRequest) -> i64 {
    let penalties = (request.repetition_penalty - 1.0).abs() > 0.0;
    i64::from(request.temperature > 0.0)
        | i64::from(penalties) << 1
        | i64::from(!request.logit_bias.is_empty()) << 2
        | i64::from(request.logprobs.is_some()) << 4
}

/// An admitted entry holds what its request asks for.
pub(crate) fn check_columns(slab: &Slab, entry: usize, request: &SubmitRequest) {
    let int = |name: &str| i64::from(slab.ints(name, entry + 1)[entry]);
    let float = |name: &str| slab.array::<f32>(name, entry + 1)[entry];
    assert_eq!(int("admitted_adapter"), i64::from(request.adapter));
    assert_eq!(
        int("admitted_num_prompt_tokens"),
        request.prompt.len() as i64
    );
    assert_eq!(int("admitted_min_tokens"), request.min_tokens as i64);
    assert_eq!(
        int("admitted_num_logprobs"),
        request.logprobs.map_or(-1, |logprobs| logprobs as i64)
    );
    assert_eq!(
        float("admitted_temperature").to_bits(),
        (request.temperature as f32).to_bits()
    );
    assert_eq!(
        float("admitted_top_p").to_bits(),
        (request.top_p as f32).to_bits()
    );
}
