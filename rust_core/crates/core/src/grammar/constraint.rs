//! What the step asks of a grammar: which tokens may come next, and what came.

/// A grammar's state in one sequence.
pub trait Constraint: Send {
    /// Bit i % 32 of word i / 32: whether token i may come next. `mask` has ceil(vocab_size / 32) words, all zero.
    fn fill_mask(&mut self, mask: &mut [u32]) -> Result<(), String>;
    /// The sequence goes on with this token.
    fn advance(&mut self, token: u32) -> Result<(), String>;
    /// Nothing may follow: the sequence ends with "stop".
    fn is_over(&self) -> bool;
    /// The same state again, for a sequence that goes on by itself.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// One compiled grammar, shared by all sequences that keep to it.
pub trait ConstraintSource: Send + Sync {
    /// The state before the first token.
    fn start(&self) -> Box<dyn Constraint>;
}
