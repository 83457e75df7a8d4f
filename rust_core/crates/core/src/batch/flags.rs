//! Bits of the header's `flags`: what the sampler must do for at least one sample of the step, or the whole step for at
//! least one row.

use crate::sched::Sampling;

pub(crate) const NOT_GREEDY: u32 = 1;
pub(crate) const PENALTIES: u32 = 1 << 1;
pub(crate) const BIAS: u32 = 1 << 2;
pub(crate) const MIN_TOKENS: u32 = 1 << 3;
pub(crate) const LOGPROBS: u32 = 1 << 4;
/// Sums are taken in the fixed order.
pub(crate) const FIXED_ORDER: u32 = 1 << 5;
/// Of a sequence alone, never of a header: something may bind its tokens.
pub(crate) const RULES: u32 = 1 << 31;
/// The same: its request names tokens whose log-probabilities it wants.
pub(crate) const PICKS: u32 = 1 << 30;

/// The bits of every row and sample with these columns; `MIN_TOKENS` depends on the sample.
pub(crate) fn of(sampling: &Sampling) -> u32 {
    let mut flags = 0;
    if sampling.temperature > 0.0 {
        flags |= NOT_GREEDY;
    }
    if sampling.has_penalties() {
        flags |= PENALTIES;
    }
    if !sampling.bias.is_empty() {
        flags |= BIAS;
    }
    if sampling.num_logprobs >= 0 {
        flags |= LOGPROBS;
    }
    if sampling.fixed_order {
        flags |= FIXED_ORDER;
    }
    flags
}
