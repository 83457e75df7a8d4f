//! The slab: one step as a struct of arrays in a buffer that the executor owns.

mod layout;
mod view;

pub(crate) use layout::Header;
pub use layout::{DType, Field, HEADER_NAMES, NUM_LOGPROB_COLUMNS, SLAB_ALIGNMENT, SlabLayout};
pub(crate) use view::{OutputView, SlabView};
