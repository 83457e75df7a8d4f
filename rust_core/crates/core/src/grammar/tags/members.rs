//! Tags one after the other: any of them as often as wanted, or each at its place and some left out.

use std::fmt::Write;

use serde_json::Value;

use super::Writer;
use super::read::{flag, list, object, text};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_PROPERTIES, MAX_TAGS};

impl Writer<'_> {
    /// Tags with a text between them, and nothing else.
    pub(super) fn separated(&mut self, value: &Value, at: &str) -> Result<String, GrammarError> {
        let known = [
            "type",
            "tags",
            "separator",
            "at_least_one",
            "stop_after_first",
        ];
        let members = object(value, at, &known)?;
        let mut tags = Vec::new();
        for (index, tag) in list(members, "tags", at, MAX_TAGS)?.iter().enumerate() {
            let tag = self.tag(tag, &format!("{at}/tags/{index}"))?;
            tags.push(self.rest(&tag, 0));
        }
        let number = self.number();
        let _ = writeln!(self.rules, "any_tag_{number}: {}", tags.join("\n | "));
        let separator = self.special.lark(&text(members, "separator", at)?);
        let more = if flag(members, "stop_after_first", at)? {
            String::new()
        } else {
            format!(" ({separator} any_tag_{number})*")
        };
        let optional = if flag(members, "at_least_one", at)? {
            ""
        } else {
            "?"
        };
        Ok(format!(" (any_tag_{number}{more}){optional}"))
    }

    /// Tags in their order, those that are not required with or without, and a text between two.
    pub(super) fn members(&mut self, value: &Value, at: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "members", "separator"])?;
        let separator = self.special.lark(&text(members, "separator", at)?);
        let list = members.get("members").and_then(Value::as_array);
        let Some(list) = list.filter(|list| list.len() <= MAX_PROPERTIES) else {
            return Err(GrammarError::at(
                format!("{at}/members"),
                format!("must be a list of at most {MAX_PROPERTIES}"),
            ));
        };
        let number = self.number();
        let mut optional = Vec::with_capacity(list.len());
        for (index, member) in list.iter().enumerate() {
            let at = format!("{at}/members/{index}");
            let known = ["begin", "schema", "content", "end", "required"];
            let given = object(member, &at, &known)?;
            optional.push(if flag(given, "required", &at)? {
                ""
            } else {
                "?"
            });
            let mut tag = given.clone();
            tag.remove("required");
            let tag = self.tag(&Value::Object(tag), &at)?;
            let rest = self.rest(&tag, 0);
            let _ = writeln!(self.rules, "member_{number}_{index}: {rest}");
        }
        if separator.is_empty() {
            let mut out = String::new();
            for (index, optional) in optional.iter().enumerate() {
                let _ = write!(out, " member_{number}_{index}{optional}");
            }
            return Ok(out);
        }
        Ok(self.with_separator(number, &optional, &separator))
    }

    /// Rules for each place in the list: `first` where nothing was written before it, `next` where something was.
    fn with_separator(&mut self, number: usize, optional: &[&str], separator: &str) -> String {
        let Some(last) = optional.len().checked_sub(1) else {
            return String::new();
        };
        for (index, optional) in optional.iter().enumerate() {
            let member = format!("member_{number}_{index}");
            let (first, next) = if index < last {
                let behind = index + 1;
                (
                    format!("first_{number}_{behind}"),
                    format!(" next_{number}_{behind}"),
                )
            } else {
                (String::new(), String::new())
            };
            let _ = match (optional.is_empty(), index == last) {
                (true, _) => writeln!(self.rules, "first_{number}_{index}: {member}{next}"),
                (false, true) => writeln!(self.rules, "first_{number}_{index}: {member}?"),
                (false, false) => {
                    writeln!(
                        self.rules,
                        "first_{number}_{index}: {member}{next} | {first}"
                    )
                }
            };
            if index > 0 {
                let _ = writeln!(
                    self.rules,
                    "next_{number}_{index}: ({separator} {member}){optional}{next}"
                );
            }
        }
        format!(" first_{number}_0")
    }
}
