//! What the tests of the core share: a slab, a simulated device and a random source.

pub(crate) mod columns;
pub(crate) mod constraints;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod expected;
pub(crate) mod outputs;
pub(crate) mod prompt_results;
pub(crate) mod reference;
pub(crate) mod rng;
pub(crate) mod slab;
