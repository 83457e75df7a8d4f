//! The block pool: O(1) allocation, release and sharing, and the map of findable content.
//!
//! A block is *free* (unreferenced, no findable content), *cached* (unreferenced, findable) or *used* (referenced).
//! Free ones are handed out first, then cached ones, least recently used first.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use super::block::{Block, List};
use super::hash::BlockKey;
use super::index::KeyIndex;
use crate::config::CoreConfig;
use crate::error::Error;

/// One block table's hold on a block. It cannot be copied: it comes from the pool and goes back to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlockRef {
    id: u32,
    generation: u32,
}

impl BlockRef {
    #[inline]
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

/// From so many holders on a block counts as widely shared: reading it once for all of them pays.
pub(crate) const MANY_HOLDERS: u32 = 8;

/// All KV blocks.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Content of block i, valid while it is findable: `[i * block_size, (i + 1) * block_size)`.
    tokens: Vec<i32>,
    block_size: usize,
    free: List,
    cached: List,
    by_key: KeyIndex,
    caching: bool,
    num_widely_shared: u32,
}

impl BlockPool {
    pub(crate) fn new(config: &CoreConfig) -> Self {
        let num_blocks = config.num_blocks as usize;
        let block_size = config.block_size as usize;
        let caching = config.enable_prefix_caching;
        let mut pool = Self {
            blocks: vec![Block::EMPTY; num_blocks],
            tokens: vec![0; if caching { num_blocks * block_size } else { 0 }],
            block_size,
            free: List::EMPTY,
            cached: List::EMPTY,
            by_key: KeyIndex::new(if caching { num_blocks } else { 0 }),
            caching,
            num_widely_shared: 0,
        };
        for id in 0..config.num_blocks {
            pool.free.push_back(&mut pool.blocks, id);
        }
        pool
    }

    pub(crate) fn num_total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.free.len()
    }

    pub(crate) fn num_cached(&self) -> u32 {
        self.cached.len()
    }

    pub(crate) fn num_used(&self) -> u32 {
        self.num_total() - self.num_available()
    }

    /// Blocks with at least [`MANY_HOLDERS`] holders.
    pub(crate) fn num_widely_shared(&self) -> u32 {
        self.num_widely_shared
    }

    /// Blocks that [`allocate`](Self::allocate) can still hand out.
    #[inline]
    pub(crate) fn num_available(&self) -> u32 {
        self.free.len() + self.cached.len()
    }

    /// A block for new content; forgets the least recently used cached content if no block is free.
    pub(crate) fn allocate(&mut self) -> Option<BlockRef> {
        let id = if let Some(id) = self.free.head() {
            self.free.remove(&mut self.blocks, id);
            id
        } else {
            let id = self.cached.head()?;
            self.cached.remove(&mut self.blocks, id);
            self.forget(id);
            id
        };
        let block = &mut self.blocks[id as usize];
        block.ref_count = 1;
        block.generation = block.generation.wrapping_add(1);
        Some(self.hold(id))
    }

    /// A second table's hold on a block that is held already.
    pub(crate) fn share(&mut self, block: &BlockRef) -> BlockRef {
        self.add_holder(block.id)
    }

    /// Gives a hold back. Cached content becomes the most recently used.
    #[expect(clippy::needless_pass_by_value, reason = "the hold ends here")]
    pub(crate) fn release(&mut self, held: BlockRef) {
        let id = held.id;
        let block = &mut self.blocks[id as usize];
        debug_assert_eq!(block.generation, held.generation);
        if block.ref_count == MANY_HOLDERS {
            self.num_widely_shared -= 1;
        }
        block.ref_count -= 1;
        if block.ref_count == 0 {
            let list = if block.findable {
                &mut self.cached
            } else {
                &mut self.free
            };
            list.push_back(&mut self.blocks, id);
        }
    }

    /// The block with this content, not yet held.
    #[inline]
    pub(crate) fn find(&self, key: BlockKey, parent: BlockKey, tokens: &[i32]) -> Option<u32> {
        let id = self.by_key.find(&self.blocks, key)?;
        let matches = self.blocks[id as usize].parent == parent && self.content(id) == tokens;
        matches.then_some(id)
    }

    /// Whether a block with this key can be found.
    pub(crate) fn is_findable(&self, key: BlockKey) -> bool {
        self.by_key.find(&self.blocks, key).is_some()
    }

    /// Takes hold of a block that [`find`](Self::find) returned.
    pub(crate) fn acquire(&mut self, id: u32) -> BlockRef {
        if self.blocks[id as usize].ref_count == 0 {
            self.cached.remove(&mut self.blocks, id);
        }
        self.add_holder(id)
    }

    /// Makes a full block findable. If another block with this content is findable already, that one stays.
    ///
    /// `launch_step`: the step on whose way the content is, 0 when it is computed.
    pub(crate) fn register(
        &mut self,
        held: &BlockRef,
        key: BlockKey,
        parent: BlockKey,
        tokens: &[i32],
        launch_step: u64,
    ) {
        if !self.caching || self.blocks[held.id as usize].findable {
            return;
        }
        debug_assert_eq!(self.blocks[held.id as usize].generation, held.generation);
        if self.is_findable(key) {
            return;
        }
        let start = held.id as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        let block = &mut self.blocks[held.id as usize];
        block.findable = true;
        block.key = key;
        block.parent = parent;
        block.launch_step = launch_step;
        self.by_key.insert(&mut self.blocks, held.id);
    }

    /// 0 free, 1 cached, 2 used, 3 used by several.
    pub(super) fn kind(&self, id: u32) -> usize {
        let block = &self.blocks[id as usize];
        match block.ref_count {
            0 => usize::from(block.findable),
            1 => 2,
            _ => 3,
        }
    }

    #[inline]
    pub(crate) fn is_held(&self, id: u32) -> bool {
        self.blocks[id as usize].ref_count > 0
    }

    #[inline]
    pub(crate) fn is_shared(&self, held: &BlockRef) -> bool {
        self.blocks[held.id as usize].ref_count > 1
    }

    /// Whether the block became findable on the word of this step or a later one.
    pub(crate) fn was_launched_since(&self, held: &BlockRef, step: u64) -> bool {
        self.blocks[held.id as usize].launch_step >= step
    }

    /// Forgets all content that was to be computed by this step or a later one.
    pub(crate) fn forget_launched_since(&mut self, step: u64) {
        for id in 0..self.num_total() {
            let Block {
                findable,
                launch_step,
                ref_count,
                ..
            } = self.blocks[id as usize];
            if !findable || launch_step < step {
                continue;
            }
            self.forget(id);
            if ref_count == 0 {
                self.cached.remove(&mut self.blocks, id);
                self.free.push_back(&mut self.blocks, id);
            }
        }
    }

    /// Forgets all content. False, and nothing done, while a block is held.
    pub(crate) fn reset(&mut self) -> bool {
        if self.num_used() > 0 {
            return false;
        }
        while let Some(id) = self.cached.head() {
            self.cached.remove(&mut self.blocks, id);
            self.forget(id);
            self.free.push_back(&mut self.blocks, id);
        }
        true
    }

    fn add_holder(&mut self, id: u32) -> BlockRef {
        let block = &mut self.blocks[id as usize];
        block.ref_count += 1;
        if block.ref_count == MANY_HOLDERS {
            self.num_widely_shared += 1;
        }
        self.hold(id)
    }

    fn hold(&self, id: u32) -> BlockRef {
        BlockRef {
            id,
            generation: self.blocks[id as usize].generation,
        }
    }

    fn content(&self, id: u32) -> &[i32] {
        &self.tokens[id as usize * self.block_size..][..self.block_size]
    }

    fn forget(&mut self, id: u32) {
        self.by_key.remove(&mut self.blocks, id);
        let block = &mut self.blocks[id as usize];
        block.findable = false;
        block.launch_step = 0;
    }

    /// Content of a findable block, for the audit.
    pub(crate) fn findable_content(&self, held: &BlockRef) -> Option<&[i32]> {
        self.blocks[held.id as usize]
            .findable
            .then(|| self.content(held.id))
    }

    /// Checks the pool's laws against the number of tables that hold each block.
    pub(crate) fn audit(&self, holders: &[u32], hasher: &super::PrefixHasher) -> Result<(), Error> {
        let fault = |message: String| Err(Error::Audit(message));
        if !self.free.is_sound(&self.blocks) || !self.cached.is_sound(&self.blocks) {
            return fault("a list of unreferenced blocks is broken".into());
        }
        let mut listed = vec![0u8; self.blocks.len()];
        for (list, findable) in [(&self.free, false), (&self.cached, true)] {
            for id in list.iter(&self.blocks) {
                listed[id as usize] += 1;
                if self.blocks[id as usize].findable != findable {
                    return fault(format!("block {id} is in the wrong list"));
                }
            }
        }
        let mut num_findable = 0;
        for (id, block) in self.blocks.iter().enumerate() {
            if block.ref_count != holders[id] {
                return fault(format!(
                    "block {id} counts {} references but {} tables hold it",
                    block.ref_count, holders[id]
                ));
            }
            if u32::from(listed[id]) != u32::from(block.ref_count == 0) {
                return fault(format!("block {id} is in {} lists", listed[id]));
            }
            if !block.findable {
                if block.launch_step != 0 {
                    return fault(format!("block {id} is launched but not findable"));
                }
                continue;
            }
            num_findable += 1;
            if self.by_key.find(&self.blocks, block.key) != Some(id as u32) {
                return fault(format!("the key of block {id} leads elsewhere"));
            }
            if hasher.block(block.parent, self.content(id as u32)) != block.key {
                return fault(format!("the tokens of block {id} do not give its key"));
            }
        }
        if num_findable != self.by_key.len() {
            return fault("the key map has entries without a block".into());
        }
        let widely_shared = self
            .blocks
            .iter()
            .filter(|block| block.ref_count >= MANY_HOLDERS)
            .count();
        if widely_shared != self.num_widely_shared as usize {
            return fault(format!(
                "{widely_shared} blocks are widely shared, {} were counted",
                self.num_widely_shared
            ));
        }
        let used = self
            .blocks
            .iter()
            .filter(|block| block.ref_count > 0)
            .count() as u32;
        if used + self.num_free() + self.num_cached() != self.num_total() || used != self.num_used()
        {
            return fault("free + cached + used blocks differ from the total".into());
        }
        Ok(())
    }

    /// Whether the hold is on the block's present content.
    pub(crate) fn is_current(&self, held: &BlockRef) -> bool {
        self.blocks[held.id as usize].generation == held.generation
    }
}

/// Sixteen random bytes: the standard library draws its hasher keys from the operating system.
pub(crate) fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    for half in key.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().build_hasher().finish().to_le_bytes());
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::PrefixHasher;

    const ROOT: BlockKey = 1;

    /// Four blocks of two tokens.
    fn pool() -> BlockPool {
        let mut config = CoreConfig::new(4, 100);
        config.block_size = 2;
        BlockPool::new(&config)
    }

    fn hasher() -> PrefixHasher {
        PrefixHasher::new(&[0; 16])
    }

    /// Allocates a block with this content and makes it findable.
    fn put(pool: &mut BlockPool, tokens: &[i32]) -> BlockRef {
        let block = pool.allocate().unwrap();
        pool.register(&block, hasher().block(ROOT, tokens), ROOT, tokens, 0);
        block
    }

    fn find(pool: &BlockPool, tokens: &[i32]) -> Option<u32> {
        pool.find(hasher().block(ROOT, tokens), ROOT, tokens)
    }

    fn counts(pool: &BlockPool) -> (u32, u32, u32) {
        (pool.num_free(), pool.num_cached(), pool.num_used())
    }

    #[test]
    fn a_block_is_free_used_or_cached() {
        let mut pool = pool();
        assert_eq!(counts(&pool), (4, 0, 0));
        let plain = pool.allocate().unwrap();
        let findable = put(&mut pool, &[1, 2]);
        assert_eq!(counts(&pool), (2, 0, 2));
        pool.release(plain);
        pool.release(findable);
        assert_eq!(counts(&pool), (3, 1, 0));
        pool.audit(&[0; 4], &hasher()).unwrap();
    }

    #[test]
    fn a_shared_block_stays_until_its_last_holder_leaves() {
        let mut pool = pool();
        let first = put(&mut pool, &[1, 2]);
        let second = pool.share(&first);
        let id = find(&pool, &[1, 2]).unwrap();
        let third = pool.acquire(id);
        assert!(pool.is_shared(&third));
        pool.release(first);
        pool.release(second);
        assert!(!pool.is_shared(&third));
        assert_eq!(counts(&pool), (3, 0, 1));
        pool.release(third);
        assert_eq!(counts(&pool), (3, 1, 0));
    }

    #[test]
    fn free_blocks_go_first_then_the_least_recently_used_content() {
        let mut pool = pool();
        let contents = [[1, 1], [2, 2], [3, 3]];
        let blocks = contents.map(|tokens| put(&mut pool, &tokens));
        for block in blocks {
            pool.release(block);
        }
        // Used again: now [2, 2] is the oldest.
        let again = pool.acquire(find(&pool, &[1, 1]).unwrap());
        pool.release(again);
        let found = |pool: &BlockPool| contents.map(|tokens| find(pool, &tokens).is_some());
        let _free = pool.allocate().unwrap();
        assert_eq!(found(&pool), [true, true, true]);
        let _second = pool.allocate().unwrap();
        assert_eq!(found(&pool), [true, false, true]);
        let _third = pool.allocate().unwrap();
        assert_eq!(found(&pool), [true, false, false]);
        let _first = pool.allocate().unwrap();
        assert_eq!(found(&pool), [false, false, false]);
        assert!(pool.allocate().is_none());
    }

    #[test]
    fn equal_content_is_kept_once() {
        let mut pool = pool();
        let first = put(&mut pool, &[1, 2]);
        let twin = put(&mut pool, &[1, 2]);
        assert_eq!(find(&pool, &[1, 2]), Some(first.id()));
        pool.release(twin);
        pool.release(first);
        assert_eq!(counts(&pool), (3, 1, 0));
    }

    #[test]
    fn a_key_alone_finds_nothing() {
        let mut pool = pool();
        let _block = put(&mut pool, &[1, 2]);
        let key = hasher().block(ROOT, &[1, 2]);
        assert!(pool.find(key, ROOT, &[1, 2]).is_some());
        assert!(pool.find(key, ROOT, &[1, 3]).is_none());
        assert!(pool.find(key, ROOT + 1, &[1, 2]).is_none());
    }

    #[test]
    fn launched_content_can_be_forgotten_computed_content_stays() {
        let mut pool = pool();
        let computed = put(&mut pool, &[1, 1]);
        let launched = pool.allocate().unwrap();
        pool.register(&launched, hasher().block(ROOT, &[2, 2]), ROOT, &[2, 2], 7);
        assert!(pool.was_launched_since(&launched, 7) && !pool.was_launched_since(&launched, 8));
        assert!(!pool.was_launched_since(&computed, 1));
        pool.release(launched);
        pool.forget_launched_since(8);
        assert!(find(&pool, &[2, 2]).is_some());
        pool.forget_launched_since(7);
        assert!(find(&pool, &[2, 2]).is_none() && find(&pool, &[1, 1]).is_some());
        assert_eq!(counts(&pool), (3, 0, 1));
        assert!(!pool.reset(), "a block is held");
        pool.release(computed);
        assert!(pool.reset());
        assert_eq!(counts(&pool), (4, 0, 0));
        pool.audit(&[0; 4], &hasher()).unwrap();
    }

    #[test]
    fn a_hold_from_before_an_eviction_is_recognised() {
        let mut pool = pool();
        let block = put(&mut pool, &[1, 2]);
        let stale = BlockRef {
            id: block.id,
            generation: block.generation,
        };
        pool.release(block);
        let _all: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        assert!(!pool.is_current(&stale));
    }

    #[test]
    fn random_keys_differ() {
        assert_ne!(random_key(), random_key());
        assert_ne!(random_key()[..8], random_key()[8..]);
    }
}
