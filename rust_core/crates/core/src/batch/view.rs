//! Typed slices over the bytes of a slab.

use bytemuck::Pod;

use super::layout::{DType, Field, Length, SLAB_ALIGNMENT, SlabLayout};
use crate::error::Error;

macro_rules! dtype {
    (i32) => {
        DType::I32
    };
    (i64) => {
        DType::I64
    };
    (f32) => {
        DType::F32
    };
}

type Shared<'a, T> = &'a [T];
type Mutable<'a, T> = &'a mut [T];

fn num_bytes<T>(field: Option<&Field>) -> usize {
    field.map_or(0, |field| field.length * size_of::<T>())
}

/// Takes a field off the front of the bytes that are left.
fn take<'a, T: Pod>(rest: &mut &'a [u8], field: Option<&Field>) -> &'a [T] {
    let num_bytes = num_bytes::<T>(field);
    let (bytes, tail) = rest.split_at(num_bytes.next_multiple_of(SLAB_ALIGNMENT));
    *rest = tail;
    bytemuck::cast_slice(&bytes[..num_bytes])
}

/// As [`take`], writable.
#[expect(clippy::mut_mut, reason = "what is left of the bytes is handed on")]
fn take_mut<'a, T: Pod>(rest: &mut &'a mut [u8], field: Option<&Field>) -> &'a mut [T] {
    let num_bytes = num_bytes::<T>(field);
    let (bytes, tail) =
        std::mem::take(rest).split_at_mut(num_bytes.next_multiple_of(SLAB_ALIGNMENT));
    *rest = tail;
    bytemuck::cast_slice_mut(&mut bytes[..num_bytes])
}

/// Declares a part of the slab once: its table for the layout, and a view with one slice per field.
macro_rules! slab_part {
    (
        $(#[$doc:meta])*
        $view:ident, $table:ident, $slice:ident, $take:ident,
        { $($name:ident: $ty:ident[$length:ident]),* $(,)? }
    ) => {
        pub(super) const $table: &[(&str, DType, Length)] =
            &[$((stringify!($name), dtype!($ty), Length::$length)),*];

        $(#[$doc])*
        #[derive(Debug)]
        #[allow(clippy::struct_field_names)] // the contract's names
        pub(crate) struct $view<'a> { $(pub(crate) $name: $slice<'a, $ty>),* }

        impl<'a> $view<'a> {
            /// Splits bytes whose length and alignment were checked.
            fn split(fields: &[Field], mut bytes: $slice<'a, u8>) -> Self {
                let mut fields = fields.iter();
                Self { $($name: $take(&mut bytes, fields.next())),* }
            }
        }
    };
}

slab_part! {
    /// The input part of a slab. Small fields of fixed length come first, lists last.
    SlabView, INPUT_FIELDS, Mutable, take_mut, {
        header: i64[Header],
        row_slot: i32[Rows],
        row_num_scheduled: i32[Rows],
        row_num_computed: i32[Rows],
        query_start: i32[RowSums],
        sample_slot: i32[Rows],
        sample_token_index: i32[Rows],
        sample_output_index: i32[Rows],
        freed_slot: i32[Rows],
        cow_src: i32[Rows],
        cow_dst: i32[Rows],
        fork_src: i32[Rows],
        fork_dst: i32[Rows],
        fork_num_blocks: i32[Rows],
        token_ids: i32[Tokens],
        admitted_slot: i32[Rows],
        admitted_temperature: f32[Rows],
        admitted_top_p: f32[Rows],
        admitted_min_p: f32[Rows],
        admitted_repetition_penalty: f32[Rows],
        admitted_presence_penalty: f32[Rows],
        admitted_frequency_penalty: f32[Rows],
        admitted_top_k: i32[Rows],
        admitted_num_logprobs: i32[Rows],
        admitted_min_tokens: i32[Rows],
        admitted_num_prompt_tokens: i32[Rows],
        admitted_adapter: i32[Rows],
        admitted_seed: i64[Rows],
        admitted_bias_start: i32[RowSums],
        admitted_banned_start: i32[RowSums],
        admitted_history_start: i32[RowSums],
        delta_slot: i32[Deltas],
        delta_index: i32[Deltas],
        delta_block: i32[Deltas],
        bias_token: i32[List],
        bias_value: f32[List],
        banned_token: i32[List],
        history_token: i32[History],
        score_token_index: i32[Scores],
        score_token: i32[Scores],
        pool_start: i32[Rows],
        pool_end: i32[Rows],
        pick_token_index: i32[Rows],
        pick_start: i32[RowSums],
        pick_token: i32[Picks],
    }
}

slab_part! {
    /// The output part of a slab.
    OutputView, OUTPUT_FIELDS, Shared, take, {
        output_token: i32[Rows],
        output_rank: i32[Rows],
        output_logprob_token: i32[Logprobs],
        output_logprob: f32[Logprobs],
        score_rank: i32[Scores],
        score_logprob_token: i32[ScoreLogprobs],
        score_logprob: f32[ScoreLogprobs],
        pooled: f32[Pooled],
        pick_logprob: f32[Picks],
    }
}

slab_part! {
    /// The masks of a slab.
    MaskView, MASK_FIELDS, Mutable, take_mut, {
        mask_header: i64[MaskHeader],
        sample_mask_row: i32[Rows],
        mask_word: i32[Masks],
    }
}

impl<'a> SlabView<'a> {
    /// The input part of a slab.
    pub(crate) fn new(layout: &SlabLayout, slab: &'a mut [u8]) -> Result<Self, Error> {
        check(layout, slab)?;
        Ok(Self::split(&layout.fields, &mut slab[..layout.input_bytes]))
    }
}

impl<'a> OutputView<'a> {
    /// The output part of a slab.
    pub(crate) fn new(layout: &SlabLayout, slab: &'a [u8]) -> Result<Self, Error> {
        check(layout, slab)?;
        let fields = &layout.fields[INPUT_FIELDS.len()..];
        Ok(Self::split(
            fields,
            &slab[layout.input_bytes..layout.mask_offset],
        ))
    }
}

impl<'a> MaskView<'a> {
    /// The masks of a slab.
    pub(crate) fn new(layout: &SlabLayout, slab: &'a mut [u8]) -> Result<Self, Error> {
        check(layout, slab)?;
        let fields = &layout.fields[INPUT_FIELDS.len() + OUTPUT_FIELDS.len()..];
        Ok(Self::split(fields, &mut slab[layout.mask_offset..]))
    }

    /// Writes the header: of how many masks there are, and what they use of this part, in bytes.
    pub(crate) fn finish(&mut self, layout: &SlabLayout, num_masks: usize, words: usize) {
        let first = layout.fields.last().map_or(0, |masks| masks.offset);
        let used_bytes = first - layout.mask_offset + num_masks * words * size_of::<u32>();
        self.mask_header[0] = used_bytes as i64;
        self.mask_header[1] = num_masks as i64;
    }
}

fn check(layout: &SlabLayout, slab: &[u8]) -> Result<(), Error> {
    if slab.len() != layout.num_bytes {
        return Err(Error::Slab(format!(
            "the slab has {} bytes instead of {}; allocate it with the layout's num_bytes",
            slab.len(),
            layout.num_bytes
        )));
    }
    if !slab.as_ptr().addr().is_multiple_of(SLAB_ALIGNMENT) {
        return Err(Error::Slab(format!(
            "the slab does not start at a multiple of {SLAB_ALIGNMENT} bytes; align its allocation"
        )));
    }
    Ok(())
}
