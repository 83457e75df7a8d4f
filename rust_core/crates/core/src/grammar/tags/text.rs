//! Strings by a schema, written as they stand, without quotes: the text behind them says where they end.

use std::fmt::Write;

use serde_json::Value;

use super::Writer;
use super::read::{object, text, texts};
use super::triggered::without;
use crate::grammar::error::GrammarError;
use crate::grammar::{pattern, schema};

impl Writer<'_> {
    /// Any text, or none, up to the end of all; in which none of `excludes` stands, and that does not begin with
    /// `not_beginning`, a pattern.
    pub(super) fn any_text(&mut self, value: &Value, at: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "excludes", "not_beginning"])?;
        let excluded = texts(members, "excludes", at, false)?;
        let excluded: Vec<_> = excluded.iter().map(String::as_str).collect();
        let mut expression = format!("/(?s:.+)/{}", without(&excluded, "(?s:.*)"));
        if members.contains_key("not_beginning") {
            let place = || format!("{at}/not_beginning");
            let pattern = pattern::full(&text(members, "not_beginning", at)?);
            let beginning = pattern.map_err(|error| error.located(place))?;
            let _ = write!(expression, " & ~/(?:{beginning})(?s:.*)/");
        }
        let number = self.number();
        let _ = writeln!(self.rules, "ANY_{number}: {expression}");
        Ok(format!(" ANY_{number}?"))
    }

    /// A text by a schema of strings, in which none of `excludes` stands, and the text behind it.
    ///
    /// It ends where `end` is first read. Where that begins with a special token, the token ends it.
    pub(super) fn text(
        &mut self,
        value: &Value,
        at: &str,
        end: &str,
    ) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "json_schema", "excludes"])?;
        if end.is_empty() {
            return Err(GrammarError::at(
                at,
                "a text is supported where a tag's end follows it",
            ));
        }
        let given = members.get("json_schema").unwrap_or(&Value::Bool(true));
        let body = schema::text(given)
            .map_err(|error| super::moved(error, &format!("{at}/json_schema")))?;
        let mut excluded = texts(members, "excludes", at, false)?;
        let stop = self
            .special
            .first_in(end)
            .map_or(end.len(), |(start, ..)| start);
        let (mark, behind) = end.split_at(stop);
        excluded.extend((!mark.is_empty()).then(|| mark.to_owned()));
        let number = self.number();
        let excluded: Vec<_> = excluded.iter().map(String::as_str).collect();
        let without = without(&excluded, "(?s:.*)");
        let rest = self.special.lark(behind);
        if mark.is_empty() {
            let _ = writeln!(
                self.rules,
                "TEXT_{number}: {} & /(?s:.+)/{without}",
                body.expression
            );
            let optional = if body.is_nullable { "?" } else { "" };
            return Ok(format!(" TEXT_{number}{optional}{rest}"));
        }
        let _ = writeln!(
            self.rules,
            "text_{number}[lazy]: WITH_END_{number}\nWITH_END_{number}: TEXT_{number} /{}/\n\
             TEXT_{number}: {}{without}",
            pattern::literal(mark),
            body.expression
        );
        Ok(format!(" text_{number}{rest}"))
    }
}
