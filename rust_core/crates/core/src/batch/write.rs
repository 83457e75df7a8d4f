//! Fills a slab: every method appends one entry to one of its lists.

use super::flags;
use super::layout::{Header, SlabLayout};
use super::view::{INPUT_FIELDS, SlabView};
use crate::error::Error;
use crate::sched::Sampling;

/// A step being written. The scheduler stays within the capacities; see [`StepWriter::has_room`].
#[derive(Debug)]
pub(crate) struct StepWriter<'a> {
    view: SlabView<'a>,
    num_rows: usize,
    num_single: usize,
    num_tokens: usize,
    num_samples: usize,
    num_admitted: usize,
    num_deltas: usize,
    num_cow: usize,
    num_forks: usize,
    num_freed: usize,
    num_bias: usize,
    num_banned: usize,
    num_history: usize,
    num_scores: usize,
    num_pools: usize,
    num_picked: usize,
    num_picks: usize,
    max_query_len: u32,
    max_seq_len: u32,
    max_logprobs: i32,
    max_score_logprobs: i32,
    flags: u32,
    num_masked: usize,
    masks_wait: bool,
}

/// A slot's start.
#[derive(Debug)]
pub(crate) struct Admitted<'a> {
    pub(crate) slot: u32,
    pub(crate) sampling: &'a Sampling,
    pub(crate) seed: i64,
    pub(crate) min_tokens: u32,
    /// Penalty history; empty where the sampler needs none or a fork will bring it.
    pub(crate) prompt: &'a [i32],
    pub(crate) outputs: &'a [i32],
    pub(crate) num_prompt: u32,
}

/// How much a step holds.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "the header's names")]
pub(crate) struct StepCounts {
    pub(crate) num_rows: u32,
    /// Rows of one token.
    pub(crate) num_single: u32,
    pub(crate) num_tokens: u32,
    pub(crate) num_samples: u32,
    pub(crate) num_admitted: u32,
}

impl<'a> StepWriter<'a> {
    pub(crate) fn new(layout: &SlabLayout, slab: &'a mut [u8]) -> Result<Self, Error> {
        let view = SlabView::new(layout, slab)?;
        view.query_start[0] = 0;
        view.admitted_bias_start[0] = 0;
        view.admitted_banned_start[0] = 0;
        view.admitted_history_start[0] = 0;
        view.pick_start[0] = 0;
        Ok(Self {
            view,
            num_rows: 0,
            num_single: 0,
            num_tokens: 0,
            num_samples: 0,
            num_admitted: 0,
            num_deltas: 0,
            num_cow: 0,
            num_forks: 0,
            num_freed: 0,
            num_bias: 0,
            num_banned: 0,
            num_history: 0,
            num_scores: 0,
            num_pools: 0,
            num_picked: 0,
            num_picks: 0,
            max_query_len: 0,
            max_seq_len: 0,
            max_logprobs: -1,
            max_score_logprobs: -1,
            flags: 0,
            num_masked: 0,
            masks_wait: false,
        })
    }

    /// Whether the lists can take that many more entries.
    pub(crate) fn has_room(
        &self,
        num_deltas: usize,
        num_bias: usize,
        num_banned: usize,
        num_history: usize,
    ) -> bool {
        self.num_deltas + num_deltas <= self.view.delta_slot.len()
            && self.num_bias + num_bias <= self.view.bias_token.len()
            && self.num_banned + num_banned <= self.view.banned_token.len()
            && self.num_history + num_history <= self.view.history_token.len()
    }

    /// `block_table[slot][index] = block`.
    #[inline]
    pub(crate) fn push_delta(&mut self, slot: u32, index: u32, block: u32) {
        let at = self.num_deltas;
        self.view.delta_slot[at] = slot as i32;
        self.view.delta_index[at] = index as i32;
        self.view.delta_block[at] = block as i32;
        self.num_deltas += 1;
    }

    pub(crate) fn push_cow(&mut self, source: u32, destination: u32) {
        self.view.cow_src[self.num_cow] = source as i32;
        self.view.cow_dst[self.num_cow] = destination as i32;
        self.num_cow += 1;
    }

    pub(crate) fn push_fork(&mut self, source: u32, destination: u32, num_blocks: u32) {
        self.view.fork_src[self.num_forks] = source as i32;
        self.view.fork_dst[self.num_forks] = destination as i32;
        self.view.fork_num_blocks[self.num_forks] = num_blocks as i32;
        self.num_forks += 1;
    }

    pub(crate) fn push_freed(&mut self, slot: u32) {
        self.view.freed_slot[self.num_freed] = slot as i32;
        self.num_freed += 1;
    }

    pub(crate) fn push_admitted(&mut self, admitted: &Admitted<'_>) {
        let (view, at) = (&mut self.view, self.num_admitted);
        let sampling = admitted.sampling;
        view.admitted_slot[at] = admitted.slot as i32;
        view.admitted_temperature[at] = sampling.temperature;
        view.admitted_top_p[at] = sampling.top_p;
        view.admitted_min_p[at] = sampling.min_p;
        view.admitted_repetition_penalty[at] = sampling.repetition_penalty;
        view.admitted_presence_penalty[at] = sampling.presence_penalty;
        view.admitted_frequency_penalty[at] = sampling.frequency_penalty;
        view.admitted_top_k[at] = sampling.top_k;
        view.admitted_num_logprobs[at] = sampling.num_logprobs;
        view.admitted_min_tokens[at] = admitted.min_tokens as i32;
        view.admitted_num_prompt_tokens[at] = admitted.num_prompt as i32;
        view.admitted_adapter[at] = sampling.adapter;
        view.admitted_seed[at] = admitted.seed;
        for &(token, value) in &sampling.bias {
            view.bias_token[self.num_bias] = token;
            view.bias_value[self.num_bias] = value;
            self.num_bias += 1;
        }
        append(view.banned_token, &mut self.num_banned, &sampling.banned);
        append(view.history_token, &mut self.num_history, admitted.prompt);
        append(view.history_token, &mut self.num_history, admitted.outputs);
        self.num_admitted += 1;
        let at = self.num_admitted;
        view.admitted_bias_start[at] = self.num_bias as i32;
        view.admitted_banned_start[at] = self.num_banned as i32;
        view.admitted_history_start[at] = self.num_history as i32;
    }

    /// Appends a row and returns the place of its tokens. Rows of one token come before all others.
    #[inline]
    pub(crate) fn push_row(
        &mut self,
        slot: u32,
        num_computed: u32,
        num_scheduled: u32,
    ) -> &mut [i32] {
        let at = self.num_rows;
        self.view.row_slot[at] = slot as i32;
        self.view.row_num_scheduled[at] = num_scheduled as i32;
        self.view.row_num_computed[at] = num_computed as i32;
        let start = self.num_tokens;
        self.num_tokens += num_scheduled as usize;
        self.num_rows += 1;
        self.view.query_start[at + 1] = self.num_tokens as i32;
        if num_scheduled == 1 {
            self.num_single += 1;
        }
        self.max_query_len = self.max_query_len.max(num_scheduled);
        self.max_seq_len = self.max_seq_len.max(num_computed + num_scheduled);
        &mut self.view.token_ids[start..self.num_tokens]
    }

    /// The last row asks the whole step for these bits.
    pub(crate) fn row_flags(&mut self, flags: u32) {
        self.flags |= flags;
    }

    /// The last row's last token gives the logits from which this slot's output token `output_index` is sampled.
    #[inline]
    pub(crate) fn push_sample(
        &mut self,
        slot: u32,
        output_index: u32,
        flags: u32,
        num_logprobs: i32,
    ) {
        let at = self.num_samples;
        self.view.sample_slot[at] = slot as i32;
        self.view.sample_token_index[at] = self.num_tokens as i32 - 1;
        self.view.sample_output_index[at] = output_index as i32;
        self.num_samples += 1;
        self.flags |= flags;
        self.max_logprobs = self.max_logprobs.max(num_logprobs);
    }

    /// The last sample may get a mask. `waits`: once the step before has been committed.
    pub(crate) fn mask_sample(&mut self, waits: bool) {
        self.num_masked += 1;
        self.masks_wait |= waits;
    }

    /// The hidden state of the step's token `index` gives log-probabilities, with so many top ones: of `token`, which
    /// comes after it. Returns the place of the result.
    #[inline]
    pub(crate) fn push_score(&mut self, index: u32, token: i32, num_top: i32) -> u32 {
        let at = self.num_scores;
        self.view.score_token_index[at] = index as i32;
        self.view.score_token[at] = token;
        self.num_scores += 1;
        self.max_score_logprobs = self.max_score_logprobs.max(num_top);
        at as u32
    }

    /// The sum of the hidden states of the step's tokens `[start, end)` is wanted. Returns the place of the result.
    pub(crate) fn push_pool(&mut self, start: u32, end: u32) -> u32 {
        let at = self.num_pools;
        self.view.pool_start[at] = start as i32;
        self.view.pool_end[at] = end as i32;
        self.num_pools += 1;
        at as u32
    }

    /// The logits of the last sample give the log-probabilities of these tokens too. Returns the place of the first.
    pub(crate) fn push_picks(&mut self, tokens: &[i32]) -> u32 {
        let (at, first) = (self.num_picked, self.num_picks);
        self.view.pick_token_index[at] = self.num_tokens as i32 - 1;
        append(self.view.pick_token, &mut self.num_picks, tokens);
        self.num_picked += 1;
        self.view.pick_start[at + 1] = self.num_picks as i32;
        first as u32
    }

    /// Tokens of the rows so far.
    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_tokens as u32
    }

    pub(crate) fn counts(&self) -> StepCounts {
        StepCounts {
            num_rows: self.num_rows as u32,
            num_single: self.num_single as u32,
            num_tokens: self.num_tokens as u32,
            num_samples: self.num_samples as u32,
            num_admitted: self.num_admitted as u32,
        }
    }

    /// Writes the header.
    pub(crate) fn finish(
        self,
        layout: &SlabLayout,
        step_id: u64,
        num_preempted: u32,
        num_finished: u32,
        num_widely_shared: u32,
    ) {
        let used_bytes = self.used_bytes(layout);
        let header = self.view.header;
        let mut set = |name: Header, value: i64| header[name as usize] = value;
        set(Header::step_id, step_id as i64);
        set(Header::num_rows, self.num_rows as i64);
        set(Header::num_tokens, self.num_tokens as i64);
        set(Header::num_samples, self.num_samples as i64);
        set(Header::num_admitted, self.num_admitted as i64);
        set(Header::num_block_deltas, self.num_deltas as i64);
        set(Header::num_cow, self.num_cow as i64);
        set(Header::num_forks, self.num_forks as i64);
        set(Header::num_freed, self.num_freed as i64);
        set(Header::num_bias, self.num_bias as i64);
        set(Header::num_banned, self.num_banned as i64);
        set(Header::num_history, self.num_history as i64);
        set(Header::used_bytes, used_bytes as i64);
        set(Header::num_single, self.num_single as i64);
        set(Header::max_query_len, i64::from(self.max_query_len));
        set(Header::max_seq_len, i64::from(self.max_seq_len));
        set(Header::max_logprobs, i64::from(self.max_logprobs));
        set(Header::flags, i64::from(self.flags));
        set(Header::num_preempted, i64::from(num_preempted));
        set(Header::num_finished, i64::from(num_finished));
        set(Header::num_widely_shared, i64::from(num_widely_shared));
        set(Header::num_masked, self.num_masked as i64);
        set(Header::masks_wait, i64::from(self.masks_wait));
        set(Header::num_scores, self.num_scores as i64);
        set(
            Header::max_score_logprobs,
            i64::from(self.max_score_logprobs),
        );
        set(Header::num_pools, self.num_pools as i64);
        set(Header::num_picked, self.num_picked as i64);
        set(Header::num_picks, self.num_picks as i64);
    }

    /// End of the last entry of the last list that has any: deltas, bias, banned, history, scores, pools and picks lie in
    /// this order, behind fields of fixed length. Whoever is admitted gets blocks, so without deltas the last field in use is the tokens.
    fn used_bytes(&self, layout: &SlabLayout) -> usize {
        let end = |name: &str, count: usize| {
            let field = layout.fields[..INPUT_FIELDS.len()]
                .iter()
                .find(|field| field.name == name);
            field.map_or(0, |field| field.offset + count * field.dtype.num_bytes())
        };
        if self.num_picks > 0 {
            end("pick_token", self.num_picks)
        } else if self.num_pools > 0 {
            end("pool_end", self.num_pools)
        } else if self.num_scores > 0 {
            end("score_token", self.num_scores)
        } else if self.num_history > 0 {
            end("history_token", self.num_history)
        } else if self.num_banned > 0 {
            end("banned_token", self.num_banned)
        } else if self.num_bias > 0 {
            end("bias_value", self.num_bias)
        } else if self.num_deltas > 0 {
            end("delta_block", self.num_deltas)
        } else {
            end("token_ids", self.num_tokens)
        }
    }
}

fn append(list: &mut [i32], len: &mut usize, tokens: &[i32]) {
    list[*len..*len + tokens.len()].copy_from_slice(tokens);
    *len += tokens.len();
}

/// `flags` of a sample of the output token `output_index`.
#[inline]
pub(crate) fn sample_flags(flags: u32, output_index: u32, min_tokens: u32) -> u32 {
    let own = flags & !(flags::RULES | flags::PICKS);
    if output_index < min_tokens {
        own | flags::MIN_TOKENS
    } else {
        own
    }
}
