//! What a grammar is to the scheduler: something that says which tokens may come next.

use crate::delta::Failure;

/// Of one sequence.
pub trait Constraint: Send {
    /// Bit i % 32 of word i / 32: whether token i may come next. `mask` has `ceil(vocab_size / 32)` words, all
    /// zero.
    fn fill_mask(&mut self, mask: &mut [u32]) -> Result<(), String>;
    /// The sequence goes on with this token. The engine's fault where it is one that the mask refused.
    fn advance(&mut self, token: u32) -> Result<(), Failure>;
    /// Nothing may follow: the sequence ends with "stop".
    fn is_over(&self) -> bool;
    /// The same constraint in the same state, for a sequence that goes on from here by itself.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// One compiled grammar, shared by n sequences.
pub trait ConstraintSource: Send + Sync {
    /// The constraint of a sequence that has no token yet.
    fn start(&self) -> Box<dyn Constraint>;
}
