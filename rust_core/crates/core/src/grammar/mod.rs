//! Structured output: grammars of what clients ask for, compiled once and shared, and their state in each sequence.
//!
//! Everything here is about text and tokens; what the step does with a mask is `sched`'s. The grammar engine is llguidance.
//! It is never given a client's text as it came: schemas, patterns and grammars are checked and written anew, so that what
//! the engine would skip or keep only nearly is refused.

mod compiler;
mod constraint;
mod ebnf;
mod error;
mod lark;
mod limits;
mod matcher;
mod pattern;
mod schema;
mod spec;
mod tags;
mod tokens;

pub use compiler::GrammarCompiler;
pub use constraint::{Constraint, ConstraintSource};
pub use error::GrammarError;
pub use limits::{COMPILE_TIMEOUT, MAX_SOURCE_BYTES};
pub use matcher::{Grammar, GrammarMatcher};
pub use schema::JsonStyle;
pub use spec::GrammarSpec;
