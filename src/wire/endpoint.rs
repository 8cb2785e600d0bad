//! Endpoint texts: what may be dialled, what may be bound, wildcards mapped to addresses.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

/// An endpoint that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum BadEndpoint {
    /// Neither `tcp://` nor `ipc://`.
    #[error("{0:?} is neither tcp://HOST:PORT nor ipc://PATH")]
    Transport(String),
    /// No host, no port, or a port that is no number up to 65535.
    #[error("{0:?} needs a host and a port up to 65535")]
    HostPort(String),
    /// Port 0 names no publisher.
    #[error("{0:?} has port 0, which cannot be dialled")]
    PortZero(String),
    /// Engines that connect to us do so over TCP.
    #[error("{0:?} cannot be bound by a subscriber: only tcp can")]
    BindTransport(String),
}

/// A parsed endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// A host name or address (without brackets) and a port.
    Tcp {
        /// Host name, IPv4 or IPv6 address.
        host: String,
        /// The port; 0 only where it is bound.
        port: u16,
    },
    /// A Unix socket's path.
    Ipc(PathBuf),
}

impl Target {
    /// The endpoint to dial. An engine's wildcard (`*`, `0.0.0.0`, `::`) says that it listens everywhere; seen
    /// from here that is this host's loopback address.
    ///
    /// # Errors
    /// A text that is no `tcp` or `ipc` endpoint, or has port 0.
    pub fn to_dial(endpoint: &str) -> Result<Self, BadEndpoint> {
        match Self::parse(endpoint)? {
            Self::Tcp { port: 0, .. } => Err(BadEndpoint::PortZero(endpoint.to_owned())),
            Self::Tcp { host, port } => {
                let host = match host.as_str() {
                    "*" | "0.0.0.0" => "127.0.0.1".to_owned(),
                    "::" => "::1".to_owned(),
                    _ => host,
                };
                Ok(Self::Tcp { host, port })
            }
            ipc => Ok(ipc),
        }
    }

    /// The endpoint to bind: `*` is every IPv4 address, port 0 lets the system choose.
    ///
    /// # Errors
    /// A text that is no `tcp` or `ipc` endpoint.
    pub fn to_bind(endpoint: &str) -> Result<Self, BadEndpoint> {
        Ok(match Self::parse(endpoint)? {
            Self::Tcp { host, port } if host == "*" => Self::Tcp { host: "0.0.0.0".to_owned(), port },
            other => other,
        })
    }

    fn parse(endpoint: &str) -> Result<Self, BadEndpoint> {
        if let Some(path) = endpoint.strip_prefix("ipc://").filter(|path| !path.is_empty() && *path != "*") {
            return Ok(Self::Ipc(PathBuf::from(path)));
        }
        let address =
            endpoint.strip_prefix("tcp://").ok_or_else(|| BadEndpoint::Transport(endpoint.to_owned()))?;
        // The port follows the last colon, so that `tcp://[::1]:5557` and the unbracketed form both work.
        let (host, port) =
            address.rsplit_once(':').ok_or_else(|| BadEndpoint::HostPort(endpoint.to_owned()))?;
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        match port.parse() {
            Ok(port) if digits && !host.is_empty() => Ok(Self::Tcp { host: host.to_owned(), port }),
            _ => Err(BadEndpoint::HostPort(endpoint.to_owned())),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// R3: the port is what follows the last colon, IPv6 included; past 65535 is refused.
    #[test]
    fn reads_hosts_and_ports() {
        for (text, shown) in [
            ("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5557"),
            ("tcp://engine-0.svc:5557", "tcp://engine-0.svc:5557"),
            ("tcp://[::1]:5557", "tcp://[::1]:5557"),
            ("tcp://::1:5557", "tcp://[::1]:5557"),
            ("ipc:///run/kv_dp1", "ipc:///run/kv_dp1"),
        ] {
            assert_eq!(Target::to_dial(text).unwrap().to_string(), shown);
        }
        for text in ["tcp://h", "tcp://h:", "tcp://:1", "tcp://h:65536", "tcp://h:+1", "tcp://h:1x"] {
            assert_eq!(Target::to_dial(text), Err(BadEndpoint::HostPort(text.to_owned())));
        }
        for text in ["", "h:1", "inproc://x", "ipc://", "ipc://*", "TCP://h:1"] {
            assert_eq!(Target::to_dial(text), Err(BadEndpoint::Transport(text.to_owned())));
        }
        assert_eq!(Target::to_dial("tcp://h:0"), Err(BadEndpoint::PortZero("tcp://h:0".to_owned())));
    }

    /// `zeromq` looks a wildcard up as a host name, so it must never see one.
    #[test]
    fn wildcards_become_addresses() {
        assert_eq!(Target::to_dial("tcp://*:5557").unwrap().to_string(), "tcp://127.0.0.1:5557");
        assert_eq!(Target::to_dial("tcp://[::]:5557").unwrap().to_string(), "tcp://[::1]:5557");
        assert_eq!(Target::to_bind("tcp://*:0").unwrap().to_string(), "tcp://0.0.0.0:0");
        assert_eq!(Target::to_bind("tcp://[::]:5557").unwrap().to_string(), "tcp://[::]:5557");
    }
}
