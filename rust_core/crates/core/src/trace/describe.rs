//! Events as lines for a person.

use std::fmt::{self, Display, Formatter};

use super::columns::Column;
use super::event::{Event, Outcome, Step, Submission, TraceEnd};

impl Display for Event {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submitted(submission) => Display::fmt(submission, f),
            Self::Aborted(request) => write!(f, "abort {request}"),
            Self::Prioritized { request, priority } => {
                write!(f, "request {request} gets priority {priority}")
            }
            Self::Scheduled(step) => Display::fmt(step, f),
            Self::Idle => f.write_str("nothing to run"),
            Self::Committed {
                step_id,
                outcomes,
                chosen,
            } => {
                let count = |is_meant: fn(&Outcome) -> bool| {
                    outcomes.iter().filter(|o| is_meant(o)).count()
                };
                write!(
                    f,
                    "commit {step_id}: {} tokens",
                    count(|o| matches!(o, Outcome::Token(_)))
                )?;
                for (what, number) in [
                    ("stopped", count(|o| *o == Outcome::Stopped)),
                    ("failed", count(|o| *o == Outcome::Failed)),
                    ("dropped", count(|o| *o == Outcome::Dropped)),
                    (
                        "beams looked ahead",
                        count(|o| matches!(o, Outcome::Candidates(_))),
                    ),
                    ("groups of beams went on", chosen.len()),
                ] {
                    if number > 0 {
                        write!(f, ", {number} {what}")?;
                    }
                }
                Ok(())
            }
            Self::Failed { step_id } => write!(f, "step {step_id} failed"),
            Self::Ended(request) => write!(f, "request {request} ended"),
            Self::CacheReset(true) => f.write_str("prefix cache reset"),
            Self::CacheReset(false) => f.write_str("prefix cache not reset: blocks are held"),
            Self::Poisoned { during } => write!(f, "the core panicked in {during}"),
            Self::End(end) => write!(f, "end: {end}"),
        }
    }
}

impl Display for TraceEnd {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "the engine was shut down",
            Self::Behind => "the disk did not keep up",
            Self::Refused => "the disk took no more",
        })
    }
}

impl Display for Submission {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            request,
            max_tokens,
            prompt,
            ..
        } = self;
        write!(
            f,
            "submit {request}: {} prompt tokens, up to {max_tokens} more",
            prompt.len()
        )?;
        if self.beams.is_some() {
            write!(f, ", {} beams", self.n)?;
        } else if self.n > 1 {
            write!(f, ", n = {}", self.n)?;
        }
        if self.priority != 0 {
            write!(f, ", priority {}", self.priority)?;
        }
        if self.min_tokens > 0 {
            write!(f, ", at least {}", self.min_tokens)?;
        }
        Ok(())
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let value = |name: &str| self.header_value(name);
        write!(
            f,
            "step {}: {} tokens in {} rows, {} samples",
            self.step_id(),
            value("num_tokens"),
            value("num_rows"),
            value("num_samples")
        )?;
        for (place, admission) in self.admitted.iter().enumerate() {
            let (before, slot) = (if place == 0 { "; admits" } else { "," }, admission.slot);
            write!(
                f,
                "{before} {}.{} to slot {slot}",
                admission.request, admission.index
            )?;
        }
        let prompts = self
            .column(Column::RowNumScheduled)
            .iter()
            .zip(self.column(Column::RowSlot))
            .filter(|&(&tokens, _)| tokens > 1);
        for (place, (tokens, slot)) in prompts.enumerate() {
            write!(
                f,
                "{} {tokens} in slot {slot}",
                if place == 0 { "; computes" } else { "," }
            )?;
        }
        for (what, number) in [
            ("preempted", value("num_preempted")),
            ("forks", value("num_forks")),
            ("copies", value("num_cow")),
            ("new blocks", value("num_block_deltas")),
            ("freed slots", value("num_freed")),
        ] {
            if number > 0 {
                write!(f, "; {number} {what}")?;
            }
        }
        Ok(())
    }
}
