//! Grammars from the outside: what they let through, what is refused, and within what bounds.

mod forms;
mod hostile;
mod random;
mod support;
mod tags;
