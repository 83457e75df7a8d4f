//! The KV blocks: who holds them, what they contain, which of them a new request can share.

mod block;
mod hash;
mod index;
mod map;
mod pool;

pub(crate) use hash::{BlockKey, BuildKeyBits, PrefixHasher};
pub(crate) use pool::{BlockPool, BlockRef, random_key};
