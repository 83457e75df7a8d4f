//! Grammars from the outside: what they let through, what is refused, and within what bounds.

#![allow(clippy::unwrap_used)] // helpers of tests fail as tests do

mod forms;
mod hostile;
mod random;
mod support;
mod tags;
