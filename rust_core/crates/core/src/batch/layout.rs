//! Which array of the slab lies where. The table is the contract in docs/architecture.md, in the order of the bytes.

use crate::config::{CoreConfig, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, MAX_SCORES_PER_STEP};
use crate::grammar::mask_words;

/// Every field starts at a multiple of it, and so must the slab itself.
pub const SLAB_ALIGNMENT: usize = 64;
/// Columns of `output_logprob`: the sampled token, then the top ones.
pub const NUM_LOGPROB_COLUMNS: usize = MAX_LOGPROBS as usize + 1;
/// Most entries of the bias list, and of the list of banned ids, that one step can carry.
pub(crate) const LIST_CAPACITY: usize = 16_384;
const HEADER_LEN: usize = 32;
const MASK_HEADER_LEN: usize = 8;

/// Element type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 4-byte signed.
    I32,
    /// 8-byte signed.
    I64,
    /// 4-byte float.
    F32,
}

impl DType {
    /// The name in the layout.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F32 => "f32",
        }
    }

    /// Bytes of one element.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
        }
    }
}

/// One array of the slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Its name in docs/architecture.md.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Bytes from the start of the slab; a multiple of [`SLAB_ALIGNMENT`].
    pub offset: usize,
    /// Elements.
    pub length: usize,
}

/// Where every field lies. Three parts follow each other: input, output, masks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlabLayout {
    /// In the order of their offsets.
    pub fields: Vec<Field>,
    /// Size of the whole slab.
    pub num_bytes: usize,
    /// The input part is `[0, input_bytes)`.
    pub input_bytes: usize,
    /// The output part lies between the input part and here, the masks behind it.
    pub mask_offset: usize,
}

macro_rules! header {
    ($($name:ident),* $(,)?) => {
        /// Index of a value in the `header` field.
        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Header { $($name),* }

        /// Names of the header's values, in order.
        pub const HEADER_NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

header! {
    step_id, num_rows, num_tokens, num_samples, num_admitted, num_block_deltas, num_cow, num_forks, num_freed,
    num_bias, num_banned, num_history, used_bytes, num_single, max_query_len, max_seq_len, max_logprobs, flags,
    num_preempted, num_finished, num_widely_shared, num_masked, masks_wait, num_scores, max_score_logprobs, num_pools,
    num_picked, num_picks,
}

/// Length of a field in terms of the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) enum Length {
    Header,
    /// R.
    Rows,
    /// R + 1: prefix sums over rows.
    RowSums,
    /// T.
    Tokens,
    /// D.
    Deltas,
    /// B and S.
    List,
    /// H.
    History,
    /// R × columns.
    Logprobs,
    /// Of the part of the masks.
    MaskHeader,
    /// R × W.
    Masks,
    /// Scored prompt tokens.
    Scores,
    /// The same × columns.
    ScoreLogprobs,
    /// R × hidden size.
    Pooled,
    /// R × the most tokens that one sample may name.
    Picks,
}

impl SlabLayout {
    /// The layout for these sizes. `specs`: (name, type, length) of the input fields, then of the output fields.
    pub(crate) fn new(config: &CoreConfig) -> Self {
        let mut layout = Self {
            fields: Vec::new(),
            num_bytes: 0,
            input_bytes: 0,
            mask_offset: 0,
        };
        layout.append(super::view::INPUT_FIELDS, config);
        layout.input_bytes = layout.num_bytes;
        layout.append(super::view::OUTPUT_FIELDS, config);
        layout.mask_offset = layout.num_bytes;
        layout.append(super::view::MASK_FIELDS, config);
        layout
    }

    fn append(&mut self, specs: &[(&'static str, DType, Length)], config: &CoreConfig) {
        for &(name, dtype, length) in specs {
            let field = Field {
                name,
                dtype,
                offset: self.num_bytes,
                length: num_elements(length, config),
            };
            let end = field.offset + field.length * dtype.num_bytes();
            self.num_bytes = end.next_multiple_of(SLAB_ALIGNMENT);
            self.fields.push(field);
        }
    }
}

fn num_elements(length: Length, config: &CoreConfig) -> usize {
    let rows = config.max_num_seqs as usize;
    let max_model_len = config.max_model_len as usize;
    match length {
        Length::Header => HEADER_LEN,
        Length::Rows => rows,
        Length::RowSums => rows + 1,
        Length::Tokens => config.max_num_batched_tokens as usize,
        // Every running row may grow by one block and replace one (copy on write); what is left admits several
        // sequences of full length, or many short ones.
        Length::Deltas => 2 * rows + rows.min(8) * config.blocks_for(config.max_model_len) as usize,
        Length::List => LIST_CAPACITY,
        Length::History => (rows * max_model_len).min(65_536.max(4 * max_model_len)),
        Length::Logprobs => rows * NUM_LOGPROB_COLUMNS,
        Length::MaskHeader => MASK_HEADER_LEN,
        Length::Masks => rows * mask_words(config.vocab_size),
        Length::Scores => score_capacity(config),
        Length::ScoreLogprobs => score_capacity(config) * NUM_LOGPROB_COLUMNS,
        Length::Pooled => rows * config.hidden_size as usize,
        Length::Picks => rows * MAX_LOGPROB_TOKEN_IDS,
    }
}

/// Scored prompt tokens of one step.
pub(crate) fn score_capacity(config: &CoreConfig) -> usize {
    config.max_num_batched_tokens.min(MAX_SCORES_PER_STEP) as usize
}
