//! Bytes to events. Nothing that a payload says is believed before it is in range.

use super::bytes::{Input, Problem};
use super::columns::{Column, NUM_COLUMNS, Predictor, StepReader, header_index};
use super::encode::{EARLY_STOPPINGS, ENDS, POOLINGS, outcomes, tags};
use super::event::{
    Admission, Beams, Candidate, Chosen, Event, NUM_HEADER, Outcome, Step, Submission,
};
use super::record::Call;
use crate::batch::{LIST_CAPACITY, SlabLayout};
use crate::config::{CoreConfig, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS};

/// The inverse of `EventWriter`.
#[derive(Debug)]
pub(super) struct EventReader {
    config: CoreConfig,
    capacities: StepReader,
    predictor: Predictor,
    last_request: u64,
    last_prompt: Vec<i32>,
    last_name_space: u128,
}

impl EventReader {
    pub(super) fn new(config: &CoreConfig, layout: &SlabLayout) -> Self {
        Self {
            config: config.clone(),
            capacities: StepReader::new(layout),
            predictor: Predictor::new(config.max_num_seqs),
            last_request: 0,
            last_prompt: Vec::new(),
            last_name_space: 0,
        }
    }

    /// The next event of a payload that is not at its end.
    pub(super) fn read(&mut self, input: &mut Input<'_>) -> Result<Event, Problem> {
        Ok(match input.byte("an event")? {
            tags::SUBMITTED => Event::Submitted(Box::new(self.read_submission(input)?)),
            tags::ABORTED => Event::Aborted(input.number("a request")?),
            tags::PRIORITIZED => Event::Prioritized {
                request: input.number("a request")?,
                priority: input.signed("a priority")?,
            },
            tags::SCHEDULED => Event::Scheduled(Box::new(self.read_step(input)?)),
            tags::IDLE => Event::Idle,
            tags::COMMITTED => self.read_commit(input)?,
            tags::FAILED => Event::Failed {
                step_id: input.number("a step")?,
            },
            tags::ENDED => Event::Ended(input.number("a request")?),
            tags::CACHE_RESET => Event::CacheReset(input.byte("what became of a reset")? != 0),
            tags::POISONED => Event::Poisoned {
                during: one_of(&Call::ALL, input, "a call")?.name(),
            },
            tags::END => Event::End(one_of(&ENDS, input, "an end")?),
            tag => return Err(format!("there is no event with tag {tag}")),
        })
    }

    fn read_submission(&mut self, input: &mut Input<'_>) -> Result<Submission, Problem> {
        let config = &self.config;
        let step = input.number("a request")?;
        self.last_request = self.last_request.wrapping_add(step);
        let n = input.at_most(config.max_num_seqs, "n")?;
        let priority = input.signed("a priority")?;
        if input.byte("a name space")? != 0 {
            self.last_name_space = u128::from_le_bytes(input.bytes("a name space")?);
        }
        let max_tokens = input.at_most(config.max_model_len - 1, "max_tokens")?;
        let min_tokens = input.at_most(max_tokens, "min_tokens")?;
        let flags = input.at_most(0xff, "flags")?;
        let num_logprobs = input.at_most(MAX_LOGPROBS + 1, "logprobs")? as i32 - 1;
        let num_prompt_logprobs = input.at_most(MAX_LOGPROBS + 1, "prompt_logprobs")? as i32 - 1;
        let pooling = POOLINGS[input.at_most(POOLINGS.len() as u32 - 1, "pooling")? as usize];
        let num_picks =
            input.at_most(MAX_LOGPROB_TOKEN_IDS as u32, "the number of named tokens")?;
        // The lists of all sequences of a request fit into one slab.
        let most = LIST_CAPACITY as u32 / n.max(1);
        let num_bias = input.at_most(most, "the number of biases")?;
        let num_banned = input.at_most(most, "the number of banned ids")?;
        let final_only = input.at_most(1, "final_only")? != 0;
        let beams = read_beams(input)?;
        let num_prompt = input.at_most(
            config.max_model_len - u32::from(max_tokens > 0),
            "a prompt's length",
        )?;
        let has_results = num_prompt_logprobs >= 0 || pooling.is_some();
        if n == 0 || num_prompt == 0 || max_tokens == 0 && !(has_results && n == 1) {
            return Err("a request without sequences, prompt or output".into());
        }
        if config.blocks_for(num_prompt.saturating_add(max_tokens.max(1)) - 1) > config.num_blocks {
            return Err("a request that does not fit the pool".into());
        }
        self.read_prompt(input, num_prompt as usize)?;
        Ok(Submission {
            request: self.last_request,
            n,
            priority,
            name_space: self.last_name_space,
            max_tokens,
            min_tokens,
            flags,
            num_logprobs,
            num_prompt_logprobs,
            pooling,
            num_picks,
            num_bias,
            num_banned,
            final_only,
            beams,
            prompt: self.last_prompt.clone(),
        })
    }

    /// Leaves the prompt in `last_prompt`.
    fn read_prompt(&mut self, input: &mut Input<'_>, num_prompt: usize) -> Result<(), Problem> {
        let most = self.last_prompt.len().min(num_prompt) as u32;
        let num_shared = input.at_most(most, "the length of what two prompts share")?;
        self.last_prompt.truncate(num_shared as usize);
        while self.last_prompt.len() < num_prompt {
            let token = input.at_most(self.config.vocab_size - 1, "a token")?;
            self.last_prompt.push(token as i32);
        }
        Ok(())
    }

    fn read_step(&mut self, input: &mut Input<'_>) -> Result<Step, Problem> {
        let mut header = self.predictor.header;
        read_residuals(input, NUM_HEADER, |index, residual| {
            header[index] = header[index].wrapping_add(residual);
        })?;
        let admitted = self.read_admitted(input, header[header_index("num_admitted")])?;
        let mut columns: [Vec<i32>; NUM_COLUMNS] = Default::default();
        for &column in Column::ALL {
            let count = self.capacities.count(column, &header);
            let capacity = self.capacities.capacity(column);
            let count = usize::try_from(count)
                .ok()
                .filter(|&count| count <= capacity)
                .ok_or_else(|| {
                    format!(
                        "{count} elements of {}, more than {capacity}",
                        column.name()
                    )
                })?;
            columns[column as usize].reserve(count);
            let predictor = &self.predictor;
            read_residuals(input, count, |index, residual| {
                let likely = predictor.predict(&columns, column, index);
                columns[column as usize].push(likely.wrapping_add(residual as i32));
            })?;
        }
        let step = Step {
            header,
            admitted,
            columns,
            num_placeholders: input.at_most(u32::MAX, "the number of tokens being sampled")?,
        };
        self.predictor.note(&step);
        Ok(step)
    }

    fn read_admitted(&self, input: &mut Input<'_>, count: i64) -> Result<Vec<Admission>, Problem> {
        let max_num_seqs = self.config.max_num_seqs;
        if !(0..=i64::from(max_num_seqs)).contains(&count) {
            return Err(format!(
                "{count} admitted sequences, more than {max_num_seqs}"
            ));
        }
        let mut last_request = self.predictor.request;
        (0..count)
            .map(|_| {
                let slot = input.at_most(max_num_seqs - 1, "a slot")? as i32;
                last_request = last_request.wrapping_add(input.signed("a request")? as u64);
                let index = input.at_most(max_num_seqs - 1, "a sequence's index")?;
                Ok(Admission {
                    slot,
                    request: last_request,
                    index,
                })
            })
            .collect()
    }

    fn read_commit(&self, input: &mut Input<'_>) -> Result<Event, Problem> {
        let step_id = input.number("a step")?;
        let count = input.at_most(self.config.max_num_seqs, "the number of samples")?;
        let outcomes = (0..count).map(|_| self.read_outcome(input));
        let outcomes = outcomes.collect::<Result<_, Problem>>()?;
        let count = input.at_most(
            self.config.max_num_seqs,
            "the number of requests with beams",
        )?;
        let chosen = (0..count).map(|_| self.read_chosen(input));
        Ok(Event::Committed {
            step_id,
            outcomes,
            chosen: chosen.collect::<Result<_, Problem>>()?,
        })
    }

    fn read_outcome(&self, input: &mut Input<'_>) -> Result<Outcome, Problem> {
        let vocab_size = self.config.vocab_size;
        let most = outcomes::FIRST_TOKEN as u32 + vocab_size - 1;
        Ok(match u64::from(input.at_most(most, "a token")?) {
            outcomes::DROPPED => Outcome::Dropped,
            outcomes::FAILED => Outcome::Failed,
            outcomes::STOPPED => Outcome::Stopped,
            outcomes::CANDIDATES => {
                let count = input.at_most(MAX_LOGPROBS, "the number of a beam's candidates")?;
                let candidates = (0..count).map(|_| {
                    let code = input.at_most(vocab_size, "a candidate")?;
                    let logprob = u32::from_le_bytes(input.bytes("a log-probability")?);
                    Ok(Candidate {
                        token: code.checked_sub(1).map(|token| token as i32),
                        logprob,
                    })
                });
                Outcome::Candidates(candidates.collect::<Result<_, Problem>>()?)
            }
            code => Outcome::Token((code - outcomes::FIRST_TOKEN) as i32),
        })
    }

    fn read_chosen(&self, input: &mut Input<'_>) -> Result<Chosen, Problem> {
        let most = self.config.max_num_seqs;
        let request = input.number("a request")?;
        let count = input.at_most(most, "the number of beams")?;
        let heirs = (0..count).map(|_| {
            let parent = input.at_most(most - 1, "a beam")?;
            let token = input.at_most(self.config.vocab_size - 1, "a token")?;
            Ok((parent, token as i32))
        });
        Ok(Chosen {
            request,
            heirs: heirs.collect::<Result<_, Problem>>()?,
        })
    }
}

fn read_beams(input: &mut Input<'_>) -> Result<Option<Beams>, Problem> {
    let code = input.at_most(EARLY_STOPPINGS.len() as u32, "how beams end")?;
    let Some(index) = code.checked_sub(1) else {
        return Ok(None);
    };
    let bytes = input.bytes("a length penalty")?;
    Ok(Some(Beams {
        length_penalty: u64::from_le_bytes(bytes),
        early_stopping: EARLY_STOPPINGS[index as usize],
    }))
}

fn one_of<T: Copy>(known: &[T], input: &mut Input<'_>, what: &str) -> Result<T, Problem> {
    let code = input.byte(what)?;
    let found = known.get(code as usize).copied();
    found.ok_or_else(|| format!("{what} has no code {code}"))
}

/// Calls `each` with the residuals 0 to `count`.
fn read_residuals(
    input: &mut Input<'_>,
    count: usize,
    mut each: impl FnMut(usize, i64),
) -> Result<(), Problem> {
    let mut index = 0;
    while index < count {
        let residual = input.signed("a value")?;
        let num_equal = if residual == 0 {
            1 + input.at_most((count - index - 1) as u32, "a run of zeros")? as usize
        } else {
            1
        };
        for index in index..index + num_equal {
            each(index, residual);
        }
        index += num_equal;
    }
    Ok(())
}
