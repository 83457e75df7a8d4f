//! A random grammar, and what a request's constraints come to, worked out anew from all of its outputs.

use std::sync::Arc;

use oneloop_core::{Constraint, ConstraintSource, Failure, SharedGrammar, SubmitRequest};

use super::driver::VOCAB_SIZE;
use super::rng::scramble;

/// Where one may go depends on all the steps before. Now and then it ends, or breaks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Maze(pub(crate) u64);

impl Maze {
    pub(crate) fn shared(seed: u64) -> SharedGrammar {
        SharedGrammar(Arc::new(Self(seed)))
    }
}

impl ConstraintSource for Maze {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Walk {
            place: scramble(self.0),
            num_steps: 0,
        })
    }
}

#[derive(Debug, Clone)]
struct Walk {
    place: u64,
    num_steps: u32,
}

impl Walk {
    fn allows(&self, token: u32) -> bool {
        let always = (self.place % u64::from(VOCAB_SIZE)) as u32;
        token == always || scramble(self.place ^ u64::from(token) << 40).is_multiple_of(4)
    }
}

impl Constraint for Walk {
    fn fill_mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        assert!(mask.iter().all(|&word| word == 0));
        if self.place % 83 == 1 {
            return Err("the maze has a hole".into());
        }
        for token in (0..VOCAB_SIZE).filter(|&token| self.allows(token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), Failure> {
        if !self.allows(token) {
            return Err(Failure::of_engine("there is a wall"));
        }
        self.place = scramble(self.place.wrapping_mul(31) ^ u64::from(token));
        self.num_steps += 1;
        if self.place % 89 == 2 {
            return Err(Failure::of_request("the maze fell down"));
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.num_steps > 0 && self.place % 37 == 3
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// What may follow some outputs.
pub(crate) enum Next {
    Anything,
    /// By token.
    These(Vec<bool>),
    /// Nothing: whatever comes ends the sequence with an error.
    Broken,
}

/// What a sequence with these outputs has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    GoesOn,
    Over,
    Wrong,
}

fn ids(list: &[i64]) -> Vec<i32> {
    list.iter().map(|&id| id as i32).collect()
}

/// After how many outputs the marker is complete.
fn found(marker: &[i32], outputs: &[i32]) -> Option<usize> {
    (0..=outputs.len()).find(|&len| outputs[..len].ends_with(marker))
}

/// The token that must come next because the thinking has taken too long.
fn forced(request: &SubmitRequest, outputs: &[i32]) -> Option<i32> {
    let end = ids(&request.thinking_end);
    let budget = request.thinking_budget? as usize;
    if outputs.len() < budget || found(&end, outputs).is_some() {
        return None;
    }
    let there = (0..end.len())
        .rev()
        .find(|&len| outputs.ends_with(&end[..len]));
    Some(end[there.unwrap()])
}

/// The grammar's state, where it holds: `Err` when it broke on the way.
fn walk(request: &SubmitRequest, outputs: &[i32]) -> Option<Result<Box<dyn Constraint>, String>> {
    let grammar = request.grammar.as_ref()?;
    let begin = found(&ids(&request.grammar_after), outputs)?;
    let mut constraint = grammar.0.start();
    for &token in &outputs[begin..] {
        if let Err(problem) = constraint.advance(token as u32) {
            return Some(Err(problem.to_string()));
        }
    }
    Some(Ok(constraint))
}

/// What may come after these outputs, which came about rightly. `banned`: what `min_tokens` bans.
pub(crate) fn next(request: &SubmitRequest, outputs: &[i32], banned: &[i32]) -> Next {
    if let Some(token) = forced(request, outputs) {
        if banned.contains(&token) {
            return Next::Broken;
        }
        return Next::These((0..VOCAB_SIZE as i32).map(|id| id == token).collect());
    }
    let mut binds = false;
    let mut may = vec![true; VOCAB_SIZE as usize];
    if let Some(constraint) = walk(request, outputs) {
        let mut mask = vec![0; VOCAB_SIZE.div_ceil(32) as usize];
        let filled = constraint.and_then(|mut constraint| constraint.fill_mask(&mut mask));
        if filled.is_err() {
            return Next::Broken;
        }
        for (token, may) in may.iter_mut().enumerate() {
            *may = mask[token / 32] >> (token % 32) & 1 == 1;
        }
        binds = true;
    } else if request.grammar.is_some() {
        // An answer is to come: nothing ends the text before it, but what ends the thinking.
        let ends = request.eos_token_ids.iter().filter(|_| !request.ignore_eos);
        for &token in ends.chain(&request.stop_token_ids) {
            if !request.grammar_after.contains(&token) {
                may[token as usize] = false;
                binds = true;
            }
        }
    }
    if let Some(allowed) = &request.allowed_token_ids {
        for (token, may) in may.iter_mut().enumerate() {
            *may &= allowed.contains(&(token as i64));
        }
        binds = true;
    }
    for word in &request.bad_words {
        let word = ids(word);
        let (last, before) = word.split_last().unwrap();
        if outputs.ends_with(before) {
            may[*last as usize] = false;
            binds = true;
        }
    }
    let has_choice = (0..VOCAB_SIZE as usize).any(|id| may[id] && !banned.contains(&(id as i32)));
    match (binds, has_choice) {
        (false, _) => Next::Anything,
        (true, true) => Next::These(may),
        (true, false) => Next::Broken,
    }
}

/// Of outputs whose last one has just come, as `next` let it.
pub(crate) fn judge(request: &SubmitRequest, outputs: &[i32]) -> Verdict {
    let (_, before) = outputs.split_last().unwrap();
    let held_before = walk(request, before).is_some();
    if forced(request, before).is_some() || !held_before {
        return Verdict::GoesOn;
    }
    match walk(request, outputs) {
        Some(Ok(constraint)) if constraint.is_over() => Verdict::Over,
        Some(Err(_)) => Verdict::Wrong,
        _ => Verdict::GoesOn,
    }
}
