//! The pool as a line of letters, for a person to look at.

use super::pool::BlockPool;

/// Blocks that are looked at for one letter at most: so the map takes bounded time.
const MAX_LOOKED_AT: u32 = 64;

/// Letters by what a block is.
const LETTERS: [char; 4] = ['.', 'c', 'u', 's'];

impl BlockPool {
    /// At most `max_letters` letters (at least one), and how many blocks each stands for.
    ///
    /// A letter says what most of its blocks are (of equal numbers the more used): `.` free, `c` cached, `u` used by one, `s` by several.
    pub(crate) fn map(&self, max_letters: u32) -> (String, u32) {
        let num_blocks = self.num_total();
        let per_letter = num_blocks.div_ceil(max_letters.max(1)).max(1);
        let stride = per_letter.div_ceil(MAX_LOOKED_AT) as usize;
        let letter = |begin: u32| {
            let end = (begin + per_letter).min(num_blocks);
            let mut counts = [0u32; LETTERS.len()];
            for id in (begin..end).step_by(stride) {
                counts[self.kind(id)] += 1;
            }
            let most = (0..LETTERS.len()).max_by_key(|&kind| (counts[kind], kind));
            LETTERS[most.unwrap_or_default()]
        };
        let map = (0..num_blocks)
            .step_by(per_letter as usize)
            .map(letter)
            .collect();
        (map, per_letter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CoreConfig;

    fn pool(num_blocks: u32) -> BlockPool {
        let mut config = CoreConfig::new(num_blocks, 100);
        config.block_size = 2;
        BlockPool::new(&config)
    }

    #[test]
    fn each_kind_has_its_letter() {
        let mut pool = pool(5);
        let [_first, second, third] = [(); 3].map(|()| pool.allocate().unwrap());
        let _second_hold = pool.share(&second);
        pool.register(&third, 7, 1, &[1, 2], 0);
        pool.release(third);
        assert_eq!(pool.map(5), ("usc..".into(), 1));
        assert_eq!(pool.map(100), ("usc..".into(), 1));
        assert_eq!(pool.map(2), ("s.".into(), 3));
        assert_eq!(pool.map(1), (".".into(), 5));
        assert_eq!(pool.map(0), (".".into(), 5));
    }

    #[test]
    fn a_large_pool_is_sampled() {
        let mut pool = pool(100_000);
        let _blocks: Vec<_> = (0..50_000).map(|_| pool.allocate().unwrap()).collect();
        let (map, per_letter) = pool.map(100);
        assert_eq!((map.len(), per_letter), (100, 1000));
        assert_eq!(map, "u".repeat(50) + &".".repeat(50));
    }
}
