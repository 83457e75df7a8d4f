//! Keywords about arrays, in the form of draft 2020-12.

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;

impl Walk<'_> {
    pub(super) fn arrays(
        &mut self,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        self.count("minItems", members, made)?;
        self.count("maxItems", members, made)?;
        // Before 2020-12 a list of schemas stood in "items", and "additionalItems" behind it.
        let (first, first_name, rest, rest_name) = match members.get("items") {
            Some(items @ Value::Array(_)) => {
                if members.contains_key("prefixItems") {
                    return self.refuse(
                        "a list of \"items\" together with \"prefixItems\" has no meaning",
                    );
                }
                (
                    Some(items),
                    "items",
                    members.get("additionalItems"),
                    "additionalItems",
                )
            }
            items => (members.get("prefixItems"), "prefixItems", items, "items"),
        };
        if let Some(first) = first {
            let first = match first {
                Value::Array(schemas) if schemas.is_empty() => Value::Array(Vec::new()),
                first => self.at(first_name, |walk| walk.schemas(first))?,
            };
            made.insert("prefixItems".to_owned(), first);
        }
        if let Some(rest) = rest {
            made.insert(
                "items".to_owned(),
                self.at(rest_name, |walk| walk.schema(rest))?,
            );
        }
        Ok(())
    }
}
