//! Errors as answers: problem JSON (RFC 9457), with the fields that clients of the other systems read.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::ControlError;
use crate::fleet::{DeclareError, ErrorKind};
use crate::load::ReserveError;
use crate::routing::{PolicyError, Refusal, RefusalKind, SelectError};

/// An answer that says what is wrong with the request, or why it cannot be served now.
///
/// Rendered as `application/problem+json` with `type`, `title`, `status`, `detail` and, where one is at
/// fault, `field`, for a misspelt one `meant`, for a command that was given up `may_take_effect`; `error` (Dynamo) and `message` (Mooncake) repeat the detail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    status: StatusCode,
    name: &'static str,
    detail: String,
    field: Option<String>,
    meant: Option<&'static str>,
    may_take_effect: Option<bool>,
}

impl Problem {
    /// A problem of this kind; `name` is a stable word for programs, `detail` a sentence for people.
    pub fn new(status: StatusCode, name: &'static str, detail: impl Into<String>) -> Self {
        let detail = shortened(detail.into(), MAX_DETAIL);
        Self { status, name, detail, field: None, meant: None, may_take_effect: None }
    }

    /// 400: the request makes no sense, whatever the state of the fleet.
    pub fn bad_request(name: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, name, detail)
    }

    /// 404: something that the request names is not there.
    pub fn not_found(name: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, name, detail)
    }

    /// 422: the body is JSON, but one of its fields has the wrong type or is missing.
    pub fn wrong_field(field: &str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "wrong_field", detail).field(field)
    }

    /// The same problem, caused by this field of the request.
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(shortened(field.into(), MAX_FIELD));
        self
    }

    /// The same problem, with the name of the field that was meant.
    pub(super) fn meant(mut self, field: &'static str) -> Self {
        self.meant = Some(field);
        self
    }

    /// The same problem, saying whether what was asked for may be done all the same.
    pub(super) fn may_take_effect(mut self, may: bool) -> Self {
        self.may_take_effect = Some(may);
        self
    }

    /// The stable word for programs.
    #[cfg(test)]
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// What is wrong, in a sentence.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// A refused declaration; `called` translates the fleet's name of a field to the route's.
    pub(super) fn declare(error: &DeclareError, called: impl Fn(&'static str) -> &'static str) -> Self {
        let (status, name) = match error.kind() {
            ErrorKind::Invalid => (StatusCode::BAD_REQUEST, "invalid_declaration"),
            ErrorKind::Conflict => (StatusCode::CONFLICT, "conflict"),
        };
        Self::new(status, name, error.to_string()).field(called(error.field()))
    }

    /// What the writer's side answered; `called` as in [`Problem::declare`].
    pub(super) fn control(error: &ControlError, called: impl Fn(&'static str) -> &'static str) -> Self {
        match error {
            ControlError::Declare(error) => Self::declare(error, called),
            ControlError::Closed => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", error.to_string())
            }
        }
    }
}

/// Bytes of a detail: a sentence. A parser quotes what it was given, which may be megabytes.
const MAX_DETAIL: usize = 1_000;

/// Bytes of a field's path.
const MAX_FIELD: usize = 200;

fn shortened(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let end = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<SelectError> for Problem {
    fn from(error: SelectError) -> Self {
        match error {
            SelectError::Refused(refusal) => refusal.into(),
            SelectError::Policy(error) => error.into(),
            // The rank went between the choice and the booking: another try finds another.
            SelectError::Reserve(error @ ReserveError::NotDeclared { .. }) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "rank_gone", error.to_string())
            }
            SelectError::Reserve(error) => error.into(),
        }
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal.kind() {
            RefusalKind::BadRequest => StatusCode::BAD_REQUEST,
            RefusalKind::NotFound => StatusCode::NOT_FOUND,
            RefusalKind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            RefusalKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        };
        let problem = Self::new(status, refusal.name(), refusal.to_string());
        match refusal.field() {
            Some(field) => problem.field(field),
            None => problem,
        }
    }
}

impl From<PolicyError> for Problem {
    fn from(error: PolicyError) -> Self {
        Self::wrong_field(&format!("router_config_override.{}", error.field()), error.to_string())
    }
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    meant: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    may_take_effect: Option<bool>,
    error: &'a str,
    message: &'a str,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = Body {
            r#type: format!("urn:rankwise:problem:{}", self.name),
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            field: self.field.as_deref(),
            meant: self.meant,
            may_take_effect: self.may_take_effect,
            error: &self.detail,
            message: &self.detail,
        };
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            // Fleets and loads change within seconds, not milliseconds.
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
