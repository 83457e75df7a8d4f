//! Keywords about strings.

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_COUNT, UNREACHABLE_COUNT};
use crate::grammar::pattern;

impl Walk<'_> {
    pub(super) fn strings(
        &mut self,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        self.count("minLength", members, made)?;
        self.count("maxLength", members, made)?;
        if let Some(value) = members.get("pattern") {
            let value = self.at("pattern", |walk| walk.pattern(value))?;
            made.insert("pattern".to_owned(), Value::String(value));
        }
        if let Some(value) = members.get("format") {
            self.format(value, members, made)?;
        }
        Ok(())
    }

    fn pattern(&self, value: &Value) -> Result<String, GrammarError> {
        match value.as_str() {
            Some(text) => self.searched(text),
            None => self.refuse("must be a string"),
        }
    }

    /// A pattern for the engine, which searches: anchored at both ends.
    pub(super) fn searched(&self, text: &str) -> Result<String, GrammarError> {
        let expression = pattern::search(text).map_err(|error| error.located(|| self.place()))?;
        Ok(format!("^(?:{expression})$"))
    }

    /// A keyword whose value is a count. Upper bounds that no answer reaches are left out.
    pub(super) fn count(
        &mut self,
        name: &str,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let Some(value) = members.get(name) else {
            return Ok(());
        };
        let whole = |value: f64| value >= 0.0 && value.fract() == 0.0;
        let Some(number) = value.as_f64().filter(|&value| whole(value)) else {
            return self.at(name, |walk| walk.refuse("must be an integer, at least 0"));
        };
        if name.starts_with("max") && number >= UNREACHABLE_COUNT as f64 {
            return Ok(());
        }
        if number > MAX_COUNT as f64 {
            return self.at(name, |walk| {
                walk.refuse(format!("may be at most {MAX_COUNT}"))
            });
        }
        made.insert(name.to_owned(), Value::from(number as u64));
        Ok(())
    }
}
