//! What stands in the URL: parameters and ids, with problems that name what is wrong.

use std::fmt;

use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::de::value::{Error, MapDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::fields::{Strays, Watched};
use super::problem::Problem;
use super::state::short;
use super::visit::Visit;

/// The parameters behind the question mark, each at most once; `T` has optional text fields.
///
/// 400 for a wrong encoding, a wrong value and a repeated parameter, 422 for one that is misspelt or would have
/// to narrow the question and cannot.
pub(super) struct Params<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let visit = Visit::of(&parts.extensions);
        let (value, strays) = read(parts.uri.query().unwrap_or_default())?;
        visit.settle_parameters(strays)?;
        Ok(Self(value))
    }
}

fn read<T: DeserializeOwned>(query: &str) -> Result<(T, Strays), Problem> {
    let mut pairs: Vec<(String, Param)> = Vec::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let name = decoded(name, name)?;
        let value = decoded(&name, value)?;
        if pairs.iter().any(|(before, _)| *before == name) {
            let detail = format!("the parameter {} is given more than once; give it once", short(&name));
            return Err(Problem::bad_request("repeated_parameter", detail).field(name));
        }
        pairs.push((name, Param(value)));
    }
    let mut strays = Strays::default();
    let map = MapDeserializer::<_, Error>::new(pairs.into_iter());
    let value = T::deserialize(Watched::new(map, &mut strays));
    if let Some(misspelt) = strays.misspelt.take() {
        return Err(misspelt.into());
    }
    let value = value.map_err(|error| Problem::bad_request("bad_parameter", error.to_string()))?;
    Ok((value, strays))
}

fn decoded(name: &str, text: &str) -> Result<String, Problem> {
    let wrong = || {
        let detail = format!("the parameter {} is not percent-encoded UTF-8", short(name));
        Problem::bad_request("bad_encoding", detail).field(name)
    };
    let hex = |part: &str| part.get(..2).is_some_and(|two| two.bytes().all(|byte| byte.is_ascii_hexdigit()));
    if !text.split('%').skip(1).all(hex) {
        return Err(wrong());
    }
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced).decode_utf8().map(Into::into).map_err(|_| wrong())
}

/// A parameter's value: text, which is there.
struct Param(String);

impl<'de> Deserializer<'de> for Param {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl IntoDeserializer<'_, Error> for Param {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The id in a path.
pub(super) struct PathId(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|rejection| {
            let detail =
                format!("the id in the path is not percent-encoded UTF-8: {}", rejection.body_text());
            Problem::new(StatusCode::BAD_REQUEST, "bad_encoding", detail).field("id")
        })?;
        Ok(Self(id))
    }
}

impl fmt::Debug for PathId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// No parameters at all: a route that takes none still names what it ignores.
#[derive(serde::Deserialize)]
pub(super) struct NoParams {}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug, Default, PartialEq)]
    struct Two {
        model_name: Option<String>,
        dp_rank: Option<String>,
    }

    /// A1, A2
    #[test]
    fn parameters_are_read_once_and_by_name() {
        let (two, strays) = read::<Two>("model_name=a%2Fb+c&stream=1&").unwrap();
        assert_eq!(two, Two { model_name: Some("a/b c".to_owned()), dp_rank: None });
        assert_eq!(strays.foreign, ["stream"]);
        assert_eq!(read::<Two>("dp_rank").unwrap().0.dp_rank.as_deref(), Some(""));
        let name = |query| read::<Two>(query).unwrap_err().name();
        assert_eq!(name("model_name=a&model_name=a"), "repeated_parameter");
        assert_eq!(name("modle_name=a"), "misspelt_field");
        for wrong in ["model_name=%ff", "model_name=%zz", "model_name=%2", "%ff=1"] {
            assert_eq!(name(wrong), "bad_encoding", "{wrong}");
        }
    }
}
