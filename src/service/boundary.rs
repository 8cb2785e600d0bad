//! JSON at the boundary: bodies, worker ids, 64-bit hashes, names of pools, and which shape is answered.
//!
//! Inner types are not serialisable; what crosses the wire has its own types here and is converted by hand.

use std::fmt;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::{DeserializeOwned, Error, IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::fields::{Strays, Watched};
use super::problem::Problem;
use super::state::short;
use super::visit::Visit;
use crate::fleet::{IdForm, PoolKey};
use crate::ids::WorkerId;

/// A JSON object as the body of a request.
///
/// 415 without a JSON content type, 413 above the route's limit, 400 for what is no JSON, 422 for JSON of the
/// wrong shape or with a misspelt field; the problem names the field where there is one. Fields that nobody
/// knows are left with the [`Visit`].
pub(super) struct JsonBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        check_headers(request.headers())?;
        let visit = Visit::of(request.extensions());
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        visit.take_place(length).await;
        let bytes =
            Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => visit.too_large(),
                status => Problem::new(status, "unreadable_body", rejection.body_text()),
            })?;
        let mut strays = Strays::default();
        let value = parse(&bytes, &mut strays)?;
        visit.settle(strays)?;
        visit.begin();
        Ok(Self(value))
    }
}

/// JSON in UTF-8, as it is.
fn check_headers(headers: &HeaderMap) -> Result<(), Problem> {
    let refused = |name, detail: &str| Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, name, detail));
    let value = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_ascii_lowercase);
    let kind = value(header::CONTENT_TYPE).unwrap_or_default();
    let mut parts = kind.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default();
    if essence != "application/json" && !(essence.starts_with("application/") && essence.ends_with("+json")) {
        let detail = "the request needs the header `Content-Type: application/json`";
        return refused("content_type", detail);
    }
    let charset = parts.find_map(|part| part.strip_prefix("charset="));
    if charset.is_some_and(|charset| !matches!(charset.trim_matches('"'), "utf-8" | "utf8" | "us-ascii")) {
        return refused("charset", "JSON is read as UTF-8 alone; send it so");
    }
    match value(header::CONTENT_ENCODING).as_deref() {
        None | Some("identity") => Ok(()),
        Some(_) => {
            refused("content_encoding", "bodies are read as they are; send it without Content-Encoding")
        }
    }
}

/// Reads one JSON object and nothing behind it; what no field is called goes to `strays`.
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8], strays: &mut Strays) -> Result<T, Problem> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let detail = format!("the body is not UTF-8 from byte {} on; JSON is", error.valid_up_to());
        Problem::bad_request("not_utf8", detail)
    })?;
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
    let mut json = serde_json::Deserializer::from_str(text);
    let value = T::deserialize(Watched::new(&mut json, strays));
    if let Some(misspelt) = strays.misspelt.take() {
        return Err(misspelt.into());
    }
    if let Ok(value) = value
        && json.end().is_ok()
    {
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

/// Reads [`PoolNames`] from a body that has its five fields; a problem where they contradict each other.
macro_rules! pool_names {
    ($body:expr) => {
        $crate::service::boundary::PoolNames {
            model_name: $body.model_name.as_deref(),
            routing_group: $body.routing_group.as_deref(),
            model: $body.model.as_deref(),
            modelname: $body.modelname.as_deref(),
            tenant_id: $body.tenant_id.as_deref(),
        }
        .agreeing()
    };
}
pub(super) use pool_names;

impl<'a> PoolNames<'a> {
    /// The same names, if all mean one pool: a name that is passed over would have another one answered.
    pub(super) fn agreeing(self) -> Result<Self, Problem> {
        let differs = |field: &str, is: &str, other: &str, means: &str| {
            let detail = format!(
                "{field} {:?} differs from {other} {:?}; give one, or the same in both",
                short(is),
                short(means)
            );
            Err(Problem::bad_request("names_differ", detail).field(field))
        };
        let models = [("model_name", self.model_name), ("model", self.model), ("modelname", self.modelname)];
        let mut named = models.into_iter().filter_map(|(field, name)| Some((field, name?)));
        if let Some((other, means)) = named.next()
            && let Some((field, is)) = named.find(|(_, name)| *name != means)
        {
            return differs(field, is, other, means);
        }
        let Some(tenant) = self.tenant_id else { return Ok(self) };
        match self.routing_group {
            Some(group) if group_of(group) != group_of(tenant) => {
                differs("tenant_id", tenant, "routing_group", group)
            }
            None if self.model_name.is_some() && group_of(tenant) != PoolKey::DEFAULT_GROUP => {
                let detail = format!(
                    "tenant_id {:?} is no group beside model_name, whose group is `default`: name it as \
                     routing_group, or the model as `model`",
                    short(tenant)
                );
                Err(Problem::bad_request("names_differ", detail).field("tenant_id"))
            }
            _ => Ok(self),
        }
    }

    pub(super) fn shape(&self) -> Shape {
        let dynamo = self.model_name.is_some() || self.routing_group.is_some();
        let mooncake = self.model.is_some() || self.modelname.is_some() || self.tenant_id.is_some();
        if mooncake && !dynamo { Shape::Mooncake } else { Shape::Dynamo }
    }

    /// The model, if one is named.
    pub(super) fn model(&self) -> Option<&'a str> {
        self.model_name.or(self.model).or(self.modelname)
    }

    /// The group.
    pub(super) fn group(&self) -> Option<&'a str> {
        self.routing_group.or(self.tenant_id)
    }

    /// The pool of a registration; its model must be named.
    pub(super) fn pool_key(&self) -> Result<PoolKey, Problem> {
        let missing = || Problem::wrong_field("model_name", "missing field `model_name`");
        Ok(PoolKey::new(self.model().ok_or_else(missing)?, self.group()))
    }
}

/// An empty group is the default one.
fn group_of(group: &str) -> &str {
    if group.is_empty() { PoolKey::DEFAULT_GROUP } else { group }
}
