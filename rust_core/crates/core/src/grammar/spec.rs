//! What a client may ask for, and the text it becomes for the grammar engine.

use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use super::error::GrammarError;
use super::limits::{MAX_ENUM_VALUES, MAX_SOURCE_BYTES};
use super::schema::{self, JsonStyle};
use super::tags::SpecialTokens;
use super::{lark, pattern, tags};

/// A grammar to be compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrammarSpec {
    /// A JSON value that is valid by this schema (JSON text).
    JsonSchema(String, JsonStyle),
    /// Any JSON object.
    JsonObject(JsonStyle),
    /// A text that the pattern matches from end to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark, or in GBNF.
    Grammar(String),
    /// Free text with tagged parts that follow schemas (JSON text).
    StructuralTag(String, JsonStyle),
}

impl GrammarSpec {
    pub(super) fn check_size(&self) -> Result<(), GrammarError> {
        let size = match self {
            Self::JsonSchema(text, style) | Self::StructuralTag(text, style) => {
                text.len() + style.whitespace_pattern.as_ref().map_or(0, String::len)
            }
            Self::JsonObject(style) => style.whitespace_pattern.as_ref().map_or(0, String::len),
            Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        if size > MAX_SOURCE_BYTES {
            return Err(GrammarError::new(format!(
                "a grammar may have at most {MAX_SOURCE_BYTES} bytes, got {size}"
            )));
        }
        Ok(())
    }

    /// The grammar as the engine takes it. Special tokens are named by their ids.
    pub(super) fn engine_grammar(
        &self,
        special: &SpecialTokens,
    ) -> Result<TopLevelGrammar, GrammarError> {
        let lark = match self {
            Self::JsonSchema(text, style) => return Ok(json(schema::engine_schema(text, style)?)),
            Self::JsonObject(style) => {
                return Ok(json(schema::engine_schema(r#"{"type":"object"}"#, style)?));
            }
            Self::Regex(text) => regex(text)?,
            Self::Choice(texts) => choice(texts)?,
            Self::Grammar(text) => lark::checked(text)?,
            Self::StructuralTag(text, style) => tags::lark(text, style, special)?,
        };
        Ok(TopLevelGrammar::from_lark(lark))
    }
}

fn json(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_json_schema(schema)
}

fn regex(text: &str) -> Result<String, GrammarError> {
    if text.is_empty() {
        return Err(GrammarError::new("a regex must not be empty"));
    }
    Ok(format!("start: /(?:{})/\n", pattern::full(text)?))
}

fn choice(texts: &[String]) -> Result<String, GrammarError> {
    if texts.is_empty() || texts.len() > MAX_ENUM_VALUES {
        return Err(GrammarError::new(format!(
            "must be a list of 1 to {MAX_ENUM_VALUES} texts, got {}",
            texts.len()
        )));
    }
    if texts.iter().any(String::is_empty) {
        return Err(GrammarError::new("a choice must not be empty"));
    }
    let choices: Vec<_> = texts.iter().map(|text| pattern::literal(text)).collect();
    Ok(format!("start: /(?:{})/\n", choices.join("|")))
}
