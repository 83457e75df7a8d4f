//! Formats of strings.
//!
//! The engine's own of some let values through that are none (the 30th of February's neighbour in ordinary years, leap seconds
//! at any time, names of hosts with wrong punycode): those are patterns here, which leave out what they cannot tell.

use serde_json::{Map, Value, json};

use super::Walk;
use crate::grammar::error::GrammarError;

const FORMATS: [&str; 10] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
];

/// Formats that a draft defines and that are not kept.
const NOT_KEPT: [&str; 15] = [
    "color",
    "host-name",
    "idn-email",
    "idn-hostname",
    "ip-address",
    "iri",
    "iri-reference",
    "json-pointer",
    "phone",
    "regex",
    "relative-json-pointer",
    "style",
    "uri-reference",
    "uri-template",
    "utc-millisec",
];

const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    // The 29th of February: years that 4 divides but not 100, and those that 400 does.
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)",
);
const TIME: &str = concat!(
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?",
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);
/// Without dashes in the third and fourth place, which only punycode may have.
const LABEL: &str = concat!(
    "(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]{0,2}[a-zA-Z0-9]",
    "|[a-zA-Z0-9][a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])",
);
const MAX_HOSTNAME: u64 = 253;
const UUID: &str = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}";
const IPV4: &str = concat!(
    "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}",
    "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
);
/// Addresses of RFC 5321 without quotes, at hosts with names.
const LOCAL_PART: &str =
    "[a-zA-Z0-9!#$%&'*+\\-\\/=?^_`{|}~]+(?:\\.[a-zA-Z0-9!#$%&'*+\\-\\/=?^_`{|}~]+)*";

/// Whether a draft defines the format.
pub(super) fn is_defined(name: &str) -> bool {
    FORMATS.contains(&name) || NOT_KEPT.contains(&name)
}

/// A terminal in Lark of texts that are of a format; `None` where there is none of it.
pub(super) fn bare(name: &str) -> Option<String> {
    let host = format!("{LABEL}(?:\\.{LABEL})*");
    let expression = match name {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "hostname" => return Some(format!("(/{host}/ & /.{{1,{MAX_HOSTNAME}}}/)")),
        "email" => format!("{LOCAL_PART}@{host}"),
        "ipv4" => IPV4.to_owned(),
        "uuid" => UUID.to_owned(),
        _ => return None,
    };
    Some(format!("/{expression}/"))
}

impl Walk<'_> {
    /// Formats are kept, as by the vocabulary "format-assertion": they bind strings, and no other values. One that no draft
    /// defines says nothing.
    pub(super) fn format(
        &mut self,
        value: &Value,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let Some(name) = value.as_str() else {
            return self.at("format", |walk| walk.refuse("must be a string"));
        };
        let is_kept = FORMATS.contains(&name);
        if !is_kept && !NOT_KEPT.contains(&name) {
            return Ok(());
        }
        let is_string = match members.get("type") {
            Some(Value::String(name)) => name == "string",
            Some(Value::Array(names)) => names.contains(&Value::from("string")),
            _ => true,
        };
        if is_string && !is_kept {
            return self.at("format", |walk| {
                walk.refuse(format!(
                    "is not supported; known are {}",
                    FORMATS.join(", ")
                ))
            });
        }
        if is_string {
            keep(name, made);
        }
        Ok(())
    }
}

fn keep(name: &str, made: &mut Map<String, Value>) {
    let pattern = match name {
        "date" => format!("^{DATE}$"),
        "time" => format!("^{TIME}$"),
        "date-time" => format!("^{DATE}[tT]{TIME}$"),
        "hostname" => {
            let given = made.get("maxLength").and_then(Value::as_u64);
            let max = given.map_or(MAX_HOSTNAME, |given| given.min(MAX_HOSTNAME));
            made.insert("maxLength".to_owned(), Value::from(max));
            format!("^{LABEL}(?:\\.{LABEL})*$")
        }
        name => {
            made.insert("format".to_owned(), Value::from(name));
            return;
        }
    };
    if made.contains_key("pattern") {
        // Both hold; the other alternatives are about other types.
        let second = json!({ "pattern": pattern });
        match made.get_mut("allOf").and_then(Value::as_array_mut) {
            Some(parts) => parts.push(second),
            None => {
                made.insert("allOf".to_owned(), json!([second]));
            }
        }
    } else {
        made.insert("pattern".to_owned(), Value::from(pattern));
    }
}
