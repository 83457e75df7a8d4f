//! What the tests of the core share: a slab, a simulated device and a random source.
#![allow(dead_code)] // every test crate uses its part

pub mod device;
pub mod driver;
pub mod reference;
pub mod rng;
pub mod slab;
