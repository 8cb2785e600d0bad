//! JSON at the boundary: bodies, worker ids, 64-bit hashes, names of pools, and which shape is answered.
//!
//! Inner types are not serialisable; what crosses the wire has its own types here and is converted by hand.

use std::fmt;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::{DeserializeOwned, Error, IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::problem::Problem;
use crate::fleet::{IdForm, PoolKey};
use crate::ids::WorkerId;

/// A JSON object as the body of a request.
///
/// 415 without a JSON content type, 413 above the route's limit, 400 for what is no JSON, 422 for JSON of the
/// wrong shape; the problem names the field where there is one.
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if !is_json(request.headers()) {
            let detail = "the request needs the header `Content-Type: application/json`";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", detail));
        }
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| {
            let name = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => "too_large",
                _ => "unreadable_body",
            };
            Problem::new(rejection.status(), name, rejection.body_text())
        })?;
        parse(&bytes).map(Self)
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// Reads one JSON object and nothing behind it.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // A derived struct would also take an array in the order of its fields, which no client means.
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(match serde_json::from_slice::<IgnoredAny>(bytes) {
            Ok(_) => Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "wrong_shape",
                "the body must be a JSON object",
            ),
            Err(error) => not_json(&error),
        });
    }
    // To keep track of where in the body we are costs more per token than to read it. So a body is read without,
    // and a second time with it once something is known to be wrong.
    if let Ok(value) = serde_json::from_slice(bytes) {
        return Ok(value);
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        if !error.is_data() {
            return not_json(&error);
        }
        let text = error.to_string();
        let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let field = match missing {
            Some(name) if path == "." => name.to_owned(),
            Some(name) => format!("{path}.{name}"),
            None => path,
        };
        Problem::wrong_field(&field, format!("{field}: {text}"))
    })?;
    json.end().map_err(|error| not_json(&error))?;
    Ok(value)
}

fn not_json(error: &serde_json::Error) -> Problem {
    Problem::bad_request("not_json", format!("the body is not JSON: {error}"))
}

/// Reads an optional field for which null is no value.
pub(super) fn not_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

// === worker ids ===

/// Longest worker id: pod names have at most 253 bytes, URLs used as ids are longer.
const MAX_ID_LEN: usize = 512;

/// A worker id as a client writes it: text, or a whole number from 0 to 2^64−1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct WireId {
    pub(super) id: WorkerId,
    pub(super) form: IdForm,
}

impl<'de> Deserialize<'de> for WireId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Ids;

        impl Visitor<'_> for Ids {
            type Value = WireId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a worker id: text, or a whole number from 0 to 2^64-1")
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<WireId, E> {
                Ok(WireId { id: WorkerId::new(id.to_string()), form: IdForm::Integer })
            }

            fn visit_str<E: Error>(self, id: &str) -> Result<WireId, E> {
                if id.len() > MAX_ID_LEN {
                    return Err(E::invalid_length(id.len(), &"a worker id of at most 512 bytes"));
                }
                Ok(WireId { id: WorkerId::new(id), form: IdForm::Text })
            }
        }

        from.deserialize_any(Ids)
    }
}

/// A worker id in the JSON type that it was registered with.
#[derive(Clone, Copy)]
pub(super) struct IdOut<'a>(pub(super) &'a WorkerId, pub(super) IdForm);

impl Serialize for IdOut<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match (self.1, self.0.as_str().parse::<u64>()) {
            (IdForm::Integer, Ok(number)) => to.serialize_u64(number),
            _ => to.serialize_str(self.0.as_str()),
        }
    }
}

// === hashes ===

/// A 64-bit hash, or an engine's byte-string name, as a client writes it.
///
/// What cannot be a hash is kept, so that it is answered with 400 and not taken for a wrong type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum WireHash {
    /// A 64-bit pattern: an integer from −2^63 to 2^64−1, the same in decimal text, or `0x` and up to 16
    /// hex digits.
    Int(u64),
    /// `0x` and an even number of more than 16 hex digits.
    Bytes(Box<[u8]>),
    /// A number that has been through a double, or text that is no hash.
    Refused(String),
}

impl<'de> Deserialize<'de> for WireHash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Hashes;

        impl Visitor<'_> for Hashes {
            type Value = WireHash;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit hash: an integer, decimal text or 0x text")
            }

            fn visit_u64<E: Error>(self, hash: u64) -> Result<WireHash, E> {
                Ok(WireHash::Int(hash))
            }

            fn visit_i64<E: Error>(self, hash: i64) -> Result<WireHash, E> {
                Ok(WireHash::Int(hash.cast_unsigned()))
            }

            fn visit_f64<E: Error>(self, hash: f64) -> Result<WireHash, E> {
                Ok(WireHash::Refused(format!("{hash:e}")))
            }

            fn visit_str<E: Error>(self, hash: &str) -> Result<WireHash, E> {
                Ok(WireHash::parse(hash))
            }
        }

        from.deserialize_any(Hashes)
    }
}

impl WireHash {
    fn parse(text: &str) -> Self {
        let refused = || Self::Refused(text.chars().take(80).collect());
        if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return refused();
            }
            return match digits.len() {
                1..=16 => u64::from_str_radix(digits, 16).map_or_else(|_| refused(), Self::Int),
                _ => hex_bytes(digits).map_or_else(refused, Self::Bytes),
            };
        }
        // `parse` would take a leading plus.
        if text.starts_with('+') {
            return refused();
        }
        let int = text.parse::<u64>().or_else(|_| text.parse::<i64>().map(i64::cast_unsigned));
        int.map_or_else(|_| refused(), Self::Int)
    }

    /// The 64-bit hashes of a list.
    pub(super) fn ints(hashes: &[Self], field: &str) -> Result<Vec<u64>, Problem> {
        let int = |(at, hash): (usize, &Self)| match hash {
            Self::Int(hash) => Ok(*hash),
            Self::Bytes(_) => Err(bad_hash(field, at, "longer than 64 bits")),
            Self::Refused(text) => Err(bad_hash(field, at, text)),
        };
        hashes.iter().enumerate().map(int).collect()
    }
}

pub(super) fn bad_hash(field: &str, at: usize, what: &str) -> Problem {
    let detail = format!(
        "{field}[{at}] is no 64-bit hash ({what}): send an integer without fraction or exponent, decimal text or 0x text"
    );
    Problem::bad_request("not_a_hash", detail).field(format!("{field}[{at}]"))
}

/// The bytes of an even number of hex digits; `None` for anything else.
pub(super) fn hex_bytes(digits: &str) -> Option<Box<[u8]>> {
    let pairs = digits.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    });
    pairs.collect::<Option<Vec<u8>>>().filter(|bytes| !bytes.is_empty()).map(Into::into)
}

/// How hashes are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HashForm {
    /// Signed JSON integers, as Dynamo does; unsafe for clients that read numbers as doubles.
    Number,
    /// Unsigned decimal text.
    Text,
}

impl HashForm {
    /// What `?hashes=` or the header `x-rankwise-hashes` asks for; `None` if neither is there: then answers
    /// show hashes only where the field's own shape has them.
    pub(super) fn asked(query: Option<&str>, headers: &HeaderMap) -> Result<Option<Self>, Problem> {
        let header = headers.get("x-rankwise-hashes").map(|value| value.to_str().unwrap_or("?"));
        match query.or(header) {
            None => Ok(None),
            Some("string") => Ok(Some(Self::Text)),
            Some("number") => Ok(Some(Self::Number)),
            Some(_) => {
                Err(Problem::bad_request("hash_form", "hashes is `string` or `number`").field("hashes"))
            }
        }
    }
}

/// A hash in the wanted form.
#[derive(Clone, Copy)]
pub(super) struct HashOut(pub(super) u64, pub(super) HashForm);

impl Serialize for HashOut {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.1 {
            HashForm::Number => to.serialize_i64(self.0.cast_signed()),
            HashForm::Text => to.collect_str(&self.0),
        }
    }
}

// === pools ===

/// Which system's shape a request speaks, and so which one is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    /// `model_name` / `routing_group`.
    Dynamo,
    /// `model` or `modelname` / `tenant_id`.
    Mooncake,
}

/// The names by which a request says which pool it means.
#[derive(Clone, Copy, Default)]
pub(super) struct PoolNames<'a> {
    pub(super) model_name: Option<&'a str>,
    pub(super) routing_group: Option<&'a str>,
    pub(super) model: Option<&'a str>,
    pub(super) modelname: Option<&'a str>,
    pub(super) tenant_id: Option<&'a str>,
}

/// Fills [`PoolNames`] from a body that has its five fields.
macro_rules! pool_names {
    ($body:expr) => {
        $crate::service::boundary::PoolNames {
            model_name: $body.model_name.as_deref(),
            routing_group: $body.routing_group.as_deref(),
            model: $body.model.as_deref(),
            modelname: $body.modelname.as_deref(),
            tenant_id: $body.tenant_id.as_deref(),
        }
    };
}
pub(super) use pool_names;

impl<'a> PoolNames<'a> {
    pub(super) fn shape(&self) -> Shape {
        let dynamo = self.model_name.is_some() || self.routing_group.is_some();
        let mooncake = self.model.is_some() || self.modelname.is_some() || self.tenant_id.is_some();
        if mooncake && !dynamo { Shape::Mooncake } else { Shape::Dynamo }
    }

    /// The model, if one is named.
    pub(super) fn model(&self) -> Option<&'a str> {
        self.model_name.or(self.model).or(self.modelname)
    }

    /// The group; `tenant_id` is one only where no `model_name` stands.
    pub(super) fn group(&self) -> Option<&'a str> {
        let tenant = if self.model_name.is_none() { self.tenant_id } else { None };
        self.routing_group.or(tenant)
    }

    /// The pool of a registration; its model must be named.
    pub(super) fn pool_key(&self) -> Result<PoolKey, Problem> {
        let missing = || Problem::wrong_field("model_name", "missing field `model_name`");
        Ok(PoolKey::new(self.model().ok_or_else(missing)?, self.group()))
    }
}
