//! A grammar by table, for callers that know it token by token.

use std::collections::HashMap;
use std::sync::Arc;

use super::constraint::{Constraint, ConstraintSource};
use crate::delta::Failure;

/// Per state: the tokens that may come, and the state after each. It begins in state 0, and is over where none may.
#[derive(Debug, Clone)]
pub struct Automaton {
    states: Arc<[HashMap<u32, u32>]>,
}

impl Automaton {
    /// What is wrong with the table: it has no state, names one that is not there, or is over before it begins.
    pub fn new(states: Vec<HashMap<u32, u32>>) -> Result<Self, String> {
        let num_states = states.len();
        if states.first().is_none_or(HashMap::is_empty) {
            return Err("state 0 must let some token come".into());
        }
        let targets = states.iter().flat_map(HashMap::values);
        if let Some(target) = targets.clone().find(|&&t| t as usize >= num_states) {
            return Err(format!("there is no state {target}, only {num_states}"));
        }
        Ok(Self {
            states: states.into(),
        })
    }
}

impl ConstraintSource for Automaton {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Walk {
            automaton: self.clone(),
            state: 0,
        })
    }
}

/// A sequence's way through it.
#[derive(Debug, Clone)]
struct Walk {
    automaton: Automaton,
    state: u32,
}

impl Walk {
    fn moves(&self) -> &HashMap<u32, u32> {
        &self.automaton.states[self.state as usize]
    }
}

impl Constraint for Walk {
    fn fill_mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        for &token in self.moves().keys() {
            // A token beyond the model's vocabulary never comes.
            if let Some(word) = mask.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), Failure> {
        match self.moves().get(&token) {
            Some(&state) => {
                self.state = state;
                Ok(())
            }
            None => Err(Failure::of_engine(format!(
                "token id {token} must not come here"
            ))),
        }
    }

    fn is_over(&self) -> bool {
        self.moves().is_empty()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
