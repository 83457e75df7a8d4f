//! The slab: one step as a struct of arrays in a buffer that the executor owns.

pub(crate) mod flags;
mod layout;
mod view;
mod write;

pub use layout::{DType, Field, HEADER_NAMES, NUM_LOGPROB_COLUMNS, SLAB_ALIGNMENT, SlabLayout};
pub(crate) use layout::{LIST_CAPACITY, score_capacity};
pub(crate) use view::{MaskView, OutputView};
pub(crate) use write::{Admitted, StepCounts, StepWriter, sample_flags};
