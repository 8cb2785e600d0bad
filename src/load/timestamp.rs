//! The moment that an answer says it was made at.

use serde_json::Value;

/// Seconds of Unix time from a number of seconds, the same as text, or an ISO 8601 date and time; one without a
/// zone is taken as UTC. `None` for anything else, and what is not finite.
pub fn unix_seconds(value: &Value) -> Option<f64> {
    match value {
        Value::Number(seconds) => seconds.as_f64(),
        Value::String(text) => of_text(text),
        _ => None,
    }
    .filter(|seconds| seconds.is_finite())
}

/// The same from text alone.
pub fn of_text(text: &str) -> Option<f64> {
    let text = text.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Some(seconds).filter(|seconds| seconds.is_finite());
    }
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    // Minutes east of Greenwich.
    let (time, east) = match time.rfind(['Z', 'z', '+', '-']) {
        Some(at) if time[at..].eq_ignore_ascii_case("z") => (&time[..at], 0),
        Some(at) => (&time[..at], offset(&time[at..])?),
        None => (time, 0),
    };
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (time.next()?.parse::<i64>().ok()?, time.next()?.parse::<i64>().ok()?);
    let second = time.next().unwrap_or("0").parse::<f64>().ok()?;
    let valid = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (0..24).contains(&hour)
        && (0..60).contains(&minute)
        && (0.0..61.0).contains(&second)
        && (1970..=9999).contains(&year);
    valid.then(|| {
        let minutes = (days_since_1970(year, month, day) * 24 + hour) * 60 + minute - east;
        minutes as f64 * 60.0 + second
    })
}

/// `+02:00`, `-0530`, in minutes.
fn offset(text: &str) -> Option<i64> {
    let (sign, digits) = (if text.starts_with('-') { -1 } else { 1 }, text.get(1..)?.replace(':', ""));
    let (hours, minutes) = match digits.len() {
        2 => (digits.as_str(), "0"),
        4 => digits.split_at(2),
        _ => return None,
    };
    Some(sign * (hours.parse::<i64>().ok()? * 60 + minutes.parse::<i64>().ok()?))
}

/// Days from 1970-01-01 in the Gregorian calendar. Years begin in March, so that the leap day is the last.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// L18: what engines write as a timestamp, and what is none.
    #[test]
    fn numbers_and_dates_are_read() {
        let at = 1_764_551_730.5;
        for text in [
            "1764551730.5",
            "2025-12-01T01:15:30.5Z",
            "2025-12-01 01:15:30.500000",
            "2025-12-01T02:15:30.5+01:00",
            "2025-11-30T20:45:30.5-0430",
        ] {
            assert_eq!(unix_seconds(&json!(text)), Some(at), "{text}");
        }
        assert_eq!(unix_seconds(&json!(at)), Some(at));
        assert_eq!(unix_seconds(&json!("2024-02-29T00:00:00Z")), Some(1_709_164_800.0));
        for none in [
            json!(null),
            json!(""),
            json!("yesterday"),
            json!("2025-13-01T00:00:00Z"),
            json!("NaN"),
            json!([1]),
            json!("2025-12-01T01:15:30+1"),
            json!("2025-12-01Té:15:30+é1"),
        ] {
            assert_eq!(unix_seconds(&none), None, "{none}");
        }
    }
}
