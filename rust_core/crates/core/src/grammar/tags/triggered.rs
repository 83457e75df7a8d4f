//! Free text in which whatever begins with a trigger is one of some tags.

use std::fmt::Write;

use serde_json::Value;

use super::read::{flag, list, object, texts};
use super::{Tag, Writer};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_TAGS;
use crate::grammar::pattern;

/// Triggered tags as they were asked for.
struct Triggered {
    tags: Vec<Tag>,
    triggers: Vec<String>,
    /// Texts that free text does not have.
    excludes: Vec<String>,
    /// The text begins with a tag.
    at_least_one: bool,
    /// Nothing follows the first tag.
    stop_after_first: bool,
}

impl Writer<'_> {
    /// The older form, with its tags as "structures".
    pub(super) fn older(&mut self, value: &Value) -> Result<String, GrammarError> {
        let kind = value.get("type").and_then(Value::as_str);
        if kind.is_some_and(|kind| kind != "structural_tag") {
            return Err(GrammarError::at(
                "#/type",
                "only \"structural_tag\" is supported",
            ));
        }
        self.triggered(value, "#", "structures")
    }

    /// Free text and tags. `name`: of the member with the tags.
    pub(super) fn triggered(
        &mut self,
        value: &Value,
        at: &str,
        name: &str,
    ) -> Result<String, GrammarError> {
        let known = [
            "type",
            name,
            "triggers",
            "excludes",
            "at_least_one",
            "stop_after_first",
        ];
        let members = object(value, at, &known)?;
        let triggers = texts(members, "triggers", at, true)?;
        let mut tags = Vec::new();
        for (index, tag) in list(members, name, at, MAX_TAGS)?.iter().enumerate() {
            let at = format!("{at}/{name}/{index}");
            let tag = self.tag(tag, &at)?;
            if !triggers
                .iter()
                .any(|trigger| tag.begin.starts_with(trigger))
            {
                return Err(GrammarError::at(
                    format!("{at}/begin"),
                    "begins with none of the triggers",
                ));
            }
            tags.push(tag);
        }
        let given = Triggered {
            tags,
            triggers,
            excludes: texts(members, "excludes", at, false)?,
            at_least_one: flag(members, "at_least_one", at)?,
            stop_after_first: flag(members, "stop_after_first", at)?,
        };
        Ok(self.free_text_with(&given))
    }

    /// The rules. `tag` is a tag from its beginning; `part` is free text up to a trigger, and what then has to follow.
    fn free_text_with(&mut self, given: &Triggered) -> String {
        // A trigger that begins with another is never reached: the shorter one decides.
        let mut triggers: Vec<&str> = given.triggers.iter().map(String::as_str).collect();
        triggers.sort_unstable_by_key(|trigger| trigger.len());
        let mut shortest: Vec<&str> = Vec::new();
        for trigger in triggers {
            if !shortest.iter().any(|other| trigger.starts_with(other)) {
                shortest.push(trigger);
            }
        }
        let number = self.number();
        let mut parts = Vec::new();
        let (tokens, texts): (Vec<&str>, Vec<&str>) = shortest
            .iter()
            .partition(|trigger| matches!(self.special.first_in(trigger), Some((0, ..))));
        let mut stops = texts.clone();
        stops.extend(given.excludes.iter().map(String::as_str));
        let free = without(&stops, "(?s:.*)");
        let _ = writeln!(
            self.rules,
            "free_{number}: FREE_{number}?\nFREE_{number}: /(?s:.+)/{free}"
        );
        for (index, trigger) in texts.iter().enumerate() {
            let excludes = given.excludes.iter().map(String::as_str);
            let (within, others): (Vec<_>, Vec<_>) =
                excludes.partition(|text| trigger.contains(text));
            let literal = pattern::literal(trigger);
            let _ = writeln!(
                self.rules,
                "lead_{number}_{index}[lazy]: LEAD_{number}_{index}\n\
                 LEAD_{number}_{index}: /(?s:.*){literal}/{}{}{}",
                without(&texts, "(?s:.+)"),
                without(&others, "(?s:.*)"),
                without(&within, &format!("(?s:.*){literal}")),
            );
            parts.push(format!(
                "lead_{number}_{index} ({})",
                self.rests(given, trigger, trigger.len())
            ));
        }
        for trigger in &tokens {
            parts.push(format!("free_{number} ({})", self.rests(given, trigger, 0)));
        }
        let whole: Vec<_> = given.tags.iter().map(|tag| self.rest(tag, 0)).collect();
        let _ = writeln!(self.rules, "tag_{number}: {}", whole.join("\n | "));
        let _ = writeln!(self.rules, "part_{number}: {}", parts.join("\n | "));
        match (given.at_least_one, given.stop_after_first) {
            (true, true) => format!(" tag_{number}"),
            (true, false) => format!(" tag_{number} part_{number}* free_{number}"),
            (false, true) => format!(" (part_{number} | free_{number})"),
            (false, false) => format!(" part_{number}* free_{number}"),
        }
    }

    /// The tags of a trigger, without their first `skip` bytes.
    fn rests(&self, given: &Triggered, trigger: &str, skip: usize) -> String {
        let tags = given.tags.iter();
        let rests: Vec<_> = tags
            .filter(|tag| tag.begin.starts_with(trigger))
            .map(|tag| self.rest(tag, skip))
            .collect();
        rests.join(" | ")
    }
}

/// What takes texts away that have one of these, and then `behind`.
pub(super) fn without(texts: &[&str], behind: &str) -> String {
    if texts.is_empty() {
        return String::new();
    }
    let literals: Vec<_> = texts.iter().map(|text| pattern::literal(text)).collect();
    format!(" & ~/(?s:.*)(?:{}){behind}/", literals.join("|"))
}
